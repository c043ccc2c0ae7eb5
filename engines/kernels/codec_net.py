"""The codec's stages as launches: which kernel, with what, in which order. Pure.

A `Tick` is given addresses and a batch and lists launches; run with any addresses it also says how
much scratch they need. Between kernels activations lie in scratch, step by step, with what a
convolution remembers in front of them; two kernels carry that between regions and fronts.

    encode_first   windows_in, sound_in; per ratio k3, k1, stride; last, rows | qkv
    piece          out, rows, linear1, linear2, rows | qkv
    encode_last    out ... rows, downsample, project x 2, a launch per level but the first
    decode_first   gather, project x 2, upsample | qkv
    decode_last    windows_in, out ... rows, first; per ratio transposed, k3, k1; sound_out,
                   windows_out

Not here: loading and enqueueing (codec.py), what a launch computes (codec.cu), the order of sums
(codec_gemm.py).
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engines.cuda import LaunchShape
from engines.kernels import codec_gemm
from engines.kernels.codec_gemm import Blocks, Product
from engines.kernels.codec_kinds import CodecShape, Conv, decoder_convs, encoder_convs
from engines.kernels.codec_params import (
    BookParams,
    Call,
    KeptWindow,
    RowsParams,
    SoundParams,
    WindowParams,
)

FLOAT = 4
ALIGN = 256
WINDOW_THREADS = 256
SOUND_STEPS, LAST_STEPS = 64, 128
ROW_THREADS = 128
BOOK_BINS, BOOK_SESSIONS, BOOK_THREADS = 32, 8, 256

Choose = Callable[[Product, int], Blocks]


@dataclass(frozen=True, slots=True)
class Rows:
    """An activation in scratch: (B, before + steps + after, channels)."""

    address: int
    before: int
    steps: int
    channels: int
    after: int = 0

    @property
    def session(self) -> int:
        """Numbers from one session to the next."""
        return (self.before + self.steps + self.after) * self.channels

    @property
    def first(self) -> int:
        """Address of the first step that is not remembered."""
        return self.address + self.before * self.channels * FLOAT


@dataclass(frozen=True, slots=True)
class Kept:
    """A region: where its value lies, and where its next."""

    current: int
    next: int


@dataclass(slots=True)
class Tick:
    """Launches of one stage for one batch."""

    shape: CodecShape
    batch: int
    weights: Mapping[str, int]
    """Addresses by role; matrices as (k, n), see codec.py."""
    memory: int
    counters: int
    choose: Choose = codec_gemm.choose
    calls: list[Call] = field(default_factory=list)
    _used: int = 0
    _parts_floats: int = 0
    _last_parts: int = 0
    _normed_at: int = 0
    _waiting: list[tuple[ctypes.Structure, int]] = field(default_factory=list)

    @property
    def scratch_bytes(self) -> int:
        return self._used + self._parts_floats * FLOAT

    def finish(self) -> list[Call]:
        """Parts lie behind everything else, the same place for all launches."""
        for params, offset in self._waiting:
            params.parts = self.memory + self._used + offset * FLOAT
        return self.calls

    def encode_first(self, pcm: int, regions: Sequence[Kept], x: int, qkv: int) -> None:
        s = self.shape
        first, *convs = encoder_convs(s)
        sound, *kept = regions
        buffers = [self._rows(conv, conv.steps) for conv in convs]
        self._windows("codec_windows_in", convs, buffers, kept)
        raw = self._plain(first.steps, first.outputs)
        self._call(
            "codec_sound_in",
            LaunchShape((-(-first.steps // SOUND_STEPS), self.batch, 1), (256, 1, 1)),
            SoundParams(
                sound=pcm,
                w=self.weights["model.0.weight"],
                bias=self.weights["model.0.bias"],
                out=raw.first,
                out_elu=buffers[0].first,
                kept=sound.current,
                kept_next=sound.next,
                steps=first.steps,
                channels=first.outputs,
                kernel=first.kernel,
                elu_session=buffers[0].session,
            ),
            "model.0",
        )
        for at in range(0, len(convs) - 1, 3):
            self._residual(convs[at : at + 2], buffers[at : at + 2], raw, buffers[at + 2])
            down, taken, given = convs[at + 2], buffers[at + 2], buffers[at + 3]
            is_last = at + 4 == len(convs)
            raw = self._plain(down.steps // down.stride, down.outputs)
            keep = {} if is_last else {"out": raw.first, **_strides("out", raw)}
            self._conv(down, taken, out_elu=given.first, **_strides("elu", given), **keep)
        self._conv(convs[-1], buffers[-1])
        self._sum(convs[-1], x, bias=self.weights[f"{convs[-1].name}.bias"], normed="norm1")
        self._windows("codec_windows_out", convs, buffers, kept)
        self._qkv(qkv)

    def piece(self, x: int, attended: int, x_out: int, qkv: int) -> None:
        self._after(x, attended, {"x": x_out}, normed="norm1")
        self._qkv(qkv)

    def encode_last(self, x: int, attended: int, position: Kept, kept: Kept, codes: int) -> None:
        s = self.shape
        joined = Rows(
            self._take((s.positions * 2) * s.dimension), s.positions, s.positions, s.dimension
        )
        given = {
            "x": joined.first,
            "x_session": joined.session,
            "front": joined.address,
            "kept": kept.current,
            "kept_next": kept.next,
            "position": position.current,
            "position_next": position.next,
        }
        self._after(x, attended, given)
        latent = self._take(s.dimension)
        self._product(
            Product("downsample", 2 * s.positions * s.dimension, s.dimension, 1),
            a=joined.address,
            a_session=joined.session,
            w=self.weights["downsample"],
            out=latent,
            out_session=s.dimension,
        )
        left = self._take(2 * s.features)
        for index, role in enumerate(("proj.first", "proj.rest")):
            self._product(
                Product(role, s.dimension, s.features, 1),
                a=latent,
                a_session=s.dimension,
                w=self.weights[role],
                out=left + index * s.features * FLOAT,
                out_session=2 * s.features,
            )
        blocks = -(-s.bins // BOOK_BINS)
        best, best_at = self._take(2 * blocks), self._take(2 * blocks)
        groups = -(-self.batch // BOOK_SESSIONS)
        for level in range(1, s.levels):
            params = self._books(left, codes)
            params.level, params.blocks = level, blocks
            params.best, params.best_at, params.arrivals = best, best_at, self.counters
            grid = (blocks, 2 if level == 1 else 1, groups)
            self._call("codec_level", LaunchShape(grid, (BOOK_THREADS, 1, 1)), params, "level")

    def decode_first(self, codes: int, valid: int, kept: Kept, x: int, qkv: int) -> None:
        s = self.shape
        left = self._take(2 * s.features)
        shape = LaunchShape((self.batch, 1, 1), (256, 1, 1))
        self._call("codec_gather", shape, self._books(left, codes), "gather")
        count = 0
        for index, role in enumerate(("proj.first", "proj.rest")):
            product = Product(role, s.features, s.dimension, 1, meets=False, most=64)
            self._product(
                product,
                count * self.batch * s.dimension,
                a=left + index * s.features * FLOAT,
                a_session=2 * s.features,
                w=self.weights[role],
            )
            count += product.parts
        params = self._row_params(count, {"x": x}, normed="norm1")
        params.w, params.live = self.weights["upsample"], valid
        params.kept, params.kept_next = kept.current, kept.next
        self._call("codec_upsample", self._row_shape(), params, "upsample")
        self._qkv(qkv)

    def decode_last(
        self,
        x: int,
        attended: int,
        valid: int,
        position: Kept,
        regions: Sequence[Kept],
        pcm: int,
    ) -> None:
        convs = decoder_convs(self.shape)
        names = [conv.name for conv in convs if conv.remembered]
        by_name = dict(zip(names, regions, strict=True))
        buffers = [self._rows(conv, conv.steps) for conv in convs]
        self._windows("codec_windows_in", convs, buffers, regions)
        first, taken = convs[0], buffers[0]
        self._after(x, attended, {"x": taken.first, "x_session": taken.session})
        self._conv(first, taken, out_elu=buffers[1].first, **_strides("elu", buffers[1]))
        for at in range(1, len(convs) - 1, 3):
            up, given = convs[at], buffers[at + 1]
            raw = self._plain(up.steps * up.stride, up.outputs)
            region = by_name[up.name]
            self._conv(
                up,
                buffers[at],
                out=raw.first,
                out_elu=given.first,
                tail=region.current,
                tail_next=region.next,
                live=valid,
                **_strides("out", raw, up.stride),
                **_strides("elu", given, up.stride),
            )
            self._residual(convs[at + 1 : at + 3], buffers[at + 1 : at + 3], raw, buffers[at + 3])
        last, taken = convs[-1], buffers[-1]
        self._call(
            "codec_sound_out",
            LaunchShape((-(-last.steps // LAST_STEPS), self.batch, 1), (LAST_STEPS, 1, 1)),
            SoundParams(
                sound=taken.address,
                w=self.weights[f"{last.name}.weight"],
                bias=self.weights[f"{last.name}.bias"],
                out=pcm,
                live=valid,
                steps=last.steps,
                channels=last.inputs,
                kernel=last.kernel,
                elu_session=taken.session,
            ),
            last.name,
        )
        self._windows("codec_windows_out", convs, buffers, regions, valid, position)

    def _residual(
        self, convs: Sequence[Conv], buffers: Sequence[Rows], raw: Rows, given: Rows
    ) -> None:
        """ELU, k3, ELU, k1, added to ``raw``; the ELU of that into ``given``."""
        wide, narrow = convs
        taken, hidden = buffers
        self._conv(wide, taken, out_elu=hidden.first, **_strides("elu", hidden))
        self._conv(
            narrow,
            hidden,
            add=raw.first,
            out_elu=given.first,
            **_strides("add", raw),
            **_strides("elu", given),
        )

    def _conv(self, conv: Conv, taken: Rows, **given: int) -> None:
        """A convolution of what lies in ``taken``, its remembered rows included.

        given: where results go; nowhere: its parts are left to the launch that follows.
        """
        meets = bool(given)
        if conv.is_transposed:
            product = Product(
                conv.name, 2 * conv.inputs, conv.stride * conv.outputs, conv.steps + 1
            )
            given |= {"steps": conv.steps, "stride": conv.stride, "bias_n": conv.outputs}
        else:
            rows = conv.steps // conv.stride
            product = Product(conv.name, conv.kernel * conv.inputs, conv.outputs, rows, meets)
        if meets:
            given["bias"] = self.weights[f"{conv.name}.bias"]
        step = 1 if conv.is_transposed else conv.stride
        self._product(
            product,
            a=taken.address,
            a_session=taken.session,
            a_row=step * conv.inputs,
            w=self.weights[f"{conv.name}.weight"],
            **given,
        )

    def _after(self, x: int, attended: int, given: Mapping[str, int], normed: str = "") -> None:
        """A layer from its attention on; its result goes where ``given`` says."""
        s = self.shape
        c, wide = s.dimension, s.feedforward
        between = self._take(s.positions * c)
        self._linear("out", attended, c, c, meets=False, most=128)
        self._sum("out", between, add=x, scale=self.weights["scale1"], normed="norm2")
        hidden = self._take(s.positions * wide)
        self._linear("linear1", self._normed(), c, wide, out=hidden, gelu=1)
        self._linear("linear2", hidden, wide, c, meets=False)
        self._sum(
            "linear2",
            given["x"],
            add=between,
            scale=self.weights["scale2"],
            normed=normed,
            **{name: value for name, value in given.items() if name != "x"},
        )

    def _qkv(self, qkv: int) -> None:
        c = self.shape.dimension
        self._linear("qkv", self._normed(), c, 3 * c, out=qkv)

    def _normed(self) -> int:
        """Where rows lie after a norm: one place, as they are read by the launch that follows."""
        if not self._normed_at:
            self._normed_at = self._take(self.shape.positions * self.shape.dimension)
        return self._normed_at

    def _linear(
        self,
        role: str,
        a: int,
        inputs: int,
        outputs: int,
        *,
        meets: bool = True,
        most: int = codec_gemm.MOST,
        **given: int,
    ) -> None:
        rows = self.shape.positions
        self._product(
            Product(role, inputs, outputs, rows, meets, most),
            a=a,
            a_session=rows * inputs,
            a_row=inputs,
            w=self.weights[role],
            out_session=rows * outputs,
            out_row=outputs,
            **given,
        )

    def _product(self, product: Product, parts_at: int = 0, **given: int) -> None:
        """parts_at: floats in front of the parts, for two products whose parts are summed."""
        blocks = self.choose(product, self.batch)
        name, shape, params = codec_gemm.launch(product, self.batch, blocks, **given)
        self._last_parts = product.parts
        needed = parts_at + codec_gemm.parts_floats(product, self.batch)
        self._parts_floats = max(self._parts_floats, needed)
        if product.leaves_parts:
            self._waiting.append((params, parts_at))
        self._call(name, shape, params, product.name)
        if product.leaves_parts and product.meets:
            shape = codec_gemm.meet(product, self.batch)
            self._call("codec_meet", shape, params, f"{product.name} meets")

    def _sum(self, after: Conv | str, x: int, *, normed: str = "", **given: int) -> None:
        """Sum the parts of the product before, and what follows it on each row."""
        params = self._row_params(self._last_parts, {"x": x, **given}, normed)
        name = after if isinstance(after, str) else after.name
        self._call("codec_rows", self._row_shape(), params, f"{name} rows")

    def _row_params(self, count: int, given: Mapping[str, int], normed: str) -> RowsParams:
        s = self.shape
        norm: dict[str, int] = {}
        if normed:
            norm = {
                "normed": self._normed(),
                "gain": self.weights[f"{normed}.weight"],
                "shift": self.weights[f"{normed}.bias"],
            }
        params = RowsParams(
            **{
                "count": count,
                "channels": s.dimension,
                "steps": s.positions,
                "total_rows": self.batch * s.positions,
                "x_session": s.positions * s.dimension,
                **norm,
                **given,
            },
            eps=s.eps,
        )
        self._waiting.append((params, 0))
        return params

    def _row_shape(self) -> LaunchShape:
        return LaunchShape((self.batch * self.shape.positions, 1, 1), (ROW_THREADS, 1, 1))

    def _books(self, left: int, codes: int) -> BookParams:
        s = self.shape
        params = BookParams(
            left=left,
            codes=codes,
            levels=s.levels,
            bins=s.bins,
            features=s.features,
            sessions=self.batch,
        )
        for level in range(s.levels):
            params.books[level] = self.weights[f"book.{level}"]
            params.squared[level] = self.weights.get(f"squared.{level}", 0)
        return params

    def _windows(
        self,
        kernel: str,
        convs: Sequence[Conv],
        buffers: Sequence[Rows],
        regions: Sequence[Kept],
        valid: int = 0,
        position: Kept | None = None,
    ) -> None:
        """Carry what convolutions remember; a transposed one needs zeros around its input."""
        is_in = kernel == "codec_windows_in"
        found: list[KeptWindow] = []
        left = iter(regions)
        for conv, rows in zip(convs, buffers, strict=True):
            region = next(left) if conv.remembered else Kept(0, 0)
            if conv.is_transposed and is_in:
                ends = (rows.address, rows.first + rows.steps * rows.channels * FLOAT)
                found += [KeptWindow(0, 0, at, rows.channels, 1, rows.session, 0) for at in ends]
            elif conv.remembered and not conv.is_transposed:
                given = (rows.channels, rows.before, rows.session, rows.steps)
                found.append(KeptWindow(region.current, region.next, rows.address, *given))
        params = WindowParams(live=valid, advance=self.shape.positions)
        if position is not None:
            params.position, params.position_next = position.current, position.next
        for index, window in enumerate(found):
            params.windows[index] = window
        shape = LaunchShape((len(found), self.batch, 1), (WINDOW_THREADS, 1, 1))
        self._call(kernel, shape, params, kernel)

    def _rows(self, conv: Conv, steps: int) -> Rows:
        """A place for a convolution's input and what it remembers of the ticks before."""
        before, after = (1, 1) if conv.is_transposed else (conv.remembered, 0)
        address = self._take((before + steps + after) * conv.inputs)
        return Rows(address, before, steps, conv.inputs, after)

    def _plain(self, steps: int, channels: int) -> Rows:
        return Rows(self._take(steps * channels), 0, steps, channels)

    def _take(self, floats: int) -> int:
        """Room for that many numbers of every session."""
        address = self.memory + self._used
        self._used += -(-self.batch * floats * FLOAT // ALIGN) * ALIGN
        return address

    def _call(self, kernel: str, shape: LaunchShape, params: ctypes.Structure, label: str) -> None:
        self.calls.append(Call(kernel, shape, params, label))


def _strides(what: str, rows: Rows, together: int = 1) -> dict[str, int]:
    """of a result: ``together`` steps are one row of the product."""
    return {f"{what}_session": rows.session, f"{what}_row": together * rows.channels}


def plan_stage(tick: Tick, kind: str, ins: Sequence[int], outs: Sequence[int]) -> list[Call]:
    """The launches of a stage, from the addresses of its tensors in the manifest's order."""
    if kind == "codec_encode_first":
        (pcm, *before), (x, qkv, *after) = ins, outs
        tick.encode_first(pcm, _kept(before, after), x, qkv)
    elif kind == "codec_piece":
        (x, attended), (made, qkv) = ins, outs
        tick.piece(x, attended, made, qkv)
    elif kind == "codec_encode_last":
        (x, attended, *before), (codes, *after) = ins, outs
        position, kept = _kept(before, after)
        tick.encode_last(x, attended, position, kept, codes)
    elif kind == "codec_decode_first":
        (codes, valid, partial), (x, qkv, partial_next) = ins, outs
        tick.decode_first(codes, valid, Kept(partial, partial_next), x, qkv)
    else:
        assert kind == "codec_decode_last", kind
        (x, attended, valid, *before), (pcm, *after) = ins, outs
        position, *regions = _kept(before, after)
        tick.decode_last(x, attended, valid, position, regions, pcm)
    return tick.finish()


def _kept(before: Sequence[int], after: Sequence[int]) -> list[Kept]:
    return [Kept(*ends) for ends in zip(before, after, strict=True)]
