"""A call that was run is run again: the same bytes on the CPU executor, whatever happened to it.

The calls are made here by the real loop, the real engine on the demo's bundle and real rings, on a
fake clock: callers join and leave, so that slots move; one tick overruns, so that frames are
missed; frames are lost, come in bursts, or are NaN.
"""

import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from appliance import cli, journal, ledger
from appliance import replay as replays
from appliance.channel import Channel
from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S, TickGrid
from appliance.frame_ring import LAST, Outcome, Receipt, UplinkHeader
from appliance.journal import Head, JournalWriter
from appliance.ledger import Header, Why
from appliance.ledger_writer import LedgerWriter
from appliance.record_ring import RecordRing
from appliance.seat import Arrive, Depart, Restart, Seat
from appliance.session import Event, SessionId
from appliance.tick_loop import TickLoop, TickPolicy
from engines import bundle as bundles
from engines.ort_executor import OrtExecutor
from tests.fakes import FakeClock
from tests.small import SMALL

SLOTS = 3
SETTINGS = {"sampling.seed": 11.0, "sampling.temperature": 0.7}


@dataclass
class Caller:
    seat: Seat
    line: Channel
    writer: JournalWriter
    sent: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))


@dataclass(frozen=True)
class Made:
    """What the calls left behind."""

    folder: Path
    session: int = 2

    @property
    def call(self) -> Path:
        (path,) = (self.folder / "calls").glob(f"*-{self.session:06d}.call")
        return path

    @property
    def journal(self) -> Path:
        return self.folder / f"{self.session}.journal"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("replay")
    bundle = bundles.read(SMALL)
    executor, clock, ring = OrtExecutor(bundle, SLOTS), FakeClock(), RecordRing(4096)
    grid = TickGrid(0, bundle.manifest.timing.period_ns)
    loop = TickLoop(executor, clock, grid, TickPolicy(80 * MS, 4), ring)
    writer = LedgerWriter(folder / "calls", ring, clock)
    callers: list[Caller] = []
    samples = bundle.manifest.timing.samples_per_frame

    def join(settings: dict[str, float]) -> Caller:
        number = len(callers) + 1
        channel = Channel.create(f"dbxtest-{uuid.uuid4().hex[:12]}", samples)
        model = bundle.manifest.model
        header = Header(
            number, number, "test", f"caller {number}", settings, str(bundle.path), model.name,
            model.checkpoint_sha256, grid.period_ns, 0, "20260131T120000.000Z",
        )  # fmt: skip
        head = Head(number, number, 0, model.name, samples, 24_000, settings)
        caller = Caller(
            Seat(SessionId(number), number, channel, settings, 2**62),
            Channel.attach(channel.name),
            JournalWriter(folder / f"{number}.journal", head),
            rng=np.random.default_rng(number),
        )
        writer.open(header, channel.receipts)
        loop.inbox.append(Arrive(caller.seat))
        callers.append(caller)
        return caller

    def speak(caller: Caller, frames: int = 1, nan: bool = False, last: bool = False) -> None:
        for _ in range(frames):
            pcm = (0.1 * caller.rng.standard_normal(samples)).astype(np.float32)
            if nan:
                pcm[5] = np.nan
            header = UplinkHeader(caller.sent, LAST if last else 0, 1 + caller.sent)
            if caller.line.uplink.put(header, pcm):
                caller.writer.said(header, pcm)
            caller.sent += 1

    def listen() -> None:
        pcm = np.empty(samples, np.float32)
        for caller in callers:
            while (header := caller.line.downlink.get(pcm)) is not None:
                caller.writer.heard(header, pcm)
                receipt = Receipt(
                    header.session, header.generation, header.frame_index, Outcome.DELIVERED, 1, 2
                )
                assert caller.line.receipts.put(receipt)

    step = executor.step

    def slow_once(batch: int) -> None:
        step(batch)
        clock.advance(330 * MS if loop.counts.tick == 30 else 10 * MS)

    executor.step = slow_once  # type: ignore[method-assign]
    first, second = join({}), join(SETTINGS)
    tick = 0
    while tick < 60:
        clock.sleep_until(grid.start_ns(tick))
        if tick == 10:
            third = join({"sampling.seed": 5.0})
        for caller in callers:
            if caller.seat.ending is None and not (caller is second and tick in (5, 6, 20)):
                speak(caller)
        if tick == 15:
            speak(second, frames=9)  # a burst: more than may lag, so the oldest are skipped
        if tick == 22:
            speak(second, nan=True)
        if tick == 25:  # slot 0 is left: the last row moves into it
            loop.inbox.append(Depart(first.seat.session, Event.LEAVE))
        if tick == 35:
            loop.inbox.append(Restart(second.seat.session, None))
        if tick == 40:
            loop.inbox.append(Depart(third.seat.session, Event.LEAVE))
        tick = loop.turn(tick)
        listen()
        writer.pump()
    speak(second, last=True)
    while second.seat.ending is None:
        clock.sleep_until(grid.start_ns(tick))
        tick = loop.turn(tick)
        listen()
    clock.advance(NS_PER_S)
    writer.pump()
    for caller in callers:
        writer.finish(caller.seat.session, caller.seat.frame_index, Why.LEFT)
    writer.stop()
    writer.pump()
    for caller in callers:
        caller.writer.close()
        caller.line.close()
        caller.seat.channel.close()
        caller.seat.channel.unlink()
    return Made(folder)


