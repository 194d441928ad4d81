-- Once: submit_unique and submit_unique_gang submit unless the key stands for something already.
--
-- The row of a key is made before the job, so that of two calls with one key the second waits for
-- the first to end, and then finds what it submitted, or submits if it was rolled back.
-- Locks: the row of the key, then, to replace it, the job. Nobody else locks rows of unique_keys
-- but the tick, which skips those that are locked.

-- Internal. Whether the job or gang that this key stands for has not ended.
create function gangq.is_live(k gangq.unique_keys) returns boolean language sql stable as $$
  select case when k.gang_id is null
    then exists (select from gangq.live_jobs j where j.id = k.job_ids[1])
    else exists (select from gangq.live_gangs g where g.id = k.gang_id) end
$$;

-- Internal. Locks the row of a key, made if need be. existed: it stands for something. submitter,
-- login: on whose behalf this is submitted. Raises GQ001, GQ003, GQ008, 42501, 55P03.
create function gangq.hold_key(
  unique_key text, task text, queue text, of_gang boolean, parent bigint, parent_token bigint,
  keep_s real,
  out k gangq.unique_keys, out existed boolean, out submitter text, out login text
) language plpgsql as $$
declare
  owner text;
begin
  perform gangq.require_read_committed('a unique key');
  if unique_key is null then
    perform gangq.refuse('GQ001', 'unique_key is null',
      'Pass what this is to be submitted once for: unique_key => ''dataset-7''.');
  end if;
  perform gangq.read_options('submit_unique', jsonb_strip_nulls(jsonb_build_object(
    'unique_key', unique_key, 'keep_s', keep_s, 'task', task)), null::gangq.other_arguments);
  select p.submitter, p.login into submitter, login
  from gangq.submitter_of(parent, parent_token) p;
  owner := login;
  queue := (gangq.queue_named(gangq.queue_for(queue, task))).name;
  if queue = any (gangq.shared_queues()) then
    owner := '';
  end if;
  loop
    select x.* into k from gangq.unique_keys x
    where (x.key, x.task, x.queue, x.login) =
      (unique_key, coalesce(hold_key.task, ''), hold_key.queue, owner)
    for update;
    exit when found;
    insert into gangq.unique_keys as x (key, task, queue, login)
    values (unique_key, coalesce(task, ''), queue, owner)
    on conflict do nothing
    returning x.* into k;
    exit when found;
  end loop;
  existed := k.job_ids is not null and (k.kept_until > gangq.now() or gangq.is_live(k));
  if existed and of_gang <> (k.gang_id is not null) then
    perform gangq.refuse('GQ001',
      format('unique_key %L stands for %s %s', unique_key,
        case when of_gang then 'job' else 'gang' end, coalesce(k.gang_id, k.job_ids[1])),
      'Use another key for gangs than for single jobs.');
  end if;
end $$;

-- Internal. From now on the key stands for this, and for so many seconds also when it has ended.
create function gangq.give_key(
  k gangq.unique_keys, gang_id bigint, job_ids bigint[], keep_s real, request_id uuid
) returns void language sql as $$
  update gangq.unique_keys x
  set gang_id = give_key.gang_id, job_ids = give_key.job_ids, request_id = give_key.request_id,
    kept_until = gangq.now() + make_interval(secs => give_key.keep_s)
  where (x.key, x.task, x.queue, x.login) = ((k).key, (k).task, (k).queue, (k).login)
$$;

-- Internal. A job that no claim has taken gets another payload, due_at and priority (null: its
-- own); false where one has. What it needs stays as it was submitted. Raises 42501 where the job is
-- of another role behind the same login.
create function gangq.replace_job(
  job_id bigint, queue text, payload jsonb, priority integer, due_at timestamptz, submitter text,
  login text
) returns boolean language plpgsql as $$
declare
  t timestamptz := gangq.now();
  q gangq.queues_table;
  j gangq.live_jobs;
