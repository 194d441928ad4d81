-- What could never be placed: not by the workers there are, not by any known, or not within the limits of its queue.
-- Only what must be false is called infeasible: each check counts at least what is there.
-- Takes no locks.

create function gangq.infeasible(shape_id integer, size integer, known boolean default false) returns text language plpgsql stable as $$
#variable_conflict use_column
declare
  s gangq.shapes;
  n record;
  best record;
  whose text;
begin
  select x.* into s from gangq.shapes x where x.id = infeasible.shape_id;
  select count(*) as serving, count(*) filter (where s.labels <@ i.labels) as labelled, count(*) filter (where v.able) as able,
    coalesce(sum(least(v.slots,
      case when s.memory_mb > 0 then i.memory_mb / s.memory_mb else v.slots end,
      case when s.cpus > 0 then floor(i.cpus / s.cpus) else v.slots end,
      case when s.gpus > 0 then d.enough / s.gpus else v.slots end)) filter (where v.able), 0) as room,
    coalesce(sum(v.slots) filter (where v.able), 0) as slots,
    -- What there would be room for if each worker had as many slots as it likes.
    coalesce(sum(least(infeasible.size,
      case when s.memory_mb > 0 then i.memory_mb / s.memory_mb else infeasible.size end,
      case when s.cpus > 0 then floor(i.cpus / s.cpus) else infeasible.size end,
      case when s.gpus > 0 then d.enough / s.gpus else infeasible.size end)) filter (where v.able), 0) as bare
  into n
  from gangq.fleet(infeasible.known) i
  -- An operator's taint is not for ever.
  -- A single job that asks for nothing is light in most queues.
  cross join lateral (
    select gangq.serves(i, s) or (infeasible.known and i.operator_taints <> '{}' and s.labels <@ i.labels) as able,
      case when s.plain and infeasible.size = 1 then greatest(i.slots, i.light) else i.slots end as slots) v
  cross join lateral (
    select count(*) as enough from gangq.devices_of(i.id, i.ended_at is not null) r
    where s.gpus > 0 and r.vram_mb >= s.vram_mb and (s.avoid is null or r.id <> all (s.avoid))) d
  where s.queue = any (i.queues) and (i.tasks is null or s.task = any (i.tasks));
  if n.room >= size or (infeasible.known and not gangq.known_workers(s.queue)) then
    return null;
  end if;
  if n.serving = 0 and infeasible.known then
    return format('no worker known of queue %s, ended ones included, runs task %s; they run %s', s.queue, s.task, (
      select left(string_agg(distinct t.task, ', ' order by t.task), 300)
      from gangq.fleet(true) i cross join lateral unnest(i.tasks) as t(task) where s.queue = any (i.queues)));
  end if;
  if n.serving = 0 then
    return format('no registered worker serves queue %s with task %s', s.queue, s.task);
  end if;
  if n.labelled = 0 then
    return format('none of %s of queue %s carries labels %s', gangq.counted(n.serving, 'worker'), s.queue, s.labels);
  end if;
  if n.able = 0 then
    return format('none of %s of queue %s%s %s', gangq.counted(n.labelled, 'worker'), s.queue,
      case when s.labels <> '{}' then ' with labels ' || s.labels::text else '' end,
      case when s.selector is null then 'is free of taints, and it tolerates ' || coalesce(array_to_string(s.tolerates, ', '), 'none')
        else format('meets the selector %s with taints it tolerates', s.selector) end);
  end if;
  select max(w.devices) as devices, max(w.vram_mb) as vram_mb, max(w.memory_mb) as memory_mb, max(w.cpus) as cpus
  into best from (
    select d.devices, d.vram_mb, i.memory_mb, i.cpus
    from gangq.fleet(infeasible.known) i
    cross join lateral (
      select count(r.id) as devices, max(r.vram_mb) as vram_mb from gangq.devices_of(i.id, i.ended_at is not null) r
      where s.avoid is null or r.id <> all (s.avoid)) d
    where gangq.serves(i, s)) w;
  whose := format(case when not infeasible.known then 'the %s of queue %s' when n.able = 1 then 'the %s known that serves queue %s, ended ones included,'
    else 'all %s known that serve queue %s, ended ones included,' end, gangq.counted(n.able, 'worker'), s.queue);
  return format(
    '%s could hold %s of %s even when idle (each needs %s of %s MiB, %s MiB memory, %s; the largest worker offers %s of %s MiB, %s MiB, %s)',
    whose, n.room, gangq.counted(size, 'member'), gangq.counted(s.gpus, 'GPU'), s.vram_mb, s.memory_mb, gangq.counted(s.cpus, 'CPU'),
    gangq.counted(best.devices, 'GPU'), coalesce(best.vram_mb, 0), best.memory_mb, gangq.counted(best.cpus, 'CPU'))
    || case when n.bare > n.room then format('; slots are short: %s in all, and each job takes one (gangq worker --slots)',
      gangq.counted(n.slots, 'slot')) else '' end;
