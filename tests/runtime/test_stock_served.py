"""A server that uses nothing of this package, with its plugin loaded and without: what differs is
said in the docs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from serving import STRICT, Answer, Served, flags, prompts, serving

pytestmark = [pytest.mark.server, pytest.mark.slow]
OTHERS = [
    point.name
    for group in ("sglang.srt.plugins", "sglang.srt.platforms")
    for point in entry_points(group=group)
]
WITHOUT = {"SGLANG_PLUGINS": ",".join(name for name in OTHERS if name != "kvtier")}
"""Every plugin but ours. The CPU platform is among them: without it SGLang has no way to serve
here, so both servers have it.
"""

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? ")
_LABEL = re.compile(r'(\w+)="')
ROUTES = {"/kvtier/hint", "/kvtier/requests", "/kvtier/settings"}


def help_text(**env: str) -> str:
    command = [sys.executable, "-m", "sglang.launch_server", "--help"]
    wide = {**os.environ, **STRICT, "COLUMNS": "200", "PYTHONHASHSEED": "0", **env}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout


def words(text: str) -> Counter[str]:
    """Without their order: SGLang lists parsers otherwise once their registry is imported, which
    the hint route's hook does.
    """
    return Counter(re.findall(r"[^\s,{}\[\]]+", text))


def metric_names(server: Served) -> set[tuple[str, tuple[str, ...]]]:
    """Names with the names of their labels."""
    found = (
        _SAMPLE.match(line) for line in server.call("GET", "/metrics", None, raw=True).splitlines()
    )
    return {(match[1], tuple(sorted(_LABEL.findall(match[2] or "")))) for match in found if match}


def answers(server: Served) -> list[Answer]:
    """Of prompts asked alone, asked again, and asked again from empty caches."""
    asked = prompts(4, seed=51)
    first = [server.ask(ids, tokens=12) for ids in asked]
    second = [server.ask(ids, tokens=12) for ids in asked]
    server.settle()
    server.call("POST", "/flush_cache", {}, {"Authorization": "Bearer test-admin"})
    return [*first, *second, *(server.ask(ids, tokens=12) for ids in asked)]


def seen(folder: Path, arguments: list[str], **env: str) -> dict[str, Any]:
    with serving(folder, arguments, **env) as server:
        given = answers(server)
        return {
            "answers": given,
            "metrics": metric_names(server),
            "routes": set(server.call("GET", "/openapi.json")["paths"]),
            "processes": server.server.usage().processes,
        }


@pytest.mark.parametrize(
    "backend", [None, "file"], ids=["radix cache alone", "HiCache with SGLang's file backend"]
)
def test_a_server_that_does_not_use_the_package_is_as_one_that_does_not_have_it(tmp_path, backend):
    def one(name, **env):
        stored = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / f"{name}-pages")}
        return seen(tmp_path / name, flags(backend=backend), **stored, **env)

    without, installed = one("without", **WITHOUT), one("with")
    assert installed["answers"] == without["answers"], (
        "tokens, log-probs and where the prompts came from"
    )
    assert installed["metrics"] == without["metrics"]
    assert installed["processes"] == without["processes"]
    assert installed["routes"] - without["routes"] == ROUTES
    assert without["routes"] <= installed["routes"]


def test_the_help_of_a_launch_differs_by_the_names_of_two_backends_and_the_order_of_parsers():
    without, installed = words(help_text(**WITHOUT)), words(help_text())
    assert not [word for word in without if "kvtier" in word]
    assert set(installed - without) == {"kvtier", "kvtier_cpu"}
    assert not without - installed
