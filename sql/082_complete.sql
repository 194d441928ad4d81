-- Jobs are done: complete and complete_and_claim.
-- Locks: see 080; complete_and_claim also the row 'wake' of lock_rows, with skip locked.

-- 1. The arguments.
-- 2. One look at all jobs: their gangs, and whether the login may report them (look_at_done).
-- 3. Locks. A single job that nobody else has touched is locked as it is deleted, in step 4.
-- 4. leave ends the single jobs.
-- 5. Every other pair is told its outcome one by one (finish_rest).
-- 6. Whether what waits to be placed has more room.
--
-- Internal. The work of complete and complete_and_claim. done: the single jobs that this call
-- ended. others, outcomes: all other pairs (gang members, and repeated, stale and busy ones); null
-- or empty if there are none. waited_for: placed work waits and has more room now. Callers assign
-- the result to a record, which costs no query.
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
  -- 1.
  if coalesce(cardinality(finish.job_ids), 0) = 0
    or cardinality(finish.job_ids) <> coalesce(cardinality(finish.tokens), 0)
    or cardinality(finish.results) <> cardinality(finish.job_ids)
  then
    perform gangq.refuse('GQ001',
      'complete needs as many tokens (and results, if any) as job ids, and at least one',
      'Pass arrays of one length.');
  elsif pg_column_size(finish.results) > 1024 then  -- each result has less
    perform gangq.check_results(finish.job_ids, finish.results);
  end if;
  -- 2.
  look := gangq.look_at_done(finish.job_ids, finish.tokens);
  -- 3.
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
  -- 4.
  gone := gangq.leave(finish.job_ids, finish.tokens, 'done', finish.results, null, t);
  done := gone.left_ids;
  -- 5.
  if cardinality(done) <> cardinality(finish.job_ids) then
    rest := gangq.finish_rest(finish.job_ids, finish.tokens, finish.results, done, strict, t);
    others := others || rest.others;
    outcomes := outcomes || rest.outcomes;
    gone.vacant := gone.vacant + rest.vacant;
  end if;
  -- 6. A light job leaves room for light jobs alone, a vacant place for the next of its kind.
  waited_for := look.placed > gone.vacant and gangq.placed_waits();
end $$;

-- Internal, for finish. Raises GQ007 for a result larger than its queue takes. Any queue takes 1024
-- bytes.
create function gangq.check_results(job_ids bigint[], results jsonb[]) returns void
language plpgsql as $$
begin
  perform gangq.refuse('GQ007', format('result of job %s has %s bytes, queue %L takes %s',
      r.id, pg_column_size(r.result), q.name, q.max_payload_bytes),
    'Store it elsewhere and return its address.')
  from unnest(job_ids, results) as r(id, result)
  join gangq.live_jobs j on j.id = r.id
  join gangq.shapes s on s.id = j.shape_id
  join gangq.queues_table q on q.name = s.queue
  where pg_column_size(r.result) > greatest(1024, q.max_payload_bytes);
end $$;

-- Internal, for finish. What these jobs are before any is locked. gang_ids: their gangs; placed:
-- how many of them are not light; touched: another transaction may hold one. Raises 42501 if
-- another login's worker holds one by this token.
create function gangq.look_at_done(
  job_ids bigint[], tokens bigint[],
  out gang_ids bigint[], out placed bigint, out touched boolean
) language plpgsql stable as $$
declare
  held_by_others boolean;
begin
  select coalesce(m.gang_ids, '{}'), m.placed, m.touched, exists (
      select 1 from gangq.incarnations i
      where i.id = any (m.held_by) and not gangq.may_report(i.login))
  into gang_ids, placed, touched, held_by_others
  from (
    select
      array_remove(array_agg(distinct j.gang_id), null) as gang_ids,
      array_agg(distinct j.incarnation) as held_by,
      count(*) filter (where not j.light) as placed,
      -- Its own claim has set xmax too. Only a later lock counts: that one may still be held.
      bool_or(j.xmax not in ('0', j.xmin)) as touched
    from gangq.live_jobs j where j.id = any (look_at_done.job_ids)) m;
  if held_by_others then
    -- Whose worker holds the job of a stale pair does not matter.
    perform gangq.check_login(j.incarnation)
    from unnest(look_at_done.job_ids, look_at_done.tokens) as c(id, token)
    join gangq.live_jobs j on j.id = c.id and j.token = c.token;
  end if;
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
      j.token = c.token as ours
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
  beats jsonb := gangq.last_beats(array[finish_member.job_id]);
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
    data => beats || jsonb_build_object('rank', gangq.rank_of(j)));
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
