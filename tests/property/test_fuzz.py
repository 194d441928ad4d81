"""Every function that a role may call, with values that nobody should pass, in every argument.

Around a valid call one argument after the other is replaced (and pairs of them at random, from a fixed seed). Only
the documented SQLSTATEs may come back, and whatever was accepted must leave the queue working: no violation, no
failed step of a tick, and every view readable by psycopg, which knows no year 10,000.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from databases import Connection as Db
from databases import Kept, connect
from gangq.embedded import Server
from soaking import SOAK

Arguments = dict[str, Any]

DOCUMENTED = {"55P03", "40P01", "40001", "42501"}
LONG = "x" * 30000
LONGEST_MESSAGE = 5000
"""In characters: what is refused goes into the server's log."""
ODD_TEXTS = ["", " ", LONG, "a\nb\tc\x1b[31m", "'\";--%s{}[]\\", "é€😀", "-rf"]
DEEP = "[" * 300 + "]" * 300
ODD_JSON = [
    "null", "[]", "{}", '"x"', "0", "-1", "1e308", "true", "[null]", "[[]]", "[[[{}]]]", '{"a": null}', "[1, 2]",
    '["a"]', "[{}]", DEEP, f'{{"a": "{LONG}"}}', f'"{LONG}"', '{"step": 1e400, "phase": 7, "total": "x"}',
    '{"type": {}, "message": [], "traceback": 1e308, "log_tail": null, "code": "9999999999999", "rank": -1}',
    '[{"name": null, "count": 1e308}]', '[{"uuid": null, "index": -1, "vram_mb": -1}]',
    '[{"uuid": "", "index": 1e308}]', '[{"key": "a", "op": "<", "values": ["x"]}]', '[{"key": null, "op": null}]',
    '{"gpus": 1e308}', '{"gpus": -1, "jobs": "NaN"}', '[{"uuid": "F0", "index": "NaN", "vram_mb": 1.5}]',
    '[{"change": null}]', '[{"do": "submit", "size": 1e308}]',
]  # fmt: skip
ODD: dict[str, list[str]] = {
    "integer": ["0", "-1", "1", "32768", "2147483647", "-2147483648"],
    "smallint": ["0", "-1", "1", "32767", "-32768"],
    "bigint": ["0", "-1", "2147483648", "9223372036854775807", "-9223372036854775808"],
    "real": ["NaN", "Infinity", "-Infinity", "0", "-1", "3e38", "1e-40", "1e9"],
    "numeric": ["NaN", "Infinity", "-Infinity", "0", "-1", "1e308", "1e-308", "9999999.9999"],
    "text": ODD_TEXTS,
    "jsonb": ODD_JSON,
    "timestamp with time zone": [
        "infinity", "-infinity", "20000-01-01", "10000-01-01", "9999-12-31 23:59:59+00", "290000-01-01",
        "4000-01-01 BC", "0001-01-01 00:00:00+00", "1970-01-01",
    ],
    "interval": ["0", "-1 day", "1 microsecond", "100000000 years", "178000000 years", "5000 years"],
    "boolean": ["true", "false"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"],
    "bytea": ["", "\\x" + "00" * 30000],
}  # fmt: skip


def odd_values(type_name: str) -> list[str | None]:
    """What nobody should pass as this type, as literals."""
    if type_name.startswith("gangq."):
        return [None]
    if not type_name.endswith("[]"):
        return [None, *ODD[type_name]]
    one = ODD[type_name[:-2]]
    quoted = ['"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in one]
    valid = quoted[:1] if type_name != "integer[]" else ["5000"]
    arrays = [
        "{}",
        "{NULL}",
        f"{{{valid[0]},NULL}}",
        f"{{{{{valid[0]},{valid[0]}}},{{{valid[0]},{valid[0]}}}}}",
    ]
    arrays += [f"{{{v}}}" for v in quoted] + [
        "{" + ",".join(valid * 1000) + "}",
        "{" + ",".join(quoted) + "}",
    ]
    return [None, *arrays]


class World:
    """A small fleet, and for each function a call that succeeds in it."""

    def __init__(self, db: Db) -> None:
        self.db = db
        self.calls = 0
        self.problems: list[str] = []
        # Its workers never say that they live, however slow this machine is.
        db.execute('select gangq.configure(\'{"candidate_silence_s": 86400, "lease_s": 86400}\')')
        self.saved = {
            table: db.execute(f"select * from gangq.{table}").fetchall()
            for table in ("settings", "queues_table", "task_settings")
        }
        self.signatures: dict[str, dict[str, str]] = {}
        for row in db.execute(
            "select p.proname, a.name, format_type(a.type, null) as type "
            "from pg_proc p left join lateral "
            "unnest(p.proargnames[1:p.pronargs], p.proargtypes::oid[]) as a(name, type) on true "
            "where p.pronamespace = 'gangq'::regnamespace and exists (select 1 from pg_roles r "
            "where r.rolname like 'gangq\\_%' and has_function_privilege(r.oid, p.oid, 'execute')) order by p.proname"
        ):
            arguments = self.signatures.setdefault(row["proname"], {})
            if row["name"] is not None:
                arguments[row["name"]] = row["type"]

        # Each setting and each option is an argument here, of the type of its column.
        self.members: dict[str, set[str]] = {}
        for verb, (_, table) in OBJECTS.items():
            columns = {
                row["name"]: row["type"]
                for row in db.execute(
                    "select name, type::text as type from gangq.settable(%s::regtype)", (f"gangq.{table}",)
                )
            }
            self.members[verb] = set(columns)
            self.signatures[verb].update(columns)

    # Calling --------------------------------------------------------------------------------------------------

    def call(self, verb: str, **named: Any) -> list[dict[str, Any]]:
        """Call a function that must succeed."""
        return self.ask(verb, named)

    def ask(self, verb: str, named: Arguments) -> list[dict[str, Any]]:
        types = self.signatures[verb]
        given = sql.SQL(", ").join(
            sql.SQL("{} => {}::{}").format(sql.Identifier(name), sql.Placeholder(name), sql.SQL(types[name]))
            for name in named
            if name not in self.members.get(verb, ())
        )
        members = [name for name in named if name in self.members.get(verb, ())]
        whole = OBJECTS[verb][0] if verb in OBJECTS else ""
        if (members or whole == "settings") and whole not in named:
            pairs = sql.SQL(", ").join(
                sql.SQL("{}, {}::{}").format(name, sql.Placeholder(name), sql.SQL(types[name]))
                for name in members
            )
            comma = sql.SQL(", " if given.as_string() else "")
            given = (
                given + comma + sql.SQL("{} => jsonb_build_object({})").format(sql.Identifier(whole), pairs)
            )
        query = sql.SQL("select * from gangq.{}({})").format(sql.Identifier(verb), given)
        return self.db.execute(query, named).fetchall()

    def try_it(self, verb: str, named: Arguments) -> bool:
        """Whether the call was accepted; anything but a documented error is a problem."""
        self.calls += 1
        try:
            self.ask(verb, named)
        except psycopg.Error as error:
            state = error.sqlstate or ""
            shown = {name: (f"{str(v)[:80]}..." if len(str(v)) > 80 else v) for name, v in named.items()}
            if not (state.startswith("GQ") or state in DOCUMENTED):
                self.problems.append(f"{verb}({shown}): {state} {error!r}"[:1000])
            elif state.startswith("GQ") and not error.diag.message_hint:
                self.problems.append(f"{verb}({shown}): no hint: {error}")
            elif len(str(error.diag.message_primary)) + len(str(error.diag.message_hint)) > LONGEST_MESSAGE:
                self.problems.append(f"{verb}({shown}): the message itself is long: {str(error)[:200]}")
            return False
        return True

    # What must hold after an accepted call ----------------------------------------------------------------------

    def must_work(self, after: str) -> None:
        """The whole of gangq works on, whatever has been accepted."""
        try:
            for _ in range(3):
                (row,) = self.call("tick", force=True)
                if not row["again"]:
                    break
            for error in self.db.execute(
                "delete from gangq.events where kind = 'tick_error' returning reason, data"
            ).fetchall():
                self.problems.append(f"after {after}: tick: {error}")
            broken = self.db.execute("select * from gangq.violations").fetchall()
            if broken:
                self.problems.append(f"after {after}: {broken}")
            for gang in self.db.execute(
                "select id from gangq.live_gangs order by id desc limit 2"
            ).fetchall():
                self.call("explain_gang", gang_id=gang["id"])
        except psycopg.Error as error:
            self.problems.append(f"after {after}: {error!r}")

    def must_be_readable(self, after: str) -> None:
        """Every view and table can be read by psycopg."""
        relations = self.db.execute(
            "select c.relname as name from pg_class c where c.relnamespace = 'gangq'::regnamespace "
            "and c.relkind in ('v', 'r', 'p') and not c.relispartition order by 1"
        ).fetchall()
        for relation in relations:
            try:
                self.db.execute(
                    sql.SQL("select * from gangq.{}").format(sql.Identifier(relation["name"]))
                ).fetchall()
            except psycopg.Error as error:
                self.problems.append(f"after {after}: gangq.{relation['name']}: {error!r}")

    def wait(self) -> None:
        """A gang waits: only then does a pass of placement look at the fleet."""
        self.call("submit_gang", task="fuzz", size=2, priority=999, wait_for_hardware=True)

    def restore(self) -> None:
        """Put back what calls have set, and end what they have left behind."""
        for table, found in self.saved.items():
            if table == "queues_table":
                for row in found:
                    self._put_back(table, row, "name")
            elif table == "settings":
                self._put_back(table, found[0], "singleton")
            else:
                self.db.execute("delete from gangq.task_settings")
        self.db.execute("delete from gangq.cordons")
        self.db.execute("delete from gangq.schedules_table")
        self.db.execute("delete from gangq.service_gangs_table")
        self.db.execute("delete from gangq.services_table")
        self.db.execute("delete from gangq.beat_gaps")
        self.db.execute("delete from gangq.notification_targets")
        for row in self.db.execute(
            "select id, name from gangq.incarnations where ended_at is null and name <> all (%s)",
            (["base", "base2"],),
        ).fetchall():
            self.call("report_dead", worker=row["name"], incarnation=row["id"], evidence='{"by": "test"}')
        ids = [
            r["id"]
            for r in self.db.execute("select id from gangq.live_jobs where gang_id is null").fetchall()
        ]
        gangs = [r["id"] for r in self.db.execute("select id from gangq.live_gangs").fetchall()]
        self.call("cancel", job_ids=ids, gang_ids=gangs)
        for name in ("base", "base2"):
            self.end(name)

    def _put_back(self, table: str, row: dict[str, Any], key: str) -> None:
        settable = [
            r["attname"] for r in self.db.execute(
                "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 "
                "and not attisdropped and attgenerated = ''", (f"gangq.{table}",)
            ).fetchall()
        ]  # fmt: skip
        json = {"guaranteed", "maximum", "submitter_maximum", "ceilings"}
        values = {
            name: psycopg.types.json.Jsonb(row[name]) if name in json else row[name] for name in settable
        }
        assigned = sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(n), sql.Placeholder(n)) for n in settable if n != key
        )
        self.db.execute(
            sql.SQL("update gangq.{} set {} where {} = {}").format(
                sql.Identifier(table), assigned, sql.Identifier(key), sql.Placeholder(key)
            ),
            values,
        )

    # Parts of valid calls ---------------------------------------------------------------------------------------

    def end(self, name: str) -> None:
        for row in self.db.execute(
            "select id from gangq.incarnations where name = %s and ended_at is null", (name,)
        ).fetchall():
            self.call("report_dead", worker=name, incarnation=row["id"], evidence='{"by": "test"}')

    def worker(self, name: str = "base") -> int:
        """A live incarnation with two devices, room and every queue."""
        found = self.db.execute(
            "select id from gangq.incarnations where name = %s and ended_at is null and state = 'live' "
            "and quarantined is null and passed_over_until is null and taints = '{}'", (name,)
        ).fetchall()  # fmt: skip
        if found:
            return int(found[0]["id"])
        self.end(name)
        self.db.execute(
            "update gangq.incarnations set quarantined = null, operator_taints = '{}' where name = %s",
            (name,),
        )
        self.db.execute("delete from gangq.device_holds where kind = 'quarantine'")
        devices = [f'{{"uuid": "{name}-{n}", "index": {n}, "vram_mb": 1000}}' for n in range(2)]
        (row,) = self.call(
            "register_worker", name=name, host=name, queues=["default"], slots=500, memory_mb=1000,
            cpus=100, devices="[" + ",".join(devices) + "]",
        )  # fmt: skip
        return int(row["incarnation"])

    def job(self, **more: Any) -> int:
        return int(self.call("submit", task="fuzz", **more)[0]["submit"])

    def claim(self, **more: Any) -> tuple[int, int, int]:
        """(job, token, incarnation) of a job that runs."""
        for _ in range(2):
            incarnation = self.worker()
            job = self.job(priority=1000, **more)
            if more:
                # As a pass would where earlier calls have left room; if they have not, the next round has.
                with contextlib.suppress(psycopg.DatabaseError):
                    self.call("open_place", incarnation=incarnation, job_id=job)
            for row in self.call("claim", incarnation=incarnation, request_id=uuid.uuid4(), max_jobs=100):
                if row["job_id"] == job:
                    return job, row["token"], incarnation
            self.restore()  # What earlier calls have left there was first.
        raise AssertionError("it was not claimed")

    def live_claim(self) -> tuple[int, int, int]:
        """The same one as long as it runs."""
        kept = getattr(self, "_kept", None)
        if kept and self.db.execute(
            "select 1 from gangq.live_jobs j join gangq.incarnations i on i.id = j.incarnation "
            "where i.ended_at is null and j.id = %s and j.token = %s and j.state = 'running'", kept[:2]
        ).fetchall():  # fmt: skip
            return kept  # type: ignore[no-any-return]
        self._kept = self.claim(gpus=1)
        return self._kept

    def gang(self, state: str, **more: Any) -> tuple[int, list[int]]:
        """A gang of two in this state: blocked, reserved, running or draining."""
        workers = [self.worker(), self.worker("base2")]
        (row,) = self.call(
            "submit_gang", task="fuzz", size=2, priority=1000, strategy="strict_spread", **more
        )
        gang, jobs = int(row["gang_id"]), list(row["job_ids"])
        if state == "blocked":
            return gang, jobs
        assert self.call("reserve_gang", gang_id=gang, incarnations=workers) == [{"reserve_gang": True}]
        if state == "reserved":
            return gang, jobs
        for incarnation in workers:
            self.call("claim", incarnation=incarnation, request_id=uuid.uuid4(), max_jobs=100)
        if state == "draining":
            self.call("preempt_gang", gang_id=gang)
        return gang, jobs

    def missing(self) -> tuple[int, list[int]]:
        """A running gang that lacks its second member."""
        gang, jobs = self.gang("running", failure_policy="restart_member")
        self.call("fail", job_id=jobs[1], token=self.token(jobs[1]))
        self.db.execute("update gangq.live_gangs set not_before = null where id = %s", (gang,))
        return gang, jobs

    def token(self, job: int) -> int:
        return int(
            self.db.execute("select token from gangq.live_jobs where id = %s", (job,)).fetchall()[0]["token"]
        )

    def over(self) -> int:
        """A job that has been cancelled."""
        job = self.job()
        self.call("cancel", job_ids=[job])
        return job

    def pair(self) -> Arguments:
        job, token, _ = self.live_claim()
        return {"job_id": job, "token": token}

    def told(self) -> Arguments:
        """A job that has been told to stop."""
        job, token, _ = self.claim()
        self.call("displace_job", job_id=job)
        return {"job_id": job, "token": token}

    def pairs(self) -> Arguments:
        job, token, _ = self.live_claim()
        return {"job_ids": [job], "tokens": [token]}

    def mine(self) -> Arguments:
        job, token, incarnation = self.live_claim()
        return {"incarnation": incarnation, "job_id": job, "token": token}

    def registered(self) -> Arguments:
        self.end("fuzzed")
        return {"name": "fuzzed", "host": "h", "queues": ["default"]}

    def named(self) -> Arguments:
        return {"worker": "base", "incarnation": self.worker()}

    def barred(self) -> Arguments:
        _, jobs = self.gang("running")
        return {"job_id": jobs[0], "token": self.token(jobs[0])}

    def shrinking(self) -> Arguments:
        gang, jobs = self.gang("running", min_size=1, failure_policy="shrink")
        return {"gang_id": gang, "job_ids": jobs[1:]}

    def replaced(self) -> Arguments:
        gang, jobs = self.missing()
        return {"gang_id": gang, "job_ids": jobs[1:], "incarnations": [self.worker("base2")]}

    def decided(self) -> Arguments:
        gang, jobs = self.gang("blocked")
        seats = [{"worker": self.worker(), "devices": [], "role": 0} for _ in jobs]
        passes = self.db.execute("select runs from gangq.lock_rows where name = 'pass'").fetchone()
        assert passes is not None
        return {
            "pass": passes["runs"],
            "decisions": json.dumps([{"ask": f"g{gang}", "action": "start", "seats": seats}]),
            "part": 1,
            "last": True,
            "seen": '{"digest": "d", "asked": 1}',
        }

    def notified(self) -> Arguments:
        """A target with a notification that waits."""
        self.call("add_notification", target="fuzz")
        self.call("test_notification", target="fuzz")
        return {"target": "fuzz"}

    def delivered(self) -> Arguments:
        """A delivery in progress."""
        named = self.notified()
        (row,) = self.call("fetch_notification", **named)
        return {**named, "id": row["id"], "delivery": row["delivery"], "error": "no answer"}

    def schedule(self) -> Arguments:
        """One that is there, and submits what no worker has to be able to run."""
        self.call(
            "set_schedule", name="fuzz", cron="0 3 * * *", task="fuzz", work='{"wait_for_hardware": true}'
        )
        return {"name": "fuzz"}

    def service(self) -> Arguments:
        """One that is there."""
        self.call("set_service", name="fuzz", task="fuzz", replicas=2, gang=2)
        return {"name": "fuzz"}

    def serving(self) -> Arguments:
        """The claim of a replica."""
        gang, jobs = self.gang("running")
        self.service()
        self.db.execute("update gangq.live_gangs set service = 'fuzz' where id = %s", (gang,))
        return {"job_id": jobs[0], "token": self.token(jobs[0])}

    def planned(self) -> Arguments:
        self.schedule()
        self.db.execute("update gangq.schedules_table set due_at = null")
        (one,) = self.call("unplanned_schedules")
        due = {"cron": one["cron"], "tz": "UTC", "after": str(one["after"]), "due": "2200-01-01 03:00:00+00"}
        return {"plans": json.dumps([{"name": "fuzz", **due}])}

    def some_worker(self) -> Arguments:
        self.worker()
        return {"worker": "base"}


