"""What `gangq doctor` looks at in the fleet: workers, devices, and what the watchdogs do and see."""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from gangq.cli import queries
from gangq.cli.fleet import is_fresh
from gangq.cli.output import megabytes, seconds, when
from gangq.client.encoding import counted
from gangq.client.rows import DeviceRow, RetentionRow, ScheduleRow, WorkerRow

if TYPE_CHECKING:
    from gangq.client import Client

_FIRST_READING_S = 60.0
_PLANNED_WITHIN_S = 60
_IDLE_LOOKS = 3
_IDLE_AGAIN_S = 1.0
_UNTOLD_S = 600.0
_DAY_S = 86400.0
_LATE_DROP_S = 3600.0
"""The tick looks every ten minutes, and again when somebody held a lock."""


class Finding(NamedTuple):
    """What a check found. `status` is ok, warn or fail; `advice` says what to do unless it is ok; `numbers`: the rows
    behind it, if they say more.
    """

    status: str
    detail: str
    advice: str = ""
    numbers: Sequence[RetentionRow] | None = None


ok, warn, fail = (functools.partial(Finding, status) for status in ("ok", "warn", "fail"))


def _present(client: Client) -> list[WorkerRow]:
    return [worker for worker in client.workers() if worker.state in ("live", "draining", "silent")]


def workers(client: Client) -> Finding:
    """Whether all workers are heard and take work."""
    flag_after = client.execute(queries.last_tick())["flag_after_s"]
    present = _present(client)
    if not present:
        return warn("no worker is registered", "start one: gangq worker [MODULE:APP]")
    silent = [w for w in present if w.state == "silent" or (w.silent_s or 0) > flag_after]
    if silent:
        listed = some([f"{w.name} on {w.host} for {seconds(w.silent_s)}" for w in silent])
        return warn(
            f"{len(silent)} of {len(present)} workers are silent: {listed}",
            "look at their hosts. Their work is theirs until the lease ends; restarting a worker frees it "
            "sooner",
        )
    held = [w for w in present if w.quarantined]
    if held:
        listed = some([f"{w.name} ({w.quarantined})" for w in held])
        return warn(
            f"{len(held)} of {len(present)} workers are quarantined: {listed}",
            f"when it is well: gangq unquarantine --worker {held[0].name}",
        )
    closed = [w for w in present if w.cordoned is not None]
    if closed:
        listed = some([f"{w.name} on {w.host} ({w.cordoned})" for w in closed])
        return warn(
            f"{len(closed)} of {len(present)} workers are cordoned: {listed}",
            "select * from gangq.cordoned says what still runs there; when the work there is done: gangq uncordon "
            "HOST, or gangq worker on NAME",
        )
    return ok(f"{len(present)} heard within {seconds(flag_after)}")


def slots(client: Client) -> Finding:
    """Whether devices lie idle because all slots for placed work of their worker are taken."""
    idle = Counter(d.worker for d in client.devices() if d.state == "free")
    short = [w for w in client.workers() if w.state == "live" and w.used_slots >= w.slots and idle[w.name]]
    if not short:
        return ok("no device is idle for want of a slot")
    listed = some(
        [
            f"{w.name} on {w.host} (slots {w.used_slots} of {w.slots}, idle devices {idle[w.name]})"
            for w in short
        ]
    )
    return warn(
        f"all slots are taken beside idle devices: {listed}",
        "each placed job takes a slot: start the worker with --slots, or without it for a slot a device",
    )


def cgroups(client: Client) -> Finding:
    """Whether commands have control groups of their own everywhere."""
    present = _present(client)
    without = [f"{w.name} on {w.host}" for w in present if w.cgroups is False]
    if not without:
        return ok("no worker lacks control groups for its commands")
    return warn(
        f"the host lets {len(without)} of {len(present)} workers make no control groups: {some(without)}",
        "a process that cleared its environment outlives its command there if guardian, worker and supervisor are "
        "killed at once. Run them in a unit with Delegate=yes (gangq systemd install), with control groups of "
        "version 2 and Linux 5.14 or newer",
    )


def tasks(client: Client) -> Finding:
    """Whether workers agree on what their tasks are declared with."""
    declared: dict[str, dict[str, list[str]]] = {}
    for worker in _present(client):
        for task, options in (worker.task_options or {}).items():
            said = json.dumps(options, sort_keys=True)
            declared.setdefault(task, {}).setdefault(said, []).append(worker.name)
    differ = {task: found for task, found in declared.items() if len(found) > 1}
    if not differ:
        return ok(f"workers agree on the options of {counted(len(declared), 'task')}")
    listed = some(
        [
            f"{task}: " + ", ".join(f"{some(names)} {said}" for said, names in found.items())
            for task, found in differ.items()
        ]
    )
    return warn(
        f"workers declare {counted(len(differ), 'task')} with different options: {listed}",
        "submissions that do not say take those of the worker that registered last (gangq task list): run the same "
        "code on all workers",
    )


