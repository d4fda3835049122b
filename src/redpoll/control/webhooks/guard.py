"""Which addresses a delivery may go to, and the two doors where that is asked (failures.md row 27).

A URL is an app owner's, and names whatever it likes: this machine, its neighbours, a cloud's metadata. So every address
that a name resolves to is checked when it is connected to, and the connection goes to the very address that was
checked: a name that resolves differently a moment later gains nothing. The resolver sees all addresses of a name, the
socket factory each one that is about to be connected to, whatever it was written as.

Knows nothing of HTTP, of certificates or of what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final

from aiohttp.abc import AbstractResolver, ResolveResult

__all__ = ["AddressRefused", "Guard", "Lookup", "literal_address", "look_up"]

# Answers the addresses of a host name, as text. Raises OSError where there are none.
Lookup = Callable[[str], Awaitable[Sequence[str]]]

# A lookup holds a thread until the system's resolver gives up, half a minute for a name whose servers are silent.
_MAX_LOOKUPS: Final = 64
# The kernel doubles it.
_RECEIVED_BYTES: Final = 8_192

# IANA's registries of special-purpose addresses, and what clouds answer at. The first line that holds an address names
# it. `ipaddress.is_global` alone would let NAT64, 6to4 and multicast through (dependencies.md 6).
_SPECIAL: Final = tuple(
    (ip_network(network), what)
    for network, what in (
        ("0.0.0.0/32", "the unspecified address"),
        ("0.0.0.0/8", "an address of this network"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "an address of a carrier's network (CGNAT)"),
        ("127.0.0.0/8", "a loopback address"),
        ("169.254.169.254/32", "a cloud's metadata address"),
        ("169.254.0.0/16", "a link-local address"),
        # Azure's metadata and host agent, the one of them that looks public.
        ("168.63.129.16/32", "a cloud's metadata address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "a reserved address"),
        ("192.0.2.0/24", "an address for documentation"),
        ("192.31.196.0/24", "a reserved address"),
        ("192.52.193.0/24", "a reserved address"),
        ("192.88.99.0/24", "a 6to4 relay's address"),
        ("192.168.0.0/16", "a private address"),
        ("192.175.48.0/24", "a reserved address"),
        ("198.18.0.0/15", "an address for benchmarks"),
        ("198.51.100.0/24", "an address for documentation"),
        ("203.0.113.0/24", "an address for documentation"),
        ("224.0.0.0/4", "a multicast address"),
        ("255.255.255.255/32", "the broadcast address"),
        ("240.0.0.0/4", "a reserved address"),
        ("::/128", "the unspecified address"),
        ("::1/128", "a loopback address"),
        ("::ffff:0:0/96", "an IPv4 address written as IPv6"),
        ("::ffff:0:0:0/96", "a translated IPv4 address"),
        ("::/96", "an IPv4 address written as IPv6"),
        ("64:ff9b::/96", "a NAT64 address"),
        ("64:ff9b:1::/48", "a NAT64 address"),
        ("100::/64", "a discarded address"),
        ("2001::/32", "a Teredo address"),
        ("2001:db8::/32", "an address for documentation"),
        ("2001::/23", "a reserved address"),
        ("2002::/16", "a 6to4 address"),
        ("2620:4f:8000::/48", "a reserved address"),
        ("3fff::/20", "an address for documentation"),
        ("fd00:ec2::254/128", "a cloud's metadata address"),
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a site-local address"),
        ("ff00::/8", "a multicast address"),
    )
)
# What the internet routes in IPv6 (RFC 4291 2.4); all else is reserved until IANA says otherwise.
_GLOBAL_V6: Final = IPv6Network("2000::/3")


class AddressRefused(OSError):
    """No delivery goes to that address. An OSError, since it stands where connecting would have failed."""

    def __init__(self, host: str, address: str, what: str) -> None:
        super().__init__(host, address, what)
        self.host = host
        self.address = address
        self.what = what

    def __str__(self) -> str:
        named = "" if self.host == self.address else f"{self.address}, "
        return f"{self.host} is {named}{self.what}; deliveries go to public addresses only"


class Guard:
    """Says no to every address that isn't public, except in `allowed`, the operator's networks
    (`webhook_allow_addresses`, for tests and intranets).

    Raises ValueError for what is no network.
    """

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._allowed = [ip_network(each) for each in allowed]

    def fault(self, address: str) -> str | None:
        """What kind of address it is that nothing is sent to; None for one that deliveries may go to.

        An allowed IPv4 network doesn't hold the IPv6 forms of its addresses: nobody writes them by mistake.
        """
        try:
            found = ip_address(address)
        except ValueError:
            return "no address"
        if isinstance(found, IPv6Address) and found.scope_id is not None:
            # A zone chooses an interface and is no part of the address.
            found = IPv6Address(int(found))
        if any(_holds(network, found) for network in self._allowed):
            return None
        for network, what in _SPECIAL:
            if _holds(network, found):
                return what
        if not found.is_global or (isinstance(found, IPv6Address) and found not in _GLOBAL_V6):
            return "a reserved address"
        return None

    def check(self, host: str, addresses: Sequence[str]) -> None:
        """Raises AddressRefused unless deliveries may go to every one of the addresses that `host` stands for.

        One bad address among good ones refuses all: which of them is connected to would be luck.
        """
        for address in addresses:
            what = self.fault(address)
            if what is not None:
                raise AddressRefused(host, address, what)

    def open_socket(self, info: tuple[Any, ...]) -> socket.socket:
        """The last door: aiohttp's `socket_factory`, given what is about to be connected to, as of getaddrinfo."""
        family, kind, protocol, _, address = info
        self.check(address[0], (address[0],))
        opened = socket.socket(family, kind, protocol)
        # Receivers answer little. One that floods us with heads has us parse this much in one go, not 256 KiB.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)
        return opened

    def resolver(self, look_up: Lookup) -> AbstractResolver:
        """The first door, for names: aiohttp asks no resolver for what is written as an address."""
        return _Resolver(self, look_up)


