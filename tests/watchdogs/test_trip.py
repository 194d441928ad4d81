"""The trip path in processes of their own, since it ends them: with PostgreSQL at hand, away, mute and frozen."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fakes import GPU

from gangq.client import Client
from gangq.embedded import Server
from gangq.errors import InvalidInput
from gangq.proc.clock import boottime
from gangq.watchdogs import ExitCode, Trip
from gangq.watchdogs.findings import error_of
from gangq.watchdogs.trip import TripPath, leave_with, report
from soaking import SOAK
from watchdogs.victims import until

Row = dict[str, Any]


@dataclass
class Ended:
    """A process that tripped: its status, how long it took from the trip on, and what it said."""

    code: int
    took_s: float
    out: list[str]
    err: str


@dataclass
class Held:
    """A job that a worker works on."""

    incarnation: int
    job: int
    token: int


def tripping(dsn: str, held: Held, what: str, code: int = 76) -> list[str]:
    """A command line."""
    program = Path(__file__).with_name("tripping.py")
    numbers = [held.incarnation, held.job, held.token, code]
    return [sys.executable, str(program), what, dsn, *map(str, numbers)]


class Started:
    """A process that is about to trip: what ``tripping.py`` calls ``what``."""

    def __init__(self, dsn: str, held: Held, what: str, exit_code: int = 76) -> None:
        self._process = subprocess.Popen(
            tripping(dsn, held, what, exit_code),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._ended: list[Ended] = []
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            out, err = self._process.communicate(timeout=30)
        finally:
            self._process.kill()
        began, *rest = out.split("\n")
        self._ended.append(Ended(self._process.returncode, boottime() - float(began or "nan"), rest, err))

    def result(self) -> Ended:
        self._thread.join(35)
        return self._ended[0]


def run(dsn: str, held: Held, what: str = "trips", exit_code: int = 76) -> Ended:
    return Started(dsn, held, what, exit_code).result()


def take(client: Client, **more: Any) -> Held:
    """A job, claimed by a worker with one device."""
    device = {"uuid": GPU, "index": 0, "vram_mb": 80_000, "model": "H200", "source": "nvml"}
    incarnation = client.register_worker(name="w", host="h", queues=["default"], devices=[device]).incarnation
    client.submit(task="t", gpus=1, **more)
    client.tick(force=True)  # A pass places it.
    (claim,) = client.claim(incarnation=incarnation)
    return Held(incarnation, claim.job_id, claim.token)


@pytest.fixture
def held(client: Client) -> Held:
    return take(client)


NOBODY = Held(1, 2, 3)


def test_a_watchdog_without_a_worker_ends_with_one_sentence_that_says_where_the_program_was(
    tmp_path: Path,
) -> None:
    program = tmp_path / "alone.py"
    program.write_text("""
import time
from gangq.watchdogs import Watchdog
def crunches():
    time.sleep(60)
with Watchdog(budget_s=0.5):
    crunches()
