"""The table [sip] of duplexbox.toml: where the telephone line listens, for whom, and who may call.

Decides what is allowed to start: a line that would answer the whole world does not. Strictly
decoded with the rest of the file; the sentences of its errors are for operators.
"""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from appliance.lines import sip_transfer
from appliance.lines.sip_filter import MOST_NETWORKS
from appliance.lines.sip_words import plain

CODECS = {"opus": "opus/48000/1", "g722": "g722/16000/1", "pcma": "pcma", "pcmu": "pcmu"}
"""Ours and the stack's names of what it can speak."""

IPV6 = "is IPv6, and the telephone line speaks IPv4 only"

Codec = Literal["opus", "g722", "pcma", "pcmu"]
Port = Annotated[int, Meta(ge=1, le=65_535)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class SipAccount(_Table, frozen=True):
    """One number or name under which the box can be called."""

    user: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._+*#-]+$")]
    domain: Annotated[str, Meta(max_length=200, pattern=r"^[A-Za-z0-9.\-\[\]:]*$")] = ""
    """Of the PBX or trunk, with its port if that is not 5060; empty: calls come without it."""
    register: bool = False
    """Log in at the domain, and stay so."""
    password_file: Path | None = None
    """Holds the password for registering, alone, on its first line."""
    auth_user: Annotated[str, Meta(max_length=64, pattern=r"^[^;<>\"\\\s]*$")] = ""
    """The name to log in with, if it is not ``user``."""
    transport: Literal["udp", "tcp", "tls"] = "udp"
    srtp: Literal["off", "optional", "mandatory"] = "off"
    """SDES keys, which only TLS keeps secret."""
    any_number: bool = False
    """Also takes calls to numbers that no account has: the one account of a trunk."""
    proxy: Annotated[str, Meta(max_length=200, pattern=r"^[A-Za-z0-9.\-\[\]:;=]*$")] = ""
    """Where to register and call through, if that is not the domain itself."""
    stun: Annotated[str, Meta(max_length=200, pattern=r"^(stun:[A-Za-z0-9.\-\[\]:]+)?$")] = ""
    """Behind a router: who says what our address is outside, such as "stun:stun.example:3478".
    Each call needs its answers, all the time, so ``allow`` must let it in."""
    codecs: Annotated[tuple[Codec, ...], Meta(min_length=1)] = ("opus", "g722", "pcma", "pcmu")
    """Best first."""
    persona: Annotated[str, Meta(max_length=8000)] = ""
    voice: Annotated[str, Meta(max_length=64)] = ""
    settings: dict[str, float] = {}
    """Values such as "sampling.temperature" for calls to this account."""
    max_s: Annotated[int, Meta(ge=1, le=86_400)] = 3600
    """A call is ended after this."""
    digits: dict[Annotated[str, Meta(pattern=r"^[0-9A-D*#]$")], str] = {}
    """What a key does: "hang-up", or an address to which the caller is transferred."""
    words: dict[Annotated[str, Meta(min_length=1, max_length=200)], str] = {}
    """What the model's words do, such as { "goodbye" = "hang-up" }."""
    words_grace_ms: Annotated[int, Meta(ge=500, le=30_000)] = 1500
    """Of silence after such words, before they are acted upon."""
    fallback: Annotated[str, Meta(max_length=200)] = ""
    """An address to which a caller is transferred when the box fails in the middle of the call."""
    record: bool = False
    """Keep both sides of these calls: needs [sip.recording]."""

    def __post_init__(self) -> None:
        if self.register and not self.domain:
            raise ValueError(f'account "{self.user}": register = true needs a domain')
        if self.register and self.password_file is None:
            raise ValueError(f'account "{self.user}": register = true needs a password_file')
        if self.srtp != "off" and self.transport != "tls":
            raise ValueError(
                f'account "{self.user}": srtp sends its keys in the clear unless transport = "tls"'
            )
        for name in ("domain", "proxy", "stun"):
            if _is_ipv6(value := getattr(self, name).removeprefix("stun:")):
                raise ValueError(f'account "{self.user}": {name}: "{value}" {IPV6}')
        if self.domain and not _is_host(self.domain):
            raise ValueError(
                f'account "{self.user}": domain: "{self.domain}" is not HOST or HOST:PORT, such as '
                '"pbx.example" or "10.0.0.2:5080"'
            )
        for rule, what in self.rules:
            if what != sip_transfer.HANG_UP and sip_transfer.address(what) is None:
                raise ValueError(
                    f'account "{self.user}": {rule} is "{what}"; '
                    'expected "hang-up" or an address such as "sip:desk@pbx.example"'
                )
        for phrase in self.words:
            if not plain(phrase):
                raise ValueError(f'account "{self.user}": words "{phrase}" holds no word')

    @property
    def rules(self) -> list[tuple[str, str]]:
        """What keys, words and failures do, each with its name in the file."""
        rules = [(f'digits "{key}"', what) for key, what in self.digits.items()]
        rules += [(f'words "{phrase}"', what) for phrase, what in self.words.items()]
        return [*rules, ("fallback", self.fallback)] if self.fallback else rules


class SipRecording(_Table, frozen=True):
    """Where calls are recorded, and how much of the disk they may take."""

    folder: Path = Path("/var/lib/duplexbox/recordings")
    """One WAV file per call, left the caller and right the model."""
    announce: Path | None = None
    """A WAV file that callers hear before anything of theirs is kept; 8 s at most."""
    keep_days: Annotated[int, Meta(ge=0)] = 30
    """Files that began longer ago are removed; 0: none is for its age."""
    keep_mb: Annotated[int, Meta(ge=0)] = 10_000
    """For all of them; the oldest go first. 0: any amount."""
    min_free_mb: Annotated[int, Meta(ge=0)] = 500
    """The disk must have this left; below it nothing is recorded, and nobody refused."""


class SipConfig(_Table, frozen=True):
    """The telephone line."""

    listen: str
    """ADDRESS:PORT of one of this machine's interfaces; 0.0.0.0 is no address to call."""
    accounts: Annotated[tuple[SipAccount, ...], Meta(min_length=1, max_length=100)]
    allow: tuple[str, ...] = ()
    """Networks that may send us anything at all, such as "10.0.0.0/24"."""
    open_to_everybody: bool = False
    """Take calls from any address: only behind a firewall that knows who may."""
    most: Annotated[int, Meta(ge=1, le=1000)] = 120
    """Calls at once; fewer if the box has room for fewer."""
    calls_per_s: Annotated[float, Meta(gt=0, le=1000)] = 20
    """New calls a second from one address; more are refused."""
    rtp_ports: tuple[Port, Port] = (20_000, 30_000)
    jitter_ms: tuple[Annotated[int, Meta(ge=20, le=1000)], Annotated[int, Meta(ge=20, le=1000)]] = (
        20,
        200,
    )
    """How long the stack holds packets back, at least and at most; it adapts in between."""
    lead_ms: Annotated[int, Meta(ge=20, le=100)] = 30
    """What of the model's audio waits in the sender: what this process may be late by."""
    media_timeout_s: Annotated[int, Meta(ge=3, le=3600)] = 30
    """A call without any audio from the peer for so long is ended; not while it is on hold."""
    hold_s: Annotated[int, Meta(ge=1, le=86_400)] = 600
    """And one on hold for so long."""
    health: str = ""
    """ADDRESS:PORT where OPTIONS is answered with 200 while a call would be taken, else 503."""
    transfer_to: tuple[str, ...] = ()
    """Addresses to which callers may be transferred, such as "sip:desk@pbx.example" or, any whose
    user begins so, "sip:2*@pbx.example"; by keys, words or an operator. None: nobody is."""
    recording: SipRecording | None = None
    tls_ca: Path | None = None
    """Certificates of whom we trust over TLS."""
    tls_certificate: Path | None = None
    """Ours with its key, in one PEM file, for whoever connects over TLS at the port after ours."""
    records: Path = Path("/var/lib/duplexbox/sip.sqlite")
    """One row per call: who, when, how long, how it was."""
    hook: Path | None = None
    """A program that is started with one JSON object on its standard input for what happens:
    a call begins, a key is pressed, a call ends."""

    def __post_init__(self) -> None:
        address, _ = endpoint("listen", self.listen)
        if self.health and endpoint("health", self.health) == endpoint("listen", self.listen):
            raise ValueError(f"health: {self.health} is where calls come in; it needs its own port")
        if len(self.allow) > MOST_NETWORKS:
            raise ValueError(
                f"allow: {len(self.allow)} networks; the kernel's filter holds {MOST_NETWORKS}. "
                "Put neighbours together"
            )
        for network in self.allow:
            if ":" in network:
                raise ValueError(f'allow: "{network}" {IPV6}')
            try:
                prefix = ipaddress.IPv4Network(network).prefixlen
            except ValueError as err:
                raise ValueError(f'allow: "{network}" is no IPv4 network: {err}') from None
            if not prefix:
                raise ValueError(
                    f'allow: "{network}" is everybody, and scanners find this line within minutes. '
                    "Name who may call, or say open_to_everybody = true behind a firewall that does"
                )
        if self.rtp_ports[1] - self.rtp_ports[0] < 2 * self.most:
            raise ValueError(
                f"rtp_ports: {self.rtp_ports[0]}-{self.rtp_ports[1]} is too few for "
                f"{self.most} calls of 2 ports each"
            )
        if self.jitter_ms[0] > self.jitter_ms[1]:
            raise ValueError(f"jitter_ms: {self.jitter_ms[0]} is more than {self.jitter_ms[1]}")
        names = [account.user for account in self.accounts]
        if len(set(names)) < len(names):
            raise ValueError("accounts: two of them have the same user")
        if sum(account.any_number for account in self.accounts) > 1:
            raise ValueError("accounts: two of them have any_number = true; calls go to one")
        for entry in self.transfer_to:
            if sip_transfer.address(entry) is None:
                raise ValueError(
                    f'transfer_to: "{entry}" is no address such as "sip:desk@pbx.example"'
                )
        for account in self.accounts:
            for rule, what in account.rules:
                if what != sip_transfer.HANG_UP and (
                    why := sip_transfer.fault(what, self.transfer_to)
                ):
                    raise ValueError(f'account "{account.user}": {rule}: {why}')
            server = _address_of(account.stun)
            if self._drops(server):
                raise ValueError(
                    f'account "{account.user}": stun: {server} is not in allow, so its answers '
                    f'would be dropped, and every call ended after 70 s. Add "{server}/32"'
                )
            registrar = _address_of(account.proxy or account.domain)
            is_udp = account.transport == "udp" and "transport=" not in account.proxy
            if account.register and is_udp and self._drops(registrar):
                raise ValueError(
                    f'account "{account.user}": {registrar} is not in allow, so what it answers to '
                    f'a login would be dropped. Add "{registrar}/32"'
                )
            if account.record and self.recording is None:
                raise ValueError(f'account "{account.user}": record = true needs [sip.recording]')
        if self.allow and self.open_to_everybody:
            raise ValueError("allow and open_to_everybody contradict each other; leave one out")
        if not self.allow and not self.open_to_everybody and not address.is_loopback:
            raise ValueError(
                f"listen: {self.listen} would answer whoever reaches it, and scanners find it "
                'within minutes. Say who may call: allow = ["10.0.0.0/24"], the addresses of your '
                "PBX or trunk and of its media servers"
            )

    def _drops(self, sender: ipaddress.IPv4Address | None) -> bool:
        """Whether what comes from there is dropped; None, a name, is anybody."""
        if sender is None or not self.allow:
            return False
        return not any(sender in network for network in self.networks)

    @property
    def ports(self) -> tuple[int, ...]:
        """Of signalling: over TLS it is the one after that of UDP and TCP."""
        port = endpoint("listen", self.listen)[1]
        is_tls = any(account.transport == "tls" for account in self.accounts)
        return (port, port + 1) if is_tls or self.tls_certificate is not None else (port,)

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network, ...]:
        """Who may send us anything; empty: anybody."""
        return tuple(ipaddress.IPv4Network(network) for network in self.allow)


