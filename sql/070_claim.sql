-- A worker takes work: claim. A claim chooses among light jobs only: where placed work runs was
-- decided.
-- Locks, in this order: the gangs with members reserved here, by id; those members; this worker's
-- row; then places and pending jobs, with skip locked only. A port that another worker under this
-- host name is taking is waited for 50 ms. complete_and_claim takes all the rest with skip locked
-- (patient false): a report of finished jobs waits for nothing but those jobs.

-- A claimed job, with all that its worker needs to know. light: it took a light slot. array_index:
-- its place in its batch, from 0.
create type gangq.claim_row as (
  job_id bigint, token bigint, state text, queue text, task text, payload jsonb,
  attempt integer, max_attempts integer, priority integer, budget_s real,
  gang_id bigint, epoch integer, rank integer, world_size integer, master_port integer,
  checkpoint_step bigint, devices jsonb, submitted_at timestamptz, model_needed text, light boolean,
  trace text, array_index integer
);

-- Internal. Raises GQ001 for what no rendezvous can have.
create function gangq.check_port(port integer) returns void language plpgsql as $$
begin
  if (port between 1 and 65535) is not true then
    perform gangq.refuse('GQ001',
      format('port is %s; it must be 1 to 65535', coalesce(port::text, 'null')),
      'Give a port that this worker holds bound.');
  end if;
end $$;

-- Internal. Refuses what no claim can ask for. Raises GQ001, GQ007, GQ008.
create function gangq.check_claim(max_jobs integer, ports integer[], model text, lane text)
returns void language plpgsql as $$
begin
  perform gangq.require_read_committed('claim');
  if (max_jobs between 1 and 1000) is not true then
    perform gangq.refuse('GQ001',
      format('max_jobs is %s; it must be 1 to 1000', coalesce(max_jobs::text, 'null')),
      'Claim in batches.');
  elsif model = '' then
    perform gangq.refuse('GQ001', 'model is empty; it must have 1 to 200 characters',
      'Name what this worker has loaded, or leave it out.');
  elsif length(model) > 200 then
    perform gangq.refuse_larger('model', octet_length(model), 200);
  elsif lane not in ('placed', 'light') then
    perform gangq.refuse('GQ001', format('lane is %L', left(lane, 40)),
      'placed, light, or null for both.');
  end if;
  perform gangq.check_port(p.port) from unnest(ports) as p(port);
end $$;

-- Internal. Locks the gangs with members reserved on this worker, and returns up to so many of
-- those members, locked. A claim of a sibling holds a gang for milliseconds, an open cancel for as
-- long as it likes: after 200 ms that gang is left to the next claim, and this worker gets its
-- other gangs and work. Whoever changes a member locks its gang first, so the rows of members are
-- not waited for.
create function gangq.lock_reserved(incarnation bigint, most integer, patient boolean)
returns bigint[] language plpgsql set lock_timeout = '200ms' as $$
declare
  gang_ids bigint[] := array(
    select distinct j.gang_id from gangq.live_jobs j
    where j.incarnation = lock_reserved.incarnation and j.token is null and j.state = 'reserved');
begin
  if patient then
    begin
      perform 1 from gangq.live_gangs g where g.id = any (gang_ids) order by g.id for update;
    exception when lock_not_available then
      null;
    end;
  end if;
  gang_ids := array(
    select g.id from gangq.live_gangs g
    where g.id = any (gang_ids) order by g.id for update skip locked);
  return array(
    select j.id from gangq.live_jobs j
    where j.incarnation = lock_reserved.incarnation and j.state = 'reserved'
      and j.gang_id = any (gang_ids)
    order by j.id limit most for update skip locked);
end $$;

-- Internal. Starts these members, which are reserved on this worker, and returns them. The gangs
-- and members are locked. Rank 0 gets the next port. Starts none while another session gives this
-- port to a gang. If the port serves a gang already: raises GQ004 where patient, otherwise starts
-- none. Then what this transaction has reported stays reported, and the next claim names the port.
create function gangq.start_reserved(
  me gangq.incarnations, members bigint[], request_id uuid, ports integer[], base bigint,
  t timestamptz, patient boolean
) returns bigint[] language plpgsql set lock_timeout = '50ms' as $$
declare
  m record;
  nth integer := 0;
begin
  update gangq.live_jobs j set state = 'running', token = gangq.new_token(base), light = false,
    attempts = j.attempts + 1, claimed_at = t, ran_on = (me).id, deadline_at = null,
    request_id = start_reserved.request_id, devices = (
      select array_agg(h.device_id order by h.device_id)
      from gangq.device_holds h where h.job_id = j.id)
  where j.id = any (members);
  for m in
    select j.id, j.gang_id, gangq.rank_of(j) as rank, j.token, g.epoch
    from gangq.live_jobs j join gangq.live_gangs g on g.id = j.gang_id
    where j.id = any (members) order by j.id
  loop
    perform gangq.log_event(t, 'claim', m.gang_id, m.epoch, m.id, m.token, me.id,
      data => jsonb_build_object('rank', m.rank));
    continue when m.rank > 0;
    nth := nth + 1;
    begin
      update gangq.live_gangs g
      set master_host = me.host, master_addr = me.address, master_port = ports[nth]
      where g.id = m.gang_id;
    exception when unique_violation then
      perform gangq.refuse_port(ports[nth], me.host);
    end;
  end loop;
  perform gangq.open_barriers(array(
    select distinct j.gang_id from gangq.live_jobs j where j.id = any (members)), t);
  return members;
