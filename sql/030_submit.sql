-- Work enters: queues, settings, tasks, submit, submit_gang, set_priority.
-- Locks: submit takes a share lock on the jobs it waits for (after), nothing else that a worker could meet.

create function gangq.set_queue(
  name text, paused boolean default null, policy text default null, max_attempts integer default null,
  max_crashes integer default null, max_trips integer default null, backoff_s real default null,
  backoff_max_s real default null, budget_s real default null, max_payload_bytes integer default null,
  retention_done text default null, retention_failed text default null
) returns void language plpgsql security definer set search_path = '' set lock_timeout = '2s' as $$
#variable_conflict use_column
begin
  if coalesce(set_queue.name, '') = '' or length(set_queue.name) > 100 then
    perform gangq.refuse('GQ001', 'a queue needs a name of 1 to 100 characters', 'Call gangq.set_queue(name => ''gpu'').');
  end if;
  insert into gangq.queues_table (name) values (set_queue.name) on conflict do nothing;
  update gangq.queues_table q set
    paused = coalesce(set_queue.paused, q.paused),
    policy = coalesce(set_queue.policy, q.policy),
    max_attempts = coalesce(set_queue.max_attempts, q.max_attempts),
    max_crashes = coalesce(set_queue.max_crashes, q.max_crashes),
    max_trips = coalesce(set_queue.max_trips, q.max_trips),
    backoff_s = coalesce(set_queue.backoff_s, q.backoff_s),
    backoff_max_s = coalesce(set_queue.backoff_max_s, q.backoff_max_s),
    budget_s = coalesce(set_queue.budget_s, q.budget_s),
    max_payload_bytes = coalesce(set_queue.max_payload_bytes, q.max_payload_bytes),
    retention_done = coalesce(set_queue.retention_done, q.retention_done),
    retention_failed = coalesce(set_queue.retention_failed, q.retention_failed)
  where q.name = set_queue.name;
  if set_queue.paused is false then
    perform gangq.wake_sleepers(set_queue.name, 64, 'commit');
    perform gangq.wake_tick();
  end if;
exception
  when check_violation or numeric_value_out_of_range then
    perform gangq.refuse('GQ001', format('queue %L: %s', set_queue.name, sqlerrm),
      'policy is priority, fifo, fair or largest_first; retention is short, long or forever; counts are 1 to 1000; seconds are not negative, '
      'and a budget is more than 0 and at most 1e9.');
end $$;
comment on function gangq.set_queue(text, boolean, text, integer, integer, integer, real, real, real, integer, text, text) is
  'Makes a queue or changes the settings given; null leaves a setting as it is. For gangq_admin. Raises GQ001.';

