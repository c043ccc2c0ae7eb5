"""A prompt on ONNX Runtime against ticks in torch that were told the same, and the call after."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from engines import snapshot
from engines.bundle import Bundle
from engines.noise import gumbel
from engines.ort_executor import OrtExecutor
from engines.ort_prefill import OrtParking, OrtPrimer
from engines.prefill import Prompt, chunk_rows, make_prompt
from engines.snapshot import Age
from export import build, tiny
from export.models.config import ModelConfig
from export.models.tokens import OFFSET, TOKENS
from export.prompt_stages import forced_tick, prompt_graphs
from export.source import open_source
from export.stages import NOISE, TEXT_TEMPERATURE
from export.tiny import PERSONA_MICRO
from tests.export.calls import GREEDY, SEED, TorchCalls, speech
from tests.export.persona import frames_of
from tests.export.test_folder_parity import personaplex

pytestmark = pytest.mark.torch

CONFIG = PERSONA_MICRO.lm
SAMPLES = PERSONA_MICRO.mimi.samples_per_frame
ROWS = 40
PINNED = 36
TICKS = 5 * CONFIG.context
RINGS = [f"temporal.layers.{layer}.{kv}" for layer in range(CONFIG.layers) for kv in "kv"]


def prompt_of(bundle: Bundle, rows: int = ROWS, embedded: int = 0) -> Prompt:
    spec = bundle.manifest.prompt
    assert spec is not None
    vectors = torch.randn(embedded, CONFIG.dimension, generator=torch.Generator().manual_seed(8))
    return make_prompt(spec, frames_of(CONFIG, rows).numpy(), vectors.numpy())


def feed(primer: OrtPrimer, slot: int, prompt: Prompt, most: int) -> list[int]:
    """All rows but the last, ``most`` at a time; what the chunks were."""
    primer.clear(slot)
    done, chunks = 0, []
    while done < prompt.shared_rows:
        rows = chunk_rows(done, prompt.shared_rows - done, most, primer.retain)
        primer.feed(slot, prompt, done, rows)
        done += rows
        chunks.append(rows)
    return chunks


@pytest.fixture(scope="module")
def pinned_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    source = open_source("personaplex-micro", seed=SEED, pinned=PINNED)
    return build.build(source, tmp_path_factory.mktemp("bundles") / "pinned", largest_batch=1)


def expected_calls(
    prompt: Prompt, settings: dict[str, float], config: ModelConfig = PERSONA_MICRO
) -> TorchCalls:
    """Session 0 after ``prompt``: every row by the plain tick of `forced_tick`."""
    calls = TorchCalls(config, SEED)
    calls.join(0, settings)
    state = calls.sessions[0]
    vectors: Iterator[torch.Tensor] = iter(torch.from_numpy(prompt.embedded))
    for frame in torch.from_numpy(prompt.frames):
        hidden, logits = forced_tick(calls.lm, state, frame, next(vectors, None))
    noise = np.zeros((1, 9, PERSONA_MICRO.sampling.candidates), np.float32)
    gumbel(state["sampling.seed"].numpy(), np.array([prompt.shared_rows]), noise)
    named = state | {"hidden": hidden, "text_logits": logits, NOISE: torch.from_numpy(noise)}
    depth = calls.graphs[2].run(named)
    ring = prompt_graphs(PERSONA_MICRO, calls.lm)[1].run(named)[TOKENS]
    # What it chooses is what a whole tick would have; what it leaves alone was forced.
    at = prompt.rows % CONFIG.token_rows
    assert torch.equal(ring[0, :2, at], depth[TOKENS][0, :2, at])
    assert ring[0, 2:9, at].tolist() == prompt.frames[-1, 2:9].tolist()
    state[TOKENS] = ring
    return calls


@torch.no_grad()
@pytest.mark.parametrize(
    ("most", "embedded", "sampled"),
    [(1, 12, False), (7, 0, True), (32, 12, True), (ROWS, 0, False)],
)
def test_a_prompt_in_any_chunks_and_the_call_after_it_equal_torch(
    persona_bundle: Bundle, most: int, embedded: int, sampled: bool
) -> None:
    prompt = prompt_of(persona_bundle, embedded=embedded)
    settings = {"sampling.seed": 10.0} | ({} if sampled else GREEDY)
    calls = expected_calls(prompt, settings)
    executor = OrtExecutor(persona_bundle, 2)
    primer = OrtPrimer(executor)
    chunks = feed(primer, 1, prompt, most)
    assert sum(chunks) == ROWS - 1
    assert max(chunks) == min(most, ROWS - 1)
    primer.settle(1, 0, settings, primer.open(1, prompt, settings))
    for name in RINGS:
        away = np.abs(executor.region(name)[0] - calls.sessions[0][name][0].numpy())
        assert away.max() < 1e-4, name
    for name in (TOKENS, OFFSET):
        expected = calls.sessions[0][name][0].numpy()
        np.testing.assert_array_equal(executor.region(name)[0], expected, name)
    ticks = TICKS if most == 7 else 12
    pcm, noise = speech(5, ticks, 1, SAMPLES), np.zeros((1, 9, 16), np.float32)
    for tick, age in zip(range(ticks), count(prompt.rows)):
        executor.audio_in[0] = pcm[tick, 0].numpy()
        executor.step(1)
        gumbel(np.array([10]), np.array([age]), noise)
        named = calls.step(pcm[tick], torch.from_numpy(noise))
        for name in ("user_codes", "codes", "valid", "text"):
            found = executor.wire(name)[:1]
            np.testing.assert_array_equal(found, named[name].numpy(), f"{name} at {tick}")
        assert np.abs(executor.audio_out[0] - named["pcm_out"][0, 0].numpy()).max() < 1e-4
        assert executor.valid[0]


def test_a_call_with_a_prompt_says_what_personaplex_would_one_tick_earlier(
    persona_bundle: Bundle,
) -> None:
    prompt, ticks = prompt_of(persona_bundle), 100
    executor = OrtExecutor(persona_bundle, 1)
    primer = OrtPrimer(executor)
    feed(primer, 0, prompt, 16)
    primer.settle(0, 0, GREEDY, primer.open(0, prompt, GREEDY))
    heard, said = [], []
    for frame in speech(9, ticks, 1, SAMPLES).numpy():
        executor.audio_in[:1] = frame
        executor.step(1)
        heard.append(executor.wire("user_codes")[0].tolist())
        said.append([int(executor.text[0]), *executor.wire("codes")[0].tolist()])
    lm = tiny.seeded(PERSONA_MICRO, SEED)[1]
    theirs = personaplex(lm, torch.tensor(heard), prompt.frames.tolist())
    # What they say first is the end of the prompt; ours begins with the model's own first frame.
    first = theirs[ROWS]
    assert first is not None
    assert first[1:9] == prompt.frames[-1, 1:9].tolist()
    for tick in range(ticks - 1):
        frame = theirs[ROWS + tick + 1]
        assert frame is not None
        assert frame[:9] == said[tick], tick
    assert len({tuple(frame) for frame in said}) > ticks // 2


def test_the_first_choice_is_the_sessions_own(persona_bundle: Bundle) -> None:
    prompt = prompt_of(persona_bundle)
    primer = OrtPrimer(OrtExecutor(persona_bundle, 1))
    feed(primer, 0, prompt, 32)
    hot = {TEXT_TEMPERATURE: 10.0, "sampling.temperature": 10.0}
    said = {
        tuple(primer.open(0, prompt, {"sampling.seed": float(seed)} | hot)[TOKENS][:2].flat)
        for seed in range(20)
    }
    assert len(said) > 10
    assert len({primer.open(0, prompt, GREEDY)[TOKENS].tobytes() for _ in range(3)}) == 1


def test_priming_a_newcomer_changes_no_bit_of_those_who_talk(persona_bundle: Bundle) -> None:
    pcm = speech(6, 30, 2, SAMPLES).numpy()
    prompt = prompt_of(persona_bundle)

    def listen(primed: bool) -> list[bytes]:
        executor = OrtExecutor(persona_bundle, 3)
        primer = OrtPrimer(executor)
        executor.join(0, {"sampling.seed": 4})
        executor.join(1, {"sampling.seed": 5})
        heard, done = [], 0
        for tick in range(30):
            executor.audio_in[:2] = pcm[tick]
            executor.step(2)
            heard.append(executor.audio_out[:2].tobytes() + executor.text[:2].tobytes())
            if primed and tick == 3:
                primer.clear(2)
            if primed and tick >= 3 and done < prompt.shared_rows:
                rows = min(3, prompt.shared_rows - done)
                primer.feed(2, prompt, done, rows)
                done += rows
        assert not primed or done == prompt.shared_rows
        return heard

    assert listen(primed=True) == listen(primed=False)


def test_a_prompted_session_is_saved_mid_call_and_goes_on_elsewhere(
    persona_bundle: Bundle, tmp_path: Path
) -> None:
    manifest, prompt, ticks = persona_bundle.manifest, prompt_of(persona_bundle), 9
    pcm = speech(8, 2 * ticks, 1, SAMPLES).numpy()
    executor = OrtExecutor(persona_bundle, 1)
    primer = OrtPrimer(executor)
    feed(primer, 0, prompt, 16)
    primer.settle(0, 0, {"sampling.seed": 5}, primer.open(0, prompt, {"sampling.seed": 5}))

    def listen(executor: OrtExecutor, slot: int, frames: np.ndarray) -> list[bytes]:
        heard = []
        for frame in frames:
            executor.audio_in[:] = 0.1
            executor.audio_in[slot] = frame[0]
            executor.step(executor.slots)
            heard.append(executor.audio_out[slot].tobytes() + executor.text[slot].tobytes())
        return heard

    listen(executor, 0, pcm[:ticks])
    age = Age(prompt.key, prompt.rows, ticks, whole=True)
    path = tmp_path / "call.snap"
    snapshot.write(path, manifest, snapshot.save(primer, manifest, 0, age))
    assert path.stat().st_size < manifest.session_bytes(manifest.ticks_until_full()) + 8192
    expected = listen(executor, 0, pcm[ticks:])
    other = OrtExecutor(persona_bundle, 3)
    listen(other, 0, pcm[:5])
    snapshot.restore(OrtParking(other), manifest, snapshot.read(path, manifest, age), 2)
    assert listen(other, 2, pcm[ticks:]) == expected
    assert len(set(expected)) == ticks


def test_a_kept_prompt_gives_the_same_call_bit_for_bit(
    persona_bundle: Bundle, tmp_path: Path
) -> None:
    manifest, prompt = persona_bundle.manifest, prompt_of(persona_bundle, embedded=5)
    age, path, settings = snapshot.prompt_age(prompt), tmp_path / "p.snap", {"sampling.seed": 3.0}
    pcm = speech(8, 12, 1, SAMPLES).numpy()

    def listen(kept: snapshot.Snapshot | None) -> list[bytes]:
        executor = OrtExecutor(persona_bundle, 2)
        primer, heard = OrtPrimer(executor), []
        if kept is None:
            fed = tuple(feed(primer, 1, prompt, 16))
            snapshot.write(path, manifest, snapshot.save(primer, manifest, 1, age, fed))
        else:
            primer.clear(1)
            for piece in snapshot.pieces(manifest, age, 700):
                region = manifest.region(piece.region)
                snapshot.put_piece(primer, 1, region, kept, piece)
        primer.settle(1, 0, settings, primer.open(1, prompt, settings))
        for frame in pcm:
            executor.audio_in[:1] = frame
            executor.step(1)
            heard.append(executor.audio_out[0].tobytes() + executor.text[0].tobytes())
        return heard

    fed = listen(None)
    kept = snapshot.read(path, manifest, age)
    assert kept.values == {}
    assert sorted(kept.rings) == sorted(RINGS)
    assert {ring.shape for ring in kept.rings.values()} == {(1, ROWS - 1, CONFIG.dimension)}
    assert listen(kept) == fed


def test_nothing_of_a_former_tenant_is_left_in_a_primed_slot(persona_bundle: Bundle) -> None:
    prompt = prompt_of(persona_bundle, rows=9)
    pcm = speech(7, 30, 1, SAMPLES).numpy()

    def listen(executor: OrtExecutor) -> list[bytes]:
        primer, heard = OrtPrimer(executor), []
        feed(primer, 1, prompt, 4)
        primer.settle(1, 0, GREEDY, primer.open(1, prompt, GREEDY))
        for frame in pcm:
            executor.audio_in[:1] = frame
            executor.step(1)
            heard.append(executor.audio_out[0].tobytes())
        return heard

    clean, poisoned = OrtExecutor(persona_bundle, 2), OrtExecutor(persona_bundle, 2)
    for _ in range(2):
        for region in persona_bundle.manifest.regions:
            if region.dtype == "float32" and region.bounds is None:
                poisoned.region(region.name)[:] = np.nan
        poisoned.step(2)
    assert np.isnan(poisoned.wire("hidden")).all()
    assert listen(poisoned) == listen(clean)


@pytest.mark.parametrize("rows", [PINNED + 7, PINNED - 7])
def test_a_pinned_persona_stays_through_five_wraps_of_a_call(
    pinned_bundle: Bundle, rows: int
) -> None:
    turning = CONFIG.context - PINNED
    ticks = CONFIG.context - rows + 5 * turning
    prompt = prompt_of(pinned_bundle, rows=rows)
    pinned = replace(PERSONA_MICRO, lm=replace(CONFIG, pinned=PINNED))
    calls = expected_calls(prompt, GREEDY, pinned)
    executor = OrtExecutor(pinned_bundle, 1)
    primer = OrtPrimer(executor)
    feed(primer, 0, prompt, 7)
    primer.settle(0, 0, GREEDY, primer.open(0, prompt, GREEDY))
    before = {}
    for tick, frame in enumerate(speech(5, ticks, 1, SAMPLES)):
        if rows + tick == CONFIG.context:
            before = {name: executor.region(name)[0, 0, :PINNED].copy() for name in RINGS}
        executor.audio_in[:1] = frame.numpy()
        executor.step(1)
        named = calls.step(frame)
        for name in ("codes", "text"):
            found = executor.wire(name)[:1]
            np.testing.assert_array_equal(found, named[name].numpy(), f"{name} at {tick}")
    for name in RINGS:
        np.testing.assert_array_equal(executor.region(name)[0, 0, :PINNED], before[name])
    assert {r.clock.pinned for r in pinned_bundle.manifest.regions if r.name in RINGS} == {PINNED}
