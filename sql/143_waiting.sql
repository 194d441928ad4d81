-- The view of all that waits, with the reason. It takes no locks.

-- What waits as one, and is judged as one, is an ask, as on a board (056): a gang, or the single
-- jobs of one shape and priority. Without sequential scans: the rows are read from indexes, however
-- many there are.
--
-- Internal, for the view waiting.
create function gangq.what_waits() returns table (
  kind text, id bigint, queue text, task text, priority smallint, size integer, state text,
  since timestamptz, why text, gate text, starts_at timestamptz
) language sql stable set enable_seqscan = off as $$
  with jobs as (
    -- Counted in the index of claims, whose order begins with the priority.
    select z.shape_id, p.priority, p.jobs, 'pending' as state, h.submitted_at as since,
      null::timestamptz as due
    from gangq.pending_shapes z
    cross join lateral (
      select gangq.priority_of(min(j.order_key))::smallint as priority, count(*)::integer as jobs,
        min(j.order_key) as head
      from gangq.live_jobs j
      where j.shape_id = z.shape_id and j.state = 'pending' group by j.order_key >> 50) p
    join lateral (
      select j.submitted_at from gangq.live_jobs j
      where j.shape_id = z.shape_id and j.state = 'pending' and j.order_key = p.head
      limit 1) h on true
    union all
    select j.shape_id, j.priority, count(*)::integer, j.state, min(j.submitted_at), min(j.due_at)
    from gangq.live_jobs j where j.state = 'scheduled' group by j.shape_id, j.state, j.priority
    union all
    select j.shape_id, j.priority, count(*)::integer, j.state, min(j.submitted_at), null
    from gangq.live_jobs j where j.state = 'waiting' and j.gang_id is null
    group by j.shape_id, j.state, j.priority
  ),
  asks as (
    select 'gang' as kind, g.id, 'g' || g.id as ask, g.kind_id, g.shape_id, g.priority, g.size,
      g.state, g.submitted_at as since, g.not_before as due,
      coalesce(g.note, 'waits to be judged') as otherwise
    from gangq.live_gangs g where g.state in ('waiting', 'blocked')
    union all
    select 'job', null, format('k%s/%s', x.shape_id, x.priority), -x.shape_id, x.shape_id,
      x.priority, x.jobs, x.state, x.since, x.due, 'waits for a free worker'
    from jobs x
  )
  select a.kind, a.id, s.queue, s.task, a.priority, a.size, a.state, a.since,
    case
      when a.state = 'waiting' then 'waits for other jobs'
      when a.state = 'scheduled'
        then 'due later, the first in ' || gangq.span(a.due, c.t)
      when a.due > c.t then 'backing off for ' || gangq.span(a.due, c.t)
      when a.state = 'pending' and gangq.paused_queue(s.queue) then 'its queue is paused'
      when a.state = 'pending' and gangq.paused_task(a.kind_id) is not null
        then 'its task is paused'
      when p.starts_at is not null
        then format('place %s of those with a planned start, in %s', p.place,
            gangq.span(p.starts_at, c.t))
          || coalesce(', ' || coalesce(o.follows, v.follows), '')
      else coalesce(case when a.state = 'pending' then gangq.infeasible(a.shape_id, 1) end,
        o.why, v.why, a.otherwise) end,
    coalesce(o.gate, v.gate), p.starts_at
  from asks a
  cross join (select gangq.now() as t, gangq.placed_queues() as placed offset 0) c
  -- Looked up one by one: shapes are kept for ever. Of light jobs a verdict or plan may be left
  -- from when their queue had limits.
  cross join lateral (
    select z.queue, z.task,
      a.kind = 'gang' or a.state = 'pending' and gangq.is_placed(z, c.placed) as judged
    from gangq.shapes z where z.id = a.shape_id offset 0) s
  left join gangq.verdicts v on s.judged and v.kind_id = a.kind_id and v.ask = ''
  left join gangq.verdicts o on s.judged and o.kind_id = a.kind_id and o.ask = a.ask
  left join gangq.plans p on s.judged and p.ask = a.ask and not p.kept
$$;

-- What waits, and why: one row per gang, one per kind and priority of solo jobs (size: how many;
-- since: when the first of them was submitted). gate: what the last pass found; starts_at: its
-- planned start, if it has one. explain_gang and explain_job say more.
create view gangq.waiting as select w.* from gangq.what_waits() w;
