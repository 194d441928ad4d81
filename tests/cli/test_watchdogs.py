"""What the watchdogs did and saw, from the command line: trips, show, devices, workers, task, doctor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cli.cli_process import answers, gangq, objects, ok, running
from gangq.client import Client
from gangq.client.rows import Claim
from gangq.watchdogs import evidence as evidence_of

Db = psycopg.Connection[dict[str, Any]]

_READING = {
    "gpu_pct": 97.5,
    "used_mb": 20480,
    "total_mb": 24576,
    "temperature_c": 0,
    "power_w": 312.4,
    "throttle": ["hw_thermal"],
    "unknown": {},
}
_BLIND = {
    "gpu_pct": None,
    "used_mb": None,
    "total_mb": 24576,
    "throttle": [],
    "unknown": {"gpu_pct": "not_supported", "used_mb": "timeout", "throttle": "not_supported"},
}


@dataclass
class Fleet:
    """Workers of the host h1 that the test itself plays, each with one device that a driver vouches for."""

    client: Client

    def start(self, name: str, queue: str = "default", host: str = "h1", source: str = "nvml") -> int:
        device = {"uuid": f"GPU-{name}", "index": 0, "vram_mb": 24576, "model": "L4", "source": source}
        options: dict[str, Any] = {"queues": [queue], "devices": [device]}
        return self.client.register_worker(name=name, host=host, **options).incarnation

    def claim(self, incarnation: int, **more: Any) -> Claim:
        self.client.tick(force=True)  # What asks for a device is claimed once a pass has placed it.
        return self.client.claim(incarnation=incarnation, **more)[0]

    def run(self, name: str, task: str = "train", **more: Any) -> tuple[int, Claim]:
        """A new worker, and a new job of its own queue that it runs."""
        self.client.set_queue(name=name)
        job = self.client.submit(task=task, gpus=1, queue=name, **more)[0]
        incarnation = self.start(name, queue=name)
        claim = self.claim(incarnation)
        assert claim.job_id == job
        return incarnation, claim

    def trip(self, incarnation: int, claim: Claim, code: int = 76, **more: Any) -> str:
        error = {"type": "idle", "message": f"no beat for 130.0 s ({code})"}
        given = {"evidence": {"silence_s": 130.0}, **more}
        return self.client.trip(
            incarnation=incarnation, job_id=claim.job_id, token=claim.token, code=code, error=error, **given
        )

    def beat(self, incarnation: int, claim: Claim, beat: dict[str, Any]) -> None:
        self.client.heartbeat(
            incarnation=incarnation, job_ids=[claim.job_id], tokens=[claim.token], beats=[beat]
        )


@pytest.fixture
def fleet(client: Client) -> Fleet:
    return Fleet(client)


def seen() -> dict[str, Any]:
    """Evidence as a stall watchdog leaves it; threads and stacks are this process's."""

    def reading(at: float, **more: Any) -> dict[str, Any]:
        return {"uuid": "GPU-w1", "at": at, "gpu_pct": 0.0, "scope": "device", "power_w": None, **more}

    more = {
        "silence_s": 130.0,
        "due_s": 120.0,
        "last_beat": {"number": 9, "at": 5000.0, "step": 41, "total": 400, "phase": "run", "loss": 0.25},
        "why": "the devices were quiet and nothing moved in 10.1 s",
        "window": {
            "window_s": 10.1,
            "samples": 5,
            "host": [{"moved": False, "why": "nothing moved", "io_bytes": 0}],
            "devices": [reading(5120.0), reading(5130.0, unknown={"power_w": "not_supported"})],
            "calibrated": ["GPU-w1"],
        },
        "something_else": [{"written_by": "another language"}],
    }
    return evidence_of.collect(own=True, log_tail=lambda: "step 40\nstep 41\n\x1b[2Jlast words\n") | more


