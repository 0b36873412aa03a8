// What a request says beside its messages: model, system prompt, sampling, probabilities, thinking. An empty field is left out of the
// request, so the model's own default counts. Remembered by the browser.

import { byId, el } from "./dom.js";
import { onLanguage, t } from "./i18n.js";
import { recall, remember } from "./store.js";
import { ALTERNATIVES } from "./tokens.js";

/** Numbers of a request: name, least, most, step. */
const NUMBERS = [
  ["temperature", 0, 2, 0.1],
  ["top_p", 0.01, 1, 0.01],
  ["top_k", 0, 1000000, 1],
  ["min_p", 0, 1, 0.01],
  ["max_tokens", 1, 1000000, 1],
  ["seed", 0, Number.MAX_SAFE_INTEGER, 1],
  ["frequency_penalty", -2, 2, 0.1],
  ["presence_penalty", -2, 2, 0.1],
  ["repetition_penalty", 0.01, 2, 0.01],
];

const values = sound(recall("settings"));

/** Only what this page knows, of the right type. */
function sound(stored) {
  const found = { system: "", model: "", tokens: false, thinking: "default" };
  for (const name of Object.keys(found)) if (typeof stored?.[name] === typeof found[name]) found[name] = stored[name];
  for (const [name] of NUMBERS) if (typeof stored?.[name] === "number") found[name] = stored[name];
  return found;
}

/** Whether probabilities of tokens are shown. */
export const showsTokens = () => values.tokens;

/** Builds the fields. `changed` is told the name of a setting that changed. */
export function startSettings(changed) {
  const set = (name, value) => {
    values[name] = value;
    if (value === undefined) delete values[name];
    remember("settings", values);
    changed(name);
  };
  const fields = byId("numbers");
  for (const [name, min, max, step] of NUMBERS) {
    const id = `set-${name}`;
    const field = el("input", { id, type: "number", min, max, step: "any", inputmode: "decimal", "data-placeholder": "default", "aria-describedby": `${id}-error` });
    const error = el("p", { id: `${id}-error`, class: "field-error", role: "alert" });
    field.value = values[name] ?? "";
    const check = () => {
      const whole = step === 1 && field.value !== "" && !Number.isInteger(field.valueAsNumber);
      const wrong = !field.validity.valid || whole;
      error.textContent = wrong ? t(step === 1 ? "wholeFromTo" : "fromTo", { min, max }) : "";
      field.setAttribute("aria-invalid", String(wrong));
      set(name, wrong || field.value === "" ? undefined : field.valueAsNumber);
    };
    field.addEventListener("input", check);
    onLanguage(() => { if (error.textContent !== "") check(); });
    fields.append(el("div", { class: "field" }, el("label", { for: id, "data-text": `set_${name}` }), field, error));
  }
  const bind = (id, name, property, event) => {
    const node = byId(id);
    node[property] = values[name];
    node.addEventListener(event, () => set(name, node[property]));
  };
  bind("system", "system", "value", "input");
  bind("show-tokens", "tokens", "checked", "change");
  bind("thinking", "thinking", "value", "change");
  byId("model").addEventListener("change", (event) => set("model", event.target.value));
  byId("settings-reset").addEventListener("click", () => {
    for (const [name] of NUMBERS) {
      byId(`set-${name}`).value = "";
      byId(`set-${name}`).dispatchEvent(new Event("input"));
    }
  });
}

/** Offers the names that are served; the chosen one stays if it is among them. */
export function offerModels(names) {
  const select = byId("model");
  const wanted = names.includes(values.model) ? values.model : names[0];
  select.replaceChildren(...names.map((name) => el("option", { value: name, text: name })));
  select.value = wanted;
  values.model = wanted;
}

/** Shows the switch for thinking if the model has one. */
export function offerThinking(possible) {
  byId("thinking-field").hidden = !possible;
}

/** The body of a request for an answer to these messages. */
export function requestBody(messages) {
  const system = values.system.trim() === "" ? [] : [{ role: "system", content: values.system }];
  const body = { messages: [...system, ...messages], stream: true, stream_options: { include_usage: true } };
  if (values.model) body.model = values.model;
  for (const [name] of NUMBERS) if (values[name] !== undefined) body[name] = values[name];
  if (values.tokens) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  if (values.thinking !== "default" && !byId("thinking-field").hidden) body.enable_thinking = values.thinking === "on";
  return body;
}
