"""``duplexbox.toml``, and nothing else: no environment variables, no second file.

One table per module that reads it. What the model decides (period, sample rate, sizes) is not
here: it comes from the bundle. Read once, strictly: a typo is an error with its path.
"""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.lines.sip_config import SipConfig

EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: systemd does not restart a unit that ends with it."""

DEFAULT_PATH = Path("/etc/duplexbox/duplexbox.toml")


class ConfigError(ValueError):
    """The file is missing or says something it cannot; the operator's to fix."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class EngineConfig(_Table, frozen=True):
    """What runs."""

    bundle: Path
    slots: Annotated[int, Meta(ge=0)] = 0
    """Sessions at once; 0: the bundle's largest batch, or what of it fits into the GPU's memory."""
    executor: Literal["auto", "cpu", "cuda", "tensorrt"] = "auto"
    """auto: the GPU if ONNX Runtime was built for one and the bundle fits; the log says which.
    tensorrt: the GPU by the bundle's plans for it; never chosen by itself."""
    gpu: Annotated[int, Meta(ge=0)] = 0
    """Which one, as nvidia-smi counts them. One box per GPU."""
    kernels: Path = Path("/var/lib/duplexbox/kernels")
    """Where kernels compiled for this machine's GPU are kept; written at the first start."""
    kernels_beside_plans: bool = False
    """With "tensorrt": stages that name a kernel of ours run in it, and only the rest by plans."""
    check_golden: bool = True
    """On a GPU, hold every stage to the bundle's golden data at each start: part of a second."""


class ClockConfig(_Table, frozen=True):
    """What is done about lateness."""

    catch_up_ms: Annotated[int, Meta(ge=0, le=10_000)] = 80
    """After an overrun, a tick is still run if it ends within this after its deadline. One frame
    of 80 ms: what a line's playout buffer bridges, and the model hears its caller without a gap."""
    lag_limit_frames: Annotated[int, Meta(ge=1, le=15)] = 4
    """Frames of a caller that may wait (320 ms) before the oldest are dropped unheard."""
    first_frame_s: Annotated[int, Meta(ge=1, le=3600)] = 10
    """How long an admitted caller may stay silent on the wire before its lease is taken back."""
    settle_s: Annotated[int, Meta(ge=1, le=600)] = 2
    """How long a line may take to say what became of a call's last frames."""
    hung_line_s: Annotated[int, Meta(ge=6, le=3600)] = 10
    """How long a line may leave all that the model says to its caller unread before the call is
    ended: its process hangs, though its socket is open. Its ring holds 5 s."""
    drain_s: Annotated[int, Meta(ge=0, le=86_400)] = 30
    """How long calls may go on once the box was told to stop; then they are ended."""
    realtime_priority: Annotated[int, Meta(ge=0, le=99)] = 10
    """SCHED_FIFO priority of the tick thread, where the machine allows it; 0: an ordinary thread.
    Above ordinary processes, below what the kernel and audio servers use for themselves (50)."""


class ControlConfig(_Table, frozen=True):
    """Where lines find the box."""

    socket: Path = Path("/run/duplexbox/control.sock")


class LedgerConfig(_Table, frozen=True):
    """Where calls are recorded."""

    folder: Path = Path("/var/lib/duplexbox/calls")
    ring_records: Annotated[int, Meta(ge=64, le=1 << 20)] = 8192
    """Records that may wait for the disk: 20 s of 32 sessions."""
    keep_days: Annotated[int, Meta(ge=0, le=36_500)] = 90
    """Calls that started longer ago are removed; 0: age removes none."""
    keep_mb: Annotated[int, Meta(ge=0)] = 10_000
    """What all call files may take, about 1,000 hours of calls; the oldest go. 0: any amount."""
    min_free_mb: Annotated[int, Meta(ge=0)] = 500
    """What the disk must have left, whoever fills it; old calls go first. 0: nothing."""


class AdmissionConfig(_Table, frozen=True):
    """Who may come in."""

    memory_mb: Annotated[int, Meta(ge=0)] = 0
    """What the state of all sessions may take at full retention; 0: what the machine had
    available when the box started."""
    policy: Literal["guaranteed", "statistical"] = "guaranteed"
    """How old sessions are taken to be: as old as can be, or as old as `call_lengths_s` makes
    them all but once in a thousand looks."""
    call_lengths_s: tuple[Annotated[int, Meta(ge=1, le=86_400)], ...] = ()
    """How long calls last, each length as likely as the others. Statistical only."""
    min_margin_ms: Annotated[int, Meta(ge=0, le=1000)] = 8
    """The guard: refuse newcomers once the p99.9 tick would end closer to its deadline than this.
    A tenth of an 80 ms tick, about what a busy Linux machine is late by once in a while."""
    calm_s: Annotated[int, Meta(ge=1, le=3600)] = 10
    """How long margins must have been wide again before newcomers are let in after thin ones."""
    shed_after: Annotated[int, Meta(ge=2, le=1000)] = 3
    """Steps in a row that may each take longer than the period before the newest session is sent
    away; four times as many that may be late. A stall is one slow step, however long it is."""
    calibrate_s: Annotated[int, Meta(ge=0, le=600)] = 3
    """How long steps are timed at each start, before anybody is let in; 0: the fewest that tell."""

    def __post_init__(self) -> None:
        if self.policy == "statistical" and not self.call_lengths_s:
            raise ValueError('policy "statistical" needs call_lengths_s, such as [60, 180, 600]')


