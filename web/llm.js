// Text as language models write it: a simulator, and any API that speaks OpenAI's chat completions.

import { VivavoceError } from "./errors.js";

const TOKEN = /\s*\S{1,5}/gu; // about as long as a tokenizer's

/**
 * Writes a text token by token, with one pause behind the middle of it, at a word's end.
 * @param {string} text
 * @param {{tokensPerSecond: number, pauseS: number, signal: AbortSignal}} options
 * @yields {string}
 */
export async function* simulate(text, { tokensPerSecond, pauseS, signal }) {
  const tokens = text.match(TOKEN) ?? [];
  const pauseAt = tokens.findIndex((token, i) => i >= tokens.length / 2 && /^\s/.test(token));
  let due = performance.now();
  for (const [i, token] of tokens.entries()) {
    if (i === pauseAt) due += pauseS * 1000;
    await until(due, signal);
    if (signal.aborted) return;
    yield token;
    due += 1000 / tokensPerSecond;
  }
}

/**
 * One answer, as it is written. The key goes into a header of this one request.
 * @param {{base: string, model: string, key: string, messages: {role: string, content: string}[], signal: AbortSignal}} options
 *   `base`: the address up to and without `/chat/completions`, such as https://api.example.com/v1
 * @yields {string}
 * @throws {VivavoceError} `chat-failed`
 */
export async function* chat({ base, model, key, messages, signal }) {
  let url;
  try {
    url = new URL(`${base.trim().replace(/(\/chat\/completions)?\/*$/, "")}/chat/completions`);
  } catch (cause) {
    throw chatFailed("The chat API's address is not a URL.", "Write it whole, such as http://127.0.0.1:11434/v1.", cause);
  }
  /** @type {Response} */
  let answer;
  try {
    answer = await fetch(url, {
      method: "POST",
      headers: { "content-type": "application/json", accept: "text/event-stream", ...(key && { authorization: `Bearer ${key}` }) },
      body: JSON.stringify({ model, messages, stream: true }),
      signal,
      referrerPolicy: "no-referrer",
      credentials: "omit",
    });
  } catch (cause) {
    if (signal.aborted) return;
    throw chatFailed(`No answer from ${url.host}.`, `Is it running, and does it let pages of ${location.origin} ask (CORS)?`, cause);
  }
  if (!answer.ok) throw chatFailed(`${url.host} refused (${answer.status}): ${await reason(answer)}`, remedyFor(answer.status));
  try {
    for await (const data of serverSentEvents(answer.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw chatFailed(`${url.host} broke off: ${event.error.message ?? event.error}`, "Ask again.");
      const text = event.choices?.[0]?.delta?.content;
      if (text) yield text;
    }
  } catch (cause) {
    if (signal.aborted) return;
    if (cause instanceof VivavoceError) throw cause;
    throw chatFailed(`The answer of ${url.host} broke off: ${cause.message}`, "Ask again.", cause);
  }
}

/** The `data` of each event of a stream. @param {ReadableStream<Uint8Array>} body @yields {string} */
export async function* serverSentEvents(body) {
  let rest = "";
  let data = [];
  for await (const piece of read(body.pipeThrough(new TextDecoderStream()))) {
    const lines = (rest + piece).split(/\r\n|\n|\r(?!$)/); // a CR at the very end may be half of a CRLF
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line !== "" || !data.length) continue;
      yield data.join("\n");
      data = [];
    }
  }
  if (rest.startsWith("data:")) data.push(rest.slice(5).trim());
  if (data.length) yield data.join("\n");
}

/** Not every browser lets one iterate a stream. @template T @param {ReadableStream<T>} stream @yields {T} */
async function* read(stream) {
  const reader = stream.getReader();
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** @param {Response} answer */
async function reason(answer) {
  const body = await answer.text();
  try {
    const { error, message } = JSON.parse(body);
    return error?.message ?? message ?? error ?? body;
  } catch {
    return body.slice(0, 200) || answer.statusText;
  }
}

/** @param {number} status */
function remedyFor(status) {
  if (status === 401 || status === 403) return "Check the key.";
  if (status === 404) return "Check the address and the model's name.";
  return status === 429 || status >= 500 ? "Ask again in a moment." : "Check what was asked.";
}

const chatFailed = (message, remedy, cause) => new VivavoceError("chat-failed", message, { remedy, cause, retryable: true });

/** @param {number} at performance.now() milliseconds @param {AbortSignal} signal */
function until(at, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, Math.max(0, at - performance.now()));
    signal.addEventListener("abort", done);
  });
}