def replayed(made: Made, first: int = 0, last: int = 10**6) -> replays.Comparison:
    call = ledger.read_call(made.call)
    steps = replays.plan(call, journal.read(made.journal))
    executor = OrtExecutor(bundles.read(SMALL), SLOTS)
    return replays.run(executor, call, steps, first, last)


@pytest.mark.parametrize("session", [1, 2, 3])
def test_a_call_replays_to_the_same_bytes(made: Made, session: int) -> None:
    mine = replace(made, session=session)
    call = ledger.read_call(mine.call)
    found = replayed(mine)
    ran = int(((call.ticks["flags"] & ledger.Flag.MISSED) == 0).sum())
    assert found.frames == found.text_equal == found.audio_compared == found.audio_equal == ran
    assert found.is_equal


def test_the_recorded_call_had_everything_in_it(made: Made) -> None:
    """Otherwise the test above would show less than it says."""
    ticks = ledger.read_call(made.call).ticks
    flags = ticks["flags"]
    some = ledger.Flag
    for flag in (some.MISSED, some.RESET, some.CONCEALED, some.BAD_INPUT):
        assert ((flags & flag) > 0).any(), flag
    assert ticks["skipped"].sum() > 0
    assert set(ticks["batch"].tolist()) == {1, 2, 3}
    assert (
        len(set(ticks["slot"].tolist())) > 1
        or len(set(ledger.read_call(replace(made, session=3).call).ticks["slot"].tolist())) > 1
    )
    assert (ticks["text"] >= 0).any()


def test_another_input_is_noticed_at_the_frame_where_it_was_heard(made: Made) -> None:
    call = ledger.read_call(made.call)
    kept = journal.read(made.journal)
    kept.said[12].pcm[:] = 0.9 * np.sin(np.arange(1920) / 8)  # a tone: other codes
    steps = replays.plan(call, kept)
    executor = OrtExecutor(bundles.read(SMALL), SLOTS)
    found = replays.run(executor, call, steps, 0, 10**6)
    where = next(s.index for s in steps if s.pcm is kept.said[12].pcm)
    assert found.first_difference is not None
    assert found.first_difference >= where
    assert not found.is_equal


def test_only_the_stretch_that_is_asked_for_is_compared(made: Made) -> None:
    found = replayed(made, first=35, last=44)
    assert (found.frames, found.audio_equal) == (10, 10)


def test_seconds_become_frames() -> None:
    period_ns = 80 * MS
    assert replays.frames_between(period_ns, None, None, 100) == (0, 99)
    assert replays.frames_between(period_ns, 0.8, 1.6, 100) == (10, 19)
    assert replays.frames_between(period_ns, 7.9, 99, 100) == (98, 99)
    with pytest.raises(replays.ReplayError, match=r"lasted 8\.00 s"):
        replays.frames_between(period_ns, 8.0, None, 100)


def test_what_cannot_be_replayed_says_why(made: Made) -> None:
    call = ledger.read_call(made.call)
    kept = journal.read(made.journal)
    other = journal.read(replace(made, session=1).journal)
    with pytest.raises(replays.ReplayError, match="name the journal of the same call"):
        replays.plan(call, other)
    short = replace(kept, said=kept.said[:10])
    with pytest.raises(replays.ReplayError, match="holds 10 of the caller's frames"):
        replays.plan(call, short)
    wrong = replace(kept, said=kept.said[1:])
    with pytest.raises(replays.ReplayError, match="the journal says that the model heard frame"):
        replays.plan(call, wrong)
    holes = replace(call, ticks=np.delete(call.ticks, 4))
    with pytest.raises(replays.ReplayError, match="lacks records"):
        replays.plan(holes, kept)


def test_the_verb_replays_and_writes_what_was_said(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(made.call), "--journal", str(made.journal)]
    out = tmp_path / "x.wav"
    assert cli.main([*words, "--from", "0.8s", "--to", "1.6", "--out", str(out)]) == 0
    assert "audio equal to the last bit in 10 of 10" in capsys.readouterr().out
    assert soundfile.info(out).frames == 10 * 1920
    assert cli.main([*words, "--from", "500s"]) == 2
    assert "no frame lies between" in capsys.readouterr().err
    words[3] = str(replace(made, session=3).journal)
    assert cli.main(words) == 2
    assert "name the journal of the same call" in capsys.readouterr().err
