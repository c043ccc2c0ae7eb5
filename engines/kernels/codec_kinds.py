"""What the codec's kernels need to be told: weights by role, numbers by name. Pure.

C = dimension, F = features of a codebook, P = positions per tick, M = features of the MLP.

    codec_encode_first   in   pcm; every `model.{i}....previous` in the net's order
                         out  x (P*C), qkv (P*3C), the same regions' next values
                         the net's convolutions; norm1, qkv
    codec_piece          in   x, attended                           out  x, qkv
                         out, scale1, norm2, linear1, linear2, scale2; norm1, qkv of the next layer
    codec_encode_last    in   x, attended, position, downsample's previous
                         out  codes, position.next, previous.next
                         out ... scale2; downsample, proj.{first,rest}, book.{l}, squared.{l}
    codec_decode_first   in   codes, valid, upsample's partial      out  x, qkv, partial.next
                         book.{l}, proj.{first,rest}, upsample; norm1, qkv
    codec_decode_last    in   x, attended, valid, position, the net's regions in order
                         out  pcm_out, position.next, the same regions' next values
                         out ... scale2; the net's convolutions

A convolution is `{name}.weight` as the checkpoint has it, (out, in, k) or (in, out, k), and
`{name}.bias`; a norm `{name}.weight` and `{name}.bias`. Numbers: those of `CodecShape`.

Not here: checking a manifest against it (`kernel_kinds`), the kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from engines.bundle import KernelSpec, StageSpec

Shape = tuple[int, ...]

LARGEST = {"filters": 64, "features": 256, "dimension": 2048, "levels": 32, "last_kernel": 4}
"""What the kernels' fixed arrays hold."""
LARGEST_KERNEL = 32
LARGEST_RATIOS = 5


