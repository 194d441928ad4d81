-- For how long gangs waited at each gate.
-- Takes no locks.

-- Internal. Whether a gang with a verdict of this gate is not eligible.
create function gangq.makes_ineligible(gate text) returns boolean language sql immutable as
$$ select gate in ('paused', 'quota', 'running_limit', 'submitter_limit', 'limit_key', 'rate') $$;

-- A kind of gang has a clock for each gate. It runs while the kind's verdict is that gate, and is
-- written when the gate changes, with the verdict. What it reads when a wait ends, less what it
-- read when the wait began (waited_from), is for how long the gang waited at each gate: no pass
-- writes anything for a gang that goes on waiting.
--
-- Internal. What the clocks of a verdict read, in seconds by gate.
create function gangq.gate_clock(v gangq.verdicts, t timestamptz) returns jsonb
language sql immutable
return (v).waited || jsonb_build_object((v).gate, coalesce(((v).waited ->> (v).gate)::float8, 0)
  + greatest(0, extract(epoch from t - (v).since)::float8));

-- Internal. The same of the verdict of a kind.
create function gangq.kind_clock(kind_id integer, t timestamptz) returns jsonb
language plpgsql stable as $$
begin
  return (
    select gangq.gate_clock(v, t)
    from gangq.verdicts v where v.kind_id = kind_clock.kind_id and v.ask = '');
end $$;

-- Internal. One reading less an earlier one, gate by gate.
create function gangq.clock_since(reading jsonb, earlier jsonb) returns jsonb
language plpgsql immutable as $$
begin
  return (
    select jsonb_object_agg(c.gate, c.seconds)
    from (
      select x.gate, sum(x.seconds) as seconds
      from (
        select e.key as gate, e.value::float8 as seconds from jsonb_each_text(reading) e
        union all
        select e.key, -e.value::float8 from jsonb_each_text(earlier) e) x
      group by x.gate) c);
end $$;

-- Internal. For how many seconds a gang has waited at each gate, in its present wait for a place;
-- null: it does not wait, or its kind was not judged. Its kind's verdict is that of the first gang
-- that waits.
create function gangq.waited_of(g gangq.live_gangs, t timestamptz) returns jsonb
language plpgsql stable as $$
begin
  return (
    select jsonb_object_agg(w.key, round(w.value::numeric, 1))
    from jsonb_each_text(gangq.clock_since(gangq.kind_clock(g.kind_id, t), g.waited_from)) w
    where g.state = 'blocked' and w.value::float8 >= 0.05);
end $$;

-- Internal. For how many seconds gangs of this kind were not eligible, as far as its verdict tells.
create function gangq.ineligible_s(kind_id integer, t timestamptz) returns double precision
language plpgsql stable as $$
begin
  return (
    select coalesce(sum(e.value::float8), 0)
    from jsonb_each_text(gangq.kind_clock(kind_id, t)) e where gangq.makes_ineligible(e.key));
end $$;
