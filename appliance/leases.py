"""Who may be in the box, and who sits in which slot. Pure bookkeeping; it cannot leak by design.

Two counts, owned by two threads. A *lease* is the right to one slot, from admission until the
session has left the batch; the control thread grants and takes it back. A *slot* is the row of
the batch a live session sits in right now; the tick thread hands slots out, and a leaver's hole
is filled by the last row, so that live slots are always 0..batch-1. Hence a session's identity is
never its slot. Every lease has a generation number that is never used again; it is stamped on all
that the session makes, and travels with its state when that is moved.

    leases held + leases free = total            slots taken <= leases held
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from appliance.session import SessionId


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to one slot, whichever it will be."""

    session: SessionId
    generation: int
    """u32, from 1, never reused while the box runs."""


class Leases:
    """All leases of the box. One thread uses it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: dict[SessionId, Lease] = {}
        self._granted = 0

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def free(self) -> int:
        return self.total - len(self._held)

    def grant(self) -> Lease | None:
        """A lease for a new session, or None when all are held. Numbers the session, too."""
        if not self.free:
            return None
        self._granted += 1
        lease = Lease(SessionId(self._granted), self._granted)
        self._held[lease.session] = lease
        return lease

    def give_back(self, session: SessionId) -> bool:
        """Free ``session``'s lease. False if it holds none: giving back twice changes nothing."""
        return self._held.pop(session, None) is not None


class Tenant(Protocol):
    """What sits in a slot and wants to know which."""

    slot: int


T = TypeVar("T", bound=Tenant)


class Slots(Generic[T]):
    """The rows of the batch, without holes. One thread uses it."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._rows: list[T] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[T]:
        """Tenants in order of their slots."""
        return iter(self._rows)

    def take(self, tenant: T) -> int:
        """Seat ``tenant`` in the next row and return its slot."""
        assert len(self._rows) < self.total, (len(self._rows), self.total)
        tenant.slot = len(self._rows)
        self._rows.append(tenant)
        return tenant.slot

    def leave(self, tenant: T) -> int | None:
        """Take ``tenant`` out. Returns the slot whose state must be moved into its place, if any.

        The tenant of that slot has already been told its new one.
        """
        hole = tenant.slot
        assert self._rows[hole] is tenant, hole
        last = self._rows.pop()
        tenant.slot = -1
        if last is tenant:
            return None
        source = last.slot
        self._rows[hole] = last
        last.slot = hole
        return source
