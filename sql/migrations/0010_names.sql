-- Names of workers and hosts reach command lines of the bouncer, which runs as root: nothing that a shell, a program or
-- a terminal could take for anything but a name.

alter table gangq.incarnations
  drop constraint incarnations_name_check,
  drop constraint incarnations_host_check,
  add constraint incarnations_name_check check (name ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'),
  add constraint incarnations_host_check check (host ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$'),
  add constraint incarnations_address_check check (address ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$');
alter table gangq.device_registry
  add constraint device_registry_host_check check (host ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$');

alter table gangq.incarnations add column worked_at timestamptz;
comment on column gangq.incarnations.worked_at is
  'When it first claimed a job; null: it never has. Only hosts whose workers have worked count for the bouncer''s brake.';
update gangq.incarnations i set worked_at = clock_timestamp()
where i.ended_at is null and exists (select 1 from gangq.live_jobs j where j.incarnation = i.id and j.token is not null);

comment on column gangq.settings.bounces_per_hour is
  'How often a host, and each worker of it, may be restarted in an hour. Restarts of a host within ten minutes are one.';

comment on column gangq.queues_table.max_trips is
  'So many watchdog trips of a job are sent back; the next one ends it. 3: three trips are sent back, the fourth ends the job.';
comment on column gangq.live_jobs.max_trips is
  'So many trips are sent back; the next one ends the job. 3: three trips are sent back, the fourth ends the job.';
