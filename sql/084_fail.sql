-- Attempts end without success: fail, snooze, requeue, release and ack_preempted. Locks: see 080.

-- Internal. fail, snooze, requeue, release and ack_preempted go through it: the attempt of this
-- token has ended without success. cause: of gangq.causes; null: it must have been told to stop.
-- front: a single job goes to the front of its priority. final: it does not run again. Returns the
-- state, repeated, or (strict => false) stale.
create function gangq.report(
  job_id bigint, token bigint, cause text, error jsonb, reason text, front boolean default false,
  final boolean default false, strict boolean default true, delay_s real default null
) returns text language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  j gangq.live_jobs := gangq.lock_job(report.job_id, report.token);
  t timestamptz := gangq.now();  -- Not before the moment at which it was told to stop.
begin
  error := gangq.cut(report.error, gangq.most_said());
  if (j.token = report.token) is not true then
    if gangq.was_final(report.job_id, report.token) then
      return 'repeated';
    elsif strict then
      perform gangq.refuse_stale(report.job_id, report.token);
    end if;
    return 'stale';
  elsif j.state = 'preempting' then
    return gangq.stopped(j, error, t);
  elsif cause is null then
    perform gangq.refuse('GQ004', format('job %s was not told to stop', j.id),
      'Use gangq.release to hand it back, gangq.fail if it failed, gangq.complete if it is done.');
  elsif cause = 'trip' then
    perform gangq.log_job(t, 'trip', j, error ->> 'type', gangq.for_events(error)
      || jsonb_build_object('trips', (gangq.charge_job(j, gangq.charge_of_trip(j))).trips));
  end if;
  if j.gang_id is not null then
    perform gangq.lose_members(
      j.gang_id, array[j.id], array[j.id], cause, error, reason, t, final);
    return 'preempted';
  end if;
  -- A single job has no rendezvous to fail at.
  cause := case cause when 'never_started' then 'fail' else cause end;
  if front then
    j.order_key := gangq.front_key(j.priority);
  end if;
  return gangq.end_attempt(j, cause, error, reason, t, final => final, retry_at => (
    select t + coalesce(make_interval(secs => delay_s),
      gangq.backoff(q.backoff_s, q.backoff_max_s, j.attempts))
    from gangq.shapes s join gangq.queues_table q on q.name = s.queue
    where s.id = j.shape_id and cause in ('fail', 'snoozed')));
end $$;

-- Internal. Ends the attempt of a single job and charges it. The job becomes pending, or scheduled
-- until its process is gone (gone_at) or its backoff is over (retry_at). Without an attempt left it
-- is failed, or cancelled if it was told to stop. Nothing else may move due_at before gone_at: see
-- 117. kind: of the event. Returns the state. The job goes on with the order_key and shape_id of j,
-- which may differ from the stored row.
create function gangq.end_attempt(
  j gangq.live_jobs, cause text, error jsonb, reason text, t timestamptz,
  gone_at timestamptz default null, retry_at timestamptz default null,
  final boolean default false, kind text default null
) returns text language plpgsql as $$
declare
  c record := gangq.cause_named(cause);
  charge text := c.member;
  spent boolean := final or gangq.spends_job(j, charge);
  due timestamptz := coalesce(retry_at, gone_at);
  next_state text := gangq.state_after(j.state, spent, due);
