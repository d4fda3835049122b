"""Trusted proxies: the client's address and scheme behind them."""

import pytest

from redpoll.config.proxies import NO_PROXIES, TrustedProxies, is_private, network_of, plain_address

OURS = TrustedProxies(["10.0.0.0/8", "192.0.2.7", "2001:db8:1::/48"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        # No proxy, or one that isn't trusted: its headers don't count.
        ("203.0.113.9", [], "203.0.113.9"),
        ("203.0.113.9", ["198.51.100.1"], "203.0.113.9"),
        ("10.1.1.1", [], "10.1.1.1"),
        ("10.1.1.1", ["198.51.100.1"], "198.51.100.1"),
        # The client sent the left address itself.
        ("10.1.1.1", ["1.2.3.4, 198.51.100.1"], "198.51.100.1"),
        ("10.1.1.1", ["1.2.3.4", "198.51.100.1"], "198.51.100.1"),
        # Proxy behind proxy.
        ("10.1.1.1", ["1.2.3.4, 198.51.100.1, 192.0.2.7"], "198.51.100.1"),
        ("10.1.1.1", ["1.2.3.4, 198.51.100.1", "2001:db8:1::9,10.2.2.2"], "198.51.100.1"),
        # All addresses are trusted: the leftmost counts.
        ("10.1.1.1", ["10.3.3.3, 10.2.2.2"], "10.3.3.3"),
        # The form that some proxies send.
        ("10.1.1.1", ["198.51.100.1:4711"], "198.51.100.1"),
        ("10.1.1.1", ["[2001:db8:2::1]:4711"], "2001:db8:2::1"),
        ("10.1.1.1", ["2001:DB8:2:0:0:0:0:1"], "2001:db8:2::1"),
        ("10.1.1.1", ["::ffff:198.51.100.1"], "198.51.100.1"),
        # Not an address: the proxy that sent it is the last known one.
        ("10.1.1.1", ["unknown"], "10.1.1.1"),
        ("10.1.1.1", ["198.51.100.1, unknown, 10.2.2.2"], "10.2.2.2"),
        ("10.1.1.1", [""], "10.1.1.1"),
        ("10.1.1.1", ["198.51.100.1,"], "10.1.1.1"),
        ("10.1.1.1", ["198.51.100.1 10.2.2.2"], "10.1.1.1"),
        # On a socket that listens on `::`.
        ("::ffff:10.1.1.1", ["198.51.100.1"], "198.51.100.1"),
    ],
)
def test_client_is_the_rightmost_untrusted_address(peer, forwarded, client):
    assert OURS.client_of(peer, forwarded) == client


def test_without_proxies_headers_are_ignored():
    assert not NO_PROXIES
    assert NO_PROXIES.client_of("10.1.1.1", ["198.51.100.1"]) == "10.1.1.1"
    assert not NO_PROXIES.is_secure("10.1.1.1", "https", False)
    assert not NO_PROXIES.trusts("10.1.1.1")


def test_only_the_rightmost_32_addresses_are_read():
    forwarded = ["198.51.100.1" + ",10.2.2.2" * 1000]
    assert OURS.client_of("10.1.1.1", forwarded) == "10.2.2.2"


@pytest.mark.parametrize(
    ("peer", "proto", "connection_is_tls", "secure"),
    [
        ("203.0.113.9", "https", False, False),
        ("203.0.113.9", "http", True, True),
        ("10.1.1.1", None, False, False),
        ("10.1.1.1", None, True, True),
        ("10.1.1.1", "https", False, True),
        ("10.1.1.1", "WSS", False, True),
        ("10.1.1.1", "http", True, False),
        # The leftmost is the client's hop. Later hops without TLS are the operator's decision.
        ("10.1.1.1", "https, http", False, True),
        ("10.1.1.1", "http, https", False, False),
        ("10.1.1.1", "gopher", False, False),
    ],
)
def test_scheme_comes_from_the_trusted_proxy(peer, proto, connection_is_tls, secure):
    assert OURS.is_secure(peer, proto, connection_is_tls) is secure


def test_malformed_network_is_refused():
    with pytest.raises(ValueError, match="/99"):
        TrustedProxies(["10.0.0.0/99"])


def test_ipv4_mapped_address_is_shortened():
    assert plain_address("::ffff:192.0.2.1") == "192.0.2.1"
    assert plain_address("::FFFF:192.0.2.1") == "192.0.2.1"
    assert plain_address("2001:db8::1") == "2001:db8::1"
    assert not OURS.trusts("no address at all")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("no:address", "no:address"),
    ],
)
def test_an_ipv6_client_counts_as_its_network(address, network):
    assert network_of(address) == network


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("fd00::1", True),
        ("", True),
        ("8.8.8.8", 0),
    ],
)
def test_private_addresses(address, private):
    assert is_private(address) == private
