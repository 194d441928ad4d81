-- Operators take hosts and workers out of service by name: cordon, uncordon, and the view cordoned.
-- Locks: cordon takes the worker rows by id and then the row of the cordon; uncordon takes only
-- that.

-- Internal. Whether an incarnation belongs to this host or worker (kind: host or worker).
create function gangq.is_at(i gangq.incarnations, kind text, name text) returns boolean
language sql immutable as
$$ select case kind when 'host' then i.host when 'worker' then i.name end = is_at.name $$;

-- Internal. What cordon and uncordon act on. Raises GQ001 unless exactly one of host and worker is
-- given, and GQ002, naming those most like it, where nothing of this name has registered.
create function gangq.cordon_target(
  verb text, host text, worker text, out kind text, out name text
) language plpgsql stable as $$
begin
  if (host is null) = (worker is null) then
    perform gangq.refuse('GQ001', format('%s a host or a worker, one of them', verb),
      'Pass host or worker.');
  end if;
  kind := case when worker is null then 'host' else 'worker' end;
  name := coalesce(worker, host);
  if exists (
      select from gangq.incarnations i
      where gangq.is_at(i, cordon_target.kind, cordon_target.name))
    or exists (
      select from gangq.cordons c
      where c.kind = cordon_target.kind and c.name = cordon_target.name) then
    return;
  end if;
  perform gangq.refuse_unknown(kind, name, array(
      select distinct case cordon_target.kind when 'host' then i.host else i.name end
      from gangq.incarnations i),
    'Names and hosts are in gangq.workers.');
end $$;

-- A claim locks its worker's row, then looks for a cordon. cordon locks those rows, too: a claim
-- under way has taken its work before cordon returns, and a later claim sees the cordon. A worker
-- that registers at this moment may take a job until this transaction commits.
--
-- Gives a host, or a worker by name, nothing new until uncordon, also after a restart. Running work
-- goes on, and members that are reserved there are claimed. drain: running and reserved work is
-- moved away once it fits elsewhere, gangs as a whole; at the deadline the rest is told to stop,
-- without one it is not. A gang of which a member has finished cannot run again: it stays until the
-- deadline and then fails. When this function returns, no claim that was under way can take
-- anything any more. A repeated call changes only what it gives: a plain cordon does not end a
-- drain, and the deadline infinity removes the deadline. For gangq_admin. Raises GQ001, GQ002
-- (naming hosts or workers like it), GQ007 (the reason).
create function gangq.cordon(
  host text default null, worker text default null, drain boolean default false,
  deadline timestamptz default null, reason text default null
) returns void language plpgsql as $$
declare
  t timestamptz := gangq.now();
  target record;
  ids bigint[];
  c gangq.cordons;
begin
  perform gangq.refuse_larger('the reason', octet_length(reason), 4000);
  target := gangq.cordon_target('cordon', host, worker);
  drain := coalesce(drain, false);
  reason := nullif(reason, '');
  if deadline is not null and not drain then
    perform gangq.refuse('GQ001', 'a deadline is that of a drain',
      'Pass drain => true as well, or leave the deadline out.');
  end if;
  if deadline <= t then
    perform gangq.refuse('GQ001', format('the deadline %s has passed', deadline),
      'Give the work time to move: deadline => now() + interval ''30 minutes''. Without a '
      'deadline a drain waits for as long as it takes.');
  end if;
  perform gangq.check_moment('deadline', nullif(deadline, 'infinity'));
  ids := array(
    select i.id from gangq.incarnations i
    where gangq.is_at(i, target.kind, target.name) and i.ended_at is null
    order by i.id for no key update);
  select x.* into c from gangq.cordons x
  where x.kind = target.kind and x.name = target.name for update;
  if c.name is not null and (c.drain or not drain) and coalesce(reason, c.reason) = c.reason
    and (deadline is null or nullif(deadline, 'infinity') is not distinct from c.deadline)
  then
    return;
  end if;
  insert into gangq.cordons as x (kind, name, drain, since, deadline, reason, operator)
  values (target.kind, target.name, drain, t, nullif(deadline, 'infinity'),
    coalesce(reason, 'operator'), gangq.caller())
  on conflict on constraint cordons_pkey do update set
    drain = x.drain or excluded.drain,
    deadline = case when cordon.deadline is null then x.deadline else excluded.deadline end,
    reason = coalesce(cordon.reason, x.reason),
    operator = excluded.operator
  returning x.* into c;
  -- These sleepers would be woken for work that they may not take.
  perform gangq.forget_sleepers(ids);
  perform gangq.log_cordon('cordon', t, c);
  perform gangq.wake_tick(c.drain);
end $$;

-- Lifts the cordon of a host or a worker, and with it a drain: it is given work again. Work that
-- was told to stop still stops. A worker stays cordoned while its host is, and the other way round.
-- Can be repeated. For gangq_admin. Raises GQ001, GQ002.
create function gangq.uncordon(host text default null, worker text default null) returns void
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  target record;
  c gangq.cordons;
begin
  target := gangq.cordon_target('uncordon', uncordon.host, uncordon.worker);
  delete from gangq.cordons x
  where x.kind = target.kind and x.name = target.name returning x.* into c;
  if not found then
    return;
  end if;
  perform gangq.log_cordon('uncordon', t, c);
  perform gangq.wake(array(
    select i.id from gangq.incarnations i
    where gangq.is_at(i, target.kind, target.name) and i.ended_at is null), 'claim');
  perform gangq.wake_tick();
end $$;

-- Internal. Writes the event of cordon or uncordon.
create function gangq.log_cordon(event text, t timestamptz, c gangq.cordons) returns void
language sql as $$
  select gangq.log_event(t, event, reason => c.reason,
    incarnation => (
      select max(i.id) from gangq.incarnations i where c.kind = 'worker' and i.name = c.name),
    data => jsonb_build_object(c.kind, c.name, 'drain', c.drain) || case event
      when 'cordon' then jsonb_build_object('deadline', c.deadline, 'operator', c.operator)
      when 'uncordon' then jsonb_build_object('operator', gangq.caller(),
        'seconds', extract(epoch from t - c.since)) end)
$$;

-- Hosts and workers that are given nothing new, and the gangs and single jobs that still hold
-- something there. state: cordoned, draining, or drained once nothing is left there.
create view gangq.cordoned as
select c.kind, c.name,
  case
    when not c.drain then 'cordoned'
    when w.gangs = '{}' and w.jobs = '{}' then 'drained'
    else 'draining' end as state,
  c.drain, c.since, c.deadline, c.reason, c.operator, w.workers, w.gangs, w.jobs
from gangq.cordons c
cross join lateral (
  select count(distinct i.id) filter (where i.ended_at is null)::integer as workers,
    coalesce(array_agg(distinct j.gang_id order by j.gang_id)
      filter (where j.gang_id is not null), '{}') as gangs,
    coalesce(array_agg(distinct j.id order by j.id)
      filter (where j.id is not null and j.gang_id is null), '{}') as jobs
  from gangq.incarnations i left join gangq.live_jobs j on j.incarnation = i.id
  where case c.kind when 'host' then i.host else i.name end = c.name) w;
