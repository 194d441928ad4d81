-- trip: a watchdog stops a job, in one statement; what follows for its job, gang, worker and
-- devices.
-- Locks: the gang, its members or the job, the row 'brake' of lock_rows, the worker's row; then
-- other jobs of the worker with skip locked. The caller of trip is dying and has two seconds.
--
-- A process that trips is gone exit_in_s later, and its job must not run again before that:
-- 1. trip sets exits_at of the incarnation. A single job becomes scheduled with ran_on = the
--    incarnation and due_at = exits_at (end_attempt, 084); a gang has not_before >= exits_at
--    (resumes_at, 101).
-- 2. Proof of death makes these jobs pending (report_dead, 040). A process that cannot be killed
--    postpones exits_at, and due_at and not_before with it (report_stuck, 109). Both find the jobs
--    by waits_for_exit (040). Nothing else moves due_at: submit_unique replaces no job that has
--    been claimed, and set_priority changes its place alone.
-- 3. A job that has ended meanwhile and is retried waits as in 1 (retry, 106).

-- Internal. Raises GQ001 for arguments that no trip has.
create function gangq.check_trip(code integer, class text, error jsonb, exit_in_s real) returns void
language plpgsql stable as $$
begin
  if not exists (select from gangq.trip_classes k where k.trips and k.code = check_trip.code) then
    perform gangq.refuse('GQ001',
      format('code is %s; no watchdog trips with that', coalesce(check_trip.code::text, 'null')),
      'The codes are ' || string_agg(k.code || ' ' || k.class, ', ') || '.')
    from gangq.trip_classes k where k.trips and k.code is not null;
  elsif not exists (select from gangq.trip_classes k where k.trips and k.class = check_trip.class)
  then
    perform gangq.refuse('GQ001', format('class is %L', check_trip.class),
      'Leave it null for that of the code; notify_only knows ' || string_agg(k.class, ', ') || '.')
    from gangq.trip_classes k where k.notify;
  elsif not (exit_in_s >= 0 and exit_in_s <= 600) then
    perform gangq.refuse('GQ001', format('exit_in_s is %s', exit_in_s),
      'Seconds within which this process is gone whatever happens, 600 at most; '
      'null: the work is dead already and the worker lives on.');
  elsif jsonb_typeof(error) is distinct from 'object' then
    perform gangq.refuse('GQ001', 'a trip needs its error as a JSON object',
      'For example {"type": "Stalled", "message": "no step for 130 s"}.');
  end if;
end $$;

-- Internal, for trip. Whether the brake holds it. Wall clock, faults and dead interpreters are
-- facts. A stall and an idle device are conclusions, and conclusions about a whole fleet can be
-- wrong at once. The test of the brake and its record are one critical section: without the lock a
-- whole fleet could trip before the first trip is counted.
create function gangq.held_back(j gangq.live_jobs, class text, evidence jsonb) returns boolean
language plpgsql set lock_timeout = '1s' as $$
begin
  if not gangq.may_be_held(class) then
    return false;
  end if;
  begin
    perform from gangq.lock_rows l where l.name = 'brake' for update;
  exception when lock_not_available then
    null;  -- another trip is left open: go on without the lock, because time is short
  end;
  return gangq.braking(j, class, evidence, gangq.now());
end $$;

-- Internal, for trip. Whether this attempt has tripped before: only then is a trip repeated. For a
-- process whose job ended otherwise a moment ago it is a false alarm, and refused. Raises GQ001,
-- GQ002, GQ003.
create function gangq.has_tripped(
  j gangq.live_jobs, incarnation bigint, job_id bigint, token bigint
) returns boolean language plpgsql as $$
begin
  if (j.token = has_tripped.token) is not true then
    if exists (
      select 1 from gangq.events e
      where e.job_id = has_tripped.job_id and e.kind = 'trip' and e.token = has_tripped.token) then
      return true;
    end if;
    perform gangq.refuse_stale(has_tripped.job_id, has_tripped.token);
  elsif j.incarnation is distinct from has_tripped.incarnation then
    perform gangq.refuse('GQ001',
      format('job %s runs on incarnation %s, not %s', j.id, j.incarnation,
        coalesce(has_tripped.incarnation::text, 'null')),
      'A worker trips its own claims only: pass the incarnation that register_worker returned.');
  end if;
  return false;
