"""Sessions made up from published statistics, for machines without traces.

The same preset, seed and index give the same session. Each length and time is drawn on its own from
a percentile table in presets.json, which names its sources. So totals follow the table but
correlations within a session are lost. The text is random letters: only its length and who shares
it matter.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.encoder import CHARS_PER_TOKEN
from sgl_kvtier.lab.workload.session import Append, Call, Edit, Event, Message, Session
from sgl_kvtier.types import Span

# Five letters in six, a space in six, and now and then a line break: what random bytes become.
_LETTERS = bytes(10 if b > 252 else 32 if b % 6 == 0 else 97 + b % 26 for b in range(256))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution by its percentiles. Between two of them it is drawn geometrically, since all
    of these have long tails.
    """

    shares: tuple[float, ...]
    values: tuple[float, ...]

    def draw(self, rng: random.Random) -> float:
        """One value, by the inverse of the distribution function."""
        return self.at(rng.random())

    def at(self, share: float) -> float:
        """The value below which `share` of the distribution lies; share from 0 to 1."""
        upper = next(
            i
            for i in range(1, len(self.shares))
            if share <= self.shares[i] or i == len(self.shares) - 1
        )
        low, high = self.values[upper - 1], self.values[upper]
        part = (share - self.shares[upper - 1]) / (self.shares[upper] - self.shares[upper - 1])
        if low > 0:
            return math.exp(math.log(low) * (1 - part) + math.log(high) * part)
        return low + (high - low) * part


@dataclass(frozen=True, slots=True)
class Condense:
    """The middle of a long context is replaced by a summary, whenever it has `at_messages`
    messages.
    """

    at_messages: int
    keep_first: int
    keep_last: int
    summary_tokens: Percentiles


@dataclass(frozen=True, slots=True)
class Rewrite:
    """In a share of calls only the leading `kept_share` of the previous prompt stays. The new one
    is `size_ratio` as long.
    """

    per_call: float
    kept_share: Percentiles
    size_ratio: Percentiles


@dataclass(frozen=True, slots=True)
class Preset:
    """One kind of session: the tables it is drawn from. Tokens are cl100k-like, times in seconds
    (None: not recorded).
    """

    name: str
    source: str
    licence: str
    trace: str
    input_role: str
    calls: Percentiles
    first_prompt_tokens: Percentiles
    shared_prefix_tokens: int
    input_tokens: Percentiles
    output_tokens: Percentiles
    most_prompt_tokens: int
    gap_s: Percentiles | None
    latency_s: Percentiles | None
    edit: Condense | Rewrite | None


@cache
def presets() -> dict[str, Preset]:
    """Every preset by name, from presets.json."""
    table = json.loads(Path(__file__).with_name("presets.json").read_text("utf-8"))
    shares = tuple(p / 100 for p in table["percentiles"])
    return {name: _preset(name, entry, shares) for name, entry in table["presets"].items()}


def load_preset(name: str) -> Preset:
    """A preset by name. Raises TraceError naming those there are."""
    if name not in presets():
        raise TraceError(f"no preset {name!r}; there are {', '.join(presets())}")
    return presets()[name]


def generate(preset: Preset, seed: int, index: int) -> Session:
    """Session `index` of the endless series with this seed. All sessions of a preset begin with the
    same shared prefix.
    """
    # A str seeds through SHA-512, so it is the same in every process and Python version.
    rng = random.Random(f"kvtier {preset.name} {seed} {index}")
    draft = _Draft(preset, rng)
    draft.begin()
    for number in range(max(1, round(preset.calls.draw(rng)))):
        if number:
            draft.prepare()
        if draft.prompt_chars > preset.most_prompt_tokens * CHARS_PER_TOKEN and number:
            break
        draft.call(first=not number)
    while not isinstance(draft.events[-1], Call):
        draft.events.pop()
    return Session(
        session_id=f"generated:{preset.name}:{seed}:{index}",
        source=f"generated from statistics of {preset.source}",
        events=tuple(draft.events),
        licence=preset.licence,
        batch=f"generated:{preset.name}:{seed}",
    )


