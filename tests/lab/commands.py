"""Commands of the laboratory with fakes for servers: in this process (the fixture `kvtier`), or as
child processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from json_results import wrong_in

SITE = Path(__file__).parent / "fake_site"


@dataclass
class Done:
    """How a command ended. `result` is what it wrote with --json; empty where it wrote nothing."""

    status: int
    out: str
    err: str
    result: dict[str, Any]


Command = Callable[..., Done]
"""kvtier(folder, *words, task="ARM:WHAT"): a command with fakes for servers, its files in a folder.
"""


def parsed(command: Any, *words: str) -> argparse.Namespace:
    """The arguments of a command (a module with `add_arguments`) with these words."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def options_of(arguments: Sequence[str]) -> dict[str, str]:
    """The options of a command line and their values; "" for those that have none."""
    found: dict[str, str] = {}
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        if word.startswith("--"):
            found[word] = "" if after.startswith("--") else after
    return found


def environment(folder: Path, task: str = "") -> dict[str, str]:
    """For a command, and the servers that it starts as child processes."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "FAKE_SGLANG": task,
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def with_files(folder: Path, words: Sequence[str]) -> list[str]:
    """A command line with a folder for what is kept and written, unless it names others."""
    start = next(place for place, word in enumerate(words) if word.startswith("-"))
    files = ["--folder", str(folder / "work"), "--json", str(folder / "out.json")]
    return [*words[:start], *files, *words[start:]]


def result_in(folder: Path) -> dict[str, Any]:
    """What --json wrote, as its schema says."""
    path = folder / "out.json"
    if not path.exists():
        return {}
    text = path.read_text()
    assert wrong_in(text) == []
    return json.loads(text)


def child(folder: Path, *words: str) -> list[str]:
    """The command line of a command in a process of its own."""
    # A shell's background job ignores SIGINT and so would this child: Ctrl-C is put back to what it
    # is at a terminal.
    ctrl_c = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{ctrl_c}; import sys; from sgl_kvtier.cli import main; sys.exit(main())"
    return [sys.executable, "-c", start, *with_files(folder, words)]


def run_child(folder: Path, *words: str, task: str = "") -> Done:
    """A command in a process of its own, and so its servers."""
    done = subprocess.run(
        child(folder, *words),
        env={**os.environ, **environment(folder, task)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, result_in(folder))
