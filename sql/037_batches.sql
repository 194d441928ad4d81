-- Batches: what one submission has submitted under a name (the options name, tags and at_most of
-- submit).
--
-- A job that starts or ends must not touch a row that all jobs of its batch share: they would wait
-- for each other. So a batch keeps no counts. The view batches counts its jobs through an index,
-- and a step of the tick (end_batches) finds out that the last one has ended.
-- at_most is the limit of a limit key of the batch's own (031). The key and the shapes that name it
-- are forgotten with the batch.
--
-- Locks: end_batches and forget_batches lock batches with skip locked. retry locks the batches of
-- the jobs it makes live, shared, after those jobs.

-- Internal, for check_special. Checks the options of a batch, and draws the ids of its jobs:
-- that of the first one is its own, so whoever submits it knows it. With at_most, makes its limit
-- key. Raises GQ001.
create function gangq.draw_batch(
  s gangq.submission, o gangq.job_options, size integer
) returns gangq.submission language plpgsql as $$
begin
  if o.name is null then
    perform gangq.refuse('GQ001',
      case when o.at_most is not null then 'at_most is' when o.tags is not null then 'tags are'
        else 'indexes are' end || ' given without name',
      'These are of a batch: pass its name, too.');
  elsif cardinality(o.tags) > 20 then
    perform gangq.refuse('GQ001', format('tags are %s', cardinality(o.tags)),
      'A batch has 20 tags at most.');
  elsif cardinality(o.indexes) <> draw_batch.size or 0 > any (o.indexes)
    or (select count(distinct x.i) from unnest(o.indexes) as x(i)) <> cardinality(o.indexes)
  then
    perform gangq.refuse('GQ001', 'indexes are not a number of its own for each job',
      format('Pass %s different numbers from 0 on, or leave indexes out.', draw_batch.size));
  elsif o.at_most is not null and (s.asked).limit_key is not null then
    perform gangq.refuse('GQ001',
      format('at_most is given, and limit key %L limits these jobs already', (s.asked).limit_key),
      'One key limits a job: leave out at_most, or limit_key.');
  end if;
  perform gangq.read_options('submit', jsonb_build_object('tag', coalesce(x.tag, '')),
    null::gangq.other_arguments)
  from unnest(o.tags) as x(tag);
  s.ids := array(
    select s.base + nextval('gangq.job_ids'::regclass) from generate_series(1, draw_batch.size));
  s.batch_id := s.ids[1];
  if o.at_most is not null then
    s.asked.limit_key := 'batch b' || s.batch_id;
    -- An administrator may have set a limit of this name before.
    insert into gangq.limit_keys as k (name, most, login, batch_id)
    values ((s.asked).limit_key, o.at_most, s.login, s.batch_id)
    on conflict (name) do update set batch_id = excluded.batch_id;
    s.shape := null;
    s.light := false;
  end if;
  return s;
end $$;

-- Internal, for submit. Writes a batch.
create function gangq.add_batch(
  s gangq.submission, o gangq.job_options, size integer, t timestamptz
) returns void language sql as $$
  insert into gangq.batches_table (id, name, tags, shape_id, size, submitter, login, submitted_at)
  values ((s).batch_id, (o).name, array(
      select distinct x.tag from unnest((o).tags) as x(tag) order by x.tag),
    (s).shape, add_batch.size, (s).submitter, (s).login, add_batch.t)
$$;

-- A retry and a tick that ends the batch:
-- 1. A retry inserts its jobs, then locks the batch, shared. Retries wait for each other only if
--    the batch has ended, because one of them sets that back.
-- 2. end_batches locks the batch, and only then, in a later statement, looks for live jobs. So it
--    sees the jobs of a retry that has committed, and skips the batch of one that has not.
-- 3. A retry that had to wait for end_batches finds finished_at set, and sets it back.
--
-- Internal, for retry. These batches have live jobs again.
create function gangq.reopen_batches(ids bigint[]) returns void language plpgsql as $$
begin
  perform from gangq.batches_table b where b.id = any (ids) order by b.id for key share;
  update gangq.batches_table b set finished_at = null, retention = null
  where b.id = any (array(
    select z.id from gangq.batches_table z
    where z.id = any (ids) and z.finished_at is not null order by z.id for no key update));
