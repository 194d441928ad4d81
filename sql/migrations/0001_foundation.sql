-- gangq: the tables.
--
-- A job's life. submit writes one narrow row into live_jobs. A solo job is pending until a worker's claim makes it
-- running; a gang's members are blocked until admit reserves all of them at once on workers that fit. When a job
-- ends, its row leaves live_jobs for history in the same statement, so the hot table holds only live work and no
-- index ever carries finished jobs. Members of a gang stay hot until their gang ends, then all leave together.
--
-- Who owns what. A worker registers and receives an incarnation: one row in incarnations (what it offers) and one
-- in leases (until when its work is its own). The lease is a row of its own because heartbeats rewrite it every few
-- seconds: it carries no index but its key, so those updates stay HOT, and no job verb ever locks it. Each claim
-- draws a token; every later word about the attempt carries it, and an old token changes nothing.
--
-- What a job needs is interned in shapes (queue, task, resources, labels): a claim asks which few shapes fit, then
-- takes the heads of those from one partial index, and never looks at a job that does not fit.
--
-- Lock order, everywhere: gangs by id, jobs by id, then worker rows by id; after a worker row, jobs only with
-- skip locked. Those who take capacity (claim, reserve_gang) lock the worker row, count, and take; those who give it
-- back (complete, fail, ack, rollback) never touch it.
--
-- A migration is applied once, in order, and recorded with its checksum. Functions, views, triggers and grants live
-- in the numbered files beside this folder and are rebuilt as a whole whenever one of them changes.

create schema gangq;
comment on schema gangq is
  'A durable job queue for work that occupies GPUs. Start with the views: jobs, gangs, workers, devices, waiting, '
  'timeline, drains, capacity, violations. Every change goes through a function; no table is written directly.';

create table gangq.migrations (
  name text primary key,
  checksum text not null,
  applied_at timestamptz not null default clock_timestamp()
);
comment on table gangq.migrations is
  'Applied migrations, plus one row named "code" whose checksum stands for all replaceable files together.';
comment on column gangq.migrations.name is 'File name without its folder, or "code".';
comment on column gangq.migrations.checksum is 'SHA-256 of what was applied, in hexadecimal.';
comment on column gangq.migrations.applied_at is 'When it was applied, by the database''s clock.';

-- Identity -------------------------------------------------------------------------------------------------------

create sequence gangq.job_ids as bigint;
create sequence gangq.gang_ids as bigint;
create sequence gangq.incarnation_ids as bigint;
create sequence gangq.tokens as bigint;
create sequence gangq.positions as bigint;
comment on sequence gangq.job_ids is 'Ids of jobs; a retried job keeps its id.';
comment on sequence gangq.gang_ids is 'Ids of gangs; a retried gang keeps its id.';
comment on sequence gangq.incarnation_ids is 'Ids of worker incarnations, never reused.';
comment on sequence gangq.tokens is
  'High part of fencing tokens; 16 random low bits make a token unrepeatable even when a failover loses this sequence''s tail.';
comment on sequence gangq.positions is 'First-in-first-out positions within a priority.';

-- Settings and queues --------------------------------------------------------------------------------------------

create table gangq.settings (
  singleton boolean primary key default true check (singleton),
  heartbeat_s real not null default 5 check (heartbeat_s > 0 and heartbeat_s <= 1e7),
  lease_s real not null default 120 check (lease_s > 0 and lease_s <= 1e7),
  lease_margin_s real not null default 10 check (lease_margin_s >= 0 and lease_margin_s <= 1e7),
  grace_s real not null default 15 check (grace_s >= 0 and grace_s <= 1e7),
  claim_deadline_s real not null default 30 check (claim_deadline_s > 0 and claim_deadline_s <= 1e7),
  ack_timeout_s real not null default 45 check (ack_timeout_s > 0 and ack_timeout_s <= 1e7),
  candidate_silence_s real not null default 15 check (candidate_silence_s > 0 and candidate_silence_s <= 1e7),
  pass_over_s real not null default 60 check (pass_over_s >= 0 and pass_over_s <= 1e7),
  flag_after_s real not null default 30 check (flag_after_s > 0 and flag_after_s <= 1e7),
  tick_s real not null default 1 check (tick_s > 0 and tick_s <= 1e7),
  gang_backoff_s real not null default 1 check (gang_backoff_s >= 0 and gang_backoff_s <= 1e7),
  gang_backoff_max_s real not null default 300 check (gang_backoff_max_s >= 0 and gang_backoff_max_s <= 1e7),
  checkpoint_bytes integer not null default 1048576 check (checkpoint_bytes > 0),
  log_bytes integer not null default 1048576 check (log_bytes > 0),
  retention_short interval not null default '7 days',
  retention_long interval not null default '30 days',
  incarnation_retention interval not null default '7 days',
  max_stops smallint not null default 100 check (max_stops > 0)
);
insert into gangq.settings default values;
comment on table gangq.settings is 'Numbers that hold for the whole installation; one row. Change with gangq.configure().';
comment on column gangq.settings.singleton is 'Always true: there is one row.';
comment on column gangq.settings.heartbeat_s is 'Seconds between a worker''s heartbeats.';
comment on column gangq.settings.lease_s is 'Length of a lease: the longest outage running work survives, and the slowest recovery from a vanished host.';
comment on column gangq.settings.lease_margin_s is 'A worker that could not renew has SIGKILLed its work this long before its lease ends.';
comment on column gangq.settings.grace_s is 'Seconds between SIGTERM and SIGKILL when a job is told to stop.';
comment on column gangq.settings.claim_deadline_s is 'Seconds a reserved member may wait to be claimed.';
comment on column gangq.settings.ack_timeout_s is 'Seconds after which a job told to stop and not acknowledged loses its renewal.';
comment on column gangq.settings.candidate_silence_s is 'A worker silent for longer is not considered for placement.';
comment on column gangq.settings.pass_over_s is 'A worker that missed a claim deadline is passed over for this long.';
comment on column gangq.settings.flag_after_s is 'A worker silent for longer is flagged; nothing is freed by that.';
comment on column gangq.settings.tick_s is 'Seconds between safety ticks.';
comment on column gangq.settings.gang_backoff_s is 'First delay before a drained gang is admitted again; doubles with each miss.';
comment on column gangq.settings.gang_backoff_max_s is 'Longest such delay.';
comment on column gangq.settings.checkpoint_bytes is 'Largest checkpoint stored in the database; larger ones belong in shared storage, only their address here.';
comment on column gangq.settings.log_bytes is 'Largest log kept per attempt.';
comment on column gangq.settings.retention_short is 'How long history of class short is kept.';
comment on column gangq.settings.retention_long is 'How long history of class long, and events, are kept.';
comment on column gangq.settings.incarnation_retention is 'How long ended incarnations stay listed, and finished jobs know where they ran.';
comment on column gangq.settings.max_stops is 'Times a job may be handed back or told to stop through no fault of its own before it is failed: even those must not loop.';

