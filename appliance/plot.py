"""Margin over time as an SVG: one line per session, the deadline, and marks for what went wrong.

Written by hand: a polyline is a string, and the serving process should not carry a plotting
library. Pure: calls in, text out.
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from appliance.ledger import Call, Flag, Settled
from appliance.report import first_outcomes, shown

WIDTH, LEFT, RIGHT, TOP = 960, 64, 16, 56
PLOT_HEIGHT, RAIL_HEIGHT = 300, 34
POINTS = 900
"""About one per pixel; of several ticks in one pixel, the smallest margin is drawn."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d1f", "#555555")
"""Okabe and Ito's palette, which colour-blind people can tell apart; then it repeats."""

RED, GREY = "#c00020", "#999999"


def margin_plot(calls: Sequence[Call], title: str) -> str:
    """The whole SVG document. Calls without a tick get a legend and an empty rail."""
    starts = [_times_s(call) for call in calls]
    origin = min((float(times[0]) for times in starts if len(times)), default=0.0)
    starts = [times - origin for times in starts]
    end_s = max((float(times[-1]) for times in starts if len(times)), default=1.0) or 1.0
    margins = [call.ticks["margin_ns"] / 1e6 for call in calls]
    low = min((float(m.min()) for m in margins if len(m)), default=0.0)
    period_ms = max((call.header.period_ns / 1e6 for call in calls), default=80.0)
    bottom_ms, top_ms = min(0.0, low) - period_ms * 0.08, period_ms
    height = TOP + PLOT_HEIGHT + 44 + RAIL_HEIGHT * len(calls) + 34

    def x(seconds: float) -> float:
        return LEFT + seconds / end_s * (WIDTH - LEFT - RIGHT)

    def y(ms: float) -> float:
        return TOP + (top_ms - ms) / (top_ms - bottom_ms) * PLOT_HEIGHT

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 20, title, size=15),
        _text(LEFT, 40, "margin: time to spare when a frame was handed over, ms", colour="#444"),
    ]
    for ms in _round_steps(bottom_ms, top_ms):
        parts.append(_line(LEFT, y(ms), WIDTH - RIGHT, y(ms), "#e4e4e4"))
        parts.append(_text(LEFT - 6, y(ms) + 4, f"{ms:g}", anchor="end", colour="#444"))
    for second in _round_steps(0.0, end_s):
        parts.append(_line(x(second), TOP + PLOT_HEIGHT, x(second), TOP + PLOT_HEIGHT + 4, "#444"))
        label = f"{second:g} s"
        parts.append(_text(x(second), TOP + PLOT_HEIGHT + 18, label, anchor="middle"))
    parts.append(_line(LEFT, y(0), WIDTH - RIGHT, y(0), RED, dashes="6 4"))
    parts.append(_text(WIDTH - RIGHT, y(0) - 5, "deadline", anchor="end", colour=RED))
    for number, (times, margin) in enumerate(zip(starts, margins, strict=True)):
        if len(times):
            points = " ".join(f"{x(s):.1f},{y(m):.1f}" for s, m in _thin(times, margin))
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{_colour(number)}" '
                f'stroke-width="1.4" stroke-opacity="0.85"/>'
            )
    rails = TOP + PLOT_HEIGHT + 44
    for number, (call, times) in enumerate(zip(calls, starts, strict=True)):
        parts += _rail(call, [x(s) for s in times], rails + number * RAIL_HEIGHT, number)
    parts.append(
        _text(
            LEFT,
            height - 10,
            "rails: line = the call; red = the frame was late, never made or not heard; "
            "grey = the model was fed silence",
            colour="#444",
        )
    )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _rail(call: Call, xs: list[float], top: float, number: int) -> list[str]:
    """One call as a line, with a mark for every frame that was not as it should be."""
    middle = top + RAIL_HEIGHT - 10
    name = f"session {call.header.session}  {shown(call.header.caller)}"
    parts = [_text(LEFT, top + 14, name, colour=_colour(number))]
    if not xs:
        return parts
    parts.append(_line(xs[0], middle, xs[-1], middle, _colour(number)))
    flags = call.ticks["flags"]
    indices = call.ticks["index"]
    heard = first_outcomes(call, int(indices.max()) + 1)[indices]
    bad = (flags & (Flag.LATE | Flag.MISSED | Flag.FAULT)) > 0
    bad |= heard == Settled.FILLED
    fed_silence = ((flags & Flag.CONCEALED) > 0) & ~bad
    for marks, colour in ((fed_silence, GREY), (bad, RED)):
        # Marks closer than a pixel are one mark: an hour of trouble must not be a huge file.
        for at in sorted({round(xs[i]) for i in np.flatnonzero(marks).tolist()}):
            parts.append(_line(at, middle - 6, at, middle + 6, colour))
    return parts


def _times_s(call: Call) -> NDArray[np.float64]:
    """(frames,) seconds of the machine's clock at which each frame's tick was due to start."""
    starts: NDArray[np.float64] = (
        call.header.t0_ns + call.ticks["tick"] * call.header.period_ns
    ) / 1e9
    return starts


def _thin(times: NDArray[np.float64], margins: NDArray[np.float64]) -> list[tuple[float, float]]:
    """At most `POINTS` points, each the worst of its stretch."""
    stretch = -(-len(times) // POINTS)
    starts = range(0, len(times), stretch)
    return [(float(times[i]), float(margins[i : i + stretch].min())) for i in starts]


def _round_steps(low: float, high: float) -> list[float]:
    """About eight round numbers within low..high."""
    rough = (high - low) / 8
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(float(power * k) for k in (1, 2, 5, 10) if power * k >= rough)
    first = int(np.ceil(low / step))
    return [n * step for n in range(first, int(np.floor(high / step)) + 1)]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'
    )


def _text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = "#000", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}">{escape(words)}</text>'
    )
