// The dashboard: its figures are the server's, and they move.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { closeBrowser, withPage } from "./browser.mjs";
import { startServer } from "./server.mjs";

let server;
before(async () => { server = await startServer("--max_batch_size", "4"); });
after(async () => {
  await closeBrowser();
  await server.stop();
});

const tile = (page, name) => page.locator(".tile", { has: page.locator("dt", { hasText: name }) });

/** Gives the server something to do. */
async function load(tokens) {
  const body = JSON.stringify({ messages: [{ role: "user", content: "hi" }], max_tokens: tokens, ignore_eos: true });
  const answer = await fetch(`${server.url}/v1/chat/completions`, { method: "POST", headers: { "content-type": "application/json" }, body });
  assert.equal(answer.status, 200);
  await answer.arrayBuffer();
}

test("figures move with the load", async () => {
  await withPage(`${server.url}/#dashboard`, {}, async (page) => {
    await tile(page, "Generated").locator(".more", { hasText: "since the start" }).waitFor();
    const total = async () => Number((await tile(page, "Generated").locator(".more").innerText()).replace(/\D/g, ""));
    const before = await total();
    await Promise.all([load(100), load(100), load(100)]);
    while ((await total()) !== before + 300) await page.waitForTimeout(50);
    await tile(page, "Time to first").locator(".more", { hasText: "of 3 answers" }).waitFor();
    assert.match(await tile(page, "Time per output").locator(".value").innerText(), /ms|s/);
    await page.locator(".chart .line[d^=M]").first().waitFor({ state: "attached" });
    const words = await page.locator(".chart svg").first().getAttribute("aria-label");
    assert.match(words, /^Generated tokens\/s: now .*, lowest .*, highest [1-9]/);
    await page.locator(".chart summary").first().click();
    assert.ok((await page.locator(".chart tbody tr").count()) > 0);
  });
});

test("devices, map and decisions are the server's own", async () => {
  await withPage(`${server.url}/#dashboard`, {}, async (page) => {
    await load(40);
    await page.locator("#devices tbody tr", { hasText: "cpu:0" }).waitFor();
    const device = await page.locator("#devices tbody tr").innerText();
    assert.match(device, /processor\s+ok\s+trusted/);
    const status = await (await fetch(`${server.url}/status`)).json();
    const { cache, device: own } = status.instances[0];
    const unknown = ["temperature", "compute_util", "memory_util"].filter((name) => own[name] === null).length;
    assert.equal(device.split("unknown").length - 1, unknown);
    await page.locator(".legend li", { hasText: `Kept for reuse: ${cache.cached} blocks` }).waitFor();
    assert.match(await page.locator(".map").getAttribute("aria-label"), /^Map of the KV cache: Held by requests: 0 blocks, 0 %/);
    assert.ok((await page.locator(".map .kv-cached").count()) > 0);
    assert.match(await page.innerText("#memory"), /longest run of free blocks is [\d,]+; fragmentation/);
    await page.locator("#dispatch tbody tr").first().waitFor();
    assert.match(await page.innerText("#dispatch"), /selected .* backend for .*\n?/);
  });
});

/** Gives a way to change what the server says of itself from now on. */
async function pretender(page) {
  let change = () => {};
  await page.route("**/status", async (route) => {
    const response = await route.fetch();
    const json = await response.json();
    change(json);
    await route.fulfill({ response, json });
  });
  return (next) => { change = next; };
}

test("on a small screen a device's row is seen whole", async () => {
  for (const locale of ["en-GB", "zh-CN"]) {
    await withPage(`${server.url}/#dashboard`, { locale, viewport: { width: 1000, height: 800 } }, async (page) => {
      const pretend = await pretender(page);
      const figures = { status: "unresponsive", trust: "quarantined", temperature: 71, compute_util: 88, memory_util: 64, kind: "simulated" };
      pretend((answer) => { Object.assign(answer.instances[0].device, figures, { reason: "7 of 320 logits differ" }); });
      await page.locator("#devices tbody tr", { hasText: "88" }).waitFor();
      assert.equal(await page.locator("#devices").evaluate((table) => table.parentElement.scrollWidth - table.parentElement.clientWidth), 0);
      await page.unrouteAll({ behavior: "wait" });
    });
  }
});

test("how far a device is trusted, and why, in both languages", async () => {
  await withPage(`${server.url}/#dashboard`, {}, async (page) => {
    const cell = (text) => page.locator("#devices tbody tr", { hasText: "cpu:0" }).locator("td", { hasText: text }).first();
    await cell("trusted").waitFor();
    const pretend = await pretender(page);
    const cases = [
      ["throttled", "suspect", "throttled", "已降频", "in doubt, being tested", "存疑，正在检测"],
      ["unresponsive", "quarantined", "does not respond", "无响应", "quarantined", "已隔离"],
      ["degraded", "retested", "degraded", "降级", "on probation", "观察期"],
    ];
    for (const [status, trust, ...words] of cases) {
      const reason = "7 of 320 logits <b>differ</b>";
      pretend((answer) => {
        answer.status = "degraded";
        Object.assign(answer.instances[0].device, { status, trust, reason });
      });
      await page.locator("#state", { hasText: "A device is out of order" }).waitFor();
      for (const [health, doubt, because] of [[words[0], words[2], "because: "], [words[1], words[3], "原因："]]) {
        await cell(health).waitFor();
        await cell(`${doubt}${because}${reason}`).waitFor();
        await page.click("#language");
      }
    }
    pretend((answer) => { answer.instances[0].device.reason = "it was slow"; });
    await cell("trustedin doubt before: it was slow").waitFor();
    await page.unrouteAll({ behavior: "wait" });
  });
});

test("the page names the API's document only where there is one", async () => {
  const bare = await startServer("--docs=false");
  try {
    await withPage(`${server.url}/#dashboard`, {}, async (page) => {
      await page.locator("#docs a").waitFor();
      assert.ok((await fetch(`${server.url}${await page.locator("#docs a").getAttribute("href")}`)).ok);
    });
    await withPage(`${bare.url}/#dashboard`, {}, async (page) => {
      await page.locator("#devices tbody tr").first().waitFor();
      assert.equal(await page.locator("#docs a").isVisible(), false);
    });
  } finally {
    await bare.stop();
  }
});

test("a server that ends is noticed, and one that comes back too", async () => {
  let other = await startServer();
  try {
    await withPage(`${other.url}/#dashboard`, {}, async (page) => {
      await page.locator("#state", { hasText: "Ready" }).waitFor();
      await other.stop();
      await page.locator("#state", { hasText: "can't be reached" }).waitFor();
      other = await startServer("--port", new URL(other.url).port);
      await page.locator("#state", { hasText: "Ready" }).waitFor();
      assert.equal(await page.locator("#dashboard-error").innerText(), "");
    }, [/ERR_CONNECTION_REFUSED/, /ERR_CONNECTION_RESET/, /ERR_EMPTY_RESPONSE/]);
  } finally {
    await other.stop();
  }
});
