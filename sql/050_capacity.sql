-- What workers have free, counted from what they hold: no counters that could drift.
-- Takes no locks: whoever takes capacity locks the worker row first.

-- Reserved, running and preempting all count as used. Plain solo jobs share a slot up to the worker's prefetch.
create function gangq.free_capacity(incarnations bigint[], from_token bigint default 0)
returns table (incarnation bigint, slots integer, plain_room integer, memory_mb bigint, cpus numeric, device_ids bigint[], vrams integer[], first_token bigint)
language sql stable as $$
  select i.id,
    (i.slots - u.whole - ceil(u.plain::numeric / i.prefetch))::integer,
    ((i.slots - u.whole) * i.prefetch - u.plain)::integer,
    i.memory_mb - u.memory_mb, i.cpus - u.cpus, d.ids, d.vrams, u.first_token
  from gangq.incarnations i
  cross join lateral (
    select count(*) filter (where not s.plain or j.gang_id is not null) as whole,
      count(*) filter (where s.plain and j.gang_id is null) as plain,
      coalesce(sum(s.memory_mb), 0)::bigint as memory_mb, coalesce(sum(s.cpus), 0) as cpus,
      min(j.token) as first_token
    from (
      select x.shape_id, x.gang_id, x.token from gangq.live_jobs x where x.incarnation = i.id and x.token is null
      union all
      select x.shape_id, x.gang_id, x.token from gangq.live_jobs x where x.incarnation = i.id and x.token >= free_capacity.from_token) j
    join gangq.shapes s on s.id = j.shape_id) u
  cross join lateral (
    select coalesce(array_agg(r.id order by r.vram_mb, r.index, r.id), '{}') as ids,
      coalesce(array_agg(r.vram_mb order by r.vram_mb, r.index, r.id), '{}') as vrams
    from gangq.device_registry r
    where r.offered_by = i.id and not exists (select 1 from gangq.device_holds h where h.device_id = r.id)) d
  where i.id = any (free_capacity.incarnations)
$$;
comment on function gangq.free_capacity is
  'Internal. Per incarnation: free slots, room for plain solo jobs, memory, CPUs, free devices with their memory, smallest '
  'first, and the lowest token it holds. from_token: below it nothing is held any more, which the caller has to know.';

create function gangq.capacity_of(incarnations bigint[])
returns table (incarnation bigint, slots integer, plain_room integer, memory_mb bigint, cpus numeric, device_ids bigint[], vrams integer[])
language sql stable rows 1 as $$
  select f.incarnation, f.slots, f.plain_room, f.memory_mb, f.cpus, f.device_ids, f.vrams
  from gangq.free_capacity(incarnations) f
$$;
comment on function gangq.capacity_of is
  'free_capacity for views, which ask for one worker at a time: whoever reads a view calls its functions with his own rights. The verbs use the plain one, which is inlined.';

create function gangq.serves(i gangq.incarnations, s gangq.shapes) returns boolean language sql stable
return s.queue = any (i.queues) and (i.tasks is null or s.task = any (i.tasks)) and s.labels <@ i.labels
    and case when s.selects is null then i.taints = '{}'
      else coalesce(jsonb_path_match(i.labels, s.selects, jsonb_build_object('host', i.host, 'worker', i.name, 'taints', i.taints), true), false) end;
comment on function gangq.serves is
  'Internal. Whether this worker is for jobs of this shape at all, free or not: queue, task, labels, selector, and every '
  'taint of it tolerated.';

create function gangq.fleet(known boolean) returns setof gangq.incarnations language sql stable as $$
  select i.* from gangq.incarnations i
  where i.ended_at is null or (fleet.known
    and i.ended_at > (select gangq.now() - c.incarnation_retention from gangq.settings c)
    and not exists (select 1 from gangq.incarnations later where later.name = i.name and later.id > i.id))
$$;
comment on function gangq.fleet is
  'Internal. The live workers; known: also those that have ended, by their latest incarnation, as long as it is kept.';

-- A device that nobody offers is counted with the last incarnation that saw it.
create function gangq.devices_of(incarnation bigint, ended boolean) returns table (id bigint, vram_mb integer) language sql stable as $$
  select r.id, r.vram_mb from gangq.device_registry r where r.offered_by = devices_of.incarnation
  union all
  select r.id, r.vram_mb from gangq.device_claimants c join gangq.device_registry r on r.id = c.device_id
  where devices_of.ended and c.incarnation = devices_of.incarnation and r.offered_by is null
    and not exists (select 1 from gangq.device_claimants later where later.device_id = r.id and later.incarnation > c.incarnation)
$$;
comment on function gangq.devices_of is 'Internal. The devices of a worker; ended: those it had.';
