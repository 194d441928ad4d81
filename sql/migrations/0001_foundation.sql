-- gangq: the tables.
--
-- A job's life. submit writes one narrow row into live_jobs. A single job is pending until a
-- worker's claim makes it running; a gang's members are blocked until all of them are reserved at
-- once on workers that fit. When a job ends, its row leaves live_jobs for history in the same
-- statement, so the hot table holds only live work and no index ever carries finished jobs. Members
-- of a gang stay hot until their gang ends, then all leave together.
--
-- Who owns what. A worker registers and receives an incarnation: one row in incarnations (what it
-- offers) and one in leases (until when its work is its own). The lease is a row of its own because
-- heartbeats rewrite it every few seconds: it carries no index but its key, so those updates stay
-- HOT, and no job verb ever locks it. Each claim draws a token; every later word about the attempt
-- carries it, and an old token changes nothing.
--
-- What a job needs is interned in shapes (queue, task, resources, labels): a claim asks which few
-- shapes fit, then takes the heads of those from one partial index, and never looks at a job that
-- does not fit.
--
-- Lock order, everywhere: gangs by id, jobs by id, then worker rows by id; after a worker row, jobs
-- only with skip locked. Those who take capacity (claim, reserve_gang) lock the worker row, count,
-- and take; those who give it back (complete, fail, ack, rollback) never touch it.
--
-- Reading this file. A comment right above a table or a column is its comment in the database too:
-- the migrator sees to that. Tables whose rows come and go are vacuumed by the number of their dead
-- rows, not by a fifth of the table; those whose rows are rewritten keep room for that on each
-- page.
--
-- A migration is applied once, in order, and recorded with its checksum. Functions, views, triggers
-- and grants live in the numbered files beside this folder and are rebuilt as a whole whenever one
-- of them changes.

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
create domain gangq.seconds as real check (value > 0 and value <= 1e7);
comment on domain gangq.seconds is 'Seconds: more than 0 and at most 1e7.';
create domain gangq.delay as real check (value >= 0 and value <= 1e7);
comment on domain gangq.delay is 'Seconds: 0 or more and at most 1e7.';
create domain gangq.budget as real check (value > 0 and value <= 1e9);
comment on domain gangq.budget is
  'Seconds: more than 0 and 1e9 at most, more than thirty years; null: the default.';
create domain gangq.share as real check (value > 0 and value <= 1);
comment on domain gangq.share is 'A share: more than 0 and at most 1.';
create domain gangq.weight as real check (value > 0 and value <= 1e6);
comment on domain gangq.weight is 'A weight: more than 0 and at most 1e6.';
create domain gangq.few as smallint check (value between 1 and 1000);
comment on domain gangq.few is 'A whole number from 1 to 1000; null: the default.';
create domain gangq.times as smallint check (value > 0);
comment on domain gangq.times is 'A whole number from 1 to 32767.';
create domain gangq.up_to_1000 as smallint check (value between 0 and 1000);
comment on domain gangq.up_to_1000 is 'A whole number from 0 to 1000.';
create domain gangq.planned_starts as smallint check (value between 0 and 64);
comment on domain gangq.planned_starts is 'A whole number from 0 to 64.';
create domain gangq.shapes_per_day as integer check (value between 1 and 1000000);
comment on domain gangq.shapes_per_day is 'A whole number from 1 to 1000000.';
create domain gangq.bytes as integer check (value > 0);
comment on domain gangq.bytes is 'A number of bytes, more than 0.';
create domain gangq.members as integer check (value between 1 and 100000);
comment on domain gangq.members is 'A whole number from 1 to 100000.';
create domain gangq.count as integer check (value >= 0);
comment on domain gangq.count is 'A whole number, 0 or more; null: no limit.';
create domain gangq.priority as integer check (value between -1000 and 1000);
comment on domain gangq.priority is '-1000 to 1000; higher runs first, and the default is 0.';
create domain gangq.gpus as integer check (value between 0 and 1024);
comment on domain gangq.gpus is
  '0 to 1024 whole devices, never shared; a MIG instance counts as a device.';
create domain gangq.vram_mb as integer check (value >= 0);
comment on domain gangq.vram_mb is 'MiB needed on each device, 0 or more.';
create domain gangq.memory_mb as bigint check (value between 0 and 1000000000000);
comment on domain gangq.memory_mb is 'MiB, 0 or more and 1e12 at most.';
create domain gangq.cpus as numeric check (value between 0 and 9999999);
comment on domain gangq.cpus is '0 or more and 9999999 at most; 0.5 is half a CPU.';
create domain gangq.amount as numeric check (value between 0 and 1e15);
comment on domain gangq.amount is 'A number, 0 or more; leave it out for no limit.';
create domain gangq.whole as numeric check (value between 0 and 1e15 and value = trunc(value));
comment on domain gangq.whole is 'A whole number, 0 or more; leave it out for no limit.';
create domain gangq.name as text check (value <> '' and length(value) <= 200);
comment on domain gangq.name is 'A text of 1 to 200 characters.';
create domain gangq.role_name as text check (value <> '' and length(value) <= 100);
comment on domain gangq.role_name is 'A text of 1 to 100 characters.';
create domain gangq.object as jsonb check (jsonb_typeof(value) = 'object');
comment on domain gangq.object is 'A JSON object; labels are {"gpu": "h100"}, each with one value.';
create domain gangq.policy as text check (value in ('priority', 'fifo', 'fair', 'largest_first'));
comment on domain gangq.policy is 'priority, fifo, fair or largest_first.';
create domain gangq.others as text check (value in ('owner', 'shared'));
comment on domain gangq.others is 'owner or shared.';
create domain gangq.retention_class as text check (value in ('short', 'long', 'forever'));
comment on domain gangq.retention_class is 'short, long or forever.';
create domain gangq.kept_for as interval check (value between '0' and '100 years');
comment on domain gangq.kept_for is
  'A text like "7 days", 0 to 100 years; a queue''s retention_done "forever" has no end.';
create domain gangq.watches as text[] check (value <@ '{budget,stall,health,fault,gang}');
comment on domain gangq.watches is 'An array of budget, stall, health, fault and gang.';
create domain gangq.levels as text[]
  check (cardinality(value) between 1 and 8 and 'host' = any (value));
comment on domain gangq.levels is
  '1 to 8 levels, host among them, broad to narrow: ["zone", "rack", "host"].';
create domain gangq.wake as text check (value in ('commit', 'sleepers', 'never'));
comment on domain gangq.wake is 'commit, sleepers or never.';
create domain gangq.strategy as text
  check (value in ('pack', 'spread', 'strict_pack', 'strict_spread'));
comment on domain gangq.strategy is
  'pack: fewest hosts; spread: most; strict_pack: one host; strict_spread: a host for each member.';
create domain gangq.operator as text
  check (value in ('=', '!=', 'in', 'notin', 'exists', 'absent', '<', '<=', '>', '>='));
