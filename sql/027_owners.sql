-- Rights: admins, owners of jobs, priority ceilings, and the login behind an incarnation. Rights
-- follow the role that is set: `set role gangq_viewer` gives up the others. Names follow
-- gangq.caller() and the login.
-- Takes no locks.

-- Internal. Whether the role that is set, or the login where none is, belongs to this role.
create function gangq.may_act_as(role text) returns boolean language sql stable
return coalesce(pg_has_role(coalesce(nullif(current_setting('role'), 'none'), session_user),
  to_regrole(quote_ident(role))::oid, 'member'), false);

-- Whether the caller is an admin: a member of gangq_admin, the owner of the schema, or a superuser.
create function gangq.is_admin() returns boolean language sql stable
set search_path = pg_catalog, pg_temp as $$
  select gangq.may_act_as('gangq_admin') or gangq.may_act_as((
    select pg_get_userbyid(n.nspowner) from pg_namespace n where n.nspname = 'gangq'))
$$;

-- Internal. The roles that this one belongs to, itself among them; none if it does not exist.
create function gangq.roles_of(role text) returns text[] language sql stable
set search_path = pg_catalog, pg_temp as $$
  select array(
    select r.rolname::text
    from pg_roles me join pg_roles r on pg_has_role(me.oid, r.oid, 'member')
    where me.rolname = roles_of.role)
$$;

-- Internal. The queues in which the caller, as a submitter, may read and change the work of others.
create function gangq.shared_queues() returns text[] language sql stable as $$
  select array(
    select q.name from gangq.queues_table q
    where q.others = 'shared' and gangq.may_act_as('gangq_submitter'))
$$;

-- Internal. Whether the caller may read and change this work: it is an admin, it submitted or
-- stored it, or the queue is shared. A login owns what it submitted. A login may set a role for
-- each of its users: then each role owns what was submitted in it, and the login without a role
-- owns all of it. Returns a set, which is inlined with its subqueries: they are asked once per
-- query, and per row only columns are compared.
create function gangq.owned(submitter text, login text, queue text) returns setof boolean
language sql stable
return (select gangq.is_admin())
  or login = session_user
  and submitter = any ((select gangq.roles_of(gangq.caller()))::text[])
  or queue = any ((select gangq.shared_queues())::text[]);

-- Internal. Who submitted or stored something, for people.
create function gangq.whose(submitter text, login text) returns text language sql immutable
return submitter || coalesce(' (login ' || nullif(login, submitter) || ')', '');

-- Internal. Raises 42501 unless the caller may change this, which is of this submitter.
create function gangq.check_own(
  verb text, what text, submitter text, login text, queue text
) returns void language plpgsql stable as $$
begin
  perform gangq.refuse('42501',
    format('%s may not %s %s, which is of %s', gangq.actor(), verb, what,
      gangq.whose(submitter, login)),
    format('In queue %L only its submitter and members of gangq_admin may do that; nothing was '
      'changed. To allow it to all submitters: gangq.set_queue(%L, ''{"others": "shared"}'').',
      queue, queue))
  from gangq.owned(submitter, login, queue) as o(mine) where o.mine is not true;
end $$;

-- Internal. Raises 42501 unless the caller may change all these jobs and gangs, live or ended.
create function gangq.check_owner(verb text, job_ids bigint[], gang_ids bigint[]) returns void
language plpgsql stable as $$
begin
  if gangq.is_admin() then
    return;
  end if;
  perform gangq.check_own(verb, n.what, n.submitter, n.login, n.queue)
  from (
    select 'job ' || j.id as what, j.submitter, j.login, j.queue
    from gangq.jobs j where j.id = any (check_owner.job_ids)
    union all
    select 'gang g' || g.id, g.submitter, g.login, g.queue
    from gangq.gangs g where g.id = any (check_owner.gang_ids)) n
  cross join lateral gangq.owned(n.submitter, n.login, n.queue) as o(mine)
  where o.mine is not true
  order by n.what limit 1;
end $$;

-- Internal. Raises 42501 if this submitter may not give this priority in this queue: in each queue
-- on its path the highest entry among the submitter's roles counts. Admins are not bound. An entry
-- for a role of the submitter comes first. Without one the entries of the login count: otherwise a
-- login could escape its ceiling by setting a role.
create function gangq.check_ceiling(queue text, priority integer, submitter text, login text)
returns void language plpgsql stable as $$
declare
  over record;
begin
  select q.name, c.most into over
  from gangq.queues_table q
  cross join lateral (
    select coalesce(max(e.value::integer) filter (where e.key = any (r.own)),
      max(e.value::integer)) as most
    from (
      select gangq.roles_of(check_ceiling.submitter) as own,
        gangq.roles_of(check_ceiling.login) as of_login
      offset 0) r
    cross join jsonb_each_text(q.ceilings) e
    where e.key = any (r.own || r.of_login) and 'gangq_admin' <> all (r.own)) c
  where q.ceilings <> '{}' and q.name = any (gangq.queue_path(check_ceiling.queue))
    and c.most < check_ceiling.priority
  order by c.most, length(q.name) desc limit 1;
  if found then
    perform gangq.refuse('42501',
      format('priority %s is above %s, the ceiling of %s in queue %L', priority, over.most,
        submitter, over.name),
      format('Submit with %s or less, or ask a member of gangq_admin to raise it: '
        'gangq.set_queue(%L, ''{"ceilings": ...}'').', over.most, over.name));
  end if;
end $$;

-- Internal. Whether this session may report for a worker that another login registered: members of
-- that login (an application that completes a job in its own transaction), and admins.
create function gangq.may_report_too(login text) returns boolean language sql stable
set search_path = pg_catalog, pg_temp as $$
  select gangq.is_admin()
    or coalesce(pg_has_role(session_user, to_regrole(quote_ident(login))::oid, 'member'), false)
$$;

-- Internal. Whether this session may report for a worker that this login registered. The comparison
-- runs on the hot path. The function, which is never inlined because it has a setting, is called
-- only when the logins differ.
create function gangq.may_report(login text) returns boolean language sql stable
return login = session_user or gangq.may_report_too(login);

-- Internal. Raises 42501 unless this session may report for this incarnation. host: the bouncer of
-- its host may, too.
create function gangq.check_login(incarnation bigint, host boolean default false) returns void
language plpgsql stable as $$
declare
  i record;
begin
  select x.id, x.name, x.login into i
  from gangq.incarnations x
  where x.id = check_login.incarnation and not gangq.may_report(x.login);
  if found and not (check_login.host and gangq.may_act_as('gangq_host')) then
    perform gangq.refuse('42501',
      format('worker %L (incarnation %s) was registered by login %s, and this is %s',
        i.name, i.id, i.login, gangq.actor()),
      format('Only %s, logins that are members of it, and gangq_admin report for this worker and '
        'for the jobs it holds; the bouncer''s login needs gangq_host. A token gives no rights.',
        i.login));
  end if;
end $$;
