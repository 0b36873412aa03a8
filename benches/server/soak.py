"""Half an hour of everything at once: answers, departures, nonsense, and too little memory. Then nothing may be left."""

import asyncio
import signal
import sys
import time
from collections import Counter

import client
from figures import growth, total
from load import fill, until_idle
from prompts import Prompts
from served import Served
from soak_requests import Requests, ended

# What a server that is at its limit may say to any request.
BUSY = 429
# Bytes of a request that are kept if its answer is wrong.
LONGEST_KEPT = 1 << 16


class Clock:
    """Seconds that this process was awake: if the machine stands still, so does this clock, and no limit passes meanwhile."""

    def __init__(self):
        self.now = 0.0

    async def run(self):
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            self.now += min(now - last, 1.0)
            last = now


class Soak:
    def __init__(self, served, requests, case, clock):
        self.served, self.requests, self.case, self.clock = served, requests, case, clock
        self.outcomes, self.failures, self.answers = Counter(), [], 0

    def fail(self, kind, what, plan=None):
        self.outcomes[f"{kind}: WRONG"] += 1
        if len(self.failures) < 50:
            sent = plan.data[:LONGEST_KEPT].decode(errors="replace") if plan else None
            self.failures.append({"kind": kind, "at": round(self.clock.now, 1), "what": what, "sent": sent})
            print(f"{self.clock.now:.0f} s, {kind}: {what}", file=sys.stderr, flush=True)

    async def client(self, end):
        kinds, weights = zip(*self.case["kinds"].items())
        while self.clock.now < end and self.served.alive():
            kind = self.requests.random.choices(kinds, weights)[0]
            plan = self.requests.plan(kind)
            try:
                await self.one(kind, plan)
            except OSError as error:
                self.fail(kind, f"no connection: {error}")

    async def one(self, kind, plan):
        begun, exchange = await client.open_exchange(self.served.address, plan.data, plan.leave_after)
        began = self.clock.now
        while not exchange.ended.done():
            if plan.leave_when is not None and self.clock.now - began >= plan.leave_when:
                exchange.transport.abort()
            if self.clock.now - began > self.case["stuck_seconds"]:
                exchange.transport.abort()
                self.fail(kind, f"stuck: {len(exchange.pieces)} pieces in {self.case['stuck_seconds']} s", plan)
                return
            if plan.slowly:
                await self.pause(exchange)
            await asyncio.wait([exchange.ended], timeout=0.3)
        if plan.leaves:
            self.outcomes[f"{kind}: left"] += 1
        else:
            self.judge(kind, plan, begun, exchange)

    async def pause(self, exchange):
        exchange.transport.pause_reading()
        await asyncio.sleep(self.requests.random.random())
        if not exchange.ended.done():
            exchange.transport.resume_reading()

    def judge(self, kind, plan, begun, exchange):
        try:
            reply = client.read_reply(begun, exchange.pieces)
        except client.Broken as error:
            if None in plan.refused:
                self.outcomes[f"{kind}: closed"] += 1
            else:
                self.fail(kind, f"{error}; the connection ended with {exchange.ended.result()}", plan)
            return
        if reply.status == BUSY:
            if "retry-after" not in reply.headers:
                self.fail(kind, "429 without Retry-After")
            self.outcomes[f"{kind}: 429"] += 1
        elif plan.refused:
            if reply.status in plan.refused:
                self.outcomes[f"{kind}: {reply.status}"] += 1
            else:
                self.fail(kind, f"expected {plan.refused}, found {reply.status}: {reply.text()[:200]}", plan)
        elif reply.status != 200:
            self.fail(kind, f"expected an answer, found {reply.status}: {reply.text()[:200]}", plan)
        elif wrong := ended(plan, reply):
            self.fail(kind, wrong, plan)
        else:
            self.answers += plan.answers
            self.outcomes[f"{kind}: answered"] += 1


async def watch(served, clock, samples):
    while served.alive():
        samples.append((round(clock.now, 2), served.memory()["rss"]))
        await asyncio.sleep(2)


async def report(soak, clock):
    while True:
        await asyncio.sleep(60)
        wrong = len(soak.failures)
        print(f"{clock.now:.0f} s, {soak.answers} answers, {sum(soak.outcomes.values())} requests, {wrong} wrong, "
              f"{soak.served.memory()['rss'] >> 20} MiB", file=sys.stderr, flush=True)


def accounts(figures, answers):
    """What figures must agree on when nothing is at work: name to whether they do, and the numbers."""
    by_reason = {labels.get("finished_reason"): value for labels, value in figures.get("vllm:request_success_total", [])}
    ended, abandoned = sum(by_reason.values()), total(figures, "qwen:abandoned_total")
    begun = total(figures, "vllm:request_params_n_sum")
    status = Counter()
    for labels, value in figures.get("qwen:http_responses_total", []):
        status[labels["status"]] += value
    checks = {
        "every answer that was begun ended or was left by its client": begun == ended + abandoned,
        "each answer that ended has a latency": total(figures, "vllm:e2e_request_latency_seconds_count") == ended,
        "at least the answers that clients saw ended": ended >= answers,
        "no answer ended by an error": not by_reason.get("error"),
        "no logits were broken": total(figures, "vllm:corrupted_requests_total") == 0,
        "no step failed": total(figures, "qwen:device_errors_total") == 0,
        "no response was 5xx but 503": not any(code.startswith("5") and code != "503" for code in status),
        "blocks are free or cached": total(figures, "qwen:kv_blocks_used") == 0
        and total(figures, "qwen:kv_blocks_cached") <= total(figures, "qwen:kv_blocks"),
    }
    numbers = {
        "begun": begun, "ended": by_reason, "abandoned": abandoned, "seen": answers, "statuses": dict(status),
        "preemptions": total(figures, "vllm:num_preemptions_total"), "steps": total(figures, "qwen:steps_total"),
        "blocks_total": total(figures, "qwen:kv_blocks"), "blocks_cached": total(figures, "qwen:kv_blocks_cached"),
        "connections": total(figures, "qwen:http_connections"),
    }
    return checks, numbers


async def soak(spec):
    case, clock, samples = spec["case"], Clock(), []
    prompts = Prompts(spec["ids"], spec["seed"])
    seconds = spec["minutes"] * 60
    async with Served("ours", spec["programs"], spec["file"], spec["threads"], case["arguments"]["ours"]) as served:
        await fill(served, case, prompts)
        running = Soak(served, Requests(served.address, prompts, case["limits"]), case, clock)
        tasks = [asyncio.create_task(one) for one in (clock.run(), watch(served, clock, samples), report(running, clock))]
        await asyncio.gather(*(running.client(seconds) for _ in range(case["clients"])))
        alive = served.alive()
        left, figures, code = {}, {}, None
        if alive:
            left = await until_idle(served, 60)
            figures = await served.metrics()
            samples.append((clock.now, served.memory()["rss"]))
            served.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(served.process.wait, 60)
        for task in tasks:
            task.cancel()
        words = [line for line in served.log_text().splitlines() if "ERROR" in line or "panicked" in line]
    checks, numbers = accounts(figures, running.answers)
    return {
        "minutes": spec["minutes"], "alive": alive, "exit_code": code, "left": left, "checks": checks, "figures": numbers,
        "requests": sum(running.outcomes.values()), "answers": running.answers, "outcomes": dict(sorted(running.outcomes.items())),
        "failures": running.failures, "errors_in_the_log": words[:20], "growth": growth(samples), "rss": samples,
    }
