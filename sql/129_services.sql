-- Services: replicas that stay up, in whole gangs: set_service, stop_service, roll_back_service,
-- delete_service; what replicas say of themselves (report_ready, report_load); the step of the tick
-- that keeps what is wanted; the views services, service_gangs and endpoints.
--
-- A service is a number of replicas in services_table, and what they run, in service_revisions. Its
-- gangs are gangs like all others: they wait in a queue, count against limits, have a priority and
-- may be displaced. Their rows in service_gangs_table are written in the transaction that submits
-- them. A gang restarts by its own policy for as long as it lives. When it has ended, the tick
-- submits another one.
--
-- The tick, for each service, again and again until nothing is left to do:
-- 1. A gang that has ended is forgotten. If it was wanted, that is a failure: the next gang is made
--    after a backoff that doubles with each failure in a row, and an event says so.
-- 2. A gang of which a member has not been ready for ready_within_s leaves. A failure, too.
-- 3. A gang leaves that is not wanted: of another revision, on a host that is drained, or one too
--    many. It leaves the endpoints at once and is told to stop linger_s later. One that is ready
--    leaves only if enough others are ready.
-- 4. A gang is made if too few are of the wanted revision and on hosts that are not drained.
-- So an update, a move and a change of the number are one rule. Its invariants, where one size is
-- that of a gang of the wanted revision:
--    a gang is made only if all replicas, leaving ones included, <= wanted + (surge - 1) * size
--    a ready gang leaves only if the ready replicas that stay >= wanted
-- With surge 0 one that is replaced leaves if those that stay >= wanted - size, or if the gang that
-- is to replace it waits for room; and only while no other gang starts or leaves.
--
-- If a gang of a new revision fails before it was ever ready, and an older revision was good, the
-- update halts: what is ready of either stays, and what is lacking is made of the older one.
--
-- A replica is ready when it, or its worker that polls its health URL, has said so with the token
-- of its claim. A gang is in the view endpoints when all its members run and are ready, none of
-- their workers is flagged, and it does not leave. One snapshot shows a gang whole or not at all,
-- because what takes a member out of the state running changes its gang or all its members in the
-- same transaction. Whatever changes the endpoints notifies gangq_endpoints when it commits, with
-- the name of the service. Two members that become ready at the same time do not see each other:
-- so each of them notifies, whether or not the gang seems whole to it.
--
-- Two ticks: the row of the service is locked with skip locked, and read again under the lock. A
-- tick that dies has made a gang together with its row, or neither. A reply that is lost: every
-- verb may be repeated.
--
-- Locks: rows of services, before all others but schedules; then gangs and jobs as every step of
-- the tick does, with skip locked, and what submit_gang locks, for 100 ms at most. report_ready and
-- report_load lock the replica's own row.

-- The options of set_service. surge: so many gangs more than wanted while one replaces another (1);
-- with 0 an old one stops first. ready_within_s: a replica that is not ready for so long is
-- replaced (600). linger_s: how long a gang goes on between leaving the endpoints and being told to
-- stop (5). health: a path at the port of each replica, or a URL, that its worker polls: it is
-- ready while that answers with a status below 400; none: the replica says so itself. version: a
-- text that makes a new revision where nothing else has changed. stopped: no replica is wanted.
-- source: the program that declares the service: then replicas counts only where it is another
-- number than source declared before, so that what was scaled by hand stays. The others scale it,
-- see 131_scaling.sql; max_replicas 0: not any more.
create type gangq.service_options as (
  surge gangq.up_to_1000, ready_within_s gangq.seconds, linger_s gangq.delay, health gangq.health,
  version gangq.name, stopped boolean, source gangq.name, min_replicas gangq.members,
  max_replicas gangq.count, target_load gangq.weight, target_depth gangq.weight,
  depth_of gangq.name, up_after_s gangq.delay, down_after_s gangq.delay
);

-- The arguments of set_service that are checked like options.
create type gangq.service_arguments as (
  name gangq.name, task gangq.name, gang gangq.members, work gangq.object
);

-- Whose it is -------------------------------------------------------------------------------------

-- Internal. The queue that a service submits to.
create function gangq.service_queue(s gangq.services_table) returns text
language sql stable as $$
  select coalesce(r.work ->> 'queue',
    (select o.queue from gangq.task_options o where o.task = r.task), 'default')
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
  if not found then
    perform gangq.refuse_unknown('service', own_service.name, array(
        select x.name::text from gangq.services_table x),
      'Names are in gangq.services.');
  end if;
  perform gangq.check_keeper(verb, 'service', s.name, s.submitter, s.login,
    gangq.service_queue(s));
  return s;
end $$;

-- Internal. Writes a service whose row is locked.
create function gangq.keep_service(s gangq.services_table) returns void language sql as $$
  update gangq.services_table x
  set (replicas, stopped, deleting, revision, good_revision, halted, surge, ready_within_s,
    linger_s, failures, next_try_at, problem, submitter, login, set_at, source, declared_replicas,
    undeclared_at)
    = (select (s).replicas, (s).stopped, (s).deleting, (s).revision, (s).good_revision, (s).halted,
      (s).surge, (s).ready_within_s, (s).linger_s, (s).failures, (s).next_try_at, (s).problem,
      (s).submitter, (s).login, (s).set_at, (s).source, (s).declared_replicas, (s).undeclared_at)
  where x.name = (s).name
