// An answer token by token: how probable each was, and what else the model thought of. Shown on hover and on focus; the arrow keys go
// from token to token, so that a long answer is one stop of the Tab key.

import { el } from "./dom.js";
import { number, t } from "./i18n.js";

/** Alternatives that are asked for. */
export const ALTERNATIVES = 5;

/** Takes what the server says of tokens: those that are parts of one character become one entry. */
export class TokenList {
  entries = [];
  #decoder = new TextDecoder();
  #logprob = 0;

  push(content) {
    for (const token of content) {
      this.#logprob += token.logprob;
      const bytes = token.bytes ? new Uint8Array(token.bytes) : new TextEncoder().encode(token.token);
      const text = this.#decoder.decode(bytes, { stream: true });
      if (text === "" && bytes.length > 0) continue;
      const others = token.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob }));
      this.entries.push({ text, logprob: this.#logprob, others });
      this.#logprob = 0;
    }
  }
}

const percent = (logprob) => `${number(Math.exp(logprob) * 100, 1)} %`;
/** White space that can be seen. */
const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

/** Five steps from improbable to probable. */
const step = (logprob) => Math.min(Math.floor(Math.exp(logprob) * 5), 4);

/** The view of a list of tokens. */
export function tokenView(entries) {
  const view = el("div", { class: "tokens", role: "group", "aria-label": t("tokensLabel") });
  const card = el("div", { class: "token-card", role: "status", hidden: true });
  const nodes = entries.map((entry, at) =>
    el("span", { class: `token p${step(entry.logprob)}`, "data-at": at, tabindex: at === 0 ? "0" : "-1", role: "button", text: entry.text,
      "aria-label": t("tokenLabel", { token: visible(entry.text), share: percent(entry.logprob) }) }));
  const show = (event) => {
    const node = event.target.closest?.(".token");
    if (!node) return;
    fillCard(card, entries[Number(node.dataset.at)]);
    card.hidden = false;
    place(card, node, view);
  };
  const hide = () => { card.hidden = true; };
  const move = (event) => {
    const at = nodes.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (at < 0 || to === undefined || !nodes[to]) return;
    event.preventDefault();
    nodes[at].tabIndex = -1;
    nodes[to].tabIndex = 0;
    nodes[to].focus();
  };
  view.append(el("div", { class: "token-text" }, nodes), card);
  for (const event of ["mouseover", "focusin"]) view.addEventListener(event, show);
  view.addEventListener("mouseleave", hide);
  view.addEventListener("focusout", hide);
  view.addEventListener("keydown", move);
  return view;
}

function fillCard(card, entry) {
  const chosen = entry.others.findIndex((other) => other.logprob === entry.logprob && other.text === entry.text);
  const rows = chosen < 0 ? [{ ...entry, chosen: true }, ...entry.others] : entry.others.map((other, at) => ({ ...other, chosen: at === chosen }));
  const row = (other) =>
    el("tr", { class: other.chosen ? "chosen" : null }, el("th", { scope: "row", text: visible(other.text) }), el("td", { text: percent(other.logprob) }),
      el("td", {}, el("meter", { min: "0", max: "1", value: Math.exp(other.logprob), "aria-hidden": "true" }), other.chosen ? el("span", { class: "hidden-text", text: t("chosen") }) : null));
  card.replaceChildren(el("table", {}, el("caption", { text: t("alternatives") }), el("tbody", {}, rows.map(row))));
}

/** Below the token, within the view. */
function place(card, node, view) {
  const box = view.getBoundingClientRect();
  const spot = node.getClientRects()[0] ?? node.getBoundingClientRect();
  const left = Math.max(Math.min(spot.left - box.left, box.width - card.offsetWidth), 0);
  card.style.left = `${left}px`;
  card.style.top = `${spot.bottom - box.top + 6}px`;
}
