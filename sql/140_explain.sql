-- Why is it not running: explain_gang, explain_job, and the view waiting. Takes no locks and
-- decides nothing: what is said of something that is placed by decisions is what the last pass
-- wrote down of it (gangq.verdicts), with how long ago that was. Only for light jobs, which whoever
-- has room claims, it is counted here what a claim would find.

-- Workers
-- ---------------------------------------------------------------------------------------------

-- One condition after another, so that each worker falls to the first that it does not meet.
create function gangq.ruled_out(s gangq.shapes, t timestamptz)
returns table (incarnation bigint, fell text, barred text) language sql stable as $$
  select i.id, case
      when s.queue <> all (i.queues) then 'of other queues'
      when s.task <> all (i.tasks) then 'without task ' || s.task
      when not s.labels <@ i.labels then 'without labels ' || s.labels::text
      when gangq.serves(i, s) then null
      when i.taints <> '{}' and gangq.serves(jsonb_populate_record(i, '{"taints": []}'), s)
        then 'with taints it does not tolerate'
      else 'outside the selector' end,
    b.why
  from gangq.barred(ruled_out.t) b join gangq.incarnations i on i.id = b.incarnation
$$;
comment on function gangq.ruled_out is
  'Internal. Of each live worker what keeps it from ever running jobs of this shape (fell), or '
  'from taking any now (barred).';

create function gangq.explain_workers(s gangq.shapes, t timestamptz)
returns table (gate text, ok boolean, detail text, numbers jsonb) language sql stable as $$
  with workers as materialized (
    select coalesce(x.fell, x.barred) as why, x.fell, x.incarnation from gangq.ruled_out(s, t) x
  ),
  counts as (
    select w.why, count(*) as n from workers w where w.why is not null group by w.why
  ),
  taints as (
    select string_agg(distinct u.taint, ', ' order by u.taint) as names
    from workers w
    join gangq.incarnations i on i.id = w.incarnation
    cross join lateral unnest(i.taints) as u(taint)
    where w.fell = 'with taints it does not tolerate'
      and u.taint <> all (coalesce(s.tolerates, '{}'))
  )
  select 'workers', count(*) filter (where w.why is null) > 0,
    format('%s of %s may take it', count(*) filter (where w.why is null),
      gangq.counted(count(*), 'worker'))
    || coalesce('; the others: ' || (
      select string_agg(format('%s %s', c.n, c.why), ', ' order by c.n desc, c.why)
      from counts c), '')
    || coalesce(' (' || t.names || ': --tolerate ' || split_part(t.names, ', ', 1) || ')', ''),
    jsonb_build_object('live', count(*), 'open', count(*) filter (where w.why is null),
      'serving', count(*) filter (where w.fell is null), 'others', coalesce((
        select jsonb_object_agg(c.why, c.n) from counts c), '{}'))
  from workers w cross join taints t
  group by t.names
  union all
  select 'workers', false, 'no worker is registered: start one with gangq worker',
    '{"live": 0, "open": 0, "serving": 0, "others": {}}'
  where not exists (select 1 from workers)
$$;
comment on function gangq.explain_workers is
  'Internal. How many live workers may take jobs of this shape now, and what rules out how many of '
  'the others.';

