"""The memory limit of a container, from trees like those of /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvtier.runtime.tools import doctor
from sgl_kvtier.runtime.tools.container_memory import MemoryLimit, memory_limit

GIB = 1 << 30
NO_LIMIT_V1 = (1 << 63) - 4096


def group(folder: Path, **files: object) -> None:
    """A control group's folder with these files; `__` stands for a dot in a name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def limit(tmp_path: Path, own: str) -> MemoryLimit | None:
    """What a process whose groups are these would see."""
    (tmp_path / "own").write_text(own)
    return memory_limit(tmp_path / "cgroup", tmp_path / "own")


def test_a_limit_of_version_2_is_seen_less_what_is_in_use_and_cannot_be_given_back(tmp_path):
    group(
        tmp_path / "cgroup" / "pod" / "app",
        memory__max=8 * GIB,
        memory__current=3 * GIB,
        memory__stat=f"anon 5\ninactive_file {GIB}",
    )
    assert limit(tmp_path, "0::/pod/app\n") == MemoryLimit(8 * GIB, 6 * GIB)


def test_a_limit_of_version_1_is_seen(tmp_path):
    group(
        tmp_path / "cgroup" / "memory" / "docker" / "x",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"cache 1\ntotal_inactive_file {GIB // 2}",
    )
    own = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n"
    assert limit(tmp_path, own) == MemoryLimit(2 * GIB, 3 * GIB // 2)


@pytest.mark.parametrize("version", [1, 2])
def test_the_group_that_leaves_least_counts_of_those_around_a_process(tmp_path, version):
    root = tmp_path / "cgroup" if version == 2 else tmp_path / "cgroup" / "memory"
    most, used = (
        ("memory__max", "memory__current")
        if version == 2
        else ("memory__limit_in_bytes", "memory__usage_in_bytes")
    )
    group(root / "pod", **{most: 4 * GIB, used: 3 * GIB})
    group(root / "pod" / "app", **{most: 2 * GIB, used: 0})
    own = "0::/pod/app\n" if version == 2 else "7:memory:/pod/app\n"
    assert limit(tmp_path, own) == MemoryLimit(4 * GIB, GIB)


@pytest.mark.parametrize("path", ["/kubepods/pod1/c1", "/", "/../../elsewhere"])
def test_a_container_that_sees_only_its_own_group_sees_its_limit(tmp_path, path):
    group(tmp_path / "cgroup", memory__max=GIB, memory__current=0)
    assert limit(tmp_path, f"0::{path}\n") == MemoryLimit(GIB, GIB)


def test_a_limit_above_which_a_group_is_slowed_down_counts_too(tmp_path):
    group(tmp_path / "cgroup", memory__max="max", memory__high=3 * GIB, memory__current=GIB)
    assert limit(tmp_path, "0::/\n") == MemoryLimit(3 * GIB, 2 * GIB)


def test_memory_in_use_above_the_limit_leaves_nothing(tmp_path):
    group(tmp_path / "cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert limit(tmp_path, "0::/\n") == MemoryLimit(GIB, 0)


@pytest.mark.parametrize("own", ["0::/\n", "4:memory:/\n", "", "not a line\n"])
def test_no_limit_is_none(tmp_path, own):
    group(tmp_path / "cgroup", memory__max="max", memory__current=GIB)
    group(tmp_path / "cgroup" / "memory", memory__limit_in_bytes=NO_LIMIT_V1)
    assert limit(tmp_path, own) is None


def test_a_machine_without_control_groups_has_no_limit(tmp_path):
    assert memory_limit(tmp_path / "none", tmp_path / "none") is None


def test_a_damaged_file_is_no_limit(tmp_path):
    group(tmp_path / "cgroup", memory__max="\x00", memory__current="x", memory__stat="\n\n a")
    assert limit(tmp_path, "0::/\n") is None


def memory(tmp_path: Path, free_gib: int, container: MemoryLimit | None, *, cpu: bool):
    """Doctor's row on a machine with this much memory free."""
    kib = 1 << 20
    text = f"MemTotal: {32 * kib} kB\nMemAvailable: {free_gib * kib} kB\n"
    (tmp_path / "meminfo").write_text(text)
    (found,) = doctor._memory(tmp_path / "meminfo", cpu=cpu, container=container)
    return found


def test_doctor_says_what_the_container_leaves_and_not_what_the_machine_has(tmp_path):
    found = memory(tmp_path, 24, MemoryLimit(16 * GIB, 12 * GIB), cpu=False)
    assert (found.state, found.found) == (
        "ok",
        "12.0 GiB of the container's 16.0 GiB free (the machine has 24.0 GiB of 32.0 GiB free)",
    )
    assert "container" not in memory(tmp_path, 24, None, cpu=False).found
    assert "container" not in memory(tmp_path, 4, MemoryLimit(16 * GIB, 12 * GIB), cpu=True).found


@pytest.mark.parametrize(
    ("free_gib", "cpu", "state"),
    [(2, False, "fail"), (11, False, "ok"), (0, True, "fail"), (2, True, "warn"), (11, True, "ok")],
)
def test_doctor_fails_where_sglang_refuses_every_host_pool(tmp_path, free_gib, cpu, state):
    container = MemoryLimit(16 * GIB, free_gib * GIB)
    assert memory(tmp_path, 24, container, cpu=cpu).state == state
