-- Which workers are dead and which work is due: the steps of the tick reap_expired,
-- flag_dead_workers, rollback_stale, settle_dependents and promote_due; free_orphans; and bounce,
-- for the restarter of a host.
-- Locks: note_outage the row of tick_state; then gangs by id, jobs by id, incarnations by id,
-- device_holds, all with skip locked. What is locked is left for the next tick. Each step takes a
-- bounded number of rows.
--
-- 1. A silent worker is flagged after flag_after_s, so that its host restarts it (bounce).
-- 2. It is dead when its lease is over (reap_expired), when it trips, or by proof (report_dead).
--    Then free_orphans hands back what it held: at once, or at exits_at after a trip.
-- 3. Until its death is proven its devices stay withheld: see the head of the file on trips.

-- A lease can only be judged if the workers could renew it. After a restart, a failover or a jump
-- of the clock every lease gets one full period from now. After a gap between two ticks the same
-- holds for the workers heard since the last such gap.
create function gangq.note_outage(t timestamptz) returns timestamptz language plpgsql as $$
declare
  s gangq.tick_state;
  started timestamptz := pg_postmaster_start_time();
  server_timeline text := case when not pg_is_in_recovery()
    then left(pg_walfile_name(pg_current_wal_lsn()), 8) end;
  shortest real;
  why text;
begin
  select x.* into s from gangq.tick_state x for update skip locked;
  if not found then
    -- Another transaction holds the row now and writes the same.
    return (select x.outage_ended_at from gangq.tick_state x);
  end if;
  why := case when s.last_at is null then null
    when s.server_started_at is distinct from started then 'the server restarted'
    when s.timeline is distinct from server_timeline then 'the server changed timeline'
    when s.last_at > t then 'the clock went back' end;
  if why is not null then
    s.interrupted_at := t;
  else
    select coalesce(min(l.lease_s), 120) into shortest
    from gangq.leases l join gangq.incarnations i on i.id = l.incarnation where i.ended_at is null;
    -- A gap counts when a healthy worker's lease could have run out in it. With a slow cron every
    -- gap is long: a worker that got another period at each of them would never be judged. So only
    -- workers heard since the last gap get one.
    if t - s.last_at > make_interval(secs => shortest * 0.75)
      and (s.outage_ended_at is null or exists (
        select 1 from gangq.leases l join gangq.incarnations i on i.id = l.incarnation
        where i.ended_at is null and l.renewed_at > s.outage_ended_at)) then
      why := 'no tick for ' || round(extract(epoch from t - s.last_at)::numeric, 1) || ' s';
      update gangq.leases l
        set expires_at = greatest(l.expires_at, t + make_interval(secs => l.lease_s))
      where l.incarnation = any (array(
        select z.incarnation from gangq.leases z join gangq.incarnations i on i.id = z.incarnation
        where i.ended_at is null and z.renewed_at > coalesce(s.outage_ended_at, '-infinity')
        order by z.incarnation for update of z skip locked));
    end if;
  end if;
  if why is not null then
    s.outage_ended_at := t;
    perform gangq.log_event(t, 'outage', reason => why);
  end if;
  update gangq.tick_state x set last_at = t, server_started_at = started,
    timeline = server_timeline, outage_ended_at = s.outage_ended_at,
    interrupted_at = s.interrupted_at;
  update gangq.sequence_base x set base = b.base, timeline = b.timeline
  from gangq.id_base() b
  where x.timeline <> b.timeline;
  return s.outage_ended_at;
end $$;
comment on function gangq.note_outage is
  'Internal, for rollback_stale, reap_expired and flag_dead_workers. Records an outage since the '
  'last judgement and returns when the last one ended (null: none).';

create function gangq.lease_end(expires_at timestamptz, lease_s real, outage_ended_at timestamptz)
returns timestamptz language sql immutable as
$$ select greatest(expires_at,
  coalesce(outage_ended_at + make_interval(secs => lease_s), expires_at)) $$;
comment on function gangq.lease_end is 'Internal. When a lease may be judged, outages considered.';

create function gangq.reap_expired(most integer default 200) returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  outage timestamptz := gangq.note_outage(t);
  w record;
  dead integer := 0;
