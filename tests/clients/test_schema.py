"""Schemathesis on the OpenAPI document: no 5xx, no undocumented response. On a tiny model: thousands of requests."""

import pathlib
import subprocess
import sys

from conftest import started

ROOT = pathlib.Path(__file__).parents[2]
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_document(tmp_path):
    model = ROOT / "fixtures/models/qwen3"
    with started("--model", model, "--warmup=false", "--request_timeout", "20") as url:
        schemathesis = pathlib.Path(sys.executable).with_name("schemathesis")
        command = [schemathesis, "run", f"{url}/openapi.json", "--checks", CHECKS, "--max-examples", "60"]
        # Administration is off.
        command += ["--exclude-path-regex", "admin"]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout[-6000:]
