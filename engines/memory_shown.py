"""What a bundle's sessions take of a GPU's memory, at any age, before anything is loaded. Pure.

The arithmetic is that of the executor's own layout, pages included, so what is printed is what
`check_fits` will go by. Not here: how much a GPU has (`gpu`), what is mapped now (`arena`).
"""

from dataclasses import dataclass

from engines.bundle import Manifest
from engines.layout import plan_layout
from engines.program import plan_program

PAGE_BYTES = 2 << 20
"""Of every GPU so far."""
AGES_S = (10, 60)
"""Beside full retention."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes, for as many slots as the bundle's largest batch."""

    slots: int
    weights: int
    whole: int
    """Small state and wires, there from the start."""
    session: dict[str, int]
    """Pages of one more session, by its age."""
    full: int
    """Everything but libraries, with every slot at full retention."""


def needs(manifest: Manifest) -> Needs:
    """What the CUDA executor would lay out."""
    slots = manifest.largest_batch
    layout = plan_layout(manifest, plan_program(manifest), slots, PAGE_BYTES)
    weights = sum(spec.bytes for name, spec in manifest.files.items() if "weights/" in name)
    period_s = manifest.timing.period_ns / 1e9

    def each(ticks: int) -> int:
        return (layout.committed_bytes([ticks] * slots) - layout.whole_bytes) // slots

    ages = {f"{age} s": each(round(age / period_s)) for age in AGES_S}
    full = layout.full_bytes(slots)
    ages["full"] = (full - layout.whole_bytes) // slots
    return Needs(slots, weights, layout.whole_bytes, ages, weights + full)


def line(found: Needs) -> str:
    """For a person."""
    ages = ", ".join(f"{_size(nbytes)} at {age}" for age, nbytes in found.session.items())
    return (
        f"on a GPU: weights {_size(found.weights)}, {found.slots} slots {_size(found.whole)}; then "
        f"each session {ages} ({_size(found.full)} with all {found.slots} full)"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
