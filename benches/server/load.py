"""Closed loops of clients on one server: throughput, times to first tokens, times per token."""

import asyncio
import gc
import resource
import statistics
from time import perf_counter

import client
from figures import change, percentile, spread, total
from prompts import Prompts
from served import Failed, Served


def body(prompt, tokens, **more):
    """What both servers understand alike: greedy, exactly so many tokens."""
    return {
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **more,
    }


class Meter:
    """Wall time, and the processor time that this process and the server take meanwhile."""

    def __init__(self, served):
        self.served = served

    def __enter__(self):
        gc.collect()
        gc.disable()
        self.begun, self.own, self.theirs = perf_counter(), own_cpu(), self.served.cpu_seconds()
        return self

    def __exit__(self, *_):
        self.seconds = perf_counter() - self.begun
        self.generator = (own_cpu() - self.own) / self.seconds
        self.server = (self.served.cpu_seconds() - self.theirs) / self.seconds
        gc.enable()


def own_cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def closed_loop(address, requests, clients):
    """So many clients share a list of requests, each sending its next when the last was answered."""
    waiting, exchanges = list(reversed(requests)), []

    async def one():
        while waiting:
            begun, exchange = await client.open_exchange(address, waiting.pop())
            await exchange.ended
            exchanges.append((begun, exchange))

    await asyncio.gather(*(one() for _ in range(clients)))
    return exchanges


def samples_of(exchanges, tokens=None):
    """Reads what came, after everything was measured. Answers of another length would make rates incomparable."""
    samples = [client.read_sample(client.read_reply(begun, exchange.pieces)) for begun, exchange in exchanges]
    wrong = [sample.tokens for sample in samples if tokens is not None and sample.tokens != tokens]
    if wrong:
        raise Failed(f"expected answers of {tokens} tokens, found {len(wrong)} of other lengths, such as {wrong[0]}")
    return samples


def shares(before, after):
    """Shares of the time of steps that are not the model's, by our own figures."""
    steps = change(before, after, "qwen:step_seconds_total")
    if steps <= 0:
        return None
    share = lambda name: change(before, after, f"qwen:{name}_seconds_total") / steps
    return {
        "steps": change(before, after, "qwen:steps_total"),
        "all_but_the_model": 1 - share("forward"), "planning": share("plan"), "choosing": share("sample"),
    }


async def level(served, case, wanted, prompts, prefix=()):
    """One number of clients."""
    clients, count, tokens = wanted["clients"], wanted["requests"], case["answer"]
    bodies = [body(prompt, tokens) for prompt in prompts.several(count, case["prompt"], prefix)]
    requests = [client.request("POST", "/v1/completions", served.address, one) for one in bodies]
    before = await served.metrics() if served.side == "ours" else None
    with Meter(served) as meter:
        exchanges = await closed_loop(served.address, requests, clients)
    after = await served.metrics() if served.side == "ours" else None
    samples = samples_of(exchanges, tokens)
    origin = min(sample.begun for sample in samples)
    return {
        "clients": clients,
        "seconds": meter.seconds,
        "tokens_per_second": sum(sample.tokens for sample in samples) / meter.seconds,
        "prompt_tokens": statistics.median(sample.prompt_tokens for sample in samples),
        "ttft": spread([sample.ttft for sample in samples]),
        "tpot": spread([sample.tpot for sample in samples]),
        "generator_cores": meter.generator,
        "server_cores": meter.server,
        "shares": shares(before, after) if before else None,
        "memory": served.memory(),
        "samples": [sample.shown(origin) for sample in samples],
    }


async def warm(served, case, prompts):
    """What a server does once is done before anything is timed."""
    for clients in (1, 8):
        bodies = [body(prompt, 8) for prompt in prompts.several(clients, case["prompt"])]
        await closed_loop(served.address, [client.request("POST", "/v1/completions", served.address, one) for one in bodies], clients)


async def load(spec):
    """All levels on one server, with prompts that have nothing in common or, with `prefix`, begin alike."""
    case, side = spec["case"], spec["side"]
    prompts = Prompts(spec["ids"], spec["seed"])
    async with Served(side, spec["programs"], spec["file"], spec["threads"], case["arguments"][side]) as served:
        idle = served.memory()
        await warm(served, case, prompts)
        prefix = prompts.draw(case["prefix"]) if case.get("prefix") else ()
        levels = [await level(served, case, wanted, prompts, prefix) for wanted in case["levels"]]
    return {"levels": levels, "memory_idle": idle, "seconds_to_ready": served.seconds_to_ready}


async def mixed(spec):
    """Short streams, alone and then while one long prompt after the other is computed."""
    case, side = spec["case"], spec["side"]
    prompts = Prompts(spec["ids"], spec["seed"])
    async with Served(side, spec["programs"], spec["file"], spec["threads"], case["arguments"][side]) as served:
        await warm(served, case, prompts)
        encoded = lambda tokens, answer: client.request(
            "POST", "/v1/completions", served.address, body(prompts.draw(tokens), answer)
        )
        alone = [encoded(case["prompt"], case["answer"]) for _ in range(case["alone"])]
        quiet = samples_of(await closed_loop(served.address, alone, case["clients"]), case["answer"])
        longs, shorts, done = [], [], asyncio.Event()
        # Made before, because making a request takes time too.
        spare = [encoded(case["prompt"], case["answer"]) for _ in range(case["most"])]
        long_requests = [encoded(case["long_prompt"], case["long_answer"]) for _ in range(case["longs"])]

        async def short():
            while not done.is_set():
                if not spare:
                    raise Failed(f"expected the long prompts to end within {case['most']} short answers")
                begun, exchange = await client.open_exchange(served.address, spare.pop())
                await exchange.ended
                shorts.append((begun, exchange))

        async def long():
            # The short streams are at full swing before the first long prompt comes.
            while len(shorts) < case["clients"]:
                await asyncio.sleep(0.01)
            longs.extend(await closed_loop(served.address, long_requests, 1))
            done.set()

        with Meter(served) as meter:
            await asyncio.gather(long(), *(short() for _ in range(case["clients"])))
    shorts, longs = samples_of(shorts, case["answer"]), samples_of(longs, case["long_answer"])
    return {**mixed_figures(quiet, shorts, longs), "generator_cores": meter.generator}


