-- What could never be placed: infeasible says it of jobs of one shape, kind_infeasible of a kind of
-- gang, check_limits of the limits of a queue. submit refuses such work, explain and time_out name
-- the reason. Each check overestimates capacity: what it calls infeasible can never run.
-- offers lists the workers for a shape. kind_infeasible asks infeasible for each role alone, then
-- kind_room for all roles together. Takes no locks.

-- Internal. Workers that serve the queue and task of a shape, free or not, at most so many. known:
-- also ended ones.
create function gangq.offers(s gangq.shapes, known boolean, most integer default null)
returns table (
  worker gangq.incarnations,
  able boolean,  -- labels, selector and taints let the job run there
  gpus bigint,  -- devices that the job does not avoid
  vram_mb integer,  -- the most that one of them has
  enough bigint  -- how many of them have the memory that it asks for
) language sql stable as $$
  select w.i, a.able, d.gpus, d.vram_mb, d.enough
  from (
    select i
    from gangq.fleet(offers.known) i
    where s.queue = any (i.queues) and (i.tasks is null or s.task = any (i.tasks))
    limit offers.most) w
  -- known: an operator may take off the taints that operators have set.
  cross join lateral (
    select gangq.serves(w.i, s) or offers.known and (w.i).operator_taints <> '{}'
      and s.labels <@ (w.i).labels as able
    offset 0) a
  cross join lateral (
    select count(*) as gpus, max(r.vram_mb) as vram_mb,
      count(*) filter (where r.vram_mb >= s.vram_mb) as enough
    from gangq.devices_of((w.i).id, (w.i).ended_at is not null) r
    where s.gpus > 0 and (s.avoid is null or r.id <> all (s.avoid))) d
$$;

-- Internal, for infeasible. Why no worker may run this shape. serving: how many serve its queue and
-- task; labelled: how many of them carry its labels.
create function gangq.unable(s gangq.shapes, serving bigint, labelled bigint, known boolean)
returns text language plpgsql stable as $$
begin
  if serving = 0 and known then
    return format('no worker known of queue %s, ended ones included, runs task %s; they run %s',
      s.queue, s.task, (
        select left(string_agg(distinct t.task, ', ' order by t.task), 300)
        from gangq.fleet(true) i cross join lateral unnest(i.tasks) as t(task)
        where s.queue = any (i.queues)));
  elsif serving = 0 then
    return format('no registered worker serves queue %s with task %s', s.queue, s.task);
  elsif labelled = 0 then
    return format('none of %s of queue %s carries labels %s',
      gangq.counted(serving, 'worker'), s.queue, gangq.labels_text(s.labels));
  end if;
  return format('none of %s of queue %s%s %s', gangq.counted(labelled, 'worker'), s.queue,
    case when s.labels <> '{}' then ' with labels ' || gangq.labels_text(s.labels) else '' end,
    case when s.selector is null then 'is free of taints, and it tolerates '
        || coalesce(array_to_string(s.tolerates, ', '), 'none')
      else format('meets the selector %s with taints it tolerates',
        gangq.selector_text(s.selector)) end);
end $$;

-- Internal. Why the registered workers could never hold so many members of this shape; null: they
-- could. known: the same for all known workers; null also when none of its queue is known.
create function gangq.infeasible(shape_id integer, size integer, known boolean default false)
returns text language plpgsql stable as $$
declare
  s gangq.shapes;
  n record;
