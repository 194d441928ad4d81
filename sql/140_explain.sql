-- Why is it not running, in numbers: explain_gang, explain_job, and the view waiting.

create function gangq.explain_shape(shape_id integer, members integer)
returns table (gate text, ok boolean, detail text, numbers jsonb)
language plpgsql stable security definer set search_path = '' as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  s gangq.shapes;
  n record;
  why text;
begin
  select x.* into s from gangq.shapes x where x.id = explain_shape.shape_id;
  gate := 'queue';
  ok := not (select q.paused from gangq.queues_table q where q.name = s.queue);
  detail := format('queue %s is %s', s.queue, case when ok then 'open' else 'paused: gangq.set_queue(..., paused => false) opens it' end);
  numbers := null;
  return next;
  select count(*) as live,
    count(*) filter (where s.queue = any (i.queues)) as serving,
    count(*) filter (where s.queue = any (i.queues) and (i.tasks is null or s.task = any (i.tasks))) as able,
    count(*) filter (where gangq.serves(i, s)) as labelled,
    count(*) filter (where gangq.serves(i, s) and i.quarantined is not null) as quarantined,
    count(*) filter (where gangq.serves(i, s) and i.quarantined is null and o.cordoned) as cordoned,
    count(*) filter (where gangq.serves(i, s) and i.state = 'draining') as draining,
    count(*) filter (where gangq.serves(i, s) and i.passed_over_until > t) as passed_over,
    count(*) filter (where gangq.serves(i, s) and l.renewed_at <= t - make_interval(secs => c.candidate_silence_s)) as silent
  into n
  from gangq.incarnations i join gangq.leases l on l.incarnation = i.id cross join gangq.settings c
  cross join lateral (
    select exists (select 1 from gangq.cordons x where (x.kind, x.name) in (('host', i.host), ('worker', i.name))) as cordoned) o
  where i.ended_at is null;
  gate := 'workers';
  ok := n.labelled - n.quarantined - n.cordoned > 0;
  detail := case
    when n.live = 0 then 'no worker is registered: start one with gangq worker'
    when n.serving = 0 then format('none of %s workers serves queue %s', n.live, s.queue)
    when n.able = 0 then format('none of %s workers of queue %s knows task %s', n.serving, s.queue, s.task)
    when n.labelled = 0 then format('none of %s workers of queue %s carries labels %s', n.able, s.queue, s.labels)
    else format('%s of %s workers serve it (%s quarantined, %s cordoned, %s draining, %s passed over, %s silent)', n.labelled, n.live, n.quarantined, n.cordoned, n.draining, n.passed_over, n.silent) end;
  numbers := to_jsonb(n);
  return next;
  gate := 'hardware';
  why := gangq.infeasible(s.id, members);
  ok := why is null;
  detail := coalesce(why, 'the registered workers could hold it when idle');
  numbers := jsonb_build_object('members', members, 'gpus', s.gpus, 'vram_mb', s.vram_mb, 'memory_mb', s.memory_mb, 'cpus', s.cpus, 'labels', s.labels);
  return next;
  if s.avoid is not null then
    gate := 'avoids';
    ok := why is null or n.labelled = 0;
    detail := (
      select string_agg(format('avoids device %s (%s) after a trip there: ', r.uuid, r.host) || case
          when h.device_id is not null then format('it is quarantined (%s); when it is sound, select gangq.unquarantine(%L)', h.reason, r.uuid)
          else format('a tick lets it back when no other could take it, select gangq.unquarantine(%L) at once', r.uuid) end, '; ' order by r.id)
      from gangq.device_registry r
      left join gangq.device_holds h on h.device_id = r.id and h.kind = 'quarantine' and h.until is null
      where r.id = any (s.avoid));
    numbers := jsonb_build_object('devices', cardinality(s.avoid));
    return next;
  end if;
  select coalesce(sum(gangq.members_that_fit(s, f.slots, f.memory_mb, f.cpus, f.vrams, f.device_ids)), 0) as room,
    coalesce(max(gangq.members_that_fit(s, f.slots, f.memory_mb, f.cpus, f.vrams, f.device_ids)), 0) as best,
    coalesce(sum(f.slots), 0) as free_slots, coalesce(sum(cardinality(f.device_ids)), 0) as free_gpus
  into n
  from gangq.free_capacity(gangq.candidates(t)) f join gangq.incarnations i on i.id = f.incarnation where gangq.serves(i, s);
  gate := 'capacity';
  ok := n.room >= members;
  detail := format('free now: room for %s of %s (%s slots, %s devices on workers that serve it)', n.room, members, n.free_slots, n.free_gpus);
  numbers := to_jsonb(n);
  return next;
end $$;
comment on function gangq.explain_shape(integer, integer) is 'Internal. The gates that depend on what is asked for, not on who asks.';

create function gangq.explain_gang(gang_id bigint) returns table (gate text, ok boolean, detail text, numbers jsonb)
language plpgsql stable security definer set search_path = '' as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  ended gangq.gang_history;
  n record;
