-- Who has to go so that a gang fits: judged on a board, pure, no locks. 062_displace.sql carries it out.
--
-- Nothing is told to stop unless it has been proved that the gang then fits, on the state with what is leaving already gone;
-- and what that sets free is kept for it (escrow) in the same commit. So preemption cannot run in circles: who was displaced
-- by priority comes back with a lower one. Who was displaced by reclaim comes back into a queue that is at its guarantee or
-- above, so it cannot claim back; and the one it made room for keeps its queue within its guarantee, below which nobody
-- from outside brings it.

create type gangq.spare as (
  slots integer[],
  memory bigint[],
  mcpus bigint[],
  held bigint[],
  kept_slots integer[],
  kept_memory bigint[],
  kept_mcpus bigint[],
  kept_gpus integer[],
  later_at timestamptz[],
  later_slots integer[],
  later_memory bigint[],
  later_mcpus bigint[],
  later_gpus integer[]
);
comment on type gangq.spare is
  'What is free in the middle of a pass, by worker (held: by device), and what of that must stay free. later: what planned '
  'starts up to that moment take of what ends until then; if it is free earlier, they still need it.';

-- What a board's held entries of one unit are is a range: they are in the order of their units.
create function gangq.first_held(b gangq.board, units bigint[]) returns integer[] language sql immutable as $$
  select coalesce(array_agg(h.first order by u.n), '{}')
  from unnest(first_held.units) with ordinality as u(unit, n)
  join (select x.unit, min(x.n)::integer as first from unnest(b.held_unit) with ordinality as x(unit, n) group by x.unit) h on h.unit = u.unit
$$;
comment on function gangq.first_held is 'Internal. Where on the board the holdings of each of these units begin.';

create function gangq.without(b gangq.board, firsts integer[], spare gangq.spare) returns gangq.spare
language plpgsql immutable as $$
declare
  r gangq.spare := without.spare;
  slots integer[] := r.slots;
  memory bigint[] := r.memory;
  mcpus bigint[] := r.mcpus;
  held bigint[] := r.held;
  kept_slots integer[] := r.kept_slots;
  kept_memory bigint[] := r.kept_memory;
  kept_mcpus bigint[] := r.kept_mcpus;
  kept_gpus integer[] := r.kept_gpus;
  later_slots integer[] := r.later_slots;
  later_memory bigint[] := r.later_memory;
  later_mcpus bigint[] := r.later_mcpus;
  later_gpus integer[] := r.later_gpus;
  h integer;
  w integer;
  e integer;
  gpus integer;
  unit bigint;
  job bigint;
  n integer;
begin
  foreach h in array firsts loop
    unit := b.held_unit[h];
    while b.held_unit[h] = unit loop
      w := b.held_worker[h];
      slots[w] := slots[w] + b.held_slots[h];
      memory[w] := memory[w] + b.held_memory[h];
      mcpus[w] := mcpus[w] + b.held_mcpus[h];
      gpus := b.held_gpus[h];
      if gpus > 0 then
        job := b.held_job[h];
        e := b.device_first[w];
        while gpus > 0 and e < b.device_first[w + 1] loop
          if held[e] = job then
            held[e] := 0;
            gpus := gpus - 1;
          end if;
          e := e + 1;
        end loop;
      end if;
      -- A planned start counts on its end: from now until then that much more has to stay free.
      if later_slots[w] > 0 and b.held_ends[h] <= r.later_at[w] then
        n := least(later_slots[w], b.held_slots[h]);
        kept_slots[w] := kept_slots[w] + n;
        later_slots[w] := later_slots[w] - n;
        kept_memory[w] := kept_memory[w] + least(later_memory[w], b.held_memory[h]);
        later_memory[w] := later_memory[w] - least(later_memory[w], b.held_memory[h]);
        kept_mcpus[w] := kept_mcpus[w] + least(later_mcpus[w], b.held_mcpus[h]);
        later_mcpus[w] := later_mcpus[w] - least(later_mcpus[w], b.held_mcpus[h]);
        n := least(later_gpus[w], b.held_gpus[h]);
        kept_gpus[w] := kept_gpus[w] + n;
        later_gpus[w] := later_gpus[w] - n;
      end if;
      h := h + 1;
    end loop;
  end loop;
  r.slots := slots; r.memory := memory; r.mcpus := mcpus; r.held := held;
  r.kept_slots := kept_slots; r.kept_memory := kept_memory; r.kept_mcpus := kept_mcpus; r.kept_gpus := kept_gpus;
  r.later_slots := later_slots; r.later_memory := later_memory; r.later_mcpus := later_mcpus; r.later_gpus := later_gpus;
  return r;