end $$;

-- 1. Lock the job. A call that is repeated changes nothing.
-- 2. Describe the trip, for its event.
-- 3. Ask whether the job goes on: its class only notifies, or the brake holds the trip. Work that
--    is dead, or was told to stop, cannot go on; a class that only notifies blames no device then.
-- 4. If it goes on, write that down, and answer so. Otherwise carry the trip out.
--
-- A watchdog stops a job, in one statement. The event and its evidence are written. A single job
-- goes to the front of its priority with a trip counted and its attempt given back, or fails when
-- its trips are spent; a member is lost with cause trip (lose_members). code: the exit code.
-- exit_in_s null: the work is proven dead (a command's process tree) and the worker lives on.
-- Otherwise the whole worker process is gone within so many seconds (a kernel timer was armed
-- before this call): its incarnation ends now, its other jobs go back uncharged, the job is due
-- again when the process is gone, and its devices are withheld until that is proven (report_dead)
-- or its lease would have ended. devices: the devices to blame, of those that the job holds; 85
-- quarantines them, 78 and 85 keep the job away from them. evidence: what was seen; {"application":
-- true} when the driver lays a fault to the application. class: as notify_only knows it, by default
-- the class of the code. Returns pending, scheduled, failed, preempted, cancelled (it had been
-- cancelled), notify or held (nothing was stopped: go on), repeated. Work that is dead (exit_in_s
-- null) or was told to stop cannot go on and never gets notify or held: ask suspect before killing
-- it. When its class only notifies it is ended and charged all the same, the event says so, and no
-- device is blamed. Raises GQ001, GQ002, GQ003, 42501.
create function gangq.trip(
  incarnation bigint, job_id bigint, token bigint, code integer, error jsonb,
  evidence jsonb default '{}', devices text[] default '{}', exit_in_s real default null,
  class text default null
) returns text language plpgsql as $$
declare
  t timestamptz;  -- under the locks: the process is gone exit_in_s after the call was sent
  of_code gangq.trip_classes;
  why text;
  data jsonb;
  j gangq.live_jobs;
  blamed bigint[];
  can_go_on boolean;
  answer text;
begin
  select k.* into of_code from gangq.trip_classes k where k.code = trip.code;
  trip.class := coalesce(trip.class, of_code.class);
  perform gangq.check_trip(trip.code, trip.class, trip.error, trip.exit_in_s);
  why := coalesce(trip.error ->> 'type', of_code.class);
  trip.error := gangq.cut(trip.error, gangq.most_said());
  -- 1. host: after a worker is gone, the restarter of its host reports what it left there.
  j := gangq.lock_job(trip.job_id, trip.token, host => true);
  if gangq.has_tripped(j, trip.incarnation, trip.job_id, trip.token) then
    return 'repeated';
  end if;
  -- 2.
  blamed := (
    select coalesce(array_agg(r.id) filter (where r.uuid = any (trip.devices)), array_agg(r.id),
      '{}')
    from gangq.device_holds h join gangq.device_registry r on r.id = h.device_id
    where h.job_id = j.id);
  data := jsonb_build_object('code', trip.code, 'class', trip.class, 'message',
    trip.error ->> 'message', 'trips', j.trips, 'exit_in_s', trip.exit_in_s,
    'application', coalesce(trip.evidence ->> 'application' = 'true', false),
    'blamed', gangq.uuids_of(blamed));
  -- 3.
  can_go_on := trip.exit_in_s is not null and j.state <> 'preempting';
  if not gangq.only_notifies(j.shape_id, trip.class) then
    if can_go_on and of_code.held and gangq.held_back(j, trip.class, trip.evidence) then
      answer := 'held';
    end if;
  elsif can_go_on then
    answer := 'notify';
  else
    data := data || '{"notify_only": true, "blamed": []}';
    blamed := '{}';
  end if;
  -- 4.
  t := gangq.now();
  if answer is not null then
    perform gangq.log_with_evidence(t, answer, j, why,
      data || jsonb_build_object('outcome', answer), trip.evidence);
    return answer;
  end if;
  return gangq.carry_out_trip(j, data, why, trip.error, trip.evidence, blamed, t);
end $$;

-- What becomes of the job follows from the rules by which carry_out_trip frees it: state_after of a
-- single job, cause_charged of a member.
--
-- Internal, for carry_out_trip. What its event says of a trip before that is carried out: culprit
-- (null: not known) and, of a gang that stands still, a sentence about it; what the job is charged,
-- and its state after.
create function gangq.foresee_trip(
  j gangq.live_jobs, class text, place text, gone_at timestamptz,
  out culprit bigint, out sentence text, out charge text, out outcome text
) language plpgsql as $$
begin
  culprit := j.id;
  charge := 'nothing';
  if j.gang_id is not null and j.state = 'running' and gangq.may_be_held(class)
    and gangq.all_stand_still(j) then
    select w.job_id, w.sentence into culprit, sentence
    from gangq.who_stopped(j.gang_id, j.id, place) w;
  end if;
  if j.state = 'running' and culprit = j.id then
    charge := gangq.charge_of_trip(j);
  elsif j.gang_id is null then
    charge := (gangq.cause_named(j.stop_reason)).member;
  end if;
  outcome := case
    when j.gang_id is not null then 'preempted'
    when j.stop_reason = 'cancel' then 'cancelled'
    else gangq.state_after(j.state, gangq.spends_job(j, charge), gone_at) end;
end $$;

-- Internal, for carry_out_trip. Frees the job that tripped. new_shape: the devices that it, or its
-- gang, avoids from now on are in it. culprit: the member that is charged, if it is known. Returns
-- as trip.
create function gangq.free_tripped(
  j gangq.live_jobs, new_shape integer, culprit bigint, error jsonb, why text,
  gone_at timestamptz, t timestamptz
) returns text language plpgsql as $$
begin
  -- First, because a gang that ends here takes its shape into history, where retry finds it.
  if j.gang_id is null then
    j.shape_id := new_shape;
  elsif new_shape <> j.shape_id then
    perform gangq.change_shape(array[j.gang_id], j.shape_id, new_shape);
  end if;
  if j.state = 'preempting' then
    return gangq.stopped(j, error, t, gone_at => gone_at);
  elsif j.gang_id is not null then
    perform gangq.lose_members(j.gang_id, array[j.id], array_remove(array[culprit], null), 'trip',
      error, why, t);
    return 'preempted';
  end if;
  j.order_key := gangq.front_key(j.priority);
  return gangq.end_attempt(j, 'trip', error, why, t, gone_at);
end $$;

-- Why each step stands before the next one:
-- 1. Decide who is charged and which devices the job avoids. The worker still counts as live,
--    because its next start offers its other devices again.
-- 2. Write the trip down. The event names the devices that the job holds until step 3. Poison and
--    the quarantine count this event, and a job that is poison counts against no device.
-- 3. Quarantine the devices to blame. Step 4 withholds all others, and only for a while.
-- 4. End the worker, which sets exits_at; then withhold the devices of the job until then. Step 5
--    would give them back, and complete_drain reads exits_at: no member is placed again while the
--    old process may run.
-- 5. Free the job.
-- 6. Free the other jobs of the worker. Before step 5 the tripped job would be freed as one of
--    them, uncharged.
--
-- Internal, for trip: it is not held. data: of its event. Returns as trip.
create function gangq.carry_out_trip(
  j gangq.live_jobs, data jsonb, why text, error jsonb, evidence jsonb, blamed bigint[],
  t timestamptz
) returns text language plpgsql as $$
declare
  code integer := data ->> 'code';
  exit_in_s real := data ->> 'exit_in_s';
  devices text := (
    select k.devices from gangq.trip_classes k where k.code = (data ->> 'code')::integer);
  faulty boolean := devices = 'faulty' and not (data ->> 'application')::boolean;
  me gangq.incarnations;  -- null: the worker lives on
  gone_at timestamptz;
  foreseen record;
  outcome text;
  new_shape integer := j.shape_id;
begin
  -- 1.
  if exit_in_s is not null then
    select i.* into me from gangq.incarnations i where i.id = j.incarnation for no key update;
    -- An incarnation that has ended already: another trip says when its process is gone (exits_at),
    -- or nothing is to be waited for.
    gone_at := case
      when me.ended_at is null then t + make_interval(secs => exit_in_s)
      when me.exits_at > t then me.exits_at end;
  end if;
  foreseen := gangq.foresee_trip(j, data ->> 'class', evidence ->> 'place', gone_at);
  if devices in ('avoided', 'faulty') and blamed <> '{}' then
    new_shape := gangq.shape_after_trip(j, blamed, faulty);
  end if;
  -- 2.
  perform gangq.log_with_evidence(t, 'trip', j, why,
    data || jsonb_build_object('outcome', foreseen.outcome,
      'charged', foreseen.culprit is not distinct from j.id,
      'trips', (gangq.charge_job(j, foreseen.charge)).trips)
    || case when foreseen.sentence is null then '{}'
      else jsonb_build_object('gang', foreseen.sentence) end, evidence);
  perform gangq.note_poison(j, t);
  -- 3.
  perform gangq.quarantine_blamed(j, blamed, faulty, why, error ->> 'message', t);
  -- 4.
  if me.id is not null then
    perform gangq.end_tripped(me, j, code, gone_at, t);
    perform gangq.withhold_doubtful(j, t);
  end if;
  -- 5.
  error := error || jsonb_build_object('code', code);
  outcome := gangq.free_tripped(j, new_shape, foreseen.culprit, error,
    coalesce(foreseen.sentence, why), gone_at, t);
  -- 6.
  if me.id is not null then
    perform gangq.free_orphans(array[me.id]);
  end if;
  -- The next tick has to know when the job becomes due.
  perform gangq.wake_tick(true);
  return outcome;
end $$;

-- Internal, for trip. The job's incarnation, whose process exits, ends; prefetched jobs are free at
-- once.
create function gangq.end_tripped(
  me gangq.incarnations, j gangq.live_jobs, code integer, gone_at timestamptz, t timestamptz
) returns void language plpgsql as $$
begin
  if me.ended_at is not null then
    return;
  end if;
  perform gangq.end_incarnation(me.id, 'dead', t);
  update gangq.incarnations i
    set exits_at = gone_at, exit_code = end_tripped.code, flagged_at = null
  where i.id = me.id
  returning i.* into me;
  -- Of prefetched jobs only the oldest can have begun.
  perform gangq.free_orphaned_job(x.id, me, 2, t)
  from (
    select y.id from gangq.live_jobs y where y.incarnation = me.id and y.light
    order by y.token offset 1) x
  where me.prefetch > 1 and x.id <> j.id;
end $$;

-- Internal, for trip. A job that tripped on two hosts is at fault itself: one event, after which
-- device_trips does not count it.
create function gangq.note_poison(j gangq.live_jobs, t timestamptz) returns void
language plpgsql as $$
declare
  hosts jsonb := (
    select jsonb_agg(distinct e.data ->> 'host') from gangq.events e
    where e.job_id = j.id and e.kind = 'trip' and e.data ->> 'host' is not null
      and e.data -> 'charged' is distinct from 'false');
begin
  if jsonb_array_length(hosts) > 1
    and not exists (select 1 from gangq.events e where e.job_id = j.id and e.kind = 'poison')
  then
    perform gangq.log_job(t, 'poison', j,
      'it tripped on two hosts: the job is at fault, not the devices',
      jsonb_build_object('hosts', hosts));
  end if;
end $$;
