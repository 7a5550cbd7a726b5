"""`kvtier profile`: the learned costs of prefill and links, and what they mean for restoring
prefixes.

A server learns while it serves, and keeps the learned costs beside the store. With --measure a
running server on this machine is sent prompts to learn from first.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    format_bytes,
    print_table,
    progress,
    write_json,
)
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.outside import is_whole, shown
from sgl_kvtier.policy.learned.cost import PrefillCost
from sgl_kvtier.runtime.records import cost_profile
from sgl_kvtier.runtime.records.cost_profile import NAME, PERIOD_S, Profile
from sgl_kvtier.runtime.tools.profile_run import LearningRun
from sgl_kvtier.types import Link

SCHEMA = "kvtier.profile/1"
_LENGTHS = (2048, 4096, 8192, 16384)
_Number = TypeVar("_Number", int, float)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the store's folder and options."""
    parser.add_argument("store", metavar="STORE", type=Path, help="folder that store.path names")
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default=_LENGTHS,
        metavar="N,N",
        help="prefix lengths to predict, in tokens; 4k = 4096 (default 2k,4k,8k,16k)",
    )
    parser.add_argument(
        "--measure",
        metavar="URL",
        help="first send a running, idle server on this store prompts to learn from; its caches "
        "are emptied",
    )
    parser.add_argument("--admin-api-key", metavar="KEY", help="of that server, where it has one")
    parser.add_argument(
        "--repeats",
        type=int,
        choices=range(1, 21),
        default=2,
        metavar="N",
        help="prompts of each length to measure with (1 to 20, default 2)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Prints a table per identity. Raises KVTierError when no server has learned anything there."""
    if args.json:
        check_target(args.json)
    if not args.store.is_dir():
        raise KVTierError(f"no store at {args.store}: give the folder that store.path names")
    if args.measure:
        _measure(args)
    found = {
        path.parent.name: cost_profile.read(path) for path in sorted(args.store.glob(f"*/{NAME}"))
    }
    profiles = {name: profile for name, profile in found.items() if profile is not None}
    if not profiles:
        damaged = f" ({len(found)} files cannot be read)" if found else ""
        raise KVTierError(
            f"nothing was learned in {args.store}{damaged}: start a server on it with "
            "policy.restore other than off (on an accelerator or with several ranks also other "
            "than auto), send a few requests of more than one chunk, flush its caches and send "
            "some of them again; --measure URL does that"
        )
    rows = [described(name, profile, args.lengths) for name, profile in profiles.items()]
    if args.json:
        write_json(
            envelope(
                SCHEMA, ["kvtier", *sys.argv[1:]], {"path": str(args.store), "profiles": rows}
            ),
            args.json,
        )
    if args.json != "-":
        for row in rows:
            _print(row)
    return 0


def _measure(args: argparse.Namespace) -> None:
    """Prompts, then a wait until the server has written what it learned. Raises KVTierError."""
    with progress("measuring", 2.0 * args.repeats * len(args.lengths), "prompts") as shown:
        run = LearningRun(
            args.measure,
            args.admin_api_key,
            lambda note: shown.advance(1, note),
            seed=time.time_ns(),
        )
        shown.describe("computing")
        answered = run.run(args.lengths, args.repeats)
        if not any(one.cached for one in answered):
            raise KVTierError(
                "no prompt came back from storage: were its pages stored (kvtier stat), and is "
                "policy.restore other than off (and than auto, on an accelerator or with several "
                "ranks)?"
            )
        shown.describe("waiting until the server has written it")
        time.sleep(PERIOD_S)
        before = _written(args.store)
        end = time.monotonic() + 3 * PERIOD_S
        run.one_more(min(args.lengths))
        while _written(args.store) == before:
            if time.monotonic() > end:
                raise KVTierError(
                    f"the server at {args.measure} wrote nothing into {args.store}: is that its "
                    "store, is policy.restore other than off there (and than auto, on an "
                    "accelerator or with several ranks), and is its disk not slowed down on "
                    "purpose?"
                )
            time.sleep(0.2)


def _written(store: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in store.glob(f"*/{NAME}")}


def described(name: str, profile: Profile, lengths: tuple[int, ...]) -> dict[str, Any]:
    """One profile, with predictions for prefixes of these lengths in storage and in host memory."""
    cost = PrefillCost(**profile.prefill)
    return {
        "name": name,
        "conditions": profile.conditions,
        "prefill": profile.prefill,
        "links_bytes_per_s": profile.links,
        "restore": profile.restore,
        "chunks": profile.chunks,
        "transfers": profile.transfers,
        "written_s": profile.written,
        "predictions": [
            predicted(cost, profile, link, tokens)
            for link in (Link.STORAGE_TO_DEVICE, Link.REMOTE_TO_DEVICE, Link.HOST_TO_DEVICE)
            if link.value in profile.links
            for tokens in lengths
        ],
    }


def predicted(cost: PrefillCost, profile: Profile, link: Link, tokens: int) -> dict[str, Any]:
    """Seconds to compute a prefix, to load it, and to do both from its ends on an idle server."""
    chunk = int(profile.conditions["chunk_tokens"])
    per_token_s = (
        profile.conditions["page_bytes"]
        / profile.conditions["page_tokens"]
        / profile.links[link.value]
    )
    compute_s, load_s = cost.range_seconds(0, tokens, chunk), tokens * per_token_s
    page = int(profile.conditions["page_tokens"])

    def seconds(computed: int) -> float:
        return max(cost.range_seconds(0, computed, chunk), (tokens - computed) * per_token_s)

    meet = min(range(0, tokens + 1, page), key=seconds)
    best_s = min(compute_s, load_s)
    return {
        "link": link.value,
        "tokens": tokens,
        "compute_s": compute_s,
        "load_s": load_s,
        "both_s": seconds(meet),
        "computed_tokens": meet,
        "speedup_vs_best_single": best_s / seconds(meet) if seconds(meet) > 0 else None,
    }


def _print(row: dict[str, Any]) -> None:
    conditions = row["conditions"]
    rates = ", ".join(
        f"{link} {format_bytes(int(rate))}/s" for link, rate in row["links_bytes_per_s"].items()
    )
    prefill = row["prefill"]
    columns = [
        Column("link", "From"),
        Column("tokens", "Prefix", "tokens", decimals=0),
        Column("compute_s", "Compute", "s", 3),
        Column("load_s", "Load", "s", 3),
        Column("both_s", "Both", "s", 3),
        Column("computed_tokens", "Of it computed", "tokens", decimals=0),
        Column("speedup_vs_best_single", "Faster than the better one", "factor", 2),
    ]
    notes = [
        f"Learned from {row['chunks']} chunks and {sum(row['transfers'].values())} transfers on "
        f"{conditions['device']}.",
        f"A chunk: {1e3 * prefill['fixed_s']:.2f} ms, {1e6 * prefill['per_token_s']:.2f} us per "
        f"token, and {1e9 * prefill['per_token_position_s']:.3f} ns per token and token before it.",
        f"Links: {rates or 'none measured yet'}.",
        "Predicted for an idle server by the fitted curves, not measured.",
    ]
    print_table(Table(row["name"], columns, row["predictions"], notes))


def _lengths(text: str) -> tuple[int, ...]:
    try:
        found = tuple(
            int(part[:-1]) * 1024 if part[-1:] in "kK" and part else int(part)
            for part in text.split(",")
        )
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: whole numbers with commas between, such as 2k,4k"
        ) from None
    if not all(is_whole(tokens, 1) for tokens in found):
        raise argparse.ArgumentTypeError(f"{shown(text)}: each must be at least 1")
    return found
