-- keep_partitions, a step of the tick: history, events and output have a partition a day, and are
-- dropped a day at a time; forget deletes what nothing refers to any more; turn_requests forgets
-- the answers of submissions.
-- Locks: tick_state; each partitioned table as a whole; the rows that forget deletes; once an hour,
-- last, requests and requests_before. The tick waits for each of them, 100 ms at most.

-- Internal. What has a partition a day (UTC): key column, retention class, how long it is kept.
create function gangq.kept_by_day() returns table (name text, key text, class text, keep interval)
language sql stable as $$
  select p.name, p.key, p.class,
    case p.class when 'short' then s.retention_short else s.retention_long end
  from gangq.settings s cross join (values
    ('history_short', 'finished_at', 'short'), ('history_long', 'finished_at', 'long'),
    ('gang_history_short', 'finished_at', 'short'), ('gang_history_long', 'finished_at', 'long'),
    ('attempt_history', 'ended_at', 'long'), ('events', 'at', 'long'), ('passes', 'at', 'short'),
    ('evidence', 'at', 'long'), ('logs', 'at', 'short')) as p(name, key, class)
$$;

-- The only dynamic SQL is here and in what this calls: names of partitions cannot be parameters.
-- Each statement waits at most 100 ms for its lock and is tried again by a later tick. Bounds are
-- written and read in UTC, whatever the time zone of the session is.
--
-- Makes the partitions of today and the next two days and drops those past their retention, whole,
-- every ten minutes or at once; also forgets what nothing refers to any more, and answers of
-- submissions. Returns how many partitions were made.
create function gangq.keep_partitions(at_once boolean default false) returns integer
language plpgsql
set datestyle = 'ISO' set timezone = 'UTC' as $$
declare
  t timestamptz := gangq.now();
  parent record;
  day date;
  made integer := 0;
begin
  if not at_once and exists (
    -- After t: a clock that was ahead has been set back.
    select 1 from gangq.tick_state x
    where x.partitions_checked_at > t - interval '10 minutes' and x.partitions_checked_at <= t) then
    return 0;
  end if;
  update gangq.tick_state x set partitions_checked_at = t;
  for parent in
    select p.name, p.key, (t - p.keep) as until from gangq.kept_by_day() p
  loop
    for day in select t::date + n from generate_series(0, 2) n loop
      made := made + gangq.make_partition(parent.name, day)::integer;
    end loop;
    begin
      perform gangq.drop_partitions(parent.name, parent.until::date);
      perform gangq.keep_rest(parent.name, parent.key, parent.until);
    exception
      when lock_not_available then null;
    end;
  end loop;
  perform gangq.forget(t);
  perform gangq.turn_requests(t);
  return made;
end $$;

-- Internal, for keep_partitions. Makes the partition of a day if there is none. Returns whether it
-- did. Each day has a subtransaction of its own: rows that the default partition has caught on one
-- day must not cost the others theirs.
create function gangq.make_partition(parent text, day date) returns boolean language plpgsql as $$
declare
  part text := parent || '_' || to_char(day, 'YYYYMMDD');
begin
  if to_regclass('gangq.' || part) is not null then
    return false;
  end if;
  execute format('create table gangq.%I (like gangq.%I including defaults including constraints)',
    part, parent);
  execute format('alter table gangq.%I attach partition gangq.%I for values from (%L) to (%L)',
    parent, part, day::timestamptz, (day + 1)::timestamptz);
  execute format('comment on table gangq.%I is %L', part, parent || ' of ' || day || ' (UTC)');
  return true;
exception
  -- The lock is not to be had now, or rows of that day are in the default partition: they stay
  -- there.
  when lock_not_available or check_violation then return false;
end $$;

-- Internal, for keep_partitions. Drops the partitions of the days before this one. Raises 55P03.
create function gangq.drop_partitions(parent text, before date) returns void language plpgsql as $$
declare
  old record;
begin
  for old in
    select c.relname
    from pg_catalog.pg_inherits i
    join pg_catalog.pg_class c on c.oid = i.inhrelid
    where i.inhparent = ('gangq.' || parent)::regclass and c.relname ~ '_[0-9]{8}$'
      and to_date(right(c.relname, 8), 'YYYYMMDD') < before
  loop
    execute format('drop table gangq.%I', old.relname);
  end loop;
end $$;

-- Internal, for keep_partitions. Makes a default partition, and empties it once its last row is
-- past its time. Raises 55P03.
create function gangq.keep_rest(parent text, key text, until timestamptz) returns void
language plpgsql as $$
declare
  rest text := parent || '_rest';
  newest timestamptz;
begin
  if to_regclass('gangq.' || rest) is null then
    execute format('create table gangq.%I partition of gangq.%I default', rest, parent);
    execute format('comment on table gangq.%I is %L', rest,
      'Catches rows of days without a partition.');
  end if;
  execute format('select max(%I) from gangq.%I', key, rest) into newest;
  if newest < until then
    -- Asked again under the lock: a job may just have ended there.
    execute format('lock table gangq.%I in access exclusive mode', rest);
    execute format('select max(%I) from gangq.%I', key, rest) into newest;
    if newest < until then
      execute format('truncate gangq.%I', rest);
    end if;
  end if;
end $$;

-- Internal, for keep_partitions. Deletes rows about work and workers long over, all or, where
-- another transaction holds one of them, none: the partitions made and dropped so far stay. offset
-- 0: each is looked up by itself, so that no join reads all jobs.
create function gangq.forget(t timestamptz) returns void language plpgsql as $$
declare
  cfg gangq.settings;
