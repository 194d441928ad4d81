-- Work enters: submit, submit_gang, set_priority.
--
-- A submission is read (read_submission, read_gang: its options, then what workers declare its task
-- with, then what its queue and the installation have), checked, and written. What members need is
-- a row of gangq.shapes, which keep_shape stores once.
-- Locks: submit and submit_gang take none that another verb but configure could meet, also not on
-- the jobs they wait for (after): submit_gang, where it names levels, the settings, shared. Two
-- calls with one request_id meet at its key. set_priority: gangs by id, jobs by id.

create function gangq.queue_named(queue text) returns gangq.queues_table
language plpgsql stable as $$
declare
  q gangq.queues_table;
begin
  select x.* into q from gangq.queues_table x where x.name = queue_named.queue;
  if not found then
    perform gangq.refuse('GQ002', format('queue %L does not exist', queue),
      format('Make it with: gangq queue create %s   (or select gangq.set_queue(%L)). Queues: %s',
        queue, queue,
        (select string_agg(x.name, ', ' order by x.name) from gangq.queues_table x)));
  end if;
  return q;
end $$;
comment on function gangq.queue_named is 'Internal. This queue''s row. Raises GQ002.';

create function gangq.refuse_draining(draining text, queue text) returns void
language plpgsql as $$
begin
  perform gangq.refuse('GQ004', format('queue %s is draining', draining)
      || case when queue <> draining then format(', and %s is below it', queue) else '' end,
    'It takes no new work: use another queue, or wait until it is opened again.');
end $$;
comment on function gangq.refuse_draining is
  'Internal. Raises GQ004: a queue, or one above it, takes no new work.';

create function gangq.open_queue(queue text, payloads jsonb[]) returns gangq.queues_table
language plpgsql stable as $$
declare
  q gangq.queues_table := gangq.queue_named(queue);
  above gangq.queues_table;
begin
  for above in
    select x.* from gangq.queues_table x
    where x.name = any (gangq.queue_path(q.name))
    order by length(x.name) desc
  loop
    if above.draining then
      perform gangq.refuse_draining(above.name, q.name);
    end if;
    q.budget_s := coalesce(q.budget_s, above.budget_s);
    q.placement_timeout_s := coalesce(q.placement_timeout_s, above.placement_timeout_s);
    q.timeout_style := coalesce(q.timeout_style, above.timeout_style);
  end loop;
  -- What all of them have is more than any of them has.
  if pg_column_size(payloads) > q.max_payload_bytes then
    perform gangq.refuse('GQ007',
      format('payload %s has %s bytes, queue %L takes %s', p.n, pg_column_size(p.payload), q.name,
        q.max_payload_bytes),
      'Put large inputs in shared storage and submit their address, or raise it: '
      'gangq.set_queue(..., ''{"max_payload_bytes": ...}'').')
    from unnest(payloads) with ordinality as p(payload, n)
    where pg_column_size(p.payload) > q.max_payload_bytes;
  end if;
  return q;
end $$;
comment on function gangq.open_queue is
  'Internal. A queue that takes these payloads, with what it inherits from those above it.';

create function gangq.check_shape(s gangq.shapes) returns gangq.shapes
language plpgsql stable as $$
begin
  if s.task is null then
    perform gangq.refuse('GQ001', 'a job needs a task', 'Pass task => ''resize'', or ''command''.');
  end if;
  if s.vram_mb > 0 and s.gpus = 0 then
    perform gangq.refuse('GQ001', format('vram_mb is %s with gpus %s', s.vram_mb, s.gpus),
      'vram_mb is the memory needed on each device: ask for gpus as well.');
  end if;
  perform gangq.refuse_larger('labels', pg_column_size(s.labels), 8192);
  s.selector := gangq.check_selector(s.selector);
  s.tolerates := nullif(gangq.check_taints(s.tolerates, 'tolerates', true), '{}');
  s.selects := gangq.selector_path(s.selector, s.tolerates);
  return s;
end $$;
comment on function gangq.check_shape is
  'Internal. What a job needs, as shapes keep it. Raises GQ001, GQ007.';

-- Which of `after` are still live. Takes no lock: one of them may end before this transaction does
-- and not see the dependency; see settle_dependents. Ones already done do not count; ones that
-- failed refuse the submission.
create function gangq.await(after bigint[]) returns bigint[] language plpgsql as $$
declare
  live bigint[];
begin
  if coalesce(cardinality(after), 0) = 0 then
    return '{}';
  end if;
  live := array(select j.id from gangq.live_jobs j where j.id = any (after) order by j.id);
  perform case
    when e.state is null then gangq.refuse('GQ002',
      format('after names job %s, which does not exist', coalesce(a.id::text, 'null')),
      'Submit the job it waits for first, and pass the id that submit returned.')
    else gangq.refuse('GQ001', format('after names job %s, which has %s', a.id, e.state),
      'It can never be done; retry it first (gangq.retry), or leave it out.') end
  from unnest(after) as a(id)
  cross join lateral (select gangq.ended_as(a.id) as state offset 0) e
  where (a.id is null or a.id <> all (live)) and e.state is distinct from 'done';
  return live;
end $$;
comment on function gangq.await is
  'Internal. Live jobs among those to wait for, each once. Raises GQ001, GQ002.';

