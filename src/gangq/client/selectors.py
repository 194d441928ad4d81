"""Selectors: which workers a job may run on, by their labels, host and name.

As text, "gpu=h100,zone!=eu,rack in (a,b),nvme,!spot,driver>=550": conditions with commas between, all of which
must hold. As data, the list of conditions that SQL takes: [{"key": "gpu", "op": "=", "values": ["h100"]}, ...].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from gangq.errors import InvalidInput

Selector = str | Sequence[str | Mapping[str, Any]]
"""A selector as text, or a list of conditions, each as text or as data."""

OPERATORS = ("=", "!=", "in", "notin", "exists", "absent", "<", "<=", ">", ">=")

_TOKEN = re.compile(
    r'(?P<sign>!=|==|<=|>=|[=<>!(),])|"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<word>[^\s=<>!(),"]+)|(?P<wrong>\S)'
)
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
    return _Reader(text, what).conditions()


class _Reader:
    """Reads one text; a token is its kind (sign, word or quoted), its text and where it starts."""

    def __init__(self, text: str, what: str) -> None:
        self._text = text
        self._what = what
        self._tokens = list(self._scan())
        self._at = 0

    def _scan(self) -> Iterator[tuple[str, str, int]]:
        for match in _TOKEN.finditer(self._text):
            kind, token = str(match.lastgroup), match[str(match.lastgroup)]
            if kind == "wrong":
                self._fail("a quotation mark that is never closed", match.start())
            yield kind, re.sub(r"\\(.)", r"\1", token) if kind == "quoted" else token, match.start()

    def conditions(self) -> list[dict[str, Any]]:
        found = [self._condition()]
        while self._sign(","):
            found.append(self._condition())
        if self._at < len(self._tokens):
            self._fail("a comma missing, or quotation marks around a value with blanks")
        return found

    def _condition(self) -> dict[str, Any]:
        if self._sign("!"):
            return _condition(self._name("a key"), "absent")
        key = self._name("a key")
        negated = self._word("not")
        if self._word("in"):
            return _condition(key, "notin" if negated else "in", *self._list())
        if negated:
            self._fail("'in' missing after 'not'")
        if self._word("notin"):
            return _condition(key, "notin", *self._list())
        for sign in ("=", "==", "!="):
            if self._sign(sign):
                return _condition(key, "!=" if sign == "!=" else "=", self._name("a value"))
        for sign in ("<=", ">=", "<", ">"):
            if self._sign(sign):
                return _condition(key, sign, self._number())
        return _condition(key, "exists")

    def _list(self) -> list[str]:
        if not self._sign("("):
            self._fail("'(' missing: in takes a list, as in rack in (a, b)")
        values = [self._name("a value")]
        while self._sign(","):
            values.append(self._name("a value"))
        if not self._sign(")"):
            self._fail("')' missing")
        return values

    def _number(self) -> int | float:
        at = self._at
        text = self._name("a number")
        if re.fullmatch(r"[+-]?\d+", text, re.ASCII):
            return int(text)
        if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", text, re.ASCII):
            self._at = at
            self._fail(f"{text!r} where a number belongs: only numbers are compared; text has = and in")
        return float(text)

    def _name(self, what: str) -> str:
        kind, token, _ = self._peek()
        if kind not in ("word", "quoted"):
            self._fail(f"{what} missing")
        self._at += 1
        return token

    def _sign(self, sign: str) -> bool:
        return self._take("sign", sign)

    def _word(self, word: str) -> bool:
        return self._take("word", word)

    def _take(self, kind: str, token: str) -> bool:
        found = self._peek()[:2] == (kind, token)
        self._at += found
        return found

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "", len(self._text))

    def _fail(self, problem: str, at: int | None = None) -> NoReturn:
        at = self._peek()[2] if at is None else at
        where = "at its end" if at >= len(self._text) else f"at {self._text[at : at + 20]!r}"
        raise InvalidInput(f"{self._what} {self._text!r} has {problem} {where}; write it like {_EXAMPLE}")


def _condition(key: str, op: str, *values: str | float) -> dict[str, Any]:
    return {"key": key, "op": op, "values": list(values)}
