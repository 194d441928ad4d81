-- The small helpers every verb uses: the clock, the caller, errors, keys, tokens, events, wake-ups.
-- Takes no locks.
--
-- The verbs that run often set plan_cache_mode = force_generic_plan: left to itself PL/pgSQL plans their
-- statements anew at every call, because arrays of unknown length make a custom plan look cheaper; at one job a call
-- that planning is more than half of the whole cost. tests/sql/test_plans.py holds the generic plans to account.
-- Those that find jobs by id or key also set enable_seqscan = off: a session that made its plans while the queue was
-- nearly empty would keep them, and scan the whole table, long after it has grown.
-- Whatever runs with its owner's rights sets jit = off: a planner that cannot know how long an array is, or is forbidden a scan,
-- takes a few rows for very many, and a server that can compile queries did so at every call: over a second for a pass of placement.

create function gangq.now() returns timestamptz language sql volatile as
$$ select pg_catalog.clock_timestamp() $$;
comment on function gangq.now() is
  'The database''s clock, read once per verb. Tests replace this function as the schema''s owner; no setting moves it.';

create function gangq.caller() returns text language sql stable as
$$ select coalesce(nullif(pg_catalog.current_setting('role'::text), 'none'), session_user::text) $$;
comment on function gangq.caller() is 'The login or role on whose behalf a verb runs, also inside security definer functions.';

-- SQLSTATEs of class GQ, each one Python exception:
--   GQ001 invalid input           GQ002 no such job, gang, queue, worker or device
--   GQ003 stale token             GQ004 not allowed in this state
--   GQ005 incarnation has ended   GQ006 worker name is taken
--   GQ007 too large               GQ008 wrong isolation level
-- Retryable by nature and left as PostgreSQL raises them: 55P03 lock not available, 40P01 deadlock, 40001.

create function gangq.refuse(sqlstate text, message text, hint text default '') returns void language plpgsql
set search_path = '' as $$
begin
  raise exception using errcode = refuse.sqlstate, message = refuse.message, hint = refuse.hint;
end $$;
comment on function gangq.refuse(text, text, text) is 'Internal. Raises a typed error whose hint says what to do.';

create function gangq.require_read_committed(verb text) returns void language plpgsql stable
set search_path = '' as $$
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    perform gangq.refuse('GQ008',
      format('%s needs isolation level READ COMMITTED, this transaction is %s', verb,
        upper(current_setting('transaction_isolation'))),
      'It must see what others committed while it waited for a lock. Call it on an autocommit connection.');
  end if;
end $$;
comment on function gangq.require_read_committed(text) is
  'Internal. claim, admit and tick count capacity after taking a lock; an older snapshot would count wrongly.';

-- Priority and position in one ascending bigint: 11 bits of inverted priority, 50 of position. One index column
-- then serves ORDER BY and range conditions both, and a gang's place can be compared with a job's.
create function gangq.order_key(priority integer, pos bigint) returns bigint language sql immutable as
$$ select ((1000 - priority)::bigint << 50) + pos $$;
comment on function gangq.order_key(integer, bigint) is 'Internal. Ascending key: higher priority first, then lower position.';

create function gangq.next_pos() returns bigint language sql volatile as
$$ select 562949953421312 + nextval('gangq.positions'::regclass) $$;
comment on function gangq.next_pos() is 'Internal. A position behind all others; positions start in the middle so that there is room in front.';

create function gangq.front_pos() returns bigint language sql volatile as
$$ select 562949953421312 - nextval('gangq.positions'::regclass) $$;
comment on function gangq.front_pos() is 'Internal. A position before all others of the same priority.';

create function gangq.new_token() returns bigint language sql volatile as
$$ select (nextval('gangq.tokens'::regclass) << 16) + floor(random() * 65536)::bigint $$;
comment on function gangq.new_token() is
  'Internal. Monotone, under 2^53, and not repeated even when an asynchronous failover loses the sequence''s tail.';

create function gangq.backoff(base_s real, max_s real, nth integer) returns interval language sql volatile as
$$ select make_interval(secs =>
     least(max_s, base_s * power(2, least(greatest(nth, 1), 30) - 1)) * (0.5 + random() / 2)) $$;
