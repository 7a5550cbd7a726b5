"""The sentence that a comparison begins with: a winner only where paired rounds show one."""

from __future__ import annotations

import pytest

from sgl_kvtier.lab.pages.compare.result import seconds
from sgl_kvtier.lab.pages.compare.sentence import sentence


def ratio(median: float, low: float, high: float, n: int, a: float, b: float) -> dict:
    return {"median": median, "p25": low, "p75": high, "n": n, "a": a, "b": b}


def compared(
    times: dict | None, rates: dict | None = None, *, other: str = "hicache-file", **more: object
) -> dict:
    """A result of two arms, its answers equal; `times` and `rates` are their paired ratios."""
    arm = {"equal_tokens_fraction": 1.0, "compared_requests": 144, "errors": 0, "requests": 144}
    found = {"ttft_later_ms_mean": times, "throughput_tokens_per_s": rates}
    return {
        "arms": {
            other: {**arm, "ttft_later_ms": {"mean": 7310.0}, "throughput_tokens_per_s": 16.0},
            "kvtier": {**arm, "ttft_later_ms": {"mean": 1520.0}, "throughput_tokens_per_s": 56.0},
        },
        "ratios": {f"kvtier/{other}": {name: one for name, one in found.items() if one}},
        **more,
    }


FASTER = ratio(0.21, 0.2, 0.22, 5, 1520.0, 7310.0)
MORE = ratio(3.5, 3.4, 3.6, 5, 56.0, 16.0)


def test_it_says_how_long_a_later_turn_waits_the_throughput_and_whether_answers_are_equal() -> None:
    assert sentence(compared(FASTER, MORE)) == (
        "kvtier: first token of later turns after 1.52 s instead of 7.31 (hicache-file), 3.5 times "
        "the throughput, all 288 answers equal.",
        False,
    )


@pytest.mark.parametrize(
    ("n", "said"),
    [(0, "no paired round"), (1, "one round"), (2, "two rounds"), (3, "three rounds")],
)
def test_fewer_than_four_rounds_give_both_figures_and_no_winner(n: int, said: str) -> None:
    text, bad = sentence(compared({**FASTER, "n": n}, {**MORE, "n": n}))
    assert text == (
        "kvtier and hicache-file: first token of later turns after 1.52 s and 7.31 s, 56.0 and "
        f"16.0 output tokens/s; {said}: too few to tell; all 288 answers equal."
    )
    assert not bad


def test_quartiles_on_both_sides_of_1_give_no_winner() -> None:
    times = ratio(0.97, 0.9, 1.01, 5, 1480.0, 1520.0)
    text, bad = sentence(compared(times, ratio(1.0, 0.99, 1.02, 5, 56.0, 55.0)))
    assert text == (
        "kvtier and hicache-file: first token of later turns after 1.48 s and 1.52 s, no "
        "difference beyond the noise, throughput equal within the noise, all 288 answers equal."
    )
    assert not bad
    assert "instead of" not in text


def test_a_quartile_of_exactly_1_gives_no_winner() -> None:
    assert "no difference" in sentence(compared(ratio(0.9, 0.8, 1.0, 9, 1.0, 2.0)))[0]


def test_throughput_is_judged_by_its_own_quartiles() -> None:
    same = ratio(1.02, 0.98, 1.05, 5, 56.0, 55.0)
    text, bad = sentence(compared(FASTER, same))
    assert "1.52 s instead of 7.31" in text and not bad
    assert "(hicache-file), throughput equal within the noise" in text
    fewer = ratio(0.81, 0.8, 0.82, 5, 45.0, 55.0)
    text, bad = sentence(compared(ratio(1.0, 0.9, 1.1, 5, 1.0, 1.0), fewer))
    assert "no difference beyond the noise, 0.81 times the throughput" in text and bad


def test_being_slower_is_said_and_stands_out() -> None:
    text, bad = sentence(compared(ratio(1.5, 1.4, 1.6, 4, 2200.0, 1500.0)))
    assert text.startswith(
        "kvtier is slower: first token of later turns after 2.20 s instead of 1.50"
    )
    assert bad


def test_another_arm_that_is_faster_still_is_named() -> None:
    result = compared(FASTER, MORE)
    result["arms"]["recompute"] = {"ttft_later_ms": {"mean": 1100.0}}
    result["ratios"]["kvtier/recompute"] = {
        "ttft_later_ms_mean": ratio(1.4, 1.3, 1.5, 5, 1520.0, 1100.0)
    }
    text, bad = sentence(result)
    assert text.endswith("; recompute is faster still, 1.10 s.")
    assert bad


