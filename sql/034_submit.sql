-- submit: single jobs. Locks: see 033.

-- What is known of a submission. shape: null if nobody asked for it before. fits: a worker that
-- could run it has been known. light: its jobs are known to be light. special: the shape, the queue
-- or the payloads want more checks (check_special). Then what its rows have: priority, limits,
-- state, what they wait for (see gangq.await), their ids if those are drawn already (base: see
-- gangq.id_base), their batch. asked: what its jobs need.
create type gangq.submission as (
  queue text, shape integer, fits boolean, light boolean, special boolean, priority integer,
  budget_s real, max_attempts smallint, max_crashes smallint, max_trips smallint,
  max_snoozes smallint, base bigint,
  submitter text, login text, state text, awaited bigint[], wants text[], waits_on integer,
  ids bigint[], batch_id bigint, asked gangq.shapes
);

-- Internal. A submission; what it leaves open is as its task is declared, then its queue. One
-- statement, and inlined into submit's: nothing in here refuses but the selector.
create function gangq.read_submission(
  task text, queue text, payloads jsonb[], priority integer, gpus integer, o gangq.job_options
) returns setof gangq.submission language sql stable as $$
  select x.name, z.id as shape, z.fits, z.light and not v.special as light,
    v.special or z.id is null or (n.asked).limit_key is not null or (o)."limit" is not null
      or (o).rate is not null or num_nonnulls((o).name, (o).tags, (o).at_most, (o).indexes) > 0
      or not (z.fits or coalesce((o).wait_for_hardware, false)
        or not gangq.known_workers(x.name)) as special,
    coalesce(read_submission.priority, d.priority, 0) as priority,
    coalesce((o).budget_s, d.budget_s, ts.budget_s, x.budget_s) as budget_s,
    coalesce((o).max_attempts, d.max_attempts, x.max_attempts)::smallint as max_attempts,
    coalesce((o).max_crashes, d.max_crashes, x.max_crashes)::smallint as max_crashes,
    coalesce((o).max_trips, d.max_trips, x.max_trips)::smallint as max_trips,
    coalesce((o).max_snoozes, d.max_snoozes, 100)::smallint as max_snoozes,
    (select b.base from gangq.id_base() b) as base, gangq.caller() as submitter,
    session_user::text as login, 'pending' as state, null::bigint[] as awaited,
    null::text[] as wants, 0 as waits_on, null::bigint[] as ids, null::bigint as batch_id, n.asked
  from (select 1) as one
  left join gangq.task_options d on d.task = read_submission.task
  left join gangq.task_settings ts on ts.task = read_submission.task
  left join gangq.queues_table x on x.name = coalesce(read_submission.queue, d.queue, 'default')
  -- The row is made once (offset 0), not again for each of its columns, and by position, in the
  -- order of the table (tests/sql/test_options.py): through jsonb it would take 19 us more. A job
  -- that asks for no device needs no memory on one, whatever is declared.
  cross join lateral (
    select n::gangq.shapes as asked
    from (
      select null::integer as id, coalesce(read_submission.queue, d.queue, 'default') as queue,
        read_submission.task, coalesce(read_submission.gpus, d.gpus, 0) as gpus,
        coalesce((o).vram_mb, case when read_submission.gpus = 0 then 0 else d.vram_mb end, 0)
          as vram_mb,
        coalesce((o).memory_mb, d.memory_mb, 0) as memory_mb,
        coalesce((o).cpus, d.cpus, 0) as cpus, coalesce((o).labels, d.labels, '{}') as labels,
        coalesce((o).model, d.model) as model, null::bigint[] as avoid,
        case when (o).selector is null then d.selector
          else gangq.check_selector((o).selector) end as selector,
        case when (o).tolerates is null then d.tolerates
          else nullif(gangq.check_taints((o).tolerates, 'tolerates', true), '{}') end as tolerates,
        coalesce((o).limit_key, d.limit_key) as limit_key, null::jsonpath as selects,
        null::text as submitter, null::boolean as plain, null::boolean as fits,
        null::bytea as digest, null::text as login, null::timestamptz as added_at) n
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

-- Internal. The checks of a submission that is special; stores its shape if that is new.
create function gangq.check_special(
  s gangq.submission, payloads jsonb[], o gangq.job_options
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
    coalesce(o.rate, d.rate), s.login)
  from (select 1) as one
  left join gangq.task_options d
    on d.task = (s.asked).task and d.limit_key = (s.asked).limit_key;
  if num_nonnulls(o.name, o.tags, o.at_most, o.indexes) > 0 then
    s := gangq.draw_batch(s, o, cardinality(payloads));
  end if;
  if s.shape is null then
    s.shape := gangq.keep_shape(gangq.check_shape(s.asked), s.login);
  end if;
  if not (coalesce(s.fits, false) or coalesce(o.wait_for_hardware, false)) then
    perform gangq.check_fit(s.shape, queue);
  end if;
  perform gangq.check_ceiling(queue, s.priority, s.submitter, s.login);
  perform gangq.check_limits(queue, (s.asked).limit_key, 0, 1, (s.asked).gpus,
    (s.asked).memory_mb, (s.asked).cpus);
  s.shape := gangq.shape_for(s.shape, s.submitter, s.login);
  s.budget_s := coalesce(s.budget_s, q.budget_s);
  return s;
end $$;

-- Internal. These jobs wait for the first waits_on of awaited, each for the outcome it wants.
create function gangq.add_dependencies(
  job_ids bigint[], awaited bigint[], wants text[], waits_on integer
) returns void language plpgsql as $$
begin
  insert into gangq.dependencies (job_id, on_job_id, wants)
  select i.id, a.id, coalesce(a.wants, 'done')
  from unnest(job_ids) as i(id)
  cross join unnest(awaited[: waits_on], add_dependencies.wants[: waits_on]) as a(id, wants);
end $$;

-- 1. Options and arguments. What every submission runs is written out or inlined: a call of a
--    function costs up to 4 us, and the whole of submit 60.
-- 2. Read what the queue and the task say (read_submission): special is anything but plain jobs of
--    a known shape in a plain queue. Who submits is the caller, or the submitter of parent.
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
begin
  -- 1. First the options of a client that asks for nothing else.
  if options = '{"wake": "sleepers"}' then
    o.wake := 'sleepers';
  elsif options <> '{}' then
    o := gangq.read_options('submit', options, o);
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
  if o.parent is not null or not gangq.may_act_as('gangq_submitter') then
    select p.submitter, p.login into s.submitter, s.login
    from gangq.submitter_of(o.parent, o.parent_token) p;
  end if;
  -- 3.
  if s.special is not false or due_at is not null or after <> '{}' or o.after_any <> '{}'
    or o.after_failed <> '{}'
  then
    return query select unnest(a.job_ids)
    from gangq.answer_of(s.login, submit.request_id, false, cardinality(payloads)) a
    where submit.request_id is not null;
    if found then
      return;
    end if;
    perform gangq.check_moment('due_at', due_at);
    if s.special is not false then
      s := gangq.check_special(s, payloads, o);
    end if;
    select a.awaited, a.wants, a.waits_on into s.awaited, s.wants, s.waits_on
    from gangq.await(after, o.after_any, o.after_failed) a;
    if s.waits_on > 0 and s.ids is null then
      s.ids := array(select s.base + nextval('gangq.job_ids'::regclass) from unnest(payloads));
    end if;
    s.state := gangq.waiting_state(s.waits_on, null, due_at, t);
  end if;
  if not (s.special or s.fits or coalesce(o.wait_for_hardware, false)) then
    raise notice using errcode = 'GQ100', message = gangq.unserved(s.queue);
  end if;
  -- 4.
  number := pg_current_xact_id();
  -- 5.
  if request_id is not null then
    insert into gangq.requests as r (request_id, login, job_ids)
    select submit.request_id, s.login, coalesce(s.ids, array(
      select s.base + nextval('gangq.job_ids'::regclass) from unnest(payloads)))
    where gangq.reads_committed()
      and not exists (
        select from gangq.requests_before b
        where b.request_id = submit.request_id and b.login = s.login)
    on conflict do nothing
    returning r.job_ids into s.ids;
    if not found then
      return query select unnest(a.job_ids)
      from gangq.answer_of(s.login, submit.request_id, false, cardinality(payloads)) a;
      return;
    end if;
  end if;
  -- 6.
  if s.batch_id is not null then
    perform gangq.add_batch(s, o, cardinality(payloads), t);
  end if;
  return query
  insert into gangq.live_jobs (id, order_key, submitted_at, due_at, shape_id, budget_s, waits_on,
    priority, max_attempts, max_crashes, max_trips, max_snoozes, state, submitter, login, parent,
    awaited, wants, batch_id, array_index, payload, trace)
  select coalesce(s.ids[p.n], s.base + nextval('gangq.job_ids'::regclass)),
    gangq.order_key(s.priority, gangq.next_pos(s.base)), t, submit.due_at, s.shape, s.budget_s,
    s.waits_on, s.priority, s.max_attempts, s.max_crashes, s.max_trips, s.max_snoozes, s.state,
    s.submitter, s.login, o.parent, s.awaited, s.wants, s.batch_id,
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
  elsif o.wake = 'never' then
    return;
  elsif s.state = 'pending' then
    perform gangq.wake_lane(s.shape, cardinality(payloads), coalesce(o.wake, 'commit'));
  elsif due_at < t + (select make_interval(secs => 1.5 * c.tick_s) from gangq.settings c) then
    perform gangq.wake_tick(true);  -- Before the next one.
  end if;
end $$;
