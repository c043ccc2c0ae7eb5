"""Which microphone and which loudspeaker: what there is, what was asked for, what is opened.

Decides by name, and says what to do when nothing fits. `Sound` is the seam to the sound library:
everything a local line needs of it, and narrow enough that a test can be one. Does not know
PortAudio (`local_portaudio`), calls, or what becomes of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.lines.local_rings import Exchange

RATE_HZ = 48_000
"""Asked for first: every card has it, and a whole multiple of the model's 24 kHz is cheapest."""

BLOCKS_PER_S = 100
"""Callbacks of 10 ms: what echo cancellation works on. A frame of 80 ms at once would put four
times as much into the device's own buffers."""


class CardError(RuntimeError):
    """No sound, or not the sound that was asked for; the operator's to fix."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device as the sound library lists it."""

    index: int
    name: str
    api: str
    """What the library reaches it through, such as ALSA."""
    inputs: int
    """Channels; 0: it is no microphone."""
    outputs: int
    rate_hz: int
    """Its own rate, as far as it has one."""
    default_input: bool = False
    default_output: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """What a card is made of; usually two sides of one device."""

    microphone: Device
    speaker: Device


class Stream(Protocol):
    """Both directions, open: `Exchange.hear` and `play` are called for every block."""

    @property
    def active(self) -> bool:
        """False once the library has given up on it. True says little: see `local_watch`."""

    def close(self) -> None:
        """Stop and let go. May hang with a device that has gone; call it off the clock."""


class Sound(Protocol):
    """The sound library, as far as it is needed. One thread at a time uses it."""

    def devices(self) -> list[Device]:
        """All there are. Raises `CardError` when the library itself is missing."""

    def open(self, pair: Pair, latency_s: float) -> tuple[Exchange, Stream]:
        """Begin. latency_s: how much the device may hold. Raises `CardError`."""

    def look_again(self) -> None:
        """Forget the devices that were there, so that `devices` tells of new ones."""


def choose(devices: Sequence[Device], microphone: str, speaker: str) -> Pair:
    """The devices that the two texts name; empty: the default. Raises `CardError`."""
    return Pair(
        _choose(devices, microphone, "microphone"),
        _choose(devices, speaker, "speaker"),
    )


def listing(devices: Sequence[Device]) -> list[str]:
    """What `talk --devices` prints: a line for each device, and how to choose one."""
    if not devices:
        return [NO_DEVICES]
    lines = ["      in out    rate  name"]
    for device in devices:
        marks = ("m" if device.default_input else " ") + ("s" if device.default_output else " ")
        lines.append(
            f"{device.index:3d} {marks}{device.inputs:3d} {device.outputs:3d} "
            f"{device.rate_hz:7d}  {device.name} ({device.api})"
        )
    lines.append("m, s: the default microphone, loudspeaker. Choose by a part of the name:")
    lines.append("  duplexbox appliance talk --microphone NAME --speaker NAME")
    return lines


NO_DEVICES = (
    "there is no sound device. Plug one in, or start the sound server of this login "
    "(systemctl --user start pipewire-pulse, or pulseaudio --start), and see that this user is in "
    "the group audio; in a container, hand in /dev/snd. Then: duplexbox appliance talk --devices"
)


def _choose(devices: Sequence[Device], wanted: str, role: str) -> Device:
    able = [d for d in devices if (d.inputs if role == "microphone" else d.outputs)]
    if not able:
        if not devices:
            raise CardError(NO_DEVICES)
        raise CardError(
            f"none of the {len(devices)} sound devices is a {role}. Plug one in; what there is: "
            "duplexbox appliance talk --devices"
        )
    if not wanted:
        for device in able:
            if device.default_input if role == "microphone" else device.default_output:
                return device
        return able[0]
    exact = [d for d in able if wanted in (d.name, str(d.index))]
    found = exact or [d for d in able if wanted.casefold() in d.name.casefold()]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{d.index}: {d.name}" for d in found)
        raise CardError(f"--{role} {wanted!r} could be {names}. Give more of the name, or a number")
    names = ", ".join(d.name for d in able)
    raise CardError(f"--{role} {wanted!r} is none of: {names}")
