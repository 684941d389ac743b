// The listening half of a session: one WHEP resource, one RTCPeerConnection, one audio element.

import { VivavoceError, whepError } from "./errors.js";
import { inbound, Reports, ticksPast } from "./reports.js";

const MOST_TARGET_MS = 4000; // by the standard
const PACKET_TICKS = 960;
const UNMUTE_LOOK_MS = 5;
const BROKEN_MS = 1500; // without a sign of the gateway, on top of the seconds after which the browser says so
const FADED_MS = 1500; // after which nothing of what was cancelled is left in the receiver, its concealment included
const LINGERS_MS = 300; // what was over for the gateway may still sound here for a moment
const COLD_MS = 2000; // at the most, until an output plays that has not for a while
const NOTHING_MS = 500; // without a packet: the only one that is sent before the first report was lost
const LOOK_MS = 10;
const FLOW_MS = 40; // a browser counts anew every 50 ms
const RINGS_TICKS = 2 * PACKET_TICKS; // what a decoder makes of the silence behind speech still sounds of it

/** Receives a session's speech over WebRTC. Make it, `prepare` it while the WebSocket is still opening, then `connect`. */
export class Listener {
  /** What is received; it exists from the start and carries sound once connected. @type {MediaStream} */
  stream;
  /** @type {(error: VivavoceError) => void} the connection was lost after it had been up */
  onlost = () => {};
  /** @type {(error: VivavoceError) => void} the browser did not let the audio element play */
  onblocked = () => {};
  /** @type {() => void} what is played is audible again after `mute` */
  onunmuted = () => {};
  /** Mute and unmute by what the gateway says of its utterances. Whoever sends the text knows better. */
  follows = true;

  #peer;
  #receiver;
  #reports;
  #closing = new AbortController();
  #unmuteTimer = 0;
  /** @type {number | null} the RTP timestamp from which on it is to be audible again */
  #unmuteFrom = null;
  /** @type {number | null} where what was cancelled ends */
  #endsAt = null;
  #audio;
  /** The output takes sound at its pace. */
  #awake = false;
  /** @type {Promise<void> | null} */
  #waking = null;
  /** @type {URL | undefined} */
  #resource;
  #token = "";
  #up = false;
  #brokenTimer = 0;
  /** Utterances that have started and are not over. @type {Set<number>} */
  #sounding = new Set();