create function gangq.configure(
  heartbeat_s real default null, lease_s real default null, lease_margin_s real default null, grace_s real default null,
  claim_deadline_s real default null, ack_timeout_s real default null, candidate_silence_s real default null,
  pass_over_s real default null, flag_after_s real default null, tick_s real default null,
  gang_backoff_s real default null, gang_backoff_max_s real default null, checkpoint_bytes integer default null,
  log_bytes integer default null, retention_short interval default null, retention_long interval default null,
  incarnation_retention interval default null, max_stops integer default null, budget_s real default null,
  budget_gpu_s real default null, stall_timeout_s real default null, load_grace_s real default null,
  health_window_s real default null, long_phase_s real default null, gang_stall_s real default null,
  straggler_s real default null, brake_share real default null, device_trips integer default null,
  bounces_per_hour integer default null, warm_s real default null, notify_only text[] default null
) returns void language plpgsql security definer set search_path = '' set lock_timeout = '2s' as $$
#variable_conflict use_column
begin
  update gangq.settings s set
    heartbeat_s = coalesce(configure.heartbeat_s, s.heartbeat_s),
    lease_s = coalesce(configure.lease_s, s.lease_s),
    lease_margin_s = coalesce(configure.lease_margin_s, s.lease_margin_s),
    grace_s = coalesce(configure.grace_s, s.grace_s),
    claim_deadline_s = coalesce(configure.claim_deadline_s, s.claim_deadline_s),
    ack_timeout_s = coalesce(configure.ack_timeout_s, s.ack_timeout_s),
    candidate_silence_s = coalesce(configure.candidate_silence_s, s.candidate_silence_s),
    pass_over_s = coalesce(configure.pass_over_s, s.pass_over_s),
    flag_after_s = coalesce(configure.flag_after_s, s.flag_after_s),
    tick_s = coalesce(configure.tick_s, s.tick_s),
    gang_backoff_s = coalesce(configure.gang_backoff_s, s.gang_backoff_s),
    gang_backoff_max_s = coalesce(configure.gang_backoff_max_s, s.gang_backoff_max_s),
    checkpoint_bytes = coalesce(configure.checkpoint_bytes, s.checkpoint_bytes),
    log_bytes = coalesce(configure.log_bytes, s.log_bytes),
    retention_short = coalesce(configure.retention_short, s.retention_short),
    retention_long = coalesce(configure.retention_long, s.retention_long),
    incarnation_retention = coalesce(configure.incarnation_retention, s.incarnation_retention),
    max_stops = coalesce(configure.max_stops, s.max_stops),
    budget_s = coalesce(configure.budget_s, s.budget_s),
    budget_gpu_s = coalesce(configure.budget_gpu_s, s.budget_gpu_s),
    stall_timeout_s = coalesce(configure.stall_timeout_s, s.stall_timeout_s),
    load_grace_s = coalesce(configure.load_grace_s, s.load_grace_s),
    health_window_s = coalesce(configure.health_window_s, s.health_window_s),
    long_phase_s = coalesce(configure.long_phase_s, s.long_phase_s),
    gang_stall_s = coalesce(configure.gang_stall_s, s.gang_stall_s),
    straggler_s = coalesce(configure.straggler_s, s.straggler_s),
    brake_share = coalesce(configure.brake_share, s.brake_share),
    device_trips = coalesce(configure.device_trips, s.device_trips),
    bounces_per_hour = coalesce(configure.bounces_per_hour, s.bounces_per_hour),
    warm_s = coalesce(configure.warm_s, s.warm_s),
    notify_only = coalesce(configure.notify_only, s.notify_only);
  if exists (select 1 from gangq.settings s where s.lease_s <= s.lease_margin_s + s.heartbeat_s) then
    perform gangq.refuse('GQ001', 'the lease must be longer than its margin and one heartbeat together',
      'Else work would be killed before a renewal can come. Raise lease_s, or lower lease_margin_s or heartbeat_s in the same call.');
  end if;
exception
  when check_violation or numeric_value_out_of_range then
    perform gangq.refuse('GQ001', sqlerrm, 'Seconds, bytes and counts are positive numbers, brake_share is at most 1, and notify_only '
      'takes budget, stall, health, fault and gang; see \d+ gangq.settings.');
end $$;
comment on function gangq.configure(real, real, real, real, real, real, real, real, real, real, real, real, integer, integer, interval, interval, interval, integer, real, real, real, real, real, real, real, real, real, integer, integer, real, text[]) is
  'Changes the installation''s settings given; null leaves one as it is. For gangq_admin. Raises GQ001.';

