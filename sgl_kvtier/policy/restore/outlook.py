"""The predictions of one step: when compute can reach a request, and where the two ends of each
restoration should meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sgl_kvtier.policy.messages import StepView
from sgl_kvtier.policy.restore.meeting import Open, Pace, Split, best_split
from sgl_kvtier.policy.restore.modes import Forecast, Restoration
from sgl_kvtier.policy.restore.under_way import UnderWay, in_run_order
from sgl_kvtier.types import Link

_MOST_CHARGED: Final = 8
"""At most this many waiting requests are charged for, and as many that decode."""


class Outlook:
    """Predictions in seconds from the view's `now`. Values looked up in a step are kept until the
    next `begin`.
    """

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way = under_way
        self._holder: tuple[str, Pace, float, Open, int, int] | None = None
        self._held: Split | None = None
        self._pace: Pace | None = None
        """Costs and links as known in this step, until loads begin."""
        self._left_of: Restoration | None = None
        self._left = Open([], 0, [], [], 0)
        """The open pages of the request that was evaluated last, with that pace."""

    def begin(self) -> None:
        """Another step begins: nothing of the last one holds."""
        self._holder = self._held = self._pace = None

    def loads_handed_out(self) -> None:
        """Links have more to do than before."""
        self._pace = None

    def busy_s(self, view: StepView) -> float:
        """Seconds until the present computation is done."""
        return max(0.0, self._under_way.busy_until - view.now)

    def forecast(
        self, view: StepView, compute_at_s: float, left_s: Mapping[Link, float] | None = None
    ) -> Forecast:
        """Predicts each way to restore a request. `left_s` are seconds of work that links have
        before it, besides the loads in flight.
        """
        known = self._under_way
        backlog_s = known.links.backlogs(view.now)
        for link, seconds in (left_s or {}).items():
            backlog_s[link] = backlog_s.get(link, 0.0) + seconds
        return Forecast(known.engine, known.cost.cost, known.bandwidth, compute_at_s, backlog_s)

    def forecast_in_queue(self, view: StepView, rid: str) -> Forecast:
        """The same for a waiting request that is not being restored yet: compute and links come to
        it when they are done with the restorations before it in the queue.
        """
        known = self._under_way
        places = {waiting: place for place, waiting in enumerate(view.waiting)}
        mine = places.get(rid, len(places))
        left_s: dict[Link, float] = {}
        ahead_s = self.busy_s(view) + self.fresh_s(view, rid)
        for item in in_run_order(known, view):
            if item.rid != view.slot and places.get(item.rid, -1) > mine:
                continue
            split = self.forecast(view, ahead_s, left_s).both(item)
            for rest in split.loaded(item.pointer.units):
                for link, pages in item.link_pages(rest).items():
                    seconds = known.bandwidth.seconds(link, pages * known.engine.page_bytes)
                    left_s[link] = left_s.get(link, 0.0) + seconds
            ahead_s = max(ahead_s, split.seconds) + self.suffix_s(item)
        return self.forecast(view, ahead_s, left_s)

    def meeting(self, item: Restoration, view: StepView, compute_at_s: float, front: int) -> Split:
        """Where a request's two ends should meet, with its front at a page, like Forecast.both but
        starting from the last search's result. Links have all loads begun up to now to do.
        """
        pace = self._pace or self._look(view)
        front, copied_s = item.behind_copies(front, pace.bandwidth, self._under_way.engine)
        left = self._left = item.left(pace, front)
        self._left_of = item
        split = best_split(pace, compute_at_s + copied_s, left, front, item.meet)
        item.meet = split.meet
        return split

    def hold(self, item: Restoration, view: StepView, compute_at_s: float, front: int) -> None:
        """Notes that this request has the slot. Its meeting page, as things are now, is searched at
        the first `held`.
        """
        pace = self._pace or self._look(view)
        front, copied_s = item.behind_copies(front, pace.bandwidth, self._under_way.engine)
        left = self._left = item.left(pace, front)
        self._left_of = item
        self._holder, self._held = (
            (item.rid, pace, compute_at_s + copied_s, left, front, item.meet),
            None,
        )

    def held(self, item: Restoration) -> Split | None:
        """The meeting page of the slot's holder as of `hold`; None for any other request."""
        if self._holder is None or self._holder[0] != item.rid:
            return None
        if self._held is None:
            _, pace, compute_at_s, left, front, guess = self._holder
            self._held = best_split(pace, compute_at_s, left, front, guess)
            item.meet = self._held.meet
        return self._held

    def charged(
        self, item: Restoration, view: StepView, compute_at_s: float, front: int, charge: float
    ) -> Split:
        """The meeting page where each second of compute counts as `charge` seconds."""
        if front >= item.copied and self._pace is not None and self._left_of is item:
            # Evaluated a moment ago, from this front or one behind landed pages: the open pages are
            # the same.
            pace, left = self._pace, self._left
        else:
            pace = self._pace or self._look(view)
            front, copied_s = item.behind_copies(front, pace.bandwidth, self._under_way.engine)
            compute_at_s += copied_s
            left = item.left(pace, front)
        split = best_split(pace, compute_at_s, left, front, item.charged_meet, charge)
        item.charged_meet = split.meet
        return split

    def charge(self, view: StepView) -> float:
        """The factor for a second of compute: it delays all that wait or decode, while a link works
        beside it.
        """
        rules = self._under_way.rules
        behind = min(max(0, len(view.waiting) - 1), _MOST_CHARGED)
        return (
            1
            + rules.queue_charge * behind
            + rules.decode_charge * min(view.decoding, _MOST_CHARGED)
        )

    def meeting_if_taken_back(
        self, item: Restoration, view: StepView, compute_at_s: float, front: int
    ) -> Split:
        """The meeting page, charge included, if its loads in flight could be cancelled."""
        pace = self._pace or self._look(view)
        front, copied_s = item.behind_copies(front, pace.bandwidth, self._under_way.engine)
        left = item.left(pace, front, taken_back=True)
        return best_split(pace, compute_at_s + copied_s, left, front, charge=self.charge(view))

    def _look(self, view: StepView) -> Pace:
        known, engine = self._under_way, self._under_way.engine
        backlogs = known.links.backlogs(view.now)
        self._left_of = None
        self._pace = Pace(
            engine.page_tokens,
            engine.page_bytes,
            engine.chunk_tokens,
            known.cost.cost,
            known.bandwidth,
            backlogs,
        )
        return self._pace

    def ahead_s(self, view: StepView, item: Restoration) -> float:
        """Seconds until compute can begin for this request: the running chunk, the slot's holder,
        and fresh prefill.
        """
        ahead_s = self.busy_s(view)
        if view.slot == item.rid:
            return ahead_s
        ahead_s += self.fresh_s(view, item.rid)
        holder = self._under_way.items.get(view.slot or "")
        if holder is not None:
            split = self.held(holder) or self.meeting(holder, view, ahead_s, holder.pointer.front)
            ahead_s = max(ahead_s, split.seconds)
        return ahead_s

    def fresh_s(self, view: StepView, rid: str) -> float:
        """Seconds of prefill of requests before this one in the queue that restore nothing."""
        known, tokens = self._under_way, view.fresh_tokens
        if rid == view.slot:
            tokens -= sum(view.fresh)
        elif view.fresh and rid in view.waiting:
            tokens -= sum(view.fresh[view.waiting.index(rid) :])
        return known.cost.cost.range_seconds(0, tokens, known.engine.chunk_tokens)

    def suffix_s(self, item: Restoration) -> float:
        """Seconds to compute the rest of its prompt, once its prefix is there."""
        known = self._under_way
        end = item.pointer.units * known.engine.page_tokens
        return known.cost.cost.range_seconds(
            end, item.prompt_tokens - end, known.engine.chunk_tokens
        )