""")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == ExitCode.BUDGET
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("gangq: ")]
    assert said.startswith("gangq: budget (75): it ran for "), said
    assert "in sleep() of crunches at alone.py:5" in said


def test_it_writes_down_the_evidence_requeues_and_exits_with_the_code(
    dsn: str, held: Held, db: psycopg.Connection[Row]
) -> None:
    ended = run(dsn, held)
    assert ended.code == 76
    assert ended.took_s < 3
    assert ended.out == [""], "it came back"
    trip = db.execute("select * from gangq.trips").fetchone()
    assert trip is not None
    assert (trip["code"], trip["class"], trip["outcome"], trip["job_id"]) == (
        76,
        "stall",
        "scheduled",
        held.job,
    )
    assert trip["reason"] == "Stalled"
    evidence = trip["evidence"]
    assert "where_it_hangs" in evidence["stacks"]
    assert evidence["seen"]["silence_s"] == 130.0
    assert evidence["application"] is False
    assert evidence["processes"][0]["threads"][0]["wchan"]
    job = db.execute("select state, trips, attempts from gangq.jobs where id = %s", [held.job]).fetchone()
    assert job == {"state": "scheduled", "trips": 1, "attempts": 0}
    worker = db.execute(
        "select ended_at is not null as ended, exit_code, extract(epoch from exits_at - ended_at)::real as exits_in "
        "from gangq.incarnations where id = %s",
        [held.incarnation],
    ).fetchone()
    assert worker is not None
    assert worker["ended"]
    assert worker["exit_code"] == 76
    # The kernel timer was armed for less than this before the statement was sent.
    assert 3 < worker["exits_in"] <= 5.25
    assert "where_it_hangs" in ended.err


@pytest.mark.parametrize(("code", "most_s"), [(85, 3.0), (75, 3.0), (76, 6.0)])
def test_the_job_of_a_fact_waits_less_for_the_exit_than_one_that_the_database_may_hold(
    dsn: str, held: Held, db: psycopg.Connection[Row], code: int, most_s: float
) -> None:
    assert run(dsn, held, exit_code=code).code == code
    (event,) = db.execute("select data from gangq.events where kind = 'trip'").fetchall()
    assert event["data"]["exit_in_s"] <= most_s
    assert (event["data"]["exit_in_s"] > 3.0) == (code == 76)


def test_a_fault_that_the_application_caused_spares_the_device(
    dsn: str, held: Held, db: psycopg.Connection[Row]
) -> None:
    assert run(dsn, held, "trips_by_its_own_fault", 85).code == 85
    found = db.execute("select evidence -> 'application' as it from gangq.trips").fetchone()
    assert found == {"it": True}


class MuteAfter:
    """A proxy that passes everything on until the client says ``word``, and then nothing any more."""

    def __init__(self, target: tuple[str, str | int], word: bytes) -> None:
        self._target, self._word = target, word
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.heard = threading.Event()
        self._lines: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            kind = socket.AF_UNIX if str(self._target[0]).startswith("/") else socket.AF_INET
            far = socket.socket(kind)
            self._lines += [near, far]
            far.connect(
                f"{self._target[0]}/.s.PGSQL.{self._target[1]}" if kind == socket.AF_UNIX else self._target
            )
            threading.Thread(target=self._pass, args=(near, far, self._word), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, None), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, word: bytes | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if word is not None and word in data:
                    self.heard.set()
                    return
                sink.sendall(data)

    def close(self) -> None:
        for line in (self._listening, *self._lines):
            line.close()


def test_whatever_the_database_does_it_exits_within_five_seconds_with_the_code_and_the_stacks(
    dsn: str, client: Client, db: psycopg.Connection[Row]
) -> None:
    held = take(client)
    params = psycopg.conninfo.conninfo_to_dict(dsn)
    proxy = MuteAfter((str(params["host"]), str(params["port"])), b"gangq.trip")
    through = psycopg.conninfo.make_conninfo(dsn, host="127.0.0.1", port=proxy.port, sslmode="disable")
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # Bound and not listening: refused.
        refused = f"host=127.0.0.1 port={unused.getsockname()[1]} dbname=x"
        accepted = f"host=127.0.0.1 port={mute.getsockname()[1]} dbname=x"
        with db.transaction():
            db.execute("select 1 from gangq.live_jobs where id = %s for update", [held.job])
            started = {
                "nobody listens": Started(refused, NOBODY, "trips", 75),
                "accepted and never answered": Started(accepted, NOBODY, "trips", 76),
                "mute from the statement on": Started(through, held, "trips", 78),
                "somebody else holds the row": Started(dsn, held, "trips", 85),
                "handing in results hangs too": Started(
                    refused, NOBODY, "hangs_as_it_hands_in_its_results", 76
                ),
            }
            ended = {name: process.result() for name, process in started.items()}
    proxy.close()
    assert proxy.heard.is_set()
    assert [end.code for end in ended.values()] == [75, 76, 78, 85, 76]
    for name, end in ended.items():
        assert end.took_s < 5, name
        assert "where_it_hangs" in end.err, name
    assert ended["handing in results hangs too"].out[0] == "first"


def test_with_a_frozen_server_it_exits_within_five_seconds(dsn: str, held: Held, server: Server) -> None:
    pid = server.status().pid
    assert pid is not None
    # The postmaster first: from then on no child of it comes, and none that ends goes away.
    os.kill(pid, signal.SIGSTOP)
    frozen = [pid, *_children(pid)]
    try:
        for each in frozen:
            os.kill(each, signal.SIGSTOP)
        ended = run(dsn, held)
    finally:
        for each in reversed(frozen):
            os.kill(each, signal.SIGCONT)
    assert ended.code == 76
    assert ended.took_s < 5


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_what_was_refused_once_is_tried_again_while_there_is_time(
    dsn: str, held: Held, db: psycopg.Connection[Row]
) -> None:
    def let_go() -> None:
        time.sleep(2.5)
        db.execute("rollback")

    db.execute("begin")
    db.execute("select 1 from gangq.live_jobs where id = %s for update", [held.job])
    thread = threading.Thread(target=let_go)
    thread.start()
    ended = run(dsn, held, "tries_again")
    thread.join()
    assert ended.code == 76
    assert db.execute("select count(*) as n from gangq.trips").fetchone() == {"n": 1}


def test_results_that_cannot_be_reported_do_not_keep_the_trip_from_being_reported(
    dsn: str, held: Held, db: psycopg.Connection[Row]
) -> None:
    ended = run(dsn, held, "cannot_hand_in_its_results")
    assert ended.code == 76
    assert "results_not_reported" in ended.err
    assert db.execute("select count(*) as n from gangq.trips").fetchone() == {"n": 1}


def test_a_freeze_within_the_path_itself_is_ended_by_the_kernel_on_the_deadline() -> None:
    ended = run("host=127.0.0.1 port=1 dbname=x", NOBODY, "freezes_within_the_path", 78)
    assert ended.code == 78
    assert 1.4 < ended.took_s < 2.2


@pytest.mark.parametrize("code", [code for code in ExitCode if code.notify], ids=lambda code: code.word)
def test_called_off_it_lives_on_and_no_timer_is_left(
    dsn: str, held: Held, client: Client, db: psycopg.Connection[Row], code: ExitCode
) -> None:
    client.configure(notify_only=[code.word])
    ended = run(dsn, held, "is_called_off_twice_and_stays", code)
    assert (ended.code, ended.out[0], ended.out[2:5]) == (0, "False", ["False", "stayed", "alive"]), ended.err
    job = db.execute("select trips from gangq.jobs where id = %s", [held.job]).fetchone()
    assert job == {"trips": 0}
    assert db.execute("select outcome from gangq.trips").fetchall() == [{"outcome": "notify"}]


def test_an_incarnation_that_has_ended_trips_nothing(dsn: str, held: Held, client: Client) -> None:
    client.report_dead(worker="w", incarnation=held.incarnation, evidence={"by": "test"})
    left: list[int] = []
    kept: list[tuple[Any, Any]] = []

    def keep(what: Any) -> None:
        assert path._deadman is not None
        kept.append((what, path._deadman._set_to))

    path = TripPath(dsn, held.incarnation, leave=left.append, deadline_s=60, keep=keep)
    path._children = list  # type: ignore[method-assign]
    try:
        trip = Trip(ExitCode.STALL, "idle", "no beat for 130 s")
        assert path(trip, job_id=held.job, token=held.token) is False
    finally:
        assert path._deadman is not None
        path._deadman.disarm()
    assert left == []
    # A disk that hangs costs nothing: the timer is off by then.
    assert kept[-1] == (None, ())


def test_children_of_the_handler_die_with_it_and_the_ignored_do_not(dsn: str, held: Held) -> None:
    argv = tripping(dsn, held, "leaves_children")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    kept, gone = map(int, process.stdout.readline().split())
    try:
        assert process.wait(10) == 76
        assert _alive(kept)
        assert not _alive(gone)
    finally:
        process.stdout.close()
        os.kill(kept, signal.SIGKILL)


def test_a_child_that_has_just_gone_or_may_not_be_killed_does_not_spare_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    forbidden = left[0].pid
    pids = [gone.pid, forbidden, left[1].pid]
    kill = os.kill

    def killing(pid: int, number: int) -> None:
        if pid == forbidden:
            raise PermissionError("not yours")
        kill(pid, number)

    monkeypatch.setattr("gangq.watchdogs.trip.Family.members", lambda *_: pids)
    monkeypatch.setattr(os, "kill", killing)
    try:
        codes: list[int] = []
        leave_with(TripPath("dbname=x", 1)._children(), 76, codes.append)
        assert codes == [76]
        assert left[1].wait(5) == -signal.SIGKILL
    finally:
        monkeypatch.undo()
        for child in left:
            child.kill()
            child.wait()
    assert [(r.message, r.pids) for r in caplog.records] == [("children_left", [forbidden])]  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["waits_for_a_child", "waits_for_a_child_in_another_thread"])
@pytest.mark.parametrize("nth", range(20 if SOAK else 1))
def test_the_handlers_next_lines_do_not_run(what: str, nth: int, dsn: str, held: Held) -> None:
    ended = run(dsn, held, what)
    assert ended.code == 76
    assert "the next line ran" not in ended.out


def test_a_handler_that_wakes_up_while_the_trip_is_told_does_not_go_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        dsn = f"host=127.0.0.1 port={mute.getsockname()[1]} dbname=x"
        ended = run(dsn, NOBODY, "wakes_up_while_it_trips")
    assert ended.code == 76
    assert ended.took_s > 3
    assert "the next line ran" not in ended.out


def test_a_full_queue_of_pending_calls_does_not_let_the_handler_go_on() -> None:
    # The program has filled it while the main thread was in one call, before the trip.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute_dsn = f"host=127.0.0.1 port={mute.getsockname()[1]} dbname=x"
        ended = run(mute_dsn, NOBODY, "fills_the_queue_before_it_trips", 75)
    assert ended.code == 75
    assert ended.took_s > 1.8
    assert "the next line ran" not in ended.out


def test_many_trips_that_were_called_off_leave_room_in_the_queue_of_pending_calls() -> None:
    assert run("dbname=x", NOBODY, "is_called_off_a_hundred_times").out[0] == "0"


def test_what_the_handler_of_a_signal_raises_does_not_let_the_handler_go_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute_dsn = f"host=127.0.0.1 port={mute.getsockname()[1]} dbname=x"
        ended = run(mute_dsn, NOBODY, "gets_a_signal_while_it_trips")
    assert ended.code == 76
    assert [line for line in ended.out if "ran" in line] == []


def test_what_the_handler_of_a_signal_raises_meanwhile_is_raised_once_the_trip_is_called_off() -> None:
    ended = run("dbname=x", NOBODY, "gets_a_signal_before_it_is_called_off")
    assert ended.out[:2] == ["opens", "raised"]


def test_called_off_the_handler_goes_on(dsn: str, held: Held, client: Client) -> None:
    client.configure(notify_only=["stall"])
    ended = run(dsn, held, "goes_on_if_called_off")
    assert (ended.code, ended.out[:2]) == (0, ["off", "it went on"]), ended


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- in this process -----------------------------------------------------------------------------------------


def test_a_command_that_is_dead_is_told_of_without_an_exit(held: Held, client: Client) -> None:
    told = {"incarnation": held.incarnation, "job_id": held.job, "token": held.token, "code": 76, "error": {}}
    assert report(client.target, told, 5.0) == "pending"
    assert report(client.target, told, 5.0) == "repeated"
    assert client.heartbeat(incarnation=held.incarnation, job_ids=[], tokens=[], beats=[]) is not None


def test_a_database_without_the_verb_does_not_keep_it(empty_dsn: str) -> None:
    left: list[int] = []
    path = TripPath(empty_dsn, 1, leave=left.append, deadline_s=60)
    trip = Trip(ExitCode.BUDGET, "budget", "too long")
    path._children = list  # type: ignore[method-assign]
    try:
        assert path(trip, job_id=1, token=1) is True
    finally:
        assert path._deadman is not None
        path._deadman.disarm()
    assert left == [75]


@pytest.mark.parametrize("outcome", ["tripped", None], ids=["reported", "unanswered"])
def test_its_supervisor_finds_whether_the_trip_was_reported(
    monkeypatch: pytest.MonkeyPatch, outcome: str | None
) -> None:
    kept: list[Any] = []
    path = TripPath("postgresql://x@127.0.0.1:1/x", 7, keep=kept.append, clock=lambda: 100.0)
    monkeypatch.setattr("gangq.watchdogs.trip.report", lambda *_: outcome)
    assert not path._report(Trip(ExitCode.BUDGET, "budget", "it ran for long"), 1, 1, {}, 100.0)
    assert kept == ([{"incarnation": 7, "until": 105.0, "reported": True}] if outcome else [])


def test_of_a_trip_that_is_called_off_nothing_is_kept_however_slow_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be reported when this worker ends, perhaps days later."""
    begun: list[Any] = []
    kept: list[Any] = []
    disk_answers = threading.Event()

    def keep(what: Any) -> None:
        begun.append(what)
        if len(begun) == 1:
            disk_answers.wait(10)
        kept.append(what)

    path = TripPath("postgresql://x@127.0.0.1:1/x", 7, keep=keep)
    monkeypatch.setattr("gangq.watchdogs.trip.report", lambda *_: "held")
    assert path(Trip(ExitCode.STALL, "idle", "no beat"), job_id=1, token=1) is False
    disk_answers.set()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "gangq-trip"])
    assert kept[-1] is None