$$;

-- Internal. Writes an event about a service.
create function gangq.log_service(
  kind text, t timestamptz, service text, about jsonb default '{}', reason text default null,
  gang_id bigint default null
) returns void language sql as $$
  select gangq.log_event(t, kind, gang_id => log_service.gang_id, reason => log_service.reason,
    data => jsonb_build_object('service', service) || about)
$$;

-- Set, stopped, rolled back, deleted --------------------------------------------------------------

-- Internal. How many replicas are wanted now.
create function gangq.wanted(s gangq.services_table) returns integer language sql immutable as $$
  select case when (s).stopped or (s).deleting then 0 else (s).replicas end
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

-- Internal. So many replicas, rounded up to whole gangs.
create function gangq.whole_gangs(replicas integer, size integer) returns integer
language sql immutable as $$ select (replicas + size - 1) / size * size $$;

-- Internal. Checks what a service is to run. Raises GQ001, GQ002, GQ007.
create function gangq.check_revision(r gangq.service_revisions) returns void
language plpgsql as $$
declare
  w record := gangq.read_work(r.work || jsonb_build_object('size', r.gang_size), 'service');
  o gangq.gang_options := gangq.read_options('set_service', w.options, null::gangq.gang_options);
begin
  perform gangq.refuse('GQ001', x.what, x.hint) from (values
    (num_nonnulls(o.roles::text, o.min_size::text, o.payloads::text, o.completion) > 0,
      'the replicas of a service are all alike, and all its members serve',
      'Leave out roles, min_size, payloads and completion.'),
    (o.failure_policy = 'shrink', 'the gangs of a service do not shrink',
      'Take restart_gang (the default), restart_member or fail.'),
    (o.timeout_style = 'soft', 'the members of a service do not run as single jobs',
      'Take timeout_style requeue (the default) or hard.')
  ) as x(wrong, what, hint)
  where x.wrong;
  perform gangq.refuse_larger('the payload of a service', pg_column_size(r.payload), 1048576);
  perform gangq.refuse_larger('the work of a service', pg_column_size(r.work), 262144);
  perform gangq.queue_named(r.work ->> 'queue') where r.work ->> 'queue' is not null;
end $$;

-- Internal. Stores a new revision of a service, whose row is locked, and returns its number. Raises
-- what check_revision raises.
create function gangq.add_revision(r gangq.service_revisions, old integer, t timestamptz)
returns integer language plpgsql as $$
begin
  perform gangq.check_revision(r);
  r.revision := 1 + coalesce((
    select max(x.revision) from gangq.service_revisions x where x.service = r.service), 0);
  r.set_at := t;
  r.good_at := null;
  insert into gangq.service_revisions values (r.*);
  -- The tenth last is not needed by any gang, as long as none of so old a revision is left.
  delete from gangq.service_revisions x
  where x.service = r.service and x.revision <= r.revision - 10 and x.revision <> old
    and not exists (
      select from gangq.services_table s
      where s.name = x.service and s.good_revision = x.revision)
    and not exists (
      select from gangq.service_gangs_table g
      where g.service = x.service and g.revision = x.revision);
  return r.revision;
end $$;

-- Internal. Raises GQ007 if this login, unless it is an admin, has 200 services.
create function gangq.check_new_service() returns void language plpgsql stable as $$
begin
  if (select count(*) from gangq.services_table s where s.login = session_user) >= 200
    and not gangq.is_admin()
  then
    perform gangq.refuse('GQ007', format('%s has 200 services, which is the most', session_user),
      'Each of them is work for every tick. Delete those that are not needed.');
  end if;
end $$;

-- Internal. Locks the service of this name, or makes it, of revision 0. Raises GQ001, GQ007, 55P03.
create function gangq.service_to_set(name text, task text, t timestamptz)
returns gangq.services_table language plpgsql as $$
declare
  s gangq.services_table;
begin
  loop
    select x.* into s from gangq.services_table x where x.name = service_to_set.name for update;
    exit when found;
    perform gangq.refuse('GQ001', format('service %L is new and has no task', name),
      'Say what its replicas run: gangq.set_service(''chat'', ''serve'').') where task is null;
    perform gangq.check_new_service();
    insert into gangq.services_table (name, replicas, stopped, revision, surge, ready_within_s,
      linger_s, submitter, login, set_at)
    values (service_to_set.name, 1, false, 0, 1, 600, 5, gangq.caller(), session_user, t)
    on conflict do nothing returning * into s;
    exit when found;
  end loop;
  return s;
end $$;

-- Internal. A revision, with what is given of another one. Of what a program declares nothing stays
-- that it does not say any more.
create function gangq.revised(
  old gangq.service_revisions, given gangq.service_revisions, o gangq.service_options
) returns gangq.service_revisions language plpgsql immutable as $$
declare
  kept gangq.service_revisions;
  r gangq.service_revisions := old;
