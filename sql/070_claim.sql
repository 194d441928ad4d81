-- A worker takes work: claim, and the barrier that lets a gang begin.
-- Locks: gangs that have members reserved here, by id; those members, by id; then this worker's row; then queues that
-- have limits, by name; pending jobs with skip locked only. complete_and_claim takes all of them with skip locked: it waits for
-- nobody, so their order is its own.

-- Where claims begin. A pending job that is claimed leaves a dead entry in the index that claims read, at its head, and
-- while a transaction elsewhere may see it nothing can clean it away: the next claim would walk over all of them. So
-- each session remembers, in a setting of its own, which stretches of the order it has seen the end of, per shape and
-- priority. It is knowledge, not a promise to one worker: whoever else uses the session may build on it, a rolled back
-- claim takes it back, and a session without it begins at the head. Who puts nonsense there misleads himself.
-- Sessions keep the setting across an upgrade: who changes what its numbers mean gives it another name.
-- The setting is a bigint[]: the incarnation asked for last, the lowest token it may hold, the transaction that wrote it (a
-- prepared one leaves the setting behind and may yet be rolled back: only what is committed is known) and when it was
-- begun (ms); then for each shape and priority seven numbers: shape, key >> 50, and
--   settled  below this key there is no job, and none can appear but a returned one, which has an index of its own (what
--            is put at the front always is one)
--   marked   below this key there was none to be had when it was last claimed up to; but a submission then uncommitted
--            could appear, and a claim then uncommitted be rolled back
--   since    what settles it: 0 nothing to settle; below 0 the transaction that marked it, negated; else a transaction
--            that began later: once it and all before it are over, and it was looked again, marked is settled
--   passed   this session has claimed up to here
--   looked   when it was last looked at from where it is settled (ms)
create function gangq.seen() returns bigint[] language sql stable as $$
  select coalesce(nullif(current_setting('gangq.seen', true), ''), '{0,0,0,0}')::bigint[]
$$;
comment on function gangq.seen is 'Internal. What this session knows of the order of pending jobs: see the file.';

-- The work of claim, and of complete_and_claim once what is finished is finished. patient: waits for the worker's row and
-- refuses what it must; else it waits for nobody and takes nothing where it would have to wait or refuse, because
-- the caller's word about finished jobs must not depend on it. amid: plain jobs that were claimed before are still running
-- here; whose turn it is, is then judged as if they were done: where it is that of a job which needs their slot for itself,
-- nothing more is taken, or plain jobs would keep that one out for as long as there are any.
create function gangq.take(
  incarnation bigint, request_id uuid, max_jobs integer, ports integer[], sleep boolean, model text, patient boolean, amid boolean default false
) returns table (
  job_id bigint, token bigint, state text, queue text, task text, payload jsonb, attempt integer, max_attempts integer,
  priority integer, budget_s real, gang_id bigint, epoch integer, rank integer, world_size integer, master_port integer,
  checkpoint_step bigint, devices jsonb, submitted_at timestamptz, model_needed text
) language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
#variable_conflict use_column
declare
  t timestamptz;
  mine record;
  me gangq.incarnations;
  gang_ids bigint[] := '{}';
  members bigint[];
  taken bigint[] := '{}';  -- what has been taken and not yet returned
  room record;
  want integer := take.max_jobs;
  apart integer := 0;  -- amid: the slots that plain jobs have here, those taken by this call too
  open boolean;  -- takes new work; what is reserved here is claimed in any case
  marks gangq.earmarks[];  -- what this worker must leave free for gangs that wait
  paused text[];
  limited text[];
  fair text[];
  counted text[];  -- queues whose usage decides something here, and that usage
  used jsonb;
  limits jsonb;
  total jsonb;
  mosts integer[];  -- per shape, where anything is watched: how many may be taken, and up to which key
  stops bigint[];
  full_submitters text[];
  turn record;
  contenders bigint;
  heads record;
  warm record;
  upto bigint;
  shape_ids integer[];
  keys bigint[];
  s gangq.shapes;
  bound bigint;
  n integer;
  seen bigint[] := gangq.seen();
  at_ms bigint := extract(epoch from clock_timestamp()) * 1000;
  my_xid bigint;
  oldest_xid bigint;
  known integer[] := '{}';  -- the shapes this session knows stretches of
  stretch_shapes integer[] := '{}';  -- and, for these, where pending jobs may be
  stretch_from bigint[] := '{}';
  stretch_to bigint[] := '{}';
  looked integer[];  -- the shapes whose first job was looked for, and where it was
  firsts bigint[];
  picked bigint[];
  places tid[];  -- of the same rows: this transaction has locked them, so nobody moves them until its next statement updates them
  last_key bigint;
  zone bigint;  -- the head lies before a stretch that was seen the end of: it is a returned job, and ends before this key
  moved_shapes integer[] := '{}';
  moved_keys bigint[] := '{}';
  e integer;
  begins bigint;
  ahead boolean := false;
  settles boolean;  -- there is something to note
  candidates integer[];
  marker text;
