-- Work enters: submit, submit_gang, set_priority. Locks: submit and submit_gang take none that
-- another verb but configure could meet, also not on the jobs they wait for (after): submit_gang,
-- where it names levels, the settings, shared. Two calls with one request_id meet at its key.
-- set_priority: gangs by id, jobs by id.

create function gangq.shape_of(
  queue text, task text, gpus integer, vram_mb integer, memory_mb bigint, cpus numeric,
  labels jsonb, model text, selector jsonb, tolerates text[]
) returns table (id integer, fits boolean, light boolean) language sql stable as $$
  select s.id, s.fits, s.plain and s.model is null
  from gangq.shapes s
  where s.digest = gangq.shape_digest(shape_of.queue, shape_of.task, shape_of.gpus,
    shape_of.vram_mb, shape_of.memory_mb, round(shape_of.cpus, 3), shape_of.labels,
    shape_of.model, shape_of.selector, shape_of.tolerates, null, null)
  order by s.id limit 1
$$;
comment on function gangq.shape_of is
  'Internal. The shape of this requirement, if there is one already. fits: a worker that could run '
  'it has been known. light: its single jobs are, unless their queue has a limit or a fair order. '
  'selector and tolerates as shapes keep them.';

-- No unique key on shapes: a caller's transaction that holds a new shape uncommitted must not make
-- other submitters wait for it.
create function gangq.intern_shape(
  queue text, task text, gpus integer, vram_mb integer, memory_mb bigint, cpus numeric,
  labels jsonb, model text, selector jsonb default null, tolerates text[] default null,
  login text default session_user
) returns integer language plpgsql as $$
#variable_conflict use_variable
declare
  conditions jsonb := gangq.check_selector(selector);
  tolerated text[] := case when tolerates <> '{}'
    then gangq.check_taints(tolerates, 'tolerates', true) end;
  found_id integer;
begin
  if task is null then
    perform gangq.refuse('GQ001', 'a job needs a task', 'Pass task => ''resize'', or ''command''.');
  end if;
  if not exists (select from gangq.queues_table q where q.name = intern_shape.queue) then
    perform gangq.refuse('GQ002', format('queue %L does not exist', queue),
      format('Make it with: gangq queue create %s   (or select gangq.set_queue(%L)). Queues: %s',
        queue, queue,
        (select string_agg(q.name, ', ' order by q.name) from gangq.queues_table q)));
  end if;
  if vram_mb > 0 and gpus = 0 then
    perform gangq.refuse('GQ001', format('vram_mb is %s with gpus %s', vram_mb, gpus),
      'vram_mb is the memory needed on each device: ask for gpus as well.');
  end if;
  perform gangq.refuse_larger('labels', pg_column_size(labels), 8192);
  select s.id into found_id
  from gangq.shape_of(queue, task, gpus, vram_mb, memory_mb, cpus, labels, model, conditions,
    tolerated) s;
  if found then
    return found_id;
  end if;
  perform gangq.check_new_shape(login, false);
  insert into gangq.shapes as s (queue, task, gpus, vram_mb, memory_mb, cpus, labels, model,
    selector, tolerates, selects, login, added_at, digest)
  values (queue, task, gpus, vram_mb, memory_mb, cpus, labels, model, conditions, tolerated,
    gangq.selector_path(conditions, tolerated), login, gangq.now(),
    gangq.shape_digest(queue, task, gpus, vram_mb, memory_mb, round(cpus, 3), labels, model,
      conditions, tolerated, null, null))
  returning s.id into found_id;
  return found_id;
end $$;
comment on function gangq.intern_shape is
  'Internal. The shape of a requirement; it avoids no device: only a trip makes one that does '
  '(shape_avoiding). A new shape is charged to login (GQ007). Raises GQ001, GQ002.';

create function gangq.refuse_draining(draining text, queue text) returns void
language plpgsql as $$
begin
  perform gangq.refuse('GQ004', format('queue %s is draining', draining)
      || case when queue <> draining then format(', and %s is below it', queue) else '' end,
    'It takes no new work: use another queue, or wait until it is opened again.');
end $$;
comment on function gangq.refuse_draining is
  'Internal. Raises GQ004: a queue, or one above it, takes no new work.';

create function gangq.check_submission(q gangq.queues_table, payloads jsonb[])
returns gangq.queues_table language plpgsql as $$
declare
  draining text;
  too_large record;
begin
  select (array_agg(t.name order by length(t.name) desc) filter (where t.draining))[1],
    (array_agg(t.budget_s order by length(t.name) desc) filter (where t.budget_s is not null))[1],
    (array_agg(t.placement_timeout_s order by length(t.name) desc)
      filter (where t.placement_timeout_s is not null))[1],
    (array_agg(t.timeout_style order by length(t.name) desc)
      filter (where t.timeout_style is not null))[1]
  into draining, q.budget_s, q.placement_timeout_s, q.timeout_style
  from gangq.queues_table t
  where t.name = any (gangq.queue_path(q.name));
  if draining is not null then
    perform gangq.refuse_draining(draining, q.name);
  end if;
  -- What all of them have is more than any of them has.
  if pg_column_size(payloads) > q.max_payload_bytes then
    select p.n, pg_column_size(p.payload) as bytes into too_large
    from unnest(payloads) with ordinality as p(payload, n)
    where pg_column_size(p.payload) > q.max_payload_bytes
    limit 1;
    if found then
      perform gangq.refuse('GQ007',
        format('payload %s has %s bytes, queue %L takes %s', too_large.n, too_large.bytes, q.name,
          q.max_payload_bytes),
        'Put large inputs in shared storage and submit their address, or raise it: '
        'gangq.set_queue(..., ''{"max_payload_bytes": ...}'').');
    end if;
  end if;
  return q;
