"""How much a stranger may send. Pure: times are arguments."""

from dataclasses import dataclass, field

from appliance.clock import NS_PER_S


@dataclass(slots=True)
class Bucket:
    """So much at once, and so much per second in the long run."""

    per_second: float
    burst: float
    _level: float = field(init=False)
    _at_ns: int | None = None

    def __post_init__(self) -> None:
        self._level = self.burst

    def take(self, amount: float, now_ns: int) -> bool:
        """Take ``amount`` if it is there. False, and nothing was taken, if it is not."""
        if self._at_ns is not None:
            gained = (now_ns - self._at_ns) / NS_PER_S * self.per_second
            self._level = min(self.burst, self._level + max(0.0, gained))
        self._at_ns = now_ns
        if amount > self._level:
            return False
        self._level -= amount
        return True


@dataclass(slots=True)
class Pace:
    """Whether somebody keeps sending more than time passes: a sound card of another rate."""

    per_second: float
    most: float
    """So many times as much."""
    window_ns: int = 10 * NS_PER_S
    _got: float = 0.0
    _since_ns: int | None = None

    def too_fast(self, amount: float, now_ns: int) -> float | None:
        """Count ``amount``; at the end of a window that had too much, what came per second."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self._got += amount
        passed_ns = now_ns - self._since_ns
        if passed_ns < self.window_ns:
            return None
        rate = self._got * NS_PER_S / passed_ns
        self._got, self._since_ns = 0.0, now_ns
        return rate if rate > self.most * self.per_second else None