ERROR = '{"type": "E", "message": "m"}'
EVIDENCE = '{"by": "test"}'
CALLS: dict[str, Callable[[World], Arguments]] = {
    "ack_preempted": lambda w: w.told(),
    "acknowledge_notification": lambda w: w.delivered(),
    "add_notification": lambda w: {
        "target": "fuzz",
        "kinds": ["job_failed"],
        "queue": "default",
        "submitter": "s",
        "task": "fuzz",
        "max_attempts": 3,
    },
    "append_log": lambda w: {**w.pairs(), "seqs": [w.calls], "chunks": ["x"]},
    "apply": lambda w: w.decided(),
    "barrier": lambda w: {**w.barred(), "port": 29500},
    "board": lambda w: {},
    "bounce": lambda w: {"incarnation": w.worker(), "host": "base", "report_only": True},
    "bounced": lambda w: {"incarnation": w.worker(), "ok": True, "detail": "{}"},
    "caller": lambda w: {},
    "cancel": lambda w: {"job_ids": [w.job()], "gang_ids": [], "reason": "r"},
    "capacity_of": lambda w: {"incarnations": [w.worker()]},
    "change_mark": lambda w: {},
    "claim": lambda w: {
        "incarnation": w.worker(),
        "request_id": uuid.uuid4(),
        "max_jobs": 2,
        "ports": [5000],
        "sleep": True,
        "model": "m",
        "lane": "light",
    },
    "complete": lambda w: {**w.pairs(), "results": '{"{}"}', "strict": True},
    "complete_and_claim": lambda w: {
        "incarnation": w.worker(),
        **w.pairs(),
        "results": '{"{}"}',
        "request_id": uuid.uuid4(),
        "max_jobs": 2,
        "ports": [5000],
    },
    "complete_drain": lambda w: {"gang_id": w.gang("draining")[0]},
    "configure": lambda w: {"tick_s": 1},
    "cordon": lambda w: {
        "worker": w.some_worker()["worker"],
        "drain": True,
        "deadline": "2100-01-01",
        "reason": "r",
    },
    "declare_schedules": lambda w: {"source": "fuzz:app", "names": [w.schedule()["name"]]},
    "declare_services": lambda w: {"source": "fuzz:app", "names": [w.service()["name"]]},
    "delete_service": lambda w: w.service(),
    "displace_job": lambda w: {"job_id": w.live_claim()[0], "reason": "r"},
    "explain_gang": lambda w: {"gang_id": w.gang("blocked")[0]},
    "explain_job": lambda w: {"job_id": w.job()},
    "fail": lambda w: {**w.pair(), "error": ERROR, "retryable": True, "cause": "error"},
    "fetch_notification": lambda w: {**w.notified(), "lease_s": 60},
    "flag_dead_workers": lambda w: {},
    "forget_schedule": lambda w: w.schedule(),
    "heartbeat": lambda w: {
        "incarnation": w.worker(),
        **w.pairs(),
        "beats": '{"{\\"step\\": 1}"}',
        "readings": '[{"uuid": "base-0", "gpu_pct": 1}]',
    },
    "hosts_of": lambda w: {"gang_id": 1},
    "idle_beside_work": lambda w: {"waited_s": 1},
    "in_epoch": lambda w: {"j": None, "g": None},
    "in_short": lambda w: {"seconds": 1},
    "inputs": lambda w: {**w.pair()},
    "is_admin": lambda w: {},
    "is_paused": lambda w: {"s": None, "t": None},
    "keep_partitions": lambda w: {"at_once": True},
    "kept_by_day": lambda w: {},
    "key_usage": lambda w: {"names": ["fuzz"]},
    "learn_gap": lambda w: {"task": "fuzz", "device_class": "", "longest_s": 1, "beats": 3},
    "limit_opens_at": lambda w: {"key": "fuzz", "used": 5},
    "load_checkpoint": lambda w: {**w.pair()},
    "may_act_as": lambda w: {"role": "gangq_worker"},
    "may_report": lambda w: {"login": "fuzz"},
    "may_report_too": lambda w: {"login": "fuzz"},
    "metrics": lambda w: {},
    "now": lambda w: {},
    "number_in": lambda w: {"data": '{"rank": 1}', "key": "rank"},
    "open_place": lambda w: {
        "incarnation": w.worker(),
        "job_id": w.job(gpus=1),
        "device_ids": None,
        "min_priority": 0,
        "ends_by": "2100-01-01",
        "refills": True,
    },
    "open_slots": lambda w: {},
    "owned": lambda w: {"submitter": "fuzz", "login": "fuzz", "queue": "default"},
    "pause_schedule": lambda w: {**w.schedule(), "until": "2100-01-01"},
    "pause_task": lambda w: {"task": "fuzz paused", "until": "2100-01-01", "reason": "r"},
    "plan_schedules": lambda w: w.planned(),
    "planned_in_words": lambda w: {"p": None, "follows": None, "t": None},
    "predecessor": lambda w: w.some_worker(),
    "preempt_gang": lambda w: {"gang_id": w.gang("running")[0], "reason": "r"},
    "preview": lambda w: {"changes": '[{"add_workers": 1}]', "kinds": [1]},
    "promote_due": lambda w: {"most": 5},
    "quarantine": lambda w: {"worker": w.some_worker()["worker"], "reason": "r"},
    "queue_load": lambda w: {},
    "reap_expired": lambda w: {"most": 5},
    "register_worker": lambda w: w.registered(),
    "release": lambda w: {**w.pairs(), "reason": "r"},
    "remove_notification": lambda w: w.notified(),
    "report_dead": lambda w: {**w.named(), "evidence": EVIDENCE},
    "report_load": lambda w: {**w.serving(), "load": 1},
    "report_ready": lambda w: {**w.serving(), "ready": True, "port": 8000},
    "report_stuck": lambda w: {**w.named(), "evidence": EVIDENCE},
    "requeue": lambda w: {**w.pair(), "error": ERROR, "front": True},
    "reserve_gang": lambda w: w.replaced(),
    "resume_schedule": lambda w: w.schedule(),
    "resume_task": lambda w: {"task": "fuzz paused"},
    "retire_worker": lambda w: {"incarnation": w.worker(), "final": True},
    "retry": lambda w: {"job_ids": [w.over()], "gang_ids": []},
    "retry_failed": lambda w: {"name": "fuzz", "dry_run": False},
    "retry_notifications": lambda w: w.notified(),
    "role_of": lambda w: {"gang_id": 1, "rank": 0},
    "roles_of": lambda w: {"role": "gangq_worker"},
    "roll_back_service": lambda w: {**w.service(), "to_revision": 1},
    "rollback_gang": lambda w: {"gang_id": w.gang("reserved")[0], "reason": "r"},
    "run_schedule_now": lambda w: w.schedule(),
    "save_checkpoint": lambda w: {**w.pair(), "step": 1, "data": b"x", "epoch": None},
    "schema_version": lambda w: {},
    "serves": lambda w: {"i": None, "s": None},
    "set_limit": lambda w: {"key": "fuzz", "most": 5, "rate": "9/1s"},
    "set_priority": lambda w: {"priority": 1, "job_ids": [w.job()], "gang_ids": []},
    "set_queue": lambda w: {"name": "default"},
    "set_schedule": lambda w: {
        "name": "fuzz",
        "cron": "0 3 * * *",
        "task": "fuzz",
        "payload": "{}",
        "work": "{}",
        "catch_up": "all",
    },
    "set_service": lambda w: {
        "name": "fuzz",
        "task": "fuzz",
        "payload": "{}",
        "replicas": 2,
        "gang": 2,
        "work": "{}",
        "surge": 1,
    },
    "set_taints": lambda w: {**w.some_worker(), "taints": ["a"]},
    "set_task": lambda w: {"task": "fuzz", "budget_s": 100},
    "shared_queues": lambda w: {},
    "shrink_gang": lambda w: {**w.shrinking(), "reason": "r"},
    "snooze": lambda w: {**w.pair(), "for_s": 5},
    "span": lambda w: {"until": None, "since": None},
    "stop_service": lambda w: w.service(),
    "submit": lambda w: {"task": "fuzz", "payloads": '{"{}"}'},
    "submit_gang": lambda w: {"task": "fuzz", "size": 2},
    "submit_unique": lambda w: {"unique_key": "fuzz", "task": "fuzz"},
    "submit_unique_gang": lambda w: {"unique_key": "fuzz gang", "task": "fuzz", "size": 2},
    "suspect": lambda w: {**w.mine(), "class": "stall", "evidence": EVIDENCE},
    "test_notification": lambda w: w.notified(),
    "tick": lambda w: {"force": True, "decides": True},
    "time_out": lambda w: {"most": 5},
    "trip": lambda w: {
        **w.mine(),
        "code": 76,
        "error": ERROR,
        "evidence": EVIDENCE,
        "devices": ["base-0"],
        "exit_in_s": 5,
        "class": "stall",
    },
    "uncordon": lambda w: w.some_worker(),
    "unplanned_schedules": lambda w: {},
    "unproven": lambda w: w.some_worker(),
    "unquarantine": lambda w: w.some_worker(),
    "usage": lambda w: {"since": "30 days", "by": ["submitter"]},
    "waiting_so_far": lambda w: {"gang_id": 1},
    "watch_terms": lambda w: {"task": "fuzz", "device_class": "", "queue": "default"},
    "waiting_jobs": lambda w: {},
}
"""For each function, by name, the arguments of a call that succeeds."""