begin
  if o.source is null then
    kept := old;
  end if;
  r.service := given.service;
  r.task := coalesce(given.task, r.task);
  r.payload := coalesce(nullif(given.payload, 'null'), r.payload, '{}');
  r.gang_size := coalesce(given.gang_size, r.gang_size, 1);
  r.work := coalesce((
    select jsonb_object_agg(e.key, e.value)
    from jsonb_each(coalesce(kept.work, '{}') || coalesce(given.work, '{}')) e
    where e.value <> 'null'), '{}');
  r.health := nullif(coalesce(o.health, kept.health), 'none');
  r.version := coalesce(o.version, kept.version);
  return r;
end $$;

-- Internal. A service as these options and this number of replicas leave it. Raises GQ001.
create function gangq.service_as_set(
  s gangq.services_table, size integer, replicas integer, o gangq.service_options
) returns gangq.services_table language plpgsql immutable as $$
begin
  perform gangq.refuse('GQ001', format('replicas is %s', replicas),
    'It is from 1 to 100000, rounded up to whole gangs. To want none, stop it: '
    'gangq.stop_service, or the option stopped.')
  where replicas < 1 or replicas > 100000;
  if o.source is null or s.declared_replicas is distinct from replicas then
    s.replicas := coalesce(replicas, case when s.revision = 0 then size end, s.replicas);
  end if;
  s.replicas := gangq.whole_gangs(s.replicas, size);
  -- What a program declares does not start again what was stopped by hand.
  s.stopped := coalesce(o.stopped, case when o.source is not null then s.stopped end, false);
  s.deleting := s.deleting and o.source is not null;
  s.surge := coalesce(o.surge, s.surge);
  s.ready_within_s := coalesce(o.ready_within_s, s.ready_within_s);
  s.linger_s := coalesce(o.linger_s, s.linger_s);
  s.source := coalesce(o.source, s.source);
  s.declared_replicas := case when o.source is null then s.declared_replicas else replicas end;
  return s;
end $$;

-- Makes a service, or changes what is given of it: set_service('chat', 'serve', replicas => 4, gang
-- => 2). replicas of the task, with this payload, are kept running, in gangs of so many members
-- (1): replicas are rounded up to whole gangs, one gang at least. work: what else submit_gang is
-- given by name, {"gpus": 1, "priority": 5}: a key that is left out stays, one that is null is
-- taken away. Its members have no budget and one attempt unless it says so. options: surge,
-- ready_within_s, linger_s, health, version, stopped; min_replicas, max_replicas, target_load,
-- target_depth, depth_of, up_after_s and down_after_s scale it; see \dT+ gangq.service_options.
-- Another task, payload, gang, work, health or version is a new revision: its gangs replace the old
-- ones, one after the other, each once it is ready. Gangs are submitted by the tick, with the
-- rights of who stored the service last. Also starts a service that was stopped. Returns made,
-- changed or same. Raises GQ001, GQ002 (no such queue), GQ007, 42501 (another login stored it),
-- 55P03.
create function gangq.set_service(
  name text, task text default null, payload jsonb default null, replicas integer default null,
  gang integer default null, work jsonb default null, options jsonb default '{}'
) returns text language plpgsql as $$
declare
  t timestamptz := gangq.now();
  o gangq.service_options;
  s gangq.services_table;
  old gangq.services_table;
  r gangq.service_revisions;
  before gangq.service_revisions;
  x gangq.scaling_table;
  scaled gangq.scaling_table;
begin
  o := gangq.read_options('set_service', coalesce(options, '{}'), o);
  perform gangq.read_options('set_service', jsonb_strip_nulls(jsonb_build_object('name', name,
    'task', task, 'gang', gang, 'work', work)), null::gangq.service_arguments);
  perform gangq.refuse('GQ001', 'a service has a name',
    'Call gangq.set_service(''chat'', ''serve'').') where name is null;
  old := gangq.service_to_set(name, task, t);
  select y.* into before from gangq.service_revisions y
  where y.service = old.name and y.revision = old.revision;
  r := gangq.revised(before, (name, null, task, payload, gang, nullif(work, 'null'), null, null,
    null, null)::gangq.service_revisions, o);
  s := gangq.service_as_set(old, r.gang_size, replicas, o);
  select y.* into scaled from gangq.scaling_table y where y.service = old.name;
  x := gangq.scaling_as_set(scaled, name, o);
  s.replicas := gangq.within_limits(s.replicas, x, r.gang_size);
  if s is not distinct from old and r is not distinct from before
    and (x is not distinct from scaled or num_nonnulls(x.service, scaled.service) = 0)
    -- Workers of several logins may declare one service: as in set_schedule.
    and (old.login = session_user or gangq.may_act_as('gangq_worker'))
    and gangq.may_submit(old.submitter, old.login)
  then
    return 'same';
  end if;
  if old.revision > 0 then
    perform gangq.check_keeper('change', 'service', old.name, old.submitter, old.login,
      gangq.service_queue(old));
  end if;
  if r is distinct from before then
    s.revision := gangq.add_revision(r, old.revision, t);
    s := gangq.try_again(s);
  end if;
  s.submitter := gangq.caller();
  s.login := session_user;
  s.set_at := t;
  perform gangq.keep_service(s);
  perform gangq.keep_scaling(s.name, x);
  perform gangq.log_service('set_service', t, s.name, jsonb_build_object(
    'replicas', s.replicas, 'revision', s.revision, 'stopped', s.stopped));
  perform gangq.wake_tick(true);
  return case when old.revision = 0 then 'made' else 'changed' end;
