"""A running qwen-server for the contract suite: CLIENTS_SERVER_URL, or one that is started here."""

import os
import re
import subprocess

import pytest

MODEL = "smollm2"


@pytest.fixture(scope="session")
def url():
    given = os.environ.get("CLIENTS_SERVER_URL")
    if given:
        yield given
        return
    program = os.environ.get("CLIENTS_SERVER", "qwen-server")
    arguments = [program, "--model", MODEL, "--port", "0", "--tool_call_parser", "hermes", "--max_seq_len", "2048"]
    server = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            ready = re.search(r"ready on (http://\S+)", line)
            if ready:
                yield ready.group(1)
                break
        else:
            pytest.fail("the server ended before it was ready: " + "".join(said))
    finally:
        server.terminate()
        server.wait(timeout=60)
