"""`kvtier sim batches`: several stored prefixes restored at once, by rule, in virtual time. Batches
are those of `kvtier compare restore --at-once`, steps take what a paced device takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, cast

from sgl_kvtier.arguments import count, not_negative, positive, seed
from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    print_table,
    progress,
    write_json,
)
from sgl_kvtier.lab.experiment.arms import check_names
from sgl_kvtier.lab.experiment.batches.arms import BATCH_ARMS
from sgl_kvtier.lab.experiment.batches.draw import DECODERS, MOST_DECODED, BatchOptions, lengths_of
from sgl_kvtier.lab.experiment.scenarios.restore_arguments import lengths, sizes
from sgl_kvtier.lab.paced.launching import CHUNK_TOKENS
from sgl_kvtier.lab.profile import Profile, read
from sgl_kvtier.lab.rules import IN_TURN
from sgl_kvtier.lab.sim.costs import Batch, MeasuredCost
from sgl_kvtier.lab.sim.hardware import Hardware, ModelShape, Route, planner_profile
from sgl_kvtier.lab.sim.links import Pipe
from sgl_kvtier.lab.sim.requests import SimRequest, SimResult
from sgl_kvtier.lab.sim.run import engine_shape, simulate
from sgl_kvtier.lab.sim.served import Served
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.messages import Consulted
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.types import Link, Span, Tier

SCHEMA = "kvtier.sim.batches/1"
RULES = "cake,cacheflow,kvtier,by-arrival"

_OURS = "kvtier"
_STORAGE, _PCIE = "storage", "pcie"
_LATENCY_S = 1e-4
_BATCH_AT_S = 1.0
"""When a batch is asked for: those that decode beside have begun."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this action."""
    parser.add_argument(
        "--device", default="h100-llama8b", metavar="PROFILE", help="a profile of paced devices"
    )
    parser.add_argument(
        "--at-once", type=sizes, default=[2, 4, 8], metavar="N,N", help="default 2,4,8"
    )
    parser.add_argument(
        "--lengths",
        type=lengths,
        default=[8192, 16384, 24576, 32768],
        metavar="N,N",
        help="prefixes in tokens, k = 1024, that batches are mixed of (default 8k,16k,24k,32k)",
    )
    parser.add_argument(
        "--rules",
        default=RULES,
        metavar="A,B",
        help=f"of {', '.join(_known())} (default %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=positive, default=6, help="batches of each size (default 6)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of the batches (default 0)")
    parser.add_argument(
        "--apart-ms",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="between two of a batch (default 0); a server reads one prompt at a time",
    )
    parser.add_argument(
        "--decoders", type=count, default=DECODERS, help="requests that decode beside (default 4)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Simulates every batch with every rule. Raises KVTierError."""
    rules = args.rules.split(",")
    check_names(rules, _known())
    if args.json:
        check_target(args.json)
    options = BatchOptions(
        args.device,
        64,
        args.at_once,
        args.lengths,
        rounds=args.rounds,
        seed=args.seed,
        decoders=args.decoders,
    )
    bench = Bench(read(args.device), options, args.apart_ms / 1e3)
    batches: list[dict[str, Any]] = []
    total = len(rules) * len(options.at_once) * options.rounds
    with progress("simulating", total, "batches") as bar:
        for at_once in options.at_once:
            for number in range(1, options.rounds + 1):
                for rule in rules:
                    batches.append(bench.batch(rule, at_once, number))
                    bar.advance()
    if args.json:
        setup = {
            "device": args.device,
            "apart_ms": args.apart_ms,
            "link_gbps": bench.link_bytes_per_s * 8e-9,
        }
        found = {"setup": setup, "batches": batches}
        write_json(envelope(SCHEMA, ["kvtier", *sys.argv[1:]], found), args.json)
    if args.json != "-":
        print_table(batches_table(batches, args.device))
    return 0


def batches_table(batches: Sequence[dict[str, Any]], device: str) -> Table:
    """One row per size and rule: means over rounds, the median makespan, and time to first token
    over ours."""
    rows = []
    for at_once, rule in dict.fromkeys((one["at_once"], one["rule"]) for one in batches):
        mine, ours = (
            [one for one in batches if (one["at_once"], one["rule"]) == (at_once, name)]
            for name in (rule, _OURS)
        )
        each = [a["ttft_s"] / b["ttft_s"] for a, b in zip(mine, ours, strict=False)]
        rows.append(
            {
                "at_once": at_once,
                "rule": rule,
                "ttft": 1e3 * fmean(one["ttft_s"] for one in mine),
                "over": _over(mine, ours),
                "range": f"{min(each):.2f} to {max(each):.2f}" if each else None,
                "makespan": median(one["makespan_s"] for one in mine),
                "computed": 100 * fmean(one["computed_share"] for one in mine),
            }
        )
    columns = (
        Column("at_once", "at once"),
        Column("rule", "rule"),
        Column("ttft", "mean TTFT", "ms", 0),
        Column("over", f"over {_OURS}", decimals=2),
        Column("range", "by round"),
        Column("makespan", "makespan", "s", 2),
        Column("computed", "computed", "%", 0),
    )
    return Table(f"Several restorations at once, simulated: {device}", columns, rows)


def _over(mine: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> float | None:
    if not ours:
        return None
    return fmean(one["ttft_s"] for one in mine) / fmean(one["ttft_s"] for one in ours)


def _known() -> list[str]:
    """Rules that are arms of a server too, but for layers, which are not simulated."""
    return [name for name in IN_TURN if name in BATCH_ARMS and name != "layers"]


class Bench:
    """A server at the pace of a profile, and one link that loads the mix of `options` as fast as
    the device computes it. The requests of a batch come `apart_s` after one another.
    """

    def __init__(self, profile: Profile, options: BatchOptions, apart_s: float = 0.0) -> None:
        self._apart_s = apart_s
        self._cost = MeasuredCost(profile)
        self._options = options
        self._model = ModelShape(
            profile.name, profile.layers, 1, 1, 1, 0.0, 0.0, profile.kv_bytes_per_token
        )
        self._spec = ServerSpec(
            page_tokens=options.page, step_tokens=CHUNK_TOKENS, write_down=False, consulted=True
        )
        computing_s = sum(self._alone_s(length) for length in options.lengths)
        nbytes = sum(options.lengths) * profile.kv_bytes_per_token
        self.link_bytes_per_s = nbytes / computing_s / options.ratios[0]
        pcie = profile.to_device_gbytes_per_s * 1e9
        self._hardware = Hardware(
            profile.name,
            0,
            {_STORAGE: Pipe(self.link_bytes_per_s), _PCIE: Pipe(pcie)},
            {
                Link.STORAGE_TO_DEVICE: Route((_STORAGE, _PCIE), _LATENCY_S, 4),
                Link.STORAGE_TO_HOST: Route((_STORAGE,), _LATENCY_S, 4),
                Link.HOST_TO_DEVICE: Route((_PCIE,), _LATENCY_S),
            },
        )

    def _alone_s(self, length: int) -> float:
        """Seconds of computing a prompt of this prefix, chunk by chunk."""
        whole = length + self._options.page
        starts = range(0, whole, CHUNK_TOKENS)
        spans = [Span(start, min(start + CHUNK_TOKENS, whole)) for start in starts]
        return sum(self._cost.seconds(Batch((span,))) for span in spans)

    def batch(self, rule: str, at_once: int, number: int) -> dict[str, Any]:
        """One batch by one rule, in numbers. Seconds count from its arrival."""
        prefixes = lengths_of(self._options, at_once, number)
        result = self._serve(rule, prefixes)
        restored = [one for one in result.requests if not one.rid.startswith("beside")]
        ends = [cast(float, one.first_token_s) - _BATCH_AT_S for one in restored]
        ttfts = [one.ttft_s for one in restored]
        prompt = sum(one.prompt_tokens for one in restored)
        return {
            "rule": rule,
            "at_once": at_once,
            "round": number,
            "lengths": prefixes,
            "ttft_s": fmean(ttfts),
            "makespan_s": max(ends),
            "computed_share": sum(one.computed_tokens for one in restored) / prompt,
        }

    def _serve(self, rule: str, prefixes: Sequence[int]) -> SimResult:
        page, model, spec = self._options.page, self._model, self._spec
        requests = [
            SimRequest(f"beside {number}", 0.0, 2 * page, MOST_DECODED)
            for number in range(self._options.decoders)
        ] + [
            SimRequest(
                f"r{place:03d}",
                _BATCH_AT_S + place * self._apart_s,
                length + page,
                cached=((Span(0, length // page), Tier.STORAGE),),
            )
            for place, length in enumerate(prefixes)
        ]
        config = PolicyConfig(
            restore="auto", prefetch="off", max_stall_ms=BATCH_ARMS[rule].stall_ms
        )
        shape = engine_shape(spec, model)
        profile = planner_profile(self._hardware, self._cost, shape)
        planner = make_planner(config, shape, profile, IN_TURN[rule]())
        served = Served(cast(Consulted, planner), shape, spec, config.min_restore_tokens)
        return simulate(served, self._hardware, model, requests, server=spec, cost=self._cost)
