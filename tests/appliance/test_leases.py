"""Held and free always make the total, and rows have no holes."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from appliance.leases import Leases, Slots
from appliance.session import SessionId


@dataclass(eq=False)
class Guest:
    slot: int = -1


@given(total=st.integers(1, 6), moves=st.lists(st.integers(-3, 9), max_size=60))
def test_held_and_free_are_always_the_total(total: int, moves: list[int]) -> None:
    leases = Leases(total)
    held: list[SessionId] = []
    generations = []
    for move in moves:
        if move < 0 or not held:
            lease = leases.grant()
            assert (lease is None) == (len(held) == total)
            if lease is not None:
                held.append(lease.session)
                generations.append(lease.generation)
        else:
            session = held.pop(move % len(held))
            assert leases.give_back(session)
            assert not leases.give_back(session)
        assert leases.held == len(held)
        assert leases.held + leases.free == total
    assert generations == sorted(set(generations)), "a generation was used twice"


@given(total=st.integers(1, 6), moves=st.lists(st.integers(-3, 9), max_size=60))
def test_live_slots_are_the_first_rows_and_state_follows_its_tenant(
    total: int, moves: list[int]
) -> None:
    slots: Slots[Guest] = Slots(total)
    arena: list[Guest | None] = [None] * total
    seated: list[Guest] = []
    for move in moves:
        if (move < 0 or not seated) and len(seated) < total:
            guest = Guest()
            arena[slots.take(guest)] = guest
            seated.append(guest)
        elif seated:
            guest = seated.pop(move % len(seated))
            hole = guest.slot
            source = slots.leave(guest)
            if source is not None:
                arena[hole] = arena[source]
            assert guest.slot == -1
        assert [g.slot for g in slots] == list(range(len(seated)))
        assert [arena[g.slot] for g in seated] == seated
