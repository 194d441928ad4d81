"""The workload model of Lublin and Feitelson: rigid parallel jobs as supercomputers see them.

U. Lublin and D. G. Feitelson, "The workload on parallel supercomputers: modeling the characteristics of rigid
jobs", Journal of Parallel and Distributed Computing 63(11), 2003, pages 1105-1122. Parameters are the paper's for
all jobs together (batch and interactive not told apart); the code is ours.

- Size: one slot with probability SERIAL; else 2 to a power drawn from two uniform distributions, the power rounded
  to a whole number for a share POWER_OF_TWO of all jobs.
- Run time: e to a power drawn from one of two gamma distributions, short or long; the larger the job, the rarer
  the short one.
- Arrival: gaps of e to a gamma-distributed power, in a clock that runs faster when people work: the density of a
  third gamma distribution over the 48 half-hours of a day.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

from joblog import Job, load

SERIAL, POWER_OF_TWO = 0.244, 0.576
LOW, MIDDLE_BELOW_TOP, LOW_SHARE = 0.8, 2.5, 0.86
SHORT_RUN, LONG_RUN = (4.2, 0.94), (312.0, 0.03)  # shape and scale of the power of e
SHORT_SHARE, SHORT_SHARE_PER_SLOT = 0.78, -0.0054
GAP = (10.2303 * 1.0225, 0.4871)  # 1.0225: from the rush hours, where it was fitted, to the whole day
DAY = (8.1737, 3.9631)
DAY_BEGINS, HALF_HOURS, HALF_HOUR_S = 11, 48, 1800
LONGEST_RUN, LONGEST_GAP = 12.0, 13.0  # powers of e: two days, five days


def generate(count: int, slots: int, offered: float, seed: int) -> list[Job]:
    """`count` jobs for `slots` slots. Gaps are stretched until the work offered is `offered` of what they can do."""
    dice = random.Random(seed)
    arrivals = _arrivals(dice)
    jobs = []
    for number in range(1, count + 1):
        size = _size(dice, slots)
        run_s = max(1, int(_run_s(dice, size)))
        jobs.append(Job(number, int(next(arrivals)), run_s, run_s, size))
    first, factor = jobs[0].submit_s, load(jobs, slots) / offered
    return [replace(job, submit_s=round((job.submit_s - first) * factor)) for job in jobs]


def _size(dice: random.Random, slots: int) -> int:
    kind = dice.random()
    if kind <= SERIAL:
        return 1
    top = math.log2(slots)
    middle = top - MIDDLE_BELOW_TOP
    power = dice.uniform(LOW, middle) if dice.random() <= LOW_SHARE else dice.uniform(middle, top)
    if kind <= SERIAL + POWER_OF_TWO:
        power = int(power + 0.5)
    return min(slots, int(2**power + 0.5))


def _run_s(dice: random.Random, size: int) -> float:
    short = min(1.0, max(0.0, SHORT_SHARE + SHORT_SHARE_PER_SLOT * size))
    while True:
        power = dice.gammavariate(*(SHORT_RUN if dice.random() <= short else LONG_RUN))
        if power <= LONGEST_RUN:
            return math.exp(power)


def _arrivals(dice: random.Random) -> Iterator[float]:
    """Seconds since midnight of the first day."""
    paces = day_cycle()
    half_hour, into = 0, 0.0  # and how far into it, in the clock of people
    while True:
        power = math.inf
        while power > LONGEST_GAP:
            power = dice.gammavariate(*GAP)
        into += math.exp(power) / HALF_HOUR_S
        while into > paces[half_hour % HALF_HOURS]:
            into -= paces[half_hour % HALF_HOURS]
            half_hour += 1
        yield (half_hour + into / paces[half_hour % HALF_HOURS]) * HALF_HOUR_S


def day_cycle() -> list[float]:
    """How fast jobs arrive in each half-hour of the day, from midnight; 1 on average."""
    paces = [0.0] * HALF_HOURS
    for bucket in range(DAY_BEGINS, HALF_HOURS + DAY_BEGINS):
        paces[(bucket - 1) % HALF_HOURS] = _gamma_cdf(bucket + 0.5) - _gamma_cdf(bucket - 0.5)
    mean = sum(paces) / HALF_HOURS
    return [pace / mean for pace in paces]


def _gamma_cdf(x: float) -> float:
    shape, scale = DAY
    x /= scale
    term = total = 1.0
    n = shape
    while term > total * 1e-12:
        n += 1
        term *= x / n
        total += term
    return total * math.exp(shape * math.log(x) - x - math.lgamma(shape + 1))
