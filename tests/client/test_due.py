"""When a cron expression is due: tables of what clocks do twice a year; a reference that looks at every minute."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gangq.due import MOST, Choice, Cron, choose, zone
from gangq.errors import InvalidInput


def at(text: str) -> datetime:
    """A moment as people write it: 2026-03-29 03:00+02."""
    return datetime.fromisoformat(text).astimezone(UTC)


def local(expression: str, tz: str, after: str, count: int) -> list[str]:
    """The next due times, by the clock on the wall and its distance from UTC."""
    cron, last, found = Cron(expression, tz), at(after), []
    for _ in range(count):
        last = cron.after(last)
        found.append(f"{last.astimezone(zone(tz)):%d %H:%M%z}"[:-2])
    return found


# In Oslo 02:00 to 03:00 does not exist on 29 March 2026, and comes twice on 25 October.
GAP, OVERLAP = "2026-03-28 23:00+01", "2026-10-24 23:30+02"


@pytest.mark.parametrize(
    ("expression", "after", "due"),
    [
        # A time of day that is skipped: at the first minute after the gap, once.
        ("30 2 * * *", GAP, ["29 03:00+02", "30 02:30+02"]),
        ("0 2 * * *", GAP, ["29 03:00+02", "30 02:00+02"]),
        ("0 3 * * *", GAP, ["29 03:00+02", "30 03:00+02"]),
        ("30 2,3 * * *", GAP, ["29 03:00+02", "29 03:30+02", "30 02:30+02"]),
        ("0 2,3 * * *", GAP, ["29 03:00+02", "30 02:00+02"]),
        ("*/20 2 * * *", GAP, ["29 03:00+02", "30 02:00+02", "30 02:20+02"]),
        ("* 2 * * *", GAP, ["29 03:00+02", "30 02:00+02", "30 02:01+02"]),
        ("0 */2 * * *", GAP, ["29 00:00+01", "29 03:00+02", "29 04:00+02"]),
        ("30 2 * * 0", GAP, ["29 03:00+02", "05 02:30+02"]),
        ("30 2 29 3 *", GAP, ["29 03:00+02"]),
        # Every hour goes by elapsed time: a skipped one has no due time.
        ("30 * * * *", GAP, ["28 23:30+01", "29 00:30+01", "29 01:30+01", "29 03:30+02"]),
        ("0,30 */1 * * *", "2026-03-29 01:30+01", ["29 03:00+02", "29 03:30+02"]),
        # A time of day that comes twice: at the first of the two.
        ("30 2 * * *", OVERLAP, ["25 02:30+02", "26 02:30+01"]),
        ("0 2 * * *", OVERLAP, ["25 02:00+02", "26 02:00+01"]),
        ("0 3 * * *", OVERLAP, ["25 03:00+01", "26 03:00+01"]),
        ("*/30 2 * * *", OVERLAP, ["25 02:00+02", "25 02:30+02", "26 02:00+01"]),
        ("0 */2 * * *", OVERLAP, ["25 00:00+02", "25 02:00+02", "25 04:00+01"]),
        # Every hour: both.
        ("30 * * * *", OVERLAP, ["25 00:30+02", "25 01:30+02", "25 02:30+02", "25 02:30+01", "25 03:30+01"]),
        ("*/30 * * * *", "2026-10-25 02:30+02", ["25 02:00+01", "25 02:30+01", "25 03:00+01"]),
        # Asked in the second of the two hours, the first is over.
        ("30 2 * * *", "2026-10-25 02:10+01", ["26 02:30+01"]),
        ("30 2 * * *", "2026-10-25 02:10+02", ["25 02:30+02", "26 02:30+01"]),
        ("30 2 * * *", "2026-10-25 02:30+02", ["26 02:30+01"]),
        # Asked right at the edges of a gap.
        ("30 2 * * *", "2026-03-29 01:59:59.999999+01", ["29 03:00+02", "30 02:30+02"]),
        ("30 2 * * *", "2026-03-29 03:00+02", ["30 02:30+02"]),
    ],
)
def test_what_the_clocks_of_oslo_do_loses_and_doubles_nothing(
    expression: str, after: str, due: list[str]
) -> None:
    assert local(expression, "Europe/Oslo", after, len(due)) == due


@pytest.mark.parametrize(
    ("expression", "tz", "after", "due"),
    [
        # Half an hour; midnight itself; a whole day that a country left out; a zone without such days.
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 12:00+00", ["04 02:30+11", "05 02:15+11"]),
        ("0 0 * * *", "Africa/Cairo", "2026-04-23 12:00+00", ["24 01:00+03", "25 00:00+03"]),
        ("30 * * * 5", "Africa/Cairo", "2026-04-23 12:00+00", ["24 01:30+03", "24 02:30+03"]),
        ("30 0 * * *", "America/Havana", "2026-11-01 03:00+00", ["01 00:30-04", "02 00:30-05"]),
        ("0 12 * * *", "Pacific/Apia", "2011-12-29 23:00+00", ["31 00:00+14", "31 12:00+14"]),
        ("30 2 * * *", "Asia/Kolkata", "2026-03-28 22:00+00", ["30 02:30+05", "31 02:30+05"]),
        ("30 2 * * *", "UTC", "2026-03-29 00:00+00", ["29 02:30+00", "30 02:30+00"]),
    ],
)
def test_other_clocks(expression: str, tz: str, after: str, due: list[str]) -> None:
    assert local(expression, tz, after, len(due)) == due


def test_fields_are_those_of_cron() -> None:
    assert local("0 0 31 * *", "UTC", "2026-02-01+00:00", 2) == ["31 00:00+00", "31 00:00+00"]
    assert local("0 0 L * *", "UTC", "2026-02-01+00:00", 2) == ["28 00:00+00", "31 00:00+00"]
    assert local("0 9 * * mon-fri", "UTC", "2026-05-01T10:00+00:00", 2) == ["04 09:00+00", "05 09:00+00"]
    assert local("0 0 13 * 5", "UTC", "2026-05-01T01:00+00:00", 3) == [
        "08 00:00+00",
        "13 00:00+00",
        "15 00:00+00",
    ]
    assert local("5/20 * * * *", "UTC", "2026-05-01+00:00", 4)[:3] == [
        "01 00:05+00",
        "01 00:25+00",
        "01 00:45+00",
    ]


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "five fields"),
        ("* * * *", "five fields"),
        ("0 * * * * *", "for less than a minute use every"),
        ("60 * * * *", "Bad minute"),
        ("* 24 * * *", "Bad hour"),
        ("* * 0 * *", "Bad day-of-month"),
        ("* * * 13 *", "Bad month"),
        ("* * * * mo", "Bad day-of-week"),
        ("*/0 * * * *", "Bad minute"),
        ("5-1 * * * *", "Bad minute"),
        ("0 0 1 1 \N{SUPERSCRIPT TWO}L", "Bad day-of-week"),
        ("0 0 30 2 *", "cannot be read"),
        ("0 0 31 2,4 *", "cannot be read"),
        ("0 " * 300, "five fields"),
    ],
)
def test_what_cannot_be_read_is_said(expression: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Cron(expression, "UTC")


@pytest.mark.parametrize("tz", ["Mars/Olympus", "", "../etc/passwd", "Europe", "CEST-2", "a\0b"])
def test_a_time_zone_that_is_none_is_refused(tz: str) -> None:
    with pytest.raises(InvalidInput, match="is not known on this machine"):
        Cron("* * * * *", tz)


# A reference ------------------------------------------------------------------------------------------------

ZONES = {
    "Europe/Oslo": ("2026-03-28", "2026-10-24"),
    "America/Havana": ("2026-03-07", "2026-10-31"),
    "Australia/Lord_Howe": ("2026-04-04", "2026-10-03"),
    "Africa/Cairo": ("2026-04-23", "2026-10-29"),
    "America/St_Johns": ("2026-03-07", "2026-10-31"),
    "UTC": ("2026-03-28", "2026-10-24"),
}


def reference(
    minutes: set[int], hours: set[int], tz: str, after: datetime, until: datetime
) -> list[datetime]:
    """Every minute of the real time looked at: every hour matches as it comes, a time of day by its day's list."""
    where = ZoneInfo(tz)
    real = [after + timedelta(minutes=n) for n in range(1, int((until - after) / timedelta(minutes=1)) + 1)]
    walls = [moment.astimezone(where) for moment in real]
    if len(hours) == 24:
        return [m for m, wall in zip(real, walls, strict=True) if wall.minute in minutes]
    found = set()
    first, last = walls[0].date() - timedelta(days=1), walls[-1].date()
    for day in (first + timedelta(days=n) for n in range((last - first).days + 1)):
        for hour in hours:
            for minute in minutes:
                wanted = datetime(day.year, day.month, day.day, hour, minute)
                # The first minute of real time whose wall clock shows this, or more, for the first time.
                start = wanted.replace(tzinfo=UTC) - timedelta(hours=15)
                for n in range(30 * 60):
                    moment = start + timedelta(minutes=n)
                    if moment.astimezone(where).replace(tzinfo=None) >= wanted:
                        found.add(moment)
                        break
    return sorted(moment for moment in found if after < moment <= until)


