"""Running the coroutine of an async handler where a plain handler would run: in an event loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

Interrupt = Callable[[], object]
"""Cancels a coroutine; from any thread."""


def run_to_end(
    coroutine: Coroutine[Any, Any, R], begun: Callable[[Interrupt | None], object] = lambda _: None
) -> R:
    """Run it and return its result. `begun` is called with what cancels it, and at its end with None."""
    import asyncio  # Not at the top: few workers have async handlers.

    async def to_its_end() -> R:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        begun(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            return await coroutine
        finally:
            begun(None)

    return asyncio.run(to_its_end())