def schedules(client: Client) -> Finding:
    """Whether every schedule is submitted when it is due."""
    found = client.schedules()
    now = client.execute(queries.database_time())
    told: list[str] = []
    advice: list[str] = []
    for s in found:
        waits_s = (now - max(at for at in (s.set_at, s.last_at) if at is not None)).total_seconds()
        if s.problem is not None and waits_s > _PLANNED_WITHIN_S:
            told.append(f"{s.name} has no next due time ({s.problem})")
            advice.append("a tick in SQL alone computes none: run a worker, or gangq tick from cron")
        elif s.next_due is not None and (now - s.next_due).total_seconds() > _PLANNED_WITHIN_S:
            told.append(f"{s.name} was due at {when(s.next_due)}")
            advice.append("see that a tick runs")
        elif s.passed_over is not None and s.passed_over > (s.last_due or s.set_at) and not _runs(s):
            told.append(f"{s.name} was not run at {when(s.passed_over)} ({s.why})")
            advice.append(
                f"gangq schedule list {s.name}; once it is put right: gangq schedule run-now {s.name}"
            )
        elif s.undeclared_at is not None:
            told.append(f"{s.name} goes on, and is not in {s.source} any more")
            advice.append(f"if that is meant: gangq schedule rm {s.name}")
    if not told:
        return ok(f"{counted(len(found), 'schedule')}, all as they should be")
    return warn(some(told), some(list(dict.fromkeys(advice))))


def _runs(schedule: ScheduleRow) -> bool:
    """Whether nothing was submitted because the last one still runs, as the schedule wants it."""
    return (schedule.why or "").endswith("has not ended")


def claims(client: Client) -> Finding:
    """Whether workers that are heard take the work that fits them."""
    idle = client.execute(queries.idle_beside_work())
    for _ in range(_IDLE_LOOKS - 1):
        if not idle:
            break
        # A worker that is between two jobs holds nothing either, but not at every look.
        time.sleep(_IDLE_AGAIN_S)
        still = {row["worker"] for row in client.execute(queries.idle_beside_work())}
        idle = [row for row in idle if row["worker"] in still]
    if not idle:
        return ok("no worker is idle beside work that fits it")
    listed = some([f"{row['worker']} on {row['host']} ({row['why']})" for row in idle])
    return warn(
        f"{counted(len(idle), 'worker')} heard and idle although work fits: {listed}",
        "a worker claims only while its lease has more left than lease_margin_s and grace_s (gangq.settings, "
        "gangq worker --lease-s): restart it with a longer lease, or look at its log",
    )


def reboot(client: Client) -> Finding:
    """Whether a process anywhere survived SIGKILL."""
    stuck = [w for w in client.workers() if w.reboot_needed]
    if not stuck:
        return ok("no host needs a reboot")
    listed = some([f"{w.host} (worker {w.name}: {w.quarantined or 'unkillable process'})" for w in stuck])
    return fail(
        f"a process that nothing can kill is on: {listed}",
        f"reboot the host, then: gangq unquarantine --worker {stuck[0].name}, and its devices (gangq devices)",
    )


def devices(client: Client) -> Finding:
    """Whether any device is kept from taking work."""
    found = client.devices()
    held = [d for d in found if d.health == "quarantined"]
    exiting = sum(d.health == "exiting" for d in found)
    waits = f"; {exiting} withheld until a worker that tripped is gone" if exiting else ""
    if held:
        listed = some([f"{d.host}:{d.index} ({d.reason})" for d in held])
        return warn(
            f"{len(held)} of {len(found)} devices are quarantined: {listed}{waits}",
            f"when it is well: gangq unquarantine --device {held[0].uuid}",
        )
    return ok(f"{counted(len(found), 'device')}, none quarantined{waits}")


def watchdogs(client: Client) -> Finding:
    """Whether all watchdogs act."""
    everywhere = client.execute(queries.notify_only())
    # A task has a row for each class of devices, all with the same setting.
    tasks = {task.task: task.notify_only for task in client.tasks() if task.notify_only is not None}
    quiet = {name: classes for name, classes in tasks.items() if classes}
    if not everywhere and not quiet:
        return ok("all of them act")
    told = [f"{', '.join(everywhere)} everywhere"] if everywhere else []
    told += [f"{', '.join(classes)} for task {name}" for name, classes in sorted(quiet.items())]
    loose = "select gangq.configure('{\"notify_only\": []}')" if everywhere else ""
    loose = loose or f"gangq task set {next(iter(sorted(quiet)))} --notify none"
    return warn(
        f"these classes only notify: {some(told)}",
        f"what hangs in that way is not freed. If that is not meant: {loose}",
    )


def sensors(client: Client) -> Finding:
    """Devices of live workers that a driver vouches for and that nobody reads: there only the clock acts."""
    now = client.execute(queries.database_time())
    live = {
        w.name
        for w in client.workers()
        # A worker that has just started has not brought its first reading yet.
        if w.state in ("live", "draining") and (now - w.registered_at).total_seconds() > _FIRST_READING_S
    }
    read = [d for d in client.devices() if d.worker in live and d.source != "declared"]
    blind = [d for d in read if not is_fresh(d, now) or (d.reading or {}).get("gpu_pct") is None]
    if not blind:
        return ok(f"{len(read)} devices of live workers are read")
    listed = some([f"{d.host}:{d.index} of worker {d.worker} ({_blind(d, now)})" for d in blind])
    return warn(
        f"{len(blind)} of {len(read)} devices of live workers are not read: {listed}",
        "unknown convicts nobody, so of a hung job there only the wall clock and beats are left: look at the "
        "driver (nvidia-smi, amd-smi) and at the worker's log (sampler)",
    )


