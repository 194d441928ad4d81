-- Why is it not running: explain_gang, explain_job, and the view waiting. They decide nothing and
-- take no locks. Each answer is a list of rows of gangq.reason; every explain_* function below
-- makes one or more of them.
-- Of placed work the answer repeats what the last pass found (gangq.verdicts), and how long ago.
-- A light job is taken by any worker with room, so explain_claim counts what a claim would find.

-- One row of an explanation, with its numbers; ok false marks what holds the job or gang.
create type gangq.reason as (gate text, ok boolean, detail text, numbers jsonb);

-- Workers -----------------------------------------------------------------------------------------

-- Internal. How many live workers may take jobs of this shape now, and what rules out the others.
create function gangq.explain_workers(s gangq.shapes, t timestamptz) returns setof gangq.reason
language sql stable as $$
  -- Each worker falls to the first condition that it does not meet.
  with workers as materialized (
    select i.taints, b.why as barred, case
        when s.queue <> all (i.queues) then 'of other queues'
        when s.task <> all (i.tasks) then 'without task ' || s.task
        when not s.labels <@ i.labels then 'without labels ' || s.labels::text
        when gangq.serves(i, s) then null
        when i.taints <> '{}' and gangq.serves(jsonb_populate_record(i, '{"taints": []}'), s)
          then 'with taints it does not tolerate'
        else 'outside the selector' end as fell
    from gangq.barred(explain_workers.t) b join gangq.incarnations i on i.id = b.incarnation
  ),
  others as (
    select string_agg(format('%s %s', c.n, c.why), ', ' order by c.n desc, c.why) as listed,
      coalesce(jsonb_object_agg(c.why, c.n), '{}') as counts
    from (
      select coalesce(w.fell, w.barred) as why, count(*) as n from workers w group by 1) c
    where c.why is not null
  ),
  lacking as (
    select string_agg(distinct u.taint, ', ' order by u.taint) as taints
    from workers w cross join lateral unnest(w.taints) as u(taint)
    where w.fell = 'with taints it does not tolerate'
      and u.taint <> all (coalesce(s.tolerates, '{}'))
  )
  select 'workers', n.open > 0, case
      when n.live = 0 then 'no worker is registered: start one with gangq worker'
      else format('%s of %s may take it', n.open, gangq.counted(n.live, 'worker'))
        || coalesce('; the others: ' || o.listed, '')
        || coalesce(' (' || l.taints || ': --tolerate ' || split_part(l.taints, ', ', 1) || ')', '')
      end,
    jsonb_build_object('live', n.live, 'open', n.open, 'serving', n.serving, 'others', o.counts)
  from (
    select count(*) as live, count(*) filter (where w.fell is null) as serving,
      count(*) filter (where coalesce(w.fell, w.barred) is null) as open
    from workers w) n
  cross join others o cross join lacking l
$$;