comment on domain gangq.operator is
  'Operators are =, !=, in, notin, exists, absent, <, <=, > and >=.';
create domain gangq.failure_policy as text
  check (value in ('restart_gang', 'restart_member', 'shrink', 'fail'));
comment on domain gangq.failure_policy is
  'restart_gang, restart_member (only the lost one), shrink (the others go on without it) or fail.';
create domain gangq.checkpoint_mode as text check (value in ('each', 'rank0'));
comment on domain gangq.checkpoint_mode is
  'each: every member saves its own part; rank0: rank 0 saves for all; null: each, and rank0 for '
  'an elastic gang.';
create domain gangq.timeout_style as text check (value in ('requeue', 'hard', 'soft'));
comment on domain gangq.timeout_style is
  'requeue: it backs off if no worker could hold it or its planned start is overdue, else it waits '
  'on; hard: it fails; soft: its members run as single jobs; null: as the queue above says, then '
  'requeue.';

-- Applied migrations, plus one row named "code" whose checksum stands for all replaceable files
-- together.
create table gangq.migrations (
  -- File name without its folder, or "code".
  name text primary key,
  -- SHA-256 of what was applied, in hexadecimal.
  checksum text not null,
  -- When it was applied, by the database's clock.
  applied_at timestamptz not null default clock_timestamp()
);

-- Settings and queues -----------------------------------------------------------------------------

-- Numbers that hold for the whole installation; one row. Change with gangq.configure().
create table gangq.settings (
  -- Always true: there is one row.
  singleton boolean primary key default true check (singleton),
  -- Seconds between a worker's heartbeats.
  heartbeat_s gangq.seconds not null default 5,
  -- Length of a lease: the longest outage running work survives, and the slowest recovery from a
  -- vanished host.
  lease_s gangq.seconds not null default 120,
  -- A worker that could not renew has SIGKILLed its work this long before its lease ends.
  lease_margin_s gangq.delay not null default 10,
  -- Seconds between SIGTERM and SIGKILL when a job is told to stop.
  grace_s gangq.delay not null default 15,
  -- Seconds a reserved member may wait to be claimed.
  claim_deadline_s gangq.seconds not null default 30,
  -- Seconds after which a job told to stop and not acknowledged loses its renewal.
  ack_timeout_s gangq.seconds not null default 45,
  -- A worker silent for longer is not considered for placement.
  candidate_silence_s gangq.seconds not null default 15,
  -- A worker that missed a claim deadline is passed over for this long.
  pass_over_s gangq.delay not null default 60,
  -- A worker silent for longer is flagged; nothing is freed by that.
  flag_after_s gangq.seconds not null default 30,
  -- Seconds between safety ticks.
  tick_s gangq.seconds not null default 1,
  -- First delay before a drained gang is admitted again; doubles with each miss.
  gang_backoff_s gangq.delay not null default 1,
  -- Longest such delay.
  gang_backoff_max_s gangq.delay not null default 300,
  -- Topology levels, broad to narrow. host is the worker's host; any other is the value of the
  -- worker's label of that name.
  topology gangq.levels not null default '{host}',
  -- How many waiting gangs, in order, get a planned start that others may not delay; 0: none, first
  -- come what fits.
  reservations gangq.planned_starts not null default 4,
  -- Seconds a gang may wait for placement while eligible, when neither it nor its queue says.
  placement_timeout_s gangq.seconds not null default 900,
  -- A pass that has told so many gangs and jobs to stop for others begins with no
  -- further gang; 0: never.
  preemptions_per_pass gangq.up_to_1000 not null default 4,
  -- A job whose model a worker has loaded may overtake jobs of its own priority submitted up to
  -- this many seconds before it.
  warm_s gangq.delay not null default 10,
  -- True: every pass that decides something keeps what it saw, so that it can be replayed.
  record_decisions boolean not null default false,
  -- Times a job may be handed back or told to stop through no fault of its own before it is failed:
  -- even those must not loop.
  max_stops gangq.times not null default 100,
  -- Wall-clock budget of a job without devices when neither job, task nor queue sets one, seconds.
  budget_s gangq.budget not null default 2100,
  -- The same for a job that holds devices.
  budget_gpu_s gangq.budget not null default 8100,
  -- Once a job beats: seconds without a beat before a stall is suspected.
  stall_timeout_s gangq.seconds not null default 120,
  -- Seconds a job that holds devices may load before the idle device counts against it.
  load_grace_s gangq.seconds not null default 1200,
  -- Seconds of a wholly idle device, with nothing moving, that convict.
  health_window_s gangq.seconds not null default 300,
  -- Longest phase "long" of a job that is exempt from the stall watchdog, seconds.
  long_phase_s gangq.seconds not null default 3600,
  -- Seconds without a new step of any member before a gang is tripped for no collective progress.
  gang_stall_s gangq.seconds not null default 1200,
  -- Seconds a member must lag behind its gang before it is called a straggler; after twice that, on
  -- record.
  straggler_s gangq.seconds not null default 300,
  -- Share of live workers suspect within a minute above which no stall or health trip is carried
  -- out: the fault is elsewhere.
  brake_share gangq.share not null default 0.2,
  -- Seconds after which the brake lets a held stall or health trip go, unless suspects of other
  -- gangs or workers wait for the same file system or peer, or the database was away within a
  -- lease.
  brake_hold_s gangq.seconds not null default 900,
  -- Different jobs tripping on one device within a day that put it into quarantine.
  device_trips gangq.times not null default 3,
  -- How often a host, and each worker of it, may be restarted in an hour. Restarts of a host within
  -- ten minutes are one.
  bounces_per_hour gangq.times not null default 4,
  -- Watchdog classes that report and do not stop anything: budget, stall, health, fault, gang.
  notify_only gangq.watches not null default '{}',
  -- Most distinct requirements that one login may add within 24 hours; admins may add any number.
  new_shapes_per_day gangq.shapes_per_day not null default 1000,
  -- Largest checkpoint stored in the database; larger ones belong in shared storage, only their
  -- address here.
  checkpoint_bytes gangq.bytes not null default 1048576,
  -- Largest log kept per attempt.
  log_bytes gangq.bytes not null default 1048576,
  -- How long history of class short is kept.
  retention_short gangq.kept_for not null default '7 days',
  -- How long history of class long, and events, are kept.
  retention_long gangq.kept_for not null default '30 days',
  -- How long ended incarnations stay listed, and finished jobs know where they ran.
  incarnation_retention gangq.kept_for not null default '7 days'
);
insert into gangq.settings default values;

