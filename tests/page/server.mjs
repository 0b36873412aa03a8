// The real server on a free port of this machine, and a stand-in before it whose answers a test writes piece by piece.

import { spawn } from "node:child_process";
import { createServer, request } from "node:http";
import { fileURLToPath } from "node:url";

const FIXTURE = fileURLToPath(new URL("../../fixtures/models/qwen3", import.meta.url));

/** Starts qwen-server; gives its address and a way to end it. */
export async function startServer(...more) {
  const program = process.env.PAGE_SERVER;
  const args = ["--port", "0", "--model", process.env.PAGE_MODEL ?? FIXTURE, "--served-model-name", "tiny", "other-name", "--warmup=false", ...more];
  const server = spawn(program, args, { stdio: ["ignore", "ignore", "pipe"] });
  let said = "";
  const url = await new Promise((resolve, reject) => {
    server.stderr.on("data", (part) => {
      said += part;
      const ready = /ready on (http:\S+)/.exec(said);
      if (ready) resolve(ready[1]);
    });
    server.on("exit", (code) => reject(new Error(`the server ended with ${code} before it was ready: ${said}`)));
  });
  const stop = () => new Promise((resolve) => {
    server.removeAllListeners("exit");
    server.on("exit", resolve);
    server.kill("SIGTERM");
  });
  return { url, stop };
}

/** A stand-in: chat completions are answered by `script`, everything else by the real server. */
export async function standIn(real, script) {
  const requests = [];
  const server = createServer(async (asked, answer) => {
    const body = [];
    for await (const part of asked) body.push(part);
    if (asked.url !== "/v1/chat/completions") return forward(real, asked, Buffer.concat(body), answer);
    const parsed = JSON.parse(Buffer.concat(body));
    const entry = { body: parsed, closed: false };
    requests.push(entry);
    answer.on("close", () => { entry.closed = !answer.writableFinished; });
    await script(parsed, stream(answer));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const stop = () => new Promise((resolve) => {
    server.closeAllConnections();
    server.close(resolve);
  });
  return { url: `http://127.0.0.1:${server.address().port}`, requests, stop };
}

function forward(real, asked, body, answer) {
  const target = new URL(asked.url, real);
  const passed = request(target, { method: asked.method, headers: { ...asked.headers, host: target.host } }, (reply) => {
    answer.writeHead(reply.statusCode, reply.headers);
    reply.pipe(answer);
  });
  passed.on("error", () => answer.destroy());
  passed.end(body);
}

/** Ways to write an answer in the protocol's form. */
function stream(answer) {
  const begin = () => {
    if (!answer.headersSent) answer.writeHead(200, { "content-type": "text/event-stream; charset=utf-8" });
  };
  const send = (value) => {
    begin();
    answer.write(`data: ${JSON.stringify(value)}\n\n`);
  };
  const chunk = (delta, more = {}) => send({ id: "x", object: "chat.completion.chunk", choices: [{ index: 0, delta, finish_reason: null, ...more }] });
  return {
    content: (text, logprobs) => chunk({ content: text }, logprobs ? { logprobs: { content: logprobs } } : {}),
    thinking: (text) => chunk({ reasoning_content: text }),
    fail: (message) => {
      send({ error: { message, type: "server_error", param: null, code: null } });
      answer.end("data: [DONE]\n\n");
    },
    refuse: (status, message, headers = {}) => {
      answer.writeHead(status, { "content-type": "application/json", ...headers });
      answer.end(JSON.stringify({ error: { message, type: "x", param: null, code: null } }));
    },
    // Once what was written is on its way.
    cut: () => answer.write(": the end\n\n", () => answer.destroy()),
    end: (reason = "stop", tokens = 3) => {
      chunk({}, { finish_reason: reason });
      send({ id: "x", choices: [], usage: { prompt_tokens: 5, completion_tokens: tokens, total_tokens: 5 + tokens } });
      answer.end("data: [DONE]\n\n");
    },
  };
}
