-- Why is it not running, in numbers: explain_gang, explain_job, and the view waiting.
-- Takes no locks. What a gang waits for is asked of the decision itself, on the board as it is now: only here, when
-- somebody asks; of those that nobody asks about the passes keep one verdict per kind.

create function gangq.counted(n numeric, what text) returns text language sql immutable as
$$ select format('%s %s%s', n, what, case when n = 1 then '' else 's' end) $$;
comment on function gangq.counted is 'Internal. 1 gang, 2 gangs.';

create function gangq.gate_text(gate text, numbers jsonb) returns text language sql immutable
return
  case gate
    when 'paused' then format('queue %s is paused', numbers ->> 'queue')
    when 'quota' then format('queue %s holds %s of at most %s %s, and it asks for %s', numbers ->> 'queue', numbers ->> 'used', numbers ->> 'limit', numbers ->> 'resource', numbers ->> 'asked')
    when 'running_limit' then format('queue %s has %s of at most %s %s placed, and it asks for %s', numbers ->> 'queue', numbers ->> 'used', numbers ->> 'limit', numbers ->> 'resource', numbers ->> 'asked')
    when 'submitter_limit' then format('%s holds %s of at most %s %s in queue %s, and it asks for %s', numbers ->> 'submitter', numbers ->> 'used', numbers ->> 'limit', numbers ->> 'resource', numbers ->> 'queue', numbers ->> 'asked')
    when 'infeasible' then 'the workers that take new work could not hold it even when idle'
    when 'capacity' then 'waits for capacity'
    when 'reserved' then 'its place is kept until others have ended'
    else gate end;
comment on function gangq.gate_text is 'Internal. What holds a gang, in words with numbers.';

-- Workers --------------------------------------------------------------------------------------------------------------

create function gangq.explain_workers(s gangq.shapes, t timestamptz) returns table (detail text, numbers jsonb)
language plpgsql stable as $$
#variable_conflict use_column
declare
  n record;
begin
  -- One after another, so that each worker falls to the first condition it does not meet.
  select count(*) as live, count(*) filter (where x.fell = 'queue') as queue, count(*) filter (where x.fell = 'task') as task,
    count(*) filter (where x.fell = 'labels') as labels, count(*) filter (where x.fell = 'selector') as selector,
    count(*) filter (where x.fell = 'taints') as taints, count(*) filter (where x.fell is null) as serving,
    count(*) filter (where x.fell is null and x.barred = 'quarantined') as quarantined, count(*) filter (where x.fell is null and x.barred = 'cordoned') as cordoned,
    count(*) filter (where x.fell is null and x.barred = 'draining') as draining, count(*) filter (where x.fell is null and x.barred = 'passed over') as passed_over,
    count(*) filter (where x.fell is null and x.barred = 'silent') as silent, count(*) filter (where x.fell is null and x.barred is null) as open
  into n
  from (
    select case
        when s.queue <> all (i.queues) then 'queue'
        when s.task <> all (i.tasks) then 'task'
        when not s.labels <@ i.labels then 'labels'
        when not gangq.serves(i, s) then
          case when i.taints <> '{}' and gangq.serves(jsonb_populate_record(i, '{"taints": []}'), s) then 'taints' else 'selector' end
      end as fell,
      case
        when i.quarantined is not null then 'quarantined'
        when exists (select 1 from gangq.cordons c where (c.kind, c.name) in (('host', i.host), ('worker', i.name))) then 'cordoned'
        when i.state = 'draining' then 'draining'
        when i.passed_over_until > t then 'passed over'
        when l.renewed_at <= t - make_interval(secs => c.candidate_silence_s) then 'silent'
      end as barred
    from gangq.incarnations i join gangq.leases l on l.incarnation = i.id cross join gangq.settings c
    where i.ended_at is null) x;
  numbers := to_jsonb(n);
  if n.live = 0 then
    detail := 'no worker is registered: start one with gangq worker';
  elsif n.queue = n.live then
    detail := format('none of %s serves queue %s', gangq.counted(n.live, 'worker'), s.queue);
  elsif n.queue + n.task = n.live then
    detail := format('none of %s of queue %s knows task %s', gangq.counted(n.live - n.queue, 'worker'), s.queue, s.task);
  elsif n.queue + n.task + n.labels = n.live then
    detail := format('none of %s of queue %s carries labels %s', gangq.counted(n.live - n.queue - n.task, 'worker'), s.queue, s.labels);
  else
    detail := format('%s of %s may take it', n.open, gangq.counted(n.live, 'worker')) || coalesce('; the others: ' || (
      select string_agg(format('%s %s', f.fell, f.why), ', ' order by f.n)
      from (values (1, n.queue, 'of other queues'), (2, n.task, 'without task ' || s.task), (3, n.labels, 'without labels ' || s.labels::text),
        (4, n.selector, 'outside the selector'), (5, n.taints, 'with taints it does not tolerate'), (6, n.quarantined, 'quarantined'),
        (7, n.cordoned, 'cordoned'), (8, n.draining, 'draining'), (9, n.passed_over, 'passed over'), (10, n.silent, 'silent')) as f(n, fell, why)
      where f.fell > 0), '');
  end if;
  return next;
end $$;
comment on function gangq.explain_workers is
  'Internal. How many live workers are for jobs of this shape, and how many fall to each condition, the first one they do not meet.';

-- What would fit, of one thing it asks for at a time: the most of it with which that many members fit on idle workers.
create function gangq.nearest_feasible(s gangq.shapes, members integer) returns jsonb language sql stable as $$
  with idle as (
    select i.id, i.slots, i.memory_mb, i.cpus, coalesce(array_agg(r.vram_mb order by r.vram_mb) filter (where r.id is not null and (s.avoid is null or r.id <> all (s.avoid))), '{}') as vrams
    from gangq.incarnations i left join gangq.device_registry r on r.offered_by = i.id
    where i.ended_at is null and gangq.serves(i, s)
    group by i.id
  ),
  tries as (
    select 'gpus' as asked, v as value, v::integer as gpus, s.vram_mb, s.memory_mb, s.cpus from generate_series(0, s.gpus - 1) v
    union all
    select 'vram_mb', v, s.gpus, v, s.memory_mb, s.cpus from (select distinct unnest(i.vrams) from idle i) as x(v) where v < s.vram_mb
    union all
    select 'memory_mb', v, s.gpus, s.vram_mb, v, s.cpus
    from (select distinct i.memory_mb / k from idle i cross join generate_series(1, least(i.slots, members, 64)) k) as x(v) where v < s.memory_mb
    union all
    select 'cpus', v, s.gpus, s.vram_mb, s.memory_mb, v
    from (select distinct floor(i.cpus / k) from idle i cross join generate_series(1, least(i.slots, members, 64)) k) as x(v) where v < s.cpus
    union all
    select 'members', null, s.gpus, s.vram_mb, s.memory_mb, s.cpus
  ),
  rooms as (
    select t.asked, t.value, sum(least(i.slots,
      case when t.memory_mb > 0 then i.memory_mb / t.memory_mb else i.slots end,
      case when t.cpus > 0 then floor(i.cpus / t.cpus) else i.slots end,
      case when t.gpus > 0 then (select count(*) from unnest(i.vrams) v where v >= t.vram_mb) / t.gpus else i.slots end))::integer as room
    from tries t cross join idle i group by t.asked, t.value
  )
  select jsonb_strip_nulls(jsonb_object_agg(r.asked, case r.asked when 'members' then r.room else r.value end))
  from (
    select z.asked, max(z.value) as value, max(z.room) as room from rooms z where z.asked = 'members' or z.room >= nearest_feasible.members group by z.asked) r
$$;
comment on function gangq.nearest_feasible is
  'Internal. {"members": how many fit on idle workers as it is, "gpus", "vram_mb", "memory_mb", "cpus": the most each may ask for, the rest as it is, so that all fit}.';

