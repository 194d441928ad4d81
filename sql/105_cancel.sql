-- cancel: live work is told to stop, or ends at once.
-- Locks: gangs by id, jobs by id. Never a worker row.

-- Internal. Raises GQ002 for a job or gang that is neither live nor in history.
create function gangq.check_known(job_ids bigint[], gang_ids bigint[]) returns void
language plpgsql as $$
begin
  perform gangq.refuse_missing(x.what, x.id::text)
  from (
    select 'job' as what, c.id from unnest(job_ids) as c(id)
    where not exists (select from gangq.jobs j where j.id = c.id)
    union all
    select 'gang', c.id from unnest(gang_ids) as c(id)
    where not exists (select from gangq.gangs g where g.id = c.id)) x;
end $$;

-- Internal. Cancels a live gang that is locked with its members.
create function gangq.cancel_gang(gang_id bigint, reason text, t timestamptz) returns void
language plpgsql as $$
declare
  g gangq.live_gangs;
begin
  -- Before the drain, because complete_drain reads it.
  update gangq.live_gangs x set cancelling = true where x.id = cancel_gang.gang_id
  returning x.* into g;
  perform gangq.log_event(t, 'cancel', g.id, g.epoch, reason => cancel_gang.reason);
  if g.state in ('reserved', 'running') then
    perform gangq.drain(g.id, '{}', '{}', 'cancel', null, cancel_gang.reason, t);
  elsif g.state in ('waiting', 'blocked') then
    perform gangq.end_gang(g.id, 'cancelled', cancel_gang.reason, t);
  end if;
  -- Of a gang that drained already, or members that had left the epoch (shrink_gang).
  update gangq.live_jobs x set stop_reason = 'cancel'
  where x.gang_id = g.id and x.state = 'preempting' and x.stop_reason <> 'cancel';
end $$;

-- Why each step stands before the next one:
-- 1. Lock first: what is checked and shown below cannot change any more.
-- 2. Read the clock under the locks, or an ending could be dated before the retry that it ends.
-- 3. Cancel the gangs.
-- 4. Cancel the jobs. Those that run are woken before they are told to stop, while the rows still
--    say which run. All that need not stop leave.
-- 5. Answer with the states that they have now.
--
-- Internal. As cancel, for callers whose right was checked, and for promote_due.
create function gangq.cancel_all(job_ids bigint[], gang_ids bigint[], reason text)
returns table (job_id bigint, gang_id bigint, state text)
language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  t timestamptz;
  batch record;
  waiting bigint[];
  g gangq.live_gangs;
begin
  perform gangq.refuse_larger('the reason', octet_length(cancel_all.reason), 4000);
  -- 1.
  batch := gangq.lock_batch(cancel_all.job_ids, cancel_all.gang_ids);
  perform gangq.check_known(cancel_all.job_ids, cancel_all.gang_ids);
  perform gangq.refuse('GQ001', format('job %s is rank %s of gang g%s', j.id, j.rank, j.gang_id),
    format('Members stop together: cancel the gang (gang_ids => array[%s]).', j.gang_id))
  from gangq.live_jobs j where j.id = any (cancel_all.job_ids) and j.gang_id is not null;
  -- 2.
  t := gangq.now();
  -- 3.
  for g in select x.* from gangq.live_gangs x where x.id = any (batch.gangs) order by x.id loop
    perform gangq.cancel_gang(g.id, cancel_all.reason, t);
  end loop;
  -- 4.
  perform gangq.log_event(t, 'cancel', job_id => j.id, token => j.token,
      reason => cancel_all.reason),
    case when j.state = 'running' then gangq.wake(array[j.incarnation], 'stop') end
  from gangq.live_jobs j where j.id = any (batch.jobs) order by j.id;
  update gangq.live_jobs j set state = 'preempting', stop_reason = 'cancel',
    told_at = case j.state when 'running' then t else j.told_at end
  where j.id = any (batch.jobs) and j.state in ('running', 'preempting');
  waiting := array(
    select j.id from gangq.live_jobs j where j.id = any (batch.jobs) and j.state <> 'preempting');
  if waiting <> '{}' then
    perform gangq.leave(waiting, '{}', 'cancelled', '{}',
      jsonb_build_object('type', 'Cancelled', 'message', cancel_all.reason), t);
  end if;
  -- 5.
  return query
  select null::bigint, c.id, case when c.id = any (batch.left_gangs) then 'left'
    else (select x.state from gangq.gangs x where x.id = c.id) end
  from (select distinct u.id from unnest(cancel_all.gang_ids) as u(id)) c
  union all
  select c.id, null, case when c.id = any (batch.left_jobs) then 'left'
    else (select x.state from gangq.jobs x where x.id = c.id) end
  from (select distinct u.id from unnest(cancel_all.job_ids) as u(id)) c;
end $$;

-- Cancels live jobs and gangs. Running work is told to stop and is cancelled once proven stopped.
-- Returns the state each has now (cancelled, preempting, draining, or how it had ended). A call for
-- one job or gang waits for its lock. Of several, those that another transaction holds and those
-- beyond 500 rows are returned unchanged with the state left: call again with them, in another
-- transaction. Raises GQ001 (a member of a gang), GQ002, GQ007, 42501 (another submitter's, in a
-- queue that is not shared).
create function gangq.cancel(
  job_ids bigint[] default '{}', gang_ids bigint[] default '{}', reason text default null
) returns table (job_id bigint, gang_id bigint, state text)
language plpgsql as $$
begin
  perform gangq.check_owner('cancel', cancel.job_ids, cancel.gang_ids);
  return query select c.* from gangq.cancel_all(cancel.job_ids, cancel.gang_ids,
    coalesce(cancel.reason, 'cancelled by ' || gangq.caller())) c;
end $$;
