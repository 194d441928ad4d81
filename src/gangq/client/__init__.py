"""The client: one method per SQL function, sync and async from one declaration (`verbs`)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangq.client.aio import AsyncClient
    from gangq.client.sync import Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    # Imported for those who use it: a worker has no AsyncClient, and the help and the completion of the command line
    # neither of them, which is why they load no psycopg.
    if name == "Client":
        from gangq.client.sync import Client

        return Client
    if name == "AsyncClient":
        from gangq.client.aio import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
