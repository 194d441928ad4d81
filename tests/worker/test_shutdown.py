"""The end of the process is the worker's word, not that of the threads its handlers left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gangq.client import Client
from worker.worker_process import until_state

PRELUDE = """
import atexit, logging, os, sys, threading, time
from gangq.worker.shutdown import end_soon
logging.basicConfig(format="%(name)s %(message)s %(threads)s")
atexit.register(print, "at exit")
def start(work):
    threading.Thread(target=work, name="stray").start()
"""


def run(code: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run it after the prelude to its end; its standard output is a pipe, and so is buffered."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"},
        timeout=20,
        check=False,
    )


def test_a_thread_that_never_ends_goes_with_the_process_and_is_named() -> None:
    done = run("start(lambda: time.sleep(10**6)); print('printed'); end_soon(7, 0.1); sys.exit(7)")
    assert (done.returncode, done.stdout) == (7, "printed\n")
    assert done.stderr.startswith("gangq.worker.shutdown threads_left ['stray']")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_that_never_ends_goes_with_the_process_and_is_named(method: str) -> None:
    # Each holds the pipe: what is left of them keeps run() from its end.
    done = run(
        f"""
        import multiprocessing
        begin = multiprocessing.get_context("{method}").Process
        ended = begin(target=int)
        ended.start()
        ended.join()
        begin(target=time.sleep, args=(30,), name="stray").start()
        begin(target=time.sleep, args=(30,), daemon=True).start()
        end_soon(7, 0.1)
        sys.exit(7)
        """
    )
    assert done.returncode == 7
    assert done.stderr.startswith("gangq.worker.shutdown threads_left ['stray']")


def test_what_a_handler_has_closed_does_not_change_the_code() -> None:
    done = run("print('into a closed stream', end=''); os.close(1); end_soon(7); sys.exit(7)")
    assert (done.returncode, done.stderr) == (7, "")


def test_threads_that_end_in_time_end_the_usual_way() -> None:
    done = run(
        """
        from concurrent.futures import ThreadPoolExecutor
        idle = ThreadPoolExecutor(2)
        idle.submit(int).result()
        start(lambda: time.sleep(0.2))
        atexit.register(time.sleep, 1)  # It may take longer than the threads may.
        end_soon(7, 0.6)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "at exit\n", "")


def test_a_thread_that_holds_what_is_to_be_flushed_keeps_nothing() -> None:
    done = run(
        """
        held = threading.Event()
        class Held(logging.StreamHandler):
            def flush(self):
                with self.lock:
                    held.set()
                    time.sleep(10**6)
        handler = Held()
        logging.getLogger().addHandler(handler)
        start(handler.flush)
        held.wait()
        end_soon(7, 0.1)
        """
    )
    assert done.returncode == 7


def test_standard_output_that_nobody_reads_keeps_nothing() -> None:
    reads, writes = os.pipe()
    code = """
        threading.Thread(target=lambda: print("x" * 10**6), daemon=True).start()
        time.sleep(0.2)
        end_soon(7, 0.1)
        """
    try:
        assert run(code, stdout=writes).returncode == 7
    finally:
        os.close(reads)
        os.close(writes)


def test_what_was_printed_is_written_where_no_thread_can_be_started() -> None:
    done = run("""
        def full(self):
            raise RuntimeError("can't start new thread")

        threading.Thread.start = full
        print("last")
        end_soon(7)
        sys.exit(7)
        """)
    assert (done.returncode, done.stdout) == (7, "last\nat exit\n")


def test_a_thread_that_was_left_keeps_nothing_where_no_other_can_be_started() -> None:
    done = run("""
        def full(self):
            raise RuntimeError("can't start new thread")

        start(lambda: time.sleep(10**6))
        threading.Thread.start = full
        print("last")
        end_soon(7)
        sys.exit(7)
        """)
    assert (done.returncode, done.stdout) == (7, "last\n")


def test_the_command_ends_as_told_whatever_threads_its_handlers_have_left(
    client: Client, dsn: str, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(
        "import threading, time\nfrom gangq.app import App\napp = App()\n"
        "@app.task\n"
        "def leaves(ctx):\n"
        "    threading.Thread(target=time.sleep, args=(10**6,), name='stray').start()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gangq", "worker", "tasks:app", "--devices", "none"],
        cwd=tmp_path,
        env={**os.environ, "GANGQ_DSN": dsn},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until_state(client, client.submit(task="leaves")[0], "done")
        process.terminate()
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0
    assert re.search(r'threads_left .*threads=\["stray"\]', said)
