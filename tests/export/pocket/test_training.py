"""Training sees positions as serving will, and a few steps of it teach something."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from export.models import tokens
from export.pocket import checkpoint, codec_training, lm_training, script, text_head
from export.pocket.lm_training import Pool
from export.pocket.mix import Mixer
from export.pocket.model import CODEBOOKS, POCKET
from export.pocket.pace import SAVE_S, Milestones, Pace, Told, rate_at
from export.pocket.script import Call, Stage
from export.pocket.world import IDS, PADDING
from tests.export.pocket import hums

CPU = torch.device("cpu")
SIZE = lm_training.Size(calls=2, chunk=2, frames=40, batch=2, ticks=30, refresh=5)


@pytest.fixture(scope="module")
def stage() -> Stage:
    return hums.stage()


def test_positions_are_what_a_served_call_reads_tick_by_tick(stage: Stage) -> None:
    """The delay ring of serving, told the same codes, reads what training reads at once."""
    pool = Pool(Mixer(stage, CPU), codec_training.Codec(stage.labels.count, 0), SIZE)
    generator = torch.Generator().manual_seed(1)
    pool.codes = torch.randint(0, 256, pool.codes.shape, generator=generator).to(torch.uint8)
    pool.text = torch.randint(3, 60, pool.text.shape, generator=generator).to(torch.uint8)
    pool.full = 2
    trainer = lm_training.Trainer(pool, stage.labels.count, SIZE)
    trainer.rows.copy_(torch.tensor([1, 0]))
    ids, _, _ = trainer.positions()

    config = POCKET.lm
    desk, caller = torch.split(pool.codes[[1, 0]].long(), CODEBOOKS, dim=-1)
    text = pool.text[[1, 0]].long()
    ring = torch.full((2, config.streams, config.token_rows), tokens.UNGENERATED)
    for tick in range(SIZE.ticks):
        offset = torch.full((2,), tick)
        ring = tokens.hear(config, ring, offset, caller[:, tick])
        read = tokens.read(config, ring, offset)
        assert (read == ids[:, tick]).all(), tick
        # Position tick + 1: its word and semantic code, and the acoustic codes of tick.
        said = torch.cat([text[:, tick + 1, None], desk[:, tick + 1, :1], desk[:, tick, 1:]], dim=1)
        wanted = ids[:, tick + 1, : 1 + CODEBOOKS]
        begun = wanted < config.card  # the initial token is never chosen
        assert (said[begun] == wanted[begun]).all(), tick
        ring = tokens.speak(config, ring, offset + 1, said)
        heard = tokens.align(config, ring, offset + 1)
        if tick >= 1:
            assert (heard.codes == desk[:, tick]).all(), tick
            assert (heard.text == text[:, tick]).all(), tick


def test_stretches_from_the_middle_of_a_call_have_no_beginning(stage: Stage) -> None:
    pool = Pool(Mixer(stage, CPU), codec_training.Codec(stage.labels.count, 0), SIZE)
    pool.codes += torch.arange(40, dtype=torch.uint8).view(1, -1, 1)
    pool.full = 2
    trainer = lm_training.Trainer(pool, stage.labels.count, SIZE)
    trainer.starts.copy_(torch.tensor([0, 5]))
    ids, _, _ = trainer.positions()
    assert (ids[0, 0] == trainer.initial).all()
    assert (ids[1, 0, 1:] == 5 - trainer.delays[1:]).all()


def test_a_few_steps_teach_the_language_model_something(stage: Stage, tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = lm_training.Size(calls=2, chunk=2, frames=60, batch=4, ticks=50, refresh=100)
    pool = Pool(Mixer(stage, CPU), codec_training.Codec(stage.labels.count, 0), size)
    pool.put([script.written(stage, f"few {n}", size.frames) for n in range(2)])
    assert bool(pool.speaks.any())
    trainer = lm_training.Trainer(pool, stage.labels.count, size)
    trainer.rate.fill_(2e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(12):
        trainer.feed(generator)
        losses.append(trainer.step())
    text, _, semantic, acoustic, heard = losses[-1] / losses[0]
    assert max(text, semantic, acoustic, heard) < 0.9


def test_a_digit_weighs_more_than_a_word_and_a_word_more_than_none(stage: Stage) -> None:
    pool = Pool(Mixer(stage, CPU), codec_training.Codec(stage.labels.count, 0), SIZE)
    weights = lm_training.Trainer(pool, stage.labels.count, SIZE).weights
    assert weights[IDS["five"]] > weights[IDS["hello"]] > weights[PADDING] > 0


def test_a_lease_ends_in_time_and_leaves_a_checkpoint_that_continues(
    stage: Stage, tmp_path: Path
) -> None:
    size = lm_training.Size(calls=2, chunk=2, frames=40, batch=1, ticks=20)

    def calls() -> Iterator[list[Call]]:
        while True:
            yield [script.written(stage, f"lease {n}", size.frames) for n in range(2)]

    said: list[str] = []
    steps = []
    for _ in range(2):
        pool = Pool(Mixer(stage, CPU), codec_training.Codec(stage.labels.count, 0), size)
        trainer = lm_training.Trainer(pool, stage.labels.count, size)
        told = lm_training.train(trainer, calls(), tmp_path, Pace(0.3), said.append)
        steps.append(told["steps"])
    assert steps[1] > steps[0] >= 1
    assert any(line.startswith("lm step") for line in said)


def test_a_head_is_fitted_anew_and_nothing_else_moves(stage: Stage, tmp_path: Path) -> None:
    size = lm_training.Size(calls=4, chunk=4, frames=40, batch=4, ticks=39)
    codec = codec_training.Codec(stage.labels.count, 0)
    trainer = lm_training.Trainer(Pool(Mixer(stage, CPU), codec, size), stage.labels.count, size)
    begun = {"steps": 7.0}
    checkpoint.save(tmp_path, "codec", codec, torch.optim.SGD(codec.parameters(), 0.1), {})
    checkpoint.save(tmp_path, "lm", trainer.speaker, trainer.optimizer, begun)
    said: list[str] = []
    text_head.refit(stage, tmp_path, 3, 0, said.append, frames=40)
    before = {name: value.clone() for name, value in trainer.speaker.state_dict().items()}
    assert checkpoint.restore(tmp_path / "lm.safetensors", trainer.speaker) == begun
    after = trainer.speaker.state_dict()
    moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert moved == ["lm.text_linear.weight"]
    due = [float(line.split("due ")[1].split("%")[0]) for line in said]
    before_it, after_it = due
    assert after_it > before_it, said


def test_the_rate_rises_stays_and_falls() -> None:
    assert rate_at(0.0, 0, 1.0) < 0.01
    assert rate_at(0.3, 5_000, 1.0) == 1.0
    assert rate_at(1.0, 5_000, 1.0) == pytest.approx(0.02)
    falling = [rate_at(share / 10, 5_000, 1.0) for share in range(6, 11)]
    assert falling == sorted(falling, reverse=True)


class Given(Pace):
    """A run whose time is what the test says."""

    now_s = 0.0

    def spent_s(self) -> float:
        return self.now_s


def test_a_run_speaks_forty_times_and_saves_every_minute_and_at_its_end() -> None:
    pace = Given(400.0)
    said: list[str] = []
    saved: list[Told] = []
    marks = Milestones(pace, "lm", ("text",), {"seconds": 100.0}, said.append, saved.append)
    for step in range(1, 401):
        pace.now_s = float(step)
        marks.passed(step, lambda: [0.12345], step == 400)
    assert len(said) == 40
    assert said[0] == "lm step 1, 1.0 s: text 0.123"
    assert [told["steps"] for told in saved] == [*range(60, 400, int(SAVE_S)), 400]
    assert saved[-1] == {"steps": 400, "seconds": 500.0, "text": 0.1235}
    assert marks.told == saved[-1]
