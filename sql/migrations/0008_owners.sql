-- Owners: the login that submitted a job, registered a worker or caused an event; and what a queue allows whom.
-- The session's own login is what `set role` cannot change.

alter table gangq.live_jobs add column login text;
alter table gangq.live_gangs add column login text;
alter table gangq.history add column login text;
alter table gangq.gang_history add column login text;
-- What was submitted before this was recorded belongs to the login called like its submitter.
update gangq.live_jobs set login = submitter;
update gangq.live_gangs set login = submitter;
update gangq.history set login = submitter;
update gangq.gang_history set login = submitter;
alter table gangq.live_jobs alter column login set not null, alter column login set default session_user;
alter table gangq.live_gangs alter column login set not null, alter column login set default session_user;
alter table gangq.history alter column login set not null;
alter table gangq.gang_history alter column login set not null;
comment on column gangq.live_jobs.submitter is 'The role that submitted it: shares and limits per submitter count by this.';
comment on column gangq.live_gangs.submitter is 'The role that submitted it: shares and limits per submitter count by this.';
comment on column gangq.history.submitter is 'The role that submitted it.';
comment on column gangq.gang_history.submitter is 'The role that submitted it.';
comment on column gangq.live_jobs.login is 'The login that submitted it, whatever role it had set.';
comment on column gangq.live_gangs.login is 'The login that submitted it, whatever role it had set.';
comment on column gangq.history.login is 'The login that submitted it, whatever role it had set.';
comment on column gangq.gang_history.login is 'The login that submitted it, whatever role it had set.';

-- A worker that runs during the migration goes on: its incarnation has no login, and every worker login may report for it.
alter table gangq.incarnations add column login text;
alter table gangq.incarnations alter column login set default session_user;
comment on column gangq.incarnations.login is 'The login that registered it; null: it was registered before this was recorded.';

alter table gangq.events add column actor text;
comment on column gangq.events.actor is
  'The login whose session wrote this, and "login as role" where it had set another role. A tick writes for others too: then this is the login that ticked.';

alter table gangq.queues_table
  add column others text not null default 'owner' check (others in ('owner', 'shared')),
  add column ceilings jsonb not null default '{}' check (jsonb_typeof(ceilings) = 'object');
comment on column gangq.queues_table.others is
  'Who may cancel, retry, reprioritise and read the work of others in it: owner (admins only) or shared (every submitter).';
comment on column gangq.queues_table.ceilings is
  'Highest priority by role: {"alice": 100, "gangq_submitter": 10}. It holds in the queues below as well; no entry: no ceiling.';
