"""What a person sees while TensorRT builds: one moving line on a terminal, else a line at times.

TensorRT reports thousands of small steps in nested phases and no total, so there is no bar to
fill: the line shows that it moves, and where. Pure: text out, no output.
"""

LINE_STEPS = 2000
"""Steps between two lines in a log; a full-size stage reports some hundred a second."""
WIDTH = 78


class Ticker:
    """Turns progress into text; both methods return what to write, line ends included."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self._steps = 0
        self._shown = False

    def update(self, stage: str, phase: str, step: int, steps: int) -> str:
        """One report of the builder."""
        self._steps += 1
        line = f"  {stage:<16} {phase}, {step} of {steps}"
        if self.is_terminal:
            self._shown = True
            return f"\r{line[:WIDTH]:<{WIDTH}}"
        return f"{line}\n" if self._steps % LINE_STEPS == 0 else ""

    def say(self, line: str) -> str:
        """A line that stays, in place of the moving one."""
        cleared = f"\r{'':<{WIDTH}}\r" if self._shown else ""
        self._shown = False
        return f"{cleared}{line}\n"
