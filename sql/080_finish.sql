-- A job ends, or is handed back: complete, fail, requeue, release; and leave, the one door into history.
-- Locks: gangs by id, jobs by id; complete_and_claim also the row 'wake' of lock_rows, with skip locked. Never a worker row:
-- those who give capacity back must not meet those who take it.

-- Moves jobs out of live_jobs into history: solo jobs to the state given, gang members with the state they have.
-- Pairs whose token is not the present one stay.
create function gangq.leave(
  ids bigint[], tokens bigint[], new_state text, results jsonb[], new_error jsonb, t timestamptz,
  retain_as text default null, out left_ids bigint[], out vacant integer
) language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  vacated bigint[];  -- their tokens; null: it was told to stop, so its room is meant for others
  lowest bigint;
  highest bigint;
  held boolean;
  ran integer[];
  runs double precision[];
  -- In a caller's REPEATABLE READ transaction a row that another session has changed since would fail it: there
  -- no run time is learned, and a place is closed.
  at_once boolean := current_setting('transaction_isolation') in ('read committed', 'read uncommitted');
  marker text;
begin
  vacant := 0;
  marker := set_config('gangq.leaving', 'with history', true);
  with leaving as (
    -- Ordered: rows are locked as they are deleted, and everybody locks jobs by id.
    select l.id, l.token, l.result from unnest(leave.ids, leave.tokens, leave.results) as l(id, token, result) order by l.id
  ),
  gone as (
    delete from gangq.live_jobs j using leaving l, gangq.shapes s
    where j.id = l.id and j.token is not distinct from l.token and s.id = j.shape_id
      and case leave.new_state
        when 'done' then j.gang_id is null and j.state in ('running', 'preempting')
        when 'failed' then j.gang_id is null and j.state = 'running'
        when 'cancelled' then j.gang_id is null and j.state in ('waiting', 'scheduled', 'pending', 'preempting')
        else j.gang_id is not null and j.state in ('done', 'failed', 'cancelled') end
    returning j.id, j.token, j.final_token, j.gang_id, j.submitted_at, j.claimed_at, j.finished_at, j.incarnation, j.ran_on, j.shape_id,
      j.rank, j.budget_s, j.priority, j.attempts, j.max_attempts, j.crashes, j.max_crashes, j.trips, j.max_trips, j.stops, j.state,
      j.submitter, j.login, j.parent, j.payload, j.result, j.error, l.result as new_result, s.queue, s.gpus, j.light
  ),
  kept as (
    insert into gangq.history (job_id, token, gang_id, submitted_at, claimed_at, finished_at, incarnation, shape_id, rank,
      budget_s, priority, attempts, max_attempts, crashes, max_crashes, trips, max_trips, stops, state, retention,
      submitter, login, parent, payload, result, error)
    select g.id, coalesce(g.token, g.final_token), g.gang_id, g.submitted_at, g.claimed_at, coalesce(g.finished_at, leave.t),
      coalesce(g.incarnation, g.ran_on), g.shape_id, g.rank, g.budget_s, g.priority, g.attempts, g.max_attempts, g.crashes, g.max_crashes,
      g.trips, g.max_trips, g.stops, coalesce(leave.new_state, g.state),
      case coalesce(leave.retain_as, leave.new_state, g.state) when 'done' then q.retention_done else q.retention_failed end,
      g.submitter, g.login, g.parent, g.payload, coalesce(g.new_result, g.result), coalesce(leave.new_error, g.error)
    from gone g join gangq.queues_table q on q.name = g.queue
  )
  -- What planned starts are estimated from: whatever holds devices or belongs to a gang, and is done.
  select coalesce(array_agg(g.id), '{}'), array_agg(g.vacates), min(g.id), max(g.id), bool_or(g.token is not null and not g.light),
    array_agg(g.shape_id) filter (where g.learned), array_agg(extract(epoch from coalesce(g.finished_at, leave.t) - g.claimed_at)) filter (where g.learned)
  into left_ids, vacated, lowest, highest, held, ran, runs
  from (
    select x.id, x.token, x.light, case when x.state = 'running' then x.token end as vacates, x.shape_id, x.finished_at, x.claimed_at,
      (x.gang_id is not null or x.gpus > 0) and coalesce(leave.new_state, x.state) = 'done' and x.claimed_at is not null as learned
    from gone x) g;
  marker := set_config('gangq.leaving', '', true);
  if left_ids = '{}' then
    return;
  end if;
  if ran is not null and at_once then
    perform gangq.learn_runtimes(ran, runs, t);
  end if;
  if held then
    if at_once and leave.new_state = 'done' then
      vacant := gangq.vacate(left_ids, vacated, t);
    end if;
    delete from gangq.device_holds h where h.job_id = any (left_ids);
  end if;
  -- Most jobs leave nothing of these, nor do those submitted beside them: one look costs less than four writes
  -- that find nothing. If the ids are far apart the look would read rows of unrelated jobs.
  if not at_once or highest - lowest > 10 * cardinality(left_ids)
    or exists (select 1 from gangq.progress p where p.job_id between lowest and highest)
    or exists (select 1 from gangq.checkpoints c where c.job_id between lowest and highest)
    or exists (select 1 from gangq.dependencies d where d.job_id between lowest and highest)
    or exists (select 1 from gangq.dependencies d where d.on_job_id between lowest and highest) then
    perform gangq.clear_behind(left_ids, leave.new_state, at_once);
  end if;
