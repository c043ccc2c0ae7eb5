// The microphone, the loudspeaker, and the codec between them and the call.
//
// Opus where the browser encodes it (WebCodecs: Chromium, Firefox on a desktop, Safari), else plain
// samples; the box takes both.

import { OggWriter, packetsOf } from "./ogg.js";

const OPUS = {
  codec: "opus", sampleRate: 48000, numberOfChannels: 1, bitrate: 32000,
  opus: { frameDuration: 20000, application: "voip", signal: "voice" },
};

/** "opus" or "pcm": what this browser does well. */
export async function bestCodec() {
  try {
    const sides = await Promise.all([
      AudioEncoder.isConfigSupported(OPUS),
      AudioDecoder.isConfigSupported({ codec: "opus", sampleRate: 48000, numberOfChannels: 1 }),
    ]);
    return sides.every((side) => side.supported) ? "opus" : "pcm";
  } catch {
    return "pcm";
  }
}

/** Samples -> payloads of messages, and back. */
class Opus {
  rate = 48000;
  block = 960;
  #ogg = new OggWriter();
  #time = 0;
  constructor(onSend, onHear, onTrouble) {
    const error = (err) => onTrouble(`the codec failed: ${err.message}`);
    this.encoder = new AudioEncoder({
      output: (chunk) => {
        const packet = new Uint8Array(chunk.byteLength);
        chunk.copyTo(packet);
        onSend(this.#ogg.page(packet, 960));
      },
      error,
    });
    this.encoder.configure(OPUS);
    this.decoder = new AudioDecoder({
      output: (audio) => {
        const samples = new Float32Array(audio.numberOfFrames);
        audio.copyTo(samples, { planeIndex: 0, format: "f32-planar" });
        audio.close();
        onHear(samples);
      },
      error,
    });
    this.decoder.configure({ codec: "opus", sampleRate: 48000, numberOfChannels: 1 });
  }
  say(samples) {
    const data = new AudioData({
      format: "f32-planar", sampleRate: 48000, numberOfFrames: samples.length,
      numberOfChannels: 1, timestamp: this.#time, data: samples,
    });
    this.#time += 20000;
    this.encoder.encode(data);
    data.close();
  }
  hear(payload) {
    for (const data of packetsOf(payload)) {
      this.decoder.decode(new EncodedAudioChunk({ type: "key", timestamp: 0, data }));
    }
  }
  close() {
    for (const side of [this.encoder, this.decoder]) if (side.state !== "closed") side.close();
  }
}

class Pcm {
  rate = 24000;
  block = 240;
  constructor(onSend, onHear) {
    this.onSend = onSend;
    this.onHear = onHear;
  }
  say(samples) {
    const out = new DataView(new ArrayBuffer(samples.length * 2));
    samples.forEach((s, i) => out.setInt16(i * 2, Math.max(-1, Math.min(1, s)) * 32767, true));
    this.onSend(new Uint8Array(out.buffer));
  }
  hear(payload) {
    const view = new DataView(payload.buffer, payload.byteOffset, payload.byteLength);
    const samples = new Float32Array(payload.byteLength >> 1);
    for (let i = 0; i < samples.length; i++) samples[i] = view.getInt16(i * 2, true) / 32768;
    this.onHear(samples);
  }
  close() {}
}

/** Why there is no microphone, in words for the person in front of it. */
export function microphoneTrouble(err) {
  if (!window.isSecureContext) {
    return "Browsers give a page the microphone only over HTTPS or on localhost. Start the line " +
      "with --tls auto and open its https:// address.";
  }
  if (err?.name === "NotAllowedError") return "The microphone was not allowed. Allow it for this page, then talk.";
  if (err?.name === "NotFoundError") return "No microphone was found. Plug one in, then talk.";
  if (err?.name === "NotReadableError") return "Another program holds the microphone. Close it, then talk.";
  if (err?.message === "silent") return "The loudspeaker does not start: this machine seems to have no sound device.";
  return `The microphone cannot be used: ${err?.message ?? err}`;
}

/** One person's ears and mouth, for as many calls as they like. Make it in a click. */
export class Sound {
  muted = false;
  #codec = null;
  constructor({ codec, onSend, onLevel, onTrouble }) {
    Object.assign(this, { codec, onSend, onLevel, onTrouble });
  }

  async open() {
    if (!navigator.mediaDevices?.getUserMedia) throw new Error("insecure");
    this.context = new AudioContext({ latencyHint: "interactive" });
    await Promise.all([
      navigator.mediaDevices.getUserMedia({
        audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
      }).then((stream) => { this.stream = stream; }),
      this.context.audioWorklet.addModule("/page/worklet.js"),
      // Where there is no sound device at all, this is never answered.
      Promise.race([this.context.resume(), new Promise((_, no) => setTimeout(no, 8000, new Error("silent")))]),
    ]);
    const stream = this.stream;
    const kind = this.codec === "opus" ? { rate: 48000, block: 960 } : { rate: 24000, block: 240 };
    this.microphone = new AudioWorkletNode(this.context, "microphone", {
      numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit", processorOptions: kind,
    });
    this.playout = new AudioWorkletNode(this.context, "playout", {
      numberOfInputs: 0, outputChannelCount: [1], processorOptions: kind,
    });
    this.microphone.port.onmessage = ({ data }) => {
      this.onLevel("you", this.muted ? 0 : data.peak);
      if (this.muted) data.block.fill(0); // silence is sent: the model listens all the time
      this.#codec?.say(data.block);
    };
    this.playout.port.onmessage = ({ data }) => this.onLevel("them", data.peak, data);
    this.source = this.context.createMediaStreamSource(stream);
    this.source.connect(this.microphone);
    this.playout.connect(this.context.destination);
    for (const track of stream.getAudioTracks()) {
      track.onended = () => this.onTrouble("The microphone is gone. Plug it in again, then talk.");
    }
  }

  /** The call is live: from now on what is said is sent. */
  begin() {
    this.#codec?.close();
    const hear = (samples) => this.playout.port.postMessage(samples, [samples.buffer]);
    const kind = this.codec === "opus" ? Opus : Pcm;
    this.#codec = new kind(this.onSend, hear, this.onTrouble);
  }
  hear(payload) { this.#codec?.hear(payload); }
  end() {
    this.#codec?.close();
    this.#codec = null;
    this.playout?.port.postMessage("stop");
  }
  close() {
    this.end();
    this.onLevel = () => {}; // what is still on its way would stay on the meters
    this.stream?.getTracks().forEach((track) => { track.onended = null; track.stop(); });
    if (this.context && this.context.state !== "closed") this.context.close();
  }
}
