-- Progress: what the watchdogs allow each task, what has been learned of its beats, and the gang's
-- own watchdog, which sees the beats of all members.
--
-- A beat may say in which phase its member is. Here every phase but run means that no step is to be
-- expected, for as long as it lasts. For how long a process may be silent in each is decided by its
-- own watchdogs (stall.py, health.py). The phase wait, and words of the handler's own, are not kept
-- (keep_beats, 041) and count as run: a gang of which all members wait is judged.
-- Locks: learn_gap its own row; judge_progress the row of tick_state, then gangs and members as
-- every step of the tick does, with skip locked.

-- What the watchdogs allow jobs of this task: the task's own settings, else the queue's (budget),
-- else the installation's. device_class: model of the devices, empty without; learned gaps are kept
-- for each. budget_gpu_s is for jobs that hold devices. learned: the stall timeout was not set, so
-- it comes from the gaps seen between beats and grows with them.
create function gangq.watch_terms(task text, device_class text default '', queue text default null)
returns table (
  budget_s real, budget_gpu_s real, stall_timeout_s real, load_grace_s real, health_window_s real,
  long_phase_s real, notify_only text[], learned boolean
) language sql stable as $$
  select coalesce(ts.budget_s, q.budget_s, s.budget_s),
    coalesce(ts.budget_s, q.budget_s, s.budget_gpu_s),
    -- Five times the longest learned gap, but never less than the installation's number.
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

-- Internal. Whether a watchdog of this class reports and stops nothing, for jobs of this shape.
create function gangq.only_notifies(shape_id integer, class text) returns boolean
language sql stable as $$
  select class = any (w.notify_only)
  from gangq.shapes s cross join lateral gangq.watch_terms(s.task) w
  where s.id = only_notifies.shape_id
$$;

-- A worker has seen the beats of a task stay away this long and come back. The longest gap is kept;
-- beats add up. gangq.set_task(..., forget => true) starts over. Raises GQ001.
create function gangq.learn_gap(task text, device_class text, longest_s real, beats bigint)
returns void language plpgsql as $$
begin
  if coalesce(learn_gap.task, '') = '' or length(learn_gap.task) > 200
    or length(learn_gap.device_class) > 200 then
    perform gangq.refuse('GQ001', 'a gap is learned for a task with a name of 1 to 200 characters',
      'Pass task => ''train'', device_class => ''H200'' (empty without devices).');
  elsif (learn_gap.longest_s >= 0 and learn_gap.longest_s <= 1e7
    and learn_gap.beats between 0 and 1e15) is not true then
    perform gangq.refuse('GQ001',
      format('longest_s is %s and beats is %s', coalesce(learn_gap.longest_s::text, 'null'),
        coalesce(learn_gap.beats::text, 'null')),
      'longest_s is the longest gap between two beats of a job that then went on, seconds; '
      'beats is how many were seen.');
  end if;
  insert into gangq.beat_gaps as b (task, device_class, longest_s, beats, updated_at)
  values (learn_gap.task, coalesce(learn_gap.device_class, ''), learn_gap.longest_s,
    learn_gap.beats, gangq.now())
  on conflict on constraint beat_gaps_pkey do update set
    longest_s = greatest(b.longest_s, excluded.longest_s),
    beats = least(b.beats + excluded.beats, 1e18::bigint),
    updated_at = excluded.updated_at;
end $$;

-- Internal, a step of the tick, about once a heartbeat: judges a hundred gangs whose members report
-- steps. Returns how many events that made.
create function gangq.judge_progress(most integer default 100) returns integer
language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  t timestamptz := gangq.now();
  cfg gangq.settings;
  mark gangq.tick_state;
  ids bigint[];
  w record;
  done integer := 0;
