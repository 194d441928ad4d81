"""One delivery: what is posted and signed, what counts as success, and what never happens."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq.errors import InvalidInput
from gangq.notify import Failed, Post, Program, signature
from notify.receiver import Receiver, receiver

BODY = json.dumps({"id": 7, "kind": "job_failed", "reason": "é \u2028 </script>"}).encode()


@pytest.fixture
def there() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def reason(failed: Failed | None) -> str:
    assert failed is not None
    assert "hunter2" not in failed.reason, "the address may be a secret, and every role reads the reason"
    return failed.reason


def test_the_json_is_posted_as_it_is_and_signed_over_time_and_body(there: Receiver) -> None:
    key = b"0123456789abcdef"
    assert Post(there.url, secret=key, clock=lambda: 1700000000.9)(7, BODY) is None
    assert (there.bodies, there.paths) == ([BODY], ["/hook?token=hunter2"])
    (headers,) = there.headers
    expected = hmac.new(key, b"1700000000." + BODY, hashlib.sha256).hexdigest()
    assert headers["Gangq-Signature"] == f"t=1700000000,v1={expected}" == signature(key, BODY, 1700000000)
    assert (headers["Content-Type"], headers["Gangq-Notification"]) == ("application/json", "7")


def test_without_a_key_nothing_is_signed(there: Receiver) -> None:
    Post(there.url)(7, BODY)
    assert "Gangq-Signature" not in there.headers[0]


@pytest.mark.parametrize("status", [200, 201, 204, 299])
def test_any_answer_from_200_to_299_is_success(there: Receiver, status: int) -> None:
    there.status = status
    assert Post(there.url)(7, BODY) is None


@pytest.mark.parametrize("status", [400, 404, 410, 429, 500, 503, 599])
def test_any_other_answer_is_a_failure_that_names_it(there: Receiver, status: int) -> None:
    there.status = status
    assert reason(Post(there.url)(7, BODY)).startswith(f"HTTP {status}")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_wherever_it_leads(there: Receiver, status: int) -> None:
    with receiver() as elsewhere:
        there.status, there.location = status, elsewhere.url
        assert reason(Post(there.url)(7, BODY)) == f"HTTP {status}: redirects are not followed"
        there.location = there.url
        Post(there.url)(7, BODY)
        assert (len(there.bodies), elsewhere.bodies) == (2, [])


def test_no_proxy_of_the_environment_gets_to_see_it(there: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        assert Post(there.url)(7, BODY) is None
        assert (len(there.bodies), proxy.bodies) == (1, [])


def test_nobody_there_is_a_failure() -> None:
    with receiver() as gone:
        url = gone.url
    assert reason(Post(url)(7, BODY)) == "Connection refused"


def test_a_name_that_does_not_exist_is_a_failure() -> None:
    assert "looked up" in reason(Post("https://no-such-host.invalid/hunter2", timeout_s=20)(7, BODY))


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..example"])
def test_a_name_that_none_can_have_is_a_failure_too(host: str) -> None:
    assert "looked up" in reason(Post(f"http://{host}/hunter2")(7, BODY))


@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_an_address_without_a_port_is_of_its_scheme_also_in_ipv6(
    scheme: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def create_connection(address: tuple[str, int], *_: object) -> socket.socket:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", create_connection)
    for host in ("[fd00::5]", "receiver.example"):
        reason(Post(f"{scheme}://{host}/hook")(7, BODY))
    assert asked == [("fd00::5", port), ("receiver.example", port)]


def test_a_receiver_that_hangs_is_a_failure_in_time(there: Receiver) -> None:
    there.hangs.set()
    began = time.monotonic()
    assert "no answer" in reason(Post(there.url, timeout_s=0.3)(7, BODY))
    assert time.monotonic() - began < 3


def test_a_receiver_that_sends_a_byte_now_and_then_does_not_last_longer_and_is_hung_up_on(
    there: Receiver,
) -> None:
    there.drips = True
    began = time.monotonic()
    assert reason(Post(there.url, timeout_s=0.4)(7, BODY)) == "no answer within 0.4 s"
    assert time.monotonic() - began < 3
    with there.arrived:
        assert there.arrived.wait_for(lambda: not there.drips, 5), "the connection is closed"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com/hook",
        "ftp://example.com/",
        "file:///etc/passwd",
        "http:///path",
        "http://example.com:99999/",
        "http://example.com:0/",
        "http://example.com/a b",
        "http://example.com/\r\nX: y",
        "http://exämple.com/",
        "https://user:hunter2@example.com/",
    ],
)
def test_what_is_no_address_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Post(url)
    assert not url or url not in str(caught.value)
    assert "hunter2" not in str(caught.value)


# TLS --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A key and a certificate for 127.0.0.1 that nobody has signed."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed (apt-get install openssl)")
    directory = tmp_path_factory.mktemp("tls")
    key, found = directory / "key.pem", directory / "certificate.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=receiver", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", found],
        check=True, capture_output=True,
    )  # fmt: skip
    found.write_text(found.read_text() + key.read_text())
    return str(found)


def test_a_certificate_that_nobody_vouches_for_gets_nothing(certificate: str) -> None:
    with receiver(certificate=certificate) as there:
        url = there.url.replace("http:", "https:")
        assert reason(Post(url)(7, BODY)) == "TLS: CERTIFICATE_VERIFY_FAILED"
        assert there.bodies == []


def test_a_certificate_that_this_host_trusts_is_one_of_that_name(
    certificate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ssl.get_default_verify_paths().openssl_cafile_env, certificate)
    with receiver(certificate=certificate) as there:
        url = there.url.replace("http:", "https:")
        assert Post(url)(7, BODY) is None
        assert (
            reason(Post(url.replace("127.0.0.1", "localhost"))(7, BODY)) == "TLS: CERTIFICATE_VERIFY_FAILED"
        )
        assert there.bodies == [BODY]


# Programs ---------------------------------------------------------------------------------------------------


def script(directory: Path, text: str) -> str:
    made = directory / "page"
    made.write_text(f"#!/bin/sh\n{text}\n")
    made.chmod(0o755)
    return str(made)


def test_a_program_reads_the_json_from_standard_input_and_gets_no_arguments(tmp_path: Path) -> None:
    program = script(tmp_path, f'echo "$#" > {tmp_path}/count; cat > {tmp_path}/body')
    assert Program(program)(7, BODY) is None
    assert (tmp_path / "body").read_bytes() == BODY
    assert (tmp_path / "count").read_text() == "0\n"


def test_nothing_in_the_json_reaches_a_shell_and_no_password_reaches_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGQ_DSN", "postgresql://x:hunter2@db/x")
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    program = script(tmp_path, f"env > {tmp_path}/env")
    body = json.dumps({"reason": f"$(touch {tmp_path}/owned); `touch {tmp_path}/owned`"}).encode()
    assert Program(program)(7, body) is None
    assert not (tmp_path / "owned").exists()
    assert "hunter2" not in (tmp_path / "env").read_text()


def test_a_program_that_fails_is_a_failure_of_which_the_database_learns_the_code_alone(
    tmp_path: Path,
) -> None:
    failed = Program(script(tmp_path, "echo hunter2 >&2; exit 3"))(7, BODY)
    assert reason(failed) == "the program ended with 3"
    assert "hunter2" in str(failed), "who started it may know"


def test_a_program_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    program = script(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait")
    began = time.monotonic()
    assert "did not end within 0.5 s" in reason(Program(program, timeout_s=0.5)(7, BODY))
    assert time.monotonic() - began < 5
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 5
    while time.monotonic() < until and Path(f"/proc/{child}/stat").exists():
        if " Z " in Path(f"/proc/{child}/stat").read_text():
            break
        time.sleep(0.01)
    else:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_a_program_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "no_program").write_text("")
    for path in (str(tmp_path / "no_program"), str(tmp_path / "missing"), "no-such-program-here"):
        with pytest.raises(InvalidInput, match="no program"):
            Program(path)
