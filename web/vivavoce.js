// The browser client of a vivavoce gateway: text in while it is being written, speech out over WebRTC.
//
//   import { Session } from "./vivavoce.js";
//   const session = new Session({ voice: "serena" });
//   session.on("heard", ({ utterance }) => console.log(`first sound after ${utterance.ttfaMs} ms`));
//   await session.connect();              // in a click: browsers play sound only after one
//   for await (const delta of llm) session.append(delta);
//   session.end();
//
// A plain ES module: no build step and nothing from elsewhere. Protocol: native, version 1, on /v1/speech, and WHEP.

import { asError, VivavoceError, whyUnreachable } from "./errors.js";
import { Listener } from "./listener.js";
import { Outgoing } from "./outgoing.js";
import { persist } from "./reconnect.js";
import { SentText } from "./sent.js";
import { Tap } from "./tap.js";

export { VivavoceError };

const BROKEN = 1006; // a close that nobody has said
const ONSET_BEFORE_STARTED_MS = 400; // sound and the word of it travel apart; either may be first

/**
 * @typedef {object} SessionOptions
 * @property {string | URL} [gateway]     the gateway's address; default: where the page came from
 * @property {string} [voice]             default: the gateway's
 * @property {string} [language]
 * @property {string} [instructions]      how to speak, in words, for checkpoints that take them
 * @property {HTMLAudioElement | null} [audio] where to play; null: play `session.stream` yourself; default: an element of its own
 * @property {string} [token]             a session token, for a gateway with API keys: its page's server gets one from POST /v1/tokens
 * @property {RTCConfiguration} [rtc]     instead of the ICE servers that the gateway names
 * @property {number} [timeoutMs]         for connecting; default 10000
 *
 * @typedef {object} Utterance
 * @property {number} id
 * @property {"speaking" | "done" | "cancelled"} state
 * @property {string} text                what it says; grows while it is being written
 * @property {number | null} ttfaMs       from the letter that let it begin to its first audible sample here; null: not (yet) known
 * @property {number} gatewayTtfaMs       from the gateway's getting that letter to its first packet
 * @property {boolean} followed           it waited for the utterance before it, so ttfaMs tells nothing about speed
 * @property {number} spokenMs
 * @property {string} spokenText          what has been said so far
 * @property {number | null} durationMs   when done
 * @property {number | null} heardMs      when cancelled
 *
 * @typedef {"idle" | "connecting" | "ready" | "closed"} State
 *
 * @typedef {object} SessionEvents
 * @property {{state: State}} state
 * @property {{text: string}} text              `pendingText` has changed
 * @property {{voice: string | null, language: string, voices: string[], languages: string[]}} updated
 * @property {{utterance: Utterance}} started
 * @property {{utterance: Utterance}} heard     its first audible sample was played here
 * @property {{utterance: Utterance}} progress
 * @property {{bufferedMs: number, dryInMs: number, concealedMs: number, measured: boolean}} playback  what is in hand here; see the protocol
 * @property {{utterance: Utterance, reason: string}} done
 * @property {{utterance: Utterance}} cancelled
 * @property {{text: string}} empty             nothing of this text is to be spoken: emoji, marks or white space alone
 * @property {{what: "text" | "audio"}} reconnecting  the WebSocket or the audio connection has broken; the session goes on meanwhile
 * @property {{what: "text" | "audio"}} reconnected   nothing was lost, and nothing is said twice
 * @property {{error: VivavoceError}} error
 */

/** One conversation with a gateway: one WebSocket for text and events, one WebRTC connection for the speech. */
export class Session extends EventTarget {
  /** The gateway's number for this session. @type {string | undefined} */
  id;
  /** @type {string | null} */ voice = null;
  /** @type {string} */ language = "";
  /** What this gateway's checkpoint can do; filled when connected. @type {string[]} */ voices = [];
  /** @type {string[]} */ languages = [];
  /** @type {Map<number, Utterance>} */ utterances = new Map();
  /** Lets another page or party listen instead: it posts its offer to `whep` with `token`. @type {{whep: string, token: string} | undefined} */
  invitation;
  /** Hears what is played: level, blocks for a recorder. @type {Tap | undefined} */ tap;

