-- leave: the one way from live_jobs into history. How an attempt ends by its worker's word:
--   complete, complete_and_claim      finish (082): a single job leaves, a member's end is told to
--                                     its gang (100_drain)
--   fail, snooze, requeue, release,   report (084): a single job leaves, or end_attempt keeps it
--   ack_preempted                     for another attempt; a member's end is told to its gang
-- Who pays for which cause: gangq.causes (078).
-- A repeated report succeeds silently: was_final knows the token of the last attempt. An attempt
-- that was taken from its worker (taken_token, set in 108, 110) is stale instead.
-- Locks: gangs by id, jobs by id, then rows of unsettled. Never a worker row: what gives capacity
-- back must not wait for what takes it.

-- Why each step stands before the next one:
-- 1. The jobs leave in one statement (move_to_history).
-- 2. Learn the run times of what is done and held devices or belonged to a gang, which planned
--    starts are estimated from; record the attempts of single jobs among them. What else ends here
--    has been recorded by its caller.
-- 3. vacate gives the devices of a job to its place. The delete after it frees all others.
-- 4. clear_behind looks for dependents in statements that begin after step 1 has locked the jobs:
--    settle_dependents counts on that. settle reads the history that step 1 wrote.
--
-- Internal. The one way out of live_jobs. Moves jobs into history: single jobs to the state given,
-- gang members with the state they have. Pairs whose token is not the present one stay; the caller
-- compares left_ids. retain_as: the state that chooses the retention class, because members are
-- kept as long as their gang. left_ids: the jobs that left; vacant: how many places they left.
create function gangq.leave(
  ids bigint[], tokens bigint[], new_state text, results jsonb[], new_error jsonb, t timestamptz,
  retain_as text default null, out left_ids bigint[], out vacant integer
) language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  gone record;
  -- In a caller's REPEATABLE READ transaction a row that another session has changed since would
  -- fail it: there no run time is learned, and a place is closed.
  at_once boolean := gangq.reads_committed();
begin
  -- 1.
  gone := gangq.move_to_history(leave.ids, leave.tokens, leave.new_state, leave.results,
    leave.new_error, leave.t, coalesce(leave.retain_as, leave.new_state));
  left_ids := gone.left_ids;
  vacant := 0;
  if left_ids = '{}' then
    return;
  end if;
  -- 2.
  if gone.ran is not null and at_once then
    perform gangq.learn_runtimes(gone.ran, t);
  end if;
  if gone.ran is not null and leave.new_state = 'done' then
    perform gangq.record_attempts(gone.ran);
  end if;
  -- 3.
  if gone.held then
    if at_once and leave.new_state = 'done' then
      vacant := gangq.vacate(left_ids, gone.vacated, t);
    end if;
    delete from gangq.device_holds h where h.job_id = any (left_ids);
  end if;
  -- 4. Most jobs leave nothing of these, nor do those submitted beside them: one look costs less
  -- than four writes that find nothing. If the ids are far apart the look would read rows of
  -- unrelated jobs.
  if not at_once or gone.highest - gone.lowest > 10 * cardinality(left_ids)
    or exists (
      select 1 from gangq.progress p where p.job_id between gone.lowest and gone.highest)
    or exists (
      select 1 from gangq.checkpoints c where c.job_id between gone.lowest and gone.highest)
    or exists (
      select 1 from gangq.dependencies d where d.job_id between gone.lowest and gone.highest)
    or exists (
      select 1 from gangq.dependencies d where d.on_job_id between gone.lowest and gone.highest)
  then
    perform gangq.clear_behind(left_ids, leave.new_state, at_once);
  end if;
end $$;

-- One statement deletes the jobs and writes their history, so none is lost or kept twice. The
-- setting gangq.leaving lets this statement alone delete (trigger live_jobs_leave).
--
-- Internal, for leave, whose arguments it has. left_ids: the jobs that left; lowest, highest: the
-- range of their ids. vacated: the token of each; null: it was told to stop, so its room is meant
-- for others. held: one of them may have held devices. ran: the attempts that step 2 of leave is
-- about; null: none.
create function gangq.move_to_history(
  ids bigint[], tokens bigint[], new_state text, results jsonb[], new_error jsonb, t timestamptz,
  retain_as text, out left_ids bigint[], out lowest bigint, out highest bigint,
  out vacated bigint[], out held boolean, out ran gangq.attempt_history[]
) language plpgsql as $$
declare
  marker text := set_config('gangq.leaving', 'with history', true);
