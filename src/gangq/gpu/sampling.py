"""Reads devices in a process that its owner can afford to lose.

    python -m gangq.gpu.sampling nvml|amdsmi PARENT_PID POLL_S CALL_FD

A call into a wedged driver never returns, and no Python exception can end it; `gangq.gpu.SamplerProcess` kills
this process instead. Before every driver call it notes which it is, for which device, and in which step (open, count,
read, wait), so that one that does not return names its device (`gangq.gpu.current_call`). It writes JSON, a line
each:

    {"reading": {...}}   {"notice": [UUID or null, kind, code]}   {"count": cards}
    {"no_events": UUID, "why": why the driver delivers no events for it, null once it does}
    {"round": rounds so far}
    {"failed": why}                                                   and then it ends

and reads lines {"watch": [UUID...], "pids": [...]}, of which the last one counts; it begins with the first one,
and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import Any

from gangq.errors import DriverUnavailable
from gangq.gpu.current_call import CurrentCall
from gangq.gpu.nvml_readings import NvmlReader
from gangq.gpu.reader import Notice, Reader
from gangq.gpu.reading import VALUES
from gangq.gpu.rocm_readings import AmdsmiReader
from gangq.proc import kernel

_BLIND_ROUNDS = 10
"""Rounds without a single value after which this process makes room for a fresh one."""
_COUNT_EVERY = 5
"""Rounds between looks at how many devices the driver lists; a watched one that is gone is noticed at once."""
_AFTER_EVENT_S = 0.2
"""Shortest time between rounds when events ask for more of them."""


class Orders:
    """What the owner last said to watch."""

    def __init__(self, fd: int) -> None:
        self.given = False
        self.watch: list[str] = []
        self.pids: frozenset[int] = frozenset()
        self._fd = fd
        self._rest = b""

    def take(self, timeout_s: float) -> bool:
        """Take what has come in, waiting at most `timeout_s` for something; False when the owner is gone."""
        while select.select([self._fd], [], [], timeout_s)[0]:
            timeout_s = 0
            data = os.read(self._fd, 1 << 16)
            if not data:
                return False
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                self.watch, self.pids = order["watch"], frozenset(order["pids"])
                self.given = True
        return True


class LineWriter:
    """Writes lines of JSON. They are buffered until the next driver call begins."""

    def __init__(self, fd: int, call: CurrentCall) -> None:
        self._fd = fd
        self._call = call
        self._lines: list[str] = []

    def say(self, **line: Any) -> None:
        """Keep a line to be sent with the next `flush`."""
        self._lines.append(json.dumps(line, separators=(",", ":")))

    def enter(self, step: str, uuid: str | None = None) -> None:
        """Send everything, and note what the driver is now called for."""
        self.flush()
        self._call.enter(step, uuid)

    def flush(self) -> None:
        """Send what was kept."""
        data = "".join(f"{line}\n" for line in self._lines).encode()
        self._lines = []
        while data:
            data = data[os.write(self._fd, data) :]


def sample(reader: Reader, orders: Orders, writer: LineWriter, poll_s: float) -> Iterator[None]:
    """Read the watched devices for ever, a round every `poll_s`, and deliver events as they come.

    Yields after every round. Ends when the owner is gone, or with a `RuntimeError` after rounds in which not one
    device gave a single value: a driver that was reloaded needs a process that opens it anew.
    """
    rounds = blind = 0
    subscribed: dict[str, str | None] = {}
    while orders.take(0):
        due = time.monotonic() + poll_s
        if rounds % _COUNT_EVERY == 0:
            writer.enter("count")
            count = reader.count()
            if count is not None:
                writer.say(count=count)
        known = not orders.watch
        for uuid in orders.watch:
            writer.enter("read", uuid)
            # A refusal may have been a busy driver's, and a device that was read anew has to be subscribed again.
            if subscribed.get(uuid) is None or rounds % _COUNT_EVERY == 0:
                refused = reader.subscribe(uuid)
                if refused != subscribed.get(uuid):
                    writer.say(no_events=uuid, why=refused)
                subscribed[uuid] = refused
            reading, notices = reader.read(uuid, orders.pids)
            writer.say(reading=reading.as_json())
            _tell(writer, notices)
            known = known or len(reading.unknown) < len(VALUES)
        blind = 0 if known else blind + 1
        rounds += 1
        writer.say(round=rounds)
        if blind >= _BLIND_ROUNDS:
            writer.flush()
            raise RuntimeError("no device gave a single value, round after round")
        yield
        soonest = time.monotonic() + _AFTER_EVENT_S
        while (left := due - time.monotonic()) > 0:
            writer.enter("wait")
            notices = reader.wait(left)
            if notices:
                _tell(writer, notices)
                writer.flush()
                # What the event did to the device is worth a look now.
                due = min(due, max(soonest, time.monotonic()))


def _tell(writer: LineWriter, notices: list[Notice]) -> None:
    for notice in notices:
        writer.say(notice=[notice.uuid, notice.kind, notice.code])


def main(argv: list[str]) -> int:
    """Sample the driver named first in `argv` until the owner, the process named second, is gone."""
    source, parent, poll_s, call = argv[0], int(argv[1]), float(argv[2]), CurrentCall(int(argv[3]))
    # Inside a driver call no end of file is noticed: the kernel ends this process with the thread it is for.
    kernel.die_with_parent()
    if os.getppid() != parent:
        return 0
    # Driver libraries and bindings print where they like; the lines get a descriptor of their own.
    writer = LineWriter(os.dup(1), call)
    os.dup2(2, 1)
    orders = Orders(0)
    while not orders.given:
        if not orders.take(3600):
            return 0
    reader: Reader
    if source == "nvml":
        reader = NvmlReader(os.environ, poll_s=poll_s, begin=call.begin)
    else:
        reader = AmdsmiReader(os.environ, begin=call.begin)
    writer.enter("open")
    try:
        reader.open()
        for _ in sample(reader, orders, writer, poll_s):
            pass
    except (DriverUnavailable, RuntimeError) as error:
        writer.say(failed=" ".join(str(error).split()))
        writer.flush()
        return 1
    except BrokenPipeError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
