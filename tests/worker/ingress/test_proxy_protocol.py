"""PROXY headers against a slow, obvious encoder, and invalid ones."""

import ipaddress
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redpoll.worker.ingress.proxy_protocol import MAX_HEADER_BYTES, ProxyFault, ProxyHeader, parse

SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
FAMILIES = {4: 0x11, 6: 0x21}

v4 = st.ip_addresses(v=4)
v6 = st.ip_addresses(v=6)
ports = st.integers(0, 65535)
# Both ends of one connection are of one family.
ends = st.one_of(st.tuples(v4, v4), st.tuples(v6, v6))


def line(source, target, source_port, target_port) -> bytes:
    return f"PROXY TCP{source.version} {source} {target} {source_port} {target_port}\r\n".encode()


def binary(command: int, family: int, addresses: bytes, tlvs: bytes = b"", length: int | None = None) -> bytes:
    size = len(addresses) + len(tlvs) if length is None else length
    return SIGNATURE + bytes([0x20 | command, family]) + struct.pack(">H", size) + addresses + tlvs


def tlv(kind: int, value: bytes) -> bytes:
    return struct.pack(">BH", kind, len(value)) + value


def packed(source, target, source_port, target_port) -> bytes:
    return source.packed + target.packed + struct.pack(">HH", source_port, target_port)


def plain(address) -> str:
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


tls_seen = st.sampled_from([None, 0, 1, 2, 3, 7])
other_tlvs = st.lists(
    st.tuples(st.sampled_from([0x01, 0x02, 0x03, 0x04, 0x05, 0xEA]), st.binary(max_size=40)), max_size=4
)


@given(ends, ports, ports, st.binary(max_size=200))
def test_version_1_names_the_client_and_leaves_the_bytes_after_it(pair, source_port, target_port, behind):
    header = line(*pair, source_port, target_port)
    assert parse(header + behind) == ProxyHeader(len(header), (plain(pair[0]), source_port), False)
    for cut in range(len(header)):
        assert parse(header[:cut]) is None


@given(ends, ports, ports, tls_seen, other_tlvs, st.binary(max_size=200))
def test_version_2_names_the_client_and_whether_it_uses_tls(pair, source_port, target_port, client, others, behind):
    tlvs = b"".join(tlv(kind, value) for kind, value in others)
    if client is not None:
        tlvs += tlv(0x20, bytes([client]) + bytes(4) + tlv(0x21, b"TLSv1.3"))
    header = binary(1, FAMILIES[pair[0].version], packed(*pair, source_port, target_port), tlvs)
    seen = parse(header + behind)
    assert seen == ProxyHeader(len(header), (plain(pair[0]), source_port), bool(client is not None and client & 1))
    for cut in range(len(header)):
        assert parse(header[:cut]) is None


@pytest.mark.parametrize(
    "header",
    [
        b"PROXY UNKNOWN\r\n",
        b"PROXY UNKNOWN ffff:f...f:ffff ffff:f...f:ffff 65535 65535\r\n",
        binary(0, 0x00, b""),
        binary(0, 0x11, b"whatever a balancer puts into its health check"),
        binary(1, 0x00, b""),
        binary(1, 0x31, b"/run/proxy.sock".ljust(216, b"\0")),
    ],
)
def test_a_proxy_that_connects_for_itself_names_no_client(header):
    assert parse(header + b"GET / HTTP/1.1\r\n") == ProxyHeader(len(header), None, False)


MALFORMED = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
    "lower case": b"proxy TCP4 192.0.2.1 192.0.2.2 1 2\r\n",
    "an unknown family": b"PROXY TCP5 192.0.2.1 192.0.2.2 1 2\r\n",
    "two spaces": b"PROXY TCP4  192.0.2.1 192.0.2.2 1 2\r\n",
    "a space at the end": b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2 \r\n",
    "no ports": b"PROXY TCP4 192.0.2.1 192.0.2.2\r\n",
    "a port too large": b"PROXY TCP4 192.0.2.1 192.0.2.2 65536 2\r\n",
    "a port with a zero before it": b"PROXY TCP4 192.0.2.1 192.0.2.2 01 2\r\n",
    "a port with a sign": b"PROXY TCP4 192.0.2.1 192.0.2.2 +1 2\r\n",
    "half an address": b"PROXY TCP4 192.0.2 192.0.2.2 1 2\r\n",
    "an octal address": b"PROXY TCP4 192.0.2.010 192.0.2.2 1 2\r\n",
    "the other family": b"PROXY TCP4 ::1 192.0.2.2 1 2\r\n",
    "a name": b"PROXY TCP4 localhost 192.0.2.2 1 2\r\n",
    "a zone": b"PROXY TCP6 fe80::1%eth0\n ::1 1 2\r\n",
    "a bare line feed": b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\n",
    "a bare carriage return": b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\rGET",
    "a line without end": b"PROXY UNKNOWN " + b"x" * 107,
    "other bytes behind UNKNOWN": b"PROXY UNKNOWN \x00\r\n",
    "version 1 in binary": SIGNATURE + b"\x11\x11\x00\x0c" + bytes(12),
    "an unknown command": SIGNATURE + b"\x22\x11\x00\x0c" + bytes(12),
    "datagrams": binary(1, 0x12, bytes(12)),
    "an unknown binary family": binary(1, 0x41, bytes(12)),
    "an unspecified transport": binary(1, 0x10, bytes(12)),
    "an address cut short": binary(1, 0x11, bytes(11)),
    "an IPv6 address cut short": binary(1, 0x21, bytes(35)),
    "too much": binary(1, 0x11, bytes(12), length=MAX_HEADER_BYTES),
    "half an extension": binary(1, 0x11, bytes(12), b"\x04\x00"),
    "an extension beyond the end": binary(1, 0x11, bytes(12), b"\x04\x00\x09abc"),
    "a TLS extension cut short": binary(1, 0x11, bytes(12), tlv(0x20, b"\x01\x00\x00\x00")),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_an_invalid_header_is_a_fault(data):
    with pytest.raises(ProxyFault):
        parse(data)


def test_a_fault_is_found_at_its_first_byte():
    for data in (b"G", b"PROXX", SIGNATURE[:5] + b"?", SIGNATURE + b"\x31"):
        with pytest.raises(ProxyFault):
            parse(data)


@given(
    st.binary(max_size=300),
    st.sampled_from([b"", b"PROXY ", b"PROXY TCP4 ", b"PROXY TCP6 ::", SIGNATURE, SIGNATURE + b"\x21\x21"]),
)
@example(b"", b"")
def test_any_bytes_are_a_header_or_incomplete_or_a_fault(data, beginning):
    try:
        seen = parse(beginning + data)
    except ProxyFault:
        return
    if seen is not None:
        assert 0 < seen.size <= len(beginning + data)
        assert seen.address is None or ipaddress.ip_address(seen.address[0])
        # Bytes after a header don't change what it says.
        assert parse((beginning + data)[: seen.size]) == seen
