"""What the members of a gang are: roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gangq.client.encoding import counted, dumps
from gangq.client.selectors import Selector, as_selector
from gangq.durations import Duration, seconds
from gangq.errors import InvalidInput


@dataclass(frozen=True)
class Role:
    """Members of a gang that are alike. What is None is as the gang has it.

    - `name`: unique in the gang. `count`: its members, at most. `min`: without how many the gang does not start
      [count]; less than `count` makes it elastic.
    - `task`: what they run, a name or a task of an `App`, whose resources then hold where the role says none.
    - `payload` goes to every member, or `payloads` one to each.
    - `gpus`, `vram_mb` (MiB on each), `memory_mb`, `cpus`, `labels`, `selector`, `tolerates`, `model`: what each
      member needs, as for a job.
    - `strategy`, `require`, `prefer`, `balanced`: as in `gangq.client.options.GangOptions`, of these members.
    - `budget_s`: wall-clock time an attempt may take: seconds, "90s" or a timedelta, kept as seconds.
    """

    name: str
    count: int
    min: int | None = None
    task: Any = None
    payload: Mapping[str, Any] | None = None
    payloads: Sequence[Mapping[str, Any]] | None = None
    gpus: int | None = None
    vram_mb: int | None = None
    memory_mb: int | None = None
    cpus: float | None = None
    labels: Mapping[str, Any] | None = None
    selector: Selector | None = None
    tolerates: Sequence[str] | None = None
    model: str | None = None
    strategy: str | None = None
    require: str | None = None
    prefer: str | None = None
    balanced: bool | None = None
    budget_s: Duration | None = None

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise InvalidInput(f"a role is called {self.name!r}: give it a name, e.g. Role('driver', 1)")
        if not isinstance(self.count, int) or self.count < 1:
            raise InvalidInput(f"role {self.name!r} has the count {self.count!r}: a whole number, at least 1")
        if self.min is not None and not (isinstance(self.min, int) and 1 <= self.min <= self.count):
            raise InvalidInput(
                f"role {self.name!r} has min {self.min!r} of {self.count}: 1 to count, or None for count"
            )
        if self.payload is not None and self.payloads is not None:
            raise InvalidInput(
                f"role {self.name!r} has both payload and payloads: for all members alike, or for each"
            )
        if self.payloads is not None and len(self.payloads) != self.count:
            raise InvalidInput(
                f"role {self.name!r} has {counted(self.count, 'member')}"
                f" and {counted(len(self.payloads), 'payload')}: pass one for each"
            )
        if not isinstance(self.task, str | None) and not isinstance(getattr(self.task, "name", None), str):
            raise InvalidInput(
                f"role {self.name!r} has the task {self.task!r}: pass its name, or a task of the App"
            )
        if isinstance(self.tolerates, str):
            raise InvalidInput(
                f"tolerates of role {self.name!r} is {self.tolerates!r}: pass a list of strings"
            )
        if self.budget_s is not None:
            object.__setattr__(self, "budget_s", seconds(self.budget_s, f"budget_s of role {self.name!r}"))
        object.__setattr__(self, "selector", as_selector(self.selector, f"selector of role {self.name!r}"))

    def as_json(self) -> dict[str, Any]:
        """Return the role as `gangq.submit_gang` takes it, without what is None."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        found = {key: value for key, value in given.items() if value is not None}
        if self.task is not None:
            found["task"] = self.task if isinstance(self.task, str) else self.task.name
        if self.tolerates is not None:
            found["tolerates"] = list(self.tolerates)
        return found


def as_role(role: Role | Mapping[str, Any], position: int) -> Role:
    """Return a role given as one, or as the JSON object that SQL takes. Raises `InvalidInput`."""
    if isinstance(role, Role):
        return role
    if not isinstance(role, Mapping):
        raise InvalidInput(
            f"roles[{position}] is {role!r}: pass gangq.Role('driver', 1), or a dict with its fields"
        )
    known = [field.name for field in fields(Role)]
    unknown = sorted(set(role) - set(known))
    if unknown:
        raise InvalidInput(
            f"roles[{position}] has the unknown field {unknown[0]!r}; the fields are {', '.join(known)}"
        )
    missing = [key for key in ("name", "count") if role.get(key) is None]
    if missing:
        raise InvalidInput(f"roles[{position}] has no {missing[0]}: a role has at least a name and a count")
    return Role(**role)


def encode_roles(roles: Sequence[Role | Mapping[str, Any]] | None) -> str | None:
    """Return roles as JSON text; None for none. Raises `InvalidInput`, `NotSerializable`."""
    if roles is None:
        return None
    if isinstance(roles, str | Mapping | Role) or not roles:
        raise InvalidInput(
            f"roles is {roles!r}: pass a list of gangq.Role, e.g. [Role('driver', 1), Role('executor', 8)]"
        )
    found = [as_role(role, position) for position, role in enumerate(roles)]
    names = [role.name for role in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(
            f"two roles are called {twice!r}: names are unique in a gang; members alike are one role's count"
        )
    return dumps([role.as_json() for role in found], "roles")
