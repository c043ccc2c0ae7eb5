"""A PulseAudio server of our own, with sinks and sources that are no hardware.

For tests and measurements with the real sound library: PortAudio reaches it through ALSA's pulse
plugin. Nothing of this machine's own sound is touched; it runs as root, too, and ends with us.

    world    one null sink of two channels: left is the mouth, right is the ear
    mouth    what is played into it is heard by `mic`       (ALSA: vmic)
    spk      the loudspeaker                                (ALSA: vspk)
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

from appliance.clock import NS_PER_MS, NS_PER_S, MonotonicClock

NEEDED = ("pulseaudio", "pactl", "paplay", "parec")
INSTALL = (
    "apt-get install --no-install-recommends pulseaudio pulseaudio-utils libasound2-plugins "
    "libportaudio2"
)

SCRIPT = """\
load-module module-native-protocol-unix auth-anonymous=1 socket={folder}/native
load-module module-null-sink sink_name=world rate=48000 channels=2 \
channel_map=front-left,front-right
load-module module-remap-sink sink_name=mouth master=world channels=1 channel_map=mono \
master_channel_map=front-left remix=no
load-module module-remap-sink sink_name=spk master=world channels=1 channel_map=mono \
master_channel_map=front-right remix=no
load-module module-remap-source source_name=mic master=world.monitor channels=1 channel_map=mono \
master_channel_map=front-left remix=no
set-default-sink spk
set-default-source mic
"""

DEVICES = """\
pcm.vmic {{ type pulse server "{server}" device mic }}
pcm.vspk {{ type pulse server "{server}" device spk }}
"""


class PulseMissing(RuntimeError):
    """The machine lacks what is needed; the text has the command."""


class Pulse:
    """The server, for a `with` block."""

    def __init__(self, folder: Path) -> None:
        """folder: may be made and filled; its path must be short (Unix sockets)."""
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing:
            raise PulseMissing(f"{', '.join(missing)}: not installed. {INSTALL}")
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find these devices, and no others."""
        server = f"unix:{self.folder}/native"
        return {
            "PULSE_SERVER": server,
            "XDG_RUNTIME_DIR": str(self.folder),
            "ALSA_CONFIG_PATH": f"/usr/share/alsa/alsa.conf:{self.folder}/asound.conf",
        }

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "default.pa").write_text(SCRIPT.format(folder=self.folder))
        (self.folder / "asound.conf").write_text(
            DEVICES.format(server=f"unix:{self.folder}/native")
        )
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, or start it again after `stop`."""
        (self.folder / "native").unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("pulseaudio", "-n", "-F", str(self.folder / "default.pa")),
                    *("--daemonize=no", "--exit-idle-time=-1", "--disallow-exit"),
                    *("--use-pid-file=no",),
                ],
                env={**os.environ, **self.environment, "HOME": str(self.folder)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        clock = MonotonicClock()
        until_ns = clock.now_ns() + 10 * NS_PER_S
        while clock.now_ns() < until_ns and self._process.poll() is None:
            if self._answers():
                return
            clock.sleep_until(clock.now_ns() + 50 * NS_PER_MS)
        self.stop()
        raise PulseMissing(f"pulseaudio did not start: {(self.folder / 'log').read_text()}")

    def stop(self) -> None:
        """As if its machine had lost all its sound."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait()

    @contextlib.contextmanager
    def run(
        self, *command: str, stdout: IO[bytes] | None = None
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """A process with these devices; it ends with the block."""
        process: subprocess.Popen[Any] = subprocess.Popen(
            command, env={**os.environ, **self.environment}, stdout=stdout
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()

    def _answers(self) -> bool:
        done = subprocess.run(
            ["pactl", "info"],
            env={**os.environ, **self.environment},
            capture_output=True,
            check=False,
        )
        return done.returncode == 0
