-- decide_on judges a board, for explain and plan: as gangq.placement does in Python for what is carried out.
-- Locks: the gangs, their jobs, then the chosen worker rows, all with skip locked: what is busy now is tried again. Then queues
-- that have limits, by name: the only rows it waits for, 100 ms at most, because many claims take them in turn.

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
comment on function gangq.members_that_fit is
  'Internal. How many jobs of this shape fit into this much free capacity; devices are whole and never shared, and one '
  'it avoids is none.';

create type gangq.decision as (
  action text,
  gang_id bigint,
  kind_id integer,
  place integer,
  members integer[],
  incarnations bigint[],
  devices bigint[],
  starts_at timestamptz,
  victims bigint[],
  kept jsonb,
  gate text,
  numbers jsonb,
  turn integer
);
comment on type gangq.decision is
  'One decision of a pass. action: start, plan, preempt, move or wait; stop: its time was up. turn: the how manyth gang it looked at. members: how many of each role. incarnations: the worker '
  'of each, ranks in order. devices: theirs, in the same order. kept: [incarnation, slots, memory_mb, thousandths of a CPU, '
  'GPUs] that each of its workers must have for it at starts_at. victims of a preempt, and the solo job of a move (negative '
  'ids: solo jobs), are told to stop.';

-- Why so much more may not be placed in a queue, its ancestors considered, or null when it may.
create function gangq.limit_on(
  b gangq.board, queue integer, submitter text, gangs bigint, jobs bigint, gpus bigint, memory bigint, mcpus bigint,
  used_gangs bigint[], used_jobs bigint[], used_gpus bigint[], used_memory bigint[], used_mcpus bigint[], submitters jsonb
) returns jsonb language plpgsql immutable as $$
declare
  q integer := limit_on.queue;
  said text;
  hit jsonb;
begin
  while q is not null loop
    if b.queue_max_gangs[q] < used_gangs[q] + gangs then
      return jsonb_build_object('gate', 'running_limit', 'queue', b.queue_names[q], 'resource', 'gangs', 'limit', b.queue_max_gangs[q], 'used', used_gangs[q], 'asked', gangs);
    elsif b.queue_max_jobs[q] < used_jobs[q] + jobs then
      return jsonb_build_object('gate', 'running_limit', 'queue', b.queue_names[q], 'resource', 'jobs', 'limit', b.queue_max_jobs[q], 'used', used_jobs[q], 'asked', jobs);
    end if;
    if b.queue_maximum[q] is not null then
      select jsonb_build_object('gate', 'quota', 'queue', b.queue_names[q], 'resource', x.key, 'limit', (b.queue_maximum[q] ->> x.key)::numeric, 'used', x.used, 'asked', x.asked)
      into hit
      from (values ('gpus', used_gpus[q]::numeric, gpus::numeric), ('memory_mb', used_memory[q], memory), ('cpus', used_mcpus[q] / 1000.0, mcpus / 1000.0),
        ('jobs', used_jobs[q], jobs)) as x(key, used, asked)
      where x.used + x.asked > (b.queue_maximum[q] ->> x.key)::numeric limit 1;
      if hit is not null then
        return hit;
      end if;
    end if;
    if b.queue_submitter_maximum[q] is not null then
      said := q || '/' || submitter;
      select jsonb_build_object('gate', 'submitter_limit', 'queue', b.queue_names[q], 'submitter', submitter, 'resource', x.key,
        'limit', (b.queue_submitter_maximum[q] ->> x.key)::numeric, 'used', x.used, 'asked', x.asked)
      into hit
      from (
        select k.key, coalesce((submitters -> said ->> k.key)::numeric, 0) as used, k.asked
        from (values ('gangs', gangs), ('jobs', jobs), ('gpus', gpus)) as k(key, asked)) x
      where x.used + x.asked > (b.queue_submitter_maximum[q] ->> x.key)::numeric limit 1;
      if hit is not null then
        return hit;
      end if;
    end if;
    q := b.queue_parent[q];
  end loop;
  return null;
end $$;
comment on function gangq.limit_on is
  'Internal. The first limit on the path of a queue that so much more would exceed, with its numbers.';

-- When a gang will start if it waits: the first end of something that runs after which it fits. Promises made before
-- count as placed from now until they end; so what is free only grows with time.
create function gangq.plan_start(
  b gangq.board, kind integer, counts integer[], slots integer[], memory bigint[], mcpus bigint[], held bigint[],
  kept_slots integer[], kept_memory bigint[], kept_mcpus bigint[], kept_gpus integer[],
  plan_worker integer[], plan_slots integer[], plan_memory bigint[], plan_mcpus bigint[], plan_gpus integer[], plan_ends timestamptz[],
  end_at timestamptz[], end_worker integer[], end_slots integer[], end_memory bigint[], end_mcpus bigint[], device_ends timestamptz[],
  inout starts_at timestamptz, out seats integer[], out kept jsonb
) language plpgsql immutable set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  n integer := cardinality(b.worker_host);
  earliest timestamptz := plan_start.starts_at;
  ends integer := coalesce(cardinality(end_at), 0);
  lo integer := 1;
  hi integer := ends;
  mid integer;
  stride integer := 1;
  beside timestamptz[];  -- null: still among what runs
  too_early timestamptz;
  moment timestamptz;
  got integer[];
  then_slots integer[];
  then_memory bigint[];
  then_mcpus bigint[];
  then_held bigint[];
  none integer[] := array_fill(0, array[n]);
  none_big bigint[] := array_fill(0::bigint, array[n]);
  planned_gpus integer[];
  apart_hosts integer[] := b.apart_hosts;
  there bigint[];
  x record;
