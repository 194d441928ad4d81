-- A gang ends: when it is fulfilled, and how it moves to history with its members.
-- Locks: called under the lock of the gang and all its members. Never a worker row.

-- Internal. Whether a member is done and none of this epoch is not; of the role that completion
-- names, if it names one.
create function gangq.fulfilled(gang_id bigint) returns boolean
language plpgsql stable as $$
declare
  g gangq.live_gangs;
  completing integer;
begin
  select x.* into g from gangq.live_gangs x where x.id = fulfilled.gang_id;
  select r.ordinal into completing
  from gangq.kind_roles r where r.kind_id = g.kind_id and r.name = g.completion;
  return exists (
      select from gangq.live_jobs j
      where j.gang_id = g.id and j.state = 'done' and j.role = coalesce(completing, j.role))
    and not exists (
      select from gangq.live_jobs j
      where j.gang_id = g.id and j.state <> 'done' and gangq.in_epoch(j, g)
        and j.role = coalesce(completing, j.role));
end $$;

-- Internal. Ends a gang as done if it is fulfilled, after the members that still run have stopped.
-- A gang of a service ends as soon as a member of it has returned.
create function gangq.wind_up(gang_id bigint, t timestamptz) returns boolean
language plpgsql as $$
declare
  fulfilled boolean := gangq.fulfilled(gang_id);
  serves boolean := exists (
    select from gangq.live_gangs g where g.id = wind_up.gang_id and g.service is not null);
begin
  if not (fulfilled or serves) then
    return false;
  elsif exists (
    select from gangq.live_jobs j
    where j.gang_id = wind_up.gang_id and j.state in ('reserved', 'running', 'preempting'))
  then
    perform gangq.drain(gang_id, '{}', '{}', 'completed', null,
      case when fulfilled then 'what it is for is done'
        else 'a replica of a service has returned, and its gang restarts as a whole' end, t);
  else
    -- In the other case drain notifies.
    perform gangq.endpoints_changed(array[wind_up.gang_id]) where serves;
    perform gangq.end_gang(gang_id, 'done', null, t);
  end if;
  return true;
end $$;

-- Internal. A gang and its members move to history. If failed it keeps its checkpoints for a retry.
create function gangq.end_gang(gang_id bigint, final_state text, reason text, t timestamptz)
returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  g gangq.live_gangs;
  waited jsonb;
begin
  select x.* into g from gangq.live_gangs x where x.id = end_gang.gang_id;
  waited := gangq.waited_of(g, t);
  -- Members that a done gang did not need are cancelled.
  update gangq.live_jobs j set finished_at = t, waits_on = 0,
    state = case end_gang.final_state when 'done' then 'cancelled' else end_gang.final_state end,
    error = case when end_gang.final_state = 'failed'
      then coalesce(j.error, jsonb_build_object('type', 'GangFailed', 'message', end_gang.reason))
      else j.error end
  where j.gang_id = g.id and j.state not in ('done', 'failed', 'cancelled');
  -- Before the members leave: gangq.ended_as reads this row for their dependents.
  insert into gangq.gang_history
  select h.*
  from gangq.shapes s
  join gangq.queues_table q on q.name = s.queue
  -- What both tables have is as it was.
  cross join lateral jsonb_populate_record(null::gangq.gang_history,
    to_jsonb(g) || jsonb_build_object('gang_id', g.id, 'finished_at', t,
      'state', end_gang.final_state, 'reason', end_gang.reason, 'retention',
      case end_gang.final_state when 'done' then q.retention_done else q.retention_failed end)) h
  where s.id = g.shape_id;
  perform gangq.leave(
    array(select j.id from gangq.live_jobs j where j.gang_id = g.id order by j.id), '{}', null,
    '{}', null, t, end_gang.final_state);
  if end_gang.final_state <> 'failed' then
    delete from gangq.checkpoints c where c.gang_id = g.id;
  end if;
  delete from gangq.plans p where p.ask = 'g' || g.id;
  delete from gangq.live_gangs x where x.id = g.id;
  perform gangq.log_event(t, 'end', g.id, g.epoch, reason => end_gang.reason,
    data => jsonb_strip_nulls(
      jsonb_build_object('outcome', end_gang.final_state, 'waited', waited)));
  perform gangq.wake_tick();
end $$;
