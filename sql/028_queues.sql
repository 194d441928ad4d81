-- Queues: a tree by name (a.b is a child of a), what is placed in it, and the limits on that.
-- Locks: a transaction that places work in a queue with limits locks, after the worker rows, that
-- queue and those of its ancestors that have limits, by name. Then it counts, then it places: so no
-- committed state is above a maximum. What gives back locks nothing here.

-- Internal. A queue and its ancestors that exist, itself first.
create function gangq.queue_path(name text) returns text[] language sql stable as $$
  select coalesce(array_agg(q.name order by length(q.name) desc), '{}')
  from (select string_to_array(queue_path.name, '.') as parts offset 0) p
  cross join lateral generate_series(1, cardinality(p.parts)) n
  join gangq.queues_table q on q.name = array_to_string(p.parts[1:n], '.')
$$;

-- Internal. Whether a queue is one of these or below one of them.
create function gangq.below(queue text, names text[]) returns boolean language sql immutable as $$
  select exists (
    select 1 from unnest(names) as a(name)
    where queue = a.name or starts_with(queue, a.name || '.'))
$$;

-- Internal. What is placed (reserved, running, preempting, open places) in each of these queues and
-- their children, by submitter. Placed jobs are found worker by worker: a condition on incarnation
-- alone would read the whole backlog whenever the table's statistics are older than it. A job is
-- only ever placed on a worker that serves its queue.
create function gangq.queue_usage(names text[])
returns table (
  queue text, gangs bigint, jobs bigint, gpus bigint, memory_mb bigint, cpus numeric,
  submitter text
) language sql stable as $$
  with serving as materialized (
    select i.id from gangq.incarnations i
    where i.queues && array(
      select q.name from gangq.queues_table q where gangq.below(q.name, queue_usage.names))
  ),
  held as (
    select j.shape_id, j.submitter, j.gang_id, count(*) as jobs
    from gangq.live_jobs j
    where j.incarnation = any (array(select w.id from serving w))
    group by j.shape_id, j.submitter, j.gang_id
    union all
    select p.shape_id, z.submitter, null, count(*)
    from gangq.places p join gangq.shapes z on z.id = p.shape_id
    where p.job_id is null and p.incarnation in (select w.id from serving w)
    group by p.shape_id, z.submitter
  )
  select n.name, count(distinct h.gang_id), sum(h.jobs)::bigint, sum(h.jobs * s.gpus)::bigint,
    sum(h.jobs * s.memory_mb)::bigint, sum(h.jobs * s.cpus), h.submitter
  from held h
  join gangq.shapes s on s.id = h.shape_id
  join unnest(queue_usage.names) as n(name)
    on s.queue = n.name or starts_with(s.queue, n.name || '.')
  group by n.name, h.submitter
$$;

-- Internal. Every limit set on these queues themselves, one row each.
create function gangq.limits_of(names text[])
returns table (
  queue text, gate text, setting text, resource text, by_submitter boolean, most numeric
) language sql stable as $$
  select q.name, l.gate, l.setting, l.resource, l.gate = 'submitter_limit', l.most
  from gangq.queues_table q
  cross join lateral (
    select 'quota', 'maximum', m.key, m.value::numeric
    from jsonb_each_text(q.maximum) m
    union all
    select 'running_limit', 'max_running_' || r.resource, r.resource, r.most
    from (values ('gangs', q.max_running_gangs), ('jobs', q.max_running_jobs)) as r(resource, most)
    where r.most is not null
    union all
    select 'submitter_limit', 'submitter_maximum', m.key, m.value::numeric
    from jsonb_each_text(q.submitter_maximum) m
  ) as l(gate, setting, resource, most)
  where q.limited and q.name = any (limits_of.names)
$$;

-- Internal. How much of the resource that a limit counts. A resource that has no branch here is an
-- error, and no limit that never counts.
create function gangq.amount_of(
  resource text, gangs bigint, jobs bigint, gpus bigint, memory_mb bigint, cpus numeric
) returns numeric language plpgsql immutable as $$
begin
  case resource
    when 'gangs' then return gangs;
    when 'jobs' then return jobs;
    when 'gpus' then return gpus;
    when 'memory_mb' then return memory_mb;
    when 'cpus' then return cpus;
  end case;