end $$;

-- Internal, for revive, which waits for nobody. Those of these jobs in history for which
-- reopen_batches need not wait: they have no batch, theirs has not ended, or it is locked here.
create function gangq.reopenable(job_ids bigint[]) returns bigint[] language plpgsql as $$
begin
  return (
    with ended as materialized (
      select h.job_id, h.batch_id
      from gangq.history h join gangq.batches_table b on b.id = h.batch_id
      where h.job_id = any (reopenable.job_ids) and b.finished_at is not null
    ),
    locked as materialized (
      select b.id from gangq.batches_table b
      where b.id in (select e.batch_id from ended e) and b.finished_at is not null
      order by b.id for no key update skip locked
    )
    select array(
      select c.id from unnest(reopenable.job_ids) with ordinality as c(id, n)
      where c.id not in (
        select e.job_id from ended e where e.batch_id not in (select l.id from locked l))
      order by c.n));
end $$;

-- Internal, a step of the tick. Batches of which no job is live any more have ended: who wants
-- batch_done is told. Looks at most at so many open batches. Returns how many have ended. Each call
-- begins at a random batch, so that of more than most open ones all are looked at soon.
create function gangq.end_batches(most integer default 1000) returns integer language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  t timestamptz := gangq.now();
  first bigint;
  ids bigint[];
  b gangq.batches_table;
  n record;
  ended integer := 0;
begin
  first := (
    select min(x.id) + floor(random() * (max(x.id) - min(x.id) + 1))::bigint
    from gangq.batches_table x where x.finished_at is null);
  if first is null then
    return 0;
  end if;
  ids := array(
    select x.id
    from (
      (select z.id from gangq.batches_table z
        where z.finished_at is null and z.id >= first order by z.id limit most)
      union all
      (select z.id from gangq.batches_table z
        where z.finished_at is null and z.id < first order by z.id limit most)
      limit most) x
    where not exists (select from gangq.live_jobs j where j.batch_id = x.id)
    limit 200);
  ids := array(
    select x.id from gangq.batches_table x
    where x.id = any (ids) and x.finished_at is null order by x.id for update skip locked);
  for b in
    select x.* from gangq.batches_table x
    where x.id = any (ids)
      and not exists (select from gangq.live_jobs j where j.batch_id = x.id)
    order by x.id
  loop
    update gangq.batches_table x set finished_at = t, retention = case
      when exists (select from gangq.history_forever h where h.batch_id = b.id) then 'forever'
      -- The attempts, which refer to its shapes, are kept as long.
      when exists (select from gangq.history_long h where h.batch_id = b.id)
        or exists (select from gangq.limit_keys k where k.batch_id = b.id) then 'long'
      else 'short' end
    where x.id = b.id;
    select v.done, v.failed, v.cancelled into n from gangq.batches v where v.id = b.id;
    perform gangq.tell('batch_done', t, null, null, null, null,
      format('%s of %s done, %s failed, %s cancelled', n.done, b.size, n.failed, n.cancelled),
      jsonb_build_object('name', b.name, 'tags', b.tags, 'size', b.size, 'done', n.done,
        'failed', n.failed, 'cancelled', n.cancelled), b.id);
    ended := ended + 1;
  end loop;
  return ended;
end $$;

-- Internal, for forget. Deletes batches whose jobs history has dropped, with their limit keys and
-- shapes. A batch is due when the last of its jobs is past its retention, and its attempts are too,
-- where they refer to shapes of its own. What the default partition has kept longer is looked for.
create function gangq.forget_batches(t timestamptz) returns void
language plpgsql set enable_seqscan = off as $$
declare
  ids bigint[] := array(
    select b.id
    from (values ('short'), ('long')) as c(class)
    cross join gangq.settings s
    cross join lateral (
      select x.id from gangq.batches_table x
      where x.retention = c.class and x.finished_at < t - interval '1 day'
        - case c.class when 'short' then s.retention_short else s.retention_long end
      order by x.finished_at limit 1000 for update skip locked) b
    where not exists (select from gangq.history h where h.batch_id = b.id)
      and not exists (select from gangq.live_jobs j where j.batch_id = b.id));
  keys text[];
