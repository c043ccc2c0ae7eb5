"""The local line on a fake clock: a card with a clock of its own, a box that echoes, and trouble.

The spectral tests play a tone through the whole way. A click has energy everywhere, so it is
looked for above 3 kHz; a wobble has sidebands, so they are looked for at the rates at which
anything happens: frames (12.5 Hz) and callbacks (100 Hz).
"""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance import control
from appliance.admission import Reason
from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S
from appliance.frame_ring import Outcome
from appliance.lines.echo import EchoCanceller
from appliance.lines.local_call import LocalCall, State, Wish
from appliance.lines.local_sound import MICROPHONE_SPARE_NS, SPEAKER_SPARE_NS
from tests.appliance.lines.test_echo import db, speech
from tests.local_cards import BLOCK, CARD_HZ, SAMPLES, WELCOME, Card, Sim, tone

Audio = NDArray[np.float32]
JITTER = np.random.default_rng(0).integers(0, 3 * MS, 4096)


def jittery(block: int) -> int:
    return int(JITTER[block % JITTER.size])


@pytest.fixture
def sim() -> Iterator[Sim]:
    sim = Sim(Card(source=tone(440)))
    yield sim
    sim.close()


def outcomes(sim: Sim) -> dict[int, int]:
    found = dict.fromkeys(Outcome, 0)
    for (_, outcome), times in sim.receipts.items():
        found[Outcome(outcome)] += times
    return {int(outcome): times for outcome, times in found.items() if times}


def whole_ms(sim: Sim) -> tuple[float, float]:
    """Shortest and longest way from mouth to ear of the frames that are remembered."""
    part = sim.call.figures().parts["all, beyond the model's one frame"]
    return part.p50_ms, part.max_ms


