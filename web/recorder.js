// Keeps what a listener heard and gives it back as a WAV file.

/** Collects a tap's blocks as 16-bit mono, the latest `limitS` seconds. */
export class Recorder {
  #limitS;
  /** @type {Int16Array[]} */
  #blocks = [];
  #samples = 0;
  #rate = 48000;

  /** @param {number} limitS */
  constructor(limitS = 600) {
    this.#limitS = limitS;
  }

  /** Seconds kept. */
  get seconds() {
    return this.#samples / this.#rate;
  }

  clear() {
    this.#blocks = [];
    this.#samples = 0;
  }

  /** @param {import("./tap.js").Block} block */
  add({ samples, rate }) {
    this.#rate = rate;
    this.#blocks.push(Int16Array.from(samples, (x) => Math.max(-32768, Math.min(32767, Math.round(x * 32767)))));
    this.#samples += samples.length;
    while (this.#samples > this.#limitS * rate) this.#samples -= this.#blocks.shift().length;
  }

  /** The recording as a WAV file. @returns {Blob} */
  wav() {
    const bytes = this.#samples * 2;
    const header = new DataView(new ArrayBuffer(44));
    const text = (at, letters) => [...letters].forEach((letter, i) => header.setUint8(at + i, letter.charCodeAt(0)));
    text(0, "RIFF");
    header.setUint32(4, 36 + bytes, true);
    text(8, "WAVEfmt ");
    header.setUint32(16, 16, true);
    header.setUint16(20, 1, true); // PCM
    header.setUint16(22, 1, true); // mono
    header.setUint32(24, this.#rate, true);
    header.setUint32(28, this.#rate * 2, true);
    header.setUint16(32, 2, true);
    header.setUint16(34, 16, true);
    text(36, "data");
    header.setUint32(40, bytes, true);
    return new Blob([header, ...this.#blocks], { type: "audio/wav" });
  }
}
