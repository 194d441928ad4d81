-- gangq: the tables.
--
-- A job's life. submit writes one narrow row into live_jobs. A single job is pending until a
-- worker's claim makes it running; a gang's members are blocked until all of them are reserved at
-- once on workers that fit. A job that ends leaves live_jobs for history in the same statement, so
-- no index of the hot table carries finished jobs. Members leave together, with their gang.
--
-- Who owns what. Each start of a worker is an incarnation: one row in incarnations (what it offers)
-- and one in leases (until when its work is its own). Heartbeats rewrite the lease alone, which has
-- no index but its key, and no verb of jobs locks it. Each claim draws a token that every later
-- word about the attempt carries; an old token changes nothing.
--
-- What a job needs is interned in shapes: a claim asks which few shapes fit and takes their heads
-- from one partial index, without a look at jobs that do not fit.
--
-- Lock order, everywhere: gangs by id, jobs by id, then worker rows by id; after a worker row, jobs
-- only with skip locked. Verbs that take capacity (claim, reserve_gang) lock the worker row, count,
-- and take; those that give it back (complete, fail, ack, rollback) never touch it.
--
-- Reading this file. A comment beside or right above a table, a column or a domain is its comment
-- in the database too. Tables whose rows come and go are vacuumed by the number of dead rows; those
-- whose rows are rewritten keep room for that on each page. A migration is applied once, in order,
-- and recorded with its checksum; functions, views, triggers and grants are in the numbered files
-- beside this folder and are rebuilt as a whole.

create schema gangq;
comment on schema gangq is
  'A durable job queue for work that occupies GPUs. Start with the views: jobs, gangs, workers, '
  'devices, waiting, timeline, drains, capacity, violations. Every change goes through a function; '
  'no table is written directly.';

create sequence gangq.job_ids as bigint;
create sequence gangq.gang_ids as bigint;
create sequence gangq.incarnation_ids as bigint;
create sequence gangq.tokens as bigint;
create sequence gangq.positions as bigint;
comment on sequence gangq.job_ids is 'Ids of jobs; a retried job keeps its id.';
comment on sequence gangq.gang_ids is 'Ids of gangs; a retried gang keeps its id.';
comment on sequence gangq.incarnation_ids is 'Ids of worker incarnations, never reused.';
comment on sequence gangq.tokens is
  'High part of fencing tokens; 16 random low bits make a token unrepeatable even when a failover '
  'loses this sequence''s tail.';
comment on sequence gangq.positions is 'First-in-first-out positions within a priority.';

-- What numbers and texts may be. Settings, options, roles and resources are rows of these (see
-- gangq.read_options); the comment of the one that a value breaks is the hint of the error.

-- Seconds: more than 0 and at most 1e7.
create domain gangq.seconds as real check (value > 0 and value <= 1e7);
-- Seconds: 0 or more and at most 1e7.
create domain gangq.delay as real check (value >= 0 and value <= 1e7);
-- Seconds: more than 0 and 1e9 at most, more than thirty years; null: the default.
create domain gangq.budget as real check (value > 0 and value <= 1e9);
-- A share: more than 0 and at most 1.
create domain gangq.share as real check (value > 0 and value <= 1);
-- A weight: more than 0 and at most 1e6.
create domain gangq.weight as real check (value > 0 and value <= 1e6);
-- A whole number from 1 to 1000; null: the default.
create domain gangq.few as smallint check (value between 1 and 1000);
create domain gangq.times as smallint check (value > 0); -- A whole number from 1 to 32767.
-- A whole number from 0 to 1000.
create domain gangq.up_to_1000 as smallint check (value between 0 and 1000);
-- A whole number from 0 to 64.
create domain gangq.planned_starts as smallint check (value between 0 and 64);
-- A whole number from 1 to 1000000.
create domain gangq.shapes_per_day as integer check (value between 1 and 1000000);
create domain gangq.bytes as integer check (value > 0); -- A number of bytes, more than 0.
-- A whole number from 1 to 100000.
create domain gangq.members as integer check (value between 1 and 100000);
-- A whole number, 0 or more; null: no limit.
create domain gangq.count as integer check (value >= 0);
-- W3C trace context: "00-<32 hexadecimal digits>-<16>-<2>", as OpenTelemetry has it.
create domain gangq.traceparent as text
  check (value ~ '^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$');
-- So many starts in a period of s, m, h or d: 10/1m, 100/h; null: no limit.
create domain gangq.rate as text check (value ~ '^[1-9][0-9]{0,5}/([1-9][0-9]{0,4})?[smhd]$');
-- -1000 to 1000; higher runs first, and the default is 0.
create domain gangq.priority as integer check (value between -1000 and 1000);
-- 0 to 1024 whole devices, never shared; a MIG instance counts as a device.
create domain gangq.gpus as integer check (value between 0 and 1024);
create domain gangq.vram_mb as integer check (value >= 0); -- MiB needed on each device, 0 or more.
-- MiB, 0 or more and 1e12 at most.
create domain gangq.memory_mb as bigint check (value between 0 and 1000000000000);
-- 0 or more and 9999999 at most; 0.5 is half a CPU.
create domain gangq.cpus as numeric check (value between 0 and 9999999);
-- A number, 0 or more; leave it out for no limit.
create domain gangq.amount as numeric check (value between 0 and 1e15);
-- A whole number, 0 or more; leave it out for no limit.
create domain gangq.whole as numeric check (value between 0 and 1e15 and value = trunc(value));
-- A text of 1 to 200 characters.
create domain gangq.name as text check (value <> '' and length(value) <= 200);
-- 1 to 100 letters, digits and . _ @ : - (not first).
create domain gangq.target_name as text check (value ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,99}$');
-- A text of 1 to 100 characters.
create domain gangq.role_name as text check (value <> '' and length(value) <= 100);
-- A JSON object; labels are {"gpu": "h100"}, each with one value.
create domain gangq.object as jsonb check (jsonb_typeof(value) = 'object');
-- priority, fifo, fair or largest_first.
create domain gangq.policy as text check (value in ('priority', 'fifo', 'fair', 'largest_first'));
create domain gangq.others as text check (value in ('owner', 'shared')); -- owner or shared.
-- skip, last or all.
create domain gangq.catch_up as text check (value in ('skip', 'last', 'all'));
-- A path, as /healthz, at the port of the replica, a URL that begins with http://, or none.
create domain gangq.health as text
  check (value ~ '^((/|http://[^/])[^ ]*|none)$' and length(value) <= 1000);
-- short, long or forever.
create domain gangq.retention_class as text check (value in ('short', 'long', 'forever'));
-- A text like "7 days", 0 to 100 years; a queue's retention_done "forever" has no end.
create domain gangq.kept_for as interval check (value between '0' and '100 years');
-- An array of budget, stall, health, fault and gang.
create domain gangq.watches as text[] check (value <@ '{budget,stall,health,fault,gang}');
-- 1 to 8 levels, host among them, broad to narrow: ["zone", "rack", "host"].
create domain gangq.levels as text[]
  check (cardinality(value) between 1 and 8 and 'host' = any (value));
-- commit, sleepers or never.
create domain gangq.wake as text check (value in ('commit', 'sleepers', 'never'));
-- pack: fewest hosts; spread: most; strict_pack: one host; strict_spread: a host for each
-- member; linked: as pack, all GPUs of each member joined by one NVLink or XGMI.
create domain gangq.strategy as text
  check (value in ('pack', 'spread', 'strict_pack', 'strict_spread', 'linked'));
-- Operators are =, !=, in, notin, exists, absent, <, <=, > and >=.
create domain gangq.operator as text
  check (value in ('=', '!=', 'in', 'notin', 'exists', 'absent', '<', '<=', '>', '>='));
-- restart_gang, restart_member (only the lost one), shrink (the others go on without it) or
-- fail.
create domain gangq.failure_policy as text
  check (value in ('restart_gang', 'restart_member', 'shrink', 'fail'));
-- each: every member saves its own part; rank0: rank 0 saves for all; null: each, and rank0 for
-- an elastic gang.
create domain gangq.checkpoint_mode as text check (value in ('each', 'rank0'));
-- requeue: it backs off if no worker could hold it or its planned start is overdue, else it
-- waits on; hard: it fails; soft: its members run as single jobs; null: as the queue above says,
-- then requeue.
create domain gangq.timeout_style as text check (value in ('requeue', 'hard', 'soft'));

-- Applied migrations, and one row "code" whose checksum stands for all other files.
create table gangq.migrations (
  name text primary key, -- File name without its folder, or "code"
  checksum text not null, -- SHA-256 of what was applied, in hexadecimal
  applied_at timestamptz not null default clock_timestamp() -- When, by the database's clock
);

