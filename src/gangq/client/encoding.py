"""Python values on their way into jsonb: strict JSON, or an error that names what is not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from gangq.errors import NotSerializable

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
