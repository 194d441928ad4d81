-- retry: work that has ended runs once more.
-- Locks: the ending that it starts from (history or gang_history), for a gang the settings for key
-- share (023), batches (reopen_batches, 037); then, with skip locked, what it revives (119). Never
-- a worker row.

-- Two retries of one ending: both read the ending, the first retries, its job runs and ends. The
-- second must not start from the old ending. So each
-- 1. locks the ending's row,
-- 2. reads in a later statement which ending no retry has started from,
-- 3. writes that ending into retried, whose key no two rows share.
--
-- Runs jobs and gangs that have ended once more, under their old ids, with fresh counters. A failed
-- gang resumes from its last complete checkpoint. They count as the caller's in limits and shares.
-- What waited for one of them and was cancelled for it waits for it again, as its own submitter's,
-- and what waited for that; of more than some hundreds of those the tick does the rest. What is
-- retried itself waits for nothing but the end of its process, if that tripped. Of several, those
-- that another transaction holds and those beyond 500 are returned unchanged with the state left:
-- call again with them, in another transaction. Raises GQ001 (a member of a gang, or a topology
-- level that no longer exists), GQ002, GQ004 (still live, or its queue is draining), 42501 (another
-- submitter's, in a queue that is not shared, or a priority above the caller's ceiling).
create function gangq.retry(job_ids bigint[] default '{}', gang_ids bigint[] default '{}')
returns table (job_id bigint, gang_id bigint, state text)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  t timestamptz := gangq.now();
  room integer := 500;
  members integer;
  taken bigint[];
  left_jobs bigint[];
  left_gangs bigint[] := '{}';
begin
  perform gangq.check_owner('retry', retry.job_ids, retry.gang_ids);
  if coalesce(cardinality(retry.job_ids), 0) + coalesce(cardinality(retry.gang_ids), 0) = 1 then
    perform from gangq.history h where h.job_id = any (retry.job_ids) and h.gang_id is null
    for update;
    perform from gangq.gang_history h where h.gang_id = any (retry.gang_ids) for update;
  end if;
  for gang_id in
    select c.id from unnest(retry.gang_ids) with ordinality as c(id, n)
    group by c.id order by min(c.n)
  loop
    members := case when room > 0 then gangq.retry_gang(gang_id, t) end;
    room := room - coalesce(members, 0);
    if members is null then
      left_gangs := left_gangs || gang_id;
    end if;
    state := case when members is null then 'left' else 'blocked' end;
    return next;
  end loop;
  taken := gangq.retry_jobs(retry.job_ids, null, greatest(room, 0), t);
  left_jobs := array(select c.id from unnest(retry.job_ids) as c(id) where c.id <> all (taken));
  if left_jobs <> '{}' or left_gangs <> '{}' then
    perform gangq.refuse_retries(left_jobs, left_gangs);
  end if;
  return query
  select c.id, null::bigint, case
    when c.id = any (taken) then (select j.state from gangq.live_jobs j where j.id = c.id)
    else 'left' end
  from unnest(retry.job_ids) with ordinality as c(id, n)
  group by c.id order by min(c.n);
  perform gangq.revive_at_once(taken || array(
    select j.id from gangq.live_jobs j
    where j.gang_id = any (retry.gang_ids) and j.gang_id <> all (left_gangs)), t);
end $$;

-- Internal, for retry and retry_failed. What was cancelled for these jobs, which have been retried,
-- waits for them again, and what was cancelled for that; the tick does the rest.
create function gangq.revive_at_once(ids bigint[], t timestamptz) returns void
language plpgsql as $$
declare
  -- In an older snapshot a dependency that has changed since would fail the call.
  room integer := case when gangq.reads_committed() then 500 else 0 end;
  until timestamptz := clock_timestamp() + interval '200 ms';
begin
  while ids <> '{}' and room > 0 and clock_timestamp() < until loop
    ids := (gangq.revive(ids, room, t)).revived;
    room := room - cardinality(ids);
  end loop;
  perform gangq.wake_tick();
end $$;

-- Internal, for retry. Raises GQ001, GQ002 or GQ004 for what no other call could retry either.
create function gangq.refuse_retries(job_ids bigint[], gang_ids bigint[]) returns void
language plpgsql as $$
begin
  perform gangq.refuse('GQ004', format('%s is live', x.what),
    format('Only a %s that has ended can be retried.', split_part(x.what, ' ', 1)))
  from (
    select 'gang g' || g.id from gangq.live_gangs g where g.id = any (refuse_retries.gang_ids)
    union all
    select 'job ' || j.id from gangq.live_jobs j where j.id = any (refuse_retries.job_ids)
  ) as x(what);
  perform gangq.check_known(refuse_retries.job_ids, refuse_retries.gang_ids);
  perform gangq.refuse('GQ001',
    format('job %s was rank %s of gang g%s', h.job_id, h.rank, h.gang_id),
    format('Members run together: retry the gang (gang_ids => array[%s]).', h.gang_id))
  from gangq.history h where h.job_id = any (refuse_retries.job_ids) and h.gang_id is not null;
