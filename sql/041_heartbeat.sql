-- heartbeat: a worker renews its lease, brings the beats of its jobs and the readings of its
-- devices, and learns which jobs to stop.
-- Locks: its lease, progress and device_readings, all with skip locked: a heartbeat never waits.

-- A worker says it is alive and which claims it works on: renews its lease (count it from the
-- moment this call was sent), stores the beats given (aligned with job_ids; null: no news), and
-- returns per claim what to do: continue, preempt or cancel (stop within the grace, then
-- ack_preempted), lost (kill it, report nothing). Claims the worker did not list are returned too.
-- Waits for no lock: while its lease is being judged it raises 55P03, renewed nothing, and is to be
-- called again. readings: an array of {"uuid": ..., ...}, one per device that this worker offers;
-- the latest is kept, and what is malformed, unknown or over 4 KB is left out. A beat over 64 KB is
-- cut (its key "cut" says so). durable => false: the commit does not wait for the disk
-- (synchronous_commit off for this transaction), as gangq's worker asks: never in a transaction
-- with writes of your own. Call it in autocommit. Raises GQ002, GQ005, 42501 (another login
-- registered it).
create function gangq.heartbeat(
  incarnation bigint, job_ids bigint[] default '{}', tokens bigint[] default '{}',
  beats jsonb[] default null, readings jsonb default null, durable boolean default true
) returns table (
  job_id bigint, token bigint, action text, reason text, gang_id bigint, epoch integer
) language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  t timestamptz := gangq.now();
  -- A crash may lose this renewal: for a full lease after a restart nothing is judged (lease_end).
  flushed text := case when durable is false
    then set_config('synchronous_commit', 'off', true) end;
  holds_work boolean;
begin
  update gangq.leases l set expires_at = t + make_interval(secs => l.lease_s), renewed_at = t
  where l.incarnation = (
    select z.incarnation
    from gangq.leases z join gangq.incarnations i on i.id = z.incarnation
    where z.incarnation = heartbeat.incarnation and i.ended_at is null
      and gangq.may_report(i.login) for update of z skip locked)
  returning exists (
    select 1 from gangq.live_jobs j
    where j.incarnation = heartbeat.incarnation and j.state in ('running', 'preempting'))
  into holds_work;
  if holds_work is null then
    perform gangq.refuse_heartbeat(heartbeat.incarnation);
  end if;
  -- Most heartbeats of a large fleet are of workers that wait for work: they are told nothing.
  if not holds_work and heartbeat.job_ids = '{}' and heartbeat.readings is null then
    return;
  end if;
  if heartbeat.beats is not null then
    perform gangq.keep_beats(heartbeat.incarnation, heartbeat.job_ids, heartbeat.tokens,
      heartbeat.beats, t);
  end if;
  if heartbeat.readings is not null then
    perform gangq.keep_readings(heartbeat.incarnation, heartbeat.readings, t);
  end if;
  return query
  select coalesce(a.id, h.id), coalesce(a.token, h.token), case
      when h.id is null then 'lost'
      when h.state = 'running' then 'continue'
      when h.told_at + make_interval(secs => s.ack_timeout_s) < t then 'lost'
      when h.stop_reason = 'cancel' then 'cancel'
      else 'preempt' end,
    case when h.id is null then 'not this worker''s claim any more' else h.stop_reason end,
    h.gang_id, (select g.epoch from gangq.live_gangs g where g.id = h.gang_id)
  from unnest(heartbeat.job_ids, heartbeat.tokens) as a(id, token)
  full join (
    select j.id, j.token, j.state, j.told_at, j.stop_reason, j.gang_id
    from gangq.live_jobs j
    where j.incarnation = heartbeat.incarnation and j.state in ('running', 'preempting')) h
    on h.id = a.id and h.token = a.token
  cross join gangq.settings s;
end $$;

-- Internal. Raises why a lease was not renewed: GQ002, GQ005, 42501 or 55P03.
create function gangq.refuse_heartbeat(incarnation bigint) returns void language plpgsql as $$
begin
  if not exists (
    select 1 from gangq.incarnations i
    where i.id = refuse_heartbeat.incarnation and i.ended_at is null)
  then
    perform gangq.refuse_ended(incarnation);
  end if;
  perform gangq.check_login(incarnation);
  -- A worker that took this for a renewal would count on time it does not have.
  raise exception using errcode = 'lock_not_available',
    message = format('the lease of incarnation %s is being judged this moment', incarnation),
    hint = 'It was not renewed. Call heartbeat again at once.';
