"""Lines that a peer can cause at will."""

import logging

import pytest

from appliance.log import SELDOM_NS, Seldom


def test_a_flood_is_one_line_a_second_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    seldom = Seldom(logging.getLogger("flood"), logging.WARNING)
    for now_ns in (5, 6, 5 + SELDOM_NS - 1, 5 + SELDOM_NS, 5 + 2 * SELDOM_NS):
        seldom.say(now_ns, "peer %d", now_ns)
    assert [record.getMessage() for record in caplog.records] == [
        "peer 5",
        f"peer {5 + SELDOM_NS}; 2 like it before were not logged",
        f"peer {5 + 2 * SELDOM_NS}",
    ]
