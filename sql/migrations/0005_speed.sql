-- Speed: what a statement on live_jobs pays before it touches a row. Nothing that the previous release calls changes.

-- PostgreSQL reads a check's expression anew for every statement, so its length is a cost of each claim and each submission.
-- It says what it said before.
alter table gangq.live_jobs drop constraint live_jobs_state;
alter table gangq.live_jobs add constraint live_jobs_state check (
  (incarnation is not null) = (state = any ('{running,reserved,preempting}'))
  and (token is not null) = (state = any ('{running,preempting}'))
  and case state
    when 'running' then claimed_at is not null
    when 'pending' then gang_id is null
    when 'scheduled' then gang_id is null and due_at is not null
    when 'waiting' then waits_on > 0
    when 'blocked' then gang_id is not null and deadline_at is null
    when 'reserved' then gang_id is not null and deadline_at is not null
    when 'preempting' then told_at is not null and stop_reason is not null
    when 'preempted' then gang_id is not null
    when 'done' then gang_id is not null and finished_at is not null
    when 'failed' then gang_id is not null and finished_at is not null
    when 'cancelled' then gang_id is not null and finished_at is not null
    else false
  end);
