-- Queues: a tree by name (a.b is a child of a), what is placed in it, and the limits on that.
-- Locks: a transaction that places work in a queue with limits locks, after the worker rows, that
-- queue and those of its ancestors that have limits, by name. Then it counts, then it places: so no
-- committed state is above a maximum. What gives back locks nothing here.

-- Internal. A queue and its ancestors that exist, itself first.
create function gangq.queue_path(name text) returns text[] language plpgsql stable as $$
declare
  parts constant text[] := string_to_array(queue_path.name, '.');
begin
  return array(
    select q.name
    from generate_series(1, cardinality(parts)) n
    join gangq.queues_table q on q.name = array_to_string(parts[1:n], '.')
    order by length(q.name) desc);
end $$;

-- Internal. Whether a queue is one of these or below one of them.
create function gangq.below(queue text, names text[]) returns boolean language sql immutable as $$
  select exists (
    select 1 from unnest(names) as a(name)
    where queue = a.name or starts_with(queue, a.name || '.'))
$$;

-- Internal. What these workers hold, by shape: placed jobs (reserved, running, preempting) and open
-- places. Placed jobs are found worker by worker: a condition on incarnation alone would read the
-- whole backlog whenever the table's statistics are older than it.
create function gangq.held_by(incarnations bigint[])
returns table (shape_id integer, submitter text, gang_id bigint, jobs bigint)
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return query
  select j.shape_id, j.submitter, j.gang_id, count(*)
  from gangq.live_jobs j
  where j.incarnation = any (held_by.incarnations)
  group by j.shape_id, j.submitter, j.gang_id
  union all
  select p.shape_id, z.submitter, null, count(*)
  from gangq.places p join gangq.shapes z on z.id = p.shape_id
  where p.job_id is null and p.incarnation = any (held_by.incarnations)
  group by p.shape_id, z.submitter;
end $$;

-- Internal. What is placed in each of these queues and their children, by submitter. A job is only
-- ever placed on a worker that serves its queue.
create function gangq.queue_usage(names text[])
returns table (
  queue text, gangs bigint, jobs bigint, gpus bigint, memory_mb bigint, cpus numeric,
  submitter text
) language sql stable as $$
  select n.name, count(distinct h.gang_id), sum(h.jobs)::bigint, sum(h.jobs * s.gpus)::bigint,
    sum(h.jobs * s.memory_mb)::bigint, sum(h.jobs * s.cpus), h.submitter
  from gangq.held_by(array(
    select i.id from gangq.incarnations i
    where i.queues && array(
      select q.name from gangq.queues_table q where gangq.below(q.name, queue_usage.names)))) h
  join gangq.shapes s on s.id = h.shape_id
  join unnest(queue_usage.names) as n(name)
    on s.queue = n.name or starts_with(s.queue, n.name || '.')
  group by n.name, h.submitter
$$;

-- Internal. Every limit on work of this queue that names this limit key (null: none), one row each:
-- those set on the queues on its path, and that of the key.
create function gangq.limits_of(queue text, key text)
returns table (queue text, key text, gate text, setting text, resource text, most numeric)
language sql stable as $$
  select q.name, null, l.gate, l.setting, l.resource, l.most
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
  where q.limited and q.name = any (gangq.queue_path(limits_of.queue))
  union all
  select null, k.name, 'limit_key', 'limit', 'jobs', k.most
  from gangq.limit_keys k
  where k.name = limits_of.key and k.most is not null
$$;

-- Internal. What limits, in words: a queue, else a limit key, as in limits_of and limit_hit.
create function gangq.limited_by(queue text, key text) returns text language sql immutable
return coalesce('queue ' || queue, 'limit key ' || key);

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

-- Internal. The first limit that so much more work would break: {"gate": quota, running_limit,
-- submitter_limit, limit_key or rate, "queue" or "key", "resource", "limit", "used", "asked"}. Pass
-- null of a resource to ask whether more of it is used than its limit already. Binding only after
-- lock_limited.
create function gangq.limit_hit(
  queue text, key text, submitter text, gangs integer, jobs integer, gpus bigint, memory_mb bigint,
  cpus numeric
) returns jsonb language plpgsql stable set plan_cache_mode = force_generic_plan as $$
begin
  return coalesce((
    with limits as materialized (
      select l.*, gangq.amount_of(l.resource, limit_hit.gangs, limit_hit.jobs, limit_hit.gpus,
        limit_hit.memory_mb, limit_hit.cpus) as asked
      from gangq.limits_of(limit_hit.queue, limit_hit.key) l
    ),
    usage as (
      select u.* from gangq.queue_usage(array(select distinct l.queue from limits l)) u
      where exists (select 1 from limits l where l.queue is not null)
    )
    select jsonb_strip_nulls(jsonb_build_object('gate', h.gate, 'queue', h.queue, 'key', h.key,
      'resource', h.resource, 'limit', h.most, 'used', h.used, 'asked', h.asked))
    from (
      select l.*, case when l.key is null then (
          select coalesce(
            sum(gangq.amount_of(l.resource, u.gangs, u.jobs, u.gpus, u.memory_mb, u.cpus)), 0)
          from usage u
          where u.queue = l.queue
            and (l.gate <> 'submitter_limit' or u.submitter = limit_hit.submitter))
        else (
          select coalesce(sum(u.jobs), 0) from gangq.key_usage(array[l.key]) u) end as used
      from limits l
      where l.asked is distinct from 0) h
    where h.used + coalesce(h.asked, 0) > h.most
    order by length(h.queue) desc nulls last, h.gate, h.resource limit 1),
    gangq.rate_hit(limit_hit.queue, limit_hit.key, limit_hit.jobs));
end $$;
