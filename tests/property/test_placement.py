"""Placement over random fleets, trees of queues and gangs: what exists is found, what is decided keeps every rule.

The walks of `make test` are always the same; GANGQ_SOAK=1 walks much further, another way each time.
"""

from __future__ import annotations

import os
import random
from itertools import groupby
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from gangq.placement.board import Board
from gangq.placement.decide import decide
from sql.drive import place

SOAK = os.environ.get("GANGQ_SOAK") == "1"
Connection = psycopg.Connection[dict[str, Any]]


def numbers() -> tuple[int, random.Random]:
    """A seed, to be shown when something fails, and what it makes."""
    seed = random.randrange(1 << 30) if SOAK else 1
    return seed, random.Random(seed)


def contiguous(names: list[Any]) -> bool:
    """Whether nobody comes back after somebody else."""
    return len([name for name, _ in groupby(names)]) == len(set(names))


# Whole passes over the tables ---------------------------------------------------------------------------------

LEVELS = ("rack", "host")
RESOURCES = ("gpus", "memory_mb", "cpus", "jobs")


def some_fleet(db: Connection, dice: random.Random) -> None:
    """Queues as a tree with limits, workers in racks."""
    db.execute(
        "update gangq.settings set topology = %s, reservations = %s", (list(LEVELS), dice.choice([0, 1, 4]))
    )
    db.execute(
        "insert into gangq.queues_table (name) values ('a'), ('a.b'), ('a.c'), ('d') on conflict do nothing"
    )
    for queue in ("a", "a.b", "a.c", "d"):
        maximum = {key: dice.randint(1, 6) for key in RESOURCES if dice.random() < 0.3}
        db.execute(
            "update gangq.queues_table set policy = %s, maximum = %s, max_running_gangs = %s, max_running_jobs = %s, "
            "submitter_maximum = %s, weight = %s where name = %s",
            (
                dice.choice(["priority", "fifo", "fair", "largest_first"]),
                Jsonb(maximum),
                dice.choice([None, None, 1, 3]),
                dice.choice([None, None, 6]),
                Jsonb({"gangs": 2} if dice.random() < 0.2 else {}),
                dice.choice([1, 2]),
                queue,
            ),
        )
    for host in range(dice.randint(2, 6)):
        rack = {"rack": f"r{dice.randint(1, 2)}"} if dice.random() < 0.9 else {}
        for n in range(dice.choice([1, 1, 2])):
            devices = [
                {"uuid": f"G{host}-{n}-{d}", "index": d, "vram_mb": dice.choice([10, 40]), "source": "nvml"}
                for d in range(dice.randint(0, 4))
            ]
            db.execute(
                "select gangq.register_worker(%s, %s, '{a,a.b,a.c,d}', slots => %s, "
                "memory_mb => %s, cpus => %s, options => %s, devices => %s)",
                (
                    f"w{host}-{n}",
                    f"h{host}",
                    dice.randint(1, 4),
                    dice.choice([4, 8]),
                    dice.choice([2, 4]),
                    Jsonb({"labels": rack}),
                    Jsonb(devices),
                ),
            )


def some_levels(dice: random.Random, never: int) -> tuple[str | None, str | None]:
    """A level required (None more often, the higher `never`) and one preferred, which is narrower."""
    require = dice.choice([*[None] * never, *LEVELS])
    narrower = LEVELS if require is None else LEVELS[LEVELS.index(require) + 1 :]
    return require, dice.choice([None, None, *narrower])


