"""Whether a line keeps up with the calls it has; one that does not takes no more. Pure.

Decides from the line's own lateness, whatever its reason: more calls than this machine bears, or
other programs on it. A tick that came before its frame was handed in is a piece of what a caller
said that the model did not hear, and once a line is behind, every call more makes it worse for all.
"""

from collections import deque

from appliance.clock import NS_PER_S

MOST_SHARE = 0.05
"""Of the frames: with more that missed their tick it is time to say no. A call that begins while a
machine is busy for a moment costs 1 or 2 in a hundred, and that is no reason to."""

LOOKED_AT, LATE_SECONDS = 10, 3
"""Seconds that are looked at together, and how many of them must each have been as late: one stall
is no strain."""


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
        late = sum(lost > MOST_SHARE * frames for frames, lost in self._seconds)
        frames, lost = (sum(counts) for counts in zip(*self._seconds, strict=True))
        self.why = ""
        if late >= LATE_SECONDS and lost > MOST_SHARE * frames:
            self.why = (
                f"this line is late: {lost} of {frames} frames of the last {len(self._seconds)} s "
                f"missed their tick"
            )