KEEPS_WHAT_IT_IS_TOLD = {
    "register_worker", "configure", "set_queue", "set_task", "submit", "submit_gang", "heartbeat", "learn_gap",
    "cordon", "set_taints", "trip", "set_schedule", "set_service",
}  # fmt: skip
"""What these accept is looked at again by every tick, so all of it must work after each single call."""


OBJECTS = {
    "configure": ("settings", "settings"),
    "set_queue": ("settings", "queues_table"),
    "set_task": ("settings", "task_settings"),
    "submit": ("options", "job_options"),
    "submit_gang": ("options", "gang_options"),
    "submit_unique": ("options", "job_options"),
    "submit_unique_gang": ("options", "gang_options"),
    "register_worker": ("options", "worker_options"),
    "set_schedule": ("options", "schedule_options"),
    "set_service": ("options", "service_options"),
}
"""The argument that is one JSON object, and the row type that its members come from."""

SAME_OPTIONS = {"submit_unique", "submit_unique_gang"}
"""These read their options as `submit` and `submit_gang` do, by the same function: a short run tries them there."""

NUMBERS = {"integer", "bigint", "real", "numeric", "timestamp with time zone", "interval"}


@pytest.fixture(scope="module")
def database(server: Server, template: str, running: Any) -> Iterator[Kept]:
    """The same for all tests here: to plan every view again costs more than to fuzz most functions."""
    with running.databases(server).kept(template, clock=False) as kept:
        yield kept


