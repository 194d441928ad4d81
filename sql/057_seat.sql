-- Where the members of a gang would sit, given what is free: rooms, then roles, then topology domains. Pure: it reads its
-- arguments only. Takes no locks.

-- What each worker has room for, of one shape. kept_*: what must stay free for others.
create function gangq.rooms(
  b gangq.board, shape integer, slots integer[], memory bigint[], mcpus bigint[], held bigint[],
  kept_slots integer[], kept_memory bigint[], kept_mcpus bigint[], kept_gpus integer[]
) returns integer[] language sql immutable as $$
  select array_agg(
    case when not x.open or not b.shape_serves[(rooms.shape - 1) * b.classes + x.class] then 0
      else greatest(0, least(
        x.slots - x.kept_slots,
        case when b.shape_memory[rooms.shape] > 0 then (x.memory - x.kept_memory) / b.shape_memory[rooms.shape] else x.slots end,
        case when b.shape_mcpus[rooms.shape] > 0 then (x.mcpus - x.kept_mcpus) / b.shape_mcpus[rooms.shape] else x.slots end,
        case when b.shape_gpus[rooms.shape] > 0 then (coalesce(d.free, 0) - x.kept_gpus) / b.shape_gpus[rooms.shape] else x.slots end)) end::integer
    order by x.n)
  from unnest(b.worker_open, b.worker_class, rooms.slots, rooms.memory, rooms.mcpus, rooms.kept_slots, rooms.kept_memory, rooms.kept_mcpus, rooms.kept_gpus)
    with ordinality as x(open, class, slots, memory, mcpus, kept_slots, kept_memory, kept_mcpus, kept_gpus, n)
  left join (
    select e.worker, count(*) as free
    from unnest(b.device_worker, b.device_vram, b.device_ids, rooms.held) as e(worker, vram, id, held)
    where e.held = 0 and e.vram >= b.shape_vram[rooms.shape] and b.shape_gpus[rooms.shape] > 0
      and (b.shape_avoid[rooms.shape] is null or not b.shape_avoid[rooms.shape] @> to_jsonb(e.id))
    group by e.worker) d on d.worker = x.n
$$;
comment on function gangq.rooms is
  'Internal. How many members of a shape each worker has room for; devices are whole, and one it avoids is none.';

-- How many members each worker of the chosen hosts takes: a host's share, from its roomiest workers first.
create function gangq.seats_of(
  host_ids integer[], takes integer[], nth integer, hosts integer[], rooms integer[],
  out worker integer, out room integer, out host integer, out take integer, out last boolean, out seats integer
) returns setof record language sql immutable as $$
  select w.worker, w.room, w.host, w.take, w.last, w.seats
  from (
    select x.worker, x.room, h.host, h.take, h.nth is not distinct from seats_of.nth as last,
      least(x.room, h.take - least(h.take, coalesce(sum(x.room) over (
        partition by h.host order by x.room desc, x.worker rows between unbounded preceding and 1 preceding), 0)))::integer as seats
    from unnest(seats_of.host_ids, seats_of.takes) with ordinality as h(host, take, nth)
    join (
      select y.n::integer as worker, y.host, y.room
      from unnest(seats_of.hosts, seats_of.rooms) with ordinality as y(host, room, n) where y.room > 0) x on x.host = h.host
    where h.take > 0) w
  where w.seats > 0
$$;
comment on function gangq.seats_of is
  'Internal. The workers of these hosts that get members. nth: which of the hosts comes last.';

-- The packing rules. hosts and rooms are aligned with the workers; paths, if any, name the topology domains of each worker,
-- broad to narrow, levels of them a worker. pack takes the largest hosts, but the last one is the tightest that still holds
-- the rest, so that a small gang does not break up a large host. Ranks are contiguous per domain, host and worker, the host
-- that is not filled comes last.
create function gangq.seat_role(
  size integer, strategy text, balanced boolean, hosts integer[], rooms integer[], paths text[] default null,
  levels integer default 1, host_level integer default 1
) returns integer[] language plpgsql immutable as $$
#variable_conflict use_column
declare
  host_ids integer[];
  host_rooms integer[];
  takes integer[];
  n integer;
  left_over integer := seat_role.size;
  last integer;
  base integer;
  extra integer;
