"""The numbers that make a model: Moshi 7B, PersonaPlex 7B and the small ones differ only here.

A `ModelConfig` is a codec (`MimiConfig`), a language model (`LmConfig`) and the defaults of
sampling. Everything that can be derived is a property, so that two numbers cannot disagree.
Sources are `moshi/models/loaders.py` of the PyPI package `moshi` 0.2.13 and, for PersonaPlex,
the tensors of its checkpoint.

Not here: weights (`export.tiny` seeds small ones), regions and stages (`export.stages`).
"""

from dataclasses import dataclass, field
from math import prod

ROPE_MAX_PERIOD = 10_000.0  # loaders.py: "max_period" of every transformer
DELAYS = (0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1)  # loaders.py: text, agent, user


@dataclass(frozen=True, slots=True)
class MimiConfig:
    """The codec. Defaults are the published one's."""

    sample_rate_hz: int = 24_000
    filters: int = 64
    """Channels of the first convolution; each ratio doubles them."""
    dimension: int = 512
    """Channels of the latent, and width of both transformers."""
    ratios: tuple[int, ...] = (8, 6, 5, 4)
    """In the decoder's order; the encoder runs them backwards."""
    downsample: int = 2
    """From the SEANet's 25 Hz to the model's 12.5 Hz."""
    kernel: int = 7
    last_kernel: int = 3
    residual_kernel: int = 3
    compress: int = 2
    layers: int = 8
    heads: int = 8
    feedforward: int = 2048
    context: int = 250
    """Positions each transformer sees; it advances `downsample` of them per tick."""
    codebook_dimension: int = 256
    bins: int = 2048
    codebooks: int = 32
    """Codebooks in the checkpoint, the semantic one included."""
    codebooks_used: int = 8

    @property
    def samples_per_frame(self) -> int:
        return prod(self.ratios) * self.downsample


@dataclass(frozen=True, slots=True)
class LmConfig:
    """The language model: temporal transformer, depth transformer, delays. Defaults: Moshi 7B."""

    dimension: int = 4096
    layers: int = 32
    heads: int = 32
    feedforward: int = 16_896  # loaders.py: hidden_scale 4.125
    context: int = 3000
    """Ticks attention sees: 240 s. PersonaPlex's own code sees one fewer."""
    pinned: int = 0
    """First ticks of a call that attention sees for ever, out of `context`: a persona's prefix.
    0, as in the published code: the prefix slides out like everything else."""
    text_card: int = 32_000
    card: int = 2048
    delays: tuple[int, ...] = DELAYS
    """One per stream: text, the agent's codebooks, the user's codebooks."""
    depth_codebooks: int = 8
    """Steps of the depth transformer (`dep_q`): the agent's codebooks."""
    depth_dimension: int = 1024
    depth_layers: int = 6
    depth_heads: int = 16
    depth_feedforward: int = 4224  # loaders.py: int(4.125 * 1024)
    text_padding_id: int = 3  # loaders.py: existing_text_padding_id

    @property
    def streams(self) -> int:
        return len(self.delays)

    @property
    def audio_streams(self) -> int:
        return self.streams - 1

    @property
    def user_codebooks(self) -> int:
        return self.audio_streams - self.depth_codebooks

    @property
    def max_delay(self) -> int:
        return max(self.delays)

    @property
    def token_rows(self) -> int:
        """Length of the ring that undoes the delays; lm.py: max_delay + 2."""
        return self.max_delay + 2

    @property
    def gate(self) -> int:
        return gate_features(self.dimension, self.feedforward)

    @property
    def depth_gate(self) -> int:
        return gate_features(self.depth_dimension, self.depth_feedforward)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """What a session samples with unless it says otherwise. Defaults: LMGen's in moshi 0.2.13."""

    temperature: float = 0.8
    text_temperature: float = 0.7
    top_k: int = 250
    text_top_k: int = 25
    candidates: int = 250
    """Largest top-k a session may ask for: the width of the noise and of TopK in the graph."""


SILENCE_CODES = (948, 243, 1178, 546, 1736, 1030, 1978, 2008)
"""What the published Mimi makes of silence; NVIDIA/personaplex, models/lm.py: SILENCE_TOKENS."""
SINE_CODES = (430, 1268, 381, 1611, 1095, 1495, 56, 472)
"""And of a 440 Hz sine at half of full scale; ibid.: SINE_TOKENS."""


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """A model that was trained to begin with a voice and a persona. Defaults: PersonaPlex's."""

    silence_codes: tuple[int, ...] | None = SILENCE_CODES
    """None: what the model's own codec makes of silence, for codecs other than the published."""
    sine_codes: tuple[int, ...] | None = SINE_CODES
    """None: what the model's own codec makes of the sine."""
    pause_frames: int = 6  # server.py of NVIDIA/personaplex: int(0.5 * 12.5)
    wrap: str = "<system>"  # ibid.: wrap_with_system_tags


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model: what `export build` exports."""

    name: str
    mimi: MimiConfig = field(default_factory=MimiConfig)
    lm: LmConfig = field(default_factory=LmConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    silent_ids: tuple[int, ...] = (0, 3)
    """Text ids that mean "not speaking": EPAD and PAD."""
    prompt: PromptConfig | None = None
    """None: calls begin with nothing but their caller."""

    @property
    def period_ns(self) -> int:
        return self.mimi.samples_per_frame * 1_000_000_000 // self.mimi.sample_rate_hz


def gate_features(dimension: int, feedforward: int) -> int:
    """Width of one half of a gated MLP; gating.py of moshi 0.2.13 (21/8 replaces 8/3 at 4x)."""
    if feedforward == 4 * dimension:
        return 21 * dimension // 8
    return 2 * feedforward // 3


MOSHI_7B = ModelConfig(name="moshi-7b")
PERSONAPLEX_7B = ModelConfig(
    name="personaplex-7b", lm=LmConfig(context=2999), prompt=PromptConfig()
)
"""Cut to the agent's 8 depth steps: the other 8 guess what the caller says, and are overwritten."""
