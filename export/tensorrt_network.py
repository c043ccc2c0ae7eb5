"""One prepared graph -> one TensorRT network -> the bytes of a plan, and every doubt on the way.

Works with either flavour: `tensorrt_rtx` and `tensorrt` are the same API, handed in as a module.
A plan cannot be opened without its GPU, so whatever can be checked is checked on the network and
its configuration before they are built: names, dtypes and shapes of inputs and outputs, the exact
profiles, the rings that are updated in place, and that attention reads no further than it should.

The parser drops attention's valid lengths in silence (tensorrt_rtx 1.7.1): every session would
attend over rows nobody wrote. `restore_lengths` puts them back and `_length_faults` looks again.
Float32 attention has no fused kernel and may be decomposed; 16-bit attention may not, unless
TensorRT says that it has no kernel for it. TF32 is off: it would change the codec's codes.

Not here: files, processes and time (`tensorrt_build`), what may be built where (`targets`).
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engines.bundle import NEXT, Dtype, StageSpec, TensorSpec
from engines.plans import TENSORRT_DTYPES, Profile, described
from export.mistake import Mistake
from export.tensorrt_graph import Prepared

RECIPE = 1
"""Raised when the settings or remedies below change what a plan computes or how fast."""

NO_FUSED_KERNEL = "not supported by a dedicated kernel"
"""What TensorRT says of attention it could only run decomposed."""

NO_TACTIC, FEWEST_ROWS, HEAD_STEP = "def_tactic_desc", 4, 8
"""What tensorrt_rtx 1.7.1 says of attention it cannot build in any way, and what it can: heads
times sessions from 4 on, with heads of 8, 16, ... Found by trying, in every dtype."""

Progress = Callable[[str, int, int], None]
"""(phase, step, steps) of the innermost phase that has begun."""

Attention = Literal["none", "strict", "decomposable"]


class NotParsed(Mistake):
    """A graph uses what this TensorRT cannot parse; the exporter's fault."""


class NotBuilt(Mistake):
    """TensorRT parsed a graph and could not build it; its own words are in the message."""


class NetworkDiffers(AssertionError):
    """The network is not what the bundle says; a bug here, or a new kind of parser trouble."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a plan is built from and for."""

    path: Path
    """Folder of the bundle."""
    stage: StageSpec
    rings: frozenset[str]
    """Inputs of the stage that the bundle says are updated in place."""
    prepared: Prepared
    profiles: tuple[Profile, ...]
    compute_capability: str
    timings: bytes = b""
    """What `tensorrt` measured when it built plans for this target before; may be empty."""


@dataclass(frozen=True, slots=True)
class Built:
    """A plan that has not been written yet."""

    plan: memoryview
    attention: Attention
    timings: bytes
    """To be given to the next build; empty for tensorrt_rtx, which times nothing here."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The builder's configuration, and its profiles, which cannot be read back from it."""

    config: Any
    profiles: list[Any]


def build(trt: Any, wanted: Wanted, progress: Progress) -> Built:
    """Build one plan with every profile, in their order.

    Raises `NotParsed`, `NotBuilt` or `NetworkDiffers`.
    """
    with nothing_collected():
        return _build(trt, wanted, progress)


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Around whatever makes a builder; without it the process may hang.

    TensorRT holds a lock of its own while it calls our logger. A builder that cyclic collection
    came upon there would wait for that lock for ever, so dead ones are collected before, and
    nothing is meanwhile. Whoever makes a builder keeps it out of tracebacks, which are cycles.
    """
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _build(trt: Any, wanted: Wanted, progress: Progress) -> Built:
    stage, strict = wanted.stage, True
    builder: Any = None
    network: Any = None
    attentions: Any = None
    settings: Any = None
    try:
        while True:
            log = Log(trt)
            builder = trt.Builder(log.sink)
            network = parse(trt, builder, log, wanted)
            attentions = attentions_of(trt, network)
            restore_lengths(trt, network, attentions, wanted.prepared)
            attention = _choose_kernels(trt, attentions, strict)
            settings = configure(trt, builder, network, wanted)
            monitor = _monitor(trt, progress)
            settings.config.progress_monitor = monitor
            if faults := list(network_faults(trt, network, settings, wanted)):
                raise NetworkDiffers(
                    f"stage {stage.name}: the network differs: {'; '.join(faults)}"
                )
            plan = builder.build_serialized_network(network, settings.config)
            if plan is not None:
                return Built(memoryview(plan), attention, _timings(trt, settings.config))
            if attention == "strict" and any(NO_FUSED_KERNEL in error for error in log.errors):
                strict = False
                continue
            raise NotBuilt(_why_not_built(trt, wanted, attentions, log.errors))
    finally:
        builder = network = attentions = settings = None


def _why_not_built(
    trt: Any, wanted: Wanted, attentions: Mapping[str, Any], errors: Sequence[str]
) -> str:
    named = f"stage {wanted.stage.name}"
    said = errors[-1] if errors else "no reason was given"
    if NO_TACTIC in said and (narrow := _too_narrow(attentions, wanted.profiles)):
        return (
            f"{named}: {trt.__name__} {trt.__version__} has no kernel for attention "
            f"of {narrow}. Use a model with {FEWEST_ROWS} heads or more, each a multiple of "
            f"{HEAD_STEP} wide, or run this bundle on the CUDA executor, which needs no plans"
        )
    return (
        f"{named} was parsed but {trt.__name__} {trt.__version__} could not build "
        f"it for batches of {described(wanted.profiles)}: {said}. Change the shape it names "
        f"in the model, or run this bundle on the CUDA executor, which needs no plans"
    )


def network_faults(trt: Any, network: Any, settings: Settings, wanted: Wanted) -> Iterator[str]:
    """Everything in which a network and its configuration are not the bundle's stage."""
    stage, prepared = wanted.stage, wanted.prepared
    taken = {spec.name: (spec.dtype, _dims(spec)) for spec in stage.inputs}
    taken |= {weight.name: (weight.dtype, weight.shape) for weight in prepared.weights}
    given = {spec.name: (spec.dtype, _dims(spec)) for spec in stage.outputs}
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    yield from _tensor_faults(trt, "input", inputs, taken)
    yield from _tensor_faults(trt, "output", outputs, given)
    yield from _length_faults(trt, network, prepared)
    yield from _profile_faults(settings, inputs, wanted.profiles)
    if settings.config.get_flag(trt.BuilderFlag.TF32):
        yield "TF32 is on"
    if (found := updated_in_place(trt, network)) != wanted.rings:
        yield f"updates {sorted(found)} in place and should update {sorted(wanted.rings)}"