begin
  perform gangq.check_most(most);
  for w in
    -- A heartbeat may renew the lease meanwhile: what is locked is judged by its latest version.
    select i.id
    from gangq.incarnations i
    join gangq.leases l on l.incarnation = i.id
    cross join gangq.tick_state x
    where i.ended_at is null and gangq.lease_end(l.expires_at, l.lease_s, x.interrupted_at) <= t
    order by i.id limit most for no key update of i skip locked for update of l skip locked
  loop
    perform gangq.end_incarnation(w.id, 'dead', t);
    perform gangq.log_event(t, 'reap', incarnation => w.id, reason => 'its lease ended');
    dead := dead + 1;
  end loop;
  dead := dead + gangq.free_orphans(null, most) + gangq.force_unconfirmed(outage, t, most);
  perform gangq.lift_withheld(null, t, most);
  return dead;
end $$;
comment on function gangq.reap_expired is
  'A step of the tick. Judges by the clock, and only after leases have ended. Incarnations whose '
  'lease is over are dead and their jobs are freed; jobs told to stop that never confirmed are '
  'force-drained and their devices quarantined; devices withheld after a trip are given back when '
  'their time is over. Returns how many incarnations and jobs. Raises GQ001.';

create function gangq.force_unconfirmed(outage timestamptz, t timestamptz, most integer)
returns integer language plpgsql as $$
declare
  w record;
  j gangq.live_jobs;
  withheld bigint[];
  n integer := 0;
begin
  for w in
    select x.id, x.gang_id
    from gangq.live_jobs x
    join gangq.leases l on l.incarnation = x.incarnation
    cross join gangq.settings s
    where x.incarnation is not null
      and x.state = 'preempting'
      and gangq.lease_end(x.told_at + make_interval(secs => s.ack_timeout_s + l.lease_s), l.lease_s,
        outage) <= t
    order by x.gang_id nulls last, x.id limit most
  loop
    continue when w.gang_id is not null and not gangq.try_lock_gang(w.gang_id);
    select x.* into j from gangq.live_jobs x
    where x.id = w.id and x.state = 'preempting' for update skip locked;
    continue when not found;
    withheld := gangq.withhold(j,
      format('job %s was told to stop and never confirmed it', j.id), t);
    perform gangq.log_job(t, 'quarantine', j, 'told to stop and never confirmed it',
      jsonb_build_object('device', r.uuid))
    from gangq.device_registry r where r.id = any (withheld) order by r.index, r.id;
    perform gangq.stopped(j, null, t, 'force');
    n := n + 1;
  end loop;
  return n;
end $$;
comment on function gangq.force_unconfirmed is
  'Internal, for reap_expired. Frees jobs that were told to stop and never confirmed it: '
  'ack_timeout_s later their heartbeats answer lost, and a lease later a worker that heard none '
  'is dead. Their devices may still be busy and are quarantined. Returns how many jobs.';

-- A worker that tripped exits within seconds. Until then the child processes of its other slots may
-- run.
create function gangq.orphans(t timestamptz)
returns table (job gangq.live_jobs, worker gangq.incarnations) language sql stable as $$
  select j, i from gangq.incarnations i join gangq.live_jobs j on j.incarnation = i.id
  where i.ended_at is not null and (i.exits_at > t) is not true
$$;
comment on function gangq.orphans is
  'Internal. The jobs that ended incarnations still hold and that cannot run any more.';

create function gangq.free_orphans(of_incarnations bigint[] default null, most integer default 1000)
returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  freed integer := 0;
  w record;
begin
  for w in
    select distinct (o.job).gang_id from gangq.orphans(t) o
    where (of_incarnations is null or (o.worker).id = any (of_incarnations))
      and (o.job).gang_id is not null
    order by 1 limit most
  loop
    continue when not gangq.try_lock_gang(w.gang_id);
    freed := freed + gangq.free_orphaned_members(w.gang_id, t);
  end loop;
  for w in
    select (o.job).id, o.worker,
      row_number() over (partition by (o.worker).id, (o.job).light order by (o.job).token) as nth
    from gangq.orphans(t) o
    where (of_incarnations is null or (o.worker).id = any (of_incarnations))
      and (o.job).gang_id is null
    order by 1 limit most
  loop
    freed := freed + gangq.free_orphaned_job(w.id, w.worker, w.nth, t)::integer;
  end loop;
  if freed > 0 then
    perform gangq.wake_tick();
  end if;
  return freed;
