-- Jobs that wait for others, or for a moment: settle and ended_as tell a job how those it waits for
-- ended; settle_dependents and promote_due, steps of the tick, release or cancel it. A retry of the
-- job that it was cancelled for revives it (119).
-- A dependency says which outcome it wants: done (after), any (after_any) or failed (after_failed).
-- The job is released when each job it waits for has ended as wanted, and cancelled as soon as one
-- has ended otherwise. A cancelled job has not failed: what waits for its failure is cancelled too.
-- Locks: jobs, dependencies and gangs, all with skip locked.

-- Internal. Whether a dependency wants this outcome.
create function gangq.is_wanted(outcome text, wants text) returns boolean
language sql immutable as $$
  select outcome = wants or wants = 'any' and outcome is not null
$$;

-- Internal. How this job's latest ending, from which no retry has started, counts for a dependency
-- that wants this; null: it has not ended. (The clock may have gone back since an earlier ending.)
-- A member that a done gang could spare (its completion rule, an elastic role) is cancelled
-- and counts as done. All members of a failed gang have failed for what waits for its failure,
-- those too that were done before.
create function gangq.ended_as(job_id bigint, wants text) returns text language sql stable as $$
  select case
    when h.gang_id is null or h.state = 'failed' then h.state
    when g.state = 'done' and h.state = 'cancelled' then 'done'
    when g.state = 'failed' and ended_as.wants = 'failed' then 'failed'
    else h.state end
  from (
    select x.* from gangq.history x
    where x.job_id = ended_as.job_id and not exists (
      select from gangq.retried r where r.job_id = x.job_id and r.finished_at = x.finished_at)
    limit 1) h
  left join lateral (
    select k.state from gangq.gang_history k
    where k.gang_id = h.gang_id and not exists (
      select from gangq.retried r where r.gang_id = k.gang_id and r.finished_at = k.finished_at)
    limit 1) g on true
$$;

-- Internal. Of jobs that are waited for: whether each is live, else how it ended; null: it does not
-- exist, or history has dropped it. Null wants: done of all.
create function gangq.judge_awaited(awaited bigint[], wants text[])
returns table (on_job_id bigint, wants text, live boolean, outcome text)
language sql stable as $$
  select a.id, w.wants, l.id is not null,
    case when l.id is null then gangq.ended_as(a.id, w.wants) end
  from unnest(judge_awaited.awaited, judge_awaited.wants) as a(id, wants)
  cross join lateral (select coalesce(a.wants, 'done') as wants) w
  left join lateral (select j.id from gangq.live_jobs j where j.id = a.id offset 0) l on true
$$;

-- Internal. Tells the dependents of these jobs how they ended, but for rows that another
-- transaction holds, and those beyond the first 1,000: see gangq.unsettled. Anybody may have made
-- any number of jobs wait for one, and who ends that must not have to wait for all of them.
create function gangq.settle(ended bigint[]) returns void language sql volatile as $$
  -- Asked once for all that wait for a job. Of an ending that is no longer in history it is not
  -- known whether it was a success.
  with told as materialized (
    select z.ctid as row_at, z.on_job_id, z.wants from gangq.dependencies z
    where z.on_job_id = any (settle.ended) and z.outcome is null
      -- A retry may have come first: then its next ending counts.
      and not exists (select 1 from gangq.live_jobs j where j.id = z.on_job_id)
    order by z.on_job_id, z.job_id limit 1000 for update skip locked
  ),
  endings as materialized (
    select e.on_job_id, e.wants,
      coalesce(gangq.ended_as(e.on_job_id, e.wants), 'cancelled') as outcome
    from (select distinct t.on_job_id, t.wants from told t) e
  )
  update gangq.dependencies d set outcome = e.outcome
  from endings e
  where d.ctid = any (array(select t.row_at from told t))
    and e.on_job_id = d.on_job_id and e.wants = d.wants
$$;

