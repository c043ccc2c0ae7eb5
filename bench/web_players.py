"""Callers of the websocket line who say clicks and play what comes, each as a real client does.

    page-opus, page-pcm   our page: 20 or 10 ms at once, and its playout buffer (worklet.js)
    moshi-web             the published page: 40 ms pages, its buffer of 80 + 10 ms
    moshi-client          moshi.client: 80 ms blocks; plays what came, at its next block

Decides what is sent when, when every sample that comes is heard, and how long after it was said a
click is. What a call says is encoded before it begins, so that no two clients wait for each other's
codec. Does not know sockets; all times are arguments, so a clock may jump.
"""

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import soundfile
import sphn
from numpy.typing import NDArray

from appliance.lines.ogg import page_end, whole_packets
from appliance.lines.web_voice import OPUS, PCM, VOICES, OggVoice, PcmVoice
from appliance.lines.wire import Kind as Message
from bench.echo_box import PERIOD_MS, RATE_HZ, SAMPLES

CLICK_GAPS_S = (0.61, 0.73, 0.87)
LONGEST_MS = 600.0

CLICK = (
    np.sin(2 * np.pi * np.linspace(800, 3000, 120).cumsum() / RATE_HZ) * np.hanning(120) * 0.7
).astype(np.float32)
"""5 ms of a rising tone: what a codec made for voices keeps the place of."""


class Player:
    """When each sample that came is heard, in ms of the clock. Decides as a client does."""

    def __init__(self) -> None:
        self.heard_ms: list[NDArray[np.float64]] = []
        self.waits_ms: list[float] = []
        """From the arrival of a message until the first of its samples is heard."""
        self.dry = 0
        self.drops = 0
        """How often samples were thrown away because too many waited."""

    def plays_from(self, samples: int, now_ms: float) -> float:
        """When the first of ``samples``, which came now, is heard."""
        raise NotImplementedError

    def arrive(self, samples: int, now_ms: float, is_first: bool) -> None:
        """is_first: of its message."""
        from_ms = self.plays_from(samples, now_ms)
        if is_first:
            self.waits_ms.append(from_ms - now_ms)
        self.heard_ms.append(from_ms + np.arange(samples) * 1000 / RATE_HZ)


class OurPage(Player):
    """worklet.js: begins with `spare` ms in hand, and steers what is left to it."""

    def __init__(self) -> None:
        super().__init__()
        self._spare_ms = 20.0
        self._until_ms = 0.0
        """When all that came will have been played."""
        self._lefts: list[float] = []
        self._pull = self._came_ms = 0.0

    def plays_from(self, samples: int, now_ms: float) -> float:
        gone_ms = self._pull * (now_ms - self._came_ms)
        self._came_ms = now_ms
        self._until_ms -= gone_ms if self._until_ms else 0.0
        left_ms = self._until_ms - now_ms
        if self._until_ms and left_ms < 0:
            self.dry += 1
            self._spare_ms = min(120.0, self._spare_ms + 10)
            self._until_ms = self._pull = 0.0
            self._lefts.clear()
        if not self._until_ms:
            self._until_ms = now_ms + self._spare_ms
        else:
            self._lefts = [*(left - gone_ms for left in self._lefts[-63:]), left_ms]
            error_ms = min(self._lefts) - self._spare_ms
            self._pull = float(np.clip(error_ms * 0.0004, -0.006, 0.006))
        from_ms = self._until_ms
        self._until_ms += samples * 1000 / RATE_HZ
        return from_ms


class MoshiWeb(Player):
    """audio-processor.ts of the published page: 80 ms and 10 more, then drops beyond 100."""

    def __init__(self) -> None:
        super().__init__()
        self._until_ms = 0.0
        self._held_ms = 0.0
        self._partial_ms, self._slack_ms = 10.0, 10.0

    def plays_from(self, samples: int, now_ms: float) -> float:
        if self._until_ms and self._until_ms < now_ms:
            self.dry += 1
            self._partial_ms = min(80.0, self._partial_ms + 5)
            self._until_ms = 0.0
        if not self._until_ms:
            # It begins 10 ms after 80 are there: the two pages of a message come together.
            self._until_ms = now_ms + self._partial_ms
        from_ms = self._until_ms
        self._until_ms += samples * 1000 / RATE_HZ
        most_ms = 80 + self._partial_ms + self._slack_ms
        if self._until_ms - now_ms >= most_ms:
            drop_ms = self._until_ms - now_ms - 80 - self._partial_ms
            self._slack_ms = min(80.0, self._slack_ms + 5)
            self.drops += 1
            from_ms -= drop_ms
            self._until_ms -= drop_ms
        return from_ms


class MoshiClient(Player):
    """client.py: a queue of 80 ms blocks, one taken at each callback of the sound card."""

    def __init__(self) -> None:
        super().__init__()
        self._next_ms = 0.0

    def plays_from(self, samples: int, now_ms: float) -> float:
        if not self._next_ms:
            self._next_ms = now_ms + 40.0  # the card's callbacks lie anywhere; on average half way
        while self._next_ms < now_ms:
            self._next_ms += PERIOD_MS
            self.dry += 1
        from_ms = self._next_ms
        self._next_ms += samples * 1000 / RATE_HZ
        return from_ms


@dataclass(frozen=True)
class Kind:
    """One client."""

    block: int
    """Samples sent at once."""
    subprotocol: str
    player: Callable[[], Player]
    early: bool = False
    """Speaks before the handshake."""

    @property
    def block_ms(self) -> float:
        return self.block * 1000 / RATE_HZ


