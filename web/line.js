// The live line: a text field from which every letter leaves as it is typed, so that nothing in it can be changed.

import { endOfLetters, lettersIn } from "./letters.js";

/** Makes a textarea append-only. Input methods compose freely; what they compose is sent when they are done. */
export class LiveLine {
  /** @type {(text: string) => void} new text, to be sent */
  ontext = () => {};
  onenter = () => {};

  #sent = "";
  #composing = false;

  /** @param {HTMLTextAreaElement} field */
  constructor(field) {
    this.field = field;
    field.addEventListener("beforeinput", (event) => this.#beforeInput(event));
    field.addEventListener("input", () => this.#composing || this.#reconcile());
    field.addEventListener("compositionstart", () => {
      this.#composing = true;
      this.#caretToEnd();
    });
    field.addEventListener("compositionend", () => {
      this.#composing = false;
      this.#reconcile();
    });
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || event.key !== "Enter") return;
      event.preventDefault();
      this.onenter();
    });
  }

  /** Types for the user. @param {string} text */
  append(text) {
    this.field.value = this.#sent + text;
    this.#reconcile();
  }

  clear() {
    this.#sent = this.field.value = "";
  }

  /** Lets go of its beginning, which has been said. @param {number} letters how many at its end are still to be said; white space is none */
  keep(letters) {
    const said = lettersIn(this.#sent) - letters;
    if (this.#composing || said <= 0 || this.field.value !== this.#sent) return;
    this.#sent = this.field.value = this.#sent.slice(endOfLetters(this.#sent, said)).trimStart();
    this.#caretToEnd();
  }

  /** @param {InputEvent} event */
  #beforeInput(event) {
    if (this.#composing || event.isComposing) return;
    if (event.inputType === "insertLineBreak" || event.inputType === "insertParagraph") {
      event.preventDefault(); // Enter of on-screen keyboards that name no key
      this.onenter();
      return;
    }
    const atEnd = this.field.selectionStart === this.field.value.length;
    if (event.inputType === "insertText" && atEnd) return;
    event.preventDefault();
    if (!event.inputType.startsWith("insert")) return; // deleting, undoing: what is sent is sent
    const text = event.data ?? event.dataTransfer?.getData("text/plain") ?? "";
    if (text) this.append(text.replace(/\s*\n\s*/g, " ")); // pasted, dropped, or typed with the caret elsewhere
  }

  /** Whatever the browser did to the field: what was sent stays, what is new is sent. */
  #reconcile() {
    const value = this.field.value;
    if (!value.startsWith(this.#sent)) this.field.value = this.#sent;
    else if (value.length > this.#sent.length) {
      const fresh = value.slice(this.#sent.length);
      this.#sent = value;
      this.ontext(fresh);
    }
    this.#caretToEnd();
  }

  #caretToEnd() {
    this.field.setSelectionRange(this.field.value.length, this.field.value.length);
    this.field.scrollTop = this.field.scrollHeight;
  }
}
