"""baresip as our SIP stack: signalling and packets on its own threads, which do not wait for us.

Decides how our settings are said to baresip, and turns its events into ours. The versions are
pinned to one (`pyproject.toml`): what is said here was found by running it. Learned that way:

- With video compiled in, it offers video again 55 ms after every answer; `video_codecs=none` on
  each account prevents it.
- It refuses in one way, 486; and answers OPTIONS with 200 by itself, however full we are.
- One runtime per process, and one that has died cannot be started again: hence a process of our
  own (`sip`), which is replaced.
- Its RTP sockets are bound to all addresses, whatever the interface.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal

import baresip
from baresip import Account, Call, CallState, Config, Runtime, UserAgent
from baresip._native import lib

from appliance.clock import MonotonicClock
from appliance.lines import (
    sip_baresip_words,
    sip_certificates,
    sip_filter,
    sip_headers,
    sip_stack,
)
from appliance.lines.media_threads import MediaThreads
from appliance.lines.sip_baresip_media import BaresipMedia
from appliance.lines.sip_config import CODECS, SipAccount, SipConfig, endpoint
from appliance.lines.sip_login import Login
from appliance.lines.sip_stack import Event, NotYet, StackError
from appliance.log import Seldom

logger = logging.getLogger(__name__)

ANSWERS_S = 4.0
"""What it says is heard when a turn of ours is over; with too many calls one may take a second."""

MEDIA_THREADS = ("Audio TX", "aumem_src", "aumem_play")
"""What it calls the three that each call has: one sends, one feeds it, one takes what came. The
last owes nobody a packet, but the stack's one thread waits for it when a call ends."""
LOOK_S = 0.25
"""Between two looks whether there are new ones; a call that changes its codec gets some."""

LATER_S = 5
"""Than the line the stack ends a call without packets: it names no reason that an operator would
know, and forgets how many came."""

NOBODY = IPv4Network("255.255.255.255/32")

SENT_ON = "Call transfered"
"""How the stack says that it closed a call because its transfer was answered."""