begin
  select x.* into g from gangq.live_gangs x where x.id = explain_gang.gang_id;
  if not found then
    select h.* into ended from gangq.gang_history h where h.gang_id = explain_gang.gang_id order by h.finished_at desc limit 1;
    if not found then
      perform gangq.refuse('GQ002', format('gang %s does not exist', coalesce(explain_gang.gang_id::text, 'null')), 'Gang ids are in gangq.gangs.');
    end if;
    return query select 'state', ended.state = 'done', format('it is %s since %s%s', ended.state, ended.finished_at, coalesce(': ' || ended.reason, '')),
      jsonb_build_object('epoch', ended.epoch, 'attempts', ended.attempts);
    return;
  end if;
  gate := 'state';
  select count(*) filter (where j.state = 'reserved') as reserved, count(*) filter (where j.state = 'running') as running,
    count(*) filter (where j.state = 'preempting') as preempting, count(*) filter (where j.state = 'done') as done,
    max(j.waits_on) as waits_on
  into n from gangq.live_jobs j where j.gang_id = g.id;
  ok := g.state = 'running';
  detail := case g.state
    when 'running' then format('runs since %s, epoch %s', g.go_at, g.epoch)
    when 'reserved' then format('reserved, epoch %s: %s of %s members claimed, deadline in %s s', g.epoch, n.running, g.size, round(extract(epoch from g.deadline_at - t)::numeric, 1))
    when 'draining' then format('draining since %s (%s): waits for %s members to confirm that they stopped', g.drain_started_at, g.drain_cause, n.preempting)
    when 'waiting' then format('waits for %s jobs to be done', n.waits_on)
    else 'blocked: waits to be placed' end;
  numbers := to_jsonb(n) || jsonb_build_object('epoch', g.epoch, 'size', g.size);
  return next;
  if g.state not in ('blocked', 'waiting') then
    return;
  end if;
  gate := 'backoff';
  ok := g.not_before is null or g.not_before <= t;
  detail := case when ok then 'not backing off' else format('not before %s (%s s)', g.not_before, ceil(extract(epoch from g.not_before - t))) end
    || case when g.placement_misses > 0 then format('; %s reservations were not claimed in time', g.placement_misses) else '' end
    || case when g.never_started >= 10 then format('; lost a member at the start barrier %s times: look at the workers'' logs', g.never_started)
      when g.never_started > 0 then format('; lost a member at the start barrier %s times', g.never_started) else '' end;
  numbers := jsonb_build_object('not_before', g.not_before, 'placement_misses', g.placement_misses, 'never_started', g.never_started);
  return next;
  return query select x.* from gangq.explain_shape(g.shape_id, g.size) x;
  gate := 'ahead';
  select count(*) as gangs, min(x.id) as first into n
  from gangq.live_gangs x where x.state = 'blocked' and x.id <> g.id and x.order_key < g.order_key and (x.not_before is null or x.not_before <= t);
  ok := n.gangs = 0;
  detail := case when ok then 'first in line' else format('%s gangs of higher priority or greater age also wait, gang %s among them', n.gangs, n.first) end;
  numbers := to_jsonb(n);
  return next;
  gate := 'kept';
  select count(*) filter (where e.gang_id = g.id) as for_it, count(*) filter (where e.gang_id <> g.id) as for_others, min(e.gang_id) filter (where e.gang_id <> g.id) as other
  into n from gangq.earmarks e;
  ok := n.for_others = 0;
  detail := case when n.for_it > 0 then format('%s workers are kept for it', n.for_it)
    when n.for_others > 0 then format('%s workers are kept for gang %s', n.for_others, n.other) else 'no worker is kept for anybody' end;
  numbers := to_jsonb(n);
  return next;
  select p.detail, p.numbers into n from gangq.explain_preempting(g.id) p;
  if found then
    gate := 'preempting';
    ok := false;
    detail := n.detail;
    numbers := n.numbers;
    return next;
  end if;
end $$;
comment on function gangq.explain_gang(bigint) is
  'Why is this gang not running, gate by gate, with numbers: state, backoff, queue, workers, hardware, capacity, who is '
  'ahead, what is kept, who was told to stop for it. ok false marks what holds it. Raises GQ002.';

create function gangq.explain_job(job_id bigint) returns table (gate text, ok boolean, detail text, numbers jsonb)
language plpgsql stable security definer set search_path = '' as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs;
  ended gangq.history;
  n record;
