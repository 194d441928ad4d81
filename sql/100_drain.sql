-- A gang is taken down together: drain, ack, complete_drain; and cancel and retry, which use the same path.
-- Locks: gangs by id, jobs by id; retry the ending that it starts from, in history or gang_history, and the settings, shared, after it. Never a worker row.

-- Begins a drain. culprits are already proven stopped. Everybody else that runs is told to stop; what is only reserved goes
-- back to blocked. Attempts were counted at claim: all but a culprit's are given back here, because only here is the culprit
-- known. charged: whom a trip is counted against, proven stopped or not (null: the culprits; none: nobody knows who it was,
-- and only the gang's own count rises). Before the barrier opened nobody's code had begun, so nobody is charged.
create function gangq.drain(
  gang_id bigint, culprits bigint[], cause text, error jsonb, reason text, t timestamptz, final boolean default false,
  charged bigint[] default null
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
  how text := case drain.cause when 'bystander' then 'release' else drain.cause end;
  pays bigint[] := coalesce(drain.charged, culprits);
  told bigint;
  back bigint;
begin
  select x.* into g from gangq.live_gangs x where x.id = drain.gang_id for update;
  perform 1 from gangq.live_jobs j where j.gang_id = g.id order by j.id for update;
  if g.go_at is null and how in ('fail', 'crash', 'trip') then
    how := 'never_started';
  end if;
  update gangq.live_jobs j set
    state = case when j.id = any (culprits) then 'preempted' else 'preempting' end,
    attempts = case
      when j.id = any (culprits) and how = 'fail' then case when drain.final then greatest(j.attempts, j.max_attempts) else j.attempts end
      else j.attempts - 1 end,
    crashes = j.crashes + case when j.id = any (culprits) and how = 'crash' then 1 else 0 end,
    trips = j.trips + case when j.id = any (pays) and how = 'trip' then 1 else 0 end,
    stops = j.stops + case when how in ('preempt', 'release') then 1 else 0 end,
    final_token = case when j.id = any (culprits) then j.token else j.final_token end,
    token = case when j.id = any (culprits) then null else j.token end,
    incarnation = case when j.id = any (culprits) then null else j.incarnation end,
    request_id = case when j.id = any (culprits) then null else j.request_id end,
    error = case when j.id = any (culprits) or j.id = any (pays) then coalesce(drain.error, j.error) else j.error end,
    told_at = case when j.id = any (culprits) then null else t end,
    stop_reason = case when j.id = any (culprits) then null when g.cancelling then 'cancel' else 'drain' end
  where j.gang_id = g.id and j.state = 'running';
  if g.cancelling then
    update gangq.live_jobs j set stop_reason = 'cancel' where j.gang_id = g.id and j.state = 'preempting' and j.stop_reason <> 'cancel';
  end if;
  update gangq.live_jobs j set state = 'blocked', incarnation = null, deadline_at = null
  where j.gang_id = g.id and j.state = 'reserved';
  get diagnostics back = row_count;
  delete from gangq.device_holds h using gangq.live_jobs j
  where h.job_id = j.id and j.gang_id = g.id and h.kind = 'job' and j.state in ('blocked', 'preempted');
  update gangq.live_gangs x set state = 'draining', drain_started_at = t, drain_cause = how, drain_trigger = coalesce(pays[1], culprits[1]),
    attempts = x.attempts + case how when 'fail' then 1 else 0 end,
    crashes = x.crashes + case how when 'crash' then 1 else 0 end,
    trips = x.trips + case how when 'trip' then 1 else 0 end,
    never_started = x.never_started + case when how = 'never_started' then 1 else 0 end,
    placement_misses = x.placement_misses + case when how = 'placement_miss' then 1 else 0 end,
    preemptions = x.preemptions + case when how = 'preempt' then 1 else 0 end,
    deadline_at = null, missing_since = null, not_before = null, master_host = null, master_addr = null, master_port = null
  where x.id = g.id;
  select count(*) into told from gangq.live_jobs j where j.gang_id = g.id and j.state = 'preempting';
  perform gangq.log_event(t, 'drain', g.id, g.epoch, coalesce(pays[1], culprits[1]), reason => drain.reason, data => jsonb_build_object(
    'cause', how, 'culprits', culprits, 'told', told, 'unreserved', back, 'error', gangq.for_events(drain.error)));
  perform gangq.wake(array(select j.incarnation from gangq.live_jobs j where j.gang_id = g.id and j.state = 'preempting'), 'stop');
  if told = 0 then
    perform gangq.complete_drain(g.id);
  end if;
end $$;
comment on function gangq.drain is
  'Internal. Takes a reserved or running gang down. cause: fail, crash, trip, release, preempt, move, cancel, placement_miss, '
  'never_started, completed (the rest is not needed any more), no_replacement. Ends in complete_drain when nobody is left to '
  'wait for.';

-- Members that ran and are proven stopped, because they failed, tripped or lost their worker: what that means to the others
-- is the gang's failure policy. It can spare the others the restart, not the gang its budgets: when those of a culprit or
-- the gang's own are spent, it drains and fails like any other. So it does before the barrier has opened, and when nobody
-- would be left to go on.
create function gangq.lose_members(
  gang_id bigint, culprits bigint[], cause text, error jsonb, reason text, t timestamptz, final boolean default false,
  charged bigint[] default null
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
  cfg gangq.settings;
  q gangq.queues_table;
  pays bigint[] := coalesce(lose_members.charged, culprits);
  delay interval := '0';
  others boolean;
begin
  select x.* into g from gangq.live_gangs x where x.id = lose_members.gang_id for update;
  perform 1 from gangq.live_jobs j where j.gang_id = g.id order by j.id for update;
  -- Nor had the code of a successor begun that still waited at its barrier for another one.
  if cause in ('fail', 'crash', 'trip') and not exists (
    select 1 from gangq.live_jobs j where j.id = any (culprits) and (g.missing_since is null or j.claimed_at <= g.missing_since)) then
    cause := 'never_started';
  end if;
  others := exists (
    select 1 from gangq.live_jobs j where j.gang_id = g.id and j.id <> all (culprits) and j.state in ('running', 'done') and gangq.in_epoch(j, g));
  if not others or g.go_at is null or g.state <> 'running' or g.failure_policy in ('restart_gang', 'fail')
    or cause not in ('fail', 'crash', 'trip', 'never_started', 'bystander')
    or (case cause when 'fail' then g.attempts + 1 >= g.max_attempts when 'crash' then g.crashes >= g.max_crashes
      when 'trip' then g.trips >= g.max_trips when 'bystander' then false else g.failure_policy = 'shrink' end)
    or exists (
      select 1 from gangq.live_jobs j
      where j.id = any (culprits) and case cause when 'fail' then lose_members.final or j.attempts >= j.max_attempts
        when 'crash' then j.crashes >= j.max_crashes when 'trip' then j.trips >= j.max_trips and j.id = any (pays) end)
    or g.failure_policy = 'shrink' and exists (
      select 1 from gangq.kind_roles r
      where r.kind_id = g.kind_id
        and exists (select 1 from gangq.live_jobs j where j.id = any (culprits) and coalesce(j.role, 1) = r.ordinal)
        and r.min_members > (
          select count(*) from gangq.live_jobs j
          where j.gang_id = g.id and coalesce(j.role, 1) = r.ordinal and j.id <> all (culprits)
            and (j.state = 'done' or j.state = 'running' and gangq.in_epoch(j, g))))
  then
    perform gangq.drain(lose_members.gang_id, culprits, cause, error, reason, t, final, lose_members.charged);
    return;
  end if;
  update gangq.live_jobs j set state = 'preempted',
    attempts = case cause when 'fail' then j.attempts else j.attempts - 1 end,
    crashes = j.crashes + case cause when 'crash' then 1 else 0 end,
    trips = j.trips + case when cause = 'trip' and j.id = any (pays) then 1 else 0 end,
    final_token = j.token, token = null, incarnation = null, request_id = null, error = coalesce(lose_members.error, j.error)
  where j.id = any (culprits) and j.state = 'running';
  update gangq.live_jobs j set state = 'blocked' where j.id = any (culprits) and j.state = 'preempted';
  delete from gangq.device_holds h where h.job_id = any (culprits) and h.kind = 'job';
  update gangq.live_gangs x set
    attempts = x.attempts + case cause when 'fail' then 1 else 0 end,
    crashes = x.crashes + case cause when 'crash' then 1 else 0 end,
    trips = x.trips + case cause when 'trip' then 1 else 0 end,
    never_started = x.never_started + case cause when 'never_started' then 1 else 0 end
  where x.id = g.id returning x.* into g;
  if g.failure_policy = 'shrink' then
    perform gangq.go_on_without(g, culprits, jsonb_build_object('cause', cause, 'error', gangq.for_events(error)), reason, t);
    return;
  end if;
  select x.* into cfg from gangq.settings x;
  select x.* into q from gangq.queues_table x join gangq.shapes s on s.queue = x.name where s.id = g.shape_id;
  delay := case cause when 'never_started' then gangq.backoff(cfg.gang_backoff_s, cfg.gang_backoff_max_s, g.never_started)
    when 'fail' then gangq.backoff(q.backoff_s, q.backoff_max_s, g.attempts + g.trips)
    when 'trip' then gangq.backoff(q.backoff_s, q.backoff_max_s, g.attempts + g.trips) else '0' end;
  -- Its worker may have tripped and be gone a little later: not beside its successor.
  delay := greatest(delay, (
    select max(i.exits_at) from gangq.live_jobs j join gangq.incarnations i on i.id = j.ran_on where j.id = any (culprits)) - t);
  update gangq.live_gangs x set missing_since = coalesce(x.missing_since, t), not_before = case when delay > '0' then t + delay end,
    timeout_at = case when x.missing_since is null then t + make_interval(secs => x.timeout_s) else x.timeout_at end,
    held_s = case when x.missing_since is null then gangq.ineligible_s(x.kind_id, t) else x.held_s end
  where x.id = g.id;
  if exists (select 1 from gangq.live_jobs j where j.id = any (culprits) and coalesce(j.epoch_rank, j.rank) = 0) then
    update gangq.live_gangs x set master_host = null, master_addr = null, master_port = null where x.id = g.id;
  end if;
  perform gangq.log_event(t, 'replace', g.id, g.epoch, culprits[1], reason => lose_members.reason, data => jsonb_build_object(
    'cause', cause, 'culprits', culprits, 'error', gangq.for_events(error), 'not_before', case when delay > '0' then t + delay end));
  perform gangq.wake_tick(true);
end $$;
comment on function gangq.lose_members is
  'Internal. culprits are proven stopped. restart_gang and fail: the gang drains. restart_member: they wait, blocked, for a '
  'place of their own, the others run on. shrink: they leave the epoch, as long as their roles keep their minimum. cause as '
  'for drain, or bystander: the worker stopped over another job of its own.';

-- The others of the epoch are told by its number, which their next heartbeat brings; the database opens no barrier for them.
create function gangq.go_on_without(g gangq.live_gangs, leaving bigint[], why jsonb, reason text, t timestamptz)
returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  rest bigint[];
  led boolean;
  kept bigint;
begin
  led := exists (select 1 from gangq.live_jobs j where j.id = any (leaving) and coalesce(j.epoch_rank, j.rank) = 0);
  -- Who is done has no part in what the others still do together. If nobody else is left, that was all.
  rest := array(
    select j.id from gangq.live_jobs j
    where j.gang_id = g.id and j.id <> all (leaving) and gangq.in_epoch(j, g) and j.state = 'running' order by j.rank);
  if rest = '{}' then
    rest := array(
      select j.id from gangq.live_jobs j
      where j.gang_id = g.id and j.id <> all (leaving) and gangq.in_epoch(j, g) and j.state = 'done' order by j.rank);
  else
    led := led or (select coalesce(j.epoch_rank, j.rank) <> 0 from gangq.live_jobs j where j.id = rest[1]);
  end if;
  update gangq.live_jobs j set epoch_rank = array_position(rest, j.id) - 1
  where j.gang_id = g.id and j.epoch_rank is distinct from array_position(rest, j.id) - 1;
  kept := gangq.restore_step(g);
  delete from gangq.checkpoints c where c.gang_id = g.id and c.step > coalesce(kept, -1);
  update gangq.live_gangs x set epoch = x.epoch + 1, world_size = cardinality(rest), restore_step = kept,
    master_host = case when not led then x.master_host end, master_addr = case when not led then x.master_addr end,
    master_port = case when not led then x.master_port end
  where x.id = g.id;
  perform gangq.log_event(t, 'shrink', g.id, g.epoch + 1, leaving[1], reason => go_on_without.reason,
    data => go_on_without.why || jsonb_build_object('members', leaving, 'world_size', cardinality(rest), 'restore_step', kept));
  if gangq.fulfilled(g.id) then
    perform gangq.wind_up(g.id, t);
  else
    perform gangq.wake(array(select j.incarnation from gangq.live_jobs j where j.id = any (rest)), 'go');
    perform gangq.wake_tick();
  end if;
end $$;
comment on function gangq.go_on_without is
  'Internal. These members leave the epoch: the others get the next one at once, ranks renumbered in order. Where rank 0 is '
  'another one from now on, it says by barrier where it is to be found.';

create function gangq.shrink_gang(gang_id bigint, job_ids bigint[], reason text default null) returns boolean
language plpgsql set plan_cache_mode = force_generic_plan as $$
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
    where j.gang_id = g.id and j.id = any (shrink_gang.job_ids) and j.state = 'running' and gangq.in_epoch(j, g) order by j.rank);
  if g.state <> 'running' or leaving = '{}' or cardinality(leaving) <> cardinality(shrink_gang.job_ids) or g.missing_since is not null
    or not exists (
      select 1 from gangq.live_jobs j where j.gang_id = g.id and j.state = 'running' and gangq.in_epoch(j, g) and j.id <> all (leaving))
    or exists (
      select 1 from gangq.kind_roles r
      where r.kind_id = g.kind_id
        and exists (select 1 from gangq.live_jobs j where j.id = any (leaving) and coalesce(j.role, 1) = r.ordinal)
        and r.min_members > (
          select count(*) from gangq.live_jobs j
          where j.gang_id = g.id and coalesce(j.role, 1) = r.ordinal and j.id <> all (leaving)
            and (j.state = 'done' or j.state = 'running' and gangq.in_epoch(j, g))))
  then
    return false;
  end if;
  update gangq.live_jobs j set state = 'preempting', told_at = t, stop_reason = 'preempt', attempts = j.attempts - 1, stops = j.stops + 1
  where j.id = any (leaving);
  perform gangq.wake(array(select j.incarnation from gangq.live_jobs j where j.id = any (leaving)), 'stop');
  perform gangq.go_on_without(g, leaving, '{"cause": "preempt"}', coalesce(shrink_gang.reason, 'surplus members are displaced'), t);
  return true;
end $$;
comment on function gangq.shrink_gang is
  'Tells surplus members of a running elastic gang to stop; the others run on, in a new epoch without them. Nobody is '
  'charged. What they hold is free once they are proven stopped; they come back when the gang is placed anew. False, and '
  'nothing changes, when one of them is not running, a role would fall below its minimum, or a member is being replaced. '
  'Raises GQ002.';

create function gangq.fulfilled(gang_id bigint) returns boolean language plpgsql stable set plan_cache_mode = force_generic_plan as $$
declare
  g gangq.live_gangs;
  deciding smallint;
begin
  select x.* into g from gangq.live_gangs x where x.id = fulfilled.gang_id;
  if g.completion is not null then
    select r.ordinal into deciding from gangq.kind_roles r where r.kind_id = g.kind_id and r.name = g.completion;
  end if;
  return exists (
      select 1 from gangq.live_jobs j where j.gang_id = g.id and j.state = 'done' and (deciding is null or coalesce(j.role, 1) = deciding))
    and not exists (
      select 1 from gangq.live_jobs j
      where j.gang_id = g.id and j.state <> 'done' and gangq.in_epoch(j, g) and (deciding is null or coalesce(j.role, 1) = deciding));
end $$;
comment on function gangq.fulfilled is
  'Internal. Whether all that a placed gang is for is done: every member of this epoch, or of the role its completion names.';

create function gangq.wind_up(gang_id bigint, t timestamptz) returns void language plpgsql as $$
begin
  if exists (select 1 from gangq.live_jobs j where j.gang_id = wind_up.gang_id and j.state in ('reserved', 'running', 'preempting')) then
    perform gangq.drain(wind_up.gang_id, '{}', 'completed', null, 'what it is for is done', t);
  else
    perform gangq.end_gang(wind_up.gang_id, 'done', null, t);
  end if;
end $$;
comment on function gangq.wind_up is
  'Internal. Ends a fulfilled gang, once whoever still runs has stopped.';

-- A member, or a solo job, that had been told to stop is proven stopped.
create function gangq.stopped(j gangq.live_jobs, error jsonb, t timestamptz, how text default 'ack') returns text
language plpgsql as $$
declare
  g gangq.live_gangs;
begin
  if (j).gang_id is null then
    if (j).stop_reason = 'cancel' then
      perform gangq.leave(array[(j).id], array[(j).token], 'cancelled', array[null]::jsonb[], error, t);
      perform gangq.log_event(t, how, job_id => (j).id, token => (j).token, incarnation => (j).incarnation, reason => 'cancelled');
      perform gangq.wake_tick();
      return 'cancelled';
    end if;
    return gangq.hand_back(j, 'release', 'told to stop', t);
  end if;
  select x.* into g from gangq.live_gangs x where x.id = (j).gang_id;
  update gangq.live_jobs x set state = 'preempted', final_token = x.token, token = null, incarnation = null, request_id = null,
    told_at = null, stop_reason = null, error = coalesce(stopped.error, x.error)
  where x.id = (j).id;
  delete from gangq.device_holds h where h.job_id = (j).id and h.kind = 'job';
  perform gangq.log_event(t, how, (j).gang_id, g.epoch, (j).id, (j).token, (j).incarnation,
    data => jsonb_build_object('rank', coalesce((j).epoch_rank, (j).rank), 'seconds', extract(epoch from t - (j).told_at)));
  if g.state = 'running' then
    -- It had left the epoch: see shrink_gang. The others go on, and what it held is for somebody who waits.
    update gangq.live_jobs x set state = 'blocked' where x.id = (j).id;
    perform gangq.wake_tick();
    return 'preempted';
  end if;
  perform gangq.complete_drain((j).gang_id);
  return 'preempted';
end $$;
comment on function gangq.stopped is
  'Internal. Proof that a job told to stop has stopped. how: ack (its worker''s word), dead (its worker has ended), '
  'force (it never confirmed, and its lease is over).';

create function gangq.ack_preempted(job_id bigint, token bigint) returns text
language plpgsql as $$
declare
  j gangq.live_jobs;
begin
  j := gangq.lock_job(ack_preempted.job_id);
  if j.id is null or j.token is distinct from ack_preempted.token or j.state not in ('running', 'preempting') then
    if gangq.was_final(ack_preempted.job_id, ack_preempted.token) then
      return 'repeated';
    end if;
    perform gangq.refuse_stale(ack_preempted.job_id, ack_preempted.token);
  end if;
  if j.state = 'running' then
    perform gangq.refuse('GQ004', format('job %s was not told to stop', j.id),
      'Use gangq.release to hand it back, gangq.fail if it failed, gangq.complete if it is done.');
  end if;
  return gangq.stopped(j, null, gangq.now());
end $$;
comment on function gangq.ack_preempted is
  'A worker confirms that a job told to stop is stopped: its whole process tree is gone. Returns preempted, cancelled, '
  'pending (solo, to be run again) or repeated. Raises GQ002, GQ003, GQ004 (it was not told to stop).';

-- A member reached a final state while the others go on. Called under the gang's lock.
create function gangq.member_ended(gang_id bigint, job_id bigint, token bigint, how text, t timestamptz) returns void
language plpgsql as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
begin
  select x.* into g from gangq.live_gangs x where x.id = member_ended.gang_id;
  perform gangq.log_event(t, how, g.id, g.epoch, member_ended.job_id, member_ended.token,
    (select j.ran_on from gangq.live_jobs j where j.id = member_ended.job_id),
    data => jsonb_build_object('rank', (select coalesce(j.epoch_rank, j.rank) from gangq.live_jobs j where j.id = member_ended.job_id)));
  if g.state = 'draining' then
    perform gangq.complete_drain(g.id);
  elsif gangq.fulfilled(g.id) then
    perform gangq.wind_up(g.id, t);
  end if;
end $$;
comment on function gangq.member_ended is
  'Internal. The last done member, or the last of the role that the gang''s completion names, ends its gang; a member done '
  'during a drain may complete the drain.';

create function gangq.complete_drain(gang_id bigint) returns text
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  cfg gangq.settings;
  q gangq.queues_table;
  m record;
  why text;
  delay interval := '0';
begin
  select x.* into g from gangq.live_gangs x where x.id = complete_drain.gang_id for update;
  if not found then
    perform gangq.refuse('GQ002', format('gang %s is not live', complete_drain.gang_id), 'It has ended or never existed: select * from gangq.gangs.');
  end if;
  if g.state <> 'draining' or exists (
    select 1 from gangq.live_jobs j where j.gang_id = g.id and j.state in ('running', 'preempting', 'reserved')) then
    return null;
  end if;
  if gangq.fulfilled(g.id) then
    perform gangq.log_event(t, 'drained', g.id, g.epoch, reason => case when g.completion is null then 'every member had finished'
      else format('every member of role %s had finished', g.completion) end, data => '{"outcome": "done"}');
    perform gangq.end_gang(g.id, 'done', null, t);
    return 'done';
  end if;
  if g.cancelling then
    perform gangq.log_event(t, 'drained', g.id, g.epoch, data => '{"outcome": "cancelled"}');
    perform gangq.end_gang(g.id, 'cancelled', 'cancelled', t);
    return 'cancelled';
  end if;
  select coalesce(j.epoch_rank, j.rank) as rank, j.state, j.attempts, j.max_attempts, j.crashes, j.max_crashes, j.trips, j.max_trips into m
  from gangq.live_jobs j
  where j.gang_id = g.id and (j.state in ('done', 'failed') or j.attempts >= j.max_attempts or j.crashes > j.max_crashes or j.trips > j.max_trips)
  order by j.state not in ('done', 'failed'), j.rank limit 1;
  if g.failure_policy = 'fail' and g.drain_cause in ('fail', 'crash', 'trip') then
    why := (
      select format('rank %s %s%s, and the gang''s failure policy is fail', coalesce(j.epoch_rank, j.rank),
        case g.drain_cause when 'fail' then 'failed' when 'crash' then 'lost its worker' else 'tripped a watchdog' end,
        ': ' || left(j.error ->> 'message', 200))
      from gangq.live_jobs j where j.id = g.drain_trigger);
  elsif m.rank is not null then
    why := case
      when m.state in ('done', 'failed') then format('rank %s was already %s when the gang drained (%s)', m.rank, m.state, g.drain_cause)
      when m.attempts >= m.max_attempts then format('rank %s spent its %s', m.rank, gangq.counted(m.max_attempts, 'attempt'))
      when m.crashes > m.max_crashes then format('rank %s lost its worker %s', m.rank, gangq.counted(m.crashes, 'time'))
      else format('rank %s tripped a watchdog %s', m.rank, gangq.counted(m.trips, 'time')) end;
  elsif g.attempts >= g.max_attempts then
    why := format('the gang spent its %s launches', g.max_attempts);
  elsif g.crashes > g.max_crashes then
    why := format('the gang lost a worker %s', gangq.counted(g.crashes, 'time'));
  elsif g.trips > g.max_trips then
    why := format('the gang tripped a watchdog %s', gangq.counted(g.trips, 'time'));
  elsif (select max(j.stops) > (select c.max_stops from gangq.settings c) from gangq.live_jobs j where j.gang_id = g.id) then
    why := format('the gang was handed back or told to stop more than %s times', (select c.max_stops from gangq.settings c));
  end if;
  if why is not null then
    perform gangq.log_event(t, 'drained', g.id, g.epoch, reason => why, data => '{"outcome": "failed"}');
    perform gangq.end_gang(g.id, 'failed', why, t);
    return 'failed';
  end if;
  select x.* into cfg from gangq.settings x;
  select x.* into q from gangq.queues_table x join gangq.shapes s on s.queue = x.name where s.id = g.shape_id;
  delay := case
    when g.drain_cause = 'never_started' then gangq.backoff(cfg.gang_backoff_s, cfg.gang_backoff_max_s, g.never_started)
    when g.drain_cause = 'placement_miss' then gangq.backoff(cfg.gang_backoff_s, cfg.gang_backoff_max_s, g.placement_misses)
    when g.drain_cause in ('fail', 'trip') then gangq.backoff(q.backoff_s, q.backoff_max_s, g.attempts + g.trips)
    else '0' end;
  -- A member whose worker tripped counts as stopped at once, and is gone a little later: not beside its successor.
  delay := greatest(delay, (
    select max(i.exits_at) from gangq.live_jobs j join gangq.incarnations i on i.id = j.ran_on where j.gang_id = g.id) - t);
  update gangq.live_jobs j set state = 'blocked', epoch_rank = null
  where j.gang_id = g.id and (j.state = 'preempted' or j.epoch_rank is not null);
  update gangq.live_gangs x set state = 'blocked', world_size = null, drain_started_at = null, go_at = null, reserved_at = null,
    not_before = case when delay > '0' then t + delay end
  where x.id = g.id;
  perform gangq.log_event(t, 'drained', g.id, g.epoch, reason => g.drain_cause, data => jsonb_build_object(
    'outcome', 'blocked', 'not_before', case when delay > '0' then t + delay end));
  perform gangq.wake_tick();
  return 'blocked';
end $$;
comment on function gangq.complete_drain is
  'When the last member is proven stopped: the gang is blocked again as a whole, or ends: done if every member of the epoch '
  'had finished or every one of the role that its completion names, cancelled if that was asked, failed when a member''s attempts, crashes or trips or the gang''s launches are '
  'spent, its failure policy is fail, or a sibling is already done or failed. Returns the outcome, or null while somebody is still stopping. '
  'Raises GQ002.';

create function gangq.end_gang(gang_id bigint, final_state text, reason text, t timestamptz) returns void
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
  ids bigint[];
begin
  select x.* into g from gangq.live_gangs x where x.id = end_gang.gang_id;
  -- Of a done gang those that it could spare are cancelled.
  update gangq.live_jobs j set state = case end_gang.final_state when 'done' then 'cancelled' else end_gang.final_state end, finished_at = t, waits_on = 0,
    error = case when end_gang.final_state = 'failed' then coalesce(j.error, jsonb_build_object('type', 'GangFailed', 'message', end_gang.reason)) else j.error end
  where j.gang_id = g.id and j.state not in ('done', 'failed', 'cancelled');
  -- Before its members leave: how they count for their dependents hangs on it.
  insert into gangq.gang_history (gang_id, finished_at, submitted_at, shape_id, size, epoch, priority, attempts, max_attempts,
    crashes, max_crashes, trips, max_trips, placement_misses, never_started, preemptions, state, retention, checkpoint_mode, claim_deadline_s, name, reason, submitter, login,
    kind_id, world_size, failure_policy, completion, preemptible, budget_s, timeout_s, timeout_style)
  select g.id, t, g.submitted_at, g.shape_id, g.size, g.epoch, g.priority, g.attempts, g.max_attempts, g.crashes, g.max_crashes,
    g.trips, g.max_trips, g.placement_misses, g.never_started, g.preemptions, end_gang.final_state,
    case end_gang.final_state when 'done' then q.retention_done else q.retention_failed end,
    g.checkpoint_mode, g.claim_deadline_s, g.name, end_gang.reason, g.submitter, g.login,
    g.kind_id, g.world_size, g.failure_policy, g.completion, g.preemptible, g.budget_s, g.timeout_s, g.timeout_style
  from gangq.shapes s join gangq.queues_table q on q.name = s.queue where s.id = g.shape_id;
  ids := array(select j.id from gangq.live_jobs j where j.gang_id = g.id order by j.id);
  perform gangq.leave(ids, array_fill(null::bigint, array[cardinality(ids)]), null, array_fill(null::jsonb, array[cardinality(ids)]), null, t, end_gang.final_state);
  if end_gang.final_state <> 'failed' then
    delete from gangq.checkpoints c where c.gang_id = g.id;
  end if;
  delete from gangq.earmarks e where e.gang_id = g.id;
  delete from gangq.live_gangs x where x.id = g.id;
  perform gangq.log_event(t, 'end', g.id, g.epoch, reason => end_gang.reason, data => jsonb_build_object('outcome', end_gang.final_state));
  perform gangq.wake_tick();
end $$;
comment on function gangq.end_gang is
  'Internal. The gang and all its members leave for history together.';

create function gangq.preempt_gang(gang_id bigint, trigger_job bigint default null, reason text default null) returns boolean
language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
begin
  perform gangq.refuse_larger('the reason', octet_length(preempt_gang.reason), 4000);
  g := gangq.lock_gang(preempt_gang.gang_id);
  if g.state not in ('reserved', 'running') or (preempt_gang.trigger_job is not null and not exists (
    select 1 from gangq.live_jobs j where j.id = preempt_gang.trigger_job and j.gang_id = g.id and j.state in ('running', 'reserved'))) then
    return false;
  end if;
  perform gangq.drain(g.id, '{}', 'preempt', null, coalesce(preempt_gang.reason, 'preempted by an operator'), t);
  return true;
end $$;
comment on function gangq.preempt_gang is
  'Tells a reserved or running gang to stop; it keeps its checkpoint, nobody is charged, and it is admitted again (but one of '
  'which a member has finished already cannot run again and ends failed, for gangq.retry). '
  'trigger_job, if given, must be a live member of the present epoch; otherwise nothing changes and false is returned, as '
  'for a gang that is not placed. Raises GQ002.';

-- The work of cancel; the tick calls it for what waits for a job that did not succeed.
create function gangq.cancel_all(job_ids bigint[], gang_ids bigint[], reason text)
returns table (job_id bigint, gang_id bigint, state text)
language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz;  -- read under the locks: an ending must not be dated before the retry it ends
  why text := cancel_all.reason;
  w record;
  g gangq.live_gangs;
  j gangq.live_jobs;
  batch record;
begin
  perform gangq.refuse_larger('the reason', octet_length(cancel_all.reason), 4000);
  batch := gangq.lock_batch(cancel_all.job_ids, cancel_all.gang_ids);
  -- What is left for another call is refused by this one already, where it is wrong: then nothing changes.
  if batch.left_jobs <> '{}' or batch.left_gangs <> '{}' then
    for w in
      select c.id, x.gang_id, x.rank, (x.id is null and not exists (select 1 from gangq.history h where h.job_id = c.id)) as unknown
      from unnest(batch.left_jobs) as c(id) left join gangq.live_jobs x on x.id = c.id
    loop
      if w.unknown then
        perform gangq.refuse('GQ002', format('job %s does not exist', coalesce(w.id::text, 'null')), 'Job ids are in gangq.jobs.');
      elsif w.gang_id is not null then
        perform gangq.refuse('GQ001', format('job %s is rank %s of gang %s', w.id, w.rank, w.gang_id),
          format('Members stop together: cancel the gang (gang_ids => array[%s]).', w.gang_id));
      end if;
    end loop;
    for w in
      select c.id from unnest(batch.left_gangs) as c(id)
      where not exists (select 1 from gangq.live_gangs x where x.id = c.id) and not exists (select 1 from gangq.gang_history h where h.gang_id = c.id)
    loop
      perform gangq.refuse('GQ002', format('gang %s does not exist', coalesce(w.id::text, 'null')), 'Gang ids are in gangq.gangs.');
    end loop;
  end if;
  t := gangq.now();
  for w in select c.id from unnest(batch.gangs) as c(id) order by c.id loop
    select x.* into g from gangq.live_gangs x where x.id = w.id;
    if not found then
      select h.gang_id, h.state into gang_id, state from gangq.gang_history h where h.gang_id = w.id order by h.finished_at desc limit 1;
      if not found then
        perform gangq.refuse('GQ002', format('gang %s does not exist', coalesce(w.id::text, 'null')), 'Gang ids are in gangq.gangs.');
      end if;
    else
      gang_id := g.id;
      perform gangq.log_event(t, 'cancel', g.id, g.epoch, reason => why);
      update gangq.live_gangs x set cancelling = true where x.id = g.id;
      if g.state in ('reserved', 'running') then
        perform gangq.drain(g.id, '{}', 'cancel', null, why, t);
      elsif g.state in ('waiting', 'blocked') then
        perform gangq.end_gang(g.id, 'cancelled', why, t);
      else
        update gangq.live_jobs x set stop_reason = 'cancel' where x.gang_id = g.id and x.state = 'preempting';
      end if;
      select x.state into state from gangq.live_gangs x where x.id = g.id;
      if not found then
        state := 'cancelled';
      end if;
    end if;
    return next;
  end loop;
  gang_id := null;
  for w in select c.id from unnest(batch.jobs) as c(id) order by c.id loop
    select x.* into j from gangq.live_jobs x where x.id = w.id;
    if not found then
      select h.job_id, h.state into job_id, state from gangq.history h where h.job_id = w.id order by h.finished_at desc limit 1;
      if not found then
        perform gangq.refuse('GQ002', format('job %s does not exist', coalesce(w.id::text, 'null')), 'Job ids are in gangq.jobs.');
      end if;
    elsif j.gang_id is not null then
      perform gangq.refuse('GQ001', format('job %s is rank %s of gang %s', j.id, j.rank, j.gang_id),
        format('Members stop together: cancel the gang (gang_ids => array[%s]).', j.gang_id));
    else
      job_id := j.id;
      perform gangq.log_event(t, 'cancel', job_id => j.id, token => j.token, reason => why);
      if j.state = 'running' then
        update gangq.live_jobs x set state = 'preempting', told_at = t, stop_reason = 'cancel' where x.id = j.id;
        perform gangq.wake(array[j.incarnation], 'stop');
        state := 'preempting';
      elsif j.state = 'preempting' then
        update gangq.live_jobs x set stop_reason = 'cancel' where x.id = j.id;
        state := 'preempting';
      else
        perform gangq.leave(array[j.id], array[j.token], 'cancelled', array[null]::jsonb[], jsonb_build_object('type', 'Cancelled', 'message', why), t);
        state := 'cancelled';
      end if;
    end if;
    return next;
  end loop;
  if batch.left_jobs <> '{}' or batch.left_gangs <> '{}' then
    return query
    select null::bigint, l.id, 'left' from unnest(batch.left_gangs) as l(id)
    union all
    select l.id, null, 'left' from unnest(batch.left_jobs) as l(id);
  end if;
end $$;
comment on function gangq.cancel_all is 'Internal. Cancels live jobs and gangs for whoever has been allowed to.';

create function gangq.cancel(job_ids bigint[] default '{}', gang_ids bigint[] default '{}', reason text default null)
returns table (job_id bigint, gang_id bigint, state text)
language plpgsql as $$
begin
  perform gangq.check_owner('cancel', cancel.job_ids, cancel.gang_ids);
  return query select c.* from gangq.cancel_all(cancel.job_ids, cancel.gang_ids, coalesce(cancel.reason, 'cancelled by ' || gangq.caller())) c;
end $$;
comment on function gangq.cancel is
  'Cancels live jobs and gangs; what runs is told to stop and is cancelled once proven stopped. Returns the state each '
  'has now (cancelled, preempting, draining, or how it had ended). One job or gang is waited for; of several those that '
  'another transaction holds, and those beyond 500 rows, come back with the state left and are as they were: call again with '
  'them, in another transaction. Raises GQ001 (a member of a gang), GQ002, 42501 (one of them is '
  'another submitter''s, and its queue is not shared).';

create function gangq.check_open(queue text) returns void language plpgsql as $$
declare
  shut text := (
    select q.name from gangq.queues_table q where q.draining and q.name = any (gangq.queue_path(check_open.queue)) order by length(q.name) desc limit 1);
begin
  if shut is not null then
    perform gangq.refuse_draining(shut, check_open.queue);
  end if;
end $$;
comment on function gangq.check_open is 'Internal. Raises GQ004 if this queue or one above it is draining.';

create function gangq.lock_ended_gang(id bigint, wait boolean, lock boolean) returns gangq.gang_history language plpgsql as $$
declare
  k gangq.gang_history;
begin
  if lock_ended_gang.wait then
    select x.* into k from gangq.gang_history x
    where x.gang_id = lock_ended_gang.id and not exists (
      select 1 from gangq.retried r where r.gang_id = x.gang_id and r.finished_at = x.finished_at) for update;
  elsif lock_ended_gang.lock then
    select x.* into k from gangq.gang_history x
    where x.gang_id = lock_ended_gang.id and not exists (
      select 1 from gangq.retried r where r.gang_id = x.gang_id and r.finished_at = x.finished_at) for update skip locked;
  end if;
  return k;
end $$;
comment on function gangq.lock_ended_gang is
  'Internal. The ending of a gang that no retry has overtaken, locked; null: there is none, or without wait another transaction holds it.';

create function gangq.lock_ended_job(id bigint, wait boolean, lock boolean) returns gangq.history language plpgsql as $$
declare
  h gangq.history;
begin
  if lock_ended_job.wait then
    select x.* into h from gangq.history x
    where x.job_id = lock_ended_job.id and not exists (
      select 1 from gangq.retried r where r.job_id = x.job_id and r.finished_at = x.finished_at) for update;
  elsif lock_ended_job.lock then
    select x.* into h from gangq.history x
    where x.job_id = lock_ended_job.id and not exists (
      select 1 from gangq.retried r where r.job_id = x.job_id and r.finished_at = x.finished_at) for update skip locked;
  end if;
  return h;
end $$;
comment on function gangq.lock_ended_job is
  'Internal. The ending of a job that no retry has overtaken, locked; null: there is none, or without wait another transaction holds it.';

create function gangq.retry(job_ids bigint[] default '{}', gang_ids bigint[] default '{}')
returns table (job_id bigint, gang_id bigint, state text)
language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  w record;
  h gangq.history;
  k gangq.gang_history;
  room integer := 500;
  alone boolean := coalesce(cardinality(retry.job_ids), 0) + coalesce(cardinality(retry.gang_ids), 0) = 1;
begin
  perform gangq.check_owner('retry', retry.job_ids, retry.gang_ids);
  for w in select c.id, min(c.n) as n from unnest(retry.gang_ids) with ordinality as c(id, n) group by c.id order by n loop
    gang_id := w.id;
    state := 'left';
    -- One retry of an ending at a time: the ending's row is locked, and then looked at once more. Else a retry could start
    -- from an ending that another retry, ended since, has already overtaken.
    loop
      k := gangq.lock_ended_gang(w.id, alone, room > 0);
      perform 1 from gangq.live_gangs x where x.id = w.id;
      if found then
        perform gangq.refuse('GQ004', format('gang %s is live', w.id), 'Only a gang that has ended can be retried.');
      end if;
      exit when not exists (select 1 from gangq.retried r where r.gang_id = k.gang_id and r.finished_at = k.finished_at);
    end loop;
    if k.gang_id is null and exists (select 1 from gangq.gang_history x where x.gang_id = w.id) then
      return next;
      continue;
    end if;
    room := room - k.size;
    if k.gang_id is null then
      perform gangq.refuse('GQ002', format('gang %s does not exist', coalesce(w.id::text, 'null')), 'Gang ids are in gangq.gangs; history is kept for its retention.');
    end if;
    perform gangq.check_open((select s.queue from gangq.shapes s where s.id = k.shape_id));
    perform gangq.check_ceiling((select s.queue from gangq.shapes s where s.id = k.shape_id), k.priority, gangq.caller(), session_user);
    -- As in submit_gang.
    perform from gangq.settings c for share;
    perform gangq.check_level(format('gang %s', k.gang_id), l.require, l.prefer, false)
    from (
      select x.require, x.prefer from gangq.gang_kinds x where x.id = k.kind_id
      union all
      select r.require, r.prefer from gangq.kind_roles r where r.kind_id = k.kind_id) l;
    insert into gangq.live_gangs (id, order_key, kind_id, shape_id, size, epoch, priority, max_attempts, max_crashes, max_trips, state,
      checkpoint_mode, claim_deadline_s, submitted_at, name, submitter, failure_policy, completion, preemptible, budget_s,
      timeout_s, timeout_style, timeout_at)
    select k.gang_id, gangq.order_key(k.priority, gangq.next_pos((select b.base from gangq.id_base() b))),
      case when k.kind_id is not null then gangq.kind_for(k.kind_id, gangq.caller(), session_user)
        else gangq.intern_kind(s.queue, jsonb_build_array(jsonb_build_object('name', 'member', 'shape', o.shape_id, 'min', k.size,
        'max', k.size, 'strategy', 'pack', 'require', null, 'prefer', null, 'balanced', false)), null, null, null) end,
      o.shape_id, k.size, k.epoch, k.priority, k.max_attempts, k.max_crashes, k.max_trips, 'blocked',
      k.checkpoint_mode, k.claim_deadline_s, t, k.name, gangq.caller(), coalesce(k.failure_policy, 'restart_gang'), k.completion,
      coalesce(k.preemptible, true), k.budget_s, coalesce(k.timeout_s, c.placement_timeout_s), coalesce(k.timeout_style, 'requeue'),
      t + make_interval(secs => coalesce(k.timeout_s, c.placement_timeout_s))
    from gangq.shapes s cross join gangq.settings c cross join (select gangq.shape_for(k.shape_id, gangq.caller(), session_user) as shape_id offset 0) o
    where s.id = k.shape_id;
    insert into gangq.live_jobs (id, order_key, gang_id, rank, role, submitted_at, shape_id, budget_s, priority, max_attempts,
      max_crashes, max_trips, state, submitter, parent, payload, final_token)
    select distinct on (x.job_id) x.job_id, g.order_key, g.id, x.rank,
      (select max(r.ordinal) from gangq.kind_roles r where r.kind_id = g.kind_id and r.first_rank <= x.rank), t, gangq.shape_for(x.shape_id, g.submitter, session_user), x.budget_s, g.priority, x.max_attempts, x.max_crashes,
      x.max_trips, 'blocked', g.submitter, x.parent, x.payload, x.token
    from gangq.live_gangs g join gangq.history x on x.gang_id = g.id
    where g.id = w.id and not exists (select 1 from gangq.retried r where r.job_id = x.job_id and r.finished_at = x.finished_at)
    order by x.job_id;
    insert into gangq.retried (gang_id, finished_at) values (k.gang_id, k.finished_at);
    insert into gangq.retried (job_id, finished_at)
    select distinct on (x.job_id) x.job_id, x.finished_at from gangq.history x
    where x.gang_id = k.gang_id and not exists (select 1 from gangq.retried r where r.job_id = x.job_id and r.finished_at = x.finished_at)
    order by x.job_id;
    if (select count(*) from gangq.live_jobs x where x.gang_id = w.id) <> k.size then
      perform gangq.refuse('GQ002', format('history no longer has every member of gang %s', w.id),
        'Part of it was dropped after its retention: submit the gang anew.');
    end if;
    perform gangq.log_event(t, 'retry', k.gang_id, k.epoch, reason => 'retried by ' || gangq.caller());
    state := 'blocked';
    return next;
  end loop;
  gang_id := null;
  for w in select c.id, min(c.n) as n from unnest(retry.job_ids) with ordinality as c(id, n) group by c.id order by n loop
    job_id := w.id;
    state := 'left';
    loop
      h := gangq.lock_ended_job(w.id, alone, room > 0);
      perform 1 from gangq.live_jobs x where x.id = w.id;
      if found then
        perform gangq.refuse('GQ004', format('job %s is live', w.id), 'Only a job that has ended can be retried.');
      end if;
      exit when not exists (select 1 from gangq.retried r where r.job_id = h.job_id and r.finished_at = h.finished_at);
    end loop;
    if h.job_id is null and exists (select 1 from gangq.history x where x.job_id = w.id) then
      return next;
      continue;
    end if;
    room := room - 1;
    if h.job_id is null then
      perform gangq.refuse('GQ002', format('job %s does not exist', coalesce(w.id::text, 'null')), 'Job ids are in gangq.jobs; history is kept for its retention.');
    end if;
    if h.gang_id is not null then
      perform gangq.refuse('GQ001', format('job %s was rank %s of gang %s', h.job_id, h.rank, h.gang_id),
        format('Members run together: retry the gang (gang_ids => array[%s]).', h.gang_id));
    end if;
    perform gangq.check_open((select s.queue from gangq.shapes s where s.id = h.shape_id));
    perform gangq.check_ceiling((select s.queue from gangq.shapes s where s.id = h.shape_id), h.priority, gangq.caller(), session_user);
    perform pg_current_xact_id();
    insert into gangq.live_jobs (id, order_key, submitted_at, shape_id, budget_s, priority, max_attempts, max_crashes, max_trips,
      state, submitter, parent, payload, final_token)
    select h.job_id, gangq.order_key(h.priority, gangq.next_pos((select b.base from gangq.id_base() b))), t, gangq.shape_for(h.shape_id, gangq.caller(), session_user), h.budget_s, h.priority, h.max_attempts,
      h.max_crashes, h.max_trips, 'pending', gangq.caller(), h.parent, h.payload, h.token;
    insert into gangq.retried (job_id, finished_at) values (h.job_id, h.finished_at);
    perform gangq.log_event(t, 'retry', job_id => h.job_id, reason => 'retried by ' || gangq.caller());
    perform gangq.wake_sleepers((select s.queue from gangq.shapes s where s.id = h.shape_id), 1, 'commit');
    state := 'pending';
    return next;
  end loop;
  perform gangq.wake_tick();
end $$;
comment on function gangq.retry is
  'Runs jobs and gangs that have ended once more, under their old ids, with fresh counters; a failed gang resumes from '
  'its last complete checkpoint. They count as the caller''s in limits and shares. Of several those that another transaction holds, and those beyond 500, come back with the '
  'state left and are as they were: call again with them, in another transaction. Raises GQ001 (a member of a gang, or a topology level that no longer exists), GQ002, GQ004 (still live, or its queue is draining), '
  '42501 (another''s in a queue that is not shared, or a priority above the caller''s ceiling).';
