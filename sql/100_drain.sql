-- How an epoch ends. A gang is taken down together (drain, complete_drain), or its failure policy
-- lets it go on without the members it lost (lose_members, shrink_gang). Then cancel and retry.
-- Member: running -> preempting (told to stop) -> preempted (proven stopped) -> blocked; one that
-- is lost is proven stopped at once. Gang: running -> draining -> blocked, or it ends.
-- Who pays for which cause, and which are losses: gangq.causes (078).
-- Locks: gangs by id, jobs by id; internal functions are called under the lock of the gang and all
-- its members. retry locks the ending that it starts from (history or gang_history), then the
-- settings, shared. Never a worker row.

-- Why each step stands before the next one:
-- 1. The culprits are stopped and charged while they still run. Step 2 would tell them to stop.
-- 2. Members that run are told to stop, those that are only reserved give their places back.
-- 3. The gang drains.
-- 4. complete_drain finds a gang that drains, and ends the drain if nothing runs any more.
create function gangq.drain(
  gang_id bigint, culprits bigint[], cause text, error jsonb, reason text, t timestamptz,
  final boolean default false, charged bigint[] default null
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
  pays bigint[] := coalesce(drain.charged, culprits);
  told bigint[];
begin
  -- 1.
  select x.* into g from gangq.live_gangs x where x.id = drain.gang_id;
  perform gangq.stop_culprits(g, culprits, pays, cause, drain.error, final, t);
  -- 2.
  with stopping as (
    update gangq.live_jobs j set state = 'preempting', told_at = t,
      stop_reason = case cause when 'cancel' then 'cancel' else 'drain' end,
      (attempts, crashes, trips, stops) = (
        select * from gangq.charge_member(j, pays, cause, final)),
      error = case when j.id = any (pays) then coalesce(drain.error, j.error) else j.error end
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
    drain_trigger = coalesce(pays[1], culprits[1]), deadline_at = null, missing_since = null,
    not_before = null, master_host = null, master_addr = null, master_port = null
  where x.id = g.id;
  perform gangq.log_event(t, 'drain', g.id, g.epoch, coalesce(pays[1], culprits[1]),
    reason => drain.reason,
    data => jsonb_build_object('cause', cause, 'culprits', culprits,
      'told', coalesce(cardinality(told), 0), 'error', gangq.for_events(drain.error)));
  perform gangq.wake(told, 'stop');
  -- 4.
  perform gangq.complete_drain(g.id);
end $$;
comment on function gangq.drain is
  'Internal. Takes a reserved or running gang down. culprits: members that are proven stopped; all '
  'others that run are told to stop. cause: as it is charged (cause_charged). charged: the members '
  'that pay what a culprit pays; null: the culprits; ''{}'': no member, and the gang pays all the '
  'same. final: a failure that is not retryable.';

create function gangq.stop_culprits(
  g gangq.live_gangs, culprits bigint[], pays bigint[], cause text, error jsonb, final boolean,
  t timestamptz
) returns gangq.live_gangs language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
begin
  perform gangq.record_attempts(array(
    select gangq.attempt_of(j, stop_culprits.cause, t) from gangq.live_jobs j
    where j.id = any (culprits) and j.state = 'running'));
  update gangq.live_jobs j set state = 'preempted', final_token = j.token, token = null,
    incarnation = null, request_id = null, error = coalesce(stop_culprits.error, j.error),
    (attempts, crashes, trips, stops) = (
      select * from gangq.charge_member(j, pays, stop_culprits.cause, final))
  where j.id = any (culprits) and j.state = 'running';
  delete from gangq.device_holds h where h.job_id = any (culprits);
  update gangq.live_gangs x
  set (attempts, crashes, trips, never_started, placement_misses, preemptions) = (
    select * from gangq.charge_gang(x, (gangq.cause_named(stop_culprits.cause)).gang))
  where x.id = g.id
  returning x.* into g;
  return g;
end $$;
comment on function gangq.stop_culprits is
  'Internal. The culprits are preempted; they and the gang are charged. Returns the gang.';

-- Why each step stands before the next one:
-- 1. must_drain asks whether this loss is one too many, so it has not been counted yet.
-- 2. The culprits are charged. Step 4 reads the counters of the gang that this returns.
-- 3. They are preempted and then blocked, because a running job cannot become blocked at once.
-- 4. The gang goes on without them (shrink), or waits for places for them (restart_member).
create function gangq.lose_members(
  gang_id bigint, culprits bigint[], cause text, error jsonb, reason text, t timestamptz,
  final boolean default false, charged bigint[] default null
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
  pays bigint[] := coalesce(lose_members.charged, culprits);
  why jsonb;
begin
  -- 1.
  select x.* into g from gangq.live_gangs x where x.id = lose_members.gang_id;
  cause := gangq.cause_charged(g, culprits, cause);
  if gangq.must_drain(g, culprits, pays, cause, final) then
    perform gangq.drain(g.id, culprits, cause, error, reason, t, final, lose_members.charged);
    return;
  end if;
  -- 2.
  g := gangq.stop_culprits(g, culprits, pays, cause, error, final, t);
  -- 3.
  update gangq.live_jobs j set state = 'blocked'
  where j.id = any (culprits) and j.state = 'preempted';
  -- 4.
  why := jsonb_build_object('cause', cause, 'error', gangq.for_events(error));
  if g.failure_policy = 'shrink' then
    perform gangq.go_on_without(g, culprits, why, reason, t);
    return;
  end if;
  -- restart_member: the placement timeout starts with the first loss. Without rank 0 the gang has
  -- no rendezvous address.
  if g.missing_since is null then
    g.missing_since := t;
    g.timeout_at := t + make_interval(secs => g.timeout_s);
    g.held_s := gangq.ineligible_s(g.kind_id, t);
  end if;
  g.not_before := gangq.resumes_at(g, cause, culprits, t);
  update gangq.live_gangs x set missing_since = g.missing_since, timeout_at = g.timeout_at,
    held_s = g.held_s, not_before = g.not_before
  where x.id = g.id;
  update gangq.live_gangs x set master_host = null, master_addr = null, master_port = null
  where x.id = g.id and exists (
    select from gangq.live_jobs j
    where j.id = any (culprits) and coalesce(j.epoch_rank, j.rank) = 0);
  perform gangq.log_event(t, 'replace', g.id, g.epoch, culprits[1], reason => reason,
    data => why || jsonb_build_object('culprits', culprits, 'not_before', g.not_before));
  perform gangq.wake_tick(true);
end $$;
comment on function gangq.lose_members is
  'Internal. Members (culprits) are proven stopped without having been told to: the gang drains, '
  'or by its failure policy they wait for a new place (restart_member) or leave the epoch '
  '(shrink), and the others run on. The arguments are those of drain.';

create function gangq.must_drain(
  g gangq.live_gangs, culprits bigint[], pays bigint[], cause text, final boolean
) returns boolean language plpgsql stable as $$
#variable_conflict use_column
declare
  c record := gangq.cause_named(must_drain.cause);
begin
  return g.go_at is null  -- its barrier has not opened
    or g.state <> 'running'
    or g.failure_policy in ('restart_gang', 'fail')
    or c.ending = 'asked'
    or must_drain.cause = 'never_started' and g.failure_policy = 'shrink'
    or gangq.spends_gang(g, c.gang)  -- its budget is spent, or that of a culprit
    or final and must_drain.cause = 'fail' and culprits <> '{}'
    or exists (
      select from gangq.live_jobs j
      where j.id = any (culprits) and j.id = any (pays) and gangq.spends_job(j, c.member))
    or not exists (  -- no other member would go on
      select 1 from gangq.live_jobs j
      where j.gang_id = g.id and j.id <> all (culprits) and j.state in ('running', 'done')
        and gangq.in_epoch(j, g))
    or g.failure_policy = 'shrink' and gangq.falls_below_minimum(g, culprits);
end $$;
comment on function gangq.must_drain is
  'Internal, for lose_members. Whether the loss of these members takes the whole gang down.';

create function gangq.falls_below_minimum(g gangq.live_gangs, leaving bigint[]) returns boolean
language sql stable as $$
  select exists (
    select 1
    from gangq.kind_roles r
    join gangq.live_jobs j on j.gang_id = g.id and coalesce(j.role, 1) = r.ordinal
    where r.kind_id = g.kind_id
    group by r.ordinal, r.min_members
    having bool_or(j.id = any (leaving)) and r.min_members > count(*) filter (
      where j.id <> all (leaving)
        and (j.state = 'done' or j.state = 'running' and gangq.in_epoch(j, g))))
$$;
comment on function gangq.falls_below_minimum is
  'Internal. Whether a role of this running gang would fall below its minimum without these.';

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
comment on function gangq.resumes_at is
  'Internal. When these stopped members may be placed again. Null: at once.';

create function gangq.go_on_without(
  g gangq.live_gangs, leaving bigint[], why jsonb, reason text, t timestamptz
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
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
    select from gangq.live_jobs j where j.id = rest[1] and coalesce(j.epoch_rank, j.rank) <> 0);
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
comment on function gangq.go_on_without is
  'Internal. These members leave the epoch. The others get the next one at once, with ranks '
  'renumbered in order, and learn its number from their next heartbeat: no barrier opens. A new '
  'rank 0 publishes its address through barrier.';

create function gangq.shrink_gang(gang_id bigint, job_ids bigint[], reason text default null)
returns boolean language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  leaving bigint[];
begin
  perform gangq.refuse_larger('the reason', octet_length(shrink_gang.reason), 4000);
  g := gangq.lock_gang(shrink_gang.gang_id);
  leaving := array(
    select j.id from gangq.live_jobs j
    where j.gang_id = g.id and j.id = any (shrink_gang.job_ids) and j.state = 'running'
      and gangq.in_epoch(j, g)
    order by j.rank);
  if g.state <> 'running' or g.missing_since is not null or leaving = '{}'
    or cardinality(leaving) <> cardinality(shrink_gang.job_ids)
    or not exists (
      select 1 from gangq.live_jobs j
      where j.gang_id = g.id and j.state = 'running' and gangq.in_epoch(j, g)
        and j.id <> all (leaving))
    or gangq.falls_below_minimum(g, leaving)
  then
    return false;
  end if;
  update gangq.live_jobs j set state = 'preempting', told_at = t, stop_reason = 'preempt',
    (attempts, crashes, trips, stops) = (
      select * from gangq.charge_member(j, '{}', 'preempt', false))
  where j.id = any (leaving);
  perform gangq.wake(array(select j.incarnation from gangq.live_jobs j where j.id = any (leaving)),
    'stop');
  perform gangq.go_on_without(g, leaving, '{"cause": "preempt"}',
    coalesce(shrink_gang.reason, 'surplus members are displaced'), t);
  return true;
end $$;
comment on function gangq.shrink_gang is
  'Tells surplus members of a running elastic gang to stop. The others run on in a new epoch '
  'without them. No attempt is charged, each of them counts a stop. What they hold is free once '
  'they are proven stopped; they come back when the gang is placed anew. Returns false, and '
  'changes nothing, when one of them is not running, a role would fall below its minimum, or a '
  'member is being replaced. Raises GQ002, GQ007.';

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
    perform gangq.log_event(t, how, job_id => j.id, token => j.token,
      incarnation => j.incarnation, reason => 'cancelled');
    perform gangq.wake_tick();
    return 'cancelled';
  elsif j.gang_id is null then
    return gangq.end_attempt(j, case j.stop_reason when 'move' then 'move' else 'release' end,
      null, 'told to stop', t, gone_at, kind => nullif(how, 'ack'));
  end if;
  select x.* into g from gangq.live_gangs x where x.id = j.gang_id;
  perform gangq.record_attempts(array[gangq.attempt_of(j,
    case j.stop_reason when 'drain' then g.drain_cause else j.stop_reason end, t)]);
  update gangq.live_jobs x set state = 'preempted', final_token = x.token, token = null,
    incarnation = null, request_id = null, told_at = null, stop_reason = null,
    error = coalesce(stopped.error, x.error)
  where x.id = j.id;
  delete from gangq.device_holds h where h.job_id = j.id;
  perform gangq.log_event(t, how, j.gang_id, g.epoch, j.id, j.token, j.incarnation,
    data => jsonb_build_object('rank', coalesce(j.epoch_rank, j.rank), 'seconds',
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
comment on function gangq.stopped is
  'Internal. What was told to stop is proven stopped, or will be at gone_at. how: ack (its worker '
  'said so), dead (its worker has ended), force (it never confirmed). Returns its state.';

create function gangq.fulfilled(gang_id bigint) returns boolean
language plpgsql stable set plan_cache_mode = force_generic_plan as $$
begin
  return (
    select coalesce(bool_and(j.state = 'done'), false)
    from gangq.live_gangs g
    join gangq.live_jobs j on j.gang_id = g.id and (j.state = 'done' or gangq.in_epoch(j, g))
    left join gangq.kind_roles r on r.kind_id = g.kind_id and r.name = g.completion
    where g.id = fulfilled.gang_id and coalesce(r.ordinal = coalesce(j.role, 1), true));
end $$;
comment on function gangq.fulfilled is
  'Internal. Whether every member of this epoch is done, or of the role that completion names.';

create function gangq.wind_up(gang_id bigint, t timestamptz) returns boolean
language plpgsql as $$
begin
  if not gangq.fulfilled(gang_id) then
    return false;
  elsif exists (
    select from gangq.live_jobs j
    where j.gang_id = wind_up.gang_id and j.state in ('reserved', 'running', 'preempting'))
  then
    perform gangq.drain(gang_id, '{}', 'completed', null, 'what it is for is done', t);
  else
    perform gangq.end_gang(gang_id, 'done', null, t);
  end if;
  return true;
end $$;
comment on function gangq.wind_up is
  'Internal. Ends a gang as done if it is fulfilled, after the members that still run have '
  'stopped.';

create function gangq.complete_drain(gang_id bigint) returns text
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  why text;
  outcome text;
  resumes_at timestamptz;
begin
  select x.* into g from gangq.live_gangs x where x.id = complete_drain.gang_id for update;
  if not found then
    perform gangq.refuse('GQ002', format('gang %s is not live', complete_drain.gang_id),
      'It has ended or never existed: select * from gangq.gangs.');
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
    data => jsonb_build_object('outcome', outcome, 'not_before', resumes_at));
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
comment on function gangq.complete_drain is
  'Called when a member of a draining gang is proven stopped; does its work when that was the last '
  'one. The gang is blocked again as a whole, or it ends: done when it is fulfilled, cancelled '
  'when that was asked, failed for one of the reasons of drained_for_good. Returns the outcome; '
  'null while a member is still stopping, or the gang does not drain. Raises GQ002.';

create function gangq.drained_for_good(g gangq.live_gangs) returns text
language plpgsql stable set plan_cache_mode = force_generic_plan as $$
declare
  max_stops integer := (select c.max_stops from gangq.settings c);
  c record := gangq.cause_named(g.drain_cause);
begin
  if g.failure_policy = 'fail' and c.ending = 'fault' then
    return (
      select format('rank %s %s%s, and the gang''s failure policy is fail',
        coalesce(j.epoch_rank, j.rank), c.words, ': ' || left(j.error ->> 'message', 200))
      from gangq.live_jobs j where j.id = g.drain_trigger);
  end if;
  return coalesce((
      select format('rank %s ', coalesce(j.epoch_rank, j.rank)) || case
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
        then format('the gang spent its %s launches', g.max_attempts)
      when g.crashes > g.max_crashes
        then 'the gang lost a worker ' || gangq.counted(g.crashes, 'time')
      when g.trips > g.max_trips
        then 'the gang tripped a watchdog ' || gangq.counted(g.trips, 'time')
      when (select max(j.stops) from gangq.live_jobs j where j.gang_id = g.id) > max_stops
        then format('the gang was handed back or told to stop more than %s times', max_stops) end);
end $$;
comment on function gangq.drained_for_good is
  'Internal, for complete_drain. Why a drained gang cannot run again; null: it can.';

create function gangq.end_gang(gang_id bigint, final_state text, reason text, t timestamptz)
returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
begin
  select x.* into g from gangq.live_gangs x where x.id = end_gang.gang_id;
  -- Members that a done gang did not need are cancelled.
  update gangq.live_jobs j set finished_at = t, waits_on = 0,
    state = case end_gang.final_state when 'done' then 'cancelled' else end_gang.final_state end,
    error = case when end_gang.final_state = 'failed'
      then coalesce(j.error, jsonb_build_object('type', 'GangFailed', 'message', end_gang.reason))
      else j.error end
  where j.gang_id = g.id and j.state not in ('done', 'failed', 'cancelled');
  -- Before the members leave: gangq.ended_as reads this row for their dependents.
  insert into gangq.gang_history (gang_id, finished_at, submitted_at, shape_id, size, epoch,
    priority, attempts, max_attempts, crashes, max_crashes, trips, max_trips, placement_misses,
    never_started, preemptions, state, retention, checkpoint_mode, claim_deadline_s, name, reason,
    submitter, login, kind_id, world_size, failure_policy, completion, preemptible, budget_s,
    timeout_s, timeout_style)
  select g.id, t, g.submitted_at, g.shape_id, g.size, g.epoch, g.priority, g.attempts,
    g.max_attempts, g.crashes, g.max_crashes, g.trips, g.max_trips, g.placement_misses,
    g.never_started, g.preemptions, end_gang.final_state,
    case end_gang.final_state when 'done' then q.retention_done else q.retention_failed end,
    g.checkpoint_mode, g.claim_deadline_s, g.name, end_gang.reason, g.submitter, g.login, g.kind_id,
    g.world_size, g.failure_policy, g.completion, g.preemptible, g.budget_s, g.timeout_s,
    g.timeout_style
  from gangq.shapes s join gangq.queues_table q on q.name = s.queue
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
    data => jsonb_build_object('outcome', end_gang.final_state));
  perform gangq.wake_tick();
end $$;
comment on function gangq.end_gang is
  'Internal. A gang and its members move to history. If failed it keeps its checkpoints for a '
  'retry.';

create function gangq.preempt_gang(
  gang_id bigint, trigger_job bigint default null, reason text default null
) returns boolean language plpgsql as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
begin
  perform gangq.refuse_larger('the reason', octet_length(preempt_gang.reason), 4000);
  g := gangq.lock_gang(preempt_gang.gang_id);
  if g.state not in ('reserved', 'running') or preempt_gang.trigger_job is not null and not exists (
    select 1 from gangq.live_jobs j
    where j.id = preempt_gang.trigger_job and j.gang_id = g.id
      and j.state in ('running', 'reserved'))
  then
    return false;
  end if;
  perform gangq.drain(g.id, '{}', 'preempt', null,
    coalesce(preempt_gang.reason, 'preempted by an operator'), gangq.now());
  return true;
end $$;
comment on function gangq.preempt_gang is
  'Tells a reserved or running gang to stop. It keeps its checkpoint and is placed again; no '
  'attempt is charged, each member that ran counts a stop. (A gang of which a member has finished '
  'cannot run again and ends failed, for gangq.retry.) trigger_job, if given, must be a live '
  'member of the present epoch. Returns false, and changes nothing, when it is not, or the gang is '
  'not placed. Raises GQ002, GQ007.';

-- Cancel and retry --------------------------------------------------------------------------------

create function gangq.check_known(job_ids bigint[], gang_ids bigint[]) returns void
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
begin
  perform gangq.refuse('GQ002',
    format('%s %s does not exist', x.what, coalesce(x.id::text, 'null')),
    format('%s ids are in gangq.%ss; history is kept for its retention.', initcap(x.what), x.what))
  from (
    select 'job' as what, c.id from unnest(job_ids) as c(id)
    where not exists (select 1 from gangq.live_jobs j where j.id = c.id)
      and not exists (select 1 from gangq.history h where h.job_id = c.id)
    union all
    select 'gang', c.id from unnest(gang_ids) as c(id)
    where not exists (select 1 from gangq.live_gangs g where g.id = c.id)
      and not exists (select 1 from gangq.gang_history h where h.gang_id = c.id)) x;
end $$;
comment on function gangq.check_known is
  'Internal. Raises GQ002 for a job or gang that is neither live nor in history.';

-- Why each step stands before the next one:
-- 1. Lock first: what is checked and shown below cannot change any more.
-- 2. Read the clock under the locks, or an ending could be dated before the retry that it ends.
-- 3. Cancel the gangs. cancelling is set before the drain, because complete_drain reads it.
-- 4. Cancel the jobs. Those that run are woken before they are told to stop, while the rows still
--    say which run. All that need not stop leave.
-- 5. Answer with the states that they have now.
create function gangq.cancel_all(job_ids bigint[], gang_ids bigint[], reason text)
returns table (job_id bigint, gang_id bigint, state text)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
  t timestamptz;
  batch record;
  waiting bigint[];
  g gangq.live_gangs;
begin
  perform gangq.refuse_larger('the reason', octet_length(cancel_all.reason), 4000);
  -- 1.
  batch := gangq.lock_batch(cancel_all.job_ids, cancel_all.gang_ids);
  perform gangq.check_known(cancel_all.job_ids, cancel_all.gang_ids);
  perform gangq.refuse('GQ001', format('job %s is rank %s of gang %s', j.id, j.rank, j.gang_id),
    format('Members stop together: cancel the gang (gang_ids => array[%s]).', j.gang_id))
  from gangq.live_jobs j where j.id = any (cancel_all.job_ids) and j.gang_id is not null;
  -- 2.
  t := gangq.now();
  -- 3.
  for g in select x.* from gangq.live_gangs x where x.id = any (batch.gangs) order by x.id loop
    perform gangq.log_event(t, 'cancel', g.id, g.epoch, reason => cancel_all.reason);
    update gangq.live_gangs x set cancelling = true where x.id = g.id;
    if g.state in ('reserved', 'running') then
      perform gangq.drain(g.id, '{}', 'cancel', null, cancel_all.reason, t);
    elsif g.state in ('waiting', 'blocked') then
      perform gangq.end_gang(g.id, 'cancelled', cancel_all.reason, t);
    end if;
    -- Of a gang that drained already, or members that had left the epoch (shrink_gang).
    update gangq.live_jobs x set stop_reason = 'cancel'
    where x.gang_id = g.id and x.state = 'preempting' and x.stop_reason <> 'cancel';
  end loop;
  -- 4.
  perform gangq.log_event(t, 'cancel', job_id => j.id, token => j.token,
      reason => cancel_all.reason),
    case when j.state = 'running' then gangq.wake(array[j.incarnation], 'stop') end
  from gangq.live_jobs j where j.id = any (batch.jobs) order by j.id;
  update gangq.live_jobs j set state = 'preempting', stop_reason = 'cancel',
    told_at = case j.state when 'running' then t else j.told_at end
  where j.id = any (batch.jobs) and j.state in ('running', 'preempting');
  waiting := array(
    select j.id from gangq.live_jobs j where j.id = any (batch.jobs) and j.state <> 'preempting');
  if waiting <> '{}' then
    perform gangq.leave(waiting, '{}', 'cancelled', '{}',
      jsonb_build_object('type', 'Cancelled', 'message', cancel_all.reason), t);
  end if;
  -- 5.
  return query
  select null::bigint, c.id, case when c.id = any (batch.left_gangs) then 'left'
    else (select x.state from gangq.gangs x where x.id = c.id) end
  from (select distinct u.id from unnest(cancel_all.gang_ids) as u(id)) c
  union all
  select c.id, null, case when c.id = any (batch.left_jobs) then 'left'
    else (select x.state from gangq.jobs x where x.id = c.id) end
  from (select distinct u.id from unnest(cancel_all.job_ids) as u(id)) c;
end $$;
comment on function gangq.cancel_all is
  'Internal. As cancel, for callers whose right was checked, and for promote_due.';

create function gangq.cancel(
  job_ids bigint[] default '{}', gang_ids bigint[] default '{}', reason text default null
) returns table (job_id bigint, gang_id bigint, state text)
language plpgsql as $$
begin
  perform gangq.check_owner('cancel', cancel.job_ids, cancel.gang_ids);
  return query select c.* from gangq.cancel_all(cancel.job_ids, cancel.gang_ids,
    coalesce(cancel.reason, 'cancelled by ' || gangq.caller())) c;
end $$;
comment on function gangq.cancel is
  'Cancels live jobs and gangs. Running work is told to stop and is cancelled once proven stopped. '
  'Returns the state each has now (cancelled, preempting, draining, or how it had ended). A call '
  'for one job or gang waits for its lock. Of several, those that another transaction holds and '
  'those beyond 500 rows are returned unchanged with the state left: call again with them, in '
  'another transaction. Raises GQ001 (a member of a gang), GQ002, GQ007, 42501 (another '
  'submitter''s, in a queue that is not shared).';

-- Two retries of one ending: both read the ending, the first retries, its job runs and ends. The
-- second must not start from the old ending. So each
-- 1. locks the ending's row,
-- 2. reads in a later statement which ending no retry has started from,
-- 3. writes that ending into retried, whose key no two rows share.
create function gangq.retry(job_ids bigint[] default '{}', gang_ids bigint[] default '{}')
returns table (job_id bigint, gang_id bigint, state text)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  room integer := 500;
  members integer;
  taken bigint[];
begin
  perform gangq.check_owner('retry', retry.job_ids, retry.gang_ids);
  if coalesce(cardinality(retry.job_ids), 0) + coalesce(cardinality(retry.gang_ids), 0) = 1 then
    perform from gangq.history h where h.job_id = any (retry.job_ids) and h.gang_id is null
    for update;
    perform from gangq.gang_history h where h.gang_id = any (retry.gang_ids) for update;
  end if;
  -- Submissions have their transaction id before they draw a position, and so has this.
  perform pg_current_xact_id();
  for gang_id in
    select c.id from unnest(retry.gang_ids) with ordinality as c(id, n)
    group by c.id order by min(c.n)
  loop
    members := case when room > 0 then gangq.retry_gang(gang_id, t) end;
    room := room - coalesce(members, 0);
    state := case when members is null then 'left' else 'blocked' end;
    if state = 'left' then
      perform gangq.refuse_retries('{}', array[gang_id]);
    end if;
    return next;
  end loop;
  taken := gangq.retry_jobs(retry.job_ids, null, greatest(room, 0), t);
  gang_id := null;
  for job_id, state in
    select c.id, case when c.id = any (taken) then 'pending' else 'left' end
    from unnest(retry.job_ids) with ordinality as c(id, n)
    group by c.id order by min(c.n)
  loop
    if state = 'left' then
      perform gangq.refuse_retries(array[job_id], '{}');
    end if;
    return next;
  end loop;
  perform gangq.wake_tick();
end $$;
comment on function gangq.retry is
  'Runs jobs and gangs that have ended once more, under their old ids, with fresh counters. A '
  'failed gang resumes from its last complete checkpoint. They count as the caller''s in limits '
  'and shares. Of several, those that another transaction holds and those beyond 500 are returned '
  'unchanged with the state left: call again with them, in another transaction. Raises GQ001 (a '
  'member of a gang, or a topology level that no longer exists), GQ002, GQ004 (still live, or its '
  'queue is draining), 42501 (another submitter''s, in a queue that is not shared, or a priority '
  'above the caller''s ceiling).';

create function gangq.refuse_retries(job_ids bigint[], gang_ids bigint[]) returns void
language plpgsql set plan_cache_mode = force_generic_plan as $$
begin
  perform gangq.refuse('GQ004', format('%s is live', x.what),
    format('Only a %s that has ended can be retried.', split_part(x.what, ' ', 1)))
  from (
    select 'gang ' || g.id from gangq.live_gangs g where g.id = any (refuse_retries.gang_ids)
    union all
    select 'job ' || j.id from gangq.live_jobs j where j.id = any (refuse_retries.job_ids)
  ) as x(what);
  perform gangq.check_known(refuse_retries.job_ids, refuse_retries.gang_ids);
  perform gangq.refuse('GQ001',
    format('job %s was rank %s of gang %s', h.job_id, h.rank, h.gang_id),
    format('Members run together: retry the gang (gang_ids => array[%s]).', h.gang_id))
  from gangq.history h where h.job_id = any (refuse_retries.job_ids) and h.gang_id is not null;
end $$;
comment on function gangq.refuse_retries is
  'Internal, for retry. Raises GQ001, GQ002 or GQ004 for what no other call could retry either.';

create function gangq.retry_gang(gang_id bigint, t timestamptz) returns integer
language plpgsql as $$
#variable_conflict use_column
declare
  k gangq.gang_history;
  base bigint := (select b.base from gangq.id_base() b);
begin
  select x.* into k from gangq.gang_history x
  where x.gang_id = retry_gang.gang_id and not exists (
    select 1 from gangq.retried r where r.gang_id = x.gang_id and r.finished_at = x.finished_at)
  for update skip locked;
  insert into gangq.retried (gang_id, finished_at)
  select k.gang_id, k.finished_at where k.gang_id is not null
  on conflict do nothing;
  if not found then
    return null;
  end if;
  -- As in submit_gang: configure takes no topology level away before this gang can be seen.
  perform from gangq.settings c for share;
  perform gangq.check_level(format('gang %s', k.gang_id), l.require, l.prefer, false)
  from (
    select x.require, x.prefer from gangq.gang_kinds x where x.id = k.kind_id
    union all
    select r.require, r.prefer from gangq.kind_roles r where r.kind_id = k.kind_id) l;
  insert into gangq.live_gangs (id, order_key, kind_id, shape_id, size, epoch, priority,
    max_attempts, max_crashes, max_trips, state, checkpoint_mode, claim_deadline_s, submitted_at,
    name, submitter, failure_policy, completion, preemptible, budget_s, timeout_s, timeout_style,
    timeout_at)
  values (k.gang_id, gangq.order_key(k.priority, gangq.next_pos(base)),
    gangq.kind_for(k.kind_id, gangq.caller(), session_user),
    gangq.shape_for(k.shape_id, gangq.caller(), session_user), k.size, k.epoch, k.priority,
    k.max_attempts, k.max_crashes, k.max_trips, 'blocked', k.checkpoint_mode, k.claim_deadline_s, t,
    k.name, gangq.caller(), k.failure_policy, k.completion, k.preemptible, k.budget_s, k.timeout_s,
    k.timeout_style, t + make_interval(secs => k.timeout_s));
  if k.size <> cardinality(gangq.retry_jobs(
    array(select h.job_id from gangq.history h where h.gang_id = k.gang_id), k.gang_id, null, t))
  then
    perform gangq.refuse('GQ002',
      format('history no longer has every member of gang %s', k.gang_id),
      'Part of it was dropped after its retention: submit the gang anew.');
  end if;
  perform gangq.log_event(t, 'retry', k.gang_id, k.epoch,
    reason => 'retried by ' || gangq.caller());
  return k.size;
end $$;
comment on function gangq.retry_gang is
  'Internal, for retry. Makes a gang live again from its latest ending, with the caller as its '
  'submitter. Returns how many members it has; null: another transaction holds the ending.';

-- Why each step stands before the next one:
-- 1. One statement locks the endings, notes them in retried and makes the jobs live: see retry.
-- 2. The queue and the priority are checked on the live rows. A refusal undoes step 1.
-- 3. Events and wakes are for what is allowed.
create function gangq.retry_jobs(
  job_ids bigint[], gang_id bigint, most integer, t timestamptz
) returns bigint[] language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  taken bigint[];
  base bigint := (select b.base from gangq.id_base() b);
begin
  -- 1.
  with free as (
    select h.job_id, h.finished_at
    from unnest(retry_jobs.job_ids) with ordinality as c(id, n)
    join gangq.history h on h.job_id = c.id
    where h.gang_id is not distinct from retry_jobs.gang_id and not exists (
      select 1 from gangq.retried r where r.job_id = h.job_id and r.finished_at = h.finished_at)
    order by c.n
    limit most
    for update of h skip locked
  ),
  overtaken as (
    insert into gangq.retried (job_id, finished_at)
    select f.job_id, f.finished_at from free f
    on conflict do nothing
    returning job_id, finished_at
  ),
  live as (
    insert into gangq.live_jobs (id, order_key, gang_id, rank, role, submitted_at, shape_id,
      budget_s, priority, max_attempts, max_crashes, max_trips, state, submitter, parent, payload,
      final_token)
    select h.job_id, coalesce(g.order_key, gangq.order_key(h.priority, gangq.next_pos(base))), g.id,
      h.rank, (
        select max(r.ordinal) from gangq.kind_roles r
        where r.kind_id = g.kind_id and r.first_rank <= h.rank),
      t, gangq.shape_for(h.shape_id, gangq.caller(), session_user), h.budget_s, h.priority,
      h.max_attempts, h.max_crashes, h.max_trips,
      case when g.id is null then 'pending' else 'blocked' end, gangq.caller(), h.parent, h.payload,
      h.token
    from overtaken o
    join gangq.history h on h.job_id = o.job_id and h.finished_at = o.finished_at
    left join gangq.live_gangs g on g.id = h.gang_id
    order by array_position(retry_jobs.job_ids, h.job_id)
    returning id
  )
  select coalesce(array_agg(l.id), '{}') into taken from live l;
  -- 2.
  perform gangq.refuse_draining(q.name, s.queue)
  from gangq.live_jobs j
  join gangq.shapes s on s.id = j.shape_id
  join gangq.queues_table q on q.draining and q.name = any (gangq.queue_path(s.queue))
  where j.id = any (taken)
  order by length(q.name) desc;
  perform gangq.check_ceiling(r.queue, r.priority, gangq.caller(), session_user)
  from (
    select distinct s.queue, j.priority
    from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
    where j.id = any (taken)) r;
  -- 3.
  perform gangq.log_event(t, 'retry', job_id => j.id, reason => 'retried by ' || gangq.caller())
  from gangq.live_jobs j where j.id = any (taken) and j.gang_id is null order by j.id;
  perform gangq.wake_lane(r.shape_id, r.jobs, 'commit')
  from (
    select j.shape_id, count(*) as jobs from gangq.live_jobs j
    where j.id = any (taken) and j.gang_id is null
    group by j.shape_id) r;
  return taken;
end $$;
comment on function gangq.retry_jobs is
  'Internal, for retry. Makes single jobs, or the members of this live gang, live from their '
  'latest ending. Returns which: at most so many, and none whose ending is locked.';
