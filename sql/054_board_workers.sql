-- The workers of a board: what each offers, where it lies, and its class. Workers that serve the
-- same work are one class. Takes no locks.

-- Internal. Hosts where a worker died in the last hour while it held jobs. doubtful: in the last
-- ten minutes. gang_ids: the gangs that lost members there. A host that failed often fails again.
-- For ten minutes it is the last choice for all work; for an hour a gang that lost a member there
-- is placed elsewhere if possible. Without this a gang was placed four times on the one bad host
-- beside seven idle ones, and failed for good.
create function gangq.lost_hosts(t timestamptz)
returns table (host text, doubtful boolean, gang_ids bigint[]) language sql stable as $$
  select i.host, max(e.at) > t - interval '10 min',
    array_agg(distinct j.gang_id) filter (where j.gang_id is not null)
  from gangq.events e
  join gangq.incarnations i on i.id = e.incarnation
  left join gangq.live_jobs j on j.id = e.job_id
  where e.kind = 'lost' and e.at > t - interval '1 h' and i.state = 'dead' and i.exit_code is null
  group by i.host
$$;

-- Internal. The domain of each topology level in which this worker lies; null: in none. Each
-- level's name has the broader ones before it: rack 1 of zone a is not rack 1 of zone b. The parts
-- are escaped, so that rack b of zone a/ is not rack /b of zone a.
create function gangq.domains(i gangq.incarnations, levels text[]) returns jsonb
language plpgsql stable as $$
begin
  return (
    select jsonb_agg(case
        when l.level = 'host' then i.host
        when l.unknown then null
        else l.path end order by l.n)
    from (
      select x.level, x.n, bool_or(x.name = '') over w as unknown,
        string_agg(replace(replace(x.name, '\', '\\'), '/', '\/'), '/') over w as path
      from (
        select y.level, y.n,
          case y.level when 'host' then i.host else coalesce(i.labels ->> y.level, '') end as name
        from unnest(levels) with ordinality as y(level, n)) x
      window w as (order by x.n)) l);
end $$;

-- Internal. The class of each live worker, and one worker (example) that stands for the class. If
-- one of these kinds selects workers or hosts by name, each worker is a class of its own.
create function gangq.worker_classes(kinds integer[])
returns table (id bigint, class integer, example bigint) language plpgsql stable as $$
declare
  named constant boolean := exists (
    select 1
    from gangq.shapes s cross join lateral jsonb_array_elements(s.selector) c
    where c.value ->> 'key' in ('host', 'worker') and s.id = any (array(
      select r.shape_id from gangq.kind_roles r where r.kind_id = any (kinds)
      union all
      select -k from unnest(kinds) as k where k < 0)));
begin
  return query (
    select y.id, dense_rank() over (order by y.example)::integer, y.example
    from (
      select i.id, min(i.id) over (partition by i.queues, i.tasks, i.labels, i.taints,
        case when named then i.name end) as example
      from gangq.incarnations i where i.ended_at is null) y);
end $$;

-- Internal. The workers of a board with all that they offer. ids, classes: each worker and its
-- class.
create function gangq.board_workers(t timestamptz, ids bigint[], classes integer[]) returns json
language plpgsql stable set plan_cache_mode = force_generic_plan as $$
begin
  return (
    select json_agg(json_build_object(
      'id', i.id, 'name', i.name, 'host', i.host, 'slots', i.slots, 'memory_mb', i.memory_mb,
      'millicpus', (i.cpus * 1000)::bigint, 'class_id', w.class,
      'domains', case when c.topology <> '{host}' then gangq.domains(i, c.topology) end,
      'open', nullif(o.id is not null, true),
      'warm', case when i.model is not null then json_build_array(i.model) end,
      'doubtful', nullif(i.host = any (f.doubtful), false),
      'devices', d.devices) order by i.host, i.id)
    from unnest(ids, classes) as w(id, class)
    join gangq.incarnations i on i.id = w.id
    cross join gangq.settings c
    left join unnest(gangq.candidates(t)) as o(id) on o.id = i.id
    cross join (
      select array(select l.host from gangq.lost_hosts(t) l where l.doubtful) as doubtful
      offset 0) f
    left join (
      select r.offered_by, json_agg(json_build_object('id', r.id, 'vram_mb', r.vram_mb,
        'link', r.link, 'withheld', h.device_id is not null or null)
        order by r.vram_mb, r.index, r.id) as devices
      from gangq.device_registry r
      left join gangq.device_holds h on h.device_id = r.id and h.kind = 'quarantine'
      where r.offered_by is not null group by r.offered_by) d on d.offered_by = i.id);
end $$;
