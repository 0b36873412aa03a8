"""A running qwen-server for the contract suite: CLIENTS_SERVER_URL, or one that is started here."""

import contextlib
import os
import re
import subprocess
import tempfile
import time

import pytest

MODEL = "smollm2"


@contextlib.contextmanager
def started(*arguments):
    """A server with the given arguments; its URL. Its log goes to a file: a pipe that nobody reads would stop it."""
    program = os.environ.get("CLIENTS_SERVER", "qwen-server")
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen([program, "--port", "0", *map(str, arguments)], stderr=log)
        try:
            while True:
                said = open(log.name).read()
                ready = re.search(r"ready on (https?://\S+)", said)
                if ready:
                    break
                assert server.poll() is None, f"the server ended before it was ready: {said}"
                time.sleep(0.05)
            yield ready.group(1)
        finally:
            server.terminate()
            assert server.wait(timeout=60) == 0


@pytest.fixture(scope="session")
def url():
    given = os.environ.get("CLIENTS_SERVER_URL")
    if given:
        yield given
        return
    with started("--model", MODEL, "--tool_call_parser", "hermes", "--max_seq_len", "2048") as url:
        yield url
