"""Two real detectors beside a real box: three contracts on one machine, none disturbing the voice.

Real time on a machine that may be busy: what is asserted is that every period and every input of
every caller has its record, that nothing late is handed on, and that the voice's ledger is whole.
How often each was in time is printed, and is a figure of this machine.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from appliance import cli, control, demonstration, ledger, report
from appliance.clock import MonotonicClock
from appliance.config import EXIT_CONFIG, BesideConfig, ConfigError
from appliance.contracts import Outcome
from appliance.ledger import Flag
from appliance.side_models import MOST_WAITING, SideModels, plan
from appliance.side_worker import Forget
from appliance.status import ask
from engines.bundle import Timing
from engines.stream_model import AKIKI, SILERO
from tests.appliance.lines.test_boxes import serve
from tests.appliance.test_box import DEADLINE_S, Line, Running, socket_path, spend
from tests.engines.test_stream_model import weights
from tests.fakes import PERIOD_NS, SAMPLES
from tests.small import SMALL

pytestmark = pytest.mark.clock

__all__ = ["socket_path"]
ROOT = Path(__file__).parents[2]
TALK_S = 4.0


def beside() -> tuple[BesideConfig, ...]:
    return (
        BesideConfig("speech", "silero-vad", weights(SILERO), "hard"),
        BesideConfig("speech-now", "akiki-vad", weights(AKIKI), "freshness"),
        BesideConfig("speech-all", "silero-vad", weights(SILERO), "event"),
    )


@pytest.mark.slow
def test_three_contracts_beside_the_voice_of_two_callers(tmp_path: Path) -> None:
    tables = "".join(
        f'[[beside]]\nname = "{one.name}"\nmodel = "{one.model}"\nfile = "{one.file}"\n'
        f'contract = "{one.contract}"\n'
        for one in beside()
    )
    with tempfile.TemporaryDirectory(prefix="dbx-") as folder:
        # As it is run for real, where the machine allows it: a busy one must not starve it.
        engine = serve(tmp_path, Path(folder), "a", tables, priority=10)
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "duplexbox", "appliance", "callers"),
                *(str(path) for path in demonstration.script(SMALL).callers),
                *("--socket", folder, "--count", "2", "--talk", str(TALK_S), "--stagger", "0.3"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        state = ask(Path(folder) / "a.sock")
        engine.terminate()
        assert engine.wait(DEADLINE_S) == 0
        assert engine.stderr is not None
        engine.stderr.close()
    # A machine so busy that the box lets nobody in is no fault of the models beside it.
    refused = ran.stderr.count(": refused")
    calls = ledger.read_folder(tmp_path / "a") if refused < 2 else []
    voice = report.summarise(calls)
    assert (voice.unexplained, len(voice.sessions)) == (0, 2 - refused), ran.stderr
    assert state.beside_restarts == 0
    for call in calls:
        # What the voice did not hear, they did not either: a busy machine leaves out ticks.
        deaf = int((call.ticks["flags"] & (Flag.CONCEALED | Flag.MISSED) > 0).sum())
        heard_ns = (len(call.ticks) - deaf) * PERIOD_NS
        assert heard_ns > TALK_S * 1e9 / 2
        for number, one in enumerate(call.header.beside):
            mine = call.side[call.side["model"] == number]
            missing = np.setdiff1d(np.arange(len(mine)), mine["index"])
            if one.contract == "hard":  # one for each period, whether or not its input came
                assert mine["index"].tolist() == list(range(len(mine)))
            else:  # one for each input; the synthetic callers lose a frame now and then
                assert len(np.unique(mine["index"])) == len(mine)
                assert len(missing) * one.period_ns <= max(12, 2 * deaf) * PERIOD_NS
            assert len(mine) * one.period_ns > heard_ns * 0.9
            good = mine[mine["outcome"] == Outcome.DELIVERED]
            assert good["margin_ns"].min() >= 0
            assert (good["value"] > 0.5).mean() > 0.4  # it hears the speech
    counted = {(one.name, one.records, one.delivered, one.alarms) for one in state.beside}
    assert counted == {(o.name, o.records, o.delivered, o.alarms) for o in voice.beside}
    sys.stdout.write(report.text(voice) + "\n")


@pytest.mark.slow
def test_their_process_may_die_and_no_call_notices(tmp_path: Path, socket_path: Path) -> None:
    running = Running(tmp_path, socket_path, lambda batch: None, beside=beside()[:1])
    running.start()
    side = running.box.beside
    line = Line(running)
    line.speak(8)
    line.settle(8)
    assert side._process is not None
    side._process.kill()
    running.wait_for(lambda: side.restarts == 1)
    line.speak(8)
    line.settle(8)
    line.speak(1, last=True)
    assert line.settle_all() == control.Gone(line.admitted.session, "finished")
    line.close()
    running.box.drain()
    running.join()
    assert running.error is None
    assert running.summary().unexplained == 0
    (call,) = ledger.read_folder(running.config.ledger.folder)
    numbers = call.side["index"]
    assert len(np.unique(numbers)) == len(numbers)  # none twice, in the order of time
    assert (np.diff(numbers) > 0).all()
    assert not list(Path("/dev/shm").glob(f"dbx-{os.getpid()}-*-tap"))


@pytest.mark.slow
def test_a_process_that_reads_nothing_for_a_while_is_told_all_of_it_later() -> None:
    """As one that loads its models while hundreds of sessions are on; one that hangs is ended."""
    (model,) = plan([BesideConfig("speech", "silero-vad", weights(SILERO))])
    sides = SideModels([model], Timing(PERIOD_NS, 24_000, SAMPLES), MonotonicClock())
    sides.start()
    process = sides._process
    assert process is not None
    try:
        process.send_signal(signal.SIGSTOP)
        for session in range(MOST_WAITING):
            sides._say(Forget(session))
        assert sides._unsent
        assert process.poll() is None
        process.send_signal(signal.SIGCONT)
        for _ in range(int(DEADLINE_S / 0.01)):
            if not sides._unsent:
                break
            spend(0.01)
            sides.look(0)
        assert (len(sides._unsent), process.poll(), sides.restarts) == (0, None, 0)
        process.send_signal(signal.SIGSTOP)
        for session in range(2 * MOST_WAITING):
            sides._say(Forget(session))
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        process.kill()
        sides.stop()


def test_what_is_no_model_is_a_config_error_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"junk")
    says = r"\[\[beside\]\] speech: .*junk\.onnx does not load.*install --no-deps silero-vad=="
    with pytest.raises(ConfigError, match=says):
        plan([BesideConfig("speech", "silero-vad", junk)])
    config = tmp_path / "box.toml"
    table = f'[[beside]]\nname = "speech"\nmodel = "silero-vad"\nfile = "{junk}"\n'
    paths = f'[control]\nsocket = "{tmp_path}/s"\n[ledger]\nfolder = "{tmp_path}"\n'
    config.write_text(f'[engine]\nbundle = "{SMALL}"\n{paths}{table}')
    assert cli.main(["check", "--config", str(config)]) == EXIT_CONFIG
    assert "junk.onnx does not load" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"akiki.* is not silero-vad"):
        plan([BesideConfig("speech", "silero-vad", weights(AKIKI))])
    one = BesideConfig("speech", "silero-vad", weights(SILERO))
    with pytest.raises(ConfigError, match="speech is there twice"):
        plan([one, one])


def test_a_process_that_does_not_start_is_a_config_error(tmp_path: Path) -> None:
    (model,) = plan([BesideConfig("speech", "silero-vad", weights(SILERO))])
    gone = model.__class__(model.name, model.model, str(tmp_path / "x"), model.contract, 1)
    sides = SideModels([gone], Timing(PERIOD_NS, 24_000, SAMPLES), MonotonicClock())
    with pytest.raises(ConfigError, match="did not start"):
        sides.start()
