-- The fleet as a whole, for a page or a wall: every GPU with one state, what is placed, and the
-- planned starts. The views cost as much as the fleet is large, and fleet as much as there are
-- devices that were ever known: their rows are kept. They take no locks.

-- A row for each device, and one (uuid null) for each live worker without devices. state: free,
-- held, reserved (for a member or an open place, not claimed yet), kept (free now, for a planned
-- start), quarantined, silent (its worker is not heard), or unknown (no live worker offers it).
-- cordoned: why its worker is given nothing new; slots: how many placed jobs that worker runs;
-- free_slots: how many more it may be given now; null: it is given none (cordoned, quarantined,
-- draining, silent, or passed over). The plans are few: the devices of their seats are read once.
create view gangq.fleet as
select coalesce(w.host, r.host) as host, w.name as worker, r.uuid, r.index, r.vram_mb, r.model,
  case
    when h.kind = 'quarantine' or w.quarantined is not null then 'quarantined'
    when w.id is null then 'unknown'
    when w.silent then 'silent'
    when h.kind = 'place' or j.state = 'reserved' then 'reserved'
    when h.kind = 'job' then 'held'
    when k.device_id is not null then 'kept'
    else 'free' end as state,
  h.job_id, j.gang_id, j.rank, h.since,
  coalesce(h.reason, w.quarantined) as reason, w.cordoned, w.state as worker_state, w.renewed_at,
  w.slots, o.slots as free_slots
from (
  select i.id, i.name, i.host, i.state, i.slots, i.quarantined, l.renewed_at,
    i.flagged_at is not null or l.renewed_at <= c.heard_since as silent, (
      select x.reason from gangq.cordons x
      where (x.kind, x.name) in (('host', i.host), ('worker', i.name))
      order by x.kind limit 1) as cordoned
  from gangq.incarnations i
  join gangq.leases l on l.incarnation = i.id
  cross join (
    select gangq.now() - make_interval(secs => s.candidate_silence_s) as heard_since
    from gangq.settings s offset 0) c
  where i.ended_at is null) w
left join gangq.open_slots() o on o.incarnation = w.id
full join gangq.device_registry r on r.offered_by = w.id
left join gangq.device_holds h on h.device_id = r.id
left join gangq.live_jobs j on j.id = h.job_id
left join (
  select distinct (d.value #>> '{}')::bigint as device_id
  from gangq.plans p
  cross join lateral jsonb_path_query(p.seats, '$[*].devices[*]') as d(value)) k
    on k.device_id = r.id;

-- What has a planned start, a gang (gang_id) or single jobs of one shape and priority: with how
-- many seats, when, and whose end that follows. kept: others were told to stop for it, and its
-- seats are kept until they have.
create view gangq.planned as
select p.ask, p.place, p.kept, p.starts_at, g.id as gang_id, s.queue, s.task, (
    -- 0.2.0 wrote an element for each seat, without a number.
    select coalesce(sum(coalesce((x.value ->> 'slots')::integer, 1)), 0)::integer
    from jsonb_array_elements(p.seats) as x(value)) as seats,
  coalesce(o.why, v.why) as why,
  coalesce(o.follows, v.follows) as follows
from gangq.plans p
left join gangq.live_gangs g on p.ask = 'g' || g.id
join gangq.shapes s on s.id = coalesce(g.shape_id, case when left(p.ask, 1) = 'k'
  then substr(split_part(p.ask, '/', 1), 2)::integer end)
left join gangq.verdicts v on v.kind_id = coalesce(g.kind_id, -s.id) and v.ask = ''
left join gangq.verdicts o on o.kind_id = coalesce(g.kind_id, -s.id) and o.ask = p.ask;

-- What is placed: a row for each gang with members on workers, and one for the single jobs of each
-- shape. jobs, gpus, hosts: how many; since: the first claim of those; first_job: the oldest. It
-- reads the index of what is held, so its cost grows with what runs, and not with what waits.
create view gangq.running as
select x.gang_id, s.queue, s.task, coalesce(g.state, 'running') as state, x.jobs, x.gpus, x.hosts,
  x.since, x.first_job, g.name, g.size, g.epoch
from (
  select j.gang_id, min(j.shape_id) as shape_id, count(*)::integer as jobs,
    sum(z.gpus)::integer as gpus, count(distinct i.host)::integer as hosts,
    min(j.claimed_at) as since, min(j.id) as first_job
  from gangq.live_jobs j
  join gangq.shapes z on z.id = j.shape_id
  join gangq.incarnations i on i.id = j.incarnation
  where j.incarnation is not null
  group by j.gang_id, case when j.gang_id is null then j.shape_id end) x
left join gangq.live_gangs g on g.id = x.gang_id
join gangq.shapes s on s.id = coalesce(g.shape_id, x.shape_id);

-- What each member of a live gang has last told and saved: rank; beat_at: when its last beat
-- reached the database, with the step and phase it named; longest_gap_s: how long beats of its task
-- have stayed away without harm, on such devices; saved_step, saved_at: its newest checkpoint that
-- is kept. Beats are kept once for each job, the last one. Filter by gang_id.
create view gangq.member_beats as
select j.gang_id, j.rank, j.id as job_id, p.beat_at, p.step, p.phase,
  b.longest_s as longest_gap_s, c.step as saved_step, c.saved_at
from gangq.live_jobs j
join gangq.shapes s on s.id = j.shape_id
left join gangq.progress p on p.job_id = j.id and p.token = j.token
left join lateral (
  select x.longest_s from gangq.beat_gaps x
  where x.task = s.task and x.device_class = coalesce((
    select r.model from gangq.device_registry r where r.id = j.devices[1]), '')) b on true
left join lateral (
  select x.step, x.saved_at from gangq.checkpoints x
  where x.job_id = j.id order by x.step desc limit 1) c on true
where j.gang_id is not null;

-- A text that differs from an earlier one if what a page shows can have changed in between: by the
-- rows that were written, as PostgreSQL counts them (at once where a session goes on, within 10 s
-- where it then idles), the numbers that jobs and claims have drawn, and the workers that may be
-- given work. What each heartbeat, tick and pass writes does not count. It takes 1 ms, so a page
-- asks this, and reads the rest only where it differs.
create function gangq.change_mark() returns text language sql stable as $$
  select concat_ws(' ', w.written, (select s.last_value from gangq.job_ids s),
    (select s.last_value from gangq.tokens s), cardinality(gangq.candidates(gangq.now())))
  from (
    select sum(pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_deleted(c.oid)
      -- Each pass renews open places and plans.
      + case when c.relname in ('places', 'plans') then 0
        else pg_stat_get_tuples_updated(c.oid) end) as written
    from pg_class c
    where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'r' and c.relname !~ '^passes'
      and c.relname <> all (
        '{leases,device_readings,decider,tick_state,lock_rows,sleepers,requests,requests_before}')
  ) w
$$;