-- Problem: a job ends while the submission of a job that waits for it is not committed. The ending
-- does not see the dependency, and the submission cannot know of the ending. Solution: a dependency
-- is written with settled = false and is settled here.
-- Invariant: a settled row is seen by every transaction that ends the awaited job.
-- 1. The row d is visible to the first statement, so its submission is committed.
-- 2. A later statement locks the awaited job's row, which every ending needs. So no ending was in
--    flight, and the job was live. The lock is released at once: having had it is enough, and
--    nothing waits for a tick that is left open.
-- 3. An ending that begins after step 2 looks for dependents in a statement that starts after it
--    has locked the job's row (leave), so it sees d. (An ending with an older snapshot, in
--    REPEATABLE READ, cannot: it leaves a row in unsettled.)
-- 4. When the lock is not free, an ending is in flight or another transaction holds the row: the
--    next tick looks again.
-- 5. When the job is not live any more it has ended, and d is told how, as its ending would have
--    told it.
-- Each call starts at a random place, so dependencies on locked jobs do not keep the others from
-- being settled.
--
-- Internal, a step of the tick. Dependencies that became visible since the last one: settled, or
-- told how the awaited job ended. Returns how many.
create function gangq.settle_dependents(most integer default 200) returns integer language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  waiting bigint[];
  on_jobs bigint[];
  quiet bigint[];
  ended bigint[];
  first bigint;
  told integer;
begin
  first := (
    select min(x.on_job_id)
      + floor(random() * (max(x.on_job_id) - min(x.on_job_id) + 1))::bigint
    from gangq.dependencies x where not x.settled and x.outcome is null);
  if first is null then
    return 0;
  end if;
  select array_agg(d.job_id), array_agg(d.on_job_id) into waiting, on_jobs
  from (
    (select x.job_id, x.on_job_id from gangq.dependencies x
      where not x.settled and x.outcome is null and x.on_job_id >= first
      order by x.on_job_id, x.job_id limit most)
    union all
    (select x.job_id, x.on_job_id from gangq.dependencies x
      where not x.settled and x.outcome is null and x.on_job_id < first
      order by x.on_job_id, x.job_id limit most)
    limit most) d;
  begin
    quiet := array(
      select j.id from gangq.live_jobs j
      where j.id = any (on_jobs) order by j.id for key share skip locked);
    raise exception using errcode = 'GQ000';
  exception when sqlstate 'GQ000' then
    null;  -- the locks are released
  end;
  ended := array(
    select a.id from unnest(on_jobs) as a(id)
    where not exists (select 1 from gangq.live_jobs j where j.id = a.id));
  perform gangq.settle(ended);
  update gangq.dependencies d set settled = true
  where d.ctid = any (array(
    select z.ctid from gangq.dependencies z join unnest(waiting, on_jobs) as w(job_id, on_job_id)
      on z.on_job_id = w.on_job_id and z.job_id = w.job_id
    where z.on_job_id = any (quiet) and not z.settled and z.outcome is null
    order by z.on_job_id, z.job_id for update of z skip locked));
  get diagnostics told = row_count;
  return told + cardinality(ended);
end $$;

-- Internal. These scheduled jobs, which are locked, need not wait any more.
create function gangq.make_pending(job_ids bigint[]) returns void language plpgsql
set enable_seqscan = off as $$
begin
  update gangq.live_jobs j set state = 'pending', due_at = null, ran_on = null
  where j.id = any (job_ids);
  perform gangq.wake_jobs(job_ids, 'sleepers');
end $$;

-- A step of the tick. Scheduled jobs that are due become pending. Jobs that waited for jobs which
-- have ended as wanted are released; jobs that waited for one that has ended otherwise are
-- cancelled. Returns how many moved. Raises GQ001.
create function gangq.promote_due(most integer default 200) returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  due bigint[];
  ended bigint[];
