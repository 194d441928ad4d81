"""The board: everything one pass decides from, read from the database in one snapshot, or from a file.

Moments are seconds of the database's clock (the epoch's), durations seconds, memory MiB, processors thousandths.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from gangq.errors import InvalidInput, SchemaMismatch

FORMAT = 1
"""The number of this layout. A library does not decide on a board of another one."""
_UNTOLD = 1
"""The format of a board that tells none, in every release: files of the first one tell none."""
_NEWER = "it comes from a newer gangq than this library: upgrade gangq here (pip install --upgrade gangq)"
_OLDER = (
    "it comes from an older gangq than this library: run `gangq migrate` as the schema's owner, or read a file "
    "with the release that wrote it"
)


class Device(NamedTuple):
    """A GPU that a worker offers."""

    id: int
    vram_mb: int = 0
    link: str = ""
    """Devices of a worker with the same name here are joined by NVLink or XGMI, each with each. Empty: with none, or
    not known."""
    withheld: bool = False
    """Quarantined, or in doubt: nobody gets it."""


class Worker(NamedTuple):
    """A live incarnation, with all that it offers, free or not."""

    id: int
    """Its incarnation."""
    name: str
    host: str
    slots: int = 1
    memory_mb: int = 0
    millicpus: int = 0
    devices: tuple[Device, ...] = ()
    class_id: int = 0
    """Workers of one class serve the same roles: queues, tasks, labels and taints are judged by the database."""
    domains: tuple[str | None, ...] = ()
    """For each level of the topology the domain it lies in, broader ones included in its name; None: in none."""
    open: bool = True
    """Whether it may be given work now: heard lately, not cordoned, not quarantined, not told to stop."""
    doubtful: bool = False
    """Its host lost a worker lately: the last choice for a while."""
    warm: tuple[str, ...] = ()
    """The models it has loaded."""


class Hold(NamedTuple):
    """What a unit holds on one worker: one slot for each of its jobs there."""

    worker: int
    devices: tuple[int, ...] = ()
    memory_mb: int = 0
    millicpus: int = 0
    slots: int = 1


class Unit(NamedTuple):
    """What is placed as one and stops as one: a gang, or a single job."""

    id: str
    """``g7``: a gang. ``j7``: a single job."""
    holds: tuple[Hold, ...]
    ends_at: float
    """When it has ended, as far as that can be told; later than the board's moment."""
    queue: str = "default"
    submitter: str = ""
    priority: int = 0
    since: float = 0.0
    """When it began."""
    lost_s: float = 0.0
    """The work that would be lost if it were told to stop now: seconds since its last checkpoint, times its GPUs."""
    movable: bool = False
    """Whether it may be told to stop for others: preemptible, past its minimum run time, all of it runs."""
    movable_at: float | None = None
    """When its minimum run time is over, from when on it is movable. None: never."""
    ends_by: str = "budget"
    """What says so: its ``budget``, which is enforced; the ``history`` of its task, an estimate; ``stop``: it has
    been told to; ``late``: it has outrun its budget and ends any moment."""
    part_of: str = ""
    """The gang of which this member is a unit of its own, because the gang goes on without it."""
    leaving: bool = False
    """Told to stop already: not movable, nor ever again."""
    drained: bool = False
    """Some of it runs on a host or worker that is being drained."""
    apart: str = ""
    """The key by which it is kept apart from others."""
    ask: Ask | None = None
    """What it would wait as, were it placed again; for units that are to be moved."""
    limit_key: str = ""
    """What limits its jobs beside the queue; empty: nothing."""


class Place(NamedTuple):
    """Where single jobs of one kind may start on a worker, one after another."""

    id: int
    worker: int
    kind: int
    devices: tuple[int, ...] = ()
    job: str = ""
    """The unit that sits there; ``ended``: its job has ended, and it is closed; empty: no job has filled it yet."""


class Needs(NamedTuple):
    """What one member or job needs."""

    gpus: int = 0
    vram_mb: int = 0
    """Of each GPU."""
    memory_mb: int = 0
    millicpus: int = 0
    avoid: frozenset[int] = frozenset()
    """Devices that it must not get."""


class Role(NamedTuple):
    """The members of a gang that are alike."""

    needs: Needs = Needs()
    least: int = 1
    most: int = 1
    """How many members: elastic between the two."""
    serves: frozenset[int] = frozenset({0})
    """The classes of workers that can run it."""
    name: str = ""
    strategy: str = "pack"
    balanced: bool = False
    require: str = ""
    """The topology level of which its members share one domain; empty: none."""
    prefer: str = ""


