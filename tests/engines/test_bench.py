"""`duplexbox engines bench`: that it measures what it says, not how fast this machine is."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from engines import bench, bench_peer, cli
from engines.ort_executor import OrtExecutor
from tests.engines import toy


def test_stage_times_are_recorded_stage_by_stage_and_the_state_moves_on(tmp_path: Path) -> None:
    executor = OrtExecutor(toy.write_toy(tmp_path / "toy"), 2)
    now = iter([0, 5, 12, 30])
    spent = np.zeros(3, np.int64)
    executor.step_timed(1, lambda: next(now), spent)
    assert spent.tolist() == [5, 7, 18]
    executor.step(1)
    assert executor.region("frames")[0] == 2


def test_every_stage_and_the_whole_tick_get_a_line(tmp_path: Path) -> None:
    executor = OrtExecutor(toy.write_toy(tmp_path / "toy"), 2)
    timings = bench.measure(executor, 2, ticks=30)
    assert [t.name for t in timings] == ["hear", "noise", "speak", "tick"]
    assert all(0 < t.p50_us <= t.p99_us <= t.p999_us <= t.max_us for t in timings)
    assert timings[-1].max_us >= max(t.p50_us for t in timings)


def test_the_command_prints_json_and_refuses_nonsense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.write_toy(tmp_path / "toy")
    assert (
        cli.main(["bench", str(tmp_path / "toy"), "--batches", "1,2", "--ticks", "5", "--json"])
        == 0
    )
    rows = json.loads(capsys.readouterr().out)["timings"]
    assert [(row["name"], row["batch"]) for row in rows][3:5] == [("tick", 1), ("hear", 2)]
    assert cli.main(["bench", str(tmp_path / "toy"), "--batches", "1-4"]) == 1
    assert "write batch sizes with commas" in capsys.readouterr().err
    assert cli.main(["bench", str(tmp_path / "toy"), "--batches", "5"]) == 1
    assert "batch profiles of" in capsys.readouterr().err
    assert cli.main(["bench", str(tmp_path / "nowhere")]) == 1


def test_the_floor_is_weights_and_valid_rows_over_the_copy_rate(tmp_path: Path) -> None:
    manifest = toy.write_toy(tmp_path / "toy").manifest
    ring = 8  # bytes of a row of the toy's only ring
    assert bench.tick_bytes(manifest, 3, 0) == 3 * ring
    assert bench.tick_bytes(manifest, 3, 100) == 3 * ring * toy.RETAIN
    tick = bench.Timing("tick", 2, 1, 40.0, 50.0, 60.0, 70.0)
    found = bench.load(manifest, tick, 1.6)
    assert found.tick_bytes == 2 * 2 * ring
    assert found.floor_us == pytest.approx(20.0)
    assert found.share == pytest.approx(0.5)
    assert bench.load(manifest, tick, None).share is None


def test_old_sessions_are_timed_and_plotted(tmp_path: Path) -> None:
    toy.write_toy(tmp_path / "toy")
    plot = tmp_path / "plot.svg"
    command = ["bench", str(tmp_path / "toy"), "--ticks", "5", "--fill", "0,40"]
    assert cli.main([*command, "--plot", str(plot)]) == 0
    picture = ElementTree.fromstring(plot.read_text())
    said = "".join(picture.itertext())
    assert "deadline" in said
    assert "40 ticks old" in said
    assert cli.main(["bench", str(tmp_path / "toy"), "--fill", "x"]) == 1


PEER = """warning: something
{"peer": "moshi 0.2.13", "rows": [{"batch": 2, "encode_us": 1, "lm_us": 2, "decode_us": 3,
"p50_us": 90.0, "max_us": 99.0, "device_bytes": 7}]}"""


def test_the_peer_is_compared_where_the_batch_is_the_same() -> None:
    rows = bench_peer.read(PEER)
    ticks = [bench.Timing("tick", batch, 300, 30.0, 40.0, 50.0, 60.0) for batch in (1, 2)]
    assert bench_peer.compared(ticks, rows)[1].split() == ["2", "300", "0.03", "0.09", "3.00"]
    assert bench_peer.compared(ticks[:1], rows) == []
    with pytest.raises(ValueError, match="said something else"):
        bench_peer.read("Killed")


def test_a_peer_that_cannot_run_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"ended with code 1: no word\. It needs pip install"):
        bench_peer.run([1], 5, "cuda")
