-- Events and wake-ups. Locks: rows of sleepers, with skip locked.
--
-- Wake-ups are hints. Channels: gangq_<incarnation> for one worker (payload claim, light, stop, go
-- or tick), gangq_wake for whoever sleeps (payload: the queue), gangq_tick for dedicated tickers.
-- Payloads are constants, so they coalesce.

-- Internal. Appends one event in the transaction of what happened, and tells the notification
-- targets that want it.
create function gangq.log_event(
  at timestamptz, kind text, gang_id bigint default null, epoch integer default null,
  job_id bigint default null, token bigint default null, incarnation bigint default null,
  reason text default null, data jsonb default null
) returns void language plpgsql as $$
begin
  insert into gangq.events (id, at, kind, gang_id, epoch, job_id, token, incarnation, worker,
    reason, data, actor)
  values (
    (select b.base from gangq.id_base() b) + nextval('gangq.events_id_seq'::regclass),
    at, kind, gang_id, epoch, job_id, token, incarnation,
    (select i.name from gangq.incarnations i where i.id = incarnation),
    gangq.shortened(reason, 4000), gangq.cut(data, gangq.most_said()), gangq.actor());
  -- The events of gangq.notification_kinds: most events are none of them, and cost no look there.
  if kind = any ('{crash_loop,end,quarantine,stuck,trip,update_halted}'::text[]) then
    perform gangq.tell(k.kind, log_event.at, log_event.gang_id, log_event.epoch, log_event.job_id,
      log_event.incarnation, log_event.reason, log_event.data)
    from gangq.notification_kinds k
    where k.event = log_event.kind and coalesce(log_event.data, '{}') @? k.holds::jsonpath;
  end if;
end $$;

-- Internal. Appends an event of this job and its claim.
create function gangq.log_job(
  t timestamptz, kind text, j gangq.live_jobs, reason text, data jsonb default null
) returns void language sql volatile as $$
  select gangq.log_event(t, kind, j.gang_id,
    (select g.epoch from gangq.live_gangs g where g.id = j.gang_id), j.id, j.token, j.incarnation,
    reason, data)
$$;

-- Internal. Notifies each of these workers on its own channel.
create function gangq.wake(incarnations bigint[], what text) returns void language plpgsql as $$
begin
  perform pg_notify('gangq_' || w.i, what)
  from (select distinct i from unnest(incarnations) i where i is not null) w;
end $$;

-- Internal. how = sleepers: takes as many sleepers off the list as there are jobs and notifies
-- those, or nobody, so a busy fleet never pays for NOTIFY's commit lock; commit: notifies at commit
-- whoever sleeps by then (in a caller's transaction the list would be stale); never: leaves it to
-- the poll.
create function gangq.wake_sleepers(queue text, jobs bigint, how text) returns void
language plpgsql as $$
declare
  woken bigint[];
begin
  if how = 'commit' then
    perform pg_notify('gangq_wake', queue);
  elsif how = 'sleepers' then
    with roused as (
      delete from gangq.sleepers s
      where s.incarnation = any (array(
        select z.incarnation from gangq.sleepers z where z.queues @> array[queue]
        order by z.since desc limit least(jobs, 64) for update skip locked))
      returning s.incarnation
    )
    select array_agg(r.incarnation) into woken from roused r;
    if woken is not null then
      perform gangq.wake(woken, 'light');
    end if;
  end if;
end $$;

-- Internal. These workers do not sleep, are given nothing, or have ended. Waits for nobody. A
-- submission that is not committed may be about to wake one of them: its row is left to that.
create function gangq.forget_sleepers(incarnations bigint[]) returns void
language sql volatile as $$
  delete from gangq.sleepers s where s.incarnation = any (array(
    select z.incarnation from gangq.sleepers z
    where z.incarnation = any (incarnations) order by z.incarnation for update skip locked))
$$;

-- Internal. When placed work waits (or always): asks any dedicated ticker and three live workers to
-- run the tick, so that one frozen process delays nothing.
create function gangq.wake_tick(always boolean default false) returns void language plpgsql
set enable_seqscan = off set jit = off as $$
declare
  heard timestamptz := gangq.now() - interval '15 seconds';
  first bigint;
begin
  if not (always or gangq.placed_waits()) then
    return;
  end if;
  perform pg_notify('gangq_tick', '');
  -- While a gang waits, the end of each job comes by here: the fleet is not read and sorted to
  -- choose three of it. The second query runs only where the first finds fewer; a join would read
  -- the incarnations from the first on.
  first := (
    select min(l.incarnation)
      + floor(random() * (max(l.incarnation) - min(l.incarnation) + 1))::bigint
    from gangq.leases l);
  perform gangq.wake(array(
    select n.incarnation
    from (
      (select l.incarnation from gangq.leases l
      where l.incarnation >= first and l.renewed_at > heard
        and (select i.ended_at is null from gangq.incarnations i where i.id = l.incarnation)
      order by l.incarnation limit 3)
      union all
      (select l.incarnation from gangq.leases l
      where l.incarnation < first and l.renewed_at > heard
        and (select i.ended_at is null from gangq.incarnations i where i.id = l.incarnation)
      order by l.incarnation limit 3)) n
    limit 3), 'tick');
end $$;

-- Internal. Single jobs of this shape wait now: placed ones ask for a tick, light ones wake workers
-- that sleep; how: see wake_sleepers.
create function gangq.wake_lane(shape_id integer, jobs bigint, how text) returns void
language plpgsql as $$
declare
  s record;
begin
  select z.queue, gangq.is_placed(z, gangq.placed_queues()) as placed into s
  from gangq.shapes z where z.id = wake_lane.shape_id;
  if s.placed then
    perform gangq.wake_tick(true);
  else
    perform gangq.wake_sleepers(s.queue, jobs, how);
  end if;
end $$;

-- Internal. wake_lane for the single jobs among these that are pending.
create function gangq.wake_jobs(job_ids bigint[], how text) returns void language plpgsql
set enable_seqscan = off as $$
begin
  perform gangq.wake_lane(w.shape_id, w.jobs, how)
  from (
    select j.shape_id, count(*) as jobs from gangq.live_jobs j
    where j.id = any (job_ids) and j.gang_id is null and j.state = 'pending'
    group by j.shape_id) w;
end $$;
