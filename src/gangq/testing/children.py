"""What a handler submits to a `FakeContext`: recorded. What a database makes of it is tested with one."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gangq.client.inside import ROWS
from gangq.errors import InvalidInput
from gangq.worker.context_impl import SUBMITS


@dataclass(frozen=True)
class Submission:
    """One job that a handler submitted: a single one, or a member of gang `gang_id`.

    `options`: the other options of the submission, such as priority, gpus, after or unique_key.
    """

    job_id: int
    task: str | None
    payload: Any
    gang_id: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Children:
    """What the attempts of one job submit. Its ids are made up."""

    def __init__(self, first_id: int) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(first_id)
        self._given: set[object] = set()
        """The request ids and unique keys that were given."""

    def submit(
        self, verb: str, arguments: Mapping[str, Any], submitted: list[Submission]
    ) -> Mapping[str, Any]:
        """See `Context.submit_child`. The jobs are added to `submitted`."""
        if verb not in SUBMITS:
            raise InvalidInput(f"a job submits with {', '.join(SUBMITS)}, not with {verb!r}")
        options = {name: value for name, value in arguments.items() if value is not None}
        options |= json.loads(options.pop("options", None) or "{}")
        options.pop("wake", None)
        request_id = options.pop("request_id", None)
        with self._lock:
            self._require_first("request_id", request_id)
            key = options.get("unique_key")
            self._require_first("unique_key", key, options.get("queue"), options.get("task"))
            gang_id = next(self._ids) if verb.endswith("gang") else None
            members = _members(verb, options)
            made = [Submission(next(self._ids), *member, gang_id, options) for member in members]
            submitted += made
        ids = [one.job_id for one in made]
        if verb == "submit":
            return {"job_ids": ids}
        answer = {"job_id": ids[0], "gang_id": gang_id, "job_ids": ids, "note": None}
        answer |= {"existed": False, "replaced": False}
        return {name: answer[name] for name in ROWS[verb]._fields}

    def _require_first(self, name: str, value: object, *scope: object) -> None:
        """A database knows what an earlier submission with this value has become. Here nobody does."""
        if value is None:
            return
        if (name, str(value), *scope) in self._given:
            raise InvalidInput(
                f"{name} {str(value)!r} was given before, and a FakeContext cannot tell what a second submission "
                "with it comes to: test that with the fixture gangq_app, which has a database"
            )
        self._given.add((name, str(value), *scope))


def _members(verb: str, options: dict[str, Any]) -> list[tuple[str | None, Any]]:
    """Take task and payload of each job out of the options of a submission."""
    task: str | None = options.pop("task", None)
    if verb == "submit":
        return [(task, json.loads(text)) for text in options.pop("payloads", ["{}"])]
    shared: Any = json.loads(options.pop("payload", None) or "{}")
    if "payloads" in options:
        return [(task, payload) for payload in options.pop("payloads")]
    found: list[tuple[str | None, Any]] = []
    for role in options.get("roles", [{"count": options.get("size", 1)}]):
        payloads = role.get("payloads") or [role.get("payload", shared)] * role["count"]
        found += [(role.get("task") or task, payload) for payload in payloads]
    return found