end $$;

-- No replica of a service is wanted from now on, until set_service. Its gangs leave the endpoints
-- and are told to stop linger_s later. Can be repeated. Raises GQ002, 42501.
create function gangq.stop_service(name text) returns void language plpgsql as $$
declare
  s gangq.services_table := gangq.own_service('stop', name);
begin
  if s.stopped then
    return;
  end if;
  s.stopped := true;
  perform gangq.keep_service(s);
  perform gangq.log_service('stop_service', gangq.now(), s.name);
  perform gangq.wake_tick(true);
end $$;

-- Stops a service; it is forgotten once its last gang has ended. set_service before that keeps it.
-- Can be repeated. Raises GQ002, 42501.
create function gangq.delete_service(name text) returns void language plpgsql as $$
declare
  s gangq.services_table := gangq.own_service('delete', name);
begin
  if s.deleting then
    return;
  end if;
  s.deleting := true;
  perform gangq.keep_service(s);
  perform gangq.log_service('delete_service', gangq.now(), s.name);
  perform gangq.wake_tick(true);
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
  if not found then
    perform gangq.refuse('GQ002', case
        when to_revision is null
          then format('service %L has no other revision that was ever ready', name)
        else format('service %L has no revision %s', name, to_revision) end,
      format('It has: %s.', array_to_string(array(
        select x.revision from gangq.service_revisions x where x.service = s.name order by 1),
        ', ')));
  end if;
  s.revision := r.revision;
  s.replicas := gangq.whole_gangs(s.replicas, r.gang_size);
  s := gangq.try_again(s);
  perform gangq.keep_service(s);
  perform gangq.log_service('roll_back_service', t, s.name,
    jsonb_build_object('revision', s.revision));
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
  if (source <> '' and length(source) <= 200) is not true then
    perform gangq.refuse('GQ001', 'source is no text of 1 to 200 characters',
      'It names the program: source => ''tasks:app''.');
  end if;
  perform gangq.refuse_larger('the names of services', pg_column_size(names), 262144);
  for s in
    select x.* from gangq.services_table x
    where x.source = declare_services.source
      and (gangq.is_admin() or x.login = session_user
        or gangq.service_queue(x) = any (gangq.shared_queues()))
    order by x.name for update
  loop
    if s.name = any (names) then
      update gangq.services_table x set undeclared_at = null
      where x.name = s.name and x.undeclared_at is not null;
      continue;
    elsif s.undeclared_at is null then
      update gangq.services_table x set undeclared_at = t where x.name = s.name;
      perform gangq.log_service('undeclared', t, s.name, jsonb_build_object('source', source));
    end if;
    return next s.name;
  end loop;
end $$;

-- What replicas say -------------------------------------------------------------------------------

-- Internal. Notifies who follows the endpoints of the services of these gangs.
create function gangq.endpoints_changed(gang_ids bigint[]) returns void language sql as $$
  select pg_notify('gangq_endpoints', s.service)
  from (
    select distinct g.service from gangq.live_gangs g
    where g.id = any (gang_ids) and g.service is not null) s
$$;

-- Internal. The replica that holds this claim. Raises GQ002, GQ003, GQ004, 42501.
create function gangq.serving(job_id bigint, token bigint) returns gangq.live_jobs
language plpgsql stable as $$
declare
  j gangq.live_jobs;
begin
  select x.* into j from gangq.live_jobs x where x.id = serving.job_id;
  if not found or j.token is distinct from serving.token or j.state <> 'running' then
    perform gangq.refuse_stale(serving.job_id, serving.token);
  elsif not exists (
    select from gangq.live_gangs g where g.id = j.gang_id and g.service is not null)
  then
    perform gangq.refuse('GQ004', format('job %s is no replica of a service', j.id),
      'gangq.set_service makes services; gangq.barrier names the one of a job.');
  end if;
  perform gangq.check_login(j.incarnation);
  return j;
end $$;

-- A replica of a service takes requests from now on, or ready => false, does not. port: where, at
-- the address of its worker; without one it has no endpoint of its own (rank 1 of a model that rank
-- 0 serves). Its gang is in gangq.endpoints while all its members are ready. Can be repeated.
-- Raises GQ001, GQ002, GQ003 (not this claim any more, or told to stop), GQ004 (no replica of a
-- service), 42501.
create function gangq.report_ready(
  job_id bigint, token bigint, ready boolean default true, port integer default null
) returns void language plpgsql as $$
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs := gangq.serving(job_id, token);
begin
  if port not between 1 and 65535 then
    perform gangq.refuse('GQ001', format('port is %s', port), 'It is from 1 to 65535.');
  end if;
  insert into gangq.replicas as r (job_id, token, gang_id, ready, since, port)
  values (j.id, j.token, j.gang_id, coalesce(report_ready.ready, true), t, report_ready.port)
  on conflict on constraint replicas_pkey do update
  set token = excluded.token, ready = excluded.ready, since = excluded.since,
    port = coalesce(excluded.port, case when r.token = excluded.token then r.port end),
    load = case when r.token = excluded.token then r.load end,
    load_at = case when r.token = excluded.token then r.load_at end
  where r.token < excluded.token
    or r.token = excluded.token and (r.ready <> excluded.ready
      or r.port is distinct from coalesce(excluded.port, r.port));
  if found then
    perform gangq.endpoints_changed(array[j.gang_id]);
    perform gangq.wake_tick(true);
  end if;
