"""A caller's frames become a model's chunks: every one at its time, none that lacks audio."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.clock import NS_PER_MS as MS
from appliance.side_stream import SideStream

FRAME_NS = 80 * MS
NEVER = 2**62


def stream(chunk: int, model_hz: int = 24_000) -> SideStream:
    return SideStream(24_000, 1920, FRAME_NS, model_hz, chunk)


def frame(index: int) -> np.ndarray:
    """Sample values are sample numbers."""
    return np.arange(index * 1920, (index + 1) * 1920, dtype=np.float32)


@given(
    chunk=st.sampled_from([240, 384, 768, 1920, 2400]),  # 10 to 100 ms
    first=st.integers(0, 3),
    lost=st.sets(st.integers(0, 19), max_size=8),
    late_ms=st.lists(st.integers(0, 60), min_size=20, max_size=20),
)
def test_every_chunk_whose_audio_came_is_released_once_whole_in_order_and_in_its_period(
    chunk: int, first: int, lost: set[int], late_ms: list[int]
) -> None:
    heard = stream(chunk)
    period_ns = chunk * 1_000_000_000 // 24_000
    came = [index for index in range(first, first + 20) if index - first not in lost]
    arrivals = {index: index * FRAME_NS + late_ms[index - first] * MS for index in came}
    found = []
    for at_ns in range(0, (first + 24) * FRAME_NS, 2 * MS):
        for index in [i for i, when in arrivals.items() if at_ns - 2 * MS < when <= at_ns]:
            heard.push(index, frame(index), at_ns)
        found += [(one, at_ns) for one in heard.due(at_ns)]
    expected = []
    for number in range(30 * 1920 // chunk):
        needed = range(number * chunk // 1920, ((number + 1) * chunk - 1) // 1920 + 1)
        if set(needed) <= set(came):
            expected.append(number)
    assert [one.index for one, _ in found] == expected
    for one, at_ns in found:
        assert one.pcm.tolist() == list(range(one.index * chunk, (one.index + 1) * chunk))
        assert heard.grid is not None
        assert one.captured_ns == heard.grid.start_ns(one.index)
        assert at_ns >= one.captured_ns
    assert heard.wake_ns(NEVER) == NEVER
    if came:
        assert heard.first == -(-came[0] * FRAME_NS // period_ns)


@pytest.mark.parametrize("chunk", [256, 512])
def test_at_another_rate_chunks_are_there_before_their_period_begins(chunk: int) -> None:
    heard, sent = stream(chunk, 16_000), 0
    tone = np.sin(2 * np.pi * 440 * np.arange(1920 * 30) / 24_000).astype(np.float32)
    found = []
    for at_ns in range(0, 29 * FRAME_NS, MS):
        if at_ns == sent * FRAME_NS:
            heard.push(sent, tone[sent * 1920 : (sent + 1) * 1920], at_ns)
            sent += 1
        wake_ns = heard.wake_ns(NEVER)
        mine = heard.due(at_ns)
        assert all(one.captured_ns > at_ns - MS for one in mine)  # never late
        assert not mine or wake_ns <= at_ns
        found += mine
    assert [one.index for one in found] == list(range(len(found)))
    played = np.concatenate([one.pcm for one in found])
    ideal = np.sin(2 * np.pi * 440 * np.arange(len(played)) / 16_000)
    # The resampler is right to within 3 samples, which is 30 degrees; a chunk more or less is not.
    pieces = zip(np.split(played, len(found)), np.split(ideal, len(found)), strict=True)
    assert min(np.corrcoef(mine, theirs)[0, 1] for mine, theirs in list(pieces)[1:]) > 0.85