begin
  select x.* into s from gangq.shapes x where x.id = infeasible.shape_id;
  -- Nearly every job fits on the first ten workers, and then it fits on all of them.
  if (
    select sum(gangq.room(
        s, (o.worker).slots, (o.worker).memory_mb, (o.worker).cpus, o.enough)) >= size
    from gangq.offers(s, false, 10) o where o.able) then
    return null;
  end if;
  select count(*) as serving, count(*) filter (where s.labels <@ w.labels) as labelled,
    count(*) filter (where o.able) as able,
    coalesce(sum(w.slots) filter (where o.able), 0) as slots,
    coalesce(sum(gangq.room(s, w.slots, w.memory_mb, w.cpus, o.enough)) filter (where o.able), 0)
      as room,
    -- The room if slots were unlimited.
    coalesce(sum(gangq.room(s, infeasible.size, w.memory_mb, w.cpus, o.enough))
      filter (where o.able), 0) as bare,
    coalesce(max(o.gpus) filter (where o.able), 0) as gpus,
    coalesce(max(o.vram_mb) filter (where o.able), 0) as vram_mb,
    max(w.memory_mb) filter (where o.able) as memory_mb, max(w.cpus) filter (where o.able) as cpus
  into n
  from gangq.offers(s, infeasible.known) o
  cross join lateral (
    select (o.worker).labels, (o.worker).memory_mb, (o.worker).cpus,
      -- A single job that asks for nothing is light in most queues.
      greatest((o.worker).slots,
        case when s.plain and infeasible.size = 1 then (o.worker).light end) as slots) w;
  if n.room >= size or (infeasible.known and not gangq.known_workers(s.queue)) then
    return null;
  elsif n.able = 0 then
    return gangq.unable(s, n.serving, n.labelled, infeasible.known);
  end if;
  return format(
      'the %s of queue %s could hold %s of %s even when idle (each needs %s of %s MiB, %s MiB '
      'memory, %s; the largest worker offers %s of %s MiB, %s MiB, %s)',
      gangq.counted(n.able, case when infeasible.known then 'known worker' else 'worker' end),
      s.queue || case when infeasible.known then ', ended ones included,' else '' end, n.room,
      gangq.counted(size, 'member'), gangq.counted(s.gpus, 'GPU'), s.vram_mb, s.memory_mb,
      gangq.counted(s.cpus, 'CPU'), gangq.counted(n.gpus, 'GPU'), n.vram_mb, n.memory_mb,
      gangq.counted(n.cpus, 'CPU'))
    || case when n.bare > n.room
      then format('; slots are short: %s in all, and each job takes one (gangq worker --slots)',
        gangq.counted(n.slots, 'slot')) else '' end;
end $$;

-- 1. hosts, inner_domains: how many members of each role a host and a domain of the role hold.
-- 2. by_role: of each domain of the gang, how many of each role find room there.
-- 3. together: what the roles lack in a domain, although each of them would fit alone. A worker
--    counts once there, with the devices of the role that may use most of them (distinct on).
--
-- Example: a driver that needs 1 GPU and two workers that need 2 each, in one rack. Rack a has a
-- host of 4 GPUs and 4 slots. By role: driver 1 of 1, worker 2 of 2. Together: 4 of 5 GPUs. So rack
-- a does not fit, and that is what is said of it.
--
-- Internal. The best domain of the level that a kind of gang requires; without a level all workers
-- are one domain. fits: when it is idle, all roles find room for their minimum. has: for how many.
-- seen: each role has a worker somewhere.
create function gangq.kind_room(kind_id integer, known boolean, most integer default null)
returns table (domain text, fits boolean, seen boolean, has text) language sql stable as $$
  with roles as materialized (
    select r.*, s
    from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id
    where r.kind_id = kind_room.kind_id
  ),
  -- For each role the workers that could run it, with their domains of the levels that the gang
  -- (domain) and the role (inner_domain) require.
  offers as materialized (
    select r.ordinal, r.strategy, i.id, i.host, i.slots, i.memory_mb, i.cpus, o.gpus,
      gangq.domain_of(o.worker, k.require) as domain,
      gangq.domain_of(o.worker, r.require) as inner_domain,
      gangq.room(r.s, i.slots, i.memory_mb, i.cpus, o.enough) as room
    from roles r
    join gangq.gang_kinds k on k.id = r.kind_id
    cross join lateral gangq.offers(r.s, kind_room.known, kind_room.most) o
    cross join lateral (select (o.worker).*) i
    where o.able
  ),
  hosts as (
    select o.ordinal, o.strategy, o.domain, o.inner_domain, sum(o.room) as room
    from offers o
    where o.domain is not null and o.inner_domain is not null
    group by o.ordinal, o.strategy, o.domain, o.inner_domain, o.host
  ),
  inner_domains as (
    select h.ordinal, h.domain, case h.strategy
        when 'strict_pack' then max(h.room)
        when 'strict_spread' then count(*) filter (where h.room > 0)
        else sum(h.room) end as room
    from hosts h
    group by h.ordinal, h.strategy, h.domain, h.inner_domain
  ),
  by_role as (
    select d.domain, r.ordinal, r.name, r.min_members as wanted, r.strategy, r.require,
      least(r.min_members, coalesce((
        select max(x.room)
        from inner_domains x where x.domain = d.domain and x.ordinal = r.ordinal), 0)) as room
    from (select distinct o.domain from offers o where o.domain is not null) d
    cross join roles r
  ),
  together as (
    select w.domain, string_agg(format('%s of %s %s', n.have, n.asked, n.what), ', ' order by n.n)
      as short
    from (
      select x.domain, sum(x.slots) as slots, sum(x.gpus) as gpus, sum(x.memory_mb) as memory_mb,
        sum(x.cpus) as cpus
      from (select distinct on (o.id) o.* from offers o order by o.id, o.gpus desc) x
      group by x.domain) w
    cross join (
      select sum(r.min_members) as slots, sum(r.min_members * (r.s).gpus::bigint) as gpus,
        sum(r.min_members * (r.s).memory_mb) as memory_mb, sum(r.min_members * (r.s).cpus) as cpus
      from roles r) a
    cross join lateral (values (1, w.slots, a.slots, 'slots'), (2, w.gpus, a.gpus, 'GPUs'),
      (3, w.memory_mb, a.memory_mb, 'MiB'), (4, w.cpus, a.cpus, 'CPUs')) as n(n, have, asked, what)
    where n.have < n.asked
    group by w.domain
  )
  select b.domain, bool_and(b.room >= b.wanted) and t.short is null,
    (select count(distinct h.ordinal) from hosts h) = count(*),
    string_agg(format('%s of %s %s%s%s', b.room, b.wanted, b.name, case b.strategy
        when 'strict_pack' then ' on one host'
        when 'strict_spread' then ' on a host each'
        else '' end, ' in one ' || b.require), ', ' order by b.ordinal)
      || coalesce('; together ' || t.short, '')
  from by_role b left join together t on t.domain = b.domain
  group by b.domain, t.short
  order by 2 desc, sum(b.room) desc, b.domain limit 1
