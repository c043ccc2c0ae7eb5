"""Two real detectors beside a real box: three clocks on one machine, none disturbing the others.

Real time on a machine that may be busy: what is asserted is that each loop accounts for every
period and input, that nothing late is handed on, and that the voice's ledger is whole. How often
each was in time is printed, and is a figure of this machine.
"""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from appliance import demonstration, ledger, report
from appliance.clock import MonotonicClock, TickGrid
from appliance.contracts import Contract, Outcome, Terms
from appliance.side_loop import Input, Record, SideLoop
from engines.stream_model import AKIKI, SILERO, StreamModel, StreamSpec
from tests.appliance.lines.test_boxes import serve
from tests.appliance.test_box import DEADLINE_S
from tests.engines.test_stream_model import speech, weights

ROOT = Path(__file__).parents[2]
TALK_S = 6.0


class Side:
    """One model, its loop in a thread, and a feeder that hands it speech in real time."""

    def __init__(self, spec: StreamSpec, contract: Contract, bound_periods: int) -> None:
        self.spec = spec
        self.terms = Terms(contract, spec.period_ns, bound_periods * spec.period_ns)
        self.clock = MonotonicClock()
        self.records: list[Record] = []
        model = StreamModel(spec, weights(spec))
        model.step(np.zeros(spec.samples, np.float32))  # the first run allocates
        model.reset()
        self._talk = speech(spec.rate_hz)
        self.grid = TickGrid(0, spec.period_ns)
        self.loop = SideLoop(model, self.terms, self.clock, self.grid, self.records.append)
        self.fed = 0
        self._threads = [
            threading.Thread(target=self.loop.run, args=(1_000_000,), daemon=True),
            threading.Thread(target=self._feed, daemon=True),
        ]

    def _feed(self) -> None:
        talk = self._talk
        while not self.loop.stopping:
            # A chunk is complete when its period has passed; HARD owes its result one later.
            at_ns = self.grid.start_ns(self.fed) - 2_000_000
            self.clock.sleep_until(at_ns)
            begin = self.fed * self.spec.samples % (len(talk) - self.spec.samples)
            pcm = talk[begin : begin + self.spec.samples]
            self.loop.waiting.append(Input(self.fed, self.clock.now_ns(), pcm))
            self.fed += 1

    def start(self) -> None:
        self.grid = TickGrid(self.clock.now_ns() + 100_000_000, self.spec.period_ns)
        self.loop.grid = self.grid
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self.loop.stopping = True
        for thread in self._threads:
            thread.join(DEADLINE_S)


@pytest.mark.slow
def test_three_clocks_on_one_machine(tmp_path: Path) -> None:
    sides = [
        Side(SILERO, Contract.HARD, 1),
        Side(AKIKI, Contract.FRESHNESS, 2),
        Side(SILERO, Contract.EVENT, 2),
    ]
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:
        engine = serve(tmp_path, Path(folder), "a")
        for side in sides:
            side.start()
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "duplexbox", "appliance", "callers"),
                *(str(path) for path in demonstration.script().callers),
                *("--socket", folder, "--count", "2", "--talk", str(TALK_S), "--stagger", "0.3"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        for side in sides:
            side.stop()
        engine.terminate()
        assert engine.wait(DEADLINE_S) == 0
        assert engine.stderr is not None
        engine.stderr.close()
    # A machine so busy that the box lets nobody in is no fault of the models beside it.
    refused = ran.stderr.count(": refused")
    calls = ledger.read_folder(tmp_path / "a") if refused < 2 else []
    voice = report.summarise(calls)
    assert (voice.unexplained, len(voice.sessions)) == (0, 2 - refused), ran.stderr
    lines = [report.text(voice).splitlines()[-2]]
    for side in sides:
        numbers = [record.number for record in side.records]
        assert numbers == list(range(len(numbers)))  # one record each, in order, none missing
        assert len(numbers) * side.spec.period_ns > TALK_S * 1e9 * 0.9
        good = [record for record in side.records if record.outcome is Outcome.DELIVERED]
        assert min(record.margin_ns for record in good) >= 0
        assert np.mean([record.value > 0.5 for record in good]) > 0.4  # it hears the speech
        lines.append(
            f"{side.spec.name}, {side.terms.contract.value}: {len(good)} of {len(numbers)} in "
            f"time, smallest margin {min(r.margin_ns for r in good) / 1e6:.1f} ms"
        )
    sys.stdout.write("\n".join(lines) + "\n")
