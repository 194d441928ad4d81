-- Why is it not running (142): which workers may take it, and whether they could hold it.
-- Takes no locks. Each explain_* function, here and in 141 and 142, makes one or more rows of
-- gangq.reason.

-- One row of an explanation, with its numbers; ok false marks what holds the job or gang.
create type gangq.reason as (gate text, ok boolean, detail text, numbers jsonb);

-- Internal. How many live workers may take jobs of this shape now, and what rules out the others.
create function gangq.explain_workers(s gangq.shapes, t timestamptz) returns setof gangq.reason
language sql stable as $$
  -- Each worker falls to the first condition that it does not meet.
  with workers as materialized (
    select i.taints, b.why as barred, case
        when s.queue <> all (i.queues) then 'of other queues'
        when s.task <> all (i.tasks) then 'without task ' || s.task
        when not s.labels <@ i.labels then 'without labels ' || gangq.labels_text(s.labels)
        when gangq.serves(i, s) then null
        when i.taints <> '{}' and gangq.serves(jsonb_populate_record(i, '{"taints": []}'), s)
          then 'with taints it does not tolerate'
        else 'outside the selector' end as fell
    from gangq.barred(explain_workers.t) b join gangq.incarnations i on i.id = b.incarnation
  ),
  others as (
    select string_agg(format('%s %s', c.n, c.why), ', ' order by c.n desc, c.why) as listed,
      coalesce(jsonb_object_agg(c.why, c.n), '{}') as counts
    from (
      select coalesce(w.fell, w.barred) as why, count(*) as n from workers w group by 1) c
    where c.why is not null
  ),
  lacking as (
    select string_agg(distinct u.taint, ', ' order by u.taint) as taints
    from workers w cross join lateral unnest(w.taints) as u(taint)
    where w.fell = 'with taints it does not tolerate'
      and u.taint <> all (coalesce(s.tolerates, '{}'))
  )
  select 'workers', n.open > 0, case
      when n.live = 0 then 'no worker is registered: start one with gangq worker'
      else format('%s of %s may take it', n.open, gangq.counted(n.live, 'worker'))
        || coalesce('; the others: ' || o.listed, '')
        || coalesce(' (' || l.taints || ': --tolerate ' || split_part(l.taints, ', ', 1) || ')', '')
      end,
    jsonb_build_object('live', n.live, 'open', n.open, 'serving', n.serving, 'others', o.counts)
  from (
    select count(*) as live, count(*) filter (where w.fell is null) as serving,
      count(*) filter (where coalesce(w.fell, w.barred) is null) as open
    from workers w) n
  cross join others o cross join lacking l
$$;

-- Internal. members: how many fit on idle workers. gpus, vram_mb, memory_mb, cpus: the most that
-- each may ask for, all else unchanged, so that all members fit. One request is varied at a time:
-- the largest value with which that many members fit on idle workers.
create function gangq.nearest_feasible(s gangq.shapes, members integer) returns jsonb
language sql stable as $$
  with idle as (
    select i.slots, i.memory_mb, i.cpus, array(
      select r.vram_mb from gangq.device_registry r
      where r.offered_by = i.id and (s.avoid is null or r.id <> all (s.avoid))) as vrams
    from gangq.incarnations i where i.ended_at is null and gangq.serves(i, s)
  ),
  shares as (
    select distinct i.memory_mb / k as memory_mb, floor(i.cpus / k) as cpus
    from idle i cross join generate_series(1, least(i.slots, members, 64)) k
  ),
  tries as (
    select 'gpus' as asked, v::numeric as value from generate_series(0, s.gpus - 1) v
    union all
    select distinct 'vram_mb', v from idle i cross join unnest(i.vrams) v where v < s.vram_mb
    union all
    select distinct 'memory_mb', x.memory_mb from shares x where x.memory_mb < s.memory_mb
    union all
    select distinct 'cpus', x.cpus from shares x where x.cpus < s.cpus
    union all
    select 'members', null
  ),
  rooms as (
    select t.asked, t.value, sum(gangq.room(n.needs, i.slots, i.memory_mb, i.cpus, (
      select count(*) from unnest(i.vrams) v where v >= (n.needs).vram_mb))) as room
    from tries t
    cross join lateral (
      select jsonb_populate_record(s, case when t.value is null then '{}'
        else jsonb_build_object(t.asked, t.value) end) as needs
      offset 0) n
    cross join idle i
    group by t.asked, t.value
  )
  select jsonb_strip_nulls(jsonb_object_agg(r.asked,
    case r.asked when 'members' then r.room else r.value end))
  from (
    select z.asked, max(z.value) as value, max(z.room) as room
    from rooms z
    where z.asked = 'members' or z.room >= nearest_feasible.members
    group by z.asked) r
$$;

-- Internal. What a kind of gang needs, or a shape (negative), for each role: the workers for it; if
-- they could not hold its least members when idle, why, and what they could hold; and the devices
-- that it avoids (ok: they could hold it without these).
create function gangq.explain_needs(kind_id integer, t timestamptz) returns setof gangq.reason
language sql stable as $$
  select x.gate, x.ok, case when r.several then format('role %s: ', r.name) else '' end || x.detail,
    x.numbers || case when r.several then jsonb_build_object('role', r.name) else '{}' end
  from (
    select k.ordinal, k.name, k.min_members as members, s, count(*) over () > 1 as several
    from gangq.kind_roles k join gangq.shapes s on s.id = k.shape_id
    where k.kind_id = explain_needs.kind_id
    union all
    select 1, null, 1, s, false from gangq.shapes s where s.id = -explain_needs.kind_id
    order by ordinal) r
  cross join lateral (select gangq.infeasible((r.s).id, r.members) as why offset 0) w
  cross join lateral (
    select * from gangq.explain_workers(r.s, explain_needs.t)
    union all
    select 'hardware', false, w.why || coalesce('; it would fit with ' || (
        select string_agg(format('%s %s', n.key, n.value), ' or ' order by n.key)
        from jsonb_each_text(f.near) n where n.key <> 'members' or n.value::integer > 0), ''),
      jsonb_build_object('members', r.members, 'feasible', coalesce(f.near, '{}'))
    from (select gangq.nearest_feasible(r.s, r.members) as near) f
    where w.why is not null
    union all
    select 'avoids', w.why is null, string_agg(
        format('avoids device %s (%s) after a trip there: ', d.uuid, d.host) || case
          when h.device_id is not null
            then format('it is quarantined (%s); when it is sound, select gangq.unquarantine(%L)',
              h.reason, d.uuid)
          else format('a tick lets it back when no other could take it, select '
            'gangq.unquarantine(%L) at once', d.uuid) end, '; ' order by d.id),
      jsonb_build_object('devices', cardinality((r.s).avoid))
    from gangq.device_registry d
    left join gangq.device_holds h
      on h.device_id = d.id and h.kind = 'quarantine' and h.until is null
    where d.id = any ((r.s).avoid)
    having (r.s).avoid is not null) x
$$;
