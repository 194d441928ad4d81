-- What if: gangq.decide on a board that was changed first. Nothing is written, so it also works on a standby.
-- Takes no locks. A change is a function from a board to a board.

-- Queues and gangs ---------------------------------------------------------------------------------------------------

create function gangq.change_queue(b gangq.board, change jsonb) returns gangq.board language plpgsql immutable as $$
declare
  q integer := array_position(b.queue_names, change ->> 'queue');
  wrong text;
begin
  select k.key into wrong from jsonb_object_keys(change) as k(key)
  where k.key <> all ('{queue,maximum,guaranteed,max_running_gangs,max_running_jobs,paused}'::text[]) limit 1;
  if found then
    perform gangq.refuse('GQ001', format('a change of a queue names %L', wrong), 'It takes queue, maximum, guaranteed, max_running_gangs, max_running_jobs and paused.');
  end if;
  if q is null then
    perform gangq.refuse('GQ002', format('queue %L does not exist', change ->> 'queue'), format('Queues: %s', array_to_string(b.queue_names, ', ')));
  end if;
  select k.name into wrong from (values ('maximum'), ('guaranteed')) as k(name)
  where change ? k.name and (jsonb_typeof(change -> k.name) <> 'object'
    or exists (select 1 from jsonb_each(case jsonb_typeof(change -> k.name) when 'object' then change -> k.name else '{}' end) r
      where r.key <> all ('{gpus,memory_mb,cpus,jobs}') or jsonb_typeof(r.value) <> 'number' or r.value::numeric < 0)) limit 1;
  if found then
    perform gangq.refuse('GQ001', format('%s of queue %s is %s', wrong, change ->> 'queue', change -> wrong),
      'It is an object like {"gpus": 8}, of gpus, memory_mb, cpus and jobs; {} is no limit.');
  end if;
  if change ? 'maximum' then
    b.queue_maximum[q] := nullif(change -> 'maximum', '{}');
  end if;
  if change ? 'guaranteed' then
    b.queue_guaranteed[q] := nullif(change -> 'guaranteed', '{}');
  end if;
  if change ? 'max_running_gangs' then
    b.queue_max_gangs[q] := (change ->> 'max_running_gangs')::integer;
  end if;
  if change ? 'max_running_jobs' then
    b.queue_max_jobs[q] := (change ->> 'max_running_jobs')::integer;
  end if;
  if (change ->> 'max_running_gangs')::integer < 0 or (change ->> 'max_running_jobs')::integer < 0
    or change ? 'paused' and (change ->> 'paused')::boolean is null then
    perform gangq.refuse('GQ001', format('queue %s: %s', change ->> 'queue', change - 'queue'),
      'max_running_gangs and max_running_jobs are 0 or more, null for no limit; paused is true or false.');
  end if;
  return b;
end $$;
comment on function gangq.change_queue is
  'Internal. The board with other limits of a queue; each object given replaces the one there is. Raises GQ001, GQ002.';

-- The board knows whether a queue is open, not which of those above it is paused: that is read once more.
create function gangq.change_paused(b gangq.board, paused jsonb) returns gangq.board language plpgsql stable as $$
#variable_conflict use_column
declare
  own boolean[] := array(
    select not coalesce((change_paused.paused ->> n.name)::boolean, q.paused)
    from unnest(b.queue_names) with ordinality as n(name, i) join gangq.queues_table q on q.name = n.name order by n.i);
begin
  -- The tree is in order of name: a parent comes before its children.
  for i in 1 .. cardinality(b.queue_names) loop
    b.queue_open[i] := own[i] and coalesce(b.queue_open[b.queue_parent[i]], true);
  end loop;
  return b;
end $$;
comment on function gangq.change_paused is
  'Internal. The board with these queues paused or not, by name; the others are as they are, below what is paused paused too.';

create function gangq.change_priority(b gangq.board, gang_id bigint, priority integer) returns gangq.board language plpgsql immutable as $$
declare
  n integer := array_position(b.gang_ids, change_priority.gang_id);
  unit integer := array_position(b.unit_ids, change_priority.gang_id);
begin
  if n is not null then
    b.gang_priority[n] := change_priority.priority;
    b.gang_order_key[n] := gangq.order_key(change_priority.priority, b.gang_order_key[n] & 1125899906842623);
  end if;
  if unit is not null then
    b.unit_priority[unit] := change_priority.priority;
  end if;
  return b;
end $$;
comment on function gangq.change_priority is 'Internal. The board with another priority of a gang that waits or is placed.';

create function gangq.without_gang(b gangq.board, gang_id bigint) returns gangq.board language plpgsql immutable as $$
declare
  n integer := array_position(b.gang_ids, without_gang.gang_id);
begin
  if n is null then
    return b;
  end if;
  b.gang_kind := b.gang_kind[: n - 1] || b.gang_kind[n + 1 :];
  b.gang_priority := b.gang_priority[: n - 1] || b.gang_priority[n + 1 :];
  b.gang_order_key := b.gang_order_key[: n - 1] || b.gang_order_key[n + 1 :];
  b.gang_submitter := b.gang_submitter[: n - 1] || b.gang_submitter[n + 1 :];
  b.gang_estimate := b.gang_estimate[: n - 1] || b.gang_estimate[n + 1 :];
  b.gang_missing := b.gang_missing[: n - 1] || b.gang_missing[n + 1 :];
  b.gang_anchor := b.gang_anchor[: n - 1] || b.gang_anchor[n + 1 :];
  b.gang_preempting := b.gang_preempting[: n - 1] || b.gang_preempting[n + 1 :];
  b.gang_ids := nullif(b.gang_ids[: n - 1] || b.gang_ids[n + 1 :], '{}');
  return b;
end $$;
comment on function gangq.without_gang is 'Internal. The board without a gang that waits.';

-- Workers and what is placed -----------------------------------------------------------------------------------------

