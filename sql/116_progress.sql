-- Progress that can be compared: what the watchdogs allow each task, what has been learned of its
-- beats, and gangs that make no steps any more.
-- Locks: learn_gap its own row; judge_progress gangs and members as every step of the tick does,
-- with skip locked.

create function gangq.watch_terms(task text, device_class text default '', queue text default null)
returns table (
  budget_s real, budget_gpu_s real, stall_timeout_s real, load_grace_s real, health_window_s real,
    long_phase_s real,
  notify_only text[], learned boolean
) language sql stable as $$
  select coalesce(ts.budget_s, q.budget_s, s.budget_s),
    coalesce(ts.budget_s, q.budget_s, s.budget_gpu_s),
    -- Five times the longest honest gap, never under the installation's number: a floor that no
    -- lucky run lowers.
    coalesce(ts.stall_timeout_s, greatest(s.stall_timeout_s, 5 * b.longest_s)),
    coalesce(ts.load_grace_s, s.load_grace_s), coalesce(ts.health_window_s, s.health_window_s),
    coalesce(ts.long_phase_s, s.long_phase_s), coalesce(ts.notify_only, s.notify_only),
    ts.stall_timeout_s is null
  from gangq.settings s
  left join gangq.task_settings ts on ts.task = watch_terms.task
  left join gangq.beat_gaps b on b.task = watch_terms.task
    and b.device_class = coalesce(watch_terms.device_class, '')
  left join gangq.queues_table q on q.name = watch_terms.queue
$$;
comment on function gangq.watch_terms is
  'What the watchdogs allow jobs of this task: the task''s own settings, else the queue''s '
  '(budget), else the installation''s. device_class: model of the devices, empty without; learned '
  'gaps are kept for each. budget_gpu_s is for jobs that hold devices. learned: nobody has set the '
  'stall timeout, so it comes from the gaps seen between beats and grows with them.';

create function gangq.learn_gap(task text, device_class text, longest_s real, beats bigint)
returns void
language plpgsql as $$
#variable_conflict use_column
begin
  if coalesce(learn_gap.task, '') = '' or length(learn_gap.task) > 200
    or length(learn_gap.device_class) > 200 then
    perform gangq.refuse('GQ001', 'a gap is learned for a task with a name of 1 to 200 characters',
      'Pass task => ''train'', device_class => ''H200'' (empty without devices).');
  end if;
  if learn_gap.longest_s is null or not (learn_gap.longest_s >= 0 and learn_gap.longest_s <= 1e7)
    or learn_gap.beats is null or learn_gap.beats not between 0 and 1e15 then
    perform gangq.refuse('GQ001',
      format('longest_s is %s and beats is %s', coalesce(learn_gap.longest_s::text, 'null'),
        coalesce(learn_gap.beats::text, 'null')),
      'longest_s is the longest gap between two beats of a job that then went on, seconds; beats is how many were seen.');
  end if;
  insert into gangq.beat_gaps as b (task, device_class, longest_s, beats, updated_at)
  values (learn_gap.task, coalesce(learn_gap.device_class, ''), learn_gap.longest_s,
    learn_gap.beats, gangq.now())
  on conflict (task, device_class) do update set
    longest_s = greatest(b.longest_s, excluded.longest_s),
      beats = least(b.beats + excluded.beats, 1e18::bigint), updated_at = excluded.updated_at;
end $$;
comment on function gangq.learn_gap is
  'A worker has seen the beats of a task stay away this long and come back. The longest gap is '
  'kept; beats add up. gangq.set_task(..., forget => true) starts over. Raises GQ001.';

-- Every beat of every member in one place, which no worker has: the gang's watchdog. Which member
-- stopped first is said by gangq.who_stopped, where the data carry it. A gang is judged about once
-- a heartbeat: nothing new is known in between. One call looks at a hundred gangs at most and goes
-- on from there at the next.
create function gangq.judge_progress(most integer default 100) returns integer
language plpgsql set lock_timeout = '100ms'
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  cfg gangq.settings;
  mark gangq.tick_state;
  ids bigint[];
  w record;
  done integer := 0;