class BaresipStack:
    """All accounts and calls of this process."""

    def __init__(
        self,
        config: SipConfig,
        media_threads: MediaThreads | None = None,
        *,
        verbose: bool = False,
    ) -> None:
        """media_threads: what is done for them; see `MEDIA_THREADS`.

        verbose: log every SIP message, and all that the stack says.
        """
        self._config = config
        self._media_threads = media_threads
        self._verbose = verbose
        self._runtime = Runtime()
        # Whose an event is, is said even if there was no room for what it says.
        deliver, self._agent_of = self._runtime._deliver_stack_event, dict[int, int]()
        self._runtime._deliver_stack_event = lambda kind, handle, payload: deliver(
            kind, handle, sip_baresip_words.whose(handle, payload, self._agent_of)
        )
        # What it calls on its own thread when its sockets are there, before it reads from them.
        self._runtime._ready = _Gate(self._shut)
        self._agents: dict[int, SipAccount] = {}
        self._calls: dict[int, Call] = {}
        self._legs: dict[int, int] = {}
        """Leg by the stack's handle of a call; handles may come again, legs never do."""
        self._confirmed: set[int] = set()
        """Legs whose answer the caller has confirmed."""
        self._numbers = 0
        self._hear: Callable[[Event], None] = lambda _: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._options_dropped = False
        self._media_sockets: set[str] = set()
        """That have a filter, by what /proc calls them."""
        self._logins: dict[int, Login] = {}
        self._wanted: dict[int, asyncio.Future[str]] = {}
        """By account that is to be logged in: set to why it is not any more."""
        self._clock = MonotonicClock()
        self._dropped = 0
        """Datagrams, as of the end."""
        self._refused = Seldom(logger, logging.WARNING)

    async def start(self, hear: Callable[[Event], None]) -> None:
        self._hear = hear
        config = self._config
        try:
            accounts = [(account, _account(account, config)) for account in config.accounts]
            sip_certificates.check(config)
        except (OSError, ValueError) as err:
            raise StackError(str(err)) from None
        self._runtime.on_dead = lambda: hear(sip_stack.Dead("its SIP thread has ended"))
        self._runtime.subscribe(self._on_event)
        try:
            await self._runtime.start(_settings(config, self._verbose))
            agents = []
            for account, theirs in accounts:
                agent = await UserAgent.create(
                    self._runtime, _address_of_record(theirs), transfer_policy="reject"
                )
                self._agents[agent.handle] = account
                agent.on_incoming(self._on_incoming)
                agents.append((account, agent))
            self._filter()
            self._do(self._look_after_media())
            self._do(self._look_after_certificate())
            for account, agent in agents:
                if account.register:
                    self._do(self._stay_logged_in(account, agent))
        except (baresip.BaresipError, OSError) as err:
            self._runtime.on_dead = None
            with contextlib.suppress(baresip.BaresipError):
                await self._runtime.close()
            failed = NotYet if sip_baresip_words.passes(err) else StackError
            raise failed(
                f"the SIP stack does not start: {err}. Is {config.listen} an address of this "
                f"machine, and free? ss -ulnp 'sport = :{endpoint('listen', config.listen)[1]}'"
            ) from None

    def answer(self, leg: int) -> None:
        if (call := self._calls.get(leg)) is not None:
            self._do(self._answer(leg, call))

    def reject(self, leg: int) -> None:
        if (call := self._calls.get(leg)) is not None:
            self._do(_quietly(call.reject()))

    def hang_up(self, leg: int) -> None:
        if (call := self._calls.get(leg)) is not None:
            self._do(_quietly(call.hangup()))

    def transfer(self, leg: int, target: str) -> None:
        if (call := self._calls.get(leg)) is not None:
            self._do(self._transfer(leg, call, target))

    def media(self, leg: int) -> BaresipMedia:
        return BaresipMedia(self._calls[leg].handle)

    async def answers(self) -> bool:
        """Whether its thread does what it is told to; False until it has been started."""
        try:
            await self._runtime.cmd(lib.BP_CMD_PING, timeout=ANSWERS_S)
        except baresip.BaresipError:
            return False
        return True

    def show_room(self, has_room: bool) -> None:
        """Let OPTIONS go unanswered while there is none."""
        if has_room == self._options_dropped:
            self._options_dropped = not has_room
            self._filter()

    def dropped(self) -> int:
        """Datagrams that came to our SIP port and that nobody read."""
        address, port = endpoint("listen", self._config.listen)
        with contextlib.suppress(OSError):
            self._dropped = max(self._dropped, sip_filter.dropped(str(address), port))
        return self._dropped

    async def close(self) -> None:
        self._dropped = self.dropped()
        for task in self._tasks:
            task.cancel()
        try:
            await self._runtime.close()
        except baresip.BaresipError as err:
            logger.warning("the SIP stack did not stop as it should: %s", err)

    # --- what it says

    def _on_incoming(self, call: Call) -> None:
        self._numbers += 1
        leg = self._numbers
        self._calls[leg] = call
        self._legs[call.handle] = leg
        said = sip_headers.read(call.headers)
        account = self._agents[call._ua_handle]
        self._agent_of[call.handle] = call._ua_handle
        self._hear(
            sip_stack.Incoming(
                leg,
                account.user,
                call.peer or "",
                call.call_id or "",
                said.source,
                said.name,
                said.called,
                said.number,
                said.diverted,
            )
        )

    def _on_event(self, event: baresip.StackEvent) -> None:
        leg = self._legs.get(event.call)
        kind = event.event
        if kind in (baresip.Event.REGISTER_OK, baresip.Event.REGISTER_FAIL):
            self._registered(event.ua, kind is baresip.Event.REGISTER_OK, event.text or "")
        elif kind is baresip.Event.CALL_INCOMING and not event.ua:
            self._refuse(event.call)
        elif leg is None:
            return
        elif kind is baresip.Event.CALL_ESTABLISHED:
            self._prepare(leg)
            self._confirmed.add(leg)
            self._hear(sip_stack.Established(leg))
        elif kind is baresip.Event.CALL_CLOSED:
            del self._calls[leg], self._legs[event.call], self._agent_of[event.call]
            if event.text == SENT_ON:
                self._hear(sip_stack.TransferEnded(leg, "answered", is_done=True))
            why = sip_baresip_words.why(event.text or "", leg in self._confirmed)
            self._confirmed.discard(leg)
            self._hear(sip_stack.Closed(leg, why, sip_baresip_words.stats(event.stats)))
        elif kind is baresip.Event.CALL_DTMF_START and event.text:
            self._hear(sip_stack.Digit(leg, event.text[:1]))
        elif kind in (baresip.Event.CALL_HOLD, baresip.Event.CALL_RESUME):
            self._hear(sip_stack.Held(leg, kind is baresip.Event.CALL_HOLD))

    # --- what is asked of it

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _prepare(self, leg: int) -> None:
        """Of a call's audio: who may send it, without which there is none, and its threads."""
        try:
            self._filter_media()
            if self._media_threads is not None:
                self._media_threads.look()
        except OSError as err:
            logger.error("a call is ended, for its audio cannot be looked after: %s", err)
            self.hang_up(leg)

    def _refuse(self, handle: int) -> None:
        """A call of which the stack says nothing but that it is there: it would ring for ever."""
        now_ns = self._clock.now_ns()
        self._refused.say(now_ns, "a call was refused, for its headers are more than 16 kB")
        call = Call(self._runtime, handle=handle, ua_handle=0, state=CallState.INCOMING)
        self._do(_quietly(call.reject()))

    async def _look_after_certificate(self) -> None:
        """Ours, as it was when the stack read it."""
        path, said = self._config.tls_certificate, ""
        if path is None:
            return
        try:
            begins, ends = sip_certificates.validity(path.read_text(encoding="latin-1"))
        except (OSError, ValueError) as err:
            logger.warning("[sip] tls_certificate = %s: %s", path, err)
            return
        while True:
            trouble = sip_certificates.trouble(path, begins, ends, datetime.now(UTC))
            if trouble and trouble != said:
                logger.warning("%s", trouble)
            said = trouble
            await asyncio.sleep(sip_certificates.LOOK_S)

    async def _look_after_media(self) -> None:
        while self._media_threads is not None:
            if self._calls:
                with contextlib.suppress(OSError):  # no descriptor is free
                    self._media_threads.look()
            await asyncio.sleep(LOOK_S)

    async def _answer(self, leg: int, call: Call) -> None:
        try:
            await call.answer()
        except baresip.StaleHandleError:
            return  # its CALL_CLOSED is on its way
        except baresip.BaresipError as err:
            logger.warning("call %s could not be answered: %s", call.call_id, err)
            await _quietly(call.reject())

    async def _transfer(self, leg: int, call: Call, target: str) -> None:
        try:
            # In brackets, or its parameters would be the header's.
            await call.transfer(f"<{target}>")  # done: its CALL_CLOSED has been heard
        except baresip.TransferFailed as err:
            words = f"{err.status} {err.reason}" if err.status else str(err)
            self._hear(sip_stack.TransferEnded(leg, words))
        except (baresip.BaresipError, ValueError) as err:
            self._hear(sip_stack.TransferEnded(leg, str(err)))

    async def _stay_logged_in(self, account: SipAccount, agent: UserAgent) -> None:
        self._logins[agent.handle] = login = Login()
        while True:
            self._wanted[agent.handle] = over = asyncio.get_running_loop().create_future()
            try:
                await agent.register()
                why = await over  # the stack renews it until that fails
            except baresip.BaresipError as err:
                why = str(err)
            del self._wanted[agent.handle]
            was_on, after_s = login.is_on, login.failed()
            logger.warning(
                "account %s is not registered at %s: %s; again in %d s",
                account.user,
                account.domain,
                why,
                after_s,
            )
            if was_on:
                await _quietly(agent.unregister())
            await asyncio.sleep(after_s)

    def _registered(self, handle: int, is_ok: bool, why: str) -> None:
        """The stack has heard of a registrar; nothing is said of what does not change."""
        over = self._wanted.get(handle)
        if over is None or over.done():
            return
        login = self._logins[handle]
        was_on = login.is_on
        if is_ok:
            rush = login.accepted(self._clock.now_ns())
            if rush:
                over.set_result(rush)
        elif was_on:
            over.set_result(why)
        if is_ok != was_on:
            self._hear(sip_stack.Registration(self._agents[handle].user, is_ok, why))

    def _shut(self) -> None:
        """Let nobody in until there are accounts: a call before that rings for ever or is 404."""
        try:
            self._filter(closed=True)
        except OSError as err:
            logger.error("%s", err)  # `start` meets it again

    def _filter(self, *, closed: bool = False) -> None:
        """Tell the kernel who may send us anything; closed: nobody. Raises `OSError`."""
        address, _ = endpoint("listen", self._config.listen)
        networks = (NOBODY,) if closed else self._config.networks
        ports = self._config.ports
        with sip_filter.own_sockets(str(address), ports) as sockets:
            if len(sockets) < 1 + len(ports):
                raise OSError(f"not all of {self._config.listen} (ports {ports}) is ours")
            for connection in sockets:
                is_udp = connection.type == socket.SOCK_DGRAM
                drop = is_udp and self._options_dropped
                sip_filter.attach(connection, sip_filter.program(networks, drop_options=drop))
                if closed and is_udp:
                    sip_filter.make_room(connection)
                    sip_filter.empty(connection)

    def _filter_media(self) -> None:
        """The same for the sockets of a call's audio, which are bound to all addresses."""
        networks = self._config.networks
        if not networks:
            return
        low, high = self._config.rtp_ports
        among = range(low, high + 2)
        with sip_filter.own_sockets("", (), among=among, known=self._media_sockets) as sockets:
            for connection in sockets:
                sip_filter.attach(connection, sip_filter.program(networks))


