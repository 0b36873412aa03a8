// The map of the KV cache: blocks in the order of their memory, each a square, or so many of them a square where there are many.

import { el, svg } from "./dom.js";
import { number, t } from "./i18n.js";

const COLUMNS = 96;
const MOST_CELLS = COLUMNS * 24;
/** What is kept for reuse fills half of its square, so that the map can be read without its colours. */
const spot = (state, x, y, width) => svg("rect", { class: `kv-${state}`, x, y: state === "cached" ? y + 5 : y, width, height: state === "cached" ? 5 : 10 });
/** A square of several blocks shows the state that matters most. */
const WEIGHT = { free: 0, cached: 1, used: 2 };
const STATES = ["used", "cached", "free"];

/** The map of an instance's cache with its figures in words. */
export function memoryMap({ block_size, blocks, used, cached, map }) {
  const counts = { used, cached, free: blocks - used - cached };
  const share = (count) => `${number((count / Math.max(blocks, 1)) * 100, count > 0 && count < blocks / 10 ? 1 : 0)} %`;
  const words = STATES.map((state) => t("blocksOf", { state: t(`kv_${state}`), count: number(counts[state]), share: share(counts[state]) }));
  const legend = STATES.map((state, at) => el("li", {}, svg("svg", { class: "key", viewBox: "0 0 10 10", "aria-hidden": "true" }, spot(state, 0, 0, 10)), words[at]));
  const facts = [t("blockSize", { blocks: number(blocks), size: number(block_size), tokens: number(blocks * block_size) })];
  if (map) facts.push(t("fragments", { run: number(map.largest_free_run), share: `${number(map.fragmentation * 100, 1)} %` }), t("backed", { count: number(map.backed) }));
  return el("div", { class: "memory" },
    map ? drawing(map.runs, blocks, `${t("memoryMap")}: ${words.join(", ")}`) : el("p", { class: "muted", text: t("mapBusy") }),
    el("ul", { class: "legend" }, legend),
    el("p", { class: "muted", text: facts.join(" ") }));
}

function drawing(runs, blocks, label) {
  const size = Math.max(Math.ceil(blocks / MOST_CELLS), 1);
  const cells = cellsOf(runs, blocks, size);
  const rows = Math.ceil(cells.length / COLUMNS);
  const squares = [];
  for (let at = 0; at < cells.length; ) {
    const column = at % COLUMNS;
    let end = at + 1;
    while (end < cells.length && end % COLUMNS !== 0 && cells[end] === cells[at]) end += 1;
    squares.push(spot(cells[at], column * 10, Math.floor(at / COLUMNS) * 10, (end - at) * 10));
    at = end;
  }
  const lines = [
    ...Array.from({ length: COLUMNS + 1 }, (_, x) => `M${x * 10} 0V${rows * 10}`),
    ...Array.from({ length: rows + 1 }, (_, y) => `M0 ${y * 10}H${COLUMNS * 10}`),
  ];
  return svg("svg", { class: "map", viewBox: `0 0 ${COLUMNS * 10} ${rows * 10}`, role: "img", "aria-label": label }, squares, svg("path", { class: "mesh", d: lines.join("") }));
}

/** States of squares of `size` blocks. */
function cellsOf(runs, blocks, size) {
  const cells = new Array(Math.ceil(blocks / size)).fill("free");
  let at = 0;
  for (const [state, length] of runs) {
    for (let cell = Math.floor(at / size); cell <= Math.floor((at + length - 1) / size); cell += 1) {
      if (WEIGHT[state] > WEIGHT[cells[cell]]) cells[cell] = state;
    }
    at += length;
  }
  return cells;
}