@settings(max_examples=60, deadline=None)
@given(
    tz=st.sampled_from(sorted(ZONES)),
    autumn=st.booleans(),
    minutes=st.sets(st.integers(0, 59), min_size=1, max_size=2),
    hours=st.one_of(st.just(set(range(24))), st.sets(st.integers(0, 4), min_size=1, max_size=2)),
    offset=st.integers(0, 24 * 60),
)
def test_it_agrees_with_a_reference_that_looks_at_every_minute(
    tz: str, autumn: bool, minutes: set[int], hours: set[int], offset: int
) -> None:
    # Where the clock is set back by half an hour, cronsim runs one hourly due time of the two half hours.
    assume(not (tz == "Australia/Lord_Howe" and len(hours) == 24))
    after = datetime.fromisoformat(ZONES[tz][autumn]).replace(tzinfo=UTC) + timedelta(minutes=offset)
    until = after + timedelta(hours=30)
    listed = [",".join(map(str, sorted(numbers))) for numbers in (minutes, hours)]
    if len(hours) == 24:
        listed[1] = "*"
    cron, found, last = Cron(f"{listed[0]} {listed[1]} * * *", tz), [], after
    while (last := cron.after(last)) <= until:
        found.append(last)
    assert found == reference(minutes, hours, tz, after, until)
    assert cron.passed(after, until, 1000) == found
    assert cron.passed(after, until, 3) == found[-3:]


