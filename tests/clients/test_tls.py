"""HTTPS, with a certificate made here."""

import os
import re
import shutil
import subprocess

import httpx
import pytest

from conftest import MODEL


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https(tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    program = os.environ.get("CLIENTS_SERVER", "qwen-server")
    arguments = [program, "--model", MODEL, "--port", "0", "--ssl_certfile", certificate, "--ssl_keyfile", key]
    server = subprocess.Popen(arguments + ["--warmup=false"], stderr=subprocess.PIPE, text=True)
    try:
        port = next(found.group(1) for line in server.stderr if (found := re.search(r"ready on https://\S+:(\d+)", line)))
        with httpx.Client(verify=str(certificate)) as client:
            assert client.get(f"https://localhost:{port}/v1/models").json()["data"][0]["id"] == MODEL
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{port}/livez")
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0