-- What would fit, of one thing it asks for at a time: the most of it with which that many members
-- fit on idle workers.
create function gangq.nearest_feasible(s gangq.shapes, members integer) returns jsonb
language sql stable as $$
  with idle as (
    select i.id, i.slots, i.memory_mb, i.cpus, coalesce(array_agg(r.vram_mb order by r.vram_mb)
      filter (where r.id is not null and (s.avoid is null or r.id <> all (s.avoid))), '{}') as vrams
    from gangq.incarnations i left join gangq.device_registry r on r.offered_by = i.id
    where i.ended_at is null and gangq.serves(i, s)
    group by i.id
  ),
  shares as (
    select distinct i.memory_mb / k as memory_mb, floor(i.cpus / k) as cpus
    from idle i cross join generate_series(1, least(i.slots, members, 64)) k
  ),
  tries as (
    select 'gpus' as asked, v::numeric as value from generate_series(0, s.gpus - 1) v
    union all
    select distinct 'vram_mb', v from idle i cross join unnest(i.vrams) v where v < s.vram_mb
    union all
    select distinct 'memory_mb', x.memory_mb from shares x where x.memory_mb < s.memory_mb
    union all
    select distinct 'cpus', x.cpus from shares x where x.cpus < s.cpus
    union all
    select 'members', null
  ),
  rooms as (
    select t.asked, t.value, sum(gangq.room(n.needs, i.slots, i.memory_mb, i.cpus, (
      select count(*) from unnest(i.vrams) v where v >= (n.needs).vram_mb))) as room
    from tries t
    cross join lateral (
      select jsonb_populate_record(s, case when t.value is null then '{}'
        else jsonb_build_object(t.asked, t.value) end) as needs
      offset 0) n
    cross join idle i
    group by t.asked, t.value
  )
  select jsonb_strip_nulls(jsonb_object_agg(r.asked,
    case r.asked when 'members' then r.room else r.value end))
  from (
    select z.asked, max(z.value) as value, max(z.room) as room
    from rooms z
    where z.asked = 'members' or z.room >= nearest_feasible.members
    group by z.asked) r
$$;
comment on function gangq.nearest_feasible is
  'Internal. {"members": how many fit on idle workers as it is, "gpus", "vram_mb", "memory_mb", '
  '"cpus": the most each may ask for, the rest as it is, so that all fit}.';

create function gangq.explain_hardware(s gangq.shapes, members integer)
returns table (gate text, ok boolean, detail text, numbers jsonb) language sql stable as $$
  select 'hardware', false, w.why || coalesce('; it would fit with ' || (
      select string_agg(format('%s %s', n.key, n.value), ' or ' order by n.key)
      from jsonb_each_text(f.near) n where n.key <> 'members' or n.value::integer > 0), ''),
    jsonb_build_object('members', explain_hardware.members, 'feasible', coalesce(f.near, '{}'))
  from gangq.infeasible(s.id, explain_hardware.members) as w(why)
  cross join lateral (select gangq.nearest_feasible(s, explain_hardware.members) as near) f
  where w.why is not null
$$;
comment on function gangq.explain_hardware is
  'Internal. Where idle workers could not hold so many members: why, and what they could. No row '
  'where they could.';

create function gangq.explain_avoided(s gangq.shapes, members integer)
returns table (gate text, ok boolean, detail text, numbers jsonb) language sql stable as $$
  select 'avoids', gangq.infeasible(s.id, members) is null, string_agg(
      format('avoids device %s (%s) after a trip there: ', r.uuid, r.host) || case
        when h.device_id is not null
          then format('it is quarantined (%s); when it is sound, select gangq.unquarantine(%L)',
            h.reason, r.uuid)
        else format('a tick lets it back when no other could take it, select '
          'gangq.unquarantine(%L) at once', r.uuid) end, '; ' order by r.id),
    jsonb_build_object('devices', cardinality(s.avoid))
  from gangq.device_registry r
  left join gangq.device_holds h on h.device_id = r.id and h.kind = 'quarantine' and h.until is null
  where r.id = any (s.avoid)
  having s.avoid is not null
$$;
comment on function gangq.explain_avoided is
  'Internal. The devices it avoids, if any; ok: idle workers could hold it without these.';

-- What was decided
-- ------------------------------------------------------------------------------------

create function gangq.in_s(at timestamptz, t timestamptz) returns numeric
language sql immutable as $$
  select ceil(extract(epoch from at - t))
$$;
comment on function gangq.in_s is 'Internal. In how many whole seconds a moment is, rounded up.';

create function gangq.decided_ago(t timestamptz) returns text language sql stable as $$
  select case
    when d.decided_at is null then 'nobody has decided yet: is a worker or gangq tick running?'
    when t - d.decided_at > interval '10 s' then format(
      'nobody has decided for %s s: is a worker or gangq tick running?',
      round(extract(epoch from t - d.decided_at)))
    else format('decided %s s ago', round(extract(epoch from t - d.decided_at), 1)) end
  from gangq.decider d
