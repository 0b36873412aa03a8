// Texts of the page in the reader's language: that of the browser, until another is chosen, which is remembered.

import { TEXTS } from "./texts.js";
import { recall, remember } from "./store.js";

const LANGUAGES = ["en", "zh"];
const TAGS = { en: "en", zh: "zh-CN" };
const listeners = [];
let current = 0;

/** A text, with `{name}` replaced by values. A word of the server that the table does not have (`state_NAME`) stays that word. */
export function t(key, values = {}) {
  const text = TEXTS[key]?.[current] ?? key.slice(key.indexOf("_") + 1);
  return text.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** `en` or `zh`. */
export const language = () => LANGUAGES[current];

/** A number in the way of the language. */
export const number = (value, digits = 0) =>
  value.toLocaleString(TAGS[language()], { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Calls back when the language has changed. */
export const onLanguage = (listener) => listeners.push(listener);

/** Takes the remembered language, or the browser's. */
export function startLanguage() {
  const wanted = recall("language") ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");
  apply(Math.max(LANGUAGES.indexOf(wanted), 0));
}

/** Changes to the other language. */
export function switchLanguage() {
  apply(1 - current);
  remember("language", language());
  for (const listener of listeners) listener();
}

/** Fills the texts of the page itself: `data-text`, `data-label`, `data-placeholder` hold keys. */
function apply(index) {
  current = index;
  document.documentElement.lang = TAGS[language()];
  document.title = t("title");
  for (const node of document.querySelectorAll("[data-text]")) node.textContent = t(node.dataset.text);
  for (const node of document.querySelectorAll("[data-label]")) node.setAttribute("aria-label", t(node.dataset.label));
  for (const node of document.querySelectorAll("[data-placeholder]")) node.placeholder = t(node.dataset.placeholder);
}
