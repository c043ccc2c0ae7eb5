"""How a bundle keeps the keys and values of its sessions, for people. Pure.

What attention reads every tick are the rings that are updated in place; their dtype decides most
of a session's bytes and of a full tick's time. A language model's may be of 8 bits, with scales in
the bundle (`ring_stage`); the codec's are float32 always.
"""

from dataclasses import dataclass

from engines.bundle import ITEMSIZE, Dtype, Manifest


@dataclass(frozen=True, slots=True)
class Cache:
    """All rings of one dtype."""

    dtype: Dtype
    rings: int
    bytes: int
    """Of one session at full retention."""


def caches(manifest: Manifest) -> tuple[Cache, ...]:
    """The largest first."""
    found: dict[Dtype, tuple[int, int]] = {}
    for region in manifest.regions:
        if region.in_place and region.dtype in ITEMSIZE:
            rings, held = found.get(region.dtype, (0, 0))
            found[region.dtype] = rings + 1, held + region.whole_bytes
    every = (Cache(dtype, *both) for dtype, both in found.items())
    return tuple(sorted(every, key=lambda cache: -cache.bytes))


def sentence(manifest: Manifest) -> str:
    """One line: dtypes, and what a session holds once it no longer grows."""
    kept = ", ".join(
        f"{cache.rings} rings of {cache.dtype} ({_bytes(cache.bytes)})"
        for cache in caches(manifest)
    )
    whole = manifest.session_bytes(manifest.ticks_until_full())
    return f"keys and values: {kept or 'none'}; a session at full retention holds {_bytes(whole)}"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
