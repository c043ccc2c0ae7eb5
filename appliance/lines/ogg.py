"""Ogg pages of an Opus stream out of bytes from a stranger. Pure.

Decides what is a page that may reach the decoder, and how much audio it claims to hold. A decoder
given bytes that are no page stays broken for ever, and a packet of two bytes can claim 120 ms of
audio, so both are settled here, before anything is decoded. Does not know Opus beyond a packet's
first two bytes (RFC 6716 §3.1, §3.2), and does not look at checksums: TCP has its own.

    page    "OggS" 0 flags granule(8) serial(4) sequence(4) crc(4) n  lacing[n]  body   (RFC 3533)

Passed on: pages of whole audio packets. Dropped and counted: bytes outside of pages, packets that
go on over a page's end (voice never does; they are how a stranger makes a reader collect bytes
without end), packets that cannot be Opus. Header pages are looked at and dropped, because a
stream may be joined without them.
"""

from dataclasses import dataclass

CAPTURE = b"OggS"
HEADER_BYTES = 27
LONGEST_PAGE_BYTES = HEADER_BYTES + 255 + 255 * 255
CONTINUED = 0x01
OPUS_RATE_HZ = 48_000
"""What durations of Opus packets are counted in, whatever was encoded (RFC 7845 §4)."""
LONGEST_PACKET_SAMPLES = 5_760
"""120 ms at 48 kHz: RFC 6716 §3.2.5, requirement R5."""

SILK_SAMPLES = (480, 960, 1920, 2880)
HYBRID_SAMPLES = (480, 960)
CELT_SAMPLES = (120, 240, 480, 960)
"""Samples of one Opus frame at 48 kHz, by the low bits of its configuration (RFC 6716 §3.1)."""


class OggError(ValueError):
    """The stream is one that this line cannot decode; the peer's fault."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of whole audio packets."""

    raw: bytes
    samples: int
    """What its packets claim to hold, at 48 kHz."""


class PageSplitter:
    """Pages out of a stream of bytes, however it is cut. Holds less than one page."""

    def __init__(self) -> None:
        self.junk_bytes = 0
        """Bytes that belonged to no page."""
        self.dropped_pages = 0
        """Pages that are no whole audio packets."""
        self._rest = b""

    def push(self, data: bytes) -> list[Page]:
        """Take the next bytes; return the audio pages that are complete.

        Raises `OggError` for a header that announces what cannot be decoded; the stream may go on.
        """
        buffer = self._rest + data
        pages: list[Page] = []
        at = 0
        refusal = ""
        while True:
            start = buffer.find(CAPTURE, at)
            if start < 0:
                # The capture pattern may have been cut in two.
                keep = max(at, len(buffer) - len(CAPTURE) + 1)
                self.junk_bytes += keep - at
                at = keep
                break
            self.junk_bytes += start - at
            at = start
            end = page_end(buffer, start)
            if end is None:
                break
            if end < 0:
                self.junk_bytes += len(CAPTURE)
                at = start + len(CAPTURE)
                continue
            raw = buffer[start:end]
            at = end
            packets = whole_packets(raw)
            if packets and packets[0].startswith(b"OpusHead"):
                refusal = refusal or head_refusal(packets[0])
            elif packets and packets[0].startswith(b"OpusTags"):
                pass
            elif (samples := page_samples(packets)) is None:
                self.dropped_pages += 1
            else:
                pages.append(Page(raw, samples))
        self._rest = buffer[at:]
        if refusal:
            raise OggError(refusal)
        return pages


def page_end(buffer: bytes, start: int) -> int | None:
    """Where the page at ``start`` ends; None: bytes are missing; -1: it is no page."""
    if len(buffer) > start + 4 and buffer[start + 4] != 0:  # the version
        return -1
    if len(buffer) < start + HEADER_BYTES:
        return None
    segments = buffer[start + HEADER_BYTES - 1]
    body = start + HEADER_BYTES + segments
    if len(buffer) < body:
        return None
    end = body + sum(buffer[start + HEADER_BYTES : body])
    return None if len(buffer) < end else end


def whole_packets(page: bytes) -> list[bytes] | None:
    """Packets of a complete page; None if one began before it or goes on after it."""
    segments = page[HEADER_BYTES - 1]
    lacing = page[HEADER_BYTES : HEADER_BYTES + segments]
    if page[5] & CONTINUED or (lacing and lacing[-1] == 255):
        return None
    packets: list[bytes] = []
    at = begin = HEADER_BYTES + segments
    for size in lacing:
        at += size
        if size < 255:
            packets.append(page[begin:at])
            begin = at
    return packets


def page_samples(packets: list[bytes] | None) -> int | None:
    """What a page's packets hold at 48 kHz; None if one cannot be an Opus packet, or none is."""
    if not packets:
        return None
    total = 0
    for packet in packets:
        samples = packet_samples(packet)
        if samples is None:
            return None
        total += samples
    return total


def packet_samples(packet: bytes) -> int | None:
    """What an Opus packet holds at 48 kHz, by its first bytes; None if it cannot be one."""
    if not packet:
        return None
    config, code = packet[0] >> 3, packet[0] & 3
    if config < 12:
        frame = SILK_SAMPLES[config & 3]
    elif config < 16:
        frame = HYBRID_SAMPLES[config & 1]
    else:
        frame = CELT_SAMPLES[config & 3]
    if code == 3 and len(packet) < 2:
        return None
    frames = (1, 2, 2, packet[1] & 0x3F if code == 3 else 0)[code]
    samples = frame * frames
    return samples if 0 < samples <= LONGEST_PACKET_SAMPLES else None


def head_refusal(packet: bytes) -> str:
    """Why a stream with this OpusHead (RFC 7845 §5.1) cannot be decoded; empty if it can."""
    if len(packet) < 19:
        return f"the Opus header has {len(packet)} bytes; 19 are the least"
    channels, mapping = packet[9], packet[18]
    if mapping != 0 or not 1 <= channels <= 2:
        return f"{channels} channels in mapping {mapping} are no voice; send one channel"
    return ""
