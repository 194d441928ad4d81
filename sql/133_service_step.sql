-- keep_services, the step of the tick that keeps what services want: service_step says what is to
-- be done next, do_service_step does it, for each service again and again until nothing is left.
-- The first rule that applies is done, and the next look sees what that has changed:
--  1. ended: a gang that has ended is forgotten. If it was wanted, that is a failure: the next gang
--     is made after a backoff that doubles with each failure in a row, and an event says so.
--  2. stop: a gang that left the endpoints linger_s ago is told to stop.
--  3. late: a gang of which a member has not been ready for ready_within_s leaves. A failure, too.
--  4. ready: all members of a gang are ready for the first time.
--  5. good: enough gangs of a new revision are ready.
--  6. scale: another number of replicas is asked for (132).
--  7. leave: a gang leaves that is not wanted: of another revision, on a host that is drained
--     (surge > 0), or one too many. It leaves the endpoints at once. One that is ready leaves only
--     if enough others are ready.
--  8. make: too few gangs are of the wanted revision and (surge > 0) on hosts that are not drained.
--  9. steady: all have been ready for a minute, so earlier failures are forgotten.
-- 10. gone: a deleted service has no gang any more.
-- So an update, a move and a change of the number are one rule, 7 and 8. With surge 0 a drained
-- host is no reason here: the pass moves the gang, which stays the same (055).
--
-- Its invariants. size: of a gang of the wanted revision; old: of the largest gang that is replaced
-- or leaves; existing replicas are those of all gangs, leaving ones included.
--    surge > 0: a gang is made only if existing < wanted + surge * old
--               a ready gang leaves only if the ready replicas that stay >= wanted
--    surge = 0: a gang is made only if existing + size <= wanted, or no gang is replaced or leaves
--               a ready gang leaves as above; or if it is replaced, no other gang starts or leaves,
--               and a new gang either cannot be made beside it or waits for room
-- So an update ends whatever the two sizes are: if no old gang may leave, a new one may be made.
-- If both sizes are the same, at most surge gangs more than wanted exist, and with surge 0 and room
-- for all of them at most one gang less than wanted is ready. While a new gang waits that the
-- workers could not hold even when idle, no other leaves for it. But with surge 0 the room that a
-- gang leaves goes to the first in line: if that is other work, the next gang leaves too.
--
-- If a gang of a new revision fails before it was ever ready, and an older revision was good, the
-- update halts: what is ready of either stays, and what is lacking is made of the older one.
--
-- Two ticks: the row of the service is locked with skip locked, and read again under the lock. A
-- tick that dies has made a gang together with its row, or neither.
--
-- Locks: rows of services, before all others but schedules, with skip locked; then gangs and jobs
-- as every step of the tick does, with skip locked, and what submit_gang locks, for 100 ms at most.

-- Internal. The gangs that are to leave, and why. place: first what is replaced, then what is not
-- placed, what is not ready, and what has the least to do. A gang without a load is the last: it
-- may be the busiest.
create function gangq.gangs_to_leave(
  s gangq.services_table, f gangq.service_fact[], n gangq.service_counts
) returns table (gang_id bigint, why text, place integer) language sql stable as $$
  select x.gang_id, case
      when n.want = 0 then 'the service is stopped'
      else coalesce(x.replaced, format('%s are wanted', gangq.counted(n.want, 'replica'))) end,
    row_number() over (order by x.replaced is null, x.state in ('waiting', 'blocked') desc,
      x.ready, x.load, x.made_at desc, x.gang_id desc)::integer
  from unnest(f) x
  where x.state is not null and x.stop_at is null and (
    -- The service is stopped.
    n.want = 0
    -- The gang is replaced or one too many. If it is ready, enough others are ready.
    or (
      (x.replaced is not null or n.present - x.size >= n.want)
      and (not x.ready or n.ready - x.size >= n.want))
    -- With surge 0 a replaced gang leaves before another is ready, but one at a time: if the next
    -- gang waits for its room, or would be one too many beside it.
    or (
      x.replaced is not null and (s).surge = 0
      and not n.starting and not n.leaving and not n.impossible
      and (n.waiting or n.existing + n.one_gang > n.want)))
$$;

-- Internal. What the tick does next for a service; action null: nothing. busy: gangs that another
-- transaction holds.
create function gangq.service_step(
  s gangq.services_table, t timestamptz, busy bigint[] default '{}',
  out action text, out gang_id bigint, out why text
) language plpgsql stable as $$
declare
  f gangq.service_fact[] := array(select x from gangq.service_facts(s, t) x);
  n gangq.service_counts := gangq.count_gangs(s, f);