create function gangq.explain_hardware(s gangq.shapes, members integer) returns table (ok boolean, detail text, numbers jsonb)
language plpgsql stable as $$
#variable_conflict use_column
declare
  why text := gangq.infeasible(s.id, members);
  near jsonb;
  other text;
begin
  ok := why is null;
  numbers := jsonb_build_object('members', members, 'gpus', s.gpus, 'vram_mb', s.vram_mb, 'memory_mb', s.memory_mb, 'cpus', s.cpus, 'labels', s.labels);
  detail := coalesce(why, 'the registered workers could hold it when idle');
  if not ok then
    near := gangq.nearest_feasible(s, members);
    numbers := numbers || jsonb_build_object('feasible', coalesce(near, '{}'));
    select string_agg(format('%s %s', n.key, n.value), ' or ' order by n.key) into other
    from jsonb_each_text(near) n where n.key <> 'members' or n.value::integer > 0;
    detail := detail || coalesce('; it would fit with ' || other, '');
  end if;
  return next;
end $$;
comment on function gangq.explain_hardware is 'Internal. Whether idle workers could hold it at all, and if not, what they could.';

create function gangq.explain_slots(s gangq.shapes, members integer, t timestamptz) returns table (gate text, ok boolean, detail text, numbers jsonb)
language sql stable as $$
  select 'slots', not n.short, gangq.counted(n.slots, 'slot') || ' free on workers that serve it'
      || case when n.short then format(': room for %s of %s, where devices, memory and CPUs would do for %s', n.room, gangq.counted(explain_slots.members, 'member'),
        least(n.bare, explain_slots.members)) else '' end,
    jsonb_build_object('free_slots', n.slots, 'room', n.room, 'without_slots', least(n.bare, explain_slots.members), 'asked', explain_slots.members)
  from (
    select coalesce(sum(f.slots), 0) as slots, coalesce(sum(f.room), 0) as room, coalesce(sum(f.bare), 0) as bare,
      coalesce(sum(f.room), 0) < explain_slots.members and coalesce(sum(f.bare), 0) > coalesce(sum(f.room), 0) as short
    from (
      select greatest(c.slots, 0) as slots, gangq.members_that_fit(s, c.slots, c.memory_mb, c.cpus, c.vrams, c.device_ids) as room,
        gangq.members_that_fit(s, greatest(c.slots, explain_slots.members), c.memory_mb, c.cpus, c.vrams, c.device_ids) as bare
      from gangq.free_capacity(gangq.candidates(t)) c join gangq.incarnations i on i.id = c.incarnation where gangq.serves(i, s)) f) n
$$;
comment on function gangq.explain_slots is
  'Internal. Whether free slots are what is short: how many members there is room for, and how many there would be without that limit.';

create function gangq.explain_avoided(s gangq.shapes, held boolean) returns table (gate text, ok boolean, detail text, numbers jsonb)
language sql stable as $$
  select 'avoids', not held, string_agg(format('avoids device %s (%s) after a trip there: ', r.uuid, r.host) || case
      when h.device_id is not null then format('it is quarantined (%s); when it is sound, select gangq.unquarantine(%L)', h.reason, r.uuid)
      else format('a tick lets it back when no other could take it, select gangq.unquarantine(%L) at once', r.uuid) end, '; ' order by r.id),
    jsonb_build_object('devices', cardinality(s.avoid))
  from gangq.device_registry r
  left join gangq.device_holds h on h.device_id = r.id and h.kind = 'quarantine' and h.until is null
  where r.id = any (s.avoid)
  having s.avoid is not null
$$;
comment on function gangq.explain_avoided is 'Internal. The devices it avoids, if any.';

-- Queues ---------------------------------------------------------------------------------------------------------------

create function gangq.explain_queue(queue text) returns table (gate text, ok boolean, detail text, numbers jsonb)
language sql stable as $$
  select 'queue', count(*) filter (where q.paused) = 0,
    coalesce('paused: ' || string_agg(format('%s (gangq queue resume %s)', q.name, q.name), ', ' order by q.name) filter (where q.paused),
      format('queue %s is open', explain_queue.queue))
      || coalesce('; takes no new submissions, what waits is worked off: ' || string_agg(q.name, ', ' order by q.name) filter (where q.draining), ''),
    jsonb_build_object('queue', explain_queue.queue, 'paused', coalesce(jsonb_agg(q.name order by q.name) filter (where q.paused), '[]'),
      'draining', coalesce(jsonb_agg(q.name order by q.name) filter (where q.draining), '[]'))
  from gangq.queues_table q where q.name = explain_queue.queue or starts_with(explain_queue.queue, q.name || '.')
$$;
comment on function gangq.explain_queue is 'Internal. Whether the queue and its ancestors let anything start.';

create function gangq.explain_limits(b gangq.board, queue integer, submitter text, gangs bigint, jobs bigint, gpus bigint, memory bigint, mcpus bigint, hit jsonb)
returns table (gate text, ok boolean, detail text, numbers jsonb) language plpgsql immutable as $$
#variable_conflict use_column
declare
  q integer := explain_limits.queue;
  said text;
  found jsonb := '[]';
  g record;
begin
  while q is not null loop
    said := q || '/' || submitter;
    found := found || coalesce((
      select jsonb_agg(jsonb_build_object('gate', l.gate, 'queue', b.queue_names[q], 'resource', l.resource, 'limit', l.most, 'used', l.used, 'asked', l.asked)
        || case l.gate when 'submitter_limit' then jsonb_build_object('submitter', submitter) else '{}' end)
      from (values
        ('quota', 'gpus', (b.queue_maximum[q] ->> 'gpus')::numeric, b.used_gpus[q]::numeric, gpus::numeric),
        ('quota', 'memory_mb', (b.queue_maximum[q] ->> 'memory_mb')::numeric, b.used_memory[q], memory),
        ('quota', 'cpus', (b.queue_maximum[q] ->> 'cpus')::numeric, round(b.used_mcpus[q] / 1000.0, 3), round(mcpus / 1000.0, 3)),
        ('quota', 'jobs', (b.queue_maximum[q] ->> 'jobs')::numeric, b.used_jobs[q], jobs),
        ('running_limit', 'gangs', b.queue_max_gangs[q], b.used_gangs[q], gangs),
        ('running_limit', 'jobs', b.queue_max_jobs[q], b.used_jobs[q], jobs),
        ('submitter_limit', 'gangs', (b.queue_submitter_maximum[q] ->> 'gangs')::numeric, coalesce((b.usage_submitters -> said ->> 'gangs')::numeric, 0), gangs),
        ('submitter_limit', 'jobs', (b.queue_submitter_maximum[q] ->> 'jobs')::numeric, coalesce((b.usage_submitters -> said ->> 'jobs')::numeric, 0), jobs),
        ('submitter_limit', 'gpus', (b.queue_submitter_maximum[q] ->> 'gpus')::numeric, coalesce((b.usage_submitters -> said ->> 'gpus')::numeric, 0), gpus)
      ) as l(gate, resource, most, used, asked)
      where l.most is not null and l.asked > 0), '[]');
    q := b.queue_parent[q];
  end loop;
  -- What the decision ran into comes first: it has counted what starts before.
  if hit is not null and hit ->> 'gate' in ('quota', 'running_limit', 'submitter_limit') then
    found := jsonb_build_array(hit) || found;
  end if;
  for g in select x.gate, x.free from (values ('quota', 'no maximum on its queues'), ('running_limit', 'no limit on what runs in its queues'),
    ('submitter_limit', 'no limit on what its submitter may hold')) as x(gate, free)
  loop
    gate := g.gate;
    select l.value into numbers from jsonb_array_elements(found) as l
    where l.value ->> 'gate' = g.gate
    order by (l.value ->> 'used')::numeric + (l.value ->> 'asked')::numeric - (l.value ->> 'limit')::numeric desc limit 1;
    ok := numbers is null or (numbers ->> 'used')::numeric + (numbers ->> 'asked')::numeric <= (numbers ->> 'limit')::numeric;
    detail := case when numbers is null then g.free else gangq.gate_text(g.gate, numbers) end;
    return next;
  end loop;