begin
  delete from gangq.batches_table b where b.id = any (ids);
  -- Also that of a submission which found that it was a repetition.
  keys := array(
    select k.name from gangq.limit_keys k
    where k.batch_id is not null
      and (k.batch_id = any (ids) or k.made_at < t - interval '1 day' and not exists (
        select from gangq.batches_table b where b.id = k.batch_id)));
  -- A place that is still open is closed by a later tick.
  delete from gangq.shapes s
  where s.limit_key = any (keys)
    and not exists (select from gangq.places p where p.shape_id = s.id);
  delete from gangq.limit_keys k
  where k.name = any (keys)
    and not exists (select from gangq.shapes s where s.limit_key = k.name);
end $$;

-- Batches: what one submission has submitted under a name; id: that of its first job. waiting,
-- running, done, failed, cancelled: how many of its jobs are in each state, each by its latest
-- ending; running: those told to stop, too. What history has dropped is missing there; size: how
-- many were submitted. state: waiting (none has started), running, then failed if a job has failed,
-- cancelled if one was cancelled, else done. at_most: so many of its jobs are placed at once; null:
-- no limit. finished_at: when a tick has found that the last one had ended. Its jobs: gangq.jobs,
-- by batch_id and array_index.
create view gangq.batches as
select b.id, b.name, b.tags, s.queue, s.task,
  case
    when exists (select from gangq.live_jobs j where j.batch_id = b.id) then
      case when exists (
          select from gangq.live_jobs j
          where j.batch_id = b.id and j.state in ('running', 'preempting'))
        or exists (
          select from gangq.history h where h.batch_id = b.id and h.state <> 'cancelled')
      then 'running' else 'waiting' end
    when exists (
      select from gangq.history h
      where h.batch_id = b.id and h.state = 'failed' and not exists (
        select from gangq.retried r where r.job_id = h.job_id and r.finished_at = h.finished_at))
    then 'failed'
    when exists (
      select from gangq.history h
      where h.batch_id = b.id and h.state = 'cancelled' and not exists (
        select from gangq.retried r where r.job_id = h.job_id and r.finished_at = h.finished_at))
    then 'cancelled'
    else 'done' end as state,
  b.size, k.most as at_most, n.waiting, n.running, n.done, n.failed, n.cancelled, b.submitted_at,
  b.finished_at, b.submitter, b.login
from gangq.batches_table b
join gangq.shapes s on s.id = b.shape_id
left join gangq.limit_keys k on k.batch_id = b.id
-- Not computed where it is not asked for, as by who waits for the end of a batch.
left join lateral (
  select count(*) filter (where j.state in ('waiting', 'scheduled', 'pending')) as waiting,
    count(*) filter (where j.state in ('running', 'preempting')) as running,
    count(*) filter (where j.state = 'done') as done,
    count(*) filter (where j.state = 'failed') as failed,
    count(*) filter (where j.state = 'cancelled') as cancelled
  from (
    select l.state from gangq.live_jobs l where l.batch_id = b.id
    union all
    select h.state from gangq.history h
    where h.batch_id = b.id and not exists (
      select from gangq.retried r where r.job_id = h.job_id and r.finished_at = h.finished_at)) j
  ) n on true;

-- Internal, for retry_failed. The batch of this id, those of this name and those with this tag: all
-- that is given must hold. Null: nothing is given. Raises GQ002.
create function gangq.batches_named(batch_id bigint, name text, tag text) returns bigint[]
language plpgsql stable as $$
declare
  ids bigint[];
begin
  if num_nonnulls(batch_id, name, tag) = 0 then
    return null;
  end if;
  ids := array(
    select b.id from gangq.batches_table b
    where b.id = coalesce(batches_named.batch_id, b.id)
      and b.name = coalesce(batches_named.name, b.name)
      and (batches_named.tag is null or batches_named.tag = any (b.tags)));
  if ids = '{}' and batch_id is not null then
    perform gangq.refuse('GQ002', format('batch b%s does not exist', batch_id),
      'Look in gangq.batches; a batch is kept as long as its jobs.');
  end if;
  return ids;
end $$;
