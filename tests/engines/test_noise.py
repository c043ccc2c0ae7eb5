"""Sampling noise: the published generator, and a function of (seed, frame) alone."""

import numpy as np
import pytest

from engines.noise import gumbel, philox


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers published with the generator (Random123, kat_vectors, philox4x32-10)
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_generator_gives_the_published_answers(
    counter: list[int], key: list[int], words: list[int]
) -> None:
    got = philox(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert got[:, 0].tolist() == words


def draw(seeds: list[int], frames: list[int], rows: int = 9, candidates: int = 250) -> np.ndarray:
    out = np.full((len(seeds), rows, candidates), np.nan, np.float32)
    gumbel(np.array(seeds, np.int64), np.array(frames, np.int64), out)
    return out


def test_noise_depends_on_seed_and_frame_and_not_on_the_batch() -> None:
    together = draw([5, 6, 5, -1], [0, 0, 1, 2**40])
    alone = [draw([5], [0]), draw([6], [0]), draw([5], [1]), draw([-1], [2**40])]
    for row, single in zip(together, alone, strict=True):
        assert row.tobytes() == single[0].tobytes()
    assert len({row.tobytes() for row in together}) == 4


def test_which_word_a_candidate_gets_stays_as_it_is_or_old_calls_replay_otherwise() -> None:
    seed, frame, candidates = (3 << 32) + 7, (5 << 32) + 11, 6  # two blocks of four a row
    noise = draw([seed], [frame], 3, candidates)
    for row in range(3):
        for candidate in range(candidates):
            counter = [2 * row + candidate // 4, 11, 5, 0]
            words = philox(np.array(counter, np.uint64)[:, None], np.array([[7], [3]], np.uint64))
            uniform = (int(words[candidate % 4, 0]) // 2**9 + 0.5) / 2**23
            assert noise[0, row, candidate] == pytest.approx(-np.log(-np.log(uniform)), rel=1e-5)


def test_every_candidate_gets_its_own_number_also_when_k_is_not_a_multiple_of_four() -> None:
    noise = draw([1], [0], rows=3, candidates=250)
    assert len(np.unique(noise)) == noise.size


def test_noise_is_finite_and_distributed_as_gumbel() -> None:
    noise = draw(list(range(40)), list(range(40))).ravel()  # 90,000 numbers
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.57722, abs=0.02)  # Euler's constant
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.03)
    below = [(noise < x).mean() for x in (-1.0, 0.0, 1.0, 3.0)]
    assert below == pytest.approx([np.exp(-np.exp(-x)) for x in (-1.0, 0.0, 1.0, 3.0)], abs=0.01)


def test_the_largest_and_smallest_uniforms_still_give_finite_noise() -> None:
    top = np.float32((2**23 - 1) + 0.5) * np.float32(2**-23)
    assert top < 1
    assert -np.log(-np.log(top)) == pytest.approx(16.6, abs=0.1)
