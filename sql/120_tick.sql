-- All maintenance in the right order, run by the session that gets the tick's lock; and the
-- partitions by day.
-- Locks: the row 'tick' of lock_rows, with skip locked; then each step's own, always with skip
-- locked; tick_state; at the end, once an hour, requests and requests_before as a whole. A tick is
-- one autocommit call.
--
-- No wake-up is lost, and no call waits in the database:
-- 1. A call that finds the row locked reads runs = n first. What runs is run n + 1, or a later one.
-- 2. Run n + 1 may have passed the step that the caller needs. Run n + 2 begins after run n + 1 has
--    committed, so it sees everything that the caller had committed.
-- 3. The call returns turn = n + 2, and the caller comes again with it until it has run itself or
--    runs >= turn.
-- A run that is rolled back is not counted: then the caller runs, or waits for one more.

create function gangq.tick(
  force boolean default false, turn bigint default null, decides boolean default false
) returns table (
  ran boolean, again boolean, next_in_s real, detail jsonb, next_turn bigint, decide boolean,
  unplanned integer
) language plpgsql as $$
#variable_conflict use_column
declare
  every real := (select s.tick_s from gangq.settings s);
  last_at timestamptz := (select x.last_at from gangq.tick_state x);
  runs bigint := (select l.runs from gangq.lock_rows l where l.name = 'tick');
  t timestamptz := gangq.now();
  steps text[] := array['rollback_stale', 'reap_expired', 'close_overdue', 'flag_dead_workers',
    'settle_dependents', 'submit_schedules', 'promote_due', 'judge_progress', 'lift_avoided',
    'move_away', 'part_submitters', 'raise_idle_lows', 'trim_outbox', 'keep_partitions'];
  step text;
  done integer;
  busy boolean := false;
  turn_in_s real;
begin
  perform gangq.require_read_committed('tick');
  ran := false;
  again := false;
  decide := false;
  unplanned := 0;
  if (not force or runs >= tick.turn) and last_at <= t
    and last_at > t - make_interval(secs => every * 0.8) then
    every := every - extract(epoch from t - last_at);
    next_in_s := every;
    -- Jobs and schedules that are due do not wait for the next safety tick; nor do they make all of
    -- it run for each of them.
    steps := array(
      select 'submit_schedules' where exists (
        select from gangq.schedules_table x where x.due_at <= t)
      union all
      select 'promote_due' where exists (
        select from gangq.live_jobs j where j.state = 'scheduled' and j.due_at <= t));
    if steps = '{}' then
      return next;
      return;
    end if;
  end if;
  perform from gangq.lock_rows l where l.name = 'tick' for update skip locked;
  if not found then
    next_in_s := 0.02;
    next_turn := case when tick.turn > runs then tick.turn else runs + 2 end;
    return next;
    return;
  end if;
  update gangq.lock_rows l set runs = l.runs + 1 where l.name = 'tick';
  perform gangq.hang_up_soon();
  foreach step in array steps loop
    done := gangq.tick_step(step, coalesce(tick.decides, false));
    detail := coalesce(detail, '{}') || jsonb_build_object(step, done);
    busy := busy or done = -1;
    again := again or done < 0 or done >= 200;
  end loop;
  ran := true;
  -- What is due before the next safety tick is served on time. What was due by now and is left is
  -- more than one step takes (again), or another transaction holds it.
  next_in_s := greatest(0.01, least(every, extract(epoch from gangq.next_due(t) - gangq.now())));
  if again then
    -- What another transaction holds may stay locked: asking at once would be asking all the time.
    next_in_s := least(next_in_s, case when busy then 0.05 else 0 end);
  end if;
  unplanned := (select count(*) from gangq.unplanned(gangq.now()));
  -- Last, because the decider waits for this row at the end of its pass.
  if tick.decides and cardinality(steps) > 2 then
    turn_in_s := gangq.take_turn(t);
    decide := coalesce(turn_in_s = 0, false);
    next_in_s := least(next_in_s, nullif(turn_in_s, 0));
  end if;
  return next;
end $$;
comment on function gangq.tick is
  'All maintenance: stale reservations, expired leases, flags, schedules and jobs that are due, '
  'gangs that stand still, avoided devices that are the last ones left, hosts to be left by now, '
  'partitions. Safe to call from anywhere at any rate: one runs at a time. force: even if one has '
  'just run; without it a call soon after another does only what is due. next_in_s: when to call '
  'again; below settings.tick_s it is the moment when something is due. again: there was more to '
  'do, or something was busy. If another one runs, ran is false and next_turn names the first run '
  'that has not begun: call again after next_in_s with turn => next_turn, until ran is true or '
  'next_turn is null. decides: the caller can decide and compute. decide: something waits to be '
  'placed, and this caller has the turn: it decides on gangq.board() and calls gangq.apply within '
  'a second. unplanned: how many schedules lack their next due time: a caller that can compute '
  'calls gangq.unplanned_schedules and gangq.plan_schedules. Call it in autocommit: the server '
  'hangs up on a transaction that ticked and then idles for more than 5 s. Raises GQ008.';