$$;
comment on function gangq.decided_ago is 'Internal. How old the verdicts are.';

-- What the moments of estimated ends rest on.
create function gangq.told_by_history(ends jsonb, t timestamptz) returns text
language sql stable as $$
  select string_agg(format('; %s: 90%% of %s of task %s took %s s at most, learned %s s ago',
    x.unit, gangq.counted(r.samples, 'run'), s.task, round(r.p90_s::numeric),
    round(extract(epoch from t - r.updated_at))), '' order by x.unit)
  from (
    select distinct e.value ->> 'unit' as unit from jsonb_array_elements(ends) as e(value)
    where e.value ->> 'by' = 'history') x
  join gangq.live_jobs j on case left(x.unit, 1)
    when 'g' then j.gang_id = substr(x.unit, 2)::bigint and j.rank = 0
    else j.id = substr(x.unit, 2)::bigint end
  join gangq.shapes s on s.id = j.shape_id
  join gangq.runtimes r on r.queue = s.queue and r.task = s.task
$$;
comment on function gangq.told_by_history is
  'Internal. Of ends that are estimates: from how many runs, and how old.';

-- The verdict, when it starts, what would help. since: from when on it could have been judged.
create function gangq.explain_verdict(kind_id integer, ask text, since timestamptz, t timestamptz)
returns table (gate text, ok boolean, detail text, numbers jsonb) language plpgsql stable as $$
#variable_conflict use_column
declare
  v gangq.verdicts;
  p gangq.plans;
  decided timestamptz := (select d.decided_at from gangq.decider d);
  ago text := gangq.decided_ago(t);
begin
  select x.* into v from gangq.verdicts x
  where x.kind_id = explain_verdict.kind_id and x.ask in (explain_verdict.ask, '')
  order by x.ask desc limit 1;
  select x.* into p from gangq.plans x where x.ask = explain_verdict.ask and not x.kept;
  gate := coalesce(v.gate, 'verdict');
  numbers := coalesce(v.numbers, '{}')
    || jsonb_build_object('decided_at', decided, 'since', v.since);
  ok := v.gate is null and coalesce(t - decided <= interval '10 s', false);
  detail := case
      when v.gate is not null and decided >= explain_verdict.since then ''
      when v.gate is not null then 'of those of its kind before it: '
      when decided >= explain_verdict.since then 'the last pass found nothing against it'
      else 'no pass has judged it' end
    || coalesce(v.why, v.gate, '')
    || case when v.gate = 'planned_start'
      then format(', in %s s', ceil((v.numbers ->> 'at')::float8 - gangq.seconds(t))) else '' end
    || format(' (%s)', ago);
  return next;
  gate := 'start';
  ok := true;
  numbers := case when p.starts_at is not null then jsonb_build_object('starts_at', p.starts_at,
    'in_s', gangq.in_s(p.starts_at, t), 'place', p.place,
    'after', coalesce(v.numbers -> 'after', '[]'),
    'follows', v.follows || coalesce(gangq.told_by_history(v.numbers -> 'after', t), '')) end;
  detail := case
    when p.starts_at is not null
      then format('planned in %s s, at %s', gangq.in_s(p.starts_at, t), p.starts_at)
        || coalesce(', ' || (numbers ->> 'follows'), '')
    when v.gate = 'stopping' then 'as soon as what was told to stop for it has stopped'
    when v.gate is null then 'the next pass may start it'
    else format('not planned: the first %s that wait and could start get a planned start',
      (select c.reservations from gangq.settings c)) end;
  return next;
  gate := 'unblock';
  numbers := null;
  detail := coalesce(v.unblocks || case when v.numbers ? 'may_stop_at' then format(' (in %s s)',
    ceil((v.numbers ->> 'may_stop_at')::float8 - gangq.seconds(t))) else '' end, 'the next pass');
  return next;
end $$;
comment on function gangq.explain_verdict is
  'Internal. What the last pass found of a gang, or of single jobs: the verdict with its age, the '
  'planned start, what would help.';

