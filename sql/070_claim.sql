-- A worker takes work: claim, and the barrier that lets a gang begin. A claim decides nothing. It
-- takes up to max_jobs, in this order: members that are reserved here, jobs for the places that are
-- open here, light jobs by priority and age.
-- Locks, in this order: the gangs with members reserved here, by id; those members; this worker's
-- row; then places and pending jobs, with skip locked only. complete_and_claim takes all of them
-- with skip locked (patient false): a report of finished jobs waits for nothing but those jobs.

create type gangq.claim_row as (
  job_id bigint, token bigint, state text, queue text, task text, payload jsonb,
  attempt integer, max_attempts integer, priority integer, budget_s real,
  gang_id bigint, epoch integer, rank integer, world_size integer, master_port integer,
  checkpoint_step bigint, devices jsonb, submitted_at timestamptz, model_needed text, light boolean
);
comment on type gangq.claim_row is
  'A claimed job, with all that its worker needs to know. light: it took a light slot.';

create function gangq.check_claim(max_jobs integer, model text, lane text) returns void
language plpgsql as $$
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
end $$;
comment on function gangq.check_claim is
  'Internal. Refuses what no claim can ask for. Raises GQ001, GQ007, GQ008.';

-- A claim of a sibling holds a gang for milliseconds, an open cancel for as long as it likes: after
-- 200 ms the gang is left to the next claim, and this worker gets its other work. Whoever changes a
-- member locks its gang first, so the rows of members are not waited for.
create function gangq.lock_reserved(incarnation bigint, most integer, patient boolean)
returns bigint[] language plpgsql set lock_timeout = '200ms' as $$
declare
  gang_ids bigint[] := array(
    select distinct j.gang_id from gangq.live_jobs j
    where j.incarnation = lock_reserved.incarnation and j.token is null and j.state = 'reserved');
begin
  if patient then
    perform 1 from gangq.live_gangs g where g.id = any (gang_ids) order by g.id for update;
  else
    gang_ids := array(
      select g.id from gangq.live_gangs g
      where g.id = any (gang_ids) order by g.id for update skip locked);
  end if;
  return array(
    select j.id from gangq.live_jobs j
    where j.incarnation = lock_reserved.incarnation and j.state = 'reserved'
      and j.gang_id = any (gang_ids)
    order by j.id limit most for update skip locked);
exception when lock_not_available then
  return '{}';
end $$;
comment on function gangq.lock_reserved is
  'Internal. Locks the gangs with members reserved on this worker, and returns up to so many of '
  'those members, locked.';

-- The gangs and members are locked. Rank 0 gets the next port.
create function gangq.start_members(
  me gangq.incarnations, members bigint[], request_id uuid, ports integer[], base bigint,
  t timestamptz
) returns void language plpgsql as $$
#variable_conflict use_column
declare
  m record;
  nth integer := 0;
begin
  with running as (
    update gangq.live_jobs j set state = 'running', token = gangq.new_token(base), light = false,
      attempts = j.attempts + 1, claimed_at = t, ran_on = (me).id, deadline_at = null,
      request_id = start_members.request_id, devices = (
        select array_agg(h.device_id order by h.device_id)
        from gangq.device_holds h where h.job_id = j.id)
    where j.id = any (members)
    returning j.id, j.token
  )
  update gangq.device_holds h set token = r.token from running r where h.job_id = r.id;
  for m in
    select j.id, j.gang_id, coalesce(j.epoch_rank, j.rank) as rank, j.token, g.epoch
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
end $$;
comment on function gangq.start_members is
  'Internal. Starts these members, which are reserved on this worker. Raises GQ004.';

create function gangq.refuse_port(port integer, host text) returns void language plpgsql as $$
begin
  perform gangq.refuse('GQ004',
    format('port %s of host %s serves another gang''s rendezvous', port, host),
    'Two workers under one host name hold the same port, in containers perhaps. Bind another and '
    'ask again.');
end $$;
comment on function gangq.refuse_port is 'Internal. Raises GQ004.';

-- At first, and again when a running gang has got back all it missed.
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
comment on function gangq.open_barriers is
  'Internal. Those of these locked gangs go whose last member has been claimed.';

