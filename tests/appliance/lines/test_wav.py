"""Every WAV a caller may hand us, and ours after a kill."""

import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from appliance.lines.wav import WavError, WavReader, WavWriter

ROOT = Path(__file__).resolve().parents[3]


def tone(samples: int, rate_hz: int, level: float = 0.5) -> NDArray[np.float32]:
    phase = 2 * np.pi * 440 * np.arange(samples) / rate_hz
    return (level * np.sin(phase)).astype(np.float32)


def read_all(path: Path, piece: int = 1000) -> tuple[NDArray[np.float32], WavReader]:
    with WavReader(path) as reader:
        pieces = []
        while (pcm := reader.read(piece)).size:
            assert pcm.dtype == np.float32
            assert pcm.size <= piece
            pieces.append(pcm)
    return np.concatenate(pieces), reader


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 24_000, 44_100, 48_000])
@pytest.mark.parametrize(
    ("subtype", "error"),
    [
        ("PCM_U8", 1 / 128),
        ("PCM_16", 1 / 32768),
        ("PCM_24", 1e-6),
        ("PCM_32", 1e-6),
        ("FLOAT", 0.0),
        ("DOUBLE", 0.0),
        ("ULAW", 0.02),
        ("ALAW", 0.02),
    ],
)
@pytest.mark.parametrize("container", ["WAV", "WAVEX", "RF64"])
def test_any_sample_format_and_rate_is_read(
    tmp_path: Path, rate_hz: int, subtype: str, error: float, container: str
) -> None:
    path = tmp_path / "any.wav"
    pcm = tone(2_500, rate_hz)
    soundfile.write(path, pcm, rate_hz, subtype=subtype, format=container)
    got, reader = read_all(path)
    assert (reader.rate_hz, reader.samples, reader.channels) == (rate_hz, 2_500, 1)
    assert np.abs(got - pcm).max() <= error
    assert reader.bad_samples == 0


def test_channels_are_averaged(tmp_path: Path) -> None:
    path = tmp_path / "stereo.wav"
    left, right = tone(2_000, 8_000, 0.5), tone(2_000, 8_000, 0.25)
    soundfile.write(path, np.stack([left, right], 1), 8_000, subtype="FLOAT")
    got, reader = read_all(path)
    assert reader.channels == 2
    assert np.abs(got - (left + right) / 2).max() < 1e-7


