"""Checks whether this machine carries the connections that it is meant to carry: `expected_connections`.

`redpoll serve` logs what won't carry them at its start, and `redpoll doctor` shows it too. Reads files under /proc and
/sys; changes nothing. Each function takes what it judges as arguments, so that the rules can be tested without such a
machine.
"""

from __future__ import annotations

import ipaddress
import math
import resource
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from redpoll.config.cgroups import usable_cpus, usable_memory
from redpoll.config.config import Settings
from redpoll.doctor.report import Finding, Verdict, ok, skipped, warning

__all__ = ["Machine", "capacity", "examine", "held_by_worker", "log_shortages", "this_machine"]

log = structlog.get_logger(__name__)

# What an idle connection takes of redpoll and of the kernel (bench/README.md), and the share of the memory that
# connections may take: Redis, bursts of unsent data and the system need the rest.
_BYTES_PER_CONNECTION: Final = 6_144
_MEMORY_SHARE: Final = 0.75
# 962,000 connections were seen on two CPUs.
_MAX_PER_CPU: Final = 500_000
# worker/main.py keeps these free: 5 % and a fixed number.
_DESCRIPTOR_SHARE: Final = 0.95
_RESERVED_DESCRIPTORS: Final = 64
# Of the kernel's table of connections.
_MAX_PER_ENTRY: Final = 2
# What the listening sockets ask for.
_BACKLOG: Final = 4_096
_SYSCTL_FILE: Final = "/etc/sysctl.d/redpoll.conf, then: sysctl --system"


class Machine(NamedTuple):
    """What a machine has. `files`: the hard limit of open files per process. `nr_open` and `file_max`: the most that
    it may be set to, and the most of all processes. `ports`: the range for outgoing connections. `tcp_pages`: the three
    values of tcp_mem. `table_entries`: of the table in which the kernel looks for the connection of each packet.
    `memory_bytes` and `cpus` are those that this process may use. 0 where something isn't known."""

    files: int
    nr_open: int
    file_max: int
    somaxconn: int
    ports: tuple[int, int]
    tcp_pages: tuple[int, int, int]
    table_entries: int
    memory_bytes: int
    cpus: float


def examine(settings: Settings, machine: Machine) -> list[Finding]:
    """The checks against `expected_connections`. Without it there is one finding, which is skipped."""
    count = settings.expected_connections
    workers = settings.workers or max(1, math.floor(machine.cpus))
    if not count:
        room = f"there is room for about {capacity(machine, workers):,} connections"
        return [skipped("Capacity", f"{room}; set expected_connections to check against a number")]
    return [
        descriptors(count, workers, machine),
        backlog(count, machine.somaxconn),
        ports(count, machine.ports, settings),
        tcp_memory(count, machine.tcp_pages),
        tcp_table(count, machine.table_entries),
        memory(count, machine.memory_bytes),
        cpus(count, workers, machine.cpus),
    ]


def log_shortages(settings: Settings) -> None:
    """Logs a warning for each finding that isn't good enough for `expected_connections`."""
    if not settings.expected_connections:
        return
    for finding in examine(settings, this_machine()):
        if finding.verdict is not Verdict.OK:
            log.warning(
                "machine too small",
                check=finding.check,
                seen=finding.seen,
                cause=finding.cause,
                remedy="; ".join(finding.remedy),
            )


def held_by_worker(files: int) -> int:
    """The number of connections that a worker takes with this limit of open files."""
    return max(0, math.floor(files * _DESCRIPTOR_SHARE) - _RESERVED_DESCRIPTORS)


def capacity(machine: Machine, workers: int) -> int:
    """About how many connections the machine carries, by its descriptors, memory and CPUs."""
    by_files = held_by_worker(machine.files) * workers
    by_memory = math.floor(machine.memory_bytes * _MEMORY_SHARE / _BYTES_PER_CONNECTION)
    return min(by_files, by_memory, math.floor(machine.cpus * _MAX_PER_CPU))


def descriptors(count: int, workers: int, machine: Machine) -> Finding:
    """Each connection takes one descriptor of its worker. The kernel spreads connections unevenly: a tenth more."""
    per_worker = math.ceil(count / workers * (1.1 if workers > 1 else 1.0))
    needed = math.ceil((per_worker + _RESERVED_DESCRIPTORS + 1) / _DESCRIPTOR_SHARE)
    seen = f"{machine.files:,} open files per process; {workers} workers need {needed:,} each for {count:,} connections"
    remedy = []
    if needed > machine.nr_open > 0:
        remedy.append(f"fs.nr_open = {needed} in {_SYSCTL_FILE}")
    if needed > machine.files:
        remedy.append(f"systemd: LimitNOFILE={needed} in the unit; shell: ulimit -Hn {needed} as root")
    if 0 < machine.file_max < count + 100_000:
        remedy.append(f"fs.file-max = {count + 100_000} in {_SYSCTL_FILE}")
    if remedy:
        return warning("Descriptors", seen, "workers refuse connections when their descriptors are used up", *remedy)
    return ok("Descriptors", seen)


def backlog(count: int, somaxconn: int) -> Finding:
    wanted = min(_BACKLOG, count)
    seen = f"net.core.somaxconn is {somaxconn}"
    if somaxconn < wanted:
        return warning(
            "Backlog",
            seen,
            "when many clients connect at once, the kernel drops connections",
            f"net.core.somaxconn = {_BACKLOG} in {_SYSCTL_FILE}",
        )
    return ok("Backlog", seen)


