-- submit_gang: a gang is read as a whole (gang_spec), checked, and written with its members by
-- rank.
-- Locks: see 033; where it names levels the settings for key share (keep_topology in 023).

-- Internal. What of these needs is said: null stands for absent. No payloads here: aggregating
-- takes a time quadratic in the size of the values, a minute for 10 MiB. What needs no device needs
-- no memory on it either, whatever is declared or said for all.
create function gangq.said(needs jsonb) returns jsonb language plpgsql immutable as $$
begin
  return (
    select case when said.needs -> 'gpus' = '0' then '{"vram_mb": 0}' else '{}' end::jsonb
      || coalesce(jsonb_object_agg(e.key, e.value), '{}')
    from jsonb_each(said.needs) e
    where e.value <> 'null');
end $$;

-- Internal. What a role has if nothing is said: as workers declare its task, then none.
create function gangq.declared_needs(task text) returns jsonb
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return (
    select gangq.said(jsonb_build_object('gpus', coalesce(d.gpus, 0),
      'vram_mb', coalesce(d.vram_mb, 0), 'memory_mb', coalesce(d.memory_mb, 0),
      'cpus', coalesce(d.cpus, 0), 'labels', coalesce(d.labels, '{}'), 'selector', d.selector,
      'tolerates', d.tolerates, 'model', d.model, 'strategy', 'pack', 'balanced', false,
      'budget_s', coalesce(d.budget_s, ts.budget_s)))
    from (select declared_needs.task) t
    left join gangq.task_options d on d.task = t.task
    left join gangq.task_settings ts on ts.task = t.task);
end $$;

-- Internal. A role without its payloads. What it does not say is the gang's, then its task's.
-- Raises GQ001.
create function gangq.read_role(role jsonb, nth integer, gang jsonb) returns gangq.gang_role
language plpgsql stable as $$
declare
  needs jsonb;
  what text;
  r gangq.gang_role;
begin
  if jsonb_typeof(role) <> 'object' then
    perform gangq.refuse('GQ001', format('role %s is %s', nth, left(role::text, 200)),
      'A role is a JSON object: {"name": "driver", "count": 1}.');
  end if;
  what := format('role %s',
    case when length(role ->> 'name') between 1 and 100 then role ->> 'name' else nth::text end);
  needs := role - '{payload,payloads}'::text[];
  perform gangq.refuse_larger(what || ', without its payloads,', pg_column_size(needs),
    gangq.most_said());
  needs := gang || gangq.said(needs);
  r := gangq.read_options(what, gangq.declared_needs(needs ->> 'task') || needs,
    null::gangq.gang_role);
  r.min := coalesce(r.min, r.count);
  if r.name is null or r.count is null or r.min > r.count then
    perform gangq.refuse('GQ001',
      format('%s has count %s and min %s', what, coalesce(r.count::text, 'null'),
        coalesce(r.min::text, 'null')),
      'A role has a name, a count of at most 100000 members, and may have a min, without how '
      'many of them the gang does not start.');
  end if;
  perform gangq.check_level(what, r.require, r.prefer, r.strategy = 'strict_spread' and r.min > 1);
  return r;
end $$;

-- Internal. Refuses payloads of a role in two places, or not one for each member.
create function gangq.check_payloads(r gangq.gang_role, of_gang boolean) returns void
language plpgsql immutable as $$
begin
  if of_gang and num_nonnulls(r.payload, r.payloads) > 0 then
    perform gangq.refuse('GQ001', format('both the gang and its role %s have payloads', r.name),
      'Pass them in one of the two places.');
  elsif num_nonnulls(r.payload, r.payloads) = 2 then
    perform gangq.refuse('GQ001', format('role %s has both payload and payloads', r.name),
      'payload goes to every member of it, payloads one to each.');
  elsif jsonb_typeof(r.payloads) <> 'array' or jsonb_array_length(r.payloads) <> r.count then
    perform gangq.refuse('GQ001',
      format('role %s has %s and its payloads are %s', r.name, gangq.counted(r.count, 'member'),
        case jsonb_typeof(r.payloads) when 'array' then jsonb_array_length(r.payloads)::text
          else left(r.payloads::text, 100) end),
      'Pass one payload for each of its members.');
  end if;
