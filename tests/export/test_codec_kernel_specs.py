"""Launches of the codec's kernels, carried out by numpy, answer what the graphs' modules answer."""

import numpy as np
import pytest
import torch

from engines.kernels import codec_kinds
from engines.kernels.codec_reference import Memory, run
from export import codec_kernel_specs as specs
from export.models.config import MimiConfig, ModelConfig
from export.models.mimi import Mimi
from export.ring_stages import DecodePiece, EncodePiece
from export.tiny import MICRO
from tests.engines.kernels import codec_rig as rig

pytestmark = pytest.mark.torch

CONFIG = MimiConfig(
    filters=8,
    dimension=64,
    ratios=(4, 2, 3),
    layers=2,
    heads=2,
    feedforward=96,
    context=10,
    codebook_dimension=16,
    bins=64,
    codebooks=6,
    codebooks_used=5,
)
BATCH = 3


@pytest.fixture(scope="module")
def mimi() -> Mimi:
    torch.manual_seed(5)
    found = Mimi(CONFIG).eval().requires_grad_(False)
    for name, tensor in found.state_dict().items():
        if not name.endswith(("_initialized", "cluster_usage")):
            fan_in = max(1, tensor[0].numel()) if tensor.dim() > 1 else 10
            tensor.copy_(torch.randn_like(tensor) / fan_in**0.5)
    found.quantizer.prepare()
    return found


def model_config() -> ModelConfig:
    return ModelConfig("made up", mimi=CONFIG, lm=MICRO.lm)


@pytest.mark.parametrize("half", [EncodePiece, DecodePiece])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_launches_compute_what_the_piece_computes(
    mimi: Mimi, half: type[EncodePiece | DecodePiece], index: int
) -> None:
    piece = half(model_config(), mimi, index)
    kind, shape = specs.kind_of(piece), specs.codec_shape(CONFIG)
    assert not shape.fault()
    weights = {role: tensor.numpy() for role, _, tensor in specs.roles(piece)}
    ins, outs = rig.tensors(kind, shape, BATCH)
    for spec, x in zip(piece.inputs, ins, strict=True):
        assert x.shape[1:] == spec.row_shape, spec.name
    memory = Memory(1 << 20, 64 << 20)
    placed = rig.place(memory, kind, shape, weights, ins, outs)
    run(placed.calls, memory)
    found = rig.results(memory, placed, outs)
    expected = piece(*(torch.from_numpy(x) for x in ins))
    for spec, mine, theirs in zip(piece.outputs, found, expected, strict=True):
        if mine.dtype.kind == "f":
            np.testing.assert_allclose(mine, theirs.numpy(), atol=2e-5, err_msg=spec.name)
        else:
            assert (mine == theirs.numpy()).all(), spec.name


@pytest.mark.parametrize("half", [EncodePiece, DecodePiece])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_roles_are_those_the_kinds_ask_for(
    mimi: Mimi, half: type[EncodePiece | DecodePiece], index: int
) -> None:
    piece = half(model_config(), mimi, index)
    shapes = {role: tuple(tensor.shape) for role, _, tensor in specs.roles(piece)}
    wanted = codec_kinds.STAGES[specs.kind_of(piece)](specs.codec_shape(CONFIG))
    assert shapes == wanted.weights


@pytest.mark.parametrize("half", [EncodePiece, DecodePiece])
def test_weights_are_called_what_the_graphs_call_them(
    mimi: Mimi, half: type[EncodePiece | DecodePiece]
) -> None:
    """The name decides which place in the weights' file a role gets."""
    known = {**dict(mimi.named_parameters()), **dict(mimi.named_buffers())}
    for index in range(3):
        for role, name, tensor in specs.roles(half(model_config(), mimi, index)):
            called = known[name.removeprefix("mimi.")]
            assert called.data_ptr() == tensor.data_ptr(), role
            assert called.numel() == tensor.numel(), role
