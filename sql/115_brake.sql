-- What a watchdog saw: suspect writes it down, and the brake holds trips of many suspects at once.
-- Takes no locks.

-- What is written down ----------------------------------------------------------------------------

-- Internal. The names of these devices, for events.
create function gangq.uuids_of(device_ids bigint[]) returns jsonb language sql stable as $$
  select coalesce(jsonb_agg(r.uuid order by r.index, r.id), '[]')
  from gangq.device_registry r where r.id = any (uuids_of.device_ids)
$$;

-- Internal. Appends an event of a job, for every role, and its evidence, for those who may read the
-- job's payload, at the same instant.
create function gangq.log_with_evidence(
  t timestamptz, kind text, j gangq.live_jobs, reason text, data jsonb, evidence jsonb
) returns void language plpgsql as $$
declare
  waits_for jsonb := log_with_evidence.evidence -> 'waits_for';
begin
  perform gangq.log_job(t, log_with_evidence.kind, j, log_with_evidence.reason,
    log_with_evidence.data || jsonb_build_object('task', s.task, 'queue', s.queue, 'host', i.host,
      'worker', i.name, 'rank', gangq.rank_of(j), 'devices', gangq.uuids_of(array(
        select h.device_id from gangq.device_holds h where h.job_id = j.id)))
      || case when jsonb_typeof(waits_for) = 'array' and pg_column_size(waits_for) < 4096
        then jsonb_build_object('waits_for', waits_for) else '{}' end)
  from gangq.shapes s left join gangq.incarnations i on i.id = j.incarnation
  where s.id = j.shape_id;
  -- A trip must not fail because of a long log.
  insert into gangq.evidence (at, kind, job_id, token, incarnation, data)
  values (t, log_with_evidence.kind, j.id, j.token, j.incarnation,
    gangq.cut(coalesce(nullif(log_with_evidence.evidence, 'null'), '{}'), gangq.most_evidence()));
end $$;

-- A watchdog doubts a job and goes on looking: an event with its evidence (evidence's "reason" is
-- shown to everybody). Changes nothing. notify: it would have been stopped, were its class not one
-- that only reports. tripping: the worker ends it now unless the answer is held. Returns noted, or
-- held while so many gangs and workers are suspect that a stall or health trip would not be carried
-- out. Raises GQ001, GQ002, GQ003, 42501.
create function gangq.suspect(
  incarnation bigint, job_id bigint, token bigint, class text, evidence jsonb default '{}',
  notify boolean default false, tripping boolean default false
) returns text language plpgsql as $$
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs := gangq.own_claim(suspect.job_id, suspect.token);
  held boolean;
  kind text;
begin
  perform gangq.refuse('GQ001', format('class is %L', suspect.class),
    'It is one of ' || string_agg(k.class, ', ') || '.')
  from gangq.trip_classes k where k.reporter is not null
  having count(*) filter (where k.class = suspect.class) = 0;
  if j.incarnation is distinct from suspect.incarnation then
    perform gangq.refuse_stale(suspect.job_id, suspect.token);
  end if;
  held := gangq.may_be_held(suspect.class)
    and gangq.braking(j, suspect.class, suspect.evidence, t);
  kind := case when suspect.notify then 'notify' when suspect.tripping and held then 'held'
    else 'suspect' end;
  perform gangq.log_with_evidence(t, kind, j,
    coalesce(suspect.evidence ->> 'reason', suspect.class),
    jsonb_build_object('class', suspect.class, 'outcome', nullif(kind, 'suspect')),
    suspect.evidence);
  return case when held then 'held' else 'noted' end;
end $$;

-- The brake: a trip that is held ------------------------------------------------------------------

