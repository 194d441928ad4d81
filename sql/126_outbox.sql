-- Who is told of what: targets, and the outbox of what they have not been told yet.
--
-- A target is a name and a filter. Where it is told, and by which program, is said on the host that
-- runs `gangq notify run NAME`: no address and no command ever comes from the database.
--
-- 1. log_event, and end_attempt for a single job that has failed, call tell in the transaction of
--    what happened. It writes a row for each target that wants this, and nothing where none does.
-- 2. fetch_notification gives out the row that is due first: it counts a delivery, moves due_at to
--    the end of its lease and clears the error of the delivery before. So another runner gets
--    another row. The row of a runner that died is due again when the lease ends.
-- 3. acknowledge_notification deletes the row, or moves due_at on by a backoff. After max_attempts
--    deliveries the row stays as a dead letter until it is retried or dropped.
-- Each is delivered at least once: a runner that dies between the delivery and step 3 leaves its
-- row, and the next delivery has the same id.
--
-- Locks: fetch_notification rows of the outbox, with skip locked; acknowledge_notification a row of
-- it, then the target's; retry_notifications and remove_notification the target's rows of it by id,
-- then the target's own; add_notification that alone.
-- tell inserts and locks nothing: what a job's verb does here waits for nobody. trim_outbox skips
-- what is locked.

-- event: which event is told, if its data has what the jsonpath holds names; null: a verb calls
-- tell itself. about: a target with a filter is told of jobs, gangs, batches and services alone.
--
-- What a target can be told of, and the events that are told. about: job, gang, batch, service,
-- device or worker.
create view gangq.notification_kinds as
select *
from (values
  ('job_failed', null, null, 'job', 'a single job has failed and is not tried again'),
  ('gang_failed', 'end', '$ ? (@.outcome == "failed")', 'gang', 'a gang has failed'),
  ('batch_done', null, null, 'batch', 'the last job of a batch has ended'),
  ('trip', 'trip', '$', 'job', 'a watchdog has stopped an attempt'),
  ('device_quarantined', 'quarantine', '$.device', 'device', 'a device takes no work any more'),
  ('worker_quarantined', 'quarantine', '$.worker', 'worker', 'a worker takes no work any more'),
  ('worker_quarantined', 'stuck', '$', 'worker', 'a process of a worker cannot be killed'),
  ('crash_loop', 'crash_loop', '$', 'service', 'three gangs of a service in a row have failed'),
  ('update_halted', 'update_halted', '$', 'service', 'the new revision of a service is not ready')
) as k(kind, event, holds, about, words);

-- Internal. Writes this into the outbox of each target that wants it. It costs one look at the
-- targets where none does.
create function gangq.tell(
  kind text, t timestamptz, gang_id bigint, epoch integer, job_id bigint, incarnation bigint,
  reason text, data jsonb, batch_id bigint default null
) returns void language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  wanted integer[] := array(
    select x.id from gangq.notification_targets x where tell.kind = any (x.kinds));
  subject record;
  told jsonb;
begin
  if wanted = '{}' then
    return;
  end if;
  -- A gang that has ended is in its history by now; a job is still live.
  select w.queue, w.task, w.submitter into subject
  from (
    select s.queue, s.task, y.submitter
    from (
      select j.shape_id, j.submitter from gangq.live_jobs j where j.id = tell.job_id
      union all (
        select h.shape_id, h.submitter from gangq.gang_history h
        where h.gang_id = tell.gang_id and tell.job_id is null
        order by h.finished_at desc limit 1)
      union all
      select b.shape_id, b.submitter from gangq.batches_table b where b.id = tell.batch_id) y
    join gangq.shapes s on s.id = y.shape_id
    where (select k.about from gangq.notification_kinds k where k.kind = tell.kind limit 1)
      in ('job', 'gang', 'batch')
    union all
    select gangq.service_queue(x), r.task, x.submitter
    from gangq.services_table x
    join gangq.service_revisions r on r.service = x.name and r.revision = x.revision
    where x.name = tell.data ->> 'service') w;
  told := jsonb_strip_nulls(jsonb_build_object('kind', kind, 'at', t,
    'reason', gangq.shortened(reason, 1000), 'job_id', job_id, 'gang_id', gang_id, 'epoch', epoch,
    'batch_id', batch_id, 'queue', subject.queue, 'task', subject.task,
    'submitter', subject.submitter, 'data', gangq.cut(data, 8192)))
    || coalesce((
      select jsonb_build_object('worker', i.name, 'host', i.host)
      from gangq.incarnations i where i.id = tell.incarnation), '{}');
  insert into gangq.outbox (id, target_id, at, kind, body, due_at)
  select (select b.base from gangq.id_base() b) + nextval('gangq.outbox_id_seq'::regclass), x.id, t,
    tell.kind, told, t
  from gangq.notification_targets x
  where x.id = any (wanted)
    and (x.queue is null or gangq.below(subject.queue, array[x.queue::text]))
    and (x.submitter is null or x.submitter = subject.submitter)
    and (x.task is null or x.task = subject.task);
  if found then
    perform pg_notify('gangq_notify', '');
  end if;