class _Gate(threading.Event):
    """Does something else first, on the thread that sets it."""

    def __init__(self, first: Callable[[], None]) -> None:
        super().__init__()
        self._first = first

    def set(self) -> None:
        self._first()
        super().set()


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """End something that may have ended by itself."""
    try:
        await work
    except baresip.StaleHandleError:
        return
    except baresip.BaresipError as err:
        logger.warning("the SIP stack did not do as told: %s", err)


def _settings(config: SipConfig, verbose: bool) -> Config:
    address, _ = endpoint("listen", config.listen)
    transports = ["udp", "tcp"] + ["tls"] * (len(config.ports) > 1)
    lines = [
        f"sip_listen {config.listen}",
        f"sip_transports {','.join(transports)}",
        f"rtp_ports {config.rtp_ports[0]}-{config.rtp_ports[1]}",
        "audio_jitter_buffer_type adaptive",
        f"audio_jitter_buffer_ms {config.jitter_ms[0]}-{config.jitter_ms[1]}",
        "opus_stereo no",
        "opus_sprop_stereo no",
        "opus_bitrate 24000",
        "opus_complexity 5",
        "opus_inbandfec yes",
        "sip_verify_server yes",
    ]
    if config.tls_ca is not None:
        lines.append(f"sip_cafile {config.tls_ca}")
    if config.tls_certificate is not None:
        lines.append(f"sip_certificate {config.tls_certificate}")
    return Config(
        net_interface=str(address),
        max_concurrent_calls=config.most,
        rtp_timeout=config.media_timeout_s + LATER_S,
        expose_headers=sip_headers.NAMES,
        sip_trace=verbose,
        native_log_level="debug" if verbose else "warning",
        extra_config_text="\n".join(lines) + "\n",
    )


