"""The dead man's switch stays on between the handlers of a batch: it must kill each of them that outlives the
lease, and nothing else. In processes of their own, with a lease of some tenths of a second and no database.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ORDERS = pytest.mark.parametrize(("order", "code"), [("lost", 77), ("stop", 79)])


def run(what: str, *arguments: str) -> int:
    """The exit status of a process that runs what ``in_turn.py`` calls ``what``."""
    program = Path(__file__).with_name("in_turn.py")
    done = subprocess.run(
        [sys.executable, str(program), what, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=20,
        check=False,
    )
    assert "Error" not in done.stderr, done.stderr
    return done.returncode


def test_a_handler_after_others_of_its_batch_dies_with_the_lease_too() -> None:
    assert run("hangs_after_another") == 77


def test_a_handler_after_a_rest_dies_with_the_same_lease_too() -> None:
    assert run("hangs_after_a_rest") == 77


def test_no_handler_begins_while_the_lease_may_end_at_any_moment() -> None:
    assert run("begins_as_the_lease_lapses") == 0


def test_a_renewal_between_two_handlers_counts_for_the_second() -> None:
    assert run("is_renewed_between_two") == 0


def test_a_renewal_while_a_job_starts_counts_for_it() -> None:
    assert run("is_renewed_as_it_starts") == 0


def test_a_renewal_during_a_later_handler_counts_for_it() -> None:
    assert run("is_renewed_in_the_second") == 0


@ORDERS
def test_an_order_is_obeyed_from_the_moment_in_which_it_can_reach_the_job(order: str, code: int) -> None:
    assert run("is_ordered_at_once", order) == code


def test_a_stop_is_not_carried_out_on_a_job_that_a_fault_kept_from_its_handler() -> None:
    assert run("faults_before_its_handler") == 0


@ORDERS
def test_an_order_that_meets_a_trip_is_carried_out_once_the_trip_is_called_off(order: str, code: int) -> None:
    # Without evidence the kernel's timer would end it, with 77 or 79.
    assert run("is_ordered_during_a_trip", order, "10") == 100 + code


@ORDERS
def test_a_handler_that_returns_before_the_trip_is_called_off_ends_no_process(order: str, code: int) -> None:
    assert run("is_ordered_during_a_trip", order, "0.2") == 0


def test_a_handler_that_returns_while_its_process_exits_is_followed_by_no_other_job() -> None:
    assert run("returns_while_it_exits") == 177


def test_a_trip_that_begins_while_the_process_exits_ends_it_with_its_own_code() -> None:
    # The trip takes longer than the timer that was set for the exit.
    assert run("trips_while_it_exits", "1.2", "76") == 76


def test_the_process_exits_once_a_trip_that_began_meanwhile_is_called_off() -> None:
    assert run("trips_while_it_exits", "0.6", "off") == 177


def test_a_process_in_which_no_thread_can_be_started_ends_too_when_the_claim_of_its_handler_is_lost() -> None:
    assert run("loses_its_claim_without_threads") == 77


@pytest.mark.parametrize("order", ["extend", "hasten"])
def test_nothing_moves_the_timer_of_an_exit_that_has_begun(order: str) -> None:
    assert run("is_ordered_while_it_exits", order) == 77


@pytest.mark.parametrize("handler", ["fails", "told", "quick"])
def test_telling_how_a_job_ended_may_outlast_the_lease(handler: str) -> None:
    assert run("reports_long", handler) == 0


def test_a_job_that_may_not_start_any_more_may_be_handed_back_after_the_lease() -> None:
    assert run("hands_back_the_second") == 0


@pytest.mark.parametrize("task", ["isolated", "unknown"])
def test_a_job_of_the_batch_that_does_not_run_here_may_outlast_the_lease(task: str) -> None:
    assert run("runs_the_second_elsewhere", task) == 0


def test_a_drain_that_takes_the_rest_of_the_batch_leaves_no_switch_on() -> None:
    assert run("drains_in_the_first") == 0


def test_waiting_for_the_rest_of_a_gang_may_outlast_the_lease() -> None:
    assert run("waits_for_its_gang") == 0


def test_a_log_that_nobody_reads_may_outlast_the_lease() -> None:
    assert run("logs_long") == 0
