// What a session has sent, until it is known to have arrived: a socket that breaks takes with it what was on its way.

const MOST = 2000; // messages; each is a delta of text

/** Messages in order, each of them with a number. */
export class Outgoing {
  /** @type {string[]} */
  #kept = [];
  #before = 0; // messages that are not kept any more
  #pings = []; // numbers of messages whose answer tells that they arrived

  /** @param {string} message */
  add(message) {
    this.#kept.push(message);
    if (this.#kept.length > MOST) this.#forget(this.#before + 1);
  }

  /** The message added last is a ping. */
  pinged() {
    this.#pings.push(this.#before + this.#kept.length);
  }

  /** The answer to the oldest ping is there, and so was all that went before it. */
  ponged() {
    this.#forget(this.#pings.shift() ?? 0);
  }

  /** What is behind the first `received`, to be sent again; null if that is not kept. @param {number} received */
  behind(received) {
    if (received < this.#before) return null;
    this.#forget(received);
    return [...this.#kept];
  }

  /** @param {number} count of all messages */
  #forget(count) {
    if (count <= this.#before) return;
    this.#kept.splice(0, count - this.#before);
    this.#before = count;
  }
}
