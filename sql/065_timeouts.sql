-- Gangs that get no place for too long. The trigger begin_waiting sets timeout_at when a gang
-- begins to wait; time_out, the last step of a pass, requeues, fails or splits what is overdue.
-- Time in which a gang is not eligible (its queue is paused, or over a limit) does not count. One
-- clock per kind, ineligible_s, runs while gangs of that kind are not eligible; timeout_at includes
-- that time up to the reading that the gang has in its own ineligible_s. time_out moves timeout_at
-- only of overdue gangs of eligible kinds, so a paused queue costs one look.
-- Locks: the gang, then its jobs, with skip locked. What is busy is left to the next pass.

-- A trigger, because many verbs make a gang wait, and a gang that one of them forgot would time out
-- for the hours in which it ran.
--
--   from                        to        timeout_at
--   blocked                     reserved  + the ineligible time so far: the verdict may be deleted
--   blocked                     blocked   in another kind: the same, by the clock of the old kind
--   reserved, draining (no go)  blocked   runs on, but not while it backs off
--   anything else               blocked   anew: timeout_s from now, or from when it is due
--
-- Internal. Trigger: the placement timeout begins when a gang is blocked, due, and has backed off.
-- It ends when the barrier opens: a reservation that is not claimed does not end it.
create function gangq.begin_waiting() returns trigger language plpgsql as $$
declare
  t timestamptz := gangq.now();
  so_far jsonb;
begin
  if tg_op = 'UPDATE' and old.state = 'blocked' then
    new.timeout_at := gangq.timeout_shifted(old, gangq.ineligible_s(old.kind_id, t), t);
    if new.state = 'reserved' then
      return new;
    end if;
    so_far := gangq.clock_since(gangq.kind_clock(old.kind_id, t), old.waited_from);
  elsif tg_op = 'UPDATE' and old.state in ('reserved', 'draining') and old.go_at is null then
    -- Its barrier never opened, so its timeout runs on. Otherwise a gang whose reservations are
    -- never claimed would never time out.
    new.timeout_at := old.timeout_at + (greatest(t, new.not_before) - t);
  else
    new.timeout_at := greatest(t, new.not_before) + make_interval(secs => new.timeout_s);
  end if;
  new.ineligible_s := gangq.ineligible_s(new.kind_id, t);
  new.waited_from := gangq.clock_since(gangq.kind_clock(new.kind_id, t), so_far);
  return new;
end $$;

-- Internal. When a gang times out if the clock of its kind reads this much. The extension is at
-- most the time the gang has waited. A gang that was due later, or had backed off, did not wait all
-- the time in which its kind was not eligible.
create function gangq.timeout_shifted(g gangq.live_gangs, reading float8, t timestamptz)
returns timestamptz language sql immutable
return (g).timeout_at + make_interval(secs => greatest(0, least(reading - (g).ineligible_s,
  extract(epoch from t - (g).timeout_at)::float8 + (g).timeout_s)));

create trigger live_gangs_waits_from_birth before insert on gangq.live_gangs for each row
when (new.state = 'blocked') execute function gangq.begin_waiting();

create trigger live_gangs_waits before update of state, kind_id on gangq.live_gangs for each row
when (new.state = 'blocked' and (old.state <> 'blocked' or old.kind_id <> new.kind_id)
  or old.state = 'blocked' and new.state = 'reserved')
execute function gangq.begin_waiting();

-- Internal. A locked, blocked gang ends as cancelled. Its members wait as single jobs and keep
-- their ids, payloads and counters. The first member keeps the gang's place in the order. The
-- others queue up behind all that wait: places are unique, and a short timeout must be no way to
-- the front. A job keeps what it saved itself, up to the last step that all had saved.
create function gangq.split_gang(g gangq.live_gangs, reason text, t timestamptz) returns void
language plpgsql as $$
declare
  base constant bigint := (select b.base from gangq.id_base() b);
  ids bigint[];
begin
  update gangq.checkpoints c set gang_id = null
  where c.gang_id = (g).id and c.step <= gangq.restore_step(g);
  with placed as (
    select m.id, case when m.nth = 1 then m.order_key
      else gangq.order_key(m.priority, gangq.next_pos(base)) end as order_key
    from (
      select j.id, j.order_key, j.priority, row_number() over (order by j.rank) as nth
      from gangq.live_jobs j where j.gang_id = (g).id and j.state = 'blocked' order by j.rank) m
  ),
  single as (
    update gangq.live_jobs j set state = 'pending', gang_id = null, rank = null,
      epoch_rank = null, role = null, ran_on = null, order_key = p.order_key
    from placed p where j.id = p.id
    returning j.id, j.order_key
  )
  select array_agg(s.id order by s.order_key) into ids from single s;
  perform gangq.log_event(t, 'split', (g).id, (g).epoch, reason => reason,
    data => jsonb_build_object('job_ids', ids));
  perform gangq.end_gang((g).id, 'cancelled',
    format('%s; its members run as single jobs', reason), t);
  perform gangq.wake_jobs(ids, 'sleepers');
