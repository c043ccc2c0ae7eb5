"""A certificate as one HTML page that needs nothing else: verdict, figures, plots, every session.

Pure: a certificate and its calls in, text out. No script, no font, no image from elsewhere.
"""

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from appliance.certificate import Certificate
from appliance.ledger import Call, Flag
from appliance.plot import margin_plot
from appliance.report import SessionReport

STYLE = """
body { font: 15px/1.5 sans-serif; color: #1a1a1a; max-width: 980px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.6em; margin-bottom: 0; }
h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd; }
.holds { color: #006b3c; } .fails { color: #c00020; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: right; padding: 2px 8px; border-bottom: 1px solid #eee; }
th:first-child, td:first-child, td.words { text-align: left; }
tr.worst { background: #fff3d6; } tr.failed { background: #fde3e6; }
dl { display: grid; grid-template-columns: 14em 1fr; gap: 2px 1em; font-size: 13px; }
dt { color: #666; } dd { margin: 0; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } .scroll { overflow-x: auto; }
"""

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 220, 56, 36, 12
BINS = 80


def page(found: Certificate, calls: Sequence[Call]) -> str:
    """The whole document. calls: of the last trial, for the plots."""
    verdict = (
        f'<span class="holds">{found.sessions} sessions hold</span>'
        if found.holds
        else '<span class="fails">does not hold</span>'
    )
    due = sum(call.due for call in found.calls)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(found.model.name)}: {found.sessions} sessions</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(found.model.name)}: {verdict}</h1>",
        f"<p>{escape(_summary(found, due))}</p>",
    ]
    if found.quick:
        parts.append(
            '<p class="fails">Measured with --quick: it shows that the path works and is no '
            "evidence of capacity.</p>"
        )
    parts += [f'<p class="fails">{escape(problem)}</p>' for problem in found.problems]
    parts += [
        "<h2>Ticks</h2>",
        _histogram(calls, found.ticks.period_ns),
        _ticks(found),
        "<h2>Margin of every session</h2>",
        margin_plot(calls, f"{len(calls)} calls, by time") if calls else "<p>No call.</p>",
        "<h2>Sessions</h2>",
        _sessions(found),
        "<h2>Trials</h2>",
        _trials(found),
        "<h2>What was measured, where and how</h2>",
        _measured(found),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _summary(found: Certificate, due: int) -> str:
    on_time = sum(call.on_time for call in found.calls)
    text = (
        f"{on_time:,} of {due:,} frames on time. Worst session {found.worst_session}: "
        f"{int(found.worst_on_time_share * 10_000) / 100:.2f} %. Failed: {found.failed} of "
        f"{len(found.calls)} sessions. Longest run of misses: {found.longest_miss_run} frames."
    )
    if found.newcomer is not None:
        text += (
            " One caller more was admitted."
            if found.newcomer.admitted
            else f" One caller more was refused ({found.newcomer.reason})."
        )
    return text


def _ticks(found: Certificate) -> str:
    """How long ticks took, and how close to their deadline they came."""
    ticks = found.ticks
    return _facts(
        (
            (
                "start to done",
                f"p50 {_ms(ticks.p50_ns)} · p99 {_ms(ticks.p99_ns)} · p99.9 "
                f"{_ms(ticks.p999_ns)} · max {_ms(ticks.max_ns)} of {_ms(ticks.period_ns)} ms",
            ),
            (
                "forecast p99.9",
                f"{_ms(found.forecast_ns)} ms at full retention; admission "
                f"would let in {found.forecast_sessions}",
            ),
            (
                "ticks",
                f"{ticks.ticks}, late {ticks.late}, never ran {ticks.missed}, longest "
                f"run of misses {ticks.longest_miss_run}",
            ),
            ("smallest margin", f"{_ms(found.smallest_margin_ns)} ms"),
            ("smallest playout buffer", f"{_ms(found.smallest_buffer_ns)} ms"),
        )
    )


def _measured(found: Certificate) -> str:
    """What the verdict is about: the command, the model, the machine, the callers."""
    machine, model, asked = found.machine, found.model, found.conditions
    return _facts(
        (
            ("command", found.command),
            ("started (UTC)", found.started),
            (
                "model",
                f"{model.name}, {model.parameters:,} parameters"
                f"{'' if model.trained else ', untrained'}",
            ),
            ("checkpoint sha256", model.checkpoint_sha256),
            ("bundle", model.bundle),
            (
                "state per session",
                f"{model.session_bytes:,} bytes, full after {model.full_retention_s:g} s",
            ),
            (
                "CPU",
                f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.1f} GiB",
            ),
            ("GPU, driver", f"{machine.gpu}, {machine.driver}"),
            ("engine", machine.engine),
            (
                "software",
                f"duplexbox {machine.duplexbox}, Python {machine.python}, Linux {machine.kernel}",
            ),
            (
                "load average",
                f"{machine.load_before:.2f} before, {machine.load_after:.2f} "
                f"after ({machine.cores} cores)",
            ),
            ("path", found.path),
            (
                "callers",
                f"{asked.callers}, {asked.stagger_s:g} s apart, all live for "
                f"{asked.talk_s:g} s; jitter 0–{asked.jitter_ms:g} ms, loss {asked.loss:.2%}, "
                f"clocks ±{asked.skew_ppm:g} ppm, seed {asked.seed}",
            ),
        )
    )


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f"<dl>{cells}</dl>"


