-- Watchdogs: what trips leave behind, progress that can be compared, health of devices, warm models.
-- Only additions: the previous release's calls still resolve while both are in use. Adding columns with a constant
-- default rewrites no table; every statement here is short whatever the size of the queue.

alter table gangq.settings
  add column budget_s real not null default 2100 check (budget_s > 0 and budget_s <= 1e9),
  add column budget_gpu_s real not null default 8100 check (budget_gpu_s > 0 and budget_gpu_s <= 1e9),
  add column stall_timeout_s real not null default 120 check (stall_timeout_s > 0 and stall_timeout_s <= 1e7),
  add column load_grace_s real not null default 1200 check (load_grace_s > 0 and load_grace_s <= 1e7),
  add column health_window_s real not null default 300 check (health_window_s > 0 and health_window_s <= 1e7),
  add column long_phase_s real not null default 3600 check (long_phase_s > 0 and long_phase_s <= 1e7),
  add column gang_stall_s real not null default 1200 check (gang_stall_s > 0 and gang_stall_s <= 1e7),
  add column straggler_s real not null default 300 check (straggler_s > 0 and straggler_s <= 1e7),
  add column brake_share real not null default 0.2 check (brake_share > 0 and brake_share <= 1),
  add column device_trips smallint not null default 3 check (device_trips > 0),
  add column bounces_per_hour smallint not null default 4 check (bounces_per_hour > 0),
  add column warm_s real not null default 10 check (warm_s >= 0 and warm_s <= 1e6),
  add column notify_only text[] not null default '{}'
    check (notify_only <@ '{budget,stall,health,fault,gang}');
comment on column gangq.settings.budget_s is 'Wall-clock budget of a job without devices when neither job, task nor queue sets one, seconds.';
comment on column gangq.settings.budget_gpu_s is 'The same for a job that holds devices.';
comment on column gangq.settings.stall_timeout_s is 'Once a job beats: seconds without a beat before a stall is suspected.';
comment on column gangq.settings.load_grace_s is 'Seconds a job that holds devices may load before the idle device counts against it.';
comment on column gangq.settings.health_window_s is 'Seconds of a wholly idle device, with nothing moving, that convict.';
comment on column gangq.settings.long_phase_s is 'Longest phase "long" of a job that is exempt from the stall watchdog, seconds.';
comment on column gangq.settings.gang_stall_s is 'Seconds without a new step of any member before a gang is tripped for no collective progress.';
comment on column gangq.settings.straggler_s is 'Seconds a member must lag behind its gang before it is called a straggler; after twice that, on record.';
comment on column gangq.settings.brake_share is 'Share of live workers suspect within a minute above which no stall or health trip is carried out: the fault is elsewhere.';
comment on column gangq.settings.device_trips is 'Different jobs tripping on one device within a day that put it into quarantine.';
comment on column gangq.settings.bounces_per_hour is 'How often a host may restart one worker in an hour.';
comment on column gangq.settings.warm_s is 'A job whose model a worker has loaded may overtake jobs of its own priority submitted up to this many seconds before it.';
comment on column gangq.settings.notify_only is 'Watchdog classes that report and do not stop anything: budget, stall, health, fault, gang.';

create table gangq.task_settings (
  task text primary key check (task <> '' and length(task) <= 200),
  budget_s real check (budget_s > 0 and budget_s <= 1e9),
  stall_timeout_s real check (stall_timeout_s > 0 and stall_timeout_s <= 1e7),
  load_grace_s real check (load_grace_s > 0 and load_grace_s <= 1e7),
  health_window_s real check (health_window_s > 0 and health_window_s <= 1e7),
  long_phase_s real check (long_phase_s > 0 and long_phase_s <= 1e7),
  notify_only text[] check (notify_only <@ '{budget,stall,health,fault,gang}')
);
comment on table gangq.task_settings is 'What the watchdogs allow the jobs of one task; null: the installation''s number. Change with gangq.set_task().';
comment on column gangq.task_settings.task is 'The task''s name; "command" for commands.';
comment on column gangq.task_settings.budget_s is 'Wall-clock budget, seconds; a job''s own comes first, the queue''s last.';
comment on column gangq.task_settings.stall_timeout_s is 'Seconds without a beat before a stall is suspected; null: learned from its jobs, never under the installation''s.';
comment on column gangq.task_settings.load_grace_s is 'Seconds its jobs may load.';
comment on column gangq.task_settings.health_window_s is 'Seconds of a wholly idle device that convict.';
comment on column gangq.task_settings.long_phase_s is 'Longest exempt phase, seconds.';
comment on column gangq.task_settings.notify_only is 'Classes that only report for this task; null: the installation''s.';