create function gangq.explain_line(g gangq.live_gangs, t timestamptz)
returns table (gate text, ok boolean, detail text, numbers jsonb) language sql stable as $$
  with line as materialized (
    select x.id, q.name, q.policy
    from gangq.gang_kinds mine
    join gangq.queues_table q on q.name = mine.queue
    left join lateral (
      select z.id, z.order_key
      from gangq.gang_kinds k join gangq.live_gangs z on z.kind_id = k.id
      where k.queue = mine.queue and z.state = 'blocked' and z.id <> (g).id
        and (z.not_before is null or z.not_before <= t)
        and case q.policy
          when 'fifo' then z.order_key & 1125899906842623 < (g).order_key & 1125899906842623
          when 'fair' then z.submitter = (g).submitter and z.order_key < (g).order_key
          when 'largest_first'
            then (-z.priority, -z.size, z.order_key) < (-(g).priority, -(g).size, (g).order_key)
          else z.order_key < (g).order_key end
      limit 10001) x on true
    where mine.id = (g).kind_id
  )
  select 'line', true, case count(l.id)
      when 0 then format('first in queue %s', l.name)
      else format('place %s in queue %s: %s before it (%s%s)', case
          when count(l.id) > 10000 then 'more than 10000'
          else (count(l.id) + 1)::text end, l.name, gangq.counted(count(l.id), 'gang'), (
          select string_agg('g' || f.id, ', ' order by f.id)
          from (select z.id from line z order by z.id limit 5) f),
        case when count(l.id) > 5 then ', ...' else '' end) end
    || format(', by %s', l.policy)
    || case l.policy when 'fair' then ' between submitters, of its own' else '' end,
    jsonb_build_object('place', count(l.id) + 1, 'policy', l.policy)
  from line l group by l.name, l.policy
$$;
comment on function gangq.explain_line is
  'Internal. How many gangs of its queue that could be judged now are before this one in the order '
  'of the queue.';

-- The answers
-- -----------------------------------------------------------------------------------------

create function gangq.explain_state(g gangq.live_gangs, t timestamptz)
returns table (gate text, ok boolean, detail text, numbers jsonb) language plpgsql stable as $$
#variable_conflict use_column
declare
  n record;
  times_out_at timestamptz := g.timeout_at
    + make_interval(secs => greatest(0, gangq.ineligible_s(g.kind_id, t) - g.held_s));
begin
  select count(*) filter (where j.state = 'reserved') as reserved,
    count(*) filter (where j.state = 'running') as running,
    count(*) filter (where j.state = 'preempting') as preempting,
    count(*) filter (where j.state = 'done') as done, max(j.waits_on) as waits_on
  into n from gangq.live_jobs j where j.gang_id = g.id;
  gate := 'state';
  ok := g.state = 'running';
  numbers := to_jsonb(n) || jsonb_build_object('ask', 'g' || g.id, 'epoch', g.epoch, 'size', g.size,
    'world_size', g.world_size);
  detail := case g.state
    when 'running' then format('runs since %s, epoch %s', g.go_at, g.epoch)
      || case when g.world_size < g.size
        then format(', with %s of %s members: it does not grow while it runs', g.world_size, g.size)
        else '' end
    when 'reserved' then format('reserved, epoch %s: %s of %s members claimed, deadline in %s s',
      g.epoch, n.running, coalesce(g.world_size, g.size),
      round(extract(epoch from g.deadline_at - t)::numeric, 1))
    when 'draining' then format('draining since %s (%s): waits until %s confirmed to have stopped',
      g.drain_started_at, g.drain_cause, gangq.counted(n.preempting, 'member')
      || case when n.preempting = 1 then ' has' else ' have' end)
    when 'waiting' then format('waits for %s to be done', gangq.counted(n.waits_on, 'job'))
    else format('blocked for %s s: waits to be placed', gangq.in_s(t, g.submitted_at))
      -- With requeue a gang that waits for capacity notices nothing.
      || coalesce(case g.timeout_style
        when 'hard' then '; fails unless it is placed by ' || times_out_at
        when 'soft' then '; its members run as single jobs unless it is placed by '
          || times_out_at end, '') end;
  return next;
  if g.state in ('blocked', 'waiting')
    and (g.not_before > t or g.placement_misses + g.timeouts + g.never_started > 0)
  then
    gate := 'backoff';
    ok := g.not_before is null or g.not_before <= t;
    detail := case when ok then 'not backing off'
        else format('not before %s (%s s)', g.not_before, gangq.in_s(g.not_before, t)) end
      || case when g.placement_misses > 0
        then format('; %s not claimed in time', gangq.counted(g.placement_misses, 'reservation'))
        else '' end
      || case when g.timeouts > 0
        then format('; not placed within its timeout of %s s %s', g.timeout_s,
          gangq.counted(g.timeouts, 'time')) else '' end
      || case when g.never_started > 0 then format('; lost a member at the start barrier %s',
        gangq.counted(g.never_started, 'time')) else '' end
      || case when g.never_started >= 10 then ': look at the workers'' logs' else '' end;
    numbers := jsonb_build_object('not_before', g.not_before,
      'placement_misses', g.placement_misses, 'never_started', g.never_started,
      'timeouts', g.timeouts);
    return next;
  end if;