end $$;
comment on function gangq.leave is
  'Internal. The one way out of live_jobs: delete and history row in one statement, devices freed, dependents told. '
  'retain_as: the state that chooses the retention class; members are kept as long as their gang. left_ids: those '
  'that left; vacant: how many left a place open.';

create function gangq.clear_behind(ids bigint[], new_state text, at_once boolean) returns void
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
begin
  delete from gangq.progress p where p.job_id = any (ids);
  delete from gangq.dependencies d where d.job_id = any (ids);
  if new_state in ('done', 'cancelled') then
    delete from gangq.checkpoints c where c.job_id = any (ids);
  end if;
  if exists (select 1 from gangq.dependencies d where d.on_job_id = any (ids)) then
    perform gangq.settle(ids);
    insert into gangq.unsettled (job_id)
    select distinct d.on_job_id from gangq.dependencies d where d.on_job_id = any (ids) and d.outcome is null
    on conflict do nothing;
    perform gangq.wake_tick(true);
  end if;
  -- In a caller's REPEATABLE READ transaction a dependent submitted since its snapshot is not seen above.
  if not at_once then
    insert into gangq.unsettled (job_id) select l.id from unnest(ids) as l(id) on conflict do nothing;
  end if;
end $$;
comment on function gangq.clear_behind is
  'Internal, for leave. Removes what these jobs have left in other tables, and tells those that wait for them.';

-- A member that a done gang could spare (its completion rule, an elastic role) is cancelled and lets nobody down.
create function gangq.ended_as(job_id bigint) returns text language sql stable as $$
  select case when h.state = 'cancelled' and h.gang_id is not null and (
      select k.state from gangq.gang_history k where k.gang_id = h.gang_id order by k.finished_at desc limit 1) = 'done'
    then 'done' else h.state end
  from gangq.history h where h.job_id = ended_as.job_id order by h.finished_at desc limit 1
$$;
comment on function gangq.ended_as is
  'Internal. How this job''s latest ending counts for those who wait for it; null: it has not ended.';

create function gangq.settle(ended bigint[]) returns void language sql volatile as $$
  -- Of an ending that is kept no longer nobody knows whether it was a success.
  update gangq.dependencies d set outcome = coalesce(gangq.ended_as(d.on_job_id), 'cancelled')
  where d.ctid = any (array(
    select z.ctid from gangq.dependencies z where z.on_job_id = any (settle.ended) and z.outcome is null
    order by z.on_job_id, z.job_id for update skip locked))
$$;
comment on function gangq.settle is
  'Internal. Tells the dependents of these jobs how they ended. A row that somebody holds (an open cancel) is passed over: '
  'see gangq.unsettled.';

create function gangq.was_final(job_id bigint, token bigint) returns boolean language sql stable as $$
  select (
      exists (select 1 from gangq.live_jobs j where j.id = was_final.job_id and j.final_token = was_final.token)
      or exists (select 1 from gangq.history h where h.job_id = was_final.job_id and h.token = was_final.token))
    and not exists (
      select 1 from gangq.events e
      where e.job_id = was_final.job_id and e.token = was_final.token and e.kind in ('reap', 'dead', 'force', 'lost'))
$$;
comment on function gangq.was_final is
  'Internal. Whether a word of its worker with this token ended the attempt: the same final call again then succeeds silently. '
  'An attempt that was taken away (its worker ended, or never confirmed that it stopped) is stale.';

-- Viewers read events: what a program printed or held in its variables stays with the job.
create function gangq.for_events(error jsonb) returns jsonb language sql immutable as $$
  select case when jsonb_typeof(error) = 'object' then error - array['traceback', 'log_tail'] else '{}' end
