"""The telephone line among several hosts: routers, a registrar elsewhere, cables that are pulled.

Nothing is on the loopback: each host is a network of its own (`tests/sip_network.py`). What
docs/telephone.md says of routers and of `allow` is what happens here. `make test-lines`, as root.
"""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.lines.sip_records import Row
from tests.appliance.lines.test_sip import Line, line, speech, ticks
from tests.appliance.lines.test_sip_kamailio import REGISTRAR, logs_in
from tests.appliance.lines.test_sip_peers import delays_ms
from tests.sip_debian import certificate, kamailio
from tests.sip_network import Street, Stun, Wired
from tests.sip_peer import Heard, Network, Phone, sleep
from tests.sip_rig import HearingBox, print_figures, used

pytestmark = [pytest.mark.peers, pytest.mark.clock]

EVERYBODY = 'allow = ["198.51.100.0/24"]'

FROM_BEHIND_ROUTERS = (
    REGISTRAR.replace(
        "request_route {",
        """loadmodule "nathelper.so"
modparam("nathelper|registrar", "received_avp", "$avp(RECEIVED)")
request_route {
  force_rport();
  if (is_method("REGISTER")) { fix_nated_register(); }
  if (is_method("INVITE")) { set_contact_alias(); }
""",
    ).replace("if (loose_route()) {", "if (loose_route()) { handle_ruri_alias();")
    + 'onreply_route { if (is_present_hf("Contact")) { set_contact_alias(); } }\n'
)
"""What every carrier's exchange does: it answers where requests come from, whatever they say."""


class BehindRouter(Phone):
    """A telephone as they are sold: it asks to be answered where it is seen to be (RFC 3581)."""

    public = ""
    """What it found out about its own address, if it did."""

    def request(
        self, method: str, body: str = "", *, branch: str = "", sequence: int = 0, extra: str = ""
    ) -> bytes:
        raw = super().request(method, body, branch=branch, sequence=sequence, extra=extra)
        return re.sub(rb"(\r\nVia: [^\r]*)", rb"\1;rport", raw, count=1)

    def sdp(self, *, direction: str = "sendrecv", payloads: str = "0 101") -> str:
        body = super().sdp(direction=direction, payloads=payloads)
        return body.replace(f"c=IN IP4 {self.source}", f"c=IN IP4 {self.public or self.source}")


def phone_on(at: Wired, host: str, port: int, user: str = "bot") -> BehindRouter:
    """One that calls from there."""
    with at.host.inside():
        return BehindRouter(user, port, host=host, source=at.address)


@contextmanager
def line_on(
    at: Wired, folder: Path, box: HearingBox, extra: str, account: str = ""
) -> Iterator[Line]:
    with at.host.inside(), line(folder, box.path, extra, account, at.address) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Behind:
    """A line behind a router, logged in at an exchange, and a caller on the street."""

    running: Line
    server: Stun
    exchange: Wired
    caller: Wired
    port: int
    """The exchange's."""

    def phone(self) -> BehindRouter:
        """One that calls the line there."""
        return phone_on(self.caller, self.exchange.address, self.port)


@contextmanager
def line_behind_a_router(
    folder: Path, box: HearingBox, transport: str = "tcp", *, stun: bool = True, how: str = ""
) -> Iterator[Behind]:
    """how: of `Street.router`."""
    with Street() as street, ExitStack() as stack:
        exchange, caller, asked = street.host(2), street.host(20), street.host(3)
        _, here = street.router(9, "192.168.7.5", how)
        with exchange.host.inside():
            config = FROM_BEHIND_ROUTERS
            port = stack.enter_context(kamailio(folder, config, host=exchange.address))
        with asked.host.inside():
            server = stack.enter_context(Stun(asked.address))
        account = logs_in(folder, port, "s3cret").replace("127.0.0.1", exchange.address)
        account += f'\ntransport = "{transport}"\n'
        account += f'stun = "stun:{asked.address}:3478"\n' if stun else ""
        with line_on(here, folder, box, EVERYBODY, account) as running:
            running.wait("account bot is registered")
            yield Behind(running, server, exchange, caller, port)


def loudness(pcm: NDArray[np.float32]) -> float:
    """RMS; of `speech` 0.09."""
    return float(np.sqrt(np.mean(pcm.astype(np.float64) ** 2))) if pcm.size else 0.0


def heard_of(heard: Heard) -> float:
    return loudness((heard.pcm / 32_768).astype(np.float32))


