-- The classes of trips. Every rule about a class reads gangq.trip_classes. ExitCode in Python has
-- the same rows, because a process that exits may have no database; a test compares the two.
-- Takes no locks.
--
--   code      the exit code of the process; null: the class is of a gang, and no process exits
--   reporter  which process suspects and reports it. database: judge_standstill does. null: it is
--             never a suspicion
--   trips     gangq.trip takes it. The others end a process that has no job any more
--   notify    an operator may set the class to notify only (notify_only)
--   held      it is a conclusion, not a fact. The brake may hold it. In a gang that stands still
--             the member that stopped first is charged instead of the one that tripped
--   devices   what such a trip says of the devices that it blames:
--               nothing
--               counted   they are quarantined once device_trips different jobs tripped on them
--               avoided   that, and the job keeps away from them
--               faulty    they are quarantined at once, and the job keeps away from them

-- The classes of trips: code is the exit code of the process, reporter the process that says so.
-- notify: it can be set to notify only. held: the brake may hold it. devices: what follows for the
-- devices that are blamed.
create view gangq.trip_classes as
select *
from (values
 -- code  class         reporter      trips  notify held   devices
  (75,   'budget',     'worker',     true,  true,  false, 'nothing'),
  (76,   'stall',      'worker',     true,  true,  true,  'counted'),
  (77,   'lost',       null,         false, false, false, 'nothing'),
  (78,   'health',     'worker',     true,  true,  true,  'avoided'),
  (79,   'unstopped',  null,         true,  false, false, 'counted'),
  (80,   'frozen',     'supervisor', true,  false, false, 'counted'),
  (85,   'fault',      'worker',     true,  true,  false, 'faulty'),
  (86,   'memory',     'supervisor', true,  false, false, 'nothing'),
  (87,   'unkillable', null,         true,  false, false, 'counted'),
  (88,   'unfit',      null,         false, false, false, 'nothing'),
  (null, 'gang',       'database',   true,  true,  false, 'counted')
) as c(code, class, reporter, trips, notify, held, devices);

-- Internal. Whether the brake may hold a trip of this class.
create function gangq.may_be_held(class text) returns boolean language sql stable as $$
  select exists (
    select from gangq.trip_classes k where k.class = may_be_held.class and k.held)
$$;
