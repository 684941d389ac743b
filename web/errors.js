// What can go wrong between a page and the gateway, each in words and with what to do about it.

/**
 * Every error of this client. `code` is for programs, `message` and `remedy` are for people.
 *
 * Codes made here: `gateway-unreachable`, `engine-not-ready`, `gateway-lost`, `webrtc-failed`, `listener-replaced`,
 * `autoplay-blocked`, `timeout`, `closed`. Any other code came from the gateway's own `error` event or WHEP answer.
 */
export class VivavoceError extends Error {
  /**
   * @param {string} code
   * @param {string} message
   * @param {{remedy?: string, retryable?: boolean, cause?: unknown}} [details]
   */
  constructor(code, message, { remedy = "", retryable = false, cause } = {}) {
    super(message, { cause });
    this.name = "VivavoceError";
    this.code = code;
    this.remedy = remedy;
    this.retryable = retryable;
  }
}

/** Why no connection to the gateway came about: a browser hides it from WebSocket errors, so ask `/ready`, and then the same address.
 * @param {URL} gateway where the WebSocket was to go, with http for ws
 * @returns {Promise<VivavoceError>} */
export async function whyUnreachable(gateway) {
  try {
    const answer = await fetch(new URL("../ready", gateway), { cache: "no-store" });
    if (answer.status === 503) {
      return new VivavoceError("engine-not-ready", "The gateway is up, but its engine is not ready to speak yet.", {
        remedy: "It may still be loading its voice. Wait a few seconds and connect again.",
        retryable: true,
      });
    }
    const refusal = await (await fetch(gateway, { cache: "no-store" })).json().catch(() => null);
    if (refusal?.code) {
      return new VivavoceError(refusal.code, `The gateway refused the session: ${refusal.message}.`, {
        remedy: refusal.retryable ? "Try again in a few seconds." : "",
        retryable: refusal.retryable,
      });
    }
    return new VivavoceError("gateway-unreachable", `The gateway at ${gateway.host} answers, but refused the connection.`, {
      remedy: "Reload the page, so that page and gateway are of one version.",
    });
  } catch (cause) {
    return new VivavoceError("gateway-unreachable", `No gateway answers at ${gateway.host}.`, {
      remedy: "Start it with “make run” and connect again.",
      retryable: true,
      cause,
    });
  }
}

/** The error a WHEP answer stands for.
 * @param {Response} answer
 * @returns {Promise<VivavoceError>} */
export async function whepError(answer) {
  const body = await answer.text();
  let problem = {};
  try {
    problem = JSON.parse(body);
  } catch {
    // plain text
  }
  const said = problem.error?.message ?? problem.message ?? problem.detail ?? problem.title ?? body.slice(0, 200);
  const code = problem.error?.code ?? problem.code ?? `whep-${answer.status}`;
  return new VivavoceError(code, `The gateway refused the audio connection (${answer.status}): ${said || answer.statusText}`, {
    remedy: answer.status === 503 ? "It is busy or still starting. Try again in a few seconds." : "Connect again.",
    retryable: answer.status >= 500 || answer.status === 409,
  });
}

/** What was thrown while connecting, as an error of this client. @param {any} cause */
export function asError(cause) {
  if (cause instanceof VivavoceError) return cause;
  if (cause?.name === "TimeoutError") {
    return new VivavoceError("timeout", "The gateway took too long to answer.", { remedy: "Connect again.", retryable: true, cause });
  }
  if (cause?.name === "AbortError") return new VivavoceError("closed", "Connecting was given up.", { cause });
  return new VivavoceError("webrtc-failed", `The connection could not be set up: ${cause?.message ?? cause}`, { remedy: "Connect again.", cause });
}
