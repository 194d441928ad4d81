"""Why something waits, in words."""

from __future__ import annotations

import re

import pytest
import test_decide

from gangq.placement import Refused, gates
from gangq.placement.board import Ask, Board, Device, Hold, Kind, Needs, Queue, Role, Unit, Worker
from gangq.placement.decide import decide
from gangq.placement.explain import explain
from gangq.placement.limits import Amount, Usage
from placement.drawn_boards import Picture, after

SAID = {
    "h0 AAAA....\nh1 AAAAAA..\nX 7": (
        "there is room for 6 of its 7 members, the most on h0; for one more the nearest worker, h0, has 0 of 1 slot "
        "and 0 of 1 GPU free (held by g65)",
        "room for 1 more: 1 slot and 1 GPU more on h0 would do",
    ),
    "h0 AB......\nh1 CC.... cpus=4000\nX 11 cpus=2000": (
        "there is room for 8 of its 11 members, the most on h0; for one more the nearest worker, h1, has 0 of 2 CPUs "
        "free",
        "room for 3 more: 2 CPUs more on h1 would do for one",
    ),
    "h0 a.b. slots=2\nx*1 1x2": (
        "no worker has room for it: the nearest worker, h0, has 0 of 1 slot free (held by j97, j98)",
        "room on one worker: 1 slot more on h0 would do",
    ),
    "h0 .... slots=3 mem=2560\nx*3 1x2 mem=1024": (
        "no worker has room for it: the nearest worker, h0, has 0.5 of 1 GiB of memory and 0 of 2 GPUs free",
        "room on one worker: 0.5 GiB of memory and 2 GPUs more on h0 would do",
    ),
    "h0 ab\nh1 cd\nx*1 1": (
        "no worker has room for it: the nearest worker, h0, has 0 of 1 slot and 0 of 1 GPU free (held by j97, j98)",
        "room on one worker: 1 slot and 1 GPU more on h0 would do",
    ),
    "h0 A...\nh1 BB\nA apart=a\nX 6 apart=a": (
        "there is room for 0 of its 6 members; for one more the nearest worker, h1, has 0 of 1 slot and 0 of 1 GPU "
        "free (held by g66)",
        "room for 6 more: 1 slot and 1 GPU more on h1 would do for one",
    ),
    "levels rack host\nh0 AA rack=r0\nh1 BC rack=r1\nh2 ...C. rack=r0\nX 2x4 require=rack missing=1 mates=1": (
        "no worker has room for it: the nearest worker, h1, has 0 of 1 slot and 0 of 4 GPUs free (held by g66, g67)",
        "room on one worker: 1 slot and 4 GPUs more on h1 would do",
    ),
    "h0 ab..\nx*1 1x4": (
        "no worker has room for it: the nearest worker, h0, has 2 of 4 GPUs free (held by j97, j98)",
        "room on one worker: 2 GPUs more on h0 would do",
    ),
    "h0 AA....\nX 3\nY 2": (
        "there is room for 1 of its 2 members, the most on h0; for one more the nearest worker, h0, has 0 of 1 slot "
        "and 0 of 1 GPU free (held by g65, g88)",
        "room for 1 more: 1 slot and 1 GPU more on h0 would do",
    ),
    "h0 .AA. link=0011\nX 2x2 linked": (
        "there is room for 0 of its 2 members; for one more the nearest worker, h0, has 1 of 2 linked GPUs free "
        "(held by g65)",
        "room for 2 more: 1 linked GPU more on h0 would do for one",
    ),
    "h0 .... vram=24\nX 3\nY 2 not=3": (
        "there is room for 0 of its 2 members; for one more the nearest worker, h0, has 0 of 1 GPU free "
        "(held by g88)",
        "room for 2 more: 1 GPU more on h0 would do for one",
    ),
    "h0 AAAA....\nh1 AAAAAA..\nX 5 strict_pack": (
        "the roomiest host, h0, has room for 4 of the 5 that share one",
        "room for 1 more on one host",
    ),
    "h0 AA......\nqueue a max_gpus=4\nA queue=a\nX 3 queue=a": (
        "the maximum of queue a, 4 GPUs, leaves 2 GPUs, and it needs 3 GPUs (held by g65)",
        "1 GPU given back in queue a, or a limit of 5 GPUs",
    ),
    "h0 AA......\nqueue a max_gpus=2\nA queue=a\nX 3 queue=a": (
        "the maximum of queue a, 2 GPUs, leaves 0 GPUs, and it needs 3 GPUs (held by g65)",
        "a limit of 5 GPUs",
    ),
    "h0 AA......\nqueue a paused\nX 3 queue=a": ("queue a is paused", "gangq queue resume a"),
    "h0 A...\nh1 B\nX 5 strict_spread": (
        "1 host has room, and each of its 5 members needs another one",
        "room on 4 hosts more",
    ),
    "h0 AAA.\nh1 BBB.\nX 4 strict_pack": (
        "the roomiest host, h0, has room for 1 of the 4 that share one",
        "room for 3 more on one host",
    ),
    "h0 AAAA\nX 2 strict_spread": (
        "there is room for 0 of its 2 members; for one more the nearest worker, h0, has 0 of 1 slot and 0 of 1 GPU "
        "free (held by g65)",
        "room for 2 more: 1 slot and 1 GPU more on h0 would do for one",
    ),
    "h0 ..\nh1 ..\nh2 ..\nX 4 strict_spread": (
        "3 hosts have room, and each of its 4 members needs another one",
        "room on 1 host more",
    ),
    "victims=1\nh0 AAAA\nX 4 prio=1": ("it starts as soon as these have stopped: g65", "the end of g65"),
    "plans=1\nh0 AAAA....\nA ends=600\nX 8 prio=1\nY 2 ends=700": (
        "it may run 700 s, and its room is needed before for g88",
        "a budget short enough to end before g88, or room elsewhere",
    ),
    "plans=1\nh0 AAAA..\nA ends=600\nX 6 prio=1\nY 3 ends=700": (
        "there is room for 2 of its 3 members, the most on h0; for one more the nearest worker, h0, has 0 of 1 slot "
        "and 0 of 1 GPU free (held by g65); beside the planned start of g88 there is room for 0 of them",
        "room for 3 more: 1 slot and 1 GPU more on h0 would do for one",
    ),
    "h0 A...\nh1 BB\nA apart=a\nX 3 apart=a": (
        "it is kept apart (a) from g65, and only beside them is there room",
        "room on other hosts, or the end of g65",
    ),
    "levels rack host\nh0 .... rack=r0\nh1 ---- rack=r0 closed\nh2 ..... rack=r1\nX 6 require=rack": (
        "the roomiest rack, r1, has room for 5 of its 6 members",
        "room for 1 more in one rack",
    ),
    "levels rack host\nh0 A.... rack=r0\nh1 .. rack=r0\nh2 ... rack=r1\nA apart=a\nX 7 apart=a require=rack": (
        "the roomiest rack, r1, has room for 3 of its 7 members",
        "room for 4 more in one rack",
    ),
    "plans=1\nh0 A.\nh1 -- closed\nA ends=600\nX 3": (
        "it would not start even when all that runs has ended; now 1 of its 3 members would fit; not counted, "
        "because no new work is given to them now: h1",
        "workers that are large enough; or those back: gangq uncordon, gangq unquarantine --worker, or a restart",
    ),
    "levels rack host\nh0 .... rack=r0\nh1 .. rack=r1\nX 5 require=rack": (
        "the roomiest rack, r0, has room for 4 of its 5 members",
        "room for 1 more in one rack",
    ),
}