@pytest.fixture(scope="module")
def prepared(database: Kept) -> Iterator[Db]:
    """A connection that plans each statement once."""
    with connect(database.dsn) as conn:
        conn.prepare_threshold, conn.prepared_max = 0, None
        yield conn


@pytest.fixture
def world(database: Kept, prepared: Db) -> Iterator[World]:
    prepared.execute("set statement_timeout = '10s'")
    yield World(prepared)
    database.restore()


def test_every_function_that_a_role_may_call_has_a_valid_call_here(world: World) -> None:
    assert set(world.signatures) == set(CALLS)
    for verb, arguments in CALLS.items():
        try:
            world.ask(verb, arguments(world))
        except psycopg.Error as error:
            raise AssertionError(f"{verb}: {error!r}") from error
        world.restore()
    world.must_work("valid calls")
    world.must_be_readable("valid calls")
    assert not world.problems, "\n".join(world.problems)


MANY = (10 if SOAK else 5) << 20
"""In bytes: above every limit, of which 4 MiB is the highest."""
LARGEST_ROW = 2 << 20
"""In bytes: several columns may be at their limits at once, of 1 MiB at most."""


@functools.cache
def huge() -> dict[str, list[str]]:
    """Values of each type that are larger than any limit, as literals; the plainest first."""
    return {
        "text": ["x" * MANY],
        "jsonb": [
            f'{{"by": "test", "type": "E", "a": "{"x" * MANY}"}}',
            "{" + ",".join(f'"{n:040d}": {n}' for n in range(MANY // 50)) + "}",
            "[" + ",".join(['"0123456789"'] * (MANY // 13)) + "]",
            f'[{{"name": "{"x" * MANY}", "key": "a", "uuid": "{"x" * MANY}", "count": 1, "index": 0}}]',
        ],
        "bytea": ["\\x" + "00" * MANY],
    }


def huge_values(type_name: str) -> list[str]:
    """Huge values of this type, and very many elements, as literals. A short run has the plainest."""
    ones = huge().get(type_name.removesuffix("[]"), [])[: None if SOAK else 1]
    if not ones or not type_name.endswith("[]"):
        return ones
    quoted = ['"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in ones]
    many = ",".join(f'"{n:010d}"' for n in range(10**9, 10**9 + 100_000))
    return [*(f"{{{v}}}" for v in quoted), f"{{{many}}}"]


def too_large_rows(db: Db) -> list[dict[str, Any]]:
    tables = db.execute(
        "select c.relname from pg_class c where c.relnamespace = 'gangq'::regnamespace "
        "and c.relkind in ('r', 'p') and not c.relispartition"
    ).fetchall()
    largest = [
        f"select '{t['relname']}' as name, max(octet_length(t::text)) as bytes from gangq.{t['relname']} t"
        for t in tables
    ]
    return db.execute(
        f"select * from ({' union all '.join(largest)}) x where x.bytes > {LARGEST_ROW}"
    ).fetchall()


def tried(world: World, verb: str) -> list[str]:
    """The arguments that are replaced."""
    return [
        name
        for name in world.signatures[verb]
        if SOAK or verb not in SAME_OPTIONS or name not in world.members[verb]
    ]


def overfill(world: World, verb: str) -> None:
    """Whatever it is given is refused or cut."""
    world.db.execute("set statement_timeout = '60s'")
    for name in tried(world, verb):
        for value in huge_values(world.signatures[verb][name]):
            world.try_it(verb, {**CALLS[verb](world), name: value})
    world.problems.extend(f"{verb} has left {row}" for row in too_large_rows(world.db))


def fuzz(world: World, verb: str, pairs: int) -> None:
    base = CALLS[verb]
    types = world.signatures[verb]
    chosen = random.Random(verb)
    tries = [{name: odd} for name in tried(world, verb) for odd in odd_values(types[name])]
    # It is lawful, and each such gang takes seconds.
    tries = [odd for odd in tries if SOAK or odd not in ({"size": "32768"}, {"replicas": "32768"})]
    for _ in range(pairs if len(types) > 1 else 0):
        names = chosen.sample(sorted(types), 2)
        tries.append({name: chosen.choice(odd_values(types[name])) for name in names})
    waiting = False
    for odd in tries:
        # In a short run what is no number and no time is looked at once, at the end.
        lasting = verb in KEEPS_WHAT_IT_IS_TOLD and (SOAK or all(types[name] in NUMBERS for name in odd))
        if lasting and not waiting:
            world.wait()
            waiting = True
        if world.try_it(verb, {**base(world), **odd}) and lasting:
            shown = f"{verb}({', '.join(f'{name} => {str(value)[:80]}' for name, value in odd.items())})"
            world.must_work(shown)
            if any(types[name] in ("interval", "timestamp with time zone") for name in odd):
                world.must_be_readable(shown)
            world.try_it(verb, base(world))
            world.restore()
            waiting = False
    world.must_work(verb)
    world.must_be_readable(verb)
    world.restore()
    world.must_work(verb)


@pytest.mark.slow
@pytest.mark.parametrize("verb", sorted(CALLS))
def test_no_value_breaks_a_function(world: World, verb: str) -> None:
    fuzz(world, verb, pairs=300 if SOAK else 6)
    overfill(world, verb)
    assert not world.problems, "\n".join(world.problems)
