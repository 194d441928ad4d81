-- The tree of queues, by name: the ancestors of a.b.c are a.b and a.
-- Takes no locks.

create function gangq.queue_path(name text) returns text[] language sql stable as $$
  select array_agg(q.name order by length(q.name) desc) from gangq.queues_table q
  where q.name = queue_path.name or starts_with(queue_path.name, q.name || '.')
$$;
comment on function gangq.queue_path(text) is 'Internal. The queue, then those of its ancestors that exist, the nearest first.';