def column(table: str, title: str) -> list[str]:
    """The cells of an aligned table below a title: what is blank in every line is between two columns."""
    lines = table.splitlines()
    width = max(map(len, lines))
    padded = [line.ljust(width) for line in lines]
    filled = "".join(" " if all(line[n] == " " for line in padded) else "x" for n in range(width))
    for found in re.finditer(r"x+( x+)*", filled):
        begin, end = found.span()
        if padded[0][begin:end].strip() == title:
            return [line[begin:end].strip() for line in padded[1:]]
    raise AssertionError(f"no column {title}:\n{table}")


def row(table: str, title: str, value: str) -> str:
    """The line whose cell below `title` is `value`."""
    return next(
        line for line, cell in zip(table.splitlines()[1:], column(table, title), strict=True) if cell == value
    )


# gangq trips ------------------------------------------------------------------------------------------------


def test_trips_are_listed_newest_first_with_their_word_and_what_became_of_the_job(
    dsn: str, fleet: Fleet, clock: Any
) -> None:
    fleet.client.set_task(task="render", notify_only=["budget"])
    stalled = fleet.run("w1")
    fleet.trip(*stalled, exit_in_s=5)
    clock.advance(10)
    rendering = fleet.run("w2", task="render")
    assert fleet.trip(*rendering, code=75, exit_in_s=5) == "notify"
    text = ok(dsn, "trips")
    assert column(text, "CODE") == ["75 budget", "76 stall"]
    assert column(text, "OUTCOME") == ["notify", "scheduled"]
    assert "w1" in row(text, "CODE", "76 stall")
    newest, oldest = answers(dsn, "trips")
    assert (newest["code"], newest["class"], newest["outcome"]) == (75, "budget", "notify")
    assert (oldest["job_id"], oldest["devices"], oldest["trips"]) == (stalled[1].job_id, ["GPU-w1"], 1)
    assert answers(dsn, "trips", "--limit", "1") == [newest]


def test_trips_are_found_by_code_class_task_device_host_and_age(dsn: str, fleet: Fleet, clock: Any) -> None:
    fleet.trip(*fleet.run("w1", task="a"), code=76)
    clock.advance(100)
    fleet.trip(*fleet.run("w2", task="b"), code=75)
    (first, second) = ([f"{trip['code']}"] for trip in reversed(answers(dsn, "trips")))

    def found(*options: str) -> list[str]:
        return [str(trip["code"]) for trip in answers(dsn, "trips", *options)]

    assert found("--code", "75") == found("--class", "budget") == found("--task", "b") == second
    assert found("--device", "GPU-w1") == found("--class", "stall") == found("--task", "a") == first
    assert found("--since", "50s") == second
    assert len(found("--host", "h1")) == 2
    result = gangq(dsn, "trips", "--host", "h1", "--code", "78")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no such trips within" in result.stderr
    assert "'slow' is not one of" in gangq(dsn, "trips", "--class", "slow").stderr


def test_what_was_seen_of_a_trip_comes_only_when_asked_for(dsn: str, fleet: Fleet) -> None:
    fleet.trip(*fleet.run("w1"), evidence=seen())
    assert answers(dsn, "trips")[0]["evidence"] is None
    assert answers(dsn, "trips", "--evidence")[0]["evidence"]["silence_s"] == 130
    text = ok(dsn, "trips", "--evidence")
    assert text.startswith("job 1 at ")
    assert "76 stall, idle -> pending" in text
    assert "log_tail:" in text
    assert "log_tail:" not in ok(dsn, "trips")


# gangq show -------------------------------------------------------------------------------------------------


