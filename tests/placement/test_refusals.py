"""Why something waits, in words."""

from __future__ import annotations

import re

import pytest
import test_decide
from drawn_boards import Picture

from gangq.placement.decide import decide
from gangq.placement.explain import explain

SAID = {
    "h0 AAAA....\nh1 AAAAAA..\nX 7": (
        "there is room for 6 of its 7 members, the most on h0",
        "room for 1 more",
    ),
    "h0 AAAA....\nh1 AAAAAA..\nX 5 strict_pack": (
        "the roomiest host, h0, has room for 4 of the 5 that share one",
        "room for 1 more on one host",
    ),
    "h0 AA......\nqueue a max_gpus=4\nA queue=a\nX 3 queue=a": (
        "the maximum of queue a, 4 GPUs, leaves 2 GPUs, and it needs 3 GPUs (held by g65)",
        "1 GPU given back in queue a, or a limit of 5 GPUs",
    ),
    "h0 AA......\nqueue a paused\nX 3 queue=a": ("queue a is paused", "gangq queue resume a"),
    "h0 ..\nh1 ..\nh2 ..\nX 4 strict_spread": (
        "3 hosts have room, and each of its 4 members needs another one",
        "room on 1 host more",
    ),
    "victims=1\nh0 AAAA\nX 4 prio=1": ("it starts as soon as these have stopped: g65", "the end of g65"),
    "plans=1\nh0 AAAA....\nA ends=600\nX 8 prio=1\nY 2 ends=700": (
        "it may run 700 s, and its room is needed before for g88",
        "a budget short enough to end before g88, or room elsewhere",
    ),
    "h0 A...\nh1 BB\nA apart=a\nX 3 apart=a": (
        "it is kept apart (a) from g65, and only beside them is there room",
        "room on other hosts, or the end of g65",
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