create function gangq.next_due(t timestamptz) returns timestamptz language sql stable as $$
  select least(
    (select min(j.due_at) from gangq.live_jobs j where j.state = 'scheduled' and j.due_at > t),
    (select min(g.not_before) from gangq.live_gangs g
      where g.state = 'blocked' and g.not_before > t),
    (select min(g.not_before) from gangq.live_gangs g
      where g.missing_since is not null and g.not_before > t),
    (select min(x.due_at) from gangq.schedules_table x where x.due_at > t))
$$;
comment on function gangq.next_due is
  'Internal. The first moment after t at which a job or a schedule is due, or a gang has backed '
  'off; null: none.';

create function gangq.tick_step(step text, decides boolean) returns integer language plpgsql as $$
begin
  case step
    when 'rollback_stale' then return gangq.rollback_stale();
    when 'reap_expired' then return gangq.reap_expired();
    when 'close_overdue' then return gangq.close_overdue();
    when 'flag_dead_workers' then return gangq.flag_dead_workers();
    when 'settle_dependents' then return gangq.settle_dependents();
    when 'submit_schedules' then return gangq.submit_schedules(can_plan => decides);
    when 'promote_due' then return gangq.promote_due();
    when 'part_submitters' then return gangq.part_submitters();
    when 'raise_idle_lows' then return gangq.raise_idle_lows();
    when 'judge_progress' then return gangq.judge_progress();
    when 'lift_avoided' then return gangq.lift_avoided();
    when 'time_out' then return gangq.time_out();
    when 'move_away' then return gangq.move_away();
    when 'trim_outbox' then return gangq.trim_outbox();
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
comment on function gangq.tick_step is
  'Internal. One step, in a subtransaction of its own: how much it did, -1 for busy. A failure is '
  'an event (tick_error) and a warning, and the other steps go on.';

create function gangq.kept_by_day() returns table (name text, key text, class text, keep interval)
language sql stable as $$
  select p.name, p.key, p.class,
    case p.class when 'short' then s.retention_short else s.retention_long end
  from gangq.settings s cross join (values
    ('history_short', 'finished_at', 'short'), ('history_long', 'finished_at', 'long'),
    ('gang_history_short', 'finished_at', 'short'), ('gang_history_long', 'finished_at', 'long'),
    ('attempt_history', 'ended_at', 'long'), ('events', 'at', 'long'), ('passes', 'at', 'short'),
    ('evidence', 'at', 'long'), ('logs', 'at', 'short')) as p(name, key, class)
$$;
comment on function gangq.kept_by_day is
  'Internal. What has a partition a day (UTC): key column, retention class, how long it is kept.';

-- The only dynamic SQL: names of partitions cannot be parameters. Each statement waits at most
-- 100 ms for its lock and is tried again by a later tick. Bounds are written and read in UTC,
-- whatever the time zone of the session is.
create function gangq.keep_partitions(at_once boolean default false) returns integer
language plpgsql
set datestyle = 'ISO' set timezone = 'UTC' as $$
declare
  t timestamptz := gangq.now();
  parent record;
  day date;
  part text;
  old record;
  made integer := 0;
begin
  if not at_once and exists (
    select 1 from gangq.tick_state x where x.partitions_checked_at > t - interval '10 minutes') then
    return 0;
  end if;
  update gangq.tick_state x set partitions_checked_at = t;
  for parent in
    select p.name, p.key, (t - p.keep) as until from gangq.kept_by_day() p
  loop
    for day in select t::date + n from generate_series(0, 2) n loop
      part := parent.name || '_' || to_char(day, 'YYYYMMDD');
      continue when to_regclass('gangq.' || part) is not null;
      -- One day at a time: rows that the default partition has caught on one day must not cost the
      -- others theirs.
      begin
        execute format(
          'create table gangq.%I (like gangq.%I including defaults including constraints)', part,
          parent.name);
        execute format(
          'alter table gangq.%I attach partition gangq.%I for values from (%L) to (%L)',
          parent.name, part, day::timestamptz, (day + 1)::timestamptz);
        execute format('comment on table gangq.%I is %L', part,
          parent.name || ' of ' || day || ' (UTC)');
        made := made + 1;
      exception
        -- The lock is not to be had now, or rows of that day are in the default partition: they
        -- stay there.
        when lock_not_available or check_violation then null;
      end;
    end loop;
    begin
      for old in
        select c.relname
        from pg_catalog.pg_inherits i
        join pg_catalog.pg_class c on c.oid = i.inhrelid
        where i.inhparent = ('gangq.' || parent.name)::regclass and c.relname ~ '_[0-9]{8}$'
          and to_date(right(c.relname, 8), 'YYYYMMDD') < parent.until::date
      loop
        execute format('drop table gangq.%I', old.relname);
      end loop;
      perform gangq.keep_rest(parent.name, parent.key, parent.until);
    exception
      when lock_not_available then null;
    end;
  end loop;
  perform gangq.forget(t);
  perform gangq.turn_requests(t);
  return made;