end $$;
comment on function gangq.explain_limits is
  'Internal. Of each sort of limit on the path of a queue the tightest: which queue, limit, used, asked.';

-- The board, for one gang ------------------------------------------------------------------------------------------------

create function gangq.after_starts(b gangq.board, ds gangq.decision[]) returns gangq.board language plpgsql immutable as $$
#variable_conflict use_column
declare
  d gangq.decision;
  k integer;
  role integer;
  low integer;
  shape integer;
  w integer;
  q integer;
  g integer;
  said text;
  device bigint;
begin
  foreach d in array ds loop
    continue when d.action <> 'start';
    k := array_position(b.kind_ids, d.kind_id);
    g := array_position(b.gang_ids, d.gang_id);
    role := 1;
    low := d.members[1];
    for i in 1 .. cardinality(d.incarnations) loop
      while i > low loop
        role := role + 1;
        low := low + d.members[role];
      end loop;
      shape := b.role_shape[b.kind_first_role[k] + role - 1];
      w := array_position(b.worker_ids, d.incarnations[i]);
      b.free_slots[w] := b.free_slots[w] - 1;
      b.free_memory[w] := b.free_memory[w] - b.shape_memory[shape];
      b.free_mcpus[w] := b.free_mcpus[w] - b.shape_mcpus[shape];
      q := b.kind_queue[k];
      while q is not null loop
        b.used_jobs[q] := b.used_jobs[q] + 1;
        b.used_gpus[q] := b.used_gpus[q] + b.shape_gpus[shape];
        b.used_memory[q] := b.used_memory[q] + b.shape_memory[shape];
        b.used_mcpus[q] := b.used_mcpus[q] + b.shape_mcpus[shape];
        q := b.queue_parent[q];
      end loop;
    end loop;
    foreach device in array d.devices loop
      b.device_held[array_position(b.device_ids, device)] := -1;
    end loop;
    q := b.kind_queue[k];
    while q is not null loop
      b.used_gangs[q] := b.used_gangs[q] + case when b.gang_missing[g] is null then 1 else 0 end;
      q := b.queue_parent[q];
    end loop;
    if b.kind_apart[k] is not null then
      b.apart_keys := b.apart_keys || array_fill(b.kind_apart[k], array[cardinality(d.incarnations)]);
      b.apart_hosts := b.apart_hosts || array(select b.worker_host[array_position(b.worker_ids, u.id)] from unnest(d.incarnations) as u(id));
      b.apart_gangs := b.apart_gangs || array_fill(d.gang_id, array[cardinality(d.incarnations)]);
    end if;
  end loop;
  return b;
end $$;
comment on function gangq.after_starts is 'Internal. The board once these starts have been made.';

create function gangq.fits(b gangq.board, kind integer, counts integer[]) returns boolean language sql immutable as $$
  select coalesce(cardinality(b.worker_ids), 0) > 0 and gangq.seat_gang(b, fits.kind, fits.counts, b.free_slots, b.free_memory, b.free_mcpus,
    coalesce(b.device_held, '{}'), array_fill(0, array[cardinality(b.worker_ids)]), array_fill(0::bigint, array[cardinality(b.worker_ids)]),
    array_fill(0::bigint, array[cardinality(b.worker_ids)]), array_fill(0, array[cardinality(b.worker_ids)])) is not null
$$;
comment on function gangq.fits is 'Internal. Whether a gang of this kind fits into what is free, whoever it is kept for.';

create function gangq.idle(b gangq.board) returns gangq.board language plpgsql immutable as $$
begin
  b.free_slots := b.all_slots;
  b.free_memory := b.all_memory;
  b.free_mcpus := b.all_mcpus;
  b.device_held := array(select least(d.held, 0) from unnest(b.device_held) with ordinality as d(held, n) order by d.n);
  b.worker_open := array_fill(true, array[coalesce(cardinality(b.worker_ids), 0)]);
  b.apart_keys := null;
  b.apart_hosts := null;
  b.apart_gangs := null;
  return b;
end $$;
comment on function gangq.idle is 'Internal. The board with nothing placed on it and every worker open; quarantined devices stay so.';

-- Room by role, in all and in the best domain of the level that it has to share.
create function gangq.explain_room(b gangq.board, kind integer, counts integer[])
returns table (role integer, asked integer, room integer, free_gpus integer, asked_gpus integer, level text, best text, best_room integer, hosts integer)
language plpgsql immutable as $$
#variable_conflict use_column
declare
  workers integer := coalesce(cardinality(b.worker_ids), 0);
  rooms integer[];
  r integer;
  shape integer;
  l integer;
begin
  for n in 1 .. cardinality(counts) loop
    role := n;
    r := b.kind_first_role[explain_room.kind] + role - 1;
    shape := b.role_shape[r];
    asked := counts[role];
    asked_gpus := counts[role] * b.shape_gpus[shape];
    room := 0;
    free_gpus := 0;
    best := null;
    best_room := 0;
    hosts := 0;
    l := greatest(b.role_require[r], b.kind_require[explain_room.kind], case when b.role_strategy[r] = 'strict_pack' then array_position(b.levels, 'host') else 0 end);
    level := b.levels[case when l = 0 then array_position(b.levels, 'host') else l end];
    if workers > 0 then
      rooms := gangq.rooms(b, shape, b.free_slots, b.free_memory, b.free_mcpus, b.device_held,
        array_fill(0, array[workers]), array_fill(0::bigint, array[workers]), array_fill(0::bigint, array[workers]), array_fill(0, array[workers]));
      select coalesce(sum(x.room), 0)::integer, count(distinct x.host) filter (where x.room > 0)::integer into room, hosts from unnest(rooms, b.worker_host) as x(room, host);
      if b.shape_gpus[shape] > 0 then
        select count(*)::integer into free_gpus
        from unnest(b.device_worker, b.device_vram, b.device_ids, b.device_held) as d(worker, vram, id, held)
        where d.held = 0 and d.vram >= b.shape_vram[shape] and (b.shape_avoid[shape] is null or not b.shape_avoid[shape] @> to_jsonb(d.id))
          and b.worker_open[d.worker] and b.shape_serves[(shape - 1) * b.classes + b.worker_class[d.worker]];
      end if;
      select p.path, p.room into best, best_room
      from (
        select case level when 'host' then b.hosts[x.host] else b.worker_domains[(x.n - 1) * cardinality(b.levels) + l] end as path, sum(x.room)::integer as room
        from unnest(rooms, b.worker_host) with ordinality as x(room, host, n) group by 1) p
      where p.path is not null order by p.room desc, p.path limit 1;
      best_room := coalesce(best_room, 0);
    end if;
    return next;
  end loop;
end $$;
comment on function gangq.explain_room is
  'Internal. Of each role: how many members there is room for, in all and in the best domain (of the level it must share, else host).';

-- Why the planned start is when it is: what ends then on the workers it is to have.
create function gangq.explain_basis(b gangq.board, ds gangq.decision[], d gangq.decision) returns table (unit bigint, ends_at timestamptz, basis text)
language sql stable as $$
  select h.unit, max(h.ends), min(case
      when j.state = 'preempting' then 'is being stopped'
      when r.p90_s < e.budget_s and (select coalesce(g.go_at, j.claimed_at, b.t)) + make_interval(secs => r.p90_s) <= b.t then 'has outrun its history, so its budget'
      when r.p90_s < e.budget_s then format('history: 90%% of %s of task %s took %s s at most', gangq.counted(r.samples, 'run'), s.task, round(r.p90_s::numeric))
      when h.unit = 0 then 'estimate' else format('budget of %s s', round(e.budget_s::numeric)) end)
  from unnest(b.held_unit, b.held_job, b.held_worker, b.held_ends) as h(unit, job, worker, ends)
  left join gangq.live_jobs j on j.id = h.job left join gangq.live_gangs g on g.id = j.gang_id left join gangq.shapes s on s.id = j.shape_id
  cross join gangq.settings c
  cross join lateral (select coalesce(j.budget_s, case when s.gpus > 0 then c.budget_gpu_s else c.budget_s end) as budget_s) e
  left join gangq.runtimes r on r.queue = s.queue and r.task = s.task and r.samples >= 10
  where b.worker_ids[h.worker] = any (d.incarnations) and h.ends = d.starts_at
  group by h.unit
  union all
  select x.gang_id, d.starts_at, case x.action when 'start' then 'starts in the next pass' else 'has a planned start before it' end
  from unnest(ds) x join unnest(b.gang_ids, b.gang_estimate) as g(id, estimate) on g.id = x.gang_id
  where x.action in ('start', 'plan') and x.turn < d.turn and x.incarnations && d.incarnations
    and coalesce(x.starts_at, b.t) + make_interval(secs => g.estimate) = d.starts_at
