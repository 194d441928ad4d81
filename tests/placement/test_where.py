"""Where the members of a gang sit: packing rules, topology, several roles at once. On boards made by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from placement.boards import Fleet, Kind, Node, Role, contiguous, seat


def one(size: int, rooms: dict[str, int], strategy: str = "pack", balanced: bool = False) -> list[str] | None:
    """The host of each member of one role, in rank order."""
    fleet = Fleet([Node(host, slots) for host, slots in rooms.items()])
    return hosts(fleet, seat(fleet, Kind((Role(size, strategy=strategy, balanced=balanced),))))


def hosts(fleet: Fleet, seats: list[list[int]] | None) -> list[str] | None:
    """The hosts in rank order."""
    return None if seats is None else [fleet.nodes[worker].host for role in seats for worker in role]


def rooms(*slots: int, **labels: list[str]) -> Fleet:
    """One host for each number of slots; labels name a domain for each of them."""
    levels = (
        *[name for name in labels if name != "nvlink"],
        "host",
        *[name for name in labels if name == "nvlink"],
    )
    nodes = [
        Node(f"h{n}", slots=room, labels={name: values[n] for name, values in labels.items()})
        for n, room in enumerate(slots)
    ]
    return Fleet(nodes, levels)


# One role ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "balanced", "size", "room", "expected"),
    [
        # Kueue's worked examples: best fit, and balanced.
        ("pack", False, 7, [3, 3, 2, 1], [3, 3, 0, 1]),
        ("pack", False, 6, [6, 5, 4, 3, 2], [6, 0, 0, 0, 0]),
        ("pack", True, 25, [15, 15], [13, 12]),
        ("pack", True, 23, [15, 13, 10], [12, 11, 0]),
        ("pack", True, 22, [15, 15, 8], [11, 11, 0]),
        ("pack", True, 9, [8, 2, 2], [8, 1, 0]),
        ("pack", True, 5, [8, 5], [0, 5]),
        ("pack", False, 4, [1, 1, 1], None),
        ("spread", False, 4, [4, 4, 4], [2, 1, 1]),
        ("spread", False, 6, [1, 4, 4], [1, 3, 2]),
        ("spread", False, 2, [1, 4, 3], [0, 1, 1]),
        ("spread", False, 9, [1, 4, 3], None),
        ("strict_pack", False, 3, [8, 3, 4], [0, 3, 0]),
        ("strict_pack", False, 9, [8, 8, 8], None),
        ("strict_spread", False, 3, [8, 1, 4, 2], [0, 1, 1, 1]),
        ("strict_spread", False, 3, [8, 8], None),
        ("strict_spread", False, 2, [1, 1, 0], [1, 1, 0]),
    ],
)
def test_a_strategy_chooses_its_hosts(
    strategy: str, balanced: bool, size: int, room: list[int], expected: list[int] | None
) -> None:
    seats = one(size, {f"h{n}": slots for n, slots in enumerate(room)}, strategy, balanced)
    if expected is None:
        assert seats is None
    else:
        assert seats is not None
        assert [seats.count(f"h{n}") for n in range(len(room))] == expected
        assert contiguous(seats)


def test_the_tightest_host_that_holds_the_rest_comes_last() -> None:
    assert one(7, {"a": 3, "b": 1, "c": 2, "d": 3}) == ["a"] * 3 + ["d"] * 3 + ["b"]


def test_ranks_are_contiguous_by_worker_host_and_every_domain() -> None:
    """Racks of two zones whose sizes interleave: the zone must not be left and entered again."""
    fleet = Fleet(
        [
            Node(f"h{n}", slots=2, labels={"zone": zone, "rack": rack, "nvlink": link})
            for n, (zone, rack) in enumerate(
                [("b", "1"), ("a", "1"), ("b", "2"), ("a", "2"), ("a", "1"), ("b", "3")]
            )
            for link in ("x", "y", "x", "y")
        ],
        ("zone", "rack", "host", "nvlink"),
    )
    seats = seat(fleet, Kind((Role(43),)))
    assert seats is not None
    for level in fleet.levels:
        assert contiguous([fleet.path(worker, level) for worker in seats[0]]), level
    assert contiguous(seats[0])
    assert Counter(fleet.nodes[w].host for w in seats[0])[fleet.nodes[seats[0][-1]].host] == 3, (
        "the one not filled"
    )


# Topology ---------------------------------------------------------------------------------------------------

RACKS = {"rack": ["a", "a", "b", "b", "c"]}


def test_a_required_domain_is_the_tightest_that_holds_the_gang() -> None:
    fleet = rooms(4, 4, 2, 3, 4, **RACKS)
    assert hosts(fleet, seat(fleet, Kind((Role(5),), require="rack"))) == ["h3"] * 3 + ["h2"] * 2
    assert hosts(fleet, seat(fleet, Kind((Role(4),), require="rack"))) == ["h4"] * 4
    assert hosts(fleet, seat(fleet, Kind((Role(6),), require="rack"))) == ["h0"] * 4 + ["h1"] * 2
    assert seat(fleet, Kind((Role(9),), require="rack")) is None


def test_a_preferred_domain_is_given_up_level_by_level() -> None:
    fleet = rooms(2, 2, 2, 2, 2, zone=["n", "n", "s", "s", "s"], rack=["1", "2", "1", "2", "2"])
    at = {
        n: {fleet.path(w, "zone") for w in seat(fleet, Kind((Role(n),), prefer="rack"))[0]}
        for n in (2, 4, 6, 8)
    }  # type: ignore[index]
    racks = {
        n: {fleet.path(w, "rack") for w in seat(fleet, Kind((Role(n),), prefer="rack"))[0]} for n in (2, 4, 6)
    }  # type: ignore[index]
    assert (racks[2], racks[4]) == ({"n/1"}, {"s/2"}), "a rack of its own"
    assert (at[6], len(racks[6])) == ({"s"}, 2), "a zone, since no rack holds it"
    assert at[8] == {"n", "s"}, "anywhere, since no zone does"
    assert seat(fleet, Kind((Role(8),), require="zone", prefer="rack")) is None, "not beyond what is required"


def test_a_host_without_the_label_is_in_no_domain_but_serves_who_does_not_ask() -> None:
    fleet = Fleet([Node("h0", 2), Node("h1", 1, labels={"rack": "a"})], ("rack", "host"))
    assert seat(fleet, Kind((Role(2),), require="rack")) is None
    assert hosts(fleet, seat(fleet, Kind((Role(1),), require="rack"))) == ["h1"]
    assert hosts(fleet, seat(fleet, Kind((Role(2),), prefer="rack"))) == ["h0", "h0"]
    assert seat(fleet, Kind((Role(2),), require="rack", prefer="host")) is None
    assert seat(fleet, Kind((Role(2, require="rack", strategy="strict_pack"), Role(1)))) is None


def test_a_level_narrower_than_the_host_is_a_domain_like_any_other() -> None:
    fleet = Fleet(
        [Node(host, slots=2, labels={"nvlink": link}) for host in ("h0", "h1") for link in ("x", "x", "y")],
        ("host", "nvlink"),
    )
    (seats,) = seat(fleet, Kind((Role(3),), require="nvlink")) or [[]]
    assert {fleet.path(w, "nvlink") for w in seats} == {"h0/x"}
    (seats,) = seat(fleet, Kind((Role(2),), require="nvlink")) or [[]]
    assert {fleet.path(w, "nvlink") for w in seats} == {"h0/y"}, "the tightest"
    assert seat(fleet, Kind((Role(5),), require="nvlink")) is None
    (seats,) = seat(fleet, Kind((Role(5),), prefer="nvlink")) or [[]]
    assert {fleet.nodes[w].host for w in seats} == {"h0"}, "one host, since no link holds it"


def test_roles_have_levels_of_their_own_inside_the_gangs() -> None:
    fleet = rooms(4, 4, 4, 4, zone=["n", "n", "s", "s"], rack=["1", "2", "1", "2"])
    seats = seat(fleet, Kind((Role(3, require="rack"), Role(4, require="rack")), require="zone"))
    assert seats is not None
    assert [len({fleet.path(w, "rack") for w in role}) for role in seats] == [1, 1]
    assert len({fleet.path(w, "zone") for role in seats for w in role}) == 1


# Who may sit where ------------------------------------------------------------------------------------------


def test_gangs_kept_apart_share_no_host() -> None:
    fleet = rooms(4, 4)
    kind = Kind((Role(2), Role(1)), apart="x", prefer="host")
    assert hosts(fleet, seat(fleet, kind, apart=[("x", "h0")])) == ["h1"] * 3
    assert hosts(fleet, seat(fleet, kind, apart=[("y", "h0")])) == ["h0"] * 3
    assert seat(fleet, kind, apart=[("x", "h0"), ("x", "h1")]) is None


def test_a_shape_goes_only_where_it_is_served() -> None:
    fleet = Fleet(
        [Node("h0", 4, label="old"), Node("h1", 2, label="new"), Node("h2", 4, open=False, label="new")]
    )
    assert hosts(fleet, seat(fleet, Kind((Role(2, label="new"),)))) == ["h1", "h1"]
    assert seat(fleet, Kind((Role(3, label="new"),))) is None


def test_devices_are_whole_of_the_right_size_free_and_not_avoided() -> None:
    fleet = Fleet([Node("h0", 4, vrams=(10, 40, 40)), Node("h1", 4, vrams=(80,) * 4, withheld=1)])
    assert hosts(fleet, seat(fleet, Kind((Role(2, gpus=1, vram=40),)))) == ["h0", "h0"]
    assert hosts(fleet, seat(fleet, Kind((Role(3, gpus=1, vram=40),)))) == ["h1"] * 3
    assert hosts(fleet, seat(fleet, Kind((Role(2, gpus=2),)))) == ["h0", "h1"]
    assert seat(fleet, Kind((Role(3, gpus=2),))) is None, "a pair on each host, the rest are odd ones"
    assert hosts(fleet, seat(fleet, Kind((Role(2, gpus=1, vram=40, avoid=(1002,)),)))) == ["h1", "h1"]
    assert seat(fleet, Kind((Role(5, gpus=1, vram=40, avoid=(1002,)),))) is None


# Several roles ----------------------------------------------------------------------------------------------


def test_a_role_gives_way_to_one_that_fits_nowhere_else() -> None:
    """The one that comes first fits everywhere, and would by itself take what only the other can use."""
    fleet = Fleet([Node("h0", 2, vrams=(80,) * 2), Node("h1", 2, vrams=(10,) * 2)])
    anywhere, large = Role(2, gpus=1), Role(2, gpus=1, vram=80)
    assert seat(fleet, Kind((anywhere, large))) == [[1, 1], [0, 0]]
    assert seat(fleet, Kind((large, anywhere))) == [[0, 0], [1, 1]]