create function gangq.set_task(
  task text, budget_s real default null, stall_timeout_s real default null, load_grace_s real default null,
  health_window_s real default null, long_phase_s real default null, notify_only text[] default null,
  forget boolean default false
) returns void language plpgsql security definer set search_path = '' set lock_timeout = '2s' as $$
#variable_conflict use_column
begin
  if coalesce(set_task.task, '') = '' or length(set_task.task) > 200 then
    perform gangq.refuse('GQ001', 'a task has a name of 1 to 200 characters', 'Call gangq.set_task(task => ''train'', budget_s => 3600).');
  end if;
  if set_task.forget then
    delete from gangq.task_settings ts where ts.task = set_task.task;
    delete from gangq.beat_gaps b where b.task = set_task.task;
  end if;
  if num_nonnulls(set_task.budget_s, set_task.stall_timeout_s, set_task.load_grace_s, set_task.health_window_s,
    set_task.long_phase_s, set_task.notify_only) = 0 then
    return;
  end if;
  insert into gangq.task_settings (task, budget_s, stall_timeout_s, load_grace_s, health_window_s, long_phase_s, notify_only)
  values (set_task.task, set_task.budget_s, set_task.stall_timeout_s, set_task.load_grace_s, set_task.health_window_s,
    set_task.long_phase_s, set_task.notify_only)
  on conflict (task) do update set
    budget_s = coalesce(excluded.budget_s, task_settings.budget_s),
    stall_timeout_s = coalesce(excluded.stall_timeout_s, task_settings.stall_timeout_s),
    load_grace_s = coalesce(excluded.load_grace_s, task_settings.load_grace_s),
    health_window_s = coalesce(excluded.health_window_s, task_settings.health_window_s),
    long_phase_s = coalesce(excluded.long_phase_s, task_settings.long_phase_s),
    notify_only = coalesce(excluded.notify_only, task_settings.notify_only);
exception
  when check_violation or numeric_value_out_of_range then
    perform gangq.refuse('GQ001', format('task %L: %s', set_task.task, sqlerrm),
      'Seconds are positive numbers, a budget at most 1e9 and the others at most 1e7; notify_only takes budget, stall, health, fault and gang.');
end $$;
comment on function gangq.set_task(text, real, real, real, real, real, text[], boolean) is
  'Sets what the watchdogs allow the jobs of one task; null leaves a setting as it is. forget: first drops what was set '
  'for it before and what has been learned of its beats. Workers read it when they start and now and then; a budget '
  'is taken by jobs when they are submitted. For gangq_admin. Raises GQ001.';

-- Checks what submit and submit_gang have in common and interns the requirement. No unique key on shapes: a caller's
-- transaction that holds a new shape uncommitted must not make other submitters wait for it.
create function gangq.intern_shape(
  queue text, task text, gpus integer, vram_mb integer, memory_mb bigint, cpus numeric, labels jsonb, model text
) returns integer language plpgsql set search_path = '' as $$
#variable_conflict use_column
declare
  found_id integer;
begin
  if coalesce(intern_shape.task, '') = '' or length(intern_shape.task) > 200 then
    perform gangq.refuse('GQ001', 'a job needs a task name of 1 to 200 characters', 'Pass task => ''resize'', or ''command''.');
  end if;
  if not exists (select 1 from gangq.queues_table q where q.name = intern_shape.queue) then
    perform gangq.refuse('GQ002', format('queue %L does not exist', intern_shape.queue),
      format('Make it with: gangq queue create %s   (or select gangq.set_queue(%L)). Queues: %s', intern_shape.queue, intern_shape.queue,
        (select string_agg(q.name, ', ' order by q.name) from gangq.queues_table q)));
  end if;
  if intern_shape.gpus is null or intern_shape.gpus not between 0 and 1024 then
    perform gangq.refuse('GQ001', format('gpus is %s; it must be 0 to 1024 whole devices', coalesce(intern_shape.gpus::text, 'null')),
      'Devices are never shared; a MIG instance counts as a device.');
  end if;
  if coalesce(intern_shape.vram_mb, -1) < 0 or (intern_shape.vram_mb > 0 and intern_shape.gpus = 0) then
    perform gangq.refuse('GQ001', format('vram_mb is %s with gpus %s', coalesce(intern_shape.vram_mb::text, 'null'), intern_shape.gpus),
      'vram_mb is the memory needed on each device: ask for gpus as well.');
  end if;
  if coalesce(intern_shape.memory_mb, -1) < 0 or coalesce(intern_shape.cpus, -1) < 0 or intern_shape.cpus > 9999999 or intern_shape.cpus = 'NaN' then
    perform gangq.refuse('GQ001', format('memory_mb is %s and cpus is %s; neither may be negative',
      coalesce(intern_shape.memory_mb::text, 'null'), coalesce(intern_shape.cpus::text, 'null')), 'Leave them at 0 when the job needs none to itself.');
  end if;
  if intern_shape.labels is null or jsonb_typeof(intern_shape.labels) <> 'object' then
    perform gangq.refuse('GQ001', format('labels is %s; it must be a JSON object', coalesce(intern_shape.labels::text, 'null')),
      'For example {"gpu": "h100"}; a worker fits when it carries each label with that value.');
  end if;
  if intern_shape.model = '' or length(intern_shape.model) > 200 then
    perform gangq.refuse('GQ001', format('model is %L; it must have 1 to 200 characters', left(intern_shape.model, 220)),
      'Name what a worker must have loaded, or leave it out.');
  end if;
  select s.id into found_id from gangq.shapes s
  where s.queue = intern_shape.queue and s.task = intern_shape.task and s.gpus = intern_shape.gpus
    and s.vram_mb = intern_shape.vram_mb and s.memory_mb = intern_shape.memory_mb
    and s.cpus = round(intern_shape.cpus, 3) and s.labels = intern_shape.labels
    and s.model is not distinct from intern_shape.model and s.avoid is null
  order by s.id limit 1;
  if found_id is null then
    insert into gangq.shapes (queue, task, gpus, vram_mb, memory_mb, cpus, labels, model)
    values (intern_shape.queue, intern_shape.task, intern_shape.gpus, intern_shape.vram_mb, intern_shape.memory_mb,
      intern_shape.cpus, intern_shape.labels, intern_shape.model)
    returning id into found_id;
  end if;
  return found_id;