end $$;
comment on function gangq.explain_state is
  'Internal. In which state a gang is, since when, and what it backs off for.';

-- The others run, and wait for it at a barrier: to those who ask it stands still.
create function gangq.explain_missing(g gangq.live_gangs, t timestamptz)
returns table (gate text, ok boolean, detail text, numbers jsonb) language sql stable as $$
  select 'missing', false,
    format('has lacked rank %s for %s s; ', h.ranks, gangq.in_s(t, (g).missing_since))
      || case
        when h.blocked = 0
          then format('reserved, to be claimed within %s s', gangq.in_s(h.deadline_at, t))
        when (g).not_before > t
          then format('waits for a place, not before %s (%s s)', (g).not_before,
            gangq.in_s((g).not_before, t))
        else 'waits for a place' end
      || format('; the whole gang stops and starts anew if it still does at %s', h.until),
    jsonb_build_object('since', (g).missing_since, 'until', h.until, 'blocked', h.blocked,
      'not_before', (g).not_before)
  from (
    select string_agg(coalesce(j.epoch_rank, j.rank)::text, ', ' order by j.rank) as ranks,
      count(*) filter (where j.state = 'blocked') as blocked, min(j.deadline_at) as deadline_at,
      (g).missing_since + make_interval(secs => (g).timeout_s) as until
    from gangq.live_jobs j
    where j.gang_id = (g).id and j.state in ('blocked', 'reserved') and gangq.in_epoch(j, g)) h
$$;
comment on function gangq.explain_missing is
  'Internal. Which members a gang that runs lacks, and what becomes of that.';

create function gangq.explain_gang(gang_id bigint)
returns table (gate text, ok boolean, detail text, numbers jsonb) language plpgsql stable as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  ended gangq.gang_history;
  r record;
  s gangq.shapes;
  judged boolean;
