// Markdown by blocks: headings, lists, tables, quotes, code. In: a text that may still be growing. Out: nodes of the page.
//
// A text is cut into blocks, and a block that did not change keeps its node: while an answer grows, only its end is made anew, and
// what a reader has selected stays selected. Any text is accepted; what is no Markdown is shown as it is written.

import { button, copy, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";
import { t } from "./i18n.js";

/** Deepest quotes and lists; what lies deeper is a paragraph. */
const DEEPEST = 10;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*)|\s*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** Shows a growing text in an element. */
export class MarkdownView {
  #shown = [];

  constructor(element) {
    this.element = element;
  }

  /** Shows this text instead of what was shown. */
  update(text) {
    const blocks = split(text);
    let same = 0;
    while (same < blocks.length && same < this.#shown.length && blocks[same].raw === this.#shown[same].raw) same += 1;
    for (const old of this.#shown.splice(same)) old.node.remove();
    for (const block of blocks.slice(same)) {
      const node = render(block);
      this.#shown.push({ raw: block.raw, node });
      this.element.append(node);
    }
  }
}

/** Nodes of a text. */
export function markdown(text) {
  return split(text).map(render);
}

/** The blocks of a text; `raw` is what each is made of. */
function split(text, depth = 0) {
  const lines = text.replaceAll("\t", "    ").split(/\r\n|\n|\r/);
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const block = takeBlock(lines, at, depth);
    blocks.push({ ...block, raw: `${block.kind} ${lines.slice(at, block.end).join("\n")}` });
    at = block.end;
  }
  return blocks;
}

function takeBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return takeCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2] ?? "", end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (depth < DEEPEST && QUOTE.test(line)) return takeQuote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return takeList(lines, at, depth);
  if (isTable(lines, at)) return takeTable(lines, at);
  let end = at + 1;
  while (end < lines.length && !interrupts(lines, end)) end += 1;
  const text = lines.slice(at, end).map((part) => part.trim()).join("\n");
  return { kind: "paragraph", text, end };
}

/** Whether a line ends the paragraph before it. */
function interrupts(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  // As in print, a number in running text begins no list unless it is 1.
  const begins = item && item[3] && (!/\d/.test(item[2]) || /^1[.)]/.test(item[2]));
  return line.trim() === "" || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || begins || isTable(lines, at);
}

function takeCode(lines, at, [opening, fence, language]) {
  const indent = opening.search(/\S/);
  const closing = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, Math.max(line.search(/\S/), 0))));
  return { kind: "code", language, text: code.join("\n"), end: Math.min(end + 1, lines.length) };
}

function takeQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (end > at && !interrupts(lines, end)))) end += 1;
  const text = lines.slice(at, end).map((line) => line.replace(QUOTE, "")).join("\n");
  return { kind: "quote", blocks: split(text, depth + 1), end };
}

function takeList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const sort = (marker) => (/\d/.test(marker) ? marker.at(-1) : marker);
  const items = [];
  let end = at;
  let loose = false;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || sort(item[2]) !== sort(first[2]) || RULE.test(lines[end])) break;
    const indent = item[1].length;
    const width = indent + item[2].length + ((item[3]?.length ?? 1) > 4 ? 1 : (item[3]?.length ?? 1));
    const content = [item[4] ?? ""];
    let blank = false;
    end += 1;
    for (; end < lines.length; end += 1) {
      const line = lines[end];
      const depthOfLine = line.search(/\S/);
      if (depthOfLine < 0) {
        blank = true;
        content.push("");
        continue;
      }
      // Models indent what belongs to an item by two, three or four columns alike.
      const belongs = depthOfLine >= width || depthOfLine >= indent + 2;
      if (!belongs && (blank || interrupts(lines, end) || ITEM.test(line))) break;
      loose ||= blank && belongs;
      blank = false;
      content.push(line.slice(Math.min(depthOfLine, width)));
    }
    const next = ITEM.exec(lines[end] ?? "");
    loose ||= blank && next !== null && sort(next[2]) === sort(first[2]) && next[1].length <= indent + 1;
    items.push(split(content.join("\n"), depth + 1));
    if (blank && !next) break;
  }
  while (end > at + 1 && lines[end - 1].trim() === "") end -= 1;
  const start = /\d/.test(first[2]) ? parseInt(first[2], 10) : null;
  return { kind: "list", start, items, loose, end };
}

function isTable(lines, at) {
  return at + 1 < lines.length && lines[at].includes("|") && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1]) &&
    cells(lines[at]).length === cells(lines[at + 1]).length;
}

function takeTable(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : null));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim() !== "") end += 1;
  return { kind: "table", head, align, rows: lines.slice(at + 2, end).map(cells), end };
}

/** Cells of a row; a bar after a backslash or within code is part of a cell. */
function cells(line) {
  const row = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  const found = [""];
  let code = false;
  for (let at = 0; at < row.length; at += 1) {
    if (row[at] === "\\" && row[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
    } else if (row[at] === "|" && !code) found.push("");
    else {
      if (row[at] === "`") code = !code && row.includes("`", at + 1);
      found[found.length - 1] += row[at];
    }
  }
  return found.map((cell) => cell.trim());
}

function render(block) {
  switch (block.kind) {
    case "code": return code(block);
    // The page has headings of its own above those of an answer.
    case "heading": return el(`h${Math.min(block.level + 2, 6)}`, {}, inline(block.text));
    case "rule": return el("hr");
    case "quote": return el("blockquote", {}, block.blocks.map(render));
    case "list": return list(block);
    case "table": return table(block);
    default: return el("p", {}, inline(block.text));
  }
}

function list({ start, items, loose }) {
  const part = (block) => (block.kind === "paragraph" && !loose ? inline(block.text) : [render(block)]);
  const children = items.map((blocks) => el("li", {}, blocks.flatMap(part)));
  return start === null ? el("ul", {}, children) : el("ol", { start: start === 1 ? null : start }, children);
}

function table({ head, align, rows }) {
  const cell = (tag, text, at) => el(tag, { class: align[at], scope: tag === "th" ? "col" : null }, inline(text ?? ""));
  const row = (tag, found) => el("tr", {}, head.map((_, at) => cell(tag, found[at], at)));
  const body = el("tbody", {}, rows.map((found) => row("td", found)));
  // Wide tables scroll, so the keyboard must reach them.
  const attributes = { class: "scroll", tabindex: "0", role: "region", "aria-label": t("table") };
  return el("div", attributes, el("table", {}, el("thead", {}, row("th", head)), body));
}

function code({ language, text }) {
  const name = language.slice(0, 24);
  const copied = async (event) => {
    const pressed = event.currentTarget;
    pressed.textContent = t((await copy(text)) ? "copied" : "copyFailed");
    setTimeout(() => { pressed.textContent = t("copy"); }, 2000);
  };
  const parts = highlight(text, language).map(([kind, part]) => (kind ? el("span", { class: `hl-${kind}`, text: part }) : part));
  const bar = el("div", { class: "code-bar" }, el("span", { text: name }), button(t("copy"), copied, { class: "quiet", "aria-label": t("copyCode") }));
  const label = name ? t("codeIn", { language: name }) : t("code");
  return el("div", { class: "code" }, bar, el("pre", { tabindex: "0", role: "region", "aria-label": label }, el("code", {}, parts)));
}
