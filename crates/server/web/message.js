// One message of a conversation on the page. In: a message, which may still be growing. Out: an article with its text, its thinking
// folded, its buttons, its figures.

import { button, copy, el } from "./dom.js";
import { number, t } from "./i18n.js";
import { MarkdownView } from "./markdown.js";
import { tokenView } from "./tokens.js";

/** The view of a message. `act` has what its buttons do: `edit`, `regenerate`. */
export class MessageView {
  #body = el("div", { class: "body" });
  #text = null;
  #thinking = null;

  constructor(message, act) {
    this.message = message;
    this.act = act;
    this.heading = el("h3", { class: "who" });
    this.actions = el("div", { class: "actions" });
    this.figures = el("p", { class: "figures" });
    this.element = el("article", { class: `message ${message.role}` }, this.heading, this.#body, el("div", { class: "foot" }, this.figures, this.actions));
    this.draw();
  }

  /** All of it anew: another language, another way to show it. */
  draw({ tokens = false } = {}) {
    const { message } = this;
    this.heading.textContent = t(message.role === "user" ? "you" : "model");
    this.#body.replaceChildren();
    this.#thinking = null;
    const showsTokens = tokens && message.tokens?.length > 0 && !message.growing;
    const text = el("div", { class: "text" });
    this.#body.append(text);
    if (message.role === "user") text.textContent = message.content;
    else if (showsTokens) text.replaceWith(tokenView(message.tokens));
    this.#text = message.role === "assistant" && !showsTokens ? new MarkdownView(text) : null;
    this.grow();
    this.#buttons();
  }

  /** What has come since. */
  grow() {
    const { message } = this;
    this.element.setAttribute("aria-busy", message.growing ? "true" : "false");
    this.element.classList.toggle("growing", message.growing === true);
    if (message.reasoning) this.#showThinking();
    this.#text?.update(message.content);
    this.figures.textContent = figures(message);
  }

  #showThinking() {
    const { message } = this;
    if (!this.#thinking) {
      const summary = el("summary");
      const text = el("div", { class: "text" });
      const details = el("details", { class: "thinking" }, summary, text);
      this.#thinking = { summary, view: new MarkdownView(text) };
      this.#body.prepend(details);
    }
    this.#thinking.summary.textContent = t(message.growing && message.content === "" ? "thinkingNow" : "thinking");
    this.#thinking.view.update(message.reasoning);
  }

  #buttons() {
    const { message } = this;
    const copied = async (event) => {
      const pressed = event.currentTarget;
      pressed.textContent = t((await copy(message.content)) ? "copied" : "copyFailed");
      setTimeout(() => { pressed.textContent = t("copy"); }, 2000);
    };
    const own = message.role === "user"
      ? button(t("edit"), () => this.#edit(), { class: "quiet", "aria-label": t("editLabel") })
      : button(t("regenerate"), () => this.act.regenerate(message), { class: "quiet" });
    this.actions.replaceChildren(button(t("copy"), copied, { class: "quiet", "aria-label": t("copyMessage") }), own);
    this.actions.hidden = message.growing === true;
  }

  /** The text in a field; sending it again forgets what came after. */
  #edit() {
    const field = el("textarea", { rows: "3", "aria-label": t("editLabel") });
    field.value = this.message.content;
    const end = () => {
      this.draw();
      this.actions.querySelector("button:last-child").focus();
    };
    const save = () => {
      if (field.value.trim() === "") return field.focus();
      this.act.edit(this.message, field.value);
    };
    const keys = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
    };
    field.addEventListener("keydown", keys);
    this.#body.replaceChildren(field, el("div", { class: "actions" }, button(t("saveAndSend"), save, { class: "primary" }), button(t("cancel"), end)));
    this.actions.hidden = true;
    field.focus();
  }
}

/** Speed and size of an answer, or how it ended if not well. */
function figures(message) {
  const parts = [];
  if (message.ending) parts.push(t(message.ending));
  const speed = message.speed;
  if (speed?.tokens) parts.push(t("tokensCount", { count: number(speed.tokens) }));
  if (speed?.first !== undefined) parts.push(t("firstAfter", { seconds: number(speed.first, 2) }));
  if (speed?.rate) parts.push(t("tokensPerSecond", { rate: number(speed.rate, speed.rate < 10 ? 1 : 0) }));
  return parts.join(" · ");
}
