"""SGLang's page hash, compiled before a server needs it.

SGLang compiles it at the first prompt, in the thread that reads storage. A flush meanwhile ends
that server, and the first time to first token has the compiler in it. `scripts/install` runs this
module.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_NAME = "hicache_hash_cpp"
_COMPILE = (
    "from sglang.srt.mem_cache.cpp_utils import native_hash; native_hash._load_native_hash_module()"
)


@cache
def compile_page_hash() -> bool:
    """Has SGLang compile its page hash where that was not done before: half a minute, once on a
    machine. Says on standard error what happens. False where it cannot be compiled here.
    """
    if not _has_source() or _is_compiled():
        return True
    print("Compiling SGLang's page hash (once on this machine).", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], check=False, capture_output=True, text=True
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        print(
            f"SGLang's page hash cannot be compiled here ({why}). Install g++, and libcrypto's "
            "headers (libssl-dev)",
            file=sys.stderr,
        )
    return done.returncode == 0


def _has_source() -> bool:
    found = find_spec("sglang")
    folders = found.submodule_search_locations or () if found else ()
    return any(
        Path(folder, "srt", "mem_cache", "cpp_utils", "native_hash.py").is_file()
        for folder in folders
    )


def _is_compiled() -> bool:
    """Looks where torch keeps what it compiled; torch itself takes seconds to import."""
    own = os.environ.get("TORCH_EXTENSIONS_DIR")
    if own:
        return Path(own, _NAME, f"{_NAME}.so").is_file()
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions")
    version = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return any(kept.glob(f"{version}_*/{_NAME}/{_NAME}.so"))


if __name__ == "__main__":
    sys.exit(not compile_page_hash())
