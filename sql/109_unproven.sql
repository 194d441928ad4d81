-- Ended workers that are not proven gone: a process of theirs may still use their devices.
-- Locks: report_stuck: gangs, the worker's name, its row, the rows of workers that offer its
-- devices.

-- Incarnations of this worker that ended by a trip and are not yet proven gone: its next start
-- looks for each and, when every process of it is gone, says so with report_dead, which gives their
-- devices back. Those that another login registered are left out, but for gangq_host and
-- gangq_admin.
create function gangq.unproven(worker text)
returns table (incarnation bigint, host text, boot_id text, pid bigint, identity jsonb,
  exits_at timestamptz, exit_code integer)
language sql stable as $$
  select i.id, i.host, i.boot_id, i.pid, i.identity, i.exits_at, i.exit_code::integer
  from gangq.incarnations i
  where i.name = unproven.worker and i.exits_at is not null
    and (gangq.may_report(i.login) or gangq.may_act_as('gangq_host'))
  order by i.id
$$;

-- The latest incarnation of this name, ended or not, with the devices it saw that a driver vouches
-- for. A worker that starts compares them with what it sees itself, and does not start beside a
-- process that nothing could kill. identity is empty where another login registered it.
create function gangq.predecessor(worker text)
returns table (incarnation bigint, state text, host text, boot_id text, pid bigint, identity jsonb,
  ended_at timestamptz, quarantined text, reboot_needed boolean, exits_at timestamptz,
  exit_code integer, devices text[])
language sql stable as $$
  select i.id, i.state, i.host, i.boot_id, i.pid,
    case when gangq.may_report(i.login) or gangq.may_act_as('gangq_host') then i.identity
      else '{}' end,
    i.ended_at, i.quarantined, i.reboot_needed, i.exits_at, i.exit_code::integer,
    array(
      select r.uuid from gangq.device_claimants c join gangq.device_registry r on r.id = c.device_id
      where c.incarnation = i.id and r.source <> 'declared' order by r.index, r.id)
  from gangq.incarnations i
  where i.name = predecessor.worker
  order by i.id desc
  limit 1
$$;

-- A process of this incarnation survived SIGKILL: only a reboot of its host helps. Nothing is freed
-- early. The worker is quarantined by name. Every device that it holds is quarantined from the end
-- of its lease until an operator lifts that. A report after the end of the lease quarantines every
-- device that it had, except those that other jobs hold by now: the event and the server's log name
-- those. Returns how many devices are quarantined. Repeats are harmless. For the login that
-- registered the worker, gangq_host and gangq_admin. Raises GQ001, GQ002, 42501; 55P03 while a
-- device is changing hands: try again.
create function gangq.report_stuck(worker text, incarnation bigint, evidence jsonb) returns integer
language plpgsql as $$
declare
  t timestamptz;
  i gangq.incarnations;
  why text;
  lease_ends timestamptz;
  stuck bigint[];
  elsewhere jsonb := '[]';
begin
  perform gangq.lock_waiting_for(report_stuck.incarnation);
  perform gangq.lock_name(report_stuck.worker);  -- against a registration of it, as quarantine does
  i := gangq.lock_reported(report_stuck.worker, report_stuck.incarnation, report_stuck.evidence);
  t := gangq.now();
  why := format('process %s cannot be killed: reboot host %s',
    coalesce(left(report_stuck.evidence ->> 'pid', 100), i.pid::text, '?'), i.host);
  -- What its jobs hold is withheld when its lease ends and the jobs are freed: see free_orphans.
  stuck := array(
    select h.device_id from gangq.device_holds h left join gangq.live_jobs j on j.id = h.job_id
    where j.incarnation = i.id or h.kind = 'quarantine' and h.incarnation = i.id
    order by h.device_id);
  if i.reboot_needed then
    return cardinality(stuck);
  end if;
  lease_ends := greatest(i.exits_at,
    (select l.expires_at from gangq.leases l where l.incarnation = i.id));
  if i.ended_at is not null and (i.exits_at is null or lease_ends <= t) then
    -- The devices of its jobs were given back, and it is not known any more which they were.
    stuck := gangq.quarantine_all_of(i, why, t);
    elsewhere := gangq.held_elsewhere(i.id);
  end if;
  update gangq.incarnations x set
    reboot_needed = x.reboot_needed or x.id = i.id,
    quarantined = case when x.id = newest.id then why else x.quarantined end
  from (select max(y.id) as id from gangq.incarnations y where y.name = i.name) newest
  where x.id in (i.id, newest.id);
  update gangq.device_holds h set reason = why, until = null
  where h.kind = 'quarantine' and h.incarnation = i.id;
  if i.exits_at > t then
    perform gangq.postpone_exit(i, lease_ends);
  end if;
  perform gangq.log_event(t, 'stuck', incarnation => i.id, reason => why,
    data => gangq.for_events(report_stuck.evidence) || jsonb_build_object('host', i.host,
      'held_by_others', elsewhere, 'devices', gangq.uuids_of(stuck)));
  insert into gangq.evidence (at, kind, incarnation, data)
  values (t, 'stuck', i.id, gangq.cut(report_stuck.evidence, gangq.most_evidence()));
  raise warning 'UNKILLABLE worker % on host %, incarnation %: % (its devices and its name are '
    'quarantined until gangq.unquarantine%)',
    i.name, i.host, i.id, why, (
      select coalesce('; others hold ' || string_agg(format('device %s by now (job %s of worker '
        '%s): cancel it, then select gangq.quarantine(%L)', e ->> 'device', e ->> 'job_id',
        e ->> 'worker', e ->> 'device'), '; '), '')
      from jsonb_array_elements(elsewhere) e);
  return cardinality(stuck);
