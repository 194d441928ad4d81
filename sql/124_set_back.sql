-- When the clock of the database is set back. Moments that were stored before lie too far ahead:
-- until the clock is there again no lease would be over, no backoff would end, and nothing that
-- began then would be judged. So note_outage (110) moves them back with the clock:
-- 1. by is how far the last tick lies ahead of now. The clock was set back by that or a little
--    more, so what is moved by it ends no sooner than it would have.
-- 2. What began at a moment that is still to come began before the clock was set back.
-- 3. What ends later than the last tick was not over then. What ends before that was over and dealt
--    with, or was stored since the clock was set back: it stays.
-- What people gave as a moment stays, too: due_at, the end of a pause, a deadline; and due times of
-- schedules, of which none is run twice. So does what only says when something was, and what counts
-- as over where it lies too far ahead: full_at (029), until of places (063) and of the decider
-- (069), the pause of a notification target (126).
-- Locks: rows of what runs or waits, all with skip locked. What is locked stays as it is.

-- Internal. This moment, moved back if it is later than that.
create function gangq.moved(at timestamptz, after timestamptz, by interval) returns timestamptz
language sql immutable as $$ select case when at > after then at - by else at end $$;

-- Internal, for note_outage. Moves moments back that were stored before the clock was set back.
create function gangq.move_back(by interval) returns void language plpgsql as $$
declare
  -- A second later: what another session stores this moment is not moved.
  t timestamptz := gangq.now() + interval '1 s';
  last_tick timestamptz := gangq.now() + by;
begin
  -- Answers of submissions would be forgotten after less than an hour.
  update gangq.tick_state x set requests_turned_at = gangq.moved(x.requests_turned_at, t, by);
  perform gangq.move_workers_back(by, t, last_tick);
  perform gangq.move_work_back(by, t, last_tick);
  perform gangq.move_stored_back(by, t);
  perform gangq.move_services_back(by, t, last_tick);
end $$;

-- Internal, for move_back: leases, and what is held against a worker.
create function gangq.move_workers_back(by interval, t timestamptz, last_tick timestamptz)
returns void language plpgsql as $$
begin
  update gangq.leases l set renewed_at = l.renewed_at - by, expires_at = l.expires_at - by
  where l.incarnation = any (array(
    select z.incarnation from gangq.leases z
    where z.renewed_at > t order by z.incarnation for update skip locked));
  -- passed_over_until and exits_at stay when they are over.
  update gangq.incarnations i set flagged_at = gangq.moved(i.flagged_at, t, by),
    passed_over_until = gangq.moved(i.passed_over_until, t, by),
    exits_at = case when i.ended_at > t or i.exits_at > last_tick then i.exits_at - by
      else i.exits_at end
  where i.id = any (array(
    select z.id from gangq.incarnations z
    where z.flagged_at > t or z.passed_over_until > t
      or z.exits_at is not null and (z.ended_at > t or z.exits_at > last_tick)
    order by z.id for no key update skip locked));
end $$;