exception
  when lock_not_available then
    return '{}';
  when sqlstate 'GQ004' then
    if patient then
      raise;
    end if;
    return '{}';
end $$;

-- Internal. Raises GQ004.
create function gangq.refuse_port(port integer, host text) returns void language plpgsql as $$
begin
  perform gangq.refuse('GQ004',
    format('port %s of host %s serves another gang''s rendezvous', port, host),
    'Two workers under one host name hold the same port, in containers perhaps. Bind another and '
    'ask again.');
end $$;

-- Internal. The worker that claims, its row locked; null: patient is false, and another session has
-- it, or it has ended. Raises GQ002, GQ005, 42501.
create function gangq.lock_claimer(incarnation bigint, patient boolean)
returns gangq.incarnations language plpgsql as $$
declare
  mine record;
  me gangq.incarnations;
begin
  if patient then
    select i as row into mine from gangq.incarnations i
    where i.id = lock_claimer.incarnation for no key update;
  else
    select i as row into mine from gangq.incarnations i
    where i.id = lock_claimer.incarnation for no key update skip locked;
  end if;
  me := mine.row;  -- Whole: to read its columns one by one costs as much again.
  if me.id is null or me.ended_at is not null then
    if not patient then
      return null;
    end if;
    perform gangq.refuse_ended(lock_claimer.incarnation);
  end if;
  if me.login <> session_user then
    perform gangq.check_login(me.id);
  end if;
  return me;
end $$;

-- Internal. What a claim needs to know about its worker. leased: its lease has not ended. asleep:
-- it is noted as sleeping. places: it has an open place. base: of new tokens. light: how many light
-- jobs it holds. repeated: it holds a job that this request claimed. held_from: the lowest token it
-- holds. One query, because each further query costs as much as taking a job.
create function gangq.claim_facts(me gangq.incarnations, request_id uuid, t timestamptz)
returns table (
  leased boolean, cordoned boolean, asleep boolean, places boolean, shape_ids integer[],
  base bigint, light bigint, repeated boolean, held_from bigint
) language sql stable as $$
  select exists (
      select 1 from gangq.leases l where l.incarnation = (me).id and l.expires_at > t),
    exists (
      select 1 from gangq.cordons c
      where (c.kind, c.name) in (('host', (me).host), ('worker', (me).name))),
    exists (select 1 from gangq.sleepers z where z.incarnation = (me).id),
    exists (select 1 from gangq.places p where p.incarnation = (me).id and p.job_id is null),
    array(select z.id from gangq.shapes z order by z.id limit 33),
    b.base, h.light, h.repeated,
    coalesce(h.held_from, (b.base + (select k.last_value from gangq.tokens k)) << 16)
  from gangq.id_base() b
  cross join (
    select count(*) filter (where j.light) as light, min(j.token) as held_from,
      bool_or(j.request_id = claim_facts.request_id) as repeated
    from gangq.live_jobs j where j.incarnation = (me).id and j.token >= (me).held_from) h
$$;

-- Why each step stands before the next one:
-- 1. Refuse what no claim can ask for, before anything is locked.
-- 2. Lock gangs, their members, then the worker: the order of all locks. From here on the claims of
--    one worker follow each other.
-- 3. Read the clock and the facts after the lock. So they include what the worker's previous claim
--    has committed, and a lease that ended while this one waited.
-- 4. Refuse a worker whose lease has ended, before anything is written.
-- 5. A request that is repeated gets what it had claimed and still holds; with nothing left of that
--    it is as a new one.
-- 6. Take members first, because their gang waits at its barrier; then jobs for places, because
--    places hold devices; then light jobs, of which there may be any number. Each gets what the
--    former have left of max_jobs.
-- 7. Note that the worker sleeps only after it has looked for light jobs and got nothing at all. A
--    job whose submission did not see the note is found by its next claim, after this commit.
-- 8. Note what later claims read from the worker's row. While a snapshot elsewhere is held, the
--    index keeps an entry for each job that this worker has finished. held_from is the lowest token
--    that the worker may still hold: claims read the index from there. It is moved by 256 tokens
--    (2^24) at least.
--
-- Internal. The work of claim. patient false: it follows a completion in the same transaction. Then
-- it waits for no other session, but 50 ms for a port, and raises GQ001, GQ007, GQ008 and 42501
-- only.
create function gangq.take(
  incarnation bigint, request_id uuid, max_jobs integer, ports integer[], sleep boolean,
  model text, lane text, patient boolean
) returns setof gangq.claim_row language plpgsql as $$
declare
  t timestamptz;
  me gangq.incarnations;
  room record;
  may_start boolean;  -- what is reserved here
  may_take boolean;  -- other work, too
  members bigint[] := '{}';
  taken bigint[] := '{}';
  claimed bigint;  -- jobs of all kinds so far
  light_room bigint;
  light_jobs bigint;
