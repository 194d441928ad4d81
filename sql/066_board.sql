-- board: what a decision is made from, as JSON, in one snapshot: what waits, what is placed, the
-- workers and the queues. Its fields are those of gangq.placement.board in Python. Takes no locks.
--
-- board first asks what waits (board_gangs, board_single_asks, board_asks) and what is to be moved
-- (board_moves), because that says which kinds and classes of workers it shows. A unit is what is
-- placed and stops as one: g7 is gang 7, j7 single job 7. An ask is what waits as one. Workers that
-- serve the same work are one class. Moments are seconds since 1970, processors thousandths.
--
-- The functions are PL/pgSQL, because it keeps plans: SQL functions were planned at every pass, two
-- thirds of the time of a small board. They make json, because it is text: jsonb was copied into
-- each larger part, half of the time. A field that has its default is left out.

-- Internal. A moment as a board tells it: seconds since 1970.
create function gangq.seconds(at timestamptz) returns double precision language sql stable
return date_part('epoch', at);

-- Internal. All jobs that hold a slot for placed work: reserved, running, or told to stop. Worker
-- by worker: with a condition on incarnation alone the planner reads the whole backlog whenever the
-- statistics are older than it. Every worker that holds jobs has a lease.
create function gangq.placed_jobs() returns setof gangq.live_jobs language sql stable as $$
  select j.*
  from gangq.leases l
  cross join lateral (
    select x.* from gangq.live_jobs x
    where x.incarnation = l.incarnation and not x.light offset 0) j
$$;

-- Internal. A rate on a board; null: there is none.
create function gangq.board_rate(rate text, full_at timestamptz) returns json
language sql stable as $$
  select json_build_object('said', board_rate.rate, 'starts', r.starts,
    'every_s', extract(epoch from r.every)::float8,
    'full_at', gangq.seconds(board_rate.full_at))
  from gangq.rate_of(board_rate.rate) r where board_rate.rate is not null
$$;

-- Internal. The queues of a board. A job that took a light slot before its queue had a limit counts
-- for that limit.
create function gangq.board_queues() returns json language plpgsql stable as $$
begin
  return (
    with light as materialized (
      select s.queue, count(*) as jobs
      from gangq.leases l
      join gangq.live_jobs j on j.incarnation = l.incarnation and j.light
      join gangq.shapes s on s.id = j.shape_id
      where gangq.placed_queues() <> '{}'
      group by s.queue
    )
    select json_agg(json_build_object(
      'name', q.name, 'paused', q.paused, 'policy', q.policy, 'weight', q.weight::float8,
      'maximum', q.maximum, 'guaranteed', q.guaranteed, 'submitter_maximum', q.submitter_maximum,
      'max_gangs', q.max_running_gangs, 'max_jobs', q.max_running_jobs, 'displaces', q.preempts,
      'light_jobs', coalesce(l.jobs, 0), 'rate', gangq.board_rate(q.rate, q.full_at))
      order by q.name)
    from gangq.queues_table q left join light l on l.queue = q.name);
end $$;

-- Workers -----------------------------------------------------------------------------------------

-- Internal. The domain of each topology level in which this worker lies; null: in none. Each
-- level's name has the broader ones before it: rack 1 of zone a is not rack 1 of zone b. The parts
-- are escaped, so that rack b of zone a/ is not rack /b of zone a.
create function gangq.domains(i gangq.incarnations, levels text[]) returns jsonb
language sql stable as $$
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
    window w as (order by x.n)) l
$$;

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
language plpgsql stable as $$
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

-- What is placed ----------------------------------------------------------------------------------

-- Internal. Members that these gangs could run without: of each role those above its minimum, in
-- gangs of which all members run. members: how many such members the gang has.
create function gangq.surplus_members(gang_ids bigint[])
returns table (gang_id bigint, job_id bigint, members bigint) language sql stable as $$
  select m.gang_id, m.id, count(*) over (partition by m.gang_id)
  from (
    select j.gang_id, j.id, r.min_members,
      row_number() over (
        partition by g.id, r.ordinal order by gangq.rank_of(j)) as nth
    from gangq.live_gangs g
    join gangq.live_jobs j on j.gang_id = g.id and j.state = 'running'
    join gangq.kind_roles r on r.kind_id = g.kind_id and r.ordinal = j.role
    where g.id = any (gang_ids) and g.state = 'running' and g.failure_policy = 'shrink'
      and g.missing_since is null and g.world_size = (
        select count(*) from gangq.live_jobs k where k.gang_id = g.id and k.state = 'running')) m
  where m.nth > m.min_members
