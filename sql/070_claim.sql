-- A worker takes work: claim, and the barrier that lets a gang begin. A claim decides nothing. It takes what is
-- reserved here, fills the places that are open here, and takes light jobs by priority and age.
-- Locks: gangs that have members reserved here, by id; those members, by id; then this worker's row;
-- then places and pending jobs, with skip locked only. complete_and_claim takes all of them with skip
-- locked: it waits for no other session, so their order is its own.

create type gangq.claim_row as (
  job_id bigint,
  token bigint,
  state text,
  queue text,
  task text,
  payload jsonb,
  attempt integer,
  max_attempts integer,
  priority integer,
  budget_s real,
  gang_id bigint,
  epoch integer,
  rank integer,
  world_size integer,
  master_port integer,
  checkpoint_step bigint,
  devices jsonb,
  submitted_at timestamptz,
  model_needed text,
  light boolean
);
comment on type gangq.claim_row is
  'A claimed job, with all that its worker needs to know. light: it took a light slot.';

create function gangq.check_claim(max_jobs integer, model text, lane text) returns void
language plpgsql as $$
begin
  perform gangq.require_read_committed('claim');
  if max_jobs is null or max_jobs not between 1 and 1000 then
    perform gangq.refuse('GQ001', format('max_jobs is %s; it must be 1 to 1000', coalesce(max_jobs::text, 'null')),
      'Claim in batches.');
  end if;
  if model = '' or length(model) > 200 then
    perform gangq.refuse_larger('model', octet_length(model), 200);
    perform gangq.refuse('GQ001', format('model is %L; it must have 1 to 200 characters', model),
      'Name what this worker has loaded, or leave it out.');
  end if;
  if lane not in ('placed', 'light') then
    perform gangq.refuse('GQ001', format('lane is %L', left(lane, 40)), 'placed, light, or null for both.');
  end if;
end $$;
comment on function gangq.check_claim is 'Internal. Refuses what no claim can ask for. Raises GQ001, GQ007, GQ008.';

-- A gang that another transaction holds (an open cancel) must not keep this worker from its other
-- work: this waits as long as a sibling's claim may take, then leaves the gang to the next call.
create function gangq.lock_reserved(incarnation bigint, patient boolean) returns bigint[]
language plpgsql as $$
#variable_conflict use_column
declare
  gang_ids bigint[] := array(
    select distinct j.gang_id from gangq.live_jobs j
    where j.incarnation = lock_reserved.incarnation and j.token is null and j.state = 'reserved');
begin
  if not patient then
    gang_ids := array(
      select g.id from gangq.live_gangs g
      where g.id = any (gang_ids) order by g.id for update skip locked);
    return array(
      select j.id from gangq.live_jobs j
      where j.incarnation = lock_reserved.incarnation and j.state = 'reserved'
        and j.gang_id = any (gang_ids)
      order by j.id for update skip locked);
  end if;
  perform set_config('lock_timeout', '200ms', true);
  perform 1 from gangq.live_gangs g where g.id = any (gang_ids) order by g.id for update;
  gang_ids := array(
    select j.id from gangq.live_jobs j
    where j.incarnation = lock_reserved.incarnation and j.state = 'reserved'
      and j.gang_id = any (gang_ids)
    order by j.id for update);
  perform set_config('lock_timeout', '2s', true);
  return gang_ids;
exception when lock_not_available then
  perform set_config('lock_timeout', '2s', true);
  return '{}';
end $$;
comment on function gangq.lock_reserved is
  'Internal. Locks the gangs with members reserved on this worker, and returns those members, locked.';

create function gangq.start_members(
  me gangq.incarnations, members bigint[], request_id uuid, ports integer[], base bigint, t timestamptz
) returns bigint[] language plpgsql as $$
#variable_conflict use_column
declare
  started bigint[];
begin
  with running as (
    update gangq.live_jobs j set state = 'running', token = gangq.new_token(base), light = false,
      attempts = j.attempts + 1, claimed_at = t, ran_on = (me).id, deadline_at = null,
      request_id = start_members.request_id
    where j.id = any (members) and j.incarnation = (me).id and j.state = 'reserved'
    returning j.id, j.token
  ),
  held as (
    update gangq.device_holds h set token = r.token from running r where h.job_id = r.id
  )
  select coalesce(array_agg(r.id), '{}') into started from running r;
  if started <> '{}' then
    perform gangq.open_barriers(me, array(
      select distinct j.gang_id from gangq.live_jobs j where j.id = any (started)), started, ports, t);
  end if;
  return started;
