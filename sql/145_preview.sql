-- What if: preview checks the changes that gangq plan makes to a board, and adds what only the
-- database knows: preview_gang the kind of gang that a submission would be, preview_workers the
-- work that new workers would serve, preview_change what else a change touches. Takes no locks and
-- writes nothing, so it works on a standby, too.

-- One change: submit (the parameters of submit_gang), remove_host, priority ({"gang", "value"}),
-- cancel ({"gang"} or {"job"}), quota ({"queue", ...}) or add_workers: so many, like another one
-- where nothing else is said; without like they serve every queue and any task, with much memory,
-- many CPUs and no device.
create type gangq.board_change as (
  submit jsonb, remove_host text, priority jsonb, cancel jsonb, quota jsonb, add_workers gangq.few,
  "like" text, gpus gangq.gpus, vram_mb gangq.vram_mb, slots gangq.members,
  memory_mb gangq.memory_mb, cpus gangq.cpus, labels gangq.object, queues text[], tasks text[],
  taints text[], host text, name text
);

-- What a change of a priority, or a cancellation, is about.
create type gangq.changed_work as (gang bigint, job bigint, value gangq.priority);

-- Internal. The gang that submit_gang would make of this spec, as a board would show it. serves:
-- the workers that serve each role. Raises what read_gang raises.
create function gangq.preview_gang(
  spec jsonb, nth integer, out kind jsonb, out ask jsonb, out shapes gangq.shapes[]
) language plpgsql stable as $$
declare
  arguments constant text[] := array(
    select s.name from gangq.settable('gangq.arguments'::regtype) s);
  kind_id constant integer := 2147000000 + nth;  -- No sequence reaches it.
  age constant bigint := (1::bigint << 50) - 1000001 + nth;  -- Behind all that wait.
  a gangq.arguments;
  m gangq.gang_spec;
begin
  perform gangq.refuse('GQ001', format('submit is %s', left(coalesce(spec::text, 'null'), 200)),
    'It is an object of the parameters of submit_gang: {"task": "train", "size": 4, "gpus": 1}.')
  where jsonb_typeof(spec) is distinct from 'object';
  a := gangq.read_options('submit',
    spec - array(select jsonb_object_keys(spec - arguments)), null::gangq.arguments);
  m := gangq.read_gang(a,
    gangq.read_options('submit', spec - arguments, null::gangq.gang_options));
  shapes := m.shapes;
  kind := jsonb_build_object('id', kind_id, 'queue', (m.queue).name,
    'require', coalesce((m.options).require, ''), 'prefer', coalesce((m.options).prefer, ''),
    'apart', coalesce((m.options).apart, ''),
    'model', coalesce((select min(s.model) from unnest(shapes) s), ''),
    'limit_key', coalesce((select min(s.limit_key) from unnest(shapes) s), ''),
    'paused_task', coalesce((
      select min(p.task) from gangq.task_pauses p join unnest(shapes) s on s.task = p.task), ''),
    'roles', (
      select jsonb_agg(jsonb_build_object('name', r.name, 'least', r.min, 'most', r.count,
        'strategy', r.strategy, 'balanced', r.balanced, 'require', coalesce(r.require, ''),
        'prefer', coalesce(r.prefer, ''),
        'needs', jsonb_build_object('gpus', r.gpus, 'vram_mb', r.vram_mb, 'memory_mb', r.memory_mb,
          'millicpus', ((shapes[r.ordinality]).cpus * 1000)::bigint),
        'serves', (
          select coalesce(jsonb_agg(i.id), '[]') from gangq.incarnations i
          where i.ended_at is null and gangq.serves(i, shapes[r.ordinality])))
        order by r.ordinality)
      from unnest(m.roles) with ordinality r));
  ask := jsonb_build_object('id', 'new' || nth, 'kind', kind_id, 'priority', m.priority,
    'age', age, 'submitter', gangq.caller(), 'estimate_s', (
      select max(gangq.estimate_s(s.queue, s.task, s.gpus::integer, m.budget_s))::float8
      from unnest(shapes) s));
end $$;

-- Internal. Checks a change to existing work. Of a cancelled job it returns which lane it holds.
create function gangq.preview_change(c gangq.board_change, nth integer) returns jsonb
language plpgsql stable as $$
declare
  keys constant text[] := '{queue,maximum,guaranteed,max_running_gangs,max_running_jobs,paused}';
  q gangq.queues_table;
  w gangq.changed_work;
  answer jsonb := '{}';
