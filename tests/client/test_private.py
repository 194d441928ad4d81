"""Where the address of the database comes from, and what keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gangq import private
from gangq.app import command_payload
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


def test_what_is_handed_over_can_be_read_and_not_changed() -> None:
    fd = private.hand_over({"GANGQ_DSN": DSN})
    try:
        assert DSN.encode() in os.pread(fd, 4096, 0)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)


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
