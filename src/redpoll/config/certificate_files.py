"""Finds, reads and checks the certificates of `tls_cert`, `tls_key` and `tls_ocsp`, and chooses one for each client.

`tls_cert` names files and folders. In a folder a certificate is

- `NAME.crt` or `NAME.pem` with `NAME.key`, or a `NAME.pem` that has both;
- `fullchain.pem` with `privkey.pem`, there or in a subfolder, as certbot keeps them.

What has no key there isn't a server's certificate and is left out. The supervisor writes all that were found to one
file in the data folder, which is replaced as a whole, and the workers load that file. So all workers have the same
ones, restarted ones included, even when the operator's own files have changed since.
"""

from __future__ import annotations

import base64
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from redpoll.config import x509
from redpoll.config.certificate import PairError, read_pair

if TYPE_CHECKING:
    from redpoll.config.settings import Settings

__all__ = ["Found", "Selection", "ServerCertificate", "bundle", "find", "select", "unbundle"]

# Each takes a context of OpenSSL, about 20 kB, in each worker.
_MAX_CERTIFICATES: Final = 256
# Files of a folder, which others may fill.
_MAX_ENTRIES: Final = 10_000
# An OCSP response with the responder's certificates has 2 to 4 kB, and goes out with each full handshake.
_MAX_OCSP_BYTES: Final = 16_384
# The key of certbot's certificate, and authorities, which may have their key beside them.
_NOT_SERVED: Final = frozenset(("privkey.pem", "ca.crt", "ca.pem"))
# What certbot keeps, with its own name for the key (`_of_certbot`): a certificate without a key is no mistake there.
_OF_CERTBOT: Final = frozenset(("fullchain.pem", "cert.pem", "chain.pem"))
_OCSP_LABEL: Final = "OCSP RESPONSE"


@dataclass(frozen=True)
class ServerCertificate:
    """`pem` has the key, the certificate and its intermediates, in this order. `staple` is an OCSP response in DER that
    counts until `staple_until_s` (Unix seconds), or empty. `place` names it in messages."""

    pem: bytes
    facts: x509.Certificate
    place: str
    staple: bytes = b""
    staple_until_s: float = 0.0


@dataclass(frozen=True)
class Found:
    """The certificates in order, at least one, and sentences about files that aren't used."""

    certificates: list[ServerCertificate]
    notes: list[str]


@dataclass(frozen=True)
class Selection:
    """`groups` have the indices of one certificate for each kind of key at most; what the client can do decides between
    them. The first group is for clients that ask for none of `names`, which maps DNS names in lower case, also
    wildcards, to groups."""

    groups: list[tuple[int, ...]]
    names: dict[str, int]


# -- finding -------------------------------------------------------------------------------------------------


def find(settings: Settings) -> Found:
    """Reads everything. Raises PairError, whose parts are `cert` and `key`."""
    notes: list[str] = []
    try:
        pairs = _pairs(settings.tls_cert, settings.tls_key, notes)
    except OSError as error:
        raise PairError({"cert": f"{error.filename!r} can't be read: {error.strerror}"}) from error
    if len(pairs) > _MAX_CERTIFICATES:
        raise PairError({"cert": f"{len(pairs)} certificates were found, {_MAX_CERTIFICATES} is the limit"})
    certificates = [_read(cert, key) for cert, key in pairs]
    beside = (path for cert, _ in pairs for path in (cert.with_suffix(".ocsp"), cert.with_name(cert.name + ".ocsp")))
    places = [*settings.tls_ocsp, *(str(path) for path in dict.fromkeys(beside) if path.exists())]
    return Found(_stapled(certificates, _responses(places, notes), notes), notes)


def _pairs(certs: Sequence[str], keys: Sequence[str], notes: list[str]) -> list[tuple[Path, Path]]:
    """Each certificate's file and its key's. The keys of `keys` are in the order of the files of `certs`; a folder in
    both has the keys of that folder's certificates."""
    left = [Path(key) for key in keys]
    pairs: list[tuple[Path, Path]] = []
    for text in certs:
        cert = Path(text)
        if cert.is_dir():
            folder = left.pop(0) if left and left[0].is_dir() else cert
            pairs += _in_folder(cert, folder, notes)
        elif left:
            pairs.append((cert, left.pop(0)))
        else:
            raise PairError({"key": f"missing: tls_key names no file for the certificate {text!r}"})
    if left:
        raise PairError({"key": f"{str(left[0])!r} belongs to no certificate: tls_cert has fewer files than tls_key"})
    return pairs