def test_a_job_that_tripped_shows_what_was_seen_as_json_and_the_stacks_below_it(
    dsn: str, fleet: Fleet
) -> None:
    incarnation, claim = fleet.run("w1")
    fleet.client.suspect(
        incarnation=incarnation,
        job_id=claim.job_id,
        token=claim.token,
        class_="stall",
        evidence={"message": "no beat for 120.4 s"},
    )
    fleet.trip(incarnation, claim, evidence=seen())
    text = ok(dsn, "show", claim.job_id, "--evidence")
    place = 0
    for word in (
        "state     ",
        "error  idle: no beat for 130.0 s (76)",
        "suspect  stall",
        "trip     stall",
        "trip at ",
        "handler:",
        "\n{\n",
        "\n}\n",
        "stacks:",
        "log_tail:",
        "step 41",
    ):
        assert word in text[place:], f"{word!r} is missing, or too early:\n{text}"
        place = text.index(word, place)
    assert "no beat for 120.4 s" in text
    assert "test_watchdogs.py" in text  # this test's own frame, in the stacks
    assert "\x1b" not in text
    assert "\N{REPLACEMENT CHARACTER}[2Jlast words" in text
    (shown,) = answers(dsn, "show", claim.job_id)
    stored = shown["evidence"][1]["data"]
    printed = json.loads(text[text.index("\n{\n") : text.index("\n}\n") + 3])
    assert printed == {key: value for key, value in stored.items() if key in printed}
    assert stored.keys() - printed == {"handler", "stacks", "log_tail"}
    assert (
        '      {"at": 5120.0, "uuid": "GPU-w1", "scope": "device", "gpu_pct": 0.0, "power_w": null},' in text
    )
    assert [one["kind"] for one in shown["evidence"]] == ["suspect", "trip"]
    assert stored["last_beat"]["step"] == 41
    assert {event["kind"] for event in shown["events"]} >= {"suspect", "trip"}


def test_a_trip_is_shown_by_its_sentence_and_the_handlers_stack_and_the_rest_on_request(
    dsn: str, fleet: Fleet
) -> None:
    incarnation, claim = fleet.run("w1")
    said = "waited 126 s in recv() of allreduce at train.py:88; GPU 0 %, 3 looks"
    fleet.client.trip(
        incarnation=incarnation,
        job_id=claim.job_id,
        token=claim.token,
        code=76,
        error={"type": "Stalled", "message": said},
        evidence={**seen(), "handler": 'File "train.py", line 88, in step\n    allreduce(x)\n'},
    )
    lines = ok(dsn, "show", claim.job_id).splitlines()
    assert "trips      1 (3 are sent back, number 4 ends the job)" in lines
    first = next(n for n, line in enumerate(lines) if line.startswith("trip at "))
    assert lines[first + 1 :] == [
        f"job {claim.job_id} {said}",
        "handler:",
        '  File "train.py", line 88, in step',
        "      allreduce(x)",
        "",
        f"all that was seen: gangq show {claim.job_id} --evidence",
    ]
    for command in (["show", claim.job_id, "--evidence"], ["trips", "--evidence"]):
        whole = ok(dsn, *command)
        assert whole.count("\nhandler:\n") == whole.count("      allreduce(x)\n") == 1, command


def test_evidence_that_is_nested_deeply_is_printed_and_what_is_deep_in_it_in_one_line(
    dsn: str, db: Db, fleet: Fleet
) -> None:
    fleet.trip(*fleet.run("w1"), evidence={"why": "quiet"})
    deep = '{"a": [' * 350 + "1" + "]}" * 350
    db.execute("update gangq.evidence set data = data || jsonb_build_object('deep', %s::jsonb)", [deep])
    for command in (["show", 1, "--evidence"], ["trips", "--evidence"]):
        text = ok(dsn, *command)
        assert json.loads(text[text.index("\n{\n") : text.index("\n}\n") + 3])["deep"] == json.loads(deep)
        assert len(text) < 10_000


def test_the_latest_trip_is_on_top_and_one_that_stopped_nothing_is_shown_too(
    dsn: str, fleet: Fleet, clock: Any
) -> None:
    incarnation, claim = fleet.run("w1")
    fleet.trip(incarnation, claim, evidence={"note": "the first one"})
    clock.advance(5)
    fleet.client.configure(notify_only=["budget"])
    again = fleet.claim(incarnation)
    fleet.trip(incarnation, again, code=75, exit_in_s=5, evidence={"note": "the second one"})
    text = ok(dsn, "show", claim.job_id, "--evidence")
    assert text.index("the second one") < text.index("the first one")
    assert "\nnotify at " in text


