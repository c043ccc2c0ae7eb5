"""Callers whom an Asterisk hands over by websocket: its messages, and calls over real sockets."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import soundfile as sf
from hypothesis import given
from hypothesis import strategies as st

from appliance import cli
from appliance.admission import Reason
from appliance.clock import NS_PER_MS
from appliance.lines.chan_websocket import (
    MOST_WAITING,
    Said,
    WebsocketMedia,
    _Call,
    command,
    event,
    rate_of,
)
from appliance.lines.sip_stack import Format
from tests.appliance.lines.test_audiosocket import ended, line
from tests.appliance.lines.test_sip import snr_db, speech
from tests.fakes import FakeClock
from tests.fakes_line import FakeBox, Trouble
from tests.sip_rig import print_figures, stub_box, used

pytestmark = pytest.mark.clock

START = (
    "MEDIA_START connection_id:duplexbox channel:WebSocket/duplexbox/0x7f channel_id:17.1 "
    "format:slin optimal_frame_size:320 ptime:20"
)
START_JSON = (
    '{"event":"MEDIA_START","connection_id":"duplexbox","channel":"WebSocket/duplexbox/0x7f",'
    '"channel_id":"17.2","format":"slin","optimal_frame_size":320,"ptime":20,'
    '"channel_variables":{"A":"b"}}'
)


@pytest.mark.parametrize("text", [START, START_JSON])
def test_both_forms_of_a_message_say_the_same(text: str) -> None:
    said = event(text)
    assert said.kind == "MEDIA_START"
    assert (said.fields["format"], said.fields["optimal_frame_size"]) == ("slin", "320")
    assert said.fields["channel"] == "WebSocket/duplexbox/0x7f"
    assert event("MEDIA_XOFF") == Said("MEDIA_XOFF")
    assert command("HANGUP", as_json=False) == "HANGUP"
    assert command("HANGUP", as_json=True) == '{"command": "HANGUP"}'


@given(st.text(max_size=200))
def test_what_is_no_message_is_none_and_raises_nothing(text: str) -> None:
    assert isinstance(event(text), Said)
    assert isinstance(event("{" + text), Said)
    assert event('{"event": 7, "digit": ["5"]}').fields == {}


@pytest.mark.parametrize(
    ("name", "rate_hz"),
    [
        *(("slin", 8_000), ("slin16", 16_000), ("slin24", 24_000), ("slin44", 44_100)),
        *(("slin48", 48_000), ("slin192", 0), ("slin4", 0), ("ulaw", 0), ("opus", 0), ("", 0)),
    ],
)
def test_formats_of_16_bits_are_taken_and_no_others(name: str, rate_hz: int) -> None:
    assert rate_of(name) == rate_hz


class Asterisk:
    """Plays a packet of 20 ms every 20 ms, as the other end does."""

    def __init__(self, ppm: float) -> None:
        self.clock = FakeClock()
        self.media = WebsocketMedia("slin16", 640, self.sent, self.clock)
        self.waits = 0
        self.gaps = 0
        self.deepest = 0
        self.packet_ns = int(20 * NS_PER_MS * (1 + ppm / 1e6))
        self.due_ns = self.clock.now_ns()

    def sent(self, message: bytes) -> None:
        assert len(message) % 640 == 0  # what is over would be dropped
        self.waits += len(message) // 640

    def run(self, ms: int) -> None:
        self.clock.advance(ms * NS_PER_MS)
        while self.due_ns <= self.clock.now_ns():
            self.due_ns += self.packet_ns
            self.gaps += not self.waits
            self.waits = max(0, self.waits - 1)
            self.deepest = max(self.deepest, self.waits)


@pytest.mark.parametrize("ppm", [-200.0, 0.0, 200.0])
def test_what_waits_there_is_known_though_its_clock_is_not_ours(ppm: float) -> None:
    asterisk = Asterisk(ppm)
    media = asterisk.media
    odd = np.zeros(1_283, np.int16)  # stretching leaves no whole packets
    for second in range(600):
        for _ in range(12):
            form = media.format()
            assert form is not None
            # What `transmit.Lead` does of it: never more than 100 ms.
            if form.queued_samples < 1_600:
                media.write(odd[: min(odd.size, 1_283)])
            asterisk.run(80)
        if second % 5 == 4:
            media.waits(asterisk.waits)
    form = media.format()
    assert form is not None
    assert abs(form.queued_samples / 16 - asterisk.waits * 20) < 65
    assert asterisk.deepest * 20 < 260  # a frame of 80 ms on top of 100 ms and what is not known


def test_an_asterisk_that_has_run_dry_is_known_to_have() -> None:
    asterisk = Asterisk(0)
    asterisk.media.write(np.zeros(1_283, np.int16))
    asterisk.run(70)
    form = asterisk.media.format()
    assert form is not None
    assert form.queued_samples == 160 + 3  # and what is no packet yet
    asterisk.run(20)
    assert asterisk.media.format() == Format(16_000, 0)


def test_an_asterisk_that_wants_no_more_gets_none_and_unread_audio_is_bounded() -> None:
    asterisk = Asterisk(0)
    asterisk.media.is_stopped = True
    assert asterisk.media.write(np.ones(640, np.int16)) == 0
    assert asterisk.waits == 0
    for _ in range(1_000):
        asterisk.media.heard(bytes(640))
    assert asterisk.media.read().size == 2 * 16_000
    assert asterisk.media.read().size == 0
    asterisk.media.is_open = False
    assert asterisk.media.format() is None


def test_an_asterisk_that_does_not_read_is_noticed() -> None:
    call = _Call(as_json=False)
    for _ in range(MOST_WAITING):
        call.send(b"x")
    assert not call.is_stuck
    call.send(b"x")
    assert call.is_stuck


def words(folder: Path) -> tuple[str, ...]:
    return "--end-key", "#", "--persona", "You are Ann.", "--record", str(folder / "tapes")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A line's port, and the folder of its records."""
    folder = tmp_path_factory.mktemp("line")
    with (
        FakeBox(folder) as box,
        line(folder, box.path, *words(folder), verb="chan-websocket") as port,
    ):
        yield port, folder