end $$;
comment on function gangq.infeasible is
  'Internal. Why the workers registered now could never hold this many members of this shape, or null when they could. '
  'known: the same of all workers known, ended ones included; null also when none of its queue is known.';

-- Nearly every gang fits into a corner of the fleet: a place found there settles it without counting the rest.
create function gangq.fits_at_once(kind_id integer) returns boolean language plpgsql stable as $$
#variable_conflict use_column
declare
  o record;
  worker bigint := 0;
  slots integer;
  devices bigint;
  memory_mb bigint;
  cpus numeric;
  wanted integer[];
  hosts text[] := '{}';
  n bigint;
begin
  if exists (
    select 1 from gangq.gang_kinds k join gangq.kind_roles r on r.kind_id = k.id
    where k.id = fits_at_once.kind_id and (k.require is not null or r.require is not null)) then
    return false;
  end if;
  wanted := array(select r.min_members from gangq.kind_roles r where r.kind_id = fits_at_once.kind_id order by r.ordinal);
  for o in
    select i.id, i.host, i.slots, i.memory_mb, i.cpus, r.ordinal, r.strategy, s.gpus, s.memory_mb as needs_mb, s.cpus as needs_cpus, d.enough
    from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id
    cross join (
      select f.* from gangq.fleet(false) f
      where (select k.queue from gangq.gang_kinds k where k.id = fits_at_once.kind_id) = any (f.queues) limit 100) i
    cross join lateral (
      select count(*) as enough from gangq.devices_of(i.id, false) x
      where s.gpus > 0 and x.vram_mb >= s.vram_mb and (s.avoid is null or x.id <> all (s.avoid))) d
    where r.kind_id = fits_at_once.kind_id and gangq.serves(i, s)
    order by i.id, r.ordinal
  loop
    if o.id <> worker then
      worker := o.id; slots := o.slots; devices := 0; memory_mb := o.memory_mb; cpus := o.cpus;
    end if;
    continue when o.strategy = 'strict_spread' and o.ordinal || ' ' || o.host = any (hosts);
    n := greatest(0, least(wanted[o.ordinal], slots,
      case when o.strategy = 'strict_spread' then 1 else slots end,
      case when o.gpus > 0 then (o.enough - devices) / o.gpus else slots end,
      case when o.needs_mb > 0 then memory_mb / o.needs_mb else slots end,
      case when o.needs_cpus > 0 then floor(cpus / o.needs_cpus)::bigint else slots end));
    continue when n = 0 or (o.strategy = 'strict_pack' and n < wanted[o.ordinal]);
    if o.strategy = 'strict_spread' then
      hosts := hosts || (o.ordinal || ' ' || o.host);
    end if;
    slots := slots - n; devices := devices + n * o.gpus; memory_mb := memory_mb - n * o.needs_mb; cpus := cpus - n * o.needs_cpus;
    wanted[o.ordinal] := wanted[o.ordinal] - n;
    if 0 = all (wanted) then
      return true;
    end if;
  end loop;
  return false;
end $$;
comment on function gangq.fits_at_once is
  'Internal. Whether the minimum of this kind of gang finds its place, one after the other, on the first 100 workers of its '
  'queue if they are idle. False says nothing.';

create function gangq.kind_infeasible(kind_id integer, known boolean default false) returns text language plpgsql stable as $$
#variable_conflict use_column
declare
  k gangq.gang_kinds;
  roles integer;
  why text;
  best record;
