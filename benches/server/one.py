"""One measurement in a process of its own, so that a command that makes the machine quiet can be put around it.

Reads what to measure from a JSON file and writes the figures to standard output.
"""

import asyncio
import json
import sys
from pathlib import Path

import attack
import client
import determinism
import load
import served
import soak

MEASURES = {
    "load": load.load, "shared": load.load, "mixed": load.mixed, "idle": load.idle, "first": load.first, "attack": attack.attack,
    "determinism": determinism.determinism, "soak": soak.soak,
}

if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    try:
        print(json.dumps(asyncio.run(MEASURES[spec["what"]](spec))))
    except (served.Failed, client.Broken) as failed:
        sys.exit(str(failed))