begin
  if seat_role.size = 0 then
    return '{}';
  end if;
  -- Largest first, and of those alike the first.
  select array_agg(h.host order by h.room desc, h.host), array_agg(h.room order by h.room desc, h.host)
  into host_ids, host_rooms
  from (select w.host, sum(w.room)::integer as room from unnest(hosts, rooms) as w(host, room) where w.room > 0 group by w.host) h;
  n := coalesce(cardinality(host_ids), 0);
  case seat_role.strategy
    when 'strict_pack' then
      select h.n into last from unnest(host_rooms) with ordinality as h(room, n) where h.room >= seat_role.size order by h.room, h.n limit 1;
      if not found then
        return null;
      end if;
      takes := array_fill(0, array[n]);
      takes[last] := seat_role.size;
    when 'strict_spread' then
      if n < seat_role.size then
        return null;
      end if;
      -- The smallest that will do: what is large stays whole.
      takes := array_fill(0, array[n - seat_role.size]) || array_fill(1, array[seat_role.size]);
    when 'spread' then
      select array_agg(t.take order by t.n) into takes
      from (
        select h.n, count(s.nth) as take
        from unnest(host_rooms) with ordinality as h(room, n)
        left join (
          select x.n, x.nth, row_number() over (order by x.nth, x.n) as turn
          from (
            select z.n, i.nth from unnest(host_rooms) with ordinality as z(room, n)
            cross join lateral generate_series(1, least(z.room, seat_role.size)) as i(nth)) x) s
          on s.n = h.n and s.turn <= seat_role.size
        group by h.n) t;
      if (select sum(t) from unnest(takes) as t) is distinct from seat_role.size then
        return null;
      end if;
    else
      takes := array_fill(0, array[n]);
      for i in 1 .. n loop
        if host_rooms[i] >= left_over then
          select h.n into last from unnest(host_rooms) with ordinality as h(room, n)
          where h.n >= i and h.room >= left_over order by h.room, h.n limit 1;
          takes[last] := left_over;
          left_over := 0;
          if seat_role.balanced and i > 1 then
            -- As many hosts as it needs anyway, or more if that evens it out.
            for k in i .. n loop
              base := seat_role.size / k;
              extra := seat_role.size % k;
              if host_rooms[k] >= base and (extra = 0 or host_rooms[extra] > base) then
                takes := array_fill(base + 1, array[extra]) || array_fill(base, array[k - extra]) || array_fill(0, array[n - k]);
                last := null;
                exit;
              end if;
            end loop;
          end if;
          exit;
        end if;
        takes[i] := host_rooms[i];
        left_over := left_over - host_rooms[i];
      end loop;
      if left_over > 0 then
        return null;
      end if;
  end case;
  if paths is null then
    return (
      select array_agg(s.worker order by s.last, s.take desc, s.host, s.room desc, s.worker)
      from gangq.seats_of(host_ids, takes, last, hosts, rooms) s cross join lateral generate_series(1, s.seats));
  end if;
  return (
    with seated as materialized (select x.* from gangq.seats_of(host_ids, takes, last, hosts, rooms) x),
    -- Of each level the domain with the last host comes last, before it the one with most members.
    domains as (
      select s.worker, l.level, case when l.host then '' else coalesce(paths[(s.worker - 1) * seat_role.levels + l.level], '') end as path,
        case when l.host then s.host end as host, s.seats, s.last
      from seated s cross join (
        select x.level, x.level = seat_role.host_level as host from generate_series(1, seat_role.levels) as x(level)) l
    ),
    keys as (
      select d.worker, string_agg(d.key, chr(1) order by d.level) as key
      from (
        select x.worker, x.level, (bool_or(x.last) over same)::integer || lpad((10000000 - sum(x.seats) over same)::text, 8, '0')
          || lpad(coalesce(x.host, 0)::text, 8, '0') || x.path as key
        from domains x window same as (partition by x.level, x.host, x.path)) d
      group by d.worker
    )
    select array_agg(s.worker order by k.key collate "C", s.room desc, s.worker)
    from seated s join keys k on k.worker = s.worker cross join lateral generate_series(1, s.seats));
