"""Boards as pictures: a line a host, a character a GPU, and what is decided drawn into them.

    h0  AAAA....   rack=r0        a host with eight GPUs; unit A holds four of them
    h1  --------                  a host whose worker may get nothing now
    h3  ........   link=00112233  GPUs with the same digit are joined by NVLink
    h2  ____                      a host without GPUs: four slots
    w0  ..         host=h3        a worker of a host of another name
    A   ends=600 prio=2           what is known of unit A; upper case: a gang, lower case: a single job
    X   4x2 ends=100 spread       asks: four members with two GPUs each, for 100 s at most
    x*3 1                         three single jobs with a GPU each
    queue a max_gpus=4 policy=fifo a queue
    limit k 2                     so many jobs of what has key=k may be placed at once
    plans=1 victims=4 grace=10    settings of the board

What asks is placed in the order of the lines. ``after`` draws the same lines with what starts drawn in, and says of
the rest what became of it.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from typing import Any

from gangq.placement.board import Ask, Board, Device, Hold, Kept, Kind, Needs, Queue, Role, Unit, Worker
from gangq.placement.decide import decide
from gangq.placement.decisions import Decision
from gangq.placement.strategies import STRATEGIES

NOW = 1000.0


def _options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) if "=" in word else (word, "yes") for word in words)


class Picture:
    """A board that was drawn."""

    def __init__(self, text: str) -> None:
        self.rows: list[tuple[str, str]] = []
        self._workers: list[Worker] = []
        self._labels: list[dict[str, str]] = []
        """What is said of each worker."""
        self._devices: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        """What each unit holds of each worker."""
        self._slots: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        about: dict[str, dict[str, str]] = defaultdict(dict)
        asks: list[tuple[str, str, dict[str, str]]] = []
        queues: dict[str, Queue] = {"default": Queue("default")}
        limits: dict[str, float] = {}
        settings: dict[str, Any] = {"planned_starts": 0, "victims": 0}
        levels: tuple[str, ...] = ("host",)
        for line in textwrap.dedent(text).strip().splitlines():
            name, *words = line.split()
            if name == "levels":
                levels = tuple(words)
            elif name == "queue":
                queues[words[0]] = _queue(words[0], _options(words[1:]))
            elif name == "limit":
                limits[words[0]] = float(words[1])
            elif "=" in name:
                settings |= _settings(_options([name, *words]))
            elif name[0] in "hw":
                self._read_worker(name, words[0], _options(words[1:]))
            elif words and (words[0][0].isdigit() or "*" in name or "+" in words[0]):
                asks.append((name, words[0], _options(words[1:])))
            else:
                about[name] |= _options(words)
        units = [self._unit(mark, about[mark]) for mark in sorted({*self._devices, *self._slots})]
        kinds: list[Kind] = []
        waiting = [_ask(age, *ask, kinds) for age, ask in enumerate(asks)]
        kept = [_kept(mark, options) for mark, _, options in asks if "kept" in options]
        self.board = Board(
            now=NOW,
            workers=tuple(
                w._replace(domains=tuple(_path(levels[: n + 1], w, said) for n in range(len(levels))))
                for w, said in zip(self._workers, self._labels, strict=True)
            ),
            units=tuple(_moved(unit, kinds) if unit.drained else unit for unit in units),
            kinds=tuple(kinds),
            asks=tuple(waiting),
            queues=tuple(queues[name] for name in sorted(queues)),
            limits=limits,
            kept=tuple(kept),
            levels=levels,
            **settings,
        )

    def _read_worker(self, name: str, gpus: str, options: dict[str, str]) -> None:
        number = len(self._workers)
        vrams = [int(v) for v in options.get("vram", "0").split(",")]
        devices = tuple(
            Device(100 * number + n, vrams[n % len(vrams)], options.get("link", "")[n : n + 1])
            for n, mark in enumerate(gpus)
            if mark not in "_" and "nogpu" not in options
        )
        for n, mark in enumerate(gpus):
            if mark.isalpha() and devices:
                self._devices[mark][number].append(100 * number + n)
            elif mark.isalpha():
                self._slots[mark][number] += 1
        self._workers.append(
            Worker(
                id=number,
                name=name,
                host=options.get("host", name),
                slots=int(options.get("slots", len(gpus))),
                memory_mb=int(options.get("mem", 1_000_000)),
                millicpus=int(options.get("cpus", 1_000_000)),
                devices=devices,
                class_id=int(options.get("class", 0)),
                open=gpus[0] != "-" and "closed" not in options,
                doubtful="doubtful" in options,
                warm=tuple(options["warm"].split(",")) if "warm" in options else (),
            )
        )
        self._labels.append(options)
        self.rows.append((name, gpus))

    def _unit(self, mark: str, options: dict[str, str]) -> Unit:
        each, memory_mb = int(options.get("each", 0)), int(options.get("mem", 0))
        holds = []
        for worker, devices in sorted(self._devices[mark].items()):
            size = each or (len(devices) if mark.islower() else 1)
            for n in range(0, len(devices), size):
                holds.append(Hold(worker, tuple(devices[n : n + size]), memory_mb))
        for worker, count in sorted(self._slots[mark].items()):
            holds += [Hold(worker, (), memory_mb)] * count
        return Unit(
            id=unit_id(mark),
            holds=tuple(holds),
            ends_at=NOW + float(options.get("ends", 86400)),
            queue=options.get("queue", "default"),
            limit_key=options.get("key", ""),
            submitter=options.get("by", "me"),
            priority=int(options.get("prio", 0)),
            since=NOW - float(options.get("since", 0)),
            lost_s=float(options.get("lost", 0)),
            movable="fixed" not in options and "leaving" not in options,
            leaving="leaving" in options,
            drained="drained" in options,
            apart=options.get("apart", ""),
        )

    def draw(self, decisions: list[Decision]) -> str:
        """The hosts with what starts drawn in, and a line for everything else that was decided."""
        rows = {n: list(gpus) for n, (_, gpus) in enumerate(self.rows)}
        said = []
        for decision in decisions:
            mark = mark_of(decision.ask)
            for seat in decision.seats:
                spots = [device % 100 for device in seat.devices] or [
                    next(n for n, free in enumerate(rows[seat.worker]) if free in "_.")
                ]
                for spot in spots:
                    assert rows[seat.worker][spot] in "._", f"{mark} sits where {rows[seat.worker]} is taken"
                    rows[seat.worker][spot] = mark
                if seat.ends_by is not None:
                    said.append(f"{mark} ends by {seat.ends_by - NOW:g}")
            if decision.stop:
                stopped = " ".join(sorted(mark_of(unit) for unit in decision.stop))
                said.append(f"{mark} stops {stopped}")
            if decision.planned and decision.starts_at is not None:
                where = sorted({self.rows[seat.worker][0] for seat in decision.planned})
                said.append(f"{mark} starts in {decision.starts_at - NOW:g} on {' '.join(where)}")
            elif decision.refused:
                said.append(f"{mark} waits: {decision.refused.gate}{_numbers(decision)}")
        drawn = [f"{name} {''.join(rows[n])}" for n, (name, _) in enumerate(self.rows)]
        return "\n".join([*drawn, *said])


def _settings(options: dict[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in options.items():
        field = {"plans": "planned_starts", "grace": "grace_s"}.get(key, key)
        found[field] = float(value) if field.endswith("_s") else int(value)
    return found


def _ask(age: int, name: str, size: str, options: dict[str, str], kinds: list[Kind]) -> Ask:
    """An ask, whose kind is one of ``kinds`` or is added to them."""
    mark, _, count = name.partition("*")
    kind = _kind(size, options)
    same = next((k.id for k in kinds if k._replace(id=0) == kind), None)
    if same is None:
        same = len(kinds) + 1
        kinds.append(kind._replace(id=same))
    priority = int(options.get("prio", 0))
    mates = options["mates"].split("+") if "mates" in options else []
    return Ask(
        id=unit_id(mark) if mark.isupper() else f"k{ord(mark)}/{priority}",
        kind=same,
        priority=priority,
        age=age,
        submitter=options.get("by", "me"),
        estimate_s=float(options.get("ends", 3600)),
        count=int(count or 1),
        since=NOW - float(options["since"]) if "since" in options else None,
        missing=tuple(int(n) for n in options["missing"].split("+")) if "missing" in options else None,
        mates=tuple(tuple(int(w) for w in role.split(",") if w) for role in mates),
        avoid_hosts=frozenset(options["avoid"].split(",")) if "avoid" in options else frozenset(),
    )


def _kept(name: str, options: dict[str, str]) -> Kept:
    """What is kept for an ask: drawn behind ``kept=``, the workers with strokes between them."""
    mark = name.partition("*")[0]
    holds = []
    for worker, gpus in enumerate(options["kept"].split("/")):
        holds += [Hold(worker, (100 * worker + n,)) for n, m in enumerate(gpus) if m == mark]
    return Kept(unit_id(mark), tuple(holds), NOW + 30)


def _moved(unit: Unit, kinds: list[Kind]) -> Unit:
    """A unit that is to be moved away: it asks for what it holds, as one of ``kinds`` that is added."""
    size = max(1, len(unit.holds[0].devices))
    kinds.append(_kind(f"{len(unit.holds)}x{size}", {})._replace(id=len(kinds) + 1))
    return unit._replace(ask=Ask(unit.id, len(kinds), unit.priority))


def _numbers(decision: Decision) -> str:
    why = decision.refused
    assert why is not None
    return f" {why.have:g} of {why.need:g}" if why.need else ""


def _path(levels: tuple[str, ...], worker: Worker, labels: dict[str, str]) -> str | None:
    names = [worker.host if level == "host" else labels.get(level) for level in levels]
    if levels[-1] == "host":
        return worker.host
    return None if None in names else "/".join(str(name) for name in names)


def _kind(size: str, options: dict[str, str]) -> Kind:
    roles = []
    for text in size.split("+"):
        members, _, gpus = text.partition("x")
        least, _, most = members.partition("-")
        roles.append(
            Role(
                Needs(
                    gpus=0 if "cpu" in options else int(gpus or 1),
                    vram_mb=int(options.get("vram", 0)),
                    memory_mb=int(options.get("mem", 0)),
                    millicpus=int(options.get("cpus", 0)),
                    avoid=frozenset(int(d) for d in options.get("not", "").split(",") if d),
                ),
                least=int(least),
                most=int(most or least),
                serves=frozenset(int(c) for c in options.get("class", "0").split(",")),
                strategy=next((name for name in STRATEGIES if name in options), "pack"),
                balanced="balanced" in options,
            )
        )
    return Kind(
        0,
        tuple(roles),
        queue=options.get("queue", "default"),
        require=options.get("require", ""),
        prefer=options.get("prefer", ""),
        apart=options.get("apart", ""),
        model=options.get("model", ""),
        limit_key=options.get("key", ""),
    )


def _queue(name: str, options: dict[str, str]) -> Queue:
    def prefixed(prefix: str) -> dict[str, float]:
        return {key[len(prefix) :]: float(v) for key, v in options.items() if key.startswith(prefix)}

    return Queue(
        name,
        paused="paused" in options,
        policy=options.get("policy", "priority"),
        weight=float(options.get("weight", 1)),
        maximum=prefixed("max_"),
        guaranteed=prefixed("least_"),
        submitter_maximum=prefixed("each_"),
        max_gangs=int(options["gangs"]) if "gangs" in options else None,
        max_jobs=int(options["jobs"]) if "jobs" in options else None,
        displaces="meek" not in options,
    )


def unit_id(mark: str) -> str:
    """``A`` is a gang, ``a`` a single job."""
    return f"{'g' if mark.isupper() else 'j'}{ord(mark)}"


def mark_of(name: str) -> str:
    """The letter that stands for a unit or an ask."""
    return chr(int(name[1:].partition("/")[0]))


def after(text: str) -> str:
    """What becomes of a board."""
    picture = Picture(text)
    return picture.draw(decide(picture.board))


def drawn(text: str) -> str:
    """A picture as ``after`` writes it."""
    lines = textwrap.dedent(text).strip().splitlines()
    return "\n".join(" ".join(line.split()) for line in lines)
