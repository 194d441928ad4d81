-- 100,000 jobs in every state, for test_plans.py, which replaces :many and :workers. Triggers are off: it is fast.
set session_replication_role = replica;
select gangq.set_queue('gpu'), gangq.set_queue('elsewhere');
select count(*) from gangq.submit('fits', payloads => array_fill('{}'::jsonb, array[:many]), options => '{"wake": "never"}');
select count(*) from gangq.submit('warm', payloads => array_fill('{}'::jsonb, array[:many / 30]), options => '{"model": "m", "wake": "never"}');
update gangq.live_jobs j set submitted_at = (select min(x.submitted_at) from gangq.live_jobs x)
from gangq.shapes s where s.id = j.shape_id and s.model = 'm';
select count(*) from gangq.submit('too large', queue => 'gpu', gpus => 8,
  payloads => array_fill('{}'::jsonb, array[:many]), options => '{"vram_mb": 90000, "wake": "never"}');
select count(*) from gangq.submit('later', due_at => clock_timestamp() + interval '1 day',
  payloads => array_fill('{}'::jsonb, array[:many]), options => '{"wake": "never"}');
select count(*) from gangq.submit('follows', after => array[(select max(j.id) from gangq.live_jobs j)],
  payloads => array_fill('{}'::jsonb, array[:many]), options => '{"wake": "never"}');
select count(*) from (
  select gangq.submit_gang('train', 100, queue => 'gpu', gpus => 8, priority => n % 3) from generate_series(1, :many / 100) n) x;
select count(*) from (
  select gangq.register_worker('busy' || n, 'host' || n / 8, '{elsewhere}', slots => 8, options => '{"light": 400}')
  from generate_series(1, :workers) n) x;
select count(*) from gangq.submit('runs', queue => 'elsewhere', payloads => array_fill('{}'::jsonb, array[:many]), options => '{"wake": "never"}');
update gangq.live_jobs j set state = 'running', light = true, attempts = 1, claimed_at = clock_timestamp(), token = gangq.new_token(0),
  incarnation = (select min(i.id) from gangq.incarnations i) + j.id % :workers
from gangq.shapes s where s.id = j.shape_id and s.task = 'runs';
insert into gangq.progress (job_id, token, beat_at, data) select j.id, j.token, clock_timestamp(), '{}' from gangq.live_jobs j where j.state = 'running';
-- As after their first submission beside workers that fit.
update gangq.shapes set fits = true;
-- What has ended: of a thousand jobs one failed and one was cancelled, in every class.
insert into gangq.history (job_id, token, submitted_at, claimed_at, finished_at, incarnation, shape_id, priority, attempts,
  max_attempts, crashes, max_crashes, trips, max_trips, stops, state, retention, submitter, login)
select 1000000000 + n, n, clock_timestamp(), clock_timestamp(), clock_timestamp(), 1, 1, 0, 1, 3, 0, 3, 0, 3, 0,
  case n % 1000 when 0 then 'failed' when 1 then 'cancelled' else 'done' end, case n % 2 when 0 then 'short' else 'long' end, 'me', 'me'
from generate_series(1, :many) n;
insert into gangq.attempt_history (job_id, token, gang_id, incarnation, started_at, ended_at, shape_id, cause, submitter)
select 1000000000 + n, n, n / 10, 1, clock_timestamp(), clock_timestamp(), 1, case n % 100 when 0 then 'fail' else 'done' end, 'me'
from generate_series(1, :many) n;
insert into gangq.gang_history (gang_id, finished_at, submitted_at, shape_id, kind_id, size, epoch, priority, attempts, max_attempts, crashes,
  max_crashes, trips, max_trips, placement_misses, never_started, preemptions, state, retention, checkpoint_mode, failure_policy, preemptible,
  claim_deadline_s, timeout_s, timeout_style, submitter, login)
select 1000000000 + n, clock_timestamp(), clock_timestamp(), 1, 1, 1, 1, 0, 1, 3, 0, 3, 0, 3, 0, 0, 0,
  case n % 1000 when 0 then 'failed' when 1 then 'cancelled' else 'done' end, case n % 2 when 0 then 'short' else 'long' end, 'each', 'restart_gang', true,
  30, 900, 'requeue', 'me', 'me'
from generate_series(1, :many) n;
insert into gangq.checkpoints (job_id, step, saved_at, data)
select 1000000000 + n, 1, clock_timestamp(), 'x' from generate_series(1, :many / 10) n;
insert into gangq.events (at, kind, gang_id, epoch, job_id, data)
select clock_timestamp(), case n % 10000 when 0 then 'trip' when 1 then 'drain' when 2 then 'drained' else 'claim' end, 1 + n % 3000, 1, n, '{}'
from generate_series(1, :many) n;
-- As many as are kept for a target.
select gangq.set_schedule('nightly' || n, task => 'report', cron => '0 3 * * *', work => '{"wait_for_hardware": true}')
from generate_series(1, 1000) n;
update gangq.schedules_table set due_at = clock_timestamp() + interval '1 day';
select gangq.add_notification('oncall');
insert into gangq.outbox (target_id, at, kind, body, due_at)
select x.id, clock_timestamp(), 'trip', '{}', clock_timestamp() from gangq.notification_targets x, generate_series(1, 10000) n;
insert into gangq.logs (job_id, token, seq, at, chunk, upto) select n, n, 0, clock_timestamp(), 'x', 65 from generate_series(1, :many / 10) n;
-- However slow this machine is, nobody falls silent while the tests run.
update gangq.leases set renewed_at = renewed_at + interval '1 day', expires_at = expires_at + interval '1 day';
set session_replication_role = origin;
vacuum analyze;