begin
  if gangq.fits_at_once(kind_infeasible.kind_id) then
    return null;
  end if;
  select x.* into k from gangq.gang_kinds x where x.id = kind_infeasible.kind_id;
  select count(*) into roles from gangq.kind_roles r where r.kind_id = k.id;
  for why in
    select case when roles > 1 then format('role %s: ', r.name) else '' end || w.why
    from gangq.kind_roles r cross join lateral (select gangq.infeasible(r.shape_id, r.min_members, kind_infeasible.known) as why offset 0) w
    where r.kind_id = k.id order by r.ordinal
  loop
    if why is not null then
      return why;
    end if;
  end loop;
  if roles = 1 and k.require is null and not exists (
    select 1 from gangq.kind_roles r where r.kind_id = k.id and (r.require is not null or r.strategy in ('strict_pack', 'strict_spread'))) then
    return null;
  end if;
  -- Hardware that has never been seen is no hardware that is too small.
  if kind_infeasible.known and exists (
    select 1 from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id
    where r.kind_id = k.id and not exists (
      select 1 from gangq.fleet(true) i
      where gangq.serves(i, s) and (k.require is null or k.require = 'host' or i.labels ? k.require)
        and (r.require is null or r.require = 'host' or i.labels ? r.require))) then
    return null;
  end if;
  -- Each domain of the level that the whole gang must share, or all workers as one: whether every role has its room in
  -- it, and whether all of them together have.
  with workers as materialized (
    select i as row, i.id, i.host, i.labels, i.slots, i.memory_mb, i.cpus, d.gpus
    from gangq.fleet(kind_infeasible.known) i
    cross join lateral (select count(*) as gpus from gangq.devices_of(i.id, i.ended_at is not null)) d
    where k.queue = any (i.queues)
  ),
  offers as (
    select r.ordinal, i.id, i.host, i.slots, i.memory_mb, i.cpus, i.gpus, v.able,
      case k.require when 'host' then i.host else coalesce(i.labels ->> k.require, case when k.require is null then '' end) end as domain,
      case r.require when 'host' then i.host else coalesce(i.labels ->> r.require, case when r.require is null then '' end) end as inner_domain,
      case when v.able then least(i.slots,
        case when s.memory_mb > 0 then i.memory_mb / s.memory_mb else i.slots end,
        case when s.cpus > 0 then floor(i.cpus / s.cpus) else i.slots end,
        case when s.gpus > 0 then d.enough / s.gpus else i.slots end) else 0 end as room
    from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id
    cross join workers i
    cross join lateral (select gangq.serves(i.row, s) as able offset 0) v
    cross join lateral (
      select case when s.gpus = 0 or (s.vram_mb = 0 and s.avoid is null) then i.gpus else (
        select count(*) from gangq.devices_of(i.id, (i.row).ended_at is not null) x
        where v.able and x.vram_mb >= s.vram_mb and (s.avoid is null or x.id <> all (s.avoid))) end as enough) d
    where r.kind_id = k.id
  ),
  hosts as (
    select o.ordinal, o.domain, o.inner_domain, o.host, sum(o.room) as room
    from offers o where o.domain is not null and o.inner_domain is not null group by o.ordinal, o.domain, o.inner_domain, o.host
  ),
  inner_domains as (
    select h.ordinal, h.domain,
      case r.strategy when 'strict_pack' then max(h.room) when 'strict_spread' then count(*) filter (where h.room > 0) else sum(h.room) end as room
    from hosts h join gangq.kind_roles r on r.kind_id = k.id and r.ordinal = h.ordinal
    group by h.ordinal, h.domain, h.inner_domain, r.strategy
  ),
  by_role as (
    select d.domain, r.ordinal, r.name, r.min_members as wanted, least(coalesce(max(i.room), 0), r.min_members) as room,
      case r.strategy when 'strict_pack' then ' on one host' when 'strict_spread' then ' on a host each' else '' end
        || coalesce(' in one ' || r.require, '') as how
    from (select distinct o.domain from offers o where o.domain is not null) d
    cross join gangq.kind_roles r
    left join inner_domains i on i.domain = d.domain and i.ordinal = r.ordinal
    where r.kind_id = k.id group by d.domain, r.ordinal, r.name, r.min_members, r.strategy, r.require
  ),
  asked as (
    select sum(r.min_members) as slots, sum(r.min_members * s.gpus::bigint) as gpus, sum(r.min_members * s.memory_mb) as memory_mb,
      sum(r.min_members * s.cpus) as cpus
    from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id where r.kind_id = k.id
  ),
  together as (
    select w.domain, array_remove(array[
      case when sum(w.slots) < a.slots then format('%s of %s', sum(w.slots), gangq.counted(a.slots, 'slot')) end,
      case when sum(w.gpus) < a.gpus then format('%s of %s', sum(w.gpus), gangq.counted(a.gpus, 'GPU')) end,
      case when sum(w.memory_mb) < a.memory_mb then format('%s MiB of %s', sum(w.memory_mb), a.memory_mb) end,
      case when sum(w.cpus) < a.cpus then format('%s of %s', sum(w.cpus), gangq.counted(a.cpus, 'CPU')) end], null) as short
    from (
      select distinct o.domain, o.id, o.slots, o.gpus, o.memory_mb, o.cpus from offers o where o.able and o.domain is not null) w
    cross join asked a group by w.domain, a.slots, a.gpus, a.memory_mb, a.cpus
  ),
  verdict as (
    select b.domain, bool_and(b.room >= b.wanted) and coalesce(t.short = '{}', false) as fits, sum(b.room) as placed,
      string_agg(format('%s of %s %s%s', b.room, b.wanted, b.name, b.how), ', ' order by b.ordinal)
        || coalesce('; together ' || nullif(array_to_string(t.short, ', '), ''), '') as has
    from by_role b left join together t on t.domain = b.domain group by b.domain, t.short
  )
  select v.* into best from verdict v order by v.fits desc, v.placed desc, v.domain limit 1;
  if best.fits then
    return null;
  end if;
  return format(case when kind_infeasible.known then 'all workers known, ended ones included,' else 'the workers registered now' end
    || ' could never hold it even when idle: %s%s',
    case when best.domain is null then 'none has a label ' || k.require
      when k.require is null then 'room for '
      else format('the best %s, %s, has room for ', k.require, best.domain) end,
    best.has);