begin
  select x.* into j from gangq.live_jobs x
  where x.id = job_id and x.state in ('pending', 'scheduled', 'waiting') and x.claimed_at is null
  for update;
  if not found then
    return false;
  end if;
  perform gangq.check_moment('due_at', due_at);
  q := gangq.open_queue(queue, array[payload]);
  -- Not check_own: a worker calls it for the submitter of a job that it runs.
  if q.others <> 'shared' and not (j.login = login
    and gangq.roles_of(replace_job.submitter) && array['gangq_admin', j.submitter])
  then
    perform gangq.refuse('42501',
      format('%s may not replace job %s, which is of %s', gangq.whose(replace_job.submitter, login),
        j.id, gangq.whose(j.submitter, j.login)),
      'Leave replaces out to get the job that the key stands for, or take another key.');
  end if;
  perform gangq.read_options('submit_unique', jsonb_strip_nulls(jsonb_build_object('priority',
    priority)), null::gangq.arguments);
  perform gangq.check_ceiling(queue, coalesce(priority, j.priority), submitter, login);
  priority := coalesce(priority, j.priority);
  update gangq.live_jobs x
  set payload = replace_job.payload, due_at = replace_job.due_at, priority = replace_job.priority,
    order_key = gangq.order_key(replace_job.priority, gangq.pos_of(x.order_key)),
    state = gangq.waiting_state(x.waits_on, null, replace_job.due_at, t)
  where x.id = job_id
  returning x.state into j.state;
  if j.state = 'pending' then
    perform gangq.wake_lane(j.shape_id, 1, 'commit');
  else
    perform gangq.wake_tick(true);
  end if;
  return true;
end $$;

-- Submits a job as submit does, unless this key stands for one already: then that one's id, and
-- existed. A key stands for the job submitted with it while that is live, and with keep_s at least
-- for so many seconds. replaces: where no claim has taken that job yet, it gets this payload,
-- due_at and priority (null: its own), and replaced says so; what it needs stays. Keys are a task's
-- in a queue, and of each login its own, in a shared queue of all; what a job submits has those of
-- the job's login. A job is replaced by whoever may cancel it (42501). Of two calls at once the
-- second waits for the first, up to 2 s. retry is not bound by keys. Raises what submit raises, and
-- GQ008 (a key needs READ COMMITTED).
create function gangq.submit_unique(
  unique_key text, task text, queue text default null, payload jsonb default '{}',
  priority integer default null, gpus integer default null, due_at timestamptz default null,
  after bigint[] default '{}', keep_s real default null,
  replaces boolean default false, request_id uuid default null, options jsonb default '{}'
) returns table (job_id bigint, existed boolean, replaced boolean) language plpgsql as $$
declare
  o gangq.job_options;
  held record;
begin
  o := gangq.read_options('submit', coalesce(options, '{}'), o);
  held := gangq.hold_key(unique_key, task, queue, false, o.parent, o.parent_token, keep_s);
  replaced := false;
  if held.existed then
    job_id := (held.k).job_ids[1];
    existed := (held.k).request_id is distinct from submit_unique.request_id
      or submit_unique.request_id is null;
    if existed and replaces then
      replaced := gangq.replace_job(job_id, (held.k).queue, payload, priority, due_at,
        held.submitter, held.login);
    end if;
  else
    existed := false;
    job_id := gangq.submit(task, queue, array[payload], priority, gpus, due_at, after, request_id,
      options);
    perform gangq.give_key(held.k, null, array[job_id], keep_s, request_id);
  end if;
  return next;
end $$;

-- Submits a gang as submit_gang does, unless this key stands for one already: then that one, and
-- existed. What a key is: see submit_unique. Raises what submit_gang raises, and GQ008.
create function gangq.submit_unique_gang(
  unique_key text, task text default null, size integer default null, queue text default null,
  payload jsonb default '{}', priority integer default null, gpus integer default null,
  due_at timestamptz default null, after bigint[] default '{}',
  keep_s real default null, options jsonb default '{}'
) returns table (gang_id bigint, job_ids bigint[], note text, existed boolean)
language plpgsql as $$
declare
  o gangq.gang_options;
  held record;
begin
  o := gangq.read_options('submit_gang', coalesce(options, '{}'), o);
  -- Where a gang has no task, its first role's says the queue: see read_gang.
  held := gangq.hold_key(unique_key, task,
    gangq.queue_for(queue, coalesce(task, o.roles -> 0 ->> 'task')), true, o.parent,
    o.parent_token, keep_s);
  if held.existed then
    gang_id := (held.k).gang_id;
    job_ids := (held.k).job_ids;
    existed := (held.k).request_id is distinct from o.request_id or o.request_id is null;
  else
    existed := false;
    select g.* into gang_id, job_ids, note
    from gangq.submit_gang(task, size, queue, payload, priority, gpus, due_at, after, options) g;
    perform gangq.give_key(held.k, gang_id, job_ids, keep_s, o.request_id);
  end if;
  return next;
end $$;
