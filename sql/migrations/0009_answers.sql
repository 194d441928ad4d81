-- Answers: bounds on what a role may write, so that no value of one login makes a pass of placement or a view fail for all.

-- NaN is more than every number. The sum over a fleet of the largest must still be a number.
update gangq.incarnations set cpus = least(cpus, 9999999), memory_mb = least(memory_mb, 1000000000000)
where not (cpus <= 9999999 and memory_mb <= 1000000000000);
alter table gangq.incarnations add constraint incarnations_offer check (cpus <= 9999999 and memory_mb <= 1000000000000);

-- What sequences give is shifted by a base that grows with every timeline of the server. A table of its own: it is read by every
-- claim and every submission, and changes once a failover.
create table gangq.sequence_base (
  singleton boolean primary key default true check (singleton),
  timeline bigint not null,
  base bigint not null check (base >= 0)
);
insert into gangq.sequence_base (timeline, base)
values (('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint, 0);
comment on table gangq.sequence_base is 'What values of sequences are shifted by, so that none is given twice after a failover that loses the end of the log; one row.';
comment on column gangq.sequence_base.singleton is 'Always true: there is one row.';
comment on column gangq.sequence_base.timeline is 'The server''s timeline that base was computed for.';
comment on column gangq.sequence_base.base is 'The shift on that timeline.';

alter table gangq.tick_state add column interrupted_at timestamptz;
comment on column gangq.tick_state.interrupted_at is 'When the server was last seen restarted or promoted, or its clock set back: every lease gets one full period from here.';
