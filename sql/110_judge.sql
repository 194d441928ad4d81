-- Who is dead, and what is due: outage, reap_expired, free_orphans, flag_dead_workers, rollback of stale
-- reservations, promote_due. Each step is bounded and takes what it can with skip locked; the rest waits for the next
-- tick.

-- Judging needs to know that the authority itself was there. After a restart, a failover, a long gap between ticks or
-- a jump of the clock, every lease gets one full period from now before it is judged.
create function gangq.note_outage(t timestamptz) returns timestamptz language plpgsql set search_path = '' as $$
declare
  s gangq.tick_state;
  started timestamptz := pg_postmaster_start_time();
  line text := case when pg_is_in_recovery() then null
    else left(pg_walfile_name(pg_current_wal_lsn()), 8) end;
  shortest real;
begin
  select x.* into s from gangq.tick_state x for update skip locked;
  if not found then
    -- Another judge holds the row this moment and writes the same.
    return (select x.outage_ended_at from gangq.tick_state x);
  end if;
  -- A gap counts when a healthy worker's lease could have run out in it: three quarters of the shortest live lease.
  select coalesce(min(l.lease_s), 120) into shortest
  from gangq.leases l join gangq.incarnations i on i.id = l.incarnation where i.ended_at is null;
  if s.last_at is not null and (
    s.server_started_at is distinct from started or s.timeline is distinct from line or s.last_at > t
    or (t - s.last_at > make_interval(secs => shortest * 0.75) and (s.outage_ended_at is null or exists (
      -- Where only a slow cron ticks, every gap is long: without a sign of life since the last one no more is granted.
      select 1 from gangq.leases l join gangq.incarnations i on i.id = l.incarnation
      where i.ended_at is null and l.renewed_at > s.outage_ended_at)))
  ) then
    s.outage_ended_at := t;
    perform gangq.log_event(t, 'outage', reason => case
      when s.server_started_at is distinct from started then 'the server restarted'
      when s.timeline is distinct from line then 'the server changed timeline'
      when s.last_at > t then 'the clock went back'
      else 'no tick for ' || round(extract(epoch from t - s.last_at)::numeric, 1) || ' s' end);
  end if;
  update gangq.tick_state x set last_at = t, server_started_at = started, timeline = line, outage_ended_at = s.outage_ended_at;
  return s.outage_ended_at;
end $$;
comment on function gangq.note_outage(timestamptz) is
  'Internal. Notices an outage since the last judgement and returns when the last one was over (null: none).';

create function gangq.lease_end(expires_at timestamptz, lease_s real, outage_ended_at timestamptz) returns timestamptz
language sql immutable as
$$ select greatest(expires_at, coalesce(outage_ended_at + make_interval(secs => lease_s), expires_at)) $$;
comment on function gangq.lease_end(timestamptz, real, timestamptz) is 'Internal. When a lease may be judged, outages considered.';

create function gangq.reap_expired(most integer default 200) returns integer
language plpgsql security definer set search_path = '' set lock_timeout = '100ms' as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  outage timestamptz := gangq.note_outage(t);
  w record;
  j gangq.live_jobs;
  dead integer := 0;
