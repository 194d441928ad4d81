"""The page of events has a row for each kind that the SQL writes, and no other, and its keys are written too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs/manual/events.md").read_text(encoding="utf-8")
SQL = "\n".join(
    re.sub(r"--.*", "", file.read_text(encoding="utf-8")) for file in sorted((TOP / "sql").glob("*.sql"))
)
KIND_AT = {
    **dict.fromkeys(("log_event", "log_job", "log_with_evidence", "stop_unit", "stop_solo"), 1),
    "log_cordon": 0,
    "stopped": 3,
}
"""Functions that write an event, or hand its kind on: which argument is the kind."""
DECIDED = (r"how text default ('[a-z]+')", r"kind := (case when suspect\.[^;]*);", r"answer := ('[a-z]+');")
"""What else makes a kind: a default, and what a suspicion and a trip come to."""


def arguments(text: str) -> list[str]:
    """The arguments of a call, out of the text behind its opening parenthesis."""
    found, depth, quoted = [""], 0, False
    for one in text:
        quoted ^= one == "'"
        depth += 0 if quoted else (one in "([") - (one in ")]")
        if depth < 0:
            return [each.strip() for each in found]
        if one == "," and not quoted and not depth:
            found.append("")
        else:
            found[-1] += one
    raise AssertionError(text[:80])


def kinds(expression: str) -> list[str]:
    """What an expression may be: itself if it is a literal, or the literals that its case answers with."""
    return re.findall(r"(?:^|\bthen\s+|\belse\s+)'([a-z_]+)'", expression)


def test_every_kind_that_is_written_has_a_row_and_no_other(db: psycopg.Connection[dict[str, Any]]) -> None:
    written = {row["event"] for row in db.execute("select event from gangq.causes where event <> 'none'")}
    for call in re.finditer(rf"(?<!function )gangq\.({'|'.join(KIND_AT)})\(", SQL):
        given = arguments(SQL[call.end() :])
        if len(given) > KIND_AT[call[1]]:
            written.update(kinds(given[KIND_AT[call[1]]]))
    for pattern in DECIDED:
        found = re.findall(pattern, SQL)
        assert found, pattern
        written.update(*map(kinds, found))
    rows = re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(written)


def test_every_key_of_its_data_is_one_that_the_sql_writes() -> None:
    cells = re.findall(r"^\| `[a-z_]+` \|[^|]*\|([^|]*)\|$", PAGE, re.MULTILINE)
    keys = {key for cell in cells for key in re.findall("`([a-z_]+)`", cell)}
    assert len(keys) > 40
    assert [key for key in sorted(keys) if not re.search(rf"""['"]{key}['"]""", SQL)] == []