end $$;

-- Internal. Refuses levels that do not exist or exclude each other; spread: a host each. Levels are
-- names an operator has given: one that nobody knows would wait for ever. Here and below, the first
-- row of the list that is wrong refuses; one that is null is not wrong.
create function gangq.check_level(what text, require text, prefer text, spread boolean)
returns void language plpgsql stable as $$
declare
  levels text[] := (select c.topology from gangq.settings c);
  wrong text := (
    select l.level from unnest(array[require, prefer]) as l(level)
    where l.level <> all (levels) limit 1);
begin
  perform gangq.refuse('GQ001', w.what, w.hint) from (values
    (wrong is not null, format('%s names the topology level %L', what, left(wrong, 200)),
      format('Levels are, broad to narrow, %s; an administrator sets them: '
        'gangq.configure(''{"topology": [...]}'').', array_to_string(levels, ', '))),
    (array_position(levels, prefer) < array_position(levels, require),
      format('%s requires one %s and prefers one %s', what, require, prefer),
      format('Whoever shares a %s shares its %s: prefer a narrower level than the one required.',
        require, prefer)),
    (spread and array_position(levels, require) >= array_position(levels, 'host'),
      format('%s asks for a host for each member and for one %s for all', what, require),
      'strict_spread and that level exclude each other: leave one out, or use spread.')
  ) as w(wrong, what, hint)
  where w.wrong;
end $$;

-- Internal. Checks the options of a gang against the members it has.
create function gangq.check_gang(
  a gangq.arguments, o gangq.gang_options, roles gangq.gang_role[]
) returns void language plpgsql immutable as $$
declare
  members bigint := (select sum(r.count) from unnest(roles) r);
  least_members bigint := (select sum(r.min) from unnest(roles) r);
  twice text := (
    select r.name from unnest(roles) r group by r.name having count(*) > 1 limit 1);
begin
  perform gangq.refuse('GQ001', w.what, w.hint) from (values
    (twice is not null, format('two roles are called %s', twice),
      'Names of roles are unique in a gang; members of one role are its count.'),
    (members > 100000 or members <> a.size,
      format('the roles have %s members in all%s', members,
        coalesce(', and size is ' || a.size, '')),
      'Leave size out: it is the sum of the roles'' counts, 100000 at most.'),
    (jsonb_array_length(o.payloads) <> members,
      format('%s payloads for a gang of %s', jsonb_array_length(o.payloads), members),
      'Pass one payload per rank, or payload for all of them.'),
    (least_members < members and o.checkpoint_mode = 'each',
      'checkpoint_mode is each, and the gang may run with fewer members than it has',
      'Parts saved by one number of members cannot be restored by another: use rank0, or leave it '
      'out.'),
    (least_members = members and o.failure_policy = 'shrink',
      'failure_policy is shrink, and no role may have fewer members than its count',
      'Say with how many it can go on: min of a role, or min_size.'),
    (o.completion <> all (array(select r.name::text from unnest(roles) r)),
      format('completion names %L, which is no role of the gang', left(o.completion, 120)),
      format('Its roles are %s; leave it out when all members have to be done.',
        (select string_agg(r.name, ', ') from unnest(roles) r)))
  ) as w(wrong, what, hint)
  where w.wrong;
end $$;

-- Internal. The roles of a gang, or its size as one, as JSON.
create function gangq.read_roles(a gangq.arguments, o gangq.gang_options) returns jsonb
language plpgsql immutable as $$
begin
  perform gangq.refuse('GQ001', w.what, w.hint) from (values
    (o.roles is null and a.size is null, 'size is null; a gang has 1 to 100000 members',
      'size is the world size: how many members must start together. Or pass the option roles.'),
    (o.roles is null and o.min_size > a.size,
      format('min_size is %s of a gang of %s', o.min_size, a.size),
      'It is without how many members the gang does not start, 1 to size; leave it out for size.'),
    (o.roles is not null and o.min_size is not null, 'both roles and min_size are given',
      'Give each role that may have fewer members its own min.'),
    (jsonb_typeof(o.roles) <> 'array' or jsonb_array_length(o.roles) not between 1 and 100,
      format('roles is %s', left(o.roles::text, 200)),
      'It is a JSON array of 1 to 100 roles: [{"name": "driver", "count": 1}, {"name": "executor", '
      '"count": 10, "min": 6}].'),
    (jsonb_typeof(o.payloads) <> 'array', format('payloads is %s', left(o.payloads::text, 200)),
      'It is a JSON array with one payload per rank; payload goes to all of them.')
  ) as w(wrong, what, hint)
  where w.wrong;
  return coalesce(o.roles, jsonb_build_array(jsonb_build_object('name', 'member', 'count', a.size,
    'min', o.min_size)));