@dataclass
class _Draft:
    """A session in the making: its events, and the context they give."""

    preset: Preset
    rng: random.Random
    events: list[Event] = field(default_factory=list)
    context: list[Message] = field(default_factory=list)
    last_prompt: list[Message] = field(default_factory=list)

    @property
    def prompt_chars(self) -> int:
        return _chars(self.context)

    def begin(self) -> None:
        """The shared prefix as system message, and the task."""
        first = max(2, round(self.preset.first_prompt_tokens.draw(self.rng)))
        shared = min(self.preset.shared_prefix_tokens, first - 1)
        if shared:
            prefix = _letters(
                random.Random(f"kvtier {self.preset.name} prefix"), self.preset.shared_prefix_tokens
            )
            self._append(Message("system", prefix[: shared * CHARS_PER_TOKEN]))
        self._append(Message("user", _letters(self.rng, first - shared)))

    def prepare(self) -> None:
        """Adds the events between two calls: a tool result or the user's next message, and an edit
        where one is due.
        """
        edit = self.preset.edit
        if isinstance(edit, Rewrite) and self.rng.random() < edit.per_call:
            self._rewrite(edit)
            return
        self._append(self._message(self.preset.input_role, self.preset.input_tokens))
        if isinstance(edit, Condense) and len(self.context) >= edit.at_messages:
            kept = len(self.context) - edit.keep_last
            summary = self._message("user", edit.summary_tokens)
            self._edit(
                (Span(0, edit.keep_first), summary, Span(kept, len(self.context))), "condensation"
            )

    def call(self, *, first: bool) -> None:
        """One request with its output."""
        preset = self.preset
        tokens = max(1, round(preset.output_tokens.draw(self.rng)))
        output = Message("assistant", _letters(self.rng, tokens))
        # The recorder's clock was stepped now and then, so a table may begin below 0.
        gap_s = (
            0.0
            if first or preset.gap_s is None
            else max(0.0, round(preset.gap_s.draw(self.rng), 3))
        )
        latency_s = None if preset.latency_s is None else round(preset.latency_s.draw(self.rng), 3)
        self.events.append(Call(output, tokens, gap_s, latency_s))
        self.last_prompt = list(self.context)
        self.context.append(output)

    def _rewrite(self, edit: Rewrite) -> None:
        before = _chars(self.last_prompt)
        kept = int(before * edit.kept_share.draw(self.rng))
        size = max(kept + CHARS_PER_TOKEN, int(before * edit.size_ratio.draw(self.rng)))
        fresh = _letters(self.rng, max(1, (size - kept) // CHARS_PER_TOKEN))
        whole, left = 0, kept
        while whole < len(self.last_prompt) and _chars(self.last_prompt[whole : whole + 1]) <= left:
            left -= _chars(self.last_prompt[whole : whole + 1])
            whole += 1
        parts: list[Span | Message] = [Span(0, whole)] if whole else []
        if whole < len(self.last_prompt) and left:
            torn = self.last_prompt[whole]
            parts.append(Message(torn.role, (torn.text or "")[:left] + fresh))
        else:
            parts.append(Message("user", fresh))
        self._edit(parts, "rewrite")

    def _append(self, message: Message) -> None:
        self.events.append(Append(message))
        self.context.append(message)

    def _edit(self, parts: Sequence[Span | Message], why: str) -> None:
        self.events.append(Edit(tuple(parts), why))
        pieces = [[p] if isinstance(p, Message) else self.context[p.start : p.stop] for p in parts]
        self.context = [message for piece in pieces for message in piece]

    def _message(self, role: str, tokens: Percentiles) -> Message:
        return Message(role, _letters(self.rng, max(1, round(tokens.draw(self.rng)))))


def _letters(rng: random.Random, tokens: int) -> str:
    return rng.randbytes(tokens * CHARS_PER_TOKEN).translate(_LETTERS).decode("ascii")


def _chars(messages: Sequence[Message]) -> int:
    return sum(len(message.text or "") for message in messages)


def _preset(name: str, entry: dict[str, Any], shares: tuple[float, ...]) -> Preset:
    values = _tables(entry, shares)
    if entry["edit"] is not None:
        kind = Condense if entry["edit"]["kind"] == "condense" else Rewrite
        values["edit"] = kind(**_tables(entry["edit"], shares))
    return Preset(name=name, **values)


def _tables(entry: dict[str, Any], shares: tuple[float, ...]) -> dict[str, Any]:
    """The entry's values, its lists as distributions. `kind` is dropped."""
    return {
        key: Percentiles(shares, tuple(map(float, value))) if isinstance(value, list) else value
        for key, value in entry.items()
        if key != "kind"
    }