create function gangq.wake_members(gang_id bigint) returns void language sql as $$
  select gangq.wake(array(
    select j.incarnation from gangq.live_jobs j
    where j.gang_id = wake_members.gang_id and j.state = 'running'), 'go')
$$;
comment on function gangq.wake_members is
  'Internal. Tells the workers of a gang to ask for its barrier.';

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
comment on function gangq.lock_claimer is
  'Internal. The worker that claims, its row locked; null: patient is false, and another session '
  'has it, or it has ended. Raises GQ002, GQ005, 42501.';

-- One query, because each further one costs as much as taking a job.
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
comment on function gangq.claim_facts is
  'Internal. What a claim has to know of its worker: repeated: it holds what this request claimed; '
  'light: how many light jobs it holds; held_from: the first token of what it holds.';

-- Why each step stands before the next one:
-- 1. Refuse what no claim can ask for, before anything is locked.
-- 2. Lock gangs, their members, then the worker: the order of all locks. From here on the claims of
--    one worker follow each other.
-- 3. Read the clock and the facts after the lock. So they include what the worker's previous claim
--    has committed, and a lease that ended while this one waited.
-- 4. Refuse a worker whose lease has ended, before anything is written.
-- 5. A request that is repeated gets what it had claimed, and nothing is taken for it again.
-- 6. Take members first, because their gang waits at its barrier; then jobs for places, because
--    places hold devices; then light jobs, of which there may be any number. Each gets what the
--    former have left of max_jobs.
-- 7. Note that the worker sleeps only after it has looked for light jobs and got nothing at all. A
--    job whose submission did not see the note is found by its next claim, after this commit.
-- 8. Note what later claims read from the worker's row.
create function gangq.take(
  incarnation bigint, request_id uuid, max_jobs integer, ports integer[], sleep boolean,
  model text, lane text, patient boolean
) returns setof gangq.claim_row language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz;
  me gangq.incarnations;
  room record;
  starts boolean;  -- what is reserved here
  takes boolean;  -- other work, too
  members bigint[] := '{}';
  taken bigint[] := '{}';
  claimed bigint;
  free bigint;
begin
  -- 1. Asked before the function that refuses is called: the call costs more than the question.
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted')
    or (max_jobs between 1 and 1000) is not true or model is not null
    or lane not in ('placed', 'light')
  then
    perform gangq.check_claim(max_jobs, model, lane);
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
    return query
    select c.* from gangq.claimed(array(
      select j.id from gangq.live_jobs j
      where j.incarnation = me.id and j.token >= me.held_from and j.request_id = take.request_id
        and j.state in ('running', 'preempting'))) c;
    if found then
      return;
    end if;
  end if;
  -- 6.
  starts := me.state = 'live' and me.quarantined is null;
  takes := starts and not room.cordoned;
  if starts and members <> '{}' then
    begin
      perform gangq.start_members(me, members, take.request_id, take.ports, room.base, t);
      taken := members;
    exception when sqlstate 'GQ004' then
      -- What was reported in this transaction stays so. The next claim says which port it is.
      if patient then
        raise;
      end if;
    end;
  end if;
  if room.places and not takes then
    perform gangq.close_places_of(me.id), gangq.wake_tick();  -- Their room returns to the decision.
  elsif room.places and take.lane is distinct from 'light' then
    taken := taken || gangq.fill_places(
      me, take.request_id, take.max_jobs - cardinality(taken), room.base, t);
  end if;
  claimed := cardinality(taken);
  if claimed > 0 then
    return query select c.* from gangq.claimed(taken) c;
  end if;
  free := least(take.max_jobs - claimed, me.light * me.prefetch - room.light);
  if takes and take.lane is distinct from 'placed' and free > 0 then
    return query
    select l.* from gangq.take_light(
      me, take.request_id, free::integer, room.shape_ids, room.base, t) l;
    get diagnostics free = row_count;
    claimed := claimed + free;
    -- 7.
    if claimed > 0 and room.asleep then
      perform gangq.forget_sleeper(me.id);
    elsif claimed = 0 and take.sleep and not room.asleep then
      insert into gangq.sleepers (incarnation, queues, since) values (me.id, me.queues, t)
      on conflict (incarnation) do nothing;
    end if;
  end if;
  -- 8. While a snapshot elsewhere is held, the index keeps an entry for each job that this worker
  -- has finished. held_from is the lowest token that the worker may still hold: claims read the
  -- index from there. It is moved by 256 tokens (2^24) at least.
  if me.worked_at is null and claimed > 0 or room.held_from > me.held_from + 16777216 then
    update gangq.incarnations i
    set worked_at = coalesce(i.worked_at, t), held_from = room.held_from
    where i.id = me.id;
  end if;