end $$;

-- A gang that is asked for, with all it inherits: its roles in rank order, what the members of each
-- need, its queue, options and priority, the longest budget of a member (null: none is set), and
-- how many members it has at least and at most.
create type gangq.gang_spec as (
  roles gangq.gang_role[], shapes gangq.shapes[], queue gangq.queues_table,
  options gangq.gang_options, priority integer, budget_s real, least_members integer,
  members integer
);

-- Internal. The options of a gang, with what its task declares where they say nothing.
create function gangq.with_declared(o gangq.gang_options, d gangq.task_options)
returns gangq.gang_options language plpgsql immutable as $$
begin
  o.max_attempts := coalesce(o.max_attempts, d.max_attempts);
  o.max_crashes := coalesce(o.max_crashes, d.max_crashes);
  o.max_trips := coalesce(o.max_trips, d.max_trips);
  o.max_snoozes := coalesce(o.max_snoozes, d.max_snoozes);
  if d.limit_key = coalesce(o.limit_key, d.limit_key) then
    o."limit" := coalesce(o."limit", d."limit");
    o.rate := coalesce(o.rate, d.rate);
  end if;
  o.limit_key := coalesce(o.limit_key, d.limit_key);
  return o;
end $$;

-- Internal. What each member of this role needs. named: the gang has roles, so that a refusal says
-- which of them it is about. Raises GQ001.
create function gangq.role_shape(r gangq.gang_role, queue text, limit_key text, named boolean)
returns gangq.shapes language plpgsql stable as $$
declare
  why text;
  hint text;
begin
  return gangq.check_shape(jsonb_populate_record(null::gangq.shapes,
    to_jsonb(r) || jsonb_build_object('queue', queue, 'limit_key', limit_key)));
exception when sqlstate 'GQ001' then
  get stacked diagnostics why = message_text, hint = pg_exception_hint;
  perform gangq.refuse('GQ001',
    case when named then format('role %s: ', r.name) else '' end || why, hint);
end $$;

-- Internal. All payloads of a gang, wherever they are given: for a role, for each of its members,
-- or (by_rank) for each member of the gang.
create function gangq.gang_payloads(roles gangq.gang_role[], by_rank jsonb) returns jsonb[]
language plpgsql immutable as $$
begin
  return array(
    select r.payload from unnest(roles) r where num_nonnulls(r.payloads, by_rank) = 0
    union all
    select p.payload
    from (select r.payloads from unnest(roles) r union all select by_rank) e(list)
    cross join lateral jsonb_array_elements(e.list) as p(payload));
end $$;

-- Why each step stands before the next one:
-- 1. Refuse what is too large, before it is copied into each of up to 100 roles.
-- 2. Fill in what the gang's task declares, before the options are copied into m.
-- 3. Read the roles. Each gets its payloads after its shape, which is made from all that the role
--    has by then; and its default after the check that nothing is given twice.
-- 4. Check what the roles have together.
-- 5. Open the queue with the payloads, which are known by now to be lists of the right length.
-- 6. Find the longest budget, for which the queue has to be known.
--
-- Internal. Reads and checks all of a gang but whether its queue and workers have the room.
create function gangq.read_gang(a gangq.arguments, o gangq.gang_options) returns gangq.gang_spec
language plpgsql stable as $$
declare
  roles jsonb := gangq.read_roles(a, o);
  gang jsonb := gangq.said(jsonb_build_object('task', a.task, 'gpus', a.gpus, 'vram_mb', o.vram_mb,
    'memory_mb', o.memory_mb, 'cpus', o.cpus, 'labels', o.labels, 'selector', o.selector,
    'tolerates', o.tolerates, 'model', o.model, 'strategy', o.strategy, 'balanced', o.balanced,
    'budget_s', o.budget_s));
  d gangq.task_options;
  m gangq.gang_spec;
  all_roles gangq.gang_role[];  -- with 10 MiB of payloads: not copied for each role, as m is
  r gangq.gang_role;
  role jsonb;
  n integer;
  queue text;
