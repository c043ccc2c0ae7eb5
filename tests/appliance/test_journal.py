"""A line's journal: written, read back, torn, and refused when it is none."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance import journal
from appliance.frame_ring import DownlinkHeader, UplinkHeader
from appliance.journal import Head, Heard, JournalError, JournalWriter, checksum

HEAD = Head(7, 7, 1000, "echo", 8, 100, {"seed": 3.0})


def pcm(value: float) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.full(8, value, np.float32)


def write(path: Path, frames: int = 3) -> Path:
    writer = JournalWriter(path, HEAD)
    for n in range(frames):
        writer.said(UplinkHeader(2 * n, 0, n), pcm(n))
        writer.heard(DownlinkHeader(7, 7, n, 50 + n, 0, 0, n, 1, 2 * n), pcm(-n))
    writer.close()
    writer.close()
    assert writer.trouble == ""
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    found = journal.read(write(tmp_path / "x.journal"))
    assert (found.head, found.dropped_bytes) == (HEAD, 0)
    assert [(s.index, s.flags, s.pcm.tolist()) for s in found.said] == [
        (2 * n, 0, [float(n)] * 8) for n in range(3)
    ]
    assert found.heard[2] == Heard(2, 52, 1, 2, 4, checksum(pcm(-2)))


@given(cut=st.integers(1, 400))
def test_a_torn_tail_is_dropped(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = write(tmp_path_factory.mktemp("torn") / "x.journal", frames=5)
    raw = path.read_bytes()
    path.write_bytes(raw[:-cut])
    found = journal.read(path)
    entries = len(found.said) + len(found.heard)
    assert [s.index for s in found.said] == [2 * n for n in range(len(found.said))]
    assert entries < 10
    assert len(found.said) - len(found.heard) in (0, 1)


def test_a_garbled_entry_ends_what_is_believed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.journal")
    raw = bytearray(path.read_bytes())
    raw[-60] ^= 1  # within the second of three frames that came back, or the third said
    path.write_bytes(raw)
    found = journal.read(path)
    assert found.dropped_bytes > 0
    assert len(found.said) + len(found.heard) < 6


@pytest.mark.parametrize("raw", [b"", b"RIFF....WAVE", journal.MAGIC, journal.MAGIC + bytes(9)])
def test_what_is_no_journal_is_said_in_a_line(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(JournalError, match="x"):
        journal.read(tmp_path / "x")


def test_a_disk_that_refuses_ends_the_journal_and_not_the_call() -> None:
    writer = JournalWriter(Path("/dev/full"), HEAD)
    for n in range(5000):
        writer.said(UplinkHeader(n, 0, 0), pcm(0))
    writer.close()
    assert "/dev/full cannot be written: No space left" in writer.trouble


def test_a_folder_that_is_not_there_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be written"):
        JournalWriter(tmp_path / "none" / "x.journal", HEAD)
