"""Keeps the telephone line's worker process alive, and replaces one that is of no use any more.

Decides when a worker has to go: it ended, it was not heard of, it holds more memory than calls
need, or it computes without a call. It knows no SIP. The worker says that it is well through a
pipe, one byte every `BEAT_NS`, from the thread that looks after calls and only once the stack has
answered. The other way round a worker does not outlive its supervisor: the kernel kills it, and the
next one finds its ports free. A spare one waits with everything imported, because on a busy machine
that takes longer than callers should.

What native code writes to standard error by itself (a line for every message it does not know)
comes through here, too, and is bounded: no stranger can fill the disk with it.
"""

import contextlib
import ctypes
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from appliance.clock import NS_PER_MS, NS_PER_S, MonotonicClock
from appliance.config import EXIT_CONFIG
from appliance.lines.limits import Bucket

logger = logging.getLogger(__name__)

AGAIN_S = (0.1, 0.5, 1.0)
"""Before a worker that died is started again: the first, second, ... time within `CALM_S`."""
LONG_S = 10.0
"""And after that."""
CALM_S = 60

BEAT_NS = 500 * NS_PER_MS
IDLE, BUSY = b".", b"+"
"""What a beat says: no call is on; some are."""
START_NS = 60 * NS_PER_S
"""How long a worker may take until its first beat."""
SILENT_NS = 5 * NS_PER_S
"""And between two: its callers have heard nothing for as long."""
LOOK_MS = 250
STALL_NS = 2 * NS_PER_S
"""Of our own: then the machine stood still, and the worker is given its time again."""

RESIDENT_BYTES, RESIDENT_CALL_BYTES = 512 << 20, 4 << 20
"""What a worker may hold, and more for each call it may take; 100 calls were seen to need 75 MB."""
DATA_BYTES, DATA_CALL_BYTES = 4 << 30, 32 << 20
"""What the kernel lets it reserve: three threads' stacks a call are 24 MB of address space."""

SPIN_NS = 30 * NS_PER_S
SPIN_SHARE = 0.5
"""Of a core, over `SPIN_NS` without a single call."""

SAID_PER_S, SAID_BURST = 1, 100
LEVELS = (b"DEBUG ", b"INFO ", b"WARNING ", b"ERROR ", b"CRITICAL ")
"""What lines of our own log begin with; they are bounded where they are made."""
LONGEST_BYTES = 2_000

GO = b"g"
PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Health:
    """What is known of a worker that runs, and whether it has to go. Times are arguments."""

    most_resident: int
    began_ns: int
    _beat_ns: int | None = None
    _looked_ns: int | None = None
    _idle_since: tuple[int, float] | None = None
    """When and at how many seconds of CPU it began to have no call."""

    def beat(self, said: bytes, now_ns: int) -> None:
        self._beat_ns = now_ns
        if BUSY in said:
            self._idle_since = None

    def trouble(self, cpu_s: float, resident: int, now_ns: int) -> str:
        """Why it has to go; empty: it may stay. Asked every `LOOK_MS`."""
        if self._looked_ns is not None and now_ns - self._looked_ns > STALL_NS:
            self._idle_since = None
            if self._beat_ns is None:
                self.began_ns = now_ns
            else:
                self._beat_ns = now_ns
        self._looked_ns = now_ns
        if resident > self.most_resident:
            return f"it holds {resident >> 20} MB, more than {self.most_resident >> 20} MB"
        if self._beat_ns is None:
            if now_ns - self.began_ns > START_NS:
                return f"it was not ready within {START_NS // NS_PER_S} s"
            return ""
        if now_ns - self._beat_ns > SILENT_NS:
            return f"it was not heard of for {(now_ns - self._beat_ns) / NS_PER_S:.1f} s"
        if self._idle_since is None:
            self._idle_since = now_ns, cpu_s
        since_ns, since_cpu_s = self._idle_since
        if now_ns - since_ns < SPIN_NS:
            return ""
        share = (cpu_s - since_cpu_s) * NS_PER_S / (now_ns - since_ns)
        self._idle_since = now_ns, cpu_s
        if share > SPIN_SHARE:
            return f"it used {share:.2f} of a core without a call"
        return ""


@dataclass(slots=True)
class Restarts:
    """How soon a worker that went is replaced: at once, unless they go one after the other."""

    _deaths_ns: deque[int] = field(default_factory=deque)

    def again_s(self, now_ns: int) -> float:
        """One has gone now."""
        deaths = self._deaths_ns
        while deaths and now_ns - deaths[0] > CALM_S * NS_PER_S:
            deaths.popleft()
        again_s = AGAIN_S[len(deaths)] if len(deaths) < len(AGAIN_S) else LONG_S
        deaths.append(now_ns)
        return again_s


@dataclass(frozen=True, slots=True)
class Worker:
    """A process of ours, and the pipes to and from it."""

    process: subprocess.Popen[bytes]
    go: int
    """Where it is told to begin; closed without a word: to end."""
    beats: int
    relay: threading.Thread


