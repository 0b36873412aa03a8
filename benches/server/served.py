"""A server process on a loopback port of its own: started, watched through /proc, and ended."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from client import Broken, get
from figures import parse_metrics

HOST = "127.0.0.1"


class Failed(Exception):
    """A program that didn't do what it should; the text says which and why."""


def free_port():
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]


def more_files(wanted=16384):
    """Connections are open files, here and in the server, which inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def status_bytes(text, name):
    """A line of /proc/PID/status, in bytes."""
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def command(side, programs, file, threads, port, arguments):
    """`arguments` without port, model and threads."""
    if side == "peer":
        head = [programs / "llama-server", "-m", file, "-t", threads, "-fa", "on", "--host", HOST, "--port", port]
    else:
        head = [programs / "qwen-server", "--model", file, "--threads", threads, "--host", HOST, "--port", port]
    return [str(word) for word in [*head, *arguments]]


class Served:
    """Use as a context: `async with Served(…) as served`."""

    def __init__(self, side, programs, file, threads, arguments):
        more_files()
        self.side = side
        self.address = (HOST, free_port())
        self.command = command(side, Path(programs), file, threads, self.address[1], arguments)
        self.log = tempfile.TemporaryFile()
        self.process = None
        self.seconds_to_ready = None

    async def __aenter__(self):
        begun = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("QWEN_SERVER_", "LLAMA_"))}
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=environment
        )
        path = "/health" if self.side == "peer" else "/readyz"
        while time.monotonic() - begun < 600:
            if self.process.poll() is not None:
                raise Failed(f"{self.command[0]}: exit {self.process.returncode}: {self.last_words()}")
            try:
                if (await get(self.address, path)).status == 200:
                    self.seconds_to_ready = time.monotonic() - begun
                    return self
            except (OSError, Broken):
                # Not listening yet.
                pass
            await asyncio.sleep(0.01)
        raise Failed(f"{self.command[0]}: not ready within 600 s: {self.last_words()}")

    async def __aexit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(self.process.wait, 20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()

    def log_text(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def last_words(self):
        return " / ".join(self.log_text().strip().splitlines()[-5:])

    def alive(self):
        return self.process.poll() is None

    def memory(self):
        """Resident bytes now and at most so far, and of now what is no file."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return {
            "rss": status_bytes(text, "VmRSS"), "peak": status_bytes(text, "VmHWM"), "anonymous": status_bytes(text, "RssAnon")
        }

    def cpu_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def metrics(self):
        reply = await get(self.address, "/metrics")
        if reply.status != 200:
            raise Failed(f"/metrics: expected status 200, found {reply.status}")
        return parse_metrics(reply.text())