class Kind(NamedTuple):
    """What asks alike: one queue, the same roles, the same wishes."""

    id: int
    roles: tuple[Role, ...]
    queue: str = "default"
    require: str = ""
    """The topology level of which all its members share one domain."""
    prefer: str = ""
    apart: str = ""
    """Kept on other hosts than everything with the same key."""
    model: str = ""
    """The model it needs; where that is loaded it starts sooner."""
    limit_key: str = ""
    """What limits its jobs beside the queue; empty: nothing."""
    paused_task: str = ""
    """A task of its roles that is paused; empty: none is."""


class Ask(NamedTuple):
    """What waits for seats: a gang, or the single jobs of one kind and priority."""

    id: str
    """``g7``: a gang. ``k7/5``: the single jobs of kind 7 with priority 5."""
    kind: int
    priority: int = 0
    age: int = 0
    """Of two that are equal otherwise, the one with the lower number is older and goes first."""
    submitter: str = ""
    estimate_s: float = 3600.0
    """How long it is taken to run: its budget, or the 90th percentile of its task where that is less."""
    count: int = 1  # type: ignore[assignment]  # in place of the method of tuples
    """How many jobs wait in this line; 1 for a gang."""
    since: float | None = None
    """When the first of these single jobs was submitted. None: a gang, or it was sent to the front after a trip."""
    missing: tuple[int, ...] | None = None
    """A gang that runs: how many members it lacks, by role. None: all of it waits."""
    mates: tuple[tuple[int, ...], ...] = ()
    """The workers of those that run, by role."""
    avoid_hosts: frozenset[str] = frozenset()
    """Hosts where it failed: taken only where no others will do."""

    @property
    def single(self) -> bool:
        """Whether these are single jobs: each starts for itself."""
        return self.id.startswith("k")


class Kept(NamedTuple):
    """Seats that are kept for an ask until it starts: others stop for it, or it stopped itself to start again."""

    ask: str
    holds: tuple[Hold, ...]
    starts_at: float


class Rate(NamedTuple):
    """At most ``starts`` at once, then one each ``every_s``: a bucket that refills."""

    said: str
    """As it was set: ``10/1m``."""
    starts: int
    every_s: float
    full_at: float = 0.0
    """When the bucket is full again. Every start moves it on by ``every_s``."""


class Queue(NamedTuple):
    """A queue; ``a.b`` is a child of ``a``, and what is set for ``a`` counts what its children use."""

    name: str
    paused: bool = False
    policy: str = "priority"
    """In which order what waits here has its turn, by a name of :data:`gangq.placement.order.POLICIES`."""
    weight: float = 1.0
    maximum: Mapping[str, float] = {}
    """Most it may use of ``gpus``, ``memory_mb``, ``cpus``, ``jobs``."""
    guaranteed: Mapping[str, float] = {}
    submitter_maximum: Mapping[str, float] = {}
    """Most that one submitter may use of ``gangs``, ``jobs``, ``gpus``."""
    max_gangs: int | None = None
    max_jobs: int | None = None
    displaces: bool = True
    """Whether what waits here may have others told to stop."""
    light_jobs: int = 0
    """Jobs that run here without having been placed: they count as jobs."""
    rate: Rate | None = None
    """What limits how often jobs of it and its children start."""


