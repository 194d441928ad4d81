-- The asks of a board and their kinds. An ask is what waits as one: a gang, or all single jobs of
-- one kind and priority. Takes no locks.

-- Internal. The kinds of a board. examples: for each class of workers one worker.
create function gangq.board_kinds(ids integer[], examples bigint[]) returns json
language plpgsql stable set plan_cache_mode = force_generic_plan as $$
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

-- A board shows 1,000 gangs and 1,000 asks of single jobs. Where there are more, submitters take
-- turns: one whose work fits nowhere must not hide that of all others for as long as it waits. What
-- has a planned start, or seats kept, comes before all turns: unseen it would lose them. The last
-- tenth is drawn at random, so that in some pass each is seen: an ask of single jobs counts as that
-- of its first job, and jobs of other submitters may stand behind that.

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
  ),
  in_turn as (
    select g.*, k.most, case when 'g' || g.id in (select p.ask from gangq.plans p) then 0
      else row_number() over (partition by g.submitter order by g.order_key) end as turn
    from kinds k
    cross join lateral (
      (select x.id, x.kind_id, x.order_key, x.submitter from gangq.live_gangs x
      where not k.by_age and x.state = 'blocked' and x.kind_id = k.id
        and (x.not_before is null or x.not_before <= t)
      order by x.order_key limit k.most)
      union all
      (select x.id, x.kind_id, x.order_key, x.submitter from gangq.live_gangs x
      where k.by_age and x.state = 'blocked' and x.kind_id = k.id
        and (x.not_before is null or x.not_before <= t)
      order by gangq.pos_of(x.order_key) limit k.most)) g
  )
  (select g.id, g.kind_id, g.order_key, g.most
  from (select i.*, row_number() over (order by i.turn, i.order_key) as nth from in_turn i) g
  order by least(g.nth, in_all * 9 / 10), random() limit in_all)
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
      'age', gangq.pos_of(g.order_key), 'submitter', g.submitter,
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
          and j.order_key >= gangq.order_key(gangq.priority_of(h.head) - 1, 0)
        order by j.order_key limit 1)
      from heads h where h.head is not null
    ),
    in_turn as (
      select h.*, j.*,
        case when format('k%s/%s', h.shape_id, gangq.priority_of(h.head)) in (
          select p.ask from gangq.plans p) then 0
        else row_number() over (partition by j.submitter order by h.head) end as turn
      from heads h
      cross join lateral (
        select x.submitter, x.budget_s, x.submitted_at from gangq.live_jobs x
        where x.shape_id = h.shape_id and x.state = 'pending' and x.order_key = h.head limit 1) j
    )
    select -h.shape_id, n.jobs, json_build_object(
      'id', format('k%s/%s', h.shape_id, gangq.priority_of(h.head)), 'kind', -h.shape_id,
      'priority', nullif(gangq.priority_of(h.head), 0), 'age', gangq.pos_of(h.head),
      'submitter', h.submitter,
      -- What was put to the front has no age: nothing overtakes it.
      'since', case when gangq.pos_of(h.head) >= gangq.first_pos()
        then gangq.seconds(h.submitted_at) end, 'count', n.jobs,
      'estimate_s', gangq.estimate_s(s.queue, s.task, s.gpus::integer, h.budget_s)::float8)
    from (
      select i.*
      from (select x.*, row_number() over (order by x.turn, x.head) as nth from in_turn x) i
      order by least(i.nth, 900), random() limit 1000) h
    join gangq.shapes s on s.id = h.shape_id
    cross join lateral (
      select count(*) as jobs
      from (
        select from gangq.live_jobs x
        where x.shape_id = h.shape_id and x.state = 'pending'
          and x.order_key >= h.head
          and x.order_key < gangq.order_key(gangq.priority_of(h.head) - 1, 0)
        limit most) w offset 0) n
    order by h.head);
end $$;
