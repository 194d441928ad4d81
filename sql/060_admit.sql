-- Gangs are placed: decide reads, reserve_gang writes (062_reserve.sql), admit does both for whoever runs the tick.
-- Locks: the gang and its jobs, all with skip locked: what is busy now is tried again.

-- How many members of a shape each of these workers has room for.
create function gangq.members_that_fit(
  s gangq.shapes, free_slots integer, free_memory_mb bigint, free_cpus numeric, free_vrams integer[], free_ids bigint[]
) returns integer language sql immutable as $$
  select greatest(0, least(
    free_slots,
    case when s.memory_mb > 0 then free_memory_mb / s.memory_mb else free_slots end,
    case when s.cpus > 0 then floor(free_cpus / s.cpus) else free_slots end,
    case when s.gpus = 0 then free_slots
      when s.avoid is null then (select count(*) from unnest(free_vrams) v where v >= s.vram_mb) / s.gpus
      else (select count(*) from unnest(free_vrams, free_ids) as d(vram, id) where d.vram >= s.vram_mb and d.id <> all (s.avoid)) / s.gpus
    end))::integer
$$;
comment on function gangq.members_that_fit(gangq.shapes, integer, bigint, numeric, integer[], bigint[]) is
  'Internal. How many jobs of this shape fit into this much free capacity; devices are whole and never shared, and one '
  'it avoids is none.';

-- The packing rule. Fewest hosts: the largest first, but the last one is the tightest that still holds the rest, so
-- that a small gang does not break up a large host. Ranks are contiguous per host and per worker.
create function gangq.pack(size integer, workers bigint[], hosts text[], rooms integer[]) returns bigint[]
language sql immutable as $$
  with w as (
    select x.worker, x.host, x.room from unnest(workers, hosts, rooms) as x(worker, host, room) where x.room > 0
  ),
  h as (
    select w.host, sum(w.room) as room,
      sum(sum(w.room)) over (order by sum(w.room) desc, w.host) as upto
    from w group by w.host
  ),
  whole as (select h.host, h.room, h.upto from h where h.upto < size),
  rest as (
    select h.host, h.room from h
    where h.host not in (select whole.host from whole)
      and h.room >= size - coalesce((select max(whole.upto) from whole), 0)
    order by h.room, h.host limit 1
  ),
  chosen as (select host, room, 0 as last from whole union all select host, room, 1 from rest),
  seats as (
    select w.worker, row_number() over (order by c.last, c.room desc, w.host, w.room desc, w.worker, n) as seat
    from chosen c join w on w.host = c.host cross join lateral generate_series(1, w.room) n
  )
  select case when (select count(*) from rest) = 1 then
    (select array_agg(s.worker order by s.seat) from seats s where s.seat <= size) end
$$;
comment on function gangq.pack(integer, bigint[], text[], integer[]) is
  'Internal. The worker of each rank, or null when the rooms do not hold size members.';

-- Of gangs alike in shape and size the first stands for all: if it does not fit, none does. So what a pass reads grows
-- with the kinds of gangs that wait, not with their number, and no gang can hide behind others.
create function gangq.admissible(t timestamptz)
returns table (id bigint, size integer, priority smallint, order_key bigint, shape_id integer, queue text, policy text)
language sql stable as $$
  with recursive kinds(id) as (
    (select x.kind_id from gangq.live_gangs x where x.state = 'blocked' order by x.kind_id limit 1)
    union all
    select (select x.kind_id from gangq.live_gangs x where x.state = 'blocked' and x.kind_id > k.id order by x.kind_id limit 1)
    from kinds k where k.id is not null
  )
  select g.id, g.size, g.priority, g.order_key, g.shape_id, z.queue, q.policy
  from kinds k join gangq.gang_kinds z on z.id = k.id join gangq.queues_table q on q.name = z.queue
  cross join lateral (
    select x.* from gangq.live_gangs x
    where x.state = 'blocked' and x.kind_id = k.id and (x.not_before is null or x.not_before <= t)
    order by x.order_key limit 50) g
  where not q.paused
$$;
comment on function gangq.admissible(timestamptz) is
  'Internal. Gangs that wait to be placed and may be now: of each kind (shape and size) the first 50.';