begin
  -- Asked here before the functions that refuse are called: a call costs more than everything it would look at.
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    perform gangq.require_read_committed('claim');
  end if;
  if length(take.model) > 200 then
    perform gangq.refuse_larger('model', octet_length(take.model), 200);
  end if;
  if take.max_jobs is null or take.max_jobs not between 1 and 1000 then
    perform gangq.refuse('GQ001', format('max_jobs is %s; it must be 1 to 1000', coalesce(take.max_jobs::text, 'null')), 'Claim in batches.');
  end if;
  if patient then
    if exists (select 1 from gangq.live_jobs j where j.incarnation = take.incarnation and j.token is null) then
      gang_ids := array(select distinct j.gang_id from gangq.live_jobs j where j.incarnation = take.incarnation and j.token is null
        and j.state = 'reserved');
      -- A gang that somebody holds (an open cancel) must not keep this worker from its other work: wait as long as a
      -- sibling's claim may take, then leave the gang for the next call.
      begin
        perform set_config('lock_timeout', '200ms', true);
        perform 1 from gangq.live_gangs g where g.id = any (gang_ids) order by g.id for update;
        members := array(
          select j.id from gangq.live_jobs j where j.incarnation = take.incarnation and j.state = 'reserved' order by j.id for update);
      exception when lock_not_available then
        gang_ids := '{}';
      end;
      perform set_config('lock_timeout', '2s', true);
    end if;
    select i as row into mine from gangq.incarnations i where i.id = take.incarnation for no key update;
  else
    select i as row into mine from gangq.incarnations i where i.id = take.incarnation for no key update skip locked;
  end if;
  me := mine.row;  -- Whole, because to read its columns one by one costs as much again.
  if me.id is null or me.ended_at is not null then
    if not patient then
      return;
    end if;
    perform gangq.refuse_ended(take.incarnation);
  end if;
  if me.login <> session_user then
    perform gangq.check_login(me.id);
  end if;
  t := gangq.now();
  my_xid := pg_current_xact_id()::text::bigint;
  if seen[3] not in (0, my_xid) and pg_xact_status(seen[3]::text::xid8) is distinct from 'committed' then
    seen := '{0,0,0,0}';
  end if;
  if seen[1] <> me.id then
    seen[1] := me.id;
    seen[2] := 0;
  end if;
  -- All that has to be known before the first job is looked at, in one query: each one more costs as much as taking a job.
  -- What few workers have (devices, members, jobs with a slot of their own) is only asked for here, and counted below.
  select exists (select 1 from gangq.leases l where l.incarnation = me.id and l.expires_at > t) as leased,
    exists (select 1 from gangq.cordons c where (c.kind, c.name) in (('host', me.host), ('worker', me.name))) as cordoned,
    exists (select 1 from gangq.earmarks e where e.incarnation = me.id) as earmarked,
    exists (select 1 from gangq.sleepers z where z.incarnation = me.id) as asleep,
    exists (select 1 from gangq.queues_table q where q.paused or q.limited or q.policy = 'fair') as watched,
    exists (select 1 from gangq.device_registry r where r.offered_by = me.id) as equipped,
    exists (select 1 from gangq.live_jobs j where j.incarnation = me.id and j.token is null) as reserved,
    array(select z.id from gangq.shapes z order by z.id limit 33) as some_shapes,
    (select p.last_value from gangq.positions p) as last_pos, (select b.base from gangq.id_base() b) as base,
    h.held, h.plain, h.repeated,
    me.slots as slots, 0 as plain_room, me.memory_mb as memory_mb, me.cpus as cpus, '{}'::bigint[] as device_ids, '{}'::integer[] as vrams
  into room
  from (
    select count(*) as held, count(*) filter (where s.plain and j.gang_id is null) as plain,
      bool_or(j.request_id = take.request_id) as repeated
    from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id where j.incarnation = me.id and j.token >= seen[2]) h;
  if not room.leased then
    if not patient then
      return;
    end if;
    perform gangq.refuse('GQ005', format('the lease of worker %L (incarnation %s) has ended', me.name, me.id),
      'Call gangq.heartbeat: if it is accepted, claim again; else register again.');
  end if;
  if take.model is distinct from me.model then
    if take.model = '' or length(take.model) > 200 then
      perform gangq.refuse('GQ001', format('model is %L; it must have 1 to 200 characters', left(take.model, 220)),
        'Name what this worker has loaded, or leave it out.');
    end if;
    update gangq.incarnations i set model = take.model where i.id = me.id;
  end if;
  if room.repeated then
    return query
    select c.* from gangq.claimed(array(
      select j.id from gangq.live_jobs j
      where j.incarnation = me.id and j.token >= seen[2] and j.request_id = take.request_id and j.state in ('running', 'preempting'))) c;
    if found then
      return;
    end if;
  end if;

  if room.reserved and not patient then
    gang_ids := array(
      select g.id from gangq.live_gangs g
      where g.id = any (array(select j.gang_id from gangq.live_jobs j where j.incarnation = me.id and j.token is null and j.state = 'reserved'))
      order by g.id for update skip locked);
    members := array(
      select j.id from gangq.live_jobs j
      where j.incarnation = me.id and j.state = 'reserved' and j.gang_id = any (gang_ids) order by j.id for update skip locked);
  end if;
  if gang_ids <> '{}' and me.state = 'live' and me.quarantined is null then
    with started as (
      update gangq.live_jobs j set state = 'running', token = gangq.new_token(room.base), attempts = j.attempts + 1, claimed_at = t,
        ran_on = me.id, deadline_at = null, request_id = take.request_id
      where j.id = any (array(
        select z.id from gangq.live_jobs z
        where z.id = any (members) and z.incarnation = me.id and z.state = 'reserved' and z.gang_id = any (gang_ids)))
      returning j.id, j.token
    ),
    held as (
      update gangq.device_holds h set token = s.token from started s where h.job_id = s.id
    )
    select coalesce(array_agg(s.id), '{}') into taken from started s;
    if taken <> '{}' then
      perform gangq.open_barriers(me, gang_ids, taken, take.ports, t);
    end if;
    want := want - cardinality(taken);
  end if;

  open := me.state = 'live' and me.quarantined is null and not room.cordoned;
  if want > 0 and open then
    oldest_xid := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    if at_ms not between seen[4] and seen[4] + 60000 or cardinality(seen) > 4 + 7 * 16 then
      seen := seen[1:2] || array[my_xid, at_ms];
    end if;
    seen[3] := my_xid;
    settles := cardinality(seen) = 4;
    if cardinality(seen) = 11 and seen[9] = 0 then
      -- The most common case, for a tenth of the price: one shape, one priority, nothing to settle.
      known := array[seen[5]];
      stretch_shapes := array[seen[5], seen[5]];
      stretch_from := array[0, seen[7]];
      stretch_to := array[seen[6] << 50, 9223372036854775807];
    else
      for e in 5 .. cardinality(seen) - 6 by 7 loop
        settles := settles or seen[e + 4] <> 0;
        if seen[e] <> all (known) then
          known := known || seen[e]::integer;
          stretch_shapes := stretch_shapes || seen[e]::integer;
          stretch_from := stretch_from || 0::bigint;
          stretch_to := stretch_to || (seen[e + 1] << 50);
        end if;
        -- While a transaction that writes stays open nothing settles: then the last priority is claimed from where this
        -- session came to, and all that has not settled is looked at every 100 ms.
        begins := seen[e + 2];
        if seen[e + 4] > 0 and oldest_xid <= seen[e + 4] and seen[e + 5] - begins > 5000
          and at_ms between seen[e + 6] and seen[e + 6] + 99 and (e + 7 > cardinality(seen) or seen[e + 7] <> seen[e]) then
          begins := seen[e + 5];
          ahead := true;
        else
          seen[e + 6] := -at_ms;  -- if this worker may take of that shape now: settle_seen says
        end if;
        stretch_shapes := stretch_shapes || seen[e]::integer;
        stretch_from := stretch_from || begins;
        stretch_to := stretch_to || case when e + 7 < cardinality(seen) and seen[e + 7] = seen[e] then seen[e + 8] << 50 else 9223372036854775807 end;
      end loop;
    end if;
    if room.earmarked then
      marks := gangq.marks_now(me.id, t);
    end if;
    if room.reserved or room.equipped or room.held > room.plain then
      select f.slots, f.plain_room, f.memory_mb, f.cpus, f.device_ids, f.vrams
      into room.slots, room.plain_room, room.memory_mb, room.cpus, room.device_ids, room.vrams
      from gangq.free_capacity(array[me.id], seen[2]) f;
    else
      room.slots := me.slots - ceil(room.plain::numeric / me.prefetch);
      room.plain_room := me.slots * me.prefetch - room.plain;
    end if;
    if take.amid then
      apart := ceil(room.plain::numeric / me.prefetch);
    end if;
    if room.watched then
      select array_agg(x.name) filter (where x.paused), array_agg(x.name) filter (where x.limited),
        array_agg(x.name) filter (where x.policy = 'fair') into paused, limited, fair
      from gangq.queues_table x where x.paused or x.limited or x.policy = 'fair';
    end if;
    -- The head of every shape that fits: of shapes that do not fit no job is looked at, however many they have. Shapes
    -- are kept for ever, so those with a pending job are found by hopping along the index, not by reading them all.
    -- Of the shapes this session knows stretches of, the jobs before these are not hopped over one by one; and where there
    -- are only a few shapes in all, nothing is hopped over.
    candidates := room.some_shapes;
    if cardinality(candidates) > 32 then  -- and there may be thousands
      candidates := gangq.shapes_waiting(known);
    end if;
    select array_agg(h.id), array_agg(least(h.first, h.returned)), array_agg(h.first) into shape_ids, keys, firsts
    from (
      select z.id,
        case when z.id = any (known) then (
            select min(f.key) from unnest(stretch_shapes, stretch_from, stretch_to) as g(id, low, high)
            cross join lateral (
              select j.order_key as key from gangq.live_jobs j
              where j.shape_id = z.id and j.state = 'pending' and j.order_key >= g.low and j.order_key < g.high order by j.order_key limit 1) f
            where g.id = z.id)
          else (
            select j.order_key from gangq.live_jobs j where j.shape_id = z.id and j.state = 'pending' order by j.order_key limit 1) end as first,
        case when z.id = any (known) then (
            select j.order_key from gangq.live_jobs j
            where j.shape_id = z.id and j.state = 'pending' and j.returned order by j.order_key limit 1) end as returned
      from gangq.shapes z
      where z.id = any (candidates) and gangq.serves(me, z) and (paused is null or not gangq.below(z.queue, paused))
        and case when z.plain then room.plain_room > 0
          else gangq.members_that_fit(z, room.slots + apart, room.memory_mb, room.cpus, room.vrams, room.device_ids) > 0 end
      offset 0  -- or the head would be looked up once for the condition and once for the result
    ) h;
    looked := shape_ids;
    if settles then
      seen := gangq.settle_seen(seen, looked, firsts, stretch_shapes, stretch_from, my_xid, oldest_xid);
    end if;
    if shape_ids is not null and (limited is not null or fair is not null) then
      counted := array(
        select distinct p.name from gangq.shapes z cross join lateral unnest(gangq.queue_path(z.queue)) as p(name) where z.id = any (shape_ids));
      limited := nullif(array(select l.name from unnest(limited) as l(name) where l.name = any (counted)), '{}');
      fair := nullif(array(select f.name from unnest(fair) as f(name) where f.name = any (counted)), '{}');
      if limited is not null then
        -- Wait as long as somebody else's claim may take; then leave these queues for the next call, not the others.
        begin
          perform set_config('lock_timeout', case when patient then '200ms' else '1ms' end, true);
          perform gangq.lock_limited(limited);
        exception when lock_not_available then
          select array_agg(e.id), array_agg(e.key) into shape_ids, keys
          from unnest(shape_ids, keys) as e(id, key) join gangq.shapes z on z.id = e.id where not gangq.below(z.queue, limited);
          limited := null;
        end;
        perform set_config('lock_timeout', '2s', true);
      end if;
      if limited is not null or fair is not null then
        counted := array(select c.name from unnest(counted) as c(name) where c.name = any (limited) or gangq.below(c.name, fair));
        used := coalesce((select jsonb_agg(to_jsonb(u)) from gangq.queue_usage(counted) u), '[]');
        limits := (select jsonb_agg(to_jsonb(l)) from gangq.limits_of(limited) l);
      end if;
      if fair is not null then
        select jsonb_build_object('jobs', sum(i.slots), 'memory_mb', sum(i.memory_mb), 'cpus', sum(i.cpus),
          'gpus', (select count(*) from gangq.device_registry r where r.offered_by is not null))
        into total from gangq.incarnations i where i.ended_at is null;
      end if;
    end if;
    -- Merge the heads: take from the first shape up to where the next one begins.
    while want > 0 and shape_ids is not null loop
      if marks is not null or limits is not null then
        select array_agg(o.key order by e.n), array_agg(o.most order by e.n), array_agg(o.stop order by e.n) into keys, mosts, stops
        from unnest(shape_ids, keys) with ordinality as e(id, key, n) join gangq.shapes z on z.id = e.id
        cross join lateral gangq.open_head(z, e.key, limits, used, marks, me.prefetch, room.plain_room,
          case when z.plain then room.slots else room.slots + apart end, room.memory_mb, room.cpus, room.vrams, room.device_ids, t) o;
      end if;
      if cardinality(shape_ids) = 1 and want = take.max_jobs and marks is null and limits is null then
        -- It has just been seen to fit.
        select z as shape, 1::bigint as n, z.id, keys[1] as key, null::bigint as next_key into heads from gangq.shapes z where z.id = shape_ids[1] and keys[1] is not null;
      else
        select z as shape, e.n, z.id, e.key, lead(e.key) over (order by e.key) as next_key into heads
        from unnest(shape_ids, keys) with ordinality as e(id, key, n) join gangq.shapes z on z.id = e.id
        where e.key is not null
          and case when z.plain then room.plain_room > 0
            else gangq.members_that_fit(z, room.slots + apart, room.memory_mb, room.cpus, room.vrams, room.device_ids) > 0 end
        order by e.key limit 1;
      end if;
      exit when not found;
      s := heads.shape;
      bound := coalesce(heads.next_key, 9223372036854775807);
      contenders := 1;
      -- A fair queue's turn comes with its oldest job; whose job that is, of those of its priority, the shares say.
      -- Nobody goes past what was put at the front.
      if fair is not null and gangq.below(s.queue, fair) and heads.key & 1125899906842623 >= 562949953421312 then
        select h.n, h.id, h.key, count(*) over () as contenders into turn
        from (
          select e.n, e.id, e.key, z.queue, (
            select j.submitter from gangq.live_jobs j where j.shape_id = e.id and j.state = 'pending' and j.order_key = e.key limit 1) as submitter
          from unnest(shape_ids, keys) with ordinality as e(id, key, n) join gangq.shapes z on z.id = e.id
          where e.key >> 50 = heads.key >> 50 and gangq.below(z.queue, array[gangq.fair_root(s.queue, fair)])
            and case when z.plain then room.plain_room > 0
              else gangq.members_that_fit(z, room.slots + apart, room.memory_mb, room.cpus, room.vrams, room.device_ids) > 0 end) h
        order by gangq.fair_shares(h.queue, h.submitter, fair, used, total), h.key limit 1;
        contenders := turn.contenders;
        if contenders > 1 then
          heads.n := turn.n;
          heads.id := turn.id;
          heads.key := turn.key;
          bound := heads.key + 1;
          select z.* into s from gangq.shapes z where z.id = heads.id;
        end if;
      end if;
      -- A job whose model is loaded may go first, within one priority and only past jobs about as old as it is. Nobody
      -- goes past what was put at the front. Positions follow the time of submission, so who may go past the head may
      -- go past all between the two.
      if take.model is not null and s.model is distinct from take.model and heads.key & 1125899906842623 >= 562949953421312
        and contenders = 1 then
        select h.n, h.id, h.key, h.plain, lead(h.key) over (order by h.key) as next_key into warm
        from (
          select e.n, e.id, e.key, z.plain
          from unnest(shape_ids, keys) with ordinality as e(id, key, n) join gangq.shapes z on z.id = e.id
          where z.model = take.model and e.key >> 50 = heads.key >> 50
            and case when z.plain then room.plain_room > 0
              else gangq.members_that_fit(z, room.slots + apart, room.memory_mb, room.cpus, room.vrams, room.device_ids) > 0 end) h
        order by h.key limit 1;
        if found then
          -- Up to the first that is too young; a few more rows than wanted, because others may have locked some.
          select coalesce(min(x.order_key) filter (where x.submitted_at > x.latest), max(x.order_key) + 1) into upto
          from (
            select j.order_key, j.submitted_at, o.latest
            from (
              select z.submitted_at + make_interval(secs => c.warm_s) as latest
              from gangq.live_jobs z cross join gangq.settings c
              where z.shape_id = heads.id and z.state = 'pending' and z.order_key = heads.key) o
            cross join gangq.live_jobs j
            where j.shape_id = warm.id and j.state = 'pending' and j.order_key >= warm.key
            order by j.order_key limit case when warm.plain then want else 1 end + 32) x;
          if upto > warm.key then
            heads.n := warm.n;
            heads.id := warm.id;
            heads.key := warm.key;
            bound := least(upto, warm.next_key, (warm.key >> 50) + 1 << 50);
            select z.* into s from gangq.shapes z where z.id = warm.id;
          end if;
        end if;
      end if;
      exit when apart > 0 and not s.plain and gangq.members_that_fit(s, room.slots, room.memory_mb, room.cpus, room.vrams, room.device_ids) = 0;
      if apart > 0 and not s.plain and marks is not null then
        -- With those slots it would fit beside what is kept for gangs; and as it is?
        exit when (
          select o.key is distinct from heads.key
          from gangq.open_head(s, heads.key, null, null, marks, me.prefetch, room.plain_room, room.slots, room.memory_mb, room.cpus,
            room.vrams, room.device_ids, t) o);
      end if;
      n := case when s.plain then least(want, room.plain_room) else 1 end;
      if mosts is not null then
        n := least(n, mosts[heads.n]);
        bound := least(bound, stops[heads.n]);
        full_submitters := case when limits is not null then (select r.full_submitters from gangq.room_below(s, limits, used) r) end;
      end if;
      zone := null;
      if heads.id = any (known) then
        for e in 1 .. cardinality(stretch_shapes) loop
          if stretch_shapes[e] = heads.id and stretch_from[e] > heads.key and stretch_from[e] >> 50 = heads.key >> 50 then
            zone := stretch_from[e];
          end if;
        end loop;
      end if;
      if zone is null then
        select array_agg(p.id), array_agg(p.ctid), max(p.order_key) into picked, places, last_key
        from (
          select z.id, z.ctid, z.order_key from gangq.live_jobs z
          where z.shape_id = heads.id and z.state = 'pending' and z.order_key >= heads.key and z.order_key < bound
            and (full_submitters is null or z.submitter <> all (full_submitters))
          order by z.order_key limit n for update skip locked) p;
        if picked is not null and marks is null and limits is null then
          moved_shapes := moved_shapes || heads.id;
          moved_keys := moved_keys || (last_key + 1);
        end if;
      else
        bound := least(bound, zone);
        select array_agg(p.id), array_agg(p.ctid), max(p.order_key) into picked, places, last_key
        from (
          select z.id, z.ctid, z.order_key from gangq.live_jobs z
          where z.shape_id = heads.id and z.state = 'pending' and z.returned and z.order_key >= heads.key and z.order_key < bound
            and (full_submitters is null or z.submitter <> all (full_submitters))
          order by z.order_key limit n for update skip locked) p;
      end if;
      if picked is not null then
        want := want - cardinality(picked);
        if s.plain and used is null and take.model is null then
          -- Taken in the order of their keys: they come out of this one statement, with all that the worker has to know.
          if taken <> '{}' then
            return query select c.* from gangq.claimed(taken) c;
            taken := '{}';
          end if;
          -- In the order of the places, because each is looked up by itself; a test holds the plan to that.
          return query
          update gangq.live_jobs j set state = 'running', incarnation = me.id, token = gangq.new_token(room.base), attempts = j.attempts + 1,
            claimed_at = t, due_at = null, request_id = take.request_id
          from unnest(places) as w(place) where j.ctid = w.place
          returning j.id, j.token, j.state, s.queue, s.task, j.payload, j.attempts::integer, j.max_attempts::integer, j.priority::integer, j.budget_s,
            null::bigint, null::integer, null::integer, null::integer, null::integer,
            -- Only who ran before has saved anything.
            case when j.final_token is not null then (select max(c.step) from gangq.checkpoints c where c.job_id = j.id) end, '[]'::jsonb,
            j.submitted_at, s.model;
        else
          update gangq.live_jobs j set state = 'running', incarnation = me.id, token = gangq.new_token(room.base), attempts = j.attempts + 1,
            claimed_at = t, due_at = null, request_id = take.request_id
          where j.ctid = any (places);
          taken := taken || picked;
        end if;
        if used is not null then
          used := used || coalesce((
            select jsonb_agg(jsonb_build_object('queue', c.name, 'submitter', j.submitter, 'jobs', j.jobs, 'gpus', j.jobs * s.gpus,
              'memory_mb', j.jobs * s.memory_mb, 'cpus', j.jobs * s.cpus))
            from unnest(counted) as c(name)
            cross join (select x.submitter, count(*) as jobs from gangq.live_jobs x where x.id = any (picked) group by x.submitter) j
            where gangq.below(s.queue, array[c.name])), '[]');
        end if;
        if s.plain then
          room.plain_room := room.plain_room - cardinality(picked);
          room.slots := room.slots - ceil(cardinality(picked)::numeric / me.prefetch);
          if take.amid then
            apart := apart + ceil(cardinality(picked)::numeric / me.prefetch);
          end if;
        else
          room.plain_room := room.plain_room - me.prefetch;
          room.slots := room.slots - 1;
          room.memory_mb := room.memory_mb - s.memory_mb;
          room.cpus := room.cpus - s.cpus;
          if s.gpus > 0 then
            perform gangq.hold_devices(picked[1], s, room.device_ids, room.vrams, t);
            select coalesce(array_agg(d.id order by d.n), '{}'), coalesce(array_agg(d.vram order by d.n), '{}')
            into room.device_ids, room.vrams
            from unnest(room.device_ids, room.vrams) with ordinality as d(id, vram, n)
            where not exists (select 1 from gangq.device_holds h where h.device_id = d.id);
          end if;
        end if;
      end if;
      exit when want <= 0;
      -- Nothing left, or what is left up to the bound is being claimed by somebody else: go on behind it.
      bound := case when picked is null or (s.plain and cardinality(picked) < n) then bound else last_key + 1 end;
      if heads.id = any (known) then
        keys[heads.n] := least(
          (select j.order_key from gangq.live_jobs j
            where j.shape_id = heads.id and j.state = 'pending' and j.returned and j.order_key >= bound order by j.order_key limit 1),
          (select min(f.key) from unnest(stretch_shapes, stretch_from, stretch_to) as g(id, low, high)
            cross join lateral (
              select j.order_key as key from gangq.live_jobs j
              where j.shape_id = heads.id and j.state = 'pending' and j.order_key >= greatest(g.low, bound) and j.order_key < g.high
              order by j.order_key limit 1) f
            where g.id = heads.id));
      else
        keys[heads.n] := (select j.order_key from gangq.live_jobs j
          where j.shape_id = heads.id and j.state = 'pending' and j.order_key >= bound order by j.order_key limit 1);
      end if;
    end loop;
    if want = take.max_jobs and ahead then
      for e in 5 .. cardinality(seen) - 6 by 7 loop
        seen[e + 6] := 0;
      end loop;
    end if;
    -- Noting it costs as much as a claim: one job at a time, only every so often.
    for m in 1 .. cardinality(moved_keys) loop
      e := 5;
      while e < cardinality(seen) and (seen[e] <> moved_shapes[m] or moved_keys[m] not between seen[e + 5] and seen[e + 5] + 63) loop
        e := e + 7;
      end loop;
      settles := settles or e > cardinality(seen);
    end loop;
    if settles then
      seen[2] := coalesce(
        (select j.token from gangq.live_jobs j where j.incarnation = me.id and j.token >= seen[2] order by j.token limit 1), seen[2]);
      marker := set_config('gangq.seen', gangq.pass_seen(seen, moved_shapes, moved_keys, looked, firsts, room.base + room.last_pos, my_xid)::text, false);
    end if;
    if want = take.max_jobs and ahead then
      return query select c.* from gangq.take(take.incarnation, take.request_id, take.max_jobs, take.ports, take.sleep, take.model, patient, take.amid) c;
      return;
    end if;
  end if;

  if taken <> '{}' then
    return query select c.* from gangq.claimed(taken) c;
  end if;
  if me.worked_at is null and want < take.max_jobs then
    update gangq.incarnations i set worked_at = t where i.id = me.id;
  end if;
  if want = take.max_jobs then
    if take.sleep and open and take.amid is not true then
      -- Who is being roused by an open transaction is told when that commits; it is not waited for.
      insert into gangq.sleepers as z (incarnation, queues, since)
      select me.id, me.queues, t where not exists (select 1 from gangq.sleepers y where y.incarnation = me.id)
      on conflict (incarnation) do nothing;
    end if;
  elsif room.asleep then
    delete from gangq.sleepers z where z.incarnation = any (array(
      select y.incarnation from gangq.sleepers y where y.incarnation = me.id for update skip locked));
  end if;