end $$;
comment on function gangq.intern_shape(text, text, integer, integer, bigint, numeric, jsonb, text) is
  'Internal. Validates a requirement (GQ001, GQ002) and returns its shape, which avoids no device: only a trip makes one '
  'that does (shape_avoiding).';

create function gangq.check_submission(
  queue text, priority integer, payloads jsonb[], budget_s real, max_attempts integer, max_crashes integer, max_trips integer
) returns gangq.queues_table language plpgsql set search_path = '' as $$
declare
  q gangq.queues_table;
  too_large record;
begin
  select t.* into q from gangq.queues_table t where t.name = check_submission.queue;
  if priority is null or priority not between -1000 and 1000 then
    perform gangq.refuse('GQ001', format('priority is %s; it must be -1000 to 1000', coalesce(priority::text, 'null')),
      'Higher runs first; the default is 0.');
  end if;
  -- No clock of a worker counts further.
  if budget_s is not null and not (budget_s > 0 and budget_s <= 1e9) then
    perform gangq.refuse('GQ001', format('budget_s is %s; it must be a positive number of seconds, 1e9 at most', budget_s),
      'Leave it null for the queue''s or worker''s default; 1e9 is more than thirty years.');
  end if;
  if least(max_attempts, max_crashes, max_trips) < 1 or greatest(max_attempts, max_crashes, max_trips) > 1000 then
    perform gangq.refuse('GQ001', 'max_attempts, max_crashes and max_trips must be 1 to 1000', 'Leave them null for the queue''s defaults.');
  end if;
  select p.n, pg_column_size(p.payload) as bytes into too_large
  from unnest(payloads) with ordinality as p(payload, n)
  where pg_column_size(p.payload) > q.max_payload_bytes
  limit 1;
  if found then
    perform gangq.refuse('GQ007', format('payload %s has %s bytes, queue %L takes %s', too_large.n, too_large.bytes, queue, q.max_payload_bytes),
      'Put large inputs in shared storage and submit their address, or raise it: gangq.set_queue(..., max_payload_bytes => ...).');
  end if;
  return q;
end $$;
comment on function gangq.check_submission(text, integer, jsonb[], real, integer, integer, integer) is
  'Internal. Validates what is not part of a shape (GQ001, GQ007) and returns the queue''s row.';

-- How many of `after` are still live, each now share-locked so that it cannot end before this transaction does:
-- its ending then sees the dependency. Ones already done do not count; ones that failed refuse the submission.
create function gangq.await(after bigint[]) returns bigint[] language plpgsql set search_path = '' as $$
declare
  live bigint[];
  other record;