def _blind(device: DeviceRow, now: datetime) -> str:
    if device.reading is None or device.read_at is None:
        return "never read"
    if not is_fresh(device, now):
        return f"last read {seconds((now - device.read_at).total_seconds())} ago"
    return str(
        (device.reading.get("unknown") or {}).get("gpu_pct") or "its driver does not say how busy it is"
    )


def trips(client: Client) -> Finding:
    """What watchdogs did within a day, by class."""
    since = client.execute(queries.database_time()) - timedelta(days=1)
    found = client.execute(queries.trips(since=since))
    if not found:
        return ok("no watchdog has tripped within a day")
    done = Counter(trip.class_ or "?" for trip in found if trip.outcome not in ("notify", "held"))
    let = Counter(trip.outcome for trip in found if trip.outcome in ("notify", "held"))
    told = [f"{count} {word}" for word, count in done.most_common()]
    told += [f"{count} {word} (nothing was stopped)" for word, count in let.most_common()]
    poison = sorted({trip.job_id for trip in found if trip.poison})
    told += [f"poison: job {some(list(map(str, poison)))}"] if poison else []
    return warn(
        f"watchdogs tripped {counted(len(found), 'time')} within a day: {', '.join(told)}",
        f"see what they saw: gangq trips, gangq show {found[0].job_id}",
    )


def outbox(client: Client) -> Finding:
    """Whether notification targets are told of what they want to know."""
    targets = client.notifications()
    dead = [t for t in targets if t.dead]
    if dead:
        listed = some([f"{t.target} ({counted(t.dead, 'notification')}: {t.dead_error})" for t in dead])
        return warn(
            f"deliveries were given up: {listed}",
            f"when its receiver is well: gangq notify retry {dead[0].target}",
        )
    now = client.execute(queries.database_time())
    late = [t for t in targets if t.oldest_at and (now - t.oldest_at).total_seconds() > _UNTOLD_S]
    if late:
        listed = some([f"{t.target} since {when(t.oldest_at)} ({t.error or 'no runner?'})" for t in late])
        return warn(
            f"notifications wait to be delivered: {listed}",
            f"see that gangq notify run {late[0].target} runs on its host",
        )
    dropped = [t for t in targets if t.dropped_at and (now - t.dropped_at).total_seconds() < _DAY_S]
    if dropped:
        listed = some([f"{t.target} ({t.dropped} so far)" for t in dropped])
        return warn(
            f"notifications were dropped, too old or too many: {listed}",
            "nothing brings them back: look at gangq events",
        )
    return ok(f"{counted(len(targets), 'target')}, and no notification waits for long")


def retention(client: Client) -> Finding:
    """How much is kept of what has ended, until when, and whether the days to come have their partitions."""
    kept = client.retention()
    now = client.execute(queries.database_time())
    classes = [list(rows) for _, rows in itertools.groupby(kept, key=lambda row: row.class_)]
    detail = "; ".join(_kept(rows) for rows in classes)
    lacking = [f"gangq.{row.part_of} of {day}" for row in kept for day in row.missing]
    lacking += [f"the default of gangq.{row.part_of}" for row in kept if row.no_default]
    late = [
        f"gangq.{row.part_of} of {row.oldest}"
        for row in kept
        if row.next_drop is not None and (now - row.next_drop).total_seconds() > _LATE_DROP_S
    ]
    if not lacking and not late:
        return ok(detail, numbers=kept)
    told = [f"no partition: {some(lacking)}"] if lacking else []
    told += [f"past its time: {some(late)}"] if late else []
    return warn(
        f"{'; '.join(told)}. {detail}",
        "the tick makes and drops them: see that one runs, and that no long transaction or dump holds those tables "
        "(pg_locks). As gangq_admin: select gangq.keep_partitions(true)",
        kept,
    )


def _kept(rows: Sequence[RetentionRow]) -> str:
    """The tables of a class together."""
    size = megabytes(math.ceil(sum(row.bytes for row in rows) / (1 << 20)))
    keep = rows[0].keep
    if keep is None:
        return f"{rows[0].class_}: {size}"
    days = [row.oldest for row in rows if row.oldest is not None]
    drops = [row.next_drop for row in rows if row.next_drop is not None]
    since = f", from {min(days)} on, next drop {when(min(drops))}" if days and drops else ""
    length = f"{keep.days} days" if keep == timedelta(keep.days) else seconds(keep.total_seconds())
    return f"{rows[0].class_} ({length}): {counted(sum(row.partitions for row in rows), 'partition')}, {size}{since}"


def some(texts: Sequence[str]) -> str:
    """The first three of a list, and how many more there are."""
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
