-- What a pass tells to stop: victims of a preemption, and what is moved off drained hosts and workers.
-- Locks: gangs by id, jobs by id, worker rows for key share, all with skip locked: what is busy is left to the next pass.

-- What is drained and fits elsewhere: its own places there count as free, those on what is drained are closed anyway.
create function gangq.moves_on(b gangq.board, spare gangq.spare) returns setof gangq.decision
language plpgsql immutable as $$
#variable_conflict use_column
declare
  r gangq.spare := moves_on.spare;
  d gangq.decision;
  k integer;
  counts integer[];
  seats integer[];
  rooms integer[];
  shape integer;
  at integer;
  need jsonb;
  w integer;
  moved integer := 0;
begin
  for i in 1 .. coalesce(cardinality(b.move_units), 0) loop
    exit when moved >= 64;
    k := b.move_kind[i];
    d := null;
    d.action := 'move';
    if k is not null then
      counts := array(select v.value::integer from jsonb_array_elements_text(b.move_counts[i]) with ordinality as v(value, n) order by v.n);
      seats := gangq.seat_spare(b, k, counts, gangq.without(b, gangq.first_held(b, array[b.move_units[i]]), r));
      d.gang_id := b.move_units[i];
      d.kind_id := b.kind_ids[k];
      d.members := counts;
    else
      shape := b.move_shape[i];
      rooms := gangq.rooms(b, shape, r.slots, r.memory, r.mcpus, r.held, r.kept_slots, r.kept_memory, r.kept_mcpus, r.kept_gpus);
      seats := array(select x.n::integer from unnest(rooms) with ordinality as x(room, n) where x.room > 0 order by x.room, x.n limit 1);
      d.victims := array[b.move_units[i]];
    end if;
    continue when coalesce(seats, '{}') = '{}';
    need := case when k is not null then gangq.need_of(b, k, counts, seats)
      else jsonb_build_array(jsonb_build_array(seats[1], 1, b.shape_memory[shape], b.shape_mcpus[shape], b.shape_gpus[shape])) end;
    d.incarnations := array(select b.worker_ids[s.w] from unnest(seats) with ordinality as s(w, n) order by s.n);
    d.kept := (select jsonb_agg(jsonb_build_array(b.worker_ids[(v.value ->> 0)::integer], v.value -> 1, v.value -> 2, v.value -> 3, v.value -> 4) order by v.n)
      from jsonb_array_elements(need) with ordinality as v(value, n));
    for at in 0 .. jsonb_array_length(need) - 1 loop
      w := (need -> at ->> 0)::integer;
      r.kept_slots[w] := r.kept_slots[w] + (need -> at ->> 1)::integer;
      r.kept_memory[w] := r.kept_memory[w] + (need -> at ->> 2)::bigint;
      r.kept_mcpus[w] := r.kept_mcpus[w] + (need -> at ->> 3)::bigint;
      r.kept_gpus[w] := r.kept_gpus[w] + (need -> at ->> 4)::integer;
    end loop;
    moved := moved + 1;
    return next d;
  end loop;
end $$;
comment on function gangq.moves_on is
  'Internal. What runs, or is about to, on drained hosts and workers and would fit elsewhere, with what is to be kept for it there. Gangs in '
  'gang_id, a solo job in victims. As many members of each role as it has now.';

create view gangq.preemptions as
select e.at, (e.data ->> 'for')::bigint as for_gang, e.gang_id, e.epoch, e.job_id, e.reason, (e.data ->> 'lost_s')::real as lost_s,
  e.data ->> 'digest' as digest
from gangq.events e where e.kind = 'preempt' and e.data ? 'for';
comment on view gangq.preemptions is
  'Who was displaced for whom: gang (gang_id, epoch), solo job (job_id) or surplus member of a gang that goes on (both), why, and lost_s: work since the last checkpoint, '
  'in seconds times devices.';

create function gangq.explain_preempting(gang_id bigint) returns table (detail text, numbers jsonb) language sql stable as $$
  select format('%s told to stop for it, the last %s s ago; %s workers are kept for it until %s',
      (select string_agg(coalesce('gang ' || v.gang_id, 'job ' || v.job_id), ', ' order by v.gang_id, v.job_id) from gangq.preemptions v
        where v.for_gang = explain_preempting.gang_id and v.at >= k.since), round(extract(epoch from gangq.now() - k.since)::numeric, 1), k.workers, k.until),
    jsonb_build_object('workers', k.workers, 'until', k.until, 'lost_s', (
      select sum(v.lost_s) from gangq.preemptions v where v.for_gang = explain_preempting.gang_id and v.at >= k.since))
  from (
    select x.workers, x.until, (select max(v.at) from gangq.preemptions v where v.for_gang = explain_preempting.gang_id and v.at >= x.kept_from) as since
    from (
      -- Of all that ever happened only what came after this was kept: with slack, should these settings have changed since.
      select count(*) as workers, max(e.until) as until,
        min(e.until) - make_interval(mins => 10, secs => (select 2 * (c.grace_s + c.ack_timeout_s + c.lease_s) from gangq.settings c)) as kept_from
      from gangq.earmarks e
      where e.gang_id = explain_preempting.gang_id and e.kind = 'escrow' and e.until > gangq.now()
      having count(*) > 0) x) k
  where k.since is not null
$$;
comment on function gangq.explain_preempting is 'Internal. Who was told to stop so that this gang can start, while their places are kept for it.';
