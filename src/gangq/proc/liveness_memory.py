"""What a worker and its supervisor share: a socket, and one piece of memory that outlives the worker.

The supervisor (:mod:`gangq.proc.supervisor`) makes both and names the socket to the worker in ``GANGQ_SUPERVISOR``.
Its first message holds the secrets, which the worker must not have in its environment, and the descriptor of the
memory. The worker takes both once it is closed to other processes of its user (:mod:`gangq.private`): before, any of
them could open the memory through ``/proc`` and keep it. Over the socket come single bytes that wake the supervisor
(:data:`REGISTERED`, :data:`LEAVING`). The memory holds the time at which a thread of the worker last ran
(:attr:`Memory.signed_at`), and what the supervisor needs once the worker is dead: its incarnation, the job whose
handler ran in it, the address of its database, and which of its processes are guardians.

A sign of life is a store into this memory and no system call: for a call the thread would give up the GIL, and
then wait for it again.

It is a file without a name (``memfd``), because the address of the database may hold a password. Every field
has one writer, who may die between two of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time

from . import kernel

VARIABLE = "GANGQ_SUPERVISOR"
"""Environment variable with ``<socket>``, and ``<socket>:<memory>`` once the worker has both; only the worker that
the supervisor started has it.
"""
SECRETS_MAX = 1 << 18

REGISTERED = b"r"
"""The worker has registered: its record is in the memory."""
LEAVING = b"q"
"""The worker has stopped serving. Until its process ends it may be silent for as long as at its start."""

GUARDIANS = 254
"""How many guardians the memory can name; what guards one more is ended with everything else."""
STACKS_MAX = 256 << 10

_KNOWN = b"gangq  2"


class Memory(ctypes.Structure):
    """The memory, as either side sees it. Processes are named by pid and start time, (0, 0) for none."""

    fd: int
    interval_s: float
    """A sign of life is due this often."""
    silence_s: float
    """After this time without one the worker is ended."""
    signed_at: float
    """When a thread of the worker last said that it runs, seconds of the monotonic clock; 0: never."""
    dump_signal: int
    """The signal on which the worker's stacks are written; 0 while it would only kill."""
    dump_thread: int
    """The thread to send that signal to; 0: not known. One of the library's, so that no system call of the handler
    is interrupted by it.
    """
    job_id: int
    """The job whose handler runs in the worker's own process; 0: none."""
    token: int
    incarnation: int
    """The worker's; 0: none that would have to be reported."""
    spared_pid: int
    """The private PostgreSQL that this worker has started, and which outlives it."""
    spared_ticks: int
    record: bytes
    """What the worker said of its incarnation, as JSON; empty before."""

    _fields_ = [
        ("known", ctypes.c_char * 8),
        ("interval_s", ctypes.c_double),
        ("silence_s", ctypes.c_double),
        ("signed_at", ctypes.c_double),
        ("dump_signal", ctypes.c_int64),
        ("dump_thread", ctypes.c_int64),
        ("job_id", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("incarnation", ctypes.c_int64),
        ("spared_pid", ctypes.c_int64),
        ("spared_ticks", ctypes.c_int64),
        ("guarding", ctypes.c_int64 * 2 * GUARDIANS),
        ("record", ctypes.c_char * 12000),
    ]

    @classmethod
    def of(cls, fd: int) -> Memory:
        """Map what :meth:`create` made.

        Raises:
            ValueError, OSError: this descriptor is none of ours.
        """
        memory = cls.from_buffer(mmap.mmap(fd, SIZE))
        memory.fd = fd
        if memory.known != _KNOWN:
            raise ValueError(f"descriptor {fd} is not the memory of a gangq supervisor")
        return memory

    @classmethod
    def create(cls, *, interval_s: float, silence_s: float) -> Memory:
        """For the supervisor: new memory."""
        fd = kernel.memory_file("gangq")
        os.ftruncate(fd, SIZE)
        os.pwrite(fd, bytes(cls(_KNOWN, interval_s, silence_s)), 0)
        # faulthandler writes where the descriptor stands, and the worker's is a copy of this one.
        os.lseek(fd, SIZE, os.SEEK_SET)
        return cls.of(fd)

    def sign(self) -> None:
        """A thread of the worker runs. For any thread, as often as it likes: a third of a microsecond."""
        self.signed_at = time.monotonic()

    def set_job(self, job_id: int, token: int) -> None:
        """The worker begins this job, or with (0, 0) is in none. A third of a microsecond."""
        # The number last: a job that is read after the death of its worker has its own token.
        self.job_id = 0
        self.token = token
        self.job_id = job_id

    def register(self, incarnation: int, record: bytes) -> None:
        """The worker has become this incarnation.

        Raises:
            ValueError: a record that has no room here.
        """
        # The number last: a reader that sees it also sees its record.
        self.forget()
        self.record = record
        self.incarnation = incarnation

    def forget(self) -> None:
        """The incarnation has ended, and the database knows."""
        self.incarnation = 0
        self.set_job(0, 0)

    def set_guardian(self, slot: int, pid: int, start_ticks: int) -> None:
        """The worker's: this process is the guardian number ``slot``, below :data:`GUARDIANS`."""
        self.guarding[slot][:] = pid, start_ticks

    @property
    def guardians(self) -> set[tuple[int, int]]:
        """Every guardian. A pair torn by the death of its writer fits no process."""
        return {(pid, ticks) for pid, ticks in self.guarding if pid}

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


SIZE = ctypes.sizeof(Memory)
"""Bytes of the memory. What is behind them is written by ``faulthandler``: the stacks."""