begin
  select x.* into cfg from gangq.settings x;
  delete from gangq.incarnations i
  where i.ended_at < t - cfg.incarnation_retention
    and not exists (select 1 from gangq.live_jobs j where j.incarnation = i.id)
    and (i.quarantined is null and i.operator_taints = '{}' or exists (
      select 1 from gangq.incarnations n where n.name = i.name and n.id > i.id));
  delete from gangq.worker_names n where n.name = any (array(
    select z.name from gangq.worker_names z
    where not exists (select 1 from gangq.incarnations i where i.name = z.name)
    for update skip locked));
  -- An incarnation that ended keeps its lease as long as its jobs, and until half an hour after it
  -- is over: one that tripped has its devices withheld so long, and flagged (113) shows one that
  -- died.
  delete from gangq.leases l using gangq.incarnations i
  where i.id = l.incarnation and i.ended_at is not null
    and l.expires_at <= t - interval '30 minutes'
    and not exists (select 1 from gangq.live_jobs j where j.incarnation = i.id offset 0);
  -- What a last heartbeat brought of a job that had just ended.
  delete from gangq.progress p
  where p.beat_at < t - interval '10 minutes'
    and not exists (select 1 from gangq.live_jobs j where j.id = p.job_id offset 0);
  delete from gangq.retried r
  where not exists (
    select 1 from gangq.history h where h.job_id = r.job_id and h.finished_at = r.finished_at)
    and not exists (
      select 1 from gangq.gang_history h
      where h.gang_id = r.gang_id and h.finished_at = r.finished_at);
  delete from gangq.unique_keys k
  where (k.key, k.task, k.queue, k.login) in (
    select u.key, u.task, u.queue, u.login
    from gangq.unique_keys u
    where (u.kept_until <= t) is not false and not gangq.is_live(u)
    for update skip locked);
  perform gangq.forget_batches(t);
  -- What a transaction wrote while its target was being removed.
  delete from gangq.outbox o
  where o.target_id <> all (array(select x.id from gangq.notification_targets x));
  perform gangq.forget_counters(t - cfg.retention_long);
  delete from gangq.checkpoints c
  where c.saved_at < t - cfg.retention_long
    and not exists (select 1 from gangq.live_jobs j where j.id = c.job_id offset 0);
exception
  when lock_not_available then null;
end $$;

-- Internal. Once an hour exchanges requests and requests_before, emptied: an answer is kept for one
-- hour at least. Deleting the answers one by one would cost a submission as much again, and vacuum
-- after it. The lock waits for all submissions under way, 100 ms at most, and is held until the
-- tick commits: see gangq.answer_of. So this is its last step: only next_due and take_turn follow.
create function gangq.turn_requests(t timestamptz) returns void language plpgsql
set lock_timeout = '100ms' as $$
begin
  if exists (
    select 1 from gangq.tick_state x where x.requests_turned_at > t - interval '1 hour') then
    return;
  end if;
  lock table gangq.requests, gangq.requests_before in access exclusive mode;
  truncate gangq.requests_before;
  alter table gangq.requests_before rename to requests_emptied;
  alter table gangq.requests rename to requests_before;
  alter table gangq.requests_emptied rename to requests;
  update gangq.tick_state x set requests_turned_at = t;
exception
  when lock_not_available
    then null;  -- A transaction that has submitted is still open: a later tick does it.
end $$;

-- Names of partitions and sizes of files: no table is read.
--
-- What is kept of what has ended, by class (short, long, forever) and table: in how many partitions
-- of a day each, how large with indexes, the oldest day, and when that is dropped (keep and
-- next_drop null: never). missing: today and tomorrow, if they lack a partition; no_default: true
-- if nothing would catch their rows then.
create view gangq.retention as
select k.class, k.name as part_of, k.keep, count(d.day)::integer as partitions,
  coalesce(sum(pg_total_relation_size(f.oid)), 0)::bigint as bytes, min(d.day) as oldest,
  ((min(d.day) + 1)::timestamp at time zone 'UTC') + k.keep as next_drop,
  array(
    select n::date
    from generate_series((c.t at time zone 'UTC')::date, (c.t at time zone 'UTC')::date + 1,
      interval '1 day') n
    where k.keep is not null
      and to_regclass('gangq.' || k.name || to_char(n, '_YYYYMMDD')) is null) as missing,
  k.keep is not null and not coalesce(bool_or(f.oid = p.partdefid), false) as no_default
from (
  select x.name, x.class, x.keep from gangq.kept_by_day() x
  union all values ('history_forever', 'forever', null::interval),
    ('gang_history_forever', 'forever', null)) k
cross join (select gangq.now() as t offset 0) c
join pg_catalog.pg_class r on r.oid = ('gangq.' || k.name)::regclass
left join pg_catalog.pg_partitioned_table p on p.partrelid = r.oid
left join lateral (
  select i.inhrelid as oid from pg_catalog.pg_inherits i where i.inhparent = r.oid
  union all select r.oid where r.relkind = 'r') f on true
left join pg_catalog.pg_class b on b.oid = f.oid
cross join lateral (
  select case when b.relname ~ '_[0-9]{8}$'
    then to_date(right(b.relname, 8), 'YYYYMMDD') end as day) d
group by k.class, k.name, k.keep, c.t
order by array_position(array['short', 'long', 'forever'], k.class), k.name;
