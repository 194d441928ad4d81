"""Python values on their way into jsonb: strict JSON, or an error that names what is not.

And numbers on their way into messages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from gangq.errors import InvalidInput, NotSerializable

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
    # Checked before, not after a failure: json.dumps turns keys such as 1 and None into strings and says
    # nothing.
    try:
        _check(value, what, "$", ())
        return _encode(value)
    except RecursionError:
        raise NotSerializable(f"{what} is nested too deeply: flatten it") from None
    except ValueError as problem:
        if isinstance(problem, NotSerializable):
            raise
        # An integer of more digits than Python writes down.
        raise NotSerializable(f"{what} cannot be written as JSON: {problem}") from None


NOTE = "gangq_note"
"""The one key of what stands in place of a result that could not be stored; its value says why."""


def dumps_result(value: object, what: str) -> Encoded:
    """Return the result of finished work as JSON text. Never raises: the work is done, whatever it returned.

    NaN and infinity become null, scalars of numpy and torch numbers. What then is not JSON is replaced by
    `note_for` the reason.
    """
    try:
        return Encoded(dumps(value, what))
    except NotSerializable:
        pass
    try:
        return Encoded(dumps(_plain(value, lambda other: other), what))
    except Exception as refused:
        return note_for(refused, what)


def note_for(refused: Exception, what: str) -> Encoded:
    """Return what stands in place of a result that could not be stored; `Handle.result` raises its text."""
    try:
        why = str(refused)
        return Encoded(dumps({NOTE: why}, what))
    except Exception:
        return Encoded(dumps({NOTE: f"{what} could not be stored ({type(refused).__name__})"}, what))


def note_of(result: object) -> str | None:
    """Return why a result was not stored; None for a result that was."""
    if isinstance(result, dict) and len(result) == 1 and isinstance(result.get(NOTE), str):
        return str(result[NOTE])
    return None


def as_progress(data: Mapping[str, object], most_bytes: int) -> tuple[dict[str, object], list[str]]:
    """Return a beat as it can be stored, and the names of the fields that are not as they were given.

    NaN and infinity become null, scalars of numpy and torch numbers; neither is named. Other values that JSON
    does not have become their repr, cut short. The largest fields are left out until the rest has at most
    `most_bytes`. Never raises: progress must not end the work that it is about.
    """
    changed: list[str] = []
    try:
        found = dict(data)
        if len(dumps(found, "a beat")) <= most_bytes:
            return found, []
    except Exception:
        found = {}  # What is wrong is found field by field.
    texts: dict[str, str] = {}
    for name, value in data.items():
        replaced: list[object] = []

        def shown(other: object, replaced: list[object] = replaced) -> str:
            replaced.append(other)
            return _shown(other)

        try:
            texts[name] = dumps(_plain(value, shown), name)
        except Exception:
            replaced.append(value)
            texts[name] = dumps(_shown(value), name)
        if replaced:
            changed.append(name)
    while sum(len(name) + len(text) for name, text in texts.items()) + 4 * len(texts) + 2 > most_bytes:
        largest = max(texts, key=lambda name: len(texts[name]) + len(name))
        del texts[largest]
        changed.append(largest[:_SHOWN_CHARS])
    return {_storable(name): json.loads(text) for name, text in texts.items()}, changed


_SHOWN_CHARS = 200


def _shown(value: object) -> str:
    """The repr of `value`, cut short; what has none is named by its type."""
    try:
        return _storable(repr(value)[:_SHOWN_CHARS])
    except Exception:
        return f"<{_type_name(value)}>"


def _storable(text: str) -> str:
    """`text` as PostgreSQL can store it."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _plain(value: object, otherwise: Callable[[object], object], parents: tuple[int, ...] = ()) -> object:
    """`value` with None for NaN and infinity, and Python's numbers for scalars that have `.item()`.

    What is not JSON even so is replaced by `otherwise` of it.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return value if "\x00" not in value and _encodable(value) else otherwise(value)
    if id(value) in parents:
        return otherwise(value)
    inside = (*parents, id(value))
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else otherwise(key): _plain(item, otherwise, inside)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, otherwise, inside) for item in value]
    try:
        scalar = value.item()  # type: ignore[attr-defined]
    except Exception:
        return otherwise(value)
    return _plain(scalar, otherwise) if isinstance(scalar, (bool, int, float, str)) else otherwise(value)


def as_object(value: object, what: str) -> dict[str, object]:
    """Return `value` as a dict; raises `NotSerializable` when it is no mapping."""
    if not isinstance(value, Mapping):
        raise NotSerializable(
            f"{what} is {_type_name(value)}, and must be a JSON object: its keys become the handler's "
            'keyword arguments, e.g. {"n": 1}'
        )
    return dict(value)


def _check(value: object, what: str, path: str, parents: tuple[int, ...]) -> None:
    if value is None or isinstance(value, (bool, int)):
        return
    if isinstance(value, str):
        # Both are legal in JSON and in Python, and PostgreSQL stores neither.
        if "\x00" in value or not _encodable(value):
            raise NotSerializable(
                f"{what} has text at {path} that PostgreSQL cannot store (a NUL character or half of a "
                "surrogate pair): remove it, or encode the bytes as base64"
            )
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotSerializable(
                f"{what} has {value} at {path}: JSON knows only finite numbers; pass None instead"
            )
        return
    if id(value) in parents:
        raise NotSerializable(f"{what} contains itself at {path}")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise NotSerializable(
                    f"{what} has a key of type {_type_name(key)} ({key!r}) at {path}: use str"
                )
            _check(key, what, path, ())
            _check(item, what, f"{path}.{key}", (*parents, id(value)))
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, what, f"{path}[{index}]", (*parents, id(value)))
        return
    raise NotSerializable(
        f"{what} has {_type_name(value)} at {path}, which is not JSON: convert it to str, int, float, bool, "
        "None, list or dict first"
    )


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def dumps_each(values: Sequence[object], what: str) -> list[str]:
    """Return each of `values` as JSON text; errors name the position, e.g. `payloads[3]`."""
    return [dumps(value, f"{what}[{index}]") for index, value in enumerate(values)]


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
    return found or None


def counted(n: float, what: str) -> str:
    """Return how many of what there are: 1 GPU, 2 GPUs."""
    return f"{n:g} {what}" if n == 1 else f"{n:g} {what}s"
