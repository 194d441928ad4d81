-- Work enters: settings, tasks, submit, submit_gang, set_priority.
-- Locks: submit takes a share lock on the jobs it waits for (after), nothing else that a worker could meet.

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
  bounces_per_hour integer default null, warm_s real default null, notify_only text[] default null,
  topology text[] default null, reservations integer default null, placement_timeout_s real default null,
  preemptions_per_pass integer default null, record_decisions boolean default null
) returns void language plpgsql security definer set search_path = '' set jit = off set lock_timeout = '2s' as $$
#variable_conflict use_column
declare
  used record;
begin
  if exists (select 1 from unnest(configure.topology) as l(level) where coalesce(l.level, '') = '' or length(l.level) > 200)
    or cardinality(configure.topology) <> (select count(distinct l.level) from unnest(configure.topology) as l(level)) then
    perform gangq.refuse('GQ001', format('topology is %s', configure.topology), 'Name each level once, broad to narrow: array[''zone'', ''rack'', ''host''].');
  end if;
  select g.id as gang, l.level into used
  from gangq.live_gangs g join gangq.gang_kinds k on k.id = g.kind_id join gangq.kind_roles r on r.kind_id = k.id
  cross join lateral (values (k.require), (k.prefer), (r.require), (r.prefer)) as l(level)
  where l.level <> all (configure.topology) limit 1;
  if found then
    perform gangq.refuse('GQ004', format('gang %s asks for the topology level %s', used.gang, used.level), 'Leave the level in, or cancel the gang first.');
  end if;
  -- A retention that ends in the future would drop today's history with the next tick.
  if least(configure.retention_short, configure.retention_long, configure.incarnation_retention) < '0' then
    perform gangq.refuse('GQ001', format('retention_short is %s, retention_long %s and incarnation_retention %s',
      configure.retention_short, configure.retention_long, configure.incarnation_retention), 'None may be negative: retention_short => ''7 days''.');
  end if;
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
    notify_only = coalesce(configure.notify_only, s.notify_only),
    topology = coalesce(configure.topology, s.topology),
    reservations = coalesce(configure.reservations, s.reservations),
    placement_timeout_s = coalesce(configure.placement_timeout_s, s.placement_timeout_s),
    preemptions_per_pass = coalesce(configure.preemptions_per_pass, s.preemptions_per_pass),
    record_decisions = coalesce(configure.record_decisions, s.record_decisions);
  if exists (select 1 from gangq.settings s where s.lease_s <= s.lease_margin_s + s.heartbeat_s) then
    perform gangq.refuse('GQ001', 'the lease must be longer than its margin and one heartbeat together',
      'Else work would be killed before a renewal can come. Raise lease_s, or lower lease_margin_s or heartbeat_s in the same call.');
  end if;
exception
  when check_violation or numeric_value_out_of_range then
    perform gangq.refuse('GQ001', sqlerrm, 'Seconds, bytes and counts are positive numbers, brake_share is at most 1, and notify_only '
      'takes budget, stall, health, fault and gang; topology has 1 to 8 levels, host among them; see \d+ gangq.settings.');
end $$;
comment on function gangq.configure(real, real, real, real, real, real, real, real, real, real, real, real, integer, integer, interval, interval, interval, integer, real, real, real, real, real, real, real, real, real, integer, integer, real, text[], text[], integer, real, integer, boolean) is
  'Changes the installation''s settings given; null leaves one as it is. For gangq_admin. Raises GQ001, GQ004 (a level of '
  'topology that a live gang asks for would go).';

create function gangq.set_task(
  task text, budget_s real default null, stall_timeout_s real default null, load_grace_s real default null,
  health_window_s real default null, long_phase_s real default null, notify_only text[] default null,
  forget boolean default false
) returns void language plpgsql security definer set search_path = '' set jit = off set lock_timeout = '2s' as $$
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

create function gangq.shape_of(
  queue text, task text, gpus integer, vram_mb integer, memory_mb bigint, cpus numeric, labels jsonb, model text, selector jsonb, tolerates text[]
) returns table (id integer) language sql stable as $$
  select s.id from gangq.shapes s
  where s.queue = shape_of.queue and s.task = shape_of.task and s.gpus = shape_of.gpus and s.vram_mb = shape_of.vram_mb
    and s.memory_mb = shape_of.memory_mb and s.labels = shape_of.labels
    -- Out of these bounds it may be rounded to a number that it is not.
    and s.cpus = case when shape_of.cpus between 0 and 9999999 then round(shape_of.cpus, 3) end
    and s.model is not distinct from shape_of.model and s.avoid is null and s.submitter is null
    and s.selector is not distinct from shape_of.selector and s.tolerates is not distinct from shape_of.tolerates
  order by s.id limit 1
$$;
comment on function gangq.shape_of(text, text, integer, integer, bigint, numeric, jsonb, text, jsonb, text[]) is
  'Internal. The shape of this requirement, if there is one already: then it was found right before. selector and tolerates as shapes keep them.';

