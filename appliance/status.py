"""What an operator asks of a running box: how it is, and to reset, transfer or end a call."""

from pathlib import Path

from appliance.control import (
    BoxGone,
    ControlClient,
    FromBox,
    HangUp,
    HungUp,
    Refused,
    Report,
    Reset,
    Status,
    ToBox,
    Transfer,
    Transferred,
    WasReset,
)

ANSWER_S = 5.0
PRIMED_S = 600.0
"""How long a box may take to feed a call's persona again: its longest [persona] within_s."""
TRANSFERRED_S = 90.0
"""How long a peer may take to call somebody else, and what a line adds to that."""


def ask(socket: Path) -> Report:
    """Ask the box at ``socket``. Raises `BoxGone` or `ControlError`."""
    message = _ask(socket, Status(1), ANSWER_S)
    if not isinstance(message, Report):
        raise _silent(socket, ANSWER_S)
    return message


def reset(socket: Path, session: int) -> WasReset | Refused:
    """Have ``session``'s state begin anew. Raises `BoxGone` or `ControlError`."""
    message = _ask(socket, Reset(1, session), PRIMED_S)
    if not isinstance(message, WasReset | Refused):
        raise _silent(socket, PRIMED_S)
    return message


def transfer(socket: Path, session: int, target: str) -> Transferred | Refused:
    """Have ``session``'s caller called on elsewhere. Raises `BoxGone` or `ControlError`."""
    message = _ask(socket, Transfer(1, session, target), TRANSFERRED_S)
    if not isinstance(message, Transferred | Refused):
        raise BoxGone(
            f"nobody said within {TRANSFERRED_S:g} s what became of it; see the line's log"
        )
    return message


def hang_up(socket: Path, session: int, why: str) -> HungUp | Refused:
    """Have ``session`` ended. Raises `BoxGone` or `ControlError`."""
    message = _ask(socket, HangUp(1, session, why), ANSWER_S)
    if not isinstance(message, HungUp | Refused):
        raise _silent(socket, ANSWER_S)
    return message


def reset_text(done: WasReset) -> str:
    """One line."""
    held = f"; {done.held} frames were due while its persona was fed" if done.held else ""
    return f"session {done.session} began anew at frame {done.frame_index} of its call{held}"


def _silent(socket: Path, within_s: float) -> BoxGone:
    return BoxGone(f"the box at {socket} did not answer within {within_s:g} s; see its log")


def _ask(socket: Path, question: ToBox, within_s: float) -> FromBox | None:
    client = ControlClient.connect(socket, ANSWER_S)
    try:
        client.send(question)
        return client.receive(within_s)
    finally:
        client.close()


def text(name: str, report: Report) -> list[str]:
    """A few lines; what asks for attention is in capitals."""
    state = "ready" if report.ready else "warming up"
    refused = ", ".join(f"{count} for {why}" for why, count in sorted(report.refusals.items()))
    lines = [
        f"{name}: {'draining' if report.draining else state}",
        f"  sessions  {report.sessions_live} live, {report.leases_held} of {report.slots} slots "
        f"held; {report.sessions_free} more would be admitted, then {report.limited_by} refuses",
        f"  time      p99.9 tick with one more: {report.forecast_ns / 1e6:.1f} ms; margin now "
        f"{report.last_margin_ns / 1e6:.1f} ms, worst {report.worst_margin_ns / 1e6:.1f} ms; ticks "
        f"late {report.ticks_late}, missed {report.ticks_missed}",
        f"  refused   {refused or 'nobody'}; sent away because of lateness: {report.sessions_shed}",
    ]
    if report.memory is not None:
        use = report.memory
        lines.append(
            f"  memory    {use.used / 1e9:.1f} of {use.total / 1e9:.1f} GB used on {use.gpu}: "
            f"weights {use.weights / 1e9:.1f}, state of sessions {use.committed / 1e9:.1f}, of all "
            f"at full retention {use.full / 1e9:.1f}; {use.session / 1e9:.2f} each"
        )
        if use.short_in_ticks >= 0:
            lines.append(
                f"  MEMORY    none left for what is needed in {use.short_in_ticks} ticks: another "
                f"process took it (nvidia-smi lists it)"
            )
    lines += [
        f"  beside    {one.name} ({one.contract}): {one.delivered} of {one.records} results in "
        f"time, smallest margin {one.smallest_margin_ns / 1e6:.1f} ms, alarms {one.alarms}"
        for one in report.beside
    ]
    if report.beside_restarts:
        lines.append(
            f"  BESIDE    their process died and was started again {report.beside_restarts} times"
        )
    if report.lines_hung:
        lines.append(f"  LINES     {report.lines_hung} calls ended because their line hung")
    if report.disk_errors or report.records_dropped:
        lines.append(
            f"  DISK      {report.disk_errors} writes to the ledger failed, "
            f"{report.records_dropped} records given up"
        )
    if report.records_lost:
        lines.append(f"  LEDGER    {report.records_lost} records found no room on their way")
    return lines