-- Internal. members: how many fit on idle workers. gpus, vram_mb, memory_mb, cpus: the most that
-- each may ask for, all else unchanged, so that all members fit. One request is varied at a time:
-- the largest value with which that many members fit on idle workers.
create function gangq.nearest_feasible(s gangq.shapes, members integer) returns jsonb
language sql stable as $$
  with idle as (
    select i.slots, i.memory_mb, i.cpus, array(
      select r.vram_mb from gangq.device_registry r
      where r.offered_by = i.id and (s.avoid is null or r.id <> all (s.avoid))) as vrams
    from gangq.incarnations i where i.ended_at is null and gangq.serves(i, s)
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

-- Internal. The workers for so many members of this shape; if they could not hold them when idle,
-- why, and what they could hold; and the devices that it avoids (ok: they could hold it without
-- these).
create function gangq.explain_needs(s gangq.shapes, members integer, t timestamptz)
returns setof gangq.reason language sql stable as $$
  select * from gangq.explain_workers(s, t)
  union all
  select 'hardware', false, w.why || coalesce('; it would fit with ' || (
      select string_agg(format('%s %s', n.key, n.value), ' or ' order by n.key)
      from jsonb_each_text(f.near) n where n.key <> 'members' or n.value::integer > 0), ''),
    jsonb_build_object('members', explain_needs.members, 'feasible', coalesce(f.near, '{}'))
  from gangq.infeasible(s.id, explain_needs.members) as w(why)
  cross join lateral (select gangq.nearest_feasible(s, explain_needs.members) as near) f
  where w.why is not null
  union all
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

-- Internal. explain_needs for the minimum of each role of a kind of gang.
create function gangq.explain_roles(kind_id integer, t timestamptz) returns setof gangq.reason
language sql stable as $$
  select x.gate, x.ok, case when r.several then format('role %s: ', r.name) else '' end || x.detail,
    x.numbers || case when r.several then jsonb_build_object('role', r.name) else '{}' end
  from (
    select k.name, k.min_members, s, count(*) over () > 1 as several
    from gangq.kind_roles k join gangq.shapes s on s.id = k.shape_id
    where k.kind_id = explain_roles.kind_id order by k.ordinal) r
  cross join lateral gangq.explain_needs(r.s, r.min_members, explain_roles.t) x
$$;

-- What was decided --------------------------------------------------------------------------------

-- Internal. Whole seconds from t to this moment, rounded up.
create function gangq.in_s(at timestamptz, t timestamptz) returns numeric
language sql immutable
return ceil(extract(epoch from at - t));

-- Internal. So many seconds, short: 12 s, 3m05s, 2h10m, 3d04h.
create function gangq.in_short(seconds numeric) returns text language sql immutable as $$
  select case
    when seconds is null then null
    when n.s < 60 then n.s || ' s'
    when n.s < 3600 then format('%sm%ss', n.s / 60, lpad((n.s % 60)::text, 2, '0'))
    when n.s < 172800 then format('%sh%sm', n.s / 3600, lpad((n.s / 60 % 60)::text, 2, '0'))
    else format('%sd%sh', n.s / 86400, lpad((n.s / 3600 % 24)::text, 2, '0')) end
  from (select greatest(0, ceil(in_short.seconds))::bigint as s) n
$$;

-- Internal. The verdict of the last pass on this ask; without one, that on the first ask of its
-- kind.
create function gangq.verdict_of(kind_id integer, ask text) returns gangq.verdicts
language sql stable as $$
  select v from gangq.verdicts v
  where v.kind_id = verdict_of.kind_id and v.ask in (verdict_of.ask, '')
  order by v.ask desc limit 1
$$;

-- Internal. A verdict in words, with its age. v null: there is none. since: when it could first
-- have been judged.
create function gangq.explain_verdict(v gangq.verdicts, since timestamptz, t timestamptz)
returns setof gangq.reason language sql stable as $$
  select coalesce((v).gate, 'verdict'), (v).gate is null and n.fresh,
    case
      when n.judged then coalesce(
        case when (v).gate = 'paused' and (v).numbers ->> 'of' = 'task'
          then gangq.pause_in_words((v).numbers ->> 'where') end,
        (v).why, (v).gate, 'the last pass found nothing against it')
      when (v).gate is not null
        then 'of those of its kind before it: ' || coalesce((v).why, (v).gate)
      else 'no pass has judged it' end
    || case when (v).gate in ('planned_start', 'rate') and (v).numbers ? 'at'
      then format(case (v).gate when 'rate' then '; in %s it may start' else ', in %s' end,
        gangq.in_short((((v).numbers ->> 'at')::float8 - gangq.seconds(t))::numeric)) else '' end
    || case
      when n.fresh then format(' (decided %s s ago)', round(n.ago_s, 1))
      else format(' (nobody has decided %s: is a worker or gangq tick running?)',
        coalesce('for ' || gangq.in_short(n.ago_s), 'yet')) end,
    coalesce((v).numbers, '{}')
      || jsonb_build_object('decided_at', n.decided_at, 'since', (v).since)
  from (
    select d.decided_at, extract(epoch from t - d.decided_at) as ago_s,
      coalesce(d.decided_at >= explain_verdict.since, false) as judged,
      coalesce(t - d.decided_at <= interval '10 s', false) as fresh
    from gangq.decider d) n
$$;

-- Internal. For ends that are estimates: from how many runs they come, and how old these are.
create function gangq.told_by_history(ends jsonb, t timestamptz) returns text
language sql stable as $$
  select string_agg(format('; %s: 90%% of %s of task %s took %s at most, learned %s ago',
    x.unit, gangq.counted(r.samples, 'run'), s.task, gangq.in_short(r.p90_s::numeric),
    gangq.in_short(extract(epoch from t - r.updated_at))), '' order by x.unit)
  from (
    select distinct e.value ->> 'unit' as unit from jsonb_array_elements(ends) as e(value)
    where e.value ->> 'by' = 'history') x
  join gangq.live_jobs j on case left(x.unit, 1)
    when 'g' then j.gang_id = substr(x.unit, 2)::bigint and j.rank = 0
    else j.id = substr(x.unit, 2)::bigint end
  join gangq.shapes s on s.id = j.shape_id
  join gangq.runtimes r on r.queue = s.queue and r.task = s.task
$$;

-- Internal. When it is planned to start, which ends that depends on, and what would help.
create function gangq.explain_start(v gangq.verdicts, ask text, t timestamptz)
returns setof gangq.reason language sql stable as $$
  select 'start', true, case
      when p.starts_at is not null
        then format('planned in %s, at %s%s', gangq.in_short(n.in_s),
          date_trunc('second', p.starts_at), ', ' || n.follows)
      when (v).gate = 'stopping' then 'as soon as what was told to stop for it has stopped'
      when (v).gate = 'rate' and (v).numbers ? 'at'
        then format('not planned: its rate holds it for %s more at least',
          gangq.in_short((((v).numbers ->> 'at')::float8 - gangq.seconds(t))::numeric))
      when (v).gate = 'rate' then 'not planned: its rate never lets so many start at once'
      when (v).gate is null then 'the next pass may start it'
      else format('not planned: the first %s that wait and could start get a planned start',
        c.reservations) end,
    case when p.starts_at is not null then jsonb_build_object('starts_at', p.starts_at,
      'in_s', n.in_s, 'place', p.place,
      'after', coalesce((v).numbers -> 'after', '[]'), 'follows', n.follows) end
  from gangq.settings c
  left join gangq.plans p on p.ask = explain_start.ask and not p.kept
  cross join lateral (
    select gangq.in_s(p.starts_at, t) as in_s,
      (v).follows || coalesce(gangq.told_by_history((v).numbers -> 'after', t), '') as follows) n
  union all
  select 'unblock', true, coalesce((v).unblocks || case when (v).numbers ? 'may_stop_at'
      then format(' (in %s)', gangq.in_short(
        (((v).numbers ->> 'may_stop_at')::float8 - gangq.seconds(t))::numeric))
      else '' end, 'the next pass'), null
$$;

-- Internal. The place of a gang in the order of its queue, among the gangs that could start now.
create function gangq.explain_line(g gangq.live_gangs, t timestamptz) returns setof gangq.reason
language sql stable as $$
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

-- The answers -------------------------------------------------------------------------------------

-- Internal. Which jobs this one waits for, and for which outcome of each.
create function gangq.explain_awaited(job_id bigint) returns text language sql stable as $$
  select 'waits for ' || string_agg(format('%s %s to %s',
      case when w.jobs = 1 then 'job' else 'jobs' end,
      w.ids || case when w.jobs > 20 then format(' and %s more', w.jobs - 20) else '' end,
      case w.wants when 'done' then 'be done' when 'any' then 'end' else 'fail' end),
    ', ' order by w.wants = 'done' desc, w.wants)
  from (
    select d.wants, count(*) as jobs,
      string_agg(d.on_job_id::text, ', ' order by d.on_job_id) filter (where d.n <= 20) as ids
    from (
      select x.*, row_number() over (partition by x.wants order by x.on_job_id) as n
      from gangq.dependencies x where x.job_id = explain_awaited.job_id) d
    group by d.wants) w
$$;

-- Internal. The state of a gang, and since when.
create function gangq.explain_state(g gangq.live_gangs, t timestamptz) returns setof gangq.reason
language sql stable as $$
  select 'state', (g).state = 'running',
    coalesce('of service ' || (g).service || ': ', '') || case (g).state
      when 'running' then format('runs for %s, epoch %s', gangq.in_short(gangq.in_s(t, (g).go_at)),
          (g).epoch)
        || case when (g).world_size < (g).size
          then format(', with %s of %s members: it does not grow while it runs', (g).world_size,
            (g).size) else '' end
      when 'reserved' then format('reserved, epoch %s: %s of %s members claimed, deadline in %s s',
        (g).epoch, n.running, coalesce((g).world_size, (g).size),
        round(extract(epoch from (g).deadline_at - t), 1))
      when 'draining' then format(
        'draining for %s (%s): waits until %s confirmed to have stopped',
        gangq.in_short(gangq.in_s(t, (g).drain_started_at)), (g).drain_cause,
        gangq.counted(n.preempting, 'member')
          || case when n.preempting = 1 then ' has' else ' have' end)
      when 'waiting' then gangq.explain_awaited(n.waiting)
      else format('blocked for %s: waits to be placed',
          gangq.in_short(gangq.in_s(t, (g).submitted_at)))
        -- With requeue a gang that waits for capacity notices nothing.
        || coalesce(case (g).timeout_style
          when 'hard' then '; fails unless it is placed by '
          when 'soft' then '; its members run as single jobs unless it is placed by '
          end || ((g).timeout_at + make_interval(secs =>
            greatest(0, gangq.ineligible_s((g).kind_id, t) - (g).ineligible_s))), '') end,
    to_jsonb(n) || jsonb_build_object('ask', 'g' || (g).id, 'epoch', (g).epoch, 'size', (g).size,
      'world_size', (g).world_size)
  from (
    select count(*) filter (where j.state = 'reserved') as reserved,
      count(*) filter (where j.state = 'running') as running,
      count(*) filter (where j.state = 'preempting') as preempting,
      count(*) filter (where j.state = 'done') as done, max(j.waits_on) as waits_on,
      min(j.id) filter (where j.state = 'waiting') as waiting
    from gangq.live_jobs j where j.gang_id = (g).id) n
$$;

-- Internal. What the service of a gang is at, and how it is scaled.
create function gangq.explain_service(g gangq.live_gangs) returns setof gangq.reason
language sql stable as $$
  select 'service', true, -- Its service never keeps a gang from starting.
    format('%s is %s: %s of %s ready', s.name, s.state, s.ready_replicas,
      gangq.counted(s.replicas, 'replica'))
      || coalesce('; ' || s.why, '')
      || coalesce(format('; the gang leaves: %s', k.why), '')
      || coalesce(case when x.wants is not null
        then format('; %s are asked for since %s, and made to be so at %s: %s', x.wants, x.since,
          x.due_at, x.why)
        else format('; scaled from %s to %s replicas, now as many as are asked for', x.min_replicas,
          x.max_replicas) || coalesce(format(', since %s: %s', x.scaled_at, x.scaled_why), '') end,
        ''),
    jsonb_build_object('service', s.name, 'state', s.state, 'ready_replicas', s.ready_replicas,
      'replicas', s.replicas, 'wants', x.wants, 'since', x.since, 'due_at', x.due_at)
  from gangq.services s
  left join gangq.service_gangs_table k on k.gang_id = (g).id
  left join gangq.scaling x on x.service = s.name
  where s.name = (g).service
$$;

-- Internal. Why a gang backs off, and until when.
create function gangq.explain_backoff(g gangq.live_gangs, t timestamptz)
returns setof gangq.reason language sql stable as $$
  select 'backoff', n.ok,
    case when n.ok then 'not backing off'
      else format('backs off for another %s',
        gangq.in_short(gangq.in_s((g).not_before, t))) end
    || case when (g).placement_misses > 0 then format('; %s not claimed in time',
      gangq.counted((g).placement_misses, 'reservation')) else '' end
    || case when (g).timeouts > 0 then format('; not placed within its timeout of %s s %s',
      (g).timeout_s, gangq.counted((g).timeouts, 'time')) else '' end
    || case when (g).never_started > 0 then format('; lost a member at the start barrier %s',
      gangq.counted((g).never_started, 'time')) else '' end
    || case when (g).never_started >= 10 then ': look at the workers'' logs' else '' end,
    jsonb_build_object('not_before', (g).not_before, 'placement_misses', (g).placement_misses,
      'never_started', (g).never_started, 'timeouts', (g).timeouts)
  from (select coalesce((g).not_before <= t, true) as ok) n
  where (g).state in ('blocked', 'waiting')
    and (not n.ok or (g).placement_misses + (g).timeouts + (g).never_started > 0)
$$;

-- Internal. Which members a running gang lacks, and what happens next. The other members run, but
-- wait at a barrier: to its submitter the gang seems to stand still.
create function gangq.explain_missing(g gangq.live_gangs, t timestamptz) returns setof gangq.reason
language sql stable as $$
  select 'missing', false,
    format('has lacked rank %s for %s; ', h.ranks,
      gangq.in_short(gangq.in_s(t, (g).missing_since)))
      || case
        when h.blocked = 0
          then format('reserved, to be claimed within %s s', gangq.in_s(h.deadline_at, t))
        when (g).not_before > t
          then format('waits for a place, and backs off for another %s',
            gangq.in_short(gangq.in_s((g).not_before, t)))
        else 'waits for a place' end
      || format('; the whole gang stops and starts anew if it still does in %s',
        gangq.in_short(gangq.in_s(h.until, t))),
    jsonb_build_object('since', (g).missing_since, 'until', h.until, 'blocked', h.blocked,
      'not_before', (g).not_before)
  from (
    select string_agg(gangq.rank_of(j)::text, ', ' order by j.rank) as ranks,
      count(*) filter (where j.state = 'blocked') as blocked, min(j.deadline_at) as deadline_at,
      (g).missing_since + make_interval(secs => (g).timeout_s) as until
    from gangq.live_jobs j
    where j.gang_id = (g).id and j.state in ('blocked', 'reserved') and gangq.in_epoch(j, g)) h
  where (g).missing_since is not null
$$;

-- Internal. How a gang or job that is not live has ended. Raises GQ002.
create function gangq.explain_ended(what text, id bigint) returns setof gangq.reason
language plpgsql stable as $$
begin
  return query
  select 'state', h.state = 'done',
    format('it has been %s for %s%s', h.state,
      gangq.in_short(gangq.in_s(gangq.now(), h.finished_at)), coalesce(': ' || h.why, '')),
    jsonb_build_object('attempts', h.attempts)
  from (
    select g.state, g.finished_at, g.reason as why, g.attempts
    from gangq.gang_history g where what = 'gang' and g.gang_id = explain_ended.id
    union all
    select j.state, j.finished_at, j.error ->> 'type', j.attempts
    from gangq.history j where what = 'job' and j.job_id = explain_ended.id) h
  order by h.finished_at desc limit 1;
  if not found then
    perform gangq.refuse_missing(what, id::text);
  end if;
end $$;

-- Why is this gang not running, row by row, with numbers; ok false marks what holds it: state,
-- service (of a replica), missing (it runs, and lacks a member that is to be replaced), backoff,
-- what the last pass found (its gate: paused, quota, room, workers, apart, planned_start, stopping
-- ...; verdict where nothing) and how long ago that was, workers by role, hardware, avoids, line
-- (its place in its queue). Then start (when, and what that rests on) and unblock (what would
-- help). Decides nothing: gangq explain --now does. Raises GQ002.
create function gangq.explain_gang(gang_id bigint) returns setof gangq.reason
language plpgsql stable as $$
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  ask text := 'g' || gang_id;
  v gangq.verdicts;
begin
  select x.* into g from gangq.live_gangs x where x.id = explain_gang.gang_id;
  if not found then
    return query select * from gangq.explain_ended('gang', explain_gang.gang_id);
    return;
  end if;
  return query
    select * from gangq.explain_state(g, t)
    union all select * from gangq.explain_service(g)
    union all select * from gangq.explain_backoff(g, t)
    union all select * from gangq.explain_missing(g, t);
  if g.state not in ('blocked', 'waiting') and not exists (
    select 1 from gangq.live_jobs j
    where g.missing_since is not null and j.gang_id = g.id and j.state = 'blocked'
      and gangq.in_epoch(j, g))
  then
    return;
  end if;
  if g.state <> 'waiting' and (g.not_before is null or g.not_before <= t) then
    v := gangq.verdict_of(g.kind_id, ask);
    return query
      select * from gangq.explain_verdict(v, greatest(g.submitted_at, g.not_before), t)
      union all select * from gangq.explain_roles(g.kind_id, t)
      union all select * from gangq.explain_line(g, t) where g.state = 'blocked'
      union all select * from gangq.explain_start(v, ask, t);
    return;
  end if;
  return query select * from gangq.explain_roles(g.kind_id, t);
  return query select *, null::jsonb from (values
    ('start', true, case g.state
      when 'waiting' then 'once the jobs it waits for have ended as wanted'
      else format('not before %s', g.not_before) end),
    ('unblock', true, case g.state when 'waiting' then 'the end of those jobs'
      else gangq.in_short(gangq.in_s(g.not_before, t)) || ' more' end)) r;
end $$;

-- Internal. What a claim of this light job needs: who serves it, free light slots, its place.
create function gangq.explain_claim(j gangq.live_jobs, s gangq.shapes, t timestamptz)
returns setof gangq.reason language sql stable as $$
  with n as materialized (
    select (
        select min(q.name) from gangq.queues_table q
        where q.paused and gangq.below(s.queue, array[q.name])) as paused, (
        select coalesce(sum(greatest(0, f.light)), 0)
        from gangq.free_capacity(gangq.candidates(t)) f
        join gangq.incarnations i on i.id = f.incarnation
        where gangq.serves(i, s)) as turns, (
        select count(*) from (
          select 1 from gangq.live_jobs x
          where x.shape_id = (j).shape_id and x.state = 'pending' and x.order_key < (j).order_key
          limit 10001) x) as before
  )
  select 'paused', false, format('queue %s is paused', n.paused),
    jsonb_build_object('queue', n.paused)
  from n where n.paused is not null
  union all
  select 'paused', false, p.words, jsonb_build_object('task', (s).task)
  from gangq.pause_in_words((s).task) as p(words) where p.words is not null
  union all
  select * from gangq.explain_needs(s, 1, t)
  union all
  select 'light', n.turns > 0, format('it asks for nothing that is counted: any worker that serves '
    'it takes it; %s free now', gangq.counted(n.turns, 'light slot')),
    jsonb_build_object('room', n.turns)
  from n
  union all
  select 'line', n.before < greatest(n.turns, 1), format('%s jobs of its kind come before it',
      case when n.before > 10000 then 'more than 10000' else n.before::text end),
    jsonb_build_object('place', n.before + 1)
  from n
  union all
  select 'unblock', true, case
    when n.paused is not null then format('gangq queue resume %s', n.paused)
    when gangq.paused_task(-(s).id) is not null then format('gangq task resume %s', (s).task)
    when n.turns = 0 then 'a light slot that comes free on a worker that serves it'
    when n.before >= n.turns then format(
      '%s of its kind claimed first, or a higher priority: gangq priority %s %s',
      gangq.counted(n.before + 1 - n.turns, 'job'), least(1000, (j).priority + 1), (j).id)
    else 'nothing: it is claimable' end, null
  from n
$$;

-- Why is this job not running, row by row, with numbers, as explain_gang says it; for a member: its
-- gang. Of a job that nobody decides about: what a claim needs. Raises GQ002.
create function gangq.explain_job(job_id bigint) returns setof gangq.reason
language plpgsql stable as $$
declare
  t timestamptz := gangq.now();
  j gangq.live_jobs;
  s gangq.shapes;
  v gangq.verdicts;
  ask text;
begin
  select x.* into j from gangq.live_jobs x where x.id = explain_job.job_id;
  if not found then
    return query select * from gangq.explain_ended('job', explain_job.job_id);
    return;
  end if;
  if j.gang_id is not null then
    return query
      select 'gang', true, format('rank %s of gang g%s', gangq.rank_of(j), j.gang_id),
        jsonb_build_object('gang_id', j.gang_id, 'state', j.state)
      union all select * from gangq.explain_gang(j.gang_id);
    return;
  end if;
  select x.* into s from gangq.shapes x where x.id = j.shape_id;
  ask := 'k' || j.shape_id || '/' || j.priority;
  return query select 'state', j.state = 'running', case j.state
      when 'running' then format('runs for %s on %s', gangq.in_short(gangq.in_s(t, j.claimed_at)), (
        select i.name from gangq.incarnations i where i.id = j.incarnation))
      when 'preempting' then format('told to stop (%s) %s ago', j.stop_reason,
        gangq.in_short(gangq.in_s(t, j.told_at)))
      when 'scheduled' then format('due in %s%s', gangq.in_short(gangq.in_s(j.due_at, t)),
        coalesce(', after: ' || (j.error ->> 'type'), ''))
      when 'waiting' then gangq.explain_awaited(j.id)
      else 'pending' end,
    jsonb_build_object('ask', ask, 'state', j.state, 'attempts', j.attempts, 'crashes', j.crashes,
      'trips', j.trips);
  if j.state = 'pending' and gangq.is_placed(s, gangq.placed_queues()) then
    v := gangq.verdict_of(-j.shape_id, ask);
    return query
      select * from gangq.explain_verdict(v, greatest(j.submitted_at, j.due_at), t)
      union all select * from gangq.explain_needs(s, 1, t)
      union all select * from gangq.explain_start(v, ask, t);
  elsif j.state = 'pending' then
    return query select * from gangq.explain_claim(j, s, t);
  elsif j.state in ('scheduled', 'waiting') then
    return query select 'unblock', true, case j.state when 'waiting' then 'the end of those jobs'
      else gangq.in_short(gangq.in_s(j.due_at, t)) || ' more' end, null::jsonb;
  end if;
end $$;

-- Internal, for the view waiting: solo jobs that are due later or wait for others, by shape and
-- priority. Without sequential scans: the rows are read from indexes, however many there are.
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

-- What waits, and why: one row per gang, one per kind and priority of solo jobs (size: how many;
-- since: when the first of them was submitted). gate: what the last pass found; starts_at: its
-- planned start, if it has one. explain_gang and explain_job say more.
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
    else coalesce(o.why, v.why, g.note, 'waits to be judged') end as why,
  coalesce(o.gate, v.gate) as gate, p.starts_at
from gangq.live_gangs g
join gangq.shapes s on s.id = g.shape_id
cross join (select gangq.now() as t offset 0) c
left join gangq.verdicts v on v.kind_id = g.kind_id and v.ask = ''
left join gangq.verdicts o on o.kind_id = g.kind_id and o.ask = 'g' || g.id
left join gangq.plans p on p.ask = 'g' || g.id and not p.kept
where g.state in ('waiting', 'blocked')
union all
select 'job', null, s.queue, s.task, x.priority, x.jobs, x.state, x.since,
  case
    when x.state = 'waiting' then 'waits for other jobs'
    when x.state = 'scheduled' then 'due later, the first at ' || x.due
    when exists (
      select 1 from gangq.queues_table q
      where q.paused and starts_with(s.queue || '.', q.name || '.')) then 'its queue is paused'
    when exists (select 1 from gangq.task_pauses p where p.task = s.task) then 'its task is paused'
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

-- The newest migration applied; the library refuses to work with another.
create function gangq.schema_version() returns text language sql stable as $$
  select max(m.name) from gangq.migrations m where m.name <> 'code'
$$;
