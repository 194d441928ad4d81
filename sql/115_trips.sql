-- What a watchdog saw and did: suspect, trip; what a trip leaves behind: withheld devices, a death
-- that is not proven yet, a process that cannot be killed; and devices that a job avoids.
-- Locks: trip: the gang, its members or the job, the row 'brake' of lock_rows, the worker's row;
-- then other jobs of the worker with skip locked. The caller of trip is dying and has two seconds.
-- report_stuck: gangs, the worker's name, its row, the rows of workers that offer its devices.
-- lift_avoided, a step of the tick: gangs and jobs, with skip locked.
--
-- Several live workers may see one device (device_claimants). The jobs of one of them may take it
-- (device_registry.offered_by). While it is held it has one row in device_holds:
--
--     kind        incarnation  until      why it is held                         what ends that
--   1 job         -            -          its job is reserved or runs            its proven end
--   2 place       -            -          no job fills that place yet            fill or closing
--   3 quarantine  the worker   its lease  it tripped and may still run           report_dead, until
--   4 quarantine  the worker   -          a process of it cannot be killed       unquarantine
--   5 quarantine  -            -          a trip blamed it, its job never        unquarantine
--                                         confirmed a stop, an operator said so
--
-- withhold turns 1 into 3, 4 or 5; report_stuck turns 3, 2 and free devices into 4; quarantine, an
-- operator's, everything but 1 into 5. An operator can end 3 early, too.

-- What is written down ----------------------------------------------------------------------------

create function gangq.class_of(code integer) returns text language sql immutable as $$
  select case code
    when 75 then 'budget' when 76 then 'stall' when 77 then 'lost' when 78 then 'health'
    when 79 then 'unstopped' when 80 then 'frozen' when 85 then 'fault' when 86 then 'memory'
    when 87 then 'unkillable' when 88 then 'unfit' end
$$;
comment on function gangq.class_of is
  'Internal. The watchdog class of an exit code; null for a code that no watchdog uses.';

create function gangq.uuids_of(device_ids bigint[]) returns jsonb language sql stable as $$
  select coalesce(jsonb_agg(r.uuid order by r.index, r.id), '[]')
  from gangq.device_registry r where r.id = any (uuids_of.device_ids)
$$;
comment on function gangq.uuids_of is 'Internal. The names of these devices, for events.';

create function gangq.log_job(
  t timestamptz, kind text, j gangq.live_jobs, reason text, data jsonb default null
) returns void language sql volatile as $$
  select gangq.log_event(t, kind, j.gang_id,
    (select g.epoch from gangq.live_gangs g where g.id = j.gang_id), j.id, j.token, j.incarnation,
    reason, data)
$$;
comment on function gangq.log_job is 'Internal. Appends an event of this job and its claim.';

create function gangq.log_with_evidence(
  t timestamptz, kind text, j gangq.live_jobs, reason text, data jsonb, evidence jsonb
) returns void language plpgsql as $$
declare
  waits_for jsonb := log_with_evidence.evidence -> 'waits_for';
begin
  perform gangq.log_job(t, log_with_evidence.kind, j, log_with_evidence.reason,
    log_with_evidence.data || jsonb_build_object('task', s.task, 'queue', s.queue, 'host', i.host,
      'worker', i.name, 'rank', coalesce(j.epoch_rank, j.rank), 'devices', gangq.uuids_of(array(
        select h.device_id from gangq.device_holds h where h.job_id = j.id)))
      || case when jsonb_typeof(waits_for) = 'array' and pg_column_size(waits_for) < 4096
        then jsonb_build_object('waits_for', waits_for) else '{}' end)
  from gangq.shapes s left join gangq.incarnations i on i.id = j.incarnation
  where s.id = j.shape_id;
  -- A trip must not fail because of a long log.
  insert into gangq.evidence (at, kind, job_id, token, incarnation, data)
  values (t, log_with_evidence.kind, j.id, j.token, j.incarnation,
    gangq.cut(coalesce(nullif(log_with_evidence.evidence, 'null'), '{}'), 4194304));
end $$;
comment on function gangq.log_with_evidence is
  'Internal. Appends an event of a job, for every role, and its evidence, for those who may read '
  'the job''s payload, at the same instant.';

create function gangq.suspect(
  incarnation bigint, job_id bigint, token bigint, class text, evidence jsonb default '{}',
  notify boolean default false, convicted boolean default false
) returns text language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs;
  held boolean;
  kind text;
begin
  if coalesce(suspect.class, '') not in ('budget', 'stall', 'health', 'fault', 'gang', 'frozen',
    'memory') then
    perform gangq.refuse('GQ001', format('class is %L', suspect.class),
      'It is budget, stall, health, fault, gang, frozen or memory.');
  end if;
  select x.* into j from gangq.live_jobs x where x.id = suspect.job_id;
  if not found or j.token is distinct from suspect.token
    or j.incarnation is distinct from suspect.incarnation then
    perform gangq.refuse_stale(suspect.job_id, suspect.token);
  end if;
  perform gangq.check_login(j.incarnation);
  held := suspect.class in ('stall', 'health')
    and gangq.braking(j, suspect.class, suspect.evidence, t);
  kind := case when suspect.notify then 'notify' when suspect.convicted and held then 'held'
    else 'suspect' end;
  perform gangq.log_with_evidence(t, kind, j,
    coalesce(suspect.evidence ->> 'reason', suspect.class),
    jsonb_build_object('class', suspect.class, 'outcome', nullif(kind, 'suspect')),
    suspect.evidence);
  return case when held then 'held' else 'noted' end;
