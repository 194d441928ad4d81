-- retry_failed: retries the single jobs that have failed, by what they have in common.
-- Locks: what retry locks for several jobs (106).

-- Retries single jobs that have failed, as retry does, of those that the caller may retry: of this
-- batch, or of batches with this name or tag; of this queue, task, submitter; that failed at since
-- or later, and at until or before. All that is given must hold. Returns at most so many, those of
-- the lowest ids above after_id: call again, in another transaction, with the highest one returned,
-- until none is. Without until, what fails again meanwhile is retried again. Those that another
-- transaction holds are returned with the state left. dry_run: changes nothing, and the state is
-- failed. A gang is retried by its id. Raises what retry raises.
create function gangq.retry_failed(
  batch_id bigint default null, name text default null, tag text default null,
  queue text default null, task text default null, submitter text default null,
  since timestamptz default null, until timestamptz default null, after_id bigint default 0,
  most integer default 500, dry_run boolean default false
) returns table (job_id bigint, gang_id bigint, state text) language plpgsql
set plan_cache_mode = force_custom_plan as $$
declare
  batches bigint[] := gangq.batches_named(
    retry_failed.batch_id, retry_failed.name, retry_failed.tag);
  page bigint[];
  taken bigint[];
  t timestamptz := gangq.now();
begin
  perform gangq.check_moment('since', retry_failed.since);
  perform gangq.check_moment('until', retry_failed.until);
  perform gangq.refuse('GQ001', format('most is %s', coalesce(most::text, 'null')),
    'So many jobs are retried in one call: 1 to 500.')
  where (most between 1 and 500) is not true;
  page := array(
    select h.job_id
    from gangq.history h
    join gangq.shapes s on s.id = h.shape_id
    cross join lateral gangq.owned(h.submitter, h.login, s.queue) as o(mine)
    where h.state = 'failed' and h.gang_id is null and o.mine
      and h.job_id > coalesce(retry_failed.after_id, 0)
      and (batches is null or h.batch_id = any (batches))
      and (retry_failed.since is null or h.finished_at >= retry_failed.since)
      and (retry_failed.until is null or h.finished_at <= retry_failed.until)
      and (retry_failed.queue is null or s.queue = retry_failed.queue)
      and (retry_failed.task is null or s.task = retry_failed.task)
      and (retry_failed.submitter is null or h.submitter = retry_failed.submitter)
      and not exists (
        select from gangq.retried r where r.job_id = h.job_id and r.finished_at = h.finished_at)
    order by h.job_id limit most);
  if dry_run or page = '{}' then
    return query select p.id, null::bigint, 'failed' from unnest(page) as p(id);
    return;
  end if;
  taken := gangq.retry_jobs(page, null, most, t, ended => 'failed');
  return query
  select p.id, null::bigint, coalesce(j.state, 'left')
  from unnest(page) as p(id) left join gangq.live_jobs j on j.id = p.id and p.id = any (taken)
  order by p.id;
  perform gangq.revive_at_once(taken, t);
end $$;
