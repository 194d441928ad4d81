-- The log of decisions: what a pass saw and what it decided from that, so that it can be asked later why, and be run again.
-- Takes no locks.

create function gangq.record_pass(pass bigint, decisions jsonb, seen jsonb, t timestamptz) returns void
language plpgsql as $$
#variable_conflict use_column
begin
  insert into gangq.passes (at, pass, digest, decisions, board)
  select t, record_pass.pass, left(seen ->> 'digest', 64), record_pass.decisions,
    case when s.record_decisions then seen -> 'board' end
  from gangq.settings s
  where exists (
    select 1 from jsonb_array_elements(record_pass.decisions) as x(value)
    where x.value ->> 'action' in ('start', 'stop', 'move'));
end $$;
comment on function gangq.record_pass is
  'Internal. Writes down a part of a pass that decided something.';