def test_a_doubt_that_is_not_settled_shows_what_was_seen(dsn: str, fleet: Fleet) -> None:
    incarnation, claim = fleet.run("w1")
    words = {"job_id": claim.job_id, "token": claim.token, "class_": "health"}
    fleet.client.suspect(incarnation=incarnation, **words, evidence={"message": "idle", "quiet_s": 61.0})
    assert '{\n  "quiet_s": 61.0\n}\n' in ok(dsn, "show", claim.job_id, "--evidence")


def test_a_viewer_sees_that_it_tripped_but_neither_stacks_nor_output(dsn: str, db: Db, fleet: Fleet) -> None:
    incarnation, claim = fleet.run("w1")
    fleet.trip(incarnation, claim, evidence=seen())
    db.execute("create role only_looks login in role gangq_viewer")
    try:
        theirs = dsn.replace("postgres@", "only_looks@")
        result = gangq(theirs, "show", claim.job_id)
        assert result.exit_code == 0
        assert "trip  stall" in result.stdout
        assert "is shown to those who may read" in result.stderr
        for secret in ("stacks", "last words", "silence"):
            assert secret not in result.stdout
        assert answers(theirs, "show", claim.job_id)[0]["evidence"] is None
        assert answers(theirs, "trips", "--evidence")[0]["evidence"] is None
        assert "is shown to those who may read" in gangq(theirs, "trips", "--evidence").stderr
    finally:
        db.execute("drop role only_looks")


def test_a_gang_says_which_of_its_members_tripped(dsn: str, fleet: Fleet) -> None:
    client = fleet.client
    gang = client.submit_gang(task="train", size=2, gpus=1)
    workers = [fleet.start(name) for name in ("w1", "w2")]
    client.tick(force=True)
    claims = [fleet.claim(worker) for worker in workers]
    assert fleet.trip(workers[1], claims[1]) == "preempted"
    text = ok(dsn, "show", f"g{gang.gang_id}")
    assert f"what the watchdogs saw: gangq show {claims[1].job_id}" in text
    assert answers(dsn, "trips")[0]["rank"] == claims[1].rank
    of_member = ok(dsn, "show", claims[1].job_id).splitlines()
    assert f"rank {claims[1].rank} of g{gang.gang_id}: no beat for 130.0 s (76)" in of_member


def test_a_job_that_never_tripped_shows_none_of_this(dsn: str, fleet: Fleet) -> None:
    _, claim = fleet.run("w1")
    assert "CLASS" not in ok(dsn, "show", claim.job_id)
    assert answers(dsn, "show", claim.job_id)[0]["evidence"] == []


# gangq devices, gangq workers -------------------------------------------------------------------------------


def test_devices_show_their_latest_reading_its_age_and_a_question_mark_for_what_nobody_knows(
    dsn: str, fleet: Fleet, clock: Any
) -> None:
    for name, data in (("w1", _READING), ("w2", _BLIND), ("w3", None)):
        readings = None if data is None else [{"uuid": f"GPU-{name}", **data}]
        fleet.client.heartbeat(incarnation=fleet.start(name), readings=readings)
    clock.advance(20)
    text = ok(dsn, "devices")
    cells = {
        uuid: [column(text, title)[n] for title in ("BUSY", "MEMORY", "TEMP", "POWER", "THROTTLE", "READ")]
        for n, uuid in enumerate(column(text, "UUID"))
    }
    # A temperature of 0 is what the driver says; nothing else here is.
    assert cells["GPU-w1"] == ["97.5%", "20GiB/24GiB", "0C", "312.4W", "hw_thermal", "20s"]
    assert cells["GPU-w2"] == ["?", "?", "?", "?", "?", "20s"]
    assert cells["GPU-w3"] == ["?", "?", "?", "?", "?", "never"]
    assert column(text, "HEALTH") == ["degraded", "ok", "ok"]
    found = {device["uuid"]: device for device in answers(dsn, "devices")}
    assert found["GPU-w1"]["reading"]["gpu_pct"] == 97.5
    assert (found["GPU-w3"]["reading"], found["GPU-w3"]["read_at"]) == (None, None)


