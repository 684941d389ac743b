// Holds back what is typed until it makes a clause. The model cannot wait in the middle of a sentence: fed letter by letter at the
// speed of a hand it runs out of text after a few words and has to end there, with the voice of an end.

const PAUSE_MS = 700; // behind a word
const WORD_PAUSE_MS = 1200; // where the word may go on
const SPEECH_MS = 60; // a letter's time, of a voice in a hurry: who writes faster than that needs no holding
const KNOWN_AFTER = 4; // letters
const LEAST_LETTERS = 10; // a clause shorter than this waits for the next one
const WORD_END = /[\s\p{P}\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]$/u;
const CLAUSE_END = /[.!?…,;:)\]"”»]\s+$|[–—]\s*$|[。、，！？；：]$/u;

/** Takes letters, gives clauses. */
export class Holder {
  /** Text to be sent. `complete`: the voice need not wait for more of it. @type {(text: string, complete: boolean) => void} */
  onclause = () => {};
  /** Text that was sent as it came has come to a pause. */
  onpause = () => {};

  #held = "";
  #letterMs = NaN; // the hand's own speed, a running mean
  #letters = 0;
  #lastAt = -Infinity;
  #timer = 0;

  /** What has been typed and not been sent. */
  get held() {
    return this.#held;
  }

  /** @param {string} text @param {number} [now] milliseconds */
  type(text, now = performance.now()) {
    this.#held += text;
    this.#measure(text, now);
    clearTimeout(this.#timer);
    if (text.length > 1 && /\s/.test(text.trim())) return this.#pass(); // pasted, dictated: it is there already
    if (this.#letters >= KNOWN_AFTER && this.#letterMs < SPEECH_MS) return this.#pass();
    if (CLAUSE_END.test(this.#held) && this.#held.replace(/\s/g, "").length >= LEAST_LETTERS) return this.release(true);
    this.#timer = setTimeout(() => this.release(true), WORD_END.test(this.#held) ? PAUSE_MS : WORD_PAUSE_MS);
  }

  /** Sends what is held. @param {boolean} complete */
  release(complete) {
    clearTimeout(this.#timer);
    const text = this.#held;
    this.#held = "";
    if (text) this.onclause(text, complete);
  }

  #pass() {
    this.release(false);
    this.#timer = setTimeout(() => this.onpause(), PAUSE_MS);
  }

  /** Forgets what is held. */
  clear() {
    clearTimeout(this.#timer);
    this.#held = "";
    this.#letters = 0;
  }

  /** @param {string} text @param {number} now */
  #measure(text, now) {
    const gap = now - this.#lastAt;
    this.#lastAt = now;
    if (gap > PAUSE_MS) this.#letters = 0; // a pause says nothing about speed
    else this.#letterMs = this.#letters > 1 ? 0.8 * this.#letterMs + 0.2 * (gap / text.length) : gap / text.length;
    this.#letters += text.length;
  }
}