end $$;

-- Internal. Locks the queues on the paths of these that have a limit, then limit keys, by name, so
-- that no other transaction places such work until this one ends. Count in a later statement.
create function gangq.lock_limited(names text[], keys text[]) returns void
language plpgsql as $$
begin
  perform 1 from gangq.queues_table q
  where q.limited and q.name = any (array(
    select p.name
    from unnest(lock_limited.names) as n(name)
    cross join lateral unnest(gangq.queue_path(n.name)) as p(name)))
  order by q.name for no key update;
  perform 1 from gangq.limit_keys k where k.name = any (keys) order by k.name for no key update;
end $$;

-- Internal. The first limit on the path of a queue that so much more would break: {"gate": quota,
-- running_limit or submitter_limit, "queue", "resource", "limit", "used", "asked"}; null: none. A
-- resource of which null is asked: whether more of it is used than the limit. Binding only after
-- lock_limited.
create function gangq.limit_hit(
  queue text, submitter text, gangs integer, jobs integer, gpus bigint, memory_mb bigint,
  cpus numeric
) returns jsonb language sql stable as $$
  with limits as materialized (
    select l.*, gangq.amount_of(l.resource, limit_hit.gangs, limit_hit.jobs, limit_hit.gpus,
      limit_hit.memory_mb, limit_hit.cpus) as asked
    from gangq.limits_of(gangq.queue_path(limit_hit.queue)) l
  ),
  usage as (
    select u.* from gangq.queue_usage(array(select distinct l.queue from limits l)) u
    where exists (select 1 from limits)
  )
  select jsonb_build_object('gate', h.gate, 'queue', h.queue, 'resource', h.resource,
    'limit', h.most, 'used', h.used, 'asked', h.asked)
  from (
    select l.*, (
      select coalesce(
        sum(gangq.amount_of(l.resource, u.gangs, u.jobs, u.gpus, u.memory_mb, u.cpus)), 0)
      from usage u
      where u.queue = l.queue and (not l.by_submitter or u.submitter = limit_hit.submitter)) as used
    from limits l
    where l.asked is distinct from 0) h
  where h.used + coalesce(h.asked, 0) > h.most
  order by length(h.queue) desc, h.gate, h.resource limit 1
$$;

-- Settings ----------------------------------------------------------------------------------------

-- What a queue is guaranteed, or may hold at most.
create type gangq.resources as (
  gpus gangq.whole,
  memory_mb gangq.whole,
  cpus gangq.amount,
  jobs gangq.whole
);

-- What one submitter may hold at most.
create type gangq.submitter_resources as (
  gpus gangq.whole,
  jobs gangq.whole,
  gangs gangq.whole
);

-- Internal. A queue with these settings changed. Raises GQ001.
create function gangq.read_queue(name text, settings jsonb, q gangq.queues_table)
returns gangq.queues_table language plpgsql stable as $$
declare
  what text := format('queue %L', name);
  wrong record;
