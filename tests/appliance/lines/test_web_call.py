"""A websocket call from hello to goodbye: how it ends, what it must bear, what it hands in."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import control
from appliance.admission import Reason
from appliance.clock import NS_PER_MS as MS
from appliance.lines import web_call
from appliance.lines.web_call import State
from appliance.lines.web_voice import PCM
from appliance.lines.wire import Ending, Wish
from tests.web_call_sim import PERIOD_MS, T0_MS, Sim, sim, start

__all__ = ["sim"]  # a fixture


def test_the_handshake_comes_first_and_what_was_said_before_it_is_nobodys(sim: Sim) -> None:
    sim.run(1000)
    assert sim.said == [control.Join(1, "websocket", "127.0.0.1")]
    assert sim.heard == []
    assert sim.channel.uplink.waiting == 0
    sim.admit()
    sim.run(3000)
    assert sim.heard[0] == (1001, b"\x00")
    assert sim.kinds().count(0) == 1
    # The second before is 25 pages; had it been kept, the call would begin 12 frames late.
    assert sim.call.figures().dropped_pages == 25
    assert sim.channel.uplink.waiting == 0
    assert sim.uplink == list(range(len(sim.uplink)))
    assert sim.concealed == 0


def test_every_frame_has_one_fate_when_the_client_vanishes(sim: Sim) -> None:
    sim.made_ms = lambda tick: 70
    sim.admit()
    sim.run(3071)  # frames are in hand and in the ring
    sim.call.disconnect(sim.at_ms * MS)
    assert sim.call.state is State.LEAVING
    sim.run(sim.at_ms + 200)
    leaves = [m for m in sim.said if isinstance(m, control.Leave)]
    assert [leave.session for leave in leaves] == [9]
    sim.gone()
    assert sim.call.is_over
    fates = Counter(index for index, _ in sim.receipts.elements())
    assert fates == dict.fromkeys(range(sim.made), 1)


def test_a_client_that_vanishes_at_once_is_never_asked_for(sim: Sim) -> None:
    sim.call.disconnect(0)
    assert sim.call.is_over
    sim.run(10)
    assert sim.said == []


@pytest.mark.parametrize("before_ms", [1, 500])
def test_a_client_that_vanishes_before_the_answer_leaves_no_session(
    sim: Sim, before_ms: int
) -> None:
    sim.run(before_ms)
    sim.call.disconnect(sim.at_ms * MS)
    sim.run(sim.at_ms + 5)
    sim.admit()
    sim.run(sim.at_ms + 5)
    # It is taken back at once; if the answer was on its way already, the session is left.
    assert sim.said[1:] == [control.Withdraw(sim.call.number), control.Leave(9, "hung up")]
    assert not sim.call.is_over
    sim.gone()
    assert sim.call.is_over
    assert sim.heard == []


@pytest.mark.parametrize("reason", list(Reason))
def test_a_refusal_is_a_message_and_a_close(sim: Sim, reason: Reason) -> None:
    sim.run(10)
    sim.call.refused(control.Refused(1, reason, "4 of 4 slots are taken"), sim.at_ms * MS)
    sim.settle_after()
    assert sim.call.is_over
    assert sim.call.ending is not None
    ending, detail = sim.call.ending
    # A call that an operator ended is over, and no failure that a client shows as one.
    failed = ending is not Ending.OVER
    assert sim.heard == [(10, b"\x05" + ending.reason(detail).encode())] * failed
    assert (reason is Reason.OPERATOR) is not failed
    assert "4 of 4" in detail


@pytest.mark.parametrize(
    ("why", "ending"),
    [("shed", Ending.FULL), ("stopped", Ending.DRAINING), ("timeout", Ending.RULES)],
)
def test_the_box_may_end_a_call(sim: Sim, why: str, ending: Ending) -> None:
    sim.admit()
    sim.run(1000)
    sim.gone(why)
    assert sim.call.is_over
    assert sim.call.ending is not None
    assert sim.call.ending[0] is ending
    assert sim.heard[-1][1].startswith(b"\x05")


def test_an_operator_ends_a_call_as_any_other_end_with_the_words_in_the_close(sim: Sim) -> None:
    sim.admit()
    sim.run(1000)
    said = "an operator ended it: " + "the hall is closing " * 9
    sim.call.gone(control.Gone(9, control.OPERATOR, said), sim.at_ms * MS)
    sim.settle_after()
    assert sim.call.is_over
    assert sim.call.ending == (Ending.OVER, said)
    assert (Ending.OVER.code, len(Ending.OVER.reason(said))) == (1000, 123)
    assert not [kind for kind in sim.kinds() if kind == 5]


@pytest.mark.parametrize(
    ("why", "ending"),
    [("stopped", Ending.DRAINING), ("shed", Ending.FULL), ("left", Ending.FAULT)],
)
def test_a_session_that_ended_before_its_channel_was_opened_ends_for_the_boxs_reason(
    sim: Sim, why: str, ending: Ending
) -> None:
    """The box says Admitted, Gone, and takes the channel away before this line has read either."""
    sim.run(10)
    sim.call.admitted(control.Admitted(1, 9, 3, "dbxtest-none", 16, 64, 256), sim.at_ms * MS, 0)
    sim.turn()
    assert sim.call.ending is None
    assert sim.said[-1] == control.Leave(9, "the channel is gone")
    sim.gone(why)
    assert sim.call.is_over
    assert sim.call.ending is not None
    assert sim.call.ending[0] is ending
    assert ("cannot be opened" in sim.call.ending[1]) == (ending is Ending.FAULT)


def test_a_channel_that_is_not_there_is_a_fault_if_the_box_says_nothing(sim: Sim) -> None:
    sim.run(10)
    sim.call.admitted(control.Admitted(1, 9, 3, "dbxtest-none", 16, 64, 256), sim.at_ms * MS, 0)
    sim.run(10_000)
    assert sim.call.ending is None
    sim.run(10_011)
    assert sim.call.is_over
    assert sim.call.ending is not None
    assert sim.call.ending[0] is Ending.FAULT


def test_a_client_that_says_nothing_is_pinged_and_then_sent_away(sim: Sim) -> None:
    sim.sends = False
    sim.admit()
    sim.run(29_900)
    pings = [at for at, message in sim.heard if message == b"\x06"]
    assert len(pings) == 9  # the page leaves after 10 s without a message
    assert max(np.diff(pings)) < 3_100
    assert sim.call.ending is None
    sim.run(30_100)
    assert sim.call.ending == (Ending.RULES, "no audio for 30 s")
    assert sim.left


def test_a_client_that_does_not_read_is_sent_away_and_its_queue_is_bounded(sim: Sim) -> None:
    sim.reads = False
    sim.admit()
    most = 0
    for until_ms in range(10, 12_000, 10):
        sim.run(until_ms)
        most = max(most, len(sim.call.outbox))
    assert most <= web_call.MOST_WAITING + 2
    assert sim.call.ending is not None
    assert sim.call.ending[0] is Ending.RULES
    assert len(sim.call.outbox) <= 1


def test_too_many_messages_too_many_bytes_and_no_voice_end_a_call(sim: Sim) -> None:
    for _ in range(web_call.MESSAGES_BURST):
        sim.call.receive(b"\x03\x00", 0)
    assert sim.call.ending is None
    sim.call.receive(b"\x03\x00", 0)
    assert sim.call.ending == (Ending.RULES, "more than 250 messages a second")


def test_too_many_bytes_end_a_call(sim: Sim) -> None:
    for _ in range(15):
        sim.call.receive(b"\x01" + bytes(65_000), 0)
    assert sim.call.ending is None
    sim.call.receive(b"\x01" + bytes(65_000), 0)
    assert sim.call.ending == (Ending.RULES, "more than 64000 bytes a second")


def test_thirty_seconds_of_audio_at_once_are_not_decoded_into_lag(sim: Sim) -> None:
    sim.admit()
    sim.run(1000)
    tone = np.zeros(960, np.float32)
    for _ in range(30 * 25):
        sim.call.receive(b"\x01" + sim._opus.encode(tone), sim.at_ms * MS)
    assert sim.call.ending is None
    assert sim.call.figures().dropped_pages >= 25 * 25
    sim.run(20_000)
    assert sim.concealed == 0
    lag_ms = sim.call.figures().arrived_to_tick
    assert lag_ms is not None
    assert lag_ms.p50_ms < 200


@pytest.mark.parametrize(("times", "ends"), [(1, False), (2, True)])
def test_samples_of_another_rate_are_told_so(times: int, ends: bool) -> None:
    sim = start(subprotocol=PCM)
    sim.sends = False
    sim.admit()
    while sim.at_ms < 25_000 and sim.call.ending is None:
        sim.call.receive(b"\x01" + bytes(2 * 480 * times), sim.at_ms * MS)  # every 20 ms
        sim.run(sim.at_ms + 20)
    assert (sim.call.ending is not None) == ends
    if sim.call.ending is not None:
        assert sim.call.ending == (
            Ending.MEDIA,
            "2.0 s of audio come per second; send 24 kHz",
        )
    sim.channel.close()
    sim.channel.unlink()


def test_half_a_minute_before_the_handshake_is_nobodys() -> None:
    sim = start(Wish({}, voice="alto"))  # whose prompt takes the box so long
    sim.run(30_000)
    sim.admit()
    sim.run(33_000)
    assert sim.call.figures().dropped_pages == 25 * 30
    lag_ms = sim.call.figures().arrived_to_tick
    assert lag_ms is not None
    assert lag_ms.p99_ms < 100
    sim.channel.close()
    sim.channel.unlink()


def test_ticks_the_line_overslept_are_left_out_and_nothing_queues(sim: Sim) -> None:
    sim.admit()
    sim.run(2000)
    waiting = []
    sim.at_ms += 500  # the process slept; the box did not tick for us meanwhile
    sim.run(T0_MS + 70 * PERIOD_MS + 5)  # a tick has just taken its frame
    waiting.append(sim.channel.uplink.waiting)
    assert waiting == [0]
    assert 5 <= sim.call.figures().overslept <= 7


def test_the_first_frame_does_not_wait_for_the_last_moment(sim: Sim) -> None:
    sim.admit()
    while not sim.channel.uplink.waiting:
        sim.run(sim.at_ms + 1)
    assert (T0_MS - sim.at_ms) % PERIOD_MS == web_call.FIRST_NS // MS
    sim.run(3000)
    took = sim.call.figures().arrived_to_tick
    assert took is not None
    assert took.p99_ms < 53  # a page of 40 ms and the reserve: no later ones wait as long


def test_ticks_overslept_before_the_first_word_are_no_reason_to_wait_longer(sim: Sim) -> None:
    def waits_ms(sim: Sim, slept_ms: int) -> float:
        sim.sends = False
        sim.admit()
        sim.run(500)
        sim.at_ms += slept_ms
        sim.sends = True
        sim.run(4000)
        took = sim.call.figures().arrived_to_tick
        assert took is not None
        return took.p50_ms

    awake = start()
    assert waits_ms(sim, slept_ms=200) == waits_ms(awake, slept_ms=0)
    assert sim.call.figures().overslept == 0
    awake.channel.close()
    awake.channel.unlink()


def test_a_backlog_the_box_built_up_is_paid_back(sim: Sim) -> None:
    sim.admit()
    sim.run(2000)
    sim.backlog = 2  # two ticks were missed: two frames will wait from now on
    sim.run(T0_MS + 26 * PERIOD_MS + 5)  # a tick has just taken its frame
    sim.backlog = 0
    assert sim.channel.uplink.waiting == 2
    sim.run(T0_MS + 50 * PERIOD_MS + 5)
    assert sim.channel.uplink.waiting == 0
    assert sim.call.figures().paid_back == 2
    assert sim.concealed == 2
    assert sim.uplink == list(range(len(sim.uplink)))


fuzz = st.binary(max_size=400) | st.builds(
    lambda kind, rest: bytes([kind]) + rest,
    st.integers(0, 255),
    st.binary(max_size=100) | st.just(b"OggS" + bytes(22) + b"\x01\x03\x9b\x06x"),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(fuzz, max_size=30), st.booleans())
def test_nothing_a_client_sends_raises_or_costs_the_box_a_frame(
    messages: list[bytes], early: bool
) -> None:
    sim = start()
    try:
        sim.sends = False
        if not early:
            sim.admit()
        for message in messages:
            sim.call.receive(message, sim.at_ms * MS)
            sim.run(sim.at_ms + 7)
        sim.call.disconnect(sim.at_ms * MS)
        sim.run(sim.at_ms + 30)
        if not early:
            sim.gone()
            fates = Counter(index for index, _ in sim.receipts.elements())
            assert fates == dict.fromkeys(range(sim.made), 1)
    finally:
        sim.channel.close()
        sim.channel.unlink()
