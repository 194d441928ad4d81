-- The units of a board: what is placed, when each is expected to end, and what is to be moved off
-- drained workers. A unit is what is placed and stops as one: g7 is gang 7, j7 single job 7. Takes
-- no locks.

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
) returns timestamptz language sql stable as $$
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
  from moved m
  where gangq.paused_queue(m.queue) is null and gangq.paused_task(m.kind_id) is null
$$;