$$;
comment on function gangq.explain_basis is
  'Internal. The ends that a planned start waits for, and what each estimate rests on.';

create function gangq.kind_spec(kind_id integer, priority integer) returns jsonb language sql stable as $$
  select jsonb_build_object('queue', k.queue, 'priority', kind_spec.priority, 'require', k.require, 'prefer', k.prefer, 'apart', k.apart, 'roles', (
    select jsonb_agg(jsonb_build_object('name', r.name, 'count', r.max_members, 'min', r.min_members, 'task', s.task, 'gpus', s.gpus, 'vram_mb', s.vram_mb,
      'memory_mb', s.memory_mb, 'cpus', s.cpus, 'labels', s.labels, 'model', s.model, 'selector', s.selector, 'tolerates', s.tolerates,
      'strategy', r.strategy, 'require', r.require, 'prefer', r.prefer, 'balanced', r.balanced) order by r.ordinal)
    from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id where r.kind_id = k.id))
  from gangq.gang_kinds k where k.id = kind_spec.kind_id
$$;
comment on function gangq.kind_spec is 'Internal. What a gang of this kind would be submitted with.';

-- The answers --------------------------------------------------------------------------------------------------------

create function gangq.explain_gang(gang_id bigint) returns table (gate text, ok boolean, detail text, numbers jsonb)
language plpgsql stable as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
  ended gangq.gang_history;
  n record;
  r record;
  h record;
  s gangq.shapes;
  b gangq.board;
  later gangq.board;
  ds gangq.decision[];
  d gangq.decision;
  id bigint;
  on_board boolean;
  k integer;
  counts integer[];
  jobs bigint := 0; gpus bigint := 0; memory bigint := 0; mcpus bigint := 0;
  several boolean;
  fits_now boolean;
  fits_later boolean;
  queue_ok boolean; limit_hit jsonb; serving boolean := true; able boolean := true; room_ok boolean := true; whole_ok boolean := true;
  short text := '';
  before integer;
  unblock text;
  t timestamptz := gangq.now();
  times_out_at timestamptz;
