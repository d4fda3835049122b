"""How many CPUs this process may use: its affinity, and the quota of its container or systemd unit."""

import os
from pathlib import Path
from typing import Final

__all__ = ["usable_cpus"]

_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")


def usable_cpus() -> float:
    """The CPUs that this process may run on, or less if a quota of its cgroups (`CPUQuota`, `limits.cpu`) is less."""
    return min([len(os.sched_getaffinity(0)), *_quotas()])


def _quotas() -> list[float]:
    """In CPUs: those of the own cgroup and of all above it, which limit it too."""
    quotas = []
    for line in _text(_OWN_GROUPS).splitlines():
        # "0::/system.slice/redpoll.service", and in version 1 "4:cpu,cpuacct:/docker/0123". In a container of version 1
        # the path is that of the host, and the own cgroup is at the top.
        _, controllers, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            if not controllers:
                limit = _text(_GROUPS / group / "cpu.max").split()
            elif "cpu" in controllers.split(","):
                folder = _GROUPS / "cpu" / group
                limit = [_text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
            else:
                break
            # Without a quota it is "max", or -1 in version 1.
            if len(limit) == 2 and all(word.isdecimal() and int(word) > 0 for word in limit):
                quotas.append(int(limit[0]) / int(limit[1]))
    return quotas


def _text(path: Path) -> str:
    """The content of the file, or nothing if it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