async def exchange(port: int, start: str, pcm: bytes, *texts: str) -> tuple[bytes, list[str]]:
    """Talk as an Asterisk does: what was heard, and what was said."""
    heard, said = [], []
    url = f"http://127.0.0.1:{port}/media?caller=%2B4930&name=Ann"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, protocols=("media",)) as socket,
    ):
        assert socket.protocol == "media"
        await socket.send_str(start)

        async def listen() -> None:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    heard.append(message.data)
                else:
                    said.append(message.data)

        listening = asyncio.create_task(listen())
        loop = asyncio.get_running_loop()
        due = loop.time()
        for at in range(0, len(pcm), 320):
            await socket.send_bytes(pcm[at : at + 320])
            due += 0.02
            await asyncio.sleep(max(0.0, due - loop.time()))
        for text in texts:
            await socket.send_str(text)
        if texts:
            await asyncio.wait_for(listening, 10)
        listening.cancel()
    return b"".join(heard), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "key", "ends"),
    [
        (START, "DTMF_END digit:# channel_id:17.1", ["ANSWER", "HANGUP"]),
        (
            START_JSON,
            '{"event":"DTMF_END","channel_id":"17.2","digit":"#"}',
            ['{"command": "ANSWER"}', '{"command": "HANGUP"}'],
        ),
    ],
)
def test_a_call_over_a_websocket_there_and_back(
    running: tuple[int, Path], start: str, key: str, ends: list[str]
) -> None:
    port, folder = running
    voice = speech(2.0)
    audio, said = asyncio.run(exchange(port, start, voice.astype("<i2").tobytes(), key))
    row = ended(folder)[-1]
    assert said == ends
    assert snr_db(voice, np.frombuffer(audio, "<i2").astype(np.int16)) > 12
    assert (row.line, row.digits, row.why) == ("chan-websocket", "#", "key #")
    assert sf.info(row.recording).channels == 2
    assert sf.info(row.recording).duration == pytest.approx(row.talked_ms / 1000, abs=0.6)
    assert (row.caller, row.name, row.call_id) == (
        "+4930",
        "Ann",
        event(start).fields["channel_id"],
    )


@pytest.mark.slow
def test_who_is_refused_or_is_no_asterisk_is_hung_up_on(tmp_path: Path) -> None:
    async def visit(port: int) -> None:
        url = f"http://127.0.0.1:{port}/media"
        async with aiohttp.ClientSession() as session:
            assert (await session.get(url)).status == 426
            page = {"Origin": "http://evil.example"}
            with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                await session.ws_connect(url, headers=page)
            for first in (
                "HELLO",
                START.replace("slin", "ulaw"),
                START.replace("320", "-1"),
                START.replace("320", "9" * 5000),
                "{",
            ):
                async with session.ws_connect(url) as socket:
                    await socket.send_str(first)
                    assert (await socket.receive(5)).type is aiohttp.WSMsgType.CLOSE
            async with session.ws_connect(url) as socket:
                await socket.send_str(START)
                assert (await socket.receive(5)).data == "HANGUP"
                assert (await socket.receive(5)).type is aiohttp.WSMsgType.CLOSE

    with (
        FakeBox(tmp_path, Trouble(refuse=Reason.MEMORY)) as box,
        line(tmp_path, box.path, verb="chan-websocket") as port,
    ):
        asyncio.run(visit(port))
        (row,) = ended(tmp_path)
    assert row.why.startswith("refused (memory)")
    assert "c(slin16)n" in (tmp_path / "line.log").read_text()


