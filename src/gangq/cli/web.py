"""gangq web: the page."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress

import click

from gangq.cli.output import say
from gangq.cli.session import Session, common_options, require_extra
from gangq.cli.worker import LogFormat


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), default=8088, show_default=True, help="On 127.0.0.1.")
@click.option("--base-path", default="", metavar="PATH", help="The path that a proxy has in front: /gangq.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="A name that a proxy asks by.")
@click.option("--login", is_flag=True, help="Ask for a PostgreSQL login, and act with its rights.")
@common_options
def web(session: Session, port: int, base_path: str, hosts: tuple[str, ...], login: bool) -> None:
    """Serve a page of the fleet, what runs, what waits and why.

    Read-only, it shows what the DSN's login may read: give it one of gangq_viewer. With --login people give a
    PostgreSQL login for the DSN's database, and may cancel, retry, pause and cordon where it may. It binds 127.0.0.1;
    a proxy with https brings it to others. Logins and what people do are logged to standard error.
    """
    require_extra("web", "uvicorn", "starlette", "jinja2")
    if not login:
        session.client()
    # After the first call, because they take longer to load than everything before it.
    import uvicorn

    from gangq.errors import GangqError
    from gangq.web import asgi

    handler = logging.StreamHandler()
    handler.setFormatter(LogFormat(session.json))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("gangq.web").setLevel(logging.INFO)
    page = asgi(session.dsn(), login=login, base_path=base_path, hosts=hosts)
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except OSError as e:
        said = os.strerror(e.errno or 0)  # Of e itself some releases of Python say more.
        raise GangqError(f"port {port} of 127.0.0.1: {said}; choose another with --port") from None
    say(f"http://127.0.0.1:{port}{base_path.rstrip('/')}/")
    config = uvicorn.Config(page, log_level="warning", timeout_graceful_shutdown=1)
    with suppress(KeyboardInterrupt):  # Of a Ctrl-C, which has ended it.
        uvicorn.Server(config).run([listening])
