// Which language a text seems to be in: enough to tell somebody that the voice does not speak it, never to choose one.

const SCRIPTS = [
  ["japanese", /[\p{Script=Hiragana}\p{Script=Katakana}]/u],
  ["korean", /\p{Script=Hangul}/u],
  ["chinese", /\p{Script=Han}/u],
  ["russian", /\p{Script=Cyrillic}/u],
];
const OTHER_SCRIPT = /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Greek}\p{Script=Devanagari}\p{Script=Thai}\p{Script=Bengali}\p{Script=Tamil}]/u;

// The commonest short words; those that two of them share tell nothing and are left out.
const WORDS = {
  english: "the and of is was are were with that this for you have not they from be it",
  german: "der die das und ist nicht ein eine ich sie mit auf den dem zu im auch wir für",
  french: "le les et est une des dans pour pas vous je nous avec sur qui que du au il elle",
  spanish: "el los las y una está por pero muy como más del lo su son fue hay tiene",
  italian: "il gli che di è della sono anche più questo nel per non mi ci molto alla",
  portuguese: "os uma não um ao você isso muito foi são tem pelo na ele seu em meu mas",
};
const LEAST_WORDS = 2;

/** A name as checkpoints list them, "another" for a script that no checkpoint speaks, or null: no telling.
 * @param {string} text @returns {string | null} */
export function seemingLanguage(text) {
  for (const [language, script] of SCRIPTS) if (script.test(text)) return language;
  if (OTHER_SCRIPT.test(text)) return "another";
  const words = text.toLowerCase().match(/\p{L}+/gu) ?? [];
  const counts = Object.entries(WORDS).map(([language, known]) => {
    const set = new Set(known.split(" "));
    return { language, count: words.filter((word) => set.has(word)).length };
  });
  const [best, next] = counts.sort((a, b) => b.count - a.count);
  return best.count >= LEAST_WORDS && best.count >= 2 * next.count ? best.language : null;
}

/** What to say to somebody whose text the voice does not speak; "" if it seems to, or if there is no telling.
 * @param {string} text @param {string[]} languages what the checkpoint speaks @param {string} chosen "auto" or one of them
 * @returns {string} */
export function languageHint(text, languages, chosen) {
  const seems = seemingLanguage(text);
  const spoken = languages.filter((name) => name !== "auto");
  if (!seems || !spoken.length) return "";
  if (!spoken.includes(seems)) {
    const what = seems === "another" ? "This looks like a language" : `This looks like ${named(seems)}, which`;
    return `${what} the voice does not speak. It knows ${spoken.map(named).join(", ")}.`;
  }
  return chosen === "auto" || chosen === seems ? "" : `This looks like ${named(seems)}, and the language is set to ${named(chosen)}.`;
}

/** A checkpoint's name for people: "chinese" is Chinese, "uncle_fu" is Uncle fu. @param {string} name */
export const named = (name) => name.replaceAll("_", " ").replace(/^./, (letter) => letter.toUpperCase());