end $$;
comment on function gangq.free_orphans is
  'Internal. Frees the jobs that ended incarnations still hold, from the rows alone, so it can be '
  'interrupted and repeated; returns how many. Locked rows and jobs that may still run are left '
  'for the next tick.';

create function gangq.free_orphaned_members(gang_id bigint, t timestamptz) returns integer
language plpgsql as $$
declare
  j gangq.live_jobs;
  g gangq.live_gangs;
  gone bigint[];
  cause text;
  freed integer := 0;
begin
  select x.* into g from gangq.live_gangs x where x.id = free_orphaned_members.gang_id;
  for j in
    select (o.job).* from gangq.orphans(t) o
    where (o.job).gang_id = g.id and (o.job).state = 'preempting' order by (o.job).id
  loop
    perform gangq.withhold_doubtful(j, t);
    perform gangq.stopped(j, null, t, 'dead');
    freed := freed + 1;
  end loop;
  if g.state = 'draining' then
    return freed;
  end if;
  if g.state = 'reserved' or exists (
    select 1 from gangq.live_jobs x join gangq.incarnations i on i.id = x.incarnation
    where x.gang_id = g.id and x.state = 'reserved' and i.ended_at is not null)
  then
    if gangq.rollback_gang(g.id, 'a worker ended before it claimed') and g.state = 'reserved' then
      return freed;
    end if;
  end if;
  select coalesce(array_agg((o.job).id order by (o.job).rank), '{}'), case
    when count(*) = 0 then 'placement_miss'
    when bool_or(gangq.cause_of_loss(o.worker) = 'crash') then 'crash'
    when bool_and(gangq.cause_of_loss(o.worker) = 'other_job') then 'other_job'
    else 'release' end
  into gone, cause
  from gangq.orphans(t) o
  where (o.job).gang_id = g.id and (o.job).state = 'running';
  if gone = '{}' and g.state = 'running' then
    return freed;
  end if;
  perform gangq.withhold_doubtful(x, t), gangq.log_event(t, 'lost', job_id => x.id,
    token => x.token, incarnation => x.incarnation, reason => 'its worker ended')
  from gangq.live_jobs x where x.id = any (gone);
  perform gangq.lose_members(g.id, gone, cause,
    case cause when 'crash'
      then jsonb_build_object('type', 'WorkerLost', 'message', 'its worker was lost') end,
    format('a member %s%s', (gangq.cause_named(cause)).words,
      case cause when 'placement_miss' then ': its worker ended' end), t);
  return freed + cardinality(gone);
end $$;
comment on function gangq.free_orphaned_members is
  'Internal, for free_orphans. Of a locked gang: members told to stop are stopped, a reservation '
  'that nobody claimed is rolled back, running members are lost. Returns how many.';

create function gangq.free_orphaned_job(job_id bigint, worker gangq.incarnations, nth bigint,
  t timestamptz)
returns boolean language plpgsql as $$
declare
  j gangq.live_jobs;
  cause text := gangq.cause_of_loss(worker);
begin
  select x.* into j from gangq.live_jobs x
  where x.id = free_orphaned_job.job_id and x.incarnation = worker.id
  for update skip locked;
  if not found then
    return false;
  end if;
  perform gangq.withhold_doubtful(j, t);
  if j.state = 'preempting' then
    perform gangq.stopped(j, null, t, 'dead');
    return true;
  end if;
  perform gangq.log_event(t, 'lost', job_id => j.id, token => j.token, incarnation => j.incarnation,
    reason => 'its worker ended');
  perform gangq.end_attempt(j,
    case when cause = 'crash' and j.light and worker.prefetch > 1 and nth > 1 then 'other_job'
      else cause end, null,
    format('worker %s %s', worker.name, case
      when cause = 'other_job' then format('stopped over another job (%s)', worker.exit_code)
      when worker.state = 'dead' then 'was lost'
      else 'was retired' end),
    t);
  return true;
end $$;
comment on function gangq.free_orphaned_job is
  'Internal, for free_orphans. False when another transaction holds it. nth: its place among the '
  'claims of its lane. Of prefetched jobs only the oldest can have run and is charged a crash.';

