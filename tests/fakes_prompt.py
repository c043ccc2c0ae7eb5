"""A fake that takes prompts: an echoing executor whose slots must be told the whole prompt first.

`PromptedExecutor` is `FakeExecutor` with a primer. Its `memory` ring holds the prompt's text ids,
one row per fed row, so that a row fed twice, never, or into another's slot is found: `settle`
refuses any state but the whole prompt.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engines.bundle import Bundle, PromptSpec, RegionSpec, StageSpec, TensorSpec, VoiceSpec
from engines.clocks import ClockKind, NativeClock, Order
from engines.prefill import Prompt, chunk_rows, make_prompt
from tests.fakes import FakeExecutor, make_bundle

RETAIN = 64
RING = RegionSpec(
    "prompt.ring",
    "int64",
    (1, RETAIN, 2),
    NativeClock(ClockKind.RING, axis=1, advance="1", retain=RETAIN, order=Order.MODULO),
    fill=-1,
    in_place=True,
)
SPEC = PromptSpec(
    prefill=StageSpec(
        "prefill",
        (
            TensorSpec("ids", "int64", ("R", 3)),
            TensorSpec("embedded", "float32", ("R", 2)),
            TensorSpec("prompt.ring", "int64", (1, 1, RETAIN, 2)),
        ),
        (),
        graph="prefill.onnx",
    ),
    opening=StageSpec("opening", (), (), graph="opening.onnx"),
    tokens="tokens",
    counter="counter",
    delays=(0, 0, 0),
    initial_ids=(4, 9, 9),
    silent_text_id=3,
    silence_codes=(1,),
    caller_codes=(2,),
    pause_frames=2,
    longest_frames=RETAIN - 1,
    wrap="<system>",
    tokenizer="tokenizer.model",
    voices=(VoiceSpec("alto", "voices/alto.safetensors", 4),),
)


def make_prompted_bundle(folder: Path, largest_batch: int = 4) -> Bundle:
    """`make_bundle` with a prompt section; its graphs and voices do not exist."""
    bundle = make_bundle(folder, largest_batch)
    manifest = msgspec.structs.replace(
        bundle.manifest, regions=(*bundle.manifest.regions, RING), prompt=SPEC
    )
    return Bundle(folder, manifest)


def prompt_of(rows: int, first_id: int = 100) -> Prompt:
    """Text ids first_id, first_id + 1, ...: every row tells itself from the others."""
    frames = np.full((rows, 3), 1, np.int64)
    frames[:, 0] = np.arange(first_id, first_id + rows)
    return make_prompt(SPEC, frames, np.zeros((0, 2), np.float32))


class PromptedExecutor(FakeExecutor):
    """feeding: called with the rows of every feed (0: of every copy), in its place."""

    def __init__(
        self,
        bundle: Bundle,
        slots: int = 4,
        work: Callable[[int], None] = lambda batch: None,
        feeding: Callable[[int], None] = lambda rows: None,
    ) -> None:
        super().__init__(bundle, slots, work)
        self.spec, self.retain = SPEC, RETAIN
        self.ring = np.full((slots, 1, RETAIN, 2), -9, np.int64)
        self.feeding = feeding
        self.fed: list[tuple[int, int, int]] = []
        """(slot, first row, rows) of every feed."""
        self.told: dict[int, bytes] = {}
        """What the session of a slot was told."""

    def join(self, slot: int, settings: Mapping[str, float]) -> None:
        super().join(slot, settings)
        self.told.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self.ring[target] = self.ring[source]
        self.told.pop(target, None)
        if source in self.told:
            self.told[target] = self.told.pop(source)

    def primer(self) -> "PromptedExecutor":
        return self

    def clear(self, slot: int) -> None:
        self.ring[slot] = RING.fill

    def leave(self, slot: int) -> None:
        assert 0 <= slot < len(self.ring), slot

    def feed(self, slot: int, prompt: Prompt, first: int, rows: int) -> None:
        assert rows == chunk_rows(first, rows, rows, RETAIN)
        before = self.ring[slot, 0, :, 0]
        assert (before[:first] == prompt.ids[:first, 0]).all(), "rows before were never fed"
        assert (before[first:] == RING.fill).all(), "the slot is not clear"
        self.feeding(rows)
        self.ring[slot, 0, first : first + rows] = prompt.ids[first : first + rows, :1]
        self.fed.append((slot, first, rows))

    def open(
        self, slot: int, prompt: Prompt, settings: Mapping[str, float]
    ) -> dict[str, NDArray[Any]]:
        self.feed(slot, prompt, prompt.shared_rows, 1)
        return {"key": np.array(prompt.ids[:, 0])}

    def settle(
        self,
        source: int,
        target: int,
        settings: Mapping[str, float],
        values: Mapping[str, NDArray[Any]],
    ) -> None:
        self.join(target, settings)
        ids = values["key"]
        assert (self.ring[source, 0, : len(ids), 0] == ids).all(), "another's prompt"
        self.ring[target] = self.ring[source]
        self.told[target] = ids.tobytes()

    def read(self, slot: int, name: str, first: int = 0, rows: int | None = None) -> NDArray[Any]:
        assert name == RING.name, name
        self.feeding(0)
        end = first + (RETAIN if rows is None else rows)
        return np.array(self.ring[slot][:, first:end])

    def write(self, slot: int, name: str, first: int, rows: NDArray[Any]) -> None:
        assert name == RING.name, name
        self.feeding(0)
        self.ring[slot][:, first : first + rows.shape[1]] = rows
