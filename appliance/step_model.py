"""How long a tick takes, as a function of who is live: fitted from ticks that were timed. Pure.

    step  (B, fill) = (base + session * B + fill_cost * fill + misfit) * slower     all terms >= 0
    median(B, fill) = step + beside + beside_session * B
    p99.9 (B, fill) = median * (1 + sway) + hiccup * max(1, median / largest median seen)

``fill`` is the sum over sessions of how full their state is, 0 (just begun) to 1 (full retention);
it is what attention over growing rings costs. ``misfit`` is the most by which any measured bucket
of steps exceeds the straight line, beyond what chance explains, so a step in the curve at some
batch is not averaged away.
What the box does ``beside`` the engine's step is learnt from live ticks. What ticks take beyond
their median has two parts. ``sway``: a core that others share, or a cache, makes long ticks longer
by more than short ones, so it is a share of the tick, what one in twenty of the longer ticks
exceeds. It is counted from the median of the tick's own bucket: counted from line and misfit, a
bend of the curve somewhere else hid it, and forecasts were up to a tenth too low. ``hiccup``: what
is left at the 99.9th percentile is not theirs, and is added. Beyond the largest batch that was
measured it grows in proportion. Every term grows with B and with fill, hence so do the forecasts,
which admission relies on.

Calibration is what the machine was when the box started, without callers. Once there are
`PLENTY_TICKS` live ones, theirs are the sway and the hiccups: one slow step at the start, or in a
batch that nobody sees again, would otherwise be believed for ever. Where live steps take longer
than the line of calibrated ones says, the machine has become `slower`, be it by its callers, and
whatever was calibrated and has not been seen live is taken to be slower by as much, until live
ticks or a new calibration (`StepSamples.renew`) say otherwise. It is never taken to be faster on
that evidence: the new calibration has to show it.

It knows no sessions, no deadline and no clock. Fewer than 1,000 ticks have no 99.9th percentile:
their largest takes its place.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

KEEP_TICKS = 256
"""Newest ticks of a calibration kept per bucket."""

FORGET_NS = 120_000_000_000
"""How long a live tick counts: 1,500 ticks of 80 ms, so that one in a thousand can be told. A box
that was disturbed and lets nobody in sees no new ticks of the batches it refuses: it must forget,
try again, and be ready to learn again."""

DRIFT = 1.05
"""Live steps take so many times their calibration: more than two calibrations differ by."""
DRIFT_NS = 1_000_000
"""And so much longer: on a step of 3 ms a twentieth is nothing."""

GROWTH = 1.5
"""Largest live batch over the smallest looked at for which a trend between them means anything."""

ENOUGH_TICKS = 64
"""Fresh live ticks of a bucket that take the place of what calibration measured there."""

LIVE_TICKS = 1536
"""Newest live ticks kept per bucket; older ones are forgotten by then."""

PLENTY_TICKS = 128
"""Fresh live ticks that take the place of calibration where it says how ticks differ: 10 s."""

FILL_BUCKETS = 8
"""Kinds of fill told apart per batch, by mean fill."""

QUANTILE = 0.999
SWAY = 0.95
"""The quantile of ticks' shares beyond the median that is taken for `StepModel.sway`."""
NEGLIGIBLE = 1e-12

BESIDE_SESSION_NS = 30_000
"""What a box does for one session beside the engine's step, until its own ticks say it: 20 to 45 us
by `bench.tick_thread` on two busy cores."""

BESIDE_TIMES = 4
"""Times what is known of other machines that a session may take beside the step, as far as a few
ticks of one or two callers can say: a hiccup of theirs is not to be multiplied by a hundred."""

MEDIAN_TICKS = 8
"""Ticks a bucket must have for its median to count as a misfit of the line. With callers joining
every second most buckets have a few ticks, and one disturbed pair of them is no step in the curve:
it counts in the tail, as what it is."""

CHANCE = 2.0
"""Standard errors of a bucket's median that are no misfit: of dozens of buckets with a dozen ticks
each, some median is off by that much on the straightest of lines."""
NORMAL_SPREAD, MEDIAN_ERROR = 1.4826, 1.2533
"""Standard deviation of normal values over the median distance from their median; and the standard
error of the median of many over that of their mean."""

FILL_SPAN = 0.25
"""Mean fills must differ by this much for their cost to be told from noise: extrapolated from less,
a hiccup among young sessions would be blown up to a verdict on old ones."""


