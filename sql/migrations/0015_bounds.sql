-- How much an attempt has printed is known without adding up its chunks.

alter table gangq.logs add column upto bigint;
comment on column gangq.logs.upto is
  'What the attempt had printed when this chunk came, with it: bytes, and 64 for each chunk. Null: an earlier version stored it.';

-- A submission finds its requirement by a digest of all of it. By queue, task and numbers alone it read every shape that is alike in
-- those and differs in labels, model, selector or submitter, and shapes are kept for ever.
alter table gangq.shapes add column digest bigint;
comment on column gangq.shapes.digest is 'Of everything it asks for: see shape_digest.';
update gangq.shapes set digest = jsonb_hash_extended(
  jsonb_build_array(queue, task, gpus, vram_mb, memory_mb, cpus, labels, model, selector, tolerates, avoid, submitter), 0);
create index shapes_digest on gangq.shapes (digest);
drop index gangq.shapes_requirement;
