"""What a newcomer with a persona needs before the tick thread hears of it, and what is left of it.

Turns the voice and persona of a request into a job for `priming`, with the state of an earlier
caller's prompt if one is kept; hands a finished job's snapshot to the store, and writes down what
the persona cost. The control thread uses it. It decides nothing itself: prompts are `persona`'s,
pieces `priming`'s, files `snapshot_store`'s.
"""

import logging
from collections import deque
from collections.abc import Mapping

from appliance.admission import Reason, Refusal
from appliance.clock import NS_PER_MS, NS_PER_S
from appliance.config import PersonaConfig
from appliance.control import PersonaReport, Prompted
from appliance.log import Seldom
from appliance.persona import Personas
from appliance.priming import CHUNKS, Job, PrimingDesk
from appliance.snapshot_store import SnapshotStore
from engines.bundle import Bundle, BundleError
from engines.snapshot import Snapshot

logger = logging.getLogger(__name__)


class Reception:
    """One box's personas. `start` and `stop` belong to the main thread."""

    def __init__(self, bundle: Bundle, desk: PrimingDesk | None, config: PersonaConfig) -> None:
        """desk: None when this engine feeds no prompts. Raises `BundleError`."""
        self.personas = Personas(bundle)
        self.fetched: deque[int] = deque()
        """Sessions whose snapshots have been looked for."""
        self._desk = desk
        self._broken = Seldom(logger, logging.ERROR)
        self._within_ns = config.within_s * NS_PER_S
        self._store: SnapshotStore | None = None
        if desk is not None and config.keep_mb:
            try:
                self._store = SnapshotStore(
                    config.snapshots, bundle.manifest, config.keep_mb * 2**20
                )
            except OSError as err:
                logger.warning(
                    "prompts are fed to every caller anew: [persona] snapshots %s: %s",
                    config.snapshots,
                    err.strerror or err,
                )

    @property
    def takes_persona(self) -> bool:
        """Whether a caller may say who the model is to be."""
        return self._desk is not None and self.personas.has_tokenizer

    @property
    def voices(self) -> tuple[str, ...]:
        """Names a caller may ask for."""
        return self.personas.voices if self._desk is not None else ()

    def start(self) -> None:
        if self._store is not None:
            self._store.start()

    def stop(self) -> None:
        """Write the snapshots that wait."""
        if self._store is not None:
            self._store.stop()

    def calibrate(self) -> None:
        """Time the pieces of a prompt before anybody is let in."""
        if self._desk is not None:
            self._desk.calibrate(self.personas.plain(CHUNKS[-1] + 2))

    def receive(
        self, voice: str, persona: str, settings: Mapping[str, float], now_ns: int
    ) -> Job | Refusal | None:
        """A job for the tick thread; None when the call begins without a prompt."""
        try:
            prompt = self.personas.prepare(voice, persona)
        except BundleError as err:  # the operator's: it names files, which no caller needs to know
            self._broken.say(now_ns, "%s", err)
            return Refusal(
                Reason.FAULT, f"voice {voice!r} cannot be read on the box; its log says why"
            )
        if prompt is None or isinstance(prompt, Refusal):
            return prompt
        if self._desk is None:
            return Refusal(Reason.FAULT, "the engine of this box feeds no prompts; call without")
        return Job(
            prompt=prompt,
            settings=dict(settings),
            loaded=None,
            keep=self._store is not None and prompt.shared_rows > 0,
            until_ns=now_ns + self._within_ns,
        )

    def fetch(self, session: int, job: Job) -> None:
        """Look for the state of an earlier caller's prompt; ``session`` is then in `fetched`."""
        if self._store is None:
            self.fetched.append(session)
            return

        def take(found: Snapshot | None) -> None:
            job.loaded = found
            self.fetched.append(session)

        self._store.ask(job.prompt, take)

    def prompted(self, job: Job | None) -> Prompted | None:
        """How a job that is done was fed."""
        return None if job is None else Prompted(job.prompt.key, tuple(job.chunks))

    def overdue(self) -> Refusal:
        """Why a newcomer whose prompt could not be fed in time is sent away."""
        seconds = self._within_ns // NS_PER_S
        return Refusal(
            Reason.TIME, f"ticks left too little time to feed the persona within {seconds} s"
        )

    def primed(self, session: int, job: Job) -> None:
        """The tick thread is done with it."""
        logger.info(
            "session %d primed: frames=%d ticks=%d spent_ms=%.1f snapshot=%s",
            session,
            job.prompt.rows,
            job.ticks,
            job.spent_ns / NS_PER_MS,
            "used" if job.used_snapshot else "none",
        )
        kept, job.kept = job.kept, None
        if kept is not None and self._store is not None:
            self._store.keep(kept)

    def report(self) -> PersonaReport | None:
        """Each number is right, two may be a tick apart. None when this box feeds no prompts."""
        if self._desk is None:
            return None
        counts, store = self._desk.counts, self._store
        return PersonaReport(
            priming=counts.waiting,
            primed=counts.done,
            rows=counts.rows,
            spent_ns=counts.spent_ns,
            longest_ns=counts.longest_ns,
            overruns=counts.overruns,
            snapshot_hits=store.hits if store is not None else 0,
            snapshot_misses=store.misses if store is not None else 0,
        )