def some_gang(db: Connection, dice: random.Random) -> bool:
    """A gang of one to three roles, fixed or elastic; false: refused, above a limit or against itself."""
    roles = []
    for n in range(dice.choice([1, 1, 2, 3])):
        devices = dice.choice([0, 1, 1, 2])
        least = dice.randint(1, 3)
        require, prefer = some_levels(dice, 3)
        roles.append(
            {
                "name": f"r{n}", "min": least, "count": least + dice.choice([0, 0, 0, 2]),
                "gpus": devices, "vram_mb": dice.choice([0, 20]) if devices else 0,
                "memory_mb": dice.choice([0, 1, 2]), "cpus": dice.choice([0, 1]),
                "strategy": dice.choice(["pack", "pack", "spread", "strict_pack", "strict_spread"]),
                "require": require, "prefer": prefer, "balanced": dice.random() < 0.2,
            }
        )  # fmt: skip
    require, prefer = some_levels(dice, 4)
    try:
        with db.transaction():
            db.execute(
                "select gangq.submit_gang('work', queue => %s, priority => %s, options => %s)",
                (
                    dice.choice(["a", "a.b", "a.c", "d"]),
                    dice.choice([0, 0, 5]),
                    Jsonb(
                        {
                            "budget_s": dice.choice([10.0, 100.0, 1000.0]),
                            "roles": roles,
                            "require": require,
                            "prefer": prefer,
                            "apart": dice.choice([None, "x"]),
                            "checkpoint_mode": "rank0",
                            "wait_for_hardware": True,
                        }
                    ),
                ),
            )
    except psycopg.Error as e:
        if e.sqlstate != "GQ001":
            raise
        return False
    # Everybody here is one login: half of the gangs are somebody else's.
    if dice.random() < 0.5:
        for table, key in (("live_gangs", "id"), ("live_jobs", "gang_id")):
            db.execute(
                f"update gangq.{table} set submitter = 'bob' where {key} = (select max(id) from gangq.live_gangs)"
            )
    return True


ABOVE_A_LIMIT = """
with used as (
  select q.name, count(distinct j.gang_id) as gangs, count(*) as jobs, sum(s.gpus) as gpus,
    sum(s.memory_mb) as memory_mb, sum(s.cpus) as cpus
  from gangq.queues_table q join gangq.shapes s on s.queue = q.name or starts_with(s.queue, q.name || '.')
  join gangq.live_jobs j on j.shape_id = s.id and j.incarnation is not null
  group by q.name)
select u.*, q.maximum, q.max_running_gangs, q.max_running_jobs
from used u join gangq.queues_table q on q.name = u.name
where u.gangs > q.max_running_gangs or u.jobs > q.max_running_jobs
  or u.gpus > (q.maximum ->> 'gpus')::numeric
  or u.memory_mb > (q.maximum ->> 'memory_mb')::numeric or u.cpus > (q.maximum ->> 'cpus')::numeric
  or u.jobs > (q.maximum ->> 'jobs')::numeric
"""
ABOVE_A_SUBMITTERS = """
select q.name, j.submitter
from gangq.queues_table q join gangq.shapes s on s.queue = q.name or starts_with(s.queue, q.name || '.')
join gangq.live_jobs j on j.shape_id = s.id and j.incarnation is not null
group by q.name, q.submitter_maximum, j.submitter
having count(distinct j.gang_id) > (q.submitter_maximum ->> 'gangs')::numeric
"""
OVERFULL = """
select i.id
from gangq.incarnations i join gangq.live_jobs j on j.incarnation = i.id join gangq.shapes s on s.id = j.shape_id
group by i.id having count(*) > i.slots or sum(s.memory_mb) > i.memory_mb or sum(s.cpus) > i.cpus
"""
SEATED = """
select g.id, g.kind_id, r.ordinal as role, k.require as together, k.apart, coalesce(j.epoch_rank, j.rank) as rank,
  g.world_size, i.host, i.labels ->> 'rack' as rack, i.id as incarnation, s.gpus, s.vram_mb, d.devices, d.vram
from gangq.live_gangs g join gangq.gang_kinds k on k.id = g.kind_id join gangq.live_jobs j on j.gang_id = g.id
join gangq.kind_roles r on r.kind_id = k.id and r.ordinal = coalesce(j.role, 1)
join gangq.shapes s on s.id = j.shape_id
join gangq.incarnations i on i.id = j.incarnation
left join lateral (
  select count(*) filter (where x.offered_by = i.id) as devices, min(x.vram_mb) as vram
  from gangq.device_holds h join gangq.device_registry x on x.id = h.device_id where h.job_id = j.id) d on true
order by g.id, rank
"""