  #gateway;
  #wishes;
  #audio;
  #token;
  #rtc;
  #timeoutMs;
  /** @type {State} */ #state = "idle";
  /** @type {WebSocket | undefined} */ #socket;
  /** @type {Listener | undefined} */ #listener;
  #leaving = new AbortController();
  #sent = new SentText();
  /** @type {{utterance: Utterance, startedAt: number} | null} whose first sound is awaited */ #awaited = null;
  /** @type {Utterance | null} */ #speaking = null;
  #lastEndAt = -Infinity;
  #outgoing = new Outgoing();
  #received = 0; // messages, over all sockets
  #current = true; // the gateway has said that it knows all that was sent on earlier sockets
  #resume = "";
  /** @type {RTCIceServer[]} */ #iceServers = [];
  /** @type {PromiseWithResolvers<object> | undefined} */ #created;
  /** @type {PromiseWithResolvers<void> | undefined} */ #updating;
  /** @type {PromiseWithResolvers<void>[]} */ #pings = [];
  #cancelling = 0;

  /** @param {SessionOptions} [options] */
  constructor({ gateway = location.origin, voice, language, instructions, audio = new Audio(), token, rtc, timeoutMs = 10_000 } = {}) {
    super();
    this.#gateway = new URL(gateway, location.href);
    this.#wishes = { voice, language, instructions };
    this.#audio = audio;
    this.#token = token;
    this.#rtc = rtc;
    this.#timeoutMs = timeoutMs;
  }

  get state() {
    return this.#state;
  }

  /** The speech as received, from `connect` on. @returns {MediaStream | undefined} */
  get stream() {
    return this.#listener?.stream;
  }

  /** Text that was sent and that no utterance has begun to say. */
  get pendingText() {
    return this.#sent.text.slice(this.#speaking ? this.#sent.first.length : 0);
  }

  /**
   * Listens for an event; returns a function that stops listening.
   * @template {keyof SessionEvents} Type
   * @param {Type} type
   * @param {(detail: SessionEvents[Type]) => void} callback
   */
  on(type, callback) {
    const listener = (event) => callback(event.detail);
    this.addEventListener(type, listener);
    return () => this.removeEventListener(type, listener);
  }

