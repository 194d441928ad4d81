-- The board: everything that explain and plan decide from, read once, in one snapshot. What decides, explains, plans ahead
-- or replays works on a board and never on tables, so all four are the same decision.
-- Takes no locks.
--
-- A board is a struct of arrays, because PL/pgSQL changes an element of an array in place. Workers are numbered in the
-- order of their hosts, so that a host is a range of them; devices in the order of their workers, smallest first.
-- Everything else refers to workers, hosts, queues, kinds, roles and shapes by these numbers. CPUs are counted in
-- thousandths, so that all arithmetic is in whole numbers.

create type gangq.board as (
  t timestamptz,
  reservations integer,
  preemptions integer,
  grace_s double precision,
  levels text[],
  -- workers, by host
  worker_ids bigint[],
  worker_names text[],
  worker_host integer[],
  worker_open boolean[],
  worker_class integer[],
  free_slots integer[],
  free_memory bigint[],
  free_mcpus bigint[],
  all_slots integer[],
  all_memory bigint[],
  all_mcpus bigint[],
  hosts text[],
  host_first integer[],
  worker_domains text[],
  device_first integer[],
  device_ids bigint[],
  device_worker integer[],
  device_vram integer[],
  device_held bigint[],
  -- what is placed on them
  held_unit bigint[],
  held_job bigint[],
  held_worker integer[],
  held_slots integer[],
  held_memory bigint[],
  held_mcpus bigint[],
  held_gpus integer[],
  held_ends timestamptz[],
  unit_ids bigint[],
  unit_queue integer[],
  unit_submitter text[],
  unit_priority integer[],
  unit_movable boolean[],
  unit_leaving boolean[],
  unit_lost double precision[],
  unit_since timestamptz[],
  -- what is kept by an earlier promise
  escrow_gang bigint[],
  escrow_worker integer[],
  escrow_slots integer[],
  escrow_memory bigint[],
  escrow_mcpus bigint[],
  escrow_gpus integer[],
  -- queues
  queue_names text[],
  queue_parent integer[],
  queue_open boolean[],
  queue_policy text[],
  queue_weight double precision[],
  queue_maximum jsonb[],
  queue_guaranteed jsonb[],
  queue_max_gangs integer[],
  queue_max_jobs integer[],
  queue_submitter_maximum jsonb[],
  queue_preempts boolean[],
  used_gangs bigint[],
  used_jobs bigint[],
  used_gpus bigint[],
  used_memory bigint[],
  used_mcpus bigint[],
  usage_submitters jsonb,
  -- what waits
  shape_ids integer[],
  shape_gpus integer[],
  shape_vram integer[],
  shape_memory bigint[],
  shape_mcpus bigint[],
  shape_avoid jsonb[],
  shape_serves boolean[],
  classes integer,
  kind_ids integer[],
  kind_queue integer[],
  kind_require integer[],
  kind_prefer integer[],
  kind_apart text[],
  kind_first_role integer[],
  kind_roles integer[],
  role_names text[],
  role_shape integer[],
  role_min integer[],
  role_max integer[],
  role_strategy text[],
  role_require integer[],
  role_prefer integer[],
  role_balanced boolean[],
  gang_ids bigint[],
  gang_kind integer[],
  gang_priority integer[],
  gang_order_key bigint[],
  gang_submitter text[],
  gang_estimate double precision[],
  gang_missing jsonb[],
  gang_anchor jsonb[],
  gang_preempting boolean[],
  move_units bigint[],
  move_kind integer[],
  move_shape integer[],
  move_counts jsonb[],
  apart_keys text[],
  apart_hosts integer[],
  apart_gangs bigint[]
);
comment on type gangq.board is
  'What a decision sees, as arrays that refer to one another by position. unit: a gang, or a job alone (its id '
  'negative). held: one entry per placed member or job. Levels are numbered as in settings.topology, 0: none. Of a gang '
  'that runs, missing: members each role lacks, anchor: of each role the incarnations where its others are. move: what '
  'runs on hosts and workers that are drained.';

create function gangq.required_level(levels text[], level text) returns integer language sql immutable as
$$ select case when required_level.level is null then 0 else coalesce(array_position(levels, required_level.level), cardinality(levels) + 1) end $$;
comment on function gangq.required_level is
  'Internal. The number of a required topology level, 0: none. One that does not exist is the one after the last, in which no worker lies.';

-- Queues: all of them, in order of name, so that a parent comes before its children.
create function gangq.look_at_queues(b gangq.board) returns gangq.board language plpgsql stable as $$
#variable_conflict use_column
declare
  n integer;
  i integer;
