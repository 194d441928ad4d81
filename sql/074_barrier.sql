-- barrier: the members of an epoch wait until all of them have been claimed, and learn who is who.
-- Locks: barrier with a port locks the job's gang. Callers of open_barriers have locked the gangs.

-- Internal. Opens the barrier of those locked gangs whose last member has been claimed: at the
-- start, and again when a running gang has all its missing members back.
create function gangq.open_barriers(gang_ids bigint[], t timestamptz) returns void
language plpgsql as $$
declare
  g record;
begin
  for g in
    select x.id, x.epoch, x.state,
      min(j.deadline_at) filter (where j.state = 'reserved') as deadline_at,
      bool_or(j.state = 'blocked' and gangq.in_epoch(j, x)) as missing
    from gangq.live_gangs x join gangq.live_jobs j on j.gang_id = x.id
    where x.id = any (gang_ids) and (x.state = 'reserved' or x.missing_since is not null)
    group by x.id order by x.id
  loop
    if g.deadline_at is null and not g.missing then
      update gangq.live_gangs x set state = 'running', go_at = coalesce(x.go_at, t),
        deadline_at = null, missing_since = null
      where x.id = g.id;
      perform gangq.log_event(t, 'go', g.id, g.epoch);
      perform gangq.wake_members(g.id);
    elsif g.state = 'running' then
      update gangq.live_gangs x set deadline_at = g.deadline_at where x.id = g.id;
    end if;
  end loop;
end $$;

-- Internal. Tells the workers of a gang to ask for its barrier.
create function gangq.wake_members(gang_id bigint) returns void
language plpgsql set enable_seqscan = off as $$
begin
  perform gangq.wake(array(
    select j.incarnation from gangq.live_jobs j
    where j.gang_id = wake_members.gang_id and j.state = 'running'), 'go');
end $$;

-- Internal. What a worker needs to know about the jobs it has just claimed.
create function gangq.claimed(ids bigint[]) returns setof gangq.claim_row language sql stable as $$
  select j.id, j.token, j.state, s.queue, s.task, j.payload, j.attempts::integer,
    j.max_attempts::integer, j.priority::integer, j.budget_s, j.gang_id, g.epoch, gangq.rank_of(j),
    g.world_size, case when gangq.rank_of(j) = 0 then g.master_port end,
    case when j.gang_id is not null then g.restore_step
      else (select max(c.step) from gangq.checkpoints c where c.job_id = j.id) end,
    coalesce((
      select jsonb_agg(jsonb_build_object('uuid', d.uuid, 'index', d.index, 'vram_mb', d.vram_mb,
        'source', d.source) order by d.index, d.uuid)
      from gangq.device_holds h join gangq.device_registry d on d.id = h.device_id
      where h.job_id = j.id), '[]'),
    j.submitted_at, s.model, j.light, j.trace, j.array_index
  from unnest(claimed.ids) as w(id)
  join gangq.live_jobs j on j.id = w.id
  join gangq.shapes s on s.id = j.shape_id
  left join gangq.live_gangs g on g.id = j.gang_id
  order by j.gang_id is null, j.order_key, j.rank
$$;

-- Who is who in this epoch, one row per member in rank order, with its role and its rank within
-- that. go is true once every member has been claimed: only then may a member's code begin. Called
-- again when heartbeat names a newer epoch, it is true once that one is whole. port: given by the
-- new rank 0 of a gang that shrank, which was claimed without one: a port it holds bound. service,
-- revision, health: of a replica, what its worker polls to see whether it is ready; null: it says
-- so itself, or is no replica. Raises GQ001, GQ002, GQ003 (not this claim any more, or told to
-- stop), GQ004 (the job is not a member of a gang; the port serves another gang), 42501.
create function gangq.barrier(job_id bigint, token bigint, port integer default null)
returns table (
  go boolean, epoch integer, rank integer, job_id_of_rank bigint, worker text, host text,
  local_rank integer, node_rank integer, local_world_size integer, master_addr text,
  master_port integer, role text, role_rank integer, service text, revision integer, health text
) language plpgsql as $$
declare
  mine gangq.live_jobs := gangq.own_claim(barrier.job_id, barrier.token);
  me gangq.incarnations;
begin
  if mine.gang_id is null then
    perform gangq.refuse('GQ004', format('job %s is not a member of a gang', mine.id),
      'Only members wait at a barrier: a single job may begin at once.');
  elsif mine.state <> 'running' then
    perform gangq.refuse_stale(barrier.job_id, barrier.token);
  end if;
  if barrier.port is not null then
    perform gangq.check_port(barrier.port);
    select i.* into me from gangq.incarnations i where i.id = mine.incarnation;
    -- Which of the others is rank 0 may change until this lock is held.
    perform 1 from gangq.live_gangs g where g.id = mine.gang_id for update;
    begin
      update gangq.live_gangs g
      set master_host = me.host, master_addr = me.address, master_port = barrier.port
      from gangq.live_jobs j
      where g.id = mine.gang_id and g.state = 'running' and g.master_host is null
        and j.id = mine.id and j.token = barrier.token and j.state = 'running'
        and gangq.rank_of(j) = 0;
    exception when unique_violation then
      perform gangq.refuse_port(barrier.port, me.host);
    end;
    if found then
      perform gangq.wake_members(mine.gang_id);
    end if;
  end if;
  return query
  select m.go, m.epoch, m.rank, m.id, m.name, m.host,
    (row_number() over (partition by m.host order by m.rank) - 1)::integer,
    (dense_rank() over (order by m.first_rank) - 1)::integer,
    (count(*) over (partition by m.host))::integer, m.master_addr, m.master_port, m.role,
    (row_number() over (partition by m.ordinal order by m.rank) - 1)::integer,
    s.service::text, s.revision, s.health::text
  from (
    select g.go_at is not null and g.missing_since is null and g.master_host is not null as go,
      g.epoch, n.rank, j.id, i.name, i.host,
      min(n.rank) filter (where i.host is not null) over (partition by i.host) as first_rank,
      g.master_addr, g.master_port, r.name as role, r.ordinal
    from gangq.live_gangs g
    join gangq.live_jobs j on j.gang_id = g.id and gangq.in_epoch(j, g)
    cross join lateral (select gangq.rank_of(j) as rank) n
    join gangq.kind_roles r on r.kind_id = g.kind_id and r.ordinal = j.role
    -- A member that is done keeps its place, for those that ask later.
    left join gangq.incarnations i
      on i.id = case j.state when 'done' then j.ran_on else j.incarnation end
    where g.id = mine.gang_id) m
  left join (
    select r.service, r.revision, r.health
    from gangq.service_gangs_table k
    join gangq.service_revisions r on r.service = k.service and r.revision = k.revision
    where k.gang_id = mine.gang_id) s on true
  order by m.rank;
end $$;
