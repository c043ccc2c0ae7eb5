"""Records on their way from the tick thread to the ledger's: one writer, one reader, no lock.

A record is packed where it lies; a full ring loses it and counts. Does not know what is in a record
(`ledger`) or what becomes of it (`ledger_writer`).
"""

import numpy as np
from numpy.typing import NDArray

from appliance.ledger import RECORD_BYTES, TICK, TICK_VALUES


class RecordRing:
    """Tick thread -> ledger thread: one writer, one reader, no lock, nothing allocated to keep.

    Each counter has one writer; the interpreter lock orders a row's bytes before its counter.
    """

    __slots__ = ("_bytes", "capacity", "is_hurried", "lost", "read", "rows", "written")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._bytes = bytearray(capacity * RECORD_BYTES)
        self.rows: NDArray[np.void] = np.frombuffer(self._bytes, TICK)
        self.written = 0
        self.read = 0
        self.lost = 0
        """Records that found the ring full. Only grows; 0 in a box whose ledger is whole."""
        self.is_hurried = False
        """The writer is between two points where it cannot wait for anybody's Python."""

    def put(self, record: tuple[int, ...]) -> bool:
        """Writer: copy one record, `ledger.TICK_FIELDS` in order. False if it was lost."""
        if self.written - self.read >= self.capacity:
            self.lost += 1
            return False
        offset = self.written % self.capacity * RECORD_BYTES
        TICK_VALUES.pack_into(self._bytes, offset, *record)
        self.written += 1
        return True

    def take(self) -> NDArray[np.void]:
        """Reader: a copy of all records that wait, oldest first."""
        written = self.written
        if written == self.read:
            return self.rows[:0].copy()
        picked = np.arange(self.read, written) % self.capacity
        records: NDArray[np.void] = self.rows[picked]
        self.read = written
        return records
