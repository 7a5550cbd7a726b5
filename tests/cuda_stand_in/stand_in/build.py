"""Builds the stand-in once, and says what a process needs to run on it.

What was built is kept by the content of its sources and the versions of torch and Python, in
`$XDG_CACHE_HOME/kvtier/cuda_stand_in` (~/.cache by default). Takes about a minute the first time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
_NATIVE = HERE / "native"
_RUNTIME = ("device", "streams", "memory", "kernels", "emulated")
_PTXAS = """#!/bin/sh
exec {python} -S -E {ptx} "$@"
"""
_NVCC = """#!/bin/bash
# nvcc, whose kernels come as PTX, so that the stand-in can translate them.
words=()
for word in "$@"; do words+=("$(sed -E 's/code=sm_/code=compute_/; s/code=\\[sm_[^]]*\\]//' <<<"$word")"); done
exec env -u LD_PRELOAD {nvcc} -no-compress "${{words[@]}}"
"""


@functools.cache
def unavailable() -> str | None:
    """Why there can be no stand-in here, or None."""
    if not shutil.which("g++") or not shutil.which("gcc"):
        return "no C++ compiler (g++)"
    if importlib.util.find_spec("torch") is None:
        return "no torch"
    if _headers() is None or _real_runtime() is None:
        return "no CUDA headers: torch was built without CUDA"
    return None


def environment(
    *,
    seed: int = 0,
    jitter_us: int = 0,
    bus_gbps: float = 0.0,
    devices: int = 1,
    device_mib: int = 8192,
    nvcc: bool = False,
    base: dict[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a child process that runs on the stand-in, from `base` or this process's.
    Builds it where it was not built. Raises RuntimeError where it cannot be built.

    `jitter_us`: the longest delay in front of an operation of a stream; some streams have all of
    it, others an eighth or none, as the `seed` draws. `bus_gbps`: speed of each direction between
    host and device, 0 for that of a memcpy. `device_mib`: memory of each of the `devices`.

    `nvcc`: SGLang's and FlashInfer's own kernels are compiled when they are needed, most of a minute
    each, and kept. Without it SGLang takes those of sgl_kernel, and FlashInfer has none.
    """
    home = built()
    found = dict(os.environ if base is None else base)
    found.update(
        LD_PRELOAD=" ".join(filter(None, (str(home / "libcudart.so.13"), found.get("LD_PRELOAD")))),
        LD_LIBRARY_PATH=_joined(home, found.get("LD_LIBRARY_PATH")),
        PYTHONPATH=_joined(home / "site", HERE.parent, found.get("PYTHONPATH")),
        CUDA_STAND_IN_HOME=str(home),
        CUDA_STAND_IN_KERNELS=str(home.parent / "kernels"),
        CUDA_STAND_IN_SEED=str(seed),
        CUDA_STAND_IN_JITTER_US=str(jitter_us),
        CUDA_STAND_IN_BUS_GBPS=str(bus_gbps),
        CUDA_STAND_IN_DEVICES=str(devices),
        CUDA_STAND_IN_MIB=str(device_mib),
        TRITON_LIBCUDA_PATH=str(home),
        TRITON_PTXAS_PATH=str(home / "ptxas"),
        TRITON_CACHE_DIR=str(home.parent / "triton"),
        # torch.compile would make kernels of floating point, and looks for a real GPU.
        TORCH_COMPILE_DISABLE="1",
        # SGLang's copies by a GPU's tensor memory accelerator: instructions that are not translated.
        SGLANG_HICACHE_TMA_TRANSFER="0",
        SGLANG_JIT_CACHE_DIR=str(home.parent / "jit"),
        TVM_FFI_CACHE_DIR=str(home.parent / "jit"),
        FLASHINFER_WORKSPACE_BASE=str(home.parent),
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="PASSIVE",
    )
    found["CUDA_HOME"] = found["CUDA_PATH"] = str(home / "no toolkit")
    if nvcc:
        if not nvcc_here():
            raise RuntimeError("no nvcc")
        # What they compile is kept by its text, so the path of the compiler must not change.
        toolkit = home.parent / "toolkit"
        found["CUDA_HOME"] = found["CUDA_PATH"] = str(toolkit)
        found["LIBRARY_PATH"] = _joined(home, found.get("LIBRARY_PATH"))  # for -lcuda
        found["FLASHINFER_NVCC"] = str(toolkit / "bin/nvcc")
    return found