begin
  -- 1.
  perform gangq.check_moment('due_at', a.due_at);
  perform gangq.refuse_larger('the name of a gang', octet_length(o.name), 1000);
  perform gangq.refuse_larger('what members of the gang need', pg_column_size(gang),
    gangq.most_said());
  -- 2. Without a task of its own the gang has what its first role's task declares.
  select x.* into d from gangq.task_options x
  where x.task = coalesce(a.task, roles -> 0 ->> 'task');
  o := gangq.with_declared(o, d);
  m.options := o;
  m.priority := coalesce(a.priority, d.priority, 0);
  queue := coalesce(a.queue, d.queue, 'default');
  -- 3.
  for role, n in
    select e.role, e.n from jsonb_array_elements(roles) with ordinality as e(role, n)
  loop
    r := gangq.read_role(role, n, gang);
    perform gangq.check_level('the gang', o.require, o.prefer,
      r.strategy = 'strict_spread' and r.min > 1);
    m.shapes[n] := gangq.role_shape(r, queue, o.limit_key, o.roles is not null);
    r.payload := nullif(role -> 'payload', 'null');
    r.payloads := nullif(role -> 'payloads', 'null');
    perform gangq.check_payloads(r, o.payloads is not null);
    r.payload := coalesce(r.payload, a.payload, '{}');
    all_roles[n] := r;
  end loop;
  -- 4.
  perform gangq.check_gang(a, o, all_roles);
  -- 5.
  m.queue := gangq.open_queue(queue, gangq.gang_payloads(all_roles, o.payloads));
  -- 6. Null where neither a role nor the queue has a budget. Otherwise a role without one counts
  -- with the installation's.
  select sum(x.min), sum(x.count), case when count(coalesce(x.budget_s, (m.queue).budget_s)) > 0
    then max(coalesce(x.budget_s, (m.queue).budget_s,
      case when x.gpus > 0 then c.budget_gpu_s else c.budget_s end)) end
  into m.least_members, m.members, m.budget_s
  from unnest(all_roles) x cross join gangq.settings c;
  m.roles := all_roles;
  return m;
end $$;

-- Internal. Refuses (GQ001) a gang above a limit of its queue and, unless it waits for hardware,
-- one that no known workers could hold. Returns why those registered now could not, or null.
create function gangq.check_gang_fit(kind integer, queue text, least_members integer, wait boolean)
returns text language plpgsql as $$
declare
  needs record;
  note text := gangq.kind_infeasible(kind);
  why text;
begin
  select sum(k.min_members * s.gpus::bigint)::bigint as gpus,
    sum(k.min_members * s.memory_mb)::bigint as memory_mb, sum(k.min_members * s.cpus) as cpus
  into needs
  from gangq.kind_roles k join gangq.shapes s on s.id = k.shape_id
  where k.kind_id = kind;
  perform gangq.check_limits(queue, gangq.key_of(kind), 1, least_members, needs.gpus,
    needs.memory_mb, needs.cpus);
  if note is not null and wait is not true then
    why := gangq.kind_infeasible(kind, true);
    if why is not null then
      perform gangq.refuse('GQ001', why, 'Ask for less, start the workers first, or pass the '
        'option wait_for_hardware (--wait-for-hardware) if they are still to come.');
    end if;
  end if;
  return note;
end $$;

