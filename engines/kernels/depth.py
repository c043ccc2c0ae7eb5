"""The depth transformer of a tick as launches: kind `depth` of `lm_kinds`.

    in                  hidden through every step's `in`, one product if they lie side by side
    choose text         and the first step's input: its `in` plus the text's embedding
    per step            6 times norm + qkv, attend, out + x, norm + gate, down + x; head, choose
    choose, last        also writes the delay ring and reads the frame that is now complete

Keys and values of a tick stay where the QKV products put them. Not here: how a product runs
(`linear`), what choosing means (`depth.cu`, and `linear_reference` in numpy).
"""

import ctypes
from collections.abc import Callable, Iterable
from pathlib import Path

from engines.bundle import ITEMSIZE, Dtype, StageSpec
from engines.cuda import Device, LaunchShape
from engines.kernel_stages import Bindable, Kind
from engines.kernels.linear import Launch, Rows, jobs, launch_of
from engines.kernels.linear_choice import THREADS, WARPS, Finish, Product, partials_bytes
from engines.kernels.lm_kinds import MOST_STREAMS
from engines.kernels.lm_stage import (
    Areas,
    SmallKernels,
    StageProducts,
    dtype_of,
    numbers_of,
    run_all,
)
from engines.kernels.nvrtc import Job

SOURCE = Path(__file__).with_name("depth.cu")
CHOOSERS = 1024
PASSES: dict[Dtype, int] = {"bfloat16": 2, "float16": 3, "float32": 4}
"""Leading bytes of a float32 that rounding to the element leaves anything in."""


