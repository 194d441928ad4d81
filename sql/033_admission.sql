-- What submit (034) and submit_gang (035) share: the queue that takes the work, on whose behalf it
-- is submitted, what it waits for, whether any worker could run it, and the answer to a repeated
-- call.
--
-- A submission is read (read_submission, read_gang: its options, then what workers declare its task
-- with, then what its queue and the installation have), checked, and written. What members need is
-- a row of gangq.shapes, which keep_shape stores once.
-- Locks: none on the jobs that are waited for (after). Two calls meet at one request_id and at the
-- name of a new limit.

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

-- Internal. The queue of work of this task: the one given, else as the task is declared.
create function gangq.queue_for(queue text, task text) returns text language sql stable as $$
  select coalesce(queue_for.queue, (
    select d.queue from gangq.task_options d where d.task = queue_for.task), 'default')
$$;

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
  never record;  -- a job that has ended with another outcome than is wanted, or does not exist
begin
  waits_on := 0;
  if num_nulls(nullif(after, '{}'), nullif(after_any, '{}'), nullif(after_failed, '{}')) = 3 then
    return;
  end if;
  select array_agg(n.id), array_agg(n.wants) into awaited, wants
  from (
    select a.id, 'done' as wants from unnest(after) as a(id)
    union
    select a.id, 'any' from unnest(after_any) as a(id)
    union
    select a.id, 'failed' from unnest(after_failed) as a(id)) n;
  perform gangq.refuse('GQ001',
    format('job %s is named in %s', n.id, string_agg(gangq.after_option(n.wants), ' and ')),
    'A job is waited for with one outcome: name it once.')
  from unnest(awaited, wants) as n(id, wants)
  group by n.id having count(*) > 1 order by n.id limit 1;
  -- The live ones first.
  select array_agg(e.on_job_id order by e.live desc, e.on_job_id),
    array_agg(e.wants order by e.live desc, e.on_job_id),
    array_agg(e.outcome order by e.live desc, e.on_job_id), count(*) filter (where e.live)
  into awaited, wants, outcomes, waits_on
  from gangq.judge_awaited(awaited, wants) e;
  select e.* into never
  from unnest(awaited, wants, outcomes) with ordinality as e(id, wants, outcome, n)
  where e.n > waits_on and gangq.is_wanted(e.outcome, e.wants) is not true
  order by e.n limit 1;
  if never.n is not null and never.outcome is null then
    perform gangq.refuse('GQ002',
      format('%s names job %s, which does not exist', gangq.after_option(never.wants),
        coalesce(never.id::text, 'null')),
      'Submit the job it waits for first, and pass the id that submit returned.');
  elsif never.n is not null then
    perform gangq.refuse('GQ001',
      format('%s names job %s, which %s', gangq.after_option(never.wants), never.id,
        case never.outcome when 'failed' then 'has failed' else 'is ' || never.outcome end),
      format('It can never %s; retry it first (gangq.retry), or leave it out.',
        case never.wants when 'done' then 'be done' else 'fail' end));
  end if;
  if 'done' = all (wants) then
    wants := null;
  end if;
end $$;

-- Internal. The argument that wants this outcome.
create function gangq.after_option(wants text) returns text language sql immutable
return case wants when 'done' then 'after' else 'after_' || wants end;

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
    if not (gangq.may_act_as('gangq_submitter') or gangq.is_admin()) then
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
  j := gangq.own_claim(job_id, token);
  submitter := j.submitter;
  login := j.login;
end $$;

-- Internal. Whether a worker of this queue is known, ended ones included.
create function gangq.known_workers(queue text) returns boolean language plpgsql stable as $$
begin
  return exists (select from gangq.incarnations i where known_workers.queue = any (i.queues));
end $$;

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
