"""A call with a persona, reset on the way, is run again: the same bytes on the CPU executor.

Real loop, real desk, real engine on a micro model that takes prompts, on a fake clock whose steps
leave little margin, so that the prompt is fed in odd pieces; what is replayed must use the same.
"""

import uuid
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from appliance import journal, ledger
from appliance import replay as replays
from appliance.channel import Channel
from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S, TickGrid
from appliance.control import Prompted
from appliance.frame_ring import Outcome, Receipt, UplinkHeader
from appliance.journal import Head, JournalWriter
from appliance.ledger import Header, Why
from appliance.ledger_writer import LedgerWriter
from appliance.persona import Personas
from appliance.priming import Job, PrimingDesk
from appliance.record_ring import RecordRing
from appliance.seat import Arrive, Primed, Restart, Restarted, Seat
from appliance.session import SessionId
from appliance.tick_loop import TickLoop, TickPolicy
from engines.bundle import Bundle
from engines.ort_executor import OrtExecutor
from engines.ort_prefill import OrtPrimer
from engines.prefill import Prompt
from tests.fakes import FakeClock

pytestmark = pytest.mark.torch
pytest.importorskip("sentencepiece", reason="needs the persona extra")

SETTINGS = {"sampling.seed": 7.0}
VOICE, PERSONA = "alto", "Ann"
RESET_AT, TICKS = 20, 40


class SlowPrimer(OrtPrimer):
    """A row takes 1 ms of the fake clock, a first choice as well."""

    clock: FakeClock

    def feed(self, slot: int, prompt: Prompt, first: int, rows: int) -> None:
        super().feed(slot, prompt, first, rows)
        self.clock.advance(rows * MS)


def prompted(job: Job) -> Prompted:
    return Prompted(job.prompt.key, tuple(job.chunks))


def record(bundle: Bundle, folder: Path) -> tuple[Path, Path, list[Prompted]]:
    """Run one such call. Returns its two files, and how its prompts were fed."""
    executor, clock, ring = OrtExecutor(bundle, 2), FakeClock(), RecordRing(4096)
    primer = SlowPrimer(executor)
    primer.clock = clock
    manifest = bundle.manifest
    desk = PrimingDesk(primer, manifest, 2, clock)
    grid = TickGrid(0, manifest.timing.period_ns)
    loop = TickLoop(executor, clock, grid, TickPolicy(80 * MS, 4), ring, desk=desk)
    writer = LedgerWriter(folder / "calls", ring, clock)
    desk.calibrate(Personas(bundle).plain(40))
    prompt = Personas(bundle).prepare(VOICE, PERSONA)
    assert isinstance(prompt, Prompt)
    samples = manifest.timing.samples_per_frame
    channel, beside = (
        Channel.create(f"dbxtest-{uuid.uuid4().hex[:12]}", samples) for _ in range(2)
    )
    line, model = Channel.attach(channel.name), manifest.model
    header = Header(
            1, 1, "test", "Ann's caller", SETTINGS, str(bundle.path), model.name,
            model.checkpoint_sha256, grid.period_ns, 0, "20260131T120000.000Z", VOICE, PERSONA,
    )  # fmt: skip
    writer.open(header, channel.receipts)
    # Somebody else talks all the time, or nothing would take up the ticks.
    writer.open(msgspec.structs.replace(header, session=2, generation=2), beside.receipts)
    loop.inbox.append(Arrive(Seat(SessionId(2), 2, beside, {}, 2**62)))
    assert beside.uplink.put(UplinkHeader(0, 0, 1), np.zeros(samples, np.float32))
    first, second = (Job(prompt, SETTINGS, None, keep=False, until_ns=2**62) for _ in range(2))
    seat = Seat(SessionId(1), 1, channel, SETTINGS, 2**62, first, 2**62)
    loop.inbox.append(Arrive(seat))
    step, draw, fed = executor.step, np.random.default_rng(5), list[Prompted]()

    def busy(batch: int) -> None:
        step(batch)
        clock.advance((56 + loop.counts.tick % 5) * MS)  # margins of 10 to 14 ms

    executor.step = busy  # type: ignore[method-assign]
    kept: JournalWriter | None = None
    pcm, tick, sent = np.empty(samples, np.float32), grid.tick_at(clock.now_ns()) + 1, 0
    while sent < TICKS:
        clock.sleep_until(grid.start_ns(tick))
        if kept is not None:
            said = (0.1 * draw.standard_normal(samples)).astype(np.float32)
            up = UplinkHeader(sent, 0, 1 + sent)
            assert line.uplink.put(up, said)
            kept.said(up, said)
            sent += 1
            if sent == RESET_AT:
                loop.inbox.append(Restart(seat.session, second))
        tick = loop.turn(tick)
        while loop.outbox:
            news = loop.outbox.popleft()
            if isinstance(news, Primed):
                fed.append(prompted(news.job))
                head = Head(1, 1, 0, model.name, samples, 24_000, SETTINGS, fed[0])
                kept = JournalWriter(folder / "1.journal", head)
            if isinstance(news, Restarted):
                assert kept is not None
                assert news.job is second
                fed.append(prompted(second))
                kept.restarted(news.frame_index, fed[1])
        while (down := line.downlink.get(pcm)) is not None:
            assert kept is not None
            kept.heard(down, pcm)
            receipt = Receipt(1, 1, down.frame_index, Outcome.DELIVERED, 1, 2)
            assert line.receipts.put(receipt)
        writer.pump()
    clock.advance(NS_PER_S)
    for session in (1, 2):
        writer.finish(session, seat.frame_index, Why.LEFT)
    writer.pump()
    assert kept is not None
    kept.close()
    line.close()
    for made in (channel, beside):
        made.close()
        made.unlink()
    (call,) = (folder / "calls").glob("*-000001.call")
    return call, folder / "1.journal", fed