end $$;
comment on function gangq.take is
  'Internal. claim; patient false: after a completion in the same transaction. Then it waits for '
  'no other session, and raises GQ001, GQ007 and GQ008 only.';

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
comment on function gangq.claim is
  'A worker takes work, up to max_jobs in all and up to its light slots (the decision has counted '
  'the others): members of gangs that are reserved here, jobs for the places that are open here, '
  'then light jobs, by priority and first in first out within one. Members beyond max_jobs stay '
  'reserved for the next claim. lane: only placed, only light; null: both. Repeating request_id '
  'after a lost reply returns the same claims. model: what this worker has loaded; decisions '
  'prefer it for jobs that need it. ports: ports this worker holds bound, for the rendezvous of '
  'gangs whose rank 0 it gets. sleep: when there is no light job, note that this worker sleeps; '
  'commit, claim once more, then wait for NOTIFY. Raises GQ001, GQ002, GQ004 (a port serves '
  'another gang of this host), GQ005, GQ007, GQ008, 42501 (another login registered it).';

-- Light jobs --------------------------------------------------------------------------------------
--
-- A claim reads the pending jobs of a shape from the front of their index. Each claimed job leaves
-- a dead entry there. While a snapshot elsewhere is held nothing removes these entries, and every
-- claim would step over all of them. So gangq.lows keeps, per shape and priority, the key `low`
-- below which no job is pending that has kept its first place. Jobs that return (retry, release, a
-- new priority) may stand below it and have an index of their own.
--
-- low rises in three steps:
-- 1. A claim finds the first pending job 256 positions or more above low, and writes its key to
--    marked; the tick writes the last position given out where nothing is pending. A submission
--    draws its transaction id before its position, and the row of gangq.lows is written with an id
--    drawn last of all: an open submission with a position below marked has an older id.
-- 2. After every transaction with an older id has ended, each job below marked is visible or
--    claimed.
-- 3. The next look raises low to marked, or to the first job that it sees if that is lower, and
--    marks anew.
-- Invariant: every pending job that has not returned has a key >= low. An uncommitted claim leaves
-- its job visible as pending to others, and so keeps low below it. An open transaction that has
-- written holds up step 2: claims get slower and stay right.

create function gangq.low_start(key bigint) returns bigint language sql immutable
return (key >> 50 << 50) + 562949953421312;
comment on function gangq.low_start is
  'Internal. The first key that a submission could have with the priority of this key.';

create function gangq.first_pending(shape_id integer, from_key bigint) returns table (key bigint)
language sql stable as $$
  select min(f.order_key)
  from (
    (select j.order_key from gangq.live_jobs j
    where j.shape_id = first_pending.shape_id and j.state = 'pending' and j.returned
      and j.order_key >= from_key
    order by j.order_key limit 1)
    union all
    select y.order_key
    from (
      select l.low, lead(l.start, 1, 9223372036854775807) over (order by l.start) as high
      from gangq.lows l where l.shape_id = first_pending.shape_id
      union all
      select 0, coalesce(min(l.start), 9223372036854775807)
      from gangq.lows l where l.shape_id = first_pending.shape_id) r
    cross join lateral (
      select j.order_key from gangq.live_jobs j
      where j.shape_id = first_pending.shape_id and j.state = 'pending'
        and j.order_key >= greatest(r.low, from_key) and j.order_key < r.high
      order by j.order_key limit 1) y) f
