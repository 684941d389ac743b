// The demo page: what is typed is spoken, and what was heard is listed.

import { LiveLine } from "./line.js";
import { Recorder } from "./recorder.js";
import { endOfLetters } from "./sent.js";
import { Session } from "./vivavoce.js";

const SAMPLES = [
  "The harbour was quiet, and the lamps went out one by one.",
  "Good morning! Your table is ready by the window.",
  "First the kettle, then the cups, and last of all the story you promised.",
];
const WORD_MS = 70; // a sample arrives word by word, as a language model would write it

const $ = (id) => document.getElementById(id);
const line = new LiveLine($("line"));
const recorder = new Recorder();
const wanted = new URLSearchParams(location.search); // ?voice=…&language=… to start with

/** @type {Session | null} */
let session = null;
/** Rows of the list by utterance number; "pending" is what no utterance has begun to say. @type {Map<number | "pending", HTMLLIElement>} */
const rows = new Map();
let sample = 0;

// -- connecting -------------------------------------------------------------------------------------------------------

$("connect").onclick = () => (session ? session.close() : connect());

async function connect() {
  session = new Session({ voice: wanted.get("voice") ?? undefined, language: wanted.get("language") ?? undefined, audio: $("speaker") });
  hideProblem();
  rows.clear();
  listen(session);
  try {
    await session.connect();
    session.tap.onblock = (block) => recorder.add(block);
    line.field.focus();
  } catch (error) {
    if (error.code !== "closed") showProblem(error);
  }
}

/** @param {Session} session */
function listen(session) {
  session.on("state", ({ state }) => showState(state));
  session.on("updated", showChoices);
  session.on("text", ({ text }) => showPending(text));
  session.on("started", ({ utterance }) => claimRow(utterance));
  session.on("heard", ({ utterance }) => showUtterance(utterance));
  session.on("progress", ({ utterance }) => showUtterance(utterance));
  session.on("done", ({ utterance }) => showUtterance(utterance));
  session.on("cancelled", ({ utterance }) => showUtterance(utterance));
  session.on("error", ({ error }) => showProblem(error));
}

/** @param {import("./vivavoce.js").State} state */
function showState(state) {
  const words = { idle: "Not connected", connecting: "Connecting…", ready: "Connected", closed: "Not connected" };
  $("state").textContent = words[state];
  document.body.dataset.state = state;
  $("connect").textContent = state === "ready" ? "Disconnect" : state === "connecting" ? "Give up" : "Connect";
  $("connect").classList.toggle("primary", state === "closed");
  for (const control of document.querySelectorAll("#line, #voice, #language, #stop, #samples button")) control.disabled = state !== "ready";
  line.field.placeholder = state === "ready" ? "Type here" : "Press Connect, then type here";
  if (state !== "closed") return;
  session = null;
  sample++;
  line.clear();
  rows.get("pending")?.remove();
}

// -- typing -----------------------------------------------------------------------------------------------------------

line.ontext = (text) => session?.append(text);
line.onenter = flush;
line.onescape = stop;
$("stop").onclick = stop;

function flush() {
  session?.flush();
  line.clear();
}

function stop() {
  sample++;
  session?.cancel();
  line.clear();
  line.field.focus();
}

for (const text of SAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.disabled = true;
  button.onclick = () => write(text);
  $("samples").append(button);
}

/** @param {string} text */
async function write(text) {
  const mine = ++sample;
  line.clear();
  line.field.focus();
  for (const word of text.match(/\S+\s*/g)) {
    if (sample !== mine) return;
    line.append(word);
    await new Promise((resolve) => setTimeout(resolve, WORD_MS));
  }
  if (sample === mine) flush();
}

// -- voices -----------------------------------------------------------------------------------------------------------

function showChoices({ voice, language, voices, languages }) {
  fill($("voice"), voices, voice);
  fill($("language"), languages, language);
}

