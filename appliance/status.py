"""How a running box is, for a person: headroom, what limits it, lateness, refusals, alarms."""

from pathlib import Path

from appliance.control import BoxGone, ControlClient, Report, Status

ANSWER_S = 5.0


def ask(socket: Path) -> Report:
    """Ask the box at ``socket``. Raises `BoxGone` or `ControlError`."""
    client = ControlClient.connect(socket, ANSWER_S)
    try:
        client.send(Status(1))
        message = client.receive(ANSWER_S)
    finally:
        client.close()
    if not isinstance(message, Report):
        raise BoxGone(f"the box at {socket} did not answer within {ANSWER_S:g} s; see its log")
    return message


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
    if report.disk_errors or report.records_dropped:
        lines.append(
            f"  DISK      {report.disk_errors} writes to the ledger failed, "
            f"{report.records_dropped} records given up"
        )
    if report.records_lost:
        lines.append(f"  LEDGER    {report.records_lost} records found no room on their way")
    return lines
