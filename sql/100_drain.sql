-- How an epoch ends. A gang is taken down together (drain, complete_drain), or its failure policy
-- lets it go on without the members it lost (lose_members).
-- Member: running -> preempting (told to stop) -> preempted (proven stopped) -> blocked; one that
-- is lost is proven stopped at once. Gang: running -> draining -> blocked, or it ends.
-- Who pays for which cause, and which are losses: gangq.causes (078). Arguments of these functions:
--   stopped  members that are proven stopped; all others that run go on, or are told to stop
--   payers   members that are charged for a loss; of a single report those stopped. The gang is
--            charged even if there are none
-- Locks: called under the lock of the gang and all its members. Never a worker row.

-- Why each step stands before the next one:
-- 1. stopped leave the state running. Step 2 would tell them to stop.
-- 2. Members that run are told to stop, those that are only reserved give their places back.
-- 3. The gang drains.
-- 4. complete_drain finds a gang that drains, and ends the drain if nothing runs any more.
--
-- Internal. Takes a reserved or running gang down: its members that run are told to stop. final: a
-- failure that is not retryable. stopped, payers: see the head of this file.
create function gangq.drain(
  gang_id bigint, stopped bigint[], payers bigint[], cause text, error jsonb, reason text,
  t timestamptz, final boolean default false
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  g gangq.live_gangs;
  told bigint[];
begin
  -- 1.
  select x.* into g from gangq.live_gangs x where x.id = drain.gang_id;
  cause := gangq.cause_charged(g, stopped, cause);
  perform gangq.write_stopped(g, stopped, payers, cause, drain.error, final, t);
  -- 2.
  with stopping as (
    update gangq.live_jobs j set state = 'preempting', told_at = t,
      stop_reason = case cause when 'cancel' then 'cancel' else 'drain' end,
      (attempts, crashes, trips, stops) = (
        select * from gangq.charge_member(j, payers, cause, final)),
      error = case when j.id = any (payers) then coalesce(drain.error, j.error) else j.error end
    where j.gang_id = g.id and j.state = 'running'
    returning j.incarnation
  )
  select array_agg(s.incarnation) into told from stopping s;
  with unreserved as (
    update gangq.live_jobs j set state = 'blocked', incarnation = null, deadline_at = null
    where j.gang_id = g.id and j.state = 'reserved'
    returning j.id
  )
  delete from gangq.device_holds h using unreserved u where h.job_id = u.id;
  -- 3.
  update gangq.live_gangs x set state = 'draining', drain_started_at = t, drain_cause = cause,
    drain_trigger = coalesce(payers[1], stopped[1]), deadline_at = null, missing_since = null,
    not_before = null, master_host = null, master_addr = null, master_port = null
  where x.id = g.id;
  perform gangq.log_event(t, 'drain', g.id, g.epoch, coalesce(payers[1], stopped[1]),
    reason => drain.reason,
    data => jsonb_build_object('cause', cause, 'culprits', stopped,
      'told', coalesce(cardinality(told), 0), 'error', gangq.for_events(drain.error)));
  perform gangq.wake(told, 'stop');
  -- 4.
  perform gangq.complete_drain(g.id);
end $$;

-- Internal. These members are preempted; they and the gang are charged. Returns the gang.
create function gangq.write_stopped(
  g gangq.live_gangs, stopped bigint[], payers bigint[], cause text, error jsonb, final boolean,
  t timestamptz
) returns gangq.live_gangs language plpgsql as $$
begin
  perform gangq.record_attempts(array(
    select gangq.attempt_of(j, write_stopped.cause, t) from gangq.live_jobs j
    where j.id = any (stopped) and j.state = 'running'));
  update gangq.live_jobs j set state = 'preempted', final_token = j.token, token = null,
    incarnation = null, request_id = null, error = coalesce(write_stopped.error, j.error),
    (attempts, crashes, trips, stops) = (
      select * from gangq.charge_member(j, payers, write_stopped.cause, final))
  where j.id = any (stopped) and j.state = 'running';
  delete from gangq.device_holds h where h.job_id = any (stopped);
  update gangq.live_gangs x
  set (attempts, crashes, trips, never_started, placement_misses, preemptions) = (
    select * from gangq.charge_gang(x, (gangq.cause_named(write_stopped.cause)).gang))
  where x.id = g.id
  returning x.* into g;
  if g.service is not null then
    perform gangq.endpoints_changed(array[g.id]);
  end if;
  return g;
end $$;

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
  -- 2.
  g := gangq.write_stopped(g, stopped, payers, cause, error, final, t);
  -- 3.
  update gangq.live_jobs j set state = 'blocked'
  where j.id = any (stopped) and j.state = 'preempted';
  -- 4.
  why := jsonb_build_object('cause', cause, 'error', gangq.for_events(error));
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
  g.not_before := gangq.resumes_at(g, cause, stopped, t);
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
    or g.state <> 'running'
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
    having bool_or(j.id = any (leaving)) and r.min_members > count(*) filter (
      where j.id <> all (leaving)
        and (j.state = 'done' or j.state = 'running' and gangq.in_epoch(j, g))))
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
  delete from gangq.checkpoints c where c.gang_id = g.id and c.step > coalesce(kept, -1);
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