begin
  select x.* into g from gangq.live_gangs x where x.id = explain_gang.gang_id;
  if not found then
    select x.* into ended from gangq.gang_history x where x.gang_id = explain_gang.gang_id order by x.finished_at desc limit 1;
    if not found then
      perform gangq.refuse('GQ002', format('gang %s does not exist', coalesce(explain_gang.gang_id::text, 'null')), 'Gang ids are in gangq.gangs.');
    end if;
    return query select 'state', ended.state = 'done', format('it is %s since %s%s', ended.state, ended.finished_at, coalesce(': ' || ended.reason, '')),
      jsonb_build_object('epoch', ended.epoch, 'attempts', ended.attempts);
    return;
  end if;
  times_out_at := g.timeout_at + make_interval(secs => greatest(0, gangq.ineligible_s(g.kind_id, t) - g.held_s));
  gate := 'state';
  select count(*) filter (where j.state = 'reserved') as reserved, count(*) filter (where j.state = 'running') as running,
    count(*) filter (where j.state = 'preempting') as preempting, count(*) filter (where j.state = 'done') as done,
    max(j.waits_on) as waits_on
  into n from gangq.live_jobs j where j.gang_id = g.id;
  ok := g.state = 'running';
  detail := case g.state
    when 'running' then format('runs since %s, epoch %s', g.go_at, g.epoch)
      || case when g.world_size < g.size then format(', with %s of %s members', g.world_size, g.size) else '' end
    when 'reserved' then format('reserved, epoch %s: %s of %s members claimed, deadline in %s s', g.epoch, n.running, coalesce(g.world_size, g.size), round(extract(epoch from g.deadline_at - t)::numeric, 1))
    when 'draining' then format('draining since %s (%s): waits until %s confirmed to have stopped', g.drain_started_at, g.drain_cause, gangq.counted(n.preempting, 'member') || case when n.preempting = 1 then ' has' else ' have' end)
    when 'waiting' then format('waits for %s to be done', gangq.counted(n.waits_on, 'job'))
    else format('blocked for %s s: waits to be placed', ceil(extract(epoch from t - g.submitted_at)))
      -- Of the third style a gang that waits for capacity notices nothing.
      || case when g.timeout_style = 'hard' then coalesce('; fails unless it is placed by ' || times_out_at, '')
        when g.timeout_style = 'soft' then coalesce('; its members run as single jobs unless it is placed by ' || times_out_at, '')
        else '' end end;
  numbers := to_jsonb(n) || jsonb_build_object('epoch', g.epoch, 'size', g.size, 'world_size', g.world_size);
  return next;
  if g.missing_since is not null then
    -- The others run, and wait for it at a barrier: to those who ask it stands still.
    gate := 'missing';
    ok := false;
    select string_agg(coalesce(j.epoch_rank, j.rank)::text, ', ' order by j.rank) as ranks, count(*) filter (where j.state = 'blocked') as blocked,
      min(j.deadline_at) as deadline_at
    into h from gangq.live_jobs j where j.gang_id = g.id and j.state in ('blocked', 'reserved') and gangq.in_epoch(j, g);
    detail := format('has lacked rank %s for %s s; ', h.ranks, ceil(extract(epoch from t - g.missing_since)))
      || case when h.blocked = 0 then format('reserved, to be claimed within %s s', ceil(extract(epoch from h.deadline_at - t)))
        else 'waits for a place' || case when g.not_before > t then format(', not before %s (%s s)', g.not_before, ceil(extract(epoch from g.not_before - t))) else '' end end
      || format('; the whole gang stops and starts anew if it still does at %s', g.missing_since + make_interval(secs => g.timeout_s));
    numbers := jsonb_build_object('since', g.missing_since, 'until', g.missing_since + make_interval(secs => g.timeout_s), 'blocked', h.blocked,
      'reserved', n.reserved, 'not_before', g.not_before);
    return next;
    if h.blocked > 0 then
      return query select x.* from gangq.explain_queue((select z.queue from gangq.gang_kinds z where z.id = g.kind_id)) x;
      for s in
        select x.* from gangq.shapes x
        where x.id in (select j.shape_id from gangq.live_jobs j where j.gang_id = g.id and j.state = 'blocked' and gangq.in_epoch(j, g)) order by x.id
      loop
        return query select 'workers', (x.numbers ->> 'open')::integer > 0, x.detail, x.numbers from gangq.explain_workers(s, t) x;
      end loop;
    end if;
  end if;
  if g.state not in ('blocked', 'waiting') then
    return;
  end if;
  gate := 'backoff';
  ok := g.not_before is null or g.not_before <= t;
  detail := case when ok then 'not backing off' else format('not before %s (%s s)', g.not_before, ceil(extract(epoch from g.not_before - t))) end
    || case when g.placement_misses > 0 then format('; %s not claimed in time', gangq.counted(g.placement_misses, 'reservation')) else '' end
    || case when g.timeouts > 0 then format('; not placed within its timeout of %s s %s', g.timeout_s, gangq.counted(g.timeouts, 'time')) else '' end
    || case when g.never_started >= 10 then format('; lost a member at the start barrier %s times: look at the workers'' logs', g.never_started)
      when g.never_started > 0 then format('; lost a member at the start barrier %s', gangq.counted(g.never_started, 'time')) else '' end;
  numbers := jsonb_build_object('not_before', g.not_before, 'placement_misses', g.placement_misses, 'never_started', g.never_started, 'timeouts', g.timeouts);
  return next;

  -- The decision, as the next pass will make it; for who is not looked at (not due, or far back), as if it came last.
  on_board := g.state = 'blocked' and (g.not_before is null or g.not_before <= t) and 200 > (
    select count(*) from (
      select 1 from gangq.live_gangs x
      where x.state = 'blocked' and x.kind_id = g.kind_id and x.order_key < g.order_key and (x.not_before is null or x.not_before <= t) limit 200) x);
  if on_board then
    b := gangq.look(200);
    id := g.id;
  else
    id := -1;
    b := gangq.look_changed(t, 200, jsonb_build_array(jsonb_build_object('submit', gangq.kind_spec(g.kind_id, g.priority))));
  end if;
  ds := array(select x from gangq.decide_on(b, 200, each_gang => true) x);
  select x.* into d from unnest(ds) x where x.gang_id = id limit 1;
  k := b.gang_kind[array_position(b.gang_ids, id)];
  several := b.kind_roles[k] > 1;
  counts := b.role_min[b.kind_first_role[k] : b.kind_first_role[k] + b.kind_roles[k] - 1];
  select sum(c.members), sum(c.members * b.shape_gpus[c.shape]), sum(c.members * b.shape_memory[c.shape]), sum(c.members * b.shape_mcpus[c.shape])
  into jobs, gpus, memory, mcpus
  from (select c.members, b.role_shape[b.kind_first_role[k] + c.n::integer - 1] as shape from unnest(counts) with ordinality as c(members, n)) c;
  later := gangq.after_starts(b, array(select x from unnest(ds) x where x.action = 'start' and x.gang_id <> id and (d.turn is null or x.turn < d.turn)));
  fits_now := gangq.fits(b, k, counts);
  fits_later := fits_now and gangq.fits(later, k, counts);

  select x.* into r from gangq.explain_queue((select z.queue from gangq.gang_kinds z where z.id = g.kind_id)) x;
  queue_ok := r.ok;
  if not queue_ok then
    unblock := format('gangq queue resume %s', r.numbers -> 'paused' ->> 0);
  end if;
  return query select r.gate, r.ok, r.detail, r.numbers;
  for r in
    select x.* from gangq.explain_limits(b, b.kind_queue[k], g.submitter, 1::bigint, jobs, gpus, memory, mcpus,
      case when d.gate in ('quota', 'running_limit', 'submitter_limit') then d.numbers || jsonb_build_object('gate', d.gate) end) x
  loop
    if not r.ok then
      limit_hit := r.numbers;
      unblock := coalesce(unblock, format('the end of work that holds %s %s in queue %s%s, or a limit of %s', (r.numbers ->> 'used')::numeric + (r.numbers ->> 'asked')::numeric - (r.numbers ->> 'limit')::numeric,
        r.numbers ->> 'resource', r.numbers ->> 'queue', coalesce(' for ' || (r.numbers ->> 'submitter'), ''), (r.numbers ->> 'used')::numeric + (r.numbers ->> 'asked')::numeric));
    end if;
    return query select r.gate, r.ok, r.detail, r.numbers;
  end loop;

  for r in select x.*, y.queue from gangq.kind_roles x join gangq.gang_kinds y on y.id = x.kind_id where x.kind_id = g.kind_id order by x.ordinal loop
    select x.* into s from gangq.shapes x where x.id = r.shape_id;
    short := case when several then format('role %s: ', r.name) else '' end;
    select x.* into h from gangq.explain_workers(s, t) x;
    return query select 'workers', (h.numbers ->> 'open')::integer > 0, short || h.detail, h.numbers || case when several then jsonb_build_object('role', r.name) else '{}' end;
    if (h.numbers ->> 'open')::integer = 0 then
      serving := false;
      unblock := coalesce(unblock, case when (h.numbers ->> 'serving')::integer = 0
        then format('a worker that serves queue %s with task %s%s', s.queue, s.task, case when s.labels <> '{}' then ' and labels ' || s.labels::text else '' end)
        else format('one of the %s back: gangq uncordon, gangq unquarantine --worker, or a restart', gangq.counted((h.numbers ->> 'serving')::numeric, 'worker')) end);
    end if;
    select x.* into h from gangq.explain_hardware(s, r.min_members) x;
    return query select 'hardware', h.ok, short || h.detail, h.numbers || case when several then jsonb_build_object('role', r.name) else '{}' end;
    if not h.ok then
      able := false;
      unblock := coalesce(unblock, format('workers with room for %s of %s', gangq.counted(r.min_members - coalesce((h.numbers -> 'feasible' ->> 'members')::integer, 0), 'more member'), gangq.counted(s.gpus, 'GPU'))
        || coalesce(', or asking for ' || (select string_agg(f.key || ' ' || f.value, ' or ' order by f.key) from jsonb_each_text(h.numbers -> 'feasible') f
          where f.key <> 'members' or f.value::integer > 0), ''));
    end if;
    return query select x.* from gangq.explain_avoided(s, not able) x;
  end loop;
  if able and serving and not gangq.fits(gangq.idle(b), k, counts) then
    able := false;
    select string_agg(format('%sthe best %s, %s, has room for %s of %s', case when several then format('role %s: ', b.role_names[b.kind_first_role[k] + x.role - 1]) else '' end,
      x.level, x.best, x.best_room, x.asked), '; ' order by x.role) as said, max(x.asked - x.best_room) as missing, min(x.level) as level
    into h from gangq.explain_room(gangq.idle(b), k, counts) x;
    return query select 'hardware', false, 'not even idle workers hold it as it wants to be placed: ' || coalesce(h.said, 'there are none'),
      (select jsonb_agg(to_jsonb(x)) from gangq.explain_room(gangq.idle(b), k, counts) x);
    unblock := coalesce(unblock, format('room for %s in one %s', gangq.counted(greatest(h.missing, 1), 'more member'), h.level));
  end if;

  for r in select x.* from gangq.explain_room(b, k, counts) x loop
    short := case when several then format('role %s: ', b.role_names[b.kind_first_role[k] + r.role - 1]) else '' end;
    room_ok := room_ok and r.room >= r.asked;
    select x.* into s from gangq.shapes x join gangq.kind_roles y on y.shape_id = x.id where y.kind_id = g.kind_id and y.ordinal = r.role;
    select x.* into h from gangq.explain_slots(s, r.asked, t) x;
    return query select h.gate, h.ok, short || h.detail, h.numbers;
    if not h.ok then
      unblock := coalesce(unblock, short || format('%s more on workers that have the rest',
        gangq.counted((h.numbers ->> 'without_slots')::numeric - (h.numbers ->> 'room')::numeric, 'free slot')));
    end if;
    return query select 'capacity', r.room >= r.asked, short || format('free now: room for %s of %s', r.room, gangq.counted(r.asked, 'member'))
        || case when r.asked_gpus > r.free_gpus then format(' (%s of %s)', r.free_gpus, gangq.counted(r.asked_gpus, 'GPU'))
          when r.asked_gpus > 0 then format(' (%s needed, %s free)', gangq.counted(r.asked_gpus, 'GPU'), r.free_gpus) else '' end,
      jsonb_build_object('room', r.room, 'asked', r.asked, 'free_gpus', r.free_gpus, 'asked_gpus', r.asked_gpus)
        || case when several then jsonb_build_object('role', b.role_names[b.kind_first_role[k] + r.role - 1]) else '{}' end;
    -- Enough in all, and yet no place.
    if not fits_now and (r.room >= r.asked or (h.ok and r.asked_gpus > 0 and r.free_gpus >= r.asked_gpus)) then
      whole_ok := false;
      return query select 'fragmentation', false, short || case
          when b.role_strategy[b.kind_first_role[k] + r.role - 1] = 'strict_spread' then format('a host for each of %s is needed, and %s have room', gangq.counted(r.asked, 'member'), r.hosts)
          when r.room < r.asked then format('%s free in all, but not together: the best %s, %s, has room for %s of %s', gangq.counted(r.free_gpus, 'GPU'), r.level, r.best, r.best_room, gangq.counted(r.asked, 'member'))
          else format('there is room for %s in all, but the best %s, %s, has %s of %s', r.room, r.level, r.best, r.best_room, r.asked) end,
        jsonb_build_object('room', r.room, 'asked', r.asked, 'free_gpus', r.free_gpus, 'asked_gpus', r.asked_gpus, 'level', r.level, 'best', r.best, 'best_room', r.best_room, 'hosts', r.hosts);
      unblock := coalesce(unblock, case
        when b.role_strategy[b.kind_first_role[k] + r.role - 1] = 'strict_spread' then format('room on %s', gangq.counted(r.asked - r.hosts, 'more host'))
        when r.room < r.asked then format('GPUs coming free on one %s: room for %s more', r.level, gangq.counted(r.asked - r.room, 'member'))
        else format('room for %s more in %s %s', gangq.counted(greatest(r.asked - r.best_room, 1), 'member'), r.level, r.best) end);
    elsif r.room < r.asked then
      unblock := coalesce(unblock, short || format('room for %s more', gangq.counted(r.asked - r.room, 'member')));
    end if;
  end loop;
  if fits_now or not room_ok and whole_ok then
    return query select 'fragmentation', true, case when fits_now then 'what is free lies together as it needs it' else 'too little is free, however it lies' end, null::jsonb;
  elsif whole_ok then
    return query select 'fragmentation', false, 'there is room for each of its roles, but not for all of them at once', null::jsonb;
    unblock := coalesce(unblock, 'room for all of its roles at once');
  end if;

  gate := 'ahead';
  if on_board and d.turn is not null then
    select count(*)::integer as gangs, count(*) filter (where x.action = 'start') as starts, (array_agg(x.gang_id order by x.turn))[1 : 5] as first
    into n from unnest(ds) x where x.turn < d.turn and x.gang_id is not null;
  else
    select count(*)::integer as gangs, 0::bigint as starts, (array_agg(x.id order by x.order_key))[1 : 5] as first
    into n from gangq.live_gangs x where x.state = 'blocked' and x.id <> g.id and x.order_key < g.order_key and (x.not_before is null or x.not_before <= t);
  end if;
  before := n.gangs;
  ok := fits_later or not fits_now;
  detail := case when before = 0 then 'first in line' else format('place %s: %s before it (%s%s)', before + 1, gangq.counted(before, 'gang'),
      (select string_agg('gang ' || f.id, ', ') from unnest(n.first) as f(id)), case when before > 5 then ', ...' else '' end)
    || case when n.starts > 0 then format('; %s in the next pass', case n.starts when 1 then '1 of them starts' else n.starts || ' of them start' end) else '' end
    || case when not ok then ', and what is then free is too little' else '' end end;
  numbers := jsonb_build_object('place', before + 1, 'gangs', before, 'starts', n.starts, 'first', coalesce(to_jsonb(n.first), '[]'));
  return next;
  if not ok then
    unblock := coalesce(unblock, format('the end of one of the %s that start before it, or a higher priority: gangq priority %s g%s', gangq.counted(n.starts, 'gang'), least(1000, g.priority + 1), g.id));
  end if;

  gate := 'kept';
  select count(distinct x.incarnation) filter (where x.gang_id = g.id) as for_it, count(distinct x.incarnation) filter (where x.gang_id <> g.id) as for_others,
    jsonb_agg(distinct jsonb_build_object('gang_id', x.gang_id, 'until', x.until)) filter (where x.gang_id <> g.id) as gangs
  into n
  from gangq.earmarks x where x.incarnation = any (b.worker_ids) and (x.kind = 'plan' or x.until > t);
  ok := not fits_later or coalesce(d.action = 'start' or d.gate in ('paused', 'quota', 'running_limit', 'submitter_limit'), false);
  detail := concat_ws('; ', case when n.for_it > 0 then format('%s kept for it', case n.for_it when 1 then '1 worker is' else n.for_it || ' workers are' end) end,
    case when n.for_others > 0 then format('%s kept for ', case n.for_others when 1 then '1 worker is' else n.for_others || ' workers are' end) || (
      select string_agg(format('gang %s until %s', e.value ->> 'gang_id', to_char((e.value ->> 'until')::timestamptz, 'HH24:MI:SS')), ', ' order by (e.value ->> 'until')::timestamptz)
      from (select z.value from jsonb_array_elements(n.gangs) z order by (z.value ->> 'until')::timestamptz limit 4) e) end);
  detail := case when detail = '' then 'no worker is kept for anybody' else detail end
    || case when ok then '' else format(': it would fit now, and could still be running then (estimate %s s)', ceil(b.gang_estimate[array_position(b.gang_ids, id)])) end;
  numbers := to_jsonb(n);
  return next;
  if not ok then
    unblock := coalesce(unblock, format('the start of %s, a budget short enough to end before, or a higher priority than theirs',
      coalesce((select string_agg('gang ' || (e.value ->> 'gang_id'), ', ') from jsonb_array_elements(n.gangs) e), 'those with a planned start')));
  end if;

  select p.detail, p.numbers into n from gangq.explain_preempting(g.id) p;
  if found or d.action = 'preempt' then
    gate := 'preempting';
    ok := not found;
    detail := case when found then n.detail else format('the next pass tells %s to stop for it', (
      select string_agg(case when v.id > 0 then 'gang ' || v.id else 'job ' || -v.id end, ', ') from unnest(d.victims) as v(id))) end;
    numbers := case when found then n.numbers else jsonb_build_object('victims', d.victims) end;
    return next;
  end if;

  -- What follows holds nothing: when, and what would help.
  gate := 'start';
  ok := true;
  numbers := null;
  if not on_board and g.not_before > t then
    detail := format('not before %s', g.not_before);
    unblock := coalesce(unblock, format('%s s more', ceil(extract(epoch from g.not_before - t))));
  elsif g.state = 'waiting' then
    detail := 'once the jobs it waits for are done';
    unblock := 'the end of those jobs';
  elsif d.action = 'start' then
    detail := 'the next pass starts it';
    numbers := jsonb_build_object('starts_at', b.t);
    unblock := 'nothing: the next pass starts it';
  elsif d.action = 'plan' then
    select jsonb_agg(jsonb_build_object('gang_id', case when x.unit > 0 then x.unit end, 'job_id', case when x.unit < 0 then -x.unit end, 'basis', x.basis) order by x.unit) as basis,
      string_agg(format('%s (%s)', case when x.unit > 0 then 'gang ' || x.unit when x.unit < 0 then 'job ' || -x.unit else 'a plain job' end, x.basis), ', ' order by x.unit) as said
    into n from gangq.explain_basis(b, ds, d) x;
    detail := format('planned in %s s at the latest, at %s', ceil(extract(epoch from d.starts_at - b.t)), d.starts_at)
      || coalesce(', at the end of ' || n.said, '');
    numbers := jsonb_build_object('starts_at', d.starts_at, 'in_s', ceil(extract(epoch from d.starts_at - b.t)), 'place', d.place, 'basis', coalesce(n.basis, '[]'));
    unblock := concat_ws(', or ', unblock, 'the end of ' || (select string_agg(case when x.value -> 'gang_id' <> 'null' then 'gang ' || (x.value ->> 'gang_id') when x.value -> 'job_id' <> 'null' then 'job ' || (x.value ->> 'job_id') else 'a plain job' end, ', ')
      from jsonb_array_elements(n.basis) x));
  else
    detail := case when not queue_ok then 'none while its queue is paused'
      when limit_hit is not null then 'none until there is room under that limit'
      when not able or not serving then 'none: no workers could hold it'
      when b.reservations = 0 then 'not planned: settings.reservations is 0'
      when before = 0 then 'after the gangs that have a planned start'
      else format('not planned: after %s before it, of which the first %s that wait get a planned start', gangq.counted(before, 'gang'), b.reservations) end;
    numbers := jsonb_build_object('after', before);
  end if;
  return next;
  gate := 'unblock';
  detail := coalesce(unblock, 'the next pass');
  numbers := null;
  return next;
