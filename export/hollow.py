"""A language model that can be traced without being loaded.

Its matrices are *hollow*: tensors of the right shape and dtype whose memory is never touched, so
seven billion parameters cost nothing. Tracing asks for no values. Whoever does need them (the
writer of weights, the recorder of golden data) asks `Hollow.values` for one tensor, or a slice of
one, which is mapped from the checkpoint then and let go of afterwards. Norms and the like are
small and real, so that the exporter can calculate with them.

`Wide` runs such a model eagerly in float32, one matrix in memory at a time: the reference a
bfloat16 bundle is held to, because rounding weights is part of a bundle and rounding activations
is not part of what the model means.

Not here: where tensors lie in a file (`checkpoint`), what becomes of them (`to_onnx`, `golden`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.bundle import Dtype
from export.models.config import LmConfig
from export.models.lm import LanguageModel
from export.models.streaming import TORCH_DTYPES

Read = Callable[[str], Tensor]
"""Name of a tensor of the language model -> its values, in any float dtype."""

VIEWS = frozenset(
    {
        "aten.alias.default",
        "aten.detach.default",
        "aten.narrow.default",
        "aten.select.int",
        "aten.slice.Tensor",
        "aten.view.default",
    }
)
"""What may be done to a hollow tensor: nothing that looks at its values."""
LINEAR = "duplexbox.linear.default"
EMBEDDING = "aten.embedding.default"


class Hollow:
    """Which tensors have no values of their own, and where those are."""

    def __init__(self, tensors: Mapping[str, Tensor], read: Read) -> None:
        """tensors: hollow ones by name; they must live as long as this does."""
        self._read = read
        self._tensors = dict(tensors)
        self._names = {_storage(tensor): name for name, tensor in tensors.items()}

    def __contains__(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._names

    def mapped(self, tensor: Tensor) -> Tensor:
        """The values behind ``tensor`` or a view of one, in the dtype they are stored in."""
        name = self._names.get(_storage(tensor))
        if name is None:
            return tensor
        whole = self._read(name)
        place = whole.storage_offset() + tensor.storage_offset()
        return whole.as_strided(tensor.shape, tensor.stride(), place)

    def values(self, tensor: Tensor) -> Tensor:
        """The values behind ``tensor``, in its dtype. Let go of them before taking the next."""
        return self.mapped(tensor).to(tensor.dtype)


def nothing_hollow() -> Hollow:
    """For models that are in memory."""
    return Hollow({}, lambda name: torch.empty(0))


def hollow_lm(config: LmConfig, dtype: Dtype, read: Read) -> tuple[LanguageModel, Hollow]:
    """The modules of ``config`` in ``dtype``, matrices hollow, everything else read now."""
    with torch.device("meta"):
        lm = LanguageModel(config, ring_dtype=dtype)
    hollow: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, shell in lm.state_dict().items():
        if shell.dim() == 2:
            state[name] = hollow[name] = torch.empty(shell.shape, dtype=TORCH_DTYPES[dtype])
        else:
            state[name] = read(name).to(TORCH_DTYPES[dtype], copy=True)
    lm.load_state_dict(state, assign=True)
    return lm.eval().requires_grad_(False), Hollow(hollow, read)


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run modules in float32 whatever dtype their matrices have, hollow ones included."""

    def __init__(self, hollow: Hollow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hollow = hollow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name == LINEAR:
            x, weight = args
            return func(x, self.hollow.values(weight).float())
        if name == EMBEDDING:
            table, ids = args[:2]
            rows = func(self.hollow.mapped(table), ids)
            return rows.to(table.dtype).float()
        if name not in VIEWS:
            touched = [x for x in args if isinstance(x, Tensor) and x in self.hollow]
            assert not touched, f"{name} would calculate with {len(touched)} hollow tensors"
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