begin
  select array_agg(q.name order by q.name), array_agg(q.parent order by q.name), array_agg(not q.paused order by q.name),
    array_agg(q.policy order by q.name), array_agg(q.weight::float8 order by q.name), array_agg(nullif(q.maximum, '{}') order by q.name),
    array_agg(nullif(q.guaranteed, '{}') order by q.name), array_agg(q.max_running_gangs order by q.name),
    array_agg(q.max_running_jobs order by q.name), array_agg(nullif(q.submitter_maximum, '{}') order by q.name),
    array_agg(q.preempts order by q.name)
  into b.queue_names, b.queue_parent, b.queue_open, b.queue_policy, b.queue_weight, b.queue_maximum, b.queue_guaranteed,
    b.queue_max_gangs, b.queue_max_jobs, b.queue_submitter_maximum, b.queue_preempts
  from (
    with numbered as materialized (
      select y.name, string_to_array(y.name, '.') as parts, row_number() over (order by y.name)::integer as n from gangq.queues_table y
    )
    select z.*, p.n as parent
    from gangq.queues_table z
    left join (
      select distinct on (c.name) c.name, a.n
      from numbered c cross join lateral generate_series(1, cardinality(c.parts) - 1) as k(part)
      join numbered a on a.name = array_to_string(c.parts[1 : k.part], '.')
      order by c.name, k.part desc) p on p.name = z.name) q;
  n := cardinality(b.queue_names);
  for i in 1 .. n loop
    if b.queue_parent[i] is not null and not b.queue_open[b.queue_parent[i]] then
      b.queue_open[i] := false;
    end if;
  end loop;
  b.used_gangs := array_fill(0::bigint, array[n]);
  b.used_jobs := b.used_gangs;
  b.used_gpus := b.used_gangs;
  b.used_memory := b.used_gangs;
  b.used_mcpus := b.used_gangs;
  b.usage_submitters := '{}';
  return b;
end $$;
comment on function gangq.look_at_queues is 'Internal. The tree of queues; nothing is counted yet.';

create function gangq.look_at_usage(b gangq.board) returns gangq.board language plpgsql stable as $$
#variable_conflict use_column
declare
  per_submitter boolean := exists (select 1 from unnest(b.queue_submitter_maximum) as m where m is not null) or 'fair' = any (b.queue_policy);
  u record;
  up integer;
  said text;
begin
  for u in
    select array_position(b.queue_names, s.queue) as queue, case when per_submitter then j.submitter end as submitter,
      count(distinct j.gang_id) as gangs, count(*) as jobs, sum(s.gpus)::bigint as gpus, sum(s.memory_mb)::bigint as memory,
      (sum(s.cpus) * 1000)::bigint as mcpus
    from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
    where j.incarnation is not null
    group by s.queue, case when per_submitter then j.submitter end
  loop
    up := u.queue;
    while up is not null loop
      b.used_gangs[up] := b.used_gangs[up] + u.gangs;
      b.used_jobs[up] := b.used_jobs[up] + u.jobs;
      b.used_gpus[up] := b.used_gpus[up] + u.gpus;
      b.used_memory[up] := b.used_memory[up] + u.memory;
      b.used_mcpus[up] := b.used_mcpus[up] + u.mcpus;
      if per_submitter then
        said := up || '/' || u.submitter;
        b.usage_submitters := b.usage_submitters || jsonb_build_object(said, jsonb_build_object(
          'gangs', coalesce((b.usage_submitters -> said ->> 'gangs')::bigint, 0) + u.gangs,
          'jobs', coalesce((b.usage_submitters -> said ->> 'jobs')::bigint, 0) + u.jobs,
          'gpus', coalesce((b.usage_submitters -> said ->> 'gpus')::bigint, 0) + u.gpus));
      end if;
      up := b.queue_parent[up];
    end loop;
  end loop;
  return b;
end $$;
comment on function gangq.look_at_usage is 'Internal. What each queue holds, children included: counted over all that is placed.';

-- What is to be moved: whole gangs that are placed, with a member on what is drained, and solo jobs that run there. Also
-- who has not begun: it would load a model there only to be told to stop a moment later.
create function gangq.look_at_moves(b gangq.board) returns gangq.board language plpgsql stable as $$
#variable_conflict use_column
declare
  drained bigint[] := array(
    select i.id from gangq.cordons c join gangq.incarnations i on case c.kind when 'host' then i.host else i.name end = c.name
    where c.drain and i.ended_at is null);
