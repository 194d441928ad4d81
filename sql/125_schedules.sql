-- Schedules as they are stored: set_schedule, pause_schedule, resume_schedule, forget_schedule,
-- declare_schedules. 134 submits what is due.
-- Locks: rows of schedules, before all others.

-- The options of set_schedule. catch_up: which due times that were missed, while no tick ran, are
-- run when one does: skip none (one that passed less than a minute ago is not missed), last only
-- the last (the default), all each of them, the last 100 at most. skip_if_running: nothing is
-- submitted at a due time while the last job or gang of the schedule has not ended, waiting ones
-- included. due_as: a key of the payload that is given the due time, as text in UTC
-- ("2026-03-01T02:00:00+00:00").
create type gangq.schedule_options as (
  catch_up gangq.catch_up, skip_if_running boolean, due_as gangq.name
);

-- What plan_schedules is told of a schedule: cron, tz and after (due times up to there are settled)
-- as unplanned_schedules returned them; due: the due time to run next; missed: the first of those
-- before it that are passed over, if any; or problem: why none can be computed.
create type gangq.due_time as (
  name gangq.name, cron text, tz text, after timestamptz, due timestamptz, missed timestamptz,
  problem text
);

-- Internal. Whether a schedule is paused at this moment.
create function gangq.is_paused(s gangq.schedules_table, t timestamptz) returns boolean
language sql immutable
return (s).paused_at is not null and ((s).paused_until is null or (s).paused_until > t);

-- Internal. Whether other due times of a cron expression may have passed after the one stored.
create function gangq.is_stale(s gangq.schedules_table, t timestamptz) returns boolean
language sql immutable as $$
  select (greatest((s).due_at, (s).planned_at) > t - interval '60 s') is not true
$$;

-- Internal. Schedules that lack their next due time, those that could not be computed again after
-- 10 s; and those that may have missed more due times than the one that is stored.
create function gangq.unplanned(t timestamptz) returns setof gangq.schedules_table
language sql stable as $$
  select s.* from gangq.schedules_table s
  where s.due_at is null and (s.paused_at is null or s.paused_until is not null)
    and (s.planned_at > t - interval '10 s' and s.planned_at <= t) is not true
  union all
  select s.* from gangq.schedules_table s
  where s.due_at <= t - interval '60 s' and s.cron is not null and gangq.is_stale(s, t)
$$;

-- Internal. A schedule whose due times count from t on, or from the end of its pause. anew: the
-- intervals of every count from t, too; otherwise they go on from where they began.
create function gangq.reckon(s gangq.schedules_table, t timestamptz, anew boolean default false)
returns gangq.schedules_table language plpgsql immutable as $$
begin
  s.counts_from := case when anew then t else s.counts_from end;
  -- Whatever the clock has done since, what was settled stays settled.
  s.after_at := greatest(t, s.last_due, s.passed_over);
  s.planned_at := null;
  s.problem := null;
  s.due_at := null;
  if gangq.is_paused(s, t) then
    if s.paused_until is null then
      return s;
    end if;
    s.after_at := greatest(s.after_at, s.paused_until - interval '1 microsecond');
  end if;
  if s.every is not null then
    s.due_at := s.counts_from + s.every * (1 + greatest(0, floor(
      extract(epoch from s.after_at - s.counts_from) / extract(epoch from s.every))));
  end if;
  return s;
end $$;

-- Internal. Writes a schedule whose row is locked.
create function gangq.keep_schedule(s gangq.schedules_table) returns void language sql as $$
  update gangq.schedules_table x
  set (name, cron, every, tz, task, payload, work, catch_up, skip_if_running, due_as, submitter,
    login, set_at, counts_from, after_at, due_at, planned_at, problem, paused_at, paused_until,
    last_due, last_at, last_job_id, last_gang_id, passed_over, why, source, undeclared_at)
    = (select (s).*)
  where x.name = (s).name
$$;

-- Internal. Locks and returns a schedule that the caller may change. Raises GQ002, 42501, 55P03.
create function gangq.own_schedule(verb text, name text) returns gangq.schedules_table
language plpgsql as $$
declare
  s gangq.schedules_table;
begin
  select x.* into s from gangq.schedules_table x where x.name = own_schedule.name for update;
  perform gangq.refuse_unknown('schedule', own_schedule.name, array(
      select x.name::text from gangq.schedules_table x),
    'Names are in gangq.schedules.')
  where not found;
  perform gangq.check_own(verb, format('schedule %L', s.name), s.submitter, s.login,
    gangq.queue_for(s.work ->> 'queue', s.task));
  return s;
end $$;

