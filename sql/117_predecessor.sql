-- What a worker has to know before it registers: what became of the last one of its name.
-- Reads only.

create function gangq.predecessor(worker text)
returns table (incarnation bigint, state text, host text, boot_id text, pid bigint, identity jsonb,
  ended_at timestamptz,
  quarantined text, reboot_needed boolean, exits_at timestamptz, exit_code integer, devices text[])
language sql stable as $$
  select i.id, i.state, i.host, i.boot_id, i.pid,
    case when gangq.may_report(i.login) or gangq.may_act_as('gangq_host') then i.identity
      else '{}' end, i.ended_at, i.quarantined, i.reboot_needed, i.exits_at, i.exit_code::integer,
    array(
      select r.uuid from gangq.device_claimants c join gangq.device_registry r on r.id = c.device_id
      where c.incarnation = i.id and r.source <> 'declared' order by r.index, r.id)
  from gangq.incarnations i where i.name = predecessor.worker order by i.id desc limit 1
$$;
comment on function gangq.predecessor is
  'The latest incarnation of this name, ended or not, with the devices it saw that a driver '
  'vouches for: a worker that starts compares them with what it sees itself, and does not start '
  'beside what nothing could kill. identity is empty where another login registered it.';
