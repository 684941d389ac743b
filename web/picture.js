// The picture of an utterance: against time, the text as it came in, the audio made, sent and heard, and below it how much the
// listener has and when it would run dry.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 148;
const LEFT = 48;
const RIGHT = 8;
const END_LABEL = 48;
const TEXT = { top: 2, bottom: 14 };
const AUDIO = { top: 20, bottom: 88 };
const BUFFER = { top: 96, bottom: 128 };
const LEAST_SPAN_MS = 3000;

/** An SVG that shows a trace; `draw` brings it up to date. */
export class Picture {
  element = make("svg", { class: "picture", role: "img", height: HEIGHT });
  #parts = Object.fromEntries(
    [
      ["grid", "path"], ["text", "path"], ["heardArea", "path"], ["made", "path"], ["sent", "path"], ["heard", "path"],
      ["bufferArea", "path"], ["dryIn", "path"], ["first", "path"], ["dry", "path"],
    ].map(([name, kind]) => [name, make(kind, { class: name })]),
  );
  #labels = Object.fromEntries(["audio", "zero", "buffer", "end", "start", "dryLabel"].map((name) => [name, make("text", { class: name })]));
  #trace;

  /** @param {import("./trace.js").Trace} trace */
  constructor(trace) {
    this.#trace = trace;
    this.element.append(...Object.values(this.#parts), ...Object.values(this.#labels));
  }

  /** @param {number} now */
  draw(now = performance.now()) {
    const { moments, text, startedAt, endedAt, heardAt, last } = this.#trace;
    const width = this.element.clientWidth || 600;
    this.element.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const dryAt = endedAt === null ? (last?.dryAt ?? null) : null;
    const until = Math.max(endedAt ?? Math.max(now, dryAt ?? 0), last?.at ?? 0) - startedAt;
    // While it grows the scale moves in steps: a picture that creeps cannot be read.
    const span = Math.max(LEAST_SPAN_MS, endedAt === null ? Math.ceil(until / 2000) * 2000 : until);
    const most = Math.max(1000, ...moments.map((m) => Math.max(m.heardMs, m.sentMs ?? 0, m.madeMs ?? 0)));
    const deepest = Math.max(200, ...moments.map((m) => Math.max(m.bufferMs ?? 0, (m.dryAt ?? m.at) - m.at)));
    const x = (at) => LEFT + ((at - startedAt) / span) * (width - LEFT - RIGHT);
    const audio = (ms) => AUDIO.bottom - (ms / most) * (AUDIO.bottom - AUDIO.top);
    // By the square root: the buffer is a tenth of a second, what the gateway has beyond it may be three.
    const buffer = (ms) => BUFFER.bottom - Math.sqrt(Math.max(0, ms) / deepest) * (BUFFER.bottom - BUFFER.top);
    const line = (y, value) => path(moments.filter((m) => value(m) !== null).map((m) => [x(m.at), y(value(m))]));

    const set = (name, d) => this.#parts[name].setAttribute("d", d);
    set("grid", [AUDIO.bottom, BUFFER.bottom].map((y) => `M${LEFT},${y}H${width - RIGHT}`).join(""));
    set("text", text.map(({ at, letters }) => `M${x(at).toFixed(1)},${TEXT.bottom}v${-Math.min(TEXT.bottom - TEXT.top, 3 + letters)}`).join(""));
    set("made", line(audio, (m) => m.madeMs));
    set("sent", line(audio, (m) => m.sentMs));
    set("heard", line(audio, (m) => m.heardMs));
    set("heardArea", closed(line(audio, (m) => m.heardMs), AUDIO.bottom));
    set("bufferArea", closed(line(buffer, (m) => m.bufferMs), BUFFER.bottom));
    set("dryIn", line(buffer, (m) => (m.dryAt === null ? null : m.dryAt - m.at)));
    set("first", heardAt === null ? "" : `M${x(heardAt).toFixed(1)},${AUDIO.top}V${AUDIO.bottom}`);
    set("dry", dryAt === null ? "" : `M${x(dryAt).toFixed(1)},${AUDIO.top}V${BUFFER.bottom}`);

    const say = (name, text, at, y, anchor) => {
      Object.entries({ x: at, y, "text-anchor": anchor }).forEach(([key, value]) => this.#labels[name].setAttribute(key, value));
      this.#labels[name].textContent = text;
    };
    say("audio", tidy(most), LEFT - 6, AUDIO.top + 8, "end");
    say("zero", "0 s", LEFT - 6, AUDIO.bottom, "end");
    say("buffer", tidy(deepest), LEFT - 6, BUFFER.top + 8, "end");
    say("start", "0 s", LEFT, HEIGHT - 6, "start");
    say("end", tidy(span), width - RIGHT, HEIGHT - 6, "end");
    say("dryLabel", dryAt === null ? "" : "dry", Math.min(x(dryAt ?? now), width - RIGHT - END_LABEL), HEIGHT - 6, "middle");
    this.element.setAttribute("aria-label", this.#trace.words);
  }
}

/** @param {string} name @param {Record<string, string | number>} attributes */
function make(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
  return element;
}

/** @param {[number, number][]} points */
const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

/** The area under a line. @param {string} line @param {number} bottom */
const closed = (line, bottom) => line && `${line}V${bottom}H${line.slice(1).split(/[,L]/)[0]}Z`;

/** @param {number} ms */
const tidy = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
