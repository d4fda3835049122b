"""Contexts of Python's ssl module: which certificate a handshake shows, also after a change; client certificates."""

import ssl

import pytest

from helpers.certs import authority, issued, self_signed
from redpoll.config import certificate_files
from redpoll.config.settings import Settings
from redpoll.config.tls_context import SslContexts


def found(*pairs):
    certs, keys = (tuple(str(path) for path in paths) for paths in zip(*pairs, strict=True))
    return certificate_files.find(Settings(tls_cert=certs, tls_key=keys)).certificates


def shake(server, name, client=None, **options):
    """The certificate that a client sees who asks for this name, after a whole handshake in memory."""
    if client is None:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    theirs = client.wrap_bio(to_client, to_server, server_hostname=name)
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    left = [theirs, ours]
    for _ in range(10):
        for end in list(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:
                pass
        if not left:
            return theirs.getpeercert(binary_form=True)
    raise AssertionError("the handshake doesn't end")


def der(pair):
    return ssl.PEM_cert_to_DER_cert(pair[0].read_text())


def test_names_choose_and_a_change_counts_for_contexts_that_were_taken_before(tmp_path):
    one, two, three = (self_signed(tmp_path, name, hosts=(f"{name}.example.com",)) for name in ("one", "two", "three"))
    contexts = SslContexts(found(one, two))
    taken = contexts.default
    assert [shake(taken, f"{name}.example.com") for name in ("one", "two", "other")] == [der(one), der(two), der(one)]
    contexts.use(found(three, two))
    assert [shake(taken, f"{name}.example.com") for name in ("one", "two")] == [der(three), der(two)]
    assert shake(taken, None) == der(three)


def test_what_cannot_be_used_changes_nothing(tmp_path):
    one, two = self_signed(tmp_path, "one"), self_signed(tmp_path, "two")
    contexts = SslContexts(found(one))
    with pytest.raises(OSError, match="No such file"):
        contexts.use(found(two), str(tmp_path / "none"))
    assert shake(contexts.default, "localhost") == der(one)


def test_the_authority_of_clients_counts_for_every_name(tmp_path):
    ca = authority(tmp_path)
    one, two = self_signed(tmp_path, "one", hosts=("one",)), self_signed(tmp_path, "two", hosts=("two",))
    contexts = SslContexts(found(one, two), str(ca[0]))
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for name in ("one", "two"):
        with pytest.raises(ssl.SSLError):
            shake(contexts.default, name, client)
    client.load_cert_chain(*issued(tmp_path, ca, "client"))
    assert [shake(contexts.default, name, client) for name in ("one", "two")] == [der(one), der(two)]