begin
  -- 1. Asked before the function that refuses is called: the call costs more than the question.
  if not gangq.reads_committed() or (max_jobs between 1 and 1000) is not true or ports <> '{}'
    or model is not null or lane not in ('placed', 'light')
  then
    perform gangq.check_claim(max_jobs, ports, model, lane);
  end if;
  -- 2.
  if take.lane is distinct from 'light' and exists (
    select 1 from gangq.live_jobs j where j.incarnation = take.incarnation and j.token is null)
  then
    members := gangq.lock_reserved(take.incarnation, take.max_jobs, patient);
  end if;
  me := gangq.lock_claimer(take.incarnation, patient);
  -- 3.
  t := gangq.now();
  select f.* into room from gangq.claim_facts(me, take.request_id, t) f;
  -- 4.
  if me.id is null or not room.leased and not patient then
    return;
  elsif not room.leased then
    perform gangq.refuse('GQ005',
      format('the lease of worker %L (incarnation %s) has ended', me.name, me.id),
      'Call gangq.heartbeat: if it is accepted, claim again; otherwise register again.');
  end if;
  -- A model is loaded where placed jobs run; light ones need none.
  if take.lane is distinct from 'light' and take.model is distinct from me.model then
    update gangq.incarnations i set model = take.model where i.id = me.id;
  end if;
  -- 5.
  if room.repeated then
    return query select c.* from gangq.claimed(array(
      select j.id from gangq.live_jobs j
      where j.incarnation = me.id and j.token >= me.held_from
        and j.request_id = take.request_id and j.state in ('running', 'preempting'))) c;
    if found then
      return;
    end if;
  end if;
  -- 6.
  may_start := me.state = 'live' and me.quarantined is null;
  may_take := may_start and not room.cordoned;
  if may_start and members <> '{}' then
    taken := gangq.start_reserved(
      me, members, take.request_id, take.ports, room.base, t, patient);
  end if;
  if room.places and not may_take then
    -- Their room returns to the decision.
    perform gangq.close_places(array(select p.id from gangq.places p where p.incarnation = me.id));
    perform gangq.wake_tick();
  elsif room.places and take.lane is distinct from 'light' then
    taken := taken || gangq.fill_places(
      me, take.request_id, take.max_jobs - cardinality(taken), room.base, t);
  end if;
  claimed := cardinality(taken);
  if claimed > 0 then
    return query select c.* from gangq.claimed(taken) c;
  end if;
  light_room := least(take.max_jobs - claimed, me.light * me.prefetch - room.light);
  if may_take and take.lane is distinct from 'placed' and light_room > 0 then
    return query
    select l.* from gangq.take_light(
      me, take.request_id, light_room::integer, room.shape_ids, room.base, t) l;
    get diagnostics light_jobs = row_count;
    claimed := claimed + light_jobs;
    -- 7.
    if claimed > 0 and room.asleep then
      perform gangq.forget_sleepers(array[me.id]);
    elsif claimed = 0 and take.sleep and not room.asleep then
      insert into gangq.sleepers (incarnation, queues, since) values (me.id, me.queues, t)
      on conflict do nothing;
    end if;
  end if;
  -- 8.
  if me.worked_at is null and claimed > 0 or room.held_from > me.held_from + 16777216 then
    update gangq.incarnations i
    set worked_at = coalesce(i.worked_at, t), held_from = room.held_from
    where i.id = me.id;
  end if;
end $$;

-- A worker takes work, up to max_jobs in all: members of gangs that are reserved here, jobs for the
-- places that are open here, then light jobs, by priority and first in first out within one. It
-- holds light * prefetch light jobs at most. Room for members and places was counted when they were
-- reserved or opened, and is not counted again. Members beyond max_jobs stay reserved for the next
-- claim. lane: only placed, only light; null: both. Repeating request_id after a lost reply returns
-- the same claims. model: what this worker has loaded; decisions prefer it for jobs that need it.
-- ports: ports this worker holds bound, for the rendezvous of gangs whose rank 0 it gets. sleep:
-- when there is no light job, note that this worker sleeps; commit, claim once more, then wait for
-- NOTIFY. Raises GQ001, GQ002, GQ004 (a port serves another gang of this host), GQ005, GQ007,
-- GQ008, 42501 (another login registered it).
create function gangq.claim(
  incarnation bigint, request_id uuid default null, max_jobs integer default 1,
  ports integer[] default '{}', sleep boolean default false, model text default null,
  lane text default null
) returns setof gangq.claim_row
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return query
  select c.* from gangq.take(claim.incarnation, claim.request_id, claim.max_jobs, claim.ports,
    claim.sleep, claim.model, claim.lane, true) c;
end $$;