-- A worker submits for a job that it runs. The claim is not locked: a child of a claim that ends
-- this moment was submitted before it ended.
create function gangq.submitter_of(
  job_id bigint, token bigint, out submitter text, out login text
) language plpgsql stable as $$
declare
  j gangq.live_jobs;
begin
  if not (gangq.may_act_as('gangq_worker') or gangq.is_admin()) then
    perform gangq.refuse('42501',
      format('%s may not submit for job %s', gangq.caller(), submitter_of.job_id),
      'Only the worker that runs a job submits for it: leave parent out.');
  end if;
  select x.* into j from gangq.live_jobs x
  where x.id = submitter_of.job_id and x.token = submitter_of.token
    and x.state in ('running', 'preempting');
  if not found then
    perform gangq.refuse_stale(submitter_of.job_id, submitter_of.token);
  end if;
  perform gangq.check_login(j.incarnation);
  submitter := j.submitter;
  login := j.login;
end $$;
comment on function gangq.submitter_of is
  'Internal. The submitter and login of the job that holds this claim: also of its children.';

create function gangq.known_workers(queue text) returns boolean language sql stable as $$
  select exists (select from gangq.incarnations i where known_workers.queue = any (i.queues))
$$;
comment on function gangq.known_workers is
  'Internal. Whether a worker of this queue is known, ended ones included.';

create function gangq.unserved(queue text) returns text language sql stable
return format('no worker of queue %s is known yet: jobs wait until one starts, with the needs they '
  'were submitted with; what it declares is for later ones', queue);
comment on function gangq.unserved is
  'Internal. The text of the notice GQ100. It is no warning: those go into the server''s log.';

-- A shape that a known worker fits stays so. Skip locked, because a caller's transaction must not
-- make others wait.
create function gangq.check_fit(shape_id integer, queue text) returns void language plpgsql as $$
declare
  why text;
begin
  if not gangq.known_workers(check_fit.queue) then
    raise notice using errcode = 'GQ100', message = gangq.unserved(check_fit.queue);
    return;
  end if;
  why := gangq.infeasible(check_fit.shape_id, 1, true);
  if why is not null then
    perform gangq.refuse('GQ001', why, 'Correct it, start a worker that can run it first, or pass '
      'the option wait_for_hardware (--wait-for-hardware) if one is still to come.');
  end if;
  update gangq.shapes s set fits = true
  where s.id = (
    select z.id from gangq.shapes z
    where z.id = check_fit.shape_id and not z.fits for no key update skip locked);
end $$;
comment on function gangq.check_fit is
  'Internal. Refuses (GQ001) what no known worker could ever run; none known: notice GQ100.';

-- A reply can be lost after its call was carried out. Whoever repeats the call with its request_id
-- gets the first answer again:
-- 1. Each call inserts its id and the ids that it draws for its jobs into gangq.requests, then the
--    jobs. A repetition meets the key there, waits for the first call to end, and returns its
--    answer, or submits if that was rolled back.
-- 2. The tick makes requests into requests_before, in a transaction that waits for all calls under
--    way. So an id that is not in requests_before belongs to no call that inserted it before the
--    turn.
-- 3. 2 needs a snapshot that is taken after the tables are locked, as each statement's is in READ
--    COMMITTED: see answer_of.
create function gangq.answer_of(login text, request_id uuid, of_gang boolean, jobs integer)
returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
begin
  perform gangq.require_read_committed('a call with a request_id');
  select r.gang_id, r.job_ids, r.note into answer_of.gang_id, answer_of.job_ids, answer_of.note
  from (select * from gangq.requests union all select * from gangq.requests_before) r
  where r.request_id = answer_of.request_id and r.login = answer_of.login;
  if not found then
    return;
  end if;
  if (answer_of.gang_id is not null) <> answer_of.of_gang
    or cardinality(answer_of.job_ids) <> answer_of.jobs
  then
    perform gangq.refuse('GQ001',
      format('request_id %s was given to another call before, which submitted %s',
        answer_of.request_id, case
          when answer_of.gang_id is null
          then gangq.counted(cardinality(answer_of.job_ids), 'job')
          else 'a gang of ' || cardinality(answer_of.job_ids) end),
      'Make a new one for each submission (a UUID), and use it again only to repeat that one.');
  end if;
  return next;
end $$;
comment on function gangq.answer_of is
  'Internal. What the call with this request_id answered this login within the hour; or no row.';

create type gangq.submission as (
  queue text, shape integer, fits boolean, light boolean, special boolean, priority integer,
  budget_s real, max_attempts smallint, max_crashes smallint, max_trips smallint, base bigint,
  state text, awaited bigint[], ids bigint[], asked gangq.shapes
);
comment on type gangq.submission is
  'What is known of a submission. shape: null if nobody asked for it before. fits: a worker that '
  'could run it has been known. light: its jobs are known to be light. special: the shape, the '
  'queue or the payloads want more checks (check_submission). Then what its rows have: priority, '
  'limits, state, the live jobs they wait for, their ids if those are drawn already (base: see '
  'gangq.id_base). asked: what its jobs need.';