end $$;
comment on function gangq.start_members is
  'Internal. Starts these locked members on their worker, opens barriers, and returns which started.';

create function gangq.lock_claimer(incarnation bigint, patient boolean) returns gangq.incarnations
language plpgsql as $$
#variable_conflict use_column
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
  'Internal. The worker that claims, its row locked; null: patient is false, and another session has it, or it '
  'has ended. Raises GQ002, GQ005, 42501.';

-- All that a claim has to know before it looks at the first job, in one query: each further query costs
-- as much as taking a job.
create function gangq.claim_facts(me gangq.incarnations, request_id uuid, t timestamptz)
returns table (
  leased boolean, cordoned boolean, asleep boolean, places boolean, shape_ids integer[], base bigint,
  light bigint, repeated boolean, held_from bigint
) language sql stable as $$
  select exists (select 1 from gangq.leases l where l.incarnation = (me).id and l.expires_at > t),
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
  'Internal. Of a worker that claims: whether its lease runs, it is cordoned, sleeps, or has an open place; the '
  'first shapes; how many light jobs it holds, whether any was claimed by this request, and the first token it holds.';

-- The work of claim, and of complete_and_claim once what is finished is finished. patient: waits for
-- locks and raises errors. Otherwise it skips locked rows and returns nothing, because the report of
-- finished jobs must not depend on it.
create function gangq.take(
  incarnation bigint, request_id uuid, max_jobs integer, ports integer[], sleep boolean, model text,
  lane text, patient boolean
) returns setof gangq.claim_row
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
  t timestamptz;
  me gangq.incarnations;
  room record;
  starts boolean;  -- what is reserved here
  takes boolean;  -- other work, too
  members bigint[] := '{}';
  taken bigint[] := '{}';
  claimed bigint := 0;
begin
  -- Asked here before the function that refuses is called: the call costs more than the question.
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted')
    or take.max_jobs is null or take.max_jobs not between 1 and 1000
    or take.model is not null or take.lane not in ('placed', 'light') then
    perform gangq.check_claim(take.max_jobs, take.model, take.lane);
  end if;
  if take.lane is distinct from 'light' and exists (
    select 1 from gangq.live_jobs j where j.incarnation = take.incarnation and j.token is null) then
    members := gangq.lock_reserved(take.incarnation, patient);
  end if;
  me := gangq.lock_claimer(take.incarnation, patient);
  if me.id is null then
    return;
  end if;
  t := gangq.now();
  select f.* into room from gangq.claim_facts(me, take.request_id, t) f;
  if not room.leased then
    if not patient then
      return;
    end if;
    perform gangq.refuse('GQ005', format('the lease of worker %L (incarnation %s) has ended', me.name, me.id),
      'Call gangq.heartbeat: if it is accepted, claim again; otherwise register again.');
  end if;
  -- A model is loaded where placed jobs run; light ones need none.
  if take.lane is distinct from 'light' and take.model is distinct from me.model then
    update gangq.incarnations i set model = take.model where i.id = me.id;
  end if;
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
  starts := me.state = 'live' and me.quarantined is null;
  takes := starts and not room.cordoned;
  if starts and members <> '{}' then
    taken := gangq.start_members(me, members, take.request_id, take.ports, room.base, t);
  end if;
  if room.places and not takes then
    -- Their room returns to the decision.
    perform gangq.close_places_of(me.id);
    perform gangq.wake_tick();
  elsif room.places and take.lane is distinct from 'light' then
    taken := taken || gangq.fill_places(
      me, take.request_id, take.max_jobs - cardinality(taken), room.base, t);
  end if;
  if taken <> '{}' then
    return query select c.* from gangq.claimed(taken) c;
    claimed := cardinality(taken);
  end if;
  if takes and take.lane is distinct from 'placed' and claimed < take.max_jobs
    and room.light < me.light * me.prefetch then
    return query
    select l.* from gangq.take_light(
      me, take.request_id, least(take.max_jobs - claimed, me.light * me.prefetch - room.light)::integer,
      room.shape_ids, room.base, t) l;
    get diagnostics claimed = row_count;
    claimed := claimed + cardinality(taken);
    if claimed = 0 and take.sleep then
      -- A worker that an open transaction is about to wake is told when that commits: no wait here.
      insert into gangq.sleepers as z (incarnation, queues, since)
      select me.id, me.queues, t
      where not exists (select 1 from gangq.sleepers y where y.incarnation = me.id)
      on conflict (incarnation) do nothing;
    elsif claimed > 0 and room.asleep then
      perform gangq.forget_sleeper(me.id);
    end if;
  end if;
  -- While a snapshot elsewhere is held, the index keeps an entry for each job that this worker has
  -- finished. Claims read it from the first that it held on, or from the next token where it held none;
  -- 2^24 is 256 tokens.
  if me.worked_at is null and claimed > 0 or room.held_from > me.held_from + 16777216 then
    update gangq.incarnations i set worked_at = coalesce(i.worked_at, t), held_from = room.held_from
    where i.id = me.id;
  end if;
