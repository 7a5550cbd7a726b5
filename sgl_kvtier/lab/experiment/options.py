"""The options of a command as a frozen object: what commands share is here, each command's own class
adds what only it has.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T", bound="Options")


@dataclass(frozen=True)
class Options:
    """What was given, by the names of the options; None where the command decides. A command that
    does not offer an option has the default here.
    """

    # of a run
    quick: bool = False
    rounds: int | None = None
    json: str | None = None
    html: str | None = None
    log: Path | None = None
    minutes: float | None = None
    seed: int = 0
    # of servers that are started, or the one that is there
    url: str | None = None
    device: str | None = None
    dilation: float | None = None
    model: str | None = None
    dtype: str | None = None
    threads: int | None = None
    tp: int | None = None
    page_size: int | None = None
    chunk: int | None = None
    storage_size: int | None = None
    server_arg: Sequence[str] = ()
    folder: Path | None = None
    # of sessions
    trace: str | None = None
    traces_dir: Path | None = None
    skip: int = 0
    sessions: int | None = None
    turns: int | None = None
    divisor: int | None = None
    max_prompt_tokens: int | None = None
    min_prompt_tokens: int | None = None
    block_tokens: int | None = None
    max_output_tokens: int | None = None
    # of how they are replayed
    concurrency: int | None = None
    rate: float | None = None
    route: str = "generate"
    feedback: str = "recorded"
    pause: float | None = None
    gap_scale: float | None = None
    gap_cap: float | None = None

    @classmethod
    def of(cls: type[_T], args: argparse.Namespace) -> _T:
        """Those that a parser found."""
        given = vars(args)
        return cls(**{one.name: given[one.name] for one in fields(cls) if one.name in given})
