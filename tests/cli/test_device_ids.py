"""Ids of devices: as short as they may be on a terminal, whole everywhere else, and read back as they are written."""

from __future__ import annotations

import pytest

from cli.cli_process import answers, gangq, ok
from cli.terminal import Terminal, screen
from gangq.cli.which import shortest
from gangq.client import Client

FIRST = "GPU-5a0c2f1e-77aa-4a0f-9d3b-000000000001"
SECOND = "GPU-5a0c2f1e-91bb-4a0f-9d3b-000000000002"
THIRD = "GPU-e1f2a3b4-91bb-4a0f-9d3b-000000000003"


def test_as_much_of_an_id_as_no_other_has_and_twelve_characters_at_least() -> None:
    assert shortest([FIRST, SECOND, THIRD]) == {
        FIRST: "GPU-5a0c2f1e-7",
        SECOND: "GPU-5a0c2f1e-9",
        THIRD: "GPU-e1f2a3b4",
    }
    assert shortest(["GPU-w1", "GPU-w10", FIRST]) == {
        "GPU-w1": "GPU-w1",
        "GPU-w10": "GPU-w10",
        FIRST: "GPU-5a0c2f1e",
    }
    assert shortest([]) == {}


@pytest.fixture
def tripped(client: Client) -> int:
    """A job that tripped on the first device of three, of which the third is quarantined."""
    devices = [
        {"uuid": uuid, "index": n, "vram_mb": 1024, "source": "declared"}
        for n, uuid in enumerate((FIRST, SECOND, THIRD))
    ]
    row = client.register_worker(name="w1", host="h1", queues=["default"], slots=8, devices=devices)
    (job,) = client.submit(task="train", gpus=1)
    client.call("open_place", incarnation=row.incarnation, job_id=job)
    (claim,) = client.claim(incarnation=row.incarnation)
    client.trip(
        incarnation=row.incarnation,
        job_id=job,
        token=claim.token,
        code=76,
        error={"type": "idle"},
        evidence={},
    )
    client.quarantine(device_uuid=THIRD, reason="smells")
    return job


@pytest.mark.parametrize(
    ("words", "uuid", "short"),
    [
        ("devices", FIRST, "GPU-5a0c2f1e-7"),
        ("trips", FIRST, "GPU-5a0c2f1e-7"),
        ("show 1", FIRST, "GPU-5a0c2f1e-7"),
        ("events", THIRD, "GPU-e1f2a3b4"),
    ],
)
def test_a_terminal_shows_short_ids_and_wide_json_and_a_pipe_whole_ones(
    dsn: str, tripped: int, words: str, uuid: str, short: str
) -> None:
    words = words.replace("1", str(tripped))

    def printed(*more: str) -> str:
        terminal = Terminal(dsn, *words.split(), *more, columns=400)
        assert terminal.end() == 0
        return "\n".join(screen(terminal.said))

    on_terminal = printed()
    assert short in on_terminal
    assert uuid not in on_terminal
    assert uuid in printed("--wide")
    assert uuid in ok(dsn, *words.split())
    assert uuid in ok(dsn, *words.split(), "--json")


def test_what_is_shown_is_read_everywhere_and_what_two_begin_with_is_refused_with_both(
    dsn: str, tripped: int
) -> None:
    for said in ("GPU-5a0c2f1e-7", "h1:0", FIRST):
        assert [trip["job_id"] for trip in answers(dsn, "trips", "--device", said)] == [tripped]
    assert answers(dsn, "trips", "--device", "GPU-5a0c2f1e-9") == []
    (answer,) = answers(dsn, "unquarantine", "--device", "GPU-e1f2a3b4")
    assert answer["device_uuid"] == THIRD
    for words in ("trips", "quarantine", "unquarantine"):
        refused = gangq(dsn, words, "--device", "GPU-5a0c2f1e")
        assert refused.exit_code == 2
        assert f"{FIRST} or {SECOND}" in " ".join(refused.stderr.split())


def test_host_and_index_are_those_of_the_device_that_is_offered_now_not_of_the_one_it_replaced(
    dsn: str, client: Client
) -> None:
    for uuid in (FIRST, SECOND):
        device = {"uuid": uuid, "index": 0, "vram_mb": 1024, "source": "declared"}
        row = client.register_worker(name="w1", host="h1", queues=["default"], devices=[device])
        (answer,) = answers(dsn, "quarantine", "--device", "h1:0")
        assert answer["device_uuid"] == uuid
        client.retire_worker(incarnation=row.incarnation)
    refused = gangq(dsn, "unquarantine", "--device", "h1:0")
    assert refused.exit_code == 2
    assert f"{FIRST} or {SECOND}: write more of its UUID" in " ".join(refused.stderr.split())
