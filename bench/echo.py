"""How much of the loudspeaker is left in the microphone, and what double talk costs.

    python -m bench.echo [--far WAV] [--near WAV]

Speech through a room: 10 dB down, 40 to 200 ms late, with reflections within 60 ms, at 48 kHz, for
30 s; the canceller is told 40 ms throughout. ERLE is what the microphone hears over what is left,
from the fourth second on, and of the worst of those seconds in which the far side speaks. In double
talk both speak; the near voice is compared with what the canceller makes of it when it is alone.
Each row is of the worst of five rooms. Needs the `lines` extra.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.lines.echo import EchoCanceller
from appliance.lines.resample import Quality, Resampler
from appliance.lines.wav import WavReader
from tests.appliance.lines.test_echo import DEMO, RATE_HZ, cleaned, db, through_room, voice_band

SECONDS, ROOMS = 30, 5
DELAYS_MS = (40, 80, 120, 160, 200)
Audio = NDArray[np.float32]


def read(path: Path) -> Audio:
    reader = WavReader(path)
    resampler = Resampler(reader.rate_hz, RATE_HZ, Quality.EXACT)
    pcm = np.concatenate([resampler.push(reader.read(reader.samples)), resampler.flush()])
    whole = np.resize(pcm, SECONDS * RATE_HZ)
    return np.asarray(whole / np.abs(whole).max() / 2, np.float32)


def erle(far: Audio, delay_ms: float, seed: int) -> tuple[float, float, float]:
    """Overall from 3 s on, of the worst second of speech, and of the second before 3 s; dB."""
    heard = through_room(far, delay_ms, seed)
    left = cleaned(EchoCanceller(RATE_HZ), heard, far, 40)
    rows = heard[: left.size].reshape(-1, RATE_HZ), left.reshape(-1, RATE_HZ)
    each = [db(a) - db(b) for a, b in zip(*rows, strict=True)]
    loud = [n for n in range(3, len(each)) if db(rows[0][n]) > db(heard) - 10]
    after = 3 * RATE_HZ
    return db(heard[after:]) - db(left[after:]), min(each[n] for n in loud), each[2]


def double_talk(far: Audio, near: Audio, delay_ms: float, seed: int) -> tuple[float, float]:
    """Level of the near voice (dB of what was said) and correlation with it alone."""
    near = near.copy()
    near[: 6 * RATE_HZ] = 0.0
    mixed = through_room(far, delay_ms, seed) + near
    both = voice_band(cleaned(EchoCanceller(RATE_HZ), mixed, far, 40))[6 * RATE_HZ :]
    alone = voice_band(cleaned(EchoCanceller(RATE_HZ), near, np.zeros_like(far), 40))
    said = voice_band(near)[6 * RATE_HZ :]
    return db(both) - db(said), float(np.corrcoef(both, alone[6 * RATE_HZ :])[0, 1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.echo", description=__doc__)
    parser.add_argument("--far", type=Path, default=DEMO / "caller_delivery.wav")
    parser.add_argument("--near", type=Path, default=DEMO / "caller_router.wav")
    args = parser.parse_args()
    far, near = read(args.far), read(args.near)
    sys.stdout.write(f"far {args.far.name}, near {args.near.name}; worst of {ROOMS} rooms\n")
    sys.stdout.write(
        "delay   ERLE dB  worst second  third second   double talk: level, correlation\n"
    )
    for delay_ms in DELAYS_MS:
        alone = np.array([erle(far, delay_ms, seed) for seed in range(ROOMS)]).min(axis=0)
        both = np.array([double_talk(far, near, delay_ms, seed) for seed in range(ROOMS)])
        level_db, correlation = both.min(axis=0)
        sys.stdout.write(
            f"{delay_ms:3d} ms   {alone[0]:7.1f}  {alone[1]:12.1f}  {alone[2]:12.1f}   "
            f"{level_db:+18.1f}  {correlation:11.3f}\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
