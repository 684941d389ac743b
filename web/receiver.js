// What the browser's receiver says of itself, as figures a person can read.

/** @typedef {{bufferMs: number | null, underruns: number}} Reading since the reading before */

/** Turns its running counters into readings. */
export class Receiver {
  /** @type {any} */
  #before = null;

  /** @param {any} counters inbound-rtp's, see Session.stats @returns {Reading} */
  read(counters) {
    const before = this.#before ?? counters;
    this.#before = counters;
    if (!counters) return { bufferMs: null, underruns: 0 };
    const since = (name) => (counters[name] ?? 0) - (before[name] ?? 0);
    const emitted = since("jitterBufferEmittedCount");
    return {
      bufferMs: emitted > 0 ? (since("jitterBufferDelay") / emitted) * 1000 : null,
      underruns: since("concealedSamples") > since("silentConcealedSamples") ? since("concealmentEvents") : 0,
    };
  }
}