end $$;
comment on function gangq.check_submission is
  'Internal. Validates what is not part of a shape (GQ001, GQ004, GQ007) and returns the queue''s '
  'row, with the budget, placement timeout and timeout style of its nearest ancestor where it has '
  'none.';

-- Which of `after` are still live. Takes no lock: one of them may end before this transaction does
-- and not see the dependency; see settle_dependents. Ones already done do not count; ones that
-- failed refuse the submission.
create function gangq.await(after bigint[]) returns bigint[] language plpgsql as $$
declare
  live bigint[];
  other record;
begin
  if coalesce(cardinality(after), 0) = 0 then
    return '{}';
  end if;
  live := array(select j.id from gangq.live_jobs j where j.id = any (after) order by j.id);
  for other in
    select a.id, gangq.ended_as(a.id) as state
    from unnest(after) as a(id) where a.id is null or a.id <> all (live)
  loop
    if other.state is null then
      perform gangq.refuse('GQ002',
        format('after names job %s, which does not exist', coalesce(other.id::text, 'null')),
        'Submit the job it waits for first, and pass the id that submit returned.');
    elsif other.state <> 'done' then
      perform gangq.refuse('GQ001',
        format('after names job %s, which has %s', other.id, other.state),
        'It can never be done; retry it first (gangq.retry), or leave it out.');
    end if;
  end loop;
  return live;
end $$;
comment on function gangq.await is
  'Internal. Live jobs among those to wait for. Raises GQ001, GQ002.';

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
  'Internal. Who submitted the job that holds this claim, and by which login: its children are '
  'submitted on behalf of the same. Raises GQ002, GQ003, 42501.';

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
  'Internal. Refuses (GQ001) a job that none of the known workers of its queue, ended ones '
  'included, could ever run.';

create function gangq.known_workers(queue text) returns boolean language sql stable as $$
  select exists (select from gangq.incarnations i where known_workers.queue = any (i.queues))
$$;
comment on function gangq.known_workers is
  'Internal. Whether a worker of this queue is known, ended ones included.';

create function gangq.unserved(queue text) returns text language sql stable as $$
  select format('no worker of queue %s is known yet: jobs wait until one starts, with the needs '
    'they were submitted with; what it declares is for later ones', unserved.queue)
$$;
comment on function gangq.unserved is
  'Internal. The text of the notice GQ100. It is no warning: those go into the server''s log.';

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
  'Internal. What the call with this request_id has answered this login; no row: there was none '
  'within the hour. Raises GQ001 if that was no gang (of_gang) or had another number of jobs '
  '(null: any), GQ008.';

-- fits: a worker that could run it has been known.
create type gangq.submission as (
  queue text,
  shape integer,
  fits boolean,
  priority integer,
  budget_s real,
  max_attempts smallint,
  max_crashes smallint,
  max_trips smallint,
  base bigint,  -- see gangq.id_base
  state text,
  awaited bigint[],
  ids bigint[],
  light boolean
);
comment on type gangq.submission is
  'What is known of a submission once it may be made: where its jobs wait, their shape and limits, '
  'the state they begin in, the live jobs they wait for, and their ids if those are drawn already. '
  'state null: it was made before, by a call with the same request_id, and ids are the answer. '
  'light: they are known to be light.';

-- In one statement, and inlined into submit's. A submission that needs a closer look finds no row:
-- of a shape that is new, or in a queue that has limits, a parent, ceilings or a fair order.
create function gangq.plain_submission(
  task text, queue text, payload_bytes integer, priority integer, gpus integer, o gangq.job_options
) returns setof gangq.submission language sql stable as $$
  select x.name, z.id, z.fits, coalesce(plain_submission.priority, d.priority, 0),
    coalesce(d.budget_s, (
      select ts.budget_s from gangq.task_settings ts where ts.task = plain_submission.task
    ), x.budget_s),
    coalesce(d.max_attempts, x.max_attempts)::smallint,
    coalesce(d.max_crashes, x.max_crashes)::smallint,
    coalesce(d.max_trips, x.max_trips)::smallint,
    (select b.base from gangq.id_base() b), 'pending', null::bigint[], null::bigint[], z.light
  from (select 1) as one
  left join gangq.task_options d on d.task = plain_submission.task
  join gangq.queues_table x on x.name = coalesce(plain_submission.queue, d.queue, 'default')
  cross join lateral gangq.shape_of(x.name, plain_submission.task,
    coalesce(plain_submission.gpus, d.gpus, 0),
    coalesce((o).vram_mb, case when plain_submission.gpus = 0 then 0 else d.vram_mb end, 0),
    coalesce((o).memory_mb, d.memory_mb, 0), coalesce((o).cpus, d.cpus, 0),
    coalesce((o).labels, d.labels, '{}'), coalesce((o).model, d.model), d.selector, d.tolerates) z
  where strpos(x.name, '.') = 0 and not (x.draining or x.limited) and x.policy <> 'fair'
    and x.ceilings = '{}' and plain_submission.payload_bytes <= x.max_payload_bytes
    and (z.fits or (o).wait_for_hardware or not gangq.known_workers(x.name))