def test_devices_show_which_ones_of_a_worker_are_joined(dsn: str, client: Client) -> None:
    devices = [{"uuid": f"GPU-{n}", "index": n, "vram_mb": 24576, "source": "nvml"} for n in range(3)]
    for device in devices[1:]:
        device["link"] = "GPU-1"
    client.register_worker(name="w1", host="h1", queues=["default"], devices=devices)
    assert column(ok(dsn, "devices"), "LINK") == ["", "1", "1"]
    assert [device["link"] for device in answers(dsn, "devices")] == [None, 1, 1]


def test_devices_show_trips_and_why_they_are_withheld(dsn: str, fleet: Fleet) -> None:
    incarnation, claim = fleet.run("w1")
    fleet.trip(incarnation, claim, exit_in_s=5)
    fleet.trip(*fleet.run("w2"), code=85, devices=["GPU-w2"])
    text = ok(dsn, "devices")
    assert column(text, "HEALTH") == ["exiting", "quarantined"]
    assert column(text, "TRIPS") == ["1", "1"]
    assert "is exiting after a trip (76)" in text
    assert "fault under job" in text


def test_workers_show_the_last_beat_the_model_how_busy_they_are_and_why_they_are_no_use(
    dsn: str, fleet: Fleet, clock: Any
) -> None:
    job = fleet.client.submit(task="train", gpus=1, model="llama")[0]
    busy = fleet.start("busy")
    claim = fleet.claim(busy, model="llama")
    assert claim.job_id == job
    fleet.beat(busy, claim, {"step": 1})
    clock.advance(4)
    fleet.beat(busy, claim, {"step": 3})
    fleet.client.heartbeat(incarnation=busy, readings=[{"uuid": "GPU-busy", **_READING}])
    exiting = fleet.run("exiting")
    fleet.trip(*exiting, exit_in_s=5)
    stuck = fleet.start("stuck")
    fleet.client.report_stuck(worker="stuck", incarnation=stuck, evidence={"pid": 4711})
    clock.advance(40)
    fleet.client.tick(force=True)
    text = ok(dsn, "workers")
    line = row(text, "NAME", "busy")
    assert column(text, "BEAT")[column(text, "NAME").index("busy")] == "40s"
    assert column(text, "STEPS/S")[column(text, "NAME").index("busy")] == "0.5"
    assert "llama" in line
    assert column(text, "GPU")[column(text, "NAME").index("busy")] == "97.5%"
    assert column(text, "GPU")[column(text, "NAME").index("stuck")] == "?"
    assert "silent for 40s while it holds jobs: gangq bounce --once on h1" in line
    assert "exiting after a trip (76)" in row(text, "NAME", "exiting")
    assert "process 4711 cannot be killed: reboot host h1" in row(text, "NAME", "stuck")
    found = {worker["name"]: worker for worker in answers(dsn, "workers")}
    assert (found["busy"]["model"], found["busy"]["state"]) == ("llama", "silent")
    assert (found["exiting"]["exit_code"], found["stuck"]["reboot_needed"]) == (76, True)


def test_a_reading_that_has_grown_old_says_nothing_about_how_busy_a_worker_is(
    dsn: str, fleet: Fleet, clock: Any
) -> None:
    fleet.client.heartbeat(incarnation=fleet.start("w1"), readings=[{"uuid": "GPU-w1", **_READING}])
    assert column(ok(dsn, "workers"), "GPU") == ["97.5%"]
    clock.advance(61)
    assert column(ok(dsn, "workers"), "GPU") == ["?"]


