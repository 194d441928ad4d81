-- What submissions were answered, so that one that is repeated after a lost reply gets the same answer and submits nothing.

-- Two tables that exchange their names every hour, when the older one is emptied as a whole: no row is deleted, none is vacuumed.
create table gangq.requests (
  request_id uuid not null,
  gang_id bigint,
  login text collate "C" not null,
  job_ids bigint[] not null,
  note text,
  primary key (request_id, login)
) with (autovacuum_enabled = off, toast.autovacuum_enabled = off);
-- Compressing the ids of a thousand jobs takes as long as inserting ten of them.
alter table gangq.requests alter column job_ids set storage external;
comment on table gangq.requests is
  'What each submission with a request_id was answered since the tick last exchanged this table with requests_before. '
  'An answer is kept for at least one hour, and for about two at most.';
comment on column gangq.requests.request_id is 'As the caller made it. Each login has ids of its own.';
comment on column gangq.requests.gang_id is 'The gang submitted; null: single jobs were.';
comment on column gangq.requests.login is 'The login that submitted; for children of a job, the login that submitted the job.';
comment on column gangq.requests.job_ids is 'The jobs submitted, in order.';
comment on column gangq.requests.note is 'What submit_gang said of the gang.';

create table gangq.requests_before (like gangq.requests including all)
with (autovacuum_enabled = off, toast.autovacuum_enabled = off);
comment on table gangq.requests_before is 'What requests was until the tick last exchanged the two.';

alter table gangq.tick_state add column requests_turned_at timestamptz;
comment on column gangq.tick_state.requests_turned_at is 'When the tick last exchanged requests and requests_before.';