begin
  select x.* into cfg from gangq.settings x;
  select x.* into mark from gangq.tick_state x for update skip locked;
  if not found or mark.judged_gang = 0 and mark.judged_at <= t
    and mark.judged_at > t - make_interval(secs => cfg.heartbeat_s) then
    return 0;
  end if;
  ids := array(
    select g.id
    from gangq.live_gangs g
    where g.state = 'running' and g.id > mark.judged_gang
    order by g.id
    limit most);
  update gangq.tick_state x set judged_at = t,
    judged_gang = case when cardinality(ids) < most then 0 else ids[most] end;
  for w in
    -- While a lost member is replaced the others may have to wait for it; once it is claimed they
    -- get the whole time again.
    select g.id, case when g.missing_since is null and max(p.step_at) is not null
      then greatest(max(p.step_at), (
        select max(z.claimed_at)
        from gangq.live_jobs z
        where z.gang_id = g.id and z.state = 'running')) end as step_at, count(p.rate) as rates
    from gangq.live_gangs g
    join gangq.live_jobs j on j.gang_id = g.id and j.state = 'running'
    join gangq.progress p on p.job_id = j.id and p.token = j.token
    where g.id = any (ids) group by g.id order by g.id
  loop
    if w.rates >= 3 then
      done := done + gangq.judge_stragglers(w.id, t, cfg);
    end if;
    -- After an outage of the database nobody could have said anything: everyone gets the whole time
    -- again.
    if w.step_at is not null
      and greatest(w.step_at, mark.outage_ended_at) <= t - make_interval(secs => cfg.gang_stall_s)
        then
      done := done + gangq.judge_standstill(w.id, t, cfg);
    end if;
  end loop;
  return done;
end $$;
comment on function gangq.judge_progress is
  'Internal, a step of the tick. Gangs whose members report steps: none for gang_stall_s, and the '
  'gang is drained with the member charged that stopped first, if that is known; one much slower '
  'than the others is called a straggler, and nothing is done to it. Returns how many events that '
  'made.';

create function gangq.judge_standstill(gang_id bigint, t timestamptz, cfg gangq.settings)
returns integer
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
  j gangq.live_jobs;
  last record;
  first record;
  only_told boolean;
  why text;
begin
  if not gangq.try_lock_gang(judge_standstill.gang_id) then
    return 0;
  end if;
  select x.*
  into g
  from gangq.live_gangs x
  where x.id = judge_standstill.gang_id and x.state = 'running' and x.missing_since is null;
  if not found then
    return 0;
  end if;
  -- Looked at again under the locks: a step, or a phase that takes its time, may have come in
  -- between.
  select case when max(p.step_at) is not null then greatest(max(p.step_at), (
      select max(z.claimed_at)
      from gangq.live_jobs z
      where z.gang_id = g.id and z.state = 'running')) end as step_at,
        bool_or(p.phase in ('load', 'save', 'long')) as busy,
    jsonb_object_agg(coalesce(x.epoch_rank, x.rank), p.step) filter (where p.step is not null
      and x.rank < 256) as steps,
    jsonb_agg(jsonb_build_object('rank', coalesce(x.epoch_rank, x.rank), 'worker', i.name, 'host',
      i.host, 'step', p.step, 'step_at', p.step_at, 'phase', p.phase,
      'rate', p.rate, 'beat_at', p.beat_at) order by x.rank) filter (where x.rank < 256) as members
  into last
  from gangq.live_jobs x join gangq.progress p on p.job_id = x.id and p.token = x.token
  left join gangq.incarnations i on i.id = x.incarnation
  where x.gang_id = g.id and x.state = 'running';
  if last.step_at is null or last.busy
    or last.step_at > t - make_interval(secs => (cfg).gang_stall_s) then
    return 0;
  end if;
  select w.job_id, w.sentence into first from gangq.who_stopped(g.id, null, null) w;
  -- The record of a gang is kept with one member: the one that stopped, or the first one.
  select x.* into j from gangq.live_jobs x
  where x.gang_id = g.id and x.state = 'running'
  order by x.id <> coalesce(first.job_id, x.id), x.rank
  limit 1;
  only_told := 'gang' = any (coalesce(
    (
      select ts.notify_only
      from gangq.task_settings ts
      join gangq.shapes s on s.task = ts.task
      where s.id = j.shape_id), (cfg).notify_only));
  if only_told and exists (
    select 1
    from gangq.events e
    where e.gang_id = g.id and e.at >= last.step_at and e.kind = 'notify'
      and e.data ->> 'class' = 'gang') then
    return 0;
  end if;
  why := format('no member of the gang has made a step for %s s: %s',
    round(extract(epoch from t - last.step_at)), first.sentence);
  perform gangq.witness(t, case when only_told then 'notify' else 'trip' end, j,
    'NoCollectiveProgress', jsonb_build_object(
      'code', 76, 'class', 'gang', 'message', why, 'charged', first.job_id is not null,
      'trips', j.trips + case when only_told or first.job_id is null then 0 else 1 end,
      'outcome', case when only_told then 'notify' else 'preempted' end, 'steps', last.steps,
      'devices', (select coalesce(jsonb_agg(r.uuid order by r.index, r.id), '[]')
        from gangq.device_holds h
        join gangq.device_registry r on r.id = h.device_id
        where h.job_id = j.id)),
    jsonb_build_object('members', last.members));
  if not only_told then
    -- Charged, and no culprit: nobody has proven it stopped, so it is told to stop and keeps its
    -- devices until it has.
    perform gangq.drain(g.id, '{}', 'trip',
      jsonb_build_object('type', 'NoCollectiveProgress', 'message', why, 'code', 76), why, t,
      charged => array_remove(array[first.job_id], null));
  end if;
  return 1;
