"""What a person sees while a checkpoint is written: a bar on a terminal, else a line now and then.

Decides when something is worth saying, by bytes: a pipe or a log gets a line per gigabyte, which
is every few seconds, a terminal a bar that moves by the percent. Pure: text out, no output.
"""

BAR_CELLS = 30
LINE_BYTES = 1 << 30


class Bar:
    """Turns progress into text; `update` returns what to write to the terminal, often nothing."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self._last: tuple[str, int] | None = None

    def update(self, file: str, done: int, total: int) -> str:
        """done, total: bytes of ``file``. Returns text to write as it is, line ends included."""
        finished = done >= total
        step = done * 100 // total if self.is_terminal else done // LINE_BYTES
        if not finished and self._last == (file, step):
            return ""
        first = self._last is None or self._last[0] != file
        self._last = (file, step)
        sizes = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB"
        if self.is_terminal:
            cells = BAR_CELLS * done // total
            bar = "#" * cells + "." * (BAR_CELLS - cells)
            return f"\r{file} [{bar}] {sizes}" + ("\n" if finished else "")
        return "" if first and not finished else f"{file}: {sizes}\n"