-- Internal. What was told to stop is proven stopped, or will be at gone_at. how: ack (its worker
-- said so), dead (its worker has ended), force (it never confirmed). Returns its state.
create function gangq.stopped(
  j gangq.live_jobs, error jsonb, t timestamptz, how text default 'ack',
  gone_at timestamptz default null
) returns text language plpgsql as $$
declare
  g gangq.live_gangs;
begin
  if j.gang_id is null and j.stop_reason = 'cancel' then
    perform gangq.record_attempts(array[gangq.attempt_of(j, 'cancel', t)]);
    perform gangq.leave(array[j.id], array[j.token], 'cancelled', '{}', error, t);
    perform gangq.log_job(t, how, j, 'cancelled');
    perform gangq.wake_tick();
    return 'cancelled';
  elsif j.gang_id is null then
    return gangq.end_attempt(j, j.stop_reason, null, 'told to stop', t, gone_at,
      kind => nullif(how, 'ack'));
  end if;
  select x.* into g from gangq.live_gangs x where x.id = j.gang_id;
  perform gangq.record_attempts(array[gangq.attempt_of(j,
    case j.stop_reason when 'drain' then g.drain_cause else j.stop_reason end, t)]);
  update gangq.live_jobs x set state = 'preempted', final_token = x.token, token = null,
    incarnation = null, request_id = null, told_at = null, stop_reason = null,
    error = coalesce(stopped.error, x.error)
  where x.id = j.id;
  delete from gangq.device_holds h where h.job_id = j.id;
  perform gangq.log_job(t, how, j, null, jsonb_build_object('rank', gangq.rank_of(j), 'seconds',
    extract(epoch from t - j.told_at)));
  if g.state = 'running' then
    -- The member had left the epoch (shrink_gang), and the others run on.
    update gangq.live_jobs x set state = 'blocked' where x.id = j.id;
    perform gangq.wake_tick();
  else
    perform gangq.complete_drain(j.gang_id);
  end if;
  return 'preempted';
end $$;

-- Internal. Whether every member of this epoch is done, or of the role that completion names.
create function gangq.fulfilled(gang_id bigint) returns boolean
language plpgsql stable as $$
begin
  return (
    select coalesce(bool_and(j.state = 'done'), false)
    from gangq.live_gangs g
    join gangq.live_jobs j on j.gang_id = g.id and (j.state = 'done' or gangq.in_epoch(j, g))
    left join gangq.kind_roles r on r.kind_id = g.kind_id and r.name = g.completion
    where g.id = fulfilled.gang_id and coalesce(r.ordinal = j.role, true));
end $$;

-- Internal. Ends a gang as done if it is fulfilled, after the members that still run have stopped.
-- A gang of a service ends as soon as a member of it has returned.
create function gangq.wind_up(gang_id bigint, t timestamptz) returns boolean
language plpgsql as $$
declare
  fulfilled boolean := gangq.fulfilled(gang_id);
  serves boolean := exists (
    select from gangq.live_gangs g where g.id = wind_up.gang_id and g.service is not null);
begin
  if not (fulfilled or serves) then
    return false;
  elsif exists (
    select from gangq.live_jobs j
    where j.gang_id = wind_up.gang_id and j.state in ('reserved', 'running', 'preempting'))
  then
    perform gangq.drain(gang_id, '{}', '{}', 'completed', null,
      case when fulfilled then 'what it is for is done'
        else 'a replica of a service has returned, and its gang restarts as a whole' end, t);
  else
    perform gangq.end_gang(gang_id, 'done', null, t);
  end if;
  return true;
end $$;

-- Called when a member of a draining gang is proven stopped; does its work when that was the last
-- one. The gang is blocked again as a whole, or it ends: done when it is fulfilled, cancelled when
-- that was asked, failed for one of the reasons of drained_for_good. Returns the outcome; null
-- while a member is still stopping, or the gang does not drain. Raises GQ002.
create function gangq.complete_drain(gang_id bigint) returns text
language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  why text;
  outcome text;
  resumes_at timestamptz;
begin
  select x.* into g from gangq.live_gangs x where x.id = complete_drain.gang_id for update;
  if not found then
    perform gangq.refuse_missing('gang', complete_drain.gang_id::text, true);
  elsif g.state <> 'draining' or exists (
    select 1 from gangq.live_jobs j
    where j.gang_id = g.id and j.state in ('running', 'preempting', 'reserved'))
  then
    return null;
  end if;
  if gangq.fulfilled(g.id) then
    outcome := 'done';
  elsif g.cancelling then
    outcome := 'cancelled';
    why := 'cancelled';
  else
    why := gangq.drained_for_good(g);
    outcome := case when why is null then 'blocked' else 'failed' end;
  end if;
  if outcome = 'blocked' then
    resumes_at := gangq.resumes_at(g, g.drain_cause,
      array(select j.id from gangq.live_jobs j where j.gang_id = g.id), t);
  end if;
  perform gangq.log_event(t, 'drained', g.id, g.epoch, reason => coalesce(why, g.drain_cause),
    data => jsonb_build_object('outcome', outcome, 'not_before', resumes_at,
      'cause', g.drain_cause, 'seconds', extract(epoch from t - g.drain_started_at)));
  if outcome <> 'blocked' then
    perform gangq.end_gang(g.id, outcome, why, t);
    return outcome;
  end if;
  update gangq.live_jobs j set state = 'blocked', epoch_rank = null
  where j.gang_id = g.id and (j.state = 'preempted' or j.epoch_rank is not null);
  update gangq.live_gangs x set state = 'blocked', world_size = null, drain_started_at = null,
    go_at = null, reserved_at = null, not_before = resumes_at
  where x.id = g.id;
  perform gangq.wake_tick();
  return outcome;
