-- What submit, submit_gang and register_worker take beside their everyday arguments: each one JSON
-- object of the options below. It is read once per call, whatever the number of jobs.
-- Takes no locks.

create type gangq.job_options as (
  vram_mb integer,
  memory_mb bigint,
  cpus numeric,
  labels jsonb,
  selector jsonb,
  tolerates text[],
  model text,
  wait_for_hardware boolean,
  budget_s real,
  max_attempts integer,
  max_crashes integer,
  max_trips integer,
  wake text,
  parent bigint,
  parent_token bigint
);
comment on type gangq.job_options is
  'The options of submit. Needs: vram_mb (MiB on each device), memory_mb (MiB), cpus, labels '
  '({"gpu": "h100"}, which the worker must carry). selector: conditions on labels, and on host '
  'and worker, [{"key", "op", "values"}] with =, !=, in, notin, exists, absent, <, <=, >, >=; '
  'what is compared as more or less must be a number on both sides, in text or not. tolerates: '
  'taints it may run in spite of: key, key=value or *. model: what it needs loaded; a worker that '
  'has it is preferred, any other may take it. wait_for_hardware: take it though no known worker '
  'of the queue could ever run it. budget_s: wall-clock seconds of an attempt. max_attempts, '
  'max_crashes, max_trips: 1 to 1000, then it fails. wake: commit (notify at commit; right in a '
  'transaction, the default), sleepers (only if a worker sleeps; right in autocommit), never. '
  'parent, parent_token: the claim that submit_child submits for. What is absent or null is as '
  'the workers declare the task, then the queue''s default or no need.';

create type gangq.gang_options as (
  payloads jsonb,
  roles jsonb,
  min_size integer,
  name text,
  vram_mb integer,
  memory_mb bigint,
  cpus numeric,
  labels jsonb,
  selector jsonb,
  tolerates text[],
  model text,
  wait_for_hardware boolean,
  strategy text,
  require text,
  prefer text,
  balanced boolean,
  apart text,
  budget_s real,
  max_attempts integer,
  max_crashes integer,
  max_trips integer,
  failure_policy text,
  completion text,
  checkpoint_mode text,
  claim_deadline_s real,
  timeout_s real,
  timeout_style text,
  preemptible boolean,
  request_id uuid,
  parent bigint,
  parent_token bigint
);
comment on type gangq.gang_options is
  'The options of submit_gang. payloads: an array, one for each rank, in place of payload. roles, '
  'in place of size: [{"name", "count", "min", "task", "payload", "payloads", "gpus", "vram_mb", '
  '"memory_mb", "cpus", "labels", "selector", "tolerates", "model", "strategy", "require", '
  '"prefer", "balanced", "budget_s"}], ranks in their order; what a role does not say is the '
  'gang''s. min_size: how many of size are enough to start. name: of the gang. vram_mb, '
  'memory_mb, cpus, labels, selector, tolerates, model: what each member needs, as in '
  'job_options, as are wait_for_hardware, budget_s, max_attempts, max_crashes, max_trips, parent '
  'and parent_token. request_id: as in submit. strategy: pack (the default), spread, strict_pack, '
  'strict_spread. require, prefer: a topology level of which all must, or should, share one '
  'domain. balanced: evenly many on each host used. apart: gangs of one such name never share a '
  'host. failure_policy: restart_gang (the default), restart_member, shrink, fail. completion: '
  'the role whose end is the gang''s. checkpoint_mode: each or rank0 (what an elastic gang has). '
  'claim_deadline_s: how long it may stay reserved. timeout_s, timeout_style (requeue, hard, '
  'soft): how long it may wait while eligible, and what happens then (requeue does nothing to a '
  'gang that waits for capacity). preemptible: whether others may displace it (the default). What '
  'is absent or null has its default.';