end $$;
comment on function gangq.seat_role is
  'Internal. The worker of each member of one role, in rank order, or null when the rooms do not hold them. host_level: '
  'which of the levels is the host.';

-- The domain of a level that each worker lies in; null: in none. A host has no label of its own: within a broader level
-- it counts with that level's domain, and not at all where that is missing.
create function gangq.domain_of(b gangq.board, level integer, within integer default 0) returns text[] language sql immutable as $$
  select case when domain_of.level > cardinality(b.levels) then array_fill(null::text, array[cardinality(b.worker_host)])
    when b.levels[domain_of.level] <> 'host' then array(
      select b.worker_domains[(x.n - 1) * cardinality(b.levels) + domain_of.level] from generate_series(1, cardinality(b.worker_host)) as x(n) order by x.n)
    when domain_of.within between 1 and domain_of.level - 1 then array(
      select b.worker_domains[(x.n - 1) * cardinality(b.levels) + domain_of.within] || '/' || b.hosts[x.host]
      from unnest(b.worker_host) with ordinality as x(host, n) order by x.n)
    else array(select b.hosts[x.host] from unnest(b.worker_host) with ordinality as x(host, n) order by x.n) end
$$;
comment on function gangq.domain_of is
  'Internal. The domain of a topology level that each worker lies in, broader ones included in its name. within: a broader '
  'level that is required too.';

-- Domains in which each of the roles has room for its members, the tightest first.
create function gangq.roomy_domains(domains text[], rooms integer[], counts integer[]) returns setof text language sql immutable as $$
  select z.domain
  from (
    select x.domain, r.role, sum(rooms[(r.role - 1) * cardinality(domains) + x.n]) as room
    from unnest(domains) with ordinality as x(domain, n) cross join generate_series(1, cardinality(counts)) as r(role)
    where x.domain is not null
    group by x.domain, r.role) z
  group by z.domain having min(z.room - counts[z.role]) >= 0
  order by sum(z.room), z.domain
$$;
comment on function gangq.roomy_domains is
  'Internal. Of the domains of one level those with room for each role by itself, tightest first. rooms: of each role, flat.';

-- One role, by its own strategy and in the narrowest domain of the levels it names that holds it.
create function gangq.seat_members(b gangq.board, role integer, members integer, rooms integer[]) returns integer[]
language plpgsql immutable as $$
#variable_conflict use_column
declare
  n integer := cardinality(b.worker_host);
  level integer := greatest(b.role_prefer[seat_members.role], b.role_require[seat_members.role]);
  levels integer := cardinality(b.levels);
  host_level integer := case when levels > 1 then array_position(b.levels, 'host') else 1 end;
  domains text[];
  domain text;
  got integer[];
begin
  if seat_members.members = 0 then
    return '{}';
  end if;
  while level > 0 and level >= b.role_require[seat_members.role] loop
    domains := gangq.domain_of(b, level, b.role_require[seat_members.role]);
    for domain in select d from gangq.roomy_domains(domains, seat_members.rooms, array[seat_members.members]) as d loop
      got := gangq.seat_role(seat_members.members, b.role_strategy[seat_members.role], b.role_balanced[seat_members.role], b.worker_host,
        array(select case when x.name = domain then x.room else 0 end from unnest(seat_members.rooms, domains) with ordinality as x(room, name, n) order by x.n),
        b.worker_domains, levels, host_level);
      if got is not null then
        return got;
      end if;
    end loop;
    level := level - 1;
  end loop;
  if b.role_require[seat_members.role] > 0 then
    return null;
  end if;
  return gangq.seat_role(seat_members.members, b.role_strategy[seat_members.role], b.role_balanced[seat_members.role], b.worker_host, seat_members.rooms,
    b.worker_domains, levels, host_level);
end $$;
comment on function gangq.seat_members is
  'Internal. The worker of each of so many members of a role (its number on the board) in these rooms, in rank order, or null.';