end $$;

-- How busy a replica of a service is: any number, 0 or more, of which 1 is as much as a replica
-- should have. The latest is kept. Raises GQ001, GQ002, GQ003, GQ004, 42501.
create function gangq.report_load(job_id bigint, token bigint, load numeric) returns void
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs := gangq.serving(job_id, token);
begin
  if (load >= 0 and load <= 1e9) is not true then
    perform gangq.refuse('GQ001', format('load is %s', coalesce(load::text, 'null')),
      'It is a number, 0 or more: 1 is as busy as a replica should be.');
  end if;
  insert into gangq.replicas as r (job_id, token, gang_id, ready, since, load, load_at)
  -- Rounded: what is nearly 0 has no value in a real.
  values (j.id, j.token, j.gang_id, false, t, round(report_load.load, 6), t)
  on conflict on constraint replicas_pkey do update
  set token = excluded.token, load = excluded.load, load_at = excluded.load_at,
    ready = r.token = excluded.token and r.ready,
    since = case when r.token = excluded.token then r.since else excluded.since end,
    port = case when r.token = excluded.token then r.port end
  where r.token <= excluded.token;
end $$;

-- Kept --------------------------------------------------------------------------------------------

-- What the tick knows of a gang of a service. state null: it has ended. ready: all its members are.
-- late: why it is replaced, if a member has not been ready for too long. outdated: another gang is
-- to take its place.
create type gangq.service_fact as (
  gang_id bigint, revision integer, size integer, made_at timestamptz, ready_at timestamptz,
  stop_at timestamptz, state text, cancelling boolean, ready boolean, late text, outdated boolean,
  load real
);

-- Internal. The gangs of a service, as the tick sees them.
create function gangq.service_facts(s gangq.services_table, t timestamptz)
returns setof gangq.service_fact language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  outage timestamptz := (select x.outage_ended_at from gangq.tick_state x);
  made_of integer := case when (s).halted is null then (s).revision end;
begin
  return query
  select k.gang_id, k.revision, k.size, k.made_at, k.ready_at, k.stop_at, g.state,
    coalesce(g.cancelling, false), coalesce(m.ready and g.missing_since is null, false),
    case when g.state = 'running' and g.missing_since is null then m.late end,
    coalesce(m.drained and (s).surge > 0, false) or coalesce(k.revision <> made_of, false), m.load
  from gangq.service_gangs_table k
  left join gangq.live_gangs g on g.id = k.gang_id
  cross join lateral (
    select count(*) filter (
        where j.state = 'running' and r.ready and i.flagged_at is null) = k.size as ready,
      -- A worker that is silent could not have said that its replica is ready.
      min(format('rank %s has not been ready for %s s', j.rank,
          round(extract(epoch from t - x.since)::numeric)))
        filter (where j.state = 'running' and r.ready is not true and i.flagged_at is null
          and x.since <= t - make_interval(secs => (s).ready_within_s)) as late,
      bool_or(j.state in ('reserved', 'running') and exists (
        select from gangq.cordons c
        where c.drain and gangq.is_at(i, c.kind, c.name))) as drained,
      (avg(r.load) filter (where r.load_at > t - interval '60 s'))::real as load
    from gangq.live_jobs j
    left join gangq.replicas r on r.job_id = j.id and r.token = j.token
    left join gangq.incarnations i on i.id = j.incarnation
    cross join lateral (
      select greatest(g.go_at, j.claimed_at, r.since, outage) as since) x
    where j.gang_id = k.gang_id) m
  where k.service = (s).name;
end $$;

-- Replicas of a service, counted. made_of: the revision that gangs are made of now, one_gang: the
-- size of those. replicas: of all gangs; present: of those that are to stay; ready: that take
-- requests and have not left; starting, waiting, outdated, leaving: whether there is such a gang.
create type gangq.service_counts as (
  want integer, made_of integer, one_gang integer, replicas bigint, present bigint, ready bigint,
  ready_of_revision bigint, starting boolean, waiting boolean, outdated boolean, leaving boolean
);

-- Internal. The counts of a service that has these gangs.
create function gangq.count_gangs(s gangq.services_table, f gangq.service_fact[])
returns gangq.service_counts language sql stable as $$
  select gangq.wanted(s), m.made_of, (
      select r.gang_size from gangq.service_revisions r
      where r.service = (s).name and r.revision = m.made_of),
    coalesce(sum(x.size), 0),
    coalesce(sum(x.size) filter (where x.stop_at is null and not x.outdated), 0),
    coalesce(sum(x.size) filter (where x.stop_at is null and x.ready), 0),
    coalesce(sum(x.size) filter (
      where x.stop_at is null and x.ready and x.revision = (s).revision), 0),
    coalesce(bool_or(x.stop_at is null and not x.outdated and not x.ready
      and x.state in ('reserved', 'running', 'draining')), false),
    coalesce(bool_or(x.stop_at is null and not x.outdated and x.state = 'blocked'), false),
    coalesce(bool_or(x.stop_at is null and x.outdated), false),
    coalesce(bool_or(x.stop_at is not null), false)
  from (
    select case when (s).halted is null then (s).revision else (s).good_revision end as made_of) m
  left join unnest(f) x on true
  group by m.made_of
