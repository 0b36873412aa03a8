// Who can use the page: by keyboard alone, with a screen reader, in both languages, on a phone, in the dark.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { ask, closeBrowser, faults, idle, withPage } from "./browser.mjs";
import { standIn, startServer } from "./server.mjs";

const ANSWER = "# Title\n\n- a\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```js\nlet a = 1; // one\n```\n\n[x](https://x.example)";

let server;
let stub;
before(async () => {
  server = await startServer();
  stub = await standIn(server.url, (body, out) => {
    out.thinking("so");
    out.content(ANSWER, body.logprobs ? [{ token: ANSWER, logprob: -0.1, bytes: null, top_logprobs: [] }] : undefined);
    out.end();
  });
});
after(async () => {
  await closeBrowser();
  await stub.stop();
  await server.stop();
});

for (const [look, options] of [["light", { colorScheme: "light" }], ["dark", { colorScheme: "dark" }], ["narrow", { viewport: { width: 360, height: 700 } }], ["Chinese", { locale: "zh-CN" }]]) {
  test(`axe finds no fault: ${look}`, async () => {
    await withPage(stub.url, options, async (page) => {
      assert.deepEqual(await faults(page), []);
      await ask(page, "q");
      await idle(page);
      await page.click("details.thinking summary");
      assert.deepEqual(await faults(page), []);
      await page.click("#settings-toggle");
      await page.fill("#set-temperature", "9");
      await page.check("#show-tokens");
      assert.deepEqual(await faults(page), []);
      await page.keyboard.press("Escape");
      await page.click("#to-dashboard");
      await page.locator("#dispatch tbody tr").first().waitFor();
      assert.deepEqual(await faults(page), []);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `the page is ${wide} px too wide`);
    });
  });
}

test("a conversation by keyboard alone, with visible focus", async () => {
  await withPage(stub.url, {}, async (page) => {
    const focus = () => page.evaluate(() => {
      const node = document.activeElement;
      return { tag: node.tagName, id: node.id, text: node.textContent.trim().slice(0, 30), outline: getComputedStyle(node).outlineStyle };
    });
    /** Tabs until an element is reached; every stop on the way shows that it has the focus. */
    const tabTo = async (wanted) => {
      for (let steps = 0; steps < 60; steps += 1) {
        await page.keyboard.press("Tab");
        const now = await focus();
        // Beyond the last stop is the browser itself.
        if (now.tag === "BODY") continue;
        assert.notEqual(now.outline, "none", JSON.stringify(now));
        if (now.id === wanted || now.text === wanted) return;
      }
      assert.fail(`Tab does not reach ${wanted}`);
    };
    await page.evaluate(() => document.activeElement.blur());
    await tabTo("skip");
    await page.keyboard.press("Enter");
    assert.equal((await focus()).id, "question");
    await page.keyboard.type("by keyboard");
    await page.keyboard.press("Enter");
    await idle(page);
    assert.equal((await focus()).id, "question");
    await tabTo("settings-toggle");
    await page.keyboard.press("Enter");
    assert.equal((await focus()).id, "system");
    await tabTo("show-tokens");
    await page.keyboard.press("Space");
    await page.keyboard.press("Escape");
    assert.equal((await focus()).id, "settings-toggle");
    await tabTo("Another answer");
    await page.keyboard.press("Enter");
    await page.locator(".token").first().waitFor();
    await tabTo("to-dashboard");
    await page.keyboard.press("Enter");
    await page.locator("#dashboard").waitFor();
    await tabTo("language");
    await page.keyboard.press("Enter");
    assert.equal(await page.getAttribute("html", "lang"), "zh-CN");
  });
});

test("both languages, by the browser's and by choice, remembered", async () => {
  const han = /[\u4e00-\u9fff]/;
  await withPage(stub.url, { locale: "zh-CN" }, async (page) => {
    await ask(page, "q");
    await idle(page);
    assert.match(await page.innerText("header"), /对话[^]*仪表盘/);
    await page.click("#language");
    await page.click("#settings-toggle");
    for (const view of ["chat", "dashboard"]) {
      await page.click(`#to-${view}`);
      if (view === "dashboard") await page.locator("#dispatch tbody tr").first().waitFor();
      const text = (await page.innerText("body")).replace("中文", "");
      assert.doesNotMatch(text, han, view);
      const labels = await page.evaluate(() => [...document.querySelectorAll("[aria-label], [placeholder]")].map((node) => `${node.getAttribute("aria-label") ?? ""}${node.placeholder ?? ""}`));
      for (const label of labels.filter((label) => !label.startsWith("中文"))) assert.doesNotMatch(label, han);
    }
    await page.reload();
    assert.equal(await page.getAttribute("html", "lang"), "en");
  });
});

test("regions and labels that a screen reader goes by", async () => {
  await withPage(stub.url, {}, async (page) => {
    for (const role of ["banner", "navigation", "main"]) assert.equal(await page.getByRole(role).count(), 1, role);
    await page.getByRole("textbox", { name: "Message" }).waitFor();
    assert.equal(await page.getAttribute("#announcer", "aria-live"), "polite");
    assert.equal(await page.locator("#messages[aria-live], #messages[role=log]").count(), 0);
    await ask(page, "q");
    await page.getByRole("article").nth(1).waitFor();
    await page.getByRole("button", { name: "Copy the code" }).click();
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "let a = 1; // one");
    assert.equal(await page.getByRole("link", { name: "Chat" }).getAttribute("aria-current"), "page");
  });
});