  /** @param {HTMLAudioElement | null} audio where to play; null: the caller plays `stream` itself
   *  @param {RTCConfiguration} [configuration] */
  constructor(audio, configuration) {
    this.#audio = audio;
    this.#peer = new RTCPeerConnection(configuration);
    this.#receiver = this.#peer.addTransceiver("audio", { direction: "recvonly" }).receiver;
    // A paused element plays to nobody, whatever the receiver does: the gateway waits, and goes on from there. So it does for one that the
    // browser does not let play yet, or whose output has yet to wake.
    this.#reports = new Reports(this.#peer, this.#receiver, () => !!audio && (audio.paused || !this.#awake));
    audio?.addEventListener("pause", () => this.#sleep(), { signal: this.#closing.signal });
    audio?.addEventListener("play", () => this.#wake(), { signal: this.#closing.signal });
    this.#reports.onevent = (event) => this.#follow(event);
    this.stream = new MediaStream([this.#receiver.track]);
  }

  /** Makes the offer. Candidates found later are not waited for: the gateway learns them from the checks that arrive. */
  async prepare() {
    await this.#peer.setLocalDescription();
  }

  /** Makes the offer anew, with candidates through these servers; before `connect`. @param {RTCIceServer[]} iceServers */
  async useIceServers(iceServers) {
    this.#peer.setConfiguration({ ...this.#peer.getConfiguration(), iceServers });
    await this.#peer.setLocalDescription(await this.#peer.createOffer({ iceRestart: true }));
  }

  /** Where it was on its connection, for the listener that takes its place here. @type {{former: string, played: number | null} | undefined} */
  get place() {
    const former = this.#resource?.pathname.split("/").at(-1);
    return former ? { former, played: this.#reports.lastRtpTime } : undefined;
  }

  /** Posts the offer and waits until sound can arrive.
   * @param {string} whep @param {string} token @param {AbortSignal} signal
   * @param {{former: string, played: number | null}} [place] of a listener here that has lost its connection: goes on behind it */
  async connect(whep, token, signal, place) {
    this.#token = token;
    const headers = { "content-type": "application/sdp", authorization: `Bearer ${token}` };
    if (place) headers["vivavoce-former-listener"] = place.former;
    if (place && place.played !== null) headers["vivavoce-played-rtp-time"] = `${place.played}`;
    const canHold = "jitterBufferTarget" in this.#receiver;
    const answer = await fetch(whep, {
      method: "POST",
      headers: canHold ? { ...headers, "vivavoce-max-target-ms": `${MOST_TARGET_MS}` } : headers,
      body: this.#peer.localDescription.sdp,
      signal,
    });
    if (!answer.ok) throw await whepError(answer);
    const location = answer.headers.get("location");
    if (location) this.#resource = new URL(location, answer.url);
    // A browser leaves sound alone while it plays between its target and a packet more behind the promptest packet of the last seconds;
    // outside that band it plays slower or faster. The gateway keeps as much ahead, and says by `hold` when that is to change.
    const targetMs = Number(answer.headers.get("vivavoce-target-ms"));
    if (canHold && targetMs) this.#receiver.jitterBufferTarget = targetMs;
    await this.#peer.setRemoteDescription({ type: "answer", sdp: await answer.text() });
    await this.#connected(signal);
    await this.play();
    await this.#wake();
    this.#closing.signal.throwIfAborted();
    if (this.#peer.connectionState === "failed" || this.#receiver.transport.state === "closed") throw webrtcFailed();
    this.#up = true;
    this.#receiver.transport.addEventListener("statechange", () => this.#check());
    this.#peer.addEventListener("connectionstatechange", () => this.#check());
    this.#check();
    this.#reports.begin();
  }

  #sleep() {
    this.#awake = false;
    this.#reports.report();
  }

  /** Waits until the output takes sound at its pace, and reports. One that has slept takes a first piece and then nothing, for a second or more,
   * and the receiver would hurry through what has come by then. */
  #wake() {
    this.#waking ??= this.#flow().finally(() => {
      this.#waking = null;
      this.#awake = !this.#audio?.paused;
      this.#reports.report();
    });
    return this.#waking;
  }

  async #flow() {
    // A hidden page looks once a second, and may have no output at all.
    const began = performance.now();
    const until = began + (document.hidden ? 0 : COLD_MS);
    /** @type {any} */
    let before = null;
    while (this.#audio && !this.#audio.paused && !this.#closing.signal.aborted && performance.now() < until) {
      /** @type {any} */
      const counters = await this.stats();
      if (!counters && performance.now() - began > NOTHING_MS) return;
      const ms = counters && before ? counters.timestamp - before.timestamp : 0;
      if (ms >= FLOW_MS && (counters.totalSamplesDuration - before.totalSamplesDuration) * 2000 > ms) return;
      if (counters?.totalSamplesDuration && (!before || ms >= FLOW_MS)) before = counters;
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    }
  }

  /** Starts the audio element; call it in a click after `onblocked`. */
  async play() {
    if (!this.#audio) return;
    this.#audio.srcObject = this.stream;
    try {
      await this.#audio.play();
    } catch (cause) {
      if (cause.name !== "NotAllowedError") return; // AbortError: closed meanwhile
      this.onblocked(
        new VivavoceError("autoplay-blocked", "The browser does not let this page play sound yet.", {
          remedy: "Click anywhere on the page, or allow sound for this site in the browser's settings.",
          cause,
        }),
      );
    }
  }

  /** The receiver's counters (inbound-rtp), or null before anything has arrived. @returns {Promise<object | null>} */
  async stats() {
    return inbound(await this.#receiver.getStats());
  }

  /** Silences what is played and everything fed by `stream`, from the next few milliseconds on, until `unmuteAt`, or until nothing can be
   * left of what was being played. */
  mute() {
    this.#receiver.track.enabled = false;
    this.#unmuteFrom = this.#endsAt = null;
    clearTimeout(this.#unmuteTimer);
    this.#unmuteTimer = setTimeout(() => this.#unmute(), FADED_MS);
  }

  /** Audible again from the packet with this RTP timestamp on: before it, what was cancelled may still be played. At once where that
   * cannot be seen. @param {number | null | undefined} rtpTime */
  unmuteAt(rtpTime) {
    if (rtpTime == null) return this.#unmute();
    // A packet early, but not in what was cancelled: that may go on right up to it.
    const early = rtpTime - PACKET_TICKS;
    this.#unmuteFromTicks(this.#endsAt !== null && ticksPast(this.#endsAt, early) > 0 ? this.#endsAt : early);
  }

  /** Audible again as soon as all before this RTP timestamp has been played: that is the end of what was cancelled. A page that is busy
   * unmutes late, so it is not to wait for the first packet of what follows. @param {number | null | undefined} rtpUntil */
  unmuteBehind(rtpUntil) {
    if (rtpUntil == null) return;
    this.#endsAt = rtpUntil;
    this.#unmuteFromTicks(rtpUntil + RINGS_TICKS);
  }

  /** Ends the WHEP resource; also works while the page is being left. `tell: false`: the gateway knows already, by the end of the session.
   * @param {{tell?: boolean}} [how] */
  close({ tell = true } = {}) {
    this.#up = false;
    clearTimeout(this.#unmuteTimer);
    clearTimeout(this.#brokenTimer);
    this.#closing.abort();
    this.#reports.close();
    this.#peer.close();
    if (this.#audio) this.#audio.srcObject = null;
    if (!this.#resource || !tell) return;
    fetch(this.#resource, { method: "DELETE", headers: { authorization: `Bearer ${this.#token}` }, keepalive: true }).catch(() => {});
    this.#resource = undefined;
  }

  /** After `mute`, where the gateway had nothing to end. */
  unmuteSoon() {
    if (this.#receiver.track.enabled || this.#unmuteFrom !== null) return;
    clearTimeout(this.#unmuteTimer);
    this.#unmuteTimer = setTimeout(() => this.#unmute(), LINGERS_MS);
  }

  /** @param {number} ticks whichever was said first, the earlier counts */
  #unmuteFromTicks(ticks) {
    if (this.#receiver.track.enabled) return;
    if (this.#unmuteFrom === null || ticksPast(this.#unmuteFrom, ticks) > 0) this.#unmuteFrom = ticks;
    clearTimeout(this.#unmuteTimer);
    const look = () => {
      const playhead = this.#reports.playhead;
      if (!playhead || ticksPast(playhead.rtpTime, this.#unmuteFrom) >= 0) this.#unmute();
      else this.#unmuteTimer = setTimeout(look, UNMUTE_LOOK_MS);
    };
    look();
  }

  #unmute() {
    clearTimeout(this.#unmuteTimer);
    if (this.#receiver.track.enabled) return;
    this.#receiver.track.enabled = true;
    this.onunmuted();
  }

  /** @param {any} event */
  #follow(event) {
    if (event.type === "hold" && "jitterBufferTarget" in this.#receiver) this.#receiver.jitterBufferTarget = event.target_ms;
    if (event.type === "utterance.started") this.#sounding.add(event.utterance);
    if (event.type === "utterance.done" || event.type === "utterance.cancelled") this.#sounding.delete(event.utterance);
    if (!this.follows) return;
    // What sounds at once with it, or waits behind it, is not silenced with it.
    if (event.type === "utterance.cancelled" && !this.#sounding.size) {
      this.mute();
      this.unmuteBehind(event.rtp_until);
    }
    if (event.type === "utterance.started") this.unmuteAt(event.rtp_time);
  }

  /** @param {AbortSignal} signal */
  #connected(signal) {
    const peer = this.#peer;
    return new Promise((resolve, reject) => {
      const look = () => {
        if (peer.connectionState === "connected") resolve();
        if (peer.connectionState === "failed") reject(webrtcFailed());
      };
      peer.addEventListener("connectionstatechange", look, { signal });
      signal.addEventListener("abort", () => reject(webrtcFailed()), { once: true });
      look();
    });
  }

  #check() {
    if (!this.#up) return;
    if (this.#receiver.transport.state === "closed") {
      this.#up = false;
      this.onlost(
        new VivavoceError("listener-replaced", "The gateway ended this audio connection: another listener has taken over.", {
          remedy: "To listen here again, disconnect and connect.",
        }),
      );
    } else if (this.#peer.connectionState === "failed") {
      this.#up = false;
      this.onlost(webrtcFailed());
    }
    clearTimeout(this.#brokenTimer);
    if (this.#up && this.#peer.connectionState === "disconnected") {
      this.#brokenTimer = setTimeout(() => {
        this.#up = false;
        this.onlost(webrtcFailed());
      }, BROKEN_MS);
    }
  }
}

function webrtcFailed() {
  return new VivavoceError("webrtc-failed", "The gateway answered, but no audio connection (WebRTC over UDP) came about.", {
    remedy: "A firewall, VPN or proxy between here and the gateway may block UDP. Try from another network, or connect again.",
    retryable: true,
  });
}
