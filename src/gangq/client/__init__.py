"""The client: one method per SQL function, sync and async over one shared description (`calls`)."""

from gangq.client.aio import AsyncClient
from gangq.client.sync import Client

__all__ = ["AsyncClient", "Client"]