end $$;
comment on function gangq.explain_gang is
  'Why is this gang not running, gate by gate, with numbers: state, missing (it runs, and lacks a member that is to be replaced), backoff, queue, quota, running_limit, submitter_limit, workers, '
  'hardware, avoids, slots, capacity, fragmentation, ahead, kept, preempting; ok false marks what holds it. Then start (when, and '
  'what that rests on) and unblock (what would help). Asks gangq.decide; several rows per role. Raises GQ002.';

create function gangq.explain_job(job_id bigint) returns table (gate text, ok boolean, detail text, numbers jsonb)
language plpgsql stable as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs;
  s gangq.shapes;
  ended gangq.history;
  b gangq.board;
  n record;
  r record;
  unblock text;
  before integer;
begin
  select x.* into j from gangq.live_jobs x where x.id = explain_job.job_id;
  if not found then
    select h.* into ended from gangq.history h where h.job_id = explain_job.job_id order by h.finished_at desc limit 1;
    if not found then
      perform gangq.refuse('GQ002', format('job %s does not exist', coalesce(explain_job.job_id::text, 'null')), 'Job ids are in gangq.jobs.');
    end if;
    return query select 'state', ended.state = 'done', format('it is %s since %s%s', ended.state, ended.finished_at, coalesce(': ' || (ended.error ->> 'type'), '')),
      jsonb_build_object('attempts', ended.attempts);
    return;
  end if;
  if j.gang_id is not null then
    return query select 'gang', true, format('rank %s of gang %s', coalesce(j.epoch_rank, j.rank), j.gang_id), jsonb_build_object('gang_id', j.gang_id, 'state', j.state);
    return query select x.* from gangq.explain_gang(j.gang_id) x;
    return;
  end if;
  select x.* into s from gangq.shapes x where x.id = j.shape_id;
  gate := 'state';
  ok := j.state = 'running';
  detail := case j.state
    when 'running' then format('runs since %s on %s', j.claimed_at, (select i.name from gangq.incarnations i where i.id = j.incarnation))
    when 'preempting' then format('told to stop (%s) %s s ago', j.stop_reason, round(extract(epoch from t - j.told_at)::numeric, 1))
    when 'scheduled' then format('due in %s s%s', round(extract(epoch from j.due_at - t)::numeric, 1), coalesce(', after: ' || (j.error ->> 'type'), ''))
    when 'waiting' then format('waits for jobs %s', (select string_agg(d.on_job_id::text, ', ' order by d.on_job_id) from gangq.dependencies d where d.job_id = j.id))
    else 'pending: claimable by any worker that fits' end;
  numbers := jsonb_build_object('state', j.state, 'attempts', j.attempts, 'crashes', j.crashes, 'trips', j.trips);
  return next;
  if j.state in ('running', 'preempting') then
    return;
  end if;
  unblock := case j.state when 'scheduled' then format('%s s more', ceil(extract(epoch from j.due_at - t))) when 'waiting' then 'the end of those jobs' end;
  select x.* into r from gangq.explain_queue(s.queue) x;
  if not r.ok then
    unblock := coalesce(unblock, format('gangq queue resume %s', r.numbers -> 'paused' ->> 0));
  end if;
  return query select r.gate, r.ok, r.detail, r.numbers;
  b.t := t;
  -- What is used is counted only where there is a limit on it.
  if exists (select 1 from gangq.limits_of(gangq.queue_path(s.queue))) then
    b := gangq.look_at_usage(gangq.look_at_queues(b));
  else
    b.queue_names := array[s.queue];
  end if;
  for r in
    select x.* from gangq.explain_limits(b, array_position(b.queue_names, s.queue), j.submitter, 0::bigint, 1::bigint, s.gpus::bigint, s.memory_mb, (s.cpus * 1000)::bigint, null) x
  loop
    if not r.ok then
      unblock := coalesce(unblock, format('the end of work that holds %s %s in queue %s, or a limit of %s', (r.numbers ->> 'used')::numeric + (r.numbers ->> 'asked')::numeric - (r.numbers ->> 'limit')::numeric,
        r.numbers ->> 'resource', r.numbers ->> 'queue', (r.numbers ->> 'used')::numeric + (r.numbers ->> 'asked')::numeric));
    end if;
    return query select r.gate, r.ok, r.detail, r.numbers;
  end loop;
  select x.* into r from gangq.explain_workers(s, t) x;
  if (r.numbers ->> 'open')::integer = 0 then
    unblock := coalesce(unblock, case when (r.numbers ->> 'serving')::integer = 0
      then format('a worker that serves queue %s with task %s%s', s.queue, s.task, case when s.labels <> '{}' then ' and labels ' || s.labels::text else '' end)
      else format('one of the %s back: gangq uncordon, gangq unquarantine --worker, or a restart', gangq.counted((r.numbers ->> 'serving')::numeric, 'worker')) end);
  end if;
  return query select 'workers', (r.numbers ->> 'open')::integer > 0, r.detail, r.numbers;
  select x.* into r from gangq.explain_hardware(s, 1) x;
  if not r.ok then
    unblock := coalesce(unblock, format('a worker with %s of %s MiB, %s MiB and %s', gangq.counted(s.gpus, 'GPU'), s.vram_mb, s.memory_mb, gangq.counted(s.cpus, 'CPU')));
  end if;
  return query select 'hardware', r.ok, r.detail, r.numbers;
  return query select x.* from gangq.explain_avoided(s, not r.ok and (select (w.numbers ->> 'serving')::integer > 0 from gangq.explain_workers(s, t) w)) x;
  select coalesce(sum(x.room), 0)::integer as room, coalesce(sum(x.slots), 0)::integer as free_slots, coalesce(sum(x.gpus), 0)::integer as free_gpus,
    coalesce(max(x.gpus), 0)::integer as most_gpus, count(*) filter (where x.room > 0 and x.kept)::integer as kept, count(*) filter (where x.room > 0)::integer as workers
  into n
  from (
    select case when s.plain then f.plain_room else gangq.members_that_fit(s, f.slots, f.memory_mb, f.cpus, f.vrams, f.device_ids) end as room, f.slots,
      (select count(*) from unnest(f.vrams, f.device_ids) as v(vram, id) where v.vram >= s.vram_mb and (s.avoid is null or v.id <> all (s.avoid))) as gpus,
      exists (select 1 from gangq.earmarks e where e.incarnation = i.id and (e.kind = 'escrow' and e.until > t or e.kind = 'plan' and e.order_key <= j.order_key)) as kept
    from gangq.free_capacity(gangq.candidates(t)) f join gangq.incarnations i on i.id = f.incarnation where gangq.serves(i, s)) x;
  select x.* into r from gangq.explain_slots(s, 1, t) x;
  if not r.ok then
    unblock := coalesce(unblock, 'a free slot on a worker that has the rest');
  end if;
  return query select r.gate, r.ok, r.detail, r.numbers;
  return query select 'capacity', n.room > 0, format('free now: room for %s of its kind (%s, %s on workers that serve it)', n.room, gangq.counted(n.free_slots, 'slot'), gangq.counted(n.free_gpus, 'device')),
    jsonb_build_object('room', n.room, 'asked', 1, 'free_slots', n.free_slots, 'free_gpus', n.free_gpus, 'asked_gpus', s.gpus);
  if n.room = 0 and s.gpus > 0 and n.free_gpus >= s.gpus and r.ok then
    return query select 'fragmentation', false, format('%s free in all, but the best worker has %s of %s', gangq.counted(n.free_gpus, 'GPU'), n.most_gpus, s.gpus),
      jsonb_build_object('free_gpus', n.free_gpus, 'asked_gpus', s.gpus, 'best', n.most_gpus);
    unblock := coalesce(unblock, format('%s more on one worker', gangq.counted(s.gpus - n.most_gpus, 'free GPU')));
  else
    return query select 'fragmentation', true, case when n.room > 0 then 'what is free lies together as it needs it' else 'too little is free, however it lies' end, null::jsonb;
  end if;
  if n.room = 0 then
    unblock := coalesce(unblock, 'the end of something that runs on a worker that serves it');
  end if;
  gate := 'ahead';
  before := (select count(*) from (
    select 1 from gangq.live_jobs x where x.shape_id = j.shape_id and x.state = 'pending' and x.order_key < j.order_key limit 10001) x);
  ok := before < greatest(n.room, 1);
  detail := format('%s jobs of its kind come before it', case when before > 10000 then 'more than 10000' else before::text end);
  numbers := jsonb_build_object('jobs', before, 'place', before + 1);
  return next;
  if not ok then
    unblock := coalesce(unblock, format('%s of its kind claimed first, or a higher priority: gangq priority %s %s', gangq.counted(before + 1 - n.room, 'job'), least(1000, j.priority + 1), j.id));
  end if;
  gate := 'kept';
  ok := n.workers = 0 or n.kept < n.workers;
  numbers := jsonb_build_object('workers', n.kept, 'gangs', (
    select coalesce(jsonb_agg(jsonb_build_object('gang_id', e.gang_id, 'until', e.until) order by e.until), '[]')
    from (select e.gang_id, max(e.until) as until from gangq.earmarks e where e.order_key <= j.order_key or e.kind = 'escrow' group by e.gang_id order by 2 limit 4) e));
  detail := case when n.kept = 0 then 'no worker with room is kept for a gang before it'
    else format('%s of %s with room are kept for ', n.kept, gangq.counted(n.workers, 'worker')) || (
      select string_agg(format('gang %s until %s', e.value ->> 'gang_id', to_char((e.value ->> 'until')::timestamptz, 'HH24:MI:SS')), ', ') from jsonb_array_elements(numbers -> 'gangs') e)
      || format('; work that ends before may use them (its estimate is %s s)', ceil(gangq.estimate_s(s.queue, s.task, s.gpus::integer, j.budget_s))) end;
  return next;
  if not ok then
    unblock := coalesce(unblock, 'the start of those gangs, a budget short enough to end before, or a higher priority than theirs');
  end if;
  gate := 'start';
  ok := true;
  detail := case when unblock is null then 'a worker with room takes it when it next asks' when j.state = 'pending' then format('not planned: single jobs start as room comes free, after %s of its kind', gangq.counted(before, 'job'))
    when j.state = 'scheduled' then format('not before %s', j.due_at) else 'once the jobs it waits for are done' end;
  numbers := jsonb_build_object('after', before);
  return next;
  gate := 'unblock';
  detail := coalesce(unblock, 'nothing: it is claimable');
  numbers := null;
  return next;