end $$;

-- Internal, for retry_gang. Locks the latest ending of a gang and notes it in retried. Null:
-- another transaction holds the ending, or a retry has started from it.
create function gangq.take_gang_ending(gang_id bigint) returns gangq.gang_history
language plpgsql as $$
declare
  k gangq.gang_history;
begin
  select x.* into k from gangq.gang_history x
  where x.gang_id = take_gang_ending.gang_id and not exists (
    select 1 from gangq.retried r where r.gang_id = x.gang_id and r.finished_at = x.finished_at)
  for update skip locked;
  insert into gangq.retried (gang_id, finished_at)
  select k.gang_id, k.finished_at where k.gang_id is not null
  on conflict do nothing;
  return case when found then k end;
end $$;

-- Internal, for retry and revive. Makes a gang live again from its latest ending. Its submitter is
-- the caller, or if it is revived the one it had. Returns how many members it has; null: another
-- transaction holds the ending.
create function gangq.retry_gang(
  gang_id bigint, t timestamptz, revives boolean default false
) returns integer language plpgsql as $$
declare
  k gangq.gang_history;
  members bigint[];
  submitter text := gangq.caller();
  login text := session_user;
  base bigint := (select b.base from gangq.id_base() b);
begin
  k := gangq.take_gang_ending(retry_gang.gang_id);
  if k.gang_id is null then
    return null;
  elsif k.service is not null then
    perform gangq.refuse('GQ004',
      format('gang g%s was of service %L, which keeps its gangs itself', k.gang_id, k.service),
      'Submit a gang of your own, or change the service: gangq.set_service.');
  end if;
  members := array(select h.job_id from gangq.history h where h.gang_id = k.gang_id);
  if revives then
    submitter := k.submitter;
    login := k.login;
    perform gangq.await_again(members);
  end if;
  perform gangq.keep_topology();
  perform gangq.check_level(format('gang g%s', k.gang_id), l.require, l.prefer, false)
  from (
    select x.require, x.prefer from gangq.gang_kinds x where x.id = k.kind_id
    union all
    select r.require, r.prefer from gangq.kind_roles r where r.kind_id = k.kind_id) l;
  insert into gangq.live_gangs (id, order_key, kind_id, shape_id, size, epoch, priority,
    max_attempts, max_crashes, max_trips, state, checkpoint_mode, claim_deadline_s, submitted_at,
    name, submitter, login, failure_policy, completion, preemptible, budget_s, timeout_s,
    timeout_style, timeout_at, not_before)
  values (k.gang_id, gangq.order_key(k.priority, gangq.next_pos(base)),
    gangq.kind_of_shapes(k.kind_id, array(
      select gangq.shape_for(r.shape_id, submitter, login)
      from gangq.kind_roles r where r.kind_id = k.kind_id order by r.ordinal)),
    gangq.shape_for(k.shape_id, submitter, login),
    k.size, k.epoch, k.priority, k.max_attempts, k.max_crashes, k.max_trips,
    gangq.waiting_state((exists (
      select 1 from gangq.dependencies d where d.job_id = any (members)))::integer, k.gang_id),
    k.checkpoint_mode, k.claim_deadline_s, t, k.name, submitter, login, k.failure_policy,
    k.completion, k.preemptible, k.budget_s, k.timeout_s, k.timeout_style,
    t + make_interval(secs => k.timeout_s), (
      select max(i.exits_at)
      from gangq.history h join gangq.incarnations i on i.id = h.incarnation
      where h.gang_id = k.gang_id and i.exits_at > t));
  if k.size <> cardinality(gangq.retry_jobs(members, k.gang_id, null, t, revives)) then
    perform gangq.refuse('GQ002',
      format('history no longer has every member of gang g%s', k.gang_id),
      'Part of it was dropped after its retention: submit the gang anew.');
  end if;
  perform gangq.log_event(t, 'retry', k.gang_id, k.epoch, reason => gangq.retried_because(revives));
  return k.size;
end $$;

-- Internal. The reason of an event retry.
create function gangq.retried_because(revives boolean) returns text language sql stable as $$
  select case when revives then 'what it waited for was retried'
    else 'retried by ' || gangq.caller() end
$$;

-- Internal, for retry_jobs. Raises GQ004 where the queue of one of these live jobs is draining, and
-- 42501 where the caller may not give it its priority.
create function gangq.check_retried(job_ids bigint[]) returns void language plpgsql as $$
begin
  perform gangq.refuse_draining(q.name, s.queue)
  from gangq.live_jobs j
  join gangq.shapes s on s.id = j.shape_id
  join gangq.queues_table q on q.draining and q.name = any (gangq.queue_path(s.queue))
  where j.id = any (job_ids)
  order by length(q.name) desc;
  perform gangq.check_ceiling(r.queue, r.priority, gangq.caller(), session_user)
  from (
    select distinct s.queue, j.priority
    from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
    where j.id = any (job_ids)) r;