$$;

-- Internal. The gangs that are to leave, and why. place: first what is not placed, then what is not
-- ready, then what has the least to do. What does not say how busy it is may be the busiest.
create function gangq.gangs_to_leave(
  s gangq.services_table, f gangq.service_fact[], n gangq.service_counts
) returns table (gang_id bigint, why text, place integer) language sql stable as $$
  select x.gang_id, case
      when n.want = 0 then 'the service is stopped'
      when x.revision <> n.made_of then format('revision %s replaces %s', n.made_of, x.revision)
      when x.outdated then 'its host is drained'
      else format('%s are wanted', gangq.counted(n.want, 'replica')) end,
    row_number() over (order by x.outdated desc, x.state in ('waiting', 'blocked') desc,
      x.ready, x.load, x.made_at desc, x.gang_id desc)::integer
  from unnest(f) x
  where x.state is not null and x.stop_at is null and (
    n.want = 0
    or x.outdated and (not x.ready or n.ready - x.size >= n.want
      or (s).surge = 0 and not n.starting and not n.leaving
        and (n.waiting or n.ready - x.size >= n.want - n.one_gang))
    or not x.outdated and n.present - x.size >= n.want
      and (not x.ready or n.ready - x.size >= n.want))
$$;

-- Internal. What the tick does next for a service; action null: nothing. One thing that is to be
-- done. Each is done before the next is asked for, so each rule sees what the rules before it have
-- done. busy: gangs that another transaction holds.
create function gangq.service_step(
  s gangq.services_table, t timestamptz, busy bigint[] default '{}',
  out action text, out gang_id bigint, out why text
) language plpgsql stable as $$
declare
  f gangq.service_fact[] := array(select x from gangq.service_facts(s, t) x);
  n gangq.service_counts := gangq.count_gangs(s, f);
begin
  select d.action, d.gang_id, d.why into action, gang_id, why
  from (
    select 1 as rule, 'ended' as action, x.gang_id, null as why, 0 as place
    from unnest(f) x where x.state is null
    union all
    select 2, 'stop', x.gang_id, null, 0
    from unnest(f) x
    where x.stop_at <= t and x.state is not null and not x.cancelling
    union all
    select 3, 'late', x.gang_id, x.late, 0
    from unnest(f) x where x.late is not null and x.stop_at is null
    union all
    select 4, 'ready', x.gang_id, null, 0
    from unnest(f) x where x.ready and x.ready_at is null and x.stop_at is null
    union all
    select 5, 'good', null, null, 0
    where (s).good_revision is distinct from (s).revision and (s).halted is null and n.want > 0
      and n.ready_of_revision >= n.want and not n.outdated
    union all
    select 6, 'scale', null, null, 0
    where n.want > 0 and gangq.scales(gangq.scaled(s, n.one_gang, f, t), t)
    union all
    select 7, 'leave', l.gang_id, l.why, l.place from gangq.gangs_to_leave(s, f, n) l
    union all
    select 8, 'make', null, null, 0
    where n.present < n.want and n.replicas + n.one_gang <= n.want + (s).surge * n.one_gang
      and ((s).next_try_at <= t) is not false
    union all
    select 9, 'steady', null, null, 0
    where (s).problem is not null and (s).halted is null and n.ready_of_revision >= n.want
      and not exists (
        select from unnest(f) x
        where x.stop_at is null and (x.ready_at <= t - interval '60 s') is not true)
    union all
    select 10, 'gone', null, null, 0 where (s).deleting and f = '{}') d
  where d.gang_id is null or d.gang_id <> all (busy)
  order by d.rule, d.place, d.gang_id limit 1;
end $$;

-- Internal. A gang of a service has failed: the next one waits, and an update halts. Returns the
-- service.
create function gangq.note_failure(
  s gangq.services_table, k gangq.service_gangs_table, why text, t timestamptz
) returns gangq.services_table language plpgsql as $$
declare
  c gangq.settings;
begin
  select x.* into c from gangq.settings x;
  s.failures := case when k.ready_at <= t - interval '60 s' then 1 else s.failures + 1 end;
  s.next_try_at := t + gangq.backoff(c.gang_backoff_s, c.gang_backoff_max_s, s.failures);
  s.problem := gangq.shortened(
    coalesce('gang ' || k.gang_id || ': ', '') || coalesce(why, 'it ended'), 2000);
  perform gangq.log_service('service_failed', t, s.name, jsonb_build_object('revision', k.revision,
    'failures', s.failures, 'next_try_at', s.next_try_at), s.problem, k.gang_id);
  if s.failures = 3 then
    perform gangq.log_service('crash_loop', t, s.name, jsonb_build_object('revision', k.revision,
      'failures', s.failures), s.problem, k.gang_id);
  end if;
  if s.halted is null and k.revision = s.revision and s.good_revision <> s.revision
    and k.ready_at is null
  then
    s.halted := format('revision %s did not become ready: %s', s.revision, s.problem);
    s.next_try_at := null;
    perform gangq.log_service('update_halted', t, s.name,
      jsonb_build_object('revision', s.revision, 'good_revision', s.good_revision), s.halted,
      k.gang_id);
  end if;
  return s;