create table gangq.queues_table (
  name text primary key check (name <> '' and length(name) <= 100),
  paused boolean not null default false,
  policy text not null default 'largest_first' check (policy in ('largest_first', 'fifo')),
  max_attempts smallint not null default 3 check (max_attempts between 1 and 1000),
  max_crashes smallint not null default 3 check (max_crashes between 1 and 1000),
  max_trips smallint not null default 3 check (max_trips between 1 and 1000),
  backoff_s real not null default 5 check (backoff_s >= 0 and backoff_s <= 1e7),
  backoff_max_s real not null default 600 check (backoff_max_s >= 0 and backoff_max_s <= 1e7),
  budget_s real check (budget_s > 0 and budget_s <= 1e9),
  max_payload_bytes integer not null default 1048576 check (max_payload_bytes > 0),
  retention_done text not null default 'short' check (retention_done in ('short', 'long', 'forever')),
  retention_failed text not null default 'long' check (retention_failed in ('short', 'long', 'forever')),
  created_at timestamptz not null default clock_timestamp()
);
insert into gangq.queues_table (name) values ('default');
comment on table gangq.queues_table is 'Queues and the defaults their jobs inherit at submit. Read the view queues; change with gangq.set_queue().';
comment on column gangq.queues_table.name is 'The queue''s name.';
comment on column gangq.queues_table.paused is 'True: nothing new starts from this queue; running work goes on.';
comment on column gangq.queues_table.policy is 'Order of gangs of one priority: largest_first (size, then age) or fifo (age).';
comment on column gangq.queues_table.max_attempts is 'Attempts a job may spend before it is failed.';
comment on column gangq.queues_table.max_crashes is 'Times a job may lose its worker before it is failed.';
comment on column gangq.queues_table.max_trips is 'Watchdog trips a job may cause before it is failed.';
comment on column gangq.queues_table.backoff_s is 'First delay before a failed job is tried again; doubles, with jitter.';
comment on column gangq.queues_table.backoff_max_s is 'Longest such delay.';
comment on column gangq.queues_table.budget_s is 'Wall-clock budget of a job, seconds; null: the worker''s default.';
comment on column gangq.queues_table.max_payload_bytes is 'Largest payload or result.';
comment on column gangq.queues_table.retention_done is 'Retention class of done jobs: short, long or forever.';
comment on column gangq.queues_table.retention_failed is 'Retention class of failed and cancelled jobs.';
comment on column gangq.queues_table.created_at is 'When the queue was made.';

create table gangq.shapes (
  id integer generated always as identity primary key,
  queue text not null references gangq.queues_table (name),
  task text not null check (task <> '' and length(task) <= 200),
  gpus smallint not null check (gpus between 0 and 1024),
  vram_mb integer not null check (vram_mb >= 0 and (vram_mb = 0 or gpus > 0)),
  memory_mb bigint not null check (memory_mb >= 0),
  cpus numeric(10, 3) not null check (cpus >= 0),
  labels jsonb not null check (jsonb_typeof(labels) = 'object'),
  plain boolean not null generated always as (gpus = 0 and memory_mb = 0 and cpus = 0) stored
);
create index shapes_requirement on gangq.shapes (queue, task, gpus, vram_mb, memory_mb, cpus);
comment on table gangq.shapes is
  'Every distinct requirement ever submitted, interned: a claim matches shapes, never single jobs. Not unique on '
  'purpose: two transactions that meet a new shape at once may both add it, so that neither waits for the other.';
comment on column gangq.shapes.id is 'Key.';
comment on column gangq.shapes.queue is 'Queue the job waits in.';
comment on column gangq.shapes.task is 'Task to run; "command" for a command.';
comment on column gangq.shapes.gpus is 'Whole devices needed.';
comment on column gangq.shapes.vram_mb is 'Device memory needed on each of them, MiB.';
comment on column gangq.shapes.memory_mb is 'Host memory needed, MiB.';
comment on column gangq.shapes.cpus is 'CPUs needed; may be fractional.';
comment on column gangq.shapes.labels is 'Labels the worker must carry with exactly these values.';
comment on column gangq.shapes.plain is 'Needs a slot and nothing else.';