create function gangq.flag_dead_workers() returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  outage timestamptz := gangq.note_outage(t);
  flag_after interval := (select make_interval(secs => s.flag_after_s) from gangq.settings s);
  w record;
  what_to_do text;
  flagged integer := 0;
begin
  for w in
    select c.id, c.name, c.host, c.pid, c.flagged_at, h.jobs,
      round(extract(epoch from t - c.renewed_at)::numeric, 1) as silent_s
    from (
      select i.id, i.name, i.host, i.pid, i.flagged_at, l.renewed_at
      from gangq.incarnations i join gangq.leases l on l.incarnation = i.id
      where i.ended_at is null and case
        when i.flagged_at is not null then l.renewed_at > i.flagged_at
        else greatest(l.renewed_at, outage) <= t - flag_after end
      offset 0) c
    cross join lateral (
      select array_agg(j.id order by j.id) as jobs from gangq.live_jobs j
      where j.incarnation = c.id) h
    where c.flagged_at is not null or h.jobs is not null order by c.id limit 200
  loop
    perform 1 from gangq.incarnations i
    where i.id = w.id and i.ended_at is null for no key update skip locked;
    continue when not found;
    if w.flagged_at is not null then
      update gangq.incarnations i set flagged_at = null where i.id = w.id;
      perform gangq.log_event(t, 'unflag', incarnation => w.id, reason => 'heard again');
      continue;
    end if;
    -- The loop read its jobs before the lock: since then it may have been heard, and have finished.
    continue when (select l.renewed_at from gangq.leases l where l.incarnation = w.id)
      > t - flag_after;
    update gangq.incarnations i set flagged_at = t where i.id = w.id;
    flagged := flagged + 1;
    what_to_do := format('restart it on host %s (gangq bounce --once does), or prove it dead: '
      'select gangq.report_dead(%L, %s, ...)', w.host, w.name, w.id);
    perform gangq.log_event(t, 'flag', incarnation => w.id,
      reason => format('silent for %s s with %s: %s', w.silent_s,
        gangq.counted(cardinality(w.jobs), 'job'), what_to_do),
      data => jsonb_build_object('host', w.host, 'pid', w.pid, 'silent_s', w.silent_s, 'jobs',
        w.jobs));
    raise warning 'DEAD WORKER % on host %, incarnation %, pid %: silent % s, holds jobs %: %',
      w.name, w.host, w.id, coalesce(w.pid::text, '?'), w.silent_s,
      array_to_string(w.jobs[1:20], ', '), what_to_do;
  end loop;
  return flagged;
end $$;
comment on function gangq.flag_dead_workers is
  'Flags workers that have been silent for flag_after_s while they hold jobs, each incarnation by '
  'itself; a flag stands until that incarnation is heard again or replaced. Frees nothing: only '
  'proof of death or the end of a lease does. Returns how many were flagged; each is an event and '
  'a line in the server''s log that says what to do.';

create view gangq.flagged as
select i.name as worker, i.host, i.id as incarnation, i.flagged_at,
  round(extract(epoch from c.t - l.renewed_at)::numeric, 1) as silent_s,
  array(select j.id from gangq.live_jobs j where j.incarnation = i.id order by j.id) as jobs, i.pid,
  case when (select gangq.may_act_as('gangq_host')) or gangq.may_report(i.login) then i.identity
    else '{}' end as identity
from gangq.incarnations i
join gangq.leases l on l.incarnation = i.id
cross join (select gangq.now() as t offset 0) c
where i.flagged_at is not null and l.renewed_at <= i.flagged_at and i.state <> 'retired'
  -- A worker judged dead by its lease is not restarted yet. One that stays dead for long was left
  -- so on purpose.
  and (i.ended_at is null or i.flagged_at > c.t - interval '30 minutes')
  and not exists (select 1 from gangq.incarnations n where n.name = i.name and n.id > i.id);
comment on view gangq.flagged is
  'Workers that fell silent while they held jobs and were neither heard nor replaced since: what '
  'the cron job of a host reads (where host = ''...'') to know which of its workers to restart. '
  'One that was judged dead stays half an hour. identity is shown to the login that registered the '
  'worker, gangq_host and admins.';

