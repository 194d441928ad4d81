-- How an attempt ends by its worker's word. complete and complete_and_claim call finish; fail,
-- snooze, requeue, release and ack_preempted call report. A single job ends in end_attempt or
-- leaves with leave, the one way from live_jobs into history; a member's end is told to its gang
-- (100_drain).
-- Who pays for which cause: gangq.causes (078).
-- A repeated report succeeds silently: was_final knows the token of the last attempt. An attempt
-- that was taken from its worker (taken_token, set in 110) is stale instead.
-- Locks: gangs by id, jobs by id; complete_and_claim also the row 'wake' of lock_rows, with skip
-- locked. Never a worker row: what gives capacity back must not wait for what takes it.

-- Moves jobs out of live_jobs into history: single jobs to the state given, gang members with the
-- state they have. Pairs whose token is not the present one stay.
-- Why each step stands before the next one:
-- 1. One statement deletes the jobs and writes their history, so none is lost or kept twice. The
--    setting gangq.leaving lets this statement alone delete (trigger live_jobs_leave).
-- 2. Learn the run times of what is done and held devices or belonged to a gang, which planned
--    starts are estimated from; record the attempts of single jobs among them. What else ends here
--    has been recorded by its caller.
-- 3. vacate gives the devices of a job to its place. The delete after it frees all others.
-- 4. clear_behind looks for dependents in statements that begin after step 1 has locked the jobs:
--    settle_dependents counts on that. settle reads the history that step 1 wrote.
--
-- Internal. The one way out of live_jobs. retain_as: the state that chooses the retention class,
-- because members are kept as long as their gang. left_ids: the jobs that left; vacant: how many
-- places they left.
create function gangq.leave(
  ids bigint[], tokens bigint[], new_state text, results jsonb[], new_error jsonb, t timestamptz,
  retain_as text default null, out left_ids bigint[], out vacant integer
) language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  vacated bigint[];  -- token of each; null: it was told to stop, so its room is meant for others
  lowest bigint;
  highest bigint;
  held boolean;
  ran gangq.attempt_history[];
  -- In a caller's REPEATABLE READ transaction a row that another session has changed since would
  -- fail it: there no run time is learned, and a place is closed.
  at_once boolean := gangq.reads_committed();
  marker text;
