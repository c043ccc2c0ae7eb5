"""Feed prompts on ONNX Runtime, in slots that no tick steps: `OrtPrimer` on the CPU.

The rings of a slot are written where they lie, so what a prompt leaves is at once where the
session will live; everything else of a session is small and double-buffered, changes buffers with
every tick of the others, and is therefore kept by whoever asked (`prefill.Prompt` knows it) until
`settle` writes all of it at once.

`PromptGraphs` runs both stages wherever the rings are; `cuda_prefill` has them on a GPU, and
`tensorrt_prompt` runs plans instead. Not here: how many rows when (the appliance), files
(`snapshot`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.bundle import NEXT, Bundle, BundleError, PromptSpec, RegionSpec, StageSpec
from engines.clocks import ClockKind
from engines.executor import check_setting
from engines.noise import gumbel
from engines.ort_executor import STORAGE, OrtExecutor, StageFailed, load_stage
from engines.prefill import Prompt, chunk_rows, tokens_after

Load = Callable[[StageSpec], Any]
"""A session of one stage."""

Rings = Callable[[str, int], tuple[str, int, int]]
"""Region and slot -> device, its ordinal, and the address of the slot's rows."""


class OrtParking:
    """`prefill.Parking` on the CPU. The executor's own thread uses it."""

    def __init__(self, executor: OrtExecutor) -> None:
        self._executor = executor
        self._regions = {region.name: region for region in executor.bundle.manifest.regions}

    def clear(self, slot: int) -> None:
        """See `prefill.Parking.clear`."""
        for region in self._regions.values():
            if region.in_place:
                self._executor.region(region.name)[slot] = region.fill

    def leave(self, slot: int) -> None:
        """See `prefill.Parking.leave`: here a slot's memory is the slot's for ever."""

    def settle(
        self,
        source: int,
        target: int,
        settings: Mapping[str, float],
        values: Mapping[str, NDArray[Any]],
    ) -> None:
        """See `prefill.Parking.settle`."""
        for name, value in settings.items():
            check_setting(self._regions, name, value)
        for region in self._regions.values():
            array = self._executor.region(region.name)
            if region.in_place:
                if source != target:
                    array[target] = array[source]
                continue
            array[target] = settings.get(region.name, region.fill)
            if region.name in values:
                array[target] = values[region.name]

    def read(self, slot: int, name: str, first: int = 0, rows: int | None = None) -> NDArray[Any]:
        """See `prefill.Parking.read`."""
        array = self._executor.region(name)[slot]
        return np.array(array if rows is None else array[self._span(name, first, rows)])

    def write(self, slot: int, name: str, first: int, rows: NDArray[Any]) -> None:
        """See `prefill.Parking.write`."""
        region = self._regions[name]
        assert region.in_place, name
        length = rows.shape[region.clock.axis]
        self._executor.region(name)[slot][self._span(name, first, length)] = rows

    def _span(self, name: str, first: int, rows: int) -> tuple[slice, ...]:
        axis = self._regions[name].clock.axis
        return (*[slice(None)] * axis, slice(first, first + rows))


