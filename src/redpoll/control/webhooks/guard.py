"""The SSRF guard: deliveries go to public addresses of other machines only.

App owners choose webhook URLs, and a URL could name this machine, its neighbours or a cloud's metadata service. This
machine's own public addresses are refused too: packets to them don't pass the firewall in front of the machine. The
guard checks addresses at two points. The resolver (client.py) refuses a name if any of its addresses isn't public. The
socket factory checks each address again just before the connection, in whatever form the URL gave it. The connection
goes to the address that was checked, so a name that resolves differently a moment later (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final

__all__ = ["AddressRefused", "Guard", "Lookup", "is_own", "literal_address", "look_up"]

# Returns the addresses of a host name, as text. Raises OSError if there are none.
Lookup = Callable[[str], Awaitable[Sequence[str]]]

# The socket's receive buffer. The kernel doubles it.
_RECEIVED_BYTES: Final = 8_192

# IANA's registries of special-purpose addresses, and the metadata addresses of clouds. The first matching line names an
# address. `ipaddress.is_global` isn't enough: it lets NAT64, 6to4 and multicast through.
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
        # Azure's metadata and host agent. It looks like a public address.
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
# The only IPv6 range that is routed on the internet (RFC 4291 section 2.4). The rest is reserved.
_GLOBAL_V6: Final = IPv6Network("2000::/3")
# The discard service. Connecting a UDP socket sends nothing, so any port does.
_ANY_PORT: Final = 9


class AddressRefused(OSError):
    """Deliveries to that address are refused. An OSError, like any other failure to connect."""

    def __init__(self, host: str, address: str, what: str) -> None:
        super().__init__(host, address, what)
        self.host = host
        self.address = address
        self.what = what

    def __str__(self) -> str:
        named = "" if self.host == self.address else f"{self.address}, "
        return f"{self.host} is {named}{self.what}; deliveries go to public addresses only"


class Guard:
    """Refuses every address that isn't public, except those in the networks `allowed` (`webhook_allow_addresses`).

    `own` says whether an address is one of this machine's. Raises ValueError if a text in `allowed` isn't a network.
    """

    def __init__(
        self, allowed: Sequence[str] = (), own: Callable[[IPv4Address | IPv6Address], bool] | None = None
    ) -> None:
        self._allowed = [ip_network(network) for network in allowed]
        self._own = own or is_own

    def fault(self, address: str) -> str | None:
        """Why deliveries to this address are refused ("a private address"); None if they are allowed.

        An allowed IPv4 network doesn't include the IPv6 forms of its addresses.
        """
        try:
            parsed = ip_address(address)
        except ValueError:
            return "not an address"
        if isinstance(parsed, IPv6Address) and parsed.scope_id is not None:
            # The zone selects an interface and isn't part of the address.
            parsed = IPv6Address(int(parsed))
        if any(_holds(network, parsed) for network in self._allowed):
            return None
        for network, what in _SPECIAL:
            if _holds(network, parsed):
                return what
        if not parsed.is_global or (isinstance(parsed, IPv6Address) and parsed not in _GLOBAL_V6):
            return "a reserved address"
        if self._own(parsed):
            return "an address of this machine"
        return None

    def check(self, host: str, addresses: Sequence[str]) -> None:
        """Raises AddressRefused unless deliveries may go to all of the addresses of `host`.

        One refused address refuses the host, because it would be chance which of them is used.
        """
        for address in addresses:
            what = self.fault(address)
            if what is not None:
                raise AddressRefused(host, address, what)

    def open_socket(self, info: tuple[Any, ...]) -> socket.socket:
        """aiohttp's `socket_factory`. `info` is an item of getaddrinfo's result: the address of the next connection."""
        family, kind, protocol, _, address = info
        self.check(address[0], (address[0],))
        opened = socket.socket(family, kind, protocol)
        # Answers are short. A receiver that floods us with headers makes us parse this much at a time, not 256 KiB.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)
        return opened


async def look_up(host: str) -> list[str]:
    """All addresses of a name, from the system's resolver. Raises socket.gaierror.

    Each lookup has its own thread: a few names whose servers don't answer would fill uvloop's pool of four threads and
    block all others. They are daemon threads, so they don't delay the end of the process.
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


def is_own(address: IPv4Address | IPv6Address) -> bool:
    """Whether packets to this address stay on this machine, by the kernel's present routes.

    For such an address, the kernel takes the address itself as the sender's. A public address that a router translates
    to this machine isn't recognized, but packets to it leave the machine and return through the firewall.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), _ANY_PORT))
            return ip_address(probe.getsockname()[0]) == address
    except OSError:
        # There is no route to the address, so nothing can be delivered to it.
        return False


def literal_address(host: str) -> str | None:
    """The address, if a URL's host is one in any form that the system's resolver accepts (`127.1`, `0x7f000001`,
    `2130706433`); None if it is a name."""
    with contextlib.suppress(ValueError):
        return str(ip_address(host))
    with contextlib.suppress(OSError, UnicodeError):
        return str(IPv4Address(socket.inet_aton(host.rstrip("."))))
    return None


def _holds(network: IPv4Network | IPv6Network, address: IPv4Address | IPv6Address) -> bool:
    return network.version == address.version and address in network


def _text(address: Sequence[Any]) -> str:
    """The address of a sockaddr, with its IPv6 zone if it has one."""
    host: str = address[0]
    return f"{host}%{address[3]}" if len(address) > 3 and address[3] and "%" not in host else host
