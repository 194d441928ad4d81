-- Placement: gangs of several roles, a tree of queues, planned starts, preemption, cordons, recorded decisions.
-- Only additions, so that the previous release's calls still resolve while both are in use. What touches rows touches
-- those of live gangs and queues, which are few.

alter table gangq.settings
  add column topology text[] not null default '{host}' check (cardinality(topology) between 1 and 8 and 'host' = any (topology)),
  add column reservations smallint not null default 4 check (reservations between 0 and 64),
  add column placement_timeout_s real not null default 900 check (placement_timeout_s > 0 and placement_timeout_s <= 1e7),
  add column preemptions_per_pass smallint not null default 4 check (preemptions_per_pass between 0 and 1000),
  add column record_decisions boolean not null default false;
comment on column gangq.settings.topology is 'Topology levels, broad to narrow. host is the worker''s host; any other is the value of the worker''s label of that name.';
comment on column gangq.settings.reservations is 'How many waiting gangs, in order, get a planned start that others may not delay; 0: none, first come what fits.';
comment on column gangq.settings.placement_timeout_s is 'Seconds a gang may wait for placement while eligible, when neither it nor its queue says.';
comment on column gangq.settings.preemptions_per_pass is 'An admission pass that has told so many gangs and jobs to stop for others begins with no further gang; 0: never.';
comment on column gangq.settings.record_decisions is 'True: every pass that decides something keeps what it saw, so that it can be replayed.';

-- Queues ----------------------------------------------------------------------------------------------------------

alter table gangq.queues_table
  drop constraint queues_table_policy_check,
  add constraint queues_table_policy_check check (policy in ('priority', 'fifo', 'fair', 'largest_first')),
  alter column policy set default 'priority',
  add column draining boolean not null default false,
  add column guaranteed jsonb not null default '{}' check (jsonb_typeof(guaranteed) = 'object'),
  add column maximum jsonb not null default '{}' check (jsonb_typeof(maximum) = 'object'),
  add column weight real not null default 1 check (weight > 0 and weight <= 1e6),
  add column max_running_gangs integer check (max_running_gangs >= 0),
  add column max_running_jobs integer check (max_running_jobs >= 0),
  add column submitter_maximum jsonb not null default '{}' check (jsonb_typeof(submitter_maximum) = 'object'),
  add column placement_timeout_s real check (placement_timeout_s > 0 and placement_timeout_s <= 1e7),
  add column timeout_style text check (timeout_style in ('requeue', 'hard', 'soft')),
  add column preempts boolean not null default true,
  add column preemptible boolean not null default true,
  add column min_run_s real not null default 300 check (min_run_s >= 0 and min_run_s <= 1e7),
  add column limited boolean not null generated always as (
    maximum <> '{}' or submitter_maximum <> '{}' or max_running_gangs is not null or max_running_jobs is not null) stored;
-- What a claim must know of the queues: nothing at all, as a rule.
create index queues_table_watched on gangq.queues_table (name) where paused or limited or policy = 'fair';
-- largest_first was what every queue had without anybody having asked for it: planned starts serve large gangs better.
update gangq.queues_table set policy = 'priority' where policy = 'largest_first';
comment on column gangq.queues_table.name is 'The queue''s name; a queue named a.b is a child of queue a.';
comment on column gangq.queues_table.policy is
  'Order of what waits in it: priority (then age), fifo (age alone, inside this queue), fair (priority, then the submitter '
  'and the child queue with the least dominant share), largest_first (priority, then size).';