end $$;

-- Internal. The target of this name. Raises GQ002.
create function gangq.target_named(target text) returns gangq.notification_targets
language plpgsql stable as $$
declare
  x gangq.notification_targets;
begin
  select y.* into x from gangq.notification_targets y where y.name = target_named.target;
  perform gangq.refuse_unknown('notification target', target, array(
      select y.name::text from gangq.notification_targets y),
    'Targets are in gangq.notifications; gangq.add_notification makes one.')
  where not found;
  return x;
end $$;

-- For admins --------------------------------------------------------------------------------------

-- Adds a target, or changes what the target of this name is told of from now on. kinds: see
-- gangq.notification_kinds; null: all, with a filter all about jobs, gangs, batches and services.
-- queue (with those below it), submitter, task: only of those of these. max_attempts:
-- deliveries of one notification before it is given up. gangq notify run delivers. For gangq_admin.
-- Raises GQ001, GQ002 (no such queue), GQ004 (100 targets).
create function gangq.add_notification(
  target text, kinds text[] default null, queue text default null, submitter text default null,
  task text default null, max_attempts integer default 20
) returns void language plpgsql as $$
declare
  known text[] := array(select distinct k.kind from gangq.notification_kinds k order by 1);
  filtered boolean := num_nonnulls(queue, submitter, task) > 0;
begin
  perform gangq.read_options('add_notification', jsonb_strip_nulls(jsonb_build_object(
    'target', target, 'kinds', kinds, 'queue', queue, 'submitter', submitter, 'task', task,
    'max_attempts', max_attempts)), null::gangq.other_arguments);
  perform gangq.refuse('GQ001', 'a notification has a target, max_attempts and at least one kind',
    format('Call gangq.add_notification(''oncall''). The kinds are %s; null: all.',
      array_to_string(known, ', ')))
  where target is null or kinds = '{}' or max_attempts is null;
  perform gangq.refuse('GQ001', format('%L is no kind of notification', left(k.kind, 100)),
    format('There are %s.', array_to_string(known, ', ')))
  from unnest(kinds) as k(kind) where k.kind <> all (known);
  perform gangq.queue_named(queue) where queue is not null;
  perform gangq.refuse('GQ001', format('%s has no queue, submitter or task', k.kind),
    'Leave the kind out, or make a target without a filter for it.')
  from gangq.notification_kinds k
  where filtered and k.kind = any (kinds) and k.about in ('device', 'worker');
  kinds := array(
    select distinct k.kind from gangq.notification_kinds k
    where case when kinds is not null then k.kind = any (kinds)
      else not filtered or k.about not in ('device', 'worker') end
    order by 1);
  insert into gangq.notification_targets as x (name, kinds, queue, submitter, task, max_attempts,
    created_at, created_by)
  values (target, kinds, queue, submitter, task, max_attempts, gangq.now(), gangq.caller())
  on conflict on constraint notification_targets_name_key do update set kinds = excluded.kinds,
    queue = excluded.queue, submitter = excluded.submitter, task = excluded.task,
    max_attempts = excluded.max_attempts, created_by = excluded.created_by;
  -- What tell costs grows with the targets.
  perform gangq.refuse('GQ004', 'there are 100 notification targets already',
    'Remove one (gangq.remove_notification), or tell one target of more and sort there.')
  where (select count(*) from gangq.notification_targets) > 100;
end $$;

-- What tell writes for it at this moment stays behind, and trim_outbox deletes it.
--
-- Removes a target, with what it has not been told. For gangq_admin. Raises GQ002.
create function gangq.remove_notification(target text) returns void language plpgsql as $$
declare
  x gangq.notification_targets := gangq.target_named(remove_notification.target);
begin
  perform from gangq.outbox o where o.target_id = x.id order by o.id for update;
  delete from gangq.outbox o where o.target_id = x.id;
  delete from gangq.notification_targets y where y.id = x.id;
end $$;