@pytest.mark.parametrize("picture", SAID)
def test_it_says_why_and_what_would_help(picture: str) -> None:
    refused = decide(Picture(picture).board)[-1].refused
    assert refused is not None
    assert explain(refused) == SAID[picture]


def test_every_refusal_has_words_that_fit_a_terminal() -> None:
    gates = set()
    for pictures in (test_decide.PICTURES, test_decide.TURNS, test_decide.PLANS, test_decide.STOPS):
        for before, _ in pictures.values():
            for refused in (decision.refused for decision in decide(Picture(before).board)):
                if refused:
                    gates.add(refused.gate)
                    words = explain(refused)
                    assert max(map(len, words)) < 160
                    assert not re.search(r"\b1 (GPUs|hosts|jobs|gangs)\b", "; ".join(words))
    assert len(gates) > 8


def test_a_paused_task_holds_its_kind_alone_and_is_named() -> None:
    role = Role(Needs(gpus=1))
    board = Board(
        0.0,
        workers=(Worker(1, "h0", "h0", slots=2, devices=(Device(1), Device(2))),),
        kinds=(Kind(1, (role,), paused_task="train"), Kind(2, (role,))),
        asks=(Ask("g1", 1, priority=9), Ask("k2/0", 2, count=1)),
    )
    held, other = decide(board)
    assert (held.ask, held.action, other.ask, other.action) == ("g1", "wait", "k2/0", "start")
    assert held.refused is not None
    assert explain(held.refused) == ("task train is paused", "gangq task resume train")


