-- Rates: at most so many starts in a period, of a queue or of a limit key.
-- Locks: count_starts the rows that lock_limited (028) has locked.
--
-- A rate of N in P is a bucket of N starts that gets one more each P/N (GCRA). So at most N start
-- at once, then one each P/N; in a period of the length P after idle time up to 2N. All that is
-- kept is full_at, the moment when the bucket is full again: every start moves it on by P/N. A
-- start is counted when a place is opened for a job (add_place) or seats are reserved for members
-- (reserve_gang), in the transaction that does it, under the row's lock. What then does not run is
-- counted all the same: given back later, a start could be used twice.

-- Internal. A rate as numbers. starts: the size of the bucket; every: in which time it gets one
-- more.
create function gangq.rate_of(rate text, out starts integer, out every interval)
language sql immutable as $$
  select n.starts, make_interval(secs => n.seconds / n.starts)
  from (
    select split_part(rate_of.rate, '/', 1)::integer as starts,
      coalesce(substring(rate_of.rate from '/([0-9]+)')::float8, 1)
        * case right(rate_of.rate, 1)
          when 's' then 1 when 'm' then 60 when 'h' then 3600 when 'd' then 86400 end as seconds) n
$$;

-- Internal. When a bucket that is empty now is full again; null: no rate.
create function gangq.empty_until(rate text) returns timestamptz language sql stable as $$
  select gangq.now() + r.starts * r.every from gangq.rate_of(empty_until.rate) r
$$;

-- Internal. full_at, not before now. A moment that no start can have made means that the clock was
-- set back: how full the bucket is is unknown, and it counts as full.
create function gangq.filled_at(rate text, full_at timestamptz) returns timestamptz
language sql stable as $$
  select case
    when filled_at.full_at > gangq.empty_until(filled_at.rate) + interval '1 s' then gangq.now()
    else greatest(filled_at.full_at, gangq.now()) end
$$;

-- Internal. The rates that count the starts of such jobs: of the limit key, and of the queues on
-- the path.
create function gangq.rates_on(queue text, key text)
returns table (queue text, key text, rate text, full_at timestamptz) language sql stable as $$
  select null, k.name, k.rate, k.full_at
  from gangq.limit_keys k where k.name = rates_on.key and k.rate is not null
  union all
  select q.name, null, q.rate, q.full_at
  from gangq.queues_table q
  where q.rate is not null and q.name = any (gangq.queue_path(rates_on.queue))
$$;

-- Internal, for limit_hit. The first rate of which so many starts are not left. It reads the clock
-- after lock_limited: a moment from before the wait for the lock would be earlier than the last
-- start.
create function gangq.rate_hit(queue text, key text, starts integer) returns jsonb
language plpgsql stable set enable_seqscan = off as $$
begin
  return (
    select jsonb_strip_nulls(jsonb_build_object('gate', 'rate', 'queue', x.queue, 'key', x.key,
      'resource', 'starts', 'limit', r.starts, 'asked', rate_hit.starts,
      'used', ceil(extract(epoch from n.full_at - gangq.now()) / extract(epoch from r.every))))
    from gangq.rates_on(rate_hit.queue, rate_hit.key) x
    cross join lateral gangq.rate_of(x.rate) r
    cross join lateral gangq.filled_at(x.rate, x.full_at) as n(full_at)
    where n.full_at + rate_hit.starts * r.every > gangq.empty_until(x.rate)
    order by x.key, length(x.queue) desc limit 1);
end $$;

-- Internal. So many of such jobs start now: limit_hit has found nothing, under the same locks.
create function gangq.count_starts(queue text, key text, starts integer) returns void
language plpgsql set enable_seqscan = off as $$
begin
  -- Not from rates_on: a plan from when there were few keys would join all of them.
  update gangq.limit_keys k
  set full_at = (
    select gangq.filled_at(k.rate, k.full_at) + count_starts.starts * r.every
    from gangq.rate_of(k.rate) r)
  where k.name = count_starts.key and k.rate is not null;
  update gangq.queues_table q
  set full_at = (
    select gangq.filled_at(q.rate, q.full_at) + count_starts.starts * r.every
    from gangq.rate_of(q.rate) r)
  where q.name = any (gangq.queue_path(count_starts.queue)) and q.rate is not null;
end $$;
