// Hands every sample that is played to the page's main thread, in blocks. Loaded by tap.js.

const BLOCK = 512; // 11 ms at 48 kHz: four render quanta a message

class Tap extends AudioWorkletProcessor {
  #samples = new Float32Array(BLOCK);
  #filled = 0;

  process(inputs) {
    const quantum = inputs[0][0]; // undefined while the track gives nothing: the zeros of a fresh block stand for it
    if (quantum) this.#samples.set(quantum, this.#filled);
    this.#filled += 128;
    if (this.#filled === BLOCK) {
      this.port.postMessage({ frame: currentFrame + 128 - BLOCK, samples: this.#samples }, [this.#samples.buffer]);
      this.#samples = new Float32Array(BLOCK);
      this.#filled = 0;
    }
    return true;
  }
}

registerProcessor("vivavoce-tap", Tap);
