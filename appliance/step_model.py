"""How long a tick takes, as a function of who is live: fitted from ticks that were timed. Pure.

    median(B, fill) = base + session * B + fill_cost * fill + misfit        all terms >= 0
    p99.9 (B, fill) = median + tail * max(1, median / largest median seen)

``fill`` is the sum over sessions of how full their state is, 0 (just begun) to 1 (full retention);
it is what attention over growing rings costs. ``misfit`` is the most by which any measured bucket
of ticks exceeds the straight line, so a step in the curve at some batch is not averaged away.
``tail`` is the 99.9th percentile of what ticks took beyond their median; beyond the largest batch
that was measured it grows in proportion. Every term grows with B and with fill, hence so do the
forecasts, which admission relies on.

Calibration is what the machine was when the box started. Where live ticks of the same kind take
`DRIFT` times as long as their calibration did, the machine has changed, and whatever was calibrated
and has not been seen live is taken to be slower by as much, until live ticks or a new calibration
(`StepSamples.renew`) say otherwise. It is never taken to be faster on that evidence: the new
calibration has to show it.

It knows no sessions, no deadline and no clock. Fewer than 1,000 ticks have no 99.9th percentile:
their largest takes its place.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

KEEP_TICKS = 256
"""Newest ticks kept per bucket: 20 s of 80 ms ticks, after which a disturbance is forgotten."""

FORGET_NS = 60_000_000_000
"""How long a live tick counts. A box that was disturbed and lets nobody in sees no new ticks of the
batches it refuses: it must forget, try again, and be ready to learn again."""

DRIFT = 1.25
"""Live ticks take so many times their calibration: more than gathering and scattering explain."""
DRIFT_NS = 2_000_000
"""And so much longer: on a tick of 3 ms a quarter is nothing."""

ENOUGH_TICKS = 64
"""Fresh live ticks of a bucket that take the place of what calibration measured there."""

FILL_BUCKETS = 8
"""Kinds of fill told apart per batch, by mean fill."""

QUANTILE = 0.999
NEGLIGIBLE = 1e-12

MEDIAN_TICKS = 8
"""Ticks a bucket must have for its median to count as a misfit of the line. With callers joining
every second most buckets have a few ticks, and one disturbed pair of them is no step in the curve:
it counts in the tail, as what it is."""

FILL_SPAN = 0.25
"""Mean fills must differ by this much for their cost to be told from noise: extrapolated from less,
a hiccup among young sessions would be blown up to a verdict on old ones."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """A fit. Nanoseconds; see the module's formulas."""

    base_ns: float
    session_ns: float
    fill_ns: float
    misfit_ns: float
    tail_ns: float
    reference_ns: float
    """Largest median among the measured buckets."""
    ticks: int
    """Ticks it was fitted from."""
    largest_batch: int
    largest_fill: float
    """Largest mean fill of a measured bucket, 0..1; beyond it the fit is extrapolated."""

    def median_ns(self, batch: int, fill: float) -> float:
        """fill: sum over the ``batch`` sessions, 0..batch."""
        return self.base_ns + self.session_ns * batch + self.fill_ns * fill + self.misfit_ns

    def p999_ns(self, batch: int, fill: float) -> int:
        """What one tick in a thousand exceeds; 0 for an empty batch, which runs nothing."""
        if batch == 0:
            return 0
        median = self.median_ns(batch, fill)
        stretch = max(1.0, median / self.reference_ns) if self.reference_ns > 0 else 1.0
        return round(median + self.tail_ns * stretch)


def _newest() -> deque[tuple[float, int, int]]:
    return deque(maxlen=KEEP_TICKS)


@dataclass(slots=True)
class _Bucket:
    calibrated: deque[tuple[float, int, int]] = field(default_factory=_newest)
    """(fill, busy_ns, at_ns) of ticks without callers."""
    live: deque[tuple[float, int, int]] = field(default_factory=_newest)

    def fresh(self, now_ns: int) -> list[tuple[float, int, int]]:
        """Live ticks that still count."""
        return [tick for tick in self.live if now_ns - tick[2] <= FORGET_NS]

    def counting(self, now_ns: int, slower: float) -> list[tuple[float, int, int]]:
        """What counts at ``now_ns``: fresh live ticks, and calibration while those are few.

        slower: how many times longer a step takes now than when it was calibrated.
        """
        fresh = self.fresh(now_ns)
        if len(fresh) >= ENOUGH_TICKS:
            return fresh
        return [*((fill, round(ns * slower), at) for fill, ns, at in self.calibrated), *fresh]

    def drift(self, now_ns: int) -> float | None:
        """How many times its calibration a live tick takes; None when one of them is missing."""
        fresh = self.fresh(now_ns)
        if len(fresh) < ENOUGH_TICKS or not self.calibrated:
            return None
        live, before = (
            float(np.median([t[1] for t in ticks])) for ticks in (fresh, self.calibrated)
        )
        return live / before if live > before * DRIFT and live > before + DRIFT_NS else 1.0


