-- Services: replicas that stay up, in whole gangs: set_service, stop_service, roll_back_service,
-- delete_service; what replicas say of themselves (report_ready, report_load); what the tick knows
-- of them; the views services, service_gangs and endpoints. The tick keeps what is wanted: 132.
--
-- A service is a number of replicas in services_table, and what they run, in service_revisions. Its
-- gangs are gangs like all others: they wait in a queue, count against limits, have a priority and
-- may be displaced. Their rows in service_gangs_table are written in the transaction that submits
-- them. A gang restarts by its own policy for as long as it lives. When it has ended, the tick
-- submits another one.
--
-- A replica is ready when it, or its worker that polls its health URL, has said so with the token
-- of its claim. A gang is in the view endpoints when all its members run and are ready, none of
-- their workers is flagged, and it does not leave. One snapshot shows a gang whole or not at all,
-- because what takes a member out of the state running changes its gang or all its members in the
-- same transaction. Whatever changes the endpoints notifies gangq_endpoints when it commits, with
-- the name of the service. Two members that become ready at the same time do not see each other:
-- so each of them notifies, whether or not the gang seems whole to it.
--
-- A reply that is lost: every verb may be repeated.
-- Locks: rows of services, before all others but schedules. report_ready and report_load lock the
-- replica's own row.

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
  set (name, replicas, stopped, deleting, revision, good_revision, halted, surge, ready_within_s,
    linger_s, failures, next_try_at, problem, submitter, login, set_at, source, declared_replicas,
    undeclared_at)
    = (select (s).*)
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
  perform gangq.check_stored('service', r.payload, r.work);
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
    perform gangq.check_new('service');
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
    'task', task, 'gang', gang, 'work', work)), null::gangq.other_arguments);
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
  delete from gangq.scaling_table y where y.service = s.name;
  insert into gangq.scaling_table select x.* where x.service is not null;
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
  perform gangq.check_declared('service', source, names);
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

-- Known -------------------------------------------------------------------------------------------

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

-- Replicas of a service, counted. want: how many there should be now. made_of: the revision that
-- gangs are made of now, one_gang: the size of those. replicas: of all gangs; present: of those
-- that are to stay; ready: that take requests and have not left; starting, waiting, outdated,
-- leaving: whether there is such a gang.
create type gangq.service_counts as (
  want integer, made_of integer, one_gang integer, replicas bigint, present bigint, ready bigint,
  ready_of_revision bigint, starting boolean, waiting boolean, outdated boolean, leaving boolean
);

-- Internal. The counts of a service that has these gangs.
create function gangq.count_gangs(s gangq.services_table, f gangq.service_fact[])
returns gangq.service_counts language sql stable as $$
  select case when (s).stopped or (s).deleting then 0 else (s).replicas end, m.made_of, (
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
    min(format('gang g%s waits to be placed', k.gang_id))
      filter (where k.state = 'blocked') as waits
  from gangq.service_gangs k
  where k.service = s.name) n
cross join lateral (
  select (select gangq.is_admin())
    or s.login = session_user
    and s.submitter = any ((select gangq.roles_of(gangq.caller()))::text[])
    or q.name = any ((select gangq.shared_queues())::text[]) as readable) o
order by s.name;
