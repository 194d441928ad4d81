-- Services: replicas that stay up, in whole gangs. How they are stored, stopped, rolled back and
-- deleted; set_service (130) makes and changes them.
--
-- A service is a number of replicas in services_table, and what they run, in service_revisions. Its
-- gangs are gangs like all others: they wait in a queue, count against limits, have a priority and
-- may be displaced. Their rows in service_gangs_table are written in the transaction that submits
-- them. A gang restarts by its own policy for as long as it lives. When it has ended, the tick
-- submits another one (133). Replicas say when they are ready (131).
--
-- A reply that is lost: every verb may be repeated.
-- Locks: rows of services, before all others but schedules.

-- Internal. The queue that a service submits to.
create function gangq.service_queue(s gangq.services_table) returns text
language sql stable as $$
  select gangq.queue_for(r.work ->> 'queue', r.task)
  from gangq.service_revisions r
  where r.service = (s).name and r.revision = (s).revision
$$;

-- Internal. Locks and returns a service that the caller may change. Raises GQ002, 42501, 55P03.
create function gangq.own_service(verb text, name text) returns gangq.services_table
language plpgsql as $$
declare
  s gangq.services_table;
begin
  select x.* into s from gangq.services_table x where x.name = own_service.name for update;
  perform gangq.refuse_unknown('service', own_service.name, array(
      select x.name::text from gangq.services_table x),
    'Names are in gangq.services.')
  where not found;
  perform gangq.check_own(verb, format('service %L', s.name), s.submitter, s.login,
    gangq.service_queue(s));
  return s;
end $$;

-- Internal. Writes a service whose row is locked.
create function gangq.keep_service(s gangq.services_table) returns void language sql as $$
  update gangq.services_table x
  set (name, replicas, stopped, deleting, revision, good_revision, halted, surge, ready_within_s,
    linger_s, failures, next_try_at, problem, submitter, login, set_at, source, declared_replicas,
    undeclared_at)
    = (select (s).*)
  where x.name = (s).name
$$;

-- Internal. The service, without what was held against its revision.
create function gangq.try_again(s gangq.services_table) returns gangq.services_table
language plpgsql immutable as $$
begin
  s.halted := null;
  s.failures := 0;
  s.next_try_at := null;
  s.problem := null;
  return s;
end $$;

-- No replica of a service is wanted from now on, until set_service. Its gangs leave the endpoints
-- and are told to stop linger_s later. Can be repeated. Raises GQ002, 42501.
create function gangq.stop_service(name text) returns void language plpgsql as $$
declare
  s gangq.services_table := gangq.own_service('stop', name);
begin
  if not s.stopped then
    update gangq.services_table x set stopped = true where x.name = s.name;
    perform gangq.log_event(gangq.now(), 'stop_service',
      data => jsonb_build_object('service', s.name));
    perform gangq.wake_tick(true);
  end if;
end $$;

-- Stops a service; it is forgotten once its last gang has ended. set_service keeps it until then, a
-- program that declares it too. Can be repeated. Raises GQ002, 42501.
create function gangq.delete_service(name text) returns void language plpgsql as $$
declare
  s gangq.services_table := gangq.own_service('delete', name);
begin
  if not s.deleting then
    update gangq.services_table x set deleting = true where x.name = s.name;
    perform gangq.log_event(gangq.now(), 'delete_service',
      data => jsonb_build_object('service', s.name));
    perform gangq.wake_tick(true);
  end if;
end $$;

-- A service is to be of another revision again, which replaces the present one as an update does.
-- to_revision null: the last other one of which all replicas were ready; the present one: an update
-- that has halted is tried again. Returns the number of the revision. Raises GQ002, 42501.
create function gangq.roll_back_service(name text, to_revision integer default null)
returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  s gangq.services_table := gangq.own_service('roll back', name);
  r gangq.service_revisions;
begin
  select x.* into r from gangq.service_revisions x
  where x.service = s.name and case
    when to_revision is not null then x.revision = to_revision
    when s.good_revision <> s.revision then x.revision = s.good_revision
    else x.good_at is not null and x.revision <> s.revision end
  order by x.good_at desc nulls last limit 1;
  perform gangq.refuse('GQ002', case
      when to_revision is null
        then format('service %L has no other revision that was ever ready', name)
      else format('service %L has no revision %s', name, to_revision) end,
    format('It has: %s.', array_to_string(array(
      select x.revision from gangq.service_revisions x where x.service = s.name order by 1),
      ', ')))
  where not found;
  s.revision := r.revision;
  s.replicas := gangq.within_limits(s.replicas,
    (select x from gangq.scaling_table x where x.service = s.name), r.gang_size);
  s := gangq.try_again(s);
  perform gangq.keep_service(s);
  perform gangq.log_event(t, 'roll_back_service',
    data => jsonb_build_object('service', s.name, 'revision', s.revision));
  perform gangq.wake_tick(true);
  return s.revision;
end $$;

-- Says that the program source declares the services of these names and no others. Those that it
-- declared before are marked and returned, and go on: delete_service ends them. For services that
-- the caller may change. Raises GQ001, GQ007, 55P03.
create function gangq.declare_services(source text, names text[]) returns setof text
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  s gangq.services_table;
begin
  perform gangq.check_declared('service', source, names);
  for s in
    select x.* from gangq.services_table x
    where x.source = declare_services.source
      and (select gangq.owned(x.submitter, x.login, gangq.service_queue(x)))
    order by x.name for update
  loop
    if s.name = any (names) then
      update gangq.services_table x set undeclared_at = null
      where x.name = s.name and x.undeclared_at is not null;
      continue;
    elsif s.undeclared_at is null then
      update gangq.services_table x set undeclared_at = t where x.name = s.name;
      perform gangq.log_event(t, 'undeclared',
        data => jsonb_build_object('service', s.name, 'source', source));
    end if;
    return next s.name;
  end loop;
end $$;
