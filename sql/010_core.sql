-- The small helpers every verb uses: the clock, the caller, errors, keys, tokens, events, wake-ups.
-- Takes no locks.
--
-- Comments. The comment right above a function, view or type is its comment in the database: what
-- it does, returns and raises. Above an empty comment line stands what only matters here: why it is
-- done this way. "Internal" is what no role may call.
--
-- Settings of functions. Verbs that run often set plan_cache_mode = force_generic_plan: PL/pgSQL
-- would plan their statements anew at every call, because a custom plan looks cheaper for arrays of
-- unknown length; at one job a call that is more than half of the cost. tests/sql/test_plans.py
-- holds the generic plans to account. Those that find jobs by id or key set enable_seqscan = off,
-- too: a session keeps the plans that it made while the queue was nearly empty. Whatever runs with
-- its owner's rights sets jit = off: such plans look expensive, and a server that can compile
-- queries did so at every call, over a second for a pass.
--
-- Search paths. A function with its owner's rights, and every PL/pgSQL function, runs with
-- search_path = pg_catalog, pg_temp: an empty path would look for types in pg_temp first. A SQL
-- function in quotes is inlined, and its names are looked up where it is used: none of those is
-- granted to a role. The few that views need have a body without quotes (return ...): its names
-- were looked up when it was created.

-- The database's clock, read once per verb. Tests replace this function as the schema's owner; no
-- setting moves it.
create function gangq.now() returns timestamptz language sql volatile
return pg_catalog.clock_timestamp();

-- `set role` to one of gangq's own roles gives rights and no name: limits and shares per submitter
-- cannot be evaded by it.
--
-- The role on whose behalf a verb runs, also inside security definer functions: the one set by `set
-- role`, and the login itself where none or one of gangq's own is set.
create function gangq.caller() returns text language sql stable
return case
  when current_setting('role') = any ('{none,gangq_viewer,gangq_submitter,gangq_worker,'
    'gangq_host,gangq_notifier,gangq_admin}'::text[])
  then session_user::text else current_setting('role') end;

-- Internal. What events say of who caused them: the login, and "login as role" where it had set
-- another role.
create function gangq.actor() returns text language sql stable
return session_user || coalesce(' as ' || nullif(gangq.caller(), session_user), '');

-- SQLSTATEs of class GQ, each one Python exception:
--   GQ001 invalid input           GQ002 no such job, gang, queue, worker or device
--   GQ003 stale token             GQ004 not allowed in this state
--   GQ005 incarnation has ended   GQ006 worker name is taken
--   GQ007 too large               GQ008 wrong isolation level
-- Retryable by nature and left as PostgreSQL raises them: 55P03 lock not available, 40P01 deadlock,
-- 40001.

-- Internal. A text, cut and saying so where it is longer.
create function gangq.shortened(said text, most integer) returns text language sql immutable as $$
  select case when length(said) > most then left(said, most) || ' [cut]' else said end
$$;

-- Internal. Raises a typed error whose hint says what to do; each has 2000 characters at most.
create function gangq.refuse(sqlstate text, message text, hint text default '') returns void
language plpgsql as $$
begin
  -- It may quote what was passed, and goes into the server's log.
  raise exception using errcode = sqlstate, message = gangq.shortened(message, 2000),
    hint = gangq.shortened(hint, 2000);
end $$;

-- Internal. Raises GQ002 for a job, gang, incarnation, worker or device. is_live: it may have
-- ended.
create function gangq.refuse_missing(what text, id text, is_live boolean default false)
returns void language plpgsql as $$
begin
  perform gangq.refuse('GQ002',
    format(case when what = any ('{worker,device}') then '%s %L %s' when what = 'gang'
      then '%s g%s %s' else '%s %s %s' end, what,
      coalesce(left(id, 200), 'null'),
      case when is_live then 'is not live' else 'does not exist' end),
    format(case when is_live then 'It has ended or never existed: see gangq.%ss.'
      else 'Look in gangq.%ss; what has ended is kept for its retention.' end,
      replace(what, 'incarnation', 'worker')));
end $$;

