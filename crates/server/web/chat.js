// The conversation: sends it, takes the answer as it comes, changes and forgets it.
//
// At most one answer grows at a time. The messages are the state, their views follow; what is stored is the messages without
// figures of tokens, which would fill the browser's store.

import { ServerError, chat } from "./api.js";
import { button, byId, el } from "./dom.js";
import { onLanguage, t } from "./i18n.js";
import { MessageView } from "./message.js";
import { requestBody, showsTokens } from "./settings.js";
import { recallConversation, remember } from "./store.js";
import { TokenList } from "./tokens.js";

const messages = [];
const views = [];
let running = null;

const act = {
  /** Another text for a message of the user: what came after it is forgotten. */
  edit(message, content) {
    cut(messages.indexOf(message));
    add({ role: "user", content });
    answer();
  },
  /** Another answer to the same question. */
  regenerate(message) {
    cut(messages.indexOf(message));
    answer();
  },
};

/** Shows the stored conversation and listens to the page. */
export function startChat() {
  for (const message of recallConversation()) add(message);
  const field = byId("question");
  const send = () => {
    const content = field.value;
    if (running || content.trim() === "") return;
    field.value = "";
    fit(field);
    add({ role: "user", content });
    answer();
  };
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  field.addEventListener("input", () => fit(field));
  field.addEventListener("keydown", (event) => {
    // While an input method composes, Enter belongs to it.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", clear);
  byId("export").addEventListener("click", save);
  onLanguage(redraw);
  redraw();
}

/** All views anew. */
export function redraw() {
  for (const view of views) view.draw({ tokens: showsTokens() });
  byId("announcer").textContent = "";
  hint();
}

/** Ends the answer that grows. Returns whether there was one. */
export function stop() {
  running?.abort();
  return running !== null;
}

function add(message) {
  const view = new MessageView(message, act);
  messages.push(message);
  views.push(view);
  byId("messages").append(view.element);
  hint();
  store();
  return view;
}

/** Forgets the messages from here on. */
function cut(from) {
  stop();
  for (const view of views.splice(from)) view.element.remove();
  messages.length = from;
  store();
}

function clear() {
  if (messages.length > 0 && !confirm(t("clearSure"))) return;
  cut(0);
  hint();
  byId("failure").replaceChildren();
  byId("question").focus();
}

function hint() {
  byId("empty").hidden = messages.length > 0;
  for (const id of ["clear", "export"]) byId(id).disabled = messages.length === 0;
}

function store() {
  const kept = messages.map(({ role, content, reasoning, speed, ending }) => ({ role, content, reasoning, speed, ending }));
  byId("not-stored").hidden = remember("conversation", kept);
}

/** Hands the conversation out as a file. */
function save() {
  const text = JSON.stringify({ messages: messages.map(({ role, content, reasoning }) => ({ role, content, reasoning_content: reasoning })) }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: "conversation.json" }).click();
  URL.revokeObjectURL(url);
}

/** Asks for an answer to the conversation and shows it as it comes. */
async function answer() {
  const control = new AbortController();
  const asked = messages.map(({ role, content }) => ({ role, content }));
  const message = { role: "assistant", content: "", growing: true };
  const view = add(message);
  busy(control);
  byId("failure").replaceChildren();
  try {
    await receive(message, view, requestBody(asked), control.signal);
  } catch (error) {
    if (error.name === "AbortError") message.ending = "stopped";
    else fail(error, message);
  }
  message.growing = false;
  // Cut off while it grew: it is no longer part of the conversation.
  const kept = messages.includes(message);
  if (kept && message.content === "" && !message.reasoning) cut(messages.indexOf(message));
  if (kept) finish(message, view);
  if (running === control) busy(null);
}

async function receive(message, view, body, signal) {
  const begun = performance.now();
  const list = body.logprobs ? new TokenList() : null;
  let first = null;
  let last = null;
  for await (const chunk of chat(body, signal)) {
    const choice = chunk.choices[0];
    if (choice?.delta.content || choice?.delta.reasoning_content) {
      last = performance.now();
      first ??= last;
      message.content += choice.delta.content ?? "";
      if (choice.delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
      draw(view);
    }
    if (list && choice?.logprobs?.content) list.push(choice.logprobs.content);
    if (choice?.finish_reason === "length") message.ending = "atLimit";
    if (chunk.usage) message.speed = speed(chunk.usage.completion_tokens, begun, first, last);
  }
  if (list) message.tokens = list.entries;
}

function speed(tokens, begun, first, last) {
  const seconds = (last - first) / 1000;
  return { tokens, first: first === null ? undefined : (first - begun) / 1000, rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : undefined };
}

/** At most once a frame, and following the end if the reader was there. */
function draw(view) {
  if (view.waiting) return;
  view.waiting = true;
  requestAnimationFrame(() => {
    view.waiting = false;
    const follows = atEnd();
    view.grow();
    if (follows) scrollTo({ top: document.documentElement.scrollHeight });
  });
}

const atEnd = () => innerHeight + scrollY > document.documentElement.scrollHeight - 120;

function finish(message, view) {
  const follows = atEnd();
  view.draw({ tokens: showsTokens() });
  store();
  // Said once, when it is whole: a screen reader that reads every token is of no use.
  byId("announcer").textContent = message.content === "" ? "" : t("answered", { text: message.content });
  if (follows) scrollTo({ top: document.documentElement.scrollHeight });
}

function fail(error, message) {
  const known = error instanceof ServerError;
  if (!known) console.error(error);
  if (message.content !== "") message.ending = "incomplete";
  const again = button(t("tryAgain"), () => {
    const at = messages.indexOf(message);
    if (at >= 0) cut(at);
    if (messages.at(-1)?.role === "user") answer();
  });
  byId("failure").replaceChildren(el("p", { text: known ? error.message : t("broken") }), again);
}

/** Shows whether an answer grows. */
function busy(control) {
  running = control;
  // Of the two buttons one goes; the focus must not go with it.
  if ([byId("stop"), byId("send"), document.body].includes(document.activeElement)) byId("question").focus({ preventScroll: true });
  byId("stop").hidden = control === null;
  byId("send").hidden = control !== null;
}

/** As high as its text, up to a limit of the style. */
function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}
