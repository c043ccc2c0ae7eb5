"""Where a newcomer goes when there are several boxes."""

from hypothesis import given
from hypothesis import strategies as st

from appliance.placement import Offer, places

OFFERS = st.lists(
    st.builds(Offer, st.integers(0, 99), st.integers(0, 50), st.integers(0, 50)),
    max_size=8,
    unique_by=lambda offer: offer.box,
)


def test_headroom_comes_first_then_emptiness() -> None:
    assert places([Offer(0, 2, 1), Offer(1, 5, 9), Offer(2, 2, 0), Offer(3, 0, 0)]) == [1, 2, 0, 3]
    assert places([]) == []


@given(OFFERS)
def test_every_box_is_asked_once_and_none_before_one_with_more_room(offers: list[Offer]) -> None:
    order = places(offers)
    assert sorted(order) == sorted(offer.box for offer in offers)
    free = {offer.box: offer.free for offer in offers}
    assert [free[box] for box in order] == sorted(free.values(), reverse=True)


@given(room=st.lists(st.integers(0, 9), min_size=1, max_size=5), callers=st.integers(0, 60))
def test_callers_fill_all_boxes_evenly_and_none_beyond_its_room(
    room: list[int], callers: int
) -> None:
    held = [0] * len(room)
    for _ in range(callers):
        offers = [Offer(n, room[n] - held[n], held[n]) for n in range(len(room))]
        best = places(offers)[0]
        if room[best] - held[best] > 0:
            held[best] += 1
    assert sum(held) == min(callers, sum(room))
    left = [room[n] - held[n] for n in range(len(room))]
    # Whoever got a caller had at least as much room as any other before it.
    assert (
        max(left) - min(left[n] for n in range(len(room)) if held[n] or left[n] == max(left)) <= 1
    )