-- Internal. The kind of this gang, stored if it is new; new shapes are charged to login.
create function gangq.keep_kind(m gangq.gang_spec, submitter text, login text) returns integer
language plpgsql as $$
begin
  -- A pass looks at so many gangs of each kind: those of a submitter at its limit must not keep it
  -- from those of others, so the submitter may have shapes of its own.
  return (
    select gangq.intern_kind(((m).queue).name, jsonb_agg(jsonb_build_object('name', r.name, 'shape',
        gangq.shape_for(gangq.keep_shape((m).shapes[r.n], login), submitter, login), 'min', r.min,
        'max', r.count, 'strategy', r.strategy, 'require', r.require, 'prefer', r.prefer,
        'balanced', r.balanced) order by r.n),
      ((m).options).require, ((m).options).prefer, ((m).options).apart)
    from (select row_number() over () as n, x.* from unnest((m).roles) x) r);
end $$;

-- Internal. Writes a gang, its members by rank, and what they wait for: see gangq.await.
create function gangq.write_gang(
  g gangq.live_gangs, m gangq.gang_spec, job_ids bigint[], awaited bigint[], wants text[],
  waits_on integer
) returns void language plpgsql as $$
declare
  o gangq.gang_options := m.options;
  q gangq.queues_table := m.queue;
begin
  insert into gangq.live_gangs (id, order_key, kind_id, shape_id, size, priority, max_attempts,
    max_crashes, max_trips, state, checkpoint_mode, claim_deadline_s, submitted_at, not_before,
    failure_policy, completion, preemptible, budget_s, timeout_s, timeout_style, timeout_at, name,
    note, submitter, login, service)
  select g.id, g.order_key, g.kind_id, k.shape_id, m.members, m.priority,
    coalesce(o.max_attempts, q.max_attempts), coalesce(o.max_crashes, q.max_crashes),
    coalesce(o.max_trips, q.max_trips),
    gangq.waiting_state(write_gang.waits_on, g.id),
    coalesce(o.checkpoint_mode, case when m.least_members < m.members then 'rank0' else 'each' end),
    coalesce(o.claim_deadline_s, c.claim_deadline_s), g.submitted_at, g.not_before,
    coalesce(o.failure_policy, 'restart_gang'), o.completion, coalesce(o.preemptible, true),
    m.budget_s, w.timeout_s, coalesce(o.timeout_style, q.timeout_style, 'requeue'),
    greatest(g.submitted_at, g.not_before) + make_interval(secs => w.timeout_s), o.name, g.note,
    g.submitter, g.login, g.service
  from gangq.settings c
  join gangq.kind_roles k on k.kind_id = g.kind_id and k.ordinal = 1
  cross join lateral (
    select coalesce(o.timeout_s, q.placement_timeout_s, c.placement_timeout_s) as timeout_s) w;
  insert into gangq.live_jobs (id, order_key, gang_id, rank, role, submitted_at, shape_id, budget_s,
    waits_on, priority, max_attempts, max_crashes, max_trips, max_snoozes, state, submitter, login,
    parent, awaited, wants, payload, trace)
  select job_ids[i.rank + 1], x.order_key, x.id, i.rank, k.ordinal, x.submitted_at, k.shape_id,
    coalesce(r.budget_s, q.budget_s), write_gang.waits_on, x.priority, x.max_attempts,
    x.max_crashes, x.max_trips, coalesce(o.max_snoozes, 100), x.state, x.submitter, x.login,
    o.parent, write_gang.awaited, write_gang.wants,
    coalesce(o.payloads -> i.rank, r.payloads -> i.rank - k.first_rank, r.payload), o.trace
  from gangq.live_gangs x
  join gangq.kind_roles k on k.kind_id = x.kind_id
  join unnest(m.roles) with ordinality r on r.ordinality = k.ordinal
  cross join lateral generate_series(k.first_rank, k.first_rank + k.max_members - 1) as i(rank)
  where x.id = g.id
  order by i.rank;
  perform gangq.add_dependencies(job_ids, awaited, wants, waits_on);
end $$;

-- 1. The gang is read and checked. No topology level is taken away from here on.
-- 2. The limit key and the kind are made if they are new.
-- 3. The answer: note says whether workers could hold the kind, and ids are drawn.
-- 4. The answer is kept under the request_id, or the one kept there is returned. So this comes
--    after 2 and 3. A repeated call waits here, or at a new limit key in step 2, until the first
--    one has ended.
-- 5. The gang and its members are written.
--
-- Internal. Checks a gang against its queue and the workers, and writes it. What submit_gang,
-- schedules and services have in common: who submits, and when, is in g.
create function gangq.add_gang(
  a gangq.arguments, o gangq.gang_options, g gangq.live_gangs, after bigint[]
) returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  m gangq.gang_spec;
  waits record;
  base bigint;  -- see gangq.id_base