$$;
comment on function gangq.first_pending is
  'Internal. The key of the first pending job of a shape from a key on, without the entries below '
  'gangq.lows; null: none.';

-- The block with the exception has a transaction id of its own, drawn when it locks: a new one.
create function gangq.raise_low(shape_id integer, first bigint, horizon xid8) returns void
language plpgsql as $$
#variable_conflict use_column
begin
  perform from gangq.lock_rows x where x.name = 'lows' for update nowait;
  insert into gangq.lows as l (shape_id, start, low, marked)
  values (raise_low.shape_id, gangq.low_start(raise_low.first), gangq.low_start(raise_low.first),
    raise_low.first)
  on conflict (shape_id, start) do update
  set low = least(l.marked, excluded.marked), marked = excluded.marked
  where age(raise_low.horizon::xid) <= age(l.xmin);
exception when lock_not_available then
  return;  -- Another session is raising one.
end $$;
comment on function gangq.raise_low is
  'Internal. Step 3. first: the first pending job of this shape and priority, or the last position '
  'given out. horizon: every older transaction had ended before first was looked up.';

-- Where nothing is pending no claim comes by. Horizon and position are read before the jobs are.
create function gangq.raise_idle_lows() returns integer language plpgsql as $$
declare
  horizon constant xid8 := pg_snapshot_xmin(pg_current_snapshot());
  last_pos constant bigint := (
    select b.base + p.last_value from gangq.id_base() b cross join gangq.positions p);
begin
  return (
    select count(gangq.raise_low(l.shape_id, l.start + last_pos, horizon))
    from gangq.lows l
    where l.start + last_pos - l.low >= 256 and not exists (
      select from gangq.live_jobs j
      where j.shape_id = l.shape_id and j.state = 'pending'
        and j.order_key >= l.low and j.order_key <= l.start + last_pos));
end $$;
comment on function gangq.raise_idle_lows is
  'Internal. Raises low where nothing is pending. Returns how often it tried.';

-- Shapes are kept for ever. Where there are many, those with a pending job are found by hopping
-- along the index from shape to shape, but not over the dead entries of the shapes in gangq.lows.
create function gangq.shapes_waiting() returns integer[] language plpgsql stable as $$
begin
  return array(
    with recursive known(id) as materialized (
      select distinct l.shape_id from gangq.lows l
      union
      select 2147483647
    ),
    waiting(id, until) as (
      select x.id, x.until
      from (
        select k.id as until, lag(k.id, 1, -2147483648) over (order by k.id) as after
        from known k) g
      cross join lateral (
        select j.shape_id as id, g.until from gangq.live_jobs j
        where j.state = 'pending' and j.shape_id > g.after and j.shape_id < g.until
        order by j.shape_id limit 1) x
      union all
      select x.id, w.until
      from waiting w
      cross join lateral (
        select j.shape_id as id from gangq.live_jobs j
        where j.state = 'pending' and j.shape_id > w.id and j.shape_id < w.until
        order by j.shape_id limit 1) x
    )
    select w.id from waiting w
    union all
    select k.id from known k where k.id < 2147483647);
end $$;
comment on function gangq.shapes_waiting is
  'Internal. The shapes with a pending job, and all those of gangq.lows.';

-- Light jobs of a queue that is paused wait; those of a queue with a limit or a fair order are
-- placed.
create function gangq.light_heads(me gangq.incarnations, shape_ids integer[], from_key bigint)
returns table (shape gangq.shapes, key bigint) language sql stable as $$
  select z, f.key
  from unnest(shape_ids) as x(id)
  join gangq.shapes z on z.id = x.id
  cross join lateral gangq.first_pending(z.id, from_key) f
  where gangq.serves(me, z) and f.key is not null and not gangq.is_placed(z, array(
      select q.name || '.' from gangq.queues_table q
      where q.paused or q.limited or q.policy = 'fair'))
$$;
comment on function gangq.light_heads is
  'Internal. Of each of these shapes the first light job from a key on that this worker may run.';