end $$;

-- 1. Beats that are locked are left out: a handler may hold its complete() uncommitted, with the
--    old beat deleted, and the lease must be renewed.
-- 2. What a handler puts into its beat must not cost the lease: a step that is none is no error. A
--    beat over 64 KB would be rewritten with every heartbeat: it is cut, and says so.
-- 3. What was known of another claim of the job says nothing of this one, nor does the rate before
--    a step lower than the last: the job counts from the start again.
--
-- Internal. The beats that the heartbeat of this worker brings, aligned with its claims; a beat for
-- another worker's job is left out. Waits for no lock.
create function gangq.keep_beats(
  incarnation bigint, job_ids bigint[], tokens bigint[], beats jsonb[], t timestamptz
) returns void language plpgsql as $$
begin
  with said as materialized (
    select j.id, j.token, c.beat,
      case when jsonb_typeof(c.beat -> 'step') = 'number'
          and abs((c.beat ->> 'step')::numeric) < 9e18
        then trunc((c.beat ->> 'step')::numeric)::bigint end as step,
      substring(c.beat ->> 'phase' from '^(load|run|save|long)$') as phase
    from unnest(keep_beats.job_ids, keep_beats.tokens, keep_beats.beats) as b(id, token, beat)
    cross join lateral (select gangq.cut(b.beat, 65536) as beat offset 0) c
    join gangq.live_jobs j
      on j.id = b.id and j.token = b.token and j.incarnation = keep_beats.incarnation
        and j.state in ('running', 'preempting')
    where b.beat is not null
  ),
  locked as materialized (
    select z.* from gangq.progress z
    where z.job_id = any (array(select n.id from said n))
    order by z.job_id for update skip locked
  ),
  changed as (
    update gangq.progress p set token = n.token, beat_at = t, data = n.beat, phase = n.phase,
      step = coalesce(n.step, o.step),
      stride = case when n.step > o.step
        then least(gcd(coalesce(o.stride, 0), n.step::numeric - o.step), 9e18)::bigint
        else o.stride end,
      step_at = case when n.step is null or n.step = o.step then o.step_at else t end,
      rate = case
        when n.step < o.step then null
        when n.step > o.step and o.step_at < t then (coalesce(o.rate, v.rate) + v.rate) / 2
        else o.rate end,
      lags_since = o.lags_since
    from said n
    join locked l on l.job_id = n.id
    left join locked o on o.job_id = n.id and o.token = n.token
    cross join lateral (
      select (n.step::float8 - o.step)
        / nullif(extract(epoch from t - o.step_at), 0)::float8 as rate) v
    where p.job_id = n.id and p.job_id = any (array(select x.job_id from locked x))
  )
  insert into gangq.progress (job_id, token, beat_at, data, phase, step, step_at)
  select n.id, n.token, t, n.beat, n.phase, n.step, case when n.step is not null then t end
  from said n
  where not exists (select 1 from gangq.progress z where z.job_id = n.id)
  order by n.id
  on conflict (job_id) do nothing;
end $$;

-- Internal. The latest reading of each device, brought by the heartbeat of the worker that offers
-- it; waits for no lock.
create function gangq.keep_readings(incarnation bigint, readings jsonb, t timestamptz) returns void
language plpgsql as $$
declare
  ids bigint[];
  latest jsonb[];
begin
  if jsonb_typeof(keep_readings.readings) <> 'array' then
    return;
  end if;
  select array_agg(n.id), array_agg(n.reading) into ids, latest
  from (
    select distinct on (r.id) r.id, e.reading - 'uuid' as reading
    from jsonb_array_elements(keep_readings.readings) with ordinality as e(reading, n)
    join gangq.device_registry r on r.uuid = e.reading ->> 'uuid'
    where r.offered_by = keep_readings.incarnation and pg_column_size(e.reading) <= 4096
    order by r.id, e.n desc) n;
  update gangq.device_readings d
  set at = t, data = n.reading
  from unnest(ids, latest) as n(id, reading)
  where d.device_id = n.id and d.device_id = any (array(
    select z.device_id from gangq.device_readings z
    where z.device_id = any (ids) order by z.device_id for update skip locked));
  insert into gangq.device_readings (device_id, at, data)
  select n.id, t, n.reading from unnest(ids, latest) as n(id, reading)
  where not exists (select 1 from gangq.device_readings z where z.device_id = n.id)
  on conflict (device_id) do nothing;
end $$;
