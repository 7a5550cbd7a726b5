"""SGLang's page hash: whether it can be compiled here, and what to install where it cannot.

SGLang names every page of storage by a hash that is an extension in C++. It compiles the extension
at the first prompt, in the thread that reads storage. Where that fails, no page is ever stored or
found, with a traceback a request, and where it works, the first time to first token has the
compiler in it. Therefore it is compiled before a server starts. `scripts/install` runs this module.

Imports neither SGLang nor torch; a process of its own does (runtime/sglang/page_hash.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

LIMIT_S = 600.0
"""How long compiling may take; it takes half a minute on an idle core."""
_NAME = "hicache_hash_cpp"
_BEGINS = "SGLang's page hash"
_PACKAGES = ("g++", "ninja-build", "libssl-dev", "python3-dev")
"""Everything that is needed, by Debian's names. SGLang's own wheels bring the rest."""


@cache
def compile_page_hash() -> str:
    """Has SGLang compile its page hash where that was not done before, once on a machine. Says on
    standard error that it does. Returns why it cannot be compiled and what to do, in one line;
    empty where it is compiled, or where this SGLang needs none.
    """
    if not _has_source() or is_compiled():
        return ""
    print("Compiling SGLang's page hash (once on this machine).", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sgl_kvtier.runtime.sglang.page_hash"],
            check=False,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return refusal(str(error))
    if not done.returncode:
        return ""
    own = [line for line in done.stderr.splitlines() if line.startswith(_BEGINS)]
    return own[-1] if own else refusal(f"the compiling process ended with {done.returncode}")


def is_compiled() -> bool:
    """Whether the extension is there with what SGLang needs to load it again: a folder that can be
    written, ninja, and a compiler. torch looks for all of them at each start.
    """
    find_ninja()
    return (
        any(file.is_file() and os.access(file.parent.parent, os.W_OK) for file in _kept())
        and shutil.which("ninja") is not None
        and shutil.which(_compiler()) is not None
    )


def find_ninja() -> None:
    """Adds the folder of this interpreter's programs to PATH where ninja is only there: a virtual
    environment that was not activated has it and does not find it. Child processes inherit PATH.
    """
    own = Path(sys.executable).parent
    if shutil.which("ninja") is None and (own / "ninja").is_file():
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), str(own))))


def refusal(said: str) -> str:
    """Why the page hash cannot be compiled and what to do, in one line. `said` is what torch, ninja
    and the compiler said.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no reason was given"]
    telling = (line for mark in _TELLING for line in lines if mark in line)
    why = next(telling, lines[-1])[:200]
    if any(mark in said for mark in _FOLDER):
        what = "Set TORCH_EXTENSIONS_DIR to a folder that this user can write and execute from"
    elif "only supported on" in said:
        what = "Use a host that SGLang supports, or another --hicache-storage-backend"
    else:
        what = f"Run: apt-get install {' '.join(_missing(said) or _PACKAGES)}"
    return (
        f"{_BEGINS} cannot be compiled here ({why}), and without it no page is stored or found. "
        f"{what}"
    )


_TELLING = (
    "only supported on",
    "Permission denied",
    "Read-only file system",
    "No space left",
    "failed to map segment",
    "Ninja is required",
    "not found",
    "fatal error:",
    "cannot find",
    "error:",
)
"""In the lines that say what is wrong, the most telling first."""
_FOLDER = ("Permission denied", "Read-only file system", "No space left", "failed to map segment")


def _missing(said: str) -> list[str]:
    """The packages that are missing, by looking for what they bring and by what was said."""
    python = Path(sysconfig.get_path("include"), "Python.h")
    lacking = (
        shutil.which(_compiler()) is None,
        shutil.which("ninja") is None,
        not any(Path(folder, "openssl", "sha.h").is_file() for folder in _headers())
        or "openssl/" in said
        or "-lcrypto" in said,
        not python.is_file(),
    )
    return [name for name, lacks in zip(_PACKAGES, lacking, strict=True) if lacks]


def _headers() -> Iterator[str]:
    """Folders in which a compiler looks for headers."""
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        yield from filter(None, os.environ.get(variable, "").split(os.pathsep))
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    yield from ("/usr/include", f"/usr/include/{multiarch}", "/usr/local/include")
    yield str(Path(sys.prefix, "include"))


def _compiler() -> str:
    """The compiler that torch calls."""
    return os.environ.get("CXX", "c++").split(" ")[0]


def _has_source() -> bool:
    found = find_spec("sglang")
    folders = found.submodule_search_locations or () if found else ()
    return any(
        Path(folder, "srt", "mem_cache", "cpp_utils", "native_hash.py").is_file()
        for folder in folders
    )


def _kept() -> Iterator[Path]:
    """Where torch may have kept it; torch itself takes seconds to import."""
    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    if own:
        yield Path(own, _NAME, f"{_NAME}.so")
        return
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions")
    version = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    yield from kept.glob(f"{version}_*/{_NAME}/{_NAME}.so")


if __name__ == "__main__":
    sys.exit(compile_page_hash() or 0)
