-- Work is moved out of the way: displace_job for a solo job, as preempt_gang for a gang.
-- Locks: the job. Never a worker row.

create function gangq.displace_job(job_id bigint, reason text default null, data jsonb default null) returns boolean
language plpgsql security definer set search_path = '' set lock_timeout = '2s' as $$
#variable_conflict use_column
declare
  t timestamptz;
  j gangq.live_jobs;
begin
  select x.* into j from gangq.live_jobs x where x.id = displace_job.job_id for update;
  if not found then
    perform gangq.refuse('GQ002', format('job %s is not live', coalesce(displace_job.job_id::text, 'null')), 'It has ended or never existed: select * from gangq.jobs.');
  end if;
  if j.gang_id is not null then
    perform gangq.refuse('GQ001', format('job %s is rank %s of gang %s', j.id, j.rank, j.gang_id),
      format('Members stop together: select gangq.preempt_gang(%s).', j.gang_id));
  end if;
  if j.state <> 'running' then
    return false;
  end if;
  t := gangq.now();
  update gangq.live_jobs x set state = 'preempting', told_at = t, stop_reason = 'preempt' where x.id = j.id;
  perform gangq.log_event(t, 'preempt', job_id => j.id, token => j.token, incarnation => j.incarnation,
    reason => coalesce(displace_job.reason, 'preempted by an operator'), data => displace_job.data);
  perform gangq.wake(array[j.incarnation], 'stop');
  return true;
end $$;
comment on function gangq.displace_job(bigint, text, jsonb) is
  'Tells a running solo job to stop. Nobody is charged; it keeps its checkpoint, and once proven stopped it is pending again '
  'in its old place. data: what its event says besides. False, and nothing changed, for one that does not run. For '
  'gangq_admin. Raises GQ001 (a member of a gang), GQ002.';
