"""A real box whose model is an echo: `python -m tests.stub_box FOLDER [SLOTS]`, until SIGTERM.

For runs with many calls, where the line is measured and a model would only be in the way. The
socket is FOLDER/box.sock, the calls are in FOLDER/calls.
"""

import signal
import sys
from pathlib import Path

from appliance import log
from appliance.box import Box
from appliance.clock import MonotonicClock
from appliance.config import (
    AdmissionConfig,
    ClockConfig,
    Config,
    ControlConfig,
    EngineConfig,
    LedgerConfig,
)
from tests.fakes import FakeExecutor, make_bundle


def main(folder: Path, slots: int) -> None:
    log.set_up()
    bundle = make_bundle(folder / "bundle", largest_batch=slots)
    config = Config(
        engine=EngineConfig(folder / "bundle"),
        clock=ClockConfig(drain_s=0),
        control=ControlConfig(folder / "box.sock"),
        ledger=LedgerConfig(folder / "calls"),
        admission=AdmissionConfig(calibrate_s=0, min_margin_ms=0),
    )
    box = Box(config, FakeExecutor(bundle, slots), MonotonicClock(), 2**34)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: box.drain())
    box.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 120)
