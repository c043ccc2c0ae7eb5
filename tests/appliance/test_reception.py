"""Calls with a persona through a whole box: answered once primed, recorded, refused with a reason.

Real time, as in `test_box`; the executor is a fake that knows what each slot was told.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from appliance import control, ledger
from appliance.admission import Reason
from appliance.box import Box
from appliance.channel import Channel
from appliance.clock import MonotonicClock
from appliance.config import (
    AdmissionConfig,
    ClockConfig,
    Config,
    ControlConfig,
    EngineConfig,
    LedgerConfig,
    PersonaConfig,
)
from appliance.control import ControlClient
from appliance.frame_ring import LAST, UplinkHeader
from appliance.priming import PrimingDesk
from appliance.session import State
from engines import snapshot as snapshots
from engines import tensor_file
from engines.bundle import Bundle
from engines.tensor_file import Tensor
from export.checkpoint_text import seeded_pieces, sentencepiece_model
from tests.fakes_prompt import SPEC, PromptedExecutor, make_prompted_bundle

pytestmark = pytest.mark.clock

pytest.importorskip("sentencepiece", reason="needs the persona extra")

DEADLINE_S = 20.0
IDS = 128
VOICE = np.arange(12, dtype=np.int64).reshape(4, 3)


def bundle_in(folder: Path) -> Bundle:
    """With a real tokenizer and a voice."""
    bundle = make_prompted_bundle(folder)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(seeded_pieces(IDS)))
    (folder / "voices").mkdir()
    held = {
        "frames": Tensor("int64", VOICE),
        "embedded": Tensor("float32", np.zeros((0, 2), np.float32)),
    }
    bundle.file(SPEC.voices[0].file).write_bytes(b"".join(tensor_file.encode(held, {})))
    spec = msgspec.structs.replace(SPEC, initial_ids=(IDS, 9, 9))
    return Bundle(folder, msgspec.structs.replace(bundle.manifest, prompt=spec))


class Talking:
    """A box in a thread, and a line to it."""

    def __init__(self, folder: Path, socket: Path, within_s: int = 30) -> None:
        self.folder = folder
        self.socket = socket
        bundle = bundle_in(folder / "bundle")
        self.never = threading.Event()
        self.executor = PromptedExecutor(bundle, 4)
        config = Config(
            engine=EngineConfig(bundle.path),
            clock=ClockConfig(drain_s=0, settle_s=1, first_frame_s=5),
            control=ControlConfig(socket),
            ledger=LedgerConfig(folder / "calls"),
            admission=AdmissionConfig(calibrate_s=0, min_margin_ms=0),
            persona=PersonaConfig(folder / "kept", keep_mb=10, within_s=within_s),
        )
        self.box = Box(config, self.executor, MonotonicClock(), 2**30)
        self._thread = threading.Thread(target=self.box.run, daemon=True)
        self._thread.start()
        for _ in range(2000):
            if self.box.switchboard.ready:
                break
            self.never.wait(0.01)
        self.client = ControlClient.connect(socket)
        self._requests = 0

    def ask(self, voice: str = "", persona: str = "") -> control.FromBox:
        self._requests += 1
        self.client.send(control.Join(self._requests, "test", "x", {}, voice, persona))
        return self.next()

    def next(self) -> control.FromBox:
        message = self.client.receive(DEADLINE_S)
        assert message is not None, "the box said nothing"
        return message

    def report(self) -> control.PersonaReport:
        self.client.send(control.Status(99))
        message = self.next()
        assert isinstance(message, control.Report)
        assert message.personas is not None
        return message.personas

    def talk(self, admitted: control.FromBox) -> None:
        """Say one frame, the last, and wait until the call is over."""
        assert isinstance(admitted, control.Admitted), admitted
        channel = Channel.attach(admitted.channel)
        assert channel.uplink.put(UplinkHeader(0, LAST, 1), np.zeros(1920, np.float32))
        gone = self.next()
        assert isinstance(gone, control.Gone), gone
        channel.close()

    def starve(self) -> PrimingDesk:
        """There is no time to feed a persona: ticks are guarded for as long as they are apart."""
        desk = self.box.loop.desk
        assert desk is not None
        desk.guard_ns = 80_000_000
        return desk

    def wait_for(self, true: Callable[[], bool]) -> None:
        for _ in range(2000):
            if true():
                return
            self.never.wait(0.01)
        raise AssertionError("it did not happen in time")

    def stop(self) -> None:
        self.client.close()
        self.box.drain()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the box did not stop"
        assert not list(Path("/dev/shm").glob(f"dbx-{os.getpid()}-*"))


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:  # tmp_path may be too long for one
        yield Path(folder) / "control.sock"


@pytest.fixture
def talking(tmp_path: Path, socket: Path) -> Iterator[Talking]:
    talking = Talking(tmp_path, socket)
    yield talking
    talking.stop()


def test_a_call_is_answered_once_the_model_knows_who_it_is(talking: Talking) -> None:
    welcome = talking.client.welcome
    assert (welcome.takes_persona, welcome.voices) == (True, ("alto",))
    talking.talk(talking.ask("alto", "Be kind"))
    (told,) = talking.executor.told.values()
    ids = np.frombuffer(told, np.int64)
    assert ids[1:4].tolist() == VOICE[1:, 0].tolist()
    found = talking.report()
    assert (found.primed, found.priming, found.snapshot_misses) == (1, 0, 1)
    assert found.spent_ns > found.longest_ns > 0
    for _ in range(500):
        if list((talking.folder / "kept").glob("*.snap")):
            break
        talking.never.wait(0.01)
    talking.talk(talking.ask("alto", "Be kind"))
    assert (talking.report().snapshot_hits, talking.report().rows) == (1, found.rows)
    talking.talk(talking.ask())
    calls = sorted(ledger.read_folder(talking.folder / "calls"), key=lambda c: c.header.session)
    heads = [(c.header.voice, c.header.persona, c.header.prompt_frames) for c in calls]
    assert heads == [("alto", "Be kind", len(ids))] * 2 + [("", "", 0)]
    assert [len(call.ticks) for call in calls] == [1, 1, 1]


@pytest.mark.parametrize(
    ("voice", "persona", "says"),
    [
        ("tenor", "", "'tenor' is not a voice of echo; it has alto"),
        ("../voices/alto", "", "is not a voice"),
        ("", "Be kind. " * 50, "shorten the persona"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence_and_costs_no_lease(
    talking: Talking, voice: str, persona: str, says: str
) -> None:
    for _ in range(6):  # more than there are slots
        found = talking.ask(voice, persona)
        assert isinstance(found, control.Refused)
        assert found.reason is Reason.FAULT
        assert says in found.detail
    talking.talk(talking.ask("alto"))


def test_a_persona_longer_than_a_message_may_be_is_no_message(talking: Talking) -> None:
    talking.client.send(control.Join(1, "test", "x", {}, "", "x" * (control.LONGEST_PERSONA + 1)))
    with pytest.raises(control.BoxGone):
        talking.next()
    talking.client.close()
    talking.client = ControlClient.connect(talking.socket)
    talking.talk(talking.ask("alto"))


def test_a_persona_that_ticks_leave_no_time_for_is_refused_for_time(
    tmp_path: Path, socket: Path
) -> None:
    talking = Talking(tmp_path, socket, within_s=1)
    desk = talking.starve()
    found = talking.ask("alto", "Be kind")
    assert isinstance(found, control.Refused)
    assert found.reason is Reason.TIME
    assert "too little time to feed the persona within 1 s" in found.detail
    desk.guard_ns = 10_000_000
    talking.talk(talking.ask("alto", "Be kind"))
    talking.stop()


def test_a_caller_who_leaves_while_its_persona_is_fed_frees_its_slot_at_once(
    tmp_path: Path, socket: Path
) -> None:
    talking = Talking(tmp_path, socket)
    desk = talking.starve()
    for request in range(1, 5):
        talking.client.send(control.Join(request, "test", "x", {}, "alto", ""))
    talking.wait_for(lambda: desk.counts.waiting == 4)
    talking.client.send(control.Withdraw(99))  # of no newcomer: nothing
    talking.client.send(control.Withdraw(2))
    assert talking.next() == control.Refused(2, Reason.FAULT, "its line took it back")
    assert desk.counts.waiting == 3
    assert talking.box.switchboard.refusals[Reason.FAULT] == 0  # nobody was refused
    talking.client.send(control.Join(7, "test", "y", {}))  # the slot is somebody else's
    admitted = talking.next()
    assert isinstance(admitted, control.Admitted)
    talking.client.send(control.Withdraw(7))  # too late: it says Leave, or its last frame
    desk.guard_ns = 10_000_000
    heard = [talking.next() for _ in range(3)]
    assert {type(message) for message in heard} == {control.Admitted}
    talking.client.send(control.Leave(admitted.session))
    assert talking.next() == control.Gone(admitted.session, "left")
    talking.stop()


def test_an_operator_ends_a_call_whose_persona_is_fed_and_nobody_was_refused(
    tmp_path: Path, socket: Path
) -> None:
    talking = Talking(tmp_path, socket)
    desk = talking.starve()
    talking.client.send(control.Join(5, "test", "x", {}, "alto", ""))
    talking.wait_for(lambda: desk.counts.waiting == 1)
    (session,) = talking.box.switchboard._calls
    talking.client.send(control.HangUp(9, session, "wrong number"))
    assert talking.next() == control.HungUp(9, session, 0)
    said = "an operator ended it: wrong number"
    assert talking.next() == control.Refused(5, Reason.OPERATOR, said)
    assert desk.counts.waiting == 0
    assert sum(talking.box.switchboard.refusals.values()) == 0
    talking.stop()
    (call,) = ledger.read_folder(talking.folder / "calls")
    assert call.end is not None
    assert call.end["why"] == ledger.Why.OPERATOR


def test_an_operator_ends_a_call_that_waits_for_the_disk(
    tmp_path: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = slow_disk(monkeypatch)
    talking = Talking(tmp_path, socket)
    talking.client.send(control.Join(50, "test", "x", {}, "alto", ""))
    talking.wait_for(lambda: bool(talking.box.switchboard._calls))
    (session,) = talking.box.switchboard._calls
    talking.client.send(control.HangUp(9, session))
    assert talking.next() == control.HungUp(9, session, 0)
    assert talking.next() == control.Refused(50, Reason.OPERATOR, "an operator ended it")
    turns.set()
    talking.talk(talking.ask("alto"))
    talking.stop()


def test_an_operator_ends_a_call_whose_persona_is_fed_again(talking: Talking) -> None:
    admitted = talking.ask("alto", "Be kind")
    assert isinstance(admitted, control.Admitted)
    channel = Channel.attach(admitted.channel)
    assert channel.uplink.put(UplinkHeader(0, 0, 1), np.zeros(1920, np.float32))
    (call,) = talking.box.switchboard._calls.values()
    talking.wait_for(lambda: call.session.state is State.LIVE)
    talking.starve()
    talking.client.send(control.Reset(8, admitted.session))
    talking.client.send(control.HangUp(9, admitted.session, "enough"))
    reset, hung_up, gone = talking.next(), talking.next(), talking.next()
    assert isinstance(reset, control.Refused)
    assert "ended before it could be reset" in reset.detail
    assert isinstance(hung_up, control.HungUp)
    assert (hung_up.request, hung_up.session) == (9, admitted.session)
    said = "an operator ended it: enough"
    assert gone == control.Gone(admitted.session, "operator", said)
    channel.close()


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that reads snapshots while what is returned is set."""
    turns, read = threading.Event(), snapshots.read

    def read_when_told(*given: Any) -> snapshots.Snapshot:
        assert turns.wait(DEADLINE_S)
        return read(*given)

    monkeypatch.setattr(snapshots, "read", read_when_told)
    return turns