SESSION_COLUMNS = (
    *("session", "ended", "due", "on time", "share", "late", "filled", "missed", "concealed"),
    *("skipped", "worst lag", "margin ms", "buffer ms", "longest run"),
)


def _sessions(found: Certificate) -> str:
    """All sessions, worst first."""
    ordered = sorted(found.calls, key=lambda c: (c.on_time_share, c.worst_margin_ns))
    rows = [_session(call, call.session == found.worst_session) for call in ordered]
    return _table(SESSION_COLUMNS, rows)


def _session(call: SessionReport, is_worst: bool) -> tuple[str, tuple[str, ...]]:
    kind = "failed" if call.failed else "worst" if is_worst else ""
    return kind, (
        f"{call.session} ({call.caller})",
        call.ended,
        *(str(n) for n in (call.due, call.on_time)),
        f"{int(call.on_time_share * 10_000) / 100:.2f} %",
        *(str(n) for n in (call.late, call.filled, call.missed, call.concealed, call.skipped)),
        str(call.worst_lag_frames),
        _ms(call.worst_margin_ns),
        _ms(call.worst_buffer_ns),
        str(call.longest_miss_run),
    )


def _trials(found: Certificate) -> str:
    rows = [
        (
            "" if one.held else "failed",
            (
                f"{one.sessions} sessions",
                f"{one.seconds:g} s",
                "held" if one.held else one.why_not,
                _ms(one.p999_ns),
                _ms(one.worst_margin_ns),
            ),
        )
        for one in found.trials
    ]
    return _table(("trial", "all live for", "verdict", "p99.9 ms", "smallest margin ms"), rows)


def _table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        for kind, cells in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def tick_durations_ns(calls: Sequence[Call]) -> NDArray[np.int64]:
    """(ticks,) start on the grid to done, of every tick that ran, once."""
    if not calls:
        return np.zeros(0, np.int64)
    records = np.concatenate([call.ticks for call in calls])
    records = records[(records["flags"] & Flag.MISSED) == 0]
    numbers, which = np.unique(records["tick"], return_inverse=True)
    margins = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(margins, which, records["margin_ns"])
    durations: NDArray[np.int64] = calls[0].header.period_ns - margins
    return durations


def _histogram(calls: Sequence[Call], period_ns: int) -> str:
    """How long ticks took, on a logarithmic count axis so that a single slow tick is seen."""
    took_ms = tick_durations_ns(calls) / 1e6
    if not len(took_ms):
        return "<p>No tick.</p>"
    period_ms = period_ns / 1e6
    right_ms = max(period_ms, float(took_ms.max())) * 1.02
    counts, _ = np.histogram(took_ms, bins=BINS, range=(0.0, right_ms))
    wide = (WIDTH - LEFT) / BINS
    tall = HEIGHT - BOTTOM - TOP
    top = max(1.0, float(np.log10(counts.max() + 1)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for power in range(int(top) + 1):
        y = TOP + tall * (1 - float(np.log10(10**power + 1)) / top)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10**power}</text>')
    for index, count in enumerate(counts.tolist()):
        if count:
            high = tall * float(np.log10(count + 1)) / top
            parts.append(
                f'<rect x="{LEFT + index * wide:.1f}" y="{TOP + tall - high:.1f}" '
                f'width="{wide - 1:.1f}" height="{high:.1f}" fill="#0072b2"/>'
            )
    x = LEFT + period_ms / right_ms * (WIDTH - LEFT)
    parts.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + tall}" stroke="#c00020" '
        'stroke-dasharray="6 4"/>'
        f'<text x="{x - 4:.1f}" y="{TOP + 12}" text-anchor="end" fill="#c00020">deadline</text>'
    )
    step_ms = period_ms / 8 * max(1, round(right_ms / period_ms))
    for number in range(int(right_ms / step_ms) + 1):
        at = LEFT + number * step_ms / right_ms * (WIDTH - LEFT)
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - 16}" text-anchor="middle">{number * step_ms:g}</text>'
        )
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 2}" fill="#444">ms from a tick\'s start to done; '
        "number of ticks, logarithmic</text></svg>"
    )
    return "".join(parts)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f}"