create function gangq.decide(max_gangs integer default 200)
returns table (gang_id bigint, incarnations bigint[], earmark bigint[])
language plpgsql stable security definer set search_path = ''
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  cfg gangq.settings;
  g record;
  s gangq.shapes;
  ids bigint[]; hosts text[]; slots integer[]; memory bigint[]; cpus numeric[];
  vrams jsonb := '{}';  -- per worker, the free devices' memory, smallest first
  devices jsonb := '{}';  -- and which they are, for shapes that avoid some
  total_rooms integer[];
  rooms integer[];
  seats bigint[];
  unfit jsonb := '{}';  -- shape -> smallest size that did not fit in this pass
  held boolean := false;
  placed integer := 0;
  w record;
  left_vrams integer[];
  left_devices bigint[];
begin
  select x.* into cfg from gangq.settings x;
  select array_agg(f.incarnation order by f.incarnation), array_agg(i.host order by f.incarnation),
    array_agg(f.slots order by f.incarnation), array_agg(f.memory_mb order by f.incarnation),
    array_agg(f.cpus order by f.incarnation), jsonb_object_agg(f.incarnation, to_jsonb(f.vrams)),
    jsonb_object_agg(f.incarnation, to_jsonb(f.device_ids))
  into ids, hosts, slots, memory, cpus, vrams, devices
  from gangq.free_capacity(array(
    -- Only workers of queues in which a gang waits: what runs on the others is not even counted.
    select c.id from unnest(gangq.candidates(t)) as c(id) join gangq.incarnations i on i.id = c.id
    where i.queues && array(select distinct a.queue from gangq.admissible(t) a))) f
  join gangq.incarnations i on i.id = f.incarnation;
  if ids is null then
    return;
  end if;
  for g in
    select c.* from (
      select b.*, row_number() over (
        partition by b.queue, b.priority order by case b.policy when 'largest_first' then -b.size else 0 end, b.order_key) as turn
      from gangq.admissible(t) b) c
    order by c.priority desc, c.turn, c.order_key
  loop
    exit when placed >= decide.max_gangs;
    continue when (unfit ->> g.shape_id::text)::integer <= g.size;
    select x.* into s from gangq.shapes x where x.id = g.shape_id;
    select array_agg(case when gangq.serves(i, s) then gangq.members_that_fit(s, c.slots, c.memory_mb, c.cpus,
        array(select v::integer from jsonb_array_elements_text(vrams -> c.id::text) v),
        case when s.avoid is not null then array(select d::bigint from jsonb_array_elements_text(devices -> c.id::text) d) end) else 0 end order by c.id)
    into rooms
    from unnest(ids, slots, memory, cpus) as c(id, slots, memory_mb, cpus) join gangq.incarnations i on i.id = c.id;
    seats := gangq.pack(g.size, ids, hosts, rooms);
    if seats is null then
      unfit := unfit || jsonb_build_object(g.shape_id::text, g.size);
      -- The first gang that must wait keeps the workers it would get if they were idle: otherwise a stream of
      -- smaller work, each of it fitting at once, would starve it for ever.
      if not held then
        select array_agg(case when gangq.serves(i, s) then gangq.members_that_fit(s, i.slots, i.memory_mb, i.cpus, d.vrams, d.ids) else 0 end order by i.id)
        into total_rooms
        from unnest(ids) as c(id) join gangq.incarnations i on i.id = c.id
        cross join lateral (
          select coalesce(array_agg(r.vram_mb order by r.id), '{}') as vrams, array_agg(r.id order by r.id) as ids from gangq.device_registry r
          where r.offered_by = i.id and not exists (select 1 from gangq.device_holds h where h.device_id = r.id and h.kind = 'quarantine')) d;
        seats := gangq.pack(g.size, ids, hosts, total_rooms);
        if seats is not null then
          held := true;
          gang_id := g.id;
          incarnations := null;
          earmark := array(select distinct e from unnest(seats) e);
          return next;
          slots := array(select case when c.id = any (earmark) then 0 else c.free end
            from unnest(ids, slots) with ordinality as c(id, free, n) order by c.n);
        end if;
      end if;
      continue;
    end if;
    gang_id := g.id;
    placed := placed + 1;
    incarnations := seats;
    earmark := null;
    return next;
    for w in select e.id, count(*)::integer as members from unnest(seats) as e(id) group by e.id loop
      slots[array_position(ids, w.id)] := slots[array_position(ids, w.id)] - w.members;
      memory[array_position(ids, w.id)] := memory[array_position(ids, w.id)] - w.members * s.memory_mb;
      cpus[array_position(ids, w.id)] := cpus[array_position(ids, w.id)] - w.members * s.cpus;
      if s.gpus > 0 then
        -- The same rule as reserve_gang: the smallest devices that are large enough and not avoided.
        select coalesce(array_agg(v.vram order by v.n), '{}'), coalesce(array_agg(v.id order by v.n), '{}') into left_vrams, left_devices
        from (
          select e.vram, e.id, e.n, e.fits, count(*) filter (where e.fits) over (order by e.n) as nth
          from (
            select x.vram::integer as vram, x.id::bigint as id, x.n,
              x.vram::integer >= s.vram_mb and (s.avoid is null or x.id::bigint <> all (s.avoid)) as fits
            from rows from (jsonb_array_elements_text(vrams -> w.id::text), jsonb_array_elements_text(devices -> w.id::text))
              with ordinality as x(vram, id, n)) e) v
        where not v.fits or v.nth > w.members * s.gpus;
        vrams := jsonb_set(vrams, array[w.id::text], to_jsonb(left_vrams));
        devices := jsonb_set(devices, array[w.id::text], to_jsonb(left_devices));
      end if;
    end loop;
  end loop;
