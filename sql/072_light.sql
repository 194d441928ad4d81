-- Light jobs: the heads of the shapes that a worker serves, and the jobs that it takes.
-- Locks: pending jobs, with skip locked; then what raise_low (071) locks.

-- Internal. The shapes with a pending job, and all those of gangq.lows. Shapes are kept for ever.
-- Where there are many, those with a pending job are found by hopping along the index from shape to
-- shape, but not over the dead entries of the shapes in gangq.lows.
create function gangq.shapes_waiting() returns integer[] language plpgsql stable as $$
begin
  return array(
    with recursive known(id) as materialized (
      select distinct l.shape_id from gangq.lows l
      union
      select 2147483647
    ),
    waiting(id, until) as (
      select x.id, x.until
      from (
        select k.id as until, lag(k.id, 1, -2147483648) over (order by k.id) as after
        from known k) g
      cross join lateral (
        select j.shape_id as id, g.until from gangq.live_jobs j
        where j.state = 'pending' and j.shape_id > g.after and j.shape_id < g.until
        order by j.shape_id limit 1) x
      union all
      select x.id, w.until
      from waiting w
      cross join lateral (
        select j.shape_id as id from gangq.live_jobs j
        where j.state = 'pending' and j.shape_id > w.id and j.shape_id < w.until
        order by j.shape_id limit 1) x
    )
    select w.id from waiting w
    union all
    select k.id from known k where k.id < 2147483647);
end $$;

-- Internal. Of each of these shapes, the first light job from a key on that this worker may run.
-- Light jobs of a queue or a task that is paused wait; those of a queue with a limit or a fair
-- order are placed.
create function gangq.light_heads(me gangq.incarnations, shape_ids integer[], from_key bigint)
returns table (shape gangq.shapes, key bigint) language sql stable as $$
  select z, f.key
  from unnest(shape_ids) as x(id)
  join gangq.shapes z on z.id = x.id
  cross join lateral gangq.first_pending(z.id, from_key) f
  where gangq.serves(me, z) and f.key is not null and not gangq.is_placed(z, array(
      select q.name || '.' from gangq.queues_table q
      where q.paused or q.limited or q.policy = 'fair'))
    and z.task <> all (array(select p.task from gangq.task_pauses p))
$$;

-- Internal. Up to so many light jobs that this worker serves start on it: by priority, first in
-- first out within one, whatever their shape.
create function gangq.take_light(
  me gangq.incarnations, request_id uuid, most integer, shape_ids integer[], base bigint,
  t timestamptz
) returns setof gangq.claim_row language plpgsql as $$
declare
  horizon constant xid8 := pg_snapshot_xmin(pg_current_snapshot());
  head record;
  s gangq.shapes;
  from_key bigint := 0;
  looked_from bigint;
  found_at tid[];
begin
  if cardinality(shape_ids) > 32 then
    shape_ids := gangq.shapes_waiting();
  end if;
  -- Of the shape whose first job is next, the jobs up to where the next shape's first job stands.
  -- Then all before that key has been looked at, and the next look begins there.
  while most > 0 and from_key is not null loop
    looked_from := from_key;
    select h.shape, h.key, lead(h.key) over (order by h.key) as next, coalesce((
      select l.low from gangq.lows l
      where l.shape_id = (h.shape).id and l.start = gangq.low_start(h.key)),
      gangq.low_start(h.key)) as low
    into head
    from gangq.light_heads(me, shape_ids, from_key) h
    order by h.key limit 1;
    exit when not found;
    s := head.shape;
    -- Below low only jobs that have returned: the dead entries there are not stepped over.
    from_key := least(head.next, case when head.low > head.key then head.low end);
    select array_agg(p.ctid) into found_at
    from (
      select j.ctid from gangq.live_jobs j
      where j.shape_id = s.id and j.state = 'pending'
        and (head.low <= head.key or j.returned)
        and j.order_key >= head.key and j.order_key < coalesce(from_key, 9223372036854775807)
      order by j.order_key limit most for update skip locked) p;
    if found_at is not null then
      most := most - cardinality(found_at);
      -- In the order found, because each is looked up by itself; a test holds the plan to that.
      return query
      update gangq.live_jobs j set state = 'running', incarnation = me.id,
        token = gangq.new_token(base), light = true, attempts = j.attempts + 1, claimed_at = t,
        due_at = null, request_id = take_light.request_id
      from unnest(found_at) as w(ctid) where j.ctid = w.ctid
      returning j.id, j.token, j.state, s.queue, s.task, j.payload, j.attempts::integer,
        j.max_attempts::integer, j.priority::integer, j.budget_s, null::bigint, null::integer,
        null::integer, null::integer, null::integer,
        -- Only a job that ran before has saved anything.
        case when j.final_token is not null then (
          select max(c.step) from gangq.checkpoints c where c.job_id = j.id) end,
        '[]'::jsonb, j.submitted_at, s.model, true, j.trace, j.array_index;
    end if;
    -- low is raised only after a look that began at it: one that began higher can miss a job whose
    -- claim is rolled back.
    if looked_from <= head.low and head.key - head.low >= 256 then
      perform gangq.raise_low(s.id, head.key, horizon);
    end if;
  end loop;
end $$;