create table gangq.beat_gaps (
  task text not null,
  device_class text not null,
  longest_s real not null check (longest_s >= 0),
  beats bigint not null check (beats >= 0),
  updated_at timestamptz not null,
  primary key (task, device_class)
);
comment on table gangq.beat_gaps is 'What has been learned of each task''s beats: how long they may honestly stay away.';
comment on column gangq.beat_gaps.task is 'The task.';
comment on column gangq.beat_gaps.device_class is 'Model of the devices it ran on; empty: none.';
comment on column gangq.beat_gaps.longest_s is 'Longest gap between two beats of a job that then went on, warm-up excluded, seconds.';
comment on column gangq.beat_gaps.beats is 'Beats it rests on.';
comment on column gangq.beat_gaps.updated_at is 'When it last changed.';

create table gangq.evidence (
  at timestamptz not null,
  kind text not null,
  job_id bigint,
  token bigint,
  incarnation bigint,
  data jsonb not null
) partition by range (at);
create index evidence_job on gangq.evidence (job_id, at) where job_id is not null;
create index evidence_kind on gangq.evidence (kind, at);
create table gangq.evidence_rest partition of gangq.evidence default;
comment on table gangq.evidence is 'What a watchdog saw: stacks, readings, beats, log tail. Apart from events, because stacks and logs may show what a viewer must not see.';
comment on table gangq.evidence_rest is 'Catches rows of days without a partition.';
comment on column gangq.evidence.at is 'When; the same instant as its event.';
comment on column gangq.evidence.kind is 'As its event: suspect, trip, notify, held, dead or stuck.';
comment on column gangq.evidence.job_id is 'The job.';
comment on column gangq.evidence.token is 'Its claim.';
comment on column gangq.evidence.incarnation is 'The worker''s incarnation.';
comment on column gangq.evidence.data is 'The evidence.';

alter table gangq.progress
  add column step bigint,
  add column phase text,
  add column step_at timestamptz,
  add column rate real,
  add column lags_since timestamptz;
comment on column gangq.progress.step is 'The last step reported.';
comment on column gangq.progress.phase is 'load, run, save or long; null: not said.';
comment on column gangq.progress.step_at is 'When the step last changed.';
comment on column gangq.progress.rate is 'Steps a second, smoothed; null until two steps were seen.';
comment on column gangq.progress.lags_since is 'Since when this member has been much slower than its gang; null: it is not.';

alter table gangq.tick_state
  add column judged_gang bigint not null default 0,
  add column judged_at timestamptz;
comment on column gangq.tick_state.judged_gang is 'The last running gang whose progress was judged; 0: every one of them, at judged_at.';
comment on column gangq.tick_state.judged_at is 'When progress was last judged.';
create index live_gangs_running on gangq.live_gangs (id) where state = 'running';

create table gangq.device_readings (
  device_id bigint primary key references gangq.device_registry (id) on delete cascade,
  incarnation bigint not null,
  at timestamptz not null,
  data jsonb not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on table gangq.device_readings is 'The latest reading of each device that a worker samples; brought by heartbeats, indexed by its key only.';
comment on column gangq.device_readings.device_id is 'The device.';
comment on column gangq.device_readings.incarnation is 'Who read it.';
comment on column gangq.device_readings.at is 'When it reached the database.';
comment on column gangq.device_readings.data is 'gpu_pct, memory_pct, used_mb, total_mb, temperature_c, power_w, throttle, ...; null or absent: the driver does not say.';

alter table gangq.shapes
  add column model text check (model <> '' and length(model) <= 200),
  add column avoid bigint[];
comment on column gangq.shapes.model is 'Model the job needs loaded; a worker that has it is preferred. Null: none.';
comment on column gangq.shapes.avoid is 'Devices it must not run on, because an attempt of it tripped there; null: any.';

alter table gangq.incarnations
  add column model text,
  add column exits_at timestamptz,
  add column exit_code smallint,
  add column reboot_needed boolean not null default false;
create index incarnations_exiting on gangq.incarnations (exits_at) where exits_at is not null;
comment on column gangq.incarnations.model is 'The model it has loaded; null: none, or not said.';
comment on column gangq.incarnations.exits_at is 'It tripped and its process is gone by then unless nothing can kill it; null: not the case, or its death is proven.';
comment on column gangq.incarnations.exit_code is 'The code it exits with after a trip.';
comment on column gangq.incarnations.reboot_needed is 'A process of it survived SIGKILL: its host needs a reboot.';

alter table gangq.device_holds
  add column incarnation bigint,
  add column until timestamptz;
comment on column gangq.device_holds.incarnation is 'Quarantine of a device whose worker is about to exit after a trip: lifted by proof of its death.';
comment on column gangq.device_holds.until is 'When that quarantine ends by itself: the lease of that worker would have ended then.';

comment on column gangq.live_jobs.ran_on is
  'Members: where the last attempt was claimed; it stays when the placement ends. A solo job that tripped: which worker has to be gone before it runs again.';