end $$;
comment on function gangq.suspect is
  'A watchdog doubts a job and goes on looking: an event with its evidence (evidence''s "reason" '
  'is shown to everybody). Changes nothing. notify: it would have been stopped, were its class not '
  'one that only reports. convicted: the worker stops it now unless the answer is held. Returns '
  'noted, or held while so many gangs and workers are suspect that a stall or health trip would '
  'not be carried out. Raises GQ001, GQ002, GQ003, 42501.';

-- The brake: a trip that is held ------------------------------------------------------------------

-- Many suspects at once are one fault elsewhere: the detector, the database or the shared store. So
-- the brake holds their trips. The members of one gang wait for each other and count as one
-- suspect, and as one of the fleet.
--
-- A job that beats more rarely than its stall timeout is suspected anew with every beat. A few such
-- jobs would keep the brake on for ever, so a job that has beaten since does not count. A job that
-- has not beaten counts each time it is suspected, or an outage longer than two timeouts would
-- release the brake. (offset 0: looked up for each suspect, by its job.)
--
-- A trip held for brake_hold_s is released: by then a fault of its own is likelier than a shared
-- one. Two things keep it held. The database was away within a lease, so no beat could be stored.
-- Or suspects of other gangs or workers wait for the same file system or peer as this job, so the
-- fault is there.
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
  with suspected as (
    select coalesce('g' || e.gang_id, 'w' || e.worker) as unit from gangq.events e
    where e.at > t - interval '1 minute' and e.at <= t and e.kind in ('suspect', 'trip', 'held')
      and e.data ->> 'class' in ('stall', 'health') and e.worker is not null
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
  select (select count(*) from suspected), (select count(*) from live) into suspects, fleet;
  if suspects < 3 or suspects <= cfg.brake_share::numeric * fleet then
    return false;
  end if;
  held_since := (
    select min(e.at) from gangq.events e
    where e.job_id = j.id and e.token = j.token and e.kind = 'held'
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
comment on function gangq.braking is
  'Internal. Whether a stall or health trip of this job is held: at least three gangs and single '
  'workers, and more than brake_share of the fleet, were suspect within the last minute.';

-- Which member of a gang stopped first ------------------------------------------------------------

create function gangq.ranks_wait(ranks integer[]) returns text language sql immutable as $$
  select case
    when cardinality(ranks) = 1 then format('rank %s waits', ranks[1])
    when cardinality(ranks) > 2 and ranks[cardinality(ranks)] - ranks[1] = cardinality(ranks) - 1
      then format('ranks %s to %s wait', ranks[1], ranks[cardinality(ranks)])
    when cardinality(ranks) > 8
      then format('ranks %s and %s more wait', array_to_string(ranks[1:8], ', '),
        cardinality(ranks) - 8)
    else format('ranks %s wait', array_to_string(ranks, ', ')) end
$$;
comment on function gangq.ranks_wait is
  'Internal. Subject and verb of a sentence about these ranks, in ascending order.';

-- In a collective the waiting members look like the one that they wait for: none beats. The first
-- to stop is named only when the data show it:
-- 1. One member is behind all others by at least the longest stride (steps between two beats).
-- 2. All others wait in one place of the code, and one member is in another place.
-- The order of last beats proves nothing: all members beat the last step before the one that was
-- never finished.
create function gangq.who_stopped(
  gang_id bigint, own_id bigint, own_place text, out job_id bigint, out sentence text
) language sql stable as $$
  with members as materialized (
    select j.id, coalesce(j.epoch_rank, j.rank) as rank, p.step, p.stride,
      case when j.id = own_id then own_place else (
        select v.data ->> 'place' from gangq.evidence v
        where v.job_id = j.id and v.token = j.token and v.kind in ('suspect', 'held', 'trip')
        order by v.at desc limit 1) end as place
    from gangq.live_jobs j left join gangq.progress p on p.job_id = j.id and p.token = j.token
    where j.gang_id = who_stopped.gang_id and j.state in ('running', 'preempting')
  ),
  gang as (
    select count(*) as members, count(m.step) = count(*) as all_step,
      count(m.place) = count(*) as all_placed, coalesce(max(m.stride), 1) as stride,
      array_agg(m.step order by m.step) as steps, array_agg(m.rank order by m.rank) as ranks,
      (array_agg(m.id order by m.step, m.rank))[1] as last_id,
      (array_agg(m.rank order by m.step, m.rank))[1] as last_rank
    from members m
  ),
  places as (
    select m.place, array_agg(m.rank order by m.rank) as ranks, min(m.id) as id
    from members m
    group by m.place
  )
  select a.job_id, a.sentence
  from (
    select 1 as nth, g.last_id as job_id,
      format('rank %s stopped first: it is at step %s, the others at step %s or later',
        g.last_rank, g.steps[1], g.steps[2]) as sentence
    from gang g
    where g.members > 1 and g.all_step and g.steps[2]::numeric - g.steps[1] >= g.stride
    union all
    select 2, here.id, format('%s in %s; rank %s has not arrived: it is in %s',
      gangq.ranks_wait(there.ranks), there.place, here.ranks[1], here.place)
    from gang g
    join places here on cardinality(here.ranks) = 1
    join places there on there.place <> here.place and cardinality(there.ranks) = g.members - 1
    where g.members > 2 and g.all_placed
    union all
    select 3, null, format('%s%s%s; which of them stopped first is not known',
      gangq.ranks_wait(g.ranks),
      ' at step ' || g.steps[1]
        || case when g.all_step and g.steps[1] = g.steps[g.members] then '' else ' and later' end,
      (select ' in ' || min(p.place) from places p having count(*) = 1))
    from gang g) a
  order by a.nth
  limit 1
$$;
comment on function gangq.who_stopped is
  'Internal. The member that stopped first (null: not known), and a sentence about it. own_place: '
  'where member own_id waits in its code, before its evidence is stored.';

create function gangq.all_stand_still(j gangq.live_jobs) returns boolean language sql stable as $$
  select bool_and(
    x.beat_at <= (
      select o.beat_at from gangq.progress o where o.job_id = j.id and o.token = j.token)
      + make_interval(secs => 3 * (select c.heartbeat_s from gangq.settings c))
    or exists (
      select 1 from gangq.events e
      where e.job_id = x.id
        and e.token = x.token
        and e.kind in ('suspect', 'held')
        and e.data ->> 'class' in ('stall', 'health')
        and e.at > coalesce(x.beat_at, '-infinity')))
  from (
    select m.id, m.token, p.beat_at
    from gangq.live_jobs m left join gangq.progress p on p.job_id = m.id and p.token = m.token
    where m.gang_id = j.gang_id and m.id <> j.id and m.state = 'running') x
$$;
comment on function gangq.all_stand_still is
  'Internal, for trip. Whether all running siblings are silent too: they last beat at most three '
  'heartbeats after this member, or are suspect since. Null: it has none.';

-- Devices that are withheld -----------------------------------------------------------------------

create function gangq.withhold(
  j gangq.live_jobs, reason text, t timestamptz, device_ids bigint[] default null,
  incarnation bigint default null, until timestamptz default null
) returns bigint[] language plpgsql as $$
declare
  withheld bigint[];
begin
  with moved as (
    update gangq.device_holds h set kind = 'quarantine', job_id = null, token = null,
      since = withhold.t, reason = withhold.reason, incarnation = withhold.incarnation,
      until = withhold.until
    where h.job_id = j.id and h.device_id = any (coalesce(withhold.device_ids, array[h.device_id]))
    returning h.device_id
  )
  select array_agg(m.device_id) into withheld from moved m;
  return withheld;
end $$;
comment on function gangq.withhold is
  'Internal. Devices of this job (all, or these) are quarantined from here on: the head of this '
  'file says with which incarnation and until. Returns which; null: it held none.';

create function gangq.withhold_doubtful(j gangq.live_jobs, t timestamptz) returns void
language sql volatile as $$
  select gangq.withhold(j, case
      when not i.reboot_needed then
        format('worker %s is exiting after a trip (%s)', i.name, i.exit_code)
      else coalesce(i.quarantined,
        format('a process of worker %s cannot be killed: reboot host %s', i.name, i.host)) end,
    t, incarnation => i.id, until => case when not i.reboot_needed then greatest(i.exits_at, (
      select l.expires_at from gangq.leases l where l.incarnation = i.id)) end)
  from gangq.incarnations i
  where i.id = j.incarnation and (i.reboot_needed or i.exits_at is not null)
$$;
comment on function gangq.withhold_doubtful is
  'Internal. Before a job of an ended incarnation is freed: withholds its devices where that may '
  'still run.';

create function gangq.lift_withheld(of_incarnation bigint, t timestamptz, most integer default 200)
returns void language plpgsql as $$
declare
  given_back bigint[];
  device record;
begin
  given_back := array(
    select z.device_id from gangq.device_holds z
    where z.kind = 'quarantine' and z.until is not null and case
      when of_incarnation is null then z.until <= lift_withheld.t
      else z.incarnation = of_incarnation end
    order by z.device_id limit most for update skip locked);
  for device in
    with lifted as (
      delete from gangq.device_holds h where h.device_id = any (given_back)
      returning h.device_id, h.incarnation
    )
    select r.uuid, r.offered_by, l.incarnation
    from lifted l join gangq.device_registry r on r.id = l.device_id
  loop
    perform gangq.log_event(t, 'unquarantine', incarnation => device.incarnation,
      reason => case when of_incarnation is null then 'its worker''s lease would be over'
        else 'its worker is proven gone' end, data => jsonb_build_object('device', device.uuid));
    perform gangq.wake(array[device.offered_by], 'claim');
  end loop;
  if given_back <> '{}' then
    perform gangq.wake_tick();
  end if;
end $$;
comment on function gangq.lift_withheld is
  'Internal. Gives back devices withheld after a trip: of an incarnation that is proven gone, or '
  '(null) those whose time is over.';

create view gangq.device_trips as
select d.uuid, v.job_id, v.at, e.code, v.incarnation
from (select gangq.now() as t offset 0) c
join gangq.evidence v on v.kind = 'trip' and v.at > c.t - interval '1 day' and v.at <= c.t
-- offset 0: each trip's event is read by its key, never by a scan of the day's events.
cross join lateral (
  select (x.data ->> 'code')::integer as code, x.data
  from gangq.events x
  where x.job_id = v.job_id and x.at = v.at and x.token = v.token and x.kind = 'trip' offset 0) e
cross join lateral jsonb_array_elements_text(coalesce(e.data -> 'blamed', '[]')) as d(uuid)
where e.code not in (75, 86) and not coalesce((e.data ->> 'application')::boolean, false)
  and coalesce((e.data ->> 'charged')::boolean, true)
  and not exists (
    select 1 from gangq.events p where p.job_id = v.job_id and p.kind = 'poison' offset 0);
comment on view gangq.device_trips is
  'Which jobs tripped on which device within the last day, as the quarantine of a device counts '
  'them: without budgets, memory, faults of the application, members that were not charged, and '
  'jobs called poison.';

create function gangq.quarantine_blamed(
  j gangq.live_jobs, blamed bigint[], faulty boolean, why text, message text, t timestamptz
) returns void language plpgsql as $$
#variable_conflict use_column
declare
  most integer := (select c.device_trips from gangq.settings c);
begin
  if not faulty then
    -- One query for all devices, limited to workers that had one of them: the day may have seen
    -- very many other trips.
    blamed := array(
      select r.id from gangq.device_registry r
      where r.id = any (blamed) and r.uuid in (
        select d.uuid from gangq.device_trips d
        where d.incarnation = any (array(
          select distinct c.incarnation from gangq.device_claimants c
          where c.device_id = any (blamed)))
        group by d.uuid
        having count(distinct d.job_id) >= most));
  end if;
  why := case when faulty then format('fault under job %s: %s', j.id, coalesce(message, why))
    else format('%s different jobs tripped on it within a day, the last one was job %s (%s)', most,
      j.id, why) end;
  blamed := gangq.withhold(j, why, t, blamed);
  perform gangq.log_job(t, 'quarantine', j, why, jsonb_build_object('device', r.uuid))
  from gangq.device_registry r where r.id = any (blamed) order by r.index, r.id;
end $$;
comment on function gangq.quarantine_blamed is
  'Internal, for trip. Quarantines the devices that a trip blames: all when they are faulty, '
  'otherwise those on which device_trips different jobs tripped within a day.';

-- Devices that a job avoids -----------------------------------------------------------------------

create function gangq.shape_avoiding(shape_id integer, device_ids bigint[]) returns integer
language sql as $$
  select gangq.shape_like(s.id, (
      select array_agg(distinct d.id order by d.id) from unnest(device_ids) as d(id)
      where d.id is not null), s.submitter, null)
  from gangq.shapes s where s.id = shape_avoiding.shape_id
$$;
comment on function gangq.shape_avoiding is
  'Internal. The shape like this one that avoids exactly these devices; none given: no device.';

create function gangq.change_shape(gang_ids bigint[], old_shape integer, new_shape integer)
returns void language sql as $$
  update gangq.live_gangs g set
    kind_id = gangq.kind_avoiding(g.kind_id, old_shape, new_shape),
    shape_id = case g.shape_id when old_shape then new_shape else g.shape_id end
  where g.id = any (gang_ids);
  update gangq.live_jobs j set shape_id = new_shape
  where j.gang_id = any (gang_ids) and j.shape_id = old_shape;
$$;
comment on function gangq.change_shape is
  'Internal. The members of these gangs that have the one shape get the other.';

create function gangq.placeable_without(shape_id integer, members bigint, device_ids bigint[])
returns boolean language sql stable as $$
  select coalesce(sum(least(d.enough / s.gpus, i.slots,
    case when s.memory_mb > 0 then i.memory_mb / s.memory_mb else i.slots end,
    case when s.cpus > 0 then floor(i.cpus / s.cpus) else i.slots end)), 0) >= members
  from gangq.shapes s
  join gangq.incarnations i on i.state = 'live' and i.ended_at is null and i.quarantined is null
    and gangq.serves(i, s)
  cross join lateral (
    select count(*) as enough from gangq.device_registry r
    where r.offered_by = i.id and r.vram_mb >= s.vram_mb and r.id <> all (device_ids)
      and not exists (
        select 1 from gangq.device_holds h
        where h.device_id = r.id and h.kind = 'quarantine' and h.until is null)) d
  where s.id = placeable_without.shape_id and s.gpus > 0
$$;
comment on function gangq.placeable_without is
  'Internal. Whether the workers that take work would have room for so many members when idle, on '
  'devices besides these.';

create function gangq.shape_after_trip(j gangq.live_jobs, blamed bigint[], faulty boolean)
returns integer language sql as $$
  select case when faulty or gangq.placeable_without(s.id, coalesce((
      select sum(r.min_members)
      from gangq.live_gangs g
      join gangq.kind_roles r on r.kind_id = g.kind_id and r.shape_id = s.id
      where g.id = j.gang_id), 1)::bigint, s.avoid || blamed)
    then gangq.shape_avoiding(s.id, s.avoid || blamed) else s.id end
  from gangq.shapes s
  where s.id = j.shape_id
$$;
comment on function gangq.shape_after_trip is
  'Internal, for trip. A job never again uses a faulty device, and avoids one that was only idle '
  'as long as another device could take it.';

-- A job avoids a device that was only idle (78) as long as another device could take the job. That
-- can end: the worker of the other device retires, or it is quarantined. A device quarantined for
-- good stays avoided until unquarantine. Pending jobs and blocked gangs are found by hops along
-- their indexes, so a tick pays for the kinds that wait. Each round judges up to 20 kinds at
-- random, so that none is always left out.
create function gangq.lift_avoided(most integer default 200) returns integer
language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  w record;
  n integer := 0;
begin
  for w in
    select s.id as shape_id, k.kind_id, k.members, s.avoid, a.kept
    from (
      select p.shape_id, null::integer as kind_id, 1::bigint as members from gangq.pending_shapes p
      union all
      select r.shape_id, b.kind_id, sum(r.min_members)
      from gangq.blocked_kinds b join gangq.kind_roles r on r.kind_id = b.kind_id
      group by r.shape_id, b.kind_id) k
    join gangq.shapes s on s.id = k.shape_id and s.avoid is not null
    cross join lateral (
      select array(
        select h.device_id from gangq.device_holds h
        where h.device_id = any (s.avoid) and h.kind = 'quarantine' and h.until is null
        order by h.device_id) as kept) a
    where exists (
      select 1 from gangq.device_registry r join gangq.incarnations i on i.id = r.offered_by
      where r.id = any (s.avoid) and r.id <> all (a.kept) and gangq.serves(i, s))
    order by random() limit 20
  loop
    exit when n >= most;
    -- When it could not be placed either way, as while all workers restart, nothing is gained.
    continue when gangq.placeable_without(w.shape_id, w.members, w.avoid)
      or not gangq.placeable_without(w.shape_id, w.members, w.kept);
    n := n + gangq.unavoid(w.shape_id, w.kind_id, w.kept, most - n);
  end loop;
  return n;
end $$;
comment on function gangq.lift_avoided is
  'Internal, a step of the tick. Pending jobs and blocked gangs may use devices again that they '
  'avoid, if no other device could take them by now. Returns how many.';

create function gangq.unavoid(shape_id integer, kind_id integer, kept bigint[], most integer)
returns integer language plpgsql as $$
#variable_conflict use_column
declare
  opened integer := gangq.shape_avoiding(unavoid.shape_id, kept);
  given_back jsonb := jsonb_build_object('devices', gangq.uuids_of(array(
    select d from gangq.shapes s cross join unnest(s.avoid) as d
    where s.id = unavoid.shape_id and d <> all (kept))));
  ids bigint[];
begin
  if unavoid.kind_id is null then
    ids := array(
      select z.id from gangq.live_jobs z where z.shape_id = unavoid.shape_id and z.state = 'pending'
      order by z.order_key limit most for update skip locked);
    update gangq.live_jobs j set shape_id = opened where j.id = any (ids);
    perform gangq.wake_lane(opened, cardinality(ids), 'sleepers');
  else
    ids := array(
      select w.id
      from (
        select g.id from gangq.live_gangs g
        where g.state = 'blocked' and g.kind_id = unavoid.kind_id order by g.order_key limit most) w
      where gangq.try_lock_gang(w.id));
    -- Read again under the lock.
    ids := array(
      select g.id from gangq.live_gangs g
      where g.id = any (ids) and g.state = 'blocked' and g.kind_id = unavoid.kind_id);
    perform gangq.change_shape(ids, unavoid.shape_id, opened);
  end if;
  perform gangq.log_event(gangq.now(), 'unavoid',
    gang_id => case when unavoid.kind_id is not null then i.id end,
    job_id => case when unavoid.kind_id is null then i.id end,
    reason => 'no other device could take it any more', data => given_back)
  from unnest(ids) as i(id);
  return cardinality(ids);
end $$;
comment on function gangq.unavoid is
  'Internal, for lift_avoided. Blocked gangs of this kind (null: pending single jobs) get the '
  'shape that avoids only the devices kept. Returns how many.';

-- Trips -------------------------------------------------------------------------------------------

create function gangq.check_trip(code integer, class text, error jsonb, exit_in_s real) returns void
language plpgsql immutable as $$
begin
  if gangq.class_of(code) is null or code in (77, 88) then
    perform gangq.refuse('GQ001',
      format('code is %s; no watchdog trips with that', coalesce(code::text, 'null')),
      '75 budget, 76 stall, 78 health, 79 unstopped, 80 frozen, 85 fault, 86 memory, '
      '87 unkillable.');
  elsif class not in ('budget', 'stall', 'health', 'fault', 'gang', 'unstopped', 'frozen',
    'memory', 'unkillable') then
    perform gangq.refuse('GQ001', format('class is %L', class),
      'Leave it null for that of the code; notify_only knows budget, stall, health, fault and '
      'gang.');
  elsif not (exit_in_s >= 0 and exit_in_s <= 600) then
    perform gangq.refuse('GQ001', format('exit_in_s is %s', exit_in_s),
      'Seconds within which this process is gone whatever happens, 600 at most; '
      'null: the work is dead already and the worker lives on.');
  elsif jsonb_typeof(error) is distinct from 'object' then
    perform gangq.refuse('GQ001', 'a trip needs its error as a JSON object',
      'For example {"type": "Stalled", "message": "no step for 130 s"}.');
  end if;
end $$;
comment on function gangq.check_trip is 'Internal. Raises GQ001 for arguments that no trip has.';

create function gangq.trip(
  incarnation bigint, job_id bigint, token bigint, code integer, error jsonb,
  evidence jsonb default '{}', devices text[] default '{}', exit_in_s real default null,
  class text default null
) returns text language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz;
  class_of text := coalesce(trip.class, gangq.class_of(trip.code));
  why text := coalesce(trip.error ->> 'type', gangq.class_of(trip.code));
  data jsonb;
  j gangq.live_jobs;
  blamed bigint[];
  ended boolean;
begin
  perform gangq.check_trip(trip.code, class_of, trip.error, trip.exit_in_s);
  trip.error := gangq.cut(trip.error, 262144);
  -- host: after a worker is gone, the restarter of its host reports what it left there.
  j := gangq.lock_job(trip.job_id, host => true);
  -- Read under the locks. The process is gone exit_in_s after the call was sent, so counting from
  -- here is safe.
  t := gangq.now();
  if j.id is null or j.token is distinct from trip.token or j.state not in ('running', 'preempting')
    then
    -- Only a repeated trip is repeated. For a process whose job ended otherwise a moment ago this
    -- is a false alarm.
    if exists (
      select 1 from gangq.events e
      where e.job_id = trip.job_id and e.kind = 'trip' and e.token = trip.token) then
      return 'repeated';
    end if;
    perform gangq.refuse_stale(trip.job_id, trip.token);
  elsif j.incarnation is distinct from trip.incarnation then
    perform gangq.refuse('GQ001',
      format('job %s runs on incarnation %s, not %s', j.id, j.incarnation,
        coalesce(trip.incarnation::text, 'null')),
      'A worker trips its own claims only: pass the incarnation that register_worker returned.');
  end if;
  blamed := (
    select coalesce(array_agg(r.id) filter (where r.uuid = any (trip.devices)), array_agg(r.id),
      '{}')
    from gangq.device_holds h join gangq.device_registry r on r.id = h.device_id
    where h.job_id = j.id);
  data := jsonb_build_object('code', trip.code, 'class', class_of, 'message',
    trip.error ->> 'message', 'trips', j.trips, 'exit_in_s', trip.exit_in_s,
    'application', coalesce(trip.evidence ->> 'application' = 'true', false),
    'blamed', gangq.uuids_of(blamed));
  -- Work that is dead, or was told to stop, cannot go on: notify and held are no answers.
  ended := trip.exit_in_s is null or j.state = 'preempting';
  if gangq.only_notifies(j.shape_id, class_of) then
    if not ended then
      perform gangq.log_with_evidence(t, 'notify', j, why, data || '{"outcome": "notify"}',
        trip.evidence);
      return 'notify';
    end if;
    -- It is ended and charged, but a class that only notifies blames no device.
    data := data || '{"notify_only": true, "blamed": []}';
    blamed := '{}';
  -- Wall clock, faults and dead interpreters are facts. A stall and an idle device are conclusions,
  -- and conclusions about a whole fleet can be wrong at once.
  elsif trip.code in (76, 78) and class_of in ('stall', 'health') and not ended then
    -- The test of the brake and its record are one critical section. Without the lock a whole fleet
    -- could trip before the first trip is counted.
    begin
      perform set_config('lock_timeout', '1s', true);
      perform from gangq.lock_rows l where l.name = 'brake' for update;
    exception when lock_not_available then
      null;  -- another trip is left open: go on without the lock, because time is short
    end;
    perform set_config('lock_timeout', '2s', true);
    t := gangq.now();
    if gangq.braking(j, class_of, trip.evidence, t) then
      perform gangq.log_with_evidence(t, 'held', j, why, data || '{"outcome": "held"}',
        trip.evidence);
      return 'held';
    end if;
  end if;
  return gangq.carry_out_trip(j, why, trip.error, trip.evidence, data, blamed, t);
end $$;
comment on function gangq.trip is
  'A watchdog stops a job, in one statement. The event and its evidence are written. A single job '
  'goes to the front of its priority with a trip counted and its attempt given back, or fails when '
  'its trips are spent; a member is lost with cause trip (lose_members). code: the exit code. '
  'exit_in_s null: the work is proven dead (a command''s process tree) and the worker lives on. '
  'Otherwise the whole worker process is gone within so many seconds (a kernel timer was armed '
  'before this call): its incarnation ends now, its other jobs go back uncharged, the job is due '
  'again when the process is gone, and its devices are withheld until that is proven (report_dead) '
  'or its lease would have ended. devices: the devices to blame, of those that the job holds; 85 '
  'quarantines them, 78 and 85 keep the job away from them. evidence: what was seen; '
  '{"application": true} when the driver lays a fault to the application. class: as notify_only '
  'knows it, by default the class of the code. Returns pending, scheduled, failed, preempted, '
  'cancelled (it had been cancelled), notify or held (nothing was stopped: go on), repeated. Work '
  'that is dead (exit_in_s null) or was told to stop cannot go on and never gets notify or held: '
  'ask suspect before killing it. When its class only notifies it is ended and charged all the '
  'same, the event says so, and no device is blamed. Raises GQ001, GQ002, GQ003, 42501.';

-- Why each step stands before the next one:
-- 1. Decide who is charged, what becomes of the job and which devices it avoids. The worker still
--    counts as live, because its next start offers its other devices again.
-- 2. Write the trip down. The event names the devices that the job holds until step 3. Poison and
--    the quarantine count this event, and a job that is poison counts against no device.
-- 3. Quarantine the devices to blame. Step 4 withholds all others, and only for a while.
-- 4. End the worker, which sets exits_at; then withhold the devices of the job until then. Step 5
--    would give them back, and complete_drain reads exits_at: no member is placed again while the
--    old process may run.
-- 5. Free the job. Its gang gets the new shape before, because a gang that ends here takes its
--    shape into history, where retry finds it.
-- 6. Free the other jobs of the worker. Before step 5 the tripped job would be freed as one of
--    them, uncharged.
create function gangq.carry_out_trip(
  j gangq.live_jobs, why text, error jsonb, evidence jsonb, data jsonb, blamed bigint[],
  t timestamptz
) returns text language plpgsql as $$
#variable_conflict use_column
declare
  code integer := data ->> 'code';
  faulty boolean := code = 85 and not (data ->> 'application')::boolean;
  me gangq.incarnations;  -- null: the worker lives on
  gone_at timestamptz;
  culprit bigint := j.id;  -- null: not known
  sentence text;
  charge text := 'nothing';
  outcome text;
  new_shape integer := j.shape_id;
begin
  -- 1.
  if data ->> 'exit_in_s' is not null then
    select i.* into me from gangq.incarnations i where i.id = j.incarnation for no key update;
    -- An incarnation that has ended already: another trip says when its process is gone (exits_at),
    -- or nothing is to be waited for.
    gone_at := case
      when me.ended_at is null then t + make_interval(secs => (data ->> 'exit_in_s')::real)
      when me.exits_at > t then me.exits_at end;
  end if;
  if j.gang_id is not null and j.state = 'running' and data ->> 'class' in ('stall', 'health')
    and gangq.all_stand_still(j) then
    select w.job_id, w.sentence into culprit, sentence
    from gangq.who_stopped(j.gang_id, j.id, evidence ->> 'place') w;
    data := data || jsonb_build_object('gang', sentence);
  end if;
  if j.state = 'running' and culprit is not distinct from j.id then
    charge := (gangq.cause_named('trip')).member;
  end if;
  outcome := case
    when j.gang_id is not null then 'preempted'
    when j.stop_reason = 'cancel' then 'cancelled'
    when gangq.spends_job(j, charge) then 'failed'
    when gone_at is not null then 'scheduled'
    else 'pending' end;
  if code in (78, 85) and blamed <> '{}' then
    new_shape := gangq.shape_after_trip(j, blamed, faulty);
  end if;
  -- 2.
  perform gangq.log_with_evidence(t, 'trip', j, why, data || jsonb_build_object('outcome', outcome,
    'charged', culprit is not distinct from j.id, 'trips', j.trips + (charge = 'trip')::integer),
    evidence);
  perform gangq.note_poison(j, t);
  -- 3.
  perform gangq.quarantine_blamed(j, blamed, faulty, why, error ->> 'message', t);
  -- 4.
  if me.id is not null then
    perform gangq.end_tripped(me, j, code, gone_at, t);
    perform gangq.withhold_doubtful(j, t);
  end if;
  -- 5.
  error := error || jsonb_build_object('code', code);
  if j.gang_id is not null and new_shape <> j.shape_id then
    perform gangq.change_shape(array[j.gang_id], j.shape_id, new_shape);
  end if;
  if j.state = 'preempting' then
    outcome := gangq.stopped(j, error, t, gone_at => gone_at);
  elsif j.gang_id is not null then
    perform gangq.lose_members(j.gang_id, array[j.id], 'trip', error, coalesce(sentence, why), t,
      charged => array_remove(array[culprit], null));
  else
    j.shape_id := new_shape;
    j.order_key := gangq.order_key(j.priority,
      gangq.front_pos((select b.base from gangq.id_base() b)));
    outcome := gangq.end_attempt(j, 'trip', error, why, t, gone_at);
  end if;
  -- 6.
  if me.id is not null then
    perform gangq.free_orphans(array[me.id]);
  end if;
  -- The next tick has to know when the job becomes due.
  perform gangq.wake_tick(true);
  return outcome;
end $$;
comment on function gangq.carry_out_trip is
  'Internal, for trip: it is not held. data: of its event. Returns as trip.';

create function gangq.end_tripped(
  me gangq.incarnations, j gangq.live_jobs, code integer, gone_at timestamptz, t timestamptz
) returns void language plpgsql as $$
begin
  if me.ended_at is not null then
    return;
  end if;
  perform gangq.end_incarnation(me.id, 'dead', t);
  update gangq.incarnations i
    set exits_at = gone_at, exit_code = end_tripped.code, flagged_at = null
  where i.id = me.id
  returning i.* into me;
  -- Of prefetched jobs only the oldest can have begun.
  perform gangq.free_orphaned_job(x.id, me, 2, t)
  from (
    select y.id from gangq.live_jobs y where y.incarnation = me.id and y.light
    order by y.token offset 1) x
  where me.prefetch > 1 and x.id <> j.id;
end $$;
comment on function gangq.end_tripped is
  'Internal, for trip. The job''s incarnation, whose process exits, ends; prefetched jobs are '
  'free at once.';

create function gangq.note_poison(j gangq.live_jobs, t timestamptz) returns void
language plpgsql as $$
declare
  hosts jsonb := (
    select jsonb_agg(distinct e.data ->> 'host') from gangq.events e
    where e.job_id = j.id and e.kind = 'trip' and e.data ->> 'host' is not null
      and coalesce((e.data ->> 'charged')::boolean, true));
begin
  if jsonb_array_length(hosts) > 1
    and not exists (select 1 from gangq.events e where e.job_id = j.id and e.kind = 'poison')
  then
    perform gangq.log_job(t, 'poison', j,
      'it tripped on two hosts: the job is at fault, not the devices',
      jsonb_build_object('hosts', hosts));
  end if;
end $$;
comment on function gangq.note_poison is
  'Internal, for trip. A job that tripped on two hosts is at fault itself: one event, after which '
  'device_trips does not count it.';

-- Incarnations that are not proven gone -----------------------------------------------------------

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
comment on function gangq.unproven is
  'Incarnations of this worker that ended by a trip and are not yet proven gone: its next start '
  'looks for each and, when every process of it is gone, says so with report_dead, which gives '
  'their devices back. Those that another login registered are left out, but for gangq_host and '
  'gangq_admin.';

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
comment on function gangq.predecessor is
  'The latest incarnation of this name, ended or not, with the devices it saw that a driver '
  'vouches for. A worker that starts compares them with what it sees itself, and does not start '
  'beside a process that nothing could kill. identity is empty where another login registered it.';

create function gangq.report_stuck(worker text, incarnation bigint, evidence jsonb) returns integer
language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz;
  i gangq.incarnations;
  why text;
  lease_ends timestamptz;
  stuck bigint[];
  elsewhere jsonb := '[]';
begin
  if coalesce(jsonb_typeof(report_stuck.evidence), 'null') <> 'object'
    or report_stuck.evidence = '{}' then
    perform gangq.refuse('GQ001',
      format('worker %L is reported stuck without evidence', report_stuck.worker),
      'Say which process survived SIGKILL, as a JSON object: '
      '{"pid": 4711, "state": "D", "wchan": "..."}.');
  end if;
  i := gangq.lock_stuck(report_stuck.worker, report_stuck.incarnation);
  t := gangq.now();
  why := format('process %s cannot be killed: reboot host %s',
    coalesce(report_stuck.evidence ->> 'pid', i.pid::text, '?'), i.host);
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
  values (t, 'stuck', i.id, gangq.cut(report_stuck.evidence, 4194304));
  raise warning 'UNKILLABLE worker % on host %, incarnation %: % (its devices and its name are '
    'quarantined until gangq.unquarantine%)',
    i.name, i.host, i.id, why, (
      select coalesce('; others hold ' || string_agg(format('device %s by now (job %s of worker '
        '%s): cancel it, then select gangq.quarantine(%L)', e ->> 'device', e ->> 'job_id',
        e ->> 'worker', e ->> 'device'), '; '), '')
      from jsonb_array_elements(elsewhere) e);
  return cardinality(stuck);
end $$;
comment on function gangq.report_stuck is
  'A process of this incarnation survived SIGKILL: only a reboot of its host helps. Nothing is '
  'freed early. The worker is quarantined by name. Every device that it holds is quarantined from '
  'the end of its lease until an operator lifts that; said after the lease, every device that it '
  'had, except those that other jobs hold by now: the event and the server''s log name them. '
  'Returns how many devices. Repeats are harmless. For the login that registered the worker, '
  'gangq_host and gangq_admin. Raises GQ001, GQ002, 42501; 55P03 while a device is changing hands: '
  'try again.';

create function gangq.lock_stuck(worker text, incarnation bigint) returns gangq.incarnations
language plpgsql as $$
declare
  i gangq.incarnations;
begin
  -- Gangs that wait for this worker to be gone, now or once drained, come before its row. A gang
  -- that another transaction holds open must not block this report.
  begin
    perform set_config('lock_timeout', '500ms', true);
    perform 1 from gangq.live_gangs g
    where (g.state = 'draining' or (g.state = 'blocked' or g.missing_since is not null)
      and g.not_before is not null)
      and exists (
        select 1 from gangq.live_jobs j
        where j.gang_id = g.id and j.ran_on = lock_stuck.incarnation)
    order by g.id for update;
  exception when lock_not_available then
    null;
  end;
  perform set_config('lock_timeout', '2s', true);
  perform gangq.lock_name(lock_stuck.worker);  -- against a registration of it, as quarantine does
  select x.* into i from gangq.incarnations x
  where x.id = lock_stuck.incarnation and x.name = lock_stuck.worker for no key update;
  if not found then
    perform gangq.refuse('GQ002',
      format('worker %L has no incarnation %s', lock_stuck.worker,
        coalesce(lock_stuck.incarnation::text, 'null')),
      'Take both from select name, incarnation from gangq.workers.');
  end if;
  perform gangq.check_login(i.id, host => true);
  return i;
end $$;
comment on function gangq.lock_stuck is
  'Internal, for report_stuck. Locks the gangs that wait for this worker, its name and its row, '
  'which it returns. Raises GQ002, 42501.';

-- A transaction that takes a device locks the worker that offers it first; one that registers with
-- a device locks the device's row.
create function gangq.quarantine_all_of(i gangq.incarnations, why text, t timestamptz)
returns bigint[] language plpgsql as $$
#variable_conflict use_column
declare
  had bigint[] := array(
    select c.device_id from gangq.device_claimants c where c.incarnation = i.id);
  offering bigint[] := array(
    select distinct r.offered_by from gangq.device_registry r
    where r.id = any (had) and r.offered_by is not null);
begin
  perform 1 from gangq.incarnations x where x.id = any (offering) order by x.id for no key update;
  perform 1 from gangq.device_registry r
  where r.id = any (had) and r.offered_by is null order by r.uuid for no key update;
  if exists (
    select 1 from gangq.device_registry r
    where r.id = any (had) and r.offered_by is not null and r.offered_by <> all (offering))
  then
    raise exception using errcode = 'lock_not_available',
      message = format('a device of worker %s is changing hands this moment', i.name),
      hint = 'Nothing was changed: try again.';
  end if;
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
comment on function gangq.quarantine_all_of is
  'Internal, for report_stuck. Quarantines every device that an incarnation had and no job or '
  'other quarantine holds. Returns all that are quarantined for it. Raises 55P03.';

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
comment on function gangq.held_elsewhere is
  'Internal, for report_stuck. The devices that an incarnation had and jobs of others hold now.';

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
  where j.id = any (array(
    select z.id from gangq.live_jobs z
    where z.state = 'scheduled' and z.due_at = i.exits_at and z.ran_on = i.id
    order by z.id for update skip locked));
  update gangq.incarnations x set exits_at = lease_ends where x.id = i.id;
$$;
comment on function gangq.postpone_exit is
  'Internal, for report_stuck. What waits for a process that should be gone at exits_at waits for '
  'the end of its lease.';
