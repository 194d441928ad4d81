"""When schedules are due next: computed here, where there is a calendar of time zones, and stored by the database."""

from __future__ import annotations

import logging
from typing import Any

from gangq.client.rows import UnplannedSchedule
from gangq.client.verb import Steps
from gangq.client.verbs import Verbs
from gangq.due import Cron, choose
from gangq.errors import InvalidInput

log = logging.getLogger("gangq.decider")

_MOST = 100
"""How many the database names at once: the limit in `gangq.unplanned_schedules` (sql/134_schedule_step.sql). If it
names so many, there may be more."""


def plan_schedules() -> Steps[bool]:
    """Compute the due times that are missing; whether a tick finds more to do at once."""
    found = yield from Verbs.unplanned_schedules()
    if not found:
        return False
    now_due = yield from Verbs.plan_schedules(plans=[_plan(one) for one in found])
    return now_due or len(found) >= _MOST


def _plan(schedule: UnplannedSchedule) -> dict[str, Any]:
    """What `gangq.plan_schedules` is told of one. A schedule that cannot be computed does not hold up the others."""
    about = {
        "name": schedule.name,
        "cron": schedule.cron,
        "tz": schedule.tz,
        "after": schedule.after.isoformat(),
    }
    try:
        due, missed = choose(
            Cron(schedule.cron, schedule.tz), schedule.after, schedule.now, schedule.catch_up
        )
    except InvalidInput as problem:
        return {**about, "problem": str(problem)}
    except Exception as problem:
        log.exception("schedule_fault", extra={"schedule": schedule.name})
        return {**about, "problem": f"{type(problem).__name__}: {problem}"}
    return {**about, "due": due.isoformat(), **({"missed": missed.isoformat()} if missed else {})}
