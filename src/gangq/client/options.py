r"""What `submit`, `submit_gang`, `set_schedule` and `set_service` take beside their everyday arguments, by name.

The type of each: `\dT+ gangq.job_options` and `gangq.gang_options` in psql.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from json.encoder import encode_basestring_ascii
from typing import Any, TypedDict
from uuid import UUID

from gangq.client.encoding import Awaited, awaited_ids, dumps, whole_numbers
from gangq.client.roles import Role, encode_roles
from gangq.client.selectors import Selector, as_selector
from gangq.durations import Duration, seconds
from gangq.errors import InvalidInput


class Needs(TypedDict, total=False):
    """What one job or member needs, and how often it may fail; `gangq.TaskOptions` explains them."""

    vram_mb: int | None
    memory_mb: int | None
    cpus: float | None
    labels: Mapping[str, Any] | None
    selector: Selector | None
    tolerates: Sequence[str] | None
    model: str | None
    limit_key: str | None
    limit: int | None
    rate: str | None
    wait_for_hardware: bool | None
    max_attempts: int | None
    max_crashes: int | None
    max_trips: int | None
    max_snoozes: int | None


class _Options(Needs, total=False):
    budget_s: Duration | None
    after_any: Sequence[int | Awaited] | None
    after_failed: Sequence[int | Awaited] | None


class SubmitOptions(_Options, total=False):
    """Of jobs, as `gangq.TaskOptions` explains them; `budget_s` is its `budget`. None is as if it were left out.

    `name`: the jobs of this call are a batch of this name; several batches may have one name. `tags` are marks of the
    batch. At most `at_most` of its jobs are placed at once. `indexes`: of each job its number in the batch, from 0 on
    and each once, in place of 0, 1, 2.
    """

    name: str | None
    tags: Sequence[str] | None
    at_most: int | None
    indexes: Sequence[int] | None


class GangOptions(TypedDict, total=False):
    """Of a gang, and not of its members. None is as if it were left out. Times are durations: 90, "90s", a timedelta.

    - `min_size`: how many of size are enough to start [size]. `name` of the gang.
    - `strategy` [pack]: pack (fewest hosts), spread (most), strict_pack (one host), strict_spread (a host each),
      linked (as pack; all GPUs of each member joined by NVLink or XGMI: it waits for such GPUs).
      `require`, `prefer`: a topology level (`configure`) of which all members must, or should, share one domain.
      `balanced`: evenly many on each host used. `apart`: gangs of one such name never share a host.
    - `failure_policy` [restart_gang]: restart_gang, restart_member (same rank, the others are told), shrink
      (elastic: the others go on), fail. `completion`: the role whose end is the gang's [all].
    - `checkpoint_mode`: "each" or "rank0" [each; elastic gangs have rank0]. `claim_deadline_s`: how long it may stay
      reserved.
    - `timeout_s`, `timeout_style` [the queue's]: how long it may wait for a place while eligible, and then: requeue
      (back off, if no worker could hold it or its planned start is overdue; else wait on), hard (fail), soft (single
      jobs). `preemptible` [True]: whether others may displace it.
    """

    min_size: int | None
    name: str | None
    strategy: str | None
    require: str | None
    prefer: str | None
    balanced: bool | None
    apart: str | None
    failure_policy: str | None
    completion: str | None
    checkpoint_mode: str | None
    claim_deadline_s: Duration | None
    timeout_s: Duration | None
    timeout_style: str | None
    preemptible: bool | None


class SubmitGangOptions(_Options, GangOptions, total=False):
    """What `submit_gang` takes beside its everyday arguments: `GangOptions`, `SubmitOptions` for each member, and
    `payloads` (one to each rank), `roles` (in place of a size), `request_id` (as in `submit`).
    """

    payloads: Sequence[object] | None
    roles: Sequence[Role | Mapping[str, Any]] | None
    request_id: UUID | str | None


GANG_ONLY = frozenset(SubmitGangOptions.__annotations__.keys() - SubmitOptions.__annotations__.keys())
"""The options of a gang that single jobs do not have."""


class ScheduleOptions(TypedDict, total=False):
    """Of a schedule. None is as if it were left out.

    - `catch_up` [last]: which due times that were missed, while no tick ran, are run afterwards: "skip" (none),
      "last" (the last of them), "all" (each, the last 100 at most). One that passed less than 60 s ago is not missed.
    - `skip_if_running` [False]: submit nothing while the last job or gang of the schedule has not ended.
    - `due_as`: a key of the payload that is given the due time, as text: "2026-03-01T02:00:00.000000+00:00".
    """

    catch_up: str | None
    skip_if_running: bool | None
    due_as: str | None


class ServiceOptions(TypedDict, total=False):
    """Of a service. None is as if it were left out: what is set stays.

    - `surge` [1]: so many gangs more than wanted while one replaces another; 0: an old one stops first.
    - `ready_within_s` [600]: a replica that is not ready for so long is replaced, with its gang. `linger_s` [5]: how
      long a gang goes on between leaving the endpoints and being told to stop.
    - `health`: a path ("/healthz", at the port of each replica) or URL that its worker polls: it is ready while that
      answers with a status below 400. "none": a replica calls `Context.ready`.
    - `version`: a text that makes a new revision where nothing else has changed.
    - `stopped`: want no replica. `source`: the program that declares the service. Then options that are left out are
      reset to their defaults, except `stopped`.
    - `max_replicas`: it is scaled, from `min_replicas` [1] to so many; 0: not any more. By `target_load`, what each
      replica is to report (`Context.load`), or by `target_depth`, single jobs for each replica that wait or run in
      the queue `depth_of` [named as the service] and those below it. More are made when they were asked for for
      `up_after_s` [30], and some removed when fewer were for `down_after_s` [300].
    """

    surge: int | None
    ready_within_s: Duration | None
    linger_s: Duration | None
    health: str | None
    version: str | None
    stopped: bool | None
    source: str | None
    min_replicas: int | None
    max_replicas: int | None
    target_load: float | None
    target_depth: float | None
    depth_of: str | None
    up_after_s: Duration | None
    down_after_s: Duration | None


_USUAL = {"wait_for_hardware": False, "balanced": False, "preemptible": True}


def encode_options(options: Mapping[str, object], _what: str = "options") -> str | None:
    """Return options as one JSON object, without those that say what is usual; None for none. Raises `InvalidInput`,
    `NotSerializable`.
    """
    said = {
        name: value for name, value in options.items() if value is not None and _USUAL.get(name) is not value
    }
    return encode_settings(said) if said else None


def encode_settings(settings: Mapping[str, object], _what: str = "settings") -> str:
    """Return settings as one JSON object, in which None takes one away. Raises `InvalidInput`, `NotSerializable`."""
    members = (f"{encode_basestring_ascii(name)}:{_encode(name, value)}" for name, value in settings.items())
    return f"{{{','.join(members)}}}"


def _encode(name: str, value: Any) -> str:
    if value is True:
        return "true"
    if type(value) is int and abs(value) < 1 << 63:  # What most options are; dumps takes ten times as long.
        return str(value)
    if name == "roles":
        return encode_roles(value) or "null"
    if name in ("after_any", "after_failed"):
        value = awaited_ids(value, name) or []
    elif name == "selector":
        value = as_selector(value)
    elif name in ("tolerates", "taints", "tags", "tasks"):
        value = texts(value, name)
    elif name == "indexes":
        value = whole_numbers(value, name, 32)
    elif name == "payloads":
        return "[" + ",".join(dumps(one, f"payloads[{n}]") for n, one in enumerate(value)) + "]"
    elif name.endswith("_s") and isinstance(value, (str, timedelta)):
        value = seconds(value, name)
    elif isinstance(value, timedelta):
        value = f"{value.total_seconds()} s"
    elif isinstance(value, datetime):
        value = aware(value, name).isoformat()
    elif isinstance(value, UUID):
        value = str(value)
    elif isinstance(value, Decimal):
        value = float(value)
    elif isinstance(value, Mapping):
        value = dict(value)
    elif hasattr(value, "item"):  # a number of numpy
        value = value.item()
    return dumps(value, name)


def texts(values: Sequence[str] | None, what: str) -> list[str] | None:
    """Return strings as a list. Raises `InvalidInput` for a str, which is a sequence of its letters."""
    if isinstance(values, str):
        raise InvalidInput(f"{what} is {values!r}: pass a list of strings, e.g. [{values!r}]")
    return None if values is None else list(values)


def aware(at: datetime, what: str) -> datetime:
    """Return `at`. Raises `InvalidInput` if it is no datetime, or has no time zone."""
    if not isinstance(at, datetime):
        raise InvalidInput(f"{what} is {at!r}: pass a datetime with a time zone")
    if at.tzinfo is None:
        raise InvalidInput(
            f"{what} is {at.isoformat()} without a time zone, which each machine would read differently: use "
            "datetime.now(timezone.utc) + timedelta(...)"
        )
    return at
