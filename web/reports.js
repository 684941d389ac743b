// What a listener tells the gateway: how far it has played and how it fares, five times a second, over the data channel `events`.
// The gateway makes sound in the order in which its listeners would run dry, so a page that reports is served by what it really has.

const EVERY_MS = 200;
const PING_EVERY = 5; // reports
const WRAP = 2 ** 32;

/** The data channel of one connection. Make it before the offer. */
export class Reports {
  /** @type {(event: any) => void} an event of the session came: what starts, is done, is cancelled, and what is buffered here */
  onevent = () => {};

  #receiver;
  #paused;
  #channel;
  #timer = 0;
  #begun = false;
  #count = 0;
  #pingedAt = 0;
  /** @type {number | null} */
  #rttMs = null;
  #before = { count: 0, waited: 0, network: 0 };
  /** @type {number | null} */
  #lastRtpTime = null;

  /** @param {RTCPeerConnection} peer @param {RTCRtpReceiver} receiver @param {() => boolean} paused whether nobody hears what is played */
  constructor(peer, receiver, paused) {
    this.#receiver = receiver;
    this.#paused = paused;
    this.#channel = peer.createDataChannel("events");
    this.#channel.onopen = () => this.#begun && this.begin();
    this.#channel.onclose = () => this.close();
    this.#channel.onmessage = ({ data }) => this.#receive(JSON.parse(data));
  }

  /** The packet that is being played: its RTP timestamp, and how long ago it began. @returns {{rtpTime: number, ageMs: number} | null} */
  get playhead() {
    const source = this.#receiver.getSynchronizationSources()[0];
    if (!source) return null;
    this.#lastRtpTime = source.rtpTimestamp;
    return { rtpTime: source.rtpTimestamp, ageMs: msSince(source.timestamp) };
  }

  /** The RTP timestamp of the packet that was played last, long ago or now; null: none was. */
  get lastRtpTime() {
    return this.playhead?.rtpTime ?? this.#lastRtpTime;
  }

  /** Reports leave from now on: the listener hears what is played, or says that it is paused. The gateway waits for the first one with what
   * is to be said. */
  begin() {
    this.#begun = true;
    if (this.#channel.readyState !== "open") return;
    clearInterval(this.#timer);
    this.#timer = setInterval(() => this.report(), EVERY_MS);
    this.report();
  }

  close() {
    clearInterval(this.#timer);
    this.#channel.onclose = null;
    this.#channel.close();
  }

  /** One more, besides those that leave by themselves: something has changed. */
  async report() {
    if (!this.#begun) return;
    if (this.#count++ % PING_EVERY === 0) {
      this.#pingedAt = performance.now();
      this.#send({ type: "ping" });
    }
    const paused = this.#paused();
    // A pause is told at once: what is played until the gateway knows is heard by nobody.
    const counters = paused ? null : inbound(await this.#receiver.getStats());
    // Last, for it is the part that goes out of date.
    const { rtpTime, ageMs } = this.playhead ?? { rtpTime: null, ageMs: 0 };
    // An output that has slept lets the first packet wait, takes it, and stands still.
    const playedMs = (counters?.totalSamplesDuration ?? Infinity) * 1000 + msSince(counters?.timestamp ?? 0);
    const lastCameMs = msSince(counters?.lastPacketReceivedTimestamp ?? Infinity);
    this.#send({
      type: "stats",
      rtp_time: rtpTime,
      age_ms: Math.min(ageMs, playedMs),
      stood_ms: counters?.packetsReceived === 1 ? Math.max(0, Math.max(ageMs, lastCameMs) - playedMs) : 0,
      received: counters?.packetsReceived ?? 0,
      concealed_ms: concealedMs(counters),
      ...this.#buffer(counters),
      target_ms: this.#receiver.jitterBufferTarget ?? null,
      rtt_ms: this.#rttMs,
      paused,
    });
  }

  /** @param {object} message */
  #send(message) {
    if (this.#channel.readyState === "open") this.#channel.send(JSON.stringify(message));
  }

  /** @param {any} event */
  #receive(event) {
    if (event.type === "pong") this.#rttMs = performance.now() - this.#pingedAt;
    else this.onevent(event);
  }

  /** How long what was played since the last report had waited, and would have for the network's sake alone. @param {any} counters */
  #buffer(counters) {
    const { jitterBufferEmittedCount: count = 0, jitterBufferDelay: waited = 0, jitterBufferMinimumDelay: network } = counters ?? {};
    const before = this.#before;
    this.#before = { count, waited, network: network ?? 0 };
    const meanMs = (sum) => Math.max(0, (sum / (count - before.count)) * 1000);
    if (count <= before.count) return { buffer_ms: 0, network_ms: null };
    return { buffer_ms: meanMs(waited - before.waited), network_ms: network === undefined ? null : meanMs(network - before.network) };
  }
}

/** The counters of what is received, or null before anything was. @param {RTCStatsReport} stats @returns {any} */
export function inbound(stats) {
  for (const report of stats.values()) if (report.type === "inbound-rtp") return report;
  return null;
}

/** How long ago a time on the browser's clock was, 0 if it is to come. @param {number} timestamp */
function msSince(timestamp) {
  return Math.max(0, performance.timeOrigin + performance.now() - timestamp);
}

/** How far one RTP timestamp is past another, in ticks; they wrap around. @param {number} later @param {number} earlier */
export function ticksPast(later, earlier) {
  const past = (later - earlier + WRAP) % WRAP;
  return past < WRAP / 2 ? past : past - WRAP;
}

/** Sound that was made up because none had come; silence that was made up is none. @param {any} counters */
function concealedMs(counters) {
  if (!counters?.totalSamplesReceived) return 0;
  const rate = counters.totalSamplesReceived / counters.totalSamplesDuration || 48_000;
  return Math.max(0, ((counters.concealedSamples - (counters.silentConcealedSamples ?? 0)) / rate) * 1000);
}
