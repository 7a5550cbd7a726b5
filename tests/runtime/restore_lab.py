"""A server whose prompts are restored, small enough for tests: a slow store, strict memory checks,
one decision log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serving import ADMIN, Served, config_file, flags, serving

LONG = 1500
"""Tokens of a prompt that is restored here."""
CHUNK = 256
GBPS = 0.02
"""Of the throttled store: computing and loading a prompt here take times of the same order."""


@contextmanager
def restoring(folder: Path, **policy: object) -> Iterator[Served]:
    """The server while the block runs. `policy` are settings of that section of kvtier.json."""
    sections = {
        "throttle": {"read_gbps": GBPS},
        "policy": {"restore": "both", "min_restore_tokens": 64, **policy},
    }
    with serving(
        folder, flags(chunked_prefill_size=CHUNK, page_size=16), config_file(folder, **sections)
    ) as served:
        yield served


def change(served: Served, **values: float) -> bool:
    """Changes settings of the running server by name, "policy__restore=4"; whether the server took
    them.
    """
    names = {"kvtier." + name.replace("__", "."): value for name, value in values.items()}
    answer = served.call("POST", "/set_internal_state", {"server_args": names}, ADMIN, raw=True)
    return "true" in json.dumps(answer).lower()


def counts(served: Served) -> dict[str, float]:
    """All metrics of restorations: name without prefix, with the labels that are not a rank's, to
    value.
    """
    found: dict[str, float] = {}
    for line in served.call("GET", "/metrics", None, raw=True).splitlines():
        if not line.startswith("kvtier:restore_"):
            continue
        name, _, rest = line.removeprefix("kvtier:restore_").partition("{")
        labels, _, value = rest.rpartition("} ")
        kept = sorted(
            label.split("=")[1].strip('"')
            for label in labels.split('",')
            if not label.startswith(("tp_", "pp_", "dp_", "pid"))
        )
        found[" ".join([name, *kept])] = float(value)
    return found
