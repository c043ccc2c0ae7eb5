"""State in, state out: how a module of these models carries what survives a tick.

A module that remembers anything declares it as regions (`RegionSpec`, the bundle's own type) and
takes it as an argument: ``forward(x, state) -> (y, new)``, where ``state`` maps region names to
tensors with a leading batch axis and ``new`` holds only the regions this module moved on. Nothing
is kept on ``self``, so a session is a row of the state and can be any age.

``live`` (B,) bool, where a module takes it: rows where it is False compute something harmless and
keep their state. Parameter names follow the published checkpoints (``...conv.conv.weight``).

Not here: the nets built from these (`seanet`, `mimi`), how a region is laid out in memory.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from engines.bundle import RegionSpec
from engines.clocks import ClockKind, NativeClock, Order
from export.models import operators as op

FEW_WINDOWS = 2
"""Convolutions with at most so many outputs are written as one product. The libraries' convolution
kernels have nothing to spread over the GPU then: 512 -> 1024 channels, k7, took 135 us for one
session, four times what its weights cost to read (LOG.md)."""
FEW_STEPS = 16
"""Transposed convolutions of at most so many inputs likewise: cuDNN took 2.07 of a tick's 23.5 ms
for 1024 -> 512 channels, k16, on 64 sessions."""

State = dict[str, Tensor]
"""Region name -> (B, *region.shape)."""

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8e4m3": torch.uint8,
    "int64": torch.int64,
    "int8": torch.int8,
    "bool": torch.bool,
}
"""float8 as its bits, as `engines.ort_executor.STORAGE` has it."""


class Streaming(nn.Module):
    """A module with regions; containers chain those of their parts."""

    def regions(self) -> Iterator[RegionSpec]:
        """The regions of this module and of everything in it, in a stable order."""
        for child in self.children():
            yield from regions_of(child)


def regions_of(module: nn.Module) -> Iterator[RegionSpec]:
    """Regions of any module: of its streaming parts, in the order they were registered."""
    if isinstance(module, Streaming):
        yield from module.regions()
    else:
        for child in module.children():
            yield from regions_of(child)


def fresh_state(regions: Iterable[RegionSpec], batch: int) -> State:
    """State of ``batch`` sessions whose calls have just begun."""
    return {
        region.name: torch.full(
            (batch, *region.shape), region.fill, dtype=TORCH_DTYPES[region.dtype]
        )
        for region in regions
    }


def counter(name: str, advance: int) -> RegionSpec:
    """A region that counts positions from 0, ``advance`` per tick."""
    clock = NativeClock(kind=ClockKind.COUNTER, advance=str(advance))
    return RegionSpec(name=name, dtype="int64", shape=(), clock=clock)


def keep(live: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """``new`` in the rows that are live, ``old`` in the others."""
    if live is None:
        return new
    return torch.where(live.view(-1, *[1] * (new.dim() - 1)), new, old)


class _Inner(nn.Module):
    """The level ``conv`` of ``conv.conv.weight``: where training kept its weight norm."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)


