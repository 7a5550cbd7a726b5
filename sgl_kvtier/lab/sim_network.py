"""`kvtier sim network`: several servers that share pages over one network, and how many it takes
until the network is the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import asdict
from typing import Any

from sgl_kvtier.arguments import above_nought, positive, seed
from sgl_kvtier.console import check_target, envelope, print_table, progress, write_json, write_text
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.sim.experiment import DRAWS, Machine
from sgl_kvtier.lab.sim.fleet import Chats, Fleet, routed, run_fleet
from sgl_kvtier.lab.sim.pictures import network_svg, network_table
from sgl_kvtier.lab.sim.policies import AHEAD, policy

SCHEMA = "kvtier.sim.network/1"
_MACHINE = Machine(device_bytes=8 << 30, host_bytes=16 << 30, page_tokens=256)
_CONFIG = dataclasses.replace(AHEAD, prefetch="off", eviction="lru")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this action."""
    parser.add_argument(
        "--servers",
        default="1,4,16,64",
        metavar="N,N",
        help="numbers of servers (default %(default)s)",
    )
    parser.add_argument(
        "--moved",
        default="25,50,100",
        metavar="P,P",
        help="per cent of turns that go to another server than the turn before (default "
        "%(default)s)",
    )
    parser.add_argument(
        "--network-gbps",
        type=above_nought,
        default=100.0,
        metavar="G",
        help="of all servers together, in Gbit/s (default 100)",
    )
    parser.add_argument(
        "--policy",
        default="restore,recompute",
        metavar="A,B",
        help="as in `kvtier sim list` (default %(default)s)",
    )
    parser.add_argument("--seed", type=seed, default=1, help="of the load (default 1)")
    parser.add_argument(
        "--draws",
        type=positive,
        default=DRAWS,
        metavar="N",
        help="repeat with N seeds (default %(default)s)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )
    parser.add_argument("--svg", metavar="FILE", help="write the plot")


def run(args: argparse.Namespace) -> int:
    """Runs every policy on every fleet, in every draw. Raises KVTierError."""
    names = list(dict.fromkeys(args.policy.split(",")))
    for name in names:
        policy(name)
    for target in filter(None, (args.json, args.svg)):
        check_target(target)
    fleets = [
        Fleet(servers, moved / 100, args.network_gbps, args.seed + draw)
        for draw in range(args.draws)
        for servers in _numbers("--servers", args.servers, 1, 1024)
        for moved in _numbers("--moved", args.moved, 0, 100)
    ]
    outcomes: list[dict[str, Any]] = []
    total = sum(len(routed(fleet, _MACHINE.page_tokens).requests) for fleet in fleets)
    with progress("simulating", total * len(names), "requests") as bar:
        for fleet in fleets:
            for name in names:
                bar.describe(f"{name}, {fleet.servers} servers, {fleet.moved:.0%} moved")
                one = run_fleet(fleet, _MACHINE, name, _CONFIG, lambda _: bar.advance())
                outcomes.append(one)
    setup = {"machine": asdict(_MACHINE), "load": asdict(Chats()), "policy": asdict(_CONFIG)}
    if args.svg:
        write_text(network_svg(outcomes, args.network_gbps), args.svg)
    if args.json:
        found = {"setup": setup, "fleets": outcomes}
        write_json(envelope(SCHEMA, ["kvtier", *sys.argv[1:]], found), args.json)
    if args.json != "-":
        title = f"Servers on one network of {args.network_gbps:g} Gbit/s, {args.draws} draws"
        print_table(network_table(outcomes, title))
    return 0


def _numbers(option: str, text: str, least: int, most: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [least - 1]
    if any(not least <= number <= most for number in numbers):
        raise ConfigError(
            f"{option} = {text}: give numbers from {least} to {most} with commas between"
        )
    return numbers
