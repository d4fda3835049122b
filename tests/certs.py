"""Certificates for tests: self-signed, for localhost and 127.0.0.1, made by openssl(1) in a few milliseconds.

Not a test. A client that trusts the certificate itself (`cafile`, `NODE_EXTRA_CA_CERTS`) finds it good.
"""

import subprocess
from pathlib import Path


def self_signed(folder: Path, name: str = "server", *, passphrase: str = "") -> tuple[Path, Path]:
    """`NAME.crt` and `NAME.key` in `folder`, a pair of its own at every call."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