$$;
comment on function gangq.for_events is 'Internal. An error without its traceback and log, which only those who may read payloads see.';

-- complete asks more than was_final: an attempt that was reaped, failed or handed back is over, but it is not done, and
-- a caller whose own writes hang on this answer must not commit them.
create function gangq.was_done(job_id bigint, token bigint) returns boolean language sql stable as $$
  select exists (
      select 1 from gangq.live_jobs j
      where j.id = was_done.job_id and j.final_token = was_done.token and j.state = 'done')
    or exists (
      select 1 from gangq.history h
      where h.job_id = was_done.job_id and h.token = was_done.token and h.state = 'done')
$$;
comment on function gangq.was_done is
  'Internal. Whether this token already completed its job: completing again then succeeds silently.';

-- For the tick: a frozen client that holds one row of a gang (an uncommitted checkpoint of a member is enough)
-- must not make all maintenance wait, so the gang is stepped over as a whole.
create function gangq.try_lock_gang(gang_id bigint) returns boolean language plpgsql as $$
#variable_conflict use_column
begin
  perform 1 from gangq.live_gangs g where g.id = try_lock_gang.gang_id for update skip locked;
  return found and (select count(*) from gangq.live_jobs j where j.gang_id = try_lock_gang.gang_id) = (
    select count(*) from (
      select 1 from gangq.live_jobs j where j.gang_id = try_lock_gang.gang_id order by j.id for update skip locked) l);
end $$;
comment on function gangq.try_lock_gang is
  'Internal. Locks a gang and all its members without waiting; false when one of them is locked by somebody else.';

create function gangq.lock_job(job_id bigint, host boolean default false) returns gangq.live_jobs language plpgsql as $$
declare
  j gangq.live_jobs;
begin
  select x.* into j from gangq.live_jobs x where x.id = lock_job.job_id;
  if j.gang_id is not null then
    perform 1 from gangq.live_gangs g where g.id = j.gang_id for update;
    perform 1 from gangq.live_jobs x where x.gang_id = j.gang_id order by x.id for update;
  end if;
  select x.* into j from gangq.live_jobs x where x.id = lock_job.job_id for update;
  perform gangq.check_login(j.incarnation, lock_job.host);
  return j;
end $$;
comment on function gangq.lock_job is
  'Internal. For the verbs of its worker: locks a job, or its gang and all members, in the fixed order; returns the job. Raises '
  '42501 if another login''s worker holds it. host: the bouncer of its host may, too.';

create function gangq.lock_free(job_ids bigint[], gang_ids bigint[]) returns bigint[] language plpgsql as $$
#variable_conflict use_column
declare
  free_jobs bigint[];
  free_gangs bigint[];
begin
  free_gangs := array(select g.id from unnest(lock_free.gang_ids) as g(id) where gangq.try_lock_gang(g.id));
  free_jobs := array(
    select l.id from (
      select j.id from gangq.live_jobs j where j.id = any (lock_free.job_ids) and j.gang_id is null order by j.id for update skip locked) l);
  return array(
    select j.id from gangq.live_jobs j
    where j.id = any (lock_free.job_ids)
      and case when j.gang_id is null then j.id <> all (free_jobs) else j.gang_id <> all (free_gangs) end);
end $$;
comment on function gangq.lock_free is
  'Internal. Of these jobs, which are in these gangs or in none, locks those that nobody else holds, with their gangs, and '
  'returns the others. Never waits.';

create function gangq.check_results(job_ids bigint[], results jsonb[]) returns void language plpgsql as $$
declare
  big record;
begin
  select r.id, pg_column_size(r.result) as bytes, q.max_payload_bytes, q.name into big
  from unnest(job_ids, results) as r(id, result)
  join gangq.live_jobs j on j.id = r.id
  join gangq.shapes s on s.id = j.shape_id
  join gangq.queues_table q on q.name = s.queue
  where pg_column_size(r.result) > 1024 and pg_column_size(r.result) > q.max_payload_bytes limit 1;
  if found then
    perform gangq.refuse('GQ007',
      format('result of job %s has %s bytes, queue %L takes %s', big.id, big.bytes, big.name, big.max_payload_bytes),
      'Store it elsewhere and return its address.');
  end if;
end $$;
comment on function gangq.check_results is 'Internal. Refuses results larger than their queue takes. Raises GQ007.';

-- The work of complete and of complete_and_claim: the ids that are done now, and what became of each
-- pair that was not plainly the caller's to finish. waited_for: placed work waits and has more room now.
-- Verbs call it by assignment, which costs no query.
create function gangq.finish(
  job_ids bigint[], tokens bigint[], results jsonb[], strict boolean,
  out done bigint[], out others bigint[], out outcomes text[], out waited_for boolean
) language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  look record;
  gone record;
  rest record;