begin
  if drained = '{}' then
    return b;
  end if;
  select array_agg(m.unit order by m.unit desc), array_agg(m.kind_id order by m.unit desc), array_agg(m.shape_id order by m.unit desc),
    array_agg(m.counts order by m.unit desc)
  into b.move_units, b.move_kind, b.move_shape, b.move_counts
  from (
    select x.unit, g.kind_id, case when g.id is null then x.shape_id end as shape_id, (
      select jsonb_agg(z.members order by z.ordinal) from (
        select r.ordinal, count(k.id) as members
        from gangq.kind_roles r left join gangq.live_jobs k on k.gang_id = g.id and coalesce(k.role, 1) = r.ordinal
            and k.state in ('reserved', 'running')
        where r.kind_id = g.kind_id group by r.ordinal) z) as counts
    from (
      select coalesce(j.gang_id, -j.id) as unit, min(j.gang_id) as gang_id, min(j.shape_id) as shape_id
      from gangq.live_jobs j where j.incarnation = any (drained) and j.state in ('reserved', 'running')
      group by coalesce(j.gang_id, -j.id)) x
    join gangq.shapes s on s.id = x.shape_id left join gangq.live_gangs g on g.id = x.gang_id
    -- What is paused could not start elsewhere, nor could a gang of which a member is done. One that replaces a member is
    -- moved when it is whole.
    where b.queue_open[array_position(b.queue_names, s.queue)] and (x.gang_id is null or g.missing_since is null and g.world_size = (
      select count(*) from gangq.live_jobs k where k.gang_id = g.id and k.state in ('reserved', 'running')))) m;
  return b;
end $$;
comment on function gangq.look_at_moves is 'Internal. What runs, or is about to, on hosts and workers that are drained and could run elsewhere.';

-- What waits: of each kind as many as a pass may place, and gangs that run and wait for replacements of single members.
create function gangq.look_at_gangs(b gangq.board, most integer) returns gangq.board language plpgsql stable as $$
#variable_conflict use_column
declare
  ids bigint[]; of_kind integer[]; running boolean[]; priorities integer[]; order_keys bigint[]; submitters text[]; budgets real[];
  kinds integer[];
  alone integer[];
