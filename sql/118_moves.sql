-- Work is told to make room: displace_job stops a single job as preempt_gang stops a gang, and
-- move_away moves both when the deadline of a drain has passed.
-- Locks: gangs by id, jobs by id; move_away takes them with skip locked. Never a worker row.

create function gangq.displace_job(job_id bigint, reason text default null) returns boolean
language plpgsql as $$
#variable_conflict use_column
declare
  j gangq.live_jobs;
begin
  perform gangq.refuse_larger('the reason', octet_length(displace_job.reason), 4000);
  select x.* into j from gangq.live_jobs x where x.id = displace_job.job_id for update;
  if not found then
    perform gangq.refuse('GQ002',
      format('job %s is not live', coalesce(displace_job.job_id::text, 'null')),
      'It has ended or never existed: select * from gangq.jobs.');
  elsif j.gang_id is not null then
    perform gangq.refuse('GQ001', format('job %s is rank %s of gang %s', j.id, j.rank, j.gang_id),
      format('Members stop together: select gangq.preempt_gang(%s).', j.gang_id));
  elsif j.state <> 'running' then
    return false;
  end if;
  perform gangq.stop_solo(j, 'preempt', coalesce(displace_job.reason, 'preempted by an operator'),
    null, gangq.now());
  return true;
end $$;
comment on function gangq.displace_job is
  'Tells a running single job to stop. No attempt is charged, it counts a stop; the job keeps its '
  'checkpoint and returns to its old place in the queue once it is proven stopped. Returns false, '
  'and changes nothing, for a job that does not run. For gangq_admin. Raises GQ001 (a member of a '
  'gang), GQ002, GQ007.';

create function gangq.stop_solo(
  j gangq.live_jobs, how text, reason text, data jsonb, t timestamptz
) returns void language plpgsql as $$
begin
  update gangq.live_jobs x set state = 'preempting', told_at = t, stop_reason = how
  where x.id = j.id;
  perform gangq.log_event(t, how, job_id => j.id, token => j.token,
    incarnation => j.incarnation, reason => reason, data => data);
  perform gangq.wake(array[j.incarnation], 'stop');
end $$;
comment on function gangq.stop_solo is
  'Internal. Tells this running single job, which is locked, to stop. how: preempt or move.';

create function gangq.move_away(most integer default 200) returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  w record;
  moved integer := 0;
begin
  for w in
    select j.gang_id, case when j.gang_id is null then j.id end as job_id,
      min(format('%s %s is drained: %s', c.kind, c.name, c.reason)) as why
    from gangq.cordons c
    join gangq.incarnations i on gangq.is_at(i, c.kind, c.name) and i.ended_at is null
    join gangq.live_jobs j on j.incarnation = i.id and j.state in ('reserved', 'running')
    where c.drain and c.deadline <= t
    group by 1, 2 order by 1 nulls last, 2 limit most
  loop
    if w.gang_id is not null then
      continue when not gangq.try_lock_gang(w.gang_id);
    else
      perform from gangq.live_jobs j
      where j.id = w.job_id and j.gang_id is null for update skip locked;
      continue when not found;
    end if;
    moved := moved + gangq.stop_unit(coalesce('g' || w.gang_id, 'j' || w.job_id), 'move', w.why,
      '{}', t)::integer;
  end loop;
  return moved;
end $$;
comment on function gangq.move_away is
  'Internal, a step of the tick. After the deadline of a drain, tells what runs there to stop. '
  'Returns how many gangs and single jobs.';
