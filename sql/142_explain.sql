-- Why is it not running: explain_gang, explain_job. They decide nothing and take no locks.
-- A light job is taken by any worker with room, so explain_claim counts what a claim would find.

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

-- Internal. When a gang times out, if its kind is eligible from now on.
create function gangq.explain_timeout(g gangq.live_gangs, t timestamptz) returns timestamptz
language sql stable
return gangq.timeout_shifted(g, gangq.ineligible_s((g).kind_id, t), t);

-- Internal. The state of a gang, and since when.
create function gangq.explain_state(g gangq.live_gangs, t timestamptz) returns setof gangq.reason
language sql stable as $$
  select 'state', (g).state = 'running',
    coalesce('of service ' || (g).service || ': ', '') || case (g).state
      when 'running' then format('runs for %s, epoch %s', gangq.span(t, (g).go_at), (g).epoch)
        || case when (g).world_size < (g).size
          then format(', with %s of %s members: it does not grow while it runs', (g).world_size,
            (g).size) else '' end
      when 'reserved' then format('reserved, epoch %s: %s of %s members claimed, deadline in %s',
        (g).epoch, n.running, coalesce((g).world_size, (g).size), gangq.span((g).deadline_at, t))
      when 'draining' then format('draining for %s (%s): waits until %s confirmed to have stopped',
        gangq.span(t, (g).drain_started_at), (g).drain_cause,
        gangq.counted(n.preempting, 'member')
          || case when n.preempting = 1 then ' has' else ' have' end)
      when 'waiting' then gangq.explain_awaited(n.waiting)
      when 'blocked' then format('blocked for %s: waits to be placed',
          gangq.span(t, (g).submitted_at))
        -- With requeue a gang that waits for capacity notices nothing.
        || coalesce(case (g).timeout_style
          when 'hard' then '; fails unless it is placed by '
          when 'soft' then '; its members run as single jobs unless it is placed by '
          end || gangq.explain_timeout(g, t), '') end,
    -- `gangq explain --now` finds its ask here.
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
      || coalesce('; the gang leaves: ' || k.why, '')
      || case
        when x.service is null then ''
        when x.wants is not null
          then format('; %s are asked for since %s, and made to be so at %s: %s', x.wants, x.since,
            x.due_at, x.why)
        else format('; scaled from %s to %s replicas, now as many as are asked for', x.min_replicas,
            x.max_replicas) || coalesce(', since ' || x.scaled_at || ': ' || x.scaled_why, '') end,
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
      else format('backs off for another %s', gangq.span((g).not_before, t)) end
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
    format('has lacked rank %s for %s; ', h.ranks, gangq.span(t, (g).missing_since))
      || case
        when h.blocked = 0
          then format('reserved, to be claimed within %s', gangq.span(h.deadline_at, t))
        when (g).not_before > t
          then format('waits for a place, and backs off for another %s',
            gangq.span((g).not_before, t))
        else 'waits for a place' end
      || format('; the whole gang stops and starts anew if it still does in %s',
        gangq.span(h.until, t)),
    jsonb_build_object('since', (g).missing_since, 'until', h.until, 'blocked', h.blocked,
      'not_before', (g).not_before)
  from (
    select string_agg(gangq.rank_of(j)::text, ', ' order by j.rank) as ranks,
      count(*) filter (where j.state = 'blocked') as blocked, min(j.deadline_at) as deadline_at,
      gangq.explain_timeout(g, t) as until
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
    format('it has been %s for %s%s', h.state, gangq.span(gangq.now(), h.finished_at),
      coalesce(': ' || h.why, '')),
    jsonb_build_object('attempts', h.attempts)
  from (
    select g.state, g.finished_at, g.reason as why, g.attempts
    from gangq.gang_history g where what = 'gang' and g.gang_id = explain_ended.id
    union all
    -- Any other error of a job that is done or cancelled is that of an earlier attempt.
    select j.state, j.finished_at,
      case when j.state = 'failed' then j.error ->> 'type'
        when j.error ->> 'type' = 'Cancelled' then j.error ->> 'message' end, j.attempts
    from gangq.history j where what = 'job' and j.job_id = explain_ended.id) h
  order by h.finished_at desc limit 1;
  perform gangq.refuse_missing(what, id::text)
  where not found;
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
    return query select * from gangq.explain_placed(g.kind_id, 'g' || g.id, g,
      greatest(g.submitted_at, g.not_before), t);
    return;
  end if;
  return query select * from gangq.explain_needs(g.kind_id, t);
  return query select *, null::jsonb from (values
    ('start', true, case g.state
      when 'waiting' then 'once the jobs it waits for have ended as wanted'
      else format('not before %s', g.not_before) end),
    ('unblock', true, case g.state when 'waiting' then 'the end of those jobs'
      else gangq.span(g.not_before, t) || ' more' end)) r;
end $$;

-- Internal. What a claim of this light job needs: who serves it, free light slots, its place.
-- turns: how many free light slots the workers that serve it have. before: how many jobs of its
-- kind come before it, 10,001 at most. first: the priority of the first of these.
create function gangq.explain_claim(j gangq.live_jobs, s gangq.shapes, t timestamptz)
returns setof gangq.reason language sql stable as $$
  with n as materialized (
    select gangq.paused_queue(s.queue) as paused, (
        select coalesce(sum(greatest(0, f.light)), 0)
        from gangq.free_capacity(gangq.candidates(t)) f
        join gangq.incarnations i on i.id = f.incarnation
        where gangq.serves(i, s)) as turns,
      b.before, b.first
    from (
      select count(*) as before, gangq.priority_of(min(x.order_key)) as first
      from (
        select x.order_key from gangq.live_jobs x
        where x.shape_id = (j).shape_id and x.state = 'pending' and x.order_key < (j).order_key
        order by x.order_key limit 10001) x) b
  )
  select 'paused', false, format('queue %s is paused', n.paused),
    jsonb_build_object('queue', n.paused)
  from n where n.paused is not null
  union all
  select 'paused', false, p.words, jsonb_build_object('task', (s).task)
  from gangq.pause_in_words((s).task) as p(words) where p.words is not null
  union all
  select * from gangq.explain_needs(-(s).id, t)
  union all
  select 'light', n.turns > 0, format('it asks for nothing that is counted: any worker that serves '
    'it takes it; %s free now', gangq.counted(n.turns, 'light slot')),
    jsonb_build_object('room', n.turns)
  from n
  union all
  select 'line', n.before < greatest(n.turns, 1), case
      when n.before > 10000 then 'behind more than 10000 jobs of its kind'
      else format('behind %s of its kind', gangq.counted(n.before, 'job')) end,
    jsonb_build_object('place', n.before + 1)
  from n
  union all
  select 'unblock', true, case
    when n.paused is not null then format('gangq queue resume %s', n.paused)
    when gangq.paused_task(-(s).id) is not null then format('gangq task resume %s', (s).task)
    when gangq.infeasible((s).id, 1) is not null then 'workers that could hold it: gangq worker'
    when n.turns = 0 then 'a light slot that comes free on a worker that serves it'
    when n.before >= n.turns then case
        when n.before > 10000 then 'more than 10000 jobs'
        else gangq.counted(n.before + 1 - n.turns, 'job') end || ' of its kind claimed first'
      || case when n.first < 1000
        then format(', or a higher priority: gangq priority %s %s', n.first + 1, (j).id)
        else '' end
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
  ask text;
  state text;
  facts jsonb;
  unblock text;
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
  -- A statement: it refuses a state without a branch.
  case j.state
    when 'running' then
      state := format('runs for %s on %s', gangq.span(t, j.claimed_at), (
        select i.name from gangq.incarnations i where i.id = j.incarnation));
    when 'preempting' then
      state := format('told to stop (%s) %s ago', j.stop_reason, gangq.span(t, j.told_at));
    when 'scheduled' then
      state := format('due in %s%s', gangq.span(j.due_at, t),
        coalesce(', after: ' || (j.error ->> 'type'), ''));
      unblock := gangq.span(j.due_at, t) || ' more';
    when 'waiting' then
      state := gangq.explain_awaited(j.id);
      unblock := 'the end of those jobs';
    when 'pending' then
      null;
  end case;
  -- `gangq explain --now` finds the ask here.
  facts := jsonb_build_object('ask', ask, 'state', j.state, 'attempts', j.attempts,
    'crashes', j.crashes, 'trips', j.trips);
  if j.state = 'pending' then
    return query
      with others as materialized (
        select * from gangq.explain_placed(-s.id, ask, null, greatest(j.submitted_at, j.due_at), t)
        where gangq.is_placed(s, gangq.placed_queues())
        union all
        select * from gangq.explain_claim(j, s, t)
        where not gangq.is_placed(s, gangq.placed_queues())
      )
      select 'state', false, case
          when exists (select from others o where not o.ok) then 'pending'
          else 'waits for a free worker' end, facts
      union all select * from others;
    return;
  end if;
  return query select 'state', j.state = 'running', state, facts;
  if unblock is not null then
    return query select 'unblock', true, unblock, null::jsonb;
  end if;
end $$;
