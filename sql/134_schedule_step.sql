-- Schedules as they run: the step of the tick that submits what is due, run_schedule_now, and the
-- computing of the next due time.
--
-- The row of a schedule holds its next due time, and one transaction submits and moves it on. So a
-- due time is submitted once, whoever ticks. A failover that loses the submission has lost that
-- move, too: the due time is there again.
--
-- 1. A tick that finds due_at passed locks the row, submits, and sets after_at to that due time.
-- 2. The next due time is the first after after_at. SQL computes it for an interval. A cron
--    expression needs the calendar of a time zone: due_at becomes null, the tick returns how many
--    schedules are unplanned, and a caller written in Python computes it (plan_schedules).
-- 3. What was computed is stored only while cron, tz and after_at are what it was computed from.
--
-- A due time of a cron expression that passed a minute ago may have been followed by others, which
-- only the calendar tells. A tick whose caller can compute leaves it unplanned, and the caller says
-- which of the missed due times is run. A tick whose caller cannot compute submits what is stored.
--
-- Locks: rows of schedules, before all others. The tick and plan_schedules take them with skip
-- locked; the tick then waits 100 ms at most for a transaction that takes topology levels away.

-- Internal. Submits the work of a schedule as who stored it would. Raises what submit and
-- submit_gang raise, and 42501 where that login may not submit any more.
create function gangq.submit_scheduled(
  s gangq.schedules_table, due timestamptz, t timestamptz, wake text,
  out job_id bigint, out gang_id bigint
) language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  w record := gangq.read_work(s.work);
  a gangq.arguments := w.a;
  o gangq.job_options;
  g gangq.live_gangs;
  x gangq.submission;
  payload jsonb := case when s.due_as is null then s.payload
    else s.payload || jsonb_build_object(s.due_as,
      to_char(due at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')) end;
begin
  perform gangq.check_may_submit('schedule', s.submitter, s.login);
  if w.of_gang then
    a.task := s.task;
    a.payload := payload;
    g.submitted_at := t;
    g.submitter := s.submitter;
    g.login := s.login;
    select n.gang_id, n.job_ids[1] into gang_id, job_id
    from gangq.add_gang(a, gangq.read_options('submit_gang', w.options, null::gangq.gang_options),
      g, '{}') n;
    return;
  end if;
  o := gangq.read_options('submit', w.options, o);
  select r.* into x
  from gangq.read_submission(s.task, a.queue, array[payload], a.priority, a.gpus, o) r;
  x.submitter := s.submitter;
  x.login := s.login;
  x := gangq.check_special(x, array[payload], o);
  -- Places are drawn by transactions that have their number already: see gangq.lows.
  perform pg_current_xact_id();
  if x.batch_id is not null then
    perform gangq.add_batch(x, o, 1, t);
  end if;
  insert into gangq.live_jobs as j (id, order_key, submitted_at, due_at, shape_id, budget_s,
    priority, max_attempts, max_crashes, max_trips, max_snoozes, state, submitter, login, batch_id,
    array_index, payload)
  values (coalesce(x.ids[1], x.base + nextval('gangq.job_ids'::regclass)),
    gangq.order_key(x.priority, gangq.next_pos(x.base)), t, due, x.shape, x.budget_s, x.priority,
    x.max_attempts, x.max_crashes, x.max_trips, x.max_snoozes, 'pending', s.submitter, s.login,
    x.batch_id, case when x.batch_id is not null then 0 end, payload)
  returning j.id into job_id;
  perform gangq.wake_lane(x.shape, 1, wake);
end $$;

-- Internal. What a schedule submitted last, if that has not ended; null: it has.
create function gangq.still_runs(s gangq.schedules_table) returns text
language sql stable as $$
  select case
    when (s).last_gang_id is not null and exists (
      select from gangq.live_gangs g where g.id = (s).last_gang_id)
      then format('gang g%s of it has not ended', (s).last_gang_id)
    when (s).last_gang_id is null and exists (
      select from gangq.live_jobs j where j.id = (s).last_job_id)
      then format('job %s of it has not ended', (s).last_job_id) end
$$;

-- Submits the work of a schedule now, as who stored it, paused or not; its due times stay as they
-- are. Returns the job, or a gang and its rank 0. Raises GQ002, GQ004 (with skip_if_running: the
-- last one has not ended), 42501, and what submit raises.
create function gangq.run_schedule_now(name text)
returns table (job_id bigint, gang_id bigint) language plpgsql as $$
declare
  t timestamptz := gangq.now();
  s gangq.schedules_table := gangq.own_schedule('run', name);
  running text := case when s.skip_if_running then gangq.still_runs(s) end;
begin
  perform gangq.refuse('GQ004', format('schedule %L does not run twice at once: %s', name,
      running), 'Wait for its end, or cancel it.')
  where running is not null;
  select n.job_id, n.gang_id into job_id, gang_id
  from gangq.submit_scheduled(s, t, t, 'commit') n;
  s.last_at := t;
  s.last_job_id := job_id;
  s.last_gang_id := gang_id;
  perform gangq.keep_schedule(s);
  perform gangq.log_event(t, 'scheduled', gang_id, job_id => job_id,
    data => jsonb_build_object('schedule', s.name, 'by_hand', true));
  return next;
end $$;

-- Internal. A moment in a text that is kept.
create function gangq.utc_text(t timestamptz) returns text language sql stable as $$
  select to_char(t at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
$$;

-- Internal. The text that says which due times were missed.
create function gangq.missed(since timestamptz, until timestamptz) returns text
language sql stable as $$
  select case when since = until then format('%s was missed', gangq.utc_text(since))
    else format('%s to %s were missed', gangq.utc_text(since), gangq.utc_text(until)) end
$$;

-- Internal. Settles the due time of a schedule whose row is locked: submits, or notes why not.
-- Returns false, and leaves it as it is, where another transaction holds a lock.
create function gangq.submit_due(s gangq.schedules_table, t timestamptz) returns boolean
language plpgsql as $$
declare
  due timestamptz := s.due_at;
  said text := s.why;
  said_of timestamptz := s.passed_over;
  running text;
  made record;
begin
  if s.every is not null then
    -- The last due time that has passed; of all, the first that is not too long ago.
    due := due + s.every * floor(extract(epoch from t - due) / extract(epoch from s.every));
    if s.catch_up = 'all' then
      due := greatest(s.due_at, due - s.every * 99);
    end if;
    if due > s.due_at then
      s.passed_over := due - s.every;
      s.why := gangq.missed(s.due_at, s.passed_over);
    end if;
  end if;
  running := case when s.skip_if_running then gangq.still_runs(s) end;
  if s.catch_up = 'skip' and (greatest(due, s.planned_at) > t - interval '60 s') is not true then
    s.passed_over := due;
    s.why := gangq.missed(s.due_at, due);
  elsif running is not null then
    s.passed_over := due;
    s.why := running;
  else
    begin
      select n.job_id, n.gang_id into made from gangq.submit_scheduled(s, due, t, 'sleepers') n;
      perform gangq.log_event(t, 'scheduled', made.gang_id, job_id => made.job_id,
        data => jsonb_build_object('schedule', s.name, 'due_at', due));
      s.last_job_id := made.job_id;
      s.last_gang_id := made.gang_id;
      s.last_due := due;
      s.last_at := t;
    exception
      when lock_not_available or deadlock_detected then
        return false;
      when others then
        s.passed_over := due;
        s.why := gangq.shortened(format('%s (%s)', sqlerrm, sqlstate), 2000);
    end;
  end if;
  s.after_at := due;
  s.due_at := due + s.every;
  s.planned_at := null;
  perform gangq.keep_schedule(s);
  -- One event where due times are passed over one after the other for the same reason.
  if s.passed_over is distinct from said_of
    and (s.why is distinct from said or s.last_due > said_of)
  then
    perform gangq.log_event(t, 'missed', reason => s.why,
      data => jsonb_build_object('schedule', s.name, 'due_at', s.passed_over));
  end if;
  return true;
end $$;

-- Internal. The step of the tick that submits what is due. can_plan: what may have missed several
-- due times is left to the caller, who computes which of them counts. Returns how many due times it
-- settled, where a hundred members of a gang count as one more: a tick holds up the next one. -1:
-- some are held up by a lock.
create function gangq.submit_schedules(can_plan boolean, most integer default 200) returns integer
language plpgsql set client_min_messages = 'warning' as $$
declare
  t timestamptz := gangq.now();
  s gangq.schedules_table;
  left_out text[] := '{}';
  busy boolean := false;
  done integer := 0;
begin
  while done < most loop
    select x.* into s from gangq.schedules_table x
    where x.due_at <= t and x.name <> all (left_out)
    order by x.due_at limit 1 for update skip locked;
    exit when not found;
    if can_plan and s.cron is not null and gangq.is_stale(s, t)
      or busy and s.work ?| '{size,roles}'
    then
      left_out := left_out || s.name::text;
    elsif gangq.submit_due(s, t) then
      done := done + 1 + coalesce((
        select g.size
        from gangq.schedules_table x join gangq.live_gangs g on g.id = x.last_gang_id
        where x.name = s.name), 0) / 100;
    else
      -- Its due time stays. Other gangs would wait for the same row.
      busy := true;
      left_out := left_out || s.name::text;
    end if;
  end loop;
  return case when busy then -1 else done end;
end $$;

-- Computed ----------------------------------------------------------------------------------------

-- Schedules whose next due time is to be computed, for plan_schedules: by the cron expression, in
-- its time zone, the first after `after`. If that is not later than now, catch_up says which is run
-- next: skip: the last that has passed if that is less than 60 s ago, else the first after now;
-- last: the last that has passed; all: the first, but not one before the last 100 that have passed.
create function gangq.unplanned_schedules()
returns table (
  name text, cron text, tz text, catch_up text, after timestamptz, now timestamptz
) language sql stable as $$
  select u.name, u.cron, u.tz, u.catch_up, u.after_at, c.t
  from (select gangq.now() as t offset 0) c cross join lateral gangq.unplanned(c.t) u
  order by u.after_at limit 100
$$;

-- Stores due times that the caller has computed for schedules of unplanned_schedules, as objects
-- {"name", "cron", "tz", "after", "due", "missed"} or with "problem" in place of due. What another
-- caller has computed, and what has been changed since, is left as it is. Returns whether one of
-- them is due by now: then tick again. Raises GQ001.
create function gangq.plan_schedules(plans jsonb) returns boolean language plpgsql as $$
declare
  t timestamptz := gangq.now();
  one jsonb;
  p gangq.due_time;
  s gangq.schedules_table;
  now_due boolean := false;
begin
  perform gangq.refuse('GQ001', 'plans is no JSON array of 1000 elements at most',
    'For example [{"name": "nightly", "cron": "0 3 * * *", "tz": "UTC", "after": ..., "due": '
    '...}]; see \dT+ gangq.due_time.')
  where jsonb_typeof(plans) is distinct from 'array' or jsonb_array_length(plans) > 1000;
  for one in select e.value from jsonb_array_elements(plans) e loop
    p := gangq.read_options('plan_schedules', one, null::gangq.due_time);
    perform gangq.check_moment('due', p.due);
    perform gangq.check_moment('missed', p.missed);
    if (p.due is null) = (p.problem is null) or p.due <= p.after
      or p.due <> date_trunc('minute', p.due)
      or p.missed is not null and (p.missed > p.after and p.missed < p.due) is not true
    then
      perform gangq.refuse('GQ001', format('schedule %L cannot be due at %s', p.name, p.due),
        'It is a whole minute, later than after; missed lies between the two. Or pass problem.');
    end if;
    select u.* into s from gangq.schedules_table u
    where u.name = p.name and u.cron is not null for update skip locked;
    continue when not found or (s.cron, s.tz, s.after_at) is distinct from (p.cron, p.tz, p.after)
      or not exists (select from gangq.unplanned(t) u where u.name = s.name);
    s.planned_at := t;
    s.problem := gangq.shortened(p.problem, 1000);
    if p.problem is null then
      s.due_at := p.due;
      now_due := now_due or p.due <= t;
    end if;
    if p.missed is not null then
      s.passed_over := p.missed;
      s.why := format('due times from %s on, before %s, were missed', gangq.utc_text(p.missed),
        gangq.utc_text(p.due));
      perform gangq.log_event(t, 'missed', reason => s.why,
        data => jsonb_build_object('schedule', s.name, 'due_at', p.missed));
    end if;
    perform gangq.keep_schedule(s);
  end loop;
  return now_due;
end $$;

-- Every schedule. next_due: the next due time; problem: why there is none. last_due: the last due
-- time for which something was submitted; last_at, last_job, last_gang: what was submitted last, by
-- hand or when due. passed_over, why: a due time for which nothing was submitted, the last such one
-- known, and why not. paused_until null: until resume_schedule. source: the program that declares
-- it; undeclared_at: since when it does not any more, though the schedule goes on. readable:
-- whether payload and work are shown to this session.
create view gangq.schedules as
select s.name, s.task, q.name as queue, s.cron, s.every, s.tz, s.due_at as next_due, s.last_due,
  s.last_at, s.last_job_id as last_job, s.last_gang_id as last_gang, p.paused,
  case when p.paused then s.paused_until end as paused_until, s.passed_over, s.why,
  case when s.due_at is null and (s.paused_at is null or s.paused_until is not null)
    then coalesce(s.problem, 'not computed yet: a worker or gangq tick does that') end as problem,
  s.catch_up, s.skip_if_running, s.due_as, case when r.readable then s.payload end as payload,
  case when r.readable then s.work end as work, s.submitter, s.login, s.set_at, s.source,
  s.undeclared_at, r.readable
from gangq.schedules_table s
left join gangq.task_options o on o.task = s.task
cross join (select gangq.now() as t offset 0) c
cross join lateral (select coalesce(s.work ->> 'queue', o.queue, 'default') as name) q
cross join lateral (select gangq.is_paused(s, c.t) as paused) p
cross join lateral gangq.owned(s.submitter, s.login, q.name) as r(readable)
order by s.name;
