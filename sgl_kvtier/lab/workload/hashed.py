"""Readers of traces that hold hashes or lengths instead of text: Claude Code captures (Weka),
Mooncake and its dialects, Qwen-Bailian, Azure and BurstGPT.

Claude Code: one session an object. A request has `hash_ids` as published; or, as
claude_code_blocks64 has it, `keep`, the number of leading blocks it shares with the one before, and
`new`, the others. Fewer kept than there were is a context edit. A sub-agent's requests run beside
its owner's. So they become a session of their own (`parent`), in the same scope of ids, right
behind the owner's. The up to 63 tokens behind a request's last whole block have no id and are left
out.

Mooncake and Qwen-Bailian: one request a line with global ids of blocks, the last of which may be
cut. Azure and BurstGPT: arrival times and lengths only, with no shared content.
"""

from __future__ import annotations

import bisect
import datetime
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgl_kvtier.errors import TraceError
from sgl_kvtier.lab.workload.lines import (
    MOST_SECONDS,
    MOST_TOKENS,
    BadRecord,
    count_of,
    inside,
    list_of,
    milliseconds_of,
    seconds_of,
    text_of,
    whole,
)
from sgl_kvtier.lab.workload.reader import Reader, Setting
from sgl_kvtier.lab.workload.session import (
    FILLED,
    Append,
    Blocks,
    Call,
    Edit,
    Event,
    Message,
    Session,
)
from sgl_kvtier.outside import is_number, is_text, is_whole, shown
from sgl_kvtier.types import Span