-- Workers --------------------------------------------------------------------------------------------------------

create table gangq.incarnations (
  id bigint primary key,
  name text not null check (name <> '' and length(name) <= 200),
  host text not null check (host <> '' and length(host) <= 200),
  address text not null,
  kind text not null check (kind in ('inline', 'command')),
  state text not null default 'live' check (state in ('live', 'draining', 'retired', 'dead')),
  slots integer not null check (slots between 1 and 10000 and (slots = 1 or kind = 'command')),
  prefetch integer not null default 1 check (prefetch between 1 and 1000),
  memory_mb bigint not null check (memory_mb >= 0),
  cpus numeric(10, 3) not null check (cpus >= 0),
  queues text[] not null,
  tasks text[],
  labels jsonb not null default '{}' check (jsonb_typeof(labels) = 'object'),
  boot_id text,
  pid bigint,
  identity jsonb not null default '{}',
  registered_at timestamptz not null,
  ended_at timestamptz,
  flagged_at timestamptz,
  passed_over_until timestamptz,
  quarantined text,
  check ((state in ('retired', 'dead')) = (ended_at is not null))
);
create unique index incarnations_live_name on gangq.incarnations (name) where ended_at is null;
create index incarnations_name on gangq.incarnations (name, id);
comment on table gangq.incarnations is 'One row per start of a worker. Every word a worker says carries its incarnation.';
comment on column gangq.incarnations.id is 'The incarnation: never reused, so a restarted worker cannot be mistaken for its predecessor.';
comment on column gangq.incarnations.name is 'The worker''s name; one live incarnation per name.';
comment on column gangq.incarnations.host is 'The host it runs on.';
comment on column gangq.incarnations.address is 'Where other members reach this host.';
comment on column gangq.incarnations.kind is 'inline (one slot) or command (any number of slots).';
comment on column gangq.incarnations.state is 'live, draining (takes nothing new), retired (stopped as asked) or dead.';
comment on column gangq.incarnations.slots is 'Jobs it runs at once.';
comment on column gangq.incarnations.prefetch is 'Plain jobs it may hold for one slot and run one after another.';
comment on column gangq.incarnations.memory_mb is 'Host memory it offers, MiB.';
comment on column gangq.incarnations.cpus is 'CPUs it offers.';
comment on column gangq.incarnations.queues is 'Queues it serves.';
comment on column gangq.incarnations.tasks is 'Tasks it can run; null: any.';
comment on column gangq.incarnations.labels is 'Labels it carries.';
comment on column gangq.incarnations.boot_id is 'Boot of the host, for proof of death.';
comment on column gangq.incarnations.pid is 'Its process, for people and for proof of death.';
comment on column gangq.incarnations.identity is 'What its next incarnation needs to prove this one dead (start time, pid namespace).';
comment on column gangq.incarnations.registered_at is 'When it registered.';
comment on column gangq.incarnations.ended_at is 'When it retired or was judged dead.';
comment on column gangq.incarnations.flagged_at is 'When its silence was noticed; null while it is heard.';
comment on column gangq.incarnations.passed_over_until is 'Not considered for placement before this time.';
comment on column gangq.incarnations.quarantined is 'Why an operator or a fault keeps it from taking work; null: it may.';