begin
  select x.* into cfg from gangq.settings x;
  -- A heartbeat later there is nothing new to know yet.
  select x.* into mark from gangq.tick_state x for update skip locked;
  if not found or mark.judged_gang = 0 and mark.judged_at <= t
    and mark.judged_at > t - make_interval(secs => cfg.heartbeat_s) then
    return 0;
  end if;
  ids := array(
    select g.id from gangq.live_gangs g where g.state = 'running' and g.id > mark.judged_gang
    order by g.id limit most);
  update gangq.tick_state x set
    judged_at = t,
    judged_gang = case when cardinality(ids) < most then 0 else ids[most] end;
  for w in
    select j.gang_id as id, max(p.step_at) as step_at, count(p.rate) as rates
    from gangq.live_jobs j
    join gangq.progress p on p.job_id = j.id and p.token = j.token
    where j.gang_id = any (ids) and j.state = 'running'
    group by j.gang_id
    order by j.gang_id
  loop
    if w.rates >= 3 then
      done := done + gangq.judge_stragglers(w.id, t, cfg);
    end if;
    -- During an outage of the database no step could be stored: afterwards every gang gets the
    -- whole time again.
    if greatest(w.step_at, mark.outage_ended_at) <= t - make_interval(secs => cfg.gang_stall_s) then
      done := done + gangq.judge_standstill(w.id, t, cfg);
    end if;
  end loop;
  return done;
end $$;

-- Internal, for judge_standstill. The running members of a running gang that lacks none; of any
-- other gang there are none. step_at: the last step of any of them. A member that was claimed, as a
-- replacement too, gets the whole time: its claim counts as a step. steppers: how many report
-- steps. busy: a member loads, saves or is in a long phase. steps and members: for the event and
-- its evidence.
create function gangq.steps_of_gang(
  gang_id bigint, out step_at timestamptz, out steppers bigint, out busy boolean, out steps jsonb,
  out members jsonb
) language plpgsql stable as $$
begin
  select greatest(max(p.step_at), max(x.claimed_at)), count(p.step_at), bool_or(p.phase <> 'run'),
    jsonb_object_agg(gangq.rank_of(x), p.step) filter (where p.step is not null),
    jsonb_agg(jsonb_build_object('rank', gangq.rank_of(x), 'worker', i.name, 'host', i.host,
      'step', p.step, 'step_at', p.step_at, 'phase', p.phase, 'rate', p.rate, 'beat_at', p.beat_at)
      order by x.rank)
  into step_at, steppers, busy, steps, members
  from gangq.live_gangs g
  join gangq.live_jobs x on x.gang_id = g.id and x.state = 'running'
  left join gangq.progress p on p.job_id = x.id and p.token = x.token
  left join gangq.incarnations i on i.id = x.incarnation
  -- While a lost member is replaced the others may have to wait for it.
  where g.id = steps_of_gang.gang_id and g.state = 'running' and g.missing_since is null;
end $$;

-- Internal. Drains a running gang without a step for gang_stall_s, although no member loads, saves
-- or is in a long phase. The member that stopped first is charged, if known.
create function gangq.judge_standstill(gang_id bigint, t timestamptz, cfg gangq.settings)
returns integer language plpgsql as $$
declare
  j gangq.live_jobs;
  last record;
  first record;
  notifies boolean;
  why text;
