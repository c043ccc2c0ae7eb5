"""Many synthetic callers in one process: `duplexbox appliance callers`.

Decides who calls when, and with which troubles, from a seed; carries messages between them and
the box. What a caller does is `synthetic`'s business, what came of it is the ledger's.
"""

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np
from numpy.typing import NDArray

from appliance import control
from appliance.clock import NS_PER_MS, NS_PER_S, Clock, MonotonicClock
from appliance.lines.boxes import Boxes, tell
from appliance.lines.resample import Quality, Resampler
from appliance.lines.synthetic import Network, SyntheticCall, SyntheticPlan, SyntheticReport
from appliance.lines.wav import WavError, WavReader

LONGEST_SLEEP_S = 0.1
CHUNK_SAMPLES = 65_536


class CallersError(ValueError):
    """The command line asks for something that cannot be; the operator's to fix."""


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the callers are like; part of every certificate."""

    callers: int
    talk_s: float
    """How long each talks."""
    stagger_s: float
    """Between one caller's start and the next one's: their ages differ by as much."""
    jitter_ms: float = 15.0
    """Frames are late by 0 to this; less than the lead of 20 ms, most keep their tick."""
    loss: float = 0.002
    """Share of frames that never arrive."""
    skew_ppm: float = 200.0
    """Callers' clocks are spread evenly over plus and minus this."""
    extra: int = 0
    """Callers who ask to come in once all others are talking; they should be refused."""
    seed: int = 0


def plan_callers(conditions: Conditions, now_ns: int, speech_frames: int) -> list[SyntheticPlan]:
    """What each caller does. Pure: the same conditions give the same callers."""
    rng = np.random.default_rng(conditions.seed)
    count = conditions.callers
    plans = []
    end_s = conditions.stagger_s * (count - 1) + conditions.talk_s
    for index in range(count + conditions.extra):
        # Regular callers end together, so that all of them are live to the end; the extra ones
        # ask in the middle of the time when all are live.
        start_s, talk_s = conditions.stagger_s * index, end_s - conditions.stagger_s * index
        if index >= count:
            start_s, talk_s = end_s - conditions.talk_s / 2, 1.0
        # Evenly from -skew to +skew, so that the extremes are always there.
        spread = 2 * index / (count - 1) - 1 if 0 < index < count - 1 else (-1, 1)[index > 0]
        plans.append(
            SyntheticPlan(
                number=index + 1,
                start_ns=now_ns + round(start_s * NS_PER_S),
                talk_ns=round(talk_s * NS_PER_S),
                network=Network(
                    round(conditions.jitter_ms * NS_PER_MS),
                    conditions.loss,
                    spread * conditions.skew_ppm,
                ),
                offset_frames=int(rng.integers(speech_frames)),
                phase=float(rng.random()),
                seed=int(rng.integers(2**31)),
            )
        )
    return plans