end $$;
comment on function gangq.kind_infeasible is
  'Internal. Why the workers registered now, or all known, could never hold the minimum of this kind of gang, or null. '
  'Roles, strict strategies and required levels are checked each for itself and in sum: what passes may still not fit.';

create function gangq.check_limits(queue text, gangs integer, members bigint, gpus bigint, memory_mb bigint, cpus numeric) returns void
language plpgsql stable as $$
#variable_conflict use_column
declare
  over record;
begin
  select q.name, l.resource, l.asked, l.most, l.setting into over
  from gangq.queues_table q
  cross join lateral (values
    ('gpus', check_limits.gpus, q.maximum ->> 'gpus', 'maximum'),
    ('memory_mb', check_limits.memory_mb, q.maximum ->> 'memory_mb', 'maximum'),
    ('cpus', check_limits.cpus, q.maximum ->> 'cpus', 'maximum'),
    ('jobs', check_limits.members, q.maximum ->> 'jobs', 'maximum'),
    -- 0 is how an operator shuts it for a while.
    ('jobs', check_limits.members, nullif(q.max_running_jobs, 0)::text, 'max_running_jobs'),
    ('gpus', check_limits.gpus, q.submitter_maximum ->> 'gpus', 'submitter_maximum'),
    ('jobs', check_limits.members, q.submitter_maximum ->> 'jobs', 'submitter_maximum'),
    ('gangs', check_limits.gangs, q.submitter_maximum ->> 'gangs', 'submitter_maximum')) as l(resource, asked, most, setting)
  where q.name = any (gangq.queue_path(check_limits.queue)) and l.asked > l.most::numeric
  order by length(q.name) desc limit 1;
  if found then
    perform gangq.refuse('GQ001',
      format('it needs %s %s at once, and the %s of queue %s is %s', trim_scale(over.asked), over.resource, over.setting, over.name, over.most),
      case when check_limits.gangs > 0 then 'Ask for less (an elastic gang counts with its minimum), or for another queue; '
        else 'Ask for less, or for another queue; ' end || 'an administrator can raise the limit: gangq queue set.');
  end if;
end $$;
comment on function gangq.check_limits is
  'Internal. Refuses (GQ001) what alone exceeds a limit of its queue or of an ancestor of it, and so could never run.';
