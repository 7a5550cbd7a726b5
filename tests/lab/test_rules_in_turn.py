"""The laboratory's rules that take each other's place in one running server."""

from __future__ import annotations

import pytest

from sgl_kvtier.lab.rules import IN_TURN, InTurn
from sgl_kvtier.policy.messages import Mode
from sgl_kvtier.policy.rules import Rules, rules_of, tune

NUMBERS = [name for name, own in vars(Rules).items() if isinstance(own, int | float)]


class Slow:
    """Two ways that are as long as each other, known, on a device with room."""

    known, learns, in_host, crowded, shared = True, False, False, True, False
    compute_s, load_s, both_s, own_s = 1.0, 1.0, 0.5, 0.0
    compute_stalls_s = both_stalls_s = 0.0


class One:
    def __init__(self, order: int, compute_s: float) -> None:
        self.rid, self.order, self.compute_s = str(order), order, compute_s


@pytest.mark.parametrize("name", IN_TURN)
def test_the_one_whose_turn_it_is_decides_everything(name: str) -> None:
    rules, own = InTurn(), IN_TURN[name]()
    assert tune(rules, "place", list(IN_TURN).index(name)) is None
    assert {n: getattr(rules, n) for n in NUMBERS} == {n: getattr(own, n) for n in NUMBERS}
    waiting = [One(1, 2.0), One(2, 3.0), One(3, 1.0)]
    assert list(rules.load_order(waiting)) == list(own.load_order(waiting))
    assert (rules.mode(Slow()), rules.why_declined(Slow())) == (
        own.mode(Slow()),
        own.why_declined(Slow()),
    )


def test_a_server_begins_with_kvtiers_own_and_may_go_back_to_them() -> None:
    rules = rules_of("sgl_kvtier.lab.rules:InTurn")
    assert rules.why_declined(Slow()) == "no room"
    assert tune(rules, "place", list(IN_TURN).index("cake")) is None
    assert (rules.why_declined(Slow()), rules.mode(Slow())) == (None, (Mode.BOTH, "rule"))
    assert not rules.balanced_chunks
    assert tune(rules, "place", 0) is None
    assert rules.balanced_chunks


@pytest.mark.parametrize("place", [-1, 0.5, len(IN_TURN)])
def test_a_place_that_there_is_not_is_refused_and_changes_nothing(place: float) -> None:
    rules = InTurn()
    assert tune(rules, "place", 1) is None
    said = tune(rules, "place", place)
    assert said is not None
    assert "cacheflow" in said
    assert not rules.balanced_chunks