def _joined(*paths: Path | str | None) -> str:
    return os.pathsep.join(str(path) for path in paths if path)


def built() -> Path:
    """The folder with everything in it, built where it was not. Raises RuntimeError."""
    if reason := unavailable():
        raise RuntimeError(reason)
    home = _cache() / _digest(*_NATIVE.iterdir(), *HERE.glob("*.py"))
    with _alone(home.parent / "lock"):
        if not (home / "built").exists():
            home.mkdir(exist_ok=True)
            _build(home)
            (home / "built").touch()
    return home


def _cache() -> Path:
    """Of the user; in a temporary folder where there is no home to write in."""
    place = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier/cuda_stand_in"
    )
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        place = Path(tempfile.gettempdir()) / f"kvtier-cuda-stand-in-{os.getuid()}"
        place.mkdir(exist_ok=True, mode=0o700)
    return place


def _digest(*sources: Path) -> str:
    """Of these files, and of what else a build of them depends on."""
    content = hashlib.sha256()
    for path in sorted(sources):
        content.update(path.read_bytes())
    versions = (importlib.metadata.version("torch"), sys.version, sys.prefix, str(nvcc_here()))
    content.update("\n".join(versions).encode())
    return content.hexdigest()[:16]


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """One process builds, the others wait."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _site() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


def _headers() -> Path | None:
    """Of CUDA: from the packages that torch needs, or a toolkit."""
    for place in (_site() / "nvidia/cu13/include", Path("/usr/local/cuda/include")):
        if (place / "cuda_runtime_api.h").exists() and (place / "cuda.h").exists():
            return place
    return None


def _real_runtime() -> Path | None:
    """The library that the stand-in takes the place of: it says which functions there are."""
    found = _site() / "nvidia/cu13/lib/libcudart.so.13"
    return found if found.exists() else None


@functools.cache
def nvcc_here() -> str | None:
    """A whole toolkit's compiler, for the kernels that SGLang and FlashInfer compile when needed."""
    on_it_already = "CUDA_STAND_IN_HOME" in os.environ  # whose toolkit is this one, wrapped
    for place in (None if on_it_already else os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if place and os.access(f"{place}/bin/nvcc", os.X_OK):
            return f"{place}/bin/nvcc"
    return None


def _build(home: Path) -> None:
    headers = _headers()
    assert headers is not None
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        flags = [
            "-std=c++17",
            "-O1",
            "-g",
            "-fPIC",
            "-fvisibility=hidden",
            f"-I{headers}",
            f"-I{_NATIVE}",
        ]
        for name in (*_RUNTIME, "driver"):
            _run("g++", *flags, "-c", _NATIVE / f"{name}.cpp", "-o", work / f"{name}.o")
        runtime = [work / f"{name}.o" for name in _RUNTIME]
        missing = _missing(_functions_of(_real_runtime()), runtime, work / "missing_runtime")
        (work / "versions").write_text("libcudart.so.13 { global: *; };\n")
        _run(
            "g++", "-shared", "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={work}/versions",
            "-o", home / "libcudart.so.13", *runtime, missing, "-lpthread", "-ldl",
        )  # fmt: skip
        missing = _missing(
            _functions_in(headers / "cuda.h"), [work / "driver.o"], work / "missing_driver"
        )
        _run(
            "g++", "-shared", "-Wl,-soname,libcuda.so.1", "-o", home / "libcuda.so.1",
            work / "driver.o", missing, home / "libcudart.so.13", "-ldl",
        )  # fmt: skip
    _link(home / "libcuda.so", Path("libcuda.so.1"))
    _extension(home, headers)
    shutil.copy(HERE / "ptx.py", home)
    shutil.copytree(_NATIVE, home / "native", dirs_exist_ok=True)
    _script(home / "ptxas", _PTXAS.format(python=sys.executable, ptx=home / "ptx.py"))
    site = home / "site"
    site.mkdir(exist_ok=True)
    shutil.copy(HERE / "at_start.py", site / "sitecustomize.py")
    if compiler := nvcc_here():
        _toolkit(home.parent / "toolkit", Path(compiler))


def _extension(home: Path, headers: Path) -> None:
    """aten.cpp, against this Python's torch. It takes longest, and is kept for other builds."""
    made = home.parent / f"aten-{_digest(_NATIVE / 'aten.cpp')}.so"
    if not made.exists():
        _compile_extension(made, home, headers, _NATIVE / "aten.cpp")
    _link(home / "libcuda_stand_in_aten.so", made)


def operators(source: Path) -> Path:
    """More operators of torch's for processes on the stand-in: a library, built where it was not.
    Raises RuntimeError.
    """
    home, headers = built(), _headers()
    assert headers is not None
    made = home.parent / f"{source.stem}-{_digest(source)}.so"
    with _alone(home.parent / "lock"):
        if not made.exists():
            _compile_extension(made, home, headers, source)
    return made


def _compile_extension(made: Path, home: Path, headers: Path, source: Path) -> None:
    partial = made.with_suffix(".partial")
    torch = _site() / "torch"
    include = [
        torch / "include",
        torch / "include/torch/csrc/api/include",
        headers,
        sysconfig.get_paths()["include"],
    ]
    libraries = ["torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda"]
    _run(
        "g++", "-std=c++20", "-O1", "-fPIC", "-shared",
        *(f"-I{place}" for place in include), source, "-o", partial,
        f"-L{torch / 'lib'}", *(f"-l{name}" for name in libraries), home / "libcudart.so.13", f"-Wl,-rpath,{torch / 'lib'}",
    )  # fmt: skip
    partial.rename(made)


def _toolkit(folder: Path, nvcc: Path) -> None:
    """A toolkit whose nvcc is wrapped; all else is the real one's."""
    real = nvcc.parent.parent
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for entry in real.iterdir():
        if entry.name != "bin":
            _link(folder / entry.name, entry)
    for entry in (real / "bin").iterdir():
        if entry.name != "nvcc":
            _link(folder / "bin" / entry.name, entry)
    _script(folder / "bin/nvcc", _NVCC.format(nvcc=nvcc))


def _link(at: Path, target: Path) -> None:
    if not at.is_symlink():
        at.symlink_to(target)


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def _functions_of(library: Path | None) -> set[str]:
    """What a shared library exports."""
    assert library is not None
    lines = _run("nm", "-D", "--defined-only", library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if " T " in line}


def _functions_in(header: Path) -> set[str]:
    """What a header of the driver declares, by the names that its library has."""
    text = header.read_text()
    names = set(re.findall(r"CUresult CUDAAPI\s+(cu\w+)\s*\(", text))
    return names | set(re.findall(r"#define cu\w+\s+(?:__CUDA_API_\w+\()?(cu\w+_v\d)", text))


def _missing(wanted: set[str], objects: list[Path], work: Path) -> Path:
    """An object with those of the functions that no object has: each says its name and fails."""
    lines = _run("nm", "--defined-only", *objects).splitlines()
    have = {line.split()[-1] for line in lines if " T " in line}
    source = [
        "int stand_in_missing(const char *name, int first_time);",
        '#define MISSING(name) __attribute__((visibility("default"))) int name(void) {'
        " static int calls; return stand_in_missing(#name, !calls++); }",
        *(f"MISSING({name})" for name in sorted(wanted - have)),
    ]
    work.with_suffix(".c").write_text("\n".join(source) + "\n")
    _run("gcc", "-O1", "-fPIC", "-w", "-c", work.with_suffix(".c"), "-o", work.with_suffix(".o"))
    return work.with_suffix(".o")


def _run(*command: object) -> str:
    """Its output. Raises RuntimeError with what it said."""
    done = subprocess.run(
        [str(word) for word in command], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[-4000:]}")
    return done.stdout
