"""Training by the second: how much of a lease is left, and the learning rate that follows from it.

The one reader of time in training. A machine is lent for minutes, so a run is given seconds, not
steps, and ends by itself with time to write its checkpoint.
"""

import time


class Pace:
    """A run of so many seconds, from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, time.monotonic()

    def spent_s(self) -> float:
        return time.monotonic() - self.began

    def share(self) -> float:
        """How much of the run is over, 0 to 1."""
        return min(1.0, self.spent_s() / self.seconds)


def rate_at(share: float, steps: int, peak: float, warm_up: int = 200, cool: float = 0.35) -> float:
    """The learning rate: up over the first steps, level, down to a fiftieth in the last share."""
    level = min(1.0, (steps + 1) / warm_up)
    if share > 1 - cool:
        level *= max(0.02, (1 - share) / cool)
    return peak * level
