"""What a handler submits to a `FakeContext`: kept, as the database would."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gangq.client.encoding import counted
from gangq.client.inside import ROWS
from gangq.errors import InvalidInput
from gangq.worker.context_impl import SUBMITS


@dataclass(frozen=True)
class Submission:
    """One job that a handler submitted: a single one, or a member of gang `gang_id`.

    `options`: the other options of the submission, such as priority, gpus or after.
    """

    job_id: int
    task: str | None
    payload: Any
    gang_id: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Call:
    """One call of a verb that submits: task and payload of each job, and the other options of all."""

    gang: bool
    members: list[tuple[str | None, Any]]
    options: Mapping[str, Any]
    replaces: bool
    key: tuple[object, ...]
    """What its unique key is (empty: none), as in `gangq.hold_key` (sql/036_unique.sql): one of a task in a queue,
    for a gang of its own task, which it need not have. Here is one login, and the queue is as given: a task has no
    settings.
    """
    request: tuple[object, ...]
    """What its request_id is (empty: none)."""

    @classmethod
    def of(cls, verb: str, arguments: Mapping[str, Any]) -> _Call:
        options = {name: value for name, value in arguments.items() if value is not None}
        options |= json.loads(options.pop("options", None) or "{}")
        for name in ("wake", "keep_s"):
            options.pop(name, None)
        request_id, key = options.pop("request_id", None), options.pop("unique_key", None)
        replaces = bool(options.pop("replaces", None))
        return cls(
            gang=verb.endswith("gang"),
            key=() if key is None else (key, options.get("queue"), options.get("task")),
            request=() if request_id is None else ("request", str(request_id)),
            replaces=replaces,
            members=_members(verb, options),
            options=options,
        )


class Children:
    """What the attempts of one job submit. Its ids are made up. No job ends here and no time passes, so a unique key
    and a request_id stand for what was submitted with them for good.
    """

    def __init__(self, first_id: int) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(first_id)
        self._held: dict[tuple[object, ...], list[Submission]] = {}
        """What each unique key and request_id stands for."""

    def submit(
        self, verb: str, arguments: Mapping[str, Any], submitted: list[Submission]
    ) -> Mapping[str, Any]:
        """See `Context.submit_child`. New jobs are added to `submitted`; one that is replaced is changed there."""
        if verb not in SUBMITS:
            raise InvalidInput(f"a job submits with {', '.join(SUBMITS)}, not with {verb!r}")
        call = _Call.of(verb, arguments)
        with self._lock:
            made, existed = self._keep(call, submitted)
        ids = [one.job_id for one in made]
        if verb == "submit":
            return {"job_ids": ids}
        answer = {"job_id": ids[0], "gang_id": made[0].gang_id, "job_ids": ids, "note": None}
        answer |= {"existed": existed, "replaced": existed and call.replaces}
        return {name: answer[name] for name in ROWS[verb]._fields}

    def _keep(self, call: _Call, submitted: list[Submission]) -> tuple[list[Submission], bool]:
        """Return what the call stands for, and whether its unique key stood for that already: what is repeated with
        its request_id did not exist. Raises `InvalidInput`.
        """
        held, asked = self._held.get(call.key, []), self._held.get(call.request, [])
        if held:
            _require_kind(call, held)
            existed = [one.job_id for one in held] != [one.job_id for one in asked]
            if existed and call.replaces:
                new = _replaced(held[0], call)
                self._held[call.key] = [new]
                submitted[:] = [new if one.job_id == new.job_id else one for one in submitted]
            return held, existed
        if asked:
            _require_same(call, asked)
            made = asked
        else:
            gang_id = next(self._ids) if call.gang else None
            made = [Submission(next(self._ids), *member, gang_id, call.options) for member in call.members]
            submitted += made
        self._held |= {key: made for key in (call.key, call.request) if key}
        return made, False


def _replaced(held: Submission, call: _Call) -> Submission:
    """With the payload, due_at and priority (none: its own) of the call, as `gangq.replace_job` does."""
    kept = {name: value for name, value in held.options.items() if name != "due_at"}
    new = {name: call.options[name] for name in ("due_at", "priority") if name in call.options}
    return replace(held, payload=call.members[0][1], options=kept | new)


def _require_kind(call: _Call, held: Sequence[Submission]) -> None:
    """Refuse a gang with the key of a job, and the reverse, as `gangq.hold_key` does (sql/036_unique.sql)."""
    if call.gang != (held[0].gang_id is not None):
        what = f"job {held[0].job_id}" if call.gang else f"gang {held[0].gang_id}"
        raise InvalidInput(
            f"unique_key '{call.key[0]}' stands for {what}. Use another key for gangs than for single jobs."
        )


def _require_same(call: _Call, asked: Sequence[Submission]) -> None:
    """Refuse the request_id of another submission, as `gangq.answer_of` does (sql/033_admission.sql)."""
    of_gang = asked[0].gang_id is not None
    if call.gang != of_gang or len(call.members) != len(asked):
        what = f"a gang of {len(asked)}" if of_gang else counted(len(asked), "job")
        raise InvalidInput(
            f"request_id {call.request[1]} was given to another call before, which submitted {what}. "
            "Make a new one for each submission (a UUID), and use it again only to repeat that one."
        )


def _members(verb: str, options: dict[str, Any]) -> list[tuple[str | None, Any]]:
    """Take task and payload of each job out of the arguments of a submission.

    Raises `InvalidInput` where both a gang and its role have payloads, as `gangq.check_payloads` does.
    """
    task: str | None = options.pop("task", None)
    if verb == "submit":
        return [(task, json.loads(text)) for text in options.pop("payloads", ["{}"])]
    shared: Any = json.loads(options.pop("payload", None) or "{}")
    if "payloads" in options:
        for role in options.get("roles", []):
            if "payload" in role or "payloads" in role:
                raise InvalidInput(
                    f"both the gang and its role {role['name']} have payloads. Pass them in one of the two places."
                )
        return [(task, payload) for payload in options.pop("payloads")]
    found: list[tuple[str | None, Any]] = []
    for role in options.get("roles", [{"count": options.get("size", 1)}]):
        payloads = role.get("payloads") or [role.get("payload") or shared] * role["count"]
        found += [(role.get("task") or task, payload) for payload in payloads]
    return found