begin
  select x.* into g from gangq.live_gangs x where x.id = explain_gang.gang_id;
  if not found then
    select x.* into ended from gangq.gang_history x
    where x.gang_id = explain_gang.gang_id order by x.finished_at desc limit 1;
    if not found then
      perform gangq.refuse('GQ002', format('gang %s does not exist',
        coalesce(explain_gang.gang_id::text, 'null')), 'Gang ids are in gangq.gangs.');
    end if;
    return query select 'state', ended.state = 'done',
      format('it is %s since %s%s', ended.state, ended.finished_at,
        coalesce(': ' || ended.reason, '')),
      jsonb_build_object('epoch', ended.epoch, 'attempts', ended.attempts);
    return;
  end if;
  return query select x.* from gangq.explain_state(g, t) x;
  if g.missing_since is not null then
    return query select x.* from gangq.explain_missing(g, t) x;
  end if;
  if g.state not in ('blocked', 'waiting') and not exists (
    select 1 from gangq.live_jobs j
    where g.missing_since is not null and j.gang_id = g.id and j.state = 'blocked'
      and gangq.in_epoch(j, g))
  then
    return;
  end if;
  judged := g.state <> 'waiting' and (g.not_before is null or g.not_before <= t);
  if judged then
    return query select x.*
    from gangq.explain_verdict(g.kind_id, 'g' || g.id, greatest(g.submitted_at, g.not_before), t) x
    where x.gate not in ('start', 'unblock');
  end if;
  for r in
    select x.*, count(*) over () > 1 as several
    from gangq.kind_roles x where x.kind_id = g.kind_id order by x.ordinal
  loop
    select x.* into s from gangq.shapes x where x.id = r.shape_id;
    return query
      select x.gate, x.ok,
        case when r.several then format('role %s: ', r.name) else '' end || x.detail,
        x.numbers || case when r.several then jsonb_build_object('role', r.name) else '{}' end
      from (
        select * from gangq.explain_workers(s, t)
        union all select * from gangq.explain_hardware(s, r.min_members)
        union all select * from gangq.explain_avoided(s, r.min_members)) x;
  end loop;
  if judged then
    return query select x.* from gangq.explain_line(g, t) x where g.state = 'blocked';
    return query select x.*
    from gangq.explain_verdict(g.kind_id, 'g' || g.id, greatest(g.submitted_at, g.not_before), t) x
    where x.gate in ('start', 'unblock');
  elsif g.state = 'waiting' then
    return query values ('start', true, 'once the jobs it waits for are done', null::jsonb),
      ('unblock', true, 'the end of those jobs', null);
  else
    return query values ('start', true, format('not before %s', g.not_before), null::jsonb),
      ('unblock', true, format('%s s more', gangq.in_s(g.not_before, t)), null);
  end if;
end $$;
comment on function gangq.explain_gang is
  'Why is this gang not running, row by row, with numbers; ok false marks what holds it: state, '
  'missing (it runs, and lacks a member that is to be replaced), backoff, what the last pass found '
  '(its gate: paused, quota, room, workers, apart, planned_start, stopping ...; verdict where '
  'nothing) and how long ago that was, workers by role, hardware, avoids, line (its place in its '
  'queue). Then start (when, and what that rests on) and unblock (what would help). Decides '
  'nothing: gangq explain --now does. Raises GQ002.';

-- Light jobs: what a claim would find.
create function gangq.explain_claim(j gangq.live_jobs, s gangq.shapes, t timestamptz)
returns table (gate text, ok boolean, detail text, numbers jsonb) language plpgsql stable as $$
#variable_conflict use_column
declare
  paused text := (
    select min(q.name) from gangq.queues_table q
    where q.paused and q.name = any (gangq.queue_path(s.queue)));
  turns bigint := (
    select coalesce(sum(greatest(0, f.light)), 0)
    from gangq.free_capacity(gangq.candidates(t)) f
    join gangq.incarnations i on i.id = f.incarnation
    where gangq.serves(i, s));
  before bigint := (
    select count(*) from (
      select 1 from gangq.live_jobs x
      where x.shape_id = j.shape_id and x.state = 'pending' and x.order_key < j.order_key
      limit 10001) x);
begin
  if paused is not null then
    return query select 'paused', false, format('queue %s is paused', paused),
      jsonb_build_object('queue', paused);
  end if;
  return query select x.* from gangq.explain_workers(s, t) x
    union all select x.* from gangq.explain_hardware(s, 1) x;
  return query select 'light', turns > 0, format('it asks for nothing that is counted: any worker '
    'that serves it takes it; %s free now', gangq.counted(turns, 'light slot')),
    jsonb_build_object('room', turns);
  return query select 'line', before < greatest(turns, 1),
    format('%s jobs of its kind come before it',
      case when before > 10000 then 'more than 10000' else before::text end),
    jsonb_build_object('place', before + 1);
  return query select 'unblock', true, case
    when paused is not null then format('gangq queue resume %s', paused)
    when turns = 0 then 'a light slot that comes free on a worker that serves it'
    when before >= turns then format(
      '%s of its kind claimed first, or a higher priority: gangq priority %s %s',
      gangq.counted(before + 1 - turns, 'job'), least(1000, j.priority + 1), j.id)
    else 'nothing: it is claimable' end, null::jsonb;
