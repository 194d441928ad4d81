-- Checkpoints: save_checkpoint, load_checkpoint. All members of a gang restore the same step.
-- Locks: save_checkpoint takes a key-share lock on the job's row, so that the claim cannot end
-- unseen while it saves.

-- Internal. The highest step saved by every member (mode each) or by rank 0 (mode rank0; of an
-- elastic gang by the member that was rank 0 then). Null: none.
create function gangq.restore_step(g gangq.live_gangs) returns bigint
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return case g.checkpoint_mode
    when 'rank0' then (
      select max(c.step) from gangq.checkpoints c join gangq.live_jobs j on j.id = c.job_id
      where c.gang_id = g.id and (j.rank = 0 or gangq.elastic(g.kind_id)))
    when 'each' then (
      select c.step from gangq.checkpoints c
      where c.gang_id = g.id
      group by c.step having count(*) = g.size
      order by c.step desc limit 1)
  end;
end $$;

-- Internal. The job of a claim that holds. Raises GQ002, GQ003, 42501.
create function gangq.own_claim(job_id bigint, token bigint) returns gangq.live_jobs
language plpgsql stable as $$
declare
  j gangq.live_jobs;
begin
  select x.* into j from gangq.live_jobs x where x.id = own_claim.job_id;
  if (j.token = own_claim.token) is not true then
    perform gangq.refuse_stale(job_id, token);
  end if;
  perform gangq.check_login(j.incarnation);
  return j;
end $$;

-- 1. rank0: from another rank, or from a member that has left the epoch. Its step could hide the
--    steps of the members that go on.
-- 2. each: from an older epoch. Combined with what the replaced member saves after its restore, it
--    would complete a step out of two histories.
-- 3. each: of a step that a member which is done has not saved, because that step is never
--    complete.
--
-- Internal, for save_checkpoint. Whether no epoch of its gang may start from this step of a member:
-- then it is dropped without an error. epoch: the one the member knows. Null for a single job.
create function gangq.never_restored(
  j gangq.live_jobs, g gangq.live_gangs, step bigint, epoch integer
) returns boolean language plpgsql stable as $$
begin
  return case g.checkpoint_mode
    when 'rank0' then gangq.rank_of(j) <> 0 or not gangq.in_epoch(j, g)
    when 'each' then never_restored.epoch < g.epoch or exists (
      select from gangq.live_jobs x
      where x.gang_id = g.id and x.state = 'done' and not exists (
        select from gangq.checkpoints c
        where c.job_id = x.id and c.step = never_restored.step))
  end;
end $$;

-- Saves opaque bytes at a step for the claim of this token, while it runs or is told to stop. The
-- same step again replaces it. Older steps are kept until a newer one is complete. Mode rank0 keeps
-- only what rank 0 saves while it belongs to the epoch. epoch: the one the member knows; mode each
-- keeps nothing from an older epoch, and no step that a member which is done has not saved. Raises
-- GQ001, GQ002, GQ003, GQ004 (other ranks do not save), GQ007, 42501.
create function gangq.save_checkpoint(
  job_id bigint, token bigint, step bigint, data bytea, epoch integer default null
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  j gangq.live_jobs;
  g gangq.live_gangs;
  most integer := (select s.checkpoint_bytes from gangq.settings s);
  complete_step bigint;
begin
  if (save_checkpoint.step >= 0) is not true or save_checkpoint.data is null then
    perform gangq.refuse('GQ001', format('checkpoint of job %s at step %s', save_checkpoint.job_id,
        coalesce(save_checkpoint.step::text, 'null')),
      'A checkpoint needs a step from 0 and its bytes.');
  end if;
  if octet_length(save_checkpoint.data) > most then
    perform gangq.refuse('GQ007', format('checkpoint of job %s has %s bytes, the limit is %s',
        save_checkpoint.job_id, octet_length(save_checkpoint.data), most),
      'Save large states to shared storage and checkpoint their address, or raise the limit: '
      'gangq.configure(''{"checkpoint_bytes": ...}'').');
  end if;
  perform from gangq.live_jobs x where x.id = save_checkpoint.job_id for key share;
  j := gangq.own_claim(save_checkpoint.job_id, save_checkpoint.token);
  if j.gang_id is not null then
    select x.* into g from gangq.live_gangs x where x.id = j.gang_id;
  end if;
  if gangq.never_restored(j, g, save_checkpoint.step, save_checkpoint.epoch) then
    return;
  end if;
  insert into gangq.checkpoints (job_id, step, gang_id, saved_at, data)
  values (j.id, save_checkpoint.step, j.gang_id, gangq.now(), save_checkpoint.data)
  on conflict on constraint checkpoints_pkey do update
  set saved_at = excluded.saved_at, data = excluded.data;
  if j.gang_id is null then
    delete from gangq.checkpoints c where c.job_id = j.id and c.step < save_checkpoint.step;
    return;
  end if;
  complete_step := gangq.restore_step(g);
  -- Each may be as large as settings.checkpoint_bytes: ranks that never save the same step must not
  -- fill the disk.
  if g.checkpoint_mode = 'each' and 64 < (
    select count(*) from gangq.checkpoints c
    where c.job_id = j.id and c.step > coalesce(complete_step, -1))
  then
    perform gangq.refuse('GQ004',
      format('rank %s of gang g%s has saved more than 64 steps that other ranks have not',
        gangq.rank_of(j), g.id),
      'In checkpoint mode each a step counts when every rank saved it. If rank 0 saves for all, '
      'submit with checkpoint_mode => ''rank0''.');
  end if;
  -- A restore cannot choose a step older than the newest complete one. The step that this epoch
  -- started from is kept: a slow member may not have loaded it yet.
  delete from gangq.checkpoints c
  where c.gang_id = g.id and c.step < complete_step and c.step is distinct from g.restore_step;
end $$;

-- The checkpoint that this attempt starts from; no row: there is none. All members of an epoch get
-- the same step, which was chosen when the epoch began. Raises GQ002, GQ003, 42501.
create function gangq.load_checkpoint(job_id bigint, token bigint)
returns table (step bigint, data bytea) language plpgsql stable as $$
declare
  j gangq.live_jobs := gangq.own_claim(load_checkpoint.job_id, load_checkpoint.token);
  g gangq.live_gangs;
begin
  if j.gang_id is null then
    return query
    select c.step, c.data from gangq.checkpoints c where c.job_id = j.id
    order by c.step desc limit 1;
    return;
  end if;
  select x.* into g from gangq.live_gangs x where x.id = j.gang_id;
  return query
  select c.step, c.data from gangq.checkpoints c join gangq.live_jobs x on x.id = c.job_id
  where c.gang_id = g.id and c.step = g.restore_step
    and case g.checkpoint_mode
      when 'rank0' then x.rank = 0 or gangq.elastic(g.kind_id)
      when 'each' then x.id = j.id end
  -- Two members that were rank 0 one after the other may have saved the same step.
  order by c.saved_at desc limit 1;
end $$;