@dataclass(frozen=True, slots=True)
class CodecShape:
    """The numbers of a codec; `numbers` and `of_numbers` go to a manifest and back."""

    filters: int
    dimension: int
    ratios: tuple[int, ...]
    """In the decoder's order."""
    positions: int
    kernel: int
    last_kernel: int
    residual_kernel: int
    compress: int
    feedforward: int
    features: int
    bins: int
    levels: int
    eps: float

    @property
    def samples(self) -> int:
        return prod(self.ratios) * self.positions

    def numbers(self) -> dict[str, float]:
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "ratios"}
        return plain | {f"ratio.{i}": ratio for i, ratio in enumerate(self.ratios)}

    @classmethod
    def of_numbers(cls, numbers: Mapping[str, float]) -> "CodecShape":
        """Raises KeyError naming what is missing, ValueError with what the kernels cannot do."""
        ratios = [int(numbers["ratio.0"])]
        while (ratio := numbers.get(f"ratio.{len(ratios)}")) is not None:
            ratios.append(int(ratio))
        plain = {n: int(numbers[n]) for n in cls.__slots__ if n not in ("ratios", "eps")}
        shape = cls(ratios=tuple(ratios), eps=numbers["eps"], **plain)
        if fault := shape.fault():
            raise ValueError(fault)
        return shape

    def fault(self) -> str:
        """Why the kernels cannot compute such a codec; empty if they can."""
        for name, most in LARGEST.items():
            if not 1 <= getattr(self, name) <= most:
                return f"{name} is {getattr(self, name)}; the kernels take 1 to {most}"
        if not 2 <= self.kernel <= LARGEST_KERNEL or not 1 <= len(self.ratios) <= LARGEST_RATIOS:
            return f"a first kernel of {self.kernel}, {len(self.ratios)} ratios"
        few = (*self.ratios, self.positions, self.residual_kernel, self.last_kernel, self.levels)
        if min(few) < 2:
            return "ratios, positions, kernels and levels are 2 or more"
        widths = [self.filters * 2**i for i in range(len(self.ratios) + 1)]
        hidden = [width // self.compress for width in widths[:-1]]
        others = (self.dimension, self.feedforward, self.features, self.bins)
        if any(width % 4 or width < 1 for width in (*widths, *hidden, *others)):
            return f"widths {widths}, {hidden}, {others} are not multiples of 4"
        return ""


@dataclass(frozen=True, slots=True)
class Conv:
    """One convolution of a net: ``steps`` come in per tick."""

    name: str
    inputs: int
    outputs: int
    kernel: int
    stride: int
    steps: int
    is_transposed: bool = False

    @property
    def remembered(self) -> int:
        return self.kernel - self.stride

    @property
    def weight(self) -> Shape:
        ends = (self.inputs, self.outputs) if self.is_transposed else (self.outputs, self.inputs)
        return (*ends, self.kernel)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a stage of one kind has: rows of its tensors in order, weights by role."""

    inputs: list[Shape]
    outputs: list[Shape]
    weights: dict[str, Shape]


def encoder_convs(s: CodecShape) -> list[Conv]:
    """In the net's order: the first, then per ratio two of a residual block and one that strides,
    then the last."""
    steps, width = s.samples, s.filters
    convs = [Conv("model.0", 1, width, s.kernel, 1, steps)]
    at = 1
    for ratio in reversed(s.ratios):
        convs += _residual(at, width, steps, s)
        convs.append(Conv(f"model.{at + 2}", width, 2 * width, 2 * ratio, ratio, steps))
        at, steps, width = at + 3, steps // ratio, 2 * width
    convs.append(Conv(f"model.{at + 1}", width, s.dimension, s.last_kernel, 1, steps))
    return convs


def decoder_convs(s: CodecShape) -> list[Conv]:
    """In the net's order: the first, then per ratio one that strides and two of a residual block,
    then the last."""
    steps, width = s.positions, s.filters * 2 ** len(s.ratios)
    convs = [Conv("model.0", s.dimension, width, s.kernel, 1, steps)]
    at = 1
    for ratio in s.ratios:
        name = f"model.{at + 1}"
        convs.append(Conv(name, width, width // 2, 2 * ratio, ratio, steps, is_transposed=True))
        steps, width = steps * ratio, width // 2
        convs += _residual(at + 2, width, steps, s)
        at += 3
    convs.append(Conv(f"model.{at + 1}", width, 1, s.last_kernel, 1, steps))
    return convs


def _residual(at: int, width: int, steps: int, s: CodecShape) -> list[Conv]:
    hidden = width // s.compress
    return [
        Conv(f"model.{at}.block.1", width, hidden, s.residual_kernel, 1, steps),
        Conv(f"model.{at}.block.3", hidden, width, 1, 1, steps),
    ]


def encode_first(s: CodecShape) -> Wanted:
    regions = [_region(conv) for conv in encoder_convs(s) if conv.remembered]
    return Wanted(
        [(1, s.samples), *regions],
        [*_fore(s), *regions],
        {**_net(encoder_convs(s)), **_before(s)},
    )


def piece(s: CodecShape) -> Wanted:
    return Wanted(_back(s), _fore(s), {**_after(s), **_before(s)})


def encode_last(s: CodecShape) -> Wanted:
    kept = (s.dimension, s.positions)
    down: dict[str, Shape] = {"downsample": (s.dimension, s.dimension, 2 * s.positions)}
    return Wanted(
        [*_back(s), (), kept],
        [(s.levels,), (), kept],
        {**_after(s), **down, **_books(s), **_squared(s), **_proj(s.features, s.dimension)},
    )


def decode_first(s: CodecShape) -> Wanted:
    kept = (s.dimension, s.positions)
    up: dict[str, Shape] = {"upsample": (s.dimension, 1, 2 * s.positions)}
    return Wanted(
        [(s.levels,), (), kept],
        [*_fore(s), kept],
        {**_books(s), **_proj(s.dimension, s.features), **up, **_before(s)},
    )


def decode_last(s: CodecShape) -> Wanted:
    regions = [_region(conv) for conv in decoder_convs(s) if conv.remembered]
    return Wanted(
        [*_back(s), (), (), *regions],
        [(1, s.samples), (), *regions],
        {**_after(s), **_net(decoder_convs(s))},
    )


STAGES: dict[str, Callable[[CodecShape], Wanted]] = {
    "codec_encode_first": encode_first,
    "codec_piece": piece,
    "codec_encode_last": encode_last,
    "codec_decode_first": decode_first,
    "codec_decode_last": decode_last,
}


def weights(stage: StageSpec, kernel: KernelSpec) -> dict[str, Shape]:
    """What a stage of a kind above needs; see `kernel_kinds.Kind`."""
    wanted = STAGES[kernel.kind](CodecShape.of_numbers(kernel.numbers))
    for found, shapes in ((stage.inputs, wanted.inputs), (stage.outputs, wanted.outputs)):
        rows = [tensor.row_shape for tensor in found]
        if rows != shapes:
            raise ValueError(f"tensors of shapes {rows} where this kind has {shapes}")
    return wanted.weights


KINDS: dict[str, Callable[[StageSpec, KernelSpec], dict[str, Shape]]] = dict.fromkeys(
    STAGES, weights
)


def _region(conv: Conv) -> Shape:
    return (conv.outputs if conv.is_transposed else conv.inputs, conv.remembered)


def _fore(s: CodecShape) -> list[Shape]:
    wide = s.positions * s.dimension
    return [(wide,), (3 * wide,)]


def _back(s: CodecShape) -> list[Shape]:
    return [(s.positions * s.dimension,)] * 2


def _net(convs: list[Conv]) -> dict[str, Shape]:
    wanted: dict[str, Shape] = {}
    for conv in convs:
        wanted |= {f"{conv.name}.weight": conv.weight, f"{conv.name}.bias": (conv.outputs,)}
    return wanted


def _norm(name: str, s: CodecShape) -> dict[str, Shape]:
    return {f"{name}.weight": (s.dimension,), f"{name}.bias": (s.dimension,)}


def _before(s: CodecShape) -> dict[str, Shape]:
    """A layer up to its attention."""
    return {**_norm("norm1", s), "qkv": (3 * s.dimension, s.dimension)}


def _after(s: CodecShape) -> dict[str, Shape]:
    """A layer from its attention on."""
    return {
        "out": (s.dimension, s.dimension),
        "scale1": (s.dimension,),
        **_norm("norm2", s),
        "linear1": (s.feedforward, s.dimension),
        "linear2": (s.dimension, s.feedforward),
        "scale2": (s.dimension,),
    }


def _books(s: CodecShape) -> dict[str, Shape]:
    return {f"book.{level}": (s.bins, s.features) for level in range(s.levels)}


def _squared(s: CodecShape) -> dict[str, Shape]:
    return {f"squared.{level}": (s.bins,) for level in range(s.levels)}


def _proj(*ends: int) -> dict[str, Shape]:
    return {"proj.first": ends, "proj.rest": ends}
