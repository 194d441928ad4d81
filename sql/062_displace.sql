-- What a pass tells to stop: victims of a preemption, and what is moved off drained hosts and workers.
-- Locks: gangs by id, jobs by id, worker rows for key share, all with skip locked: what is busy is left to the next pass.

-- What is drained and fits elsewhere: its own places there count as free, those on what is drained are closed anyway.
create function gangq.moves_on(b gangq.board, spare gangq.spare) returns setof gangq.decision
language plpgsql immutable as $$
#variable_conflict use_column
declare
  r gangq.spare := moves_on.spare;
  d gangq.decision;
  k integer;
  counts integer[];
  seats integer[];
  rooms integer[];
  shape integer;
  at integer;
  need jsonb;
  w integer;
  moved integer := 0;
begin
  for i in 1 .. coalesce(cardinality(b.move_units), 0) loop
    exit when moved >= 64;
    k := b.move_kind[i];
    d := null;
    d.action := 'move';
    if k is not null then
      counts := array(select v.value::integer from jsonb_array_elements_text(b.move_counts[i]) with ordinality as v(value, n) order by v.n);
      seats := gangq.seat_spare(b, k, counts, gangq.without(b, gangq.first_held(b, array[b.move_units[i]]), r));
      d.gang_id := b.move_units[i];
      d.kind_id := b.kind_ids[k];
      d.members := counts;
    else
      shape := b.move_shape[i];
      rooms := gangq.rooms(b, shape, r.slots, r.memory, r.mcpus, r.held, r.kept_slots, r.kept_memory, r.kept_mcpus, r.kept_gpus);
      seats := array(select x.n::integer from unnest(rooms) with ordinality as x(room, n) where x.room > 0 order by x.room, x.n limit 1);
      d.victims := array[b.move_units[i]];
    end if;
    continue when coalesce(seats, '{}') = '{}';
    need := case when k is not null then gangq.need_of(b, k, counts, seats)
      else jsonb_build_array(jsonb_build_array(seats[1], 1, b.shape_memory[shape], b.shape_mcpus[shape], b.shape_gpus[shape])) end;
    d.incarnations := array(select b.worker_ids[s.w] from unnest(seats) with ordinality as s(w, n) order by s.n);
    d.kept := (select jsonb_agg(jsonb_build_array(b.worker_ids[(v.value ->> 0)::integer], v.value -> 1, v.value -> 2, v.value -> 3, v.value -> 4) order by v.n)
      from jsonb_array_elements(need) with ordinality as v(value, n));
    for at in 0 .. jsonb_array_length(need) - 1 loop
      w := (need -> at ->> 0)::integer;
      r.kept_slots[w] := r.kept_slots[w] + (need -> at ->> 1)::integer;
      r.kept_memory[w] := r.kept_memory[w] + (need -> at ->> 2)::bigint;
      r.kept_mcpus[w] := r.kept_mcpus[w] + (need -> at ->> 3)::bigint;
      r.kept_gpus[w] := r.kept_gpus[w] + (need -> at ->> 4)::integer;
    end loop;
    moved := moved + 1;
    return next d;
  end loop;
end $$;
comment on function gangq.moves_on is
  'Internal. What runs, or is about to, on drained hosts and workers and would fit elsewhere, with what is to be kept for it there. Gangs in '
  'gang_id, a solo job in victims. As many members of each role as it has now.';

-- All or none of what one gang needs: if it, a victim or a worker is busy this moment or no longer what was seen, the next
-- pass decides again. Victims drain through the same path as any gang; what they leave is kept in this very commit.
create function gangq.displace_decided(ds gangq.decision[], digest text, t timestamptz) returns integer
language plpgsql as $$
#variable_conflict use_column
declare
  cfg gangq.settings;
  d gangq.decision;
  g gangq.live_gangs;
  units bigint[];
  gangs bigint[];
  jobs bigint[];
  workers bigint[];
  unit bigint;
  lost jsonb;
  why text;
  surplus bigint[];
  w record;
  done integer := 0;