end $$;

-- Internal, for retry_jobs. Locks the latest endings of these jobs and notes them in retried, in
-- one statement: at most so many, and none that another transaction holds or a retry has started
-- from. The arguments are those of retry_jobs.
create function gangq.take_endings(
  job_ids bigint[], gang_id bigint, most integer, ended text,
  out ids bigint[], out ended_at timestamptz[]
) language plpgsql as $$
begin
  with free as (
    select h.job_id, h.finished_at
    from unnest(take_endings.job_ids) with ordinality as c(id, n)
    join gangq.history h on h.job_id = c.id
    where h.gang_id is not distinct from take_endings.gang_id
      and h.state = coalesce(take_endings.ended, h.state)
      and not exists (
        select 1 from gangq.retried r where r.job_id = h.job_id and r.finished_at = h.finished_at)
    order by c.n
    limit take_endings.most
    for update of h skip locked
  ),
  overtaken as (
    insert into gangq.retried as x (job_id, finished_at)
    select f.job_id, f.finished_at from free f
    on conflict do nothing
    returning x.job_id, x.finished_at
  )
  select coalesce(array_agg(o.job_id), '{}'), array_agg(o.finished_at) into ids, ended_at
  from overtaken o;
end $$;

-- Why each step stands before the next one:
-- 1. The endings are locked and noted in retried: see retry. As a submission, this transaction has
--    its id by then, before it draws a position.
-- 2. What is revived waits before it is live: a job that it waits for may end at any moment, and
--    waits_on must count the dependencies that there are.
-- 3. The queue and the priority are checked on the live rows. A refusal undoes step 1.
-- 4. Events and wakes are for what is allowed.
--
-- Internal, for retry and revive. Makes single jobs, or the members of this live gang, live from
-- their latest ending. Returns which: at most so many, and none whose ending is locked. revives:
-- they stay their submitter's and wait for what they waited for. ended: only those that have ended
-- so; another retry may have come first, and its job have ended otherwise.
create function gangq.retry_jobs(
  job_ids bigint[], gang_id bigint, most integer, t timestamptz, revives boolean default false,
  ended text default null
) returns bigint[] language plpgsql as $$
declare
  endings record;
  batches bigint[];
  base bigint := (select b.base from gangq.id_base() b);
begin
  -- 1.
  endings := gangq.take_endings(retry_jobs.job_ids, retry_jobs.gang_id, retry_jobs.most,
    retry_jobs.ended);
  -- 2.
  if revives and retry_jobs.gang_id is null then
    perform gangq.await_again(endings.ids);
  end if;
  with made as (
    insert into gangq.live_jobs (id, order_key, gang_id, rank, role, submitted_at, shape_id,
      budget_s, waits_on, priority, max_attempts, max_crashes, max_trips, max_snoozes, state,
      due_at, ran_on, submitter, login, parent, payload, awaited, wants, final_token, taken_token,
      batch_id, array_index, trace)
    select h.job_id, coalesce(g.order_key, gangq.order_key(h.priority, gangq.next_pos(base))), g.id,
      h.rank, (
        select max(r.ordinal) from gangq.kind_roles r
        where r.kind_id = g.kind_id and r.first_rank <= h.rank),
      t, gangq.shape_for(h.shape_id, o.submitter, o.login), h.budget_s, w.jobs, h.priority,
      h.max_attempts, h.max_crashes, h.max_trips, h.max_snoozes,
      gangq.waiting_state(w.jobs, g.id, i.exits_at, t), case when g.id is null then i.exits_at end,
      i.id, o.submitter, o.login, h.parent, h.payload, h.awaited, h.wants, h.token, h.taken_token,
      h.batch_id, h.array_index, h.trace
    from unnest(endings.ids, endings.ended_at) as c(id, ended_at)
    join gangq.history h on h.job_id = c.id and h.finished_at = c.ended_at
    cross join lateral (
      select case when revives then h.submitter else gangq.caller() end as submitter,
        case when revives then h.login else session_user end as login) o
    cross join lateral (
      select count(*)::integer as jobs from gangq.dependencies d where d.job_id = h.job_id) w
    left join gangq.live_gangs g on g.id = h.gang_id
    -- It tripped, and its process may still run: see 117.
    left join gangq.incarnations i on i.id = h.incarnation and i.exits_at > t
    order by array_position(retry_jobs.job_ids, h.job_id)
    returning batch_id
  )
  select array_agg(distinct m.batch_id) into batches from made m where m.batch_id is not null;
  if batches is not null then
    perform gangq.reopen_batches(batches);
  end if;
  -- 3.
  if not revives then
    perform gangq.check_retried(endings.ids);
  end if;
  -- 4.
  perform gangq.log_event(t, 'retry', job_id => j.id, reason => gangq.retried_because(revives))
  from gangq.live_jobs j where j.id = any (endings.ids) and j.gang_id is null order by j.id;
  perform gangq.wake_jobs(endings.ids, 'commit');
  return endings.ids;
end $$;