begin
  if coalesce(cardinality(after), 0) = 0 then
    return '{}';
  end if;
  select coalesce(array_agg(p.id), '{}') into live from (
    select j.id from gangq.live_jobs j where j.id = any (after) order by j.id for key share) p;
  for other in
    select a.id, gangq.ended_as(a.id) as state
    from unnest(after) as a(id) where a.id is null or a.id <> all (live)
  loop
    if other.state is null then
      perform gangq.refuse('GQ002', format('after names job %s, which does not exist', coalesce(other.id::text, 'null')),
        'Submit the job it waits for first, and pass the id that submit returned.');
    elsif other.state <> 'done' then
      perform gangq.refuse('GQ001', format('after names job %s, which has %s', other.id, other.state),
        'It can never be done; retry it first (gangq.retry), or leave it out.');
    end if;
  end loop;
  return live;
end $$;
comment on function gangq.await(bigint[]) is 'Internal. Live jobs among those to wait for, share-locked. Raises GQ001, GQ002.';

create function gangq.submit(
  task text, queue text default 'default', payloads jsonb[] default array['{}'::jsonb], priority integer default 0,
  gpus integer default 0, vram_mb integer default 0, memory_mb bigint default 0, cpus numeric default 0,
  labels jsonb default '{}', due_at timestamptz default null, budget_s real default null,
  max_attempts integer default null, max_crashes integer default null, max_trips integer default null,
  after bigint[] default '{}', wake text default 'commit', model text default null
) returns setof bigint language plpgsql security definer set search_path = '' set lock_timeout = '2s'
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  shape integer;
  q gangq.queues_table;
  awaited bigint[];
  first_state text;
  ids bigint[];
begin
  if coalesce(cardinality(submit.payloads), 0) = 0 then
    perform gangq.refuse('GQ001', 'payloads is empty', 'Pass one payload per job: payloads => array[''{"n": 1}'']::jsonb[].');
  end if;
  if not isfinite(submit.due_at) then
    perform gangq.refuse('GQ001', format('due_at is %s', submit.due_at), 'It is a moment in time, or null for at once.');
  end if;
  if submit.wake is null or submit.wake not in ('commit', 'sleepers', 'never') then
    perform gangq.refuse('GQ001', format('wake is %L', submit.wake), 'It is commit, sleepers or never.');
  end if;
  shape := gangq.intern_shape(submit.queue, submit.task, submit.gpus, submit.vram_mb, submit.memory_mb, submit.cpus, submit.labels,
    submit.model);
  q := gangq.check_submission(submit.queue, submit.priority, submit.payloads, submit.budget_s, submit.max_attempts, submit.max_crashes, submit.max_trips);
  awaited := gangq.await(submit.after);
  first_state := case
    when awaited <> '{}' then 'waiting'
    when submit.due_at > t then 'scheduled'
    else 'pending'
  end;
  with born as (
    insert into gangq.live_jobs (id, order_key, submitted_at, due_at, shape_id, budget_s, waits_on, priority,
      max_attempts, max_crashes, max_trips, state, submitter, payload)
    select nextval('gangq.job_ids'::regclass), gangq.order_key(submit.priority, gangq.next_pos()), t, submit.due_at,
      shape, coalesce(submit.budget_s, (select ts.budget_s from gangq.task_settings ts where ts.task = submit.task), q.budget_s), cardinality(awaited), submit.priority,
      coalesce(submit.max_attempts, q.max_attempts), coalesce(submit.max_crashes, q.max_crashes),
      coalesce(submit.max_trips, q.max_trips), first_state, gangq.caller(), p.payload
    from unnest(submit.payloads) as p(payload)
    returning id
  )
  select array_agg(b.id) into ids from born b;
  if awaited <> '{}' then
    insert into gangq.dependencies (job_id, on_job_id)
    select i.id, a.id from unnest(ids) as i(id) cross join (select distinct d.id from unnest(awaited) as d(id)) a;
  elsif first_state = 'pending' then
    perform gangq.wake_sleepers(submit.queue, cardinality(ids), submit.wake);
  end if;
  return query select i.id from unnest(ids) as i(id);