class Board(NamedTuple):
    """One snapshot. Every tuple is in a fixed order, so that the same state is the same board."""

    now: float
    workers: tuple[Worker, ...] = ()
    units: tuple[Unit, ...] = ()
    kinds: tuple[Kind, ...] = ()
    asks: tuple[Ask, ...] = ()
    queues: tuple[Queue, ...] = (Queue("default"),)
    limits: Mapping[str, float] = {}
    """Of the jobs that name a limit key so many may be placed at once."""
    rates: Mapping[str, Rate] = {}
    """Of the jobs that name a limit key so many may start in a period."""
    cut: tuple[int, ...] = ()
    """Kinds of which more may wait than are on the board."""
    kept: tuple[Kept, ...] = ()
    places: tuple[Place, ...] = ()
    """The open ones. The room of one that is empty is free for whatever the pass prefers."""
    levels: tuple[str, ...] = ("host",)
    """The topology, broad to narrow."""
    warm_s: float = 0.0
    """A single job may go before others up to this much older, if a worker with its model loaded has room for it."""
    planned_starts: int = 4
    """How many asks that must wait get a planned start."""
    victims: int = 8
    """How many units one pass may tell to stop."""
    grace_s: float = 30.0
    """How long a unit that is told to stop may take."""
    pass_number: int = 0
    """How many passes had begun."""
    asked: int = 0
    """How many ticks had asked for one."""
    recorded: bool = False
    """Whether passes are written down with their boards."""
    format: int = FORMAT

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Board:
        """The board that ``gangq.board()`` or a file holds.

        Raises:
            SchemaMismatch: another format, an unknown or a missing field; the message says which side to upgrade.
            InvalidInput: no board at all, or a value of another type than its field has.
        """
        if not isinstance(data, Mapping):
            raise InvalidInput(f"a board is an object, not {data!r:.80}")
        found = data.get("format", _UNTOLD)
        if found != FORMAT:
            newer = isinstance(found, int) and found > FORMAT
            raise SchemaMismatch(
                f"this board has format {found!r:.80}, this library decides on format {FORMAT}: "
                f"{_NEWER if newer else _OLDER}"
            )
        whole: Any = cls
        try:
            board: Board = _object(whole)(data)
        except _Wrong as problem:
            said = f"board{problem.at} {problem}"
            raise SchemaMismatch(f"{said}: {problem.why}") if problem.why else InvalidInput(said) from None
        return board

    def to_json(self) -> dict[str, Any]:
        """As ``json.dumps`` takes it; what has its default is left out, but for the format."""
        dumped = _dump(self)
        assert isinstance(dumped, dict)
        return {"format": self.format, **dumped}


class _Wrong(ValueError):
    """A value that no board has. ``why``: which of both sides is too old, if one is."""

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what)
        self.why = why
        self.at = ""
        """Where it is: each level puts its own part before it."""


Loader = Callable[[Any], Any]


def _loader(kind: Any) -> Loader:
    """What makes a value of this type hint of what JSON holds, or raises ``_Wrong``."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        some = _loader(next(a for a in args if a is not type(None)))
        return lambda data: None if data is None else some(data)
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return _object(kind)
    if origin in (tuple, frozenset):
        return _list(origin, _loader(args[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_loader(args[1]))
    return _plain(kind)


@functools.cache
def _object(kind: Any) -> Loader:
    hints = get_type_hints(kind)
    loaders = {name: _loader(hint) for name, hint in hints.items()}
    as_it_is = {name: hint for name, hint in hints.items() if hint in (int, str, bool)}
    required = {*kind._fields} - {*kind._field_defaults}

    def load(data: Any) -> Any:
        # type() first: isinstance of an abstract class costs as much as the rest, and there are 100,000 objects.
        if type(data) is not dict and not isinstance(data, Mapping):
            raise _Wrong(f"is {data!r}, not an object")
        if not data.keys() <= loaders.keys():
            raise _Wrong(f"has unknown fields ({', '.join(sorted(data.keys() - loaders.keys()))})", _NEWER)
        given = {}
        for name, value in data.items():
            if type(value) is as_it_is.get(name):
                given[name] = value
                continue
            try:
                given[name] = loaders[name](value)
            except _Wrong as problem:
                problem.at = f".{name}{problem.at}"
                raise
        if not required <= given.keys():
            raise _Wrong(f"lacks fields ({', '.join(sorted(required - given.keys()))})", _OLDER)
        return kind(**given)

    return load


def _list(kind: Any, one: Loader) -> Loader:
    def load(data: Any) -> Any:
        if type(data) is not list and not isinstance(data, list | tuple | set | frozenset):
            raise _Wrong(f"is {data!r}, not a list")
        items = []
        for item in data:
            try:
                items.append(one(item))
            except _Wrong as problem:
                problem.at = f"[{len(items)}]{problem.at}"
                raise
        return kind(items)

    return load


def _mapping(one: Loader) -> Loader:
    def load(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise _Wrong(f"is {data!r}, not an object")
        items = {}
        for key, value in data.items():
            try:
                items[str(key)] = one(value)
            except _Wrong as problem:
                problem.at = f".{key}{problem.at}"
                raise
        return items

    return load


def _plain(kind: Any) -> Loader:
    def load(data: Any) -> Any:
        if type(data) is kind and (kind is not float or math.isfinite(data)):
            return data
        if kind is float and type(data) is int and abs(data) < 1e300:
            return float(data)
        raise _Wrong(f"is {data!r}, not a finite {kind.__name__}")

    return load


def _dump(value: Any) -> Any:
    if (defaults := getattr(value, "_field_defaults", None)) is not None:
        return {
            name: _dump(mine)
            for name, mine in value._asdict().items()
            if name not in defaults or mine != defaults[name]
        }
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_dump(item) for item in value]
    return {key: _dump(item) for key, item in value.items()} if isinstance(value, Mapping) else value
