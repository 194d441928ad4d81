-- Pace: claims that stay fast behind rows that are dead and cannot be cleaned away yet, because a transaction elsewhere
-- may still see them. Only additions and an index; the previous release's calls still resolve while both are in use.

alter table gangq.live_jobs add column returned boolean not null default false;
comment on column gangq.live_jobs.returned is
  'It became pending, or got its present place, after its submission: it may stand before jobs that were claimed long ago.';

-- What has been put at the front of its priority.
update gangq.live_jobs j set returned = true where j.state = 'pending' and j.order_key & 1125899906842623 < 562949953421312;

create index live_jobs_returned on gangq.live_jobs (shape_id, order_key) where state = 'pending' and returned;

-- With the token in it a worker finds what it holds without walking over what it held: tokens only grow.
drop index gangq.live_jobs_held;
create index live_jobs_held on gangq.live_jobs (incarnation, token) where incarnation is not null;