end $$;
comment on function gangq.keep_partitions is
  'Makes the partitions of today and the next two days and drops those past their retention, '
  'whole, every ten minutes or at once; also forgets what nothing refers to any more, and answers '
  'of submissions. Returns how many partitions were made.';

create function gangq.keep_rest(parent text, key text, until timestamptz) returns void
language plpgsql as $$
declare
  rest text := parent || '_rest';
  newest timestamptz;
begin
  if to_regclass('gangq.' || rest) is null then
    execute format('create table gangq.%I partition of gangq.%I default', rest, parent);
    execute format('comment on table gangq.%I is %L', rest,
      'Catches rows of days without a partition.');
  end if;
  execute format('select max(%I) from gangq.%I', key, rest) into newest;
  if newest < until then
    -- Asked again under the lock: a job may just have ended there.
    execute format('lock table gangq.%I in access exclusive mode', rest);
    execute format('select max(%I) from gangq.%I', key, rest) into newest;
    if newest < until then
      execute format('truncate gangq.%I', rest);
    end if;
  end if;
end $$;
comment on function gangq.keep_rest is
  'Internal, for keep_partitions. Makes a default partition, and empties it once its last row is '
  'past its time.';

-- offset 0: each is looked up by itself, so that no join reads all jobs.
create function gangq.forget(t timestamptz) returns void language plpgsql as $$
declare
  cfg gangq.settings;
begin
  select x.* into cfg from gangq.settings x;
  delete from gangq.incarnations i
  where i.ended_at < t - cfg.incarnation_retention
    and not exists (select 1 from gangq.live_jobs j where j.incarnation = i.id)
    and (i.quarantined is null and i.operator_taints = '{}' or exists (
      select 1 from gangq.incarnations n where n.name = i.name and n.id > i.id));
  delete from gangq.worker_names n where n.name = any (array(
    select z.name from gangq.worker_names z
    where not exists (select 1 from gangq.incarnations i where i.name = z.name)
    for update skip locked));
  -- An incarnation that ended by a trip keeps its lease as long as its jobs, and until it is over:
  -- so long its devices are withheld.
  delete from gangq.leases l using gangq.incarnations i
  where i.id = l.incarnation and i.ended_at is not null and l.expires_at <= t
    and not exists (select 1 from gangq.live_jobs j where j.incarnation = i.id offset 0);
  -- What a last heartbeat brought of a job that had just ended.
  delete from gangq.progress p
  where p.beat_at < t - interval '10 minutes'
    and not exists (select 1 from gangq.live_jobs j where j.id = p.job_id offset 0);
  delete from gangq.retried r
  where not exists (
    select 1 from gangq.history h where h.job_id = r.job_id and h.finished_at = r.finished_at)
    and not exists (
      select 1 from gangq.gang_history h
      where h.gang_id = r.gang_id and h.finished_at = r.finished_at);
  delete from gangq.unique_keys k
  where (k.key, k.task, k.queue, k.login) in (
    select u.key, u.task, u.queue, u.login
    from gangq.unique_keys u
    where (u.kept_until <= t) is not false and not gangq.is_live(u)
    for update skip locked);
  -- What a transaction wrote while its target was being removed.
  delete from gangq.outbox o
  where o.target_id <> all (array(select x.id from gangq.notification_targets x));
  delete from gangq.checkpoints c
  where c.saved_at < t - cfg.retention_long
    and not exists (select 1 from gangq.live_jobs j where j.id = c.job_id offset 0);
end $$;
comment on function gangq.forget is
  'Internal, for keep_partitions. Deletes rows about work and workers long over.';

-- Deleting the answers one by one would cost a submission as much again, and vacuum after it. The
-- lock waits for all submissions under way, and is held until the tick commits: see
-- gangq.answer_of. So this is the last that a tick does.
create function gangq.turn_requests(t timestamptz) returns void language plpgsql
set lock_timeout = '100ms' as $$
begin
  if exists (select 1 from gangq.tick_state x where x.requests_turned_at > t - interval '1 hour')
    then
    return;
  end if;
  lock table gangq.requests, gangq.requests_before in access exclusive mode;
  truncate gangq.requests_before;
  alter table gangq.requests_before rename to requests_emptied;
  alter table gangq.requests rename to requests_before;
  alter table gangq.requests_emptied rename to requests;
  update gangq.tick_state x set requests_turned_at = t;
exception
  when lock_not_available
    then null;  -- A transaction that has submitted is still open: a later tick does it.
end $$;
comment on function gangq.turn_requests is
  'Internal. Once an hour exchanges requests and requests_before, emptied: an answer is kept for '
  'one hour at least.';

