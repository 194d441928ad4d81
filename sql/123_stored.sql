-- What schedules (125) and services (129) have in common: work that is stored, and submitted by a
-- tick with the rights of who stored it. Who may change it, and what may be stored.
-- Takes no locks.

-- Internal. Whether who stored a schedule or service could submit its work now.
create function gangq.may_submit(submitter text, login text) returns boolean
language sql stable as $$
  select submitter = any (gangq.roles_of(login)) and gangq.roles_of(submitter) && array[
    'gangq_submitter', 'gangq_admin', (
      select pg_get_userbyid(n.nspowner)::text from pg_namespace n where n.nspname = 'gangq')]
$$;

-- Internal. Raises 42501 unless who stored this schedule or service could submit its work now.
create function gangq.check_may_submit(what text, submitter text, login text) returns void
language sql as $$
  select gangq.refuse('42501',
    format('%s may not submit any more', gangq.whose(submitter, login)),
    format('Grant gangq_submitter again, or have gangq_admin store the %s: gangq.set_%1$s.', what))
  where not gangq.may_submit(submitter, login)
$$;

-- Internal. Raises GQ007 if this login, unless it is an admin, has as many schedules or services as
-- it may.
create function gangq.check_new(what text) returns void language sql as $$
  select gangq.refuse('GQ007',
    format('%s has %s %ss, which is the most', session_user, n.has, what),
    'Each of them is work for every tick. Remove those that are not needed.')
  from (
    select count(*) as has, 1000 as most from gangq.schedules_table s
    where what = 'schedule' and s.login = session_user
    union all
    select count(*), 200 from gangq.services_table s
    where what = 'service' and s.login = session_user) n
  where n.has >= n.most and not gangq.is_admin()
$$;

-- Internal. Raises GQ001, GQ007 for what no program can say of the schedules or services it
-- declares.
create function gangq.check_declared(what text, source text, names text[]) returns void
language sql as $$
  select gangq.read_options('declare_' || what || 's',
    jsonb_build_object('source', coalesce(source, '')), null::gangq.other_arguments);
  select gangq.refuse('GQ001', 'names is null',
    format('Pass the names of all %ss that the program declares; an empty array: none.', what))
  where names is null;
  select gangq.refuse_larger(format('the names of %ss', what), pg_column_size(names),
    gangq.most_said());
$$;

-- Internal. What a schedule or service submits besides task and payload: the arguments, and the
-- options of submit, or of submit_gang where it has a size or roles. Raises GQ001.
create function gangq.read_work(
  work jsonb, what text default 'schedule', out a gangq.arguments, out options jsonb,
  out of_gang boolean
) language plpgsql stable as $$
declare
  own constant text[] := '{queue,size,priority,gpus}';
begin
  perform gangq.refuse('GQ001', format('work is %s', left(coalesce(work::text, 'null'), 200)),
    'It is one JSON object: {"queue": "gpu", "gpus": 1, "priority": 5}.')
  where jsonb_typeof(work) is distinct from 'object';
  of_gang := coalesce(nullif(work -> 'size', 'null'), nullif(work -> 'roles', 'null')) is not null;
  a := gangq.read_options('set_' || what, (
    select coalesce(jsonb_object_agg(e.key, e.value), '{}') from jsonb_each(work) e
    where e.key = any (own)), a);
  options := work - own;
  perform gangq.refuse('GQ001', format('a %s submits without %s', what, e.key),
    case e.key when 'at_most' then 'Pass limit_key and limit: they hold for all its jobs.'
      else 'Leave it out.' end)
  from jsonb_object_keys(options) as e(key)
  where e.key = any (
    '{after,after_any,after_failed,at_most,due_at,indexes,parent,parent_token,request_id,wake}');
  if of_gang then
    perform gangq.read_options('submit_gang', options, null::gangq.gang_options);
  else
    perform gangq.read_options('submit', options, null::gangq.job_options);
  end if;
end $$;

-- Internal. Raises GQ002, GQ007 for what a schedule or service cannot submit.
create function gangq.check_stored(what text, payload jsonb, work jsonb) returns void
language sql as $$
  select gangq.refuse_larger('the payload of a ' || what, pg_column_size(payload), 1048576),
    gangq.refuse_larger('the work of a ' || what, pg_column_size(work), gangq.most_said());
  select gangq.queue_named(work ->> 'queue') where work ->> 'queue' is not null;
$$;
