"""gangq web as a program: where it listens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil


def test_it_listens_on_this_machine_only_and_ends_as_asked_at_ctrl_c(dsn: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "gangq", "web", "--port", str(port)]
    with subprocess.Popen(words, env={**os.environ, "GANGQ_DSN": dsn}, stderr=subprocess.DEVNULL) as web:
        try:
            began, found = time.monotonic(), list[tuple[str, int]]()
            while not found:
                assert web.poll() is None
                assert time.monotonic() < began + 30
                time.sleep(0.1)
                sockets = psutil.Process(web.pid).net_connections()
                found = [tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN]
            assert found == [("127.0.0.1", port)]
            assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 200
            web.send_signal(signal.SIGINT)
            assert web.wait(30) == 0
        finally:
            web.terminate()


def test_a_port_that_is_taken_is_said_before_any_address(dsn: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [sys.executable, "-m", "gangq", "web", "--port", str(port)]
        environ = {**os.environ, "GANGQ_DSN": dsn}
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    said = f"gangq: port {port} of 127.0.0.1: Address already in use; choose another with --port\n"
    assert (done.returncode, done.stderr) == (1, said)
