"""What people type: lengths of time, times, key=value."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, AnyStr

import click

from gangq.durations import parse_seconds

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    # Not generic in older releases of click.
    ParamType = click.ParamType

MOST_BYTES = 64 << 20
"""Of a file or of standard input: more is somebody's mistake, or /dev/zero."""
_LONGEST_S = 100 * 365.25 * 86400
_INDEXES = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::([1-9]\d{0,5}))?)?", re.ASCII)
_NEW_WORKERS = re.compile(r"(\d+)(?:x(\d+))?x([^,\s]+)((?:,[^,=\s]+=[^,\s]+)*)", re.ASCII)


class Parsed(ParamType):
    """What `_parse` makes of a text; any other value is one already."""

    _parse: Callable[[str], Any]
    """Raises `ValueError`, which says how it is written."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a text of the command line, or a default."""
        if not isinstance(value, (str, int, float)):
            return value
        try:
            return self._parse(str(value))
        except ValueError as e:
            self.fail(str(e), param, ctx)


class Seconds(Parsed):
    """A length of time: 90, 90s, 1.5h, 1h30m. Becomes seconds."""

    name = "duration"

    def _parse(self, value: str) -> float:
        found = parse_seconds(value)
        if found is None:
            raise ValueError(f"{value!r} is no length of time: write seconds, or 90s, 15m, 1h30m, 2d")
        if found > _LONGEST_S:
            raise ValueError(f"{value!r} is longer than a hundred years")
        return float(found)


class Due(Parsed):
    """A time, or a length of time from now: becomes a datetime with a zone, or a timedelta."""

    name = "when"

    def _parse(self, value: str) -> datetime | timedelta:
        length = value.removeprefix("+")
        if parse_seconds(length) is not None:
            return timedelta(seconds=Seconds()._parse(length))
        try:
            return datetime.fromisoformat(value).astimezone()  # Without a zone it is the typist's.
        except (ValueError, OverflowError):
            raise ValueError(
                f"{value!r} is no time: write 90s, 15m or 2h for from now, or 2026-11-20T14:30 (this "
                "machine's zone) or 2026-11-20T14:30Z"
            ) from None


class NewWorkers(Parsed):
    """2x8xH100: two workers of eight devices whose label gpu is h100; 2xw1: two like worker w1."""

    name = "workers"

    def _parse(self, value: str) -> dict[str, Any]:
        match = _NEW_WORKERS.fullmatch(value)
        if match is None:
            raise ValueError(
                f"{value!r} is no number of workers: write 2x8xH100 (two workers of eight such GPUs, "
                "label gpu=h100), 2x8x80GiB, or 2xNAME for two like worker NAME; then ,vram_mb=81920,slots=8"
            )
        more = dict(part.split("=", 1) for part in match[4].split(",") if part)
        change: dict[str, Any] = {"add_workers": int(match[1])}
        if match[2] is None:
            change["like"] = match[3]
        else:
            change["gpus"] = int(match[2])
            size = re.fullmatch(r"(\d+)(MiB|GiB)", match[3])
            if size:
                change["vram_mb"] = int(size[1]) * (1024 if size[2] == "GiB" else 1)
            else:
                change["labels"] = {"gpu": match[3].lower()}
        return {**change, **{key: typed(text) for key, text in more.items()}}


class ArrayType(Parsed):
    """0-99, 5-14%4, 1,3,7, 0-30:10 as sbatch has them. Becomes the indexes, and how many at once or None."""

    name = "array"

    def _parse(self, value: str) -> tuple[list[int], int | None]:
        text, percent, most = value.partition("%")
        parts = [_INDEXES.fullmatch(part) for part in text.split(",")]
        if percent and not re.fullmatch(r"[1-9]\d{0,5}", most, re.ASCII):
            parts = [None]
        found: dict[int, None] = {}
        for part in parts:
            if part is None:
                raise ValueError(
                    f"{value!r} is no array: write 0-99 for 100 of them, 0-99%4 for 4 at once, 0-30:10 for "
                    "0,10,20,30, or 1,3,7; numbers have six digits at most"
                )
            first, last, step = (int(number) if number else None for number in part.groups())
            assert first is not None
            if last is not None and last < first:
                raise ValueError(f"{value!r} is no array: {part[0]} ends before it begins")
            more = range(first, (first if last is None else last) + 1, step or 1)
            if any(index in found for index in more):
                raise ValueError(f"{value!r} is no array: it has an index twice")
            found.update(dict.fromkeys(more))
        return list(found), int(most) if percent else None


class KeyValue(Parsed):
    """key=value. Becomes a pair; the value stays text, or is JSON where it parses as such (`typed`)."""

    name = "key=value"

    def __init__(self, typed: bool = False) -> None:
        self._typed = typed

    def _parse(self, value: str) -> tuple[str, Any]:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise ValueError(f"{value!r} is not key=value")
        return key, typed(text) if self._typed else text


