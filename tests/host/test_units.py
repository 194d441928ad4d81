"""The shipped units: what systemd itself says of them, and how they are put in place."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gangq.cli import main
from gangq.errors import NotFound
from gangq.host import units
from gangq.proc.supervision import SILENCE_S

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(
    ANALYZE is None, reason="systemd is not installed (apt-get install systemd)"
)
EXPOSURE = {
    "gangq-worker@.service": 40,
    "gangq-tick.service": 25,
    "gangq-bounce.service": 35,
    "gangq-notify@.service": 25,
}
"""Most that systemd may think a service is exposed, in tenths of 10: what it scores today, rounded up a little."""


def gangq(*args: object, **env: str) -> str:
    result = CliRunner().invoke(main, ["systemd", *map(str, args)], env=env)
    assert result.exit_code == 0, (args, result.stdout, result.stderr, result.exception)
    return result.stdout


def placed(directory: Path, *args: str) -> Path:
    gangq("install", "--dir", directory, *args)
    return directory


def verify(directory: Path, unit: str, *more: str) -> str:
    """What systemd-analyze has against a unit; a template by one instance of it. Its exit code says little."""
    assert ANALYZE is not None
    name = unit.replace("@.", "@0.")
    done = subprocess.run(
        [ANALYZE, *more, "verify", "--man=no", name],
        env={
            "SYSTEMD_UNIT_PATH": f"{directory}:",
            "PATH": os.defpath,
            "HOME": "/root",
            "XDG_RUNTIME_DIR": "/run",
        },
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout + done.stderr + (f"exit code {done.returncode}" if done.returncode else "")


@needs_systemd
@pytest.mark.parametrize("unit", units.UNITS)
def test_systemd_has_nothing_against_a_unit(unit: str, tmp_path: Path) -> None:
    assert verify(placed(tmp_path), unit) == ""


@needs_systemd
@pytest.mark.parametrize("unit", units.UNITS)
def test_a_users_systemd_has_nothing_against_a_unit(unit: str, tmp_path: Path) -> None:
    assert verify(placed(tmp_path, "--user"), unit, "--user") == ""


@needs_systemd
def test_verification_would_say_so(tmp_path: Path) -> None:
    unit = placed(tmp_path) / "gangq-tick.service"
    unit.write_text(unit.read_text().replace("ProtectSystem=strict", "ProtectSistem=strict"))
    assert "ProtectSistem" in verify(tmp_path, unit.name)


@needs_systemd
def test_the_drop_in_is_one_that_newer_systemds_know(tmp_path: Path) -> None:
    version = units.manager_version()
    assert version is not None
    drop_in = placed(tmp_path) / "gangq-worker@.service.d" / units.RESTART_STEPS
    assert drop_in.exists() == (version >= units.STEPS_SINCE)
    drop_in.parent.mkdir(exist_ok=True)
    drop_in.write_text(units.shipped(units.RESTART_STEPS))
    said = verify(tmp_path, "gangq-worker@.service")
    assert bool(said) == (version < units.STEPS_SINCE)
    assert all("RestartSteps" in line or "RestartMaxDelaySec" in line for line in said.splitlines())


@needs_systemd
@pytest.mark.parametrize("unit", EXPOSURE)
def test_a_service_is_no_more_exposed_than_it_has_to_be(unit: str, tmp_path: Path) -> None:
    assert ANALYZE is not None
    shown = subprocess.run(
        [
            ANALYZE,
            "security",
            "--offline=true",
            "--no-pager",
            f"--threshold={EXPOSURE[unit]}",
            placed(tmp_path) / unit,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout[-300:] + shown.stderr


def test_the_sandbox_does_not_hide_gpus_and_lets_their_libraries_write_code() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", units.shipped("gangq-worker@.service"), re.M))
    assert "PrivateDevices" not in settings
    assert "MemoryDenyWriteExecute" not in settings
    assert settings["DevicePolicy"] == "closed"
    for allowed in ("char-nvidia* rw", "/dev/kfd rw", "char-drm rw"):
        assert f"DeviceAllow={allowed}" in units.shipped("gangq-worker@.service")
    for kept in ("ProtectSystem=strict", "NoNewPrivileges=yes", "CapabilityBoundingSet=", "PrivateTmp=yes"):
        assert f"\n{kept}\n" in units.shipped("gangq-worker@.service")
    why = "report-death has the worker's user, from whom it would hide the worker"
    assert "\nProtectProc=" not in units.shipped("gangq-worker@.service"), why
    # systemd-analyze does not see it: below one directory, the second instance could not start.
    assert "/" not in settings["StateDirectory"]


@pytest.mark.parametrize("unit", EXPOSURE)
def test_each_service_has_a_place_for_temporary_files_of_its_own(unit: str) -> None:
    text = units.shipped(unit)
    assert "\nProtectSystem=strict\n" in text
    own = re.search(r"^RuntimeDirectory=(.+)\nEnvironment=TMPDIR=%t/\1$", text, re.M)
    assert own or "\nPrivateTmp=yes\n" in text


def test_the_bouncer_which_is_root_imports_nothing_from_where_the_modules_of_jobs_are() -> None:
    assert "\nPYTHONPATH=" in units.shipped("worker.env.example")
    text = units.shipped("gangq-bounce.service")
    assert "\nEnvironmentFile=%E/gangq/worker.env\n" in text
    assert "\nUser=" not in text
    assert "\nUnsetEnvironment=PYTHONPATH\n" in text


def test_a_worker_may_make_control_groups_below_its_own_in_either_kind_of_unit(tmp_path: Path) -> None:
    for text in (
        units.shipped("gangq-worker@.service"),
        (placed(tmp_path, "--user") / "gangq-worker@.service").read_text(),
    ):
        assert "\nDelegate=yes\n" in text
        # That would mount them read-only.
        assert "ProtectControlGroups" not in text


def test_the_service_managers_watchdog_leaves_the_supervisor_the_time_to_act_first() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", units.shipped("gangq-worker@.service"), re.M))
    assert int(settings["WatchdogSec"]) >= SILENCE_S + 10
    assert (settings["Type"], settings["NotifyAccess"], settings["KillMode"]) == ("notify", "main", "mixed")
    assert settings["StartLimitIntervalSec"] == "1h"


def test_installed_units_start_the_gangq_that_installed_them(tmp_path: Path) -> None:
    text = (placed(tmp_path) / "gangq-worker@.service").read_text()
    assert "/usr/bin/env gangq" not in text
    (start,) = re.findall(r"^ExecStart=(\S+) worker", text, re.M)
    assert Path(start).parent == Path(sys.executable).parent


def test_a_path_with_blanks_and_percent_signs_is_quoted() -> None:
    text = units.as_installed("gangq-tick.service", user=False, argv=["/opt/my 100%/gangq"])
    assert 'ExecStart="/opt/my 100%%/gangq" tick --loop' in text


def test_an_interpreter_without_the_script_is_called_with_the_module(tmp_path: Path) -> None:
    assert units.program(str(tmp_path / "python3")) == (str(tmp_path / "python3"), "-m", "gangq")


def test_a_users_units_ask_for_nothing_that_only_the_system_manager_can_do(tmp_path: Path) -> None:
    text = (placed(tmp_path, "--user") / "gangq-worker@.service").read_text()
    for word in ("User=", "DynamicUser", "DevicePolicy", "Protect", "After=", "Wants=", "multi-user"):
        assert word not in text
    assert "WantedBy=default.target" in text
    assert "RestartPreventExitStatus=87 88" in text


def test_installing_again_changes_what_is_old_and_keeps_what_somebody_filled_in(tmp_path: Path) -> None:
    home = {"XDG_CONFIG_HOME": str(tmp_path), "PATH": "/nonexistent"}
    first = gangq("install", "--user", "--json", **home)
    assert '"action": "written"' in first
    environment = tmp_path / "gangq" / "worker.env"
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    address = tmp_path / "gangq" / "dsn"
    assert stat.S_IMODE(address.stat().st_mode) == 0o600
    assert [line for line in address.read_text().splitlines() if not line.startswith("#")] == []
    environment.write_text("GANGQ_DSN=mine\n")
    address.write_text("mine\n")
    unit = tmp_path / "systemd" / "user" / "gangq-tick.service"
    whole = unit.read_text()
    unit.write_text("old")
    assert f"would be updated  {unit}" in gangq("install", "--user", "--dry-run", **home)
    assert unit.read_text() == "old"
    said = gangq("install", "--user", **home)
    assert f"updated  {unit}" in said
    assert f"kept  {environment}" in said
    assert said.count("unchanged") == len(units.UNITS) - 1
    assert unit.read_text() == whole
    assert environment.read_text() == "GANGQ_DSN=mine\n"
    assert address.read_text() == "mine\n"


def test_units_can_be_read_by_all_and_settings_by_their_owner_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0o077, 0o000):
        before = os.umask(umask)
        try:
            place = placed(tmp_path / f"{umask:o}")
        finally:
            os.umask(before)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in place.iterdir() if path.is_file()}
        assert {modes[units.ENVIRONMENT], modes[units.ADDRESS]} == {0o600}
        assert {modes[unit] for unit in units.UNITS} == {0o644}


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    assert "would be written" in gangq("install", "--dir", tmp_path / "new", "--dry-run")
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(main, ["systemd", "install", "--dir", str(tmp_path / "file" / "below")])
    assert result.exit_code == 1
    assert str(tmp_path / "file" / "below") in result.stderr
    assert "--dir" in result.stderr


def test_showing_prints_what_would_be_installed(tmp_path: Path) -> None:
    assert (
        gangq("show", "gangq-tick.service").strip()
        == (placed(tmp_path) / "gangq-tick.service").read_text().strip()
    )
    everything = gangq("show")
    for name in units.SHIPPED:
        assert f"# ---- {name}" in everything
    with pytest.raises(NotFound, match="ships no"):
        units.shipped("../pyproject.toml")


@pytest.mark.parametrize("place", [place for place, _ in units.CLOSED])
def test_a_gangq_that_the_units_user_cannot_reach_is_pointed_out(place: str) -> None:
    assert "/opt/gangq" in (units.out_of_reach([f"{place}/venv/bin/gangq"]) or "")
    assert units.out_of_reach(["/opt/gangq/bin/gangq"]) is None
