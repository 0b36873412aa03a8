"""Sends each attack to a server that is busy with neighbours, and watches both."""

import asyncio
import statistics
from time import perf_counter

import client
from attacks import attacks
from figures import percentile, spread
from load import body, samples_of, until_idle, warm
from prompts import Prompts
from served import HOST, Served


# Clients refuse longer heads of responses, and no response of ours has reason to have one.
LONGEST_HEAD = 16 << 10


class Trap:
    """Listens where attacks point to, and counts who comes."""

    def __init__(self):
        self.visits = 0

    async def __aenter__(self):
        def visited(_, writer):
            self.visits += 1
            writer.close()

        self.server = await asyncio.start_server(visited, HOST, 0)
        self.address = self.server.sockets[0].getsockname()
        return self

    async def __aexit__(self, *_):
        self.server.close()


async def one(served, attack, limit):
    """Status (None: closed without a word) and seconds to the first byte of the response or the end."""
    begun, exchange = await client.open_exchange(served.address, attack.data)
    try:
        await asyncio.wait_for(asyncio.shield(exchange.ended), limit)
    except TimeoutError:
        return {"name": attack.name, "status": "none", "seconds": limit, "budget": attack.budget, "right": False, "quick": False}
    finally:
        exchange.transport.abort()
    ended = perf_counter()
    try:
        reply = client.read_reply(begun, exchange.pieces)
        status, seconds, shown = reply.status, exchange.pieces[0][0] - begun, str(reply.headers).lower()
    except client.Broken:
        status, seconds, shown = None, ended - begun, ""
    leaked = [word for word in attack.forbidden if word.lower() in shown] + ["a long head"] * (len(shown) > LONGEST_HEAD)
    return {
        "name": attack.name, "status": status, "seconds": seconds, "budget": attack.budget, "leaked": leaked,
        "right": status in attack.statuses and not leaked, "quick": seconds <= attack.budget,
    }


async def attack(spec):
    case = spec["case"]
    prompts = Prompts(spec["ids"], spec["seed"])
    async with Trap() as trap, Served("ours", spec["programs"], spec["file"], spec["threads"], case["arguments"]["ours"]) as served:
        await warm(served, case, prompts)
        stop, exchanges = asyncio.Event(), []
        spare = [
            client.request("POST", "/v1/completions", served.address, body(prompts.draw(case["prompt"]), case["answer"]))
            for _ in range(case["most"])
        ]
        listed = attacks(served.address, case["budgets"], trap.address)

        async def neighbour():
            while not stop.is_set():
                begun, exchange = await client.open_exchange(served.address, spare.pop())
                await exchange.ended
                exchanges.append((begun, exchange))

        neighbours = [asyncio.create_task(neighbour()) for _ in range(case["clients"])]
        begin = perf_counter()
        await asyncio.sleep(case["quiet_seconds"])
        between, results = perf_counter(), []
        for number in range(case["repeats"]):
            for attack in listed:
                results.append(await one(served, attack, 30))
                await asyncio.sleep(case["pause"])
        end = perf_counter()
        stop.set()
        await asyncio.gather(*neighbours)
        left = await until_idle(served)
        log, alive = served.log_text(), served.alive()
    injected = sum(line.startswith("FAKE") or '"level":"FAKE' in line for line in log.splitlines())
    samples = samples_of(exchanges, case["answer"])
    gaps = [gap for sample in samples for gap in sample.gaps()]
    quiet = [gap for time, gap in gaps if begin <= time < between]
    attacked = [gap for time, gap in gaps if between <= time < end]
    moved = [result for result in results if not result["right"] or not result["quick"]]
    return {
        "attacks": len(listed), "repeats": case["repeats"], "sent": len(results),
        "right": sum(result["right"] for result in results), "quick": sum(result["quick"] for result in results),
        "not": moved, "slowest": sorted(results, key=lambda result: result["seconds"] / result["budget"])[-5:],
        "visits": trap.visits, "injected": injected, "alive": alive, "left": left,
        "neighbours_quiet": spread(quiet), "neighbours_attacked": spread(attacked),
        "neighbours_ratio": statistics.median(attacked) / statistics.median(quiet),
        "neighbours_p99_ratio": percentile(attacked, 0.99) / percentile(quiet, 0.99),
        "results": results,
    }