comment on function gangq.backoff(real, real, integer) is
  'Internal. Delay before the nth repetition: doubles from base_s to max_s, with half of it random.';

create function gangq.log_event(
  at timestamptz, kind text, gang_id bigint default null, epoch integer default null, job_id bigint default null,
  token bigint default null, incarnation bigint default null, reason text default null, data jsonb default null
) returns void language plpgsql set search_path = '' as $$
begin
  insert into gangq.events (at, kind, gang_id, epoch, job_id, token, incarnation, worker, reason, data)
  values (
    log_event.at, log_event.kind, log_event.gang_id, log_event.epoch, log_event.job_id, log_event.token,
    log_event.incarnation, (select i.name from gangq.incarnations i where i.id = log_event.incarnation),
    log_event.reason, log_event.data);
end $$;
comment on function gangq.log_event(timestamptz, text, bigint, integer, bigint, bigint, bigint, text, jsonb) is
  'Internal. Appends one event in the transaction of what happened.';

-- Wake-ups are hints. Channels: gangq_<incarnation> for one worker (payload claim, stop, go or tick), gangq_wake for
-- whoever sleeps (payload: the queue), gangq_tick for dedicated tickers. Payloads are constants, so they coalesce.

create function gangq.wake(incarnations bigint[], what text) returns void language sql volatile as
$$ select pg_notify('gangq_' || i, what) from (select distinct i from unnest(incarnations) i where i is not null) w $$;
comment on function gangq.wake(bigint[], text) is 'Internal. Notifies each of these workers on its own channel.';

create function gangq.wake_sleepers(queue text, jobs bigint, how text) returns void language plpgsql
set search_path = '' as $$
declare
  woken bigint[];
begin
  if how = 'commit' then
    perform pg_notify('gangq_wake', queue);
  elsif how = 'sleepers' then
    with roused as (
      delete from gangq.sleepers s
      where s.incarnation = any (array(
        select z.incarnation from gangq.sleepers z
        where z.queues @> array[wake_sleepers.queue]
        order by z.since desc
        limit least(wake_sleepers.jobs, 64)
        for update skip locked))
      returning s.incarnation
    )
    select array_agg(r.incarnation) into woken from roused r;
    if woken is not null then
      perform gangq.wake(woken, 'claim');
    end if;
  end if;
end $$;
comment on function gangq.wake_sleepers(text, bigint, text) is
  'Internal. how = sleepers: takes as many sleepers off the list as there are jobs and notifies those, or nobody, so a '
  'busy fleet never pays for NOTIFY''s commit lock; commit: notifies at commit whoever sleeps by then (in a caller''s '
  'transaction the list would be stale); never: leaves it to the poll.';

create function gangq.wake_tick(always boolean default false) returns void language plpgsql
set search_path = '' set enable_seqscan = off set jit = off as $$
declare
  heard timestamptz;
  first bigint;
  asked bigint[];
begin
  if always or exists (select 1 from gangq.live_gangs g where g.state = 'blocked') then
    perform pg_notify('gangq_tick', '');
    -- While a gang waits, one job's end after the other comes by here: the fleet is not read and sorted to choose three of it.
    heard := gangq.now() - interval '15 seconds';
    first := (
      select x.least + floor(random() * (x.most - x.least + 1))::bigint
      from (select (select min(l.incarnation) from gangq.leases l) as least, (select max(l.incarnation) from gangq.leases l) as most) x);
    asked := array(
      select l.incarnation from gangq.leases l
      where l.incarnation >= first and l.renewed_at > heard
        and (select i.ended_at is null from gangq.incarnations i where i.id = l.incarnation)  -- a join would read them from the first on
      order by l.incarnation limit 3);
    if cardinality(asked) < 3 then
      asked := asked || array(
        select l.incarnation from gangq.leases l
        where l.incarnation < first and l.renewed_at > heard
          and (select i.ended_at is null from gangq.incarnations i where i.id = l.incarnation)
        order by l.incarnation limit 3 - cardinality(asked));
    end if;
    perform gangq.wake(asked, 'tick');
  end if;
end $$;
comment on function gangq.wake_tick(boolean) is
  'Internal. When a gang waits (or always): asks three live workers, neighbours in the order of registration, and any dedicated ticker to run the tick, so that one frozen '
  'process delays nothing. Never runs admit itself.';
