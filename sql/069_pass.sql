-- A pass: apply verifies what was decided on a board and carries it out; what was not placed gets a
-- verdict. take_turn and end_turn say who decides next.
-- Locks, each kind in the order of its key, before the first decision is carried out: gangs and
-- members with skip locked; workers, waited for; queues with limits, by name. What is busy is left
-- to the next pass. The row 'pass' of lock_rows before all of them; the row of decider after them.

-- Internal. Why these decisions did not place something: of each the asks that it is about, and
-- their kind.
create function gangq.refusals_in(decisions jsonb)
returns table (
  n bigint, asks text[], action text, kind_id integer, gate text, why text, unblocks text,
  follows text, numbers jsonb
) language sql stable as $$
  select x.n, array[y.ask] || array(select jsonb_array_elements_text(x.value -> 'alike')),
    x.value ->> 'action', k.kind_id, left(y.refused ->> 'gate', 100), left(x.value ->> 'why', 500),
    left(x.value ->> 'unblocks', 500), left(x.value ->> 'follows', 500),
    gangq.cut(jsonb_strip_nulls(y.refused || jsonb_build_object('after', x.value -> 'after',
      'used', trim_scale((y.refused ->> 'limit')::numeric - (y.refused ->> 'have')::numeric))),
      4000)
  from jsonb_array_elements(decisions) with ordinality as x(value, n)
  cross join lateral (select x.value ->> 'ask' as ask, x.value -> 'refused' as refused) y
  left join gangq.live_gangs g
    on g.id = case when y.ask ~ '^g' then substr(y.ask, 2)::bigint end
  cross join lateral (
    select case when y.ask ~ '^k' then -split_part(substr(y.ask, 2), '/', 1)::integer
      else g.kind_id end as kind_id) k
  where k.kind_id is not null and y.refused ->> 'gate' is not null
$$;

-- Internal. Why what waits was not placed: of each kind, and of each ask that differs from it. A
-- verdict is written when it has changed, not in every pass; since and waited change with the
-- gate alone. A kind gets the verdict of its first waiting ask without a planned start or reserved
-- seats; if all have one, of the first.
create function gangq.note_verdicts(decisions jsonb, t timestamptz) returns void
language plpgsql set plan_cache_mode = force_generic_plan as $$
begin
  with said as materialized (
    select r.* from gangq.refusals_in(decisions) r
  ),
  kinds as materialized (
    select distinct on (s.kind_id) s.*
    from said s order by s.kind_id, s.action in ('plan', 'stop'), s.n
  ),
  verdicts as materialized (
    select k.n, k.kind_id, '' as ask, k.gate, k.why, k.unblocks, k.follows, k.numbers from kinds k
    union all
    select s.n, s.kind_id, a.ask, s.gate, s.why, s.unblocks, s.follows, s.numbers
    from said s join kinds k on k.kind_id = s.kind_id
    cross join lateral unnest(s.asks) as a(ask)
    where (s.gate, s.why, s.unblocks, s.follows)
      is distinct from (k.gate, k.why, k.unblocks, k.follows)
  ),
  alike as (
    delete from gangq.verdicts v using said s
    where v.kind_id = s.kind_id and v.ask = any (s.asks)
      and not exists (select 1 from verdicts x where x.kind_id = v.kind_id and x.ask = v.ask)
  )
  insert into gangq.verdicts as v (kind_id, ask, gate, since, why, unblocks, follows, numbers)
  -- Of an ask that a decider names twice the first decision counts.
  select distinct on (x.kind_id, x.ask)
    x.kind_id, x.ask, x.gate, t, x.why, x.unblocks, x.follows, x.numbers
  from verdicts x order by x.kind_id, x.ask, x.n
  on conflict (kind_id, ask) do update set gate = excluded.gate, why = excluded.why,
    unblocks = excluded.unblocks, follows = excluded.follows, numbers = excluded.numbers,
    since = case when v.gate = excluded.gate then v.since else t end,
    waited = case when v.gate = excluded.gate then v.waited else gangq.gate_clock(v, t) end
  where (v.gate, v.why, v.unblocks, v.follows)
      is distinct from (excluded.gate, excluded.why, excluded.unblocks, excluded.follows)
    -- The tick is due at its moment.
    or v.gate = 'rate' and v.numbers -> 'at' is distinct from excluded.numbers -> 'at';
