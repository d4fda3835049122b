"""A certificate and its private key: read, and held against each other, before anybody serves with them.

What is checked is what is used: the pair is kept as one file in the data folder, replaced whole. So all workers
have the same pair, a successor of a dead one too, whatever lies in the operator's files by then. Serving with it
is the workers'.
"""

import os
import ssl
import tempfile
from pathlib import Path
from typing import NoReturn

__all__ = ["PairError", "keep", "read_pair"]


class PairError(Exception):
    """The pair can't be served with. `faults`: which of `cert` and `key`, and what is wrong with it."""

    def __init__(self, faults: dict[str, str]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(f"{part} {text}" for part, text in self.faults.items())


def read_pair(cert: str | Path, key: str | Path) -> bytes:
    """The PEM text of both, the key first, found to belong together. Raises PairError."""
    found: dict[str, bytes] = {}
    faults: dict[str, str] = {}
    for part, path in (("cert", cert), ("key", key)):
        try:
            found[part] = Path(path).read_bytes()
        except OSError as error:
            faults[part] = f"{str(path)!r} can't be read: {error.strerror}"
    if faults:
        raise PairError(faults)
    # One file may hold both; twice the same certificate would go out as its own issuer.
    pair = found["cert"] if found["cert"] == found["key"] else found["key"].rstrip() + b"\n" + found["cert"]
    _check(pair, str(cert), str(key))
    return pair


def _check(pair: bytes, cert: str, key: str) -> None:
    """OpenSSL reads files only: the pair goes into one of ours, for its owner alone, and away again."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile(prefix="redpoll-") as file:
        file.write(pair)
        file.flush()
        try:
            context.load_cert_chain(file.name, password=_no_passphrase)
        except _Encrypted:
            raise PairError({"key": f"{key!r} has a passphrase; nobody is there to type it"}) from None
        except ssl.SSLError as error:
            raise PairError(_explained(pair, error, cert, key)) from error


class _Encrypted(Exception):
    """OpenSSL asked for a passphrase."""


def _no_passphrase() -> NoReturn:
    raise _Encrypted


def _explained(pair: bytes, error: ssl.SSLError, cert: str, key: str) -> dict[str, str]:
    """OpenSSL's reasons in words that say which file it is about."""
    if b"-----BEGIN CERTIFICATE-----" not in pair:
        return {"cert": f"{cert!r} holds no certificate in PEM"}
    if b"PRIVATE KEY-----" not in pair:
        return {"key": f"{key!r} holds no private key in PEM"}
    if error.reason == "KEY_VALUES_MISMATCH":
        return {"key": f"{key!r} is not the key of the certificate {cert!r}"}
    return {"cert": f"{cert!r} with {key!r} can't be used: {error.reason or error}"}


def keep(pair: bytes, path: Path) -> None:
    """Puts the pair at `path`, mode 0600, in place of the one there; a reader finds the old or the new one."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(pair)
    os.replace(temporary, path)
