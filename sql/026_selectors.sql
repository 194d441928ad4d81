-- Which workers a job may run on, beyond equal labels: selectors, taints and tolerations. They are
-- checked and compiled once, when a shape is interned; gangq.serves then costs one predicate for a
-- worker, and nothing where there are none. Takes no locks.

create type gangq.condition as (
  key gangq.name,
  op gangq.operator,
  "values" jsonb
);
comment on type gangq.condition is
  'A condition of a selector: on a label, or on host or worker; exists and absent take no values, '
  'in and notin at least one, every other operator exactly one.';

create function gangq.check_selector(selector jsonb) returns jsonb language plpgsql as $$
declare
  said jsonb;
  n integer;
  what text;
  c gangq.condition;
  n_values integer;
  checked jsonb := '[]';
begin
  if selector is null or selector in ('null', '[]') then
    return null;
  end if;
  if jsonb_typeof(selector) <> 'array' or length(selector::text) > 20000 then
    perform gangq.refuse('GQ001',
      format('selector is %s; it must be a JSON array of conditions, with 20000 characters at most',
        left(selector::text, 200)),
      'For example [{"key": "gpu", "op": "in", "values": ["h100", "h200"]}, {"key": "spot", "op": '
      '"absent"}].');
  end if;
  for said, n in
    select e.condition, e.n from jsonb_array_elements(selector) with ordinality as e(condition, n)
  loop
    what := format('condition %s of the selector', n);
    c := gangq.read_options(what, said, null::gangq.condition);
    c."values" := coalesce(nullif(c."values", 'null'), '[]');
    if c.key is null or c.op is null or jsonb_typeof(c."values") <> 'array'
      or jsonb_path_exists(c."values",
        'strict $[*] ? (!(@.type() like_regex "string|number|boolean"))')
    then
      perform gangq.refuse('GQ001', format('%s is %s', what, left(said::text, 200)),
        'A condition is {"key": a label, or host or worker, "op": "=", "values": ["h100"]}; values '
        'are strings, numbers and booleans.');
    end if;
    n_values := jsonb_array_length(c."values");
    if (case
      when c.op in ('exists', 'absent') then n_values <> 0
      when c.op in ('in', 'notin') then n_values = 0
      else n_values <> 1 end)
    then
      perform gangq.refuse('GQ001',
        format('%s, on %s, has %s values for %s', what, c.key, n_values, c.op),
        'exists and absent take none, in and notin at least one, every other operator exactly '
        'one.');
    end if;
    if c.op in ('<', '<=', '>', '>=') then
      c."values" := jsonb_build_array(gangq.compared(what, c));
    elsif c.op in ('in', 'notin') then
      c."values" := (select jsonb_agg(distinct v.x) from jsonb_array_elements(c."values") as v(x));
    end if;
    checked := checked || to_jsonb(c);
  end loop;
  return (
    select jsonb_agg(d.condition
      order by d.condition ->> 'key' collate "C", d.condition ->> 'op' collate "C", d.condition)
    from (select distinct e.condition from jsonb_array_elements(checked) as e(condition)) d);
end $$;
comment on function gangq.check_selector is
  'Internal. A selector in its canonical order; null when it has no condition. Raises GQ001.';

create function gangq.compared(what text, c gangq.condition) returns numeric
language plpgsql immutable as $$
declare
  number numeric := 'NaN';
begin
  begin
    number := (c."values" ->> 0)::numeric;
  exception
    when data_exception then null;
  end;
  if not abs(number) <= 1e100 then
    perform gangq.refuse('GQ001', format('%s compares %s with %s', what, c.key, c."values" -> 0),
      'Only numbers are compared, up to 1e100: a label that is none does not meet the condition. '
      'For text use = or in.');
  end if;
  return number;
end $$;
comment on function gangq.compared is
  'Internal. The number that a condition compares a label with. Raises GQ001.';

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
comment on function gangq.check_taints is
  'Internal. Taints or tolerations, sorted and each once; wildcard: * is one too. Raises GQ001.';

-- A predicate of jsonpath, because it can be kept compiled in a column and evaluated inside an
-- inlined function. Inside a filter what cannot be compared is not met, and exists() is never
-- unknown: so != holds for whoever lacks the label.
create function gangq.selector_path(selector jsonb, tolerates text[]) returns jsonpath
language plpgsql immutable as $$
#variable_conflict use_column
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
comment on function gangq.selector_path is
  'Internal. A checked selector and tolerations as one predicate on a worker''s labels, with '
  '$host, $worker and $taints.';
