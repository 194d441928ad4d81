-- Speed: what a statement on live_jobs pays before it touches a row. Nothing that the previous release calls changes.

-- PostgreSQL reads a check's expression anew for every statement: the long one was a quarter of a submission's cost. What is
-- hot, a submission and a claim, is said in the expression; the rest moves into a function, which says what was said before.
-- The function belongs to the table: no later rebuilding of the code replaces it.
create function gangq.is_sound(j gangq.live_jobs) returns boolean language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
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
comment on function gangq.is_sound(gangq.live_jobs) is 'Internal. What each state of a job needs in its columns.';

alter table gangq.live_jobs drop constraint live_jobs_state;
alter table gangq.live_jobs add constraint live_jobs_state check (
  case state
    when 'pending' then incarnation is null and token is null and gang_id is null
    when 'running' then incarnation is not null and token is not null and claimed_at is not null
    else gangq.is_sound(live_jobs)
  end);

-- A job is written when it is submitted and when it is claimed. With room for both on one page the second neither locks the
-- row first nor looks for another page: 50 bytes of WAL a job less.
alter table gangq.live_jobs set (fillfactor = 50);

-- For the same reason: a heartbeat never changes how long a lease is, and paid a seventh of its cost for this check.
-- register_worker, which alone writes it, refuses what it refused; what the installation gives is checked in settings.
alter table gangq.leases drop constraint leases_lease_s_check;

-- Vacuum by the number of dead rows, not by a fifth of the table: what comes and goes with every job or pass of placement
-- would else keep its dead rows for as long as the table is large. What is rewritten in place keeps room on its pages.
alter table gangq.live_gangs set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200);
alter table gangq.dependencies set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);
alter table gangq.checkpoints set (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200,
  toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_threshold = 1000);
alter table gangq.incarnations set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table gangq.device_holds set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table gangq.sleepers set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table gangq.unsettled set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table gangq.earmarks set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table gangq.plans set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table gangq.verdicts set (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table gangq.runtimes set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table gangq.beat_gaps set (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
alter table gangq.tick_state set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What is looked for by its state although few have it, among many that have another: one index in the place of one that
-- knew preempting alone. What waits, is blocked, runs or is due later has indexes of its own, and pays nothing here.
drop index gangq.live_jobs_told;
create index live_jobs_by_state on gangq.live_jobs (state, id) where state <> all ('{pending,running,blocked,scheduled}');

-- Of history and events: what people look for, which is little of it. On the whole tables only, and on those parts that hold
-- nothing yet, so that nothing large is read here: the days there are go without until they are dropped.
create index history_not_done on only gangq.history (job_id) where state <> 'done';
create index history_short_not_done on only gangq.history_short (job_id) where state <> 'done';
create index history_long_not_done on only gangq.history_long (job_id) where state <> 'done';
alter index gangq.history_not_done attach partition gangq.history_short_not_done;
alter index gangq.history_not_done attach partition gangq.history_long_not_done;
create index gang_history_not_done on only gangq.gang_history (gang_id) where state <> 'done';
create index gang_history_short_not_done on only gangq.gang_history_short (gang_id) where state <> 'done';
create index gang_history_long_not_done on only gangq.gang_history_long (gang_id) where state <> 'done';
alter index gangq.gang_history_not_done attach partition gangq.gang_history_short_not_done;
alter index gangq.gang_history_not_done attach partition gangq.gang_history_long_not_done;
create index events_by_id on only gangq.events (id);
create index events_trips on only gangq.events (at) where kind in ('trip', 'notify', 'held');
create index events_drains on only gangq.events (at) where kind = 'drain';
create index events_displaced on only gangq.events (at) where kind = 'preempt';
do $$
declare
  w record;
  filled boolean;
begin
  for w in
    select i.relname as index, p.relname as part, p.relname || substr(i.relname, length(t.relname) + 1) as name,
      regexp_replace(pg_get_indexdef(i.oid), '^.* USING ', 'using ') as definition
    from pg_class t join pg_index x on x.indrelid = t.oid join pg_class i on i.oid = x.indexrelid
    join pg_inherits h on h.inhparent = t.oid join pg_class p on p.oid = h.inhrelid and p.relkind = 'r'
    where t.relnamespace = 'gangq'::regnamespace and not x.indisvalid
  loop
    execute format('select exists (select 1 from gangq.%I)', w.part) into filled;
    if not filled then
      execute format('create index %I on gangq.%I %s', w.name, w.part, w.definition);
      execute format('alter index gangq.%I attach partition gangq.%I', w.index, w.name);
    end if;
  end loop;
end $$;

-- The tick forgets what was saved long ago, without reading the rest.
create index checkpoints_saved on gangq.checkpoints (saved_at);
