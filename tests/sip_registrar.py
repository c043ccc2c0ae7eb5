"""A registrar of a few lines for tests: it answers every REGISTER as the test says."""

import re
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.sip_peer import HOST

Answer = Callable[[int], tuple[str, str]]


class Registrar:
    """``with Registrar(answer) as registrar:`` answers until the block ends."""

    def __init__(self, answer: Answer) -> None:
        """answer: of how manieth request (from 1), the status and what follows the contact."""
        self.requests: list[str] = []
        self._answer = answer
        self._stop = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((HOST, 0))
        self._socket.settimeout(0.05)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stop:
            try:
                raw, sender = self._socket.recvfrom(65_536)
            except TimeoutError:
                continue
            text = raw.decode()
            if not text.startswith("REGISTER"):
                continue
            self.requests.append(text)
            status, more = self._answer(len(self.requests))
            kept = re.findall(r"^(?:Via|From|To|Call-ID|CSeq):.*?\r\n", text, re.M)
            contact = re.search(r"^(Contact: *<[^>]*>)", text, re.M)
            assert contact is not None
            said = f"SIP/2.0 {status}\r\n{''.join(kept)}{contact[1]}{more}\r\n"
            self._socket.sendto((said + "Content-Length: 0\r\n\r\n").encode(), sender)
