"""The queue of log lines: what is written, when, and by which handlers."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gangq import context, logqueue
from gangq.cli.worker import LogFormat
from gangq.logqueue import LogQueue
from watchdogs.victims import no_threads


class Heard(logging.Handler):
    """Keeps what it is handed."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self.records]


class Stuck(Heard):
    """A handler that waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.go = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.begun.set()
        self.go.wait(30)
        super().emit(record)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The library's."""
    logger = logging.getLogger("gangq")
    before = logger.handlers, logger.propagate, logger.level
    # pytest adds handlers of its own where lines are not handed on.
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture
def stuck(log: logging.Logger) -> Iterator[Stuck]:
    handler = Stuck()
    log.addHandler(handler)
    yield handler
    handler.go.set()


@contextmanager
def queued(lines_kept: int = 1000) -> Iterator[LogQueue]:
    queue = LogQueue(lines_kept)
    with queue.running():
        yield queue


def test_lines_that_do_not_get_through_are_dropped_and_counted(log: logging.Logger, stuck: Stuck) -> None:
    with queued(lines_kept=3) as queue:
        threads = threading.active_count()
        log.warning("line 0")
        assert stuck.begun.wait(5)
        for number in range(1, 20):
            log.warning("line %d", number, extra={"reason": "why"})
        assert stuck.lines == [], "no line has waited for the first to be written"
        assert threading.active_count() == threads
        stuck.go.set()
        assert queue.wait_written(5)
        log.warning("last")
        log.warning("one more")
    assert stuck.lines == ["line 0", "line 1", "line 2", "line 3", "last", "one more"]
    assert [vars(record).get("lines_lost") for record in stuck.records] == [None] * 4 + [16, None]
    assert stuck.records[1].reason == "why"  # type: ignore[attr-defined]


def test_a_line_that_is_stuck_costs_the_end_of_a_process_a_moment_and_no_more(
    log: logging.Logger, stuck: Stuck
) -> None:
    with queued() as queue:
        log.critical("leaving")
        assert stuck.begun.wait(5)
        assert not queue.wait_written(0.1)
        assert stuck.lines == [], "it did not wait until the line was written"
        stuck.go.set()
        assert queue.wait_written(5)
    assert stuck.lines == ["leaving"]


def test_no_line_waits_for_the_lock_of_a_handler(log: logging.Logger) -> None:
    heard = Heard()
    log.addHandler(heard)
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        for handler in (*log.handlers, heard):
            handler.acquire()
        held.set()
        go.wait(30)
        for handler in (*log.handlers, heard):
            handler.release()

    with queued() as queue:
        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(5)
        logged = threading.Thread(target=log.warning, args=["line"], daemon=True)
        logged.start()
        logged.join(5)
        assert not logged.is_alive()
        go.set()
        holder.join()
        assert queue.wait_written(5)
    assert heard.lines == ["line"]


def test_a_handler_that_fails_does_not_silence_what_follows(log: logging.Logger) -> None:
    class Broken(Heard):
        def emit(self, record: logging.LogRecord) -> None:
            super().emit(record)
            raise OSError("no space left")

    handler = Broken()
    log.addHandler(handler)
    with queued() as queue:
        for number in range(3):
            log.warning("line %d", number)
            assert queue.wait_written(5)
    assert handler.lines == ["line 0", "line 1", "line 2"]
    assert [vars(record).get("lines_lost") for record in handler.records] == [None, 1, 2]


