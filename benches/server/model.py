"""The file that both servers serve: found, or made of the default model, and of the type that the table says."""

import subprocess
import sys

from served import Failed


def served_file(wanted, folder, own, peers):
    """`own`, `peers`: folders of programs; the peer's is needed only if there is no file yet."""
    path = folder / f"{wanted['name']}.gguf"
    if not path.exists():
        make(wanted, path, own, peers)
    # A file of another type under this name would make every figure one of something else.
    found = most_stored(output(own / "qwen", "models", "inspect", path))
    if found != wanted["type"].lower():
        raise Failed(f"{path}: expected most weights in {wanted['type'].lower()}, found {found}; remove it, and it is made again")
    return path


def make(wanted, path, own, peers):
    print(f"making {path}", file=sys.stderr, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    fetched = output(own / "qwen", "models", "fetch", wanted["fetch"]).strip()
    partial = path.with_suffix(".partial")
    subprocess.run([peers / "llama-quantize", "--allow-requantize", fetched, partial, wanted["type"]], check=True, capture_output=True)
    partial.rename(path)


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def most_stored(told):
    """The first type in the line `stored as` of `qwen models inspect`, which begins with the one that most weights have."""
    lines = (line.split() for line in told.splitlines())
    return next((words[2] for words in lines if words[:2] == ["stored", "as"]), "no line `stored as`")