begin
  vacant := 0;
  -- 1.
  marker := set_config('gangq.leaving', 'with history', true);
  with leaving as (
    -- Ordered: rows are locked as they are deleted, and everybody locks jobs by id.
    select l.id, l.token, l.result
    from unnest(leave.ids, leave.tokens, leave.results) as l(id, token, result) order by l.id
  ),
  gone as (
    delete from gangq.live_jobs j using leaving l, gangq.shapes s
    where j.id = l.id and j.token is not distinct from l.token and s.id = j.shape_id
      and case leave.new_state
        when 'done' then j.gang_id is null and j.state in ('running', 'preempting')
        when 'failed' then j.gang_id is null and j.state = 'running'
        when 'cancelled' then j.gang_id is null
          and j.state in ('waiting', 'scheduled', 'pending', 'preempting')
        else j.gang_id is not null and j.state in ('done', 'failed', 'cancelled') end
    returning j.*, l.result as new_result, s.queue, s.gpus,
      coalesce(leave.new_state, j.state) as ends_as, coalesce(j.finished_at, leave.t) as ended_at
  ),
  kept as (
    insert into gangq.history (job_id, token, taken_token, gang_id, submitted_at, claimed_at,
      finished_at, incarnation, shape_id, rank, budget_s, priority, attempts, max_attempts, crashes,
      max_crashes, trips, max_trips, stops, snoozes, max_snoozes, state, retention, submitter,
      login, parent, payload, awaited, wants, unmet, batch_id, array_index, result, error,
      trace)
    select g.id, coalesce(g.token, g.final_token), g.taken_token, g.gang_id, g.submitted_at,
      g.claimed_at, g.ended_at, coalesce(g.incarnation, g.ran_on), g.shape_id, g.rank, g.budget_s,
      g.priority, g.attempts, g.max_attempts, g.crashes, g.max_crashes, g.trips, g.max_trips,
      g.stops, g.snoozes, g.max_snoozes, g.ends_as, case coalesce(leave.retain_as, g.ends_as)
        when 'done' then q.retention_done else q.retention_failed end, g.submitter, g.login,
      g.parent, g.payload, g.awaited, g.wants, g.unmet, g.batch_id, g.array_index,
      coalesce(g.new_result, g.result),
      coalesce(leave.new_error, g.error), g.trace
    from gone g join gangq.queues_table q on q.name = g.queue
  )
  select coalesce(array_agg(g.id), '{}'), array_agg(case g.state when 'running' then g.token end),
    min(g.id), max(g.id), bool_or(g.token is not null and not g.light),
    array_agg(row(g.id, g.token, g.gang_id, g.incarnation, g.claimed_at, g.ended_at, g.shape_id,
      null, null, null, null, 'done', g.submitter, g.devices, null, null)::gangq.attempt_history)
      filter (where (g.gang_id is not null or g.gpus > 0) and g.ends_as = 'done'
        and g.claimed_at is not null)
  into left_ids, vacated, lowest, highest, held, ran
  from gone g;
  marker := set_config('gangq.leaving', '', true);
  if left_ids = '{}' then
    return;
  end if;
  -- 2.
  if ran is not null and at_once then
    perform gangq.learn_runtimes(ran, t);
  end if;
  if ran is not null and leave.new_state = 'done' then
    perform gangq.record_attempts(ran);
  end if;
  -- 3.
  if held then
    if at_once and leave.new_state = 'done' then
      vacant := gangq.vacate(left_ids, vacated, t);
    end if;
    delete from gangq.device_holds h where h.job_id = any (left_ids);
  end if;
  -- 4. Most jobs leave nothing of these, nor do those submitted beside them: one look costs less
  -- than four writes that find nothing. If the ids are far apart the look would read rows of
  -- unrelated jobs.
  if not at_once or highest - lowest > 10 * cardinality(left_ids)
    or exists (select 1 from gangq.progress p where p.job_id between lowest and highest)
    or exists (select 1 from gangq.checkpoints c where c.job_id between lowest and highest)
    or exists (select 1 from gangq.dependencies d where d.job_id between lowest and highest)
    or exists (select 1 from gangq.dependencies d where d.on_job_id between lowest and highest)
  then
    perform gangq.clear_behind(left_ids, leave.new_state, at_once);
  end if;
end $$;

-- Internal, for leave. Removes what these jobs have in other tables, and tells their dependents.
create function gangq.clear_behind(ids bigint[], new_state text, at_once boolean) returns void
language plpgsql as $$
begin
  delete from gangq.progress p where p.job_id = any (ids);
  delete from gangq.dependencies d where d.job_id = any (ids);
  if new_state in ('done', 'cancelled') then
    delete from gangq.checkpoints c where c.job_id = any (ids);
  end if;
  if exists (select 1 from gangq.dependencies d where d.on_job_id = any (ids)) then
    perform gangq.settle(ids);
    insert into gangq.unsettled (job_id)
    select distinct d.on_job_id from gangq.dependencies d
    where d.on_job_id = any (ids) and d.outcome is null
    on conflict do nothing;
    perform gangq.wake_tick(true);
  end if;
  -- In a REPEATABLE READ transaction a dependent submitted since its snapshot is not seen above.
  if not at_once then
    insert into gangq.unsettled (job_id) select l.id from unnest(ids) as l(id)
    on conflict do nothing;
  end if;
end $$;

-- Internal. Whether the worker itself ended the attempt of this token: then the same call succeeds
-- silently. An attempt that was taken from its worker is stale. as_done: whether it was completed.
-- A caller whose own writes depend on that must not commit them for a failed attempt.
create function gangq.was_final(job_id bigint, token bigint, as_done boolean default false)
returns boolean language sql stable as $$
  select exists (
    select 1
    from (
      select j.final_token, j.taken_token, j.state
      from gangq.live_jobs j where j.id = was_final.job_id
      union all
      select h.token, h.taken_token, h.state
      from gangq.history h where h.job_id = was_final.job_id) x
    where x.final_token = was_final.token and x.taken_token is distinct from was_final.token
      and (x.state = 'done' or not as_done))