/** @param {HTMLSelectElement} select @param {string[]} names @param {string} chosen */
function fill(select, names, chosen) {
  select.replaceChildren(...names.map((name) => new Option(name.replaceAll("_", " ").replace(/^./, (c) => c.toUpperCase()), name)));
  select.value = chosen;
}

for (const id of ["voice", "language"]) {
  $(id).onchange = async () => {
    try {
      await session.update({ [id]: $(id).value });
      hideProblem();
    } catch (error) {
      $(id).value = session?.[id] ?? "";
      showProblem(error);
    }
  };
}

// -- what was heard ---------------------------------------------------------------------------------------------------

/** @param {number | "pending"} key */
function row(key) {
  if (!rows.has(key)) {
    const item = document.createElement("li");
    item.append(document.createElement("p"), document.createElement("small"));
    $("utterances").prepend(item);
    $("nothing").hidden = true;
    rows.set(key, item);
  }
  return rows.get(key);
}

/** @param {string} text */
function showPending(text) {
  if (text.trim()) return paint(row("pending"), "pending", "", text, "Sent");
  rows.get("pending")?.remove();
  rows.delete("pending");
}

/** What was pending is now being said. @param {import("./vivavoce.js").Utterance} utterance */
function claimRow(utterance) {
  const pending = rows.get("pending");
  if (pending) {
    rows.delete("pending");
    rows.set(utterance.id, pending);
  }
  showUtterance(utterance);
}

/** @param {import("./vivavoce.js").Utterance} utterance */
function showUtterance(utterance) {
  const { id, state, text, spokenText, ttfaMs, gatewayTtfaMs, followed, durationMs, heardMs } = utterance;
  const facts = [];
  if (state === "speaking") facts.push("Speaking");
  if (state === "done") facts.push(utterance.broken ? `Broken off after ${seconds(durationMs)}` : `${seconds(durationMs)} long`);
  if (state === "cancelled") facts.push(`Stopped, heard ${seconds(heardMs)}`);
  if (followed) facts.push("followed the one before");
  else if (ttfaMs !== null) facts.push(`first sound after ${Math.round(ttfaMs)} ms (gateway ${Math.round(gatewayTtfaMs)} ms)`);
  const said = endOfLetters(text, spokenText.replace(/\s/g, "").length);
  paint(row(id), state, text.slice(0, said), text.slice(said), facts.join(" · "));
}

/** @param {HTMLLIElement} item */
function paint(item, state, said, unsaid, facts) {
  item.dataset.state = state;
  const mark = document.createElement("mark");
  mark.textContent = said;
  const rest = document.createElement("span");
  rest.textContent = unsaid;
  item.firstChild.replaceChildren(mark, rest);
  item.lastChild.textContent = facts;
}

const seconds = (ms) => `${((ms ?? 0) / 1000).toFixed(1)} s`;

// -- level and recording ----------------------------------------------------------------------------------------------

let shown = 0;
function drawLevel() {
  const loudness = session?.tap ? Math.max(0, 1 + Math.log10(session.tap.level + 1e-6) / 2.2) : 0; // -44 dBFS to full scale
  shown = Math.max(loudness, shown * 0.9);
  $("level").style.scale = `${shown.toFixed(3)} 1`;
  const empty = recorder.seconds === 0;
  if ($("save").disabled !== empty) $("save").disabled = empty;
  requestAnimationFrame(drawLevel);
}
drawLevel();

$("save").onclick = () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(recorder.wav());
  link.download = "vivavoce.wav";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
};

// -- errors -----------------------------------------------------------------------------------------------------------

/** @param {import("./errors.js").VivavoceError} error */
function showProblem({ code, message, remedy }) {
  $("problem").dataset.code = code;
  $("problem-message").textContent = message;
  $("problem-remedy").textContent = remedy ?? "";
  $("problem").hidden = false;
  if (code === "autoplay-blocked") addEventListener("click", () => session?.resume().then(hideProblem), { once: true });
}

function hideProblem() {
  $("problem").hidden = true;
}

$("problem-close").onclick = hideProblem;

window.vivavoce = { recorder, line, get session() { return session; } }; // for the console and the tests