def test_the_error_that_is_kept_names_type_reason_and_code() -> None:
    error = error_of(Trip(ExitCode.FAULT, "xid", "device GPU-1: xid 79: reboot"), {})
    assert (error["type"], error["reason"], error["code"]) == ("DeviceFault", "xid", 85)


@pytest.mark.parametrize("junk", [{"deadline_s": 0}, {"deadline_s": "5"}])
def test_settings_that_make_no_sense_are_refused(junk: Row) -> None:
    with pytest.raises(InvalidInput, match=next(iter(junk))):
        TripPath("dbname=x", 1, **junk)
    with pytest.raises(InvalidInput, match="cannot be parsed"):
        TripPath("post gres://", 1)


@pytest.mark.parametrize(
    ("trip", "evidence", "said"),
    [
        (
            Trip(
                ExitCode.STALL,
                "idle",
                "no beat for 126.0 s",
                {
                    "silence_s": 126.0,
                    "window": {"samples": 3, "devices": [{"gpu_pct": 0}, {"gpu_pct": None}]},
                },
            ),
            {"place": "recv() of allreduce at train.py:88"},
            "waited 126 s in recv() of allreduce at train.py:88; GPU 0 %, 3 looks",
        ),
        (
            Trip(ExitCode.STALL, "spin", "no beat", {"silence_s": 360.2, "window": {"samples": 5}}),
            {"place": "step at train.py:3"},
            "made no progress for 360 s in step at train.py:3; 5 looks",
        ),
        (
            Trip(
                ExitCode.HEALTH,
                "idle",
                "nothing",
                {"quiet_s": 300, "window": {"devices": [{"gpu_pct": None}]}},
            ),
            {"place": "read() of load at data.py:1"},
            "waited 300 s in read() of load at data.py:1; GPU unknown",
        ),
        (
            Trip(ExitCode.BUDGET, "budget", "it ran for 9 s, its budget is 8 s"),
            {"place": "step at train.py:3"},
            "it ran for 9 s, its budget is 8 s; it was in step at train.py:3",
        ),
        (Trip(ExitCode.STALL, "idle", "no beat for 126.0 s"), {}, "no beat for 126.0 s"),
    ],
)
def test_a_trip_is_told_in_one_sentence_of_what_was_seen(
    trip: Trip, evidence: dict[str, str], said: str
) -> None:
    assert error_of(trip, evidence)["message"] == said