$$;

-- Internal. An error without its traceback and log. Viewers read events: what a program printed or
-- held in its variables stays with the job.
create function gangq.for_events(error jsonb) returns jsonb language sql immutable as $$
  select case when jsonb_typeof(error) = 'object'
    then error - array['traceback', 'log_tail'] else '{}' end
$$;

-- Done --------------------------------------------------------------------------------------------

-- Internal. The work of complete and complete_and_claim. done: the single jobs that this call has
-- ended; others, outcomes: every other pair (gang members, and repeated, stale and busy ones).
-- waited_for: placed work waits, and has more room now. Verbs call it by assignment, which costs no
-- query.
create function gangq.finish(
  job_ids bigint[], tokens bigint[], results jsonb[], strict boolean,
  out done bigint[], out others bigint[], out outcomes text[], out waited_for boolean
) language plpgsql as $$
declare
  t timestamptz := gangq.now();
  look record;
  gone record;
  rest record;
begin
  -- Cheap tests first: the total size is an upper bound for each result.
  if coalesce(cardinality(finish.job_ids), 0) = 0
    or cardinality(finish.job_ids) <> coalesce(cardinality(finish.tokens), 0)
    or cardinality(finish.results) <> cardinality(finish.job_ids)
    or pg_column_size(finish.results) > 1024
  then
    perform gangq.check_results(finish.job_ids, finish.tokens, finish.results);
  end if;
  select coalesce(m.gang_ids, '{}') as gang_ids, m.placed, m.touched, (
      select i.id from gangq.incarnations i
      where i.id = any (m.held_by) and not gangq.may_report(i.login) limit 1) as foreign
  into look
  from (
    select
      array_remove(array_agg(distinct j.gang_id), null) as gang_ids,
      array_agg(distinct j.incarnation) as held_by,
      count(*) filter (where not j.light) as placed,
      -- Its own claim has set xmax too. Only a later lock counts: that one may still be held.
      bool_or(j.xmax not in ('0', j.xmin)) as touched
    from gangq.live_jobs j where j.id = any (finish.job_ids)) m;
  if look.foreign is not null then
    perform gangq.refuse_login(look.foreign);
  end if;
  if not strict and (look.touched or look.gang_ids <> '{}') then
    -- A job that another open transaction holds must not hold up the rest of the batch.
    others := gangq.lock_free(finish.job_ids, look.gang_ids);
    outcomes := array_fill('busy'::text, array[cardinality(others)]);
    if others <> '{}' then
      select coalesce(array_agg(c.id), '{}'), coalesce(array_agg(c.token), '{}'),
        coalesce(array_agg(c.result), '{}')
      into finish.job_ids, finish.tokens, finish.results
      from unnest(finish.job_ids, finish.tokens, finish.results) as c(id, token, result)
      where (c.id = any (others)) is not true;
    end if;
  elsif look.gang_ids <> '{}' then
    perform gangq.lock_jobs(finish.job_ids, look.gang_ids);
  end if;
  gone := gangq.leave(finish.job_ids, finish.tokens, 'done', finish.results, null, t);
  done := gone.left_ids;
  if cardinality(done) <> cardinality(finish.job_ids) then
    rest := gangq.finish_rest(finish.job_ids, finish.tokens, finish.results, done, strict, t);
    others := others || rest.others;
    outcomes := outcomes || rest.outcomes;
    gone.vacant := gone.vacant + rest.vacant;
  end if;
  -- A light job leaves room for light jobs alone, a vacant place for the next of its kind.
  waited_for := look.placed > gone.vacant and gangq.placed_waits();
end $$;

-- Internal, for finish. Raises GQ001 for arrays of different lengths, GQ007 for a result larger
-- than its queue takes.
create function gangq.check_results(job_ids bigint[], tokens bigint[], results jsonb[])
returns void language plpgsql as $$
begin
  perform gangq.refuse('GQ001',
    'complete needs as many tokens (and results, if any) as job ids, and at least one',
    'Pass arrays of one length.')
  where coalesce(cardinality(job_ids), 0) = 0
    or cardinality(job_ids) <> coalesce(cardinality(tokens), 0)
    or cardinality(results) <> cardinality(job_ids);
  perform gangq.refuse('GQ007', format('result of job %s has %s bytes, queue %L takes %s',
      r.id, pg_column_size(r.result), q.name, q.max_payload_bytes),
    'Store it elsewhere and return its address.')
  from unnest(job_ids, results) as r(id, result)
  join gangq.live_jobs j on j.id = r.id
  join gangq.shapes s on s.id = j.shape_id
  join gangq.queues_table q on q.name = s.queue
  where pg_column_size(r.result) > greatest(1024, q.max_payload_bytes);
