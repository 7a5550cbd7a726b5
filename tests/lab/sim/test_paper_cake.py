"""Cake's tables: read as printed, and what the real planner makes of them."""

from __future__ import annotations

from statistics import median

import pytest

from sgl_kvtier.lab.papers import cake
from sgl_kvtier.lab.papers.cake import Setup, printed, rig, times

PAIRS = {"3": 60, "4": 12, "5": 64, "6": 24, "7": 12}


def every_pair() -> list[cake.Pair]:
    return [pair for name in PAIRS for pair in printed(name)]


@pytest.mark.parametrize("name", PAIRS)
def test_every_printed_pair_is_read(name: str) -> None:
    assert len(list(printed(name))) == PAIRS[name]


def test_labels_become_the_set_up_they_name() -> None:
    by_place = {(pair.table, pair.row, pair.column): pair for pair in every_pair()}
    pair = by_place["5", "1xA100 32Gbps 87.5%", "4k Tokens"]
    assert pair.setup == Setup("A100", "LongAlpaca-13B", 4096, 32.0, 0.875)
    assert (pair.over_io, pair.over_compute) == (1.83, 1.65)
    assert by_place["4", "64 32Gbps", "LongAlpaca-7B"].setup.budget == 64
    assert by_place["7", "56Gbps", "3-bit"].setup.kv_scale == pytest.approx(3 / 16)


def test_a_set_up_printed_in_two_tables_has_the_same_numbers_but_for_one() -> None:
    seen: dict[Setup, set[tuple[float, float]]] = {}
    for pair in every_pair():
        seen.setdefault(pair.setup, set()).add((pair.over_io, pair.over_compute))
    assert [setup for setup, numbers in seen.items() if len(numbers) > 1] == [
        Setup("A100", "LongAlpaca-13B", 16384, 32.0)
    ]


def test_the_fitted_ratios_are_those_of_the_baselines() -> None:
    fitted = [pair for pair in every_pair() if pair.setup.is_fitted]
    # Table 4 prints one of them otherwise than Table 5.
    assert len({(one.setup, one.over_io) for one in fitted}) == cake.FITTED.numbers + 1
    for pair in fitted:
        ours = times(pair.setup)
        off = ours.io_s / ours.compute_s / (pair.over_io / pair.over_compute) - 1
        assert abs(off) < 0.08, pair


def two_pointers(setup: Setup) -> float:
    """Cake's algorithm as a bare loop, nobody touching what the other has taken: a cross-check with
    no simulator in it.
    """
    parts = rig(setup)
    chunk, cost = int(setup.budget * setup.share), parts.cost.cost
    load_s = 128 * parts.model.kv_bytes_per_token / parts.load_bytes_per_s
    front, back, computed_s, loaded_s = 0, setup.tokens, 0.0, 0.0
    while front < back:
        if computed_s <= loaded_s:
            tokens = min(chunk, back - front)
            filled = setup.budget if setup.share < 1 else tokens
            pairs = filled * (front + tokens / 2)
            work_s = max(parts.cost.floor_s, cost.per_token_s * filled)
            computed_s += cost.fixed_s + work_s + cost.per_token_position_s * pairs
            front += tokens
        else:
            back -= 128
            loaded_s += load_s
    return max(computed_s, loaded_s)


def test_the_planner_in_the_simulator_does_what_the_bare_loop_does() -> None:
    setups = [pair.setup for name in ("4", "7") for pair in printed(name)]
    off = [times(setup).cake_s / two_pointers(setup) - 1 for setup in setups]
    assert abs(median(off)) < 0.02
    # Loads are handed out for the whole step ahead, so at the end one chunk more or less is
    # computed; with five chunks in all (the 70B model) that is much.
    assert min(off) > -0.15
    assert max(off) < 0.1


def test_ours_never_loses_to_a_single_resource_where_the_rule_of_the_paper_does() -> None:
    ours = [times(pair.setup) for pair in printed("6")]
    assert min(one.best(one.cake_s) for one in ours) < 1
    assert min(one.best(one.kvtier_s) for one in ours) >= 1
