"""A real Asterisk for tests, from a chroot: no Debian release before forky has it.

    debootstrap --variant=minbase --include=ca-certificates forky ROOT MIRROR .../scripts/sid
    cp /etc/resolv.conf ROOT/etc/; mount --bind /dev ROOT/dev; mount -t proc proc ROOT/proc
    printf '#!/bin/sh\\nexit 101\\n' > ROOT/usr/sbin/policy-rc.d; chmod +x ROOT/usr/sbin/policy-rc.d
    chroot ROOT apt-get update
    chroot ROOT apt-get install -y --no-install-recommends asterisk asterisk-modules asterisk-config

600 MB and some minutes; `DUPLEXBOX_ASTERISK=ROOT make test-lines` then uses it. Unmount ROOT/dev
and ROOT/proc before you delete ROOT. It listens on the loopback alone.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from numpy.typing import NDArray

from tests.sip_peer import free_port, now_s, sleep

MODULES = """[modules]
autoload = yes
noload = chan_iax2.so
noload = chan_sip.so
"""

PJSIP = """[here]
type = transport
protocol = udp
bind = 127.0.0.1:{port}
[bot]
type = endpoint
context = none
disallow = all
allow = {codec}
auth = bot
aors = bot
direct_media = no
[bot]
type = auth
auth_type = userpass
username = bot
password = s3cret
[bot]
type = aor
max_contacts = 1
remove_existing = yes
"""

WEBSOCKET = """[duplexbox]
type = websocket_client
connection_type = per_call_config
uri = ws://127.0.0.1:{bridge}/media
protocols = media
"""

DIALPLAN = """[play]
exten => s,1,Answer()
 same => n,MixMonitor(/tmp/mix.wav,r(/tmp/heard.wav))
 same => n,Playback(/tmp/voice)
 same => n,SendDTMF(12#)
 same => n,Wait(1)
 same => n,Hangup()
[bridge]
exten => s,1,Answer()
 same => n,AudioSocket(40325ec2-5efd-4bd3-805f-53576e581d13,127.0.0.1:{bridge})
 same => n,Hangup()
[media]
exten => s,1,Set(WHO=${{URIENCODE(+49 30 1)}})
 same => n,Dial(WebSocket/duplexbox/{media}v(caller=${{WHO}},call=${{UNIQUEID}}),20,g)
 same => n,System(echo ${{DIALSTATUS}} >/tmp/dialstatus)
 same => n,Hangup()
[dial]
exten => s,1,Dial(PJSIP/bot,20,g)
 same => n,Hangup()
[none]
exten => desk,1,Dial(Local/s@desk)
exten => engaged,1,Dial(Local/s@engaged)
[desk]
exten => s,1,Answer()
 same => n,System(echo answered >/tmp/desk)
 same => n,Wait(2)
 same => n,Hangup()
[engaged]
exten => s,1,Busy(1)
[keys]
exten => s,1,Answer()
 same => n,MixMonitor(/tmp/mix.wav,r(/tmp/heard.wav))
 same => n,Wait(0.5)
 same => n,Playback(/tmp/voice)
 same => n,SendDTMF(42#)
 same => n,Wait(1)
 same => n,Hangup()
[speak]
exten => s,1,Answer()
 same => n,MixMonitor(/tmp/mix.wav,r(/tmp/heard.wav))
 same => n,Wait(0.5)
 same => n,Playback(/tmp/voice)
 same => n,Wait(1)
 same => n,Hangup()
"""


class Asterisk:
    """One that runs."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self.port = root, port

    def say(self, command: str) -> str:
        """What it answers to a command of its console."""
        ran = subprocess.run(
            ["chroot", str(self.root), "asterisk", "-rx", command],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return ran.stdout + ran.stderr

    def file(self, name: str, within_s: float = 10.0) -> str:
        """What its dialplan wrote into /tmp/``name``, once it has."""
        path, until = self.root / "tmp" / name, now_s() + within_s
        while not path.is_file() or not path.read_text().strip():
            assert now_s() < until, f"{name} was not written"
            sleep(0.1)
        return path.read_text().strip()

    def heard(self) -> tuple[NDArray[np.int16], int]:
        """What came back to it, and at which rate."""
        pcm, rate_hz = sf.read(self.root / "tmp/heard.wav", dtype="int16")
        return np.asarray(pcm, np.int16), int(rate_hz)


@contextmanager
def asterisk(
    folder: Path,
    voice: NDArray[np.int16],
    codec: str = "alaw",
    bridge: int = 1,
    media: str = "c(slin16)n",
) -> Iterator[Asterisk]:
    """Run the one in the chroot. voice: at 8 kHz. bridge: where an AudioSocket or websocket
    listens. media: options of chan_websocket's dial string.
    """
    place = os.environ.get("DUPLEXBOX_ASTERISK", "")
    if not place:
        pytest.skip("no Asterisk: DUPLEXBOX_ASTERISK names no chroot (tests/sip_asterisk.py)")
    root, port = Path(place), free_port()
    config = root / "etc/asterisk"
    (config / "modules.conf").write_text(MODULES)
    (config / "pjsip.conf").write_text(PJSIP.format(port=port, codec=codec))
    (config / "extensions.conf").write_text(DIALPLAN.format(bridge=bridge, media=media))
    (config / "rtp.conf").write_text("[general]\nrtpstart=31000\nrtpend=31999\n")
    (config / "websocket_client.conf").write_text(WEBSOCKET.format(bridge=bridge))
    for name in ("mix.wav", "heard.wav", "dialstatus", "desk"):
        (root / "tmp" / name).unlink(missing_ok=True)
    voice.astype("<i2").tofile(root / "tmp/voice.sln")
    (root / "run/asterisk").mkdir(parents=True, exist_ok=True)
    with (folder / "asterisk.log").open("wb") as log:
        process = subprocess.Popen(
            ["chroot", str(root), "asterisk", "-f", "-n"], stdout=log, stderr=log
        )
    found = Asterisk(root, port)
    try:
        until = now_s() + 60
        while "fully booted" not in found.say("core waitfullybooted"):
            assert process.poll() is None, (folder / "asterisk.log").read_text()[-2_000:]
            assert now_s() < until
            sleep(0.5)
        yield found
    finally:
        found.say("core stop now")
        process.wait(30)