end $$;
comment on function gangq.judge_standstill is
  'Internal. Drains a running gang in which no member has made a step for gang_stall_s although '
  'none loads, saves or is in a long phase, and charges the member that stopped first, nobody '
  'where that is not known; or only says so once, where class gang is notify-only.';

-- One that is slow because it waits for the others is as slow as they are: only a rank far under
-- the middle one stands out. A rate is as old as the last step, so a rank whose steps have stopped
-- coming counts for what that allows at most; three heartbeats are granted, because steps arrive
-- with them.
create function gangq.judge_stragglers(gang_id bigint, t timestamptz, cfg gangq.settings)
returns integer
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  w record;
  strikes integer := 0;
begin
  for w in
    with members as (
      select j.id, coalesce(j.epoch_rank, j.rank) as rank, j.token, j.incarnation, p.lags_since,
        case when t - p.step_at > make_interval(secs => 3 * (cfg).heartbeat_s)
          then least(p.rate, 1 / (extract(epoch from t - p.step_at) - 2 * (cfg).heartbeat_s))
            else p.rate end as rate
      from gangq.live_jobs j join gangq.progress p on p.job_id = j.id and p.token = j.token
      where j.gang_id = judge_stragglers.gang_id and j.state = 'running' and p.rate is not null
        and coalesce(p.phase, 'run') = 'run'
    ),
    middle as (
      select percentile_cont(0.5) within group (order by m.rate) as rate, count(*) as members
      from members m
    )
    select m.*, d.rate as median, m.rate < d.rate / 2 as lags
    from members m cross join middle d
    where d.members >= 3 and (m.lags_since is not null or m.rate < d.rate / 2)
    order by m.id
  loop
    -- Skip locked: a heartbeat that brings this very member's beat is not waited for; the next
    -- round sees what it said.
    perform 1
    from gangq.progress p
    where p.job_id = w.id and p.token = w.token
    for update skip locked;
    continue when not found;
    if w.lags is distinct from (w.lags_since is not null) then
      update gangq.progress p set lags_since = case when w.lags then t end where p.job_id = w.id;
    end if;
    if w.lags and w.lags_since <= t - make_interval(secs => (cfg).straggler_s) then
      strikes := strikes + gangq.strike_straggler(judge_stragglers.gang_id, w.id, w.token,
        w.incarnation, w.rank, w.lags_since, w.rate, w.median, t, cfg);
    end if;
  end loop;
  return strikes;
end $$;
comment on function gangq.judge_stragglers is
  'Internal. Notes which members make less than half the steps of the gang''s median member, of '
  'three at least.';

create function gangq.strike_straggler(
  gang_id bigint, job_id bigint, token bigint, incarnation bigint, rank integer, since timestamptz,
    rate double precision,
  median double precision, t timestamptz, cfg gangq.settings
) returns integer language plpgsql as $$
#variable_conflict use_column
declare
  strike integer := case
    when strike_straggler.since <= t - make_interval(secs => 2 * (cfg).straggler_s) then 2
    else 1 end;
begin
  if exists (
    select 1 from gangq.events e
    where e.job_id = strike_straggler.job_id and e.at >= strike_straggler.since
      and e.kind = 'straggler' and (e.data ->> 'strike')::integer >= strike
  ) then
    return 0;
  end if;
  perform gangq.log_event(t, 'straggler', strike_straggler.gang_id,
    (select g.epoch from gangq.live_gangs g where g.id = strike_straggler.gang_id),
    strike_straggler.job_id, strike_straggler.token, strike_straggler.incarnation,
    reason => format('rank %s makes %s steps a second, the gang''s median member %s',
      strike_straggler.rank,
      round(strike_straggler.rate::numeric, 3), round(strike_straggler.median::numeric, 3)),
    data => jsonb_build_object('strike', strike, 'rank', strike_straggler.rank, 'rate',
      strike_straggler.rate, 'median', strike_straggler.median,
      'since', strike_straggler.since,
      'host', (select i.host from gangq.incarnations i where i.id = strike_straggler.incarnation)));
  return 1;
end $$;
comment on function gangq.strike_straggler is
  'Internal. Puts a straggler on record: strike 1 after straggler_s, strike 2 after twice that, '
  'each once.';
