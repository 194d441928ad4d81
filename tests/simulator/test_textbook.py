"""The textbook's algorithm on schedules small enough to be worked out by hand."""

from __future__ import annotations

from xml.etree import ElementTree

import picture
import reference
from joblog import Job
from outcome import Ran, classes, judge, most_at_once

SLOTS = 4


def starts(jobs: list[Job], reservations: int) -> dict[int, int]:
    return {r.job.id: r.start_s for r in reference.simulate(jobs, SLOTS, reservations)}


LARGE_BEHIND_SMALL = [
    Job(1, 0, 100, 100, 2),
    Job(2, 1, 50, 50, 4),  # the large one
    Job(3, 2, 90, 90, 2),  # ends before 100: delays nobody
    Job(4, 3, 200, 200, 2),
]


def test_best_effort_starts_whatever_fits_and_the_large_one_waits() -> None:
    assert starts(LARGE_BEHIND_SMALL, 0) == {1: 0, 3: 2, 4: 92, 2: 292}


def test_easy_lets_only_those_pass_that_end_before_the_planned_start() -> None:
    assert starts(LARGE_BEHIND_SMALL, 1) == {1: 0, 3: 2, 2: 100, 4: 150}


def test_easy_lets_a_long_one_pass_that_uses_what_the_first_will_not_need() -> None:
    jobs = [Job(1, 0, 100, 100, 2), Job(2, 1, 50, 50, 3), Job(3, 2, 500, 500, 1), Job(4, 3, 500, 500, 1)]
    assert starts(jobs, 1) == {1: 0, 3: 2, 2: 100, 4: 150}


def test_a_second_planned_start_is_protected_only_with_two_reservations() -> None:
    jobs = [Job(1, 0, 100, 100, 3), Job(2, 1, 100, 100, 3), Job(3, 2, 50, 50, 4), Job(4, 3, 500, 500, 1)]
    assert starts(jobs, 1) == {1: 0, 4: 3, 2: 100, 3: 503}
    assert starts(jobs, 2) == {1: 0, 2: 100, 3: 200, 4: 250}


def test_a_planned_start_comes_earlier_when_something_ends_before_its_estimate() -> None:
    jobs = [Job(1, 0, 10, 100, 4), Job(2, 1, 5, 5, 4)]
    assert starts(jobs, 1) == {1: 0, 2: 10}


def test_what_outruns_its_estimate_is_stopped_there() -> None:
    (ran,) = reference.simulate([Job(1, 0, 100, 40, 1)], SLOTS, 1)
    assert (ran.end_s, ran.outran) == (40, True)


def test_figures_of_a_schedule() -> None:
    ran = [Ran(Job(1, 0, 5, 5, 1), 15, 20), Ran(Job(2, 0, 20, 20, 4), 20, 40)]
    outcome = judge("any", ran, SLOTS)
    assert outcome.utilisation == (1 * 5 + 4 * 20) / (4 * 40)
    assert (outcome.all.wait_s, outcome.all.longest_wait_s) == (17.5, 20)
    assert outcome.all.slowdown == (20 / 10 + 40 / 20) / 2  # the first counts as one of ten seconds
    assert outcome.largest.jobs == 1
    assert most_at_once(ran) == 4


def test_classes_of_sizes_cover_the_fleet() -> None:
    assert [kind.name for kind in classes(256)] == ["1", "2-8", "9-32", "33-127", "128-256"]


def test_table_and_picture_show_every_policy() -> None:
    outcomes = [judge(f"K={k} <&>", reference.simulate(LARGE_BEHIND_SMALL, SLOTS, k), SLOTS) for k in (0, 1)]
    assert picture.markdown(outcomes).count("| K=0 <&> |") == 4
    drawing = ElementTree.fromstring(picture.svg(outcomes, "a & b"))
    words = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", "K=0 <&>", "K=1 <&>"} <= set(words)
