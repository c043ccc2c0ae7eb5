"""`duplexbox appliance talk`: one person at this machine's own microphone and loudspeaker.

Decides what runs where. With `--socket` this process is the line of a box that runs already;
without, it is a box of its own for one, and starts the same command again as its line, which has
the terminal. Does not know what a line does (`local_line`).

    talk ──▶ box, main thread ticks                       `--socket`: only this half
              └─ talk --socket ──▶ line process: call, card, terminal
"""

import argparse
import contextlib
import getpass
import math
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import control
from appliance.clock import NS_PER_S, Clock, MonotonicClock, wall_stamp
from appliance.lines import niceness
from appliance.lines.boxes import Boxes

if TYPE_CHECKING:
    from appliance.lines.local_call import Wish
    from appliance.lines.local_card import Sound
    from appliance.lines.local_line import Ends
    from appliance.lines.local_rings import Exchange
    from appliance.lines.local_sound import Cleaner, Microphone, Speaker
    from appliance.lines.local_watch import Opened

LATENCY_MS = 20.0
"""What the device may hold in each direction: two blocks. PulseAudio took it without a gap, also
beside a busy process; a card that cannot do it takes the least that it can."""

WAIT_FOR_CARD_S = 60.0
"""Long enough to find the plug, short enough that nobody pays for a call that is none."""

SWITCH_S = 0.0005
"""How long another thread may hold the interpreter while the card's callback waits for it."""

DRAIN_S = 5
"""How long the box of `talk` waits for its line to say goodbye."""


class UsageError(ValueError):
    """The command line asks for something that cannot be; the operator's to fix."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define ``duplexbox appliance talk``."""
    parser.add_argument("--devices", action="store_true", help="list microphones and loudspeakers")
    parser.add_argument("--microphone", default="", metavar="NAME", help="a part of its name")
    parser.add_argument("--speaker", default="", metavar="NAME", help="a part of its name")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--bundle", type=Path, metavar="DIR", help="default: the demo's own")
    which.add_argument(
        "--socket", type=Path, help="of a box that runs already, or a folder of several"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: out/talk-<time>")
    parser.add_argument("--muted", action="store_true", help="begin with a closed microphone")
    parser.add_argument(
        "--no-echo-cancellation", action="store_true", help="for headphones; 9 ms less delay"
    )
    parser.add_argument("--no-noise-suppression", action="store_true", help="6 ms less delay")
    parser.add_argument(
        "--latency-ms",
        type=float,
        default=LATENCY_MS,
        metavar="X",
        help="what the sound device holds each way (%(default)g)",
    )
    parser.add_argument(
        "--wait-for-card",
        type=float,
        default=WAIT_FOR_CARD_S,
        metavar="S",
        help="how long a call waits for a sound card that has gone (%(default)g)",
    )
    parser.add_argument("--persona", default="", metavar="TEXT", help="who the model is to be")
    parser.add_argument("--voice", default="", metavar="NAME", help="a voice of the bundle")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting, such as sampling.temperature=0; may be repeated",
    )


def run_talk(args: argparse.Namespace) -> int:
    """Talk until hung up. 0: done; 1: the call did not end well; 2: usage, or something missing.

    Ctrl-C hangs up, and the code is then 130.
    """
    from appliance.lines.local_card import CardError, choose, listing
    from appliance.lines.local_portaudio import PortAudio

    clock = MonotonicClock()
    try:
        _check(args)
        sound = PortAudio(clock)
        if args.devices:
            for line in listing(sound.devices()):
                _say(line)
            return 0
        # Before a box is started for it.
        choose(sound.devices(), args.microphone, args.speaker)
    except (UsageError, CardError) as err:
        return _fail(str(err), 2)
    return run_line(args, sound, clock) if args.socket else _run_box(args)


