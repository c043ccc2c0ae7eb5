"""The file line: callers from WAV files, placed into a running box at the pace of speech.

Decides which calls are placed when, and carries messages between them and the box. Does not know
what a call does with its frames (`call`). One thread, one socket, any number of calls; it sleeps
until the next thing is due on the absolute grid, never for a period.

Ctrl-C hangs up politely: each caller's next frame is its last. A second one leaves at once, and
the box, whose socket closes, takes the sessions for lost.
"""

import argparse
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from appliance import control
from appliance.clock import NS_PER_S, Clock, MonotonicClock
from appliance.lines.boxes import Boxes, Lost, News

if TYPE_CHECKING:
    from appliance.lines.call import Call, CallPlan

LONGEST_SLEEP_S = 0.1
"""A signal sets a flag and interrupts no sleep; Ctrl-C must not wait for the next caller."""


class UsageError(ValueError):
    """The command line asks for something that cannot be; the operator's to fix."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define ``duplexbox appliance call``."""
    parser.add_argument("wavs", nargs="+", type=Path, metavar="WAV", help="what a caller says")
    parser.add_argument(
        "--socket", type=Path, required=True, help="of the running box, or a folder of several"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for replies, transcripts and figures"
    )
    parser.add_argument(
        "--stagger", type=float, default=0.0, metavar="S", help="seconds between callers (0)"
    )
    parser.add_argument(
        "--hang-up-after",
        action="append",
        default=[],
        metavar="I=S",
        help="caller I (from 1) says goodbye after S seconds; may be given several times",
    )
    parser.add_argument(
        "--drop-after",
        action="append",
        default=[],
        metavar="I=S",
        help="caller I (from 1) vanishes after S seconds, in mid-frame; may be repeated",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of every call, such as sampling.temperature=0; may be repeated",
    )
    parser.add_argument(
        "--persona", default="", metavar="TEXT", help="who the model is to be, in every call"
    )
    parser.add_argument(
        "--voice", default="", metavar="NAME", help="a voice of the bundle, in every call"
    )
    parser.add_argument(
        "--journal",
        action="store_true",
        help="keep what replay needs beside the recordings; it holds what was said",
    )


def run_calls(args: argparse.Namespace) -> int:
    """Place the calls ``args`` asks for and wait until all are over.

    Returns 0 if every call ended as it should, 1 if one was refused, cut short or lost its box, 2
    if nothing was placed because the command line or a file is wrong, 130 after Ctrl-C.
    """
    from appliance.lines.transcript import PiecesError
    from appliance.lines.wav import WavError

    clock = MonotonicClock()
    try:
        plans = plan_calls(args, clock.now_ns())
        boxes = Boxes.connect(args.socket, clock)
    except (UsageError, control.ControlError) as err:
        _say(str(err))
        return 2
    except control.BoxGone as err:
        _say(str(err))
        return 1
    try:
        line = FileLine(plans, boxes, args.out, clock, _say)
    except (WavError, PiecesError) as err:
        _say(str(err))
        boxes.close()
        return 2
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, line.interrupt)
    try:
        return line.run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        boxes.close()


def plan_calls(args: argparse.Namespace, now_ns: int) -> "list[CallPlan]":
    """What each caller is going to do. Raises `UsageError`."""
    from appliance.lines.call import CallPlan

    if not math.isfinite(args.stagger) or args.stagger < 0:
        raise UsageError(f"--stagger {args.stagger}: expected seconds, 0 or more")
    if len(args.persona) > control.LONGEST_PERSONA:
        raise UsageError(
            f"--persona has {len(args.persona)} characters; {control.LONGEST_PERSONA} are allowed"
        )
    if len(args.voice) > control.LONGEST_VOICE:
        raise UsageError(f"--voice: {args.voice[:20]!r}... is longer than any voice's name")
    settings = dict(_setting(text) for text in args.set)
    polite = dict(_caller_seconds("--hang-up-after", t, len(args.wavs)) for t in args.hang_up_after)
    abrupt = dict(_caller_seconds("--drop-after", t, len(args.wavs)) for t in args.drop_after)
    if both := sorted(polite.keys() & abrupt.keys()):
        raise UsageError(f"caller {both[0]} cannot both say goodbye and vanish; choose one")
    return [
        CallPlan(
            wav=wav,
            stem=f"{number:02d}-{wav.stem}",
            start_ns=now_ns + round((number - 1) * args.stagger * NS_PER_S),
            hang_up_after_ns=(polite | abrupt).get(number),
            abrupt=number in abrupt,
            settings=settings,
            persona=args.persona,
            voice=args.voice,
            journal=args.journal,
        )
        for number, wav in enumerate(args.wavs, 1)
    ]


