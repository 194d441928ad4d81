-- append_log: what a job prints, in chunks numbered from 0 per attempt.
-- Locks: the attempt's first row of output, or its job's row while there is none, FOR NO KEY
-- UPDATE.

-- Internal. Locks the output of an attempt. Returns false if the job runs as another attempt or has
-- left. Two appends at once would not count each other's bytes, so they wait for each other: on the
-- attempt's first row of output, or on the job's row while there is none. since and until bound the
-- partitions that are read.
create function gangq.lock_output(
  job_id bigint, token bigint, since timestamptz, until timestamptz
) returns boolean language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  for look in 1 .. 2 loop
    perform from gangq.logs x
    where x.job_id = lock_output.job_id and x.token = lock_output.token
      and x.at between since and until
    order by x.seq limit 1 for no key update;
    exit when found or look = 2;
    perform from gangq.live_jobs j
    where j.id = lock_output.job_id and (j.token = lock_output.token
      or j.token is null and j.final_token = lock_output.token)
    for no key update;
    if not found then
      return false;
    end if;
  end loop;
  return true;
end $$;

-- Internal, for append_log. Raises GQ001 for arrays that do not go together, GQ007 for a chunk over
-- 1 MiB.
create function gangq.check_output(
  job_ids bigint[], tokens bigint[], seqs integer[], chunks text[]
) returns void language plpgsql as $$
begin
  if (
    select count(distinct coalesce(cardinality(a.list), 0))
    from (values (check_output.job_ids::text[]), (check_output.tokens::text[]),
      (check_output.seqs::text[]), (check_output.chunks)) as a(list)) > 1
    or array_position(check_output.seqs, null) is not null
    or array_position(check_output.chunks, null) is not null or 0 > any (check_output.seqs)
    or (select count(*) > count(distinct (l.id, l.token, l.seq))
      from unnest(check_output.job_ids, check_output.tokens, check_output.seqs)
        as l(id, token, seq))
  then
    perform gangq.refuse('GQ001',
      'append_log needs as many tokens, numbers and chunks as job ids, and numbers from 0 on, '
      'each number once for an attempt',
      'Pass arrays of one length, without nulls in seqs and chunks.');
  end if;
  perform gangq.refuse_larger('a chunk', max(octet_length(c.chunk)), 1048576)
  from unnest(check_output.chunks) as c(chunk);
end $$;

-- Output of claims, in chunks numbered from 0 per attempt. Dropped without an error: chunks of an
-- attempt that is not the job's last, whose job has left live_jobs or whose worker is forgotten,
-- and chunks whose number is not above the last one stored. Workers keep an attempt to
-- settings.log_bytes. Raises GQ001, GQ007 (a chunk over 1 MiB, an attempt over 65 times log_bytes,
-- where each chunk counts 64 bytes more), GQ008, 42501 if another login's worker holds or held one
-- of the claims.
create function gangq.append_log(
  job_ids bigint[], tokens bigint[], seqs integer[], chunks text[]
) returns void
language plpgsql set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  -- A chunk counts as 64 bytes more than it has, for its row. The smallest has one byte: a worker
  -- that keeps to log_bytes never comes here.
  most bigint := (select 65::bigint * c.log_bytes from gangq.settings c);
  said record;
  held record;
  ran_on bigint[];
  last record;
  total bigint;
  until timestamptz := gangq.now() + interval '1 hour';
begin
  perform gangq.check_output(append_log.job_ids, append_log.tokens, append_log.seqs,
    append_log.chunks);
  perform gangq.require_read_committed('append_log');
  for said in
    select l.id, l.token, array_agg(l.seq order by l.seq) as seqs,
      array_agg(l.chunk order by l.seq) as chunks
    from unnest(append_log.job_ids, append_log.tokens, append_log.seqs, append_log.chunks)
      as l(id, token, seq, chunk)
    group by l.id, l.token order by l.id, l.token
  loop
    select j.incarnation, j.submitted_at, j.token is not distinct from said.token as present
    into held from gangq.live_jobs j
    where j.id = said.id and (j.token = said.token or j.final_token = said.token);
    continue when not found;
    -- An attempt that is over has left its job's row: the events of it say where it ran, or, of a
    -- job that was done and has been retried, its history. What nothing says any more is dropped.
    ran_on := case when held.present then array[held.incarnation] else array(
      select i.id from gangq.incarnations i
      where i.id in (
        select e.incarnation from gangq.events e
        where e.job_id = said.id and e.token = said.token
        union all
        select h.incarnation from gangq.history h
        where h.job_id = said.id and h.token = said.token)) end;
    continue when ran_on = '{}';
    perform gangq.check_login(i.id) from unnest(ran_on) as i(id);
    continue when not gangq.lock_output(said.id, said.token, held.submitted_at, until);
    select x.seq, x.upto into last from gangq.logs x
    where x.job_id = said.id and x.token = said.token and x.at between held.submitted_at and until
    order by x.seq desc limit 1;
    select coalesce(last.upto, 0) + sum(octet_length(c.chunk) + 64) into total
    from unnest(said.seqs, said.chunks) as c(seq, chunk) where last.seq is null or c.seq > last.seq;
    perform gangq.refuse_larger(
      format('the output of this attempt of job %s, with its rows,', said.id), total, most);
    insert into gangq.logs (job_id, token, seq, at, chunk, upto)
    select said.id, said.token, c.seq, gangq.now(), c.chunk, total
    from unnest(said.seqs, said.chunks) as c(seq, chunk) where last.seq is null or c.seq > last.seq;
  end loop;
end $$;