def test_logins_at_a_registrar_on_another_host_and_calls_from_a_third(tmp_path: Path) -> None:
    """With a digest, over UDP, TCP and TLS: three accounts of one line."""
    with Street() as street, HearingBox(tmp_path) as box:
        here, exchange, caller = street.host(5), street.host(2), street.host(20)
        keys = certificate(tmp_path / "keys", f"IP:{exchange.address}")
        with (
            exchange.host.inside(),
            kamailio(tmp_path, REGISTRAR + "mhomed=1\n", tls=keys, host=exchange.address) as port,
        ):
            accounts = ""
            for user, transport in (("bot", "udp"), ("over-tcp", "tcp"), ("over-tls", "tls")):
                at = port + (transport == "tls")
                secret = logs_in(tmp_path, at, "s3cret").replace("127.0.0.1", exchange.address)
                accounts += secret + f'\ntransport = "{transport}"\n'
                if user != "over-tls":
                    following = "over-tcp" if user == "bot" else "over-tls"
                    accounts += f'[[sip.accounts]]\nuser = "{following}"\n'
            trust = f'{EVERYBODY}\ntls_ca = "{keys}/authority.pem"'
            with line_on(here, tmp_path, box, trust, accounts) as running:
                for number, user in enumerate(("bot", "over-tcp", "over-tls"), 1):
                    running.wait(f"account {user} is registered")
                    with phone_on(caller, exchange.address, port, user) as phone:
                        phone.dial()
                        assert heard_of(phone.talk(speech(1.0))) > 0.04
                        assert phone.hang_up() == 200
                    running.wait(f"call {number} over")
    assert [row.account for row in running.rows()] == ["bot", "over-tcp", "over-tls"]
    assert {row.why for row in running.rows()} == {"the caller hung up"}


@pytest.mark.parametrize(
    ("transport", "stun", "how", "is_heard"),
    [
        ("udp", True, "", True),
        ("tcp", True, "", True),
        ("tcp", False, "", False),
        ("tcp", True, "fully-random", False),
    ],
    ids=["udp", "tcp", "without stun", "another port for every peer"],
)
def test_a_box_behind_a_router_is_called_and_heard_where_stun_says(
    tmp_path: Path, transport: str, stun: bool, how: str, is_heard: bool
) -> None:
    """And where it is not heard it hears nobody: the caller hears the model all the same."""
    with (
        HearingBox(tmp_path) as box,
        line_behind_a_router(tmp_path, box, transport, stun=stun, how=how) as there,
    ):
        with there.phone() as phone:
            phone.dial()
            heard = phone.talk(speech(2.0))
            assert phone.hang_up() == 200
        there.running.wait("call 1 over")
    (row,) = there.running.rows()
    assert {sender[0] for sender in there.server.asked} == ({"198.51.100.9"} if stun else set())
    assert heard.arrived_s.size > 90
    assert (loudness(np.concatenate(box.heard[1])) > 0.06) == is_heard
    assert (heard_of(heard) > 0.04) == is_heard  # the model echoes
    assert (row.rx_packets > 90) == is_heard


def test_a_telephone_behind_a_router_is_heard_hears_nothing_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    """Unless it knows its own address. Our BYE does not reach it either."""
    with Street() as street, HearingBox(tmp_path) as box:
        here = street.host(5)
        router, home = street.router(7, "192.168.8.20")
        settings = f'allow = ["{router.address}/32"]\nmedia_timeout_s = 3'
        with line_on(here, tmp_path, box, settings) as running:
            before = used(running.worker())
            with phone_on(home, here.address, running.port) as phone:
                phone.dial()
                assert not phone.talk(speech(2.0)).arrived_s.size
                assert phone.hang_up() == 200  # its own BYE does
            running.wait("call 1 over")
            with phone_on(home, here.address, running.port) as phone:
                phone.dial()
                phone.talk(speech(1.0))
                assert not phone.listen(4.5)
            running.wait("call 2 over")
            with phone_on(home, here.address, running.port) as phone:
                phone.public = router.address
                phone.dial()
                assert heard_of(phone.talk(speech(2.0))) > 0.04
                assert phone.hang_up() == 200
            running.wait("call 3 over")
            after = used(running.worker())
    assert [session.gone for session in box.sessions] == ["left"] * 3
    assert all(loudness(np.concatenate(box.heard[call])) > 0.03 for call in (1, 2, 3))
    assert after.descriptors <= before.descriptors
    rows = running.rows()
    assert rows[0].source == home.address
    assert rows[1].why == "no audio from the caller for 3 s"
    assert 40 < rows[1].rx_packets < 55