begin
  if coalesce(cardinality(finish.job_ids), 0) = 0 or cardinality(finish.job_ids) <> coalesce(cardinality(finish.tokens), 0)
    or cardinality(finish.results) <> cardinality(finish.job_ids) then
    perform gangq.refuse('GQ001', 'complete needs as many tokens (and results, if any) as job ids, and at least one', 'Pass arrays of one length.');
  end if;
  -- What all of them have is more than any of them has, and costs nothing to ask.
  if pg_column_size(finish.results) > 1024 then
    perform gangq.check_results(finish.job_ids, finish.results);
  end if;
  select m.gang_ids, m.placed, m.touched,
    (select i.id from gangq.incarnations i where i.id = any (m.held_by) and not gangq.may_report(i.login) limit 1) as foreign
  into look
  from (
    select coalesce(array_agg(distinct j.gang_id) filter (where j.gang_id is not null), '{}') as gang_ids, array_agg(distinct j.incarnation) as held_by,
      count(*) filter (where not j.light) as placed,
      -- Whoever claimed it has locked it, too. With another transaction's lock there, that may be open still.
      bool_or(j.xmax not in ('0', j.xmin)) as touched
    from gangq.live_jobs j where j.id = any (finish.job_ids)) m;
  if look.foreign is not null then
    perform gangq.refuse_login(look.foreign);
  end if;
  if not strict and (look.touched or look.gang_ids <> '{}') then
    -- What one caller's open transaction holds keeps the others of the batch waiting for nothing.
    others := gangq.lock_free(finish.job_ids, look.gang_ids);
    if others <> '{}' then
      outcomes := array_fill('busy'::text, array[cardinality(others)]);
      select coalesce(array_agg(c.id), '{}'), coalesce(array_agg(c.token), '{}'), coalesce(array_agg(c.result), '{}')
      into finish.job_ids, finish.tokens, finish.results
      from unnest(finish.job_ids, finish.tokens, finish.results) as c(id, token, result)
      where (c.id = any (others)) is not true;
    end if;
  elsif look.gang_ids <> '{}' then
    perform 1 from gangq.live_gangs g where g.id = any (look.gang_ids) order by g.id for update;
    perform 1 from gangq.live_jobs j where j.id = any (finish.job_ids) or j.gang_id = any (look.gang_ids) order by j.id for update;
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
comment on function gangq.finish is
  'Internal. Ends these jobs as done. others, outcomes: gang members, repeated, stale and busy pairs, one by one.';

create function gangq.finish_rest(
  job_ids bigint[], tokens bigint[], results jsonb[], done bigint[], strict boolean, t timestamptz,
  out others bigint[], out outcomes text[], out vacant integer
) language plpgsql as $$
#variable_conflict use_column
declare
  p record;
  gone record;
  outcome text;
begin
  vacant := 0;
  for p in
    select distinct on (c.id, c.token) c.id, c.token, c.result, j.gang_id,
      j.token = c.token and j.state in ('running', 'preempting') as ours
    from unnest(finish_rest.job_ids, finish_rest.tokens, finish_rest.results) as c(id, token, result)
    left join gangq.live_jobs j on j.id = c.id
    where c.id <> all (done) or c.id is null
    order by c.id, c.token
  loop
    if p.ours and p.gang_id is not null then
      perform gangq.finish_member(p.gang_id, p.id, p.token, p.result, t);
      outcome := 'done';
    elsif p.ours then
      -- It got another shape while its row was waited for (unquarantine), and was not found with the one it had. The row is
      -- locked by now.
      gone := gangq.leave(array[p.id], array[p.token], 'done', array[p.result], null, t);
      vacant := vacant + gone.vacant;
      outcome := 'done';
    elsif gangq.was_done(p.id, p.token) then
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
comment on function gangq.finish_rest is
  'Internal, for finish. Those of these pairs that are not single jobs done by leave: what becomes of each, and how '
  'many places they leave vacant.';

