"""Norms and layer scale against the package's own, where what they add cannot hide."""

import importlib
from typing import Any

import pytest
import torch

from export.models.transformer import CodecLayer, LayerScale, RmsNorm

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # the package's own
]

WIDTH = 32
QUIET = (1e-5, 1e-4, 1e-3)
"""Of the input: about the root of each epsilon, so that another one changes the answer."""

peer: Any = importlib.import_module("moshi.modules.transformer")


@pytest.mark.parametrize("loudness", QUIET)
def test_a_quiet_row_is_normed_with_the_packages_epsilon(loudness: float) -> None:
    x = loudness * torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    alpha = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(2))
    ours, theirs = RmsNorm(WIDTH), peer.create_norm_fn("rms_norm_f32", WIDTH)
    for norm in (ours, theirs):
        norm.load_state_dict({"alpha": alpha})
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x[None])[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("which", ["norm1", "norm2"])
def test_the_codecs_norms_have_the_packages_epsilon(which: str) -> None:
    x = 1e-3 * torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    layer = CodecLayer("a", WIDTH, 2, 2 * WIDTH, 8, advance=2)
    theirs = peer.create_norm_fn("layer_norm", WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(layer.get_submodule(which)(x), theirs(x), rtol=1e-5, atol=0)


def test_layer_scale_is_the_packages() -> None:
    ours, theirs = LayerScale(WIDTH), peer.LayerScale(WIDTH, 1e-4)
    scale = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3))
    for module in (ours, theirs):
        module.load_state_dict({"scale": scale})
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