end $$;
comment on function gangq.take is
  'Internal. Claims for a worker: see claim. patient false: without waiting for any other session, after '
  'a completion in the same transaction.';

create function gangq.claim(
  incarnation bigint, request_id uuid default null, max_jobs integer default 1, ports integer[] default '{}',
  sleep boolean default false, model text default null, lane text default null
) returns setof gangq.claim_row
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return query
  select c.* from gangq.take(claim.incarnation, claim.request_id, claim.max_jobs, claim.ports, claim.sleep,
    claim.model, claim.lane, true) c;
end $$;
comment on function gangq.claim is
  'A worker takes work, up to max_jobs and up to its slots: members of gangs that are reserved here, jobs for the '
  'places that are open here, then light jobs, by priority and first in first out within one. lane: only placed, '
  'only light; null: both. Repeating request_id after a lost reply returns the same claims. model: what this '
  'worker has loaded; decisions prefer it for jobs that need it. ports: ports this worker holds bound, for the '
  'rendezvous of gangs whose rank 0 it gets. sleep: when there is no light job, note that this worker sleeps; '
  'commit, claim once more, then wait for NOTIFY. Raises GQ001, GQ002, GQ004 (a port serves another gang of this '
  'host), GQ005, GQ007, GQ008, 42501 (another login registered it).';

-- Light jobs ------------------------------------------------------------------------------------------
--
-- A claim reads the pending jobs of a shape from the front of their index. Each claimed job leaves a
-- dead entry there, and while a snapshot elsewhere is held nothing can remove it: the next claim would
-- step over all of them. So gangq.lows keeps, for a shape and a priority, a key below which no job is
-- pending that has kept its first place. Jobs that return (retry, release, a new priority) have an
-- index of their own, because they may stand below it.
--
-- Who may raise low, in three steps:
-- 1. Whoever finds the first pending job 256 positions above low writes its key to marked (or the
--    last position given out, where nothing is pending). A submission draws its transaction id, then
--    its position; the row of gangq.lows was written with a transaction id drawn last of all. So a
--    submission that is still open and has a position below marked has an older id than that row.
-- 2. When every transaction older than that row has ended, each job below marked is visible or claimed.
-- 3. Whoever comes then raises low to marked, or to the first job that it sees if that is lower, and
--    marks anew.
-- Invariant: every pending job that has not returned has a key >= low. It holds because a claim that is
-- not committed leaves its job visible as pending to this transaction, and so keeps low below it.
-- A transaction that stays open, and writes, stops step 2: claims get slower, and stay right.

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
  'Internal. The key of the first pending job of a shape from a key on, found without stepping over what '
  'has been claimed below gangq.lows; null: none.';

-- The block that may fail has a transaction id of its own, drawn when it locks: a new one.
create function gangq.raise_low(shape_id integer, first bigint, horizon xid8) returns void
language plpgsql as $$
#variable_conflict use_column
begin
  perform from gangq.lock_rows x where x.name = 'lows' for update nowait;
  insert into gangq.lows as l (shape_id, start, low, marked)
  values (raise_low.shape_id, gangq.low_start(raise_low.first), gangq.low_start(raise_low.first),
    raise_low.first)
  on conflict (shape_id, start) do update set low = least(l.marked, excluded.marked), marked = excluded.marked
  where age(raise_low.horizon::xid) <= age(l.xmin);
exception when lock_not_available then
  return;  -- Somebody else does it.
end $$;
comment on function gangq.raise_low is
  'Internal. first: the first pending job of this shape and priority, or the last place given out in it. '
  'See above: raises low to what was marked once that is safe, and marks first. horizon: every older '
  'transaction had ended before first was looked up.';