$$;

-- Internal. Live workers that are drained, by name or with their host.
create function gangq.drained_workers() returns setof bigint language sql stable as $$
  select i.id
  from gangq.cordons c
  join gangq.incarnations i on i.ended_at is null and gangq.is_at(i, c.kind, c.name)
  where c.drain
$$;

-- Internal. When a job may first be told to stop for others; null: never.
create function gangq.movable_at(
  state text, stops integer, max_stops integer, preemptible boolean, began timestamptz,
  min_run_s real
) returns timestamptz language sql immutable as $$
  select case when state = 'running' and stops < max_stops and preemptible
    then began + make_interval(secs => min_run_s) end
$$;

-- Internal. When a job ends, and by what that is known. gone_at: it was told to stop and is gone by
-- then. Otherwise the first of these that lies ahead: the estimate, the end of its budget (latest),
-- 30 s from now.
create function gangq.expected_end(gone_at float8, estimated float8, latest float8, now_s float8)
returns table (at float8, by text) language sql immutable as $$
  select case
      when gone_at is not null then greatest(gone_at, now_s + 1)
      when estimated > now_s then estimated
      else greatest(latest, now_s + 30) end, case
      when gone_at is not null then 'stop'
      when estimated > now_s and estimated < latest then 'history'
      when estimated > now_s or latest > now_s + 30 then 'budget'
      else 'late' end
$$;

-- Internal. Every placed job. key: its unit, the id of the gang, or of the job, negative. spared:
-- how many members its gang could run without. gone_at: set where it was told to stop. movable_at:
-- when it may first be told to stop. A member is a unit of its own if its gang runs on without it,
-- or could.
create function gangq.unit_parts(t timestamptz)
returns table (
  key bigint, part_of bigint, id bigint, submitter text, priority smallint, incarnation bigint,
  queue text, gpus smallint, memory_mb bigint, cpus numeric, apart text, world_size integer,
  spared bigint, since float8, gone_at float8, ends_at float8, ends_by text, lost_s float8,
  movable_at float8, limit_key text
) language plpgsql stable as $$
declare
  now_s constant float8 := gangq.seconds(t);