end $$;

-- Internal. Submits a gang of a service as who stored it would. What refuses it is noted as a
-- failure. Returns the service. Raises 55P03.
create function gangq.make_service_gang(s gangq.services_table, t timestamptz)
returns gangq.services_table language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  r gangq.service_revisions;
  w record;
  a gangq.arguments;
  o gangq.gang_options;
  g gangq.live_gangs;
  k gangq.service_gangs_table;
begin
  select x.* into r from gangq.service_revisions x
  where x.service = s.name
    and x.revision = case when s.halted is null then s.revision else s.good_revision end;
  k.revision := r.revision;
  if not gangq.may_submit(s.submitter, s.login) then
    perform gangq.refuse('42501', format('%s may not submit any more', s.submitter
        || coalesce(' (login ' || nullif(s.login, s.submitter) || ')', '')),
      'Grant gangq_submitter again, or have gangq_admin store the service: gangq.set_service.');
  end if;
  w := gangq.read_work(r.work || jsonb_build_object('size', r.gang_size), 'service');
  a := w.a;
  a.task := r.task;
  a.payload := r.payload;
  o := gangq.read_options('submit_gang', jsonb_build_object('name', s.name, 'budget_s', 1e9,
    'max_attempts', 1, 'timeout_style', 'requeue', 'wait_for_hardware', true) || w.options, o);
  g.submitted_at := t;
  g.submitter := s.submitter;
  g.login := s.login;
  g.service := s.name;
  select n.gang_id into k.gang_id from gangq.add_gang(a, o, g, '{}') n;
  insert into gangq.service_gangs_table (gang_id, service, revision, size, made_at)
  values (k.gang_id, s.name, r.revision, r.gang_size, t);
  -- The backoff is over: nothing more is due for it.
  s.next_try_at := null;
  return s;
exception
  when lock_not_available or deadlock_detected then
    raise;
  when others then
    return gangq.note_failure(s, k, format('%s (%s)', sqlerrm, sqlstate), t);
end $$;

-- Internal. Does what service_step has said, to a service whose row is locked. Returns the service.
-- Raises 55P03.
create function gangq.do_service_step(
  s gangq.services_table, action text, gang bigint, why text, t timestamptz
) returns gangq.services_table language plpgsql as $$
declare
  k gangq.service_gangs_table;
  ended record;
begin
  select x.* into k from gangq.service_gangs_table x where x.gang_id = gang;
  case action
    when 'ended' then
      delete from gangq.replicas r where r.gang_id = gang;
      delete from gangq.service_gangs_table x where x.gang_id = gang;
      select h.state, h.reason into ended from gangq.gang_history h
      where h.gang_id = gang order by h.finished_at desc limit 1;
      -- One that was cancelled by hand has not failed.
      if k.stop_at is null and ended.state is distinct from 'cancelled' then
        s := gangq.note_failure(s, k, coalesce(ended.reason, case ended.state
          when 'done' then 'its replicas have returned' end), t);
      end if;
    when 'stop' then
      perform gangq.cancel_gang(gang, k.why, t);
    when 'late' then
      update gangq.service_gangs_table x set stop_at = t, why = do_service_step.why
      where x.gang_id = gang;
      s := gangq.note_failure(s, k, why, t);
    when 'leave' then
      update gangq.service_gangs_table x
      set why = do_service_step.why,
        stop_at = t + case when exists (select from gangq.endpoints e where e.gang_id = gang)
          then make_interval(secs => s.linger_s) else interval '0' end
      where x.gang_id = gang;
      perform gangq.endpoints_changed(array[gang]);
      perform gangq.log_service('service_leaves', t, s.name,
        jsonb_build_object('revision', k.revision), why, gang);
    when 'ready' then
      update gangq.service_gangs_table x set ready_at = t where x.gang_id = gang;
      perform gangq.log_service('service_ready', t, s.name,
        jsonb_build_object('revision', k.revision), gang_id => gang);
    when 'good' then
      s.good_revision := s.revision;
      update gangq.service_revisions x set good_at = t
      where x.service = s.name and x.revision = s.revision;
    when 'scale' then
      s := gangq.do_scaling(s, t);
    when 'make' then
      s := gangq.make_service_gang(s, t);
    when 'steady' then
      s := gangq.try_again(s);
    when 'gone' then
      delete from gangq.services_table x where x.name = s.name;
      perform gangq.log_service('service_gone', t, s.name);
  end case;
  perform gangq.keep_service(s);
  return s;
end $$;

-- Internal. The step of the tick that keeps what services want. Returns how many things it did; -1:
-- some are held up by a lock.
create function gangq.keep_services(most integer default 200) returns integer
language plpgsql set lock_timeout = '100ms' set client_min_messages = 'warning' as $$
declare
  t timestamptz := gangq.now();
  s gangq.services_table;
  step record;
  held bigint[];
  busy boolean := false;
  done integer := 0;
