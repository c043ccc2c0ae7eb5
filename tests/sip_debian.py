r"""Debian's own telephones and proxies for tests: SIPp, baresip, Kamailio, as child processes.

    apt-get install --no-install-recommends \
        sip-tester baresip-core kamailio kamailio-tls-modules tcpdump

All on the loopback, in a folder the test gives. What is missing fails its test with that line.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from numpy.typing import NDArray

from tests.sip_peer import HOST, free_port, is_taken, now_s, sleep, ulaw_encode

MISSING = (
    "apt-get install --no-install-recommends "
    "sip-tester baresip-core kamailio kamailio-tls-modules tcpdump"
)


def program(name: str) -> str:
    """Where it is; the test fails if it is nowhere."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin")
    if found is None:
        pytest.fail(f"{name} is not installed: {MISSING}")
    return found


# --- SIPp

SCENARIO = """<?xml version="1.0" encoding="UTF-8"?>
<scenario name="caller">
<send retrans="500" start_txn="invite"><![CDATA[
INVITE sip:[service]@[remote_ip]:[remote_port] SIP/2.0
Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: sipp <sip:sipp@[local_ip]:[local_port]>;tag=[pid]T[call_number]
To: <sip:[service]@[remote_ip]:[remote_port]>
Call-ID: [call_id]
CSeq: 1 INVITE
Contact: sip:sipp@[local_ip]:[local_port]
Max-Forwards: 70
Content-Type: application/sdp
Content-Length: [len]

v=0
o=u 1 1 IN IP4 [local_ip]
s=-
c=IN IP4 [media_ip]
t=0 0
m=audio [rtpstream_audio_port] RTP/AVP 0 101
a=rtpmap:0 PCMU/8000
a=rtpmap:101 telephone-event/8000
]]></send>
<recv response="100" optional="true" response_txn="invite"/>
<recv response="180" optional="true" response_txn="invite"/>
<recv response="183" optional="true" response_txn="invite"/>
<recv response="200" rtd="true" response_txn="invite"/>
<send ack_txn="invite"><![CDATA[
ACK sip:[service]@[remote_ip]:[remote_port] SIP/2.0
Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: sipp <sip:sipp@[local_ip]:[local_port]>;tag=[pid]T[call_number]
To: <sip:[service]@[remote_ip]:[remote_port]>[peer_tag_param]
Call-ID: [call_id]
CSeq: 1 ACK
Max-Forwards: 70
Content-Length: 0

]]></send>
@AUDIO@
<pause milliseconds="@MS@"/>
<send retrans="500" start_txn="bye"><![CDATA[
BYE sip:[service]@[remote_ip]:[remote_port] SIP/2.0
Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: sipp <sip:sipp@[local_ip]:[local_port]>;tag=[pid]T[call_number]
To: <sip:[service]@[remote_ip]:[remote_port]>[peer_tag_param]
Call-ID: [call_id]
CSeq: 2 BYE
Max-Forwards: 70
Content-Length: 0

]]></send>
<recv response="200" response_txn="bye"/>
</scenario>
"""
"""Without the names of transactions SIPp takes a 200 of INVITE that is sent again for BYE's, and
forgets a call whose BYE has not arrived."""


def sipp(
    folder: Path,
    port: int,
    calls: int,
    seconds: float,
    *,
    rate: int = 10,
    at_once: int = 0,
    lost: int = 0,
    voice: NDArray[np.int16] | None = None,
) -> tuple[int, str]:
    """So many calls of ``seconds`` each; SIPp's exit code (0: none failed) and last screen.

    lost: of a hundred messages, in both directions.
    """
    audio = ""
    if voice is not None:
        sound = folder / "voice.ul"
        sound.write_bytes(ulaw_encode(voice))
        play = f'<exec rtp_stream="{sound},-1,0,PCMU/8000"/>'
        audio = f"<nop><action>{play}</action></nop>"
    scenario = folder / "caller.xml"
    text = SCENARIO.replace("@AUDIO@", audio).replace("@MS@", str(int(seconds * 1000)))
    scenario.write_text(text)
    command = [
        *(program("sipp"), "-s", "bot", "-sf", str(scenario), f"127.0.0.1:{port}"),
        *(
            "-i",
            "127.0.0.1",
            "-mi",
            "127.0.0.1",
            "-p",
            str(free_port()),
            "-mp",
            str(random.randrange(40_000, 60_000, 400)),
        ),
        *("-m", str(calls), "-l", str(at_once or calls), "-r", str(rate), "-nostdin"),
        *(["-lost", str(lost)] if lost else []),
    ]
    timeout_s = seconds + calls / rate * max(1.0, seconds if at_once else 1.0) + 120
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return done.returncode, done.stderr[-2_000:] + done.stdout[-3_000:]


