// Markdown within a line: emphasis, code, links. In: a text of a model. Out: nodes of the page.
//
// Links lead to http and https alone. Pictures are not loaded, they become links: a page that loads what a model says would tell
// others that it was read.

import { el } from "./dom.js";

/** Deepest emphasis and most open brackets; what lies deeper stays as it is written. */
const DEEPEST = 24;
const PUNCTUATION = /[\p{P}\p{S}]/u;

/** Nodes of a text. */
export function inline(text) {
  const pieces = [];
  const brackets = [];
  let plain = "";
  const flush = () => {
    if (plain !== "") pieces.push(plain);
    plain = "";
  };
  let at = 0;
  while (at < text.length) {
    const special = SPECIAL[text[at]]?.(text, at);
    if (special?.open) {
      flush();
      if (brackets.length < DEEPEST) brackets.push({ at: pieces.length, start: at, picture: special.picture });
      pieces.push(special.text);
    } else if (special?.close) {
      flush();
      const opener = brackets.pop();
      const target = opener && destination(text, at + 1);
      if (target) {
        const inner = pieces.splice(opener.at).slice(1);
        pieces.push(link(target.url, opener.picture ? text.slice(opener.start + 2, at) : inner));
        at = target.end;
        // No link within a link.
        if (!opener.picture) brackets.length = 0;
        continue;
      }
      plain += "]";
      at += 1;
      continue;
    } else if (special) {
      flush();
      pieces.push(special.piece);
    } else {
      plain += text[at];
      at += 1;
      continue;
    }
    at += special.length;
  }
  flush();
  return emphasis(pieces);
}

/** By its first character, what may begin here: a piece and its length, or nothing. */
const SPECIAL = {
  "\\": (text, at) => {
    const next = text[at + 1];
    if (next === "\n") return { piece: el("br"), length: 2 };
    return next && /[!-/:-@[-`{-~]/.test(next) ? { piece: next, length: 2 } : null;
  },
  "\n": () => ({ piece: el("br"), length: 1 }),
  "`": code,
  "[": () => ({ open: true, text: "[", length: 1 }),
  "!": (text, at) => (text[at + 1] === "[" ? { open: true, picture: true, text: "![", length: 2 } : null),
  "]": () => ({ close: true }),
  "<": (text, at) => {
    const found = sticky(/<(https?:\/\/[^\s<>]+)>/y, text, at);
    return found && { piece: link(found[1], [found[1]]), length: found[0].length };
  },
  h: address,
  "*": delimiter,
  _: delimiter,
  "~": delimiter,
};

function sticky(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function code(text, at) {
  const ticks = sticky(/`+/y, text, at)[0];
  let end = at + ticks.length;
  for (;;) {
    end = text.indexOf(ticks, end);
    if (end < 0) return { piece: ticks, length: ticks.length };
    const run = sticky(/`+/y, text, end)[0].length;
    if (run === ticks.length) break;
    end += run;
  }
  let inner = text.slice(at + ticks.length, end).replaceAll("\n", " ");
  if (/^ .* $/s.test(inner) && inner.trim() !== "") inner = inner.slice(1, -1);
  return { piece: el("code", { text: inner }), length: end + ticks.length - at };
}

/** An address that stands in the text by itself, without the punctuation that ends a sentence. */
function address(text, at) {
  if (at > 0 && /[\p{L}\p{N}]/u.test(text[at - 1])) return null;
  const found = sticky(/https?:\/\/[^\s<>"'`*\]|，。、；：！？（）【】「」《》]+/y, text, at);
  if (!found) return null;
  let url = found[0].replace(/[.,;:!?]+$/, "");
  if (url.endsWith(")") && !url.includes("(")) url = url.replace(/\)+$/, "");
  return { piece: link(url, [url]), length: url.length };
}

/** `(url "title")` after a bracket. */
function destination(text, at) {
  const found = sticky(/\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s+(?:"[^"\n]*"|'[^'\n]*'))?\s*\)/y, text, at);
  return found && { url: found[1] ?? found[2], end: at + found[0].length };
}

/** A link, or its text alone if it leads somewhere else than to a page. */
function link(url, children) {
  let target;
  try {
    target = new URL(url);
  } catch {
    return el("span", {}, emphasis([children].flat()));
  }
  if (target.protocol !== "http:" && target.protocol !== "https:") return el("span", {}, emphasis([children].flat()));
  const attributes = { href: target.href, rel: "noopener noreferrer nofollow", target: "_blank", title: target.href };
  const shown = emphasis([children].flat());
  return el("a", attributes, shown.length > 0 ? shown : [url]);
}

/** A run of `*`, `_` or `~~`, and whether emphasis may begin and end there. */
function delimiter(text, at) {
  const mark = text[at];
  let length = 1;
  while (text[at + length] === mark) length += 1;
  if (mark === "~" && length !== 2) return { piece: mark.repeat(length), length };
  const before = text[at - 1] ?? " ";
  const after = text[at + length] ?? " ";
  const space = (c) => /\s/.test(c);
  const left = !space(after) && (!PUNCTUATION.test(after) || space(before) || PUNCTUATION.test(before));
  const right = !space(before) && (!PUNCTUATION.test(before) || space(after) || PUNCTUATION.test(after));
  const open = mark === "_" ? left && (!right || PUNCTUATION.test(before)) : left;
  const close = mark === "_" ? right && (!left || PUNCTUATION.test(after)) : right;
  return { piece: { mark, length, open, close }, length };
}

/** Pairs the delimiters among pieces; what has no partner is text. */
function emphasis(pieces) {
  const stack = [{ nodes: [] }];
  const top = () => stack[stack.length - 1];
  const unfold = () => {
    const open = stack.pop();
    top().nodes.push(open.mark.repeat(open.length), ...open.nodes);
  };
  for (const piece of pieces) {
    if (typeof piece === "string" || piece instanceof Node) {
      top().nodes.push(piece);
      continue;
    }
    const { mark } = piece;
    let left = piece.length;
    while (piece.close && left > 0) {
      const partner = stack.findLastIndex((open) => open.mark === mark);
      if (partner < 1) break;
      while (stack.length - 1 > partner) unfold();
      const open = stack.pop();
      const used = open.length >= 2 && left >= 2 ? 2 : 1;
      const node = el(mark === "~" ? "del" : used === 2 ? "strong" : "em", {}, open.nodes);
      left -= used;
      if (open.length > used) stack.push({ mark, length: open.length - used, nodes: [node] });
      else top().nodes.push(node);
    }
    if (left === 0) continue;
    if (piece.open && stack.length < DEEPEST) stack.push({ mark, length: left, nodes: [] });
    else top().nodes.push(mark.repeat(left));
  }
  while (stack.length > 1) unfold();
  return stack[0].nodes;
}