begin
  return query (
    with jobs as materialized (
      select j.* from gangq.placed_jobs() j
    ),
    gangs as materialized (
      select g.*, k.apart
      from (select distinct j.gang_id as id from jobs j where j.gang_id is not null) i
      cross join lateral (select x.* from gangq.live_gangs x where x.id = i.id offset 0) g
      join gangq.gang_kinds k on k.id = g.kind_id
    ),
    surplus as materialized (
      select m.* from gangq.surplus_members(array(select g.id from gangs g)) m
    ),
    shapes as materialized (
      select s.id, b.budget_s, s.queue, s.limit_key, s.gpus, s.memory_mb, s.cpus, q.preemptible,
        q.min_run_s,
        coalesce(b.budget_s, case when s.gpus > 0 then c.budget_gpu_s else c.budget_s end) as most,
        gangq.estimate_s(s.queue, s.task, s.gpus::integer, b.budget_s) as estimate_s
      from (select distinct j.shape_id, j.budget_s from jobs j) b
      join gangq.shapes s on s.id = b.shape_id
      join gangq.queues_table q on q.name = s.queue
      cross join gangq.settings c
    )
    select case when j.gang_id is null or x.alone then -j.id else j.gang_id end,
      case when x.alone then j.gang_id end, j.id, j.submitter, j.priority, j.incarnation, s.queue,
      s.gpus, s.memory_mb, s.cpus, g.apart, g.world_size::integer, coalesce(v.members, 0), x.since,
      x.gone_at, e.at, e.by,
      greatest(s.gpus, 1) * (now_s - greatest(x.since, gangq.seconds((
        select max(k.saved_at) from gangq.checkpoints k
        where k.job_id = coalesce(case when g.checkpoint_mode = 'rank0' then (
          select z.id from gangq.live_jobs z where z.gang_id = j.gang_id and z.rank = 0) end,
          j.id))))),
      gangq.seconds(gangq.movable_at(j.state, j.stops, c.max_stops,
        coalesce(g.preemptible, true) and s.preemptible, x.began_at, s.min_run_s)), s.limit_key
    from jobs j
    join shapes s on s.id = j.shape_id and s.budget_s is not distinct from j.budget_s
    cross join gangq.settings c
    left join gangs g on g.id = j.gang_id
    left join (select distinct u.gang_id, u.members from surplus u) v on v.gang_id = j.gang_id
    cross join lateral (
      select j.state = 'preempting' and g.state = 'running'
          or j.id in (select u.job_id from surplus u) as alone,
        coalesce(g.go_at, case when j.gang_id is null then j.claimed_at end) as began_at,
        gangq.seconds(coalesce(g.go_at, j.claimed_at, t)) as since,
        case when j.state = 'preempting' then gangq.seconds(j.told_at) + c.grace_s end as gone_at
      offset 0) x
    cross join lateral (select coalesce(gangq.seconds(x.began_at), now_s) as s) b
    cross join lateral gangq.expected_end(x.gone_at, b.s + s.estimate_s, b.s + s.most, now_s) e);
end $$;

-- Internal. The units of a board. What a unit has on one worker is one hold.
create function gangq.board_units(t timestamptz, moves jsonb) returns json
language plpgsql stable set plan_cache_mode = force_generic_plan as $$
begin
  return (
    with placed as materialized (
      select p.* from gangq.unit_parts(t) p
    ),
    devices as materialized (
      select p.key, p.incarnation, json_agg(h.device_id order by h.device_id) as ids
      from placed p join gangq.device_holds h on h.job_id = p.id
      where p.gpus > 0
      group by p.key, p.incarnation
    ),
    holds as materialized (
      select h.key, json_agg(json_build_object(
        'worker', h.incarnation, 'devices', d.ids, 'slots', nullif(h.slots, 1), 'memory_mb',
        nullif(h.memory_mb, 0), 'millicpus', nullif(h.millicpus, 0)) order by h.incarnation) as held
      from (
        select p.key, p.incarnation, count(*) as slots, sum(p.memory_mb) as memory_mb,
          sum(p.cpus * 1000)::bigint as millicpus
        from placed p group by p.key, p.incarnation) h
      left join devices d on d.key = h.key and d.incarnation = h.incarnation
      group by h.key
    ),
    units as materialized (
      select p.key, case when p.key < 0 then 'j' || -p.key else 'g' || p.key end as id,
        min(p.part_of) as part_of, min(p.queue) as queue, min(p.limit_key) as limit_key,
        min(p.submitter) as submitter,
        min(p.priority) as priority, max(p.ends_at) as ends_at,
        (array_agg(p.ends_by order by p.ends_at desc, p.id))[1] as ends_by, min(p.since) as since,
        sum(p.lost_s) as lost_s, bool_and(p.gone_at is not null) as leaving, min(p.apart) as apart,
        bool_or(p.incarnation in (select w from gangq.drained_workers() w)) as drained,
        -- Movable only if all of it runs (a gang with a member that is done could not run again)
        -- and if no member has been stopped so often that another stop would end it.
        case when bool_and(p.movable_at is not null)
            and (p.key < 0 or max(p.world_size) = count(*) + max(p.spared))
          then max(p.movable_at) end as movable_at
      from placed p
      group by p.key
    )
    select json_agg(json_build_object(
      'id', u.id, 'queue', nullif(u.queue, 'default'), 'limit_key', u.limit_key,
      'submitter', u.submitter,
      'priority', nullif(u.priority, 0), 'ends_at', u.ends_at,
      'ends_by', nullif(u.ends_by, 'budget'), 'part_of', 'g' || u.part_of, 'since', u.since,
      'lost_s', u.lost_s, 'leaving', nullif(u.leaving, false), 'drained', nullif(u.drained, false),
      'apart', u.apart, 'ask', moves -> u.id, 'movable_at', u.movable_at,
      'movable', nullif(u.movable_at <= gangq.seconds(t), false), 'holds', h.held)
      order by abs(u.key), u.key)
    from units u join holds h on h.key = u.key);