-- Tells a target that this is a test; returns the notification's id. For gangq_admin. Raises GQ002.
create function gangq.test_notification(target text) returns bigint language plpgsql as $$
declare
  t timestamptz := gangq.now();
  x gangq.notification_targets := gangq.target_named(test_notification.target);
  made bigint;
begin
  insert into gangq.outbox as o (id, target_id, at, kind, body, due_at)
  values ((select b.base from gangq.id_base() b) + nextval('gangq.outbox_id_seq'::regclass), x.id,
    t, 'test', jsonb_build_object('kind', 'test', 'at', t,
      'reason', 'sent by ' || gangq.caller()), t)
  returning o.id into made;
  perform pg_notify('gangq_notify', '');
  return made;
end $$;

-- What was given up for a target is delivered after all, and what backs off is tried at once. What
-- is being delivered is left alone: it has no error. Returns how many had been given up. For
-- gangq_admin. Raises GQ002.
create function gangq.retry_notifications(target text) returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  x gangq.notification_targets := gangq.target_named(retry_notifications.target);
  revived integer;
begin
  perform from gangq.outbox o
  where o.target_id = x.id and o.error is not null order by o.id for update;
  update gangq.outbox o set due_at = t
  where o.target_id = x.id and o.error is not null and o.dead_at is null;
  update gangq.outbox o set dead_at = null, attempts = 0, due_at = t
  where o.target_id = x.id and o.dead_at is not null;
  get diagnostics revived = row_count;
  update gangq.notification_targets y set paused_until = null, failures = 0 where y.id = x.id;
  perform pg_notify('gangq_notify', '');
  return revived;
end $$;

-- For gangq notify run ----------------------------------------------------------------------------

-- The notification that this target is to be told next, one row; id null: none is due, and
-- next_in_s says when one will be (null: nothing waits; listen on gangq_notify). It is this
-- caller's for lease_s seconds: deliver the body within them and call acknowledge_notification with
-- id and delivery, or it is given out again. In the body: id (a repeated delivery has the same),
-- target, delivery (which one this is), dropped (how many were dropped undelivered so far). For
-- gangq_notifier. Raises GQ001, GQ002.
create function gangq.fetch_notification(target text, lease_s real default 60)
returns table (id bigint, kind text, delivery integer, body jsonb, next_in_s real)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  t timestamptz := gangq.now();
  x gangq.notification_targets := gangq.target_named(fetch_notification.target);
  o gangq.outbox;
begin
  if (lease_s > 0 and lease_s <= 3600) is not true then
    perform gangq.refuse('GQ001', format('lease_s is %s', coalesce(lease_s::text, 'null')),
      'Seconds within which the delivery ends: more than 0, 3600 at most.');
  end if;
  -- Later than a minute: a clock that was ahead has been set back.
  if x.paused_until > t and x.paused_until <= t + interval '60 s' then
    next_in_s := extract(epoch from x.paused_until - t);
    return next;
    return;
  end if;
  loop
    select z.* into o from gangq.outbox z
    where z.target_id = x.id and z.dead_at is null and z.due_at <= t
    order by z.due_at, z.id limit 1 for update skip locked;
    exit when not found or o.attempts < x.max_attempts;
    update gangq.outbox z
    set dead_at = t, error = 'its last delivery began and its runner never said how it ended'
    where z.target_id = o.target_id and z.id = o.id;
  end loop;
  if o.id is null then
    -- What is due by now is locked by another runner.
    next_in_s := (
      select greatest(0.1, extract(epoch from z.due_at - t)) from gangq.outbox z
      where z.target_id = x.id and z.dead_at is null
      order by z.due_at limit 1);
    return next;
    return;
  end if;
  update gangq.outbox z
  set attempts = z.attempts + 1, due_at = t + make_interval(secs => fetch_notification.lease_s),
    error = null
  where z.target_id = o.target_id and z.id = o.id;
  id := o.id;
  kind := o.kind;
  delivery := o.attempts + 1;
  body := o.body || jsonb_build_object('id', o.id, 'target', x.name, 'delivery', delivery,
    'dropped', x.dropped);
  return next;
end $$;

-- How a delivery has ended. error null: delivered, and it is deleted; otherwise why not: it waits
-- for its next delivery (5 s, doubled each time, an hour at most, half of it random), or after
-- max_attempts is given up. After a failure nothing else is given out for a moment, a minute at
-- most. Returns delivered, waiting, dead, or stale (another runner has it by now, or had). For
-- gangq_notifier. Raises GQ002.
create function gangq.acknowledge_notification(
  target text, id bigint, delivery integer, error text default null
) returns text language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  t timestamptz := gangq.now();
  x gangq.notification_targets := gangq.target_named(acknowledge_notification.target);
  o gangq.outbox;
