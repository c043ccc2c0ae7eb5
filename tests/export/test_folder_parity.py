"""A bundle built from a checkpoint folder against the published package reading the same files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.bundle import Bundle
from engines.ort_executor import OrtExecutor
from export import build, golden
from export.checkpoint import open_checkpoint
from export.checkpoint_config import LM_FILE, MIMI_FILE
from export.models.config import LmConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from export.source import from_checkpoint
from export.stages import PCM, graphs_of
from tests.export import folders
from tests.export.calls import GREEDY, speech
from tests.export.peer import peer_lm, peer_mimi

pytestmark = pytest.mark.torch

SEED = 4
"""With it no choice of these calls is nearer than float32 can tell apart."""
TICKS = 304
JOINS = {0: 0, 1: 7, 2: 31}
RESET = (1, 160)
FRAMES = 130
"""Of the PersonaPlex call: five wraps."""


def read_files(folder: Path, lm: LmConfig) -> tuple[Mimi, LanguageModel]:
    """What the files hold, by their own names: both sides must accept those strictly."""
    mimi, model = Mimi(folders.MODEL.mimi), LanguageModel(lm)
    mimi.load_state_dict(load_file(folder / MIMI_FILE))
    model.load_state_dict(load_file(folder / LM_FILE))
    return mimi.eval(), model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "moshi"
    folders.write(path, seed=SEED)
    return path


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    source = from_checkpoint(open_checkpoint(folder))
    return build.build(source, tmp_path_factory.mktemp("bundles") / "b", largest_batch=3)


def test_every_token_of_the_bundle_equals_the_package_for_300_frames(
    folder: Path, built: Bundle
) -> None:
    mimi, lm = read_files(folder, folders.MODEL.lm)
    codec, gen = peer_mimi(mimi), peer_lm(lm)
    codec.streaming_forever(3)
    gen.streaming_forever(3)
    executor = OrtExecutor(built, 3)
    pcm = speech(3, TICKS, 3, built.manifest.timing.samples_per_frame)
    assert TICKS // folders.MODEL.lm.context > 5
    live = torch.zeros(3, dtype=torch.bool)
    said: list[Tensor] = []
    for tick in range(TICKS):
        for slot in range(3):
            if JOINS[slot] == tick or (slot, tick) == RESET:
                row = torch.arange(3) == slot
                codec.reset_streaming(row)
                gen.reset_streaming(row)
                live |= row
                executor.join(slot, GREEDY)
        codec.set_exec_mask(live)
        gen.set_exec_mask(live)
        batch = int(live.sum())
        executor.audio_in[:batch] = pcm[tick, :batch].numpy()
        executor.step(batch)
        with torch.no_grad():
            codes = codec.encode(pcm[tick][:, None])
            tokens = gen.step(codes)[..., 0]
        np.testing.assert_array_equal(
            executor.wire("user_codes")[:batch], codes[:batch, :, 0].numpy(), f"at {tick}"
        )
        valid = tokens[:batch, 0] >= 0
        np.testing.assert_array_equal(executor.valid[:batch], valid.numpy(), f"at {tick}")
        ours = np.concatenate([executor.text[:batch, None], executor.wire("codes")[:batch]], 1)
        np.testing.assert_array_equal(ours[valid.numpy()], tokens[:batch][valid].numpy(), f"{tick}")
        said.append(tokens[:batch][valid])
    spread = [column.unique().numel() for column in torch.cat(said).T]
    assert min(spread) > folders.MODEL.lm.text_card // 2


def test_personaplex_is_moshi_cut_to_eight_steps_one_tick_earlier(tmp_path: Path) -> None:
    folders.write(tmp_path, folders.SIXTEEN, seed=SEED)
    found = open_checkpoint(tmp_path, context=folders.SIXTEEN.lm.context)
    assert (found.family, found.depth_steps_in_file) == ("personaplex", 16)
    source = from_checkpoint(found)
    assert source.config.lm.depth_codebooks == 8
    graphs = graphs_of(source.config, source.mimi, source.lm)
    pcm = golden.sound((FRAMES, 1, 1, source.config.mimi.samples_per_frame), seed=2)
    ours = golden.call(graphs, source, pcm)
    _, lm = read_files(tmp_path, folders.SIXTEEN.lm)
    theirs = personaplex(lm, ours["user_codes"][:, 0])
    assert [frame is None for frame in theirs[:4]] == [True, True, False, False]
    assert [bool(valid) for valid in ours["valid"][:3, 0]] == [False, True, True]
    for tick in range(1, FRAMES - 1):
        frame = theirs[tick + 1]
        assert frame is not None
        mine = [int(ours["text"][tick, 0]), *ours["codes"][tick, 0].tolist()]
        assert frame[:9] == mine, tick
    assert len({tuple(frame) for frame in theirs if frame}) > FRAMES // 2
    assert PCM not in ours


def personaplex(
    lm: LanguageModel, heard: Tensor, prompt: Sequence[Sequence[int]] = ()
) -> list[list[int] | None]:
    """One greedy session as PersonaPlex steps it, all its depth steps, on the package's nets.

    heard: (ticks, 8) codes of the caller; prompt: frames before that, every stream held. At tick
    t the codes go to position t (plus delay), and position t is held to them; what the model is
    fed is position t - 1, and what it chooses goes to position t wherever nothing is held. So a
    tick after the first is needed before anything that was heard is thought about. Returns text
    and 16 codes per tick, None while they fill.
    """
    config = lm.config
    model = peer_lm(lm).lm_model
    streams, delays, own = config.streams, config.delays, 9
    first = [config.text_card] + [config.card] * config.audio_streams
    cache: dict[tuple[int, int], int] = {}
    said: list[list[int] | None] = []
    with torch.no_grad(), model.streaming(1):
        told = [dict(enumerate(frame)) for frame in prompt]
        told += [dict(enumerate(codes, own)) for codes in heard.tolist()]
        for tick, forced in enumerate(told):
            for stream, code in forced.items():
                cache[stream, tick + delays[stream]] = code
            for stream in range(streams):
                if tick <= delays[stream]:
                    cache[stream, tick] = first[stream]
            if tick == 0:
                said.append(None)
                continue
            fed = torch.tensor([[[cache[stream, tick - 1]] for stream in range(streams)]])
            hidden, logits = model.forward_text(fed)
            held = {
                stream: cache[stream, tick] for stream in range(streams) if (stream, tick) in cache
            }
            last = held.get(0, int(logits.argmax()))
            cache[0, tick] = last
            with model.depformer.streaming(1):
                for step in range(config.depth_codebooks):
                    scores = model.forward_depformer(step, torch.tensor([[[last]]]), hidden)
                    last = held.get(step + 1, int(scores.argmax()))
                    cache[step + 1, tick] = last
            if tick <= config.max_delay:
                said.append(None)
                continue
            places = [tick - config.max_delay + delay for delay in delays]
            said.append([cache[stream, places[stream]] for stream in range(streams)])
    return said
