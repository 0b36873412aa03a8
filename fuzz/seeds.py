#!/usr/bin/env python3
"""Writes the seeds of every fuzz target, made from fixtures and snapshots, into OUT/TARGET/. Standard library only.

    fuzz/seeds.py OUT
"""

import json
import pathlib
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


def gguf_keys(data):
    """Yields (key, bytes of key-value pair, whether it is an array)."""
    tensors, count = struct.unpack_from("<QQ", data, 8)
    at = 24

    def text(at):
        (length,) = struct.unpack_from("<Q", data, at)
        return at + 8 + length

    def value(kind, at):
        if kind == STRING:
            return text(at)
        if kind != ARRAY:
            return at + SCALARS[kind]
        inner, items = struct.unpack_from("<IQ", data, at)
        at += 12
        for _ in range(items):
            at = value(inner, at)
        return at

    for _ in range(count):
        start, end = at, text(at)
        (kind,) = struct.unpack_from("<I", data, end)
        at = value(kind, end + 4)
        yield data[start + 8 : end].decode(), data[start:at], kind == ARRAY


def small_gguf(keys, tensors, version=3):
    """A GGUF file with these key-value bytes and (name, dims, type, size) tensors of zeros."""
    infos, body = b"", b""
    for name, dims, kind, size in tensors:
        name = name.encode()
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
        infos += b"".join(struct.pack("<Q", dim) for dim in dims) + struct.pack("<IQ", kind, len(body))
        body += bytes(size) + bytes(-size % 32)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + infos
    return head + bytes(-len(head) % 32) + body


def main(out):
    def write(target, name, data):
        folder = out / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    tensors = [("token_embd.weight", (256, 2), 12, 288), ("blk.0.attn_norm.weight", (8,), 0, 32)]
    for path in sorted((FIXTURES / "gguf").glob("*.gguf")) + sorted((FIXTURES / "gguf/split").glob("*.gguf")):
        keys = list(gguf_keys(path.read_bytes()))
        scalars = [pair for _, pair, array in keys if not array]
        write("gguf", path.name, small_gguf(scalars, tensors))
        write("config", path.name, small_gguf(scalars, []))
    write("gguf", "version2.gguf", small_gguf([], tensors, version=2))
    for path in sorted((FIXTURES / "tokenizers").glob("*/vocab.gguf")):
        write("gguf", path.parent.name, path.read_bytes()[:4096])
        write("tokenizer", f"{path.parent.name}.gguf", path.read_bytes())
        write("tokenizer", f"{path.parent.name}.json", (path.parent / "tokenizer.json").read_bytes())

    def safetensors(header, size):
        header = json.dumps(header).encode()
        return struct.pack("<Q", len(header)) + header + bytes(size)

    write("safetensors", "empty", safetensors({}, 0))
    types = [("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2), ("F8_E4M3", 1), ("I64", 8), ("U8", 1), ("BOOL", 1)]
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, size in types:
        header[f"model.{name}"] = {"dtype": name, "shape": [2, 3], "data_offsets": [end, end + 6 * size]}
        end += 6 * size
    write("safetensors", "types", safetensors(header, end))
    write("safetensors", "scalar", safetensors({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, 4))
    write("safetensors", "zero", safetensors({"a": {"dtype": "F32", "shape": [0, 9], "data_offsets": [0, 0]}}, 0))
    index = json.loads((FIXTURES / "models/qwen2_moe/model.safetensors.index.json").read_text())
    index["weight_map"] = dict(list(index["weight_map"].items())[::9])
    write("safetensors", "index", json.dumps(index))

    for path in sorted((FIXTURES / "models").glob("*/config.json")):
        write("config", path.parent.name, path.read_bytes())
    write("tokenizer", "tiny.json", (FIXTURES / "models/llama/tokenizer.json").read_bytes())
    for path in sorted((ROOT / "crates/models/tests/templates").glob("*.jinja")):
        write("chat_template", path.name, path.read_bytes())
    for path in sorted((ROOT / "crates/ir/tests/snapshots").glob("*.snap")):
        text = path.read_text().split("---\n", 2)[2]
        if text.startswith("graph "):
            write("ir_text", path.stem, text)
    for path in sorted((ROOT / "chips").glob("*.toml")):
        write("chip", path.name, path.read_bytes())
    for path in sorted((ROOT / "fuzz/corpus/gbnf").iterdir()):
        write("gbnf", path.name, path.read_bytes())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
