"""The CPUs and the memory that this process may use, from sample files of cgroups."""

import os

import pytest

from redpoll.config import cgroups
from redpoll.config.config import load


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes 64 CPUs, 64 GiB and these files: `own` is /proc/self/cgroup, the others are below /sys/fs/cgroup."""

    def make(own: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "own").write_text(own)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
        monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 << 20}.__getitem__)
        monkeypatch.setattr(cgroups, "_GROUPS", tmp_path / "groups")
        monkeypatch.setattr(cgroups, "_OWN_GROUPS", tmp_path / "own")

    return make


UNIT = "0::/system.slice/redpoll.service\n"
VERSION_1 = "5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n1:name=systemd:/docker/0123\n"
LOWER_OF_PARENTS = {
    "system.slice/cpu.max": "200000 100000\n",
    "system.slice/redpoll.service/cpu.max": "400000 100000\n",
}


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {}, 64),
        ("0::/\n", {"cpu.max": "10000000 100000\n"}, 64),
        (UNIT, {"system.slice/redpoll.service/cpu.max": "50000 100000\n"}, 0.5),
        (UNIT, LOWER_OF_PARENTS, 2),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ("", {"cpu.max": "150000 100000\n"}, 64),
    ],
    ids=[
        "container",
        "container without a quota",
        "no file",
        "quota above the machine",
        "unit",
        "slice of the unit",
        "version 1",
        "version 1 without a quota",
        "no cgroups",
    ],
)
def test_the_lowest_quota_of_the_own_cgroups_counts(machine, own, files, expected):
    machine(own, files)
    assert cgroups.usable_cpus() == expected


GIB = 1 << 30
MEMORY_OF_PARENT = {
    "system.slice/memory.max": f"{2 * GIB}\n",
    "system.slice/redpoll.service/memory.max": f"{4 * GIB}\n",
}


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"memory.max": f"{GIB}\n"}, GIB),
        ("0::/\n", {"memory.max": "max\n"}, 64 * GIB),
        ("0::/\n", {}, 64 * GIB),
        ("0::/\n", {"memory.max": f"{128 * GIB}\n"}, 64 * GIB),
        (UNIT, {"system.slice/redpoll.service/memory.max": f"{GIB}\n"}, GIB),
        (UNIT, MEMORY_OF_PARENT, 2 * GIB),
        (VERSION_1, {"memory/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        (VERSION_1, {"memory/docker/0123/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        (VERSION_1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64 * GIB),
        ("", {"memory.max": f"{GIB}\n"}, 64 * GIB),
    ],
    ids=[
        "container",
        "container without a limit",
        "no file",
        "limit above the machine",
        "unit",
        "slice of the unit",
        "version 1 in a container",
        "version 1 seen from the host",
        "version 1 without a limit",
        "no cgroups",
    ],
)
def test_the_lowest_memory_limit_of_the_own_cgroups_counts(machine, own, files, expected):
    machine(own, files)
    assert cgroups.usable_memory() == expected


@pytest.mark.parametrize(("quota", "expected"), [("50000", 1), ("150000", 2), ("max", 64)])
def test_there_is_a_worker_for_each_cpu_of_the_quota(machine, quota, expected):
    machine("0::/\n", {"cpu.max": f"{quota} 100000\n"})
    assert load({}, {})[0].workers == expected
    assert load({}, {"REDPOLL_WORKERS": "0"})[0].workers == expected
    assert load({}, {"REDPOLL_WORKERS": "5"})[0].workers == 5