def run_line(args: argparse.Namespace, sound: "Sound", clock: Clock) -> int:
    """Be the line of the box at ``args.socket``."""
    from appliance.lines.local_call import LocalCall
    from appliance.lines.local_card import CardError
    from appliance.lines.local_figures import text
    from appliance.lines.local_line import LocalLine, hang_up_on_signals
    from appliance.lines.local_portaudio import quiet
    from appliance.lines.local_screen import Screen
    from appliance.lines.local_watch import CardWatch
    from appliance.lines.transcript import PiecesError, read_pieces

    try:
        boxes = Boxes.connect(args.socket, clock)
    except control.ControlError as err:
        return _fail(str(err), 2)
    except control.BoxGone as err:
        return _fail(str(err), 1)
    try:
        welcome = boxes.welcome
        ends, reopen = _ends(args, welcome), _reopen(args, sound)
        pieces = read_pieces(welcome.pieces)
        with quiet():
            first = reopen()
        try:
            ends(first[0])  # what cannot work with this card is said before anybody calls
        except BaseException:
            first[1].close()
            raise
    except ModuleNotFoundError as err:
        boxes.close()
        return _fail(f"{err.name} is not installed. Install it: pip install 'duplexbox[lines]'", 2)
    except (CardError, PiecesError, ValueError) as err:
        boxes.close()
        return _fail(str(err), 2)

    def again() -> "Opened":
        sound.look_again()
        return reopen()

    card = CardWatch(first, again, clock.now_ns())
    call = LocalCall(_wish(args), welcome, pieces, clock.now_ns())
    screen = Screen()
    wait_ns = round(args.wait_for_card * NS_PER_S)
    line = LocalLine(boxes, call, card, ends, screen, clock, wait_ns)
    line.muted = args.muted
    niceness.ask_for()  # an ordinary user, who does not get it, is heard as well
    before, restore = sys.getswitchinterval(), hang_up_on_signals(line)
    sys.setswitchinterval(SWITCH_S)
    try:
        with quiet():
            code = line.run()
            boxes.close()
            card.close()
    finally:
        sys.setswitchinterval(before)
        restore()
    for shown in text(call.figures()):
        _say(shown)
    if card.losses:
        _say(f"the sound card went away {card.losses} times")
    return code


def _reopen(args: argparse.Namespace, sound: "Sound") -> "Callable[[], Opened]":
    from appliance.lines.local_card import choose

    def reopen() -> "Opened":
        pair = choose(sound.devices(), args.microphone, args.speaker)
        return sound.open(pair, args.latency_ms / 1000)

    return reopen


def _ends(args: argparse.Namespace, welcome: control.Welcome) -> "Ends":
    """What makes a microphone and a loudspeaker of a card. Raises `ModuleNotFoundError`."""
    from appliance.lines.local_sound import Microphone, Speaker

    clean = _cleaner(not args.no_echo_cancellation, not args.no_noise_suppression)
    rate_hz, samples = welcome.sample_rate_hz, welcome.samples_per_frame

    def ends(exchange: "Exchange") -> "tuple[Microphone, Speaker]":
        cleaner = clean(exchange.rate_hz)
        return (
            Microphone(exchange, cleaner, rate_hz, samples, welcome.period_ns),
            Speaker(exchange, rate_hz, samples, welcome.period_ns),
        )

    return ends


def _cleaner(echo: bool, noise: bool) -> "Callable[[int], Cleaner]":
    if not echo and not noise:
        from appliance.lines.local_sound import Untouched

        return lambda rate_hz: Untouched()
    from appliance.lines.echo import EchoCanceller

    return lambda rate_hz: EchoCanceller(rate_hz, echo=echo, noise=noise)


def _wish(args: argparse.Namespace) -> "Wish":
    from appliance.lines.local_call import Wish

    try:
        caller = getpass.getuser()
    except (KeyError, OSError):  # no name for this user: a container
        caller = "somebody"
    return Wish(
        caller=caller[: control.LONGEST_CALLER],
        settings=dict(_setting(text) for text in args.set),
        persona=args.persona,
        voice=args.voice,
    )