Tick = tuple[float, int, int, int]
"""fill, busy_ns, at_ns, and the part of it that was the engine's step."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """A fit. Nanoseconds; see the module's formulas."""

    base_ns: float
    session_ns: float
    fill_ns: float
    misfit_ns: float
    hiccup_ns: float
    reference_ns: float
    """Largest median among the measured buckets."""
    ticks: int
    """Ticks it was fitted from."""
    largest_batch: int
    largest_fill: float
    """Largest mean fill of a measured bucket, 0..1; beyond it the fit is extrapolated."""
    sway: float = 0.0
    beside_ns: float = 0.0
    beside_session_ns: float = 0.0

    def median_ns(self, batch: int, fill: float) -> float:
        """fill: sum over the ``batch`` sessions, 0..batch."""
        step = self.base_ns + self.session_ns * batch + self.fill_ns * fill + self.misfit_ns
        return step + self.beside_ns + self.beside_session_ns * batch

    def p999_ns(self, batch: int, fill: float) -> int:
        """What one tick in a thousand exceeds; 0 for an empty batch, which runs nothing."""
        if batch == 0:
            return 0
        median = self.median_ns(batch, fill)
        stretch = max(1.0, median / self.reference_ns) if self.reference_ns > 0 else 1.0
        return round(median * (1 + self.sway) + self.hiccup_ns * stretch)


@dataclass(slots=True)
class _Bucket:
    calibrated: deque[Tick] = field(default_factory=lambda: deque(maxlen=KEEP_TICKS))
    """Of ticks without callers: nothing but the engine's step."""
    live: deque[Tick] = field(default_factory=lambda: deque(maxlen=LIVE_TICKS))

    def fresh(self, now_ns: int) -> list[Tick]:
        """Live ticks that still count."""
        return [tick for tick in self.live if now_ns - tick[2] <= FORGET_NS]


class StepSamples:
    """Ticks that were timed, by batch and mean fill; the newest of each. One thread uses it."""

    def __init__(self, beside_session_ns: float = 0.0) -> None:
        """beside_session_ns: what the box does for a session beside the step, until it is seen."""
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._beside_session_ns = beside_session_ns
        self.added = 0
        """Ticks ever added."""
        self.slower = 1.0
        """How many times longer steps take than when they were calibrated; live ticks say so."""

    def add(
        self,
        batch: int,
        fill: float,
        busy_ns: int,
        at_ns: int | None = None,
        step_ns: int | None = None,
    ) -> None:
        """One tick. fill: sum over the ``batch`` sessions, 0..batch. busy_ns: its start to done.

        at_ns: when, for a live tick; None: calibration, which counts until live ticks do.
        step_ns: the engine's part of it; None: all of it.
        """
        assert batch > 0, batch
        assert 0 <= fill <= batch, (fill, batch)
        level = min(FILL_BUCKETS - 1, int(FILL_BUCKETS * fill / batch))
        bucket = self._buckets.setdefault((batch, level), _Bucket())
        kept = bucket.calibrated if at_ns is None else bucket.live
        kept.append((fill, busy_ns, at_ns or 0, busy_ns if step_ns is None else step_ns))
        self.added += 1

    def renew(self, ticks: Iterable[tuple[int, float, int]]) -> None:
        """A new calibration, (batch, sum of fills, busy_ns), takes the place of all before it."""
        self._buckets.clear()
        for batch, fill, busy_ns in ticks:
            self.add(batch, fill, busy_ns)
        self.slower = 1.0

    def fit(self, now_ns: int) -> StepModel | None:
        """The model of what counts at ``now_ns``; None when nothing does."""
        live = _table({key: bucket.fresh(now_ns) for key, bucket in self._buckets.items()})
        calibrated = _table({key: bucket.calibrated for key, bucket in self._buckets.items()})
        self.slower = _slower(live, calibrated, self.slower)
        slowed = calibrated * np.array([1, 1, 1, self.slower, self.slower])
        seen, many = np.unique(live[:, :2], axis=0, return_counts=True)
        replaced = {tuple(key) for key in seen[many >= ENOUGH_TICKS].tolist()}
        kept = [tuple(key) not in replaced for key in slowed[:, :2].tolist()]
        counting = np.concatenate([slowed[np.array(kept, bool)], live])
        if not len(counting):
            return None
        buckets = _medians(counting)
        line = _line(buckets)
        excess = np.where(buckets[:, 4] >= MEDIAN_TICKS, buckets[:, 3] - _steps(line, buckets), 0.0)
        misfit = float((excess - CHANCE * buckets[:, 5]).max(initial=0.0))
        beside, beside_session = _beside(live, self._beside_session_ns)
        expected = _steps(line, counting) + _of_own(counting, buckets, excess)
        expected[-len(live) :] += (beside + beside_session * live[:, 0]) if len(live) else 0.0
        counted = slice(-len(live), None) if len(live) >= PLENTY_TICKS else slice(None)
        sway, hiccup = _beyond(counting[counted, 4], expected[counted])
        base, session, fill = (float(c) for c in line)
        reference = float((_steps(line, buckets) + beside_session * buckets[:, 0]).max())
        return StepModel(
            base_ns=base,
            session_ns=session,
            fill_ns=fill,
            misfit_ns=misfit,
            hiccup_ns=hiccup,
            reference_ns=reference + misfit + beside,
            ticks=len(expected[counted]),
            largest_batch=int(buckets[:, 0].max()),
            largest_fill=float((buckets[:, 2] / buckets[:, 0]).max()),
            sway=sway,
            beside_ns=beside,
            beside_session_ns=beside_session,
        )


