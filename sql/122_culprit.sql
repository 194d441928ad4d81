-- Which member of a gang stopped first, as far as steps and places in the code tell.
-- Takes no locks.

-- Internal. Subject and verb of a sentence about these ranks, in ascending order.
create function gangq.ranks_wait(ranks integer[]) returns text language sql immutable as $$
  select case
    when cardinality(ranks) = 1 then format('rank %s waits', ranks[1])
    when cardinality(ranks) > 2 and ranks[cardinality(ranks)] - ranks[1] = cardinality(ranks) - 1
      then format('ranks %s to %s wait', ranks[1], ranks[cardinality(ranks)])
    when cardinality(ranks) > 8
      then format('ranks %s and %s more wait', array_to_string(ranks[1:8], ', '),
        cardinality(ranks) - 8)
    else format('ranks %s wait', array_to_string(ranks, ', ')) end
$$;

-- In a collective the waiting members look like the one that they wait for: none beats. The first
-- to stop is named only when the data show it:
-- 1. One member is behind all others by at least the longest stride (steps between two beats).
-- 2. All others wait in one place of the code, and one member is in another place.
-- The order of last beats proves nothing: all members beat the last step before the one that was
-- never finished.
--
-- Internal. The member that stopped first (null: not known), and a sentence about it. own_place:
-- where member own_id waits in its code, before its evidence is stored.
create function gangq.who_stopped(
  gang_id bigint, own_id bigint, own_place text, out job_id bigint, out sentence text
) language sql stable as $$
  with members as materialized (
    select j.id, gangq.rank_of(j) as rank, p.step, p.stride,
      case when j.id = own_id then own_place else (
        select v.data ->> 'place' from gangq.evidence v
        where v.job_id = j.id and v.token = j.token and v.kind in ('suspect', 'held', 'trip')
        order by v.at desc limit 1) end as place
    from gangq.live_jobs j left join gangq.progress p on p.job_id = j.id and p.token = j.token
    where j.gang_id = who_stopped.gang_id and j.state in ('running', 'preempting')
  ),
  gang as (
    select count(*) as members, count(m.step) = count(*) as all_step,
      count(m.place) = count(*) as all_placed, coalesce(max(m.stride), 1) as stride,
      array_agg(m.step order by m.step) as steps, array_agg(m.rank order by m.rank) as ranks,
      (array_agg(m.id order by m.step, m.rank))[1] as last_id,
      (array_agg(m.rank order by m.step, m.rank))[1] as last_rank
    from members m
  ),
  places as (
    select m.place, array_agg(m.rank order by m.rank) as ranks, min(m.id) as id
    from members m
    group by m.place
  )
  select a.job_id, a.sentence
  from (
    select 1 as nth, g.last_id as job_id,
      format('rank %s stopped first: it is at step %s, the others at step %s or later',
        g.last_rank, g.steps[1], g.steps[2]) as sentence
    from gang g
    where g.members > 1 and g.all_step and g.steps[2]::numeric - g.steps[1] >= g.stride
    union all
    select 2, here.id, format('%s in %s; rank %s has not arrived: it is in %s',
      gangq.ranks_wait(there.ranks), there.place, here.ranks[1], here.place)
    from gang g
    join places here on cardinality(here.ranks) = 1
    join places there on there.place <> here.place and cardinality(there.ranks) = g.members - 1
    where g.members > 2 and g.all_placed
    union all
    select 3, null, format('%s%s%s; which of them stopped first is not known',
      gangq.ranks_wait(g.ranks),
      ' at step ' || g.steps[1]
        || case when g.all_step and g.steps[1] = g.steps[g.members] then '' else ' and later' end,
      (select ' in ' || min(p.place) from places p having count(*) = 1))
    from gang g) a
  order by a.nth
  limit 1
$$;

-- Internal, for trip. Whether all running siblings are silent too: they last beat at most three
-- heartbeats after this member, or are suspect since. Null: it has none.
create function gangq.all_stand_still(j gangq.live_jobs) returns boolean language sql stable as $$
  select bool_and(
    x.beat_at <= (
      select o.beat_at from gangq.progress o where o.job_id = j.id and o.token = j.token)
      + make_interval(secs => 3 * (select c.heartbeat_s from gangq.settings c))
    or exists (
      select 1 from gangq.events e
      where e.job_id = x.id
        and e.token = x.token
        and e.kind in ('suspect', 'held')
        and e.data ->> 'class' in (select k.class from gangq.trip_classes k where k.held)
        and e.at > coalesce(x.beat_at, '-infinity')))
  from (
    select m.id, m.token, p.beat_at
    from gangq.live_jobs m left join gangq.progress p on p.job_id = m.id and p.token = m.token
    where m.gang_id = j.gang_id and m.id <> j.id and m.state = 'running') x
$$;