-- Checks what submit and submit_gang have in common and interns the requirement. No unique key on shapes: a caller's
-- transaction that holds a new shape uncommitted must not make other submitters wait for it.
create function gangq.intern_shape(
  queue text, task text, gpus integer, vram_mb integer, memory_mb bigint, cpus numeric, labels jsonb, model text,
  selector jsonb default null, tolerates text[] default null
) returns integer language plpgsql set search_path = '' as $$
#variable_conflict use_column
declare
  found_id integer;
  conditions jsonb;
  tolerated text[];
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
  -- So much of either that even the largest gang's sum is a number.
  if coalesce(intern_shape.memory_mb, -1) not between 0 and 1e12 or coalesce(intern_shape.cpus, -1) not between 0 and 9999999 then
    perform gangq.refuse('GQ001', format('memory_mb is %s and cpus is %s; neither may be negative, memory_mb is 1e12 at most and cpus 9999999',
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
  if intern_shape.selector is not null then
    conditions := gangq.check_selector(intern_shape.selector);
  end if;
  if intern_shape.tolerates <> '{}' then
    tolerated := gangq.check_taints(intern_shape.tolerates, 'tolerates', true);
  end if;
  select s.id into found_id
  from gangq.shape_of(intern_shape.queue, intern_shape.task, intern_shape.gpus, intern_shape.vram_mb, intern_shape.memory_mb, intern_shape.cpus,
    intern_shape.labels, intern_shape.model, conditions, tolerated) s;
  if found_id is null then
    insert into gangq.shapes (queue, task, gpus, vram_mb, memory_mb, cpus, labels, model, selector, tolerates, selects)
    values (intern_shape.queue, intern_shape.task, intern_shape.gpus, intern_shape.vram_mb, intern_shape.memory_mb,
      intern_shape.cpus, intern_shape.labels, intern_shape.model, conditions, tolerated, gangq.selector_path(conditions, tolerated))
    returning id into found_id;
  end if;
  return found_id;
end $$;
comment on function gangq.intern_shape(text, text, integer, integer, bigint, numeric, jsonb, text, jsonb, text[]) is
  'Internal. Validates a requirement (GQ001, GQ002) and returns its shape, which avoids no device: only a trip makes one '
  'that does (shape_avoiding).';

create function gangq.refuse_draining(draining text, queue text) returns void language plpgsql set search_path = '' as $$
begin
  perform gangq.refuse('GQ004', format('queue %s is draining', draining) || case when queue <> draining then format(', and %s is below it', queue) else '' end,
    'It takes no new work: use another queue, or wait until it is opened again.');
end $$;
comment on function gangq.refuse_draining(text, text) is 'Internal. Raises GQ004: a queue, or one above it, takes no new work.';

create function gangq.check_submission(
  q gangq.queues_table, priority integer, payloads jsonb[], budget_s real, max_attempts integer, max_crashes integer, max_trips integer
) returns gangq.queues_table language plpgsql set search_path = '' as $$
declare
  above gangq.queues_table;
  too_large record;
begin
  if q.draining then
    perform gangq.refuse_draining(q.name, q.name);
  end if;
  if strpos(q.name, '.') > 0 then
    for above in
      select t.* from gangq.queues_table t where t.name = any (gangq.queue_path(q.name)) and t.name <> q.name order by length(t.name) desc
    loop
      if above.draining then
        perform gangq.refuse_draining(above.name, q.name);
      end if;
      q.budget_s := coalesce(q.budget_s, above.budget_s);
      q.placement_timeout_s := coalesce(q.placement_timeout_s, above.placement_timeout_s);
      q.timeout_style := coalesce(q.timeout_style, above.timeout_style);
    end loop;
  end if;
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
  -- What all of them have is more than any of them has.
  if pg_column_size(payloads) > q.max_payload_bytes then
    select p.n, pg_column_size(p.payload) as bytes into too_large
    from unnest(payloads) with ordinality as p(payload, n)
    where pg_column_size(p.payload) > q.max_payload_bytes
    limit 1;
    if found then
      perform gangq.refuse('GQ007', format('payload %s has %s bytes, queue %L takes %s', too_large.n, too_large.bytes, q.name, q.max_payload_bytes),
        'Put large inputs in shared storage and submit their address, or raise it: gangq.set_queue(..., max_payload_bytes => ...).');
    end if;
  end if;
  return q;
end $$;
comment on function gangq.check_submission(gangq.queues_table, integer, jsonb[], real, integer, integer, integer) is
  'Internal. Validates what is not part of a shape (GQ001, GQ004, GQ007) and returns the queue''s row, with the budget, '
  'placement timeout and timeout style of its nearest ancestor where it has none.';

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
  after bigint[] default '{}', wake text default 'commit', model text default null,
  selector jsonb default null, tolerates text[] default null
) returns setof bigint language plpgsql security definer set search_path = '' set jit = off set lock_timeout = '2s'
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  shape integer;
  budget real;
  attempts smallint;
  crashes smallint;
  trips smallint;
  known record;
  q gangq.queues_table;
  awaited bigint[];
  ids bigint[];
  first_state text := 'pending';
  number xid8;
begin
  -- Most submissions ask for nothing that needs a closer look: for them this finds all there is to know.
  if submit.priority between -1000 and 1000 and submit.wake in ('commit', 'sleepers', 'never')
    and cardinality(submit.payloads) > 0 and cardinality(submit.after) = 0
    and num_nonnulls(submit.due_at, submit.budget_s, submit.max_attempts, submit.max_crashes, submit.max_trips, submit.selector, submit.tolerates) = 0 then
    select (
        select z.id from gangq.shape_of(submit.queue, submit.task, submit.gpus, submit.vram_mb, submit.memory_mb, submit.cpus, submit.labels,
          submit.model, null, null) z),
      coalesce((select ts.budget_s from gangq.task_settings ts where ts.task = submit.task), x.budget_s),
      x.max_attempts, x.max_crashes, x.max_trips
    into shape, budget, attempts, crashes, trips
    from gangq.queues_table x
    where x.name = submit.queue and strpos(x.name, '.') = 0 and not (x.draining or x.limited) and x.policy <> 'fair'
      and pg_column_size(submit.payloads) <= x.max_payload_bytes;
  end if;
  if shape is null then
    if coalesce(cardinality(submit.payloads), 0) = 0 then
      perform gangq.refuse('GQ001', 'payloads is empty', 'Pass one payload per job: payloads => array[''{"n": 1}'']::jsonb[].');
    end if;
    if not isfinite(submit.due_at) then
      perform gangq.refuse('GQ001', format('due_at is %s', submit.due_at), 'It is a moment in time, or null for at once.');
    end if;
    if submit.wake is null or submit.wake not in ('commit', 'sleepers', 'never') then
      perform gangq.refuse('GQ001', format('wake is %L', submit.wake), 'It is commit, sleepers or never.');
    end if;
    select x as queue, z.id as shape, ts.budget_s into known
    from gangq.queues_table x left join gangq.task_settings ts on ts.task = submit.task
    left join lateral gangq.shape_of(x.name, submit.task, submit.gpus, submit.vram_mb, submit.memory_mb, submit.cpus, submit.labels, submit.model,
      null, null) z on submit.selector is null and coalesce(submit.tolerates, '{}') = '{}'
    where x.name = submit.queue;
    shape := known.shape;
    q := known.queue;
    if shape is null then
      shape := gangq.intern_shape(submit.queue, submit.task, submit.gpus, submit.vram_mb, submit.memory_mb, submit.cpus, submit.labels,
        submit.model, submit.selector, submit.tolerates);
      select x.* into q from gangq.queues_table x where x.name = submit.queue;  -- It may have been made only now.
    end if;
    -- Asked here before the function that refuses is called: that costs as much as the insert.
    if q.draining or strpos(q.name, '.') > 0 or (submit.priority between -1000 and 1000) is not true
      or num_nonnulls(submit.budget_s, submit.max_attempts, submit.max_crashes, submit.max_trips) > 0
      or pg_column_size(submit.payloads) > q.max_payload_bytes then
      q := gangq.check_submission(q, submit.priority, submit.payloads, submit.budget_s, submit.max_attempts, submit.max_crashes, submit.max_trips);
    end if;
    if q.limited or q.policy = 'fair' or strpos(q.name, '.') > 0 then
      shape := gangq.shape_for(shape, gangq.caller());
      perform gangq.check_limits(submit.queue, 0, 1, submit.gpus, submit.memory_mb, submit.cpus);
    end if;
    if submit.after <> '{}' then
      awaited := gangq.await(submit.after);
    end if;
    if awaited <> '{}' then
      first_state := 'waiting';
      ids := array(select nextval('gangq.job_ids'::regclass) from unnest(submit.payloads));
    elsif submit.due_at > t then
      first_state := 'scheduled';
    end if;
    budget := coalesce(submit.budget_s, known.budget_s, q.budget_s);
    attempts := coalesce(submit.max_attempts, q.max_attempts);
    crashes := coalesce(submit.max_crashes, q.max_crashes);
    trips := coalesce(submit.max_trips, q.max_trips);
  end if;
  number := pg_current_xact_id();  -- Places are drawn by transactions that have their number already: see gangq.seen.
  return query
  insert into gangq.live_jobs (id, order_key, submitted_at, due_at, shape_id, budget_s, waits_on, priority,
    max_attempts, max_crashes, max_trips, state, submitter, payload)
  select coalesce(ids[p.n], nextval('gangq.job_ids'::regclass)), gangq.order_key(submit.priority, gangq.next_pos()), t, submit.due_at,
    shape, budget, coalesce(cardinality(awaited), 0), submit.priority, attempts, crashes, trips, first_state, gangq.caller(), p.payload
  from unnest(submit.payloads) with ordinality as p(payload, n)
  returning id;
  if awaited <> '{}' then
    insert into gangq.dependencies (job_id, on_job_id)
    select i.id, a.id from unnest(ids) as i(id) cross join (select distinct d.id from unnest(awaited) as d(id)) a;
  elsif first_state = 'pending' then
    if submit.wake = 'commit' or submit.wake = 'sleepers'
      and exists (select 1 from gangq.sleepers z where z.queues @> array[submit.queue]) then
      perform gangq.wake_sleepers(submit.queue, cardinality(submit.payloads), submit.wake);
    end if;
  elsif first_state = 'scheduled' and submit.wake <> 'never'
    and submit.due_at < t + (select make_interval(secs => 1.5 * c.tick_s) from gangq.settings c) then
    -- It may be due before anybody ticks again.
    perform gangq.wake_tick(true);
  end if;
end $$;
comment on function gangq.submit(text, text, jsonb[], integer, integer, integer, bigint, numeric, jsonb, timestamptz, real, integer, integer, integer, bigint[], text, text, jsonb, text[]) is
  'Submits one job per payload, all alike otherwise, and returns their ids in order. Inside a transaction they appear '
  'when it commits. gpus, vram_mb (each), memory_mb, cpus, labels: what a worker must have free. due_at: not before. '
  'after: jobs that must be done first; if one fails or is cancelled, these are cancelled. wake: commit (notify at '
  'commit; right in a transaction), sleepers (only if somebody sleeps; right in autocommit), never. '
  'model: what it needs loaded; a worker that has it is preferred, any other may take it. '
  'selector: conditions on labels, and on host and worker, [{"key", "op", "values"}] with =, !=, in, notin, exists, absent, '
  '<, <=, >, >=; what is compared as more or less must be a number on both sides, in text or not. tolerates: taints it may '
  'run in spite of: key, key=value or *. Raises GQ001, GQ002, GQ004 (a draining queue), GQ007.';

-- The roles of a gang with what they leave to the gang filled in, one row each, in rank order.
create function gangq.read_roles(roles jsonb, gang jsonb) returns table (
  name text, most integer, least_members integer, task text, payload jsonb, payloads jsonb, gpus integer, vram_mb integer, memory_mb bigint,
  cpus numeric, labels jsonb, selector jsonb, tolerates text[], model text, strategy text, require text, prefer text, balanced boolean,
  budget_s real
) language plpgsql set search_path = '' as $$
#variable_conflict use_column
declare
  role jsonb;
  n integer;
  wrong text;
  r record;
begin
  if coalesce(jsonb_typeof(read_roles.roles), '') <> 'array' or jsonb_array_length(read_roles.roles) not between 1 and 100 then
    perform gangq.refuse('GQ001', format('roles is %s', left(coalesce(read_roles.roles::text, 'null'), 200)),
      'It is a JSON array of 1 to 100 roles: [{"name": "driver", "count": 1}, {"name": "executor", "count": 10, "min": 6}].');
  end if;
  for role, n in select e.role, e.n from jsonb_array_elements(read_roles.roles) with ordinality as e(role, n) loop
    if jsonb_typeof(role) <> 'object' then
      perform gangq.refuse('GQ001', format('role %s is %s', n, left(role::text, 200)), 'A role is a JSON object: {"name": "driver", "count": 1}.');
    end if;
    if role ? 'queue' then
      perform gangq.refuse('GQ001', format('role %s names a queue', n), 'A gang waits in one queue: pass queue to the gang.');
    end if;
    select k.key into wrong from jsonb_object_keys(role) as k(key)
    where k.key <> all ('{name,count,min,task,payload,payloads,gpus,vram_mb,memory_mb,cpus,labels,selector,tolerates,model,strategy,require,prefer,balanced,budget_s}'::text[])
    order by k.key limit 1;
    if found then
      perform gangq.refuse('GQ001', format('role %s has the unknown key %s', n, wrong),
        'Its keys are name, count, min, task, payload, payloads, gpus, vram_mb, memory_mb, cpus, labels, selector, tolerates, model, '
        'strategy, require, prefer, balanced and budget_s.');
    end if;
    begin
      select x.* into r from jsonb_to_record(read_roles.gang
        -- What needs no device needs no memory on it either, whatever the other roles do.
        || case when role -> 'gpus' = '0' then '{"vram_mb": 0}' else '{}' end::jsonb
        || (select coalesce(jsonb_object_agg(e.key, e.value), '{}') from jsonb_each(role) e where e.value <> 'null')) as x(
        name text, count integer, min integer, task text, payload jsonb, payloads jsonb, gpus integer, vram_mb integer, memory_mb bigint,
        cpus numeric, labels jsonb, selector jsonb, tolerates text[], model text, strategy text, require text, prefer text, balanced boolean,
        budget_s real);
    exception
      when invalid_text_representation or numeric_value_out_of_range or invalid_parameter_value then
        perform gangq.refuse('GQ001', format('role %s: %s', n, sqlerrm), 'count, min and what it needs are numbers, tolerates is an array of texts, balanced is true or false.');
    end;
    if coalesce(r.name, '') = '' or length(r.name) > 100 then
      perform gangq.refuse('GQ001', format('role %s has the name %L', n, left(r.name, 120)), 'A role has a name of 1 to 100 characters.');
    end if;
    if r.count is null or r.count not between 1 and 100000 then
      perform gangq.refuse('GQ001', format('role %s has the count %s', r.name, coalesce(r.count::text, 'null')), 'count is how many members it has at most, 1 to 100000.');
    end if;
    if r.min not between 1 and r.count then
      perform gangq.refuse('GQ001', format('role %s has min %s of %s', r.name, r.min, r.count),
        'min is without how many the gang does not start: 1 to count, or left out for count.');
    end if;
    if r.payload is not null and r.payloads is not null then
      perform gangq.refuse('GQ001', format('role %s has both payload and payloads', r.name), 'payload goes to every member of it, payloads one to each.');
    end if;
    if r.payloads is not null and (jsonb_typeof(r.payloads) <> 'array' or jsonb_array_length(r.payloads) <> r.count) then
      perform gangq.refuse('GQ001', format('role %s has %s members and its payloads are %s', r.name, r.count,
        case jsonb_typeof(r.payloads) when 'array' then jsonb_array_length(r.payloads)::text else left(r.payloads::text, 100) end), 'Pass one payload for each of its members.');
    end if;
    if r.budget_s is not null and not (r.budget_s > 0 and r.budget_s <= 1e9) then
      perform gangq.refuse('GQ001', format('role %s has the budget_s %s', r.name, r.budget_s), 'It is a positive number of seconds, 1e9 at most.');
    end if;
    if r.strategy not in ('pack', 'spread', 'strict_pack', 'strict_spread') then
      perform gangq.refuse('GQ001', format('strategy of role %s is %L', r.name, left(r.strategy, 100)),
        'pack: fewest hosts; spread: most; strict_pack: one host; strict_spread: a host for each member.');
    end if;
    name := r.name; most := r.count; least_members := coalesce(r.min, r.count); task := r.task; payload := r.payload; payloads := r.payloads;
    gpus := r.gpus; vram_mb := r.vram_mb; memory_mb := r.memory_mb; cpus := r.cpus; labels := r.labels; selector := r.selector;
    tolerates := r.tolerates; model := r.model; strategy := r.strategy; require := r.require; prefer := r.prefer;
    balanced := coalesce(r.balanced, false); budget_s := r.budget_s;
    return next;
  end loop;
end $$;
comment on function gangq.read_roles(jsonb, jsonb) is
  'Internal. Roles as submit_gang takes them, checked each for itself (GQ001); gang holds what absent keys stand for.';

-- Levels are names an operator has given: one that nobody knows would wait for ever.
create function gangq.check_level(what text, require text, prefer text, spread boolean) returns void language plpgsql stable
set search_path = '' as $$
#variable_conflict use_column
declare
  levels text[] := (select c.topology from gangq.settings c);
  wrong text;
begin
  select l.level into wrong from unnest(array[check_level.require, check_level.prefer]) as l(level) where l.level <> all (levels) limit 1;
  if found then
    perform gangq.refuse('GQ001', format('%s names the topology level %L', what, left(wrong, 200)),
      format('Levels are, broad to narrow, %s; an administrator sets them: gangq.configure(topology => ...).', array_to_string(levels, ', ')));
  end if;
  if array_position(levels, check_level.prefer) < array_position(levels, check_level.require) then
    perform gangq.refuse('GQ001', format('%s requires one %s and prefers one %s', what, check_level.require, check_level.prefer),
      format('Whoever shares a %s shares its %s: prefer a narrower level than the one required.', check_level.require, check_level.prefer));
  end if;
  if check_level.spread and array_position(levels, check_level.require) >= array_position(levels, 'host') then
    perform gangq.refuse('GQ001', format('%s asks for a host for each member and for one %s for all', what, check_level.require),
      'strict_spread and that level exclude each other: leave one out, or use spread.');
  end if;
end $$;
comment on function gangq.check_level(text, text, text, boolean) is
  'Internal. Refuses (GQ001) levels of topology that do not exist or contradict each other; spread: a host for each member.';

create function gangq.submit_gang(
  task text default null, size integer default null, queue text default 'default', payload jsonb default '{}', payloads jsonb[] default null,
  priority integer default 0, gpus integer default 0, vram_mb integer default 0, memory_mb bigint default 0,
  cpus numeric default 0, labels jsonb default '{}', due_at timestamptz default null, budget_s real default null,
  max_attempts integer default null, max_crashes integer default null, max_trips integer default null,
  after bigint[] default '{}', checkpoint_mode text default null, claim_deadline_s real default null,
  name text default null, model text default null, roles jsonb default null, require text default null, prefer text default null,
  strategy text default 'pack', balanced boolean default false, apart text default null, selector jsonb default null,
  tolerates text[] default null, min_size integer default null, failure_policy text default 'restart_gang',
  completion text default null, timeout_s real default null, timeout_style text default null, preemptible boolean default true,
  wait_for_hardware boolean default false
) returns table (gang_id bigint, job_ids bigint[], note text)
language plpgsql security definer set search_path = '' set jit = off set lock_timeout = '2s'
set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  said jsonb;
  r record;
  q gangq.queues_table;
  kind integer;
  shape integer;
  members integer := 0;
  least_members integer := 0;
  names text[] := '{}';
  shapes integer[] := '{}';
  mosts integer[] := '{}';
  budgets real[] := '{}';
  one_for_all jsonb[] := '{}';
  one_each jsonb[] := '{}';
  placed jsonb := '[]';
  needs record;
  why text;
  hint text;
  mode text := submit_gang.checkpoint_mode;
  awaited bigint[];
begin
  if submit_gang.roles is null and (submit_gang.size is null or submit_gang.size not between 1 and 100000) then
    perform gangq.refuse('GQ001', format('size is %s; a gang has 1 to 100000 members', coalesce(submit_gang.size::text, 'null')),
      'size is the world size: how many members must start together. Or pass roles.');
  end if;
  if submit_gang.roles is null and submit_gang.min_size not between 1 and submit_gang.size then
    perform gangq.refuse('GQ001', format('min_size is %s of a gang of %s', submit_gang.min_size, submit_gang.size),
      'It is without how many members the gang does not start, 1 to size; leave it out for size.');
  end if;
  if submit_gang.roles is not null and submit_gang.min_size is not null then
    perform gangq.refuse('GQ001', 'both roles and min_size are given', 'Give each role that may have fewer members its own min.');
  end if;
  if mode is not null and mode not in ('each', 'rank0') then
    perform gangq.refuse('GQ001', format('checkpoint_mode is %L', mode),
      'each: every member saves its own part; rank0: rank 0 saves for all; null: each, and rank0 for an elastic gang.');
  end if;
  if not isfinite(submit_gang.due_at) then
    perform gangq.refuse('GQ001', format('due_at is %s', submit_gang.due_at), 'It is a moment in time, or null for at once.');
  end if;
  if submit_gang.claim_deadline_s is not null and not (submit_gang.claim_deadline_s > 0 and submit_gang.claim_deadline_s <= 1e6) then
    perform gangq.refuse('GQ001', format('claim_deadline_s is %s', submit_gang.claim_deadline_s), 'It is a positive number of seconds, a million at most.');
  end if;
  if submit_gang.timeout_s is not null and not (submit_gang.timeout_s > 0 and submit_gang.timeout_s <= 1e7) then
    perform gangq.refuse('GQ001', format('timeout_s is %s', submit_gang.timeout_s), 'It is a positive number of seconds, 1e7 at most; null: as its queue says.');
  end if;
  if submit_gang.timeout_style not in ('requeue', 'hard', 'soft') then
    perform gangq.refuse('GQ001', format('timeout_style is %L', left(submit_gang.timeout_style, 100)),
      'requeue: it backs off and waits on; hard: it fails; soft: its members run as single jobs; null: as its queue says.');
  end if;
  if submit_gang.strategy is null or submit_gang.strategy not in ('pack', 'spread', 'strict_pack', 'strict_spread') then
    perform gangq.refuse('GQ001', format('strategy is %L', left(submit_gang.strategy, 100)),
      'pack: fewest hosts; spread: most; strict_pack: one host; strict_spread: a host for each member.');
  end if;
  if submit_gang.failure_policy is null or submit_gang.failure_policy not in ('restart_gang', 'restart_member', 'shrink', 'fail') then
    perform gangq.refuse('GQ001', format('failure_policy is %L', left(submit_gang.failure_policy, 100)),
      'restart_gang, restart_member (only the lost one), shrink (the others go on without it) or fail.');
  end if;
  if submit_gang.apart = '' or length(submit_gang.apart) > 200 then
    perform gangq.refuse('GQ001', format('apart is %L; it must have 1 to 200 characters', left(submit_gang.apart, 220)),
      'Gangs of one such name never share a host; leave it out when it may.');
  end if;
  if num_nulls(submit_gang.balanced, submit_gang.preemptible, submit_gang.wait_for_hardware) > 0 then
    perform gangq.refuse('GQ001', 'balanced, preemptible and wait_for_hardware are true or false', 'Leave them out for what is usual.');
  end if;
  said := jsonb_build_object('task', submit_gang.task, 'gpus', submit_gang.gpus, 'vram_mb', submit_gang.vram_mb,
    'memory_mb', submit_gang.memory_mb, 'cpus', submit_gang.cpus, 'labels', submit_gang.labels, 'selector', submit_gang.selector,
    'tolerates', submit_gang.tolerates, 'model', submit_gang.model, 'strategy', submit_gang.strategy, 'balanced', submit_gang.balanced);
  for r in select * from gangq.read_roles(coalesce(submit_gang.roles, jsonb_build_array(jsonb_strip_nulls(
    jsonb_build_object('name', 'member', 'count', submit_gang.size, 'min', submit_gang.min_size)))), said)
  loop
    if r.name = any (names) then
      perform gangq.refuse('GQ001', format('two roles are called %s', r.name), 'Names of roles are unique in a gang; members of one role are its count.');
    end if;
    if submit_gang.payloads is not null and num_nonnulls(r.payload, r.payloads) > 0 then
      perform gangq.refuse('GQ001', format('both the gang and its role %s have payloads', r.name), 'Pass them in one of the two places.');
    end if;
    begin
      -- A pass looks at so many gangs of each kind: who waits at his limit must not keep those of others out of its sight.
      shape := gangq.shape_for(
        gangq.intern_shape(submit_gang.queue, r.task, r.gpus, r.vram_mb, r.memory_mb, r.cpus, r.labels, r.model, r.selector, r.tolerates), gangq.caller());
    exception
      when sqlstate 'GQ001' then
        get stacked diagnostics why = message_text, hint = pg_exception_hint;
        perform gangq.refuse('GQ001', case when submit_gang.roles is null then '' else format('role %s: ', r.name) end || why, hint);
    end;
    perform gangq.check_level(format('role %s', r.name), r.require, r.prefer, r.strategy = 'strict_spread' and r.least_members > 1);
    perform gangq.check_level('the gang', submit_gang.require, submit_gang.prefer, r.strategy = 'strict_spread' and r.least_members > 1);
    placed := placed || jsonb_build_array(jsonb_build_object('name', r.name, 'shape', shape, 'min', r.least_members, 'max', r.most,
      'strategy', r.strategy, 'require', r.require, 'prefer', r.prefer, 'balanced', r.balanced));
    names := names || r.name;
    shapes := shapes || shape;
    mosts := mosts || r.most;
    budgets := budgets || coalesce(r.budget_s, submit_gang.budget_s, (select ts.budget_s from gangq.task_settings ts where ts.task = r.task));
    one_for_all := one_for_all || array[coalesce(r.payload, submit_gang.payload)];
    one_each := one_each || array[r.payloads];
    least_members := least_members + r.least_members;
    members := members + r.most;
  end loop;
  if members > 100000 or members <> submit_gang.size then
    perform gangq.refuse('GQ001', format('the roles have %s members in all%s', members, coalesce(', and size is ' || submit_gang.size, '')),
      'Leave size out: it is the sum of the roles'' counts, 100000 at most.');
  end if;
  if submit_gang.payloads is not null and cardinality(submit_gang.payloads) <> members then
    perform gangq.refuse('GQ001', format('%s payloads for a gang of %s', cardinality(submit_gang.payloads), members),
      'Pass one payload per rank, or payload for all of them.');
  end if;
  if least_members < members and mode = 'each' then
    perform gangq.refuse('GQ001', 'checkpoint_mode is each, and the gang may run with fewer members than it has',
      'Parts saved by one number of members cannot be restored by another: use rank0, or leave it out.');
  end if;
  if least_members = members and submit_gang.failure_policy = 'shrink' then
    perform gangq.refuse('GQ001', 'failure_policy is shrink, and no role may have fewer members than its count',
      'Say with how many it can go on: min of a role, or min_size.');
  end if;
  if submit_gang.completion <> all (names) then
    perform gangq.refuse('GQ001', format('completion names %L, which is no role of the gang', left(submit_gang.completion, 120)),
      format('Its roles are %s; leave it out when all members have to be done.', array_to_string(names, ', ')));
  end if;
  select x.* into q from gangq.queues_table x where x.name = submit_gang.queue;
  q := gangq.check_submission(q, submit_gang.priority,
    coalesce(submit_gang.payloads, array_remove(one_for_all, null) || array(
      select p.payload from unnest(one_each) as e(list) cross join lateral jsonb_array_elements(e.list) as p(payload))),
    submit_gang.budget_s, submit_gang.max_attempts, submit_gang.max_crashes, submit_gang.max_trips);
  kind := gangq.intern_kind(submit_gang.queue, placed, submit_gang.require, submit_gang.prefer, submit_gang.apart);
  select sum(k.min_members * s.gpus::bigint)::bigint as gpus, sum(k.min_members * s.memory_mb)::bigint as memory_mb, sum(k.min_members * s.cpus) as cpus
  into needs from gangq.kind_roles k join gangq.shapes s on s.id = k.shape_id where k.kind_id = kind;
  perform gangq.check_limits(submit_gang.queue, 1, least_members, needs.gpus, needs.memory_mb, needs.cpus);
  note := gangq.kind_infeasible(kind);
  if note is not null and not submit_gang.wait_for_hardware then
    why := gangq.kind_infeasible(kind, true);
    if why is not null then
      perform gangq.refuse('GQ001', why, 'Ask for less, start the workers first, or say wait_for_hardware => true (--wait-for-hardware) if they are still to come.');
    end if;
  end if;
  awaited := gangq.await(submit_gang.after);
  gang_id := nextval('gangq.gang_ids'::regclass);
  insert into gangq.live_gangs (id, order_key, kind_id, shape_id, size, priority, max_attempts, max_crashes, max_trips, state, checkpoint_mode, claim_deadline_s,
    submitted_at, not_before, failure_policy, completion, preemptible, budget_s, timeout_s, timeout_style, timeout_at, name, note, submitter)
  select submit_gang.gang_id, gangq.order_key(submit_gang.priority, gangq.next_pos()), kind, shapes[1], members, submit_gang.priority,
    coalesce(submit_gang.max_attempts, q.max_attempts), coalesce(submit_gang.max_crashes, q.max_crashes),
    coalesce(submit_gang.max_trips, q.max_trips), case when awaited <> '{}' then 'waiting' else 'blocked' end,
    coalesce(mode, case when least_members < members then 'rank0' else 'each' end), coalesce(submit_gang.claim_deadline_s, c.claim_deadline_s),
    t, submit_gang.due_at, submit_gang.failure_policy, submit_gang.completion, submit_gang.preemptible,
    -- A role without one runs under the installation's: the longest is known only if one is set.
    case when num_nonnulls(q.budget_s, (select max(b.budget_s) from unnest(budgets) as b(budget_s))) > 0 then (
      select max(coalesce(b.budget_s, q.budget_s, case when s.gpus > 0 then c.budget_gpu_s else c.budget_s end))
      from unnest(budgets, shapes) as b(budget_s, shape) join gangq.shapes s on s.id = b.shape) end,
    w.timeout_s, coalesce(submit_gang.timeout_style, q.timeout_style, 'requeue'),
    greatest(t, submit_gang.due_at) + make_interval(secs => w.timeout_s), submit_gang.name, submit_gang.note, gangq.caller()
  from gangq.settings c
  cross join lateral (select coalesce(submit_gang.timeout_s, q.placement_timeout_s, c.placement_timeout_s) as timeout_s) w;
  with born as (
    insert into gangq.live_jobs (id, order_key, gang_id, rank, role, submitted_at, shape_id, budget_s, waits_on, priority,
      max_attempts, max_crashes, max_trips, state, submitter, payload)
    select nextval('gangq.job_ids'::regclass), g.order_key, g.id, m.rank, m.role, t, m.shape, coalesce(m.budget_s, q.budget_s),
      cardinality(awaited), g.priority, g.max_attempts, g.max_crashes, g.max_trips, g.state, g.submitter,
      case when submit_gang.payloads is null then coalesce(m.list -> m.nth, m.payload) else submit_gang.payloads[m.rank + 1] end
    from gangq.live_gangs g cross join (
      select k.n as role, k.shape, k.budget_s, k.payload, k.list, s.nth, row_number() over (order by k.n, s.nth) - 1 as rank
      from unnest(shapes, mosts, budgets, one_for_all, one_each) with ordinality as k(shape, most, budget_s, payload, list, n)
      cross join lateral generate_series(0, k.most - 1) as s(nth)) m
    where g.id = submit_gang.gang_id
    order by m.rank
    returning id, rank
  )
  select array_agg(b.id order by b.rank) into job_ids from born b;
  if awaited <> '{}' then
    insert into gangq.dependencies (job_id, on_job_id)
    select i.id, a.id from unnest(job_ids) as i(id) cross join (select distinct d.id from unnest(awaited) as d(id)) a;
  end if;
  perform gangq.log_event(t, 'submit', gang_id, 0, reason => note, data => jsonb_build_object('size', members)
    || case when least_members < members then jsonb_build_object('min_size', least_members) else '{}' end);
  perform gangq.wake_tick();
  return next;
end $$;
comment on function gangq.submit_gang(text, integer, text, jsonb, jsonb[], integer, integer, integer, bigint, numeric, jsonb, timestamptz, real, integer, integer, integer, bigint[], text, real, text, text, jsonb, text, text, text, boolean, text, jsonb, text[], integer, text, text, real, text, boolean, boolean) is
  'Submits a gang: members that start together or not at all, written as blocked in one transaction. size members alike, '
  'ranks 0 to size-1, with min_size of them enough to start; or roles, ranks in their order: [{"name", "count", "min", "task", '
  '"payload", "payloads", "gpus", "vram_mb", "memory_mb", "cpus", "labels", "selector", "tolerates", "model", "strategy", "require", "prefer", '
  '"balanced", "budget_s"}], where what a role does not say is the gang''s. Each member needs gpus, vram_mb, memory_mb, cpus and '
  'labels for itself; selector and tolerates as in submit. strategy: pack, spread, strict_pack, strict_spread. require, prefer: a '
  'topology level of which all must, or should, share one domain. apart: gangs of one such name never share a host. '
  'failure_policy: restart_gang, restart_member, shrink, fail. completion: the role whose end is the gang''s. timeout_s, '
  'timeout_style (requeue, hard, soft): how long it may wait while eligible, and what then. preemptible: whether others may '
  'displace it. checkpoint_mode: each or rank0 (what an elastic gang has). note is set when the workers registered now could '
  'never hold it, with the numbers; it then waits for better ones. What all workers known, ended ones included, could not hold '
  'is taken only with wait_for_hardware. Raises GQ001 (also what exceeds a limit of its queue or all hardware known), GQ002, GQ004 (a draining queue), GQ007.';

create function gangq.set_priority(
  priority integer, job_ids bigint[] default '{}', gang_ids bigint[] default '{}'
) returns table (job_id bigint, gang_id bigint, state text)
language plpgsql security definer set search_path = '' set jit = off set lock_timeout = '2s' as $$
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
