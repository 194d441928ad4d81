"""Every case is a test that names it, or has its reason in the table of its file: none is forgotten, none is both."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from acceptance import test_ray_gangs, test_yunikorn_gangs


@pytest.mark.parametrize(
    ("file", "letter", "last"), [(test_ray_gangs, "R", 56), (test_yunikorn_gangs, "Y", 31)]
)
def test_every_case_is_a_test_or_has_its_reason(file: ModuleType, letter: str, last: int) -> None:
    tested = {
        case.upper()
        for name in vars(file)
        for prefix in re.findall(rf"^test((?:_{letter.lower()}[0-9]+)+)_", name)
        for case in prefix.strip("_").split("_")
    }
    rows = re.findall(rf"^\| ({letter}[0-9, {letter}]*) \| .+ \|$", file.__doc__ or "", re.MULTILINE)
    left_out = {case for row in rows for case in row.split(", ")}
    assert tested | left_out == {f"{letter}{n:02}" for n in range(1, last + 1)}
    assert tested & left_out == set()
