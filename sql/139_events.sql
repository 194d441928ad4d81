-- What has happened, as views of events. They take no locks.

-- Internal. A count or a code in the data of an event; null: it is none. requeue takes any error
-- from anybody, whose keys may be called like ours. Inlined in views.
create function gangq.number_in(data jsonb, key text) returns integer language sql immutable
return case when data ->> key ~ '^[0-9]{1,9}$' then (data ->> key)::integer end;

-- Who was displaced for whom: gang (gang_id, epoch), solo job (job_id) or surplus member of a gang
-- that goes on (both), why, and lost_s: work since the last checkpoint, in seconds times devices.
-- for_job: where it was for single jobs of one shape and priority, the first of those.
create view gangq.preemptions as
select e.at, (e.data ->> 'for')::bigint as for_gang, e.gang_id, e.epoch, e.job_id, e.reason,
  (e.data ->> 'lost_s')::real as lost_s, e.data ->> 'digest' as digest,
  (e.data ->> 'for_job')::bigint as for_job
from gangq.events e where e.kind = 'preempt' and e.data ?| '{for,for_job}';

-- Every trip of a watchdog, by code, task, device and host; outcome notify and held: it would have
-- tripped, and nothing was stopped. poison: the job tripped on two hosts. Evidence is shown to
-- those who may read the payload of its job. Give a range of at: it reads only those days.
create view gangq.trips as
select e.at, gangq.number_in(e.data, 'code') as code, e.data ->> 'class' as class, e.reason,
  e.data ->> 'outcome' as outcome, e.data ->> 'task' as task, e.data ->> 'queue' as queue,
  e.job_id, e.gang_id, e.epoch, gangq.number_in(e.data, 'rank') as rank, e.worker,
  e.data ->> 'host' as host,
  array(
    select d #>> '{}'
    from jsonb_array_elements(case jsonb_typeof(e.data -> 'devices') when 'array'
      then e.data -> 'devices' else '[]' end) as d) as devices,
  gangq.number_in(e.data, 'trips') as trips, exists (
    select 1 from gangq.events p where p.job_id = e.job_id and p.kind = 'poison') as poison,
  (select v.data from gangq.job_evidence v
    where v.job_id = e.job_id and v.at = e.at and v.kind = e.kind
      and v.token is not distinct from e.token
    limit 1) as evidence
from gangq.events e
where e.kind in ('trip', 'notify', 'held');

-- A gang's life in order: submit, reserve, claim, go, replace, shrink, drain, ack, drained, end.
-- actor: the login that caused it, or "login as role". Filter by gang_id.
create view gangq.timeline as
select e.gang_id, e.epoch, e.at, e.kind as what, e.job_id,
  gangq.number_in(e.data, 'rank') as rank, e.worker, coalesce(i.host, e.data ->> 'host') as host,
  e.reason, e.data, e.actor
from gangq.events e left join gangq.incarnations i on i.id = e.incarnation
where e.gang_id is not null
order by e.id;

-- One row per drain: what caused it, how many members were told to stop, how many acknowledged,
-- were forced, or ended with their worker, and how it ended (outcome; null: it lasts).
create view gangq.drains as
select d.gang_id, d.epoch, d.data ->> 'cause' as cause, d.job_id as trigger_job,
  (d.data ->> 'told')::integer as moved,
  n.acked, n.forced, n.dead,
  z.data ->> 'outcome' as outcome, d.reason, d.at as started_at, z.at as ended_at
from gangq.events d
left join lateral (
  select x.at, x.data
  from gangq.events x
  where x.gang_id = d.gang_id and x.epoch = d.epoch and x.kind = 'drained' and x.id > d.id
  order by x.id
  limit 1) z on true
cross join lateral (
  select count(*) filter (where a.kind = 'ack') as acked,
    count(*) filter (where a.kind = 'force') as forced,
    count(*) filter (where a.kind = 'dead') as dead
  from gangq.events a
  where a.gang_id = d.gang_id and a.epoch = d.epoch and a.id > d.id) n
where d.kind = 'drain' and d.gang_id is not null;
