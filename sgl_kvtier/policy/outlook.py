"""What one step predicts: when compute can reach whom, and where the two ends of each restoration should meet."""

from __future__ import annotations

from sgl_kvtier.policy.meeting import Pace, Split, best_split
from sgl_kvtier.policy.messages import StepView
from sgl_kvtier.policy.restore import Forecast, Restoration
from sgl_kvtier.policy.under_way import UnderWay


class Outlook:
    """Predictions in seconds from the view's `now`. What was looked up in a step is kept until the next `begin`."""

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way = under_way
        self.splits: dict[str, Split] = {}
        """Meeting points found in this step, of the slot's holder."""
        self._pace: Pace | None = None
        """What is known of costs and links in this step, until loads are handed out."""

    def begin(self) -> None:
        """Another step begins: nothing of the last one holds."""
        self.splits.clear()
        self._pace = None

    def loads_handed_out(self) -> None:
        """Links have more to do than before."""
        self._pace = None

    def busy_s(self, view: StepView) -> float:
        """Until what is being computed is done."""
        return max(0.0, self._under_way.busy_until - view.now)

    def forecast(self, view: StepView, compute_at_s: float) -> Forecast:
        """What each way to restore a request would take."""
        known = self._under_way
        return Forecast(known.engine, known.cost.cost, known.bandwidth, compute_at_s, known.links.backlogs(view.now))

    def meeting(
        self, item: Restoration, view: StepView, compute_at_s: float, front: int, recall: bool = False, charge: float = 1.0
    ) -> Split:
        """Where a request's two ends should meet, with its front at a page, as Forecast.both says, from what the last search
        came to. Links have what was asked of them up to now to do. `charge`: compute counts for so many times its seconds."""
        known, pace = self._under_way, self._pace
        if pace is None:
            engine, backlogs = known.engine, known.links.backlogs(view.now)
            pace = self._pace = Pace(
                engine.page_tokens, engine.page_bytes, engine.chunk_tokens, known.cost.cost, known.bandwidth, backlogs
            )
        front, copied_s = item.behind_copies(front, known.bandwidth, known.engine)
        compute_at_s += copied_s
        if recall:
            return best_split(pace, compute_at_s, item.pointer, item.by_link, front, item.in_flight)
        if charge != 1.0:
            return best_split(pace.charged(charge), compute_at_s, item.pointer, item.by_link, front)
        split = best_split(pace, compute_at_s, item.pointer, item.by_link, front, None, item.meet)
        item.meet = split.meet
        return split

    def ahead_s(self, view: StepView, item: Restoration) -> float:
        """Until compute can begin for this request: the running chunk, the slot's holder, and fresh prefill."""
        ahead_s = self.busy_s(view)
        if view.slot == item.rid:
            return ahead_s
        ahead_s += self.fresh_s(view)
        holder = self._under_way.items.get(view.slot or "")
        if holder is not None:
            split = self.splits.get(holder.rid) or self.meeting(holder, view, ahead_s, holder.pointer.front)
            ahead_s = max(ahead_s, split.seconds)
        return ahead_s

    def fresh_s(self, view: StepView) -> float:
        """What prefill of requests that restore nothing takes."""
        known = self._under_way
        return known.cost.cost.range_seconds(0, view.fresh_tokens, known.engine.chunk_tokens)

    def suffix_s(self, item: Restoration) -> float:
        """What computing the rest of its prompt takes, once its prefix is there."""
        known = self._under_way
        end = item.pointer.units * known.engine.page_tokens
        return known.cost.cost.range_seconds(end, item.prompt_tokens - end, known.engine.chunk_tokens)