end $$;

-- Internal. Carries out the timeout of a locked, blocked gang. requeue: if its planned start is
-- overdue, or no known worker could hold it, it gives up its planned start and backs off; otherwise
-- it goes on waiting. hard: it fails. soft: its members run as single jobs. too_large: why no
-- worker could hold its kind; empty: some could; null: not asked yet.
create function gangq.timed_out(g gangq.live_gangs, t timestamptz, inout too_large text)
language plpgsql as $$
declare
  v gangq.verdicts;
  why text;
  delay interval;
begin
  select x.* into v from gangq.verdicts x
  where x.kind_id = (g).kind_id and x.ask in ('g' || (g).id, '') order by x.ask desc limit 1;
  if (g).timeout_style = 'requeue' and v.gate is distinct from 'infeasible' and not exists (
    select 1 from gangq.plans p
    where p.ask = 'g' || (g).id and not p.kept and p.starts_at <= t) then
    -- It waits for its turn like all others.
    update gangq.live_gangs x set timeout_at = t + make_interval(secs => x.timeout_s),
      ineligible_s = gangq.ineligible_s(x.kind_id, t)
    where x.id = (g).id;
    return;
  end if;
  -- The numbers of what no worker could hold cost a look at all workers: once for a kind.
  too_large := coalesce(too_large, gangq.kind_infeasible((g).kind_id), '');
  why := concat_ws(': ', format('not placed within %s s', (g).timeout_s)
    || case when (g).placement_misses > 0 then format(' (%s its places were not claimed in time)',
      gangq.counted((g).placement_misses, 'time')) else '' end,
    coalesce(nullif(too_large, ''), v.why, v.gate));
  if (g).timeout_style = 'requeue' then
    delay := (
      select gangq.backoff(c.gang_backoff_s, c.gang_backoff_max_s, (g).timeouts + 1)
      from gangq.settings c);
  end if;
  perform gangq.log_event(t, 'timeout', (g).id, (g).epoch, reason => why,
    data => jsonb_build_object('style', (g).timeout_style, 'timeouts', (g).timeouts + 1,
      'gate', v.gate, 'numbers', v.numbers, 'not_before', t + delay));
  case (g).timeout_style
    when 'hard' then perform gangq.end_gang((g).id, 'failed', why, t);
    when 'soft' then perform gangq.split_gang(g, why, t);
    else
      update gangq.live_gangs x set timeouts = x.timeouts + 1, not_before = t + delay,
        timeout_at = t + delay + make_interval(secs => x.timeout_s),
        ineligible_s = gangq.ineligible_s(x.kind_id, t)
      where x.id = (g).id;
      delete from gangq.plans p where p.ask = 'g' || (g).id;
  end case;
end $$;

-- Gangs that have waited for a place for their timeout, not counting time in which they were not
-- eligible (paused, or over a limit): each is requeued, failed or split as it was submitted.
-- Returns how many it looked at.
create function gangq.time_out(most integer default 200) returns integer
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  kind integer;
  gang bigint;
  g gangq.live_gangs;
  reading double precision;
  too_large text;
  n integer := 0;
  later integer;
begin
  perform gangq.check_most(most);
  if not exists (
    select 1 from gangq.live_gangs x where x.state = 'blocked' and x.timeout_at <= t) then
    return 0;
  end if;
  -- The kinds that are eligible, the longest overdue first.
  for kind in
    select k.kind_id from gangq.blocked_kinds k
    where k.timeout_at <= t and not exists (
      select 1 from gangq.verdicts v
      where v.kind_id = k.kind_id and v.ask = '' and gangq.makes_ineligible(v.gate))
    order by k.timeout_at limit most
  loop
    exit when n >= most;
    reading := gangq.ineligible_s(kind, t);
    too_large := null;
    update gangq.live_gangs x
    set ineligible_s = reading, timeout_at = gangq.timeout_shifted(x, reading, t)
    where x.id = any (array(
      select y.id from gangq.live_gangs y
      where y.state = 'blocked' and y.kind_id = kind and y.timeout_at <= t
        and y.ineligible_s < reading
      order by y.timeout_at limit most - n for no key update skip locked));
    get diagnostics later = row_count;
    n := n + later;
    for gang in
      select x.id from gangq.live_gangs x
      where x.state = 'blocked' and x.kind_id = kind and x.timeout_at <= t
        and x.ineligible_s >= reading
      order by x.timeout_at limit most - n
    loop
      continue when not gangq.try_lock_gang(gang);
      select x.* into g from gangq.live_gangs x
      where x.id = gang and x.state = 'blocked' and x.kind_id = kind and x.timeout_at <= t
        and x.ineligible_s >= reading;
      continue when not found;
      begin
        too_large := gangq.timed_out(g, t, too_large);
        n := n + 1;
      exception when lock_not_available then
        null;  -- Another session holds its plan.
      end;
    end loop;
  end loop;
  return n;
end $$;
