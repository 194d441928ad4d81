"""How long something takes, as people say it: a number of seconds, "90s", "1h30m", or a timedelta."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from gangq.errors import InvalidInput

Duration = float | str | timedelta
"""Seconds as a number, a text such as "90s", "1.5h" or "1h30m" (ms, s, m, h, d, w), or a timedelta."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)
_HOW = 'a number of seconds, a text such as "90s" or "1h30m" (ms, s, m, h, d, w), or a timedelta'


def parse_seconds(text: str) -> float | None:
    """Return the seconds of 90, 1.5, 90s, 1h30m; None when it is none of these."""
    text = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def seconds(given: Duration, what: str, *, least: float = 0.0, most: float = 1e9) -> float:
    """Return a duration in seconds. Raises `InvalidInput`, naming `what`, if it is none, or not within the limits."""
    found: float | None = None
    if isinstance(given, timedelta):
        found = given.total_seconds()
    elif isinstance(given, str):
        found = parse_seconds(given)
    elif isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given):
        found = float(given)
    if found is None:
        raise InvalidInput(f"{what} is {given!r}: say it as {_HOW}")
    if not least <= found <= most:
        raise InvalidInput(f"{what} is {given!r}: {least:g} to {most:g} seconds are possible")
    return found


def in_short(seconds: float) -> str:
    """``12 s``, ``3m05s``, ``2h10m``, ``3d04h``: whole seconds, rounded up, as ``gangq.in_short`` in SQL."""
    s = max(0, math.ceil(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02}s"
    return f"{s // 3600}h{s // 60 % 60:02}m" if s < 172800 else f"{s // 86400}d{s // 3600 % 24:02}h"