begin
  if acknowledge_notification.error is null then
    -- Also when its lease is over: it has arrived.
    delete from gangq.outbox z
    where z.target_id = x.id and z.id = acknowledge_notification.id
      and acknowledge_notification.delivery between 1 and z.attempts;
    if not found then
      return 'stale';
    end if;
    update gangq.notification_targets y
    set delivered = y.delivered + 1, delivered_at = t, failures = 0, paused_until = null,
      error = null
    where y.id = x.id;
    return 'delivered';
  end if;
  update gangq.outbox z
  set error = gangq.shortened(acknowledge_notification.error, 500),
    due_at = t + gangq.backoff(5, 3600, z.attempts),
    dead_at = case when z.attempts >= x.max_attempts then t end
  where z.target_id = x.id and z.id = acknowledge_notification.id
    and z.attempts = acknowledge_notification.delivery and z.dead_at is null
  returning z.* into o;
  if not found then
    return 'stale';
  end if;
  -- Its receiver may be away: then not all others need to fail, too. A minute at most, so that
  -- those that have not failed are told soon after its return.
  update gangq.notification_targets y
  set failures = y.failures + 1, paused_until = t + gangq.backoff(1, 60, y.failures + 1),
    error = o.error
  where y.id = x.id;
  return case when o.dead_at is null then 'waiting' else 'dead' end;
end $$;

-- Bounded -----------------------------------------------------------------------------------------

-- Internal, a step of the tick. Of each target the oldest notifications are dropped: those past
-- retention_short, and those beyond the newest 10,000. Its row says how many; so does the next one
-- that it is told. Returns how many.
create function gangq.trim_outbox(most integer default 200, cap integer default 10000)
returns integer language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  t timestamptz := gangq.now();
  keep interval := (select s.retention_short from gangq.settings s);
  x gangq.notification_targets;
  gone integer;
  n integer := 0;
begin
  for x in select y.* from gangq.notification_targets y for no key update skip locked loop
    with dropped as (
      delete from gangq.outbox o
      where o.target_id = x.id and o.id = any (array(
        select z.id from gangq.outbox z
        where z.target_id = x.id and (z.at < t - keep or z.id <= (
          select l.id from gangq.outbox l
          where l.target_id = x.id order by l.id desc offset cap limit 1))
        order by z.id limit most - n for update skip locked))
      returning o.id
    )
    select count(*) into gone from dropped;
    continue when gone = 0;
    n := n + gone;
    update gangq.notification_targets y set dropped = y.dropped + gone, dropped_at = t
    where y.id = x.id;
    perform gangq.log_event(t, 'dropped', data => jsonb_build_object('target', x.name),
      reason => format('%s not delivered to %s in time', gangq.counted(gone, 'notification'),
        x.name));
  end loop;
  return n;
end $$;

-- Who is told of what, and how far: how many notifications wait and since when the oldest, how many
-- were given up (dead) and why the last of them, were delivered, and were dropped undelivered
-- because they were too old or too many. failures: deliveries that failed since the last success;
-- error: why.
create view gangq.notifications as
select x.name as target, x.kinds, x.queue, x.submitter, x.task, x.max_attempts, w.waiting,
  w.oldest_at, w.dead, w.dead_error, x.delivered, x.delivered_at, x.dropped, x.dropped_at,
  x.failures, x.error, x.paused_until, x.created_at, x.created_by
from gangq.notification_targets x
cross join lateral (
  select count(*) filter (where o.dead_at is null) as waiting,
    min(o.at) filter (where o.dead_at is null) as oldest_at,
    count(o.dead_at) as dead,
    (array_agg(o.error order by o.dead_at desc) filter (where o.dead_at is not null))[1]
      as dead_error
  from gangq.outbox o where o.target_id = x.id) w;

-- What targets have not been told yet, and what was given up (dead), with the reason of the last
-- failure. body is shown to admins.
create view gangq.undelivered as
select x.name as target, o.id, o.kind, o.at,
  case when o.dead_at is null then 'waiting' else 'dead' end as state,
  o.attempts, o.due_at, o.dead_at, o.error, (o.body ->> 'job_id')::bigint as job_id,
  (o.body ->> 'gang_id')::bigint as gang_id, o.body ->> 'reason' as reason,
  case when (select gangq.is_admin()) then o.body end as body
from gangq.outbox o join gangq.notification_targets x on x.id = o.target_id;
