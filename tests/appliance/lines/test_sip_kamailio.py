"""Debian's Kamailio: logins, encrypted connections, two boxes sharing calls. `make test-lines`."""

import signal
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import soxr

from appliance.admission import Reason
from tests.appliance.lines.test_sip import Line, line, speech
from tests.fakes_line import FakeBox, Trouble
from tests.sip_debian import baresip, certificate, kamailio
from tests.sip_peer import Phone, Refused, sleep
from tests.sip_rig import HearingBox, print_figures, snr_db

pytestmark = [pytest.mark.peers, pytest.mark.clock]


MODULES = "".join(
    f'loadmodule "{name}.so"\n' for name in ("tm", "sl", "rr", "pv", "textops", "siputils")
)

REGISTRAR = (
    MODULES
    + """loadmodule "usrloc.so"
loadmodule "registrar.so"
loadmodule "auth.so"
request_route {
  if (is_method("REGISTER")) {
    if (!pv_www_authenticate("duplex", "s3cret", "0")) { www_challenge("duplex", "0"); exit; }
    save("location"); exit;
  }
  if (has_totag()) {
    if (loose_route()) { t_relay(); } else if (is_method("ACK") && t_check_trans()) { t_relay(); }
    exit;
  }
  record_route();
  if (!lookup("location")) { sl_send_reply("404", "Not Found"); exit; }
  t_relay();
}
"""
)


def logs_in(folder: Path, port: int, password: str) -> str:
    """An account's lines of the config, with its password in a file."""
    secret = folder / "secret"
    secret.write_text(f"{password}\n")
    return f'domain = "127.0.0.1:{port}"\nregister = true\npassword_file = "{secret}"'


def test_it_logs_in_at_kamailio_with_a_password_and_is_called_through_it(tmp_path: Path) -> None:
    with kamailio(tmp_path, REGISTRAR) as proxy, FakeBox(tmp_path) as box:
        account = logs_in(tmp_path, proxy, "s3cret")
        with line(tmp_path, box.path, account=account) as running:
            running.wait("account bot is registered")
            with Phone("bot", proxy) as phone:
                phone.dial()
                assert phone.talk(speech(1.0)).arrived_s.size > 40
                assert phone.hang_up() == 200
            running.wait("call 1 over")
            (tmp_path / "secret").write_text("wrong\n")
    assert running.rows()[0].talked_ms > 900


@pytest.mark.parametrize("transport", ["tcp", "tls"])
def test_it_logs_in_and_is_called_over_a_connection(tmp_path: Path, transport: str) -> None:
    keys = certificate(tmp_path / "keys")
    with kamailio(tmp_path, REGISTRAR, tls=keys) as proxy, FakeBox(tmp_path) as box:
        port = proxy + (transport == "tls")
        account = logs_in(tmp_path, port, "s3cret") + f'\ntransport = "{transport}"'
        trust = f'tls_ca = "{keys}/authority.pem"'
        with line(tmp_path, box.path, trust, account) as running:
            running.wait("account bot is registered")
            with Phone("bot", proxy) as phone:
                phone.dial()
                assert phone.talk(speech(1.0)).arrived_s.size > 40
                assert phone.hang_up() == 200
            running.wait("call 1 over")
    assert running.rows()[0].talked_ms > 900


def test_encrypted_audio_over_tls_and_none_of_what_is_not(tmp_path: Path) -> None:
    """SDES: Debian's baresip calls through Kamailio, which hands the call on over TLS."""
    keys = certificate(tmp_path / "keys")
    voice = (speech(6.0) / 32_768).astype(np.float32)
    with kamailio(tmp_path, REGISTRAR, tls=keys) as proxy, HearingBox(tmp_path) as box:
        account = logs_in(tmp_path, proxy + 1, "s3cret")
        account += '\ntransport = "tls"\nsrtp = "mandatory"'
        trust = f'tls_ca = "{keys}/authority.pem"'
        with line(tmp_path, box.path, trust, account) as running:
            running.wait("account bot is registered")
            heard, _ = baresip(tmp_path / "b", proxy, "pcma", voice, 8_000, 7, "srtp-mand")
            running.wait("call 1 over")
            with Phone("bot", proxy) as phone, pytest.raises(Refused, match="488"):
                phone.dial()  # in the clear
    said = soxr.resample(voice, 8_000, 24_000).astype(np.float32)
    to_model = snr_db(said, np.concatenate(box.heard[1]), 24_000)
    back = snr_db(voice, heard, 8_000)
    print_figures("baresip over TLS with SRTP", to_model=to_model, back=back)
    assert to_model[0] > 35
    assert back[0] > 29
    assert len(box.sessions) == 1


def test_a_registrar_with_a_certificate_of_somebody_else_gets_no_password(tmp_path: Path) -> None:
    keys, others = certificate(tmp_path / "keys"), certificate(tmp_path / "others")
    with kamailio(tmp_path, REGISTRAR, tls=keys) as proxy, FakeBox(tmp_path) as box:
        account = logs_in(tmp_path, proxy + 1, "s3cret") + '\ntransport = "tls"'
        with line(tmp_path, box.path, f'tls_ca = "{others}/authority.pem"', account) as running:
            running.wait("certificate verify failed")
            running.wait("account bot is not registered")


