"""gangq workers, devices, usage: who and what there is, how it does, what is wrong with it, and who used it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import click

from gangq.cli import queries, stored
from gangq.cli.options import duration, table_options
from gangq.cli.output import known, megabytes, seconds, words
from gangq.cli.session import Session
from gangq.cli.tables import Cell, Column, columns
from gangq.cli.which import device_ids
from gangq.client.rows import DeviceRow, WorkerRow

STALE_S = 60.0
"""A reading older than this says nothing about now: six times as long as workers take to bring the next."""


@click.command()
@click.option("--host", shell_complete=stored.hosts, help="Only workers of this host.")
@click.option("--name", shell_complete=stored.workers, help="Only this worker.")
@table_options
def workers(session: Session, host: str | None, name: str | None) -> None:
    """List the workers, each by its latest start.

    BEAT is how long ago a job of it last said how far it is, STEPS/S how fast that goes, GPU how busy its
    devices are (?: nobody knows), WHY what keeps it from working. With --json the columns of gangq.workers.
    """
    client = session.client()
    found: list[WorkerRow] = client.workers(name=name, host=host)
    if not found:
        stored.must_exist(client, host=host, worker=name)
    held: dict[str, list[DeviceRow]] = {}
    now = None
    if found and not session.json:
        now = client.execute(queries.database_time())
        for device in client.devices(host=host):
            held.setdefault(device.worker or "", []).append(device)
    session.rows(found, _worker_columns(now, held), "no workers: start one with gangq worker")


def _worker_columns(now: datetime | None, held: Mapping[str, Sequence[DeviceRow]]) -> list[Column]:
    return columns(
        "name state host >slots >light:6 gpus:3 gpu:2 >memory=memory_mb:7 >cpus:8 queues:4 labels:7 >heard=silent_s "
        ">lease_left=lease_left_s:6 >beat:5 >steps/s=step_rate:5 model:6 pid:9 why",
        {
            "state": _state,
            "slots": lambda w: f"{w.used_slots}/{w.slots}",
            "light": lambda w: f"{w.used_light}/{w.light}",
            "gpu": lambda w: _busy(held.get(w.name, ()), now),
            "cpus": lambda w: f"{w.cpus:g}",
            "labels": lambda w: words([f"{k}={v}" for k, v in w.labels.items()]),
            "beat": lambda w: _age(w.last_beat_at, now),
            "why": why,
        },
    )


def _state(worker: WorkerRow) -> str:
    if worker.quarantined:
        return "quarantined"
    return "cordoned" if worker.cordoned is not None and worker.state == "live" else worker.state


def why(worker: WorkerRow) -> str:
    """What is wrong with a worker, the worst first; empty: nothing."""
    said = []
    if worker.reboot_needed:
        said.append(worker.quarantined or f"a process of it cannot be killed: reboot host {worker.host}")
    elif worker.exits_at is not None:
        said.append(f"exiting after a trip ({worker.exit_code}), not yet proven gone")
    elif worker.exit_code is not None:
        said.append(f"ended by a trip ({worker.exit_code})")
    if worker.state == "silent":
        said.append(
            f"silent for {seconds(worker.silent_s)} while it holds jobs: gangq bounce --once on {worker.host}"
        )
    if worker.quarantined and not worker.reboot_needed:
        said.append(worker.quarantined)
    if worker.cordoned is not None:
        said.append(f"given nothing new: {worker.cordoned}")
    return "; ".join(said)


@click.command()
@click.option("--host", shell_complete=stored.hosts, help="Only devices of this host.")
@click.option(
    "--state", type=click.Choice(["free", "held", "quarantined", "withdrawn"]), help="Only this state."
)
@table_options
def devices(session: Session, host: str | None, state: str | None) -> None:
    """List the devices, who holds them, and how they do.

    A ? is what nobody knows: no driver says it, or no worker reads it. READ is how old the rest is, TRIPS how
    many jobs tripped on the device within a day. NVLink or XGMI joins the devices of a worker that have the same
    LINK. With --json the columns of gangq.devices.
    """
    client = session.client()
    found = client.devices(host=host, state=state)
    if not found:
        stored.must_exist(client, host=host)
    now = client.execute(queries.database_time()) if found and not session.json else None
    short = device_ids(session, {device.uuid for device in found})
    session.rows(found, _device_columns(now, short), "no devices")


def _device_columns(now: datetime | None, short: Callable[[str], str]) -> list[Column]:
    return columns(
        "host index state health:2 trips=trips_day:3 >busy=reading.gpu_pct >memory:7 >temp=reading.temperature_c:5 "
        ">power=reading.power_w:5 throttle:5 >read:4 >vram=vram_mb:6 model:6 link:4 source:8 worker:1 job since:6 "
        "reason uuid:9",
        {
            "memory": _memory,
            "throttle": _throttle,
            "read": lambda d: _age(d.read_at, now) or "never",
            "uuid": lambda d: short(d.uuid),
        },
    )


def _of(device: DeviceRow, name: str) -> Any:
    return (device.reading or {}).get(name)


def _memory(device: DeviceRow) -> str:
    used, total = _of(device, "used_mb"), _of(device, "total_mb")
    return "?" if used is None else f"{megabytes(used)}/{'?' if total is None else megabytes(total)}"


def _throttle(device: DeviceRow) -> str:
    held_down = _of(device, "throttle")
    if held_down:
        return words(held_down)
    # An empty list is what the driver says, or what a driver that says nothing leaves.
    silent = held_down is None or "throttle" in (_of(device, "unknown") or {})
    return "?" if silent else "-"


def _busy(devices: Sequence[DeviceRow], now: datetime | None) -> str:
    return ",".join(
        known(_of(device, "gpu_pct") if is_fresh(device, now) else None, "%") for device in devices
    )


def is_fresh(device: DeviceRow, now: datetime | None) -> bool:
    """Whether its latest reading is about now."""
    return (
        now is not None and device.read_at is not None and (now - device.read_at).total_seconds() <= STALE_S
    )


def _age(at: datetime | None, now: datetime | None) -> str:
    if at is None or now is None:
        return ""
    return seconds(max(0.0, (now - at).total_seconds()))


_GROUPS = {"user": "submitter", "queue": "queue", "task": "task", "service": "service"}
_HOURS = "attempts:1 >GPU_hours >wasted >displaced"


@click.command()
@click.option(
    "--by",
    default="user",
    show_default=True,
    metavar="LIST",
    help="Some of user, queue, task and service: user,queue.",
)
@duration("--since", "30d", "How far to look back.")
@table_options
def usage(session: Session, by: str, since_s: float) -> None:
    """Show GPU hours: used, wasted, displaced; most first.

    From a claim to the proven end of its work, also of what runs now. Wasted are attempts that failed, tripped or
    lost their worker, with the members that stopped with them; displaced those that made way for others, were moved
    off a host, or were handed back by a worker that stopped. Attempts are kept for 30 days (retention_long). With
    --json the columns of the function gangq.usage.
    """
    groups = [group.strip() for group in by.split(",")]
    unknown = [group for group in groups if group not in _GROUPS]
    if unknown:
        raise click.UsageError(f"--by takes {', '.join(_GROUPS)}, not {unknown[0]!r}")
    rows = session.client().usage(
        since=timedelta(seconds=since_s), by=[_GROUPS[group] for group in dict.fromkeys(groups)]
    )
    cells: dict[str, Cell] = {
        "GPU_hours": lambda row: f"{row.gpu_hours:.2f}",
        "wasted": lambda row: _share(row.wasted_hours, row.gpu_hours),
        "displaced": lambda row: _share(row.displaced_hours, row.gpu_hours),
    }
    names = [f"{group}={_GROUPS[group]}" for group in dict.fromkeys(groups)]
    session.rows(rows, columns(" ".join([*names, _HOURS]), cells), "no attempt held a GPU in that time")


def _share(hours: float, of: float) -> str:
    return f"{hours:.2f} ({hours / of:.0%})" if hours and of else "0"
