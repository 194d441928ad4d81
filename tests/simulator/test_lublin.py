"""The generated workload has the moments of the published model."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter

import joblog
import lublin
import pytest
from joblog import Job

SLOTS = 256


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return lublin.generate(20_000, SLOTS, 1.06, seed=11)


def test_the_same_seed_gives_the_same_jobs_and_another_gives_others() -> None:
    assert lublin.generate(50, SLOTS, 1.06, seed=1) == lublin.generate(50, SLOTS, 1.06, seed=1)
    assert lublin.generate(50, SLOTS, 1.06, seed=1) != lublin.generate(50, SLOTS, 1.06, seed=2)


def test_the_work_offered_is_what_was_asked_for(jobs: list[Job]) -> None:
    assert joblog.load(jobs, SLOTS) == pytest.approx(1.06, rel=0.001)


def test_shares_of_serial_and_of_power_of_two_jobs_are_the_models(jobs: list[Job]) -> None:
    sizes = Counter(job.size for job in jobs)
    assert max(sizes) <= SLOTS
    serial = sizes[1] / len(jobs)
    powers = sum(count for size, count in sizes.items() if size > 1 and size & (size - 1) == 0) / len(jobs)
    # A small size is a power of two by chance now and then, even where it need not be: 2, 4 and 8 mostly.
    assert serial == pytest.approx(lublin.SERIAL, abs=0.01)
    assert lublin.POWER_OF_TWO - 0.01 < powers < lublin.POWER_OF_TWO + 0.06


def test_sizes_of_parallel_jobs_follow_the_two_uniform_distributions(jobs: list[Job]) -> None:
    powers = [math.log2(job.size) for job in jobs if job.size > 1]
    top = math.log2(SLOTS)
    middle = top - lublin.MIDDLE_BELOW_TOP
    mean = lublin.LOW_SHARE * (lublin.LOW + middle) / 2 + (1 - lublin.LOW_SHARE) * (middle + top) / 2
    assert statistics.fmean(powers) == pytest.approx(mean, abs=0.06)


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 8), (16, 64), (145, 256)])
def test_run_times_are_short_or_long_in_the_mixture_that_their_size_gives(
    jobs: list[Job], least: int, most: int
) -> None:
    mine = [job for job in jobs if least <= job.size <= most]
    short = statistics.fmean(
        min(1.0, max(0.0, lublin.SHORT_SHARE + lublin.SHORT_SHARE_PER_SLOT * job.size)) for job in mine
    )
    (a1, b1), (a2, b2) = lublin.SHORT_RUN, lublin.LONG_RUN
    mean = statistics.fmean(math.log(job.run_s + 0.5) for job in mine)
    assert mean == pytest.approx(short * a1 * b1 + (1 - short) * a2 * b2, rel=0.04)


def test_more_jobs_come_by_day_than_by_night() -> None:
    paces = lublin.day_cycle()
    assert statistics.fmean(paces) == pytest.approx(1)
    assert 26 <= paces.index(max(paces)) <= 32  # between 13:00 and 16:00
    assert min(paces) < 0.2 < 1.8 < max(paces)


def test_gaps_between_arrivals_in_the_clock_of_people_are_the_models() -> None:
    jobs = lublin.generate(20_000, SLOTS, 1.0, seed=5)
    gaps = [max(1, b.submit_s - a.submit_s) for a, b in itertools.pairwise(jobs)]
    # The daily cycle and the scale to a load move the mean of the logarithm; its spread is the gamma's and more.
    shape, scale = lublin.GAP
    spread = statistics.stdev(math.log(gap) for gap in gaps)
    assert scale * math.sqrt(shape) < spread < 1.5 * scale * math.sqrt(shape)
