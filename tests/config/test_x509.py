"""What is read from certificates and OCSP responses, compared with the library `cryptography`."""

import contextlib
import random

import pytest
from cryptography import x509 as reference
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.ocsp import OCSPCertStatus

from helpers.certs import authority, issued, ocsp_response, self_signed
from redpoll.config.x509 import DerError, blocks, read_certificate, read_ocsp


def loaded(path):
    return reference.load_pem_x509_certificate(path.read_bytes())


@pytest.mark.parametrize("kind", ["RSA", "ECDSA"])
@pytest.mark.parametrize("hosts", [(), ("a.example.com", "*.b.example.com", "127.0.0.1", "::1")])
def test_a_certificate_says_what_cryptography_reads(tmp_path, kind, hosts):
    cert, _ = self_signed(tmp_path, kind=kind, hosts=hosts, days=90)
    expected = loaded(cert)
    found = read_certificate(expected.public_bytes(Encoding.DER))
    assert found.names == tuple(host for host in hosts if "example" in host)
    assert [len(address) for address in found.addresses] == ([4, 16] if hosts else [])
    assert found.not_before_s == expected.not_valid_before_utc.timestamp()
    assert found.not_after_s == expected.not_valid_after_utc.timestamp()
    assert found.serial == expected.serial_number
    assert found.issuer == expected.issuer.public_bytes()
    assert found.kind == kind


def test_a_year_beyond_2049_has_four_digits(tmp_path):
    cert, _ = self_signed(tmp_path, days=365 * 40)
    expected = loaded(cert)
    found = read_certificate(expected.public_bytes(Encoding.DER))
    assert found.not_after_s == expected.not_valid_after_utc.timestamp()


def test_a_name_that_nobody_can_ask_for_is_left_out(tmp_path):
    cert, _ = self_signed(tmp_path, hosts=("a.example.com", "b.example.com"))
    der = loaded(cert).public_bytes(Encoding.DER)
    assert read_certificate(der.replace(b"\x82\x0da.example", b"\x82\x0d\xff.example")).names == ("b.example.com",)


def test_a_wildcard_stands_for_one_label(tmp_path):
    cert, _ = self_signed(tmp_path, hosts=("*.example.com",))
    found = read_certificate(loaded(cert).public_bytes(Encoding.DER))
    assert found.is_for("a.example.com")
    assert not found.is_for("example.com")
    assert not found.is_for("a.b.example.com")


def test_an_ocsp_response_is_about_the_certificate_of_its_issuer_and_number(tmp_path):
    ca = authority(tmp_path)
    cert, _ = issued(tmp_path, ca)
    response = read_ocsp(ocsp_response(ca, cert))
    assert response.fault is None
    certificate = read_certificate(loaded(cert).public_bytes(Encoding.DER))
    assert response.is_about(certificate)
    another, _ = issued(tmp_path, ca, "another")
    assert not response.is_about(read_certificate(loaded(another).public_bytes(Encoding.DER)))
    # Two authorities may use the same number.
    assert not response.is_about(certificate._replace(issuer=loaded(another).subject.public_bytes()))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"status": OCSPCertStatus.REVOKED}, "revoked"),
        ({"status": OCSPCertStatus.UNKNOWN}, "doesn't know"),
        ({"days": None}, "nextUpdate"),
    ],
)
def test_an_ocsp_response_that_does_no_good_has_a_fault(tmp_path, options, fault):
    ca = authority(tmp_path)
    cert, _ = issued(tmp_path, ca)
    assert fault in str(read_ocsp(ocsp_response(ca, cert, **options)).fault)


def test_an_error_of_the_responder_is_refused():
    with pytest.raises(DerError, match="error of the responder"):
        # tryLater
        read_ocsp(bytes.fromhex("30030a0103"))


@pytest.mark.parametrize("read", [read_certificate, read_ocsp])
@pytest.mark.parametrize(
    "text", [b"", b"0", b"<html>", b"\x30\x80\x00\x00", b"\x30\x85\xff\xff\xff\xff\xff", b"\x30\x82"]
)
def test_what_is_no_der_is_refused(read, text):
    with pytest.raises(DerError):
        read(text)


def test_damaged_bytes_raise_nothing_else(tmp_path):
    ca = authority(tmp_path)
    cert, _ = issued(tmp_path, ca)
    chance = random.Random(7)
    for read, der in (
        (read_certificate, loaded(cert).public_bytes(Encoding.DER)),
        (read_ocsp, ocsp_response(ca, cert)),
    ):
        for _ in range(3000):
            damaged = bytearray(der[: chance.randrange(len(der))] if chance.random() < 0.2 else der)
            for _ in range(chance.randrange(1, 4)):
                if damaged:
                    damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            with contextlib.suppress(DerError):
                read(bytes(damaged))


def test_pem_blocks_are_read_with_text_between_them(tmp_path):
    cert, key = self_signed(tmp_path)
    text = b"subject: x\r\n" + cert.read_bytes().replace(b"\n", b"\r\n") + b"\n# key\n" + key.read_bytes()
    found = blocks(text)
    assert [label for label, _, _ in found] == ["CERTIFICATE", "PRIVATE KEY"]
    assert found[0][1] == loaded(cert).public_bytes(Encoding.DER)
    assert found[1][2].strip() == key.read_bytes().strip()


def test_a_block_that_is_not_base64_is_refused():
    with pytest.raises(DerError, match="base64"):
        blocks(b"-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n")
