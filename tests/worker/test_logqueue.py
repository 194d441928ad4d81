"""The queue of log lines: what is written, when, and by which handlers."""

from __future__ import annotations

import gc
import json
import logging
import logging.config
import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """A logger without one above it."""
    logger = logging.getLogger("gangq.test.logqueue")
    above, logger.parent = logger.parent, None
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.handlers.clear()
    logger.parent = above
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def stuck(log: logging.Logger) -> Iterator[Stuck]:
    handler = Stuck()
    log.addHandler(handler)
    yield handler
    handler.go.set()


@contextmanager
def queued(logger: logging.Logger, lines_kept: int = 1000) -> Iterator[LogQueue]:
    queue = LogQueue(lines_kept)
    queue.attach(logger.name)
    try:
        yield queue
    finally:
        queue.detach()
        queue.close()


def test_lines_that_do_not_get_through_are_dropped_and_counted(log: logging.Logger, stuck: Stuck) -> None:
    with queued(log, lines_kept=3) as queue:
        threads = threading.active_count()
        log.warning("line 0")
        assert stuck.begun.wait(5)
        for number in range(1, 20):
            log.warning("line %d", number, extra={"reason": "why"})
        assert stuck.lines == [], "no line has waited for the first to be written"
        assert threading.active_count() == threads
        stuck.go.set()
        assert queue.flush(5)
        log.warning("last")
        log.warning("one more")
    assert stuck.lines == ["line 0", "line 1", "line 2", "line 3", "last", "one more"]
    assert [vars(record).get("lines_lost") for record in stuck.records] == [None] * 4 + [16, None]
    assert stuck.records[1].reason == "why"  # type: ignore[attr-defined]


def test_a_line_that_is_stuck_costs_the_end_of_a_process_a_moment_and_no_more(
    log: logging.Logger, stuck: Stuck
) -> None:
    with queued(log) as queue:
        log.critical("leaving")
        assert stuck.begun.wait(5)
        assert not queue.flush(0.1)
        assert stuck.lines == [], "it did not wait until the line was written"
        stuck.go.set()
        assert queue.flush(5)
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

    with queued(log) as queue:
        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(5)
        logged = threading.Thread(target=log.warning, args=["line"], daemon=True)
        logged.start()
        logged.join(5)
        assert not logged.is_alive()
        go.set()
        holder.join()
        assert queue.flush(5)
    assert heard.lines == ["line"]


def test_a_handler_that_fails_does_not_silence_what_follows(log: logging.Logger) -> None:
    class Broken(Heard):
        def emit(self, record: logging.LogRecord) -> None:
            super().emit(record)
            raise OSError("no space left")

    handler = Broken()
    log.addHandler(handler)
    with queued(log) as queue:
        for number in range(3):
            log.warning("line %d", number)
            assert queue.flush(5)
    assert handler.lines == ["line 0", "line 1", "line 2"]
    assert [vars(record).get("lines_lost") for record in handler.records] == [None, 1, 2]