end $$;
comment on function gangq.take is
  'Internal. Claims for a worker: see claim. patient false: without waiting for anybody, after a completion in the '
  'same transaction.';

create function gangq.shapes_waiting(known integer[]) returns integer[] language plpgsql stable as $$
begin
  return array(
    with recursive waiting(id) as (
      (select coalesce(
          (select j.shape_id from gangq.live_jobs j where j.state = 'pending' and j.shape_id < k.id order by j.shape_id limit 1), nullif(k.id, 2147483647))
        from (select coalesce(min(x.id), 2147483647) as id from unnest(known) as x(id)) k)
      union all
      select (select coalesce(
          (select j.shape_id from gangq.live_jobs j where j.state = 'pending' and j.shape_id > p.id and j.shape_id < k.id order by j.shape_id limit 1),
          nullif(k.id, 2147483647))
        from (select coalesce(min(x.id), 2147483647) as id from unnest(known) as x(id) where x.id > p.id) k)
      from waiting p where p.id is not null
    )
    select w.id from waiting w where w.id is not null);
end $$;
comment on function gangq.shapes_waiting is
  'Internal. The shapes with a pending job, found by hopping along the index that claims read, and those of known, which are '
  'not looked up.';

create function gangq.settle_seen(
  seen bigint[], shape_ids integer[], firsts bigint[], stretch_shapes integer[], stretch_from bigint[], my_xid bigint, oldest_xid bigint
) returns bigint[] language plpgsql immutable as $$
declare
  e integer;
  n integer;
  first bigint;
