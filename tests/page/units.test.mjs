// Parts of the page without the page: Markdown to nodes, events from pieces, in the browser that runs them.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { closeBrowser, withPage } from "./browser.mjs";
import { startServer } from "./server.mjs";

let server;
before(async () => { server = await startServer(); });
after(async () => {
  await closeBrowser();
  await server.stop();
});

/** Markdown, and the markup that its nodes would be written as; attributes that serve looks alone are left out. */
const MARKDOWN = [
  ["plain\ntwo lines", "<p>plain<br>two lines</p>"],
  ["one\n\ntwo", "<p>one</p><p>two</p>"],
  ["# Title #\ntext", "<h3>Title</h3><p>text</p>"],
  ["###### deep", "<h6>deep</h6>"],
  ["#no heading", "<p>#no heading</p>"],
  ["**bold** *it* ***both*** __b__ _i_", "<p><strong>bold</strong> <em>it</em> <em><strong>both</strong></em> <strong>b</strong> <em>i</em></p>"],
  ["snake_case_name 2*3*4 a * b", "<p>snake_case_name 2<em>3</em>4 a * b</p>"],
  ["**open", "<p>**open</p>"],
  ["*a **b* c**", "<p><em>a <em><em>b</em> c</em></em></p>"],
  ["**粗体**文字", "<p><strong>粗体</strong>文字</p>"],
  ["~~gone~~ ~not~", "<p><del>gone</del> ~not~</p>"],
  ["`a*b*` ``c`d`` `open", "<p><code>a*b*</code> <code>c`d</code> `open</p>"],
  ["\\*no\\* \\a", "<p>*no* \\a</p>"],
  ["<b>x</b> <script>alert(1)</script> &amp;", "<p>&lt;b&gt;x&lt;/b&gt; &lt;script&gt;alert(1)&lt;/script&gt; &amp;amp;</p>"],
  ["[a](https://x.example/y \"t\")", "<p><a href=\"https://x.example/y\">a</a></p>"],
  ["[**b** c](http://x.example)", "<p><a href=\"http://x.example/\"><strong>b</strong> c</a></p>"],
  ["[a](javascript:alert(1)) [b](data:text/html,x) [c](/d) [e](file:///f)", "<p><span>a</span> <span>b</span> <span>c</span> <span>e</span></p>"],
  ["[a](JaVaScRiPt:alert(1)) [b](&#106;avascript:x) [c](java\nscript:x)", "<p><span>a</span> <span>b</span> [c](java<br>script:x)</p>"],
  ["![pic](https://x.example/p.png)", "<p><a href=\"https://x.example/p.png\">pic</a></p>"],
  ["<https://x.example> see https://y.example/a_b_c.", "<p><a href=\"https://x.example/\">https://x.example</a> see <a href=\"https://y.example/a_b_c\">https://y.example/a_b_c</a>.</p>"],
  ["见https://y.example/a。好", "<p>见https://y.example/a。好</p>"],
  ["[open](", "<p>[open](</p>"],
  ["a] [b", "<p>a] [b</p>"],
  ["- a\n- b\n  - c\n    - d\n- e", "<ul><li>a</li><li>b<ul><li>c<ul><li>d</li></ul></li></ul></li><li>e</li></ul>"],
  ["1. a\n2. b\n   - c\n\n3. d", "<ol><li><p>a</p></li><li><p>b</p><ul><li>c</li></ul></li><li><p>d</p></li></ol>"],
  ["7) x\n8) y", "<ol start=\"7\"><li>x</li><li>y</li></ol>"],
  ["text\n- a", "<p>text</p><ul><li>a</li></ul>"],
  ["in\n1999. was a year", "<p>in<br>1999. was a year</p>"],
  ["1. a\n\n   ```js\n   x\n   ```\n2. b", "<ol><li><p>a</p><pre><code>x</code></pre></li><li><p>b</p></li></ol>"],
  ["- a\n\ntext", "<ul><li>a</li></ul><p>text</p>"],
  ["* a\n\n\n* b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"],
  ["> a\n> > b\n>\n> c\n\nd", "<blockquote><p>a</p><blockquote><p>b</p></blockquote><p>c</p></blockquote><p>d</p>"],
  ["---\n***", "<hr><hr>"],
  ["```py\nif x: # c\n    y = \"s\" + 1\n```", "<pre><code><span>if</span> x: <span># c</span>\n    y = <span>\"s\"</span> + <span>1</span></code></pre>"],
  ["```\n<b>\n\n**no**", "<pre><code>&lt;b&gt;\n\n**no**</code></pre>"],
  ["````\n```\n````\nx", "<pre><code>```</code></pre><p>x</p>"],
  ["| a | b |\n|:-:|--:|\n| 1 | `x|y` |\n| \\| |", "<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td><code>x|y</code></td></tr><tr><td>|</td><td></td></tr></tbody></table>"],
  ["a | b\nno table", "<p>a | b<br>no table</p>"],
  ["", ""],
  ["\n\n  \n", ""],
];