def test_who_may_connects_to_us_over_tls_and_who_may_not_is_not_let_in(tmp_path: Path) -> None:
    keys = certificate(tmp_path / "keys")
    ours = tmp_path / "ours.pem"
    ours.write_text((keys / "its.pem").read_text() + (keys / "its.key").read_text())
    settings = f'tls_certificate = "{ours}"\nallow = ["127.0.0.1/32"]'
    trust = ssl.create_default_context(cafile=str(keys / "authority.pem"))
    with FakeBox(tmp_path) as box, line(tmp_path, box.path, settings) as running:
        for transport in ("TCP", "TLS"):
            port = running.port + (transport == "TLS")
            with (
                Phone("bot", port) as phone,
                socket.create_connection(("127.0.0.1", port), 5) as plain,
                trust.wrap_socket(plain, server_hostname="127.0.0.1")
                if transport == "TLS"
                else plain as connection,
            ):
                phone.sequence = 1
                asked = phone.request("OPTIONS").replace(b"2.0/UDP", b"2.0/" + transport.encode())
                connection.sendall(asked)
                assert connection.recv(65_536).startswith(b"SIP/2.0 200 OK")
        for port in (running.port, running.port + 1):
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.5, ("127.0.0.7", 0))


def test_a_wrong_password_is_said_and_tried_again(tmp_path: Path) -> None:
    with kamailio(tmp_path, REGISTRAR) as proxy, FakeBox(tmp_path) as box:
        account = logs_in(tmp_path, proxy, "wrong")
        with line(tmp_path, box.path, account=account) as running:
            running.wait("account bot is not registered at 127.0.0.1")


def dispatcher(folder: Path, lines: list[Line]) -> str:
    """As docs/telephone.md has it: asked at the health port, called at the other."""
    listed = folder / "dispatcher.list"
    listed.write_text(
        "".join(f"1 sip:127.0.0.1:{one.health} 0 0 calls={one.port}\n" for one in lines)
    )
    return (
        MODULES
        + f"""loadmodule "dispatcher.so"
modparam("dispatcher", "list_file", "{listed}")
modparam("dispatcher", "flags", 2)
modparam("dispatcher", "xavp_dst", "_dsdst_")
modparam("dispatcher", "ds_ping_method", "OPTIONS")
modparam("dispatcher", "ds_ping_interval", 1)
modparam("dispatcher", "ds_probing_mode", 1)
modparam("dispatcher", "ds_probing_threshold", 1)
modparam("dispatcher", "ds_inactive_threshold", 1)
modparam("dispatcher", "ds_ping_reply_codes", "code=200")
"""
        + """request_route {
  if (has_totag()) {
    if (loose_route()) { t_relay(); } else if (is_method("ACK") && t_check_trans()) { t_relay(); }
    exit;
  }
  record_route();
  if (!ds_select_dst("1", "4")) { route(FULL); exit; }
  route(CALLS);
  t_on_failure("NEXT");
  t_relay();
}
route[CALLS] {
  $du = "sip:127.0.0.1:" + $(xavp(_dsdst_=>attrs){param.value,calls});
}
route[FULL] {
  append_to_reply("Retry-After: 5\\r\\n");
  sl_send_reply("503", "Service Unavailable");
}
failure_route[NEXT] {
  if (t_is_canceled() || !t_check_status("486|503|408")) { exit; }
  if (ds_next_dst()) { route(CALLS); t_on_failure("NEXT"); t_relay(); exit; }
  append_to_reply("Retry-After: 5\\r\\n");
  t_reply("503", "Service Unavailable");
}
"""
    )


def call_through(proxy: int, calls: int) -> None:
    for _ in range(calls):
        with Phone("bot", proxy) as phone:
            phone.dial()
            phone.hang_up()


def test_two_boxes_behind_kamailio_share_calls_and_a_full_or_stopping_one_gets_none(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        boxes = [stack.enter_context(FakeBox(folder, Trouble())) for folder in folders]
        lines = [
            stack.enter_context(line(folder, box.path, "calls_per_s = 100"))
            for folder, box in zip(folders, boxes, strict=True)
        ]
        proxy = stack.enter_context(kamailio(tmp_path, dispatcher(tmp_path, lines)))
        sleep(4)
        call_through(proxy, 8)
        assert [len(box.sessions) for box in boxes] == [4, 4]
        boxes[0].trouble.refuse = Reason.MEMORY
        sleep(4)
        call_through(proxy, 4)
        assert [len(box.sessions) for box in boxes] == [4, 8]
        assert not lines[0].rows()[4:]  # it was not even asked
        boxes[1].trouble.refuse = Reason.MEMORY
        with Phone("bot", proxy) as phone, pytest.raises(Refused, match="503") as refused:
            phone.dial()
        assert "Retry-After: 5" in refused.value.headers
        boxes[0].trouble.refuse = None
        sleep(4)
        call_through(proxy, 2)
        assert [len(box.sessions) for box in boxes] == [6, 8]
        # One that stops, with a call that goes on, gets no new one.
        boxes[1].trouble.refuse = None
        sleep(4)
        with Phone("bot", lines[0].port) as last:
            last.dial()
            lines[0].process.send_signal(signal.SIGTERM)
            sleep(1.2)
            call_through(proxy, 4)
            assert [len(box.sessions) for box in boxes] == [7, 12]
