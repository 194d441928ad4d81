"""What a worker and its supervisor share: a socket, and one piece of memory that outlives the worker.

The supervisor (:mod:`gangq.proc.supervisor`) makes both and names the socket to the worker in ``GANGQ_SUPERVISOR``.
Its first message holds the secrets, which the worker must not have in its environment, and the descriptor of the
memory. The worker takes both once it is closed to other processes of its user (:mod:`gangq.private`): before, any of
them could open the memory through ``/proc`` and keep it. Over the socket come single bytes that wake the supervisor
(:data:`REGISTERED`, :data:`LEAVING`). In the memory stands when a thread of the worker last ran
(:attr:`Memory.signed_at`), and what the supervisor has to know once the worker cannot be asked any more: which job
it was in, as which incarnation, where its database is, which of its processes are guardians.

A sign of life is a store into this memory and no system call: a thread that has the GIL for a moment must not
have to give it up, and win it again, to say so.

It is a file without a name (``memfd``), because the address of the database may hold a password. Every field
has one writer. A job and its token are read after their writer is dead; a pair torn by its death fits no
claim, and the database refuses it.

The supervisor runs without gangq on its path: nothing here imports gangq.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

VARIABLE = "GANGQ_SUPERVISOR"
"""Environment variable with ``<socket>``, and ``<socket>:<memory>`` once the worker has both; only the worker that
the supervisor started has it.
"""
SECRETS_MAX = 1 << 18

REGISTERED = b"r"
"""It has become an incarnation: the record is there."""
LEAVING = b"q"
"""It has stopped serving; what follows is the end of the process, which takes the time it takes."""

SIZE = 16384
"""Bytes of the memory. What is behind them is written by ``faulthandler``: the stacks."""
STACKS_MAX = 256 << 10

_MAGIC = struct.Struct("8s")
_TERMS = struct.Struct("dd")
_SIGNAL = struct.Struct("q")
_JOB = struct.Struct("qq")
_LENGTH = struct.Struct("q")
_SIGNED = struct.Struct("d")
_KNOWN = b"gangq  1"
_TERMS_AT = 8
_SIGNAL_AT = 24
_JOB_AT = 32
_INCARNATION_AT = 48
_LENGTH_AT = 56
_SIGNED_AT = 64
_THREAD_AT = 72
_RECORD_AT = 128
_KNOWN_AT = 12288
_SPARED_AT = SIZE - _JOB.size
GUARDIANS = (_SPARED_AT - _KNOWN_AT) // _JOB.size
"""How many guardians the memory can name; what guards one more is ended with everything else."""


class Memory:
    """The memory, as either side sees it."""

    def __init__(self, fd: int) -> None:
        """Map what :meth:`create` made.

        Raises:
            ValueError, OSError: this descriptor is none of ours.
        """
        self.fd = fd
        self._map = mmap.mmap(fd, SIZE)
        if self._map[: _MAGIC.size] != _KNOWN:
            raise ValueError(f"descriptor {fd} is not the memory of a gangq supervisor")

    @classmethod
    def create(cls, *, interval_s: float, silence_s: float) -> Memory:
        """For the supervisor: new memory. A sign of life is due every ``interval_s``, and ``silence_s`` without one
        are the end.
        """
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("gangq")
        else:  # A Python built for an old C library.
            fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
        os.ftruncate(fd, SIZE)
        os.pwrite(fd, _KNOWN + _TERMS.pack(interval_s, silence_s), 0)
        # faulthandler writes where the descriptor stands, and the worker's is a copy of this one.
        os.lseek(fd, SIZE, os.SEEK_SET)
        return cls(fd)

    @property
    def terms(self) -> tuple[float, float]:
        """Seconds between signs of life, and seconds of silence that end the worker."""
        interval_s, silence_s = _TERMS.unpack_from(self._map, _TERMS_AT)
        return float(interval_s), float(silence_s)

    @property
    def dump_signal(self) -> int:
        """The signal on which the worker's stacks are written; 0 while it would only kill."""
        return int(_SIGNAL.unpack_from(self._map, _SIGNAL_AT)[0])

    @dump_signal.setter
    def dump_signal(self, number: int) -> None:
        _SIGNAL.pack_into(self._map, _SIGNAL_AT, number)

    @property
    def dump_thread(self) -> int:
        """The thread to send that signal to; 0: not known. One of the library's, so that no system call of the
        handler is interrupted by it.
        """
        return int(_SIGNAL.unpack_from(self._map, _THREAD_AT)[0])

    @dump_thread.setter
    def dump_thread(self, tid: int) -> None:
        _SIGNAL.pack_into(self._map, _THREAD_AT, tid)

    @property
    def signed_at(self) -> float:
        """When a thread of the worker last said that it runs, seconds of the monotonic clock; 0: never."""
        return float(_SIGNED.unpack_from(self._map, _SIGNED_AT)[0])

    def sign(self) -> None:
        """A thread of the worker runs. For any thread, as often as it likes: a third of a microsecond."""
        _SIGNED.pack_into(self._map, _SIGNED_AT, time.monotonic())

    @property
    def job(self) -> tuple[int, int]:
        """Id and token of the job whose handler runs in the worker's own process; (0, 0): none."""
        job_id, token = _JOB.unpack_from(self._map, _JOB_AT)
        return int(job_id), int(token)

    def set_job(self, job_id: int, token: int) -> None:
        """The worker begins this job, or with (0, 0) is in none. A third of a microsecond."""
        _JOB.pack_into(self._map, _JOB_AT, job_id, token)

    @property
    def incarnation(self) -> int:
        """The worker's incarnation; 0: none that would have to be reported."""
        return int(_SIGNAL.unpack_from(self._map, _INCARNATION_AT)[0])

    @property
    def record(self) -> bytes:
        """What the worker said of its incarnation, as JSON; empty before."""
        length = int(_LENGTH.unpack_from(self._map, _LENGTH_AT)[0])
        return self._map[_RECORD_AT : _RECORD_AT + length]

    def register(self, incarnation: int, record: bytes) -> None:
        """The worker has become this incarnation.

        Raises:
            ValueError: a record that has no room here.
        """
        if len(record) > _KNOWN_AT - _RECORD_AT:
            raise ValueError(f"a record of {len(record)} bytes has no room in {_KNOWN_AT - _RECORD_AT}")
        # The number last: a reader that sees it also sees its record.
        self.forget()
        self._map[_RECORD_AT : _RECORD_AT + len(record)] = record
        _LENGTH.pack_into(self._map, _LENGTH_AT, len(record))
        _SIGNAL.pack_into(self._map, _INCARNATION_AT, incarnation)

    def forget(self) -> None:
        """The incarnation has ended, and the database knows."""
        _SIGNAL.pack_into(self._map, _INCARNATION_AT, 0)
        self.set_job(0, 0)

    def set_guardian(self, slot: int, pid: int, start_ticks: int) -> None:
        """The worker's: this process is the guardian number ``slot``, below :data:`GUARDIANS`; (0, 0): none is."""
        _JOB.pack_into(self._map, _KNOWN_AT + slot * _JOB.size, pid, start_ticks)

    @property
    def guardians(self) -> set[tuple[int, int]]:
        """Pid and start time of every guardian. A pair torn by the death of its writer fits no process."""
        return {*_JOB.iter_unpack(self._map[_KNOWN_AT:_SPARED_AT])} - {(0, 0)}

    @property
    def spared(self) -> tuple[int, int]:
        """Pid and start time of the private PostgreSQL that this worker has started; (0, 0): none."""
        pid, ticks = _JOB.unpack_from(self._map, _SPARED_AT)
        return int(pid), int(ticks)

    def spare(self, pid: int, start_ticks: int) -> None:
        """The worker's: it has started this server, which outlives it."""
        _JOB.pack_into(self._map, _SPARED_AT, pid, start_ticks)

    @property
    def stacks_written(self) -> int:
        """How many bytes of stacks there are so far."""
        return os.fstat(self.fd).st_size - SIZE

    def forget_stacks(self) -> None:
        """For the supervisor: the next ones are written in place of those there are."""
        os.ftruncate(self.fd, SIZE)
        os.lseek(self.fd, SIZE, os.SEEK_SET)

    def stacks(self) -> bytes:
        """What ``faulthandler`` has written of the worker."""
        return os.pread(self.fd, STACKS_MAX, SIZE)
