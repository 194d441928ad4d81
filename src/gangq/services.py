"""What an App keeps running: `App.service` declares it, workers store it when they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from gangq.client.encoding import as_object
from gangq.client.rows import EndpointRow, ServiceRow
from gangq.client.verbs import Verbs
from gangq.declarations import Declared, require_repeatable
from gangq.durations import Duration, seconds
from gangq.errors import InvalidInput
from gangq.task_options import TaskOptions, arguments

if TYPE_CHECKING:
    from gangq.app import App
    from gangq.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How many replicas a service has: from `min` [1] to `max`, by whole gangs.

    - `load`: what each replica is to report (`Context.load`, said again at least once a minute); or `depth`: so many
      single jobs for each replica that wait or run in the queue `depth_of` [named as the service].
    - `up_after` [30s], `down_after` [5m]: more replicas, or fewer, must have been asked for for so long.
    """

    max: int
    min: int = 1
    load: float | None = None
    depth: float | None = None
    depth_of: str | None = None
    up_after: Duration | None = None
    down_after: Duration | None = None

    def __post_init__(self) -> None:
        if (self.load is None) == (self.depth is None):
            raise InvalidInput("a scale has one target: load, or depth")
        if not 1 <= self.min <= self.max:
            raise InvalidInput(f"min is {self.min} and max {self.max}: 1 <= min <= max")

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of `Client.set_service`."""
        return {
            "min_replicas": self.min,
            "max_replicas": self.max,
            "target_load": self.load,
            "target_depth": self.depth,
            "depth_of": self.depth_of,
            "up_after_s": None if self.up_after is None else seconds(self.up_after, "up_after"),
            "down_after_s": None if self.down_after is None else seconds(self.down_after, "down_after"),
        }


class Service(Declared):
    """A service that an App declares. Its `name` is unique in the database."""

    kind = "service"

    def __repr__(self) -> str:
        return f"<Service {self.name}: {self.arguments['replicas'] or 'scaled'} x {self.arguments['task']}>"

    def row(self) -> ServiceRow:
        """Return it as `gangq.services` shows it: how many replicas are wanted and ready, and what is in the way.

        Raises `NotFound` before a worker, or `App.store_services`, has stored it.
        """
        return self._stored(self.app.client.services(name=self.name))

    def endpoints(self) -> list[EndpointRow]:
        """Where its replicas take requests: whole gangs that are ready."""
        return self.app.client.endpoints(service=self.name)

    def scale(self, replicas: int) -> None:
        """Want so many replicas, rounded up to whole gangs, until the App declares another number. Starts it if it
        was stopped. Raises `InvalidInput`, `NotFound`, `NotAllowed`.
        """
        self.row()
        self.app.client.set_service(name=self.name, replicas=replicas)

    def stop(self) -> None:
        """Want no replica, until `scale`. Raises `NotFound`, `NotAllowed`."""
        self.app.client.stop_service(name=self.name)

    def roll_back(self, to_revision: int | None = None) -> int:
        """Let it be of another revision again [the last other one that was ready]; return its number. Raises
        `NotFound`, `NotAllowed`.
        """
        return self.app.client.roll_back_service(name=self.name, to_revision=to_revision)


class ServiceDeclaration(TypedDict, total=False):
    """How a task is kept running; see `App.service`.

    - `replicas` [one gang]: how many, rounded up to whole gangs. `gang` [1]: members of each gang.
    - `payload` [{}]: the arguments of each replica. `gang_options`: the other options of its gangs, as in
      `Task.gang`: {"strategy": "spread", "preemptible": False}.
    - `scale`: its number of replicas follows its load, see `Scale` [as many as are asked for by hand].
    - `surge` [1], `ready_within` [10m], `linger` [5s], `health`, `version`: see
      `gangq.client.options.ServiceOptions`.
    """

    replicas: int | None
    gang: int
    payload: Mapping[str, Any] | None
    gang_options: Mapping[str, Any] | None
    scale: Scale | None
    surge: int | None
    ready_within: Duration | None
    linger: Duration | None
    health: str | None
    version: str | None


class ServiceTaskOptions(ServiceDeclaration, TaskOptions, total=False):
    """What `App.service` takes: how the task is kept running, and the options of the task."""


def make(
    app: App, task: Task[..., Any], name: str | None = None, **declared: Unpack[ServiceDeclaration]
) -> Service:
    """Return a service of this task. Raises `InvalidInput`, `NotSerializable`."""
    called = name or task.name
    replicas, gang, scale = declared.get("replicas"), declared.get("gang", 1), declared.get("scale")
    ready_within, linger = declared.get("ready_within"), declared.get("linger")
    if replicas is not None and replicas < 1:
        raise InvalidInput(f"service {called!r} has {replicas} replicas: 1 or more; Service.stop wants none")
    require_repeatable("service", task, task.defaults)
    given = as_object(declared.get("payload") or {}, "payload")
    of_gang, options = task._gang(gang, declared.get("gang_options") or {}, given, None)
    work = {**of_gang, **arguments(options)}
    found: dict[str, Any] = {
        "name": called,
        "task": task.name,
        "payload": given,
        # A number that is declared resets the present one when it changes: what scales has none of its own.
        "replicas": replicas or (gang if scale is None else None),
        "gang": gang,
        "work": {
            key: value
            for key, value in work.items()
            if value is not None and key not in ("task", "payload", "payloads", "size")
        },
        "surge": declared.get("surge"),
        "ready_within_s": None if ready_within is None else seconds(ready_within, "ready_within"),
        "linger_s": None if linger is None else seconds(linger, "linger"),
        "health": declared.get("health"),
        "version": declared.get("version"),
        **({} if scale is None else scale.arguments),
    }
    # What cannot be read is said where it is written, not when a worker starts.
    Verbs.set_service(**found)
    return Service(app, called, found)
