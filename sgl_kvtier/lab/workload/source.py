"""Sessions from anywhere: a file, a trace's short name, or `generated:PRESET`. Reads no further
than it has to.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sgl_kvtier.errors import ConfigError, TraceError
from sgl_kvtier.lab.workload.catalogue import find_trace, name_of, origin_of
from sgl_kvtier.lab.workload.encoder import Encoder, PromptTokens
from sgl_kvtier.lab.workload.formats import CAPTURES, Recognised, decoded, recognise, records_of
from sgl_kvtier.lab.workload.generate import generate, load_preset
from sgl_kvtier.lab.workload.lines import BadLine, BadRecord, note
from sgl_kvtier.lab.workload.reader import Setting
from sgl_kvtier.lab.workload.session import Append, Call, Context, Event, Session

GENERATED = "generated:"
BLOCK_TOKENS = "tokens of a block of hash_ids (default: what the trace's format says)"
"""What --block-tokens is, for help texts."""

_CAPTURE_SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
_GENERATED_TRIES = 10
"""Sessions made up for each one wanted, before giving up on finding ones that fit
max_prompt_tokens.
"""


@dataclass(frozen=True)
class LoadResult:
    """The sessions loaded, and counts of those left out on the way."""

    sessions: tuple[Session, ...]
    description: str
    bad_lines: tuple[BadLine, ...] = ()
    sessions_cut: int = 0
    """Sessions that end early because of max_calls or max_prompt_tokens."""
    calls_cut: int = 0
    sessions_dropped: int = 0
    """Sessions whose first prompt is longer than max_prompt_tokens already, or whose longest is
    shorter than min_prompt_tokens.
    """
    left_out: Mapping[str, int] = field(default_factory=dict)
    """What the file holds and the sessions do not, or what it lacks, by what it is."""

    @property
    def calls(self) -> int:
        """Requests in all sessions."""
        return sum(session.calls for session in self.sessions)


def load_sessions(
    source: str,
    *,
    limit: int | None = None,
    skip: int = 0,
    seed: int = 0,
    traces_dir: Path | None = None,
    encoder: Encoder | None = None,
    max_calls: int | None = None,
    max_prompt_tokens: int | None = None,
    min_prompt_tokens: int = 0,
    block_tokens: int | None = None,
) -> LoadResult:
    """The sessions of `source`: a file, a folder of Claude Code captures, a trace's short name, or
    `generated:PRESET`.

    At most `limit` sessions after `skip` (lines of a file; sub-agents come with their owners and
    are not counted). Each is cut after `max_calls` calls. It is cut before the first call whose
    prompt is longer than `max_prompt_tokens` in the ids of `encoder`. One without a prompt of
    `min_prompt_tokens` is passed over. `seed` is for generated ones. `block_tokens` is how many
    tokens a block of a trace of hashes has, where its format leaves it open.
    Raises TraceError when there is nothing to read, ConfigError on wrong arguments.
    """
    if (max_prompt_tokens is not None or min_prompt_tokens) and encoder is None:
        raise ConfigError(
            "max_prompt_tokens and min_prompt_tokens need an encoder: without one there are no "
            "tokens to count"
        )
    if (limit is not None and limit < 1) or skip < 0 or (max_calls is not None and max_calls < 1):
        raise ConfigError(
            f"limit = {limit}, skip = {skip}, max_calls = {max_calls}: limits are at least 1, skip "
            "at least 0"
        )
    bad: list[BadLine] = []
    left_out: Counter[str] = Counter()
    if source.startswith(GENERATED):
        if block_tokens is not None:
            raise ConfigError(f"{source} has no blocks: leave --block-tokens out")
        if limit is None:
            raise ConfigError(f"{source} never ends: say how many sessions")
        preset = load_preset(source.removeprefix(GENERATED))
        groups: Iterator[list[Session]] = (
            [generate(preset, seed, skip + i)] for i in range(_GENERATED_TRIES * limit)
        )
        title = f"{source}, seed {seed} (statistics of {preset.source}, {preset.licence})"
    else:
        path = find_trace(source, traces_dir)
        origin = origin_of(path)
        if path.is_dir():
            groups = itertools.islice(_read_folder(path, left_out, block_tokens, bad), skip, None)
        else:
            setting = Setting(path, origin, left_out, block_tokens)
            groups = _read_file(setting, recognise(path), skip, bad)
        title = name_of(path) + (f" ({origin.source}, {origin.licence})" if origin.licence else "")
    chosen = _Chosen(encoder, max_calls, max_prompt_tokens, min_prompt_tokens)
    for group in groups:
        chosen.take(group)
        if limit is not None and chosen.groups == limit:
            break
    return chosen.result(title, bad, left_out)


def cut_session(
    session: Session,
    *,
    encoder: Encoder | None = None,
    max_calls: int | None = None,
    max_prompt_tokens: int | None = None,
) -> Session:
    """The session up to its last call within both limits; without any call when even the first is
    too long.
    """
    if max_calls is None and max_prompt_tokens is None:
        return session
    context = Context(session)
    tokens = (
        PromptTokens(encoder) if encoder is not None and max_prompt_tokens is not None else None
    )
    kept = 0
    for _, prompt in context.calls():
        if kept == max_calls:
            break
        if tokens is not None:
            tokens.show(prompt)
            if len(tokens) > (max_prompt_tokens or 0):
                break
        kept += 1
    if kept == session.calls:
        return session
    return dataclasses.replace(session, events=_up_to_call(session.events, kept))


def longest_prompt(session: Session, encoder: Encoder) -> int:
    """Tokens of its longest prompt."""
    tokens, longest = PromptTokens(encoder), 0
    for _, prompt in Context(session).calls():
        tokens.show(prompt)
        longest = max(longest, len(tokens))
    return longest


def enter_late(session: Session, share: float) -> Session:
    """The session without the first `share` of its calls. Their messages are context of the first
    call that is left, which is made without a wait. The last call always remains.
    """
    left_away = min(int(session.calls * share), session.calls - 1)
    if left_away <= 0:
        return session
    events: list[Event] = []
    calls = 0
    for event in session.events:
        if not isinstance(event, Call):
            events.append(event)
            continue
        calls += 1
        if calls > left_away:
            first = calls == left_away + 1
            events.append(dataclasses.replace(event, gap_s=0.0) if first else event)
        elif event.output is not None:
            events.append(Append(event.output))
    return dataclasses.replace(session, events=tuple(events))


@dataclass
class _Chosen:
    """Sessions within the limits, counted."""

    encoder: Encoder | None
    max_calls: int | None
    max_prompt_tokens: int | None
    min_prompt_tokens: int
    sessions: list[Session] = field(default_factory=list)
    groups: int = 0
    cut: int = 0
    calls_cut: int = 0
    dropped: int = 0
    names: set[str] = field(default_factory=set)

    def take(self, group: list[Session]) -> None:
        """Adds a session and its sub-agents'. A sub-agent whose owner is dropped goes with it. Of
        sessions with one name the second is NAME#2, and so on.
        """
        named: dict[str | None, str] = {}
        for session in group:
            fitting = cut_session(
                session,
                encoder=self.encoder,
                max_calls=self.max_calls,
                max_prompt_tokens=self.max_prompt_tokens,
            )
            lost = session.calls - fitting.calls
            self.calls_cut += lost
            if not fitting.calls or self._is_short(fitting):
                self.dropped += 1
                if session.parent is None:
                    return
                continue
            self.cut += lost > 0
            name = named[session.session_id] = self._free(session.session_id)
            parent = named.get(session.parent, session.parent)
            self.sessions.append(dataclasses.replace(fitting, session_id=name, parent=parent))
            self.groups += session.parent is None

    def _free(self, name: str) -> str:
        more = (f"{name}#{number}" for number in itertools.count(2))
        free = next(one for one in itertools.chain([name], more) if one not in self.names)
        self.names.add(free)
        return free

    def _is_short(self, session: Session) -> bool:
        if not self.min_prompt_tokens or self.encoder is None:
            return False
        return longest_prompt(session, self.encoder) < self.min_prompt_tokens

    def result(self, title: str, bad: list[BadLine], left_out: Counter[str]) -> LoadResult:
        losses = self._losses(bad)
        if left_out:
            amounts = ", ".join(f"{count} {what}" for what, count in left_out.items())
            losses = f"{losses} Left out: {amounts}.".lstrip()
        if not self.sessions:
            raise TraceError(f"{title}: no session to replay. {losses or 'The source is empty.'}")
        calls = sum(session.calls for session in self.sessions)
        described = f"{title}: {len(self.sessions)} sessions, {calls} calls"
        return LoadResult(
            sessions=tuple(self.sessions),
            description=f"{described}. {losses}" if losses else described,
            bad_lines=tuple(bad),
            sessions_cut=self.cut,
            calls_cut=self.calls_cut,
            sessions_dropped=self.dropped,
            left_out=dict(left_out),
        )

    def _losses(self, bad: list[BadLine]) -> str:
        notes = []
        if bad:
            notes.append(f"{len(bad)} bad lines were passed over, the first: {bad[0]}.")
        if self.cut or self.dropped:
            limits = {
                "max_calls": self.max_calls,
                "max_prompt_tokens": self.max_prompt_tokens,
                "min_prompt_tokens": self.min_prompt_tokens or None,
            }
            given = ", ".join(
                f"{name} = {value}" for name, value in limits.items() if value is not None
            )
            notes.append(
                f"{self.cut} sessions were cut and {self.dropped} dropped, {self.calls_cut} calls "
                f"in all ({given})."
            )
        return " ".join(notes)


def _up_to_call(events: tuple[Event, ...], calls: int) -> tuple[Event, ...]:
    seen = 0
    for position, event in enumerate(events):
        if seen == calls:
            return events[:position]
        seen += isinstance(event, Call)
    return events


def _read_file(
    setting: Setting, found: Recognised, skip: int, bad: list[BadLine]
) -> Iterator[list[Session]]:
    path, form = setting.path, found.form
    if setting.block_tokens is not None and not form.sized:
        raise ConfigError(
            f"{path} is {form.name}, whose blocks are known: leave --block-tokens out"
        )
    assert form.reader is not None
    reader = form.reader(setting)
    sessions_of = getattr(reader, form.method)

    def groups(first: int) -> Iterator[list[Session]]:
        for number, record in records_of(path, found, first, bad):
            try:
                sessions = sessions_of(number, decoded(form, record))
            except BadRecord as error:
                note(bad, path, number, str(error))
                continue
            if sessions:
                yield sessions
        for number, kept in reader.rest():
            if isinstance(kept, BadRecord):
                note(bad, path, number, str(kept))
            else:
                yield kept

    yield from itertools.islice(groups(0), skip, None) if form.gathers else groups(skip)


def _read_folder(
    folder: Path, left_out: Counter[str], block_tokens: int | None, bad: list[BadLine]
) -> Iterator[list[Session]]:
    files = [
        f for f in sorted(folder.iterdir()) if f.is_file() and f.name.endswith(_CAPTURE_SUFFIXES)
    ]
    if not files:
        raise TraceError(f"{folder} is a folder without a trace; name a file")
    for path in files:
        found = recognise(path)
        if found.form.name != CAPTURES:
            raise TraceError(
                f"{folder} is a folder, and {path.name} in it is {found.form.name}; a folder may "
                f"hold {CAPTURES} alone: name one of its files"
            )
        yield from _read_file(
            Setting(path, origin_of(folder), left_out, block_tokens), found, 0, bad
        )
