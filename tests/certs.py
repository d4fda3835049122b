"""Certificates for tests, for localhost and 127.0.0.1, made by openssl(1) in a few milliseconds: self-signed ones, and
some that an authority of one's own issued.

Not a test. A client that trusts the self-signed one, or the authority's (`cafile`, `NODE_EXTRA_CA_CERTS`), finds it
good.
"""

import subprocess
from pathlib import Path

# Whom certificates are for, in openssl's words.
LOCAL = "DNS:localhost,IP:127.0.0.1"


def self_signed(folder: Path, name: str = "server", *, passphrase: str = "") -> tuple[Path, Path]:
    """`NAME.crt` and `NAME.key` in `folder`, a pair of its own at every call."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName={LOCAL}"]
    command += ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def authority(folder: Path, name: str = "authority") -> tuple[Path, Path]:
    """A CA: `NAME.crt`, to be trusted, and `NAME.key`, to issue with."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-nodes", "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


def issued(
    folder: Path,
    ca: tuple[Path, Path],
    name: str = "server",
    *,
    hosts: str = "DNS:localhost,IP:127.0.0.1",
    days: int = 2,
) -> tuple[Path, Path]:
    """`NAME.crt` and `NAME.key`, issued by `ca`, for `hosts`; `days` below 0: it has expired."""
    cert, key, request = folder / f"{name}.crt", folder / f"{name}.key", folder / f"{name}.csr"
    command = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName={hosts}"]
    subprocess.run([*command, "-keyout", key, "-out", request], check=True, capture_output=True)
    command = ["openssl", "x509", "-req", "-in", str(request), "-CA", str(ca[0]), "-CAkey", str(ca[1])]
    command += ["-CAcreateserial", "-copy_extensions", "copy", "-days", str(days), "-out", str(cert)]
    # Python 3.13 and later want to be told the issuer's key (RFC 5280 4.2.1.1).
    command += ["-extfile", "/dev/stdin"]
    subprocess.run(command, check=True, capture_output=True, input=b"authorityKeyIdentifier=keyid\n")
    return cert, key