def test_a_line_without_a_text_is_lost_and_says_nothing_to_standard_error(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = Heard()
    log.addHandler(heard)
    with queued():
        log.warning("%d lines", "many")
        log.warning("next")
    assert (heard.lines, heard.records[0].lines_lost) == (["next"], 1)  # type: ignore[attr-defined]
    assert capsys.readouterr().err == ""


def test_what_nobody_listens_to_is_not_made_into_text(log: logging.Logger) -> None:
    class Text:
        def __str__(self) -> str:
            raise AssertionError("somebody has asked")

    log.setLevel(logging.INFO)
    heard = Heard()
    log.addHandler(heard)
    with queued() as queue:
        log.debug("%s", Text())
        assert queue.lost == 0
    assert heard.records == []


def test_a_line_is_as_it_was_when_it_was_logged(log: logging.Logger, stuck: Stuck) -> None:
    pids = [1]
    with queued() as queue:
        log.warning("first")
        log.warning("left %s", pids)
        pids.append(2)
        stuck.go.set()
        assert queue.wait_written(5)
    assert stuck.lines == ["first", "left [1]"]


def test_a_traceback_is_kept_as_text_and_keeps_nothing_alive(log: logging.Logger, stuck: Stuck) -> None:
    class Tensor:
        pass

    gone: list[weakref.ref[Tensor]] = []

    def fails() -> None:
        tensor = Tensor()
        gone.append(weakref.ref(tensor))
        raise OSError("a sensor nobody foresaw")

    with queued() as queue:
        try:
            fails()
        except OSError:
            log.exception("watchdog_fault")
        gc.collect()
        assert gone[0]() is None
        stuck.go.set()
        assert queue.wait_written(5)
    (record,) = stuck.records
    assert record.exc_info is None
    said = logging.Formatter("%(levelname)s %(message)s").format(record)
    assert said.startswith("ERROR watchdog_fault\nTraceback (most recent call last):")
    assert said.endswith("OSError: a sensor nobody foresaw")
    assert LogFormat(as_json=False).format(record).endswith("OSError: a sensor nobody foresaw")
    assert "OSError: a sensor" in json.loads(LogFormat(as_json=True).format(record))["traceback"]


# -- an application's configuration of logging -----------------------------------------------------------------


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, to which `log` hands its lines on."""
    top = logging.getLogger()
    yield top
    for handler in [handler for handler in top.handlers if isinstance(handler, Heard)]:
        top.removeHandler(handler)


def test_the_handlers_that_would_have_got_a_line_get_it_once(
    log: logging.Logger, root: logging.Logger
) -> None:
    below = logging.getLogger("gangq.test.logqueue")
    all_of_it, errors, own = Heard(), Heard(logging.ERROR), Heard(logging.WARNING)
    root.addHandler(all_of_it)
    root.addHandler(errors)
    log.addHandler(own)
    log.setLevel(logging.INFO)
    with queued() as queue:
        below.debug("debug")
        below.info("info")
        log.warning("warning")
        logging.getLogger("asyncio").error("error")
        root.warning("above")
        assert queue.wait_written(5)
        later = Heard()
        root.addHandler(later)
        below.info("later")
        assert queue.wait_written(5)
        root.removeHandler(later)
        below.info("last")
    assert sorted(all_of_it.lines) == ["above", "error", "info", "last", "later", "warning"]
    assert (errors.lines, own.lines, later.lines) == (["error"], ["warning"], ["later"])


def test_a_logger_that_hands_nothing_on_still_does_not(log: logging.Logger, root: logging.Logger) -> None:
    heard, own = Heard(), Heard()
    root.addHandler(heard)
    log.addHandler(own)
    log.propagate = False
    with queued():
        logging.getLogger("gangq.test.logqueue").warning("line")
    assert (heard.lines, own.lines) == ([], ["line"])


def test_where_nobody_has_configured_anything_warnings_go_where_they_always_went(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(logging.WARNING)
    monkeypatch.setattr(logging, "lastResort", heard)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with queued() as queue:
        log.warning("line")
        log.info("info")
        assert queue.wait_written(5)
    assert heard.lines == ["line"]


def test_a_logger_has_back_what_it_had(log: logging.Logger) -> None:
    own, added = Heard(), Heard()
    log.addHandler(own)
    with queued():
        assert own not in log.handlers
        log.addHandler(added)
    assert (log.handlers, log.propagate) == ([own, added], True)


def test_a_configuration_that_came_meanwhile_is_kept(log: logging.Logger) -> None:
    log.addHandler(Heard())
    log.propagate = False
    new = Heard()
    with queued():
        log.handlers, log.propagate = [new], True  # As logging.config does.
    assert (log.handlers, log.propagate) == ([new], True)


def test_what_a_handler_logs_is_written_where_it_is_logged(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Where(Heard):
        def emit(self, record: logging.LogRecord) -> None:
            record.written_by = threading.current_thread().name
            super().emit(record)

    heard = Where()
    log.addHandler(heard)
    with queued() as queue:
        log.warning("between two jobs")
        assert queue.wait_written(5)
        monkeypatch.setattr(context, "_of_process", object())
        log.warning("in the handler")
        lease = threading.Thread(target=log.warning, args=["lease"], name="gangq-lease")
        lease.start()
        lease.join()
    assert [(r.getMessage(), r.written_by) for r in heard.records] == [  # type: ignore[attr-defined]
        ("between two jobs", "gangq-log"),
        ("in the handler", threading.current_thread().name),
        ("lease", "gangq-log"),
    ]


# -- the queue of a process ------------------------------------------------------------------------------------


def test_a_process_has_one_queue_until_the_last_of_its_users_has_ended(log: logging.Logger) -> None:
    heard = Heard()
    log.addHandler(heard)
    logqueue.start()
    with logqueue.running():
        logqueue.start()
        assert [thread.name for thread in threading.enumerate()].count("gangq-log") == 1
        logqueue.stop()
        log.warning("line")
        assert log.handlers != [heard]
        assert logqueue.wait_written(5)
        assert heard.lines == ["line"]
    assert log.handlers != [heard]
    logqueue.stop()
    assert log.handlers == [heard]
    assert "gangq-log" not in [thread.name for thread in threading.enumerate()]
    assert logqueue.wait_written(0), "there is nothing to wait for"


def test_one_that_begins_while_the_last_is_stuck_writes_its_own_lines(
    log: logging.Logger, stuck: Stuck
) -> None:
    with logqueue.running():
        log.warning("stuck")
        assert stuck.begun.wait(5)
        log.warning("behind it")
    log.removeHandler(stuck)
    heard = Heard()
    log.addHandler(heard)
    with logqueue.running():
        log.warning("line")
        assert logqueue.wait_written(5)
    assert heard.lines == ["line"]


def test_a_fork_logs_by_itself(log: logging.Logger) -> None:
    reads, writes = os.pipe()
    written = os.fdopen(writes, "w")
    log.addHandler(logging.StreamHandler(written))
    with logqueue.running():
        pid = os.fork()
        if pid == 0:
            log.warning("forked")
            logqueue.stop()  # As it unwinds: this is its parent's.
            with logqueue.running():
                log.warning("queued")
            os._exit(0 if logqueue.wait_written(0) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    written.close()
    with os.fdopen(reads) as read:
        assert read.read() == "forked\nqueued\n"


def test_without_a_thread_nothing_is_queued_and_nothing_has_changed(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    log.addHandler(heard)
    no_threads(monkeypatch)
    with pytest.raises(RuntimeError):
        logqueue.start()
    assert log.handlers == [heard]
    with logqueue.running():
        log.warning("line")
        assert heard.lines == ["line"]