end $$;
comment on function gangq.explain_job is
  'Why is this job not running, gate by gate, with numbers, as explain_gang says it; for a member: its gang. Raises GQ002.';

-- Sequential scans are off: however much of live_jobs is scheduled, the rest of it is not read for that.
create function gangq.waiting_later() returns table (shape_id integer, state text, priority smallint, jobs integer, since timestamptz, due timestamptz)
language sql stable set enable_seqscan = off as $$
  select j.shape_id, j.state, j.priority, count(*)::integer, min(j.submitted_at), min(j.due_at)
  from gangq.live_jobs j where j.state = 'scheduled' group by j.shape_id, j.state, j.priority
  union all
  select j.shape_id, j.state, j.priority, count(*)::integer, min(j.submitted_at), null
  from gangq.live_jobs j where j.state = 'waiting' and j.gang_id is null group by j.shape_id, j.state, j.priority
$$;
comment on function gangq.waiting_later is
  'Internal, for the view waiting: solo jobs that are due later or wait for others, by shape and priority.';

create view gangq.waiting as
select 'gang' as kind, g.id, s.queue, s.task, g.priority, g.size, g.state, g.submitted_at as since,
  case
    when g.state = 'waiting' then 'waits for other jobs'
    when not (select bool_and(not q.paused) from gangq.queues_table q where q.name = s.queue or starts_with(s.queue, q.name || '.')) then 'its queue is paused'
    when g.not_before > c.t then format('backing off for %s s', ceil(extract(epoch from g.not_before - c.t)))
    when p.starts_at is not null then format('place %s of those with a planned start, in %s s at the latest', p.place, ceil(extract(epoch from p.starts_at - c.t)))
    when h.why is not null then h.why
    when v.gate in ('paused', 'capacity', 'reserved', 'unknown') or v.gate is null then 'waits for capacity'
    else gangq.gate_text(v.gate, v.numbers) end as why,
  v.gate, p.starts_at
