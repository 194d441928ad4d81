"""What handlers return and report, on its way into jsonb: stored as far as it can be, and never an error.

The work is done, or goes on, whatever is wrong with what it returned or said of itself.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

from gangq.client.encoding import Encoded, dumps, type_name, walk
from gangq.errors import NotSerializable, ResultNotStored

_TEXT_CHARS = 16_000
_HEAD_CHARS, _TAIL_CHARS = 4_000, 11_900
"""With the line between them not more than that: what was cut is not cut again."""
_SHOWN_CHARS = 200
_KEPT = ("step", "total", "phase", "loss")
"""Of a beat that is too large."""


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
    """Return what stands in place of a result that could not be stored; `Job.result` raises its text."""
    try:
        why = str(refused)
        return Encoded(dumps({ResultNotStored.KEY: why}, what))
    except Exception:
        return Encoded(
            dumps({ResultNotStored.KEY: f"{what} could not be stored ({type(refused).__name__})"}, what)
        )


def describe(problem_type: str, message: str, **more: Any) -> dict[str, Any]:
    """An error as ``gangq.fail`` keeps it, with the host it happened on, cut to a sane length and without
    NULs (which PostgreSQL refuses to store).
    """
    error = {"type": problem_type, "message": message, "host": socket.gethostname(), **more}
    return {key: clean(value) if isinstance(value, str) else value for key, value in error.items()}


def clean(text: str) -> str:
    """``text`` as PostgreSQL stores it, its middle left out where it is longer than 16,000 characters."""
    text = _storable(text)
    if len(text) <= _TEXT_CHARS:
        return text
    left_out = len(text) - _HEAD_CHARS - _TAIL_CHARS
    return f"{text[:_HEAD_CHARS]}\n[... {left_out} characters left out ...]\n{text[-_TAIL_CHARS:]}"


def as_progress(data: Mapping[str, object], most_bytes: int) -> tuple[dict[str, object], str | None]:
    """Return a beat as it can be stored, and why it is not stored as it was given, if so.

    NaN and infinity become null, scalars of numpy and torch numbers; of neither is anything said. Other values that
    JSON does not have become their repr, cut short. Of a beat that has more than `most_bytes` even so only step,
    total, phase and loss are kept. Never raises: progress must not end the work that it is about.
    """
    why: str | None = None

    def shown(other: object) -> str:
        nonlocal why
        why = "it has values that JSON does not have"
        return _shown(other)

    try:
        plain = {name: _plain(value, shown) for name, value in data.items()}
        if len(dumps(plain, "a beat")) <= most_bytes:
            return plain, why
        why = f"it has more than {most_bytes} bytes: only step, total, phase and loss are kept"
    except Exception:  # A number of 5,000 digits, a list nested too deeply, a name with a NUL.
        why = "it has values that cannot be stored: only step, total, phase and loss are kept"
    kept: dict[str, object] = {}
    for name in data.keys() & _KEPT:
        with contextlib.suppress(Exception):
            value = _plain(data[name], _shown)
            if len(dumps(value, name)) <= most_bytes // 8:
                kept[name] = value
    return kept, why


def _shown(value: object) -> str:
    """The repr of `value`, cut short; what has none is named by its type."""
    try:
        return _storable(repr(value)[:_SHOWN_CHARS])
    except Exception:
        return f"<{type_name(value)}>"


def _storable(text: str) -> str:
    """`text` as PostgreSQL can store it."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _plain(value: object, otherwise: Callable[[object], object]) -> object:
    """`value` with None for NaN and infinity, and Python's numbers for scalars that have `.item()`.

    What is not JSON even so is replaced by `otherwise` of it.
    """

    def bad(part: Any, _problem: str) -> object:
        if isinstance(part, float):
            return None
        try:
            scalar = part.item()
        except Exception:
            return otherwise(part)
        return walk(scalar, bad) if isinstance(scalar, (bool, int, float, str)) else otherwise(part)

    return walk(value, bad)