end $$;

-- Internal. What is to be moved off drained workers, and the ask that each would wait as. Work on a
-- drained worker is moved if it could be placed again: neither its queue nor its task is paused,
-- and no member of its gang is done. A gang that is replacing a member is moved once it is whole.
-- The kind of a single job is its shape, negative.
create function gangq.board_moves() returns table (unit text, kind_id integer, ask jsonb)
language sql stable as $$
  with drained as materialized (
    select distinct coalesce(j.gang_id, -j.id) as id
    from gangq.drained_workers() as w(id)
    join gangq.live_jobs j on j.incarnation = w.id and j.state in ('reserved', 'running')
  ),
  moved as (
    select 'g' || g.id as unit, g.kind_id, k.queue,
      jsonb_agg(m.placed order by m.ordinal) as missing
    from drained d
    join gangq.live_gangs g on g.id = d.id and g.missing_since is null
      -- A service makes another gang first, and then tells this one to stop.
      and not exists (
        select from gangq.services_table s where s.name = g.service and s.surge > 0)
    join gangq.gang_kinds k on k.id = g.kind_id
    cross join lateral (
      select r.ordinal, count(j.id) as placed
      from gangq.kind_roles r
      left join gangq.live_jobs j on j.gang_id = g.id and j.role = r.ordinal
        and j.state in ('reserved', 'running')
      where r.kind_id = g.kind_id group by r.ordinal) m
    group by g.id, k.queue
    having sum(m.placed) = g.world_size
    union all
    select 'j' || j.id, -j.shape_id, s.queue, '[1]'
    from drained d join gangq.live_jobs j on j.id = -d.id join gangq.shapes s on s.id = j.shape_id
  )
  select m.unit, m.kind_id,
    jsonb_build_object('id', m.unit, 'kind', m.kind_id, 'missing', m.missing)
  from moved m where not gangq.paused(m.queue) and gangq.paused_task(m.kind_id) is null
$$;

-- What waits --------------------------------------------------------------------------------------

-- Internal. The kinds of a board. examples: for each class of workers one worker.
create function gangq.board_kinds(ids integer[], examples bigint[]) returns json
language plpgsql stable as $$
begin
  return (
    with named as materialized (
      select r.kind_id, r.ordinal, r.name, r.min_members, r.max_members, r.strategy, r.balanced,
        r.require, r.prefer, r.shape_id
      from gangq.kind_roles r where r.kind_id = any (ids)
      union all
      select i, 1, '', 1, 1, 'pack', false, null, null, -i from unnest(ids) as i where i < 0
    ),
    -- Read once: joined for each role, all workers were read for each role.
    classes as materialized (
      select e.class, i as example
      from unnest(examples) with ordinality as e(id, class)
      join gangq.incarnations i on i.id = e.id
    ),
    roles as materialized (
      select r.*, s.gpus, s.vram_mb, s.memory_mb, s.cpus, s.model, s.limit_key, s.avoid, (
        select p.task from gangq.task_pauses p where p.task = s.task) as paused, (
        select coalesce(json_agg(c.class order by c.class), '[]')
        from classes c where gangq.serves(c.example, s)) as serves
      from named r join gangq.shapes s on s.id = r.shape_id
    ),
    -- Grouped once: asked kind by kind, the roles would be read as often as there are kinds.
    told as materialized (
      select r.kind_id, min(r.model) as model, min(r.limit_key) as limit_key,
        min(r.paused) as paused,
        json_agg(json_build_object('name', nullif(r.name, ''), 'least', nullif(r.min_members, 1),
        'most', nullif(r.max_members, 1), 'strategy', nullif(r.strategy, 'pack'),
        'balanced', nullif(r.balanced, false), 'require', r.require, 'prefer', r.prefer,
        'serves', r.serves, 'needs', json_build_object(
          'gpus', nullif(r.gpus, 0), 'vram_mb', nullif(r.vram_mb, 0),
          'memory_mb', nullif(r.memory_mb, 0), 'millicpus', nullif((r.cpus * 1000)::bigint, 0),
          'avoid', nullif(r.avoid, '{}'))) order by r.ordinal) as roles
      from roles r
      group by r.kind_id
    )
    select json_agg(json_build_object(
      'id', k.id, 'queue', nullif(k.queue, 'default'), 'require', k.require, 'prefer', k.prefer,
      'apart', k.apart, 'model', y.model, 'limit_key', y.limit_key, 'paused_task', y.paused,
      'roles', y.roles)
      order by k.id)
    from (
      select x.id, x.queue, x.require, x.prefer, x.apart
      from gangq.gang_kinds x where x.id = any (ids)
      union all
      select -s.id, s.queue, null, null, null from gangq.shapes s where -s.id = any (ids)) k
    join told y on y.kind_id = k.id);