-- Internal. Up to three of the known names, those that share the most pairs of letters with a
-- mistyped one; null when none shares any.
create function gangq.nearest(name text, known text[]) returns text language sql immutable as $$
  with pairs(word, pair) as (
    select w.word, substr(lower(w.word), n, 2)
    from (
      select distinct k.word from unnest(nearest.known) as k(word)
      union
      select nearest.name) w
    cross join generate_series(1, greatest(length(w.word) - 1, 1)) n
  ),
  alike as (
    select p.word, count(distinct p.pair) as shared
    from pairs p
    where p.word <> nearest.name
      and p.pair in (select x.pair from pairs x where x.word = nearest.name)
    group by p.word order by 2 desc, length(p.word), 1 limit 3
  )
  select string_agg(a.word, ', ' order by a.shared desc, length(a.word), a.word) from alike a
$$;

-- Internal. Raises GQ002 for a name that is none of the known ones, naming those most like it.
create function gangq.refuse_unknown(what text, name text, known text[], hint text) returns void
language plpgsql as $$
begin
  -- A name has 200 characters at most. The comparison of a longer one would take time for each.
  perform gangq.refuse('GQ002', format('%s %L does not exist', what, coalesce(left(name, 200), ''))
    || coalesce('; there is ' || gangq.nearest(left(name, 200), known), ''), hint);
end $$;

-- Internal. Raises GQ001 for infinity and for years that some client cannot read.
create function gangq.check_moment(what text, at timestamptz) returns void
language plpgsql immutable as $$
begin
  if not (at >= '0002-01-01 00:00:00+00' and at < '9999-01-01 00:00:00+00') then
    perform gangq.refuse('GQ001', format('%s is %s', what, at),
      'It is a moment from the year 2 to the year 9998.');
  end if;
end $$;

-- Internal. Raises GQ001 for a negative limit.
create function gangq.check_most(most integer) returns void language plpgsql immutable as $$
begin
  if most < 0 then
    perform gangq.refuse('GQ001', format('most is %s', most),
      'It is how many at most: 0 or more, or null for no limit.');
  end if;
end $$;

-- Internal. Raises GQ007, naming the limit. Whatever a role can write has a bound. What a person or
-- a program asks for is refused beyond it; what must not fail, because it says how an attempt
-- ended, is cut and says so.
create function gangq.refuse_larger(what text, bytes bigint, most bigint) returns void
language plpgsql as $$
begin
  if bytes > most then
    perform gangq.refuse('GQ007',
      format('%s has %s bytes, and %s are the most', what, bytes, most),
      'Put large data in shared storage and pass its address.');
  end if;
end $$;

-- Internal. What was said, if it is not too large; else as much of its first keys as fits, and
-- under "cut" how large it was.
create function gangq.cut(said jsonb, most integer) returns jsonb language plpgsql immutable as $$
declare
  bytes integer := pg_column_size(cut.said);
