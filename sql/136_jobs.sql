-- The views of jobs and gangs, live or ended, of their output and evidence, and the functions that
-- only these views call. They take no locks.
-- Payloads, results, errors, output and evidence are shown to the submitter of a job, to the login
-- whose live worker holds it, and to admins; in a shared queue to all submitters (readable).

-- Internal, for the view jobs: the role of this rank in a gang, live or ended. role_of and hosts_of
-- are functions: as subqueries they would raise the estimated cost of a query over many days of
-- history, and PostgreSQL would JIT-compile it, which takes seconds.
create function gangq.role_of(gang_id bigint, rank integer) returns text
language plpgsql stable as $$
begin
  return (
    select r.name
    from gangq.kind_roles r
    where r.kind_id = coalesce((
        select g.kind_id from gangq.live_gangs g where g.id = role_of.gang_id), (
        select h.kind_id
        from gangq.gang_history h
        where h.gang_id = role_of.gang_id
        order by h.finished_at desc limit 1))
      and r.first_rank <= role_of.rank
    order by r.first_rank desc
    limit 1);
end $$;

-- Internal, for the view gangs: the hosts where members of a live gang are placed.
create function gangq.hosts_of(gang_id bigint) returns text[] language sql stable as $$
  -- Not a join: it would read the whole fleet for each gang.
  select array(
    select distinct (select i.host from gangq.incarnations i where i.id = j.incarnation) as host
    from gangq.live_jobs j
    where j.gang_id = hosts_of.gang_id and j.incarnation is not null
    order by host)
$$;

-- The union is of bare tables and everything else is joined above it: so an ORDER BY id LIMIT 50
-- reads 50 rows. Its columns go by position: add one at the end of both halves.
--
-- Every job, live or ended: its live row, else its latest ending. rank: a member's place in its
-- gang at its largest; epoch_rank: of an elastic gang, its rank in the present epoch, null while it
-- has no part in it. parent: the job that submitted it. submitter, login: the role it was submitted
-- in, and by which login. step_rate: steps a second, smoothed; null until two steps were seen.
-- array_index: its place in its batch (gangq.batches), from 0. readable: whether payload, result
-- and error are shown to this session; where it is false they are null.
create view gangq.jobs as
select k.id, s.queue, s.task, k.state, k.priority, k.gang_id, k.rank, i.name as worker, i.host,
  k.attempts, k.max_attempts, k.crashes, k.trips, k.stops, k.submitted_at, k.due_at, k.claimed_at,
  k.finished_at, k.told_at, k.stop_reason, k.token, k.budget_s, s.gpus, s.vram_mb, s.memory_mb,
  s.cpus, s.labels, k.submitter, p.data as progress,
  case when o.readable then k.payload end as payload,
  case when o.readable then k.result end as result,
  case when o.readable then k.error end as error, s.model,
  case when k.gang_id is not null then gangq.role_of(k.gang_id, k.rank) end as role, k.epoch_rank,
  k.parent, k.login, o.readable, k.max_trips, p.rate as step_rate, k.snoozes, k.max_snoozes,
  k.batch_id, k.array_index
from (
  select j.id, j.state, j.priority, j.gang_id, j.rank, j.incarnation, j.shape_id, j.attempts,
    j.max_attempts, j.crashes, j.trips, j.stops, j.submitted_at, j.due_at, j.claimed_at,
    j.finished_at, j.told_at, j.stop_reason, j.token, j.budget_s, j.submitter, j.login, j.payload,
    j.result, j.error, j.epoch_rank, j.parent, true as live, j.max_trips,
    j.snoozes, j.max_snoozes, j.batch_id, j.array_index
  from gangq.live_jobs j
  union all
  select h.job_id, h.state, h.priority, h.gang_id, h.rank, h.incarnation, h.shape_id, h.attempts,
    h.max_attempts, h.crashes, h.trips, h.stops, h.submitted_at, null::timestamptz, h.claimed_at,
    h.finished_at, null::timestamptz, null::text, h.token, h.budget_s, h.submitter, h.login,
    h.payload, h.result, h.error, null::integer, h.parent, false, h.max_trips,
    h.snoozes, h.max_snoozes, h.batch_id, h.array_index
  from gangq.history h
) k
join gangq.shapes s on s.id = k.shape_id
left join gangq.incarnations i on i.id = k.incarnation
left join gangq.progress p on p.job_id = k.id and p.token = k.token
cross join lateral gangq.owned(k.submitter, k.login, s.queue) as c(mine)
cross join lateral (
  select c.mine or coalesce(k.live and i.login = session_user and i.ended_at is null, false)
    as readable) o