begin
  with recursive kinds(id) as (
    (select x.kind_id from gangq.live_gangs x where x.state = 'blocked' order by x.kind_id limit 1)
    union all
    select (select x.kind_id from gangq.live_gangs x where x.state = 'blocked' and x.kind_id > k.id order by x.kind_id limit 1)
    from kinds k where k.id is not null
  )
  -- One kind after another by its index: how many wait makes no difference to what is read.
  select array_agg(g.id), array_agg(g.kind_id), array_agg(g.running), array_agg(g.priority), array_agg(g.order_key), array_agg(g.submitter), array_agg(g.budget_s)
  into ids, of_kind, running, priorities, order_keys, submitters, budgets
  from (
    select w.*
    from kinds k
    cross join lateral (
      select b.queue_policy[array_position(b.queue_names, y.queue)] = 'fifo' as by_age from gangq.gang_kinds y where y.id = k.id) q
    cross join lateral (
      (select x.id, x.kind_id, false as running, x.priority::integer as priority, x.order_key, x.submitter, x.budget_s
      from gangq.live_gangs x
      where not q.by_age and x.state = 'blocked' and x.kind_id = k.id and (x.not_before is null or x.not_before <= b.t)
      order by x.order_key limit look_at_gangs.most)
      union all
      (select x.id, x.kind_id, false, x.priority, x.order_key, x.submitter, x.budget_s
      from gangq.live_gangs x
      where q.by_age and x.state = 'blocked' and x.kind_id = k.id and (x.not_before is null or x.not_before <= b.t)
      order by x.order_key & 1125899906842623 limit look_at_gangs.most)) w
    union all
    select x.id, x.kind_id, true, x.priority, x.order_key, x.submitter, x.budget_s from gangq.live_gangs x
    where x.state = 'running' and x.missing_since is not null and (x.not_before is null or x.not_before <= b.t) and exists (
      select 1 from gangq.live_jobs j where j.gang_id = x.id and j.state = 'blocked' and gangq.in_epoch(j, x))) g;
  b := gangq.look_at_moves(b);
  kinds := array(select k from unnest(of_kind) as k union select k from unnest(b.move_kind) as k where k is not null order by 1);
  alone := array(select s from unnest(b.move_shape) as s where s is not null);
  if ids is null and b.move_units is null then
    return b;
  end if;
  b.shape_ids := array(
    select r.shape_id from gangq.kind_roles r where r.kind_id = any (kinds) union select s from unnest(alone) as s order by 1);
  select array_agg(r.name order by r.kind_id, r.ordinal), array_agg(array_position(b.shape_ids, r.shape_id) order by r.kind_id, r.ordinal),
    array_agg(r.min_members order by r.kind_id, r.ordinal), array_agg(r.max_members order by r.kind_id, r.ordinal),
    array_agg(r.strategy order by r.kind_id, r.ordinal), array_agg(gangq.required_level(b.levels, r.require) order by r.kind_id, r.ordinal),
    array_agg(coalesce(array_position(b.levels, r.prefer), 0) order by r.kind_id, r.ordinal), array_agg(r.balanced order by r.kind_id, r.ordinal)
  into b.role_names, b.role_shape, b.role_min, b.role_max, b.role_strategy, b.role_require, b.role_prefer, b.role_balanced
  from gangq.kind_roles r
  where r.kind_id = any (kinds);
  select array_agg(k.id order by k.id), array_agg(array_position(b.queue_names, k.queue) order by k.id),
    array_agg(gangq.required_level(b.levels, k.require) order by k.id),
    array_agg(coalesce(array_position(b.levels, k.prefer), 0) order by k.id), array_agg(k.apart order by k.id),
    array_agg(k.first_role order by k.id), array_agg(k.roles order by k.id)
  into b.kind_ids, b.kind_queue, b.kind_require, b.kind_prefer, b.kind_apart, b.kind_first_role, b.kind_roles
  from (
    select x.*, r.roles, (sum(r.roles) over (order by x.id) - r.roles + 1)::integer as first_role
    from gangq.gang_kinds x
    cross join lateral (select count(*)::integer as roles from gangq.kind_roles y where y.kind_id = x.id) r
    where x.id = any (kinds)) k;
  select array_agg(s.gpus::integer order by s.id), array_agg(s.vram_mb order by s.id), array_agg(s.memory_mb order by s.id),
    array_agg((s.cpus * 1000)::bigint order by s.id), array_agg(to_jsonb(s.avoid) order by s.id)
  into b.shape_gpus, b.shape_vram, b.shape_memory, b.shape_mcpus, b.shape_avoid
  from gangq.shapes s where s.id = any (b.shape_ids);
  b.move_kind := array(select array_position(b.kind_ids, m.kind) from unnest(b.move_kind) with ordinality as m(kind, n) order by m.n);
  b.move_shape := array(select array_position(b.shape_ids, m.shape) from unnest(b.move_shape) with ordinality as m(shape, n) order by m.n);
  with found as materialized (
    select * from unnest(ids, of_kind, running, priorities, order_keys, submitters, budgets)
      as f(id, kind_id, running, priority, order_key, submitter, budget_s)
  ),
  estimates as materialized (
    select z.kind_id, z.budget_s, (
      select max(gangq.estimate_s(s.queue, s.task, s.gpus::integer, z.budget_s))::float8
      from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id where r.kind_id = z.kind_id) as s
    from (select distinct f.kind_id, f.budget_s from found f) z
  ),
  escrows as materialized (
    select distinct x.gang_id from gangq.earmarks x where x.kind = 'escrow' and x.until > b.t
  )
  select array_agg(x.id), array_agg(x.kind), array_agg(x.priority), array_agg(x.order_key), array_agg(x.submitter), array_agg(x.estimate),
    array_agg(x.missing), array_agg(x.mates), array_agg(x.preempting)
  into b.gang_ids, b.gang_kind, b.gang_priority, b.gang_order_key, b.gang_submitter, b.gang_estimate, b.gang_missing, b.gang_anchor, b.gang_preempting
  from (
    select f.id, k.n::integer as kind, f.priority, f.order_key, f.submitter, e.s as estimate,
      case when f.running then (
        select jsonb_agg(y.missing order by y.ordinal) from (
          select r.ordinal, count(j.id) as missing
          from gangq.live_gangs g join gangq.kind_roles r on r.kind_id = g.kind_id
          left join gangq.live_jobs j on j.gang_id = g.id and coalesce(j.role, 1) = r.ordinal and j.state = 'blocked' and gangq.in_epoch(j, g)
          where g.id = f.id group by r.ordinal) y) end as missing,
      case when f.running then (
        select jsonb_agg(y.mates order by y.ordinal) from (
          select r.ordinal, coalesce(jsonb_agg(j.incarnation order by j.incarnation) filter (where j.id is not null), '[]') as mates
          from gangq.kind_roles r left join gangq.live_jobs j on j.gang_id = f.id and coalesce(j.role, 1) = r.ordinal and j.incarnation is not null
          where r.kind_id = f.kind_id group by r.ordinal) y) end as mates,
      f.id in (select x.gang_id from escrows x) as preempting
    from found f
    join unnest(b.kind_ids) with ordinality as k(id, n) on k.id = f.kind_id
    join estimates e on e.kind_id = f.kind_id and coalesce(e.budget_s, -1) = coalesce(f.budget_s, -1)
    order by f.order_key, f.id) x;
  return b;
