// What the browser remembers: the conversation, settings and the language for long, the key until the tab is closed.
//
// A browser may refuse to store anything; the page works without. What was stored is read with suspicion: another version may have
// written it.

const PREFIX = "qwen.";

/** A stored value, or null. */
export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}

/** Stores a value. Returns whether there was room for it. */
export function remember(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

let keyOfTab = "";

/** The key for the server. */
export function key() {
  try {
    return sessionStorage.getItem(`${PREFIX}key`) ?? keyOfTab;
  } catch {
    return keyOfTab;
  }
}

export function rememberKey(value) {
  keyOfTab = value;
  try {
    sessionStorage.setItem(`${PREFIX}key`, value);
  } catch {
    // Kept in memory then, until the page is left.
  }
}

/** The stored conversation: messages with a role and a text. */
export function recallConversation() {
  const stored = recall("conversation");
  const sound = (message) => ["user", "assistant"].includes(message?.role) && typeof message.content === "string";
  return Array.isArray(stored) ? stored.filter(sound) : [];
}
