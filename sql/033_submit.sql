-- Work enters: submit (single jobs), submit_gang (034), and what they share; set_priority.
--
-- A submission is read (read_submission, read_gang: its options, then what workers declare its task
-- with, then what its queue and the installation have), checked, and written. What members need is
-- a row of gangq.shapes, which keep_shape stores once.
-- Locks: submit and submit_gang take none on the jobs they wait for (after). Two calls meet at one
-- request_id, at the name of a new limit and at a new shape; submit_gang, where it names levels,
-- meets configure at the settings, shared. set_priority: gangs by id, jobs by id.

-- Internal. This queue's row. Raises GQ002.
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

-- Internal. Raises GQ004: a queue, or one above it, takes no new work.
create function gangq.refuse_draining(draining text, queue text) returns void
language plpgsql as $$
begin
  perform gangq.refuse('GQ004', format('queue %s is draining', draining)
      || case when queue <> draining then format(', and %s is below it', queue) else '' end,
    'It takes no new work: use another queue, or wait until it is opened again.');
end $$;

-- Internal. A queue that takes these payloads, with what it inherits from those above it.
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
  -- A cheap test first: the total size is an upper bound for each payload.
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

-- Internal. What a job needs, as shapes keep it. Raises GQ001, GQ007.
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

-- Internal. The jobs to wait for, each once, those first that are live (waits_on: how many), and
-- the outcome wanted of each. Raises GQ001, GQ002. Takes no lock: an awaited job may end before
-- this transaction does and not see the dependency; see settle_dependents. An outcome that is known
-- already is judged at once: one that is wanted is not waited for, another one refuses the
-- submission. Every job named exists, so no cycle can be made.
create function gangq.await(
  after bigint[], after_any bigint[], after_failed bigint[],
  out awaited bigint[], out wants text[], out waits_on integer
) language plpgsql as $$
declare
  outcomes text[];
  twice bigint;
begin
  waits_on := 0;
  if num_nulls(nullif(after, '{}'), nullif(after_any, '{}'), nullif(after_failed, '{}')) = 3 then
    return;
  end if;
  select array_agg(n.id), array_agg(n.wants), count(*) - count(distinct coalesce(n.id, 0))
  into awaited, wants, twice
  from (
    select a.id, 'done' as wants from unnest(after) as a(id)
    union
    select a.id, 'any' from unnest(after_any) as a(id)
    union
    select a.id, 'failed' from unnest(after_failed) as a(id)) n;
  if twice > 0 then
    perform gangq.refuse('GQ001',
      format('job %s is named in %s', n.id, string_agg(gangq.after_option(n.wants), ' and ')),
      'A job is waited for with one outcome: name it once.')
    from unnest(awaited, wants) as n(id, wants)
    group by n.id having count(*) > 1 order by n.id limit 1;
  end if;
  -- The live ones first.
  select array_agg(e.on_job_id order by e.live desc, e.on_job_id),
    array_agg(e.wants order by e.live desc, e.on_job_id),
    array_agg(e.outcome order by e.live desc, e.on_job_id), count(*) filter (where e.live)
  into awaited, wants, outcomes, waits_on
  from gangq.judge_awaited(awaited, wants) e;
  perform case
    when e.outcome is null then gangq.refuse('GQ002',
      format('%s names job %s, which does not exist', gangq.after_option(e.wants),
        coalesce(e.id::text, 'null')),
      'Submit the job it waits for first, and pass the id that submit returned.')
    else gangq.refuse('GQ001',
      format('%s names job %s, which %s', gangq.after_option(e.wants), e.id,
        case e.outcome when 'failed' then 'has failed' else 'is ' || e.outcome end),
      format('It can never %s; retry it first (gangq.retry), or leave it out.',
        case e.wants when 'done' then 'be done' else 'fail' end)) end
  from unnest(awaited, wants, outcomes) with ordinality as e(id, wants, outcome, n)
  where e.n > waits_on and gangq.is_wanted(e.outcome, e.wants) is not true;
  if 'done' = all (wants) then
    wants := null;
  end if;