comment on column gangq.queues_table.draining is 'True: takes no new submissions; what it has is worked off.';
comment on column gangq.queues_table.guaranteed is 'What the queue and its children may claim back from others: gpus, memory_mb, cpus, jobs.';
comment on column gangq.queues_table.maximum is 'What the queue and its children may hold at once: gpus, memory_mb, cpus, jobs; absent: no limit.';
comment on column gangq.queues_table.weight is 'Its share beside its siblings where the parent''s policy is fair.';
comment on column gangq.queues_table.max_running_gangs is 'Gangs that may be placed at once, children included; null: no limit.';
comment on column gangq.queues_table.max_running_jobs is 'Jobs, members included, that may be placed at once, children included; null: no limit.';
comment on column gangq.queues_table.submitter_maximum is 'What one submitter may hold at once in it and its children: gpus, jobs, gangs; absent: no limit.';
comment on column gangq.queues_table.placement_timeout_s is 'Placement timeout of its gangs, seconds; null: the parent''s, then the installation''s.';
comment on column gangq.queues_table.timeout_style is 'What that timeout does: requeue, hard or soft; null: the parent''s, then requeue.';
comment on column gangq.queues_table.preempts is 'Whether its gangs may displace others.';
comment on column gangq.queues_table.preemptible is 'Whether its work may be displaced.';
comment on column gangq.queues_table.min_run_s is 'Seconds that its work runs undisturbed before it may be displaced.';
comment on column gangq.queues_table.limited is 'Whether it has any limit itself: only then is it locked and counted.';

-- What a gang asks for --------------------------------------------------------------------------------------------

alter table gangq.shapes
  add column selector jsonb check (jsonb_typeof(selector) = 'array'),
  add column tolerates text[],
  add column selects jsonpath,
  add column submitter text;
comment on column gangq.shapes.selector is 'Conditions on labels beyond equality: [{"key", "op", "values"}], all of which must hold; null: none.';
comment on column gangq.shapes.tolerates is 'Taints it may run in spite of: key, key=value, or *; null: none.';
comment on column gangq.shapes.selects is 'selector and tolerates as one predicate on a worker; null: it has neither, and no taint is tolerated.';
comment on column gangq.shapes.submitter is 'Whose solo jobs, in queues that tell submitters apart (a fair order, or limits of each); null: anybody''s.';

alter table gangq.incarnations
  add column taints text[] not null default '{}',
  add column operator_taints text[] not null default '{}';
comment on column gangq.incarnations.taints is 'Keeps off every job that does not tolerate them: key or key=value. The worker''s own, then the operator''s.';
comment on column gangq.incarnations.operator_taints is 'The last of taints: set by an operator for the worker by name, so that they outlive its restart.';

create table gangq.gang_kinds (
  id integer generated always as identity primary key,
  queue text not null references gangq.queues_table (name),
  require text,
  prefer text,
  apart text,
  spec text not null
);
create index gang_kinds_spec on gangq.gang_kinds (md5(spec));
comment on table gangq.gang_kinds is
  'Every distinct demand of a gang ever submitted, interned like shapes: gangs alike are judged once. Not unique on purpose.';
comment on column gangq.gang_kinds.id is 'Key.';
comment on column gangq.gang_kinds.queue is 'Queue the gang waits in.';
comment on column gangq.gang_kinds.require is 'Topology level of which the whole gang must share one domain; null: none.';
comment on column gangq.gang_kinds.prefer is 'Topology level of which it should share one domain, else of the next broader one; null: none.';
comment on column gangq.gang_kinds.apart is 'Gangs of one such name never share a host; null: it may share.';
comment on column gangq.gang_kinds.spec is 'All of it, roles included, in one canonical text.';

