// What has been said, as it is heard: a row for each utterance, newest first, with its figures and its picture.

import { endOfLetters, lettersIn } from "./letters.js";
import { Picture } from "./picture.js";
import { seconds } from "./trace.js";

const MOST_ROWS = 60;

/** @typedef {import("./trace.js").Trace} Trace */

/** The list of utterances, and on top what none has begun to say. */
export class Captions {
  #list;
  /** @type {HTMLLIElement | null} */
  #pending = null;
  /** By what they show; text of which nothing is spoken has no picture. @type {Map<Trace | symbol, {item: HTMLLIElement, picture?: Picture}>} */
  #rows = new Map();

  /** @param {HTMLOListElement} list */
  constructor(list) {
    this.#list = list;
    new ResizeObserver(() => this.#rows.forEach(({ picture }) => picture?.draw())).observe(list);
  }

  /** Text that was sent and that no utterance has begun to say. @param {string} text */
  pending(text) {
    if (!text.trim()) {
      this.#pending?.remove();
      this.#pending = null;
    } else {
      this.#pending ??= this.#newRow();
      paint(this.#pending, "pending", "", text, "Sent");
    }
  }

  /** Text that is done without a sound. @param {string} text */
  empty(text) {
    const item = this.#taken();
    paint(item, "empty", "", text, "Nothing to speak in it");
    this.#keep(Symbol(), { item });
  }

  /** @param {Trace} trace */
  show(trace) {
    const { utterance } = trace;
    const { item, picture } = this.#row(trace);
    const said = endOfLetters(utterance.text, lettersIn(utterance.spokenText));
    paint(item, utterance.state, utterance.text.slice(0, said), utterance.text.slice(said), facts(trace));
    picture.draw();
  }

  /** @param {Trace} trace */
  #row(trace) {
    let row = this.#rows.get(trace);
    if (!row) {
      const item = this.#taken();
      const picture = new Picture(trace);
      item.append(picture.element);
      row = { item, picture };
      this.#keep(trace, row);
    }
    return row;
  }

  /** The row of what waited, for what has become of it. */
  #taken() {
    const item = this.#pending ?? this.#newRow();
    this.#pending = null;
    return item;
  }

  #newRow() {
    const item = document.createElement("li");
    item.append(document.createElement("p"), document.createElement("small"));
    this.#list.prepend(item);
    return item;
  }

  /** As many as MOST_ROWS. @param {Trace | symbol} what @param {{item: HTMLLIElement, picture?: Picture}} row */
  #keep(what, row) {
    this.#rows.set(what, row);
    if (this.#rows.size <= MOST_ROWS) return;
    const [oldest, { item }] = this.#rows.entries().next().value;
    item.remove();
    this.#rows.delete(oldest);
  }
}

/** @param {Trace} trace */
function facts({ utterance, underruns }) {
  const { state, ttfaMs, gatewayTtfaMs, followed, durationMs, heardMs, broken } = utterance;
  const said = [];
  if (state === "speaking") said.push("Speaking");
  if (state === "done") said.push(broken ? `Broken off after ${seconds(durationMs)}` : `${seconds(durationMs)} long`);
  if (state === "cancelled") said.push(`Stopped, heard ${seconds(heardMs)}`);
  if (followed) said.push("followed the one before");
  else if (ttfaMs !== null) said.push(`first sound after ${Math.round(ttfaMs)} ms (gateway ${Math.round(gatewayTtfaMs)} ms)`);
  if (underruns) said.push(underruns === 1 ? "1 underrun" : `${underruns} underruns`);
  return said.join(" · ");
}

/** @param {HTMLLIElement} item @param {string} state @param {string} said @param {string} unsaid @param {string} facts */
function paint(item, state, said, unsaid, facts) {
  item.dataset.state = state;
  const [mark, rest] = [document.createElement("mark"), document.createElement("span")];
  mark.textContent = said;
  rest.textContent = unsaid;
  item.children[0].replaceChildren(mark, rest);
  item.children[1].textContent = facts;
}
