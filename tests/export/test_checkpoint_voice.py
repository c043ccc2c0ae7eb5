"""PersonaPlex's voices: converted when they are what they should be, never trusted."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from export.checkpoint_file import CheckpointError
from export.checkpoint_voice import convert_voice
from tests.export.checkpoints import LM

pytestmark = pytest.mark.torch

FRAMES = 5


def voice(**changed: object) -> dict[str, object]:
    good: dict[str, object] = {
        "embeddings": torch.randn(FRAMES, 1, 1, LM.dimension).bfloat16(),
        "cache": torch.arange(4).expand(1, LM.streams, 4).clone(),
    }
    return good | changed


def saved(folder: Path, held: object) -> Path:
    path = folder / "NATF2.pt"
    torch.save(held, path)
    return path


def test_a_voice_keeps_its_values(tmp_path: Path) -> None:
    held = voice()
    out = tmp_path / "NATF2.safetensors"
    assert convert_voice(saved(tmp_path, held), out, LM) == FRAMES
    converted = load_file(out)
    embeddings, cache = held["embeddings"], held["cache"]
    assert isinstance(embeddings, torch.Tensor)
    assert isinstance(cache, torch.Tensor)
    assert torch.equal(converted["embeddings"], embeddings[:, 0, 0])
    assert torch.equal(converted["cache"], cache[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["NATF2.pt", "NATF2.safetensors"]


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ([1, 2], "is not a voice: it holds list"),
        ({"embeddings": torch.zeros(1)}, "it holds ['embeddings'], not cache and embeddings"),
        (voice(extra=1), "it holds ['cache', 'embeddings', 'extra']"),
        (voice(cache=[1]), "cache is not a plain tensor"),
        (voice(embeddings=torch.zeros(5, 1, 1, 64)), "[5, 1, 1, 64], [5, 1, 1, 128] is expected"),
        (voice(embeddings=torch.tensor(1.0)), "embeddings has shape []"),
        (voice(embeddings=torch.zeros(0, 1, 1, 128)), "is 0 frames long"),
        (voice(embeddings=torch.zeros(3000, 1, 1, 128)), "is 3,000 frames long"),
        (voice(embeddings=torch.full((5, 1, 1, 128), torch.nan)), "not finite everywhere"),
        (voice(embeddings=torch.zeros(5, 1, 1, 128).int()), "embeddings are torch.int32"),
        (voice(cache=torch.zeros(1, 17, 3).long()), "cache has shape [1, 17, 3]"),
        (voice(cache=torch.zeros(1, 17, 4)), "cache is torch.float32, not whole numbers"),
        (voice(cache=torch.full((1, 17, 4), 17)), "stream 1 of cache has ids 17 to 17"),
        (voice(cache=torch.full((1, 17, 4), -3)), "stream 0 of cache has ids -3 to -3"),
    ],
)
def test_what_is_not_a_voice_of_this_model_is_refused(
    held: object, says: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        convert_voice(saved(tmp_path, held), tmp_path / "out.safetensors", LM)
    assert says in str(caught.value)
    assert not (tmp_path / "out.safetensors").exists()


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("plain", [False, True])
def test_nothing_a_pickle_names_is_run(plain: bool, tmp_path: Path) -> None:
    sprung, path = tmp_path / "sprung", tmp_path / "NATF2.pt"
    if plain:
        path.write_bytes(pickle.dumps(Trap(sprung)))
    else:
        torch.save(voice(cache=Trap(sprung)), path)
    with pytest.raises(CheckpointError, match="nothing else is ever unpickled"):
        convert_voice(path, tmp_path / "out.safetensors", LM)
    assert not sprung.exists()


@pytest.mark.parametrize("raw", [b"", b"hello", b"PK\x03\x04"])
def test_a_damaged_voice_is_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "NATF2.pt"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="is damaged or holds more than tensors"):
        convert_voice(path, tmp_path / "out.safetensors", LM)


def test_a_voice_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        convert_voice(tmp_path / "NATF9.pt", tmp_path / "out.safetensors", LM)
