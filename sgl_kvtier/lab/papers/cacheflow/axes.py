"""CacheFlow's choice between tokens and layers (section 3.1, Algorithm 1), as a planner.

Prefixes from L_delta on are restored by tokens: by the planner's own code with CacheFlow's rule.
Shorter ones are restored here by layers: the forward pointer computes layer after layer for all
tokens, the I/O pointer loads from the top layer down, and each layer is taken once. The link goes
to the request with most tokens left to restore, whichever way it is split (line 7); compute is
first come, first served, as in all arms.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvtier.lab.sim.costs import Batch, StepCost
from sgl_kvtier.lab.sim.requests import SimRequest
from sgl_kvtier.policy.messages import (
    ChunkStarted,
    Compute,
    Fact,
    Load,
    Mode,
    PagesLost,
    Planner,
    RequestFinished,
    RestoreOffered,
    RestoreStart,
    StepPlan,
    StepView,
    TransferDone,
)
from sgl_kvtier.types import Link, Span, Tier

_NEVER_S = 1e9
"""A deadline nothing is late for."""


_STEPS_COVERED = 1.5
"""Loads are handed out for this many times the step that begins: the next ones come after it."""


@dataclass(slots=True)
class _Left:
    """What one request has left to restore, in units: layers, or pages of tokens."""

    tokens_each: float
    front: int
    back: int
    landed: int = 0

    @property
    def tokens(self) -> float:
        """Tokens that are neither computed nor taken by a load, in all layers."""
        return (self.back - self.front) * self.tokens_each


class TwoAxes:
    """`inner` restores by tokens; `requests` with layers are restored by layers here. `token_s`:
    seconds of a token's KV on the one link. Loads are handed out for `horizon_s` of its time, and
    for longer where the step that begins takes longer.
    """

    def __init__(
        self,
        inner: Planner,
        requests: Sequence[SimRequest],
        page_tokens: int,
        cost: StepCost,
        token_s: float,
        horizon_s: float,
    ) -> None:
        self._inner = inner
        self._by_layers = {one.rid: one.by_layers for one in requests if one.by_layers is not None}
        self._new = {one.rid: one.prompt_tokens for one in requests}
        for rid, own in self._by_layers.items():
            self._new[rid] -= own.layers * page_tokens
        self._page_tokens = page_tokens
        self._cost = cost
        self._token_s = token_s
        self._horizon_s = horizon_s
        self._layers: dict[str, _Left] = {}
        self._tokens: dict[str, _Left] = {}
        self._offered: list[str] = []
        self._loaded_at = 0.0

    def observe(self, fact: Fact) -> None:
        """Facts about requests that are restored by layers stay here."""
        rid = getattr(fact, "rid", "")
        own = self._by_layers.get(rid)
        if own is None:
            self._inner.observe(fact)
            self._note_tokens(rid, fact)
        elif isinstance(fact, RestoreOffered):
            self._layers[rid] = _Left(own.tokens / own.layers, 0, own.layers)
            self._offered.append(rid)
        elif isinstance(fact, TransferDone):
            self._layers[rid].landed += len(fact.span)
        elif isinstance(fact, ChunkStarted) and rid in self._layers:
            self._layers[rid].front = fact.tokens.stop // self._page_tokens
            if self._layers[rid].front >= own.layers:
                del self._layers[rid]
        assert own is None or not isinstance(fact, PagesLost), "this link loses nothing"

    def _note_tokens(self, rid: str, fact: Fact) -> None:
        if isinstance(fact, RestoreOffered):
            self._tokens[rid] = _Left(self._page_tokens, fact.resident, fact.pages)
        left = self._tokens.get(rid)
        if left is not None and isinstance(fact, ChunkStarted):
            left.front = fact.tokens.stop // self._page_tokens
        if left is not None and (isinstance(fact, RequestFinished) or left.front >= left.back):
            del self._tokens[rid]

    def step(self, view: StepView) -> StepPlan:
        """Both plans: one request computes, the link goes to the longest first."""
        mine = self._next_to_compute(view)
        compute = None if mine is None else self._compute(mine)
        if compute is None:
            inner = self._inner.step(view)
        else:
            # What computes now is as good as fresh: it is before all that `inner` restores.
            own = self._by_layers[compute.rid]
            tokens = own.tokens // own.layers if compute.tokens else self._new[compute.rid]
            fresh = view.fresh_tokens + tokens
            inner = self._inner.step(dataclasses.replace(view, slot_open=False, fresh_tokens=fresh))
        for load in inner.loads:
            if load.rid in self._tokens:
                self._tokens[load.rid].back = load.span.start
        starts = tuple(RestoreStart(rid, Mode.BOTH, "by layers") for rid in self._offered)
        self._offered = []
        computes = inner.computes if compute is None else (compute,)
        loads = self._loads(view.now, self._step_s(computes, view), mine)
        longest = max((left.tokens for left in self._tokens.values()), default=0.0)
        first = any(self._layers[load.rid].tokens >= longest for load in loads)
        return dataclasses.replace(
            inner,
            starts=inner.starts + starts,
            loads=loads + inner.loads if first else inner.loads + loads,
            computes=computes,
        )

    def _next_to_compute(self, view: StepView) -> str | None:
        """The request by layers whose turn it is; None while another's is."""
        if view.slot is not None:
            return view.slot if view.slot in self._layers else None
        if not view.slot_open:
            return None
        rids = (rid for rid in view.waiting if rid in self._layers or rid in self._tokens)
        first = next(rids, None)
        return first if first in self._layers else None

    def _compute(self, rid: str) -> Compute:
        """The next layer, or nothing while the rest is being loaded; in the end the rest of the
        prompt.
        """
        left, layers = self._layers[rid], self._by_layers[rid].layers
        if left.front < left.back:
            return Compute(rid, Span(left.front, left.front), self._page_tokens)
        if left.landed == layers - left.back:
            return Compute(rid, Span(left.front, layers), None)
        return Compute(rid, Span(left.front, left.front), 0)

    def _step_s(self, computes: Sequence[Compute], view: StepView) -> float:
        """Seconds of the step that begins."""
        seconds = 0.0
        for one in computes:
            own, start = self._by_layers.get(one.rid), one.splice.stop * self._page_tokens
            tokens = min(view.prefill_tokens, one.tokens or self._new[one.rid])
            if own is None or one.tokens is None:
                start = start if own is None else own.tokens
                seconds += self._cost.seconds(Batch((Span(start, start + tokens),)))
            elif one.tokens:
                seconds += self._cost.seconds(Batch(passes=((own.tokens, 1 / own.layers),)))
        return seconds

    def _computed_first(self, rid: str, busy_s: float) -> bool:
        """Whether compute ends the last layer left before a load would, which has the link after
        `busy_s` seconds.
        """
        left, own = self._layers[rid], self._by_layers[rid]
        layer_s = self._cost.seconds(Batch(passes=((own.tokens, 1 / own.layers),)))
        return (left.back - left.front) * layer_s < busy_s + left.tokens_each * self._token_s

    def _loads(self, now: float, step_s: float, computing: str | None) -> tuple[Load, ...]:
        """Layers from the top down, of the request with most left, as far as the horizon goes. The
        layer that is computed next is left to compute, and so are those it reaches before a load.
        """
        found = []
        self._loaded_at = max(self._loaded_at, now)
        while self._loaded_at - now < max(self._horizon_s, _STEPS_COVERED * step_s):
            open_ = [
                rid
                for rid, left in self._layers.items()
                if left.back - left.front > 1
                and (rid != computing or not self._computed_first(rid, self._loaded_at - now))
            ]
            if not open_:
                break
            rid = max(open_, key=lambda one: self._layers[one].tokens)
            left = self._layers[rid]
            left.back -= 1
            span = Span(left.back, left.back + 1)
            found.append(Load(rid, span, Tier.STORAGE, Link.STORAGE_TO_DEVICE, _NEVER_S))
            self._loaded_at += left.tokens_each * self._token_s
        return tuple(found)