end $$;

-- Internal. Writes down a part of a pass that decided something: to ask why, and to run it again. A
-- decider that fails over a gang says so in each pass: an event an hour, of ten gangs a pass.
create function gangq.record_pass(pass bigint, decisions jsonb, seen jsonb, t timestamptz)
returns void language plpgsql as $$
declare
  failed record;
  news boolean := false;
begin
  for failed in
    select substr(x.value ->> 'ask', 2)::bigint as gang_id, x.value -> 'refused' ->> 'where' as why
    from jsonb_array_elements(record_pass.decisions) with ordinality as x(value, n)
    where x.value -> 'refused' ->> 'gate' = 'error' and x.value ->> 'ask' ~ '^g'
    order by x.n limit 10
  loop
    continue when exists (
      select 1 from gangq.events e
      where e.gang_id = failed.gang_id and e.kind = 'decision_failed'
        and e.at > t - interval '1 h');
    perform gangq.log_event(t, 'decision_failed', failed.gang_id, reason => left(failed.why, 500));
    news := true;
  end loop;
  insert into gangq.passes (at, pass, digest, decisions, board)
  select t, record_pass.pass, left(seen ->> 'digest', 64), record_pass.decisions,
    case when s.record_decisions or news then (seen ->> 'board')::json end
  from gangq.settings s
  where news or exists (
    select 1 from jsonb_array_elements(record_pass.decisions) as x(value)
    where x.value ->> 'action' in ('start', 'stop', 'move'));
end $$;

-- Internal. Deletes plans that no pass since this one has renewed, kept seats that have expired,
-- and verdicts of kinds with nothing waiting.
create function gangq.forget_old_plans(pass bigint, t timestamptz) returns void
language plpgsql as $$
begin
  delete from gangq.plans p where p.ask = any (array(
    select z.ask from gangq.plans z
    where case when z.kept then z.starts_at <= t else z.pass < forget_old_plans.pass end
    order by z.ask for update skip locked));
  delete from gangq.verdicts v where (v.kind_id, v.ask) in (
    select z.kind_id, z.ask
    from gangq.verdicts z
    -- One by one: for an exists the planner reads all that waits and makes a hash table of it.
    where (case
        when z.kind_id < 0 then (
          select true from gangq.live_jobs j
          where j.shape_id = -z.kind_id and j.state = 'pending' limit 1)
        -- In `alike` a decider may have written anything.
        when z.ask <> '' then (
          select g.state = 'blocked' or g.missing_since is not null
          from gangq.live_gangs g
          where g.id = case when z.ask ~ '^g[0-9]{1,18}$' then substr(z.ask, 2)::bigint end)
        else coalesce((
          select true from gangq.live_gangs g
          where g.kind_id = z.kind_id and g.state = 'blocked' limit 1), (
          select true from gangq.live_gangs g
          where g.kind_id = z.kind_id and g.missing_since is not null limit 1)) end) is not true
    order by z.kind_id, z.ask for update skip locked);
end $$;

-- Internal, for lock_decided. Locks the workers on which something starts. A claim holds its worker
-- for a moment: waiting for it in order is surer than skipping it. What is held for longer is left
-- to the next pass.
create function gangq.lock_seats(decisions jsonb) returns void language plpgsql as $$
declare
  workers bigint[] := array(
    select (y.value ->> 'worker')::bigint
    from jsonb_array_elements(decisions) as x(value)
    cross join lateral jsonb_array_elements(x.value -> 'seats') as y(value)
    where x.value ->> 'action' = 'start');
begin
  perform from gangq.incarnations i where i.id = any (workers) order by i.id for no key update;
exception when lock_not_available then
  perform from gangq.incarnations i
  where i.id = any (workers) order by i.id for no key update skip locked;
end $$;

-- Internal. Locks all that these decisions are about, except those that only wait: they change
-- nothing. units: the gangs and jobs locked; it lacks those that are busy or have ended, and single
-- jobs that wait (k7/5): their places are checked under the worker's row. busy_queues, busy_keys:
-- those with limits, if another session holds one of them; else null.
create function gangq.lock_decided(decisions jsonb, out units text[], out busy_queues text[],
  out busy_keys text[]
) language plpgsql as $$
declare
  gangs bigint[];
  singles bigint[];
  queues text[];
  keys text[];
