"""Checks this machine and these settings: limits of the kernel, memory, disk, clock, certificate, Redis, versions.

Reads files under /proc and asks Redis, where one key stays for a second; changes nothing else. Each function takes what
it judges as arguments, so that the rules can be tested without such a machine.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import platform
import resource
import shlex
import shutil
import ssl
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import redis.asyncio
from redis.exceptions import NoPermissionError, RedisError
from structlog.testing import capture_logs

from redpoll import __version__
from redpoll.cluster.redis import check
from redpoll.cluster.redis.cluster_link import open_link
from redpoll.cluster.redis.keys import Keys
from redpoll.cluster.redis.link import LinkDown
from redpoll.cluster.redis.sentinels import Sentinels
from redpoll.config import certificate_files
from redpoll.config.certificate import PairError
from redpoll.config.certificate_files import ServerCertificate
from redpoll.config.config import Settings
from redpoll.config.redis_url import RedisUrl
from redpoll.config.reloading import uses_tls
from redpoll.doctor import capacity, sign_on
from redpoll.doctor.report import Finding, failed, ok, skipped, warning
from redpoll.host import datafolder, embedded

__all__ = ["examine"]

_REDIS_TIMEOUT_S: Final = 5.0
_MIN_REDIS: Final = (7, 0)
_MIN_FILES: Final = 65_536
_MIN_BACKLOG: Final = 4096
_MIN_FREE_BYTES: Final = 1 << 30
# certbot renews 30 days before the end.
_MIN_DAYS_LEFT: Final = 14
# timex(7): adjtimex returns this state while the clock isn't synchronised.
_TIME_ERROR: Final = 5
_PACKAGES: Final = ("uvloop", "aiohttp", "hiredis", "msgspec", "sqlalchemy")


async def examine(settings: Settings) -> list[Finding]:
    """All checks, in the order in which a server needs what they check."""
    folder = Path(settings.data_dir)
    here = capacity.this_machine()
    return [
        versions(),
        files(*resource.getrlimit(resource.RLIMIT_NOFILE), _int("/proc/sys/fs/nr_open")),
        backlog(_int("/proc/sys/net/core/somaxconn")),
        memory(here.memory_bytes, math.ceil(here.cpus), settings.workers),
        disk(folder, shutil.disk_usage(_existing(folder)).free),
        clock(_clock_state()),
        *certificates(settings, time.time()),
        *await redis_server(settings),
        await sign_on.examine(settings),
        *capacity.examine(settings, here),
    ]


def versions() -> Finding:
    versions = [f"redpoll {__version__}", f"Python {platform.python_version()}", f"Linux {platform.release()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return failed("Versions", f"{package} is missing", "redpoll isn't installed whole", "pip install redpoll")
    versions.append(ssl.OPENSSL_VERSION.rsplit("  ", 1)[0])
    return ok("Versions", ", ".join(versions))


def files(soft: int, hard: int, nr_open: int) -> Finding:
    """`redpoll serve` raises its limit to `hard`; each connection takes one descriptor. `nr_open` is fs.nr_open."""
    seen = f"{hard} open files per process (fs.nr_open {nr_open})"
    if hard < _MIN_FILES:
        return warning(
            "Descriptors",
            seen,
            f"a worker holds {capacity.held_by_worker(hard)} connections, then refuses new ones",
            "systemd: LimitNOFILE=1048576 in the unit; shell: ulimit -Hn 1048576 as root",
        )
    return ok("Descriptors", seen)


def backlog(somaxconn: int) -> Finding:
    if somaxconn < _MIN_BACKLOG:
        return warning(
            "Backlog",
            f"net.core.somaxconn is {somaxconn}",
            "when many clients connect at once, the kernel drops connections",
            f"sysctl -w net.core.somaxconn={_MIN_BACKLOG}, and the same line in /etc/sysctl.d/redpoll.conf",
        )
    return ok("Backlog", f"net.core.somaxconn is {somaxconn}")


def memory(total_bytes: int, cpus: int, workers: int) -> Finding:
    """A connection takes about 2 kB of redpoll and 4 kB of the kernel (bench/README.md)."""
    count = workers or cpus
    seen = f"{total_bytes / 2**30:.1f} GiB, {cpus} CPUs, {count} workers"
    if count > cpus:
        return warning(
            "Machine",
            seen,
            "more workers than CPUs share them and gain nothing",
            "workers = 0 takes one worker per CPU",
        )
    return ok("Machine", f"{seen}; room for about {total_bytes // 2 // 6_144:,} idle connections in half of the memory")


def disk(folder: Path, free_bytes: int) -> Finding:
    seen = f"{free_bytes / 2**30:.1f} GiB free in {folder}"
    place = _existing(folder)
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        return failed("Disk", f"{folder} isn't writable", *_why_not_writable(folder.absolute(), place))
    if free_bytes < _MIN_FREE_BYTES:
        return warning(
            "Disk", seen, "records and the event log need room", "free some, or set data_dir to another disk"
        )
    return ok("Disk", seen)


def _why_not_writable(folder: Path, place: Path) -> tuple[str, str]:
    """The cause and the remedy. `place` is the folder, or its nearest ancestor that exists."""
    owner, me = place.stat().st_uid, os.geteuid()
    name = datafolder.name_of(owner)
    if me in (owner, 0):
        return f"the mode of {place}, or its file system, forbids it", f"chmod u+rwx {shlex.quote(str(place))}"
    if place == folder:
        # Not `chown`: the server that uses this folder could no longer open it.
        users = " or as ".join(dict.fromkeys((name, "root")))
        return f"it belongs to {name}: only a server of that user can use it", f"run redpoll doctor as {users}"
    if not os.access(place, os.X_OK, effective_ids=True):
        return (
            f"{place} belongs to {name}, and this user may not look into it",
            "run redpoll doctor as the server's user or as root",
        )
    return (
        f"it doesn't exist, and only {name} can create it in {place}",
        f"as root, if a server of this user needs it: install -d -m 700 -o {me} {shlex.quote(str(folder))}",
    )


def clock(state: int | None) -> Finding:
    """`state` is what adjtimex(2) returned, None where it can't be asked."""
    if state is None:
        return skipped("Clock", "the kernel can't be asked whether the clock is synchronised")
    if state == _TIME_ERROR:
        return warning(
            "Clock",
            "the clock isn't synchronised",
            "signed requests are refused when the clocks of two machines differ by more than 600 s",
            "timedatectl set-ntp true",
        )
    return ok("Clock", "synchronised")


