"""Turn places in the bank into sound, on whatever device holds the bank.

Chunks are read at their rate with linear interpolation and added where they belong. The caller's
channel then goes through what lies between: the desk's echo, noise, the colour of a microphone and
a room, and for some the telephone, which is 300 to 3,400 Hz at 8 kHz and eight bits of mu-law.

Not here: what is placed (`script`, and `windows` for the codec, drawn here by torch).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from export.pocket.script import (
    CALLER,
    COLOUR_DB,
    DESK,
    FADE_SAMPLES,
    FRAME,
    RATE_HZ,
    RATES,
    Call,
    Stage,
    word_times,
)

LABEL_HZ = 100
TELEPHONE_STEP = 3
"""From 24 kHz to 8 kHz."""
MU = 255.0
LOWEST_HZ = 100.0
"""Below it, a microphone's colour is what it is there."""


@dataclass(frozen=True, slots=True)
class Places:
    """Events as tensors, one value each; `row` is the channel of the output they are added to."""

    row: Tensor
    start: Tensor
    samples: Tensor
    at: Tensor
    gain: Tensor
    rate: Tensor


class Mixer:
    """The bank's sound on a device, and what is made of it."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self.device = device
        self.sound = torch.from_numpy(stage.bank.sound).to(device)
        chunks = stage.bank.index.chunks
        labels = np.zeros(len(stage.bank.sound) * LABEL_HZ // RATE_HZ + 2, np.int64)
        for chunk in chunks:
            for word, begins, until in word_times(chunk, chunk.start / RATE_HZ, 1.0):
                first, last = round(begins * LABEL_HZ), round(until * LABEL_HZ)
                for step in range(first, last):
                    labels[step] = stage.labels.at(word, (step + 0.5 - first) / (last - first))
        self.labels = torch.from_numpy(labels).to(device)
        desk = [c for c in chunks if c.voice == stage.bank.index.desk]
        others = [c for c in chunks if c.voice != stage.bank.index.desk]
        self.tables = [
            torch.tensor([[c.start, c.samples] for c in some], device=device)
            for some in (desk, others)
        ]

    def add(self, out: Tensor, places: Places) -> None:
        """Add events to out (rows, samples)."""
        length = (places.samples / places.rate).long().clamp(min=0)
        length = torch.minimum(length, (out.shape[1] - places.at).clamp(min=0))
        event = torch.repeat_interleave(torch.arange(len(length), device=self.device), length)
        first = length.cumsum(0) - length
        offset = torch.arange(len(event), device=self.device) - first[event]
        position = offset.double() * places.rate.double()[event]
        whole = position.long()
        share = (position - whole).float()
        source = (places.start[event] + whole).clamp(max=len(self.sound) - 2)
        value = torch.lerp(self.sound[source].float(), self.sound[source + 1].float(), share)
        fade = ((length[event] - offset).float() / FADE_SAMPLES).clamp(max=1.0)
        value = value * (places.gain[event] / 32_768) * fade
        target = places.row[event] * out.shape[1] + places.at[event] + offset
        out.view(-1).index_add_(0, target, value)

    def calls(self, calls: Sequence[Call], generator: torch.Generator | None = None) -> Tensor:
        """(B, 2, samples) float32: the desk's channel and the caller's."""
        out = torch.zeros(2 * len(calls), calls[0].frames * FRAME, device=self.device)
        rows = [
            (2 * n + e.channel, e.start, e.samples, e.at, e.gain, e.rate)
            for n, call in enumerate(calls)
            for e in call.events
        ]
        if rows:
            columns = list(zip(*rows, strict=True))
            whole = [torch.tensor(column, device=self.device) for column in columns[:4]]
            real = [torch.tensor(c, device=self.device, dtype=torch.float32) for c in columns[4:]]
            self.add(out, Places(*whole, *real))
        sound = out.view(len(calls), 2, -1)
        lines = [call.line for call in calls]
        echo = torch.tensor([line.echo for line in lines], device=self.device)
        after = torch.tensor([line.echo_after for line in lines], device=self.device)
        noise = torch.tensor([line.noise for line in lines], device=self.device)
        telephone = torch.tensor([line.telephone for line in lines], device=self.device)
        at = torch.arange(sound.shape[-1], device=self.device)[None] - after[:, None]
        heard = sound[:, DESK].gather(1, at.clamp(min=0)) * (at >= 0) * echo[:, None]
        caller = sound[:, CALLER] + heard
        colours = [line.colour for line in lines]
        colour = torch.tensor(colours, device=self.device) if any(map(any, colours)) else None
        sound[:, CALLER] = self.line(caller, noise, telephone, colour, generator)
        return sound

    def line(
        self,
        sound: Tensor,
        noise: Tensor,
        telephone: Tensor,
        colour: Tensor | None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(B, samples) as it arrives.

        noise: its root mean square (B,). telephone: through one or not (B,). colour: (B, 3) dB
        or nothing.
        """
        hiss = torch.randn(sound.shape, device=self.device, generator=generator)
        noisy = sound + hiss * noise[:, None]
        if colour is not None:
            noisy = coloured(noisy, colour)
        through = telephone_line(noisy)
        return torch.where(telephone[:, None], through, noisy).clamp(-1, 1)

    def windows(self, batch: int, frames: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Speech of everybody for the codec: (B, samples) and labels (B, frames).

        A third is the desk, clean; the others are callers through lines of every kind.
        """
        device, samples = self.device, frames * FRAME

        def draw(*shape: int) -> Tensor:
            return torch.rand(shape, device=device, generator=generator)

        out = torch.zeros(batch, samples, device=device)
        labels = torch.zeros(batch, frames, dtype=torch.int64, device=device)
        is_desk = draw(batch) < 0.35
        rate = torch.where(is_desk, 1.0, RATES[0] + (RATES[1] - RATES[0]) * draw(batch))
        gain = torch.where(is_desk, 1.0, 10 ** ((-12 + 18 * draw(batch)) / 20))
        at = (draw(batch) * 0.5 * RATE_HZ - 0.4 * RATE_HZ).long()
        centres = torch.arange(frames, device=device) * FRAME + FRAME // 2
        for _ in range(4):
            desk, others = self.tables
            mine = desk[(draw(batch) * len(desk)).long()]
            theirs = others[(draw(batch) * len(others)).long()]
            start, length = torch.where(is_desk[:, None], mine, theirs).unbind(1)
            # A window may begin in the middle of a chunk.
            skip = ((-at).clamp(min=0) * rate).long()
            skip = torch.minimum(skip, length)
            row = torch.arange(batch, device=device)
            places = Places(row, start + skip, length - skip, at.clamp(min=0), gain, rate)
            self.add(out, places)
            inside = (centres[None] - at[:, None]).double() * rate[:, None]
            step = ((start[:, None] + inside) * LABEL_HZ / RATE_HZ).long()
            known = self.labels[step.clamp(0, len(self.labels) - 1)]
            is_in = (inside >= 0) & (inside < length[:, None])
            labels = torch.where(is_in, known, labels)
            at = at + (length / rate).long() + (draw(batch) ** 3 * RATE_HZ).long() + 480
        noise = torch.where(is_desk, 0.0, 10 ** ((-78 + 36 * draw(batch)) / 20))
        telephone = (draw(batch) < 0.4) & ~is_desk
        waves = COLOUR_DB * torch.randn(batch, 3, device=device, generator=generator)
        colour = torch.where(is_desk[:, None], 0.0, waves)
        return self.line(out, noise, telephone, colour, generator), labels


def coloured(sound: Tensor, colour: Tensor) -> Tensor:
    """(B, samples) with one, two and three half waves of so many dB (B, 3) over its octaves."""
    samples = sound.shape[-1]
    hz = torch.fft.rfftfreq(samples, 1 / RATE_HZ, device=sound.device)
    octave = (hz / LOWEST_HZ).clamp(min=1).log2() / math.log2(RATE_HZ / 2 / LOWEST_HZ)
    waves = torch.cos(math.pi * octave * torch.arange(1, 4, device=sound.device)[:, None])
    spectrum = torch.fft.rfft(sound) * 10 ** (colour @ waves / 20)
    found: Tensor = torch.fft.irfft(spectrum, samples)
    return found


def telephone_line(sound: Tensor) -> Tensor:
    """(B, samples) at 24 kHz as a telephone passes it on; samples a multiple of 6."""
    samples = sound.shape[-1]
    spectrum = torch.fft.rfft(sound)
    hz = torch.fft.rfftfreq(samples, 1 / RATE_HZ, device=sound.device)
    low = ((hz - 150) / 150).clamp(0, 1)
    high = ((3_700 - hz) / 300).clamp(0, 1)
    narrow = torch.fft.irfft(spectrum * low * high, samples)[..., ::TELEPHONE_STEP]
    squeezed = torch.log1p(MU * narrow.clamp(-1, 1).abs()) / torch.log1p(torch.tensor(MU))
    levels = (squeezed * 127).round() / 127
    coded = narrow.sign() * torch.expm1(levels * torch.log1p(torch.tensor(MU))) / MU
    wide = torch.fft.rfft(coded)
    passed: Tensor = torch.fft.irfft(wide, samples) * TELEPHONE_STEP
    return passed