$$;
comment on function gangq.plain_submission is
  'Internal. All there is to know of a submission that asks for nothing unusual; no row: it does, '
  'or no submission has asked for this before.';

-- Inlined, too: what it says no to is not worth the attempt.
create function gangq.may_be_plain(
  payloads jsonb[], priority integer, due_at timestamptz, after bigint[], o gangq.job_options
) returns boolean language sql immutable as $$
  select (priority between -1000 and 1000) is not false
    and cardinality(payloads) > 0 and cardinality(after) = 0
    and num_nonnulls(due_at, (o).budget_s, (o).max_attempts, (o).max_crashes, (o).max_trips,
      (o).selector, (o).tolerates) = 0
$$;
comment on function gangq.may_be_plain is
  'Internal. Whether plain_submission can know all about a submission.';

create function gangq.as_declared(o gangq.job_options, gpus integer, d gangq.task_options)
returns gangq.job_options language sql immutable as $$
  select row(
    coalesce((o).vram_mb, case when as_declared.gpus = 0 then 0 else (d).vram_mb end, 0),
    coalesce((o).memory_mb, (d).memory_mb, 0), coalesce((o).cpus, (d).cpus, 0),
    coalesce((o).labels, (d).labels, '{}'), coalesce((o).selector, (d).selector),
    coalesce((o).tolerates, (d).tolerates), coalesce((o).model, (d).model),
    coalesce((o).wait_for_hardware, false), coalesce((o).budget_s, (d).budget_s),
    coalesce((o).max_attempts, (d).max_attempts), coalesce((o).max_crashes, (d).max_crashes),
    coalesce((o).max_trips, (d).max_trips), coalesce((o).wake, 'commit'), (o).parent,
    (o).parent_token)::gangq.job_options
$$;
comment on function gangq.as_declared is
  'Internal. Options with what they leave open as workers declare the task, then as usual. A job '
  'that asks for no device needs no memory on one, whatever is declared.';

create function gangq.checked_submission(
  task text, queue text, payloads jsonb[], priority integer, gpus integer, due_at timestamptz,
  after bigint[], request_id uuid, o gangq.job_options, submitter text, login text
) returns gangq.submission language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_variable
declare
  d gangq.task_options;
  q gangq.queues_table;
  s gangq.submission;
  known record;
begin
  -- Before anything is refused: what has changed since is no reason to refuse a repetition.
  s.ids := (
    select a.job_ids from gangq.answer_of(login, request_id, false, cardinality(payloads)) a
    where request_id is not null);
  if s.ids is not null then
    return s;
  end if;
  if coalesce(cardinality(payloads), 0) = 0 then
    perform gangq.refuse('GQ001', 'payloads is empty',
      'Pass one payload per job: payloads => array[''{"n": 1}'']::jsonb[].');
  end if;
  perform gangq.check_moment('due_at', due_at);
  select x.* into d from gangq.task_options x where x.task = checked_submission.task;
  o := gangq.as_declared(o, gpus, d);
  gpus := coalesce(gpus, d.gpus, 0);
  s.queue := coalesce(queue, d.queue, 'default');
  s.priority := coalesce(priority, d.priority, 0);
  s.base := (select b.base from gangq.id_base() b);
  select x as queue, z.id as shape, z.fits, ts.budget_s into known
  from gangq.queues_table x
  left join gangq.task_settings ts on ts.task = checked_submission.task
  left join lateral gangq.shape_of(x.name, checked_submission.task, gpus, o.vram_mb, o.memory_mb,
    o.cpus, o.labels, o.model, null, null) z
    on o.selector is null and coalesce(o.tolerates, '{}') = '{}'
  where x.name = s.queue;
  q := known.queue;
  s.shape := known.shape;
  if s.shape is null or (s.priority between -1000 and 1000) is not true then
    perform gangq.read_options('submit',
      jsonb_build_object('task', task, 'gpus', gpus, 'priority', s.priority),
      null::gangq.arguments);
  end if;
  if s.shape is null then
    s.shape := gangq.intern_shape(s.queue, task, gpus, o.vram_mb, o.memory_mb, o.cpus, o.labels,
      o.model, o.selector, o.tolerates, login);
    select x.* into q from gangq.queues_table x where x.name = s.queue;  -- It may be new.
  end if;
  -- Asked here before the function that refuses is called: that costs as much as the insert.
  if q.draining or strpos(q.name, '.') > 0 or pg_column_size(payloads) > q.max_payload_bytes
  then
    q := gangq.check_submission(q, payloads);
  end if;
  if not (known.fits is true or o.wait_for_hardware) then
    perform gangq.check_fit(s.shape, s.queue);
  end if;
  if q.ceilings <> '{}' or q.limited or q.policy = 'fair' or strpos(q.name, '.') > 0 then
    perform gangq.check_ceiling(s.queue, s.priority, submitter, login);
    s.shape := gangq.shape_for(s.shape, submitter, login);
    perform gangq.check_limits(s.queue, 0, 1, gpus, o.memory_mb, o.cpus);
  end if;
  s.state := case when due_at > gangq.now() then 'scheduled' else 'pending' end;
  s.awaited := case when after <> '{}' then gangq.await(after) end;
  if s.awaited <> '{}' then
    s.state := 'waiting';
    s.ids := array(select s.base + nextval('gangq.job_ids'::regclass) from unnest(payloads));
  end if;
  s.budget_s := coalesce(o.budget_s, known.budget_s, q.budget_s);
  s.max_attempts := coalesce(o.max_attempts, q.max_attempts);
  s.max_crashes := coalesce(o.max_crashes, q.max_crashes);
  s.max_trips := coalesce(o.max_trips, q.max_trips);
  return s;
