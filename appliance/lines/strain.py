"""Whether a line keeps up with the calls it has; one that does not takes no more. Pure.

Decides from the line's own lateness, whatever its reason: more calls than this machine bears, or
other programs on it. A tick that came before its frame was handed in is a piece of what a caller
said that the model did not hear, and once a line is behind, every call more makes it worse for all.
"""

from collections import deque

from appliance.clock import NS_PER_S

LATE_SHARE = 0.02
"""Of a second's frames: so many that missed their tick make it a late one."""

LOOKED_AT, LATE_SECONDS = 10, 3
"""Seconds that are looked at, and how many of them must have been late: one stall is no strain."""


class Strain:
    """How a line has done in the last seconds."""

    def __init__(self) -> None:
        self.why = ""
        """Why no more calls can be taken; empty: they can."""
        self._seconds: deque[tuple[int, int]] = deque(maxlen=LOOKED_AT)
        """Frames due and missed in each."""
        self._since_ns: int | None = None
        self._due = self._missed = 0

    def look(self, due: int, missed: int, now_ns: int) -> None:
        """due, missed: frames of all calls since the line began, and those whose tick was over."""
        if self._since_ns is None:
            self._since_ns, self._due, self._missed = now_ns, due, missed
            return
        seconds = (now_ns - self._since_ns) // NS_PER_S
        if not seconds:
            return
        self._since_ns += seconds * NS_PER_S
        self._seconds.append((due - self._due, missed - self._missed))
        # Nobody looked for longer than a second: these were the same stall.
        self._seconds.extend([(0, 0)] * min(seconds - 1, LOOKED_AT))
        self._due, self._missed = due, missed
        late = sum(missed > LATE_SHARE * due for due, missed in self._seconds)
        self.why = ""
        if late >= LATE_SECONDS:
            frames, lost = (sum(counts) for counts in zip(*self._seconds, strict=True))
            self.why = (
                f"this line is late: {lost} of {frames} frames of the last {len(self._seconds)} s "
                f"missed their tick"
            )