-- One statement, and inlined into submit's: nothing in here refuses but the selector.
create function gangq.read_submission(
  task text, queue text, payloads jsonb[], priority integer, gpus integer, o gangq.job_options
) returns setof gangq.submission language sql stable as $$
  select x.name, z.id, z.fits, z.light and not v.special,
    v.special or z.id is null or not (z.fits or coalesce((o).wait_for_hardware, false)
      or not gangq.known_workers(x.name)),
    coalesce(read_submission.priority, d.priority, 0),
    coalesce((o).budget_s, d.budget_s, ts.budget_s, x.budget_s),
    coalesce((o).max_attempts, d.max_attempts, x.max_attempts)::smallint,
    coalesce((o).max_crashes, d.max_crashes, x.max_crashes)::smallint,
    coalesce((o).max_trips, d.max_trips, x.max_trips)::smallint,
    (select b.base from gangq.id_base() b), 'pending', null::bigint[], null::bigint[], n.asked
  from (select 1) as one
  left join gangq.task_options d on d.task = read_submission.task
  left join gangq.task_settings ts on ts.task = read_submission.task
  left join gangq.queues_table x on x.name = coalesce(read_submission.queue, d.queue, 'default')
  -- The row has the columns of gangq.shapes in their order, and is made once (offset 0), not again
  -- for each of them. A job that asks for no device needs no memory on one, whatever is declared.
  cross join lateral (
    select row(null, coalesce(read_submission.queue, d.queue, 'default'), read_submission.task,
      coalesce(read_submission.gpus, d.gpus, 0),
      coalesce((o).vram_mb, case when read_submission.gpus = 0 then 0 else d.vram_mb end, 0),
      coalesce((o).memory_mb, d.memory_mb, 0), coalesce((o).cpus, d.cpus, 0),
      coalesce((o).labels, d.labels, '{}'), coalesce((o).model, d.model), null,
      case when (o).selector is null then d.selector else gangq.check_selector((o).selector) end,
      case when (o).tolerates is null then d.tolerates
        else nullif(gangq.check_taints((o).tolerates, 'tolerates', true), '{}') end,
      null, null, null, null, null, null, null)::gangq.shapes as asked
    offset 0) n
  left join lateral (
    select s.id, s.fits, s.plain and s.model is null as light
    from gangq.shapes s
    where s.digest = gangq.shape_digest(n.asked)
    order by s.id limit 1) z on true
  cross join lateral (
    select x.draining or x.limited or x.policy = 'fair' or x.ceilings <> '{}'
      or strpos(x.name, '.') > 0 or cardinality(read_submission.payloads) = 0
      or pg_column_size(read_submission.payloads) > x.max_payload_bytes as special) v
$$;
comment on function gangq.read_submission is
  'Internal. A submission; what it leaves open is as its task is declared, then its queue.';

create function gangq.check_submission(
  s gangq.submission, payloads jsonb[], wait_for_hardware boolean, submitter text, login text
) returns gangq.submission language plpgsql as $$
declare
  queue text := (s.asked).queue;
  q gangq.queues_table;
begin
  if coalesce(cardinality(payloads), 0) = 0 then
    perform gangq.refuse('GQ001', 'payloads is empty',
      'Pass one payload per job: payloads => array[''{"n": 1}'']::jsonb[].');
  end if;
  q := gangq.open_queue(queue, payloads);
  if s.shape is null then
    s.shape := gangq.keep_shape(gangq.check_shape(s.asked), login);
  end if;
  if not (coalesce(s.fits, false) or coalesce(wait_for_hardware, false)) then
    perform gangq.check_fit(s.shape, queue);
  end if;
  perform gangq.check_ceiling(queue, s.priority, submitter, login);
  perform gangq.check_limits(queue, 0, 1, (s.asked).gpus, (s.asked).memory_mb, (s.asked).cpus);
  s.shape := gangq.shape_for(s.shape, submitter, login);
  s.budget_s := coalesce(s.budget_s, q.budget_s);
  return s;
end $$;
comment on function gangq.check_submission is
  'Internal. The checks of a submission that is special; stores its shape if that is new.';

create function gangq.add_dependencies(job_ids bigint[], awaited bigint[]) returns void
language sql as $$
  insert into gangq.dependencies (job_id, on_job_id)
  select i.id, a.id from unnest(job_ids) as i(id) cross join unnest(awaited) as a(id)
$$;
comment on function gangq.add_dependencies is 'Internal. These jobs wait for all of those.';

create function gangq.submit(
  task text, queue text default null, payloads jsonb[] default array['{}'::jsonb],
  priority integer default null, gpus integer default null, due_at timestamptz default null,
  after bigint[] default '{}', request_id uuid default null, options jsonb default '{}'
) returns setof bigint language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_variable
declare
  t timestamptz := gangq.now();
  o gangq.job_options;
  s gangq.submission;
  number xid8;
  submitter text := gangq.caller();
  login text := session_user;