begin
  error := gangq.error_kept(j, charge, spent, end_attempt.error, reason);
  if c.event <> 'trip' then  -- its event has more to tell, and is written before
    perform gangq.log_job(t, coalesce(kind,
        case when c.event = 'fail' and not spent then 'retry' else c.event end),
      j, reason, case when cause = 'fail' then jsonb_strip_nulls(jsonb_build_object(
        'attempts', j.attempts, 'retryable', case when spent then not final end,
        'due_at', case when not spent then due end))
        when cause = 'snoozed'
          then jsonb_build_object('snoozes', j.snoozes + 1, 'due_at', due) end);
  end if;
  perform gangq.record_attempts(array[gangq.attempt_of(j,
    case cause when 'release' then coalesce(j.stop_reason, cause) else cause end, t)]);
  if spent then
    update gangq.live_jobs x set shape_id = j.shape_id,
      (attempts, crashes, trips, stops, snoozes) = (select * from gangq.charge_job(x, charge))
    where x.id = j.id;
    if next_state = 'failed' then
      perform gangq.tell('job_failed', t, null, null, j.id, j.incarnation, reason,
        jsonb_build_object('cause', cause, 'attempts', j.attempts,
          'error', gangq.for_events(error)));
    end if;
    perform gangq.leave(array[j.id], array[j.token], next_state, '{}', coalesce(error, '{}'), t);
    return next_state;
  end if;
  update gangq.live_jobs x set state = next_state, due_at = due,
    (attempts, crashes, trips, stops, snoozes) = (select * from gangq.charge_job(x, charge)),
    ran_on = case when gone_at is not null then x.incarnation end,
    order_key = j.order_key, shape_id = j.shape_id, final_token = x.token, token = null,
    incarnation = null, request_id = null, told_at = null, stop_reason = null,
    error = coalesce(end_attempt.error, x.error)
  where x.id = j.id;
  delete from gangq.device_holds h where h.job_id = j.id;
  if next_state = 'pending' then
    perform gangq.wake_lane(j.shape_id, 1, 'sleepers');
  end if;
  return next_state;
end $$;

-- Internal, for end_attempt. The error that a single job keeps: the one reported, unless its worker
-- was lost, or this stop or snooze was one too many (spent).
create function gangq.error_kept(
  j gangq.live_jobs, charge text, spent boolean, reported jsonb, reason text
) returns jsonb language plpgsql stable as $$
begin
  return case
    when charge = 'crash' then jsonb_build_object('type', 'WorkerLost', 'message', reason,
      'crashes', j.crashes + 1)
    when spent and charge = 'stop' then jsonb_build_object('type', 'StoppedTooOften', 'message',
      'handed back or told to stop ' || gangq.counted(j.stops + 1, 'time'))
    when spent and charge = 'snooze' then jsonb_build_object('type', 'SnoozedTooOften', 'message',
      format('snoozed %s; max_snoozes is %s', gangq.counted(j.snoozes + 1, 'time'), j.max_snoozes))
    else reported end;
end $$;

-- Internal. Whether this job is due before the next safety tick would find it. A tick that comes
-- anyway is soon enough for the end of most backoffs.
create function gangq.is_soon(job_id bigint) returns boolean language sql stable as $$
  select j.due_at < gangq.now() + make_interval(secs => 1.5 * c.tick_s)
  from gangq.live_jobs j, gangq.settings c where j.id = is_soon.job_id
$$;