begin
  -- What has ended before the earliest moment has ended at each.
  while lo <= hi loop
    mid := (lo + hi) / 2;
    if end_at[mid] < earliest then
      lo := mid + 1;
    else
      hi := mid - 1;
    end if;
  end loop;
  hi := ends;
  loop
    -- In growing strides until it fits, then back by halves: what waits longest usually fits soon. Then the ends of
    -- promises that lie between the last moment too early and the one that is found.
    if beside is null and lo > hi then
      beside := array(
        select distinct p.ends from unnest(plan_ends) as p(ends)
        where p.ends >= earliest and (too_early is null or p.ends > too_early) and (seats is null or p.ends < starts_at) order by p.ends);
    end if;
    if beside is null then
      mid := case when seats is null then least(lo + stride - 1, hi) else (lo + hi) / 2 end;
      moment := end_at[mid];
      while end_at[mid + 1] = moment loop
        mid := mid + 1;
      end loop;
    else
      exit when beside = '{}';
      moment := beside[1];
      beside := beside[2:];
      mid := (select count(*) from unnest(end_at) as e(at) where e.at <= moment);
    end if;
    then_slots := plan_start.slots;
    then_memory := plan_start.memory;
    then_mcpus := plan_start.mcpus;
    then_held := plan_start.held;
    planned_gpus := none;
    for x in
      select e.worker, sum(e.slots)::integer as slots, sum(e.memory)::bigint as memory, sum(e.mcpus)::bigint as mcpus
      from unnest(end_worker[1 : mid], end_slots[1 : mid], end_memory[1 : mid], end_mcpus[1 : mid]) as e(worker, slots, memory, mcpus) group by e.worker
    loop
      then_slots[x.worker] := then_slots[x.worker] + x.slots;
      then_memory[x.worker] := then_memory[x.worker] + x.memory;
      then_mcpus[x.worker] := then_mcpus[x.worker] + x.mcpus;
      for e in b.device_first[x.worker] .. b.device_first[x.worker + 1] - 1 loop
        if device_ends[e] <= moment then
          then_held[e] := 0;
        end if;
      end loop;
    end loop;
    for x in
      select p.worker, p.slots, p.memory, p.mcpus, p.gpus
      from unnest(plan_worker, plan_slots, plan_memory, plan_mcpus, plan_gpus, plan_ends) as p(worker, slots, memory, mcpus, gpus, ends)
      where p.ends > moment
    loop
      then_slots[x.worker] := then_slots[x.worker] - x.slots;
      then_memory[x.worker] := then_memory[x.worker] - x.memory;
      then_mcpus[x.worker] := then_mcpus[x.worker] - x.mcpus;
      planned_gpus[x.worker] := planned_gpus[x.worker] + x.gpus;
    end loop;
    if b.kind_apart[plan_start.kind] is not null then
      -- A gang it is kept apart from leaves its hosts when it ends; one started in this very pass has no unit yet.
      there := array(
        select distinct coalesce(h.unit, h.job - 1152921504606846976)
        from unnest(b.held_unit, b.held_job, b.held_ends) as h(unit, job, ends) where h.ends > moment);
      b.apart_hosts := array(
        select case when a.gang = any (there) or a.gang is null then a.host else 0 end
        from unnest(apart_hosts, b.apart_gangs) with ordinality as a(host, gang, n) order by a.n);
    end if;
    got := gangq.seat_gang(b, kind, counts, then_slots, then_memory, then_mcpus, then_held, none, none_big, none_big, planned_gpus);
    if got is not null then
      seats := got;
      starts_at := moment;
      exit when beside is not null;
      hi := mid - 1;
      while hi >= lo and end_at[hi] = moment loop
        hi := hi - 1;
      end loop;
    elsif beside is null then
      too_early := moment;
      lo := mid + 1;
      stride := stride * 2;
    end if;
  end loop;
  if seats is null then
    starts_at := null;
    return;
  end if;
  -- What has to stay free until then: what it needs, less what will have ended, but for what earlier promises take of that.
  select jsonb_agg(jsonb_build_array(k.worker, k.slots, k.memory, k.mcpus, k.gpus, k.all_slots, k.all_memory, k.all_mcpus, k.all_gpus) order by k.worker) into kept
  from (
    select s.worker, s.slots as all_slots, s.memory as all_memory, s.mcpus as all_mcpus, s.gpus as all_gpus,
      greatest(0, s.slots + coalesce(p.slots, 0) - kept_slots[s.worker] - coalesce(f.slots, 0)) as slots,
      greatest(0, s.memory + coalesce(p.memory, 0) - kept_memory[s.worker] - coalesce(f.memory, 0)) as memory,
      greatest(0, s.mcpus + coalesce(p.mcpus, 0) - kept_mcpus[s.worker] - coalesce(f.mcpus, 0)) as mcpus,
      greatest(0, s.gpus + coalesce(p.gpus, 0) - kept_gpus[s.worker] - (
        -- A device too small for it is none.
        select count(*) from generate_series(b.device_first[s.worker], b.device_first[s.worker + 1] - 1) as d(n)
        where device_ends[d.n] <= plan_start.starts_at and b.device_vram[d.n] >= s.vram)) as gpus
    from (
      select y.worker, count(*) as slots, max(case when b.shape_gpus[y.shape] > 0 then b.shape_vram[y.shape] end) as vram,
        sum(b.shape_memory[y.shape]) as memory, sum(b.shape_mcpus[y.shape]) as mcpus, sum(b.shape_gpus[y.shape]) as gpus
      from (
        select e.worker, b.role_shape[b.kind_first_role[plan_start.kind] + (
          select count(*)::integer from generate_series(1, cardinality(counts)) as r(role)
          where (select sum(c.members) from unnest(counts[1 : r.role]) as c(members)) < e.n)] as shape
        from unnest(seats) with ordinality as e(worker, n)) y
      group by y.worker) s
    left join (
      select e.worker, sum(e.slots) as slots, sum(e.memory) as memory, sum(e.mcpus) as mcpus
      from unnest(end_worker, end_slots, end_memory, end_mcpus, end_at) as e(worker, slots, memory, mcpus, at)
      where e.at <= plan_start.starts_at and e.worker = any (seats) group by e.worker) f on f.worker = s.worker
    left join (
      select q.worker, sum(q.slots) as slots, sum(q.memory) as memory, sum(q.mcpus) as mcpus, sum(q.gpus) as gpus
      from unnest(plan_worker, plan_slots, plan_memory, plan_mcpus, plan_gpus, plan_ends) as q(worker, slots, memory, mcpus, gpus, ends)
      where q.ends > plan_start.starts_at group by q.worker) p on p.worker = s.worker) k;
end $$;
comment on function gangq.plan_start is
  'Internal. The earliest moment, not before starts_at, at which a gang fits, and what must stay free for it until then. end_*: what '
  'ends when on which worker, in that order. kept: [worker, slots, memory, mcpus, gpus to keep now, then the same in all].';

-- Who waits, lane by lane: what waits in one queue, or of one submitter of a fair queue, in its order.
create function gangq.turns(
  b gangq.board, out turn_gang integer[], out turn_priority integer[],
  out lane_queue integer[], out lane_submitter text[], out lane_next integer[], out lane_last integer[], out lane_path jsonb[]
) language plpgsql immutable as $$
#variable_conflict use_column
declare
  path jsonb;
  q integer;
