// The event log: what happened, when, newest first.

const MOST = 300;

/** Lists events in an element; times are seconds since `start`. */
export class Journal {
  #list;
  #startedAt = performance.now();

  /** @param {HTMLOListElement} list */
  constructor(list) {
    this.#list = list;
  }

  start() {
    this.#startedAt = performance.now();
  }

  /** @param {string} what @param {string} [details] */
  add(what, details = "") {
    const item = document.createElement("li");
    const parts = [["time", ((performance.now() - this.#startedAt) / 1000).toFixed(3)], ["b", what], ["span", details]];
    for (const [kind, text] of parts) item.append(Object.assign(document.createElement(kind), { textContent: text }), " ");
    this.#list.prepend(item);
    while (this.#list.childElementCount > MOST) this.#list.lastChild.remove();
  }
}