class Supervisor:
    """Keeps one worker process running until it is told to stop."""

    def __init__(
        self, command: list[str], most_calls: int, environ: Mapping[str, str] | None = None
    ) -> None:
        """command: of a worker; ``--go FD --beat FD`` are added. most_calls: that it may take.

        environ: what it is started with; None: what we were.
        """
        self._command = command
        self._environ = environ
        self._most_resident = RESIDENT_BYTES + most_calls * RESIDENT_CALL_BYTES
        self._worker: subprocess.Popen[bytes] | None = None
        self._spare: Worker | None = None
        self._stopping = False
        self._clock = MonotonicClock()

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        restarts = Restarts()
        try:
            while True:
                code = self._run_worker()
                if self._stopping or code in (0, 2, EXIT_CONFIG):
                    return max(0, code)
                again_s = restarts.again_s(self._clock.now_ns())
                logger.error("the telephone line ended with %d; again in %.1f s", code, again_s)
                self._wait(again_s)
                if self._stopping:
                    return 0
        finally:
            if self._spare is not None:
                os.close(self._spare.go)
                self._spare.process.wait()

    def _make(self) -> Worker:
        """A process that waits to be told to begin."""
        told, go = os.pipe()
        beats, beat = os.pipe()
        process = subprocess.Popen(
            [*self._command, "--go", str(told), "--beat", str(beat)],
            start_new_session=True,  # so that Ctrl-C reaches it once, through us
            pass_fds=(told, beat),
            stderr=subprocess.PIPE,
            env=self._environ,
        )
        os.close(told)
        os.close(beat)
        assert process.stderr is not None
        relay = threading.Thread(target=_relay, args=(process.stderr,), daemon=True)
        relay.start()
        return Worker(process, go, beats, relay)

    def _run_worker(self) -> int:
        """One worker from its beginning to its end; its exit code."""
        worker, self._spare = self._spare or self._make(), None
        self._worker = worker.process
        if self._stopping:
            worker.process.terminate()
        with contextlib.suppress(BrokenPipeError):  # it has died waiting
            os.write(worker.go, GO)
        os.close(worker.go)
        try:
            self._watch(worker)
        finally:
            os.close(worker.beats)
        code = worker.process.wait()
        worker.relay.join(1.0)  # a hook that still runs may hold the other end
        return code

    def _watch(self, worker: Worker) -> None:
        """Until it has ended, or been ended."""
        health = Health(self._most_resident, self._clock.now_ns())
        process, beats = worker.process, worker.beats
        while process.poll() is None:
            ready, _, _ = select.select([beats], [], [], LOOK_MS / 1000)
            said = os.read(beats, 64) if ready else b""
            now_ns = self._clock.now_ns()
            if said:
                health.beat(said, now_ns)
                if self._spare is None and not self._stopping:
                    self._spare = self._make()
            elif ready:
                return  # its end is closed: it is gone, or as good as
            try:
                cpu_s, resident = _used(process.pid)
            except OSError:
                continue
            trouble = health.trouble(cpu_s, resident, now_ns)
            if trouble:
                logger.error("the telephone line's process is ended: %s", trouble)
                process.send_signal(signal.SIGABRT)  # it says where its threads are
                try:
                    process.wait(0.3)
                except subprocess.TimeoutExpired:
                    process.kill()
                return

    def _wait(self, seconds: float) -> None:
        """Sleep, unless a signal to stop comes."""
        until_ns = self._clock.now_ns() + int(seconds * NS_PER_S)
        while not self._stopping and (now_ns := self._clock.now_ns()) < until_ns:
            self._clock.sleep_until(min(until_ns, now_ns + NS_PER_S // 20))

    def _stop(self, *_: object) -> None:
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(signal.SIGKILL if self._stopping else signal.SIGTERM)
        self._stopping = True


def wait_to_begin(go: int) -> bool:
    """In a worker, before it does anything: whether it is wanted. Ends with the supervisor."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with os.fdopen(go, "rb") as told:
        return told.read(1) == GO


def limit_memory(most_calls: int) -> None:
    """In a worker: what the kernel lets it reserve."""
    most = DATA_BYTES + most_calls * DATA_CALL_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _relay(said: IO[bytes]) -> None:
    """What a worker writes to standard error, to ours; what is not our log's, slowly."""
    clock = MonotonicClock()
    bucket = Bucket(SAID_PER_S, SAID_BURST)
    left_out = 0
    with said:
        while line := said.readline(LONGEST_BYTES):
            if not line.startswith(LEVELS) and not bucket.take(1, clock.now_ns()):
                left_out += 1
                continue
            if left_out:
                line = b"%d lines of native code were left out\n" % left_out + line
                left_out = 0
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


def _used(pid: int) -> tuple[float, int]:
    """Seconds of CPU and bytes of memory of a process. Raises `OSError`."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
