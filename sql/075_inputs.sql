-- What a job may read of those that it waited for.
-- Takes no locks of its own.

-- The rights are those of the job: its submitter may name any job in after, and must not be shown
-- what the view jobs would not show it.
--
-- How the jobs ended that this one was submitted to wait for, by id, for the worker that holds its
-- claim: of a gang its members. One that is not in history any more is left out. readable: whether
-- the submitter of this job may read result and error, which are null otherwise. Raises GQ002,
-- GQ003, GQ007 (more than 16 MiB), 42501.
create function gangq.inputs(job_id bigint, token bigint)
returns table (
  on_job_id bigint, gang_id bigint, rank integer, state text, readable boolean, result jsonb,
  error jsonb
) language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  j gangq.live_jobs := gangq.own_claim(inputs.job_id, inputs.token);
  roles text[];
  bytes bigint;
  most constant bigint := 16777216;
begin
  if j.awaited is null then
    return;
  end if;
  roles := gangq.roles_of(j.submitter);
  -- Once to count and once to return: a result of gigabytes must not be gathered first.
  select sum(coalesce(octet_length(x.result::text), 0) + coalesce(octet_length(x.error::text), 0))
  into bytes
  from gangq.inputs_of(j.awaited, j.login, roles) x;
  if bytes > most then
    perform gangq.refuse('GQ007',
      format('the results that job %s waited for have %s bytes, the limit is %s', inputs.job_id,
        bytes, most),
      'Let those jobs keep large results in shared storage and return their address, or wait for '
      'fewer of them in one job.');
  end if;
  return query
  select x.job_id, x.gang_id, x.rank, x.state, x.readable, x.result, x.error
  from gangq.inputs_of(j.awaited, j.login, roles) x order by x.job_id;
end $$;

-- Internal, for inputs. The latest endings of these jobs, as a login with these roles may see them.
create function gangq.inputs_of(awaited bigint[], login text, roles text[])
returns table (
  job_id bigint, gang_id bigint, rank integer, state text, readable boolean, result jsonb,
  error jsonb
) language sql stable as $$
  select h.job_id, h.gang_id, h.rank, h.state, o.readable,
    case when o.readable then h.result end, case when o.readable then h.error end
  from unnest(inputs_of.awaited) as a(id)
  cross join lateral (
    select x.* from gangq.history x
    where x.job_id = a.id and not exists (
      select from gangq.retried r where r.job_id = x.job_id and r.finished_at = x.finished_at)
    limit 1) h
  join gangq.shapes s on s.id = h.shape_id
  join gangq.queues_table q on q.name = s.queue
  cross join lateral (
    select h.login = inputs_of.login and h.submitter = any (roles)
      or q.others = 'shared' and 'gangq_submitter' = any (roles) as readable) o
$$;