create table gangq.kind_roles (
  kind_id integer not null references gangq.gang_kinds (id),
  ordinal smallint not null check (ordinal >= 1),
  name text not null check (name <> '' and length(name) <= 100),
  shape_id integer not null references gangq.shapes (id),
  min_members integer not null check (min_members >= 1),
  max_members integer not null check (max_members >= min_members),
  first_rank integer not null check (first_rank >= 0),
  strategy text not null check (strategy in ('pack', 'spread', 'strict_pack', 'strict_spread')),
  require text,
  prefer text,
  balanced boolean not null,
  primary key (kind_id, ordinal)
);
comment on table gangq.kind_roles is 'The roles of a kind of gang, in rank order. A gang whose members are all alike has one.';
comment on column gangq.kind_roles.kind_id is 'The kind.';
comment on column gangq.kind_roles.ordinal is 'Order of the role, from 1.';
comment on column gangq.kind_roles.name is 'The role''s name, unique in its gang.';
comment on column gangq.kind_roles.shape_id is 'What each of its members needs.';
comment on column gangq.kind_roles.min_members is 'Members without which the gang does not start.';
comment on column gangq.kind_roles.max_members is 'Members it takes when there is room; more than min_members: the role is elastic.';
comment on column gangq.kind_roles.first_rank is 'live_jobs.rank of its first member.';
comment on column gangq.kind_roles.strategy is 'pack (fewest hosts), spread (most), strict_pack (one host), strict_spread (a host each).';
comment on column gangq.kind_roles.require is 'Topology level of which the role must share one domain.';
comment on column gangq.kind_roles.prefer is 'Topology level of which it should share one domain.';
comment on column gangq.kind_roles.balanced is 'Members are spread evenly over the hosts that are used.';

insert into gangq.gang_kinds (queue, spec)
select s.queue, format('v1 %s %s', k.shape_id, k.size)
from (select distinct g.shape_id, g.size from gangq.live_gangs g) k join gangq.shapes s on s.id = k.shape_id;
insert into gangq.kind_roles (kind_id, ordinal, name, shape_id, min_members, max_members, first_rank, strategy, balanced)
select k.id, 1, 'member', split_part(k.spec, ' ', 2)::integer, split_part(k.spec, ' ', 3)::integer, split_part(k.spec, ' ', 3)::integer, 0, 'pack', false
from gangq.gang_kinds k;

alter table gangq.live_gangs
  add column kind_id integer,
  add column world_size integer check (world_size between 1 and size),
  add column failure_policy text not null default 'restart_gang'
    check (failure_policy in ('restart_gang', 'restart_member', 'shrink', 'fail')),
  add column completion text,
  add column preemptible boolean not null default true,
  add column budget_s real,
  add column timeout_s real,
  add column timeout_style text not null default 'requeue' check (timeout_style in ('requeue', 'hard', 'soft')),
  add column timeout_at timestamptz,
  add column timeouts integer not null default 0,
  add column held_s double precision not null default 0,
  add column missing_since timestamptz;
update gangq.live_gangs g set kind_id = k.id,
  world_size = case when g.state in ('reserved', 'running', 'draining') then g.size end,
  timeout_s = 900, timeout_at = greatest(clock_timestamp(), g.not_before) + interval '900 s'
from gangq.gang_kinds k where k.spec = format('v1 %s %s', g.shape_id, g.size);
alter table gangq.live_gangs alter column kind_id set not null, alter column timeout_s set not null;
drop index gangq.live_gangs_blocked;
create index live_gangs_blocked on gangq.live_gangs (kind_id, order_key) where state = 'blocked';
create index live_gangs_by_age on gangq.live_gangs (kind_id, (order_key & 1125899906842623)) where state = 'blocked';
create index live_gangs_missing on gangq.live_gangs (id) where missing_since is not null;
create index live_gangs_timeout on gangq.live_gangs (timeout_at) where state = 'blocked';
create index live_gangs_kind_timeout on gangq.live_gangs (kind_id, timeout_at) where state = 'blocked';
comment on column gangq.live_gangs.shape_id is 'What each member of its first role needs.';
comment on column gangq.live_gangs.size is 'Members at most; world_size says how many of them this epoch has.';
comment on column gangq.live_gangs.kind_id is 'Everything it asks for.';
comment on column gangq.live_gangs.world_size is 'Members of this epoch; null while it is not placed.';
comment on column gangq.live_gangs.failure_policy is
  'What a lost or failed member means: restart_gang (all stop and start again), restart_member (only it, the others are told '
  'through a new epoch), shrink (the others go on without it), fail (the gang fails).';