-- Where a line has run dry, no claim takes a first job and raises low. Both are read before the jobs are.
create function gangq.raise_idle_lows() returns integer language plpgsql as $$
declare
  horizon constant xid8 := pg_snapshot_xmin(pg_current_snapshot());
  last_pos constant bigint := (
    select b.base + p.last_value from gangq.id_base() b cross join gangq.positions p);
  dry record;
  raised integer := 0;
begin
  for dry in
    select l.shape_id, l.start + last_pos as behind
    from gangq.lows l
    where l.start + last_pos - l.low >= 256 and not exists (
      select from gangq.live_jobs j
      where j.shape_id = l.shape_id and j.state = 'pending'
        and j.order_key >= l.low and j.order_key <= l.start + last_pos)
  loop
    perform gangq.raise_low(dry.shape_id, dry.behind, horizon);
    raised := raised + 1;
  end loop;
  return raised;
end $$;
comment on function gangq.raise_idle_lows is
  'Internal. Raises low where nothing is pending. Returns how often it tried.';

-- Shapes are kept for ever. Where there are many, those with a pending job are found by hopping along
-- the index, over those that gangq.lows knows: their dead entries are not stepped over.
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
      from (select k.id as until, lag(k.id, 1, -2147483648) over (order by k.id) as after from known k) g
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
  'Internal. The shapes with a pending job, and those of gangq.lows, which are not looked up.';

-- Light jobs of a queue that is paused wait; those of a queue with a limit or a fair order are placed.
create function gangq.light_heads(me gangq.incarnations, shape_ids integer[], from_key bigint)
returns table (shape gangq.shapes, key bigint) language sql stable as $$
  select z, f.key
  from unnest(shape_ids) as x(id)
  join gangq.shapes z on z.id = x.id
  cross join lateral gangq.first_pending(z.id, from_key) f
  where gangq.serves(me, z) and f.key is not null and not gangq.is_placed(z, array(
      select q.name || '.' from gangq.queues_table q where q.paused or q.limited or q.policy = 'fair'))
$$;
comment on function gangq.light_heads is
  'Internal. Of each of these shapes the first light job from a key on that this worker may run now.';

create function gangq.take_light(
  me gangq.incarnations, request_id uuid, most integer, shape_ids integer[], base bigint, t timestamptz
) returns setof gangq.claim_row language plpgsql as $$
#variable_conflict use_column
declare
  want integer := most;
  horizon constant xid8 := pg_snapshot_xmin(pg_current_snapshot());
  head record;
  s gangq.shapes;
  from_key bigint := 0;
  looked_from bigint;
  places tid[];
begin
  if cardinality(shape_ids) > 32 then
    shape_ids := gangq.shapes_waiting();
  end if;
  -- The shape whose first job is next, up to where the next shape's begins: then all that comes before
  -- that has been looked at, and the next head is looked for from there on.
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
    -- Of jobs that have returned below low only those up to low: what was claimed there is not stepped over.
    from_key := least(head.next, case when head.low > head.key then head.low end);
    select array_agg(p.ctid) into places
    from (
      select j.ctid from gangq.live_jobs j
      where j.shape_id = s.id and j.state = 'pending'
        and (head.low is null or head.low <= head.key or j.returned)
        and j.order_key >= head.key and j.order_key < coalesce(from_key, 9223372036854775807)
      order by j.order_key limit want for update skip locked) p;
    if places is not null then
      want := want - cardinality(places);
      -- In the order of the places, because each is looked up by itself; a test holds the plan to that.
      return query
      update gangq.live_jobs j set state = 'running', incarnation = me.id, token = gangq.new_token(base),
        light = true, attempts = j.attempts + 1, claimed_at = t, due_at = null,
        request_id = take_light.request_id
      from unnest(places) as w(place) where j.ctid = w.place
      returning j.id, j.token, j.state, s.queue, s.task, j.payload, j.attempts::integer,
        j.max_attempts::integer, j.priority::integer, j.budget_s, null::bigint, null::integer,
        null::integer, null::integer, null::integer,
        -- Only a job that ran before has saved anything.
        case when j.final_token is not null then (
          select max(c.step) from gangq.checkpoints c where c.job_id = j.id) end,
        '[]'::jsonb, j.submitted_at, s.model, true;
    end if;
    -- Only if this look began at or below low: one that began later may have stepped over a job that
    -- an uncommitted claim holds and gives back.
    if looked_from <= coalesce(head.low, gangq.low_start(head.key))
      and head.key - coalesce(head.low, gangq.low_start(head.key)) >= 256 then
      perform gangq.raise_low(s.id, head.key, horizon);
    end if;
  end loop;