class Amounts(Parsed):
    """gpus=8,cpus=2.5, or with `whole` priorities of roles: alice=100,gangq_submitter=10. Becomes a dict of numbers;
    which names there are the database says.
    """

    def __init__(self, whole: bool = False) -> None:
        self.name = "role=N,..." if whole else "gpus=N,..."
        self._kinds = (int,) if whole else (int, float)
        self._are = (
            "priorities: write alice=100,gangq_submitter=10" if whole else "amounts: write gpus=8,cpus=2.5"
        )

    def _parse(self, value: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in value.split(","):
            key, _, text = part.strip().rpartition("=")
            amount = typed(text)
            if not key or type(amount) not in self._kinds or key in found:
                raise ValueError(f"{value!r} is no list of {self._are}")
            found[key] = amount
        return found


class RoleType(Parsed):
    """A role of a gang: name=executor,count=10,gpus=8, or a JSON object. Becomes a `gangq.Role`."""

    name = "role"

    def _parse(self, value: str) -> Any:
        # Not at the top: they bring the client with them, which not every command needs.
        from gangq.client.roles import as_role
        from gangq.errors import GangqError

        text = value.strip()
        try:
            return as_role(from_json(text, "the role") if text.startswith("{") else _role_fields(text), 0)
        except (GangqError, ValueError) as e:
            raise ValueError(f"{text!r}: {e}".replace("roles[0] has", "it has")) from None


_WHOLE = frozenset({"count", "min", "gpus", "vram_mb", "memory_mb"})


def _role_fields(text: str) -> dict[str, Any]:
    """The fields of a role out of key=value pairs with commas between. Raises `ValueError`."""
    found: dict[str, Any] = {}
    # Commas in quotation marks or brackets belong to a selector.
    for part in re.findall(r'(?:"(?:[^"\\]|\\.)*"|\([^)]*\)|[^,])+', text):
        key, equals, given = (word.strip() for word in part.partition("="))
        key = key.replace("-", "_")
        if key == "balanced" and not equals:
            given = "true"
        elif not equals or not given:
            raise ValueError(f"{part!r} is not key=value: write name=executor,count=10,min=6,gpus=8")
        if len(given) > 1 and given[0] == given[-1] == '"':
            given = re.sub(r"\\(.)", r"\1", given[1:-1])
        if key.startswith("label."):
            found.setdefault("labels", {})[key.removeprefix("label.")] = given
        elif key == "tolerate":
            found.setdefault("tolerates", []).append(given)
        elif key == "select":
            found.setdefault("selector", []).append(given)
        elif key in ("budget", "budget_s"):
            found["budget_s"] = parse_seconds(given)
            if found["budget_s"] is None:
                raise ValueError(f"{given!r} is no length of time: write seconds, or 90s, 15m, 2h")
        elif key in found:
            raise ValueError(f"{key} is given twice")
        elif key in _WHOLE or key == "cpus":
            if not re.fullmatch(r"-?\d+" if key in _WHOLE else r"-?\d+(\.\d+)?", given, re.ASCII):
                raise ValueError(
                    f"{key} is {given!r}: it must be a {'whole ' if key in _WHOLE else ''}number"
                )
            found[key] = int(given) if key in _WHOLE else float(given)
        elif key == "balanced":
            found[key] = given.lower() == "true"
        else:
            found[key] = given
    return found


def typed(text: str) -> Any:
    """JSON where it parses as such, else the text itself: n=1 is a number, name=a a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise click.UsageError(f"{text[:40]!r}... is nested too deeply") from None


def from_json(text: str, what: str) -> Any:
    """The value of a JSON text; `what` names it in the error. Raises `click.UsageError`."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except ValueError as e:
        raise click.UsageError(f"{what} is not JSON: {e}") from None
    except RecursionError:
        raise click.UsageError(f"{what} is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def bounded(read: Callable[[int], AnyStr], what: str) -> AnyStr:
    """All that `read` has, at most `MOST_BYTES` of it. Raises `click.UsageError` when it is more, or no text."""
    try:
        found = read(MOST_BYTES + 1)
    except UnicodeDecodeError as e:
        raise click.UsageError(f"{what} is not UTF-8: {e.reason} at byte {e.start}") from None
    if len(found) > MOST_BYTES:
        raise click.UsageError(f"{what} is larger than {MOST_BYTES >> 20} MiB")
    return found


def read_file(file: str, what: str) -> str:
    """The text of a file, or of standard input where it is called -. Raises `click.UsageError`."""
    try:
        if file == "-":
            text: str = bounded(sys.stdin.read, what)
        else:
            with open(file, encoding="utf-8") as opened:
                text = bounded(opened.read, what)
    except OSError as e:
        raise click.UsageError(f"{what}: {e.strerror}; write the name of a file, or -") from None
    return text


def payload_of(words: Sequence[str]) -> dict[str, Any]:
    """The payload out of what follows the task: one JSON object, or key=value pairs.

    Raises `click.UsageError` when it is neither.
    """
    if len(words) == 1 and words[0].lstrip().startswith(("{", "[", '"')):
        found = from_json(words[0], f"the payload {words[0][:100]!r}")
        if not isinstance(found, dict):
            raise click.UsageError('the payload must be a JSON object, e.g. {"n": 1}, or key=value pairs')
        return found
    try:
        return _once([KeyValue(typed=True).convert(word, None, None) for word in words])
    except ValueError as e:
        raise click.UsageError(f"the payload is ambiguous: {e}") from None
