-- How an epoch ends: a gang is taken down together (drain, complete_drain). By its failure policy
-- it may go on without the members it lost (101).
-- Member: running -> preempting (told to stop) -> preempted (proven stopped) -> blocked; one that
-- is lost is proven stopped at once. Gang: running -> draining -> blocked, or it ends.
-- Who pays for which cause, and which are losses: gangq.causes (078). Arguments of these functions:
--   stopped  members that are proven stopped; all others that run go on, or are told to stop
--   payers   members that pay for a fault or a loss (causes.ending). An end that was asked for is
--            paid by every member that ran, whatever payers says. The gang pays in both cases
-- Locks: the gang and all its members. Callers hold these locks already; complete_drain takes them,
-- because workers may call it by itself. Never a worker row.

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
  beats jsonb := gangq.last_beats(stopped);
  told bigint[] := array(
    select j.incarnation from gangq.live_jobs j
    where j.gang_id = drain.gang_id and j.state = 'running' and j.id <> all (stopped));
begin
  -- 1.
  select x.* into g from gangq.live_gangs x where x.id = drain.gang_id;
  cause := gangq.cause_charged(g, stopped, cause);
  perform gangq.write_stopped(g, stopped, payers, cause, drain.error, final, t);
  -- 2.
  update gangq.live_jobs j set state = 'preempting', told_at = t,
    stop_reason = case cause when 'cancel' then 'cancel' else 'drain' end,
    (attempts, crashes, trips, stops, snoozes) = (
      select * from gangq.charge_job(j, gangq.member_charge(j.id, payers, cause), final)),
    error = case when j.id = any (payers) then coalesce(drain.error, j.error) else j.error end
  where j.gang_id = g.id and j.state = 'running';
  delete from gangq.device_holds h using gangq.live_jobs j
  where h.job_id = j.id and j.gang_id = g.id and j.state = 'reserved';
  update gangq.live_jobs j set state = 'blocked', incarnation = null, deadline_at = null
  where j.gang_id = g.id and j.state = 'reserved';
  -- 3.
  update gangq.live_gangs x set state = 'draining', drain_started_at = t, drain_cause = cause,
    drain_trigger = coalesce(payers[1], stopped[1]), deadline_at = null, missing_since = null,
    not_before = null, master_host = null, master_addr = null, master_port = null
  where x.id = g.id;
  perform gangq.log_event(t, 'drain', g.id, g.epoch, coalesce(payers[1], stopped[1]),
    reason => drain.reason,
    data => beats || jsonb_build_object('cause', cause, 'culprits', stopped,
      'told', cardinality(told), 'error', gangq.for_events(drain.error)));
  perform gangq.wake(told, 'stop');
  -- 4.
  perform gangq.complete_drain(g.id);
end $$;

-- Internal. What these members have last told and saved, for the data of the event that ends their
-- attempts: "last_beats", rows of member_beats; nothing of members that have neither beaten nor
-- saved. Called while they have their tokens. So a beat writes no history, and an attempt leaves
-- its last.
create function gangq.last_beats(job_ids bigint[]) returns jsonb language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
begin
  return (
    select jsonb_strip_nulls(jsonb_build_object('last_beats',
      jsonb_agg(to_jsonb(m) - 'gang_id' order by m.rank)))
    from gangq.member_beats m
    where m.job_id = any (last_beats.job_ids)
      and (m.beat_at is not null or m.saved_at is not null));
end $$;

-- Internal. These members are preempted; the payers of them and the gang are charged. Returns the
-- gang.
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
    (attempts, crashes, trips, stops, snoozes) = (
      select * from gangq.charge_job(j, gangq.member_charge(j.id, payers, cause), final))
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

-- Internal. What was told to stop is proven stopped, or will be at gone_at. how: ack (its worker
-- said so), dead (its worker has ended), force (it never confirmed). Returns its state.
create function gangq.stopped(
  j gangq.live_jobs, error jsonb, t timestamptz, how text default 'ack',
  gone_at timestamptz default null
) returns text language plpgsql as $$
declare
  g gangq.live_gangs;
  beats jsonb;
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
  beats := gangq.last_beats(array[j.id]);
  perform gangq.record_attempts(array[gangq.attempt_of(j,
    case j.stop_reason when 'drain' then g.drain_cause else j.stop_reason end, t)]);
  update gangq.live_jobs x set state = 'preempted', final_token = x.token, token = null,
    incarnation = null, request_id = null, told_at = null, stop_reason = null,
    error = coalesce(stopped.error, x.error)
  where x.id = j.id;
  delete from gangq.device_holds h where h.job_id = j.id;
  perform gangq.log_job(t, how, j, null, beats || jsonb_build_object('rank', gangq.rank_of(j),
    'seconds', extract(epoch from t - j.told_at)));
  if g.state = 'running' then
    -- The member had left the epoch (shrink_gang), and the others run on.
    update gangq.live_jobs x set state = 'blocked' where x.id = j.id;
    perform gangq.wake_tick();
  else
    perform gangq.complete_drain(j.gang_id);
  end if;
  return 'preempted';
end $$;

-- Called when a member of a draining gang is proven stopped; does its work when that was the last
-- one. The gang is blocked again as a whole, or it ends: done when it is fulfilled, cancelled when
-- that was asked, failed for one of the reasons of drained_for_good. Returns the outcome; null
-- while a member is still stopping, or the gang does not drain. Raises GQ002.
create function gangq.complete_drain(gang_id bigint) returns text
language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  g gangq.live_gangs := gangq.lock_gang(complete_drain.gang_id);
  t timestamptz := gangq.now();
  why text;
  outcome text;
  resumes_at timestamptz;
begin
  if g.state <> 'draining' or exists (
    select 1 from gangq.live_jobs j
    where j.gang_id = g.id and j.state in ('running', 'preempting'))
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
