"""Which devices are opened, what is said when none fits, and a card that comes and goes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from appliance.clock import NS_PER_MS as MS
from appliance.clock import NS_PER_S
from appliance.lines import local_portaudio
from appliance.lines.local_card import NO_DEVICES, CardError, Device, choose, listing
from appliance.lines.local_portaudio import PortAudio
from appliance.lines.local_rings import Exchange
from appliance.lines.local_watch import CardWatch, Opened, in_thread
from tests.fakes import FakeClock

HEADSET = Device(0, "USB Headset: Audio", "ALSA", 1, 2, 44_100)
SCREEN = Device(1, "HDMI 0", "ALSA", 0, 8, 48_000, default_output=True)
BUILT_IN = Device(2, "Built-in Audio", "ALSA", 2, 2, 48_000, default_input=True)
DEVICES = [HEADSET, SCREEN, BUILT_IN]


def test_the_defaults_are_taken_when_nothing_is_named() -> None:
    pair = choose(DEVICES, "", "")
    assert (pair.microphone, pair.speaker) == (BUILT_IN, SCREEN)


def test_a_part_of_a_name_in_any_case_or_a_number_will_do() -> None:
    pair = choose(DEVICES, "headset", "2")
    assert (pair.microphone, pair.speaker) == (HEADSET, BUILT_IN)


def test_a_name_that_fits_two_or_none_is_answered_with_the_names() -> None:
    with pytest.raises(CardError, match=r"0: USB Headset: Audio, 2: Built-in Audio"):
        choose(DEVICES, "audio", "")
    with pytest.raises(CardError, match=r"--microphone 'hdmi' is none of: USB Headset"):
        choose(DEVICES, "hdmi", "")


def test_without_any_device_the_remedy_is_named() -> None:
    with pytest.raises(CardError, match="pulseaudio --start"):
        choose([], "", "")
    with pytest.raises(CardError, match="none of the 1 sound devices is a microphone"):
        choose([SCREEN], "", "")
    assert listing([]) == [NO_DEVICES]


def test_the_list_shows_names_and_marks_the_defaults() -> None:
    lines = listing(DEVICES)
    assert "USB Headset: Audio (ALSA)" in lines[1]
    assert " s" in lines[2]
    assert " m" in lines[3]
    assert "--microphone NAME" in lines[-1]


class Library:
    """`sounddevice`, as far as it is used."""

    class PortAudioError(Exception):
        pass

    def __init__(self, rates: tuple[int, ...], outputs: tuple[int, ...] = (1, 2)) -> None:
        self.rates, self.outputs = rates, outputs
        self.opened: list[Any] = []
        self.closed = 0
        self.initialised = 0

    def query_hostapis(self) -> list[dict[str, str]]:
        return [{"name": "ALSA"}]

    def query_devices(self, device: None = None, kind: str = "") -> Any:
        if kind == "input":
            return {"index": 0}
        if kind:
            raise self.PortAudioError("no default output")
        return [
            {
                "name": "Card",
                "hostapi": 0,
                "max_input_channels": 1,
                "max_output_channels": 2,
                "default_samplerate": 44_100.0,
            }
        ]

    def InputStream(self, **how: Any) -> Any:
        return self._stream(how, (1, 2))

    def OutputStream(self, **how: Any) -> Any:
        return self._stream(how, self.outputs)

    def _stream(self, how: dict[str, Any], channels: tuple[int, ...]) -> Any:
        if how["samplerate"] not in self.rates:
            raise self.PortAudioError("Invalid sample rate")
        if how["channels"] not in channels:
            raise self.PortAudioError("Invalid number of channels")
        self.opened.append(how)

        def close(ignore_errors: bool = True) -> None:
            self.closed += 1

        return SimpleNamespace(
            start=lambda: None, active=True, abort=lambda ignore_errors: None, close=close
        )

    def _terminate(self) -> None:
        self.initialised -= 1

    def _initialize(self) -> None:
        self.initialised += 1


def port_audio(monkeypatch: pytest.MonkeyPatch, library: Library) -> PortAudio:
    monkeypatch.setitem(__import__("sys").modules, "sounddevice", library)
    return PortAudio(FakeClock(7))


def test_portaudio_is_asked_for_48_khz_and_mono_first_then_for_what_the_card_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library(rates=(44_100,), outputs=(2,))
    sound = port_audio(monkeypatch, library)
    (device,) = sound.devices()
    assert device == Device(0, "Card", "ALSA", 1, 2, 44_100, default_input=True)
    exchange, stream = sound.open(choose([device], "", ""), 0.02)
    assert (exchange.rate_hz, exchange.block) == (44_100, 441)
    assert [how["channels"] for how in library.opened[-2:]] == [1, 2]
    assert library.opened[-1]["latency"] == 0.02
    # What had been opened on the way was closed again.
    assert library.closed == len(library.opened) - 2
    stream.close()
    assert library.closed == len(library.opened)
    sound.look_again()
    assert library.initialised == 0


def test_the_callbacks_copy_and_count_and_take_the_librarys_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Library(rates=(48_000,), outputs=(2,))
    sound = port_audio(monkeypatch, library)
    exchange, _ = sound.open(choose(sound.devices(), "", ""), 0.02)
    hear, play = (how["callback"] for how in library.opened[-2:])
    times = SimpleNamespace(inputBufferAdcTime=1.0, currentTime=1.025, outputBufferDacTime=1.06)
    hear(np.full((480, 1), 0.25, np.float32), 480, times, False)
    exchange.speaker.write(np.full(480, 0.5, np.float32))
    out = np.zeros((480, 2), np.float32)
    play(out, 480, times, True)
    assert np.all(out == 0.5)
    assert exchange.heard.waiting == 480
    assert exchange.heard_ns == exchange.played_ns == 7
    assert exchange.in_latency_ns == 25 * MS
    assert exchange.out_latency_ns == 35 * MS
    assert exchange.library_faults == 1


def test_a_card_that_cannot_be_opened_says_what_the_library_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = port_audio(monkeypatch, Library(rates=()))
    with pytest.raises(CardError, match=r"Invalid sample rate.*talk --devices"):
        sound.open(choose(sound.devices(), "", ""), 0.02)


def test_no_portaudio_is_a_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sounddevice", None)
    with pytest.raises(CardError, match="apt-get install libportaudio2"):
        PortAudio(FakeClock())
    assert "{what}" in local_portaudio.MISSING


class Stream:
    def __init__(self) -> None:
        self.active = True
        self.closed = False
        self.fails = False

    def close(self) -> None:
        self.closed = True
        if self.fails:
            raise OSError("no such device")


class Cards:
    """What opens cards: each time the next of what is planned."""

    def __init__(self, *plan: CardError | Exception | None) -> None:
        self.plan = list(plan)
        self.streams: list[Stream] = []
        self.todo: list[Callable[[], None]] = []
        self.watch = CardWatch(self._opened(), self.reopen, 0, self.todo.append)

    def _opened(self) -> Opened:
        self.streams.append(Stream())
        return Exchange(48_000, 480), self.streams[-1]

    def reopen(self) -> Opened:
        planned = self.plan.pop(0)
        if planned is not None:
            raise planned
        return self._opened()

    def work(self) -> None:
        self.todo.pop(0)()


def test_a_card_that_says_nothing_is_gone_and_looked_for_until_it_is_back() -> None:
    cards = Cards(CardError("it is not there"), None)
    watch, stream = cards.watch, cards.streams[0]
    assert watch.exchange is not None
    watch.exchange.heard_ns = watch.exchange.played_ns = 2 * NS_PER_S
    assert not watch.turn(5 * NS_PER_S)
    assert watch.turn(7 * NS_PER_S)
    assert watch.losses == 1
    assert not watch.turn(8 * NS_PER_S)  # the thread is at it
    cards.work()
    assert stream.closed
    assert not watch.turn(9 * NS_PER_S)
    assert watch.trouble == "it is not there"
    assert not watch.turn(9 * NS_PER_S + 500 * MS)
    assert not cards.todo
    assert not watch.turn(10 * NS_PER_S)
    cards.work()
    assert watch.turn(10 * NS_PER_S + 10 * MS)
    assert watch.exchange is not None
    assert watch.trouble == ""


def test_a_microphone_that_stops_alone_counts_as_gone() -> None:
    watch = Cards(None).watch
    assert watch.exchange is not None
    watch.exchange.heard_ns, watch.exchange.played_ns = NS_PER_S, 8 * NS_PER_S
    assert watch.turn(8 * NS_PER_S)


def test_a_stream_that_ended_and_cannot_be_closed_is_replaced_all_the_same() -> None:
    cards = Cards(OSError("odd"), None)
    cards.streams[0].active = False
    cards.streams[0].fails = True
    assert cards.watch.turn(1)
    cards.work()
    cards.watch.turn(2)
    assert "odd" in cards.watch.trouble
    cards.watch.turn(2 * NS_PER_S)
    cards.work()
    assert cards.watch.turn(2 * NS_PER_S + 1)


def test_a_library_that_hangs_is_told_of() -> None:
    cards = Cards(None)
    cards.streams[0].active = False
    cards.watch.turn(1)
    cards.watch.turn(11 * NS_PER_S)
    assert "start again" in cards.watch.trouble
    cards.watch.close()  # holds nothing, hence hangs on nothing


def test_the_work_is_done_beside_us() -> None:
    import threading

    done = threading.Event()
    in_thread(done.set)
    assert done.wait(5)