# gangq task, --model, --phase -------------------------------------------------------------------------------


def test_numbers_of_a_task_are_set_shown_kept_and_forgotten(dsn: str, client: Client) -> None:
    times = {
        "budget": "2h",
        "stall-timeout": "5m",
        "load-grace": "30m",
        "health-window": "10m",
        "long-phase": "2h",
    }
    options = [f"--{name}={length}" for name, length in times.items()]
    ok(dsn, "task", "set", "train", *options, "--notify", "stall", "--notify", "gang")
    (task,) = client.tasks(task="train")
    assert (task.budget_s, task.stall_timeout_s, task.load_grace_s) == (7200, 300, 1800)
    assert (task.health_window_s, task.long_phase_s, task.notify_only) == (600, 7200, ["stall", "gang"])
    made = answers(dsn, "task", "set", "train", "--notify", "none")
    assert (made[0]["task"], made[0]["notify_only"], made[0]["budget_s"]) == ("train", [], 7200)
    client.learn_gap(task="train", device_class="L4", longest_s=40, beats=900)
    client.learn_gap(task="other", device_class="", longest_s=1, beats=9)
    text = ok(dsn, "task", "list")
    assert column(text, "TASK") == ["other", "train"]
    assert column(text, "STALL TIMEOUT") == ["learned", "5m00s"]
    assert column(text, "NOTIFY ONLY") == ["-", "none"]
    assert column(text, "LONGEST GAP") == ["1.0s", "40s"]
    assert [t["device_class"] for t in answers(dsn, "task", "list")] == ["", "L4"]
    ok(dsn, "task", "set", "train", "--forget", "--budget", "60")
    (task,) = client.tasks(task="train")
    assert (task.budget_s, task.stall_timeout_s, task.device_class) == (60, None, None)
    assert "numbers of the installation" in ok(dsn, "task", "set", "train", "--forget")
    assert client.tasks(task="train") == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train"], "nothing to change"),
        (["train", "--notify", "none", "--notify", "stall"], "every class acts"),
        (["train", "--notify", "memory"], "'memory' is not one of"),
        (["train", "--budget", "soon"], "'soon' is no length of time"),
        (["train", "--budget", "0"], "train"),
        (["", "--budget", "1"], "1 to 200 characters"),
    ],
)
def test_junk_numbers_of_a_task_are_refused_by_name(dsn: str, args: list[str], said: str) -> None:
    result = gangq(dsn, "task", "set", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_model_is_submitted_with_a_job_and_with_a_gang(dsn: str, client: Client) -> None:
    job = int(ok(dsn, "submit", "a", "--model", "llama"))
    ok(dsn, "submit", "a", "--model", "llama", "--gang", "2")
    ran = ok(dsn, "run", "--model", "whisper", "--detach", "--", "true")
    assert client.job(id=job).model == "llama"
    assert {member.model for member in client.jobs(gang_id=1)} == {"llama"}
    assert client.job(id=int(ran)).model == "whisper"
    assert "model      llama" in ok(dsn, "show", job)


def test_the_help_of_beat_names_the_phases() -> None:
    text = ok(None, "beat", "--help")
    assert all(phase in text for phase in ("load", "run", "save", "long"))


def test_gangq_run_tells_what_the_watchdogs_do(dsn: str, fleet: Fleet, tmp_path: Path) -> None:
    incarnation = fleet.start("w1")
    with running(dsn, tmp_path, "run", "run", "--", "true") as run:
        run.until(lambda: fleet.client.jobs(state="pending"), "it is submitted")
        claim = fleet.claim(incarnation)
        words = {"job_id": claim.job_id, "token": claim.token, "evidence": {"reason": "no beat for 121 s"}}
        fleet.client.suspect(incarnation=incarnation, class_="stall", **words)
        run.until(lambda: "is suspected (stall): no beat for 121 s" in run.err, "the doubt is told")
        fleet.trip(incarnation, claim)
        said = "tripped a watchdog (stall): no beat for 130.0 s (76)"
        run.until(lambda: said in run.err, "the trip is told")
        run.interrupt()
        assert run.code() == 130


# gangq doctor -----------------------------------------------------------------------------------------------


@pytest.fixture
def check(dsn: str) -> Callable[[str], dict[str, Any]]:
    """One finding of the doctor."""

    def look(name: str) -> dict[str, Any]:
        found = {one["check"]: one for one in objects(gangq(dsn, "doctor", "--json").stdout)}
        return found[name]

    return look


def test_the_doctor_finds_hosts_that_need_a_reboot(
    dsn: str, fleet: Fleet, check: Callable[[str], dict[str, Any]]
) -> None:
    assert check("reboot")["status"] == "ok"
    stuck = fleet.start("w1", host="h7")
    fleet.client.report_stuck(worker="w1", incarnation=stuck, evidence={"pid": 4711})
    found = check("reboot")
    assert found["status"] == "fail"
    assert "h7" in found["detail"]
    assert "gangq unquarantine --worker w1" in found["advice"]
    assert gangq(dsn, "doctor").exit_code == 1


def test_the_doctor_tells_quarantined_devices_from_those_that_wait_for_an_exit(
    fleet: Fleet, check: Callable[[str], dict[str, Any]]
) -> None:
    fleet.trip(*fleet.run("w1"), exit_in_s=5)
    assert (check("devices")["status"], "1 withheld" in check("devices")["detail"]) == ("ok", True)
    fleet.trip(*fleet.run("w2"), code=85, devices=["GPU-w2"])
    assert check("devices")["status"] == "warn"
    assert "fault under job" in check("devices")["detail"]


def test_the_doctor_finds_classes_that_only_notify(
    fleet: Fleet, check: Callable[[str], dict[str, Any]]
) -> None:
    fleet.client.set_task(task="own", notify_only=[])
    assert check("watchdogs")["status"] == "ok"
    fleet.client.set_task(task="train", notify_only=["fault"])
    found = check("watchdogs")
    assert (found["status"], "fault for task train" in found["detail"]) == ("warn", True)
    assert "gangq task set train --notify none" in found["advice"]
    fleet.client.configure(notify_only=["stall", "gang"])
    assert "stall, gang everywhere; fault for task train" in check("watchdogs")["detail"]


def test_the_doctor_finds_devices_that_no_watchdog_can_see(
    fleet: Fleet, clock: Any, check: Callable[[str], dict[str, Any]]
) -> None:
    # Declared devices have no driver to ask, and whoever declared them knows.
    fleet.start("declared", source="declared")
    seeing, blind = fleet.start("seeing"), fleet.start("blind")
    fleet.start("mute")
    assert check("sensors")["status"] == "ok"
    clock.advance(90)
    for incarnation, name, data in ((seeing, "seeing", _READING), (blind, "blind", _BLIND)):
        fleet.client.heartbeat(incarnation=incarnation, readings=[{"uuid": f"GPU-{name}", **data}])
    found = check("sensors")
    assert found["status"] == "warn"
    assert found["detail"].startswith("2 of 3 devices")
    assert "worker blind (not_supported)" in found["detail"]
    assert "worker mute (never read)" in found["detail"]


def test_the_doctor_counts_the_trips_of_a_day_by_class(
    fleet: Fleet, clock: Any, check: Callable[[str], dict[str, Any]]
) -> None:
    fleet.trip(*fleet.run("w0"), code=75)
    clock.advance(86401)
    assert check("trips")["status"] == "ok"
    fleet.trip(*fleet.run("w1"))
    fleet.trip(*fleet.run("w2"))
    fleet.client.configure(notify_only=["budget"])
    fleet.trip(*fleet.run("w3"), code=75, exit_in_s=5)
    found = check("trips")
    assert found["status"] == "warn"
    assert "tripped 3 times within a day: 2 stall, 1 notify (nothing was stopped)" in found["detail"]
