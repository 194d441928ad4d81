-- Who is charged when an attempt ends. This is the one place of the rule: every end reads it. To
-- change who pays, change a row of charges_for.
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

create function gangq.charges_for(cause text, out culprit text, out sibling text, out gang text)
language plpgsql immutable as $$
#variable_conflict use_column
begin
  select c.culprit, c.sibling, c.gang
  into culprit, sibling, gang
  from (values
    -- cause            culprit    sibling    gang
    ('fail',           'attempt', 'nothing', 'attempt'),         -- the task failed
    ('crash',          'crash',   'nothing', 'crash'),           -- its worker or host was lost
    ('trip',           'trip',    'nothing', 'trip'),            -- a watchdog stopped it
    ('release',        'stop',    'stop',    'nothing'),         -- its worker handed it back
    ('preempt',        'stop',    'stop',    'preemption'),      -- told to stop for other work
    ('worker_lost',    'nothing', 'nothing', 'nothing'),         -- its worker tripped over another job
    ('move',           'nothing', 'nothing', 'nothing'),         -- its host is drained
    ('cancel',         'nothing', 'nothing', 'nothing'),
    ('completed',      'nothing', 'nothing', 'nothing'),         -- the rest is not needed any more
    ('no_replacement', 'nothing', 'nothing', 'nothing'),         -- a lost member got no place in time
    ('placement_miss', 'nothing', 'nothing', 'placement_miss'),  -- a place was not claimed in time
    ('never_started',  'nothing', 'nothing', 'never_started')    -- ended before the barrier opened
  ) as c(cause, culprit, sibling, gang)
  where c.cause = charges_for.cause;
  if culprit is null then
    perform gangq.refuse('GQ001', format('%L is no cause of an end', charges_for.cause),
      'The causes are listed in gangq.charges_for.');
  end if;
end $$;
comment on function gangq.charges_for is
  'Internal. What each party pays when an attempt ends with this cause: the culprit (a single job '
  'is its own culprit), each running sibling, the gang. Raises GQ001 for an unknown cause.';

create function gangq.charge_job(
  j gangq.live_jobs, charge text, final boolean default false,
  out attempts integer, out crashes integer, out trips integer, out stops integer
) language sql immutable as $$
  select
    case
      when charge <> 'attempt' then j.attempts - 1
      when final then greatest(j.attempts, j.max_attempts)
      else j.attempts
    end,
    j.crashes + (charge = 'crash')::integer,
    j.trips + (charge = 'trip')::integer,
    j.stops + (charge = 'stop')::integer
$$;
comment on function gangq.charge_job is
  'Internal. The counters of a job after its attempt ended with this charge. final: no further '
  'attempt, so all are spent.';

create function gangq.charge_gang(
  g gangq.live_gangs, charge text,
  out attempts integer, out crashes integer, out trips integer,
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
  'Internal. Whether this charge, which is not counted yet, is one more than the job may have: '
  'then it does not run again.';

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
    when cause in ('fail', 'crash', 'trip') and (
      g.go_at is null
      or culprits <> '{}' and not exists (
        select 1 from gangq.live_jobs j
        where j.id = any (culprits)
          and (g.missing_since is null or j.claimed_at <= g.missing_since)))
      then 'never_started'
    else cause
  end
$$;
comment on function gangq.cause_charged is
  'Internal. The cause that a gang is charged for. A member whose code has not begun is not '
  'charged: before the barrier opened, or as a successor that still waits for another one. So '
  'fail, crash and trip become never_started when no culprit had begun.';

create function gangq.cause_of_loss(i gangq.incarnations) returns text language sql immutable as $$
  select case
    when i.exit_code is not null then 'worker_lost'
    when i.state = 'dead' then 'crash'
    else 'release'
  end
$$;
comment on function gangq.cause_of_loss is
  'Internal. The cause of the end of what an ended incarnation still held: crash when it was lost, '
  'worker_lost when it tripped over another job, release when it retired.';
