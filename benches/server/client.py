"""A small HTTP/1.1 client for streams that costs little while it measures.

While a response arrives, only the time and the bytes of each piece are kept; they are read afterwards. Every request has a connection
of its own, which the server closes at the end, so that the end needs no looking for. Loopback only.
"""

import asyncio
import json
from dataclasses import dataclass, field
from time import perf_counter


class Broken(Exception):
    """A response that is none."""


class Exchange(asyncio.Protocol):
    """Sends a request and keeps what comes back. Goes away after `leave_after` bytes, if given."""

    def __init__(self, request, leave_after=None):
        self.request = request
        self.leave_after = leave_after
        self.pieces = []
        self.size = 0
        self.transport = None
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport
        transport.write(self.request)
        if self.leave_after == 0:
            transport.close()

    def data_received(self, data):
        self.pieces.append((perf_counter(), data))
        if self.leave_after is not None:
            self.size += len(data)
            if self.size >= self.leave_after:
                self.transport.abort()

    def connection_lost(self, error):
        if not self.ended.done():
            self.ended.set_result(error)


@dataclass
class Reply:
    """A response with the times of its parts, in seconds of one clock."""

    begun: float
    status: int = 0
    headers: dict = field(default_factory=dict)
    body: list = field(default_factory=list)
    complete: bool = False

    def text(self):
        return b"".join(data for _, data in self.body).decode(errors="replace")

    def json(self):
        return json.loads(self.text())

    def events(self):
        """Data of server-sent events with their times."""
        return list(events(self.body))

    def first_byte(self):
        return self.body[0][0] - self.begun if self.body else None


def read_reply(begun, pieces):
    """Pieces as they came, made a response. Raises Broken if there is no head."""
    head, rest = split_head(pieces)
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
        raise Broken(f"expected a line of status, found {lines[0][:80]!r}")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    reply = Reply(begun, int(words[1]), headers)
    if headers.get("transfer-encoding", "").lower() == "chunked":
        reply.body, reply.complete = unchunk(rest)
    else:
        reply.body = [piece for piece in rest if piece[1]]
        length = headers.get("content-length")
        reply.complete = length is None or sum(len(data) for _, data in reply.body) >= int(length)
    # A response without a body still has a time.
    reply.body = reply.body or [(pieces[-1][0], b"")]
    return reply


def split_head(pieces):
    head = b""
    for number, (time, data) in enumerate(pieces):
        head += data
        end = head.find(b"\r\n\r\n")
        if end >= 0:
            return head[:end], [(time, head[end + 4 :]), *pieces[number + 1 :]]
    raise Broken(f"expected a head, found {head[:80]!r}")


def unchunk(pieces):
    """Takes the chunked encoding away; what of a chunk came in one piece stays one piece. And whether the last chunk came."""
    body, line, left, trailer = [], b"", 0, False
    for time, data in pieces:
        at, out = 0, b""
        while at < len(data):
            if left > 0:
                part = data[at : at + left]
                out += part
                at += len(part)
                left -= len(part)
                continue
            end = data.find(b"\n", at)
            if end < 0:
                line += data[at:]
                break
            line, at = (line + data[at:end]).strip(), end + 1
            if line:
                left = int(line.split(b";")[0], 16)
                trailer = left == 0
            line = b""
        if out:
            body.append((time, out))
    return body, trailer


def events(body):
    """Server-sent events: (time of the last byte, data). Comments and names of events are left out: data tells its type."""
    rest = b""
    for time, data in body:
        rest += data
        frames = rest.split(b"\n\n")
        rest = frames.pop()
        for frame in frames:
            lines = [line[5:].strip() for line in frame.splitlines() if line.startswith(b"data:")]
            if lines:
                yield time, b"\n".join(lines).decode()


def request(method, path, address, body=None, headers=(), host=None):
    """The bytes of a request; `body` is bytes, or something for JSON."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host or address[0]}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers]
    data = b""
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        named = {name.lower() for name, _ in headers}
        if "content-type" not in named:
            lines.append("Content-Type: application/json")
        if "transfer-encoding" not in named:
            lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def open_exchange(address, data, leave_after=None):
    begun = perf_counter()
    loop = asyncio.get_running_loop()
    _, exchange = await loop.create_connection(lambda: Exchange(data, leave_after), *address)
    return begun, exchange


async def send(address, data, limit=600.0):
    """One exchange to its end. Raises Broken, OSError, or TimeoutError after `limit` seconds."""
    begun, exchange = await open_exchange(address, data)
    try:
        await asyncio.wait_for(asyncio.shield(exchange.ended), limit)
    finally:
        exchange.transport.abort()
    if not exchange.pieces:
        raise Broken("expected a response, found a closed connection")
    return read_reply(begun, exchange.pieces)


async def get(address, path):
    return await send(address, request("GET", path, address))


async def post(address, path, body):
    return await send(address, request("POST", path, address, body))


@dataclass
class Sample:
    """One streamed answer as a client felt it. Times in seconds; `begun` and `times` by the clock, the others from the start."""

    begun: float
    times: list
    tokens: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def ttft(self):
        return self.times[0] - self.begun

    @property
    def latency(self):
        return self.times[-1] - self.begun

    @property
    def tpot(self):
        """(latency - time to first token) / (tokens - 1)."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)

    def gaps(self):
        return [(after, after - before) for before, after in zip(self.times, self.times[1:])]

    def shown(self, origin):
        return {
            "begun": round(self.begun - origin, 6), "ttft": round(self.ttft, 6), "tpot": round(self.tpot, 6),
            "latency": round(self.latency, 6), "tokens": self.tokens, "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }


def read_sample(reply):
    """A stream of /v1/completions with usage. Tokens are what `usage` says; a time is that of an event with text."""
    if reply.status != 200:
        raise Broken(f"expected status 200, found {reply.status}: {reply.text()[:300]}")
    times, usage, done = [], None, False
    for time, data in reply.events():
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise Broken(f"expected an answer, found the error {data[:300]}")
        usage = chunk.get("usage") or usage
        if any(choice.get("text") for choice in chunk["choices"]):
            times.append(time)
    if not done or not usage or not times:
        raise Broken(f"expected text, usage and an end, found {len(times)} events with text, usage {usage}, end {done}")
    details = usage.get("prompt_tokens_details") or {}
    return Sample(reply.begun, times, usage["completion_tokens"], usage["prompt_tokens"], details.get("cached_tokens") or 0)