end $$;

-- Internal. Gangs that wait: the first a_kind of each kind, fewer where there are many kinds; and
-- gangs that run and wait for replacements of members. The first gangs of each kind are read from
-- an index, however many wait.
create function gangq.board_gangs(t timestamptz, a_kind integer, in_all integer)
returns table (id bigint, kind_id integer, order_key bigint, most bigint) language sql stable as $$
  with kinds as materialized (
    select y.id, q.policy = 'fifo' as by_age,
      least(a_kind, greatest(1, in_all / count(*) over ())) as most
    from gangq.blocked_kinds c
    join gangq.gang_kinds y on y.id = c.kind_id
    join gangq.queues_table q on q.name = y.queue
  )
  (select g.id, g.kind_id, g.order_key, k.most
  from kinds k
  cross join lateral (
    (select x.id, x.kind_id, x.order_key from gangq.live_gangs x
    where not k.by_age and x.state = 'blocked' and x.kind_id = k.id
      and (x.not_before is null or x.not_before <= t)
    order by x.order_key limit k.most)
    union all
    (select x.id, x.kind_id, x.order_key from gangq.live_gangs x
    where k.by_age and x.state = 'blocked' and x.kind_id = k.id
      and (x.not_before is null or x.not_before <= t)
    order by x.order_key & 1125899906842623 limit k.most)) g
  order by g.order_key limit in_all)
  union all
  select x.id, x.kind_id, x.order_key, null
  from gangq.live_gangs x
  where x.state = 'running' and x.missing_since is not null
    and (x.not_before is null or x.not_before <= t) and exists (
      select 1 from gangq.live_jobs j
      where j.gang_id = x.id and j.state = 'blocked' and gangq.in_epoch(j, x))
$$;

-- Internal. The asks of these gangs.
create function gangq.board_asks(t timestamptz, ids bigint[]) returns setof json
language plpgsql stable set plan_cache_mode = force_generic_plan as $$
begin
  return query (
    with gangs as materialized (
      -- One by one: however many gangs there are, those shown are found by their index.
      select g.*
      from unnest(ids) as i(id)
      cross join lateral (select x.* from gangq.live_gangs x where x.id = i.id offset 0) g
    ),
    estimates as materialized (
      select z.kind_id, z.budget_s,
        max(gangq.estimate_s(s.queue, s.task, s.gpus::integer, z.budget_s)) as s
      from (select distinct g.kind_id, g.budget_s from gangs g) z
      join gangq.kind_roles r on r.kind_id = z.kind_id
      join gangq.shapes s on s.id = r.shape_id
      group by z.kind_id, z.budget_s
    ),
    avoided as materialized (
      select a.id, json_agg(l.host order by l.host) as hosts
      from gangq.lost_hosts(t) l cross join lateral unnest(l.gang_ids) as a(id)
      group by a.id
    ),
    -- By role, how many members a gang that runs lacks, and the workers of the others.
    lacking as materialized (
      select y.id, json_agg(y.missing order by y.ordinal) as missing,
        json_agg(y.mates order by y.ordinal) as mates
      from (
        select w.id, r.ordinal,
          count(*) filter (where j.state = 'blocked' and gangq.in_epoch(j, w)) as missing,
          coalesce(json_agg(j.incarnation order by j.incarnation)
            filter (where j.incarnation is not null), '[]') as mates
        from gangs g
        join gangq.live_gangs w on w.id = g.id
        join gangq.kind_roles r on r.kind_id = w.kind_id
        left join gangq.live_jobs j on j.gang_id = w.id and j.role = r.ordinal
        where g.state = 'running'
        group by w.id, r.ordinal) y
      group by y.id
    )
    select json_build_object(
      'id', 'g' || g.id, 'kind', g.kind_id, 'priority', nullif(g.priority, 0),
      'age', g.order_key & 1125899906842623, 'submitter', g.submitter,
      'estimate_s', e.s::float8, 'avoid_hosts', a.hosts, 'missing', r.missing, 'mates', r.mates)
    from gangs g
    join estimates e on e.kind_id = g.kind_id and e.budget_s is not distinct from g.budget_s
    left join avoided a on a.id = g.id
    left join lacking r on r.id = g.id
    order by g.order_key, g.id);
