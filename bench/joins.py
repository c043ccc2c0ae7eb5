"""Do callers who come in bursts and vanish at once cost those who talk a frame, on a busy machine?

    python -m bench.joins --together 50 --rounds 10 --busy 8

Starts a box, callers who talk, as many busy loops as asked, and then bursts of callers who are let
in and hang up at once, over the control socket itself. Prints what the ledger has of those who
talked: every frame, and what ticks took. Nothing else should run beside it.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from appliance import control, ledger, report
from appliance.control import ControlClient
from tests import small

BURN = "while True: pass"
TALK_S = 20
PAUSE_S = 0.5
ROOT = Path(__file__).parents[1]


def storm(client: ControlClient, together: int, rounds: int) -> dict[str, int]:
    """``rounds`` bursts of ``together`` callers; how many were let in, and how many not."""
    pause, counts = threading.Event(), {"let in": 0, "refused": 0}
    for number in range(rounds):
        for request in range(number * together, (number + 1) * together):
            client.send(control.Join(request, "bench", "nobody"))
        answers = 0
        while answers < together:
            message = client.receive(10)
            if isinstance(message, control.Admitted):
                client.send(control.Leave(message.session))
            if isinstance(message, control.Admitted | control.Refused):
                answers += 1
                counts["let in" if isinstance(message, control.Admitted) else "refused"] += 1
        pause.wait(PAUSE_S)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, help="(build/small)")
    parser.add_argument("--talking", type=int, default=2, help="callers who talk (2)")
    for name, default in (("together", 50), ("rounds", 10), ("busy", 8), ("priority", 10)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    args = parser.parse_args()
    bundle: Path = args.bundle or small.built()
    command = [sys.executable, "-m", "duplexbox", "appliance"]
    with tempfile.TemporaryDirectory(prefix="dbx-") as name:
        folder = Path(name)
        socket = folder / "box.sock"
        (folder / "box.toml").write_text(
            f'[engine]\nbundle = "{bundle.resolve()}"\n[clock]\ndrain_s = 1\n'
            f"realtime_priority = {args.priority}\n"
            f'[control]\nsocket = "{socket}"\n[ledger]\nfolder = "{folder / "calls"}"\n'
            f"[admission]\nmin_margin_ms = 0\n"
        )
        serve = [*command, "serve", "--config", str(folder / "box.toml")]
        box = subprocess.Popen(serve, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert box.stderr is not None
        for line in box.stderr:
            if "ready:" in line:
                break
        drain = threading.Thread(target=box.stderr.read, daemon=True)
        drain.start()
        speech = [str(path) for path in sorted((ROOT / "appliance/demo").glob("caller_*.wav"))]
        talk = [*command, "callers", *speech, "--socket", str(socket), "--talk", str(TALK_S)]
        talking = subprocess.Popen([*talk, "--count", str(args.talking)], cwd=ROOT)
        burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(args.busy)]
        try:
            threading.Event().wait(3)
            counts = storm(ControlClient.connect(socket), args.together, args.rounds)
            talking.wait(60)
        finally:
            for process in burning:
                process.kill()
            box.terminate()
            box.wait()
        calls = ledger.read_folder(folder / "calls")
    talked = [call for call in calls if call.header.line == "synthetic"]
    sys.stdout.write(f"{counts}\n{report.text(report.summarise(talked))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
