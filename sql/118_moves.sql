-- Work is moved out of the way: displace_job for a solo job, as preempt_gang for a gang; and what a drain's deadline does.
-- Locks: gangs by id, jobs by id. move_away takes them with skip locked. Never a worker row.

create function gangq.displace_job(job_id bigint, reason text default null) returns boolean
language plpgsql as $$
#variable_conflict use_column
declare
  j gangq.live_jobs;
begin
  perform gangq.refuse_larger('the reason', octet_length(displace_job.reason), 4000);
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
  perform gangq.stop_solo(j, coalesce(displace_job.reason, 'preempted by an operator'), null, gangq.now());
  return true;
end $$;
comment on function gangq.displace_job is
  'Tells a running solo job to stop. Nobody is charged; it keeps its checkpoint, and once proven stopped it is pending again '
  'in its old place. False, and nothing changed, for one that does not run. For gangq_admin. Raises GQ001 (a member of a '
  'gang), GQ002.';

create function gangq.stop_solo(j gangq.live_jobs, reason text, data jsonb, t timestamptz) returns void
language plpgsql as $$
#variable_conflict use_column
begin
  update gangq.live_jobs x set state = 'preempting', told_at = stop_solo.t, stop_reason = 'preempt' where x.id = (stop_solo.j).id;
  perform gangq.log_event(stop_solo.t, 'preempt', job_id => (stop_solo.j).id, token => (stop_solo.j).token,
    incarnation => (stop_solo.j).incarnation, reason => stop_solo.reason, data => stop_solo.data);
  perform gangq.wake(array[(stop_solo.j).incarnation], 'stop');
end $$;
comment on function gangq.stop_solo is
  'Internal. Tells this running solo job, which the caller has locked, to stop. data: what its event says besides.';

create function gangq.move_away(most integer default 200) returns integer language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  w record;
  why text;
  n integer := 0;
begin
  for w in
    select j.gang_id, case when j.gang_id is null then j.id end as job_id, min(c.kind) as kind, min(c.name) as name, min(c.reason) as reason
    from gangq.cordons c
    join gangq.incarnations i on case c.kind when 'host' then i.host else i.name end = c.name and i.ended_at is null
    join gangq.live_jobs j on j.incarnation = i.id and j.state in ('reserved', 'running')
    where c.drain and c.deadline <= t
    group by 1, 2 order by 1 nulls last, 2 limit most
  loop
    why := format('%s %s is drained: %s', w.kind, w.name, w.reason);
    if w.gang_id is not null then
      continue when not gangq.try_lock_gang(w.gang_id);
      n := n + gangq.preempt_gang(w.gang_id, reason => why)::integer;
    else
      perform 1 from gangq.live_jobs j where j.id = w.job_id and j.gang_id is null for update skip locked;
      continue when not found;
      n := n + gangq.displace_job(w.job_id, why)::integer;
    end if;
  end loop;
  return n;
end $$;
comment on function gangq.move_away is
  'Internal. Past the deadline of a drain: gangs with a member there are told to stop as a whole, solo jobs each. Returns how many.';
