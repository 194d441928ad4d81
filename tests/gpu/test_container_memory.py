"""Memory of the control group, read from /proc as it is and as other hosts lay it out."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gangq.gpu import container_memory

UNLIMITED = 9223372036854771712


class Host:
    """A /proc and a tree of control groups in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.groups = folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "pressure").mkdir()
        self.groups.mkdir()
        self.write(
            self.proc / "pressure/memory", "some avg10=9 \nfull avg10=1.25 avg60=0.00 avg300=0.00 total=1\n"
        )

    def write(self, path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}")

    def belongs(self, *rows: str) -> None:
        self.write(self.proc / "self/cgroup", "".join(f"{row}\n" for row in rows))

    def mounts(self, *rows: tuple[str, str, str]) -> None:
        """Rows of root, kind (cgroup, cgroup2) and options."""
        self.write(
            self.proc / "self/mountinfo",
            "24 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
            + "".join(f"30 24 0:26 {root} {self.groups} rw - {kind} cgroup {o}\n" for root, kind, o in rows),
        )

    def version_2(self, group: str, **files: object) -> None:
        base = {
            "current": 900,
            "stat": "anon 500\ninactive_file 200\n",
            "max": "max",
            "events": "oom_kill 2\n",
        }
        base["pressure"] = "full avg10=3.50 avg60=0 avg300=0 total=0\n"
        for name, text in {**base, **files}.items():
            self.write(self.groups / group / f"memory.{name}", text)

    def version_1(self, group: str, limit: int) -> None:
        stat = f"total_inactive_file 300\nhierarchical_memory_limit {limit}\n"
        self.write(self.groups / group / "memory.stat", stat)
        self.write(self.groups / group / "memory.usage_in_bytes", 1000)
        self.write(
            self.groups / group / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_this_process_has_memory() -> None:
    memory = container_memory()
    assert 0 < memory.used < psutil.virtual_memory().total
    assert memory.source in ("cgroup1", "cgroup2", "host")


def test_version_2_counts_without_reclaimable_cache_under_the_tightest_limit_above(host: Host) -> None:
    host.belongs("0::/slice/job")
    host.mounts(("/", "cgroup2", "rw"))
    host.version_2("slice", max=4000)
    host.version_2("slice/job", max=8000)
    memory = container_memory(proc=host.proc)
    assert (memory.used, memory.limit, memory.oom_kills, memory.pressure) == (700, 4000, 2, 3.5)
    assert memory.source == "cgroup2"


def test_version_2_without_a_limit_has_none(host: Host) -> None:
    host.belongs("0::/job")
    host.mounts(("/", "cgroup2", "rw"))
    host.version_2("job")
    assert container_memory(proc=host.proc).limit is None


def test_version_1_is_read_where_it_has_the_memory_controller_even_beside_version_2(host: Host) -> None:
    host.belongs("4:cpu,memory:/job", "0::/")
    host.mounts(("/", "cgroup", "rw,cpu,memory"))
    host.version_1("job", 5000)
    memory = container_memory(proc=host.proc)
    assert (memory.used, memory.limit, memory.oom_kills, memory.pressure) == (700, 5000, 4, None)
    assert memory.source == "cgroup1"
    host.version_1("job", UNLIMITED)
    assert container_memory(proc=host.proc).limit is None


@pytest.mark.parametrize(
    ("group", "used"), [("/docker/abc", 1000), ("/docker/abc/inner", 1300), ("/../../elsewhere", 1000)]
)
def test_a_group_named_as_the_host_sees_it_is_found_inside_what_is_mounted(
    host: Host, group: str, used: int
) -> None:
    host.belongs(f"0::{group}")
    host.mounts(("/docker/abc", "cgroup2", "rw"))
    host.version_2("", current=1200)
    host.version_2("inner", current=1500)
    assert container_memory(proc=host.proc).used == used


@pytest.mark.parametrize("files", [["memory.stat"], ["memory.current"]])
def test_the_root_group_has_no_numbers_and_the_host_stands_in(host: Host, files: list[str]) -> None:
    host.belongs("0::/")
    host.mounts(("/", "cgroup2", "rw"))
    host.version_2("")
    for name in files:
        (host.groups / name).unlink()
    memory = container_memory(proc=host.proc)
    assert memory.source == "host"
    assert memory.used > 1 << 20
    assert (memory.limit, memory.oom_kills, memory.pressure) == (None, None, 1.25)


def test_a_kernel_that_does_not_say_leaves_it_unknown(host: Host) -> None:
    host.belongs("0::/job")
    host.mounts(("/", "cgroup2", "rw"))
    host.version_2("job")
    (host.groups / "job/memory.events").unlink()
    (host.groups / "job/memory.pressure").unlink()
    memory = container_memory(proc=host.proc)
    assert (memory.oom_kills, memory.pressure) == (None, None)
