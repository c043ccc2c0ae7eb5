"""How the box is: put together for whoever asks, and said in the log when ticks are late.

Reads what tick loop, ledger, leases and admission count; decides nothing. The control thread uses
it; each number of a report is right, two may be a tick apart.
"""

import logging
from dataclasses import dataclass

from appliance import control
from appliance.clock import NS_PER_S
from appliance.foresight import Foresight
from appliance.leases import Leases
from appliance.ledger_writer import LedgerWriter
from appliance.reception import Reception
from appliance.side_models import SideModels
from appliance.tick_loop import TickLoop
from engines.bundle import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counted:
    """What the switchboard knows by itself."""

    ready: bool
    draining: bool
    refusals: dict[str, int]
    shed: int
    reset: int
    hung_up: int


class Reporter:
    """One box's reports."""

    def __init__(
        self,
        manifest: Manifest,
        loop: TickLoop,
        ledger: LedgerWriter,
        leases: Leases,
        foresight: Foresight,
        reception: Reception,
        beside: SideModels,
    ) -> None:
        self._manifest = manifest
        self._loop = loop
        self._ledger = ledger
        self._leases = leases
        self._foresight = foresight
        self._reception = reception
        self._beside = beside
        self._seen_alarms = 0
        self._told_ns = 0
        self._seen_late = (0, 0)
        self._quiet_until_ns = 0

    def report(self, asked: control.Status, counted: Counted) -> control.Report:
        """The answer to ``asked``."""
        counts, ledger = self._loop.counts, self._ledger
        room = self._foresight.headroom(self._leases.held, counted.ready, counted.draining)
        view = ledger.watch.view(self._manifest.session_bytes) if asked.detail else None
        return control.Report(
            request=asked.request,
            ready=counted.ready,
            draining=counted.draining,
            tick=counts.tick,
            sessions_live=counts.live,
            leases_held=self._leases.held,
            slots=self._leases.total,
            ticks_late=counts.late,
            ticks_missed=counts.missed,
            last_margin_ns=counts.margin_ns,
            worst_margin_ns=counts.worst_margin_ns,
            records_lost=self._loop.ring.lost,
            sessions_free=room.free,
            limited_by=room.limit.value,
            forecast_ns=room.forecast.tick_ns(room.held + 1) if room.forecast else 0,
            refusals=counted.refusals,
            sessions_shed=counted.shed,
            disk_errors=ledger.write_errors,
            records_dropped=ledger.records_dropped,
            sessions_reset=counted.reset,
            sessions_hung_up=counted.hung_up,
            lines_hung=counts.hung,
            personas=self._reception.report(),
            memory=self._memory(),
            beside=tuple(
                control.SideState(
                    name=one.name,
                    contract=one.contract,
                    records=one.records,
                    delivered=one.delivered,
                    alarms=one.alarms,
                    smallest_margin_ns=one.smallest_margin_ns or 0,
                )
                for one in ledger.side
            ),
            beside_restarts=self._beside.restarts,
            view=view,
        )

    def say_alarms(self, now_ns: int) -> None:
        """Contracts of models beside the voice that were not kept; at most once a second."""
        alarms = sum(one.alarms for one in self._ledger.side)
        if alarms == self._seen_alarms or now_ns < self._told_ns + NS_PER_S:
            return
        names = ", ".join(f"{one.name}={one.alarms}" for one in self._ledger.side if one.alarms)
        logger.warning(
            "models beside the voice: %d results more were not in time; since the start %s",
            alarms - self._seen_alarms,
            names,
        )
        self._seen_alarms, self._told_ns = alarms, now_ns

    def _memory(self) -> control.MemoryReport | None:
        use = self._foresight.memory()
        if use is None:
            return None
        return control.MemoryReport(
            gpu=self._foresight.gpu,
            used=use.device_used,
            total=use.device_total,
            weights=use.weights,
            committed=use.whole + use.committed,
            full=use.full,
            session=use.session,
            for_sessions=use.for_sessions,
            short_in_ticks=-1 if use.short_in_ticks is None else use.short_in_ticks,
        )

    def say_lateness(self, now_ns: int) -> None:
        """At most once a second, with counts: a late box must not also drown in its own log."""
        counts = self._loop.counts
        seen = (counts.late, counts.missed)
        if seen == self._seen_late or now_ns < self._quiet_until_ns:
            return
        logger.warning(
            "ticks late: %d more, missed: %d more; margin_us=%d sessions=%d",
            seen[0] - self._seen_late[0],
            seen[1] - self._seen_late[1],
            counts.margin_ns // 1000,
            counts.live,
        )
        self._seen_late = seen
        self._quiet_until_ns = now_ns + NS_PER_S