end $$;
comment on function gangq.checked_submission is
  'Internal. What is known of a submission after every check, its shape interned. Raises what '
  'submit raises.';

create function gangq.follow_submission(s gangq.submission, due_at timestamptz, wake text)
returns void language plpgsql as $$
begin
  if s.awaited <> '{}' then
    insert into gangq.dependencies (job_id, on_job_id)
    select i.id, a.id
    from unnest(s.ids) as i(id)
    cross join (select distinct d.id from unnest(s.awaited) as d(id)) a;
  elsif wake is distinct from 'never'
    and due_at < gangq.now() + (select make_interval(secs => 1.5 * c.tick_s) from gangq.settings c)
  then
    -- It may be due before the next tick.
    perform gangq.wake_tick(true);
  end if;
end $$;
comment on function gangq.follow_submission is
  'Internal. After jobs were written that are not pending: records what they wait for, or asks for '
  'a tick when they are due soon.';

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
  if gangq.may_be_plain(payloads, priority, due_at, after, o) then
    select p.* into s
    from gangq.plain_submission(task, queue, pg_column_size(payloads), priority, gpus, o) p;
  end if;
  if s.shape is null then
    s := gangq.checked_submission(task, queue, payloads, priority, gpus, due_at, after,
      request_id, o, submitter, login);
    if s.state is null then
      return query select unnest(s.ids);
      return;
    end if;
  elsif not (s.fits or coalesce(o.wait_for_hardware, false)) then
    raise notice using errcode = 'GQ100', message = gangq.unserved(s.queue);
  end if;
  -- Places are drawn by transactions that have their number already: see gangq.lows.
  number := pg_current_xact_id();
  if submit.request_id is not null then
    -- It waits at the key for another call with this id.
    insert into gangq.requests as r (request_id, login, job_ids)
    select me.request_id, me.login, coalesce(s.ids,
      array(select s.base + nextval('gangq.job_ids'::regclass) from unnest(payloads)))
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
  if s.state <> 'pending' then
    perform gangq.follow_submission(s, due_at, o.wake);
  elsif s.light and o.wake = 'sleepers' then
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

-- What needs no device needs no memory on it either, whatever is declared or said for all. No
-- payloads here: aggregating takes a time quadratic in the size of the values, a minute for 10 MiB.
create function gangq.said(needs jsonb) returns jsonb language sql immutable as $$
  select case when said.needs -> 'gpus' = '0' then '{"vram_mb": 0}' else '{}' end::jsonb
    || coalesce(jsonb_object_agg(e.key, e.value), '{}')
  from jsonb_each(said.needs) e
  where e.value <> 'null'
$$;
comment on function gangq.said is 'Internal. What of these needs is said: null stands for absent.';

create function gangq.declared_needs(task text) returns jsonb language sql stable as $$
  select jsonb_build_object('gpus', coalesce(d.gpus, 0), 'vram_mb', coalesce(d.vram_mb, 0),
    'memory_mb', coalesce(d.memory_mb, 0), 'cpus', coalesce(d.cpus, 0),
    'labels', coalesce(d.labels, '{}'), 'selector', d.selector, 'tolerates', d.tolerates,
    'model', d.model)
  from (select declared_needs.task) t
  left join gangq.task_options d on d.task = t.task
$$;
comment on function gangq.declared_needs is
  'Internal. What a member of this task needs if nothing is said: as workers declare it, then '
  'none.';

create function gangq.read_roles(task text, size integer, gpus integer, o gangq.gang_options)
returns setof gangq.gang_role language plpgsql as $$
declare
  roles jsonb := coalesce(o.roles, jsonb_build_array(gangq.said(
    jsonb_build_object('name', 'member', 'count', size, 'min', o.min_size))));
  gang jsonb := gangq.said(jsonb_build_object('task', task, 'gpus', gpus, 'vram_mb', o.vram_mb,
    'memory_mb', o.memory_mb, 'cpus', o.cpus, 'labels', o.labels, 'selector', o.selector,
    'tolerates', o.tolerates, 'model', o.model, 'strategy', coalesce(o.strategy, 'pack'),
    'balanced', coalesce(o.balanced, false)));
  role jsonb;
  n integer;
  what text;
  r gangq.gang_role;
