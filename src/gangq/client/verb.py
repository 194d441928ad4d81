"""What a declaration of a verb means: its SQL text, its casts and its answer come from the annotations.

A verb is declared with :func:`verb` as a method of `gangq.client.verbs.Verbs`, by the name and the arguments of the
SQL function, or with the conditions on a view. Called on a client it is carried out; called on the class it only
builds the `Query`. An argument left at None is not sent, so that the database's default holds and an older schema
that lacks it still answers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)
from uuid import UUID

from gangq.client.encoding import Awaited, Encoded, awaited_ids, dumps, dumps_each, fits, whole_numbers
from gangq.client.options import aware, encode_options, encode_settings, texts
from gangq.client.rows import columns
from gangq.durations import Duration, seconds
from gangq.errors import InvalidInput

if TYPE_CHECKING:
    from gangq.client.aio import AsyncClient
    from gangq.client.sync import Client

P = ParamSpec("P")
R = TypeVar("R")

Steps = Generator["Query[Any] | float", Any, R]
"""Yields a query to be sent its result, or seconds to wait; returns the result of all."""


def in_dicts(cursor: Any) -> Any:
    """As psycopg's `dict_row`, which is imported once there is a cursor: to know the verbs takes no psycopg."""
    from psycopg.rows import dict_row

    return dict_row(cursor)


def in_tuples(cursor: Any) -> Any:
    """As psycopg's `tuple_row`."""
    from psycopg.rows import tuple_row

    return tuple_row(cursor)


@dataclass(slots=True)  # Not frozen, which makes it cost twice as much: there is one for every call.
class Query(Generic[R]):
    """One statement to run: `read` makes the result out of the rows that `factory` (a row factory of psycopg) makes;
    `connection` is the caller's own, if any.
    """

    name: str
    text: str
    params: Mapping[str, object]
    read: Callable[[list[Any]], R]
    connection: object | None = None
    factory: Any = in_dicts
    repeatable: bool = False
    """Carried out once however often it is sent: it has a request_id."""
    steps: Callable[[], Steps[R]] | None = None
    """Several statements, each a transaction of its own where there is no `connection`: run these instead. A verb of
    several statements without a first one (:class:`InSteps`) makes a query with no text.
    """

    def __iter__(self) -> Steps[R]:
        if self.steps is not None:
            return (yield from self.steps())
        answer: R = yield self
        return answer


# Types of arguments ------------------------------------------------------------------------------------------


class Sql(NamedTuple):
    """The SQL type of an argument, and what makes its value of Python's (None: it is sent as it is).

    `condition`: what an argument of a view means (None: the column of its name equals it, or is one of a list).
    """

    type: str
    encode: Callable[[Any, str], object] | None = None
    condition: str | None = None


def _array(values: Sequence[int], what: str, bits: int) -> str:
    # As its text: of a list, psycopg looks at every element, which costs ten times as much.
    return f"{{{','.join(map(str, whole_numbers(values, what, bits)))}}}"


def _results(values: Sequence[object | None], what: str) -> list[str | None] | None:
    # Most jobs return nothing. Then the argument is left out, because an array of nulls takes time.
    if all(value is None for value in values):
        return None
    return [
        value if value is None or isinstance(value, Encoded) else dumps(value, f"{what}[{n}]")
        for n, value in enumerate(values)
    ]


def _objects(values: Sequence[Mapping[str, Any]], what: str) -> str:
    return dumps([dict(value) for value in values], what)


def _interval(given: Duration, what: str) -> timedelta:
    return timedelta(seconds=seconds(given, what))


def _storable(chunks: Sequence[str], _what: str) -> list[str]:
    """Return texts without NUL characters, which PostgreSQL's text cannot hold."""
    return [chunk.replace("\x00", "\N{REPLACEMENT CHARACTER}") for chunk in chunks]


def _one_or_several(values: str | Sequence[str], _what: str) -> str | list[str] | None:
    # Of one state an index knows the newest; of several it only knows which there are.
    found = [values] if isinstance(values, str) else [*values]
    return found if found[1:] else next(iter(found), None)


