"""SGLang's own NIXL backend: what its POSIX plugin is started with, and whether it can be here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

FOLDER = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
"""The variable of a server that says where its files lie."""
SETTINGS: Mapping[str, Any] = {"plugin": {"posix": {"active": True}}, "l3_cleaner_enabled": False}
"""Of --hicache-storage-backend-extra-config. The cleaner deletes by how full the disk is, with
files of others too.
"""
_IMPORT_S = 120.0
_PROGRAM = """
from nixl._api import nixl_agent, nixl_agent_config
plugins = nixl_agent("try", nixl_agent_config(backends=[])).get_plugin_list()
assert "POSIX" in plugins, f"NIXL has no POSIX plugin here, but {plugins}"
"""


def missing(python: str = sys.executable) -> str | None:
    """Why servers of this interpreter cannot have the backend; None where they can. Takes a process
    of its own, since NIXL chooses its library by the CUDA of torch when it is imported.
    """
    try:
        done = subprocess.run(
            [python, "-c", _PROGRAM], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"NIXL could not be tried: {error}"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines() or ["it ended without a word"]
    return f"NIXL cannot be used ({said[-1][:200]}): pip install nixl"
