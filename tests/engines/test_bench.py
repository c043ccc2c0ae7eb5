"""`duplexbox engines bench`: that it measures what it says, not how fast this machine is."""

import json
from pathlib import Path

import numpy as np
import pytest

from engines import bench, cli
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