-- Settings and queues -----------------------------------------------------------------------------

-- Numbers that hold for the whole installation; one row. Change with gangq.configure().
create table gangq.settings (
  singleton boolean primary key default true check (singleton), -- Always true: there is one row
  heartbeat_s gangq.seconds not null default 5, -- Seconds between a worker's heartbeats
  -- The longest outage that running work survives, and the slowest recovery from a lost host
  lease_s gangq.seconds not null default 120,
  -- A worker kills its work this long before its lease ends
  lease_margin_s gangq.delay not null default 10,
  grace_s gangq.delay not null default 15, -- Seconds from SIGTERM to SIGKILL for a job told to stop
  claim_deadline_s gangq.seconds not null default 30, -- Seconds a reserved member waits for a claim
  ack_timeout_s gangq.seconds not null default 45, -- Told to stop and silent so long: not renewed
  -- A worker silent for so long gets nothing new
  candidate_silence_s gangq.seconds not null default 15,
  pass_over_s gangq.delay not null default 60, -- So long after a missed deadline it gets nothing
  flag_after_s gangq.seconds not null default 30, -- Silent so long: flagged; that frees nothing
  tick_s gangq.seconds not null default 1, -- Seconds between safety ticks
  gang_backoff_s gangq.delay not null default 1, -- First delay of a drained gang; doubles each time
  gang_backoff_max_s gangq.delay not null default 300, -- Longest such delay
  -- Levels, broad to narrow: host, and labels of workers, whose values are the domains
  topology gangq.levels not null default '{host}',
  -- How many waiting gangs, in order, get a planned start that others may not delay; 0: none
  reservations gangq.planned_starts not null default 4,
  -- Seconds a gang waits for placement while eligible, where neither it nor its queue says
  placement_timeout_s gangq.seconds not null default 900,
  -- A pass that has told so many to stop for others begins with no further gang; 0: never
  preemptions_per_pass gangq.up_to_1000 not null default 4,
  -- A job whose model a worker has loaded overtakes jobs of its priority that are so much older
  warm_s gangq.delay not null default 10,
  record_decisions boolean not null default false, -- Passes keep their boards, for replays
  -- Stops that are no fault of a job before it is failed all the same: nothing loops
  max_stops gangq.times not null default 100,
  -- Budget of a job without devices, seconds, where neither job, task nor queue sets one
  budget_s gangq.budget not null default 2100,
  budget_gpu_s gangq.budget not null default 8100, -- The same for a job that holds devices
  -- Seconds without a beat, once a job beats, before a stall is suspected
  stall_timeout_s gangq.seconds not null default 120,
  -- Seconds a job may load before its idle devices count against it
  load_grace_s gangq.seconds not null default 1200,
  health_window_s gangq.seconds not null default 300, -- Devices wholly idle so long convict a job
  long_phase_s gangq.seconds not null default 3600, -- Longest phase "long", exempt from stalls
  -- Seconds without a new step of any member before a gang is tripped
  gang_stall_s gangq.seconds not null default 1200,
  -- Seconds that a straggler lags behind its gang; after twice that it is an event
  straggler_s gangq.seconds not null default 300,
  -- Share of live workers suspect within a minute above which stall and health trips are held
  brake_share gangq.share not null default 0.2,
  -- Such a trip is held so long, longer if others wait for the same thing or the database was away
  brake_hold_s gangq.seconds not null default 900,
  device_trips gangq.times not null default 3, -- Jobs that trip on a device in a day: quarantine
  bounces_per_hour gangq.times not null default 4, -- Restarts of a host, or a worker, in an hour
  -- Classes that only report: budget, stall, health, fault, gang
  notify_only gangq.watches not null default '{}',
  new_shapes_per_day gangq.shapes_per_day not null default 1000, -- Of each login but admins
  checkpoint_bytes gangq.bytes not null default 1048576, -- Largest checkpoint kept in the database
  log_bytes gangq.bytes not null default 1048576, -- Largest log kept per attempt
  retention_short gangq.kept_for not null default '7 days', -- How long class short is kept
  retention_long gangq.kept_for not null default '30 days', -- How long class long, and events, are
  incarnation_retention gangq.kept_for not null default '7 days' -- Ended ones stay so long
);
insert into gangq.settings default values;

-- Queues and the defaults their jobs inherit at submit. Read the view queues; change with
-- gangq.set_queue().
create table gangq.queues_table (
  name text primary key check (name <> '' and length(name) <= 100), -- a.b is a child of a
  paused boolean not null default false, -- Nothing new starts from it; running work goes on
  paused_until timestamptz, -- When a tick opens it again; null: only somebody does
  draining boolean not null default false, -- Takes no submissions; what it has is worked off
  -- priority (then age), fifo (age alone), fair (priority, then the submitter and the child queue
  -- with the least dominant share), largest_first (priority, then size)
  policy gangq.policy not null default 'priority',
  -- What it and its children may claim back from others: gpus, memory_mb, cpus, jobs
  guaranteed gangq.object not null default '{}',
  -- What it and its children may hold at once: gpus, memory_mb, cpus, jobs; absent: no limit
  maximum gangq.object not null default '{}',
  -- What one submitter may hold at once in both: gpus, jobs, gangs; absent: no limit
  submitter_maximum gangq.object not null default '{}',
  max_running_gangs gangq.count, -- Placed at once, children included; null: no limit
  max_running_jobs gangq.count, -- The same of jobs, members included
  rate gangq.rate, -- So many starts in a period, children included; null: no limit
  full_at timestamptz not null default 'epoch', -- When the whole rate may start at once again
  -- Whether it has a limit itself: only then is it locked and counted
  limited boolean not null generated always as (
    maximum <> '{}' or submitter_maximum <> '{}' or max_running_gangs is not null
    or max_running_jobs is not null or rate is not null) stored,
  weight gangq.weight not null default 1, -- Its share among siblings in a fair parent
  preempts boolean not null default true, -- Whether its gangs may displace others
  preemptible boolean not null default true, -- Whether its work may be displaced
  min_run_s gangq.delay not null default 300, -- Its work runs so long before it may be displaced
  placement_timeout_s gangq.seconds, -- Of its gangs; null: the parent's, then the installation's
  timeout_style gangq.timeout_style, -- What that does; null: the parent's, then requeue
  -- Who may cancel, retry, reprioritise and read others' work: owner or shared (all submitters)
  others gangq.others not null default 'owner',
  -- Highest priority by role, {"alice": 100}, also in queues below; no entry: no ceiling
  ceilings gangq.object not null default '{}',
  max_attempts gangq.few not null default 3, -- Attempts a job may spend before it is failed
  max_crashes gangq.few not null default 3, -- Times a job may lose its worker before it is failed
  -- So many trips of a job are sent back; the next one ends it
  max_trips gangq.few not null default 3,
  backoff_s gangq.delay not null default 5, -- First delay after a failure; doubles, with jitter
  backoff_max_s gangq.delay not null default 600, -- Longest such delay
  budget_s gangq.budget, -- Wall-clock budget of a job, seconds; null: the worker's default
  max_payload_bytes gangq.bytes not null default 1048576, -- Largest payload or result
  retention_done gangq.retention_class not null default 'short', -- Class of done jobs
  retention_failed gangq.retention_class not null default 'long', -- Class of the other jobs
  created_at timestamptz not null default clock_timestamp(), -- When the queue was made
  check (paused or paused_until is null)
);
insert into gangq.queues_table (name) values ('default');
-- What a claim must know of the queues: nothing at all, as a rule.
create index queues_table_watched on gangq.queues_table (name)
  where paused or limited or policy = 'fair';

-- What the watchdogs allow the jobs of one task; null: the installation's number. Change with
-- gangq.set_task().
create table gangq.task_settings (
  task gangq.name primary key, -- The task's name; "command" for commands
  budget_s gangq.budget, -- Wall-clock budget, seconds; a job's own comes first, the queue's last
  stall_timeout_s gangq.seconds, -- Seconds without a beat that alarm; null: learned
  load_grace_s gangq.seconds, -- Seconds its jobs may load
  health_window_s gangq.seconds, -- Seconds of a wholly idle device that convict
  long_phase_s gangq.seconds, -- Longest exempt phase, seconds
  notify_only gangq.watches -- Classes that only report for this task; null: the installation's
);

