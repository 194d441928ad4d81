"""What explain says of a gang, recomputed from the tables by other means than explain's own."""

from __future__ import annotations

import re
from typing import Any

from psycopg.types.json import Jsonb

from gangq.placement.decisions import HOLDERS
from sql.drive import Gang, Q

Row = dict[str, Any]


class Seen:
    """An independent reading of the tables."""

    def __init__(self, q: Q, gang: Gang) -> None:
        self.q, self.gang = q, gang
        self.rows = q.call("explain_gang", gang_id=gang.id)
        self.text = {row["gate"]: row["detail"] for row in self.rows}
        self.verdict = next(r for r in self.rows if "decided_at" in (r["numbers"] or {}))
        self.size = gang.row["size"]
        (self.shape,) = q.sql(
            "select s.*, r.strategy, r.min_members, k.apart, k.queue from gangq.live_gangs g "
            "join gangq.gang_kinds k on k.id = g.kind_id join gangq.kind_roles r on r.kind_id = k.id "
            "join gangq.shapes s on s.id = r.shape_id where g.id = %(id)s",
            id=gang.id,
        )

    def rooms(self, empty: bool = False) -> dict[str, int]:
        """Members for which each host that may be given work has room, counted by hand; `empty`: if nothing ran."""
        found: dict[str, int] = {}
        for w in self.q.sql(
            "select i.*, i.queues @> array[%(queue)s] and i.labels @> %(labels)s and i.taints = '{}' as serves, "
            "not exists (select 1 from gangq.cordons c where c.name in (i.host, i.name)) as open "
            "from gangq.incarnations i where i.ended_at is null and i.quarantined is null and i.state = 'live'",
            queue=self.shape["queue"],
            labels=Jsonb(self.shape["labels"]),
        ):
            jobs = self.q.sql(
                "select s.memory_mb, s.cpus from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
                "where j.incarnation = %(id)s",
                id=w["id"],
            )
            free = self.q.sql(
                "select r.vram_mb from gangq.device_registry r where r.offered_by = %(id)s and not exists "
                "(select 1 from gangq.device_holds h where h.device_id = r.id)",
                id=w["id"],
            )
            if empty:
                jobs, free = (
                    [],
                    self.q.sql(
                        "select vram_mb from gangq.device_registry where offered_by = %(id)s", id=w["id"]
                    ),
                )
            room = w["slots"] - len(jobs)
            if self.shape["memory_mb"]:
                left = w["memory_mb"] - sum(job["memory_mb"] for job in jobs)
                room = min(room, left // self.shape["memory_mb"])
            if self.shape["gpus"]:
                usable = [d for d in free if d["vram_mb"] >= self.shape["vram_mb"]]
                room = min(room, len(usable) // self.shape["gpus"])
            if w["serves"] and w["open"]:
                found[w["host"]] = found.get(w["host"], 0) + max(0, room)
        return found

    def places(self, rooms: dict[str, int]) -> int:
        """Members for which this much room on each host counts, under the gang's strategy."""
        each = {"strict_pack": max, "strict_spread": lambda found: sum(room > 0 for room in found)}
        return each.get(self.shape["strategy"], sum)(rooms.values()) if rooms else 0

    def cordoned(self) -> set[str]:
        """Workers that a cordon keeps from serving this gang."""
        rows = self.q.sql(
            "select i.name from gangq.incarnations i join gangq.cordons c on c.name in (i.host, i.name) "
            "where i.ended_at is null and i.queues @> array[%(queue)s] and i.labels @> %(labels)s "
            "and i.taints = '{}'",
            queue=self.shape["queue"],
            labels=Jsonb(self.shape["labels"]),
        )
        return {row["name"] for row in rows}

    def beside_others(self) -> set[str]:
        """Hosts on which something runs that the gang is kept apart from."""
        rows = self.q.sql(
            "select distinct i.host from gangq.live_jobs j join gangq.incarnations i on i.id = j.incarnation "
            "join gangq.live_gangs g on g.id = j.gang_id join gangq.gang_kinds k on k.id = g.kind_id "
            "where k.apart = %(apart)s",
            apart=self.shape["apart"],
        )
        return {row["host"] for row in rows}

    def holders(self, where: str = "true") -> set[str]:
        """Units that hold something: gangs and jobs alone."""
        rows = self.q.sql(
            "select distinct coalesce('g' || j.gang_id, 'j' || j.id) as unit from gangq.live_jobs j "
            f"left join gangq.live_gangs g on g.id = j.gang_id where j.incarnation is not null and {where}"
        )
        return {row["unit"] for row in rows}


def confirm(seen: Seen) -> None:
    """Recompute what is said of a gang that waits. AssertionError: one of the statements is not so."""
    gate, q, rooms = seen.verdict["gate"], seen.q, seen.rooms()
    detail, need = seen.verdict["detail"], seen.shape["min_members"]
    if gate in ("room", "fragmented", "hosts", "one_host"):
        rooms = {host: room for host, room in rooms.items() if host not in seen.beside_others()}
    assert re.search(r"\(decided 0\.\d s ago\)$", detail)
    if gate in ("room", "fragmented"):
        assert detail.startswith("what is free would be enough, were it together: ") == (gate == "fragmented")
        room = sum(rooms.values())
        assert room < need
        assert need == 1 or not room or not seen.shape["strategy"].startswith("strict_")
        assert f"there is room for {room} of its {need} member" in detail
        assert f"room for {need - beside_plans_by_the_tables(seen, room)} more" in seen.text["unblock"]
        if room:
            best = re.search(r"the most on (\S+?)[; ]", detail)
            assert best is not None
            assert rooms[best[1]] == max(rooms.values())
        near = re.search(r"the nearest worker, (\S+), has (.+?) free(?: \(held by (.+?)\))?", detail)
        assert near is not None or not rooms
        if near is not None:
            nearest_by_the_tables(seen, *near.groups())
    elif gate == "hosts":
        hosts = sum(room > 0 for room in rooms.values())
        assert need > hosts > 0
        have = "1 host has" if hosts == 1 else f"{hosts} hosts have"
        assert detail.startswith(f"{have} room, and each of its {need} members needs another one")
        more = need - beside_plans_by_the_tables(seen, hosts)
        assert seen.text["unblock"] == f"room on {more} host{'s'[: more > 1]} more"
    elif gate == "one_host":
        roomiest = max(rooms.values())
        assert need > roomiest > 0
        assert f"has room for {roomiest} of the {need} that share one" in detail
        assert f"room for {need - beside_plans_by_the_tables(seen, roomiest)} more" in seen.text["unblock"]
    elif gate in ("quota", "running_limit", "submitter_limit"):
        limited_by_the_tables(seen)
    elif gate == "paused":
        assert q.value("select paused from gangq.queues_table where name = 'default'")
    elif gate == "apart":
        others = seen.holders(
            f"g.kind_id in (select id from gangq.gang_kinds where apart = '{seen.shape['apart']}')"
        )
        assert sum(rooms.values()) >= need, "there is room, beside the other"
        assert all(other in detail for other in others)
    elif gate == "infeasible":
        assert seen.places(seen.rooms(empty=True)) < need
        now = re.search(r"now (\d+) of its (\d+) (?:members?|hosts?) would fit", detail)
        if now:
            assert (int(now[1]), int(now[2])) == (seen.places(rooms), need)
        else:
            assert rooms == {}
            assert ("take no new work now" in detail) == bool(seen.cordoned())
    elif gate == "stopping":
        assert seen.holders("j.state = 'preempting'") == {"g1"}
        assert "as soon as these have stopped: g1 (" in detail
        assert seen.text["start"] == "as soon as what was told to stop for it has stopped"
    elif gate == "planned_start":
        (plan,) = q.sql("select * from gangq.plans order by place limit 1")
        assert sum(rooms.values()) >= need
        assert f"needed before for {plan['ask']}" in detail
        in_s = re.search(r", in (\S+(?: s)?) \(", detail)
        assert in_s is not None
        assert is_said(in_s[1], (plan["starts_at"] - q.clock.now()).total_seconds())
    planned_by_the_tables(seen)
    place_by_the_tables(seen)


def beside_plans_by_the_tables(seen: Seen, room: int) -> int:
    """How many members there is room for that they may keep. Less than there is `room` for only where it is named
    which planned starts keep the rest: of gangs that may start before this one would end.
    """
    said = re.search(
        r"; beside the planned start of (.+?) there is room for (\d+) of them", seen.verdict["detail"]
    )
    if said is None:
        return room
    named, left = re.findall(r"g\d+", said[1]), int(said[2])
    budget_s = seen.q.value(
        "select max(budget_s) from gangq.live_jobs where gang_id = %(id)s", id=seen.gang.id
    )
    plans = seen.q.sql(
        "select p.ask, array_agg(distinct i.host) as hosts from gangq.plans p "
        "cross join jsonb_array_elements(p.seats) s(seat) "
        "join gangq.incarnations i on i.id = (s.seat ->> 'worker')::bigint "
        "where p.starts_at < gangq.now() + make_interval(secs => %(budget_s)s) group by p.ask",
        budget_s=budget_s,
    )
    hosts = {plan["ask"]: plan["hosts"] for plan in plans}
    assert 0 <= left < room
    assert all(any(seen.rooms()[host] for host in hosts[ask] if host in seen.rooms()) for ask in named)
    return left


def is_said(text: str, seconds: float) -> bool:
    """Whether a length of time in words, as 40 s, 3m05s or 2h10m, is this one."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+) ?s)?", text)
    assert found is not None, text
    hours, minutes, rest = (int(number or 0) for number in found.groups())
    # What is hours away is said in whole minutes.
    return abs(3600 * hours + 60 * minutes + rest - seconds) < (60 if hours else 2)


def nearest_by_the_tables(seen: Seen, worker: str, free: str, holders: str | None) -> None:
    """What the worker has free is less than a member needs, and what is said to hold the rest runs there."""
    pairs = re.findall(r"(\d+) of (\d+) (?:slot|GPU)", free.partition(" GiB")[0])
    assert all(int(have) < int(need) for have, need in pairs)
    there = seen.holders(f"j.incarnation in (select id from gangq.incarnations where name = '{worker}')")
    assert there >= {*filter(None, (holders or "").split(", "))}


def limited_by_the_tables(seen: Seen) -> None:
    numbers = seen.verdict["numbers"]
    (used,) = seen.q.sql(
        "select count(*) as jobs, count(distinct j.gang_id) as gangs from gangq.live_jobs j "
        "where j.incarnation is not null"
    )
    (queue,) = seen.q.sql("select * from gangq.queues_table where name = %(n)s", n=numbers["where"])
    limits = [queue["maximum"], queue["submitter_maximum"]]
    most = {
        "jobs": [queue["max_running_jobs"], *(limit.get("jobs") for limit in limits if limit)],
        "gangs": [queue["max_running_gangs"]],
    }[numbers["of"]]
    assert numbers["limit"] in most
    assert numbers["limit"] - numbers["have"] == used[numbers["of"]]
    assert numbers["have"] < numbers["need"] == (seen.size if numbers["of"] == "jobs" else 1)
    assert set(numbers["holders"]) <= seen.holders()
    assert len(numbers["holders"]) == min(HOLDERS, len(seen.holders()))


def planned_by_the_tables(seen: Seen) -> None:
    """The planned start is the plan's; "at the latest" stands only where a budget enforces the end."""
    q, start = seen.q, next(row for row in seen.rows if row["gate"] == "start")
    plans = q.sql("select * from gangq.plans where ask = %(ask)s and not kept", ask=f"g{seen.gang.id}")
    assert bool(plans) == ("in_s" in (start["numbers"] or {}))
    if not plans:
        return
    assert abs(start["numbers"]["in_s"] - (plans[0]["starts_at"] - q.clock.now()).total_seconds()) < 2
    ends = {end["unit"]: end["by"] for end in start["numbers"]["after"]}
    assert ends.keys() <= seen.holders() | {f"g{g}" for g in range(1, seen.gang.id)}
    for unit, by in ends.items():
        column = "j.gang_id" if unit[0] == "g" else "j.id"
        (row,) = q.sql(
            "select coalesce(max(g.go_at), max(j.claimed_at)) as began, max(j.budget_s) as budget_s, "
            "max(r.p90_s) as p90_s "
            "from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
            "left join gangq.live_gangs g on g.id = j.gang_id "
            "left join gangq.runtimes r on r.queue = s.queue and r.task = s.task and r.samples >= 10 "
            f"where {column} = %(id)s",
            id=int(unit[1:]),
        )
        if row["began"] is None:
            expected = "plan"
        else:
            runs = (q.clock.now() - row["began"]).total_seconds()
            budget = row["budget_s"] or q.value("select budget_s from gangq.settings")
            by_history = row["p90_s"] is not None and runs < row["p90_s"] < budget
            expected = "history" if by_history else "budget" if runs + 30 < budget else "late"
        assert by == expected, unit
    assert ("at the latest" in start["detail"]) == ("budget" in ends.values())
    assert ("learned" in start["detail"]) == ("history" in ends.values())


def place_by_the_tables(seen: Seen) -> None:
    before = seen.q.value(
        "select count(*) from gangq.live_gangs x join gangq.live_gangs g on g.id = %(id)s "
        "where x.state = 'blocked' and (x.priority, -x.id) > (g.priority, -g.id)",
        id=seen.gang.id,
    )
    assert next(row for row in seen.rows if row["gate"] == "line")["numbers"]["place"] == before + 1
