"""What clients of the soak send: each kind makes a request by chance, says what must come back, and when its client goes away."""

import json
from dataclasses import dataclass

import client

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}


@dataclass
class Plan:
    """One request. `refused`: statuses of refusals; none: an answer must come, or 429. `answers`: how many."""

    data: bytes
    path: str
    refused: frozenset = frozenset()
    answers: int = 0
    stream: bool = False
    # When the client goes away by itself: after so many bytes, or so many seconds.
    leave_after: int | None = None
    leave_when: float | None = None
    # Reads so many bytes at a time, with pauses.
    slowly: bool = False

    @property
    def leaves(self):
        return self.leave_after is not None or self.leave_when is not None


class Requests:
    def __init__(self, address, prompts, limits):
        self.address, self.prompts, self.random, self.limits = address, prompts, prompts.random, limits
        self.shared = prompts.draw(limits["shared_prefix"])

    def plan(self, kind):
        return getattr(self, kind)()

    def words(self, count):
        return " ".join(self.random.choices(WORDS, k=count))

    def post(self, path, body, **more):
        data = client.request("POST", path, self.address, body)
        return Plan(data, path, **more)

    def sampling(self):
        tokens = self.random.randint(1, self.limits["answer"])
        choices = [{"temperature": 0}, {"temperature": 1}, {"temperature": 0.7, "top_p": 0.9, "seed": self.random.randrange(1 << 31)},
                   {"temperature": 1.2, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}]
        return {"max_tokens": tokens, "ignore_eos": self.random.random() < 0.5, **self.random.choice(choices)}

    def messages(self, most=60):
        return [{"role": "user", "content": self.words(self.random.randint(1, most))}]

    # Answers that are read to the end.

    def chat(self):
        return self.post(CHAT, {"messages": self.messages(), **self.sampling()}, answers=1)

    def chat_stream(self):
        return self.post(CHAT, {"messages": self.messages(), "stream": True, **self.sampling()}, answers=1, stream=True)

    def several(self):
        n, stream = self.random.randint(2, 4), self.random.random() < 0.5
        body = {"prompt": self.prompts.draw(self.random.randint(1, 200)), "n": n, "logprobs": 5, "stream": stream, **self.sampling()}
        return self.post(COMPLETIONS, body, answers=n, stream=stream)

    def long(self):
        """Prompts so long that a few of them fill the cache: others must give way."""
        prompt = self.prompts.draw(self.random.randint(self.limits["long"] // 4, self.limits["long"]))
        return self.post(COMPLETIONS, {"prompt": prompt, "stream": True, **self.sampling()}, answers=1, stream=True)

    def shared_prefix(self):
        prompt = self.shared + self.prompts.draw(self.random.randint(1, 40))
        return self.post(COMPLETIONS, {"prompt": prompt, "stream": True, **self.sampling()}, answers=1, stream=True)

    def scored(self):
        body = {"prompt": self.prompts.draw(self.random.randint(2, 300)), "echo": True, "logprobs": 2, "max_tokens": 0}
        return self.post(COMPLETIONS, body, answers=1)

    def schema(self):
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
        return self.post(CHAT, {"messages": self.messages(20), "response_format": form, **self.sampling(), "ignore_eos": False}, answers=1)

    def stop(self):
        return self.post(CHAT, {"messages": self.messages(), "stop": [" the", "\n"], "stream": True, **self.sampling()}, answers=1, stream=True)

    def anthropic(self):
        body = {"messages": self.messages(), "max_tokens": self.random.randint(1, 100), "stream": True}
        return self.post(MESSAGES, body, answers=1, stream=True)

    def responses(self):
        body = {"input": self.words(20), "max_output_tokens": self.random.randint(16, 100), "stream": True}
        return self.post(RESPONSES, body, answers=1, stream=True)

    def slow_reader(self):
        plan = self.chat_stream()
        plan.slowly = True
        return plan

    # Clients that go away.

    def leave_at_once(self):
        plan = self.random.choice([self.chat_stream, self.chat, self.long])()
        plan.leave_after = 0
        return plan

    def leave_soon(self):
        plan = self.random.choice([self.chat_stream, self.chat, self.long, self.several])()
        plan.leave_when = self.random.random() * 4
        return plan

    def leave_in_stream(self):
        plan = self.random.choice([self.chat_stream, self.several, self.shared_prefix])()
        plan.leave_after = self.random.randint(1, 20_000)
        return plan

    def half_a_request(self):
        plan = self.chat()
        plan.data = plan.data[: self.random.randint(1, len(plan.data) - 1)]
        plan.leave_when = self.random.random()
        return plan

    # Requests that must be refused.

    def oversized(self):
        text = "x" * (self.limits["body_bytes"] + self.random.randint(1, 1 << 20))
        return self.post(CHAT, {"messages": [{"role": "user", "content": text}]}, refused=frozenset({413}))

    def too_long(self):
        prompt = self.prompts.draw(self.limits["context"] + self.random.randint(0, 2000))
        return self.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}, refused=frozenset({400}))

    def too_many_tokens(self):
        return self.post(CHAT, {"messages": self.messages(), "max_tokens": 10 ** self.random.randint(5, 25)}, refused=frozenset({400}))

    def malformed(self):
        whole = json.dumps({"messages": self.messages(), "max_tokens": 8}).encode()
        cut = whole[: self.random.randint(0, len(whole) - 1)]
        deep = b"[" * 10_000
        # A letter in front of an object makes it none.
        return self.post(CHAT, self.random.choice([cut, deep, b"x" + whole, b"\xff" + whole]), refused=frozenset({400}))

    def wrong_values(self):
        wrong = self.random.choice([
            {"temperature": 3}, {"top_p": 0}, {"n": 1000}, {"stop": [1]}, {"logit_bias": {"x": 1}}, {"max_tokens": "8"},
            {"messages": []}, {"messages": "hi"}, {"tools": 1}, {"response_format": {"type": "x"}}, {"stream_options": {}},
            {"chat_template": "x"}, {"guided_regex": "("}, {"top_logprobs": 3},
        ])
        return self.post(CHAT, {"messages": self.messages(), "max_tokens": 4, **wrong}, refused=frozenset({400}))

    def unknown(self):
        method, path, statuses = self.random.choice([
            ("GET", "/nothing", {404}), ("PUT", CHAT, {405}), ("GET", CHAT, {405}), ("POST", "/v1/nothing", {404}), ("GET", "/v1/models/no", {404}),
        ])
        return Plan(client.request(method, path, self.address, None if method == "GET" else b"{}"), path, refused=frozenset(statuses))

    def garbage(self):
        return Plan(self.random.randbytes(self.random.randint(1, 3000)) + b"\r\n\r\n", "", refused=frozenset({400, 408, 431, 505, None}))

    # Operators.

    def look(self):
        path = self.random.choice(["/metrics", "/readyz", "/healthz", "/v1/models", "/load"])
        # An engine that stood still with the whole machine says so once.
        return Plan(client.request("GET", path, self.address), path, refused=frozenset({200, 503}))

    def tokenize(self):
        return self.post("/tokenize", {"prompt": self.words(self.random.randint(1, 3000))}, refused=frozenset({200}))