end $$;
comment on function gangq.submit(text, text, jsonb[], integer, integer, integer, bigint, numeric, jsonb, timestamptz, real, integer, integer, integer, bigint[], text, text) is
  'Submits one job per payload, all alike otherwise, and returns their ids in order. Inside a transaction they appear '
  'when it commits. gpus, vram_mb (each), memory_mb, cpus, labels: what a worker must have free. due_at: not before. '
  'after: jobs that must be done first; if one fails or is cancelled, these are cancelled. wake: commit (notify at '
  'commit; right in a transaction), sleepers (only if somebody sleeps; right in autocommit), never. '
  'model: what it needs loaded; a worker that has it is preferred, any other may take it. '
  'Raises GQ001, GQ002, GQ007.';

-- What no set of the workers registered now could hold, even idle: the reason in numbers, or null.
create function gangq.infeasible(shape_id integer, size integer) returns text language plpgsql stable
security definer set search_path = '' as $$
declare
  s gangq.shapes;
  serving bigint;
  labelled bigint;
  room bigint;
  best record;
begin
  select x.* into s from gangq.shapes x where x.id = infeasible.shape_id;
  select count(*), count(*) filter (where s.labels <@ i.labels),
    coalesce(sum(case when s.labels <@ i.labels then
      least(i.slots,
        case when s.memory_mb > 0 then i.memory_mb / s.memory_mb else i.slots end,
        case when s.cpus > 0 then floor(i.cpus / s.cpus) else i.slots end,
        case when s.gpus > 0 then d.enough / s.gpus else i.slots end) end), 0)
  into serving, labelled, room
  from gangq.incarnations i
  cross join lateral (
    select count(*) filter (where r.vram_mb >= s.vram_mb) as enough
    from gangq.device_registry r where r.offered_by = i.id and (s.avoid is null or r.id <> all (s.avoid))) d
  where i.ended_at is null and s.queue = any (i.queues) and (i.tasks is null or s.task = any (i.tasks));
  if room >= size then
    return null;
  end if;
  if serving = 0 then
    return format('no registered worker serves queue %s with task %s', s.queue, s.task);
  end if;
  if labelled = 0 then
    return format('none of %s workers of queue %s carries labels %s', serving, s.queue, s.labels);
  end if;
  select max(w.devices) as devices, max(w.vram_mb) as vram_mb, max(w.memory_mb) as memory_mb, max(w.cpus) as cpus
  into best from (
    select count(r.id) as devices, max(r.vram_mb) as vram_mb, i.memory_mb, i.cpus
    from gangq.incarnations i left join gangq.device_registry r on r.offered_by = i.id and (s.avoid is null or r.id <> all (s.avoid))
    where i.ended_at is null and s.queue = any (i.queues) and s.labels <@ i.labels
    group by i.id) w;
  return format(
    'the %s workers of queue %s could hold %s of %s members even when idle (each needs %s GPUs of %s MiB, %s MiB memory, %s CPUs; the largest worker offers %s GPUs of %s MiB, %s MiB, %s CPUs)',
    labelled, s.queue, room, size, s.gpus, s.vram_mb, s.memory_mb, s.cpus, best.devices, coalesce(best.vram_mb, 0), best.memory_mb, best.cpus);
end $$;
comment on function gangq.infeasible(integer, integer) is
  'Internal. Why the workers registered now could never hold this many members of this shape, or null when they could.';

create function gangq.submit_gang(
  task text, size integer, queue text default 'default', payload jsonb default '{}', payloads jsonb[] default null,
  priority integer default 0, gpus integer default 0, vram_mb integer default 0, memory_mb bigint default 0,
  cpus numeric default 0, labels jsonb default '{}', due_at timestamptz default null, budget_s real default null,
  max_attempts integer default null, max_crashes integer default null, max_trips integer default null,
  after bigint[] default '{}', checkpoint_mode text default 'each', claim_deadline_s real default null,
  name text default null, model text default null
) returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql security definer set search_path = '' set lock_timeout = '2s'
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  shape integer;
  q gangq.queues_table;
  awaited bigint[];
