// The demo page: what is typed, or written by a language model, is spoken, and what was heard is shown.

import { Author } from "./author.js";
import { Captions } from "./captions.js";
import { Heard } from "./heard.js";
import { Holder } from "./holder.js";
import { Journal } from "./journal.js";
import { languageHint, named } from "./languages.js";
import { lettersIn } from "./letters.js";
import { LiveLine } from "./line.js";
import { Microphone } from "./microphone.js";
import { Recorder } from "./recorder.js";
import { Session, VivavoceError } from "./vivavoce.js";

const SAMPLES = [
  "The harbour was quiet, and the lamps went out one by one.",
  "Good morning! Your table is ready by the window.",
  "First the kettle, then the cups, and last of all the story you promised.",
];
const SAMPLE_SPEED = { tokensPerSecond: 20, pauseS: 0 };
const HINT_AFTER_MS = 400;
const PASSES = new Set(["autoplay-blocked", "listener-replaced"]); // problems that speech alone does not end

const $ = (id) => document.getElementById(id);
const line = new LiveLine($("line"));
const holder = new Holder();
const author = new Author();
const recorder = new Recorder();
const microphone = new Microphone();
const captions = new Captions($("utterances"));
const journal = new Journal($("events"));
const heard = new Heard(captions, journal, $("figures"), $("legend"));
const wanted = new URLSearchParams(location.search); // ?voice=…&language=… to start with

/** @type {Session | null} */
let session = null;
/** Those that say the author's latest text; null: what is said was typed. @type {Set<import("./vivavoce.js").Utterance> | null} */
let authored = null;
let offered = { languages: [] };

// -- connecting -------------------------------------------------------------------------------------------------------

$("connect").onclick = () => (session ? session.close() : connect());

async function connect() {
  const voice = wanted.get("voice") ?? ($("voice").value || undefined);
  const language = wanted.get("language") ?? ($("language").value || undefined);
  // A gateway with API keys takes a session token, which the page's address carries where no server and no log sees it: /#token=...
  const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? undefined;
  session = new Session({ voice, language, instructions: $("instructions").value || undefined, audio: $("speaker"), token });
  hideProblem();
  authored = null;
  journal.start();
  heard.follow(session);
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
  session.on("updated", (choices) => {
    showChoices(choices);
    journal.add("updated", `voice ${choices.voice ?? "none"}, language ${choices.language}`);
  });
  session.on("started", ({ utterance }) => {
    if (!PASSES.has($("problem").dataset.code)) hideProblem();
    authored?.add(utterance);
  });
  session.on("cancelled", ({ utterance }) => authored?.has(utterance) && tellAuthor());
  session.on("error", ({ error }) => showProblem(error));
  for (const type of ["reconnecting", "reconnected"]) session.on(type, ({ what }) => journal.add(type, what));
  for (const type of ["text", "started", "done", "cancelled"]) session.on(type, tidyUp);
}

/** @param {import("./vivavoce.js").State} state */
function showState(state) {
  const words = { idle: "Not connected", connecting: "Connecting…", ready: "Connected", closed: "Not connected" };
  journal.add(state, state === "ready" ? `session ${session.id}` : "");
  $("state").textContent = words[state];
  document.body.dataset.state = state;
  $("connect").textContent = state === "ready" ? "Disconnect" : state === "connecting" ? "Give up" : "Connect";
  $("connect").classList.toggle("primary", state === "closed");
  for (const control of document.querySelectorAll("#line, #samples button, #sim-write, #chat-ask")) control.disabled = state !== "ready";
  line.field.placeholder = state === "ready" ? "Type here" : "Press Connect, then type here";
  if (state === "closed") {
    session = null;
    forget();
    captions.pending("");
  }
  tidyUp();
}

// -- writing ----------------------------------------------------------------------------------------------------------

line.ontext = (text) => {
  if (author.writing) session?.end(); // who types takes the word
  author.stop();
  authored = null;
  holder.type(text);
  tidyUp();
};
line.onenter = () => {
  holder.release(false);
  session?.end(); // a text of its own: nothing that it opened and has not closed passes over the next one
  line.clear();
};
holder.onclause = (text, complete) => {
  send(text);
  if (complete) session?.flush();
};
// If it has not begun to be spoken by now, it is complete, or there is nothing to speak in it: only the gateway knows.
holder.onpause = () => session?.state === "ready" && session.pendingText.trim() && session.flush();
author.ontext = send;
author.oncomplete = () => session?.end();
author.onchange = showStop;

/** @param {string} text */
function send(text) {
  if (session?.state !== "ready") return;
  heard.wrote(text);
  session.append(text);
}

/** Clears the way for a text of its own, and has it written. @param {() => Promise<void>} write */
async function dictate(write) {
  stop();
  hideProblem();
  authored = new Set();
  try {
    await write();
  } catch (error) {
    showProblem(error);
    if (session?.state === "ready") session.end(); // what there is of it is spoken
  }
}

for (const text of SAMPLES) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: text, disabled: true });
  button.onclick = () => dictate(() => author.pretend(text, SAMPLE_SPEED));
  $("samples").append(button);
}

