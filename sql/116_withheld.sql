-- Devices that are kept from jobs: withheld after a trip, or used by a process that cannot be
-- killed. Locks: lift_withheld, a step of the tick, device_holds, with skip locked.
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

-- Internal. Devices of this job (all, or these) are quarantined from here on: the head of this file
-- says with which incarnation and until. Returns which; null: it held none.
create function gangq.withhold(
  j gangq.live_jobs, reason text, t timestamptz, device_ids bigint[] default null,
  incarnation bigint default null, until timestamptz default null
) returns bigint[] language plpgsql as $$
declare
  withheld bigint[];
begin
  with moved as (
    update gangq.device_holds h set kind = 'quarantine', job_id = null, since = withhold.t,
      reason = withhold.reason, incarnation = withhold.incarnation,
      until = withhold.until
    where h.job_id = j.id and h.device_id = any (coalesce(withhold.device_ids, array[h.device_id]))
    returning h.device_id
  )
  select array_agg(m.device_id) into withheld from moved m;
  return withheld;
end $$;

-- Internal. Before a job of an ended incarnation is freed: withholds its devices where that may
-- still run.
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

-- Internal. Gives back devices withheld after a trip: of an incarnation that is proven gone, or
-- (null) those whose time is over.
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
  if given_back = '{}' then
    return;
  end if;
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
  perform gangq.wake_tick();
end $$;

-- Which jobs tripped on which device within the last day, as the quarantine of a device counts
-- them: without budgets, memory, faults of the application, members that were not charged, and jobs
-- called poison.
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
where e.code in (select k.code from gangq.trip_classes k where k.devices <> 'nothing')
  and e.data -> 'application' is distinct from 'true'
  and e.data -> 'charged' is distinct from 'false'
  and not exists (
    select 1 from gangq.events p where p.job_id = v.job_id and p.kind = 'poison' offset 0);

-- Internal, for trip. Quarantines the devices that a trip blames: all when they are faulty,
-- otherwise those on which device_trips different jobs tripped within a day.
create function gangq.quarantine_blamed(
  j gangq.live_jobs, blamed bigint[], faulty boolean, why text, message text, t timestamptz
) returns void language plpgsql as $$
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