class StepSamples:
    """Ticks that were timed, by batch and mean fill; the newest of each. One thread uses it."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self.added = 0
        """Ticks ever added."""
        self.slower = 1.0
        """How many times longer steps take than when they were calibrated; live ticks say so."""

    def add(self, batch: int, fill: float, busy_ns: int, at_ns: int | None = None) -> None:
        """One tick. fill: sum over the ``batch`` sessions, 0..batch. busy_ns: its start to done.

        at_ns: when, for a live tick; None: calibration, which counts until live ticks do.
        """
        assert batch > 0, batch
        assert 0 <= fill <= batch, (fill, batch)
        level = min(FILL_BUCKETS - 1, int(FILL_BUCKETS * fill / batch))
        bucket = self._buckets.setdefault((batch, level), _Bucket())
        kept = bucket.calibrated if at_ns is None else bucket.live
        kept.append((fill, busy_ns, at_ns or 0))
        self.added += 1

    def renew(self, ticks: Iterable[tuple[int, float, int]]) -> None:
        """A new calibration, (batch, sum of fills, busy_ns), takes the place of the old one."""
        for bucket in self._buckets.values():
            bucket.calibrated.clear()
        for batch, fill, busy_ns in ticks:
            self.add(batch, fill, busy_ns)
        self.slower = 1.0

    def fit(self, now_ns: int) -> StepModel | None:
        """The model of what counts at ``now_ns``; None when nothing does."""
        seen_now = [d for b in self._buckets.values() if (d := b.drift(now_ns)) is not None]
        if seen_now:  # without live ticks the last word stands
            self.slower = max(seen_now)
        counting = {
            key: bucket.counting(now_ns, self.slower) for key, bucket in self._buckets.items()
        }
        if not any(counting.values()):
            return None
        batches: list[int] = []
        fills: list[float] = []
        medians: list[float] = []
        weights: list[int] = []
        ticks: list[NDArray[np.float64]] = []
        for (batch, _), bucket in counting.items():
            if not bucket:
                continue
            seen = np.array(bucket, np.float64)
            batches.append(batch)
            fills.append(float(seen[:, 0].mean()))
            medians.append(float(np.median(seen[:, 1])))
            weights.append(len(seen))
            ticks.append(seen)
        terms = np.stack([np.ones(len(batches)), np.array(batches), np.array(fills)], axis=1)
        means = terms[:, 2] / terms[:, 1]
        if float(means.max() - means.min()) < FILL_SPAN:
            terms[:, 2] = 0.0
        target = np.array(medians)
        coefficients = _least_squares(terms, target, np.sqrt(weights))
        excess = np.maximum(target - terms @ coefficients, 0.0)
        misfit = float(excess.max(initial=0.0, where=np.array(weights) >= MEDIAN_TICKS))
        spread = [
            seen[:, 1] - (coefficients[0] + coefficients[1] * batch + coefficients[2] * seen[:, 0])
            for batch, seen in zip(batches, ticks, strict=True)
        ]
        beyond = np.concatenate(spread) - misfit
        tail = float(np.quantile(beyond, QUANTILE, method="higher"))
        base, session, fill = (float(c) for c in coefficients)
        return StepModel(
            base_ns=base,
            session_ns=session,
            fill_ns=fill,
            misfit_ns=misfit,
            tail_ns=max(0.0, tail),
            reference_ns=float((terms @ coefficients).max()) + misfit,
            ticks=len(beyond),
            largest_batch=max(batches),
            largest_fill=max(f / b for f, b in zip(fills, batches, strict=True)),
        )


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

    A row is (batch, sum of fills in thousandths, busy_ns, margin_ns). When the reader is behind,
    new rows are dropped: a sample more or less does not matter, unlike a ledger record.
    """

    __slots__ = ("capacity", "read", "rows", "written")

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.rows: NDArray[np.int64] = np.zeros((capacity, 4), np.int64)
        self.written = 0
        self.read = 0

    def put(self, batch: int, fill_permille: int, busy_ns: int, margin_ns: int) -> None:
        """Writer."""
        if self.written - self.read < self.capacity:
            self.rows[self.written % self.capacity] = (batch, fill_permille, busy_ns, margin_ns)
            self.written += 1

    def pour(self, samples: StepSamples, now_ns: int) -> int | None:
        """Reader: move all rows into ``samples``. Returns the smallest margin; None: no row."""
        smallest = None
        written = self.written
        while self.read < written:
            batch, fill, busy_ns, margin_ns = self.rows[self.read % self.capacity].tolist()
            self.read += 1
            samples.add(batch, min(batch, fill / 1000), busy_ns, now_ns)
            smallest = margin_ns if smallest is None else min(smallest, margin_ns)
        return smallest
