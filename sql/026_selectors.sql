-- Which workers a job may run on, beyond equal labels: selectors, taints and tolerations. They are
-- checked and compiled once, when a shape is interned; gangq.serves then costs one predicate for a
-- worker, and nothing where there are none. Takes no locks.

-- A condition of a selector, on a label, host or worker. exists and absent take no values, in and
-- notin at least one, every other operator exactly one.
create type gangq.condition as (key gangq.name, op gangq.operator, "values" jsonb);

-- Internal. A condition of a selector in its canonical form. Raises GQ001.
create function gangq.check_condition(what text, said jsonb) returns jsonb
language plpgsql stable as $$
declare
  c gangq.condition := gangq.read_options(what, said, null::gangq.condition);
  given jsonb := coalesce(nullif(c."values", 'null'), '[]');
  n integer;
  number numeric;
begin
  if c.key is null or c.op is null or jsonb_typeof(given) <> 'array'
    or jsonb_path_exists(given, 'strict $[*] ? (!(@.type() like_regex "string|number|boolean"))')
  then
    perform gangq.refuse('GQ001', format('%s is %s', what, left(said::text, 200)),
      'A condition is {"key": a label, or host or worker, "op": "=", "values": ["h100"]}; values '
      'are strings, numbers and booleans.');
  end if;
  n := jsonb_array_length(given);
  if (case when c.op in ('exists', 'absent') then n <> 0 when c.op in ('in', 'notin') then n = 0
    else n <> 1 end)
  then
    perform gangq.refuse('GQ001',
      format('%s, on %s, has %s values for %s', what, c.key, n, c.op),
      'exists and absent take none, in and notin at least one, every other operator exactly one.');
  elsif c.op in ('<', '<=', '>', '>=') then
    number := jsonb_path_query_first(given, '$[0].double()', silent => true);
    if (number between -1e100 and 1e100) is not true then
      perform gangq.refuse('GQ001', format('%s compares %s with %s', what, c.key, given -> 0),
        'Only numbers are compared, up to 1e100: a label that is none does not meet the condition. '
        'For text use = or in.');
    end if;
    given := jsonb_build_array(number);
  end if;
  return jsonb_build_object('key', c.key, 'op', c.op, 'values', (
    select coalesce(jsonb_agg(distinct v.x), '[]') from jsonb_array_elements(given) as v(x)));
end $$;

-- Internal. A selector in its canonical order; null when it has no condition. Raises GQ001.
create function gangq.check_selector(selector jsonb) returns jsonb language plpgsql stable as $$
begin
  if selector in ('null', '[]') then
    return null;
  elsif jsonb_typeof(selector) <> 'array' or length(selector::text) > 20000 then
    perform gangq.refuse('GQ001',
      format('selector is %s; it must be a JSON array of conditions, with 20000 characters at most',
        left(selector::text, 200)),
      'For example [{"key": "gpu", "op": "in", "values": ["h100", "h200"]}, {"key": "spot", "op": '
      '"absent"}].');
  end if;
  return (
    select jsonb_agg(d.c order by d.c ->> 'key' collate "C", d.c ->> 'op' collate "C", d.c)
    from (
      select distinct gangq.check_condition(format('condition %s of the selector', e.n), e.c) as c
      from jsonb_array_elements(selector) with ordinality as e(c, n)) d);
end $$;

-- Internal. A key or value of a selector as people write it: in quotation marks where it has to be.
create function gangq.selector_word(word text) returns text language sql immutable as $$
  select case when word ~ '^[^\s=<>!(),"]+$' then word
    else '"' || regexp_replace(word, '(["\\])', '\\\1', 'g') || '"' end
$$;