  /**
   * Opens the session; resolves when text can be sent and speech be heard. A session connects once.
   * @throws {VivavoceError}
   */
  async connect() {
    if (this.#state !== "idle") throw new VivavoceError("closed", "A session connects only once.", { remedy: "Make a new Session." });
    this.#enter("connecting");
    this.tap = new Tap();
    this.tap.resume().catch(() => {});
    this.tap.ononset = () => this.#onOnset();
    const listener = (this.#listener = this.#newListener());
    addEventListener("pagehide", () => this.close(), { signal: this.#leaving.signal });
    const deadline = AbortSignal.any([AbortSignal.timeout(this.#timeoutMs), this.#leaving.signal]);
    try {
      const prepared = listener.prepare();
      prepared.catch(() => {});
      this.#created = Promise.withResolvers();
      this.#updating = Promise.withResolvers();
      this.#updating.promise.catch(() => {});
      await within(deadline, this.#dial());
      this.#send({ type: "session.update", ...this.#wishes, audio: { format: "webrtc" } });
      const { session, token, resume, whep, ice_servers: iceServers = [] } = await within(deadline, this.#created.promise);
      this.id = session;
      this.#resume = resume;
      this.#iceServers = this.#rtc?.iceServers ? [] : iceServers;
      this.invitation = { whep: new URL(whep, this.#gateway).href, token };
      await prepared;
      const updated = within(deadline, this.#updating.promise);
      if (this.#iceServers.length) await listener.useIceServers(this.#iceServers);
      await Promise.all([updated, listener.connect(this.invitation.whep, token, deadline)]);
      await this.tap.attach(listener.stream);
    } catch (cause) {
      const error = asError(cause);
      this.#fail(error, { quiet: true });
      throw error;
    }
    this.#enter("ready");
  }

  /**
   * Changes voice, language or instructions for the utterances to come; resolves when the gateway has taken them.
   * @param {{voice?: string, language?: string, instructions?: string}} wishes
   */
  async update(wishes) {
    this.#updating = Promise.withResolvers();
    this.#send({ type: "session.update", ...wishes });
    await this.#updating.promise;
  }

  /**
   * Sends text, as it comes: a letter, an LLM's delta, a page. `interrupt`: instead of everything before it, as after `cancel`.
   * @param {string} text @param {{interrupt?: boolean}} [options]
   */
  append(text, { interrupt = false } = {}) {
    if (interrupt) this.#silence({ type: "text.append", text, interrupt });
    else if (text) this.#send({ type: "text.append", text });
    else return;
    this.#sent.add(text, performance.now());
    if (this.#speaking) this.#speaking.text = this.#sent.first;
    this.#emit("text", { text: this.pendingText });
  }

  /** Speak what is there at once, without waiting for the sentence to end. */
  flush() {
    this.#send({ type: "text.flush" });
    this.#sent.close();
  }

  /** The text is complete. Text sent later opens another utterance. */
  end() {
    this.#send({ type: "text.end" });
    this.#sent.close();
  }

  /** Barge-in: silence here at once, then at the gateway. Text that was sent and not yet spoken is forgotten. */
  cancel() {
    this.#silence({ type: "cancel" });
    this.#emit("text", { text: "" });
  }

  /** Round trip to the gateway in milliseconds. */
  async ping() {
    const sentAt = performance.now();
    const pong = Promise.withResolvers();
    this.#pings.push(pong);
    this.#send({ type: "ping" });
    this.#outgoing.pinged();
    await pong.promise;
    return performance.now() - sentAt;
  }

  /** Starts playing after `autoplay-blocked`; call it in a click. */
  async resume() {
    await this.tap?.resume();
    await this.#listener?.play();
  }

  /** The receiver's counters, see Listener.stats. */
  stats() {
    return this.#listener?.stats() ?? Promise.resolve(null);
  }

  /** Ends the session. Safe to call twice, and while the page is being left. */
  close() {
    if (this.#state === "closed") return;
    this.#leaving.abort();
    this.#listener?.close({ tell: false }); // the session's end ends its listeners
    this.#socket?.close(1000);
    this.tap?.close().catch(() => {});
    for (const utterance of this.utterances.values()) {
      if (utterance.state !== "speaking") continue;
      Object.assign(utterance, { state: "cancelled", heardMs: utterance.spokenMs });
      this.#emit("cancelled", { utterance });
    }
    const gone = new VivavoceError("closed", "The session is closed.", { remedy: "Connect again." });
    for (const waiting of [this.#created, this.#updating, ...this.#pings]) {
      waiting?.promise.catch(() => {});
      waiting?.reject(gone);
    }
    this.#enter("closed");
  }

  // -- the WebSocket ------------------------------------------------------------------------------------------------

  /** @param {{resume?: string, received?: string}} [query] to take the session up again */
  #dial(query = {}) {
    const url = new URL("v1/speech", this.#gateway);
    for (const [name, value] of Object.entries({ token: this.#token, ...query })) if (value) url.searchParams.set(name, value);
    const socket = (this.#socket = new WebSocket(url.href.replace(/^http/, "ws")));
    let opened = false;
    socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    return new Promise((resolve, reject) => {
      socket.onopen = () => resolve((opened = true));
      socket.onclose = async ({ code, reason }) => {
        if (this.#state === "closed") return;
        if (!opened || this.#state === "connecting") return reject(await whyUnreachable(url));
        if (code === BROKEN) return this.#redial();
        this.#fail(gatewayLost(reason));
      };
    });
  }

  async #redial() {
    this.#current = false;
    this.#emit("reconnecting", { what: "text" });
    try {
      const attempt = () => this.#dial({ resume: this.#resume, received: `${this.#received}` });
      await persist(attempt, ({ code, retryable }) => !retryable && code !== "gateway-unreachable", this.#leaving.signal);
    } catch (cause) {
      this.#fail(gatewayLost(cause.message ?? `${cause}`));
    }
  }

  /** @param {{received: number}} message how many of ours have arrived */
  #onResumed({ received }) {
    const again = this.#outgoing.behind(received);
    if (!again) return this.#fail(gatewayLost("more text was under way than is kept here"));
    for (const message of again) this.#socket.send(message);
    this.#current = true;
    this.#emit("reconnected", { what: "text" });
  }

  /** While the socket is broken, messages wait for the next one. @param {object} message */
  #send(message) {
    if (this.#state === "idle" || this.#state === "closed") {
      throw new VivavoceError("closed", "The session is not connected.", { remedy: "Connect first." });
    }
    const text = JSON.stringify(message);
    this.#outgoing.add(text);
    if (this.#socket.readyState === WebSocket.OPEN && this.#current) this.#socket.send(text);
  }

  /** @param {any} message an event of the protocol; unknown ones are ignored */
  #receive(message) {
    this.#received++;
    switch (message.type) {
      case "session.resumed":
        return this.#onResumed(message);
      case "session.created":
        return this.#created.resolve(message);
      case "session.updated":
        return this.#onUpdated(message);
      case "utterance.started":
        return this.#onStarted(message);
      case "utterance.progress":
        return this.#onProgress(message);
      case "playback":
        return this.#onPlayback(message);
      case "utterance.done":
        return this.#onDone(message);
      case "utterance.cancelled":
        return this.#onCancelled(message);
      case "error":
        return this.#onError(message);
      case "pong":
        this.#outgoing.ponged();
        return this.#pings.shift()?.resolve();
    }
  }

  #onUpdated({ voice, language, voices, languages }) {
    Object.assign(this, { voice, language, voices, languages });
    this.#updating?.resolve();
    this.#updating = undefined;
    this.#emit("updated", { voice, language, voices, languages });
  }

  #onStarted({ utterance: id, ttfa_ms: gatewayTtfaMs, rtp_time: rtpTime }) {
    if (this.#cancelling) return; // it crossed our cancel
    this.#listener.unmuteAt(rtpTime);
    const firstAt = this.#sent.firstAt;
    const followed = firstAt < this.#lastEndAt;
    const utterance = { id, state: "speaking", text: this.#sent.first, ttfaMs: null, gatewayTtfaMs, followed };
    Object.assign(utterance, { spokenMs: 0, spokenText: "", durationMs: null, heardMs: null });
    this.utterances.set(id, utterance);
    this.#speaking = utterance;
    this.#awaited = { utterance, startedAt: performance.now() };
    this.#emit("started", { utterance });
    this.#emit("text", { text: this.pendingText });
    if (this.tap.onsetAt > Math.max(performance.now() - ONSET_BEFORE_STARTED_MS, this.#lastEndAt)) this.#onOnset();
  }

  #onOnset() {
    if (!this.#awaited) return; // `started` is still on its way
    const { utterance, startedAt } = this.#awaited;
    this.#awaited = null;
    utterance.ttfaMs = utterance.gatewayTtfaMs + Math.max(0, this.tap.onsetAt - startedAt);
    this.#emit("heard", { utterance });
  }

  #onProgress({ utterance: id, spoken_ms: spokenMs, text_until: textUntil }) {
    const utterance = this.utterances.get(id);
    if (utterance?.state !== "speaking") return;
    const text = this.#sent.first;
    Object.assign(utterance, { spokenMs, spokenText: [...text].slice(0, textUntil).join(""), text });
    this.#emit("progress", { utterance });
  }

  #onPlayback({ buffered_ms: bufferedMs, dry_in_ms: dryInMs, concealed_ms: concealedMs, measured }) {
    this.#emit("playback", { bufferedMs, dryInMs, concealedMs, measured });
  }

  #onDone({ utterance: id, reason, duration_ms: durationMs, text }) {
    const utterance = this.#ended(id);
    if (utterance) {
      if (utterance.state !== "cancelled") this.#sent.take(text);
      const broken = reason === "error";
      Object.assign(utterance, { state: "done", text, spokenText: broken ? utterance.spokenText : text, spokenMs: durationMs, durationMs, broken });
      this.#emit("done", { utterance, reason });
    } else if (!this.#cancelling) {
      this.#sent.take(text); // never begun: it had nothing to say, or went wrong
      if (reason === "empty") this.#emit("empty", { text });
    }
    this.#emit("text", { text: this.pendingText });
  }

  #onCancelled({ utterance: id, heard_ms: heardMs, heard_text: heardText, rtp_until: rtpUntil }) {
    if (this.#cancelling === 1) this.#listener.unmuteBehind(rtpUntil); // of the latest cancel: what an earlier one ended says nothing
    const utterance = this.#ended(id);
    if (!utterance) return;
    Object.assign(utterance, { state: "cancelled", spokenText: heardText, spokenMs: heardMs, heardMs });
    this.#emit("cancelled", { utterance });
  }

  /** @param {number} id */
  #ended(id) {
    const utterance = this.utterances.get(id);
    if (this.#speaking === utterance) this.#speaking = null;
    if (!this.#cancelling) this.#lastEndAt = performance.now(); // what follows a cancelled one has not waited for it
    return utterance;
  }

  #onError({ code, message, retryable }) {
    const remedy = retryable ? "Try again in a moment." : "";
    const error = new VivavoceError(code, message, { remedy, retryable });
    if (this.#updating) {
      this.#updating.reject(error);
      this.#updating = undefined;
    } else {
      this.#emit("error", { error });
    }
  }

  // -- the audio ----------------------------------------------------------------------------------------------------

  #newListener() {
    const listener = new Listener(this.#audio, this.#rtc);
    listener.onlost = (error) => (error.code === "listener-replaced" ? this.#emit("error", { error }) : this.#relisten(listener));
    listener.onblocked = (error) => this.#emit("error", { error });
    listener.onunmuted = () => this.tap.rearm();
    listener.follows = false;
    return listener;
  }

  /** Its connection has broken: another takes its place, and goes on where it was. @param {Listener} lost */
  async #relisten(lost) {
    if (this.#state !== "ready") return this.#fail(new VivavoceError("webrtc-failed", "The audio connection was lost.", { retryable: true }));
    this.#emit("reconnecting", { what: "audio" });
    const { place } = lost;
    lost.close({ tell: false });
    const attempt = async () => {
      const listener = (this.#listener = this.#newListener());
      try {
        await listener.prepare();
        if (this.#iceServers.length) await listener.useIceServers(this.#iceServers);
        const deadline = AbortSignal.any([AbortSignal.timeout(this.#timeoutMs), this.#leaving.signal]);
        await listener.connect(this.invitation.whep, this.invitation.token, deadline, place);
        await this.tap.attach(listener.stream);
      } catch (cause) {
        listener.close();
        throw cause;
      }
    };
    try {
      await persist(attempt, ({ code }) => code === "whep-404" || code === "whep-401", this.#leaving.signal);
      this.#emit("reconnected", { what: "audio" });
    } catch (cause) {
      this.#fail(asError(cause));
    }
  }

  // -- the rest -----------------------------------------------------------------------------------------------------

  /** Mutes, and sends what makes the gateway forget all text so far. @param {object} message */
  #silence(message) {
    this.#listener.mute();
    this.#send(message);
    if (this.#speaking) this.#speaking.state = "cancelled"; // how much was heard follows from the gateway
    this.#speaking = this.#awaited = null;
    this.#sent.clear();
    this.#cancelling++;
    // The pong is the gateway's answer to everything before it: what it says until then is about the past.
    this.ping().then(
      () => --this.#cancelling || this.#listener.unmuteSoon(),
      () => {},
    );
  }

  /** @param {VivavoceError} error @param {{quiet?: boolean}} [options] */
  #fail(error, { quiet = false } = {}) {
    if (this.#state === "closed") return;
    if (!quiet) this.#emit("error", { error });
    this.close();
  }

  /** @param {State} state */
  #enter(state) {
    this.#state = state;
    this.#emit("state", { state });
  }

  /** @template {keyof SessionEvents} Type @param {Type} type @param {SessionEvents[Type]} detail */
  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

/** @param {string} why */
function gatewayLost(why) {
  return new VivavoceError("gateway-lost", `The connection to the gateway was lost${why ? ` (${why})` : ""}.`, {
    remedy: "Check that it is still running, then connect again.",
    retryable: true,
  });
}

/** @template T @param {AbortSignal} signal @param {Promise<T>} promise @returns {Promise<T>} */
function within(signal, promise) {
  return Promise.race([
    promise,
    new Promise((_, reject) => {
      if (signal.aborted) reject(signal.reason);
      signal.addEventListener("abort", () => reject(signal.reason), { once: true });
    }),
  ]);
}