def _table(buckets: Mapping[tuple[int, int], Iterable[Tick]]) -> NDArray[np.float64]:
    """(ticks, 5): batch, level of fill, fill, step_ns, busy_ns."""
    rows = [
        (batch, level, fill, step_ns, busy_ns)
        for (batch, level), ticks in buckets.items()
        for fill, busy_ns, _, step_ns in ticks
    ]
    return np.array(rows, np.float64).reshape(-1, 5)


def _medians(ticks: NDArray[np.float64]) -> NDArray[np.float64]:
    """(buckets, 6): batch, level, mean fill, median step, of how many ticks, its standard error.

    Rows are in the order of batch and level.
    """
    keys, where = np.unique(ticks[:, :2], axis=0, return_inverse=True)
    where = where.reshape(-1)
    found = np.zeros((len(keys), 6))
    for row, key in enumerate(keys):
        mine = ticks[where == row]
        median = np.median(mine[:, 3])
        spread = NORMAL_SPREAD * np.median(np.abs(mine[:, 3] - median))
        error = MEDIAN_ERROR * spread / math.sqrt(len(mine))
        found[row] = *key, mine[:, 2].mean(), median, len(mine), error
    return found


def _line(buckets: NDArray[np.float64]) -> NDArray[np.float64]:
    """base, session, fill_cost."""
    terms = np.stack([np.ones(len(buckets)), buckets[:, 0], buckets[:, 2]], axis=1)
    means = buckets[:, 2] / buckets[:, 0]
    if float(means.max() - means.min()) < FILL_SPAN:
        terms[:, 2] = 0.0
    return _least_squares(terms, buckets[:, 3], np.sqrt(buckets[:, 4]))