create function gangq.finish_member(gang_id bigint, job_id bigint, token bigint, result jsonb, t timestamptz)
returns void language plpgsql as $$
#variable_conflict use_column
begin
  -- A member done before the others were claimed would keep the barrier shut for them for ever.
  if exists (select 1 from gangq.live_gangs g where g.id = finish_member.gang_id and g.go_at is null) then
    perform gangq.refuse('GQ004',
      format('job %s is done before the barrier of gang %s has opened', finish_member.job_id, finish_member.gang_id),
      'Wait until gangq.barrier says go: no member''s code may begin before every member has been claimed.');
  end if;
  update gangq.live_jobs j set state = 'done', result = finish_member.result, finished_at = t, final_token = j.token, token = null,
    incarnation = null, told_at = null, stop_reason = null
  where j.id = finish_member.job_id;
  delete from gangq.device_holds h where h.job_id = finish_member.job_id;
  perform gangq.member_ended(finish_member.gang_id, finish_member.job_id, finish_member.token, 'done', t);
end $$;
comment on function gangq.finish_member is 'Internal, for finish. A member of a locked gang is done. Raises GQ004.';

create function gangq.complete(
  job_ids bigint[], tokens bigint[], results jsonb[] default null, strict boolean default true
) returns table (job_id bigint, outcome text)
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
#variable_conflict use_column
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
comment on function gangq.complete is
  'Jobs are done: results (JSON, aligned) are kept with them. Also inside the caller''s transaction: then the job is done '
  'exactly when the caller''s own writes are committed. A success reported while told to stop counts. outcome: done, '
  'repeated (this token had ended it before), or with strict => false stale, and busy (somebody''s open transaction holds the '
  'job or its gang: nothing has changed for it, say it again); with strict it is waited for, and a stale pair raises GQ003 and '
  'nothing changes. Raises GQ001, GQ002, GQ003, GQ004 (a member whose gang''s barrier is shut), GQ007, 42501 (another login''s worker '
  'holds one: a member of that login may complete it in a transaction of its own).';

-- What a worker that runs one job after another says most: this one is done, what is next? One commit instead of two.
create function gangq.complete_and_claim(
  incarnation bigint, job_ids bigint[], tokens bigint[], results jsonb[] default null, strict boolean default true,
  request_id uuid default null, max_jobs integer default 1, ports integer[] default '{}', sleep boolean default false,
  model text default null, quiet boolean default false, lane text default null
) returns table (
  outcome text, job_id bigint, token bigint, state text, queue text, task text, payload jsonb, attempt integer, max_attempts integer,
  priority integer, budget_s real, gang_id bigint, epoch integer, rank integer, world_size integer, master_port integer,
  checkpoint_step bigint, devices jsonb, submitted_at timestamptz, model_needed text, light boolean
) language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  finished record;
  -- A caller whose transaction has written something may be about to write more.
  briefly boolean := pg_current_xact_id_if_assigned() is null;
begin
  finished := gangq.finish(complete_and_claim.job_ids, complete_and_claim.tokens, complete_and_claim.results, complete_and_claim.strict);
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
  select 'claimed', c.* from gangq.take(complete_and_claim.incarnation, complete_and_claim.request_id, complete_and_claim.max_jobs,
    complete_and_claim.ports, complete_and_claim.sleep, complete_and_claim.model, complete_and_claim.lane, false) c;
  if finished.waited_for then
    -- NOTIFY takes a lock that all commits share. Of the sessions that end something at this moment one is
    -- enough to ask for a tick; what that tick does not see yet, the next one finds. A caller's own
    -- transaction may stay open, and nothing is held back for its sake.
    if briefly then
      perform from gangq.lock_rows l where l.name = 'wake' for update skip locked;
    end if;
    if not briefly or found then
      perform gangq.wake_tick(true);
    end if;
  end if;
end $$;
comment on function gangq.complete_and_claim is
  'complete, then claim, in one statement and one commit. A row per finished job with the outcome that complete gives, then '
  'one per claimed job (outcome: claimed). quiet: none for the jobs that are plainly done by this call. A job that was done in an '
  'open place is followed there by the next of its kind. The completion never waits for the claim: where another session holds this '
  'worker''s row or a gang reserved here, or the lease has ended, that much is not claimed. So when '
  'nothing was, call claim with the same request_id before going to sleep: it returns what a lost reply to this call had '
  'claimed, too, and says where a port serves another gang of this host. Raises what complete raises, GQ001, GQ007 and '
  'GQ008: then nothing has changed; call the two separately.';

create function gangq.fail(
  job_id bigint, token bigint, error jsonb default '{}', retryable boolean default true, cause text default 'error'
) returns text language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs;
  q gangq.queues_table;
  delay interval;
