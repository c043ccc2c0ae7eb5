"""What the records of models beside the voice add up to. Pure.

Counted live by the ledger's thread, and again when call files are read back. A model's results are
judged by its own contract: for `freshness` a dropped input is no fault, for the others it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from appliance.contracts import Contract, Outcome, Terms, raises_alarm
from appliance.frame_ring import Result
from appliance.ledger import SIDE, Beside, Call, Kind


@dataclass(slots=True)
class SideReport:
    """One model, over all callers it heard."""

    name: str
    model: str
    contract: str
    callers: int = 0
    records: int = 0
    delivered: int = 0
    substituted: int = 0
    dropped: int = 0
    late: int = 0
    alarms: int = 0
    smallest_margin_ns: int | None = None
    """Of results in time; None: there is none."""
    worst_session: int = 0
    """The one with the largest share of alarms; 0: none had any."""
    worst_alarms: int = 0

    def add(self, records: NDArray[np.void]) -> int:
        """records: (n,) `ledger.SIDE` of this model and one caller. Returns how many are alarms."""
        counts = np.bincount(records["outcome"], minlength=len(Outcome) + 1)
        self.records += len(records)
        self.delivered += int(counts[Outcome.DELIVERED])
        self.substituted += int(counts[Outcome.SUBSTITUTED])
        self.dropped += int(counts[Outcome.DROPPED])
        self.late += int(counts[Outcome.LATE])
        terms = Terms(Contract(self.contract), 1, 1)
        alarms = sum(int(counts[o]) for o in Outcome if raises_alarm(terms, o))
        self.alarms += alarms
        margins = records["margin_ns"][records["outcome"] == Outcome.DELIVERED]
        if len(margins):
            least = int(margins.min())
            before = self.smallest_margin_ns
            self.smallest_margin_ns = least if before is None else min(before, least)
        return alarms


def side_records(results: Sequence[Result], session: int, generation: int) -> NDArray[np.void]:
    """(n,) `ledger.SIDE`."""
    rows = np.zeros(len(results), SIDE)
    for row, result in zip(rows, results, strict=True):
        row["kind"], row["session"], row["generation"] = Kind.SIDE, session, generation
        row["index"], row["outcome"], row["model"] = result.number, result.outcome, result.model
        row["margin_ns"], row["age_ns"] = result.margin_ns, result.age_ns
        row["value"] = result.value
    return rows


def is_sound(result: Result, models: int) -> bool:
    """Another process wrote it: whether it can be true."""
    return result.model < models and result.number >= 0 and result.outcome in tuple(Outcome)


def begin(models: Sequence[Beside]) -> list[SideReport]:
    """Nothing counted yet."""
    return [SideReport(one.name, one.model, one.contract) for one in models]


def side_reports(calls: Sequence[Call]) -> list[SideReport]:
    """One per name, model and contract that occurs in ``calls``."""
    found: dict[tuple[str, str, str], SideReport] = {}
    worst: dict[tuple[str, str, str], float] = {}
    for call in calls:
        for number, one in enumerate(call.header.beside):
            key = (one.name, one.model, one.contract)
            report = found.setdefault(key, SideReport(*key))
            records = call.side[call.side["model"] == number]
            report.callers += 1
            alarms = report.add(records)
            share = alarms / len(records) if len(records) else 0.0
            if share > worst.get(key, 0.0):
                worst[key] = share
                report.worst_session, report.worst_alarms = call.header.session, alarms
    return list(found.values())


def text(report: SideReport) -> str:
    """One line."""
    rest = (
        (report.substituted, "substituted"),
        (report.dropped, "dropped"),
        (report.late, "late"),
    )
    others = "".join(f", {count} {what}" for count, what in rest if count)
    margin = report.smallest_margin_ns
    least = "" if margin is None else f"; smallest margin {margin / 1e6:.1f} ms"
    worst = f" (worst session {report.worst_session}: {report.worst_alarms})"
    alarms = f"; {report.alarms} alarms" + (worst if report.worst_session else "")
    return (
        f"beside    {report.name} ({report.model}, {report.contract}): {report.delivered} of "
        f"{report.records} in time{others}{least}{alarms if report.alarms else ''}"
    )