-- Internal. Checks a schedule as far as SQL can read it; known_tz: a time zone that needs no check.
-- Raises GQ001, GQ002, GQ007. The view of time zones reads a file for each of them, which takes up
-- to 100 ms.
create function gangq.check_schedule(s gangq.schedules_table, known_tz text) returns void
language plpgsql stable as $$
begin
  perform gangq.refuse('GQ001', w.what, w.hint) from (values
    (s.name is null or s.task is null, 'a schedule has a name and a task',
      'Call gangq.set_schedule(''nightly'', ''0 3 * * *'', ''report'').'),
    (num_nonnulls(s.cron, s.every) <> 1, 'a schedule has either cron or every',
      'Pass cron => ''0 3 * * *'', or every => ''30 seconds''.'),
    (s.cron !~ '^[0-9A-Za-z*,/#-]+( [0-9A-Za-z*,/#-]+){4}$' or length(s.cron) > 200,
      format('cron expression %L', left(s.cron, 200)),
      'It has five fields: minute, hour, day of month, month, day of week. For example ''0 3 * * '
      '*'' is every day at three.'),
    (extract(epoch from s.every) not between 1 and 1e7 or extract(year from s.every) <> 0
      or extract(month from s.every) <> 0, format('every is %s', s.every),
      'It is from 1 second to 115 days, without months and years, whose length differs.'),
    (s.every is not null and s.tz is not null, 'both every and tz are given',
      'A time zone is for cron: leave it out.'),
    (s.tz not in ('UTC', known_tz) and (s.tz ~ '^(posix|right)/' or not exists (
      select from pg_catalog.pg_timezone_names z where z.name = s.tz)),
      format('time zone %L is not known to this server', left(s.tz, 100)),
      'Take a name as Europe/Oslo: select name from pg_timezone_names.'),
    (s.due_as is not null and jsonb_typeof(s.payload) <> 'object',
      'due_as is given, and the payload is no JSON object', 'It is the name of a key of it.')
  ) as w(wrong, what, hint)
  where w.wrong;
  perform gangq.check_stored('schedule', s.payload, s.work);
end $$;

-- Makes a schedule, or changes it as a whole: what is submitted (a task with a payload), and when.
-- cron: five fields, in the time zone tz [UTC]; set_schedule('nightly', '0 3 * * *', 'report', tz
-- => 'Europe/Oslo'). A time of day that the clock skips runs at the first minute after, one that
-- comes twice runs once; an hour field * goes by elapsed time. every, in place of cron: an interval
-- of 1 second or more, counted from now; it does not drift. work: what else submit is given by
-- name, or with size or roles submit_gang: {"queue": "gpu", "gpus": 1}. options: catch_up,
-- skip_if_running, due_as; see \dT+ gangq.schedule_options. Each due time is submitted once, with
-- the rights of who stored the schedule last; a refusal is shown in gangq.schedules, and the next
-- due time is tried again. The next due time of cron is computed by any worker or by gangq tick;
-- ticks from SQL alone submit what is computed. Due times that have passed are never run anew.
-- Returns made, changed or same. Raises GQ001, GQ002 (no such queue), GQ007, 42501 (another login
-- stored it), 55P03.
create function gangq.set_schedule(
  name text, cron text default null, task text default null, payload jsonb default '{}',
  tz text default null, every interval default null, work jsonb default '{}',
  options jsonb default '{}'
) returns text language plpgsql as $$
declare
  t timestamptz := gangq.now();
  o gangq.schedule_options;
  s gangq.schedules_table;
  old gangq.schedules_table;  -- null: there is none
  given jsonb;
  same boolean;