end $$;
comment on function gangq.without is
  'Internal. What is free once these units are gone, given by where their holdings begin.';

create function gangq.seat_spare(b gangq.board, kind integer, counts integer[], spare gangq.spare) returns integer[]
language sql immutable as $$
  select gangq.seat_gang(b, kind, counts, (spare).slots, (spare).memory, (spare).mcpus, (spare).held,
    (spare).kept_slots, (spare).kept_memory, (spare).kept_mcpus, (spare).kept_gpus)
$$;
comment on function gangq.seat_spare is 'Internal. seat_gang on what is free.';

-- The spare of a gang that would run until ends_at: planned starts before that must not be delayed, others do not concern it.
create function gangq.spare_beside(
  b gangq.board, ends_at timestamptz, slots integer[], memory bigint[], mcpus bigint[], held bigint[],
  kept_slots integer[], kept_memory bigint[], kept_mcpus bigint[], kept_gpus integer[], plans jsonb[], plan_starts timestamptz[]
) returns gangq.spare language plpgsql immutable as $$
declare
  n integer := coalesce(cardinality(b.worker_ids), 0);
  r gangq.spare;
  part jsonb;
  w integer;
begin
  r.slots := slots; r.memory := memory; r.mcpus := mcpus; r.held := held;
  r.kept_slots := kept_slots; r.kept_memory := kept_memory; r.kept_mcpus := kept_mcpus; r.kept_gpus := kept_gpus;
  r.later_at := array_fill('-infinity'::timestamptz, array[n]);
  r.later_slots := array_fill(0, array[n]);
  r.later_memory := array_fill(0::bigint, array[n]);
  r.later_mcpus := r.later_memory;
  r.later_gpus := r.later_slots;
  for i in 1 .. cardinality(plans) loop
    for part in select v.value from jsonb_array_elements(plans[i]) as v loop
      w := (part ->> 0)::integer;
      if plan_starts[i] >= ends_at then
        r.kept_slots[w] := r.kept_slots[w] - (part ->> 1)::integer;
        r.kept_memory[w] := r.kept_memory[w] - (part ->> 2)::bigint;
        r.kept_mcpus[w] := r.kept_mcpus[w] - (part ->> 3)::bigint;
        r.kept_gpus[w] := r.kept_gpus[w] - (part ->> 4)::integer;
      else
        r.later_at[w] := greatest(r.later_at[w], plan_starts[i]);
        r.later_slots[w] := r.later_slots[w] + (part ->> 5)::integer - (part ->> 1)::integer;
        r.later_memory[w] := r.later_memory[w] + (part ->> 6)::bigint - (part ->> 2)::bigint;
        r.later_mcpus[w] := r.later_mcpus[w] + (part ->> 7)::bigint - (part ->> 3)::bigint;
        r.later_gpus[w] := r.later_gpus[w] + (part ->> 8)::integer - (part ->> 4)::integer;
      end if;
    end loop;
  end loop;
  return r;
end $$;
comment on function gangq.spare_beside is
  'Internal. What is free for a gang that would run until ends_at, and what it must leave for planned starts before that.';

create function gangq.lies_below(b gangq.board, queue integer, ancestor integer) returns boolean language plpgsql immutable as $$
declare
  q integer := lies_below.queue;
