"""Every SQL function has a caller."""

from __future__ import annotations

import re
from pathlib import Path

from gangq import schema

SOURCES = Path(schema.__file__).parent


def test_no_function_is_there_for_nobody() -> None:
    """Called by another function, a view, a trigger or a column, or a door, or named by the library."""
    sql = {file.name: file.text for file in schema.sql_files()}
    python = "\n".join(path.read_text() for path in SOURCES.rglob("*.py"))
    doors = set(re.findall(r"\w+", sql["150_doors"]))
    unused = []
    for text in sql.values():
        for name in re.findall(r"create (?:or replace )?function gangq\.(\w+)", text):
            own = re.compile(rf"(create (or replace )?|comment on )function gangq\.{name}\b")
            calls = sum(len(re.findall(rf"gangq\.{name}\b", own.sub("", other))) for other in sql.values())
            if not calls and name not in doors and not re.search(rf'(gangq\.{name}\b|"{name}")', python):
                unused.append(name)
    assert unused == []
