-- Doors: locks that only gangq's own functions can take.

-- PostgreSQL grants advisory locks to every login of the database, whoever may use this schema or not: one that took the right
-- number stopped all maintenance. A row can be locked only by who may update its table, and that is the owner alone.
create table gangq.lock_rows (
  name text primary key,
  runs bigint not null default 0
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into gangq.lock_rows (name) values ('tick'), ('brake'), ('wake'), ('runtimes');
comment on table gangq.lock_rows is
  'Rows to lock. tick: one tick at a time; brake: one stall or health trip counts the others at a '
  'time; wake: one of those that end jobs this moment asks for a tick; runtimes: one session adds a first estimate.';
comment on column gangq.lock_rows.name is 'What the lock is for.';
comment on column gangq.lock_rows.runs is 'tick: how many have run. A caller that found one running waits for the run after it.';

create table gangq.worker_names (
  name text primary key
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on table gangq.worker_names is
  'A row to lock for each name of a worker: a registration, a quarantine and taints of one name come one after another.';
comment on column gangq.worker_names.name is 'The worker''s name. Forgotten together with the last incarnation of it.';

-- submit(after => ...) takes no lock on the jobs that it waits for, so an open transaction keeps nobody from ending them: see
-- settle_dependents.
alter table gangq.dependencies add column settled boolean not null default false;
comment on column gangq.dependencies.settled is
  'True: the row was visible at a moment when no transaction was ending the awaited job, so whoever ends it sees the row.';
create index dependencies_new on gangq.dependencies (on_job_id, job_id) where not settled and outcome is null;
-- What is there was written under a lock on the awaited job.
update gangq.dependencies set settled = true;