end $$;

-- Internal, for finish. The outcomes of pairs that leave has not ended as single jobs.
create function gangq.finish_rest(
  job_ids bigint[], tokens bigint[], results jsonb[], done bigint[], strict boolean, t timestamptz,
  out others bigint[], out outcomes text[], out vacant integer
) language plpgsql as $$
declare
  p record;
  outcome text;
begin
  vacant := 0;
  for p in
    select distinct on (c.id, c.token) c.id, c.token, c.result, j.gang_id,
      j.token = c.token and j.state in ('running', 'preempting') as ours
    from unnest(finish_rest.job_ids, finish_rest.tokens, finish_rest.results)
      as c(id, token, result)
    left join gangq.live_jobs j on j.id = c.id
    where c.id <> all (done) or c.id is null
    order by c.id, c.token
  loop
    if p.ours and p.gang_id is not null then
      perform gangq.finish_member(p.id, p.result, t);
      outcome := 'done';
    elsif p.ours then
      -- Its shape changed (unquarantine) while leave waited for its row, so the join with the old
      -- shape missed it. The row is locked by now.
      vacant := vacant + (
        gangq.leave(array[p.id], array[p.token], 'done', array[p.result], null, t)).vacant;
      outcome := 'done';
    elsif gangq.was_final(p.id, p.token, as_done => true) then
      outcome := 'repeated';
    elsif strict then
      perform gangq.refuse_stale(p.id, p.token);
    else
      outcome := 'stale';
    end if;
    others := others || p.id;
    outcomes := outcomes || outcome;
  end loop;
end $$;

-- Internal, for finish. A member of a locked gang is done. That may complete the drain of its gang,
-- or end the gang as done. Raises GQ004.
create function gangq.finish_member(job_id bigint, result jsonb, t timestamptz) returns void
language plpgsql as $$
declare
  g gangq.live_gangs;
  j gangq.live_jobs;
begin
  select x.* into j from gangq.live_jobs x where x.id = finish_member.job_id;
  select x.* into g from gangq.live_gangs x where x.id = j.gang_id;
  -- A member done before the others were claimed would keep the barrier shut for them for ever.
  if g.go_at is null then
    perform gangq.refuse('GQ004',
      format('job %s is done before the barrier of gang g%s has opened', j.id, g.id),
      'Wait until gangq.barrier says go: no member''s code may begin before every member has been '
      'claimed.');
  end if;
  perform gangq.record_attempts(array[gangq.attempt_of(j, 'done', t)]);
  update gangq.live_jobs x set state = 'done', result = finish_member.result, finished_at = t,
    final_token = x.token, token = null, incarnation = null, told_at = null, stop_reason = null
  where x.id = j.id;
  delete from gangq.device_holds h where h.job_id = j.id;
  perform gangq.log_event(t, 'done', g.id, g.epoch, j.id, j.token, j.ran_on,
    data => jsonb_build_object('rank', gangq.rank_of(j)));
  if g.state = 'draining' then
    perform gangq.complete_drain(g.id);
  else
    perform gangq.wind_up(g.id, t);
  end if;
end $$;

