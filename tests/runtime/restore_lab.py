"""Servers whose prompts are restored, small enough for tests: a slow store, strict memory checks,
one decision log.
"""

from __future__ import annotations

import json
import time

from serving import ADMIN, Served, flags
from shared import Shared

LONG = 1500
"""Tokens of a prompt that is restored here."""
CHUNK = 256
GBPS = 0.02
"""Of the throttled store: computing and loading a prompt here take times of the same order."""


CHECKED = {"SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1"}
"""SGLang compares what its ranks decide, and ends the server when they differ."""


def restoring(servers: Shared) -> Served:
    """The shared server that restores and logs what it decides."""
    log = "{folder}/decisions.jsonl"
    sections = {
        "throttle": {"read_gbps": GBPS},
        "policy": {"restore": "both", "min_restore_tokens": 64, "decision_log": log},
    }
    return servers.get(flags(chunked_prefill_size=CHUNK, page_size=16), sections)


def two_ranks_flags() -> list[str]:
    """Launch arguments of the shared server of two tensor-parallel ranks."""
    pools = {"chunked_prefill_size": CHUNK, "page_size": 16, "max_total_tokens": 8192}
    return flags("tiny-llama", tp_size=2, **pools)


def two_ranks(servers: Shared) -> Served:
    """The shared server of two ranks that restores and compares every page. One of them reads later
    than the other, finds no first pages, and loses others.
    """
    faults = {"read_error_rate": 0.02, "corrupt_rate": 0.02, "lose_rate": 0.005, "lose_first": 2}
    sections = {
        "throttle": {"read_gbps": GBPS},
        "policy": {"restore": "both", "min_restore_tokens": 64, "proof": "all"},
        "faults": {**faults, "stall_ms": 150, "seed": 4, "rank": 1},
    }
    return servers.get(two_ranks_flags(), sections, CHECKED)


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


def settled(served: Served) -> dict[str, float]:
    """The counters, once what happened so far has been published: they are twice a second."""
    time.sleep(1.2)
    return counts(served)


def since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """By how much each counter has grown."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
