"""The full-size models are the same code with other numbers: their keys, shapes and state."""

import pytest
import torch

from export.models.config import MOSHI_7B, PERSONAPLEX_7B, ROPE_MAX_PERIOD
from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from export.stages import all_regions, graphs_of
from tests.export.peer import loaders

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def moshi() -> tuple[Mimi, LanguageModel]:
    with torch.device("meta"):
        return Mimi(MOSHI_7B.mimi), LanguageModel(MOSHI_7B.lm, ring_dtype="bfloat16")


def test_moshi_7b_has_the_tensors_of_the_published_checkpoint(
    moshi: tuple[Mimi, LanguageModel],
) -> None:
    tensors = moshi[1].state_dict()
    assert len(tensors) == 355
    assert sum(tensor.numel() for tensor in tensors.values()) == 7_687_729_152
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["emb.15.weight"] == [2049, 4096]
    assert shapes["transformer.layers.31.self_attn.in_proj_weight"] == [12_288, 4096]
    assert shapes["transformer.layers.0.gating.linear_in.weight"] == [22_528, 4096]
    assert shapes["out_norm.alpha"] == [1, 1, 4096]
    assert shapes["depformer.layers.5.self_attn.in_proj_weight"] == [24_576, 1024]
    assert shapes["depformer.layers.5.self_attn.out_proj.weight"] == [8192, 1024]
    assert shapes["depformer.layers.0.gating.7.linear_out.weight"] == [1024, 2816]
    assert shapes["depformer_text_emb.weight"] == [32_001, 1024]


def test_mimi_has_the_tensors_of_the_published_checkpoint(
    moshi: tuple[Mimi, LanguageModel],
) -> None:
    tensors = moshi[0].state_dict()
    assert len(tensors) == 318
    assert sum(tensor.numel() for tensor in tensors.values()) == 96_151_393
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["encoder.model.12.conv.conv.weight"] == [1024, 512, 16]
    assert shapes["decoder.model.2.convtr.convtr.weight"] == [1024, 512, 16]
    assert shapes["downsample.conv.conv.conv.weight"] == [512, 512, 4]
    assert shapes["upsample.convtr.convtr.convtr.weight"] == [512, 1, 4]
    book = "quantizer.rvq_rest.vq.layers.30._codebook."
    assert shapes[book + "embedding_sum"] == [2048, 256]
    assert shapes[book + "cluster_usage"] == [2048]


def test_a_full_session_owns_the_bytes_the_package_measures(
    moshi: tuple[Mimi, LanguageModel],
) -> None:
    graphs = graphs_of(MOSHI_7B, *moshi, hidden="bfloat16")
    regions = {region.name: region for region in all_regions(graphs, MOSHI_7B)}
    temporal = [r.whole_bytes for name, r in regions.items() if name.startswith("temporal.")]
    assert sum(temporal) == 1_572_864_000
    codec = [
        r.whole_bytes
        for name, r in regions.items()
        if name.startswith("mimi.") and not name.endswith(".offset")
    ]
    # Two KV stacks of 8 layers, 250 rows, and 96,792 bytes of convolution state.
    assert sum(codec) == 2 * 8_192_000 + 96_792
    assert regions["lm.tokens"].shape == (17, 3)


def test_personaplex_is_moshi_with_one_row_less_of_context() -> None:
    ours, theirs = PERSONAPLEX_7B.lm, MOSHI_7B.lm
    assert ours.context == theirs.context - 1 == 2999
    assert ours.streams == theirs.streams == 17
    assert PERSONAPLEX_7B.mimi == MOSHI_7B.mimi


def test_numbers_that_leave_no_trace_in_shapes_are_the_packages() -> None:
    theirs, lm = loaders._lm_kwargs, MOSHI_7B.lm
    assert list(lm.delays) == theirs["delays"]
    assert (lm.context, lm.heads, lm.depth_heads) == (
        theirs["context"],
        theirs["num_heads"],
        theirs["depformer_num_heads"],
    )
    assert lm.text_padding_id == theirs["existing_text_padding_id"]
    assert theirs["max_period"] == loaders._transformer_kwargs["max_period"] == ROPE_MAX_PERIOD
    assert MOSHI_7B.mimi.context == loaders._transformer_kwargs["context"]