-- Jobs are done: results (JSON, aligned) are kept with them. Also inside the caller's transaction:
-- then the job is done exactly when the caller's own writes are committed. A success reported while
-- told to stop counts. outcome: done, repeated (this token had ended it before), or with strict =>
-- false stale, and busy (another open transaction holds the job or its gang: nothing has changed
-- for it, call again); with strict it is waited for, and a stale pair raises GQ003 and nothing
-- changes. Raises GQ001, GQ002, GQ003, GQ004 (a member whose gang's barrier is shut), GQ007, 42501
-- (another login's worker holds one: a member of that login may complete it in a transaction of its
-- own).
create function gangq.complete(
  job_ids bigint[], tokens bigint[], results jsonb[] default null, strict boolean default true
) returns table (job_id bigint, outcome text)
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  finished record;
begin
  finished := gangq.finish(complete.job_ids, complete.tokens, complete.results, complete.strict);
  if finished.waited_for then
    perform gangq.wake_tick(true);
  end if;
  return query
  select o.id, o.outcome from unnest(finished.others, finished.outcomes) as o(id, outcome)
  union all
  select d.id, 'done' from unnest(finished.done) as d(id);
end $$;

-- A worker that runs one job after another calls this most: one commit instead of two.
--
-- complete, then claim, in one statement and one commit. A row per finished job with the outcome
-- that complete gives, then one per claimed job (outcome: claimed). quiet: none for the jobs that
-- are plainly done by this call. A job that was done in an open place is followed there by the next
-- of its kind. The completion never waits for the claim: where another session holds this worker's
-- row or a gang reserved here, or the lease has ended, that much is not claimed. So when nothing
-- was, call claim with the same request_id before going to sleep: it returns what a lost reply to
-- this call had claimed, too, and says where a port serves another gang of this host. Raises what
-- complete raises, GQ001, GQ007 and GQ008: then nothing has changed; call the two separately.
create function gangq.complete_and_claim(
  incarnation bigint, job_ids bigint[], tokens bigint[], results jsonb[] default null,
  strict boolean default true, request_id uuid default null, max_jobs integer default 1,
  ports integer[] default '{}', sleep boolean default false, model text default null,
  quiet boolean default false, lane text default null
) returns table (
  outcome text, job_id bigint, token bigint, state text, queue text, task text, payload jsonb,
  attempt integer, max_attempts integer, priority integer, budget_s real, gang_id bigint,
  epoch integer, rank integer, world_size integer, master_port integer, checkpoint_step bigint,
  devices jsonb, submitted_at timestamptz, model_needed text, light boolean, trace text,
  array_index integer
) language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  finished record;
  -- A caller whose transaction has written something may be about to write more.
  briefly boolean := pg_current_xact_id_if_assigned() is null;
begin
  finished := gangq.finish(complete_and_claim.job_ids, complete_and_claim.tokens,
    complete_and_claim.results, complete_and_claim.strict);
  if complete_and_claim.quiet is not true then
    foreach job_id in array finished.done loop
      outcome := 'done';
      return next;
    end loop;
  end if;
  for n in 1 .. coalesce(cardinality(finished.others), 0) loop
    job_id := finished.others[n];
    outcome := finished.outcomes[n];
    return next;
  end loop;
  return query
  select 'claimed', c.* from gangq.take(complete_and_claim.incarnation,
    complete_and_claim.request_id, complete_and_claim.max_jobs, complete_and_claim.ports,
    complete_and_claim.sleep, complete_and_claim.model, complete_and_claim.lane, false) c;
  if finished.waited_for then
    -- NOTIFY takes a lock that all commits share. Of the sessions that end something at this moment
    -- one is enough to ask for a tick; what that tick does not see yet, the next one finds. A
    -- caller's own transaction may stay open, and nothing is held back for its sake.
    if briefly then
      perform from gangq.lock_rows l where l.name = 'wake' for update skip locked;
    end if;
    if not briefly or found then
      perform gangq.wake_tick(true);
    end if;
  end if;
end $$;

-- Not done ----------------------------------------------------------------------------------------

-- Internal. fail, snooze, requeue, release and ack_preempted go through it: the attempt of this
-- token has ended without success. cause: of gangq.causes; null: it must have been told to stop.
-- front: a single job goes to the front of its priority. final: it does not run again. Returns the
-- state, repeated, or (strict => false) stale.
create function gangq.report(
  job_id bigint, token bigint, cause text, error jsonb, reason text, front boolean default false,
  final boolean default false, strict boolean default true, delay_s real default null
) returns text language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  j gangq.live_jobs := gangq.lock_job(report.job_id);
  t timestamptz := gangq.now();  -- Not before the moment at which it was told to stop.
begin
  error := gangq.cut(report.error, 262144);
  if (j.token = report.token and j.state in ('running', 'preempting')) is not true then
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
      || jsonb_build_object('trips',
        (gangq.charge_job(j, (gangq.cause_named(cause)).member)).trips));
  end if;
  if j.gang_id is not null then
    perform gangq.lose_members(
      j.gang_id, array[j.id], array[j.id], cause, error, reason, t, final);
    return 'preempted';
  end if;
  -- A single job has no rendezvous to fail at.
  cause := case cause when 'never_started' then 'fail' else cause end;
  if front then
    j.order_key := gangq.order_key(j.priority,
      gangq.front_pos((select b.base from gangq.id_base() b)));
  end if;
  return gangq.end_attempt(j, cause, error, reason, t, final => final, retry_at => (
    select t + coalesce(make_interval(secs => delay_s),
      gangq.backoff(q.backoff_s, q.backoff_max_s, j.attempts))
    from gangq.shapes s join gangq.queues_table q on q.name = s.queue
    where s.id = j.shape_id and cause in ('fail', 'snoozed')));
