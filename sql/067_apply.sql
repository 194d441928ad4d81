-- What a decision changes: apply. Whoever decides may decide badly and never unlawfully: all that
-- gangq promises is verified here once more, under locks, for each decision by itself.
--
-- A decision is for an ask: g7, a gang; k7/5, the single jobs of shape 7 with priority 5; j7, a job
-- that is moved. What it stops are units: g7, a gang; j7, a single job, or a surplus member.
--
-- Locks, each kind in the order of its key, before the first decision is carried out: gangs and
-- members with skip locked; workers, waited for; queues with limits, by name. What is busy is left
-- to the next pass. The row 'pass' of lock_rows before all of them; the row of decider after them.

-- Who asks ----------------------------------------------------------------------------------------

create type gangq.asker as (
  ask text,
  gang_id bigint,
  queue text,
  submitter text,
  priority integer,
  kind_id integer
);
comment on type gangq.asker is
  'Internal. What a decision is for: a gang, or, gang_id null, the single jobs of one shape and '
  'priority. kind_id: a gang''s kind, or a shape, negative.';

create function gangq.asker_of(ask text) returns gangq.asker language plpgsql stable as $$
declare
  a gangq.asker;
begin
  if left(ask, 1) = 'g' then
    select asker_of.ask, g.id, k.queue, g.submitter, g.priority, g.kind_id into a
    from gangq.live_gangs g join gangq.gang_kinds k on k.id = g.kind_id
    where g.id = substr(asker_of.ask, 2)::bigint;
  else
    select asker_of.ask, null, s.queue, coalesce(s.submitter, j.submitter), j.priority, -s.id into a
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
comment on function gangq.asker_of is
  'Internal. What a decision is for, if it still waits. Of single jobs the first that waits.';

create function gangq.seats_of(a gangq.asker, seats jsonb)
returns table (n bigint, role integer, incarnation bigint, devices bigint[], shape_id integer)
language sql stable as $$
  select x.n, y.role, (x.value ->> 'worker')::bigint, array(
      select d.value::bigint
      from jsonb_array_elements_text(coalesce(x.value -> 'devices', '[]'))
        with ordinality as d(value, n)
      order by d.n),
    coalesce(r.shape_id, -(a).kind_id)
  from jsonb_array_elements(seats) with ordinality as x(value, n)
  cross join lateral (select coalesce((x.value ->> 'role')::integer, 0) + 1 as role) y
  left join gangq.kind_roles r on r.kind_id = (a).kind_id and r.ordinal = y.role
$$;
comment on function gangq.seats_of is
  'Internal. The seats of a decision, with the role and the shape of the job that each is for.';

create function gangq.named(ask text) returns text language sql immutable
return case left(ask, 1)
  when 'g' then 'gang ' || substr(ask, 2)
  when 'j' then 'job ' || substr(ask, 2)
  else 'a single job of priority ' || split_part(ask, '/', 2) end;
comment on function gangq.named is 'Internal. g7 is gang 7, j7 job 7, k7/5 a job of priority 5.';

-- Starting a gang ---------------------------------------------------------------------------------

-- All of a gang, and each role, shares one domain of the level that it requires, with the members
-- that run already; and no gang with the same key is on one of these hosts.
create function gangq.misplaced(g gangq.live_gangs, job_ids bigint[], incarnations bigint[])
returns text language sql stable as $$
  with placed as materialized (
    select coalesce(j.role, 1) as role, i.host, gangq.domains(i, c.topology) as domains
    from gangq.live_jobs j
    left join unnest(job_ids, incarnations) as s(id, incarnation) on s.id = j.id
    join gangq.incarnations i on i.id = coalesce(s.incarnation, j.incarnation)
    cross join gangq.settings c
    where j.gang_id = (g).id
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
    select format('gang %s is on %s, and both are %s', x.id, i.host, mine.apart)
    from gangq.gang_kinds mine
    join gangq.gang_kinds k on k.apart = mine.apart
    join gangq.live_gangs x on x.kind_id = k.id and x.id <> (g).id
    join gangq.live_jobs j on j.gang_id = x.id
    join gangq.incarnations i on i.id = j.incarnation
    where mine.id = (g).kind_id and i.host in (select p.host from placed p)
    order by x.id limit 1))
$$;
comment on function gangq.misplaced is
  'Internal. Which promise about where it runs these places would break; null: none.';

