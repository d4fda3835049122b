"""OpenSSL in the library that Python loads: contexts from certificates and keys, and what is refused."""

import subprocess
import sys

import pytest

from helpers.certs import authority, issued, self_signed
from redpoll import _openssl
from redpoll._openssl import KEY_BYTES, Context, ContextError, set_ticket_keys

pytestmark = pytest.mark.skipif(not _openssl.load(), reason=str(_openssl.missing()))


def pem(pair):
    cert, key = pair
    return key.read_bytes() + cert.read_bytes()


def test_a_context_is_made_of_a_key_and_its_chain(tmp_path):
    ca = authority(tmp_path)
    assert Context(pem(issued(tmp_path, ca)) + ca[0].read_bytes())


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda key, cert: b"", "SSL"),
        (lambda key, cert: b"no PEM", "SSL"),
        (lambda key, cert: key, "SSL"),
        (lambda key, cert: cert, "SSL"),
        (lambda key, cert: key + cert[: len(cert) // 2], "SSL"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path, broken, reason):
    cert, key = self_signed(tmp_path)
    with pytest.raises(ContextError, match=reason):
        Context(broken(key.read_bytes(), cert.read_bytes()))


def test_a_chain_that_is_cut_off_is_refused(tmp_path):
    ca = authority(tmp_path)
    chain = ca[0].read_bytes()
    with pytest.raises(ContextError, match="SSL"):
        Context(pem(issued(tmp_path, ca)) + chain[: len(chain) // 2])


def test_the_key_of_another_certificate_is_refused(tmp_path):
    cert, _ = self_signed(tmp_path, "one")
    _, key = self_signed(tmp_path, "two")
    with pytest.raises(ContextError, match="key values mismatch"):
        Context(pem((cert, key)))


def test_a_key_with_a_passphrase_is_refused_without_asking(tmp_path):
    with pytest.raises(ContextError, match="passphrase"):
        Context(pem(self_signed(tmp_path, passphrase="secret")))


def test_a_context_that_failed_can_be_freed(tmp_path):
    good = pem(self_signed(tmp_path))
    for _ in range(200):
        with pytest.raises(ContextError):
            Context(b"no PEM")
        Context(good)


@pytest.mark.parametrize("keys", [[b"k" * (KEY_BYTES - 1)], [b"k" * KEY_BYTES] * 3])
def test_ticket_keys_of_the_wrong_size_or_number_are_refused(keys):
    with pytest.raises(ValueError, match="ticket keys"):
        set_ticket_keys(keys)


WITHOUT_SSL = """
import sys, types
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name == "_ssl":
            raise ImportError
sys.meta_path.insert(0, Nothing())
"""


@pytest.mark.parametrize(
    ("begin", "reason"),
    [
        (WITHOUT_SSL, "Python has no module ssl"),
        ("import sys, types; sys.modules['_ssl'] = types.ModuleType('_ssl')", "OpenSSL is linked into Python itself"),
        ("import sys, redpoll._wheel as m; sys.modules['_ssl'] = m", "OpenSSL is linked into Python's module ssl"),
    ],
)
def test_without_openssl_one_sentence_says_why(begin, reason):
    """As in a Python without ssl, one with OpenSSL linked in, and one whose module ssl has it linked in."""
    code = f"{begin}\nfrom redpoll import _openssl\nassert not _openssl.load()\nprint(_openssl.missing())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == reason


def test_redpoll_is_imported_without_openssl():
    code = f"{WITHOUT_SSL}\nimport redpoll, redpoll._openssl, redpoll._engine"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
