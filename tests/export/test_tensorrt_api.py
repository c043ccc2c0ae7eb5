"""The builder calls TensorRT by names and arguments that both flavours really have."""

from pathlib import Path

import pytest

from engines.plans import TENSORRT_DTYPES
from export import tensorrt_network
from tests.tensorrt_api import Api, Use, describe, fault, forms, tensorrt_eleven, uses

tensorrt_rtx = pytest.importorskip("tensorrt_rtx")

OWNERS = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "fault": "ParserError",
    "config": "IBuilderConfig",
    "cache": "ITimingCache",
    "shapes": "IOptimizationProfile",
    "made": "IOptimizationProfile",
    "attention": "IAttention",
    "attentions": "IAttention",
    "layer": "ILayer",
    "tensor": "ITensor",
}
"""Name of a variable or field in `tensorrt_network` -> the class it holds."""

OURS = {"append", "items", "values"}
"""Methods of lists that share a name with one of the above."""

ONLY_RTX = {
    ("", "ComputeCapability"),
    ("IBuilderConfig", "num_compute_capabilities"),
    ("IBuilderConfig", "set_compute_capability"),
}
"""Used for tensorrt_rtx alone: it can build for a GPU that is not there."""
ONLY_TENSORRT: set[tuple[str, str]] = set()
"""Nothing: tensorrt_rtx has the rest too, timing caches as calls that do nothing."""

NOT_ON_THE_BASE = {"attention"}
"""Of IAttentionInputLayer, to which a layer of that type is cast first."""


@pytest.fixture(scope="module")
def apis(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Api]:
    return {
        "tensorrt_rtx": describe(tensorrt_rtx),
        "tensorrt": tensorrt_eleven(tmp_path_factory.mktemp("eleven")),
    }


def used() -> list[Use]:
    source = Path(tensorrt_network.__file__).read_text()
    found = [use for use in uses(source, OWNERS) if use.attribute not in OURS]
    return [
        Use("IAttentionInputLayer", use.attribute, use.arguments, use.line)
        if use.attribute in NOT_ON_THE_BASE
        else use
        for use in found
    ]


@pytest.mark.parametrize("flavour", ["tensorrt_rtx", "tensorrt"])
def test_everything_the_builder_uses_exists_with_these_arguments(
    apis: dict[str, Api], flavour: str
) -> None:
    lacks = ONLY_RTX if flavour == "tensorrt" else ONLY_TENSORRT
    wrong = [fault(use, apis[flavour]) for use in used() if (use.owner, use.attribute) not in lacks]
    assert [line for line in wrong if line] == []


def test_the_comparison_covers_the_builder() -> None:
    """So that renaming a variable cannot quietly take its calls out of the comparison."""
    found = {(use.owner, use.attribute) for use in used()}
    for needed in (
        ("Builder", "build_serialized_network"),
        ("Builder", "create_network"),
        ("INetworkDefinition", "add_cast"),
        ("OnnxParser", "parse"),
        ("IBuilderConfig", "add_optimization_profile"),
        ("IBuilderConfig", "set_compute_capability"),
        ("IOptimizationProfile", "set_shape"),
        ("IOptimizationProfile", "get_shape"),
        ("IAttention", "key_value_lengths"),
        ("IAttention", "decomposable"),
        ("LayerType", "KV_CACHE_UPDATE"),
        ("LayerType", "ATTENTION_INPUT"),
        ("BuilderFlag", "VERSION_COMPATIBLE"),
        ("ITimingCache", "serialize"),
    ):
        assert needed in found, needed


def test_a_wrong_name_and_a_wrong_argument_are_seen(apis: dict[str, Api]) -> None:
    source = "builder.build_engine(network)\nshapes.set_shape('x', a, b)\ntrt.LayerType.ATTN\n"
    wrong = [fault(use, apis["tensorrt"]) for use in uses(source, OWNERS)]
    named = [line for line in wrong if line]
    assert any("Builder.build_engine: no such name" in line for line in named)
    assert any("IOptimizationProfile.set_shape called with 3 arguments" in line for line in named)
    assert any("LayerType.ATTN: no such name" in line for line in named)


def test_signatures_are_read_with_their_defaults(apis: dict[str, Api]) -> None:
    parse = forms("parse", apis["tensorrt"]["OnnxParser"]["parse"])
    assert [(form.names, form.required) for form in parse] == [(["model", "path"], 1)]


def test_both_flavours_know_the_dtypes_and_callbacks(apis: dict[str, Api]) -> None:
    for flavour, api in apis.items():
        for name in TENSORRT_DTYPES.values():
            assert name in api["DataType"], (flavour, name)
        for name, arguments in (("phase_start", 3), ("step_complete", 2), ("phase_finish", 1)):
            (form,) = forms(name, api["IProgressMonitor"][name])
            assert len(form.names) == arguments, (flavour, name)
        (form,) = forms("log", api["ILogger"]["log"])
        assert form.names == ["severity", "msg"]
