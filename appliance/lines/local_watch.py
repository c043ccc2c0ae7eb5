"""A sound card that comes and goes: noticed, let go of, and opened again.

Decides when a card is taken for gone and how often it is looked for. Opening and closing take as
long as a sound library likes, so a thread of their own does them, one at a time, and the call goes
on meanwhile. Does not know the sound library (it is handed what opens a card) nor the call.

    OPEN -- no callback for `STALE_NS`, or the stream ended --> closing and opening, in a thread
      ^                                                             |
      +------- it could be opened ----------------------------------+-- not: again in `RETRY_NS`
"""

import contextlib
import queue
import threading
from collections.abc import Callable

from appliance.clock import NS_PER_S
from appliance.lines.local_card import CardError, Stream
from appliance.lines.local_rings import Exchange

STALE_NS = 4 * NS_PER_S
"""Callbacks come every 10 ms. But PulseAudio begins up to 1 s after it said so, and PortAudio gets
over an underflow in 2 s by itself, which is faster than opening everything again."""

RETRY_NS = NS_PER_S
"""How often a card that is not there is looked for."""

STUCK_NS = 10 * NS_PER_S
"""A library that takes longer to close or open a card will never come back."""

Opened = tuple[Exchange, Stream]


def in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="sound card", daemon=True).start()


class CardWatch:
    """One card, kept open. One thread uses it."""

    def __init__(
        self,
        first: Opened,
        reopen: Callable[[], Opened],
        now_ns: int,
        run: Callable[[Callable[[], None]], None] = in_thread,
    ) -> None:
        """first: what is open now. reopen: looks for the card anew; raises `CardError`.

        run: runs its argument beside us, at any time.
        """
        self.exchange: Exchange | None = first[0]
        """None: there is no card now."""
        self.trouble = ""
        """Why there is none, in words for the operator."""
        self.losses = 0
        """How often the card went away."""
        self._stream: Stream | None = first[1]
        self._reopen = reopen
        self._run = run
        self._news: queue.SimpleQueue[Opened | CardError] = queue.SimpleQueue()
        self._since_ns = now_ns
        """When the card was opened, or when the thread was sent."""
        self._working = False
        self._retry_ns = 0

    def turn(self, now_ns: int) -> bool:
        """Look after the card; returns whether `exchange` has changed."""
        if self.exchange is not None:
            if not self._is_gone(now_ns):
                return False
            self.losses += 1
            self.exchange = None
            self.trouble = "the sound card has gone"
            self._send(now_ns)
            return True
        if not self._working:
            if now_ns >= self._retry_ns:
                self._send(now_ns)
            return False
        try:
            news = self._news.get_nowait()
        except queue.Empty:
            if now_ns - self._since_ns > STUCK_NS:
                self.trouble = (
                    f"the sound library has not let go of the card for {STUCK_NS // NS_PER_S} s. "
                    "Leave (q) and start again"
                )
            return False
        self._working = False
        if isinstance(news, CardError):
            self.trouble = str(news)
            self._retry_ns = now_ns + RETRY_NS
            return False
        self.exchange, self._stream = news
        self.trouble = ""
        self._since_ns = now_ns
        return True

    def close(self) -> None:
        """Let go of the card, if we hold it. May hang where the card has gone; see `local_line`."""
        stream, self._stream = self._stream, None
        if stream is not None and not self._working:
            stream.close()

    def _is_gone(self, now_ns: int) -> bool:
        assert self.exchange is not None
        assert self._stream is not None
        newest_ns = max(min(self.exchange.heard_ns, self.exchange.played_ns), self._since_ns)
        return now_ns - newest_ns > STALE_NS or not self._stream.active

    def _send(self, now_ns: int) -> None:
        self._working = True
        self._since_ns = now_ns
        stream, self._stream = self._stream, None
        self._run(lambda: self._news.put(self._renew(stream)))

    def _renew(self, stream: Stream | None) -> Opened | CardError:
        if stream is not None:
            # What is gone need not end well.
            with contextlib.suppress(Exception):
                stream.close()
        try:
            return self._reopen()
        except CardError as err:
            return err
        except Exception as err:  # whatever a sound library comes up with: it is tried again
            return CardError(f"the sound card cannot be opened: {err}")