class PersonaConfig(_Table, frozen=True):
    """Calls that begin with a voice and a persona."""

    snapshots: Path = Path("/var/lib/duplexbox/personas")
    """Where what a persona leaves in the model is kept for the next caller who asks for it."""
    keep_mb: Annotated[int, Meta(ge=0)] = 4096
    """For all of them: half a megabyte per frame of a prompt in Moshi's bfloat16. 0: keep none."""
    within_s: Annotated[int, Meta(ge=1, le=600)] = 30
    """How long the margins of ticks may take to feed a newcomer's persona before it is refused."""


class BesideConfig(_Table, frozen=True):
    """A small model that hears every caller beside the voice, under a contract of its own."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    model: Literal["silero-vad", "akiki-vad"]
    file: Path
    """Its ONNX file, as it lies in its wheel."""
    contract: Literal["hard", "freshness", "event"] = "hard"
    """hard: a result for every period, in hand before the period ends. freshness: of the newest
    input only. event: of every input. See `contracts`."""
    bound_ms: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """How long after its input a result is of use; 0: two of the model's periods. Not for hard."""


class Config(_Table, frozen=True):
    """The whole file. Each module gets its own table, never this."""

    engine: EngineConfig
    clock: ClockConfig = ClockConfig()
    control: ControlConfig = ControlConfig()
    ledger: LedgerConfig = LedgerConfig()
    admission: AdmissionConfig = AdmissionConfig()
    persona: PersonaConfig = PersonaConfig()
    beside: tuple[BesideConfig, ...] = ()
    sip: SipConfig | None = None
    """None: no telephone line is wanted; `duplexbox appliance sip` says what it needs."""


def load(path: Path) -> Config:
    """Read ``path``. Raises `ConfigError` with the path of the first wrong field."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Write one: duplexbox appliance init") from None
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path} cannot be read: {err}") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Config:
    """Decode TOML; ``name`` is how errors call it. Pure."""
    try:
        return msgspec.convert(tomllib.loads(text), Config, dec_hook=_decode_path)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as err:
        raise ConfigError(
            f"{name}: {err}. All settings with their defaults: duplexbox appliance init -"
        ) from None


def with_paths(bundle: Path | None, state: Path | None) -> str:
    """`DEFAULT`, serving ``bundle`` and keeping all it keeps below ``state``. Pure.

    None: as it stands, for a service of the machine.
    """
    own = '"/var/lib/duplexbox/bundle"'
    before, after = DEFAULT.split(own)
    if state is not None:
        below = json.dumps(str(state))[:-1].rstrip("/")
        after = after.replace('"/run/duplexbox/control.sock"', f'{below}/box.sock"')
        after = after.replace('"/var/lib/duplexbox/', f"{below}/")
    return before + (own if bundle is None else json.dumps(str(bundle))) + after


def _decode_path(kind: type, value: Any) -> Any:
    """msgspec knows no paths; everything else it was not told of is a mistake in this file."""
    if kind is not Path:
        raise NotImplementedError(f"config field of type {kind}")
    if not isinstance(value, str):
        raise ValueError(f"Expected `str`, got `{type(value).__name__}`")
    if not value or "\0" in value:
        raise ValueError("a path cannot be empty, nor hold a NUL character")
    return Path(value)


DEFAULT = """\
# What this box serves, and how. Everything that is not here comes from the bundle.
# After a change: duplexbox appliance check --config FILE, then restart the service.

[engine]
bundle = "/var/lib/duplexbox/bundle"   # the folder that duplexbox export build wrote
slots = 0                              # sessions at once; 0: the bundle's largest batch that fits
executor = "auto"                      # "cpu", "cuda" or "tensorrt" (an NVIDIA GPU), "auto"
gpu = 0                                # which one, as nvidia-smi counts; one box per GPU
kernels = "/var/lib/duplexbox/kernels" # compiled for this machine's GPU at the first start
kernels_beside_plans = false           # "tensorrt": kernels of ours where the bundle names them
check_golden = true                    # on a GPU, compare with the bundle's golden data first

[clock]
catch_up_ms = 80        # after an overrun, run a tick if it ends within this after its deadline
lag_limit_frames = 4    # frames of a caller that may wait before the oldest are dropped unheard
first_frame_s = 10      # how long an admitted caller may stay silent on the wire
settle_s = 2            # how long a line may take to say what became of a call's last frames
hung_line_s = 10        # how long a line may read nothing before its call is ended
drain_s = 30            # how long calls may go on once the box was told to stop
realtime_priority = 10  # of the tick thread, where the machine allows it; 0: none