-- Internal. A checked selector as people write it: vram>=40,rack in (a,b),!spot.
create function gangq.selector_text(selector jsonb) returns text language sql immutable as $$
  select string_agg(case d.op
      when 'exists' then d.key
      when 'absent' then '!' || d.key
      when 'in' then format('%s in (%s)', d.key, d.given)
      when 'notin' then format('%s notin (%s)', d.key, d.given)
      else d.key || d.op || d.given end, ',' order by d.n)
  from (
    select e.n, e.c ->> 'op' as op, gangq.selector_word(e.c ->> 'key') as key, (
        select string_agg(gangq.selector_word(v.x), ',' order by v.n)
        from jsonb_array_elements_text(e.c -> 'values') with ordinality as v(x, n)) as given
    from jsonb_array_elements(selector) with ordinality as e(c, n)) d
$$;

-- Internal. Labels as people write them: gpu=h100, zone=a.
create function gangq.labels_text(labels jsonb) returns text language sql immutable as $$
  select string_agg(gangq.selector_word(l.key) || '=' || gangq.selector_word(l.value), ', '
    order by l.key)
  from jsonb_each_text(labels_text.labels) l
$$;

-- Internal. Taints or tolerations, sorted and each once; wildcard: * is one too. Raises GQ001.
create function gangq.check_taints(taints text[], what text, wildcard boolean) returns text[]
language plpgsql as $$
declare
  wrong text;
begin
  select coalesce(w.taint, 'null') into wrong
  from unnest(taints) as w(taint)
  where (length(w.taint) <= 200
    and (w.taint ~ '^[^=,*\s]+(=[^,\s]*)?$' or wildcard and w.taint = '*')) is not true
  limit 1;
  if found or cardinality(taints) > 100 then
    perform gangq.refuse('GQ001',
      format('%s has %L', what, coalesce(left(wrong, 220), cardinality(taints) || ' entries')),
      'Each is key or key=value without blanks or commas, 200 characters at most, 100 in all'
        || case when wildcard then '; * tolerates every taint.' else '.' end);
  end if;
  return array(select distinct w.taint from unnest(taints) as w(taint) order by w.taint);
end $$;

-- Internal. A checked selector and tolerations as one predicate on a worker's labels, with $host,
-- $worker and $taints. A predicate of jsonpath, because it can be kept compiled in a column and
-- evaluated inside an inlined function. Inside a filter what cannot be compared is not met, and
-- exists() is never unknown: so != holds for whoever lacks the label.
create function gangq.selector_path(selector jsonb, tolerates text[]) returns jsonpath
language plpgsql immutable as $$
declare
  c record;
  path text;
  terms text[] := '{}';
begin
  if selector is null and tolerates is null then
    return null;
  end if;
  for c in
    select e.c ->> 'key' as key, e.c ->> 'op' as op, e.c -> 'values' as given
    from jsonb_array_elements(selector) as e(c)
  loop
    path := case when c.key in ('host', 'worker') then '$' || c.key
      else '$.' || to_jsonb(c.key)::text end;
    if c.op in ('=', '!=', 'in', 'notin') then
      -- A label given on a command line is text, one given in JSON may be a number: 1 and "1" are
      -- the same value.
      path := format('%s ? (%s)', path, (
        select string_agg(format('@ == %s', to_jsonb(v.x)) || case
            when v.x ~ '^(true|false|-?(0|[1-9]\d{0,99})(\.\d{1,99})?)$'
            then format(' || @ == %s', v.x) else '' end, ' || ')
        from jsonb_array_elements_text(c.given) as v(x)));
    elsif c.op in ('<', '<=', '>', '>=') then
      path := format('%s ? (@.double() %s %s)', path, c.op, c.given ->> 0);
    end if;
    terms := terms || format('%sexists(%s)',
      case when c.op in ('!=', 'notin', 'absent') then '!' else '' end, path);
  end loop;
  if tolerates is null then
    terms := terms || '!exists($taints[*])'::text;
  elsif '*' <> all (tolerates) then
    terms := terms || (
      select format('!exists($taints[*] ? (!(%s)))', string_agg(format('@ == %s', to_jsonb(w.taint))
        || case when strpos(w.taint, '=') = 0
          then format(' || @ starts with %s', to_jsonb(w.taint || '=')) else '' end, ' || '))
      from unnest(tolerates) as w(taint));
  end if;
  return case when terms = '{}' then 'true' else array_to_string(terms, ' && ') end;
end $$;
