-- The state machine as data, and the triggers that enforce it, also for the owner in psql. The
-- trigger has the legal pairs as constants: a lookup in the table would double the cost of an
-- update. tests/sql/test_transitions.py keeps the two equal.
-- Takes no locks of its own.
--
-- Where the states of a job or gang are known, for a change of one of them. Each file that writes
-- one is here (tests/sql/test_transitions.py); those that only show them are the views (136 to 139,
-- 143), explanations (142), metrics (147).
--   here                    which follows which
--   0001_foundation         is_sound: what each needs in its columns; the partial indexes
--   078_charges             causes: what the end of an attempt costs, which ends are losses
--   034_submit, 035_gangs, 106_retry, 134_schedule_step
--                           births
--   036_unique              replace_job: pending and scheduled
--   080_leave, 082_complete, 084_fail, 100_drain
--                           every end: leave, end_attempt, stopped, drain, complete_drain
--   101_losses              lose_members: preempted to blocked; 102_gang_ends: end_gang
--   104_preempt, 105_cancel running to preempting
--   112_dependencies        make_pending, release_dependents: scheduled and waiting to pending
--   062_reserve             blocked to reserved and back; 065_timeouts: split_gang
--   063_places, 070_claim, 072_light
--                           pending and reserved to running
--   074_barrier             gangs: reserved to running
--   148_violations          what must never be seen

delete from gangq.transitions;
insert into gangq.transitions (old_state, new_state, verb, role)
select split_part(p.pair, '>', 1), split_part(p.pair, '>', 2), v.verb, r.role
from (values
  ('gangq_submitter', 'submit submit_unique', '>pending >scheduled >waiting'),
  ('gangq_submitter', 'submit_unique', 'pending>scheduled scheduled>pending'),
  ('gangq_submitter', 'submit_gang submit_unique_gang', '>blocked >waiting'),
  ('gangq_submitter', 'retry', '>pending >blocked >waiting'),
  ('gangq_submitter', 'cancel',
    'waiting>cancelled scheduled>cancelled pending>cancelled blocked>cancelled'),
  ('gangq_worker', 'promote_due',
    'scheduled>pending waiting>pending waiting>scheduled waiting>blocked waiting>cancelled '
    '>waiting'),
  ('gangq_worker', 'reserve_gang', 'blocked>reserved'),
  ('gangq_worker', 'rollback_gang', 'reserved>blocked'),
  ('gangq_worker', 'time_out', 'blocked>failed blocked>pending'),
  ('gangq_worker', 'claim complete_and_claim', 'pending>running reserved>running'),
  ('gangq_worker', 'complete complete_and_claim', 'running>done preempting>done'),
  ('gangq_worker', 'report_dead', 'scheduled>pending'),
  -- The end of an attempt: of a single job, or of a member.
  ('gangq_worker', 'fail requeue release snooze trip reap_expired retire_worker report_dead',
    'running>pending running>scheduled running>failed running>preempted'),
  -- Others are told to stop, or need not begin.
  ('gangq_submitter', 'cancel', 'running>preempting reserved>blocked'),
  ('gangq_admin', 'preempt_gang shrink_gang displace_job', 'running>preempting reserved>blocked'),
  ('gangq_worker', 'fail requeue release trip reap_expired retire_worker report_dead complete '
    'complete_and_claim', 'running>preempting reserved>blocked'),
  -- Who was told to stop has stopped.
  ('gangq_worker', 'ack_preempted fail requeue release snooze trip reap_expired retire_worker '
    'report_dead', 'preempting>preempted preempting>pending preempting>scheduled '
    'preempting>cancelled'),
  -- The last one to stop ends the drain: the gang waits for its next epoch, or is over.
  ('gangq_submitter', 'cancel',
    'preempted>blocked preempted>failed preempted>cancelled blocked>failed'),
  ('gangq_admin', 'preempt_gang shrink_gang',
    'preempted>blocked preempted>failed preempted>cancelled blocked>failed blocked>cancelled'),
  ('gangq_worker', 'ack_preempted fail requeue release trip reap_expired retire_worker report_dead '
    'complete complete_and_claim complete_drain',
    'preempted>blocked preempted>failed preempted>cancelled blocked>failed blocked>cancelled')
) as r(role, verbs, pairs)
cross join string_to_table(r.verbs, ' ') as v(verb)
cross join string_to_table(r.pairs, ' ') as p(pair);