create table gangq.leases (
  incarnation bigint primary key references gangq.incarnations (id) on delete cascade,
  expires_at timestamptz not null,
  renewed_at timestamptz not null,
  lease_s real not null check (lease_s > 0 and lease_s <= 1e7)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on table gangq.leases is 'Until when each incarnation''s work is its own. Rewritten by heartbeats: indexed by its key only, so updates stay HOT.';
comment on column gangq.leases.incarnation is 'Whose lease.';
comment on column gangq.leases.expires_at is 'Nothing of this worker is re-queued by the clock before then.';
comment on column gangq.leases.renewed_at is 'Last heartbeat.';
comment on column gangq.leases.lease_s is 'Length of each renewal, seconds.';

create table gangq.sleepers (
  incarnation bigint primary key references gangq.incarnations (id) on delete cascade,
  queues text[] not null,
  since timestamptz not null
);
comment on table gangq.sleepers is 'Workers waiting for a wake-up. A commit that notifies takes a global lock, so submit notifies only these.';
comment on column gangq.sleepers.incarnation is 'Who sleeps.';
comment on column gangq.sleepers.queues is 'Queues it would serve.';
comment on column gangq.sleepers.since is 'Since when.';

create table gangq.device_registry (
  id bigint generated always as identity primary key,
  uuid text not null unique check (uuid <> ''),
  host text not null,
  index integer not null check (index >= 0),
  vram_mb integer not null check (vram_mb >= 0),
  model text not null default '',
  source text not null check (source in ('nvml', 'amdsmi', 'declared')),
  offered_by bigint references gangq.incarnations (id) on delete set null,
  seen_at timestamptz not null
);
create index device_registry_offered_by on gangq.device_registry (offered_by);
comment on table gangq.device_registry is 'One row per physical device (or MIG instance) ever offered. Read the view devices.';
comment on column gangq.device_registry.id is 'Key.';
comment on column gangq.device_registry.uuid is 'The driver''s UUID; for declared devices one made from host, worker and index.';
comment on column gangq.device_registry.host is 'Host it sits in.';
comment on column gangq.device_registry.index is 'Index on that host as its worker sees it.';
comment on column gangq.device_registry.vram_mb is 'Memory, MiB.';
comment on column gangq.device_registry.model is 'Model name.';
comment on column gangq.device_registry.source is 'nvml, amdsmi, or declared by the operator.';
comment on column gangq.device_registry.offered_by is 'Incarnation whose jobs may use it; null: nobody.';
comment on column gangq.device_registry.seen_at is 'When it was last registered.';

create table gangq.device_claimants (
  device_id bigint not null references gangq.device_registry (id) on delete cascade,
  incarnation bigint not null references gangq.incarnations (id) on delete cascade,
  primary key (device_id, incarnation)
);
create index device_claimants_incarnation on gangq.device_claimants (incarnation);
comment on table gangq.device_claimants is 'Which live incarnations would offer a device; one of them does (device_registry.offered_by).';
comment on column gangq.device_claimants.device_id is 'The device.';
comment on column gangq.device_claimants.incarnation is 'Who sees it.';

-- Jobs and gangs -------------------------------------------------------------------------------------------------

create table gangq.live_gangs (
  id bigint primary key,
  order_key bigint not null,
  shape_id integer not null references gangq.shapes (id),
  size integer not null check (size between 1 and 100000),
  epoch integer not null default 0 check (epoch >= 0),
  priority smallint not null check (priority between -1000 and 1000),
  attempts smallint not null default 0,
  max_attempts smallint not null,
  crashes smallint not null default 0,
  max_crashes smallint not null,
  trips smallint not null default 0,
  max_trips smallint not null,
  placement_misses integer not null default 0,
  never_started integer not null default 0,
  preemptions integer not null default 0,
  state text not null check (state in ('waiting', 'blocked', 'reserved', 'running', 'draining', 'done', 'failed', 'cancelled')),
  checkpoint_mode text not null check (checkpoint_mode in ('each', 'rank0')),
  drain_cause text,
  drain_trigger bigint,
  cancelling boolean not null default false,
  restore_step bigint,
  claim_deadline_s real not null,
  master_host text,
  master_addr text,
  master_port integer,
  submitted_at timestamptz not null,
  not_before timestamptz,
  reserved_at timestamptz,
  deadline_at timestamptz,
  go_at timestamptz,
  drain_started_at timestamptz,
  name text,
  note text,
  submitter text not null,
  check ((state = 'draining') = (drain_started_at is not null)),
  check (state <> 'running' or go_at is not null),
  check (state <> 'reserved' or (deadline_at is not null and go_at is null)),
  check (state not in ('blocked', 'waiting') or (deadline_at is null and go_at is null and master_port is null))
) with (fillfactor = 70);
create index live_gangs_blocked on gangq.live_gangs (shape_id, size, order_key) where state = 'blocked';
create index live_gangs_backoff on gangq.live_gangs (not_before) where state = 'blocked' and not_before is not null;
create index live_gangs_placed on gangq.live_gangs (id) where state in ('reserved', 'draining');
create unique index live_gangs_master on gangq.live_gangs (master_host, master_port) where master_port is not null;
comment on table gangq.live_gangs is 'Gangs that have not ended. Read the view gangs.';
comment on column gangq.live_gangs.id is 'The gang.';
comment on column gangq.live_gangs.order_key is 'Priority and age in one ascending key, comparable with live_jobs.order_key.';
comment on column gangq.live_gangs.shape_id is 'What each member needs.';
comment on column gangq.live_gangs.size is 'Members, and the world size.';
comment on column gangq.live_gangs.epoch is 'Reservations so far; each member of one epoch started together.';
comment on column gangq.live_gangs.priority is '-1000 to 1000, higher first.';
comment on column gangq.live_gangs.attempts is 'Launches that ended because a member failed, whichever: rotating culprits cannot loop a gang.';
comment on column gangq.live_gangs.max_attempts is 'How many such launches it may spend.';
comment on column gangq.live_gangs.crashes is 'Launches that ended because a member''s worker was lost.';
comment on column gangq.live_gangs.max_crashes is 'How many of those it survives.';
comment on column gangq.live_gangs.trips is 'Launches that ended because a member tripped a watchdog.';
comment on column gangq.live_gangs.max_trips is 'How many of those it survives.';
comment on column gangq.live_gangs.placement_misses is 'Reservations that were not claimed in time; nobody is charged.';
comment on column gangq.live_gangs.never_started is 'Drains at the start barrier; nobody is charged.';
comment on column gangq.live_gangs.preemptions is 'Times it was told to stop for somebody else.';
comment on column gangq.live_gangs.state is 'waiting, blocked, reserved, running, draining, done, failed, cancelled.';
comment on column gangq.live_gangs.checkpoint_mode is 'each: a step counts when every member saved it; rank0: rank 0''s bytes serve all.';
comment on column gangq.live_gangs.drain_cause is 'Why the last drain began.';
comment on column gangq.live_gangs.drain_trigger is 'The member that caused it; null when none did.';
comment on column gangq.live_gangs.cancelling is 'True: the drain ends in cancelled.';
comment on column gangq.live_gangs.restore_step is 'Checkpoint step every member of this epoch restores; null: from the start.';
comment on column gangq.live_gangs.claim_deadline_s is 'Seconds its reserved members may wait to be claimed.';
comment on column gangq.live_gangs.master_host is 'Host of rank 0 in this epoch.';
comment on column gangq.live_gangs.master_addr is 'Address where members find rank 0.';
comment on column gangq.live_gangs.master_port is 'Port that rank 0''s worker holds for the rendezvous.';
comment on column gangq.live_gangs.submitted_at is 'When it was submitted.';
comment on column gangq.live_gangs.not_before is 'Backing off until then.';
comment on column gangq.live_gangs.reserved_at is 'When this epoch was reserved.';
comment on column gangq.live_gangs.deadline_at is 'Until when its members must be claimed.';
comment on column gangq.live_gangs.go_at is 'When the start barrier opened; null: nobody''s code has begun.';
comment on column gangq.live_gangs.drain_started_at is 'When the present drain began.';
comment on column gangq.live_gangs.name is 'A name for people.';
comment on column gangq.live_gangs.note is 'Set at submit when no registered worker set could hold it: why.';
comment on column gangq.live_gangs.submitter is 'The login that submitted it.';

create table gangq.live_jobs (
  id bigint primary key,
  order_key bigint not null,
  token bigint,
  final_token bigint,
  incarnation bigint,
  ran_on bigint,
  gang_id bigint,
  submitted_at timestamptz not null,
  due_at timestamptz,
  claimed_at timestamptz,
  deadline_at timestamptz,
  told_at timestamptz,
  finished_at timestamptz,
  request_id uuid,
  shape_id integer not null,
  rank integer,
  budget_s real,
  waits_on integer not null default 0,
  priority smallint not null check (priority between -1000 and 1000),
  attempts smallint not null default 0 check (attempts >= 0),
  max_attempts smallint not null,
  crashes smallint not null default 0,
  max_crashes smallint not null,
  trips smallint not null default 0,
  max_trips smallint not null,
  stops smallint not null default 0,
  state text not null,
  stop_reason text,
  submitter text not null,
  payload jsonb,
  result jsonb,
  error jsonb,
  constraint live_jobs_state check (
    case state
      when 'pending' then incarnation is null and token is null and gang_id is null
      when 'running' then incarnation is not null and token is not null and claimed_at is not null
      when 'scheduled' then due_at is not null and incarnation is null and token is null and gang_id is null
      when 'waiting' then incarnation is null and token is null and waits_on > 0
      when 'blocked' then gang_id is not null and incarnation is null and token is null and deadline_at is null
      when 'reserved' then gang_id is not null and incarnation is not null and deadline_at is not null and token is null
      when 'preempting' then incarnation is not null and token is not null and told_at is not null and stop_reason is not null
      when 'preempted' then gang_id is not null and incarnation is null and token is null
      when 'done' then gang_id is not null and finished_at is not null and token is null and incarnation is null
      when 'failed' then gang_id is not null and finished_at is not null and token is null and incarnation is null
      when 'cancelled' then gang_id is not null and finished_at is not null and token is null and incarnation is null
      else false
    end),
  constraint live_jobs_rank check ((gang_id is null) = (rank is null))
) with (
  fillfactor = 85, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2
);
create index live_jobs_claim on gangq.live_jobs (shape_id, order_key) where state = 'pending';
create index live_jobs_held on gangq.live_jobs (incarnation) where incarnation is not null;
create index live_jobs_told on gangq.live_jobs (told_at) where state = 'preempting';
create index live_jobs_due on gangq.live_jobs (due_at) where state = 'scheduled';
create unique index live_jobs_member on gangq.live_jobs (gang_id, rank) where gang_id is not null;
comment on table gangq.live_jobs is 'Jobs that have not ended, and members of gangs that have not. Read the view jobs.';
comment on column gangq.live_jobs.id is 'The job.';
comment on column gangq.live_jobs.order_key is 'Priority and first-in-first-out position in one ascending key.';
comment on column gangq.live_jobs.token is 'Fencing token of the present claim; null unless running or preempting.';
comment on column gangq.live_jobs.final_token is 'Token of the last attempt that ended: its final call may be repeated.';
comment on column gangq.live_jobs.incarnation is 'Where it is placed: set while reserved, running or preempting.';
comment on column gangq.live_jobs.ran_on is 'Members: where the last attempt was claimed; it stays when the placement ends.';
comment on column gangq.live_jobs.gang_id is 'Its gang; null for a solo job.';
comment on column gangq.live_jobs.submitted_at is 'When it was submitted.';
comment on column gangq.live_jobs.due_at is 'Not before then.';
comment on column gangq.live_jobs.claimed_at is 'When the present or last attempt was claimed.';
comment on column gangq.live_jobs.deadline_at is 'Reserved: to be claimed before then.';
comment on column gangq.live_jobs.told_at is 'When it was told to stop.';
comment on column gangq.live_jobs.finished_at is 'When it ended.';
comment on column gangq.live_jobs.request_id is 'The claim call that took it: the same id returns the same claims.';
comment on column gangq.live_jobs.shape_id is 'What it needs.';
comment on column gangq.live_jobs.rank is 'Its rank in the gang, from 0.';
comment on column gangq.live_jobs.budget_s is 'Wall-clock budget, seconds; null: the worker''s default.';
comment on column gangq.live_jobs.waits_on is 'Jobs that must be done first.';
comment on column gangq.live_jobs.priority is '-1000 to 1000, higher first.';
comment on column gangq.live_jobs.attempts is 'Attempts charged; counted at claim.';
comment on column gangq.live_jobs.max_attempts is 'How many it may spend.';
comment on column gangq.live_jobs.crashes is 'Times its worker was lost.';
comment on column gangq.live_jobs.max_crashes is 'How often that may happen.';
comment on column gangq.live_jobs.trips is 'Watchdog trips.';
comment on column gangq.live_jobs.max_trips is 'How often that may happen.';
comment on column gangq.live_jobs.stops is 'Times it was handed back or told to stop through no fault of its own.';
comment on column gangq.live_jobs.state is 'scheduled, waiting, blocked, pending, reserved, running, preempting, preempted, done, failed, cancelled.';
comment on column gangq.live_jobs.stop_reason is 'Why it was told to stop: drain, cancel or preempt.';
comment on column gangq.live_jobs.submitter is 'The login that submitted it.';
comment on column gangq.live_jobs.payload is 'Arguments for the task.';
comment on column gangq.live_jobs.result is 'What a done member returned.';
comment on column gangq.live_jobs.error is 'The last error: type, message, traceback, host, log tail.';

create table gangq.transitions (
  old_state text not null,
  new_state text not null,
  verb text not null,
  role text not null,
  charges text not null,
  primary key (old_state, new_state, verb)
);
comment on table gangq.transitions is 'Every legal change of a job''s state. old_state "" is birth; ends in done, failed and cancelled leave for history.';
comment on column gangq.transitions.old_state is 'From; empty for a new job.';
comment on column gangq.transitions.new_state is 'To.';
comment on column gangq.transitions.verb is 'The function that makes it.';
comment on column gangq.transitions.role is 'The role that may call it.';
comment on column gangq.transitions.charges is 'What it costs: attempt, crash, trip, stop, refund or nothing.';

create table gangq.dependencies (
  job_id bigint not null,
  on_job_id bigint not null,
  outcome text check (outcome in ('done', 'failed', 'cancelled')),
  primary key (on_job_id, job_id)
);
create index dependencies_job on gangq.dependencies (job_id);
create index dependencies_settled on gangq.dependencies (job_id) where outcome is not null;
comment on table gangq.dependencies is 'Which live job waits for which. No foreign keys: their row triggers would cost every finished job a query.';
comment on column gangq.dependencies.outcome is 'How the awaited job ended; promote_due then takes the row away.';
comment on column gangq.dependencies.job_id is 'The one that waits.';
comment on column gangq.dependencies.on_job_id is 'The one it waits for.';

create table gangq.unsettled (
  job_id bigint primary key
);
comment on table gangq.unsettled is 'Jobs that ended while somebody held a row of their dependents, or in a transaction that could not see them all: promote_due tells those.';
comment on column gangq.unsettled.job_id is 'The job that ended.';

create table gangq.device_holds (
  device_id bigint primary key references gangq.device_registry (id),
  kind text not null check (kind in ('job', 'quarantine')),
  job_id bigint,
  token bigint,
  reason text,
  since timestamptz not null,
  check ((kind = 'job') = (job_id is not null)),
  check ((kind = 'quarantine') = (reason is not null))
);
create index device_holds_job on gangq.device_holds (job_id) where job_id is not null;
comment on table gangq.device_holds is 'Who holds each device. The key makes it one holder at most.';
comment on column gangq.device_holds.device_id is 'The device.';
comment on column gangq.device_holds.kind is 'job, or quarantine.';
comment on column gangq.device_holds.job_id is 'The job that holds it, from reservation or claim until it is proven stopped.';
comment on column gangq.device_holds.token is 'That job''s claim; null while only reserved.';
comment on column gangq.device_holds.reason is 'Why it is quarantined.';
comment on column gangq.device_holds.since is 'Since when.';

create table gangq.earmarks (
  incarnation bigint primary key references gangq.incarnations (id) on delete cascade,
  gang_id bigint not null references gangq.live_gangs (id) on delete cascade,
  order_key bigint not null
);
create index earmarks_gang on gangq.earmarks (gang_id);
comment on table gangq.earmarks is 'Workers kept for the first gang that waits: they take only jobs that come before it, so a stream of small jobs cannot starve it.';
comment on column gangq.earmarks.incarnation is 'The worker.';
comment on column gangq.earmarks.gang_id is 'The gang it is kept for.';
comment on column gangq.earmarks.order_key is 'That gang''s place in the order.';

create table gangq.progress (
  job_id bigint primary key,
  token bigint not null,
  beat_at timestamptz not null,
  data jsonb not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on table gangq.progress is 'The last beat of each running job that beats; brought by heartbeats.';
comment on column gangq.progress.job_id is 'The job.';
comment on column gangq.progress.token is 'Its claim.';
comment on column gangq.progress.beat_at is 'When the beat reached the database.';
comment on column gangq.progress.data is 'step, total, phase and whatever the handler reported.';

create table gangq.checkpoints (
  job_id bigint not null,
  step bigint not null check (step >= 0),
  gang_id bigint,
  token bigint not null,
  saved_at timestamptz not null,
  data bytea not null,
  primary key (job_id, step)
);
create index checkpoints_gang on gangq.checkpoints (gang_id, step) where gang_id is not null;
comment on table gangq.checkpoints is 'Saved states. A restore never mixes steps: see live_gangs.checkpoint_mode.';
comment on column gangq.checkpoints.job_id is 'Whose.';
comment on column gangq.checkpoints.step is 'At which step.';
comment on column gangq.checkpoints.gang_id is 'Its gang.';
comment on column gangq.checkpoints.token is 'The claim that saved it.';
comment on column gangq.checkpoints.saved_at is 'When.';
comment on column gangq.checkpoints.data is 'Opaque bytes.';

-- What has ended, and what happened ------------------------------------------------------------------------------

create table gangq.history (
  job_id bigint not null,
  token bigint,
  gang_id bigint,
  submitted_at timestamptz not null,
  claimed_at timestamptz,
  finished_at timestamptz not null,
  incarnation bigint,
  shape_id integer not null,
  rank integer,
  budget_s real,
  priority smallint not null,
  attempts smallint not null,
  max_attempts smallint not null,
  crashes smallint not null,
  max_crashes smallint not null,
  trips smallint not null,
  max_trips smallint not null,
  stops smallint not null,
  state text not null check (state in ('done', 'failed', 'cancelled')),
  retention text not null,
  submitter text not null,
  payload jsonb,
  result jsonb,
  error jsonb
) partition by list (retention);
create index history_job on gangq.history (job_id);
create index history_gang on gangq.history (gang_id, rank) where gang_id is not null;
create table gangq.history_short partition of gangq.history for values in ('short') partition by range (finished_at);
create table gangq.history_long partition of gangq.history for values in ('long') partition by range (finished_at);
create table gangq.history_forever partition of gangq.history for values in ('forever');
create table gangq.history_short_rest partition of gangq.history_short default;
create table gangq.history_long_rest partition of gangq.history_long default;
comment on table gangq.history is 'Jobs that have ended, one row per ending. Append-only; whole days are dropped after their retention.';
comment on table gangq.history_short is 'History of retention class short, by day.';
comment on table gangq.history_long is 'History of retention class long, by day.';
comment on table gangq.history_forever is 'History that is never dropped.';
comment on table gangq.history_short_rest is 'Catches rows of days without a partition, so that finishing a job never fails for want of one.';
comment on table gangq.history_long_rest is 'Catches rows of days without a partition, so that finishing a job never fails for want of one.';
comment on column gangq.history.job_id is 'The job; a retried job has one row per ending.';
comment on column gangq.history.token is 'Token of its last claim; null: never claimed.';
comment on column gangq.history.gang_id is 'Its gang.';
comment on column gangq.history.submitted_at is 'When it was submitted.';
comment on column gangq.history.claimed_at is 'When its last attempt was claimed.';
comment on column gangq.history.finished_at is 'When it ended.';
comment on column gangq.history.incarnation is 'Where its last attempt ran.';
comment on column gangq.history.shape_id is 'What it needed.';
comment on column gangq.history.rank is 'Its rank.';
comment on column gangq.history.budget_s is 'Its wall-clock budget, seconds.';
comment on column gangq.history.priority is 'Its priority.';
comment on column gangq.history.attempts is 'Attempts charged.';
comment on column gangq.history.max_attempts is 'Attempts it could spend.';
comment on column gangq.history.crashes is 'Times its worker was lost.';
comment on column gangq.history.max_crashes is 'How often that could happen.';
comment on column gangq.history.trips is 'Watchdog trips.';
comment on column gangq.history.max_trips is 'How often that could happen.';
comment on column gangq.history.stops is 'Times it was stopped through no fault of its own.';
comment on column gangq.history.state is 'done, failed or cancelled.';
comment on column gangq.history.retention is 'short, long or forever.';
comment on column gangq.history.submitter is 'The login that submitted it.';
comment on column gangq.history.payload is 'Arguments.';
comment on column gangq.history.result is 'What it returned.';
comment on column gangq.history.error is 'The last error.';

create table gangq.gang_history (
  gang_id bigint not null,
  finished_at timestamptz not null,
  submitted_at timestamptz not null,
  shape_id integer not null,
  size integer not null,
  epoch integer not null,
  priority smallint not null,
  attempts smallint not null,
  max_attempts smallint not null,
  crashes smallint not null,
  max_crashes smallint not null,
  trips smallint not null,
  max_trips smallint not null,
  placement_misses integer not null,
  never_started integer not null,
  preemptions integer not null,
  state text not null check (state in ('done', 'failed', 'cancelled')),
  retention text not null,
  checkpoint_mode text not null,
  claim_deadline_s real not null,
  name text,
  reason text,
  submitter text not null
) partition by list (retention);
create index gang_history_gang on gangq.gang_history (gang_id);
create table gangq.gang_history_short partition of gangq.gang_history for values in ('short') partition by range (finished_at);
create table gangq.gang_history_long partition of gangq.gang_history for values in ('long') partition by range (finished_at);
create table gangq.gang_history_forever partition of gangq.gang_history for values in ('forever');
create table gangq.gang_history_short_rest partition of gangq.gang_history_short default;
create table gangq.gang_history_long_rest partition of gangq.gang_history_long default;
comment on table gangq.gang_history is 'Gangs that have ended. Append-only; whole days are dropped after their retention.';
comment on table gangq.gang_history_short is 'Gang history of retention class short, by day.';
comment on table gangq.gang_history_long is 'Gang history of retention class long, by day.';
comment on table gangq.gang_history_forever is 'Gang history that is never dropped.';
comment on table gangq.gang_history_short_rest is 'Catches rows of days without a partition.';
comment on table gangq.gang_history_long_rest is 'Catches rows of days without a partition.';
comment on column gangq.gang_history.gang_id is 'The gang.';
comment on column gangq.gang_history.finished_at is 'When it ended.';
comment on column gangq.gang_history.submitted_at is 'When it was submitted.';
comment on column gangq.gang_history.shape_id is 'What each member needed.';
comment on column gangq.gang_history.size is 'Members.';
comment on column gangq.gang_history.epoch is 'Reservations it took.';
comment on column gangq.gang_history.priority is 'Its priority.';
comment on column gangq.gang_history.attempts is 'Launches charged.';
comment on column gangq.gang_history.max_attempts is 'Launches it could spend.';
comment on column gangq.gang_history.crashes is 'Launches lost with a worker.';
comment on column gangq.gang_history.max_crashes is 'How many of those it could survive.';
comment on column gangq.gang_history.trips is 'Launches lost to a watchdog trip.';
comment on column gangq.gang_history.max_trips is 'How many of those it could survive.';
comment on column gangq.gang_history.placement_misses is 'Reservations not claimed in time.';
comment on column gangq.gang_history.never_started is 'Drains at the start barrier.';
comment on column gangq.gang_history.preemptions is 'Times it was told to stop for somebody else.';
comment on column gangq.gang_history.state is 'done, failed or cancelled.';
comment on column gangq.gang_history.retention is 'short, long or forever.';
comment on column gangq.gang_history.checkpoint_mode is 'each or rank0.';
comment on column gangq.gang_history.claim_deadline_s is 'Seconds its reserved members could wait to be claimed.';
comment on column gangq.gang_history.name is 'A name for people.';
comment on column gangq.gang_history.reason is 'Why it failed or was cancelled.';
comment on column gangq.gang_history.submitter is 'The login that submitted it.';

create table gangq.retried (
  job_id bigint,
  gang_id bigint,
  finished_at timestamptz not null,
  check ((job_id is null) <> (gang_id is null)),
  unique (job_id, finished_at),
  unique (gang_id, finished_at)
);
comment on table gangq.retried is 'Endings that a retry has overtaken. Kept apart so that history stays append-only and the views need not look for newer rows.';
comment on column gangq.retried.job_id is 'The job retried.';
comment on column gangq.retried.gang_id is 'The gang retried.';
comment on column gangq.retried.finished_at is 'Which of its endings was overtaken.';

create table gangq.events (
  id bigint generated by default as identity,
  at timestamptz not null,
  kind text not null,
  gang_id bigint,
  epoch integer,
  job_id bigint,
  token bigint,
  incarnation bigint,
  worker text,
  reason text,
  data jsonb
) partition by range (at);
create index events_gang on gangq.events (gang_id, id) where gang_id is not null;
create index events_job on gangq.events (job_id, id) where job_id is not null;
create index events_at on gangq.events (at);
create table gangq.events_rest partition of gangq.events default;
comment on table gangq.events is 'Every abnormal transition and every step of a gang, written in the transaction that made it. Append-only.';
comment on table gangq.events_rest is 'Catches rows of days without a partition.';
comment on column gangq.events.id is 'Order of writing.';
comment on column gangq.events.at is 'When.';
comment on column gangq.events.kind is 'What happened: reserve, rollback, preempt, drain, trip, reap, flag, quarantine, ...';
comment on column gangq.events.gang_id is 'The gang.';
comment on column gangq.events.epoch is 'Its epoch.';
comment on column gangq.events.job_id is 'The job.';
comment on column gangq.events.token is 'Its claim.';
comment on column gangq.events.incarnation is 'The worker''s incarnation.';
comment on column gangq.events.worker is 'The worker''s name.';
comment on column gangq.events.reason is 'Why, for people.';
comment on column gangq.events.data is 'Numbers and evidence.';

create table gangq.logs (
  job_id bigint not null,
  token bigint not null,
  seq integer not null check (seq >= 0),
  at timestamptz not null,
  chunk text not null
) partition by range (at);
create index logs_job on gangq.logs (job_id, token, seq);
create table gangq.logs_rest partition of gangq.logs default;
comment on table gangq.logs is 'Output of commands, bounded per attempt. gangq logs shows it.';
comment on table gangq.logs_rest is 'Catches rows of days without a partition.';
comment on column gangq.logs.job_id is 'The job.';
comment on column gangq.logs.token is 'The attempt.';
comment on column gangq.logs.seq is 'Order within the attempt.';
comment on column gangq.logs.at is 'When it reached the database.';
comment on column gangq.logs.chunk is 'Text; undecodable bytes are replaced.';

create table gangq.tick_state (
  singleton boolean primary key default true check (singleton),
  last_at timestamptz,
  server_started_at timestamptz,
  timeline text,
  outage_ended_at timestamptz,
  partitions_checked_at timestamptz
) with (fillfactor = 50);
insert into gangq.tick_state default values;
comment on table gangq.tick_state is 'What the last tick saw; one row. An outage since then gives every lease one full period before it is judged.';
comment on column gangq.tick_state.singleton is 'Always true: there is one row.';
comment on column gangq.tick_state.last_at is 'When the last tick ran.';
comment on column gangq.tick_state.server_started_at is 'When the server it ran on had started.';
comment on column gangq.tick_state.timeline is 'The server''s timeline: changes at a failover.';
comment on column gangq.tick_state.outage_ended_at is 'When the last outage was seen to be over; leases are judged from here.';
comment on column gangq.tick_state.partitions_checked_at is 'When partitions were last made and dropped.';