begin
  for e in 5 .. cardinality(seen) - 6 by 7 loop
    n := array_position(shape_ids, seen[e]::integer);
    if seen[e + 6] < 0 then
      seen[e + 6] := case when n is null then 0 else -seen[e + 6] end;
    end if;
    if seen[e + 4] < 0 and my_xid > -seen[e + 4] then
      seen[e + 4] := my_xid;
    elsif seen[e + 4] > 0 and oldest_xid > seen[e + 4] then
      -- Looked at from where it is settled, and not only at what comes before: then all of it is known.
      if n is not null and seen[e + 2] = any (stretch_from) then
        first := firsts[n];
        if first is null or first >= seen[e + 3] then
          seen[e + 2] := seen[e + 3];
          seen[e + 4] := 0;
        elsif first >> 50 = seen[e + 1] then
          seen[e + 2] := greatest(seen[e + 2], first);
        end if;
      end if;
    end if;
  end loop;
  return seen;
end $$;
comment on function gangq.settle_seen is
  'Internal. After a look at the first job of each shape: what has settled of what this session has seen.';

create function gangq.pass_seen(
  seen bigint[], moved_shapes integer[], moved_keys bigint[], shape_ids integer[], firsts bigint[], last_pos bigint, my_xid bigint
) returns bigint[] language plpgsql immutable as $$
declare
  e integer;
  n integer;
  band bigint;
  base bigint;
  found_it boolean;
