"""Pinned certificates in a TLS handshake without HTTP. test_sender.py tests whole deliveries."""

import contextlib
import hashlib
import ssl

import pytest

from helpers.certs import self_signed
from redpoll.control.webhooks.pin import (
    MATCHES_NONE,
    CertificateChanged,
    PinnedContext,
    trusted_context,
    unchecked_context,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("certs"))


def shake_hands(client_context, pair):
    """Performs a handshake in memory between both ends. Raises the error of the client."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(*pair)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname="localhost")
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for end in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return client


def leaf_of(pair):
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pair[0].read_text())).hexdigest()


def test_pinned_certificate_is_accepted(pair):
    context = PinnedContext(trusted_context(str(pair[0])), leaf_of(pair))
    assert shake_hands(context, pair).version() is not None


def test_another_certificate_fails_the_handshake_and_is_named_in_the_error(pair):
    with pytest.raises(CertificateChanged) as refused:
        shake_hands(PinnedContext(trusted_context(str(pair[0])), "0" * 64), pair)
    assert refused.value.shown == leaf_of(pair)
    assert str(refused.value) == f"the certificate changed: {'0' * 64} is pinned, {leaf_of(pair)} was shown"


def test_chain_is_verified_before_the_pin(pair):
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(PinnedContext(trusted_context(), leaf_of(pair)), pair)


def test_unchecked_context_reads_the_certificate_and_ends_the_handshake(pair):
    with pytest.raises(CertificateChanged) as looked:
        shake_hands(PinnedContext(unchecked_context(), MATCHES_NONE), pair)
    assert looked.value.shown == leaf_of(pair)


def test_pinning_does_not_change_the_shared_context(pair):
    shared = trusted_context(str(pair[0]))
    with pytest.raises(CertificateChanged):
        shake_hands(PinnedContext(shared, "0" * 64), pair)
    assert shake_hands(shared, pair).version() is not None