@pytest.mark.parametrize("is_allowed", [False, True], ids=["not allowed", "allowed"])
def test_what_allow_does_not_name_reaches_neither_signalling_nor_audio(
    tmp_path: Path, is_allowed: bool
) -> None:
    """The second is to see that the first would hear it, were it let in."""
    with Street() as street, HearingBox(tmp_path) as box:
        here, caller, stranger = street.host(5), street.host(20), street.host(66)
        others = f', "{stranger.address}/32"' if is_allowed else ""
        settings = f'allow = ["{caller.address}/32"{others}]'
        with (
            line_on(here, tmp_path, box, settings) as running,
            phone_on(caller, here.address, running.port) as phone,
            phone_on(stranger, here.address, running.port) as other,
        ):
            phone.dial()
            other.media = phone.media
            other.talk(speech(2.0))  # into the call of the one who says nothing
            assert phone.hang_up() == 200
            running.wait("call 1 over")
            other.sequence = 1
            for request in ("OPTIONS", "INVITE"):
                other.send(other.request(request, other.sdp()))
            if is_allowed:
                assert other.answer("INVITE")[0] == 200
                assert len(box.sessions) == 2
            else:
                with pytest.raises(TimeoutError):
                    other.answer("OPTIONS", timeout_s=1.0, least=100)
                assert dropped(running) == 2
                with stranger.host.inside(), pytest.raises(TimeoutError):
                    socket.create_connection((here.address, running.port), 1.0)
                assert len(box.sessions) == 1
    row = running.rows()[0]
    assert (loudness(np.concatenate(box.heard[1])) > 0.06) == is_allowed
    assert (row.rx_packets > 90) == is_allowed
    assert is_allowed or row.rx_packets == 0


def dropped(running: Line) -> int:
    """Datagrams that the kernel dropped at the line's socket, as docs/telephone.md has it."""
    table = Path(f"/proc/{running.worker()}/net/udp").read_text().splitlines()[1:]
    port = f":{running.port:04X}"
    return sum(int(row.split()[-1]) for row in table if row.split()[1].endswith(port))


# --- a minute and more, all at once

LONG_S = 72.0
"""The stack asks its STUN server again after 30 s and gives a call up 40 s later."""
AWAY_S = 20.0


@dataclass(frozen=True)
class Call:
    """What is left of one."""

    row: Row
    said: NDArray[np.int16]
    heard: Heard
    model: NDArray[np.float32]
    asked: list[str]
    """What the box wanted of the telephone, first lines."""
    gone: str


def talked(
    phone: Phone, running: Line, box: HearingBox, seconds: float, then_s: float = 0.0
) -> Call:
    """One call of that length. then_s: how long the telephone listens on, instead of hanging up."""
    said = speech(seconds)
    with phone:
        phone.dial()
        heard = phone.talk(said)
        asked = [text.partition("\r\n")[0] for text in phone.listen(then_s)] if then_s else []
        if not then_s:
            assert phone.hang_up() == 200
    running.wait("call 1 over")
    while not (row := running.rows()[0]).ended:
        sleep(0.1)
    return Call(row, said, heard, np.concatenate(box.heard[1]), asked, box.sessions[0].gone)


def on_a_bad_cable(folder: Path) -> Call:
    """5 % of the packets are lost each way, and the others come up to 60 ms late."""
    with Street() as street, HearingBox(folder) as box:
        here, caller = street.host(5), street.host(6, Network(loss=0.05, jitter_s=0.06))
        with line_on(here, folder, box, EVERYBODY) as running:
            return talked(phone_on(caller, here.address, running.port), running, box, 60.0)


def away_for_a_while(folder: Path) -> Call:
    with Street() as street, HearingBox(folder) as box:
        here, caller = street.host(5), street.host(20)
        with line_on(here, folder, box, EVERYBODY) as running:
            for after_s, change in ((10.0, here.unplug), (10.0 + AWAY_S, here.plug)):
                Timer(after_s, change).start()
            return talked(phone_on(caller, here.address, running.port), running, box, 45.0)


def away_for_long(folder: Path) -> Call:
    """Longer than `media_timeout_s`, with a login over TCP, until the box says goodbye again."""
    with Street() as street, HearingBox(folder) as box:
        here, caller = street.host(5), street.host(20)
        with line_on(here, folder, box, f"{EVERYBODY}\nmedia_timeout_s = 10") as running:
            for after_s, change in ((5.0, here.unplug), (25.0, here.plug)):
                Timer(after_s, change).start()
            call = talked(phone_on(caller, here.address, running.port), running, box, 20.0, 20.0)
            with phone_on(caller, here.address, running.port) as phone:
                phone.dial()  # and it takes calls again
                assert phone.hang_up() == 200
            return call


