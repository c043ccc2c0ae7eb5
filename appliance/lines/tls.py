"""A certificate on demand: browsers give a page the microphone only over HTTPS (or on localhost).

Decides where key and certificate lie and when they are made anew. The certificate is signed by
itself, so a browser asks once whether to trust it; that is why it is kept.
"""

import ipaddress
import os
import socket
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509

AUTO = "auto"
KEPT_IN = Path(".local/state/duplexbox/tls")
"""Below the home of whoever runs the line."""

VALID_DAYS = 397
"""What Apple's and Chromium's verifiers accept at most."""

RENEW_DAYS = 30


class TlsError(ValueError):
    """Key or certificate cannot be used or made; the operator's to fix."""


def server_context(where: str, names: Iterable[str], now: datetime | None = None) -> ssl.SSLContext:
    """TLS for a server. where: `AUTO`, or a folder with cert.pem and key.pem.

    names: host names and addresses a certificate made here is for. Raises `TlsError`.
    """
    names = list(names)
    folder = Path.home() / KEPT_IN if where == AUTO else Path(where)
    cert, key = folder / "cert.pem", folder / "key.pem"
    try:
        if where == AUTO and not _is_good(cert, key, names, now or datetime.now(UTC)):
            make_certificate(folder, names, now or datetime.now(UTC))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(cert, key)
    except FileNotFoundError:
        raise TlsError(
            f"{folder} has no cert.pem and key.pem. Name a folder that has, or: --tls {AUTO}"
        ) from None
    except (OSError, ValueError) as err:
        raise TlsError(
            f"the certificate in {folder} cannot be used: {err}. "
            f"Remove cert.pem and key.pem to have new ones made by --tls {AUTO}"
        ) from None
    return context


def make_certificate(folder: Path, names: Iterable[str], now: datetime) -> None:
    """Write key.pem, readable by its owner only, and cert.pem into ``folder``. Raises `OSError`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "duplexbox")])
    known = {"localhost", "127.0.0.1", "::1", socket.gethostname(), *names}
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of phones are not exact
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general(n) for n in sorted(known)]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for name, content, mode in (
        ("key.pem", secret, 0o600),
        ("cert.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644),
    ):
        path = folder / name
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(content)


def _is_good(cert: Path, key: Path, names: list[str], now: datetime) -> bool:
    """Whether what was kept can be used for a while, for all of ``names``.

    Raises `ValueError` if it is damaged.
    """
    from cryptography import x509

    if not cert.exists() or not key.exists():
        return False
    found = x509.load_pem_x509_certificate(cert.read_bytes())
    if found.not_valid_after_utc - now <= timedelta(days=RENEW_DAYS):
        return False
    try:
        known = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return all(_general(name) in known for name in names)


def _general(name: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
