-- Jobs submitted by jobs.

alter table gangq.live_jobs add column parent bigint;
comment on column gangq.live_jobs.parent is 'The job that submitted it; null: a login did.';
alter table gangq.history add column parent bigint;
comment on column gangq.history.parent is 'The job that submitted it; null: a login did.';

-- What workers declare their tasks with: submit applies it where the caller says nothing.
alter table gangq.incarnations add column task_options jsonb check (jsonb_typeof(task_options) = 'object');
comment on column gangq.incarnations.task_options is 'Per task, the options that this worker declares it with; null: it said nothing.';
create table gangq.task_options (
  task text primary key check (task <> '' and length(task) <= 200),
  queue text,
  priority integer check (priority between -1000 and 1000),
  gpus integer check (gpus between 0 and 1024),
  vram_mb integer check (vram_mb >= 0),
  memory_mb bigint check (memory_mb between 0 and 1000000000000),
  cpus numeric check (cpus between 0 and 9999999),
  labels jsonb check (jsonb_typeof(labels) = 'object'),
  selector jsonb,
  tolerates text[],
  model text check (model <> '' and length(model) <= 200),
  budget_s real check (budget_s > 0 and budget_s <= 1e9),
  max_attempts integer check (max_attempts between 1 and 1000),
  max_crashes integer check (max_crashes between 1 and 1000),
  max_trips integer check (max_trips between 1 and 1000),
  worker text not null,
  declared_at timestamptz not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on table gangq.task_options is
  'The options each task was last declared with, by the newest registration of a worker that runs it; no row: none.';
comment on column gangq.task_options.task is 'The task.';
comment on column gangq.task_options.queue is 'Where its jobs wait; here and below null: not declared.';
comment on column gangq.task_options.priority is '-1000 to 1000, higher first.';
comment on column gangq.task_options.gpus is 'Whole devices needed.';
comment on column gangq.task_options.vram_mb is 'Device memory needed on each of them, MiB.';
comment on column gangq.task_options.memory_mb is 'Host memory needed, MiB.';
comment on column gangq.task_options.cpus is 'CPUs needed.';
comment on column gangq.task_options.labels is 'Labels the worker must carry.';
comment on column gangq.task_options.selector is 'Conditions on the worker, as shapes keep them.';
comment on column gangq.task_options.tolerates is 'Taints it may run in spite of, as shapes keep them.';
comment on column gangq.task_options.model is 'What it needs loaded.';
comment on column gangq.task_options.budget_s is 'Wall-clock budget of an attempt, seconds.';
comment on column gangq.task_options.max_attempts is 'Attempts it may spend.';
comment on column gangq.task_options.max_crashes is 'How often its worker may be lost.';
comment on column gangq.task_options.max_trips is 'How often a watchdog may trip.';
comment on column gangq.task_options.worker is 'The worker that declared these options.';
comment on column gangq.task_options.declared_at is 'When it first did.';

-- Whether a shape can run at all is looked at once.
alter table gangq.shapes add column fits boolean not null default false;
comment on column gangq.shapes.fits is 'A worker that could run it has been known; false: submit looks.';
