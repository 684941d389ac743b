// A language model as the author: its deltas go to be spoken as they come. It can be stopped in mid-sentence, and is told how much
// of its answer was heard.

import { chat, simulate } from "./llm.js";

const INSTRUCTIONS = "Your answers are spoken aloud while you write them. Answer in a few short sentences of plain text, without lists or code.";
const REMEMBERED = 20; // messages

/** Writes one text at a time. */
export class Author {
  /** @type {() => void} it begins or ends */
  onchange = () => {};
  /** @type {(delta: string) => void} */
  ontext = () => {};
  /** It has written all it wanted to. @type {() => void} */
  oncomplete = () => {};

  /** @type {AbortController | null} */
  #writing = null;
  /** The conversation so far. @type {{role: string, content: string}[]} */
  #messages = [{ role: "system", content: INSTRUCTIONS }];
  /** What is being said, if it is an answer. @type {{role: string, content: string} | null} */
  #answer = null;

  get writing() {
    return this.#writing !== null;
  }

  /** @param {string} text @param {{tokensPerSecond: number, pauseS: number}} speed */
  pretend(text, speed) {
    this.#answer = null;
    return this.#write((signal) => simulate(text, { ...speed, signal }));
  }

  /** @param {string} question @param {{base: string, model: string, key: string}} api @throws {import("./errors.js").VivavoceError} */
  async answer(question, api) {
    const [instructions, ...before] = this.#messages;
    const asked = [instructions, ...before.slice(-REMEMBERED), { role: "user", content: question }];
    this.stop();
    const answer = (this.#answer = { role: "assistant", content: "" });
    this.#messages = [...asked, answer];
    try {
      await this.#write((signal) => chat({ ...api, messages: asked, signal }), (delta) => (answer.content += delta));
    } finally {
      if (!answer.content && this.#messages.at(-1) === answer) this.#messages = asked.slice(0, -1); // as if never asked
    }
  }

  stop() {
    this.#writing?.abort();
    this.#writing = null;
    this.onchange();
  }

  /** The latest answer was broken into: the model is to know of it what its listener knows. @param {string} heard */
  interrupted(heard) {
    if (this.#answer) this.#answer.content = heard ? `${heard} …` : "…";
  }

  /** @param {(signal: AbortSignal) => AsyncIterable<string>} deltas @param {(delta: string) => void} [note] */
  async #write(deltas, note = () => {}) {
    this.stop();
    const mine = (this.#writing = new AbortController());
    this.onchange();
    try {
      for await (const delta of deltas(mine.signal)) {
        if (this.#writing !== mine) return;
        note(delta);
        this.ontext(delta);
      }
      if (this.#writing === mine) this.oncomplete();
    } finally {
      if (this.#writing === mine) this.stop();
    }
  }
}
