// Positions in a text counted in letters: what was typed and what is told of it may differ in white space.

export { endOfLetters } from "./sent.js";

/** @param {string} text */
export const lettersIn = (text) => text.replace(/\s/g, "").length;
