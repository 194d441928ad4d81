-- Limit keys. A key limits how many of the jobs that name it, whatever their queue, are placed at
-- once (licences, readers of a data source) or start in a period (an API).
-- Locks: a transaction that places work of a key locks the key's row after the queues with limits
-- (lock_limited in 028). Then it counts, then it places.

-- Internal. Makes a limit key that is named for the first time. Raises GQ001 for another limit or
-- rate than it has, unless an administrator has set them, and for the key of a batch, and GQ002
-- where nobody has said either.
create function gangq.name_limit(key text, most integer, rate text, login text) returns void
language plpgsql as $$
declare
  known gangq.limit_keys;
  said text := coalesce('limit is ' || most, 'rate is ' || rate);
begin
  if key is null then
    if said is not null then
      perform gangq.refuse('GQ001', format('%s, and no limit_key says of what', said),
        'Pass limit_key, or limit the queue: gangq queue set.');
    end if;
    return;
  elsif key ~ '^batch b[0-9]+$' then
    perform gangq.refuse('GQ001', format('limit key %L is that of a batch', key),
      'Submit the jobs in one call, with at_most; or name the key otherwise.');
  end if;
  select k.* into known from gangq.limit_keys k where k.name = key;
  if not found and said is not null then
    insert into gangq.limit_keys (name, most, rate, login)
    values (key, most, name_limit.rate, name_limit.login)
    on conflict do nothing;
    select k.* into known from gangq.limit_keys k where k.name = key;
  end if;
  if known.name is null then
    perform gangq.refuse('GQ002', format('limit key %L does not exist', key),
      'The first submission that names it also says its limit, its rate or both: --limit-key KEY '
      '--limit 2 --rate 10/1m.');
  elsif not known.pinned and most is not null and most is distinct from known.most then
    perform gangq.refuse('GQ001', format('the limit of limit key %L is %s, and not %s', key,
        coalesce(known.most::text, 'none'), most),
      'Leave limit out to take it as it is. An administrator changes it: gangq limit set.');
  elsif not known.pinned and name_limit.rate is not null
    and gangq.rate_of(name_limit.rate) is distinct from gangq.rate_of(known.rate)
  then
    perform gangq.refuse('GQ001', format('the rate of limit key %L is %s, and not %s', key,
        coalesce(known.rate, 'none'), name_limit.rate),
      'Leave rate out to take it as it is. An administrator changes it: gangq limit set --rate.');
  end if;
end $$;

-- Makes a limit key, or changes its limit, its rate or both: at most so many jobs that name it are
-- placed at once, and so many started in a period (10/1m), whatever later submissions say. What is
-- null stays as it is; rate none takes the rate away. What runs goes on; most 0: nothing more
-- starts. For gangq_admin. Raises GQ001.
create function gangq.set_limit(key text, most integer default null, rate text default null)
returns void language plpgsql as $$
declare
  asked gangq.limit_keys := gangq.read_options('set_limit', jsonb_strip_nulls(
    jsonb_build_object('rate', nullif(set_limit.rate, 'none'))), null::gangq.limit_keys);
begin
  if (length(key) between 1 and 200 and coalesce(most, 0) >= 0 and num_nulls(most, rate) < 2)
    is not true
  then
    perform gangq.refuse('GQ001',
      'a limit key needs a name of 1 to 200 characters, and a limit of 0 or more or a rate',
      'Call gangq.set_limit(''licence'', 2), or gangq.set_limit(''api'', rate => ''10/1m'').');
  end if;
  insert into gangq.limit_keys as k (name, most, rate, pinned, login)
  values (key, set_limit.most, asked.rate, true, session_user)
  on conflict (name) do update set pinned = true, most = coalesce(excluded.most, k.most),
    rate = case when set_limit.rate is null then k.rate else excluded.rate end,
    full_at = least(k.full_at, gangq.empty_until(excluded.rate));
  perform gangq.wake_tick();
end $$;

-- Internal. How many jobs and open places that name each of these limit keys are placed.
create function gangq.key_usage(names text[]) returns table (name text, jobs bigint)
language sql stable as $$
  select s.limit_key, sum(h.jobs)::bigint
  from gangq.held_by(array(select l.incarnation from gangq.leases l)) h
  join gangq.shapes s on s.id = h.shape_id
  where s.limit_key = any (key_usage.names)
  group by s.limit_key
$$;

-- Internal. The limit key of a kind of gang, whose members all name the same, or of a shape
-- (negative).
create function gangq.key_of(kind integer) returns text
language plpgsql stable set enable_seqscan = off as $$
begin
  return (
    select s.limit_key
    from gangq.shapes s
    where s.id = coalesce((
      select r.shape_id from gangq.kind_roles r where r.kind_id = kind order by r.ordinal limit 1),
      -kind));
end $$;

-- Internal, for the view limits: opens_at of a limit key of which so many jobs are placed.
create function gangq.limit_opens_at(key text, used bigint) returns timestamptz
language sql stable as $$
  select case when used < k.most is not false then b.at
    when e.at is not null then greatest(b.at, e.at) end
  from gangq.limit_keys k
  left join lateral (
    select gangq.filled_at(k.rate, k.full_at) - (r.starts - 1) * r.every as at
    from gangq.rate_of(k.rate) r
    where gangq.filled_at(k.rate, k.full_at) > gangq.now() + (r.starts - 1) * r.every) b on true
  left join lateral (
    select min(j.claimed_at + make_interval(secs => j.budget_s)) as at
    from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
    where j.incarnation = any (array(select l.incarnation from gangq.leases l))
      and s.limit_key = k.name and used >= k.most) e on true
  where k.name = key
$$;

-- Limit keys: at most so many jobs that name one are placed at once (most), or started in a period
-- (rate). used: how many are placed, open places included. opens_at: when one more may start: the
-- rate allows it then and, if most are placed, the first of those has used up its budget; null: it
-- may now, or those that are placed have no budget. pinned: an administrator has set them. login:
-- who made it. Those of batches (at_most) are in gangq.batches.
create view gangq.limits as
select k.name, k.most, k.rate, coalesce(u.jobs, 0) as used, k.pinned, k.login, k.made_at,
  gangq.limit_opens_at(k.name, coalesce(u.jobs, 0)) as opens_at
from gangq.limit_keys k
left join gangq.key_usage(array(select x.name from gangq.limit_keys x where x.batch_id is null)) u
  on u.name = k.name
where k.batch_id is null
order by k.name;