def check(db: Connection, case: Any) -> int:
    """Every rule of placement, judged on the tables; how many gangs are placed."""
    assert db.execute("select * from gangq.violations").fetchall() == [], case
    for rule in (ABOVE_A_LIMIT, ABOVE_A_SUBMITTERS, OVERFULL):
        assert db.execute(rule).fetchall() == [], case
    placed = 0
    apart: dict[str, str] = {}
    for gang, rows in groupby(db.execute(SEATED).fetchall(), key=lambda row: row["id"]):
        members = list(rows)
        placed += 1
        assert [m["rank"] for m in members] == list(range(members[0]["world_size"])), (case, gang)
        assert all(
            m["devices"] == m["gpus"] and (not m["gpus"] or m["vram"] >= m["vram_mb"]) for m in members
        ), (case, gang)
        wanted = db.execute(
            "select * from gangq.kind_roles where kind_id = %s order by ordinal", (members[0]["kind_id"],)
        ).fetchall()
        assert [m["role"] for m in members] == sorted(m["role"] for m in members)
        for role in wanted:
            mine = [m for m in members if m["role"] == role["ordinal"]]
            assert role["min_members"] <= len(mine) <= role["max_members"], (case, gang)
            hosts = [m["host"] for m in mine]
            assert contiguous(hosts), (case, gang)
            assert contiguous([m["incarnation"] for m in mine]), (case, gang)
            assert contiguous([m["rack"] for m in mine]), (case, gang)
            assert role["strategy"] != "strict_pack" or len(set(hosts)) == 1, (case, gang)
            assert role["strategy"] != "strict_spread" or len(set(hosts)) == len(hosts), (case, gang)
            if role["require"]:
                assert len({m[role["require"]] for m in mine}) == 1 and mine[0][role["require"]], (case, gang)  # noqa: PT018
        if members[0]["together"]:
            assert len({m[members[0]["together"]] for m in members}) == 1, (case, gang)
        if members[0]["apart"]:
            for host in {m["host"] for m in members}:
                assert apart.setdefault(host, gang) == gang, (case, gang, host)
    return placed


def test_whole_passes_over_random_fleets_trees_and_gangs_keep_every_rule(db: Connection, clock: Any) -> None:
    seed, dice = numbers()
    placed = taken = 0
    for n in range(1000 if SOAK else 16):
        with db.transaction(force_rollback=True):
            some_fleet(db, dice)
            for _ in range(dice.randint(3, 8)):
                taken += some_gang(db, dice)
            for _ in range(3):
                clock.advance(3)
                board = db.execute("select gangq.board() as board").fetchall()[0]["board"]
                decided = decide(Board.from_json(board))
                assert decide(Board.from_json(board)) == decided, "the same board, the same decisions"
                before = {
                    row["id"]
                    for row in db.execute(
                        "select id from gangq.live_gangs where state <> 'blocked'"
                    ).fetchall()
                }
                place(db)
                now = db.execute(
                    "select g.id, array_agg(j.incarnation order by coalesce(j.epoch_rank, j.rank)) as seats "
                    "from gangq.live_gangs g "
                    "join gangq.live_jobs j on j.gang_id = g.id and j.incarnation is not null "
                    "where g.state = 'reserved' group by g.id"
                ).fetchall()
                starts = {
                    one.ask: [seat.worker for seat in one.seats] for one in decided if one.action == "start"
                }
                assert {f"g{row['id']}": row["seats"] for row in now if row["id"] not in before} == starts, (
                    seed,
                    n,
                    "apply does what was decided",
                )
                promised = {row["ask"] for row in db.execute("select ask from gangq.plans").fetchall()}
                assert promised == {one.ask for one in decided if one.action == "plan"}, (seed, n)
                placed += check(db, (seed, n))
                gone = db.execute(
                    "select id from gangq.live_gangs where state = 'reserved' order by id"
                ).fetchall()
                if gone and dice.random() < 0.7:
                    db.execute(
                        "select gangq.cancel(gang_ids => array[%s::bigint])", (dice.choice(gone)["id"],)
                    )
                taken += some_gang(db, dice)
    assert taken > 60
    assert placed > 40
