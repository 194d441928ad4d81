"""What a supervisor tells systemd, if that started it; see sd_notify(3)."""

from __future__ import annotations

# Not socket, which imports enum: a tenth of all the memory there is for the supervisor.
import _socket
import os


class Notifier:
    """Sends states to the service manager, if there is one."""

    def __init__(self, environ: dict[str, str]) -> None:
        """Removes the variables for the main process of a unit from ``environ``: the worker must not use them."""
        self._socket: _socket.socket | None = None
        address = environ.pop("NOTIFY_SOCKET", "")
        usec = environ.pop("WATCHDOG_USEC", "")
        pid = environ.pop("WATCHDOG_PID", "")
        self.watchdog_s: float | None = None
        """The service manager wants a sign of life this often; None: it wants none."""
        if usec.isdigit() and int(usec) > 0 and pid in ("", str(os.getpid())):
            self.watchdog_s = int(usec) / 1e6
        self._beat_at = 0.0
        self._status = ""
        if address:
            self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            self._address = "\0" + address[1:] if address[0] == "@" else address

    def say(self, *lines: str) -> None:
        """Send these assignments. If that fails the worker goes on."""
        if self._socket is not None:
            try:
                self._socket.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return

    def relay(self, now: float) -> None:
        """The worker gave a sign of life: pass it on, as often as is asked for."""
        if self.watchdog_s is not None and now - self._beat_at >= self.watchdog_s / 4:
            self._beat_at = now
            self.say("WATCHDOG=1")

    def status(self, text: str) -> None:
        """What people see in ``systemctl status``."""
        if text != self._status:
            self._status = text
            self.say(f"STATUS={text}")
