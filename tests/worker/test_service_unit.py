"""Whom to ask for a restart of this process, read from files that a test writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangq.worker.registration import service_unit

MAIN = {"SYSTEMD_EXEC_PID": "41"}


def found(tmp_path: Path, cgroup: str, environ: dict[str, str]) -> dict[str, str]:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    return service_unit(environ, proc=proc, pids=(42, 41))


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/system.slice/gangq-worker@0.service\n", {"unit": "gangq-worker@0.service"}),
        ("0::/system.slice/system-gangq.slice/w@1.service/sub\n", {"unit": "w@1.service"}),
        (
            "4:memory:/\n1:name=systemd:/system.slice/w.service\n0::/system.slice/w.service\n",
            {"unit": "w.service"},
        ),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/w.service\n",
            {"user_unit": "w.service"},
        ),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", {}),
        ("0::/user.slice/user-1000.slice/user@1000.service/init.scope\n", {}),
        ("0::/\n", {}),
        ("", {}),
    ],
)
def test_the_unit_whose_main_process_it_is(tmp_path: Path, cgroup: str, expected: dict[str, str]) -> None:
    assert found(tmp_path, cgroup, MAIN) == expected


@pytest.mark.parametrize("environ", [{"SYSTEMD_EXEC_PID": "7", "INVOCATION_ID": "x"}, {}])
def test_a_unit_that_merely_started_it_is_not_its_own(tmp_path: Path, environ: dict[str, str]) -> None:
    assert found(tmp_path, "0::/system.slice/ci-runner.service\n", environ) == {}


def test_an_old_systemd_does_not_say_whom_it_started(tmp_path: Path) -> None:
    here = found(tmp_path, "0::/system.slice/w.service\n", {"INVOCATION_ID": "x"})
    assert here == {"unit": "w.service"}


def test_of_this_very_process_it_says_something() -> None:
    assert service_unit().keys() <= {"unit", "user_unit"}