def _tensor_faults(
    trt: Any, side: str, found: list[Any], wanted: Mapping[str, tuple[Dtype, tuple[int, ...]]]
) -> Iterator[str]:
    names = [tensor.name for tensor in found]
    if names != list(wanted):
        lost, extra = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
        yield f"{side}s: {lost} missing, {extra} unknown, or their order changed"
        return
    for tensor in found:
        dtype, shape = wanted[tensor.name]
        if tensor.dtype != getattr(trt.DataType, TENSORRT_DTYPES[dtype]):
            yield f"{side} {tensor.name} is {tensor.dtype} and should be {dtype}"
        if tuple(tensor.shape) != shape:
            yield f"{side} {tensor.name} has shape {tuple(tensor.shape)} and should have {shape}"


def _profile_faults(
    settings: Settings, inputs: list[Any], profiles: Sequence[Profile]
) -> Iterator[str]:
    if (count := settings.config.num_optimization_profiles) != len(profiles):
        yield f"{count} profiles instead of {len(profiles)}"
        return
    for made, profile in zip(settings.profiles, profiles, strict=True):
        for tensor in inputs:
            if -1 not in tuple(tensor.shape):
                continue
            shapes = [tuple(shape) for shape in made.get_shape(tensor.name)]
            sizes = (profile.smallest, profile.likeliest, profile.largest)
            wanted = [_filled(tensor, size) for size in sizes]
            if shapes != wanted:
                yield f"profile of {tensor.name} is {shapes} and should be {wanted}"


def _length_faults(trt: Any, network: Any, prepared: Prepared) -> Iterator[str]:
    """That every attention of the graph is there, and reads its lengths if it had any."""
    attentions = attentions_of(trt, network)
    if set(attentions) != set(prepared.attentions):
        yield f"{len(attentions)} attentions instead of {len(prepared.attentions)}"
    sources = {
        layer.get_output(0).name: layer.get_input(0).name
        for layer in _layers(network)
        if layer.type == trt.LayerType.CAST
    }
    for name, lengths in prepared.lengths.items():
        tensor = attentions[name].key_value_lengths if name in attentions else None
        if tensor is None or sources.get(tensor.name) != lengths:
            yield f"attention {name} does not read its valid lengths from {lengths}"