-- A host restarts its workers one by one. All restarts within ten minutes of the first are one
-- round.
create function gangq.bounced_too_often(name text, host text, t timestamptz) returns boolean
language sql stable as $$
  select count(*) filter (where e.worker = bounced_too_often.name) >= c.bounces_per_hour
    or count(distinct e.round) filter (where e.round <> e.this_round) >= c.bounces_per_hour
  from gangq.settings c
  left join (
    select x.worker, date_bin('10 minutes', x.at, min(x.at) over ()) as round,
      date_bin('10 minutes', bounced_too_often.t, min(x.at) over ()) as this_round
    from gangq.events x
    where x.at > bounced_too_often.t - interval '1 hour' and x.at <= bounced_too_often.t
      and x.kind = 'bounce' and x.data ->> 'host' = bounced_too_often.host) e on true
  group by c.bounces_per_hour
$$;
comment on function gangq.bounced_too_often is
  'Internal. Whether this worker, or this host in rounds, was restarted bounces_per_hour times '
  'within the hour. Rounds let a host of many workers restart as a whole, and new names buy no '
  'more.';

create function gangq.bounce(incarnation bigint, host text, report_only boolean default false)
returns text language plpgsql as $$
declare
  t timestamptz;
  i gangq.incarnations;
  flagged bigint;
  fleet bigint;
  answer text;
begin
  -- The lock makes two restarters of one worker ask one after the other.
  select x.* into i from gangq.incarnations x where x.id = bounce.incarnation for no key update;
  t := gangq.now();
  if i.id is null or i.host is distinct from bounce.host then
    return 'unknown';
  end if;
  perform gangq.check_login(i.id, host => true);
  -- Counted in hosts, because one hung host silences all its workers. Only workers that have worked
  -- count, because anyone with a worker's login can register a hundred that never do.
  select count(distinct x.host) filter (where f.incarnation is not null), count(distinct x.host)
  into flagged, fleet
  from gangq.incarnations x left join gangq.flagged f on f.incarnation = x.id
  where x.worked_at is not null and (x.ended_at is null or f.incarnation is not null);
  answer := case
    when exists (select 1 from gangq.incarnations n where n.name = i.name and n.id > i.id)
      or i.state = 'retired' then 'replaced'
    when not exists (select 1 from gangq.flagged f where f.incarnation = i.id) then 'heard'
    when exists (
      select 1 from gangq.events e
      where e.at > t - interval '2 minutes' and e.kind = 'bounce' and e.incarnation = i.id)
      then 'taken'
    when gangq.bounced_too_often(i.name, i.host, t) then 'too_often'
    when flagged > 1 and flagged * 5 > fleet then 'fleet'
    else 'go' end;
  -- A refusal is written down once for each flag.
  if not bounce.report_only and (answer = 'go' or not exists (
    select 1 from gangq.events e
    where e.at >= coalesce(i.flagged_at, i.registered_at) and e.kind = 'bounce_refused'
      and e.incarnation = i.id and e.data ->> 'answer' = answer)) then
    perform gangq.log_event(t, case answer when 'go' then 'bounce' else 'bounce_refused' end,
      incarnation => i.id, reason => case answer
        when 'go' then format('host %s restarts it', i.host)
        when 'replaced' then 'it was replaced or stopped as asked'
        when 'heard' then 'it is not flagged, or was heard again'
        when 'taken' then 'it is being restarted already'
        when 'too_often'
          then 'it or its host was restarted too often within the hour: look at it on its host'
        when 'fleet' then format('workers of %s of %s hosts are flagged at once: the fault is '
          'elsewhere (database, network, shared storage)', flagged, fleet) end,
      data => jsonb_build_object('host', i.host)
        || case answer when 'go' then '{}' else jsonb_build_object('answer', answer) end);
  end if;
  return answer;
end $$;
comment on function gangq.bounce is
  'The restarter of a host asks whether to restart one of its flagged workers. go: do it, then '
  'report with bounced. Otherwise the reason: heard (not flagged any more), replaced, too_often '
  '(bounces_per_hour, by worker and by host), fleet (workers of more than one host and of more '
  'than a fifth of all hosts that work are flagged: the fault is elsewhere), taken (another asked '
  'within two minutes), unknown (not of this host). report_only: only answers. For the login that '
  'registered the worker, gangq_host and gangq_admin. Raises 42501.';

