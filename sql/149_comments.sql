-- Comments whose first words need others. A released migration is never changed, so what it says of
-- a table, a column or a domain is corrected here, after it.
-- Takes no locks.

-- max_trips, in the words of queues_table and live_jobs.
comment on column gangq.task_options.max_trips
  is 'So many trips of a job are sent back; the next one ends it';
comment on column gangq.live_gangs.max_trips
  is 'So many trips are sent back; the next one ends the gang';
comment on column gangq.gang_history.max_trips
  is 'So many trips are sent back; the next one ended the gang';
comment on column gangq.queues.max_trips
  is 'So many trips of a job are sent back; the next one ends it';
comment on column gangq.jobs.max_trips
  is 'So many trips are sent back; the next one ends the job';

-- The hint of the error for a number out of a domain's range: it says the range.
comment on domain gangq.vram_mb is 'MiB needed on each device, 0 to 2147483647.';
comment on domain gangq.count is 'A whole number, 0 to 2147483647; null: no limit.';
comment on domain gangq.bytes is 'A number of bytes, 1 to 2147483647.';
comment on domain gangq.amount is 'A number, 0 to 1e15; leave it out for no limit.';
comment on domain gangq.whole is 'A whole number, 0 to 1e15; leave it out for no limit.';

-- The file has another number now.
comment on table gangq.scaling_table
  is 'How many replicas a service has by its load; a service without a row has as many as were '
    'asked for. Written when what is asked for changes, not with each report. See '
    '132_scaling.sql. Read the view scaling.';