begin
  with leaving as (
    -- Ordered: rows are locked as they are deleted, and everybody locks jobs by id.
    select l.id, l.token, l.result
    from unnest(ids, tokens, results) as l(id, token, result) order by l.id
  ),
  gone as (
    delete from gangq.live_jobs j using leaving l, gangq.shapes s
    where j.id = l.id and j.token is not distinct from l.token and s.id = j.shape_id
      and case new_state
        when 'done' then j.gang_id is null and j.state in ('running', 'preempting')
        when 'failed' then j.gang_id is null and j.state = 'running'
        when 'cancelled' then j.gang_id is null
          and j.state in ('waiting', 'scheduled', 'pending', 'preempting')
        else j.gang_id is not null and j.state in ('done', 'failed', 'cancelled') end
    returning j.*, l.result as new_result, s.queue, s.gpus,
      coalesce(new_state, j.state) as ends_as, coalesce(j.finished_at, t) as ended_at
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
      g.stops, g.snoozes, g.max_snoozes, g.ends_as, case retain_as
        when 'done' then q.retention_done else q.retention_failed end, g.submitter, g.login,
      g.parent, g.payload, g.awaited, g.wants, g.unmet, g.batch_id, g.array_index,
      coalesce(g.new_result, g.result), coalesce(new_error, g.error), g.trace
    from gone g join gangq.queues_table q on q.name = g.queue
  )
  select coalesce(array_agg(g.id), '{}'), min(g.id), max(g.id),
    array_agg(case g.state when 'running' then g.token end),
    bool_or(g.token is not null and not g.light),
    array_agg(row(g.id, g.token, g.gang_id, g.incarnation, g.claimed_at, g.ended_at, g.shape_id,
      null, null, null, null, 'done', g.submitter, g.devices, null, null)::gangq.attempt_history)
      filter (where (g.gang_id is not null or g.gpus > 0) and g.ends_as = 'done'
        and g.claimed_at is not null)
  into left_ids, lowest, highest, vacated, held, ran
  from gone g;
  marker := set_config('gangq.leaving', '', true);
end $$;

-- A retried job may have a row of unsettled from its ending before, and a tick that sees it live
-- may be about to delete that: do update waits for the tick, do nothing would not.
--
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
    select e.id from unnest(ids) as e(id)
    where exists (
      select from gangq.dependencies d where d.on_job_id = e.id and d.outcome is null)
    on conflict (job_id) do update set job_id = excluded.job_id;
    perform gangq.wake_tick(true);
  end if;
  -- In a REPEATABLE READ transaction a dependent submitted since its snapshot is not seen above.
  if not at_once then
    insert into gangq.unsettled (job_id) select l.id from unnest(ids) as l(id)
    on conflict (job_id) do update set job_id = excluded.job_id;
  end if;
end $$;

-- Internal. Whether the worker itself ended the attempt of this token: then the same call succeeds
-- silently. An attempt that was taken from its worker is stale. as_done: whether it was completed.
-- A caller whose own writes depend on that must not commit them for a failed attempt.
create function gangq.was_final(job_id bigint, token bigint, as_done boolean default false)
returns boolean language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return exists (
    select 1
    from (
      select j.final_token, j.taken_token, j.state
      from gangq.live_jobs j where j.id = was_final.job_id
      union all
      select h.token, h.taken_token, h.state
      from gangq.history h where h.job_id = was_final.job_id) x
    where x.final_token = was_final.token and x.taken_token is distinct from was_final.token
      and (x.state = 'done' or not as_done));
end $$;

-- Internal. An error without its traceback and log. Viewers read events: what a program printed or
-- held in its variables stays with the job.
create function gangq.for_events(error jsonb) returns jsonb language sql immutable as $$
  select case when jsonb_typeof(error) = 'object'
    then error - array['traceback', 'log_tail'] else '{}' end
$$;
