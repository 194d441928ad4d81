-- board: what a decision is made from, as JSON, in one snapshot: what waits, what is placed, the
-- workers and the queues. Its fields are those of gangq.placement.board in Python. Takes no locks.
--
-- Moments are seconds since 1970, processors thousandths. A field that has its default is left out.
--
-- The functions make json, because it is text: jsonb was copied into each larger part, half of the
-- time.

-- Internal. A rate on a board; null: there is none.
create function gangq.board_rate(rate text, full_at timestamptz) returns json
language sql stable as $$
  select json_build_object('said', board_rate.rate, 'starts', r.starts,
    'every_s', extract(epoch from r.every)::float8,
    'full_at', gangq.seconds(board_rate.full_at))
  from gangq.rate_of(board_rate.rate) r where board_rate.rate is not null
$$;

-- Internal. The queues of a board. A job that took a light slot before its queue had a limit counts
-- for that limit.
create function gangq.board_queues() returns json language plpgsql stable as $$
begin
  return (
    with light as materialized (
      select s.queue, count(*) as jobs
      from gangq.leases l
      join gangq.live_jobs j on j.incarnation = l.incarnation and j.light
      join gangq.shapes s on s.id = j.shape_id
      where gangq.placed_queues() <> '{}'
      group by s.queue
    )
    select json_agg(json_build_object(
      'name', q.name, 'paused', q.paused, 'policy', q.policy, 'weight', q.weight::float8,
      'maximum', q.maximum, 'guaranteed', q.guaranteed, 'submitter_maximum', q.submitter_maximum,
      'max_gangs', q.max_running_gangs, 'max_jobs', q.max_running_jobs, 'displaces', q.preempts,
      'light_jobs', coalesce(l.jobs, 0), 'rate', gangq.board_rate(q.rate, q.full_at))
      order by q.name)
    from gangq.queues_table q left join light l on l.queue = q.name);
end $$;

-- Internal. Seats that are kept for an ask while others stop for it. They lapse when one of their
-- workers has ended.
create function gangq.board_kept(t timestamptz) returns json language plpgsql stable as $$
begin
  return (
    select json_agg(json_build_object('ask', p.ask,
      'starts_at', gangq.seconds(least(p.starts_at, t + make_interval(secs => c.grace_s))),
      'holds', p.seats) order by p.ask)
    from gangq.plans p cross join gangq.settings c
    where p.kept and p.starts_at > t and not exists (
      select 1 from jsonb_array_elements(p.seats) as x(value)
      left join gangq.incarnations i
        on i.id = (x.value ->> 'worker')::bigint and i.ended_at is null
      where i.id is null));
end $$;

-- Internal. The places of a board. job: which runs there; ended: that has ended, and the place is
-- to be closed.
create function gangq.board_places() returns json language plpgsql stable as $$
begin
  return (
    select json_agg(json_build_object('id', p.id, 'worker', p.incarnation, 'kind', -p.shape_id,
      'devices', p.device_ids,
      'job', case when p.job_id is not null then coalesce('j' || j.id, 'ended') end)
      order by p.id)
    from gangq.places p left join gangq.live_jobs j on j.id = p.job_id and j.token = p.token);
end $$;

-- 1. The gangs that wait and are shown, their kinds, and the kinds that have more (cut).
-- 2. The asks of single jobs add their kinds, and those that have more.
-- 3. The asks of the gangs come before those of single jobs.
-- 4. What is to be moved adds its kinds.
-- 5. The kinds say which classes of workers are told apart.
-- 6. The board.
-- An aggregate of no rows is null: here it means none, and null || x is x. The board leaves it out.
--
-- What a decision is made from, in one snapshot: workers with all they offer, units (what is
-- placed), kinds and asks (what waits; of each kind the first 200, fewer where there are many,
-- 1,000 in all, for which submitters take turns), queues. Reads only.
create function gangq.board() returns json language plpgsql stable as $$
declare
  t constant timestamptz := gangq.now();
  -- One more than could be placed: then the pass says why the rest waits.
  most constant integer := 1 + least(200, greatest(0, (
    select sum(i.slots) from gangq.incarnations i where i.ended_at is null) - (
    select count(*) from gangq.placed_jobs())));
  gangs bigint[];
  kinds integer[];
  cut integer[];
  asks json[];
  moves jsonb;
  workers bigint[];
  classes integer[];
  examples bigint[];
begin
  -- 1.
  with shown as materialized (
    select g.* from gangq.board_gangs(t, 200, 1000) g
  )
  select array(select s.id from shown s), array_agg(k.kind_id),
    array_agg(k.kind_id) filter (where k.cut)
  into gangs, kinds, cut
  from (
    select s.kind_id, count(s.most) >= min(s.most) as cut from shown s group by s.kind_id) k;
  -- 2.
  select array_agg(s.ask), kinds || array_agg(s.kind_id),
    cut || array_agg(distinct s.kind_id) filter (where s.jobs >= most)
  into asks, kinds, cut
  from gangq.board_single_asks(most) s;
  -- 3.
  asks := array(select a from gangq.board_asks(t, gangs) as a) || asks;
  -- 4.
  select jsonb_object_agg(m.unit, m.ask), kinds || array_agg(m.kind_id) into moves, kinds
  from gangq.board_moves() m;
  -- 5. Each once: what is moved and what waits may be of one kind.
  kinds := array(select distinct k from unnest(kinds) as k);
  select array_agg(w.id), array_agg(w.class), array_agg(distinct w.example order by w.example)
  into workers, classes, examples
  from gangq.worker_classes(kinds) w;
  -- 6.
  return (
    select json_strip_nulls(json_build_object(
      'format', 1, 'now', gangq.seconds(t), 'levels', c.topology, 'grace_s', c.grace_s::float8,
      'warm_s', c.warm_s::float8,
      'planned_starts', c.reservations, 'victims', c.preemptions_per_pass,
      'pass_number', (select l.runs from gangq.lock_rows l where l.name = 'pass'),
      'asked', (select d.asked from gangq.decider d), 'recorded', c.record_decisions, 'cut', cut,
      'queues', gangq.board_queues(), 'limits', (
        select json_object_agg(k.name, k.most order by k.name) from gangq.limit_keys k
        -- Batches that have ended keep their keys for weeks.
        where k.batch_id is null or k.batch_id = any (array(
          select b.id from gangq.batches_table b where b.finished_at is null))),
      'rates', (
        select json_object_agg(k.name, gangq.board_rate(k.rate, k.full_at) order by k.name)
        from gangq.limit_keys k where k.rate is not null),
      'workers', gangq.board_workers(t, workers, classes),
      'units', gangq.board_units(t, coalesce(moves, '{}')), 'kept', gangq.board_kept(t),
      'places', gangq.board_places(), 'kinds', gangq.board_kinds(kinds, examples), 'asks', asks))
    from gangq.settings c);
end $$;
