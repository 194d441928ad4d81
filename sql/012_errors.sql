-- Errors, and the bounds of what is written: refuse raises, check_ and require_ refuse unless, cut
-- shortens. Takes no locks.
--
-- SQLSTATEs of class GQ, each one Python exception:
--   GQ001 invalid input           GQ002 no such job, gang, queue, worker or device
--   GQ003 stale token             GQ004 not allowed in this state
--   GQ005 incarnation has ended   GQ006 worker name is taken
--   GQ007 too large               GQ008 wrong isolation level
-- Retryable by nature and left as PostgreSQL raises them: 55P03 lock not available, 40P01 deadlock,
-- 40001.

-- Internal. A text, cut and saying so where it is longer.
create function gangq.shortened(said text, most integer) returns text language sql immutable as $$
  select case when length(said) > most then left(said, most) || ' [cut]' else said end
$$;

-- Internal. Raises a typed error whose hint says what to do; each has 2000 characters at most.
create function gangq.refuse(sqlstate text, message text, hint text default '') returns void
language plpgsql as $$
begin
  -- It may quote what was passed, and goes into the server's log.
  raise exception using errcode = sqlstate, message = gangq.shortened(message, 2000),
    hint = gangq.shortened(hint, 2000);
end $$;

-- Internal. Raises GQ002 for a job, gang, incarnation, worker or device. is_live: it may have
-- ended.
create function gangq.refuse_missing(what text, id text, is_live boolean default false)
returns void language plpgsql as $$
begin
  perform gangq.refuse('GQ002',
    format(case when what = any ('{worker,device}') then '%s %L %s' when what = 'gang'
      then '%s g%s %s' else '%s %s %s' end, what,
      coalesce(left(id, 200), 'null'),
      case when is_live then 'is not live' else 'does not exist' end),
    format(case when is_live then 'It has ended or never existed: see gangq.%ss.'
      else 'Look in gangq.%ss; what has ended is kept for its retention.' end,
      replace(what, 'incarnation', 'worker')));
end $$;

-- Internal. Up to three of the known names, those that share the most pairs of letters with a
-- mistyped one; null when none shares any.
create function gangq.nearest(name text, known text[]) returns text language sql immutable as $$
  with pairs(word, pair) as (
    select w.word, substr(lower(w.word), n, 2)
    from (
      select distinct k.word from unnest(nearest.known) as k(word)
      union
      select nearest.name) w
    cross join generate_series(1, greatest(length(w.word) - 1, 1)) n
  ),
  alike as (
    select p.word, count(distinct p.pair) as shared
    from pairs p
    where p.word <> nearest.name
      and p.pair in (select x.pair from pairs x where x.word = nearest.name)
    group by p.word order by 2 desc, length(p.word), 1 limit 3
  )
  select string_agg(a.word, ', ' order by a.shared desc, length(a.word), a.word) from alike a
$$;

-- Internal. Raises GQ002 for a name that is none of the known ones, naming those most like it.
create function gangq.refuse_unknown(what text, name text, known text[], hint text) returns void
language plpgsql as $$
begin
  -- A name has 200 characters at most. The comparison of a longer one would take time for each.
  perform gangq.refuse('GQ002', format('%s %L does not exist', what, coalesce(left(name, 200), ''))
    || coalesce('; there is ' || gangq.nearest(left(name, 200), known), ''), hint);
end $$;

-- Internal. Raises GQ001 for infinity and for years that some client cannot read.
create function gangq.check_moment(what text, at timestamptz) returns void
language plpgsql immutable as $$
begin
  if not (at >= '0002-01-01 00:00:00+00' and at < '9999-01-01 00:00:00+00') then
    perform gangq.refuse('GQ001', format('%s is %s', what, at),
      'It is a moment from the year 2 to the year 9998.');
  end if;
end $$;

-- Internal. Raises GQ001 for a negative limit.
create function gangq.check_most(most integer) returns void language plpgsql immutable as $$
begin
  if most < 0 then
    perform gangq.refuse('GQ001', format('most is %s', most),
      'It is how many at most: 0 or more, or null for no limit.');
  end if;
end $$;

-- Internal. Raises GQ007, naming the limit. Whatever a role can write has a bound. What a person or
-- a program asks for is refused beyond it; what must not fail, because it says how an attempt
-- ended, is cut and says so.
create function gangq.refuse_larger(what text, bytes bigint, most bigint) returns void
language plpgsql as $$
begin
  if bytes > most then
    perform gangq.refuse('GQ007',
      format('%s has %s bytes, and %s are the most', what, bytes, most),
      'Put large data in shared storage and pass its address.');
  end if;
end $$;

-- Internal. The most bytes of an error, of the data of an event, and of what names or describes
-- something.
create function gangq.most_said() returns integer language sql immutable return 262144;

-- Internal. The most bytes of evidence, and of the decisions of a pass.
create function gangq.most_evidence() returns integer language sql immutable return 4194304;

-- Internal. What was said, if it is not too large; else as much of its first keys as fits, and
-- under "cut" how large it was.
create function gangq.cut(said jsonb, most integer) returns jsonb language plpgsql immutable as $$
declare
  bytes integer := pg_column_size(cut.said);
begin
  if bytes is null or bytes <= most then
    return cut.said;
  end if;
  return (
    select jsonb_build_object('cut',
        format('it had %s bytes, and %s are the most', bytes, most))
      || coalesce(jsonb_object_agg(left(e.key, 100), case
        when jsonb_typeof(e.value) in ('number', 'boolean', 'null')
          and pg_column_size(e.value) < 100 then e.value
        when jsonb_typeof(e.value) <> 'string' then '"[cut]"'
        when length(e.value #>> '{}') <= most / 50 then e.value
        else to_jsonb(left(e.value #>> '{}', most / 100) || ' [cut]') end), '{}')
    from (
      select x.key, x.value
      from jsonb_each(case jsonb_typeof(cut.said) when 'object' then cut.said else '{}' end) x
      order by x.key = any ('{type,message,step,phase,reason,code,by}') desc, x.key limit 20) e);
end $$;

-- Internal. 1 gang, 2 gangs.
create function gangq.counted(n numeric, what text) returns text language sql immutable as $$
  select format('%s %s%s', n, what, case when n = 1 then '' else 's' end)
$$;

-- Internal. claim, apply and tick count capacity after taking a lock; an older snapshot would count
-- wrongly.
create function gangq.require_read_committed(verb text) returns void language plpgsql stable as $$
begin
  if not gangq.reads_committed() then
    perform gangq.refuse('GQ008',
      format('%s needs isolation level READ COMMITTED, this transaction is %s', verb,
        upper(current_setting('transaction_isolation'))),
      'It must see what others committed while it waited for a lock. Call it on an autocommit '
      'connection.');
  end if;
end $$;
