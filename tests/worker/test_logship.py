"""What a job has printed reaches the database, also where an answer of the database was lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangq.client import Client
from gangq.worker import output
from gangq.worker.output import LogReader, LogShipper
from worker.parts import LossyClient, claimed, session_of, source_of


@pytest.mark.parametrize("times", [1, 4], ids=["one answer", "the first final tries too"])
def test_what_was_printed_after_an_answer_was_lost_is_stored_at_the_end(
    client: Client, tmp_path: Path, times: int
) -> None:
    client.submit(task="t")
    lossy = LossyClient(client, "append_log", times)
    session = session_of(lossy, tmp_path)
    job = claimed(session, source_of(session))
    log = tmp_path / "log"
    log.write_text("before ")
    shipper = LogShipper(session, job, LogReader(log).read_new)
    shipper.ship()
    after = "x" * (300 << 10) + " the end"
    log.write_text("before " + after)
    shipper.finish(None)
    assert "".join(row.chunk for row in client.logs(job_id=job.id)) == "before " + after
    assert lossy.left == 0


def test_an_outage_holds_the_end_of_a_job_up_for_a_while_only(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_FINAL_S", 0.0)
    client.submit(task="t")
    away = LossyClient(client, "append_log", 1000)
    session = session_of(away, tmp_path)
    job = claimed(session, source_of(session))
    log = tmp_path / "log"
    log.write_text("x" * (300 << 10))
    LogShipper(session, job, LogReader(log).read_new).finish(None)
    assert away.calls == 1