begin
  if submit_gang.size is null or submit_gang.size not between 1 and 100000 then
    perform gangq.refuse('GQ001', format('size is %s; a gang has 1 to 100000 members', coalesce(submit_gang.size::text, 'null')),
      'size is the world size: how many members must start together.');
  end if;
  if submit_gang.payloads is not null and cardinality(submit_gang.payloads) <> submit_gang.size then
    perform gangq.refuse('GQ001', format('%s payloads for a gang of %s', cardinality(submit_gang.payloads), submit_gang.size),
      'Pass one payload per rank, or payload for all of them.');
  end if;
  if submit_gang.checkpoint_mode is null or submit_gang.checkpoint_mode not in ('each', 'rank0') then
    perform gangq.refuse('GQ001', format('checkpoint_mode is %L', submit_gang.checkpoint_mode),
      'each: every member saves its own part; rank0: rank 0 saves for all.');
  end if;
  if not isfinite(submit_gang.due_at) then
    perform gangq.refuse('GQ001', format('due_at is %s', submit_gang.due_at), 'It is a moment in time, or null for at once.');
  end if;
  if submit_gang.claim_deadline_s is not null and not (submit_gang.claim_deadline_s > 0 and submit_gang.claim_deadline_s <= 1e6) then
    perform gangq.refuse('GQ001', format('claim_deadline_s is %s', submit_gang.claim_deadline_s), 'It is a positive number of seconds, a million at most.');
  end if;
  shape := gangq.intern_shape(submit_gang.queue, submit_gang.task, submit_gang.gpus, submit_gang.vram_mb, submit_gang.memory_mb, submit_gang.cpus, submit_gang.labels,
    submit_gang.model);
  q := gangq.check_submission(submit_gang.queue, submit_gang.priority, coalesce(submit_gang.payloads, array[submit_gang.payload]),
    submit_gang.budget_s, submit_gang.max_attempts, submit_gang.max_crashes, submit_gang.max_trips);
  awaited := gangq.await(submit_gang.after);
  gang_id := nextval('gangq.gang_ids'::regclass);
  note := gangq.infeasible(shape, submit_gang.size);
  insert into gangq.live_gangs (id, order_key, kind_id, shape_id, size, priority, max_attempts, max_crashes, max_trips, state, checkpoint_mode, claim_deadline_s,
    submitted_at, not_before, timeout_s, timeout_at, name, note, submitter)
  select submit_gang.gang_id, gangq.order_key(submit_gang.priority, gangq.next_pos()),
    gangq.intern_kind(submit_gang.queue, jsonb_build_array(jsonb_build_object('name', 'member', 'shape', shape, 'min', submit_gang.size,
      'max', submit_gang.size, 'strategy', 'pack', 'require', null, 'prefer', null, 'balanced', false)), null, null, null),
    shape, submit_gang.size, submit_gang.priority,
    coalesce(submit_gang.max_attempts, q.max_attempts), coalesce(submit_gang.max_crashes, q.max_crashes),
    coalesce(submit_gang.max_trips, q.max_trips), case when awaited <> '{}' then 'waiting' else 'blocked' end,
    submit_gang.checkpoint_mode, coalesce(submit_gang.claim_deadline_s, s.claim_deadline_s), t, submit_gang.due_at,
    s.placement_timeout_s, t + make_interval(secs => s.placement_timeout_s), submit_gang.name, submit_gang.note, gangq.caller()
  from gangq.settings s;
  with born as (
    insert into gangq.live_jobs (id, order_key, gang_id, rank, submitted_at, shape_id, budget_s, waits_on, priority,
      max_attempts, max_crashes, max_trips, state, submitter, payload)
    select nextval('gangq.job_ids'::regclass), g.order_key, g.id, r.rank, t, shape,
      coalesce(submit_gang.budget_s, (select ts.budget_s from gangq.task_settings ts where ts.task = submit_gang.task), q.budget_s),
      cardinality(awaited), g.priority, g.max_attempts, g.max_crashes, g.max_trips, g.state, g.submitter,
      case when submit_gang.payloads is null then submit_gang.payload else submit_gang.payloads[r.rank + 1] end
    from gangq.live_gangs g, generate_series(0, submit_gang.size - 1) as r(rank)
    where g.id = submit_gang.gang_id
    returning id, rank
  )
  select array_agg(b.id order by b.rank) into job_ids from born b;
  if awaited <> '{}' then
    insert into gangq.dependencies (job_id, on_job_id)
    select i.id, a.id from unnest(job_ids) as i(id) cross join (select distinct d.id from unnest(awaited) as d(id)) a;
  end if;
  perform gangq.log_event(t, 'submit', gang_id, 0, reason => note, data => jsonb_build_object('size', submit_gang.size));
  perform gangq.wake_tick();
  return next;