-- Devices that some of several roles may use. Roles fit beside one another if each set of classes of them asks for no more
-- devices than there are that any of these may use (Hall). Sets are numbered by the sum of 2 ^ (class - 1).
create function gangq.device_sets(
  b gangq.board, first_role integer, classes integer[], held bigint[], kept_gpus integer[]
) returns integer[] language sql immutable as $$
  select array_agg((coalesce(c.devices, 0) - k.kept)::integer order by k.n, s.classes)
  from unnest(device_sets.kept_gpus) with ordinality as k(kept, n)
  cross join generate_series(1, (1 << (select max(x) from unnest(device_sets.classes) as x)) - 1) as s(classes)
  left join (
    select m.worker, x.classes, count(*) as devices
    from (
      select u.worker, u.id, sum(1 << (u.class - 1))::integer as usable
      from (
        select e.worker, e.id, r.class
        from unnest(b.device_worker, b.device_vram, b.device_ids, device_sets.held) as e(worker, vram, id, held)
        cross join unnest(device_sets.classes, b.role_shape[device_sets.first_role : device_sets.first_role + cardinality(device_sets.classes) - 1]) as r(class, shape)
        where e.held = 0 and r.class > 0
        group by e.worker, e.id, e.vram, r.class
        having bool_and(e.vram >= b.shape_vram[r.shape] and (b.shape_avoid[r.shape] is null or not b.shape_avoid[r.shape] @> to_jsonb(e.id)))) u
      group by u.worker, u.id) m
    cross join generate_series(1, (1 << (select max(x) from unnest(device_sets.classes) as x)) - 1) as x(classes)
    where m.usable & x.classes <> 0
    group by m.worker, x.classes) c on c.worker = k.n and c.classes = s.classes
$$;
comment on function gangq.device_sets is
  'Internal. Of each worker, for each set of classes of roles, how many free devices any of them may use, less those kept. '
  'classes: of each role the class of devices it may use, 0: it needs none.';

-- Room of one role beside what the others take (seats: members of each role on each worker, flat).
create function gangq.rooms_beside(
  b gangq.board, first_role integer, role integer, roles integer, rooms integer[], seats integer[],
  slots integer[], memory bigint[], mcpus bigint[], classes integer[], sets integer[]
) returns integer[] language plpgsql immutable as $$
#variable_conflict use_column
declare
  n integer := cardinality(b.worker_host);
  beside integer[] := rooms_beside.rooms[(rooms_beside.role - 1) * n + 1 : rooms_beside.role * n];
  mine integer := b.role_shape[first_role + rooms_beside.role - 1];
  shape integer;
  room bigint;
  taken bigint;
  total integer;
  left_memory bigint;
  left_mcpus bigint;
  all_sets integer := case when sets is null then 0 else cardinality(sets) / n end;
begin
  for w in 1 .. n loop
    continue when beside[w] = 0;
    total := 0;
    left_memory := memory[w];
    left_mcpus := mcpus[w];
    for other in 1 .. roles loop
      continue when other = rooms_beside.role or rooms_beside.seats[(other - 1) * n + w] = 0;
      shape := b.role_shape[first_role + other - 1];
      total := total + rooms_beside.seats[(other - 1) * n + w];
      left_memory := left_memory - rooms_beside.seats[(other - 1) * n + w] * b.shape_memory[shape];
      left_mcpus := left_mcpus - rooms_beside.seats[(other - 1) * n + w] * b.shape_mcpus[shape];
    end loop;
    continue when total = 0;
    room := least(beside[w], slots[w] - total);
    if b.shape_memory[mine] > 0 then
      room := least(room, left_memory / b.shape_memory[mine]);
    end if;
    if b.shape_mcpus[mine] > 0 then
      room := least(room, left_mcpus / b.shape_mcpus[mine]);
    end if;
    if b.shape_gpus[mine] > 0 then
      for together in 1 .. all_sets loop
        continue when together & (1 << (classes[rooms_beside.role] - 1)) = 0;
        taken := 0;
        for other in 1 .. roles loop
          if other <> rooms_beside.role and classes[other] > 0 and together & (1 << (classes[other] - 1)) <> 0 then
            taken := taken + rooms_beside.seats[(other - 1) * n + w] * b.shape_gpus[b.role_shape[first_role + other - 1]];
          end if;
        end loop;
        room := least(room, (sets[(w - 1) * all_sets + together] - taken) / b.shape_gpus[mine]);
      end loop;
    end if;
    beside[w] := greatest(room, 0);
  end loop;
  return beside;
end $$;
comment on function gangq.rooms_beside is
  'Internal. How many members of one role each worker has room for beside these of the other roles. sets: device_sets, or '
  'null when no two roles need devices.';