end $$;

-- Internal. The argument that wants this outcome.
create function gangq.after_option(wants text) returns text language sql immutable
return case wants when 'done' then 'after' else 'after_' || wants end;

-- Internal. Whether the role that is set, or the login where none is, is a submitter: may_act_as,
-- but inlined, because every submission asks it.
create function gangq.is_submitter() returns boolean language sql stable
return pg_has_role(coalesce(nullif(current_setting('role'), 'none'), session_user),
  'gangq_submitter', 'member');

-- Internal. On whose behalf the caller submits. Without a job on its own, which takes a submitter:
-- workers may call submit too. With a job on behalf of that job's submitter, which takes the worker
-- that holds this claim of it. The claim is not locked: a child of a claim that ends this moment
-- was submitted before it ended. Raises GQ003, 42501.
create function gangq.submitter_of(
  job_id bigint, token bigint, out submitter text, out login text
) language plpgsql stable as $$
declare
  j gangq.live_jobs;
begin
  if job_id is null then
    if not (gangq.is_submitter() or gangq.is_admin()) then
      perform gangq.refuse('42501', format('%s may not submit', gangq.actor()),
        'Submitters may (grant gangq_submitter), and a worker for a job that it runs, with the '
        'options parent and parent_token.');
    end if;
    submitter := gangq.caller();
    login := session_user;
    return;
  end if;
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

-- Internal. Whether a worker of this queue is known, ended ones included.
create function gangq.known_workers(queue text) returns boolean language sql stable as $$
  select exists (select from gangq.incarnations i where known_workers.queue = any (i.queues))
$$;

-- Internal. The text of the notice GQ100. It is no warning: those go into the server's log.
create function gangq.unserved(queue text) returns text language sql stable
return format('no worker of queue %s is known yet: jobs wait until one starts, with the needs they '
  'were submitted with; what it declares is for later ones', queue);

-- Internal. Refuses (GQ001) what no known worker could ever run; none known: notice GQ100. A shape
-- that a known worker fits stays so. Skip locked, because a caller's transaction must not make
-- others wait.
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
--
-- Internal. What the call with this request_id answered this login within the hour; or no row.
create function gangq.answer_of(login text, request_id uuid, of_gang boolean, jobs integer)
returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql set enable_seqscan = off as $$
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

-- What is known of a submission. shape: null if nobody asked for it before. fits: a worker that
-- could run it has been known. light: its jobs are known to be light. special: the shape, the queue
-- or the payloads want more checks (check_special). Then what its rows have: priority, limits,
-- state, what they wait for (see gangq.await), their ids if those are drawn already (base: see
-- gangq.id_base), their batch. asked: what its jobs need.
create type gangq.submission as (
  queue text, shape integer, fits boolean, light boolean, special boolean, priority integer,
  budget_s real, max_attempts smallint, max_crashes smallint, max_trips smallint,
  max_snoozes smallint, base bigint,
  state text, awaited bigint[], wants text[], waits_on integer, ids bigint[], batch_id bigint,
  asked gangq.shapes
);