end $$;
comment on function gangq.take_light is
  'Internal. Up to so many light jobs that this worker serves start on it: by priority, first in first out '
  'within one, whatever their shape.';

-- Members ---------------------------------------------------------------------------------------------

create function gangq.claimed(ids bigint[]) returns setof gangq.claim_row language sql stable as $$
  select j.id, j.token, j.state, s.queue, s.task, j.payload, j.attempts::integer, j.max_attempts::integer, j.priority::integer,
    j.budget_s, j.gang_id, g.epoch, coalesce(j.epoch_rank, j.rank), g.world_size,
    case when coalesce(j.epoch_rank, j.rank) = 0 then g.master_port end,
    case when j.gang_id is not null then g.restore_step
      else (select max(c.step) from gangq.checkpoints c where c.job_id = j.id) end,
    case when s.gpus = 0 then '[]' else (
      select jsonb_agg(jsonb_build_object('uuid', r.uuid, 'index', r.index, 'vram_mb', r.vram_mb, 'source', r.source) order by r.index, r.uuid)
      from gangq.device_holds h join gangq.device_registry r on r.id = h.device_id where h.job_id = j.id) end,
    j.submitted_at, s.model, j.light
  from unnest(claimed.ids) with ordinality as w(id, n)
  join gangq.live_jobs j on j.id = w.id
  join gangq.shapes s on s.id = j.shape_id
  left join gangq.live_gangs g on g.id = j.gang_id
  order by j.gang_id is null, j.order_key, j.rank
$$;
comment on function gangq.claimed is 'Internal. What a worker needs to know about the jobs it has just claimed.';

-- Called under the gangs' locks, in the transaction of the claim. The last claim opens the barrier.
create function gangq.open_barriers(me gangq.incarnations, gang_ids bigint[], taken bigint[], ports integer[], t timestamptz)
returns void language plpgsql as $$
declare
  m record;
  g record;
  nth integer := 0;
begin
  for m in
    select j.id, j.gang_id, coalesce(j.epoch_rank, j.rank) as rank, j.token, x.epoch
    from gangq.live_jobs j join gangq.live_gangs x on x.id = j.gang_id
    where j.id = any (taken) order by j.id
  loop
    perform gangq.log_event(t, 'claim', m.gang_id, m.epoch, m.id, m.token, me.id, data => jsonb_build_object('rank', m.rank));
    if m.rank = 0 then
      nth := nth + 1;
      begin
        update gangq.live_gangs x set master_host = me.host, master_addr = me.address, master_port = ports[nth] where x.id = m.gang_id;
      exception when unique_violation then
        perform gangq.refuse('GQ004', format('port %s of host %s serves another gang''s rendezvous', ports[nth], me.host),
          'Two workers under one host name hold the same port, in containers perhaps. Bind another and claim again.');
      end;
    end if;
  end loop;
  for g in
    select x.id, x.epoch, x.state,
      (select min(j.deadline_at) from gangq.live_jobs j where j.gang_id = x.id and j.state = 'reserved') as deadline_at,
      exists (select 1 from gangq.live_jobs j where j.gang_id = x.id and j.state = 'blocked' and gangq.in_epoch(j, x)) as missing
    from gangq.live_gangs x
    where x.id = any (gang_ids) and (x.state = 'reserved' or x.missing_since is not null)
    order by x.id
  loop
    if g.deadline_at is null and not g.missing then
      update gangq.live_gangs x set state = 'running', go_at = coalesce(x.go_at, t), deadline_at = null, missing_since = null where x.id = g.id;
      perform gangq.log_event(t, 'go', g.id, g.epoch);
      perform gangq.wake(array(select j.incarnation from gangq.live_jobs j where j.gang_id = g.id and j.state = 'running'), 'go');
    elsif g.state = 'running' then
      update gangq.live_gangs x set deadline_at = g.deadline_at where x.id = g.id;
    end if;
  end loop;
end $$;
comment on function gangq.open_barriers is
  'Internal. Records claimed members, takes rank 0''s port, and lets a gang go when its last member has been claimed: at '
  'first, and again when a running gang has got back all it missed.';

