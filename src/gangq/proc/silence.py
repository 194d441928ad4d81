"""How long a worker has been silent, and whether it is frozen."""

from __future__ import annotations

_TURN_S = 0.25
_PAUSED_S = 1.0
_BETWEEN_LOOKS_S = 1.0


class Silence:
    """How long the worker has been silent, not counting the time in which this process did not run."""

    def __init__(self, limit_s: float, now: float) -> None:
        self.limit_s = limit_s
        self.silent_s = 0.0
        self._at = now

    def reset(self, ago_s: float = 0.0) -> None:
        """A sign of life, given so many seconds ago."""
        self.silent_s = max(0.0, min(ago_s, self.silent_s))

    def second_look_s(self) -> float:
        """The silence at which to look for the second time, having looked just now."""
        return max(self.limit_s, self.silent_s + self._between_s / 2)

    def wait_s(self) -> float:
        """How long to wait for one before looking at the clock again."""
        return max(0.0, min(_TURN_S, self.limit_s - self.silent_s))

    @property
    def _between_s(self) -> float:
        return min(_BETWEEN_LOOKS_S, self.limit_s / 4)

    @property
    def near_limit(self) -> bool:
        """Whether the limit is near: time for the first of two looks."""
        return self.silent_s >= self.limit_s - self._between_s

    def waited(self, now: float, wait_s: float) -> float:
        """Count a wait that was to end after ``wait_s`` seconds; return how long this process was not running.

        If a wait ends much too late, this process or its machine was stopped. Then the worker may have given a sign
        that was not read yet, or may have been stopped too.
        """
        passed, self._at = now - self._at, now
        paused_s = passed - wait_s if passed > wait_s + _PAUSED_S else 0.0
        self.silent_s += passed - paused_s
        return paused_s

    @property
    def over(self) -> bool:
        """Whether the limit is reached."""
        return self.silent_s >= self.limit_s


class Look:
    """Where every thread of a worker was at one instant: its Python frames, and its times in the kernel."""

    def __init__(self, stacks: bytes, threads: dict[int, tuple[str, int, str]]) -> None:
        """``stacks`` as faulthandler writes them; ``threads`` as :func:`procfs.thread_times` tells them."""
        self.threads = threads
        self.stacks: dict[bytes, bytes] = {}
        for block in stacks.split(b"\n\n"):
            head, _, frames = block.partition(b"\n")
            if b"hread 0x" in head:
                self.stacks[head.partition(b"hread ")[2].split()[0]] = frames.strip()

    def since(self, before: Look) -> str | None:
        """Compare with an earlier look: why the interpreter is not frozen; None: it is."""
        for thread, frames in self.stacks.items():
            if before.stacks.get(thread, frames) != frames:
                return f"thread {thread.decode()} went on"
        # Not one slice of processor. A thread that waits for the GIL also wants the processor at many looks, but gets
        # it.
        if any(now[0] == "R" and now == before.threads.get(tid) for tid, now in self.threads.items()):
            return "it wants the processor and was given none"
        return None
