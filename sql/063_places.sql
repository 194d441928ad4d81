-- Where single jobs may start. A place is room on a worker for one job of one shape, with its
-- devices. It counts as used capacity from its opening to its closing.
-- 1. A decision opens it (open_place, or apply_places in 067) and does not name a job.
-- 2. The worker's claim fills it with the first job of that shape (fill_places).
-- 3. When that job is done, the place is vacant (vacate); the same call may fill it again.
--    Where a rate counts starts it is closed instead: it was opened for one start.
-- 4. A pass renews it. Two ticks after the last renewal it is closed (close_places).
-- Locks: opening takes the worker's row, then queues with limits by name. Filling runs under the
-- worker's row and takes a place, then a pending job, both with skip locked. Vacating and closing
-- take places with skip locked; only a quarantine, which holds the worker's row, waits for them.

-- Opening -----------------------------------------------------------------------------------------

-- Internal. Whether jobs of this shape waited before their queue began to tell submitters apart. A
-- place of such a shape would count for no submitter. The next tick gives its jobs new shapes.
create function gangq.unparted(s gangq.shapes) returns boolean language sql stable
return (s).submitter is null and gangq.tells_apart((s).queue);

-- Internal. Why this worker, whose row is locked, has no place for such a job; null: it has.
create function gangq.no_room(
  me gangq.incarnations, s gangq.shapes, device_ids bigint[], t timestamptz
) returns text language plpgsql stable as $$
declare
  free record;
  hit jsonb;
begin
  if gangq.candidates(t, array[(me).id]) = '{}' then
    return 'the worker takes nothing now';
  elsif not gangq.serves(me, s) then
    return 'the worker does not serve it';
  elsif gangq.paused_queue((s).queue) is not null then
    return 'its queue is paused';
  elsif gangq.paused_task(-(s).id) is not null then
    return 'its task is paused';
  elsif gangq.unparted(s) then
    return 'its queue tells submitters apart, and the job is of no submitter''s shape yet';
  end if;
  select f.* into free from gangq.free_capacity(array[(me).id]) f;
  if gangq.room(s, free.slots, free.memory_mb, free.cpus, null) < 1 then
    return 'no room';
  elsif not gangq.suit(s, device_ids, free.device_ids, free.vrams) then
    return 'its devices are not free';
  end if;
  hit := gangq.limit_hit((s).queue, (s).limit_key, (s).submitter, 0, 1, (s).gpus, (s).memory_mb,
    (s).cpus);
  return case when hit is not null then format('%s uses %s %s of at most %s',
    gangq.limited_by(hit ->> 'queue', hit ->> 'key'), hit ->> 'used', hit ->> 'resource',
    hit ->> 'limit') end;
end $$;

-- Internal. The end of a place that is renewed now: two ticks from now.
create function gangq.place_until(t timestamptz) returns timestamptz language plpgsql stable as $$
begin
  return (
    select t + make_interval(secs => 2 * c.tick_s) from gangq.settings c);
end $$;

-- Internal. Whether the time of a place with this end is over. An end more than four ticks ahead
-- means that the clock was set back: the place's age is unknown.
create function gangq.is_over(until timestamptz, tick_s real, t timestamptz) returns boolean
language sql stable
return until <= t or until > t + make_interval(secs => 4 * tick_s);

-- Internal. Opens a place, for which no_room has found room, and wakes its worker.
create function gangq.add_place(
  me gangq.incarnations, s gangq.shapes, device_ids bigint[], min_priority integer,
  ends_by timestamptz, refills boolean, t timestamptz
) returns bigint language plpgsql as $$
declare
  opened bigint;
begin
  insert into gangq.places
    (incarnation, shape_id, device_ids, min_priority, ends_by, refills, until)
  values ((me).id, (s).id, device_ids, min_priority, ends_by, refills, gangq.place_until(t))
  returning id into opened;
  perform gangq.count_starts((s).queue, (s).limit_key, 1);
  insert into gangq.device_holds (device_id, kind, place_id, since)
  select d.id, 'place', opened, t from unnest(device_ids) as d(id);
  perform gangq.wake(array[(me).id], 'claim');
  return opened;
end $$;