def _steps(line: NDArray[np.float64], rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The line's step for each row of a table or of `_medians`."""
    steps: NDArray[np.float64] = line[0] + line[1] * rows[:, 0] + line[2] * rows[:, 2]
    return steps


def _of_own(
    ticks: NDArray[np.float64], buckets: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """For each tick, the value of the bucket it lies in."""
    keys, wanted = (rows[:, 0] * FILL_BUCKETS + rows[:, 1] for rows in (buckets, ticks))
    own: NDArray[np.float64] = values[np.searchsorted(keys, wanted)]
    return own


def _slower(live: NDArray[np.float64], calibrated: NDArray[np.float64], known: float) -> float:
    """How many times its calibration a live step takes; ``known`` while too few were seen.

    Callers take cores and caches, so it may grow with them: it is told for the largest live batch,
    from those of at least half its size. What the line is off by at batches that were calibrated is
    no drift.
    """
    if not len(live) or not len(calibrated):
        return known
    large = live[live[:, 0] >= live[:, 0].max() / 2]
    if len(large) < ENOUGH_TICKS:
        return known
    buckets = _medians(calibrated)
    line = _line(buckets)
    batches = np.unique(buckets[:, 0])
    off = [(buckets[:, 3] - _steps(line, buckets))[buckets[:, 0] == b].mean() for b in batches]
    expected = _steps(line, large) + np.interp(large[:, 0], batches, off)
    shares = large[:, 3] / np.maximum(expected, 1.0)
    times = float(np.median(shares))
    if large[:, 0].max() >= GROWTH * large[:, 0].min():
        shares = np.minimum(shares, 2 * times)  # a hiccup is no slope
        times = max(times, float(np.polyval(np.polyfit(large[:, 0], shares, 1), large[:, 0].max())))
    longer = float(np.median(large[:, 3] - expected))
    return times if times > DRIFT and longer > DRIFT_NS else 1.0


def _beside(live: NDArray[np.float64], session_ns: float) -> tuple[float, float]:
    """What a tick takes beside its step: of itself, and for each session.

    session_ns: what the latter is held to be until batches of several sizes were seen.
    """
    if len(live) < ENOUGH_TICKS:
        return 0.0, session_ns
    batches, where = np.unique(live[:, 0], return_inverse=True)
    rest = live[:, 4] - live[:, 3]
    medians = np.array([np.median(rest[where.reshape(-1) == n]) for n in range(len(batches))])
    many = np.bincount(where.reshape(-1))
    if batches[-1] >= 2 * batches[0]:
        terms = np.stack([np.ones(len(batches)), batches, np.zeros(len(batches))], axis=1)
        found = _least_squares(terms, medians, np.sqrt(many))
        if found[1] <= BESIDE_TIMES * session_ns or not session_ns:
            return float(found[0]), float(found[1])
        session_ns *= BESIDE_TIMES
    own = medians - session_ns * batches
    return max(0.0, float(np.average(own, weights=many))), session_ns


def _beyond(busy_ns: NDArray[np.float64], expected_ns: NDArray[np.float64]) -> tuple[float, float]:
    """Sway and hiccup of ticks of which ``expected_ns`` is the median."""
    longest = np.argsort(-expected_ns, kind="stable")
    is_long = expected_ns[longest] >= expected_ns[longest[0]] / 2
    long = longest[: max(int(is_long.sum()), ENOUGH_TICKS)]
    shares = busy_ns[long] / np.maximum(expected_ns[long], 1.0) - 1
    sway = max(0.0, float(np.quantile(shares, SWAY, method="lower")))
    beyond = busy_ns[long] - expected_ns[long] * (1 + sway)
    excess = beyond[beyond > 0]
    drawn = 0.0
    if len(excess) >= MEDIAN_TICKS:  # they are taken to thin out as an exponential does
        share = len(excess) / len(long)
        drawn = float(excess.mean()) * math.log(max(1.0, share / (1 - QUANTILE)))
    beyond = busy_ns - expected_ns * (1 + sway)
    return sway, max(0.0, drawn, float(np.quantile(beyond, QUANTILE, method="higher")))


def _least_squares(
    terms: NDArray[np.float64], target: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The non-negative coefficients that fit best; three terms, so all 7 subsets are tried.

    A term the data cannot tell apart (every tick had the same batch) keeps what least squares
    gives the smallest coefficients; hence calibration measures more than one batch.
    """
    best: NDArray[np.float64] = np.array([float(target.max()), 0.0, 0.0])
    lowest = np.inf
    scaled, wanted = terms * weights[:, None], target * weights
    for size in (3, 2, 1):
        for chosen in itertools.combinations(range(3), size):
            solved = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)[0]
            if (solved < 0).any():
                continue
            error = float(((scaled[:, chosen] @ solved - wanted) ** 2).sum())
            # The largest subsets come first: a smaller one must gain more than rounding does.
            if error < lowest - NEGLIGIBLE * float((wanted**2).sum()):
                lowest = error
                best = np.zeros(3)
                best[list(chosen)] = solved
    return best


class StepRing:
    """Tick thread -> control thread: one writer, one reader, no lock, nothing allocated to keep.

    A row is (batch, sum of fills in thousandths, busy_ns, margin_ns, step_ns). When the reader is
    behind, new rows are dropped: one more or less does not matter, unlike a ledger record.
    """

    __slots__ = ("capacity", "read", "rows", "written")

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.rows: NDArray[np.int64] = np.zeros((capacity, 5), np.int64)
        self.written = 0
        self.read = 0

    def put(
        self, batch: int, fill_permille: int, busy_ns: int, margin_ns: int, step_ns: int
    ) -> None:
        """Writer."""
        if self.written - self.read < self.capacity:
            self.rows[self.written % self.capacity] = (
                *(batch, fill_permille, busy_ns, margin_ns, step_ns),
            )
            self.written += 1

    def pour(self, samples: StepSamples, now_ns: int) -> int | None:
        """Reader: move all rows into ``samples``. Returns the smallest margin; None: no row."""
        smallest = None
        written = self.written
        while self.read < written:
            row = self.rows[self.read % self.capacity].tolist()
            batch, fill, busy_ns, margin_ns, step_ns = row
            self.read += 1
            samples.add(batch, min(batch, fill / 1000), busy_ns, now_ns, step_ns)
            smallest = margin_ns if smallest is None else min(smallest, margin_ns)
        return smallest