def loudest_click_db(pcm: Audio) -> float:
    """The largest sample of what lies above 3 kHz, in dB of full scale."""
    size, loudest = 1 << 17, 0.0
    window = np.hanning(size)
    for at in range(0, pcm.size - size + 1, size // 2):
        spectrum = np.fft.rfft(pcm[at : at + size] * window)
        spectrum[: 3000 * size // CARD_HZ] = 0
        middle = np.fft.irfft(spectrum)[size // 4 : 3 * size // 4]
        loudest = max(loudest, float(np.abs(middle).max()))
    return 20 * float(np.log10(loudest + 1e-12))


def wobble_db(pcm: Audio, rate_hz: float) -> float:
    """The largest sideband so far from the carrier, over windows of 4 s, in dB of the carrier."""
    size, worst = 4 * CARD_HZ, -200.0
    window = np.kaiser(size, 20)
    for at in range(0, pcm.size - size + 1, size):
        level = np.abs(np.fft.rfft(pcm[at : at + size] * window))
        carrier, away = int(np.argmax(level)), round(rate_hz * size / CARD_HZ)
        for side in (carrier - away, carrier + away):
            worst = max(worst, 20 * float(np.log10(level[side - 1 : side + 2].max() + 1e-12)))
        worst_of_carrier = 20 * float(np.log10(level[carrier]))
        worst = max(-200.0, worst)
        level_db = worst_of_carrier
    return worst - level_db


def drifts(ppm: float, seconds: int, turn_ns: int) -> None:
    """A card that is so many ppm off: nothing is lost, nothing clicks, lag stays."""
    sim = Sim(Card(ppm=ppm, source=tone(997), late_ns=jittery), turn_ns=turn_ns)
    ways: list[float] = []
    try:
        for second in range(30, seconds + 1, 30):
            sim.run(second * NS_PER_S)
            ways += [way / MS for way in list(sim.call._took.whole)[-370:]]
            out = sim.card.played()
            sim.card.out.clear()
            settled = out[25 * CARD_HZ :] if second == 30 else out
            assert loudest_click_db(settled) < -100
            assert wobble_db(settled, 12.5) < -70
            assert wobble_db(settled, 100) < -70
        made = outcomes(sim)
        assert made.pop(Outcome.DELIVERED) >= seconds * 12
        assert not made
        assert sim.concealed == sim.microphone.intake.short == 0
        assert sim.card.exchange.dry == sim.speaker.padded == sim.speaker.cut_samples == 0
        # Both buffers are where they should be; the callbacks' jitter is in what is measured.
        assert sim.speaker.spare_ns == pytest.approx(SPEAKER_SPARE_NS, abs=6 * MS)
        spare_ns = min(sim.microphone.intake._spares)
        assert spare_ns == pytest.approx(MICROPHONE_SPARE_NS, abs=6 * MS)
        # Lag: how much the way of a frame differs from that of any other.
        assert max(ways) - min(ways) < 80
        assert sim.microphone.drift.ppm == pytest.approx(-ppm, abs=abs(ppm) * 0.8 + 5)
        assert sim.speaker.drift.drift_ppm == pytest.approx(ppm, abs=abs(ppm) * 0.8 + 5)
    finally:
        sim.close()


@pytest.mark.slow
def test_a_minute_with_a_card_that_is_200_ppm_off_has_no_click_and_no_lag() -> None:
    drifts(200.0, 60, 4 * MS)


@pytest.mark.soak
@pytest.mark.parametrize("ppm", [-200.0, 200.0])
def test_twenty_minutes_with_a_card_that_is_200_ppm_off_have_no_click_and_no_lag(
    ppm: float,
) -> None:
    drifts(ppm, 1200, 2 * MS)


def test_a_click_would_be_found_and_a_wobble_too() -> None:
    """What the tests above look for, on purpose."""
    clean = tone(997)(0, 8 * CARD_HZ)
    assert loudest_click_db(clean) < -100
    assert wobble_db(clean, 12.5) < -100
    stepped = np.concatenate([clean[: 3 * CARD_HZ], clean[3 * CARD_HZ + 7 :]])
    assert loudest_click_db(stepped) > -60
    seconds = np.arange(clean.size) / CARD_HZ
    shaken = clean * (1 + 0.01 * np.sin(2 * np.pi * 12.5 * seconds)).astype(np.float32)
    assert wobble_db(shaken, 12.5) > -50


def test_what_is_said_comes_back_and_every_frame_has_one_receipt(sim: Sim) -> None:
    sim.run(4 * NS_PER_S)
    assert outcomes(sim) == {Outcome.DELIVERED: sum(sim.receipts.values())}
    assert sum(sim.receipts.values()) >= 45
    assert db(sim.card.played()[2 * CARD_HZ :]) == pytest.approx(db(tone(440)(0, CARD_HZ)), abs=0.5)
    typical_ms, longest_ms = whole_ms(sim)
    assert typical_ms < 110
    assert longest_ms < 130


def test_a_muted_microphone_is_silence_that_still_flows(sim: Sim) -> None:
    sim.run(2 * NS_PER_S)
    sim.microphone.muted = True
    sim.run(3 * NS_PER_S)
    assert db(sim.uplink[-1]) < -140
    assert sim.concealed == 0
    sim.microphone.muted = False
    sim.run(4 * NS_PER_S)
    assert db(sim.uplink[-1]) > -20


def test_ticks_that_take_longer_move_playout_once_and_fill_nothing() -> None:
    slow = 50
    sim = Sim(Card(source=tone(440)), made_ns=lambda tick: (4 if tick < 25 else slow) * MS)
    try:
        sim.run(8 * NS_PER_S)
        assert set(outcomes(sim)) == {Outcome.DELIVERED}
    finally:
        sim.close()


def test_while_the_card_is_gone_the_model_hears_silence_and_its_frames_are_discarded(
    sim: Sim,
) -> None:
    sim.run(2 * NS_PER_S)
    before = outcomes(sim)
    sim.call.microphone = sim.call.speaker = None
    sim.run(4 * NS_PER_S)
    assert not np.any(sim.uplink[-1])
    assert sim.concealed == 0
    away = outcomes(sim)
    assert away[Outcome.DELIVERED] <= before[Outcome.DELIVERED] + 1
    assert away[Outcome.DISCARDED] >= 23
    sim.card = Card(
        source=tone(440), blocks=sim.card.blocks, speaker_blocks=sim.card.speaker_blocks
    )
    sim.attach()
    sim.run(7 * NS_PER_S)
    back = outcomes(sim)
    assert back[Outcome.DISCARDED] <= away[Outcome.DISCARDED] + 2
    assert back[Outcome.DELIVERED] > away[Outcome.DELIVERED] + 30
    assert db(sim.card.played()[-CARD_HZ:]) > -20
    # Nothing is said twice or of nobody.
    assert max(sim.receipts.values()) == 1


def test_a_card_that_stands_still_is_not_fed_and_goes_on_without_lag(sim: Sim) -> None:
    sim.run(3 * NS_PER_S)
    typical_ms, _ = whole_ms(sim)
    sim.card.stands = True
    sim.run(5 * NS_PER_S)
    assert outcomes(sim)[Outcome.DISCARDED] > 15
    sim.card.stands = False
    sim.run(12 * NS_PER_S)
    newest_ms = sim.call._took.whole[-1] / MS
    assert newest_ms < typical_ms + 40


def test_a_process_that_overslept_loses_those_ticks_and_no_more(sim: Sim) -> None:
    sim.run(3 * NS_PER_S)
    typical_ms, _ = whole_ms(sim)
    sim.asleep_until_ns = sim.now_ns + 250 * MS
    sim.run(4 * NS_PER_S)
    figures = sim.call.figures()
    assert 2 <= figures.overslept <= 4
    assert figures.concealed <= 5
    # At once, and not after seconds of catching up.
    assert list(sim.call._took.whole)[-1] / MS < typical_ms + 20
    sim.run(10 * NS_PER_S)
    assert list(sim.call._took.whole)[-1] / MS < typical_ms + 20
    assert sum(outcomes(sim).values()) >= 118


def test_ticks_that_the_box_missed_are_no_lag_for_long(sim: Sim) -> None:
    sim.run(3 * NS_PER_S)
    typical_ms, _ = whole_ms(sim)
    sim.missed = {40, 41}
    sim.run(8 * NS_PER_S)
    assert sim.call.figures().paid_back == 2
    assert sim.call._took.whole[-1] / MS < typical_ms + 20


@pytest.mark.parametrize(
    ("ppm", "speaker_ppm"), [(80.0, None), (60.0, -60.0)], ids=["one card", "two cards"]
)
def test_a_loop_through_the_room_is_not_heard_by_the_model(
    ppm: float, speaker_ppm: float | None
) -> None:
    """The whole way: callbacks jitter, and neither clock is the box's."""
    far = speech("delivery", 12)[::2]  # at the model's rate, near enough

    def says(tick: int) -> Audio:
        return np.take(far, range(tick * SAMPLES, (tick + 1) * SAMPLES), mode="wrap")

    card = Card(ppm=ppm, speaker_ppm=speaker_ppm, late_ns=jittery)
    ratio = 1.0 if speaker_ppm is None else (1 + speaker_ppm / 1e6) / (1 + ppm / 1e6)

    def room(start: int, size: int) -> Audio:
        at = (start + np.arange(size) - 0.09 * CARD_HZ) * ratio
        first = int(np.floor(at[0]))
        near = np.zeros(size + 2, np.float32)
        card.exchange.played.copy(first, near)
        heard = np.interp(at - first, np.arange(size + 2), near) * 10 ** (-10 / 20)
        return np.asarray(heard, np.float32)

    card.source = room
    sim = Sim(card, EchoCanceller(CARD_HZ), turn_ns=4 * MS, says=says)
    try:
        sim.run(8 * NS_PER_S)
        echo_db = db(card.played()[-4 * CARD_HZ :]) - 10
        assert echo_db - db(np.concatenate(sim.uplink[-50:])) >= 25
    finally:
        sim.close()


def test_hanging_up_hands_in_a_last_frame_and_waits_for_the_box(sim: Sim) -> None:
    sim.run(2 * NS_PER_S)
    sim.call.hang_up()
    sim.run(3 * NS_PER_S)
    assert sim.call.state is State.LISTENING
    sim.call.gone(control.Gone(9, "finished"), sim.now_ns)
    assert sim.call.is_over
    assert sim.call.trouble == ""
    sim.settle()
    assert sum(sim.receipts.values()) == sim.made


def test_a_box_that_never_says_gone_is_waited_for_ten_seconds(sim: Sim) -> None:
    sim.run(NS_PER_S)
    sim.call.hang_up()
    sim.run(13 * NS_PER_S)
    assert sim.call.is_over
    assert "within 10 s" in sim.call.trouble


@pytest.mark.parametrize("why", ["timeout", "shed", "fault"])
def test_a_box_that_ends_the_call_says_why(sim: Sim, why: str) -> None:
    sim.run(NS_PER_S)
    sim.call.gone(control.Gone(9, why), sim.now_ns)
    assert sim.call.is_over
    assert why in sim.call.trouble


def test_giving_up_leaves_and_receipts_what_is_in_hand(sim: Sim) -> None:
    sim.run(2 * NS_PER_S)
    sim.call.leave(sim.now_ns, "the sound card did not come back")
    sim.turn()
    assert isinstance(sim.said[-1], control.Leave)
    sim.call.gone(control.Gone(9, "left"), sim.now_ns)
    assert sim.call.trouble == "the sound card did not come back"


def test_a_refusal_and_a_silent_box_end_the_call_with_a_sentence() -> None:
    call = LocalCall(Wish("x"), WELCOME, [], 0)
    (join,) = call.advance(0)
    assert isinstance(join, control.Join)
    assert join.line == "local"
    call.refused(control.Refused(1, Reason.TIME, "no room for one more"), 1)
    assert call.is_over
    assert "no room for one more" in call.trouble
    call = LocalCall(Wish("x"), WELCOME, [], 0)
    call.advance(0)
    assert call.advance(11 * NS_PER_S) == [control.Withdraw(1)]
    assert "did not answer" in call.trouble


def test_an_operators_words_are_told_and_nobody_was_refused() -> None:
    said = "an operator ended it: the hall is closing"
    call, primed = (LocalCall(Wish("x"), WELCOME, [], 0) for _ in range(2))
    call.advance(0)
    call.gone(control.Gone(9, control.OPERATOR, said), 1)
    primed.advance(0)
    primed.refused(control.Refused(1, Reason.OPERATOR, said), 1)
    for ended in (call, primed):
        assert (ended.is_over, ended.trouble) == (True, said)


def test_hanging_up_while_a_persona_is_fed_gives_the_slot_back_at_once() -> None:
    call = LocalCall(Wish("x", persona="You are Ann."), WELCOME, [], 0)
    call.advance(0)
    call.hang_up()
    assert call.advance(1) == [control.Withdraw(1)]
    assert call.is_over


@pytest.mark.parametrize(
    ("why", "trouble"),
    [
        ("stopped", "the box ended the call: stopped"),
        ("shed", "the box ended the call: shed"),
        ("left", "dbx-no-such-channel cannot be opened"),
    ],
)
def test_a_channel_that_is_not_there_is_left_and_the_boxs_reason_is_told(
    why: str, trouble: str
) -> None:
    """The box may say Admitted, Gone, and take the channel away before either has been read."""
    call = LocalCall(Wish("x"), WELCOME, [], 0)
    call.advance(0)
    call.admitted(control.Admitted(1, 9, 3, "dbx-no-such-channel", 16, 64, 256), 0, 0)
    assert any(isinstance(message, control.Leave) for message in call.advance(1))
    call.gone(control.Gone(9, why), 2)
    assert call.is_over
    assert trouble in call.trouble


def test_the_card_calls_back_in_blocks_of_ten_milliseconds() -> None:
    assert BLOCK * 100 == CARD_HZ
