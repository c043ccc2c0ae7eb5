"""The codec's kernels on a GPU: against numpy, and against themselves in other batches."""

from collections.abc import Iterator

import numpy as np
import pytest

from bench import codec_kernels as bench
from engines import cuda
from engines.cuda import DevicePtr
from engines.kernels import codec, codec_gemm, codec_kinds
from engines.kernels.codec_gemm import Blocks, Product
from engines.kernels.codec_kinds import decoder_convs
from engines.kernels.codec_reference import Memory, turned
from tests.engines.kernels import codec_rig as rig

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Iterator[bench.Rig]:
    found = bench.Rig(3 << 30)
    yield found
    found.close()


@pytest.mark.parametrize("batch", [1, 3, 9])
@pytest.mark.parametrize("shape", [rig.SMALL, rig.MIMI], ids=["small", "mimi"])
def test_stages_answer_what_numpy_answers(
    device: bench.Rig, shape: codec_kinds.CodecShape, batch: int
) -> None:
    assert bench.check(device, shape, batch) == 0


@pytest.mark.parametrize("blocks", codec_gemm.BLOCKS, ids=lambda blocks: blocks.name)
def test_every_size_of_blocks_answers_the_same(device: bench.Rig, blocks: Blocks) -> None:
    def choose(product: Product, batch: int) -> Blocks:
        fits = blocks in codec_gemm.choices(product)
        return blocks if fits else codec_gemm.choose(product, batch)

    assert bench.check(device, rig.SMALL, 3, choose) == 0


@pytest.mark.parametrize("shape", [rig.SMALL, rig.MIMI], ids=["small", "mimi"])
def test_bits_of_a_session_do_not_depend_on_the_batch(
    device: bench.Rig, shape: codec_kinds.CodecShape
) -> None:
    assert bench.bits(device, shape, (1, 2, 7, 40)) == 0


@pytest.mark.parametrize("kind", codec_kinds.STAGES)
def test_a_nan_of_one_session_stays_with_it_and_replays_are_equal(
    device: bench.Rig, kind: str
) -> None:
    shape, batch, sick = rig.MIMI, 5, 2
    weights = rig.random_weights(codec_kinds.STAGES[kind](shape).weights)
    ins, outs = rig.tensors(kind, shape, batch)
    ill = [x.copy() for x in ins]
    for x in ill:
        if x.dtype == np.float32:
            x[sick] = np.nan
    found = []
    for given in (ins, ins, ill):
        memory = Memory(int(device.base), 1 << 29)
        placed = rig.place(memory, kind, shape, weights, given, outs)
        device.send(memory)
        for _ in range(3):
            device.run(placed.calls)
        found.append(rig.results(device.fetch(memory), placed, outs))
    well = [b for b in range(batch) if b != sick]
    for once, again, beside in zip(*found, strict=True):
        assert once.tobytes() == again.tobytes()
        assert once[well].tobytes() == beside[well].tobytes()


def test_matrices_are_turned_on_the_device_as_numpy_turns_them(device: bench.Rig) -> None:
    shape, kind = rig.SMALL, "codec_decode_last"
    by_role = {f"{conv.name}.weight": conv for conv in decoder_convs(shape)}
    for role, weight in rig.random_weights(codec_kinds.STAGES[kind](shape).weights).items():
        turn = codec.turn_of(role, weight.shape, kind, shape)
        if turn is None:
            continue
        conv = by_role.get(role)
        memory = Memory(int(device.base), 1 << 24)
        at, spare = memory.put(weight), memory.take(weight.nbytes)
        device.send(memory)
        device.kernels.forget()
        device.kernels.turn(DevicePtr(at), turn, DevicePtr(spare), device.stream)
        device.stream.synchronize()
        stride = conv.stride if conv is not None and conv.is_transposed else 0
        expected = turned(weight, stride)
        raw = cuda.read_device(DevicePtr(at), weight.nbytes)
        assert np.array_equal(np.frombuffer(raw, np.float32).reshape(expected.shape), expected)