-- Some way to seat all roles at once, if there is one. Roles that must share a host or a domain are fixed to one after
-- another; then worker by worker, of what may still be missing after it only the least is remembered: one that lacks no
-- less of anything than another cannot end better. Gives up when it has spent its budget.
create function gangq.seat_jointly(
  b gangq.board, first_role integer, counts integer[], slots integer[], memory bigint[], mcpus bigint[],
  classes integer[], sets integer[], from_role integer, inout rooms integer[], inout budget integer, out seats integer[]
) language plpgsql immutable as $$
#variable_conflict use_column
declare
  n integer := cardinality(b.worker_host);
  roles integer := cardinality(seat_jointly.counts);
  all_sets integer := case when sets is null then 0 else cardinality(sets) / n end;
  all_rooms integer[] := seat_jointly.rooms;
  level integer;
  domains text[];
  domain text;
  pack_last integer := 1;
  -- what may be missing: one number of each role for each of them
  missing integer[] := seat_jointly.counts;
  parents integer[] := '{0}';
  workers integer[] := '{0}';
  spreads integer[] := '{0}';
  front integer[] := '{1}';
  next_front integer[];
  known integer := 1;
  taken integer[];
  want integer[];
  spread integer;
  node integer;
  other integer;
  room bigint;
  role integer;
  shape integer;
  gpus bigint;
  done boolean;
  worse boolean;
  better boolean;