begin
  select d.action, d.gang_id, d.why into action, gang_id, why
  from (
    select 1 as rule, 'ended' as action, x.gang_id, null as why, 0 as place
    from unnest(f) x where x.state is null
    union all
    select 2, 'stop', x.gang_id, null, 0
    from unnest(f) x
    where x.stop_at <= t and x.state is not null and not x.cancelling
    union all
    select 3, 'late', x.gang_id, x.late, 0
    from unnest(f) x where x.late is not null and x.stop_at is null
    union all
    select 4, 'ready', x.gang_id, null, 0
    from unnest(f) x where x.ready and x.ready_at is null and x.stop_at is null
    union all
    select 5, 'good', null, null, 0
    where (s).good_revision is distinct from (s).revision and (s).halted is null and n.want > 0
      and n.ready_of_revision >= n.want
    union all
    select 6, 'scale', null, null, 0
    where (gangq.scaled(s, f, t)).service is not null
    union all
    select 7, 'leave', l.gang_id, l.why, l.place from gangq.gangs_to_leave(s, f, n) l
    union all
    select 8, 'make', null, null, 0
    where n.present < n.want and ((s).next_try_at <= t) is not false and case
      when (s).surge > 0 then n.existing < n.want + (s).surge * n.largest_replaced
      -- After an update has halted, a gang of the good revision may be larger than what is wanted.
      else n.existing + n.one_gang <= n.want or n.existing = n.present end
    union all
    select 9, 'steady', null, null, 0
    where (s).problem is not null and (s).halted is null and n.ready_of_revision >= n.want
      and not exists (
        select from unnest(f) x
        where x.stop_at is null and (x.ready_at <= t - interval '60 s') is not true)
    union all
    select 10, 'gone', null, null, 0 where (s).deleting and f = '{}') d
  where d.gang_id is null or d.gang_id <> all (busy)
  order by d.rule, d.place, d.gang_id limit 1;
end $$;

-- Internal. A gang of a service has failed: the next one waits, and an update halts. Returns the
-- service.
create function gangq.note_failure(
  s gangq.services_table, k gangq.service_gangs_table, why text, t timestamptz
) returns gangq.services_table language plpgsql as $$
declare
  about jsonb;
  c gangq.settings;
begin
  select x.* into c from gangq.settings x;
  s.failures := case when k.ready_at <= t - interval '60 s' then 1 else s.failures + 1 end;
  s.next_try_at := t + gangq.backoff(c.gang_backoff_s, c.gang_backoff_max_s, s.failures);
  s.problem := gangq.shortened(
    coalesce('gang g' || k.gang_id || ': ', '') || coalesce(why, 'it ended'), 2000);
  about := jsonb_build_object('service', s.name, 'revision', k.revision, 'failures', s.failures);
  perform gangq.log_event(t, 'service_failed', k.gang_id, reason => s.problem,
    data => about || jsonb_build_object('next_try_at', s.next_try_at));
  if s.failures = 3 then
    perform gangq.log_event(t, 'crash_loop', k.gang_id, reason => s.problem, data => about);
  end if;
  if s.halted is null and k.revision = s.revision and s.good_revision <> s.revision
    and k.ready_at is null
  then
    s.halted := format('revision %s did not become ready: %s', s.revision, s.problem);
    s.next_try_at := null;
    perform gangq.log_event(t, 'update_halted', k.gang_id, reason => s.halted,
      data => jsonb_build_object('service', s.name, 'revision', s.revision,
        'good_revision', s.good_revision));
  end if;
  return s;
end $$;

-- Internal. Submits a gang of a service as who stored it would. What refuses it is noted as a
-- failure. Returns the service. Raises 55P03.
create function gangq.make_service_gang(s gangq.services_table, t timestamptz)
returns gangq.services_table language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  r gangq.service_revisions := gangq.revision_to_make(s);
  w record;
  a gangq.arguments;
  o gangq.gang_options;
  g gangq.live_gangs;
  k gangq.service_gangs_table;
begin
  k.revision := r.revision;
  perform gangq.check_may_submit('service', s.submitter, s.login);
  w := gangq.read_work(r.work || jsonb_build_object('size', r.gang_size), 'service');
  a := w.a;
  a.task := r.task;
  a.payload := r.payload;
  o := gangq.read_options('submit_gang', jsonb_build_object('name', s.name, 'budget_s', 1e9,
    'max_attempts', 1, 'timeout_style', 'requeue', 'wait_for_hardware', true) || w.options, o);
  g.submitted_at := t;
  g.submitter := s.submitter;
  g.login := s.login;
  g.service := s.name;
  select n.gang_id into k.gang_id from gangq.add_gang(a, o, g, '{}') n;
  insert into gangq.service_gangs_table (gang_id, service, revision, size, made_at)
  values (k.gang_id, s.name, r.revision, r.gang_size, t);
  -- The backoff is over: nothing more is due for it.
  s.next_try_at := null;
  return s;