create function gangq.bounced(incarnation bigint, ok boolean, detail jsonb default '{}')
returns void language plpgsql as $$
begin
  if not exists (select 1 from gangq.incarnations i where i.id = bounced.incarnation) then
    perform gangq.refuse('GQ002',
      format('incarnation %s does not exist', coalesce(bounced.incarnation::text, 'null')),
      'Pass the incarnation that bounce was asked about.');
  end if;
  perform gangq.check_login(bounced.incarnation, host => true);
  perform gangq.log_event(gangq.now(), 'bounced', incarnation => bounced.incarnation,
    reason => case when bounced.ok then 'a new incarnation is heard'
      else 'the restart did not help' end,
    data => coalesce(bounced.detail, '{}')
      || jsonb_build_object('ok', coalesce(bounced.ok, false)));
end $$;
comment on function gangq.bounced is
  'A host says how the restart it was allowed went. ok: a new incarnation of that worker is heard. '
  'Raises GQ002, 42501.';

create function gangq.rollback_stale(most integer default 200) returns integer
language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  outage timestamptz := gangq.note_outage(t);
  w record;
  g gangq.live_gangs;
  due timestamptz;
  shut_s double precision;
  n integer := 0;
begin
  for w in
    select x.id from (
      select g.id, g.deadline_at from gangq.live_gangs g where g.state = 'reserved'
      union all
      select g.id, least(g.deadline_at, g.timeout_at) from gangq.live_gangs g
      where g.missing_since is not null) x
    where x.deadline_at <= t or exists (
      select 1 from gangq.live_jobs j join gangq.incarnations i on i.id = j.incarnation
      where j.gang_id = x.id and j.state = 'reserved'
        and (i.state <> 'live' or i.quarantined is not null))
    order by x.id limit most
  loop
    continue when not gangq.try_lock_gang(w.id);
    select x.* into g from gangq.live_gangs x
    where x.id = w.id and (x.state = 'reserved' or x.missing_since is not null);
    continue when not found;
    n := n + 1;
    -- In an outage nobody could claim: a deadline that passed in it is set anew.
    due := outage + make_interval(secs => g.claim_deadline_s);
    if g.deadline_at <= t and due > t then
      update gangq.live_gangs x set deadline_at = due where x.id = g.id;
      update gangq.live_jobs j set deadline_at = due
      where j.gang_id = g.id and j.state = 'reserved';
      continue;
    end if;
    if g.missing_since is not null and g.timeout_at <= t then
      -- Time in which the queue was paused or over a limit does not count.
      shut_s := gangq.ineligible_s(g.kind_id, t) - g.held_s;
      if shut_s > 0 then
        update gangq.live_gangs x
          set timeout_at = x.timeout_at + make_interval(secs => shut_s), held_s = x.held_s + shut_s
        where x.id = g.id;
      else
        perform gangq.drain(g.id, '{}', 'no_replacement', null,
          format('no place was found for a lost member within %s s', round(g.timeout_s)), t);
      end if;
    elsif not gangq.rollback_gang(g.id) and g.state = 'reserved' then
      -- Some members were claimed and wait at the barrier for one that will not come. A worker is
      -- passed over only for a missed deadline: the reservation may also be over because another of
      -- its workers stops.
      update gangq.incarnations i
        set passed_over_until = t + make_interval(secs => (
          select s.pass_over_s from gangq.settings s))
      where g.deadline_at <= t and i.id = any (array(
        select z.id from gangq.incarnations z
        where z.id in (
          select j.incarnation from gangq.live_jobs j
          where j.gang_id = g.id and j.state = 'reserved')
        order by z.id for no key update skip locked));
      perform gangq.drain(g.id, '{}', 'placement_miss', null,
        'a member was not claimed in time, or its worker takes nothing more', t);
    end if;
  end loop;
  return n;
end $$;
comment on function gangq.rollback_stale is
  'Internal. Ends reservations past their deadline, or on workers that take nothing any more: '
  'rolled back, or drained when some members wait at the barrier, which costs the gang a placement '
  'miss and no attempt. Drains a running gang that has missed a member for its whole timeout.';

