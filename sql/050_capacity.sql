-- What workers have free, counted from what they hold: no counters that could drift.
-- Takes no locks: whoever takes capacity locks the worker row first.
--
-- Two lanes. A single job is light where it asks for a turn and nothing that is counted; any worker
-- that serves it takes it. Everything else is placed by a decision. A worker has slots for placed
-- work and light slots, and neither lane takes the other's. The lane is a property of the shape and
-- of its queue, and stored nowhere: a limit on a queue changes one row, not each job in it.

-- Internal. Queues with a limit or a fair order: single jobs in them, and below them, are placed.
-- Each with a dot: it begins the names of those below.
create function gangq.placed_queues() returns text[] language plpgsql stable as $$
begin
  return array(select q.name || '.' from gangq.queues_table q where q.limited or q.policy = 'fair');
end $$;

-- Internal. Whether single jobs of this shape are placed; if not, they are light. Inlined, because
-- claims ask it of each shape.
create function gangq.is_placed(s gangq.shapes, placed_queues text[]) returns boolean
language sql immutable
return not (s).plain or (s).model is not null or ((s).queue || '.') ^@ any (placed_queues);

-- Internal. Whether a single job waits to be placed.
create function gangq.single_waits() returns boolean
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return exists (
    select 1
    from gangq.pending_shapes p join gangq.shapes s on s.id = p.shape_id
    cross join (select gangq.placed_queues() as names offset 0) q
    where gangq.is_placed(s, q.names));
end $$;

-- Internal. Whether anything waits to be placed.
create function gangq.placed_waits() returns boolean
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return exists (select 1 from gangq.live_gangs g where g.state = 'blocked')
    or gangq.single_waits();
end $$;

-- Internal. This queue, or the nearest one above it, if it is paused; null: none is.
create function gangq.paused_queue(queue text) returns text language plpgsql stable as $$
begin
  return (
    select q.name from gangq.queues_table q
    where q.paused and gangq.below(paused_queue.queue, array[q.name])
    order by length(q.name) desc limit 1);
end $$;

-- Internal. Per incarnation: free slots for placed work, light jobs it may still take, memory,
-- CPUs, and free devices with their memory, smallest first. Reserved, running and preempting jobs
-- count, and so do open places that nobody sits in.
create function gangq.free_capacity(incarnations bigint[])
returns table (
  incarnation bigint, slots integer, light integer, memory_mb bigint, cpus numeric,
  device_ids bigint[], vrams integer[]
) language sql stable as $$
  select i.id, (i.slots - u.placed)::integer, (i.light * i.prefetch - u.light)::integer,
    i.memory_mb - u.memory_mb, i.cpus - u.cpus, d.ids, d.vrams
  from gangq.incarnations i
  cross join lateral (
    select count(*) filter (where not h.light) as placed, count(*) filter (where h.light) as light,
      coalesce(sum(s.memory_mb), 0)::bigint as memory_mb, coalesce(sum(s.cpus), 0) as cpus
    from (
      select j.shape_id, j.light from gangq.live_jobs j where j.incarnation = i.id
      union all
      select p.shape_id, false from gangq.places p
      where p.incarnation = i.id and p.job_id is null) h
    join gangq.shapes s on s.id = h.shape_id) u
  cross join lateral (
    select coalesce(array_agg(r.id order by r.vram_mb, r.index, r.id), '{}') as ids,
      coalesce(array_agg(r.vram_mb order by r.vram_mb, r.index, r.id), '{}') as vrams
    from gangq.device_registry r
    where r.offered_by = i.id
      and not exists (select 1 from gangq.device_holds h where h.device_id = r.id)) d
  where i.id = any (free_capacity.incarnations)
$$;

-- free_capacity for views, which ask for one worker at a time: a view calls functions with the
-- rights of its reader. The verbs use free_capacity, which is inlined.
create function gangq.capacity_of(incarnations bigint[])
returns table (
  incarnation bigint, slots integer, light integer, memory_mb bigint, cpus numeric,
  device_ids bigint[], vrams integer[]
) language sql stable rows 1 as $$
  select f.* from gangq.free_capacity(incarnations) f
$$;

-- Internal. What keeps each live worker, or each of these, from taking work now; null: nothing. One
-- rule for claims, boards and explanations. Of several reasons the first is said: what
-- people have to end comes before what ends by itself.
create function gangq.barred(t timestamptz, among bigint[] default null)
returns table (incarnation bigint, why text) language sql stable as $$
  select i.id, case
      when i.quarantined is not null then 'quarantined'
      when i.host = any (c.hosts) or i.name = any (c.workers) then 'cordoned'
      when i.state <> 'live' then 'draining'
      when l.renewed_at <= c.heard_since then 'silent'
      when i.passed_over_until > barred.t then 'passed over' end
  from gangq.incarnations i
  join gangq.leases l on l.incarnation = i.id
  cross join (
    select barred.t - make_interval(secs => s.candidate_silence_s) as heard_since,
      array(select x.name from gangq.cordons x where x.kind = 'host') as hosts,
      array(select x.name from gangq.cordons x where x.kind = 'worker') as workers
    from gangq.settings s
    offset 0) c
  where i.ended_at is null and (barred.among is null or i.id = any (barred.among))
