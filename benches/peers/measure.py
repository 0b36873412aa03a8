"""Runs one program once and reads what it says."""

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


class Failed(Exception):
    """A program that didn't do what it should; the text says which and why."""


class Runner:
    """Starts programs, each through `wrap` (a command that makes the machine quiet), with so many threads."""

    def __init__(self, peers: Path, own: Path, threads: int, precision: str, wrap: str):
        self.peers, self.own, self.threads, self.precision = peers, own, threads, precision
        self.wrap = shlex.split(wrap)

    def run(self, command):
        """Standard output, and the most memory that the process had."""
        command = [*self.wrap, *map(str, command)]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = subprocess.Popen(command, stdout=out, stderr=err)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            if child.returncode != 0:
                last = err.read().decode(errors="replace").strip().splitlines()[-5:]
                raise Failed(f"{shlex.join(command)}: exit {child.returncode}: {' / '.join(last)}")
            return out.read().decode(), usage.ru_maxrss * 1024

    def peer(self, case, file, repetitions):
        """Samples in tokens per second, and peak memory."""
        if case.get("batch", 1) > 1:
            return self.peer_batched(case, file, repetitions)
        command = [
            self.peers / "llama-bench", "-m", file, "-t", self.threads, "-fa", "on", "-r", repetitions, "-o", "json",
            "-p", case.get("prompt", 0), "-n", case.get("generate", 0), "-d", case.get("depth", 0),
        ]
        text, memory = self.run(command)
        tests = json.loads(text)
        if len(tests) != 1:
            raise Failed(f"llama-bench: expected one test, found {len(tests)}")
        return tests[0]["samples_ts"], memory

    def peer_batched(self, case, file, repetitions):
        batch, generate, depth = case["batch"], case["generate"], max(case.get("depth", 0), 1)
        context = batch * (depth + generate) + 64
        command = [
            self.peers / "llama-batched-bench", "-m", file, "-t", self.threads, "-fa", "on", "-c", context, "-b", 2048,
            "-ub", 512, "-npp", depth, "-ntg", generate, "-npl", ",".join([str(batch)] * repetitions),
            "--output-format", "jsonl",
        ]
        text, memory = self.run(command)
        tests = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if len(tests) != repetitions:
            raise Failed(f"llama-batched-bench: expected {repetitions} tests, found {len(tests)}")
        return [test["speed_tg"] for test in tests], memory

    def ours(self, case, file, repetitions):
        """Samples in tokens per second, and the whole report."""
        command = [
            self.own / "qwen-bench", "throughput", "--json", "--model", file, "--threads", self.threads,
            "--precision", self.precision, "--repetitions", repetitions, "--prompt", case.get("prompt", 0),
            "--generate", case.get("generate", 0), "--depth", case.get("depth", 0), "--batch", case.get("batch", 1),
        ]
        text, _ = self.run(command)
        report = json.loads(text)
        part = report["prefill" if case.get("prompt") else "decode"]
        return part["tokens_per_second"]["samples"], report

    def start(self, side, file):
        """Seconds from the start of a process to its first token. Timed in a process of its own, so that waiting for `wrap`
        is not timed."""
        rest = [self.peers, self.own, self.threads, self.precision]
        return float(self.run([sys.executable, Path(__file__).resolve(), side, file, *rest])[0])

    def start_ours(self, file):
        """Seconds from the start of the process to the first token, as a wall clock outside sees it."""
        command = [
            self.own / "qwen", "generate", "--model", file, "--prompt", PROMPT, "--max-tokens", 1, "--ignore-eos",
            "--threads", self.threads, "--precision", self.precision,
        ]
        start = time.monotonic()
        with tempfile.TemporaryFile() as err:
            child = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=err)
            first = child.stdout.read(1)
            seconds = time.monotonic() - start
            child.communicate()
            if child.returncode != 0 or not first:
                raise Failed(f"qwen generate: exit {child.returncode}")
        return seconds

    def start_peer(self, file):
        """The same for the peer's server: it is asked as soon as it says that it is ready."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"http://127.0.0.1:{port}"
        command = [
            self.peers / "llama-server", "-m", file, "-t", self.threads, "-fa", "on", "-c", 4096, "-np", 1,
            "--host", "127.0.0.1", "--port", port,
        ]
        start = time.monotonic()
        child = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            body = json.dumps({"prompt": PROMPT, "n_predict": 1, "ignore_eos": True}).encode()
            request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
            while time.monotonic() - start < 300:
                if child.poll() is not None:
                    raise Failed(f"llama-server: exit {child.returncode}")
                try:
                    with urllib.request.urlopen(request, timeout=120) as answer:
                        answer.read()
                    return time.monotonic() - start
                except (urllib.error.URLError, ConnectionError):
                    # Not there yet, or still loading.
                    time.sleep(0.02)
            raise Failed("llama-server: no answer within 300 s")
        finally:
            child.terminate()
            child.wait()

    def divergence(self, file, text, precision, tokens):
        """KL of a precision to float32 over a text."""
        command = [
            self.own / "qwen-eval", "kl", "--model", file, "--file", text, "--precision-b", precision, "--tokens", tokens,
            "--threads", self.threads, "--json",
        ]
        return json.loads(self.run(command)[0])


def tell(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    side, file, peers, own, threads, precision = sys.argv[1:]
    runner = Runner(Path(peers), Path(own), int(threads), precision, "")
    try:
        print({"peer": runner.start_peer, "ours": runner.start_ours}[side](file))
    except Failed as failed:
        sys.exit(str(failed))
