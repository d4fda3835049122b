"""Makes certificates for tests, with the library `cryptography`: self-signed ones, ones that an own CA issued, and OCSP
responses of that CA.

They are for localhost and 127.0.0.1. A client that trusts the self-signed certificate, or the CA's certificate
(`cafile`, `NODE_EXTRA_CA_CERTS`), accepts the connection. Not a test.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509 import ocsp
from cryptography.x509.oid import NameOID

LOCAL_HOSTS = ("localhost", "127.0.0.1")
# Clocks of two test processes may differ a little.
_BACKDATED = timedelta(minutes=5)

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


def self_signed(
    folder: Path,
    name: str = "server",
    *,
    passphrase: str = "",
    hosts: Sequence[str] = LOCAL_HOSTS,
    kind: str = "ECDSA",
    days: int = 2,
) -> tuple[Path, Path]:
    """Writes `NAME.crt` and `NAME.key` into `folder`: a new pair at every call. Returns both paths."""
    key = _key(kind)
    extensions = [
        x509.BasicConstraints(ca=True, path_length=None),
        *([_alternative_names(hosts)] if hosts else []),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
    ]
    cert = _certificate(name, name, key.public_key(), key, extensions, days)
    return _write(folder, name, cert, key, passphrase)


def authority(folder: Path, name: str = "authority") -> tuple[Path, Path]:
    """Writes a CA: `NAME.crt`, which clients trust, and `NAME.key`, which `issued` signs with."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    extensions = [
        x509.BasicConstraints(ca=True, path_length=None),
        x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
    ]
    return _write(folder, name, _certificate(name, name, key.public_key(), key, extensions, days=2), key)


def issued(
    folder: Path,
    ca: tuple[Path, Path],
    name: str = "server",
    *,
    hosts: Sequence[str] = LOCAL_HOSTS,
    days: int = 2,
    kind: str = "ECDSA",
) -> tuple[Path, Path]:
    """Writes `NAME.crt` and `NAME.key`, issued by `ca` for `hosts`. With `days` below 0 it has expired."""
    ca_cert, ca_key = _read(ca)
    key = _key(kind)
    issuer = str(ca_cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    extensions = [
        _alternative_names(hosts),
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
        # Python 3.13 and later require the issuer's key identifier (RFC 5280 4.2.1.1).
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
    ]
    return _write(folder, name, _certificate(name, issuer, key.public_key(), ca_key, extensions, days), key)


def ocsp_response(
    ca: tuple[Path, Path],
    cert: Path,
    *,
    status: ocsp.OCSPCertStatus = ocsp.OCSPCertStatus.GOOD,
    days: float | None = 2,
) -> bytes:
    """What the responder of `ca` says about a certificate that it issued, in DER. It counts for `days`, or says nothing
    of that (None)."""
    ca_cert, ca_key = _read(ca)
    now = datetime.now(UTC)
    until = None if days is None else now + timedelta(days=days)
    begin = now - _BACKDATED if until is None else min(now - _BACKDATED, until - timedelta(days=1))
    builder = (
        ocsp.OCSPResponseBuilder()
        .add_response(
            cert=x509.load_pem_x509_certificate(cert.read_bytes()),
            issuer=ca_cert,
            algorithm=hashes.SHA1(),
            cert_status=status,
            this_update=begin,
            next_update=until,
            revocation_time=begin if status is ocsp.OCSPCertStatus.REVOKED else None,
            revocation_reason=None,
        )
        .responder_id(ocsp.OCSPResponderEncoding.HASH, ca_cert)
    )
    return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def public_key_der(cert: Path) -> bytes:
    """The certificate's public key as DER SubjectPublicKeyInfo, of which Chromium takes a SHA-256 pin."""
    public_key = x509.load_pem_x509_certificate(cert.read_bytes()).public_key()
    return public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _read(ca: tuple[Path, Path]) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = serialization.load_pem_private_key(ca[1].read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return x509.load_pem_x509_certificate(ca[0].read_bytes()), key


def _key(kind: str) -> Key:
    if kind == "RSA":
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return ec.generate_private_key(ec.SECP256R1())


def _alternative_names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for host in hosts:
        is_address = host.replace(".", "").isdigit() or ":" in host
        names.append(x509.IPAddress(ip_address(host)) if is_address else x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _certificate(
    subject: str,
    issuer: str,
    public_key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
    signing_key: Key,
    extensions: Sequence[x509.ExtensionType],
    days: int,
) -> x509.Certificate:
    now = datetime.now(UTC)
    # One that has expired began before it ended.
    begin = min(now - _BACKDATED, now + timedelta(days=days - 1))
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + timedelta(days=days))
    )
    for extension in extensions:
        critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
        builder = builder.add_extension(extension, critical)
    return builder.sign(signing_key, hashes.SHA256())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _write(folder: Path, name: str, cert: x509.Certificate, key: Key, passphrase: str = "") -> tuple[Path, Path]:
    cert_path, key_path = folder / f"{name}.crt", folder / f"{name}.key"
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        encryption = serialization.BestAvailableEncryption(passphrase.encode())
    cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return cert_path, key_path