end $$;

-- Internal, for complete_drain. Why a drained gang cannot run again; null: it can.
create function gangq.drained_for_good(g gangq.live_gangs) returns text
language plpgsql stable as $$
declare
  max_stops integer := (select c.max_stops from gangq.settings c);
  c record := gangq.cause_named(g.drain_cause);
begin
  if g.failure_policy = 'fail' and c.ending = 'fault' then
    -- Of a standstill it is not always known who stopped first.
    return (
      select format('%s %s%s, and the gang''s failure policy is fail',
        coalesce('rank ' || gangq.rank_of(j), 'a member'), c.words,
        ': ' || left(j.error ->> 'message', 200))
      from (select 1) as one left join gangq.live_jobs j on j.id = g.drain_trigger);
  end if;
  return coalesce((
      select format('rank %s ', gangq.rank_of(j)) || case
        when j.state in ('done', 'failed')
          then format('was already %s when the gang drained (%s)', j.state, g.drain_cause)
        when j.attempts >= j.max_attempts
          then 'spent its ' || gangq.counted(j.max_attempts, 'attempt')
        when j.crashes > j.max_crashes
          then (gangq.cause_named('crash')).words || ' ' || gangq.counted(j.crashes, 'time')
        else (gangq.cause_named('trip')).words || ' ' || gangq.counted(j.trips, 'time') end
      from gangq.live_jobs j
      where j.gang_id = g.id and (j.state in ('done', 'failed')
        or j.attempts >= j.max_attempts or j.crashes > j.max_crashes or j.trips > j.max_trips)
      order by j.state not in ('done', 'failed'), j.rank
      limit 1),
    case
      when g.attempts >= g.max_attempts
        then format('%s launches failed, and max_attempts is %s', g.attempts, g.max_attempts)
      when g.crashes > g.max_crashes
        then 'the gang lost a worker ' || gangq.counted(g.crashes, 'time')
      when g.trips > g.max_trips
        then 'the gang tripped a watchdog ' || gangq.counted(g.trips, 'time')
      when (select max(j.stops) from gangq.live_jobs j where j.gang_id = g.id) > max_stops
        then format('the gang was handed back or told to stop more than %s times', max_stops) end);
end $$;

-- Internal. A gang and its members move to history. If failed it keeps its checkpoints for a retry.
create function gangq.end_gang(gang_id bigint, final_state text, reason text, t timestamptz)
returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  g gangq.live_gangs;
  waited jsonb;
begin
  select x.* into g from gangq.live_gangs x where x.id = end_gang.gang_id;
  waited := gangq.waited_of(g, t);
  -- Members that a done gang did not need are cancelled.
  update gangq.live_jobs j set finished_at = t, waits_on = 0,
    state = case end_gang.final_state when 'done' then 'cancelled' else end_gang.final_state end,
    error = case when end_gang.final_state = 'failed'
      then coalesce(j.error, jsonb_build_object('type', 'GangFailed', 'message', end_gang.reason))
      else j.error end
  where j.gang_id = g.id and j.state not in ('done', 'failed', 'cancelled');
  -- Before the members leave: gangq.ended_as reads this row for their dependents.
  insert into gangq.gang_history
  select h.*
  from gangq.shapes s
  join gangq.queues_table q on q.name = s.queue
  -- What both tables have is as it was.
  cross join lateral jsonb_populate_record(null::gangq.gang_history,
    to_jsonb(g) || jsonb_build_object('gang_id', g.id, 'finished_at', t,
      'state', end_gang.final_state, 'reason', end_gang.reason, 'retention',
      case end_gang.final_state when 'done' then q.retention_done else q.retention_failed end)) h
  where s.id = g.shape_id;
  perform gangq.leave(
    array(select j.id from gangq.live_jobs j where j.gang_id = g.id order by j.id), '{}', null,
    '{}', null, t, end_gang.final_state);
  if end_gang.final_state <> 'failed' then
    delete from gangq.checkpoints c where c.gang_id = g.id;
  end if;
  delete from gangq.plans p where p.ask = 'g' || g.id;
  delete from gangq.live_gangs x where x.id = g.id;
  perform gangq.log_event(t, 'end', g.id, g.epoch, reason => end_gang.reason,
    data => jsonb_strip_nulls(
      jsonb_build_object('outcome', end_gang.final_state, 'waited', waited)));
  perform gangq.wake_tick();
end $$;
