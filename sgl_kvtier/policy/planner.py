"""The planner: it receives facts, updates its state from them, and returns a plan for each view and
an answer to each question between two steps.

It is deterministic to the bit: the same facts and views give the same plans, whatever the hash
seed. One thread, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.policy.ahead.budget import reads_due
from sgl_kvtier.policy.ahead.planner import Lookahead
from sgl_kvtier.policy.messages import (
    ChunkBeside,
    Fact,
    HeldBack,
    Hinted,
    LeftToEngine,
    LookaheadEnded,
    Question,
    ReadsDue,
    RulesTuned,
    RunOrder,
    SessionsWith,
    StepPlan,
    StepView,
    Tally,
)
from sgl_kvtier.policy.pages.page_state import PageView
from sgl_kvtier.policy.restore.planner import RestorePlanner
from sgl_kvtier.policy.rules import Rules, rules_of, tune
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.types import Tier

_A = TypeVar("_A")


class Planner:
    """Restoration (`restore/`) and lookahead (`ahead/`), which share the learned link bandwidths.

    `profile` is the result of `profile()` at the end of an earlier run, as plain data, or None.
    `rules`, if given, replace those that `config.rules` names. Raises ConfigError if a class that
    the settings name cannot be loaded.
    """

    def __init__(
        self,
        config: PolicyConfig,
        engine: EngineShape,
        profile: Mapping[str, Any] | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.rules = rules_of(config.rules) if rules is None else rules
        self._restore = RestorePlanner(config, engine, profile, self.rules, self._claimable)
        self._ahead = Lookahead(config, engine, self._restore.bandwidth, self.rules)
        self._answers: dict[type, Callable[[Any], Any]] = {
            LeftToEngine: self._restore.left_to_engine,
            ReadsDue: reads_due,
            RunOrder: self._restore.order,
            ChunkBeside: self._restore.chunk_beside,
            HeldBack: self._held_back,
            Hinted: self._ahead.hint,
            SessionsWith: self._ahead.sessions_with,
            RulesTuned: self._tune,
        }
        self._blind = False
        """Lookahead is over: an error occurred, after which the map may be wrong, or the executor
        no longer reports what the map needs.
        """

    def observe(self, fact: Fact) -> None:
        """Records a fact. Facts about unknown requests change nothing but the learned estimates."""
        try:
            self._restore.observe(fact)
            self._blind = self._blind or isinstance(fact, LookaheadEnded)
            if not self._blind:
                self._ahead.observe(fact)
        except Exception:
            self._give_up()
            raise

    def step(self, view: StepView) -> StepPlan:
        """Decides this step. Loads and moves in the plan are reserved at once, chunks when a
        ChunkStarted reports them.

        If this or `observe` raises, all restorations end, and the caller has to end their loads.
        Loads that the caller never received do not count as in flight.
        """
        try:
            return self._decide(view)
        except Exception:
            self._give_up()
            raise

    def query(self, question: Question[_A]) -> _A:
        """Answers a question. Only Hinted, RulesTuned, RunOrder and HeldBack change state."""
        answer: _A = self._answers[type(question)](question)
        return answer

    def _claimable(self, view: StepView, pages: int, until: float) -> int:
        """How many of these `pages` device pages a restoration may allocate without taking one that
        another request or a session needs before `until`. Without lookahead nothing is known of
        that, and all free pages may be allocated.
        """
        if not self._ahead.active or self._blind:
            return min(pages, view.free_pages[Tier.DEVICE])
        return self._ahead.claimable(view, pages, until)

    def _held_back(self, question: HeldBack) -> bool:
        """Whether a request waits for a session to return; never without lookahead."""
        if self._blind:
            return False
        within_s = self._restore.patience_s(question)
        held = within_s > 0 and self._ahead.returns_into(question, within_s)
        if held:
            self._restore.hold(question)
        return held

    def _tune(self, question: RulesTuned) -> str | None:
        return tune(self.rules, question.name, question.value)

    def _give_up(self) -> None:
        self._restore.give_up()
        self._blind = True

    def _decide(self, view: StepView) -> StepPlan:
        plan = self._restore.step(view)
        if not self._ahead.active or self._blind:
            return plan
        busy_s = self._restore.links.backlogs(view.now)
        evictions, moves = self._ahead.step(self._left(view, plan), busy_s, self._restore.restoring)
        if not evictions and not moves:
            return plan
        return StepPlan(plan.starts, plan.cancels, plan.loads, plan.computes, evictions, moves)

    @property
    def pages(self) -> PageView:
        """The map of pages, which an executor may read between two calls."""
        return self._ahead.map

    @property
    def looks_ahead(self) -> bool:
        """Whether lookahead knows a request or a session for which pages could be moved."""
        return self._ahead.active and not self._blind

    def tally(self) -> Tally:
        """The results of lookahead so far, for reports. Any thread."""
        return self._ahead.tally()

    def known(self, rid: str) -> dict[str, str]:
        """The planner's record of a request as text, for debugging: `queue` and `restoration` from
        `restore/`, `lookahead` from `ahead/`, each if there is one. Changes nothing.
        """
        ahead = self._ahead.known(rid)
        return self._restore.known(rid) | ({} if ahead is None else {"lookahead": ahead})

    def profile(self) -> dict[str, Any]:
        """Learned costs and bandwidths for the next run, as plain data."""
        return self._restore.profile()

    @property
    def restoring(self) -> tuple[str, ...]:
        """Ids of the requests being restored, in the order in which they were offered."""
        return tuple(self._restore.restoring)

    def _left(self, view: StepView, plan: StepPlan) -> StepView:
        """The view, less the pages that the plan's loads take."""
        if not plan.loads or not view.free_pages:
            return view
        taken = sum(len(load.span) for load in plan.loads)
        free = {tier: max(0, pages - taken) for tier, pages in view.free_pages.items()}
        empty = {tier: max(0, pages - taken) for tier, pages in view.empty_pages.items()}
        return replace(view, free_pages=free, empty_pages=empty)


def make_planner(
    config: PolicyConfig,
    engine: EngineShape,
    profile: Mapping[str, Any] | None = None,
    rules: Rules | None = None,
) -> Planner:
    """The planner for a configuration. `profile`: what `Planner.profile` returned at the end of an
    earlier run. `rules`: replace those that the configuration names.
    """
    return Planner(config, engine, profile, rules)