begin
  -- A role that must share a domain: each domain in turn.
  for r in from_role .. roles loop
    level := greatest(b.role_require[first_role + r - 1], case b.role_strategy[first_role + r - 1] when 'strict_pack' then array_position(b.levels, 'host') else 0 end);
    continue when level = 0;
    domains := gangq.domain_of(b, level, b.role_require[first_role + r - 1]);
    for domain in select d from gangq.roomy_domains(domains, all_rooms[(r - 1) * n + 1 : r * n], counts[r : r]) as d loop
      rooms := all_rooms[1 : (r - 1) * n] || array(
        select case when x.name = domain then x.room else 0 end
        from unnest(all_rooms[(r - 1) * n + 1 : r * n], domains) with ordinality as x(room, name, n) order by x.n) || all_rooms[r * n + 1 : roles * n];
      select j.rooms, j.budget, j.seats into rooms, budget, seats
      from gangq.seat_jointly(b, first_role, counts, slots, memory, mcpus, classes, sets, r + 1, rooms, budget) j;
      exit when seats is not null or budget <= 0;
    end loop;
    return;
  end loop;

  for r in 2 .. roles loop
    if counts[r] > counts[pack_last] then
      pack_last := r;
    end if;
  end loop;
  for w in 1 .. n loop
    done := true;
    for r in 1 .. roles loop
      done := done and rooms[(r - 1) * n + w] = 0;
    end loop;
    continue when done;
    next_front := front;
    -- Every mix of members for this worker, of the most numerous role as many as go beside the others.
    want := array_fill(0, array[roles]);
    loop
      room := least(rooms[(pack_last - 1) * n + w], slots[w] - (select sum(x) from unnest(want) as x) + want[pack_last]);
      shape := b.role_shape[first_role + pack_last - 1];
      want[pack_last] := 0;
      gpus := memory[w];
      for r in 1 .. roles loop
        gpus := gpus - want[r] * b.shape_memory[b.role_shape[first_role + r - 1]];
      end loop;
      room := case when gpus < 0 then -1 when b.shape_memory[shape] > 0 then least(room, gpus / b.shape_memory[shape]) else room end;
      gpus := mcpus[w];
      for r in 1 .. roles loop
        gpus := gpus - want[r] * b.shape_mcpus[b.role_shape[first_role + r - 1]];
      end loop;
      room := case when gpus < 0 then -1 when b.shape_mcpus[shape] > 0 then least(room, gpus / b.shape_mcpus[shape]) else room end;
      for together in 1 .. all_sets loop
        gpus := sets[(w - 1) * all_sets + together];
        done := false;
        for r in 1 .. roles loop
          if want[r] > 0 and classes[r] > 0 and together & (1 << (classes[r] - 1)) <> 0 then
            gpus := gpus - want[r] * b.shape_gpus[b.role_shape[first_role + r - 1]];
            done := true;
          end if;
        end loop;
        if gpus < 0 and done then
          room := -1;
        elsif classes[pack_last] > 0 and together & (1 << (classes[pack_last] - 1)) <> 0 then
          room := least(room, greatest(gpus, 0) / b.shape_gpus[shape]);
        end if;
      end loop;
      budget := budget - 1;
      if room >= 0 then
        want[pack_last] := least(room, counts[pack_last]);
        foreach node in array front loop
          budget := budget - 1;
          if budget <= 0 then
            return;
          end if;
          spread := case when b.worker_host[w] = b.worker_host[nullif(workers[node], 0)] then spreads[node] else 0 end;
          taken := '{}';
          done := true;
          better := false;
          for r in 1 .. roles loop
            room := missing[(node - 1) * roles + r];
            if room > 0 and want[r] > 0 then
              if b.role_strategy[first_role + r - 1] <> 'strict_spread' then
                better := true;
                room := greatest(room - want[r], 0);
              elsif spread & (1 << (r - 1)) = 0 then
                better := true;
                room := room - 1;
                spread := spread | (1 << (r - 1));
              end if;
            end if;
            taken := taken || room::integer;
            done := done and room = 0;
          end loop;
          continue when not better;
          -- Is one known that lacks no more of anything?
          worse := false;
          foreach other in array next_front loop
            continue when workers[other] > 0 and b.worker_host[nullif(workers[other], 0)] = b.worker_host[w] and spreads[other] & ~spread <> 0;
            worse := true;
            for r in 1 .. roles loop
              worse := worse and missing[(other - 1) * roles + r] <= taken[r];
            end loop;
            exit when worse;
          end loop;
          continue when worse;
          missing := missing || taken;
          parents := parents || node;
          workers := workers || w;
          spreads := spreads || spread;
          known := known + 1;
          if done then
            seats := array_fill(0, array[roles * n]);
            node := known;
            while node > 1 loop
              for r in 1 .. roles loop
                seats[(r - 1) * n + workers[node]] := missing[(parents[node] - 1) * roles + r] - missing[(node - 1) * roles + r];
              end loop;
              node := parents[node];
            end loop;
            return;
          end if;
          next_front := array(
            select f from unnest(next_front) as f
            where not (spread & ~case when workers[f] > 0 and b.worker_host[nullif(workers[f], 0)] = b.worker_host[w] then spreads[f] else 0 end = 0
              and (select bool_and(missing[(f - 1) * roles + x] >= taken[x]) from generate_series(1, roles) as x))) || known;
        end loop;
      end if;
      -- The next mix.
      role := 1;
      loop
        if role = pack_last then
          role := role + 1;
        end if;
        exit when role > roles;
        want[role] := want[role] + 1;
        exit when want[role] <= least(rooms[(role - 1) * n + w], counts[role],
          case b.role_strategy[first_role + role - 1] when 'strict_spread' then 1 else counts[role] end);
        want[role] := 0;
        role := role + 1;
      end loop;
      exit when role > roles;
    end loop;
    front := next_front;
  end loop;
end $$;
comment on function gangq.seat_jointly is
  'Internal. Members of each role on each worker, flat, or null: there is no way, or the budget is spent. rooms: of each '
  'role, on return within the domains it was fixed to.';

-- Roles one after another, the scarcest first; what one takes the next does not see. When that fails in either order,
-- all at once, and then each once more by its own strategy in the room the others leave.
create function gangq.seat_roles(
  b gangq.board, kind integer, counts integer[], rooms integer[], slots integer[], memory bigint[], mcpus bigint[], held bigint[],
  kept_slots integer[], kept_memory bigint[], kept_mcpus bigint[], kept_gpus integer[], inside boolean[] default null
) returns integer[] language plpgsql immutable as $$
#variable_conflict use_column
declare
  n integer := cardinality(b.worker_host);
  roles integer := cardinality(seat_roles.counts);
  first_role integer := b.kind_first_role[seat_roles.kind];
  there integer[] := seat_roles.rooms;
  classes integer[] := array_fill(0, array[roles]);
  sets integer[];
  turns integer[];
  role integer;
  mine integer[];
  got integer[];
  seated jsonb;
  seats integer[];
  w integer;
