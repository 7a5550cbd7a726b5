"""Servers whose prompts are restored from a slow store, small enough for tests."""

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


BOTH_ENDS = {
    "restore": "both",
    "min_restore_tokens": 64,
    "decision_log": "{folder}/decisions.jsonl",
}
"""Of the policy section: a shared server that restores and logs what it decides."""
SLOW_DISK = {"read_gbps": GBPS}
"""Of the throttle section."""


def restoring(servers: Shared) -> Served:
    """The shared server that restores and logs what it decides."""
    sections = {"throttle": SLOW_DISK, "policy": BOTH_ENDS}
    return servers.get(flags(chunked_prefill_size=CHUNK, page_size=16), sections)


def two_ranks_flags() -> list[str]:
    """Launch arguments of the shared server of two tensor-parallel ranks."""
    pools = {"chunked_prefill_size": CHUNK, "page_size": 16, "max_total_tokens": 8192}
    return flags("tiny-llama", tp_size=2, **pools)


def two_ranks(servers: Shared) -> Served:
    """The shared server of two ranks that compares every page. One reads later, and loses pages."""
    faults = {"read_error_rate": 0.02, "corrupt_rate": 0.02, "lose_rate": 0.005, "lose_first": 2}
    sections = {
        "throttle": {"read_gbps": GBPS},
        "policy": {"restore": "both", "min_restore_tokens": 64, "proof": "all"},
        "faults": {**faults, "stall_ms": 150, "seed": 4, "rank": 1},
    }
    return servers.get(two_ranks_flags(), sections, CHECKED)


def change(served: Served, **values: float) -> bool:
    """Changes settings by name, "policy__restore=4"; whether the running server took them."""
    names = {"kvtier." + name.replace("__", "."): value for name, value in values.items()}
    answer = served.call("POST", "/set_internal_state", {"server_args": names}, ADMIN, raw=True)
    return "true" in json.dumps(answer).lower()


def counts(served: Served) -> dict[str, float]:
    """The metrics of restorations: name without prefix, then the labels that are not a rank's."""
    return served.counts("kvtier:restore_")


def results(served: Served, counter: str) -> dict[str, float]:
    """Values of a counter by its label, once what was asked has come to rest."""
    served.settle()
    return {
        name.removeprefix(f"{counter} "): value
        for name, value in counts(served).items()
        if name.startswith(counter)
    }


def settled(served: Served) -> dict[str, float]:
    """The counters, once what happened so far has been published: they are twice a second."""
    time.sleep(1.2)
    return counts(served)


def since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """By how much each counter has grown."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