def test_without_stock_storage_it_compares_with_the_best_other_arm() -> None:
    assert "(hicache)" in sentence(compared(FASTER, MORE, other="hicache"))[0]


def on_a_paced_device(result: dict, **pace: object) -> dict:
    for arm in result["arms"].values():
        arm["pace"] = {"valid": True, "overrun": 0.01, "mismatches": 0}
    result["arms"]["kvtier"]["pace"] |= pace
    return {**result, "device": {"paced": {"profile": "h100-llama8b"}}}


def test_a_paced_device_is_named() -> None:
    text, bad = sentence(on_a_paced_device(compared(FASTER, MORE)))
    assert text.startswith("kvtier on paced h100-llama8b: first token")
    assert not bad


@pytest.mark.parametrize(
    ("pace", "said"),
    [
        ({"valid": False, "overrun": 0.14}, "kvtier (14% of its steps' time lost)"),
        ({"valid": False, "mismatches": 3}, "kvtier (3 wrong keys and values)"),
        ({"valid": None, "overrun": None}, "kvtier (it wrote no step)"),
    ],
)
def test_a_lost_pace_is_all_that_is_said(pace: dict, said: str) -> None:
    text, bad = sentence(on_a_paced_device(compared(FASTER, MORE), **pace))
    assert text == f"INVALID: the paced device did not keep pace in {said}: nothing can be said."
    assert bad


def test_an_arm_that_measured_nothing_lost_no_pace() -> None:
    result = on_a_paced_device(compared(FASTER, MORE), valid=None, overrun=None)
    result["arms"]["kvtier"] |= {"requests": 0, "ttft_later_ms": {"mean": None}}
    assert sentence(result)[0].startswith("Nothing to compare on paced h100-llama8b: first token")


@pytest.mark.parametrize("torn", [("kvtier",), ("hicache-file", "kvtier")])
def test_of_an_arm_whose_only_round_was_interrupted_no_pace_is_known_and_nothing_is_said(
    torn: tuple[str, ...],
) -> None:
    result = on_a_paced_device(compared(FASTER, MORE))
    for arm in torn:
        result["arms"][arm] |= {"pace": None, "rounds": [{"complete": False}]}
    text, bad = sentence(result)
    assert text.startswith("Nothing to compare on paced h100-llama8b: ")
    assert "kvtier" not in text and not bad


def test_unequal_answers_come_first() -> None:
    result = compared(FASTER, MORE)
    result["arms"]["kvtier"]["equal_tokens_fraction"] = 141 / 144
    text, bad = sentence(result)
    assert text.startswith(
        "UNEQUAL ANSWERS: other tokens than hicache-file's first ones: kvtier 3 of 144. kvtier: "
    )
    assert "answers equal" not in text
    assert bad


def test_recompute_that_differs_from_itself_is_noise_of_repeating() -> None:
    result = compared(FASTER, MORE)
    result["arms"]["recompute"] = {"equal_tokens_fraction": 0.9, "compared_requests": 10}
    assert "UNEQUAL" not in sentence(result)[0]


def test_failed_requests_are_counted_before_the_figures() -> None:
    result = compared(FASTER, MORE)
    result["arms"]["hicache-file"]["errors"] = 2
    text, bad = sentence(result)
    assert text.startswith("FAILED: hicache-file 2 of 144 requests. kvtier: ")
    assert bad


def test_without_our_arm_or_another_there_is_nothing_to_compare() -> None:
    result = compared(None)
    del result["arms"]["kvtier"]
    text, _ = sentence(result)
    assert text.startswith(
        "Nothing to compare: first token of later turns after hicache-file 7.31 s"
    )
    assert sentence({"arms": {"kvtier": {}}})[0].startswith("Nothing to compare: no later turn")


@pytest.mark.parametrize(
    ("ms", "beside", "text"),
    [
        (12.34, (), "12.3 ms"),
        (340.4, (), "340 ms"),
        (1500.0, (), "1.50 s"),
        (42.0, (7000.0,), "0.042 s"),
        (220.0, (7000.0,), "0.22 s"),
        (12345.0, (), "12.3 s"),
    ],
)
def test_times_beside_each_other_have_one_unit(ms: float, beside: tuple, text: str) -> None:
    assert seconds(ms, *beside) == text