begin
  with turns as (
    select x.g, x.queue, x.lane_submitter, x.priority,
      row_number() over (order by x.queue, x.lane_submitter, x.ordering desc, x.size desc, x.order_key, x.g) as n
    from (
      select y.*,
        -- fifo: nobody passes who came before him, so he counts for no more than they do.
        -- A gang that runs without some of its members holds what it has in vain: it comes before all that wait.
        case when b.gang_missing[y.g] is not null then 1001
          when y.policy = 'fifo' then min(y.own_priority) over (partition by y.queue order by y.age, y.g) else y.own_priority end as priority,
        case when b.gang_missing[y.g] is not null then 1001 when y.policy = 'fifo' then 0 else y.own_priority end as ordering,
        case y.policy when 'fifo' then y.age else y.key end as order_key
      from (
        select z.g, b.kind_queue[z.kind] as queue, b.queue_policy[b.kind_queue[z.kind]] as policy, z.priority as own_priority, z.key,
          z.key & 1125899906842623 as age,
          case when b.queue_policy[b.kind_queue[z.kind]] = 'fair' then z.submitter else '' end as lane_submitter,
          case when b.queue_policy[b.kind_queue[z.kind]] = 'largest_first' then (
            select sum(m) from unnest(b.role_max[b.kind_first_role[z.kind] : b.kind_first_role[z.kind] + b.kind_roles[z.kind] - 1]) as m) else 0 end as size
        from unnest(b.gang_kind, b.gang_priority, b.gang_order_key, b.gang_submitter) with ordinality as z(kind, priority, key, submitter, g)) y) x
  )
  select array_agg(t.g::integer order by t.n), array_agg(t.priority order by t.n) into turn_gang, turn_priority from turns t;
  select array_agg(l.queue order by l.first), array_agg(l.submitter order by l.first), array_agg(l.first order by l.first), array_agg(l.last order by l.first)
  into lane_queue, lane_submitter, lane_next, lane_last
  from (
    select b.kind_queue[b.gang_kind[t.g]] as queue, case when b.queue_policy[b.kind_queue[b.gang_kind[t.g]]] = 'fair' then b.gang_submitter[t.g] else '' end as submitter,
      min(t.n)::integer as first, max(t.n)::integer as last
    from unnest(turn_gang) with ordinality as t(g, n) group by 1, 2) l;
  for lane in 1 .. cardinality(lane_queue) loop
    q := lane_queue[lane];
    path := '[]';
    while q is not null loop
      path := jsonb_build_array(q) || path;
      q := b.queue_parent[q];
    end loop;
    lane_path[lane] := path;
  end loop;
end $$;
comment on function gangq.turns is
  'Internal. The gangs of a board by lanes, each a range of turn_gang (lane_next to lane_last), with what their priority counts as; '
  'lane_path: the queues from the root of the tree to the lane.';

-- The decision. One pass over what waits, in the order of the queues' policies; each gang is placed if it fits without
-- delaying those before it that have a planned start, else gets such a start itself while there are fewer than
-- settings.reservations. Kinds that did not fit are not tried again. Deterministic: the same board, the same decisions.
create function gangq.decide_on(
  b gangq.board, max_gangs integer default 200, budget_ms integer default null, max_turns integer default null, each_gang boolean default false
) returns setof gangq.decision language plpgsql volatile set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  began timestamptz := clock_timestamp();
  n integer := coalesce(cardinality(b.worker_ids), 0);
  d gangq.decision;
  -- what is still free, and what must stay so: for everybody (escrow), and for planned starts
  slots integer[] := b.free_slots;
  memory bigint[] := b.free_memory;
  mcpus bigint[] := b.free_mcpus;
  held bigint[] := coalesce(b.device_held, '{}');
  kept_slots integer[] := array_fill(0, array[n]);
  kept_memory bigint[] := array_fill(0::bigint, array[n]);
  kept_mcpus bigint[] := array_fill(0::bigint, array[n]);
  kept_gpus integer[] := array_fill(0, array[n]);
  with_slots integer[]; with_memory bigint[]; with_mcpus bigint[]; with_gpus integer[];
  promised boolean := false;  -- whether anything is kept at all
  plans jsonb[] := '{}';
  plan_starts timestamptz[] := '{}';
  plan_worker integer[] := '{}'; plan_slots integer[] := '{}'; plan_memory bigint[] := '{}'; plan_mcpus bigint[] := '{}';
  plan_gpus integer[] := '{}'; plan_ends timestamptz[] := '{}';
  plan_after timestamptz[] := array_fill(b.t, array[coalesce(cardinality(b.kind_ids), 0)]);
  planned record;
  -- what ends when, in that order, for planned starts; null: to be sorted again
  end_at timestamptz[]; end_worker integer[]; end_slots integer[]; end_memory bigint[]; end_mcpus bigint[]; device_ends timestamptz[];
  -- what this pass has placed, until it goes to the board: its ends count for planned starts like those of what runs
  began_job bigint[] := '{}'; began_worker integer[] := '{}'; began_slots integer[] := '{}'; began_memory bigint[] := '{}';
  began_mcpus bigint[] := '{}'; began_gpus integer[] := '{}'; began_ends timestamptz[] := '{}';
  -- queues, with what this pass has placed
  used_gangs bigint[] := b.used_gangs;
  used_jobs bigint[] := b.used_jobs;
  used_gpus bigint[] := b.used_gpus;
  used_memory bigint[] := b.used_memory;
  used_mcpus bigint[] := b.used_mcpus;
  submitters jsonb := b.usage_submitters;
  limited boolean[] := '{}';
  total_slots bigint; total_memory bigint; total_mcpus bigint; total_gpus bigint;
  -- lanes: what waits in one queue, or of one submitter of a fair queue, in its order
  lane_queue integer[]; lane_submitter text[]; lane_next integer[]; lane_last integer[];
  lane_path jsonb[];
  turn_gang integer[]; turn_priority integer[];
  lanes integer;
  lane integer; l integer; best integer; depth integer;
  chosen integer[]; key integer; share double precision; best_share double precision; best_age bigint; same integer[];
  -- this gang
  g integer; k integer; q integer; up integer; said text;
  counted boolean := true;  -- whether what the last gang takes of its queues has been
  judged boolean; may_displace boolean;
  room bigint; free_gpus bigint;  -- in all: who asks for more need not be tried
  first_role integer; roles integer; shape integer; role integer;
  counts integer[]; more integer[]; low integer; high integer;
  respects integer; failed integer[] := array_fill(null::integer, array[coalesce(cardinality(b.kind_ids), 0)]);
  gated jsonb[] := array_fill('{}'::jsonb, array[coalesce(cardinality(b.kind_ids), 0)]);
  hopeless boolean[] := array_fill(false, array[coalesce(cardinality(b.kind_ids), 0)]);  -- not even once all has ended
  shut boolean[] := array_fill(false, array[coalesce(cardinality(b.kind_ids), 0)]);
  seats integer[]; trial integer[];
  jobs bigint; gpus bigint; need_memory bigint; need_mcpus bigint; gangs bigint;
  hit jsonb;
  w integer; taken integer; e integer; r integer;
  apart_hosts integer[];
  place integer := 0;
  -- who is told to stop for others
  told integer := 0;
  refused integer[] := array_fill(null::integer, array[coalesce(cardinality(b.kind_ids), 0)]);  -- in vain, at this priority
  refusals integer := 0;
  stops record;
  covered integer;
  beside timestamptz[];
  plan_queue integer[] := '{}';
  plan_owed boolean[] := '{}';
  started integer := 0;
  looked integer := 0;
  -- the quick way: hosts of one shape by the room they have, as linked lists; 0: end
  quick_shape integer := 0;
  rooms integer[];
  host_room integer[];
  room_first integer[];
  room_last integer[];
  room_next integer[];
  top integer; h integer; left_over integer; c integer; low_room integer;
  full_hosts integer[]; full_takes integer[];