$$;

-- Internal. Why the registered (or known) workers could never hold the minimum of this kind of
-- gang; null: they could, as far as is checked: each role alone, then all roles by their sums.
create function gangq.kind_infeasible(kind_id integer, known boolean default false) returns text
language plpgsql stable as $$
declare
  best record;
  why text;
begin
  -- Nearly every gang fits on a hundred workers, and then it fits on all of them.
  if (select r.fits from gangq.kind_room(kind_infeasible.kind_id, false, 100) r) then
    return null;
  end if;
  select case when r.roles > 1 then format('role %s: ', r.name) else '' end || w.why into why
  from (
    select x.*, count(*) over () as roles
    from gangq.kind_roles x where x.kind_id = kind_infeasible.kind_id) r
  cross join lateral (
    select gangq.infeasible(r.shape_id, r.min_members, kind_infeasible.known) as why
    offset 0) w
  where w.why is not null
  order by r.ordinal limit 1;
  if found then
    return why;
  end if;
  select r.* into best from gangq.kind_room(kind_infeasible.kind_id, kind_infeasible.known) r;
  -- Where no known worker could run a role, such hardware may still be on its way.
  if best.fits or (kind_infeasible.known and best.seen is not true) then
    return null;
  end if;
  return (select format('%s could never hold it even when idle: %s%s',
    case when kind_infeasible.known then 'all workers known, ended ones included,'
      else 'the workers registered now' end,
    case
      when best.domain is null then 'none has a label ' || k.require
      when k.require is null then 'room for '
      else format('the best %s, %s, has room for ', k.require, best.domain) end,
    best.has) from gangq.gang_kinds k where k.id = kind_infeasible.kind_id);
end $$;

-- Internal. Raises GQ001 for work that alone exceeds a limit of its queue path, of its limit key,
-- or a rate, and so could never run.
create function gangq.check_limits(
  queue text, key text, gangs integer, members bigint, gpus bigint, memory_mb bigint, cpus numeric
) returns void language plpgsql stable set enable_seqscan = off as $$
begin
  perform gangq.refuse('GQ001', x.what,
    'Ask for less (an elastic gang counts with its minimum), or for another queue or key; an '
    'administrator can raise the limit: gangq queue set, gangq limit set.')
  from (
    select format('it needs %s %s at once, and the %s of %s is %s', trim_scale(a.asked),
      l.resource, l.setting, gangq.limited_by(l.queue, l.key), l.most) as what
    from gangq.limits_of(check_limits.queue, check_limits.key) l
    cross join lateral gangq.amount_of(l.resource, check_limits.gangs, check_limits.members,
      check_limits.gpus, check_limits.memory_mb, check_limits.cpus) as a(asked)
    -- With a limit of 0 an operator shuts a queue or a key for a while.
    where a.asked > l.most and not (l.gate in ('running_limit', 'limit_key') and l.most = 0)
    order by length(l.queue) desc nulls last limit 1) x;
  perform gangq.refuse('GQ001',
    format('it starts %s at once, and the rate of %s is %s', gangq.counted(members, 'job'),
      gangq.limited_by(r.queue, r.key), r.rate),
    'Ask for fewer members (an elastic gang counts with its minimum), or for a higher rate.')
  from gangq.rates_on(check_limits.queue, check_limits.key) r
  where check_limits.members > (gangq.rate_of(r.rate)).starts;
end $$;