def _in_folder(folder: Path, keys: Path, notes: list[str]) -> list[tuple[Path, Path]]:
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    if len(entries) > _MAX_ENTRIES:
        raise PairError({"cert": f"{str(folder)!r} has more than {_MAX_ENTRIES} files"})
    pairs = _of_certbot(folder, keys)
    for entry in entries:
        if entry.is_dir():
            pairs += _of_certbot(entry, keys / entry.name)
        elif entry.suffix in (".crt", ".pem") and entry.name not in _NOT_SERVED:
            key = keys / (entry.stem + ".key")
            if key.exists():
                pairs.append((entry, key))
            elif entry.suffix == ".pem" and _has_key(entry):
                pairs.append((entry, entry))
            elif entry.name not in _OF_CERTBOT:
                notes.append(f"{str(entry)!r} has no key {key.name!r} and isn't used")
    if not pairs:
        wanted = "NAME.crt and NAME.key, or fullchain.pem and privkey.pem"
        raise PairError({"cert": f"{str(folder)!r} contains no certificate with its key: {wanted}"})
    return pairs


def _of_certbot(folder: Path, keys: Path) -> list[tuple[Path, Path]]:
    cert, key = folder / "fullchain.pem", keys / "privkey.pem"
    return [(cert, key)] if cert.exists() and key.exists() else []


def _has_key(path: Path) -> bool:
    return b"PRIVATE KEY-----" in path.read_bytes()


def _read(cert: Path, key: Path) -> ServerCertificate:
    pem = read_pair(cert, key)
    try:
        made = _normal(x509.blocks(pem), str(cert))
    except x509.DerError as error:
        raise PairError({"cert": f"{str(cert)!r} can't be used: {error}"}) from error
    if made is None:
        raise PairError({"cert": f"{str(cert)!r} contains no PEM certificate"})
    return made


def _normal(blocks: Sequence[tuple[str, bytes, bytes]], place: str) -> ServerCertificate | None:
    """Of the blocks of a pair that OpenSSL takes. None if there is no certificate or no key."""
    try:
        keys = [text for label, _, text in blocks if label.endswith("PRIVATE KEY")]
        certificates = [(der, text) for label, der, text in blocks if label == "CERTIFICATE"]
        if not keys or not certificates:
            return None
        facts = x509.read_certificate(certificates[0][0])
    except x509.DerError as error:
        raise PairError({"cert": f"{place!r} can't be used: {error}"}) from error
    return ServerCertificate(keys[0] + b"".join(text for _, text in certificates), facts, place)


# -- OCSP ----------------------------------------------------------------------------------------------------


_Response = tuple[str, bytes, x509.OcspResponse]


def _responses(places: Iterable[str], notes: list[str]) -> list[_Response]:
    """The OCSP responses in these files and folders. A response is an extra, so a bad one is noted and left out."""
    responses: list[_Response] = []
    for place in places:
        path = Path(place)
        try:
            files = sorted(path.glob("*.ocsp")) if path.is_dir() else [path]
            for file in files[:_MAX_CERTIFICATES]:
                with open(file, "rb") as opened:
                    der = opened.read(_MAX_OCSP_BYTES + 1)
                if len(der) > _MAX_OCSP_BYTES:
                    raise x509.DerError(f"it has more than {_MAX_OCSP_BYTES} bytes")
                responses.append((str(file), der, x509.read_ocsp(der)))
        except OSError as error:
            notes.append(f"the OCSP response {place!r} can't be read: {error.strerror}")
        except x509.DerError as error:
            notes.append(f"the OCSP response {place!r} isn't used: {error}")
    return responses