begin
  while q is not null and q <> lies_below.ancestor loop
    q := b.queue_parent[q];
  end loop;
  return q is not null;
end $$;
comment on function gangq.lies_below is 'Internal. Whether a queue is the other one or in its subtree.';

create function gangq.covered_by(
  b gangq.board, queue integer, jobs bigint, gpus bigint, memory bigint, mcpus bigint,
  used_jobs bigint[], used_gpus bigint[], used_memory bigint[], used_mcpus bigint[]
) returns integer language plpgsql immutable as $$
declare
  q integer := covered_by.queue;
begin
  while q is not null loop
    if b.queue_guaranteed[q] is not null and (
      select bool_and(x.used + x.asked <= x.most)
      from (values ((b.queue_guaranteed[q] ->> 'jobs')::numeric, used_jobs[q], jobs), ((b.queue_guaranteed[q] ->> 'gpus')::numeric, used_gpus[q], gpus),
        ((b.queue_guaranteed[q] ->> 'memory_mb')::numeric, used_memory[q], memory),
        ((b.queue_guaranteed[q] ->> 'cpus')::numeric * 1000, used_mcpus[q], mcpus)) as x(most, used, asked)
      where x.most is not null and x.asked > 0) then
      return q;
    end if;
    q := b.queue_parent[q];
  end loop;
  return null;
end $$;
comment on function gangq.covered_by is
  'Internal. The nearest queue on the path that is guaranteed something of what is asked, and with it has no more than that; or null.';

-- A queue that does not hold the gang too may lose what it has beyond its guarantee, and all of what it has none of.
create function gangq.may_lose(
  b gangq.board, queue integer, own_path integer[], jobs bigint, gpus bigint, memory bigint, mcpus bigint,
  stay_jobs bigint[], stay_gpus bigint[], stay_memory bigint[], stay_mcpus bigint[]
) returns boolean language plpgsql immutable as $$
declare
  q integer := may_lose.queue;
begin
  while q is not null and q <> all (own_path) loop
    if b.queue_guaranteed[q] is not null and exists (
      select 1
      from (values ((b.queue_guaranteed[q] ->> 'jobs')::numeric, stay_jobs[q], jobs), ((b.queue_guaranteed[q] ->> 'gpus')::numeric, stay_gpus[q], gpus),
        ((b.queue_guaranteed[q] ->> 'memory_mb')::numeric, stay_memory[q], memory),
        ((b.queue_guaranteed[q] ->> 'cpus')::numeric * 1000, stay_mcpus[q], mcpus)) as x(least, stays, loses)
      where x.loses > 0 and x.stays - x.loses < x.least) then
      return false;
    end if;
    q := b.queue_parent[q];
  end loop;
  return true;
end $$;
comment on function gangq.may_lose is
  'Internal. Whether no queue on this path, but for those on the other, falls below its guarantee by losing so much. stay_*: what each would keep.';

-- One that suffices, if there is one; else several: added one by one in the order of their cost until the gang fits, then
-- each that turns out not to be needed is spared, the dearest first. Since more room never hurts, both are found by halving.
create function gangq.choose_victims(
  b gangq.board, gang integer, counts integer[], spare gangq.spare, claims_for integer,
  out victims bigint[], out seats integer[]
) language plpgsql immutable set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  k integer := b.gang_kind[gang];
  own integer := b.kind_queue[k];
  first_role integer := b.kind_first_role[k];
  roles integer := cardinality(choose_victims.counts);
  own_path integer[] := '{}';
  guards boolean := false;
  stay_jobs bigint[] := b.used_jobs; stay_gpus bigint[] := b.used_gpus; stay_memory bigint[] := b.used_memory; stay_mcpus bigint[] := b.used_mcpus;
  u record;
  q integer;
  level integer;
  candidates bigint[] := '{}';  -- each alone, cheapest first
  firsts integer[] := '{}';  -- where their holdings begin
  together integer[] := '{}';  -- all at once, likewise
  base gangq.spare;
  rooms integer[] := '{}';
  got integer[];
  one bigint;
  fixed integer[] := '{}';
  rest integer[];
  last integer;
  lo integer;
  hi integer;
  mid integer;
  tries integer := 0;