-- Internal. The state of a job or gang that has not been started, by what it waits for.
create function gangq.waiting_state(
  waits_on integer, gang_id bigint, due_at timestamptz default null, t timestamptz default null
) returns text language sql immutable
return case
  when waits_on > 0 then 'waiting'
  when gang_id is not null then 'blocked'
  when due_at > t then 'scheduled'
  else 'pending' end;

-- Internal. Trigger: refuses a change of state that gangq.transitions does not list and numbers
-- that no job has, and marks a job that is pending in a place which claims may have passed.
-- Submissions and claims are frequent: the conditions of the triggers let a correct one pass
-- without a call. The conditions are short, because PostgreSQL reads them again for every
-- statement.
create function gangq.check_transition() returns trigger language plpgsql as $$
begin
  if new.attempts < 0 or new.priority not between -1000 and 1000
    or (new.gang_id is null) <> (new.rank is null)
  then
    perform gangq.refuse('23514',
      format('job %s would have attempts %s, priority %s, gang %s and rank %s', new.id,
        new.attempts, new.priority, coalesce(new.gang_id::text, 'null'),
        coalesce(new.rank::text, 'null')),
      'Use the functions (gangq.submit, gangq.set_priority, ...): attempts are not negative, a '
      'priority is -1000 to 1000, and members of a gang, and only they, have ranks.');
  end if;
  if (case when tg_op = 'INSERT'
    then new.state <> all (array['pending', 'scheduled', 'waiting', 'blocked'])
    else old.state <> new.state and (old.state || '>' || new.state) <> all (array[
      'waiting>pending', 'waiting>scheduled', 'waiting>blocked', 'waiting>cancelled',
      'scheduled>pending', 'scheduled>cancelled', 'pending>running', 'pending>scheduled',
      'pending>cancelled', 'blocked>reserved', 'blocked>failed', 'blocked>pending',
      'blocked>cancelled', 'reserved>running', 'reserved>blocked', 'running>done',
      'running>scheduled',
      'running>failed', 'running>preempted', 'running>pending', 'running>preempting',
      'preempting>preempted', 'preempting>done', 'preempting>pending', 'preempting>scheduled',
      'preempting>cancelled', 'preempted>blocked', 'preempted>failed', 'preempted>cancelled']) end)
  then
    perform gangq.refuse('GQ004', format('job %s cannot go from %s to %s', new.id,
        case tg_op when 'INSERT' then 'nothing' else old.state end, new.state),
      'Use the functions (gangq.cancel, gangq.retry, ...); gangq.transitions lists what is legal.');
  end if;
  -- Claims may have passed this place already. They find the job by the index of returned ones.
  if tg_op = 'UPDATE' and new.state = 'pending' and (old.state, old.order_key, old.shape_id)
    is distinct from (new.state, new.order_key, new.shape_id)
  then
    new.returned := true;
  end if;
  return new;
end $$;

create trigger live_jobs_birth before insert on gangq.live_jobs for each row
when (
  new.state <> 'pending' or new.priority not between -1000 and 1000
  or new.attempts <> 0 or new.rank is not null)
execute function gangq.check_transition();

create trigger live_jobs_transition before update of state, order_key, shape_id, attempts
on gangq.live_jobs for each row
when (old.state <> 'pending' or new.state <> 'running' or new.attempts < 1)
execute function gangq.check_transition();

-- Submissions and claims do not change these columns.
create trigger live_jobs_numbers before update of priority, gang_id, rank on gangq.live_jobs
for each row execute function gangq.check_transition();

-- Internal. Trigger: refuses a DELETE that does not come from gangq.leave. A row leaves live_jobs
-- only through gangq.leave, which writes its history row in the same statement and sets
-- gangq.leaving for that statement. Looking the row up in history instead would cost every ending a
-- probe per partition.
create function gangq.left_without_history() returns trigger language plpgsql as $$
begin
  perform gangq.refuse('GQ004', 'a job leaves live_jobs only together with its history row',
    'Use gangq.cancel(); rows of live_jobs are never deleted by hand.');
  return null;
end $$;

create trigger live_jobs_leave before delete on gangq.live_jobs for each statement
when (current_setting('gangq.leaving', true) is distinct from 'with history')
execute function gangq.left_without_history();

create trigger live_jobs_truncate before truncate on gangq.live_jobs for each statement
execute function gangq.left_without_history();
