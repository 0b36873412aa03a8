"""The same request alone and among others, cached or not, whole or as a stream: the same tokens and log-probabilities?"""

import asyncio
import json

import client
from prompts import Prompts
from served import Failed, Served


def target(prompts, number, case):
    """Every second one is greedy, the others are drawn by a seed of their own."""
    sampling = {"temperature": 0} if number % 2 == 0 else {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + number}
    return {
        "prompt": prompts.draw(case["prompt"]), "max_tokens": case["answer"], "ignore_eos": True, "logprobs": 5,
        "return_token_ids": True, **sampling,
    }


def whole(reply):
    """What must be equal, and how many tokens of the prompt were cached."""
    if reply.status != 200:
        raise Failed(f"expected status 200, found {reply.status}: {reply.text()[:300]}")
    answer = reply.json()
    choice = answer["choices"][0]
    return result(choice["text"], choice["token_ids"], choice["logprobs"]), cached(answer["usage"])


def streamed(reply):
    text, ids, usage = "", [], None
    logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for _, data in reply.events():
        if data == "[DONE]":
            continue
        chunk = json.loads(data)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["text"]
            ids += choice["token_ids"]
            for name, values in (choice["logprobs"] or {}).items():
                logprobs[name] += values
    if usage is None:
        raise Failed(f"expected a stream with usage, found status {reply.status}: {reply.text()[-300:]}")
    return result(text, ids, logprobs), cached(usage)


def result(text, ids, logprobs):
    return {"text": text, "ids": ids, "logprobs": logprobs["token_logprobs"], "top": logprobs["top_logprobs"]}


def cached(usage):
    return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def differences(wanted, found):
    """Names of what is not equal; numbers are compared as they were written, so to the last bit of a float32."""
    return [name for name in wanted if wanted[name] != found[name]]


async def determinism(spec):
    case = spec["case"]
    prompts = Prompts(spec["ids"], spec["seed"])
    targets = [target(prompts, number, case) for number in range(case["targets"])]
    compared, different, hits = 0, [], 0
    async with Served("ours", spec["programs"], spec["file"], spec["threads"], case["arguments"]["ours"]) as served:
        address = served.address

        async def ask(number, way, salt, stream):
            body = {**targets[number], "cache_salt": salt}
            if not stream:
                return number, way, *whole(await client.post(address, "/v1/completions", body))
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            return number, way, *streamed(await client.post(address, "/v1/completions", body))

        async def among(way, salt, stream):
            """Targets and others together, as many as a batch has."""
            others = [
                {"prompt": prompts.draw(case["prompt"] // 2 + 7 * other), "max_tokens": case["answer"] + other, "temperature": 1,
                 "ignore_eos": True}
                for other in range(case["batch"] - len(targets))
            ]
            jobs = [client.post(address, "/v1/completions", other) for other in others]
            asked = [ask(number, way, salt(number), stream) for number in range(len(targets))]
            results = await asyncio.gather(*asked, *jobs)
            return results[: len(targets)]

        fixed = lambda number: f"salt {number}"
        reference = {}
        for number in range(len(targets)):
            _, _, answer, found = await ask(number, "alone", fixed(number), False)
            if found:
                raise Failed(f"expected nothing in the cache before the first request, found {found} tokens")
            reference[number] = answer
        results = [await ask(number, "alone, cached", fixed(number), False) for number in range(len(targets))]
        results += [await ask(number, "alone, as a stream", f"fresh {number}", True) for number in range(len(targets))]
        results += await among("among others, not cached", lambda number: f"new {number}", False)
        results += await among("among others, cached", fixed, False)
        results += await among("among others, as a stream, cached", fixed, True)
    ways = {}
    for number, way, answer, found in results:
        compared += 1
        hits += found > 0
        wrong = differences(reference[number], answer)
        ways.setdefault(way, []).append(not wrong)
        if way.endswith("cached") and "not" not in way and not found:
            wrong.append("no hit in the cache")
        if wrong:
            different.append({"target": number, "way": way, "what": wrong, "alone": reference[number]["ids"], "found": answer["ids"]})
    return {
        "compared": compared, "equal": compared - len(different), "cached": hits, "different": different,
        "ways": {way: f"{sum(good)} of {len(good)}" for way, good in ways.items()},
    }
