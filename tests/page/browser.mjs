// Chromium, watched: whatever a page asks of another host, writes to the console or fails at is noted and fails the test.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(`${process.env.PAGE_MODULES}/package.json`);
const { chromium } = require("playwright-core");
const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

// Without these the browser itself looks for hosts of its maker.
const QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

let browser = null;

export async function closeBrowser() {
  await browser?.close();
  browser = null;
}

/** Runs `use` with a page at `url`; `expected` are the console's lines that belong to the test, as patterns. */
export async function withPage(url, options, use, expected = []) {
  browser ??= await chromium.launch({ executablePath: process.env.PAGE_CHROMIUM ?? "/usr/bin/chromium", args: QUIET });
  const context = await browser.newContext({ viewport: { width: 1100, height: 800 }, locale: "en-GB", ...options });
  await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  // A busy machine may stand still for a while.
  context.setDefaultTimeout(180000);
  const page = await context.newPage();
  const wrong = [];
  page.on("request", (request) => {
    const target = new URL(request.url());
    if (target.protocol !== "blob:" && target.origin !== new URL(url).origin) wrong.push(`a request to ${request.url()}`);
  });
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) wrong.push(message.text());
  });
  page.on("pageerror", (error) => wrong.push(String(error)));
  try {
    await page.goto(url);
    await use(page);
    assert.deepEqual(wrong.filter((text) => !expected.some((pattern) => pattern.test(text))), []);
  } finally {
    await context.close();
  }
}

/** What axe finds wrong with the page as it is now. */
export async function faults(page) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"] }));
  return violations.flatMap((rule) => rule.nodes.map((node) => `${rule.id}: ${node.html.slice(0, 160)} ${node.failureSummary}`));
}

/** Types a question and sends it. */
export async function ask(page, text) {
  await page.fill("#question", text);
  await page.press("#question", "Enter");
}

/** Waits until no answer grows. */
export const idle = (page) => page.locator("#stop").waitFor({ state: "hidden" });