begin
  if not gangq.try_lock_gang(judge_standstill.gang_id) then
    return 0;
  end if;
  last := gangq.steps_of_gang(judge_standstill.gang_id);
  if last.steppers = 0 or last.busy
    or last.step_at > t - make_interval(secs => cfg.gang_stall_s) then
    return 0;
  end if;
  first := gangq.who_stopped(judge_standstill.gang_id, null, null);
  -- The record of a gang is kept with one member: the one that stopped, or the first one.
  select x.* into j from gangq.live_jobs x
  where x.gang_id = judge_standstill.gang_id and x.state = 'running'
  order by x.id <> coalesce(first.job_id, x.id), x.rank
  limit 1;
  notifies := gangq.only_notifies(j.shape_id, 'gang');
  if notifies and exists (
    select 1 from gangq.events e
    where e.gang_id = j.gang_id and e.at >= last.step_at and e.kind = 'notify'
      and e.data ->> 'class' = 'gang') then
    return 0;
  end if;
  why := format('no member of the gang has made a step for %s s: %s',
    round(extract(epoch from t - last.step_at)), first.sentence);
  perform gangq.log_with_evidence(t, case when notifies then 'notify' else 'trip' end, j,
    'NoCollectiveProgress', jsonb_build_object('code', 76, 'class', 'gang', 'message', why,
      'charged', first.job_id is not null,
      'trips', j.trips + (not notifies and first.job_id is not null)::integer,
      'outcome', case when notifies then 'notify' else 'preempted' end, 'steps', last.steps),
    jsonb_build_object('members', last.members));
  if not notifies then
    -- The member pays, but is not proven stopped: it is told to stop, and keeps its devices until
    -- it has.
    perform gangq.drain(j.gang_id, '{}', array_remove(array[first.job_id], null), 'trip',
      jsonb_build_object('type', 'NoCollectiveProgress', 'message', why, 'code', 76), why, t);
  end if;
  return 1;
end $$;

-- Internal. A member that makes less than half the steps of the median one is put on record after
-- straggler_s (strike 1) and twice that (strike 2). Returns how many. A member that waits for the
-- others is as slow as they are: only a rank far under the middle one stands out. A rate is as old
-- as the last step. So when steps have stopped coming, the rate is at most one step in the time
-- since then, less two heartbeats, because steps arrive with them.
create function gangq.judge_stragglers(gang_id bigint, t timestamptz, cfg gangq.settings)
returns integer language plpgsql as $$
declare
  w record;
  strikes integer := 0;
begin
  for w in
    with members as (
      select j.id, gangq.rank_of(j) as rank, j.token, j.incarnation, p.lags_since,
        case when t - p.step_at > make_interval(secs => 3 * cfg.heartbeat_s)
          then least(p.rate, 1 / (extract(epoch from t - p.step_at) - 2 * cfg.heartbeat_s))
          else p.rate end as rate
      from gangq.live_jobs j join gangq.progress p on p.job_id = j.id and p.token = j.token
      where j.gang_id = judge_stragglers.gang_id and j.state = 'running' and p.rate is not null
        and coalesce(p.phase, 'run') = 'run'
    ),
    judged as (
      select m.*, d.rate as median, m.rate < d.rate / 2 as lags,
        case when m.lags_since <= t - make_interval(secs => 2 * cfg.straggler_s) then 2
          else 1 end as strike
      from members m
      cross join (
        select percentile_cont(0.5) within group (order by x.rate) as rate, count(*) as members
        from members x) d
      where d.members >= 3
    ),
    noted as (
      -- Set for those that begin to lag, cleared for those that do not lag any more.
      update gangq.progress p set lags_since = case when p.lags_since is null then t end
      where p.job_id = any (array(
        select z.job_id from judged d join gangq.progress z on z.job_id = d.id
        where d.lags <> (d.lags_since is not null) order by z.job_id for update of z skip locked))
    )
    select d.* from judged d
    where d.lags and d.lags_since <= t - make_interval(secs => cfg.straggler_s) and not exists (
      select 1 from gangq.events e
      where e.job_id = d.id and e.at >= d.lags_since and e.kind = 'straggler'
        and (e.data ->> 'strike')::integer >= d.strike)
  loop
    strikes := strikes + 1;
    perform gangq.log_event(t, 'straggler', g.id, g.epoch, w.id, w.token, w.incarnation,
      format('rank %s makes %s steps a second, the gang''s median member %s', w.rank,
        round(w.rate::numeric, 3), round(w.median::numeric, 3)),
      jsonb_build_object('strike', w.strike, 'rank', w.rank, 'rate', w.rate, 'median', w.median,
        'since', w.lags_since,
        'host', (select i.host from gangq.incarnations i where i.id = w.incarnation)))
    from gangq.live_gangs g where g.id = judge_stragglers.gang_id;
  end loop;
  return strikes;
end $$;