@pytest.mark.parametrize("cut_bytes", [1, 2, 3, 1_001, 15_000])
def test_a_file_cut_short_is_read_as_far_as_it_goes(tmp_path: Path, cut_bytes: int) -> None:
    path = tmp_path / "cut.wav"
    soundfile.write(path, tone(8_000, 8_000), 8_000, subtype="PCM_16")
    whole, _ = read_all(path)
    path.write_bytes(path.read_bytes()[:-cut_bytes])
    got, reader = read_all(path)
    assert got.size == reader.samples == 8_000 - -(-cut_bytes // 2)
    assert (got == whole[: got.size]).all()


@pytest.mark.parametrize("size", [0xFFFF_FFFF, 0x7FFF_FFFF])
def test_a_header_that_promises_too_much_is_not_believed(tmp_path: Path, size: int) -> None:
    """What programs write that stream to a pipe and cannot go back to their header."""
    path = tmp_path / "piped.wav"
    soundfile.write(path, tone(8_000, 8_000), 8_000, subtype="PCM_16")
    raw = bytearray(path.read_bytes())
    raw[4:8] = raw[40:44] = size.to_bytes(4, "little")
    path.write_bytes(raw)
    assert read_all(path)[0].size == 8_000


def test_wild_floats_are_made_to_fit_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "wild.wav"
    wild = np.array([0.5, np.nan, np.inf, -np.inf, 3.0, -1.5, 1.0, -1.0], np.float32)
    soundfile.write(path, wild, 8_000, subtype="FLOAT")
    got, reader = read_all(path)
    assert got.tolist() == [0.5, 0.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    assert reader.bad_samples == 5


def test_what_is_not_a_wav_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    def complaint(path: Path) -> str:
        with pytest.raises(WavError) as caught:
            WavReader(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    path = tmp_path / "x.wav"
    assert complaint(path) == f"{path} cannot be read: No such file or directory"
    assert complaint(tmp_path) == f"{tmp_path} is not a file; hand in a WAV file"
    os.mkfifo(tmp_path / "pipe.wav")  # nobody writes to it, and nobody waits for them
    assert complaint(tmp_path / "pipe.wav").endswith("pipe.wav is not a file; hand in a WAV file")
    path.touch()
    assert "is empty; hand in a WAV file" in complaint(path)
    path.write_bytes(b"To whom it may concern. " * 100)
    assert complaint(path).endswith(
        "is not a WAV file. Convert it: ffmpeg -i x.wav -ar 24000 -ac 1 x-24k.wav"
    )
    path.write_bytes(b"RIFF" + bytes(1000))
    assert "is broken or cut off before its audio" in complaint(path)
    soundfile.write(path, np.zeros(0, np.float32), 8_000, format="WAV")
    assert "has 0 samples; hand in a WAV file" in complaint(path)
    soundfile.write(path, tone(100, 8_000), 8_000)
    path.write_bytes(path.read_bytes()[:30])
    assert "is broken or cut off before its audio" in complaint(path)
    soundfile.write(path, tone(1_000, 1_000), 1_000)
    assert "has 1000 samples a second, which is outside" in complaint(path)
    soundfile.write(path, tone(1_000, 8_000), 8_000, format="FLAC")
    assert "is FLAC, not a WAV file. Convert it:" in complaint(path)


def test_sixteen_bits_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    values = np.arange(-32768, 32768, dtype=np.int16)
    with WavWriter(path, 24_000) as writer:
        for part in np.array_split(values, 7):
            writer.write(part.astype(np.float32) / np.float32(32768))
    got, rate_hz = soundfile.read(path, dtype="int16")
    assert rate_hz == 24_000
    assert (got == values).all()
    assert (writer.samples, writer.clipped_samples) == (65_536, 0)


def test_clipping_is_counted(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "loud.wav", 24_000) as writer:
        writer.write(np.array([1.0, -1.0, 1.1, -1.1, np.nan, np.inf, 0.0], np.float32))
    got, _ = soundfile.read(writer.path, dtype="int16")
    assert got.tolist() == [32767, -32768, 32767, -32768, 0, 32767, 0]
    assert writer.clipped_samples == 4


def test_two_channels_keep_their_places(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "two.wav", 24_000, channels=2) as writer:
        writer.write(np.array([[0.5, -0.5], [0.25, 0.0]], np.float32))
    got, _ = soundfile.read(writer.path)
    assert got.tolist() == [[0.5, -0.5], [0.25, 0.0]]
    assert writer.samples == 2


def test_a_path_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(WavError, match="cannot be written: No such file"):
        WavWriter(tmp_path / "missing" / "out.wav", 24_000)
    with pytest.raises(WavError, match="full cannot be written: No space left on device"):
        WavWriter(Path("/dev/full"), 24_000)


KILLED = """
import sys
import tracemalloc
from pathlib import Path
import numpy as np
from appliance.lines.wav import WavWriter
writer = WavWriter(Path(sys.argv[1]), 24000)
for _ in range(40):
    writer.write(np.full(1920, 0.25, np.float32))
print("written", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_killed_writer_wrote_can_be_played(tmp_path: Path) -> None:
    path = tmp_path / "killed.wav"
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=10)
    got, _ = read_all(path)
    # 3.2 s were written; all but the last, unfinished second must be there.
    assert 40 * 1920 - 24_000 < got.size <= 40 * 1920
    assert (got == 0.25).all()


@pytest.mark.slow
def test_an_hour_is_never_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "hour.wav"
    minute = np.zeros(60 * 8_000, np.float32)
    with WavWriter(path, 8_000) as writer:
        for _ in range(60):
            writer.write(minute)
    tracemalloc.start()
    samples = 0
    with WavReader(path) as reader:
        while size := reader.read(8_000).size:
            samples += size
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert samples == 3600 * 8_000
    assert peak_bytes < 4_000_000  # of 57,600,000
