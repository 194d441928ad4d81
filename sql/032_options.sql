-- What submit, submit_gang and register_worker take beside their everyday arguments: each one JSON
-- object of the options below. It is read once per call, whatever the number of jobs, by
-- read_options.
-- Takes no locks.

-- The options of submit. Needs: vram_mb (MiB on each device), memory_mb (MiB), cpus, labels
-- ({"gpu": "h100"}, which the worker must carry). selector: conditions on labels, and on host and
-- worker, [{"key", "op", "values"}] with =, !=, in, notin, exists, absent, <, <=, >, >=; what is
-- compared as more or less must be a number on both sides, in text or not. tolerates: taints it may
-- run in spite of: key, key=value or *. model: what it needs loaded; a worker that has it is
-- preferred, any other may take it. limit_key, limit: of all jobs that name this key at most so
-- many are placed at once; the first submission that names it says the limit. rate: so many of them
-- start in a period, 10/1m, in place of the limit or besides. wait_for_hardware: take it though no
-- known worker of the queue could ever run it. budget_s: wall-clock seconds of an attempt.
-- max_attempts, max_crashes, max_trips, max_snoozes: 1 to 1000, then it fails. after_any,
-- after_failed: as the argument after, but jobs that must have ended, whatever came of them, or
-- that must have failed (if one is done or cancelled, this job is cancelled; a member of a gang has
-- failed when its gang has). name: these jobs are a batch of this name (gangq.batches). tags: marks
-- of the batch. at_most: of its jobs at most so many are placed at once. indexes: of each job its
-- number in the batch (array_index), in place of 0, 1, 2. wake: commit (notify at commit; right in
-- a transaction, the default), sleepers (only if a worker sleeps; right in autocommit), never.
-- parent, parent_token: the claim that a worker submits for. trace: the span in which it is
-- submitted, which its attempts continue (W3C traceparent). What is absent or null is as the
-- workers declare the task, then the queue's default or no need.
create type gangq.job_options as (
  vram_mb gangq.vram_mb, memory_mb gangq.memory_mb, cpus gangq.cpus, labels gangq.object,
  selector jsonb, tolerates text[], model gangq.name, limit_key gangq.name, "limit" gangq.count,
  rate gangq.rate, wait_for_hardware boolean, budget_s gangq.budget, max_attempts gangq.few,
  max_crashes gangq.few, max_trips gangq.few, max_snoozes gangq.few,
  after_any bigint[], after_failed bigint[], name gangq.name, tags text[], at_most gangq.members,
  indexes integer[], wake gangq.wake, parent bigint, parent_token bigint, trace gangq.traceparent
);

-- The options of submit_gang. payloads: an array, one for each rank, in place of payload. roles, in
-- place of size: [{"name": "driver", "count": 1}, ...], ranks in their order, see \dT+
-- gangq.gang_role. min_size: how many of size are enough to start. name: of the gang. vram_mb,
-- memory_mb, cpus, labels, selector, tolerates, model, limit_key: what each member needs, as in
-- job_options, as are wait_for_hardware, budget_s, max_attempts, max_crashes, max_trips,
-- max_snoozes (of single jobs that its members become: timeout_style), after_any, after_failed,
-- parent, parent_token and trace. request_id: as in submit. strategy: pack (the default), spread,
-- strict_pack, strict_spread, linked (as pack, all GPUs of each member joined by NVLink or
-- XGMI). require, prefer: a topology level of which all must, or should, share one domain.
-- balanced: evenly many on each host used. apart: gangs of one such name never share a host.
-- failure_policy: restart_gang (the default), restart_member, shrink, fail. completion: the role
-- whose end is the gang's. checkpoint_mode: each or rank0 (what an elastic gang has).
-- claim_deadline_s: how long it may stay reserved. timeout_s, timeout_style (requeue, hard, soft):
-- how long it may wait while eligible, and what happens then (requeue does nothing to a gang that
-- waits for capacity). preemptible: whether others may displace it (the default). What is absent or
-- null has its default.
create type gangq.gang_options as (
  payloads jsonb, roles jsonb, min_size gangq.members, name text, vram_mb gangq.vram_mb,
  memory_mb gangq.memory_mb, cpus gangq.cpus, labels gangq.object, selector jsonb,
  tolerates text[], model gangq.name, limit_key gangq.name, "limit" gangq.count,
  rate gangq.rate, wait_for_hardware boolean, strategy gangq.strategy,
  require text, prefer text, balanced boolean, apart gangq.name, budget_s gangq.budget,
  max_attempts gangq.few, max_crashes gangq.few, max_trips gangq.few, max_snoozes gangq.few,
  failure_policy gangq.failure_policy, completion text, checkpoint_mode gangq.checkpoint_mode,
  claim_deadline_s gangq.seconds, timeout_s gangq.seconds, timeout_style gangq.timeout_style,
  preemptible boolean, after_any bigint[], after_failed bigint[], request_id uuid, parent bigint,
  parent_token bigint, trace gangq.traceparent
);

-- The everyday arguments of submit and submit_gang, where they are checked like options.
create type gangq.arguments as (
  task gangq.name, size gangq.members, queue text, payload jsonb, priority gangq.priority,
  gpus gangq.gpus, due_at timestamptz, after jsonb
);

-- Arguments of other verbs, where they are checked like options.
create type gangq.other_arguments as (
  name gangq.name, task gangq.name, source gangq.name, queue gangq.name, submitter gangq.name,
  gang gangq.members, work gangq.object, target gangq.target_name, kinds text[],
  max_attempts gangq.few, tag gangq.role_name, unique_key gangq.name, keep_s gangq.seconds,
  memory_mb gangq.memory_mb, cpus gangq.cpus
);

-- A role of a gang. count: how many members it has at most. min: how many are enough to start
-- (count). payload goes to each of them, payloads one to each. task and what is as in gang_options:
-- the gang's where it is absent.
create type gangq.gang_role as (
  name gangq.role_name, count gangq.members, min gangq.members, task gangq.name, payload jsonb,
  payloads jsonb, gpus gangq.gpus, vram_mb gangq.vram_mb, memory_mb gangq.memory_mb,
  cpus gangq.cpus, labels gangq.object, selector jsonb, tolerates text[], model gangq.name,
  strategy gangq.strategy, require text, prefer text, balanced boolean, budget_s gangq.budget
);

-- The options of register_worker. light: how many light jobs it runs at once (1). prefetch: how
-- many it may hold for one light slot (1). labels: {"gpu": "h100"}. taints: key or key=value, each
-- keeps off what does not tolerate it; those an operator has set (set_taints) are added. tasks:
-- those it can run; absent: any. task_options: {"train": {"gpus": 1, "queue": "gpu"}}, what each
-- task is declared with, for submissions that do not say; the newest registration wins. address:
-- where members of a gang reach it (the host). boot_id, pid, identity: what proves it dead later.
-- lease_s: its own lease (the installation's).
create type gangq.worker_options as (
  light integer, prefetch gangq.few, labels gangq.object, taints text[], tasks text[],
  task_options jsonb, address text, boot_id text, pid bigint, identity jsonb, lease_s gangq.seconds
);
