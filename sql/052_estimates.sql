-- How long work will run: what planned starts rest on. A budget is enforced by the watchdog, so it
-- is an upper bound; a task's own history lowers it. Locks: a row of runtimes or the row 'runtimes'
-- of lock_rows, with skip locked; takes nothing else and waits for nobody.

-- Internal. Seconds a job will run: its budget, else the installation's; the 90th percentile of its
-- task's runs where at least ten are known and it is less.
create function gangq.estimate_s(queue text, task text, gpus integer, budget_s real) returns real
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return least(
    coalesce(estimate_s.budget_s, (
      select case when gpus > 0 then c.budget_gpu_s else c.budget_s end from gangq.settings c)),
    (select r.p90_s from gangq.runtimes r
    where r.queue = estimate_s.queue and r.task = estimate_s.task and r.samples >= 10));
end $$;

-- Internal. Jobs of these shapes have run so long and are done; of several of one task the longest
-- counts, as of a gang. A running estimate in one row: each end longer than it raises it by as much
-- as nine shorter ones lower it. The first ten only raise it. In a caller's transaction the row may
-- stay locked for long, so whoever meets it locked leaves it; the row of lock_rows does the same
-- for two that would both insert the first estimate of a task.
create function gangq.learn_runtimes(done gangq.attempt_history[], t timestamptz) returns void
language plpgsql as $$
declare
  seen record;
begin
  for seen in
    select s.queue, s.task, greatest(extract(epoch from max(r.ended_at - r.started_at))::float8,
      0.001) as run_s
    from unnest(learn_runtimes.done) r join gangq.shapes s on s.id = r.shape_id
    group by s.queue, s.task order by 1, 2
  loop
    perform from gangq.runtimes r
    where r.queue = seen.queue and r.task = seen.task for no key update skip locked;
    if found then
      update gangq.runtimes r set samples = r.samples + 1, updated_at = learn_runtimes.t,
        p90_s = least(1e9, case
          when r.samples < 10 then greatest(r.p90_s, seen.run_s)
          when seen.run_s > r.p90_s then greatest(r.p90_s, 0.001) * exp(0.18)
          else r.p90_s * exp(-0.02) end)
      where r.queue = seen.queue and r.task = seen.task;
    elsif not exists (
      select 1 from gangq.runtimes r where r.queue = seen.queue and r.task = seen.task)
    then
      perform from gangq.lock_rows l where l.name = 'runtimes' for update skip locked;
      if found then
        insert into gangq.runtimes (queue, task, samples, p90_s, updated_at)
        values (seen.queue, seen.task, 1, least(1e9, seen.run_s), learn_runtimes.t)
        on conflict do nothing;
      end if;
    end if;
  end loop;
end $$;