-- Problem: a job ends while the submission of a job that waits for it is not committed. The ending
-- does not see the dependency, and the submission cannot know of the ending. Solution: a dependency
-- is written with settled = false and is settled here.
-- Invariant: a settled row is seen by every transaction that ends the awaited job.
-- 1. The row d is visible to the first statement, so its submission is committed.
-- 2. A later statement locks the awaited job's row, which every ending needs. So no ending was in
--    flight, and the job was live. The lock is released at once: having had it is enough, and
--    nothing waits for a tick that is left open.
-- 3. An ending that begins after step 2 looks for dependents in a statement that starts after it
--    has locked the job's row (leave), so it sees d. (An ending with an older snapshot, in
--    REPEATABLE READ, cannot: it leaves a row in unsettled.)
-- 4. When the lock is not free, an ending is in flight or another transaction holds the row: the
--    next tick looks again.
-- 5. When the job is not live any more it has ended, and d is told how, as its ending would have
--    told it.
-- Each call starts at a random place, so dependencies on locked jobs do not keep the others from
-- being settled.
create function gangq.settle_dependents(most integer default 200) returns integer language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  waiting bigint[];
  awaited bigint[];
  quiet bigint[];
  ended bigint[];
  first bigint;
  told integer;
begin
  first := (
    select min(x.on_job_id)
      + floor(random() * (max(x.on_job_id) - min(x.on_job_id) + 1))::bigint
    from gangq.dependencies x where not x.settled and x.outcome is null);
  if first is null then
    return 0;
  end if;
  select array_agg(d.job_id), array_agg(d.on_job_id) into waiting, awaited
  from (
    (select x.job_id, x.on_job_id from gangq.dependencies x
      where not x.settled and x.outcome is null and x.on_job_id >= first
      order by x.on_job_id, x.job_id limit most)
    union all
    (select x.job_id, x.on_job_id from gangq.dependencies x
      where not x.settled and x.outcome is null and x.on_job_id < first
      order by x.on_job_id, x.job_id limit most)
    limit most) d;
  begin
    quiet := array(
      select j.id from gangq.live_jobs j
      where j.id = any (awaited) order by j.id for key share skip locked);
    raise exception using errcode = 'GQ000';
  exception when sqlstate 'GQ000' then
    null;  -- the locks are released
  end;
  ended := array(
    select a.id from unnest(awaited) as a(id)
    where not exists (select 1 from gangq.live_jobs j where j.id = a.id));
  perform gangq.settle(ended);
  update gangq.dependencies d set settled = true
  where d.ctid = any (array(
    select z.ctid from gangq.dependencies z join unnest(waiting, awaited) as w(job_id, on_job_id)
      on z.on_job_id = w.on_job_id and z.job_id = w.job_id
    where z.on_job_id = any (quiet) and not z.settled and z.outcome is null
    order by z.on_job_id, z.job_id for update of z skip locked));
  get diagnostics told = row_count;
  return told + cardinality(ended);
end $$;
comment on function gangq.settle_dependents is
  'Internal, a step of the tick. Dependencies that became visible since the last one: settled, or '
  'told how the awaited job ended. Returns how many.';

create function gangq.promote_due(most integer default 200) returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  due record;
  ended bigint[];
  moved integer := 0;
begin
  perform gangq.check_most(most);
  for due in
    with ready as (
      update gangq.live_jobs j set state = 'pending', due_at = null, ran_on = null
      where j.id = any (array(
        select z.id from gangq.live_jobs z where z.state = 'scheduled' and z.due_at <= t
        order by z.due_at limit most for update skip locked))
      returning j.shape_id
    )
    select r.shape_id, count(*) as jobs from ready r group by r.shape_id
  loop
    moved := moved + due.jobs;
    perform gangq.wake_lane(due.shape_id, due.jobs, 'sleepers');
  end loop;
  ended := array(
    select u.job_id from gangq.unsettled u order by u.job_id limit most for update skip locked);
  if ended <> '{}' then
    perform gangq.settle(ended);
    delete from gangq.unsettled u
    where u.job_id = any (ended) and not exists (
      select 1 from gangq.dependencies d where d.on_job_id = u.job_id and d.outcome is null);
  end if;
  return moved + gangq.promote_dependents(t, most);
