// The two ends of a call's sound, on the audio thread: blocks out of the microphone, and playout
// of what comes when a network likes. Both may have another rate than the sound card.

/** Samples of one rate at another, a little faster or slower when asked: windowed sinc. */
class Resample {
  constructor(ratio) { // input samples per output sample
    this.half = 12;
    this.cut = Math.min(1, 1 / ratio) * 0.94;
    this.ratio = ratio;
    this.input = new Float32Array(0);
    this.at = 0;
    this.plain = ratio === 1;
    this.reach = Math.ceil(this.half / this.cut);
    this.table = new Float32Array(this.half * 128 + 2);
    for (let i = 0; i < this.table.length; i++) {
      const x = i / 128, t = x / this.half;
      const window = t >= 1 ? 0 : 0.42 + 0.5 * Math.cos(Math.PI * t) + 0.08 * Math.cos(2 * Math.PI * t);
      this.table[i] = (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x)) * window * this.cut;
    }
  }
  push(samples) {
    const joined = new Float32Array(this.input.length + samples.length);
    joined.set(this.input);
    joined.set(samples, this.input.length);
    this.input = joined;
  }
  /** How many input samples are not used up. */
  get left() { return this.input.length - this.at; }
  get ready() { return this.at + this.reach + 1 < this.input.length; }
  next(ratio) {
    const center = this.at, first = Math.max(0, Math.ceil(center - this.reach));
    const last = Math.min(this.input.length - 1, Math.floor(center + this.reach));
    let sum = 0;
    for (let i = first; i <= last; i++) {
      const x = Math.abs(i - center) * this.cut * 128, j = x | 0;
      if (j < this.table.length - 1) {
        sum += this.input[i] * (this.table[j] + (x - j) * (this.table[j + 1] - this.table[j]));
      }
    }
    this.at += ratio;
    if (this.at > 4096) {
      const drop = Math.floor(this.at) - this.reach - 1;
      this.input = this.input.slice(drop);
      this.at -= drop;
    }
    return sum;
  }
}

/** Ms that playout holds back at least: what a page's own threads are late by now and then. */
const LEAST_SPARE = 20;

const level = (samples) => {
  let peak = 0;
  for (const s of samples) if (Math.abs(s) > peak) peak = Math.abs(s);
  return peak;
};

/** Posts {block, peak}: blocks of so many samples at the call's rate. */
class Microphone extends AudioWorkletProcessor {
  constructor(options) {
    super();
    const { rate, block } = options.processorOptions;
    this.resample = rate === sampleRate ? null : new Resample(sampleRate / rate);
    this.block = new Float32Array(block);
    this.filled = 0;
  }
  process([input]) {
    const heard = input[0];
    if (!heard) return true;
    if (!this.resample) for (const s of heard) this.put(s);
    else {
      this.resample.push(heard);
      while (this.resample.ready) this.put(this.resample.next(this.resample.ratio));
    }
    return true;
  }
  put(sample) {
    this.block[this.filled++] = sample;
    if (this.filled === this.block.length) {
      const block = this.block;
      this.block = new Float32Array(block.length);
      this.filled = 0;
      this.port.postMessage({ block, peak: level(block) }, [block.buffer]);
    }
  }
}

/** Plays what it is posted. What is held back is steered by playing up to 0.6 % faster or slower,
 *  so that in the worst of the last seconds `spare` ms were left when more came. */
class Playout extends AudioWorkletProcessor {
  constructor(options) {
    super();
    this.rate = options.processorOptions.rate;
    this.base = this.rate / sampleRate;
    this.resample = new Resample(this.base);
    this.spare = LEAST_SPARE;
    this.playing = false;
    this.startAt = 0; // currentTime from which the first samples are played
    this.lefts = [];
    this.pull = this.came = 0;
    this.dry = this.cuts = this.peak = this.ticks = this.got = 0;
    this.calm = 0;
    this.port.onmessage = ({ data }) => (data === "stop" ? this.stop() : this.arrive(data));
  }
  stop() {
    this.playing = false;
    this.resample = new Resample(this.base);
    this.lefts = [];
    this.startAt = 0;
  }
  get heldMs() { return (Math.max(0, this.resample.left) / this.rate) * 1000; }
  arrive(samples) {
    const held = this.heldMs;
    if (this.playing) {
      // What was left before would be so much less now, because of how fast it was played.
      const gone = this.pull * (currentTime - this.came) * 1000;
      this.lefts = [...this.lefts.slice(-63).map((left) => left - gone), held];
      const error = Math.min(...this.lefts) - this.spare;
      this.pull = Math.max(-0.006, Math.min(0.006, error * 0.0004));
      if (this.lefts.length > 8 && error > 250) { // a stall left far too much behind
        this.resample.at += ((error - 20) / 1000) * this.rate;
        this.lefts = [];
        this.cuts++;
      }
      if (++this.calm > 250 && this.spare > LEAST_SPARE) { this.spare -= 1; this.calm = 0; }
    } else if (!this.startAt) this.startAt = currentTime + this.spare / 1000;
    this.resample.push(samples);
    this.came = currentTime;
    this.got++;
  }
  process(_, [output]) {
    const out = output[0];
    if (!this.playing && this.startAt && currentTime >= this.startAt) this.playing = true;
    let at = 0;
    if (this.playing) {
      while (at < out.length && this.resample.ready) {
        out[at++] = this.resample.next(this.base * (1 + this.pull));
      }
      if (at < out.length && this.got) { // ran dry: begin again, with more to spare
        this.dry++;
        this.playing = false;
        this.startAt = 0;
        this.spare = Math.min(120, this.spare + 10);
        this.calm = 0;
        this.lefts = [];
      }
    }
    this.peak = Math.max(this.peak, level(out));
    if (++this.ticks % 16 === 0) {
      const held = this.lefts.length ? Math.min(...this.lefts) : 0;
      this.port.postMessage({ peak: this.peak, dry: this.dry, cuts: this.cuts, held, got: this.got,
        pull: this.pull, spare: this.spare });
      this.peak = 0;
    }
    return true;
  }
}

registerProcessor("microphone", Microphone);
registerProcessor("playout", Playout);
