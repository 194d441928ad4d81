-- Silent workers: flag_dead_workers, a step of the tick, flags them; a host asks with bounce
-- whether to restart one of its own, and says with bounced how that went.
-- Locks: the worker's row; flag_dead_workers with skip locked.

-- Internal, for flag_dead_workers. An event and a line in the server's log say that this worker has
-- been silent for so long while it holds these jobs, and what to do.
create function gangq.report_silent(
  worker gangq.incarnations, silent_s numeric, jobs bigint[], t timestamptz
) returns void language plpgsql as $$
declare
  what_to_do text := format('restart it on host %s (gangq bounce --once does), or prove it dead: '
    'select gangq.report_dead(%L, %s, ...)', worker.host, worker.name, worker.id);
begin
  perform gangq.log_event(t, 'flag', incarnation => worker.id,
    reason => format('silent for %s s with %s: %s', silent_s,
      gangq.counted(cardinality(jobs), 'job'), what_to_do),
    data => jsonb_build_object('host', worker.host, 'pid', worker.pid, 'silent_s', silent_s,
      'jobs', jobs));
  raise warning 'DEAD WORKER % on host %, incarnation %, pid %: silent % s, holds jobs %: %',
    worker.name, worker.host, worker.id, coalesce(worker.pid::text, '?'), silent_s,
    array_to_string(jobs[1:20], ', '), what_to_do;
end $$;

-- Flags workers that have been silent for flag_after_s while they hold jobs, each incarnation by
-- itself; a flag stands until that incarnation is heard again or replaced. Frees nothing: only
-- proof of death or the end of a lease does. Returns how many were flagged; each is an event and a
-- line in the server's log that says what to do. Call it in autocommit: see tick.
create function gangq.flag_dead_workers() returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  outage timestamptz := gangq.note_outage(t);
  flag_after interval := (select make_interval(secs => s.flag_after_s) from gangq.settings s);
  w record;
  worker gangq.incarnations;
  flagged integer := 0;
begin
  for w in
    select c.id, c.flagged_at, h.jobs,
      round(extract(epoch from t - c.renewed_at)::numeric, 1) as silent_s
    from (
      select i.id, i.flagged_at, l.renewed_at
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
    select i.* into worker from gangq.incarnations i
    where i.id = w.id and i.ended_at is null for no key update skip locked;
    continue when not found;
    -- The loop read its jobs before the lock: since then it may have been heard, and have finished.
    continue when w.flagged_at is null
      and (select l.renewed_at from gangq.leases l where l.incarnation = w.id) > t - flag_after;
    update gangq.incarnations i set flagged_at = case when w.flagged_at is null then t end
    where i.id = w.id;
    perform gangq.endpoints_changed(array(
      select distinct j.gang_id from gangq.live_jobs j
      where j.incarnation = w.id and j.gang_id is not null));
    if w.flagged_at is not null then
      perform gangq.log_event(t, 'unflag', incarnation => w.id, reason => 'heard again');
      continue;
    end if;
    flagged := flagged + 1;
    perform gangq.report_silent(worker, w.silent_s, w.jobs, t);
  end loop;
  return flagged;
end $$;

-- Workers that fell silent while they held jobs and were neither heard nor replaced since: what the
-- cron job of a host reads (where host = '...') to know which of its workers to restart. One that
-- was judged dead stays half an hour. identity is shown to the login that registered the worker,
-- gangq_host and admins.
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

-- Internal. Whether this worker, or this host in rounds, was restarted bounces_per_hour times
-- within the hour. Rounds let a host of many workers restart as a whole, and new names buy no more.
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

-- The restarter of a host asks whether to restart one of its flagged workers. go: do it, then
-- report with bounced. Otherwise the reason: heard (not flagged any more), replaced, too_often
-- (bounces_per_hour, by worker and by host), fleet (workers of more than one host and of more than
-- a fifth of all hosts that work are flagged: the fault is elsewhere), taken (another asked within
-- two minutes), unknown (not of this host). report_only: only answers. For the login that
-- registered the worker, gangq_host and gangq_admin. Raises 42501.
create function gangq.bounce(incarnation bigint, host text, report_only boolean default false)
returns text language plpgsql as $$
declare
  t timestamptz;
  i gangq.incarnations;
  flagged bigint;
  fleet bigint;
  answer text;
  why text;
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
  select a.answer, a.reason into answer, why
  from (values
    (i.state = 'retired' or exists (
      select 1 from gangq.incarnations n where n.name = i.name and n.id > i.id),
      'replaced', 'it was replaced or stopped as asked'),
    (not exists (select 1 from gangq.flagged f where f.incarnation = i.id),
      'heard', 'it is not flagged, or was heard again'),
    (exists (
      select 1 from gangq.events e
      where e.at > t - interval '2 minutes' and e.at <= t and e.kind = 'bounce'
        and e.incarnation = i.id),
      'taken', 'it is being restarted already'),
    (gangq.bounced_too_often(i.name, i.host, t), 'too_often',
      'it or its host was restarted too often within the hour: look at it on its host'),
    (flagged > 1 and flagged * 5 > fleet, 'fleet', format('workers of %s of %s hosts are flagged '
      'at once: the fault is elsewhere (database, network, shared storage)', flagged, fleet)),
    (true, 'go', format('host %s restarts it', i.host))) as a(holds, answer, reason)
  where a.holds limit 1;
  -- A refusal is written down once for each flag.
  if not bounce.report_only and (answer = 'go' or not exists (
    select 1 from gangq.events e
    where e.at >= coalesce(i.flagged_at, i.registered_at) and e.kind = 'bounce_refused'
      and e.incarnation = i.id and e.data ->> 'answer' = answer)) then
    perform gangq.log_event(t, case answer when 'go' then 'bounce' else 'bounce_refused' end,
      incarnation => i.id, reason => why, data => jsonb_build_object('host', i.host)
        || case answer when 'go' then '{}' else jsonb_build_object('answer', answer) end);
  end if;
  return answer;
end $$;

-- A host says how the restart it was allowed went. ok: a new incarnation of that worker is heard.
-- Raises GQ002, 42501.
create function gangq.bounced(incarnation bigint, ok boolean, detail jsonb default '{}')
returns void language plpgsql as $$
begin
  perform gangq.refuse_missing('incarnation', bounced.incarnation::text)
  where not exists (select 1 from gangq.incarnations i where i.id = bounced.incarnation);
  perform gangq.check_login(bounced.incarnation, host => true);
  perform gangq.log_event(gangq.now(), 'bounced', incarnation => bounced.incarnation,
    reason => case when bounced.ok then 'a new incarnation is heard'
      else 'the restart did not help' end,
    data => gangq.for_events(bounced.detail)
      || jsonb_build_object('ok', coalesce(bounced.ok, false)));
end $$;
