"""Where something was measured: the processor, and the commit of these sources."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = [line.split(":", 1) for line in lines if ":" in line]
    named = lambda wanted: next((value.strip() for name, value in fields if name.strip() == wanted), "unknown")
    flags = set(named("flags").split())
    interesting = ["avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"]
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "cpu": f"{named('model name')} (family {named('cpu family')}, model {named('model')}, stepping {named('stepping')})",
        "cores": os.cpu_count(),
        "instructions": [flag for flag in interesting if flag in flags],
        "memory_bytes": int(memory.split()[1]) * 1024,
    }


def commit():
    git = lambda *words: subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout.strip()
    dirty = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + dirty