begin
  q := own;
  while q is not null loop
    own_path := own_path || q;
    q := b.queue_parent[q];
  end loop;
  if claims_for is null and coalesce((
    select min(x.priority) from unnest(b.unit_priority, b.unit_movable) as x(priority, movable) where x.movable), 1000) >= b.gang_priority[gang] then
    return;
  end if;
  guards := exists (select 1 from unnest(b.queue_guaranteed) as x where x is not null);

  -- Who may be told to stop, cheapest first: priority, work lost, youngest.
  for u in
    select x.unit, x.queue, x.leaving, h.first, h.jobs, h.gpus, h.memory, h.mcpus
    from unnest(b.unit_ids, b.unit_queue, b.unit_priority, b.unit_movable, b.unit_leaving, b.unit_lost, b.unit_since)
      as x(unit, queue, priority, movable, leaving, lost, since)
    join (
      select z.unit, min(z.n)::integer as first, count(*) as jobs, sum(z.gpus)::bigint as gpus, sum(z.memory)::bigint as memory,
        sum(z.mcpus)::bigint as mcpus, bool_or(b.worker_open[z.worker]) as useful
      from unnest(b.held_unit, b.held_worker, b.held_memory, b.held_mcpus, b.held_gpus) with ordinality as z(unit, worker, memory, mcpus, gpus, n)
      group by z.unit) h on h.unit = x.unit
    where x.leaving and guards or x.movable and not x.leaving and h.useful
      and (x.priority < b.gang_priority[gang] or claims_for is not null and not gangq.lies_below(b, x.queue, claims_for))
    order by x.leaving desc, x.priority, x.lost, x.since desc, x.unit
  loop
    -- What is leaving is as good as gone for its queue.
    if u.leaving then
      q := u.queue;
      while q is not null loop
        stay_jobs[q] := stay_jobs[q] - u.jobs; stay_gpus[q] := stay_gpus[q] - u.gpus;
        stay_memory[q] := stay_memory[q] - u.memory; stay_mcpus[q] := stay_mcpus[q] - u.mcpus;
        q := b.queue_parent[q];
      end loop;
      continue;
    end if;
    if guards then
      continue when not gangq.may_lose(b, u.queue, own_path, u.jobs, u.gpus, u.memory, u.mcpus, stay_jobs, stay_gpus, stay_memory, stay_mcpus);
    end if;
    candidates := candidates || u.unit;
    firsts := firsts || u.first;
  end loop;
  if candidates = '{}' then
    return;
  end if;

  base := gangq.without(b, gangq.first_held(b, array(
    select x.unit from unnest(b.unit_ids, b.unit_leaving) as x(unit, leaving) where x.leaving)), spare);
  seats := gangq.seat_spare(b, k, counts, base);
  if seats is not null then
    victims := '{}';
    return;
  end if;
  if gangq.seat_spare(b, k, counts, gangq.without(b, firsts, base)) is null then
    return;
  end if;

  -- Of those that by numbers could suffice alone (within a domain, if all of it has to sit in one), the cheapest.
  level := b.kind_require[k];
  if roles = 1 then
    level := greatest(level, b.role_require[first_role], case b.role_strategy[first_role] when 'strict_pack' then array_position(b.levels, 'host') else 0 end);
  end if;
  for role in 1 .. roles loop
    rooms := rooms || gangq.rooms(b, b.role_shape[first_role + role - 1], base.slots, base.memory, base.mcpus, base.held,
      base.kept_slots, base.kept_memory, base.kept_mcpus, base.kept_gpus);
  end loop;
  for one, last in
    with worker as (
      select w.n, w.open, w.class, w.slots, w.memory, w.mcpus, coalesce(d.free, 0) - w.kept_gpus as gpus,
        case when level = 0 then '' when b.levels[level] = 'host' then b.hosts[w.host]
          else b.worker_domains[(w.n - 1) * cardinality(b.levels) + level] end as domain
      from (
        select x.n, x.open, x.class, x.host, x.slots - x.kept_slots as slots, x.memory - x.kept_memory as memory, x.mcpus - x.kept_mcpus as mcpus, x.kept_gpus
        from unnest(b.worker_open, b.worker_class, b.worker_host, base.slots, base.memory, base.mcpus, base.kept_slots, base.kept_memory, base.kept_mcpus, base.kept_gpus)
          with ordinality as x(open, class, host, slots, memory, mcpus, kept_slots, kept_memory, kept_mcpus, kept_gpus, n)) w
      left join (select e.worker, count(*) as free from unnest(b.device_worker, base.held) as e(worker, held) where e.held = 0 group by e.worker) d on d.worker = w.n
    ),
    role as (
      select r.n as role, choose_victims.counts[r.n] as asked, b.role_shape[first_role + r.n - 1] as shape from generate_series(1, roles) as r(n)
    ),
    now_free as (
      select w.domain, r.role, r.asked, sum(rooms[(r.role - 1) * cardinality(b.worker_ids) + w.n]) as room
      from worker w cross join role r where w.domain is not null group by w.domain, r.role, r.asked
    ),
    freed as (
      select h.unit, h.worker, sum(h.slots) as slots, sum(h.memory) as memory, sum(h.mcpus) as mcpus, sum(h.gpus) as gpus
      from unnest(b.held_unit, b.held_worker, b.held_slots, b.held_memory, b.held_mcpus, b.held_gpus) as h(unit, worker, slots, memory, mcpus, gpus)
      where h.unit = any (candidates) group by h.unit, h.worker
    ),
    gained as (
      select f.unit, w.domain, r.role, sum(greatest(0, case when not w.open or not b.shape_serves[(r.shape - 1) * b.classes + w.class] then 0 else least(
          w.slots + f.slots,
          case when b.shape_memory[r.shape] > 0 then floor((w.memory + f.memory) / b.shape_memory[r.shape]) end,
          case when b.shape_mcpus[r.shape] > 0 then floor((w.mcpus + f.mcpus) / b.shape_mcpus[r.shape]) end,
          case when b.shape_gpus[r.shape] > 0 then floor((w.gpus + f.gpus) / b.shape_gpus[r.shape]) end) end
          - rooms[(r.role - 1) * cardinality(b.worker_ids) + w.n])) as room
      from freed f join worker w on w.n = f.worker cross join role r
      where w.domain is not null
      group by f.unit, w.domain, r.role
    ),
    enough as (
      select g.unit, g.domain from gained g join now_free n on n.domain = g.domain and n.role = g.role
      group by g.unit, g.domain having bool_and(n.room + g.room >= n.asked)
    )
    select c.unit, c.first from unnest(candidates, firsts) with ordinality as c(unit, first, n) where c.unit in (select e.unit from enough e) order by c.n limit 32
  loop
    seats := gangq.seat_spare(b, k, counts, gangq.without(b, array[last], base));
    if seats is not null then
      victims := array[one];
      return;
    end if;
  end loop;

  -- Several: as many as leave every queue its guarantee together, in the order of their cost.
  if guards then
    for u in
      select c.first, x.queue, h.jobs, h.gpus, h.memory, h.mcpus
      from unnest(candidates, firsts) with ordinality as c(unit, first, n)
      join unnest(b.unit_ids, b.unit_queue) as x(unit, queue) on x.unit = c.unit
      join (
        select z.unit, count(*) as jobs, sum(z.gpus)::bigint as gpus, sum(z.memory)::bigint as memory, sum(z.mcpus)::bigint as mcpus
        from unnest(b.held_unit, b.held_memory, b.held_mcpus, b.held_gpus) as z(unit, memory, mcpus, gpus) group by z.unit) h on h.unit = c.unit
      order by c.n
    loop
      continue when not gangq.may_lose(b, u.queue, own_path, u.jobs, u.gpus, u.memory, u.mcpus, stay_jobs, stay_gpus, stay_memory, stay_mcpus);
      together := together || u.first;
      q := u.queue;
      while q is not null loop
        stay_jobs[q] := stay_jobs[q] - u.jobs; stay_gpus[q] := stay_gpus[q] - u.gpus;
        stay_memory[q] := stay_memory[q] - u.memory; stay_mcpus[q] := stay_mcpus[q] - u.mcpus;
        q := b.queue_parent[q];
      end loop;
    end loop;
  else
    together := firsts;
  end if;
  rest := together;
  seats := gangq.seat_spare(b, k, counts, gangq.without(b, rest, base));
  if seats is null then
    return;  -- guarantees do not let enough of them go
  end if;
  loop
    -- The shortest beginning of the rest that is enough with those already found to be needed: its last one is needed too.
    lo := 0;
    hi := cardinality(rest);
    while lo < hi loop
      -- Once it is known where it would sit, most are needed: each costs one look then, and not as many as it takes to halve.
      mid := case when fixed <> '{}' and hi = cardinality(rest) then hi - 1 else (lo + hi) / 2 end;
      tries := tries + 1;
      got := gangq.seat_spare(b, k, counts, gangq.without(b, fixed || rest[1 : mid], base));
      if got is null then
        lo := mid + 1;
      else
        seats := got;
        hi := mid;
      end if;
    end loop;
    exit when hi = 0 or tries > 256;
    last := rest[hi];
    rest := rest[1 : hi - 1];
    if fixed = '{}' then
      -- Who holds nothing where it would now sit is spared at once.
      rest := array(
        select c.first from unnest(rest) with ordinality as c(first, n)
        where b.held_unit[c.first] in (select h.unit from unnest(b.held_unit, b.held_worker) as h(unit, worker) where h.worker = any (seats))
        order by c.n);
    end if;
    fixed := fixed || last;
  end loop;
  -- The proof is for exactly these. After too many tries those not yet examined go as well.
  if hi > 0 then
    fixed := fixed || rest;
  end if;
  seats := gangq.seat_spare(b, k, counts, gangq.without(b, fixed, base));
  if seats is not null then
    victims := array(select b.held_unit[f] from unnest(fixed) as f);
  end if;