-- Internal, for move_back: what gangs and jobs wait for and are judged by, and since when a verdict
-- of what waits holds.
create function gangq.move_work_back(by interval, t timestamptz, last_tick timestamptz)
returns void language plpgsql as $$
begin
  -- not_before stays when it is over; it never ends before the process of a member. A gang
  -- that was never placed and never timed out waits for the moment that people gave.
  update gangq.live_gangs g set
    go_at = gangq.moved(g.go_at, t, by),
    reserved_at = gangq.moved(g.reserved_at, t, by),
    missing_since = gangq.moved(g.missing_since, t, by),
    drain_started_at = gangq.moved(g.drain_started_at, t, by),
    deadline_at = gangq.moved(g.deadline_at, last_tick, by),
    not_before = greatest(gangq.moved(g.not_before, t, by), (
      select max(i.exits_at)
      from gangq.live_jobs j join gangq.incarnations i on i.id = j.ran_on
      where j.gang_id = g.id and g.not_before is not null)),
    -- Never sooner than if it began to wait now.
    timeout_at = least(g.timeout_at,
      greatest(t, gangq.moved(g.not_before, t, by)) + make_interval(secs => g.timeout_s))
  where g.id = any (array(
    select z.id from gangq.live_gangs z
    where (z.epoch > 0 or z.timeouts > 0 or z.not_before is null) and (
      greatest(z.go_at, z.reserved_at, z.missing_since, z.drain_started_at, z.not_before) > t
      or z.deadline_at > last_tick or z.timeout_at > t + make_interval(secs => z.timeout_s))
    order by z.id for no key update skip locked));
  -- Where a job was claimed before, due_at is the end of a backoff or of a process.
  update gangq.live_jobs j set claimed_at = gangq.moved(j.claimed_at, t, by),
    told_at = gangq.moved(j.told_at, t, by),
    deadline_at = gangq.moved(j.deadline_at, last_tick, by),
    due_at = gangq.moved(j.due_at, last_tick, by)
  where j.id = any (array(
    select z.id from gangq.live_jobs z
    where z.claimed_at > t or z.told_at > t or z.deadline_at > last_tick
      or z.due_at > last_tick and z.claimed_at is not null
    order by z.id for no key update skip locked));
  update gangq.device_holds h set until = h.until - by
  where h.device_id = any (array(
    select z.device_id from gangq.device_holds z
    where z.until > last_tick order by z.device_id for update skip locked));
  update gangq.progress p set beat_at = gangq.moved(p.beat_at, t, by),
    step_at = gangq.moved(p.step_at, t, by), lags_since = gangq.moved(p.lags_since, t, by)
  where p.job_id = any (array(
    select z.job_id from gangq.progress z
    where z.beat_at > t order by z.job_id for update skip locked));
  update gangq.verdicts v set since = v.since - by
  where (v.kind_id, v.ask) in (
    select z.kind_id, z.ask from gangq.verdicts z
    where z.since > t order by z.kind_id, z.ask for update skip locked);
end $$;

-- Internal, for move_back: what stands for a time, or is to be delivered.
create function gangq.move_stored_back(by interval, t timestamptz) returns void language sql as $$
  -- A key has no moment at which it was given, but its job has: one given since stays.
  update gangq.unique_keys k set kept_until = k.kept_until - by
  where (k.key, k.task, k.queue, k.login) in (
    select z.key, z.task, z.queue, z.login
    from gangq.unique_keys z
    where z.kept_until > t and exists (
      select from gangq.live_jobs j where j.id = z.job_ids[1] and j.submitted_at > t
      union all
      select from gangq.history h where h.job_id = z.job_ids[1] and h.submitted_at > t)
    order by z.key, z.task, z.queue, z.login for update skip locked);
  update gangq.shapes s set added_at = s.added_at - by
  where s.id = any (array(
    select z.id from gangq.shapes z
    where z.added_at > t order by z.id for no key update skip locked));
  update gangq.outbox o set due_at = o.due_at - by
  where (o.target_id, o.id) in (
    select z.target_id, z.id from gangq.outbox z
    where z.due_at > t and z.dead_at is null order by z.target_id, z.id for update skip locked);
$$;

-- Internal, for move_back: what services wait for.
create function gangq.move_services_back(
  by interval, t timestamptz, last_tick timestamptz
) returns void language sql as $$
  update gangq.services_table s set next_try_at = s.next_try_at - by
  where s.name = any (array(
    select z.name from gangq.services_table z
    where z.next_try_at > t order by z.name for no key update skip locked));
  -- The last one that was good is the one to go back to.
  update gangq.service_revisions v set good_at = v.good_at - by
  where (v.service, v.revision) in (
    select z.service, z.revision from gangq.service_revisions z
    where z.good_at > t order by z.service, z.revision for no key update skip locked);
  update gangq.service_gangs_table k set ready_at = gangq.moved(k.ready_at, t, by),
    stop_at = gangq.moved(k.stop_at, last_tick, by)
  where k.gang_id = any (array(
    select z.gang_id from gangq.service_gangs_table z
    where z.ready_at > t or z.stop_at > last_tick
    order by z.gang_id for no key update skip locked));
  update gangq.scaling_table x set since = x.since - by, due_at = x.due_at - by
  where x.service = any (array(
    select z.service from gangq.scaling_table z
    where z.since > t order by z.service for no key update skip locked));
  update gangq.replicas r set since = gangq.moved(r.since, t, by),
    load_at = gangq.moved(r.load_at, t, by)
  where r.job_id = any (array(
    select z.job_id from gangq.replicas z
    where z.since > t or z.load_at > t order by z.job_id for update skip locked));
$$;
