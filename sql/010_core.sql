-- What every verb uses: the clock, the caller and the transaction. Takes no locks.
--
-- Comments. The comment right above a function, view or type is its comment in the database: what
-- it does, returns and raises. Above an empty comment line stands what only matters here: why it is
-- done this way. "Internal" is what no role may call.
--
-- Settings of functions. Verbs that run often set plan_cache_mode = force_generic_plan: PL/pgSQL
-- would plan their statements anew at every call, because a custom plan looks cheaper for arrays of
-- unknown length; at one job a call that is more than half of the cost. tests/sql/test_plans.py
-- holds the generic plans to account. Those that find jobs by id or key set enable_seqscan = off,
-- too: a session keeps the plans that it made while the queue was nearly empty. That does not help
-- where two tables are joined without a key that is given: their order is as it was then. A SQL
-- function that cannot be inlined (one with a subquery or several rows) has no plan that is kept:
-- before PostgreSQL 18 each call costs a tenth of a millisecond and more. So what verbs call for
-- each job or gang is PL/pgSQL (tests/sql/test_kept_plans.py), and what their queries inline is
-- SQL; so is what is called seldom. Whatever runs with its owner's rights sets jit = off: such
-- plans look expensive, and a server that can compile queries did so at every call, over a second
-- for a pass.
--
-- Search paths. A function with its owner's rights, and every PL/pgSQL function, runs with
-- search_path = pg_catalog, pg_temp: an empty path would look for types in pg_temp first. A SQL
-- function in quotes is inlined, and its names are looked up where it is used: none of those is
-- granted to a role, unless it sets that path, too. The others that views need have a body without
-- quotes (return ...): its names were looked up when it was created.

-- The database's clock, read once per verb. Tests replace this function as the schema's owner; no
-- setting moves it.
create function gangq.now() returns timestamptz language sql volatile
return pg_catalog.clock_timestamp();

-- `set role` to one of gangq's own roles gives rights and no name: limits and shares per submitter
-- cannot be evaded by it.
--
-- The role on whose behalf a verb runs, also inside security definer functions: the one set by `set
-- role`, and the login itself where none or one of gangq's own is set.
create function gangq.caller() returns text language sql stable
return case
  when current_setting('role') = any ('{none,gangq_viewer,gangq_submitter,gangq_worker,'
    'gangq_host,gangq_notifier,gangq_admin}'::text[])
  then session_user::text else current_setting('role') end;

-- Internal. What events say of who caused them: the login, and "login as role" where it had set
-- another role.
create function gangq.actor() returns text language sql stable
return session_user || coalesce(' as ' || nullif(gangq.caller(), session_user), '');

-- Internal. Whether each statement of this transaction sees what others committed before it.
create function gangq.reads_committed() returns boolean language sql stable
return current_setting('transaction_isolation') in ('read committed', 'read uncommitted');

-- Internal. Delay before the nth repetition: doubles from base_s to max_s, half of it random.
create function gangq.backoff(base_s real, max_s real, nth integer) returns interval
language sql volatile as $$
  select make_interval(secs => (0.5 + random() / 2)
    * least(max_s, base_s * power(2, least(greatest(nth, 1), 30) - 1)))
$$;

-- Internal. From here on this transaction is ended when its client says nothing for 5 s. The tick
-- and a pass lock a row to the end of their transaction. A client that froze in a longer one would
-- stop all maintenance, so the server hangs up on it.
create function gangq.hang_up_soon() returns void language plpgsql as $$
begin
  if current_setting('idle_in_transaction_session_timeout')::interval
    not between interval '1 ms' and interval '5 s'
  then
    perform set_config('idle_in_transaction_session_timeout', '5s', true);
  end if;
end $$;

-- Internal. A moment as JSON has it: seconds since 1970.
create function gangq.seconds(at timestamptz) returns double precision language sql stable
return date_part('epoch', at);
