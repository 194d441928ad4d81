-- Members are lost: the failure policy of their gang takes it down (100), lets them wait for new
-- places (restart_member), or lets the others go on without them (shrink).
-- Locks: called under the lock of the gang and all its members. Never a worker row.

-- Why each step stands before the next one:
-- 1. must_drain asks whether this loss is one too many, so it has not been counted yet.
-- 2. The members are charged. Step 4 reads the counters of the gang that this returns.
-- 3. They are preempted and then blocked, because a running job cannot become blocked at once.
-- 4. The gang goes on without them (shrink), or waits for places for them (restart_member).
--
-- Internal. Members have stopped without having been told to. The gang drains; or by its failure
-- policy they wait for a new place (restart_member) or leave the epoch (shrink), and the others run
-- on. The arguments are those of drain.
create function gangq.lose_members(
  gang_id bigint, stopped bigint[], payers bigint[], cause text, error jsonb, reason text,
  t timestamptz, final boolean default false
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  g gangq.live_gangs;
  why jsonb;
begin
  -- 1.
  select x.* into g from gangq.live_gangs x where x.id = lose_members.gang_id;
  cause := gangq.cause_charged(g, stopped, cause);
  if gangq.must_drain(g, stopped, payers, cause, final) then
    perform gangq.drain(g.id, stopped, payers, cause, error, reason, t, final);
    return;
  end if;
  why := gangq.last_beats(stopped)
    || jsonb_build_object('cause', cause, 'error', gangq.for_events(error));
  -- 2.
  g := gangq.write_stopped(g, stopped, payers, cause, error, final, t);
  -- 3.
  update gangq.live_jobs j set state = 'blocked'
  where j.id = any (stopped) and j.state = 'preempted';
  -- 4.
  if g.failure_policy = 'shrink' then
    perform gangq.go_on_without(g, stopped, why, reason, t);
    return;
  end if;
  -- restart_member: the placement timeout starts with the first loss. Without rank 0 the gang has
  -- no rendezvous address.
  if g.missing_since is null then
    g.missing_since := t;
    g.timeout_at := t + make_interval(secs => g.timeout_s);
    g.ineligible_s := gangq.ineligible_s(g.kind_id, t);
  end if;
  -- A member that was lost before this one may have to wait longer.
  g.not_before := greatest(g.not_before, gangq.resumes_at(g, cause, stopped, t));
  update gangq.live_gangs x set missing_since = g.missing_since, timeout_at = g.timeout_at,
    ineligible_s = g.ineligible_s, not_before = g.not_before
  where x.id = g.id;
  update gangq.live_gangs x set master_host = null, master_addr = null, master_port = null
  where x.id = g.id and exists (
    select from gangq.live_jobs j
    where j.id = any (stopped) and gangq.rank_of(j) = 0);
  perform gangq.log_event(t, 'replace', g.id, g.epoch, stopped[1], reason => reason,
    data => why || jsonb_build_object('culprits', stopped, 'not_before', g.not_before));
  perform gangq.wake_tick(true);
end $$;

-- Internal, for lose_members. Whether the loss of these members takes the whole gang down.
create function gangq.must_drain(
  g gangq.live_gangs, stopped bigint[], payers bigint[], cause text, final boolean
) returns boolean language plpgsql stable as $$
declare
  c record := gangq.cause_named(must_drain.cause);
begin
  return g.go_at is null  -- its barrier has not opened
    or g.failure_policy in ('restart_gang', 'fail')
    or c.ending = 'asked'
    or must_drain.cause = 'never_started' and g.failure_policy = 'shrink'
    or gangq.spends_gang(g, c.gang)  -- its budget is spent, or that of a payer
    or final and must_drain.cause = 'fail' and stopped <> '{}'
    or exists (
      select from gangq.live_jobs j
      where j.id = any (stopped) and j.id = any (payers) and gangq.spends_job(j, c.member))
    or not exists (  -- no other member would go on
      select 1 from gangq.live_jobs j
      where j.gang_id = g.id and j.id <> all (stopped) and j.state in ('running', 'done')
        and gangq.in_epoch(j, g))
    or g.failure_policy = 'shrink' and gangq.falls_below_minimum(g, stopped);
end $$;

-- Internal. Whether a role of this running gang would fall below its minimum without these.
create function gangq.falls_below_minimum(g gangq.live_gangs, leaving bigint[]) returns boolean
language sql stable as $$
  select exists (
    select 1
    from gangq.kind_roles r
    join gangq.live_jobs j on j.gang_id = g.id and j.role = r.ordinal
    where r.kind_id = g.kind_id
    group by r.ordinal, r.min_members
    having r.min_members > count(*) filter (
      where j.id <> all (leaving) and j.state in ('running', 'done')))
$$;

-- Internal. When these stopped members may be placed again. Null: at once.
create function gangq.resumes_at(
  g gangq.live_gangs, cause text, stopped bigint[], t timestamptz
) returns timestamptz language sql volatile as $$
  select nullif(greatest(t,
    (
      select t + gangq.backoff(c.gang_backoff_s, c.gang_backoff_max_s,
        case cause when 'never_started' then g.never_started else g.placement_misses end)
      from gangq.settings c
      where cause in ('never_started', 'placement_miss')),
    (
      select t + gangq.backoff(q.backoff_s, q.backoff_max_s, g.attempts + g.trips)
      from gangq.shapes s join gangq.queues_table q on q.name = s.queue
      where s.id = g.shape_id and cause in ('fail', 'trip')),
    -- A worker that tripped counts as stopped at once, but its process ends at exits_at.
    (
      select max(i.exits_at)
      from gangq.live_jobs j join gangq.incarnations i on i.id = j.ran_on
      where j.id = any (stopped))), t)
$$;

-- Internal. These members leave the epoch. The others get the next one at once, with ranks
-- renumbered in order, and learn its number from their next heartbeat: no barrier opens. A new rank
-- 0 publishes its address through barrier.
create function gangq.go_on_without(
  g gangq.live_gangs, leaving bigint[], why jsonb, reason text, t timestamptz
) returns void language plpgsql as $$
declare
  -- The next epoch, by rank: the members that run; if none runs, those that are done, and the gang
  -- is fulfilled.
  rest bigint[] := array(
    select x.id
    from (
      select j.id, j.rank, j.state, bool_or(j.state = 'running') over () as any_runs
      from gangq.live_jobs j
      where j.gang_id = g.id and j.id <> all (leaving) and gangq.in_epoch(j, g)
        and j.state in ('running', 'done')) x
    where x.state = 'running' or not x.any_runs
    order by x.rank);
  kept bigint := gangq.restore_step(g);
begin
  update gangq.live_gangs x set master_host = null, master_addr = null, master_port = null
  where x.id = g.id and exists (
    select from gangq.live_jobs j where j.id = rest[1] and gangq.rank_of(j) <> 0);
  update gangq.live_jobs j set epoch_rank = array_position(rest, j.id) - 1
  where j.gang_id = g.id and j.epoch_rank is distinct from array_position(rest, j.id) - 1;
  update gangq.live_gangs x set epoch = x.epoch + 1, world_size = cardinality(rest),
    restore_step = kept
  where x.id = g.id;
  perform gangq.log_event(t, 'shrink', g.id, g.epoch + 1, leaving[1], reason => reason,
    data => why || jsonb_build_object(
      'members', leaving, 'world_size', cardinality(rest), 'restore_step', kept));
  if not gangq.wind_up(g.id, t) then
    perform gangq.wake(array(select j.incarnation from gangq.live_jobs j where j.id = any (rest)),
      'go');
    perform gangq.wake_tick();
  end if;
end $$;