-- Opens a place on a worker for single jobs of the kind of this one, and returns its number. The
-- worker's next claim fills it with the first job of that kind; when that one is done the next may
-- follow, where refills, until two ticks have passed. device_ids: its devices; null: the smallest
-- that do. min_priority: jobs of a lower one do not fill it. ends_by: nothing that could end later
-- fills it. Raises GQ001, GQ002, GQ004 (no room, a limit, a pause, a worker that takes nothing),
-- GQ005, GQ008.
create function gangq.open_place(
  incarnation bigint, job_id bigint, device_ids bigint[] default null,
  min_priority integer default -1000, ends_by timestamptz default null, refills boolean default true
) returns bigint language plpgsql as $$
declare
  t timestamptz := gangq.now();
  me gangq.incarnations;
  s gangq.shapes;
  devices bigint[];
  why text;
begin
  perform gangq.require_read_committed('open_place');
  perform gangq.check_moment('ends_by', open_place.ends_by);
  if (open_place.min_priority between -1000 and 1000 and open_place.refills is not null) is not true
  then
    perform gangq.refuse('GQ001', 'min_priority must be -1000 to 1000, and refills true or false',
      'Leave them out for -1000 and true.');
  end if;
  select z.* into s
  from gangq.live_jobs j join gangq.shapes z on z.id = j.shape_id
  where j.id = open_place.job_id and j.gang_id is null and j.state = 'pending';
  if not found then
    perform gangq.refuse('GQ002', format('job %s is no single job that waits', open_place.job_id),
      'Members of gangs are placed by reserve_gang.');
  end if;
  select i.* into me
  from gangq.incarnations i where i.id = open_place.incarnation for no key update;
  if not found or me.ended_at is not null then
    perform gangq.refuse_ended(open_place.incarnation);
  end if;
  devices := coalesce(open_place.device_ids, (
    select (gangq.usable(s, f.device_ids, f.vrams))[1:s.gpus]
    from gangq.free_capacity(array[me.id]) f));
  perform gangq.lock_limited(array[s.queue], array[s.limit_key]);
  why := gangq.no_room(me, s, devices, t);
  if why is not null then
    perform gangq.refuse('GQ004',
      format('no place for job %s on worker %s: %s', open_place.job_id, me.name, why),
      'Decide again on what gangq.board() shows.');
  end if;
  return gangq.add_place(me, s, devices, open_place.min_priority, open_place.ends_by,
    open_place.refills, t);
end $$;

-- Filling -----------------------------------------------------------------------------------------

-- Internal. Why this place must not be filled any more; null: it may. Checks again what may have
-- changed since the place was opened. Capacity cannot have: the place itself counts as used.
create function gangq.no_fill(
  me gangq.incarnations, p gangq.places, s gangq.shapes, t timestamptz
) returns text language plpgsql stable as $$
begin
  return case
    when gangq.is_over((p).until, (select c.tick_s from gangq.settings c), t)
      then 'its time is over'
    when gangq.paused_queue((s).queue) is not null then 'its queue is paused'
    when gangq.paused_task(-(s).id) is not null then 'its task is paused'
    when gangq.unparted(s) then 'its queue tells submitters apart by now'
    when (
      select count(*)
      from gangq.device_holds h join gangq.device_registry r on r.id = h.device_id
      where h.place_id = (p).id and r.offered_by = (p).incarnation) <> (s).gpus
      then 'a device is gone'
    -- A limit that others exceed counts only for resources that the job uses.
    when gangq.limit_hit((s).queue, (s).limit_key, (s).submitter, 0, null,
        case when (s).gpus = 0 then 0 end, case when (s).memory_mb = 0 then 0 end,
        case when (s).cpus = 0 then 0 end) is not null
      then 'a limit was lowered'
    when not gangq.serves(me, s) then 'the worker does not serve it any more'
  end;
end $$;

-- Internal, for fill_places. This job, which is locked, starts in this place.
create function gangq.start_in_place(
  p gangq.places, job_id bigint, request_id uuid, base bigint, t timestamptz
) returns void language plpgsql as $$
declare
  drawn constant bigint := gangq.new_token(base);
begin
  update gangq.live_jobs j set state = 'running', incarnation = p.incarnation, token = drawn,
    light = false, attempts = j.attempts + 1, claimed_at = t, due_at = null,
    devices = nullif(p.device_ids, '{}'), request_id = start_in_place.request_id
  where j.id = start_in_place.job_id;
  update gangq.device_holds h
  set kind = 'job', place_id = null, job_id = start_in_place.job_id, since = t
  where h.place_id = p.id;
  if p.refills then
    update gangq.places x set job_id = start_in_place.job_id, token = drawn where x.id = p.id;
  else
    delete from gangq.places x where x.id = p.id;
  end if;
end $$;

