-- The log of decisions: what a pass saw and what it decided from that, so that it can be asked later why, and be run again.
-- Takes no locks.

-- The board is hashed in its binary form: exact, the same whatever the session's settings, and cheaper than its text.
create function gangq.digest_of(b gangq.board) returns text language sql immutable as
$$ select md5(record_send(b)) $$;
comment on function gangq.digest_of is 'Internal. What a decision was made from, in 32 digits.';

create function gangq.record_pass(b gangq.board, ds gangq.decision[], max_gangs integer) returns text
language plpgsql set timezone = 'UTC' set extra_float_digits = 1 as $$
#variable_conflict use_column
declare
  digest text := gangq.digest_of(b);
begin
  insert into gangq.passes (at, digest, decisions, board)
  select b.t, digest, jsonb_build_object('max_gangs', record_pass.max_gangs, 'turns', max(d.turn) filter (where d.action = 'stop'),
      'decisions', coalesce(jsonb_agg(jsonb_strip_nulls(to_jsonb(d)) order by d.turn, d.gang_id, d.victims) filter (where d.action <> 'stop'), '[]')),
    case when s.record_decisions then to_jsonb(b) end
  from unnest(record_pass.ds) d cross join gangq.settings s
  group by s.record_decisions;
  return digest;
end $$;
comment on function gangq.record_pass is
  'Internal. Writes down a pass that decided something; turns: after how many gangs its time was up. Returns the digest of its board.';

create function gangq.replay(since timestamptz default null, until timestamptz default null)
returns table (at timestamptz, digest text, decisions integer, same boolean, difference text)
language plpgsql stable set timezone = 'UTC' set extra_float_digits = 1 as $$
#variable_conflict use_column
declare
  p gangq.passes;
  b gangq.board;
  then_made jsonb;
  now_made jsonb;
  n integer;
  was jsonb;
  now_is jsonb;
begin
  for p in
    select x.* from gangq.passes x
    where (replay.since is null or x.at >= replay.since) and (replay.until is null or x.at <= replay.until) order by x.at
  loop
    at := p.at;
    digest := p.digest;
    then_made := p.decisions -> 'decisions';
    decisions := jsonb_array_length(then_made);
    same := null;
    difference := 'its board was not recorded: select gangq.configure(''{"record_decisions": true}'')';
    if p.board is not null then
      b := jsonb_populate_record(null::gangq.board, p.board);
      select coalesce(jsonb_agg(jsonb_strip_nulls(to_jsonb(d)) order by d.turn, d.gang_id, d.victims), '[]') into now_made
      from gangq.decide_on(b, (p.decisions ->> 'max_gangs')::integer, max_turns => (p.decisions ->> 'turns')::integer) d;
      same := now_made = then_made and gangq.digest_of(b) = p.digest;
      difference := null;
      if now_made <> then_made then
        select x.n, then_made -> (x.n - 1), now_made -> (x.n - 1) into n, was, now_is
        from generate_series(1, greatest(decisions, jsonb_array_length(now_made))) as x(n)
        where then_made -> (x.n - 1) is distinct from now_made -> (x.n - 1) order by x.n limit 1;
        difference := format('decision %s of %s was %s and is %s', n, decisions, coalesce(gangq.said(was), 'none'), coalesce(gangq.said(now_is), 'none'));
      elsif not same then
        difference := format('the recorded board has the digest %s: it is not what this pass saw', gangq.digest_of(b));
      end if;
    end if;
    return next;
  end loop;
end $$;
comment on function gangq.replay is
  'Runs the recorded passes of a stretch once more and compares. same: it decides today what it decided then; null: its '
  'board was not recorded. difference: the first decision that is another. Reads only. For gangq_admin.';

create function gangq.said(d jsonb) returns text language sql immutable as $$
  select concat_ws(' ', d ->> 'action', 'gang ' || (d ->> 'gang_id'), 'on workers ' || (d ->> 'incarnations'), 'at ' || (d ->> 'starts_at'),
    '(' || (d ->> 'gate') || ')', 'for ' || (d ->> 'numbers')) || case when d ? 'devices' and d -> 'devices' <> '[]' then ' devices ' || (d ->> 'devices') else '' end
  where d is not null
$$;
comment on function gangq.said is 'Internal. A recorded decision in words.';