class Log:
    """What TensorRT says, kept for error messages instead of printed."""

    def __init__(self, trt: Any) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []
        log = self

        class Sink(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity <= trt.ILogger.Severity.ERROR:
                    log.errors.append(message)
                elif severity == trt.ILogger.Severity.WARNING:
                    log.warnings.append(message)

        self.sink = Sink()


def _monitor(trt: Any, progress: Progress) -> Any:
    """TensorRT's phases nest; whoever watches wants to know that it moves."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps
            progress(phase, 0, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            progress(phase, step + 1, self.steps.get(phase, step + 1))
            return True

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()


def parse(trt: Any, builder: Any, log: Log, wanted: Wanted) -> Any:
    """The network of a prepared graph, as the parser leaves it."""
    stage = wanted.stage
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, log.sink)
    # The path is where external weights are looked for.
    if parser.parse(wanted.prepared.model, str(wanted.path / stage.graph)):
        return network
    faults = [parser.get_error(index) for index in range(parser.num_errors)]
    said = "; ".join(
        f"{fault.node_operator()} (node {fault.node_name()}): {fault.desc()}" for fault in faults
    )
    raise NotParsed(
        f"stage {stage.name}: {trt.__name__} {trt.__version__} cannot parse "
        f"{said or (log.errors[-1] if log.errors else 'the graph')}. Give the stage another "
        f"standard operator for it in export/lowering.py"
    )


def _layers(network: Any) -> Iterator[Any]:
    for index in range(network.num_layers):
        yield network.get_layer(index)


def attentions_of(trt: Any, network: Any) -> dict[str, Any]:
    """Attention by the name of its node in the graph."""
    found: dict[str, Any] = {}
    for layer in _layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            # The binding hands out the base class; only the real one knows its attention.
            layer.__class__ = trt.IAttentionInputLayer
            attention = layer.attention
            found[attention.name] = attention
    return found


def restore_lengths(trt: Any, network: Any, attentions: dict[str, Any], prepared: Prepared) -> None:
    """Set the valid lengths that the parser dropped; attention takes them as int32."""
    wanted = set(prepared.lengths.values())
    tensors = {
        tensor.name: tensor
        for layer in _layers(network)
        for tensor in (layer.get_output(index) for index in range(layer.num_outputs))
        if tensor is not None and tensor.name in wanted
    }
    for index in range(network.num_inputs):
        tensors[network.get_input(index).name] = network.get_input(index)
    narrow: dict[str, Any] = {}
    for name, lengths in prepared.lengths.items():
        if lengths not in tensors:
            raise NetworkDiffers(f"the parser lost {lengths}, the valid lengths of {name}")
        if lengths not in narrow:
            narrow[lengths] = network.add_cast(tensors[lengths], trt.int32).get_output(0)
        attentions[name].key_value_lengths = narrow[lengths]


def _choose_kernels(trt: Any, attentions: dict[str, Any], strict: bool) -> Attention:
    """Let attention be decomposed where no kernel of its own can exist, or none was found."""
    if not attentions:
        return "none"
    found: set[Attention] = set()
    for attention in attentions.values():
        half = attention.get_input(0).dtype in (trt.DataType.HALF, trt.DataType.BF16)
        attention.decomposable = not (half and strict)
        found.add("strict" if half and strict else "decomposable")
    return "decomposable" if "decomposable" in found else "strict"


def _too_narrow(attentions: Mapping[str, Any], profiles: Sequence[Profile]) -> str:
    """Which attention `NO_TACTIC` is about, in a clause; empty when none is that narrow."""
    fewest = min(profile.smallest for profile in profiles)
    for attention in attentions.values():
        _, heads, _, head_dim = attention.get_input(0).shape
        if head_dim % HEAD_STEP:
            return f"heads of {head_dim}"
        if heads * fewest < FEWEST_ROWS:
            many, sessions = "s" * (heads != 1), "s" * (fewest != 1)
            return f"{heads} head{many} for {fewest} session{sessions}"
    return ""


def updated_in_place(trt: Any, network: Any) -> frozenset[str]:
    """Inputs whose memory an output must share: the caches of every cache update."""
    found: set[str] = set()
    for layer in _layers(network):
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            cache, updated = layer.get_input(0).name, layer.get_output(0).name
            if updated != cache + NEXT:
                raise NetworkDiffers(f"{cache} is updated in place as {updated}, not {cache}{NEXT}")
            found.add(cache)
    return frozenset(found)


def configure(trt: Any, builder: Any, network: Any, wanted: Wanted) -> Settings:
    """Settings for one compute capability with every profile."""
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    if trt.__name__ == "tensorrt_rtx":
        config.num_compute_capabilities = 1
        member = "SM" + wanted.compute_capability.replace(".", "")
        which = getattr(trt.ComputeCapability, member, None)
        if which is None or not config.set_compute_capability(which, 0):
            raise NotBuilt(
                f"{trt.__name__} {trt.__version__} has no compute capability "
                f"{wanted.compute_capability}. See what is served: "
                f"duplexbox export build --target list"
            )
    else:
        # So that tensorrt-lean can run the plan; the lean run-time is a wheel of its own there.
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
        cache = config.create_timing_cache(wanted.timings)
        if not config.set_timing_cache(cache, False):
            # Of another version or GPU: measure anew.
            config.set_timing_cache(config.create_timing_cache(b""), False)
    made: list[Any] = []
    for profile in wanted.profiles:
        shapes = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            sizes = (profile.smallest, profile.likeliest, profile.largest)
            smallest, likeliest, largest = (_filled(tensor, size) for size in sizes)
            shapes.set_shape(tensor.name, smallest, likeliest, largest)
        if config.add_optimization_profile(shapes) != len(made):
            raise NetworkDiffers(f"profile {profile} was not accepted")
        made.append(shapes)
    return Settings(config, made)


def _timings(trt: Any, config: Any) -> bytes:
    if trt.__name__ == "tensorrt_rtx":
        return b""
    cache = config.get_timing_cache()
    return b"" if cache is None else bytes(memoryview(cache.serialize()))


def _filled(tensor: Any, size: int) -> tuple[int, ...]:
    return tuple(size if length == -1 else length for length in tensor.shape)


def _dims(spec: TensorSpec) -> tuple[int, ...]:
    """A bundle's shape as TensorRT has it: -1 for the symbolic dimension."""
    return tuple(length if isinstance(length, int) else -1 for length in spec.shape)
