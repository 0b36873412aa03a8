// A figure over the last two minutes: a line, its last value in words, and a table of the same for those who can't see the line.

import { el, svg } from "./dom.js";
import { number, t } from "./i18n.js";
import { WINDOW } from "./watch.js";

const WIDTH = 240;
const HEIGHT = 64;
/** Longer gaps between samples are gaps of the line. */
const GAP = 10;
/** Seconds of a row of the table. */
const ROW = 10;

/** A chart of one figure. `top` is the least end of its scale. */
export class Chart {
  #line = svg("path", { class: "line" });
  #area = svg("path", { class: "area" });
  #now = el("span", { class: "now" });
  #most = el("span", { class: "most" });
  #rows = el("tbody");
  #head = el("tr");
  #caption = el("span");
  #summary = el("summary");
  #drawing;

  constructor({ name, figure, top, digits = 0, unit = "" }) {
    Object.assign(this, { name, figure, top, digits, unit });
    const lines = [0.5, 32, 63.5].map((y) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
    this.#drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, lines, this.#area, this.#line);
    const table = el("table", {}, el("thead", {}, this.#head), this.#rows);
    this.element = el("figure", { class: "chart" },
      el("figcaption", {}, this.#caption, this.#now),
      el("div", { class: "plot" }, this.#most, this.#drawing),
      el("details", {}, this.#summary, table));
  }

  draw(samples, now) {
    const points = samples.map((sample) => ({ age: now - sample.time, value: this.figure(sample) })).filter((p) => p.value !== null && p.age <= WINDOW);
    const most = points.reduce((most, point) => Math.max(most, point.value), 0);
    const scale = nice(Math.max(most, this.top));
    const x = (age) => round(WIDTH * (1 - age / WINDOW));
    const y = (value) => round(HEIGHT - 1 - (HEIGHT - 2) * (value / scale));
    const runs = [];
    for (const [at, point] of points.entries()) {
      if (at === 0 || points[at - 1].age - point.age > GAP) runs.push([]);
      runs.at(-1).push(point);
    }
    const path = (run) => `M${run.map((p) => `${x(p.age)} ${y(p.value)}`).join("L")}`;
    this.#line.setAttribute("d", runs.map(path).join(""));
    this.#area.setAttribute("d", runs.map((run) => `${path(run)}L${x(run.at(-1).age)} ${HEIGHT}L${x(run[0].age)} ${HEIGHT}Z`).join(""));
    const shown = (value) => `${number(value, this.digits)}${this.unit}`;
    this.#caption.textContent = t(this.name);
    this.#now.textContent = points.length > 0 ? shown(points.at(-1).value) : t("none");
    this.#most.textContent = shown(scale);
    const values = points.map((point) => point.value);
    const words = points.length > 0
      ? t("chartWords", { now: shown(values.at(-1)), least: shown(Math.min(...values)), most: shown(most) })
      : t("noFigures");
    this.#drawing.setAttribute("aria-label", `${t(this.name)}: ${words}`);
    this.#summary.textContent = t("asTable");
    this.#table(points, shown);
  }

  #table(points, shown) {
    this.#head.replaceChildren(el("th", { scope: "col", text: t("secondsAgo") }), el("th", { scope: "col", text: t("mean") }), el("th", { scope: "col", text: t("highest") }));
    const rows = [];
    for (let from = 0; from < WINDOW; from += ROW) {
      const values = points.filter((p) => p.age >= from && p.age < from + ROW).map((p) => p.value);
      if (values.length === 0) continue;
      const mean = values.reduce((total, value) => total + value, 0) / values.length;
      rows.push(el("tr", {}, el("th", { scope: "row", text: `${from}–${from + ROW}` }), el("td", { text: shown(mean) }), el("td", { text: shown(Math.max(...values)) })));
    }
    this.#rows.replaceChildren(...rows);
  }
}

const round = (value) => Math.round(value * 10) / 10;

/** The next of 1, 2, 5, 10, … */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999) ?? value;
}