def ports(count: int, port_range: tuple[int, int], settings: Settings) -> Finding:
    """Clients that connect directly bring their own ports. A proxy needs one of its machine's ports for each
    connection to one address and port of ours."""
    first, last = port_range
    available = max(0, last - first + 1)
    proxies = _proxies(settings)
    if proxies == 0:
        return ok("Ports", "clients connect directly, or trusted_proxies are whole networks: no port of ours is needed")
    seen = f"net.ipv4.ip_local_port_range is {first} {last}: {available:,} connections from each of {proxies} proxies"
    if available * proxies < count:
        return warning(
            "Ports",
            f"{seen}, fewer than {count:,}",
            "a proxy can't open more connections to one address and port",
            f"on the proxies: net.ipv4.ip_local_port_range = 1024 65535 in {_SYSCTL_FILE}",
            "if that isn't enough: more source addresses for the proxies (nginx: proxy_bind; HAProxy: source), or more "
            "addresses or machines behind them",
        )
    return ok("Ports", seen)


def tcp_memory(count: int, pages: tuple[int, int, int]) -> Finding:
    """One page for each connection: that is what a broadcast to all takes while it is on its way."""
    _, pressure, _ = pages
    seen = f"net.ipv4.tcp_mem is {' '.join(map(str, pages))} pages"
    if 0 < pressure < count:
        wanted = f"{count} {count * 3 // 2} {count * 2}"
        return warning(
            "TCP memory",
            f"{seen}; a broadcast to {count:,} connections takes about {count:,}",
            "above the second value the kernel shrinks the buffers of all connections, above the third it drops data",
            f"net.ipv4.tcp_mem = {wanted} in {_SYSCTL_FILE}",
        )
    return ok("TCP memory", seen)


def tcp_table(count: int, entries: int) -> Finding:
    """The kernel sizes it by the machine's memory, and only a boot parameter changes it. With eight connections to an
    entry, looking for them took 29 % of the time of a broadcast (bench/load/million.py)."""
    if entries == 0:
        return ok("TCP table", "its size isn't known (Linux tells it since 6.2)")
    seen = f"net.ipv4.tcp_ehash_entries is {entries:,}"
    if count > _MAX_PER_ENTRY * entries:
        return warning(
            "TCP table",
            f"{seen}; {count / entries:.1f} connections for each entry",
            "the kernel looks for the connection of each packet among all of an entry: broadcasts take longer",
            f"boot Linux with thash_entries={1 << (count - 1).bit_length()} "
            "(Debian: GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub)",
        )
    return ok("TCP table", seen)


def memory(count: int, total_bytes: int) -> Finding:
    needed = count * _BYTES_PER_CONNECTION
    seen = f"{total_bytes / 2**30:.1f} GiB; {count:,} idle connections take about {needed / 2**30:.1f} GiB"
    if needed > total_bytes * _MEMORY_SHARE:
        return warning(
            "Memory",
            seen,
            "the kernel kills a worker or Redis when memory runs out",
            f"{needed / _MEMORY_SHARE / 2**30:.1f} GiB of memory (in a container or systemd unit: its limit), or "
            "fewer connections on this machine",
        )
    return ok("Memory", seen)


def cpus(count: int, workers: int, available: float) -> Finding:
    seen = f"{available:g} CPUs, {workers} workers"
    if count > available * _MAX_PER_CPU:
        return warning(
            "CPUs",
            f"{seen}; {count / available:,.0f} connections for each",
            f"more than {_MAX_PER_CPU:,} connections per CPU were not tried: connects and broadcasts take long",
            f"{math.ceil(count / _MAX_PER_CPU)} CPUs (in a container or systemd unit: its limit), or fewer connections",
        )
    if workers > math.ceil(available):
        return warning(
            "CPUs", seen, "more workers than CPUs share them and gain nothing", "workers = 0 takes one worker per CPU"
        )
    return ok("CPUs", seen)


def _proxies(settings: Settings) -> int:
    """The number of proxy addresses through which all connections come; 0 if it isn't known or there is none."""
    networks = [ipaddress.ip_network(text, strict=False) for text in settings.trusted_proxies]
    if networks:
        return 0 if any(network.num_addresses > 1 for network in networks) else len(networks)
    try:
        # Only this machine can connect.
        return int(ipaddress.ip_address(settings.host).is_loopback)
    except ValueError:
        return int(settings.host == "localhost")


def this_machine() -> Machine:
    first, last = (*_numbers("/proc/sys/net/ipv4/ip_local_port_range"), 0, 0)[:2]
    low, pressure, high = (*_numbers("/proc/sys/net/ipv4/tcp_mem"), 0, 0, 0)[:3]
    return Machine(
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        nr_open=_number("/proc/sys/fs/nr_open"),
        file_max=_number("/proc/sys/fs/file-max"),
        somaxconn=_number("/proc/sys/net/core/somaxconn"),
        ports=(first, last),
        tcp_pages=(low, pressure, high),
        # Below 0 where a network namespace shares that of the machine.
        table_entries=abs(_number("/proc/sys/net/ipv4/tcp_ehash_entries")),
        memory_bytes=usable_memory(),
        cpus=usable_cpus(),
    )


def _number(path: str) -> int:
    return next(iter(_numbers(path)), 0)


def _numbers(path: str) -> tuple[int, ...]:
    """The numbers in a file of the kernel; none if it can't be read or says `max`."""
    try:
        return tuple(int(word) for word in Path(path).read_text().split())
    except (OSError, ValueError):
        return ()
