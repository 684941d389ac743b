// What a session's listener hears, followed as it is heard: captions, pictures, figures, and the event log.

import { Receiver } from "./receiver.js";
import { seconds, TextTimes, Trace } from "./trace.js";

const READ_EVERY_MS = 200;

/** @typedef {import("./vivavoce.js").Utterance} Utterance */

/** Follows one session after the other. */
export class Heard {
  #captions;
  #journal;
  #figures;
  #legend;
  /** @type {import("./vivavoce.js").Session | null} */
  #session = null;
  /** Of this session's utterances. @type {Map<Utterance, Trace>} */
  #traces = new Map();
  #times = new TextTimes();
  #receiver = new Receiver();
  /** @type {import("./receiver.js").Reading} */
  #reading = { bufferMs: null, underruns: 0 };
  /** What is in hand here, by the gateway's last word. @type {import("./vivavoce.js").SessionEvents["playback"] | null} */
  #inHand = null;
  #underruns = 0;
  /** Of all utterances that followed none, in ms. @type {number[]} */
  #firstSounds = [];

  /** @param {import("./captions.js").Captions} captions @param {import("./journal.js").Journal} journal
   *  @param {HTMLElement} figures @param {HTMLElement} legend of the pictures, hidden while there are none */
  constructor(captions, journal, figures, legend) {
    this.#captions = captions;
    this.#journal = journal;
    this.#figures = figures;
    this.#legend = legend;
    setInterval(() => this.#read(), READ_EVERY_MS);
  }

  /** Before it connects. @param {import("./vivavoce.js").Session} session */
  follow(session) {
    this.#session = session;
    this.#traces = new Map();
    this.#times = new TextTimes();
    this.#receiver = new Receiver();
    this.#inHand = null;
    session.on("text", ({ text }) => this.#captions.pending(text));
    session.on("started", ({ utterance }) => this.#onStarted(utterance));
    session.on("heard", ({ utterance }) => this.#onHeard(utterance));
    session.on("playback", (playback) => (this.#inHand = playback)); // just before progress, and of the same moment
    session.on("progress", ({ utterance }) => this.#onProgress(utterance));
    session.on("done", ({ utterance, reason }) => this.#onDone(utterance, reason));
    session.on("cancelled", ({ utterance }) => this.#onCancelled(utterance));
    session.on("empty", ({ text }) => this.#onEmpty(text));
  }

  /** Text goes out to be spoken. @param {string} text */
  wrote(text) {
    this.#times.add(text, performance.now());
    this.#journal.add("text", JSON.stringify(text));
  }

  /** The text of what is being spoken. */
  get speaking() {
    const speaking = [...this.#traces.keys()].filter(({ state }) => state === "speaking");
    return speaking.map(({ text }) => text).join("");
  }

  /** @param {Utterance} utterance */
  #onStarted(utterance) {
    this.#journal.add("started", `utterance ${utterance.id}, gateway ${Math.round(utterance.gatewayTtfaMs)} ms`);
    const trace = new Trace(utterance);
    this.#traces.set(utterance, trace);
    this.#show(trace);
  }

  /** @param {Utterance} utterance */
  #onHeard(utterance) {
    const trace = this.#traces.get(utterance);
    trace.heardAt = performance.now();
    if (!utterance.followed) this.#firstSounds.push(utterance.ttfaMs);
    this.#journal.add("heard", `utterance ${utterance.id}, first sound after ${Math.round(utterance.ttfaMs)} ms`);
    this.#show(trace);
  }

  /** @param {Utterance} utterance */
  #onProgress(utterance) {
    const trace = this.#traces.get(utterance);
    const at = performance.now();
    const heardMs = utterance.spokenMs;
    const { bufferedMs, dryInMs } = this.#inHand ?? {};
    const further = this.#inHand && { sentMs: heardMs + bufferedMs, madeMs: heardMs + dryInMs, dryAt: at + dryInMs };
    trace.moments.push({ at, heardMs, sentMs: null, madeMs: null, dryAt: null, ...further, bufferMs: this.#reading.bufferMs });
    this.#show(trace);
  }

  /** @param {Utterance} utterance @param {string} reason */
  #onDone(utterance, reason) {
    this.#journal.add("done", `utterance ${utterance.id} (${reason}), ${seconds(utterance.durationMs)}`);
    const trace = this.#traces.get(utterance);
    const unheardMs = utterance.durationMs - (trace.last?.heardMs ?? 0);
    this.#end(trace, (trace.last?.at ?? performance.now()) + Math.max(0, unheardMs), utterance.durationMs);
  }

  /** @param {Utterance} utterance */
  #onCancelled(utterance) {
    const heard = JSON.stringify(utterance.spokenText);
    this.#journal.add("cancelled", `utterance ${utterance.id}, heard ${seconds(utterance.heardMs)}: ${heard}`);
    this.#end(this.#traces.get(utterance), performance.now(), utterance.heardMs);
  }

  /** @param {string} text */
  #onEmpty(text) {
    if (!text.trim()) return;
    this.#journal.add("empty", `nothing to speak in ${JSON.stringify(text)}`);
    this.#captions.empty(text);
  }

  /** It was heard to its end, or will have been in a moment. @param {Trace} trace @param {number} at @param {number} heardMs */
  #end(trace, at, heardMs) {
    trace.moments.push({ at, heardMs, sentMs: heardMs, madeMs: heardMs, bufferMs: 0, dryAt: at });
    trace.endedAt = at;
    this.#show(trace);
  }

  /** @param {Trace} trace */
  #show(trace) {
    const { text, state } = trace.utterance;
    if (state !== "cancelled") trace.text = this.#times.of(text, this.#session.pendingText);
    this.#captions.show(trace);
    this.#legend.hidden = false;
    this.#showFigures();
  }

  async #read() {
    const receiver = this.#receiver;
    if (this.#session?.state !== "ready") return;
    const counters = await this.#session.stats();
    if (receiver !== this.#receiver) return;
    this.#reading = receiver.read(counters);
    const trace = [...this.#traces.values()].find(({ utterance, heardAt }) => utterance.state === "speaking" && heardAt !== null);
    if (!trace) return;
    trace.underruns += this.#reading.underruns;
    this.#underruns += this.#reading.underruns;
    if (this.#reading.underruns) this.#journal.add("underrun", `utterance ${trace.utterance.id}`);
    this.#showFigures();
  }

  #showFigures() {
    const count = this.#firstSounds.length;
    const median = this.#firstSounds.toSorted((a, b) => a - b)[count >> 1];
    const figures = [];
    if (count) figures.push(`First sound after ${Math.round(median)} ms${count > 1 ? ` (median of ${count})` : ""}`);
    figures.push(this.#underruns === 1 ? "1 underrun" : `${this.#underruns || (count ? "no" : "No")} underruns`);
    if (this.#reading.bufferMs !== null) figures.push(`listener’s buffer ${Math.round(this.#reading.bufferMs)} ms`);
    if (this.#inHand) figures.push(`positions ${this.#inHand.measured ? "measured" : "estimated"}`);
    this.#figures.textContent = figures.join(" · ");
  }
}