-- Queues and the defaults their jobs inherit at submit. Read the view queues; change with
-- gangq.set_queue().
create table gangq.queues_table (
  -- The queue's name; a queue named a.b is a child of queue a.
  name text primary key check (name <> '' and length(name) <= 100),
  -- True: nothing new starts from this queue; running work goes on.
  paused boolean not null default false,
  -- True: takes no new submissions; what it has is worked off.
  draining boolean not null default false,
  -- Order of what waits in it: priority (then age), fifo (age alone, inside this queue), fair
  -- (priority, then the submitter and the child queue with the least dominant share), largest_first
  -- (priority, then size).
  policy gangq.policy not null default 'priority',
  -- What the queue and its children may claim back from others: gpus, memory_mb, cpus, jobs.
  guaranteed gangq.object not null default '{}',
  -- What the queue and its children may hold at once: gpus, memory_mb, cpus, jobs; absent: no
  -- limit.
  maximum gangq.object not null default '{}',
  -- What one submitter may hold at once in it and its children: gpus, jobs, gangs; absent: no
  -- limit.
  submitter_maximum gangq.object not null default '{}',
  -- Gangs that may be placed at once, children included; null: no limit.
  max_running_gangs gangq.count,
  -- Jobs, members included, that may be placed at once, children included; null: no limit.
  max_running_jobs gangq.count,
  -- Whether it has any limit itself: only then is it locked and counted.
  limited boolean not null generated always as (
    maximum <> '{}' or submitter_maximum <> '{}'
    or max_running_gangs is not null or max_running_jobs is not null) stored,
  -- Its share beside its siblings where the parent's policy is fair.
  weight gangq.weight not null default 1,
  -- Whether its gangs may displace others.
  preempts boolean not null default true,
  -- Whether its work may be displaced.
  preemptible boolean not null default true,
  -- Seconds that its work runs undisturbed before it may be displaced.
  min_run_s gangq.delay not null default 300,
  -- Placement timeout of its gangs, seconds; null: the parent's, then the installation's.
  placement_timeout_s gangq.seconds,
  -- What that timeout does: requeue, hard or soft; null: the parent's, then requeue.
  timeout_style gangq.timeout_style,
  -- Who may cancel, retry, reprioritise and read the work of others in it: owner (admins only) or
  -- shared (every submitter).
  others gangq.others not null default 'owner',
  -- Highest priority by role: {"alice": 100, "gangq_submitter": 10}. It holds in the queues below
  -- as well; no entry: no ceiling.
  ceilings gangq.object not null default '{}',
  -- Attempts a job may spend before it is failed.
  max_attempts gangq.few not null default 3,
  -- Times a job may lose its worker before it is failed.
  max_crashes gangq.few not null default 3,
  -- So many watchdog trips of a job are sent back; the next one ends it. 3: three trips are sent
  -- back, the fourth ends the job.
  max_trips gangq.few not null default 3,
  -- First delay before a failed job is tried again; doubles, with jitter.
  backoff_s gangq.delay not null default 5,
  -- Longest such delay.
  backoff_max_s gangq.delay not null default 600,
  -- Wall-clock budget of a job, seconds; null: the worker's default.
  budget_s gangq.budget,
  -- Largest payload or result.
  max_payload_bytes gangq.bytes not null default 1048576,
  -- Retention class of done jobs: short, long or forever.
  retention_done gangq.retention_class not null default 'short',
  -- Retention class of failed and cancelled jobs.
  retention_failed gangq.retention_class not null default 'long',
  -- When the queue was made.
  created_at timestamptz not null default clock_timestamp()
);
insert into gangq.queues_table (name) values ('default');
-- What a claim must know of the queues: nothing at all, as a rule.
create index queues_table_watched on gangq.queues_table (name)
  where paused or limited or policy = 'fair';

-- What the watchdogs allow the jobs of one task; null: the installation's number. Change with
-- gangq.set_task().
create table gangq.task_settings (
  -- The task's name; "command" for commands.
  task gangq.name primary key,
  -- Wall-clock budget, seconds; a job's own comes first, the queue's last.
  budget_s gangq.budget,
  -- Seconds without a beat before a stall is suspected; null: learned from its jobs, never under
  -- the installation's.
  stall_timeout_s gangq.seconds,
  -- Seconds its jobs may load.
  load_grace_s gangq.seconds,
  -- Seconds of a wholly idle device that convict.
  health_window_s gangq.seconds,
  -- Longest exempt phase, seconds.
  long_phase_s gangq.seconds,
  -- Classes that only report for this task; null: the installation's.
  notify_only gangq.watches
);

