-- Decisions that stop something: apply_stop displaces victims for an asker, apply_move empties what
-- is drained. may_not_stop checks each victim again, under the locks.
-- Locks: apply holds all that is decided about (lock_decided).

-- Internal. Whether a job is of this unit, g7 or j7.
create function gangq.of_unit(j gangq.live_jobs, unit text) returns boolean language sql immutable
return case left(unit, 1) when 'g' then (j).gang_id else (j).id end = substr(unit, 2)::bigint;

-- Internal. Tells a gang, a single job or a surplus member to stop, with an event. how: preempt or
-- move, the cause of its end.
create function gangq.stop_unit(unit text, how text, why text, data jsonb, t timestamptz)
returns boolean language plpgsql as $$
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
    perform gangq.drain(g.id, '{}', '{}', how, null, why, t);
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

-- Internal. Tells what runs on something drained to stop, and keeps the places where it fits.
create function gangq.apply_move(d jsonb, digest text, t timestamptz) returns text
language plpgsql as $$
declare
  unit constant text := d ->> 'ask';
  why constant text := (
    select format('%s %s is drained: %s', c.kind, c.name, c.reason)
    from gangq.cordons c
    join gangq.incarnations i on gangq.is_at(i, c.kind, c.name)
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

-- Internal. Tells the units chosen to stop, all or none, and keeps their places for the asker. Its
-- victims stop through the same verbs as for anybody else; what they leave is kept in this very
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
      jsonb_build_object('for', a.gang_id, 'for_job', a.job_id, 'lost_s', lost, 'digest', digest),
      t) then
      perform gangq.refuse('GQ004', unit || ' does not run any more', 'It is decided again.');
    end if;
  end loop;
  perform gangq.write_plan(a, d -> 'planned', t);
  return 'done';
end $$;

-- Internal. Why a decision may not tell these units to stop for this; null: it may. A victim must
-- have a lower priority than the asker. Exception: the asker's queue is below its guarantee and the
-- victim is outside that queue. Every victim must be preemptible, have run for min_run_s, and run
-- on a chosen worker.
create function gangq.may_not_stop(a gangq.asker, d jsonb, t timestamptz) returns text
language plpgsql stable as $$
declare
  own text[] := gangq.queue_path((a).queue);
  owed text := gangq.owed_to(a, own, d -> 'planned');
  most integer := (select c.preemptions_per_pass from gangq.settings c);
  units integer := coalesce(jsonb_array_length(d -> 'stop'), 0);
  unit record;
begin
  if units not between 1 and most then
    return format('%s would be told to stop, and %s is the most', gangq.counted(units, 'unit'),
      most);
  end if;
  if not (select q.preempts from gangq.queues_table q where q.name = own[1]) then
    return format('queue %s displaces nothing', own[1]);
  end if;
  for unit in
    select u.name, min(j.priority) as priority, min(s.queue) as queue,
      bool_and(coalesce(gangq.movable_at(j.state, j.stops, c.max_stops,
        coalesce(x.preemptible, true) and q.preemptible,
        coalesce(x.go_at, case when j.gang_id is null then j.claimed_at end), q.min_run_s)
        <= t, false)) as movable,
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
    if not unit.movable then
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

-- Internal. What these queues are guaranteed, and what each and its children use of that.
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

-- Internal. The nearest queue on the path whose guarantee covers these seats too; null: none.
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

-- Internal. Which queue would fall below its guarantee if these units stopped; null: none. A queue
-- that does not hold the beneficiary too keeps what it is guaranteed.
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
