"""The whole story once more, on a PostgreSQL in a container: another build, over TCP, with a password."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from gangq import schema
from gangq.client import Client
from gangq.errors import StaleToken

docker = pytest.importorskip("docker")
IMAGE = os.environ.get("GANGQ_TEST_PG_IMAGE", "postgres:17")


def _engine_listens() -> bool:
    """Whether anybody answers at Docker's socket; the client library leaks sockets when nobody does."""
    where = urlsplit(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    family, address = (
        (socket.AF_UNIX, where.path)
        if where.scheme == "unix"
        else (socket.AF_INET, (where.hostname or "localhost", where.port or 2375))
    )
    with socket.socket(family) as probe:
        probe.settimeout(5)
        return probe.connect_ex(address) == 0


def _docker_has_the_image() -> bool:
    if not _engine_listens():
        return False
    engine = docker.from_env(timeout=30)
    try:
        engine.images.get(IMAGE)
    except docker.errors.ImageNotFound:
        try:
            engine.images.pull(IMAGE)
        except docker.errors.APIError:
            return False
    finally:
        engine.close()
    return True


@pytest.fixture(scope="module")
def container_dsn() -> Iterator[str]:
    if not _docker_has_the_image():
        pytest.skip(f"no Docker engine that has or can pull {IMAGE}")
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
    from testcontainers.community.postgres import PostgresContainer

    with PostgresContainer(IMAGE, driver=None) as postgres:
        yield postgres.get_connection_url()


def test_a_solo_job_and_a_gang_go_from_submit_to_done_in_a_container(container_dsn: str) -> None:
    first = schema.migrate(container_dsn, log=lambda _: None)
    again = schema.migrate(container_dsn, log=lambda _: None)
    assert first.applied
    assert again.already_current
    with Client(container_dsn) as client:
        workers = [
            client.register_worker(name=f"w{n}", host=f"h{n}", queues=["default"]).incarnation
            for n in range(2)
        ]
        (job,) = client.submit(task="solo", payloads=[{"n": 1}])
        (claimed,) = client.claim(incarnation=workers[0], request_id=uuid.uuid4())
        assert claimed.job_id == job
        client.complete(job_ids=[job], tokens=[claimed.token], results=[{"n": 2}])
        assert client.job(id=job).result == {"n": 2}

        gang = client.submit_gang(task="train", size=2)
        for epoch in (1, 2):
            client.tick(force=True)
            members = [client.claim(incarnation=worker, request_id=uuid.uuid4())[0] for worker in workers]
            assert [m.epoch for m in members] == [epoch, epoch]
            assert all(m.go for m in client.barrier(job_id=members[0].job_id, token=members[0].token))
            if epoch == 1:
                client.release(job_ids=[members[0].job_id], tokens=[members[0].token])
                client.ack_preempted(job_id=members[1].job_id, token=members[1].token)
                with pytest.raises(StaleToken):
                    client.save_checkpoint(
                        job_id=members[1].job_id, token=members[1].token, step=1, data=b"late"
                    )
        client.complete(job_ids=[m.job_id for m in members], tokens=[m.token for m in members])
        assert client.gang(id=gang.gang_id).state == "done"
        assert client.violations() == []
