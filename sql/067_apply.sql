-- How apply (069) starts and plans: apply_start places a gang, apply_places opens places for single
-- jobs, write_plan notes a planned start. Each checks its decision again, under locks: a wrong
-- decision wastes capacity and breaks nothing.
--
-- A decision is for an ask: g7 is gang 7; k7/5 is the single jobs of shape 7 with priority 5; j7 is
-- a job that is moved. What it stops are units: g7 is gang 7; j7 is a single job, or a surplus
-- member of an elastic gang.
--
-- Order: asker_of reads the gang or jobs of the ask, seats_of the seats of the decision; then one
-- of the three above runs. reserve_gang (062), no_room and add_place (063) do the work.
-- Locks: lock_decided (069) has locked gangs, jobs, workers and queues. Here only places.

-- Who asks ----------------------------------------------------------------------------------------

-- Internal. What a decision is for: a gang; or, where gang_id is null, the single jobs of one shape
-- and priority, of which job_id is the first that waits. kind_id: the kind of the gang, or the
-- shape, negative.
create type gangq.asker as (
  ask text,
  gang_id bigint,
  job_id bigint,
  queue text,
  submitter text,
  priority integer,
  kind_id integer
);

-- Internal. Reads the gang of an ask, or the first waiting job; null if nothing of it waits any
-- more.
create function gangq.asker_of(ask text) returns gangq.asker language plpgsql stable as $$
declare
  a gangq.asker;
begin
  if left(ask, 1) = 'g' then
    select asker_of.ask, g.id, null, k.queue, g.submitter, g.priority, g.kind_id into a
    from gangq.live_gangs g join gangq.gang_kinds k on k.id = g.kind_id
    where g.id = substr(asker_of.ask, 2)::bigint;
  else
    select asker_of.ask, null, j.id, s.queue, coalesce(s.submitter, j.submitter), j.priority, -s.id
    into a
    from gangq.shapes s
    cross join (select split_part(asker_of.ask, '/', 2)::integer as priority) p
    join gangq.live_jobs j on j.shape_id = s.id and j.state = 'pending'
      and j.order_key >= gangq.order_key(p.priority, 0)
      and j.order_key < gangq.order_key(p.priority - 1, 0)
    where s.id = substr(split_part(asker_of.ask, '/', 1), 2)::integer
    order by j.order_key limit 1;
  end if;
  return a;
end $$;

-- Internal. The seats of a decision, each with the role and the shape of its job.
create function gangq.seats_of(a gangq.asker, seats jsonb)
returns table (
  n bigint, role integer, incarnation bigint, devices bigint[], shape_id integer, seat jsonb
) language sql stable as $$
  select x.n, y.role, (x.value ->> 'worker')::bigint, array(
      select d.value::bigint
      from jsonb_array_elements_text(coalesce(x.value -> 'devices', '[]'))
        with ordinality as d(value, n)
      order by d.n),
    coalesce(r.shape_id, -(a).kind_id), x.value
  from jsonb_array_elements(seats) with ordinality as x(value, n)
  cross join lateral (select coalesce((x.value ->> 'role')::integer, 0) + 1 as role) y
  left join gangq.kind_roles r on r.kind_id = (a).kind_id and r.ordinal = y.role
$$;

-- Internal. An ask in words: g7 is gang g7, j7 job 7, k7/5 a single job of priority 5.
create function gangq.named(ask text) returns text language sql immutable
return case left(ask, 1)
  when 'g' then 'gang ' || ask
  when 'j' then 'job ' || substr(ask, 2)
  else 'a single job of priority ' || split_part(ask, '/', 2) end;

-- Starting a gang ---------------------------------------------------------------------------------