begin
  select x.* into cfg from gangq.settings x;
  foreach d in array displace_decided.ds loop
    units := case when d.action = 'move' and d.gang_id is not null then array[d.gang_id] else d.victims end;
    lost := d.numbers -> 'lost_s';
    g := null;
    if d.action = 'preempt' then
      select x.* into g from gangq.live_gangs x where x.id = d.gang_id and x.state = 'blocked' and x.kind_id = d.kind_id for update skip locked;
      continue when not found;
    end if;
    -- A member alone: a surplus one of a gang that goes on without it, unless that gang has to go anyway.
    surplus := array(
      select x.id from gangq.live_jobs x where x.id in (select -u from unnest(units) as u where u < 0) and x.gang_id is not null order by x.id);
    units := array(
      select u.unit from unnest(units) with ordinality as u(unit, n)
      where -u.unit not in (select x.id from gangq.live_jobs x where x.id = any (surplus) and x.gang_id = any (units)) order by u.n);
    gangs := array(
      select u from unnest(units) as u where u > 0
      union select x.gang_id from gangq.live_jobs x where x.id = any (surplus) and -x.id = any (units) order by 1);
    continue when gangs <> array(
      select x.id from gangq.live_gangs x where x.id = any (gangs) and (x.state = 'running' or d.action = 'move' and x.state = 'reserved')
      order by x.id for update skip locked);
    jobs := array(
      select x.id from gangq.live_jobs x
      where (x.gang_id = any (gangs) or x.id = any (array(select -u from unnest(units) as u where u < 0)))
        and x.state not in ('done', 'failed', 'cancelled')
      order by x.id for update skip locked);
    continue when exists (
      select 1 from gangq.live_jobs x where x.gang_id = any (gangs) and x.id <> all (jobs))
      or (select count(*) from unnest(units) as u where u < 0) <> (
        select count(*) from gangq.live_jobs x where x.id = any (jobs) and -x.id = any (units) and x.state = 'running');
    workers := array(select distinct w from unnest(d.incarnations) as w order by w);
    continue when workers <> array(
      select i.id from gangq.incarnations i where i.id = any (workers) and i.ended_at is null order by i.id for key share skip locked);
    if surplus <> '{}' then
      begin
        for w in
          select x.gang_id, array_agg(x.id order by x.id) as ids from gangq.live_jobs x
          where x.id = any (surplus) and -x.id = any (units) group by x.gang_id order by x.gang_id
        loop
          if not gangq.shrink_gang(w.gang_id, w.ids, format('displaced by gang %s', d.gang_id)) then
            perform gangq.refuse('GQ004', format('gang %s cannot shrink any more', w.gang_id), 'The next pass decides again.');
          end if;
        end loop;
      exception when sqlstate 'GQ004' then
        continue;
      end;
    end if;
    foreach unit in array units loop
      if d.action = 'preempt' then
        why := format('displaced by gang %s', d.gang_id);
      else
        why := (
          select format('%s %s is drained: %s', c.kind, c.name, c.reason)
          from gangq.cordons c join gangq.incarnations i on case c.kind when 'host' then i.host else i.name end = c.name
          join gangq.live_jobs x on x.incarnation = i.id and (x.gang_id = unit or x.id = -unit)
          where c.drain order by c.kind, c.name limit 1);
        exit when why is null;  -- the drain was called off
      end if;
      if unit > 0 then
        perform gangq.drain(unit, '{}', case d.action when 'preempt' then 'preempt' else 'move' end, null, why, t);
        perform gangq.log_event(t, d.action, unit, (select x.epoch from gangq.live_gangs x where x.id = unit), reason => why,
          data => jsonb_strip_nulls(jsonb_build_object('for', case d.action when 'preempt' then d.gang_id end, 'lost_s', lost -> unit::text,
            'digest', displace_decided.digest)));
      elsif -unit = any (surplus) then
        perform gangq.log_event(t, 'preempt', x.gang_id, e.epoch, x.id, x.token, x.incarnation, reason => why, data => jsonb_strip_nulls(jsonb_build_object(
          'for', d.gang_id, 'lost_s', lost -> unit::text, 'digest', displace_decided.digest)))
        from gangq.live_jobs x join gangq.live_gangs e on e.id = x.gang_id where x.id = -unit;
      else
        perform gangq.stop_solo(x, why, jsonb_strip_nulls(jsonb_build_object(
          'for', case d.action when 'preempt' then d.gang_id end, 'lost_s', lost -> unit::text, 'digest', displace_decided.digest)), t)
        from gangq.live_jobs x where x.id = -unit;
      end if;
    end loop;
    continue when why is null;
    done := done + 1;
    if d.gang_id is not null then
      delete from gangq.plans p where p.gang_id = d.gang_id;
      delete from gangq.earmarks e where e.gang_id = d.gang_id;
      insert into gangq.earmarks (incarnation, gang_id, order_key, kind, until, slots, memory_mb, cpus, gpus)
      select (k.value ->> 0)::bigint, x.id, x.order_key, 'escrow', t + make_interval(secs => cfg.grace_s + cfg.ack_timeout_s + cfg.lease_s),
        (k.value ->> 1)::integer, (k.value ->> 2)::bigint, (k.value ->> 3)::numeric / 1000, (k.value ->> 4)::integer
      from gangq.live_gangs x cross join jsonb_array_elements(d.kept) as k where x.id = d.gang_id;
    end if;
  end loop;
  return done;
