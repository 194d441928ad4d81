-- Each distinct requirement that waits makes every claim slower, so a login may add only so many of them within a day.

alter table gangq.settings
  add column new_shapes_per_day integer not null default 1000 check (new_shapes_per_day between 1 and 1000000);
comment on column gangq.settings.new_shapes_per_day is
  'Most distinct requirements that one login may add within 24 hours; admins may add any number.';

alter table gangq.shapes
  add column login text,
  add column added_at timestamptz;
comment on column gangq.shapes.login is
  'The login whose submission added it. Null: a trip or an earlier version did.';
comment on column gangq.shapes.added_at is 'When a submission added it; null as login is.';
create index shapes_added on gangq.shapes (login, added_at) where login is not null;
