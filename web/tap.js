// Listens to a MediaStream sample by sample: its level, the moment a sound sets in, and the samples themselves.

const QUANTUM = 128;
const AUDIBLE_RMS = 0.004; // -48 dBFS over 2.7 ms
const OFFSET_MS = 3000;
const QUIET_MS = 250; // a sound after this much quiet is a new onset

/**
 * @typedef {object} Block
 * @property {number} frame       position of the first sample on the context's clock
 * @property {Float32Array} samples mono
 * @property {number} rate        samples a second
 */

/** An audio tap. It hears what is played: a muted track is silent here too. Times are `performance.now()` milliseconds. */
export class Tap {
  /** Loudness of the latest block, RMS from 0 to 1. */
  level = 0;
  /** When the latest sound after a quiet stretch set in, or -Infinity. */
  onsetAt = -Infinity;
  /** When the latest audible sample passed, or -Infinity. */
  audibleAt = -Infinity;
  /** When the latest sample of any kind passed, or -Infinity. */
  heardAt = -Infinity;
  /** @type {(block: Block) => void} */
  onblock = () => {};
  /** @type {() => void} a sound has set in, at `onsetAt` */
  ononset = () => {};

  #context;
  #module;
  /** @type {AudioNode | null} */
  #source = null;
  #clockOffset = Infinity; // performance.now() minus context time, from the promptest message of the last seconds
  #offsets = { since: -Infinity, now: Infinity, before: Infinity };

  /** Call it inside a click, or the browser keeps the context suspended until `resume` is called in one. */
  constructor() {
    this.#context = new AudioContext({ sampleRate: 48000 });
    this.#module = this.#context.audioWorklet.addModule(new URL("./tap-worklet.js", import.meta.url));
    this.#module.catch(() => {}); // reported by attach()
  }

  /** Hears this stream from now on, and no other. @param {MediaStream} stream */
  async attach(stream) {
    await this.#module;
    this.#source?.disconnect();
    const node = new AudioWorkletNode(this.#context, "vivavoce-tap", {
      numberOfInputs: 1,
      numberOfOutputs: 0,
      channelCount: 1,
      channelCountMode: "explicit",
    });
    const source = (this.#source = this.#context.createMediaStreamSource(stream));
    node.port.onmessage = ({ data }) => this.#source === source && this.#hear(data.frame, data.samples);
    source.connect(node);
  }

  /** The next audible sample is an onset, however short the quiet before it. */
  rearm() {
    this.audibleAt = -Infinity;
  }

  resume() {
    return this.#context.resume();
  }

  close() {
    this.onblock = this.ononset = () => {};
    return this.#context.close();
  }

  /** A context that was late stays behind, so a prompt message of before tells nothing any more. @param {number} now @param {number} endMs */
  #promptest(now, endMs) {
    const offsets = this.#offsets;
    if (now - offsets.since > OFFSET_MS) this.#offsets = { since: now, now: now - endMs, before: offsets.now };
    else offsets.now = Math.min(offsets.now, now - endMs);
    return Math.min(this.#offsets.now, this.#offsets.before);
  }

  /** @param {number} frame @param {Float32Array} samples */
  #hear(frame, samples) {
    const rate = this.#context.sampleRate;
    const endMs = ((frame + samples.length) / rate) * 1000;
    this.#clockOffset = this.#promptest(performance.now(), endMs);
    this.heardAt = this.#clockOffset + endMs;
    let energy = 0;
    let onset = false;
    for (let start = 0; start < samples.length; start += QUANTUM) {
      let sum = 0;
      for (let i = start; i < start + QUANTUM; i++) sum += samples[i] * samples[i];
      energy += sum;
      if (sum < AUDIBLE_RMS * AUDIBLE_RMS * QUANTUM) continue;
      const at = this.#clockOffset + ((frame + start) / rate) * 1000;
      if (at - this.audibleAt > QUIET_MS) {
        this.onsetAt = at;
        onset = true;
      }
      this.audibleAt = at;
    }
    this.level = Math.sqrt(energy / samples.length);
    this.onblock({ frame, samples, rate });
    if (onset) this.ononset();
  }
}
