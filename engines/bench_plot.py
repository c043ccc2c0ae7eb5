"""A bench as a picture: tick time over the batch, one line per context fill, floor and deadline.

Plain SVG, written by hand: no library, and the same figures give the same bytes. Pure.
"""

from collections.abc import Sequence

from engines.bench import Load, Timing

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 170, 30, 45
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7d5ba6", "#b8860b")


def plot(timings: Sequence[Timing], loads: Sequence[Load], period_us: float, title: str) -> str:
    """SVG text. Solid: median; dotted: p99; thin: the floor, where there is one."""
    ticks = [t for t in timings if t.name == "tick"]
    most = max(t.batch for t in ticks)
    high = max(period_us, max(t.p99_us for t in ticks)) * 1.05 / 1e3

    def x(batch: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * batch / most

    def y(ms: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ms / high

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18">{_escaped(title)}</text>',
    ]
    for ms in _marks(high):
        parts.append(_line([(LEFT, y(ms)), (WIDTH - RIGHT, y(ms))], "#dddddd", ""))
        parts.append(f'<text x="{LEFT - 8}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:g}</text>')
    for batch in sorted({t.batch for t in ticks}):
        parts.append(
            f'<text x="{x(batch):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{batch}</text>"
        )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">sessions; ms per tick</text>')
    deadline = y(period_us / 1e3)
    parts.append(_line([(LEFT, deadline), (WIDTH - RIGHT, deadline)], "#000000", "6 4"))
    parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{deadline + 4:.1f}">deadline</text>')
    for index, fill in enumerate(sorted({t.fill for t in ticks})):
        colour = COLOURS[index % len(COLOURS)]
        mine = sorted((t for t in ticks if t.fill == fill), key=lambda t: t.batch)
        parts.append(_line([(x(t.batch), y(t.p50_us / 1e3)) for t in mine], colour, "", 2))
        parts.append(_line([(x(t.batch), y(t.p99_us / 1e3)) for t in mine], colour, "2 3"))
        floors = [
            (x(load.batch), y(load.floor_us / 1e3))
            for load in sorted(loads, key=lambda load: load.batch)
            if load.fill == fill and load.floor_us is not None
        ]
        if floors:
            parts.append(_line(floors, colour, "", 0.6))
        last = mine[-1]
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{y(last.p50_us / 1e3) + 4:.1f}" '
            f'fill="{colour}">{fill} ticks old: {last.p50_us / 1e3:.1f} ms</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _marks(high: float) -> list[float]:
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1e3, 1e4) if high / s <= 10)
    return [step * n for n in range(int(high / step) + 1)]


def _line(points: Sequence[tuple[float, float]], colour: str, dash: str, width: float = 1) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<polyline points="{joined}" fill="none" stroke="{colour}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