test("markdown becomes nodes", async () => {
  await withPage(server.url, {}, async (page) => {
    const found = await page.evaluate(async (texts) => {
      const { markdown } = await import("/web/markdown.js");
      return texts.map((text) => {
        const box = document.createElement("div");
        box.append(...markdown(text));
        for (const bar of box.querySelectorAll(".code-bar")) bar.remove();
        for (const wrapper of box.querySelectorAll(".code, .scroll")) wrapper.replaceWith(...wrapper.childNodes);
        for (const node of box.querySelectorAll("*")) {
          for (const { name } of [...node.attributes]) if (!["href", "start"].includes(name)) node.removeAttribute(name);
        }
        return box.innerHTML;
      });
    }, MARKDOWN.map(([text]) => text));
    MARKDOWN.forEach(([text, expected], at) => assert.equal(found[at], expected, text));
  });
});

test("links tell nobody where they come from", async () => {
  await withPage(server.url, {}, async (page) => {
    const link = await page.evaluate(async () => {
      const { markdown } = await import("/web/markdown.js");
      const link = markdown("[a](https://x.example)")[0].querySelector("a");
      return { rel: link.rel, target: link.target };
    });
    assert.deepEqual(link, { rel: "noopener noreferrer nofollow", target: "_blank" });
  });
});

test("a growing text keeps the nodes that do not change, and ends as the whole text would", async () => {
  const whole = "# T\n\nfirst *x*\n\n- a\n- b\n\n```js\nlet a = 1;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nlast";
  await withPage(server.url, {}, async (page) => {
    const [kept, grown, made] = await page.evaluate(async (whole) => {
      const { MarkdownView, markdown } = await import("/web/markdown.js");
      const box = document.createElement("div");
      const view = new MarkdownView(box);
      let first = null;
      let kept = true;
      for (let end = 1; end <= whole.length; end += 1) {
        view.update(whole.slice(0, end));
        if (end > 8) {
          first ??= box.firstChild;
          kept &&= first === box.firstChild;
        }
      }
      const other = document.createElement("div");
      other.append(...markdown(whole));
      return [kept, box.innerHTML, other.innerHTML];
    }, whole);
    assert.ok(kept);
    assert.equal(grown, made);
  });
});

test("hostile texts take no time and build no towers", async () => {
  const hostile = ["*a ".repeat(50000), "[".repeat(50000), "> ".repeat(5000) + "x", "`".repeat(50000), "a`".repeat(20000), "- ".repeat(5000) + "x", "**a*".repeat(20000), "![[](".repeat(20000), "|".repeat(50000) + "\n" + "|-".repeat(50000), "<https://".repeat(20000), "*_".repeat(30000)];
  await withPage(server.url, {}, async (page) => {
    const depths = await page.evaluate(async (texts) => {
      const { markdown } = await import("/web/markdown.js");
      const depth = (node) => 1 + [...node.childNodes].reduce((most, child) => Math.max(most, depth(child)), 0);
      return texts.map((text) => Math.max(...markdown(text).map(depth)));
    }, hostile);
    for (const depth of depths) assert.ok(depth < 80, String(depths));
  });
});

/** Texts of streams, and their events. */
const STREAMS = [
  ["data: a\n\ndata: b\n\n", [["message", "a"], ["message", "b"]]],
  ["data: a\r\n\r\ndata:b\r\r", [["message", "a"], ["message", "b"]]],
  [": ping\n\ndata: a\ndata:  b\n\n", [["message", "a\n b"]]],
  ["event: x\ndata: {\"a\":1}\n\ndata\n\n", [["x", "{\"a\":1}"], ["message", ""]]],
  ["\uFEFFdata: a\n\nid: 7\nretry: 1\n\ndata: cut", [["message", "a"]]],
  ["data: 你好 🙂\n\n", [["message", "你好 🙂"]]],
];

test("events are the same however the stream is cut", async () => {
  await withPage(server.url, {}, async (page) => {
    const found = await page.evaluate(async (texts) => {
      const { EventParser } = await import("/web/sse.js");
      const events = (parts) => {
        const parser = new EventParser();
        return parts.flatMap((part) => parser.push(part)).map(({ name, data }) => [name, data]);
      };
      return texts.map((text) => {
        const cuts = [events([...text].flatMap((c) => [c, ""]))];
        for (let at = 0; at <= text.length; at += 1) cuts.push(events([text.slice(0, at), text.slice(at)]));
        return cuts;
      });
    }, STREAMS.map(([text]) => text));
    STREAMS.forEach(([text, expected], at) => found[at].forEach((events) => assert.deepEqual(events, expected, text)));
  });
});

test("tokens that are parts of a character become one", async () => {
  await withPage(server.url, {}, async (page) => {
    const entries = await page.evaluate(async () => {
      const { TokenList } = await import("/web/tokens.js");
      const list = new TokenList();
      const token = (bytes, logprob) => ({ token: "?", bytes, logprob, top_logprobs: [] });
      list.push([token([0x61], -0.5), token([0xe4, 0xbd], -1)]);
      list.push([token([0xa0], -2)]);
      return list.entries.map(({ text, logprob }) => [text, logprob]);
    });
    assert.deepEqual(entries, [["a", -0.5], ["你", -3]]);
  });
});