begin
  -- What was taken, and the first jobs that were seen: in their priority there is nothing before them.
  shape_ids := moved_shapes || shape_ids;
  firsts := moved_keys || firsts;
  for n in 1 .. coalesce(cardinality(firsts), 0) loop
    -- What was put at the front is marked as returned, and found by that.
    continue when firsts[n] is null or firsts[n] & 1125899906842623 <= 562949953421312;
    band := firsts[n] - 1 >> 50;
    found_it := false;
    for e in 5 .. cardinality(seen) - 6 by 7 loop
      if seen[e] = shape_ids[n] and seen[e + 1] = band then
        seen[e + 5] := greatest(seen[e + 5], firsts[n]);
        found_it := true;
      end if;
    end loop;
    if not found_it then
      -- In the order of shape and priority.
      e := 5;
      while e < cardinality(seen) and (seen[e], seen[e + 1]) < (shape_ids[n], band) loop
        e := e + 7;
      end loop;
      seen := seen[1:e - 1] || array[shape_ids[n], band, (band << 50) + 562949953421312, 0, 0, firsts[n], 0] || seen[e:];
    end if;
  end loop;
  for e in 5 .. cardinality(seen) - 6 by 7 loop
    -- Of priorities above the first job that was seen there is nothing: they are passed as far as places are given out.
    n := array_position(shape_ids, seen[e]::integer, coalesce(cardinality(moved_shapes), 0) + 1);
    if n is not null and (firsts[n] is null or firsts[n] >> 50 > seen[e + 1]) then
      base := (seen[e + 1] << 50) + 562949953421312;
      seen[e + 5] := greatest(seen[e + 5], base + last_pos);
    end if;
    if seen[e + 4] = 0 and seen[e + 5] >= seen[e + 2] + 64 then
      seen[e + 3] := seen[e + 5];
      seen[e + 4] := -my_xid;
    end if;
  end loop;
  return seen;