# --- baresip

BARESIP = """poll_method epoll
sip_listen 127.0.0.1:{port}
net_interface 127.0.0.1
audio_source aufile,{wav}
audio_player aufile,/dev/null
audio_alert aufile,/dev/null
ausrc_channels {channels}
auplay_channels {channels}
module_path /usr/lib/baresip/modules
module stdio.so
module g711.so
module g722.so
module opus.so
module aufile.so
module sndfile.so
module srtp.so
module_tmp account.so
module_app menu.so
snd_path {folder}/heard
rtp_ports 41000-42000
"""


def baresip(
    folder: Path,
    port: int,
    codec: str,
    voice: NDArray[np.float32],
    rate_hz: int,
    seconds: int,
    srtp: str = "",
    user: str = "bot",
) -> tuple[NDArray[np.float32], int]:
    """Debian's baresip calls, plays ``voice`` and hangs up; what it heard, and at which rate.

    voice: (n,) float32 at ``rate_hz``. codec: as its accounts have it, such as "g722/16000/1".
    """
    stereo = codec.startswith("opus")
    (folder / "heard").mkdir(parents=True, exist_ok=True)
    wav = folder / "voice.wav"
    sf.write(wav, np.stack([voice, voice], 1) if stereo else voice, rate_hz, subtype="PCM_16")
    (folder / "config").write_text(
        BARESIP.format(port=free_port(), wav=wav, channels=1 + stereo, folder=folder)
    )
    secret = f";mediaenc={srtp}" if srtp else ""
    (folder / "accounts").write_text(f"<sip:me@127.0.0.1>;regint=0;audio_codecs={codec}{secret}\n")
    command = [program("baresip"), "-f", str(folder), "-s", "-t", str(seconds)]
    done = subprocess.run(
        [*command, "-e", f"d sip:{user}@127.0.0.1:{port}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds + 30,
        check=False,
    )
    heard = next((folder / "heard").glob("*-dec.wav"), None)
    assert heard is not None, done.stdout + done.stderr
    pcm, found_hz = sf.read(heard, dtype="float32", always_2d=True)
    return np.ascontiguousarray(pcm[:, 0]), int(found_hz)


# --- Kamailio


KAMAILIO_TLS = """enable_tls=yes
listen=tls:{host}:{port}
loadmodule "tls.so"
modparam("tls", "tls_method", "TLSv1.2+")
modparam("tls", "certificate", "{folder}/its.pem")
modparam("tls", "private_key", "{folder}/its.key")
"""


def certificate(folder: Path, names: str = f"IP:{HOST}") -> Path:
    """An authority of our own, ``authority.pem``, and one for ``names`` by it; the folder."""
    folder.mkdir()
    (folder / "names").write_text(f"subjectAltName = {names}\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority "
        "-keyout authority.key -out authority.pem",
        f"req -newkey rsa:2048 -nodes -subj /CN={HOST} -keyout its.key -out its.csr",
        "x509 -req -in its.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 "
        "-extfile names -out its.pem",
    ):
        subprocess.run(
            [program("openssl"), *command.split()], cwd=folder, check=True, capture_output=True
        )
    return folder


@contextmanager
def kamailio(
    folder: Path, config: str, *, tls: Path | None = None, host: str = HOST
) -> Iterator[int]:
    """Run with ``config`` after the lines that every one of ours needs; its port, UDP and TCP.

    tls: where `certificate` put its own; then TLS is at the port after that.
    """
    port = free_port()
    path = folder / "kamailio.cfg"
    with_tls = "" if tls is None else KAMAILIO_TLS.format(host=host, port=port + 1, folder=tls)
    path.write_text(
        "debug=1\nlog_stderror=yes\nchildren=2\nauto_aliases=no\n"
        f"listen=udp:{host}:{port}\nlisten=tcp:{host}:{port}\n" + with_tls + config
    )
    with (folder / "kamailio.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(program("kamailio"), "-f", str(path), "-m", "64", "-M", "8", "-DD", "-E"),
                *("-P", str(folder / "kamailio.pid"), "-Y", str(folder)),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        until = now_s() + 15
        while not is_taken(port, socket.SOCK_DGRAM, host):
            assert process.poll() is None, (folder / "kamailio.log").read_text()
            assert now_s() < until, (folder / "kamailio.log").read_text()
            sleep(0.05)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
