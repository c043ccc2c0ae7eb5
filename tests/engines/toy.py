"""A bundle small enough to check by hand, with every kind of region.

One frame is 4 samples. Stage `hear` keeps the last two samples (window) and a ring of the mean of
every frame, attended to; stage `speak` adds the noise stage's first number, scaled by the
session's own gain, and counts. Built with onnx alone.
"""

from pathlib import Path

import msgspec
import onnx
import onnx.parser

from engines import bundle
from engines.bundle import (
    AudioPorts,
    Bundle,
    Manifest,
    ModelInfo,
    RegionSpec,
    StageSpec,
    TensorSpec,
    TextPorts,
    Timing,
)
from engines.clocks import ClockKind, NativeClock, Order

SAMPLES = 4
RETAIN = 5
WIDTH = 2

HEAR = f"""
<ir_version: 11, opset_import: ["" : 24]>
hear (float[B,1,{SAMPLES}] pcm, float[B,2] hear__window, float[B,1,{RETAIN},{WIDTH}] hear__ring,
      int64[B] frames)
  => (float[B,1,{SAMPLES}] heard, float[B,2] hear__window__next,
      float[B,1,{RETAIN},{WIDTH}] hear__ring__next) <
  int64[1] one = {{1}}, int64[1] last = {{2}}, int64[1] end = {{{SAMPLES}}}, int64[1] axis2 = {{2}},
  int64[1] axis1 = {{1}}, int64 retain = {{{RETAIN}}}, int64 single = {{1}},
  int64[4] row_shape = {{-1, 1, 1, 1}}, int64[4] wide = {{1, 1, 1, {WIDTH}}}
>
{{
  tail = Slice (pcm, last, end, axis2)
  hear__window__next = Squeeze (tail, axis1)
  mean = ReduceMean <keepdims = 1> (pcm, axis2)
  row_1 = Reshape (mean, row_shape)
  row = Expand (row_1, wide)
  index = Mod (frames, retain)
  hear__ring__next = TensorScatter <axis = 2, mode = "linear"> (hear__ring, row, index)
  keys = Squeeze (hear__ring__next, axis1)
  seen = Add (frames, single)
  valid = Min (seen, retain)
  query = Squeeze (row, axis1)
  attended = Attention <q_num_heads = 1, kv_num_heads = 1>
    (query, keys, keys, , , , valid)
  attended_mean = ReduceMean <keepdims = 1> (attended, axis2)
  window_mean = ReduceMean <keepdims = 1> (hear__window, axis1)
  window_3d = Unsqueeze (window_mean, axis2)
  sum = Add (pcm, attended_mean)
  heard = Add (sum, window_3d)
}}
"""

SPEAK = f"""
<ir_version: 11, opset_import: ["" : 24]>
speak (float[B,1,{SAMPLES}] heard, float[B,1,4] noise, float[B] sampling__gain, int64[B] frames)
  => (float[B,1,{SAMPLES}] pcm_out, int64[B] text, bool[B] valid, int64[B] frames__next) <
  int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] axis2 = {{2}}, int64 single = {{1}},
  int64[3] column = {{-1, 1, 1}}, int64 none = {{0}}
>
{{
  first = Slice (noise, zero, one, axis2)
  gain = Reshape (sampling__gain, column)
  scaled = Mul (first, gain)
  pcm_out = Add (heard, scaled)
  frames__next = Add (frames, single)
  text = Identity (frames)
  valid = Greater (frames, none)
}}
"""


def manifest() -> Manifest:
    """The toy's manifest, with no files yet."""
    ring = NativeClock(ClockKind.RING, axis=1, advance="1", retain=RETAIN, order=Order.MODULO)
    counter = NativeClock(ClockKind.COUNTER, advance="1")
    constant = NativeClock(ClockKind.CONSTANT)
    ring_shape = (1, RETAIN, WIDTH)
    frame = TensorSpec("pcm", "float32", ("B", 1, SAMPLES))
    frames = TensorSpec("frames", "int64", ("B",))
    heard = TensorSpec("heard", "float32", ("B", 1, SAMPLES))
    noise = TensorSpec("noise", "float32", ("B", 1, 4))
    return Manifest(
        format=bundle.FORMAT,
        model=ModelInfo("toy", parameters=0, checkpoint_sha256="0" * 64, trained=False),
        timing=Timing(period_ns=500_000, sample_rate_hz=8000, samples_per_frame=SAMPLES),
        largest_batch=4,
        regions=(
            RegionSpec(
                "hear.window", "float32", (2,), NativeClock(ClockKind.WINDOW, 0, "4", retain=2)
            ),
            RegionSpec("hear.ring", "float32", ring_shape, ring, in_place=True),
            RegionSpec("frames", "int64", (), counter),
            RegionSpec("sampling.gain", "float32", (), constant, fill=0.0, bounds=(0.0, 2.0)),
            RegionSpec("sampling.seed", "int64", (), constant, fill=7, bounds=(0, 2**40)),
        ),
        stages=(
            StageSpec(
                "hear",
                inputs=(
                    frame,
                    TensorSpec("hear.window", "float32", ("B", 2)),
                    TensorSpec("hear.ring", "float32", ("B", *ring_shape)),
                    frames,
                ),
                outputs=(
                    heard,
                    TensorSpec("hear.window.next", "float32", ("B", 2)),
                    TensorSpec("hear.ring.next", "float32", ("B", *ring_shape)),
                ),
                graph="stages/hear.onnx",
            ),
            StageSpec(
                "noise",
                inputs=(TensorSpec("sampling.seed", "int64", ("B",)), frames),
                outputs=(noise,),
                builtin="gumbel_noise",
            ),
            StageSpec(
                "speak",
                inputs=(heard, noise, TensorSpec("sampling.gain", "float32", ("B",)), frames),
                outputs=(
                    TensorSpec("pcm_out", "float32", ("B", 1, SAMPLES)),
                    TensorSpec("text", "int64", ("B",)),
                    TensorSpec("valid", "bool", ("B",)),
                    TensorSpec("frames.next", "int64", ("B",)),
                ),
                graph="stages/speak.onnx",
            ),
        ),
        audio=AudioPorts(input="pcm", output="pcm_out", valid="valid"),
        text=TextPorts(output="text", pieces="pieces.json", silent_ids=(0,)),
        files={
            name: bundle.FileSpec("0" * 64, 0)
            for name in ("stages/hear.onnx", "stages/speak.onnx", "pieces.json")
        },
    )


def write_toy(folder: Path) -> Bundle:
    """Write the toy bundle into ``folder`` and return it."""
    (folder / "stages").mkdir(parents=True)
    for name, text in (("hear", HEAR), ("speak", SPEAK)):
        model = _with_dots(onnx.parser.parse_model(text))
        onnx.checker.check_model(model)
        onnx.save(model, folder / "stages" / f"{name}.onnx")
    (folder / "pieces.json").write_text('["", "a", "b"]')
    draft = manifest()
    files = {name: bundle.describe_file(folder / name) for name in draft.files}
    return bundle.write(folder, msgspec.structs.replace(draft, files=files))


def _with_dots(model: onnx.ModelProto) -> onnx.ModelProto:
    """The text form of ONNX has no dots in names, so they are written as two underscores."""
    graph = model.graph
    for value in (*graph.input, *graph.output):
        value.name = value.name.replace("__", ".")
    for node in graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
        node.output[:] = [name.replace("__", ".") for name in node.output]
    return model
