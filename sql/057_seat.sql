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
comment on function gangq.rooms(gangq.board, integer, integer[], bigint[], bigint[], bigint[], integer[], bigint[], bigint[], integer[]) is
  'Internal. How many members of a shape each worker has room for; devices are whole, and one it avoids is none.';

-- The packing rules. hosts and rooms are aligned with the workers; regions, if any, name the broader domain each lies in.
-- pack takes the largest hosts, but the last one is the tightest that still holds the rest, so that a small gang does not
-- break up a large host. Ranks are contiguous per region, host and worker, the host that is not filled comes last.
create function gangq.seat_role(
  size integer, strategy text, balanced boolean, hosts integer[], rooms integer[], regions text[] default null
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
  return (
    select array_agg(s.worker order by s.region_last, s.region_takes desc, s.region, s.host_last, s.host_takes desc, s.host, s.room desc, s.worker)
    from (
      select w.worker, w.room, w.host, w.take as host_takes, w.last as host_last, w.region,
        sum(w.seats) over (partition by w.region) as region_takes, bool_or(w.last) over (partition by w.region) as region_last,
        w.seats
      from (
        select x.worker, x.room, h.host, h.take, h.nth is not distinct from last as last, x.region,
          -- The host's share, taken from its roomiest workers first.
          least(x.room, h.take - least(h.take, coalesce(sum(x.room) over (partition by h.host order by x.room desc, x.worker rows between unbounded preceding and 1 preceding), 0)))::integer as seats
        from unnest(host_ids, takes) with ordinality as h(host, take, nth)
        join (
          select y.n as worker, y.host, y.room, case when regions is not null then regions[y.n] end as region
          from unnest(hosts, rooms) with ordinality as y(host, room, n) where y.room > 0) x on x.host = h.host
        where h.take > 0) w
      where w.seats > 0) s
    cross join lateral generate_series(1, s.seats));
end $$;
comment on function gangq.seat_role(integer, text, boolean, integer[], integer[], text[]) is
  'Internal. The worker of each member of one role, in rank order, or null when the rooms do not hold them.';

-- Domains of one level, the tightest first: those with too little room for what is asked are left out.
create function gangq.domains(b gangq.board, level integer, rooms integer[], counts integer[], most integer default 64)
returns setof boolean[] language sql immutable as $$
  select array_agg(d.inside order by d.n)
  from (
    select p.path, p.room, w.n, coalesce(case b.levels[level] when 'host' then b.hosts[b.worker_host[w.n]] else b.worker_domains[(w.n - 1) * cardinality(b.levels) + level] end = p.path, false) as inside
    from (
      select z.path, min(z.spare) as spare, sum(z.room) as room
      from (
        select y.path, y.role, sum(y.room) - counts[y.role] as spare, sum(y.room) as room
        from (
          select case b.levels[level] when 'host' then b.hosts[b.worker_host[x.n]] else b.worker_domains[(x.n - 1) * cardinality(b.levels) + level] end as path,
            r.role, rooms[(r.role - 1) * cardinality(b.worker_host) + x.n] as room
          from generate_series(1, cardinality(b.worker_host)) as x(n) cross join generate_series(1, cardinality(counts)) as r(role)) y
        where y.path is not null
        group by y.path, y.role) z
      group by z.path having min(z.spare) >= 0
      order by sum(z.room), z.path limit most) p
    cross join generate_series(1, cardinality(b.worker_host)) as w(n)) d
  group by d.path, d.room order by d.room, d.path
$$;
comment on function gangq.domains(gangq.board, integer, integer[], integer[], integer) is
  'Internal. For each domain of a topology level that has room: which workers lie in it. counts: members of each role.';

-- Roles one after another, the scarcest first; what one takes the next does not see. When that fails, other orders.
create function gangq.seat_roles(
  b gangq.board, kind integer, counts integer[], rooms integer[], slots integer[], memory bigint[], mcpus bigint[], held bigint[],
  kept_slots integer[], kept_memory bigint[], kept_mcpus bigint[], kept_gpus integer[], inside boolean[] default null
) returns integer[] language plpgsql immutable as $$
#variable_conflict use_column
declare
  n integer := cardinality(b.worker_host);
  roles integer := cardinality(seat_roles.counts);
  first_role integer := b.kind_first_role[seat_roles.kind];
  orders jsonb;
  turn jsonb;
  role integer;
  shape integer;
  mine integer[];
  masked integer[];
  got integer[];
  seats jsonb;
  level integer;
  mask boolean[];
  regions text[];
  left_slots integer[];
  left_memory bigint[];
  left_mcpus bigint[];
  left_held bigint[];
  w integer;
  taken integer;
begin
  if cardinality(b.levels) > 1 and b.levels[1] <> 'host' then
    regions := array(select coalesce(b.worker_domains[(x - 1) * cardinality(b.levels) + array_position(b.levels, 'host') - 1], '') from generate_series(1, n) as x);
  end if;
  if roles = 1 then
    orders := '[[1]]';
  else
    -- Scarcest first, then its reverse, then all others, 24 at most.
    select jsonb_agg(o.way order by o.rating, o.way) into orders
    from (
      with recursive scarce as (
        select r.role, row_number() over (order by sum(case when seat_roles.inside[x.n] is false then 0 else seat_roles.rooms[(r.role - 1) * n + x.n] end)::numeric / greatest(seat_roles.counts[r.role], 1), r.role) as rk
        from generate_series(1, roles) as r(role) cross join generate_series(1, n) as x(n) group by r.role
      ),
      ways(way, ranks) as (
        select jsonb_build_array(s.role), array[s.rk] from scarce s
        union all
        select v.way || to_jsonb(s.role), v.ranks || s.rk from ways v join scarce s on s.rk <> all (v.ranks) and roles <= 4
      )
      select v.way, case when v.ranks = array(select generate_series(1, roles)::bigint) then 0 else 1 end as rating
      from ways v where cardinality(v.ranks) = roles
      union all
      select (select jsonb_agg(s.role order by s.rk) from scarce s), 0 where roles > 4
      union all
      select (select jsonb_agg(s.role order by s.rk desc) from scarce s), 1 where roles > 4
      order by 2, 1 limit 24) o;
  end if;
  <<tries>>
  for turn in select o.value from jsonb_array_elements(orders) as o loop
    left_slots := seat_roles.slots;
    left_memory := seat_roles.memory;
    left_mcpus := seat_roles.mcpus;
    left_held := seat_roles.held;
    seats := '{}';
    for role in select v.value::integer from jsonb_array_elements_text(turn) with ordinality as v(value, n) order by v.n loop
      shape := b.role_shape[first_role + role - 1];
      mine := case when seats = '{}' then seat_roles.rooms[(role - 1) * n + 1 : role * n]
        else gangq.rooms(b, shape, left_slots, left_memory, left_mcpus, left_held, kept_slots, kept_memory, kept_mcpus, kept_gpus) end;
      if seat_roles.inside is not null then
        mine := array(select case when x.inside then x.room else 0 end from unnest(mine, seat_roles.inside) with ordinality as x(room, inside, n) order by x.n);
      end if;
      got := null;
      level := greatest(b.role_prefer[first_role + role - 1], b.role_require[first_role + role - 1]);
      while got is null and level > 0 and level >= b.role_require[first_role + role - 1] loop
        for mask in select d from gangq.domains(b, level, mine, array[seat_roles.counts[role]]) as d loop
          masked := array(select case when x.inside then x.room else 0 end from unnest(mine, mask) with ordinality as x(room, inside, n) order by x.n);
          got := gangq.seat_role(seat_roles.counts[role], b.role_strategy[first_role + role - 1], b.role_balanced[first_role + role - 1], b.worker_host, masked, regions);
          exit when got is not null;
        end loop;
        level := level - 1;
      end loop;
      if got is null and b.role_require[first_role + role - 1] = 0 then
        got := gangq.seat_role(seat_roles.counts[role], b.role_strategy[first_role + role - 1], b.role_balanced[first_role + role - 1], b.worker_host, mine, regions);
      end if;
      continue tries when got is null;
      seats := seats || jsonb_build_object(role::text, to_jsonb(got));
      if roles > 1 then
        foreach w in array got loop
          left_slots[w] := left_slots[w] - 1;
          left_memory[w] := left_memory[w] - b.shape_memory[shape];
          left_mcpus[w] := left_mcpus[w] - b.shape_mcpus[shape];
          taken := 0;
          for d in b.device_first[w] .. b.device_first[w + 1] - 1 loop
            exit when taken >= b.shape_gpus[shape];
            if left_held[d] = 0 and b.device_vram[d] >= b.shape_vram[shape]
              and (b.shape_avoid[shape] is null or not b.shape_avoid[shape] @> to_jsonb(b.device_ids[d])) then
              left_held[d] := -1;
              taken := taken + 1;
            end if;
          end loop;
        end loop;
      end if;
    end loop;
    return array(
      select e.value::integer from generate_series(1, roles) as r(role)
      cross join lateral jsonb_array_elements_text(seats -> r.role::text) with ordinality as e(value, n) order by r.role, e.n);
  end loop;
  return null;
end $$;
comment on function gangq.seat_roles(gangq.board, integer, integer[], integer[], integer[], bigint[], bigint[], bigint[], integer[], bigint[], bigint[], integer[], boolean[]) is
  'Internal. The worker of each member, roles in order, within one set of workers (inside), or null. rooms: of each role, flat.';

-- A whole gang: within one domain of the level it requires or prefers, from the tightest domain of the narrowest level up.
create function gangq.seat_gang(
  b gangq.board, kind integer, counts integer[], slots integer[], memory bigint[], mcpus bigint[], held bigint[],
  kept_slots integer[], kept_memory bigint[], kept_mcpus bigint[], kept_gpus integer[], anchor bigint default null
) returns integer[] language plpgsql immutable as $$
#variable_conflict use_column
declare
  n integer := cardinality(b.worker_host);
  first_role integer := b.kind_first_role[seat_gang.kind];
  rooms integer[] := '{}';
  mine integer[];
  level integer := greatest(b.kind_prefer[seat_gang.kind], b.kind_require[seat_gang.kind]);
  mask boolean[];
  there boolean[];
  got integer[];
  apart integer[];
begin
  apart := array(select x.host from unnest(b.apart_keys, b.apart_hosts) as x(key, host) where x.key = b.kind_apart[seat_gang.kind]);
  for role in 1 .. cardinality(seat_gang.counts) loop
    mine := gangq.rooms(b, b.role_shape[first_role + role - 1], slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus);
    if apart <> '{}' then
      mine := array(select case when x.host = any (apart) then 0 else x.room end from unnest(mine, b.worker_host) with ordinality as x(room, host, n) order by x.n);
    end if;
    if (select coalesce(sum(m), 0) from unnest(mine) as m) < seat_gang.counts[role] then
      return null;
    end if;
    rooms := rooms || mine;
  end loop;
  while level > 0 and level >= b.kind_require[seat_gang.kind] loop
    for mask in select d from gangq.domains(b, level, rooms, seat_gang.counts) as d loop
      -- Replacements of single members go where the others are.
      continue when seat_gang.anchor is not null and mask[seat_gang.anchor] is not true;
      got := gangq.seat_roles(b, kind, counts, rooms, slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus, mask);
      if got is not null then
        return got;
      end if;
    end loop;
    level := level - 1;
  end loop;
  if b.kind_require[seat_gang.kind] > 0 then
    return null;
  end if;
  if apart <> '{}' then
    there := array(select x.host <> all (apart) from unnest(b.worker_host) with ordinality as x(host, n) order by x.n);
  end if;
  return gangq.seat_roles(b, kind, counts, rooms, slots, memory, mcpus, held, kept_slots, kept_memory, kept_mcpus, kept_gpus, there);
end $$;
comment on function gangq.seat_gang(gangq.board, integer, integer[], integer[], bigint[], bigint[], bigint[], integer[], bigint[], bigint[], integer[], bigint) is
  'Internal. The worker of each member of a gang of this kind, ranks in order, or null. counts: members of each role. anchor: '
  'a worker whose domain it has to share.';
