"""Python values on their way into the database: strict JSON, or an error that names what is not, and numbers that an
integer has room for. And numbers on their way into messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Protocol, SupportsIndex, TypeVar

from gangq.errors import InvalidInput, NotSerializable

T = TypeVar("T")

# Made once: json.dumps with options makes an encoder for every call.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class Encoded(str):
    """JSON text out of :func:`dumps`, sent as it is where a value would be encoded."""

    __slots__ = ()


def dumps(value: object, what: str) -> str:
    """Return `value` as JSON text. `what` names it in errors ("payload", "result").

    Only what JSON can hold and give back is accepted: dict with str keys, list, tuple, str, int, float, bool,
    None. No NaN or infinity (jsonb has none) and no key of another type (json would silently make it a
    string). Raises `NotSerializable` naming the type and the path to it.
    """

    def refuse(_value: object, problem: str) -> object:
        raise NotSerializable(f"{what} {problem}")

    # Checked before, not after a failure: json.dumps turns keys such as 1 and None into strings and says
    # nothing.
    try:
        return _encode(walk(value, refuse))
    except RecursionError:
        raise NotSerializable(f"{what} is nested too deeply: flatten it") from None
    except ValueError as problem:
        if isinstance(problem, NotSerializable):
            raise
        # An integer of more digits than Python writes down.
        raise NotSerializable(f"{what} cannot be written as JSON: {problem}") from None


def dumps_each(values: Sequence[object], what: str) -> list[str]:
    """Return each of `values` as JSON text; errors name the position, e.g. `payloads[3]`."""
    return [dumps(value, f"{what}[{index}]") for index, value in enumerate(values)]


def walk(
    value: object, bad: Callable[[object, str], object], path: str = "$", parents: tuple[int, ...] = ()
) -> object:
    """Return `value` with `bad(part, problem)` in place of each part that JSON does not have or PostgreSQL cannot
    store.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        # Both are legal in JSON and in Python, and PostgreSQL stores neither.
        if "\x00" in value or not _encodable(value):
            return bad(
                value,
                f"has text at {path} that PostgreSQL cannot store (a NUL character or half of a surrogate pair): "
                "remove it, or encode the bytes as base64",
            )
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return bad(value, f"has {value} at {path}: JSON knows only finite numbers; pass None instead")
        return value
    if id(value) in parents:
        return bad(value, f"contains itself at {path}")
    inside = (*parents, id(value))
    if isinstance(value, dict):
        found = {}
        for key, item in value.items():
            if isinstance(key, str):
                name = walk(key, bad, path)
            else:
                name = bad(key, f"has a key of type {type_name(key)} ({key!r}) at {path}: use str")
            found[name] = walk(item, bad, f"{path}.{key}", inside)
        return found
    if isinstance(value, (list, tuple)):
        return [walk(item, bad, f"{path}[{index}]", inside) for index, item in enumerate(value)]
    return bad(
        value,
        f"has {type_name(value)} at {path}, which is not JSON: convert it to str, int, float, bool, None, list or "
        "dict first",
    )


def as_object(value: object, what: str) -> dict[str, object]:
    """Return `value` as a dict; raises `NotSerializable` when it is no mapping."""
    if not isinstance(value, Mapping):
        raise NotSerializable(
            f"{what} is {type_name(value)}, and must be a JSON object: its keys become the handler's "
            'keyword arguments, e.g. {"n": 1}'
        )
    return dict(value)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def type_name(value: object) -> str:
    """Return the type of `value` as people write it."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def fits(value: T, what: str, bits: int) -> T:
    """Return a number that an integer of so many bits has room for. Raises `InvalidInput`, naming `what`: the server
    would not say which argument it was.
    """
    most = 2 ** (bits - 1) - 1
    if isinstance(value, int) and not -most - 1 <= value <= most:
        raise InvalidInput(f"{what} is {value}: the database takes {-most - 1} to {most} at most")
    return value


def whole_numbers(values: Iterable[SupportsIndex], what: str, bits: int) -> list[int]:
    """Return numbers that integers of so many bits have room for. Raises `InvalidInput`, naming `what`."""
    try:
        found = None if isinstance(values, str | bytes) else [*map(index, values)]
    except TypeError:
        found = None
    if found is None:
        raise InvalidInput(f"{what} is {values!r}: pass a list of whole numbers")
    for extreme in (min, max):
        fits(extreme(found, default=0), f"one of {what}", bits)
    return found


AWAITING = ("after", "after_any", "after_failed")
"""What names the jobs to wait for: that must be done, must have ended, must have failed."""


class Awaited(Protocol):
    """What a job can wait for: a handle of a job or of a gang."""

    @property
    def job_ids(self) -> list[int]:
        """The jobs that must be done."""


def awaited_ids(after: Sequence[int | Awaited] | None, what: str = "after") -> list[int] | None:
    """Return the ids of the jobs that `after` names; None for none. Raises `InvalidInput`."""
    if isinstance(after, int | str) or not isinstance(after, Iterable | None):
        raise InvalidInput(f"{what} is {after!r}: pass a list of handles or of ids of jobs")
    found: list[int] = []
    for one in after or ():
        ids = [one] if isinstance(one, int) and not isinstance(one, bool) else getattr(one, "job_ids", None)
        if not isinstance(ids, list):
            raise InvalidInput(
                f"{what} holds {one!r}: pass handles of jobs or gangs, or ids of jobs, which are numbers"
            )
        found += ids
    return whole_numbers(found, what, 64) or None


def counted(n: float, what: str) -> str:
    """Return how many of what there are: 1 GPU, 2 GPUs."""
    return f"{n:g} {what}" if n == 1 else f"{n:g} {what}s"