comment on column gangq.live_gangs.completion is 'Role whose members, once done, end the gang; null: all members must be done.';
comment on column gangq.live_gangs.preemptible is 'Whether it may be displaced, if its queue allows that at all.';
comment on column gangq.live_gangs.budget_s is 'Longest wall-clock budget among its members, seconds; null: the installation''s default.';
comment on column gangq.live_gangs.timeout_s is 'Seconds it may wait for placement while eligible.';
comment on column gangq.live_gangs.timeout_style is 'What happens then: requeue, hard (it fails), soft (its members run as single jobs).';
comment on column gangq.live_gangs.timeout_at is 'When that is over, counting as not eligible what held_s includes; what has come since is added when it is looked at.';
comment on column gangq.live_gangs.timeouts is 'How often it has timed out.';
comment on column gangq.live_gangs.held_s is 'Seconds in which its kind had not been eligible when timeout_at was set: only what comes later counts.';
comment on column gangq.live_gangs.missing_since is
  'Running: since when this epoch lacks a member that is to be replaced (restart_member); null once every member is claimed.';

alter table gangq.live_jobs
  add column epoch_rank integer,
  add column role smallint;
comment on column gangq.live_jobs.rank is 'Its place in the gang at its largest, from 0; its rank, unless epoch_rank says otherwise.';
comment on column gangq.live_jobs.epoch_rank is 'Members of elastic gangs: the rank in this epoch; null: rank, or not part of this epoch.';
comment on column gangq.live_jobs.role is 'Ordinal of its role; null: the first.';

alter table gangq.gang_history
  add column kind_id integer,
  add column world_size integer,
  add column failure_policy text,
  add column completion text,
  add column preemptible boolean,
  add column budget_s real,
  add column timeout_s real,
  add column timeout_style text;
comment on column gangq.gang_history.kind_id is 'Everything it asked for; null: ended before this was recorded.';
comment on column gangq.gang_history.world_size is 'Members of its last epoch.';
comment on column gangq.gang_history.failure_policy is 'What a lost or failed member meant.';
comment on column gangq.gang_history.completion is 'Role whose end was the gang''s end.';
comment on column gangq.gang_history.preemptible is 'Whether it could be displaced.';
comment on column gangq.gang_history.budget_s is 'Longest wall-clock budget among its members, seconds.';
comment on column gangq.gang_history.timeout_s is 'Seconds it could wait for placement.';
comment on column gangq.gang_history.timeout_style is 'What that timeout did.';

-- Promises, verdicts, estimates -----------------------------------------------------------------------------------

delete from gangq.earmarks;
alter table gangq.earmarks
  drop constraint earmarks_pkey,
  add primary key (incarnation, gang_id),
  add column kind text not null default 'plan' check (kind in ('plan', 'escrow')),
  add column until timestamptz not null,
  add column slots integer not null default 0 check (slots >= 0),
  add column gpus integer not null default 0 check (gpus >= 0),
  add column memory_mb bigint not null default 0 check (memory_mb >= 0),
  add column cpus numeric(10, 3) not null default 0 check (cpus >= 0);
comment on table gangq.earmarks is
  'What workers must leave free for gangs that wait: plan, for a planned start (work that ends before it may use it); '
  'escrow, freed by preemption for one gang.';
comment on column gangq.earmarks.kind is 'plan or escrow.';
comment on column gangq.earmarks.until is 'plan: the planned start, before which work may use it; escrow: when the promise lapses.';
comment on column gangq.earmarks.slots is 'Slots to be left free, now.';
comment on column gangq.earmarks.gpus is 'Devices to be left free, now: the largest ones.';
comment on column gangq.earmarks.memory_mb is 'Host memory to be left free, now, MiB.';
comment on column gangq.earmarks.cpus is 'CPUs to be left free, now.';