create function gangq.order_workers(b gangq.board, kept integer[]) returns gangq.board language plpgsql immutable as $$
#variable_conflict use_column
declare
  n integer := cardinality(kept);
  levels integer := cardinality(b.levels);
  host_of text[] := array(select b.hosts[w.host] from unnest(b.worker_host) with ordinality as w(host, n) order by w.n);
  old_hosts text[] := b.hosts;
  place integer[] := array_fill(null::integer, array[coalesce(cardinality(b.worker_host), 0)]);
  devices integer[];
begin
  for i in 1 .. n loop
    place[kept[i]] := i;
  end loop;
  b.worker_ids := array(select b.worker_ids[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  b.worker_names := array(select b.worker_names[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  b.worker_open := array(select b.worker_open[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  b.worker_class := array(select b.worker_class[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  b.free_slots := array(select b.free_slots[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  b.free_memory := array(select b.free_memory[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  b.free_mcpus := array(select b.free_mcpus[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  b.all_slots := array(select b.all_slots[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  b.all_memory := array(select b.all_memory[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  b.all_mcpus := array(select b.all_mcpus[k.w] from unnest(kept) with ordinality as k(w, n) order by k.n);
  if b.worker_domains is not null then
    b.worker_domains := array(
      select b.worker_domains[(k.w - 1) * levels + l.n] from unnest(kept) with ordinality as k(w, n) cross join generate_series(1, levels) as l(n) order by k.n, l.n);
  end if;
  select array_agg(h.host order by h.first), array_agg(h.first order by h.first) || (n + 1) into b.hosts, b.host_first
  from (select host_of[k.w] as host, min(k.n)::integer as first from unnest(kept) with ordinality as k(w, n) group by host_of[k.w]) h;
  b.worker_host := array(select array_position(b.hosts, host_of[k.w]) from unnest(kept) with ordinality as k(w, n) order by k.n);
  devices := array(
    select d.n::integer from unnest(b.device_worker, b.device_vram) with ordinality as d(worker, vram, n)
    where place[d.worker] is not null order by place[d.worker], d.vram, d.n);
  b.device_ids := array(select b.device_ids[d.n] from unnest(devices) with ordinality as d(n, i) order by d.i);
  b.device_vram := array(select b.device_vram[d.n] from unnest(devices) with ordinality as d(n, i) order by d.i);
  b.device_held := array(select b.device_held[d.n] from unnest(devices) with ordinality as d(n, i) order by d.i);
  b.device_worker := array(select place[b.device_worker[d.n]] from unnest(devices) with ordinality as d(n, i) order by d.i);
  b.device_first := array(
    select (1 + coalesce(sum(d.devices) over (order by w.n rows between unbounded preceding and 1 preceding), 0))::integer
    from generate_series(1, n + 1) as w(n)
    left join (select x.w, count(*) as devices from unnest(b.device_worker) as x(w) group by x.w) d on d.w = w.n
    order by w.n);
  select array_agg(h.unit), array_agg(h.job), array_agg(place[h.worker]), array_agg(h.slots), array_agg(h.memory), array_agg(h.mcpus), array_agg(h.gpus), array_agg(h.ends)
  into b.held_unit, b.held_job, b.held_worker, b.held_slots, b.held_memory, b.held_mcpus, b.held_gpus, b.held_ends
  from (
    select x.* from unnest(b.held_unit, b.held_job, b.held_worker, b.held_slots, b.held_memory, b.held_mcpus, b.held_gpus, b.held_ends)
      as x(unit, job, worker, slots, memory, mcpus, gpus, ends)
    where place[x.worker] is not null order by x.unit, x.job, place[x.worker]) h;
  select array_agg(e.gang), array_agg(place[e.worker]), array_agg(e.slots), array_agg(e.memory), array_agg(e.mcpus), array_agg(e.gpus)
  into b.escrow_gang, b.escrow_worker, b.escrow_slots, b.escrow_memory, b.escrow_mcpus, b.escrow_gpus
  from (
    select x.* from unnest(b.escrow_gang, b.escrow_worker, b.escrow_slots, b.escrow_memory, b.escrow_mcpus, b.escrow_gpus)
      as x(gang, worker, slots, memory, mcpus, gpus)
    where place[x.worker] is not null order by x.gang, place[x.worker]) e;
  select array_agg(a.key order by a.key, a.host, a.gang), array_agg(a.host order by a.key, a.host, a.gang), array_agg(a.gang order by a.key, a.host, a.gang)
  into b.apart_keys, b.apart_hosts, b.apart_gangs
  from (
    select x.key, array_position(b.hosts, old_hosts[x.host]) as host, x.gang
    from unnest(b.apart_keys, b.apart_hosts, b.apart_gangs) as x(key, host, gang)) a
  where a.host is not null;
  return b;
end $$;
comment on function gangq.order_workers is
  'Internal. The board with these of its workers, in this order, in which those of a host are together.';

create function gangq.free_unit(b gangq.board, unit bigint) returns gangq.board language plpgsql stable as $$
#variable_conflict use_column
declare
  w integer;
  q integer;
  said text;
  u record;
  shared record;
  -- Surplus members are units of their own, as long as their gang is there.
  members bigint[] := array(select j.id from gangq.live_jobs j where j.gang_id = free_unit.unit);
begin
  -- Counted from what it holds anywhere, not only on workers of the board.
  select min(s.queue) as queue, min(j.submitter) as submitter, count(distinct j.gang_id) as gangs, count(*) as jobs, sum(s.gpus)::bigint as gpus,
    sum(s.memory_mb)::bigint as memory, (sum(s.cpus) * 1000)::bigint as mcpus
  into u
  from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
  where (j.gang_id = free_unit.unit or j.id = -free_unit.unit) and j.incarnation is not null;
  q := array_position(b.queue_names, u.queue);
  while q is not null loop
    b.used_gangs[q] := b.used_gangs[q] - u.gangs;
    b.used_jobs[q] := b.used_jobs[q] - u.jobs;
    b.used_gpus[q] := b.used_gpus[q] - u.gpus;
    b.used_memory[q] := b.used_memory[q] - u.memory;
    b.used_mcpus[q] := b.used_mcpus[q] - u.mcpus;
    said := q || '/' || u.submitter;
    if b.usage_submitters ? said then
      b.usage_submitters := b.usage_submitters || jsonb_build_object(said, jsonb_build_object(
        'gangs', (b.usage_submitters -> said ->> 'gangs')::bigint - u.gangs, 'jobs', (b.usage_submitters -> said ->> 'jobs')::bigint - u.jobs,
        'gpus', (b.usage_submitters -> said ->> 'gpus')::bigint - u.gpus));
    end if;
    q := b.queue_parent[q];
  end loop;
  for i in 1 .. coalesce(cardinality(b.held_unit), 0) loop
    if b.held_unit[i] = free_unit.unit or b.held_job[i] = any (members) then
      w := b.held_worker[i];
      b.free_slots[w] := b.free_slots[w] + b.held_slots[i];
      b.free_memory[w] := b.free_memory[w] + b.held_memory[i];
      b.free_mcpus[w] := b.free_mcpus[w] + b.held_mcpus[i];
      for d in b.device_first[w] .. b.device_first[w + 1] - 1 loop
        if b.device_held[d] = b.held_job[i] then
          b.device_held[d] := 0;
        end if;
      end loop;
    end if;
  end loop;
  -- A plain job shares its slot with others, which keep it unless it was the last that needed one more.
  select i.id, (ceil(count(*)::numeric / i.prefetch) - ceil((count(*) - 1)::numeric / i.prefetch))::integer as slots into shared
  from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id join gangq.incarnations i on i.id = j.incarnation
  join gangq.live_jobs mate on mate.incarnation = i.id and mate.gang_id is null join gangq.shapes z on z.id = mate.shape_id and z.plain
  where j.id = -free_unit.unit and j.gang_id is null and s.plain
  group by i.id, i.prefetch;
  w := array_position(b.worker_ids, shared.id);
  if w is not null then
    b.free_slots[w] := b.free_slots[w] + shared.slots;
    for i in 1 .. cardinality(b.held_unit) loop
      if b.held_unit[i] = 0 and b.held_worker[i] = w then
        b.held_slots[i] := b.held_slots[i] - shared.slots;
      end if;
    end loop;
  end if;
  select array_agg(h.unit order by h.n), array_agg(h.job order by h.n), array_agg(h.worker order by h.n), array_agg(h.slots order by h.n), array_agg(h.memory order by h.n),
    array_agg(h.mcpus order by h.n), array_agg(h.gpus order by h.n), array_agg(h.ends order by h.n)
  into b.held_unit, b.held_job, b.held_worker, b.held_slots, b.held_memory, b.held_mcpus, b.held_gpus, b.held_ends
  from unnest(b.held_unit, b.held_job, b.held_worker, b.held_slots, b.held_memory, b.held_mcpus, b.held_gpus, b.held_ends)
    with ordinality as h(unit, job, worker, slots, memory, mcpus, gpus, ends, n)
  where h.unit <> free_unit.unit and h.job <> all (members) and h.slots > 0;
  select array_agg(x.id order by x.n), array_agg(x.queue order by x.n), array_agg(x.submitter order by x.n), array_agg(x.priority order by x.n),
    array_agg(x.movable order by x.n), array_agg(x.leaving order by x.n), array_agg(x.lost order by x.n), array_agg(x.since order by x.n)
  into b.unit_ids, b.unit_queue, b.unit_submitter, b.unit_priority, b.unit_movable, b.unit_leaving, b.unit_lost, b.unit_since
  from unnest(b.unit_ids, b.unit_queue, b.unit_submitter, b.unit_priority, b.unit_movable, b.unit_leaving, b.unit_lost, b.unit_since)
    with ordinality as x(id, queue, submitter, priority, movable, leaving, lost, since, n)
  where x.id <> free_unit.unit and -x.id <> all (members);
  select array_agg(x.key order by x.n), array_agg(x.host order by x.n), array_agg(x.gang order by x.n)
  into b.apart_keys, b.apart_hosts, b.apart_gangs
  from unnest(b.apart_keys, b.apart_hosts, b.apart_gangs) with ordinality as x(key, host, gang, n)
  where x.gang <> free_unit.unit;
  select array_agg(x.gang order by x.n), array_agg(x.worker order by x.n), array_agg(x.slots order by x.n), array_agg(x.memory order by x.n),
    array_agg(x.mcpus order by x.n), array_agg(x.gpus order by x.n)
  into b.escrow_gang, b.escrow_worker, b.escrow_slots, b.escrow_memory, b.escrow_mcpus, b.escrow_gpus
  from unnest(b.escrow_gang, b.escrow_worker, b.escrow_slots, b.escrow_memory, b.escrow_mcpus, b.escrow_gpus)
    with ordinality as x(gang, worker, slots, memory, mcpus, gpus, n)
  where x.gang <> free_unit.unit;
  select array_agg(x.unit order by x.n), array_agg(x.kind order by x.n), array_agg(x.shape order by x.n), array_agg(x.counts order by x.n)
  into b.move_units, b.move_kind, b.move_shape, b.move_counts
  from unnest(b.move_units, b.move_kind, b.move_shape, b.move_counts) with ordinality as x(unit, kind, shape, counts, n)
  where x.unit <> free_unit.unit;
  return b;
end $$;
comment on function gangq.free_unit is
  'Internal. The board as it is when a placed gang, or a solo job (its id negative), has stopped.';

create function gangq.without_host(b gangq.board, host text) returns gangq.board language plpgsql stable as $$
declare
  h integer := array_position(b.hosts, without_host.host);
  unit bigint;
begin
  if h is null then
    return b;
  end if;
  for unit in
    select distinct e.unit from unnest(b.held_unit, b.held_worker) as e(unit, worker) where b.worker_host[e.worker] = h and e.unit <> 0
    order by e.unit desc
  loop
    -- With a gang its surplus members have gone.
    continue when array_position(b.held_unit, unit) is null;
    b := gangq.free_unit(b, unit);
  end loop;
  return gangq.order_workers(b, array(select w.n::integer from unnest(b.worker_host) with ordinality as w(host, n) where w.host <> h order by w.n));
end $$;
comment on function gangq.without_host is
  'Internal. The board without a host and what is placed on it: a gang with a member there stops everywhere.';

create function gangq.with_workers(b gangq.board, i gangq.incarnations, names text[], hosts text[], vrams integer[], shapes gangq.shapes[])
returns gangq.board language plpgsql stable as $$
#variable_conflict use_column
declare
  -- No sequence gets there.
  first_id bigint := 2305843009213693952 + coalesce(cardinality(b.worker_ids), 0);
  first_device bigint := 2305843009213693952 + coalesce(cardinality(b.device_ids), 0);
  added gangq.incarnations := i;
  each gangq.incarnations[] := '{}';
  w integer;
  old_classes integer := b.classes;
  -- Alike for every shape, unless a selector names a host or a worker.
  named boolean := exists (
    select 1 from generate_subscripts(shapes, 1) as s(n) cross join lateral jsonb_array_elements(shapes[s.n].selector) c
    where c.value ->> 'key' in ('host', 'worker'));
begin
  for n in 1 .. cardinality(names) loop
    added.id := first_id + n;
    added.name := names[n];
    added.host := with_workers.hosts[n];
    w := coalesce(cardinality(b.worker_ids), 0) + 1;
    if array_position(b.hosts, added.host) is null then
      b.hosts := b.hosts || added.host;
    end if;
    if named or n = 1 then
      each := each || added;
      b.classes := b.classes + 1;
    end if;
    b.worker_ids := b.worker_ids || added.id;
    b.worker_names := b.worker_names || added.name;
    b.worker_host := b.worker_host || array_position(b.hosts, added.host);
    b.worker_open := b.worker_open || true;
    b.worker_class := b.worker_class || b.classes;
    b.free_slots := b.free_slots || added.slots::integer;
    b.free_memory := b.free_memory || added.memory_mb;
    b.free_mcpus := b.free_mcpus || (added.cpus * 1000)::bigint;
    b.all_slots := b.all_slots || added.slots::integer;
    b.all_memory := b.all_memory || added.memory_mb;
    b.all_mcpus := b.all_mcpus || (added.cpus * 1000)::bigint;
    if cardinality(b.levels) > 1 then
      b.worker_domains := b.worker_domains || array(
        select case when b.levels[l.n] = 'host' then added.host
          when bool_or(b.levels[m.n] <> 'host' and coalesce(added.labels ->> b.levels[m.n], '') = '') then null
          else string_agg(gangq.domain_part(case b.levels[m.n] when 'host' then added.host else added.labels ->> b.levels[m.n] end), '/' order by m.n) end
        from generate_series(1, cardinality(b.levels)) as l(n) join generate_series(1, cardinality(b.levels)) as m(n) on m.n <= l.n
        group by l.n order by l.n);
    end if;
    for d in 1 .. coalesce(cardinality(vrams), 0) loop
      first_device := first_device + 1;
      b.device_ids := b.device_ids || first_device;
      b.device_worker := b.device_worker || w;
      b.device_vram := b.device_vram || vrams[d];
      b.device_held := b.device_held || 0::bigint;
    end loop;
  end loop;
  b.shape_serves := array(
    select v.serves from (
      select s.n, x.n as class, x.serves
      from generate_series(1, cardinality(b.shape_ids)) as s(n)
      cross join lateral unnest(b.shape_serves[(s.n - 1) * old_classes + 1 : s.n * old_classes]) with ordinality as x(serves, n)
      union all
      select s.n, old_classes + e.n, gangq.serves(each[e.n], shapes[s.n])
      from generate_subscripts(shapes, 1) as s(n) cross join generate_subscripts(each, 1) as e(n)) v
    order by v.n, v.class);
  return gangq.order_workers(b, array(
    select x.n::integer from unnest(b.worker_host, b.worker_ids) with ordinality as x(host, id, n) order by b.hosts[x.host], x.id));
end $$;
comment on function gangq.with_workers is
  'Internal. The board with new idle workers like this one, of these names on these hosts, each with devices of these sizes. shapes: the board''s, in its order.';

-- A gang that is not there -------------------------------------------------------------------------------------------

create function gangq.with_gang(inout b gangq.board, inout shapes gangq.shapes[], spec jsonb, nth integer)
language plpgsql stable as $$
#variable_conflict use_column
declare
  -- No sequence gets there.
  first_unused constant integer := 2147000000;
  known text[];
  wrong text;
  given jsonb;
  g record;
  r record;
  s gangq.shapes;
  q gangq.queues_table;
  n integer := 0;
  members integer := 0;
  budgets real[] := '{}';
  budget real;
  first_role integer := coalesce(cardinality(b.role_names), 0);
begin
  if jsonb_typeof(spec) is distinct from 'object' then
    perform gangq.refuse('GQ001', format('submit is %s', left(coalesce(spec::text, 'null'), 200)), 'It is an object of the parameters of submit_gang: {"task": "train", "size": 4, "gpus": 1}.');
  end if;
  known := array(
    select u.name from pg_proc p cross join unnest(p.proargnames[: p.pronargs]) as u(name)
    where p.oid = 'gangq.submit_gang'::regproc and u.name <> 'options'
    union
    select a.name from gangq.settable('gangq.gang_options'::regtype) a
    order by 1);
  select k.key into wrong from jsonb_object_keys(spec) as k(key)
  where k.key <> all (known) order by k.key limit 1;
  if found then
    perform gangq.refuse_unknown_key('submit_gang', 'argument or option', wrong, known);
  end if;
  given := '{"queue": "default", "priority": 0, "gpus": 0, "vram_mb": 0, "memory_mb": 0, "cpus": 0, "labels": {}, "strategy": "pack", "balanced": false}'
    || jsonb_strip_nulls(spec);
  select x.* into g from jsonb_to_record(given) as x(queue text, size integer, min_size integer, priority integer, roles jsonb, require text, prefer text, apart text, budget_s real);
  if g.priority not between -1000 and 1000 then
    perform gangq.refuse('GQ001', format('submit: priority is %s; it must be -1000 to 1000', g.priority), 'Higher runs first; the default is 0.');
  end if;
  if g.budget_s is not null and not (g.budget_s > 0 and g.budget_s <= 1e9) then
    perform gangq.refuse('GQ001', format('submit: budget_s is %s', g.budget_s), 'It is a positive number of seconds, 1e9 at most.');
  end if;
  select x.* into q from gangq.queues_table x where x.name = g.queue;
  if not found then
    perform gangq.refuse('GQ002', format('queue %L does not exist', g.queue), format('Queues: %s', array_to_string(b.queue_names, ', ')));
  end if;
  if g.roles is null and (g.size is null or g.size not between 1 and 100000 or g.min_size not between 1 and g.size) then
    perform gangq.refuse('GQ001', format('submit: size is %s and min_size is %s', coalesce(g.size::text, 'null'), coalesce(g.min_size::text, 'null')),
      'A gang has 1 to 100000 members, and min_size of them at least; or pass roles.');
  end if;
  for r in
    select x.* from gangq.read_roles(coalesce(g.roles, jsonb_build_array(jsonb_strip_nulls(
      jsonb_build_object('name', 'member', 'count', g.size, 'min', g.min_size)))),
      given - '{queue,size,min_size,priority,roles,require,prefer,apart,budget_s,payload,payloads,name}'::text[]) x
  loop
    perform gangq.check_level(format('role %s', r.name), r.require, r.prefer, r.strategy = 'strict_spread' and r.least_members > 1);
    perform gangq.check_level('the gang', g.require, g.prefer, r.strategy = 'strict_spread' and r.least_members > 1);
    if coalesce(r.task, '') = '' or r.gpus not between 0 and 1024 or r.vram_mb < 0 or r.memory_mb not between 0 and 1e12 or r.cpus not between 0 and 9999999
      or jsonb_typeof(r.labels) <> 'object' then
      perform gangq.refuse('GQ001', format('submit: role %s has task %L, gpus %s, vram_mb %s, memory_mb %s, cpus %s, labels %s', r.name, r.task, r.gpus, r.vram_mb, r.memory_mb, r.cpus, r.labels),
        'It needs a task; what it asks for is not negative, gpus are 1024 at most, and labels is an object.');
    end if;
    if r.name = any (b.role_names[first_role + 1 :]) then
      perform gangq.refuse('GQ001', format('submit: two roles are called %s', r.name), 'Names of roles are unique in a gang; members of one role are its count.');
    end if;
    r.selector := gangq.check_selector(r.selector);
    r.tolerates := nullif(gangq.check_taints(r.tolerates, 'tolerates', true), '{}');
    s := jsonb_populate_record(null::gangq.shapes, jsonb_build_object('queue', g.queue, 'task', r.task, 'gpus', r.gpus, 'vram_mb', r.vram_mb, 'memory_mb', r.memory_mb,
      'cpus', round(r.cpus, 3), 'labels', r.labels, 'model', r.model, 'selector', r.selector, 'tolerates', r.tolerates,
      'selects', gangq.selector_path(r.selector, r.tolerates)::text));
    s.id := first_unused + cardinality(shapes);
    shapes := shapes || s;
    b.shape_ids := b.shape_ids || s.id;
    b.shape_gpus := b.shape_gpus || r.gpus;
    b.shape_vram := b.shape_vram || r.vram_mb;
    b.shape_memory := b.shape_memory || r.memory_mb;
    b.shape_mcpus := b.shape_mcpus || (s.cpus * 1000)::bigint;
    b.shape_avoid := array_append(b.shape_avoid, null::jsonb);
    b.role_names := b.role_names || r.name;
    b.role_shape := b.role_shape || cardinality(b.shape_ids);
    b.role_min := b.role_min || r.least_members;
    b.role_max := b.role_max || r.most;
    b.role_strategy := b.role_strategy || r.strategy;
    b.role_require := b.role_require || gangq.required_level(b.levels, r.require);
    b.role_prefer := b.role_prefer || coalesce(array_position(b.levels, r.prefer), 0);
    b.role_balanced := b.role_balanced || r.balanced;
    budgets := budgets || coalesce(r.budget_s, g.budget_s, (select ts.budget_s from gangq.task_settings ts where ts.task = r.task));
    members := members + r.most;
    n := n + 1;
  end loop;
  if members > 100000 or members <> g.size then
    perform gangq.refuse('GQ001', format('submit: the roles have %s members in all%s', members, coalesce(', and size is ' || g.size, '')),
      'Leave size out: it is the sum of the roles'' counts, 100000 at most.');
  end if;
  -- As submit_gang: the longest is known only if one is set.
  if num_nonnulls(q.budget_s, (select max(x) from unnest(budgets) as x)) > 0 then
    select max(coalesce(x.budget_s, q.budget_s, case when b.shape_gpus[b.role_shape[first_role + x.n::integer]] > 0 then c.budget_gpu_s else c.budget_s end)) into budget
    from unnest(budgets) with ordinality as x(budget_s, n) cross join gangq.settings c;
  end if;
  b.kind_ids := b.kind_ids || (first_unused + nth);
  b.kind_queue := b.kind_queue || array_position(b.queue_names, g.queue);
  b.kind_require := b.kind_require || gangq.required_level(b.levels, g.require);
  b.kind_prefer := b.kind_prefer || coalesce(array_position(b.levels, g.prefer), 0);
  b.kind_apart := array_append(b.kind_apart, g.apart);
  b.kind_first_role := b.kind_first_role || (first_role + 1);
  b.kind_roles := b.kind_roles || n;
  b.gang_ids := b.gang_ids || (-nth)::bigint;
  b.gang_kind := b.gang_kind || cardinality(b.kind_ids);
  b.gang_priority := b.gang_priority || g.priority;
  -- Behind all that wait, as whoever comes last.
  b.gang_order_key := b.gang_order_key || gangq.order_key(g.priority, 1125899905842623 + nth);
  b.gang_submitter := b.gang_submitter || gangq.caller();
  b.gang_estimate := b.gang_estimate || (
    select max(gangq.estimate_s(x.queue, x.task, x.gpus::integer, budget))::float8 from unnest(shapes[cardinality(shapes) - n + 1 :]) x);
  b.gang_missing := array_append(b.gang_missing, null::jsonb);
  b.gang_anchor := array_append(b.gang_anchor, null::jsonb);
  b.gang_preempting := b.gang_preempting || false;
end $$;
comment on function gangq.with_gang is
  'Internal. The board with one gang more, due at once, and what its members ask for. nth: its id, negative. Raises GQ001, GQ002.';

-- The plan -----------------------------------------------------------------------------------------------------------

create function gangq.look_changed(t timestamptz, most integer, changes jsonb) returns gangq.board
language plpgsql stable set plan_cache_mode = force_custom_plan as $$
#variable_conflict use_column
declare
  verbs constant text[] := '{add_workers,remove_host,priority,cancel,quota,submit}';
  worker_keys constant text[] := '{like,gpus,vram_mb,slots,memory_mb,cpus,labels,queues,tasks,taints,host,name}';
  b gangq.board;
  c jsonb;
  n integer;
  verb text;
  found_id bigint;
  number integer;
  submitted gangq.shapes[] := '{}';
  shapes gangq.shapes[];
  i gangq.incarnations;
  vrams integer[];
  gone bigint[] := '{}';
  paused jsonb := '{}';
  asked record;
  one record;
begin
  if jsonb_typeof(changes) is distinct from 'array' then
    perform gangq.refuse('GQ001', format('changes is %s', left(coalesce(changes::text, 'null'), 200)), 'It is a JSON array of changes: [{"priority": {"gang": 7, "value": 50}}].');
  end if;
  b.t := look_changed.t;
  select s.reservations, s.preemptions_per_pass, s.grace_s, s.topology into b.reservations, b.preemptions, b.grace_s, b.levels from gangq.settings s;
  b := gangq.look_at_gangs(gangq.look_at_usage(gangq.look_at_queues(b)), look_changed.most);
  for c, n in select e.change, e.n from jsonb_array_elements(changes) with ordinality as e(change, n) loop
    verb := (select k.key from jsonb_object_keys(case jsonb_typeof(c) when 'object' then c else '{}' end) as k(key) where k.key = any (verbs) limit 1);
    if verb is null or (verb <> 'add_workers' and c - verb <> '{}') or c - verb - worker_keys <> '{}' then
      perform gangq.refuse('GQ001', format('change %s is %s', n, left(c::text, 300)),
        format('A change is an object with one of %s; add_workers also takes %s.', array_to_string(verbs, ', '), array_to_string(worker_keys, ', ')));
    end if;
    begin
      case verb
        when 'quota' then
          b := gangq.change_queue(b, case jsonb_typeof(c -> 'quota') when 'object' then c -> 'quota' else '{}' end);
          if c -> 'quota' ? 'paused' then
            paused := paused || jsonb_build_object(c -> 'quota' ->> 'queue', (c -> 'quota' ->> 'paused')::boolean);
          end if;
        when 'priority' then
          select x.id, x.value into asked from jsonb_to_record(case jsonb_typeof(c -> verb) when 'object' then c -> verb else '{}' end) as y(gang bigint, value integer)
          cross join lateral (select y.gang as id, y.value) x;
          if asked.value is null or asked.value not between -1000 and 1000 then
            perform gangq.refuse('GQ001', format('change %s is %s: value must be -1000 to 1000', n, c), 'For example {"priority": {"gang": 7, "value": 50}}.');
          end if;
          perform 1 from gangq.live_gangs g where g.id = asked.id;
          if not found then
            perform gangq.refuse('GQ002', format('gang %s is not live', coalesce(asked.id::text, 'null')), 'It has ended or never existed: select * from gangq.gangs.');
          end if;
          b := gangq.change_priority(b, asked.id, asked.value);
        when 'cancel' then
          found_id := null;
          if jsonb_typeof(c -> verb) <> 'object' or not c -> verb ? 'job' then
            select g.id into found_id from gangq.live_gangs g
            where g.id = case jsonb_typeof(c -> verb) when 'object' then c -> verb ->> 'gang' else c ->> verb end::bigint;
          end if;
          if found_id is null and (jsonb_typeof(c -> verb) <> 'object' or c -> verb ? 'job') then
            select -j.id into found_id from gangq.live_jobs j
            where j.gang_id is null and j.id = case jsonb_typeof(c -> verb) when 'object' then c -> verb ->> 'job' else c ->> verb end::bigint;
          end if;
          if found_id is null then
            perform gangq.refuse('GQ002', format('change %s cancels %s, which is no live gang and no live solo job', n, c -> verb), 'Members stop with their gang: {"cancel": {"gang": 7}} or {"cancel": {"job": 12}}.');
          end if;
          b := gangq.without_gang(b, found_id);
          gone := gone || found_id;
        when 'submit' then
          select x.b as board, x.shapes into one from gangq.with_gang(b, submitted, c -> verb, n) x;
          b := one.board;
          submitted := one.shapes;
        when 'remove_host' then
          perform 1 from gangq.incarnations x where x.host = c ->> verb and x.ended_at is null;
          if not found then
            perform gangq.refuse('GQ002', format('host %L has no live worker', c ->> verb), 'Hosts with workers: select distinct host from gangq.workers.');
          end if;
        when 'add_workers' then
          number := (c ->> verb)::integer;
          if number is null or number not between 1 and 1000 then
            perform gangq.refuse('GQ001', format('change %s adds %s workers; it must be 1 to 1000', n, coalesce(c ->> verb, 'null')), 'For example {"add_workers": 2, "like": "w1"}.');
          end if;
      end case;
    exception
      when invalid_text_representation or numeric_value_out_of_range or invalid_parameter_value or datatype_mismatch or cannot_coerce then
        perform gangq.refuse('GQ001', format('change %s is %s: %s', n, left(c::text, 300), sqlerrm), 'Ids and counts are whole numbers.');
    end;
  end loop;
  if b.gang_ids is null and b.move_units is null then
    return b;
  end if;
  if paused <> '{}' then
    b := gangq.change_paused(b, paused);
  end if;
  b := gangq.look_at_workers(b);
  select array_agg(s order by s.id) into shapes from gangq.shapes s where s.id = any (b.shape_ids);
  shapes := coalesce(shapes, '{}') || submitted;
  if b.worker_ids <> '{}' then
    if cardinality(submitted) > 0 then
      b.shape_serves := coalesce(b.shape_serves, '{}') || array(
        select gangq.serves(w, submitted[x.n])
        from generate_subscripts(submitted, 1) as x(n)
        cross join (
          select y.class, min(y.id) as id from unnest(b.worker_class, b.worker_ids) as y(class, id) group by y.class) e
        join gangq.incarnations w on w.id = e.id
        order by x.n, e.class);
    end if;
    b := gangq.look_at_work(b);
  end if;
  foreach found_id in array gone loop
    b := gangq.free_unit(b, found_id);
  end loop;
  for c, n in select e.change, e.n from jsonb_array_elements(changes) with ordinality as e(change, n) loop
    if c ? 'remove_host' then
      b := gangq.without_host(b, c ->> 'remove_host');
    elsif c ? 'add_workers' then
      number := (c ->> 'add_workers')::integer;
      -- What is null is as if it had been left out.
      c := (select jsonb_object_agg(e.key, e.value) from jsonb_each(c) e where e.value <> 'null');
      i := null;
      vrams := '{}';
      if c ? 'like' then
        select x.* into i from gangq.incarnations x where x.name = c ->> 'like' order by x.id desc limit 1;
        if not found then
          perform gangq.refuse('GQ002', format('worker %L does not exist', c ->> 'like'), 'Workers by name: select name from gangq.workers.');
        end if;
        vrams := array(select r.vram_mb from gangq.device_registry r where r.offered_by = i.id order by r.vram_mb, r.index, r.id);
      end if;
      begin
        i := jsonb_populate_record(i, '{"slots": 1, "prefetch": 1, "memory_mb": 1048576, "cpus": 1024, "labels": {}, "taints": [], "operator_taints": []}' || jsonb_build_object('queues', b.queue_names)
          || coalesce(jsonb_strip_nulls(to_jsonb(i)), '{}') || (c - '{add_workers,like,gpus,vram_mb,host,name}'::text[]));
        if (c ->> 'gpus')::integer not between 0 and 1024 or (c ->> 'vram_mb')::integer < 0 or i.slots not between 1 and 10000 or i.prefetch not between 1 and 1000
          or i.memory_mb < 0 or i.cpus < 0 or i.cpus = 'NaN' or jsonb_typeof(i.labels) <> 'object' then
          perform gangq.refuse('GQ001', format('change %s is %s', n, left(c::text, 300)),
            'A worker has 0 to 1024 gpus and 1 to 10000 slots; memory_mb, vram_mb and cpus are not negative, and labels is an object.');
        end if;
        if c ? 'gpus' then
          vrams := array_fill(coalesce((c ->> 'vram_mb')::integer, (select max(v) from unnest(vrams) as v), 1048576), array[(c ->> 'gpus')::integer]);
          if not c ? 'slots' and not c ? 'like' then
            i.slots := greatest(1, (c ->> 'gpus')::integer);
          end if;
        end if;
      exception
        when invalid_text_representation or numeric_value_out_of_range or invalid_parameter_value or array_subscript_error then
          perform gangq.refuse('GQ001', format('change %s is %s: %s', n, left(c::text, 300), sqlerrm), 'gpus, vram_mb, slots, memory_mb and cpus are numbers, labels is an object, queues, tasks and taints are arrays.');
      end;
      select format('queue %s does not exist', x.name) into verb from unnest(i.queues) as x(name) where x.name <> all (b.queue_names) limit 1;
      if found then
        perform gangq.refuse('GQ002', format('change %s: %s', n, verb), format('Queues: %s', array_to_string(b.queue_names, ', ')));
      end if;
      b := gangq.with_workers(b, i,
        array(select coalesce(c ->> 'name', 'new' || n) || '-' || x from generate_series(1, number) as x),
        array(select coalesce(c ->> 'host', coalesce(c ->> 'name', 'new' || n) || '-' || x) from generate_series(1, number) as x), vrams, shapes);
    end if;
  end loop;
  return b;
end $$;
comment on function gangq.look_changed is
  'Internal. The board as it would be with these changes: those of queues and gangs, then cancels, then workers. See gangq.plan. Raises GQ001, GQ002.';

create function gangq.plan(changes jsonb default '[]', max_gangs integer default 200)
returns table (gang_id bigint, queue text, task text, priority integer, size integer, before text, after text, starts_before timestamptz,
  starts_after timestamptz, place integer, members integer, hosts jsonb, victims bigint[], gate text, numbers jsonb, changed boolean, why text)
language plpgsql stable as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  most integer := plan.max_gangs;
  now_board gangq.board;
  then_board gangq.board;
  now_made gangq.decision[];
  then_made gangq.decision[];
begin
  if plan.max_gangs is null or plan.max_gangs < 1 then
    perform gangq.refuse('GQ001', format('max_gangs is %s; it must be 1 or more', coalesce(plan.max_gangs::text, 'null')), 'A pass of the tick places 200 at most.');
  end if;
  -- Of each kind as many as a pass looks at, unless one further back is named.
  if plan.changes @? '$[*] ? (exists(@.priority) || exists(@.cancel))' then
    most := 1000000;
  end if;
  now_board := gangq.look_changed(t, most, '[]');
  then_board := gangq.look_changed(t, most, plan.changes);
  now_made := array(select d from gangq.decide_on(now_board, plan.max_gangs, each_gang => true) d);
  then_made := array(select d from gangq.decide_on(then_board, plan.max_gangs, each_gang => true) d);
  return query
  with boards as (
    select 1 as n, now_board as b union all select 2, then_board
  ),
  waiting as (
    select x.n, g.id, k.queue, k.kind, g.priority, (
      select sum(m) from unnest(k.maxima) as m)::integer as size, k.task, g.ord
    from boards x cross join lateral unnest((x.b).gang_ids, (x.b).gang_kind, (x.b).gang_priority) with ordinality as g(id, kind, priority, ord)
    cross join lateral (
      select g.kind, (x.b).queue_names[(x.b).kind_queue[g.kind]] as queue,
        (x.b).role_max[(x.b).kind_first_role[g.kind] : (x.b).kind_first_role[g.kind] + (x.b).kind_roles[g.kind] - 1] as maxima,
        (select s.task from gangq.shapes s where s.id = (x.b).shape_ids[(x.b).role_shape[(x.b).kind_first_role[g.kind]]]) as task) k
  ),
  was as (
    select d.* from unnest(now_made) d where d.gang_id is not null
  ),
  becomes as (
    select d.* from unnest(then_made) d where d.gang_id is not null
  ),
  seats as (
    select d.gang_id, jsonb_object_agg(s.host, s.members) as hosts
    from becomes d cross join lateral (
      select then_board.hosts[then_board.worker_host[array_position(then_board.worker_ids, u.w)]] as host, count(*) as members
      from unnest(d.incarnations) as u(w) group by 1) s
    group by d.gang_id
  )
  select case when i.gang_id > 0 then i.gang_id end, coalesce(z.queue, y.queue, p.queue), coalesce(z.task, y.task, p.task, plan.changes -> (-i.gang_id)::integer - 1 -> 'submit' ->> 'task'),
    coalesce(z.priority, y.priority, p.priority), coalesce(z.size, y.size, p.size),
    coalesce(w.action, case when i.gang_id < 0 then 'absent' when y.id is not null then 'wait' else 'placed' end),
    coalesce(d.action, case when v.id is not null then 'displaced' when z.id is not null then 'wait' else 'gone' end),
    w.starts_at, d.starts_at, d.place, case when d.action in ('start', 'plan') then (select sum(m) from unnest(d.members) as m)::integer end, h.hosts, d.victims,
    d.gate, d.numbers,
    (w.action, w.starts_at, w.incarnations, w.gate) is distinct from (d.action, d.starts_at, d.incarnations, d.gate),
    case when d.action = 'start' then 'starts now'
      when d.action = 'plan' then format('starts in %s s at the latest', ceil(extract(epoch from d.starts_at - then_board.t)))
      when d.action = 'preempt' then format('starts once %s have stopped', array_to_string(d.victims, ', '))
      when d.action = 'move' then 'moves to another host'
      when v.id is not null then format('is told to stop for gang %s', v.for_gang)
      when d.action is null and z.id is null then 'is no longer there'
      else coalesce(gangq.gate_text(d.gate, d.numbers), 'is not reached by the next pass') end
  from (
    select x.id as gang_id from waiting x union select d.gang_id from was d union select d.gang_id from becomes d
    union select u.v from becomes d cross join unnest(d.victims) as u(v) where u.v > 0) i
  left join waiting y on y.n = 1 and y.id = i.gang_id
  left join waiting z on z.n = 2 and z.id = i.gang_id
  left join lateral (
    select g.priority::integer, g.size, s.queue, s.task from gangq.live_gangs g join gangq.shapes s on s.id = g.shape_id
    where g.id = i.gang_id) p on true
  left join was w on w.gang_id = i.gang_id
  left join becomes d on d.gang_id = i.gang_id
  left join seats h on h.gang_id = i.gang_id
  left join lateral (
    select u.v as id, min(m.gang_id) as for_gang from becomes m cross join unnest(m.victims) as u(v) where u.v = i.gang_id and m.gang_id <> i.gang_id group by u.v) v on true
  order by d.turn nulls last, w.turn, i.gang_id;
end $$;
comment on function gangq.plan is
  'What the next pass would do after these changes, beside what it would do without them: gangq.decide, applied to '
  'nothing. changes: {"add_workers": 2, "like": worker} or with "gpus", "vram_mb", "slots", "memory_mb", "cpus", "labels", '
  '"queues", "tasks", "taints", "host"; {"remove_host": host}; {"priority": {"gang": 7, "value": 50}}; {"cancel": {"gang": 7}} or '
  '{"job": 12}; {"quota": {"queue": q, "maximum": {"gpus": 8}}} (or guaranteed, max_running_gangs, max_running_jobs, paused); '
  '{"submit": parameters of submit_gang}. before and after: start, plan, wait, preempt or move; absent, placed, displaced or gone. '
  'gang_id null: one of those submitted. Raises GQ001, GQ002.';
