"""Training by the second: how much of a run is left, and what follows from it.

The one reader of time in training. A machine is lent for minutes, so a run is given seconds, not
steps, and ends by itself with time to write its checkpoint. From the time follow the learning rate
and the `Milestones`: when the run says how it goes, and when it keeps what it has.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SAVE_S = 60.0
"""Between two checkpoints."""
REPORTS = 40
"""Of losses in a run."""

Say = Callable[[str], None]
Told = dict[str, float]
"""What a checkpoint says of itself: steps and seconds of all runs, and the last losses."""


class Pace:
    """A run of so many seconds, from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, time.monotonic()

    def spent_s(self) -> float:
        return time.monotonic() - self.began

    def share(self) -> float:
        """How much of the run is over, 0 to 1."""
        return min(1.0, self.spent_s() / self.seconds)


def rate_at(share: float, steps: int, peak: float, warm_up: int = 200, cool: float = 0.45) -> float:
    """The learning rate: up over the first steps, level, down to a fiftieth in the last share."""
    level = min(1.0, (steps + 1) / warm_up)
    if share > 1 - cool:
        level *= max(0.02, (1 - share) / cool)
    return peak * level


@dataclass
class Milestones:
    """Of one run: `passed` is asked after every step."""

    pace: Pace
    name: str
    losses: Sequence[str]
    told: Told
    """By the checkpoint that is continued; empty at the first run."""
    say: Say
    save: Callable[[Told], None]

    def __post_init__(self) -> None:
        self._seconds = self.told.get("seconds", 0.0)
        self._next_report, self._next_save = 0.0, self.pace.spent_s() + SAVE_S

    def passed(self, steps: int, values: Callable[[], list[float]], is_over: bool) -> Told:
        """Say and save what is due after ``steps``; what the last checkpoint was told.

        values: of `losses`; asked only when needed, since it waits for the device.
        """
        pace = self.pace
        if pace.spent_s() >= self._next_report:
            found = zip(self.losses, values(), strict=True)
            losses = ", ".join(f"{name} {value:.3f}" for name, value in found)
            self.say(f"{self.name} step {steps}, {pace.spent_s():.1f} s: {losses}")
            self._next_report = pace.spent_s() + max(1.0, pace.seconds / REPORTS)
        if is_over or pace.spent_s() >= self._next_save:
            self.told = {"steps": steps, "seconds": self._seconds + pace.spent_s()}
            self.told |= zip(self.losses, (round(v, 4) for v in values()), strict=True)
            self.save(self.told)
            self._next_save = pace.spent_s() + SAVE_S
        return self.told