begin
  fail.error := gangq.cut(fail.error, 262144);
  if cause not in ('error', 'port_taken') then
    perform gangq.refuse('GQ001', format('cause is %L', cause), 'It is error, or port_taken when a member''s rendezvous port was taken.');
  end if;
  j := gangq.lock_job(fail.job_id);
  if j.id is null or j.token is distinct from fail.token or j.state not in ('running', 'preempting') then
    if gangq.was_final(fail.job_id, fail.token) then
      return 'repeated';
    end if;
    perform gangq.refuse_stale(fail.job_id, fail.token);
  end if;
  if j.state = 'preempting' then
    return gangq.stopped(j, coalesce(fail.error, '{}'), t);
  end if;
  if j.gang_id is not null then
    perform gangq.lose_members(j.gang_id, array[j.id], case cause when 'port_taken' then 'never_started' else 'fail' end, fail.error,
      coalesce(fail.error ->> 'type', 'failed'), t, not retryable);
    return 'preempted';
  end if;
  select x.* into q from gangq.queues_table x join gangq.shapes s on s.queue = x.name where s.id = j.shape_id;
  if not retryable or j.attempts >= j.max_attempts then
    perform gangq.leave(array[j.id], array[j.token], 'failed', array[null]::jsonb[], coalesce(fail.error, '{}'), t);
    perform gangq.log_event(t, 'fail', job_id => j.id, token => j.token, incarnation => j.incarnation, reason => fail.error ->> 'type',
      data => jsonb_build_object('attempts', j.attempts, 'retryable', retryable));
    perform gangq.wake_tick();
    return 'failed';
  end if;
  delay := gangq.backoff(q.backoff_s, q.backoff_max_s, j.attempts);
  update gangq.live_jobs x set state = 'scheduled', due_at = t + delay, final_token = x.token, token = null, incarnation = null,
    error = fail.error, request_id = null
  where x.id = j.id;
  delete from gangq.device_holds h where h.job_id = j.id;
  perform gangq.log_event(t, 'retry', job_id => j.id, token => j.token, incarnation => j.incarnation, reason => fail.error ->> 'type',
    data => jsonb_build_object('attempts', j.attempts, 'due_at', t + delay));
  perform gangq.wake_tick(delay < (select make_interval(secs => 1.5 * c.tick_s) from gangq.settings c));
  return 'scheduled';
end $$;
comment on function gangq.fail is
  'An attempt failed: charged; tried again after the backoff, or failed when attempts are spent or retryable is false. '
  'error: {"type", "message", "traceback", "host", "log_tail"}. What a member''s failure means its gang''s failure policy '
  'says: by default the gang drains with it as the culprit. Returns scheduled, failed, preempted (gang), or repeated. Raises GQ001, GQ002, GQ003.';

create function gangq.requeue(job_id bigint, token bigint, error jsonb default '{}', front boolean default true)
returns text language plpgsql as $$
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs;
  charge text;
begin
  requeue.error := gangq.cut(requeue.error, 262144);
  j := gangq.lock_job(requeue.job_id);
  if j.id is null or j.token is distinct from requeue.token or j.state not in ('running', 'preempting') then
    if gangq.was_final(requeue.job_id, requeue.token) then
      return 'repeated';
    end if;
    perform gangq.refuse_stale(requeue.job_id, requeue.token);
  end if;
  if j.state = 'preempting' then
    return gangq.stopped(j, requeue.error, t);
  end if;
  perform gangq.log_event(t, 'trip', j.gang_id,
    (select g.epoch from gangq.live_gangs g where g.id = j.gang_id),
    job_id => j.id, token => j.token, incarnation => j.incarnation,
    reason => requeue.error ->> 'type',
    data => gangq.for_events(requeue.error) || jsonb_build_object('trips', j.trips + 1));
  if j.gang_id is not null then
    perform gangq.lose_members(j.gang_id, array[j.id], 'trip', requeue.error, coalesce(requeue.error ->> 'type', 'watchdog trip'), t);
    return 'preempted';
  end if;
  charge := (gangq.charges_for('trip')).culprit;
  if gangq.spends_job(j, charge) then
    update gangq.live_jobs x set trips = c.trips from gangq.charge_job(j, charge) c where x.id = j.id;
    perform gangq.leave(array[j.id], array[j.token], 'failed', array[null]::jsonb[],
      coalesce(requeue.error, '{}'), t);
    perform gangq.wake_tick();
    return 'failed';
  end if;
  update gangq.live_jobs x set state = 'pending', attempts = c.attempts, crashes = c.crashes,
    trips = c.trips, stops = c.stops, final_token = x.token, token = null, incarnation = null,
    error = requeue.error, request_id = null,
    order_key = case when front
      then gangq.order_key(x.priority, gangq.front_pos((select b.base from gangq.id_base() b)))
      else x.order_key end
  from gangq.charge_job(j, charge) c
  where x.id = j.id;
  delete from gangq.device_holds h where h.job_id = j.id;
  perform gangq.wake_lane(j.shape_id, 1, 'sleepers');
  perform gangq.wake_tick();
  return 'pending';
