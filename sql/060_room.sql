-- Who may be given work now, and how much of it has room. Takes no locks.

-- How many members of a shape each of these workers has room for.
create function gangq.members_that_fit(
  s gangq.shapes, free_slots integer, free_memory_mb bigint, free_cpus numeric, free_vrams integer[], free_ids bigint[]
) returns integer language sql immutable as $$
  select greatest(0, least(
    free_slots,
    case when s.memory_mb > 0 then free_memory_mb / s.memory_mb else free_slots end,
    case when s.cpus > 0 then floor(free_cpus / s.cpus) else free_slots end,
    case when s.gpus = 0 then free_slots
      when s.avoid is null then (select count(*) from unnest(free_vrams) v where v >= s.vram_mb) / s.gpus
      else (
        select count(*) from unnest(free_vrams, free_ids) as d(vram, id)
        where d.vram >= s.vram_mb and d.id <> all (s.avoid)) / s.gpus end))::integer
$$;
comment on function gangq.members_that_fit is
  'Internal. How many jobs of this shape fit into this much free capacity; devices are whole and never shared, and one '
  'it avoids is none.';

create function gangq.takes_work(
  i gangq.incarnations, renewed_at timestamptz, t timestamptz, heard_since timestamptz, hosts text[], workers text[]
) returns boolean language sql immutable as $$
  select i.state = 'live' and i.quarantined is null and (i.passed_over_until is null or i.passed_over_until <= t) and renewed_at > heard_since
    and i.host <> all (hosts) and i.name <> all (workers)
$$;
comment on function gangq.takes_work is
  'Internal. The rule of candidates; hosts and workers: those that are cordoned.';

create function gangq.candidates(t timestamptz, among bigint[] default null) returns bigint[] language plpgsql stable as $$
#variable_conflict use_column
declare
  heard_since timestamptz := t - (select make_interval(secs => s.candidate_silence_s) from gangq.settings s);
  hosts text[] := array(select c.name from gangq.cordons c where c.kind = 'host');
  workers text[] := array(select c.name from gangq.cordons c where c.kind = 'worker');
begin
  if among is null then
    return array(
      select i.id from gangq.incarnations i join gangq.leases l on l.incarnation = i.id
      where i.ended_at is null and gangq.takes_work(i, l.renewed_at, t, heard_since, hosts, workers) order by i.id);
  end if;
  return array(
    select i.id from gangq.incarnations i join gangq.leases l on l.incarnation = i.id
    where i.id = any (among) and gangq.takes_work(i, l.renewed_at, t, heard_since, hosts, workers) order by i.id);
end $$;
comment on function gangq.candidates is
  'Internal. Workers that may be given work now: live, heard lately, not quarantined, not cordoned, not passed over.';