where not exists (
  select 1 from gangq.retried r where r.job_id = k.id and r.finished_at = k.finished_at);

-- Internal, for the view gangs: waited_of a live gang.
create function gangq.waiting_so_far(gang_id bigint) returns jsonb language sql stable as $$
  select gangq.waited_of(g, gangq.now())
  from gangq.live_gangs g where g.id = waiting_so_far.gang_id
$$;

-- As jobs: the union is of bare tables, and its columns go by position.
--
-- Every gang, live or ended. waited: for how many seconds it has waited to be placed, by what the
-- passes found against the first of its kind (gates, as in explain_gang); null: it does not wait.
-- What an earlier wait was is in its events reserve and end.
create view gangq.gangs as
select k.id, k.name, s.queue, s.task, k.state, k.size, k.epoch, k.priority, k.attempts,
  k.max_attempts, k.crashes, k.trips, k.placement_misses, k.never_started, k.preemptions,
  k.submitted_at, k.not_before, k.reserved_at, k.deadline_at, k.go_at, k.finished_at, k.drain_cause,
  k.note, k.reason, k.submitter,
  case when k.finished_at is null then gangq.hosts_of(k.id) else '{}' end as hosts,
  k.world_size, k.failure_policy, k.completion, k.missing_since, k.login, k.service,
  case when k.state = 'blocked' then gangq.waiting_so_far(k.id) end as waited
from (
  select g.id, g.name, g.shape_id, g.state, g.size, g.epoch, g.priority, g.attempts, g.max_attempts,
    g.crashes, g.trips, g.placement_misses, g.never_started, g.preemptions, g.submitted_at,
    g.not_before, g.reserved_at, g.deadline_at, g.go_at, null::timestamptz as finished_at,
    g.drain_cause, g.note, null::text as reason, g.submitter, g.world_size, g.failure_policy,
    g.completion, g.missing_since, g.login, g.service
  from gangq.live_gangs g
  union all
  select h.gang_id, h.name, h.shape_id, h.state, h.size, h.epoch, h.priority, h.attempts,
    h.max_attempts, h.crashes, h.trips, h.placement_misses, h.never_started, h.preemptions,
    h.submitted_at, null::timestamptz, null::timestamptz, null::timestamptz, null::timestamptz,
    h.finished_at, null::text, null::text, h.reason, h.submitter, h.world_size, h.failure_policy,
    h.completion, null::timestamptz, h.login, h.service
  from gangq.gang_history h
) k
join gangq.shapes s on s.id = k.shape_id
where not exists (
  select 1 from gangq.retried r where r.gang_id = k.id and r.finished_at = k.finished_at);

-- The case hides the chunk from a reader's own condition: PostgreSQL may evaluate that before
-- `readable`, and the error message of a condition quotes what it reads.
--
-- Output of jobs that this session may read, by attempt (token) and in order (seq). Filter by
-- job_id.
create view gangq.job_logs as
select l.job_id, l.token, l.seq, l.at, case when j.readable then l.chunk end as chunk
from gangq.jobs j join gangq.logs l on l.job_id = j.id
where j.readable;

-- What was seen at trips and suspicions of jobs that this session may read; and how workers were
-- proven dead or stuck, for the login that registered them, gangq_host and admins. Filter by
-- job_id.
create view gangq.job_evidence as
select v.at, v.kind, v.job_id, v.token, v.incarnation, case when j.readable then v.data end as data
from gangq.jobs j join gangq.evidence v on v.job_id = j.id
where j.readable
union all
select v.at, v.kind, v.job_id, v.token, v.incarnation, case when o.readable then v.data end as data
from gangq.evidence v left join gangq.incarnations i on i.id = v.incarnation
cross join lateral (
  select (select gangq.is_admin()) or i.login = session_user
    or (select gangq.may_act_as('gangq_host')) as readable) o
where v.job_id is null and o.readable;
