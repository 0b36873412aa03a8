// Asks the server how it is, again and again while somebody can see the page, and keeps two minutes of figures.

import { get } from "./api.js";

/** Seconds that are kept. */
export const WINDOW = 120;
const OFTEN = 1000;
const SELDOM = 4000;

const listeners = [];
let often = false;
let timer = null;
let asking = false;
let before = null;
/** Figures over time, the oldest first: `time` in seconds, and the figures of `figuresOf`. */
export const samples = [];

/** Calls back with each answer, or with null and an error. */
export const onStatus = (listener) => listeners.push(listener);

/** Asks now, and from now on. */
export function startWatch() {
  document.addEventListener("visibilitychange", ask);
  ask();
}

/** How often: every second where figures are shown. */
export function watchClosely(closely) {
  often = closely;
  ask();
}

/** Asks at once, unless it is asking already. */
export async function ask() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  let ready = false;
  try {
    const status = await get("/status");
    // Degraded: a device is out of order, the others answer.
    ready = status.status === "ready" || status.status === "degraded";
    keep(status, performance.now() / 1000);
    tell(status, null);
  } catch (error) {
    before = null;
    tell(null, error);
  } finally {
    asking = false;
    timer = setTimeout(ask, often || !ready ? OFTEN : SELDOM);
  }
}

function tell(status, error) {
  for (const listener of listeners) listener(status, error);
}

/** The sum over all engines. */
export const sum = (status, figure) => status.instances.reduce((total, instance) => total + figure(instance), 0);

function keep(status, time) {
  const now = { time, generated: sum(status, (i) => i.generated_tokens), prompt: sum(status, (i) => i.prompt_tokens) };
  // A server that was started anew counts from nothing.
  const comparable = before && now.generated >= before.generated && now.time > before.time;
  const rate = (name) => (comparable ? (now[name] - before[name]) / (now.time - before.time) : null);
  const blocks = sum(status, (i) => i.cache.blocks);
  samples.push({
    time,
    generated: rate("generated"),
    prompt: rate("prompt"),
    hli: status.instances.length > 0 ? Math.max(...status.instances.map((i) => i.hli)) : null,
    running: sum(status, (i) => i.running),
    waiting: sum(status, (i) => i.waiting),
    cache: blocks > 0 ? (sum(status, (i) => i.cache.used) / blocks) * 100 : null,
  });
  before = now;
  while (samples[0].time < time - WINDOW - 10) samples.shift();
}
