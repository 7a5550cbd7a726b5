"""Whether an answer is equal to another as far as the arithmetic allows.

On a card numbers are bfloat16, and the borders of chunks move them. So two runs of one server with
two chunk sizes differ a little, at every temperature. That is the noise floor. An answer is judged
against it:

- its log-probs may differ from the reference's by `SPARE` times the floor's largest difference;
- its tokens must be the reference's, up to the first tie. There the reference's best two tokens
  are so close that both may have moved past each other. Behind a tie nothing can be compared.

Pure; no server, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

SPARE = 1.5
"""Factor on the largest difference that was seen in stock: a floor is measured on few prompts."""
LEAST = 1e-5
"""The difference float32 may have where no chunk border moves anything."""


@dataclass(frozen=True)
class Answer:
    """Output tokens, their log-probs, and by how much each was ahead of the next best token.
    Without `margins` no other token is excused.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...] = ()


@dataclass(frozen=True)
class Floor:
    """The noise floor of stock's own answers. `logprob` is the largest difference seen."""

    logprob: float
    answers: int
    forked: int = 0
    """Answers whose tokens were others from some place on."""

    @property
    def allowed(self) -> float:
        """Most that a log-prob may differ by."""
        return max(LEAST, SPARE * self.logprob)

    def document(self) -> dict[str, float]:
        """As in a result."""
        return {**asdict(self), "allowed": self.allowed}

    def __str__(self) -> str:
        return (
            f"log-probs differ by up to {self.logprob:.3g}, and {self.forked} of {self.answers} "
            f"have other tokens; {self.allowed:.3g} is allowed"
        )


class Verdict(Enum):
    """The kinds of answers, beside their references."""

    EQUAL = "equal"
    FORKED = "forked at a tie"
    """Equal up to a place where the reference's best two tokens are closer than the noise."""
    OTHER_LOGPROBS = "other log-probs"
    OTHER_TOKENS = "other tokens"
    INCOMPLETE = "incomplete"


def floor_of(pairs: Iterable[tuple[Answer, Answer]]) -> Floor:
    """The noise floor, from pairs of answers to the same prompts."""
    most, answers, forked = 0.0, 0, 0
    for one, other in pairs:
        same = _same_tokens(one, other)
        most = max([most, *_apart(one, other, same)])
        forked += same < min(len(one.tokens), len(other.tokens))
        answers += 1
    return Floor(most, answers, forked)


def judge(reference: Answer, answer: Answer, floor: Floor) -> Verdict:
    """Whether an answer is its reference's equal."""
    if len(answer.tokens) != len(reference.tokens) or len(answer.logprobs) != len(answer.tokens):
        return Verdict.INCOMPLETE
    same = _same_tokens(reference, answer)
    if any(apart > floor.allowed for apart in _apart(reference, answer, same)):
        return Verdict.OTHER_LOGPROBS
    if same == len(reference.tokens):
        return Verdict.EQUAL
    # Either token's log-prob may have moved by what is allowed, towards the other.
    margins = reference.margins
    tie = same < len(margins) and margins[same] <= 2 * floor.allowed
    return Verdict.FORKED if tie else Verdict.OTHER_TOKENS


WRONG = (Verdict.OTHER_LOGPROBS, Verdict.OTHER_TOKENS, Verdict.INCOMPLETE)
"""Verdicts that nothing excuses."""


def _same_tokens(one: Answer, other: Answer) -> int:
    """How many tokens they begin with in common."""
    for place, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            return place
    return min(len(one.tokens), len(other.tokens))


def _apart(one: Answer, other: Answer, same: int) -> Sequence[float]:
    """Differences of the log-probs of the tokens they have in common."""
    return [abs(a - b) for a, b in zip(one.logprobs[:same], other.logprobs[:same], strict=False)]
