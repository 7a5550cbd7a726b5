"""Why a server computed prompt tokens that a cache could have had: finds in its metrics the cause
that explains most of them, and says in one sentence what to do.

When a computed page was offered to the store, it was written (no cache had it), or it was there
already (nobody had read it), or it was not stored at all. These counts, and SGLang's own reasons
for not using stored pages, tell the causes apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from sgl_kvtier.console import format_bytes, format_share, format_value
from sgl_kvtier.runtime.tools.miss_reasons import DECLINED, UNFULFILLED, said_of
from sgl_kvtier.runtime.tools.server_figures import Figures, Server

_WORTH: Final = 0.1
"""A cause of less than this fraction of the prompt tokens is not mentioned."""
COMPARE: Final = "kvtier explain --prompts A B"


class Advice(NamedTuple):
    """`cause` is one of a fixed list (docs/manual/operate.md), `text` is one sentence."""

    cause: str
    text: str


class _Suspect(NamedTuple):
    """A cause, and the number of computed tokens that it explains."""

    tokens: int
    advice: Advice


def advise(server: Server, figures: Figures) -> Advice:
    """The advice for these metrics."""
    if not server.has_kvtier:
        return Advice(
            "no kvtier",
            "The server publishes no figures of a kvtier store: start it with "
            "--hicache-storage-backend kvtier.",
        )
    if not figures.prompt:
        return Advice("no prompts", "No request ended in this time.")
    if figures.store.pages_corrupt:
        return Advice(
            "corrupt",
            f"{_count(figures.store.pages_corrupt, 'page')} failed the check on reading and were "
            "computed instead: the disk returns damaged data, so stop the server and run kvtier "
            "fsck.",
        )
    page = server.page_tokens
    if page is None:
        return Advice(
            "no arguments",
            "The server does not tell its page size, without which causes cannot be told apart: "
            "give its key with --api-key.",
        )
    if figures.prompt < page * figures.requests:
        return Advice(
            "short prompts",
            f"Prompts have {_mean(figures.prompt, figures)} tokens on average, and only whole "
            f"pages of {page} tokens are stored and found: a smaller --page-size lets shorter "
            "prompts be found.",
        )
    worst = max(_suspects(page, server, figures), key=lambda suspect: suspect.tokens)
    if worst.tokens >= _WORTH * figures.prompt:
        return worst.advice
    return _of_hits(figures)


def _suspects(page: int, server: Server, figures: Figures) -> Iterator[_Suspect]:
    """Possible causes of computed tokens, by pages of `page` tokens. Of two that explain equally
    many, the first one counts.
    """
    store = figures.store
    # The last page of a prompt is incomplete, or has the token that is always computed. Tokens that
    # a restoration computes are no misses.
    missed = figures.computed - figures.restored_computed
    computed = max(0, missed - page * figures.requests)
    for reason, tokens in figures.unfulfilled.items():
        said = said_of(UNFULFILLED, reason)
        if said.helps:
            computed = max(0, computed - tokens)  # SGLang reports why: nothing to infer
            yield _Suspect(
                tokens,
                Advice(
                    reason.replace("_", " "),
                    f"SGLang did not use {_count(tokens, 'stored token')}: {said.meaning}; what "
                    f"helps: {said.helps}.",
                ),
            )
    if store.pages_refused:
        yield _Suspect(
            min(computed, store.pages_refused * page),
            Advice(
                "refused",
                f"{_count(store.pages_refused, 'page')} were not stored, as the store has no room "
                "or the disk fails: the server's log says once which, and what to do.",
            ),
        )
    # If first offers are not admitted, those are the new pages, and the written ones were computed
    # before.
    first, second = store.pages_written, 0
    if store.pages_not_admitted:
        first, second = store.pages_not_admitted, store.pages_written
        yield _Suspect(
            min(computed, second * page),
            Advice(
                "second-hit",
                f"{_count(second, 'page')} were computed twice, since store.admission = second-hit "
                "stores a page only when it is offered for the second time: all stores it the "
                "first time, and writes more.",
            ),
        )
    # Restored pages are in storage and are written again.
    restored = figures.restored_computed + sum(figures.restored_loaded.values())
    known = min(computed, max(0, store.pages_kept * page - restored))
    yield _Suspect(known, _of_known(server, figures, known))
    new = max(0, min(computed, first * page))
    yield _Suspect(new, _of_new(figures, new))
    unstored = max(0, computed - (first + second) * page - known)
    yield _Suspect(unstored, _of_unstored(server, figures, unstored))


def _of_known(server: Server, figures: Figures, tokens: int) -> Advice:
    """Pages were stored already when they were written: nobody read them in time."""
    asked = server.prefetch_threshold_tokens
    if figures.computed < asked * figures.requests:
        return Advice(
            "prefetch threshold",
            f"{_count(tokens, 'token')} were computed although storage had them, since SGLang asks "
            f"storage only for prompts that miss at least {asked} tokens: lower prefetch_threshold "
            "in kvtier.json.",
        )
    return Advice(
        "too early",
        f"{_count(tokens, 'token')} were computed although storage had them when they were written "
        "again: their prompt came back before it was stored, or storage was not read in time.",
    )


def _of_new(figures: Figures, tokens: int) -> Advice:
    """Pages were not in storage: evicted, of another fingerprint, or of new prompts."""
    store = figures.store
    if store.pages_evicted:
        return Advice(
            "evicted",
            f"{_count(tokens, 'computed token')} were not in the store, which evicted "
            f"{_count(store.pages_evicted, 'page')} to make room: raise store.capacity_bytes (the "
            f"first rank's part of it is now {format_bytes(store.capacity_bytes)}), or send fewer "
            "sessions to this server.",
        )
    cold = not store.pages_at_opening and store.pages_before < store.pages_written
    cold = cold and not figures.storage
    if cold and (figures.requests < 2 or figures.cached):
        return Advice(
            "empty store",
            "The store had no page of this model fingerprint when this server opened it: if it "
            "should have, other weights, flags or versions made another fingerprint, and kvtier "
            "stat FOLDER says in what they differ.",
        )
    return Advice(
        "new prompts",
        f"{_count(tokens, 'computed token')} were new to every cache: if you expected hits, a "
        "timestamp, an id, a template that renders old turns anew, another cache salt or LoRA "
        f"adapter, or a reordered tool list parts the prompts early, and {COMPARE} shows where.",
    )


def _of_unstored(server: Server, figures: Figures, tokens: int) -> Advice:
    """Pages were not written at all."""
    if server.hicache_write_policy == "write_through_selective":
        return Advice(
            "write_through_selective",
            f"{_count(tokens, 'computed token')} were not stored, since --hicache-write-policy "
            "write_through_selective stores a prefix only when it is used a second time: "
            "write_through stores it the first time.",
        )
    if server.hicache_write_policy == "write_back":
        return Advice(
            "write_back",
            f"{_count(tokens, 'computed token')} are not stored yet, since --hicache-write-policy "
            "write_back stores a page only when it leaves device memory: write_through stores it "
            "at once.",
        )
    if figures.writes_waiting:
        return Advice(
            "write pending",
            f"{_count(tokens, 'computed token')} are not in the store yet, where "
            f"{_count(figures.writes_waiting, 'prefix', 'prefixes')} still wait to be written: "
            "where this goes on, the disk is too slow for what is computed.",
        )
    return Advice(
        "not stored",
        f"{_count(tokens, 'computed token')} were not stored: they left device memory before host "
        "memory had room for a copy, or the request was aborted; a larger --hicache-ratio helps "
        "against the first.",
    )


def _of_hits(figures: Figures) -> Advice:
    """Hardly any token was computed that a cache could have had."""
    hit = format_share(figures.hit_fraction)
    levers = {
        reason: requests
        for reason, requests in figures.declined.items()
        if said_of(DECLINED, reason).helps
    }
    store = figures.store
    read, even = store.read_bytes_per_s, store.break_even_bytes_per_s
    if levers:
        reason = max(levers, key=lambda name: levers[name])
        said = said_of(DECLINED, reason)
        return Advice(
            "rejected",
            f"{hit} of the prompt tokens came from caches, but kvtier rejected "
            f"{_count(levers[reason], 'restore candidate')} as {reason!r}, and SGLang loaded or "
            f"computed as without kvtier: {said.meaning}; what helps: "
            f"{said.helps}.",
        )
    if read and even and read < even and figures.storage:
        return Advice(
            "slow storage",
            f"{hit} of the prompt tokens came from caches, but storage was read at "
            f"{format_bytes(read)}/s, and from {format_bytes(even)}/s on loading is faster than "
            "computing on this device: a faster disk helps, or policy.restore, which does both.",
        )
    return Advice(
        "hits",
        f"{hit} of the prompt tokens came from caches, and what was computed no cache could have "
        "had.",
    )


def _count(number: int, noun: str, many: str = "") -> str:
    return f"{format_value(number)} {noun if number == 1 else many or noun + 's'}"


def _mean(tokens: int, figures: Figures) -> str:
    return format_value(round(tokens / max(1, figures.requests)))
