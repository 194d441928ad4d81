-- Who is charged when an attempt ends, and which ends are losses. This is the one place of the
-- rule: every end reads it. To change who pays for a cause, change its row of charges_for. A new
-- cause also needs is_fault here, its event in end_attempt (080), its words in drained_for_good
-- (100). The cause of a lost host is crash: the database cannot tell a host from its worker.
-- Takes no locks and changes nothing.
--
-- An attempt is counted at the claim. A charge is one word:
--   attempt    the attempt stays counted
--   crash      the attempt is given back, a crash is counted
--   trip       the attempt is given back, a trip is counted
--   stop       the attempt is given back, a stop is counted
--   nothing    the attempt is given back
-- A gang has counters of its own: attempt, crash, trip, never_started, placement_miss, preemption,
-- nothing.
-- A loss takes a member from a gang that did not want to stop: the failure policy says whether the
-- others run on. It is the member's fault when the member is charged.

create function gangq.charges_for(
  cause text, out culprit text, out sibling text, out gang text, out loss boolean
) language plpgsql immutable as $$
#variable_conflict use_column
begin
  select c.culprit, c.sibling, c.gang, c.loss into culprit, sibling, gang, loss
  from (values
   -- cause            culprit    sibling    gang              loss
    ('fail',           'attempt', 'nothing', 'attempt',        true),  -- the task failed
    ('crash',          'crash',   'nothing', 'crash',          true),  -- worker or host was lost
    ('trip',           'trip',    'nothing', 'trip',           true),  -- a watchdog stopped it
    ('never_started',  'nothing', 'nothing', 'never_started',  true),  -- before the barrier opened
    ('worker_lost',    'nothing', 'nothing', 'nothing',        true),  -- tripped over another job
    ('release',        'stop',    'stop',    'nothing',        false),  -- its worker handed it back
    ('preempt',        'stop',    'stop',    'preemption',     false),  -- for other work
    ('move',           'nothing', 'nothing', 'nothing',        false),  -- its host is drained
    ('cancel',         'nothing', 'nothing', 'nothing',        false),
    ('completed',      'nothing', 'nothing', 'nothing',        false),  -- the rest is not needed
    ('no_replacement', 'nothing', 'nothing', 'nothing',        false),  -- a lost member waits on
    ('placement_miss', 'nothing', 'nothing', 'placement_miss', false)  -- not claimed in time
  ) as c(cause, culprit, sibling, gang, loss)
  where c.cause = charges_for.cause;
  if culprit is null then
    perform gangq.refuse('GQ001', format('%L is no cause of an end', charges_for.cause),
      'The causes are listed in gangq.charges_for.');
  end if;
end $$;
comment on function gangq.charges_for is
  'Internal. What this cause costs the culprit (a single job is its own), each running sibling and '
  'the gang, and whether it is a loss. Raises GQ001 for an unknown cause.';

create function gangq.is_fault(cause text) returns boolean language sql immutable as $$
  select c.loss and c.culprit <> 'nothing' from gangq.charges_for(cause) c
$$;
comment on function gangq.is_fault is 'Internal. A loss that a member is charged for.';

create function gangq.charge_job(
  j gangq.live_jobs, charge text, final boolean default false,
  out attempts integer, out crashes integer, out trips integer, out stops integer
) language sql immutable as $$
  select
    case when charge <> 'attempt' then j.attempts - 1
      when final then greatest(j.attempts, j.max_attempts)
      else j.attempts end,
    j.crashes + (charge = 'crash')::integer,
    j.trips + (charge = 'trip')::integer,
    j.stops + (charge = 'stop')::integer
$$;
comment on function gangq.charge_job is
  'Internal. The counters of a job after this charge. final: all its attempts are spent.';

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
comment on function gangq.charge_gang is 'Internal. The counters of a gang after this charge.';

create function gangq.spends_job(j gangq.live_jobs, charge text) returns boolean
language sql stable as $$
  select case charge
    when 'attempt' then j.attempts >= j.max_attempts
    when 'crash' then j.crashes >= j.max_crashes
    when 'trip' then j.trips >= j.max_trips
    when 'stop' then j.stops >= (select c.max_stops from gangq.settings c)
    else false
  end
$$;
comment on function gangq.spends_job is
  'Internal. Whether this charge, not counted yet, is one more than the job may have.';

create function gangq.spends_gang(g gangq.live_gangs, charge text) returns boolean
language sql immutable as $$
  select case charge
    when 'attempt' then g.attempts + 1 >= g.max_attempts
    when 'crash' then g.crashes >= g.max_crashes
    when 'trip' then g.trips >= g.max_trips
    else false
  end
$$;
comment on function gangq.spends_gang is 'Internal. As spends_job, for a gang.';

create function gangq.cause_charged(g gangq.live_gangs, culprits bigint[], cause text) returns text
language sql stable as $$
  select case
    when gangq.is_fault(cause) and (
      g.go_at is null
      or culprits <> '{}' and not exists (
        select 1 from gangq.live_jobs j
        where j.id = any (culprits)
          and (g.missing_since is null or j.claimed_at <= g.missing_since)))
      then 'never_started'
    else cause end
$$;
comment on function gangq.cause_charged is
  'Internal. The cause that a gang is charged for. A fault becomes never_started when the code of '
  'no culprit had begun: before the barrier opened, or when every culprit is a replacement whose '
  'barrier has not opened.';

create function gangq.cause_of_loss(i gangq.incarnations) returns text language sql immutable as $$
  select case when i.exit_code is not null then 'worker_lost'
    when i.state = 'dead' then 'crash' else 'release' end
$$;
comment on function gangq.cause_of_loss is
  'Internal. How what an ended worker held ends: it tripped over another job, was lost or retired.';