WORDS = ("alpha beta river stone window Brücke 水 café 🙂 <think> </think> <tool_call> {\"a\": 1} ``` | --- # the of and to in is that "
         "for it as was with be by on not he his but at are this have from or had an they which one you were all her she there").split()


def ended(plan, reply):
    """What is wrong with an answer that should be whole; None if nothing is."""
    if plan.path == MESSAGES:
        return missing(reply, "message_stop", lambda event: (event.get("delta") or {}).get("stop_reason"))
    if plan.path == RESPONSES:
        return missing(reply, ("response.completed", "response.incomplete"), lambda event: True)
    if plan.stream:
        return stream_ended(plan, reply)
    if not reply.complete:
        return "the body ended early"
    reasons = [choice["finish_reason"] for choice in reply.json()["choices"]]
    if len(reasons) != plan.answers or not all(reasons):
        return f"expected {plan.answers} finish reasons, found {reasons}"
    return None


def stream_ended(plan, reply):
    events = reply.events()
    if not events or events[-1][1] != "[DONE]":
        return f"expected an end of the stream, found {reply.text()[-200:]!r}"
    reasons = {}
    for _, data in events[:-1]:
        chunk = json.loads(data)
        if "error" in chunk:
            return f"an error in the stream: {data[:200]}"
        for choice in chunk["choices"]:
            if choice["finish_reason"]:
                reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    once = all(len(found) == 1 for found in reasons.values())
    if len(reasons) != plan.answers or not once:
        return f"expected one finish reason for each of {plan.answers} answers, found {reasons}"
    return None


def missing(reply, last, has_reason):
    found = [json.loads(data) for _, data in reply.events() if data != "[DONE]"]
    names = (last,) if isinstance(last, str) else last
    if not any(event.get("type") in names for event in found) or not any(has_reason(event) for event in found):
        return f"expected {' or '.join(names)} with a reason, found {reply.text()[-200:]!r}"
    return None