begin
  for s in select x.* from gangq.services_table x order by x.name loop
    continue when (gangq.service_step(s, t)).action is null;
    exit when done >= most;
    select x.* into s from gangq.services_table x where x.name = s.name for update skip locked;
    continue when not found;
    held := '{}';
    loop
      step := gangq.service_step(s, t, held);
      exit when step.action is null or done >= most;
      if step.action = 'stop' and not gangq.try_lock_gang(step.gang_id) then
        held := held || step.gang_id;
        busy := true;
        continue;
      end if;
      begin
        s := gangq.do_service_step(s, step.action, step.gang_id, step.why, t);
      exception
        when lock_not_available or deadlock_detected then
          busy := true;
          exit;
      end;
      done := done + 1;
      exit when step.action = 'gone';
    end loop;
  end loop;
  return case when busy then -1 else done end;
end $$;

-- Shown -------------------------------------------------------------------------------------------

-- The gangs of every service. serves: it is in gangq.endpoints; leaves: it is told to stop at
-- stop_at, and why. state null: it has ended, and the next tick forgets it.
create view gangq.service_gangs as
select k.service, k.gang_id, k.revision, g.state, x.members, x.ready_members,
  coalesce(x.ready_members = k.size and k.stop_at is null and g.state = 'running'
    and g.missing_since is null, false) as serves,
  k.stop_at is not null as leaves, k.why, x.hosts, x.load, k.made_at, k.ready_at, k.stop_at
from gangq.service_gangs_table k
left join gangq.live_gangs g on g.id = k.gang_id
cross join lateral (
  select k.size as members,
    count(*) filter (where j.state = 'running' and r.ready and i.flagged_at is null)::integer
      as ready_members,
    coalesce(array_agg(distinct i.host order by i.host) filter (where i.host is not null), '{}')
      as hosts,
    (avg(r.load) filter (where r.load_at > gangq.now() - interval '60 s'))::real as load
  from gangq.live_jobs j
  left join gangq.replicas r on r.job_id = j.id and r.token = j.token
  left join gangq.incarnations i on i.id = j.incarnation
  where j.gang_id = k.gang_id) x;

-- Where the replicas of services take requests: address and port of each replica of a gang whose
-- members are all ready, and which does not leave. Of a gang all are here or none. Each change is
-- notified on the channel gangq_endpoints, with the name of the service.
create view gangq.endpoints as
select k.service, k.gang_id, k.revision, j.id as job_id, j.rank, i.name as worker, i.host,
  i.address, r.port, r.load, r.since as ready_since
from gangq.service_gangs k
join gangq.live_jobs j on j.gang_id = k.gang_id
join gangq.replicas r on r.job_id = j.id and r.token = j.token
join gangq.incarnations i on i.id = j.incarnation
where k.serves and r.port is not null
order by k.service, k.gang_id, j.rank;

-- Every service. replicas: how many are wanted; ready_replicas: how many are in gangq.endpoints or
-- serve behind those. state: ready, starting, updating (gangs of another revision are left), halted
-- (the new revision did not become ready: why), crash_loop (three gangs in a row failed within a
-- minute of being ready), stopping, stopped, deleting. next_try_at: no gang is made before. load:
-- what its ready replicas say, on average. revision: the wanted one; good_revision: the last one of
-- which all replicas were ready. readable: whether payload and work are shown to this session.
create view gangq.services as
select s.name, r.task, q.name as queue,
  case
    when s.deleting then 'deleting'
    when s.stopped then case when n.gangs > 0 then 'stopping' else 'stopped' end
    when s.halted is not null then 'halted'
    when s.failures >= 3 then 'crash_loop'
    when n.outdated then 'updating'
    when n.ready >= s.replicas then 'ready'
    else 'starting' end as state,
  s.replicas, r.gang_size as gang, n.ready as ready_replicas, n.gangs, s.revision, s.good_revision,
  coalesce(s.halted, s.problem, n.waits) as why, s.failures, s.next_try_at, s.surge,
  s.ready_within_s, s.linger_s, r.health, r.version, n.load, case when o.readable then r.payload end
    as payload,
  case when o.readable then r.work end as work, s.submitter, s.login, s.set_at, s.source,
  s.undeclared_at, o.readable
from gangq.services_table s
join gangq.service_revisions r on r.service = s.name and r.revision = s.revision
left join gangq.task_options d on d.task = r.task
cross join lateral (select coalesce(r.work ->> 'queue', d.queue, 'default') as name) q
cross join lateral (
  select count(*)::integer as gangs,
    coalesce(sum(k.members) filter (where k.serves), 0)::integer as ready,
    coalesce(bool_or(k.revision <> s.revision), false) as outdated,
    (avg(k.load) filter (where k.serves))::real as load,
    min(format('gang %s waits to be placed', k.gang_id)) filter (where k.state = 'blocked') as waits
  from gangq.service_gangs k
  where k.service = s.name) n
cross join lateral (
  select (select gangq.is_admin())
    or s.login = session_user
    and s.submitter = any ((select gangq.roles_of(gangq.caller()))::text[])
    or q.name = any ((select gangq.shared_queues())::text[]) as readable) o
order by s.name;
