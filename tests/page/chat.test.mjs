// The conversation: against the real server with its fixture, and against a stand-in where an answer must be told word for word.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { ask, closeBrowser, idle, withPage } from "./browser.mjs";
import { standIn, startServer } from "./server.mjs";

let server;
before(async () => { server = await startServer(); });
after(async () => {
  await closeBrowser();
  await server.stop();
});

/** A page before a stand-in that answers by `script`. */
async function scripted(script, use, { expected = [], ...options } = {}) {
  const stub = await standIn(server.url, script);
  try {
    await withPage(stub.url, options, (page) => use(page, stub.requests), expected);
  } finally {
    await stub.stop();
  }
}

const answers = (page) => page.locator(".message.assistant .body > .text");

test("the real server answers, another answer replaces it, the conversation outlives the page", async () => {
  await withPage(server.url, {}, async (page) => {
    await page.click("#settings-toggle");
    await page.fill("#set-max_tokens", "24");
    await page.fill("#set-temperature", "0");
    await page.click("#settings-close");
    await ask(page, "hi");
    await page.locator(".figures", { hasText: "tokens" }).waitFor();
    assert.equal(await page.locator(".message").count(), 2);
    const first = await answers(page).innerText();
    await page.click("text=Another answer");
    await page.locator(".message.growing").waitFor({ state: "detached" });
    await page.locator(".figures", { hasText: "tokens" }).waitFor();
    assert.equal(await page.locator(".message").count(), 2);
    assert.equal(await answers(page).innerText(), first, "temperature 0 gives the same answer");
    await page.reload();
    assert.equal(await answers(page).innerText(), first);
    assert.equal(await page.inputValue("#set-max_tokens"), "24");
  });
});

test("an answer grows piece by piece, is announced once, and shows its speed", async () => {
  let next;
  const step = () => new Promise((resolve) => { next = resolve; });
  await scripted(async (_, out) => {
    out.content("**bo");
    await step();
    out.content("ld** end");
    await step();
    out.end("stop", 2);
  }, async (page) => {
    await ask(page, "q");
    await page.locator(".message.growing", { hasText: "**bo" }).waitFor();
    assert.equal(await page.textContent("#announcer"), "");
    next();
    await page.locator(".message.growing strong", { hasText: "bold" }).waitFor();
    assert.equal(await page.textContent("#announcer"), "");
    next();
    await page.locator(".figures", { hasText: "2 tokens · first after" }).waitFor();
    assert.equal(await page.textContent("#announcer"), "Answer: **bold** end");
  });
});

for (const [way, act] of [["the button", (page) => page.click("#stop")], ["Escape", (page) => page.keyboard.press("Escape")]]) {
  test(`${way} stops an answer, keeps what came and lets the server go`, async () => {
    await scripted((_, out) => out.content("partly"), async (page, requests) => {
      await ask(page, "q");
      await page.locator(".message.growing", { hasText: "partly" }).waitFor();
      await act(page);
      await page.locator(".figures", { hasText: "stopped" }).waitFor();
      assert.equal(await answers(page).innerText(), "partly");
      await page.locator("#send").waitFor();
      while (!requests[0].closed) await page.waitForTimeout(10);
    });
  });
}

test("thinking is folded and opens", async () => {
  await scripted((_, out) => {
    out.thinking("first *this*");
    out.content("then that");
    out.end();
  }, async (page) => {
    await ask(page, "q");
    await idle(page);
    const thinking = page.locator("details.thinking");
    assert.equal(await thinking.getAttribute("open"), null);
    assert.equal(await thinking.locator(".text").isVisible(), false);
    await thinking.locator("summary").click();
    assert.equal(await thinking.locator("em").innerText(), "this");
    assert.equal(await answers(page).innerText(), "then that");
  });
});

test("an edited message forgets what came after it", async () => {
  await scripted((body, out) => {
    out.content(`to ${body.messages.at(-1).content}, ${body.messages.length}`);
    out.end();
  }, async (page) => {
    for (const text of ["one", "two"]) {
      await ask(page, text);
      await idle(page);
    }
    assert.deepEqual(await answers(page).allInnerTexts(), ["to one, 1", "to two, 3"]);
    await page.locator(".message.user").first().getByText("Edit").click();
    await page.fill(".message.user textarea", "uno");
    await page.keyboard.press("Enter");
    await page.locator(".message.assistant", { hasText: "to uno, 1" }).waitFor();
    assert.equal(await page.locator(".message").count(), 2);
    await page.locator(".message.user").getByText("Edit").click();
    await page.keyboard.press("Escape");
    assert.equal(await page.locator(".message.user .text").innerText(), "uno");
  });
});

test("what a request says", async () => {
  await scripted((_, out) => {
    out.content("x");
    out.end("length");
  }, async (page, requests) => {
    await page.click("#settings-toggle");
    await page.fill("#system", "be short");
    await page.selectOption("#model", "other-name");
    await page.fill("#set-temperature", "0.5");
    await page.fill("#set-seed", "7");
    await page.fill("#set-top_k", "1.5");
    assert.match(await page.textContent("#set-top_k-error"), /whole number/);
    await page.fill("#question", "a");
    await page.press("#question", "Shift+Enter");
    await page.keyboard.type("b");
    await page.press("#question", "Enter");
    await page.locator(".figures", { hasText: "limit" }).waitFor();
    const messages = [{ role: "system", content: "be short" }, { role: "user", content: "a\nb" }];
    assert.deepEqual(requests[0].body, { messages, stream: true, stream_options: { include_usage: true }, model: "other-name", temperature: 0.5, seed: 7 });
  });
});

