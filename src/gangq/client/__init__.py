"""The client: one method per SQL function, sync and async from one declaration (`verbs`)."""

from typing import TYPE_CHECKING, Any

from gangq.client.sync import Client

if TYPE_CHECKING:
    from gangq.client.aio import AsyncClient

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    # Imported for those who use it: a worker does not.
    if name == "AsyncClient":
        from gangq.client.aio import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