begin
  -- 1.
  if num_nonnulls(o.roles::text, o.require, o.prefer) > 0 then
    perform gangq.keep_topology();
  end if;
  m := gangq.read_gang(a, o);
  perform gangq.check_ceiling((m.queue).name, m.priority, g.submitter, g.login);
  -- 2.
  perform gangq.name_limit((m.options).limit_key, (m.options)."limit", (m.options).rate,
    g.login);
  g.kind_id := gangq.keep_kind(m, g.submitter, g.login);
  -- 3.
  note := gangq.check_gang_fit(g.kind_id, (m.queue).name, m.least_members, o.wait_for_hardware);
  waits := gangq.await(after, o.after_any, o.after_failed);
  base := (select b.base from gangq.id_base() b);
  gang_id := base + nextval('gangq.gang_ids'::regclass);
  job_ids := array(
    select base + nextval('gangq.job_ids'::regclass) from generate_series(1, m.members));
  -- 4.
  if o.request_id is not null then
    insert into gangq.requests (request_id, login, gang_id, job_ids, note)
    values (o.request_id, g.login, add_gang.gang_id, add_gang.job_ids, add_gang.note)
    on conflict do nothing;
    if not found then
      return query select * from gangq.answer_of(g.login, o.request_id, true, m.members);
      return;
    end if;
  end if;
  -- 5.
  g.id := gang_id;
  g.note := note;
  g.order_key := gangq.order_key(m.priority, gangq.next_pos(base));
  perform gangq.write_gang(g, m, job_ids, waits.awaited, waits.wants, waits.waits_on);
  perform gangq.log_event(g.submitted_at, 'submit', gang_id, 0, reason => note,
    data => jsonb_strip_nulls(jsonb_build_object('size', m.members,
      'min_size', nullif(m.least_members, m.members))));
  perform gangq.wake_tick();
  return next;
end $$;

-- Submits a gang: members that start together or not at all, written as blocked in one transaction.
-- size members alike, ranks 0 to size-1, or the option roles; payload goes to each of them, or the
-- option payloads one to each. Each member needs gpus devices, and what the options say, for
-- itself; see \dT+ gangq.gang_options. What is left null is as the workers declare the task.
-- due_at, after: as in submit. note is set when the workers registered now could never hold it,
-- with the numbers; it then waits for better ones. What all workers known, ended ones included,
-- could not hold is taken only with the option wait_for_hardware. Raises GQ001 (also what exceeds a
-- limit of its queue or all hardware known), GQ002, GQ004 (a draining queue), GQ007, GQ008, 42501,
-- 55P03; for a job that its worker runs (parent, parent_token: see submit) GQ003, too.
create function gangq.submit_gang(
  task text default null, size integer default null, queue text default null,
  payload jsonb default '{}', priority integer default null, gpus integer default null,
  due_at timestamptz default null, after bigint[] default '{}', options jsonb default '{}'
) returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql as $$
declare
  o gangq.gang_options;
  a gangq.arguments;
  g gangq.live_gangs;
begin
  o := gangq.read_options('submit_gang', coalesce(options, '{}'), o);
  g.submitted_at := gangq.now();
  g.not_before := due_at;
  select p.submitter, p.login into g.submitter, g.login
  from gangq.submitter_of(o.parent, o.parent_token) p;
  if o.request_id is not null then
    return query select * from gangq.answer_of(g.login, o.request_id, true, size);
    if found then
      return;
    end if;
  end if;
  a := gangq.read_options('submit_gang', jsonb_strip_nulls(jsonb_build_object('task', task,
    'size', size, 'priority', priority, 'gpus', gpus)), a);
  a.queue := queue;
  a.payload := payload;
  a.due_at := due_at;
  return query select * from gangq.add_gang(a, o, g, after);
end $$;