begin
  select array_agg(substr(u.name, 2)::bigint) filter (where left(u.name, 1) = 'g'),
    coalesce(array_agg(substr(u.name, 2)::bigint) filter (where left(u.name, 1) = 'j'), '{}')
  into gangs, singles
  from jsonb_array_elements(decisions) as x(value)
  cross join lateral (
    select x.value ->> 'ask' where x.value ->> 'action' <> 'wait'
    union all
    select jsonb_array_elements_text(x.value -> 'stop')) as u(name);
  gangs := array(
    select g.id
    from (
      select unnest(gangs) as id
      union
      select j.gang_id from gangq.live_jobs j where j.id = any (singles) and j.gang_id is not null
      order by 1) g
    where gangq.try_lock_gang(g.id));
  units := array(
    select 'g' || g.id from unnest(gangs) as g(id)
    union all
    select 'j' || j.id from gangq.live_jobs j
    where j.id = any (singles) and j.gang_id = any (gangs));
  units := units || array(
    select 'j' || j.id from gangq.live_jobs j
    where j.id = any (singles) and j.gang_id is null order by j.id for update skip locked);
  perform gangq.lock_seats(decisions);
  select array_agg(distinct s.queue), array_agg(distinct s.limit_key) into queues, keys
  from (
    select g.shape_id from gangq.live_gangs g where g.id = any (gangs)
    union all
    select substr(split_part(x.value ->> 'ask', '/', 1), 2)::integer
    from jsonb_array_elements(decisions) as x(value)
    where x.value ->> 'ask' ~ '^k' and x.value ->> 'action' = 'start') y
  join gangq.shapes s on s.id = y.shape_id;
  begin
    perform gangq.lock_limited(queues, keys);
  exception when lock_not_available then
    busy_queues := array(
      select q from unnest(queues) as q
      where exists (
        select from gangq.queues_table x where x.limited and x.name = any (gangq.queue_path(q))));
    busy_keys := keys;
  end;
end $$;

-- Internal. Verifies and carries out one decision: done, stale, busy, or why it is refused.
create function gangq.apply_one(
  d jsonb, place integer, units text[], busy_queues text[], busy_keys text[], digest text,
  t timestamptz
) returns text language plpgsql as $$
declare
  action constant text := d ->> 'action';
  starts_at timestamptz;
  g gangq.live_gangs;
  a gangq.asker;
begin
  if exists (
    select 1 from jsonb_array_elements_text(coalesce(d -> 'stop', '[]') || (d -> 'ask')) as u(name)
    where left(u.name, 1) <> 'k' and u.name <> all (units)) then
    return 'busy';
  elsif action = 'move' then
    return gangq.apply_move(d, digest, t);
  end if;
  a := gangq.asker_of(d ->> 'ask');
  if a.ask is null then
    return 'stale';
  elsif a.queue = any (busy_queues) or gangq.key_of(a.kind_id) = any (busy_keys) then
    return 'busy';
  end if;
  select x.* into g from gangq.live_gangs x where x.id = a.gang_id;
  case
    when action = 'start' and a.gang_id is null then
      return gangq.apply_places(a, d, t);
    when action = 'start' then
      return gangq.apply_start(g, a, d -> 'seats', digest, t);
    when action in ('plan', 'stop') and g.state <> 'blocked' then
      return 'stale';
    when action = 'stop' then
      return gangq.apply_stop(a, d, digest, t);
    when action = 'plan' then
      starts_at := to_timestamp((d ->> 'starts_at')::float8);
      perform gangq.check_moment('starts_at', starts_at);
      perform gangq.write_plan(a, d -> 'planned', t, place, starts_at);
      return 'done';
    else
      return format('%L is no action: start, stop, plan, move or wait', action);
  end case;
exception
  when lock_not_available or deadlock_detected then
    return 'busy';
  when others then
    -- One decision that makes no sense must not keep the others from being carried out. One whose
    -- workers, places or verdict cannot be read refuses the whole part.
    if sqlstate !~ '^(GQ|22)' then
      raise warning 'gangq.apply: % of % failed: % (%)', action, d ->> 'ask', sqlerrm, sqlstate;
    end if;
    return sqlerrm;
end $$;

