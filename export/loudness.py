"""How loud a recording is, by ITU-R BS.1770-4: what "-24 LUFS" means. Mono, any sample rate.

A head-shaped shelf and a high-pass weigh the signal, its power is averaged over blocks of 400 ms
every 100 ms, and blocks that are silent or far below the rest do not count. The filters are those
of the standard, given there as coefficients for 48 kHz and here by the analogue parameters behind
them, so that they hold at 24 kHz too. Applied in the frequency domain: a recording is short.
"""

import math

import numpy as np
from numpy.typing import NDArray

BLOCK_S, STEP_S = 0.4, 0.1  # BS.1770-4: 400 ms, overlapping by 75 %
OFFSET_DB = -0.691  # BS.1770-4: a full-scale 997 Hz sine is then -3.01
SILENT_LUFS, BELOW_LU = -70.0, -10.0  # BS.1770-4: the absolute and the relative gate
SHELF_HZ, SHELF_DB, SHELF_Q = 1681.974450955533, 3.999843853973347, 0.7071752369554196
HIGH_PASS_HZ, HIGH_PASS_Q = 38.13547087602444, 0.5003270373238773
# The bilinear transform at 48 kHz of these five gives the standard's tables 1 and 2.


class TooQuiet(ValueError):
    """Nothing in the recording is loud enough to be measured; whoever recorded it must speak up."""


def loudness_lufs(pcm: NDArray[np.float64], rate_hz: int) -> float:
    """Integrated loudness of mono ``pcm`` (S,). Raises `TooQuiet`, also if under 400 ms long."""
    block, step = round(BLOCK_S * rate_hz), round(STEP_S * rate_hz)
    if len(pcm) < block:
        raise TooQuiet(f"{len(pcm) / rate_hz:.2f} s of sound; {BLOCK_S} s is the least")
    total = np.concatenate([[0.0], np.cumsum(weighted(pcm, rate_hz) ** 2)])
    first = np.arange(0, len(pcm) - block + 1, step)
    power = (total[first + block] - total[first]) / block
    with np.errstate(divide="ignore"):
        loud = power[OFFSET_DB + 10 * np.log10(power) > SILENT_LUFS]
        if not len(loud):
            raise TooQuiet(f"no {BLOCK_S} s of it reach {SILENT_LUFS:.0f} LUFS")
        gate = _lufs(loud) + BELOW_LU
        return _lufs(loud[OFFSET_DB + 10 * np.log10(loud) > gate])


def weighted(pcm: NDArray[np.float64], rate_hz: int) -> NDArray[np.float64]:
    """``pcm`` (S,) through the standard's two filters."""
    length = 2 ** math.ceil(math.log2(len(pcm) + rate_hz))  # a second of silence for the tail
    z = np.exp(-2j * np.pi * np.fft.rfftfreq(length))
    response = _shelf(z, rate_hz) * _high_pass(z, rate_hz)
    return np.asarray(np.fft.irfft(np.fft.rfft(pcm, length) * response, length)[: len(pcm)])


def _lufs(power: NDArray[np.float64]) -> float:
    return OFFSET_DB + 10 * math.log10(float(power.mean()))


def _shelf(z: NDArray[np.complex128], rate_hz: int) -> NDArray[np.complex128]:
    k = math.tan(math.pi * SHELF_HZ / rate_hz)
    high = 10 ** (SHELF_DB / 20)
    band = high**0.4996667741545416  # ibid.: almost, and not quite, the square root
    above = (
        high + band * k / SHELF_Q + k * k,
        2 * (k * k - high),
        high - band * k / SHELF_Q + k * k,
    )
    below = (1 + k / SHELF_Q + k * k, 2 * (k * k - 1), 1 - k / SHELF_Q + k * k)
    return _ratio(above, below, z)


def _high_pass(z: NDArray[np.complex128], rate_hz: int) -> NDArray[np.complex128]:
    k = math.tan(math.pi * HIGH_PASS_HZ / rate_hz)
    scale = 1 + k / HIGH_PASS_Q + k * k
    below = (1.0, 2 * (k * k - 1) / scale, (1 - k / HIGH_PASS_Q + k * k) / scale)
    return _ratio((1.0, -2.0, 1.0), below, z)


def _ratio(
    above: tuple[float, float, float],
    below: tuple[float, float, float],
    z: NDArray[np.complex128],
) -> NDArray[np.complex128]:
    return np.polyval(above[::-1], z) / np.polyval(below[::-1], z)
