"""One box: executor, tick loop, switchboard and ledger, started and stopped in the right order.

    main thread      ticks, and nothing else
    control thread   `switchboard`: connections, admission, shared memory
    ledger thread    `ledger_writer`: call files

Wiring only; it decides nothing. The order of an end: calls drain, the tick loop stops, then the
control thread, then the ledger (which writes what is left), then sockets and memory are returned.
"""

import gc
import logging
import sys

from appliance.admission import session_bytes
from appliance.calibration import Recalibration, calibrate, warm_up
from appliance.channel import Capacities
from appliance.clock import NS_PER_MS, NS_PER_S, Clock, MonotonicClock, TickGrid
from appliance.config import Config, ConfigError
from appliance.engine import open_engine, open_primer
from appliance.ledger_writer import LedgerWriter
from appliance.notify import Notify
from appliance.preflight import disk_fault
from appliance.priming import PrimingDesk
from appliance.realtime import ask_for_priority
from appliance.reception import Reception
from appliance.record_ring import RecordRing
from appliance.retention import Keep
from appliance.side_models import SideModels, plan
from appliance.step_model import BESIDE_SESSION_NS, StepSamples
from appliance.switchboard import Switchboard
from appliance.tick_loop import TickLoop, TickPolicy
from engines import bundle as bundles
from engines.executor import Executor, OnDevice, Primes

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""How long another thread may hold the interpreter while the tick waits for it. Python's default
is 5 ms, which is a sixteenth of a tick."""

STOP_NS = 5 * NS_PER_S
"""How long everything but the calls may take to stop: threads, files, sockets."""

BEATS = 4
"""How often per watchdog period the tick loop says that it turns."""


class Box:
    """`run` in the main thread; `drain` from anywhere, signal handlers included."""

    def __init__(
        self,
        config: Config,
        executor: Executor,
        clock: Clock,
        memory_bytes: int,
        notify: Notify | None = None,
    ) -> None:
        """Binds the socket and makes the ledger's folder; nothing runs yet.

        memory_bytes: what the state of all sessions may take, unless the config says.
        Raises `ConfigError` or `listener.SocketTaken`.
        """
        timing = executor.bundle.manifest.timing
        self.executor = executor
        self._drain_ns = config.clock.drain_s * NS_PER_S
        self._settle_ns = config.clock.settle_s * NS_PER_S
        self._priority = config.clock.realtime_priority
        self._notify = notify or Notify({})
        self._calibrate_ns = config.admission.calibrate_s * NS_PER_S
        self._samples = StepSamples(BESIDE_SESSION_NS)
        self._failure: BaseException | None = None
        ring = RecordRing(config.ledger.ring_records)
        try:
            kept = config.ledger
            keep = Keep(kept.keep_days, kept.keep_mb * 2**20, kept.min_free_mb * 2**20)
            self.ledger = LedgerWriter(kept.folder, ring, clock, keep, self._priority // 2)
        except OSError as err:
            raise ConfigError(
                f"[ledger] folder {config.ledger.folder}: {err.strerror or err}. "
                f"Name a folder this user may write to"
            ) from None
        desk = None
        if executor.bundle.manifest.prompt is not None and isinstance(executor, Primes):
            primer = open_primer(executor, config.engine)
            desk = PrimingDesk(primer, executor.bundle.manifest, executor.slots, clock)
        self.reception = Reception(executor.bundle, desk, config.persona)
        self.beside = SideModels(plan(config.beside), timing, clock, self._priority)
        self.loop = TickLoop(
            executor=executor,
            clock=clock,
            grid=TickGrid(clock.now_ns(), timing.period_ns),
            policy=TickPolicy(
                config.clock.catch_up_ms * NS_PER_MS,
                config.clock.lag_limit_frames,
                config.clock.hung_line_s * NS_PER_S // timing.period_ns - Capacities().downlink,
            ),
            ring=ring,
            desk=desk,
            idle=Recalibration(executor, clock),
        )
        if self._notify.watchdog_ns is not None:
            self.loop.beat = self._notify.alive
            self.loop.beat_ticks = max(1, self._notify.watchdog_ns // BEATS // timing.period_ns)
        self.switchboard = Switchboard(
            path=config.control.socket,
            bundle=executor.bundle,
            slots=min(config.engine.slots or executor.slots, executor.slots),
            loop=self.loop,
            ledger=self.ledger,
            reception=self.reception,
            beside=self.beside,
            clock=clock,
            policy=config.clock,
            memory_bytes=config.admission.memory_mb * 2**20 or memory_bytes,
            session_bytes=session_bytes(executor.bundle.manifest),
            device=executor if isinstance(executor, OnDevice) else None,
            admission=config.admission,
            samples=self._samples,
            on_failure=self._fail,
        )

    def run(self) -> None:
        """Serve until drained. Raises whatever broke the tick loop or one of the threads.

        Raises `ConfigError` when the models beside the voice do not start.
        """
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            self.ledger.start()
            self.reception.start()
            self.beside.start()
            self.switchboard.start()
            # Before steps are timed: admission must know what they take as the loop will run them.
            ask_for_priority(self._priority)
            warm_up(self.executor, self._stopping)
            budget_ns = self._calibrate_ns
            calibrate(self.executor, self.loop.clock, budget_ns, self._samples, self._stopping)
            self.reception.calibrate()
            # What exists now stays: the collector need not look at it again, ever.
            gc.collect()
            gc.freeze()
            self.switchboard.ready = True
            logger.info("ready: slots=%d", self.executor.slots)
            self._notify.ready(f"{self.executor.slots} slots, {self.executor.bundle.path}")
            self.loop.run()
        finally:
            self.switchboard.stop()
            self.ledger.stop()
            self.reception.stop()
            self.beside.stop()
            self.beside.close()
            self.switchboard.close()
            self._notify.close()
            gc.unfreeze()
            sys.setswitchinterval(before)
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Finish: refuse newcomers, let calls end, then stop. A second time: end calls now."""
        again = self.switchboard.draining
        self._notify.stopping(self._drain_ns + self._settle_ns + STOP_NS)
        self.switchboard.drain(0 if again else self._drain_ns)

    def _stopping(self) -> bool:
        return self.loop.stopping

    def _fail(self, err: BaseException) -> None:
        self._failure = err
        self.loop.stopping = True


def open_box(config: Config) -> Box:
    """The box a config asks for, on this machine's clock.

    Raises `ConfigError`, `engines.bundle.BundleError` or `listener.SocketTaken`.
    """
    bundle = bundles.read(config.engine.bundle)
    if why := disk_fault(config.ledger.folder, config.ledger.min_free_mb):
        raise ConfigError(why)
    engine = open_engine(bundle, config.engine)
    return Box(config, engine.executor, MonotonicClock(), engine.memory_bytes, Notify())