end $$;
comment on function gangq.decide(integer) is
  'What admit would do now, without doing it: gangs that fit, with the worker of each rank, and the first gang that '
  'must wait, with the workers kept for it. By priority, then the queue''s policy (queues take turns), then age; '
  'capacity is subtracted after each placement; a shape that did not fit is not tried again in the pass.';

create function gangq.candidates(t timestamptz) returns bigint[] language sql stable as $$
  select coalesce(array_agg(i.id), '{}')
  from gangq.incarnations i join gangq.leases l on l.incarnation = i.id cross join gangq.settings s
  where i.state = 'live' and i.quarantined is null and (i.passed_over_until is null or i.passed_over_until <= t)
    and l.renewed_at > t - make_interval(secs => s.candidate_silence_s)
$$;
comment on function gangq.candidates(timestamptz) is
  'Internal. Workers that may be given work now: live, heard lately, not quarantined, not passed over.';

-- Earmarks are a promise renewed by every pass, so what somebody has locked this moment (a caller cancelling that very
-- gang in an open transaction, a worker that is claiming) is left as it is: the tick waits for nobody.
create function gangq.keep_for(gang_id bigint, incarnations bigint[]) returns void language sql volatile as $$
  delete from gangq.earmarks e where e.incarnation = any (array(
    select z.incarnation from gangq.earmarks z
    where not exists (
      select 1 from gangq.live_gangs g
      where g.id = keep_for.gang_id and g.id = z.gang_id and g.order_key = z.order_key and z.incarnation = any (keep_for.incarnations))
    order by z.incarnation for update skip locked));
  insert into gangq.earmarks (incarnation, gang_id, order_key, until, slots)
  select i.id, g.id, g.order_key, 'infinity', 1
  from (select x.id, x.order_key from gangq.live_gangs x where x.id = keep_for.gang_id for key share skip locked) g
  cross join (
    select x.id from gangq.incarnations x where x.id = any (keep_for.incarnations) order by x.id for key share skip locked) i
  where not exists (select 1 from gangq.earmarks e where e.incarnation = i.id)
  on conflict (incarnation, gang_id) do nothing;
$$;
comment on function gangq.keep_for(bigint, bigint[]) is
  'Internal. Keeps exactly these workers for the first gang that must wait; null: for none.';

create function gangq.admit(max_gangs integer default 200) returns table (placed integer, again boolean)
language plpgsql security definer set search_path = '' set lock_timeout = '100ms' as $$
#variable_conflict use_column
declare
  d record;
  earmarked boolean := false;
begin
  perform gangq.require_read_committed('admit');
  placed := 0;
  again := false;
  for d in select x.* from gangq.decide(admit.max_gangs) x loop
    if d.incarnations is null then
      earmarked := true;
      perform gangq.keep_for(d.gang_id, d.earmark);
    else
      if not gangq.try_lock_gang(d.gang_id) or not exists (
        select 1 from gangq.live_gangs g where g.id = d.gang_id and g.state = 'blocked') then
        again := true;
      elsif gangq.reserve_gang(d.gang_id, d.incarnations) then
        placed := placed + 1;
      else
        again := true;
      end if;
    end if;
  end loop;
  if not earmarked then
    perform gangq.keep_for(null, '{}');
  end if;
  return next;
end $$;
comment on function gangq.admit(integer) is
  'Decides and applies: places every gang that fits. Run by the tick, one runner at a time, never in a submitter''s '
  'transaction. again: something was busy, ask again soon. Raises GQ008.';
