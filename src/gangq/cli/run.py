"""gangq run: submit a command, watch it, stream what it prints, and exit as it did."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from gangq.cli import output
from gangq.cli.follow import LogReader, Tagger
from gangq.cli.loops import Interrupts
from gangq.cli.options import Sectioned
from gangq.cli.output import say, seconds
from gangq.cli.parsing import ArrayType, KeyValue
from gangq.cli.progress import Bars
from gangq.cli.session import Session, common_options
from gangq.cli.wait import EXIT_CANCELLED, ending
from gangq.cli.which import Which, ids_of
from gangq.cli.work import is_gang, notes_aloud, submission, work_options
from gangq.client.encoding import counted
from gangq.client.rows import EventRow, LogRow
from gangq.commands import COMMAND, command_payload
from gangq.errors import DatabaseUnreachable, GangqError
from gangq.status import ENDED, RUNS, WAITS, holding, why_it_waits

if TYPE_CHECKING:
    from gangq.client import Client

_POLL_S = 0.2
_EXPLAIN_AFTER_S = 2.0
_EXPLAIN_EVERY_S = 5.0
_OUTAGE_TOLERATED_S = 300.0

_HAPPENED = {
    "drain": "drains ({cause}){why}",
    "rollback": "is blocked again{why}",
    "retry": "failed{why}; tried again",
    "reap": "lost its worker{why}",
    "release": "was handed back{why}",
    "snooze": "is to run again later{why}",
    "suspect": "is suspected{watchdog}{why}",
    "trip": "tripped a watchdog{watchdog}{why}",
    "notify": "would have tripped a watchdog that only notifies{watchdog}{why}",
    "held": "goes on, although a watchdog tripped{watchdog}: too many workers are suspect{why}",
    "poison": "is poison{why}",
    "unavoid": "may use the devices again where it tripped{why}",
    "straggler": "has a straggler{why}",
    "force": "did not confirm that it stopped; taken from its worker",
}
"""What is said of an event."""


@click.command(
    cls=Sectioned,
    context_settings={"allow_interspersed_args": False},
    epilog="""Exit codes: the command's own when it failed, 128+N when signal N killed it; for a gang that of
    the member it failed for. 127 when it could not be started, 1 when it failed otherwise (its worker was
    lost too often, a watchdog), 130 when it was cancelled, here or elsewhere, 3 when the database was away
    for five minutes.""",
)
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@work_options
@click.option(
    "--array",
    type=ArrayType(),
    metavar="SPEC[%M]",
    help="As a batch, the command for each index of 0-99, 1,3,7 or 0-30:10, its GANGQ_ARRAY_INDEX; M at once.",
)
@click.option("--shell", is_flag=True, help="COMMAND is one string for /bin/sh.")
@click.option(
    "--env",
    type=KeyValue(),
    multiple=True,
    metavar="K=V",
    help="Added to the worker's environment. Stored: no secrets.",
)
@click.option("--cwd", help="Where it runs [this directory, which the worker's host must have].")
@click.option("--worker-cwd", is_flag=True, help="Run it in the worker's own directory.")
@click.option("-d", "--detach", is_flag=True, help="Print its id and leave it.")
@common_options
def run(
    session: Session,
    /,
    argv: tuple[str, ...],
    array: tuple[list[int], int | None] | None,
    shell: bool,
    env: tuple[tuple[str, str], ...],
    cwd: str | None,
    worker_cwd: bool,
    detach: bool,
    **options: Any,
) -> None:
    """Run a command, a gang of it, or an array, like srun and sbatch --array.

    Waits, streams, exits with its status. Its output goes to standard output, for a gang or an array with the rank or
    the index in front of each line; changes of state go to standard error, and on a terminal a bar of its steps.
    Ctrl-C (or SIGTERM, or a closed terminal) cancels it and waits until it is gone; a second one leaves at once.

    A solo command is not tried again when it fails, unless --max-attempts says so; a gang is, as its queue
    says. Either survives the loss of a worker.

    With --json one object per line: "event" is submitted, waits, state, happened, output or end.
    """
    if cwd and worker_cwd:
        raise click.UsageError("--cwd and --worker-cwd exclude each other")
    if session.inside_job and not detach:
        raise click.UsageError("a job cannot watch another: submit it with gangq run --detach, or pass --dsn")
    where = None if worker_cwd else os.path.abspath(cwd or os.getcwd())
    words = " ".join(argv) if shell else list(argv)
    payload = command_payload(words, shell=shell, env=dict(env), cwd=where)
    if not is_gang(options) and options["max_attempts"] is None:
        options["max_attempts"] = 1
    count = 1 if array is None else _as_array(options, *array, argv[0])
    given = submission(session, options, own=("task", "payload", "payloads"))
    with Interrupts() as interrupts:
        target, ranks = _submit(session, payload, given, count)
        if detach:
            if not session.json:
                output.write(str(target))
            return
        code = Watcher(session, target, ranks, interrupts).watch()
    click.get_current_context().exit(code)


def _as_array(options: dict[str, Any], indexes: list[int], at_most: int | None, program: str) -> int:
    """Have the options say that it is an array; return of how many jobs."""
    if is_gang(options):
        raise click.UsageError("--array and --gang exclude each other: an array is of single commands")
    if indexes != list(range(len(indexes))):
        options["indexes"] = indexes
    if at_most is not None and options["at_most"] is not None:
        raise click.UsageError("--at-most and the %M of --array say the same: leave one of them out")
    options["at_most"] = at_most if options["at_most"] is None else options["at_most"]
    options["name"] = options["name"] or os.path.basename(program.split()[0])[:200]
    return len(indexes)


def _submit(
    session: Session, payload: dict[str, Any], given: dict[str, Any], count: int
) -> tuple[Which, dict[int, int | None]]:
    """Submit it and say so; return what it is, and its jobs with their ranks or indexes."""
    client = session.client()
    if not given.keys() & {"size", "roles"}:
        with notes_aloud(count):
            ids = client.submit(task=COMMAND, payloads=[payload] * count, **given)
        if "name" in given:
            # A batch has the id of its first job.
            target = Which(ids[0], "batch")
            ranks = dict(zip(ids, given.get("indexes") or range(count), strict=True))
        else:
            target, ranks = Which(ids[0], "job"), {ids[0]: None}
        note = None
    else:
        made = client.submit_gang(task=COMMAND, payload=payload, **given)
        target, ranks = Which(made.gang_id, "gang"), {id: rank for rank, id in enumerate(made.job_ids)}
        note = made.note
    queue = given.get("queue") or "default"
    jobs = list(ranks)
    text = f"{target.phrase} submitted to queue {queue}"
    if target.kind != "job":
        of = counted(len(jobs), "member") + "," if target.gang else "of"
        text += f": {of} jobs {jobs[0]} to {jobs[-1]}" if jobs[1:] else f": {of} job {jobs[0]}"
    _tell(session, target, "submitted", text, queue=queue, job_ids=jobs, note=note)
    return target, ranks


def _tell(session: Session, target: Which, event: str, text: str, **fields: Any) -> None:
    """One thing that happened: a line on standard error, or with --json an object on standard output."""
    if session.json:
        whose = target.named if target.kind == "job" else {target.kind: str(target), **target.named}
        output.write(output.to_json({"event": event, **whose, **fields}))
    else:
        say(text)


class Watcher:
    """The loop of `gangq run`, and of `gangq show --follow`, which has no `interrupts`: then Ctrl-C ends the looking
    and nothing else, the output is not read, and its end is told however it ends. `state`, `after_event`: what is
    known of it already.
    """

    def __init__(
        self,
        session: Session,
        target: Which,
        ranks: Mapping[int, int | None],
        interrupts: Interrupts | None = None,
        *,
        state: str = "",
        after_event: int | None = None,
    ) -> None:
        self._session = session
        self._client: Client = session.client()
        self._ranks = dict(ranks)
        self._state = state
        self._after_event = after_event
        self._target = target
        self._interrupts = interrupts
        self._reader = LogReader(self._client, list(ranks))
        self._tagger = Tagger(ranks)
        self._cancelled = False
        self._lost_at: float | None = None
        self._waits_since = time.monotonic() if state in WAITS else None
        self._explained = ""
        self._explain_at = time.monotonic() + _EXPLAIN_AFTER_S
        self._hosts: list[str] = []
        self._bars = Bars(self._client, [self._target])
        self._line_is_open = False

    def watch(self) -> int:
        """Watch it to its end; return the exit code."""
        try:
            while True:
                try:
                    code = self._look()
                    self._lost_at = None
                except GangqError as problem:
                    self._outage(problem)
                    code = None
                if code is not None:
                    return code
                pause = time.sleep if self._interrupts is None else self._interrupts.wait
                pause(_POLL_S * random.uniform(0.8, 1.2))
        except KeyboardInterrupt:
            self._bars.clear()
            if self._interrupts is None:
                raise
            say(f"left {self._target.phrase} to itself; see gangq show {self._target}")
            return EXIT_CANCELLED

    def _look(self) -> int | None:
        """One round; the exit code once it has ended and everything it printed is here."""
        if self._interrupts is not None and self._interrupts.count and not self._cancelled:
            self._cancel()
        ended = self._states()
        for row in self._reader.read() if self._interrupts is not None else ():
            self._print(row)
        if not ended:
            self._explain()
            self._progress()
            return None
        self._bars.clear()
        rest = self._tagger.rest()
        if not self._session.json:
            output.job_output(rest)
        return self._end()

    def _cancel(self) -> None:
        ids = ids_of(self._client, [self._target])
        if any(ids.values()):
            self._client.cancel(**ids, reason="interrupted in gangq run")
        self._cancelled = True
        self._bars.clear()
        say(f"cancelling {self._target.phrase}; Ctrl-C again leaves it to itself")

    def _outage(self, problem: GangqError) -> None:
        now = time.monotonic()
        if not problem.retryable:
            raise problem
        if self._lost_at is None:
            self._lost_at = now
            self._bars.clear()
            say(f"{problem}; {self._target.phrase} goes on, waiting for the database")
        elif now - self._lost_at > _OUTAGE_TOLERATED_S:
            raise DatabaseUnreachable(
                f"the database is away for {_OUTAGE_TOLERATED_S:g} s; {self._target.phrase} may still run: "
                f"see gangq show {self._target} ({problem})"
            ) from problem

    def _report(self, event: str, text: str = "", **fields: Any) -> None:
        self._bars.clear()
        _tell(self._session, self._target, event, f"{self._target.phrase} {text}", **fields)

    # States

    def _states(self) -> bool:
        """Tell what changed; whether it has ended."""
        state = self._target.state(self._client)
        if not self._target.batch:
            for event in self._target.events(self._client, self._after_event):
                self._after_event = event.id
                self._happened(event)
        if state != self._state:
            self._state = state
            if state not in ENDED:
                self._changed(state)
        return state in ENDED

    def _changed(self, state: str) -> None:
        self._waits_since = time.monotonic() if state in WAITS else None
        self._explain_at = time.monotonic() + _EXPLAIN_AFTER_S
        self._explained = ""
        if state in WAITS or state == "draining":
            # Waiting is said with its reason once it lasts, a drain with its cause as an event.
            if self._session.json:
                self._report("state", state=state)
        elif self._target.batch:
            self._report("state", state, state=state)
        elif not self._target.gang:
            job = self._client.job(id=self._target.id)
            text = f"{state} on {job.host} (worker {job.worker})" if job.worker else state
            text += f", attempt {job.attempts}" if job.attempts > 1 else ""
            fields = {"host": job.host, "worker": job.worker, "attempt": job.attempts}
            self._report("state", text, state=state, **fields)

    def _placed(self, event: EventRow) -> None:
        """A gang's epoch: reserved, then running. Told from its events: by polling, a short one is missed."""
        if event.kind == "reserve":
            self._hosts = sorted((event.data or {}).get("hosts") or {})
        state = {"reserve": "reserved", "go": "running"}[event.kind]
        text = f"{state} on {', '.join(self._hosts)}, epoch {event.epoch}"
        self._report("state", text, state=state, epoch=event.epoch, hosts=self._hosts)

    def _happened(self, event: EventRow) -> None:
        """What the states do not say: why it stopped, and why it will run again."""
        if event.kind in ("reserve", "go"):
            self._placed(event)
            return
        data = event.data or {}
        rank = self._ranks.get(event.job_id) if event.job_id is not None else None
        why = self._why(event)
        reason = f": {'' if rank is None else f'rank {rank} '}{why}" if why else ""
        watchdog = f" ({data['class']})" if data.get("class") else ""
        told = _HAPPENED.get(event.kind)
        text = told and told.format(why=reason, watchdog=watchdog, cause=data.get("cause"))
        if event.kind == "drained" and data.get("outcome") == "blocked":
            text = "drained, and waits to be placed again"
        if text is not None:
            self._report("happened", text, kind=event.kind, epoch=event.epoch, reason=why, data=event.data)

    def _why(self, event: EventRow) -> str | None:
        """Events name an error by its type, because viewers read them; its message is the job's, or a
        watchdog's.
        """
        if (event.data or {}).get("message"):
            return str((event.data or {})["message"])
        if event.kind not in ("drain", "retry", "trip") or event.job_id is None:
            return event.reason
        error = self._client.job(id=event.job_id).error or {}
        return error.get("message") or event.reason if error.get("type") == event.reason else event.reason

    def _explain(self) -> None:
        now = time.monotonic()
        if self._waits_since is None or now < self._explain_at:
            return
        self._explain_at = now + _EXPLAIN_EVERY_S
        held = holding(self._target.first_waiting(self._client).explain(self._client))
        why = why_it_waits(held)
        if why == self._explained:
            return
        self._explained = why
        waited = seconds(now - self._waits_since)
        state = self._state
        self._report("waits", f"is {state} for {waited}: {why}", state=state, reasons=held)

    def _progress(self) -> None:
        """Draw the bars, and not into a line that the job has not ended."""
        if self._line_is_open or self._session.json:
            return
        if self._state in RUNS:
            self._bars.draw()
        else:
            self._bars.clear()

    # Output and end

    def _print(self, row: LogRow) -> None:
        if self._session.json:
            fields = {"job_id": row.job_id, "rank": self._ranks[row.job_id], "text": row.chunk}
            output.write(output.to_json({"event": "output", **fields}))
        else:
            text = self._tagger.add(row)
            if text:
                self._bars.clear()
                output.job_output(text)
                self._line_is_open = sys.stdout.isatty() and not text.endswith("\n")

    def _end(self) -> int:
        state = self._state
        members = self._client.jobs(ids=list(self._ranks), limit=None)
        members.sort(key=lambda member: member.id)
        code, culprit = ending(state, members)
        error = (culprit.error if culprit else None) or {}
        text = state
        if self._target.gang and state == "failed":
            reason = self._client.gang(id=self._target.id).reason
            text += f" ({reason})" if reason else ""
        if state == "failed" and culprit is not None:
            rank = f" rank {culprit.rank}" if culprit.rank is not None else ""
            rank = f" index {culprit.array_index}" if culprit.array_index is not None else rank
            text += f":{rank} {error.get('message') or error.get('type') or 'no error was kept'}"
        if state != "done" or self._session.json or self._interrupts is None:
            self._report("end", text, state=state, exit_code=code, error=error or None)
        return code