class FileLine:
    """A line process's whole work: its calls, and the box at the other end."""

    def __init__(
        self,
        plans: "Sequence[CallPlan]",
        boxes: Boxes,
        out: Path,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        """Open every file before anybody calls. Raises `WavError`, `PiecesError`."""
        from appliance.lines.call import Call
        from appliance.lines.transcript import read_pieces
        from appliance.lines.wav import WavError, WavReader

        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise WavError(f"{out} cannot be made a folder: {err.strerror}") from None
        welcome = boxes.welcome
        pieces = read_pieces(welcome.pieces)
        self.calls: list[Call] = [
            Call(number, plan, WavReader(plan.wav), out, welcome, pieces)
            for number, plan in enumerate(plans, 1)
        ]
        self._boxes = boxes
        self._clock = clock
        self._say = say
        self._told: set[int] = set()
        self._interrupts = 0

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: once hangs up politely, twice raises KeyboardInterrupt."""
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def run(self) -> int:
        """Place all calls; return when the last is over. The exit code of `run_calls`."""
        if self._boxes.welcome.notice:
            self._say(self._boxes.welcome.notice)
        try:
            while not all(call.is_over for call in self.calls):
                self._turn()
        except (control.BoxGone, control.ControlError) as err:
            for call in self.calls:
                call.end(self._clock.now_ns(), str(err))
        except KeyboardInterrupt:
            for call in self.calls:
                call.end(self._clock.now_ns(), "interrupted twice")
        self._tell()
        if self._interrupts:
            return 130  # what a shell reports for SIGINT
        return 1 if any(call.trouble for call in self.calls) else 0

    def _turn(self) -> None:
        """Do what is due, then wait for the box or for the next thing, whichever is first."""
        for call in self.calls:
            if self._interrupts:
                call.hang_up()
            for message in call.advance(self._clock.now_ns()):
                self._boxes.send(call.number, message)
        self._tell()
        now_ns = self._clock.now_ns()
        waits = [call.wake_ns(now_ns) - now_ns for call in self.calls if not call.is_over]
        wait_s = max(0.0, min(waits, default=0) / NS_PER_S)
        for news in self._boxes.receive(min(wait_s, LONGEST_SLEEP_S)):
            self._hear(self.calls[news.call - 1], news)

    def _hear(self, call: "Call", news: News) -> None:
        now_ns = self._clock.now_ns()
        match news.message:
            case control.Admitted() as message:
                for reply in call.admitted(message, now_ns, news.t0_ns):
                    self._boxes.send(call.number, reply)
            case control.Refused() as message:
                call.refused(message, now_ns)
            case control.Gone() as message:
                call.gone(message, now_ns)
            case control.WasReset() as message:
                call.was_reset(message)
            case Lost() as lost:
                call.end(now_ns, lost.why)

    def _tell(self) -> None:
        """One line for each call that is over and has not been spoken of."""
        for call in self.calls:
            if call.is_over and call.number not in self._told:
                self._told.add(call.number)
                report = call.report()
                name = f"{call.plan.stem}: "
                if call.trouble:
                    self._say(name + call.trouble)
                else:
                    self._say(
                        f"{name}{report.ended}: {report.frames_sent} frames said, "
                        f"{report.frames_heard} heard, {report.late} late, {report.filled} filled"
                    )


def _caller_seconds(option: str, text: str, callers: int) -> tuple[int, int]:
    """``I=S`` as (caller, nanoseconds)."""
    left, _, right = text.partition("=")
    try:
        caller, seconds = int(left), float(right)
    except ValueError:
        raise UsageError(f"{option} {text}: expected I=S, such as 2=6.5") from None
    if not 1 <= caller <= callers:
        raise UsageError(f"{option} {text}: there are callers 1 to {callers}")
    if not 0 < seconds < 1e6:
        raise UsageError(f"{option} {text}: expected more than 0 seconds")
    return caller, round(seconds * NS_PER_S)


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number):
        raise UsageError(f"--set {text}: expected NAME=NUMBER, such as sampling.temperature=0")
    return name, number


def _say(text: str) -> None:
    # File names are in it, and may hold anything that moves a terminal's cursor.
    clean = "".join(char if char.isprintable() else "\ufffd" for char in text)
    sys.stderr.write(f"{clean}\n")
    sys.stderr.flush()