def certificates(settings: Settings, now_s: float) -> list[Finding]:
    """One for each certificate, for each file that isn't used, and for the way in which TLS is done."""
    if not uses_tls(settings):
        return [skipped("Certificate", "no tls_port is set: TLS ends in a proxy, or isn't used")]
    try:
        loaded = certificate_files.find(settings)
    except PairError as error:
        return [failed("Certificate", str(error), "redpoll can't serve TLS with these files")]
    findings = [_certificate(certificate, now_s) for certificate in loaded.certificates]
    findings += [warning("Certificate", note, "the file does nothing", "correct or remove it") for note in loaded.notes]
    host = (urlsplit(settings.public_url).hostname or "").lower()
    if _is_unknown(host, loaded.certificates):
        findings.append(
            warning(
                "Certificate",
                f"no certificate is for {host}, the host of public_url",
                "clients that connect to this host refuse the certificate that they get",
                f"add a certificate with the name {host} to tls_cert, if TLS doesn't end in a proxy",
            )
        )
    # A wheel for other systems has no engine, and no server needs this there.
    from redpoll import _openssl

    reason = _openssl.missing()
    if reason is not None:
        findings.append(
            warning(
                "TLS",
                reason,
                "workers use Python's ssl module for TLS: more memory and processor time, no OCSP staples, and tickets "
                "of one worker only",
                "run redpoll with a Python that loads the system's OpenSSL 3, such as Debian's own",
            )
        )
    return findings


def _certificate(certificate: ServerCertificate, now_s: float) -> Finding:
    facts = certificate.facts
    names = [*facts.names, *(str(ip_address(address)) for address in facts.addresses if len(address) in (4, 16))]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "no name"
    left_days = (facts.not_after_s - now_s) / 86_400
    until = datetime.fromtimestamp(facts.not_after_s, UTC).date()
    seen = f"{certificate.place} and its key belong together: {facts.kind} for {shown}, valid until {until}"
    if certificate.staple:
        seen += ", with an OCSP response"
    renew = "renew it, then: redpoll reload"
    if left_days <= 0:
        return failed("Certificate", seen, "it has expired: clients refuse it", renew)
    if facts.not_before_s > now_s:
        return failed("Certificate", seen, "it isn't valid yet, or this machine's clock is slow", renew)
    if not names:
        return failed(
            "Certificate",
            seen,
            "it names no host: clients refuse it",
            "issue one with the host's name",
        )
    if left_days < _MIN_DAYS_LEFT:
        return warning("Certificate", seen, f"it expires in {left_days:.0f} days", renew)
    return ok("Certificate", seen)


def _is_unknown(host: str, certificates: list[ServerCertificate]) -> bool:
    if not host:
        return False
    try:
        address = ip_address(host).packed
    except ValueError:
        return not any(certificate.facts.is_for(host) for certificate in certificates)
    return not any(address in certificate.facts.addresses for certificate in certificates)


