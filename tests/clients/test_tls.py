"""HTTPS, with a certificate made here."""

import shutil
import ssl
import subprocess

import httpx
import pytest

from conftest import MODEL, started


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https(tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    files = ["--ssl_certfile", certificate, "--ssl_keyfile", key]
    with started("--model", MODEL, "--warmup=false", *files) as url:
        address = url.replace("127.0.0.1", "localhost")
        trusted = ssl.create_default_context(cafile=certificate)
        with httpx.Client(verify=trusted) as client:
            assert client.get(f"{address}/v1/models").json()["data"][0]["id"] == MODEL
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{address.replace('https', 'http')}/livez")
