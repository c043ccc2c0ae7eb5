"""The table [sip]: what starts and what is refused, with the words an operator needs."""

import re
from pathlib import Path

import pytest

from appliance.config import DEFAULT, Config, ConfigError, parse
from appliance.lines.sip_config import SipAccount, SipConfig, SipRecording

HEAD = '[engine]\nbundle = "b"\n[sip]\n'


def sip(text: str) -> SipConfig:
    config: Config = parse(HEAD + text, "box.toml")
    assert config.sip is not None
    return config.sip


def test_without_the_table_there_is_no_telephone_line() -> None:
    assert parse('[engine]\nbundle = "b"\n', "box.toml").sip is None


def test_the_file_that_init_writes_has_it_as_a_comment_that_says_what_the_defaults_are() -> None:
    block = DEFAULT[DEFAULT.index("#[sip]") :]
    found = sip(block.replace("\n#", "\n").removeprefix("#[sip]"))
    for name in SipConfig.__struct_fields__:
        assert name in ("accounts", "recording") or f"\n#{name} = " in block
    for name in (*SipAccount.__struct_fields__, *SipRecording.__struct_fields__):
        assert f"\n#{name} = " in block
    account = SipAccount(
        user="bot",
        domain="pbx.example:5060",
        register=True,
        password_file=Path("/etc/duplexbox/bot.password"),
    )
    assert found == SipConfig(
        listen="10.0.0.5:5060",
        allow=("10.0.0.0/24",),
        accounts=(account,),
        tls_ca=Path("/etc/ssl/certs/ca-certificates.crt"),
        tls_certificate=Path("/etc/duplexbox/box.pem"),
        hook=Path("/etc/duplexbox/sip-hook"),
        recording=SipRecording(announce=Path("/etc/duplexbox/recorded.wav")),
    )


def test_a_pbx_and_who_may_call() -> None:
    found = sip(
        'listen = "10.0.0.5:5060"\nallow = ["10.0.0.0/24"]\n'
        'transfer_to = ["sip:d*@pbx"]\n'
        '[[sip.accounts]]\nuser = "bot"\ndomain = "pbx:5060"\nregister = true\n'
        'password_file = "/etc/duplexbox/bot.password"\ncodecs = ["g722", "pcma"]\n'
        'voice = "alto"\nmax_s = 600\n[sip.accounts.digits]\n0 = "sip:desk@pbx"\n"*" = "hang-up"\n'
    )
    account = found.accounts[0]
    assert account.password_file == Path("/etc/duplexbox/bot.password")
    assert account.codecs == ("g722", "pcma")
    assert account.digits == {"0": "sip:desk@pbx", "*": "hang-up"}
    assert [str(network) for network in found.networks] == ["10.0.0.0/24"]


@pytest.mark.parametrize("stun", ["stun:10.0.0.3", "stun:10.0.0.3:3478", "stun:stun.example:3478"])
def test_a_stun_server_is_one_that_allow_has_or_a_name_that_only_the_stack_asks_for(
    stun: str,
) -> None:
    found = sip(
        'listen = "10.0.0.5:5060"\nallow = ["10.0.0.0/24"]\n'
        f'accounts = [{{ user = "a", proxy = "edge:5060;transport=tcp", stun = "{stun}" }}]\n'
    )
    assert found.accounts[0].stun == stun


BOT = 'accounts = [{ user = "bot" }]\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('listen = "10.0.0.5:5060"\n' + BOT, "would answer whoever reaches it"),
        ('listen = "0.0.0.0:5060"\n' + BOT, "not an address that a peer could be told"),
        ('listen = "5060"\n' + BOT, "not ADDRESS:PORT"),
        ('listen = "127.0.0.1:0"\n' + BOT, "not ADDRESS:PORT"),
        ('listen = "127.0.0.1:5060"\nallow = ["10.0.0.1/24"]\n' + BOT, "has host bits set"),
        ('listen = "127.0.0.1:5060"\nhealth = "127.0.0.1:5060"\n' + BOT, "needs its own port"),
        ('listen = "[2001:db8::5]:5060"\n' + BOT, "is IPv6"),
        ('listen = "::1"\n' + BOT, "is IPv6"),
        ('listen = "127.0.0.1:5060"\nallow = ["2001:db8::/32"]\n' + BOT, "is IPv6"),
        (
            'listen = "127.0.0.1:5060"\naccounts = [{ user = "a", domain = "[2001:db8::1]:5060" }]',
            'domain: "[2001:db8::1]:5060" is IPv6',
        ),
        (
            'listen = "127.0.0.1:5060"\naccounts = [{ user = "a", stun = "stun:[2001:db8::1]" }]',
            'stun: "[2001:db8::1]" is IPv6',
        ),
        (
            'listen = "10.0.0.5:5060"\nallow = ["10.0.0.0/8"]\n'
            'accounts = [{ user = "a", stun = "stun:192.0.2.1:3478" }]\n',
            "192.0.2.1 is not in allow, so its answers would be dropped",
        ),
        ('listen = "127.0.0.1:5060"\naccounts = []\n', "accounts"),
        ('listen = "127.0.0.1:5060"\nrtp_ports = [20000, 20010]\n' + BOT, "too few for 120"),
        ('listen = "127.0.0.1:5060"\njitter_ms = [200, 40]\n' + BOT, "200 is more than 40"),
        (
            'listen = "127.0.0.1:5060"\nopen_to_everybody = true\nallow = ["10.0.0.0/8"]\n' + BOT,
            "contradict",
        ),
        (
            'listen = "127.0.0.1:5060"\naccounts = [{ user = "a" }, { user = "a" }]\n',
            "the same user",
        ),
        (
            'listen = "127.0.0.1:5060"\naccounts = [{ user = "a", register = true }]\n',
            "needs a domain",
        ),
        (
            'listen = "127.0.0.1:5060"\n'
            'accounts = [{ user = "a", register = true, domain = "pbx" }]\n',
            "needs a password_file",
        ),
        (
            'listen = "127.0.0.1:5060"\naccounts = [{ user = "a", srtp = "mandatory" }]\n',
            "keys in the clear",
        ),
        (
            'listen = "127.0.0.1:5060"\n'
            'accounts = [{ user = "a", any_number = true }, { user = "b", any_number = true }]\n',
            "calls go to one",
        ),
        (
            'listen = "127.0.0.1:5060"\naccounts = [{ user = "a", digits = { 1 = "desk" } }]\n',
            'expected "hang-up" or an address',
        ),
        (
            'listen = "127.0.0.1:5060"\naccounts = [{ user = "a", digits = { 1 = "sip:d@p" } }]\n',
            'add it to the list: [sip] transfer_to = ["sip:d@p"]',
        ),
        (
            'listen = "127.0.0.1:5060"\ntransfer_to = ["sip:e@p"]\n'
            'accounts = [{ user = "a", words = { "one moment" = "sip:d@p" } }]\n',
            'words "one moment": sip:d@p is not allowed',
        ),
        (
            'listen = "127.0.0.1:5060"\n'
            'accounts = [{ user = "a", words = { "?!" = "hang-up" } }]\n',
            "holds no word",
        ),
        (
            'listen = "127.0.0.1:5060"\naccounts = [{ user = "a", record = true }]\n',
            "needs [sip.recording]",
        ),
        ('listen = "127.0.0.1:5060"\ntransfer_to = ["everybody"]\n' + BOT, "is no address"),
        ('listen = "127.0.0.1:5060"\naccounts = [{ user = "a;b" }]\n', "accounts"),
        ('listen = "127.0.0.1:5060"\ntypo = 1\n' + BOT, "typo"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_reason(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        sip(text)
