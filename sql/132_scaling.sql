-- Scaling: how many replicas a service has by its load or by the depth of a queue. View: scaling.
--
-- A service with a row in scaling_table wants as many gangs as its work asks for: the loads that
-- its gangs report, or the jobs of a queue, over the target. The load of a gang is the mean of what
-- its members have said within 60 s. A gang of which nobody has said anything is unknown. An
-- unknown gang counts as idle when we consider adding gangs, and as fully loaded when we consider
-- removing some. So silence neither adds nor removes a gang.
--    more, if work / target > 1.1 * gangs:         ceil(work / target)
--    fewer, if ceil(work / target / 0.9) < gangs:  ceil(work / target / 0.9)
-- Between the two nothing is changed, so the same load never asks for more and then for fewer. The
-- number changes when it was asked for at every look for up_after_s or down_after_s. If the wanted
-- number varied during the delay, the change nearest to the present number is made. Only a change
-- of what is asked for is written, not the loads.
--
-- Locks: the row of the service, which whoever calls this holds.

-- Internal. The scaling of a service with these options, which are all that it has; null: it has
-- none. Raises GQ001, GQ002 (no such queue).
create function gangq.scaling_as_set(
  old gangq.scaling_table, service text, o gangq.service_options
) returns gangq.scaling_table language plpgsql stable as $$
declare
  x gangq.scaling_table := old;
begin
  if o.max_replicas = 0 or num_nonnulls(o.min_replicas, o.max_replicas, o.target_load,
    o.target_depth, o.depth_of, o.up_after_s, o.down_after_s) = 0
  then
    return null;
  end if;
  perform gangq.refuse('GQ001', format('max_replicas is %s', o.max_replicas),
    'It is from 1 to 100000; 0: it is not scaled any more.') where o.max_replicas > 100000;
  x.service := scaling_as_set.service;
  x.min_replicas := coalesce(o.min_replicas, 1);
  x.max_replicas := o.max_replicas;
  x.target_load := o.target_load;
  x.target_depth := o.target_depth;
  x.depth_of := case when x.target_depth is not null then coalesce(o.depth_of, service) end;
  x.up_after_s := coalesce(o.up_after_s, 30);
  x.down_after_s := coalesce(o.down_after_s, 300);
  -- What was asked for by another target is asked for anew.
  if (x.target_load, x.target_depth, x.depth_of)
    is distinct from (old.target_load, old.target_depth, old.depth_of)
  then
    x.wants := null;
    x.since := null;
    x.due_at := null;
    x.why := null;
  end if;
  perform gangq.refuse('GQ001', w.what, w.hint) from (values
    (x.max_replicas is null, 'what scales has a maximum', 'Give max_replicas.'),
    (num_nonnulls(x.target_load, x.target_depth) <> 1, 'what scales has one target',
      'Give target_load, what each replica is to report, or target_depth, jobs for each replica.'),
    (o.depth_of is not null and x.target_depth is null, 'depth_of is for target_depth',
      'Give target_depth, jobs for each replica, or leave depth_of out.'),
    (x.min_replicas > x.max_replicas, format('min_replicas is %s and max_replicas %s',
      x.min_replicas, x.max_replicas), 'The minimum is at most the maximum.')
  ) as w(wrong, what, hint)
  where w.wrong;
  perform gangq.queue_named(x.depth_of) where x.depth_of is not null;
  return x;
end $$;

-- Internal. So many replicas, rounded up to whole gangs, of at most 100000 replicas; null of null.
create function gangq.whole_gangs(replicas bigint, size integer) returns bigint
language sql immutable as $$
  select case when replicas is not null
    then least((replicas + size - 1) / size, 100000 / size) * size end
$$;

-- Internal. So many replicas in whole gangs, of a service that scales (x) between its minimum and
-- its maximum.
create function gangq.within_limits(replicas bigint, x gangq.scaling_table, size integer)
returns integer language sql immutable as $$
  select least(greatest(gangq.whole_gangs(replicas, size),
    gangq.whole_gangs((x).min_replicas, size)), gangq.whole_gangs((x).max_replicas, size))::integer
$$;

-- Internal. The single jobs of a queue and those below it that are placed or wait to be, so many at
-- most. Gangs are not counted: those of a service may be in the same queue.
create function gangq.queue_depth(queue text, most bigint) returns bigint language sql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
  select count(*)
  from (
    select from gangq.pending_shapes p
    join gangq.shapes h on h.id = p.shape_id
    join gangq.live_jobs j on j.shape_id = p.shape_id and j.state = 'pending'
    where gangq.below(h.queue, array[queue_depth.queue])
    union all
    select from gangq.leases l
    join gangq.live_jobs j on j.incarnation = l.incarnation and j.gang_id is null
    join gangq.shapes h on h.id = j.shape_id
    where gangq.below(h.queue, array[queue_depth.queue])
    limit most) x
$$;

