"""The deciding half as a whole: it takes facts, keeps what they imply, answers each view with a
plan, and questions between two steps.

Deterministic to the bit: the same facts and views give the same plans, whatever the hash seed. One
thread, no clock.
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
    """Restoration (`restore/`) and lookahead (`ahead/`), which share the learned bandwidths of
    links.

    `profile` is what `profile()` gave at the end of an earlier run: plain data, or None. `rules`
    are those that `config.rules` names, unless they are given. Raises ConfigError when a class that
    the settings name cannot be had.
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
        """No more lookahead: an error occurred once, so its map may be wrong, or the executor does
        not keep it up to date any more.
        """

    def observe(self, fact: Fact) -> None:
        """Takes note of a fact. Facts about unknown requests change nothing but estimates."""
        try:
            self._restore.observe(fact)
            self._blind = self._blind or isinstance(fact, LookaheadEnded)
            if not self._blind:
                self._ahead.observe(fact)
        except Exception:
            self._give_up()
            raise

    def step(self, view: StepView) -> StepPlan:
        """Decides this step. Loads and moves in the plan are claimed at once, chunks when a
        ChunkStarted reports them.

        When it raises, here or in `observe`, all restorations end, and the caller ends their loads.
        Loads that the caller never saw do not count as in flight for ever.
        """
        try:
            return self._decide(view)
        except Exception:
            self._give_up()
            raise

    def query(self, question: Question[_A]) -> _A:
        """Answers a question between two steps. A Hinted, RulesTuned, RunOrder and HeldBack are
        noted.
        """
        answer: _A = self._answers[type(question)](question)
        return answer

    def _claimable(self, view: StepView, pages: int, until: float) -> int:
        """How many of this many device pages a restoration may claim: none that another request or
        a session needs before `until`. Where nothing is known of that, all that are free.
        """
        if not self._ahead.active or self._blind:
            return min(pages, view.free_pages[Tier.DEVICE])
        return self._ahead.claimable(view, pages, until)

    def _held_back(self, question: HeldBack) -> bool:
        """Whether a request waits for a session to return. Nothing is known of those where it does
        not look ahead.
        """
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
        """The pages it knows, to be read between its calls."""
        return self._ahead.map

    @property
    def looks_ahead(self) -> bool:
        """Whether it knows of a request or a session for which pages could be moved."""
        return self._ahead.active and not self._blind

    def tally(self) -> Tally:
        """The results of lookahead so far, for reports. Any thread."""
        return self._ahead.tally()

    def promised_s(self, question: LeftToEngine) -> float:
        """What the restoration asked about is predicted to take, for reports: seconds until its
        prompt is computed. Changes nothing.
        """
        return self._restore.promised_s(question)

    def known(self, rid: str) -> dict[str, str]:
        """What each part knows of a request, in words, for a developer: `queue` and `restoration`
        in `restore/`, `lookahead` in `ahead/`, where there is something. Changes nothing.
        """
        ahead = self._ahead.known(rid)
        return self._restore.known(rid) | ({} if ahead is None else {"lookahead": ahead})

    def profile(self) -> dict[str, Any]:
        """Learned costs and bandwidths for the next run, as plain data."""
        return self._restore.profile()

    @property
    def restoring(self) -> tuple[str, ...]:
        """Requests being restored, in the order they were offered."""
        return tuple(self._restore.restoring)

    def _left(self, view: StepView, plan: StepPlan) -> StepView:
        """The view after the plan's loads have taken their pages."""
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
    """The planner a configuration asks for. `profile`: what `Planner.profile` gave at the end of an
    earlier run. `rules`: others than those it names.
    """
    return Planner(config, engine, profile, rules)