begin
  if seat_roles.inside is not null then
    there := array(
      select case when seat_roles.inside[x.worker] then seat_roles.rooms[(r.role - 1) * n + x.worker] else 0 end
      from generate_series(1, roles) as r(role) cross join generate_series(1, n) as x(worker) order by r.role, x.worker);
  end if;
  if roles = 1 then
    return gangq.seat_members(b, first_role, counts[1], there);
  end if;
  slots := array(select x.free - x.kept from unnest(seat_roles.slots, kept_slots) with ordinality as x(free, kept, n) order by x.n);
  memory := array(select x.free - x.kept from unnest(seat_roles.memory, kept_memory) with ordinality as x(free, kept, n) order by x.n);
  mcpus := array(select x.free - x.kept from unnest(seat_roles.mcpus, kept_mcpus) with ordinality as x(free, kept, n) order by x.n);
  if (select count(*) from generate_series(1, roles) as r(role) where b.shape_gpus[b.role_shape[first_role + r.role - 1]] > 0) > 1 then
    -- Beyond the fifth class all count as one that may use only what each of them may.
    classes := array(
      select case when s.gpus = 0 then 0 else least(5, dense_rank() over (order by s.gpus = 0, s.vram desc, s.avoid))::integer end
      from generate_series(1, roles) as r(role)
      cross join lateral (select b.role_shape[first_role + r.role - 1] as n) x
      cross join lateral (select b.shape_gpus[x.n] as gpus, b.shape_vram[x.n] as vram, coalesce(b.shape_avoid[x.n], '[]') as avoid) s
      order by r.role);
    sets := gangq.device_sets(b, first_role, classes, held, kept_gpus);
  end if;
  turns := array(
    select r.role from generate_series(1, roles) as r(role)
    order by (select sum(x) from unnest(there[(r.role - 1) * n + 1 : r.role * n]) as x)::float8 / greatest(counts[r.role], 1), r.role);
  for try in 1 .. 2 loop
    seats := array_fill(0, array[roles * n]);
    seated := '{}';
    foreach role in array turns loop
      mine := case when seated = '{}' then there[(role - 1) * n + 1 : role * n]
        else gangq.rooms_beside(b, first_role, role, roles, there, seats, slots, memory, mcpus, classes, sets) end;
      got := gangq.seat_members(b, first_role + role - 1, counts[role], mine);
      exit when got is null;
      seated := seated || jsonb_build_object(role::text, to_jsonb(got));
      foreach w in array got loop
        seats[(role - 1) * n + w] := seats[(role - 1) * n + w] + 1;
      end loop;
    end loop;
    exit when got is not null;
    turns := array(select x.role from unnest(turns) with ordinality as x(role, n) order by x.n desc);
  end loop;
  if got is null then
    select j.rooms, j.seats into there, seats
    from gangq.seat_jointly(b, first_role, counts, slots, memory, mcpus, classes, sets, 1, there, 20000) j;
    if seats is null then
      return null;
    end if;
    seated := '{}';
    for role in 1 .. roles loop
      got := gangq.seat_members(b, first_role + role - 1, counts[role],
        gangq.rooms_beside(b, first_role, role, roles, there, seats, slots, memory, mcpus, classes, sets));
      seated := seated || jsonb_build_object(role::text, to_jsonb(got));
      seats := seats[1 : (role - 1) * n] || array_fill(0, array[n]) || seats[role * n + 1 : roles * n];
      foreach w in array got loop
        seats[(role - 1) * n + w] := seats[(role - 1) * n + w] + 1;
      end loop;
    end loop;
  end if;
  return array(
    select e.value::integer from generate_series(1, roles) as r(role)
    cross join lateral jsonb_array_elements_text(seated -> r.role::text) with ordinality as e(value, n) order by r.role, e.n);
end $$;
comment on function gangq.seat_roles is
  'Internal. The worker of each member, roles in order, within one set of workers (inside), or null. rooms: of each role, flat.';

-- Rooms in the domain of a level where one of these incarnations is (inside), or in the others.
create function gangq.beside_mates(b gangq.board, rooms integer[], level integer, mates bigint[], inside boolean) returns integer[]
language plpgsql immutable as $$
#variable_conflict use_column
declare
  names text[];
  taken text[];