-- Internal. A submission; what it leaves open is as its task is declared, then its queue. One
-- statement, and inlined into submit's: nothing in here refuses but the selector.
create function gangq.read_submission(
  task text, queue text, payloads jsonb[], priority integer, gpus integer, o gangq.job_options
) returns setof gangq.submission language sql stable as $$
  select x.name, z.id, z.fits, z.light and not v.special,
    v.special or z.id is null or (n.asked).limit_key is not null or (o)."limit" is not null
      or (o).rate is not null or num_nonnulls((o).name, (o).tags, (o).at_most, (o).indexes) > 0
      or not (z.fits or coalesce((o).wait_for_hardware, false)
        or not gangq.known_workers(x.name)),
    coalesce(read_submission.priority, d.priority, 0),
    coalesce((o).budget_s, d.budget_s, ts.budget_s, x.budget_s),
    coalesce((o).max_attempts, d.max_attempts, x.max_attempts)::smallint,
    coalesce((o).max_crashes, d.max_crashes, x.max_crashes)::smallint,
    coalesce((o).max_trips, d.max_trips, x.max_trips)::smallint,
    coalesce((o).max_snoozes, d.max_snoozes, 100)::smallint,
    (select b.base from gangq.id_base() b), 'pending', null::bigint[], null::text[], 0,
    null::bigint[], null::bigint, n.asked
  from (select 1) as one
  left join gangq.task_options d on d.task = read_submission.task
  left join gangq.task_settings ts on ts.task = read_submission.task
  left join gangq.queues_table x on x.name = coalesce(read_submission.queue, d.queue, 'default')
  -- The row is made once (offset 0), not again for each of its columns. A job that asks for no
  -- device needs no memory on one, whatever is declared. Columns, as in gangq.shapes: id, queue,
  -- task, gpus, vram_mb, memory_mb, cpus, labels, model, avoid, selector, tolerates,
  -- limit_key, and seven more.
  cross join lateral (
    select row(null, coalesce(read_submission.queue, d.queue, 'default'), read_submission.task,
      coalesce(read_submission.gpus, d.gpus, 0),
      coalesce((o).vram_mb, case when read_submission.gpus = 0 then 0 else d.vram_mb end, 0),
      coalesce((o).memory_mb, d.memory_mb, 0), coalesce((o).cpus, d.cpus, 0),
      coalesce((o).labels, d.labels, '{}'), coalesce((o).model, d.model), null,
      case when (o).selector is null then d.selector else gangq.check_selector((o).selector) end,
      case when (o).tolerates is null then d.tolerates
        else nullif(gangq.check_taints((o).tolerates, 'tolerates', true), '{}') end,
      coalesce((o).limit_key, d.limit_key), null, null, null, null, null, null,
      null)::gangq.shapes as asked
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

-- Internal, for submit. A submission, checked, whose jobs wait for others or for due_at.
create function gangq.check_submission(
  s gangq.submission, payloads jsonb[], o gangq.job_options, due_at timestamptz, after bigint[],
  submitter text, login text, t timestamptz
) returns gangq.submission language plpgsql as $$
begin
  perform gangq.check_moment('due_at', due_at);
  if s.special is not false then
    s := gangq.check_special(s, payloads, o, submitter, login);
  end if;
  select a.awaited, a.wants, a.waits_on into s.awaited, s.wants, s.waits_on
  from gangq.await(after, o.after_any, o.after_failed) a;
  s.state := case when s.waits_on > 0 then 'waiting' when due_at > t then 'scheduled'
    else 'pending' end;
  return s;
end $$;

-- Internal. The checks of a submission that is special; stores its shape if that is new.
create function gangq.check_special(
  s gangq.submission, payloads jsonb[], o gangq.job_options, submitter text, login text
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
  perform gangq.name_limit((s.asked).limit_key, coalesce(o."limit", d."limit"),
    coalesce(o.rate, d.rate), login)
  from (select 1) as one
  left join gangq.task_options d
    on d.task = (s.asked).task and d.limit_key = (s.asked).limit_key;
  if num_nonnulls(o.name, o.tags, o.at_most, o.indexes) > 0 then
    s := gangq.draw_batch(s, o, cardinality(payloads), login);
  end if;
  if s.shape is null then
    s.shape := gangq.keep_shape(gangq.check_shape(s.asked), login);
  end if;
  if not (coalesce(s.fits, false) or coalesce(o.wait_for_hardware, false)) then
    perform gangq.check_fit(s.shape, queue);
  end if;
  perform gangq.check_ceiling(queue, s.priority, submitter, login);
  perform gangq.check_limits(queue, 0, 1, (s.asked).gpus, (s.asked).memory_mb, (s.asked).cpus);
  s.shape := gangq.shape_for(s.shape, submitter, login);
  s.budget_s := coalesce(s.budget_s, q.budget_s);
  return s;
end $$;

-- Internal. These jobs wait for the first waits_on of awaited, each for the outcome it wants.
create function gangq.add_dependencies(
  job_ids bigint[], awaited bigint[], wants text[], waits_on integer
) returns void language sql as $$
  insert into gangq.dependencies (job_id, on_job_id, wants)
  select i.id, a.id, coalesce(a.wants, 'done')
  from unnest(job_ids) as i(id)
  cross join unnest(awaited[: waits_on], wants[: waits_on]) as a(id, wants)
$$;

-- Internal, for submit. Wakes who can take these jobs, or the tick if they are due before the next
-- one.
create function gangq.wake_submitted(
  s gangq.submission, jobs bigint, wake text, due_at timestamptz, t timestamptz
) returns void language plpgsql as $$
begin
  if s.state = 'pending' then
    perform gangq.wake_lane(s.shape, jobs, coalesce(wake, 'commit'));
  elsif due_at < t + (select make_interval(secs => 1.5 * c.tick_s) from gangq.settings c) then
    perform gangq.wake_tick(true);
  end if;
end $$;

-- 1. Options and arguments. What every submission runs is written out or inlined: a call of a
--    function costs up to 4 us, and the whole of submit 60.
-- 2. Read what the queue and the task say (read_submission): special is anything but plain jobs of
--    a known shape in a plain queue.
-- 3. Only what is special, or has due_at or after: answer a repetition before anything is refused,
--    because what has changed since is no reason to refuse it; then check, and set the state.
-- 4. Draw this transaction's number: only then may it draw places (gangq.lows).
-- 5. With a request_id wait at its key for another call with it, and answer as that one did.
-- 6. Write the batch, if the options name one, and the jobs.
-- 7. Wake who can take them.
--
-- Submits one job per payload, all alike otherwise, and returns their ids in order. Inside a
-- transaction they appear when it commits. gpus: devices that a worker must have free. due_at: not
-- before. after: jobs that must be done first; if one fails or is cancelled, these are cancelled
-- (other outcomes: the options after_any, after_failed). request_id: a new one for each submission.
-- A call that is repeated with it within an hour, because its answer was lost, returns the ids of
-- the first call and submits nothing. It waits up to 2 s for a first call that has not ended; if
-- that is rolled back, it submits. Each login has ids of its own, and only the kind and the number
-- of jobs are compared. options: what is needed or asked for besides, {"vram_mb": 16000,
-- "budget_s": 3600}; see \dT+ gangq.job_options. What is left null is as the workers declare the
-- task (gangq.tasks), then: queue default, and no needs. What no worker of the queue that is known,
-- ended ones included, could ever run is refused, unless with the option wait_for_hardware; while
-- none is known a notice (GQ100) says so. Raises GQ001, GQ002, GQ004 (a draining queue), GQ007 (a
-- payload, or more new distinct requirements than settings.new_shapes_per_day), GQ008 (a request_id
-- needs READ COMMITTED), 42501 (no submitter, or priority above its ceiling), 55P03. A worker calls
-- it for a job that it runs, with the options parent and parent_token: the submitter recorded, and
-- whose limits count, is the job's. Then it raises GQ003, too.
create function gangq.submit(
  task text, queue text default null, payloads jsonb[] default array['{}'::jsonb],
  priority integer default null, gpus integer default null, due_at timestamptz default null,
  after bigint[] default '{}', request_id uuid default null, options jsonb default '{}'
) returns setof bigint language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  t timestamptz := gangq.now();
  o gangq.job_options;
  s gangq.submission;
  number xid8;
  submitter text := gangq.caller();
  login text := session_user;
begin
  -- 1. First the options of a client that asks for nothing else.
  if options = '{"wake": "sleepers"}' then
    o.wake := 'sleepers';
  elsif options <> '{}' then
    o := gangq.read_options('submit', options, o);
  end if;
  if o.parent is not null or not gangq.is_submitter() then
    select p.submitter, p.login into submitter, login
    from gangq.submitter_of(o.parent, o.parent_token) p;
  end if;
  if not (coalesce(priority, 0) between -1000 and 1000 and coalesce(gpus, 0) between 0 and 1024
    and length(task) <= 200 and task <> '')
  then
    perform gangq.read_options('submit',
      jsonb_build_object('task', task, 'gpus', gpus, 'priority', priority), null::gangq.arguments);
  end if;
  -- 2.
  select r.* into s
  from gangq.read_submission(task, queue, payloads, priority, gpus, o) r;
  -- 3.
  if s.special is not false or due_at is not null or after <> '{}' or o.after_any <> '{}'
    or o.after_failed <> '{}'
  then
    return query select unnest(a.job_ids)
    from gangq.answer_of(login, submit.request_id, false, cardinality(payloads)) a
    where submit.request_id is not null;
    if found then
      return;
    end if;
    s := gangq.check_submission(s, payloads, o, due_at, after, submitter, login, t);
  end if;
  if not (s.special or s.fits or coalesce(o.wait_for_hardware, false)) then
    raise notice using errcode = 'GQ100', message = gangq.unserved(s.queue);
  end if;
  -- 4.
  number := pg_current_xact_id();
  if s.waits_on > 0 and s.ids is null then
    s.ids := array(select s.base + nextval('gangq.job_ids'::regclass) from unnest(payloads));
  end if;
  -- 5.
  if request_id is not null then
    insert into gangq.requests as r (request_id, login, job_ids)
    select me.request_id, me.login, coalesce(s.ids, array(
      select s.base + nextval('gangq.job_ids'::regclass) from unnest(payloads)))
    from (select submit.request_id, login) as me(request_id, login)
    where gangq.reads_committed()
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
  -- 6.
  if s.batch_id is not null then
    perform gangq.add_batch(s, o, cardinality(payloads), submitter, login, t);
  end if;
  return query
  insert into gangq.live_jobs (id, order_key, submitted_at, due_at, shape_id, budget_s, waits_on,
    priority, max_attempts, max_crashes, max_trips, max_snoozes, state, submitter, login, parent,
    awaited, wants, batch_id, array_index, payload,
    trace)
  select coalesce(s.ids[p.n], s.base + nextval('gangq.job_ids'::regclass)),
    gangq.order_key(s.priority, gangq.next_pos(s.base)), t, submit.due_at, s.shape, s.budget_s,
    s.waits_on, s.priority, s.max_attempts, s.max_crashes, s.max_trips, s.max_snoozes, s.state,
    submitter, login, o.parent, s.awaited, s.wants, s.batch_id,
    case when s.batch_id is not null then coalesce(o.indexes[p.n], p.n - 1) end, p.payload, o.trace
  from unnest(payloads) with ordinality as p(payload, n)
  returning id;
  -- 7.
  if s.waits_on > 0 then
    perform gangq.add_dependencies(s.ids, s.awaited, s.wants, s.waits_on);
  elsif s.state = 'pending' and s.light and o.wake = 'sleepers' then
    if exists (select from gangq.sleepers z where z.queues @> array[s.queue]) then
      perform gangq.wake_sleepers(s.queue, cardinality(payloads), o.wake);
    end if;
  elsif o.wake is distinct from 'never' then
    perform gangq.wake_submitted(s, cardinality(payloads), o.wake, due_at, t);
  end if;
end $$;

-- Changes the priority of live jobs and gangs; each keeps its age. Nothing that runs is stopped.
-- One job or gang is waited for; of several those that another transaction holds, and those beyond
-- 500 rows, come back with the state left and are as they were: call again with them, in another
-- transaction. One event for the call. Raises GQ001, GQ002, 42501 (another submitter's in a queue
-- that is not shared, or above the caller's ceiling).
create function gangq.set_priority(
  priority integer, job_ids bigint[] default '{}', gang_ids bigint[] default '{}'
) returns table (job_id bigint, gang_id bigint, state text)
language plpgsql as $$
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
  perform gangq.refuse_missing('gang', w.id::text, true)
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