create table gangq.plans (
  gang_id bigint primary key references gangq.live_gangs (id) on delete cascade,
  place integer not null,
  starts_at timestamptz not null,
  decided_at timestamptz not null
);
comment on table gangq.plans is 'Planned starts of the first gangs that wait, renewed by every pass.';
comment on column gangq.plans.gang_id is 'The gang.';
comment on column gangq.plans.place is 'Its place in the order, from 1.';
comment on column gangq.plans.starts_at is 'When it will start at the latest if every estimate holds.';
comment on column gangq.plans.decided_at is 'When this was last found.';

create table gangq.verdicts (
  kind_id integer primary key,
  gate text not null,
  since timestamptz not null,
  held_s double precision not null default 0,
  numbers jsonb
);
comment on table gangq.verdicts is 'Why gangs of one kind were not placed by the last pass; one row per kind that waits.';
comment on column gangq.verdicts.kind_id is 'The kind.';
comment on column gangq.verdicts.gate is 'paused, quota, running_limit, submitter_limit, infeasible, capacity, preempting, reserved, or unknown.';
comment on column gangq.verdicts.since is 'Since when it is this one.';
comment on column gangq.verdicts.held_s is 'Seconds in which its gangs were not eligible (paused or over a limit) before since.';
comment on column gangq.verdicts.numbers is 'The numbers of that gate.';

create table gangq.runtimes (
  queue text not null,
  task text not null,
  samples bigint not null check (samples >= 0),
  p90_s real not null check (p90_s >= 0),
  updated_at timestamptz not null,
  primary key (queue, task)
);
comment on table gangq.runtimes is 'How long jobs of one task run that hold a device or belong to a gang: the estimate behind planned starts.';
comment on column gangq.runtimes.queue is 'The queue.';
comment on column gangq.runtimes.task is 'The task.';
comment on column gangq.runtimes.samples is 'Ends it rests on.';
comment on column gangq.runtimes.p90_s is 'Running estimate of the 90th percentile, seconds.';
comment on column gangq.runtimes.updated_at is 'When it last changed.';

-- Operators -------------------------------------------------------------------------------------------------------

create table gangq.cordons (
  kind text not null check (kind in ('host', 'worker')),
  name text not null check (name <> ''),
  drain boolean not null,
  since timestamptz not null,
  deadline timestamptz,
  reason text not null,
  operator text not null,
  primary key (kind, name)
);
comment on table gangq.cordons is 'Hosts and workers that are given nothing new, by name: it outlives their restart.';
comment on column gangq.cordons.kind is 'host or worker.';
comment on column gangq.cordons.name is 'Its name.';
comment on column gangq.cordons.drain is 'True: what runs there is moved away.';
comment on column gangq.cordons.since is 'Since when.';
comment on column gangq.cordons.deadline is 'Drain: what has found no other place by then is told to stop; null: never.';
comment on column gangq.cordons.reason is 'Why.';
comment on column gangq.cordons.operator is 'The login that said so.';

create table gangq.passes (
  at timestamptz not null,
  digest text not null,
  decisions jsonb not null,
  board jsonb
) partition by range (at);
create index passes_at on gangq.passes (at);
create table gangq.passes_rest partition of gangq.passes default;
comment on table gangq.passes is 'Admission passes that decided something, with the digest of what they saw; with settings.record_decisions also that itself.';
comment on table gangq.passes_rest is 'Catches rows of days without a partition.';
comment on column gangq.passes.at is 'When.';
comment on column gangq.passes.digest is 'MD5 of the board in its binary form: gangq.digest_of.';
comment on column gangq.passes.decisions is '{"max_gangs", "turns": after how many gangs its time was up, else null, "decisions"}.';
comment on column gangq.passes.board is 'What was seen; null: not recorded.';