begin
  o := gangq.read_options('set_schedule', coalesce(options, '{}'), o);
  perform gangq.read_options('set_schedule',
    jsonb_strip_nulls(jsonb_build_object('name', name, 'task', task)),
    null::gangq.other_arguments);
  perform gangq.read_work(coalesce(work, '{}'));
  given := jsonb_build_object('name', name, 'task', task, 'every', every, 'cron',
    array_to_string(regexp_split_to_array(btrim(left(cron, 1000), E' \t\n'), '\s+'), ' '),
    'tz', coalesce(tz, case when cron is not null then 'UTC' end), 'work', coalesce(work, '{}'),
    'catch_up', coalesce(o.catch_up, 'last'), 'due_as', o.due_as,
    'skip_if_running', coalesce(o.skip_if_running, false));
  loop
    select x.* into old from gangq.schedules_table x where x.name = set_schedule.name for update;
    s := jsonb_populate_record(old, given);
    s.payload := coalesce(payload, '{}');
    perform gangq.check_schedule(s, coalesce(old.tz, 'UTC'));
    -- Added to a moment, a day has as many hours as it has in the time zone of the session.
    s.every := make_interval(secs => extract(epoch from s.every));
    same := s is not distinct from old;
    s.submitter := gangq.caller();
    s.login := session_user;
    s.set_at := t;
    exit when old.name is not null;
    perform gangq.check_new('schedule');
    -- Another session may make it at this moment: then it is changed here.
    s := gangq.reckon(s, t, anew => true);
    insert into gangq.schedules_table values (s.*) on conflict do nothing;
    exit when found;
  end loop;
  -- Workers of several logins may declare one schedule. Others must not learn by trying what its
  -- payload is: a worker may claim its jobs anyway.
  if same and (old.login = session_user or gangq.may_act_as('gangq_worker'))
    and gangq.may_submit(old.submitter, old.login)
  then
    return 'same';
  elsif old.name is not null then
    perform gangq.check_own('change', format('schedule %L', old.name), old.submitter, old.login,
      gangq.queue_for(old.work ->> 'queue', old.task));
    if (s.cron, s.every, s.tz) is distinct from (old.cron, old.every, old.tz) then
      s := gangq.reckon(s, t, anew => true);
    end if;
    perform gangq.keep_schedule(s);
  end if;
  perform gangq.log_event(t, 'set_schedule', data => jsonb_build_object('schedule', s.name));
  perform gangq.wake_tick(true);
  return case when old.name is null then 'made' else 'changed' end;
end $$;

-- From now on nothing of a schedule is submitted, until then (null: until resume_schedule). Due
-- times in a pause are not caught up. What was submitted goes on. Raises GQ001, GQ002, 42501.
create function gangq.pause_schedule(name text, until timestamptz default null) returns void
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  s gangq.schedules_table := gangq.own_schedule('pause', name);
begin
  perform gangq.check_moment('until', until);
  perform gangq.refuse('GQ001', format('until is %s, which has passed', until),
    'Leave it out to pause without an end; gangq.resume_schedule ends a pause now.')
  where until <= t;
  s.paused_at := t;
  s.paused_until := until;
  perform gangq.keep_schedule(gangq.reckon(s, t));
  perform gangq.log_event(t, 'pause_schedule',
    data => jsonb_build_object('schedule', s.name, 'until', until));
end $$;

-- Ends the pause of a schedule; its due times count from now on. Can be repeated. Raises GQ002,
-- 42501.
create function gangq.resume_schedule(name text) returns void language plpgsql as $$
declare
  t timestamptz := gangq.now();
  s gangq.schedules_table := gangq.own_schedule('resume', name);
begin
  if gangq.is_paused(s, t) then
    s.paused_at := null;
    s.paused_until := null;
    perform gangq.keep_schedule(gangq.reckon(s, t));
    perform gangq.log_event(t, 'resume_schedule', data => jsonb_build_object('schedule', s.name));
    perform gangq.wake_tick(true);
  end if;
end $$;

-- Forgets a schedule. What it has submitted goes on. Raises GQ002, 42501.
create function gangq.forget_schedule(name text) returns void language plpgsql as $$
declare
  s gangq.schedules_table := gangq.own_schedule('forget', name);
begin
  delete from gangq.schedules_table x where x.name = s.name;
  perform gangq.log_event(gangq.now(), 'forget_schedule',
    data => jsonb_build_object('schedule', s.name));
end $$;

-- Says that the program source declares the schedules of these names and no others. Those that it
-- declared before are marked and returned, and go on: forget_schedule ends them. For schedules that
-- the caller may change. Raises GQ001, GQ007, 55P03.
create function gangq.declare_schedules(source text, names text[]) returns setof text
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  s gangq.schedules_table;
begin
  perform gangq.check_declared('schedule', source, names);
  for s in
    select x.* from gangq.schedules_table x
    where (x.name = any (names) or x.source = declare_schedules.source)
      and (select gangq.owned(x.submitter, x.login,
        gangq.queue_for(x.work ->> 'queue', x.task)))
    order by x.name for update
  loop
    if s.name = any (names) then
      update gangq.schedules_table x set source = declare_schedules.source, undeclared_at = null
      where x.name = s.name
        and (x.source, x.undeclared_at) is distinct from (declare_schedules.source, null);
      continue;
    elsif s.undeclared_at is null then
      update gangq.schedules_table x set undeclared_at = t where x.name = s.name;
      perform gangq.log_event(t, 'undeclared',
        data => jsonb_build_object('schedule', s.name, 'source', source));
    end if;
    return next s.name;
  end loop;
end $$;
