"""Which client address a connection counts for, and the limit."""

import zlib

import pytest

from redpoll.config.proxies import NO_PROXIES, TrustedProxies
from redpoll.worker.hub import addresses as addresses_module
from redpoll.worker.hub.addresses import Addresses

PROXIES = TrustedProxies(["10.0.0.0/8", "127.0.0.1"])
FORWARDED = {b"x-forwarded-for": b"198.51.100.7, 8.8.8.8"}


@pytest.fixture(autouse=True)
def slots_of_their_own(monkeypatch):
    """Python's hash differs in each process, and now and then gives two addresses the same slot."""
    monkeypatch.setattr(addresses_module, "hash", lambda text: zlib.crc32(text.encode()), raising=False)


def counted(addresses: Addresses, peer: str, headers=None, named: bool = False) -> bool | None:
    """Whether a further connection is counted; None if it is refused."""
    slot = addresses.enter(peer, headers or {}, named=named)
    return None if slot is None else bool(slot)


def test_an_address_is_refused_at_its_limit_and_admitted_when_one_has_left():
    addresses = Addresses(2, NO_PROXIES)
    slots = [addresses.enter("8.8.8.8", {}, named=False) for _ in range(3)]
    assert slots[0] == slots[1]
    assert slots[2] is None
    assert addresses.refused == 1
    assert counted(addresses, "8.8.4.4")
    addresses.leave(slots[0])
    assert counted(addresses, "8.8.8.8")
    assert counted(addresses, "8.8.8.8") is None


def test_an_ipv6_network_of_64_bits_is_one_address():
    addresses = Addresses(1, NO_PROXIES)
    assert counted(addresses, "2600::1:2:3:4:5")
    assert counted(addresses, "2600:0:0:1::9") is None
    assert counted(addresses, "2600:0:0:2::9")


def test_a_mapped_ipv4_address_is_the_same_address():
    addresses = Addresses(1, NO_PROXIES)
    assert counted(addresses, "::ffff:8.8.8.8")
    assert counted(addresses, "8.8.8.8") is None


@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        ("127.0.0.1", {}),
        ("10.1.2.3", {}),
        ("::1", {}),
        ("", {}),
        ("127.0.0.1", FORWARDED),
    ],
)
def test_behind_proxies_that_are_not_trusted_no_connection_is_counted(peer, headers):
    addresses = Addresses(1, NO_PROXIES)
    assert [counted(addresses, peer, headers) for _ in range(3)] == [False] * 3


@pytest.mark.parametrize("headers", [FORWARDED, {b"forwarded": b"for=198.51.100.7"}])
def test_a_public_peer_with_a_proxys_header_has_a_larger_limit_of_its_own(monkeypatch, headers):
    logged = []
    monkeypatch.setattr(addresses_module.log, "warning", lambda event, **fields: logged.append((event, fields)))
    addresses = Addresses(1, NO_PROXIES)
    assert [counted(addresses, "8.8.8.8", headers) for _ in range(11)] == [True] * 10 + [None]
    # Those without the header don't share it.
    assert [counted(addresses, "8.8.8.8") for _ in range(2)] == [True, None]
    assert logged == [("a peer sends headers of a proxy, set trusted_proxies", {"peer": "8.8.8.8"})]


def test_a_trusted_proxy_names_the_client():
    addresses = Addresses(1, PROXIES)
    assert counted(addresses, "10.1.2.3", FORWARDED)
    assert counted(addresses, "127.0.0.1", FORWARDED) is None
    assert counted(addresses, "127.0.0.1", {b"x-forwarded-for": b"8.8.4.4"})


@pytest.mark.parametrize("headers", [{}, {b"x-forwarded-for": b"10.9.9.9"}, {b"x-forwarded-for": b"unknown"}])
def test_a_trusted_proxy_that_names_no_client_is_not_counted(headers):
    addresses = Addresses(1, PROXIES)
    assert [counted(addresses, "10.1.2.3", headers) for _ in range(3)] == [False] * 3


def test_a_header_of_an_address_that_is_no_trusted_proxy_changes_nothing():
    addresses = Addresses(1, PROXIES)
    assert counted(addresses, "8.8.8.8", FORWARDED)
    assert counted(addresses, "8.8.8.8", {b"x-forwarded-for": b"1.1.1.1"}) is None


def test_an_address_from_a_proxy_header_is_counted():
    addresses = Addresses(1, NO_PROXIES)
    assert counted(addresses, "10.5.5.5", named=True)
    assert counted(addresses, "10.5.5.5", named=True) is None


def test_without_a_limit_nothing_is_counted():
    addresses = Addresses(0, PROXIES)
    assert [counted(addresses, "8.8.8.8") for _ in range(3)] == [False] * 3
