"""Answers that others are compared with, computed once by a server and kept in pytest's cache
folder: the same model, SGLang, flags and prompts need no second server for them.

A test that finds wrong answers here fails, whoever computed them. `pytest --cache-clear` forgets
them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sgl_kvtier.runtime.backend.identity import weights_digest
from sgl_kvtier.runtime.sglang.seams import installed_version

Answers = dict[tuple[int, int], list[int]]
"""Output tokens by session and turn."""


class Golden:
    """Answers in a folder, a file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def answers(
        self, arguments: Sequence[str], asked: type, compute: Callable[[], Answers]
    ) -> Answers:
        """What a server with these launch arguments answers; computed where it is not kept yet.

        `asked` is the class that asks: the text of its module is part of the key, so that other
        prompts are other answers.
        """
        path = self._folder / f"{key_of(arguments, asked)}.json"
        try:
            return {(session, turn): said for session, turn, said in json.loads(path.read_text())}
        except FileNotFoundError:
            found = compute()
        rows = [[session, turn, said] for (session, turn), said in sorted(found.items())]
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(rows))
        part.replace(path)  # whole or not at all: other test processes read here
        return found


def key_of(arguments: Sequence[str], asked: type) -> str:
    """A name for what was asked of which server."""
    flags = list(arguments)
    place = flags.index("--model-path") + 1
    flags[place] = weights_digest(Path(flags[place]))
    source = Path(str(inspect.getsourcefile(asked))).read_text()
    said = json.dumps([installed_version(), torch.__version__, flags, asked.__name__, source])
    return hashlib.sha256(said.encode()).hexdigest()[:32]
