"""The watchdogs in somebody else's claim loop, without a queue: a process sees what they exit with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FAKES = Path(__file__).parent

LOOP = """
import sys, threading, time
sys.path.insert(0, {fakes!r})
from fakes import Sampler
from gangq.watchdogs import GpuHealthWatchdog, StallWatchdog, Watchdog, WorkSensors
from gangq.proc.clock import boottime

sampler = Sampler(boottime)
sampler.set()  # One idle device that has been seen busy.
sensors = WorkSensors(uuids=["GPU-1"], sampler=sampler)
budget = Watchdog(poll_s=0.05)
stall = StallWatchdog(stall_timeout_s=0.3, confirm_s=0.6, poll_s=0.1, sensors=sensors)
health = GpuHealthWatchdog(window_s=1.0, load_grace_s=0.2, sample_s=0.15, poll_s=0.05, sensors=sensors)

def claim():
    yield from ["fine", "fine", sys.argv[1], "never reached"]

def fine():
    for step in range(3):
        stall.beat(step); health.beat(step)
        time.sleep(0.02)

def over_budget():
    time.sleep(60)

def stalls():
    stall.beat(1, 10)
    threading.Lock().acquire() and time.sleep(60)

def never_touches_the_device():
    time.sleep(60)

def loses_its_device():
    threading.Timer(0.1, sampler.event, ["lost"]).start()
    time.sleep(60)

for job in claim():
    print(job, flush=True)
    with budget.start(budget_s=0.5 if job == "over_budget" else 30), stall, health:
        globals()[job]()
"""


WRONG = {"over_budget": 75, "stalls": 76, "never_touches_the_device": 78, "loses_its_device": 85}


def test_a_loop_that_brackets_its_jobs_exits_with_the_code_of_what_went_wrong() -> None:
    code = LOOP.format(fakes=str(FAKES))
    loops = {
        job: subprocess.Popen(
            [sys.executable, "-c", code, job], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for job in WRONG
    }
    try:
        said = {job: loop.communicate(timeout=30) for job, loop in loops.items()}
    finally:
        for loop in loops.values():
            loop.kill()
    assert {job: loop.returncode for job, loop in loops.items()} == WRONG
    for job, (out, err) in said.items():
        assert out.split() == ["fine", "fine", job]
        assert f"in {job}" in err  # Every thread's stack, so that somebody can see where it hung.
