"""Parts of a worker alone: a session, its source of claims and its jobs, over a client that may lose replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gangq.client import Client
from gangq.client.sync import in_steps
from gangq.client.verb import Query, Verb
from gangq.client.verbs import Verbs
from gangq.errors import DatabaseUnreachable
from gangq.gpu import detect
from gangq.worker.claims import ClaimSource, ThreadWakes
from gangq.worker.gangs import PortHolder
from gangq.worker.jobs import ActiveJob
from gangq.worker.lease import LeaseKeeper
from gangq.worker.options import Lanes, WorkerOptions
from gangq.worker.registration import register
from gangq.worker.session import Session
from worker.controls import control_of


class LossyClient:
    """A client whose next answer to one verb is lost after the database has acted on it."""

    def __init__(self, client: Client, verb: str, times: int = 1) -> None:
        self._client = client
        self._verb = verb
        self.left = times
        self.calls = 0

    def execute(self, query: Any) -> Any:
        if not isinstance(query, Query):
            return in_steps(self.execute, query)
        ours = query.name == f"gangq.{self._verb}"
        self.calls += ours
        answer = self._client.execute(query)
        if ours and self.left:
            self.left -= 1
            raise DatabaseUnreachable("the connection was cut")
        return answer

    def __getattr__(self, name: str) -> Any:
        declared = getattr(Verbs, name, None)
        if not isinstance(declared, Verb):
            return getattr(self._client, name)
        return lambda **arguments: self.execute(declared(**arguments))


def session_of(client: Any, tmp_path: Path, prefetch: int = 1) -> Session:
    options = WorkerOptions(name="w", devices="none", prefetch=prefetch).resolved()
    control = control_of(client)
    if isinstance(client, LossyClient):
        control.for_threads = client  # type: ignore[assignment]
    return register(
        client,
        control,
        options,
        lanes=Lanes(1, 1, "light"),
        tasks=["command", "t"],
        task_options={},
        detection=detect("none"),
        directory=tmp_path,
    )


def source_of(session: Session, keeper: LeaseKeeper | None = None) -> ClaimSource[ThreadWakes]:
    return ClaimSource(session, keeper or LeaseKeeper(session), PortHolder(0), ThreadWakes())


def claimed(session: Session, source: ClaimSource[ThreadWakes]) -> ActiveJob:
    job = ActiveJob(session.main_client.execute(source.taking(1))[0])
    session.table.add(job)
    return job


class RecordedWork:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def stop(self, grace_s: float) -> None:
        self.heard.append(("stop", grace_s))

    def lose(self) -> None:
        self.heard.append("lose")

    def set_deadline(self, at: float, grace_s: float) -> None:
        self.heard.append("extend")


def job_of(client: Client, tmp_path: Path) -> ActiveJob:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    return claimed(session, source_of(session))
