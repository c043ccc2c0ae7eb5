"""Who is let in."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.admission import (
    REOPEN_GUARDS,
    Forecast,
    Gate,
    Headroom,
    Overload,
    Policy,
    Reason,
    admit,
    fill_bound,
    plan_shed,
    session_bytes,
)
from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S
from appliance.step_model import StepModel
from engines.bundle import Manifest
from tests.fakes import make_bundle

ROOM = Headroom(
    slots=4, held=0, session_bytes=4012, memory_bytes=4 * 4012, ready=True, draining=False
)


def forecast(
    base_ms: float = 10,
    session_ms: float = 10,
    fill_ms: float = 5,
    tail_ms: float = 5,
    guard_ms: int = 8,
    **fields: object,
) -> Forecast:
    """Of an 80 ms tick; the tail belongs to a tick of 1 s, so that it does not grow here."""
    model = StepModel(
        base_ms * MS, session_ms * MS, fill_ms * MS, 0.0, tail_ms * MS, 1000.0 * MS, 1000, 4, 1.0
    )
    return Forecast(model, 80 * MS, guard_ms * MS, **fields)  # type: ignore[arg-type]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make_bundle(tmp_path).manifest


def test_a_newcomer_is_charged_for_its_whole_life(manifest: Manifest) -> None:
    assert session_bytes(manifest) == 1000 * 4 + 4 + 8


def test_there_is_room(manifest: Manifest) -> None:
    assert admit(ROOM, manifest, {"gain": 0.5}) is None
    assert admit(replace(ROOM, held=3), manifest, {}) is None


@pytest.mark.parametrize(
    ("room", "reason", "words"),
    [
        (replace(ROOM, held=4), Reason.LINES, "all 4 slots are taken"),
        (
            replace(ROOM, held=2, memory_bytes=3 * 4012 - 1),
            Reason.MEMORY,
            "3 sessions would own 12036 bytes at full retention; the limit is 12035",
        ),
        (replace(ROOM, draining=True, held=2), Reason.DRAINING, "2 calls"),
        (replace(ROOM, ready=False), Reason.NOT_READY, "warming up"),
    ],
)
def test_a_refusal_has_a_reason_and_the_numbers(
    manifest: Manifest, room: Headroom, reason: Reason, words: str
) -> None:
    refusal = admit(room, manifest, {})
    assert refusal is not None
    assert refusal.reason is reason
    assert words in refusal.detail


@pytest.mark.parametrize("settings", [{"gian": 1.0}, {"gain": 7.0}, {"gain": math.nan}])
def test_a_setting_the_bundle_cannot_take_is_refused(
    manifest: Manifest, settings: dict[str, float]
) -> None:
    refusal = admit(ROOM, manifest, settings)
    assert refusal is not None
    assert refusal.reason is Reason.FAULT
    assert next(iter(settings)) in refusal.detail


@pytest.mark.parametrize(
    ("room", "free"),
    [
        (ROOM, 4),
        (replace(ROOM, held=3), 1),
        (replace(ROOM, memory_bytes=2 * 4012), 2),
        (replace(ROOM, memory_bytes=0, held=1), 0),
        (replace(ROOM, ready=False), 0),
        (replace(ROOM, draining=True), 0),
    ],
)
def test_headroom_is_what_would_be_admitted_now(
    manifest: Manifest, room: Headroom, free: int
) -> None:
    assert room.free == free
    admitted = 0
    while admit(replace(room, held=room.held + admitted), manifest, {}) is None:
        admitted += 1
    assert admitted == free


def test_a_newcomer_is_refused_when_the_tick_of_one_more_would_end_late(
    manifest: Manifest,
) -> None:
    room = replace(ROOM, slots=8, memory_bytes=2**30, forecast=forecast())
    # 10 + 15 n + 5 ms, and 8 ms of guard: 3 sessions end at 60, 4 at 75 of 80 ms.
    assert admit(replace(room, held=2), manifest, {}) is None
    refusal = admit(replace(room, held=3), manifest, {})
    assert refusal is not None
    assert refusal.reason is Reason.TIME
    assert "4 sessions" in refusal.detail
    assert "75.0 ms" in refusal.detail
    assert "72.0 of 80.0 ms" in refusal.detail
    assert (room.free, room.limit) == (3, Reason.TIME)


def test_what_limits_the_box_is_named() -> None:
    room = replace(ROOM, memory_bytes=2**30)
    assert room.limit is Reason.LINES
    assert replace(room, memory_bytes=2 * 4012).limit is Reason.MEMORY
    assert replace(room, forecast=forecast()).limit is Reason.TIME
    assert replace(room, gate_open=False).limit is Reason.TIME
    assert replace(room, draining=True).limit is Reason.DRAINING
    assert replace(room, ready=False).limit is Reason.NOT_READY


def test_a_closed_gate_refuses_for_time(manifest: Manifest) -> None:
    refusal = admit(replace(ROOM, gate_open=False), manifest, {})
    assert refusal is not None
    assert refusal.reason is Reason.TIME
    assert replace(ROOM, gate_open=False).free == 0


@given(
    base=st.floats(0, 40),
    session=st.floats(0, 20),
    fill=st.floats(0, 20),
    tail=st.floats(0, 40),
    guard=st.integers(0, 20),
    arrivals=st.lists(st.booleans(), max_size=60),
)
def test_no_admitted_set_is_ever_predicted_late(
    tmp_path_factory: pytest.TempPathFactory,
    base: float,
    session: float,
    fill: float,
    tail: float,
    guard: int,
    arrivals: list[bool],
) -> None:
    manifest = make_bundle(tmp_path_factory.mktemp("bundle")).manifest
    expected = forecast(base, session, fill, tail, guard)
    room = Headroom(16, 0, 4012, 2**30, ready=True, draining=False, forecast=expected)
    for comes in arrivals:
        if comes and admit(room, manifest, {}) is None:
            room = replace(room, held=room.held + 1)
        elif not comes and room.held:
            room = replace(room, held=room.held - 1)
        # Whoever is in may stay until all are as old as can be: no tick would end late.
        assert expected.model.p999_ns(room.held, room.held) + guard * MS <= 80 * MS or not room.held
        assert room.held + room.free <= 16


def test_statistics_let_in_more_than_a_guarantee_and_never_fewer() -> None:
    minute, full = 60 * NS_PER_S, 240 * NS_PER_S
    short = forecast(policy=Policy.STATISTICAL, full_ns=full, call_lengths_ns=(minute,))
    eternal = replace(short, call_lengths_ns=(1000 * minute,))
    assert short.most(64) > forecast().most(64)
    assert eternal.most(64) == forecast().most(64)
    # Live calls that are older than the statistics allow for count as what they are.
    assert replace(short, fill_now=3.0).tick_ns(3) == forecast().tick_ns(3)


@given(
    sessions=st.integers(1, 200),
    lengths=st.lists(st.integers(1, 10**12), min_size=1, max_size=5),
)
def test_a_fill_bound_lies_within_what_is_possible(sessions: int, lengths: list[int]) -> None:
    bound = fill_bound(sessions, 10**11, lengths)
    assert 0 < bound <= sessions
    assert bound <= fill_bound(sessions + 1, 10**11, lengths)


def test_the_fill_bound_of_calls_of_one_length_is_the_textbooks() -> None:
    # Ages are uniform: up to full retention so are fills; of twice as long calls half are full.
    for times, mean, variance in ((1, 1 / 2, 1 / 12), (2, 3 / 4, (1 / 3 + 1) / 2 - 9 / 16)):
        bound = fill_bound(100, NS_PER_S, [times * NS_PER_S])
        assert bound == pytest.approx(100 * mean + 3.0902 * 10 * variance**0.5)
    assert fill_bound(7, 0, [NS_PER_S]) == 7  # a model without memory is full at once


def test_the_fill_bound_is_what_a_simulation_of_calls_exceeds_once_in_a_thousand() -> None:
    rng = np.random.default_rng(7)
    full, lengths = 240.0, (30.0, 120.0, 600.0)
    # A live call is found with a chance in proportion to its length, at a uniform age.
    share = np.array(lengths) / sum(lengths)
    picked = rng.choice(lengths, size=(40_000, 32), p=share)
    fills = np.minimum(rng.random(picked.shape) * picked / full, 1).sum(axis=1)
    bound = fill_bound(32, round(full * NS_PER_S), [round(x * NS_PER_S) for x in lengths])
    assert bound == pytest.approx(float(np.quantile(fills, 0.999)), rel=0.03)


def test_the_gate_closes_before_anybody_is_late_and_opens_after_a_calm_stretch() -> None:
    gate, guard, calm = Gate(0), 8 * MS, 10 * NS_PER_S
    gate = gate.after(9 * MS, guard, calm, 1)
    assert gate.is_open
    gate = gate.after(7 * MS, guard, calm, 2)  # nobody was late
    assert not gate.is_open
    gate = gate.after(REOPEN_GUARDS * guard - 1, guard, calm, calm)  # wide enough to stay, not open
    assert not gate.after(40 * MS, guard, calm, 2 * calm - 1).is_open
    assert gate.after(40 * MS, guard, calm, 2 * calm).is_open
    assert gate.after(None, guard, calm, 2 * calm).is_open  # nobody is left: calm as can be


def test_a_tick_that_ends_just_a_guard_before_its_deadline_holds() -> None:
    # 10 + 15 n + 5 ms
    assert forecast(guard_ms=5).most(9) == 4
    assert [forecast(guard_ms=guard).holds(4) for guard in (5, 6)] == [True, False]


@pytest.mark.parametrize(
    ("slow_run", "late_run", "since", "live", "chosen"),
    [
        (1, 5, 100, [4, 9, 7], None),  # one stall: its own step, and those that catch up
        (3, 3, 100, [4, 9, 7], 9),
        (0, 11, 100, [4, 9, 7], None),
        (0, 12, 100, [4, 9, 7], 9),  # steps that only just fit never catch up
        (30, 30, 2, [4, 7], None),  # the cure has not had its time
        (30, 30, 3, [4, 7], 7),
        (0, 30, 11, [4, 7], None),
        (0, 30, 12, [4, 7], 7),
        (30, 30, 100, [4], None),  # nobody would gain by it
        (30, 30, 100, [], None),
    ],
)
def test_overload_sends_the_newest_away_one_at_a_time(
    slow_run: int, late_run: int, since: int, live: list[int], chosen: int | None
) -> None:
    assert plan_shed(Overload(slow_run, late_run, since), tolerated=3, live=live) == chosen
