-- Which workers are dead (reap_expired) and which reservations are over (rollback_stale). Both are
-- steps of the tick, and both first call note_outage.
-- 1. A silent worker is flagged after flag_after_s, so that its host restarts it (113).
-- 2. It is dead when its lease is over (reap_expired), when it trips (117), or by proof
--    (report_dead, 040).
-- 3. free_orphans (108) then frees its jobs: at once, or at exits_at after a trip.
-- 4. Until its death is proven its devices stay withheld (116).
-- Locks: note_outage the row of tick_state; then incarnations by id, device_registry by UUID, gangs
-- by id, jobs by id, device_holds, all with skip locked. What is locked is left for the next tick.

-- Internal, for rollback_stale, reap_expired and flag_dead_workers. Records an outage since the
-- last judgement and returns when the last one ended (null: none; infinity: another transaction is
-- finding out, so nothing can be judged now). A lease can only be judged if the workers could renew
-- it. After a restart, a failover or a jump of the clock every lease gets one full period from now.
-- After a gap between two ticks the same holds for the workers heard since the last such gap (see
-- allow_for_gap). Where the clock went back, what is stored goes back with it (124).
create function gangq.note_outage(t timestamptz) returns timestamptz language plpgsql as $$
declare
  s gangq.tick_state;
  started timestamptz := pg_postmaster_start_time();
  server_timeline text := case when not pg_is_in_recovery()
    then left(pg_walfile_name(pg_current_wal_lsn()), 8) end;
  why text;
begin
  select x.* into s from gangq.tick_state x for update skip locked;
  if not found then
    return 'infinity';
  end if;
  perform gangq.hang_up_soon();
  why := case when s.last_at is null then null
    when s.server_started_at is distinct from started then 'the server restarted'
    when s.timeline is distinct from server_timeline then 'the server changed timeline'
    -- The clock is read again: another judge may have read it after t and have ended by now.
    when s.last_at > gangq.now() then 'the clock went back' end;
  if why is null and s.last_at > t - interval '0.1 s' then
    return s.outage_ended_at;  -- Another step of this tick has just been here.
  end if;
  if s.last_at > gangq.now() + interval '1 s' then
    perform gangq.move_back(s.last_at - gangq.now());
  end if;
  if why is not null then
    s.interrupted_at := t;
  else
    why := gangq.allow_for_gap(s, t);
  end if;
  if why is not null then
    s.outage_ended_at := t;
    perform gangq.log_event(t, 'outage', reason => why);
  end if;
  update gangq.tick_state x set last_at = t, server_started_at = started,
    timeline = server_timeline, outage_ended_at = s.outage_ended_at,
    interrupted_at = s.interrupted_at;
  update gangq.sequence_base x set base = b.base, timeline = b.timeline
  from gangq.id_base() b
  where x.timeline <> b.timeline;
  return s.outage_ended_at;
end $$;

-- A gap counts when a healthy worker's lease could have run out in it. With a slow cron every gap
-- is long: a worker that got another period at each of them would never be judged. So only workers
-- heard since the last gap get one.
--
-- Internal, for note_outage. If the time since the last tick is such a gap, gives those workers one
-- full lease from now. Returns what the event says of the gap; null: there was none.
create function gangq.allow_for_gap(s gangq.tick_state, t timestamptz) returns text
language plpgsql as $$
declare
  shortest real;
begin
  select coalesce(min(l.lease_s), 120) into shortest
  from gangq.leases l join gangq.incarnations i on i.id = l.incarnation where i.ended_at is null;
  if t - s.last_at > make_interval(secs => shortest * 0.75)
    and (s.outage_ended_at is null or exists (
      select 1 from gangq.leases l join gangq.incarnations i on i.id = l.incarnation
      where i.ended_at is null and l.renewed_at > s.outage_ended_at)) then
    update gangq.leases l
      set expires_at = greatest(l.expires_at, t + make_interval(secs => l.lease_s))
    where l.incarnation = any (array(
      select z.incarnation from gangq.leases z join gangq.incarnations i on i.id = z.incarnation
      where i.ended_at is null and z.renewed_at > coalesce(s.outage_ended_at, '-infinity')
      order by z.incarnation for update of z skip locked));
    return 'no tick for ' || round(extract(epoch from t - s.last_at)::numeric, 1) || ' s';
  end if;
  return null;
end $$;

-- Internal. When a lease may be judged as over: after an outage it gets one full period.
create function gangq.lease_end(expires_at timestamptz, lease_s real, interrupted_at timestamptz)
returns timestamptz language sql immutable as
$$ select greatest(expires_at,
  coalesce(interrupted_at + make_interval(secs => lease_s), expires_at)) $$;

-- A step of the tick. Judges by the clock, and only after leases have ended. Incarnations whose
-- lease is over are dead and their jobs are freed; jobs told to stop that never confirmed are
-- force-drained and their devices quarantined; devices withheld after a trip are given back when
-- their time is over. Returns how many incarnations and jobs. Call it in autocommit: see tick.
-- Raises GQ001.
create function gangq.reap_expired(most integer default 200) returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  outage timestamptz := gangq.note_outage(t);
  w record;
  dead integer := 0;
