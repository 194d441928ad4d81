"""The private PostgreSQL against real servers, real signals and the things crashes leave behind."""

from __future__ import annotations

import logging
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import psycopg
import pytest

import gangq
from gangq import embedded
from gangq.embedded import Binaries, Server, binaries, directory, find_binaries, identity, resolve_dsn
from gangq.embedded import server as server_module
from gangq.embedded.directory import Postmaster
from gangq.embedded.identity import Identity
from gangq.errors import EmbeddedError, InvalidInput
from worker.worker_process import eventually

pytestmark = pytest.mark.slow

ALL = find_binaries()
Make = Callable[..., Server]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to give its server to another user")

# A parent that adopts orphans and never reaps them, as PID 1 does in many containers.
SUBREAPER = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
START = "import sys\nfrom gangq.embedded import Server\ns = Server(sys.argv[1], durable=False).start()\n"
SAY_PID = "print(s.status().pid, flush=True)\n"
WAIT = "import signal; signal.pause()\n"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GANGQ_DATA_DIR", "GANGQ_DSN", "GANGQ_PG_BINDIR", "XDG_RUNTIME_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make(tmp_path: Path, open_dir: Path) -> Iterator[Make]:
    """Make servers (in tmp_path/pg unless told otherwise) that are gone, data and all, when the test is."""
    made: list[Server] = []

    def build(data_dir: Path | None = None, **options: object) -> Server:
        server = Server(data_dir or tmp_path / "pg", **{"durable": False, **options})  # type: ignore[arg-type]
        made.append(server)
        return server

    yield build
    for server in made:
        server.stop("immediate")
        if server.data_dir.is_relative_to(tmp_path):
            shutil.rmtree(server.data_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data directory to use in turn by the tests that are not about the first start: saves the initdb."""
    with Server(tmp_path_factory.mktemp("cluster") / "pg", durable=False) as server:
        server.stop()
        yield server.data_dir


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory every user can reach; pytest's own are closed to all but their owner."""
    path = Path(tempfile.mkdtemp(prefix="gangq-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def script() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run Python code in a process of its own; whatever still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *argv: object, **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", code, *map(str, argv)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def query(dsn: str, statement: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as conn:
        cursor = conn.execute(statement)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def pid_of(server: Server) -> int:
    pid = server.status().pid
    assert pid is not None
    return pid


def first_int(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def socket_dir_of(dsn: str) -> Path:
    return Path(parse_qs(urlsplit(dsn).query)["host"][0])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Finding binaries.


def test_the_systems_binaries_come_first_each_source_newest_first() -> None:
    assert sorted(ALL, key=lambda b: (b.source == "system", b.version), reverse=True) == ALL
    assert len({b.bindir for b in ALL}) == len(ALL)
    for b in ALL:
        assert find_binaries(str(b.major))[0].major == b.major
        assert b in find_binaries(b.source)


def test_the_wheel_is_found_without_importing_it() -> None:
    code = (
        "import sys, gangq.embedded as e\n"
        "assert [b.version[0] for b in e.find_binaries('wheel')] == [18, 16]\n"
        "assert not [m for m in sys.modules if m.startswith('pixeltable')]"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_no_binaries_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "system_dirs", list)
    monkeypatch.setattr(binaries, "wheel_dirs", list)
    with pytest.raises(EmbeddedError, match=r"apt install postgresql.*gangq\[embedded\].*GANGQ_DSN"):
        find_binaries()


def test_an_unsupported_major_is_no_find_and_is_said_so(tmp_path: Path) -> None:
    bindir = tmp_path / "bin"
    bindir.mkdir()
    for program in ("postgres", "initdb", "pg_ctl"):
        (bindir / program).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 13.9'\n")
        (bindir / program).chmod(0o755)
    assert binaries.inspect_binaries(bindir, "system") is None
    (bindir / "postgres").write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 17.2'\n")
    assert binaries.inspect_binaries(bindir, "system") == Binaries(bindir, (17, 2), "system")
    with pytest.raises(EmbeddedError, match="matching '3'"):
        find_binaries("3")


def test_GANGQ_PG_BINDIR_overrides_the_search_and_must_be_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GANGQ_PG_BINDIR", str(ALL[-1].bindir))
    assert [b.bindir for b in find_binaries()] == [ALL[-1].bindir]
    monkeypatch.setenv("GANGQ_PG_BINDIR", str(tmp_path))
    with pytest.raises(EmbeddedError, match=f"GANGQ_PG_BINDIR={tmp_path} holds no usable"):
        find_binaries()


# One server's life.


@pytest.mark.parametrize("binaries", ALL, ids=lambda b: f"{b.source}-{b.major}")
def test_data_outlives_a_stop_and_a_kill_dash_nine(make: Make, binaries: Binaries) -> None:
    server = make(binaries=binaries, durable=True).start()
    assert server.status().running
    assert server.status().version == binaries.version
    assert query(server.dsn(), "show fsync") == "on"
    query(server.dsn(), "create table t as select 42 as v")
    first = pid_of(server)
    assert pid_of(server.start()) == first
    server.stop()
    assert not server.status().running
    assert pid_of(server.start()) != first
    server.kill()
    # At once: its zombie may still be there, and its backends may still hold the shared memory.
    assert query(server.start().dsn(), "select v from t") == 42


def test_asking_starts_and_creates_nothing(make: Make, tmp_path: Path) -> None:
    server = make(tmp_path / "none" / "pg")
    assert "none%2Fpg" in server.dsn()
    assert server.status() == embedded.Status(
        False, None, server.binaries.version, server.data_dir, server.dsn(), server.binaries
    )
    server.stop()
    server.kill()
    assert not (tmp_path / "none").exists()


def test_databases_come_and_go(make: Make, cluster: Path) -> None:
    server = make(cluster).start()
    dsn = server.create_database('a "b/c')
    query(dsn, "create table t as select 7 as v")
    assert query(server.create_database("copy", template='a "b/c'), "select v from t") == 7
    with pytest.raises(EmbeddedError, match=r"cannot create database 'copy'.*already exists"):
        server.create_database("copy")
    with psycopg.connect(server.dsn("copy")):
        server.drop_database("copy")
    server.drop_database("copy")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        query(server.dsn("copy"), "select 1")


def test_psql_gets_the_server_and_its_absence_is_said_plainly(
    make: Make, cluster: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = make(cluster).start()
    argv = [*server.psql_argv(), "-XAtc", "select 1 + 1"]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip() == "2"
    bare = make(cluster, binaries=Binaries(tmp_path, server.binaries.version, "system"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedError, match="no psql beside the server"):
        bare.psql_argv()


def test_no_tcp_by_default_and_where_it_is_set_only_by_password(make: Make, cluster: Path) -> None:
    server = make(cluster).start()
    assert query(server.dsn(), "show listen_addresses") == ""
    server.stop()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = make(cluster, settings={"listen_addresses": "127.0.0.1", "port": str(port)})
    assert server.dsn().endswith(f"&port={port}")
    server.start()
    tcp = f"host=127.0.0.1 port={port} dbname=gangq"
    with pytest.raises(psycopg.OperationalError, match="password"):
        query(f"{tcp} user=postgres", "select 1")
    query(server.dsn(), "create role someone login password 'secret'")
    assert query(f"{tcp} user=someone password=secret", "select 1") == 1


def test_settings_reach_the_server_and_a_bad_one_shows_the_log(make: Make, cluster: Path) -> None:
    server = make(cluster, settings={"log_line_prefix": "it's mine: "}).start()
    assert query(server.dsn(), "show log_line_prefix") == "it's mine: "
    server.stop()
    with pytest.raises(EmbeddedError, match=r"(?s)did not start in .*server\.log.*shared_buffers"):
        make(cluster, settings={"shared_buffers": "plenty"}).start()


def test_a_server_that_does_not_answer_is_reported_with_its_log(make: Make, cluster: Path) -> None:
    server = make(cluster).start()
    pid = pid_of(server)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EmbeddedError, match=r"(?s)took no connection for 0\.1 s.*ready to accept conn"):
            server.start(timeout_s=0.1)
    finally:
        os.kill(pid, signal.SIGCONT)


# What is already in the data directory.


def test_data_of_another_major_is_refused_and_a_fitting_one_is_chosen(make: Make, tmp_path: Path) -> None:
    data_dir = tmp_path / "pg"
    data_dir.mkdir()
    (data_dir / "PG_VERSION").write_text(f"{ALL[-1].major}\n")
    assert make().binaries.major == ALL[-1].major
    (data_dir / "PG_VERSION").write_text("13\n")
    with pytest.raises(EmbeddedError, match=r"holds data of PostgreSQL 13.*install PostgreSQL 13"):
        make()


def test_an_older_default_directory_wins_over_newer_binaries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server_module, "default_base", lambda: tmp_path)
    assert Server().data_dir == tmp_path / f"pg-{ALL[0].major}"
    older = tmp_path / f"pg-{ALL[-1].major}"
    older.mkdir()
    (older / "PG_VERSION").write_text(f"{ALL[-1].major}\n")
    assert Server().data_dir == older
    monkeypatch.setenv("GANGQ_DATA_DIR", str(tmp_path / "mine"))
    assert Server().data_dir == tmp_path / "mine"


def test_a_directory_with_other_things_in_it_is_left_alone(make: Make, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(0o755)
    (home / "thesis.tex").touch()
    with pytest.raises(EmbeddedError, match=r"is not empty.*thesis\.tex"):
        make(home).start()
    assert mode(home) == 0o755
    assert [p.name for p in home.iterdir()] == ["thesis.tex"]


def test_an_initdb_cut_short_is_never_taken_for_a_cluster(
    make: Make, script: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    owner = script(START, tmp_path / "pg")
    eventually(lambda: any(tmp_path.glob("pg/initdb.partial-*/PG_VERSION")), "initdb is at work")
    owner.kill()
    server = make().start()
    assert query(server.dsn(), "select 1") == 1
    assert not list(server.data_dir.glob("initdb.partial-*/PG_VERSION"))


def test_a_database_that_a_killed_starter_is_still_making_is_waited_for(make: Make, cluster: Path) -> None:
    server = make(cluster).start()
    server.drop_database("gangq")
    left = psycopg.connect(server.dsn("postgres"), autocommit=True)
    # Sent and not waited for, as by a process that is killed.
    left.pgconn.send_query(b"create database gangq")
    left.pgconn.flush()
    assert query(server.start().dsn(), "select 1") == 1
    left.close()


def test_a_cluster_half_moved_into_place_is_refused_and_the_directory_to_remove_is_named(
    make: Make, tmp_path: Path
) -> None:
    data_dir = tmp_path / "pg"
    data_dir.mkdir()
    for name in ("global", "initdb.partial-1"):
        (data_dir / name).mkdir()
    with pytest.raises(EmbeddedError, match=f"{data_dir} is not empty .*there is: global.* remove this one"):
        make(data_dir).start()


# Several processes.


def test_four_processes_that_start_at_once_share_one_server(
    make: Make, script: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    server = make()
    starters = [script(START + SAY_PID, tmp_path / "pg") for _ in range(4)]
    pids = {first_int(p) for p in starters}
    assert pids == {pid_of(server)}


def test_a_server_outlives_its_owners_sigkill_and_anyone_can_stop_it(
    make: Make, cluster: Path, script: Callable[..., subprocess.Popen[str]]
) -> None:
    owner = script(START + SAY_PID + WAIT, cluster)
    pid = first_int(owner)
    owner.kill()
    owner.wait()
    server = make(cluster)
    assert pid_of(server.start()) == pid
    server.stop()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_server_survives_ctrl_c_and_holds_none_of_its_callers_pipes(
    make: Make, cluster: Path, script: Callable[..., subprocess.Popen[str]]
) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    owner = script(START + SAY_PID + WAIT, cluster, close_fds=False, start_new_session=True)
    os.close(writer)
    pid = first_int(owner)
    assert os.getsid(pid) != os.getsid(owner.pid)
    argv = [sys.executable, "-c", "import os; print(os.getsid(0))"]
    assert int(Identity(os.geteuid(), os.getegid()).run(argv)[1]) != os.getsid(0)
    os.killpg(owner.pid, signal.SIGINT)
    assert owner.stdout is not None
    # To the end of both pipes: this hangs if the server holds either.
    assert owner.stdout.read() == ""
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert pid_of(make(cluster)) == pid


def test_a_stop_waits_for_somebody_elses_start(make: Make, cluster: Path) -> None:
    server = make(cluster).start()
    stopper = threading.Thread(target=server.stop, name="stopper")
    with directory.flocked(server.data_dir):
        stopper.start()
        stopper.join(0.3)
        assert stopper.is_alive()
        assert server.status().running
    stopper.join(15)
    assert not server.status().running


# What crashes leave behind.


def test_a_zombie_that_is_never_reaped_does_not_stop_a_restart_in_another_process(
    make: Make, cluster: Path, script: Callable[..., subprocess.Popen[str]]
) -> None:
    pid = first_int(script(SUBREAPER + START + SAY_PID + WAIT, cluster))
    server = make(cluster)
    server.kill()
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not server.status().running
    assert query(server.start().dsn(), "select 1") == 1
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_zombie_that_is_never_reaped_does_not_stop_a_restart_in_the_same_process(
    make: Make, cluster: Path, script: Callable[..., subprocess.Popen[str]]
) -> None:
    again = "s.kill(); s.start()\n"
    process = script(SUBREAPER + START + SAY_PID + again + SAY_PID + WAIT, cluster)
    first, second = first_int(process), first_int(process)
    assert psutil.Process(first).status() == psutil.STATUS_ZOMBIE
    assert second == pid_of(make(cluster))


@pytest.mark.parametrize(("name", "port"), [("postgres", "5432"), ("sleep", "5432"), ("sleep", "5544")])
def test_a_pid_file_that_names_a_stranger_does_not_stop_a_restart(
    make: Make, cluster: Path, name: str, port: str
) -> None:
    server = make(cluster, settings={"port": port}).start()
    pid_file = server.data_dir / "postmaster.pid"
    lock_file = server.data_dir / f".s.PGSQL.{port}.lock"
    left = {path: path.read_text() for path in (pid_file, lock_file)}
    pid = pid_of(server)
    server.kill()
    # The server of somebody else's directory, or a program that somebody runs in this one.
    cwd = "/" if name == "postgres" else server.data_dir
    with subprocess.Popen([name, "60"], executable="/bin/sleep", cwd=cwd) as stranger:
        try:
            for path, text in left.items():
                path.write_text(text.replace(str(pid), str(stranger.pid), 1))
            assert not server.status().running
            server.stop()
            assert query(server.start().dsn(), "select 1") == 1
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_server_that_has_just_gone_is_not_signalled(
    make: Make, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid may have been given to a stranger between the look whether it lives and the signal."""
    made = make(cluster)
    with subprocess.Popen(["/bin/sleep", "60"]) as stranger:
        monkeypatch.setattr(made.directory, "postmaster", lambda: Postmaster(stranger.pid, None, None))
        monkeypatch.setattr(server_module, "alive", lambda _pid: None)
        made.kill()
        made.stop()
        monkeypatch.undo()
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(0.3)
        stranger.kill()


def test_a_query_that_does_not_notice_the_crash_is_said_to_be_in_the_way(make: Make, cluster: Path) -> None:
    server = make(cluster).start()
    conn = psycopg.connect(server.dsn())
    backend = conn.info.backend_pid
    # Busy, so that it does not look whether its postmaster still lives.
    conn.pgconn.send_query(b"select count(*) from generate_series(1, 1000000000000)")
    conn.pgconn.flush()
    busy = f"select state = 'active' from pg_stat_activity where pid = {backend}"
    eventually(lambda: query(server.dsn(), busy) is True, "the query runs")
    server.kill()
    with pytest.raises(
        EmbeddedError, match=rf"(?s)shared memory block.*old server processes.*{server.data_dir}"
    ):
        server.start(timeout_s=1)
    assert directory.alive(backend) is not None
    os.kill(backend, signal.SIGKILL)
    assert query(server.start().dsn(), "select 1") == 1
    conn.close()


def test_a_server_whose_pid_file_was_removed_is_not_killed(make: Make, cluster: Path) -> None:
    server = make(cluster).start()
    pid = pid_of(server)
    kept = server.data_dir / "kept"
    (server.data_dir / "postmaster.pid").rename(kept)
    with pytest.raises(EmbeddedError, match="shared memory block"):
        server.start(timeout_s=1)
    kept.rename(server.data_dir / "postmaster.pid")
    assert pid_of(server) == pid


# Where the socket is.


def test_no_directory_but_its_own_changes_its_mode(make: Make, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    bindir = find_binaries()[0].bindir
    watched = [closed, *closed.parents, bindir, *bindir.parents]
    before = {path: mode(path) for path in watched}
    server = make(closed / "new" / "pg").start()
    assert {path: mode(path) for path in watched} == before
    assert mode(closed / "new") == mode(server.data_dir) == 0o700
    assert socket_dir_of(server.dsn()) == server.data_dir


def test_a_path_with_a_comma_has_its_socket_elsewhere(make: Make, open_dir: Path) -> None:
    server = make(open_dir / "a,b 'c").start()
    with psycopg.connect(server.dsn()) as conn:
        assert "," not in conn.info.host


def test_a_long_path_gets_a_short_socket_that_every_environment_finds(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Path(tempfile.mkdtemp(prefix="gangq-test-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    server = make(tmp_path / ("x" * 90) / ("y" * 90)).start()
    try:
        directory = socket_dir_of(server.dsn())
        assert directory.parent == runtime / f"gangq-{os.geteuid()}"
        assert mode(directory) == mode(directory.parent) == 0o700
        # A cron job has no XDG_RUNTIME_DIR: it must find the same socket.
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        assert query(make(server.data_dir).start().dsn(), "select 1") == 1
    finally:
        server.stop("immediate")
        shutil.rmtree(runtime)


def test_a_socket_directory_that_is_not_ours_alone_is_refused(tmp_path: Path) -> None:
    me = Identity(os.geteuid(), os.getegid())
    directory.private_dir(tmp_path / "new", me)
    directory.private_dir(tmp_path / "new", me)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for name in ("open", "link"):
        with pytest.raises(EmbeddedError, match=f"{name} should be a directory of user"):
            directory.private_dir(tmp_path / name, me)
    with pytest.raises(EmbeddedError, match="belongs to"):
        directory.private_dir(tmp_path / "new", Identity(os.geteuid() + 1, 1))


# Root, and other users.


@as_root
def test_without_user_namespaces_roots_server_runs_as_nobody(
    make: Make, open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    server = make(open_dir / "deep" / "pg", binaries=ALL[0]).start()
    query(server.dsn(), "create table t as select 42 as v")
    server.stop()
    (open_dir / "deep").chmod(0o755)
    monkeypatch.setattr(identity, "userns_works", lambda: False)
    assert query(server.start().dsn(), "select v from t") == 42
    assert psutil.Process(pid_of(server)).uids().real == nobody
    assert server.data_dir.stat().st_uid == nobody
    assert mode(server.data_dir) == 0o700
    server.kill()
    # And it stays with nobody, whatever is possible later.
    monkeypatch.setattr(identity, "userns_works", lambda: True)
    assert query(server.start().dsn(), "select v from t") == 42
    assert psutil.Process(pid_of(server)).uids().real == nobody


@as_root
def test_binaries_that_nobody_cannot_reach_are_copied(
    make: Make, open_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "userns_works", lambda: False)
    wheel = find_binaries("wheel")[0]
    package = wheel.bindir.parent.parent
    site = tmp_path / "closed"
    site.mkdir(0o700)
    (site / package.name).mkdir()
    for part in (f"{package.name}.libs", f"{package.name}/{wheel.bindir.parent.name}"):
        (site / part).symlink_to(package.parent / part)
    hidden = site / package.name / wheel.bindir.parent.name / "bin"
    server = make(open_dir / "pg", binaries=Binaries(hidden, wheel.version, "wheel")).start()
    assert query(server.dsn(), "select 1") == 1
    assert Path(psutil.Process(pid_of(server)).exe()).is_relative_to(server.data_dir)
    assert mode(site) == 0o700
    server.stop()
    assert query(server.start().dsn(), "select 1") == 1


@as_root
def test_root_copies_no_binaries_through_a_link_that_a_user_has_put_into_the_data_directory(
    open_dir: Path, tmp_path: Path
) -> None:
    bindir = tmp_path / "closed" / "package" / "pginstall" / "bin"
    bindir.mkdir(parents=True)
    (bindir.parent / "share").mkdir()
    (tmp_path / "closed").chmod(0o700)
    victim = tmp_path / "victim"
    victim.mkdir(0o700)
    (open_dir / f"binaries-15.1-{binaries.digest(bindir)}.partial").symlink_to(victim)
    with pytest.raises(EmbeddedError, match="is in the way"):
        binaries.programs_for(identity.nobody(), Binaries(bindir, (15, 1), "wheel"), open_dir)
    assert (mode(victim), list(victim.iterdir())) == (0o700, [])


@as_root
def test_a_data_directory_that_nobody_cannot_reach_is_refused_or_avoided(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "userns_works", lambda: False)
    tmp_path.chmod(0o700)
    with pytest.raises(EmbeddedError, match=r"user nobody cannot reach .*GANGQ_DATA_DIR"):
        make().start()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    assert Server().data_dir == Path(f"/var/lib/gangq/pg-{ALL[0].major}")
    monkeypatch.setattr(identity, "userns_works", lambda: True)
    assert Server().data_dir.parent == tmp_path / "share" / "gangq"


@as_root
def test_two_users_do_not_meet(make: Make, open_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = identity.nobody()
    libraries = os.pathsep.join(str(Path(m.__file__ or "").parents[1]) for m in (gangq, psycopg, psutil))
    python = shutil.which("python3", path="/usr/bin:/bin") or "python3"
    can = nobody.run(["env", f"PYTHONPATH={libraries}", python, "-c", "import gangq.embedded"])
    if can[0] != 0:
        pytest.skip(f"user nobody cannot run this package: {can[1][-200:]}")
    shared = open_dir / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    long = "z" * 90
    mine = make(open_dir / long / "root").start()
    (shared / long).mkdir()
    os.chown(shared / long, nobody.uid, nobody.gid)
    theirs = shared / long / "nobody"
    argv = ["env", f"PYTHONPATH={libraries}", f"TMPDIR={shared}", python, "-c", START + SAY_PID, str(theirs)]
    status, said = nobody.run(argv)
    assert status == 0, said
    assert psutil.Process(int(said)).uids().real == nobody.uid
    # Root looks after nobody's server as it is; nobody gets nowhere near root's.
    looked_after = make(theirs)
    assert pid_of(looked_after.start()) == int(said) != pid_of(mine)
    assert socket_dir_of(looked_after.dsn()).parent.name == f"gangq-{nobody.uid}"
    assert socket_dir_of(mine.dsn()).parent.name == "gangq-0"
    code = "import psycopg, sys; psycopg.connect(sys.argv[1])"
    status, said = nobody.run(["env", f"PYTHONPATH={libraries}", python, "-c", code, mine.dsn()])
    assert status != 0
    assert "Permission denied" in said
    argv[-1] = str(mine.data_dir)
    status, said = nobody.run(argv)
    assert status != 0
    assert "EmbeddedError: cannot use" in said


# Throwaway servers, and the one nobody asked for.


def test_a_throwaway_server_leaves_nothing_even_when_its_block_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pids = []

    def use_it_and_fail() -> None:
        with Server.temporary() as server:
            assert query(server.dsn(), "show fsync") == "off"
            pids.append(pid_of(server))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use_it_and_fail()
    assert directory.alive(pids[0]) is None
    assert list(tmp_path.iterdir()) == []


def test_a_throwaway_server_without_binaries_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> list[Binaries]:
        raise EmbeddedError("no PostgreSQL here")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(server_module, "find_binaries", none)
    with pytest.raises(EmbeddedError, match="no PostgreSQL here"), Server.temporary():
        raise AssertionError
    assert list(tmp_path.iterdir()) == []


def test_a_throwaway_server_whose_owner_was_killed_is_swept_and_a_living_ones_is_not(
    script: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(server_module, "_SWEEP_AGE_S", -1.0)
    tmp_path.chmod(0o755)
    code = "from gangq.embedded import Server\nwith Server.temporary() as s:\n " + SAY_PID + " " + WAIT
    owner = script(code, env={**os.environ, "TMPDIR": str(tmp_path)})
    pid = first_int(owner)
    server_module._sweep_temporaries()
    assert directory.alive(pid) is not None
    owner.kill()
    owner.wait()
    server_module._sweep_temporaries()
    assert directory.alive(pid) is None
    assert list(tmp_path.iterdir()) == []


@as_root
def test_what_is_young_or_another_users_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    home = Path(tempfile.mkdtemp(prefix=server_module._temporary_prefix()))
    server_module._sweep_temporaries()
    assert home.exists(), "young"
    monkeypatch.setattr(server_module, "_SWEEP_AGE_S", -1.0)
    os.chown(home, identity.nobody().uid, -1)
    server_module._sweep_temporaries()
    assert home.exists(), "another user's"
    os.chown(home, os.geteuid(), -1)
    server_module._sweep_temporaries()
    assert not home.exists()


def test_the_dsn_is_the_one_given_else_the_environments_and_embedded_is_the_private_server(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cluster: Path
) -> None:
    monkeypatch.setenv("GANGQ_DATA_DIR", str(cluster))
    monkeypatch.setenv("GANGQ_DSN", "dbname=env")
    assert resolve_dsn("dbname=given") == "dbname=given"
    assert resolve_dsn() == "dbname=env"
    assert not make(cluster).status().running
    monkeypatch.delenv("GANGQ_DSN")
    with pytest.raises(InvalidInput, match="no database is named"):
        resolve_dsn()
    assert not make(cluster).status().running
    monkeypatch.setenv("GANGQ_DSN", "embedded")
    server = make(cluster)
    with caplog.at_level(logging.INFO, "gangq.embedded"):
        assert query(resolve_dsn(), "select current_database()") == "gangq"
        assert resolve_dsn("embedded") == server.dsn()
    events = [vars(record) for record in caplog.records]
    assert [(e["event"], e["data_dir"]) for e in events] == [("embedded_started", str(server.data_dir))]
