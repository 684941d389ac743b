// What became of one utterance, moment by moment: the data of its picture.

import { lettersIn } from "./letters.js";

/**
 * Times are `performance.now()` milliseconds; null: not known.
 * @typedef {object} Moment
 * @property {number} at
 * @property {number} heardMs          audio that has been heard
 * @property {number | null} sentMs    audio that has reached this listener
 * @property {number | null} madeMs    audio that exists
 * @property {number | null} bufferMs  what the listener's jitter buffer holds
 * @property {number | null} dryAt     when the listener runs out of audio, if no more is made
 */

/** One utterance's course. */
export class Trace {
  /** When its text came, in letters. @type {{at: number, letters: number}[]} */
  text = [];
  /** @type {Moment[]} */
  moments = [];
  /** When its first sample was heard here. @type {number | null} */
  heardAt = null;
  /** @type {number | null} */
  endedAt = null;
  /** How often the receiver had to make up sound while it was being heard. */
  underruns = 0;

  /** @param {import("./vivavoce.js").Utterance} utterance */
  constructor(utterance) {
    this.utterance = utterance;
  }

  /** When it begins in the picture: with its first letter. */
  get startedAt() {
    return this.text[0]?.at ?? this.moments[0]?.at ?? performance.now();
  }

  get last() {
    return this.moments.at(-1);
  }

  /** In words, for those who do not see the picture. */
  get words() {
    const { utterance, moments, underruns } = this;
    const buffers = moments.map(({ bufferMs }) => bufferMs).filter((ms) => ms !== null);
    const wrote = this.text.length > 1 ? `Text came in over ${seconds(this.text.at(-1).at - this.startedAt)}. ` : "";
    const first = utterance.ttfaMs === null ? "" : `First sound after ${Math.round(utterance.ttfaMs)} ms. `;
    const heard = `${seconds(this.last?.heardMs ?? 0)} heard. `;
    const buffer = buffers.length ? `The buffer held ${Math.round(Math.min(...buffers))} to ${Math.round(Math.max(...buffers))} ms. ` : "";
    return wrote + first + heard + buffer + (underruns === 1 ? "1 underrun." : `${underruns || "No"} underruns.`);
  }
}

/** All text that has been sent, so that each utterance's can be found. */
export class TextTimes {
  /** @type {{at: number, letters: number}[]} */
  #pieces = [];
  #letters = 0;

  /** @param {string} text @param {number} at */
  add(text, at) {
    const letters = lettersIn(text);
    if (!letters) return;
    this.#pieces.push({ at, letters });
    this.#letters += letters;
  }

  /** @param {string} text an utterance's @param {string} after what was sent behind it */
  of(text, after) {
    let skip = this.#letters - lettersIn(after) - lettersIn(text);
    let left = lettersIn(text);
    const found = [];
    for (const { at, letters } of this.#pieces) {
      const own = Math.min(letters - Math.min(skip, letters), left);
      skip = Math.max(0, skip - letters);
      if (own > 0) found.push({ at, letters: own });
      left -= own;
    }
    return found;
  }
}

/** @param {number | null} ms */
export const seconds = (ms) => `${((ms ?? 0) / 1000).toFixed(1)} s`;