end $$;
comment on function gangq.requeue is
  'A watchdog stopped the attempt: counts a trip instead of an attempt and puts the job at the front of its priority, or '
  'fails it when its trips are spent. A member''s trip is judged by its gang''s failure policy. Returns pending, failed, preempted or repeated. '
  'Raises GQ002, GQ003.';

create function gangq.release(job_ids bigint[], tokens bigint[], reason text default null)
returns table (job_id bigint, outcome text)
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  gang_ids bigint[];
  p record;
  j gangq.live_jobs;
begin
  perform gangq.refuse_larger('the reason', octet_length(release.reason), 4000);
  if coalesce(cardinality(release.job_ids), 0) <> coalesce(cardinality(release.tokens), 0) then
    perform gangq.refuse('GQ001', 'release needs as many tokens as job ids', 'Pass arrays of one length.');
  end if;
  gang_ids := array(select distinct x.gang_id from gangq.live_jobs x where x.id = any (release.job_ids) and x.gang_id is not null);
  perform 1 from gangq.live_gangs g where g.id = any (gang_ids) order by g.id for update;
  perform 1 from gangq.live_jobs x where x.id = any (release.job_ids) or x.gang_id = any (gang_ids) order by x.id for update;
  for p in select r.id, r.token from unnest(release.job_ids, release.tokens) as r(id, token) order by r.id loop
    j := gangq.lock_job(p.id);
    job_id := p.id;
    if j.id is null or j.token is distinct from p.token or j.state not in ('running', 'preempting') then
      outcome := case when gangq.was_final(p.id, p.token) then 'repeated' else 'stale' end;
    else
      outcome := 'released';
      if j.state = 'preempting' then
        perform gangq.stopped(j, null, t);
      elsif j.gang_id is not null then
        perform gangq.drain(j.gang_id, array[j.id], 'release', null, coalesce(release.reason, 'handed back by its worker'), t);
      else
        perform gangq.hand_back(j, 'release', coalesce(release.reason, 'handed back by its worker'), t);
      end if;
    end if;
    return next;
  end loop;
  perform gangq.wake_tick();
end $$;
comment on function gangq.release is
  'A worker hands claims back because it has to stop; their work is dead. No attempt is charged, each '
  'counts a stop (max_stops). outcome: released, repeated, stale. A member''s release drains its '
  'gang. Raises GQ001.';

-- A solo job that ran and is proven stopped goes back to pending, in its old place. how: release, crash,
-- worker_lost or move: see charges_for. gone_at: it is not stopped yet, but will be then.
create function gangq.hand_back(
  j gangq.live_jobs, how text, reason text, t timestamptz, gone_at timestamptz default null
) returns text language plpgsql as $$
declare
  charge text := (gangq.charges_for(hand_back.how)).culprit;
  lost jsonb := case how
    when 'crash' then jsonb_build_object('type', 'WorkerLost', 'message', hand_back.reason) end;
begin
  perform gangq.log_event(t, case how when 'crash' then 'reap' else 'release' end, job_id => (j).id,
    token => (j).token, incarnation => (j).incarnation, reason => hand_back.reason);
  if gangq.spends_job(j, charge) then
    update gangq.live_jobs x set crashes = c.crashes
    from gangq.charge_job(j, charge) c where x.id = (j).id;
    perform gangq.leave(array[(j).id], array[(j).token],
      case when (j).state = 'running' or lost is not null then 'failed' else 'cancelled' end,
      array[null]::jsonb[],
      coalesce(lost || jsonb_build_object('crashes', (j).crashes + 1),
        jsonb_build_object('type', 'StoppedTooOften',
          'message', format('handed back or told to stop %s', gangq.counted((j).stops + 1, 'time')))),
      t);
    return 'failed';
  end if;
  update gangq.live_jobs x set
    state = case when gone_at is null then 'pending' else 'scheduled' end, due_at = gone_at,
    ran_on = case when gone_at is not null then x.incarnation end,
    final_token = x.token, token = null, incarnation = null, request_id = null, told_at = null,
    stop_reason = null, error = coalesce(lost, x.error), attempts = c.attempts,
    crashes = c.crashes, trips = c.trips, stops = c.stops
  from gangq.charge_job(j, charge) c
  where x.id = (j).id;
  delete from gangq.device_holds h where h.job_id = (j).id;
  if gone_at is not null then
    return 'scheduled';
  end if;
  perform gangq.wake_lane((j).shape_id, 1, 'sleepers');
  return 'pending';