def _check(args: argparse.Namespace) -> None:
    """What can be known to be wrong at once. Raises `UsageError`."""
    for text in args.set:
        _setting(text)
    if len(args.persona) > control.LONGEST_PERSONA:
        raise UsageError(
            f"--persona has {len(args.persona)} characters; {control.LONGEST_PERSONA} are allowed"
        )
    if len(args.voice) > control.LONGEST_VOICE:
        raise UsageError(f"--voice: {args.voice[:20]!r}... is longer than any voice's name")
    if not 1 <= args.latency_ms <= 500:
        raise UsageError(f"--latency-ms {args.latency_ms}: expected 1 to 500")
    if not 0 <= args.wait_for_card <= 86_400:
        raise UsageError(f"--wait-for-card {args.wait_for_card}: expected 0 to 86400 seconds")


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number):
        raise UsageError(f"--set {text}: expected NAME=NUMBER, such as sampling.temperature=0")
    return name, number


def _run_box(args: argparse.Namespace) -> int:
    """A box for one, and its line in a process of its own that has the terminal."""
    from appliance import demonstration
    from appliance.box import open_box
    from appliance.config import (
        ClockConfig,
        Config,
        ConfigError,
        ControlConfig,
        EngineConfig,
        LedgerConfig,
        PersonaConfig,
    )
    from appliance.line_process import LineProcess
    from appliance.listener import SocketTaken
    from engines.bundle import BundleError

    out: Path = args.out or Path("out") / f"talk-{wall_stamp()}"
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:
        config = Config(
            engine=EngineConfig(args.bundle or demonstration.POCKET, slots=1),
            clock=ClockConfig(drain_s=DRAIN_S),
            control=ControlConfig(Path(folder) / "control.sock"),
            ledger=LedgerConfig(out / "ledger"),
            persona=PersonaConfig(snapshots=out / "personas"),
        )
        try:
            box = open_box(config)
        except (ConfigError, BundleError, SocketTaken) as err:
            return _fail(str(err), 1)
        model = box.executor.bundle.manifest.model
        _say(f"{model.name} gets ready; the ledger goes to {out / 'ledger'}")
        if not model.trained:
            _say("This model is UNTRAINED: what it says is an untrained network's noise.")
        if model.notice:
            _say(model.notice)
        line = LineProcess(box, _line_command(args, config.control.socket), None, lambda *_: None)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in numbers}
        # The terminal sends Ctrl-C to the line as well; it takes the two for one.
        for number in before:
            signal.signal(number, lambda *_: line.hang_up())
        line.start()
        try:
            box.run()
        except ConfigError as err:
            return _fail(str(err), 1)
        finally:
            line.stop()
            for number, handler in before.items():
                signal.signal(number, handler)
    code = line.exit_code
    if code is None:  # told to end before the box was ready
        return 130
    if code < 0:
        return _fail(f"the line's process was killed by signal {-code}", 1)
    return code


def _line_command(args: argparse.Namespace, socket: Path) -> list[str]:
    """This command once more, for a box that runs already."""
    command = [
        *(sys.executable, "-m", "duplexbox", "appliance", "talk", "--socket", str(socket)),
        *(f"--microphone={args.microphone}", f"--speaker={args.speaker}"),
        *(f"--latency-ms={args.latency_ms}", f"--wait-for-card={args.wait_for_card}"),
        *(f"--persona={args.persona}", f"--voice={args.voice}"),
        *(f"--set={text}" for text in args.set),
    ]
    for flag in ("muted", "no_echo_cancellation", "no_noise_suppression"):
        if getattr(args, flag):
            command.append(f"--{flag.replace('_', '-')}")
    return command


def _fail(why: str, code: int) -> int:
    sys.stderr.write(f"duplexbox appliance talk: {why}\n")
    sys.stderr.flush()
    return code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal has been closed, which ended the call
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
