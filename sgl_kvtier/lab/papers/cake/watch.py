"""A run seen through the facts its planner is told: times of whole prefixes, durations of chunks,
contents of steps.
"""

from __future__ import annotations

from sgl_kvtier.policy.messages import (
    ChunkDone,
    Fact,
    Planner,
    StepDone,
    StepPlan,
    StepView,
    TransferDone,
)


class Watch:
    """A planner that asks another one and takes notes. `prefixes`: tokens of each request's cached
    prefix.

    Cake times the restoration (section 5.1: "the time of loading stored KV cache or computing new
    KV cache"). So the step behind it that yields the first token is not in `restored_s`. Pages that
    truly came are counted, not those the planner believes in.
    """

    def __init__(self, planner: Planner, page_tokens: int, prefixes: dict[str, int]) -> None:
        self._planner = planner
        self._page_tokens = page_tokens
        self._missing = dict(prefixes)
        self.restored_s: dict[str, float] = {}
        """Second at which each prefix was whole."""
        self.chunks: list[ChunkDone] = []
        self.steps: list[StepDone] = []

    def observe(self, fact: Fact) -> None:
        """Takes a note and passes the fact on."""
        if isinstance(fact, ChunkDone):
            self.chunks.append(fact)
            self._came(fact.rid, len(fact.tokens), fact.now)
        elif isinstance(fact, TransferDone):
            self._came(fact.rid, len(fact.span) * self._page_tokens, fact.now)
        elif isinstance(fact, StepDone):
            self.steps.append(fact)
        self._planner.observe(fact)

    def step(self, view: StepView) -> StepPlan:
        """The other planner's plan."""
        return self._planner.step(view)

    def _came(self, rid: str, tokens: int, now: float) -> None:
        left = self._missing.get(rid)
        if left is None:
            return
        self._missing[rid] = left - tokens
        if left - tokens <= 0:
            del self._missing[rid]
            self.restored_s[rid] = now
