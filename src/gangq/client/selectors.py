"""Selectors: which workers a job may run on, by their labels, host and name.

As text, "gpu=h100,zone!=eu,rack in (a,b),nvme,!spot,driver>=550": conditions with commas between, all of which
must hold. As data, the list of conditions that SQL takes: [{"key": "gpu", "op": "=", "values": ["h100"]}, ...].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gangq.errors import InvalidInput

Selector = str | Sequence[str | Mapping[str, Any]]
"""A selector as text, or a list of conditions, each as text or as data."""

OPERATORS = ("=", "!=", "in", "notin", "exists", "absent", "<", "<=", ">", ">=")

_BARE = r"[^\s=<>!(),\"]"
_WORD = re.compile(rf'"(?:[^"\\]|\\.)*"|{_BARE}+')
_EXAMPLE = '"gpu=h100,zone!=eu,rack in (a,b),nvme,!spot,driver>=550"'


def as_selector(selector: Selector | None, what: str = "selector") -> list[dict[str, Any]] | None:
    """Return the conditions of a selector however it is given; None for none. Raises `InvalidInput`."""
    if selector is None or isinstance(selector, str):
        return None if selector is None else parse_selector(selector, what)
    if isinstance(selector, Mapping) or not isinstance(selector, Sequence):
        raise InvalidInput(
            f"{what} is {selector!r}: pass text such as {_EXAMPLE}, or a list of conditions; labels that must be "
            "equal are labels={...}"
        )
    found: list[dict[str, Any]] = []
    for condition in selector:
        if isinstance(condition, str):
            found += parse_selector(condition, what)
        elif isinstance(condition, Mapping) and condition.get("op") in OPERATORS and condition.get("key"):
            found.append(dict(condition))
        else:
            raise InvalidInput(
                f"{what} has the condition {condition!r}: write it as text, or as "
                f'{{"key": "gpu", "op": "=", "values": ["h100"]}} with one of {", ".join(OPERATORS)}'
            )
    return found or None


def parse_selector(text: str, what: str = "selector") -> list[dict[str, Any]]:
    """Return the conditions of a selector in its text form, as SQL takes them.

    A condition is `key` (the label is there), `!key` (it is not), `key=value` (also `==`), `key!=value`,
    `key in (a, b)`, `key notin (a, b)`, or `key>=number` with <, <=, >, >=. What has blanks, commas or signs in
    it stands in double quotes. `host` and `worker` are keys too. Raises `InvalidInput`, naming the place.
    """
    left = _Text(text, what)
    found = [left.condition()]
    while left.take(","):
        found.append(left.condition())
    if left.rest:
        left.fail("a comma missing, or quotation marks around a value with blanks")
    return found


class _Text:
    """A selector as text, read from the left: what was taken is no longer part of `rest`."""

    def __init__(self, text: str, what: str) -> None:
        self._text = text
        self._what = what
        self.rest = text.lstrip()

    def take(self, pattern: str | re.Pattern[str]) -> str:
        match = re.match(pattern, self.rest)
        found = match[0] if match else ""
        self.rest = self.rest[len(found) :].lstrip()
        return found

    def condition(self) -> dict[str, Any]:
        if self.take("!(?!=)"):
            return _condition(self.word("a key"), "absent")
        key = self.word("a key")
        negated = self.take(rf"not(?!{_BARE})")
        if self.take(rf"in(?!{_BARE})"):
            return _condition(key, "notin" if negated else "in", *self.words())
        if negated:
            self.fail("'in' missing after 'not'")
        if self.take(rf"notin(?!{_BARE})"):
            return _condition(key, "notin", *self.words())
        sign = self.take("==|!=|<=|>=|[=<>]")
        if sign in ("=", "==", "!="):
            return _condition(key, "!=" if sign == "!=" else "=", self.word("a value"))
        return _condition(key, sign, self.number()) if sign else _condition(key, "exists")

    def words(self) -> list[str]:
        if not self.take(r"\("):
            self.fail("'(' missing: in takes a list, as in rack in (a, b)")
        values = [self.word("a value")]
        while self.take(","):
            values.append(self.word("a value"))
        if not self.take(r"\)"):
            self.fail("')' missing")
        return values

    def number(self) -> int | float:
        before = self.rest
        text = self.word("a number")
        if re.fullmatch(r"[+-]?\d+", text, re.ASCII):
            return int(text)
        if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", text, re.ASCII):
            self.rest = before
            self.fail(f"{text!r} where a number belongs: only numbers are compared; text has = and in")
        return float(text)

    def word(self, what: str) -> str:
        found = self.take(_WORD)
        if not found:
            self.fail(f"{what} missing")
        return re.sub(r"\\(.)", r"\1", found[1:-1]) if found[0] == '"' else found

    def fail(self, problem: str) -> NoReturn:
        if self.rest[:1] == '"' and not _WORD.match(self.rest):
            problem = "a quotation mark that is never closed"
        where = f"at {self.rest[:20]!r}" if self.rest else "at its end"
        raise InvalidInput(f"{self._what} {self._text!r} has {problem} {where}; write it like {_EXAMPLE}")


def _condition(key: str, op: str, *values: str | float) -> dict[str, Any]:
    return {"key": key, "op": op, "values": list(values)}