end $$;
comment on function gangq.pass_seen is
  'Internal. Notes up to which keys a claim has taken jobs or has seen that there are none (last_pos: the last place given '
  'out before it looked), and marks what is to settle next.';

create function gangq.claim(
  incarnation bigint, request_id uuid default null, max_jobs integer default 1, ports integer[] default '{}',
  sleep boolean default false, model text default null
) returns table (
  job_id bigint, token bigint, state text, queue text, task text, payload jsonb, attempt integer, max_attempts integer,
  priority integer, budget_s real, gang_id bigint, epoch integer, rank integer, world_size integer, master_port integer,
  checkpoint_step bigint, devices jsonb, submitted_at timestamptz, model_needed text
) language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return query select c.* from gangq.take(claim.incarnation, claim.request_id, claim.max_jobs, claim.ports, claim.sleep, claim.model, true) c;
end $$;
comment on function gangq.claim is
  'A worker takes work: first its members of reserved gangs, then up to max_jobs solo jobs that fit its free capacity, '
  'by priority, first in first out within one (policies fifo and largest_first too: a solo job has no size). Below a queue '
  'whose policy is fair, the child queue or submitter with the least dominant share goes first within one priority, '
  'whenever the oldest job there would. Nothing is taken that breaks a limit of its queue or an ancestor, or needs what an '
  'earmark keeps for a gang, unless it ends before that gang''s planned start. model: what this worker has loaded; a job that needs it may go before '
  'others of its priority that were submitted at most settings.warm_s before it, and before no others. Repeating '
  'request_id after a lost reply returns the same claims. '
  'ports: ports this worker holds bound, for the rendezvous of gangs whose rank 0 it gets. sleep: when there is '
  'nothing, note that this worker sleeps; commit, claim once more, then wait for NOTIFY. '
  'Raises GQ001, GQ002, GQ004 (a port serves another gang of this host), GQ005, GQ008, 42501 (another login registered it).';

