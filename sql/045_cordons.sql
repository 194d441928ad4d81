-- Operators take hosts and workers out of service by name, for a while: cordon, uncordon, and what still runs there.
-- Locks: cordon takes the worker rows by id and then the cordon's own row; uncordon takes that row alone.

create function gangq.nearest(name text, known text[]) returns text language sql immutable as $$
  with pairs(word, pair) as (
    select w.word, substr(lower(w.word), n, 2)
    from (select distinct k.word from unnest(nearest.known) as k(word) union select nearest.name) w
    cross join generate_series(1, greatest(length(w.word) - 1, 1)) n
  ),
  alike as (
    select p.word, count(distinct p.pair) as shared
    from pairs p
    where p.word <> nearest.name and p.pair in (select x.pair from pairs x where x.word = nearest.name)
    group by p.word order by 2 desc, length(p.word), 1 limit 3
  )
  select string_agg(a.word, ', ' order by a.shared desc, length(a.word), a.word) from alike a
$$;
comment on function gangq.nearest is
  'Internal. The three of these names that share the most pairs of letters with one that was mistyped; null: none does.';

create function gangq.refuse_unknown(what text, name text) returns void language plpgsql stable as $$
declare
  -- A name has 200 characters at most, and to compare a longer one takes as many looks as it has characters.
  near text := gangq.nearest(left(refuse_unknown.name, 200), array(
    select distinct case what when 'host' then i.host else i.name end from gangq.incarnations i));
begin
  perform gangq.refuse('GQ002', format('%s %L does not exist', what, left(refuse_unknown.name, 200)) || coalesce('; there is ' || near, ''),
    'Names and hosts are in gangq.workers.');
end $$;
comment on function gangq.refuse_unknown is 'Internal. Raises GQ002 for a host or worker nobody has heard of, with the names like it.';

-- A claim in flight holds its worker's row: with the rows locked here it has either taken its work when this returns, or
-- sees the cordon. Whoever takes work looks for the cordon after it has the row. Only a worker that registers in this very
-- moment is not known here yet, and may take something while this commits.
create function gangq.cordon(
  host text default null, worker text default null, drain boolean default false, deadline timestamptz default null,
  reason text default null
) returns void language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  what text := case when cordon.worker is null then 'host' else 'worker' end;
  whose text := coalesce(cordon.worker, cordon.host);
  ids bigint[];
  c gangq.cordons;
begin
  perform gangq.refuse_larger('the reason', octet_length(cordon.reason), 4000);
  if (cordon.host is null) = (cordon.worker is null) then
    perform gangq.refuse('GQ001', 'cordon a host or a worker, one of them', 'Pass host or worker.');
  end if;
  if cordon.deadline is not null and not coalesce(cordon.drain, false) then
    perform gangq.refuse('GQ001', 'a deadline is that of a drain', 'Pass drain => true as well, or leave the deadline out.');
  end if;
  if cordon.deadline <= t then
    perform gangq.refuse('GQ001', format('the deadline %s has passed', cordon.deadline),
      'Give what runs there time to be moved: deadline => now() + interval ''30 minutes''. Leave it out to wait for as long as it takes.');
  end if;
  perform gangq.check_moment('deadline', nullif(cordon.deadline, 'infinity'));
  ids := array(select i.id from gangq.incarnations i
    where case what when 'host' then i.host else i.name end = whose and i.ended_at is null
    order by i.id for no key update);
  if ids = '{}' and not exists (select 1 from gangq.incarnations i where case what when 'host' then i.host else i.name end = whose)
    and not exists (select 1 from gangq.cordons x where x.kind = what and x.name = whose) then
    perform gangq.refuse_unknown(what, whose);
  end if;
  select x.* into c from gangq.cordons x where x.kind = what and x.name = whose for update;
  if found and (c.drain or not coalesce(cordon.drain, false))
    and (cordon.deadline is null or nullif(cordon.deadline, 'infinity') is not distinct from c.deadline)
    and coalesce(nullif(cordon.reason, ''), c.reason) = c.reason then
    return;
  end if;
  insert into gangq.cordons as x (kind, name, drain, since, deadline, reason, operator)
  values (what, whose, coalesce(cordon.drain, false), t, nullif(cordon.deadline, 'infinity'), coalesce(nullif(cordon.reason, ''), 'operator'), gangq.caller())
  on conflict (kind, name) do update set drain = x.drain or excluded.drain,
    deadline = case when cordon.deadline is null then x.deadline else excluded.deadline end,
    reason = coalesce(nullif(cordon.reason, ''), x.reason), operator = excluded.operator
  returning x.* into c;
  -- They would be woken for work that they may not take.
  delete from gangq.sleepers z where z.incarnation = any (array(
    select y.incarnation from gangq.sleepers y where y.incarnation = any (ids) order by y.incarnation for update skip locked));
  perform gangq.log_event(t, 'cordon', incarnation => case what when 'worker' then (
      select max(i.id) from gangq.incarnations i where i.name = whose) end, reason => c.reason,
    data => jsonb_build_object(what, whose, 'drain', c.drain, 'deadline', c.deadline, 'operator', c.operator));
  perform gangq.wake_tick(c.drain);