class _Resolver(AbstractResolver):
    def __init__(self, guard: Guard, look_up: Lookup) -> None:
        self._guard = guard
        self._look_up = look_up
        self._free = asyncio.Semaphore(_MAX_LOOKUPS)
        self._under_way: dict[str, asyncio.Task[Sequence[str]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """All who want a name share one lookup, which outlives those whose time is over. No answer is kept longer:
        connections are, and what was checked is what they go to."""
        found = self._under_way.get(host)
        if found is None:
            found = self._under_way[host] = asyncio.create_task(self._limited(host), name=f"lookup {host}")
            found.add_done_callback(lambda task: self._done(host, task))
        addresses = await asyncio.shield(found)
        self._guard.check(host, addresses)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def _limited(self, host: str) -> Sequence[str]:
        async with self._free:
            return await self._look_up(host)

    def _done(self, host: str, task: asyncio.Task[Sequence[str]]) -> None:
        del self._under_way[host]
        if not task.cancelled():
            # Whoever asked may be gone, and nobody else is to hear of it.
            task.exception()

    async def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()


async def look_up(host: str) -> list[str]:
    """All addresses of a name, by the system's resolver. Raises socket.gaierror.

    Each in a thread of its own: names whose servers are silent would fill uvloop's pool of four and stop everybody
    else's. A daemon, so that none of them holds up the end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[str]] = loop.create_future()

    def settle(addresses: list[str], error: OSError | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(addresses)
        else:
            done.set_exception(error)

    def ask() -> None:
        addresses: list[str] = []
        error: OSError | None = None
        try:
            for _, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                addresses.append(_text(address))
        except OSError as fault:
            error = fault
        except UnicodeError:
            error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(settle, addresses, error)

    threading.Thread(target=ask, name=f"lookup {host}", daemon=True).start()
    return await done


def literal_address(host: str) -> str | None:
    """The address that a URL's host is, in any form that the system's resolver takes for one (`127.1`, `0x7f000001`,
    `2130706433`); None for a name."""
    with contextlib.suppress(ValueError):
        return str(ip_address(host))
    with contextlib.suppress(OSError, UnicodeError):
        return str(IPv4Address(socket.inet_aton(host.rstrip("."))))
    return None


def _holds(network: IPv4Network | IPv6Network, address: IPv4Address | IPv6Address) -> bool:
    return network.version == address.version and address in network


def _text(address: Sequence[Any]) -> str:
    """The address of a sockaddr, with its zone where it needs one."""
    host: str = address[0]
    return f"{host}%{address[3]}" if len(address) > 3 and address[3] and "%" not in host else host