end $$;

-- Internal. Charges a single job for its attempt and returns it to pending, or to scheduled until
-- its process is gone (gone_at) or its backoff is over (retry_at). If it has no attempt left it
-- fails; if it was told to stop it is cancelled. kind: of the event. Returns the state. The
-- order_key and shape_id of j may differ from the stored row: with them the job goes on.
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
  error := case
    when c.event = 'reap' then jsonb_build_object('type', 'WorkerLost', 'message', reason,
      'crashes', (gangq.charge_job(j, charge)).crashes)
    when spent and charge = 'stop' then jsonb_build_object('type', 'StoppedTooOften', 'message',
      'handed back or told to stop ' || gangq.counted(j.stops + 1, 'time'))
    when spent and charge = 'snooze' then jsonb_build_object('type', 'SnoozedTooOften', 'message',
      format('snoozed %s; max_snoozes is %s', gangq.counted(j.snoozes + 1, 'time'), j.max_snoozes))
    else error end;
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
    update gangq.live_jobs x
    set (attempts, crashes, trips, stops, snoozes) = (select * from gangq.charge_job(x, charge))
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

-- Internal. Whether this job is due before the next safety tick would find it. A tick that comes
-- anyway is soon enough for the end of most backoffs.
create function gangq.is_soon(job_id bigint) returns boolean language sql stable as $$
  select j.due_at < gangq.now() + make_interval(secs => 1.5 * c.tick_s)
  from gangq.live_jobs j, gangq.settings c where j.id = is_soon.job_id
$$;

-- An attempt failed: charged; tried again after the backoff, or failed when attempts are spent or
-- retryable is false. cause other_job: its process was ended over another job that ran there too;
-- nothing is charged, and it is pending at once. error: {"type", "message", "traceback", "host",
-- "log_tail"}. retry_in_s: in place of the queue's backoff; a gang has its own. What a member's
-- failure means its gang's failure policy says: by default the gang drains with it as the culprit.
-- Returns scheduled, pending, failed, preempted (gang), or repeated. Raises GQ001, GQ002, GQ003.
create function gangq.fail(
  job_id bigint, token bigint, error jsonb default '{}', retryable boolean default true,
  cause text default 'error', retry_in_s real default null
) returns text language plpgsql as $$
declare
  outcome text;
begin
  if cause not in ('error', 'port_taken', 'other_job') then
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
    coalesce(fail.error ->> 'type', 'failed'), final => not retryable, delay_s => retry_in_s);
  perform gangq.wake_tick(outcome = 'scheduled' and gangq.is_soon(fail.job_id));
  return outcome;
end $$;

-- A single job hands itself back, to be run again in for_s seconds (0 to 1e7). No attempt, crash or
-- stop is counted, but a snooze: past max_snoozes (100) it fails. What it was told meanwhile comes
-- first: then its end is as for ack_preempted. Returns scheduled, failed, cancelled, pending or
-- repeated. Raises GQ001, GQ002, GQ003, GQ004 (a member of a gang).
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
-- failure policy. Returns pending, failed, preempted or repeated. Raises GQ002, GQ003.
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
-- gang. Raises GQ001.
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