begin
  if c.quota is not null then
    q := gangq.queue_named(c.quota ->> 'queue');
    perform gangq.read_queue(q.name, c.quota - 'queue', q);
    if c.quota - keys <> '{}'
      or jsonb_path_exists(c.quota - '{max_running_gangs,max_running_jobs}'::text[],
        '$.** ? (@ == null)')
    then
      perform gangq.refuse('GQ001', format('queue %s: %s', q.name, c.quota - 'queue'),
        'It takes maximum and guaranteed, objects like {"gpus": 8} of gpus, memory_mb, cpus and '
        'jobs; max_running_gangs and max_running_jobs, 0 or more, null for no limit; and paused, '
        'true or false.');
    end if;
  elsif c.priority is not null then
    w := gangq.read_options(format('the gang and value of change %s', nth), c.priority, w);
    if w.value is null or w.job is not null then
      perform gangq.refuse('GQ001',
        format('%s: it takes a gang, and a value of -1000 to 1000', c.priority),
        'For example {"priority": {"gang": 7, "value": 50}}.');
    elsif not exists (select 1 from gangq.live_gangs g where g.id = w.gang) then
      perform gangq.refuse_missing('gang', w.gang::text, true);
    end if;
    -- It may wait behind all that a board shows.
    answer := coalesce((
      select jsonb_build_object('ask', a)
      from gangq.live_gangs g
      cross join lateral gangq.board_asks(gangq.now(), array[g.id]) as a
      where g.id = w.gang and g.state = 'blocked'
        and (g.not_before is null or g.not_before <= gangq.now())), '{}');
  elsif c.cancel is not null then
    w := gangq.read_options(format('the gang or job of change %s', nth), c.cancel, w);
    perform gangq.refuse('GQ001', format('%s: it takes one gang or one single job', c.cancel),
      'For example {"cancel": {"gang": 7}}.')
    where num_nonnulls(w.gang, w.job) <> 1 or w.value is not null;
    answer := (
      select jsonb_build_object('unit', 'g' || g.id)
      from gangq.live_gangs g
      where g.id = w.gang
      union all
      select jsonb_build_object('unit', 'j' || j.id, 'queue', s.queue,
        'light', j.incarnation is not null and j.light)
      from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
      where j.id = w.job and j.gang_id is null);
    if answer is null then
      perform gangq.refuse('GQ002',
        case when w.gang is null then format('no live single job %s', w.job)
          else format('no live gang g%s', w.gang) end || '; a member is cancelled with its gang',
        'See gangq.jobs and gangq.gangs.');
    end if;
  elsif not exists (
    select 1 from gangq.incarnations x where x.host = c.remove_host and x.ended_at is null)
  then
    perform gangq.refuse('GQ002', format('host %L has no live worker', c.remove_host),
      'Hosts with workers: select distinct host from gangq.workers.');
  end if;
  return answer;
end $$;

-- Checks changes that gangq plan makes to a board (see Client.plan), and says of each what the
-- board lacks: of {"submit"} its "kind" and "ask", of {"add_workers"} its "workers" and what each
-- serves, of {"cancel"} the "unit". kinds: those on the board. Raises GQ001, GQ002.
create function gangq.preview(changes jsonb, kinds integer[]) returns jsonb
language plpgsql stable as $$
declare
  change jsonb;
  c gangq.board_change;
  n integer;
  gang record;
  asked jsonb;
  answers jsonb[] := '{}';