def test_a_line_without_a_text_is_lost_and_says_nothing_to_standard_error(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = Heard()
    log.addHandler(heard)
    with queued(log):
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
    with queued(log) as queue:
        log.debug("%s", Text())
        assert queue.lost == 0
    assert heard.records == []


def test_a_line_is_as_it_was_when_it_was_logged(log: logging.Logger, stuck: Stuck) -> None:
    pids = [1]
    with queued(log) as queue:
        log.warning("first")
        log.warning("left %s", pids)
        pids.append(2)
        stuck.go.set()
        assert queue.flush(5)
    assert stuck.lines == ["first", "left [1]"]


def test_a_traceback_is_kept_as_text_and_keeps_nothing_alive(log: logging.Logger, stuck: Stuck) -> None:
    class Tensor:
        pass

    gone: list[weakref.ref[Tensor]] = []

    def fails() -> None:
        tensor = Tensor()
        gone.append(weakref.ref(tensor))
        raise OSError("a sensor nobody foresaw")

    with queued(log) as queue:
        try:
            fails()
        except OSError:
            log.exception("watchdog_fault")
        gc.collect()
        assert gone[0]() is None
        stuck.go.set()
        assert queue.flush(5)
    (record,) = stuck.records
    assert record.exc_info is None
    said = logging.Formatter("%(levelname)s %(message)s").format(record)
    assert said.startswith("ERROR watchdog_fault\nTraceback (most recent call last):")
    assert said.endswith("OSError: a sensor nobody foresaw")
    assert LogFormat(as_json=False).format(record).endswith("OSError: a sensor nobody foresaw")
    assert "OSError: a sensor" in json.loads(LogFormat(as_json=True).format(record))["traceback"]


# -- an application's configuration of logging -----------------------------------------------------------------


@pytest.fixture
def family(log: logging.Logger) -> Iterator[tuple[logging.Logger, logging.Logger, logging.Logger]]:
    """A logger, the one above it and one below it."""
    above, below = log, logging.getLogger(f"{log.name}.a.b")
    middle = logging.getLogger(f"{log.name}.a")
    yield above, middle, below
    for logger in (middle, below):
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


def test_the_handlers_that_would_have_got_a_line_get_it_once(
    family: tuple[logging.Logger, logging.Logger, logging.Logger],
) -> None:
    above, middle, below = family
    all_of_it, errors, own = Heard(), Heard(logging.ERROR), Heard(logging.WARNING)
    above.addHandler(all_of_it)
    above.addHandler(errors)
    middle.addHandler(own)
    below.setLevel(logging.INFO)
    with queued(middle) as queue:
        below.debug("debug")
        below.info("info")
        middle.warning("warning")
        below.error("error")
        above.warning("above")
        assert queue.flush(5)
        later = Heard()
        above.addHandler(later)
        below.info("later")
        assert queue.flush(5)
        above.removeHandler(later)
        below.info("last")
    assert sorted(all_of_it.lines) == ["above", "error", "info", "last", "later", "warning"]
    assert (errors.lines, own.lines, later.lines) == (["error"], ["warning", "error"], ["later"])


def test_a_logger_that_hands_nothing_on_still_does_not(
    family: tuple[logging.Logger, logging.Logger, logging.Logger],
) -> None:
    above, middle, below = family
    heard, own = Heard(), Heard()
    above.addHandler(heard)
    middle.addHandler(own)
    middle.propagate = False
    with queued(middle):
        below.warning("line")
    assert (heard.lines, own.lines) == ([], ["line"])


def test_where_nobody_has_configured_anything_warnings_go_where_they_always_went(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(logging.WARNING)
    monkeypatch.setattr(logging, "lastResort", heard)
    with queued(log) as queue:
        log.warning("line")
        log.info("info")
        assert queue.flush(5)
    assert heard.lines == ["line"]


def test_a_logger_has_back_what_it_had(family: tuple[logging.Logger, logging.Logger, logging.Logger]) -> None:
    _, middle, _ = family
    own, added = Heard(), Heard()
    middle.addHandler(own)
    with queued(middle):
        middle.addHandler(added)
    assert (middle.handlers, middle.propagate) == ([own, added], True)


def test_a_configuration_that_came_meanwhile_is_kept(log: logging.Logger) -> None:
    log.addHandler(Heard())
    with queued(log):
        logging.config.dictConfig(
            {"version": 1, "disable_existing_loggers": False, "loggers": {log.name: {"level": "INFO"}}}
        )
    assert (log.level, log.handlers, log.propagate) == (logging.INFO, [], True)


def test_what_a_handler_logs_is_written_where_it_is_logged(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Where(Heard):
        def emit(self, record: logging.LogRecord) -> None:
            record.written_by = threading.current_thread().name
            super().emit(record)

    heard = Where()
    log.addHandler(heard)
    with queued(log) as queue:
        log.warning("between two jobs")
        assert queue.flush(5)
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
    logqueue.start("gangq.test.other")
    with logqueue.running(log.name):
        logqueue.start(log.name)
        assert [thread.name for thread in threading.enumerate()].count("gangq-log") == 1
        logqueue.stop()
        log.warning("line")
        assert log.handlers != [heard]
        assert logqueue.flush(5)
        assert heard.lines == ["line"]
    assert logqueue.in_use()
    logqueue.stop()
    assert log.handlers == [heard]
    assert not logqueue.in_use()
    assert "gangq-log" not in [thread.name for thread in threading.enumerate()]
    assert logqueue.flush(0), "there is nothing to wait for"


def test_a_fork_logs_by_itself(log: logging.Logger) -> None:
    reads, writes = os.pipe()
    log.addHandler(logging.StreamHandler(os.fdopen(writes, "w")))
    with logqueue.running(log.name):
        pid = os.fork()
        if pid == 0:
            log.warning("forked")
            os._exit(0 if logqueue.flush(0) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    log.handlers[0].stream.close()  # type: ignore[attr-defined]
    with os.fdopen(reads) as read:
        assert read.read() == "forked\n"


def test_without_a_thread_nothing_is_queued_and_nothing_has_changed(
    log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    log.addHandler(heard)
    no_threads(monkeypatch)
    with pytest.raises(RuntimeError):
        logqueue.start(log.name)
    assert not logqueue.in_use()
    with logqueue.running(log.name):
        log.warning("line")
        assert heard.lines == ["line"]


def test_a_worker_queues_what_its_threads_log() -> None:
    """All loggers of the library but those that only handlers and other programs use."""
    elsewhere = ("gangq.task", "gangq.handles", "gangq.host", "gangq.web", "gangq.examples")
    source = Path(logqueue.__file__).parent
    text = "".join(path.read_text() for path in source.rglob("*.py"))
    names = set(re.findall(r'getLogger\(f?"(gangq[\w.]*)', text))
    assert len(names) > 30
    left = [
        n for n in names if not any(f"{n}.".startswith(f"{one}.") for one in (*logqueue.WORKER, *elsewhere))
    ]
    assert left == []
