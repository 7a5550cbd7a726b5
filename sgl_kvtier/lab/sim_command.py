"""`kvtier sim`: run a workload under several policies, compute a paper's tables, replay a decision
log.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import above_nought, not_negative, positive, seed, size
from sgl_kvtier.config import PolicyConfig, load_config
from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    print_table,
    progress,
    write_json,
    write_text,
)
from sgl_kvtier.errors import ConfigError, KVTierError
from sgl_kvtier.lab.pages.stats import percentile
from sgl_kvtier.lab.sim.arrivals import Pace
from sgl_kvtier.lab.sim.cells import (
    Agreement,
    Cell,
    agreement,
    agreement_by_reading,
    as_rows,
    cells_table,
)
from sgl_kvtier.lab.sim.experiment import (
    DRAWS,
    Load,
    Machine,
    draws_table,
    outcome,
    over_draws,
    policies_table,
    run_policy,
)
from sgl_kvtier.lab.sim.hardware import known_hardware, known_models, load_hardware
from sgl_kvtier.lab.sim.policies import AHEAD, POLICIES, policy, settled
from sgl_kvtier.lab.sim.replay import replay, whole_lines
from sgl_kvtier.lab.workload.catalogue import FOLDER_HELP
from sgl_kvtier.lab.workload.source import BLOCK_TOKENS, GENERATED

SCHEMA_RUN = "kvtier.sim.run/1"
SCHEMA_PAPER = "kvtier.sim.paper/1"

PAPERS = ("cake", "cacheflow", "tierkv")

_QUICK_POLICIES = "stock,cake,cacheflow,kvtier,oracle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `run`, `paper`, `replay-log` and `list` with their options."""
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="{run,paper,replay-log,list}"
    )

    running = actions.add_parser("run", help="a workload on a simulated machine, policy by policy")
    running.add_argument(
        "--trace",
        required=True,
        metavar="SOURCE",
        help="a trace file, its short name, or generated:PRESET",
    )
    running.add_argument(
        "--policy",
        default=_QUICK_POLICIES,
        metavar="A,B",
        help=f"of {','.join(POLICIES)} (default %(default)s)",
    )
    running.add_argument(
        "--config",
        metavar="FILE",
        help="kvtier.json; its policy section steers kvtier, and other planners but for what their "
        "names fix; auto is what it is on one NVIDIA GPU (default: prefetch on, eviction next-use)",
    )
    running.add_argument(
        "--sessions",
        type=positive,
        metavar="N",
        help="read N sessions (default: all; 20 generated)",
    )
    running.add_argument(
        "--seed", type=seed, default=0, help="of session starts and generated sessions (default 0)"
    )
    running.add_argument(
        "--draws",
        type=positive,
        metavar="N",
        help="repeat with N seeds, from --seed on, and print medians and ranges "
        f"(default {DRAWS} with --start-every or a generated trace, else 1, as with --log)",
    )
    running.add_argument(
        "--start-every",
        type=not_negative,
        default=0.0,
        metavar="S",
        help="mean seconds between session starts, drawn at random (default: as recorded)",
    )
    running.add_argument(
        "--max-prompt-tokens",
        type=positive,
        metavar="N",
        help="cut sessions before a longer prompt",
    )
    running.add_argument("--traces-dir", dest="traces", type=Path, metavar="DIR", help=FOLDER_HELP)
    running.add_argument("--block-tokens", type=positive, metavar="N", help=BLOCK_TOKENS)
    running.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )
    running.add_argument(
        "--log",
        metavar="FILE",
        help="write the decision log of the one policy given; see replay-log",
    )
    machine = running.add_argument_group("machine")
    machine.add_argument(
        "--hardware", default="H100", choices=known_hardware(), help="default %(default)s"
    )
    machine.add_argument(
        "--model", default="Llama-3.1-8B", choices=known_models(), help="default %(default)s"
    )
    machine.add_argument(
        "--device-size",
        type=size,
        metavar="SIZE",
        help="device memory for KV (default: what 90%% of it less the weights leave)",
    )
    machine.add_argument(
        "--host-size", type=size, metavar="SIZE", help="host memory for KV (default: no limit)"
    )
    machine.add_argument(
        "--storage-gbps",
        type=above_nought,
        metavar="G",
        help="storage read bandwidth in Gbit/s (default: the profile's)",
    )
    machine.add_argument(
        "--step-tokens",
        type=positive,
        default=2048,
        metavar="N",
        help="token budget of a step (default %(default)s)",
    )

    paper = actions.add_parser("paper", help="a paper's tables: printed, ours, deviation")
    paper.add_argument("paper", choices=PAPERS)
    paper.add_argument(
        "--table",
        action="append",
        metavar="NAME",
        help="only this table or figure; may be given again",
    )
    paper.add_argument(
        "--json", metavar="FILE", help="write the cells as JSON; - for standard output"
    )

    replaying = actions.add_parser(
        "replay-log", help="feed a decision log to the planner and demand identical plans"
    )
    replaying.add_argument("log", metavar="FILE", type=Path)
    actions.add_parser("list", help="policies, machines, models and papers there are")


