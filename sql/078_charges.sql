-- Who is charged when an attempt ends. What a cause costs is said in gangq.causes only, which every
-- end reads: it is changed in its row. Which cause an end has is chosen by who ends it: report
-- (084), free_orphaned_job (108), cause_charged and cause_of_loss below. How long it backs off:
-- report for single jobs, resumes_at (101) for gangs.
-- Takes no locks and changes nothing.
--
--   event   what the end of a single job is written as; retry instead of fail while it has
--           attempts. none: no attempt of a single job ends by it (a cancelled job just leaves)
--   member  what a member or a single job pays. When the end was asked for, each member that runs
--           pays it; otherwise only the payers do (100). An attempt is counted at the claim:
--             attempt              it stays counted
--             crash, trip, stop,   it is given back, and one of these is counted
--             snooze
--             nothing              it is given back
--   gang    what its gang pays, which has counters of its own
--   ending  loss: it takes a member from a gang that did not want to stop, and the failure policy
--           says whether the others run on. fault: a loss that also counts as the member's fault:
--           the policy fail ends the gang. asked: anything but a loss
--   hours   wasted: it failed or was lost, and is repeated at best. displaced: it had to make way.
--           used: neither
--   words   what is said of a member
--
-- The cause of a lost host is crash, with an error of type WorkerLost: the database cannot tell a
-- host from its worker.
--
-- Why an attempt ends, and who is charged for it: a member or single job, and its gang. event: what
-- the end of a single job is written as. ending: fault, loss or asked. hours: what gangq.usage
-- counts the time of such attempts as.
create view gangq.causes as
select *
from (values
 -- cause            event      member     gang              ending   hours        words
  ('fail',           'fail',    'attempt', 'attempt',        'fault', 'wasted',    'failed'),
  ('crash',          'reap',    'crash',   'crash',          'fault', 'wasted',
    'lost its worker'),
  ('trip',           'trip',    'trip',    'trip',           'fault', 'wasted',
    'tripped a watchdog'),
  ('never_started',  'none',    'nothing', 'never_started',  'loss',  'wasted',
    'ended before it began'),
  ('other_job',      'release', 'nothing', 'nothing',        'loss',  'wasted',
    'stopped over another job'),
  ('release',        'release', 'stop',    'nothing',        'asked', 'displaced',
    'was handed back'),
  ('preempt',        'release', 'stop',    'preemption',     'asked', 'displaced', 'was displaced'),
  ('snoozed',        'snooze',  'snooze',  'nothing',        'asked', 'used',      'was snoozed'),
  ('move',           'release', 'nothing', 'nothing',        'asked', 'displaced',
    'was moved off its host'),
  ('cancel',         'none',    'nothing', 'nothing',        'asked', 'used',      'was cancelled'),
  ('completed',      'none',    'nothing', 'nothing',        'asked', 'used',
    'was not needed any more'),
  ('no_replacement', 'none',    'nothing', 'nothing',        'asked', 'wasted',
    'waited for a lost one'),
  ('placement_miss', 'none',    'nothing', 'placement_miss', 'asked', 'wasted',
    'was not claimed')
) as c(cause, event, member, gang, ending, hours, words);

-- Internal. The row of this cause. Immutable: the view is a list of constants.
create function gangq.cause_named(
  cause text, out event text, out member text, out gang text, out ending text, out words text
) language plpgsql immutable as $$
begin
  select c.event, c.member, c.gang, c.ending, c.words into strict event, member, gang, ending, words
  from gangq.causes c
  where c.cause = cause_named.cause;
end $$;

-- Internal. The counters of a job after this charge. final: all its attempts are spent.
create function gangq.charge_job(
  j gangq.live_jobs, charge text, final boolean default false,
  out attempts integer, out crashes integer, out trips integer, out stops integer,
  out snoozes integer
) language sql immutable as $$
  select
    case when charge <> 'attempt' then j.attempts - 1
      when final then greatest(j.attempts, j.max_attempts)
      else j.attempts end,
    j.crashes + (charge = 'crash')::integer,
    j.trips + (charge = 'trip')::integer,
    j.stops + (charge = 'stop')::integer,
    j.snoozes + (charge = 'snooze')::integer