def test_nothing_waits_for_a_disk_that_is_slow_to_read_a_snapshot(
    tmp_path: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = slow_disk(monkeypatch)
    talking = Talking(tmp_path, socket)
    talking.client.send(control.Join(50, "test", "x", {}, "alto", ""))
    talking.client.send(control.Join(51, "test", "y", {}, "alto", ""))
    talking.talk(talking.ask())  # another caller comes and goes meanwhile
    talking.client.send(control.Withdraw(51))
    assert talking.next() == control.Refused(51, Reason.FAULT, "its line took it back")
    turns.set()
    admitted = talking.next()
    assert isinstance(admitted, control.Admitted)
    assert admitted.request == 50
    talking.talk(admitted)
    talking.stop()


def test_a_call_with_a_persona_is_reset_to_it(talking: Talking) -> None:
    admitted = talking.ask("alto", "Be kind")
    assert isinstance(admitted, control.Admitted)
    assert admitted.prompt is not None
    channel = Channel.attach(admitted.channel)
    assert channel.uplink.put(UplinkHeader(0, 0, 1), np.zeros(1920, np.float32))
    (call,) = talking.box.switchboard._calls.values()
    talking.wait_for(lambda: call.session.state is State.LIVE)
    (told,) = talking.executor.told.values()
    talking.executor.told.clear()
    talking.client.send(control.Reset(9, admitted.session))
    said = talking.next()
    assert isinstance(said, control.WasReset)
    assert (said.request, said.session) == (9, admitted.session)
    assert said.held >= 1
    assert said.prompt is not None
    assert said.prompt.key == admitted.prompt.key
    assert sum(said.prompt.fed) == len(np.frombuffer(told, np.int64)) - 1
    assert list(talking.executor.told.values()) == [told]
    assert channel.uplink.put(UplinkHeader(1, LAST, 1), np.zeros(1920, np.float32))
    assert isinstance(talking.next(), control.Gone)
    channel.close()
    (recorded,) = ledger.read_folder(talking.folder / "calls")
    flags = recorded.ticks["flags"]
    assert ((flags & ledger.Flag.PRIMING) > 0).sum() == said.held
    assert np.flatnonzero(flags & ledger.Flag.RESET).tolist() == [said.frame_index]


def test_a_long_call_is_reset_however_long_the_disk_takes_to_look_for_its_prompt(
    tmp_path: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = slow_disk(monkeypatch)
    turns.set()
    talking = Talking(tmp_path, socket)
    admitted = talking.ask("alto", "Be kind")
    assert isinstance(admitted, control.Admitted)
    channel = Channel.attach(admitted.channel)
    assert channel.uplink.put(UplinkHeader(0, 0, 1), np.zeros(1920, np.float32))
    (call,) = talking.box.switchboard._calls.values()
    talking.wait_for(lambda: call.session.state is State.LIVE)
    assert call.seat.job is not None
    call.seat.job.until_ns = 0  # its own prompt had to be fed by then, long ago
    turns.clear()
    talking.client.send(control.Reset(9, admitted.session))
    assert talking.client.receive(0.3) is None
    turns.set()
    said = talking.next()
    assert isinstance(said, control.WasReset), said
    channel.close()
    talking.stop()


def test_a_line_that_vanishes_while_its_persona_is_fed_leaves_nothing(
    tmp_path: Path, socket: Path
) -> None:
    talking = Talking(tmp_path, socket)
    desk = talking.starve()
    for _ in range(4):
        talking.client.send(control.Join(1, "test", "x", {}, "alto", ""))
    for _ in range(500):
        if talking.box.switchboard.sessions == 4:
            break
        talking.never.wait(0.01)
    talking.client.close()
    for _ in range(500):
        if not talking.box.switchboard.sessions:
            break
        talking.never.wait(0.01)
    assert talking.box.switchboard.sessions == 0
    desk.guard_ns = 10_000_000
    talking.client = ControlClient.connect(socket)
    talking.talk(talking.ask("alto"))
    talking.stop()
