-- The brake lets go of what it has held for long; and how far apart the beats of a job are, in steps, which says whether a
-- member that is behind its gang has really stopped first.

alter table gangq.settings
  add column brake_hold_s real not null default 900 check (brake_hold_s between 1 and 1e7);
comment on column gangq.settings.brake_hold_s is
  'Seconds after which the brake lets a held stall or health trip go, unless suspects of other gangs or workers wait for the same file system or peer, or the database was away within a lease.';

alter table gangq.progress
  add column stride bigint;
comment on column gangq.progress.stride is
  'Greatest common divisor of the differences between the steps that heartbeats brought: how many steps lie between two beats, at most. Null until two steps were seen.';
