// Elements without markup: texts become text nodes, so nothing that a model or a server says can be taken for HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children. `class`, `text` and `on` (event to listener) are special; `false` and `null` leave an attribute out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** As `el`, of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** The element of the page with this id. */
export const byId = (id) => document.getElementById(id);

/** A button that does something. */
export function button(text, act, attributes = {}) {
  return el("button", { type: "button", text, on: { click: act }, ...attributes });
}

/** Copies a text; where the browser keeps its clipboard from pages without TLS, by way of a selection. Returns whether it did. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "hidden-text", readonly: true, "aria-hidden": "true", tabindex: "-1" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
