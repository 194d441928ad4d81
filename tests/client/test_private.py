"""Where the address of the database comes from, and what keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangq import private
from gangq.commands import command_payload
from gangq.errors import InvalidInput
from gangq.worker.environment import scrubbed
from gangq.worker.runner_command import Command

DSN = "postgresql://w:secret@db/jobs"


def test_the_variable_comes_before_the_descriptor_and_that_before_the_credential(tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text(f"# the workers' login\n\n{DSN}\n")
    assert private.given_dsn({}) is None
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert private.given_dsn(environ) == environ["GANGQ_DSN"] == DSN
    read, write = os.pipe()
    os.write(write, b"dbname=piped\n")
    os.close(write)
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path), "GANGQ_DSN_FD": str(read)}
    assert private.given_dsn(environ) == "dbname=piped"
    assert private.given_dsn(environ) == "dbname=piped", "it is read once and kept"
    assert private.given_dsn({**environ, "GANGQ_DSN": "dbname=said"}) == "dbname=said"


def test_a_descriptor_that_cannot_be_read_is_said() -> None:
    for named in ("nine", "999"):
        with pytest.raises(InvalidInput, match="GANGQ_DSN_FD"):
            private.given_dsn({"GANGQ_DSN_FD": named})
        environ = {"GANGQ_DSN": DSN, "GANGQ_DSN_FD": named}
        assert private.given_dsn(environ) == DSN, "the address is known without it"
        assert environ == {"GANGQ_DSN": DSN}


def test_standard_input_opened_for_the_address_is_emptied_although_the_variable_is_set() -> None:
    script = "import os; from gangq import private; print(private.given_dsn(), repr(os.read(0, 99)))"
    environ = {**os.environ, "GANGQ_DSN": DSN, "GANGQ_DSN_FD": "0"}
    said = subprocess.run(
        [sys.executable, "-c", script], input="dbname=piped\n", env=environ, capture_output=True, text=True
    )
    assert said.stdout.split() == [DSN, "b''"], said.stderr


def test_what_is_handed_over_is_read_once_by_who_has_it_and_opened_by_nobody() -> None:
    fd = private.hand_over({"GANGQ_DSN": DSN})
    try:
        with pytest.raises(OSError, match="No such device"):
            os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        assert DSN.encode() in os.read(fd, 4096)
        assert os.read(fd, 4096) == b""
    finally:
        os.close(fd)


@pytest.mark.parametrize("given", [{"GANGQ_DSN": DSN}, {"PGPASSWORD": "x"}, {"GANGQ_SUPERVISOR": "9"}, {}])
@pytest.mark.parametrize(
    "command", [[str(Path(sys.executable).with_name("gangq"))], [sys.executable, "-m", "gangq"]]
)
def test_the_command_line_is_closed_before_it_imports_what_takes_time(
    tmp_path: Path, command: list[str], given: dict[str, str]
) -> None:
    (tmp_path / "click.py").write_text(
        "import ctypes, sys\n"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), sys.modules.keys() & {'json', 'pathlib', 'typing'})\n"
        "raise SystemExit\n"
    )
    environ = {name: value for name, value in os.environ.items() if not private.is_secret(name)}
    ended = subprocess.run(
        [*command, "worker"],
        env={**environ, "PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}", **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == ("0 set()\n" if given else "1 set()\n")


def test_no_child_inherits_a_secret() -> None:
    secrets = {
        "GANGQ_DSN": DSN,
        "PGPASSWORD": "x",
        "CREDENTIALS_DIRECTORY": "/run/c",
        "GANGQ_DSN_FD": "0",
    }
    assert scrubbed({**secrets, "HOME": "/"}) == {"HOME": "/"}


def test_what_begins_with_gangq_is_not_for_submitters() -> None:
    with pytest.raises(InvalidInput, match="GANGQ_ROLE"):
        command_payload(["true"], env={"GANGQ_ROLE": "server"})
    payload = {"argv": ["true"], "env": {"GANGQ_ROLE": "server", "GANGQ_MARK": "x", "KEPT": "1"}}
    assert Command.of_payload(payload).env == {"KEPT": "1"}
