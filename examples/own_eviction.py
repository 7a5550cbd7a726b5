"""A rule of your own for which page is evicted first, and what it is worth: run `python
examples/own_eviction.py`.

A rule (sgl_kvtier/policy/pages/eviction.py, `Rule`) answers four questions; the map of pages does
the rest. This one is a segmented LRU: a page that was used again is protected, so that a flood of
pages seen once cannot wash it out. How a server uses it is at the end.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, KeysView

from sgl_kvtier.policy.pages.eviction import LRU, Rule
from sgl_kvtier.policy.pages.owners import Owners
from sgl_kvtier.policy.pages.tier_map import TierMap
from sgl_kvtier.types import PageKey, Tier

ONCE, AGAIN = 0, 1


class SegmentedLRU:
    """Pages seen once go before pages used again; least recently used first among each."""

    def entered(self, group: int) -> int:
        return ONCE

    def used(self, shelf: int, group: int) -> int:
        return AGAIN

    def regrouped(self, shelf: int, group: int) -> int:
        return shelf

    def order(self, shelves: KeysView[int], owners: Owners) -> Iterable[tuple[int, float]]:
        return [(shelf, math.inf) for shelf in (ONCE, AGAIN) if shelf in shelves]


def hit_share(rule: Rule, pages: int, requests: list[tuple[PageKey, ...]]) -> float:
    """The share of pages found in host memory of `pages` pages, over requests that each want some
    keys in order.
    """
    known = TierMap(100_000, host_rule=rule)
    hits = 0
    for now, keys in enumerate(requests):
        found = [
            key for key in keys if (page := known.page(key)) is not None and Tier.HOST in page.tiers
        ]
        hits += len(found)
        known.used(found, float(now))
        missing = [key for key in keys if key not in found]
        room = pages - known.count(Tier.HOST)
        known.dropped(known.victims(Tier.HOST, len(missing) - room), Tier.HOST)
        known.placed(missing, Tier.HOST, float(now))
    return hits / sum(map(len, requests))


def agents_among_strangers(
    agents: int = 6, rounds: int = 40, strangers: int = 4
) -> list[tuple[PageKey, ...]]:
    """Agents that come back with the same 32 pages each round, and after two rounds one-time
    prompts of 40 pages between.
    """

    def prompt(name: str, pages: int) -> tuple[PageKey, ...]:
        return tuple(
            PageKey(hashlib.sha256(f"{name} {page}".encode()).digest()) for page in range(pages)
        )

    requests = []
    for round_ in range(rounds):
        for agent in range(agents):
            requests.append(prompt(f"agent {agent}", 32))
            if round_ >= 2 and agent < strangers:
                requests.append(prompt(f"stranger {round_} {agent}", 40))
    return requests


def main() -> None:
    """Prints the share of hits of two rules."""
    requests = agents_among_strangers()
    print("pages found in host memory of 300 pages:")
    for rule in (LRU(), SegmentedLRU()):
        print(f"  {type(rule).__name__:<13} {hit_share(rule, 300, requests):6.1%}")


if __name__ == "__main__":
    main()

# In a server: this file's folder in PYTHONPATH, or the class in a package that is installed, and in
# its kvtier.json the lines
#
#     "policy": {
#       "eviction": "own_eviction:SegmentedLRU"
#     }
