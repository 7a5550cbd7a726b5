"""What is excused by stock's own noise, and what is not. Synthetic answers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sgl_kvtier.lab.stress.server.judge import LEAST, SPARE, Answer, Floor, Verdict, floor_of, judge
from sgl_kvtier.lab.stress.server.log import Attempt, FuzzLog, counts

REFERENCE = Answer((5, 9, 2, 7), (-0.1, -0.4, -0.2, -0.3), (3.0, 0.02, 5.0, 2.0))
FLOOR = Floor(0.02, 10)


def moved(by: float) -> Answer:
    return replace(REFERENCE, logprobs=tuple(p + by for p in REFERENCE.logprobs))


def test_the_floor_is_the_largest_difference_of_log_probs_before_a_fork() -> None:
    forked = Answer((5, 8, 1, 1), (-0.13, -9.0, -9.0, -9.0))
    assert floor_of([(REFERENCE, moved(0.01)), (REFERENCE, forked)]) == Floor(
        pytest.approx(0.03), 2, 1
    )


def test_answers_that_are_alike_have_a_floor_of_nought_and_float32_still_has_room() -> None:
    floor = floor_of([(REFERENCE, REFERENCE)])
    assert (floor.logprob, floor.allowed) == (0.0, LEAST)
    assert judge(REFERENCE, moved(LEAST / 2), floor) is Verdict.EQUAL
    assert judge(REFERENCE, moved(LEAST * 2), floor) is Verdict.OTHER_LOGPROBS


def test_log_probs_may_differ_by_the_floor_and_half_of_it_again() -> None:
    assert judge(REFERENCE, moved(SPARE * FLOOR.logprob - 1e-9), FLOOR) is Verdict.EQUAL
    assert judge(REFERENCE, moved(SPARE * FLOOR.logprob + 1e-6), FLOOR) is Verdict.OTHER_LOGPROBS


def test_another_token_is_excused_at_a_tie_alone() -> None:
    at_the_tie = Answer((5, 8, 0, 0), (-0.1, -0.4, -3.0, -3.0))
    assert judge(REFERENCE, at_the_tie, FLOOR) is Verdict.FORKED
    elsewhere = Answer((5, 9, 3, 7), REFERENCE.logprobs)
    assert judge(REFERENCE, elsewhere, FLOOR) is Verdict.OTHER_TOKENS
    without = replace(REFERENCE, margins=())
    assert judge(without, at_the_tie, FLOOR) is Verdict.OTHER_TOKENS


def test_a_wrong_log_prob_before_a_fork_is_not_excused_by_it() -> None:
    wrong = Answer((5, 8, 0, 0), (-0.9, -0.4, -3.0, -3.0))
    assert judge(REFERENCE, wrong, FLOOR) is Verdict.OTHER_LOGPROBS


@pytest.mark.parametrize("count", [0, 3])
def test_an_answer_that_is_too_short_is_no_answer(count: int) -> None:
    short = Answer(REFERENCE.tokens[:count], REFERENCE.logprobs[:count])
    assert judge(REFERENCE, short, FLOOR) is Verdict.INCOMPLETE
    no_logprobs = replace(REFERENCE, logprobs=())
    assert judge(REFERENCE, no_logprobs, FLOOR) is Verdict.INCOMPLETE


def test_noise_of_one_size_passes_and_a_wrong_page_does_not() -> None:
    """Restored answers drawn from the floor's own noise, and one that read another page."""
    chance = random.Random(0)

    def noisy(answer: Answer) -> Answer:
        return replace(
            answer, logprobs=tuple(p + chance.uniform(-0.01, 0.01) for p in answer.logprobs)
        )

    references = [
        Answer(
            tuple(chance.choices(range(256), k=16)),
            tuple(-chance.random() for _ in range(16)),
            tuple(1 + chance.random() for _ in range(16)),
        )
        for _ in range(50)
    ]
    floor = floor_of((noisy(one), noisy(one)) for one in references)
    assert all(judge(noisy(one), noisy(one), floor) is Verdict.EQUAL for one in references)
    wrong = replace(references[0], logprobs=tuple(p - 0.2 for p in references[0].logprobs))
    assert judge(references[0], wrong, floor) is Verdict.OTHER_LOGPROBS


def attempt(answer: Answer, *, complete: bool = True) -> Attempt:
    return Attempt(
        "run", 0, "p", 10, "auto", "answered", 1.0,
        tokens=answer.tokens, logprobs=answer.logprobs, complete=complete,
    )  # fmt: skip


def test_a_fuzz_run_with_a_floor_excuses_noise_and_ties_and_nothing_else() -> None:
    log = FuzzLog()
    log.floor = FLOOR
    log.references["p"] = REFERENCE
    excused = [moved(0.02), Answer((5, 8, 0, 0), (-0.1, -0.4, -3.0, -3.0))]
    log.attempts = [attempt(one) for one in excused]
    found = counts(log)
    assert (found["unequal_tokens"], found["unequal_logprobs"]) == (0, 0)
    log.attempts = [attempt(moved(0.2)), attempt(Answer((5, 9, 3, 7), REFERENCE.logprobs))]
    found = counts(log)
    assert (found["unequal_tokens"], found["unequal_logprobs"]) == (1, 2)
    begun = Answer(REFERENCE.tokens[:2], REFERENCE.logprobs[:2])
    log.attempts = [attempt(begun, complete=False), attempt(begun)]
    assert counts(log)["unequal_tokens"] == 1
    without = FuzzLog()
    without.references = log.references
    without.attempts = [attempt(moved(0.02))]
    assert counts(without)["unequal_logprobs"] == 1
