-- Why is it not running (142): of placed work the answer repeats what the last pass found
-- (gangq.verdicts), and how long ago. Takes no locks.

-- Internal. So many seconds, short: 12 s, 3m05s, 2h10m, 3d04h. What is more than 10^12, infinity
-- and NaN count as that.
create function gangq.in_short(seconds numeric) returns text language sql immutable
return (
  select case
    when seconds is null then null
    when n.s < 60 then n.s || ' s'
    when n.s < 3600 then format('%sm%ss', n.s / 60, lpad((n.s % 60)::text, 2, '0'))
    when n.s < 172800 then format('%sh%sm', n.s / 3600, lpad((n.s / 60 % 60)::text, 2, '0'))
    else format('%sd%sh', n.s / 86400, lpad((n.s / 3600 % 24)::text, 2, '0')) end
  from (select least(greatest(0, ceil(in_short.seconds)), 1e12)::bigint as s) n
);

-- Internal. The time between two moments, in_short. Either may be infinity.
create function gangq.span(until timestamptz, since timestamptz) returns text
language sql immutable
return gangq.in_short(extract(epoch from until) - extract(epoch from since));

-- Internal. A verdict in words, with its age. v null: there is none. since: when it could first
-- have been judged. Passes are made only while something waits, so an old one alone is no alarm.
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
      when n.fresh then 'no pass has judged it yet'
      else 'no pass has judged it' end
    || case (v).gate
      when 'rate' then coalesce('; in ' || n.at || ' it may start', '')
      when 'planned_start' then coalesce(', in ' || n.at, '')
      else '' end
    || case
      when n.fresh and not n.judged and (v).gate is null then ''
      when n.fresh then format(' (decided %s s ago)', round(n.ago_s, 1))
      else format(' (nobody has decided %s: is a worker or gangq tick running?)',
        coalesce('for ' || gangq.in_short(n.ago_s), 'yet')) end,
    -- `gangq explain --now` knows the verdict by `decided_at` and replaces it.
    coalesce((v).numbers, '{}')
      || jsonb_build_object('decided_at', n.decided_at, 'since', (v).since)
  from (
    select d.decided_at, extract(epoch from t - d.decided_at) as ago_s,
      coalesce(d.decided_at >= explain_verdict.since, false) as judged,
      t - greatest(d.decided_at, explain_verdict.since) <= interval '10 s' as fresh,
      gangq.span(gangq.moment_said((v).numbers, 'at'), t) as at
    from gangq.decider d) n
$$;

-- Internal. For ends that are estimates: from how many runs they come, and how old these are.
create function gangq.told_by_history(ends jsonb, t timestamptz) returns text
language sql stable as $$
  select string_agg(format('; %s: 90%% of %s of task %s took %s at most, learned %s ago',
    x.unit, gangq.counted(r.samples, 'run'), s.task, gangq.in_short(r.p90_s::numeric),
    gangq.span(t, r.updated_at)), '' order by x.unit)
  from (
    select distinct u.unit #>> '{}' as unit
    from jsonb_path_query(ends,
      '$[*] ? (@.by == "history").unit ? (@ like_regex "^[gj][0-9]{1,18}$")') as u(unit)) x
  join gangq.live_jobs j on case left(x.unit, 1)
    when 'g' then j.gang_id = substr(x.unit, 2)::bigint and j.rank = 0
    else j.id = substr(x.unit, 2)::bigint end
  join gangq.shapes s on s.id = j.shape_id
  join gangq.runtimes r on r.queue = s.queue and r.task = s.task
$$;

-- Internal. When it is planned to start, which ends that depends on, and what would help. fits:
-- whether the workers could hold it; only said of what no pass has judged.
create function gangq.explain_start(v gangq.verdicts, ask text, fits boolean, t timestamptz)
returns setof gangq.reason language sql stable as $$
  select 'start', true, case
      when p.starts_at is not null
        then format('planned in %s, at %s%s', gangq.span(p.starts_at, t),
          date_trunc('second', p.starts_at), ', ' || n.follows)
      when (v).gate = 'stopping' then 'as soon as what was told to stop for it has stopped'
      when (v).gate = 'rate' then coalesce(
        'not planned: its rate holds it for ' || n.at || ' more at least',
        'not planned: its rate never lets so many start at once')
      when (v).gate is null and not fits then 'once workers could hold it'
      when (v).gate is null then 'the next pass may start it'
      else format('not planned: the first %s that wait and could start get a planned start',
        c.reservations) end,
    case when p.starts_at is not null then jsonb_build_object('starts_at', p.starts_at,
      'in_s', ceil(extract(epoch from p.starts_at - t)), 'place', p.place,
      'after', coalesce((v).numbers -> 'after', '[]'), 'follows', n.follows) end
  from gangq.settings c
  left join gangq.plans p on p.ask = explain_start.ask and not p.kept
  cross join lateral (
    select gangq.span(gangq.moment_said((v).numbers, 'at'), t) as at,
      (v).follows || coalesce(gangq.told_by_history((v).numbers -> 'after', t), '') as follows) n
  union all
  select 'unblock', true, coalesce((v).unblocks || coalesce(
      ' (in ' || gangq.span(gangq.moment_said((v).numbers, 'may_stop_at'), t) || ')', ''),
    case when fits then 'the next pass' else 'workers that could hold it: gangq worker' end), null
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
          when 'fifo' then gangq.pos_of(z.order_key) < gangq.pos_of((g).order_key)
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

-- Internal. What holds what waits to be placed, by what the last pass found, what would help, and
-- its place. kind_id: of a gang (g), or of single jobs: their shape, negative. since: when it could
-- first have been judged.
create function gangq.explain_placed(
  kind_id integer, ask text, g gangq.live_gangs, since timestamptz, t timestamptz
) returns setof gangq.reason language plpgsql stable as $$
declare
  v gangq.verdicts;
begin
  -- Without one of its own that on the first ask of its kind.
  select x.* into v from gangq.verdicts x
  where x.kind_id = explain_placed.kind_id and x.ask in (explain_placed.ask, '')
  order by x.ask desc limit 1;
  return query
    select * from gangq.explain_verdict(v, since, t)
    union all select * from gangq.explain_needs(kind_id, t)
    union all select * from gangq.explain_line(g, t) where g.state = 'blocked'
    union all
    select x.*
    from gangq.explain_start(v, ask, case when kind_id < 0 then gangq.infeasible(-kind_id, 1)
      else gangq.kind_infeasible(kind_id) end is null, t) x
    -- Missing members take the first room that there is: no start is planned for them.
    where x.gate <> 'start' or g.missing_since is null;
end $$;