end $$;
comment on function gangq.look_at_gangs is 'Internal. Gangs that wait, of each kind the first so many, their kinds, roles and shapes.';

create function gangq.domain_part(name text) returns text language sql immutable as
$$ select replace(replace(domain_part.name, '\', '\\'), '/', '\/') $$;
comment on function gangq.domain_part is 'Internal. The name of a domain as a part of a path: rack b of zone a/ is not rack /b of zone a.';

create function gangq.look_at_workers(b gangq.board, sample integer default null) returns gangq.board language plpgsql stable as $$
#variable_conflict use_column
declare
  -- Not called queues: that would be the column of incarnations wherever it is asked for.
  wanted text[] := array(
    select b.queue_names[k] from unnest(b.kind_queue) as k
    union select s.queue from gangq.shapes s where s.id in (select b.shape_ids[m] from unnest(b.move_shape) as m));
  named boolean := exists (
    select 1 from gangq.shapes s, jsonb_array_elements(s.selector) c
    where s.id = any (b.shape_ids) and c.value ->> 'key' in ('host', 'worker'));
  examples bigint[];
  among bigint[];  -- null: all
  open bigint[];
begin
  if look_at_workers.sample is not null then
    -- Where something runs already a small gang fits tightest; then those that have been there longest.
    among := array(
      select h.incarnation from (
        select distinct j.incarnation from (select z.incarnation from gangq.live_jobs z where z.incarnation is not null limit 4 * look_at_workers.sample) j
        limit look_at_workers.sample) h
      union
      select n.id from (
        select i.id from gangq.incarnations i where i.ended_at is null and i.queues && wanted order by i.id limit look_at_workers.sample) n);
  end if;
  open := gangq.candidates(b.t, among);
  -- Sorted once, then aggregated as it comes.
  with live as materialized (
    select i.id, i.name, i.host, i.slots, i.memory_mb, (i.cpus * 1000)::bigint as mcpus, i.prefetch, i.queues, coalesce(i.tasks, '{*}') as tasks,
      i.labels, i.taints, case when named then i.name else '' end as who
    from gangq.incarnations i
    where i.ended_at is null and i.queues && wanted and (among is null or i.id = any (among))
  ),
  -- Who offers the same is a class. By windows: how many rows a join on all of that gives is anybody's guess.
  classed as materialized (
    select x.*, (dense_rank() over (order by x.example))::integer as class
    from (select l.*, min(l.id) over (partition by l.queues, l.tasks, l.labels, l.taints, l.who) as example from live l) x
  ),
  used as (
    select j.incarnation, count(*) filter (where not s.plain or j.gang_id is not null) as whole,
      count(*) filter (where s.plain and j.gang_id is null) as plain, sum(s.memory_mb)::bigint as memory, (sum(s.cpus) * 1000)::bigint as mcpus
    from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
    where j.incarnation = any (array(select l.id from live l)) group by j.incarnation
  ),
  w as (
    select l.id, l.name, l.slots, l.memory_mb, l.mcpus, l.class, o.id is not null as open,
      (l.slots - coalesce(u.whole + ceil(u.plain::float8 / l.prefetch), 0))::integer as free_slots,
      l.memory_mb - coalesce(u.memory, 0) as free_memory, l.mcpus - coalesce(u.mcpus, 0) as free_mcpus,
      (dense_rank() over (order by l.host))::integer as host
    from classed l
    left join unnest(open) as o(id) on o.id = l.id
    left join used u on u.incarnation = l.id
    order by l.host, l.id
  )
  select array_agg(w.id), array_agg(w.name), array_agg(w.host), array_agg(w.open), array_agg(w.class), array_agg(w.free_slots),
    array_agg(w.free_memory), array_agg(w.free_mcpus), array_agg(w.slots), array_agg(w.memory_mb), array_agg(w.mcpus),
    (select array_agg(distinct c.example order by c.example) from classed c)
  into b.worker_ids, b.worker_names, b.worker_host, b.worker_open, b.worker_class, b.free_slots, b.free_memory, b.free_mcpus,
    b.all_slots, b.all_memory, b.all_mcpus, examples
  from w;
  b.classes := coalesce(cardinality(examples), 0);
  if b.classes = 0 then
    b.worker_ids := '{}';
    return b;
  end if;
  select array_agg(h.host), array_agg(h.first) into b.hosts, b.host_first
  from (
    select i.host, h.first
    from (select w.host, min(w.n)::integer as first from unnest(b.worker_host) with ordinality as w(host, n) group by w.host) h
    join gangq.incarnations i on i.id = b.worker_ids[h.first]
    order by h.host) h;
  b.host_first := b.host_first || (cardinality(b.worker_ids) + 1);
  -- A domain is named with the broader ones it lies in: rack 1 of zone a is not rack 1 of zone b.
  if cardinality(b.levels) > 1 then
    select array_agg(x.path order by x.n, x.level) into b.worker_domains
    from (
      select w.n, l.level, case
        when b.levels[l.level] = 'host' then i.host
        when bool_or(b.levels[m.level] <> 'host' and coalesce(i.labels ->> b.levels[m.level], '') = '') then null
        else string_agg(gangq.domain_part(case b.levels[m.level] when 'host' then i.host else i.labels ->> b.levels[m.level] end), '/' order by m.level) end as path
      from unnest(b.worker_ids) with ordinality as w(id, n) join gangq.incarnations i on i.id = w.id
      cross join generate_series(1, cardinality(b.levels)) as l(level)
      join generate_series(1, cardinality(b.levels)) as m(level) on m.level <= l.level
      group by w.n, l.level, i.host, i.labels) x;
  end if;
  select array_agg(gangq.serves(i, s) order by s.id, c.n) into b.shape_serves
  from gangq.shapes s cross join unnest(examples) with ordinality as c(id, n) join gangq.incarnations i on i.id = c.id
  where s.id = any (b.shape_ids);
  select array_agg(d.id), array_agg(d.worker), array_agg(d.vram_mb), array_agg(d.held)
  into b.device_ids, b.device_worker, b.device_vram, b.device_held
  from (
    select r.id, w.n::integer as worker, r.vram_mb, case when h.device_id is null then 0 else coalesce(h.job_id, -1) end as held
    from gangq.device_registry r join unnest(b.worker_ids) with ordinality as w(id, n) on w.id = r.offered_by
    left join gangq.device_holds h on h.device_id = r.id
    order by w.n, r.vram_mb, r.index, r.id) d;
  select array_agg(f.first) into b.device_first
  from (
    select (1 + coalesce(sum(d.devices) over (order by w.n rows between unbounded preceding and 1 preceding), 0))::integer as first
    from generate_series(1, cardinality(b.worker_ids) + 1) as w(n)
    left join (select x.w, count(*) as devices from unnest(b.device_worker) as x(w) group by x.w) d on d.w = w.n
    order by w.n) f;
  return b;
end $$;
comment on function gangq.look_at_workers is
  'Internal. Live workers of the queues in which something waits, what they have free, which shapes each class of them serves.';

-- What is placed, until when, and what stopping it would cost. Ends are estimates: what has outrun its own ends when its
-- budget does, and what has outrun that too, soon.
create function gangq.look_at_work(b gangq.board, priced boolean default true) returns gangq.board language plpgsql stable as $$
#variable_conflict use_column
declare
  lowest integer;
  -- Of elastic gangs that go on without a member, those above the minimum of their role, the last ranks.
  surplus bigint[] := array(
    select m.id
    from (
      select j.id, r.min_members, row_number() over (partition by g.id, r.ordinal order by coalesce(j.epoch_rank, j.rank)) as nth
      from gangq.live_gangs g join gangq.live_jobs j on j.gang_id = g.id and j.state = 'running'
      join gangq.kind_roles r on r.kind_id = g.kind_id and r.ordinal = coalesce(j.role, 1)
      where g.state = 'running' and g.failure_policy = 'shrink' and g.missing_since is null
        and g.world_size = (select count(*) from gangq.live_jobs k where k.gang_id = g.id and k.state = 'running')) m
    where m.nth > m.min_members);
begin
  select array_agg(x.unit), array_agg(x.job), array_agg(x.worker), array_agg(x.slots), array_agg(x.memory), array_agg(x.mcpus),
    array_agg(x.gpus), array_agg(x.ends), min(x.priority)
  into b.held_unit, b.held_job, b.held_worker, b.held_slots, b.held_memory, b.held_mcpus, b.held_gpus, b.held_ends, lowest
  from (
    -- One estimate for all that are alike.
    with placed as materialized (
      select j.id, j.gang_id, j.state, j.told_at, j.claimed_at, j.budget_s, j.priority, w.n::integer as worker, j.shape_id
      from unnest(b.worker_ids) with ordinality as w(id, n) join gangq.live_jobs j on j.incarnation = w.id
    ),
    estimates as materialized (
      select k.shape_id, k.budget_s, gangq.estimate_s(s.queue, s.task, s.gpus::integer, k.budget_s) as s,
        coalesce(k.budget_s, case when s.gpus > 0 then c.budget_gpu_s else c.budget_s end) as most, s.plain
      from (select distinct p.shape_id, p.budget_s from placed p) k join gangq.shapes s on s.id = k.shape_id cross join gangq.settings c
    )
    -- A member that leaves a gang which goes on without it, or could, is a unit of its own.
    select case when j.gang_id is null or j.state = 'preempting' and g.state = 'running' or j.id = any (surplus) then -j.id else j.gang_id end as unit, j.id as job, j.worker, 1 as slots, s.memory_mb as memory,
      (s.cpus * 1000)::bigint as mcpus, s.gpus::integer as gpus,
      case
        when j.state = 'preempting' then greatest(j.told_at + make_interval(secs => c.grace_s), b.t + interval '1 s')
        else (
          select case when z.from_at + make_interval(secs => e.s) > b.t then z.from_at + make_interval(secs => e.s)
            else greatest(z.from_at + make_interval(secs => e.most), b.t + interval '30 s') end
          from (select coalesce(g.go_at, case when j.gang_id is null then j.claimed_at end, b.t) as from_at) z) end as ends, j.priority
    from placed j join estimates e on e.shape_id = j.shape_id and e.budget_s is not distinct from j.budget_s
    join gangq.shapes s on s.id = j.shape_id left join gangq.live_gangs g on g.id = j.gang_id cross join gangq.settings c
    where not (e.plain and j.gang_id is null)
    union all
    -- Plain jobs share slots: together they are as many slots as they take, until the last of them ends.
    select 0, 0, j.worker, ceil(sum(j.jobs)::numeric / max(i.prefetch))::integer, 0, 0, 0,
      max(greatest(j.claimed_at + make_interval(secs => e.s), b.t + interval '1 s')), null
    from (
      select p.worker, p.shape_id, p.budget_s, count(*) as jobs, max(p.claimed_at) as claimed_at
      from placed p where p.gang_id is null group by p.worker, p.shape_id, p.budget_s) j
    join estimates e on e.shape_id = j.shape_id and e.budget_s is not distinct from j.budget_s
    join gangq.incarnations i on i.id = b.worker_ids[j.worker]
    where e.plain
    group by j.worker
    order by 1, 2, 3) x;
  -- Where nothing that is placed could make room for anything that waits, or move, no cost is told.
  if priced or b.move_units is not null or exists (select 1 from unnest(b.queue_guaranteed) as q where q is not null) or lowest < (
    select max(g.priority) from unnest(b.gang_priority, b.gang_kind) as g(priority, kind) where b.queue_preempts[b.kind_queue[g.kind]]) then
    with units as materialized (
      select distinct u.unit from unnest(b.held_unit) as u(unit) where u.unit <> 0
    )
    select array_agg(u.id), array_agg(array_position(b.queue_names, u.queue)), array_agg(u.submitter), array_agg(u.priority),
      array_agg(u.movable), array_agg(u.leaving), array_agg(u.lost), array_agg(u.since)
    into b.unit_ids, b.unit_queue, b.unit_submitter, b.unit_priority, b.unit_movable, b.unit_leaving, b.unit_lost, b.unit_since
    from (
      select j.unit as id, min(s.queue) as queue, min(j.submitter) as submitter, min(j.priority)::integer as priority,
        -- All of it runs (a gang of which a member is done could not run again), and stopping once more would not end it.
        bool_and(j.state = 'running') and (j.unit < 0 or count(*) + (select count(*) from gangq.live_jobs z where z.gang_id = j.unit and z.id = any (surplus)) = max(g.world_size)) and bool_and(j.stops < c.max_stops)
          and bool_and(coalesce(g.preemptible, true) and q.preemptible)
          and bool_and(coalesce(g.go_at, case when j.gang_id is null then j.claimed_at end) <= b.t - make_interval(secs => q.min_run_s)) as movable,
        bool_and(j.state = 'preempting') as leaving, min(coalesce(g.go_at, j.claimed_at, b.t)) as since,
        sum(greatest(s.gpus, 1) * extract(epoch from b.t - greatest(coalesce(g.go_at, j.claimed_at, b.t), (
          select max(p.saved_at) from gangq.checkpoints p
          where p.job_id = coalesce((select z.id from gangq.live_jobs z where z.gang_id = j.gang_id and z.rank = 0 and g.checkpoint_mode = 'rank0'), j.id)))))::float8 as lost
      from (
        -- Each by its own index.
        select z.unit, j.* from units z join gangq.live_jobs j on j.gang_id = z.unit
        union all
        select z.unit, j.* from units z join gangq.live_jobs j on j.id = -z.unit) j
      join gangq.shapes s on s.id = j.shape_id join gangq.queues_table q on q.name = s.queue left join gangq.live_gangs g on g.id = j.gang_id
      cross join gangq.settings c
      where j.incarnation is not null and (j.unit < 0 or j.id <> all (surplus) and (j.state <> 'preempting' or g.state <> 'running'))
      group by j.unit
      order by 1) u;
  end if;
  select array_agg(e.gang_id order by e.gang_id, w.n), array_agg(w.n::integer order by e.gang_id, w.n), array_agg(e.slots order by e.gang_id, w.n),
    array_agg(e.memory_mb order by e.gang_id, w.n), array_agg((e.cpus * 1000)::bigint order by e.gang_id, w.n), array_agg(e.gpus order by e.gang_id, w.n)
  into b.escrow_gang, b.escrow_worker, b.escrow_slots, b.escrow_memory, b.escrow_mcpus, b.escrow_gpus
  from gangq.earmarks e join unnest(b.worker_ids) with ordinality as w(id, n) on w.id = e.incarnation
  where e.kind = 'escrow' and e.until > b.t;
  select array_agg(x.apart order by x.apart, x.host, x.gang), array_agg(x.host order by x.apart, x.host, x.gang),
    array_agg(x.gang order by x.apart, x.host, x.gang)
  into b.apart_keys, b.apart_hosts, b.apart_gangs
  from (
    select distinct k.apart, b.worker_host[w.n] as host, g.id as gang
    from gangq.gang_kinds k join gangq.live_gangs g on g.kind_id = k.id join gangq.live_jobs j on j.gang_id = g.id
    join unnest(b.worker_ids) with ordinality as w(id, n) on w.id = j.incarnation
    where k.apart = any (b.kind_apart)) x;
  return b;
end $$;
comment on function gangq.look_at_work is
  'Internal. What is placed on the workers of the board, estimated ends, cost of stopping it (unless not priced: only if something could be displaced); escrows; hosts of gangs to be kept apart from.';

create function gangq.look(most integer default 200, sample integer default null) returns gangq.board language plpgsql stable set plan_cache_mode = auto as $$
declare
  b gangq.board;
begin
  -- A generic plan suits three hosts and three gangs, and takes seconds for thousands: many are worth planning for each time.
  if look.sample is null and (select count(*) from (select 1 from gangq.incarnations i where i.ended_at is null limit 129) x) > 128
    or (select count(*) from (select 1 from gangq.live_gangs g where g.state = 'blocked' limit 129) x) > 128 then
    perform set_config('plan_cache_mode', 'force_custom_plan', true);
  end if;
  b.t := gangq.now();
  select s.reservations, s.preemptions_per_pass, s.grace_s, s.topology into b.reservations, b.preemptions, b.grace_s, b.levels from gangq.settings s;
  if not exists (select 1 from gangq.live_gangs g where g.state = 'blocked')
    and not exists (select 1 from gangq.live_gangs g where g.state = 'running' and g.missing_since is not null)
    and not exists (select 1 from gangq.cordons c where c.drain) then
    return b;
  end if;
  -- A pass that may place fewer than have a planned start renews the others' all the same.
  b := gangq.look_at_gangs(gangq.look_at_queues(b), greatest(look.most, b.reservations));
  if b.gang_ids is null and b.move_units is null then
    return b;
  end if;
  -- Counting what is placed is worth it where it decides something: a limit, a guarantee, whose turn it is.
  if (select count(distinct k) from unnest(b.kind_queue) as k) > 1 or 'fair' = any (b.queue_policy) or exists (
    select 1 from unnest(b.queue_maximum, b.queue_guaranteed, b.queue_submitter_maximum, b.queue_max_gangs, b.queue_max_jobs) as l(a, b, c, d, e)
    where num_nonnulls(l.a, l.b, l.c, l.d, l.e) > 0) then
    b := gangq.look_at_usage(b);
  end if;
  b := gangq.look_at_workers(b, look.sample);
  if b.worker_ids <> '{}' then
    b := gangq.look_at_work(b, priced => false);
  end if;
  return b;
end $$;
comment on function gangq.look is
  'Internal. The board as it is now, in the snapshot of the query that calls it, with at most so many gangs of each kind. '
  'sample: not all workers, but about so many. gang_ids is null when nothing waits, move_units when nothing is to be moved.';
