"""Mimi, the codec: 24 kHz sound to codes and back, one frame per tick.

Encoder: SEANet (strides 4, 5, 6, 8) -> transformer at 25 Hz -> downsampling by 2 -> split
residual quantiser. Decoder: the same backwards. Module names are those of the published
checkpoint (`encoder.model.3.conv.conv.weight`), region names the same with `mimi.` in front.

The transformers advance two positions per tick, one tick being one frame of 12.5 Hz. The decoder
takes ``live``: a session whose language model has said nothing yet leaves it as it was.

Not here: the quantiser (`quantizer`), what feeds the decoder (`tokens`).
"""

from collections.abc import Iterator

import torch.nn.functional as functional
from torch import Tensor, nn

from engines.bundle import RegionSpec
from export.models.config import MimiConfig
from export.models.quantizer import SplitQuantizer
from export.models.streaming import (
    CausalConv1d,
    CausalConvTranspose1d,
    State,
    Streaming,
    counter,
    keep,
)
from export.models.transformer import CodecLayer, Rope, View


class Elu(nn.Module):
    """A placeholder in a numbered list, so that the convolutions keep their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.elu(x)


class ResidualBlock(Streaming):
    """ELU, k3, ELU, k1, added to the input."""

    def __init__(self, region: str, channels: int, config: MimiConfig, advance: int) -> None:
        super().__init__()
        hidden = channels // config.compress
        self.block = nn.ModuleList(
            [
                Elu(),
                CausalConv1d(
                    f"{region}.block.1",
                    channels,
                    hidden,
                    config.residual_kernel,
                    advance=advance,
                ),
                Elu(),
                CausalConv1d(f"{region}.block.3", hidden, channels, 1, advance=advance),
            ]
        )

    def forward(self, x: Tensor, state: State, live: Tensor | None = None) -> tuple[Tensor, State]:
        y, new = run_in_order(self.block, x, state, live)
        return x + y, new


class SeanetEncoder(Streaming):
    """(B, 1, samples) -> (B, dimension, samples / 960)."""

    def __init__(self, region: str, config: MimiConfig) -> None:
        super().__init__()
        steps, width = config.samples_per_frame, config.filters
        net: list[nn.Module] = [
            CausalConv1d(f"{region}.model.0", 1, width, config.kernel, advance=steps)
        ]
        for ratio in reversed(config.ratios):
            net.append(ResidualBlock(f"{region}.model.{len(net)}", width, config, steps))
            net.append(Elu())
            name = f"{region}.model.{len(net)}"
            net.append(CausalConv1d(name, width, 2 * width, 2 * ratio, stride=ratio, advance=steps))
            steps, width = steps // ratio, 2 * width
        net.append(Elu())
        name = f"{region}.model.{len(net)}"
        net.append(CausalConv1d(name, width, config.dimension, config.last_kernel, advance=steps))
        self.model = nn.ModuleList(net)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return run_in_order(self.model, x, state, None)


class SeanetDecoder(Streaming):
    """(B, dimension, steps) -> (B, 1, steps * 960)."""

    def __init__(self, region: str, config: MimiConfig) -> None:
        super().__init__()
        steps, width = config.downsample, config.filters * 2 ** len(config.ratios)
        net: list[nn.Module] = [
            CausalConv1d(f"{region}.model.0", config.dimension, width, config.kernel, advance=steps)
        ]
        for ratio in config.ratios:
            steps = steps * ratio
            net.append(Elu())
            name = f"{region}.model.{len(net)}"
            net.append(
                CausalConvTranspose1d(
                    name, width, width // 2, 2 * ratio, stride=ratio, advance=steps
                )
            )
            width = width // 2
            net.append(ResidualBlock(f"{region}.model.{len(net)}", width, config, steps))
        net.append(Elu())
        name = f"{region}.model.{len(net)}"
        net.append(CausalConv1d(name, width, 1, config.last_kernel, advance=steps))
        self.model = nn.ModuleList(net)

    def forward(self, x: Tensor, state: State, live: Tensor | None = None) -> tuple[Tensor, State]:
        return run_in_order(self.model, x, state, live)


def run_in_order(
    modules: nn.ModuleList, x: Tensor, state: State, live: Tensor | None
) -> tuple[Tensor, State]:
    """Run the parts one after the other and gather the regions they moved on."""
    new: State = {}
    for module in modules:
        if isinstance(module, Streaming):
            x, moved = module(x, state, live)
            new |= moved
        else:
            x = module(x)
    return x, new


class CodecTransformer(Streaming):
    """Mimi's transformer over (B, C, S): S positions per tick, rings of `context` rows."""

    def __init__(self, region: str, config: MimiConfig) -> None:
        super().__init__()
        self.region = f"{region}.offset"
        self.advance, self.context = config.downsample, config.context
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(
            CodecLayer(
                f"{region}.layers.{layer}",
                config.dimension,
                config.heads,
                config.feedforward,
                config.context,
                advance=config.downsample,
            )
            for layer in range(config.layers)
        )
        self.rope = Rope(config.dimension // config.heads)

    def regions(self) -> Iterator[RegionSpec]:
        yield counter(self.region, self.advance)
        yield from super().regions()

    def forward(self, x: Tensor, state: State, live: Tensor | None = None) -> tuple[Tensor, State]:
        """Rows that are not live write their keys too, but at a place they will write again."""
        channels, rows = x.shape[1], x.shape[2]
        position = state[self.region]
        layers = self.transformer.layers
        assert isinstance(layers, nn.ModuleList), layers
        view = View(position, rows, _capacity(layers, state), self.context)
        turn = self.rope(position, rows)
        y = x.transpose(1, 2).reshape(-1, channels)
        new: State = {self.region: keep(live, position + rows, position)}
        for layer in layers:
            y, moved = layer(y, view, turn, state)
            new |= moved
        return y.view(-1, rows, channels).transpose(1, 2), new


def _capacity(layers: nn.ModuleList, state: State) -> int:
    """Rows of the rings as they are bound: an offline pass may bind longer ones."""
    first = layers[0]
    assert isinstance(first, CodecLayer), first
    return state[f"{first.self_attn.region}.k"].shape[2]


class Mimi(Streaming):
    """The codec with its state outside; `encode` and `decode` are the two stages."""

    def __init__(self, config: MimiConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = SeanetEncoder("mimi.encoder", config)
        self.encoder_transformer = CodecTransformer("mimi.encoder_transformer", config)
        stride, channels = config.downsample, config.dimension
        self.downsample = nn.Module()
        self.downsample.conv = CausalConv1d(
            "mimi.downsample",
            channels,
            channels,
            2 * stride,
            stride=stride,
            advance=stride,
            bias=False,
            pad_first=True,
        )
        self.quantizer = SplitQuantizer(config)
        self.upsample = nn.Module()
        self.upsample.convtr = CausalConvTranspose1d(
            "mimi.upsample",
            channels,
            channels,
            2 * stride,
            stride=stride,
            advance=stride,
            groups=channels,
            bias=False,
        )
        self.decoder_transformer = CodecTransformer("mimi.decoder_transformer", config)
        self.decoder = SeanetDecoder("mimi.decoder", config)

    def encode(self, pcm: Tensor, state: State) -> tuple[Tensor, State]:
        """pcm (B, 1, samples_per_frame) float32 -> codes (B, codebooks_used) int64."""
        latent, new = self.latent(pcm, state)
        return self.quantizer.encode(latent.squeeze(-1)), new

    def latent(self, pcm: Tensor, state: State) -> tuple[Tensor, State]:
        """pcm (B, 1, n * samples_per_frame) -> what is quantised, (B, C, n)."""
        x, new = self.encoder(pcm, state)
        first = state[self.encoder_transformer.region] == 0
        x, moved = self.encoder_transformer(x, state)
        new |= moved
        downsample = self.downsample.get_submodule("conv")
        x, moved = downsample(x, state, None, first)
        return x, new | moved

    def decode(
        self, codes: Tensor, state: State, live: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """codes (B, codebooks_used) int64 -> (B, 1, samples_per_frame) float32.

        Rows that are not live are decoded from whatever their codes are, which must be in
        range, and leave their state as it was; `stages` silences them.
        """
        return self.sound(self.quantizer.decode(codes).unsqueeze(-1), state, live)

    def sound(
        self, latent: Tensor, state: State, live: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """latent (B, C, n) -> pcm (B, 1, n * samples_per_frame)."""
        x, new = self.upsample.get_submodule("convtr")(latent, state, live)
        x, moved = self.decoder_transformer(x, state, live)
        new |= moved
        x, moved = self.decoder(x, state, live)
        return x, new | moved