end $$;
comment on function gangq.submit_gang(text, integer, text, jsonb, jsonb[], integer, integer, integer, bigint, numeric, jsonb, timestamptz, real, integer, integer, integer, bigint[], text, real, text, text) is
  'Submits a gang: size members, ranks 0 to size-1, that start together or not at all, written as blocked in one '
  'transaction. Each member needs gpus, vram_mb, memory_mb, cpus and labels for itself. note is set when the workers '
  'registered now could never hold it, with the numbers; it then waits for better ones. checkpoint_mode: each or rank0. '
  'Raises GQ001, GQ002, GQ007.';

create function gangq.set_priority(
  priority integer, job_ids bigint[] default '{}', gang_ids bigint[] default '{}'
) returns table (job_id bigint, gang_id bigint, state text)
language plpgsql security definer set search_path = '' set lock_timeout = '2s' as $$
#variable_conflict use_column
declare
  missing bigint;
begin
  if set_priority.priority is null or set_priority.priority not between -1000 and 1000 then
    perform gangq.refuse('GQ001', format('priority is %s; it must be -1000 to 1000', coalesce(set_priority.priority::text, 'null')), 'Higher runs first; the default is 0.');
  end if;
  perform 1 from gangq.live_gangs g where g.id = any (set_priority.gang_ids) order by g.id for update;
  perform 1 from gangq.live_jobs j where j.id = any (set_priority.job_ids) or j.gang_id = any (set_priority.gang_ids) order by j.id for update;
  select w.id into missing from unnest(set_priority.job_ids) as w(id)
  where not exists (select 1 from gangq.live_jobs j where j.id = w.id and j.gang_id is null) limit 1;
  if found then
    perform gangq.refuse('GQ002', format('job %s is not a live solo job', missing),
      'It has ended, never existed, or is a member of a gang: then pass gang_ids.');
  end if;
  select w.id into missing from unnest(set_priority.gang_ids) as w(id)
  where not exists (select 1 from gangq.live_gangs g where g.id = w.id) limit 1;
  if found then
    perform gangq.refuse('GQ002', format('gang %s is not live', missing), 'It has ended or never existed: select * from gangq.gangs.');
  end if;
  update gangq.live_gangs g set priority = set_priority.priority,
    order_key = gangq.order_key(set_priority.priority, g.order_key & 1125899906842623)
  where g.id = any (set_priority.gang_ids);
  return query
  update gangq.live_jobs j set priority = set_priority.priority,
    order_key = gangq.order_key(set_priority.priority, j.order_key & 1125899906842623)
  where j.id = any (set_priority.job_ids) or j.gang_id = any (set_priority.gang_ids)
  returning j.id, j.gang_id, j.state;
  perform gangq.wake_tick();
end $$;
comment on function gangq.set_priority(integer, bigint[], bigint[]) is
  'Changes the priority of live jobs and gangs; each keeps its age. Nothing that runs is stopped. Raises GQ001, GQ002.';
