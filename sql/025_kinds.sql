-- A kind is what a gang asks for, stored once: gangs with the same queue, roles and placement have
-- the same kind, and a pass judges kinds instead of gangs. And which members are in an epoch of a
-- gang, which of an elastic kind need not be all of them.
-- Takes no locks.

-- Internal. The shapes that have a pending job. Shapes and kinds are never deleted. These two views
-- find those of which something waits by skipping from one to the next in an index, instead of
-- reading all of them. They are two because the end of a placed job asks only for the first: one
-- view of both would have it read the gangs.
create view gangq.pending_shapes as
with recursive pending(shape_id) as (
  (select j.shape_id from gangq.live_jobs j where j.state = 'pending' order by j.shape_id limit 1)
  union all
  select x.shape_id
  from pending p
  cross join lateral (
    select j.shape_id from gangq.live_jobs j
    where j.state = 'pending' and j.shape_id > p.shape_id
    order by j.shape_id limit 1) x
)
select p.shape_id from pending p;

-- Internal. The kinds that have a blocked gang, and when the first of these times out.
create view gangq.blocked_kinds as
with recursive blocked(kind_id, timeout_at) as (
  (select g.kind_id, g.timeout_at from gangq.live_gangs g
  where g.state = 'blocked' order by g.kind_id, g.timeout_at limit 1)
  union all
  select x.kind_id, x.timeout_at
  from blocked b
  cross join lateral (
    select g.kind_id, g.timeout_at from gangq.live_gangs g
    where g.state = 'blocked' and g.kind_id > b.kind_id
    order by g.kind_id, g.timeout_at limit 1) x
)
select b.kind_id, b.timeout_at from blocked b;

-- Internal. The kind of a gang whose demand has been validated. roles: [{"name", "shape", "min",
-- "max", "strategy", "require", "prefer", "balanced"}], in rank order, every key present. There is
-- no unique key, for the reason given at keep_shape.
create function gangq.intern_kind(
  queue text, roles jsonb, require text, prefer text, apart text
) returns integer language plpgsql as $$
declare
  demand text := jsonb_build_object('queue', queue, 'require', require, 'prefer', prefer,
    'apart', apart, 'roles', roles)::text;
  found_id integer;
begin
  select k.id into found_id
  from gangq.gang_kinds k
  where md5(k.spec) = md5(demand) and k.spec = demand
  order by k.id limit 1;
  if found then
    return found_id;
  end if;
  insert into gangq.gang_kinds as k (queue, require, prefer, apart, spec)
  values (queue, require, prefer, apart, demand)
  returning k.id into found_id;
  insert into gangq.kind_roles (kind_id, ordinal, name, shape_id, min_members, max_members,
    first_rank, strategy, require, prefer, balanced)
  select found_id, r.n, r.name, r.shape, r.min, r.max, sum(r.max) over (order by r.n) - r.max,
    r.strategy, r.require, r.prefer, r.balanced
  from rows from (jsonb_to_recordset(roles) as (name text, shape integer, min integer, max integer,
    strategy text, require text, prefer text, balanced boolean))
    with ordinality as r(name, shape, min, max, strategy, require, prefer, balanced, n);
  return found_id;
end $$;

-- Internal. The kind like this one whose roles, in their order, have these shapes.
create function gangq.kind_of_shapes(kind_id integer, shapes integer[]) returns integer
language sql as $$
  select gangq.intern_kind(k.queue, jsonb_agg(jsonb_build_object('name', r.name,
      'shape', kind_of_shapes.shapes[r.ordinal], 'min', r.min_members, 'max', r.max_members,
      'strategy', r.strategy, 'require', r.require, 'prefer', r.prefer, 'balanced', r.balanced)
      order by r.ordinal), k.require, k.prefer, k.apart)
  from gangq.gang_kinds k
  join gangq.kind_roles r on r.kind_id = k.id
  where k.id = kind_of_shapes.kind_id
  group by k.id
$$;

-- Internal. Whether such gangs may run with fewer members. A gang whose roles all have one size has
-- all its members in every epoch. Of an elastic one those with an epoch_rank are in it; the others
-- stay blocked, or are being stopped because they have just left it.
create function gangq.elastic(kind_id integer) returns boolean
language plpgsql stable set enable_seqscan = off as $$
begin
  return exists (
    select 1 from gangq.kind_roles r
    where r.kind_id = elastic.kind_id and r.min_members < r.max_members);
end $$;

-- Internal. Whether a member of a placed gang is part of its present epoch.
create function gangq.in_epoch(j gangq.live_jobs, g gangq.live_gangs) returns boolean
language sql immutable
return j.epoch_rank is not null or g.world_size = g.size;

-- Internal. The rank that a member has in its epoch, or would have if all members ran.
create function gangq.rank_of(j gangq.live_jobs) returns integer language sql immutable
return coalesce(j.epoch_rank, j.rank);
