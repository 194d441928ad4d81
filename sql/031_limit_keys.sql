-- Limit keys: of the jobs that name one, whatever their queue, at most so many are placed at once
-- (licences, a data source that bears so many readers).
-- Locks: whoever places work that names a key locks its row after the queues with limits
-- (lock_limited in 028). Then it counts, then it places.

-- Internal. Makes a limit key that is named for the first time. Raises GQ001 for another limit than
-- it has, unless an administrator has set that, and for the key of a batch, and GQ002 where nobody
-- has said its limit.
create function gangq.name_limit(key text, most integer, login text) returns void
language plpgsql as $$
declare
  known gangq.limit_keys;
begin
  if key is null then
    if most is not null then
      perform gangq.refuse('GQ001', format('limit is %s, and no limit_key says of what', most),
        'Pass limit_key, or limit the queue: gangq queue set.');
    end if;
    return;
  elsif key ~ '^batch b[0-9]+$' then
    perform gangq.refuse('GQ001', format('limit key %L is that of a batch', key),
      'Submit the jobs in one call, with at_most; or name the key otherwise.');
  end if;
  select k.* into known from gangq.limit_keys k where k.name = key;
  if not found and most is not null then
    insert into gangq.limit_keys (name, most, login) values (key, most, name_limit.login)
    on conflict do nothing;
    select k.* into known from gangq.limit_keys k where k.name = key;
  end if;
  if known.name is null then
    perform gangq.refuse('GQ002', format('limit key %L does not exist', key),
      'The first submission that names it also says its limit: --limit-key KEY --limit 2.');
  elsif most <> known.most and not known.pinned then
    perform gangq.refuse('GQ001',
      format('the limit of limit key %L is %s, and not %s', key, known.most, most),
      'Leave limit out to take it as it is. An administrator changes it: gangq limit set.');
  end if;
end $$;

-- Makes a limit key, or changes its limit: at most so many jobs that name it are placed at once,
-- whatever limit later submissions say. A limit that is already exceeded stops nothing that runs;
-- 0: nothing more starts. For gangq_admin. Raises GQ001.
create function gangq.set_limit(key text, most integer) returns void language plpgsql as $$
begin
  if (length(key) between 1 and 200 and most >= 0) is not true then
    perform gangq.refuse('GQ001',
      'a limit key needs a name of 1 to 200 characters, and a limit of 0 or more',
      'Call gangq.set_limit(''licence'', 2).');
  end if;
  insert into gangq.limit_keys as k (name, most, pinned, login)
  values (key, set_limit.most, true, session_user)
  on conflict (name) do update set most = excluded.most, pinned = true;
  perform gangq.wake_tick();
end $$;

-- Internal. How many jobs and open places that name each of these limit keys are placed. As in
-- queue_usage, placed jobs are found worker by worker.
create function gangq.key_usage(names text[]) returns table (name text, jobs bigint)
language sql stable as $$
  with placed as materialized (
    select j.shape_id, count(*) as jobs
    from gangq.live_jobs j
    where j.incarnation = any (array(select l.incarnation from gangq.leases l))
    group by j.shape_id
    union all
    select p.shape_id, count(*) from gangq.places p where p.job_id is null group by p.shape_id
  )
  select s.limit_key, sum(p.jobs)::bigint
  from placed p join gangq.shapes s on s.id = p.shape_id
  where s.limit_key = any (key_usage.names)
  group by s.limit_key
$$;

-- Internal. As limit_hit, of a limit key, if so many more jobs would break it; null: whether more
-- are placed than its limit. Binding only after lock_limited.
create function gangq.key_hit(key text, jobs integer) returns jsonb language sql stable as $$
  select jsonb_build_object('gate', 'limit_key', 'key', k.name, 'resource', 'jobs',
    'limit', k.most, 'used', u.jobs, 'asked', key_hit.jobs)
  from gangq.limit_keys k
  cross join lateral (
    select coalesce(sum(x.jobs), 0) as jobs from gangq.key_usage(array[k.name]) x) u
  where k.name = key and u.jobs + coalesce(key_hit.jobs, 0) > k.most
$$;

-- Internal. Refuses (GQ001) a gang that alone exceeds the limit of its key, and so could never run.
create function gangq.check_key(key text, members integer) returns void
language plpgsql stable as $$
declare
  most integer;
begin
  select k.most into most from gangq.limit_keys k where k.name = key;
  -- A limit of 0 is how an operator shuts a key for a while.
  if members > most and most > 0 then
    perform gangq.refuse('GQ001',
      format('it needs %s at once, and the limit of limit key %L is %s',
        gangq.counted(members, 'job'), key, most),
      'Ask for fewer members (an elastic gang counts with its minimum), or for another key.');
  end if;
end $$;

-- Internal. The limit key of a kind of gang, whose members all name the same, or of a shape
-- (negative).
create function gangq.key_of(kind integer) returns text language sql stable as $$
  select s.limit_key
  from gangq.shapes s
  where s.id = coalesce((
    select r.shape_id from gangq.kind_roles r where r.kind_id = kind order by r.ordinal limit 1),
    -kind)
$$;

-- Internal. What limits, in words: see limit_hit, key_hit.
create function gangq.limited_by(hit jsonb) returns text language sql immutable
return coalesce('queue ' || (hit ->> 'queue'), 'limit key ' || (hit ->> 'key'));

-- Limit keys: at most so many jobs that name one are placed at once. used: how many are, open
-- places included. pinned: an administrator has set the limit. login: who made it. Those of batches
-- (at_most) are in gangq.batches.
create view gangq.limits as
select k.name, k.most, coalesce(u.jobs, 0) as used, k.pinned, k.login, k.made_at
from gangq.limit_keys k
left join gangq.key_usage(array(select x.name from gangq.limit_keys x where x.batch_id is null)) u
  on u.name = k.name
where k.batch_id is null
order by k.name;