@pytest.mark.slow
def test_an_operator_hangs_up_and_the_dialplan_goes_on(tmp_path: Path) -> None:
    async def visit(port: int, box: Path) -> None:
        url = f"http://127.0.0.1:{port}/media"
        async with aiohttp.ClientSession() as session, session.ws_connect(url) as ws:
            await ws.send_str(START)
            while (await ws.receive(5)).type is not aiohttp.WSMsgType.BINARY:
                pass  # until it is answered, and heard
            words = ["hangup", "1", "--socket", str(box), "--why", "enough"]
            assert await asyncio.to_thread(cli.main, words) == 0
            while (message := await ws.receive(5)).type is aiohttp.WSMsgType.BINARY:
                pass
            assert message.data == "HANGUP"

    with stub_box(tmp_path, 1) as box, line(tmp_path, box, verb="chan-websocket") as port:
        asyncio.run(visit(port, box))
        (row,) = ended(tmp_path)
    assert row.why == "an operator ended it: enough"


@pytest.mark.parametrize("verb", ["audiosocket", "chan-websocket"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--end-key", "x"], "--end-key x: expected one of 0123456789ABCD*#"),
        (["--end-words", "..."], "holds no word"),
        (["--announce", "a.wav"], "for calls that are recorded: --record FOLDER"),
        (["--listen", "10.0.0.5:9093"], "would answer whoever reaches it"),
        (["--allow", "10.0.0.1/24"], "has host bits set"),
        (["--persona", "x" * 8001], "--persona has 8001 characters; 8000 are allowed"),
        (["--voice", "x" * 65], "--voice has 65 characters; 64 are allowed"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_reason(
    verb: str, wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, "--socket", "no.sock", "--records", "no.sqlite", *wrong]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.soak
def test_many_callers_by_websocket_and_what_they_cost(tmp_path: Path) -> None:
    """20 calls of 20 s at 24 kHz; DUPLEXBOX_CALLS and DUPLEXBOX_CALL_S for others."""
    calls = int(os.environ.get("DUPLEXBOX_CALLS", "20"))
    seconds = float(os.environ.get("DUPLEXBOX_CALL_S", "20"))
    packet = np.random.default_rng(1).integers(-99, 99, 480, np.int16).tobytes()
    heard = [0] * calls

    async def call(session: aiohttp.ClientSession, port: int, number: int) -> None:
        async with session.ws_connect(f"http://127.0.0.1:{port}/?caller={number}") as socket:
            await socket.send_str(START.replace("slin", "slin24").replace("320", "960"))
            loop = asyncio.get_running_loop()

            async def listen() -> None:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        heard[number] += len(message.data)

            listening = asyncio.create_task(listen())
            due = loop.time()
            end = due + seconds
            while due < end:
                await socket.send_bytes(packet)
                due += 0.02
                await asyncio.sleep(max(0.0, due - loop.time()))
            listening.cancel()

    async def all_of_them(port: int) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(call(session, port, number) for number in range(calls)))

    with (
        stub_box(tmp_path, calls) as box,
        line(tmp_path, box, verb="chan-websocket") as port,
    ):
        (pid,) = [
            int(found.parent.name)
            for found in Path("/proc").glob("[0-9]*/cmdline")
            if f"127.0.0.1:{port}".encode() in found.read_bytes()
        ]
        before = used(pid)
        asyncio.run(all_of_them(port))
        share = (used(pid).cpu_s - before.cpu_s) / seconds
        rows = ended(tmp_path)
    whole = sum(row.whole for row in rows) / sum(row.frames for row in rows)
    print_figures(
        f"{calls} calls of {seconds:g} s by websocket",
        cpu_of_one_core=round(share, 3),
        frames_whole=round(whole, 4),
        delivered=sum(row.delivered for row in rows),
        not_delivered=sum(row.late + row.filled for row in rows),
        heard_s=(min(heard) / 48_000, max(heard) / 48_000),
    )
    assert len(rows) == calls
    assert {row.why for row in rows} == {"hung up"}
    assert min(heard) / 48_000 > seconds - 1.5
    assert whole > 0.9
