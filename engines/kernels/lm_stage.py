"""What stages of the language model share as launches: scratch, products by role, small kernels.

    Areas           scratch of one stage, cut into parts
    SmallKernels    a source of a few kernels beside the products, for one element type
    StageProducts   the products of one stage and batch, by what they are for

Not here: which launches make a stage (`gated`, `depth`), how a product runs (`linear`).
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from engines.bundle import Dtype, StageSpec
from engines.cuda import Device, DevicePtr, Function, Module
from engines.kernel_stages import Bindable
from engines.kernels import nvrtc
from engines.kernels.linear import Launch, LinearKernels, Norm, Rows
from engines.kernels.linear_choice import ELEMENTS, Product

ALIGN_BYTES = 256


class Areas:
    """Scratch of one stage, cut into parts in the order they are asked for."""

    def __init__(self, base: int = 0) -> None:
        self._at = base
        self.base = base

    def take(self, nbytes: int) -> DevicePtr:
        at = self._at
        self._at += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return DevicePtr(at)

    @property
    def nbytes(self) -> int:
        return self._at - self.base


class SmallKernels:
    """The products of one element type, and the kernels of one source beside them."""

    def __init__(self, source: Path, dtype: Dtype, device: Device, folder: Path) -> None:
        """Raises `nvrtc.NoCompiler` if kernels have to be compiled and cannot be."""
        self.linear = LinearKernels(dtype, device, folder)
        major, minor = device.compute_capability
        definitions = {"LINEAR_ELEMENT": ELEMENTS[dtype]}
        image = nvrtc.compile_cached(source, definitions, f"sm_{major}{minor}", folder)
        self._module = Module(image)

    def function(self, name: str) -> Function:
        return self._module.function(name)

    def close(self) -> None:
        self.linear.close()
        self._module.close()


class StageProducts:
    """The products of one stage, for one batch."""

    def __init__(
        self,
        linear: LinearKernels,
        bindable: Bindable,
        products: Mapping[str, Product],
        *,
        partials: DevicePtr,
        normed: Rows,
        eps: float,
    ) -> None:
        """partials, normed: scratch, see `LinearKernels.product`."""
        self._linear, self._bindable = linear, bindable
        self._products, self._normed, self._eps = products, normed, eps
        self._scratch = (bindable.scratch.counters, partials)

    def product(
        self,
        role: str,
        x: Rows,
        y: Rows,
        *,
        weight: str | None = None,
        norm: str | None = None,
        add: Rows | None = None,
    ) -> list[Launch]:
        """Launches of the product called ``role``; weight: its matrix, if called otherwise."""
        return self._linear.product(
            self._products[role],
            self._bindable.batch,
            w=self._bindable.weights[weight or role],
            x=x,
            y=y,
            scratch=self._scratch,
            stream=self._bindable.stream,
            norm=self._norm(norm) if norm else None,
            normed=self._normed,
            add=add,
        )

    def norm(self, role: str, features: int, x: Rows, y: Rows) -> Launch:
        """A norm that no product follows."""
        batch, stream = self._bindable.batch, self._bindable.stream
        return self._linear.norm(self._norm(role), batch, features, x, y, stream)

    def _norm(self, role: str) -> Norm:
        return Norm(self._bindable.weights[role], self._eps)


def run_all(launches: Iterable[Launch]) -> Callable[[], None]:
    """One after the other."""
    held = tuple(launches)

    def run() -> None:
        for launch in held:
            launch()

    return run


def numbers_of(stage: StageSpec) -> dict[str, float]:
    assert stage.kernel is not None, stage.name
    return stage.kernel.numbers


def dtype_of(stage: StageSpec) -> Dtype:
    """Of weights and rows; `lm_kinds` holds that it is one."""
    assert stage.kernel is not None, stage.name
    return next(iter(stage.kernel.weights.values())).dtype