end $$;
comment on function gangq.choose_victims is
  'Internal. The units (gangs; solo jobs as their negative id) to tell to stop so that a gang that does not fit does, and its '
  'seats then. {}: what is leaving already is enough; null: nobody may be, or it would not help. Of lower priority, or, if a '
  'queue''s guarantee covers the gang (claims_for), of other queues above theirs; never one of a queue that would fall below its guarantee.';

create function gangq.need_of(b gangq.board, kind integer, counts integer[], seats integer[]) returns jsonb language sql immutable as $$
  select jsonb_agg(jsonb_build_array(w.worker, w.slots, w.memory, w.mcpus, w.gpus) order by w.worker)
  from (
    select e.worker, count(*) as slots, sum(b.shape_memory[r.shape]) as memory, sum(b.shape_mcpus[r.shape]) as mcpus, sum(b.shape_gpus[r.shape]) as gpus
    from unnest(need_of.seats) with ordinality as e(worker, n)
    join (
      select b.role_shape[b.kind_first_role[need_of.kind] + c.n::integer - 1] as shape, sum(c.members) over (order by c.n) as last,
        sum(c.members) over (order by c.n) - c.members as before
      from unnest(need_of.counts) with ordinality as c(members, n)) r on e.n > r.before and e.n <= r.last
    group by e.worker) w
$$;
comment on function gangq.need_of is
  'Internal. What a gang takes of each worker it sits on: [worker, slots, memory, mcpus, gpus].';