class PromptGraphs:
    """Both stages of a bundle's prompt, whose rings lie where `Rings` says."""

    def __init__(self, bundle: Bundle, load: Load, rings: Rings) -> None:
        """Load both stages. Raises `BundleError` when the bundle's calls have no prompt."""
        manifest = bundle.manifest
        if manifest.prompt is None:
            raise BundleError(f"{bundle.path}: {manifest.model.name} takes no prompt")
        self.spec: PromptSpec = manifest.prompt
        self._regions = {region.name: region for region in manifest.regions}
        self._rings = rings
        self._prefill, self._opening = load(self.spec.prefill), load(self.spec.opening)
        self._made = {
            tensor.name: np.zeros((1, *tensor.row_shape), STORAGE[tensor.dtype][0])
            for stage in (self.spec.prefill, self.spec.opening)
            for tensor in stage.outputs
            if not tensor.name.endswith(NEXT) or stage is self.spec.opening
        }
        (embedded,) = (t for t in self.spec.prefill.inputs if t.name == "embedded")
        self._embedded_dtype = STORAGE[embedded.dtype][0]
        self._width = embedded.row_shape[0]
        made = set(self._made) | set(self._regions)
        (self._noise,) = (t for t in self.spec.opening.inputs if t.name not in made)
        (self._seed, *_) = (
            tensor.name
            for stage in manifest.stages
            if stage.builtin and self._noise.name in {t.name for t in stage.outputs}
            for tensor in stage.inputs
        )

    def answer(
        self, stage: StageSpec, given: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """One run of either stage on what is given by name, rings left out; copies of what it made.

        For golden data; `feed` and `open` serve.
        """
        session = self._prefill if stage is self.spec.prefill else self._opening
        self.run(session, stage, dict(given), 0)
        return {t.name: self._made[t.name].copy() for t in stage.outputs if t.name in self._made}

    @property
    def retain(self) -> int:
        """Rows of the rings a prompt is written into."""
        return min(r.clock.retain for r in rings_of(self.spec, self._regions))

    def feed(self, slot: int, prompt: Prompt, first: int, rows: int) -> None:
        """See `prefill.Primer.feed`."""
        assert 0 <= first < first + rows <= prompt.rows, (first, rows, prompt.rows)
        assert rows == chunk_rows(first, rows, rows, self.retain), (first, rows, self.retain)
        last = first + rows
        embedded = np.zeros((rows, self._width), self._embedded_dtype)
        given = prompt.embedded[first:last]
        embedded[: len(given)] = given
        position = np.arange(first, last)
        self.run(
            self._prefill,
            self.spec.prefill,
            {
                "ids": prompt.ids[first:last],
                "position": position,
                "embedded": embedded,
                "is_embedded": position < len(prompt.embedded),
            },
            slot,
        )

    def open(
        self, slot: int, prompt: Prompt, settings: Mapping[str, float]
    ) -> dict[str, NDArray[Any]]:
        """See `prefill.Primer.open`; the last row has been fed."""
        last, region = prompt.shared_rows, self._regions[self.spec.tokens]
        ring = tokens_after(self.spec, prompt.frames, prompt.rows, region.shape[1], region.fill)
        counted = np.array([prompt.rows], np.int64)
        noise = np.zeros((1, *self._noise.row_shape), np.float32)
        seed = np.array([settings.get(self._seed, self._regions[self._seed].fill)], np.int64)
        gumbel(seed, np.array([last], np.int64), noise)
        given = {
            self._noise.name: noise,
            self.spec.tokens: ring[None],
            self.spec.counter: counted,
        }
        for tensor in self.spec.opening.inputs:
            if tensor.name not in given and tensor.name in self._regions:
                value = settings.get(tensor.name, self._regions[tensor.name].fill)
                given[tensor.name] = np.full(1, value, STORAGE[tensor.dtype][0])
        self.run(self._opening, self.spec.opening, given, slot)
        chosen = self._made[self.spec.tokens + NEXT]
        return {self.spec.tokens: chosen[0].copy(), self.spec.counter: counted[0]}

    def run(self, session: Any, stage: StageSpec, given: dict[str, Any], slot: int) -> None:
        """One run of ``stage``: what is given by name, made by the stage before, or a ring.

        On a GPU it follows what the ticks' stream was given, and is over when this returns.
        """
        binding = session.io_binding()
        for tensor, bind in (
            *((t, binding.bind_input) for t in stage.inputs),
            *((t, binding.bind_output) for t in stage.outputs),
        ):
            name, element = tensor.name, STORAGE[tensor.dtype][1]
            array = given.get(name, self._made.get(name))
            if array is None:
                region = self._regions[name.removesuffix(NEXT)]
                device, ordinal, address = self._rings(region.name, slot)
                bind(name, device, ordinal, element, (1, *region.shape), address)
                continue
            array = np.ascontiguousarray(array)
            given[name] = array  # alive until the run is over
            bind(name, "cpu", 0, element, array.shape, array.ctypes.data)
        try:
            session.run_with_iobinding(binding)
        except Exception as err:  # ONNX Runtime raises a dozen unrelated classes
            raise StageFailed(f"stage {stage.name} failed in slot {slot}: {err}") from err


class OrtPrimer(OrtParking):
    """`prefill.Primer` on the CPU. The executor's own thread uses it."""

    def __init__(self, executor: OrtExecutor) -> None:
        """Load both stages. Raises `BundleError` when the bundle's calls have no prompt."""
        super().__init__(executor)
        bundle = executor.bundle
        self._graphs = PromptGraphs(bundle, lambda stage: load_stage(bundle, stage), self._ring)
        self.spec = self._graphs.spec

    @property
    def retain(self) -> int:
        """See `prefill.Primer.retain`."""
        return self._graphs.retain

    def feed(self, slot: int, prompt: Prompt, first: int, rows: int) -> None:
        """See `prefill.Primer.feed`."""
        self._graphs.feed(slot, prompt, first, rows)

    def open(
        self, slot: int, prompt: Prompt, settings: Mapping[str, float]
    ) -> dict[str, NDArray[Any]]:
        """See `prefill.Primer.open`."""
        self._graphs.feed(slot, prompt, prompt.shared_rows, 1)
        return self._graphs.open(slot, prompt, settings)

    def _ring(self, name: str, slot: int) -> tuple[str, int, int]:
        return "cpu", 0, self._executor.region(name)[slot : slot + 1].ctypes.data


def rings_of(spec: PromptSpec, regions: Mapping[str, RegionSpec]) -> list[RegionSpec]:
    """The regions a prompt's rows are written into, in the stage's order."""
    rings = [regions[t.name] for t in spec.prefill.inputs if t.name in regions]
    assert all(ring.clock.kind is ClockKind.RING for ring in rings), rings
    return rings