$$;

-- SQL, so that it is planned at each call: a plan that is kept would read all workers for one, and
-- one from when there was one worker would read all of them for each.
--
-- Internal. Workers, or those among these, that may be given work now.
create function gangq.candidates(t timestamptz, among bigint[] default null) returns bigint[]
language sql stable as $$
  select array(
    select b.incarnation
    from gangq.barred(candidates.t, candidates.among) b
    where b.why is null
    order by b.incarnation)
$$;

-- For views. The free slots for placed work of each worker that may be given work now. Open places
-- and seats that are kept for what others were told to stop for count as taken. Not free_capacity,
-- which reads the devices of each worker, too.
create function gangq.open_slots() returns table (incarnation bigint, slots integer)
language sql stable as $$
  select i.id, greatest(0, i.slots - h.held - coalesce(k.kept, 0))::integer
  from unnest(gangq.candidates(gangq.now())) as o(id)
  join gangq.incarnations i on i.id = o.id
  cross join lateral (
    select (
      select count(*) from gangq.live_jobs j where j.incarnation = i.id and not j.light) + (
      select count(*) from gangq.places p
      where p.incarnation = i.id and p.job_id is null) as held) h
  left join (
    select (s.value ->> 'worker')::bigint as incarnation,
      -- 0.2.0 wrote an element for each seat, without a number.
      sum(coalesce((s.value ->> 'slots')::integer, 1)) as kept
    from gangq.plans p cross join lateral jsonb_array_elements(p.seats) as s(value)
    where p.kept
    group by 1) k on k.incarnation = i.id
$$;

-- Internal. Whether this worker is for jobs of this shape at all, free or not.
create function gangq.serves(i gangq.incarnations, s gangq.shapes) returns boolean
language sql stable
return s.queue = any (i.queues)
  and (i.tasks is null or s.task = any (i.tasks))
  and s.labels <@ i.labels
  and case
    when s.selects is null then i.taints = '{}'
    else coalesce(jsonb_path_match(i.labels, s.selects,
      jsonb_build_object('host', i.host, 'worker', i.name, 'taints', i.taints), true), false) end;

-- Internal. How many jobs of this shape fit into so much. devices: those that suit them. least()
-- takes no notice of null: what is not asked for sets no limit.
create function gangq.room(
  s gangq.shapes, slots bigint, memory_mb bigint, cpus numeric, devices bigint
) returns bigint language sql immutable
return least(slots, memory_mb / nullif((s).memory_mb, 0), floor(cpus / nullif((s).cpus, 0))::bigint,
  devices / nullif((s).gpus, 0));

-- Internal. Of these free devices, smallest first, those that a job of this shape can use.
create function gangq.usable(s gangq.shapes, device_ids bigint[], vrams integer[]) returns bigint[]
language plpgsql immutable as $$
begin
  return array(
    select d.id from unnest(device_ids, vrams) with ordinality as d(id, vram, n)
    where d.vram >= (s).vram_mb and ((s).avoid is null or d.id <> all ((s).avoid)) order by d.n);
end $$;

-- Internal. Whether the devices chosen are what one job of this shape needs, and free.
create function gangq.suit(
  s gangq.shapes, chosen bigint[], device_ids bigint[], vrams integer[]
) returns boolean language plpgsql immutable as $$
begin
  return coalesce(cardinality(chosen) = (s).gpus and chosen <@ gangq.usable(s, device_ids, vrams)
    and (select count(distinct d.id) from unnest(chosen) as d(id)) = (s).gpus, false);
end $$;

-- Internal. Where a worker is, of this level of topology; null: it does not say; no level: empty.
create function gangq.domain_of(i gangq.incarnations, level text) returns text
language sql immutable
return case when level is null then '' when level = 'host' then i.host else i.labels ->> level end;

-- Internal. The live workers; known: also ended ones, by their latest incarnation that is kept.
create function gangq.fleet(known boolean) returns setof gangq.incarnations
language sql stable as $$
  select i.*
  from gangq.incarnations i
  where i.ended_at is null or (fleet.known
    and i.ended_at > (select gangq.now() - c.incarnation_retention from gangq.settings c)
    and not exists (
      select 1 from gangq.incarnations later where later.name = i.name and later.id > i.id))
$$;

-- Internal. The devices of a worker; ended: those it had. A device that nobody offers is counted
-- with the last incarnation that saw it.
create function gangq.devices_of(incarnation bigint, ended boolean)
returns table (id bigint, vram_mb integer) language sql stable as $$
  select r.id, r.vram_mb
  from gangq.device_registry r
  where r.offered_by = devices_of.incarnation
  union all
  select r.id, r.vram_mb
  from gangq.device_claimants c
  join gangq.device_registry r on r.id = c.device_id
  where devices_of.ended and c.incarnation = devices_of.incarnation and r.offered_by is null
    and not exists (
      select 1 from gangq.device_claimants later
      where later.device_id = r.id and later.incarnation > c.incarnation)
$$;