begin
  perform gangq.refuse_larger('what members of the gang need', pg_column_size(gang), 262144);
  if jsonb_typeof(roles) <> 'array' or jsonb_array_length(roles) not between 1 and 100 then
    perform gangq.refuse('GQ001', format('roles is %s', left(roles::text, 200)),
      'It is a JSON array of 1 to 100 roles: [{"name": "driver", "count": 1}, {"name": "executor", '
      '"count": 10, "min": 6}].');
  end if;
  for role, n in
    select e.role, e.n from jsonb_array_elements(roles) with ordinality as e(role, n)
  loop
    if jsonb_typeof(role) <> 'object' then
      perform gangq.refuse('GQ001', format('role %s is %s', n, left(role::text, 200)),
        'A role is a JSON object: {"name": "driver", "count": 1}.');
    end if;
    what := format('role %s',
      case when length(role ->> 'name') between 1 and 100 then role ->> 'name' else n::text end);
    -- Aggregating an object takes a time quadratic in the size of its values: a minute for 10 MiB.
    perform gangq.refuse_larger(what || ', without its payloads,',
      pg_column_size(role - '{payload,payloads}'::text[]), 262144);
    r := gangq.read_options(what, gangq.said(
        gangq.declared_needs(coalesce(role ->> 'task', gang ->> 'task')))
      || gang || gangq.said(role - '{payload,payloads}'::text[]),
      null::gangq.gang_role);
    r.payload := nullif(role -> 'payload', 'null');
    r.payloads := nullif(role -> 'payloads', 'null');
    r.min := coalesce(r.min, r.count);
    if r.name is null or r.count is null or r.min > r.count then
      perform gangq.refuse('GQ001',
        format('%s has count %s and min %s', what, coalesce(r.count::text, 'null'),
          coalesce(r.min::text, 'null')),
        'A role has a name, a count of at most 100000 members, and may have a min, without how '
        'many of them the gang does not start.');
    end if;
    if r.payload is not null and r.payloads is not null then
      perform gangq.refuse('GQ001', format('%s has both payload and payloads', what),
        'payload goes to every member of it, payloads one to each.');
    end if;
    if jsonb_typeof(r.payloads) <> 'array' or jsonb_array_length(r.payloads) <> r.count then
      perform gangq.refuse('GQ001',
        format('%s has %s and its payloads are %s', what, gangq.counted(r.count, 'member'),
          case jsonb_typeof(r.payloads) when 'array' then jsonb_array_length(r.payloads)::text
            else left(r.payloads::text, 100) end),
        'Pass one payload for each of its members.');
    end if;
    return next r;
  end loop;
end $$;
comment on function gangq.read_roles is
  'Internal. The roles of a gang in rank order, or its size as one, checked each for itself '
  '(GQ001). What a role does not say is the gang''s, then as its own task is declared.';

-- Levels are names an operator has given: one that nobody knows would wait for ever.
create function gangq.check_level(what text, require text, prefer text, spread boolean)
returns void language plpgsql stable as $$
declare
  levels text[] := (select c.topology from gangq.settings c);
  wrong text;
begin
  select l.level into wrong
  from unnest(array[require, prefer]) as l(level) where l.level <> all (levels) limit 1;
  if found then
    perform gangq.refuse('GQ001',
      format('%s names the topology level %L', what, left(wrong, 200)),
      format('Levels are, broad to narrow, %s; an administrator sets them: '
        'gangq.configure(''{"topology": [...]}'').', array_to_string(levels, ', ')));
  elsif array_position(levels, prefer) < array_position(levels, require) then
    perform gangq.refuse('GQ001',
      format('%s requires one %s and prefers one %s', what, require, prefer),
      format('Whoever shares a %s shares its %s: prefer a narrower level than the one required.',
        require, prefer));
  elsif spread and array_position(levels, require) >= array_position(levels, 'host') then
    perform gangq.refuse('GQ001',
      format('%s asks for a host for each member and for one %s for all', what, require),
      'strict_spread and that level exclude each other: leave one out, or use spread.');
  end if;
end $$;
comment on function gangq.check_level is
  'Internal. Refuses (GQ001) levels of topology that do not exist or contradict each other; '
  'spread: a host for each member.';

create function gangq.check_gang(size integer, due_at timestamptz, o gangq.gang_options)
returns void language plpgsql immutable as $$
begin
  if o.roles is null and size is null then
    perform gangq.refuse('GQ001', 'size is null; a gang has 1 to 100000 members',
      'size is the world size: how many members must start together. Or pass the option roles.');
  end if;
  if o.roles is null and o.min_size > size then
    perform gangq.refuse('GQ001', format('min_size is %s of a gang of %s', o.min_size, size),
      'It is without how many members the gang does not start, 1 to size; leave it out for size.');
  end if;
  if o.roles is not null and o.min_size is not null then
    perform gangq.refuse('GQ001', 'both roles and min_size are given',
      'Give each role that may have fewer members its own min.');
  end if;
  if jsonb_typeof(o.payloads) <> 'array' then
    perform gangq.refuse('GQ001', format('payloads is %s', left(o.payloads::text, 200)),
      'It is a JSON array with one payload per rank; payload goes to all of them.');
  end if;
  perform gangq.check_moment('due_at', due_at);
  perform gangq.refuse_larger('the name of a gang', octet_length(o.name), 1000);
end $$;
comment on function gangq.check_gang is
  'Internal. Validates what a gang asks for as a whole, before its roles are read. Raises GQ001, '
  'GQ007.';

