-- tick: all maintenance, in order. One session at a time runs it, in one autocommit call. All steps
-- commit together, with the call; a step that fails is undone alone.
-- Locks: the row 'tick' of lock_rows, with skip locked; then what each step locks; the row of
-- decider last. A step locks with skip locked, unless its file says that it waits for a lock. No
-- wait is longer than 100 ms (150); a step that has waited in vain is tried again.
--
-- A caller that finds another tick running may need what that one no longer sees:
-- 1. The call reads runs = n and finds the row locked: run n + 1 is under way, or a later one.
-- 2. Run n + 2 begins after run n + 1 has committed, so it sees all that the caller had committed.
-- 3. The call returns next_turn = n + 2. The caller repeats it with turn => n + 2 until it has run
--    itself or runs >= turn. A run that is rolled back, or does only what is due, is not counted.

-- Internal. The steps of a tick, in order. due: something that the step does is due by t. at_work:
-- there are rows that the step may have to act on. One statement asks this of all steps; a step
-- that is neither due nor at work is not begun. tick_step has the same names, and time_out.
create function gangq.tick_steps(t timestamptz)
returns table (name text, due boolean, at_work boolean) language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return query values
    ('rollback_stale', false,
      exists (select from gangq.live_gangs g where g.state in ('reserved', 'draining'))
      or exists (select from gangq.live_gangs g where g.missing_since is not null)),
    ('reap_expired', false, true),
    ('close_overdue', false, exists (select from gangq.places)),
    ('flag_dead_workers', false, true),
    ('settle_dependents', false,
      exists (select from gangq.dependencies d where not d.settled and d.outcome is null)),
    ('revive_dependents', false,
      exists (select from gangq.retried r where r.job_id is not null and not r.followed)),
    ('end_pauses',
      exists (select from gangq.queues_table q where q.paused_until <= t)
      or exists (select from gangq.task_pauses p where p.until <= t), false),
    ('submit_schedules', exists (select from gangq.schedules_table x where x.due_at <= t), false),
    -- A gang of a service has ended, or is to be told to stop, or to be made, or a service is to be
    -- scaled. So a service waits for the backoff of its gangs and for no safety tick.
    ('keep_services',
      exists (select from gangq.services_table x where x.next_try_at <= t)
      or exists (select from gangq.scaling_table x where x.due_at <= t)
      or exists (
        select from gangq.service_gangs_table x left join gangq.live_gangs g on g.id = x.gang_id
        where g.id is null or x.stop_at <= t and not g.cancelling),
      exists (select from gangq.services_table)),
    ('promote_due',
      exists (select from gangq.live_jobs j where j.state = 'scheduled' and j.due_at <= t),
      -- An earlier step may tell a dependency its outcome.
      exists (select from gangq.unsettled) or exists (select from gangq.dependencies)),
    ('end_batches', false,
      exists (select from gangq.batches_table b where b.finished_at is null)),
    ('judge_progress', false, exists (select from gangq.live_gangs g where g.state = 'running')),
    ('lift_avoided', false,
      exists (select from gangq.pending_shapes) or exists (select from gangq.blocked_kinds)),
    ('move_away', false, exists (select from gangq.cordons c where c.drain)),
    ('part_submitters', false, exists (select from gangq.pending_shapes)),
    ('raise_idle_lows', false, exists (select from gangq.lows)),
    ('trim_outbox', false, exists (select from gangq.outbox)),
    ('count_ended', false, true),
    ('keep_partitions', false, true);
end $$;

