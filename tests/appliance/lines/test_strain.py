"""Whether a line keeps up with the calls it has."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.lines.strain import LATE_SECONDS, LOOKED_AT, Strain

TICKS_PER_S = 12
CALLS = 80


class Line:
    """Calls whose frames are counted; each tick some of them miss theirs."""

    def __init__(self) -> None:
        self.strain = Strain()
        self.due = self.missed = 0
        self.now_ns = 5 * NS_PER_S + 1
        self.strain.look(0, 0, self.now_ns)

    def second(self, share: float = 0.0) -> str:
        for _ in range(TICKS_PER_S):
            self.now_ns += NS_PER_S // TICKS_PER_S + 1
            self.due += CALLS
            self.missed += int(CALLS * share)
            self.strain.look(self.due, self.missed, self.now_ns)
        return self.strain.why


def test_a_line_in_time_takes_calls_and_so_does_one_without_any() -> None:
    line = Line()
    assert not any(line.second() for _ in range(30))
    for _ in range(30):
        line.now_ns += NS_PER_S
        line.strain.look(line.due, line.missed, line.now_ns)
        assert not line.strain.why


def test_one_stall_of_two_seconds_refuses_nobody() -> None:
    line = Line()
    for _ in range(5):
        line.second()
    line.now_ns += 2 * NS_PER_S
    line.due += 2 * TICKS_PER_S * CALLS
    line.missed += 2 * TICKS_PER_S * CALLS
    line.strain.look(line.due, line.missed, line.now_ns)
    assert not line.strain.why
    assert not any(line.second() for _ in range(30))


def test_a_line_that_misses_a_tenth_of_its_ticks_refuses_and_says_how_many() -> None:
    line = Line()
    line.second()
    said = [line.second(0.1) for _ in range(LOOKED_AT)]
    assert not any(said[: LATE_SECONDS - 1])
    assert all(said[LATE_SECONDS:])
    assert said[-1] == "this line is late: 960 of 9600 frames of the last 10 s missed their tick"


def test_some_that_miss_theirs_now_and_then_are_no_strain() -> None:
    line = Line()
    assert not any(line.second(1 / CALLS) for _ in range(30))


def test_three_bad_seconds_among_good_ones_are_no_strain() -> None:
    line = Line()
    for second in range(60):
        assert not line.second(0.12 if second % 4 == 0 else 0.0)


def test_what_was_before_the_machine_was_suspended_counts_no_more() -> None:
    line = Line()
    for _ in range(LATE_SECONDS - 1):
        assert not line.second(0.5)
    line.now_ns += 60 * NS_PER_S
    line.due += 60 * TICKS_PER_S * CALLS
    line.missed += 60 * TICKS_PER_S * CALLS
    assert not any(line.second() for _ in range(30))


def test_once_it_is_in_time_again_it_takes_calls_within_ten_seconds() -> None:
    line = Line()
    for _ in range(30):
        line.second(0.5)
    assert line.strain.why
    said = [line.second() for _ in range(LOOKED_AT)]
    assert said[0]
    assert not said[-1]


@given(
    st.lists(
        st.tuples(st.integers(0, 30_000), st.integers(0, 1_000), st.integers(0, 1_000)),
        max_size=40,
    )
)
def test_whatever_it_is_told_it_never_divides_by_nothing(
    looks: list[tuple[int, int, int]],
) -> None:
    strain, now_ns, due, missed = Strain(), 0, 0, 0
    for wait_ms, more, of_them in looks:
        now_ns += wait_ms * NS_PER_MS
        due += more
        missed += min(more, of_them)
        strain.look(due, missed, now_ns)
        assert not strain.why or missed
