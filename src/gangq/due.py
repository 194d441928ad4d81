"""When a schedule is due: the times that a cron expression names in a time zone.

An expression has five fields: minute, hour, day of month, month, day of week. Each due time is a whole minute, and is
an instant: what the clocks of a time zone do twice a year changes none of these rules.

- An hour field that covers every hour (``*``) goes by elapsed time. Such a schedule runs in both hours that have one
  name when the clock is set back, and not in an hour that the clock skips.
- Any other hour field names times of day, and each runs once on its day: one that the clock skips at the first minute
  after the gap, one that comes twice at the first of the two. Times that fall together so run once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import NamedTuple
from zoneinfo import ZoneInfo

from gangq.errors import InvalidInput

LATE = timedelta(seconds=60)
"""A due time that passed longer ago was missed. No cron expression is due more often, so a due time that is not late
is the last one that passed."""
MOST = 100
"""With catch-up `all` so many missed due times of a schedule are run, the last ones."""

_LOOKS_BACK = (timedelta(hours=2), timedelta(days=2), timedelta(days=40), timedelta(days=400))
_LONGEST = 200


class Choice(NamedTuple):
    """The due time to run next, and the first of those before it that are passed over, if any are."""

    due: datetime
    missed: datetime | None


class Cron:
    """A cron expression in a time zone. Raises `InvalidInput` for what cannot be read, or is never due."""

    def __init__(self, expression: str, tz: str) -> None:
        # Not at the top: whoever has no schedule does not load it.
        from cronsim import CronSim, CronSimError

        self._simulator = CronSim
        self._zone = zone(tz)
        fields = expression.split()
        if len(fields) != 5 or len(expression) > _LONGEST:
            raise InvalidInput(
                f"cron expression {expression[:_LONGEST]!r}: it has five fields, minute, hour, day of month, month "
                "and day of week, such as '0 3 * * *'; for less than a minute use every"
            )
        try:
            hours = CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC)).hours
        except (CronSimError, ValueError, AssertionError) as problem:
            raise InvalidInput(f"cron expression {expression!r} cannot be read: {problem}") from None
        # cronsim takes a field that begins with a star for "whenever", and everything else for a time of day.
        fields[0] = _spelt_out(fields[0], "0-59")
        fields[1] = "*" if len(hours) == 24 else _spelt_out(fields[1], "0-23")
        self._fields = " ".join(fields)
        self._expression = expression
        self.after(datetime(2000, 1, 1, tzinfo=UTC))

    def after(self, at: datetime) -> datetime:
        """Return the first due time after `at`, in UTC. Raises `InvalidInput` if there is none within 50 years."""
        try:
            return next(self._following(at))
        except (StopIteration, OverflowError):
            raise InvalidInput(f"cron expression {self._expression!r} is never due") from None

    def passed(self, after: datetime, until: datetime, most: int) -> list[datetime]:
        """Return the due times after `after` that had passed at `until`, the last `most` of them."""

        def since(start: datetime) -> Iterator[datetime]:
            return takewhile(lambda due: due <= until, self._following(start))

        first = [*islice(since(after), most + 1)]
        if len(first) <= most:
            return first
        # More than that: look back from the end, further each time, instead of reading all of them.
        last: deque[datetime] = deque(maxlen=most)
        for back in (*_LOOKS_BACK, until - after):
            last.extend(since(until - back))
            if len(last) == most:
                break
            last.clear()
        return [*last]

    def _following(self, at: datetime) -> Iterator[datetime]:
        at = at.astimezone(UTC)
        for local in self._simulator(self._fields, at.astimezone(self._zone)):
            due = local.astimezone(UTC)
            # In the second of two hours that have one name, cronsim begins anew in the first.
            if due > at:
                yield due
                at = due


def zone(tz: str) -> tzinfo:
    """Return the time zone of this name. Raises `InvalidInput` if this machine knows none."""
    if tz == "UTC":
        return UTC
    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError):
        raise InvalidInput(
            f"time zone {tz!r} is not known on this machine: use a name such as Europe/Oslo, and install tzdata "
            "where there are no time zones"
        ) from None


def choose(cron: Cron, after: datetime, now: datetime, catch_up: str) -> Choice:
    """Return the next due time to run after `after`, where those up to `now` may have been missed.

    `catch_up`: skip runs none that was missed, last the last of them, all the last `MOST` of them, one by one.
    """
    first = cron.after(after)
    if first > now:
        return Choice(first, None)
    passed = cron.passed(after, now, MOST if catch_up == "all" else 1)
    due = passed[0]
    if catch_up == "skip" and now - due >= LATE:
        due = cron.after(now)
    return Choice(due, first if due > first else None)


def _spelt_out(field: str, whole: str) -> str:
    return ",".join(re.sub(r"^\*", whole, term) for term in field.split(","))