def run(args: argparse.Namespace) -> int:
    """Carries out one `kvtier sim` command; the exit status. Raises KVTierError."""
    actions = {"run": _run, "paper": _paper, "replay-log": _replay, "list": _list}
    return actions[args.action](args)


def _run(args: argparse.Namespace) -> int:
    names = list(dict.fromkeys(args.policy.split(",")))
    for name in names:
        policy(name)
    if args.draws is None:
        drawn_load = args.start_every > 0 or args.trace.startswith(GENERATED)
        args.draws = DRAWS if drawn_load and not args.log else 1
    if args.log and (len(names) > 1 or args.draws > 1):
        raise ConfigError(
            "--log writes the decisions of one policy in one draw: give one with --policy, and no "
            "--draws"
        )
    for target in filter(None, (args.json, args.log)):
        check_target(target)
    config = settled(load_config(args.config).policy) if args.config else AHEAD
    machine, load = _machine(args), _load(args)
    lines: list[str] = []
    drawn = _drawn(args, machine, load, config, lines)
    outcomes = [outcome for _, some in drawn for outcome in some]
    description, first = drawn[0]
    over = over_draws(outcomes)
    steps = load_hardware(machine.hardware).measured.get(machine.model, "assumed")
    setup = {
        "workload": description,
        "machine": asdict(machine),
        "steps": steps,
        "load": asdict(load),
        "policy": asdict(config),
    }
    if args.log:
        write_text("\n".join(lines) + "\n", args.log)
    if args.json:
        found = {"setup": setup, "policies": outcomes, "draws": over}
        write_json(envelope(SCHEMA_RUN, _command(), found), args.json)
    if args.json != "-":
        said = f"{description.rstrip('.')}: {first[0]['requests']} requests"
        title = f"{said} on {machine.hardware}, steps {steps}"
        print_table(draws_table(over, title) if args.draws > 1 else policies_table(first, title))
    return 0