begin
  select x.* into j from gangq.live_jobs x where x.id = explain_job.job_id;
  if not found then
    select h.* into ended from gangq.history h where h.job_id = explain_job.job_id order by h.finished_at desc limit 1;
    if not found then
      perform gangq.refuse('GQ002', format('job %s does not exist', coalesce(explain_job.job_id::text, 'null')), 'Job ids are in gangq.jobs.');
    end if;
    return query select 'state', ended.state = 'done', format('it is %s since %s%s', ended.state, ended.finished_at, coalesce(': ' || (ended.error ->> 'type'), '')),
      jsonb_build_object('attempts', ended.attempts);
    return;
  end if;
  if j.gang_id is not null then
    return query select 'gang', true, format('rank %s of gang %s', j.rank, j.gang_id), jsonb_build_object('gang_id', j.gang_id, 'state', j.state);
    return query select x.* from gangq.explain_gang(j.gang_id) x;
    return;
  end if;
  gate := 'state';
  ok := j.state = 'running';
  detail := case j.state
    when 'running' then format('runs since %s on %s', j.claimed_at, (select i.name from gangq.incarnations i where i.id = j.incarnation))
    when 'preempting' then format('told to stop (%s) %s s ago', j.stop_reason, round(extract(epoch from t - j.told_at)::numeric, 1))
    when 'scheduled' then format('due in %s s%s', round(extract(epoch from j.due_at - t)::numeric, 1), coalesce(', after: ' || (j.error ->> 'type'), ''))
    when 'waiting' then format('waits for jobs %s', (select string_agg(d.on_job_id::text, ', ' order by d.on_job_id) from gangq.dependencies d where d.job_id = j.id))
    else 'pending: claimable by any worker that fits' end;
  numbers := jsonb_build_object('state', j.state, 'attempts', j.attempts, 'crashes', j.crashes, 'trips', j.trips);
  return next;
  if j.state in ('running', 'preempting') then
    return;
  end if;
  return query select x.* from gangq.explain_shape(j.shape_id, 1) x;
  if j.state = 'pending' then
    gate := 'ahead';
    select count(*) as jobs into n from (
      select 1 from gangq.live_jobs x where x.shape_id = j.shape_id and x.state = 'pending' and x.order_key < j.order_key limit 10001) x;
    ok := n.jobs = 0;
    detail := format('%s jobs of its kind come before it', case when n.jobs > 10000 then 'more than 10000' else n.jobs::text end);
    numbers := to_jsonb(n);
    return next;
    gate := 'kept';
    select count(*) as workers, min(e.gang_id) as gang_id into n
    from gangq.earmarks e join gangq.incarnations i on i.id = e.incarnation, gangq.shapes s
    where s.id = j.shape_id and gangq.serves(i, s) and e.order_key <= j.order_key;
    ok := n.workers = 0;
    detail := case when ok then 'no worker is kept for a gang before it' else format('%s workers are kept for gang %s, which comes before it', n.workers, n.gang_id) end;
    numbers := to_jsonb(n);
    return next;
  end if;
end $$;
comment on function gangq.explain_job(bigint) is 'Why is this job not running, gate by gate, with numbers; for a member: its gang. Raises GQ002.';

create view gangq.waiting as
select 'gang' as kind, g.id, s.queue, s.task, g.priority, g.size, g.state, g.submitted_at as since,
  case
    when g.state = 'waiting' then 'waits for other jobs'
    when q.paused then 'its queue is paused'
    when g.not_before > c.t then format('backing off for %s s', ceil(extract(epoch from g.not_before - c.t)))
    else coalesce(h.why, 'waits for capacity') end as why
from gangq.live_gangs g
join gangq.shapes s on s.id = g.shape_id join gangq.queues_table q on q.name = s.queue
cross join (select gangq.now() as t offset 0) c
left join (
  select k.shape_id, k.size, gangq.infeasible(k.shape_id, k.size) as why
  from (select distinct z.shape_id, z.size from gangq.live_gangs z where z.state = 'blocked') k) h
  on g.state = 'blocked' and h.shape_id = g.shape_id and h.size = g.size
where g.state in ('waiting', 'blocked')
union all
select 'job', null, s.queue, s.task, x.priority, x.jobs, x.state, x.since,
  case
    when x.state = 'waiting' then 'waits for other jobs'
    when x.state = 'scheduled' then 'due later, the first at ' || x.due
    when q.paused then 'its queue is paused'
    else coalesce(h.why, 'waits for a free worker') end
from (
  select j.shape_id, j.state, j.priority, count(*)::integer as jobs, min(j.submitted_at) as since, min(j.due_at) as due
  from gangq.live_jobs j where j.gang_id is null and j.state in ('pending', 'scheduled', 'waiting') group by j.shape_id, j.state, j.priority) x
join gangq.shapes s on s.id = x.shape_id join gangq.queues_table q on q.name = s.queue
left join lateral (select gangq.infeasible(x.shape_id, 1) as why) h on x.state = 'pending';
comment on view gangq.waiting is 'What waits, and why: one row per gang, one per kind and priority of solo jobs (size: how many). explain_gang and explain_job say more.';

create function gangq.schema_version() returns text language sql stable security definer set search_path = '' as $$
  select max(m.name) from gangq.migrations m where m.name <> 'code'
$$;
comment on function gangq.schema_version() is 'The newest migration applied; the library refuses to work with another.';