$$;

-- Internal. What a member pays at this end of its gang.
create function gangq.member_charge(job_id bigint, payers bigint[], cause text) returns text
language sql immutable as $$
  select case when job_id = any (payers) or c.ending = 'asked' then c.member else 'nothing' end
  from gangq.cause_named(cause) c
$$;

-- Internal. The counters of a gang after this charge.
create function gangq.charge_gang(
  g gangq.live_gangs, charge text, out attempts integer, out crashes integer, out trips integer,
  out never_started integer, out placement_misses integer, out preemptions integer
) language sql immutable as $$
  select
    g.attempts + (charge = 'attempt')::integer,
    g.crashes + (charge = 'crash')::integer,
    g.trips + (charge = 'trip')::integer,
    g.never_started + (charge = 'never_started')::integer,
    g.placement_misses + (charge = 'placement_miss')::integer,
    g.preemptions + (charge = 'preemption')::integer
$$;

-- Internal. Whether this charge, not counted yet, is one more than the job may have.
create function gangq.spends_job(j gangq.live_jobs, charge text) returns boolean
language sql stable as $$
  select case charge
    when 'attempt' then j.attempts >= j.max_attempts
    when 'crash' then j.crashes >= j.max_crashes
    when 'trip' then j.trips >= j.max_trips
    when 'stop' then j.stops >= (select c.max_stops from gangq.settings c)
    when 'snooze' then j.snoozes >= j.max_snoozes
    else false
  end
$$;

-- Internal. The state of a single job after an attempt that did not succeed. state: running, or
-- preempting if it was told to stop. spent: it has no further attempt. due: when it may run again.
create function gangq.state_after(state text, spent boolean, due timestamptz) returns text
language sql immutable
return case
  when spent then case state when 'running' then 'failed' else 'cancelled' end
  when due is not null then 'scheduled'
  else 'pending' end;

-- Internal. As spends_job, for a gang.
create function gangq.spends_gang(g gangq.live_gangs, charge text) returns boolean
language sql immutable as $$
  select case charge
    when 'attempt' then g.attempts + 1 >= g.max_attempts
    when 'crash' then g.crashes >= g.max_crashes
    when 'trip' then g.trips >= g.max_trips
    else false
  end
$$;

-- Internal. The cause that a gang is charged for. A fault becomes never_started when the code of no
-- stopped member had begun: the gang has never gone, or each of them was claimed after
-- missing_since, as a replacement whose barrier has not opened.
create function gangq.cause_charged(g gangq.live_gangs, stopped bigint[], cause text) returns text
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return case
    when (gangq.cause_named(cause)).ending = 'fault' and (
      g.go_at is null
      or stopped <> '{}' and not exists (
        select 1 from gangq.live_jobs j
        where j.id = any (stopped)
          and (g.missing_since is null or j.claimed_at <= g.missing_since)))
      then 'never_started'
    else cause end;
end $$;

-- Internal. What a running job, single or a member, is charged for its own trip.
create function gangq.charge_of_trip(j gangq.live_jobs) returns text language sql stable as $$
  select (gangq.cause_named(coalesce((
    select gangq.cause_charged(g, array[j.id], 'trip')
    from gangq.live_gangs g where g.id = j.gang_id), 'trip'))).member
$$;

-- Internal. The cause with which the jobs of an ended worker end: other_job if it tripped over
-- another job, crash if it was lost, release if it retired.
create function gangq.cause_of_loss(i gangq.incarnations) returns text language sql immutable as $$
  select case when i.exit_code is not null then 'other_job'
    when i.state = 'dead' then 'crash' else 'release' end
$$;

-- Internal. The cause with which a gang loses members, whose workers ended with these; null: it
-- loses none that ran, but some that were reserved. One lost worker outweighs all others.
create function gangq.cause_of_losses(causes text[]) returns text language sql immutable as $$
  select case
    when causes is null then 'placement_miss'
    when 'crash' = any (causes) then 'crash'
    when 'other_job' = all (causes) then 'other_job'
    else 'release' end
$$;