exception
  when lock_not_available or deadlock_detected then
    raise;
  when others then
    return gangq.note_failure(s, k, format('%s (%s)', sqlerrm, sqlstate), t);
end $$;

-- Internal. Does what service_step has said, to a service whose row is locked. Returns the service.
-- Raises 55P03.
create function gangq.do_service_step(
  s gangq.services_table, action text, gang bigint, why text, t timestamptz
) returns gangq.services_table language plpgsql as $$
declare
  k gangq.service_gangs_table;
  ended record;
begin
  select x.* into k from gangq.service_gangs_table x where x.gang_id = gang;
  case action
    when 'ended' then
      delete from gangq.service_gangs_table x where x.gang_id = gang;
      -- A report that met the end of its gang may have written a row after this step for that gang,
      -- or holds its row now: the next gang that ends takes that with it.
      delete from gangq.replicas r where r.job_id = any (array(
        select y.job_id from gangq.replicas y
        where not exists (select from gangq.service_gangs_table x where x.gang_id = y.gang_id)
        for update of y skip locked));
      select h.state, h.reason into ended from gangq.gang_history h
      where h.gang_id = gang order by h.finished_at desc limit 1;
      -- One that was cancelled by hand has not failed.
      if k.stop_at is null and ended.state is distinct from 'cancelled' then
        s := gangq.note_failure(s, k, coalesce(ended.reason, case ended.state
          when 'done' then 'its replicas have returned' end), t);
      end if;
    when 'stop' then
      perform gangq.cancel_gang(gang, k.why, t);
    when 'late' then
      update gangq.service_gangs_table x set stop_at = t, why = do_service_step.why
      where x.gang_id = gang;
      s := gangq.note_failure(s, k, why, t);
    when 'leave' then
      update gangq.service_gangs_table x
      set why = do_service_step.why,
        stop_at = t + case when exists (select from gangq.endpoints e where e.gang_id = gang)
          then make_interval(secs => s.linger_s) else interval '0' end
      where x.gang_id = gang;
      perform gangq.endpoints_changed(array[gang]);
      perform gangq.log_event(t, 'service_leaves', gang, reason => why,
        data => jsonb_build_object('service', s.name, 'revision', k.revision));
    when 'ready' then
      update gangq.service_gangs_table x set ready_at = t where x.gang_id = gang;
      perform gangq.log_event(t, 'service_ready', gang,
        data => jsonb_build_object('service', s.name, 'revision', k.revision));
    when 'good' then
      s.good_revision := s.revision;
      update gangq.service_revisions x set good_at = t
      where x.service = s.name and x.revision = s.revision;
    when 'scale' then
      s := gangq.do_scaling(s, t);
    when 'make' then
      s := gangq.make_service_gang(s, t);
    when 'steady' then
      s := gangq.try_again(s);
    when 'gone' then
      delete from gangq.services_table x where x.name = s.name;
      perform gangq.log_event(t, 'service_gone', data => jsonb_build_object('service', s.name));
  end case;
  perform gangq.keep_service(s);
  return s;
end $$;

-- Internal. The step of the tick that keeps what services want. Returns how many things it did,
-- large gangs counted as in submit_schedules; -1: some are held up by a lock.
create function gangq.keep_services(most integer default 200) returns integer
language plpgsql set lock_timeout = '100ms' set client_min_messages = 'warning' as $$
declare
  t timestamptz := gangq.now();
  s gangq.services_table;
  step record;
  held bigint[];
  busy boolean := false;
  done integer := 0;
begin
  for s in select x.* from gangq.services_table x order by x.name loop
    continue when (gangq.service_step(s, t)).action is null;
    exit when done >= most;
    select x.* into s from gangq.services_table x where x.name = s.name for update skip locked;
    continue when not found;
    held := '{}';
    loop
      step := gangq.service_step(s, t, held);
      exit when step.action is null or done >= most;
      if step.action = 'stop' and not gangq.try_lock_gang(step.gang_id) then
        held := held || step.gang_id;
        busy := true;
        continue;
      end if;
      begin
        s := gangq.do_service_step(s, step.action, step.gang_id, step.why, t);
      exception
        when lock_not_available or deadlock_detected then
          busy := true;
          exit;
      end;
      done := done + 1 + coalesce((
        select r.gang_size from gangq.service_revisions r
        where r.service = s.name and r.revision = s.revision), 0) / 100;
      exit when step.action = 'gone';
    end loop;
  end loop;
  return case when busy then -1 else done end;
end $$;