async def redis_server(settings: Settings) -> list[Finding]:
    """Connects to `redis_url`, or looks for a binary that `redpoll serve` could start."""
    if not settings.redis_url:
        try:
            binary = await asyncio.to_thread(embedded.find_binary, Path(settings.data_dir) / "redis")
        except embedded.RedisMissing as error:
            return [failed("Redis", "none found to start", error.fault, *error.remedies)]
        return [ok("Redis", f"embedded: {binary}")]
    url = RedisUrl.parse(settings.full_redis_url())
    place = url.place
    try:
        addresses = await _addresses(url)
    except OSError as error:
        return [failed("Redis", f"{place}: {error}", "Sentinels don't run there, or don't know this service")]
    replies = await asyncio.gather(*(_ask(url, *address) for address in addresses))
    answers = [reply for reply in replies if isinstance(reply, _Answer)]
    # Only a cluster has several: it works while a node is away.
    silent = [
        (address, reply) for address, reply in zip(addresses, replies, strict=True) if isinstance(reply, Exception)
    ]
    if not answers:
        _, fault = silent[0]
        return [
            failed(
                "Redis",
                f"{place}: {type(fault).__name__}",
                "Redis doesn't run there, a firewall is in between, user and password are wrong, or only one side uses "
                "TLS",
                f"from this machine: redis-cli -u REDIS_URL ping    (at {place})",
            )
        ]
    findings = [
        warning(
            "Redis",
            f"{host}:{port}: {type(fault).__name__}",
            "this node of the cluster is away, or a firewall is in between; others answer",
            f"from this machine: redis-cli -h {host} -p {port} ping, or take it out of redis_url",
        )
        for (host, port), fault in silent
    ]
    info, took_ms = answers[0]
    if "redis_version" not in info:
        seen = f"answers at {place}, {took_ms:.1f} ms; its user may not ask for the version"
        return findings + await _fit_to_serve(settings, seen)
    name = "Valkey" if "valkey_version" in info else "Redis"
    version_text = str(info.get("valkey_version") or info["redis_version"])
    if name == "Redis" and tuple(int(part) for part in version_text.split(".")[:2]) < _MIN_REDIS:
        seen = f"{name} {version_text} at {place}"
        return [*findings, failed("Redis", seen, "scripts need Redis 7.0 or newer", "upgrade Redis")]
    return findings + await _fit_to_serve(settings, f"{name} {version_text} at {place}, {took_ms:.1f} ms")


async def _fit_to_serve(settings: Settings, seen: str) -> list[Finding]:
    """Connects as `redpoll serve` does, and asks what it asks before it admits clients. `seen` says what answers."""
    link = open_link(settings.full_redis_url())
    # Its log says why it doesn't connect, and must not be printed between the findings.
    with capture_logs() as lines:
        link.start()
        try:
            async with asyncio.timeout(_REDIS_TIMEOUT_S):
                await link.wait_up()
                faults, warnings = await check.examine(link, Keys(settings.redis_prefix, sharded=link.sharded))
        except (TimeoutError, LinkDown):
            reasons = [str(line["reason"]) for line in lines if "reason" in line]
            why = reasons[-1] if reasons else f"no answer within {_REDIS_TIMEOUT_S:g} s"
            return [failed("Redis", f"{seen}: {why}", "redpoll serve can't use this server, although it answers")]
        finally:
            await link.close()
    findings = [failed("Redis", f"{seen}: {fault}", "redpoll serve doesn't start with it") for fault in faults]
    findings += [warning("Redis", f"{seen}: {text}", "redpoll serve works with it, at a risk") for text in warnings]
    return findings or [ok("Redis", seen)]


async def _addresses(url: RedisUrl) -> list[tuple[str, int]]:
    """Whom to ask; a Unix socket has no address. Raises OSError if no Sentinel names the master."""
    if not url.service:
        return list(url.hosts) or [("", 0)]
    sentinels = Sentinels(url)
    try:
        return [await sentinels.master()]
    finally:
        await sentinels.close()


class _Answer(NamedTuple):
    """`info` is empty if the user may not ask for it."""

    info: dict[str, Any]
    took_ms: float


async def _ask(url: RedisUrl, host: str, port: int) -> _Answer | Exception:
    """What one Redis says of itself, or why it doesn't answer."""
    began = time.perf_counter()
    client = redis.asyncio.Redis(
        host=host,
        port=port,
        unix_socket_path=url.path,
        username=url.username,
        password=url.password,
        db=url.database,
        socket_timeout=_REDIS_TIMEOUT_S,
        socket_connect_timeout=_REDIS_TIMEOUT_S,
        ssl=url.tls,
        ssl_ca_certs=url.ca_file or None,
        ssl_certfile=url.cert_file or None,
        ssl_keyfile=url.key_file or None,
    )
    try:
        info = await client.info("server")
    except NoPermissionError:
        info = {}
    except (RedisError, OSError) as error:
        return error
    finally:
        await client.aclose()
    return _Answer(info, (time.perf_counter() - began) * 1000)


def _existing(folder: Path) -> Path:
    """The folder, or its nearest ancestor that exists and that this user can see."""
    folder = folder.absolute()
    # Not `Path.exists`, which raises PermissionError before Python 3.14.
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def _int(path: str) -> int:
    try:
        return int(Path(path).read_text().split()[0])
    except (OSError, ValueError):
        return 0


def _clock_state() -> int | None:
    """adjtimex(2) with modes 0 reads only. struct timex has 208 bytes on 64-bit Linux."""
    try:
        buffer = ctypes.create_string_buffer(512)
        state = int(ctypes.CDLL(None).adjtimex(buffer))
    except (OSError, AttributeError):
        return None
    return state if state >= 0 else None
