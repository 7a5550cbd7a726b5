"""The deciding half as a whole: it takes facts, keeps what they imply, and answers each view with a
plan.

Deterministic to the bit: the same facts and views give the same plans, whatever the hash seed. One
thread, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.ahead.planner import Lookahead
from sgl_kvtier.policy.ahead.read_turns import due
from sgl_kvtier.policy.messages import Fact, Queued, RestoreOffered, StepPlan, StepView
from sgl_kvtier.policy.restore.planner import RestorePlanner
from sgl_kvtier.policy.sessions.sessions import Hint, HintAnswer
from sgl_kvtier.policy.shape import EngineShape


class Planner:
    """Restoration (`restore_planner`) and what comes before it (`lookahead`), sharing what is
    learned of the links.

    `profile` is what `profile()` gave at the end of an earlier run: plain data, or None.
    """

    def __init__(
        self, config: PolicyConfig, engine: EngineShape, profile: Mapping[str, Any] | None = None
    ) -> None:
        known = profile or {}
        self._restore = RestorePlanner(config, engine, known.get("links"), known.get("prefill"))
        self.ahead = Lookahead(config, engine, self._restore.bandwidth)
        """The map of pages, prefetching and sessions: hands read the map for reports and pass
        clients' hints in.
        """
        self._failed = False
        """Something went wrong once: no more looking ahead, whose map may be anything."""

    def observe(self, fact: Fact) -> None:
        """Takes note of what happened. Facts about requests it does not know, or no longer, change
        nothing but estimates.
        """
        try:
            self._restore.observe(fact)
            if not self._failed:
                self.ahead.observe(fact)
        except Exception:
            self._give_up()
            raise

    def step(self, view: StepView) -> StepPlan:
        """Decides this step. Loads and moves in the plan are claimed at once, chunks when a
        ChunkStarted reports them.

        When it raises, here or in `observe`, nobody is being restored any more, and whoever asked
        ends what is under way: what nobody was told of is not counted as under way for ever.
        """
        try:
            return self._decide(view)
        except Exception:
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._restore.give_up()
        self._failed = True

    def _decide(self, view: StepView) -> StepPlan:
        plan = self._restore.step(view)
        if not self.ahead.active or self._failed:
            return plan
        busy_s = self._restore.links.backlogs(view.now)
        evictions, moves = self.ahead.step(self._left(view, plan), busy_s, self._restore.under_way)
        if not evictions and not moves:
            return plan
        return StepPlan(plan.starts, plan.cancels, plan.loads, plan.computes, evictions, moves)

    def configure(self, config: PolicyConfig) -> None:
        """Other settings for restoring from now on. Restorations under way go on in the mode they
        were given.
        """
        self._restore.configure(config)

    def left_to_engine(self, offer: RestoreOffered, view: StepView) -> str | None:
        """Why a prefix is better left to an engine that can load by itself, or None: asked before
        it is offered, for what the engine has dropped in favour of a restoration it does not take
        up again. Changes nothing. In the view it is not among the fresh requests.
        """
        return self._restore.left_to_engine(offer, view)

    def reads_due(self, queue: Iterable[Queued], room: int) -> list[str]:
        """Of waiting requests whose prefixes are left to the engine, in the order they run: those
        whose stored pages it reads now into `room` pages of host memory. Changes nothing.
        """
        return due(queue, room)

    def hint(self, session: str, hint: Hint, now: float) -> HintAnswer:
        """The client's word on when its session returns; what came of it."""
        return self.ahead.hint(session, hint, now)

    def profile(self) -> dict[str, Any]:
        """What was learned, to be given to the next run: plain data."""
        return self._restore.profile()

    @property
    def restoring(self) -> tuple[str, ...]:
        """Requests being restored, in the order they were offered."""
        return self._restore.restoring

    def _left(self, view: StepView, plan: StepPlan) -> StepView:
        """The view after the plan's loads have taken their pages."""
        if not plan.loads or not view.free_pages:
            return view
        taken = sum(len(load.span) for load in plan.loads)
        free = {tier: max(0, pages - taken) for tier, pages in view.free_pages.items()}
        empty = {tier: max(0, pages - taken) for tier, pages in view.empty_pages.items()}
        return StepView(
            view.now,
            view.waiting,
            view.slot,
            view.slot_open,
            view.prefill_tokens,
            view.fresh_tokens,
            view.decoding,
            free,
            empty,
            view.owed_pages,
        )


def make_planner(
    config: PolicyConfig, engine: EngineShape, profile: Mapping[str, Any] | None = None
) -> Planner:
    """The planner a configuration asks for. `profile`: what `Planner.profile` gave at the end of an
    earlier run.
    """
    return Planner(config, engine, profile)