begin
  -- What every submission runs is written out or inlined here: a call of a function costs up to
  -- 4 us, and the whole of it 60. The first are the options of a client that asks for nothing else.
  if options = '{"wake": "sleepers"}' then
    o.wake := 'sleepers';
  elsif options <> '{}' then
    o := gangq.read_options('submit', options, o);
    if o.parent is not null then
      select p.submitter, p.login into submitter, login
      from gangq.submitter_of(o.parent, o.parent_token) p;
    end if;
  end if;
  if not (coalesce(priority, 0) between -1000 and 1000 and coalesce(gpus, 0) between 0 and 1024
    and length(task) <= 200 and task <> '')
  then
    perform gangq.read_options('submit',
      jsonb_build_object('task', task, 'gpus', gpus, 'priority', priority), null::gangq.arguments);
  end if;
  select r.* into s
  from gangq.read_submission(task, queue, payloads, priority, gpus, o) r;
  if s.special is not false or due_at is not null or after <> '{}' then
    -- Before anything is refused: what has changed since is no reason to refuse a repetition.
    return query select unnest(a.job_ids)
    from gangq.answer_of(login, submit.request_id, false, cardinality(payloads)) a
    where submit.request_id is not null;
    if found then
      return;
    end if;
    perform gangq.check_moment('due_at', due_at);
    if s.special is not false then
      s := gangq.check_submission(s, payloads, o.wait_for_hardware, submitter, login);
    end if;
    s.awaited := gangq.await(after);
    s.state := case when s.awaited <> '{}' then 'waiting' when due_at > t then 'scheduled'
      else 'pending' end;
  end if;
  if not (s.special or s.fits or coalesce(o.wait_for_hardware, false)) then
    raise notice using errcode = 'GQ100', message = gangq.unserved(s.queue);
  end if;
  -- Places are drawn by transactions that have their number already: see gangq.lows.
  number := pg_current_xact_id();
  if s.awaited <> '{}' then
    s.ids := array(select s.base + nextval('gangq.job_ids'::regclass) from unnest(payloads));
  end if;
  if request_id is not null then
    -- It waits at the key for another call with this id.
    insert into gangq.requests as r (request_id, login, job_ids)
    select me.request_id, me.login, coalesce(s.ids, array(
      select s.base + nextval('gangq.job_ids'::regclass) from unnest(payloads)))
    from (select submit.request_id, login) as me(request_id, login)
    where current_setting('transaction_isolation') in ('read committed', 'read uncommitted')
      and not exists (
        select from gangq.requests_before b
        where b.request_id = me.request_id and b.login = me.login)
    on conflict do nothing
    returning r.job_ids into s.ids;
    if not found then
      return query select unnest(a.job_ids)
      from gangq.answer_of(login, submit.request_id, false, cardinality(payloads)) a;
      return;
    end if;
  end if;
  return query
  insert into gangq.live_jobs (id, order_key, submitted_at, due_at, shape_id, budget_s, waits_on,
    priority, max_attempts, max_crashes, max_trips, state, submitter, login, parent, payload)
  select coalesce(s.ids[p.n], s.base + nextval('gangq.job_ids'::regclass)),
    gangq.order_key(s.priority, gangq.next_pos(s.base)), t, submit.due_at, s.shape, s.budget_s,
    coalesce(cardinality(s.awaited), 0), s.priority, s.max_attempts, s.max_crashes, s.max_trips,
    s.state, submitter, login, o.parent, p.payload
  from unnest(payloads) with ordinality as p(payload, n)
  returning id;
  if s.awaited <> '{}' then
    perform gangq.add_dependencies(s.ids, s.awaited);
  elsif s.state = 'scheduled' then
    -- It may be due before the next tick.
    if o.wake is distinct from 'never'
      and due_at < t + (select make_interval(secs => 1.5 * c.tick_s) from gangq.settings c)
    then
      perform gangq.wake_tick(true);
    end if;
  elsif o.wake = 'sleepers' and s.light then
    if exists (select from gangq.sleepers z where z.queues @> array[s.queue]) then
      perform gangq.wake_sleepers(s.queue, cardinality(payloads), o.wake);
    end if;
  elsif o.wake is distinct from 'never' then
    perform gangq.wake_lane(s.shape, cardinality(payloads), coalesce(o.wake, 'commit'));
  end if;
end $$;
comment on function gangq.submit is
  'Submits one job per payload, all alike otherwise, and returns their ids in order. Inside a '
  'transaction they appear when it commits. gpus: devices that a worker must have free. due_at: '
  'not before. after: jobs that must be done first; if one fails or is cancelled, these are '
  'cancelled. request_id: a new one for each submission. A call that is repeated with it within an '
  'hour, because its answer was lost, returns the ids of the first call and submits nothing. It '
  'waits up to 2 s for a first call that has not ended; if that is rolled back, it submits. Each '
  'login has ids of its own, and only the kind and the number of jobs are compared. options: what '
  'is needed or asked for besides, {"vram_mb": 16000, "budget_s": 3600}; see \dT+ '
  'gangq.job_options. What is left null is as the workers declare the task (gangq.tasks), then: '
  'queue default, and no needs. What no worker of the queue that is known, ended ones included, '
  'could ever run is refused, unless with the option wait_for_hardware; while none is known a '
  'notice (GQ100) says so. Raises GQ001, GQ002, GQ004 (a draining queue), GQ007 (a payload, or '
  'more new distinct requirements than settings.new_shapes_per_day), GQ008 (a request_id needs '
  'READ COMMITTED), 42501 (priority above the submitter''s ceiling), 55P03.';

-- No payloads here: aggregating takes a time quadratic in the size of the values, a minute for
-- 10 MiB. What needs no device needs no memory on it either, whatever is declared or said for all.
create function gangq.said(needs jsonb) returns jsonb language sql immutable as $$
  select case when said.needs -> 'gpus' = '0' then '{"vram_mb": 0}' else '{}' end::jsonb
    || coalesce(jsonb_object_agg(e.key, e.value), '{}')
  from jsonb_each(said.needs) e
  where e.value <> 'null'
$$;
comment on function gangq.said is 'Internal. What of these needs is said: null stands for absent.';

