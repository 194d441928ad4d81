-- Shapes: what jobs of one kind need, kept once. A queue with shares or limits per submitter gives
-- each submitter a copy of its own, so that a pass sees the first job of each.
-- Takes no locks but part_submitters, a step of the tick: pending jobs, with skip locked.

-- Internal. Raises GQ007 if this login, unless it is an admin, has added
-- settings.new_shapes_per_day shapes within a day. for_submitter: counts the copies that shape_for
-- makes, else all others. A claim looks at every shape that waits, so the claims of all workers
-- take longer with each. The number is asked only when a shape is new, and without a lock:
-- submissions at the same time do not see each other's new shapes.
create function gangq.check_new_shape(login text, for_submitter boolean) returns void
language plpgsql as $$
declare
  most integer := (select s.new_shapes_per_day from gangq.settings s);
begin
  if exists (
      select 1 from gangq.shapes s
      where s.login = check_new_shape.login and s.added_at > gangq.now() - interval '1 day'
        and (s.submitter is not null) = check_new_shape.for_submitter
      offset most - 1)
    and not gangq.roles_of(login) && array['gangq_admin', (
      select pg_get_userbyid(n.nspowner)::text from pg_namespace n where n.nspname = 'gangq')]
  then
    perform gangq.refuse('GQ007',
      format('%s has submitted %s new combinations of queue, task, devices, memory, CPUs, labels, '
        'selector and model within a day, which is the most', login, most),
      'Each new combination makes every claim slower. Use fewer different labels and selectors, '
      'and round memory_mb and cpus up; what tells single jobs apart belongs in their payload. An '
      'admin can raise the limit: gangq.configure(''{"new_shapes_per_day": ...}'').');
  end if;
end $$;

-- Internal. What shapes.digest is: equal for equal requirements and for no others. The whole
-- requirement in one value: shapes are kept for ever, and by any part of it a submission would read
-- all that are alike in that.
create function gangq.shape_digest(s gangq.shapes) returns bytea language sql stable as $$
  select sha256(convert_to(jsonb_build_array((s).queue, (s).task, (s).gpus, (s).vram_mb,
    (s).memory_mb, (s).cpus, (s).labels, (s).model, (s).selector, (s).tolerates, (s).avoid,
    (s).submitter, (s).limit_key)::text, 'UTF8'))
$$;

-- Internal. The number of a checked shape, which is added if it is new and then charged to login
-- (GQ007); null: to nobody. No unique key on shapes: a caller's transaction that holds a new shape
-- uncommitted must not make other submitters wait for it.
create function gangq.keep_shape(s gangq.shapes, login text) returns integer language plpgsql as $$
declare
  found_id integer;
begin
  s.digest := gangq.shape_digest(s);
  select x.id into found_id from gangq.shapes x where x.digest = s.digest order by x.id limit 1;
  if found then
    return found_id;
  end if;
  if keep_shape.login is not null then
    perform gangq.check_new_shape(keep_shape.login, s.submitter is not null);
  end if;
  insert into gangq.shapes (queue, task, gpus, vram_mb, memory_mb, cpus, labels, model, selector,
    tolerates, limit_key, selects, avoid, submitter, digest, login, added_at)
  values (s.queue, s.task, s.gpus, s.vram_mb, s.memory_mb, s.cpus, s.labels, s.model, s.selector,
    s.tolerates, s.limit_key, s.selects, s.avoid, s.submitter, s.digest, keep_shape.login,
    case when keep_shape.login is not null then gangq.now() end)
  returning id into found_id;
  return found_id;
end $$;

-- Internal. The shape like this one with these devices to avoid and this submitter, charged to
-- login (keep_shape).
create function gangq.shape_like(
  shape_id integer, avoid bigint[], submitter text, login text
) returns integer language plpgsql as $$
declare
  s gangq.shapes;
begin
  select x.* into s from gangq.shapes x where x.id = shape_like.shape_id;
  s.avoid := shape_like.avoid;
  s.submitter := shape_like.submitter;
  return gangq.keep_shape(s, shape_like.login);
end $$;

-- Internal. Whether a limit or a fair order tells the submitters of a queue apart. Then each has
-- shapes of its own, and a claim need not read past the jobs of those that are at their limit.
create function gangq.tells_apart(queue text) returns boolean language plpgsql stable as $$
begin
  return exists (
    select 1 from gangq.queues_table q
    where gangq.below(tells_apart.queue, array[q.name])
      and (q.policy = 'fair' or q.limited and q.submitter_maximum <> '{}'));
end $$;

-- Internal. The shape of work of this submitter: a copy of its own where its queue tells submitters
-- apart, else the shape itself. A new copy is charged to login (GQ007).
create function gangq.shape_for(shape_id integer, submitter text, login text) returns integer
language plpgsql as $$
begin
  return (
    select case when gangq.tells_apart(s.queue)
      then gangq.shape_like(s.id, s.avoid, shape_for.submitter, shape_for.login) else s.id end
    from gangq.shapes s where s.id = shape_id);
end $$;

-- Internal. Gives single jobs that wait a shape of their submitter's own, where their queue tells
-- submitters apart by now. Returns how many. Jobs submitted before the queue separated submitters
-- share one shape. A pass sees only its first job, so a submitter at its limit would block the
-- others.
create function gangq.part_submitters(most integer default 200) returns integer
language plpgsql as $$
declare
  n integer;
begin
  with mixed as materialized (
    select s.id
    from gangq.pending_shapes p join gangq.shapes s on s.id = p.shape_id
    where s.submitter is null and gangq.tells_apart(s.queue)
  ),
  waiting as materialized (
    select j.id
    from mixed m
    cross join lateral (
      select x.id from gangq.live_jobs x
      where x.shape_id = m.id and x.state = 'pending'
      order by x.order_key limit most for update skip locked) j
    limit most
  )
  update gangq.live_jobs j set shape_id = gangq.shape_for(j.shape_id, j.submitter, null)
  from waiting w where j.id = w.id;
  get diagnostics n = row_count;
  return n;
end $$;
