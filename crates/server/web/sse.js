// Server-sent events: from text in pieces of any size to events.

/** Takes text as it comes and gives the events that are complete. */
export class EventParser {
  #rest = "";
  #begun = false;
  /** The last piece ended with CR: an LF that follows is part of it. */
  #afterReturn = false;
  #name = "";
  #data = [];

  /** Events that end within this text, as `{ name, data }`. */
  push(text) {
    if (text === "") return [];
    this.#rest += this.#afterReturn && text[0] === "\n" ? text.slice(1) : text;
    this.#afterReturn = false;
    if (!this.#begun && this.#rest !== "") {
      this.#begun = true;
      if (this.#rest.startsWith("\uFEFF")) this.#rest = this.#rest.slice(1);
    }
    const lines = this.#rest.split(/\r\n|\n|\r/);
    this.#afterReturn = this.#rest.endsWith("\r");
    this.#rest = lines.pop();
    return lines.map((line) => this.#line(line)).filter((event) => event !== null);
  }

  #line(line) {
    if (line === "") return this.#dispatch();
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#name = value;
    return null;
  }

  #dispatch() {
    const event = this.#data.length > 0 ? { name: this.#name || "message", data: this.#data.join("\n") } : null;
    this.#name = "";
    this.#data = [];
    return event;
  }
}