end $$;

-- Internal. Single jobs that wait to be placed: for each kind and priority the first job, and how
-- many there are. The count stops at most: no pass could place more. One row per shape and
-- priority, found by hopping along the index that claims read.
create function gangq.board_single_asks(most integer)
returns table (kind_id integer, jobs bigint, ask json) language plpgsql stable as $$
begin
  return query (
    with recursive placed as materialized (
      select s.id
      from gangq.pending_shapes p join gangq.shapes s on s.id = p.shape_id
      cross join (select gangq.placed_queues() as names offset 0) q
      where gangq.is_placed(s, q.names)
    ),
    heads(shape_id, head) as (
      select p.id, (
        select j.order_key from gangq.live_jobs j
        where j.shape_id = p.id and j.state = 'pending' order by j.order_key limit 1)
      from placed p
      union all
      select h.shape_id, (
        select j.order_key from gangq.live_jobs j
        where j.shape_id = h.shape_id and j.state = 'pending'
          and j.order_key >= ((h.head >> 50) + 1) << 50
        order by j.order_key limit 1)
      from heads h where h.head is not null
    )
    select -h.shape_id, n.jobs, json_build_object(
      'id', format('k%s/%s', h.shape_id, 1000 - (h.head >> 50)), 'kind', -h.shape_id,
      'priority', nullif(1000 - (h.head >> 50), 0), 'age', h.head & 1125899906842623,
      'submitter', j.submitter,
      -- What was put to the front has no age: nothing overtakes it.
      'since', case when (h.head & 1125899906842623) >= 562949953421312
        then gangq.seconds(j.submitted_at) end, 'count', n.jobs,
      'estimate_s', gangq.estimate_s(s.queue, s.task, s.gpus::integer, j.budget_s)::float8)
    from (select x.* from heads x where x.head is not null order by x.head limit 1000) h
    join gangq.shapes s on s.id = h.shape_id
    cross join lateral (
      select count(*) as jobs
      from (
        select from gangq.live_jobs x
        where x.shape_id = h.shape_id and x.state = 'pending'
          and x.order_key >= h.head and x.order_key < ((h.head >> 50) + 1) << 50
        limit most) w offset 0) n
    cross join lateral (
      select x.submitter, x.budget_s, x.submitted_at from gangq.live_jobs x
      where x.shape_id = h.shape_id and x.state = 'pending' and x.order_key = h.head limit 1) j
    order by h.head);
end $$;

-- The board ---------------------------------------------------------------------------------------

-- Internal. Seats that are kept for an ask while others stop for it. They lapse when one of their
-- workers has ended.
create function gangq.board_kept(t timestamptz) returns json language plpgsql stable as $$
begin
  return (
    select json_agg(json_build_object('ask', p.ask,
      'starts_at', gangq.seconds(least(p.starts_at, t + make_interval(secs => c.grace_s))),
      'holds', p.seats) order by p.ask)
    from gangq.plans p cross join gangq.settings c
    where p.kept and p.starts_at > t and not exists (
      select 1 from jsonb_array_elements(p.seats) as x(value)
      left join gangq.incarnations i
        on i.id = (x.value ->> 'worker')::bigint and i.ended_at is null
      where i.id is null));
