"""Every symbol of SGLang this package relies on, checked before serving.

SGLang swallows exceptions of plugins, so a hook that no longer fits would silently leave a stock
server behind. The manifest beside this file names each symbol with the feature that needs it, its
signature and a digest of its source, as found in the one SGLang release this package is written
for. Checking reads source files only: nothing is imported.

    # After reading the changes in a new SGLang release:
    python -m sgl_kvtier.runtime.sglang.seams --refresh
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import SeamError

SGLANG_VERSION = "0.5.23"
MANIFEST = Path(__file__).with_name(f"seams-sglang-{SGLANG_VERSION}.json")

PORTS = {
    "device slots": "claim, put back, give to a row, copy into",
    "host pages": "claim, free, pin, make room, what came and what left",
    "page I/O": "pages of host memory read from storage and written to it",
    "tree": "match, insert, evict a leaf, names of a node's pages",
    "request": "the waiting list, admission, a row and its prefix, the end",
    "offer": "a request has these pages in storage",
    "ranks": "what all ranks agree on",
    "step": "tick, idle, chunk times, flush, weights",
    "server": "arguments, registration, routes, platform: beside serving",
}
"""What of SGLang a seam is a part of. Another owner of a tier would change one port."""


@dataclass(frozen=True)
class Seam:
    """One symbol we rely on. `digest` is empty for plain data, where only the name has to be there.
    `port` says what of SGLang it is a part of, one of `PORTS`.
    """

    feature: str
    symbol: str
    why: str
    signature: str = ""
    digest: str = ""
    port: str = ""


@dataclass(frozen=True)
class SeamStatus:
    """The state of one seam in the installed SGLang. `problem` is empty when it is as expected."""

    seam: Seam
    problem: str = ""


def load_manifest() -> list[Seam]:
    """The seams in the manifest, in its order."""
    data = json.loads(MANIFEST.read_text())
    return [Seam(**entry) for entry in data["seams"]]


def installed_version() -> str | None:
    """The installed SGLang's version, or None."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check(features: Iterable[str] = ()) -> list[SeamStatus]:
    """The state of every seam, or of some features'. Reads files, imports nothing, never raises."""
    wanted = set(features)
    return [
        SeamStatus(s, _problem(s)) for s in load_manifest() if not wanted or s.feature in wanted
    ]


def require(*features: str) -> None:
    """Raises SeamError unless SGLang is the expected release and every seam of these features is in
    place.
    """
    version = installed_version()
    if version != SGLANG_VERSION:
        found = f"SGLang {version} is installed" if version else "SGLang is not installed"
        raise SeamError(
            f"{found}, but sgl_kvtier is written for {SGLANG_VERSION} and its hooks reach into "
            f"private code. Run: pip install 'sglang=={SGLANG_VERSION}' (or uninstall sgl-kvtier "
            "to run this SGLang without it)"
        )
    broken = [status for status in check(features) if status.problem]
    if broken:
        lines = "\n".join(f"  {s.seam.symbol}: {s.problem} (needed: {s.seam.why})" for s in broken)
        raise SeamError(
            f"this SGLang {version} differs from the released one in code that sgl_kvtier "
            f"hooks:\n{lines}\nReinstall it: pip install --force-reinstall --no-deps "
            f"'sglang=={SGLANG_VERSION}'. See all seams with: kvtier doctor"
        )


def require_hooks(targets: Iterable[str]) -> None:
    """Raises SeamError unless our hooks on these symbols are applied in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [
        t
        for t in targets
        if t not in HookRegistry._patched or not _ours(HookRegistry._hooks.get(t, ()))
    ]
    if missing:
        raise SeamError(
            "the plugin of sgl_kvtier is not active in this process: no hook on "
            f"{', '.join(missing)}. If SGLANG_PLUGINS is set, add kvtier to it; if SGLANG_PLATFORM "
            "names another package's platform, SGLang skips this plugin: use "
            "'--hicache-storage-backend dynamic' there (see docs/manual/store.md)"
        )


def refresh() -> None:
    """Rewrites the manifest's signatures and digests from the installed SGLang."""
    entries = []
    for seam in load_manifest():
        found = _find(seam.symbol)
        if found is None:
            raise SeamError(
                f"{seam.symbol} is not in SGLang {installed_version()}: find what replaced it first"
            )
        signature, digest = found
        entries.append(
            {
                "feature": seam.feature,
                "port": seam.port,
                "symbol": seam.symbol,
                "why": seam.why,
                "signature": signature,
                "digest": digest,
            }
        )
    data = {"sglang": installed_version(), "seams": entries}
    MANIFEST.write_text(json.dumps(data, indent=1) + "\n")


def _ours(hooks: Iterable[Any]) -> bool:
    return any(getattr(hook, "__module__", "").startswith("sgl_kvtier.") for _, hook, _ in hooks)


def _problem(seam: Seam) -> str:
    found = _find(seam.symbol)
    if found is None:
        return "missing"
    signature, digest = found
    if seam.signature and signature != seam.signature:
        return f"signature is {signature}, expected {seam.signature}"
    if seam.digest and digest != seam.digest:
        return "its source has changed"
    return ""


def _find(symbol: str) -> tuple[str, str] | None:
    """(signature, digest) of a symbol by reading its module's source; None when it is not there."""
    module, tree, source = _module_of(symbol)
    if tree is None:
        return None
    node: ast.AST = tree
    for name in symbol.removeprefix(module + ".").split("."):
        child = _child(node, name)
        if child is None:
            return None
        node = child
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"({ast.unparse(node.args)})", _digest(source, node)
    return "", ""


def _module_of(symbol: str) -> tuple[str, ast.Module | None, str]:
    parts = symbol.split(".")
    for end in range(len(parts) - 1, 0, -1):
        tree, source = _parse(".".join(parts[:end]))
        if tree is not None:
            return ".".join(parts[:end]), tree, source
    return "", None, ""


@lru_cache(maxsize=64)
def _parse(module: str) -> tuple[ast.Module | None, str]:
    spec = importlib.util.find_spec(module.split(".")[0])
    if spec is None or not spec.submodule_search_locations:
        return None, ""
    base = Path(next(iter(spec.submodule_search_locations))).joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            source = path.read_text()
            return ast.parse(source), source
    return None, ""


def _child(node: ast.AST, name: str) -> ast.AST | None:
    for child in ast.walk(node) if isinstance(node, ast.Module) else ast.iter_child_nodes(node):
        if (
            isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and child.name == name
        ):
            return child
        if isinstance(child, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in child.names
        ):
            return child
        targets = (
            child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        )
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return child
    return None


def _digest(source: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    text = textwrap.dedent("\n".join(line.rstrip() for line in lines))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--refresh", action="store_true", help="rewrite the manifest from the installed SGLang"
    )
    if parser.parse_args().refresh:
        refresh()
    for status in check():
        print(f"{status.problem or 'ok':8} {status.seam.feature:10} {status.seam.symbol}")
