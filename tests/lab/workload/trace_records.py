"""Records of the trace formats, for tests to write or read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

WriteTrace = Callable[..., Path]
"""The fixture `write_trace`: a file's name and its records to the file's path."""


def swe_record(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """One line of the swe format with these turns."""
    head = {
        "session_id": "s1",
        "source": "owner/repo",
        "licence": "MIT",
        "batch": "b",
        "batch_offset_s": 0.0,
    }
    return {**head, **fields, "turns": list(turns)}


def user(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def tool(content: str, t: float | None = None, **fields: Any) -> dict[str, Any]:
    timed = {} if t is None else {"t_offset_s": t}
    return {"role": "tool", "content": content, **timed, **fields}


def assistant(content: str, t: float | None = None, **fields: Any) -> dict[str, Any]:
    timed = {} if t is None else {"t_offset_s": t}
    return {"role": "assistant", "content": content, **timed, **fields}


def request(keep: int, *new: int, **fields: Any) -> dict[str, Any]:
    """One request of a Claude Code session: `keep` blocks of the one before, then runs as start,
    count, ...
    """
    made = {
        "t": 0.0,
        "type": "n",
        "model": "m",
        "in": 0,
        "out": 10,
        "api_time": 2.0,
        "think_time": 1.0,
    }
    return {**made, **fields, "keep": keep, "new": list(new)}


def claude_record(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """One line of the Claude Code format with these requests."""
    head = {
        "id": "trace_1",
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": 64,
        "system_tokens": 64,
    }
    return {**head, **fields, "requests": list(requests)}


def mooncake_record(tokens: int, *ids: int, **fields: Any) -> dict[str, Any]:
    """One request of a Mooncake trace."""
    return {
        "timestamp": 0,
        "input_length": tokens,
        "output_length": 5,
        "hash_ids": list(ids),
        **fields,
    }