-- Of each role the first members that wait get its seats, by rank. A gang that runs has only those
-- that are missing.
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
  elsif gangq.paused(a.queue) then
    return 'its queue is paused';
  end if;
  with members as materialized (
    select j.id, j.rank, s.incarnation, s.devices
    from (
      select x.*, row_number() over (partition by x.role order by x.n) as nth
      from gangq.seats_of(a, seats) x) s
    join (
      select y.id, y.rank, coalesce(y.role, 1) as role,
        row_number() over (partition by coalesce(y.role, 1) order by y.rank) as nth
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
    when gangq.reserve_members(g.id, jobs, incarnations, devices, digest) then 'done'
    else 'busy' end;
end $$;
comment on function gangq.apply_start is
  'Internal. Places a locked gang, or what it misses, on the seats decided: done; or why not.';

-- Plans -------------------------------------------------------------------------------------------

-- Written when it changes, not at each pass. Seats are kept as long as those who were told to stop
-- may take: their grace, its confirmation, a lease.
create function gangq.write_plan(
  a gangq.asker, seats jsonb, t timestamptz, place integer default null,
  starts_at timestamptz default null
) returns void language plpgsql as $$
#variable_conflict use_column
begin
  insert into gangq.plans as p (ask, kept, place, starts_at, decided_at, pass, seats)
  select (a).ask, write_plan.place is null, write_plan.place, coalesce(write_plan.starts_at,
      t + make_interval(secs => c.grace_s + c.ack_timeout_s + c.lease_s)), t, l.runs, (
    select coalesce(jsonb_agg(jsonb_build_object('worker', x.incarnation, 'devices', x.devices,
      'memory_mb', s.memory_mb, 'millicpus', (s.cpus * 1000)::bigint) order by x.n), '[]')
    from gangq.seats_of(a, write_plan.seats) x join gangq.shapes s on s.id = x.shape_id)
  from gangq.lock_rows l cross join gangq.settings c
  where l.name = 'pass'
  on conflict (ask) do update set kept = excluded.kept, place = excluded.place,
    pass = excluded.pass, seats = excluded.seats,
    (decided_at, starts_at) = (
      select case when moved then excluded.decided_at else p.decided_at end,
        case when moved then excluded.starts_at else p.starts_at end
      from (select abs(extract(epoch from p.starts_at - excluded.starts_at)) > 1 as moved) m);
end $$;
comment on function gangq.write_plan is
  'Internal. Notes where something is meant to start, and when. place: among the planned starts; '
  'null: others stop for it, and its seats are kept from everybody until they have gone.';

-- Stopping ----------------------------------------------------------------------------------------

create function gangq.of_unit(j gangq.live_jobs, unit text) returns boolean language sql immutable
return case left(unit, 1) when 'g' then (j).gang_id else (j).id end = substr(unit, 2)::bigint;
comment on function gangq.of_unit is 'Internal. Whether a job is of this unit, g7 or j7.';

create function gangq.stop_unit(unit text, how text, why text, data jsonb, t timestamptz)
returns boolean language plpgsql as $$
#variable_conflict use_column
declare
  number constant bigint := substr(unit, 2)::bigint;
  g gangq.live_gangs;
  j gangq.live_jobs;
begin
  data := jsonb_strip_nulls(data);
  if left(unit, 1) = 'g' then
    select x.* into g from gangq.live_gangs x where x.id = number;
    if not found or g.state <> 'running' and (how <> 'move' or g.state <> 'reserved') then
      return false;
    end if;
    perform gangq.drain(g.id, '{}', how, null, why, t);
  else
    select x.* into j from gangq.live_jobs x where x.id = number and x.state = 'running';
    if not found then
      return false;
    elsif j.gang_id is null then
      perform gangq.stop_solo(j, how, why, data, t);
      return true;
    elsif not gangq.shrink_gang(j.gang_id, array[j.id], why) then
      return false;
    end if;
    select x.* into g from gangq.live_gangs x where x.id = j.gang_id;
  end if;
  perform gangq.log_event(t, how, g.id, g.epoch, j.id, j.token, j.incarnation, why, data);
  return true;
end $$;
comment on function gangq.stop_unit is
  'Internal. Tells a gang, a single job or a surplus member to stop, with an event. how: preempt '
  'or move, the cause of its end.';

create function gangq.apply_move(d jsonb, digest text, t timestamptz) returns text
language plpgsql as $$
declare
  unit constant text := d ->> 'ask';
  why constant text := (
    select format('%s %s is drained: %s', c.kind, c.name, c.reason)
    from gangq.cordons c
    join gangq.incarnations i on case c.kind when 'host' then i.host else i.name end = c.name
    join gangq.live_jobs j on j.incarnation = i.id and gangq.of_unit(j, unit)
    where c.drain order by c.kind, c.name limit 1);
begin
  -- Null: the drain was called off.
  if why is null
    or not gangq.stop_unit(unit, 'move', why, jsonb_build_object('digest', digest), t) then
    return 'stale';
  end if;
  if left(unit, 1) = 'g' then
    perform gangq.write_plan(gangq.asker_of(unit), d -> 'planned', t);
  end if;
  return 'done';
end $$;
comment on function gangq.apply_move is
  'Internal. Tells what runs on something drained to stop, and keeps the places where it fits.';

-- Its victims stop through the same verbs as for anybody else; what they leave is kept in this very
-- commit.
create function gangq.apply_stop(a gangq.asker, d jsonb, digest text, t timestamptz)
returns text language plpgsql as $$
declare
  unit text;
  lost jsonb;
  why constant text := gangq.may_not_stop(a, d, t);
begin
  if why is not null then
    return why;
  end if;
  for unit, lost in
    select u.name, d -> 'lost_s' -> (u.n::integer - 1)
    from jsonb_array_elements_text(d -> 'stop') with ordinality as u(name, n) order by u.n
  loop
    -- A surplus member of a gang that goes as a whole goes with it.
    continue when left(unit, 1) = 'j' and exists (
      select 1 from gangq.live_jobs j
      where j.id = substr(unit, 2)::bigint and d -> 'stop' ? ('g' || j.gang_id));
    if not gangq.stop_unit(unit, 'preempt', 'displaced by ' || gangq.named(a.ask),
      jsonb_build_object('for', coalesce(to_jsonb(a.gang_id), to_jsonb(a.ask)), 'lost_s', lost,
        'digest', digest), t) then
      perform gangq.refuse('GQ004', unit || ' does not run any more', 'It is decided again.');
    end if;
  end loop;
  perform gangq.write_plan(a, d -> 'planned', t);
  return 'done';
end $$;
comment on function gangq.apply_stop is
  'Internal. Tells the units chosen to stop, all or none, and keeps their places for the asker.';

-- What stops may have at most the priority below that of what it stops for, unless a queue of this
-- is owed so much and the unit is elsewhere; it is past the least time it may run, preemptible, and
-- on a worker chosen.
create function gangq.may_not_stop(a gangq.asker, d jsonb, t timestamptz) returns text
language plpgsql stable as $$
#variable_conflict use_column
declare
  own text[] := gangq.queue_path((a).queue);
  owed text := gangq.owed_to(a, own, d -> 'planned');
  most integer := (select c.preemptions_per_pass from gangq.settings c);
  unit record;
begin
  if jsonb_array_length(d -> 'stop') not between 1 and most then
    return format('%s would be told to stop, and %s is the most',
      gangq.counted(jsonb_array_length(d -> 'stop'), 'unit'), most);
  end if;
  if not (select q.preempts from gangq.queues_table q where q.name = own[1]) then
    return format('queue %s displaces nothing', own[1]);
  end if;
  for unit in
    select u.name, min(j.priority) as priority, min(s.queue) as queue,
      bool_and(j.state = 'running' and j.stops < c.max_stops and coalesce(x.preemptible, true)
        and q.preemptible and coalesce(x.go_at, case when j.gang_id is null then j.claimed_at end)
          <= t - make_interval(secs => q.min_run_s)) as movable,
      bool_or(j.incarnation in (
        select y.incarnation from gangq.seats_of(a, d -> 'planned') y)) as there
    from jsonb_array_elements_text(d -> 'stop') as u(name)
    left join gangq.live_jobs j on j.incarnation is not null and gangq.of_unit(j, u.name)
    left join gangq.live_gangs x on x.id = j.gang_id
    left join gangq.shapes s on s.id = j.shape_id
    left join gangq.queues_table q on q.name = s.queue
    cross join gangq.settings c
    group by u.name
  loop
    if unit.movable is distinct from true then
      return unit.name || ' may not be told to stop';
    elsif not unit.there then
      return unit.name || ' is on none of the workers chosen';
    elsif unit.priority >= (a).priority
      and (owed is null or gangq.below(unit.queue, array[owed])) then
      return format('%s has priority %s, and %s has %s', unit.name, unit.priority,
        gangq.named((a).ask), (a).priority);
    end if;
  end loop;
  return gangq.guarantee_broken(own, d -> 'stop');
end $$;
comment on function gangq.may_not_stop is
  'Internal. Why a decision may not tell these units to stop for this; null: it may.';

create function gangq.guarantees(names text[])
returns table (queue text, resource text, owed numeric, used numeric) language sql stable as $$
  select q.name, m.key, m.value::numeric,
    coalesce(sum(gangq.amount_of(m.key, u.gangs, u.jobs, u.gpus, u.memory_mb, u.cpus)), 0)
  from gangq.queues_table q
  cross join lateral jsonb_each_text(q.guaranteed) m
  left join gangq.queue_usage(names) u on u.queue = q.name
  where q.name = any (names)
  group by q.name, m.key, m.value
$$;
comment on function gangq.guarantees is
  'Internal. What these queues are guaranteed, and what each and its children use of that.';

create function gangq.owed_to(a gangq.asker, own text[], seats jsonb) returns text
language sql stable as $$
  with asked as (
    select count(*) as jobs, sum(s.gpus)::bigint as gpus, sum(s.memory_mb)::bigint as memory_mb,
      sum(s.cpus) as cpus
    from gangq.seats_of(owed_to.a, seats) x join gangq.shapes s on s.id = x.shape_id
  )
  select q.queue
  from gangq.guarantees(own) q cross join asked z
  cross join lateral (
    select gangq.amount_of(q.resource, 1, z.jobs, z.gpus, z.memory_mb, z.cpus) as amount) y
  where y.amount > 0
  group by q.queue
  having bool_and(q.used + y.amount <= q.owed)
  order by length(q.queue) desc limit 1
$$;
comment on function gangq.owed_to is
  'Internal. The nearest queue on the path whose guarantee covers these seats too; null: none.';

-- A queue that does not hold the beneficiary too keeps what it is guaranteed.
create function gangq.guarantee_broken(own text[], units jsonb) returns text
language sql stable as $$
  with leaving as materialized (
    select s.queue, s.gpus, s.memory_mb, s.cpus, u.name is not null as now
    from gangq.live_jobs j
    join gangq.shapes s on s.id = j.shape_id
    left join jsonb_array_elements_text(units) as u(name) on gangq.of_unit(j, u.name)
    where j.incarnation is not null and (u.name is not null or j.state = 'preempting')
  ),
  losing as materialized (
    select q.name
    from gangq.queues_table q
    where q.guaranteed <> '{}' and q.name <> all (own) and exists (
      select 1 from leaving l where l.now and gangq.below(l.queue, array[q.name]))
  )
  select format('queue %s would keep less than the %s %s it is guaranteed', x.queue, x.owed,
    x.resource)
  from gangq.guarantees(array(select l.name from losing l)) x
  cross join lateral (
    select sum(z.amount) as all_of_it, sum(z.amount) filter (where l.now) as now
    from leaving l
    cross join lateral gangq.amount_of(x.resource, 0, 1, l.gpus, l.memory_mb, l.cpus) as z(amount)
    where gangq.below(l.queue, array[x.queue])) y
  where y.now > 0 and x.used - y.all_of_it < x.owed
  order by x.queue limit 1
$$;
comment on function gangq.guarantee_broken is
  'Internal. Which queue would fall below its guarantee if these units stopped; null: none.';

-- Places ------------------------------------------------------------------------------------------

-- Open places that stay: vacant ones that are seats of a decision, and those in which a job runs and
-- the next of its kind may follow (refills). Only vacant ones have a moment by which what fills
-- them has to end. What is still open for long enough, as decided, is not written.
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
comment on function gangq.renew_places is
  'Internal. Renews the places that these decisions name in this list of theirs: seats or refills.';

-- Each seat by itself: what is taken meanwhile is left out, and the rest is opened.
create function gangq.apply_places(a gangq.asker, d jsonb, t timestamptz) returns text
language plpgsql as $$
#variable_conflict use_column
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
    select x.incarnation, x.devices, (y.value ->> 'place')::bigint as place,
      to_timestamp((y.value ->> 'ends_by')::float8) as ends_by,
      coalesce((y.value ->> 'min_priority')::integer, -1000) as min_priority,
      coalesce((y.value ->> 'refills')::boolean, false) as refills
    from gangq.seats_of(a, d -> 'seats') x
    join jsonb_array_elements(d -> 'seats') with ordinality as y(value, n) on y.n = x.n
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
      delete from gangq.plans p where p.ask = (a).ask;
    end if;
    left_out := coalesce(left_out, why);
  end loop;
  return coalesce(left_out, 'done');
end $$;
comment on function gangq.apply_places is
  'Internal. Opens a place for each seat of a decision about single jobs, and renews those that are '
  'open already: done; or why one of them could not be opened.';

-- The pass ----------------------------------------------------------------------------------------

-- The words are those of the decision. A verdict is written when it has changed, not every pass;
-- since and held_s are of the gate alone. What is said of a kind is what is said of the first that
-- waits and has neither a planned start nor seats that are being freed for it, if there is one.
create function gangq.note_verdicts(decisions jsonb, t timestamptz) returns void
language plpgsql set plan_cache_mode = force_generic_plan as $$
begin
  with said as materialized (
    select x.n, array[x.value ->> 'ask'] || array(
        select jsonb_array_elements_text(x.value -> 'alike')) as asks,
      x.value ->> 'action' as action, k.kind_id,
      left(r.refused ->> 'gate', 100) as gate, left(x.value ->> 'why', 500) as why,
      left(x.value ->> 'unblocks', 500) as unblocks, left(x.value ->> 'follows', 500) as follows,
      gangq.cut(jsonb_strip_nulls(r.refused || jsonb_build_object('after', x.value -> 'after',
        'used', trim_scale((r.refused ->> 'limit')::numeric - (r.refused ->> 'have')::numeric))),
        4000) as numbers
    from jsonb_array_elements(decisions) with ordinality as x(value, n)
    cross join lateral (select x.value -> 'refused' as refused) r
    left join gangq.live_gangs g
      on g.id = case when x.value ->> 'ask' ~ '^g' then substr(x.value ->> 'ask', 2)::bigint end
    cross join lateral (
      select case when x.value ->> 'ask' ~ '^k'
        then -split_part(substr(x.value ->> 'ask', 2), '/', 1)::integer else g.kind_id end
        as kind_id) k
    where k.kind_id is not null and r.refused ->> 'gate' is not null
  ),
  kinds as materialized (
    select distinct on (s.kind_id) s.*
    from said s order by s.kind_id, s.action in ('plan', 'stop'), s.n
  ),
  verdicts as materialized (
    select k.kind_id, '' as ask, k.gate, k.why, k.unblocks, k.follows, k.numbers from kinds k
    union all
    select s.kind_id, a.ask, s.gate, s.why, s.unblocks, s.follows, s.numbers
    from said s join kinds k on k.kind_id = s.kind_id
    cross join lateral unnest(s.asks) as a(ask)
    where (s.gate, s.why, s.unblocks, s.follows)
      is distinct from (k.gate, k.why, k.unblocks, k.follows)
  ),
  alike as (
    delete from gangq.verdicts v using said s
    where v.kind_id = s.kind_id and v.ask = any (s.asks)
      and not exists (select 1 from verdicts x where x.kind_id = v.kind_id and x.ask = v.ask)
  )
  insert into gangq.verdicts as v (kind_id, ask, gate, since, why, unblocks, follows, numbers)
  select x.kind_id, x.ask, x.gate, t, x.why, x.unblocks, x.follows, x.numbers
  from verdicts x order by x.kind_id, x.ask
  on conflict (kind_id, ask) do update set gate = excluded.gate, why = excluded.why,
    unblocks = excluded.unblocks, follows = excluded.follows, numbers = excluded.numbers,
    since = case when v.gate = excluded.gate then v.since else t end,
    held_s = v.held_s + case when v.gate <> excluded.gate and gangq.holds_back(v.gate)
      then greatest(0, extract(epoch from t - v.since)) else 0 end
  where (v.gate, v.why, v.unblocks, v.follows)
    is distinct from (excluded.gate, excluded.why, excluded.unblocks, excluded.follows);
end $$;
comment on function gangq.note_verdicts is
  'Internal. Why what waits was not placed: of each kind, and of each ask that differs from it.';

-- A decider that fails over a gang says so in each pass: an event an hour, of ten gangs a pass.
create function gangq.record_pass(pass bigint, decisions jsonb, seen jsonb, t timestamptz)
returns void language plpgsql as $$
#variable_conflict use_column
declare
  failed record;
  news boolean := false;
begin
  for failed in
    select substr(x.value ->> 'ask', 2)::bigint as gang_id, x.value -> 'refused' ->> 'where' as why
    from jsonb_array_elements(record_pass.decisions) with ordinality as x(value, n)
    where x.value -> 'refused' ->> 'gate' = 'error' and x.value ->> 'ask' ~ '^g'
    order by x.n limit 10
  loop
    continue when exists (
      select 1 from gangq.events e
      where e.gang_id = failed.gang_id and e.kind = 'decision_failed'
        and e.at > t - interval '1 h');
    perform gangq.log_event(t, 'decision_failed', failed.gang_id, reason => left(failed.why, 500));
    news := true;
  end loop;
  insert into gangq.passes (at, pass, digest, decisions, board)
  select t, record_pass.pass, left(seen ->> 'digest', 64), record_pass.decisions,
    case when s.record_decisions or news then (seen ->> 'board')::json end
  from gangq.settings s
  where news or exists (
    select 1 from jsonb_array_elements(record_pass.decisions) as x(value)
    where x.value ->> 'action' in ('start', 'stop', 'move'));
end $$;
comment on function gangq.record_pass is
  'Internal. Writes down a part of a pass that decided something: to ask why, and to run it again.';

-- What was planned before and is no more goes, and with it what was kept; so do kept seats past
-- their time and verdicts of kinds of which nothing waits.
create function gangq.forget_old_plans(pass bigint, t timestamptz) returns void
language plpgsql as $$
#variable_conflict use_column
begin
  delete from gangq.plans p where p.ask = any (array(
    select z.ask from gangq.plans z
    where case when z.kept then z.starts_at <= t else z.pass < forget_old_plans.pass end
    order by z.ask for update skip locked));
  delete from gangq.verdicts v where (v.kind_id, v.ask) in (
    select z.kind_id, z.ask
    from gangq.verdicts z
    -- One by one: for an exists the planner reads all that waits and makes a hash table of it.
    where (case
        when z.kind_id < 0 then (
          select true from gangq.live_jobs j
          where j.shape_id = -z.kind_id and j.state = 'pending' limit 1)
        when z.ask <> '' then (
          select g.state = 'blocked' or g.missing_since is not null
          from gangq.live_gangs g where g.id = substr(z.ask, 2)::bigint)
        else coalesce((
          select true from gangq.live_gangs g
          where g.kind_id = z.kind_id and g.state = 'blocked' limit 1), (
          select true from gangq.live_gangs g
          where g.kind_id = z.kind_id and g.missing_since is not null limit 1)) end) is not true
    order by z.kind_id, z.ask for update skip locked);
end $$;
comment on function gangq.forget_old_plans is
  'Internal. Ends what no pass since this one has planned, and what is kept in vain.';

create function gangq.lock_decided(decisions jsonb, out units text[], out busy_queues text[])
language plpgsql as $$
declare
  gangs bigint[];
  singles bigint[];
  jobs bigint[];
  workers bigint[];
  queues text[];
begin
  select array_agg(substr(u.name, 2)::bigint) filter (where left(u.name, 1) = 'g'),
    coalesce(array_agg(substr(u.name, 2)::bigint) filter (where left(u.name, 1) = 'j'), '{}')
  into gangs, singles
  from jsonb_array_elements(decisions) as x(value)
  cross join lateral (
    select x.value ->> 'ask' where x.value ->> 'action' <> 'wait'
    union all
    select jsonb_array_elements_text(x.value -> 'stop')) as u(name);
  gangs := array(
    select g.id from gangq.live_gangs g
    where g.id = any (gangs || array(
      select j.gang_id from gangq.live_jobs j where j.id = any (singles)))
    order by g.id for update skip locked);
  -- By two indexes: with "or", all live jobs were read.
  jobs := array(
    select j.id from gangq.live_jobs j
    where j.id = any (
      array(select x.id from gangq.live_jobs x where x.gang_id = any (gangs)) || singles)
    order by j.id for update skip locked);
  -- Of a gang all of it is locked, or neither it nor a member of it counts.
  units := array(
    select 'g' || g.id from unnest(gangs) as g(id)
    where not exists (
      select 1 from gangq.live_jobs j where j.gang_id = g.id and j.id <> all (jobs)));
  units := units || array(
    select 'j' || j.id from gangq.live_jobs j
    where j.id = any (singles) and case when j.gang_id is null
      then j.id = any (jobs) else 'g' || j.gang_id = any (units) end);
  workers := array(
    select (y.value ->> 'worker')::bigint
    from jsonb_array_elements(decisions) as x(value)
    cross join lateral jsonb_array_elements(x.value -> 'seats') as y(value)
    where x.value ->> 'action' = 'start');
  -- A claim holds its worker for a moment: waiting for it in order is surer than skipping it. What
  -- is held for longer is left to the next pass.
  begin
    perform from gangq.incarnations i where i.id = any (workers) order by i.id for no key update;
  exception when lock_not_available then
    perform from gangq.incarnations i
    where i.id = any (workers) order by i.id for no key update skip locked;
  end;
  queues := array(
    select k.queue
    from gangq.live_gangs g join gangq.gang_kinds k on k.id = g.kind_id
    where g.id = any (gangs)
    union
    select s.queue
    from jsonb_array_elements(decisions) as x(value)
    join gangq.shapes s on s.id = substr(split_part(x.value ->> 'ask', '/', 1), 2)::integer
    where x.value ->> 'ask' ~ '^k' and x.value ->> 'action' = 'start');
  begin
    perform gangq.lock_limited(queues);
    busy_queues := '{}';
  exception when lock_not_available then
    busy_queues := array(
      select q from unnest(queues) as q
      where exists (select 1 from gangq.limits_of(gangq.queue_path(q))));
  end;
end $$;
comment on function gangq.lock_decided is
  'Internal. Locks all that these decisions are about. units: those that were not busy; '
  'busy_queues: those with limits that another session holds.';

create function gangq.apply_one(
  d jsonb, place integer, units text[], busy_queues text[], digest text, t timestamptz
) returns text language plpgsql as $$
#variable_conflict use_column
declare
  action constant text := d ->> 'action';
  starts_at timestamptz;
  g gangq.live_gangs;
  a gangq.asker;
begin
  if exists (
    select 1 from jsonb_array_elements_text(coalesce(d -> 'stop', '[]') || (d -> 'ask')) as u(name)
    where left(u.name, 1) <> 'k' and u.name <> all (units)) then
    return 'busy';
  elsif action = 'move' then
    return gangq.apply_move(d, digest, t);
  end if;
  a := gangq.asker_of(d ->> 'ask');
  if a.ask is null then
    return 'stale';
  elsif a.queue = any (busy_queues) then
    return 'busy';
  end if;
  select x.* into g from gangq.live_gangs x where x.id = a.gang_id;
  case
    when action = 'start' and a.gang_id is null then
      return gangq.apply_places(a, d, t);
    when action = 'start' then
      return gangq.apply_start(g, a, d -> 'seats', digest, t);
    when action in ('plan', 'stop') and g.state <> 'blocked' then
      return 'stale';
    when action = 'stop' then
      return gangq.apply_stop(a, d, digest, t);
    when action = 'plan' then
      starts_at := to_timestamp((d ->> 'starts_at')::float8);
      perform gangq.check_moment('starts_at', starts_at);
      perform gangq.write_plan(a, d -> 'planned', t, place, starts_at);
      return 'done';
    else
      return format('%L is no action: start, stop, plan, move or wait', action);
  end case;
exception
  when lock_not_available or deadlock_detected then
    return 'busy';
  when others then
    -- One decision that makes no sense must not keep the others from being carried out.
    if sqlstate !~ '^(GQ|22)' then
      raise warning 'gangq.apply: % of % failed: % (%)', action, d ->> 'ask', sqlerrm, sqlstate;
    end if;
    return sqlerrm;
end $$;
comment on function gangq.apply_one is
  'Internal. Verifies and carries out one decision: done, stale, busy, or why it is refused.';

create function gangq.apply(
  pass bigint, decisions jsonb, part integer default 1, last boolean default true,
  seen jsonb default '{}', closes bigint[] default '{}'
) returns table (accepted boolean, outcomes jsonb, again boolean) language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  mine record;
  d jsonb;
  said text;
  place integer := 0;
  digest text := left(apply.seen ->> 'digest', 64);
begin
  perform gangq.require_read_committed('apply');
  perform gangq.check_decisions(apply.decisions);
  outcomes := '{}';
  again := true;
  -- Nothing is done from an older board: whoever began a pass since has seen more. Each part moves
  -- the number on, so one that is sent again after a lost reply is refused.
  perform from gangq.lock_rows l
  where l.name = 'pass' and l.runs + 1 - apply.part = apply.pass for update skip locked;
  accepted := found;
  if not accepted then
    return next;
    return;
  end if;
  update gangq.lock_rows l set runs = l.runs + 1 where l.name = 'pass';
  perform gangq.hang_up_soon();
  mine := gangq.lock_decided(apply.decisions);
  -- First, so that this very pass may use what they held.
  perform gangq.close_places(apply.closes);
  perform gangq.renew_places(apply.decisions, 'refills', t);
  for d in
    select x.value from jsonb_array_elements(apply.decisions) with ordinality as x(value, n)
    where x.value ->> 'action' <> 'wait' order by x.n
  loop
    place := place + (d ->> 'action' = 'plan')::integer;
    said := gangq.apply_one(d, place, mine.units, mine.busy_queues, digest, t);
    outcomes := outcomes || jsonb_build_object(d ->> 'ask', said);
    if said <> 'done' then
      -- It keeps what it was promised.
      update gangq.plans p set pass = apply.pass + 1 where p.ask = any (array(
        select z.ask from gangq.plans z where z.ask = d ->> 'ask' for update skip locked));
    end if;
  end loop;
  perform gangq.note_verdicts(apply.decisions, t);
  perform gangq.record_pass(apply.pass, apply.decisions, apply.seen, t);
  if apply.last then
    -- After what could be placed has been: a gang whose planned start is now does not time out.
    perform gangq.tick_step('time_out');
    perform gangq.forget_old_plans(apply.pass + 1, t);
    again := gangq.end_turn((apply.seen ->> 'asked')::bigint, t);
  end if;
  again := again
    or exists (select 1 from jsonb_each_text(outcomes) o where o.value in ('busy', 'stale'));
  return next;
end $$;
comment on function gangq.apply is
  'Carries out what was decided on the board of this pass, each decision verified by itself: a '
  'gang is placed whole or not at all. decisions: [{"ask": "g7", "action": start, stop, plan, move '
  'or wait, "seats" or "planned": [{"worker", "devices", "role"}], "stop": ["g3", "j5"], '
  '"starts_at", "refused", "alike": others of its kind that wait for the same}], at most 50 that '
  'place or stop something, and 1,000 in all. part: 1 begins the pass, others follow in order; '
  'last: this part is its last. seen: {"digest", "asked", "board"} of the board, which is text. '
  'accepted: false where a newer pass has begun or this part was taken before, and nothing was '
  'done. outcomes: of each that is not a wait done, stale, busy, or why it was refused. again: '
  'decide again soon. Raises GQ001, GQ008.';

create function gangq.check_decisions(decisions jsonb) returns void language plpgsql as $$
declare
  n record;
begin
  if coalesce(jsonb_typeof(decisions), 'null') <> 'array' then
    perform gangq.refuse('GQ001', 'decisions are no list', 'Pass what gangq decide has said.');
  end if;
  perform gangq.refuse_larger('the decisions', octet_length(decisions::text), 4194304);
  select count(*) filter (where y.action in ('start', 'stop', 'move')) as changes,
    count(*) as decisions, (array_agg(x.value order by x.n) filter (
      where coalesce(y.ask, '') !~ '^([gj][0-9]{1,18}|k[0-9]{1,9}/-?[0-9]{1,4})$'
        or y.action is null or left(y.ask, 1) = 'j' and y.action <> 'move'
        or exists (
          select 1 from jsonb_array_elements_text(case jsonb_typeof(x.value -> 'stop')
            when 'array' then x.value -> 'stop' else '[]' end) as u(name)
          where u.name !~ '^[gj][0-9]{1,18}$')))[1] as wrong
  into n
  from jsonb_array_elements(check_decisions.decisions) with ordinality as x(value, n)
  cross join lateral (select x.value ->> 'ask' as ask, x.value ->> 'action' as action) y;
  if n.changes > 50 or n.decisions > 1000 then
    perform gangq.refuse('GQ001',
      format('%s decisions place or stop something, of %s', n.changes, n.decisions),
      'At most 50 a call, and 1,000 in all: pass the rest as further parts.');
  elsif n.wrong is not null then
    perform gangq.refuse('GQ001', format('%s is no decision', left(n.wrong::text, 200)),
      'ask is g and a gang''s id, or j and a job''s; action says what is decided.');
  end if;
end $$;
comment on function gangq.check_decisions is 'Internal. Refuses what cannot be read, or too many.';

-- Who decides -------------------------------------------------------------------------------------

-- A session that ticks and finds that something waits to be placed has the turn for a second,
-- unless another has it: that one learns from asked that there is more to see, and goes on.
create function gangq.take_turn(t timestamptz) returns real language plpgsql as $$
#variable_conflict use_column
declare
  others_until timestamptz;
begin
  if not (gangq.may_act_as('gangq_worker') or gangq.is_admin())
    or not exists (
      select 1 from gangq.live_gangs g
      where g.state = 'blocked' and (g.not_before is null or g.not_before <= t))
    and not exists (select 1 from gangq.live_gangs g where g.missing_since is not null)
    and not exists (select 1 from gangq.cordons c where c.drain)
    and not exists (select 1 from gangq.plans p)
    and not gangq.single_waits()
  then
    return null;
  end if;
  select case when d.until > t then d.until end into others_until
  from gangq.decider d for update;
  update gangq.decider d
  set asked = d.asked + 1, until = coalesce(others_until, t + interval '1 s');
  return coalesce(extract(epoch from others_until - t), 0);
end $$;
comment on function gangq.take_turn is
  'Internal. In how many seconds the caller may decide: 0, now; more, another has the turn until '
  'then; null, nothing waits, or the caller may not.';

create function gangq.end_turn(asked bigint, t timestamptz) returns boolean language plpgsql as $$
#variable_conflict use_column
declare
  more boolean;
begin
  select d.asked is distinct from end_turn.asked into more from gangq.decider d for update;
  update gangq.decider d set decided_at = t, until = case when more then t + interval '1 s' end;
  return more;
exception when lock_not_available then
  return true;  -- a tick that is left open has it: the turn ends by itself
end $$;
comment on function gangq.end_turn is
  'Internal. Ends the turn; true: somebody has asked since the board was read, and it goes on.';