[control]
socket = "/run/duplexbox/control.sock"    # where lines find the box

[ledger]
folder = "/var/lib/duplexbox/calls"       # one file per call
ring_records = 8192                       # records that may wait for the disk
keep_days = 90                            # calls that started longer ago are removed; 0: none
keep_mb = 10000                           # what all call files may take; 0: any amount
min_free_mb = 500                         # the disk must have this left; old calls go first

[admission]
memory_mb = 0           # for the state of all sessions at full retention; 0: what is available
policy = "guaranteed"   # or "statistical": sessions as old as call_lengths_s makes them
call_lengths_s = []     # how long calls last, each as likely; for "statistical" only
min_margin_ms = 8       # refuse newcomers once the p99.9 tick would end closer to its deadline
calm_s = 10             # how long margins must be wide again before newcomers are let in
shed_after = 3          # steps in a row that may overrun before the newest session must go
calibrate_s = 3         # how long steps are timed at each start; 0: as short as can be

[persona]
snapshots = "/var/lib/duplexbox/personas"   # what personas leave in the model, for the next caller
keep_mb = 4096          # for all of them; 0: keep none
within_s = 30           # how long the margins of ticks may take to feed a newcomer's persona

# Small models that hear every caller beside the voice, each with a contract of its own; results are
# in the ledger. Take the first # of each line away, and write it again for each model.
#[[beside]]
#name = "speech"              # what the ledger calls it
#model = "silero-vad"         # or akiki-vad
#file = "/var/lib/duplexbox/silero_vad.onnx"     # from the wheel of that name
#contract = "hard"            # a result per period, in time; or freshness, event
#bound_ms = 0                 # of freshness and event; 0: two of the model's periods

# The telephone line: docs/telephone.md. Take the first # of each line away.
#[sip]
#listen = "10.0.0.5:5060"     # an address of this machine
#allow = ["10.0.0.0/24"]      # who may send it anything: the PBX or trunk, and its media servers
#open_to_everybody = false    # true: anybody; only behind a firewall that knows who may
#most = 120                   # calls at once, if the box has room for as many
#calls_per_s = 20             # new calls from one address
#rtp_ports = [20000, 30000]   # for audio, two a call
#jitter_ms = [20, 200]        # how long packets are held back, at least and at most
#lead_ms = 30                 # what of the model's audio waits to be sent; 20 to 100
#media_timeout_s = 30         # a call without any audio from the caller is ended
#hold_s = 600                 # and one on hold
#health = ""                  # ADDRESS:PORT where OPTIONS is 200 while there is room, else 503
#transfer_to = []             # who may be called on, such as "sip:desk@pbx.example", "sip:2*@..."
#tls_ca = "/etc/ssl/certs/ca-certificates.crt"   # whom we trust over TLS
#tls_certificate = "/etc/duplexbox/box.pem"      # ours and its key, for TLS at the next port
#records = "/var/lib/duplexbox/sip.sqlite"       # one row per call
#hook = "/etc/duplexbox/sip-hook"                # started with JSON for what happens
#[[sip.accounts]]
#user = "bot"                 # sip:bot@...
#domain = "pbx.example:5060"  # of the PBX or trunk; "" if it just sends calls here
#register = true              # log in there
#password_file = "/etc/duplexbox/bot.password"
#auth_user = ""               # the name to log in with, if it is not user
#transport = "udp"            # or tcp, tls
#srtp = "off"                 # or optional, mandatory; with tls
#proxy = ""                   # where to register and call through, if not the domain itself
#any_number = false           # also calls to numbers that no account has: a trunk's account
#stun = ""                    # behind a router: who says our address outside: "stun:stun.example"
#codecs = ["opus", "g722", "pcma", "pcmu"]       # best first
#persona = ""                 # who the model is for these callers
#voice = ""
#settings = {}                # such as { "sampling.temperature" = 0.7 }
#max_s = 3600                 # a call is ended after this
#digits = {}                  # such as { 0 = "sip:desk@pbx.example", "#" = "hang-up" }
#words = {}                   # said by the model, such as { "goodbye" = "hang-up" }
#words_grace_ms = 1500        # of silence after them, before they are acted upon
#fallback = ""                # who takes the caller when the box fails: "sip:desk@pbx.example"
#record = false               # keep both sides of these calls; needs the next table
#[sip.recording]
#folder = "/var/lib/duplexbox/recordings"   # a WAV file per call: left the caller, right the model
#announce = "/etc/duplexbox/recorded.wav"   # heard by callers before anything is kept; 8 s at most
#keep_days = 30               # files that began longer ago are removed; 0: none is for its age
#keep_mb = 10000              # for all of them, the oldest go first; 0: any amount
#min_free_mb = 500            # the disk must have this left, or nothing is recorded
"""
"""What ``duplexbox appliance init`` writes; a test holds it to the defaults above."""
