// The page: starts its parts and changes between them.

import { wishes } from "./api.js";
import { redraw, startChat, stop } from "./chat.js";
import { draw, startDashboard } from "./dashboard.js";
import { byId } from "./dom.js";
import { onLanguage, startLanguage, switchLanguage, t } from "./i18n.js";
import { offerModels, offerThinking, startSettings } from "./settings.js";
import { rememberKey } from "./store.js";
import { ask, onStatus, startWatch, watchClosely } from "./watch.js";

const VIEWS = ["chat", "dashboard"];
let names = "";

function show() {
  const wanted = VIEWS.find((view) => location.hash === `#${view}`) ?? VIEWS[0];
  for (const view of VIEWS) {
    byId(view).hidden = view !== wanted;
    const link = byId(`to-${view}`);
    if (view === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId("settings-toggle").hidden = wanted !== "chat";
  watchClosely(wanted === "dashboard");
  draw();
}

function startSettingsPanel() {
  const toggle = byId("settings-toggle");
  const open = (wanted) => {
    byId("settings").hidden = !wanted;
    toggle.setAttribute("aria-expanded", String(wanted));
    if (wanted) byId("system").focus();
    else toggle.focus();
  };
  toggle.addEventListener("click", () => open(byId("settings").hidden));
  byId("settings-close").addEventListener("click", () => open(false));
  byId("settings").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    open(false);
  });
}

function startKey() {
  wishes.addEventListener("key", () => {
    if (!byId("key-bar").hidden) return;
    byId("key-bar").hidden = false;
    byId("key").focus();
  });
  byId("key-bar").addEventListener("submit", (event) => {
    event.preventDefault();
    rememberKey(byId("key").value.trim());
    byId("key-bar").hidden = true;
    byId("key").value = "";
    byId("question").focus();
    ask();
  });
}

/** The line under the heading, the models on offer. */
function watchServer(status, error) {
  const state = byId("state");
  const text = error ? error.message : t(`state_${status.status}`);
  // Only a change is news for a screen reader.
  if (state.textContent !== text) state.textContent = text;
  state.className = `state ${error ? "lost" : status.status}`;
  if (!status?.model) return;
  const offered = JSON.stringify(status.model.names);
  if (offered !== names) offerModels(status.model.names);
  names = offered;
  offerThinking(status.model.thinking_switch);
}

function start() {
  startSettings((name) => { if (name === "tokens") redraw(); });
  startLanguage();
  startChat();
  startDashboard();
  startSettingsPanel();
  startKey();
  onStatus(watchServer);
  onLanguage(ask);
  byId("language").addEventListener("click", switchLanguage);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    (byId("chat").hidden ? byId("dashboard-title") : byId("question")).focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && stop()) byId("question").focus();
  });
  addEventListener("hashchange", show);
  show();
  startWatch();
}

start();
