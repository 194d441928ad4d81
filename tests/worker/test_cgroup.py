"""Limits of control groups: of real ones where this host lets them be made, else as other hosts lay them out."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gangq.proc import cgroup
from gangq.worker.options import WorkerOptions, usable_cpus, usable_memory_mb

UNLIMITED = 9223372036854771712
MIB = 1 << 20
_ASK = "from gangq.worker.options import WorkerOptions; o = WorkerOptions().resolved(); print(o.memory_mb, o.cpus)"


class Tree:
    """A /proc and mounted hierarchies in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.mounted = folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)

    def belongs(self, *rows: str) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{row}\n" for row in rows))

    def mounts(self, *rows: tuple[str, str, str]) -> None:
        """Rows of the group that is mounted, the folder it is mounted at, and the options."""
        text = "24 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        for root, at, options in rows:
            kind = "cgroup2" if at in ("", "unified") else "cgroup"
            text += f"30 24 0:26 {root} {self.mounted / at} rw - {kind} cgroup {options}\n"
        (self.proc / "self/mountinfo").write_text(text)

    def says(self, group: str, **files: object) -> None:
        """Files of a group; two underscores stand for the point in a name."""
        for name, text in files.items():
            path = self.mounted / group / name.replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    @property
    def memory(self) -> int | None:
        return cgroup.memory_limit(cgroup.find("memory", proc=self.proc))

    @property
    def oom_kills(self) -> int | None:
        return cgroup.oom_kills(cgroup.find("memory", proc=self.proc))

    @property
    def cpus(self) -> float | None:
        return cgroup.cpu_limit(cgroup.find("cpu", proc=self.proc))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_unit_of_version_2_has_its_own_limits_and_not_those_of_the_root(tree: Tree) -> None:
    tree.belongs("0::/system.slice/gangq-worker@0.service")
    tree.mounts(("/", "", "rw"))
    tree.says("system.slice", memory__max="max", cpu__max="max 100000")
    tree.says("system.slice/gangq-worker@0.service", memory__max=300 * MIB, cpu__max="150000 100000")
    assert (tree.memory, tree.cpus) == (300 * MIB, 1.5)


def test_the_tightest_of_a_group_and_its_parents_holds(tree: Tree) -> None:
    tree.belongs("0::/a/b/c")
    tree.mounts(("/", "", "rw"))
    tree.says("a", memory__max=100 * MIB, cpu__max="400000 100000")
    tree.says("a/b", memory__max=200 * MIB, cpu__max="25000 50000")
    tree.says("a/b/c", memory__max="max", cpu__max="max 100000")
    assert (tree.memory, tree.cpus) == (100 * MIB, 0.5)


def test_a_container_sees_its_own_subtree_and_its_limits_are_at_the_mount(tree: Tree) -> None:
    tree.belongs("0::/docker/abc")
    tree.mounts(("/docker/abc", "", "rw"))
    tree.says("", memory__max=100 * MIB, cpu__max="50000 100000")
    assert (tree.memory, tree.cpus) == (100 * MIB, 0.5)
    tree.belongs("0::/../../elsewhere")
    assert tree.memory == 100 * MIB


