// The dashboard: what the server says of itself, as figures, lines, a map and tables. What it does not know is called unknown, what is
// simulated is called simulated.

import { Chart } from "./charts.js";
import { byId, el } from "./dom.js";
import { number, onLanguage, t } from "./i18n.js";
import { memoryMap } from "./memory.js";
import { onStatus, samples, sum } from "./watch.js";

const CHARTS = [
  { name: "generatedRate", figure: (sample) => sample.generated, top: 10 },
  { name: "promptRate", figure: (sample) => sample.prompt, top: 10 },
  { name: "hli", figure: (sample) => sample.hli, top: 1, digits: 2 },
  { name: "running", figure: (sample) => sample.running, top: 5 },
  { name: "waiting", figure: (sample) => sample.waiting, top: 5 },
  { name: "cacheUse", figure: (sample) => sample.cache, top: 100, unit: " %" },
];

let charts = [];
let last = null;
let lastError = null;
/** By device; an engine that is too busy for a new map keeps the old one on the page. */
const maps = new Map();

/** Builds the empty dashboard and fills it with each answer. */
export function startDashboard() {
  charts = CHARTS.map((chart) => new Chart(chart));
  byId("charts").append(...charts.map((chart) => chart.element));
  onStatus((status, error) => {
    last = status ?? last;
    lastError = error;
    draw();
  });
  onLanguage(draw);
}

/** Draws if it is to be seen. */
export function draw() {
  if (byId("dashboard").hidden) return;
  byId("dashboard-error").textContent = lastError ? lastError.message : "";
  if (!last) return;
  byId("docs").hidden = !last.docs;
  drawFigures(last);
  for (const chart of charts) chart.draw(samples, performance.now() / 1000);
  drawDevices(last.instances);
  drawMemory(last.instances);
  drawDispatch(last.dispatch);
}

const seconds = (value) => (value === null ? t("none") : value < 1 ? `${number(value * 1000, value < 0.01 ? 1 : 0)} ms` : `${number(value, 2)} s`);

function drawFigures(status) {
  const newest = samples.at(-1);
  const lookups = sum(status, (i) => i.prefix_query_tokens);
  const hits = sum(status, (i) => i.prefix_hit_tokens);
  const percentiles = (p) => (p.samples === 0 ? t("noAnswers") : t("percentiles", { p90: seconds(p.p90), p99: seconds(p.p99), samples: number(p.samples) }));
  const figures = [
    ["state", t(`state_${status.status}`), t("version", { version: status.version })],
    ["requests", t("runningOf", { running: number(sum(status, (i) => i.running)), most: number(sum(status, (i) => i.max_sequences)) }), t("waitingCount", { count: number(sum(status, (i) => i.waiting)) })],
    ["generatedRate", newest?.generated === null || !newest ? t("none") : number(newest.generated, newest.generated < 10 ? 1 : 0), t("generatedTotal", { count: number(sum(status, (i) => i.generated_tokens)) })],
    ["ttft", seconds(status.time_to_first_token.p50), percentiles(status.time_to_first_token)],
    ["tpot", seconds(status.time_per_output_token.p50), percentiles(status.time_per_output_token)],
    ["hitRate", lookups === 0 ? t("none") : `${number((hits / lookups) * 100, 1)} %`, t("hitOf", { hits: number(hits), lookups: number(lookups) })],
    ["faults", number(sum(status, (i) => i.errors)), t("faultsOf", { device: number(sum(status, (i) => i.device_errors)), corrupted: number(sum(status, (i) => i.corrupted)), preemptions: number(sum(status, (i) => i.preemptions)) })],
  ];
  const tile = ([name, value, more]) => el("div", { class: "tile" }, el("dt", { text: t(name) }), el("dd", {}, el("span", { class: "value", text: value }), el("span", { class: "more", text: more })));
  byId("figures").replaceChildren(...figures.map(tile));
}

function drawDevices(instances) {
  const heads = ["device", "deviceKind", "deviceState", "deviceTrust", "temperature", "computeUse", "memoryUse", "hli", "requests", "deviceErrors"];
  const unknown = () => el("span", { class: "muted", text: t("unknown") });
  const row = ({ device, hli, compute_utilisation, bandwidth_utilisation, running, waiting }) => {
    const simulated = device.kind === "simulated";
    const figure = (value, unit) => {
      if (value === null) return unknown();
      const text = `${number(value, value < 10 ? 1 : 0)}${unit}`;
      return simulated ? t("simulatedFigure", { figure: text }) : text;
    };
    const parts = t("hliParts", { compute: number(compute_utilisation * 100), bandwidth: number(bandwidth_utilisation * 100) });
    return el("tr", {},
      el("th", { scope: "row" }, device.name, el("span", { class: "more", text: device.title })),
      el("td", {}, el("span", { class: simulated ? "tag" : null, text: t(`kind_${device.kind}`) })),
      el("td", {}, el("span", { class: `state ${device.status}`, text: t(`health_${device.status}`) })),
      el("td", { class: "trust" }, trustOf(device)),
      el("td", {}, figure(device.temperature, " °C")),
      el("td", {}, figure(device.compute_util, " %")),
      el("td", {}, figure(device.memory_util, " %")),
      el("td", {}, number(hli, 2), el("span", { class: "more", text: parts })),
      el("td", {}, t("runningWaiting", { running: number(running), waiting: number(waiting) })),
      el("td", { text: number(device.error_count) }));
  };
  fillTable("devices", heads, instances.map(row));
}

/** How far the results of a device are trusted, and why they were in doubt the last time. */
function trustOf({ trust, reason }) {
  const why = trust === "healthy" ? "doubtedBefore" : "doubted";
  return [
    el("span", { class: `state ${trust}`, text: t(`trust_${trust}`) }),
    reason && el("span", { class: "more", text: t(why, { reason }) }),
  ];
}

function fillTable(id, heads, rows) {
  const head = el("tr", {}, heads.map((name) => el("th", { scope: "col", text: t(name) })));
  byId(id).replaceChildren(el("thead", {}, head), el("tbody", {}, rows));
}

function drawMemory(instances) {
  const part = ({ device, cache }) => {
    if (cache.map) maps.set(device.name, cache.map);
    const shown = memoryMap({ ...cache, map: cache.map ?? maps.get(device.name) ?? null });
    return instances.length > 1 ? el("div", {}, el("h4", { text: device.name }), shown) : shown;
  };
  byId("memory").replaceChildren(...instances.map(part));
}

function drawDispatch(decisions) {
  byId("dispatch-note").textContent = decisions === null ? t("dispatchSoon") : decisions.length === 0 ? t("dispatchNone") : "";
  // They are made once; the table is left alone, so that what is selected stays selected.
  const shown = JSON.stringify([decisions, document.documentElement.lang]);
  if (byId("dispatch").dataset.shown === shown) return;
  byId("dispatch").dataset.shown = shown;
  const text = (line) => (line ?? "").replace(/^\[DISPATCH\] \w+-level: /, "");
  const several = new Set((decisions ?? []).map((decision) => decision.device)).size > 1;
  const row = ({ device, op, instructions, lines: [top, middle, bottom, ...more] }) =>
    el("tr", {}, el("th", { scope: "row" }, op, several && el("span", { class: "more", text: device })), el("td", { text: text(top) }), el("td", { text: text(middle) }),
      el("td", {}, text(bottom), more.map((line) => el("span", { class: "more", text: line }))), el("td", { text: number(instructions) }));
  fillTable("dispatch", ["op", "topLevel", "middleLevel", "bottomLevel", "instructions"], (decisions ?? []).map(row));
}