def _stapled(
    certificates: list[ServerCertificate], responses: list[_Response], notes: list[str]
) -> list[ServerCertificate]:
    """The certificates, each with the response that counts for the longest time."""
    best: dict[int, tuple[float, bytes]] = {}
    for place, der, response in responses:
        about = [n for n, certificate in enumerate(certificates) if response.is_about(certificate.facts)]
        fault = response.fault
        if not about:
            fault = "it is about none of the certificates"
        elif fault is None and response.next_update_s <= time.time():
            fault = "it has expired"
        if fault is not None:
            notes.append(f"the OCSP response {place!r} isn't used: {fault}")
            continue
        for number in about:
            best[number] = max(best.get(number, (0.0, b"")), (response.next_update_s, der))
    return [
        replace(certificate, staple=best[number][1], staple_until_s=best[number][0]) if number in best else certificate
        for number, certificate in enumerate(certificates)
    ]


# -- the one file of the workers -----------------------------------------------------------------------------


def bundle(certificates: Iterable[ServerCertificate]) -> bytes:
    """PEM text with all of them: of each the key, the certificate, the intermediates, and the OCSP response."""
    parts = []
    for certificate in certificates:
        parts.append(certificate.pem)
        if certificate.staple:
            lines = "\n".join(textwrap.wrap(base64.b64encode(certificate.staple).decode(), 64))
            parts.append(f"-----BEGIN {_OCSP_LABEL}-----\n{lines}\n-----END {_OCSP_LABEL}-----\n".encode())
    return b"".join(parts)


def unbundle(text: bytes, place: str) -> list[ServerCertificate]:
    """What `bundle` has written. Raises PairError for anything else."""
    try:
        blocks = x509.blocks(text)
        begins = [n for n, (label, _, _) in enumerate(blocks) if label.endswith("PRIVATE KEY")]
        certificates = []
        for begin, end in pairwise([*begins, len(blocks)]):
            made = _normal(blocks[begin:end], place)
            if made is None:
                raise PairError({"cert": f"{place!r} has a key without its certificate"})
            for label, der, _ in blocks[begin:end]:
                if label == _OCSP_LABEL:
                    made = replace(made, staple=der, staple_until_s=x509.read_ocsp(der).next_update_s)
            certificates.append(made)
    except x509.DerError as error:
        raise PairError({"cert": f"{place!r} can't be used: {error}"}) from error
    if not certificates:
        raise PairError({"cert": f"{place!r} contains no PEM certificate with its key"})
    return certificates


# -- choosing ------------------------------------------------------------------------------------------------


def select(certificates: Sequence[ServerCertificate]) -> Selection:
    """Which certificates each name has. Of several of one kind, the one that names it without a wildcard, and of these
    the one that is valid for the longest time."""
    # 256 certificates with 100 names each, and workers do nothing else meanwhile.
    having: dict[str, list[int]] = {}
    for number, certificate in enumerate(certificates):
        for name in dict.fromkeys(certificate.facts.names):
            having.setdefault(name, []).append(number)
    groups = {_default(certificates, having): 0}
    names = {name: groups.setdefault(_group(certificates, having, name), len(groups)) for name in having}
    return Selection(list(groups), names)


def _group(certificates: Sequence[ServerCertificate], having: dict[str, list[int]], name: str) -> tuple[int, ...]:
    """`having` has the certificates of each name; a wildcard stands for one label (RFC 6125 6.4.3)."""
    fit = sorted({*having[name], *having.get("*." + name.partition(".")[2], ())})
    fit.sort(key=lambda n: (name not in certificates[n].facts.names, -certificates[n].facts.not_after_s))
    by_kind: dict[str, int] = {}
    for number in fit:
        by_kind.setdefault(certificates[number].facts.kind, number)
    return tuple(sorted(by_kind.values()))


def _default(certificates: Sequence[ServerCertificate], having: dict[str, list[int]]) -> tuple[int, ...]:
    """The first certificate, and those of other kinds for its first name."""
    first = certificates[0].facts
    others = _group(certificates, having, first.names[0]) if first.names else ()
    return (0, *(number for number in others if certificates[number].facts.kind != first.kind))