end $$;
comment on function gangq.hand_back is
  'Internal. Back to pending, or scheduled for when its process is gone, without charging an attempt; a crash counts as one '
  'and fails the job when those are spent.';

create function gangq.append_log(job_ids bigint[], tokens bigint[], seqs integer[], chunks text[]) returns void
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  -- A chunk counts as 64 bytes more than it has, for its row. The smallest has one byte: no worker that keeps to log_bytes comes here.
  most bigint := (select 65::bigint * c.log_bytes from gangq.settings c);
  said record;
  held record;
  other bigint;
  last record;
  total bigint;
  until timestamptz := gangq.now() + interval '1 hour';  -- so that no partition of later days is looked into
begin
  if (select count(distinct coalesce(cardinality(a.list), 0))
      from (values (append_log.job_ids::text[]), (append_log.tokens::text[]), (append_log.seqs::text[]), (append_log.chunks)) as a(list)) > 1
    or array_position(append_log.seqs, null) is not null or array_position(append_log.chunks, null) is not null or 0 > any (append_log.seqs) then
    perform gangq.refuse('GQ001', 'append_log needs as many tokens, numbers and chunks as job ids, and numbers from 0 on',
      'Pass arrays of one length, without nulls in seqs and chunks.');
  end if;
  perform gangq.refuse_larger('a chunk', max(octet_length(c.chunk)), 1048576) from unnest(append_log.chunks) as c(chunk);
  perform gangq.require_read_committed('append_log');
  for said in
    select l.id, l.token, array_agg(l.seq order by l.seq) as seqs, array_agg(l.chunk order by l.seq) as chunks
    from unnest(append_log.job_ids, append_log.tokens, append_log.seqs, append_log.chunks) as l(id, token, seq, chunk)
    group by l.id, l.token order by l.id, l.token
  loop
    select j.incarnation, j.submitted_at, j.token is not distinct from said.token as present into held
    from gangq.live_jobs j where j.id = said.id and (j.token = said.token or j.final_token = said.token);
    continue when not found;
    if held.present then
      select i.id into other from gangq.incarnations i where i.id = held.incarnation and not gangq.may_report(i.login);
    else
      -- An attempt that is over has left its job's row: the event of its end says where it ran.
      select i.id into other from gangq.incarnations i
      where i.id = any (array(select e.incarnation from gangq.events e where e.job_id = said.id and e.token = said.token))
        and not gangq.may_report(i.login) limit 1;
    end if;
    if found then
      perform gangq.refuse_login(other);
    end if;
    -- Two appends at once would each count without the other. So appends of one attempt wait for each other: at its first row,
    -- and while there is none at the row of its job, unless that runs as another attempt.
    perform 1 from gangq.logs x
    where x.job_id = said.id and x.token = said.token and x.at between held.submitted_at and until order by x.seq limit 1 for no key update;
    if not found then
      perform 1 from gangq.live_jobs j
      where j.id = said.id and (j.token = said.token or j.token is null and j.final_token = said.token) for no key update;
      continue when not found;
      perform 1 from gangq.logs x
      where x.job_id = said.id and x.token = said.token and x.at between held.submitted_at and until order by x.seq limit 1 for no key update;
    end if;
    select x.seq, x.upto into last from gangq.logs x
    where x.job_id = said.id and x.token = said.token and x.at between held.submitted_at and until order by x.seq desc limit 1;
    select coalesce(last.upto, 0) + sum(octet_length(c.chunk) + 64) into total
    from unnest(said.seqs, said.chunks) as c(seq, chunk) where last.seq is null or c.seq > last.seq;
    perform gangq.refuse_larger(format('the output of this attempt of job %s, with its rows,', said.id), total, most);
    insert into gangq.logs (job_id, token, seq, at, chunk, upto)
    select said.id, said.token, c.seq, gangq.now(), c.chunk, total
    from unnest(said.seqs, said.chunks) as c(seq, chunk) where last.seq is null or c.seq > last.seq;
  end loop;
end $$;
comment on function gangq.append_log is
  'Output of claims, in chunks numbered from 0 per attempt. Stale pairs and numbers that are not above the last are dropped silently; '
  'the worker bounds the total (settings.log_bytes). Raises GQ007 (a chunk over 1 MiB, an attempt over 65 times log_bytes with 64 bytes '
  'more for each chunk), 42501 if another login''s worker holds or held one of the claims.';