begin
  for w in
    select i.id, i.name from gangq.incarnations i join gangq.leases l on l.incarnation = i.id
    where i.ended_at is null and gangq.lease_end(l.expires_at, l.lease_s, outage) <= t
    order by i.id limit most
  loop
    -- Skip locked, and look again: a heartbeat may have come between.
    perform 1 from gangq.incarnations i where i.id = w.id and i.ended_at is null for update skip locked;
    continue when not found;
    perform 1 from gangq.leases l
    where l.incarnation = w.id and gangq.lease_end(l.expires_at, l.lease_s, outage) <= t for update skip locked;
    continue when not found;
    perform gangq.end_incarnation(w.id, 'dead', t);
    perform gangq.log_event(t, 'reap', incarnation => w.id, reason => 'its lease ended');
    dead := dead + 1;
  end loop;
  dead := dead + gangq.free_orphans(null, most);
  -- Told to stop, heard, but never acknowledged: renewal of that job ended ack_timeout_s after it was told, so its lease
  -- ended one lease later. The device may still be busy: it is quarantined in the same transaction.
  for w in
    select x.id, x.gang_id, x.incarnation from gangq.live_jobs x
    join gangq.leases l on l.incarnation = x.incarnation cross join gangq.settings s
    where x.incarnation is not null and x.state = 'preempting'
      and gangq.lease_end(x.told_at + make_interval(secs => s.ack_timeout_s + l.lease_s), l.lease_s, outage) <= t
    order by x.gang_id nulls last, x.id limit most
  loop
    continue when w.gang_id is not null and not gangq.try_lock_gang(w.gang_id);
    select x.* into j from gangq.live_jobs x where x.id = w.id and x.state = 'preempting' for update skip locked;
    continue when not found;
    update gangq.device_holds h set kind = 'quarantine', job_id = null, token = null, since = t,
      reason = format('job %s was told to stop and never confirmed it', j.id)
    where h.job_id = j.id;
    if found then
      perform gangq.log_event(t, 'quarantine', j.gang_id, (select g.epoch from gangq.live_gangs g where g.id = j.gang_id), job_id => j.id, token => j.token, incarnation => j.incarnation,
        reason => 'told to stop and never confirmed it');
    end if;
    perform gangq.stopped(j, null, t, 'force');
    dead := dead + 1;
  end loop;
  return dead;
end $$;
comment on function gangq.reap_expired(integer) is
  'Judges by the clock, and only after leases have ended: incarnations whose lease is over are dead and their jobs free; '
  'jobs told to stop that never confirmed are force-drained and their devices quarantined. Returns how many of each.';

-- Jobs still held by incarnations that have ended. Works from what is there, so it can be interrupted and repeated.
create function gangq.free_orphans(of_incarnations bigint[] default null, most integer default 1000) returns integer
language plpgsql set search_path = '' as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  freed integer := 0;
  w record;
  j gangq.live_jobs;
  g gangq.live_gangs;
  gone bigint[];
  how text;
begin
  for w in
    select distinct x.gang_id from gangq.incarnations i join gangq.live_jobs x on x.incarnation = i.id
    where i.ended_at is not null and (of_incarnations is null or i.id = any (of_incarnations)) and x.gang_id is not null
    order by x.gang_id limit most
  loop
    continue when not gangq.try_lock_gang(w.gang_id);
    select x.* into g from gangq.live_gangs x where x.id = w.gang_id;
    if g.state = 'draining' then
      for j in
        select x.* from gangq.live_jobs x join gangq.incarnations i on i.id = x.incarnation
        where x.gang_id = g.id and x.state = 'preempting' and i.ended_at is not null order by x.id
      loop
        perform gangq.stopped(j, null, t, 'dead');
        freed := freed + 1;
      end loop;
    elsif not gangq.rollback_gang(g.id, 'a worker ended before it claimed') then
      select array_agg(x.id order by x.rank), min(i.state) into gone, how
      from gangq.live_jobs x join gangq.incarnations i on i.id = x.incarnation
      where x.gang_id = g.id and x.state = 'running' and i.ended_at is not null;
      perform gangq.drain(g.id, coalesce(gone, '{}'),
        case when gone is null then 'placement_miss' when how = 'dead' then 'crash' else 'release' end,
        case when how = 'dead' then jsonb_build_object('type', 'WorkerLost', 'message', 'its worker was lost') end,
        case when gone is null then 'a worker ended before it claimed its member' when how = 'dead' then 'a member''s worker was lost'
          else 'a member''s worker retired' end, t);
      freed := freed + coalesce(cardinality(gone), 0);
    end if;
  end loop;
  for w in
    select x.id, i.id as incarnation, i.name, i.state, x.claimed_at,
      row_number() over (partition by i.id order by x.claimed_at, x.order_key) as nth, i.prefetch, i.slots
    from gangq.incarnations i join gangq.live_jobs x on x.incarnation = i.id
    where i.ended_at is not null and (of_incarnations is null or i.id = any (of_incarnations)) and x.gang_id is null
    order by x.id limit most
  loop
    select x.* into j from gangq.live_jobs x where x.id = w.id and x.incarnation = w.incarnation for update skip locked;
    continue when not found;
    if j.state = 'preempting' then
      perform gangq.stopped(j, null, t, 'dead');
    else
      -- Of prefetched jobs only the first, one a slot, can have been running: only those are charged.
      perform gangq.hand_back(j, case when w.state = 'dead' and (w.prefetch = 1 or w.nth <= w.slots) then 'crash' else 'release' end,
        format('worker %s was %s', w.name, case w.state when 'dead' then 'lost' else 'retired' end), t);
    end if;
    freed := freed + 1;
  end loop;
  if freed > 0 then
    perform gangq.wake_tick();
  end if;
  return freed;