_BIGINT = functools.partial(fits, bits=64)
_BIGINTS = functools.partial(_array, bits=64)
BigInt = Annotated[int, Sql("bigint", _BIGINT)]
Seconds = Annotated[Duration, Sql("real", seconds)]
Numeric = Annotated[float, Sql("numeric")]
Span = Annotated[timedelta, Sql("interval")]
Time = Annotated[datetime, Sql("timestamptz", aware)]
Json = Annotated[object, Sql("jsonb", dumps)]
Object = Annotated[Mapping[str, Any], Sql("jsonb", dumps)]
Objects = Annotated[Sequence[Mapping[str, Any]], Sql("jsonb", _objects)]
Payloads = Annotated[Sequence[object], Sql("jsonb[]", dumps_each)]
Results = Annotated[Sequence[object | None], Sql("jsonb[]", _results)]
BigInts = Annotated[Sequence[int], Sql("bigint[]", _BIGINTS)]
State = Annotated[str | Sequence[str], Sql("text", _one_or_several)]
Integers = Annotated[Sequence[int], Sql("integer[]", functools.partial(_array, bits=32))]
Options = Annotated[Mapping[str, Any], Sql("jsonb", encode_options)]
Interval = Annotated[Duration, Sql("interval", _interval)]
Texts = Annotated[Sequence[str], Sql("text[]", texts)]
Chunks = Annotated[Sequence[str], Sql("text[]", _storable)]
After = Annotated[Sequence[int | Awaited], Sql("bigint[]", awaited_ids)]

# Conditions on a view.
Ids = Annotated[Sequence[int], Sql("bigint[]", _BIGINTS, "id = any ({})")]
AfterId = Annotated[int, Sql("bigint", _BIGINT, "id > {}")]
AfterSeq = Annotated[int, Sql("integer", functools.partial(fits, bits=32), "seq > {}")]
Device = Annotated[str, Sql("text", None, "{} = any (devices)")]
Since = Annotated[datetime, Sql("timestamptz", aware, "at >= {}")]
Until = Annotated[datetime, Sql("timestamptz", aware, "at <= {}")]
Tag = Annotated[str, Sql("text", None, "{} = any (tags)")]
_OF_BATCHES = "batch_id = any (array(select b.id from gangq.batches b where {}))"
BatchName = Annotated[str, Sql("text", None, _OF_BATCHES.replace("{}", "b.name = {}"))]
OfBatch = Annotated[
    int, Sql("bigint", _BIGINT, "job_id = any (array(select j.id from gangq.jobs j where j.batch_id = {}))")
]
BatchTag = Annotated[str, Sql("text", None, _OF_BATCHES.replace("{}", "{} = any (b.tags)"))]

_PLAIN = {
    int: Sql("integer", functools.partial(fits, bits=32)),
    str: Sql("text"),
    bool: Sql("boolean"),
    bytes: Sql("bytea"),
    UUID: Sql("uuid"),
}
_OF_MORE = {"options": Sql("jsonb", encode_options), "settings": Sql("jsonb", encode_settings)}
"""What a verb declares as `**name`, by that name. There are no others: a test asks each verb for all its types."""


def _sql(hint: Any) -> Sql:
    """The type of an argument by its annotation, of a union by its first part."""
    if get_origin(hint) is not Annotated and get_args(hint) and get_origin(hint) is not list:
        hint = get_args(hint)[0]
    found = getattr(hint, "__metadata__", None)
    return found[0] if found else _PLAIN[hint]


# Declarations ------------------------------------------------------------------------------------------------


Before = Callable[[dict[str, Any], dict[str, Any], object], None]
"""Changes what was given (arguments and options) before it is sent; is told the caller's connection."""
Then = Callable[["Verb[..., Any]", Query[Any], Mapping[str, Any]], Steps[Any]]
"""The steps of a verb whose call needs more than one statement: is given the first query and the arguments."""


