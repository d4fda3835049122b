"""Reads a TLS certificate and its private key, checks that they belong together, and writes private files.

certificate_files.py has those of the TLS port.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import ssl

__all__ = ["NO_SSL", "PairError", "load_pem", "read_pair", "write_private"]


NO_SSL = "this Python was built without the module ssl, so redpoll can't use TLS; use another Python"


class PairError(Exception):
    """The pair can't be used. `faults` maps `cert` or `key` to what is wrong with it."""

    def __init__(self, faults: dict[str, str]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(f"{part} {text}" for part, text in self.faults.items())


def read_pair(cert: str | Path, key: str | Path) -> bytes:
    """The PEM text of both, the key first. Raises PairError where they can't be read or don't belong together."""
    texts: dict[str, bytes] = {}
    faults: dict[str, str] = {}
    for part, path in (("cert", cert), ("key", key)):
        try:
            texts[part] = Path(path).read_bytes()
        except OSError as error:
            faults[part] = f"{str(path)!r} can't be read: {error.strerror}"
    if faults:
        raise PairError(faults)
    # One file may hold both. Written twice, the certificate would be sent as its own issuer.
    pair = texts["cert"] if texts["cert"] == texts["key"] else texts["key"].rstrip() + b"\n" + texts["cert"]
    _check(pair, str(cert), str(key))
    return pair


def _check(pair: bytes, cert: str, key: str) -> None:
    """Has OpenSSL load the pair. Raises PairError."""
    try:
        import ssl
    except ImportError:
        raise PairError({"cert": NO_SSL}) from None
    try:
        load_pem(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), pair)
    except _Encrypted:
        raise PairError({"key": f"{key!r} has a passphrase; use a key without one"}) from None
    except ssl.SSLError as error:
        raise PairError(_explained(pair, error, cert, key)) from error
    except OSError as error:
        text = f"{cert!r} can't be checked, because no temporary file can be written: {error.strerror}"
        raise PairError({"cert": text}) from error


def load_pem(context: ssl.SSLContext, pair: bytes) -> None:
    """Adds a key and its certificates to a context, from a temporary private file because Python only reads files.
    Raises ssl.SSLError, or another OSError if the file can't be written."""
    with tempfile.NamedTemporaryFile(prefix="redpoll-") as file:
        file.write(pair)
        file.flush()
        context.load_cert_chain(file.name, password=_no_passphrase)


class _Encrypted(Exception):
    """OpenSSL asked for a passphrase."""


def _no_passphrase() -> NoReturn:
    raise _Encrypted


def _explained(pair: bytes, error: ssl.SSLError, cert: str, key: str) -> dict[str, str]:
    """OpenSSL's reason, with the file that it is about."""
    if b"-----BEGIN CERTIFICATE-----" not in pair:
        return {"cert": f"{cert!r} contains no PEM certificate"}
    if b"PRIVATE KEY-----" not in pair:
        return {"key": f"{key!r} contains no PEM private key"}
    if error.reason == "KEY_VALUES_MISMATCH":
        return {"key": f"{key!r} is not the key of the certificate {cert!r}"}
    return {"cert": f"{cert!r} with {key!r} can't be used: {error.reason or error}"}


def write_private(text: bytes, path: Path) -> None:
    """Writes `text` to `path` with mode 0600. The file is replaced atomically."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(text)
    os.replace(temporary, path)
