"""SGLang's own NIXL and Mooncake backends: what NIXL's POSIX plugin is started with, where their
libraries are, and whether both can be here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_kvtier.extras import how_to_install
from sgl_kvtier.remote.servers import missing_engine

NIXL_FOLDER = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
"""The variable of a server that says where NIXL's files lie."""
NIXL_SETTINGS: Mapping[str, Any] = {
    "plugin": {"posix": {"active": True}},
    "l3_cleaner_enabled": False,
}
"""Of --hicache-storage-backend-extra-config. The cleaner deletes by how full the disk is, with
files of others too.
"""
_IMPORT_S = 120.0
_NIXL = """
from nixl._api import nixl_agent, nixl_agent_config
plugins = nixl_agent("try", nixl_agent_config(backends=[])).get_plugin_list()
assert "POSIX" in plugins, f"NIXL has no POSIX plugin here, but {plugins}"
"""


def use_installed() -> None:
    """Has this process, and those that it starts, find what `scripts/install --with` put into
    ENVIRONMENT/peers. Does nothing where that is not.
    """
    home = str(Path(sys.prefix, "peers"))
    folder = sysconfig.get_path("purelib", vars={"base": home, "platbase": home})
    if not Path(folder).is_dir() or folder in sys.path:
        return
    sys.path.append(folder)
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{known}{os.pathsep}{folder}" if known else folder


def missing_nixl(python: str = sys.executable) -> str | None:
    """Why servers of this interpreter cannot have the backend; None where they can. Slow."""
    return _cannot(_NIXL, "NIXL", "scripts/compare --with nixl, or pip install nixl", python)


def missing_mooncake(python: str = sys.executable) -> str | None:
    """The same of Mooncake, and why this host cannot run its master and an owner of memory."""
    return missing_engine() or _cannot(
        "import mooncake.store", "Mooncake", how_to_install("remote"), python
    )


def _cannot(program: str, name: str, advice: str, python: str) -> str | None:
    """What a process of its own says. NIXL chooses its library by the CUDA of torch when it is
    imported.
    """
    try:
        done = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name} could not be tried: {error}"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines() or ["it ended without a word"]
    return f"{name} cannot be used ({said[-1][:200]}): {advice}"
