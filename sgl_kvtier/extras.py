"""The command that installs an optional part of this package, in the form that works for this
installation: from the checkout, file or index that the package came from.

Standard library only.
"""

from __future__ import annotations

import json
import re
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

_NAME = "sgl-kvtier"


def how_to_install(extra: str) -> str:
    """The command that installs what an extra needs (bench, sglang or remote): from the checkout or
    file that this package came from, by the package's name where pip found it by its name, and by
    the names of the packages in the extra where the checkout or file is gone.
    """
    return installing(extra, *_noted(), Path(__file__).resolve().parents[1])


def installing(
    extra: str, direct_url: str | None, requires: list[str], beside: Path | None = None
) -> str:
    """The same for what pip noted (PEP 610, None for a package from an index) and for the
    requirements in the package's metadata. `beside` is the folder that the running package is in.
    """
    told = json.loads(direct_url or "{}")
    url = told.get("url", "")
    if "vcs_info" in told:
        return f"pip install '{_NAME}[{extra}] @ {told['vcs_info']['vcs']}+{url}'"
    source = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
    if source is None and beside is not None and (beside / "setup.cfg").is_file():
        source = beside
    if source is not None and source.exists():
        edit = "-e " if told.get("dir_info", {}).get("editable") else ""
        return f"pip install {edit}{shlex.quote(f'{source}[{extra}]')}"
    if direct_url is None:
        return f"pip install '{_NAME}[{extra}]'"
    needed = [
        requirement.partition(";")[0].strip()
        for requirement in requires
        if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", requirement)
    ]
    return f"pip install {shlex.join(needed)}" if needed else f"pip install '{_NAME}[{extra}]'"


def compiling(direct_url: str | None) -> str:
    """The command that installs the package again with its compiled parts. `direct_url` is what pip
    noted of where it came from (PEP 610), None where that was a package index.
    """
    told = json.loads(direct_url or "{}")
    source = told.get("url", "")
    if "vcs_info" in told:
        source = f"{told['vcs_info']['vcs']}+{source}"
    elif source.startswith("file:"):
        source = shlex.quote(unquote(urlsplit(source).path))
    if not source or source.endswith(".whl"):
        source = f"--no-binary {_NAME} {_NAME}"
    return f"pip install --force-reinstall --no-deps --no-cache-dir {source}"


def how_to_compile() -> str:
    """The same for this installation."""
    direct_url, _ = _noted()
    return compiling(direct_url)


def _noted() -> tuple[str | None, list[str]]:
    """What pip noted of where this package came from (PEP 610), and the package's requirements."""
    try:
        found = metadata.distribution(_NAME)
    except metadata.PackageNotFoundError:
        return None, []
    return found.read_text("direct_url.json"), found.requires or []