GATES = [gate for gate in vars(gates).values() if isinstance(gate, gates.Gate)]


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_has_words(gate: gates.Gate) -> None:
    assert len({*GATES}) == len(GATES) > 12
    numbers = {"need": 3, "have": 1, "of": "members", "where": "here", "holders": ("g1",), "limit": 4.0}
    for refused in (Refused(gate, **numbers), Refused(gate)):
        why, unblocks = explain(refused)
        assert why
        assert unblocks


WIDEST = {
    "with hosts where something failed": ("h0 .... doubtful\nh1 ..\nX 7", "room 6 of 7"),
    "with workers that have not loaded its model": ("h0 .. warm=m\nh1 ...\nX 6 model=m", "room 5 of 6"),
    "beyond the level that is preferred": (
        "levels rack host\nh0 .. rack=r0\nh1 ... rack=r1\nX 6 prefer=rack",
        "room 5 of 6",
    ),
    "in the roomiest domain of the level that is required": (
        "levels rack host\nh0 ..... rack=r0\nh1 .... rack=r1\nX 1x4+2x1 require=rack",
        "room 1 of 2",
    ),
    "with the scarcest role first": ("h0 .....\nX 1x4+2x1", "room 1 of 2"),
}


@pytest.mark.parametrize("what", WIDEST)
def test_of_all_ways_to_seat_it_the_widest_says_why_it_waits(what: str) -> None:
    board, expected = WIDEST[what]
    assert after(board).splitlines()[-1] == f"X waits: {expected}"


def test_thousandths_of_cpus_add_up_to_a_limit_and_not_beyond() -> None:
    queue = Queue("a", maximum={"cpus": 3.3}, guaranteed={"cpus": 3.3})
    running = Unit("j1", queue="a", holds=(Hold(1, millicpus=1100),), ends_at=9)
    usage = Usage(Board(now=0, queues=(queue,), units=(running,)))
    assert 1.1 + 2.2 > 3.3, "as floats"
    for cpus, fits in ((2.2, True), (2.201, False)):
        assert (usage.limit_on("a", "", Amount(cpus=cpus)) is None) is fits
        assert (usage.covered_by("a", Amount(cpus=cpus)) is queue) is fits


def test_without_any_worker_that_is_what_it_waits_for() -> None:
    """Not: it would never fit."""
    board = Picture("plans=1\nh0 .\nX 1").board
    (waits,) = decide(board._replace(workers=()))
    assert waits.refused is not None
    assert waits.refused.gate == "workers"
