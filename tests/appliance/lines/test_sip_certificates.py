"""When our own certificate begins and ends: an operator hears of it before the peers do."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from appliance.lines.sip_certificates import trouble, validity
from tests.appliance.lines.test_sip import line
from tests.fakes_line import FakeBox

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
PATH = Path("/etc/own.pem")


def pem(begins: datetime, ends: datetime) -> str:
    """Key and certificate in one file, as an operator has them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "box")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return (secret + certificate.public_bytes(serialization.Encoding.PEM)).decode()


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2027, 1, 2, tzinfo=UTC)),
        (datetime(1999, 12, 31, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)),  # both forms
    ],
)
def test_the_dates_are_those_of_the_certificate(begins: datetime, ends: datetime) -> None:
    assert validity(pem(begins, ends)) == (begins, ends)


@pytest.mark.parametrize(
    ("begins_days", "ends_days", "says"),
    [
        (-1, 15, ""),
        (-1, 14, "own.pem expires on 2026-12-15 12:00 UTC. Put a new one there and restart"),
        (-9, -1, "has expired on 2026-11-30 12:00 UTC: peers that look refuse it"),
        (-9, 0, "has expired on 2026-12-01"),
        (1, 99, "is not valid before 2026-12-02 12:00 UTC"),
    ],
)
def test_what_is_said_of_it(begins_days: int, ends_days: int, says: str) -> None:
    said = trouble(PATH, NOW + timedelta(begins_days), NOW + timedelta(ends_days), NOW)
    assert (says in said) if says else not said
    # The same until it becomes another, for it is said once.
    for minutes in (10, 60):
        now = NOW + timedelta(minutes=minutes)
        later = trouble(PATH, NOW + timedelta(begins_days), NOW + timedelta(ends_days), now)
        assert later == said


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 8, 30, 100, 150])
def test_a_file_that_is_none_is_an_error_with_words(cut: int) -> None:
    with pytest.raises(ValueError, match="certificate"):
        validity("no certificate")
    text = pem(NOW, NOW + timedelta(1))
    body = re.search("BEGIN CERTIFICATE-----\n(.*)\n-----END", text, re.S)
    assert body is not None
    whole = body[1]
    with pytest.raises(ValueError, match=r"certificate|base64|dates|padding"):
        validity(text.replace(whole, whole.replace("\n", "")[:cut]))


@pytest.mark.clock
@pytest.mark.slow
def test_one_that_has_expired_is_said_at_the_start_and_keeps_nobody_from_calling(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.pem"
    now = datetime.now(UTC)
    own.write_text(pem(now - timedelta(9), now - timedelta(2)))
    day = (now - timedelta(2)).strftime("%Y-%m-%d %H:%M UTC")
    with (
        FakeBox(tmp_path) as box,
        line(tmp_path, box.path, f'tls_certificate = "{own}"') as running,
    ):
        running.wait(f"WARNING appliance.lines.sip_baresip: [sip] tls_certificate = {own} has")
        assert running.log.read_text().count(f"has expired on {day}") == 1
