"""The socket of a worker: who is answered, and what a job in its own process learns of stops and checkpoints."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gangq.cli import main
from gangq.client import Client
from gangq.context import GangInfo
from gangq.errors import GangqError, InvalidInput, StaleToken, Stopped
from gangq.worker import handler_info
from gangq.worker.child_context import ChildContext, Link
from gangq.worker.context_impl import InlineContext
from gangq.worker.socket_server import SocketServer
from worker.parts import LossyClient, claimed, session_of, source_of
from worker.worker_process import eventually


def test_the_socket_answers_nobody_without_the_key_of_a_job(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    server = SocketServer(session, tmp_path / "s")
    session.control.wait(server.start())
    try:
        stranger = Link(str(server.path), "wrong")
        with pytest.raises(GangqError, match="no running job"):
            stranger.ask("status")
        stranger.close()
        link = Link(str(server.path), job.key)
        status = {"stopping": False, "reason": None, "job": job.id, "token": job.token, "epoch": None}
        assert link.ask("status") == status
        assert link.ask("gang") == {"gang": None}
        link.ask("beat", data={"step": 1})
        assert job.take_beat() == {"step": 1}
        with pytest.raises(InvalidInput, match="unknown request 'shutdown'"):
            link.ask("shutdown")
        with pytest.raises(InvalidInput, match="malformed"):
            link.ask("save_checkpoint", step="x", data="")
        link.ask("save_checkpoint", step=3, data="YWJj")
        assert link.ask("load_checkpoint") == {"step": 3, "data": "YWJj"}
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(server.path))
            raw.sendall(b"GET / HTTP/1.0\n")
            assert b"InvalidInput" in raw.recv(4096)
        link.close()
    finally:
        session.control.wait(server.stop())


def test_an_answer_that_a_handler_did_not_wait_for_is_not_taken_for_the_next(tmp_path: Path) -> None:
    class TookTooLong(Exception):
        pass

    def alarm(*_: object) -> None:
        raise TookTooLong

    def answer_second() -> None:
        second, _ = listening.accept()
        with second:
            second.sendall(b'{"ok": true, "to": "second"}\n')

    former = signal.signal(signal.SIGALRM, alarm)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        try:
            link = Link(str(tmp_path / "s"), "key")
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(TookTooLong):
                link.ask("save_checkpoint")
        finally:
            signal.signal(signal.SIGALRM, former)
        first, _ = listening.accept()
        with first:
            with contextlib.suppress(BrokenPipeError):
                first.sendall(b'{"ok": true, "to": "first"}\n')
            threading.Thread(target=answer_second, daemon=True).start()
            assert link.ask("status") == {"to": "second"}
        link.close()


def test_a_checkpoint_that_was_not_stored_is_an_error_inline_over_the_socket_and_as_exit_code(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(task="t")
    away = LossyClient(client, "save_checkpoint", times=10**6)
    session = session_of(away, tmp_path)
    job = claimed(session, source_of(session))
    job.lose("its lease was taken over")
    with pytest.raises(
        StaleToken, match=r"at step 5 is not known to be stored.*taken over.*Keep the older one"
    ):
        InlineContext(session, job).save_checkpoint(5, b"abc")
    server = SocketServer(session, tmp_path / "s")
    server.announce(job, None)
    session.control.wait(server.start())
    try:
        monkeypatch.setenv("GANGQ_SOCKET", str(server.path))
        monkeypatch.setenv("GANGQ_KEY", job.key)
        link = Link.from_environ()
        with pytest.raises(StaleToken, match="not known to be stored"):
            ChildContext(link).save_checkpoint(6, b"abc")
        link.close()
        saved = CliRunner().invoke(main, ["checkpoint", "save", "7", "-"], input="abc")
        assert (saved.exit_code, "not known to be stored" in saved.stderr) == (1, True)
        away.left = 0
        assert CliRunner().invoke(main, ["checkpoint", "save", "7", "-"], input="abc").exit_code == 0
    finally:
        session.control.wait(server.stop())


def test_a_child_told_to_stop_before_its_checkpoint_is_loaded_does_not_begin_anew(
    client: Client, tmp_path: Path
) -> None:
    client.submit(task="t")
    away = LossyClient(client, "load_checkpoint", times=10**6)
    session = session_of(away, tmp_path)
    job = claimed(session, source_of(session))
    gang = GangInfo(1, 1, 0, 2, 0, 0, 1, (), "h", 1)
    job.enter_gang(gang, None)
    server = SocketServer(session, tmp_path / "s")
    server.announce(job, None)
    session.control.wait(server.start())
    try:
        with Link(str(server.path), job.key) as link:
            context = ChildContext(link)
            assert context.checkpoint is None
            job.change_gang(replace(gang, epoch=2))
            job.tell_stop("preempt", 60)
            eventually(lambda: context.gang is not None and context.gang.epoch == 2, "it hears", 5)
            with pytest.raises(Stopped, match="told to stop while it loaded its checkpoint"):
                _ = context.checkpoint
    finally:
        session.control.wait(server.stop())


def test_a_checkpoint_that_no_answer_came_about_is_not_said_to_be_missing(
    client: Client, tmp_path: Path
) -> None:
    client.submit(task="t")
    session = session_of(LossyClient(client, "load_checkpoint", times=10**6), tmp_path)
    job = claimed(session, source_of(session))
    server = SocketServer(session, tmp_path / "s")
    session.control.wait(server.start())
    try:
        job.lose("its lease was taken over")
        with Link(str(server.path), job.key) as link, pytest.raises(StaleToken, match="is not known"):
            link.ask("load_checkpoint")
    finally:
        session.control.wait(server.stop())


def test_a_job_whose_claim_is_over_does_not_begin_anew(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    job.enter_gang(GangInfo(1, 2, 0, 2, 0, 0, 1, (), "h", 1), None)
    client.report_dead(worker=session.name, incarnation=session.incarnation, evidence={"by": "test"})
    with pytest.raises(Stopped, match="the claim of job 1 is over"):
        handler_info.fetch_checkpoint(session, job, tmp_path)
