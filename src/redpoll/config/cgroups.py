"""How many CPUs and how much memory this process may use: what the machine has, or less if its container or systemd
unit has a limit."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["usable_cpus", "usable_memory"]

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")


def usable_cpus() -> float:
    """The CPUs that this process may run on, or less if a quota of its cgroups (`CPUQuota`, `limits.cpu`) is less."""
    limits = _limits("cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    # Only Linux has this one.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cpus, *(quota / period for quota, period in limits)])


def usable_memory() -> int:
    """The machine's memory in bytes, or less if a limit of its cgroups (`MemoryMax`, `limits.memory`) is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for (limit,) in _limits("memory", "memory.max", "memory.limit_in_bytes"))])


def _limits(controller: str, file: str, *files_of_version_1: str) -> Iterator[list[int]]:
    """The numbers in these files of the own cgroup and of all above it, which limit it too. Nothing of a cgroup without
    a limit."""
    for line in _text(_OWN_GROUPS).splitlines():
        # "0::/system.slice/redpoll.service", and in version 1 "4:cpu,cpuacct:/docker/0123". In a container of version 1
        # the path is that of the host, and the own cgroup is at the top.
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = _GROUPS, [file]
        elif controller in controllers.split(","):
            top, names = _GROUPS / controller, list(files_of_version_1)
        else:
            continue
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            texts = [_text(top / group / name) for name in names]
            words = " ".join(texts).split()
            # Without a limit a word is "max", or -1 in version 1, where memory then has a number above any machine's.
            if all(texts) and all(word.isdecimal() and int(word) > 0 for word in words):
                yield [int(word) for word in words]


def _text(path: Path) -> str:
    """The content of the file, or nothing if it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