-- The roles of a gang, each an element of these arrays, in rank order.
create type gangq.gang_members as (
  names text[],
  shapes integer[],
  mosts integer[],
  budgets real[],
  one_for_all jsonb[],
  one_each jsonb[],
  placed jsonb,
  least_members integer,
  members integer
);
comment on type gangq.gang_members is
  'The roles of a gang that is submitted, in rank order: how many members each has at most, their '
  'shape, budget and payload (one_for_all) or array of payloads (one_each). placed: as intern_kind '
  'takes them. least_members, members: how many there are in all, at least and at most.';

create function gangq.intern_members(
  task text, size integer, queue text, payload jsonb, gpus integer, o gangq.gang_options,
  submitter text, login text
) returns gangq.gang_members language plpgsql as $$
#variable_conflict use_variable
declare
  m gangq.gang_members := row('{}', '{}', '{}', '{}', '{}', '{}', '[]', 0, 0);
  r record;
  shape integer;
  why text;
  hint text;
begin
  for r in
    select x.* from gangq.read_roles(task, size, gpus, o) x
  loop
    if r.name = any (m.names) then
      perform gangq.refuse('GQ001', format('two roles are called %s', r.name),
        'Names of roles are unique in a gang; members of one role are its count.');
    end if;
    if o.payloads is not null and num_nonnulls(r.payload, r.payloads) > 0 then
      perform gangq.refuse('GQ001', format('both the gang and its role %s have payloads', r.name),
        'Pass them in one of the two places.');
    end if;
    begin
      -- A pass looks at so many gangs of each kind: those of a submitter at its limit must not keep
      -- it from those of others.
      shape := gangq.shape_for(
        gangq.intern_shape(queue, r.task, r.gpus, r.vram_mb, r.memory_mb, r.cpus, r.labels, r.model,
          r.selector, r.tolerates, login), submitter, login);
    exception
      when sqlstate 'GQ001' then
        get stacked diagnostics why = message_text, hint = pg_exception_hint;
        perform gangq.refuse('GQ001',
          case when o.roles is null then '' else format('role %s: ', r.name) end || why, hint);
    end;
    perform gangq.check_level(format('role %s', r.name), r.require, r.prefer,
      r.strategy = 'strict_spread' and r.min > 1);
    perform gangq.check_level('the gang', o.require, o.prefer,
      r.strategy = 'strict_spread' and r.min > 1);
    m.placed := m.placed || jsonb_build_array(jsonb_build_object('name', r.name, 'shape', shape,
      'min', r.min, 'max', r.count, 'strategy', r.strategy, 'require', r.require,
      'prefer', r.prefer, 'balanced', r.balanced));
    m.names := m.names || r.name;
    m.shapes := m.shapes || shape;
    m.mosts := m.mosts || r.count;
    m.budgets := m.budgets || coalesce(r.budget_s, o.budget_s,
      (select d.budget_s from gangq.task_options d where d.task = r.task),
      (select ts.budget_s from gangq.task_settings ts where ts.task = r.task));
    m.one_for_all := m.one_for_all || array[coalesce(r.payload, payload, '{}')];
    m.one_each := m.one_each || array[r.payloads];
    m.least_members := m.least_members + r.min;
    m.members := m.members + r.count;
  end loop;
  return m;
end $$;
comment on function gangq.intern_members is
  'Internal. Reads the roles of a gang, or its size, and interns what their members need. Raises '
  'GQ001, GQ002, GQ007.';

create function gangq.check_members(size integer, m gangq.gang_members, o gangq.gang_options)
returns void language plpgsql immutable as $$
begin
  if m.members > 100000 or m.members <> size then
    perform gangq.refuse('GQ001',
      format('the roles have %s members in all%s', m.members,
        coalesce(', and size is ' || size, '')),
      'Leave size out: it is the sum of the roles'' counts, 100000 at most.');
  end if;
  if jsonb_array_length(o.payloads) <> m.members then
    perform gangq.refuse('GQ001',
      format('%s payloads for a gang of %s', jsonb_array_length(o.payloads), m.members),
      'Pass one payload per rank, or payload for all of them.');
  end if;
  if m.least_members < m.members and o.checkpoint_mode = 'each' then
    perform gangq.refuse('GQ001',
      'checkpoint_mode is each, and the gang may run with fewer members than it has',
      'Parts saved by one number of members cannot be restored by another: use rank0, or leave it '
      'out.');
  end if;
  if m.least_members = m.members and o.failure_policy = 'shrink' then
    perform gangq.refuse('GQ001',
      'failure_policy is shrink, and no role may have fewer members than its count',
      'Say with how many it can go on: min of a role, or min_size.');
  end if;
  if o.completion <> all (m.names) then
    perform gangq.refuse('GQ001',
      format('completion names %L, which is no role of the gang', left(o.completion, 120)),
      format('Its roles are %s; leave it out when all members have to be done.',
        array_to_string(m.names, ', ')));
  end if;
end $$;
comment on function gangq.check_members is
  'Internal. Validates a gang''s options against the members it has. Raises GQ001.';

create function gangq.check_gang_fit(kind integer, queue text, least_members integer, wait boolean)
returns text language plpgsql as $$
declare
  needs record;
  note text;
  why text;