create function gangq.take_light(
  me gangq.incarnations, request_id uuid, most integer, shape_ids integer[], base bigint,
  t timestamptz
) returns setof gangq.claim_row language plpgsql as $$
#variable_conflict use_column
declare
  want integer := most;
  horizon constant xid8 := pg_snapshot_xmin(pg_current_snapshot());
  head record;
  s gangq.shapes;
  from_key bigint := 0;
  looked_from bigint;
  found_at tid[];
begin
  if cardinality(shape_ids) > 32 then
    shape_ids := gangq.shapes_waiting();
  end if;
  -- Of the shape whose first job is next, the jobs up to where the next shape's first job stands.
  -- Then all before that key has been looked at, and the next look begins there.
  while want > 0 and from_key is not null loop
    looked_from := from_key;
    select h.shape, h.key, lead(h.key) over (order by h.key) as next, (
      select l.low from gangq.lows l
      where l.shape_id = (h.shape).id and l.start = gangq.low_start(h.key)) as low
    into head
    from gangq.light_heads(me, shape_ids, from_key) h
    order by h.key limit 1;
    exit when not found;
    s := head.shape;
    -- Below low only jobs that have returned: the dead entries there are not stepped over.
    from_key := least(head.next, case when head.low > head.key then head.low end);
    select array_agg(p.ctid) into found_at
    from (
      select j.ctid from gangq.live_jobs j
      where j.shape_id = s.id and j.state = 'pending'
        and (head.low is null or head.low <= head.key or j.returned)
        and j.order_key >= head.key and j.order_key < coalesce(from_key, 9223372036854775807)
      order by j.order_key limit want for update skip locked) p;
    if found_at is not null then
      want := want - cardinality(found_at);
      -- In the order in which they were found, because each is looked up by itself; a test holds
      -- the plan to that.
      return query
      update gangq.live_jobs j set state = 'running', incarnation = me.id,
        token = gangq.new_token(base), light = true, attempts = j.attempts + 1, claimed_at = t,
        due_at = null, request_id = take_light.request_id
      from unnest(found_at) as w(ctid) where j.ctid = w.ctid
      returning j.id, j.token, j.state, s.queue, s.task, j.payload, j.attempts::integer,
        j.max_attempts::integer, j.priority::integer, j.budget_s, null::bigint, null::integer,
        null::integer, null::integer, null::integer,
        -- Only a job that ran before has saved anything.
        case when j.final_token is not null then (
          select max(c.step) from gangq.checkpoints c where c.job_id = j.id) end,
        '[]'::jsonb, j.submitted_at, s.model, true;
    end if;
    -- low is raised only after a look that began at it: one that began higher can miss a job whose
    -- claim is rolled back.
    if looked_from <= coalesce(head.low, gangq.low_start(head.key))
      and head.key - coalesce(head.low, gangq.low_start(head.key)) >= 256 then
      perform gangq.raise_low(s.id, head.key, horizon);
    end if;
  end loop;
end $$;
comment on function gangq.take_light is
  'Internal. Up to so many light jobs that this worker serves start on it: by priority, first in '
  'first out within one, whatever their shape.';

-- Members -----------------------------------------------------------------------------------------

create function gangq.claimed(ids bigint[]) returns setof gangq.claim_row language sql stable as $$
  select j.id, j.token, j.state, s.queue, s.task, j.payload, j.attempts::integer,
    j.max_attempts::integer, j.priority::integer, j.budget_s, j.gang_id, g.epoch, r.rank,
    g.world_size, case when r.rank = 0 then g.master_port end,
    case when j.gang_id is not null then g.restore_step
      else (select max(c.step) from gangq.checkpoints c where c.job_id = j.id) end,
    coalesce((
      select jsonb_agg(jsonb_build_object('uuid', d.uuid, 'index', d.index, 'vram_mb', d.vram_mb,
        'source', d.source) order by d.index, d.uuid)
      from gangq.device_holds h join gangq.device_registry d on d.id = h.device_id
      where h.job_id = j.id), '[]'),
    j.submitted_at, s.model, j.light
  from unnest(claimed.ids) as w(id)
  join gangq.live_jobs j on j.id = w.id
  join gangq.shapes s on s.id = j.shape_id
  left join gangq.live_gangs g on g.id = j.gang_id
  cross join lateral (select coalesce(j.epoch_rank, j.rank) as rank) r
  order by j.gang_id is null, j.order_key, j.rank