begin
  perform gangq.refuse('GQ001',
    format('changes is %s', left(coalesce(changes::text, 'null'), 200)),
    'It is a JSON array of changes: [{"priority": {"gang": 7, "value": 50}}].')
  where jsonb_typeof(changes) is distinct from 'array';
  -- What the members of each kind ask for, those of submissions included.
  asked := (
    select coalesce(jsonb_agg(jsonb_build_array(r.kind_id, r.ordinal - 1, to_jsonb(s))), '[]')
    from (
      select k.kind_id, k.ordinal::integer, k.shape_id
      from gangq.kind_roles k where k.kind_id = any (kinds)
      union all
      select k, 1, -k from unnest(kinds) as k where k < 0) r
    join gangq.shapes s on s.id = r.shape_id);
  for change, n in
    select e.change, e.n
    from jsonb_array_elements(changes) with ordinality as e(change, n)
    order by not e.change ? 'submit', e.n
  loop
    c := gangq.read_options(format('change %s', n), change, null::gangq.board_change);
    if num_nonnulls(c.submit, c.remove_host, c.priority, c.cancel, c.quota, c.add_workers) <> 1
      or c.add_workers is null and (select count(*) from jsonb_object_keys(change)) > 1
    then
      perform gangq.refuse('GQ001', format('change %s is %s', n, left(change::text, 300)),
        'A change is one of submit, remove_host, priority, cancel and quota, or add_workers with '
        'what each of them offers: see \dT+ gangq.board_change.');
    elsif c.submit is not null then
      gang := gangq.preview_gang(c.submit, n);
      asked := asked || (
        select jsonb_agg(jsonb_build_array(gang.kind -> 'id', x.n - 1, to_jsonb(x.s)) order by x.n)
        from (select s, row_number() over () as n from unnest(gang.shapes) as s) x);
      answers[n] := jsonb_build_object('kind', gang.kind, 'ask', gang.ask);
    elsif c.add_workers is not null then
      answers[n] := jsonb_build_object('workers', gangq.preview_workers(c, n, asked));
    else
      answers[n] := gangq.preview_change(c, n);
    end if;
  end loop;
  return to_jsonb(answers);
end $$;

-- Internal. The new workers as a board would show them, and which (kind, role) each serves.
create function gangq.preview_workers(w gangq.board_change, nth integer, asked jsonb) returns jsonb
language plpgsql stable as $$
declare
  -- Ids that no sequence reaches: 2^20 for the workers of each change, 2^10 for their devices.
  base constant bigint := (1::bigint << 61) + (nth::bigint << 20);
  plenty_mb constant integer := 1048576;
  plenty_cpus constant integer := 1024;
  i gangq.incarnations;
  vrams integer[];
  found jsonb := '[]';
begin
  if w."like" is not null then
    select x.* into i from gangq.incarnations x where x.name = w."like" order by x.id desc limit 1;
    perform gangq.refuse_missing('worker', w."like")
    where i.id is null;
    vrams := array(
      select r.vram_mb from gangq.device_registry r
      where r.offered_by = i.id order by r.vram_mb, r.index, r.id);
  end if;
  if w.gpus is not null then
    vrams := array_fill(coalesce(w.vram_mb, (select max(v) from unnest(vrams) as v), plenty_mb),
      array[w.gpus]);
  end if;
  i.slots := coalesce(w.slots, i.slots, greatest(1, w.gpus));
  i.memory_mb := coalesce(w.memory_mb, i.memory_mb, plenty_mb);
  i.cpus := coalesce(w.cpus, i.cpus, plenty_cpus);
  i.labels := coalesce(w.labels, i.labels, '{}');
  i.tasks := coalesce(w.tasks, i.tasks);
  i.taints := coalesce(w.taints, i.taints, '{}');
  i.queues := coalesce(w.queues, i.queues, array(
    select q.name from gangq.queues_table q order by q.name));
  perform gangq.queue_named(q.name) from unnest(i.queues) as q(name);
  for copy in 1 .. w.add_workers loop
    i.id := base + copy;
    i.name := coalesce(w.name, 'new' || nth) || '-' || copy;
    i.host := coalesce(w.host, i.name);
    found := found || jsonb_build_object('worker', jsonb_build_object('id', i.id, 'name', i.name,
        'host', i.host, 'slots', i.slots, 'memory_mb', i.memory_mb,
        'millicpus', (i.cpus * 1000)::bigint,
        'domains', gangq.domains(i, (select s.topology from gangq.settings s)),
        'devices', (
          select coalesce(jsonb_agg(jsonb_build_object('id', base + copy * 1024::bigint + d.n,
            'vram_mb', d.vram_mb) order by d.n), '[]')
          from unnest(vrams) with ordinality as d(vram_mb, n))),
      'serves', (
        select coalesce(jsonb_agg(jsonb_build_array(a.value -> 0, a.value -> 1)), '[]')
        from jsonb_array_elements(asked) as a(value)
        where gangq.serves(i, jsonb_populate_record(null::gangq.shapes, a.value -> 2))));
  end loop;
  return found;
end $$;
