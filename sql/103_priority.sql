-- set_priority: live work moves in the order.
-- Locks: gangs by id, jobs by id. Never a worker row.

-- Changes the priority of live jobs and gangs; each keeps its age. Nothing that runs is stopped.
-- One job or gang is waited for; of several those that another transaction holds, and those beyond
-- 500 rows, come back with the state left and are as they were: call again with them, in another
-- transaction. One event for the call. Raises GQ001, GQ002, 42501 (another submitter's in a queue
-- that is not shared, or above the caller's ceiling).
create function gangq.set_priority(
  priority integer, job_ids bigint[] default '{}', gang_ids bigint[] default '{}'
) returns table (job_id bigint, gang_id bigint, state text)
language plpgsql as $$
declare
  batch record;
begin
  perform gangq.read_options('set_priority', jsonb_build_object('priority',
    coalesce(to_jsonb(set_priority.priority), '"null"')), null::gangq.arguments);
  perform gangq.check_owner('reprioritise', set_priority.job_ids, set_priority.gang_ids);
  perform gangq.check_ceiling(n.queue, set_priority.priority, gangq.caller(), session_user) from (
    select s.queue
    from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
    where j.id = any (set_priority.job_ids)
    union
    select s.queue
    from gangq.live_gangs g join gangq.shapes s on s.id = g.shape_id
    where g.id = any (set_priority.gang_ids)) n;
  batch := gangq.lock_batch(set_priority.job_ids, set_priority.gang_ids);
  perform gangq.refuse('GQ002', format('job %s is not a live solo job', w.id),
    'It has ended, never existed, or is a member of a gang: then name its gang.')
  from unnest(set_priority.job_ids) as w(id)
  where not exists (select 1 from gangq.live_jobs j where j.id = w.id and j.gang_id is null);
  perform gangq.refuse_missing('gang', w.id::text, true)
  from unnest(set_priority.gang_ids) as w(id)
  where not exists (select 1 from gangq.live_gangs g where g.id = w.id);
  update gangq.live_gangs g set priority = set_priority.priority,
    order_key = gangq.order_key(set_priority.priority, gangq.pos_of(g.order_key))
  where g.id = any (batch.gangs);
  return query
  update gangq.live_jobs j set priority = set_priority.priority,
    order_key = gangq.order_key(set_priority.priority, gangq.pos_of(j.order_key))
  where j.id = any (batch.jobs) or j.gang_id = any (batch.gangs)
  returning j.id, j.gang_id, j.state;
  return query
  select null::bigint, l.id, 'left' from unnest(batch.left_gangs) as l(id)
  union all
  select l.id, null, 'left' from unnest(batch.left_jobs) as l(id);
  -- One for the whole call; of a single job or gang it can be found by its number.
  perform gangq.log_event(gangq.now(), 'priority',
    gang_id => case when cardinality(batch.gangs) = 1 and batch.jobs = '{}' then batch.gangs[1] end,
    job_id => case when cardinality(batch.jobs) = 1 and batch.gangs = '{}' then batch.jobs[1] end,
    data => jsonb_build_object('priority', set_priority.priority, 'job_ids', batch.jobs,
      'gang_ids', batch.gangs));
  perform gangq.wake_tick();
end $$;