# What was missed --------------------------------------------------------------------------------------------

NIGHTLY, QUARTERS = Cron("0 3 * * *", "UTC"), Cron("*/15 * * * *", "UTC")
MONDAY = at("2026-06-01 00:00+00")


@pytest.mark.parametrize("catch_up", ["skip", "last", "all"])
def test_what_is_not_due_yet_or_just_now_is_next_whatever_was_said_of_catching_up(catch_up: str) -> None:
    due = MONDAY + timedelta(hours=3)
    assert choose(NIGHTLY, MONDAY, MONDAY, catch_up) == Choice(due, None)
    assert choose(NIGHTLY, MONDAY, due, catch_up) == Choice(due, None)
    assert choose(NIGHTLY, MONDAY, due + timedelta(seconds=59), catch_up) == Choice(due, None)


def test_of_what_was_missed_skip_runs_none_last_the_last_and_all_the_first() -> None:
    now = MONDAY + timedelta(days=3, hours=4)  # at 3 on Monday to Thursday
    first = MONDAY + timedelta(hours=3)
    assert choose(NIGHTLY, MONDAY, now, "skip") == Choice(first + timedelta(days=4), first)
    assert choose(NIGHTLY, MONDAY, now, "last") == Choice(first + timedelta(days=3), first)
    assert choose(NIGHTLY, MONDAY, now, "all") == Choice(first, None)


def test_skip_runs_the_last_one_where_that_is_not_late() -> None:
    now = MONDAY + timedelta(hours=5, seconds=30)
    assert choose(QUARTERS, MONDAY, now, "skip").due == MONDAY + timedelta(hours=5)
    late = now + timedelta(minutes=5)
    assert choose(QUARTERS, MONDAY, late, "skip").due == MONDAY + timedelta(hours=5, minutes=15)


@pytest.mark.parametrize("days", [0, 1, 3, 30, 800])
def test_all_runs_no_more_than_the_bound_and_those_are_the_last(days: int) -> None:
    now = MONDAY + timedelta(days=days, minutes=1)
    count = days * 96
    due, missed = choose(QUARTERS, MONDAY, now, "all")
    if count <= MOST:
        assert (due, missed) == (MONDAY + timedelta(minutes=15), None)
    else:
        assert (due, missed) == (
            MONDAY + timedelta(minutes=15 * (count - MOST + 1)),
            MONDAY + timedelta(minutes=15),
        )
    assert len(QUARTERS.passed(MONDAY, now, MOST)) == min(count, MOST)


def test_a_year_without_a_tick_is_no_reason_to_compute_for_long() -> None:
    now = MONDAY + timedelta(days=5000)
    began = time.process_time()
    for expression in ("* * * * *", "*/5 * * * *", "0 3 * * *", "0 0 29 2 *", "0 0 1 * *"):
        for catch_up in ("skip", "last", "all"):
            choose(Cron(expression, "Europe/Oslo"), MONDAY, now, catch_up)
    assert time.process_time() - began < 2
