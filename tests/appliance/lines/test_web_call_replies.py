"""What a websocket caller is sent, and when, on a fake clock: every time asserted is exact."""

import json
from collections import Counter

import numpy as np
import pytest

from appliance.clock import NS_PER_MS as MS
from appliance.frame_ring import Outcome
from appliance.lines import web_pace
from appliance.lines.ogg import PageSplitter
from appliance.lines.opus import OpusIn
from appliance.lines.web_pace import TickTimes
from appliance.lines.web_voice import OPUS
from appliance.lines.wire import Wish
from tests.web_call_sim import PERIOD_MS, SAMPLES, T0_MS, Sim, sim, start
from tests.web_clients import PageBuffer

__all__ = ["sim"]  # a fixture


def test_frames_leave_at_their_deadlines_whenever_they_were_made(sim: Sim) -> None:
    rng = np.random.default_rng(3)
    sim.made_ms = lambda tick: int(rng.integers(2, 79))
    sim.admit()
    sim.run(20_000)
    at_ms = sim.audio_ms()
    assert set(np.diff(at_ms)) == {PERIOD_MS}
    assert (at_ms[0] - T0_MS - web_pace.STEADY_NS // MS) % PERIOD_MS == 0
    page = PageBuffer()
    for ms in at_ms:
        page.arrive(80, ms)
    assert (page.drops, page.dry) == (0, 0)
    assert sim.outcomes()[Outcome.DELIVERED] == list(range(len(at_ms)))


def test_frames_leave_soon_after_they_are_made_once_ticks_are_known(sim: Sim) -> None:
    times = TickTimes(PERIOD_MS * MS)
    times.forecast_ns = 20 * MS
    soon = start(times=times)
    soon.made_ms = lambda tick: 12 if tick < 30 or tick > 60 else 45  # then ticks take longer
    soon.admit()
    soon.run(20_000)
    at_ms = soon.audio_ms()
    phases = sorted({(ms - T0_MS) % PERIOD_MS for ms in at_ms})
    assert phases[0] == 20 + web_pace.STEADY_NS // MS  # after the forecast
    assert phases[-1] in (45, 46, 47)  # and, once, as much later as was needed
    assert len(phases) == 2
    assert soon.outcomes()[Outcome.FILLED] == []
    gaps = np.diff(at_ms)
    assert sorted(set(gaps.tolist()) - {PERIOD_MS}) == [PERIOD_MS + phases[-1] - phases[0]]
    soon.channel.close()
    soon.channel.unlink()


def test_the_page_would_drop_and_stutter_if_frames_left_when_made() -> None:
    page, rng = PageBuffer(), np.random.default_rng(3)
    for tick in range(200):
        page.arrive(80, tick * 80 + int(rng.integers(2, 79)))
    assert page.drops > 5
    assert page.dry > 5


def test_a_frame_the_box_made_too_late_is_silence_and_the_stream_keeps_its_time(sim: Sim) -> None:
    late = {20, 21, 40}
    sim.made_ms = lambda tick: 130 if tick in late else 5
    sim.admit()
    sim.run(6000)
    sim.call.disconnect(sim.at_ms * MS)
    sim.run(sim.at_ms + 50)
    sim.gone()
    # The first moved the rest to the latest time there is; nothing moves them further.
    moved_ms = (web_pace.GUARD_NS - web_pace.STEADY_NS) // MS
    gaps = Counter(np.diff(sim.audio_ms()).tolist())
    assert {ms: n for ms, n in gaps.items() if ms != PERIOD_MS} == {PERIOD_MS + moved_ms: 1}
    filled = sim.outcomes()[Outcome.FILLED]
    assert len(filled) == 3
    assert set(filled) <= set(sim.outcomes()[Outcome.DISCARDED])
    heard = sim.outcomes()[Outcome.DELIVERED] + sim.outcomes()[Outcome.LATE] + filled
    assert sorted(heard) == list(range(len(heard)))


def test_the_echo_is_what_was_said(sim: Sim) -> None:
    sim.admit()
    sim.run(6000)
    splitter, opus = PageSplitter(), OpusIn()
    audio = b"".join(m[1:] for _, m in sim.heard if m[0] == 1)
    pcm = np.concatenate([opus.decode(p.raw) for p in splitter.push(audio)])
    assert (splitter.junk_bytes, splitter.dropped_pages) == (0, 0)  # whole pages, headers first
    assert pcm.size == len(sim.audio_ms()) * SAMPLES
    tone = pcm[24_000:].astype(np.float64)
    assert np.sqrt((tone**2).mean()) == pytest.approx(0.3 / np.sqrt(2), rel=0.05)
    spectrum = np.abs(np.fft.rfft(tone * np.hanning(tone.size)))
    assert spectrum.argmax() * 24_000 / tone.size == pytest.approx(24_000 / 9 / 2 / np.pi, abs=1)


def test_text_is_whole_characters_with_spaces(sim: Sim) -> None:
    sim.admit()
    sim.run(2000)
    words = b"".join(m[1:] for _, m in sim.heard if m[0] == 2).decode()
    assert words.startswith(" so ité so ité")
    for _, message in sim.heard:
        message[1:].decode() if message[0] == 2 else None


def test_a_page_of_ours_is_told_how_its_call_goes(sim: Sim) -> None:
    ours = start(subprotocol=OPUS)
    ours.admit()
    ours.run(5000)
    told = [json.loads(m[1:])["pulse"] for _, m in ours.heard if m[0] == 4]
    frames = len(ours.audio_ms())
    assert len(told) == frames // 6
    assert told[-1]["frames"] == frames // 6 * 6
    assert all(margin == 75 for one in told for margin in one["margins_ms"])
    assert (told[-1]["late"], told[-1]["filled"], told[-1]["lag_frames"]) == (0, 0, 0)
    ours.channel.close()
    ours.channel.unlink()
    sim.admit()
    sim.run(5000)
    assert 4 not in sim.kinds()  # published clients are sent nothing that they do not know


def test_what_is_not_granted_is_told() -> None:
    sim = start(Wish({}, notes=("this model takes no persona",)))
    sim.admit()
    sim.run(5)
    assert sim.kinds() == [0, 4]
    assert json.loads(sim.heard[1][1][1:]) == {"notes": ["this model takes no persona"]}
    sim.channel.close()
    sim.channel.unlink()


def test_the_parts_of_the_way_add_up(sim: Sim) -> None:
    sim.admit()
    sim.run(20_000)
    figures = sim.call.figures()
    assert figures.arrived_to_tick is not None
    assert figures.tick_to_made is not None
    assert figures.made_to_sent is not None
    assert figures.arrived_to_sent is not None
    assert figures.tick_to_made.p50_ms == 5
    # The rest of the tick, since nobody knows how long ticks are, and then its time.
    assert figures.made_to_sent.p50_ms == 75 + web_pace.STEADY_NS // MS
    # A page of 40 ms and 8 to spare; then the box and the way out.
    assert figures.arrived_to_tick.p50_ms == pytest.approx(52, abs=4)
    assert figures.arrived_to_sent.p50_ms == pytest.approx(138, abs=4)
    assert (figures.short, figures.overslept, figures.filled, figures.late) == (0, 0, 0, 0)
