"""`kvtier explain`: where a server's prompt tokens came from and why it computed the others; or
where prompts diverge.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import above_nought, positive, url
from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    format_bytes,
    format_duration,
    format_share,
    format_value,
    print_statement,
    print_table,
    progress,
    write_json,
)
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.outside import read_bounded
from sgl_kvtier.runtime.tools import prompt_diff, prompt_log, schemas
from sgl_kvtier.runtime.tools.miss_advice import Advice, advise
from sgl_kvtier.runtime.tools.miss_reasons import DECLINED, UNFULFILLED, Reason, said_of
from sgl_kvtier.runtime.tools.server_figures import (
    Figures,
    Server,
    figures_of,
    read,
    read_requests,
    server_of,
)

_MOST_PROMPT_BYTES = 64 << 20
"""Most bytes of a file with a prompt, or of a line in a log."""
_MOST_PAIRS, _MOST_NAME, _MOST_SESSIONS = 40, 24, 8
"""Most rows in a log's table, characters of a session's name there, and sessions in a message."""
_PAGE = 64
_PROOFS = {
    "proving": "not complete: all pages that are loaded are compared, which takes time",
    "ended": "ended, since a page differed: nothing is restored, and the log says which page",
}
_HOW_TO_LOG = (
    "--log-requests --log-requests-level 3 --log-requests-format json --log-requests-target FOLDER"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier explain`."""
    parser.add_argument(
        "url",
        nargs="?",
        type=url,
        metavar="URL",
        help="address of a running server that was started with --enable-metrics",
    )
    parser.add_argument(
        "--seconds",
        type=above_nought,
        metavar="N",
        help="look at the next N seconds (default: all since the server was started)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="the server's --api-key; for --requests its --admin-api-key, if it has one",
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help="instead: where prompts part. Two files, each with token ids (a JSON list), text, or "
        "a chat request (JSON with messages and tools); or a log with a request (JSON) on each "
        "line, and then, if one session is meant, its id",
    )
    parser.add_argument(
        "--model-path",
        metavar="FOLDER",
        help="folder of the model whose tokenizer and chat template turn text into tokens",
    )
    parser.add_argument(
        "--page-size",
        type=positive,
        default=_PAGE,
        metavar="TOKENS",
        help=f"the server's --page-size, for --prompts (default: {_PAGE})",
    )
    parser.add_argument(
        "--requests",
        action="store_true",
        help="instead: what is known of each request that waits or runs now, for a developer",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result to FILE; - for stdout")


def run(args: argparse.Namespace) -> int:
    """Prints tables and one sentence. Raises KVTierError."""
    if (args.url is None) == (args.prompts is None):
        raise KVTierError("name a server's URL, or two files or a log with --prompts")
    if args.json is not None:
        check_target(args.json)
    if args.prompts is not None:
        if len(args.prompts) > 2:
            raise KVTierError("--prompts compares two files, or the lines of one")
        log, *other = args.prompts
        two_files = other and Path(other[0]).exists()
        return _explain_prompts(args) if two_files else _explain_log(args, log, *other)
    return _explain_requests(args) if args.requests else _explain_server(args)


def _explain_requests(args: argparse.Namespace) -> int:
    found = read_requests(args.url, args.api_key)
    if args.json is not None:
        _write(args, schemas.EXPLAIN_REQUESTS.name, {"url": args.url, **found})
        if args.json == "-":
            return 0
    rows = [
        {"rid": request["rid"] if part == "runtime" else "", "part": part, "known": text}
        for request in found["requests"]
        for part, text in {"runtime": request["runtime"], **request["planner"]}.items()
    ]
    columns = (Column("rid", "request"), Column("part", "known to"), Column("known", "as"))
    notes = [f"{found['omitted']} more requests are not shown"] if found["omitted"] else []
    print_table(Table(f"Requests of {args.url}", columns, rows, notes=notes))
    if not rows:
        print_statement("No request waits or runs.", is_bad=False)
    return 0


def _explain_server(args: argparse.Namespace) -> int:
    before = None
    now = read(args.url, args.api_key)
    seconds = now.least("kvtier:open_seconds_total") or 0.0
    if args.seconds is not None:
        before, began = now, time.monotonic()
        with progress("looking", None):
            time.sleep(args.seconds)
        now = read(args.url, args.api_key)
        seconds = time.monotonic() - began
    server, figures = server_of(now), figures_of(now, before, seconds)
    advice = advise(server, figures)
    if args.json is not None:
        result = {"url": args.url, **document(server, figures, advice)}
        _write(args, schemas.EXPLAIN.name, result)
        if args.json == "-":
            return 0
    for table in _tables(args.url, server, figures):
        print_table(table)
        print()
    print_statement(advice.text, is_bad=advice.cause == "corrupt")
    return 0


def document(server: Server, figures: Figures, advice: Advice) -> dict[str, Any]:
    """The result as JSON, without the address."""
    flat = asdict(figures)
    return {
        "seconds": figures.seconds,
        "server": asdict(server),
        "prompts": {
            **{
                name: flat[name]
                for name in ("requests", "prompt", "device", "host", "storage", "remote")
            },
            "computed": figures.computed,
            "hit_fraction": figures.hit_fraction,
        },
        "restorations": {
            "started": figures.started,
            "ended": figures.ended,
            "loaded_tokens": figures.restored_loaded,
            "computed_tokens": figures.restored_computed,
            "proof": figures.proof,
        },
        "declined": _explained(DECLINED, figures.declined, "requests"),
        "unfulfilled": _explained(UNFULFILLED, figures.unfulfilled, "tokens"),
        "store": {
            **flat["store"],
            "writes_waiting": figures.writes_waiting,
            "written_bytes_per_prompt_token": figures.written_bytes_per_prompt_token,
            "written_bytes_per_day": figures.written_bytes_per_day,
        },
        "remote": flat["remote_store"],
        "advice": advice._asdict(),
    }


def _explained(
    table: dict[str, Reason], counts: Mapping[str, int], noun: str
) -> list[dict[str, Any]]:
    """One row per reason, most frequent first."""
    often = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    return [
        {"reason": reason, noun: count, **said_of(table, reason)._asdict()}
        for reason, count in often
    ]


def _tables(address: str, server: Server, figures: Figures) -> list[Table]:
    sources = {
        "device": figures.device,
        "host": figures.host,
        "storage": figures.storage,
        "of these remote": figures.remote,
        "computed": figures.computed,
    }
    if figures.remote_store is None:
        del sources["of these remote"]
    rows = [
        {
            "source": name,
            "tokens": tokens,
            "share": tokens / figures.prompt if figures.prompt else None,
        }
        for name, tokens in sources.items()
    ]
    tables = [
        Table(
            f"Prompt tokens of {address}, {figures.requests} requests"
            + (f" in {format_duration(figures.seconds)}" if figures.seconds else ""),
            (
                Column("source", "came from"),
                Column("tokens", "tokens", decimals=0),
                Column("share", "share", format=format_share),
            ),
            rows,
        )
    ]
    if server.has_kvtier:
        pair = (Column("what", "what"), Column("value", "value"))
        found = [{"what": what, "value": value} for what, value in _of_storage(figures).items()]
        tables.append(Table("Storage (first rank of each replica)", pair, found))
    for title, noun, explained in (
        (
            "Restore candidates that were rejected",
            "requests",
            _explained(DECLINED, figures.declined, "requests"),
        ),
        (
            "Stored tokens that SGLang did not use",
            "tokens",
            _explained(UNFULFILLED, figures.unfulfilled, "tokens"),
        ),
    ):
        if explained:
            columns = (
                Column("reason", "reason"),
                Column(noun, noun, decimals=0),
                Column("meaning", "meaning"),
                Column("helps", "what helps"),
            )
            tables.append(Table(title, columns, explained))
    return tables


def _of_storage(figures: Figures) -> dict[str, str]:
    """Metrics as text; some are omitted if they are zero."""
    store, remote = figures.store, figures.remote_store

    def rate(value: float | None) -> str:
        return "not measured" if value is None else f"{format_value(value / 1e6)} MB/s"

    def split(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{name} {format_value(count)}" for name, count in counts.items()) or "0"

    shown = {
        "restorations, by mode": split(figures.started),
        "restorations, by end": split(figures.ended),
        "restored tokens": f"{split(figures.restored_loaded)} loaded, "
        f"{format_value(figures.restored_computed)} computed",
        "read": f"{format_value(store.pages_read)} pages"
        + (f" at {rate(store.read_bytes_per_s)}" if store.pages_read else ""),
        "loading is faster than computing from": rate(store.break_even_bytes_per_s),
        "written": f"{format_value(store.pages_written)} pages, "
        f"{format_value(store.bytes_written / 1e9)} GB on the disk",
        "wear of the disk": _wear(figures),
        "written, but there already": f"{format_value(store.pages_kept)} pages",
        "evicted": f"{format_value(store.pages_evicted)} pages",
        "stored now": f"{format_value(store.pages)} pages, {format_bytes(store.bytes_on_disk)} of "
        f"{format_bytes(store.capacity_bytes)}",
    }
    trouble = {
        "waiting to be written": f"{format_value(figures.writes_waiting)} prefixes",
        "not admitted": f"{format_value(store.pages_not_admitted)} pages",
        "refused": f"{format_value(store.pages_refused)} pages",
        "damaged": f"{format_value(store.pages_corrupt)} pages",
        "late": f"{format_value(store.reads_late)} pages",
        "not read": f"{format_value(store.reads_failed)} pages",
    }
    shown |= {what: value for what, value in trouble.items() if not value.startswith("0 ")}
    if figures.proof in _PROOFS:
        shown["proof of restored pages"] = _PROOFS[figures.proof]
    if remote is not None:
        state = "" if remote.up else " (calls do not go through now)"
        shown["remote store"] = (
            f"{format_value(remote.pages_read)} pages read, {format_value(remote.pages_sent)} "
            f"sent, {format_value(remote.pages_missed)} gone, {format_value(remote.pages_corrupt)} "
            f"damaged, {format_value(remote.reads_late + remote.reads_failed)} late or not "
            f"read{state}"
        )
    return shown


def _wear(figures: Figures) -> str:
    by_token, by_day = figures.written_bytes_per_prompt_token, figures.written_bytes_per_day
    said = [] if by_token is None else [f"{by_token / 1e3:,.2f} GB per million prompt tokens"]
    said += [] if by_day is None else [f"{by_day / 1e9:,.1f} GB a day at this rate"]
    return ", ".join(said) or "not known"


def _explain_prompts(args: argparse.Namespace) -> int:
    tokenizer = None if args.model_path is None else _tokenizer(args.model_path)
    a, b = (_prompt(name, tokenizer) for name in args.prompts)
    found = prompt_diff.part(a, b, args.page_size)
    if args.json is not None:
        result = {
            "prompts": list(args.prompts),
            "page_tokens": args.page_size,
            **asdict(found),
            "excerpts": list(found.excerpts),
            "hit_fraction": found.hit_fraction,
        }
        _write(args, schemas.EXPLAIN_PROMPTS.name, result)
        if args.json == "-":
            return 0
    rows = {
        "part at": _place(found),
        args.prompts[0]: repr(found.excerpts[0]),
        args.prompts[1]: repr(found.excerpts[1]),
    }
    if found.hit_tokens is not None:
        rows["page"] = (
            "none" if found.page is None else f"{found.page} (of {args.page_size} tokens)"
        )
        rows["can be hit"] = (
            f"{format_value(found.hit_tokens)} of {format_value(found.longer_tokens)} tokens, "
            f"{format_share(found.hit_fraction)}"
        )
    columns = (Column("what", "what"), Column("value", "value"))
    notes = [] if found.hit_tokens is not None else ["--model-path tells tokens and pages"]
    table = [{"what": what, "value": value} for what, value in rows.items()]
    print_table(Table("Two prompts", columns, table, notes=notes))
    print()
    print_statement(f"{found.kind}: {found.text}.", is_bad=False)
    return 0


def _explain_log(args: argparse.Namespace, name: str, session: str | None = None) -> int:
    """Explains the whole log, or one session of it."""
    tokenizer = None if args.model_path is None else _tokenizer(args.model_path)
    try:
        pairs = _pairs(name, session, tokenizer, args.page_size)
    except KVTierError as error:
        if session is None:
            raise
        raise KVTierError(f"{session}: no such file, nor a session of a log. {error}") from error
    said = prompt_log.summary(pairs)
    if args.json is not None:
        result = {
            "log": name,
            "page_tokens": args.page_size,
            "pairs": [_pair(one) for one in pairs],
            "causes": [cause._asdict() for cause in prompt_log.causes(pairs)],
            "summary": said,
        }
        _write(args, schemas.EXPLAIN_LOG.name, result)
        if args.json == "-":
            return 0
    apart = sorted((one for one in pairs if one.is_apart), key=lambda one: -(one.lost_tokens or 0))
    rows = [
        {**_pair(one), "place": _place(one.parting), "session": (one.session or "")[:_MOST_NAME]}
        for one in apart[:_MOST_PAIRS]
    ]
    columns = [
        Column("line", "line"),
        Column("earlier_line", "after line"),
        Column("session", "session"),
        Column("place", "part at"),
        Column("kind", "what differs"),
        Column("lost_tokens", "lost", unit="tokens", decimals=0),
        Column("lost_fraction", "of the hit", format=format_share),
    ]
    known = {name for row in rows for name, value in row.items() if value not in (None, "")}
    columns = [column for column in columns if column.name in known]
    notes = []
    if tokenizer is None:
        notes.append("--model-path tells tokens, their text, and what was lost")
    if len(apart) > _MOST_PAIRS:
        notes.append(f"{len(apart) - _MOST_PAIRS} more part: --json has all")
    if rows:
        print_table(Table(f"Prompts of {name} that part", columns, rows, notes=notes))
        print()
    print_statement(said, is_bad=False)
    return 0


def _pairs(
    name: str, session: str | None, tokenizer: Any, page_tokens: int
) -> list[prompt_log.Pair]:
    """The pairs of a log, or of one session. Raises KVTierError that names the line, or the
    sessions in the log.
    """
    others: dict[str, None] = {}

    def of_session(requests: Iterator[prompt_log.Logged]) -> Iterator[prompt_log.Logged]:
        is_there = False
        for one in requests:
            if session in (None, one.session):
                is_there = True
                yield one
            elif one.session is not None:
                others[one.session] = None
        if not is_there and session is not None:
            some = ", ".join(known[:_MOST_NAME] for known in list(others)[:_MOST_SESSIONS])
            raise KVTierError(f"{name} has {f'sessions {some}' if some else 'no sessions'}")

    try:
        with Path(name).open("rb") as file:
            lines = iter(lambda: file.readline(_MOST_PROMPT_BYTES + 1), b"")
            logged = (
                one._replace(prompt=_tokenized(f"{name}, line {one.line}", one.prompt, tokenizer))
                for one in of_session(prompt_log.read(lines, _MOST_PROMPT_BYTES))
            )
            return list(prompt_log.pairs(logged, page_tokens))
    except OSError as error:
        raise KVTierError(
            f"{name}: {error.strerror}. Name a file: the server keeps no prompts, but writes a log "
            f"of them with {_HOW_TO_LOG}"
        ) from error
    except ValueError as error:
        raise KVTierError(f"{name}, {error}") from error


def _pair(pair: prompt_log.Pair) -> dict[str, Any]:
    """A pair as JSON."""
    found = pair.parting
    return {
        "session": pair.session,
        "earlier_line": pair.earlier_line,
        "line": pair.line,
        **{name: getattr(found, name) for name in ("kind", "text", "token", "character")},
        **{name: getattr(found, name) for name in ("part", "message", "page")},
        "excerpts": list(found.excerpts),
        "hit_tokens": pair.hit_tokens,
        "lost_tokens": pair.lost_tokens,
        "lost_fraction": pair.lost_fraction,
    }


def _place(found: prompt_diff.Parting) -> str:
    said = [
        found.part,
        None if found.character is None else f"character {format_value(found.character)}",
        None if found.token is None else f"token {format_value(found.token)}",
    ]
    return ", ".join(one for one in said if one) or "nowhere"


def _prompt(name: str, tokenizer: Any) -> prompt_diff.Prompt:
    """Reads a prompt from a file. Raises KVTierError."""
    try:
        found = prompt_diff.parse(read_bounded(Path(name), _MOST_PROMPT_BYTES))
    except OSError as error:
        raise KVTierError(f"{name}: {error.strerror}. Name a file with a prompt") from error
    except ValueError as error:
        raise KVTierError(f"{name}: {error}") from error
    return _tokenized(name, found, tokenizer)


def _tokenized(name: str, found: prompt_diff.Prompt, tokenizer: Any) -> prompt_diff.Prompt:
    """The prompt with tokens and text, if there is a tokenizer. Raises KVTierError."""
    if tokenizer is None:
        return found
    if found.request is not None:
        return replace(found, tokens=tuple(_rendered(name, tokenizer, found.request)))
    if found.tokens is not None:
        text = tokenizer.decode(list(found.tokens))
        return replace(found, parts=(prompt_diff.Part("text", text),))
    return replace(found, tokens=tuple(tokenizer.encode(found.parts[0].text)))


def _rendered(name: str, tokenizer: Any, request: Mapping[str, Any]) -> list[int]:
    """The tokens of a chat request, by the model's own template. Contents that are lists of texts
    are joined, as SGLang does for most templates.
    """
    messages = [
        {**message, "content": _plain_content(message.get("content"))}
        for message in request["messages"]
    ]
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=request.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **(request.get("chat_template_kwargs") or {}),
        )
    except Exception as error:  # a template may raise anything
        raise KVTierError(f"{name}: the chat template does not take it: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _plain_content(content: Any) -> Any:
    if isinstance(content, list) and all(
        isinstance(item, dict) and item.get("type") == "text" for item in content
    ):
        return " ".join(str(item.get("text", "")) for item in content)
    return "" if content is None else content


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise KVTierError(f"{folder} is no folder. Name the folder of a model (--model-path)")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise KVTierError(f"{folder} has no tokenizer that can be read: {error}") from error


def _write(args: argparse.Namespace, schema: str, result: dict[str, Any]) -> None:
    write_json(envelope(schema, ["kvtier", *sys.argv[1:]], result), args.json)
