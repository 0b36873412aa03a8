// The way to the server: requests with the key, errors as sentences, answers as they come.

import { t } from "./i18n.js";
import { EventParser } from "./sse.js";
import { key } from "./store.js";

/** Tells whoever listens that the server wants a key (`key`). */
export const wishes = new EventTarget();

/** What went wrong, as a sentence for people. */
export class ServerError extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
  }
}

async function send(path, { body, signal } = {}) {
  const headers = {};
  if (key() !== "") headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const options = { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store" };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(t("unreachable"));
  }
  if (response.ok) return response;
  if (response.status === 401) wishes.dispatchEvent(new Event("key"));
  throw await refusal(response);
}

async function refusal(response) {
  const said = await response.json().then((body) => body.error?.message, () => null);
  const sentence = (said ?? "").replace(/([^.!?。])$/, "$1.");
  const wait = response.headers.get("retry-after");
  const parts = [t("refused", { status: response.status }), sentence, wait ? t("retryAfter", { seconds: wait }) : ""];
  return new ServerError(parts.filter((part) => part !== "").join(" "), response.status);
}

/** The JSON at a path. */
export async function get(path, signal) {
  const response = await send(path, { signal });
  return response.json();
}

/** Chunks of a chat completion as they come; ends when the server says so. */
export async function* chat(body, signal) {
  const response = await send("/v1/chat/completions", { body, signal });
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(t("broken"));
    }
    // A stream that is whole ends with a word of its own.
    if (part.done) throw new ServerError(t("broken"));
    for (const { data } of parser.push(part.value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message);
      yield chunk;
    }
  }
}