test("probabilities of tokens by mouse and by keyboard", async () => {
  const token = (text, logprob, others = []) => ({ token: text, logprob, bytes: [...Buffer.from(text)], top_logprobs: [{ token: text, logprob }, ...others] });
  await scripted((_, out) => {
    out.content("a", [token("a", Math.log(0.75), [{ token: "\n", logprob: Math.log(0.2) }])]);
    out.content(" b", [token(" b", Math.log(0.5))]);
    out.end();
  }, async (page, requests) => {
    await page.click("#settings-toggle");
    await page.check("#show-tokens");
    await ask(page, "q");
    await page.locator(".token").first().hover();
    assert.match(await page.innerText(".token-card"), /a\s+75\.0 %\s+chosen\s+⏎\s+20\.0 %/);
    await page.locator(".token").first().focus();
    await page.keyboard.press("ArrowRight");
    assert.match(await page.innerText(".token-card"), /␣b\s+50\.0 %/);
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "␣b, 50.0 %");
    assert.deepEqual([requests[0].body.logprobs, requests[0].body.top_logprobs], [true, 5]);
    await page.uncheck("#show-tokens");
    assert.equal(await answers(page).innerText(), "a b");
  });
});

test("the real server's probabilities", async () => {
  await withPage(server.url, {}, async (page) => {
    await page.click("#settings-toggle");
    await page.check("#show-tokens");
    await page.fill("#set-max_tokens", "8");
    await ask(page, "hi");
    await page.locator(".token").first().hover();
    assert.match(await page.innerText(".token-card"), /\d %/);
  });
});

test("errors are sentences, and trying again works", async () => {
  let times = 0;
  await scripted((_, out) => {
    times += 1;
    if (times === 1) out.refuse(429, "too many requests", { "retry-after": "3" });
    else if (times === 2) {
      out.content("half");
      out.fail("the device failed");
    } else if (times === 3) {
      out.content("cut");
      out.cut();
    } else {
      out.content("at last");
      out.end();
    }
  }, async (page) => {
    await ask(page, "q");
    const failure = page.locator("#failure p");
    await failure.waitFor();
    assert.equal(await failure.innerText(), "The server refused this (429): too many requests. Try again in 3 s.");
    assert.equal(await page.locator(".message").count(), 1);
    await page.click("text=Try again >> nth=-1");
    await page.locator("#failure p", { hasText: "the device failed" }).waitFor();
    assert.match(await page.innerText(".message.assistant"), /half[^]*incomplete/);
    await page.locator("#failure button").click();
    await page.locator("#failure p", { hasText: "connection broke" }).waitFor();
    await page.locator("#failure button").click();
    await page.locator(".message.assistant", { hasText: "at last" }).waitFor();
    assert.equal(await page.locator(".message").count(), 2);
  }, { expected: [/429/, /ERR_INCOMPLETE_CHUNKED_ENCODING/] });
});

test("what the real server refuses is told in its words", async () => {
  await withPage(server.url, {}, async (page) => {
    await page.click("#settings-toggle");
    await page.fill("#set-max_tokens", "5000");
    await ask(page, "hi");
    const said = await page.locator("#failure p").innerText();
    assert.match(said, /^The server refused this \(400\): .*256/);
  }, [/400/]);
});

test("a server with keys gets one", async () => {
  const locked = await startServer("--api_key", "secret");
  try {
    await withPage(locked.url, {}, async (page) => {
      await page.locator("#key-bar").waitFor();
      await page.fill("#key", "wrong");
      await page.keyboard.press("Enter");
      await page.locator("#key-bar").waitFor();
      await page.fill("#key", "secret");
      await page.keyboard.press("Enter");
      await page.locator("#state", { hasText: "Ready" }).waitFor();
      assert.equal(await page.locator("#key-bar").isVisible(), false);
      await page.click("#settings-toggle");
      await page.fill("#set-max_tokens", "4");
      await ask(page, "hi");
      await page.locator(".figures", { hasText: "tokens" }).waitFor();
      assert.equal(await page.evaluate(() => JSON.stringify(localStorage).includes("secret")), false);
    }, [/401/]);
  } finally {
    await locked.stop();
  }
});

test("what a model says is text, and clearing forgets", async () => {
  await scripted((_, out) => {
    out.content("<img src=x onerror=alert(1)> [x](javascript:alert(2)) ![y](https://elsewhere.example/y.png)");
    out.end();
  }, async (page) => {
    page.on("dialog", (dialog) => dialog.accept());
    await ask(page, "<script>alert(3)</script>");
    await idle(page);
    assert.match(await answers(page).innerText(), /<img src=x/);
    assert.equal(await page.locator(".message :is(img, script)").count(), 0);
    const [download] = await Promise.all([page.waitForEvent("download"), page.click("#export")]);
    assert.equal(download.suggestedFilename(), "conversation.json");
    await page.click("#clear");
    assert.equal(await page.locator(".message").count(), 0);
    await page.reload();
    assert.equal(await page.locator(".message").count(), 0);
  });
});

test("broken memory of the browser is no obstacle", async () => {
  await withPage(server.url, {}, async (page) => {
    await page.evaluate(() => {
      localStorage.setItem("qwen.conversation", "[{\"role\":\"x\"},7,{\"role\":\"user\",\"content\":\"kept\"}]");
      localStorage.setItem("qwen.settings", "{\"system\":3,\"temperature\":\"hot\",\"seed\":5}");
      localStorage.setItem("qwen.language", "}");
    });
    await page.reload();
    assert.deepEqual(await page.locator(".message .text").allInnerTexts(), ["kept"]);
    assert.equal(await page.inputValue("#set-seed"), "5");
  });
});
