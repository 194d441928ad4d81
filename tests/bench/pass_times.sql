-- Fleets and backlogs too large to be made by calling verbs, as the schema's owner: one of each is made by the verbs and
-- copied, so that no column is forgotten.

create schema bench;

-- hosts idle workers of slots slots and devices devices each. They count as heard for a day.
create function bench.fleet(hosts integer, slots integer, devices integer) returns void language plpgsql as $$
declare
  first bigint := (select r.incarnation from gangq.register_worker(name => 'w', host => 'host', queues => '{default}',
    slots => fleet.slots, memory_mb => 512000, cpus => 64, options => '{"light": 0}') r);
begin
  insert into gangq.incarnations
  select c.* from gangq.incarnations i cross join generate_series(1, fleet.hosts - 1) n
  cross join lateral jsonb_populate_record(i, jsonb_build_object('id', nextval('gangq.incarnation_ids'), 'name', 'w' || n, 'host', 'host' || n)) c
  where i.id = first;
  update gangq.settings set candidate_silence_s = 86400;
  delete from gangq.leases;
  insert into gangq.leases (incarnation, expires_at, renewed_at, lease_s)
  select i.id, gangq.now() + interval '1 day', gangq.now(), 86400 from gangq.incarnations i;
  insert into gangq.device_registry (uuid, host, index, vram_mb, source, offered_by)
  select i.host || '-' || d, i.host, d, 80000, 'declared', i.id
  from gangq.incarnations i cross join generate_series(0, fleet.devices - 1) d;
end $$;

-- count blocked gangs like this one, itself included.
create function bench.copies(gang_id bigint, count integer) returns void language plpgsql as $$
begin
  create temporary table born on commit drop as
  select nextval('gangq.gang_ids') as id, gangq.order_key(g.priority, gangq.next_pos(0)) as order_key
  from gangq.live_gangs g cross join generate_series(1, copies.count - 1)
  where g.id = copies.gang_id;
  insert into gangq.live_gangs
  select c.* from gangq.live_gangs g cross join born b
  cross join lateral jsonb_populate_record(g, jsonb_build_object('id', b.id, 'order_key', b.order_key)) c
  where g.id = copies.gang_id;
  insert into gangq.live_jobs
  select c.* from gangq.live_jobs j cross join born b
  cross join lateral jsonb_populate_record(j, jsonb_build_object('id', nextval('gangq.job_ids'), 'gang_id', b.id, 'order_key', b.order_key)) c
  where j.gang_id = copies.gang_id;
  drop table born;
end $$;

-- count gangs of size members in as many kinds as there are requirements of memory.
create function bench.waiting(count integer, size integer, gpus integer, kinds integer, priority integer default 0)
returns void language sql as $$
  select bench.copies(g.gang_id, waiting.count / waiting.kinds)
  from generate_series(1, waiting.kinds) k
  cross join lateral gangq.submit_gang(task => 'train', size => waiting.size, gpus => waiting.gpus,
    priority => waiting.priority, options => jsonb_build_object('memory_mb', 1000 + k, 'budget_s', 3600)) g
$$;

-- Every slot of every worker runs a member of a gang, a gang a worker; they started up to an hour ago.
create function bench.occupied() returns void language plpgsql as $$
declare
  t timestamptz := gangq.now();
  per_worker integer := (select min(i.slots) from gangq.incarnations i);
begin
  perform bench.copies(g.gang_id, (select count(*)::integer from gangq.incarnations))
  from gangq.submit_gang(task => 'train', size => per_worker, options => '{"budget_s": 7200}') g;
  create temporary table seats on commit drop as
  select g.id as gang_id, i.id as incarnation, t - make_interval(secs => 3600 * random()) as began
  from (select x.id, row_number() over (order by x.id) as n from gangq.live_gangs x where x.state = 'blocked') g
  join (select x.id, row_number() over (order by x.id) as n from gangq.incarnations x) i on i.n = g.n;
  update gangq.live_jobs j set state = 'reserved', incarnation = s.incarnation, deadline_at = t from seats s where j.gang_id = s.gang_id;
  update gangq.live_jobs j set state = 'running', token = gangq.new_token(0), attempts = 1, claimed_at = s.began, ran_on = s.incarnation,
    deadline_at = null
  from seats s where j.gang_id = s.gang_id;
  update gangq.live_gangs g set state = 'running', epoch = 1, world_size = g.size, reserved_at = s.began, go_at = s.began
  from seats s where g.id = s.gang_id;
  drop table seats;
end $$;

-- No worker has been heard of for an hour; nobody has judged them yet.
create function bench.silent() returns void language sql as $$
  update gangq.leases set renewed_at = gangq.now() - interval '1 h';
  update gangq.settings set candidate_silence_s = 60;
$$;