begin
  perform gangq.check_most(most);
  due := array(
    select z.id from gangq.live_jobs z where z.state = 'scheduled' and z.due_at <= t
    order by z.due_at limit most for update skip locked);
  perform gangq.make_pending(due);
  ended := array(
    select u.job_id from gangq.unsettled u order by u.job_id limit most for update skip locked);
  if ended <> '{}' then
    perform gangq.settle(ended);
    delete from gangq.unsettled u
    where u.job_id = any (ended) and (
      exists (select 1 from gangq.live_jobs j where j.id = u.job_id)
      or not exists (
        select 1 from gangq.dependencies d where d.on_job_id = u.job_id and d.outcome is null));
  end if;
  return cardinality(due) + gangq.promote_dependents(t, most);
end $$;

-- Internal, for promote_dependents. Jobs of which an awaited job has ended, with all members of
-- their gangs, grouped by gang (null: single jobs) and by the awaited job that has not ended as
-- wanted (null: none of those that have ended). Begins at a random job, as settle_dependents does.
create function gangq.told_dependents(most integer)
returns table (gang_id bigint, unmet bigint, job_ids bigint[]) language plpgsql as $$
declare
  first bigint := (
    select min(x.job_id) + floor(random() * (max(x.job_id) - min(x.job_id) + 1))::bigint
    from gangq.dependencies x where x.outcome is not null);
begin
  return query
  select x.gang_id, x.unmet, array_agg(x.job_id)
  from (
    select d.job_id, j.gang_id,
      min(d.on_job_id) filter (where not gangq.is_wanted(d.outcome, d.wants)) as unmet
    from gangq.dependencies d join gangq.live_jobs j on j.id = d.job_id
    where d.job_id = any (array(
        with told as (
          (select distinct x.job_id from gangq.dependencies x
            where x.outcome is not null and x.job_id >= first order by x.job_id limit most)
          union all
          (select distinct x.job_id from gangq.dependencies x
            where x.outcome is not null and x.job_id < first order by x.job_id limit most)
          limit most)
        select s.job_id from told s
        union
        -- The limit never cuts a gang.
        select m.id
        from told s
        join gangq.live_jobs x on x.id = s.job_id
        join gangq.live_jobs m on m.gang_id = x.gang_id))
      and d.outcome is not null
    group by d.job_id, j.gang_id) x
  group by x.gang_id, x.unmet;
end $$;

-- Internal, for promote_due. Releases or cancels jobs whose awaited jobs have ended: together the
-- single jobs that wait for nothing more or were cancelled for the same one, and those of a gang.
-- Returns how many.
create function gangq.promote_dependents(t timestamptz, most integer) returns integer
language plpgsql as $$
declare
  w record;
  g bigint;
  locked boolean;
  waiting bigint[];
  moved integer := 0;
begin
  for w in
    select x.gang_id, x.unmet, x.job_ids from gangq.told_dependents(most) x
    order by x.gang_id, x.unmet
  loop
    if w.gang_id is not null and w.gang_id is distinct from g then
      g := w.gang_id;
      locked := gangq.try_lock_gang(g);
    end if;
    continue when w.gang_id is not null and not locked;
    waiting := array(
      select j.id from gangq.live_jobs j
      where j.id = any (w.job_ids) and j.state = 'waiting' order by j.id for update skip locked);
    if w.unmet is not null then
      moved := moved + gangq.cancel_dependents(waiting, w.gang_id, w.unmet);
    else
      moved := moved + gangq.release_dependents(waiting, w.gang_id, t);
    end if;
  end loop;
  return moved;
end $$;

-- Internal, for cancel_dependents. Locks the dependencies of these jobs. Returns the jobs of which
-- another transaction holds one.
create function gangq.busy_dependents(job_ids bigint[]) returns bigint[] language sql as $$
  with locked as (
    select d.job_id, d.on_job_id from gangq.dependencies d
    where d.job_id = any (job_ids)
    order by d.on_job_id, d.job_id for update skip locked
  )
  select coalesce(array_agg(d.job_id), '{}')
  from gangq.dependencies d
  where d.job_id = any (job_ids) and not exists (
    select 1 from locked l where l.job_id = d.job_id and l.on_job_id = d.on_job_id)