-- 1. The row of the pass: a part of an older pass, or one that is repeated, changes nothing.
-- 2. All locks in the order of the schema. A decision whose rows are busy is skipped, so that no
--    later step waits.
-- 3. Places are closed, so that this pass may use what they held, and those that stay are renewed.
-- 4. The decisions, in their order.
-- 5. Why the rest waits, and the record. Step 6 reads both the plans and the verdicts.
-- 6. The last part: gangs time out, after all that could be placed has been. Then old plans go, and
--    the turn ends, which waits for the row of decider.
--
-- Carries out what was decided on the board of this pass, each decision verified by itself. A gang
-- is placed whole or not at all. Of the places for single jobs those that are free are opened, and
-- the outcome says why another was not. decisions: [{"ask": "g7", "action": start, stop, plan, move
-- or wait, "seats" or "planned": [{"worker", "devices", "role"}], "stop": ["g3", "j5"],
-- "starts_at", "refused", "alike": others of its kind that wait for the same}], at most 50 that
-- place or stop something, and 1,000 in all. part: 1 begins the pass, others follow in order; last:
-- this part is its last. seen: {"digest", "asked", "board"} of the board, which is text. accepted:
-- false where a newer pass has begun or this part was taken before, and nothing was done. outcomes:
-- of each that is not a wait done, stale, busy, or why it was refused. again: decide again soon.
-- Call it in autocommit: see tick. Raises GQ001 (a decision cannot be read: nothing of this part is
-- done), GQ007 (a board over 64 MiB), GQ008.
create function gangq.apply(
  pass bigint, decisions jsonb, part integer default 1, last boolean default true,
  seen jsonb default '{}', closes bigint[] default '{}'
) returns table (accepted boolean, outcomes jsonb, again boolean) language plpgsql as $$
declare
  t timestamptz := gangq.now();
  mine record;
  d jsonb;
  said text;
  place integer := 0;
  digest text := left(apply.seen ->> 'digest', 64);
begin
  perform gangq.require_read_committed('apply');
  perform gangq.check_decisions(apply.decisions);
  perform gangq.refuse_larger('the board', octet_length(apply.seen ->> 'board'), 67108864);
  outcomes := '{}';
  again := true;
  -- 1. Nothing is done from an older board: whoever began a pass since has seen more. Each part
  -- moves the number on, so one that is sent again after a lost reply is refused.
  perform from gangq.lock_rows l
  where l.name = 'pass' and l.runs + 1 - apply.part = apply.pass for update skip locked;
  accepted := found;
  if not accepted then
    return next;
    return;
  end if;
  update gangq.lock_rows l set runs = l.runs + 1 where l.name = 'pass';
  perform gangq.hang_up_soon();
  -- 2.
  mine := gangq.lock_decided(apply.decisions);
  -- 3.
  perform gangq.close_places(apply.closes);
  perform gangq.renew_places(apply.decisions, 'refills', t);
  -- 4.
  for d in
    select x.value from jsonb_array_elements(apply.decisions) with ordinality as x(value, n)
    where x.value ->> 'action' <> 'wait' order by x.n
  loop
    place := place + (d ->> 'action' = 'plan')::integer;
    said := gangq.apply_one(d, place, mine.units, mine.busy_queues, mine.busy_keys,
      digest, t);
    outcomes := outcomes || jsonb_build_object(d ->> 'ask', said);
    if said <> 'done' then
      -- It keeps what it was promised.
      update gangq.plans p set pass = apply.pass + 1 where p.ask = any (array(
        select z.ask from gangq.plans z where z.ask = d ->> 'ask' for update skip locked));
    end if;
  end loop;
  -- 5.
  perform gangq.note_verdicts(apply.decisions, t);
  perform gangq.record_pass(apply.pass, apply.decisions, apply.seen, t);
  -- 6.
  if apply.last then
    -- A gang whose planned start is now does not time out.
    perform gangq.tick_step('time_out', decides => true);
    perform gangq.forget_old_plans(apply.pass + 1, t);
    again := gangq.end_turn((apply.seen ->> 'asked')::bigint,
      (apply.seen ->> 'now')::float8, t);
  end if;
  again := again
    or exists (select 1 from jsonb_each_text(outcomes) o where o.value in ('busy', 'stale'));
  return next;