-- Internal. Which rule about hosts and domains these workers would break; null: none. Two rules:
-- the members of a gang, and of each role, share one domain of the level they require, also with
-- members that already run; and no gang of the same `apart` key is on one of the hosts.
create function gangq.misplaced(g gangq.live_gangs, job_ids bigint[], incarnations bigint[])
returns text language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  -- The second rule begins with what runs on these hosts: thousands of the same key may wait, and
  -- workers that have ended are kept for weeks; every worker that holds jobs has a lease. Each step
  -- is a look-up, and offset 0 keeps it one in a plan from when there was one gang or none.
  return (
    with placed as materialized (
      select j.role, i.host, gangq.domains(i, c.topology) as domains
      from (
        select z.id, z.role, z.incarnation
        from gangq.live_jobs z where z.gang_id = (g).id offset 0) j
      left join unnest(job_ids, incarnations) as s(id, incarnation) on s.id = j.id
      join gangq.incarnations i on i.id = coalesce(s.incarnation, j.incarnation)
      cross join gangq.settings c
    ),
    required as (
      select k.require as level, null::smallint as role
      from gangq.gang_kinds k where k.id = (g).kind_id
      union all
      select r.require, r.ordinal from gangq.kind_roles r where r.kind_id = (g).kind_id
    )
    select coalesce((
      select format('its members would not share one %s', r.level)
      from required r
      cross join gangq.settings c
      cross join lateral (
        select p.domains ->> (array_position(c.topology, r.level) - 1) as domain
        from placed p where r.role is null or p.role = r.role) d
      where r.level is not null
      group by r.level, r.role
      having count(distinct d.domain) > 1 or bool_or(d.domain is null)
      limit 1), (
      select format('gang g%s is on %s, and both are %s', j.gang_id, i.host, mine.apart)
      from gangq.gang_kinds mine
      cross join lateral (
        select x.id, x.host
        from gangq.leases l join gangq.incarnations x on x.id = l.incarnation
        where mine.apart is not null and x.host in (select p.host from placed p) offset 0) i
      cross join lateral (
        select z.gang_id from gangq.live_jobs z
        where z.incarnation = i.id and z.gang_id <> (g).id offset 0) j
      where mine.id = (g).kind_id and mine.apart = (
        select k.apart from gangq.gang_kinds k
        where k.id = (select y.kind_id from gangq.live_gangs y where y.id = j.gang_id))
      order by j.gang_id limit 1)));
end $$;

-- Internal. Places a locked gang, or its missing members, on these seats. Returns done, or why not.
-- The seats of a role go to its waiting members, by rank. In a gang that runs, only missing members
-- wait.
create function gangq.apply_start(
  g gangq.live_gangs, a gangq.asker, seats jsonb, digest text, t timestamptz
) returns text language plpgsql as $$
declare
  jobs bigint[];
  incarnations bigint[];
  devices bigint[];
  why text;
begin
  if g.not_before > t then
    return 'stale';
  end if;
  with members as materialized (
    select j.id, j.rank, s.incarnation, s.devices
    from (
      select x.*, row_number() over (partition by x.role order by x.n) as nth
      from gangq.seats_of(a, seats) x) s
    join (
      select y.id, y.rank, y.role,
        row_number() over (partition by y.role order by y.rank) as nth
      from gangq.live_jobs y
      where y.gang_id = g.id and y.state = 'blocked'
        and (g.state = 'blocked' or gangq.in_epoch(y, g))) j on j.role = s.role and j.nth = s.nth
  )
  select array(select m.id from members m order by m.rank),
    array(select m.incarnation from members m order by m.rank), array(
      select v.id
      from members m cross join lateral unnest(m.devices) with ordinality as v(id, n)
      order by m.rank, v.n)
  into jobs, incarnations, devices;
  if cardinality(jobs) <> jsonb_array_length(seats) then
    return 'stale';
  end if;
  why := gangq.misplaced(g, jobs, incarnations);
  return case
    when why is not null then why
    when gangq.reserve_gang(g.id, incarnations, jobs, devices, digest) then 'done'
    else 'busy' end;
end $$;

-- Plans -------------------------------------------------------------------------------------------

-- Internal. Notes where an ask is to start, and when. place: its place among the planned starts;
-- null: others stop for it, and its seats are kept until they have gone. starts_at is written only
-- when it changes by more than a second. Seats are kept as long as the units that were told to stop
-- may take: their grace, its confirmation, a lease. Seats on one worker that need no device are one
-- element of plans.seats; slots says how many.
create function gangq.write_plan(
  a gangq.asker, seats jsonb, t timestamptz, place integer default null,
  starts_at timestamptz default null
) returns void language plpgsql as $$
begin
  insert into gangq.plans as p (ask, kept, place, starts_at, pass, seats)
  select (a).ask, write_plan.place is null, write_plan.place, coalesce(write_plan.starts_at,
      t + make_interval(secs => c.grace_s + c.ack_timeout_s + c.lease_s)), l.runs, (
    select coalesce(jsonb_agg(jsonb_build_object('worker', x.incarnation, 'devices', x.devices,
      'slots', x.slots, 'memory_mb', x.slots * s.memory_mb,
      'millicpus', (x.slots * s.cpus * 1000)::bigint) order by x.n), '[]')
    from (
      select y.incarnation, y.devices, y.shape_id, count(*) as slots, min(y.n) as n
      from gangq.seats_of(a, write_plan.seats) y
      group by y.incarnation, y.devices, y.shape_id) x
    join gangq.shapes s on s.id = x.shape_id)
  from gangq.lock_rows l cross join gangq.settings c
  where l.name = 'pass'
  on conflict (ask) do update set kept = excluded.kept, place = excluded.place,
    pass = excluded.pass, seats = excluded.seats,
    starts_at = case when abs(extract(epoch from p.starts_at - excluded.starts_at)) > 1
      then excluded.starts_at else p.starts_at end;