end $$;

-- Internal, for report_stuck. Locks the gangs that wait until this worker is gone, now or once they
-- are drained, if they are free within 500 ms. Gangs are locked before worker rows. A gang that
-- another transaction holds open must not block the report.
create function gangq.lock_waiting_for(incarnation bigint) returns void language plpgsql
set lock_timeout = '500ms' as $$
begin
  perform 1 from gangq.live_gangs g
  where (g.state = 'draining' or (g.state = 'blocked' or g.missing_since is not null)
    and g.not_before is not null)
    and exists (
      select 1 from gangq.live_jobs j
      where j.gang_id = g.id and j.ran_on = lock_waiting_for.incarnation)
  order by g.id for update;
exception when lock_not_available then
  null;
end $$;

-- Internal, for report_stuck. Quarantines every device that an incarnation had and no job or other
-- quarantine holds. Returns all that are quarantined for it. Raises 55P03.
create function gangq.quarantine_all_of(i gangq.incarnations, why text, t timestamptz)
returns bigint[] language plpgsql as $$
declare
  had bigint[] := array(
    select c.device_id from gangq.device_claimants c where c.incarnation = i.id);
begin
  perform gangq.lock_devices(had);
  perform gangq.close_places(waits => true, ids => array(
    select h.place_id from gangq.device_holds h
    where h.device_id = any (had) and h.kind = 'place'));
  insert into gangq.device_holds as h (device_id, kind, reason, since, incarnation)
  select d.id, 'quarantine', why, t, i.id from unnest(had) as d(id) order by d.id
  -- Also devices that another trip withholds for a while only.
  on conflict (device_id) do update
    set reason = excluded.reason, incarnation = excluded.incarnation, until = null
  where h.kind = 'quarantine' and h.until is not null;
  return array(
    select h.device_id from gangq.device_holds h
    where h.kind = 'quarantine' and h.incarnation = i.id order by h.device_id);
end $$;

-- Internal, for report_stuck. The devices that an incarnation had and jobs of others hold now.
create function gangq.held_elsewhere(incarnation bigint) returns jsonb language sql stable as $$
  select coalesce(jsonb_agg(jsonb_build_object('device', r.uuid, 'job_id', j.id, 'worker', x.name)
    order by r.index, r.id), '[]')
  from gangq.device_claimants c
  join gangq.device_registry r on r.id = c.device_id
  join gangq.device_holds h on h.device_id = r.id
  join gangq.live_jobs j on j.id = h.job_id
  left join gangq.incarnations x on x.id = j.incarnation
  where c.incarnation = held_elsewhere.incarnation
    and j.incarnation is distinct from held_elsewhere.incarnation
$$;

-- Internal, for report_stuck. What waits for a process that should be gone at exits_at waits for
-- the end of its lease.
create function gangq.postpone_exit(i gangq.incarnations, lease_ends timestamptz) returns void
language sql as $$
  update gangq.live_gangs g set not_before = lease_ends
  where g.id = any (array(
    select z.id from gangq.live_gangs z
    where (z.state = 'blocked' or z.missing_since is not null)
      and z.not_before >= i.exits_at and z.not_before < lease_ends
      and exists (select 1 from gangq.live_jobs j where j.gang_id = z.id and j.ran_on = i.id)
    order by z.id for update skip locked));
  update gangq.live_jobs j set due_at = lease_ends
  where j.id = any ((select gangq.waits_for_exit(i))::bigint[]);
  update gangq.incarnations x set exits_at = lease_ends where x.id = i.id;
$$;