-- All maintenance: stale reservations, expired leases, flags, schedules and jobs that are due,
-- gangs that stand still, avoided devices that are the last ones left, hosts to be left by now,
-- partitions. Safe to call from anywhere at any rate: one runs at a time. force: even if one has
-- just run; without it a call soon after another does only what is due. next_in_s: when to call
-- again; below settings.tick_s it is the moment when something is due. again: there was more to do,
-- or something was busy. If another one runs, ran is false and next_turn names the first run that
-- has not begun: call again after next_in_s with turn => next_turn, until ran is true or next_turn
-- is null. decides: the caller can decide and compute. decide: something waits to be placed, and
-- this caller has the turn: it decides on gangq.board() and calls gangq.apply within a second.
-- unplanned: how many schedules lack their next due time: a caller that can compute calls
-- gangq.unplanned_schedules and gangq.plan_schedules. Call it in autocommit: the server hangs up on
-- a transaction that ticked and then idles for more than 5 s. Raises GQ008.
create function gangq.tick(
  force boolean default false, turn bigint default null, decides boolean default false
) returns table (
  ran boolean, again boolean, next_in_s real, detail jsonb, next_turn bigint, decide boolean,
  unplanned integer
) language plpgsql as $$
declare
  t timestamptz := gangq.now();
  last record;
  steps text[];
  done record;
  asked record;
begin
  perform gangq.require_read_committed('tick');
  last := gangq.last_run(force, tick.turn, t);
  ran := false;
  again := false;
  decide := false;
  unplanned := 0;
  next_in_s := last.next_in_s;
  -- What is due does not wait for the next safety tick, and does not make all of the tick run.
  if last.just_ran and not exists (select from gangq.tick_steps(t) s where s.due) then
    return next;
    return;
  end if;
  perform from gangq.lock_rows l where l.name = 'tick' for update skip locked;
  if not found then
    next_in_s := 0.02;
    next_turn := case when tick.turn > last.runs then tick.turn else last.runs + 2 end;
    return next;
    return;
  end if;
  -- After the lock: run n + 2 must see what was committed before run n + 1 has.
  steps := array(
    select s.name from gangq.tick_steps(t) s where s.due or s.at_work and not last.just_ran);
  -- A run of the due steps alone is not counted: it serves nobody who waits for a whole one.
  update gangq.lock_rows l set runs = l.runs + 1 where l.name = 'tick' and not last.just_ran;
  perform gangq.hang_up_soon();
  done := gangq.run_steps(steps, coalesce(tick.decides, false));
  ran := true;
  detail := done.detail;
  again := done.wait_s is not null;
  -- What falls due before the next safety tick is served on time. next_due leaves out what is due
  -- already: what of that is left was more than a step takes (again), or is locked.
  next_in_s := least(done.wait_s, greatest(0.01,
    least(next_in_s, extract(epoch from gangq.next_due(t) - gangq.now()))));
  unplanned := (select count(*) from gangq.unplanned(gangq.now()));
  -- Last, because the decider waits for this row at the end of its pass.
  if tick.decides and not last.just_ran then
    asked := gangq.take_turn(t);
    decide := asked.decide;
    again := again or asked.busy;
    next_in_s := least(next_in_s, asked.wait_s);
  end if;
  return next;
end $$;

-- Internal, for tick. runs: how many whole runs there were. just_ran: the last one is so recent
-- that this call does only what is due; false if the caller wants another one (force, or a turn
-- that has not come). next_in_s: in how many seconds the next whole run is to be, after this call.
create function gangq.last_run(
  force boolean, turn bigint, t timestamptz,
  out runs bigint, out just_ran boolean, out next_in_s real
) language plpgsql stable as $$
declare
  every real;
  ago_s real;
begin
  select s.tick_s, extract(epoch from t - x.last_at), l.runs into every, ago_s, runs
  from gangq.settings s cross join gangq.tick_state x cross join gangq.lock_rows l
  where l.name = 'tick';
  just_ran := coalesce(
    (not force or runs >= turn) and ago_s >= 0 and ago_s < every * 0.8
      -- No rate holds anything back, or it opens later.
      and gangq.rate_opens_at() > t is not false, false);
  next_in_s := every - case when just_ran then ago_s else 0 end;
end $$;

-- Internal. A moment among the numbers of a verdict, in seconds since 1970; null: it is none. They
-- are what a decider said, which may be anything.
create function gangq.moment_said(numbers jsonb, key text) returns timestamptz
language sql immutable as $$
  select case jsonb_typeof(numbers -> key) when 'number'
    then to_timestamp(least(greatest((numbers ->> key)::numeric, 0), 1e11)::float8) end
$$;