end $$;
comment on function gangq.explain_claim is
  'Internal. What a claim of this light job needs: who serves it, free light slots, how many are '
  'before it.';

create function gangq.explain_job(job_id bigint)
returns table (gate text, ok boolean, detail text, numbers jsonb) language plpgsql stable as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs;
  s gangq.shapes;
  ended gangq.history;
begin
  select x.* into j from gangq.live_jobs x where x.id = explain_job.job_id;
  if not found then
    select h.* into ended from gangq.history h
    where h.job_id = explain_job.job_id order by h.finished_at desc limit 1;
    if not found then
      perform gangq.refuse('GQ002', format('job %s does not exist',
        coalesce(explain_job.job_id::text, 'null')), 'Job ids are in gangq.jobs.');
    end if;
    return query select 'state', ended.state = 'done',
      format('it is %s since %s%s', ended.state, ended.finished_at,
        coalesce(': ' || (ended.error ->> 'type'), '')),
      jsonb_build_object('attempts', ended.attempts);
    return;
  end if;
  if j.gang_id is not null then
    return query select 'gang', true,
      format('rank %s of gang %s', coalesce(j.epoch_rank, j.rank), j.gang_id),
      jsonb_build_object('gang_id', j.gang_id, 'state', j.state);
    return query select x.* from gangq.explain_gang(j.gang_id) x;
    return;
  end if;
  select x.* into s from gangq.shapes x where x.id = j.shape_id;
  return query select 'state', j.state = 'running', case j.state
      when 'running' then format('runs since %s on %s', j.claimed_at, (
        select i.name from gangq.incarnations i where i.id = j.incarnation))
      when 'preempting' then format('told to stop (%s) %s s ago', j.stop_reason,
        round(extract(epoch from t - j.told_at)::numeric, 1))
      when 'scheduled' then format('due in %s s%s',
        round(extract(epoch from j.due_at - t)::numeric, 1),
        coalesce(', after: ' || (j.error ->> 'type'), ''))
      when 'waiting' then format('waits for jobs %s', (
        select string_agg(d.on_job_id::text, ', ' order by d.on_job_id)
        from gangq.dependencies d where d.job_id = j.id))
      else 'pending' end,
    jsonb_build_object('ask', 'k' || j.shape_id || '/' || j.priority, 'state', j.state,
      'attempts', j.attempts, 'crashes', j.crashes, 'trips', j.trips);
  if j.state = 'pending' and gangq.is_placed(s, gangq.placed_queues()) then
    return query select x.*
      from gangq.explain_verdict(-j.shape_id, 'k' || j.shape_id || '/' || j.priority,
        greatest(j.submitted_at, j.due_at), t) x
      union all select x.* from gangq.explain_workers(s, t) x
      union all select x.* from gangq.explain_hardware(s, 1) x
      union all select x.* from gangq.explain_avoided(s, 1) x;
  elsif j.state = 'pending' then
    return query select x.* from gangq.explain_claim(j, s, t) x;
  elsif j.state = 'scheduled' then
    return query select 'unblock', true, format('%s s more', gangq.in_s(j.due_at, t)), null::jsonb;
  elsif j.state = 'waiting' then
    return query select 'unblock', true, 'the end of those jobs', null::jsonb;
  end if;
end $$;
comment on function gangq.explain_job is
  'Why is this job not running, row by row, with numbers, as explain_gang says it; for a member: '
  'its gang. Of a job that nobody decides about: what a claim needs. Raises GQ002.';

-- Sequential scans are off: however much of live_jobs is scheduled, the rest of it is not read for
-- that.
create function gangq.waiting_later()
returns table (
  shape_id integer, state text, priority smallint, jobs integer, since timestamptz, due timestamptz)
language sql stable set enable_seqscan = off as $$
  select j.shape_id, j.state, j.priority, count(*)::integer, min(j.submitted_at), min(j.due_at)
  from gangq.live_jobs j where j.state = 'scheduled' group by j.shape_id, j.state, j.priority
  union all
  select j.shape_id, j.state, j.priority, count(*)::integer, min(j.submitted_at), null
  from gangq.live_jobs j where j.state = 'waiting' and j.gang_id is null
  group by j.shape_id, j.state, j.priority