begin
  if bytes is null or bytes <= most then
    return cut.said;
  end if;
  return (
    select jsonb_build_object('cut',
        format('it had %s bytes, and %s are the most', bytes, most))
      || coalesce(jsonb_object_agg(left(e.key, 100), case
        when jsonb_typeof(e.value) in ('number', 'boolean', 'null')
          and pg_column_size(e.value) < 100 then e.value
        when jsonb_typeof(e.value) <> 'string' then '"[cut]"'
        when length(e.value #>> '{}') <= most / 50 then e.value
        else to_jsonb(left(e.value #>> '{}', most / 100) || ' [cut]') end), '{}')
    from (
      select x.key, x.value
      from jsonb_each(case jsonb_typeof(cut.said) when 'object' then cut.said else '{}' end) x
      order by x.key = any ('{type,message,step,phase,reason,code,by}') desc, x.key limit 20) e);
end $$;

-- Internal. Whether each statement of this transaction sees what others committed before it.
create function gangq.reads_committed() returns boolean language sql stable
return current_setting('transaction_isolation') in ('read committed', 'read uncommitted');

-- Internal. claim, apply and tick count capacity after taking a lock; an older snapshot would count
-- wrongly.
create function gangq.require_read_committed(verb text) returns void language plpgsql stable as $$
begin
  if not gangq.reads_committed() then
    perform gangq.refuse('GQ008',
      format('%s needs isolation level READ COMMITTED, this transaction is %s', verb,
        upper(current_setting('transaction_isolation'))),
      'It must see what others committed while it waited for a lock. Call it on an autocommit '
      'connection.');
  end if;
end $$;

-- Internal. Ascending key: higher priority first, then lower position. Priority and position in one
-- ascending bigint: 11 bits of inverted priority, 50 of position. One index column serves ORDER BY
-- and range conditions, and gangs compare with jobs.
create function gangq.order_key(priority integer, pos bigint) returns bigint
language sql immutable as $$ select ((1000 - priority)::bigint << 50) + pos $$;

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

-- Internal. A position behind all others; they start in the middle, with room in front.
create function gangq.next_pos(base bigint) returns bigint language sql volatile as $$
  select 562949953421312 + (base + nextval('gangq.positions'::regclass))
$$;

-- Internal. A position before all others of the same priority.
create function gangq.front_pos(base bigint) returns bigint language sql volatile as $$
  select 562949953421312 - (base + nextval('gangq.positions'::regclass))
$$;

-- Internal. Under 2^53, and larger than any before (base: gangq.id_base).
create function gangq.new_token(base bigint) returns bigint language sql volatile as $$
  select ((base + nextval('gangq.tokens'::regclass)) << 16) + floor(random() * 65536)::bigint
$$;

-- Internal. Delay before the nth repetition: doubles from base_s to max_s, half of it random.
create function gangq.backoff(base_s real, max_s real, nth integer) returns interval
language sql volatile as $$
  select make_interval(secs => (0.5 + random() / 2)
    * least(max_s, base_s * power(2, least(greatest(nth, 1), 30) - 1)))
$$;

-- Internal. Appends one event in the transaction of what happened, and tells the notification
-- targets that want it.
create function gangq.log_event(
  at timestamptz, kind text, gang_id bigint default null, epoch integer default null,
  job_id bigint default null, token bigint default null, incarnation bigint default null,
  reason text default null, data jsonb default null
) returns void language plpgsql as $$
begin
  insert into gangq.events (id, at, kind, gang_id, epoch, job_id, token, incarnation, worker,
    reason, data, actor)
  values (
    (select b.base from gangq.id_base() b) + nextval('gangq.events_id_seq'::regclass),
    at, kind, gang_id, epoch, job_id, token, incarnation,
    (select i.name from gangq.incarnations i where i.id = incarnation),
    gangq.shortened(reason, 4000), gangq.cut(data, 262144), gangq.actor());
  -- The events of gangq.notification_kinds: most events are none of them, and cost no look there.
  if kind = any ('{crash_loop,end,quarantine,stuck,trip,update_halted}'::text[]) then
    perform gangq.tell(k.kind, log_event.at, log_event.gang_id, log_event.epoch, log_event.job_id,
      log_event.incarnation, log_event.reason, log_event.data)
    from gangq.notification_kinds k
    where k.event = log_event.kind and coalesce(log_event.data, '{}') @? k.holds::jsonpath;
  end if;
end $$;

-- Internal. Appends an event of this job and its claim.
create function gangq.log_job(
  t timestamptz, kind text, j gangq.live_jobs, reason text, data jsonb default null
) returns void language sql volatile as $$
  select gangq.log_event(t, kind, j.gang_id,
    (select g.epoch from gangq.live_gangs g where g.id = j.gang_id), j.id, j.token, j.incarnation,
    reason, data)
$$;

-- Wake-ups are hints. Channels: gangq_<incarnation> for one worker (payload claim, light, stop, go
-- or tick), gangq_wake for whoever sleeps (payload: the queue), gangq_tick for dedicated tickers.
-- Payloads are constants, so they coalesce.

-- Internal. Notifies each of these workers on its own channel.
create function gangq.wake(incarnations bigint[], what text) returns void
language sql volatile as $$
  select pg_notify('gangq_' || w.i, what)
  from (select distinct i from unnest(incarnations) i where i is not null) w
$$;

-- Internal. how = sleepers: takes as many sleepers off the list as there are jobs and notifies
-- those, or nobody, so a busy fleet never pays for NOTIFY's commit lock; commit: notifies at commit
-- whoever sleeps by then (in a caller's transaction the list would be stale); never: leaves it to
-- the poll.
create function gangq.wake_sleepers(queue text, jobs bigint, how text) returns void
language plpgsql as $$
declare
  woken bigint[];
begin
  if how = 'commit' then
    perform pg_notify('gangq_wake', queue);
  elsif how = 'sleepers' then
    with roused as (
      delete from gangq.sleepers s
      where s.incarnation = any (array(
        select z.incarnation from gangq.sleepers z where z.queues @> array[queue]
        order by z.since desc limit least(jobs, 64) for update skip locked))
      returning s.incarnation
    )
    select array_agg(r.incarnation) into woken from roused r;
    if woken is not null then
      perform gangq.wake(woken, 'light');
    end if;
  end if;
end $$;

-- Internal. This worker does not sleep, or has ended. Waits for nobody. A submission that is not
-- committed may be about to wake this worker: its row is left to that.
create function gangq.forget_sleeper(incarnation bigint) returns void language sql volatile as $$
  delete from gangq.sleepers s where s.incarnation = any (array(
    select z.incarnation from gangq.sleepers z
    where z.incarnation = forget_sleeper.incarnation for update skip locked))
$$;

-- Internal. When placed work waits (or always): asks any dedicated ticker and three live workers to
-- run the tick, so that one frozen process delays nothing.
create function gangq.wake_tick(always boolean default false) returns void language plpgsql
set enable_seqscan = off set jit = off as $$
declare
  heard timestamptz := gangq.now() - interval '15 seconds';
  first bigint;
begin
  if not (always or gangq.placed_waits()) then
    return;
  end if;
  perform pg_notify('gangq_tick', '');
  -- While a gang waits, the end of each job comes by here: the fleet is not read and sorted to
  -- choose three of it. The second query runs only where the first finds fewer; a join would read
  -- the incarnations from the first on.
  first := (
    select min(l.incarnation)
      + floor(random() * (max(l.incarnation) - min(l.incarnation) + 1))::bigint
    from gangq.leases l);
  perform gangq.wake(array(
    select n.incarnation
    from (
      (select l.incarnation from gangq.leases l
      where l.incarnation >= first and l.renewed_at > heard
        and (select i.ended_at is null from gangq.incarnations i where i.id = l.incarnation)
      order by l.incarnation limit 3)
      union all
      (select l.incarnation from gangq.leases l
      where l.incarnation < first and l.renewed_at > heard
        and (select i.ended_at is null from gangq.incarnations i where i.id = l.incarnation)
      order by l.incarnation limit 3)) n
    limit 3), 'tick');
end $$;

-- Internal. 1 gang, 2 gangs.
create function gangq.counted(n numeric, what text) returns text language sql immutable as $$
  select format('%s %s%s', n, what, case when n = 1 then '' else 's' end)
$$;

-- Internal. Single jobs of this shape wait now: placed ones ask for a tick, light ones wake workers
-- that sleep; how: see wake_sleepers.
create function gangq.wake_lane(shape_id integer, jobs bigint, how text) returns void
language plpgsql as $$
declare
  s record;
begin
  select z.queue, gangq.is_placed(z, gangq.placed_queues()) as placed into s
  from gangq.shapes z where z.id = wake_lane.shape_id;
  if s.placed then
    perform gangq.wake_tick(true);
  else
    perform gangq.wake_sleepers(s.queue, jobs, how);
  end if;
end $$;

-- Internal. From here on this transaction is ended when its client says nothing for 5 s. The tick
-- and a pass lock a row to the end of their transaction. A client that froze in a longer one would
-- stop all maintenance, so the server hangs up on it.
create function gangq.hang_up_soon() returns void language plpgsql as $$
begin
  if current_setting('idle_in_transaction_session_timeout')::interval
    not between interval '1 ms' and interval '5 s'
  then
    perform set_config('idle_in_transaction_session_timeout', '5s', true);
  end if;
end $$;