KINDS = {
    "page-opus": Kind(480, OPUS, OurPage),
    "page-pcm": Kind(240, PCM, OurPage),
    "moshi-web": Kind(960, "", MoshiWeb),
    "moshi-client": Kind(1920, "", MoshiClient, early=True),
}


@dataclass
class Found:
    """Of all calls of one kind."""

    delays_ms: list[float] = field(default_factory=list)
    lost: int = 0
    waits_ms: list[float] = field(default_factory=list)
    dry: int = 0
    drops: int = 0


class Caller:
    """One call."""

    def __init__(
        self,
        kind: Kind,
        seconds: float,
        seed: int,
        said: NDArray[np.float32] | None = None,
        clock_ppm: float = 0.0,
    ) -> None:
        """said: something else than clicks. clock_ppm: by how much its sound card is too fast."""
        pcm, self._clicks = speech(seconds, np.random.default_rng(seed))
        pcm = pcm if said is None else said
        self._tempo = 1 + clock_ppm / 1e6
        self.kind = kind
        self.payloads = _written(kind, pcm)
        """Of the blocks, in their order."""
        self.player = kind.player()
        self._back: OggVoice | PcmVoice = VOICES[kind.subprotocol](RATE_HZ)
        self._heard: list[NDArray[np.float32]] = []

    def due_ms(self, index: int) -> float:
        """When block ``index`` has been collected, in ms after the first of its samples is said."""
        return (index + 1) * self.kind.block_ms / self._tempo

    def hear(self, message: bytes, now_ms: float) -> None:
        """A message came."""
        if message[0] != Message.AUDIO:
            return
        parts = [self._back.decode(part) for part in self._back.unpack(message[1:])]
        for number, got in enumerate(parts):
            self._heard.append(got)
            self.player.arrive(got.size, now_ms, number == 0)

    def settle(self, start_ms: float, found: Found) -> None:
        """Look for every click in what was played. start_ms: when the first sample was said."""
        found.waits_ms += self.player.waits_ms[25:]
        found.dry += self.player.dry
        found.drops += self.player.drops
        heard, heard_ms = np.concatenate(self._heard), np.concatenate(self.player.heard_ms)
        matched = np.abs(np.correlate(heard, CLICK, "valid"))
        for click in self._clicks:
            later_ms = heard_ms[: matched.size] - start_ms - click * 1000 / RATE_HZ
            near = np.flatnonzero((later_ms > 0) & (later_ms < LONGEST_MS))
            if not near.size or matched[near].max() < 0.3 * float((CLICK**2).sum()):
                found.lost += 1
                continue
            found.delays_ms.append(float(later_ms[near[int(matched[near].argmax())]]) - PERIOD_MS)


def speech(seconds: float, rng: np.random.Generator) -> tuple[NDArray[np.float32], list[int]]:
    """Faint noise with clicks in it, and where they are."""
    pcm = (rng.standard_normal(int(seconds * RATE_HZ)) * 1e-4).astype(np.float32)
    at, clicks = 2.0, []
    while at < seconds - 1:
        clicks.append(int(at * RATE_HZ) + int(rng.integers(0, SAMPLES)))
        pcm[clicks[-1] : clicks[-1] + CLICK.size] += CLICK
        at += float(rng.choice(CLICK_GAPS_S))
    return pcm, clicks


def _written(kind: Kind, pcm: NDArray[np.float32]) -> list[bytes]:
    """As the client would send it: a message's payload for each block."""
    blocks = [pcm[at : at + kind.block] for at in range(0, pcm.size - kind.block + 1, kind.block)]
    if kind.subprotocol == PCM:
        return [PcmVoice().encode(block) for block in blocks]
    if kind.subprotocol != OPUS:
        writer = sphn.OpusStreamWriter(RATE_HZ)  # as moshi.client; its pages are of 40 ms
        return [writer.append_pcm(block) for block in blocks]
    # Packets of 20 ms; a file has many in a page, and our page sends each in one of its own.
    file = io.BytesIO()
    soundfile.write(file, pcm, RATE_HZ, format="OGG", subtype="OPUS")
    stream, packets = file.getvalue(), []
    while (end := page_end(stream, 0)) is not None and stream:
        packets += whole_packets(stream[:end]) or []
        stream = stream[end:]
    ogg = _OggWriter()
    pages = [ogg.page(packet) for packet in packets]
    return [b"".join(pages[:3]), *pages[3 : len(blocks) + 2]]


class _OggWriter:
    """A page for each packet, as ogg.js writes them."""

    def __init__(self) -> None:
        self._sequence = 0
        self._granule = 0

    def page(self, packet: bytes) -> bytes:
        self._granule += 960 * (self._sequence > 1)
        flags = 0 if self._sequence else 2
        lacing = bytes([255] * (len(packet) // 255) + [len(packet) % 255])
        fields = (b"OggS", 0, flags, self._granule, 7, self._sequence, 0, len(lacing))
        page = bytearray(struct.pack("<4sBBqIIIB", *fields) + lacing + packet)
        crc = 0
        for byte in page:
            crc ^= byte << 24
            for _ in range(8):
                crc = ((crc << 1) ^ (0x04C11DB7 if crc & 1 << 31 else 0)) & 0xFFFFFFFF
        struct.pack_into("<I", page, 22, crc)
        self._sequence += 1
        return bytes(page)