$$;
comment on function gangq.claimed is
  'Internal. What a worker needs to know about the jobs it has just claimed.';

create function gangq.barrier(job_id bigint, token bigint, port integer default null)
returns table (
  go boolean, epoch integer, rank integer, job_id_of_rank bigint, worker text, host text,
  local_rank integer, node_rank integer, local_world_size integer, master_addr text,
  master_port integer, role text, role_rank integer
) language plpgsql as $$
#variable_conflict use_column
declare
  mine gangq.live_jobs;
  me gangq.incarnations;
begin
  select j.* into mine from gangq.live_jobs j where j.id = barrier.job_id;
  if not found or mine.token is distinct from barrier.token or mine.state <> 'running'
    or mine.gang_id is null then
    perform gangq.refuse_stale(barrier.job_id, barrier.token);
  end if;
  perform gangq.check_login(mine.incarnation);
  if barrier.port is not null then
    select i.* into me from gangq.incarnations i where i.id = mine.incarnation;
    -- Which of the others is rank 0 may change until this lock is held.
    perform 1 from gangq.live_gangs g where g.id = mine.gang_id for update;
    begin
      update gangq.live_gangs g
      set master_host = me.host, master_addr = me.address, master_port = barrier.port
      from gangq.live_jobs j
      where g.id = mine.gang_id and g.state = 'running' and g.master_host is null
        and j.id = mine.id and j.token = barrier.token and j.state = 'running'
        and coalesce(j.epoch_rank, j.rank) = 0;
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
    (row_number() over (partition by m.ordinal order by m.rank) - 1)::integer
  from (
    select g.go_at is not null and g.missing_since is null and g.master_host is not null as go,
      g.epoch, n.rank, j.id, i.name, i.host,
      min(n.rank) filter (where i.host is not null) over (partition by i.host) as first_rank,
      g.master_addr, g.master_port, r.name as role, r.ordinal
    from gangq.live_gangs g
    join gangq.live_jobs j on j.gang_id = g.id and gangq.in_epoch(j, g)
    cross join lateral (select coalesce(j.epoch_rank, j.rank) as rank) n
    join gangq.kind_roles r on r.kind_id = g.kind_id and r.ordinal = coalesce(j.role, 1)
    -- A member that is done keeps its place, for those that ask later.
    left join gangq.incarnations i
      on i.id = case j.state when 'done' then j.ran_on else j.incarnation end
    where g.id = mine.gang_id) m
  order by m.rank;
end $$;
comment on function gangq.barrier is
  'Who is who in this epoch, one row per member in rank order, with its role and its rank within '
  'that. go is true once every member has been claimed: only then may a member''s code begin. '
  'Called again when heartbeat names a newer epoch, it is true once that one is whole. port: given '
  'by the new rank 0 of a gang that shrank, which was claimed without one: a port it holds bound. '
  'Raises GQ003 when the claim is not ours any more or was told to stop, GQ004 (the port serves '
  'another gang).';

create function gangq.refuse_stale(job_id bigint, token bigint) returns void
language plpgsql stable as $$
declare
  j gangq.live_jobs;
begin
  select x.* into j from gangq.live_jobs x where x.id = refuse_stale.job_id;
  if not found and not exists (
    select 1 from gangq.history h where h.job_id = refuse_stale.job_id) then
    perform gangq.refuse('GQ002',
      format('job %s does not exist', coalesce(refuse_stale.job_id::text, 'null')),
      'Job ids are in gangq.jobs.');
  end if;
  perform gangq.refuse('GQ003', format('token %s is not the present claim of job %s, which is %s',
      coalesce(refuse_stale.token::text, 'null'), refuse_stale.job_id, coalesce(j.state, 'over')),
    'The claim was lost (lease ended, cancelled, drained) or is over. Stop the work and report '
    'nothing.');
end $$;
comment on function gangq.refuse_stale is
  'Internal. Raises GQ003, or GQ002 for a job that never was.';
