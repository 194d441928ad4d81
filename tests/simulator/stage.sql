-- What the simulator adds to a database, as the schema's owner: a clock that it moves, and functions that let all that
-- happens at one moment before a pass, after it and after the last one happen in one call. Every verb in it is gangq's own; nothing is decided here.

create schema simulation;
create table simulation.clock (at timestamptz not null);
insert into simulation.clock values ('2030-01-01 00:00:00+00');
create or replace function gangq.now() returns timestamptz language sql volatile as
$$ select at from simulation.clock $$;

-- The first planned start that each gang was given.
create table simulation.promises (
  gang_id bigint primary key,
  place integer not null,
  starts_s double precision not null
);

create function simulation.fleet(hosts integer, slots integer, queues text[]) returns void language sql as $$
  select gangq.register_worker(name => 'w' || n, host => 'host' || n, queues => fleet.queues, slots => fleet.slots,
    options => '{"light": 0}')
  from generate_series(1, fleet.hosts) n
$$;

-- Every worker is heard at every moment.
create function simulation.move_clock(seconds double precision) returns timestamptz language plpgsql as $$
declare
  t timestamptz;
begin
  update simulation.clock set at = timestamptz '2030-01-01 00:00:00+00' + make_interval(secs => move_clock.seconds) returning at into t;
  update gangq.leases set renewed_at = t, expires_at = t + make_interval(secs => lease_s);
  return t;
end $$;

-- What ends, what outran its budget, what is submitted.
-- learn: whether estimates may rest on what tasks have run so far.
create function simulation.happen(
  seconds double precision, ended bigint[], outran bigint[], sizes integer[], budgets real[], queues text[], users text[],
  priorities integer[], learn boolean
) returns bigint[]
language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := simulation.move_clock(happen.seconds);
  submitted bigint[] := '{}';
  j record;
  g record;
begin
  if happen.ended <> '{}' then
    perform gangq.complete(job_ids => array_agg(m.id order by m.id), tokens => array_agg(m.token order by m.id))
    from gangq.live_jobs m where m.gang_id = any (happen.ended);
  end if;
  for j in select m.id, m.token from gangq.live_jobs m where m.gang_id = any (happen.outran) and m.rank = 0 order by m.id loop
    perform gangq.fail(job_id => j.id, token => j.token, error => '{"type": "budget"}', retryable => false);
  end loop;
  for j in select m.id, m.token from gangq.live_jobs m where m.gang_id = any (happen.outran) and m.state = 'preempting' order by m.id loop
    perform gangq.ack_preempted(job_id => j.id, token => j.token);
  end loop;
  if not happen.learn then
    delete from gangq.runtimes;
  end if;
  for g in
    select s.* from unnest(happen.sizes, happen.budgets, happen.queues, happen.users, happen.priorities) with ordinality
      as s(size, budget_s, queue, submitter, priority, n) order by s.n
  loop
    submitted := submitted || (select x.gang_id from gangq.submit_gang(task => 'work', size => g.size, queue => g.queue,
      priority => g.priority, options => jsonb_build_object('budget_s', g.budget_s)) x);
    if g.submitter <> '' then
      update gangq.live_gangs x set submitter = g.submitter where x.id = submitted[cardinality(submitted)];
      update gangq.live_jobs x set submitter = g.submitter where x.gang_id = submitted[cardinality(submitted)];
    end if;
  end loop;
  return submitted;
end $$;

-- After a pass: whoever was told to stop for somebody else has stopped, so that what it held can be taken in the next one;
-- and what was placed is claimed. Returns the gangs that were told to stop.
create function simulation.follow() returns bigint[] language plpgsql as $$
declare
  stopped bigint[] := array(select x.id from gangq.live_gangs x where x.state = 'draining');
  j record;
begin
  for j in select m.id, m.token from gangq.live_jobs m where m.state = 'preempting' order by m.id loop
    perform gangq.ack_preempted(job_id => j.id, token => j.token);
  end loop;
  perform gangq.claim(incarnation => i.id, max_jobs => 1000)
  from (select distinct m.incarnation as id from gangq.live_jobs m where m.state = 'reserved' order by 1) i;
  return stopped;
end $$;

create function simulation.look(seconds double precision) returns table (started bigint[], wake_s double precision)
language sql as $$
  insert into simulation.promises (gang_id, place, starts_s)
  select substr(p.ask, 2)::bigint, p.place, look.seconds + extract(epoch from p.starts_at - c.at)
  from gangq.plans p cross join simulation.clock c
  where not p.kept on conflict do nothing;
  select array(select x.id from gangq.live_gangs x where x.state = 'running' and x.go_at = c.at order by x.id),
    (select extract(epoch from min(x.not_before) - c.at) from gangq.live_gangs x where x.state = 'blocked' and x.not_before > c.at)
  from simulation.clock c
$$;
