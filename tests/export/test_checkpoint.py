"""Published folders: what is read of them, and what is refused with which way out."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file

from export import checkpoint
from export import checkpoint_layout as layout
from export.checkpoint import open_checkpoint
from export.checkpoint_config import CONFIG_FILE, LM_FILE, MIMI_FILE, TEXT_FILE
from export.checkpoint_file import CheckpointError
from export.models.config import LmConfig
from export.models.lm import LanguageModel
from export.models.mimi import Mimi
from tests.export.checkpoints import LM, MIMI, PERSONAPLEX, Tensors, change, tensors, write_folder

pytestmark = pytest.mark.torch

IN_PROJ = "transformer.layers.0.self_attn.in_proj_weight"
FULL_CONFIG = {
    "dim": 128,
    "n_q": 16,
    "dep_q": 8,
    "num_heads": 2,
    "context": 50,
    "norm": "rms_norm_f32",
}


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def renamed(*pairs: tuple[str, str]) -> Callable[[Tensors], None]:
    def edit(held: Tensors) -> None:
        for old, new in pairs:
            held[new] = held.pop(old)

    return edit


def split(held: Tensors) -> None:
    """Write every attention matrix the way newer tools do, one per depth step."""
    for name in list(held):
        base, many = layout.split_base(name)
        if many:
            whole = held.pop(name)
            steps = whole.shape[0] // whole.shape[1] // (3 if many == "in_projs" else 1)
            for step, part in enumerate(whole.chunk(steps)):
                held[f"{base}{many}.{step}.weight"] = part.clone()


# What is read.


def test_a_folder_without_config_is_read_off_its_shapes(tmp_path: Path) -> None:
    found = open_checkpoint(write_folder(tmp_path))
    assert found.family == "moshi"
    assert found.config.lm == LM
    assert found.config.mimi == MIMI
    assert (found.config.lm.context, found.dtype, found.split) == (3000, "bfloat16", False)


def test_config_json_adds_heads_and_context(tmp_path: Path) -> None:
    found = open_checkpoint(
        write_folder(tmp_path, dim=128, n_q=16, dep_q=8, num_heads=2, context=50)
    )
    assert (found.config.lm.heads, found.config.lm.context) == (2, 50)


def test_personaplex_is_cut_to_eight_steps_and_its_own_context(tmp_path: Path) -> None:
    held = tensors(PERSONAPLEX, torch.bfloat16)
    folder = write_folder(tmp_path, PERSONAPLEX, model_type="personaplex", version="1")
    found = open_checkpoint(folder)
    assert found.family == "personaplex"
    assert (found.depth_steps_in_file, found.config.lm.depth_codebooks) == (16, 8)
    assert found.config.lm.context == 2999
    assert found.parameters_in_file == sum(tensor.numel() for tensor in held.values())
    depth = "depformer.layers.0.self_attn.in_proj_weight"
    (source,) = found.lm.sources(depth)
    assert source.shape == (8 * 3 * 64, 64)
    assert torch.equal(found.lm.tensor(depth), held[depth][: 8 * 3 * 64])


def test_context_can_be_asked_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, PERSONAPLEX)
    assert open_checkpoint(folder, context=3000).config.lm.context == 3000


@pytest.mark.parametrize("config", [LM, PERSONAPLEX])
def test_fused_and_split_are_the_same_once_read(config: LmConfig, tmp_path: Path) -> None:
    fused = open_checkpoint(write_folder(tmp_path / "fused", config))
    folder = write_folder(tmp_path / "split", config)
    change(folder / LM_FILE, split)
    change(folder / MIMI_FILE, split)
    found = open_checkpoint(folder)
    assert (fused.split, found.split) == (False, True)
    assert found.config == fused.config
    for one, other in ((fused.lm, found.lm), (fused.mimi, found.mimi)):
        assert list(one.shapes) == list(other.shapes)
        for (name, expected), (same, tensor) in zip(one.tensors(), other.tensors(), strict=True):
            assert (name, torch.equal(expected, tensor)) == (same, True)
    depth = "depformer.layers.0.self_attn.out_proj.weight"
    assert (len(fused.lm.sources(depth)), len(found.lm.sources(depth))) == (1, 8)


def test_older_names_of_the_codec_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    book = "quantizer.rvq_first.vq.layers.0._codebook"
    other = "quantizer.rvq_rest.vq.layers.3._codebook"
    before = open_checkpoint(folder).mimi.tensor(f"{book}.embedding_sum").clone()
    edit = renamed(
        (f"{book}.embedding_sum", f"{book}.embed_sum"),
        (f"{book}.cluster_usage", f"{book}.cluster_size"),
        (f"{book}._initialized", f"{book}.inited"),
        (f"{other}.embedding_sum", f"{other}.embed_avg"),
    )
    change(folder / MIMI_FILE, edit)
    found = open_checkpoint(folder)
    assert found.config.mimi == MIMI
    assert torch.equal(found.mimi.tensor(f"{book}.embedding_sum"), before)


def test_the_modules_take_everything_and_want_nothing_else(tmp_path: Path) -> None:
    found = open_checkpoint(write_folder(tmp_path, PERSONAPLEX))
    with torch.device("meta"):
        lm, mimi = LanguageModel(found.config.lm), Mimi(found.config.mimi)
    lm.load_state_dict(dict(found.lm.tensors()), strict=True, assign=True)
    mimi.load_state_dict(dict(found.mimi.tensors()), strict=True, assign=True)


def test_every_source_points_at_the_tensor_in_its_file(tmp_path: Path) -> None:
    found = open_checkpoint(write_folder(tmp_path))
    raw = (tmp_path / LM_FILE).read_bytes()
    for name, tensor in found.lm.tensors():
        (source,) = found.lm.sources(name)
        there = raw[source.offset : source.offset + source.length]
        assert (source.file, source.shape) == (tmp_path / LM_FILE, tuple(tensor.shape))
        assert there == tensor.view(torch.int16).numpy().tobytes()


def test_a_graph_can_point_into_the_checkpoint(tmp_path: Path) -> None:
    found = open_checkpoint(write_folder(tmp_path))
    name = "downsample.conv.conv.conv.weight"
    (source,) = found.mimi.sources(name)
    weight = onnx.TensorProto(
        name="weight",
        data_type=onnx.TensorProto.FLOAT,
        dims=source.shape,
        data_location=onnx.TensorProto.EXTERNAL,
    )
    where = {"location": source.file.name, "offset": source.offset, "length": source.length}
    for key, value in where.items():
        weight.external_data.add(key=key, value=str(value))
    out = onnx.helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, source.shape)
    node = onnx.helper.make_node("Identity", ["weight"], ["out"])
    graph = onnx.helper.make_graph([node], "pointing", [], [out], [weight])
    opset = onnx.helper.make_opsetid("", 24)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=11)
    (tmp_path / "stage.onnx").write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(tmp_path / "stage.onnx")
    assert torch.equal(torch.from_numpy(session.run(None, {})[0]), found.mimi.tensor(name))


def test_one_other_name_for_the_language_model_will_do(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / LM_FILE).rename(folder / "consolidated.safetensors")
    assert open_checkpoint(folder).lm.file.path.name == "consolidated.safetensors"


def test_config_json_can_name_the_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, moshi_name="b.safetensors", tokenizer_name="t.model")
    (folder / LM_FILE).rename(folder / "b.safetensors")
    (folder / "a.safetensors").write_bytes(b"")
    (folder / "t.model").write_bytes(b"")
    assert open_checkpoint(folder).text_tokenizer == folder / "t.model"


def test_the_codec_may_lie_elsewhere(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    (folder / MIMI_FILE).rename(tmp_path / "codec.safetensors")
    assert open_checkpoint(folder, mimi=tmp_path / "codec.safetensors").config.mimi == MIMI


def test_what_was_detected_is_said_in_two_lines(tmp_path: Path) -> None:
    lm, mimi = checkpoint.lines(open_checkpoint(write_folder(tmp_path, PERSONAPLEX)))
    assert lm == (
        "personaplex-2x128: dep_q 16 cut to 8, 17 streams, context 2,999, 2 layers of 128 "
        f"(1 heads), depth 1 of 64, {layout.values(layout.lm_shapes(PERSONAPLEX)):,} parameters, "
        "bfloat16, fused keys"
    )
    assert mimi.startswith("mimi: 24,000 Hz, 1,920 samples a frame, 8 of 32 codebooks")


def test_fingerprints_tell_values_apart(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    found = open_checkpoint(folder)
    quick, whole = found.fingerprint(), found.fingerprint(content=True)
    assert quick == open_checkpoint(folder).fingerprint()
    assert (quick.sha256 != whole.sha256, whole.covers) == (True, "every byte")
    raw = bytearray((folder / LM_FILE).read_bytes())
    first, last = found.lm.file.tensors["emb.0.weight"].offset, len(raw) - 1
    for at in (first, last):
        raw[at] ^= 1
        (folder / LM_FILE).write_bytes(raw)
        assert open_checkpoint(folder).fingerprint(content=True) != whole
        raw[at] ^= 1
    raw[first] ^= 1
    (folder / LM_FILE).write_bytes(raw)
    assert open_checkpoint(folder).fingerprint() != quick


# What is refused.


def test_missing_tensors_are_counted_and_the_first_five_named(tmp_path: Path) -> None:
    def edit(held: Tensors) -> None:
        for stream in range(1, 8):
            del held[f"emb.{stream}.weight"]

    folder = write_folder(tmp_path)
    change(folder / LM_FILE, edit)
    assert (
        "lacks 7 (emb.1.weight, emb.2.weight, emb.3.weight, emb.4.weight, emb.5.weight, ...) of "
        f"the {len(layout.lm_shapes(LM))} tensors"
    ) in refusal(folder)


def test_a_missing_part_of_a_split_tensor_is_named(tmp_path: Path) -> None:
    part = "depformer.layers.0.self_attn.in_projs.3.weight"
    folder = write_folder(tmp_path)

    def edit(held: Tensors) -> None:
        split(held)
        del held[part]

    change(folder / LM_FILE, edit)
    assert f"lacks 1 ({part})" in refusal(folder)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda held: held.update(extra=torch.zeros(1)),
            "holds 1 (extra) tensors this model does not have",
        ),
        (
            renamed(("out_norm.alpha", "out_norm.weight")),
            "lacks 1 (out_norm.alpha) of the",
        ),
        (
            lambda held: held.update({IN_PROJ: torch.zeros(12, 128)}),
            f"{IN_PROJ} (expected [384, 128], found [12, 128])",
        ),
        (
            lambda held: held.update({"text_emb.weight": torch.zeros(25)}),
            "text_emb.weight with shape [25]; 2 axes",
        ),
        (lambda held: held.pop("text_emb.weight"), "lacks text_emb.weight, so it is not"),
        (
            lambda held: held.update({f"{IN_PROJ}_scb": torch.zeros(384)}),
            "8-bit weights of bitsandbytes; export the bf16 checkpoint",
        ),
        (
            renamed(("depformer_in.0.weight", "depformer.0.linear_in.weight")),
            "laid out for Rust (candle)",
        ),
        (
            renamed(("depformer_in.0.weight", "depformer.slices.0.linear_in.weight")),
            "laid out for MLX; use the PyTorch checkpoint",
        ),
        (renamed(("emb.0.weight", "audio_embs.0.weight")), "laid out for MLX"),
        (
            renamed(("text_emb.weight", "model.embed_tokens.weight")),
            "laid out for the transformers library",
        ),
        (
            lambda held: held.update({"text_linear.lora_A.weight": torch.zeros(1)}),
            "LoRA adapters; merge them",
        ),
        (
            lambda held: held.update({"condition_provider.x": torch.zeros(1)}),
            "a model with conditioners",
        ),
        (
            lambda held: held.update({IN_PROJ: torch.zeros(384, 128, dtype=torch.int8)}),
            "quantised weights are not read",
        ),
    ],
)
def test_weights_that_are_not_the_model_are_refused(
    edit: Callable[[Tensors], object], says: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path)
    change(folder / LM_FILE, lambda held: void(edit(held)))
    assert says in refusal(folder)


def void(_: object) -> None:
    """Swallow what `dict.pop` returns."""


def test_a_codec_of_another_layout_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    new = "quantizer.semantic_residual_vector_quantizer.input_proj.weight"
    change(folder / MIMI_FILE, renamed(("quantizer.rvq_first.input_proj.weight", new)))
    assert "laid out for the transformers library" in refusal(folder)


def test_a_codec_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)

    def edit(held: Tensors) -> None:
        for name in held:
            if "_codebook" in name and not name.endswith("_initialized"):
                held[name] = torch.cat([held[name]] * 2)

    change(folder / MIMI_FILE, edit)
    assert "has 32 codebooks of 32, the language model speaks 8 of 16" in refusal(folder)


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    raw = (folder / MIMI_FILE).read_bytes()
    (folder / MIMI_FILE).write_bytes(raw[:-1000])
    assert "1,000 are missing. Download it again." in refusal(folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_layers": 3}, "says num_layers = 3, the tensors of model.safetensors say 2"),
        ({"dep_q": 16}, "says dep_q = 16"),
        ({"hidden_scale": 4.125}, "hidden_scale, hence the gate's width = 352"),
        ({"num_heads": 3}, "3 heads do not divide a width of 128"),
        ({"norm": "layer_norm"}, "has norm = 'layer_norm'; duplexbox runs 'rms_norm_f32' only"),
        ({"positional_embedding": "sin"}, "positional_embedding"),
        ({"lora_name": "adapter.safetensors"}, "lora_name"),
        ({"quantize": True}, "quantize"),
        ({"model_type": "hibiki"}, "is of a hibiki model"),
        ({"context": "long"}, "Expected `int | null`, got `str` - at `$.context`"),
        ({"context": -5}, "Expected `int` >= 3 - at `$.context`"),
        ({"context": 10**9}, "Expected `int` <= 1048576 - at `$.context`"),
        ({"delays": [0] * 16 + [-1]}, "Expected `int` >= 0 - at `$.delays"),
        ({"delays": [0] * 16 + [10**9]}, "Expected `int` <= 1024 - at `$.delays"),
        ({"num_heads": 0}, "Expected `int` >= 1 - at `$.num_heads`"),
        ({"hidden_scale": 1e308}, "Expected `float` <= 1024.0 - at `$.hidden_scale`"),
        ({"existing_text_padding_id": -5}, "says existing_text_padding_id = -5, the tensors of"),
        ({"existing_text_padding_id": 10**6}, "says existing_text_padding_id = 1000000, the ten"),
        ({"moshi_name": "x" * 5000}, "cannot be read: File name too long"),
    ],
)
def test_a_config_of_another_model_is_refused(
    config: dict[str, object], says: str, tmp_path: Path
) -> None:
    assert says in refusal(write_folder(tmp_path, LM, **config))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_config_that_is_not_json_is_refused(raw: bytes, tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / CONFIG_FILE).write_bytes(raw)
    assert "Fetch it again, or remove it." in refusal(folder)


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling", "loop"])
def test_a_config_that_is_no_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    path = folder / CONFIG_FILE
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case _:
            path.symlink_to(CONFIG_FILE if kind == "loop" else "gone.json")
    assert "is no file, or links to none. Fetch it again, or remove it." in refusal(folder)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "has no model.safetensors (0 files in it). Download"),
        (["README.md"], "(1 files in it)"),
        (["model.pt", "x.ckpt"], "holds pickled weights (model.pt, x.ckpt), and nothing is ever"),
        (["pytorch_model.bin"], "Use the safetensors file"),
        (["model.q4_k.gguf"], "holds model.q4_k.gguf, weights converted for another program"),
        (["a.safetensors", "b.safetensors"], "but 2 that could be it (a.safetensors, b.safe"),
    ],
)
def test_a_folder_without_one_checkpoint_is_refused(
    files: list[str], says: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    assert says in refusal(tmp_path)


def test_a_folder_without_the_codec_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / MIMI_FILE).unlink()
    assert f"has no {MIMI_FILE}, the codec Mimi." in refusal(folder)


def test_what_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert f"name the folder that holds it: {folder}" in refusal(folder / LM_FILE)
    assert "is not a folder. Download" in refusal(tmp_path / "nowhere")
    assert "nothing is ever unpickled" in refusal(tmp_path / "model.pth")


def test_a_context_that_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    for context in (1, 0, -5, 1 << 21):
        with pytest.raises(CheckpointError, match=r"ticks cannot be; name 2 to 1,048,576"):
            open_checkpoint(folder, context=context)


def test_opening_a_checkpoint_runs_no_pickle(tmp_path: Path) -> None:
    """A pickle named like the weights is refused by what is in it."""
    folder = write_folder(tmp_path)
    torch.save({"a": torch.zeros(1)}, folder / LM_FILE)
    assert "never unpickled" in refusal(folder)


def test_a_tokenizer_is_found_where_there_is_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert open_checkpoint(folder).text_tokenizer is None
    (folder / TEXT_FILE).write_bytes(b"")
    assert open_checkpoint(folder).text_tokenizer == folder / TEXT_FILE


def test_the_reader_follows_what_the_library_writes(tmp_path: Path) -> None:
    """Offsets in a file need not be in the order of names."""
    held = tensors(LM, torch.bfloat16)
    held["emb.3.weight"] = held["emb.3.weight"].float()  # sorted first: larger elements
    folder = write_folder(tmp_path)
    save_file(held, folder / LM_FILE)
    found = open_checkpoint(folder)
    assert torch.equal(found.lm.tensor("emb.3.weight"), held["emb.3.weight"])
    assert json.loads(found.lm.file.raw_header)["emb.3.weight"]["data_offsets"][0] == 0
    assert found.dtype == "bfloat16"
