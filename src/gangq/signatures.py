"""Whether a handler can be called with a payload, and whether calling it runs it at all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gangq.errors import InvalidInput

_UNFINISHED = (
    "runs nothing when it is called: define it with def or async def, without yield, and await inside"
)


def require_handler(function: Callable[..., Any], task: str) -> None:
    """Raise `InvalidInput` for what cannot be a handler: generator functions, and functions that take no context."""
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise InvalidInput(f"the handler of task {task!r} {_UNFINISHED}")
    signature = _signature(function)
    if signature is not None:
        try:
            signature.bind_partial(None)
        except TypeError:
            raise InvalidInput(
                f"the handler of task {task!r} takes {signature}: its first parameter must be the context, as in "
                f"def {getattr(function, '__name__', task)}(ctx)"
            ) from None


def by_name(
    function: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any], task: str
) -> dict[str, Any]:
    """Return the arguments of a call by the names of the handler's parameters, of which the first is the context.
    Raises `InvalidInput`.
    """
    if not args:
        return dict(kwargs)
    signature = None if function is None else _signature(function)
    if signature is None:
        raise InvalidInput(f"the parameters of task {task!r} are not known here: pass its arguments by name")
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(signature.parameters.values())[1:]
    names = [one.name for one in parameters if one.kind in positional]
    if len(args) > len(names):
        raise InvalidInput(
            f"the arguments do not fit task {task!r}: {len(args)} are given by position; it takes "
            f"({', '.join(map(str, parameters))})"
        )
    named = dict(zip(names, args, strict=False))
    twice = sorted(named.keys() & kwargs.keys())
    if twice:
        raise InvalidInput(
            f"the arguments do not fit task {task!r}: {twice[0]!r} is given by position and by name"
        )
    return {**named, **kwargs}


def misfit(function: Callable[..., Any], payload: Mapping[str, Any]) -> str | None:
    """Why the handler cannot be called with the context and this payload; None: it can, or nobody knows."""
    signature = _signature(function)
    if signature is None:
        return None
    try:
        signature.bind(None, **payload)
    except TypeError as problem:
        context, *others = signature.parameters.values()
        if context.name in payload:
            return f"{context.name!r} is the context, which the worker gives"
        return f"{problem}; it takes ({', '.join(map(str, others))})"
    return None


def unfinished(result: object) -> str | None:
    """Why this is no result: a coroutine or generator, in which nothing has run; None: it may be one."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        return f"the handler returned a {type(result).__name__}: it {_UNFINISHED}"
    return None


@functools.lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        # A decorator may give arguments of its own, so only the parameters of the outermost function count.
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None  # written in C, and says nothing