create type gangq.worker_options as (
  light integer,
  prefetch integer,
  labels jsonb,
  taints text[],
  tasks text[],
  task_options jsonb,
  address text,
  boot_id text,
  pid bigint,
  identity jsonb,
  lease_s real
);
comment on type gangq.worker_options is
  'The options of register_worker. light: how many light jobs it '
  'runs at once (1). prefetch: how many it may hold for one light slot (1). '
  'labels: {"gpu": "h100"}. taints: key or key=value, each keeps off what does not tolerate it; '
  'those an operator has set (set_taints) are added. tasks: those it can run; absent: any. '
  'task_options: {"train": {"gpus": 1, "queue": "gpu"}}, what each task is declared with, for '
  'submissions that do not say; the newest registration wins. address: where members of a gang '
  'reach it (the host). boot_id, pid, identity: what proves it dead later. lease_s: its own lease '
  '(the installation''s).';

create function gangq.json_type(type regtype) returns text language sql immutable as $$
  select case
    when type in ('integer'::regtype, 'bigint'::regtype, 'numeric'::regtype, 'real'::regtype)
      then 'number'
    when type = 'boolean'::regtype then 'boolean'
    when type = 'text[]'::regtype then 'array'
    else 'string' end
$$;
comment on function gangq.json_type is
  'Internal. What jsonb_typeof says of an option that is kept as this type.';

create function gangq.read_options(verb text, options jsonb, o anyelement) returns anyelement
language plpgsql stable as $$
declare
  said record;
begin
  if jsonb_typeof(options) <> 'object' then
    perform gangq.refuse('GQ001',
      format('the options of %s are %s', verb, left(options::text, 200)),
      'Pass them as one JSON object: options => ''{"memory_mb": 16000}''.');
  end if;
  for said in
    select e.key, e.value, a.type, jsonb_typeof(e.value) as given, gangq.json_type(a.type) as wanted
    from jsonb_each(options) e
    left join gangq.settable(pg_typeof(o)) a on a.name = e.key
    order by e.key
  loop
    if said.type is null then
      perform gangq.refuse_option(verb, said.key, pg_typeof(o));
    elsif said.given = 'null' then
      continue;
    elsif said.type <> 'jsonb'::regtype and said.given <> said.wanted
      or said.wanted = 'array' and jsonb_path_exists(said.value, '$[*] ? (@.type() != "string")')
    then
      perform gangq.refuse('GQ001',
        format('%s: %s cannot be %s', verb, said.key, left(said.value::text, 200)),
        format('In the options it is a JSON %s.',
          case said.wanted when 'array' then 'array of strings' else said.wanted end));
    end if;
    begin
      o := jsonb_populate_record(o, jsonb_build_object(said.key,
        case when said.wanted = 'number' then to_jsonb(trim_scale(said.value::numeric))
          else said.value end));
    exception
      when data_exception then
        perform gangq.refuse('GQ001',
          format('%s: %s cannot be %s (%s)', verb, said.key, left(said.value::text, 200), sqlerrm),
          format('It is kept as %s.', said.type));
    end;
  end loop;
  return o;
end $$;
comment on function gangq.read_options is
  'Internal. The options of a verb as a row of the type of o; null stands for absent. Raises '
  'GQ001 for an option that there is not, or of another type.';

create function gangq.refuse_option(verb text, option text, type regtype) returns void
language plpgsql stable as $$
declare
  arguments text[] := (
    select p.proargnames[: p.pronargs] from pg_proc p where p.oid = ('gangq.' || verb)::regproc);
begin
  if option <> 'options' and option = any (arguments) then
    perform gangq.refuse('GQ001', format('%s is no option of %s', option, verb),
      format('It is an argument of its own: gangq.%s(%s => ...).', verb, option));
  end if;
  perform gangq.refuse_unknown_key(verb, 'option', option,
    array(select a.name from gangq.settable(type) a order by 1));
end $$;
comment on function gangq.refuse_option is 'Internal. Raises GQ001: the verb has no such option.';