-- A job that beats more rarely than its stall timeout is suspected anew with every beat. A few such
-- jobs would keep the brake on for ever, so a job that has beaten since does not count. A job that
-- has not beaten counts each time it is suspected, or an outage longer than two timeouts would
-- release the brake. (offset 0: looked up for each suspect, by its job.)
--
-- Internal, for braking. How many gangs and single workers were suspect within the last minute,
-- own_unit included, and of how many. The members of one gang wait for each other and count as one.
create function gangq.count_suspects(
  own_unit text, t timestamptz, out suspects bigint, out fleet bigint
) language sql stable as $$
  with suspected as (
    select coalesce('g' || e.gang_id, 'w' || e.worker) as unit from gangq.events e
    where e.at > t - interval '1 minute' and e.at <= t and e.kind in ('suspect', 'trip', 'held')
      and e.data ->> 'class' in (select k.class from gangq.trip_classes k where k.held)
      and not exists (
        select 1
        from gangq.events p
        join gangq.progress b on b.job_id = p.job_id and b.token = p.token and b.beat_at > p.at
        where p.job_id = e.job_id and p.token = e.token and p.at < e.at - interval '1 minute'
          and p.at > t - interval '1 hour'
          and p.kind in ('suspect', 'held') and p.data ->> 'class' = e.data ->> 'class' offset 0)
    union
    select own_unit
  ),
  -- A job tripped within the minute has ended: it counts as suspect and as fleet.
  live as (
    select coalesce('g' || m.gang_id, 'w' || i.name) as unit
    from gangq.incarnations i
    left join gangq.live_jobs m on m.incarnation = i.id and m.gang_id is not null
      and m.state in ('running', 'preempting')
    where i.ended_at is null
    union
    select s.unit from suspected s
  )
  select (select count(*) from suspected), (select count(*) from live)
$$;

-- Many suspects at once are one fault elsewhere: the detector, the database or the shared store. So
-- the brake holds their trips.
--
-- A trip held for brake_hold_s is released: by then a fault of its own is likelier than a shared
-- one. Two things keep it held. The database was away within a lease, so no beat could be stored.
-- Or suspects of other gangs or workers wait for the same file system or peer as this job, so the
-- fault is there.
--
-- Internal. Whether a stall or health trip of this job is held: at least three gangs and single
-- workers, and more than brake_share of the fleet, were suspect within the last minute.
create function gangq.braking(j gangq.live_jobs, class text, evidence jsonb, t timestamptz)
returns boolean language plpgsql stable set plan_cache_mode = force_generic_plan as $$
declare
  cfg gangq.settings;
  own_unit text := coalesce('g' || j.gang_id, (
    select 'w' || i.name from gangq.incarnations i where i.id = j.incarnation));
  last_beat timestamptz := (
    select p.beat_at from gangq.progress p where p.job_id = j.id and p.token = j.token);
  things text[] := case when jsonb_typeof(evidence -> 'waits_for') = 'array'
    then array(select jsonb_array_elements_text(evidence -> 'waits_for')) end;
  suspects bigint;
  fleet bigint;
  held_since timestamptz;
begin
  select x.* into cfg from gangq.settings x;
  select c.suspects, c.fleet into suspects, fleet from gangq.count_suspects(own_unit, t) c;
  if suspects < 3 or suspects <= cfg.brake_share::numeric * fleet then
    return false;
  end if;
  held_since := (
    select min(e.at) from gangq.events e
    where e.job_id = j.id and e.token = j.token and e.kind = 'held' and e.at <= t
      and e.data ->> 'class' = braking.class and (last_beat >= e.at) is not true);
  return held_since is null or held_since > t - make_interval(secs => cfg.brake_hold_s)
    or exists (
      select 1 from gangq.tick_state x cross join gangq.leases l
      where l.incarnation = j.incarnation
        and x.outage_ended_at > t - make_interval(secs => l.lease_s))
    -- A held trip comes again once a stall timeout, so this looks back ten minutes instead of one.
    or exists (
      select 1 from gangq.events e
      join gangq.live_jobs o on o.id = e.job_id and o.token = e.token and o.state = 'running'
      where e.at > t - interval '10 minutes' and e.at <= t and e.kind in ('suspect', 'held')
        and e.data -> 'waits_for' ?| things
        and coalesce('g' || e.gang_id, 'w' || e.worker) <> own_unit
        and ((
          select b.beat_at from gangq.progress b
          where b.job_id = e.job_id and b.token = e.token) > e.at) is not true);
end $$;
