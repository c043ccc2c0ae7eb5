"""`duplexbox export show`: the bundle on a page, its bytes from the native clocks."""

import json
from pathlib import Path

import msgspec
import pytest

from engines.bundle import Manifest, RegionSpec
from engines.clocks import ClockKind, NativeClock, Order
from export import cli, show
from export.mistake import Mistake
from tests.engines import toy


def moshi_like() -> Manifest:
    """The toy with the 7B model's rings: 32 layers of keys and values, 80 ms ticks."""
    clock = NativeClock(ClockKind.RING, 1, "1", 3000, order=Order.MODULO)
    rings = tuple(
        RegionSpec(f"temporal.layers.{layer}.{side}", "bfloat16", (1, 3000, 4096), clock)
        for layer in range(32)
        for side in ("k", "v")
    )
    base = toy.manifest()
    timing = msgspec.structs.replace(
        base.timing, period_ns=80_000_000, sample_rate_hz=24_000, samples_per_frame=1920
    )
    return msgspec.structs.replace(base, regions=rings, timing=timing)


def test_bytes_per_session_are_those_of_the_published_model() -> None:
    facts = show.describe(moshi_like())
    assert facts["session_bytes"]["0 s"] == 0
    assert facts["session_bytes"]["60 s"] == 750 * 524_288  # 512 KiB per position
    assert facts["session_bytes"]["full"] == 1_572_864_000  # 1500 MiB
    assert facts["full_after_ticks"] == 3000


def test_layers_share_a_line_and_ages_have_columns() -> None:
    page = "\n".join(show.lines(moshi_like()))
    assert "temporal.layers.0.k (x 32)" in page
    assert page.count("temporal.layers") == 2
    assert "375.0 MiB" in page  # 60 s into the call
    assert "1.46 GiB" in page  # at full retention
    assert "a session stops growing 240 s into its call" in page


def test_an_untrained_bundle_says_so() -> None:
    assert "UNTRAINED" in next(show.lines(toy.manifest()))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.00 GiB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert show.binary(count) == text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy.write_toy(tmp_path / "toy")
    assert cli.main(["show", str(tmp_path / "toy")]) == 0
    assert "stages of one tick" in capsys.readouterr().out
    assert cli.main(["show", str(tmp_path / "toy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == ["hear", "noise", "speak"]
    assert cli.main(["show", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("duplexbox export show: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "batches", ["8", "2-8", "1-", "1-0", "1-x", "", "1-٣", "1-65536", "1-" + "9" * 5000]
)
def test_batch_profiles_have_no_gaps(batches: str) -> None:
    with pytest.raises(Mistake, match="write 1-N"):
        cli.largest_batch(batches)
    assert cli.largest_batch("1-16") == 16


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> int:
        raise ValueError("shapes do not match")

    monkeypatch.setattr(cli, "run_show", broken)
    with pytest.raises(ValueError, match="shapes do not match"):
        cli.main(["show", "anything"])