end $$;
comment on function gangq.displace_decided is
  'Internal. Carries out the preemptions and moves of a pass, uncharged, with an event for each unit told to stop, and keeps the places for whom '
  'they were meant. Returns how many decisions were carried out.';

create view gangq.preemptions as
select e.at, (e.data ->> 'for')::bigint as for_gang, e.gang_id, e.epoch, e.job_id, e.reason, (e.data ->> 'lost_s')::real as lost_s,
  e.data ->> 'digest' as digest
from gangq.events e where e.kind = 'preempt' and e.data ? 'for';
comment on view gangq.preemptions is
  'Who was displaced for whom: gang (gang_id, epoch), solo job (job_id) or surplus member of a gang that goes on (both), why, and lost_s: work since the last checkpoint, '
  'in seconds times devices.';

create function gangq.explain_preempting(gang_id bigint) returns table (detail text, numbers jsonb) language sql stable as $$
  select format('%s told to stop for it, the last %s s ago; %s workers are kept for it until %s',
      (select string_agg(coalesce('gang ' || v.gang_id, 'job ' || v.job_id), ', ' order by v.gang_id, v.job_id) from gangq.preemptions v
        where v.for_gang = explain_preempting.gang_id and v.at >= k.since), round(extract(epoch from gangq.now() - k.since)::numeric, 1), k.workers, k.until),
    jsonb_build_object('workers', k.workers, 'until', k.until, 'lost_s', (
      select sum(v.lost_s) from gangq.preemptions v where v.for_gang = explain_preempting.gang_id and v.at >= k.since))
  from (
    select x.workers, x.until, (select max(v.at) from gangq.preemptions v where v.for_gang = explain_preempting.gang_id and v.at >= x.kept_from) as since
    from (
      -- Of all that ever happened only what came after this was kept: with slack, should these settings have changed since.
      select count(*) as workers, max(e.until) as until,
        min(e.until) - make_interval(mins => 10, secs => (select 2 * (c.grace_s + c.ack_timeout_s + c.lease_s) from gangq.settings c)) as kept_from
      from gangq.earmarks e
      where e.gang_id = explain_preempting.gang_id and e.kind = 'escrow' and e.until > gangq.now()
      having count(*) > 0) x) k
  where k.since is not null
$$;
comment on function gangq.explain_preempting is 'Internal. Who was told to stop so that this gang can start, while their places are kept for it.';