begin
  q := gangq.read_options(what, settings, q);
  q.guaranteed := jsonb_strip_nulls(to_jsonb(gangq.read_options(what || ': guaranteed',
    q.guaranteed, null::gangq.resources)));
  q.maximum := jsonb_strip_nulls(to_jsonb(gangq.read_options(what || ': maximum', q.maximum,
    null::gangq.resources)));
  q.submitter_maximum := jsonb_strip_nulls(to_jsonb(gangq.read_options(
    what || ': submitter_maximum', q.submitter_maximum, null::gangq.submitter_resources)));
  select e.key, e.value, exists (select from pg_roles r where r.rolname = e.key) as known into wrong
  from jsonb_each(q.ceilings) e
  where case when jsonb_typeof(e.value) = 'number' then e.value::numeric % 1 <> 0
      or e.value::numeric not between -1000 and 1000 else true end
    or not exists (select from pg_roles r where r.rolname = e.key)
  order by e.key limit 1;
  if found then
    perform gangq.refuse('GQ001',
      case when wrong.known
        then format('%s: the ceiling of %L is %s', what, left(wrong.key, 100),
          left(wrong.value::text, 100))
        else format('%s: ceilings names %L, which is no role', what, left(wrong.key, 100)) end,
      'Give a priority, -1000 to 1000, by login or role of this server: {"alice": 100, '
      '"gangq_submitter": 10}, where gangq_submitter stands for every submitter.');
  end if;
  if settings ->> 'paused_until' is not null then
    perform gangq.check_moment('paused_until', q.paused_until);
    if q.paused_until <= gangq.now() then
      perform gangq.refuse('GQ001', format('%s: paused_until is %s, which is over', what,
        q.paused_until), 'Give a time to come, or {"paused": false}.');
    elsif settings -> 'paused' = 'false' then
      perform gangq.refuse('GQ001', format('%s: paused_until is for a queue that is paused', what),
        'Leave paused or paused_until out.');
    end if;
    q.paused := true;
  elsif settings ? 'paused' then
    q.paused_until := null;
  end if;
  return q;
end $$;

-- Internal. Raises GQ001 where this queue, or the children together of one of these queues, are
-- guaranteed more than their maximum.
create function gangq.check_guarantees(n gangq.queues_table, names text[]) returns void
language plpgsql stable as $$
declare
  broken record;
begin
  select g.key, g.value::numeric as guaranteed, n.maximum ->> g.key as maximum into broken
  from jsonb_each_text(n.guaranteed) g
  where g.value::numeric > (n.maximum ->> g.key)::numeric limit 1;
  if found then
    perform gangq.refuse('GQ001',
      format('queue %L: %s %s are guaranteed and %s is the maximum',
        n.name, broken.guaranteed, broken.key, broken.maximum),
      'Guarantee no more than the maximum, or raise the maximum in the same call.');
  end if;
  select p.name, g.key, sum(g.value::numeric) as guaranteed, p.maximum ->> g.key as maximum
  into broken
  from gangq.queues_table p
  join gangq.queues_table c
    on c.name like '%.%' and substring(c.name from '^(.*)\.[^.]*$') = p.name
  cross join lateral jsonb_each_text(c.guaranteed) g
  where p.name = any (names) and p.maximum ? g.key
  group by p.name, g.key, p.maximum
  having sum(g.value::numeric) > (p.maximum ->> g.key)::numeric limit 1;
  if found then
    perform gangq.refuse('GQ001',
      format('the children of queue %L are guaranteed %s %s, and its maximum is %s',
        broken.name, broken.guaranteed, broken.key, broken.maximum),
      'Guarantee the children less, or raise the maximum of their parent first.');
  end if;
end $$;

-- Makes a queue, and its parents that are missing, or changes the settings that are given; a null
-- takes one away where there may be none: set_queue('gpu', '{"maximum": {"gpus": 8}, "budget_s":
-- null}'). paused: nothing new starts, until somebody or, at paused_until, a tick opens it again.
-- guaranteed, maximum: {"gpus", "memory_mb", "cpus", "jobs"}; submitter_maximum: {"gpus", "jobs",
-- "gangs"}; each replaces what was there. rate: so many starts in a period, 60/1m. A limit that is
-- already exceeded stops nothing that runs.
-- others: who may cancel, retry, reprioritise and read the work of others in it, owner (admins
-- only) or shared (all submitters). ceilings: the highest priority by role, {"alice": 100,
-- "gangq_submitter": 10}, here and in the queues below; the highest entry that applies counts, who
-- has none is not bound, nor are admins. For gangq_admin. Raises GQ001.
create function gangq.set_queue(name text, settings jsonb default '{}') returns void
language plpgsql as $$
declare
  limits constant text[] := '{maximum,max_running_gangs,max_running_jobs,submitter_maximum,rate}';
  parts text[] := string_to_array(name, '.');
  names text[];
  n gangq.queues_table;