-- Internal. Fills the open places of a worker, whose row is locked, each with the first job of its
-- kind. Closes those that must not be filled any more; an event says why, unless no job waits.
-- Returns the jobs that run now.
create function gangq.fill_places(
  me gangq.incarnations, request_id uuid, most integer, base bigint, t timestamptz
) returns bigint[] language plpgsql as $$
declare
  p gangq.places;
  s gangq.shapes;
  head record;
  why text;
  started bigint[] := '{}';
  closed boolean := false;
begin
  for p in
    select x.* from gangq.places x
    where x.incarnation = (me).id and x.job_id is null order by x.id for update skip locked
  loop
    exit when cardinality(started) >= most;
    select z.* into s from gangq.shapes z where z.id = p.shape_id;
    why := gangq.no_fill(me, p, s, t);
    if why is null then
      select j.id, gangq.priority_of(j.order_key) as priority, j.budget_s into head
      from gangq.live_jobs j
      where j.shape_id = p.shape_id and j.state = 'pending'
      order by j.order_key limit 1 for update skip locked;
      -- A head that does not fit closes the place: nothing goes past it.
      why := case
        when head.id is null then ''
        when head.priority < p.min_priority
          then format('others of priority %s wait', p.min_priority)
        when p.ends_by < t + make_interval(
          secs => gangq.estimate_s(s.queue, s.task, s.gpus::integer, head.budget_s))
          then format('job %s could end after %s', head.id, p.ends_by) end;
    end if;
    if why is not null then
      perform gangq.close_places(array[p.id]);
      closed := true;
      if why <> '' then
        perform gangq.log_event(t, 'place_closed', incarnation => (me).id, reason => why,
          data => jsonb_build_object('queue', s.queue, 'task', s.task));
      end if;
      continue;
    end if;
    perform gangq.start_in_place(p, head.id, fill_places.request_id, base, t);
    started := started || head.id;
  end loop;
  if closed then
    perform gangq.wake_tick();
  end if;
  return started;
end $$;

-- Closing -----------------------------------------------------------------------------------------

-- Internal. These jobs are done. Where more jobs of their kind wait, their places become vacant and
-- keep the devices. Returns how many places. Only a job that is done leaves its place open. A job
-- that failed, tripped or was stopped may have left its device broken, so the next pass decides. A
-- place that a pass has locked is skipped. When no job of the kind waits, or a rate counts starts,
-- the devices are free at once, and the next pass or tick deletes the place.
create function gangq.vacate(job_ids bigint[], tokens bigint[], t timestamptz) returns integer
language plpgsql as $$
declare
  vacant constant bigint[] := array(
    select z.id
    from unnest(job_ids, tokens) as g(job_id, token)
    join gangq.places z on z.token = g.token and z.job_id = g.job_id
    join gangq.shapes s on s.id = z.shape_id
    cross join gangq.settings c
    where not gangq.is_over(z.until, c.tick_s, t)
      and not exists (select from gangq.rates_on(s.queue, s.limit_key))
      and exists (
        select 1 from gangq.live_jobs j where j.shape_id = z.shape_id and j.state = 'pending')
    for update of z skip locked);
begin
  update gangq.device_holds h set kind = 'place', place_id = p.id, job_id = null, since = t
  from gangq.places p
  where p.id = any (vacant) and h.device_id = any (p.device_ids) and h.job_id = p.job_id;
  update gangq.places p set job_id = null, token = null where p.id = any (vacant);
  return cardinality(vacant);
end $$;

-- Internal. Closes places. A vacant one gives its devices back at once; a job that runs in one
-- keeps its devices until it ends. waits: wait for places that a pass has locked.
create function gangq.close_places(ids bigint[], waits boolean default false) returns integer
language plpgsql as $$
declare
  closed bigint[];
begin
  if waits then
    perform from gangq.places p where p.id = any (ids) order by p.id for update;
  end if;
  closed := array(
    select p.id from gangq.places p where p.id = any (ids) order by p.id for update skip locked);
  delete from gangq.device_holds h where h.place_id = any (closed);
  delete from gangq.places p where p.id = any (closed);
  return cardinality(closed);
end $$;

-- Internal. Closes places that no pass has renewed for two ticks. Returns how many.
create function gangq.close_overdue() returns integer
language sql volatile as $$
  select gangq.close_places(array(
    select p.id
    from gangq.places p cross join gangq.settings c
    where gangq.is_over(p.until, c.tick_s, gangq.now())
    order by p.id limit 200))
$$;