-- An earmark says what its gang will need here in all. What this worker's own work will have set free by then need not be
-- kept now; of two gangs that wait for the same end, only the first may count on it.
create function gangq.marks_now(incarnation bigint, t timestamptz) returns gangq.earmarks[]
language plpgsql stable as $$
#variable_conflict use_column
declare
  e gangq.earmarks;
  marks gangq.earmarks[];
  freed record;
  slots integer := 0; gpus integer := 0; memory_mb bigint := 0; cpus numeric := 0;  -- needed by those before, and kept for them
  kept_slots integer := 0; kept_gpus integer := 0; kept_memory bigint := 0; kept_cpus numeric := 0;
begin
  for e in
    select x.* from gangq.earmarks x
    where x.incarnation = marks_now.incarnation and (x.kind = 'plan' or x.until > t) order by x.kind, x.until, x.gang_id
  loop
    slots := slots + e.slots;
    gpus := gpus + e.gpus;
    memory_mb := memory_mb + e.memory_mb;
    cpus := cpus + e.cpus;
    select count(*) as slots, coalesce(sum(h.gpus), 0) as gpus, coalesce(sum(h.memory_mb), 0) as memory_mb, coalesce(sum(h.cpus), 0) as cpus
    into freed
    from (
      select s.gpus, s.memory_mb, s.cpus, j.state,
        coalesce(g.go_at, case when j.gang_id is null then j.claimed_at end, t) + make_interval(secs => gangq.estimate_s(s.queue, s.task, s.gpus, j.budget_s)) as ends
      from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id left join gangq.live_gangs g on g.id = j.gang_id
      where j.incarnation = marks_now.incarnation and not (s.plain and j.gang_id is null)) h
    where h.state = 'preempting' or (e.kind = 'plan' and h.ends <= e.until);
    e.slots := greatest(0, slots - freed.slots::integer - kept_slots);
    e.gpus := greatest(0, gpus - freed.gpus::integer - kept_gpus);
    e.memory_mb := greatest(0, memory_mb - freed.memory_mb - kept_memory);
    e.cpus := greatest(0, cpus - freed.cpus - kept_cpus);
    kept_slots := kept_slots + e.slots;
    kept_gpus := kept_gpus + e.gpus;
    kept_memory := kept_memory + e.memory_mb;
    kept_cpus := kept_cpus + e.cpus;
    marks := marks || e;
  end loop;
  return marks;
end $$;
comment on function gangq.marks_now is
  'Internal. The earmarks of a worker, with what each of them needs to be free there this moment.';

-- What a claim asks of each shape while limits or earmarks are in force. Within one claim room only shrinks and usage
-- only grows, so what has been stepped over once need not be looked at again. Settings and queues, which it reads for each
-- job, are smaller than an index.
create function gangq.open_head(
  s gangq.shapes, from_key bigint, limits jsonb, used jsonb, marks gangq.earmarks[], prefetch integer, plain_room integer,
  slots integer, memory_mb bigint, cpus numeric, vrams integer[], device_ids bigint[], t timestamptz,
  out key bigint, out most integer, out stop bigint
) language plpgsql stable set enable_seqscan = on as $$
declare
  full_submitters text[];
  beside integer;
begin
  key := from_key;
  if key is null then
    return;
  end if;
  if limits is not null then
    select r.most, r.full_submitters into most, full_submitters from gangq.room_below(s, limits, used) r;
    if most = 0 or s.submitter = any (full_submitters) then
      key := null;
      return;
    elsif full_submitters is not null and s.submitter is null then
      -- Jobs from before the queue told submitters apart.
      key := (
        select min(w.order_key) from (
          select j.order_key, j.submitter from gangq.live_jobs j
          where j.shape_id = s.id and j.state = 'pending' and j.order_key >= from_key order by j.order_key limit 10000) w
        where w.submitter <> all (full_submitters));
    end if;
  end if;
  if key is null or marks is null then
    return;
  end if;
  beside := gangq.fits_beside(s, key, 'infinity', marks, prefetch, plain_room, slots, memory_mb, cpus, vrams, device_ids);
  if beside > 0 then
    -- However long it runs; a job behind the next planned gang has less room.
    most := least(most, beside);
    stop := (select min(e.order_key) from unnest(marks) e where e.kind = 'plan' and e.order_key > open_head.key);
  elsif gangq.fits_beside(s, key, '-infinity', marks, prefetch, plain_room, slots, memory_mb, cpus, vrams, device_ids) = 0 then
    key := null;
  else
    key := (
      select min(w.order_key) from (
        select j.order_key, j.submitter, gangq.estimate_s(s.queue, s.task, s.gpus, j.budget_s) as run_s from gangq.live_jobs j
        where j.shape_id = s.id and j.state = 'pending' and j.order_key >= open_head.key order by j.order_key limit 200) w
      where (full_submitters is null or w.submitter <> all (full_submitters))
        and gangq.fits_beside(s, w.order_key, t + make_interval(secs => w.run_s), marks, prefetch, plain_room, slots, memory_mb, cpus,
          vrams, device_ids) > 0);
    most := 1;
    stop := key + 1;
  end if;
end $$;
comment on function gangq.open_head is
  'Internal. The first job of a shape, from a key on, that limits and earmarks let start on a worker; how many from there, '
  'and before which key. Of jobs that fit only if they end in time the first 200 are looked at, and one is taken at a time.';

create function gangq.room_below(s gangq.shapes, limits jsonb, used jsonb, out most integer, out full_submitters text[])
language sql immutable as $$
  with l as (
    select x.queue, x.by_submitter, x.most, x.resource,
      case x.resource when 'jobs' then 1 when 'gpus' then s.gpus when 'memory_mb' then s.memory_mb when 'cpus' then s.cpus end as asked
    from jsonb_to_recordset(limits) as x(queue text, resource text, by_submitter boolean, most numeric)
    where gangq.below(s.queue, array[x.queue])
  ),
  u as (
    select l.queue, l.resource, x.submitter,
      sum(case l.resource when 'jobs' then x.jobs when 'gpus' then x.gpus when 'memory_mb' then x.memory_mb when 'cpus' then x.cpus end) as used
    from jsonb_to_recordset(used) as x(queue text, submitter text, jobs numeric, gpus numeric, memory_mb numeric, cpus numeric)
    join (select distinct l.queue, l.resource from l where l.asked > 0) l on l.queue = x.queue
    group by l.queue, l.resource, x.submitter
  ),
  rooms as (
    select null::text as submitter, l.most - coalesce((select sum(u.used) from u where u.queue = l.queue and u.resource = l.resource), 0) as room, l.asked
    from l where not l.by_submitter
    union all
    select null, l.most, l.asked from l where l.by_submitter
    union all
    select u.submitter, l.most - u.used, l.asked from l join u on u.queue = l.queue and u.resource = l.resource where l.by_submitter
  )
  select coalesce(greatest(0, least(1000, min(floor(r.room / r.asked)) filter (where r.submitter is null or r.room >= r.asked))), 1000)::integer,
    array_agg(distinct r.submitter) filter (where r.submitter is not null and r.room < r.asked)
  from rooms r where r.asked > 0