end $$;
comment on function gangq.free_orphans(bigint[], integer) is
  'Internal. Frees what ended incarnations still hold: crashes are charged as crashes, retirements not at all. What '
  'somebody has locked (a caller completing it in an open transaction) is left for the next tick.';

create function gangq.flag_dead_workers() returns integer
language plpgsql security definer set search_path = '' set lock_timeout = '100ms' as $$
declare
  t timestamptz := gangq.now();
  outage timestamptz := gangq.note_outage(t);
  w record;
  flagged integer := 0;
begin
  for w in
    select i.id, i.flagged_at, l.renewed_at > t - make_interval(secs => s.flag_after_s) as heard, t - l.renewed_at as silent
    from gangq.incarnations i join gangq.leases l on l.incarnation = i.id cross join gangq.settings s
    where i.ended_at is null and (i.flagged_at is null) = (
      greatest(l.renewed_at, coalesce(outage, l.renewed_at)) <= t - make_interval(secs => s.flag_after_s))
    order by i.id limit 200
  loop
    perform 1 from gangq.incarnations i where i.id = w.id for update skip locked;
    continue when not found;
    update gangq.incarnations i set flagged_at = case when w.flagged_at is null then t end where i.id = w.id;
    if w.flagged_at is null then
      flagged := flagged + 1;
      perform gangq.log_event(t, 'flag', incarnation => w.id,
        reason => 'silent for ' || round(extract(epoch from w.silent)::numeric, 1) || ' s');
    else
      perform gangq.log_event(t, 'unflag', incarnation => w.id, reason => 'heard again');
    end if;
  end loop;
  return flagged;
end $$;
comment on function gangq.flag_dead_workers() is
  'Flags workers that have been silent for flag_after_s, and takes the flag off those heard again. Frees nothing: only '
  'proof of death or the end of a lease does. Returns how many were flagged.';

create function gangq.rollback_stale(most integer default 200) returns integer
language plpgsql set search_path = '' as $$
declare
  t timestamptz := gangq.now();
  w record;
  n integer := 0;
begin
  for w in
    select g.id from gangq.live_gangs g
    where g.state = 'reserved' and (g.deadline_at <= t or exists (
      select 1 from gangq.live_jobs j join gangq.incarnations i on i.id = j.incarnation
      where j.gang_id = g.id and j.state = 'reserved' and (i.state <> 'live' or i.quarantined is not null)))
    order by g.id limit most
  loop
    continue when not gangq.try_lock_gang(w.id);
    continue when not exists (select 1 from gangq.live_gangs g where g.id = w.id and g.state = 'reserved');
    if not gangq.rollback_gang(w.id) then
      -- Some were claimed and wait at the barrier for one that will not come. Only a missed deadline is held against
      -- whoever has not claimed: a reservation may also be over because another of its workers stops.
      update gangq.incarnations i set passed_over_until = t + make_interval(secs => (select s.pass_over_s from gangq.settings s))
      where exists (select 1 from gangq.live_gangs g where g.id = w.id and g.deadline_at <= t) and i.id = any (array(
        select z.id from gangq.incarnations z
        where z.id in (select j.incarnation from gangq.live_jobs j where j.gang_id = w.id and j.state = 'reserved')
        order by z.id for update skip locked));
      perform gangq.drain(w.id, '{}', 'placement_miss', null, 'a member was not claimed in time, or its worker takes nothing more', t);
    end if;
    n := n + 1;
  end loop;
  return n;
end $$;
comment on function gangq.rollback_stale(integer) is
  'Internal. Reservations past their deadline, or on workers that take nothing any more: rolled back when nobody has '
  'claimed, drained uncharged when somebody has. The silent worker is passed over for a while.';

