// Ogg pages of one Opus stream, written and read (RFC 3533, RFC 7845).

const CRC = new Uint32Array(256).map((_, i) => {
  let r = i << 24;
  for (let bit = 0; bit < 8; bit++) r = r & 0x80000000 ? (r << 1) ^ 0x04c11db7 : r << 1;
  return r >>> 0;
});

const ascii = (text) => Uint8Array.from(text, (c) => c.charCodeAt(0));

/** Packets -> pages. The first page() begins with the stream's two header pages. */
export class OggWriter {
  #sequence = 0;
  #granule = 0n;
  #serial = crypto.getRandomValues(new Uint32Array(1))[0];

  /** packet: Uint8Array; samples: what it holds at 48 kHz. */
  page(packet, samples) {
    const pages = [];
    if (this.#sequence === 0) {
      const head = new Uint8Array(19);
      head.set(ascii("OpusHead"));
      head[8] = 1; // version
      head[9] = 1; // channels
      new DataView(head.buffer).setUint16(10, 312, true); // pre-skip: the encoder's lookahead
      new DataView(head.buffer).setUint32(12, 48000, true);
      const tags = new Uint8Array(8 + 4 + 9 + 4);
      tags.set(ascii("OpusTags"));
      tags[8] = 9;
      tags.set(ascii("duplexbox"), 12);
      pages.push(this.#one(head, 2), this.#one(tags, 0));
    }
    this.#granule += BigInt(samples);
    pages.push(this.#one(packet, 0));
    const whole = new Uint8Array(pages.reduce((n, p) => n + p.length, 0));
    let at = 0;
    for (const p of pages) { whole.set(p, at); at += p.length; }
    return whole;
  }

  #one(packet, flags) {
    const lacing = Math.floor(packet.length / 255) + 1;
    const page = new Uint8Array(27 + lacing + packet.length);
    const view = new DataView(page.buffer);
    page.set(ascii("OggS"));
    page[5] = flags;
    view.setBigUint64(6, this.#granule, true);
    view.setUint32(14, this.#serial, true);
    view.setUint32(18, this.#sequence++, true);
    page[26] = lacing;
    page.fill(255, 27, 27 + lacing - 1);
    page[27 + lacing - 1] = packet.length % 255;
    page.set(packet, 27 + lacing);
    let crc = 0;
    for (const byte of page) crc = ((crc << 8) ^ CRC[(crc >>> 24) ^ byte]) >>> 0;
    view.setUint32(22, crc, true);
    return page;
  }
}

/** Whole pages -> packets of audio; what is no page is passed over. */
export function packetsOf(bytes) {
  const packets = [];
  let at = 0;
  while (at + 27 <= bytes.length) {
    if (bytes[at] !== 79 || bytes[at + 1] !== 103 || bytes[at + 2] !== 103 || bytes[at + 3] !== 83) {
      at++;
      continue;
    }
    const segments = bytes[at + 26];
    let start = at + 27 + segments, end = start;
    for (let i = 0; i < segments; i++) {
      const size = bytes[at + 27 + i];
      end += size;
      if (size < 255) {
        const packet = bytes.subarray(start, end);
        const isHeader = packet.length >= 8 && packet[0] === 79 && packet[1] === 112; // "Op"
        if (packet.length && !isHeader) packets.push(packet);
        start = end;
      }
    }
    at = end;
  }
  return packets;
}
