-- Checkpoints: save_checkpoint, load_checkpoint. A restore never mixes steps.
-- Locks: save_checkpoint takes a key-share lock on the job's row, so that a claim cannot end under it unseen.

create function gangq.restore_step(g gangq.live_gangs) returns bigint language sql stable as $$
  select case (g).checkpoint_mode
    when 'rank0' then (
      select max(c.step) from gangq.checkpoints c join gangq.live_jobs j on j.id = c.job_id
      where c.gang_id = (g).id and (j.rank = 0 or gangq.elastic((g).kind_id)))
    else (
      select c.step from gangq.checkpoints c where c.gang_id = (g).id
      group by c.step having count(*) = (g).size order by c.step desc limit 1)
  end
$$;
comment on function gangq.restore_step is
  'Internal. The highest step that every member saved (mode each) or rank 0 saved (mode rank0; of an elastic gang whoever '
  'was rank 0 at the time: nobody else''s bytes are kept); null: none.';

create function gangq.save_checkpoint(job_id bigint, token bigint, step bigint, data bytea, epoch integer default null) returns void
language plpgsql as $$
#variable_conflict use_column
declare
  j gangq.live_jobs;
  g gangq.live_gangs;
  most integer := (select s.checkpoint_bytes from gangq.settings s);
  complete_step bigint;
begin
  if save_checkpoint.step is null or save_checkpoint.step < 0 or save_checkpoint.data is null then
    perform gangq.refuse('GQ001', format('checkpoint of job %s at step %s', save_checkpoint.job_id, coalesce(save_checkpoint.step::text, 'null')),
      'A checkpoint needs a step from 0 and its bytes.');
  end if;
  if octet_length(save_checkpoint.data) > most then
    perform gangq.refuse('GQ007', format('checkpoint of job %s has %s bytes, the limit is %s', save_checkpoint.job_id, octet_length(save_checkpoint.data), most),
      'Save large states to shared storage and checkpoint their address, or raise it: gangq.configure(''{"checkpoint_bytes": ...}'').');
  end if;
  select x.* into j from gangq.live_jobs x where x.id = save_checkpoint.job_id for key share;
  if not found or j.token is distinct from save_checkpoint.token or j.state not in ('running', 'preempting') then
    perform gangq.refuse_stale(save_checkpoint.job_id, save_checkpoint.token);
  end if;
  perform gangq.check_login(j.incarnation);
  if j.gang_id is not null then
    select x.* into g from gangq.live_gangs x where x.id = j.gang_id;
    -- Nor what a member saves that has left the epoch: it could hide the steps of those who go on, and so lose them.
    if g.checkpoint_mode = 'rank0' and (coalesce(j.epoch_rank, j.rank) <> 0 or not gangq.in_epoch(j, g)) then
      return;
    end if;
    -- Computed before it was told that another was replaced: with what that one saves after its restore it would make a
    -- step out of two histories.
    if g.checkpoint_mode = 'each' and save_checkpoint.epoch < g.epoch then
      return;
    end if;
  end if;
  insert into gangq.checkpoints as c (job_id, step, gang_id, token, saved_at, data)
  values (j.id, save_checkpoint.step, j.gang_id, j.token, gangq.now(), save_checkpoint.data)
  on conflict (job_id, step) do update set token = excluded.token, saved_at = excluded.saved_at, data = excluded.data;
  -- What a restore can no longer choose goes: everything older than the newest complete step, except the step this
  -- epoch started from, which a slow member may not have loaded yet.
  if j.gang_id is null then
    delete from gangq.checkpoints c where c.job_id = j.id and c.step < save_checkpoint.step;
  else
    complete_step := gangq.restore_step(g);
    if g.checkpoint_mode = 'each' and (select count(*) from gangq.checkpoints c where c.job_id = j.id and c.step > coalesce(complete_step, -1)) > 64 then
      perform gangq.refuse('GQ004', format('rank %s of gang %s has saved more than 64 steps that other ranks have not', coalesce(j.epoch_rank, j.rank), g.id),
        'In checkpoint mode each a step counts when every rank saved it. If rank 0 saves for all, submit with checkpoint_mode => ''rank0''.');
    end if;
    delete from gangq.checkpoints c
    where c.gang_id = j.gang_id and c.step < complete_step and c.step is distinct from g.restore_step;
  end if;
end $$;
comment on function gangq.save_checkpoint is
  'Saves opaque bytes at a step, while running or told to stop, with the present token. The same step again replaces it. '
  'Older steps are kept until a newer one is complete. In mode rank0 what other ranks save is not kept, nor what a member saves that has left the epoch. '
  'epoch: the one this member knows of; in mode each what is saved from an older one is not kept. Raises GQ001, GQ002, GQ003, GQ004 (other ranks do not save), GQ007, 42501.';

create function gangq.load_checkpoint(job_id bigint, token bigint) returns table (step bigint, data bytea)
language plpgsql stable as $$
#variable_conflict use_column
declare
  j gangq.live_jobs;
  g gangq.live_gangs;
begin
  select x.* into j from gangq.live_jobs x where x.id = load_checkpoint.job_id;
  if not found or j.token is distinct from load_checkpoint.token or j.state not in ('running', 'preempting') then
    perform gangq.refuse_stale(load_checkpoint.job_id, load_checkpoint.token);
  end if;
  perform gangq.check_login(j.incarnation);
  if j.gang_id is null then
    return query select c.step, c.data from gangq.checkpoints c where c.job_id = j.id order by c.step desc limit 1;
  else
    select x.* into g from gangq.live_gangs x where x.id = j.gang_id;
    return query
    select c.step, c.data from gangq.checkpoints c join gangq.live_jobs x on x.id = c.job_id
    where c.gang_id = g.id and c.step = g.restore_step
      and case g.checkpoint_mode when 'rank0' then x.rank = 0 or gangq.elastic(g.kind_id) else x.id = j.id end
    -- Two who were rank 0 one after the other may have saved the same step.
    order by c.saved_at desc limit 1;
  end if;
end $$;
comment on function gangq.load_checkpoint is
  'The checkpoint this attempt starts from: no row when there is none. All members of an epoch get the same step, chosen '
  'when the epoch began. Raises GQ002, GQ003, 42501.';