def test_version_1_has_a_hierarchy_for_each(tree: Tree) -> None:
    tree.belongs("4:memory:/m/inner", "3:cpu,cpuacct:/c/inner", "0::/")
    tree.mounts(("/", "memory", "rw,memory"), ("/", "cpu", "rw,cpu,cpuacct"), ("/", "unified", "rw"))
    tree.says("memory/m", memory__limit_in_bytes=500 * MIB)
    tree.says("memory/m/inner", memory__limit_in_bytes=UNLIMITED)
    tree.says("cpu/c", cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    tree.says("cpu/c/inner", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert (tree.memory, tree.cpus) == (500 * MIB, 2.5)


def test_version_1_tells_what_parents_outside_a_container_allow(tree: Tree) -> None:
    tree.belongs("4:memory:/docker/abc")
    tree.mounts(("/docker/abc", "memory", "rw,memory"))
    tree.says(
        "memory", memory__limit_in_bytes=UNLIMITED, memory__stat=f"hierarchical_memory_limit {70 * MIB}"
    )
    assert tree.memory == 70 * MIB


def test_controllers_of_one_host_may_be_in_different_versions(tree: Tree) -> None:
    tree.belongs("4:memory:/job", "0::/job")
    tree.mounts(("/", "memory", "rw,memory"), ("/", "unified", "rw"))
    tree.says("memory/job", memory__limit_in_bytes=10 * MIB)
    tree.says("unified/job", memory__max=5, cpu__max="10000 100000")
    assert (tree.memory, tree.cpus) == (10 * MIB, 0.1)


def test_what_the_kernel_killed_for_want_of_memory_is_counted_in_the_nearest_group_that_counts(
    tree: Tree,
) -> None:
    tree.belongs("0::/slice/job")
    tree.mounts(("/", "", "rw"))
    tree.says("slice/job", memory__max="max")
    assert tree.oom_kills is None
    tree.says("slice", memory__events="oom 3\noom_kill 2")
    assert tree.oom_kills == 2
    tree.says("slice/job", memory__events="oom 1\noom_kill 1")
    assert tree.oom_kills == 1
    tree.belongs("4:cpu,memory:/job", "0::/slice/job")
    tree.mounts(("/", "memory", "rw,cpu,memory"), ("/", "unified", "rw"))
    tree.says("memory/job", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 4")
    assert tree.oom_kills == 4


@pytest.mark.parametrize("mine", [True, False])
def test_groups_are_made_only_below_the_one_that_this_process_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: bool
) -> None:
    """What is mounted may be another one than /proc names."""
    (tmp_path / "cgroup.procs").write_text(f"1\n{os.getpid() if mine else os.getpid() + 1}\n")
    monkeypatch.setattr(cgroup, "find", lambda _: cgroup.Group(2, [str(tmp_path)]))
    made: list[str] = []
    monkeypatch.setattr(os, "mkdir", made.append)
    cgroup.home()
    assert bool(made) is mine


@pytest.mark.parametrize("quota", ["max 100000", "0 100000", "100000 0", "100000", "", "many 1"])
def test_what_is_no_limit_limits_nothing(tree: Tree, quota: str) -> None:
    tree.belongs("0::/job")
    tree.mounts(("/", "", "rw"))
    tree.says("job", memory__max="max", cpu__max=quota)
    assert (tree.memory, tree.cpus) == (None, None)


def test_a_mount_without_a_source_hides_no_group(tree: Tree) -> None:
    tree.belongs("0::/unit")
    tree.mounts(("/", "", "rw"))
    with (tree.proc / "self/mountinfo").open("a") as file:
        file.write("31 24 0:27 / /scratch rw - tmpfs  rw,size=1024k\n")
    tree.says("unit", memory__max=64 * MIB)
    assert tree.memory == 64 * MIB


def test_a_host_without_groups_has_no_limits(tree: Tree) -> None:
    assert (tree.memory, tree.cpus) == (None, None)
    tree.belongs("0::/")
    tree.mounts()
    assert (tree.memory, tree.cpus) == (None, None)


def test_a_group_counts_as_removed_only_where_it_is_known_to_be_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "group"
    assert cgroup.remove(str(group))
    # A file that cannot be read, as where this process may open no more files.
    (group / "cgroup.events").mkdir(parents=True)
    assert not cgroup.remove(str(group))
    assert (group / "cgroup.events").is_dir()
    (group / "cgroup.events").rmdir()
    (group / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    # The kernel's answers to rmdir: a process has entered since; what is below is another user's.
    for place, code, removed in ((group, errno.EBUSY, False), (group / "below", errno.EACCES, True)):
        place.mkdir(exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rmdir", rmdir_refusing(place, code))
            assert cgroup.remove(str(group)) == removed


def rmdir_refusing(refused: Path, code: int) -> Callable[[str], None]:
    def rmdir(place: str) -> None:
        if place == str(refused):
            raise OSError(code, os.strerror(code))

    return rmdir


@pytest.fixture
def real() -> Iterator[tuple[list[Path], float]]:
    """Groups nested in real ones with 256 MiB and half a processor, and the processors they allow: where the groups
    are made with the controllers at hand, in either version.
    """
    name = f"gangq-test-{uuid.uuid4().hex[:8]}"
    made: list[Path] = []
    joined: list[Path] = []
    allowed = 0.0
    try:
        for controller, files in (
            ("memory", {"memory.limit_in_bytes": 256 * MIB}),
            ("cpu", {"cpu.cfs_period_us": 100000, "cpu.cfs_quota_us": 50000}),
            ("", {"memory.max": 256 * MIB, "cpu.max": "50000 100000"}),
        ):
            place = Path("/sys/fs/cgroup") / controller / name
            with contextlib.suppress(OSError):
                place.mkdir()
                made.append(place)
                present = {file: text for file, text in files.items() if (place / file).exists()}
                for file, text in present.items():
                    (place / file).write_text(f"{text}")
                (place / "inner").mkdir()
                made.append(place / "inner")
                if present:
                    joined.append(place / "inner")
                    allowed = 0.5 if any(file.startswith("cpu") for file in present) else allowed
        if not any((place.parent / "memory.limit_in_bytes").exists() for place in joined) and not any(
            (place.parent / "memory.max").exists() for place in joined
        ):
            pytest.skip(
                "no memory cgroup can be made here: needs root and a cgroup file system that is writable"
            )
        yield joined, allowed
    finally:
        for place in reversed(made):
            place.rmdir()


def test_a_worker_in_a_nested_group_offers_what_the_groups_above_it_allow(
    real: tuple[list[Path], float],
) -> None:
    groups, allowed = real
    join = " && ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
    ended = subprocess.run(
        ["sh", "-c", f'{join} && exec "$0" "$@"', sys.executable, "-c", _ASK],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    memory_mb, cpus = ended.stdout.split()
    assert int(memory_mb) == 256
    assert float(cpus) == (allowed or len(os.sched_getaffinity(0)))


def test_what_is_declared_is_offered_and_this_process_offers_no_more_than_its_host_has() -> None:
    declared = WorkerOptions(memory_mb=7, cpus=3.5).resolved()
    assert (declared.memory_mb, declared.cpus) == (7, 3.5)
    assert 0 < usable_memory_mb() <= psutil.virtual_memory().total >> 20
    assert 0 < usable_cpus() <= len(os.sched_getaffinity(0))
