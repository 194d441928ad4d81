-- What replicas say of themselves (report_ready, report_load), and what the tick knows of the gangs
-- of a service.
--
-- A replica is ready when it, or its worker that polls its health URL, has said so with the token
-- of its claim. Whatever changes the endpoints (135) notifies gangq_endpoints when it commits, with
-- the name of the service. Two members that become ready at the same time do not see each other:
-- so each of them notifies, whether or not the gang seems whole to it.
-- Locks: the replica's own row, one for each member. `serving` deletes that of an older claim.

-- Internal. Sends a notification that the endpoints of the services of these gangs have changed.
create function gangq.endpoints_changed(gang_ids bigint[]) returns void language sql as $$
  select pg_notify('gangq_endpoints', s.service)
  from (
    select distinct g.service from gangq.live_gangs g
    where g.id = any (gang_ids) and g.service is not null) s
$$;

-- Internal. The replica that holds this claim; what an earlier claim of it has said is forgotten.
-- Raises GQ002, GQ003, GQ004, 42501.
create function gangq.serving(job_id bigint, token bigint) returns gangq.live_jobs
language plpgsql as $$
declare
  j gangq.live_jobs := gangq.own_claim(job_id, token);
begin
  if j.state <> 'running' then
    perform gangq.refuse_stale(serving.job_id, serving.token);
  elsif not exists (
    select from gangq.live_gangs g where g.id = j.gang_id and g.service is not null)
  then
    perform gangq.refuse('GQ004', format('job %s is no replica of a service', j.id),
      'gangq.set_service makes services; gangq.barrier names the one of a job.');
  end if;
  delete from gangq.replicas r where r.job_id = j.id and r.token < j.token;
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
  set ready = excluded.ready, since = excluded.since, port = excluded.port
  where r.token = excluded.token
    and (r.ready, r.port) is distinct from (excluded.ready, excluded.port);
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
  -- It is not ready since it was claimed. Rounded: what is nearly 0 has no value in a real.
  values (j.id, j.token, j.gang_id, false, j.claimed_at, round(report_load.load, 6), t)
  on conflict on constraint replicas_pkey do update
  set load = excluded.load, load_at = excluded.load_at where r.token = excluded.token;
end $$;

-- What the tick knows of a gang of a service:
--   size        its members
--   made_at     when it was submitted
--   ready_at    when all its members were first ready; null: they were not yet
--   stop_at     it has left the endpoints and is told to stop then; null: it has not
--   state       as in live_gangs; null: it has ended
--   cancelling  it has been told to stop
--   ready       all its members are ready now
--   late        why it has failed, if a member has not been ready for too long; else null
--   replaced    why another gang is to take its place; null: none is
--   load        the mean of what its members have said within 60 s; null: none has said anything
create type gangq.service_fact as (
  gang_id bigint, revision integer, size integer, made_at timestamptz, ready_at timestamptz,
  stop_at timestamptz, state text, cancelling boolean, ready boolean, late text, replaced text,
  load real
);

-- Internal. The gangs of a service, as the tick sees them.
create function gangq.service_facts(s gangq.services_table, t timestamptz)
returns setof gangq.service_fact language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  outage timestamptz := (select x.outage_ended_at from gangq.tick_state x);
begin
  return query
  select k.gang_id, k.revision, k.size, k.made_at, k.ready_at, k.stop_at, g.state,
    coalesce(g.cancelling, false), coalesce(m.ready and g.missing_since is null, false),
    case when g.state = 'running' and g.missing_since is null then m.late end,
    case
      -- After an update has halted, gangs of either revision stay.
      when k.revision <> (s).revision and (s).halted is null
        then format('revision %s replaces %s', (s).revision, k.revision)
      -- With surge 0 no other gang could be made first.
      when m.drained and (s).surge > 0 then 'its host is drained' end,
    m.load
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

-- The gangs of a service, counted. The first six numbers are replicas. A gang stays if it has not
-- left and no other gang is to take its place.
--   want               how many there should be now
--   one_gang           the size of a gang that would be made now
--   existing           of all gangs
--   present            of those that stay
--   ready              that take requests
--   ready_of_revision  ... and are of the wanted revision
--   largest_replaced   the size of the largest gang that does not stay; 0: all stay
--   starting           a gang that stays is placed and not ready
--   waiting            a gang that stays waits to be placed
--   impossible         ... and the workers could not hold it even when idle
--   leaving            a gang has left and has not ended
create type gangq.service_counts as (
  want integer, one_gang integer, existing bigint, present bigint, ready bigint,
  ready_of_revision bigint, largest_replaced integer, starting boolean, waiting boolean,
  impossible boolean, leaving boolean
);

-- Internal. The revision of a gang that would be made now: after an update has halted the last good
-- one.
create function gangq.revision_to_make(s gangq.services_table) returns gangq.service_revisions
language sql stable as $$
  select r from gangq.service_revisions r
  where r.service = (s).name
    and r.revision = case when (s).halted is null then (s).revision else (s).good_revision end
$$;

-- Internal. The counts of a service that has these gangs.
create function gangq.count_gangs(s gangq.services_table, f gangq.service_fact[])
returns gangq.service_counts language sql stable as $$
  select case when (s).stopped or (s).deleting then 0 else (s).replicas end,
    (gangq.revision_to_make(s)).gang_size,
    coalesce(sum(x.size), 0),
    coalesce(sum(x.size) filter (where x.stays), 0),
    coalesce(sum(x.size) filter (where x.stop_at is null and x.ready), 0),
    coalesce(sum(x.size) filter (
      where x.stop_at is null and x.ready and x.revision = (s).revision), 0),
    coalesce(max(x.size) filter (where not x.stays), 0),
    coalesce(bool_or(
      x.stays and not x.ready and x.state in ('reserved', 'running', 'draining')), false),
    coalesce(bool_or(x.stays and x.state = 'blocked'), false),
    exists (  -- Asked once for a kind: asked for each gang, making 200 took 13 s.
      select from (
        select distinct g.kind_id
        from unnest(f) y join gangq.live_gangs g on g.id = y.gang_id
        where y.stop_at is null and y.replaced is null and y.state = 'blocked' offset 0) k
      where gangq.kind_infeasible(k.kind_id) is not null),
    coalesce(bool_or(x.stop_at is not null), false)
  from (
    select y.*, y.stop_at is null and y.replaced is null as stays from unnest(f) y) x
$$;