end $$;

-- Places ------------------------------------------------------------------------------------------

-- Internal. Renews the places that the decisions name in this list: seats or refills. Two kinds of
-- places stay open: vacant ones that are seats of a decision, and those in which a job runs that
-- another of its kind may follow (refills). Only vacant ones have ends_by, the moment by which the
-- job that fills them must end. A place that needs no change yet is not written.
create function gangq.renew_places(decisions jsonb, list text, t timestamptz) returns void
language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  vacant constant boolean := list = 'seats';
begin
  with kept as materialized (
    select (r.value ->> 'place')::bigint as place, x.value ->> 'ask' as ask,
      coalesce((r.value ->> 'min_priority')::integer, -1000) as min_priority,
      coalesce((r.value ->> 'refills')::boolean, not vacant) as refills,
      to_timestamp((r.value ->> 'ends_by')::float8) as ends_by
    from jsonb_array_elements(decisions) as x(value)
    cross join lateral jsonb_array_elements(x.value -> list) as r(value)
  )
  update gangq.places p set until = gangq.place_until(t), refills = k.refills,
    min_priority = k.min_priority, ends_by = case when vacant then k.ends_by else p.ends_by end
  from kept k cross join gangq.settings c
  where p.id = k.place and p.id = any (array(
      select z.id
      from kept y join gangq.places z on z.id = y.place and y.ask like 'k' || z.shape_id || '/%'
      where not vacant or z.job_id is null
      order by z.id for update of z skip locked))
    and (p.until < t + make_interval(secs => c.tick_s * 1.5)
      or (p.refills, p.min_priority) <> (k.refills, k.min_priority)
      or vacant and p.ends_by is distinct from k.ends_by);
end $$;

-- Internal. Opens a place for each seat of a decision about single jobs; renews those that are open
-- already. Returns done, or why one of them could not be opened. Each seat by itself: what is taken
-- meanwhile is left out, and the rest is opened.
create function gangq.apply_places(a gangq.asker, d jsonb, t timestamptz) returns text
language plpgsql as $$
declare
  seat record;
  me gangq.incarnations;
  s gangq.shapes;
  why text;
  left_out text;
begin
  select z.* into s from gangq.shapes z where z.id = -(a).kind_id;
  perform gangq.renew_places(jsonb_build_array(d), 'seats', t);
  for seat in
    select x.incarnation, x.devices, (x.seat ->> 'place')::bigint as place,
      to_timestamp((x.seat ->> 'ends_by')::float8) as ends_by,
      coalesce((x.seat ->> 'min_priority')::integer, -1000) as min_priority,
      coalesce((x.seat ->> 'refills')::boolean, false) as refills
    from gangq.seats_of(a, d -> 'seats') x
    order by x.n
  loop
    perform gangq.check_moment('ends_by', seat.ends_by);
    continue when seat.place is not null;
    -- lock_decided has locked it, unless another session held it for too long.
    select i.* into me
    from gangq.incarnations i where i.id = seat.incarnation for no key update skip locked;
    why := case when me.id is null then 'busy' else gangq.no_room(me, s, seat.devices, t) end;
    if why is null then
      perform gangq.add_place(
        me, s, seat.devices, seat.min_priority, seat.ends_by, seat.refills, t);
      -- The plan was for the first that waits, which may start now.
      delete from gangq.plans p where p.ask = (a).ask;
    end if;
    left_out := coalesce(left_out, why);
  end loop;
  return coalesce(left_out, 'done');
end $$;
