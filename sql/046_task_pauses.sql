-- Pauses of tasks: of a task that is paused nothing new starts, whatever its queue.
-- Locks: pause_task and resume_task the row of the task in task_pauses; end_pauses, a step of the
-- tick, queue rows by name, then those of tasks, with skip locked. A claim or pass only reads them.

-- From now on nothing of a task starts, until then (null: until resume_task); what runs goes on. A
-- gang waits if the task of one of its members is paused. Repeated, it says anew until when and
-- why. For gangq_admin. Raises GQ001.
create function gangq.pause_task(
  task text, until timestamptz default null, reason text default null
) returns void language plpgsql as $$
declare
  t timestamptz := gangq.now();
begin
  perform gangq.read_options('pause_task',
    jsonb_build_object('task', coalesce(pause_task.task, '')), null::gangq.other_arguments);
  perform gangq.refuse_larger('the reason', octet_length(reason), 4000);
  perform gangq.check_moment('until', until);
  if until <= t then
    perform gangq.refuse('GQ001', format('until is %s, which has passed', until),
      'Leave it out to pause without an end; gangq.resume_task ends a pause now.');
  end if;
  insert into gangq.task_pauses as p (task, since, until, reason, operator)
  values (pause_task.task, t, pause_task.until, nullif(pause_task.reason, ''), gangq.caller())
  on conflict on constraint task_pauses_pkey do update
  set until = excluded.until, reason = excluded.reason, operator = excluded.operator;
  perform gangq.wake_tick(true);  -- Which has to know when to come again.
end $$;

-- Ends the pause of a task. Can be repeated. For gangq_admin.
create function gangq.resume_task(task text) returns void language plpgsql as $$
begin
  delete from gangq.task_pauses p where p.task = resume_task.task;
  if found then
    perform gangq.wake_tasks(array[resume_task.task]);
  end if;
end $$;

-- Internal. Wakes who may start what waits of these tasks.
create function gangq.wake_tasks(tasks text[]) returns void language sql as $$
  select gangq.wake_below(array(
    select distinct s.queue
    from gangq.pending_shapes p join gangq.shapes s on s.id = p.shape_id
    where s.task = any (tasks)))
$$;

-- Internal. A task of a kind of gang, or of a shape (negative), that is paused; null: none.
create function gangq.paused_task(kind integer) returns text
language plpgsql stable set enable_seqscan = off as $$
begin
  return (
    select min(p.task)
    from gangq.task_pauses p
    where p.task in (
      select s.task from gangq.shapes s where s.id = -kind
      union all
      select s.task
      from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id where r.kind_id = kind));
end $$;

-- Internal. Until when, by whom and why a task is paused; null: it is not.
create function gangq.pause_in_words(task text) returns text language sql stable as $$
  select format('task %s is paused%s by %s%s', p.task, ' until ' || p.until, p.operator,
    ': ' || p.reason)
  from gangq.task_pauses p where p.task = pause_in_words.task
$$;

-- Internal, a step of the tick. Opens the queues and tasks whose pause is over. Returns how many.
create function gangq.end_pauses() returns integer language plpgsql as $$
declare
  opened text[] := array(
    select q.name from gangq.queues_table q
    where q.paused_until <= gangq.now() order by q.name for no key update skip locked);
  tasks text[] := array(
    select p.task from gangq.task_pauses p
    where p.until <= gangq.now() order by p.task for update skip locked);
begin
  if opened <> '{}' then
    update gangq.queues_table q set paused = false, paused_until = null
    where q.name = any (opened);
    perform gangq.wake_below(opened);
  end if;
  if tasks <> '{}' then
    delete from gangq.task_pauses p where p.task = any (tasks);
    perform gangq.wake_tasks(tasks);
  end if;
  return cardinality(opened) + cardinality(tasks);
end $$;