create function gangq.declared_needs(task text) returns jsonb language sql stable as $$
  select gangq.said(jsonb_build_object('gpus', coalesce(d.gpus, 0),
    'vram_mb', coalesce(d.vram_mb, 0), 'memory_mb', coalesce(d.memory_mb, 0),
    'cpus', coalesce(d.cpus, 0), 'labels', coalesce(d.labels, '{}'), 'selector', d.selector,
    'tolerates', d.tolerates, 'model', d.model, 'strategy', 'pack', 'balanced', false,
    'budget_s', coalesce(d.budget_s, ts.budget_s)))
  from (select declared_needs.task) t
  left join gangq.task_options d on d.task = t.task
  left join gangq.task_settings ts on ts.task = t.task
$$;
comment on function gangq.declared_needs is
  'Internal. What a role has if nothing is said: as workers declare its task, then none.';

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
  perform gangq.refuse_larger(what || ', without its payloads,', pg_column_size(needs), 262144);
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
comment on function gangq.read_role is
  'Internal. A role without its payloads. What it does not say is the gang''s, then its task''s. '
  'Raises GQ001.';

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
comment on function gangq.check_payloads is
  'Internal. Refuses payloads of a role in two places, or not one for each member.';

-- Levels are names an operator has given: one that nobody knows would wait for ever.
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
comment on function gangq.check_level is
  'Internal. Refuses levels that do not exist or exclude each other; spread: a host each.';

create function gangq.check_gang(
  a gangq.arguments, o gangq.gang_options, roles gangq.gang_role[]
) returns void language plpgsql immutable as $$
declare
  members bigint := (select sum(r.count) from unnest(roles) r);
  least_members bigint := (select sum(r.min) from unnest(roles) r);