-- Internal. asked: how many replicas the work of a service asks for, and why; null: as many as are
-- wanted. loads: of each gang that takes requests; null: unknown.
create function gangq.asked_for(
  s gangq.services_table, x gangq.scaling_table, size integer, loads real[],
  out asked integer, out why text
) language plpgsql stable as $$
declare
  gangs constant integer := s.replicas / size;
  -- No more jobs are counted: it is twice what asks for the maximum.
  most_jobs constant bigint := ceil(x.max_replicas::float8 * x.target_depth * 2);
  known bigint;
  load double precision;
  -- In gangs at their target: if the unknown ones are idle, and if they are at their target, too.
  least_work double precision;
  most_work double precision;
begin
  if x.target_depth is not null then
    load := gangq.queue_depth(x.depth_of, most_jobs);
    least_work := load / x.target_depth / size;
    most_work := least_work;
    why := format('%s%s in queue %s, target %s for each of %s',
      case when load = most_jobs then 'at least ' else '' end, gangq.counted(load::bigint, 'job'),
      x.depth_of, x.target_depth, gangq.counted(s.replicas, 'replica'));
  else
    select count(l), sum(l) into known, load from unnest(loads) l;
    if known = 0 then
      return;
    end if;
    least_work := load / x.target_load;
    most_work := least_work + greatest(0, gangs - known);
    why := format('load %s, target %s', round((load / known)::numeric, 2), x.target_load)
      || case when known < gangs then format('; %s unknown', gangq.counted(gangs - known, 'gang'))
        else '' end;
  end if;
  if least_work > 1.1 * gangs then
    asked := gangq.within_limits(size * least(ceil(least_work), 100000)::bigint, x, size);
  else
    -- Rounded: 0.9 / 0.9 is one gang, and not a little more.
    asked := gangq.within_limits(
      size * least(gangs, ceil(round((most_work / 0.9)::numeric, 6)))::bigint, x, size);
  end if;
  asked := nullif(asked, s.replicas);
end $$;

-- Internal. The scaling of a service, where this look changes what is asked for or carries it out;
-- else null. A service that is stopped is asked for nothing.
create function gangq.scaled(s gangq.services_table, f gangq.service_fact[], t timestamptz)
returns gangq.scaling_table language plpgsql stable as $$
declare
  size constant integer := (gangq.revision_to_make(s)).gang_size;
  old gangq.scaling_table;
  x gangq.scaling_table;
  a record;
  up boolean;
begin
  select y.* into old from gangq.scaling_table y where y.service = (s).name;
  if not found then
    return null;
  end if;
  x := old;
  a := gangq.asked_for(s, x, size, array(
    select g.load from unnest(f) g where g.ready and g.stop_at is null));
  if (s).stopped or (s).deleting or a.asked is null then
    x.wants := null;
    x.since := null;
    x.due_at := null;
    x.why := null;
  else
    up := a.asked > (s).replicas;
    -- What is wanted in gangs of another size, from before a change of the revision, begins anew.
    if x.wants is null or (x.wants > (s).replicas) <> up or x.wants % size <> 0 then
      x.wants := a.asked;
      x.since := t;
    end if;
    x.wants := case when up then least(x.wants, a.asked) else greatest(x.wants, a.asked) end;
    x.due_at := x.since
      + make_interval(secs => case when up then x.up_after_s else x.down_after_s end);
    x.why := a.why;
  end if;
  if (x.wants, x.due_at) is distinct from (old.wants, old.due_at) or x.due_at <= t then
    return x;
  end if;
  return null;
end $$;

-- Internal. Writes how many replicas a service is asked for, and wants them if it is time. Returns
-- the service.
create function gangq.do_scaling(s gangq.services_table, t timestamptz)
returns gangq.services_table language plpgsql as $$
declare
  x gangq.scaling_table := gangq.scaled(s, array(select y from gangq.service_facts(s, t) y), t);
begin
  if x.due_at <= t then
    perform gangq.log_event(t, 'service_scales', reason => x.why,
      data => jsonb_build_object('service', s.name, 'from', s.replicas, 'to', x.wants,
        'since', x.since));
    s.replicas := x.wants;
    update gangq.scaling_table y
    set wants = null, since = null, due_at = null, why = null, scaled_at = t, scaled_why = x.why
    where y.service = s.name;
  else
    update gangq.scaling_table y
    set wants = x.wants, since = x.since, due_at = x.due_at, why = x.why
    where y.service = s.name;
  end if;
  return s;
end $$;

-- The services that scale, and what is asked for each. wants: how many replicas it should have,
-- since when and why, and due_at, when it gets them unless that ends; null: as many as there are.
-- scaled_at, scaled_why: when and why the number last changed.
create view gangq.scaling as
select x.service, s.replicas, x.min_replicas, x.max_replicas, x.target_load, x.target_depth,
  x.depth_of, x.up_after_s, x.down_after_s, x.wants, x.since, x.due_at, x.why, x.scaled_at,
  x.scaled_why
from gangq.scaling_table x
join gangq.services_table s on s.name = x.service
order by x.service;