exception when data_exception then
  perform gangq.refuse('GQ001', format('a decision cannot be read: %s', sqlerrm),
    'Pass what gangq decide has said.');
end $$;

-- Internal. Refuses what cannot be read, or too many.
create function gangq.check_decisions(decisions jsonb) returns void language plpgsql as $$
declare
  n record;
begin
  if coalesce(jsonb_typeof(decisions), 'null') <> 'array' then
    perform gangq.refuse('GQ001', 'decisions are no list', 'Pass what gangq decide has said.');
  end if;
  perform gangq.refuse_larger('the decisions', octet_length(decisions::text),
    gangq.most_evidence());
  select count(*) filter (where y.action in ('start', 'stop', 'move')) as changes,
    count(*) as decisions, (array_agg(x.value order by x.n) filter (
      where coalesce(y.ask, '') !~ '^([gj][0-9]{1,18}|k[0-9]{1,9}/-?[0-9]{1,4})$'
        or y.action is null or left(y.ask, 1) = 'j' and y.action <> 'move'
        or exists (
          select 1 from jsonb_array_elements_text(case jsonb_typeof(x.value -> 'stop')
            when 'array' then x.value -> 'stop' else '[]' end) as u(name)
          where u.name !~ '^[gj][0-9]{1,18}$')))[1] as wrong
  into n
  from jsonb_array_elements(check_decisions.decisions) with ordinality as x(value, n)
  cross join lateral (select x.value ->> 'ask' as ask, x.value ->> 'action' as action) y;
  if n.changes > 50 or n.decisions > 1000 then
    perform gangq.refuse('GQ001',
      format('%s decisions place or stop something, of %s', n.changes, n.decisions),
      'At most 50 a call, and 1,000 in all: pass the rest as further parts.');
  elsif n.wrong is not null then
    perform gangq.refuse('GQ001', format('%s is no decision', left(n.wrong::text, 200)),
      'ask is g and a gang''s id, or j and a job''s; action says what is decided.');
  end if;
end $$;

-- Who decides -------------------------------------------------------------------------------------

-- Internal. decide: the caller may decide now. wait_s: in how many seconds to ask again, because
-- another has the turn until then; null: not at all (the caller decides, nothing waits, or the
-- caller may not). busy: a pass that is left open holds the row, and nobody else can decide before
-- it ends. A session that ticks and finds that something waits to be placed has the turn for a
-- second, unless another has it: that one learns from asked that there is more to see, and goes on.
create function gangq.take_turn(
  t timestamptz, out decide boolean, out wait_s real, out busy boolean
) language plpgsql as $$
declare
  others_until timestamptz;
begin
  decide := false;
  busy := false;
  if not exists (
      select 1 from gangq.live_gangs g
      where g.state = 'blocked' and (g.not_before is null or g.not_before <= t))
    and not exists (select 1 from gangq.live_gangs g where g.missing_since is not null)
    and not exists (select 1 from gangq.cordons c where c.drain)
    and not exists (select 1 from gangq.plans p)
    and not gangq.single_waits()
    or not (gangq.may_act_as('gangq_worker') or gangq.is_admin())
  then
    return;
  end if;
  -- A turn lasts for a second: one that ends later is from before the clock was set back.
  select case when d.until > t and d.until <= t + interval '1 s' then d.until end into others_until
  from gangq.decider d for update;
  update gangq.decider d
  set asked = d.asked + 1, until = coalesce(others_until, t + interval '1 s');
  decide := others_until is null;
  wait_s := extract(epoch from others_until - t);
exception when lock_not_available then
  wait_s := 0.05;
  busy := true;
end $$;

-- Internal. Ends the turn; true: somebody has asked since the board was read, and it goes on.
create function gangq.end_turn(asked bigint, began float8, t timestamptz) returns boolean
language plpgsql as $$
declare
  more boolean;
begin
  select d.asked is distinct from end_turn.asked into more from gangq.decider d for update;
  update gangq.decider d set decided_at = t, until = case when more then t + interval '1 s' end,
    -- began comes from the caller and may be any number.
    pass_s = case when end_turn.began is not null
      then greatest(0, least(1e6, extract(epoch from gangq.now()) - end_turn.began)) end;
  return more;
exception when lock_not_available then
  return true;  -- a tick that is left open has it: the turn ends by itself
end $$;