begin
  if n = 0 and b.gang_ids is null then
    return;
  end if;
  select sum(x.s), sum(x.m), sum(x.c) into total_slots, total_memory, total_mcpus from unnest(b.all_slots, b.all_memory, b.all_mcpus) as x(s, m, c);
  total_gpus := coalesce(cardinality(b.device_ids), 0);
  room := (select coalesce(sum(greatest(x.s, 0)), 0) from unnest(slots, b.worker_open) as x(s, open) where x.open);
  free_gpus := (select count(*) from unnest(held) as h where h = 0);
  for e in 1 .. coalesce(cardinality(b.escrow_gang), 0) loop
    w := b.escrow_worker[e];
    kept_slots[w] := kept_slots[w] + b.escrow_slots[e];
    kept_memory[w] := kept_memory[w] + b.escrow_memory[e];
    kept_mcpus[w] := kept_mcpus[w] + b.escrow_mcpus[e];
    kept_gpus[w] := kept_gpus[w] + b.escrow_gpus[e];
    promised := true;
    plan_worker := plan_worker || w;
    plan_slots := plan_slots || b.escrow_slots[e];
    plan_memory := plan_memory || b.escrow_memory[e];
    plan_mcpus := plan_mcpus || b.escrow_mcpus[e];
    plan_gpus := plan_gpus || b.escrow_gpus[e];
    plan_ends := plan_ends || b.t + make_interval(secs => b.grace_s + coalesce(b.gang_estimate[array_position(b.gang_ids, b.escrow_gang[e])], 86400));
  end loop;
  if b.gang_ids is null then
    return query select * from gangq.moves_on(b, gangq.spare_beside(b, 'infinity', slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus, plans, plan_starts));
    return;
  end if;

  for q in 1 .. cardinality(b.queue_names) loop
    limited[q] := coalesce(limited[b.queue_parent[q]], false) or coalesce(b.queue_max_gangs[q], b.queue_max_jobs[q]) is not null
      or b.queue_maximum[q] is not null or b.queue_submitter_maximum[q] is not null;
  end loop;

  select x.* into turn_gang, turn_priority, lane_queue, lane_submitter, lane_next, lane_last, lane_path from gangq.turns(b) x;
  lanes := cardinality(lane_queue);

  loop
    if not counted then
      -- What the last one takes, or is promised while others leave for it, counts for whose turn it is, and for limits.
      up := q;
      while up is not null loop
        used_gangs[up] := used_gangs[up] + gangs;
        used_jobs[up] := used_jobs[up] + jobs;
        used_gpus[up] := used_gpus[up] + gpus;
        used_memory[up] := used_memory[up] + need_memory;
        used_mcpus[up] := used_mcpus[up] + need_mcpus;
        if submitters <> '{}' or b.queue_policy[up] = 'fair' or b.queue_submitter_maximum[up] is not null then
          said := up || '/' || b.gang_submitter[g];
          submitters := submitters || jsonb_build_object(said, jsonb_build_object(
            'gangs', coalesce((submitters -> said ->> 'gangs')::bigint, 0) + gangs,
            'jobs', coalesce((submitters -> said ->> 'jobs')::bigint, 0) + jobs,
            'gpus', coalesce((submitters -> said ->> 'gpus')::bigint, 0) + gpus));
        end if;
        up := b.queue_parent[up];
      end loop;
      counted := true;
    end if;
    exit when started >= decide_on.max_gangs;
    exit when looked >= max_turns;
    -- Whose turn it is: the highest priority; among those, from the root of the tree down, whom each node's policy prefers.
    lane := null;
    if lanes = 1 then
      exit when lane_next[1] > lane_last[1];
      lane := 1;
    else
      chosen := '{}';
      best := null;
      for l in 1 .. lanes loop
        if lane_next[l] <= lane_last[l] then
          if best is null or turn_priority[lane_next[l]] > best then
            best := turn_priority[lane_next[l]];
            chosen := array[l];
          elsif turn_priority[lane_next[l]] = best then
            chosen := chosen || l;
          end if;
        end if;
      end loop;
      exit when chosen = '{}';
      depth := 0;
      q := null;
      while cardinality(chosen) > 1 loop
        same := '{}';
        best_share := null;
        best_age := null;
        -- Of each child (or lane of this very queue) its share and its oldest gang; the best of them is followed.
        foreach l in array chosen loop
          key := coalesce((lane_path[l] ->> depth)::integer, -l);
          if q is null or b.queue_policy[q] = 'fair' then
            if key > 0 then
              share := greatest(used_gpus[key]::float8 / greatest(total_gpus, 1), used_jobs[key]::float8 / greatest(total_slots, 1),
                used_memory[key]::float8 / greatest(total_memory, 1), used_mcpus[key]::float8 / greatest(total_mcpus, 1)) / b.queue_weight[key];
              -- Within what it was guaranteed it goes before those who borrow.
              if b.queue_guaranteed[key] is not null and used_gpus[key] < coalesce((b.queue_guaranteed[key] ->> 'gpus')::numeric, 'infinity')
                and used_jobs[key] < coalesce((b.queue_guaranteed[key] ->> 'jobs')::numeric, 'infinity')
                and used_memory[key] < coalesce((b.queue_guaranteed[key] ->> 'memory_mb')::numeric, 'infinity')
                and used_mcpus[key] < coalesce((b.queue_guaranteed[key] ->> 'cpus')::numeric * 1000, 'infinity') then
                share := share - 1e9;
              end if;
            else
              said := lane_queue[l] || '/' || lane_submitter[l];
              share := greatest(coalesce((submitters -> said ->> 'gpus')::float8, 0) / greatest(total_gpus, 1),
                coalesce((submitters -> said ->> 'jobs')::float8, 0) / greatest(total_slots, 1));
            end if;
          else
            share := 0;
          end if;
          if best_share is null or share < best_share or (share = best_share and b.gang_order_key[turn_gang[lane_next[l]]] < best_age) then
            best_share := share;
            best_age := b.gang_order_key[turn_gang[lane_next[l]]];
            best := key;
          end if;
        end loop;
        foreach l in array chosen loop
          if coalesce((lane_path[l] ->> depth)::integer, -l) = best then
            same := same || l;
          end if;
        end loop;
        chosen := same;
        exit when best < 0;
        q := best;
        depth := depth + 1;
      end loop;
      lane := chosen[1];
    end if;
    -- Only who has placed something may leave early: the next pass begins at the front, and would never get past those
    -- that do not fit if looking at them alone used up its time. Who has looked at all of it is through, however late.
    if started > 0 and clock_timestamp() - began > make_interval(secs => budget_ms / 1000.0) then
      d := null;
      d.action := 'stop';
      d.turn := looked;
      return next d;
      exit;
    end if;

    g := turn_gang[lane_next[lane]];
    lane_next[lane] := lane_next[lane] + 1;
    looked := looked + 1;
    k := b.gang_kind[g];
    q := b.kind_queue[k];
    first_role := b.kind_first_role[k];
    roles := b.kind_roles[k];
    d := null;
    d.gang_id := b.gang_ids[g];
    d.kind_id := b.kind_ids[k];
    d.turn := looked;
    if not b.queue_open[q] then
      continue when shut[k] and not each_gang;
      shut[k] := true;
      d.action := 'wait';
      d.gate := 'paused';
      d.numbers := jsonb_build_object('queue', b.queue_names[q]);
      return next d;
      continue;
    end if;
    -- Whom it must not delay: planned starts that it would still be running at.
    respects := 0;
    foreach d.starts_at in array plan_starts loop
      if d.starts_at < b.t + make_interval(secs => b.gang_estimate[g]) then
        respects := respects + 1;
      end if;
    end loop;
    d.starts_at := null;
    -- Its kind has been tried beside no more promises than that, in vain; and nobody may be told to stop for it.
    judged := failed[k] <= respects and b.gang_missing[g] is null and not b.gang_preempting[g];
    may_displace := b.queue_preempts[q] and b.unit_ids is not null and b.gang_missing[g] is null and n > 0 and told < b.preemptions
      and refusals < 16 and (refused[k] is null or b.gang_priority[g] > refused[k]);
    continue when judged and not may_displace and (hopeless[k] or cardinality(plans) >= b.reservations) and not each_gang;
    counts := case when b.gang_missing[g] is null then b.role_min[first_role : first_role + roles - 1]
      else array(select v.value::integer from jsonb_array_elements_text(b.gang_missing[g]) with ordinality as v(value, n) order by v.n) end;
    gangs := case when b.gang_missing[g] is null then 1 else 0 end;
    jobs := 0; gpus := 0; need_memory := 0; need_mcpus := 0;
    for role in 1 .. roles loop
      shape := b.role_shape[first_role + role - 1];
      jobs := jobs + counts[role];
      gpus := gpus + counts[role] * b.shape_gpus[shape];
      need_memory := need_memory + counts[role] * b.shape_memory[shape];
      need_mcpus := need_mcpus + counts[role] * b.shape_mcpus[shape];
    end loop;
    -- A gang that lacks members asks for less than others of its kind: what holds for them says nothing about it.
    said := case when b.gang_missing[g] is null then '' else g::text end || '/' || b.gang_submitter[g];
    continue when gated[k] ? said and not each_gang;
    hit := gated[k] -> said;
    if hit is null and limited[q] then
      hit := gangq.limit_on(b, q, b.gang_submitter[g], gangs, jobs, gpus, need_memory, need_mcpus, used_gangs, used_jobs, used_gpus, used_memory, used_mcpus, submitters);
    end if;
    if hit is not null then
      gated[k] := gated[k] || jsonb_build_object(said, hit);
      d.action := 'wait';
      d.gate := hit ->> 'gate';
      d.numbers := hit - 'gate';
      return next d;
      continue;
    end if;

    seats := null;
    if judged is not true and jobs <= room and gpus <= free_gpus then
      if not promised and roles = 1 and b.kind_require[k] = 0 and b.kind_prefer[k] = 0 and b.kind_apart[k] is null and b.gang_missing[g] is null
        and b.role_strategy[first_role] = 'pack' and b.role_require[first_role] = 0 and b.role_prefer[first_role] = 0 and not b.role_balanced[first_role]
        and cardinality(b.levels) = 1 and b.role_min[first_role] = b.role_max[first_role] then
        -- The same rule as gangq.seat_role, without looking at every worker for every gang.
        shape := b.role_shape[first_role];
        if quick_shape <> shape then
          quick_shape := shape;
          rooms := gangq.rooms(b, shape, slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus);
          host_room := array(select coalesce(sum(x.room), 0)::integer from unnest(b.worker_host, rooms) as x(host, room) group by x.host order by x.host);
          top := (select max(x) from unnest(host_room) as x);
          room_first := array_fill(0, array[greatest(top, 1)]);
          room_last := room_first;
          room_next := array_fill(0, array[cardinality(host_room)]);
          for h in reverse cardinality(host_room) .. 1 loop
            c := host_room[h];
            if c > 0 then
              if room_first[c] = 0 then
                room_last[c] := h;
              end if;
              room_next[h] := room_first[c];
              room_first[c] := h;
            end if;
          end loop;
        end if;
        left_over := counts[1];
        full_hosts := '{}';
        full_takes := '{}';
        while left_over > 0 loop
          -- The tightest host that holds the rest; if there is none, all of the largest.
          low_room := left_over;
          while low_room <= top and room_first[low_room] = 0 loop
            low_room := low_room + 1;
          end loop;
          if low_room > top then
            low_room := least(left_over - 1, top);
            while low_room > 0 and room_first[low_room] = 0 loop
              low_room := low_room - 1;
            end loop;
            exit when low_room = 0;
          end if;
          h := room_first[low_room];
          room_first[low_room] := room_next[h];
          full_hosts := full_hosts || h;
          full_takes := full_takes || least(low_room, left_over);
          left_over := left_over - least(low_room, left_over);
        end loop;
        if left_over = 0 then
          seats := '{}';
          for i in 1 .. cardinality(full_hosts) loop
            h := full_hosts[i];
            taken := full_takes[i];
            if b.host_first[h + 1] - b.host_first[h] = 1 then
              seats := seats || array_fill(b.host_first[h], array[taken]);
            else
              for w, c in
                select x.n + b.host_first[h] - 1, x.room from unnest(rooms[b.host_first[h] : b.host_first[h + 1] - 1]) with ordinality as x(room, n)
                where x.room > 0 order by x.room desc, x.n
              loop
                exit when taken = 0;
                seats := seats || array_fill(w, array[least(c, taken)]);
                taken := taken - least(c, taken);
              end loop;
            end if;
          end loop;
        else
          quick_shape := 0;
        end if;
      else
        quick_shape := 0;
        with_slots := kept_slots; with_memory := kept_memory; with_mcpus := kept_mcpus; with_gpus := kept_gpus;
        if promised then
          -- Its own escrow is its own; and what is planned for after its end does not concern it.
          for e in 1 .. coalesce(cardinality(b.escrow_gang), 0) loop
            if b.escrow_gang[e] = b.gang_ids[g] then
              w := b.escrow_worker[e];
              with_slots[w] := with_slots[w] - b.escrow_slots[e];
              with_memory[w] := with_memory[w] - b.escrow_memory[e];
              with_mcpus[w] := with_mcpus[w] - b.escrow_mcpus[e];
              with_gpus[w] := with_gpus[w] - b.escrow_gpus[e];
            end if;
          end loop;
          for i in 1 .. cardinality(plans) loop
            if plan_starts[i] >= b.t + make_interval(secs => b.gang_estimate[g]) then
              for hit in select v.value from jsonb_array_elements(plans[i]) as v loop
                w := (hit ->> 0)::integer;
                with_slots[w] := with_slots[w] - (hit ->> 1)::integer;
                with_memory[w] := with_memory[w] - (hit ->> 2)::bigint;
                with_mcpus[w] := with_mcpus[w] - (hit ->> 3)::bigint;
                with_gpus[w] := with_gpus[w] - (hit ->> 4)::integer;
              end loop;
            end if;
          end loop;
        end if;
        apart_hosts := b.apart_hosts;
        if b.gang_missing[g] is not null and b.kind_apart[k] is not null then
          -- A gang is not kept apart from itself.
          b.apart_hosts := array(
            select case when x.gang = b.gang_ids[g] then 0 else x.host end
            from unnest(b.apart_hosts, b.apart_gangs) with ordinality as x(host, gang, n) order by x.n);
        end if;
        seats := gangq.seat_gang(b, k, counts, slots, memory, mcpus, held, with_slots, with_memory, with_mcpus, with_gpus, b.gang_anchor[g]);
        if seats is not null and b.gang_missing[g] is null then
          -- Elastic roles take what is there, in their order.
          for role in 1 .. roles loop
            low := counts[role];
            high := b.role_max[first_role + role - 1];
            shape := b.role_shape[first_role + role - 1];
            while low < high loop
              more := counts;
              -- All of it first: an idle fleet is the common case.
              c := case when low = counts[role] and high = b.role_max[first_role + role - 1] then high else (low + high + 1) / 2 end;
              more[role] := c;
              trial := null;
              if not limited[q] or gangq.limit_on(b, q, b.gang_submitter[g], gangs, jobs + c - counts[role], gpus + (c - counts[role]) * b.shape_gpus[shape],
                need_memory + (c - counts[role]) * b.shape_memory[shape], need_mcpus + (c - counts[role]) * b.shape_mcpus[shape],
                used_gangs, used_jobs, used_gpus, used_memory, used_mcpus, submitters) is null then
                trial := gangq.seat_gang(b, k, more, slots, memory, mcpus, held, with_slots, with_memory, with_mcpus, with_gpus, b.gang_anchor[g]);
              end if;
              if trial is not null then
                seats := trial;
                low := c;
              else
                high := c - 1;
              end if;
            end loop;
            jobs := jobs + low - counts[role];
            gpus := gpus + (low - counts[role]) * b.shape_gpus[shape];
            need_memory := need_memory + (low - counts[role]) * b.shape_memory[shape];
            need_mcpus := need_mcpus + (low - counts[role]) * b.shape_mcpus[shape];
            counts[role] := low;
          end loop;
        end if;
        b.apart_hosts := apart_hosts;
      end if;
    end if;

    if seats is null then
      if b.gang_missing[g] is null then
        failed[k] := least(failed[k], respects);
      end if;
      d.action := 'wait';
      d.gate := 'capacity';
      if b.gang_preempting[g] then
        -- What was told to stop for it is leaving, and its places are kept; so is its part of the queue's limits.
        d.gate := 'preempting';
        counted := false;
        return next d;
        continue;
      end if;
      if may_displace then
        covered := gangq.covered_by(b, q, jobs, gpus, need_memory, need_mcpus, used_jobs, used_gpus, used_memory, used_mcpus);
        -- Who is owed its place does not wait for the planned start of one that only borrows.
        beside := plan_starts;
        for i in 1 .. cardinality(plans) loop
          if covered is not null and not plan_owed[i] and not gangq.lies_below(b, plan_queue[i], covered) then
            beside[i] := 'infinity';
          end if;
        end loop;
        select v.* into stops from gangq.choose_victims(b, g, counts, gangq.spare_beside(b,
          b.t + make_interval(secs => b.grace_s + b.gang_estimate[g]), slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus,
          plans, beside), covered) v;
        if stops.victims is null then
          refused[k] := b.gang_priority[g];
          refusals := refusals + 1;
        elsif stops.victims <> '{}' then
          told := told + cardinality(stops.victims);
          d.action := 'preempt';
          d.gate := 'preempting';
          d.members := counts;
          d.victims := stops.victims;
          d.starts_at := b.t + make_interval(secs => b.grace_s);
          d.incarnations := array(select b.worker_ids[s.w] from unnest(stops.seats) with ordinality as s(w, n) order by s.n);
          hit := gangq.need_of(b, k, counts, stops.seats);
          d.kept := (select jsonb_agg(jsonb_build_array(b.worker_ids[(v.value ->> 0)::integer], v.value -> 1, v.value -> 2, v.value -> 3, v.value -> 4) order by v.n)
            from jsonb_array_elements(hit) with ordinality as v(value, n));
          d.numbers := (select jsonb_build_object('victims', count(*), 'lost_s', jsonb_object_agg(u.id, round(u.lost::numeric, 1)))
            from unnest(b.unit_ids, b.unit_lost) as u(id, lost) where u.id = any (stops.victims));
          -- Promised from now on, and whom it displaces is neither displaced again nor counted on for longer.
          promised := true;
          quick_shape := 0;
          for planned in select (v.value ->> 0)::integer as w, v.value as need from jsonb_array_elements(hit) as v loop
            w := planned.w;
            kept_slots[w] := kept_slots[w] + (planned.need ->> 1)::integer;
            kept_memory[w] := kept_memory[w] + (planned.need ->> 2)::bigint;
            kept_mcpus[w] := kept_mcpus[w] + (planned.need ->> 3)::bigint;
            kept_gpus[w] := kept_gpus[w] + (planned.need ->> 4)::integer;
            plan_worker := plan_worker || w;
            plan_slots := plan_slots || (planned.need ->> 1)::integer;
            plan_memory := plan_memory || (planned.need ->> 2)::bigint;
            plan_mcpus := plan_mcpus || (planned.need ->> 3)::bigint;
            plan_gpus := plan_gpus || (planned.need ->> 4)::integer;
            plan_ends := plan_ends || d.starts_at + make_interval(secs => b.gang_estimate[g]);
          end loop;
          for i in 1 .. cardinality(b.unit_ids) loop
            if b.unit_ids[i] = any (stops.victims) then
              b.unit_movable[i] := false;
              b.unit_leaving[i] := true;
            end if;
          end loop;
          for i in 1 .. cardinality(b.held_unit) loop
            if b.held_unit[i] = any (stops.victims) then
              b.held_ends[i] := least(b.held_ends[i], d.starts_at);
            end if;
          end loop;
          end_at := null;
          counted := false;
          return next d;
          continue;
        end if;
      end if;
      if hopeless[k] and b.gang_missing[g] is null then
        continue when not each_gang;
        d.gate := 'infeasible';
      elsif cardinality(plans) < b.reservations and b.gang_missing[g] is null and n > 0 then
        if began_job <> '{}' then
          end_at := null;
          b.held_job := b.held_job || began_job;
          b.held_worker := b.held_worker || began_worker;
          b.held_slots := b.held_slots || began_slots;
          b.held_memory := b.held_memory || began_memory;
          b.held_mcpus := b.held_mcpus || began_mcpus;
          b.held_gpus := b.held_gpus || began_gpus;
          b.held_ends := b.held_ends || began_ends;
          began_job := '{}'; began_worker := '{}'; began_slots := '{}'; began_memory := '{}'; began_mcpus := '{}';
          began_gpus := '{}'; began_ends := '{}';
        end if;
        if end_at is null then
          select array_agg(h.ends), array_agg(h.worker), array_agg(h.slots), array_agg(h.memory), array_agg(h.mcpus)
          into end_at, end_worker, end_slots, end_memory, end_mcpus
          from (
            select x.ends, x.worker, sum(x.slots)::integer as slots, sum(x.memory)::bigint as memory, sum(x.mcpus)::bigint as mcpus
            from unnest(b.held_ends, b.held_worker, b.held_slots, b.held_memory, b.held_mcpus) as x(ends, worker, slots, memory, mcpus)
            group by x.ends, x.worker order by x.ends, x.worker) h;
          end_at := coalesce(end_at, '{}');
          device_ends := array(
            select j.ends from unnest(held) with ordinality as x(job, n)
            left join (
              select h.job, max(h.ends) as ends from unnest(b.held_job, b.held_ends) as h(job, ends) where h.job <> 0 group by h.job) j on j.job = x.job
            order by x.n);
        end if;
        select p.* into planned from gangq.plan_start(b, k, counts, slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus,
          plan_worker, plan_slots, plan_memory, plan_mcpus, plan_gpus, plan_ends, end_at, end_worker, end_slots, end_memory, end_mcpus, device_ends,
          plan_after[k]) p;
        if planned.seats is null then
          d.gate := 'infeasible';
          hopeless[k] := true;
        else
          place := place + 1;
          plan_after[k] := planned.starts_at;
          d.action := 'plan';
          d.place := place;
          d.members := counts;
          d.starts_at := planned.starts_at;
          d.incarnations := array(select b.worker_ids[s.w] from unnest(planned.seats) with ordinality as s(w, n) order by s.n);
          d.kept := (select jsonb_agg(jsonb_build_array(b.worker_ids[(v.value ->> 0)::integer], v.value -> 5, v.value -> 6, v.value -> 7, v.value -> 8) order by v.n)
            from jsonb_array_elements(planned.kept) with ordinality as v(value, n));
          plans := plans || planned.kept;
          plan_starts := plan_starts || planned.starts_at;
          plan_queue := plan_queue || q;
          plan_owed := plan_owed || (gangq.covered_by(b, q, jobs, gpus, need_memory, need_mcpus, used_jobs, used_gpus, used_memory, used_mcpus) is not null);
          promised := true;
          quick_shape := 0;
          for hit in select v.value from jsonb_array_elements(planned.kept) as v loop
            w := (hit ->> 0)::integer;
            kept_slots[w] := kept_slots[w] + (hit ->> 1)::integer;
            kept_memory[w] := kept_memory[w] + (hit ->> 2)::bigint;
            kept_mcpus[w] := kept_mcpus[w] + (hit ->> 3)::bigint;
            kept_gpus[w] := kept_gpus[w] + (hit ->> 4)::integer;
            plan_worker := plan_worker || w;
            plan_slots := plan_slots || (hit ->> 5)::integer;
            plan_memory := plan_memory || (hit ->> 6)::bigint;
            plan_mcpus := plan_mcpus || (hit ->> 7)::bigint;
            plan_gpus := plan_gpus || (hit ->> 8)::integer;
            plan_ends := plan_ends || planned.starts_at + make_interval(secs => b.gang_estimate[g]);
          end loop;
        end if;
      elsif judged and not each_gang then
        continue;
      end if;
      return next d;
      continue;
    end if;

    -- It starts: what it takes is gone for whoever comes after it, and what was kept for it is not kept any more.
    if b.gang_preempting[g] then
      for e in 1 .. coalesce(cardinality(b.escrow_gang), 0) loop
        if b.escrow_gang[e] = b.gang_ids[g] then
          w := b.escrow_worker[e];
          kept_slots[w] := kept_slots[w] - b.escrow_slots[e];
          kept_memory[w] := kept_memory[w] - b.escrow_memory[e];
          kept_mcpus[w] := kept_mcpus[w] - b.escrow_mcpus[e];
          kept_gpus[w] := kept_gpus[w] - b.escrow_gpus[e];
          plan_ends[e] := b.t;
        end if;
      end loop;
    end if;
    d.action := 'start';
    d.members := counts;
    d.devices := case when gpus > 0 then array_fill(null::bigint, array[gpus::integer]) else '{}' end;
    d.incarnations := '{}';
    low := 0;
    for role in 1 .. roles loop
      shape := b.role_shape[first_role + role - 1];
      for i in low + 1 .. low + counts[role] loop
        w := seats[i];
        d.incarnations := d.incarnations || b.worker_ids[w];
        slots[w] := slots[w] - 1;
        memory[w] := memory[w] - b.shape_memory[shape];
        mcpus[w] := mcpus[w] - b.shape_mcpus[shape];
        if b.reservations > 0 then
          -- Who holds the devices: a number that no job has, once for the gang.
          began_job := began_job || case when i = 1 then b.gang_ids[g] + 1152921504606846976 else 0 end;
          began_worker := began_worker || w;
          began_slots := began_slots || 1;
          began_memory := began_memory || b.shape_memory[shape];
          began_mcpus := began_mcpus || b.shape_mcpus[shape];
          began_gpus := began_gpus || b.shape_gpus[shape];
          began_ends := began_ends || b.t + make_interval(secs => b.gang_estimate[g]);
        end if;
      end loop;
      low := low + counts[role];
    end loop;
    -- Each takes the smallest devices that will do. Who can use the fewest chooses first, as in reserve_members.
    for role, low, c in
      select r.role, r.seats, r.devices
      from (
        select n as role, b.role_shape[first_role + n - 1] as shape,
          coalesce((select sum(m) from unnest(counts[1 : n - 1]) as m), 0) as seats,
          coalesce((select sum(x.m * b.shape_gpus[b.role_shape[first_role + x.n::integer - 1]]) from unnest(counts[1 : n - 1]) with ordinality as x(m, n)), 0) as devices
        from generate_series(1, roles) as n) r
      where b.shape_gpus[r.shape] > 0
      order by b.shape_vram[r.shape] desc, coalesce(jsonb_array_length(b.shape_avoid[r.shape]), 0) desc, r.role
    loop
      shape := b.role_shape[first_role + role - 1];
      for i in low + 1 .. low + counts[role] loop
        w := seats[i];
        taken := 0;
        for e in b.device_first[w] .. b.device_first[w + 1] - 1 loop
          exit when taken = b.shape_gpus[shape];
          if held[e] = 0 and b.device_vram[e] >= b.shape_vram[shape]
            and (b.shape_avoid[shape] is null or not b.shape_avoid[shape] @> to_jsonb(b.device_ids[e])) then
            held[e] := b.gang_ids[g] + 1152921504606846976;
            taken := taken + 1;
            d.devices[c + taken] := b.device_ids[e];
          end if;
        end loop;
        c := c + b.shape_gpus[shape];
      end loop;
    end loop;
    if quick_shape > 0 then
      -- Only this shape's rooms are known, and only where it sat have they changed.
      for i in 1 .. cardinality(full_hosts) loop
        h := full_hosts[i];
        c := 0;
        for w in b.host_first[h] .. b.host_first[h + 1] - 1 loop
          r := least(slots[w], case when b.shape_memory[shape] > 0 then memory[w] / b.shape_memory[shape] else slots[w] end,
            case when b.shape_mcpus[shape] > 0 then mcpus[w] / b.shape_mcpus[shape] else slots[w] end);
          if b.shape_gpus[shape] > 0 then
            taken := 0;
            for e in b.device_first[w] .. b.device_first[w + 1] - 1 loop
              if held[e] = 0 and b.device_vram[e] >= b.shape_vram[shape]
                and (b.shape_avoid[shape] is null or not b.shape_avoid[shape] @> to_jsonb(b.device_ids[e])) then
                taken := taken + 1;
              end if;
            end loop;
            r := least(r, taken / b.shape_gpus[shape]);
          end if;
          rooms[w] := case when rooms[w] = 0 then 0 else greatest(r, 0) end;
          c := c + rooms[w];
        end loop;
        host_room[h] := c;
        if c > 0 then
          -- In the order of hosts, so that the order of placements makes no difference to who is chosen.
          if room_first[c] = 0 or room_first[c] > h then
            if room_first[c] = 0 then
              room_last[c] := h;
            end if;
            room_next[h] := room_first[c];
            room_first[c] := h;
          else
            e := case when room_last[c] < h then room_last[c] else room_first[c] end;
            while room_next[e] between 1 and h loop
              e := room_next[e];
            end loop;
            room_next[h] := room_next[e];
            room_next[e] := h;
            room_last[c] := greatest(room_last[c], h);
          end if;
        end if;
      end loop;
    end if;
    if b.kind_apart[k] is not null then
      b.apart_keys := b.apart_keys || array_fill(b.kind_apart[k], array[cardinality(seats)]);
      b.apart_hosts := b.apart_hosts || array(select b.worker_host[s] from unnest(seats) as s);
      b.apart_gangs := b.apart_gangs || array_fill(b.gang_ids[g], array[cardinality(seats)]);
    end if;
    room := room - jobs;
    free_gpus := free_gpus - gpus;
    counted := false;
    started := started + 1;
    return next d;
  end loop;
  if n > 0 and b.move_units is not null then
    return query select * from gangq.moves_on(b, gangq.spare_beside(b, 'infinity', slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus, plans, plan_starts));
  end if;
