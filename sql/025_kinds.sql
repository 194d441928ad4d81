-- What a gang asks for, interned: gangs alike in queue, roles and placement are one kind, and a pass judges kinds.
-- Takes no locks.

-- Shapes are kept for ever, so those with a pending job are found by hopping along the index of claims, not by reading them all.
create view gangq.pending_shapes as
with recursive pending(shape_id) as (
  (select j.shape_id from gangq.live_jobs j where j.state = 'pending' order by j.shape_id limit 1)
  union all
  select (select j.shape_id from gangq.live_jobs j where j.state = 'pending' and j.shape_id > p.shape_id order by j.shape_id limit 1)
  from pending p where p.shape_id is not null
)
select p.shape_id from pending p where p.shape_id is not null;
comment on view gangq.pending_shapes is 'Internal. The shapes that have a pending job.';

-- No unique key, for the reason given at intern_shape.
create function gangq.intern_kind(queue text, roles jsonb, require text, prefer text, apart text) returns integer
language plpgsql as $$
declare
  said text;
  found_id integer;
begin
  said := jsonb_build_object('queue', intern_kind.queue, 'require', intern_kind.require, 'prefer', intern_kind.prefer,
    'apart', intern_kind.apart, 'roles', intern_kind.roles)::text;
  select k.id into found_id from gangq.gang_kinds k where md5(k.spec) = md5(said) and k.spec = said order by k.id limit 1;
  if found_id is null then
    insert into gangq.gang_kinds (queue, require, prefer, apart, spec)
    values (intern_kind.queue, intern_kind.require, intern_kind.prefer, intern_kind.apart, said)
    returning id into found_id;
    insert into gangq.kind_roles (kind_id, ordinal, name, shape_id, min_members, max_members, first_rank, strategy, require, prefer, balanced)
    select found_id, r.n, r.role ->> 'name', (r.role ->> 'shape')::integer, (r.role ->> 'min')::integer, (r.role ->> 'max')::integer,
      coalesce(sum((r.role ->> 'max')::integer) over (order by r.n rows between unbounded preceding and 1 preceding), 0),
      r.role ->> 'strategy', r.role ->> 'require', r.role ->> 'prefer', (r.role ->> 'balanced')::boolean
    from jsonb_array_elements(intern_kind.roles) with ordinality as r(role, n);
  end if;
  return found_id;
end $$;
comment on function gangq.intern_kind is
  'Internal. The kind of a gang whose demand has been validated. roles: [{"name", "shape", "min", "max", "strategy", '
  '"require", "prefer", "balanced"}], in rank order, every key present.';

create function gangq.kind_avoiding(kind_id integer, old_shape integer, new_shape integer) returns integer
language plpgsql as $$
declare
  k gangq.gang_kinds;
begin
  select x.* into k from gangq.gang_kinds x where x.id = kind_avoiding.kind_id;
  return gangq.intern_kind(k.queue, (
      select jsonb_agg(jsonb_build_object('name', r.name, 'shape', case r.shape_id when old_shape then new_shape else r.shape_id end,
        'min', r.min_members, 'max', r.max_members, 'strategy', r.strategy, 'require', r.require, 'prefer', r.prefer,
        'balanced', r.balanced) order by r.ordinal)
      from gangq.kind_roles r where r.kind_id = k.id), k.require, k.prefer, k.apart);
end $$;
comment on function gangq.kind_avoiding is
  'Internal. The kind like this one in which every role of one shape has the other.';

create function gangq.kind_for(kind_id integer, submitter text, login text) returns integer
language plpgsql as $$
declare
  k gangq.gang_kinds;
begin
  select x.* into k from gangq.gang_kinds x where x.id = kind_for.kind_id;
  return gangq.intern_kind(k.queue, (
      select jsonb_agg(jsonb_build_object('name', r.name, 'shape', gangq.shape_for(r.shape_id, kind_for.submitter, kind_for.login),
        'min', r.min_members, 'max', r.max_members, 'strategy', r.strategy, 'require', r.require, 'prefer', r.prefer,
        'balanced', r.balanced) order by r.ordinal)
      from gangq.kind_roles r where r.kind_id = k.id), k.require, k.prefer, k.apart);
end $$;
comment on function gangq.kind_for is
  'Internal. The kind like this one whose shapes are those of this submitter (shape_for, charged to login).';
