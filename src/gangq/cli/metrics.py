"""gangq metrics: numbers for a Prometheus."""

from __future__ import annotations

import contextlib

import click

from gangq import private
from gangq.cli import output
from gangq.cli.loops import Interrupts
from gangq.cli.output import say
from gangq.cli.session import Session, common_options
from gangq.errors import DatabaseUnreachable, InvalidInput
from gangq.metrics import Address, Collector, MetricsServer, registry_of

_CONNECT_S = 2.0
_ANSWER_S = 5.0
"""Both together are less than the 10 s after which a Prometheus gives up: one that hangs is seen as `gangq_up 0`."""


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:9187",
    show_default=True,
    metavar="[HOST:]PORT",
    help="Where to serve /metrics; [::1]:9187 for IPv6.",
)
@click.option("--once", is_flag=True, help="Print the metrics and end.")
@common_options
def metrics(session: Session, listen: str, once: bool) -> None:
    """Serve numbers for a Prometheus over HTTP, until SIGTERM or Ctrl-C.

    Depths and waits of queues, jobs by outcome, preemptions, drains, trips, leases, devices, the tick and the outbox:
    docs/manual/metrics.md. The login needs the role gangq_viewer and nothing else. Without the database it serves
    gangq_up 0. Anybody who reaches the address may read them: names of queues, tasks and device models, no payload.

    With --once and --json an object per number: {"name", "labels", "value"}.
    """
    try:
        address = Address.of(listen)
    except InvalidInput as problem:
        raise click.UsageError(f"--listen: {problem}") from None
    private.close()
    if once:
        rows = session.client().metrics()
        if session.json:
            session.rows(rows, [], "")
        else:
            collected = registry_of(Collector(lambda: rows))
            from prometheus_client import generate_latest

            output.write(generate_latest(collected).decode(), nl=False)
        return
    from gangq.client import Client

    with Client(session.dsn(), max_size=1, connect_s=_CONNECT_S, timeout_s=_ANSWER_S) as client:
        # It may be started before its database. A login that may not read them is told at once.
        with contextlib.suppress(DatabaseUnreachable):
            session.check_schema(client)
            client.metrics()
        collector = Collector(client.metrics, failed=lambda problem: say(str(problem)))
        server = MetricsServer(collector, address)
        say(f"serves http://{server.address}/metrics")
        try:
            with Interrupts() as interrupts:
                while not interrupts.count:
                    interrupts.wait(3600)
        finally:
            server.close()