begin
  if beside_mates.level = 0 then
    return beside_mates.rooms;
  end if;
  names := gangq.domain_of(b, beside_mates.level);
  taken := array(select x.name from unnest(names, b.worker_ids) as x(name, id) where x.id = any (beside_mates.mates) and x.name is not null);
  if taken = '{}' then
    return beside_mates.rooms;
  end if;
  return array(
    select case when (x.name = any (taken)) = beside_mates.inside then x.room else 0 end
    from unnest(beside_mates.rooms, names) with ordinality as x(room, name, n) order by x.n);
end $$;
comment on function gangq.beside_mates is
  'Internal. These rooms, but only in the domains of a level where one of these incarnations is, or only in the others.';

-- A whole gang: within one domain of the level it requires or prefers, from the tightest domain of the narrowest level up.
create function gangq.seat_gang(
  b gangq.board, kind integer, counts integer[], slots integer[], memory bigint[], mcpus bigint[], held bigint[],
  kept_slots integer[], kept_memory bigint[], kept_mcpus bigint[], kept_gpus integer[], mates jsonb default null
) returns integer[] language plpgsql immutable as $$
#variable_conflict use_column
declare
  n integer := cardinality(b.worker_host);
  first_role integer := b.kind_first_role[seat_gang.kind];
  rooms integer[] := '{}';
  mine integer[];
  level integer := greatest(b.kind_prefer[seat_gang.kind], b.kind_require[seat_gang.kind]);
  domains text[];
  domain text;
  got integer[];
  apart integer[];
  together integer;
begin
  apart := array(select x.host from unnest(b.apart_keys, b.apart_hosts) as x(key, host) where x.key = b.kind_apart[seat_gang.kind]);
  for role in 1 .. cardinality(seat_gang.counts) loop
    mine := gangq.rooms(b, b.role_shape[first_role + role - 1], slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus);
    if apart <> '{}' then
      mine := array(select case when x.host = any (apart) then 0 else x.room end from unnest(mine, b.worker_host) with ordinality as x(room, host, n) order by x.n);
    end if;
    if mates is not null then
      -- Replacements of single members: beside the others, where the gang or the role has to be together or apart.
      together := greatest(b.role_require[first_role + role - 1], case b.role_strategy[first_role + role - 1] when 'strict_pack' then array_position(b.levels, 'host') else 0 end);
      mine := gangq.beside_mates(b, mine, b.kind_require[seat_gang.kind], array(select w.value from jsonb_array_elements(mates) as r, jsonb_array_elements_text(r.value) as w)::bigint[], true);
      mine := gangq.beside_mates(b, mine, together, array(select w.value from jsonb_array_elements_text(mates -> (role - 1)) as w)::bigint[], true);
      if b.role_strategy[first_role + role - 1] = 'strict_spread' then
        mine := gangq.beside_mates(b, mine, array_position(b.levels, 'host'), array(select w.value from jsonb_array_elements_text(mates -> (role - 1)) as w)::bigint[], false);
      end if;
    end if;
    if (select coalesce(sum(m), 0) from unnest(mine) as m) < seat_gang.counts[role] then
      return null;
    end if;
    rooms := rooms || mine;
  end loop;
  while level > 0 and level >= b.kind_require[seat_gang.kind] loop
    domains := gangq.domain_of(b, level, b.kind_require[seat_gang.kind]);
    for domain in select d from gangq.roomy_domains(domains, rooms, seat_gang.counts) as d loop
      got := gangq.seat_roles(b, kind, counts, rooms, slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus,
        array(select coalesce(x.name = domain, false) from unnest(domains) with ordinality as x(name, n) order by x.n));
      if got is not null then
        return got;
      end if;
    end loop;
    level := level - 1;
  end loop;
  if b.kind_require[seat_gang.kind] > 0 then
    return null;
  end if;
  return gangq.seat_roles(b, kind, counts, rooms, slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus);
end $$;
comment on function gangq.seat_gang is
  'Internal. The worker of each member of a gang of this kind, ranks in order, or null. counts: members of each role. mates: of '
  'a gang that runs the incarnations of the others, by role.';
