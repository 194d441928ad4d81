"""gangq beat, snooze, checkpoint, gang, ready and load: what a command says to its worker, over GANGQ_SOCKET."""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from gangq.cli import output
from gangq.cli.group import Subgroup
from gangq.cli.parsing import KeyValue, Seconds, bounded
from gangq.cli.session import Session, json_option
from gangq.errors import InvalidInput, NotFound

EXIT_NO_CHECKPOINT = 4


def _ask(verb: str, **fields: Any) -> dict[str, Any]:
    # Not at the top: completion asks this module for options, and no worker.
    from gangq.worker.child_context import Link

    with Link.from_environ() as worker:
        return worker.ask(verb, **fields)


@click.command()
@click.option("--step", type=int, help="The step reached: what the stall watchdog looks at.")
@click.option("--total", type=int, help="The last step.")
@click.option(
    "--phase",
    help="What comes next: load or save (slow: the load grace), run, long (exempt for a while), or wait (exempt "
    "until the next beat); else any word.",
)
@click.option("--loss", type=float, help="The loss.")
@click.argument("data", nargs=-1, type=KeyValue(typed=True), metavar="[K=V]...")
@json_option
def beat(
    session: Session,
    step: int | None,
    total: int | None,
    phase: str | None,
    loss: float | None,
    data: tuple[tuple[str, Any], ...],
) -> None:
    """Report progress from inside a command.

    From the first beat on the stall watchdog expects the next one in time. NaN and infinity are stored as null.

    gangq beat --step 120 --total 400 --phase run --loss 0.3 lr=0.01
    """
    from gangq.worker.context_impl import progress
    from gangq.worker.jobs import BEAT_BYTES
    from gangq.worker.results import as_progress

    more = dict(data)
    if loss is not None:
        more["loss"] = loss
    told, _ = as_progress(progress(step, total, phase, more), BEAT_BYTES)
    _ask("beat", data=told)
    session.answer(told)


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), help="Where it listens [GANGQ_PORT]; 0: nowhere.")
@click.option("--not", "not_ready", is_flag=True, help="Take no requests any more.")
@json_option
def ready(session: Session, port: int | None, not_ready: bool) -> None:
    """Say that this replica of a service takes requests.

    Its gang is among the endpoints once all its members are ready.
    """
    _ask("ready", ready=not not_ready, port=port)
    session.answer({"ready": not not_ready, "port": port})


@click.command()
@click.argument("busy", metavar="LOAD", type=click.FloatRange(min=0))
@json_option
def load(session: Session, busy: float) -> None:
    """Say how busy this replica of a service is; 1 is as much as it should have."""
    _ask("load", load=busy)
    session.answer({"load": busy})


@click.command()
@click.argument("delay", type=Seconds())
@json_option
def snooze(session: Session, delay: float) -> None:
    """Hand this command's job back, to be run again after DELAY (300, 90s, 5m), and then exit.

    It is handed back when the command has ended, whatever its exit status. No attempt is counted, but a snooze: past
    --max-snoozes [100] the job fails. A member of a gang cannot be snoozed.

    [ -e /data/ready ] || { gangq snooze 5m; exit; }
    """
    _ask("outcome", kind="snoozed", for_s=delay)
    session.answer({"for_s": delay})


@click.group(cls=Subgroup)
def checkpoint() -> None:
    """Save or load a command's checkpoint."""


@checkpoint.command()
@click.argument("step", type=click.IntRange(min=0))
@click.argument("file", type=click.Path(allow_dash=True, dir_okay=False))
@json_option
def save(session: Session, step: int, file: str) -> None:
    """Store FILE (- for standard input) as the state at STEP. Returns once it is committed.

    Exit code 1: it may not be stored, because the claim of this job is over; keep the older one.

    At most 1 MiB: larger ones belong in shared storage, and only their address here.
    """
    try:
        if file == "-":
            data = bounded(sys.stdin.buffer.read, "the checkpoint")
        else:
            with open(file, "rb") as opened:
                data = bounded(opened.read, "the checkpoint")
    except OSError as e:
        raise InvalidInput(f"cannot read the checkpoint {file}: {e.strerror}") from e
    _ask("save_checkpoint", step=step, data=base64.b64encode(data).decode())
    session.answer({"step": step, "bytes": len(data), "file": file})


@checkpoint.command(name="load")
@click.argument("file", type=click.Path(allow_dash=True, dir_okay=False))
@json_option
def load_checkpoint(session: Session, file: str) -> None:
    """Write the checkpoint to resume from into FILE (- for standard output) and print its step.

    Exit code 4, and FILE is left alone, when there is none: then begin at the beginning. With - the step
    goes to standard error.
    """
    found = _ask("load_checkpoint")
    if found["step"] is None:
        session.answer({"step": None, "bytes": None, "file": None})
        output.write("gangq: there is no checkpoint: begin at the beginning", err=True)
        click.get_current_context().exit(EXIT_NO_CHECKPOINT)
    data = base64.b64decode(found["data"])
    if file == "-":
        click.echo(data, nl=False)
        output.write(str(found["step"]), err=True)
        return
    try:
        _replace(Path(file), data)
    except OSError as e:
        raise InvalidInput(f"cannot write the checkpoint to {file}: {e.strerror}") from e
    session.answer({"step": found["step"], "bytes": len(data), "file": file}, str(found["step"]))


@click.command()
@json_option
def gang(session: Session) -> None:
    """Print who this command is in its gang, as of now.

    The variables that it was started with (RANK, WORLD_SIZE, MASTER_ADDR, GANGQ_EPOCH and the others), with the
    values of the present epoch: that is another one when a member was replaced or the gang goes on with fewer.
    In a shell: eval "$(gangq gang | sed 's/^/export /')"
    """
    from gangq.worker.environment import for_gang
    from gangq.worker.handler_info import gang_from_wire

    told = _ask("gang")["gang"]
    found = gang_from_wire(told)
    if found is None:
        raise NotFound("this job is no member of a gang")
    session.answer(told, "\n".join(f"{name}={shlex.quote(value)}" for name, value in for_gang(found).items()))


def _replace(path: Path, data: bytes) -> None:
    """All of it or nothing: half a checkpoint would be trained on."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
