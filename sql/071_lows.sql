-- gangq.lows: from where on claims look for pending light jobs.
--
-- Problem: a transaction that is left open anywhere keeps the index entries of all jobs that were
-- claimed since. Each claim would step over all of them to find the first pending job.
-- Solution: a row of lows for a shape and priority. A claim begins at its low, not at the first
-- entry. So claims stay as fast through 240,000 dead entries.
-- Invariant: below low no job of this shape and priority is pending, or ever will be, but those
-- that have returned (live_jobs.returned), which have an index of their own.
--
-- New jobs get ascending places, but their transactions commit in any order: below the first
-- pending job an older submission may still appear. So low is raised in steps:
-- 1. A submission has its transaction id before it draws a place.
-- 2. A claim finds the first pending job at `first`, and stores that as `marked`. The row's xmin is
--    then younger than every submission that has drawn a place below `first`.
-- 3. A later claim whose horizon (the oldest transaction that had not ended when it looked) is not
--    older than that xmin knows that all those submissions have ended. What it finds pending is the
--    first there is: low becomes `marked`, or what it has found if that is lower.
--
-- Locks: the row 'lows' of lock_rows, nowait; then a row of lows.

-- Internal. The first key that a submission could have with the priority of this key.
create function gangq.low_start(key bigint) returns bigint language sql immutable
return (key >> 50 << 50) + gangq.first_pos();

-- Internal. The key of the first pending job of a shape from a key on, without the entries below
-- gangq.lows; null: none.
create function gangq.first_pending(shape_id integer, from_key bigint) returns table (key bigint)
language sql stable as $$
  select min(f.order_key)
  from (
    (select j.order_key from gangq.live_jobs j
    where j.shape_id = first_pending.shape_id and j.state = 'pending' and j.returned
      and j.order_key >= from_key
    order by j.order_key limit 1)
    union all
    select y.order_key
    from (
      select l.low, lead(l.start, 1, 9223372036854775807) over (order by l.start) as high
      from gangq.lows l where l.shape_id = first_pending.shape_id
      union all
      select 0, coalesce(min(l.start), 9223372036854775807)
      from gangq.lows l where l.shape_id = first_pending.shape_id) r
    cross join lateral (
      select j.order_key from gangq.live_jobs j
      where j.shape_id = first_pending.shape_id and j.state = 'pending'
        and j.order_key >= greatest(r.low, from_key) and j.order_key < r.high
      order by j.order_key limit 1) y) f
$$;

-- Internal. Step 3. first: the first pending job of this shape and priority, or the last position
-- given out. horizon: every older transaction had ended before first was looked up. The block with
-- the exception is a subtransaction. It gets a new transaction id when it locks.
create function gangq.raise_low(shape_id integer, first bigint, horizon xid8) returns void
language plpgsql as $$
begin
  perform from gangq.lock_rows x where x.name = 'lows' for update nowait;
  insert into gangq.lows as l (shape_id, start, low, marked)
  values (raise_low.shape_id, gangq.low_start(raise_low.first), gangq.low_start(raise_low.first),
    raise_low.first)
  on conflict on constraint lows_pkey do update
  set low = least(l.marked, excluded.marked), marked = excluded.marked
  -- All transactions up to the one that wrote this row had ended when the horizon was read.
  where age(raise_low.horizon::xid) <= age(l.xmin);
exception when lock_not_available then
  return;  -- Another session is raising one.
end $$;

-- Internal, for the tick. Raises low where nothing is pending: no claim finds a job there, so none
-- raises it. Returns how often it tried. Horizon and position are read before the jobs are.
create function gangq.raise_idle_lows() returns integer language plpgsql as $$
declare
  horizon constant xid8 := pg_snapshot_xmin(pg_current_snapshot());
  last_pos constant bigint := (
    select b.base + p.last_value from gangq.id_base() b cross join gangq.positions p);
begin
  return (
    select count(gangq.raise_low(l.shape_id, l.start + last_pos, horizon))
    from gangq.lows l
    where l.start + last_pos - l.low >= 256 and not exists (
      select from gangq.live_jobs j
      where j.shape_id = l.shape_id and j.state = 'pending'
        and j.order_key >= l.low and j.order_key <= l.start + last_pos));
end $$;