def _drawn(
    args: argparse.Namespace, machine: Machine, load: Load, config: PolicyConfig, log: list[str]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Per draw: the workload in words, and each policy's outcome."""
    names = list(dict.fromkeys(args.policy.split(",")))
    loads = [replace(load, seed=load.seed + place) for place in range(args.draws)]
    found = []
    prepared = [one.requests(machine.page_tokens) for one in loads]
    total = sum(len(requests) for _, requests in prepared) * len(names)
    with progress("simulating", total, "requests") as bar:
        for one, (description, requests) in zip(loads, prepared, strict=True):
            outcomes = []
            for name in names:
                bar.describe(f"{name}, seed {one.seed}" if args.draws > 1 else name)
                result = run_policy(
                    name,
                    machine,
                    requests,
                    config,
                    on_finish=lambda _: bar.advance(),
                    log=log.append if args.log else None,
                )
                outcomes.append({**outcome(name, result), "seed": one.seed})
            found.append((description, outcomes))
    return found


def _machine(args: argparse.Namespace) -> Machine:
    return Machine(
        hardware=args.hardware,
        model=args.model,
        device_bytes=args.device_size,
        host_bytes=args.host_size,
        step_tokens=args.step_tokens,
        storage_gbps=args.storage_gbps,
    )


def _load(args: argparse.Namespace) -> Load:
    sessions = args.sessions
    if sessions is None and args.trace.startswith(GENERATED):
        sessions = 20
    return Load(
        args.trace,
        sessions,
        seed=args.seed,
        pace=Pace(args.start_every),
        most_prompt_tokens=args.max_prompt_tokens,
        traces=args.traces,
        block_tokens=args.block_tokens,
    )


def _paper(args: argparse.Namespace) -> int:
    if args.json:
        check_target(args.json)
    # Imported on demand: one paper does not wait for the others.
    paper = importlib.import_module(f"sgl_kvtier.lab.papers.{args.paper}")
    tables, fitted = paper.TABLES, paper.FITTED
    names = args.table or list(tables)
    unknown = [name for name in names if name not in tables]
    if unknown:
        raise ConfigError(
            f"{args.paper} has no table {unknown[0]!r} here. There are: {', '.join(tables)}"
        )
    cells: list[Cell] = []
    with progress(f"{args.paper}", len(names), "tables") as bar:
        for name in names:
            bar.describe(name)
            cells += tables[name]()
            bar.advance()
    by_reading = agreement_by_reading(cells)
    if args.json:
        results = {
            "paper": args.paper,
            "cells": as_rows(cells),
            "agreement": agreement(cells)._asdict(),
            "agreement_by_reading": {name: one._asdict() for name, one in by_reading.items()},
            "null_model": {name: one._asdict() for name, one in paper.NULL_MODEL.items()},
            "fitted": asdict(fitted),
        }
        write_json(envelope(SCHEMA_PAPER, _command(), results), args.json)
    if args.json != "-":
        print_table(cells_table(cells, f"{args.paper}: paper and ours"))
        for reading, measured in by_reading.items():
            # A reading of one cell alone is a remark on that cell.
            if measured.predicted > 1 or len(by_reading) == 1:
                print(f"{reading}: " * bool(reading) + _in_words(measured))
        null = paper.NULL_MODEL["all"]
        print(f"Null model (ratios alone, no planner), all tables: {_in_words(null)}")
        print(f"Fitted: {fitted.parameters} quantities to {fitted.numbers} printed numbers.")
    return 0


def _in_words(measured: Agreement) -> str:
    return (
        f"{measured.predicted} predicted cells, median absolute deviation "
        f"{100 * (measured.median_abs_deviation or 0):.1f} %, "
        f"{100 * (measured.within_15_percent or 0):.0f} % within 15 %."
    )


def _replay(args: argparse.Namespace) -> int:
    try:
        with args.log.open(encoding="utf-8") as log:
            replayed = replay(whole_lines(log))
    except OSError as error:
        raise KVTierError(f"cannot read {args.log}: {error.strerror}") from error
    if replayed.difference is not None:
        print(f"{args.log}: {replayed.difference}", file=sys.stderr)
        return 1
    print(
        f"{replayed.steps} plans with {replayed.commands} commands are identical ({replayed.facts} "
        "facts)"
    )
    if replayed.step_s:
        middle, slow = (1e6 * (percentile(replayed.step_s, share) or 0.0) for share in (50, 99))
        print(
            f"A planner step took {middle:.0f} us of CPU time in the median, {slow:.0f} us in p99."
        )
    if replayed.failures:
        print(f"The planner failed {replayed.failures} times, as it did when the log was written.")
    if replayed.questions:
        print(f"It was asked {replayed.questions} times between steps, and gave the same answers.")
    return 0


def _list(args: argparse.Namespace) -> int:
    del args
    rows = [{"name": name, "about": one.about} for name, one in POLICIES.items()]
    print_table(
        Table("Policies", [Column("name", "policy"), Column("about", "what it does")], rows)
    )
    print()
    print(f"Machines: {', '.join(known_hardware())}")
    print(f"Models: {', '.join(known_models())}")
    measured = {name: load_hardware(name).measured for name in known_hardware()}
    pairs = [f"{model} on {name}" for name, models in measured.items() for model in models]
    print(f"Measured times of steps: {', '.join(pairs)}; others are assumed or refused.")
    print(f"Papers: {', '.join(PAPERS)}")
    return 0


def _command() -> list[str]:
    return ["kvtier", *sys.argv[1:]]