$("sim-write").onclick = () =>
  dictate(() => author.pretend($("sim-text").value, { tokensPerSecond: Math.max(1, $("sim-rate").valueAsNumber || 20), pauseS: $("sim-pause").valueAsNumber || 0 }));

$("chat-ask").onclick = () => {
  const question = $("chat-question").value.trim();
  if (question) dictate(() => author.answer(question, { base: $("chat-base").value, model: $("chat-model").value, key: $("chat-key").value }));
};
$("chat-question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.isComposing) $("chat-ask").click();
};

// -- stopping ---------------------------------------------------------------------------------------------------------

const busy = () => session?.state === "ready" && (author.writing || (heard.speaking + session.pendingText + holder.held).trim() !== "");

$("stop").onclick = stop;
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || !busy()) return;
  event.preventDefault();
  stop();
});

/** Silence, and everything unsaid is forgotten. */
function stop() {
  const wasBusy = busy();
  if (document.activeElement === $("stop")) line.field.focus();
  forget();
  if (!wasBusy) return;
  journal.add("cancel");
  session.cancel();
  if (authored) tellAuthor();
  tidyUp();
}

/** The author was broken into: it is told how much of its text was heard. */
function tellAuthor() {
  author.interrupted([...authored].map(({ spokenText }) => spokenText.trim()).filter(Boolean).join(" "));
}

function forget() {
  author.stop();
  holder.clear();
  line.clear();
}

/** What can be stopped, and what the line still has to show, follow from what is going on. */
function tidyUp() {
  if (session?.state === "ready") line.keep(lettersIn(heard.speaking + session.pendingText + holder.held));
  showStop();
}

function showStop() {
  const idle = !busy();
  if (idle && document.activeElement === $("stop")) line.field.focus();
  $("stop").disabled = idle;
}

// -- the microphone ---------------------------------------------------------------------------------------------------

$("microphone").onclick = async () => {
  if (microphone.on) {
    microphone.stop();
  } else {
    try {
      await microphone.start();
      hideProblem();
    } catch (error) {
      showProblem(error);
    }
  }
  showMicrophone();
};
microphone.onspeech = () => {
  journal.add("microphone", busy() ? "somebody speaks up" : "somebody speaks");
  if (busy()) stop();
};
microphone.onlost = showMicrophone;

function showMicrophone() {
  $("microphone").setAttribute("aria-pressed", String(microphone.on));
  $("microphone-rule").hidden = !microphone.on;
}

// -- voices -----------------------------------------------------------------------------------------------------------

/** Before there is a session: what the gateway would speak with. */
async function offer() {
  const answer = await fetch("ready", { cache: "no-store" }).catch(() => null);
  if (!answer?.ok) return;
  const { voices, languages, instructions } = await answer.json();
  $("instructions-label").hidden = !instructions;
  if (!session) showChoices({ voice: wanted.get("voice") ?? voices[0], language: wanted.get("language") ?? "auto", voices, languages });
}

function showChoices({ voice, language, voices, languages }) {
  offered = { languages };
  fill($("voice"), voices, voice);
  fill($("language"), languages, language);
}

/** @param {HTMLSelectElement} select @param {string[]} names @param {string | null} chosen */
function fill(select, names, chosen) {
  select.replaceChildren(...names.map((name) => new Option(named(name), name)));
  if (chosen !== null) select.value = chosen;
  select.disabled = names.length === 0;
}

for (const id of ["voice", "language", "instructions"]) {
  $(id).onchange = async () => {
    wanted.delete(id);
    hint();
    if (session?.state !== "ready") return;
    try {
      await session.update({ [id]: $(id).value });
      hideProblem();
    } catch (error) {
      if (session && id in session) $(id).value = session[id] ?? "";
      showProblem(error);
    }
  };
}

let hintTimer = 0;
function hint() {
  const text = line.field.value;
  clearTimeout(hintTimer);
  hintTimer = setTimeout(() => ($("hint").textContent = languageHint(text, offered.languages, $("language").value)), HINT_AFTER_MS);
}
line.field.addEventListener("input", hint);

// -- level and recording ----------------------------------------------------------------------------------------------

let shown = 0;
function drawLevel() {
  const loudness = session?.tap ? Math.max(0, 1 + Math.log10(session.tap.level + 1e-6) / 2.2) : 0; // -44 dBFS to full scale
  shown = Math.max(loudness, shown * 0.9);
  $("level").style.scale = `${shown.toFixed(3)} 1`;
  $("microphone").dataset.speaking = String(microphone.speaking);
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

/** @param {VivavoceError} error */
function showProblem({ code, message, remedy }) {
  journal.add("error", `${code}: ${message}`);
  $("problem").dataset.code = code;
  $("problem-message").textContent = message;
  $("problem-remedy").textContent = remedy ?? "";
  $("hear").hidden = code !== "autoplay-blocked";
  $("problem").hidden = false;
}

function hideProblem() {
  $("problem").hidden = true;
  delete $("problem").dataset.code;
}

$("hear").onclick = async () => {
  hideProblem();
  await session?.resume();
};
$("problem-close").onclick = hideProblem;

offer();
window.vivavoce = { recorder, line, microphone, get session() { return session; } }; // for the console and the tests
