"""What a hostile client may send, as data: name, bytes of a request, statuses that are right, seconds that it may take.

Statuses: 4xx where the request is wrong; 200 as well where it is harmless to this server and only looks like an attack; None: the
connection may also be closed without a word, because what came was no HTTP.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import client

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
REFUSED = frozenset({400})
# A grammar that compiles within its budget is no attack; its answer is four tokens.
HARMLESS = frozenset({200, 400})
# A grammar that fuzzing found.
REPETITIONS = (Path(__file__).resolve().parent.parent.parent / "fuzz/corpus/gbnf/nested_repetitions").read_text()


@dataclass
class Attack:
    name: str
    data: bytes
    statuses: frozenset = REFUSED
    budget: float = 0.1
    # What must not turn up in the response's headers or the log.
    forbidden: tuple = field(default=())


def chat(**more):
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


def nested(depth, inner="1"):
    return "[" * depth + inner + "]" * depth


def attacks(address, budgets, trap):
    """`budgets`: seconds of the server's own limits; `trap`: an address that nobody may ever connect to."""
    quick, grammar, slow = budgets["refusal"], budgets["grammar"], budgets["slow"]
    url = f"http://{trap[0]}:{trap[1]}"

    def post(name, body, path=CHAT, statuses=REFUSED, budget=quick, **more):
        data = body.encode() if isinstance(body, str) else body
        return Attack(name, client.request("POST", path, address, data), frozenset(statuses), budget, **more)

    def raw(name, data, statuses, budget=quick, **more):
        return Attack(name, data, frozenset(statuses), budget, **more)

    text = json.dumps(chat())
    head = lambda *lines, path=CHAT: "\r\n".join(
        [f"POST {path} HTTP/1.1", f"Host: {address[0]}", "Connection: close", "Content-Type: application/json", *lines]
    ).encode() + b"\r\n\r\n"
    chunk = lambda data: f"{len(data):x}\r\n".encode() + data + b"\r\n"
    schema = {"type": "string"}
    for _ in range(60):
        schema = {"type": "object", "properties": {"a": schema}}
    unknown = {f"x{number}": number for number in range(100_000)}
    image = lambda url: [{"type": "image_url", "image_url": {"url": url}}]
    return [
        # Sizes that are multiplied or allocated.
        post("max_tokens of 64 bits", chat(max_tokens=2**64 - 1)),
        post("max_tokens of 77 bits", text.replace('"max_tokens": 4', '"max_tokens": 99999999999999999999999')),
        post("max_tokens negative", chat(max_tokens=-1)),
        post("max_tokens of 32 bits and one", chat(max_tokens=2**32)),
        post("n of 5 million", chat(n=5_000_000)),
        post("n of 41 bits", chat(n=2**40)),
        post("top_logprobs of 4 billion", chat(logprobs=True, top_logprobs=4_000_000_000)),
        post("prompt_logprobs of the whole vocabulary", {"prompt": "a", "prompt_logprobs": -1}, COMPLETIONS),
        post("logit_bias of 5,000 tokens", chat(logit_bias={str(token): 1 for token in range(5000)})),
        post("logit_bias of a token that there isn't", chat(logit_bias={"4294967295": 1})),
        post("stop of 100,000 texts", chat(stop=["x"] * 100_000)),
        post("stop of a megabyte", chat(stop="x" * 1_000_000)),
        post("stop_token_ids of 100,000", chat(stop_token_ids=[1] * 100_000)),
        post("1,000 prompts of 16 answers", {"prompt": ["a"] * 1000, "n": 16}, COMPLETIONS),
        post("best_of", {"prompt": "a", "best_of": 1_000_000}, COMPLETIONS),
        # Numbers that are none.
        post("temperature NaN", text.replace('"max_tokens": 4', '"temperature": NaN')),
        post("temperature of 1e999", text.replace('"max_tokens": 4', '"temperature": 1e999')),
        post("top_p of -0.1", chat(top_p=-0.1)),
        post("min_p of 1e308", chat(min_p=1e308)),
        post("repetition_penalty of 0", chat(repetition_penalty=0)),
        # Forms of JSON.
        post("JSON 100,000 deep", f'{{"messages": {nested(100_000)}}}'),
        post("a million brackets", "[" * 1_000_000),
        post("JSON with keys twice", '{"messages": 1, "messages": 2}'),
        post("an array for an object", "[]"),
        post("nothing", ""),
        post("bytes that are not UTF-8", b'{"messages": "\xff\xfe"}'),
        post("half a surrogate", '{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 4}', statuses=HARMLESS, budget=1.0),
        post("20,000 messages", chat(messages=[{"role": "user", "content": ""}] * 20_000)),
        # A few unknown parameters are no error; so many are refused before they are read.
        post("100,000 unknown parameters", chat(**unknown)),
        post("100,000 unknown entries of a message", chat(messages=[{"role": "user", "content": "hi", **unknown}])),
        post("a body of 15 MB with 3 million values", '{"messages": [' + "1234," * 3_000_000 + "1]}", budget=budgets["encoding"]),
        post("a body of 15 MB with a million values", '{"messages": [' + '"1234567890ab",' * 1_000_000 + "1]}", budget=budgets["encoding"]),
        post("10,000 tools", chat(tools=[{"type": "function", "function": {"name": f"f{number}"}} for number in range(10_000)])),
        # Tokens and texts.
        post("token ids out of range", {"prompt": [4_294_967_295], "max_tokens": 1}, COMPLETIONS),
        post("token ids of 64 bits", {"prompt": [2**63], "max_tokens": 1}, COMPLETIONS),
        post("token ids negative", {"prompt": [-1], "max_tokens": 1}, COMPLETIONS),
        post("token ids that are no whole numbers", {"prompt": [1.5], "max_tokens": 1}, COMPLETIONS),
        post("ids to decode out of range", {"tokens": [4_294_967_295]}, "/detokenize"),
        post("a prompt of 50,000 ids", {"prompt": [1000] * 50_000, "max_tokens": 1}, COMPLETIONS),
        # Encoding a megabyte takes as long as it takes, within the time of a request.
        post("a prompt of a megabyte", chat(messages=[{"role": "user", "content": "word " * 200_000}]), budget=budgets["encoding"]),
        post("a megabyte of one letter", chat(messages=[{"role": "user", "content": "a" * 1_000_000}]), budget=budgets["encoding"]),
        # Grammars, schemas, templates.
        post("a regex of repeated repeats", chat(guided_regex="(a{1,1000}){1,1000}{1,1000}"), statuses=HARMLESS, budget=grammar),
        post("a regex of nested stars", chat(guided_regex="(((((((a|b)*)*)*)*)*)*)*("), statuses=HARMLESS, budget=grammar),
        post("a regex of 100 million letters", chat(guided_regex="a{100000000}"), statuses=HARMLESS, budget=grammar),
        post("a schema 60 deep", chat(guided_json=schema), statuses=HARMLESS, budget=grammar),
        post("a schema of 20,000 properties", chat(guided_json={"type": "object", "properties": {
            f"p{number}": {"type": "string"} for number in range(20_000)}}), statuses=HARMLESS, budget=grammar),
        post("a schema that is itself", chat(guided_json={"$ref": "#"}), statuses=HARMLESS, budget=grammar),
        post("a schema from elsewhere", chat(guided_json={"$ref": f"{url}/schema.json"}), statuses=HARMLESS, budget=grammar),
        post("an array of a billion items", chat(guided_json={"type": "array", "minItems": 1_000_000_000, "items": {}}),
             statuses=HARMLESS, budget=grammar),
        post("a grammar that never ends", chat(guided_grammar="start: start start"), statuses=HARMLESS, budget=grammar),
        post("a grammar of a billion letters", chat(guided_grammar='start: "a" ~ 1000000000'), statuses=HARMLESS, budget=grammar),
        post("a grammar of a megabyte", chat(guided_grammar="x" * 1_000_000), statuses=HARMLESS, budget=grammar),
        post("repetitions of thousands within each other", chat(grammar=REPETITIONS), budget=grammar),
        post("terminals that are repetitions of repetitions", chat(guided_grammar="start: " + " | ".join(
            f"A{number}" for number in range(200)) + "".join(
            f"\nA{number}: (((/[ab]/{{0,{900 + number}}} /[bc]/{{0,800}}){{0,700}} /[ac]?/{{0,700}}){{0,600}}) & /(?s:.)+/"
            for number in range(200))), statuses=HARMLESS, budget=grammar),
        post("a schema of ten choices at once", chat(guided_json={"type": "object", "allOf": [
            {"anyOf": [{"properties": {f"k{one}{other}": {"type": "string"}}} for other in range(2)]} for one in range(10)]}),
             statuses=HARMLESS, budget=grammar),
        post("a choice of 1,000 objects", chat(guided_json={"anyOf": [
            {"type": "object", "properties": {f"k{number}": {}}} for number in range(1000)]}), statuses=HARMLESS, budget=grammar),
        post("4,096 choices of 1,000 letters", chat(guided_choice=["x" * 1000] * 4096), statuses=HARMLESS, budget=grammar),
        post("a template", chat(chat_template="{% for i in range(10**9) %}x{% endfor %}")),
        post("a template by its arguments", chat(chat_template_kwargs={"chat_template": "{{ 1 }}"})),
        # Names, addresses, logs.
        post("a path for a model", chat(model="../../../../etc/passwd"), statuses={404}),
        post("lines for a model", chat(model="a\r\nSet-Cookie: x=1"), statuses={404}, forbidden=("set-cookie",)),
        post("a name of a megabyte", chat(model="m" * 1_000_000), statuses={404}),
        post("an image elsewhere", chat(messages=[{"role": "user", "content": image(f"{url}/x.png")}])),
        post("an image in a file", chat(messages=[{"role": "user", "content": image("file:///etc/passwd")}])),
        post("an image elsewhere, Anthropic", {"max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": f"{url}/x.png"}}]}]}, MESSAGES),
        post("an image elsewhere, Responses", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": f"{url}/x.png"}]}]}, RESPONSES),
        raw("a line for the log", client.request("POST", CHAT, address, chat(max_tokens=0), [("X-Request-Id", 'a","level":"FAKE')]),
            REFUSED, forbidden=("FAKE",)),
        raw("an unknown parameter that writes headers", client.request("POST", CHAT, address, chat(
            **{"max_tokens": 0, "x\r\nSet-Cookie: y": 1})), REFUSED, forbidden=("set-cookie",)),
        raw("a path out of the web page", client.request("GET", "/web/../../../etc/passwd", address), {404}),
        raw("a path out of the web page, encoded", client.request("GET", "/web/%2e%2e/%2e%2e/etc/passwd", address), {404}),
        raw("the name of another host", client.request("POST", CHAT, address, chat(), host="evil.example"), {403}),
        raw("administration", client.request("POST", "/admin/cancel", address, {}), {403, 404}),
        raw("a form", client.request("POST", CHAT, address, text.encode(), [("Content-Type", "text/plain")]), {415}),
        raw("another method", client.request("PUT", CHAT, address, b"{}"), {405}),
        # HTTP.
        raw("100 MB declared", head("Content-Length: 100000000"), {413}),
        raw("length of 65 bits", head("Content-Length: 36893488147419103232"), {400, 413}),
        raw("length negative", head("Content-Length: -1"), {400}),
        raw("two lengths", head("Content-Length: 2", "Content-Length: 3") + b"{}}", {400}),
        raw("length and chunks", head("Content-Length: 2", "Transfer-Encoding: chunked") + chunk(text.encode()) + b"0\r\n\r\n",
            {200, 400}, budget=1.0),
        raw("a chunk of 2^64 bytes", head("Transfer-Encoding: chunked") + b"10000000000000000\r\n", {400}),
        raw("100 MB in chunks", head("Transfer-Encoding: chunked") + chunk(b" " * (1 << 20)) * 100, {413}, budget=budgets["upload"]),
        raw("a header of 100 kB", client.request("GET", "/livez", address, None, [("X-Long", "x" * 100_000)]), {400, 431}),
        raw("10,000 headers", client.request("GET", "/livez", address, None, [(f"X-{number}", "x") for number in range(10_000)]), {400, 431}),
        raw("a target of 100 kB", client.request("GET", "/" + "x" * 100_000, address), {400, 404, 414, 431}),
        raw("a zero byte in a header", client.request("GET", "/livez", address, None, [("X-Zero", "a\0b")]), {400}),
        raw("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), {400, None}),
        raw("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 505, None}),
        raw("HTTP/0.9", b"GET /livez\r\n\r\n", {400, None}),
        raw("headers that never end", f"GET /livez HTTP/1.1\r\nHost: {address[0][:3]}".encode(), {408, None}, budget=slow),
        raw("a body that never comes", head("Content-Length: 50") + b"{", {408}, budget=slow),
    ]