end $$;
comment on function gangq.decide_on is
  'Internal. What a pass would do with this board: starts, planned starts, preemptions, moves, and for each kind that waits the gate that holds '
  'it. budget_ms: once something is placed, stop after so long and say so, for the rest the next pass is there; null: go '
  'through all of it. max_turns: look at so many gangs, as a pass that was stopped did. each_gang: a decision for every gang, '
  'also for those of a kind that has been judged; it changes no other.';

create function gangq.decide(max_gangs integer default 200) returns setof gangq.decision
language sql volatile as $$
  select d.* from gangq.decide_on(gangq.look(decide.max_gangs), decide.max_gangs) d
$$;
comment on function gangq.decide is
  'What a pass would do now, as explain and plan reckon: in rare cases it finds less room. See the type gangq.decision. By priority, then the queues'' policies, then '
  'age; within limits; the first settings.reservations gangs that must wait get a planned start that nobody may delay.';

create function gangq.takes_work(
  i gangq.incarnations, renewed_at timestamptz, t timestamptz, heard_since timestamptz, hosts text[], workers text[]
) returns boolean language sql immutable as $$
  select i.state = 'live' and i.quarantined is null and (i.passed_over_until is null or i.passed_over_until <= t) and renewed_at > heard_since
    and i.host <> all (hosts) and i.name <> all (workers)
$$;
comment on function gangq.takes_work is
  'Internal. The rule of candidates; hosts and workers: those that are cordoned.';

create function gangq.candidates(t timestamptz, among bigint[] default null) returns bigint[] language plpgsql stable as $$
#variable_conflict use_column
declare
  heard_since timestamptz := t - (select make_interval(secs => s.candidate_silence_s) from gangq.settings s);
  hosts text[] := array(select c.name from gangq.cordons c where c.kind = 'host');
  workers text[] := array(select c.name from gangq.cordons c where c.kind = 'worker');
begin
  if among is null then
    return array(
      select i.id from gangq.incarnations i join gangq.leases l on l.incarnation = i.id
      where i.ended_at is null and gangq.takes_work(i, l.renewed_at, t, heard_since, hosts, workers) order by i.id);
  end if;
  return array(
    select i.id from gangq.incarnations i join gangq.leases l on l.incarnation = i.id
    where i.id = any (among) and gangq.takes_work(i, l.renewed_at, t, heard_since, hosts, workers) order by i.id);
end $$;
comment on function gangq.candidates is
  'Internal. Workers that may be given work now: live, heard lately, not quarantined, not cordoned, not passed over.';