def read_speech(wavs: Sequence[Path], rate_hz: int, samples_per_frame: int) -> NDArray[np.float32]:
    """All ``wavs`` one after the other at the model's rate, as (frames, S). Raises `WavError`."""
    parts: list[NDArray[np.float32]] = []
    for path in wavs:
        reader = WavReader(path)
        resampler = Resampler(reader.rate_hz, rate_hz, Quality.EXACT)
        while (chunk := reader.read(CHUNK_SAMPLES)).size:
            parts.append(resampler.push(chunk))
        parts.append(resampler.flush())
        reader.close()
    whole = np.concatenate(parts)
    frames = -(-len(whole) // samples_per_frame)
    speech = np.zeros((frames, samples_per_frame), np.float32)
    speech.reshape(-1)[: len(whole)] = whole
    return speech


class CallersLine:
    """A line process's whole work: its callers, and the box at the other end."""

    def __init__(self, calls: Sequence[SyntheticCall], boxes: Boxes, clock: Clock) -> None:
        self.calls = calls
        self._boxes = boxes
        self._clock = clock
        self._interrupted = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: hang up politely; a second time leave at once."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def run(self) -> list[SyntheticReport]:
        """Until the last caller is gone, or the box is."""
        try:
            while not all(call.is_over for call in self.calls):
                self._turn()
        except (control.BoxGone, control.ControlError) as err:
            for call in self.calls:
                call.end(self._clock.now_ns(), str(err))
        return [call.report() for call in self.calls]

    def _turn(self) -> None:
        for call in self.calls:
            if self._interrupted:
                call.hang_up()
            for message in call.advance(self._clock.now_ns()):
                self._boxes.send(call.plan.number, message)
        now_ns = self._clock.now_ns()
        waits = [call.wake_ns(now_ns) - now_ns for call in self.calls if not call.is_over]
        wait_s = max(0.0, min(waits, default=0) / NS_PER_S)
        for news in self._boxes.receive(min(wait_s, LONGEST_SLEEP_S)):
            tell(news, self.calls[news.call - 1], self._clock.now_ns())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define ``duplexbox appliance callers``."""
    parser.add_argument("wavs", nargs="+", type=Path, metavar="WAV", help="what callers say")
    parser.add_argument(
        "--socket", type=Path, required=True, help="of the box, or a folder of several"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="what each caller saw")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="callers (1)")
    parser.add_argument("--talk", type=float, default=30.0, metavar="S", help="seconds each (30)")
    parser.add_argument("--stagger", type=float, default=1.0, metavar="S", help="between them (1)")
    parser.add_argument("--extra", type=int, default=0, metavar="N", help="who come too late (0)")
    for name, unit, what in (
        ("jitter-ms", "MS", "frames are late by 0 to this"),
        ("loss", "SHARE", "of frames that never arrive"),
        ("skew-ppm", "PPM", "callers' clocks spread over plus and minus this"),
    ):
        default = getattr(Conditions(1, 1, 1), name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar=unit, help=f"{what} (%(default)s)"
        )
    parser.add_argument("--seed", type=int, default=0, help="of all troubles (0)")


def run_callers(args: argparse.Namespace) -> int:
    """Place the callers ``args`` asks for. 0: all were admitted and finished; 1: some were not."""
    clock = MonotonicClock()
    try:
        conditions = conditions_of(args)
        boxes = Boxes.connect(args.socket, clock)
    except (CallersError, control.ControlError) as err:
        _say(str(err))
        return 2
    except control.BoxGone as err:
        _say(str(err))
        return 1
    welcome = boxes.welcome
    try:
        speech = read_speech(args.wavs, welcome.sample_rate_hz, welcome.samples_per_frame)
    except WavError as err:
        _say(str(err))
        boxes.close()
        return 2
    plans = plan_callers(conditions, clock.now_ns(), len(speech))
    line = CallersLine([SyntheticCall(plan, speech, welcome) for plan in plans], boxes, clock)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, line.interrupt)
    try:
        reports = line.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        boxes.close()
    if args.out is not None:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(reports)) + b"\n")
    for report in reports:
        _say(
            f"caller {report.number}: {report.ended} {report.detail or ''}".rstrip()
            + f": {report.sent} frames said, {report.delivered} heard in time, "
            f"{report.late} late, {report.filled} filled"
        )
    regular = reports[: conditions.callers]
    return 0 if all(report.ended == "finished" for report in regular) else 1


def conditions_of(args: argparse.Namespace) -> Conditions:
    """The options as `Conditions`. Raises `CallersError`."""
    found = Conditions(
        callers=args.count,
        talk_s=args.talk,
        stagger_s=args.stagger,
        jitter_ms=args.jitter_ms,
        loss=args.loss,
        skew_ppm=args.skew_ppm,
        extra=args.extra,
        seed=args.seed,
    )
    for option, value, low, high in (
        ("--count", found.callers, 1, 4096),
        ("--talk", found.talk_s, 0.1, 1e6),
        ("--stagger", found.stagger_s, 0, 1e6),
        ("--jitter-ms", found.jitter_ms, 0, 10_000),
        ("--loss", found.loss, 0, 1),
        ("--skew-ppm", found.skew_ppm, 0, 100_000),
        ("--extra", found.extra, 0, 64),
        ("--seed", found.seed, 0, 2**31),
    ):
        if not math.isfinite(value) or not low <= value <= high:
            raise CallersError(f"{option} {value}: expected {low} to {high}")
    return found


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