class CausalConv1d(Streaming):
    """A convolution that remembers the ``kernel - stride`` steps to the left of its input.

    pad_first: before a session's first step the left side is that step's first sample,
    repeated (`downsample` only); otherwise it is zero.
    """

    def __init__(
        self,
        region: str,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        advance: int,
        bias: bool = True,
        pad_first: bool = False,
    ) -> None:
        """advance: input steps per tick, the native clock of what is remembered."""
        super().__init__()
        self.region = f"{region}.previous"
        self.inputs, self.stride, self.advance = inputs, stride, advance
        self.remembered = kernel - stride
        self.pad_first = pad_first
        self.conv = _Inner("conv", nn.Conv1d(inputs, outputs, kernel, stride, bias=bias))

    def regions(self) -> Iterator[RegionSpec]:
        if self.remembered:
            clock = NativeClock(
                kind=ClockKind.WINDOW,
                axis=1,
                advance=str(self.advance),
                retain=self.remembered,
                order=Order.OLDEST_FIRST,
            )
            shape = (self.inputs, self.remembered)
            yield RegionSpec(name=self.region, dtype="float32", shape=shape, clock=clock)

    def forward(
        self, x: Tensor, state: State, live: Tensor | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """x: (B, inputs, S), S a multiple of the stride. Returns (B, outputs, S / stride).

        first: (B,) bool, needed with `pad_first`: True in a session's first tick.
        """
        conv = self.conv.get_submodule("conv")
        if not self.remembered:
            return conv(x), {}
        previous = state[self.region]
        left = previous
        if self.pad_first:
            assert first is not None, self.region
            left = torch.where(first.view(-1, 1, 1), x[..., :1], previous)
        joined = torch.cat([left, x], dim=-1)
        tail = joined.narrow(-1, joined.shape[-1] - self.remembered, self.remembered)
        y = self._as_product(joined) if x.shape[-1] <= FEW_WINDOWS * self.stride else conv(joined)
        return y, {self.region: keep(live, tail, previous)}

    def _as_product(self, joined: Tensor) -> Tensor:
        """The convolution of (B, inputs, S): every window a row, one matrix."""
        conv = self.conv.get_submodule("conv")
        assert isinstance(conv, nn.Conv1d), conv
        kernel = conv.kernel_size[0]
        starts = range(0, joined.shape[-1] - kernel + 1, self.stride)
        windows = [
            joined.narrow(-1, start, kernel).reshape(-1, self.inputs * kernel) for start in starts
        ]
        rows = windows[0]
        if len(windows) > 1:
            rows = torch.stack(windows, dim=1).reshape(-1, self.inputs * kernel)
        weight = conv.weight.view(conv.out_channels, -1)
        if conv.bias is None:
            y = op.linear(rows, weight)
        else:
            y = op.linear_bias(rows, weight, conv.bias, 1.0)
        return y.view(-1, len(windows), conv.out_channels).transpose(1, 2)


class CausalConvTranspose1d(Streaming):
    """A transposed convolution that remembers the tail its next output must be added to.

    The tail is kept without the bias, as in conv.py of moshi 0.2.13, so that the bias is
    added once.
    """

    def __init__(
        self,
        region: str,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int,
        advance: int,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        """advance: output steps per tick."""
        super().__init__()
        self.region = f"{region}.partial"
        self.outputs, self.stride, self.advance = outputs, stride, advance
        self.remembered = kernel - stride
        convtr = nn.ConvTranspose1d(inputs, outputs, kernel, stride, groups=groups, bias=bias)
        self.convtr = _Inner("convtr", convtr)

    def regions(self) -> Iterator[RegionSpec]:
        clock = NativeClock(
            kind=ClockKind.TAIL,
            axis=1,
            advance=str(self.advance),
            retain=self.remembered,
            order=Order.OLDEST_FIRST,
        )
        shape = (self.outputs, self.remembered)
        yield RegionSpec(name=self.region, dtype="float32", shape=shape, clock=clock)

    def forward(self, x: Tensor, state: State, live: Tensor | None = None) -> tuple[Tensor, State]:
        """x: (B, inputs, S). Returns (B, outputs, S * stride)."""
        convtr = self.convtr.get_submodule("convtr")
        assert isinstance(convtr, nn.ConvTranspose1d), convtr
        partial = state[self.region]
        if x.shape[-1] <= FEW_STEPS and self.remembered == self.stride:
            out, tail = self._as_product(x, partial)
            return out, {self.region: keep(live, tail, partial)}
        whole = functional.conv_transpose1d(
            x, convtr.weight, None, convtr.stride, groups=convtr.groups
        )
        ready = x.shape[-1] * self.stride
        head = whole.narrow(-1, 0, self.remembered) + partial
        if ready > self.remembered:
            middle = whole.narrow(-1, self.remembered, ready - self.remembered)
            out, tail = torch.cat([head, middle], -1), whole.narrow(-1, ready, self.remembered)
        else:
            assert ready == self.remembered, (ready, self.remembered)
            out, tail = head, whole.narrow(-1, ready, self.remembered)
        if convtr.bias is not None:
            out = out + convtr.bias.view(1, -1, 1)
        return out, {self.region: keep(live, tail, partial)}

    def _as_product(self, x: Tensor, partial: Tensor) -> tuple[Tensor, Tensor]:
        """Output and new tail: every input makes two strides of output, the second is added to
        the first of the next."""
        convtr = self.convtr.get_submodule("convtr")
        assert isinstance(convtr, nn.ConvTranspose1d), convtr
        inputs, steps, stride = x.shape[1], x.shape[2], self.stride
        if convtr.groups == 1:
            rows = x.transpose(1, 2).reshape(-1, inputs)
            made = op.product(rows, convtr.weight.view(inputs, -1))
            made = made.view(-1, steps, self.outputs, 2 * stride).transpose(1, 2)
        else:
            assert convtr.groups == inputs == self.outputs, convtr
            made = x.unsqueeze(-1) * convtr.weight  # (B, C, S, 1) x (C, 1, 2 * stride)
        first, second = made.narrow(-1, 0, stride), made.narrow(-1, stride, stride)
        before = partial.unsqueeze(2)
        if steps > 1:
            before = torch.cat([before, second.narrow(2, 0, steps - 1)], dim=2)
        out = (first + before).reshape(-1, self.outputs, steps * stride)
        if convtr.bias is not None:
            out = out + convtr.bias.view(1, -1, 1)
        return out, second.select(2, steps - 1)