$$;
comment on function gangq.room_below is
  'Internal. How many more jobs of a shape fit below these limits (rows of limits_of) beside what is used (rows of '
  'queue_usage), whoever submitted them, and the submitters of whom none does.';

create function gangq.fits_beside(
  s gangq.shapes, key bigint, ends_at timestamptz, marks gangq.earmarks[], prefetch integer, plain_room integer, slots integer,
  memory_mb bigint, cpus numeric, vrams integer[], device_ids bigint[]
) returns integer language sql immutable as $$
  select case
    -- Plain jobs behind one another in a slot end later than their own time says: only the first of a slot may count on it.
    when s.plain then greatest(0, fits_beside.plain_room - k.all_slots * prefetch, case when fits_beside.slots > k.slots then 1 else 0 end)
    else gangq.members_that_fit(s, fits_beside.slots - k.slots, fits_beside.memory_mb - k.memory_mb, fits_beside.cpus - k.cpus,
      vrams[1:cardinality(vrams) - k.gpus], device_ids[1:cardinality(device_ids) - k.gpus]) end
  from (
    select coalesce(sum(e.slots), 0)::integer as all_slots, coalesce(sum(e.slots) filter (where e.late), 0)::integer as slots,
      coalesce(sum(e.memory_mb) filter (where e.late), 0)::bigint as memory_mb, coalesce(sum(e.cpus) filter (where e.late), 0) as cpus,
      coalesce(sum(e.gpus) filter (where e.late), 0)::integer as gpus
    from (
      select m.slots, m.memory_mb, m.cpus, m.gpus, m.kind = 'escrow' or ends_at > m.until as late
      from unnest(marks) m where m.kind = 'escrow' or fits_beside.key >= m.order_key) e) k
$$;
comment on function gangq.fits_beside is
  'Internal. How many jobs of this shape, place in the order and end fit into this much free capacity beside what earmarks '
  'keep: escrow keeps it from all, a plan from those that come later in the order and would not end before it.';

create function gangq.fair_root(queue text, fair text[]) returns text language sql immutable as $$
  select f.name from unnest(fair) as f(name) where gangq.below(queue, array[f.name]) order by length(f.name) limit 1
$$;
comment on function gangq.fair_root is 'Internal. The highest of these queues on the path of a queue.';

create function gangq.fair_shares(queue text, submitter text, fair text[], used jsonb, total jsonb) returns numeric[]
language sql stable as $$
  select array_agg(coalesce(u.share, 0) / coalesce(q.weight, 1)::numeric order by length(f.name))
  from unnest(fair) as f(name)
  cross join lateral (
    select case when fair_shares.queue <> f.name
      then f.name || '.' || split_part(substr(fair_shares.queue, length(f.name) + 2), '.', 1) end as child) c
  left join gangq.queues_table q on q.name = c.child
  cross join lateral (
    select greatest(sum(x.jobs) / nullif((total ->> 'jobs')::numeric, 0), sum(x.gpus) / nullif((total ->> 'gpus')::numeric, 0),
      sum(x.memory_mb) / nullif((total ->> 'memory_mb')::numeric, 0), sum(x.cpus) / nullif((total ->> 'cpus')::numeric, 0)) as share
    from jsonb_to_recordset(used) as x(queue text, submitter text, jobs numeric, gpus numeric, memory_mb numeric, cpus numeric)
    where x.queue = coalesce(c.child, f.name) and (c.child is not null or x.submitter = fair_shares.submitter)) u
  where gangq.below(fair_shares.queue, array[f.name])
$$;
comment on function gangq.fair_shares is
  'Internal. For each fair queue on the path of a queue, from the top: the dominant share of the fleet held by its child '
  'there, by that child''s weight, or in the fair queue itself by this submitter. The least goes first.';

create function gangq.hold_devices(job_id bigint, s gangq.shapes, device_ids bigint[], vrams integer[], t timestamptz)
returns void language sql volatile as $$
  insert into gangq.device_holds (device_id, kind, job_id, token, since)
  select d.id, 'job', hold_devices.job_id, (select j.token from gangq.live_jobs j where j.id = hold_devices.job_id), hold_devices.t
  from unnest(device_ids, vrams) with ordinality as d(id, vram, n)
  where d.vram >= (s).vram_mb and ((s).avoid is null or d.id <> all ((s).avoid)) order by d.n limit (s).gpus
$$;
comment on function gangq.hold_devices is
  'Internal. Holds the smallest devices that are large enough and not avoided. Two holders of one device collide on the key.';

-- take says the same of plain jobs in the statement that takes them.
create function gangq.claimed(ids bigint[]) returns table (
  job_id bigint, token bigint, state text, queue text, task text, payload jsonb, attempt integer, max_attempts integer,
  priority integer, budget_s real, gang_id bigint, epoch integer, rank integer, world_size integer, master_port integer,
  checkpoint_step bigint, devices jsonb, submitted_at timestamptz, model_needed text
) language sql stable as $$
  select j.id, j.token, j.state, s.queue, s.task, j.payload, j.attempts::integer, j.max_attempts::integer, j.priority::integer,
    j.budget_s, j.gang_id, g.epoch, coalesce(j.epoch_rank, j.rank), g.world_size,
    case when coalesce(j.epoch_rank, j.rank) = 0 then g.master_port end,
    case when j.gang_id is not null then g.restore_step
      else (select max(c.step) from gangq.checkpoints c where c.job_id = j.id) end,
    case when s.gpus = 0 then '[]' else (
      select jsonb_agg(jsonb_build_object('uuid', r.uuid, 'index', r.index, 'vram_mb', r.vram_mb, 'source', r.source) order by r.index, r.uuid)
      from gangq.device_holds h join gangq.device_registry r on r.id = h.device_id where h.job_id = j.id) end,
    j.submitted_at, s.model
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