begin
  if coalesce(name, '') = '' or length(name) > 100 then
    perform gangq.refuse('GQ001', 'a queue needs a name of 1 to 100 characters',
      'Call gangq.set_queue(''gpu'').');
  end if;
  if '' = any (parts) then
    perform gangq.refuse('GQ001', format('queue %L has an empty part in its name', name),
      'The dots of a name make a tree: a.b is a child of a.');
  end if;
  if settings ?| '{guaranteed,maximum}' then
    -- Compared with those of parent and children: an older snapshot would show older ones.
    perform gangq.require_read_committed('set_queue');
  end if;
  names := array(
    select array_to_string(parts[1:i], '.') from generate_series(1, cardinality(parts)) i);
  insert into gangq.queues_table (name)
  select x.name from unnest(names) as x(name) order by x.name on conflict do nothing;
  -- The whole path: what is guaranteed to children is compared with their parent's maximum.
  perform 1 from gangq.queues_table q where q.name = any (names) order by q.name for no key update;
  select q.* into n from gangq.queues_table q where q.name = set_queue.name;
  n := gangq.read_queue(name, settings, n);
  update gangq.queues_table q set (
    paused, paused_until, draining, policy, guaranteed, maximum, submitter_maximum,
    max_running_gangs, max_running_jobs, rate, full_at, weight, preempts, preemptible, min_run_s,
    placement_timeout_s, timeout_style, others, ceilings, max_attempts, max_crashes, max_trips,
    backoff_s, backoff_max_s, budget_s, max_payload_bytes, retention_done, retention_failed
  ) = (
    select n.paused, n.paused_until, n.draining, n.policy, n.guaranteed, n.maximum,
    n.submitter_maximum, n.max_running_gangs, n.max_running_jobs, n.rate,
    least(n.full_at, gangq.empty_until(n.rate)), n.weight, n.preempts,
    n.preemptible, n.min_run_s, n.placement_timeout_s, n.timeout_style, n.others, n.ceilings,
    n.max_attempts, n.max_crashes, n.max_trips, n.backoff_s, n.backoff_max_s, n.budget_s,
    n.max_payload_bytes, n.retention_done, n.retention_failed)
  where q.name = set_queue.name;
  perform gangq.check_guarantees(n, names);
  if settings -> 'paused' = 'false' or settings ?| limits then
    perform gangq.wake_below(array[set_queue.name]);
  end if;
  if n.paused_until is not null then
    perform gangq.wake_tick();  -- Which has to know when to come again.
  end if;
end $$;

-- Internal. Wakes who may start what waits in these queues and those below them.
create function gangq.wake_below(names text[]) returns void language plpgsql as $$
begin
  -- What may start now is below the queues, and workers that serve it may sleep.
  perform gangq.wake_sleepers(q.name, 64, 'commit') from gangq.queues_table q
  where gangq.below(q.name, names);
  perform gangq.wake_tick();
end $$;

-- Internal, a step of the tick. Opens the queues and tasks whose pause is over. Returns how many.
-- One statement for both: each tick runs it, and nearly always finds nothing.
create function gangq.end_pauses() returns integer language plpgsql as $$
declare
  opened text[];
  tasks text[];
begin
  with due as (
    select q.name from gangq.queues_table q
    where q.paused_until <= gangq.now() order by q.name for no key update skip locked
  ),
  ended as (
    update gangq.queues_table q set paused = false, paused_until = null
    from due where q.name = due.name
    returning q.name
  ),
  due_tasks as (
    select p.task from gangq.task_pauses p
    where p.until <= gangq.now() order by p.task for update skip locked
  ),
  resumed as (
    delete from gangq.task_pauses p using due_tasks d where p.task = d.task
    returning p.task
  )
  select (select array_agg(e.name) from ended e), (select array_agg(r.task) from resumed r)
  into opened, tasks;
  if opened is not null then
    perform gangq.wake_below(opened);
  end if;
  if tasks is not null then
    perform gangq.wake_tasks(tasks);
  end if;
  return coalesce(cardinality(opened), 0) + coalesce(cardinality(tasks), 0);
end $$;