from gangq.live_gangs g
join gangq.shapes s on s.id = g.shape_id
cross join (select gangq.now() as t offset 0) c
left join gangq.verdicts v on v.kind_id = g.kind_id
left join gangq.plans p on p.gang_id = g.id
left join (
  select k.kind_id, min(gangq.infeasible(r.shape_id, r.min_members)) as why
  from (
    select distinct z.kind_id from gangq.live_gangs z left join gangq.verdicts x on x.kind_id = z.kind_id
    where z.state = 'blocked' and coalesce(x.gate, 'unknown') in ('infeasible', 'capacity', 'unknown')) k
  join gangq.kind_roles r on r.kind_id = k.kind_id
  group by k.kind_id) h on g.state = 'blocked' and h.kind_id = g.kind_id
where g.state in ('waiting', 'blocked')
union all
select 'job', null, s.queue, s.task, x.priority, x.jobs, x.state, x.since,
  case
    when x.state = 'waiting' then 'waits for other jobs'
    when x.state = 'scheduled' then 'due later, the first at ' || x.due
    when not (select bool_and(not q.paused) from gangq.queues_table q where q.name = s.queue or starts_with(s.queue, q.name || '.')) then 'its queue is paused'
    else coalesce(h.why, 'waits for a free worker') end, null, null
from (
  -- Counted in the index of claims, whose order begins with the priority.
  select z.shape_id, 'pending' as state, p.priority, p.jobs, h.submitted_at as since, null::timestamptz as due
  from gangq.pending_shapes z
  cross join lateral (
    select (1000 - (j.order_key >> 50))::smallint as priority, count(*)::integer as jobs, min(j.order_key) as head
    from gangq.live_jobs j where j.shape_id = z.shape_id and j.state = 'pending' group by j.order_key >> 50) p
  join lateral (
    select j.submitted_at from gangq.live_jobs j
    where j.shape_id = z.shape_id and j.state = 'pending' and j.order_key = p.head limit 1) h on true
  union all
  select l.shape_id, l.state, l.priority, l.jobs, l.since, l.due from gangq.waiting_later() l) x
-- Looked up one by one: shapes are kept for ever.
cross join lateral (select z.queue, z.task from gangq.shapes z where z.id = x.shape_id offset 0) s
left join lateral (select gangq.infeasible(x.shape_id, 1) as why) h on x.state = 'pending';
comment on view gangq.waiting is
  'What waits, and why: one row per gang, one per kind and priority of solo jobs (size: how many; since: '
  'when the first of them was submitted). gate: what the last pass found for gangs of its kind; starts_at: its planned start, if it has one. explain_gang and explain_job say more.';

create function gangq.schema_version() returns text language sql stable as $$
  select max(m.name) from gangq.migrations m where m.name <> 'code'
$$;
comment on function gangq.schema_version is 'The newest migration applied; the library refuses to work with another.';
