"""How the box logs: one line per change of state, to stderr; journald adds the time.

Nothing is logged per tick or per frame, and nothing at all from the tick thread.
"""

import logging
import sys


def set_up(*, verbose: bool = False) -> None:
    """Once, from a verb that serves. verbose: also what only a developer wants to know."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