begin
  select sum(k.min_members * s.gpus::bigint)::bigint as gpus,
    sum(k.min_members * s.memory_mb)::bigint as memory_mb, sum(k.min_members * s.cpus) as cpus
  into needs
  from gangq.kind_roles k join gangq.shapes s on s.id = k.shape_id
  where k.kind_id = kind;
  perform gangq.check_limits(queue, 1, least_members, needs.gpus, needs.memory_mb, needs.cpus);
  note := gangq.kind_infeasible(kind);
  if note is not null and not wait then
    why := gangq.kind_infeasible(kind, true);
    if why is not null then
      perform gangq.refuse('GQ001', why, 'Ask for less, start the workers first, or pass the '
        'option wait_for_hardware (--wait-for-hardware) if they are still to come.');
    end if;
  end if;
  return note;
end $$;
comment on function gangq.check_gang_fit is
  'Internal. Refuses (GQ001) a gang above a limit of its queue, or one that the workers known '
  'could never hold unless it waits for others. Returns why those registered now could not; null: '
  'they could.';

create function gangq.write_gang(
  g gangq.live_gangs, m gangq.gang_members, q gangq.queues_table, o gangq.gang_options,
  job_ids bigint[], awaited bigint[]
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
begin
  insert into gangq.live_gangs (id, order_key, kind_id, shape_id, size, priority, max_attempts,
    max_crashes, max_trips, state, checkpoint_mode, claim_deadline_s, submitted_at, not_before,
    failure_policy, completion, preemptible, budget_s, timeout_s, timeout_style, timeout_at, name,
    note, submitter, login)
  select g.id, g.order_key, g.kind_id, m.shapes[1], m.members, g.priority,
    coalesce(o.max_attempts, q.max_attempts), coalesce(o.max_crashes, q.max_crashes),
    coalesce(o.max_trips, q.max_trips),
    case when awaited <> '{}' then 'waiting' else 'blocked' end,
    coalesce(o.checkpoint_mode, case when m.least_members < m.members then 'rank0' else 'each' end),
    coalesce(o.claim_deadline_s, c.claim_deadline_s), g.submitted_at, g.not_before,
    coalesce(o.failure_policy, 'restart_gang'), o.completion, coalesce(o.preemptible, true),
    -- A role without one runs under the installation's: the longest is known only if one is set.
    case
      when num_nonnulls(q.budget_s, (select max(b.s) from unnest(m.budgets) as b(s))) > 0 then (
        select max(coalesce(b.budget_s, q.budget_s,
          case when s.gpus > 0 then c.budget_gpu_s else c.budget_s end))
        from unnest(m.budgets, m.shapes) as b(budget_s, shape)
        join gangq.shapes s on s.id = b.shape) end,
    w.timeout_s, coalesce(o.timeout_style, q.timeout_style, 'requeue'),
    greatest(g.submitted_at, g.not_before) + make_interval(secs => w.timeout_s), o.name, g.note,
    g.submitter, g.login
  from gangq.settings c
  cross join lateral (
    select coalesce(o.timeout_s, q.placement_timeout_s, c.placement_timeout_s) as timeout_s) w;
  insert into gangq.live_jobs (id, order_key, gang_id, rank, role, submitted_at, shape_id, budget_s,
    waits_on, priority, max_attempts, max_crashes, max_trips, state, submitter, login, parent,
    payload)
  select job_ids[r.rank + 1], x.order_key, x.id, r.rank, r.role, x.submitted_at, r.shape,
    coalesce(r.budget_s, q.budget_s), cardinality(awaited), x.priority, x.max_attempts,
    x.max_crashes, x.max_trips, x.state, x.submitter, x.login, o.parent,
    coalesce(o.payloads -> r.rank, r.list -> r.nth, r.payload)
  from gangq.live_gangs x cross join (
    select k.n as role, k.shape, k.budget_s, k.payload, k.list, i.nth,
      (row_number() over (order by k.n, i.nth) - 1)::integer as rank
    from unnest(m.shapes, m.mosts, m.budgets, m.one_for_all, m.one_each) with ordinality
      as k(shape, most, budget_s, payload, list, n)
    cross join lateral generate_series(0, k.most - 1) as i(nth)) r
  where x.id = g.id
  order by r.rank;
  insert into gangq.dependencies (job_id, on_job_id)
  select i.id, a.id
  from unnest(job_ids) as i(id) cross join (select distinct d.id from unnest(awaited) as d(id)) a;
end $$;
comment on function gangq.write_gang is
  'Internal. Writes a gang, its members by rank, and the live jobs they wait for.';

create function gangq.make_gang(
  task text, size integer, queue text, payload jsonb, gpus integer, after bigint[],
  o gangq.gang_options, g gangq.live_gangs
) returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_variable
declare
  m gangq.gang_members;
  q gangq.queues_table;
  awaited bigint[];
  base bigint;  -- see gangq.id_base
begin
  perform gangq.check_gang(size, g.not_before, o);
  if num_nonnulls(o.roles::text, o.require, o.prefer) > 0 then
    -- Shared, so that submitters do not wait for each other, and configure takes no level away
    -- before this gang can be seen.
    perform from gangq.settings c for share;
  end if;
  m := gangq.intern_members(task, size, queue, payload, gpus, o, g.submitter, g.login);
  perform gangq.check_members(size, m, o);
  select x.* into q from gangq.queues_table x where x.name = make_gang.queue;
  q := gangq.check_submission(q,
    case when o.payloads is null then array_remove(m.one_for_all, null) end || array(
      select p.payload from unnest(m.one_each || array[o.payloads]) as e(list)
      cross join lateral jsonb_array_elements(e.list) as p(payload)));
  perform gangq.check_ceiling(queue, g.priority, g.submitter, g.login);
  g.kind_id := gangq.intern_kind(queue, m.placed, o.require, o.prefer, o.apart);
  note := gangq.check_gang_fit(g.kind_id, queue, m.least_members,
    coalesce(o.wait_for_hardware, false));
  awaited := gangq.await(after);
  base := (select b.base from gangq.id_base() b);
  gang_id := base + nextval('gangq.gang_ids'::regclass);
  job_ids := array(
    select base + nextval('gangq.job_ids'::regclass) from generate_series(1, m.members));
  if o.request_id is not null then
    insert into gangq.requests (request_id, login, gang_id, job_ids, note)
    values (o.request_id, g.login, make_gang.gang_id, make_gang.job_ids, make_gang.note)
    on conflict do nothing;
    if not found then
      return query select * from gangq.answer_of(g.login, o.request_id, true, m.members);
      return;
    end if;
  end if;
  g.id := gang_id;
  g.note := note;
  g.order_key := gangq.order_key(g.priority, gangq.next_pos(base));
  perform gangq.write_gang(g, m, q, o, job_ids, awaited);
  perform gangq.log_event(g.submitted_at, 'submit', gang_id, 0, reason => note,
    data => jsonb_strip_nulls(jsonb_build_object('size', m.members,
      'min_size', nullif(m.least_members, m.members))));
  perform gangq.wake_tick();
  return next;
end $$;
comment on function gangq.make_gang is
  'Internal. Checks and writes a gang; g: who submits it, when, with which priority. Returns and '
  'raises what submit_gang does.';

create function gangq.submit_gang(
  task text default null, size integer default null, queue text default null,
  payload jsonb default '{}', priority integer default null, gpus integer default null,
  due_at timestamptz default null, after bigint[] default '{}', options jsonb default '{}'
) returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_variable
declare
  o gangq.gang_options;
  g gangq.live_gangs;
  d gangq.task_options;
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
  -- Roles have what each one's task is declared with (read_roles). What is the gang's is as its own
  -- task says, or the first role's.
  select x.* into d from gangq.task_options x
  where x.task = coalesce(submit_gang.task,
    case jsonb_typeof(o.roles) when 'array' then o.roles -> 0 ->> 'task' end);
  perform gangq.read_options('submit_gang', jsonb_strip_nulls(jsonb_build_object('task', task,
    'size', size, 'priority', priority, 'gpus', gpus)), null::gangq.arguments);
  g.priority := coalesce(priority, d.priority, 0);
  o.max_attempts := coalesce(o.max_attempts, d.max_attempts);
  o.max_crashes := coalesce(o.max_crashes, d.max_crashes);
  o.max_trips := coalesce(o.max_trips, d.max_trips);
  return query select x.* from gangq.make_gang(task, size, coalesce(queue, d.queue, 'default'),
    payload, gpus, after, o, g) x;
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
  'whose limits count, is the job''s; the children keep its id as parent. Raises what submit '
  'raises, and GQ003 when the claim is over.';

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
  'As submit_gang, for the job that holds this claim, called by its worker. The submitter '
  'recorded, and whose limits count, is the job''s; the children keep its id as parent. Raises '
  'what submit_gang raises, and GQ003 when the claim is over.';

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
  busy bigint[];
begin
  jobs := array(
    select w.id from unnest(lock_batch.job_ids) with ordinality as w(id, n)
    group by w.id order by min(w.n));
  gangs := array(
    select w.id from unnest(lock_batch.gang_ids) with ordinality as w(id, n)
    group by w.id order by min(w.n));
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
    from unnest(gangs) with ordinality as w(id, n)
    left join gangq.live_gangs g on g.id = w.id
    order by w.n
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
  busy := array(
    select j.id from gangq.live_jobs j
    where j.id = any (jobs) order by j.id for update skip locked);
  busy := array(
    select j.id from gangq.live_jobs j where j.id = any (jobs) and j.id <> all (busy));
  jobs := array(
    select w.id from unnest(jobs) with ordinality as w(id, n)
    where w.id <> all (busy) order by w.n);
  left_jobs := left_jobs || busy;
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
  missing bigint;
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
  select w.id into missing from unnest(set_priority.job_ids) as w(id)
  where not exists (
    select 1 from gangq.live_jobs j where j.id = w.id and j.gang_id is null) limit 1;
  if found then
    perform gangq.refuse('GQ002', format('job %s is not a live solo job', missing),
      'It has ended, never existed, or is a member of a gang: then pass gang_ids.');
  end if;
  select w.id into missing from unnest(set_priority.gang_ids) as w(id)
  where not exists (select 1 from gangq.live_gangs g where g.id = w.id) limit 1;
  if found then
    perform gangq.refuse('GQ002', format('gang %s is not live', missing),
      'It has ended or never existed: select * from gangq.gangs.');
  end if;
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