begin
  perform gangq.refuse('GQ001', w.what, w.hint) from (values
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
comment on function gangq.check_gang is
  'Internal. Checks the options of a gang against the members it has.';

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
comment on function gangq.read_roles is
  'Internal. The roles of a gang, or its size as one, as JSON.';

create type gangq.gang_spec as (
  roles gangq.gang_role[], shapes gangq.shapes[], queue gangq.queues_table,
  options gangq.gang_options, priority integer, budget_s real, least_members integer,
  members integer
);
comment on type gangq.gang_spec is
  'A gang that is asked for, with all it inherits: its roles in rank order, what the members of '
  'each need, its queue, options and priority, the longest budget of a member (null: none is set), '
  'and how many members it has at least and at most.';

-- Why each step stands before the next one:
-- 1. Refuse what is too large, before it is copied into each of up to 100 roles.
-- 2. Fill in what the gang's task declares, before the options are copied into m.
-- 3. Read the roles. Each gets its payloads after its shape, which is made from all that the role
--    has by then; and its default after the check that nothing is given twice.
-- 4. Check what the roles have together.
-- 5. Open the queue with the payloads, which are known by now to be lists of the right length.
-- 6. Find the longest budget, for which the queue has to be known.
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
  names text[] := '{}';
  r gangq.gang_role;
  role jsonb;
  n integer;
  why text;
  hint text;
begin
  -- 1.
  perform gangq.check_moment('due_at', a.due_at);
  perform gangq.refuse_larger('the name of a gang', octet_length(o.name), 1000);
  perform gangq.refuse_larger('what members of the gang need', pg_column_size(gang), 262144);
  -- 2. Without a task of its own the gang has what its first role's task declares.
  select x.* into d from gangq.task_options x
  where x.task = coalesce(a.task, roles -> 0 ->> 'task');
  o.max_attempts := coalesce(o.max_attempts, d.max_attempts);
  o.max_crashes := coalesce(o.max_crashes, d.max_crashes);
  o.max_trips := coalesce(o.max_trips, d.max_trips);
  m.options := o;
  m.priority := coalesce(a.priority, d.priority, 0);
  -- 3.
  for role, n in
    select e.role, e.n from jsonb_array_elements(roles) with ordinality as e(role, n)
  loop
    r := gangq.read_role(role, n, gang);
    perform gangq.check_level('the gang', o.require, o.prefer,
      r.strategy = 'strict_spread' and r.min > 1);
    if r.name = any (names) then
      perform gangq.refuse('GQ001', format('two roles are called %s', r.name),
        'Names of roles are unique in a gang; members of one role are its count.');
    end if;
    begin
      m.shapes[n] := gangq.check_shape(jsonb_populate_record(null::gangq.shapes, to_jsonb(r)
        || jsonb_build_object('queue', coalesce(a.queue, d.queue, 'default'))));
    exception
      when sqlstate 'GQ001' then
        get stacked diagnostics why = message_text, hint = pg_exception_hint;
        perform gangq.refuse('GQ001',
          case when o.roles is null then '' else format('role %s: ', r.name) end || why, hint);
    end;
    r.payload := nullif(role -> 'payload', 'null');
    r.payloads := nullif(role -> 'payloads', 'null');
    perform gangq.check_payloads(r, o.payloads is not null);
    r.payload := coalesce(r.payload, a.payload, '{}');
    all_roles[n] := r;
    names := names || r.name::text;
  end loop;
  -- 4.
  perform gangq.check_gang(a, o, all_roles);
  -- 5.
  m.queue := gangq.open_queue(coalesce(a.queue, d.queue, 'default'), array(
    select x.payload from unnest(all_roles) x where num_nonnulls(x.payloads, o.payloads) = 0
    union all
    select p.payload
    from (select x.payloads from unnest(all_roles) x union all select o.payloads) e(list)
    cross join lateral jsonb_array_elements(e.list) as p(payload)));
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
comment on function gangq.read_gang is
  'Internal. Reads and checks all of a gang but whether its queue and workers have the room.';

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
  perform gangq.check_limits(queue, 1, least_members, needs.gpus, needs.memory_mb, needs.cpus);
  if note is not null and wait is not true then
    why := gangq.kind_infeasible(kind, true);
    if why is not null then
      perform gangq.refuse('GQ001', why, 'Ask for less, start the workers first, or pass the '
        'option wait_for_hardware (--wait-for-hardware) if they are still to come.');
    end if;
  end if;
  return note;
end $$;
comment on function gangq.check_gang_fit is
  'Internal. Refuses (GQ001) a gang above a limit of its queue and, unless it waits for hardware, '
  'one that no known workers could hold. Returns why those registered now could not, or null.';

create function gangq.keep_kind(m gangq.gang_spec, submitter text, login text) returns integer
language sql as $$
  -- A pass looks at so many gangs of each kind: those of a submitter at its limit must not keep it
  -- from those of others, so the submitter may have shapes of its own.
  select gangq.intern_kind(((m).queue).name, jsonb_agg(jsonb_build_object('name', r.name, 'shape',
      gangq.shape_for(gangq.keep_shape((m).shapes[r.n], login), submitter, login), 'min', r.min,
      'max', r.count, 'strategy', r.strategy, 'require', r.require, 'prefer', r.prefer,
      'balanced', r.balanced) order by r.n),
    ((m).options).require, ((m).options).prefer, ((m).options).apart)
  from (select row_number() over () as n, x.* from unnest((m).roles) x) r
$$;
comment on function gangq.keep_kind is
  'Internal. The kind of this gang, stored if it is new; new shapes are charged to login.';

create function gangq.write_gang(
  g gangq.live_gangs, m gangq.gang_spec, job_ids bigint[], awaited bigint[]
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  o gangq.gang_options := m.options;
  q gangq.queues_table := m.queue;
begin
  insert into gangq.live_gangs (id, order_key, kind_id, shape_id, size, priority, max_attempts,
    max_crashes, max_trips, state, checkpoint_mode, claim_deadline_s, submitted_at, not_before,
    failure_policy, completion, preemptible, budget_s, timeout_s, timeout_style, timeout_at, name,
    note, submitter, login)
  select g.id, g.order_key, g.kind_id, k.shape_id, m.members, m.priority,
    coalesce(o.max_attempts, q.max_attempts), coalesce(o.max_crashes, q.max_crashes),
    coalesce(o.max_trips, q.max_trips),
    case when awaited <> '{}' then 'waiting' else 'blocked' end,
    coalesce(o.checkpoint_mode, case when m.least_members < m.members then 'rank0' else 'each' end),
    coalesce(o.claim_deadline_s, c.claim_deadline_s), g.submitted_at, g.not_before,
    coalesce(o.failure_policy, 'restart_gang'), o.completion, coalesce(o.preemptible, true),
    m.budget_s, w.timeout_s, coalesce(o.timeout_style, q.timeout_style, 'requeue'),
    greatest(g.submitted_at, g.not_before) + make_interval(secs => w.timeout_s), o.name, g.note,
    g.submitter, g.login
  from gangq.settings c
  join gangq.kind_roles k on k.kind_id = g.kind_id and k.ordinal = 1
  cross join lateral (
    select coalesce(o.timeout_s, q.placement_timeout_s, c.placement_timeout_s) as timeout_s) w;
  insert into gangq.live_jobs (id, order_key, gang_id, rank, role, submitted_at, shape_id, budget_s,
    waits_on, priority, max_attempts, max_crashes, max_trips, state, submitter, login, parent,
    payload)
  select job_ids[i.rank + 1], x.order_key, x.id, i.rank, k.ordinal, x.submitted_at, k.shape_id,
    coalesce(r.budget_s, q.budget_s), cardinality(awaited), x.priority, x.max_attempts,
    x.max_crashes, x.max_trips, x.state, x.submitter, x.login, o.parent,
    coalesce(o.payloads -> i.rank, r.payloads -> i.rank - k.first_rank, r.payload)
  from gangq.live_gangs x
  join gangq.kind_roles k on k.kind_id = x.kind_id
  join unnest(m.roles) with ordinality r on r.ordinality = k.ordinal
  cross join lateral generate_series(k.first_rank, k.first_rank + k.max_members - 1) as i(rank)
  where x.id = g.id
  order by i.rank;
  perform gangq.add_dependencies(job_ids, awaited);
end $$;
comment on function gangq.write_gang is
  'Internal. Writes a gang, its members by rank, and the live jobs they wait for.';

-- What submit_gang and a schedule have in common: who submits, and when, is in g.
create function gangq.add_gang(
  a gangq.arguments, o gangq.gang_options, g gangq.live_gangs, after bigint[]
) returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_variable
declare
  m gangq.gang_spec;
  awaited bigint[];
  base bigint;  -- see gangq.id_base
begin
  if num_nonnulls(o.roles::text, o.require, o.prefer) > 0 then
    -- Shared, so that submitters do not wait for each other, and configure takes no level away
    -- before this gang can be seen.
    perform from gangq.settings c for share;
  end if;
  m := gangq.read_gang(a, o);
  perform gangq.check_ceiling((m.queue).name, m.priority, g.submitter, g.login);
  g.kind_id := gangq.keep_kind(m, g.submitter, g.login);
  note := gangq.check_gang_fit(g.kind_id, (m.queue).name, m.least_members, o.wait_for_hardware);
  awaited := gangq.await(after);
  base := (select b.base from gangq.id_base() b);
  gang_id := base + nextval('gangq.gang_ids'::regclass);
  job_ids := array(
    select base + nextval('gangq.job_ids'::regclass) from generate_series(1, m.members));
  if o.request_id is not null then
    insert into gangq.requests (request_id, login, gang_id, job_ids, note)
    values (o.request_id, g.login, add_gang.gang_id, add_gang.job_ids, add_gang.note)
    on conflict do nothing;
    if not found then
      return query select * from gangq.answer_of(g.login, o.request_id, true, m.members);
      return;
    end if;
  end if;
  g.id := gang_id;
  g.note := note;
  g.order_key := gangq.order_key(m.priority, gangq.next_pos(base));
  perform gangq.write_gang(g, m, job_ids, awaited);
  perform gangq.log_event(g.submitted_at, 'submit', gang_id, 0, reason => note,
    data => jsonb_strip_nulls(jsonb_build_object('size', m.members,
      'min_size', nullif(m.least_members, m.members))));
  perform gangq.wake_tick();
  return next;
end $$;
comment on function gangq.add_gang is
  'Internal. Checks a gang against its queue and the workers, and writes it.';

create function gangq.submit_gang(
  task text default null, size integer default null, queue text default null,
  payload jsonb default '{}', priority integer default null, gpus integer default null,
  due_at timestamptz default null, after bigint[] default '{}', options jsonb default '{}'
) returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql as $$
#variable_conflict use_variable
declare
  o gangq.gang_options;
  a gangq.arguments;
  g gangq.live_gangs;
begin
  o := gangq.read_options('submit_gang', coalesce(options, '{}'), o);
  g.submitted_at := gangq.now();
  g.not_before := due_at;
  g.submitter := gangq.caller();
  g.login := session_user;
  if o.parent is not null then
    select p.submitter, p.login into g.submitter, g.login
    from gangq.submitter_of(o.parent, o.parent_token) p;
  end if;
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
comment on function gangq.submit_gang is
  'Submits a gang: members that start together or not at all, written as blocked in one '
  'transaction. size members alike, ranks 0 to size-1, or the option roles; payload goes to each '
  'of them, or the option payloads one to each. Each member needs gpus devices, and what the '
  'options say, for itself; see \dT+ gangq.gang_options. What is left null is as the workers '
  'declare the task. due_at, after: as in submit. note is set when the workers registered now '
  'could never hold it, with the numbers; it then waits for better ones. What all workers known, '
  'ended ones included, could not hold is taken only with the option wait_for_hardware. Raises '
  'GQ001 (also what exceeds a limit of its queue or all hardware known), GQ002, GQ004 (a draining '
  'queue), GQ007, GQ008, 42501, 55P03.';

create function gangq.submit_child(
  job_id bigint, token bigint, task text, queue text default null,
  payloads jsonb[] default array['{}'::jsonb], priority integer default null,
  gpus integer default null, due_at timestamptz default null, after bigint[] default '{}',
  request_id uuid default null, options jsonb default '{}'
) returns setof bigint language plpgsql as $$
#variable_conflict use_variable
begin
  return query select gangq.submit(task => task, queue => queue, payloads => payloads,
    priority => priority, gpus => gpus, due_at => due_at, after => after, request_id => request_id,
    options => gangq.for_parent(options, job_id, token));
end $$;
comment on function gangq.submit_child is
  'As submit, for the job that holds this claim, called by its worker. The submitter recorded, and '
  'whose limits count, is the job''s; its id is kept as parent. Raises GQ003, too.';

create function gangq.submit_child_gang(
  job_id bigint, token bigint, task text default null, size integer default null,
  queue text default null, payload jsonb default '{}', priority integer default null,
  gpus integer default null, due_at timestamptz default null, after bigint[] default '{}',
  options jsonb default '{}'
) returns table (gang_id bigint, job_ids bigint[], note text) language plpgsql as $$
#variable_conflict use_variable
begin
  return query select x.* from gangq.submit_gang(task => task, size => size, queue => queue,
    payload => payload, priority => priority, gpus => gpus, due_at => due_at, after => after,
    options => gangq.for_parent(options, job_id, token)) x;
end $$;
comment on function gangq.submit_child_gang is
  'As submit_gang, for the job that holds this claim: see submit_child. Raises GQ003, too.';

-- Without a parent the worker would submit in its own name, which it may not.
create function gangq.for_parent(options jsonb, job_id bigint, token bigint) returns jsonb
language plpgsql stable as $$
begin
  if job_id is null then
    perform gangq.refuse_stale(job_id, token);
  end if;
  return coalesce(options, '{}') || jsonb_build_object('parent', job_id, 'parent_token', token);
end $$;
comment on function gangq.for_parent is
  'Internal. The options with the claim that is submitted for. Raises GQ002 without one.';

-- What set_priority and cancel work on. A call for one job or one gang waits for it, as other verbs
-- do. A call for several waits for nobody and locks some hundreds of rows at most: it must not hold
-- up others for as long as its transaction is open.
create function gangq.lock_batch(
  job_ids bigint[], gang_ids bigint[], most integer default 500,
  out jobs bigint[], out gangs bigint[], out left_jobs bigint[], out left_gangs bigint[]
) language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  room integer := most;
  gang record;
  locked bigint[];
begin
  jobs := array(select distinct w.id from unnest(lock_batch.job_ids) as w(id) order by w.id);
  gangs := array(select distinct w.id from unnest(lock_batch.gang_ids) as w(id) order by w.id);
  left_jobs := '{}';
  left_gangs := '{}';
  if cardinality(jobs) + cardinality(gangs) <= 1 then
    perform 1 from gangq.live_gangs g where g.id = any (gangs) for update;
    perform 1 from gangq.live_jobs j where j.id = any (jobs) or j.gang_id = any (gangs)
    order by j.id for update;
    return;
  end if;
  for gang in
    select w.id, g.size
    from unnest(gangs) as w(id)
    left join gangq.live_gangs g on g.id = w.id
    order by w.id
  loop
    begin
      if room <= 0 or gang.size is not null and not gangq.try_lock_gang(gang.id)
        and exists (select 1 from gangq.live_gangs g where g.id = gang.id)
      then
        raise exception using errcode = 'GQ000';
      end if;
      room := room - coalesce(gang.size, 1);
    exception
      -- Those members that it had got are let go.
      when sqlstate 'GQ000' then
        left_gangs := left_gangs || gang.id;
        gangs := array_remove(gangs, gang.id);
    end;
  end loop;
  left_jobs := jobs[greatest(room, 0) + 1:];
  jobs := jobs[:greatest(room, 0)];
  locked := array(
    select j.id from gangq.live_jobs j
    where j.id = any (jobs) order by j.id for update skip locked);
  left_jobs := left_jobs || array(
    select j.id from gangq.live_jobs j where j.id = any (jobs) and j.id <> all (locked));
  jobs := array(select w.id from unnest(jobs) as w(id) where w.id <> all (left_jobs));
end $$;
comment on function gangq.lock_batch is
  'Internal. Locks some of these jobs and gangs, each gang as a whole. jobs, gangs: locked now, or '
  'not live; left_jobs, left_gangs: for another call, first those beyond what one call locks, then '
  'those that another transaction holds.';

create function gangq.set_priority(
  priority integer, job_ids bigint[] default '{}', gang_ids bigint[] default '{}'
) returns table (job_id bigint, gang_id bigint, state text)
language plpgsql as $$
#variable_conflict use_column
declare
  batch record;
begin
  perform gangq.read_options('set_priority', jsonb_build_object('priority',
    coalesce(to_jsonb(set_priority.priority), '"null"')), null::gangq.arguments);
  perform gangq.check_owner('reprioritise', set_priority.job_ids, set_priority.gang_ids);
  perform gangq.check_ceiling(n.queue, set_priority.priority, gangq.caller(), session_user) from (
    select s.queue
    from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
    where j.id = any (set_priority.job_ids)
    union
    select s.queue
    from gangq.live_gangs g join gangq.shapes s on s.id = g.shape_id
    where g.id = any (set_priority.gang_ids)) n;
  batch := gangq.lock_batch(set_priority.job_ids, set_priority.gang_ids);
  perform gangq.refuse('GQ002', format('job %s is not a live solo job', w.id),
    'It has ended, never existed, or is a member of a gang: then pass gang_ids.')
  from unnest(set_priority.job_ids) as w(id)
  where not exists (select 1 from gangq.live_jobs j where j.id = w.id and j.gang_id is null);
  perform gangq.refuse('GQ002', format('gang %s is not live', w.id),
    'It has ended or never existed: select * from gangq.gangs.')
  from unnest(set_priority.gang_ids) as w(id)
  where not exists (select 1 from gangq.live_gangs g where g.id = w.id);
  update gangq.live_gangs g set priority = set_priority.priority,
    order_key = gangq.order_key(set_priority.priority, g.order_key & 1125899906842623)
  where g.id = any (batch.gangs);
  return query
  update gangq.live_jobs j set priority = set_priority.priority,
    order_key = gangq.order_key(set_priority.priority, j.order_key & 1125899906842623)
  where j.id = any (batch.jobs) or j.gang_id = any (batch.gangs)
  returning j.id, j.gang_id, j.state;
  return query
  select null::bigint, l.id, 'left' from unnest(batch.left_gangs) as l(id)
  union all
  select l.id, null, 'left' from unnest(batch.left_jobs) as l(id);
  -- One for the whole call; of a single job or gang it can be found by its number.
  perform gangq.log_event(gangq.now(), 'priority',
    gang_id => case when cardinality(batch.gangs) = 1 and batch.jobs = '{}' then batch.gangs[1] end,
    job_id => case when cardinality(batch.jobs) = 1 and batch.gangs = '{}' then batch.jobs[1] end,
    data => jsonb_build_object('priority', set_priority.priority, 'job_ids', batch.jobs,
      'gang_ids', batch.gangs));
  perform gangq.wake_tick();
end $$;
comment on function gangq.set_priority is
  'Changes the priority of live jobs and gangs; each keeps its age. Nothing that runs is stopped. '
  'One job or gang is waited for; of several those that another transaction holds, and those '
  'beyond 500 rows, come back with the state left and are as they were: call again with them, in '
  'another transaction. One event for the call. Raises GQ001, GQ002, 42501 (another submitter''s '
  'in a queue that is not shared, or above the caller''s ceiling).';
