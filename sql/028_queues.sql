-- Queues as a tree.
create function gangq.estimate_s(queue text, task text, gpus integer, budget_s real) returns real language sql stable as $$
  select least(
    coalesce(estimate_s.budget_s, case when estimate_s.gpus > 0 then c.budget_gpu_s else c.budget_s end),
    (select r.p90_s from gangq.runtimes r where r.queue = estimate_s.queue and r.task = estimate_s.task and r.samples >= 10))
  from gangq.settings c
$$;
comment on function gangq.estimate_s(text, text, integer, real) is 'Internal. How long a job runs, seconds.';