$$;

-- Internal, for promote_dependents. Cancels locked waiting jobs because unmet has not ended as
-- wanted: single ones, or some of a gang, which is cancelled as a whole. Returns how many.
create function gangq.cancel_dependents(job_ids bigint[], gang_id bigint, unmet bigint)
returns integer language plpgsql as $$
declare
  -- A caller that completes an awaited job in an open transaction holds dependencies on it: a later
  -- tick cancels those jobs.
  busy bigint[] := gangq.busy_dependents(job_ids || array(
    select j.id from gangq.live_jobs j where j.gang_id = cancel_dependents.gang_id));
  alike record;
  cancelled integer := 0;
begin
  if cancel_dependents.gang_id is not null and busy <> '{}' then
    return 0;
  end if;
  -- A retry of unmet may have been committed before these locks were taken.
  for alike in
    with told as (
      update gangq.live_jobs j set unmet = cancel_dependents.unmet
      from gangq.dependencies d
      where j.id = any (cancel_dependents.job_ids) and j.id <> all (busy)
        and d.on_job_id = cancel_dependents.unmet and d.job_id = j.id
        and not gangq.is_wanted(d.outcome, d.wants)
      returning j.id, case when d.wants = 'failed'
        then format('did not fail: it is %s', d.outcome) else 'did not succeed' end as why
    )
    select x.why, array_agg(x.id) as ids from told x group by x.why
  loop
    cancelled := cancelled + cardinality(alike.ids);
    perform gangq.cancel_all(
      case when cancel_dependents.gang_id is null then alike.ids else '{}' end,
      array_remove(array[cancel_dependents.gang_id], null),
      format('job %s, which it waited for, %s', cancel_dependents.unmet, alike.why));
  end loop;
  return cancelled;
end $$;

-- Internal, for promote_dependents. Locked waiting jobs, single ones or some of a gang, do not wait
-- any more for what has ended as they wanted. Returns how many.
create function gangq.release_dependents(job_ids bigint[], gang_id bigint, t timestamptz)
returns integer language plpgsql as $$
declare
  released bigint[];
begin
  with met as (
    delete from gangq.dependencies d
    where d.ctid = any (array(
      select z.ctid from gangq.dependencies z
      where z.job_id = any (release_dependents.job_ids) and gangq.is_wanted(z.outcome, z.wants)
        -- Members are released together: settle may have told some of them, and not all.
        and z.on_job_id <> all (array(
          select x.on_job_id from gangq.dependencies x
          where x.job_id = any (array(
            select m.id from gangq.live_jobs m where m.gang_id = release_dependents.gang_id))
          group by x.on_job_id having count(*) > count(x.outcome)))
      order by z.on_job_id, z.job_id for update skip locked))
    returning d.job_id
  ),
  -- Counted from what is deleted: another promotion may have taken some of them meanwhile.
  fewer as (select m.job_id, count(*)::integer as jobs from met m group by m.job_id),
  told as (
    update gangq.live_jobs j set
      waits_on = j.waits_on - f.jobs,
      state = gangq.waiting_state(j.waits_on - f.jobs, j.gang_id, j.due_at, t)
    from fewer f where j.id = f.job_id
    returning j.id
  )
  select coalesce(array_agg(x.id), '{}') into released from told x;
  perform gangq.wake_jobs(released, 'sleepers');
  update gangq.live_gangs x set state = 'blocked'
  where x.id = release_dependents.gang_id and not exists (
    select 1 from gangq.live_jobs j where j.gang_id = x.id and j.state = 'waiting');
  return cardinality(released);
end $$;