end $$;
comment on function gangq.cordon is
  'Gives a host, or a worker by name, nothing new until uncordon; it outlives restarts. What runs there goes on, and members '
  'already reserved there are claimed. drain: what runs there, or is reserved, is moved away once it fits elsewhere, '
  'gangs as a whole, and what has found no other place at the deadline is told to stop; without one nothing is (a gang of '
  'which a member has finished already cannot run again: it stays, and at the deadline it ends failed). When it '
  'returns, no claim that was under way can still take anything. Repeats are harmless, and what a repeat leaves out stays: '
  'a plain cordon does not end a drain, the deadline infinity takes one away. For gangq_admin. Raises GQ001, GQ002 (naming '
  'hosts or workers like it).';

create function gangq.uncordon(host text default null, worker text default null) returns void
language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  what text := case when uncordon.worker is null then 'host' else 'worker' end;
  whose text := coalesce(uncordon.worker, uncordon.host);
  c gangq.cordons;
begin
  if (uncordon.host is null) = (uncordon.worker is null) then
    perform gangq.refuse('GQ001', 'uncordon a host or a worker, one of them', 'Pass host or worker.');
  end if;
  delete from gangq.cordons x where x.kind = what and x.name = whose returning x.* into c;
  if not found then
    if not exists (select 1 from gangq.incarnations i where case what when 'host' then i.host else i.name end = whose) then
      perform gangq.refuse_unknown(what, whose);
    end if;
    return;
  end if;
  perform gangq.log_event(t, 'uncordon', incarnation => case what when 'worker' then (
      select max(i.id) from gangq.incarnations i where i.name = whose) end, reason => c.reason,
    data => jsonb_build_object(what, whose, 'drain', c.drain, 'operator', gangq.caller(), 'seconds', extract(epoch from t - c.since)));
  perform gangq.wake(array(select i.id from gangq.incarnations i
    where case what when 'host' then i.host else i.name end = whose and i.ended_at is null), 'claim');
  perform gangq.wake_tick();
end $$;
comment on function gangq.uncordon is
  'Lifts the cordon of a host or a worker, and with it a drain: it is given work again. What had been told to stop still '
  'stops. A worker stays cordoned while its host is, and the other way round. For gangq_admin. Repeats are harmless. '
  'Raises GQ001, GQ002.';

create view gangq.cordoned as
select c.kind, c.name, case when not c.drain then 'cordoned' when w.gangs = '{}' and w.jobs = '{}' then 'drained' else 'draining' end as state,
  c.drain, c.since, c.deadline, c.reason, c.operator, w.workers, w.gangs, w.jobs
from gangq.cordons c
cross join lateral (
  select count(distinct i.id) filter (where i.ended_at is null)::integer as workers,
    coalesce(array_agg(distinct j.gang_id order by j.gang_id) filter (where j.gang_id is not null), '{}') as gangs,
    coalesce(array_agg(distinct j.id order by j.id) filter (where j.id is not null and j.gang_id is null), '{}') as jobs
  from gangq.incarnations i left join gangq.live_jobs j on j.incarnation = i.id
  where case c.kind when 'host' then i.host else i.name end = c.name) w;
comment on view gangq.cordoned is
  'Hosts and workers that are given nothing new, and what still holds something there: gangs with a member placed there, '
  'solo jobs. state: cordoned, draining, or drained once a drain has left nothing there.';