MOONCAKE_BLOCK = 512
BAILIAN_BLOCK = 16
_LENGTH_BLOCK = 512
_MOST_NAME = 1000
_MOST_SAID = 200
_MOST_AGENTS = 16
"""Most levels of sub-agents: recorded ones have one."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_COLUMNS = (
    "Timestamp",
    "Model",
    "Request tokens",
    "Response tokens",
    "Total tokens",
    "Log Type",
)
BURST_SESSION_COLUMNS = (BURST_COLUMNS[0], "Session ID", "Elapsed time", *BURST_COLUMNS[1:])
NO_HASHES = "requests without hash_ids, which share no prefix"


class ClaudeCodeReader(Reader):
    """Claude Code captures to sessions: as published, or as claude_code_blocks64 has them."""

    def sessions(self, _line: int, record: dict[str, Any], /) -> list[Session]:
        """The session of an object, and those of its sub-agents. Raises BadRecord."""
        if text_of(record, "hash_id_scope") != "local":
            raise BadRecord("'hash_id_scope' must be 'local'")
        name = f"claude-code:{_name_of(record, 'id')}"
        block_tokens = count_of(record, "block_size")
        if not block_tokens:
            raise BadRecord("'block_size' must be at least 1")
        found: list[Session] = []
        scope = _Scope(f"{self.stem}:{name}", block_tokens)
        own_clocks = _agents_have_own_clocks(record)
        self._collect(record, name, None, 0.0, scope, found, own_clocks)
        return found

    def _collect(
        self,
        record: dict[str, Any],
        name: str,
        parent: str | None,
        start_s: float,
        scope: _Scope,
        found: list[Session],
        own_clocks: bool,
        level: int = 0,
    ) -> None:
        if level > _MOST_AGENTS:
            raise BadRecord(f"sub-agents nested more than {_MOST_AGENTS} times")
        zero_s = 0.0 if own_clocks else start_s
        context = _BlockContext(scope, zero_s, self.left_out)
        agents: list[tuple[str, float, dict[str, Any]]] = []
        for number, request in enumerate(list_of(record, "requests")):
            if not isinstance(request, dict):
                raise BadRecord(f"request {number}: must be an object")
            with inside(f"request {number}"):
                if "requests" in request:  # of a session begun by this one
                    at_s = max(0.0, (seconds_of(request, "t") or 0.0) - zero_s)
                    agents.append((_name_of(request, "agent_id"), at_s, request))
                elif "agent_id" in request:
                    self.left_out["sub-agents without recorded requests"] += 1
                else:
                    context.take(request)
        if not context.events and parent is None:
            raise BadRecord("the session makes no request")
        if context.events:
            found.append(
                self.session(
                    name, context.events, start_s=start_s, model=context.model, parent=parent
                )
            )
        for agent, at_s, inner in agents:
            self._collect(
                inner, f"{name}/{agent}", name, start_s + at_s, scope, found, own_clocks, level + 1
            )


def _agents_have_own_clocks(record: dict[str, Any], level: int = 0) -> bool:
    """Whether the times of sub-agents count from their own starts. They do where any has a request
    before the time that it was started at; elsewhere all count from the session's start.
    """
    requests = record.get("requests")
    for request in requests if isinstance(requests, list) and level <= _MOST_AGENTS else ():
        inner = request.get("requests") if isinstance(request, dict) else None
        if not isinstance(inner, list):
            continue
        started = request.get("t")
        times = [one.get("t") for one in inner if isinstance(one, dict)]
        if is_number(started) and any(is_number(at) and at < started for at in times):
            return True
        if _agents_have_own_clocks(request, level + 1):
            return True
    return False


@dataclass
class _Row:
    """One request of a trace of lengths. `ids` None: the trace has none for it."""

    line: int
    tokens: int
    output_tokens: int
    ids: list[int] | None
    at_s: float | None = None
    delay_s: float | None = None


class LengthReader(Reader):
    """Rows of Mooncake or of one of its dialects to sessions. A row that names a session, or the
    row before it in a chat, is kept until the end of the file; such rows are one session then.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._given = setting.block_tokens
        self._fitting = self._misfits = 0
        self._says_whole_prompts = False
        self._block = 0
        self._chains: list[tuple[str, list[_Row]]] = []
        self._chain_of: dict[Any, int] = {}

    def mooncake(self, line: int, record: dict[str, Any], /) -> list[Session]:
        """A row of Mooncake: times in milliseconds, blocks of 512 tokens unless it says otherwise,
        and of aiperf's and dynamo's dialects: `session_id` and `delay`. Raises BadRecord, and
        TraceError where the block size is not the trace's.
        """
        block_tokens = self._block_tokens(record, MOONCAKE_BLOCK)
        known = (*_MOONCAKE_FIELDS, "session_id", "delay", "block_size")
        row = self._row(line, record, known, block_tokens, cut=True)
        row.at_s = milliseconds_of(record, "timestamp")
        row.delay_s = milliseconds_of(record, "delay")
        if record.get("session_id") is None:
            if row.at_s is None:
                raise BadRecord(
                    "a row needs 'timestamp', in milliseconds, or 'session_id' and 'delay'"
                )
            return [self._alone(row, block_tokens)]
        if row.ids is None:
            raise BadRecord(
                "a row of a session without hash_ids: what its prompts share is not known"
            )
        name = _name_of(record, "session_id")
        self._put(name, row, None if name not in self._chain_of else name)
        return []

    def bailian(self, line: int, record: dict[str, Any], /) -> list[Session]:
        """A row of Qwen-Bailian: times in seconds, blocks of 16 tokens, each row a whole prompt
        that follows the one of its `parent_chat_id`. Raises as `mooncake` does.
        """
        block_tokens = self._block_tokens(record, BAILIAN_BLOCK)
        known = (*_MOONCAKE_FIELDS, "chat_id", "parent_chat_id", "type", "turn", "block_size")
        row = self._row(line, record, known, block_tokens, cut=False)
        row.at_s = seconds_of(record, "timestamp")
        if row.at_s is None:
            raise BadRecord("a row needs 'timestamp', in seconds")
        chat, parent = record.get("chat_id"), record.get("parent_chat_id", -1)
        if not is_whole(chat) or not is_whole(parent):
            raise BadRecord("'chat_id' and 'parent_chat_id' must be whole numbers")
        if row.ids is None:
            return [self._alone(row, block_tokens)]
        self._says_whole_prompts = True
        self._put(chat, row, parent if parent != -1 else None)
        return []

    def kept(self) -> Iterator[tuple[int, Callable[[], Session]]]:
        for name, rows in self._chains:
            yield rows[0].line, partial(self._of_rows, name, rows, self._block)

    def _block_tokens(self, record: dict[str, Any], usual: int) -> int:
        own = count_of(record, "block_size") if record.get("block_size") is not None else None
        if own == 0:
            raise BadRecord("'block_size' must be at least 1")
        if own is not None and self._given not in (None, own):
            raise TraceError(
                f"{self.path}: its rows say 'block_size' = {own}. Leave --block-tokens out"
            )
        return own or self._given or usual

    def _row(
        self,
        line: int,
        record: dict[str, Any],
        known: tuple[str, ...],
        block_tokens: int,
        *,
        cut: bool,
    ) -> _Row:
        tokens = count_of(record, "input_length")
        ids: list[int] | None = None
        if not tokens:
            raise BadRecord("'input_length' must be at least 1")
        if record.get("hash_ids") is None:
            self.left_out[NO_HASHES] += 1
        else:
            ids = [whole(i, "a hash id") for i in list_of(record, "hash_ids")]
            tokens = self._fit(line, tokens, len(ids), block_tokens, cut=cut)
        for key, value in record.items():
            if value is not None and key not in known:
                self.left_out[f"{shown(key)} fields of rows"] += 1
        return _Row(line, tokens, count_of(record, "output_length"), ids)

    def _fit(self, line: int, tokens: int, ids: int, block_tokens: int, *, cut: bool) -> int:
        """The tokens that the ids stand for. Raises BadRecord where they do not fit the prompt or
        the rows before, and TraceError where more rows do not fit their prompts than do: then the
        blocks are of another size.
        """
        if block_tokens != (self._block or block_tokens):
            raise BadRecord(
                f"blocks of {block_tokens} tokens, and of {self._block} in the rows before"
            )
        if ids == -(-tokens // block_tokens):
            self._fitting += 1
            self._block = block_tokens
            return tokens
        if not cut and ids and ids == tokens // block_tokens:
            self._fitting += 1
            self._block = block_tokens
            self.left_out["tokens behind a prompt's last whole block"] += tokens % block_tokens
            return ids * block_tokens
        self._misfits += 1
        said = f"{ids} hash_ids for 'input_length' = {tokens} do not fit blocks of "
        said += f"{block_tokens} tokens"
        if self._misfits > self._fitting:
            lowest, highest = -(-tokens // max(1, ids)), -(-tokens // max(1, ids - 1)) - 1
            sizes = f" (here {lowest} to {highest})" if 1 < ids <= tokens else ""
            raise TraceError(
                f"{self.path}:{line}: {said}: say with --block-tokens how many tokens a block of "
                f"this trace has{sizes}"
            )
        raise BadRecord(said)

    def _put(self, key: Any, row: _Row, before: Any) -> None:
        """Keeps a row behind the one of `before`, if that is the last one of its session."""
        place = self._chain_of.pop(before, None) if before is not None else None
        if place is None:
            place = len(self._chains)
            self._chains.append((f"{self.stem}:{key}", []))
        self._chains[place][1].append(row)
        self._chain_of[key] = place

    def _alone(self, row: _Row, block_tokens: int) -> Session:
        name = f"{self.stem}:{row.line}"
        if row.ids is not None:
            return self._of_rows(name, [row], block_tokens)
        events = _only_lengths(name, row.tokens, row.output_tokens)
        return self.session(name, events, start_s=row.at_s or 0.0)

    def _of_rows(self, name: str, rows: list[_Row], block_tokens: int) -> Session:
        context = _BlockContext(_Scope(self.stem, block_tokens), 0.0, self.left_out)
        before: _Row | None = None
        for row in rows:
            ids = row.ids or []
            if (
                before is not None
                and not self._says_whole_prompts
                and (before.ids or [])[:1] != ids[:1]
            ):
                raise BadRecord(
                    "the hash_ids of a session's rows do not begin alike, so a row may be its "
                    "whole prompt or only what is new: write whole prompts"
                )
            gap_s = row.delay_s
            if gap_s is None and row.at_s is not None and before is not None:
                # how long the server took is not recorded
                gap_s = 0.0 if before.at_s is None else row.at_s - before.at_s
            call = Call(
                output_tokens=row.output_tokens,
                gap_s=0.0 if before is None else round(max(0.0, gap_s or 0.0), 6),
                arrival_s=None if row.at_s is None else max(0.0, row.at_s - (rows[0].at_s or 0.0)),
            )
            context.follow(ids, row.tokens, call)
            before = row
        return self.session(name, context.events, start_s=rows[0].at_s or 0.0)


_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class CsvReader(Reader):
    """Rows of arrival times and lengths to sessions of one call that share nothing."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._first: datetime.datetime | None = None
        self._last_s = 0.0

    def azure(self, line: int, row: dict[str, str], /) -> list[Session]:
        """A row of an Azure LLM inference trace. Raises BadRecord, and TraceError where the rows
        are not in the order of their times.
        """
        stamp, tokens, output = (row[column] for column in AZURE_COLUMNS)
        try:
            # Seven digits after the point are more than Python 3.10 reads.
            at = datetime.datetime.fromisoformat(stamp[:26])
            start_s = (at - (self._first or at)).total_seconds()
        except (ValueError, TypeError) as error:  # TypeError: with a time zone, and without
            raise BadRecord(f"no TIMESTAMP of an Azure trace: {str(error)[:_MOST_SAID]}") from error
        if not is_number(start_s, -MOST_SECONDS, MOST_SECONDS):
            raise BadRecord(f"{start_s:g} s after the first row")
        made = self._of_row(line, start_s, tokens, output)
        if start_s < self._last_s:
            raise TraceError(
                f"{self.path}:{line}: an Azure trace whose rows are not in the order of "
                "TIMESTAMP. Sort the rows below its header"
            )
        self._first, self._last_s = self._first or at, start_s
        return made

    def burst_gpt(self, line: int, row: dict[str, str], /) -> list[Session]:
        """A row of BurstGPT: times in seconds. Failed requests, which have no response tokens, are
        left out. Raises BadRecord.
        """
        start_s = _seconds(row, "Timestamp")
        if row["Response tokens"].strip() == "0":
            self.left_out["failed requests, which have no response tokens"] += 1
            return []
        latency_s = _seconds(row, "Elapsed time") if row.get("Elapsed time") else None
        if row.get("Session ID"):
            self.left_out["session ids: the trace does not say what a session's prompts share"] += 1
        tokens, output = row["Request tokens"], row["Response tokens"]
        return self._of_row(line, start_s, tokens, output, latency_s, row["Model"])

    def _of_row(
        self,
        line: int,
        start_s: float,
        tokens: str,
        output: str,
        latency_s: float | None = None,
        model: str = "",
    ) -> list[Session]:
        try:
            given, made = int(tokens), int(output)
        except ValueError as error:
            raise BadRecord(f"not a row of this trace: {str(error)[:_MOST_SAID]}") from error
        if not is_whole(given, 1, MOST_TOKENS) or not is_whole(made, 0, MOST_TOKENS):
            raise BadRecord(f"{shown(given)} input and {shown(made)} output tokens")
        name = f"{self.stem}:{line}"
        events = _only_lengths(name, given, made, latency_s)
        return [self.session(name, events, start_s=start_s, model=model[:_MOST_NAME])]


def _seconds(row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError as error:
        raise BadRecord(f"{column!r} must be seconds, not {shown(row[column])}") from error
    return seconds_of({column: value}, column) or 0.0


def _only_lengths(
    scope: str, tokens: int, output_tokens: int, latency_s: float | None = None
) -> tuple[Event, ...]:
    """A request of which only the lengths are known: its content is its own."""
    blocks = Blocks(scope, _LENGTH_BLOCK, ((0, -(-tokens // _LENGTH_BLOCK)),), tokens)
    call = Call(output_tokens=output_tokens, latency_s=latency_s, arrival_s=0.0)
    return Append(Message("user", blocks=blocks)), call


class _Scope:
    """Where ids are of one meaning: the blocks of one Claude Code session, or of a whole trace."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self._name = name
        self.block_tokens = block_tokens

    def check(self, blocks: int) -> None:
        """Raises BadRecord when a prompt of `blocks` blocks cannot be meant."""
        if blocks * self.block_tokens > MOST_TOKENS:
            raise BadRecord(f"a prompt of {blocks} blocks of {self.block_tokens} tokens")

    def message(self, runs: tuple[tuple[int, int], ...], cut: int = 0) -> Message:
        """The runs as a message; `cut` tokens of the last block are missing."""
        tokens = sum(n for _, n in runs) * self.block_tokens - cut
        return Message("input", blocks=Blocks(self._name, self.block_tokens, runs, tokens))


class _BlockContext:
    """Requests of block ids to events. `_ends[i]` = blocks up to the end of message i. `zero_s`:
    when the session began by the clock of its requests.
    """

    def __init__(self, scope: _Scope, zero_s: float, left_out: Counter[str]) -> None:
        self.events: list[Event] = []
        self.model = ""
        self._scope = scope
        self._zero_s = zero_s
        self._left_out = left_out
        self._messages: list[Message] = []
        self._ends: list[int] = []
        self._end_s: float | None = None
        self._ids: list[int] = []
        self._tokens = 0

    def take(self, request: dict[str, Any]) -> None:
        """One request of a Claude Code session. Raises BadRecord."""
        if request.get("type", "n") not in ("n", "s"):
            raise BadRecord(f"'type' = {shown(request['type'])} is no known kind of request")
        if "hash_ids" in request:
            self._take_ids(request)
            return
        keep = count_of(request, "keep")
        present = self._ends[-1] if self._ends else 0
        if keep > present:
            raise BadRecord(f"'keep' = {keep}, but the request before had {present} blocks")
        new = _new_runs(list_of(request, "new"))
        if not keep and not new:
            raise BadRecord("a request without a whole block")
        self._scope.check(keep + sum(count for _, count in new))
        self._put(keep, present, new)
        self._call(request)

    def _take_ids(self, request: dict[str, Any]) -> None:
        ids = [whole(i, "a hash id") for i in list_of(request, "hash_ids")]
        block, tokens = self._scope.block_tokens, count_of(request, "in")
        if len(ids) not in (tokens // block, -(-tokens // block)):
            raise BadRecord(
                f"{len(ids)} hash_ids for 'in' = {tokens} do not fit blocks of {block} tokens"
            )
        ids = ids[: tokens // block]
        if not ids:
            self._left_out["requests shorter than one block"] += 1
            return
        self._go_on(ids, len(ids) * block)
        self._call(request)

    def follow(self, ids: list[int], tokens: int, call: Call) -> None:
        """The next request of a session: `ids` are its whole prompt, of `tokens` tokens."""
        self._go_on(ids, tokens)
        self.events.append(call)

    def _go_on(self, ids: list[int], tokens: int) -> None:
        block, present = self._scope.block_tokens, len(self._ids)
        same = 0
        while same < min(present, len(ids)) and ids[same] == self._ids[same]:
            same += 1
        keep = min(same, self._tokens // block, tokens // block)  # a block that is cut is not kept
        self._scope.check(len(ids))
        goes_on = same == present and tokens >= self._tokens
        self._put(keep, present, _runs(ids[keep:]), len(ids) * block - tokens, filled=goes_on)
        self._ids, self._tokens = ids, tokens

    def _put(
        self,
        keep: int,
        present: int,
        new: tuple[tuple[int, int], ...],
        cut: int = 0,
        filled: bool = False,
    ) -> None:
        if keep < present:
            self._drop_to(keep, present, new, cut, filled)
        elif new:
            self._push(self._scope.message(new, cut))
            self.events.append(Append(self._messages[-1]))

    def _drop_to(
        self, keep: int, present: int, new: tuple[tuple[int, int], ...], cut: int, filled: bool
    ) -> None:
        whole_messages = bisect.bisect_right(self._ends, keep)
        parts: list[Span | Message] = [Span(0, whole_messages)] if whole_messages else []
        inside = keep - (self._ends[whole_messages - 1] if whole_messages else 0)
        head = self._messages[whole_messages].blocks if inside else None
        del self._messages[whole_messages:], self._ends[whole_messages:]
        if head is not None:
            parts.append(self._push(self._scope.message(head.head(inside).runs)))
        if new:
            parts.append(self._push(self._scope.message(new, cut)))
        # The last block alone changes when a client rewrites what stands at the prompt's end
        # (reminders, marks).
        why = "last block rewritten" if present - keep == 1 else "prefix dropped"
        if filled:
            why = FILLED
        self.events.append(Edit(tuple(parts), why))

    def _push(self, message: Message) -> Message:
        assert message.blocks is not None
        self._ends.append((self._ends[-1] if self._ends else 0) + len(message.blocks))
        self._messages.append(message)
        return message

    def _call(self, request: dict[str, Any]) -> None:
        at_s = seconds_of(request, "t")
        latency_s = seconds_of(request, "api_time")
        gap_s = seconds_of(request, "think_time")
        if gap_s is None:
            gap_s = 0.0 if at_s is None or self._end_s is None else at_s - self._end_s
        call = Call(
            output_tokens=count_of(request, "out"),
            gap_s=round(max(0.0, gap_s), 6),
            latency_s=latency_s,
            arrival_s=None if at_s is None else max(0.0, at_s - self._zero_s),
        )
        self.events.append(call)
        self.model = self.model or text_of(request, "model", "")
        self._end_s = None if at_s is None else at_s + (latency_s or 0.0)


def _name_of(record: dict[str, Any], key: str) -> str:
    """A text that a session's name is made of, one for each level of sub-agents."""
    name = text_of(record, key)
    if not is_text(name, _MOST_NAME):
        raise BadRecord(f"{key!r} must have at most {_MOST_NAME} characters, not {len(name)}")
    return name


def _new_runs(flat: list[Any]) -> tuple[tuple[int, int], ...]:
    numbers = [whole(n, "an entry of 'new'") for n in flat]
    if len(numbers) % 2 or not all(numbers[1::2]):
        raise BadRecord("'new' must be pairs of start and count")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _runs(ids: list[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for i in ids:
        if runs and i == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((i, 1))
    return tuple(runs)
