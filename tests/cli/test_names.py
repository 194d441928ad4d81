"""A name that nothing has is told, with the names that there are: it is no empty answer."""

from __future__ import annotations

import pytest

from cli.cli_process import answers, gangq, ok
from gangq.client import Client
from gangq.embedded import Server


@pytest.fixture(scope="module")
def named(server: Server, template: str) -> str:
    """A database with a worker on a host with a device, and a queue, task, batch, service and the like."""
    dsn = server.create_database("cli_names", template=template)
    with Client(dsn) as client:
        devices = [{"uuid": "GPU-alpha", "index": 0, "vram_mb": 1024, "source": "declared"}]
        client.register_worker(name="worker-1", host="node-1", queues=["default"], devices=devices)
        client.set_queue(name="night")
        client.set_limit(key="licence", most=2)
        client.submit(task="train", payloads=[{}, {}], name="sweep", tags=["nightly"])
        client.set_service(name="chat", task="serve", replicas=1)
        client.add_notification(target="oncall")
    ok(dsn, "schedule", "add", "report", "--every", "1h", "report")
    return dsn


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ls --queue nigth", "queue 'nigth' does not exist. Did you mean night?"),
        ("ls --queue zzz", "queue 'zzz' does not exist. There are: default, night."),
        ("ls gangs --queue nigth", "queue 'nigth' does not exist. Did you mean night?"),
        ("ls batches --queue nigth", "queue 'nigth' does not exist. Did you mean night?"),
        ("ls --task trian", "task 'trian' does not exist"),
        ("ls --worker worker1", "worker 'worker1' does not exist. Did you mean worker-1?"),
        ("ls --name swep", "batch name 'swep' does not exist. Did you mean sweep?"),
        ("ls batches --name swep", "batch name 'swep' does not exist. Did you mean sweep?"),
        ("ls --tag nightl", "tag 'nightl' does not exist. Did you mean nightly?"),
        ("ls --user postgre", "role 'postgre' does not exist. Did you mean postgres"),
        ("ls --gang 99", "gang g99 does not exist"),
        ("ls gangs --queue night --gang 99", "gang g99 does not exist"),
        ("ls --batch 99", "batch b99 does not exist"),
        ("ls batches --batch 99", "batch b99 does not exist"),
        ("retry --failed --queue nigth", "queue 'nigth' does not exist. Did you mean night?"),
        ("retry --failed --task trian", "task 'trian' does not exist"),
        ("retry --failed --name swep", "batch name 'swep' does not exist. Did you mean sweep?"),
        ("retry --failed --tag nightl", "tag 'nightl' does not exist. Did you mean nightly?"),
        ("retry --failed --user postgre", "role 'postgre' does not exist. Did you mean postgres"),
        ("limit list license", "limit key 'license' does not exist. Did you mean licence?"),
        ("task resume trian", "task 'trian' does not exist"),
        ("workers --host node1", "host 'node1' does not exist. Did you mean node-1?"),
        ("workers --name worker1", "worker 'worker1' does not exist. Did you mean worker-1?"),
        ("devices --host node1", "host 'node1' does not exist. Did you mean node-1?"),
        ("trips --task trian", "task 'trian' does not exist"),
        ("trips --host node1", "host 'node1' does not exist. Did you mean node-1?"),
        ("trips --device GPU-alhpa", "device 'GPU-alhpa' does not exist. Did you mean GPU-alpha?"),
        ("trips --code 99", "no trip has the code 99: 75, 76"),
        ("quarantine --device GPU-alhpa", "Did you mean GPU-alpha?"),
        ("cordon node1", "Did you mean node-1?"),
        ("worker drain worker1", "Did you mean worker-1?"),
        ("taint worker1 a", "Did you mean worker-1?"),
        ("queue pause nigth", "Did you mean night?"),
        ("schedule list repotr", "Did you mean report?"),
        ("schedule pause repotr", "Did you mean report?"),
        ("service show caht", "Did you mean chat?"),
        ("service stop caht", "Did you mean chat?"),
        ("notify test onclal", "Did you mean oncall?"),
        ("submit train --queue nigth", "Did you mean night?"),
        ("submit train --limit-key license", "Did you mean licence?"),
        ("plan --remove-host node1", "Did you mean node-1?"),
        ("plan --quota nigth=gpus:8", "Did you mean night?"),
    ],
)
def test_a_name_that_nothing_has_is_told_with_those_alike(named: str, words: str, said: str) -> None:
    for form in ((), ("--json",)):
        refused = gangq(named, *words.split(), *form)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert said in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    "words",
    [
        "ls --queue night --task train",
        "ls --user postgres --worker worker-1",
        "ls --name sweep --tag nightly --state failed",
        "retry --failed --task train --queue night --name sweep --tag nightly",
        "devices --host node-1 --state quarantined",
        "trips --task train --host node-1 --device GPU-alpha --code 75",
    ],
)
def test_where_nothing_is_found_of_names_that_there_are_the_answer_is_empty(named: str, words: str) -> None:
    assert answers(named, *words.split()) == []


def test_a_notification_may_be_about_what_is_still_to_come_and_says_so(named: str) -> None:
    told = gangq(named, "notify", "add", "later", "--task", "trian", "--user", "nobody-yet")
    assert told.exit_code == 0
    assert "task 'trian' does not exist" in told.stderr
    assert "role 'nobody-yet' does not exist" in told.stderr


@pytest.mark.parametrize("command", ["submit train", "schedule add retrain --every 1h train"])
def test_a_host_to_avoid_may_be_still_to_come_and_the_answer_says_so(named: str, command: str) -> None:
    told = gangq(named, *command.split(), "--avoid-host", "node1")
    assert told.exit_code == 0
    said = " ".join(told.stderr.split())
    assert "host 'node1' does not exist: it is avoided if it comes. Did you mean node-1?" in said
    known = gangq(named, "submit", "train", "--wait-for-hardware", "--avoid-host", "node-1")
    assert known.exit_code == 0
    assert "does not exist" not in known.stderr
