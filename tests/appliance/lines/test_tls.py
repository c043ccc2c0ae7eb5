"""A certificate on demand: made once, kept, private, and good enough for a client that checks."""

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from appliance.lines.tls import AUTO, KEPT_IN, VALID_DAYS, TlsError, server_context


def handshake(server: ssl.SSLContext, cert: Path, name: str) -> None:
    """A TLS handshake in memory, with a client that trusts ``cert`` and checks ``name``."""
    client = ssl.create_default_context(cafile=str(cert))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path / KEPT_IN


def test_a_certificate_is_made_once_and_a_client_can_check_it(home: Path) -> None:
    context = server_context(AUTO, ["box.example", "192.0.2.7"])
    for name in ("localhost", "127.0.0.1", "box.example", "192.0.2.7"):
        handshake(context, home / "cert.pem", name)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(context, home / "cert.pem", "other.example")
    before = (home / "cert.pem").read_bytes()
    server_context(AUTO, ["box.example"])
    assert (home / "cert.pem").read_bytes() == before
    assert stat.S_IMODE((home / "key.pem").stat().st_mode) == 0o600


def test_it_is_made_anew_before_it_ends(home: Path) -> None:
    server_context(AUTO, [])
    before = (home / "cert.pem").read_bytes()
    server_context(AUTO, [], datetime.now(UTC) + timedelta(days=VALID_DAYS - 40))
    assert (home / "cert.pem").read_bytes() == before
    server_context(AUTO, [], datetime.now(UTC) + timedelta(days=VALID_DAYS - 20))
    assert (home / "cert.pem").read_bytes() != before


def test_a_folder_without_a_certificate_is_one_line(tmp_path: Path, home: Path) -> None:
    with pytest.raises(TlsError, match=r"has no cert.pem and key.pem.*--tls auto"):
        server_context(str(tmp_path), [])
    home.mkdir(parents=True)
    (home / "cert.pem").write_text("junk")
    (home / "key.pem").write_text("junk")
    with pytest.raises(TlsError, match=r"Remove cert.pem and key.pem"):
        server_context(AUTO, [])


def test_a_kept_certificate_that_lacks_a_name_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    server_context(AUTO, ["127.0.0.1"])
    cert = tmp_path / KEPT_IN / "cert.pem"
    first = cert.read_bytes()
    server_context(AUTO, ["127.0.0.1", "localhost"])
    assert cert.read_bytes() == first
    server_context(AUTO, ["192.0.2.7"])  # the machine got another address
    assert cert.read_bytes() != first