create function gangq.barrier(job_id bigint, token bigint, port integer default null) returns table (
  go boolean, epoch integer, rank integer, job_id_of_rank bigint, worker text, host text, local_rank integer,
  node_rank integer, local_world_size integer, master_addr text, master_port integer, role text, role_rank integer
) language plpgsql volatile as $$
#variable_conflict use_column
declare
  mine gangq.live_jobs;
begin
  select j.* into mine from gangq.live_jobs j where j.id = barrier.job_id;
  if not found or mine.token is distinct from barrier.token or mine.state <> 'running' or mine.gang_id is null then
    perform gangq.refuse_stale(barrier.job_id, barrier.token);
  end if;
  perform gangq.check_login(mine.incarnation);
  if barrier.port is not null then
    -- Which of the others is rank 0 may change until this lock is held.
    perform 1 from gangq.live_gangs g where g.id = mine.gang_id for update;
    begin
      update gangq.live_gangs g set master_host = i.host, master_addr = i.address, master_port = barrier.port
      from gangq.live_jobs j join gangq.incarnations i on i.id = j.incarnation
      where g.id = mine.gang_id and g.state = 'running' and g.master_host is null
        and j.id = mine.id and j.token = barrier.token and j.state = 'running' and coalesce(j.epoch_rank, j.rank) = 0;
    exception when unique_violation then
      perform gangq.refuse('GQ004', format('port %s of this host serves another gang''s rendezvous', barrier.port), 'Bind another and ask again.');
    end;
    if found then
      perform gangq.wake(array(select j.incarnation from gangq.live_jobs j where j.gang_id = mine.gang_id and j.state = 'running'), 'go');
    end if;
  end if;
  return query
  select g.go_at is not null and g.missing_since is null and g.master_host is not null, g.epoch, n.rank, j.id, i.name, i.host,
    (row_number() over (partition by i.host order by n.rank) - 1)::integer,
    (dense_rank() over (order by f.first_rank) - 1)::integer,
    (count(*) over (partition by i.host))::integer, g.master_addr, g.master_port, r.name,
    (row_number() over (partition by r.ordinal order by n.rank) - 1)::integer
  from gangq.live_gangs g
  join gangq.live_jobs j on j.gang_id = g.id and gangq.in_epoch(j, g)
  cross join lateral (select coalesce(j.epoch_rank, j.rank) as rank) n
  join gangq.kind_roles r on r.kind_id = g.kind_id and r.ordinal = coalesce(j.role, 1)
  -- Who is done already still has its place, for those who ask later.
  left join gangq.incarnations i on i.id = case j.state when 'done' then j.ran_on else j.incarnation end
  left join lateral (
    select min(coalesce(z.epoch_rank, z.rank)) as first_rank
    from gangq.live_jobs z join gangq.incarnations k on k.id = case z.state when 'done' then z.ran_on else z.incarnation end
    where z.gang_id = g.id and k.host = i.host and gangq.in_epoch(z, g)) f on true
  where g.id = mine.gang_id
  order by n.rank;
end $$;
comment on function gangq.barrier is
  'Who is who in this epoch, one row per member in rank order, with its role and its rank within that. go is true once every '
  'member has been claimed: only then may a member''s code begin. Called again when heartbeat names a newer epoch, it is '
  'true once that one is whole. port: given by the new rank 0 of a gang that shrank, which was claimed without one: a port it '
  'holds bound. Raises GQ003 when the claim is not ours any more or was told to stop, GQ004 (the port serves another gang).';

create function gangq.refuse_stale(job_id bigint, token bigint) returns void language plpgsql stable as $$
declare
  j gangq.live_jobs;
begin
  select x.* into j from gangq.live_jobs x where x.id = refuse_stale.job_id;
  if not found and not exists (select 1 from gangq.history h where h.job_id = refuse_stale.job_id) then
    perform gangq.refuse('GQ002', format('job %s does not exist', coalesce(refuse_stale.job_id::text, 'null')), 'Job ids are in gangq.jobs.');
  end if;
  perform gangq.refuse('GQ003', format('token %s is not the present claim of job %s, which is %s',
      coalesce(refuse_stale.token::text, 'null'), refuse_stale.job_id, coalesce(j.state, 'over')),
    'The claim was lost (lease ended, cancelled, drained) or is over. Stop the work and report nothing.');
end $$;
comment on function gangq.refuse_stale is 'Internal. Raises GQ003, or GQ002 for a job that never was.';
