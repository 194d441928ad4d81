"""Job logs are read as their formats say."""

from __future__ import annotations

import statistics
from pathlib import Path

import joblog
import pytest
from joblog import Job

SWF = """\
; Version: 2.2
; MaxProcs: 256
  1     0     5  100   8 -1 -1   16  3600 -1 1  7 1 -1  2 -1 -1 -1
  2    60     0   -1  -1 -1 -1    4   600 -1 5  7 1 -1  2 -1 -1 -1
  3    30    -1   50   4 -1 -1   -1    -1 -1 1 -1 1 -1 -1 -1 -1 -1 ; allocated only
"""


def test_the_standard_workload_format_is_read_and_jobs_that_never_ran_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.swf"
    log.write_text(SWF)
    assert joblog.read(log) == [
        Job(1, 0, 100, 3600, 16, "u7", "q2"),
        Job(3, 30, 50, 50, 4),
    ]


def test_our_own_form_comes_back_as_it_was_written(tmp_path: Path) -> None:
    jobs = [Job(1, 0, 10, 20, 4, "ada", "vision", 5), Job(2, 7, 10, 20, 1)]
    joblog.write_csv(tmp_path / "log.csv", jobs)
    assert joblog.read(tmp_path / "log.csv") == jobs


def test_the_last_three_columns_of_our_form_may_be_missing(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("id,submit_s,run_s,estimate_s,size\n2,9,10,20,4\n1,3,1,1,1\n")
    assert joblog.read(log) == [Job(1, 3, 1, 1, 1), Job(2, 9, 10, 20, 4)]


def test_stretched_estimates_lie_between_the_run_time_and_so_many_times_as_much() -> None:
    jobs = joblog.stretched([Job(n, n, 1000, 1000, 1) for n in range(2000)], 10, seed=3)
    factors = [job.estimate_s / job.run_s for job in jobs]
    assert min(factors) >= 1
    assert max(factors) <= 10
    assert statistics.fmean(factors) == pytest.approx(5.5, rel=0.05)
