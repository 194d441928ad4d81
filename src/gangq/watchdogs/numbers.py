"""Numbers that people set, looked at before anything depends on them.

A limit that is a string, a NaN or 0 does not make a watchdog strict or lenient: it makes it kill everything or
nothing. So junk is refused where it is given, by name.
"""

from __future__ import annotations

import math

from gangq.errors import InvalidInput

LONGEST_S = 1e9


def length_s(name: str, value: float, *, most: float = LONGEST_S, zero: bool = False) -> float:
    """Return ``value`` if it is a sane number of seconds.

    Raises:
        InvalidInput: not a number, not finite, negative, 0 (unless ``zero``), or more than ``most``.
    """
    if type(value) is float and 0.0 < value <= most:
        return value  # What it nearly always is, asked for every job.
    _refuse_strange(name, value, "a number of seconds such as 120")
    if value < 0 or (value == 0 and not zero):
        raise InvalidInput(f"{name} is {value!r}: it has to be {'0 or ' if zero else ''}more than 0 seconds")
    if value > most:
        raise InvalidInput(f"{name} is {value!r}: at most {most:g} seconds; leave it out for the default")
    return float(value)


def factor(name: str, value: float) -> float:
    """Return ``value`` if it is a finite number of at least 1. Raises `InvalidInput`."""
    _refuse_strange(name, value, "a number such as 10")
    if value < 1:
        raise InvalidInput(f"{name} is {value!r}: it has to be at least 1")
    return float(value)


def _refuse_strange(name: str, value: object, wanted: str) -> None:
    # A bool is an int to Python: budget_s=True would be a budget of one second.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidInput(f"{name} is {value!r}: give {wanted}")