-- Tasks that are paused: see 046_task_pauses.sql. Each claim of light jobs reads it; as a rule it
-- is empty.
create table gangq.task_pauses (
  task gangq.name primary key, -- The task
  since timestamptz not null, -- Since when
  until timestamptz, -- When a tick ends it; null: only somebody does
  reason text, -- Why
  operator text not null -- The login that said so
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- The options with which the newest worker that runs a task declared it.
create table gangq.task_options (
  task gangq.name primary key, -- The task
  queue text, -- Where its jobs wait; here and below null: not declared
  priority gangq.priority, -- -1000 to 1000, higher first
  gpus gangq.gpus, -- Whole devices needed
  vram_mb gangq.vram_mb, -- Device memory needed on each of them, MiB
  memory_mb gangq.memory_mb, -- Host memory needed, MiB
  cpus gangq.cpus, -- CPUs needed
  labels gangq.object, -- Labels the worker must carry
  selector jsonb, -- Conditions on the worker, as shapes keep them
  tolerates text[], -- Taints it may run in spite of, as shapes keep them
  model gangq.name, -- What it needs loaded
  limit_key gangq.name, -- What limits it beside its queue
  "limit" gangq.count, -- The limit of that key
  rate gangq.rate, -- The rate of that key
  budget_s gangq.budget, -- Wall-clock budget of an attempt, seconds
  max_attempts gangq.few, -- Attempts it may spend
  max_crashes gangq.few, -- How often its worker may be lost
  max_trips gangq.few, -- How often a watchdog may trip
  max_snoozes gangq.few, -- How often an attempt may be snoozed
  worker text not null, -- The worker that declared these options
  declared_at timestamptz not null -- When it first did
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What work asks for ------------------------------------------------------------------------------

-- Of the jobs that name one, in whatever queue, so many may be placed at once, and so many started
-- in a period. Made by the first submission that names it; change with gangq.set_limit().
create table gangq.limit_keys (
  name gangq.name primary key, -- As submissions name it
  most gangq.count, -- Its limit; null: none
  rate gangq.rate, -- So many starts in a period; null: no limit
  full_at timestamptz not null default 'epoch', -- When the whole rate may start at once again
  -- An administrator has set them: submissions that say others are not refused
  pinned boolean not null default false,
  login text not null, -- The login that made it
  made_at timestamptz not null default clock_timestamp(), -- When
  batch_id bigint unique -- The batch whose at_most it is, forgotten with it; null: anybody names it
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Every distinct requirement of a job ever submitted. Not unique on purpose: two transactions that
-- meet a new one both add it, so that neither waits for the other.
create table gangq.shapes (
  id integer generated always as identity primary key, -- Key
  queue text not null references gangq.queues_table (name), -- Queue the job waits in
  -- Task to run; "command" for a command
  task text not null check (task <> '' and length(task) <= 200),
  gpus smallint not null check (gpus between 0 and 1024), -- Whole devices needed
  vram_mb integer not null check (vram_mb >= 0 and (vram_mb = 0 or gpus > 0)), -- On each, MiB
  memory_mb bigint not null check (memory_mb >= 0), -- Host memory needed, MiB
  cpus numeric(10, 3) not null check (cpus >= 0), -- CPUs needed; may be fractional
  labels jsonb not null check (jsonb_typeof(labels) = 'object'), -- The worker must carry these
  model text check (model <> '' and length(model) <= 200), -- To be loaded; null: none
  avoid bigint[], -- Devices it must not run on, because an attempt of it tripped there; null: any
  selector jsonb check (jsonb_typeof(selector) = 'array'), -- Conditions on labels, all to hold
  tolerates text[], -- Taints it may run in spite of: key, key=value, or *; null: none
  -- What limits it beside its queue; null: nothing
  limit_key text references gangq.limit_keys (name),
  selects jsonpath, -- selector and tolerates as one predicate; null: neither
  submitter text, -- Whose single jobs, where its queue tells submitters apart; null: anybody's
  -- Needs a slot and nothing else
  plain boolean not null generated always as (
    gpus = 0 and memory_mb = 0 and cpus = 0 and limit_key is null) stored,
  -- A worker that could run it has been known; false: submit looks
  fits boolean not null default false,
  digest bytea not null, -- SHA-256 of everything it asks for
  login text, -- The login whose submission added it; null: a trip did
  added_at timestamptz -- When a submission added it; null as login is
);
create index shapes_added on gangq.shapes (login, added_at) where login is not null;
create index shapes_digest on gangq.shapes (digest);
create index shapes_limit_key on gangq.shapes (limit_key) where limit_key is not null;

-- Every distinct demand of a gang ever submitted, like shapes: gangs alike are judged once.
create table gangq.gang_kinds (
  id integer generated always as identity primary key, -- Key
  queue text not null references gangq.queues_table (name), -- Queue the gang waits in
  require text, -- Topology level of which the whole gang must share one domain; null: none
  prefer text, -- Level of which it should share one domain, else of the next broader
  apart text, -- Gangs of one such name never share a host; null: it may share
  spec text not null -- All of it, roles included, in one canonical text
);
create index gang_kinds_spec on gangq.gang_kinds (md5(spec));

-- The roles of a kind of gang, in rank order. A gang whose members are all alike has one.
create table gangq.kind_roles (
  kind_id integer not null references gangq.gang_kinds (id), -- The kind
  ordinal smallint not null check (ordinal >= 1), -- Order of the role, from 1
  name text not null check (name <> '' and length(name) <= 100), -- Unique in its gang
  shape_id integer not null references gangq.shapes (id), -- What each of its members needs
  min_members integer not null check (min_members >= 1), -- Without these the gang does not start
  max_members integer not null check (max_members >= min_members), -- More than min: elastic
  first_rank integer not null check (first_rank >= 0), -- live_jobs.rank of its first member
  strategy gangq.strategy not null, -- How its members lie on hosts
  require text, -- Topology level of which the role must share one domain
  prefer text, -- Topology level of which it should share one domain
  balanced boolean not null, -- Members are spread evenly over the hosts that are used
  primary key (kind_id, ordinal)
);

-- Workers and devices -----------------------------------------------------------------------------

-- One row per start of a worker. Every word a worker says carries its incarnation.
create table gangq.incarnations (
  id bigint primary key, -- Never reused: a restarted worker is not its predecessor
  -- One live incarnation per name. A name reaches the bouncer's command lines, which run as root:
  -- it has nothing that a shell, a program or a terminal takes for more than a name.
  name text not null check (name ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'),
  host text not null check (host ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'), -- Where it runs
  address text not null check (address ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'), -- For members
  login text not null default session_user, -- The login that registered it
  -- live, draining (takes nothing new), retired (as asked) or dead
  state text not null default 'live' check (state in ('live', 'draining', 'retired', 'dead')),
  slots integer not null check (slots between 0 and 10000), -- Placed jobs and members at once
  light integer not null check (light between 0 and 10000), -- Light jobs it runs at once
  prefetch integer not null default 1 -- Light jobs it may hold for its one light slot
    check (prefetch between 1 and 1000 and (prefetch = 1 or light = 1)),
  memory_mb bigint not null check (memory_mb >= 0), -- Host memory it offers, MiB
  cpus numeric(10, 3) not null check (cpus >= 0), -- CPUs it offers
  queues text[] not null, -- Queues it serves
  tasks text[], -- Tasks it can run; null: any
  task_options jsonb check (jsonb_typeof(task_options) = 'object'), -- As it declares its tasks
  labels jsonb not null default '{}' check (jsonb_typeof(labels) = 'object'), -- Labels it carries
  taints text[] not null default '{}', -- key or key=value, its own and then the operator's
  operator_taints text[] not null default '{}', -- Of these the operator's: they outlive it
  boot_id text, -- Boot of the host, for proof of death
  pid bigint, -- Its process, for people and for proof of death
  identity jsonb not null default '{}', -- For the proof of its death: start time, namespace
  registered_at timestamptz not null, -- When it registered
  worked_at timestamptz, -- Its first claim; only such hosts count for the brake of restarts
  ended_at timestamptz, -- When it retired or was judged dead
  flagged_at timestamptz, -- When its silence was noticed; null while it is heard
  passed_over_until timestamptz, -- Not considered for placement before this time
  quarantined text, -- Why an operator or a fault keeps it from taking work; null: it may
  model text, -- The model it has loaded; null: none, or not said
  held_from bigint not null default 0, -- It holds no claim with a lower token
  exits_at timestamptz, -- It tripped: its process is gone by then; null once that is proven
  exit_code smallint, -- The code it exits with after a trip
  reboot_needed boolean not null default false, -- A process of it survived SIGKILL
  check ((state in ('retired', 'dead')) = (ended_at is not null)),
  check (slots + light > 0),
  constraint incarnations_offer check (cpus <= 9999999 and memory_mb <= 1000000000000)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create unique index incarnations_live_name on gangq.incarnations (name) where ended_at is null;
create index incarnations_name on gangq.incarnations (name, id);
create index incarnations_exiting on gangq.incarnations (exits_at) where exits_at is not null;

-- Until when each incarnation's work is its own. Rewritten by heartbeats: no index but its key.
create table gangq.leases (
  incarnation bigint primary key references gangq.incarnations (id) on delete cascade, -- Whose
  expires_at timestamptz not null, -- Nothing of this worker is re-queued by the clock before then
  renewed_at timestamptz not null, -- Last heartbeat
  lease_s real not null -- Length of each renewal, seconds
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Workers that wait for a wake-up: submit notifies only these, because notifying locks globally.
create table gangq.sleepers (
  incarnation bigint primary key references gangq.incarnations (id) on delete cascade, -- Who sleeps
  queues text[] not null, -- Queues it would serve
  since timestamptz not null -- Since when
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- A row to lock for each name of a worker: its registrations, quarantines and taints take turns.
create table gangq.worker_names (
  name text primary key -- The worker's name. Forgotten together with the last incarnation of it.
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Hosts and workers that are given nothing new, by name: it outlives their restart.
create table gangq.cordons (
  kind text not null check (kind in ('host', 'worker')), -- host or worker
  name text not null check (name <> ''), -- Its name
  drain boolean not null, -- True: what runs there is moved away
  since timestamptz not null, -- Since when
  deadline timestamptz, -- Drain: what has found no other place by then is told to stop; null: never
  reason text not null, -- Why
  operator text not null, -- The login that said so
  primary key (kind, name)
);

-- One row per physical device (or MIG instance) ever offered. Read the view devices.
create table gangq.device_registry (
  id bigint generated always as identity primary key, -- Key
  uuid text not null unique check (uuid <> ''), -- The driver's, or host, worker and index
  host text not null check (host ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'), -- Host it sits in
  index integer not null check (index >= 0), -- Index on that host as its worker sees it
  vram_mb integer not null check (vram_mb >= 0), -- Memory, MiB
  model text not null default '', -- Model name
  source text not null check (source in ('nvml', 'amdsmi', 'declared')), -- Who said so
  link text, -- UUID of the first of those that NVLink or XGMI joins with it; null: none known
  -- Incarnation whose jobs may use it; null: none
  offered_by bigint references gangq.incarnations (id) on delete set null
);
create index device_registry_offered_by on gangq.device_registry (offered_by);

-- Which live incarnations would offer a device; one of them does (device_registry.offered_by).
create table gangq.device_claimants (
  device_id bigint not null references gangq.device_registry (id) on delete cascade, -- The device
  incarnation bigint not null references gangq.incarnations (id) on delete cascade, -- Who sees it
  primary key (device_id, incarnation)
);
create index device_claimants_incarnation on gangq.device_claimants (incarnation);

-- The latest reading of each device that a worker samples, brought by heartbeats.
create table gangq.device_readings (
  device_id bigint primary key references gangq.device_registry (id) on delete cascade, -- Of which
  at timestamptz not null, -- When it reached the database
  data jsonb not null -- gpu_pct, used_mb, power_w, throttle, ...; null: the driver does not say
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Gangs and jobs ----------------------------------------------------------------------------------

-- Every legal change of a job's state.
create table gangq.transitions (
  old_state text not null, -- From; empty for a new job
  new_state text not null, -- To
  verb text not null, -- The function that makes it
  role text not null, -- The role that may call it
  primary key (old_state, new_state, verb)
);

-- Gangs that have not ended. Read the view gangs.
create table gangq.live_gangs (
  id bigint primary key, -- The gang
  order_key bigint not null, -- Priority and age, comparable with those of jobs
  shape_id integer not null references gangq.shapes (id), -- What members of its first role need
  kind_id integer not null, -- Everything it asks for
  size integer not null check (size between 1 and 100000), -- Members at most
  world_size integer check (world_size between 1 and size), -- Of this epoch; null: not placed
  epoch integer not null default 0 check (epoch >= 0), -- Reservations so far
  priority smallint not null check (priority between -1000 and 1000), -- -1000 to 1000, higher first
  attempts smallint not null default 0, -- Launches that ended by a member's failure
  max_attempts smallint not null, -- How many such launches it may spend
  crashes smallint not null default 0, -- Launches that ended because a member's worker was lost
  max_crashes smallint not null, -- How many of those it survives
  trips smallint not null default 0, -- Launches that ended because a member tripped a watchdog
  max_trips smallint not null, -- How many of those it survives
  placement_misses integer not null default 0, -- Reservations not claimed in time; no charge
  never_started integer not null default 0, -- Drains at the start barrier; nobody is charged
  preemptions integer not null default 0, -- Times it was told to stop for somebody else
  state text not null -- waiting, blocked, reserved, running, draining, done, failed, cancelled
    check (state in (
      'waiting', 'blocked', 'reserved', 'running', 'draining', 'done', 'failed', 'cancelled')),
  -- What the loss or failure of one member means
  failure_policy gangq.failure_policy not null default 'restart_gang',
  completion text, -- Role whose members, once done, end the gang; null: all members must be done
  preemptible boolean not null default true, -- If its queue allows that at all
  checkpoint_mode gangq.checkpoint_mode not null, -- each: of its own step; rank0: rank 0 for all
  drain_cause text, -- Why the last drain began
  drain_trigger bigint, -- The member that caused it; null when none did
  cancelling boolean not null default false, -- True: the drain ends in cancelled
  restore_step bigint, -- Checkpoint step every member of this epoch restores; null: from the start
  budget_s real, -- Longest budget among its members; null: the default
  claim_deadline_s real not null, -- Seconds its reserved members may wait to be claimed
  timeout_s real not null, -- Seconds it may wait for placement while eligible
  timeout_style gangq.timeout_style not null default 'requeue', -- What happens then
  timeout_at timestamptz, -- When that strikes; what comes after ineligible_s is added
  timeouts integer not null default 0, -- How often it has timed out
  ineligible_s double precision not null default 0, -- Seconds ineligible when timeout_at was set
  waited_from jsonb, -- What gate_clock read for its kind when its last wait began; null: nothing
  master_host text, -- Host of rank 0 in this epoch
  master_addr text, -- Address where members find rank 0
  master_port integer, -- Port that rank 0's worker holds for the rendezvous
  submitted_at timestamptz not null, -- When it was submitted
  not_before timestamptz, -- Backing off until then
  reserved_at timestamptz, -- When this epoch was reserved
  deadline_at timestamptz, -- Until when its members must be claimed
  go_at timestamptz, -- When the start barrier opened; null: nobody's code has begun
  missing_since timestamptz, -- Running and lacking a member since (restart_member)
  drain_started_at timestamptz, -- When the present drain began
  name text, -- A name for people
  note text, -- Set at submit when no registered worker set could hold it: why
  submitter text not null, -- The role: shares and limits per submitter count by it
  login text not null default session_user, -- The login that submitted it, whatever role it had set
  service text, -- The service that it serves; null: none
  check ((state = 'draining') = (drain_started_at is not null)),
  check (state <> 'running' or go_at is not null),
  check (state <> 'reserved' or (deadline_at is not null and go_at is null)),
  check (
    state not in ('blocked', 'waiting')
    or (deadline_at is null and go_at is null and master_port is null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200);
create index live_gangs_backoff on gangq.live_gangs (not_before)
  where state = 'blocked' and not_before is not null;
create index live_gangs_placed on gangq.live_gangs (id) where state in ('reserved', 'draining');
create unique index live_gangs_master on gangq.live_gangs (master_host, master_port)
  where master_port is not null;
create index live_gangs_running on gangq.live_gangs (id) where state = 'running';
create index live_gangs_blocked on gangq.live_gangs (kind_id, order_key) where state = 'blocked';
create index live_gangs_by_age on gangq.live_gangs (kind_id, (order_key & 1125899906842623))
  where state = 'blocked';
create index live_gangs_missing on gangq.live_gangs (id) where missing_since is not null;
create index live_gangs_timeout on gangq.live_gangs (timeout_at) where state = 'blocked';
create index live_gangs_kind_timeout on gangq.live_gangs (kind_id, timeout_at)
  where state = 'blocked';

-- Jobs that have not ended, and members of gangs that have not. Read the view jobs.
create table gangq.live_jobs (
  id bigint primary key, -- The job
  order_key bigint not null, -- Priority and first-in-first-out position in one ascending key
  token bigint, -- Fencing token of the present claim; null unless running or preempting
  final_token bigint, -- Token of the last attempt that ended: its final call may be repeated
  taken_token bigint, -- Token of the last attempt that was taken from its worker: it is stale
  incarnation bigint, -- Where it is placed: set while reserved, running or preempting
  -- Member: its last attempt's worker. Single job that tripped: the worker that must be gone first
  ran_on bigint,
  gang_id bigint, -- Its gang; null for a single job
  parent bigint, -- The job that submitted it; null: a login did
  batch_id bigint, -- Its batch, by the id of its first job; null: none
  submitted_at timestamptz not null, -- When it was submitted
  due_at timestamptz, -- Not before then
  claimed_at timestamptz, -- When the present or last attempt was claimed
  deadline_at timestamptz, -- Reserved: to be claimed before then
  told_at timestamptz, -- When it was told to stop
  finished_at timestamptz, -- When it ended
  request_id uuid, -- The claim call that took it: the same id returns the same claims
  shape_id integer not null, -- What it needs
  rank integer, -- Its place in the gang at its largest, from 0; see epoch_rank
  epoch_rank integer, -- Elastic: its rank in this epoch; null: rank, or not in it
  array_index integer, -- Its place in its batch, from 0; null: no batch
  budget_s real, -- Wall-clock budget, seconds; null: the worker's default
  waits_on integer not null default 0, -- How many jobs it waits for still
  priority smallint not null, -- -1000 to 1000, higher first
  attempts smallint not null default 0, -- Attempts charged; counted at claim
  max_attempts smallint not null, -- How many it may spend
  crashes smallint not null default 0, -- Times its worker was lost
  max_crashes smallint not null, -- How often that may happen
  trips smallint not null default 0, -- Watchdog trips
  max_trips smallint not null, -- So many trips are sent back; the next one ends it
  stops smallint not null default 0, -- Handed back or told to stop without fault
  snoozes smallint not null default 0, -- Attempts that it handed back itself, to wait
  max_snoozes smallint not null default 100, -- So often it may; the next one ends it
  role smallint, -- A member's: ordinal of its role
  -- Pending or placed after its submission: it may stand before older claims
  returned boolean not null default false,
  state text not null, -- As in transitions
  light boolean not null default false, -- Its last claim took a light slot
  stop_reason text, -- Why it was told to stop: drain, cancel, preempt or move
  submitter text not null, -- The role: shares and limits per submitter count by it
  login text not null default session_user, -- The login that submitted it, whatever role it had set
  payload jsonb, -- Arguments for the task
  devices bigint[], -- What its present or last attempt was given; null: no device
  awaited bigint[], -- The jobs it was submitted to wait for; null: none
  -- The outcome it wants of each of awaited, as in dependencies; null: done of all
  wants text[],
  unmet bigint, -- The awaited job that ended otherwise than wanted: that cancels this one
  result jsonb, -- What a done member returned
  error jsonb, -- The last error: type, message, traceback, host, log tail
  trace text -- The span in which it was submitted; null: none
) with (
  fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2
);
create index live_jobs_claim on gangq.live_jobs (shape_id, order_key) where state = 'pending';
create index live_jobs_due on gangq.live_jobs (due_at) where state = 'scheduled';
create unique index live_jobs_member on gangq.live_jobs (gang_id, rank) where gang_id is not null;
create index live_jobs_returned on gangq.live_jobs (shape_id, order_key)
  where state = 'pending' and returned;
create index live_jobs_held on gangq.live_jobs (incarnation, token) where incarnation is not null;
create index live_jobs_placed on gangq.live_jobs (incarnation)
  where incarnation is not null and not light;
create index live_jobs_by_state on gangq.live_jobs (state, id)
  where state <> all ('{pending,running,blocked,scheduled}');
create index live_jobs_batch on gangq.live_jobs (batch_id, state) where batch_id is not null;

create function gangq.is_sound(j gangq.live_jobs) returns boolean language plpgsql immutable
set search_path = pg_catalog, pg_temp as $$
begin
  return (j.incarnation is not null) = (j.state in ('running', 'reserved', 'preempting'))
    and (j.token is not null) = (j.state in ('running', 'preempting'))
    and (j.role is null) = (j.gang_id is null)
    and case j.state
      when 'pending' then j.gang_id is null
      when 'running' then j.claimed_at is not null
      when 'scheduled' then j.gang_id is null and j.due_at is not null
      when 'waiting' then j.waits_on > 0
      when 'blocked' then j.gang_id is not null and j.deadline_at is null
      when 'reserved' then j.gang_id is not null and j.deadline_at is not null
      when 'preempting' then j.told_at is not null and j.stop_reason is not null
      when 'preempted' then j.gang_id is not null
      when 'done' then j.gang_id is not null and j.finished_at is not null
      when 'failed' then j.gang_id is not null and j.finished_at is not null
      when 'cancelled' then j.gang_id is not null and j.finished_at is not null
      else false
    end;
end $$;
comment on function gangq.is_sound is 'Internal. What each state of a job needs in its columns.';
-- PostgreSQL reads the expressions of a table's checks anew for every statement: the states that
-- are written most stand here and the others in the function, which belongs to the table and is
-- rebuilt with it only. Numbers that never change after submit are checked by triggers.
alter table gangq.live_jobs add constraint live_jobs_state check (
  case state
    when 'pending' then incarnation is null and token is null and gang_id is null
    when 'running' then incarnation is not null and token is not null and claimed_at is not null
    else gangq.is_sound(live_jobs)
  end);

-- What one submission under a name has submitted. A job that starts or ends changes nothing here:
-- how far a batch is, the view batches counts.
create table gangq.batches_table (
  id bigint primary key, -- The batch: the id of its first job
  name text not null, -- As its submitter called it; several may have one name
  tags text[] not null default '{}', -- As its submitter marked it
  shape_id integer not null, -- What its jobs need: queue, task
  size integer not null, -- How many jobs were submitted
  submitter text not null, -- The role that submitted it
  login text not null, -- The login that did
  submitted_at timestamptz not null, -- When
  -- When a tick found that its last job had ended; null: it has not, or a job was retried
  finished_at timestamptz,
  -- Ended: the longest class that its jobs are kept in, and its own
  retention gangq.retention_class,
  check ((finished_at is null) = (retention is null))
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index batches_name on gangq.batches_table (name, id);
create index batches_open on gangq.batches_table (id) where finished_at is null;
create index batches_ended on gangq.batches_table (retention, finished_at)
  where finished_at is not null;

-- Which live job waits for which. No foreign keys: they would cost every finished job a query.
create table gangq.dependencies (
  job_id bigint not null, -- The one that waits
  on_job_id bigint not null, -- The one it waits for
  -- done, failed, or any: with another outcome the one that waits is cancelled
  wants text not null default 'done' check (wants in ('done', 'any', 'failed')),
  outcome text check (outcome in ('done', 'failed', 'cancelled')), -- How the awaited job ended
  -- It was visible while nothing ended the awaited job: whoever ends that sees it
  settled boolean not null default false,
  primary key (on_job_id, job_id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);
create index dependencies_job on gangq.dependencies (job_id);
create index dependencies_settled on gangq.dependencies (job_id) where outcome is not null;
create index dependencies_new on gangq.dependencies (on_job_id, job_id)
  where not settled and outcome is null;

-- Jobs that ended without seeing or locking all their dependents: promote_due tells those.
create table gangq.unsettled (
  job_id bigint primary key -- The job that ended
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Who holds each device. The key makes it one holder at most.
create table gangq.device_holds (
  device_id bigint primary key references gangq.device_registry (id), -- The device
  -- quarantine; place: open and not filled
  kind text not null check (kind in ('job', 'place', 'quarantine')),
  job_id bigint, -- The job that holds it, from reservation or claim until it is proven stopped
  place_id bigint, -- The open place that holds it while no job sits there
  reason text, -- Why it is quarantined
  since timestamptz not null, -- Since when
  incarnation bigint, -- Quarantine after a trip: until this worker is proven gone
  until timestamptz, -- And not longer than its lease would have lasted
  check ((kind = 'job') = (job_id is not null)),
  check ((kind = 'place') = (place_id is not null)),
  check ((kind = 'quarantine') = (reason is not null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index device_holds_job on gangq.device_holds (job_id) where job_id is not null;
create index device_holds_place on gangq.device_holds (place_id) where place_id is not null;

-- Where single jobs of one kind may start: opened by a decision, filled by the worker's claim. An
-- open place counts like a job everywhere; one whose job has ended unvacated counts for nothing.
create table gangq.places (
  id bigint generated always as identity primary key, -- Key
  incarnation bigint not null references gangq.incarnations (id) on delete cascade, -- The worker
  shape_id integer not null references gangq.shapes (id), -- Whose jobs may fill it
  device_ids bigint[] not null, -- The devices of whoever sits in it
  job_id bigint, -- Who sits in it now; null: nobody yet, or nobody any more
  token bigint unique, -- The claim of that job
  -- Lowest that may fill it: that of others who wait for this room
  min_priority smallint not null default -1000,
  ends_by timestamptz, -- Nothing may fill it that could end later: a planned start needs its room
  refills boolean not null, -- Whether the next job of its kind may follow the first
  until timestamptz not null, -- Nobody fills it later; each pass moves this on
  check ((job_id is null) = (token is null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index places_incarnation on gangq.places (incarnation);

-- The last beat of each running job that beats; brought by heartbeats.
create table gangq.progress (
  job_id bigint primary key, -- The job
  token bigint not null, -- Its claim
  beat_at timestamptz not null, -- When the beat reached the database
  step bigint, -- The last step reported
  phase text, -- load, run, save or long; null: not said
  step_at timestamptz, -- When the step last changed
  rate real, -- Steps a second, smoothed; null until two steps were seen
  -- Greatest common divisor of the differences of steps seen: at most so many steps a beat
  stride bigint,
  lags_since timestamptz, -- Since when it is much slower than its gang
  data jsonb not null -- step, total, phase and whatever the handler reported
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Saved states. A restore never mixes steps: see live_gangs.checkpoint_mode.
create table gangq.checkpoints (
  job_id bigint not null, -- Whose
  step bigint not null check (step >= 0), -- At which step
  gang_id bigint, -- Its gang
  saved_at timestamptz not null, -- When
  data bytea not null, -- Opaque bytes
  primary key (job_id, step)
) with (
  autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200,
  toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_threshold = 1000
);
create index checkpoints_gang on gangq.checkpoints (gang_id, step) where gang_id is not null;
-- The tick forgets what was saved long ago, without reading the rest.
create index checkpoints_saved on gangq.checkpoints (saved_at);

-- What submissions with a request_id were answered since the tick last exchanged this table with
-- requests_before: an answer is kept for one to about two hours.
create table gangq.requests (
  request_id uuid not null, -- As the caller made it. Each login has ids of its own.
  gang_id bigint, -- The gang submitted; null: single jobs were
  -- Who submitted; of children, the login that submitted their parent
  login text collate "C" not null,
  job_ids bigint[] not null, -- The jobs submitted, in order
  note text, -- What submit_gang said of the gang
  primary key (request_id, login)
) with (autovacuum_enabled = off, toast.autovacuum_enabled = off);
-- Compressing the ids of a thousand jobs takes as long as inserting ten of them.
alter table gangq.requests alter column job_ids set storage external;

-- What requests was until the tick last exchanged the two.
create table gangq.requests_before (
  like gangq.requests including all
) with (autovacuum_enabled = off, toast.autovacuum_enabled = off);

-- Which job or gang a unique key stands for: while that is live, and until kept_until.
create table gangq.unique_keys (
  key text collate "C" not null, -- As the submitter made it
  task text collate "C" not null, -- A key holds for one task; '': a gang whose roles have their own
  queue text collate "C" not null, -- ... in one queue
  login text collate "C" not null, -- Whose: a login's; '' in a queue that is shared
  gang_id bigint, -- The gang submitted; null: a single job was
  job_ids bigint[], -- The jobs submitted; null only within the call that makes the row
  kept_until timestamptz, -- It stands for them until then, also when they have ended
  request_id uuid, -- The call that submitted them
  primary key (key, task, queue, login)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- Schedules ---------------------------------------------------------------------------------------

-- What is submitted again and again, and when next. Read the view schedules.
create table gangq.schedules_table (
  name gangq.name primary key, -- As its owner made it
  cron text, -- Five fields; null: every
  every interval, -- Time between two due times; null: cron
  tz text, -- The time zone of cron
  task gangq.name not null, -- What is submitted: the task
  payload jsonb not null, -- ... and its arguments
  work gangq.object not null, -- The other arguments and options of submit or submit_gang
  catch_up gangq.catch_up not null, -- Which due times that were missed are run
  skip_if_running boolean not null, -- Nothing is submitted while the last one has not ended
  due_as gangq.name, -- The key of payload that is given the due time; null: none
  submitter text not null, -- Who stored it: whose rights its submissions have
  login text not null, -- The login that stored it, whatever role it had set
  set_at timestamptz not null, -- When it was last changed
  counts_from timestamptz not null, -- every: its due times are so many times every after this
  after_at timestamptz not null, -- Due times up to here are settled: none of them is run again
  due_at timestamptz, -- The next due time; null: not computed, or paused without an end
  planned_at timestamptz, -- cron: when due_at was computed, or could not be
  problem text, -- Why it could not be
  paused_at timestamptz, -- Since when it is paused; null: it is not
  paused_until timestamptz, -- The end of the pause; null: none
  last_due timestamptz, -- The last due time for which something was submitted
  last_at timestamptz, -- When something was last submitted, by hand or when due
  last_job_id bigint, -- The job submitted then; of a gang, rank 0
  last_gang_id bigint, -- The gang submitted then
  -- A due time for which nothing was submitted, the last such one known
  passed_over timestamptz,
  why text, -- Why not
  source text, -- The program that declares it; null: none does
  undeclared_at timestamptz, -- Since when source does not declare it any more
  check ((cron is null) <> (every is null)),
  check ((cron is null) = (tz is null)),
  check (due_at > after_at)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index schedules_due on gangq.schedules_table (due_at) where due_at is not null;
create index schedules_unplanned on gangq.schedules_table (name) where due_at is null;

-- Services ----------------------------------------------------------------------------------------

-- Replicas that stay up: how many are wanted, and of which revision. See 129_services.sql. Read the
-- view services.
create table gangq.services_table (
  name gangq.name primary key, -- As its owner made it
  replicas gangq.members not null, -- How many are wanted while it is not stopped
  stopped boolean not null, -- None is wanted
  deleting boolean not null default false, -- ... and the row goes with the last gang
  revision integer not null, -- The revision that its gangs are to be of
  good_revision integer, -- The last one of which all replicas were ready; null: none yet
  halted text, -- Why no more gangs of revision are made, but of good_revision; null: they are
  surge gangq.up_to_1000 not null, -- So many gangs more than wanted while one replaces another
  ready_within_s gangq.seconds not null, -- A replica that is not ready for so long is replaced
  linger_s gangq.delay not null, -- From leaving the endpoints to being told to stop
  failures integer not null default 0, -- Gangs in a row that did not stay ready for a minute
  next_try_at timestamptz, -- No gang is made before; null: at once
  problem text, -- Why the last gang failed, or could not be made; null: it is steady
  submitter text not null, -- Who stored it: whose rights its gangs have
  login text not null, -- The login that stored it, whatever role it had set
  set_at timestamptz not null, -- When it was last changed
  source text, -- The program that declares it; null: none does
  declared_replicas integer, -- How many replicas source declared last
  undeclared_at timestamptz -- Since when source does not declare it any more
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- How many replicas a service has by its load; a service without a row has as many as were asked
-- for. Written when what is asked for changes, not with each report. See 131_scaling.sql. Read the
-- view scaling.
create table gangq.scaling_table (
  service gangq.name primary key references gangq.services_table (name) on delete cascade, -- Whose
  min_replicas gangq.members not null, -- At least so many, rounded up to whole gangs
  max_replicas gangq.members not null, -- ... and so many at most
  target_load gangq.weight, -- What each replica is to report
  target_depth gangq.weight, -- ... or so many jobs of depth_of for each replica
  depth_of gangq.name, -- The queue whose jobs are counted, with those below it
  up_after_s gangq.delay not null, -- More are made when they were asked for for so long
  down_after_s gangq.delay not null, -- Some are removed when fewer were asked for for so long
  wants integer, -- How many it is asked for now; null: as many as there are
  since timestamptz, -- Since when
  due_at timestamptz, -- When it has them, unless that ends
  why text, -- Why
  scaled_at timestamptz, -- When the number last changed
  scaled_why text, -- Why it did
  check ((target_load is null) <> (target_depth is null)),
  check (min_replicas <= max_replicas),
  check ((wants is null) = (due_at is null))
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What the gangs of a service run. A change of one is a new revision; the last ten are kept.
create table gangq.service_revisions (
  service gangq.name not null references gangq.services_table (name) on delete cascade, -- Whose
  revision integer not null check (revision > 0), -- Its number
  task gangq.name not null, -- What each replica runs: the task
  payload jsonb not null, -- ... and its arguments
  gang_size gangq.members not null, -- Members of each gang
  work gangq.object not null, -- The other arguments and options of submit_gang
  health gangq.health, -- What the worker polls to see whether a replica is ready; null: it says so
  version gangq.name, -- What else tells this revision from others; null: nothing
  set_at timestamptz not null, -- When it was made
  good_at timestamptz, -- When all replicas were last ready, of this revision; null: they never were
  primary key (service, revision)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- The gangs of the services. Read the view service_gangs.
create table gangq.service_gangs_table (
  gang_id bigint primary key, -- The gang: one of live_gangs, or it has ended since the last tick
  service gangq.name not null references gangq.services_table (name), -- Whose
  revision integer not null, -- What it runs
  size integer not null, -- Its members
  made_at timestamptz not null, -- When it was submitted
  ready_at timestamptz, -- When all its members were first ready; null: they were not yet
  stop_at timestamptz, -- It has left the endpoints, and is told to stop then; null: it is wanted
  why text -- Why it leaves
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index service_gangs_service on gangq.service_gangs_table (service);

-- What the replicas have said of themselves. What another claim of the job said counts for nothing.
create table gangq.replicas (
  job_id bigint primary key, -- The member
  token bigint not null, -- Its claim
  gang_id bigint not null, -- Its gang
  ready boolean not null, -- Whether it takes requests
  since timestamptz not null, -- Since when
  port integer check (port between 1 and 65535), -- Where; null: at no port of its own
  load real, -- How busy it is, as it says; null: it does not say
  load_at timestamptz -- When it said so
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index replicas_gang on gangq.replicas (gang_id);

-- Placement ---------------------------------------------------------------------------------------

-- A planned start of what waits, or seats kept for it until others have stopped. Written by apply.
create table gangq.plans (
  -- As on a board: g7 a gang, k7/5 the single jobs of shape 7 with priority 5
  ask text primary key check (ask ~ '^(g[0-9]+|k[0-9]+/-?[0-9]+)$'),
  kept boolean not null, -- Others were told to stop for it: its seats are kept
  place integer, -- Its place among the planned starts, from 1; null: others stop for it
  -- When its seats are free if estimates hold; kept: when the promise lapses
  starts_at timestamptz not null,
  pass bigint not null, -- The last pass that planned it, or could not carry out what it decided
  seats jsonb not null check (jsonb_typeof(seats) = 'array'), -- A seat each: worker, devices, ...
  check (kept = (place is null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Why the last pass did not place what waits: a row a kind, and one for each that differs from it.
create table gangq.verdicts (
  kind_id integer not null, -- The kind of gang; negative: a shape, for single jobs
  ask text not null default '', -- As on a board (see plans); empty: all others of the kind
  gate text not null, -- The check that refused it: paused, quota, room, ...
  since timestamptz not null, -- Since when it is this one
  waited jsonb not null default '{}', -- Seconds at each gate before this one
  why text, -- Why it waits, in words
  unblocks text, -- What would let it start, in words
  follows text, -- Whose end its planned start follows, in words
  numbers jsonb, -- The numbers of that check
  primary key (kind_id, ask)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- How long jobs of a task run (with a device, or in a gang): the estimate behind planned starts.
create table gangq.runtimes (
  queue text not null, -- The queue
  task text not null, -- The task
  samples bigint not null check (samples >= 0), -- Ends it rests on
  p90_s real not null check (p90_s >= 0), -- Running estimate of the 90th percentile, seconds
  updated_at timestamptz not null, -- When it last changed
  primary key (queue, task)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Passes that decided something, by part; with settings.record_decisions also what they saw.
create table gangq.passes (
  at timestamptz not null, -- When
  pass bigint not null, -- Which: the number of its board
  digest text, -- MD5 of the board as text
  decisions jsonb not null, -- As passed to gangq.apply
  board json -- What was seen, in the first part; null: not recorded
) partition by range (at);
create index passes_at on gangq.passes (at);

-- What has ended, and what happened ---------------------------------------------------------------

-- Jobs that have ended, one row per ending. Append-only; whole days are dropped.
create table gangq.history (
  job_id bigint not null, -- The job; a retried job has one row per ending
  token bigint,
  taken_token bigint, -- As in live_jobs
  gang_id bigint, parent bigint, batch_id bigint, submitted_at timestamptz not null,
  claimed_at timestamptz, finished_at timestamptz not null, incarnation bigint,
  shape_id integer not null, -- What it needed
  rank integer, array_index integer, budget_s real, priority smallint not null,
  attempts smallint not null,
  max_attempts smallint not null, crashes smallint not null, max_crashes smallint not null,
  trips smallint not null, max_trips smallint not null, stops smallint not null,
  snoozes smallint not null default 0, max_snoozes smallint not null default 100,
  state text not null check (state in ('done', 'failed', 'cancelled')), -- How it ended
  retention text not null, -- short, long or forever
  submitter text not null, login text not null, payload jsonb, awaited bigint[], wants text[],
  unmet bigint, -- The awaited job whose end cancelled it; of a gang only one member has it
  result jsonb, -- What it returned
  error jsonb,
  trace text,
  -- The transaction that wrote this row: the tick counts each row once
  written_in xid8 not null default pg_current_xact_id()
) partition by list (retention);
create table gangq.history_short partition of gangq.history for values in ('short')
  partition by range (finished_at);
create table gangq.history_long partition of gangq.history for values in ('long')
  partition by range (finished_at);
create table gangq.history_forever partition of gangq.history for values in ('forever');
comment on table gangq.history_short is 'History of retention class short, by day.';
comment on table gangq.history_long is 'History of retention class long, by day.';
comment on table gangq.history_forever is 'History that is never dropped.';
create index history_job on gangq.history (job_id);
create index history_gang on gangq.history (gang_id, rank) where gang_id is not null;
create index history_not_done on gangq.history (job_id) where state <> 'done';
create index history_written on gangq.history (written_in);
create index history_batch on gangq.history (batch_id, state) where batch_id is not null;
create index history_unmet on gangq.history using gin (awaited) with (fastupdate = off)
  where unmet is not null;

-- Gangs that have ended, one row per ending. Append-only; whole days are dropped.
create table gangq.gang_history (
  gang_id bigint not null, -- The gang
  finished_at timestamptz not null, -- When it ended
  submitted_at timestamptz not null, shape_id integer not null, kind_id integer not null,
  size integer not null,
  world_size integer, -- Members of its last epoch
  epoch integer not null, priority smallint not null, attempts smallint not null,
  max_attempts smallint not null, crashes smallint not null, max_crashes smallint not null,
  trips smallint not null, max_trips smallint not null, placement_misses integer not null,
  never_started integer not null, preemptions integer not null,
  state text not null check (state in ('done', 'failed', 'cancelled')), -- How it ended
  failure_policy gangq.failure_policy not null, completion text, preemptible boolean not null,
  checkpoint_mode gangq.checkpoint_mode not null, budget_s real, claim_deadline_s real not null,
  timeout_s real not null, timeout_style gangq.timeout_style not null,
  retention text not null, -- short, long or forever
  name text,
  reason text, -- Why it failed or was cancelled
  submitter text not null, login text not null, service text
) partition by list (retention);
create table gangq.gang_history_short partition of gangq.gang_history for values in ('short')
  partition by range (finished_at);
create table gangq.gang_history_long partition of gangq.gang_history for values in ('long')
  partition by range (finished_at);
create table gangq.gang_history_forever partition of gangq.gang_history for values in ('forever');
comment on table gangq.gang_history_short is 'Gang history of retention class short, by day.';
comment on table gangq.gang_history_long is 'Gang history of retention class long, by day.';
comment on table gangq.gang_history_forever is 'Gang history that is never dropped.';
create index gang_history_gang on gangq.gang_history (gang_id);
create index gang_history_not_done on gangq.gang_history (gang_id) where state <> 'done';

-- A column of history without a comment is what it was while its row was live.
do $$
declare
  c record;
begin
  for c in
    select h.attrelid::regclass as history, h.attname, col_description(l.attrelid, l.attnum) as said
    from (values ('gangq.history'::regclass, 'gangq.live_jobs'::regclass),
      ('gangq.gang_history', 'gangq.live_gangs')) as p(history, live)
    join pg_attribute h on h.attrelid = p.history
    join pg_attribute l on l.attrelid = p.live and l.attname = h.attname and l.attnum > 0
    where col_description(h.attrelid, h.attnum) is null
  loop
    execute format('comment on column %s.%I is %L', c.history, c.attname, c.said);
  end loop;
end $$;

-- Endings that a retry has overtaken; apart, so that history stays append-only.
create table gangq.retried (
  job_id bigint, -- The job retried
  gang_id bigint, -- The gang retried
  finished_at timestamptz not null, -- Which of its endings was overtaken
  followed boolean not null default false, -- What this ending of a job had cancelled is revived
  check ((job_id is null) <> (gang_id is null)),
  unique (job_id, finished_at),
  unique (gang_id, finished_at)
);
create index retried_unfollowed on gangq.retried (job_id)
  where job_id is not null and not followed;

-- Attempts that have ended, a row each: see 127_usage.sql. Read the view attempts. Append-only.
create table gangq.attempt_history (
  job_id bigint not null, -- The job
  token bigint not null, -- Its claim
  gang_id bigint, -- Its gang
  incarnation bigint not null, -- Where it ran
  started_at timestamptz not null, -- When it was claimed
  -- When it ended: its work was proven stopped, or its lease was over
  ended_at timestamptz not null,
  shape_id integer not null, -- What it needed: queue, task, number of devices
  epoch integer, -- Member: the epoch that it began in
  rank integer, -- Member: its place in the gang at its largest
  worker text, -- The worker's name
  host text, -- Its host
  cause text not null, -- done, or one of gangq.causes
  submitter text not null, -- Whose
  devices bigint[], -- Which devices it was given; null: none
  service text, -- The service that it was a replica of; null: none
  written_in xid8 not null default pg_current_xact_id() -- As in history
) partition by range (ended_at);
create index attempt_history_job on gangq.attempt_history (job_id);
create index attempt_history_gang on gangq.attempt_history (gang_id) where gang_id is not null;
create index attempt_history_written on gangq.attempt_history (written_in);

-- Every abnormal transition and every step of a gang. Append-only.
create table gangq.events (
  id bigint generated by default as identity, -- Order of writing
  at timestamptz not null, -- When
  kind text not null, -- What happened: reserve, preempt, drain, trip, reap, flag, ...
  gang_id bigint, -- The gang
  epoch integer, -- Its epoch
  job_id bigint, -- The job
  token bigint, -- Its claim
  incarnation bigint, -- The worker's incarnation
  worker text, -- The worker's name
  actor text, -- The login that wrote this ("login as role"); of ticks, who ticked
  reason text, -- Why, for people
  data jsonb, -- Numbers and evidence
  written_in xid8 not null default pg_current_xact_id() -- As in history
) partition by range (at);
create index events_gang on gangq.events (gang_id, id) where gang_id is not null;
create index events_job on gangq.events (job_id, id) where job_id is not null;
create index events_at on gangq.events (at);
create index events_by_id on gangq.events (id);
create index events_trips on gangq.events (at) where kind in ('trip', 'notify', 'held');
create index events_drains on gangq.events (at) where kind = 'drain';
create index events_displaced on gangq.events (at) where kind = 'preempt';
create index events_lost on gangq.events (at) where kind = 'lost';
create index events_counted on gangq.events (written_in)
  where kind in ('drain', 'drained', 'force', 'trip', 'notify', 'held');

-- What a watchdog saw: stacks, readings, log tail. Not in events: a viewer must not see all of it.
create table gangq.evidence (
  at timestamptz not null, -- When; the same instant as its event
  kind text not null, -- As its event: suspect, trip, notify, held, dead or stuck
  job_id bigint, -- The job
  token bigint, -- Its claim
  incarnation bigint, -- The worker's incarnation
  data jsonb not null -- The evidence
) partition by range (at);
create index evidence_job on gangq.evidence (job_id, at) where job_id is not null;
create index evidence_kind on gangq.evidence (kind, at);

-- Output of commands, bounded per attempt. gangq logs shows it.
create table gangq.logs (
  job_id bigint not null, -- The job
  token bigint not null, -- The attempt
  seq integer not null check (seq >= 0), -- Order within the attempt
  at timestamptz not null, -- When it reached the database
  chunk text not null, -- Text; undecodable bytes are replaced
  upto bigint not null -- What the attempt had printed by then: bytes, and 64 for each chunk
) partition by range (at);
create index logs_job on gangq.logs (job_id, token, seq);

-- Notifications -----------------------------------------------------------------------------------

-- Who is told of what: see 126_outbox.sql. No address is kept here. Read the view notifications.
create table gangq.notification_targets (
  id integer generated always as identity primary key, -- Key; one made anew under a name is another
  name gangq.target_name not null unique, -- As gangq notify run names it
  kinds text[] not null, -- What it is told of: kinds of notification_kinds
  queue text, -- Only of jobs and gangs in this queue and those below it; null: any
  submitter text, -- Only of this submitter's; null: anybody's
  task text, -- Only of this task; null: any
  max_attempts gangq.few not null, -- Deliveries of one notification before it is given up
  created_at timestamptz not null, -- When it was added
  created_by text not null, -- The login that added it or changed it last
  failures integer not null default 0, -- Failed deliveries since the last that succeeded
  paused_until timestamptz, -- After a failure: nothing is given out before
  delivered bigint not null default 0, -- How many were delivered
  delivered_at timestamptz, -- When the last one was
  dropped bigint not null default 0, -- How many were dropped undelivered: too old, or too many
  dropped_at timestamptz, -- When the last one was
  error text -- Why the last delivery failed; null: it succeeded
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What targets are still to be told, a row for each target. Written in the transaction of what
-- happened, deleted when it was delivered.
create table gangq.outbox (
  id bigint generated by default as identity, -- Number of the notification
  target_id integer not null, -- Who is told
  at timestamptz not null, -- When it happened
  kind text not null, -- One of notification_kinds, or test
  body jsonb not null, -- What is told
  attempts smallint not null default 0, -- Deliveries begun; the present one has this number
  due_at timestamptz not null, -- Given out then: once a delivery in progress, or a backoff, is over
  dead_at timestamptz, -- When it was given up; null: it was not
  error text, -- Why the last delivery failed
  primary key (target_id, id)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200);
create index outbox_due on gangq.outbox (target_id, due_at, id) where dead_at is null;

-- Maintenance -------------------------------------------------------------------------------------

-- What the last tick saw; one row. An outage since then gives every lease one full period.
create table gangq.tick_state (
  singleton boolean primary key default true check (singleton), -- Always true: there is one row
  last_at timestamptz, -- When the last tick ran
  server_started_at timestamptz, -- When the server it ran on had started
  timeline text, -- The server's timeline: changes at a failover
  outage_ended_at timestamptz, -- End of the last outage; leases are judged from here
  partitions_checked_at timestamptz, -- When partitions were last made and dropped
  judged_gang bigint not null default 0, -- The last one whose progress was judged; 0: all
  judged_at timestamptz, -- When progress was last judged
  interrupted_at timestamptz, -- Last restart, failover or clock set back: leases start anew
  requests_turned_at timestamptz, -- When the tick last exchanged requests and requests_before
  -- What was written by transactions below this one is in counters, but for those in uncounted
  counted_below xid8 not null default '0',
  uncounted xid8[] not null default '{}', -- These had not ended then
  counted_from timestamptz -- What ended before is not counted any more; null: nothing was counted
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into gangq.tick_state default values;

-- How much has ended and happened so far, whatever is still on record: see 128_metrics.sql.
create table gangq.counters (
  name text not null, -- The metric, as gangq.metrics() names it
  labels jsonb not null, -- Of what: queue, task, outcome, ...
  value double precision not null, -- How much
  changed_at timestamptz not null, -- When that last grew
  primary key (name, labels)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Where claims of light jobs begin: see 071_lows.sql.
create table gangq.lows (
  shape_id integer not null references gangq.shapes (id) on delete cascade, -- Whose jobs
  start bigint not null, -- The lowest key that a submission with this priority could have
  low bigint not null, -- No job is pending below it but such as have returned
  marked bigint not null, -- What low may become once all older transactions have ended
  primary key (shape_id, start)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Rows to lock: one tick, one pass, one trip that counts the others (brake), one caller that asks
-- for a tick (wake), one insert of an estimate (runtimes), one look at lows at a time.
create table gangq.lock_rows (
  name text primary key, -- What the lock is for
  runs bigint not null default 0 -- How many ticks have run, or passes begun
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into gangq.lock_rows (name) values ('tick'), ('pass'), ('brake'), ('wake'), ('runtimes'),
  ('lows');

-- Whose turn it is to decide; one row, locked for a moment only.
create table gangq.decider (
  singleton boolean primary key default true check (singleton), -- Always true: there is one row
  asked bigint not null default 0, -- Ticks that found something to be placed
  until timestamptz, -- Until when somebody has the turn; null: nobody
  decided_at timestamptz, -- When the last pass ended
  pass_s real -- How long it took since its board was read, seconds
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into gangq.decider default values;

-- The shift of all sequences: none repeats a value that a failover lost; one row.
create table gangq.sequence_base (
  singleton boolean primary key default true check (singleton), -- Always true: there is one row
  timeline bigint not null, -- The server's timeline that base was computed for
  base bigint not null check (base >= 0) -- The shift on that timeline
);
insert into gangq.sequence_base (timeline, base)
values (('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint, 0);

-- How long the beats of each task have stayed away without harm.
create table gangq.beat_gaps (
  task text not null, -- The task
  device_class text not null, -- Model of the devices it ran on; empty: none
  longest_s real not null check (longest_s >= 0), -- Longest that a job went on after, seconds
  beats bigint not null check (beats >= 0), -- Beats it rests on
  updated_at timestamptz not null, -- When it last changed
  primary key (task, device_class)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