-- The options each task was last declared with, by the newest registration of a worker that runs
-- it; no row: none.
create table gangq.task_options (
  -- The task.
  task gangq.name primary key,
  -- Where its jobs wait; here and below null: not declared.
  queue text,
  -- -1000 to 1000, higher first.
  priority gangq.priority,
  -- Whole devices needed.
  gpus gangq.gpus,
  -- Device memory needed on each of them, MiB.
  vram_mb gangq.vram_mb,
  -- Host memory needed, MiB.
  memory_mb gangq.memory_mb,
  -- CPUs needed.
  cpus gangq.cpus,
  -- Labels the worker must carry.
  labels gangq.object,
  -- Conditions on the worker, as shapes keep them.
  selector jsonb,
  -- Taints it may run in spite of, as shapes keep them.
  tolerates text[],
  -- What it needs loaded.
  model gangq.name,
  -- Wall-clock budget of an attempt, seconds.
  budget_s gangq.budget,
  -- Attempts it may spend.
  max_attempts gangq.few,
  -- How often its worker may be lost.
  max_crashes gangq.few,
  -- How often a watchdog may trip.
  max_trips gangq.few,
  -- The worker that declared these options.
  worker text not null,
  -- When it first did.
  declared_at timestamptz not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What work asks for ------------------------------------------------------------------------------

-- Every distinct requirement ever submitted, interned: a claim matches shapes, never single jobs.
-- Not unique on purpose: two transactions that meet a new shape at once may both add it, so that
-- neither waits for the other.
create table gangq.shapes (
  -- Key.
  id integer generated always as identity primary key,
  -- Queue the job waits in.
  queue text not null references gangq.queues_table (name),
  -- Task to run; "command" for a command.
  task text not null check (task <> '' and length(task) <= 200),
  -- Whole devices needed.
  gpus smallint not null check (gpus between 0 and 1024),
  -- Device memory needed on each of them, MiB.
  vram_mb integer not null check (vram_mb >= 0 and (vram_mb = 0 or gpus > 0)),
  -- Host memory needed, MiB.
  memory_mb bigint not null check (memory_mb >= 0),
  -- CPUs needed; may be fractional.
  cpus numeric(10, 3) not null check (cpus >= 0),
  -- Labels the worker must carry with exactly these values.
  labels jsonb not null check (jsonb_typeof(labels) = 'object'),
  -- Model the job needs loaded; a worker that has it is preferred. Null: none.
  model text check (model <> '' and length(model) <= 200),
  -- Devices it must not run on, because an attempt of it tripped there; null: any.
  avoid bigint[],
  -- Conditions on labels beyond equality: [{"key", "op", "values"}], all of which must hold; null:
  -- none.
  selector jsonb check (jsonb_typeof(selector) = 'array'),
  -- Taints it may run in spite of: key, key=value, or *; null: none.
  tolerates text[],
  -- selector and tolerates as one predicate on a worker; null: it has neither, and no taint is
  -- tolerated.
  selects jsonpath,
  -- Whose single jobs, in queues that tell submitters apart (a fair order, or limits of each);
  -- null: anybody's.
  submitter text,
  -- Needs a slot and nothing else.
  plain boolean not null generated always as (gpus = 0 and memory_mb = 0 and cpus = 0) stored,
  -- A worker that could run it has been known; false: submit looks.
  fits boolean not null default false,
  -- SHA-256 of everything it asks for.
  digest bytea not null,
  -- The login whose submission added it; null: a trip did.
  login text,
  -- When a submission added it; null as login is.
  added_at timestamptz
);
create index shapes_added on gangq.shapes (login, added_at) where login is not null;
create index shapes_digest on gangq.shapes (digest);

-- Every distinct demand of a gang ever submitted, interned like shapes: gangs alike are judged
-- once. Not unique on purpose.
create table gangq.gang_kinds (
  -- Key.
  id integer generated always as identity primary key,
  -- Queue the gang waits in.
  queue text not null references gangq.queues_table (name),
  -- Topology level of which the whole gang must share one domain; null: none.
  require text,
  -- Topology level of which it should share one domain, else of the next broader one; null: none.
  prefer text,
  -- Gangs of one such name never share a host; null: it may share.
  apart text,
  -- All of it, roles included, in one canonical text.
  spec text not null
);
create index gang_kinds_spec on gangq.gang_kinds (md5(spec));

-- The roles of a kind of gang, in rank order. A gang whose members are all alike has one.
create table gangq.kind_roles (
  -- The kind.
  kind_id integer not null references gangq.gang_kinds (id),
  -- Order of the role, from 1.
  ordinal smallint not null check (ordinal >= 1),
  -- The role's name, unique in its gang.
  name text not null check (name <> '' and length(name) <= 100),
  -- What each of its members needs.
  shape_id integer not null references gangq.shapes (id),
  -- Members without which the gang does not start.
  min_members integer not null check (min_members >= 1),
  -- Members it takes when there is room; more than min_members: the role is elastic.
  max_members integer not null check (max_members >= min_members),
  -- live_jobs.rank of its first member.
  first_rank integer not null check (first_rank >= 0),
  -- pack (fewest hosts), spread (most), strict_pack (one host), strict_spread (a host each).
  strategy text not null check (strategy in ('pack', 'spread', 'strict_pack', 'strict_spread')),
  -- Topology level of which the role must share one domain.
  require text,
  -- Topology level of which it should share one domain.
  prefer text,
  -- Members are spread evenly over the hosts that are used.
  balanced boolean not null,
  primary key (kind_id, ordinal)
);

-- Workers and devices -----------------------------------------------------------------------------

-- One row per start of a worker. Every word a worker says carries its incarnation.
create table gangq.incarnations (
  -- The incarnation: never reused, so a restarted worker cannot be mistaken for its predecessor.
  id bigint primary key,
  -- The worker's name; one live incarnation per name. Names reach command lines of the bouncer,
  -- which runs as root: nothing that a shell, a program or a terminal takes for more than a name.
  name text not null check (name ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'),
  -- The host it runs on.
  host text not null check (host ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'),
  -- Where other members reach this host.
  address text not null check (address ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'),
  -- The login that registered it.
  login text not null default session_user,
  -- live, draining (takes nothing new), retired (stopped as asked) or dead.
  state text not null default 'live' check (state in ('live', 'draining', 'retired', 'dead')),
  -- Placed jobs and members it runs at once.
  slots integer not null check (slots between 0 and 10000),
  -- Light jobs it runs at once.
  light integer not null check (light between 0 and 10000),
  -- Light jobs it may hold for its one light slot and run one after another.
  prefetch integer not null default 1
    check (prefetch between 1 and 1000 and (prefetch = 1 or light = 1)),
  -- Host memory it offers, MiB.
  memory_mb bigint not null check (memory_mb >= 0),
  -- CPUs it offers.
  cpus numeric(10, 3) not null check (cpus >= 0),
  -- Queues it serves.
  queues text[] not null,
  -- Tasks it can run; null: any.
  tasks text[],
  -- Per task, the options that this worker declares it with; null: it said nothing.
  task_options jsonb check (jsonb_typeof(task_options) = 'object'),
  -- Labels it carries.
  labels jsonb not null default '{}' check (jsonb_typeof(labels) = 'object'),
  -- Keeps off every job that does not tolerate them: key or key=value. The worker's own, then the
  -- operator's.
  taints text[] not null default '{}',
  -- The last of taints: set by an operator for the worker by name, so that they outlive its
  -- restart.
  operator_taints text[] not null default '{}',
  -- Boot of the host, for proof of death.
  boot_id text,
  -- Its process, for people and for proof of death.
  pid bigint,
  -- What its next incarnation needs to prove this one dead (start time, pid namespace).
  identity jsonb not null default '{}',
  -- When it registered.
  registered_at timestamptz not null,
  -- When it first claimed a job; null: it never has. Only hosts whose workers have worked count for
  -- the bouncer's brake.
  worked_at timestamptz,
  -- When it retired or was judged dead.
  ended_at timestamptz,
  -- When its silence was noticed; null while it is heard.
  flagged_at timestamptz,
  -- Not considered for placement before this time.
  passed_over_until timestamptz,
  -- Why an operator or a fault keeps it from taking work; null: it may.
  quarantined text,
  -- The model it has loaded; null: none, or not said.
  model text,
  -- It holds no claim with a lower token.
  held_from bigint not null default 0,
  -- It tripped and its process is gone by then unless nothing can kill it; null: not the case, or
  -- its death is proven.
  exits_at timestamptz,
  -- The code it exits with after a trip.
  exit_code smallint,
  -- A process of it survived SIGKILL: its host needs a reboot.
  reboot_needed boolean not null default false,
  check ((state in ('retired', 'dead')) = (ended_at is not null)),
  check (slots + light > 0),
  constraint incarnations_offer check (cpus <= 9999999 and memory_mb <= 1000000000000)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create unique index incarnations_live_name on gangq.incarnations (name) where ended_at is null;
create index incarnations_name on gangq.incarnations (name, id);
create index incarnations_exiting on gangq.incarnations (exits_at) where exits_at is not null;

-- Until when each incarnation's work is its own. Rewritten by heartbeats: indexed by its key only,
-- so updates stay HOT.
create table gangq.leases (
  -- Whose lease.
  incarnation bigint primary key references gangq.incarnations (id) on delete cascade,
  -- Nothing of this worker is re-queued by the clock before then.
  expires_at timestamptz not null,
  -- Last heartbeat.
  renewed_at timestamptz not null,
  -- Length of each renewal, seconds.
  lease_s real not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Workers waiting for a wake-up. A commit that notifies takes a global lock, so submit notifies
-- only these.
create table gangq.sleepers (
  -- Who sleeps.
  incarnation bigint primary key references gangq.incarnations (id) on delete cascade,
  -- Queues it would serve.
  queues text[] not null,
  -- Since when.
  since timestamptz not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- A row to lock for each name of a worker: a registration, a quarantine and taints of one name come
-- one after another.
create table gangq.worker_names (
  -- The worker's name. Forgotten together with the last incarnation of it.
  name text primary key
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Hosts and workers that are given nothing new, by name: it outlives their restart.
create table gangq.cordons (
  -- host or worker.
  kind text not null check (kind in ('host', 'worker')),
  -- Its name.
  name text not null check (name <> ''),
  -- True: what runs there is moved away.
  drain boolean not null,
  -- Since when.
  since timestamptz not null,
  -- Drain: what has found no other place by then is told to stop; null: never.
  deadline timestamptz,
  -- Why.
  reason text not null,
  -- The login that said so.
  operator text not null,
  primary key (kind, name)
);

-- One row per physical device (or MIG instance) ever offered. Read the view devices.
create table gangq.device_registry (
  -- Key.
  id bigint generated always as identity primary key,
  -- The driver's UUID; for declared devices one made from host, worker and index.
  uuid text not null unique check (uuid <> ''),
  -- Host it sits in.
  host text not null check (host ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'),
  -- Index on that host as its worker sees it.
  index integer not null check (index >= 0),
  -- Memory, MiB.
  vram_mb integer not null check (vram_mb >= 0),
  -- Model name.
  model text not null default '',
  -- nvml, amdsmi, or declared by the operator.
  source text not null check (source in ('nvml', 'amdsmi', 'declared')),
  -- Incarnation whose jobs may use it; null: nobody.
  offered_by bigint references gangq.incarnations (id) on delete set null
);
create index device_registry_offered_by on gangq.device_registry (offered_by);

-- Which live incarnations would offer a device; one of them does (device_registry.offered_by).
create table gangq.device_claimants (
  -- The device.
  device_id bigint not null references gangq.device_registry (id) on delete cascade,
  -- Who sees it.
  incarnation bigint not null references gangq.incarnations (id) on delete cascade,
  primary key (device_id, incarnation)
);
create index device_claimants_incarnation on gangq.device_claimants (incarnation);

-- The latest reading of each device that a worker samples; brought by heartbeats, indexed by its
-- key only.
create table gangq.device_readings (
  -- The device.
  device_id bigint primary key references gangq.device_registry (id) on delete cascade,
  -- Who read it.
  incarnation bigint not null,
  -- When it reached the database.
  at timestamptz not null,
  -- gpu_pct, memory_pct, used_mb, total_mb, temperature_c, power_w, throttle, ...; null or absent:
  -- the driver does not say.
  data jsonb not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Gangs and jobs ----------------------------------------------------------------------------------

-- Every legal change of a job's state. old_state "" is birth; ends in done, failed and cancelled
-- leave for history.
create table gangq.transitions (
  -- From; empty for a new job.
  old_state text not null,
  -- To.
  new_state text not null,
  -- The function that makes it.
  verb text not null,
  -- The role that may call it.
  role text not null,
  -- What it costs: attempt, crash, trip, stop, refund or nothing.
  charges text not null,
  primary key (old_state, new_state, verb)
);

-- Gangs that have not ended. Read the view gangs.
create table gangq.live_gangs (
  -- The gang.
  id bigint primary key,
  -- Priority and age in one ascending key, comparable with live_jobs.order_key.
  order_key bigint not null,
  -- What each member of its first role needs.
  shape_id integer not null references gangq.shapes (id),
  -- Everything it asks for.
  kind_id integer not null,
  -- Members at most; world_size says how many of them this epoch has.
  size integer not null check (size between 1 and 100000),
  -- Members of this epoch; null while it is not placed.
  world_size integer check (world_size between 1 and size),
  -- Reservations so far; each member of one epoch started together.
  epoch integer not null default 0 check (epoch >= 0),
  -- -1000 to 1000, higher first.
  priority smallint not null check (priority between -1000 and 1000),
  -- Launches that ended because a member failed, whichever: rotating culprits cannot loop a gang.
  attempts smallint not null default 0,
  -- How many such launches it may spend.
  max_attempts smallint not null,
  -- Launches that ended because a member's worker was lost.
  crashes smallint not null default 0,
  -- How many of those it survives.
  max_crashes smallint not null,
  -- Launches that ended because a member tripped a watchdog.
  trips smallint not null default 0,
  -- How many of those it survives.
  max_trips smallint not null,
  -- Reservations that were not claimed in time; nobody is charged.
  placement_misses integer not null default 0,
  -- Drains at the start barrier; nobody is charged.
  never_started integer not null default 0,
  -- Times it was told to stop for somebody else.
  preemptions integer not null default 0,
  -- waiting, blocked, reserved, running, draining, done, failed, cancelled.
  state text not null
    check (state in (
      'waiting', 'blocked', 'reserved', 'running', 'draining', 'done', 'failed', 'cancelled')),
  -- What a lost or failed member means: restart_gang (all stop and start again), restart_member
  -- (only it, the others are told through a new epoch), shrink (the others go on without it), fail
  -- (the gang fails).
  failure_policy text not null default 'restart_gang'
    check (failure_policy in ('restart_gang', 'restart_member', 'shrink', 'fail')),
  -- Role whose members, once done, end the gang; null: all members must be done.
  completion text,
  -- Whether it may be displaced, if its queue allows that at all.
  preemptible boolean not null default true,
  -- each: a step counts when every member saved it; rank0: rank 0's bytes serve all.
  checkpoint_mode text not null check (checkpoint_mode in ('each', 'rank0')),
  -- Why the last drain began.
  drain_cause text,
  -- The member that caused it; null when none did.
  drain_trigger bigint,
  -- True: the drain ends in cancelled.
  cancelling boolean not null default false,
  -- Checkpoint step every member of this epoch restores; null: from the start.
  restore_step bigint,
  -- Longest wall-clock budget among its members, seconds; null: the installation's default.
  budget_s real,
  -- Seconds its reserved members may wait to be claimed.
  claim_deadline_s real not null,
  -- Seconds it may wait for placement while eligible.
  timeout_s real not null,
  -- What happens then: requeue, hard (it fails), soft (its members run as single jobs).
  timeout_style text not null default 'requeue'
    check (timeout_style in ('requeue', 'hard', 'soft')),
  -- When the placement timeout strikes. Time in which it could not be placed is added: that until
  -- now is in held_s, later time is added by time_out.
  timeout_at timestamptz,
  -- How often it has timed out.
  timeouts integer not null default 0,
  -- Seconds in which its kind had not been eligible when timeout_at was set: only what comes later
  -- counts.
  held_s double precision not null default 0,
  -- Host of rank 0 in this epoch.
  master_host text,
  -- Address where members find rank 0.
  master_addr text,
  -- Port that rank 0's worker holds for the rendezvous.
  master_port integer,
  -- When it was submitted.
  submitted_at timestamptz not null,
  -- Backing off until then.
  not_before timestamptz,
  -- When this epoch was reserved.
  reserved_at timestamptz,
  -- Until when its members must be claimed.
  deadline_at timestamptz,
  -- When the start barrier opened; null: nobody's code has begun.
  go_at timestamptz,
  -- Running: since when this epoch lacks a member that is to be replaced (restart_member); null
  -- once every member is claimed.
  missing_since timestamptz,
  -- When the present drain began.
  drain_started_at timestamptz,
  -- A name for people.
  name text,
  -- Set at submit when no registered worker set could hold it: why.
  note text,
  -- The role that submitted it: shares and limits per submitter count by this.
  submitter text not null,
  -- The login that submitted it, whatever role it had set.
  login text not null default session_user,
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
  -- The job.
  id bigint primary key,
  -- Priority and first-in-first-out position in one ascending key.
  order_key bigint not null,
  -- Fencing token of the present claim; null unless running or preempting.
  token bigint,
  -- Token of the last attempt that ended: its final call may be repeated.
  final_token bigint,
  -- Where it is placed: set while reserved, running or preempting.
  incarnation bigint,
  -- Members: where the last attempt was claimed; it stays when the placement ends. A single job
  -- that tripped: which worker has to be gone before it runs again.
  ran_on bigint,
  -- Its gang; null for a single job.
  gang_id bigint,
  -- The job that submitted it; null: a login did.
  parent bigint,
  -- When it was submitted.
  submitted_at timestamptz not null,
  -- Not before then.
  due_at timestamptz,
  -- When the present or last attempt was claimed.
  claimed_at timestamptz,
  -- Reserved: to be claimed before then.
  deadline_at timestamptz,
  -- When it was told to stop.
  told_at timestamptz,
  -- When it ended.
  finished_at timestamptz,
  -- The claim call that took it: the same id returns the same claims.
  request_id uuid,
  -- What it needs.
  shape_id integer not null,
  -- Its place in the gang at its largest, from 0; its rank, unless epoch_rank says otherwise.
  rank integer,
  -- Members of elastic gangs: the rank in this epoch; null: rank, or not part of this epoch.
  epoch_rank integer,
  -- Wall-clock budget, seconds; null: the worker's default.
  budget_s real,
  -- Jobs that must be done first.
  waits_on integer not null default 0,
  -- -1000 to 1000, higher first.
  priority smallint not null,
  -- Attempts charged; counted at claim.
  attempts smallint not null default 0,
  -- How many it may spend.
  max_attempts smallint not null,
  -- Times its worker was lost.
  crashes smallint not null default 0,
  -- How often that may happen.
  max_crashes smallint not null,
  -- Watchdog trips.
  trips smallint not null default 0,
  -- So many trips are sent back; the next one ends the job. 3: three trips are sent back, the
  -- fourth ends the job.
  max_trips smallint not null,
  -- Times it was handed back or told to stop through no fault of its own.
  stops smallint not null default 0,
  -- Ordinal of its role; null: the first.
  role smallint,
  -- It became pending, or got its present place, after its submission: it may stand before jobs
  -- that were claimed long ago.
  returned boolean not null default false,
  -- scheduled, waiting, blocked, pending, reserved, running, preempting, preempted, done, failed,
  -- cancelled.
  state text not null,
  -- Which slot its present or last claim took: a light one, or one for placed work.
  light boolean not null default false,
  -- Why it was told to stop: drain, cancel, preempt or move.
  stop_reason text,
  -- The role that submitted it: shares and limits per submitter count by this.
  submitter text not null,
  -- The login that submitted it, whatever role it had set.
  login text not null default session_user,
  -- Arguments for the task.
  payload jsonb,
  -- What a done member returned.
  result jsonb,
  -- The last error: type, message, traceback, host, log tail.
  error jsonb
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

create function gangq.is_sound(j gangq.live_jobs) returns boolean language plpgsql immutable
set search_path = pg_catalog, pg_temp as $$
begin
  return (j.incarnation is not null) = (j.state in ('running', 'reserved', 'preempting'))
    and (j.token is not null) = (j.state in ('running', 'preempting'))
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

-- Which live job waits for which. No foreign keys: their row triggers would cost every finished job
-- a query.
create table gangq.dependencies (
  -- The one that waits.
  job_id bigint not null,
  -- The one it waits for.
  on_job_id bigint not null,
  -- How the awaited job ended; promote_due then takes the row away.
  outcome text check (outcome in ('done', 'failed', 'cancelled')),
  -- True: the row was visible at a moment when no transaction was ending the awaited job, so
  -- whoever ends it sees the row.
  settled boolean not null default false,
  primary key (on_job_id, job_id)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);
create index dependencies_job on gangq.dependencies (job_id);
create index dependencies_settled on gangq.dependencies (job_id) where outcome is not null;
create index dependencies_new on gangq.dependencies (on_job_id, job_id)
  where not settled and outcome is null;

-- Jobs that ended while somebody held a row of their dependents, or in a transaction that could not
-- see them all: promote_due tells those.
create table gangq.unsettled (
  -- The job that ended.
  job_id bigint primary key
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Who holds each device. The key makes it one holder at most.
create table gangq.device_holds (
  -- The device.
  device_id bigint primary key references gangq.device_registry (id),
  -- job, place (open and not filled), or quarantine.
  kind text not null check (kind in ('job', 'place', 'quarantine')),
  -- The job that holds it, from reservation or claim until it is proven stopped.
  job_id bigint,
  -- That job's claim; null while only reserved.
  token bigint,
  -- The open place that holds it while no job sits there.
  place_id bigint,
  -- Why it is quarantined.
  reason text,
  -- Since when.
  since timestamptz not null,
  -- Quarantine of a device whose worker is about to exit after a trip: lifted by proof of its
  -- death.
  incarnation bigint,
  -- When that quarantine ends by itself: the lease of that worker would have ended then.
  until timestamptz,
  check ((kind = 'job') = (job_id is not null)),
  check ((kind = 'place') = (place_id is not null)),
  check ((kind = 'quarantine') = (reason is not null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index device_holds_job on gangq.device_holds (job_id) where job_id is not null;
create index device_holds_place on gangq.device_holds (place_id) where place_id is not null;

-- Where single jobs of one kind may start: opened by a decision, filled by the worker's claim. From
-- its opening on a place counts like its job: in the room of its worker, in its devices, in every
-- limit. A row of a job that has ended, and has not vacated it, counts for nothing.
create table gangq.places (
  -- Key.
  id bigint generated always as identity primary key,
  -- The worker.
  incarnation bigint not null references gangq.incarnations (id) on delete cascade,
  -- Whose jobs may fill it: those of this shape.
  shape_id integer not null references gangq.shapes (id),
  -- The devices of whoever sits in it.
  device_ids bigint[] not null,
  -- Who sits in it now; null: nobody yet, or nobody any more.
  job_id bigint,
  -- The claim of that job.
  token bigint unique,
  -- No job of a lower priority may fill it: others that wait for this room have this one.
  min_priority smallint not null default -1000,
  -- Nothing may fill it that could end later: a planned start needs its room; null: whenever.
  ends_by timestamptz,
  -- Whether the next job of its kind may follow the first.
  refills boolean not null,
  -- Nobody fills it after that; each pass that finds it still right moves this on.
  until timestamptz not null,
  check ((job_id is null) = (token is null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index places_incarnation on gangq.places (incarnation);

-- The last beat of each running job that beats; brought by heartbeats.
create table gangq.progress (
  -- The job.
  job_id bigint primary key,
  -- Its claim.
  token bigint not null,
  -- When the beat reached the database.
  beat_at timestamptz not null,
  -- The last step reported.
  step bigint,
  -- load, run, save or long; null: not said.
  phase text,
  -- When the step last changed.
  step_at timestamptz,
  -- Steps a second, smoothed; null until two steps were seen.
  rate real,
  -- Greatest common divisor of the differences between the steps that heartbeats brought: how many
  -- steps lie between two beats, at most. Null until two steps were seen.
  stride bigint,
  -- Since when this member has been much slower than its gang; null: it is not.
  lags_since timestamptz,
  -- step, total, phase and whatever the handler reported.
  data jsonb not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Saved states. A restore never mixes steps: see live_gangs.checkpoint_mode.
create table gangq.checkpoints (
  -- Whose.
  job_id bigint not null,
  -- At which step.
  step bigint not null check (step >= 0),
  -- Its gang.
  gang_id bigint,
  -- When.
  saved_at timestamptz not null,
  -- Opaque bytes.
  data bytea not null,
  primary key (job_id, step)
) with (
  autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200,
  toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_threshold = 1000
);
create index checkpoints_gang on gangq.checkpoints (gang_id, step) where gang_id is not null;
-- The tick forgets what was saved long ago, without reading the rest.
create index checkpoints_saved on gangq.checkpoints (saved_at);

-- What each submission with a request_id was answered since the tick last exchanged this table with
-- requests_before. An answer is kept for at least one hour, and for about two at most.
create table gangq.requests (
  -- As the caller made it. Each login has ids of its own.
  request_id uuid not null,
  -- The gang submitted; null: single jobs were.
  gang_id bigint,
  -- The login that submitted; for children of a job, the login that submitted the job.
  login text collate "C" not null,
  -- The jobs submitted, in order.
  job_ids bigint[] not null,
  -- What submit_gang said of the gang.
  note text,
  primary key (request_id, login)
) with (autovacuum_enabled = off, toast.autovacuum_enabled = off);
-- Compressing the ids of a thousand jobs takes as long as inserting ten of them.
alter table gangq.requests alter column job_ids set storage external;

-- What requests was until the tick last exchanged the two.
create table gangq.requests_before (
  like gangq.requests including all
) with (autovacuum_enabled = off, toast.autovacuum_enabled = off);

-- Placement ---------------------------------------------------------------------------------------

-- What is meant for something that waits: its planned start, or seats that are kept for it until
-- those who were told to stop for it have gone. Written by apply, read by board.
create table gangq.plans (
  -- Who it is for, as on a board: g7 a gang, k7/5 the single jobs of shape 7 with priority 5.
  ask text primary key check (ask ~ '^(g[0-9]+|k[0-9]+/-?[0-9]+)$'),
  -- Whether others were told to stop for it: then its seats are kept from everybody until it
  -- starts.
  kept boolean not null,
  -- Its place among the planned starts, from 1; null: others stop for it.
  place integer,
  -- When its seats are free if every estimate holds; of kept ones, when the promise lapses.
  starts_at timestamptz not null,
  -- When this was last found.
  decided_at timestamptz not null,
  -- The last pass that planned it, or could not carry out what it decided.
  pass bigint not null,
  -- Where: [{"worker", "devices", "memory_mb", "millicpus"}, ...], a seat each.
  seats jsonb not null check (jsonb_typeof(seats) = 'array'),
  check (kept = (place is null))
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Why what waits was not placed by the last pass: one row per kind, and one for each gang or line
-- of single jobs of which something else is so than of the first of its kind.
create table gangq.verdicts (
  -- The kind of gang; negative: a shape, for single jobs.
  kind_id integer not null,
  -- g7 a gang, k7/5 the single jobs of shape 7 with priority 5; empty: all others of the kind.
  ask text not null default '',
  -- The check that refused it: paused, quota, running_limit, submitter_limit, room, workers, ...
  gate text not null,
  -- Since when it is this one.
  since timestamptz not null,
  -- Seconds in which its gangs were not eligible (paused or over a limit) before since.
  held_s double precision not null default 0,
  -- Why it waits, in words.
  why text,
  -- What would let it start, in words.
  unblocks text,
  -- Whose end its planned start follows, in words.
  follows text,
  -- The numbers of that check.
  numbers jsonb,
  primary key (kind_id, ask)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- How long jobs of one task run that hold a device or belong to a gang: the estimate behind planned
-- starts.
create table gangq.runtimes (
  -- The queue.
  queue text not null,
  -- The task.
  task text not null,
  -- Ends it rests on.
  samples bigint not null check (samples >= 0),
  -- Running estimate of the 90th percentile, seconds.
  p90_s real not null check (p90_s >= 0),
  -- When it last changed.
  updated_at timestamptz not null,
  primary key (queue, task)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Passes that decided something, a row for each part that did, with the digest of what they saw;
-- with settings.record_decisions also that itself.
create table gangq.passes (
  -- When.
  at timestamptz not null,
  -- Which: the number of its board.
  pass bigint not null,
  -- MD5 of the board as text.
  digest text,
  -- As passed to gangq.apply.
  decisions jsonb not null,
  -- What was seen, in the first part; null: not recorded.
  board json
) partition by range (at);
create index passes_at on gangq.passes (at);

-- What has ended, and what happened ---------------------------------------------------------------

-- Jobs that have ended, one row per ending. Append-only; whole days are dropped after their
-- retention.
create table gangq.history (
  -- The job; a retried job has one row per ending.
  job_id bigint not null,
  token bigint,
  gang_id bigint,
  parent bigint,
  submitted_at timestamptz not null,
  claimed_at timestamptz,
  finished_at timestamptz not null,
  incarnation bigint,
  -- What it needed.
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
  -- done, failed or cancelled.
  state text not null check (state in ('done', 'failed', 'cancelled')),
  -- short, long or forever.
  retention text not null,
  submitter text not null,
  login text not null,
  payload jsonb,
  -- What it returned.
  result jsonb,
  error jsonb
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

-- Gangs that have ended. Append-only; whole days are dropped after their retention.
create table gangq.gang_history (
  -- The gang.
  gang_id bigint not null,
  -- When it ended.
  finished_at timestamptz not null,
  submitted_at timestamptz not null,
  -- What each member needed.
  shape_id integer not null,
  kind_id integer not null,
  size integer not null,
  -- Members of its last epoch.
  world_size integer,
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
  -- done, failed or cancelled.
  state text not null check (state in ('done', 'failed', 'cancelled')),
  failure_policy text not null,
  completion text,
  preemptible boolean not null,
  checkpoint_mode text not null,
  budget_s real,
  claim_deadline_s real not null,
  timeout_s real not null,
  timeout_style text not null,
  -- short, long or forever.
  retention text not null,
  name text,
  -- Why it failed or was cancelled.
  reason text,
  submitter text not null,
  login text not null
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

-- Endings that a retry has overtaken. Kept apart so that history stays append-only and the views
-- need not look for newer rows.
create table gangq.retried (
  -- The job retried.
  job_id bigint,
  -- The gang retried.
  gang_id bigint,
  -- Which of its endings was overtaken.
  finished_at timestamptz not null,
  check ((job_id is null) <> (gang_id is null)),
  unique (job_id, finished_at),
  unique (gang_id, finished_at)
);

-- Every abnormal transition and every step of a gang, written in the transaction that made it.
-- Append-only.
create table gangq.events (
  -- Order of writing.
  id bigint generated by default as identity,
  -- When.
  at timestamptz not null,
  -- What happened: reserve, rollback, preempt, drain, trip, reap, flag, quarantine, ...
  kind text not null,
  -- The gang.
  gang_id bigint,
  -- Its epoch.
  epoch integer,
  -- The job.
  job_id bigint,
  -- Its claim.
  token bigint,
  -- The worker's incarnation.
  incarnation bigint,
  -- The worker's name.
  worker text,
  -- The login whose session wrote this, and "login as role" where it had set another role. A tick
  -- writes for others too: then this is the login that ticked.
  actor text,
  -- Why, for people.
  reason text,
  -- Numbers and evidence.
  data jsonb
) partition by range (at);
create index events_gang on gangq.events (gang_id, id) where gang_id is not null;
create index events_job on gangq.events (job_id, id) where job_id is not null;
create index events_at on gangq.events (at);
create index events_by_id on gangq.events (id);
create index events_trips on gangq.events (at) where kind in ('trip', 'notify', 'held');
create index events_drains on gangq.events (at) where kind = 'drain';
create index events_displaced on gangq.events (at) where kind = 'preempt';
create index events_lost on gangq.events (at) where kind = 'lost';

-- What a watchdog saw: stacks, readings, beats, log tail. Apart from events, because stacks and
-- logs may show what a viewer must not see.
create table gangq.evidence (
  -- When; the same instant as its event.
  at timestamptz not null,
  -- As its event: suspect, trip, notify, held, dead or stuck.
  kind text not null,
  -- The job.
  job_id bigint,
  -- Its claim.
  token bigint,
  -- The worker's incarnation.
  incarnation bigint,
  -- The evidence.
  data jsonb not null
) partition by range (at);
create index evidence_job on gangq.evidence (job_id, at) where job_id is not null;
create index evidence_kind on gangq.evidence (kind, at);

-- Output of commands, bounded per attempt. gangq logs shows it.
create table gangq.logs (
  -- The job.
  job_id bigint not null,
  -- The attempt.
  token bigint not null,
  -- Order within the attempt.
  seq integer not null check (seq >= 0),
  -- When it reached the database.
  at timestamptz not null,
  -- Text; undecodable bytes are replaced.
  chunk text not null,
  -- What the attempt had printed when this chunk came, with it: bytes, and 64 for each chunk.
  upto bigint not null
) partition by range (at);
create index logs_job on gangq.logs (job_id, token, seq);

-- Maintenance -------------------------------------------------------------------------------------

-- What the last tick saw; one row. An outage since then gives every lease one full period before it
-- is judged.
create table gangq.tick_state (
  -- Always true: there is one row.
  singleton boolean primary key default true check (singleton),
  -- When the last tick ran.
  last_at timestamptz,
  -- When the server it ran on had started.
  server_started_at timestamptz,
  -- The server's timeline: changes at a failover.
  timeline text,
  -- When the last outage was seen to be over; leases are judged from here.
  outage_ended_at timestamptz,
  -- When partitions were last made and dropped.
  partitions_checked_at timestamptz,
  -- The last running gang whose progress was judged; 0: every one of them, at judged_at.
  judged_gang bigint not null default 0,
  -- When progress was last judged.
  judged_at timestamptz,
  -- When the server was last seen restarted or promoted, or its clock set back: every lease gets
  -- one full period from here.
  interrupted_at timestamptz,
  -- When the tick last exchanged requests and requests_before.
  requests_turned_at timestamptz
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into gangq.tick_state default values;

-- Where claims of light jobs begin: see 070_claim.sql.
create table gangq.lows (
  -- Whose jobs.
  shape_id integer not null references gangq.shapes (id) on delete cascade,
  -- The lowest key that a submission with this priority could have.
  start bigint not null,
  -- No job is pending below it but such as have returned.
  low bigint not null,
  -- What low may be raised to once every transaction older than this row has ended.
  marked bigint not null,
  primary key (shape_id, start)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Rows to lock. tick: one tick at a time; brake: one stall or health trip counts the others at a
-- time; wake: one of those that end jobs this moment asks for a tick; runtimes: one session adds a
-- first estimate.
create table gangq.lock_rows (
  -- What the lock is for.
  name text primary key,
  -- tick: how many have run. A caller that found one running waits for the run after it. pass: how
  -- many have begun. A decision from an older board changes nothing.
  runs bigint not null default 0
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into gangq.lock_rows (name) values ('tick'), ('pass'), ('brake'), ('wake'), ('runtimes'),
  ('lows');

-- Whose turn it is to decide; one row. Locked for a moment only, unlike the rows of tick and pass.
create table gangq.decider (
  -- Always true: there is one row.
  singleton boolean primary key default true check (singleton),
  -- Ticks that found something to be placed. Whoever decides goes on until he has seen what the
  -- last of them had.
  asked bigint not null default 0,
  -- Until when somebody has the turn; null: nobody.
  until timestamptz,
  -- When the last pass ended.
  decided_at timestamptz
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into gangq.decider default values;

-- What values of sequences are shifted by, so that none is given twice after a failover that loses
-- the end of the log; one row.
create table gangq.sequence_base (
  -- Always true: there is one row.
  singleton boolean primary key default true check (singleton),
  -- The server's timeline that base was computed for.
  timeline bigint not null,
  -- The shift on that timeline.
  base bigint not null check (base >= 0)
);
insert into gangq.sequence_base (timeline, base)
values (('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint, 0);

-- What has been learned of each task's beats: how long they may honestly stay away.
create table gangq.beat_gaps (
  -- The task.
  task text not null,
  -- Model of the devices it ran on; empty: none.
  device_class text not null,
  -- Longest gap between two beats of a job that then went on, warm-up excluded, seconds.
  longest_s real not null check (longest_s >= 0),
  -- Beats it rests on.
  beats bigint not null check (beats >= 0),
  -- When it last changed.
  updated_at timestamptz not null,
  primary key (task, device_class)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

