// The text a session has sent and not yet heard out, with the time of every piece: so an utterance's first letter has a time.

/** A queue of text. Utterances take their share from its front when they end. */
export class SentText {
  /** `closes`: an utterance ends with this piece, whatever follows. @type {{text: string, at: number, closes: boolean}[]} */
  #pieces = [];

  get text() {
    return this.#pieces.map((piece) => piece.text).join("");
  }

  /** As much of it as the next utterance can say. */
  get first() {
    const last = this.#pieces.findIndex((piece) => piece.closes);
    return (last < 0 ? this.#pieces : this.#pieces.slice(0, last + 1)).map((piece) => piece.text).join("");
  }

  /** When the first letter was sent; white space is not spoken. Infinity without one. */
  get firstAt() {
    return this.#pieces.find((piece) => piece.text.trim())?.at ?? Infinity;
  }

  /** @param {string} text @param {number} at */
  add(text, at) {
    this.#pieces.push({ text, at, closes: false });
  }

  /** What was added so far and what follows are not one utterance. */
  close() {
    const last = this.#pieces.at(-1);
    if (last) last.closes = true;
  }

  clear() {
    this.#pieces = [];
  }

  /** Removes what an utterance has said, letter for letter; white space may differ. @param {string} spoken */
  take(spoken) {
    let letters = spoken.replace(/\s/g, "").length;
    while (letters > 0 && this.#pieces.length) {
      const piece = this.#pieces[0];
      const end = endOfLetters(piece.text, letters);
      letters -= piece.text.slice(0, end).replace(/\s/g, "").length;
      piece.text = piece.text.slice(end);
      if (!piece.text) this.#pieces.shift();
    }
    while (this.#pieces.length && !this.#pieces[0].text.trim()) this.#pieces.shift();
  }
}

/** Where the first `letters` letters of a text end. @param {string} text @param {number} letters */
export function endOfLetters(text, letters) {
  let end = 0;
  while (end < text.length && letters > 0) if (text[end++].trim()) letters--;
  return end;
}