class AttendParams(ctypes.Structure):
    """Twin of ``AttendParams`` in depth.cu."""

    _fields_ = [
        ("qkv", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        *[(name, ctypes.c_uint32) for name in "batch features heads step".split()],
        ("scale", ctypes.c_float),
        ("reserved", ctypes.c_uint32),
    ]


class ChooseParams(ctypes.Structure):
    """Twin of ``ChooseParams`` in depth.cu."""

    _fields_ = [
        *[
            (name, ctypes.c_uint64)
            for name in (
                "logits noise temperature top_k chosen table add y tokens moved offset text codes "
                "valid"
            ).split()
        ],
        *[
            (name, ctypes.c_uint32)
            for name in (
                "count candidates noise_rows noise_width row columns features add_stride streams "
                "ring_rows"
            ).split()
        ],
        ("max_delay", ctypes.c_int),
        ("text_padding", ctypes.c_int),
        ("passes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("delays", ctypes.c_int * MOST_STREAMS),
    ]


class _Shape:
    """The numbers of a depth stage."""

    def __init__(self, stage: StageSpec) -> None:
        numbers = numbers_of(stage)
        self.steps, self.layers = int(numbers["steps"]), int(numbers["layers"])
        self.features, self.gate = int(numbers["features"]), int(numbers["gate"])
        self.card, self.heads = int(numbers["card"]), int(numbers["heads"])
        self.eps = numbers["eps"]
        (self.hidden,), (self.text_card,) = (t.row_shape for t in stage.inputs[:2])
        _, self.noise_width = stage.inputs[2].row_shape
        self.streams, self.ring_rows = stage.inputs[3].row_shape
        self.max_delay, self.text_padding = int(numbers["max_delay"]), int(numbers["text_padding"])
        self.delays = [int(numbers[f"delay.{stream}"]) for stream in range(1 + self.steps)]
        d = self.features
        self.products = {
            "in": Product(d, self.hidden),
            "ins": Product(self.steps * d, self.hidden),
            "qkv": Product(3 * d, d),
            "out": Product(d, d, Finish.ADD),
            "gate": Product(self.gate, d, Finish.GATE),
            "down": Product(d, self.gate, Finish.ADD),
            "head": Product(self.card, d, Finish.FLOAT),
        }


class _Areas(Areas):
    """Scratch of a depth stage."""

    def __init__(self, shape: _Shape, dtype: Dtype, slots: int, base: int = 0) -> None:
        super().__init__(base)
        row = slots * shape.features * ITEMSIZE[dtype]
        self.partials = self.take(max(partials_bytes(p, slots) for p in shape.products.values()))
        self.ins = self.take(row * shape.steps)
        self.x, self.normed, self.attended = self.take(row), self.take(row), self.take(row)
        self.opened = self.take(slots * shape.gate * ITEMSIZE[dtype])
        self.logits = self.take(slots * shape.card * 4)
        self.chosen = self.take(slots * (1 + shape.steps) * 8)
        self.qkv = [self.take(3 * row * shape.steps) for _ in range(shape.layers)]


class DepthKernels:
    """Kernels of the depth stage of a bundle."""

    def __init__(self, stages: Iterable[StageSpec], device: Device, folder: Path) -> None:
        (stage,) = stages
        self._kernels = SmallKernels(SOURCE, dtype_of(stage), device, folder)
        self._attend = self._kernels.function("depth_attend")
        self._choose = self._kernels.function("depth_choose")

    def bind(self, bindable: Bindable) -> Callable[[], None]:
        """See `kernel_stages.Family.bind`."""
        tick = _Tick(self._kernels, bindable)
        launches = tick.enter()
        launches.append(self._choosing(tick, 0))
        for step in range(tick.shape.steps):
            for layer in range(tick.shape.layers):
                launches += tick.project(step, layer)
                launches.append(self._attending(tick, step, layer))
                launches += tick.finish(step, layer)
            launches += tick.head(step)
            launches.append(self._choosing(tick, step + 1))
        return run_all(launches)

    def close(self) -> None:
        self._kernels.close()

    def _attending(self, tick: "_Tick", step: int, layer: int) -> Launch:
        shape, batch = tick.shape, tick.batch
        params = AttendParams(
            qkv=tick.areas.qkv[layer],
            y=tick.areas.attended,
            batch=batch,
            features=shape.features,
            heads=shape.heads,
            step=step,
            scale=(shape.features // shape.heads) ** -0.5,
        )
        launch = LaunchShape((-(-batch * shape.heads // WARPS), 1, 1), (THREADS, 1, 1))
        return launch_of(self._attend, launch, params, tick.bindable.stream)

    def _choosing(self, tick: "_Tick", row: int) -> Launch:
        """Row 0 chooses text, row s + 1 the code of step s."""
        shape, areas, bindable = tick.shape, tick.areas, tick.bindable
        inputs = [bindable.address(bound.buffer) for bound in bindable.step.inputs]
        outputs = [bindable.address(bound.buffer) for bound in bindable.step.outputs]
        _, text_logits, noise, tokens, offset, heat, text_heat, top_k, text_top_k = inputs
        text, codes, valid, moved = outputs
        count = shape.card if row else shape.text_card
        params = ChooseParams(
            logits=areas.logits if row else text_logits,
            noise=noise,
            temperature=heat if row else text_heat,
            top_k=top_k if row else text_top_k,
            chosen=areas.chosen,
            table=bindable.weights[f"{row}.emb"] if row < shape.steps else 0,
            add=areas.ins + row * shape.features * tick.size,
            y=areas.x,
            tokens=tokens,
            moved=moved,
            offset=offset,
            text=text,
            codes=codes,
            valid=valid,
            count=count,
            candidates=min(shape.noise_width, count),
            noise_rows=1 + shape.steps,
            noise_width=shape.noise_width,
            row=row,
            columns=1 + shape.steps,
            features=shape.features,
            add_stride=shape.steps * shape.features,
            streams=shape.streams,
            ring_rows=shape.ring_rows,
            max_delay=shape.max_delay,
            text_padding=shape.text_padding,
            passes=PASSES[tick.dtype],
        )
        for index, delay in enumerate(shape.delays):
            params.delays[index] = delay
        launch = LaunchShape((tick.batch, 1, 1), (CHOOSERS, 1, 1))
        return launch_of(self._choose, launch, params, bindable.stream)


class _Tick:
    """Products of one stage and batch."""

    def __init__(self, kernels: SmallKernels, bindable: Bindable) -> None:
        stage = bindable.step.stage
        self.bindable, self.batch = bindable, bindable.batch
        self.shape, self.dtype = _Shape(stage), dtype_of(stage)
        self.size = ITEMSIZE[self.dtype]
        self.areas = _Areas(self.shape, self.dtype, bindable.batch, bindable.scratch.memory)
        d = self.shape.features
        self._products = StageProducts(
            kernels.linear,
            bindable,
            self.shape.products,
            partials=self.areas.partials,
            normed=Rows(self.areas.normed, d),
            eps=self.shape.eps,
        )
        self._x = Rows(self.areas.x, d)
        self._attended = Rows(self.areas.attended, d)
        self._opened = Rows(self.areas.opened, self.shape.gate)

    def enter(self) -> list[Launch]:
        """Hidden through the `in` of every step."""
        shape, weights = self.shape, self.bindable.weights
        hidden = Rows(self.bindable.address(self.bindable.step.inputs[0].buffer), shape.hidden)
        stride, row = shape.steps * shape.features, shape.features * self.size
        first = weights["0.in"]
        places = [weights[f"{step}.in"] - first for step in range(shape.steps)]
        product = self._products.product
        if places == [step * row * shape.hidden for step in range(shape.steps)]:
            return product("ins", hidden, Rows(self.areas.ins, stride), weight="0.in")
        launches: list[Launch] = []
        for step in range(shape.steps):
            y = Rows(self.areas.ins + step * row, stride)
            launches += product("in", hidden, y, weight=f"{step}.in")
        return launches

    def project(self, step: int, layer: int) -> list[Launch]:
        """Norm and QKV."""
        width = 3 * self.shape.features
        y = Rows(self.areas.qkv[layer] + step * self.batch * width * self.size, width)
        weight, norm = f"{step}.{layer}.qkv", f"{layer}.norm1"
        return self._products.product("qkv", self._x, y, weight=weight, norm=norm)

    def finish(self, step: int, layer: int) -> list[Launch]:
        """The layer from its attention on."""
        product, at, x = self._products.product, f"{step}.{layer}", self._x
        return [
            *product("out", self._attended, x, weight=f"{at}.out", add=x),
            *product("gate", x, self._opened, weight=f"{at}.gate", norm=f"{layer}.norm2"),
            *product("down", self._opened, x, weight=f"{at}.down", add=x),
        ]

    def head(self, step: int) -> list[Launch]:
        logits = Rows(self.areas.logits, self.shape.card)
        return self._products.product("head", self._x, logits, weight=f"{step}.head")


def _scratch_bytes(stage: StageSpec, slots: int) -> int:
    return _Areas(_Shape(stage), dtype_of(stage), slots).nbytes


def _jobs(stages: Iterable[StageSpec], slots: int, device: Device) -> list[Job]:
    (stage,) = stages
    return jobs(_Shape(stage).products.values(), slots, dtype_of(stage), device)


KINDS = {"depth": Kind("depth", DepthKernels, _scratch_bytes, _jobs)}
"""For `kernel_stages.kinds`."""
