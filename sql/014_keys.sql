-- What orders and tells apart: order keys, ids and tokens. Takes no locks.

-- Internal. Ascending key: higher priority first, then lower position. Priority and position in one
-- ascending bigint: 11 bits of inverted priority, 50 of position. One index column serves ORDER BY
-- and range conditions, and gangs compare with jobs.
create function gangq.order_key(priority integer, pos bigint) returns bigint
language sql immutable as $$ select ((1000 - priority)::bigint << 50) + pos $$;

-- Internal. The priority of an order key.
create function gangq.priority_of(key bigint) returns integer language sql immutable
return (1000 - (key >> 50))::integer;

-- Internal. The position of an order key: the lower, the older. The index live_gangs_by_age has the
-- same mask written out.
create function gangq.pos_of(key bigint) returns bigint language sql immutable
return key & 1125899906842623;

-- Internal. Positions start in the middle, with room in front.
create function gangq.first_pos() returns bigint language sql immutable
return 562949953421312;

-- A standby that is promoted may lack the last part of the primary's log: its sequences would give
-- out again what clients of the old primary have seen. So whatever a sequence gives is shifted by a
-- base that grows by 2^25 with every timeline: 14 minutes of replication lag at 38,000 claims a
-- second, and tokens under 2^53 for 4,000 failovers.
-- 1. The base is computed from the server's timeline and the row of gangq.sequence_base, which the
--    tick writes once a timeline. Until then every session computes the same base, and none waits.
-- 2. A timeline lower than the one written is a cluster restored from a dump: it counts as a step.
--
-- Internal. What every value of a sequence is shifted by on this timeline.
create function gangq.id_base() returns table (base bigint, timeline bigint)
language sql stable rows 1 as $$
  select s.base + 33554432 * case when n.timeline >= s.timeline then n.timeline - s.timeline
      else 1 end, n.timeline
  from gangq.sequence_base s
  cross join (
    select ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint
      as timeline offset 0) n
$$;

-- Internal, for gangq migrate --restored. What is given from now on is larger than all that was
-- given before, also after the backup that this database was restored from.
create function gangq.step_over() returns void language sql as $$
  update gangq.sequence_base s set base = b.base + 33554432, timeline = b.timeline
  from gangq.id_base() b
$$;

-- Internal. A position behind all others.
create function gangq.next_pos(base bigint) returns bigint language sql volatile as $$
  select gangq.first_pos() + (base + nextval('gangq.positions'::regclass))
$$;

-- Internal. An order key before all others of this priority.
create function gangq.front_key(priority integer) returns bigint language sql volatile as $$
  select gangq.order_key(front_key.priority,
    gangq.first_pos() - (b.base + nextval('gangq.positions'::regclass)))
  from gangq.id_base() b
$$;

-- Internal. Under 2^53, and larger than any before (base: gangq.id_base).
create function gangq.new_token(base bigint) returns bigint language sql volatile as $$
  select ((base + nextval('gangq.tokens'::regclass)) << 16) + floor(random() * 65536)::bigint
$$;
