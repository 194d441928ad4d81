-- A retried job is live again, so what its ending has cancelled waits for it again. That ending is
-- in gangq.retried, with followed = false until nothing is left to revive:
-- 1. retry revives at once what it can, in its own transaction, some hundreds of jobs at most.
-- 2. The tick does the rest, and looks again at what a retry did: while that was open, another
--    transaction may have cancelled, or told, dependents that the retry could not see or lock. Then
--    it sets followed.
-- 3. What is revived is noted in gangq.retried itself, so its own dependents follow in turn, and no
--    ending is revived twice.
-- Only what has unmet is revived: what somebody cancelled by hand stays cancelled. A job of which
-- another awaited job has ended otherwise than wanted stays so until that one is retried as well.
-- Locks: jobs, dependencies, gangs, the endings that are revived and their batches, all with skip
-- locked.

-- Internal, for revive. What was cancelled for these jobs, and could wait for them again: it has
-- not been retried since, nothing else that it waited for has ended otherwise than wanted, and its
-- queue takes work.
create function gangq.cancelled_for(ids bigint[], most integer)
returns table (job_id bigint, gang_id bigint) language sql stable as $$
  select h.job_id, h.gang_id
  from gangq.history h
  where h.unmet is not null and h.awaited && cancelled_for.ids
    and not exists (
      select 1 from gangq.retried r where r.job_id = h.job_id and r.finished_at = h.finished_at)
    and not exists (
      select 1 from gangq.judge_awaited(h.awaited, h.wants) e
      where not e.live and gangq.is_wanted(e.outcome, e.wants) is not true)
    and not exists (
      select 1 from gangq.shapes z
      join gangq.queues_table q on q.draining and q.name = any (gangq.queue_path(z.queue))
      where z.id = h.shape_id)
  limit cancelled_for.most
$$;

-- Internal. Jobs that are about to be revived wait again, for what has not ended as they want.
create function gangq.await_again(job_ids bigint[]) returns void language plpgsql as $$
begin
  insert into gangq.dependencies (job_id, on_job_id, wants, outcome)
  select h.job_id, e.on_job_id, e.wants,
    case when not e.live then coalesce(e.outcome, 'cancelled') end
  from (
    -- The same in all endings of a job.
    select distinct on (x.job_id) x.job_id, x.awaited, x.wants
    from gangq.history x
    where x.job_id = any (await_again.job_ids)
    order by x.job_id) h
  cross join lateral gangq.judge_awaited(h.awaited, h.wants) e
  where e.live or gangq.is_wanted(e.outcome, e.wants) is not true;
end $$;

-- Internal, for revive. Those still live that have been told how these retried jobs ended wait for
-- them again; if one has ended again meanwhile, they are told of that. Returns the retried jobs of
-- which another transaction holds a dependent that was told of another ending than the present one,
-- if any.
create function gangq.tell_again(ids bigint[]) returns bigint[] language plpgsql as $$
begin
  update gangq.dependencies d set settled = false, outcome = case
    when not exists (select 1 from gangq.live_jobs j where j.id = d.on_job_id)
    then coalesce(gangq.ended_as(d.on_job_id, d.wants), 'cancelled') end
  where d.ctid = any (array(
    select z.ctid from gangq.dependencies z
    where z.on_job_id = any (tell_again.ids) and z.outcome is not null
    order by z.on_job_id, z.job_id for update skip locked));
  return array(
    select d.on_job_id
    from gangq.dependencies d
    where d.on_job_id = any (tell_again.ids) and d.outcome is not null
      and (exists (select 1 from gangq.live_jobs j where j.id = d.on_job_id)
        or d.outcome <> coalesce(gangq.ended_as(d.on_job_id, d.wants), 'cancelled')));
end $$;

-- Internal. What waited for these retried jobs waits again: most jobs at most, but for a gang that
-- exceeds it. revived: those that were cancelled. unfinished: the retried jobs of which some are
-- left, because another transaction holds them or there are more.
create function gangq.revive(
  ids bigint[], most integer, t timestamptz, out revived bigint[], out unfinished bigint[]
) language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  jobs bigint[];
  gangs bigint[];
  held bigint[] := '{}';  -- gangs that are left
  g bigint;
  taken integer;
begin
  -- 1. Those still live. Another transaction may cancel those that it holds: only 2 looks after
  -- that.
  unfinished := gangq.tell_again(revive.ids);
  -- 2. Those cancelled.
  select coalesce(array_agg(c.job_id) filter (where c.gang_id is null), '{}'),
    coalesce(array_agg(c.gang_id) filter (where c.gang_id is not null), '{}')
  into jobs, gangs
  from gangq.cancelled_for(revive.ids, most + 1) c;
  revived := gangq.retry_jobs(
    gangq.reopenable(jobs[: most]), null, most, t, true, ended => 'cancelled');
  foreach g in array gangs loop
    taken := null;
    if cardinality(revived) < most then
      begin
        taken := gangq.retry_gang(g, t, true);
      exception
        -- A topology level is gone, or history has dropped a member: it cannot run again.
        when sqlstate 'GQ001' or sqlstate 'GQ002' then taken := 0;
      end;
    end if;
    if taken is null then
      held := held || g;
    elsif taken > 0 then
      revived := revived || array(select j.id from gangq.live_jobs j where j.gang_id = g);
    end if;
  end loop;
  -- 3. Whose those are that are left; of more than most it is not known.
  unfinished := unfinished || case
    when cardinality(jobs) + cardinality(gangs) > most then revive.ids
    else array(
      select a.id
      from gangq.history h cross join unnest(h.awaited) as a(id)
      where (h.job_id = any (jobs) and h.job_id <> all (revived) or h.gang_id = any (held))
        and a.id = any (revive.ids)) end;
end $$;

-- Internal, a step of the tick. What retried jobs had cancelled waits for them again, what that had
-- cancelled too, and so on, for 50 ms at most. Returns how many jobs were revived, or most if there
-- is more to do.
create function gangq.revive_dependents(most integer default 200) returns integer
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  until timestamptz := clock_timestamp() + interval '50 ms';
  ids bigint[];
  stuck bigint[] := '{}';  -- Held by other transactions: the next tick looks again.
  generation record;
  moved integer := 0;
begin
  loop
    ids := array(
      select r.job_id from gangq.retried r
      where r.job_id is not null and not r.followed and r.job_id <> all (stuck)
      order by r.job_id limit most for update skip locked);
    exit when ids = '{}';
    -- There is more to do: the tick is called again at once.
    if moved >= most or clock_timestamp() >= until then
      return greatest(moved, most);
    end if;
    generation := gangq.revive(ids, most - moved, t);
    moved := moved + cardinality(generation.revived);
    stuck := stuck || generation.unfinished;
    update gangq.retried r set followed = true
    where r.job_id = any (ids) and r.job_id <> all (stuck) and not r.followed;
  end loop;
  return moved;
end $$;
