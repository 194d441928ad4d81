-- Who locks what, in the order that the whole schema keeps: gangs by id, jobs by id, then worker
-- rows. A verb for one job or gang waits for its lock. A verb for several, and the tick, skip what
-- another transaction holds. A gang is changed with all its members locked or not at all.

-- Internal. Locks a gang and all its members without waiting; false: one is locked already. For the
-- tick: a frozen client that holds one row of a gang (an uncommitted checkpoint of a member is
-- enough) must not make all maintenance wait, so the gang is stepped over as a whole. Where it is
-- false, the gang and some members may stay locked until the transaction ends: its callers are
-- the tick, a pass and reports of several jobs, which are calls of their own and end soon. A caller
-- whose transaction may stay open undoes it in a subtransaction (lock_batch).
create function gangq.try_lock_gang(gang_id bigint) returns boolean language plpgsql as $$
begin
  perform from gangq.live_gangs g where g.id = try_lock_gang.gang_id for update skip locked;
  return found and (
    select count(*) from gangq.live_jobs j where j.gang_id = try_lock_gang.gang_id) = (
    select count(*) from (
      select from gangq.live_jobs j
      where j.gang_id = try_lock_gang.gang_id order by j.id for update skip locked) l);
end $$;

-- Internal. Locks a live gang and its members. Raises GQ002.
create function gangq.lock_gang(gang_id bigint) returns gangq.live_gangs language plpgsql as $$
declare
  g gangq.live_gangs;
begin
  perform gangq.lock_jobs('{}', array[lock_gang.gang_id]);
  select x.* into g from gangq.live_gangs x where x.id = lock_gang.gang_id;
  if not found then
    perform gangq.refuse_missing('gang', lock_gang.gang_id::text, true);
  end if;
  return g;
end $$;

-- Internal. Locks these jobs, and these gangs as a whole.
create function gangq.lock_jobs(job_ids bigint[], gang_ids bigint[]) returns void
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
begin
  perform from gangq.live_gangs g where g.id = any (gang_ids) order by g.id for update;
  perform from gangq.live_jobs j where j.id = any (job_ids) or j.gang_id = any (gang_ids)
  order by j.id for update;
end $$;

-- Internal. For the verbs of its worker: locks a job, or its gang as a whole; returns the job.
-- Raises 42501 if another login's worker holds it by this token. host: the bouncer of its host may,
-- too.
create function gangq.lock_job(job_id bigint, token bigint, host boolean default false)
returns gangq.live_jobs language plpgsql as $$
declare
  j gangq.live_jobs;
begin
  perform gangq.lock_jobs(array[lock_job.job_id],
    array(select x.gang_id from gangq.live_jobs x where x.id = lock_job.job_id));
  select x.* into j from gangq.live_jobs x where x.id = lock_job.job_id;
  perform gangq.check_login(j.incarnation, lock_job.host) where j.token = lock_job.token;
  return j;
end $$;

-- Internal. Of these jobs, which are in these gangs or in none, locks those that are free, with
-- their gangs, and returns the others. Never waits.
create function gangq.lock_free(job_ids bigint[], gang_ids bigint[]) returns bigint[]
language plpgsql as $$
declare
  free_jobs bigint[];
  free_gangs bigint[] := array(
    select g.id from unnest(lock_free.gang_ids) as g(id) where gangq.try_lock_gang(g.id));
begin
  free_jobs := array(
    select j.id from gangq.live_jobs j
    where j.id = any (lock_free.job_ids) and j.gang_id is null order by j.id
    for update skip locked);
  return array(
    select j.id from gangq.live_jobs j
    where j.id = any (lock_free.job_ids) and case when j.gang_id is null
      then j.id <> all (free_jobs) else j.gang_id <> all (free_gangs) end);
end $$;

-- Internal. Locks some of these jobs and gangs, each gang as a whole. jobs, gangs: locked now, or
-- not live; left_jobs, left_gangs: for another call, first those beyond what one call locks, then
-- those that another transaction holds. What set_priority and cancel work on. A call for one job or
-- one gang waits for it, as other verbs do. A call for several waits for nobody and locks some
-- hundreds of rows at most: it must not hold up others for as long as its transaction is open.
create function gangq.lock_batch(
  job_ids bigint[], gang_ids bigint[],
  out jobs bigint[], out gangs bigint[], out left_jobs bigint[], out left_gangs bigint[]
) language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  room integer := 500;
  gang record;
  locked bigint[];
begin
  jobs := array(select distinct w.id from unnest(lock_batch.job_ids) as w(id) order by w.id);
  gangs := array(select distinct w.id from unnest(lock_batch.gang_ids) as w(id) order by w.id);
  left_jobs := '{}';
  left_gangs := '{}';
  if cardinality(jobs) + cardinality(gangs) <= 1 then
    perform gangq.lock_jobs(jobs, gangs);
    return;
  end if;
  for gang in
    select w.id, g.size
    from unnest(gangs) as w(id)
    left join gangq.live_gangs g on g.id = w.id
    order by w.id
  loop
    begin
      if room <= 0 or gang.size is not null and not gangq.try_lock_gang(gang.id)
        and exists (select 1 from gangq.live_gangs g where g.id = gang.id)
      then
        raise exception using errcode = 'GQ000';
      end if;
      room := room - coalesce(gang.size, 1);
    exception
      -- Those members that it had got are let go.
      when sqlstate 'GQ000' then
        left_gangs := left_gangs || gang.id;
        gangs := array_remove(gangs, gang.id);
    end;
  end loop;
  left_jobs := jobs[greatest(room, 0) + 1:];
  jobs := jobs[:greatest(room, 0)];
  locked := array(
    select j.id from gangq.live_jobs j
    where j.id = any (jobs) order by j.id for update skip locked);
  left_jobs := left_jobs || array(
    select j.id from gangq.live_jobs j where j.id = any (jobs) and j.id <> all (locked));
  jobs := array(select w.id from unnest(jobs) as w(id) where w.id <> all (left_jobs));
end $$;

-- Internal. Raises GQ003, or GQ002 for a job that never was.
create function gangq.refuse_stale(job_id bigint, token bigint) returns void
language plpgsql stable as $$
declare
  j gangq.live_jobs;
begin
  select x.* into j from gangq.live_jobs x where x.id = refuse_stale.job_id;
  if not found and not exists (
    select 1 from gangq.history h where h.job_id = refuse_stale.job_id) then
    perform gangq.refuse_missing('job', refuse_stale.job_id::text);
  end if;
  perform gangq.refuse('GQ003', format('token %s is not the present claim of job %s, which is %s',
      coalesce(refuse_stale.token::text, 'null'), refuse_stale.job_id, coalesce(j.state, 'over')),
    'The claim was lost (lease ended, cancelled, drained) or is over. Stop the work and report '
    'nothing.');
end $$;
