"""Reading, checking and writing a pair of certificate and key."""

import os
import socket
import ssl
import tempfile
import threading

import pytest

from helpers.certs import self_signed
from redpoll.config.certificate import PairError, read_pair, write_private


def faults_of(cert, key) -> dict[str, str]:
    with pytest.raises(PairError) as caught:
        read_pair(cert, key)
    return caught.value.faults


def shown(path, trusted) -> bytes:
    """The certificate that a server with the pair at `path` presents to a client that verifies it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, path)
    client = ssl.create_default_context(cafile=str(trusted))
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with context.wrap_socket(ours, server_side=True) as server:
            server.recv(1)

    serving = threading.Thread(target=serve)
    serving.start()
    with client.wrap_socket(theirs, server_hostname="localhost") as connected:
        found = connected.getpeercert(binary_form=True)
        connected.send(b"x")
    serving.join()
    assert found is not None
    return found


def test_written_pair_serves_from_one_private_file(tmp_path):
    cert, key = self_signed(tmp_path)
    path = tmp_path / "tls.pem"
    write_private(read_pair(cert, key), path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert shown(path, cert) == ssl.PEM_cert_to_DER_cert(cert.read_text())


def test_a_pair_that_cant_be_checked_without_a_temporary_file_is_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    (text,) = faults_of(*self_signed(tmp_path)).values()
    assert text.endswith("no temporary file can be written: No such file or directory")


def test_written_pair_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "tls.pem"
    for name in ("first", "second"):
        cert, key = self_signed(tmp_path, name)
        write_private(read_pair(cert, key), path)
    assert shown(path, cert) == ssl.PEM_cert_to_DER_cert(cert.read_text())
    assert not path.with_name("tls.pem.new").exists()


def test_one_file_may_hold_both(tmp_path):
    cert, key = self_signed(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(cert.read_text() + key.read_text())
    assert read_pair(both, both) == both.read_bytes()


def test_key_without_a_final_newline_works(tmp_path):
    cert, key = self_signed(tmp_path)
    key.write_text(key.read_text().rstrip())
    assert read_pair(cert, key) == key.read_bytes() + b"\n" + cert.read_bytes()


def test_every_file_that_cannot_be_read_is_named(tmp_path):
    faults = faults_of(tmp_path / "a.crt", tmp_path / "a.key")
    assert faults == {
        "cert": f"{str(tmp_path / 'a.crt')!r} can't be read: No such file or directory",
        "key": f"{str(tmp_path / 'a.key')!r} can't be read: No such file or directory",
    }


def test_the_key_of_another_certificate_is_refused(tmp_path):
    cert, _ = self_signed(tmp_path, "one")
    _, key = self_signed(tmp_path, "other")
    assert faults_of(cert, key) == {"key": f"{str(key)!r} is not the key of the certificate {str(cert)!r}"}


def test_key_with_a_passphrase_is_refused_without_a_prompt(tmp_path):
    cert, key = self_signed(tmp_path, passphrase="secret")
    assert "has a passphrase" in faults_of(cert, key)["key"]


def test_swapped_files_are_refused(tmp_path):
    cert, key = self_signed(tmp_path)
    assert "contains no PEM certificate" in faults_of(key, key)["cert"]
    assert "contains no PEM private key" in faults_of(cert, cert)["key"]


@pytest.mark.parametrize("text", ["", "hello", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_malformed_certificate_is_refused(tmp_path, text):
    cert, key = self_signed(tmp_path)
    cert.write_text(text)
    assert list(faults_of(cert, key)) == ["cert"]


def test_no_temporary_file_is_left_behind(tmp_path, monkeypatch):
    cert, key = self_signed(tmp_path)
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    read_pair(cert, key)
    assert os.listdir(folder) == []