def _is_ipv6(address: str) -> bool:
    """With a port or without; IPv4 and names have one colon at most."""
    return address.count(":") > 1


def _is_host(text: str) -> bool:
    """``HOST`` or ``HOST:PORT``."""
    host, colon, port = text.partition(":")
    return bool(host) and (not colon or (port.isdecimal() and 0 < int(port) < 65_536))


def _address_of(server: str) -> ipaddress.IPv4Address | None:
    """Of ``stun:ADDRESS:PORT`` or ``ADDRESS:PORT;transport=tcp``; None if it is a name, which only
    the stack asks for."""
    server = server.partition(";")[0]
    try:
        return ipaddress.IPv4Address(re.sub("^(stun|sips?):", "", server).partition(":")[0])
    except ValueError:
        return None


def endpoint(name: str, text: str) -> tuple[ipaddress.IPv4Address, int]:
    """``ADDRESS:PORT``. Raises `ValueError`."""
    if _is_ipv6(text):
        raise ValueError(f'{name}: "{text}" {IPV6}. This machine\'s: ip -4 address')
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.IPv4Address(host)
        if not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError("the port is none")
    except ValueError as err:
        raise ValueError(f'{name}: "{text}" is not ADDRESS:PORT in IPv4: {err}') from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError(
            f"{name}: {address} is not an address that a peer could be told. "
            "Name the interface's own: ip -4 address"
        )
    return address, int(port)
