-- The views of services, their gangs and their endpoints. They take no locks.
--
-- A gang is in the view endpoints when all its members run and are ready, none of their workers is
-- flagged, and it does not leave. One snapshot shows a gang whole or not at all, because what takes
-- a member out of the state running changes its gang or all its members in the same transaction.

-- The gangs of every service. serves: it is in gangq.endpoints; leaves: it is told to stop at
-- stop_at, and why. state null: it has ended, and the next tick forgets it.
create view gangq.service_gangs as
select k.service, k.gang_id, k.revision, g.state, x.members, x.ready_members,
  coalesce(x.ready_members = k.size and k.stop_at is null and g.state = 'running'
    and g.missing_since is null, false) as serves,
  k.stop_at is not null as leaves, k.why, x.hosts, x.load, k.made_at, k.ready_at, k.stop_at
from gangq.service_gangs_table k
left join gangq.live_gangs g on g.id = k.gang_id
cross join lateral (
  select k.size as members,
    count(*) filter (where j.state = 'running' and r.ready and i.flagged_at is null)::integer
      as ready_members,
    coalesce(array_agg(distinct i.host order by i.host) filter (where i.host is not null), '{}')
      as hosts,
    (avg(r.load) filter (where r.load_at > gangq.now() - interval '60 s'))::real as load
  from gangq.live_jobs j
  left join gangq.replicas r on r.job_id = j.id and r.token = j.token
  left join gangq.incarnations i on i.id = j.incarnation
  where j.gang_id = k.gang_id) x;

-- Where the replicas of services take requests: address and port of each replica that has told a
-- port, of gangs whose members are all ready, and which do not leave. Of a gang all of these are
-- here or none. Each change is notified on the channel gangq_endpoints, with the name of the
-- service.
create view gangq.endpoints as
select k.service, k.gang_id, k.revision, j.id as job_id, j.rank, i.name as worker, i.host,
  i.address, r.port, r.load, r.since as ready_since
from gangq.service_gangs k
join gangq.live_jobs j on j.gang_id = k.gang_id
join gangq.replicas r on r.job_id = j.id and r.token = j.token
join gangq.incarnations i on i.id = j.incarnation
where k.serves and r.port is not null
order by k.service, k.gang_id, j.rank;

-- Every service. replicas: how many are wanted, in gangs of so many members (gang); ready_replicas:
-- how many are in gangq.endpoints or serve behind those. state: ready, starting, updating (gangs of
-- another revision are left), halted (the new revision did not become ready: why), crash_loop
-- (three gangs in a row failed within a minute of being ready), stopping, stopped, deleting.
-- next_try_at: no gang is made before, after so many failures in a row. load: what its ready
-- replicas have said within 60 s, on average. revision: the wanted one; good_revision: the last one
-- of which all replicas were ready. readable: whether payload, work and health, which may hold a
-- password, are shown to this session.
create view gangq.services as
select s.name, r.task, q.name as queue,
  case
    when s.deleting then 'deleting'
    when s.stopped then case when n.gangs > 0 then 'stopping' else 'stopped' end
    when s.halted is not null then 'halted'
    when s.failures >= 3 then 'crash_loop'
    when n.outdated then 'updating'
    when n.ready >= s.replicas then 'ready'
    else 'starting' end as state,
  s.replicas, r.gang_size as gang, n.ready as ready_replicas, n.gangs, s.revision, s.good_revision,
  coalesce(s.halted, s.problem, n.waits) as why, s.failures, s.next_try_at, s.surge,
  s.ready_within_s, s.linger_s, case when o.readable then r.health end as health, r.version, n.load,
  case when o.readable then r.payload end as payload, case when o.readable then r.work end as work,
  s.submitter, s.login, s.set_at, s.source, s.undeclared_at, o.readable
from gangq.services_table s
join gangq.service_revisions r on r.service = s.name and r.revision = s.revision
left join gangq.task_options d on d.task = r.task
cross join lateral (select coalesce(r.work ->> 'queue', d.queue, 'default') as name) q
cross join lateral (
  select count(*)::integer as gangs,
    coalesce(sum(k.members) filter (where k.serves), 0)::integer as ready,
    coalesce(bool_or(k.revision <> s.revision), false) as outdated,
    (avg(k.load) filter (where k.serves))::real as load,
    min(format('gang g%s waits to be placed', k.gang_id))
      filter (where k.state = 'blocked') as waits
  from gangq.service_gangs k
  where k.service = s.name) n
cross join lateral gangq.owned(s.submitter, s.login, q.name) as o(readable)
order by s.name;
