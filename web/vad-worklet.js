// Tells speech from the quiet before it by its energy. Runs beside the microphone; loaded by microphone.js.

const FRAME = 480; // samples: 10 ms at 48 kHz
const LOUDER = 4; // than the room, in amplitude (12 dB)
const LEAST_RMS = 0.008; // -42 dBFS: quieter is nobody who wants to interrupt
const ONSET_FRAMES = 8; // of the last
const OF_FRAMES = 12;
const QUIET_FRAMES = 40; // in a row end it

class Vad extends AudioWorkletProcessor {
  #sum = 0;
  #count = 0;
  #room = 0.002; // the quiet's RMS: falls at once, rises slowly
  #loud = [];
  #quiet = 0;
  #speaking = false;

  process(inputs) {
    for (const sample of inputs[0][0] ?? []) {
      this.#sum += sample * sample;
      if (++this.#count < FRAME) continue;
      this.#frame(Math.sqrt(this.#sum / FRAME));
      this.#sum = this.#count = 0;
    }
    return true;
  }

  /** @param {number} rms of 10 ms */
  #frame(rms) {
    const loud = rms > Math.max(LEAST_RMS, LOUDER * this.#room);
    this.#room = rms < this.#room ? 0.8 * this.#room + 0.2 * rms : this.#room * (loud ? 1.001 : 1.02) + 1e-6;
    this.#loud.push(loud);
    if (this.#loud.length > OF_FRAMES) this.#loud.shift();
    this.#quiet = loud ? 0 : this.#quiet + 1;
    const speaking = this.#speaking ? this.#quiet < QUIET_FRAMES : this.#loud.filter(Boolean).length >= ONSET_FRAMES;
    this.port.postMessage({ rms, changed: speaking !== this.#speaking, speaking });
    this.#speaking = speaking;
  }
}

registerProcessor("vivavoce-vad", Vad);