-- Internal. When the first rate that holds something back allows it; null: none does.
create function gangq.rate_opens_at() returns timestamptz language plpgsql stable as $$
begin
  return (
    select min(gangq.moment_said(v.numbers, 'at')) from gangq.verdicts v where v.gate = 'rate');
end $$;

-- Internal. The first moment after t at which a tick, or a pass, has something to do; null: none.
create function gangq.next_due(t timestamptz) returns timestamptz
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return least(
    (select min(j.due_at) from gangq.live_jobs j where j.state = 'scheduled' and j.due_at > t),
    (select min(g.not_before) from gangq.live_gangs g
      where g.state = 'blocked' and g.not_before > t),
    (select min(g.not_before) from gangq.live_gangs g
      where g.missing_since is not null and g.not_before > t),
    (select gangq.rate_opens_at() where gangq.rate_opens_at() > t),
    (select min(x.due_at) from gangq.schedules_table x where x.due_at > t),
    (select min(x.stop_at) from gangq.service_gangs_table x where x.stop_at > t),
    (select min(x.next_try_at) from gangq.services_table x where x.next_try_at > t),
    (select min(x.due_at) from gangq.scaling_table x where x.due_at > t),
    (select min(q.paused_until) from gangq.queues_table q where q.paused_until > t),
    (select min(p.until) from gangq.task_pauses p where p.until > t));
end $$;

-- Internal, for tick. Does these steps. detail: how much each did. wait_s: when to begin again: at
-- once, where a step has done as much as it does in one call (its most, 200); a little later, where
-- another transaction holds something, for it may stay locked; null: all is done.
create function gangq.run_steps(
  steps text[], decides boolean, out detail jsonb, out wait_s real
) language plpgsql as $$
declare
  step text;
  done integer;
begin
  foreach step in array steps loop
    done := gangq.tick_step(step, decides);
    detail := coalesce(detail, '{}') || jsonb_build_object(step, done);
    wait_s := greatest(wait_s, case when done < 0 then 0.05 when done >= 200 then 0 end);
  end loop;
end $$;

-- Internal. One step, in a subtransaction of its own: how much it did, -1 for busy. A failure is an
-- event (tick_error) and a warning, and the other steps go on. tick_steps has the same names.
create function gangq.tick_step(step text, decides boolean) returns integer language plpgsql as $$
begin
  case step
    when 'rollback_stale' then return gangq.rollback_stale();
    when 'reap_expired' then return gangq.reap_expired();
    when 'close_overdue' then return gangq.close_overdue();
    when 'flag_dead_workers' then return gangq.flag_dead_workers();
    when 'settle_dependents' then return gangq.settle_dependents();
    when 'end_pauses' then return gangq.end_pauses();
    when 'revive_dependents' then return gangq.revive_dependents();
    when 'submit_schedules' then return gangq.submit_schedules(can_plan => decides);
    when 'keep_services' then return gangq.keep_services();
    when 'promote_due' then return gangq.promote_due();
    when 'end_batches' then return gangq.end_batches();
    when 'part_submitters' then return gangq.part_submitters();
    when 'raise_idle_lows' then return gangq.raise_idle_lows();
    when 'judge_progress' then return gangq.judge_progress();
    when 'lift_avoided' then return gangq.lift_avoided();
    -- No step of the tick: apply does it, in the last part of a pass.
    when 'time_out' then return gangq.time_out();
    when 'move_away' then return gangq.move_away();
    when 'trim_outbox' then return gangq.trim_outbox();
    when 'count_ended' then return gangq.count_ended();
    when 'keep_partitions' then return gangq.keep_partitions();
  end case;
exception
  when lock_not_available or deadlock_detected then
    return -1;
  when others then
    -- One broken row must neither stop the rest of the maintenance for ever nor go unseen.
    perform gangq.log_event(gangq.now(), 'tick_error', reason => sqlerrm,
      data => jsonb_build_object('step', step, 'sqlstate', sqlstate));
    raise warning 'gangq.tick: step % failed: % (%)', step, sqlerrm, sqlstate;
    return 0;
end $$;