begin
  perform gangq.check_most(most);
  if outage = 'infinity' then
    return 0;
  end if;
  for w in
    -- A heartbeat may renew the lease meanwhile: what is locked is judged by its latest version.
    select i.id
    from gangq.incarnations i
    join gangq.leases l on l.incarnation = i.id
    cross join gangq.tick_state x
    where i.ended_at is null and gangq.lease_end(l.expires_at, l.lease_s, x.interrupted_at) <= t
    order by i.id limit most for no key update of i skip locked for update of l skip locked
  loop
    -- An open registration may have locked a device that this worker saw.
    continue when not gangq.try_lock_devices(w.id);
    perform gangq.end_incarnation(w.id, 'dead', t);
    perform gangq.log_event(t, 'reap', incarnation => w.id, reason => 'its lease ended');
    dead := dead + 1;
  end loop;
  dead := dead + gangq.free_orphans(null, most) + gangq.force_unconfirmed(outage, t, most);
  perform gangq.lift_withheld(null, t, most);
  return dead;
end $$;

-- Internal, for reap_expired. Frees jobs that were told to stop and never confirmed it:
-- ack_timeout_s later their heartbeats answer lost, and a lease later a worker that heard none is
-- dead. Their devices may still be busy and are quarantined. Returns how many jobs.
create function gangq.force_unconfirmed(outage timestamptz, t timestamptz, most integer)
returns integer language plpgsql as $$
declare
  w record;
  j gangq.live_jobs;
  withheld bigint[];
  n integer := 0;
begin
  for w in
    select x.id, x.gang_id, x.token
    from gangq.live_jobs x
    join gangq.leases l on l.incarnation = x.incarnation
    cross join gangq.settings s
    where x.incarnation is not null
      and x.state = 'preempting'
      and gangq.lease_end(x.told_at + make_interval(secs => s.ack_timeout_s + l.lease_s), l.lease_s,
        outage) <= t
    order by x.gang_id nulls last, x.id limit most
  loop
    continue when w.gang_id is not null and not gangq.try_lock_gang(w.gang_id);
    -- It may have stopped, and been claimed and told to stop again.
    select x.* into j from gangq.live_jobs x
    where x.id = w.id and x.token = w.token for update skip locked;
    continue when not found;
    withheld := gangq.withhold(j,
      format('job %s was told to stop and never confirmed it', j.id), t);
    perform gangq.log_job(t, 'quarantine', j, 'told to stop and never confirmed it',
      jsonb_build_object('device', r.uuid))
    from gangq.device_registry r where r.id = any (withheld) order by r.index, r.id;
    update gangq.live_jobs x set taken_token = x.token where x.id = j.id;
    perform gangq.stopped(j, null, t, 'force');
    n := n + 1;
  end loop;
  return n;
end $$;

-- Internal, for rollback_stale. Whether the reservation of this gang, or of its replacements, is
-- past its deadline or on a worker that takes no work any more.
create function gangq.reservation_over(g gangq.live_gangs, t timestamptz) returns boolean
language sql stable as $$
  select case when g.state = 'reserved' then g.deadline_at
      when g.missing_since is not null then least(g.deadline_at, g.timeout_at) end <= t
    or exists (
      select 1 from gangq.live_jobs j join gangq.incarnations i on i.id = j.incarnation
      where j.gang_id = g.id and j.state = 'reserved'
        and (i.state <> 'live' or i.quarantined is not null))
$$;

-- Internal, for rollback_stale. Ends the reservation, which is over, of this locked gang or of its
-- replacements: it is rolled back; when some members wait at the barrier the gang is drained, which
-- costs it a placement miss and no attempt. Drains a running gang that has missed a member for its
-- whole timeout. outage: as note_outage returns it.
create function gangq.end_reservation(g gangq.live_gangs, outage timestamptz, t timestamptz)
returns void language plpgsql as $$
declare
  due timestamptz := outage + make_interval(secs => g.claim_deadline_s);
  reading double precision;
begin
  if g.deadline_at <= t and due > t then
    -- In an outage nobody could claim: a deadline that passed in it is set anew.
    update gangq.live_gangs x set deadline_at = due where x.id = g.id;
    update gangq.live_jobs j set deadline_at = due
    where j.gang_id = g.id and j.state = 'reserved';
  elsif g.missing_since is not null and g.timeout_at <= t then
    -- Time in which the queue was paused or over a limit does not count.
    reading := gangq.ineligible_s(g.kind_id, t);
    if reading > g.ineligible_s then
      update gangq.live_gangs x
      set timeout_at = gangq.timeout_shifted(x, reading, t), ineligible_s = reading
      where x.id = g.id;
    else
      perform gangq.drain(g.id, '{}', '{}', 'no_replacement', null,
        format('no place was found for a lost member within %s s', round(g.timeout_s)), t);
    end if;
  elsif not gangq.rollback_gang(g.id) and g.state = 'reserved' then
    -- Some members were claimed and wait at the barrier for one that will not come.
    perform gangq.pass_over(g, t);
    perform gangq.drain(g.id, '{}', '{}', 'placement_miss', null,
      'a member was not claimed in time, or its worker takes nothing more', t);
  end if;
end $$;

-- Internal. Ends reservations past their deadline, and those on workers that take no work any more.
-- Returns how many gangs it judged.
create function gangq.rollback_stale(most integer default 200) returns integer
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  outage timestamptz := gangq.note_outage(t);
  w record;
  g gangq.live_gangs;
  n integer := 0;
begin
  if outage = 'infinity' then
    return 0;
  end if;
  for w in
    select x.id from gangq.live_gangs x
    where (x.state = 'reserved' or x.missing_since is not null) and gangq.reservation_over(x, t)
    order by x.id limit most
  loop
    continue when not gangq.try_lock_gang(w.id);
    -- Another transaction may have rolled it back and reserved it anew.
    select x.* into g from gangq.live_gangs x where x.id = w.id and gangq.reservation_over(x, t);
    continue when not found;
    n := n + 1;
    perform gangq.end_reservation(g, outage, t);
  end loop;
  return n;
end $$;