def _account(account: SipAccount, config: SipConfig) -> Account:
    """Raises `OSError` if its password cannot be read, `ValueError` if it is none."""
    password = ""
    if account.password_file is not None:
        try:
            password = _password(account.password_file)
        except (OSError, ValueError) as err:
            why = err.strerror if isinstance(err, OSError) else err
            raise ValueError(
                f'account "{account.user}": password_file = {account.password_file}: {why}'
            ) from None
    extra = ["video_codecs=none"]
    if account.srtp != "off":
        extra.append("mediaenc=srtp" + ("-mand" if account.srtp == "mandatory" else ""))
    if account.any_number:
        extra.append("catchall=yes")
    if account.stun:
        extra += ["medianat=stun", f"stunserver={account.stun}"]
    address, port = endpoint("listen", config.listen)
    transport: Literal["udp", "tcp", "tls"] = account.transport
    return Account(
        user=account.user,
        domain=account.domain or f"{address}:{port}",
        password=password,
        auth_user=account.auth_user or None,
        registrar=account.proxy or None,
        reg_interval=600 if account.register else 0,
        transport=transport,
        audio_codecs=tuple(CODECS[codec] for codec in account.codecs),
        extra_params=tuple(extra),
    )


def _address_of_record(account: Account) -> str:
    """How the stack is told of it. With a transport in it, it answers 404 over any other, so of
    UDP nothing is said; over TLS, what is meant to be secret shall not come in the clear."""
    return account.aor().replace(";transport=udp", "", 1)


def _password(path: Path) -> str:
    text = path.read_text(encoding="utf-8").partition("\n")[0].strip()
    if not text:
        raise ValueError("there is no password on its first line")
    if set(text) & set('"\\'):
        raise ValueError('the stack knows no password with " or a backslash in it; change it')
    return text