def mixed_figures(quiet, shorts, longs):
    """Of short answers only those count of which a token fell into the time of a long prompt; of gaps, those that did."""
    windows = [(long.begun, long.times[0]) for long in longs]
    inside = lambda time: any(begin <= time <= end for begin, end in windows)
    touched = [sample for sample in shorts if any(inside(time) for time in sample.times)]
    gaps = [gap for sample in shorts for time, gap in sample.gaps() if inside(time)]
    tpot = [sample.tpot for sample in touched]
    return {
        "tpot_alone": spread([sample.tpot for sample in quiet]),
        "tpot": spread(tpot),
        "tpot_p99_by_p50": percentile(tpot, 0.99) / percentile(tpot, 0.5),
        "gaps": spread(gaps),
        "gaps_p99_by_p50": percentile(gaps, 0.99) / percentile(gaps, 0.5),
        "long_ttft": spread([long.ttft for long in longs]),
        "long_prompt_tokens": longs[0].prompt_tokens,
        "samples": {"tpot": tpot, "gaps": [round(gap, 6) for gap in gaps], "long_ttft": [long.ttft for long in longs]},
    }


async def first(spec):
    """The first request after a server says that it is ready, and those after it."""
    case, side = spec["case"], spec["side"]
    prompts = Prompts(spec["ids"], spec["seed"]).several(1 + case["requests"], case["prompt"])
    async with Served(side, spec["programs"], spec["file"], spec["threads"], spec["arguments"]) as served:
        requests = [client.request("POST", "/v1/completions", served.address, body(one, case["answer"])) for one in prompts]
        samples = samples_of(await closed_loop(served.address, requests, 1), case["answer"])
    by = lambda name: [getattr(sample, name) for sample in samples]
    return {
        name: {"first": values[0], "steady": statistics.median(values[1:]), "ratio": values[0] / statistics.median(values[1:]),
               "samples": values}
        for name, values in (("ttft", by("ttft")), ("latency", by("latency")))
    } | {"seconds_to_ready": served.seconds_to_ready}


async def idle(spec):
    """Many open streams: as many as the server computes together run, the others wait and are silent."""
    case = spec["case"]
    prompts = Prompts(spec["ids"], spec["seed"])
    async with Served("ours", spec["programs"], spec["file"], spec["threads"], case["arguments"]["ours"]) as served:
        ready = served.memory()
        await fill(served, case, prompts)
        filled = served.memory()
        one = lambda: client.request("POST", "/v1/completions", served.address, body(prompts.draw(case["prompt"]), case["answer"]))
        exchanges = []
        for _ in range(case["streams"]):
            exchanges.append((await client.open_exchange(served.address, one()))[1])
        highest, seen, figures = served.memory(), [], await served.metrics()
        for _ in range(case["seconds"]):
            await asyncio.sleep(1)
            highest = max(highest, served.memory(), key=lambda memory: memory["rss"])
            figures = await served.metrics()
            seen.append(total(figures, "qwen:requests_in_flight"))
        ended = sum(exchange.ended.done() for exchange in exchanges)
        silent = sum(not events_of(exchange) for exchange in exchanges)
        pinged = sum(any(b": ping" in data for _, data in exchange.pieces) for exchange in exchanges)
        for exchange in exchanges:
            exchange.transport.abort()
        left = await until_idle(served)
        after = served.memory()
    return {
        "ready": ready, "filled": filled, "highest": highest, "after": after, "streams": len(exchanges), "silent": silent,
        "ended": ended, "pinged": pinged, "in_flight": seen, "left": left, "above": highest["rss"] - filled["rss"],
    }


def events_of(exchange):
    return any(b"data:" in data for _, data in exchange.pieces)


async def fill(served, case, prompts):
    """Writes every block of the KV cache once and makes the largest batch, so that later growth is due to connections."""
    sends = [(case["fill_prompt"], 1)] * case["fill_requests"] + [(16, 8)] * 32
    bodies = [body(prompts.draw(prompt), tokens) for prompt, tokens in sends]
    requests = [client.request("POST", "/v1/completions", served.address, one) for one in bodies]
    samples_of(await closed_loop(served.address, requests, 32))


async def until_idle(served, seconds=30):
    """Figures when nothing is at work any more, or after so many seconds."""
    names = {
        "running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting", "in_flight": "qwen:requests_in_flight",
        "blocks_used": "qwen:kv_blocks_used",
    }
    for _ in range(seconds * 5):
        figures = await served.metrics()
        left = {name: total(figures, metric) for name, metric in names.items()}
        if not any(left.values()):
            break
        await asyncio.sleep(0.2)
    return left
