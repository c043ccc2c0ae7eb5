"""What the control thread keeps of one call, and how all that a session needs is made at once.

Shared memory, the head of the ledger's file, the tick thread's seat and the answer to the line are
made together by `prepare`, before anybody hears of the session. Decides nothing: who may come in is
`admission`'s business, how its end is told `endings`'s.
"""

import os
from dataclasses import dataclass

from appliance import control
from appliance.admission import Reason, Refusal
from appliance.channel import Capacities, Channel
from appliance.clock import wall_stamp
from appliance.frame_ring import ChannelError
from appliance.leases import Lease
from appliance.ledger import Header, Why
from appliance.line_sockets import Connection
from appliance.priming import Job
from appliance.seat import Seat
from appliance.session import Session, State
from appliance.side_models import SideModels
from appliance.tap import Tap
from engines.bundle import Bundle

UNDER_WAY = (State.PRIMING, State.ADMITTED, State.LIVE, State.RESETTING)
"""What a box that stops must end."""


@dataclass(slots=True)
class Call:
    """One session, from its admission until its file is closed."""

    session: Session
    channel: Channel
    connection: Connection | None
    """None once the line is lost."""
    wish: control.Join
    """What its line asked for: also what it begins anew with."""
    header: Header
    seat: Seat
    tap: Tap | None
    """For the models beside the voice."""
    answer: control.Admitted | None
    """What its line is told once its prompt is done; None: it has been told."""
    due: int = 0
    why: Why = Why.FINISHED
    leaving: bool = False
    """The line has said goodbye."""
    withdrawn: bool = False
    """It did so before it was answered."""
    stopped: bool = False
    """The box ended the call, not the line."""
    ended_by: str = ""
    """Who ends it and why, in words; empty: no operator does."""
    ended_for: tuple[Connection, int] | None = None
    """Which operator, with which request, if that has not been answered."""
    settle_until_ns: int = 0
    reset_for: tuple[Connection, int] | None = None
    """Who asked to have it reset, with which request, and has not been answered."""


def prepare(
    bundle: Bundle,
    token: str,
    t0_ns: int,
    connection: Connection,
    join: control.Join,
    lease: Lease,
    job: Job | None,
    beside: SideModels,
    first_frame_ns: int,
    now_ns: int,
) -> Call | Refusal:
    """All that a session needs. token: tells this box's shared memory from another's."""
    manifest = bundle.manifest
    sizes = Capacities()
    name = f"dbx-{os.getpid()}-{token}-{lease.session}"
    try:
        channel = Channel.create(name, manifest.timing.samples_per_frame, sizes)
    except (ChannelError, OSError) as err:
        return Refusal(Reason.MEMORY, f"no shared memory for the call: {err}")
    settings = dict(join.settings)
    header = Header(
        session=lease.session,
        generation=lease.generation,
        line=join.line,
        caller=join.caller,
        settings=settings,
        bundle=str(bundle.path),
        model=manifest.model.name,
        checkpoint_sha256=manifest.model.checkpoint_sha256,
        period_ns=manifest.timing.period_ns,
        t0_ns=t0_ns,
        started=wall_stamp(),
        voice=join.voice,
        persona=join.persona,
        prompt_frames=job.prompt.rows if job is not None else 0,
        beside=beside.header,
    )
    tap = beside.watch(lease.session, f"{name}-tap")
    until_ns = now_ns + first_frame_ns
    seat = Seat(lease.session, lease.generation, channel, settings, until_ns, job, first_frame_ns)
    seat.tap = tap.audio if tap is not None else None
    answer = control.Admitted(
        request=join.request,
        session=lease.session,
        generation=lease.generation,
        channel=name,
        uplink=sizes.uplink,
        downlink=sizes.downlink,
        receipts=sizes.receipts,
    )
    state = State.ADMITTED if job is None else State.PRIMING
    session = Session(lease.session, lease.generation, state)
    return Call(session, channel, connection, join, header, seat, tap, answer)
