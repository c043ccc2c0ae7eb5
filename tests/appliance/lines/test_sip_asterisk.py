"""The lines with a real Asterisk: SIP, AudioSocket, websockets, callers it is asked to send on.

Run by `make test-lines`; tests/sip_asterisk.py says how to get one.
"""

from pathlib import Path

import numpy as np
import pytest
import soxr

from appliance.admission import Reason
from tests.appliance.lines.test_audiosocket import ended
from tests.appliance.lines.test_audiosocket import line as bridge
from tests.appliance.lines.test_sip import line, speech, ticks
from tests.fakes_line import FakeBox, Trouble
from tests.sip_asterisk import asterisk
from tests.sip_peer import now_s, sleep
from tests.sip_rig import HearingBox, print_figures, snr_db

pytestmark = [pytest.mark.peers, pytest.mark.clock]


@pytest.mark.parametrize(
    ("media", "rate_hz"),
    [("c(slin16)n", 16_000), ("c(slin24)nf(json)", 24_000), ("c(slin)", 8_000)],
)
def test_asterisk_hands_a_caller_over_by_websocket(
    tmp_path: Path, media: str, rate_hz: int
) -> None:
    voice = speech(6.0)
    with (
        HearingBox(tmp_path) as box,
        bridge(tmp_path, box.path, verb="chan-websocket") as port,
        asterisk(tmp_path, voice, bridge=port, media=media) as pbx,
    ):
        pbx.say("channel originate Local/s@keys extension s@media")
        (row,) = ended(tmp_path, 40)
        heard, heard_hz = pbx.heard()
    # What its voice holds; above that is what Asterisk's own resampler adds.
    said = (voice / 32_768).astype(np.float32)
    model = soxr.resample(np.concatenate(box.heard[1]), 24_000, 8_000).astype(np.float32)
    to_model = snr_db(said, model, 8_000)
    back_8k = soxr.resample(heard / 32_768, heard_hz, 8_000).astype(np.float32)
    back = snr_db(said, back_8k, 8_000)
    print_figures(f"asterisk websocket {media}", to_model=to_model, back=back, row=row)
    assert to_model[0] > 38
    assert back[0] > 20
    assert row.codec == ("slin" if rate_hz == 8_000 else f"slin{rate_hz // 1000}")
    assert (row.caller, row.digits, row.why) == ("+49 30 1", "42#", "hung up")
    assert ticks(row) == pytest.approx(row.talked_ms / 80, abs=1.5)


def test_a_refused_caller_and_one_whose_call_is_ended_go_on_in_the_dialplan(
    tmp_path: Path,
) -> None:
    with (
        FakeBox(tmp_path, Trouble(refuse=Reason.MEMORY)) as box,
        bridge(tmp_path, box.path, "--end-key", "#", verb="chan-websocket") as port,
        asterisk(tmp_path, speech(2.0), bridge=port) as pbx,
    ):
        pbx.say("channel originate Local/s@keys extension s@media")
        refused = pbx.file("dialstatus")
        (pbx.root / "tmp/dialstatus").unlink()
        box.trouble.refuse = None
        pbx.say("channel originate Local/s@keys extension s@media")
        answered = pbx.file("dialstatus", 20)
    rows = ended(tmp_path)
    assert refused != "ANSWER"
    assert answered == "ANSWER"
    assert rows[0].why.startswith("refused (memory)")
    assert rows[1].why == "key #"


@pytest.mark.parametrize(("user", "is_done"), [("desk", True), ("engaged", False), ("no", False)])
def test_asterisk_sends_a_caller_on(tmp_path: Path, user: str, is_done: bool) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    with asterisk(tmp_path, speech(8.0)) as pbx, FakeBox(tmp_path) as box:
        target = f"sip:{user}@127.0.0.1:{pbx.port}"
        account = f'domain = "127.0.0.1:{pbx.port}"\nregister = true\npassword_file = "{secret}"'
        account += '\npersona = "You are Ann."\nvoice = "alto"'
        extra = f'transfer_to = ["sip:*@127.0.0.1:{pbx.port}"]'
        with line(tmp_path, box.path, extra, account) as running:
            running.wait("account bot is registered")
            pbx.say("channel originate Local/s@speak extension s@dial")
            until = now_s() + 20
            while not box.sessions or box.sessions[0].frame_index < 20:
                assert now_s() < until
                sleep(0.05)
            box.transfer(1, target)
            while not box.transferred:
                assert now_s() < until
                sleep(0.05)
            if is_done:
                assert pbx.file("desk") == "answered"
            running.wait("call 1 over", 40)
        (row,) = running.rows()
    print_figures(f"asterisk transfer {user}", said=box.transferred, row=row)
    join = box.sessions[0].join
    assert (join.persona, join.voice, join.transfers) == ("You are Ann.", "alto", True)
    assert box.transferred[0].is_done is is_done
    assert (row.transfer_to, row.transfer_by) == (target, "operator")


@pytest.mark.parametrize("codec", ["alaw", "g722", "opus"])
def test_asterisk_takes_its_login_and_calls_with_a_voice_and_keys(
    tmp_path: Path, codec: str
) -> None:
    voice = speech(6.0)
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    with asterisk(tmp_path, voice, codec) as pbx, HearingBox(tmp_path) as box:
        account = f'domain = "127.0.0.1:{pbx.port}"\nregister = true\npassword_file = "{secret}"'
        with line(tmp_path, box.path, account=account) as running:
            running.wait("account bot is registered")
            pbx.say("channel originate PJSIP/bot extension s@play")
            running.wait("call 1 over", 40)
        heard, rate_hz = pbx.heard()
    model = np.concatenate(box.heard[1])
    said = (soxr.resample(voice / 32_768, 8_000, 24_000)).astype(np.float32)
    to_model = snr_db(said, model, 24_000)
    (row,) = running.rows()
    print_figures(f"asterisk {codec}", to_model=to_model, row=row, heard=heard.size / rate_hz)
    assert to_model[0] > (25 if codec != "opus" else 8)
    assert np.abs(heard).max() > 1_000
    assert row.digits == "12#"
    assert ticks(row) == pytest.approx(row.talked_ms / 80, abs=1.5)


def test_asterisk_hands_a_caller_over_by_audiosocket(tmp_path: Path) -> None:
    voice = speech(6.0)
    with (
        HearingBox(tmp_path) as box,
        bridge(tmp_path, box.path) as port,
        asterisk(tmp_path, voice, bridge=port) as pbx,
    ):
        pbx.say("channel originate Local/s@speak extension s@bridge")
        (row,) = ended(tmp_path, 40)
        heard, rate_hz = pbx.heard()
    model = np.concatenate(box.heard[1])
    said = (soxr.resample(voice / 32_768, 8_000, 24_000)).astype(np.float32)
    to_model = snr_db(said, model, 24_000)
    print_figures("asterisk audiosocket", to_model=to_model, row=row, heard=heard.size / rate_hz)
    assert to_model[0] > 38
    assert np.abs(heard).max() > 1_000
    assert row.caller == "40325ec2-5efd-4bd3-805f-53576e581d13"
    assert ticks(row) == pytest.approx(row.talked_ms / 80, abs=1.5)