-- An attempt failed. It is charged, and tried again after the backoff; the job fails when its
-- attempts are spent or retryable is false. error: {"type", "message", "traceback", "host",
-- "log_tail"}. retry_in_s: in place of the queue's backoff; a gang has its own. A member's failure
-- is judged by its gang's failure policy: by default the gang drains. cause port_taken: a member's
-- rendezvous port was taken; its gang counts never_started and no attempt. For a single job it is
-- an error. cause other_job: the process was ended over another job that ran there too. Nothing is
-- charged, and a retryable single job is pending at once. A job that was told to stop ends as for
-- ack_preempted. Returns scheduled, pending, failed, cancelled, preempted (gang), or repeated.
-- Raises GQ001, GQ002, GQ003, 42501 (another login's worker holds it).
create function gangq.fail(
  job_id bigint, token bigint, error jsonb default '{}', retryable boolean default true,
  cause text default 'error', retry_in_s real default null
) returns text language plpgsql as $$
declare
  outcome text;
begin
  if (cause in ('error', 'port_taken', 'other_job')) is not true then
    perform gangq.refuse('GQ001', format('cause is %L', cause),
      'It is error, port_taken when a member''s rendezvous port was taken, or other_job when '
      'its process was ended over another job.');
  end if;
  if not (retry_in_s >= 0 and retry_in_s <= 1e7) then
    perform gangq.refuse('GQ001', format('retry_in_s is %s', retry_in_s),
      'It is how long to wait before the next attempt: 0 to 1e7 seconds; null: the queue''s '
      'backoff.');
  end if;
  outcome := gangq.report(fail.job_id, fail.token,
    case cause when 'port_taken' then 'never_started' when 'error' then 'fail' else cause end,
    fail.error,
    coalesce(fail.error ->> 'type', 'failed'), final => retryable is false, delay_s => retry_in_s);
  perform gangq.wake_tick(outcome = 'scheduled' and gangq.is_soon(fail.job_id));
  return outcome;
end $$;

-- A single job hands itself back, to be run again in for_s seconds (0 to 1e7). No attempt, crash or
-- stop is counted, but a snooze: past max_snoozes (100) it fails. What it was told meanwhile comes
-- first: then its end is as for ack_preempted. Returns scheduled, failed, cancelled, pending or
-- repeated. Raises GQ001, GQ002, GQ003, GQ004 (a member of a gang), 42501.
create function gangq.snooze(job_id bigint, token bigint, for_s real) returns text
language plpgsql as $$
declare
  outcome text;
begin
  if (snooze.for_s between 0 and 1e7) is not true then
    perform gangq.refuse('GQ001', format('for_s is %s', coalesce(snooze.for_s::text, 'null')),
      'It is how long the job is to wait: 0 to 1e7 seconds.');
  end if;
  perform gangq.refuse('GQ004',
    format('job %s is a member of gang g%s, and a member cannot be snoozed', j.id, j.gang_id),
    'The others of its gang would wait for it: fail the member, or preempt its gang, which then '
    'is drained and placed again as a whole.')
  from gangq.live_jobs j
  where j.id = snooze.job_id and j.token = snooze.token and j.gang_id is not null;
  outcome := gangq.report(snooze.job_id, snooze.token, 'snoozed', null, 'asked to wait',
    delay_s => snooze.for_s);
  perform gangq.wake_tick(outcome = 'scheduled' and gangq.is_soon(snooze.job_id));
  return outcome;
end $$;

-- A watchdog stopped the attempt: counts a trip instead of an attempt and puts the job at the front
-- of its priority, or fails it when its trips are spent. A member's trip is judged by its gang's
-- failure policy. Returns pending, failed, preempted or repeated. Raises GQ002, GQ003, 42501.
create function gangq.requeue(
  job_id bigint, token bigint, error jsonb default '{}', front boolean default true
) returns text language plpgsql as $$
declare
  outcome text := gangq.report(requeue.job_id, requeue.token, 'trip', requeue.error,
    coalesce(requeue.error ->> 'type', 'watchdog trip'), requeue.front);
begin
  perform gangq.wake_tick();
  return outcome;
end $$;

-- A worker hands claims back because it has to stop; their work is dead. No attempt is charged,
-- each counts a stop (max_stops). outcome: released, repeated, stale. A member's release drains its
-- gang. Raises GQ001, GQ007 (the reason), 42501 (another login's worker holds one).
create function gangq.release(job_ids bigint[], tokens bigint[], reason text default null)
returns table (job_id bigint, outcome text)
language plpgsql set plan_cache_mode = force_generic_plan as $$
begin
  perform gangq.refuse_larger('the reason', octet_length(release.reason), 4000);
  if coalesce(cardinality(release.job_ids), 0) <> coalesce(cardinality(release.tokens), 0) then
    perform gangq.refuse('GQ001', 'release needs as many tokens as job ids',
      'Pass arrays of one length.');
  end if;
  perform gangq.lock_jobs(release.job_ids, array(
    select distinct j.gang_id from gangq.live_jobs j
    where j.id = any (release.job_ids) and j.gang_id is not null));
  for job_id, outcome in
    select r.id, gangq.report(r.id, r.token, 'release', null,
      coalesce(release.reason, 'handed back by its worker'), strict => false)
    from (
      select * from unnest(release.job_ids, release.tokens) as u(id, token) order by u.id) r
  loop
    outcome := case when outcome in ('repeated', 'stale') then outcome else 'released' end;
    return next;
  end loop;
  perform gangq.wake_tick();
end $$;

-- A worker confirms that a job told to stop is stopped: its whole process tree is gone. Returns
-- preempted, cancelled, pending (a single job, to be run again) or repeated. Raises GQ002, GQ003,
-- GQ004 (it was not told to stop), 42501.
create function gangq.ack_preempted(job_id bigint, token bigint) returns text language plpgsql as $$
begin
  return gangq.report(ack_preempted.job_id, ack_preempted.token, null, null, null);
end $$;
