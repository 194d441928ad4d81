-- The log of decisions: what a pass saw and what it decided from that, so that it can be asked later why, and be run again.
-- Takes no locks.

-- A decider that fails over a gang says so in every pass: told once an hour, and of ten gangs a pass.
create function gangq.note_failures(decisions jsonb, t timestamptz) returns boolean
language plpgsql as $$
declare
  failed record;
  noted boolean := false;
begin
  for failed in
    select substr(x.value ->> 'ask', 2)::bigint as gang_id, left(x.value -> 'refused' ->> 'where', 500) as why
    from jsonb_array_elements(decisions) with ordinality as x(value, n)
    where x.value -> 'refused' ->> 'gate' = 'error' and x.value ->> 'ask' ~ '^g'
    order by x.n limit 10
  loop
    continue when exists (
      select 1 from gangq.events e
      where e.gang_id = failed.gang_id and e.kind = 'decision_failed' and e.at > t - interval '1 h');
    perform gangq.log_event(t, 'decision_failed', failed.gang_id, reason => failed.why);
    noted := true;
  end loop;
  return noted;
end $$;
comment on function gangq.note_failures is
  'Internal. Gangs over which the decider failed, as events; whether any is news.';

create function gangq.record_pass(pass bigint, decisions jsonb, seen jsonb, t timestamptz) returns void
language plpgsql as $$
#variable_conflict use_column
declare
  failed constant boolean := gangq.note_failures(record_pass.decisions, t);
begin
  insert into gangq.passes (at, pass, digest, decisions, board)
  select t, record_pass.pass, left(seen ->> 'digest', 64), record_pass.decisions,
    case when s.record_decisions or failed then (seen ->> 'board')::json end
  from gangq.settings s
  where failed or exists (
    select 1 from jsonb_array_elements(record_pass.decisions) as x(value)
    where x.value ->> 'action' in ('start', 'stop', 'move'));
end $$;
comment on function gangq.record_pass is
  'Internal. Writes down a part of a pass that decided something.';
