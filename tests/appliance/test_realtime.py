"""Real-time priority: asked for once, done without where it is not given."""

import logging
import os

import pytest

from appliance.realtime import ask_for_priority


def test_nothing_is_asked_for_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setscheduler", lambda *args: pytest.fail(f"asked: {args}"))
    assert ask_for_priority(0) is False


def test_what_is_asked_for_is_fifo_for_this_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        os, "sched_setscheduler", lambda pid, how, p: asked.append((pid, how, p.sched_priority))
    )
    assert ask_for_priority(10) is True
    assert asked == [(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, 10)]


def test_a_machine_that_does_not_allow_it_gets_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with caplog.at_level(logging.INFO):
        assert ask_for_priority(10) is False
    (record,) = caplog.records
    assert "Operation not permitted" in record.message
    assert "LimitRTPRIO=10" in record.message