def test_a_call_with_a_persona_and_a_reset_replays_to_the_same_bytes(
    persona_bundle: Bundle, tmp_path: Path
) -> None:
    path, kept_path, fed = record(persona_bundle, tmp_path)
    call, kept = ledger.read_call(path), journal.read(kept_path)
    flags = call.ticks["flags"]
    held = int(((flags & ledger.Flag.PRIMING) > 0).sum())
    assert held > 1, fed
    assert ((flags & ledger.Flag.RESET) > 0).sum() == 1
    assert fed[0].key == fed[1].key
    assert len(fed[1].fed) > 2  # in pieces, and in others than the first time: margins differed

    def replay(kept: journal.Journal) -> replays.Comparison:
        steps = replays.plan(call, kept)
        return replays.run(OrtExecutor(persona_bundle, 2), call, steps, 0, 10**6)

    found = replay(kept)
    assert found.is_equal, replays.text(found, call.header.period_ns)
    assert found.frames == found.audio_compared == TICKS - held

    # Neither the state's two beginnings nor the pieces are taken for granted.
    at = int(np.flatnonzero(flags & ledger.Flag.RESET)[0])
    other = replace(kept, restarts={at: Prompted(fed[1].key, (1,) * sum(fed[1].fed))})
    pieces = replay(other)
    assert pieces.first_difference is None or pieces.first_difference >= at
    with pytest.raises(replays.ReplayError, match=r"before frame \d+; compare what comes before"):
        replay(replace(kept, restarts={}))
    with pytest.raises(replays.ReplayError, match="rows of its prompt"):
        replay(replace(kept, restarts={at: Prompted(fed[1].key, fed[1].fed[:-1])}))
    with pytest.raises(replays.ReplayError, match="make another prompt"):
        replay(replace(kept, restarts={at: Prompted("f00", fed[1].fed)}))
    blind = replace(call, ticks=call.ticks.copy())
    blind.ticks["flags"][at] &= ~np.uint16(ledger.Flag.RESET)
    steps = replays.plan(blind, kept)
    forgot = replays.run(OrtExecutor(persona_bundle, 2), blind, steps, 0, 10**6)
    assert forgot.first_difference == at
