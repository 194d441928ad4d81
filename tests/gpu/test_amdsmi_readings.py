"""What an AMD device says: the true amdsmi binding over a scripted libamd_smi.so."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.gpu import detect
from gangq.gpu.reading import VALUES
from gangq.gpu.rocm_readings import AmdsmiReader, _Card
from gangq.proc.clock import boottime
from gpu.gpu_fakes import (
    both_set_and_unknown,
    card,
    eventually,
    neither_set_nor_unknown,
    read,
    rewrite,
    sampling,
    text,
)

Script = Callable[..., dict[str, str]]
A = f"GPU-{'a' * 16}"
OWN, NEIGHBOUR = os.getpid(), os.getppid()
BUSY = {
    "gfx": 55,
    "umc": 20,
    "used_mib": 512,
    "steps": 2_000_000,
    "watts": 150,
    "celsius": 45,
    "megabits": 8,
    "ecc": 3,
    "prochot": 1,
}


def script(**fields: object) -> str:
    return card("a", 0, **fields) + "\n"


def test_every_value_is_read_in_its_unit(fake_amdsmi: Script) -> None:
    ((reading, notices),) = read(fake_amdsmi(), A, script(**BUSY, pids=f"{OWN}:5"), pids=[OWN])
    assert notices == []
    assert reading.unknown == {"recovery_action": "not_supported"}
    assert (reading.gpu_pct, reading.gpu_scope, reading.memory_pct) == (55.0, "device", 20.0)
    assert (reading.used_mb, reading.total_mb, reading.own_mb) == (512, 196592, 64)
    assert (reading.energy_mj, reading.pcie_kb_s, reading.power_w) == (31_000, 1000, 150.0)
    assert (reading.temperature_c, reading.ecc_uncorrectable) == (45, 3)
    # Its power limit holds the clocks down as well (ppt), which is how these cards run.
    assert reading.throttle == ("hw_thermal",)


def test_what_the_library_calls_not_available_is_unknown(fake_amdsmi: Script) -> None:
    (reading, _), (zero, _) = read(
        fake_amdsmi(), A, script(gfx=65535, umc=65535, watts=65535), script(watts=0)
    )
    assert (zero.power_w, zero.unknown["power_w"]) == (None, "not_available")
    assert (reading.gpu_pct, reading.gpu_scope, reading.memory_pct, reading.power_w) == (None,) * 4
    assert {reading.unknown[name] for name in ("gpu_pct", "memory_pct", "power_w")} == {"not_available"}


CALLS = {
    "activity": {"gpu_pct", "memory_pct"},
    "vram": {"used_mb", "total_mb"},
    "processes": {"own_mb"},
    "energy": {"energy_mj"},
    "power": {"power_w"},
    "pcie": {"pcie_kb_s"},
    "ecc": {"ecc_uncorrectable"},
    "violations": {"throttle"},
}
REASONS = {2: "not_supported", 3: "not_supported", 8: "timeout", 10: "no_permission"}


def test_every_error_of_every_call_is_an_unknown_with_a_reason_and_never_a_number(
    fake_amdsmi: Script,
) -> None:
    # Throttling is looked at in every tenth round only, the first one included.
    cases = [(call, code) for call in CALLS if call != "violations" for code in (*range(1, 57), 4294967295)]
    scripts = [script(**BUSY, pids=f"{OWN}:1", fail=f"{call}:{code}") for call, code in cases]
    scripts.insert(0, script(**BUSY, pids=f"{OWN}:1", fail="violations:2"))
    (first, _), *rest = read(fake_amdsmi(), A, *scripts, pids=[OWN])
    assert first.unknown["throttle"] == "not_supported"
    for (call, code), (reading, notices) in zip(cases, rest, strict=True):
        assert CALLS[call] <= set(reading.unknown), (call, code)
        for name in CALLS[call]:
            assert getattr(reading, name) is None, (call, code)
            assert reading.unknown[name].startswith(REASONS.get(code, "f")), (call, code)
        # One failed call proves nothing about the card.
        assert notices == [], (call, code)


def test_every_value_is_set_or_has_a_reason_whichever_call_fails(fake_amdsmi: Script) -> None:
    calls = ["", *(f"{call}:2" for call in (*CALLS, "all"))]
    scripts = [script(**BUSY, pids=f"{OWN}:1", fail=call) for call in calls]
    shared = script(**BUSY, pids=f"{NEIGHBOUR}:1")
    not_available = script(gfx=65535, umc=65535, watts=65535)
    for reading, _ in read(fake_amdsmi(), A, *scripts, shared, not_available, pids=[OWN]):
        assert (neither_set_nor_unknown(reading), both_set_and_unknown(reading)) == (set(), set()), reading


@pytest.mark.parametrize("known", [{"mem": 64 << 20}, {"engine_usage": {"gfx": 7}}])
def test_what_is_not_available_of_one_process_leaves_the_rest_of_the_card_known(
    known: dict[str, Any],
) -> None:
    reader = AmdsmiReader({})
    reader._cards[A] = _Card(1)
    row = {"pid": OWN, "mem": "N/A", "engine_usage": {"gfx": "N/A"}} | known
    reader._smi = SimpleNamespace(
        amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": 40, "umc_activity": 5},
        amdsmi_get_gpu_process_list=lambda handle: [row],
    )
    reading, notices = reader.read(A, [OWN])
    assert (reading.gpu_pct, reading.gpu_scope, reading.memory_pct, notices) == (40.0, "device", 5.0, [])
    assert not {"gpu_pct", "memory_pct"} & set(reading.unknown)
    assert reading.own_mb == (64 if "mem" in known else None)
    assert reading.unknown.get("own_mb") == (None if "mem" in known else "not_available")


def test_the_edge_sensor_stands_in_for_the_hot_spot(fake_amdsmi: Script) -> None:
    (edge, _), (none, _) = read(
        fake_amdsmi(), A, script(celsius=50, fail="hotspot:2"), script(fail="hotspot:2;edge:2")
    )
    assert edge.temperature_c == 50
    assert none.unknown["temperature_c"] == "not_supported"


@pytest.mark.parametrize("code", [6, 31])
def test_a_card_on_which_every_call_fails_like_that_is_lost(fake_amdsmi: Script, code: int) -> None:
    _, (reading, notices), (busy, told) = read(
        fake_amdsmi(), A, script(**BUSY), script(fail=f"all:{code}"), script(fail="all:7")
    )
    assert notices == [(A, "lost", code)]
    # Not one value is left over from an earlier round: it would say that the card answers.
    assert set(reading.unknown) == set(VALUES)
    assert busy.gpu_pct is None
    assert told == []


@pytest.mark.parametrize("call", ["asic", "total", "enumeration"])
def test_a_card_that_did_not_say_who_it_is_when_the_driver_was_opened_is_found_later(
    fake_amdsmi: Script, call: str
) -> None:
    # Without a serial number only the enumeration tells its UUID; without that it is named by its place.
    consumer = {"serial": ""} if call == "enumeration" else {}
    busy = [script(**consumer, fail=f"{call}:{code}") for code in (30, 8, 4294967295, 6)]
    *failed, (found, none) = read(fake_amdsmi(), A, *busy, script(**consumer, gfx=5))
    for reading, notices in failed:
        assert notices == []
        assert set(reading.unknown) == set(VALUES)
    assert (found.gpu_pct, none) == (5, [])


def test_a_missing_card_is_lost_only_where_no_listed_card_can_be_it(fake_amdsmi: Script) -> None:
    other = card("b", 1)
    cases = {
        # Everything that is listed is somebody else.
        text([other]): [(A, "lost", None)],
        # One that says nothing but that it is lost is the missing one, one that is busy may be.
        text([other, card("a", 0, fail="all:31")]): [(A, "lost", 31)],
        text([other, card("a", 0, fail="all:30")]): [],
        text([card("b", 1, fail="all:30")]): [],
        text([other, card("c", 2, serial="", hip_uuid="")]): [],
    }
    for listed, expected in cases.items():
        ((reading, notices),) = read(fake_amdsmi(), A, listed)
        assert (notices, reading.gpu_pct) == (expected, None)
    # The list has become empty since the driver was opened.
    (_, (_, notices)) = read(fake_amdsmi(), A, text([card("a", 0, fail="asic:30")]), "")
    assert notices == [(A, "lost", None)]


def test_a_card_that_was_found_late_is_listened_to(fake_amdsmi: Script) -> None:
    environ = fake_amdsmi(card("a", 0))
    found = detect(environ=environ)
    script_file = Path(environ["FAKE_AMDSMI"])
    rewrite(script_file, card("a", 0, fail="asic:30"))
    with sampling(environ, found) as sampler:
        eventually(lambda: A in sampler.readings())
        rewrite(script_file, card("a", 0, used_mib=4))
        eventually(lambda: sampler.readings()[A].used_mb == 4)
        # It is asked for its events again within five rounds.
        readings = len(sampler.history(A, 0))
        eventually(lambda: len(sampler.history(A, 0)) > readings + 5)
        rewrite(script_file, card("a", 0, event="1:1"))
        (event,) = eventually(lambda: sampler.events(0))
        assert (event.uuid, event.kind) == (A, "page_fault")


def test_an_own_process_is_read_by_itself_once_its_engine_time_has_moved(fake_amdsmi: Script) -> None:
    both = f"{NEIGHBOUR}:9000"
    scripts = [script(gfx=97, pids=f"{OWN}:{ms};{both}") for ms in (100, 100, 100_000, 100_000)]
    readings = [reading for reading, _ in read(fake_amdsmi(), A, *scripts, pids=[OWN])]
    # Engine time that stands at the same number from the start may be one that this card never counts.
    assert [(r.gpu_pct, r.gpu_scope) for r in readings] == [
        (None, None),
        (None, None),
        (100.0, "process"),
        (0.0, "process"),
    ]
    assert readings[0].unknown["gpu_pct"] == "no_own_process"


@pytest.mark.parametrize(
    ("number", "kind", "fatal", "application"),
    [(1, "page_fault", False, True), (3, "reset", True, False), (4, "reset", False, False)],
)
def test_the_drivers_notifications_arrive_within_a_second(
    fake_amdsmi: Script, number: int, kind: str, fatal: bool, application: bool
) -> None:
    environ = fake_amdsmi(card("a", 0), card("b", 1))
    with sampling(environ, detect(environ=environ), poll_s=5.0) as sampler:
        eventually(lambda: len(sampler.readings()) == 2)
        before = boottime()
        rewrite(Path(environ["FAKE_AMDSMI"]), card("a", 0), card("b", 1, event=f"1:{number}"))
        (event,) = eventually(lambda: sampler.events(0))
        assert event.at - before < 1.0
        assert (event.uuid, event.kind, event.code) == (f"GPU-{'b' * 16}", kind, number)
        assert (event.fatal, event.application) == (fatal, application)


def test_growing_ecc_errors_a_hang_and_the_restriction_are_found_through_the_sampler(
    fake_amdsmi: Script,
) -> None:
    environ = fake_amdsmi(card("a", 0, used_mib=1, ecc=1), card("b", 1, used_mib=2), ROCR_VISIBLE_DEVICES="0")
    state = Path(environ["FAKE_AMDSMI"])
    with sampling(environ, detect(environ=environ), deadline_s=0.7) as sampler:
        eventually(lambda: {r.used_mb for r in sampler.readings().values()} == {1})
        rewrite(state, card("a", 0, ecc=4), card("b", 1))
        (event,) = eventually(lambda: sampler.events(0))
        assert (event.uuid, event.kind, event.code, event.fatal) == (A, "ecc", 3, True)
        rewrite(state, card("a", 0, ecc=4, hang="vram"), card("b", 1))
        (hang,) = eventually(lambda: sampler.events(event.at))
        assert (hang.uuid, hang.kind) == (A, "driver_hang")


def test_engine_time_that_moved_for_an_earlier_job_is_no_zero_for_the_next_one() -> None:
    reader, seen = AmdsmiReader({}), _Card(handle=None)

    def look(at: float, engine_ns: int, own: set[int]) -> float | None:
        return reader._own_utilisation(seen, [{"pid": 71, "engine_usage": {"gfx": engine_ns}}], own, at)

    assert look(1.0, 0, {71}) is None
    assert look(2.0, 10**9, {71}) == 100
    assert look(3.0, 10**9, {71}) == 0
    # It ends, and its number is given to a process of the next job.
    assert look(4.0, 0, set()) is None
    assert [look(at, 0, {71}) for at in (5.0, 6.0)] == [None, None]
    assert look(7.0, 5 * 10**8, {71}) == 50