create function gangq.promote_due(most integer default 200) returns integer
language plpgsql security definer set search_path = '' set lock_timeout = '100ms' as $$
declare
  t timestamptz := gangq.now();
  n integer := 0;
  due record;
  w record;
  g bigint;
  waiters bigint[];
  ended bigint[];
  locked boolean;
begin
  for due in
    with ready as (
      update gangq.live_jobs j set state = 'pending', due_at = null
      where j.id = any (array(
        select z.id from gangq.live_jobs z where z.state = 'scheduled' and z.due_at <= t
        order by z.due_at limit most for update skip locked))
      returning j.shape_id
    )
    select s.queue, count(*) as jobs from ready r join gangq.shapes s on s.id = r.shape_id group by s.queue
  loop
    n := n + due.jobs;
    perform gangq.wake_sleepers(due.queue, due.jobs, 'sleepers');
  end loop;
  ended := array(select u.job_id from gangq.unsettled u order by u.job_id limit most for update skip locked);
  if ended <> '{}' then
    perform gangq.settle(ended);
    delete from gangq.unsettled u where u.job_id = any (ended)
      and not exists (select 1 from gangq.dependencies d where d.on_job_id = u.job_id and d.outcome is null);
  end if;
  -- Jobs whose awaited jobs have ended. A failed or cancelled one cancels all that wait for it.
  for w in
    select d.job_id, j.gang_id, array_agg(d.on_job_id) filter (where d.outcome = 'done') as done,
      min(d.on_job_id) filter (where d.outcome <> 'done') as lost
    from gangq.dependencies d join gangq.live_jobs j on j.id = d.job_id
    where d.job_id = any (array(
        with settled as (
          select distinct x.job_id from gangq.dependencies x where x.outcome is not null order by x.job_id limit most)
        select s.job_id from settled s
        union
        -- Members are let go together: the limit never cuts a gang.
        select m.id from settled s join gangq.live_jobs x on x.id = s.job_id join gangq.live_jobs m on m.gang_id = x.gang_id))
      and d.outcome is not null
    group by d.job_id, j.gang_id order by j.gang_id, d.job_id
  loop
    if w.gang_id is not null and w.gang_id is distinct from g then
      g := w.gang_id;
      locked := gangq.try_lock_gang(g);
    end if;
    continue when w.gang_id is not null and not locked;
    perform 1 from gangq.live_jobs j where j.id = w.job_id and j.state = 'waiting' for update skip locked;
    continue when not found;
    n := n + 1;
    if w.lost is not null then
      -- It may also wait for a job that a caller is completing in an open transaction: then it is cancelled later.
      waiters := array(select j.id from gangq.live_jobs j where j.id = w.job_id or j.gang_id = w.gang_id);
      continue when (select count(*) from gangq.dependencies d where d.job_id = any (waiters)) <> (
        select count(*) from (
          select 1 from gangq.dependencies d where d.job_id = any (waiters) order by d.on_job_id, d.job_id for update skip locked) l);
      if w.gang_id is not null then
        perform gangq.cancel(gang_ids => array[w.gang_id], reason => format('job %s, which it waited for, did not succeed', w.lost));
      else
        perform gangq.cancel(job_ids => array[w.job_id], reason => format('job %s, which it waited for, did not succeed', w.lost));
      end if;
      continue;
    end if;
    delete from gangq.dependencies d where d.job_id = w.job_id and d.on_job_id = any (w.done);
    update gangq.live_jobs j set waits_on = j.waits_on - cardinality(w.done),
      state = case when j.waits_on > cardinality(w.done) then 'waiting' when j.gang_id is not null then 'blocked'
        when j.due_at > t then 'scheduled' else 'pending' end
    where j.id = w.job_id;
    if w.gang_id is not null then
      update gangq.live_gangs x set state = 'blocked'
      where x.id = w.gang_id and not exists (select 1 from gangq.live_jobs j where j.gang_id = x.id and j.state = 'waiting');
    else
      perform gangq.wake_sleepers((select s.queue from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id where j.id = w.job_id), 1, 'sleepers');
    end if;
  end loop;
  return n;
end $$;
comment on function gangq.promote_due(integer) is
  'Makes due what was scheduled, and lets go what waited for jobs that are now done; what waited for one that failed or '
  'was cancelled is cancelled. Returns how many moved.';