class Verb(Generic[P, R]):
    """A declared verb. Called on `Verbs`, it builds its `Query`.

    What it returns is declared, and decides what is selected and how the rows are read:

    ======================  =========================  ================================
    declared                selected                   returned
    ======================  =========================  ================================
    a row type              its columns                the first row, None if there is none
    a list of a row type    its columns                all rows
    one with `of_rows`      its `select_list()`        what `of_rows` makes of the rows
    a dict                  id and state               a dict of them
    None                    1                          None
    a list of values        the column of the function a list of them
    a value                 the column of the function the value, None if there is none
    ======================  =========================  ================================
    """

    def __init__(
        self,
        declared: Callable[Concatenate[Any, P], R],
        before: Before | None = None,
        then: Then | None = None,
        repeatable: bool = False,
    ) -> None:
        self.declared = declared
        self.name = declared.__name__
        self.__doc__ = declared.__doc__
        self._before = before
        self._then = then
        self._repeatable = repeatable
        self._texts: dict[tuple[str, ...], str] = {}

    def __call__(self, *args: P.args, **given: P.kwargs) -> Query[R]:
        """Build the query. Raises `InvalidInput`, `NotSerializable`; `TypeError` as any function does."""
        query: Query[R] = self.build(*args, **given)
        if self._then is None:
            return query
        return replace(query, steps=functools.partial(self._then, self, query, given))

    @functools.cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The declared parameters, by name."""
        named = inspect.signature(self.declared).parameters
        return {name: named[name] for name in list(named)[1:]}

    @functools.cached_property
    def types(self) -> dict[str, Sql]:
        """The SQL type of each argument but connection."""
        hints = get_type_hints(self.declared, include_extras=True)
        return {
            name: _OF_MORE[name] if p.kind is p.VAR_KEYWORD else _sql(hints[name])
            for name, p in self.parameters.items()
            if name != "connection"
        }

    @functools.cached_property
    def _answer(self) -> tuple[str, Callable[[list[Any]], Any], Any]:
        """What is selected, how the result is read, and the row factory."""
        hint = get_type_hints(self.declared)["return"]
        many = get_origin(hint) is list
        row = next((part for part in (hint, *get_args(hint)) if hasattr(part, "_fields")), None)
        if row is not None and hasattr(row, "of_rows"):
            return row.select_list(), row.of_rows, in_tuples
        if row is not None:
            make = row._make
            return columns(row), list if many else _first, lambda _cursor: make
        if get_origin(hint) is dict:
            return "id, state", dict, in_tuples
        if hint is type(None):
            return "1", lambda _: None, in_tuples
        # A function's column is called as the function; that name is what a table alias cannot take away.
        return self.name, _column if many else _scalar, in_tuples

    @functools.cached_property
    def _known(self) -> tuple[frozenset[str], frozenset[str], str | None]:
        """The arguments there are, those that must be given, and the name of all others."""
        named = {name: p for name, p in self.parameters.items() if p.kind is not p.VAR_KEYWORD}
        more = next(iter(self.parameters.keys() - named.keys()), None)
        needed = frozenset(name for name, p in named.items() if p.default is p.empty)
        return frozenset(named), needed, more

    def _check(self, args: Sequence[Any], given: Mapping[str, Any]) -> None:
        known, needed, more = self._known
        if args or not needed <= given.keys() or (more is None and not given.keys() <= known):
            inspect.signature(self.declared).bind(None, *args, **given)  # Which says what is wrong.

    def build(self, *args: Any, **given: Any) -> Query[Any]:
        """Build the first, or only, query of a call."""
        known, _, more = self._known
        self._check(args, given)
        connection = given.pop("connection", None)
        options = {}
        if more is not None:
            options = {name: given.pop(name) for name in [*given] if name not in known}
        if self._before is not None:
            self._before(given, options, connection)
        if more is not None:
            given[more] = options
        return self._query(self._encoded(given), connection)

    def _encoded(self, given: Mapping[str, Any]) -> dict[str, object]:
        """The arguments as they are sent, without those that are None."""
        params = {}
        # In the declared order, however they were given: the same arguments are one prepared statement.
        for name, sql in self.types.items():
            value = given.get(name)
            if value is not None and sql.encode is not None:
                value = sql.encode(value, name)
            if value is not None:
                params[name] = value
        return params

    def of_encoded(self, params: Mapping[str, object]) -> Query[Any]:
        """Build the query of a call that another process has encoded: `params` are the parameters of its query.

        Raises `InvalidInput` for one that the verb does not have.
        """
        unknown = next((name for name in params if name not in self.types), None)
        if unknown is not None:
            raise InvalidInput(f"{self.name} has no argument {unknown!r}; it has {', '.join(self.types)}")
        given = {name: params[name] for name in self.types if params.get(name) is not None}
        return self._query(given)

    def _query(self, params: Mapping[str, object], connection: object | None = None) -> Query[Any]:
        select, read, factory = self._answer
        keys = tuple(params)
        text = self._texts.get(keys)
        if text is None:
            types = {key: self.types[key].type for key in keys}
            text = self._texts[keys] = function_call(self.name, select, types)
        return Query(f"gangq.{self.name}", text, params, read, connection, factory, self._repeatable)

    def method(self, awaited: bool) -> Callable[..., Any]:
        """Return the method of a client that carries this out, with its name, parameters and docstring."""
        if awaited:

            @functools.wraps(self.declared)
            async def method(client: Any, /, *args: Any, **given: Any) -> Any:
                return await client.execute(self(*args, **given))
        else:

            @functools.wraps(self.declared)
            def method(client: Any, /, *args: Any, **given: Any) -> Any:
                return client.execute(self(*args, **given))

        return method

    if TYPE_CHECKING:  # What a client has of it.

        @overload
        def __get__(self, client: None, kind: type) -> Verb[P, R]: ...
        @overload
        def __get__(self, client: Client, kind: type) -> Callable[P, R]: ...
        @overload
        def __get__(self, client: AsyncClient, kind: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
        def __get__(self, client: Any, kind: type) -> Any: ...


class View(Verb[P, R]):
    """A verb that reads a view. Each argument that is given is a condition, and all of them must hold; `limit` is how
    many rows are read at most.
    """

    def __init__(self, declared: Callable[Concatenate[Any, P], R], view: str, order: str) -> None:
        super().__init__(declared)
        self._view = view
        self._order = order

    def build(self, *args: Any, **given: Any) -> Query[Any]:
        """Build the query."""
        self._check(args, given)
        limit = given.pop("limit", self.parameters["limit"].default if "limit" in self.parameters else None)
        if limit is not None:
            fits(limit, "limit", 64)
        params = self._encoded(given)
        conditions = [
            _condition(name, self.types[name], isinstance(value, list)) for name, value in params.items()
        ]
        select, read, factory = self._answer
        text = f"select {select} from gangq.{self._view}"  # noqa: S608 - names of this package only
        text += f" where {' and '.join(conditions)}" if conditions else ""
        text += f" order by {self._order}" if self._order else ""
        text += f" limit {int(limit)}" if limit is not None else ""
        return Query(f"gangq.{self._view}", text, params, read, factory=factory)


def _condition(name: str, sql: Sql, several: bool) -> str:
    if several:
        return f"{name} = any (%({name})s::{sql.type}[])"
    value = f"%({name})s" if sql.type == "text" else f"%({name})s::{sql.type}"
    return sql.condition.format(value) if sql.condition else f"{name.rstrip('_')} = {value}"


class InSteps(Verb[P, R]):
    """A verb that needs several statements: declared as the generator of its steps."""

    def __init__(self, declared: Callable[Concatenate[Any, P], Steps[R]]) -> None:
        show_answer(declared)
        super().__init__(declared)  # type: ignore[arg-type]

    def build(self, *args: Any, **given: Any) -> Query[Any]:
        """Build the query."""
        self._check(args, given)
        steps: Any = functools.partial(self.declared, None, *args, **given)
        return Query(f"gangq.{self.name}", "", {}, list, steps=steps)


def show_answer(steps: Callable[..., Steps[Any]]) -> None:
    """Have help() say what a caller gets of a function that is written as the generator of its steps."""
    answer = steps.__annotations__["return"]
    if answer.startswith("Steps["):
        steps.__annotations__["return"] = answer.removeprefix("Steps[").removesuffix("]")


@overload
def verb(declared: Callable[Concatenate[Any, P], Steps[R]], /) -> Verb[P, R]: ...
@overload
def verb(declared: Callable[Concatenate[Any, P], R], /) -> Verb[P, R]: ...
@overload
def verb(
    *,
    before: Before | None = None,
    then: Then | None = None,
    repeatable: bool = False,
    view: str = "",
    order: str = "",
) -> Callable[[Callable[Concatenate[Any, P], R]], Verb[P, R]]: ...
def verb(
    declared: Callable[..., Any] | None = None,
    /,
    *,
    before: Before | None = None,
    then: Then | None = None,
    repeatable: bool = False,
    view: str = "",
    order: str = "",
) -> Any:
    """Declare a verb: a SQL function of its name; a generator of the steps that it takes; or with `view` what reads
    that view, in this `order`.

    - `before` changes what is sent. `then` is what follows the first query.
    - `repeatable`: the database carries a call out once however often it is sent.
    """

    def declare(declared: Callable[..., Any]) -> Verb[..., Any]:
        if inspect.isgeneratorfunction(declared):
            return InSteps(declared)
        return View(declared, view, order) if view else Verb(declared, before, then, repeatable)

    return declare if declared is None else declare(declared)


def function_call(name: str, select: str, types: Mapping[str, str]) -> str:
    """A call of a SQL function with these arguments: what is a keyword in Python has an underscore behind it."""
    named = ", ".join(f"{key.rstrip('_')} => %({key})s::{kind}" for key, kind in types.items())
    return f"select {select} from gangq.{name}({named})"  # noqa: S608 - names of this package and the catalog only


def _first(found: list[Any]) -> Any:
    return found[0] if found else None


def _scalar(found: list[Any]) -> Any:
    return found[0][0] if found else None


def _column(found: list[Any]) -> list[Any]:
    return [row[0] for row in found]
