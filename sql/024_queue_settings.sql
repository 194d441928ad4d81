-- set_queue: the settings of a queue, as what is given by name (023). Locks: the queue and its
-- ancestors, by name.

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
  -- Those that are not given now stay as they are, also if a role was dropped since.
  where settings ? 'ceilings' and (case when jsonb_typeof(e.value) = 'number'
      then e.value::numeric % 1 <> 0 or e.value::numeric not between -1000 and 1000 else true end
    or not exists (select from pg_roles r where r.rolname = e.key))
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
language sql stable as $$
  select gangq.refuse('GQ001',
    format('%s guaranteed %s %s, and its maximum is %s', b.whose, b.guaranteed, b.key, b.maximum),
    'Guarantee less, or raise the maximum: of this queue in the same call, of its parent first.')
  from (
    select format('queue %L is', n.name) as whose, g.key, g.value::numeric as guaranteed,
      n.maximum ->> g.key as maximum
    from jsonb_each_text(n.guaranteed) g
    union all
    select format('the children of queue %L are', p.name), g.key, sum(g.value::numeric),
      p.maximum ->> g.key
    from gangq.queues_table p
    join gangq.queues_table c
      on c.name like '%.%' and substring(c.name from '^(.*)\.[^.]*$') = p.name
    cross join lateral jsonb_each_text(c.guaranteed) g
    where p.name = any (names)
    group by p.name, g.key, p.maximum) b
  where b.guaranteed > b.maximum::numeric
$$;

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
  perform gangq.wake_tick(true);
end $$;