end $$;
comment on function gangq.promote_due is
  'A step of the tick. Scheduled jobs that are due become pending. Jobs that waited for jobs which '
  'are done now are released; jobs that waited for one that failed or was cancelled are cancelled. '
  'Returns how many moved. Raises GQ001.';

create function gangq.promote_dependents(t timestamptz, most integer) returns integer
language plpgsql as $$
declare
  w record;
  g bigint;
  locked boolean;
  moved integer := 0;
begin
  for w in
    select d.job_id, j.gang_id,
      array_agg(d.on_job_id) filter (where d.outcome = 'done') as done,
      min(d.on_job_id) filter (where d.outcome <> 'done') as unmet
    from gangq.dependencies d join gangq.live_jobs j on j.id = d.job_id
    where d.job_id = any (array(
        with told as (
          select distinct x.job_id from gangq.dependencies x
          where x.outcome is not null order by x.job_id limit most)
        select s.job_id from told s
        union
        -- Members are released together: the limit never cuts a gang.
        select m.id
        from told s
        join gangq.live_jobs x on x.id = s.job_id
        join gangq.live_jobs m on m.gang_id = x.gang_id))
      and d.outcome is not null
    group by d.job_id, j.gang_id
    order by j.gang_id, d.job_id
  loop
    if w.gang_id is not null and w.gang_id is distinct from g then
      g := w.gang_id;
      locked := gangq.try_lock_gang(g);
    end if;
    continue when w.gang_id is not null and not locked;
    perform 1 from gangq.live_jobs j
    where j.id = w.job_id and j.state = 'waiting' for update skip locked;
    continue when not found;
    moved := moved + 1;
    if w.unmet is not null then
      perform gangq.cancel_dependent(w.job_id, w.gang_id, w.unmet);
    else
      perform gangq.release_dependent(w.job_id, w.gang_id, w.done, t);
    end if;
  end loop;
  return moved;
end $$;
comment on function gangq.promote_dependents is
  'Internal, for promote_due. Releases or cancels jobs whose awaited jobs have ended. Returns how '
  'many.';

create function gangq.cancel_dependent(job_id bigint, gang_id bigint, unmet bigint) returns void
language plpgsql as $$
begin
  begin
    perform 1 from gangq.dependencies d
    where d.job_id = any (array(
      select j.id from gangq.live_jobs j
      where j.id = cancel_dependent.job_id or j.gang_id = cancel_dependent.gang_id))
    order by d.on_job_id, d.job_id for update nowait;
  exception when lock_not_available then
    return;  -- a caller completes one of these jobs in an open transaction: a later tick does it
  end;
  perform gangq.cancel_all(
    case when cancel_dependent.gang_id is null then array[cancel_dependent.job_id] else '{}' end,
    array_remove(array[cancel_dependent.gang_id], null),
    format('job %s, which it waited for, did not succeed', unmet));
end $$;
comment on function gangq.cancel_dependent is
  'Internal, for promote_dependents. Cancels a locked waiting job, or its gang, because the job '
  'unmet did not succeed.';

create function gangq.release_dependent(job_id bigint, gang_id bigint, done bigint[], t timestamptz)
returns void language plpgsql as $$
declare
  fewer integer;
begin
  delete from gangq.dependencies d
  where d.job_id = release_dependent.job_id and d.on_job_id = any (done);
  -- Counted from what is deleted: another promotion may have taken some of them meanwhile.
  get diagnostics fewer = row_count;
  update gangq.live_jobs j set
    waits_on = j.waits_on - fewer,
    state = case
      when j.waits_on > fewer then 'waiting'
      when j.gang_id is not null then 'blocked'
      when j.due_at > t then 'scheduled'
      else 'pending' end
  where j.id = release_dependent.job_id;
  if release_dependent.gang_id is not null then
    update gangq.live_gangs x set state = 'blocked'
    where x.id = release_dependent.gang_id and not exists (
      select 1 from gangq.live_jobs j where j.gang_id = x.id and j.state = 'waiting');
  else
    perform gangq.wake_lane(j.shape_id, 1, 'sleepers')
    from gangq.live_jobs j where j.id = release_dependent.job_id;
  end if;
end $$;
comment on function gangq.release_dependent is
  'Internal, for promote_dependents. A locked waiting job does not wait for these jobs any more.';