def behind_a_router(folder: Path) -> Call:
    return _behind_a_router(folder)


def without_its_stun_server(folder: Path) -> Call:
    """Which dies once the call is on."""
    return _behind_a_router(folder, server_s=10.0, then_s=1.0)


def _behind_a_router(folder: Path, server_s: float = 0.0, then_s: float = 0.0) -> Call:
    with HearingBox(folder) as box, line_behind_a_router(folder, box) as there:
        if server_s:
            Timer(server_s, there.server.fall_silent).start()
        return talked(there.phone(), there.running, box, LONG_S, then_s)


SCENES = (
    on_a_bad_cable,
    away_for_a_while,
    away_for_long,
    behind_a_router,
    without_its_stun_server,
)


@pytest.fixture(scope="module")
def minute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Call]]]:
    with ThreadPoolExecutor(len(SCENES)) as threads:
        yield {
            scene.__name__: threads.submit(scene, tmp_path_factory.mktemp(scene.__name__))
            for scene in SCENES
        }


def delays_of(call: Call) -> NDArray[np.float64]:
    """How much later each second was heard than said, in ms, and some more for all of them: the
    model may begin to hear after the telephone has begun to talk, if ACK was late."""
    quiet = np.zeros(24_000 // 2, np.float32)
    return delays_ms(call.said, np.concatenate([quiet, call.model]), 0.0)


def test_a_bad_cable_costs_no_tick_and_shrinks_nothing(minute: dict[str, Future[Call]]) -> None:
    call = minute["on_a_bad_cable"].result()
    delays = delays_of(call)
    print_figures(
        "5 % lost, 0 to 60 ms late",
        delays=(delays.min(), np.median(delays), delays.max()),
        back=call.heard.arrived_s.size,
        row=call.row,
    )
    assert 0.02 < call.row.rx_lost / call.row.rx_packets < 0.09
    assert ticks(call.row) == pytest.approx(call.row.talked_ms / 80, abs=1.5)
    assert abs(np.median(delays[-10:]) - np.median(delays[:10])) < 120
    assert np.percentile(delays, 75) - np.percentile(delays, 5) < 200
    assert call.heard.arrived_s.size > 0.9 * 60 / 0.02
    assert call.row.why == "the caller hung up"


def test_a_call_outlives_20_s_without_a_network(minute: dict[str, Future[Call]]) -> None:
    call = minute["away_for_a_while"].result()
    print_figures("20 s without a network", row=call.row)
    assert call.row.why == "the caller hung up"
    assert ticks(call.row) == pytest.approx(call.row.talked_ms / 80, abs=1.5)
    assert np.diff(call.heard.arrived_s).max() == pytest.approx(AWAY_S, abs=2)
    assert loudness(call.model[24_000 * 14 : 24_000 * 28]) < 0.01
    delays = delays_of(call)
    assert abs(np.median(delays[-10:]) - np.median(delays[:8])) < 120
    assert heard_of(call.heard) > 0.04


def test_a_call_ends_when_the_network_is_gone_for_longer_than_media_timeout(
    minute: dict[str, Future[Call]],
) -> None:
    """And the caller hears so once it is back: BYE is sent again for half a minute."""
    call = minute["away_for_long"].result()
    print_figures("away for long", row=call.row)
    assert call.row.why == "no audio from the caller for 10 s"
    assert call.row.rx_packets == pytest.approx(250, abs=25)
    assert call.row.talked_ms == pytest.approx(15_000, abs=1_500)
    assert ticks(call.row) == pytest.approx(call.row.talked_ms / 80, abs=1.5)
    assert call.gone == "left"
    assert any(text.startswith("BYE") for text in call.asked)


def test_a_call_of_a_box_behind_a_router_lasts_longer_than_its_stun_server_is_waited_for(
    minute: dict[str, Future[Call]],
) -> None:
    call = minute["behind_a_router"].result()
    assert call.row.why == "the caller hung up"
    assert call.row.talked_ms > 1000 * LONG_S - 500
    assert call.row.rx_packets > 0.95 * LONG_S / 0.02


def test_a_call_ends_when_its_stun_server_does_not_answer_any_more(
    minute: dict[str, Future[Call]],
) -> None:
    """As docs/telephone.md warns; so `allow` must let its answers in."""
    call = minute["without_its_stun_server"].result()
    assert call.row.why == "the STUN server, or the caller's side, does not answer any more"
    assert call.row.talked_ms == pytest.approx(69_500, abs=1_500)
    assert call.gone == "left"
    assert any(text.startswith("BYE") for text in call.asked)
