-- set_service makes a service or changes it. What its replicas run is a revision: one that differs
-- is a new row of service_revisions, and the tick replaces the gangs (133).
-- Locks: the row of the service, before all others but schedules.

-- The options of set_service. surge: so many gangs more than wanted while one replaces another (1);
-- with 0 an old one stops first. ready_within_s: a replica that is not ready for so long is
-- replaced (600). linger_s: how long a gang goes on between leaving the endpoints and being told to
-- stop (5). health: a path at the port of each replica, or a URL, that its worker polls: it is
-- ready while that answers with a status below 400; none: the replica says so itself. version: a
-- text that makes a new revision where nothing else has changed. stopped: no replica is wanted.
-- source: the program that declares the service. Then options that it leaves out are reset to their
-- defaults, except stopped; and replicas is only applied if source declared another number before,
-- so a number that was set by hand stays. The other options scale the service, see 132_scaling.sql;
-- max_replicas 0: not any more.
create type gangq.service_options as (
  surge gangq.up_to_1000, ready_within_s gangq.seconds, linger_s gangq.delay, health gangq.health,
  version gangq.name, stopped boolean, source gangq.name, min_replicas gangq.members,
  max_replicas gangq.count, target_load gangq.weight, target_depth gangq.weight,
  depth_of gangq.name, up_after_s gangq.delay, down_after_s gangq.delay
);

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
      'Take timeout_style requeue (the default) or hard.'),
    -- The host may be an IPv6 address, in brackets. There may be a user before it.
    (r.health like 'http:%' and (r.health !~ ('^http://([^/?#@]*@)?'
        '([^]/?#@:[[:space:]]+|\[[0-9A-Za-z:.%]+\])(:[0-9]+)?([/?#]|$)')
      or substring(r.health from '^http://[^/?#]*:([0-9]+)([/?#]|$)')::numeric
        not between 1 and 65535),
      format('health is %s', r.health),
      'A URL is http://HOST[:PORT][/PATH], with a port from 1 to 65535. A path, as /healthz, is at '
      'the port of the replica.')
  ) as x(wrong, what, hint)
  where x.wrong;
  perform gangq.check_stored('service', r.payload, r.work);
end $$;

-- Internal. Stores a new revision of a service, whose row is locked, and returns its number. Raises
-- what check_revision raises.
create function gangq.add_revision(r gangq.service_revisions, t timestamptz)
returns integer language plpgsql as $$
begin
  perform gangq.check_revision(r);
  r.revision := 1 + coalesce((
    select max(x.revision) from gangq.service_revisions x where x.service = r.service), 0);
  r.set_at := t;
  r.good_at := null;
  insert into gangq.service_revisions values (r.*);
  -- The last ten are kept, and older ones that a gang has or an update that halts goes back to.
  delete from gangq.service_revisions x
  where x.service = r.service and x.revision <= r.revision - 10
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
  -- Nearly always it is there, and stays as it is: nothing is written.
  select x.* into s from gangq.services_table x where x.name = service_to_set.name for update;
  if found then
    return s;
  end if;
  perform gangq.check_new('service');
  insert into gangq.services_table as x (name, replicas, stopped, revision, surge, ready_within_s,
    linger_s, submitter, login, set_at)
  values (service_to_set.name, 1, false, 0, 1, 600, 5, gangq.caller(), session_user, t)
  -- Another session has made it meanwhile. Changes nothing, and locks it.
  on conflict on constraint services_table_pkey do update set name = x.name
  returning x.* into s;
  perform gangq.refuse('GQ001', format('service %L is new and has no task', name),
    'Say what its replicas run: gangq.set_service(''chat'', ''serve'').')
  where s.revision = 0 and task is null;
  return s;
end $$;

-- Internal. All options of a service: those given, and what it has of the others. Of what a program
-- declares, options that it leaves out are reset to their defaults; but it does not start again
-- what was stopped by hand. Raises GQ001.
create function gangq.all_options(
  given jsonb, s gangq.services_table, r gangq.service_revisions, x gangq.scaling_table
) returns gangq.service_options language plpgsql stable as $$
declare
  o gangq.service_options;
begin
  if given ->> 'source' is null then
    o := (s.surge, s.ready_within_s, s.linger_s, r.health, r.version, false, null, x.min_replicas,
      x.max_replicas, x.target_load, x.target_depth, x.depth_of, x.up_after_s, x.down_after_s);
  else
    o.surge := 1;
    o.ready_within_s := 600;
    o.linger_s := 5;
    o.stopped := s.stopped;
  end if;
  -- One target takes the place of the other.
  if given ? 'target_load' then
    o.target_depth := null;
    o.depth_of := null;
  elsif given ? 'target_depth' then
    o.target_load := null;
  end if;
  return gangq.read_options('set_service', given, o);
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
  s.stopped := o.stopped;
  s.deleting := false;
  s.surge := o.surge;
  s.ready_within_s := o.ready_within_s;
  s.linger_s := o.linger_s;
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
  -- All names: all_options sees none of a null.
  perform gangq.read_options('set_service', coalesce(options, '{}'), o);
  perform gangq.read_options('set_service', jsonb_strip_nulls(jsonb_build_object('name', name,
    'task', task, 'gang', gang, 'work', work)), null::gangq.other_arguments);
  perform gangq.refuse('GQ001', 'a service has a name',
    'Call gangq.set_service(''chat'', ''serve'').') where name is null;
  old := gangq.service_to_set(name, task, t);
  select y.* into before from gangq.service_revisions y
  where y.service = old.name and y.revision = old.revision;
  select y.* into scaled from gangq.scaling_table y where y.service = old.name;
  o := gangq.all_options(jsonb_strip_nulls(coalesce(options, '{}')), old, before, scaled);
  r := before;
  r.service := name;
  r.task := coalesce(task, r.task);
  r.payload := coalesce(nullif(payload, 'null'), r.payload, '{}');
  r.gang_size := coalesce(gang, r.gang_size, 1);
  r.work := coalesce((
    select jsonb_object_agg(e.key, e.value)
    from jsonb_each(case when o.source is null and r.work is not null then r.work else '{}' end
      || coalesce(nullif(work, 'null'), '{}')) e
    where e.value <> 'null'), '{}');
  r.health := nullif(o.health, 'none');
  r.version := o.version;
  s := gangq.service_as_set(old, r.gang_size, replicas, o);
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
    perform gangq.check_own('change', format('service %L', old.name), old.submitter, old.login,
      gangq.service_queue(old));
  end if;
  if r is distinct from before then
    s.revision := gangq.add_revision(r, t);
    s := gangq.try_again(s);
  end if;
  s.submitter := gangq.caller();
  s.login := session_user;
  s.set_at := t;
  perform gangq.keep_service(s);
  delete from gangq.scaling_table y where y.service = s.name;
  insert into gangq.scaling_table select x.* where x.service is not null;
  perform gangq.log_event(t, 'set_service', data => jsonb_build_object('service', s.name,
    'replicas', s.replicas, 'revision', s.revision, 'stopped', s.stopped));
  perform gangq.wake_tick(true);
  return case when old.revision = 0 then 'made' else 'changed' end;
end $$;
