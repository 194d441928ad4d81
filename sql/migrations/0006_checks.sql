-- What a statement on live_jobs pays before it touches a row: PostgreSQL reads every check's expression anew for every statement.
-- What these three said, the triggers say now where one of these columns changes: see 020_transitions.sql.
alter table gangq.live_jobs drop constraint live_jobs_attempts_check;
alter table gangq.live_jobs drop constraint live_jobs_priority_check;
alter table gangq.live_jobs drop constraint live_jobs_rank;
