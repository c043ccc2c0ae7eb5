"""How an account stays logged in at its registrar: when to try again, and when to stop. Pure.

The stack renews a login by itself, but when that fails it waits up to half an hour, and it believes
whatever a registrar says of how long a login lasts: one that answers "for 0 seconds" is asked a
thousand times a second, which costs a third of a core and a megabyte a second for ever. So a failed
renewal is ours to try again, and a login that is renewed in a rush is given up for a while.
"""

from collections import deque
from dataclasses import dataclass, field

from appliance.clock import NS_PER_MS, NS_PER_S

AGAIN_S = (2, 5, 15, 30, 60)
"""After so long a refused login is tried again, the last for ever."""

RUSH_MOST, RUSH_NS = 10, 5 * NS_PER_S
"""So many renewals within so long are a rush; a login for one second is renewed after 0.9."""


@dataclass(slots=True)
class Login:
    """One account's standing. Times must not run backwards."""

    is_on: bool = False
    _failures: int = 0
    _renewed_ns: deque[int] = field(default_factory=lambda: deque(maxlen=RUSH_MOST + 1))

    def accepted(self, now_ns: int) -> str:
        """The registrar said yes, the first time or once more; not empty: why it must end now."""
        renewed = self._renewed_ns
        if self.is_on and now_ns - renewed[-1] > NS_PER_S:
            self._failures = 0
        self.is_on = True
        renewed.append(now_ns)
        if len(renewed) <= RUSH_MOST or now_ns - renewed[0] > RUSH_NS:
            return ""
        within_ms = (now_ns - renewed[0]) // NS_PER_MS
        return (
            f"its registrar had it renewed {RUSH_MOST} times within {within_ms} ms: "
            "by its answers a login lasts for less than a second"
        )

    def failed(self) -> int:
        """It is off; after how many seconds to try again."""
        self.is_on = False
        self._renewed_ns.clear()
        again_s = AGAIN_S[min(self._failures, len(AGAIN_S) - 1)]
        self._failures += 1
        return again_s