$$;
comment on function gangq.waiting_later is
  'Internal, for the view waiting: solo jobs that are due later or wait for others, by shape and '
  'priority.';

create view gangq.waiting as
select 'gang' as kind, g.id, s.queue, s.task, g.priority, g.size, g.state, g.submitted_at as since,
  case
    when g.state = 'waiting' then 'waits for other jobs'
    when g.not_before > c.t
      then format('backing off for %s s', ceil(extract(epoch from g.not_before - c.t)))
    when p.starts_at is not null
      then format('place %s of those with a planned start, in %s s', p.place,
          ceil(extract(epoch from p.starts_at - c.t)))
        || coalesce(', ' || coalesce(o.follows, v.follows), '')
    else coalesce(h.why, o.why, v.why, 'waits to be judged') end as why,
  coalesce(o.gate, v.gate) as gate, p.starts_at
from gangq.live_gangs g
join gangq.shapes s on s.id = g.shape_id
cross join (select gangq.now() as t offset 0) c
left join gangq.verdicts v on v.kind_id = g.kind_id and v.ask = ''
left join gangq.verdicts o on o.kind_id = g.kind_id and o.ask = 'g' || g.id
left join gangq.plans p on p.ask = 'g' || g.id and not p.kept
left join (
  select k.kind_id, min(gangq.infeasible(r.shape_id, r.min_members)) as why
  from (
    select distinct z.kind_id
    from gangq.live_gangs z left join gangq.verdicts x on x.kind_id = z.kind_id and x.ask = ''
    where z.state = 'blocked' and coalesce(x.gate in ('infeasible', 'workers', 'room'), true)) k
  join gangq.kind_roles r on r.kind_id = k.kind_id
  group by k.kind_id) h on g.state = 'blocked' and h.kind_id = g.kind_id
where g.state in ('waiting', 'blocked')
union all
select 'job', null, s.queue, s.task, x.priority, x.jobs, x.state, x.since,
  case
    when x.state = 'waiting' then 'waits for other jobs'
    when x.state = 'scheduled' then 'due later, the first at ' || x.due
    when not (
      select bool_and(not q.paused) from gangq.queues_table q
      where q.name = s.queue or starts_with(s.queue, q.name || '.')) then 'its queue is paused'
    else coalesce(h.why, v.why, 'waits for a free worker') end, v.gate, null
from (
  -- Counted in the index of claims, whose order begins with the priority.
  select z.shape_id, 'pending' as state, p.priority, p.jobs, h.submitted_at as since,
    null::timestamptz as due
  from gangq.pending_shapes z
  cross join lateral (
    select (1000 - (j.order_key >> 50))::smallint as priority, count(*)::integer as jobs,
      min(j.order_key) as head
    from gangq.live_jobs j
    where j.shape_id = z.shape_id and j.state = 'pending' group by j.order_key >> 50) p
  join lateral (
    select j.submitted_at from gangq.live_jobs j
    where j.shape_id = z.shape_id and j.state = 'pending' and j.order_key = p.head
    limit 1) h on true
  union all
  select l.shape_id, l.state, l.priority, l.jobs, l.since, l.due from gangq.waiting_later() l) x
-- Looked up one by one: shapes are kept for ever.
cross join lateral (select z.queue, z.task from gangq.shapes z where z.id = x.shape_id offset 0) s
left join lateral (select gangq.infeasible(x.shape_id, 1) as why) h on x.state = 'pending'
left join gangq.verdicts v on x.state = 'pending' and v.kind_id = -x.shape_id and v.ask = '';
comment on view gangq.waiting is
  'What waits, and why: one row per gang, one per kind and priority of solo jobs (size: how many; '
  'since: when the first of them was submitted). gate: what the last pass found; starts_at: its '
  'planned start, if it has one. explain_gang and explain_job say more.';

create function gangq.schema_version() returns text language sql stable as $$
  select max(m.name) from gangq.migrations m where m.name <> 'code'
$$;
comment on function gangq.schema_version is
  'The newest migration applied; the library refuses to work with another.';
