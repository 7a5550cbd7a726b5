"""The note on a round that did not begin with empty caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_kvtier.lab.experiment.rounds import not_cold
from sgl_kvtier.lab.outside.client import Cached, Completion
from sgl_kvtier.lab.outside.replay import Sample


def sample(sent_s: float, first_s: float | None, cached: int) -> Sample:
    times = () if first_s is None else (first_s,)
    tiers = Cached(cached, 0, 0, cached)
    return Sample("a", 1, Completion(sent_s, 9.0, token_times_s=times, cached=tiers))


def notes(*samples: Sample) -> list[str]:
    one: Any = SimpleNamespace(arm="kvtier", number=2, samples=list(samples))
    return not_cold(one)


def test_the_first_answer_says_whether_a_round_was_cold() -> None:
    found = notes(sample(1.0, 2.0, 64), sample(2.0, 3.0, 0))
    assert found == [
        "kvtier, round 2: the first answer had 64 cached tokens; the round was not cold."
    ]


def test_who_was_sent_first_and_served_later_shares_pages_with_others() -> None:
    assert notes(sample(1.0, 5.0, 64), sample(1.1, 2.0, 0)) == []


def test_a_round_without_an_answer_says_nothing() -> None:
    assert notes() == notes(sample(1.0, None, 64)) == []