end $$;

-- Internal. The places of a board. job: which runs there; ended: that has ended, and the place is
-- to be closed.
create function gangq.board_places() returns json language plpgsql stable as $$
begin
  return (
    select json_agg(json_build_object('id', p.id, 'worker', p.incarnation, 'kind', -p.shape_id,
      'devices', p.device_ids,
      'job', case when p.job_id is not null then coalesce('j' || j.id, 'ended') end)
      order by p.id)
    from gangq.places p left join gangq.live_jobs j on j.id = p.job_id and j.token = p.token);
end $$;

-- What a decision is made from, in one snapshot: workers with all they offer, units (what is
-- placed), kinds and asks (what waits; of each kind the first 200, fewer where there are many,
-- 1,000 in all), queues. Reads only.
create function gangq.board() returns json language plpgsql stable as $$
declare
  t constant timestamptz := gangq.now();
  -- One more than could be placed: then the pass says why the rest waits.
  most constant integer := 1 + least(200, greatest(0, (
    select sum(i.slots) from gangq.incarnations i where i.ended_at is null) - (
    select count(*) from gangq.placed_jobs())));
  gangs bigint[];
  kinds integer[];
  cut integer[];
  asks json[];
  moves jsonb;
  workers bigint[];
  classes integer[];
  examples bigint[];
begin
  with shown as materialized (
    select g.* from gangq.board_gangs(t, 200, 1000) g
  )
  select array(select s.id from shown s), array_agg(k.kind_id),
    array_agg(k.kind_id) filter (where k.cut)
  into gangs, kinds, cut
  from (
    select s.kind_id, count(s.most) >= min(s.most) as cut from shown s group by s.kind_id) k;
  select array_agg(s.ask), kinds || array_agg(s.kind_id),
    cut || array_agg(distinct s.kind_id) filter (where s.jobs >= most)
  into asks, kinds, cut
  from gangq.board_single_asks(most) s;
  asks := array(select a from gangq.board_asks(t, gangs) as a) || asks;
  select jsonb_object_agg(m.unit, m.ask), kinds || array_agg(m.kind_id) into moves, kinds
  from gangq.board_moves() m;
  -- Each once: what is moved and what waits may be of one kind.
  kinds := array(select distinct k from unnest(kinds) as k);
  select array_agg(w.id), array_agg(w.class), array_agg(distinct w.example order by w.example)
  into workers, classes, examples
  from gangq.worker_classes(kinds) w;
  return (
    select json_strip_nulls(json_build_object(
      'format', 1, 'now', gangq.seconds(t), 'levels', c.topology, 'grace_s', c.grace_s::float8,
      'warm_s', c.warm_s::float8,
      'planned_starts', c.reservations, 'victims', c.preemptions_per_pass,
      'pass_number', (select l.runs from gangq.lock_rows l where l.name = 'pass'),
      'asked', (select d.asked from gangq.decider d), 'recorded', c.record_decisions, 'cut', cut,
      'queues', gangq.board_queues(), 'limits', (
        select json_object_agg(k.name, k.most order by k.name) from gangq.limit_keys k
        -- Batches that have ended keep their keys for weeks.
        where k.batch_id is null or k.batch_id = any (array(
          select b.id from gangq.batches_table b where b.finished_at is null))),
      'rates', (
        select json_object_agg(k.name, gangq.board_rate(k.rate, k.full_at) order by k.name)
        from gangq.limit_keys k where k.rate is not null),
      'workers', gangq.board_workers(t, workers, classes),
      'units', gangq.board_units(t, coalesce(moves, '{}')), 'kept', gangq.board_kept(t),
      'places', gangq.board_places(), 'kinds', gangq.board_kinds(kinds, examples), 'asks', asks))
    from gangq.settings c);
end $$;
