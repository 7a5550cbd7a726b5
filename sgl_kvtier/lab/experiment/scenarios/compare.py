"""`kvtier compare`: stock HiCache and kvtier side by side, as a table, JSON and one HTML page. With
several values of --concurrency or --rate it is repeated at each: what throughput costs in time to
first token. With --ablation the configurations are the mechanisms of kvtier, one after the other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import not_negative, positive
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.ablation import (
    ABLATION_ARMS,
    MEASURED_ARMS,
    choose_best,
    load_result,
    variants,
)
from sgl_kvtier.lab.experiment.argtypes import (
    RUN,
    SERVER,
    Options,
    Shape,
    add_load_arguments,
    add_options,
    add_session_arguments,
    deadline_of,
    each_once,
    load_options,
    load_shown,
    model_of,
    refuse_other,
    replay_options,
    server_shown,
    setup_of,
    shape_of,
    thresholds,
    words,
)
from sgl_kvtier.lab.experiment.arms import (
    ARMS,
    BASELINE,
    DEFAULT_ARMS,
    ORACLE,
    Setup,
    check_arms,
    check_names,
    oracle,
)
from sgl_kvtier.lab.experiment.comparison import (
    Cell,
    Comparison,
    device_of,
    failed,
    over_cells,
    paced_notes,
)
from sgl_kvtier.lab.experiment.frame import check, work_folder
from sgl_kvtier.lab.experiment.harness import (
    AIPERF,
    HARNESSES,
    ROUTE,
    AiperfReplaying,
    OtherClient,
    agreement,
    aiperf_command,
)
from sgl_kvtier.lab.experiment.load import (
    Load,
    LoadOptions,
    choose_encoder,
    load,
    undisturbed_tokens,
)
from sgl_kvtier.lab.experiment.machine import made_with
from sgl_kvtier.lab.experiment.measures import (
    Reference,
    arm_figures,
    complete_rows,
    ratios,
    reference_outputs,
    sample_rows,
    sustained,
    within_bound,
)
from sgl_kvtier.lab.experiment.rounds import Plan, Replaying, RoundLog, same_place
from sgl_kvtier.lab.experiment.sglang_client import ChatReplaying, SGLangReplaying
from sgl_kvtier.lab.experiment.timeline import timelines, watch_first
from sgl_kvtier.lab.outside import smollm2
from sgl_kvtier.lab.outside.openai import ROUTES, ChatClient
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.paced.launching import Paced, is_paced, parse
from sgl_kvtier.lab.pages.ablation import ABLATION, SAME
from sgl_kvtier.lab.pages.compare.page import compare_page
from sgl_kvtier.lab.pages.compare.result import SCHEMA
from sgl_kvtier.lab.pages.compare.sentence import sentence
from sgl_kvtier.lab.pages.compare.tables import main_tables
from sgl_kvtier.lab.pages.kinds import SWEEP
from sgl_kvtier.lab.workload.encoder import PromptTokens, output_tokens
from sgl_kvtier.lab.workload.session import Context
from sgl_kvtier.launch import detect_device, host_of
from sgl_kvtier.outside import is_number, is_whole

_QUICK_ARMS = ("recompute", "hicache-file", "kvtier")
"""A paced device does without recompute: its answers are known, and a server takes 20 s to start."""
# One core computes about 1,800 prompt tokens a second of lab-mha: these loads keep the promised
# times on two cores.
_CPU = LoadOptions(turns=8, most_output_tokens=16)
_QUICK = LoadOptions(sessions=6, turns=4, most_output_tokens=12)
# A core computes some 200 prompt tokens a second of real weights with 135 million parameters.
_SMOLLM2 = LoadOptions(
    sessions=2, turns=3, divisor=1, most_prompt_tokens=4096, most_output_tokens=12
)
_GPU = LoadOptions(turns=40, divisor=1)
# Nothing is computed there, so sessions have their full length; what came before they were entered
# is one cold prompt each.
_PACED = LoadOptions(
    sessions=12, turns=6, divisor=1, most_output_tokens=16, least_prompt_tokens=36_000, begin=0.8
)
_PACED_QUICK = LoadOptions(sessions=5, turns=4, divisor=1, most_output_tokens=16, begin=0.6)
_QUICK_PAUSE_S = 2.0
"""The recorded gaps of the SWE-bench sessions are those of short shell commands, 0.2 s in the
median. In so short a load sessions would find their pages in memory, and nothing would be restored.
"""
_PACED_ROUNDS = 4
"""At least four, or no winner is named."""
_PACED_DILATION = 2.0
_DEFAULT_DEVICE = "paced:h100-llama8b"
"""Where there is no card and nothing is asked for that only computing servers have."""
# Three to six agents worked at a time when the default trace was recorded.
REPLAY = ReplayOptions(concurrency=4, gap_cap_s=2.0)

_BEHIND = (
    "All tables: kvtier report FILE, of what --json FILE wrote. Plots: the page of --html PAGE."
)

_KNOWN = "Answers follow from the tokens alone, so recompute is measured in the first round alone."
"""Of a paced device."""

_MOVED_HERE = "bytes and disk_bytes are those moved here. The modelled machine moves"

_RETURNING = (
    "Sessions return: their first prompts were served and stored before each round, then device and host were emptied. "
    "Their first turns are not measured."
)

STANDING = (
    "Every round starts cold: device and host pools flushed, storage emptied. The operating system's page cache is not.",
    "The configuration recompute has no host pool; the others have the same one.",
    "Without compared_with, equal_tokens_fraction of recompute compares its later rounds with its first: what repeating alone "
    "changes.",
    "bytes: what kvtier's store counts; with another storage backend the tokens that the server counts to and from storage, "
    "times its bytes per token. disk_bytes: block-device traffic of the server's processes as the kernel counts it; reads "
    "served from the page cache are not in it.",
)


BOUND_MS = 2000.0
"""Goodput counts requests whose first token came within it, where the load rises."""

SUSTAINED_MS = (1000.0, 2000.0)
"""Bounds on the 95th percentile of the TTFT, at which the load that an arm sustains is named."""

_concurrencies = each_once(
    "whole numbers of at least 1, each once, as 1,2,4", int, lambda value: is_whole(value, 1)
)
_rates = each_once(
    "numbers above 0, each once, as 0.1,0.2", float, lambda value: is_number(value, 0) and value > 0
)
_OF_ARM = ("requests", "errors", "equal_tokens_fraction", "pace")
"""Figures over all loads; times of different loads have nothing in common."""


@dataclass(frozen=True)
class CompareOptions(Options):
    """The command's options."""

    arms: str | None = None
    device_tokens: int | None = None
    host_ratio: float = 1.5
    servers: str = "auto"
    returning: bool = False
    ablation: bool = False
    concurrencies: Sequence[int] | None = None
    rates: Sequence[float] | None = None
    harness: str = "own"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_options(
        parser,
        RUN,
        "quick rounds json html log minutes",
        quick={"help": "a small load and fewer configurations: about 4 minutes"},
        rounds={"help": "rounds, each with every configuration (default %(default)s)"},
        json={"help": f"{RUN['json']['help']}; FOLDER/: there, named by the device and the time"},
        html={"help": f"{RUN['html']['help']}; FOLDER/: as --json"},
    )
    parser.add_argument(
        "--arms",
        metavar="A,B",
        help=f"configurations to compare, of {', '.join((*ARMS, ORACLE))}; {ORACLE}: device memory for everything "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--ablation",
        action="store_true",
        help="what each mechanism is worth: SGLang with the best of its flags, which are tried first, then kvtier's "
        f"mechanisms one after the other; --arms: of {', '.join(ABLATION_ARMS)}. Outputs are as long as recorded",
    )
    servers = parser.add_argument_group("servers")
    add_options(servers, SERVER, dilation={"default": None})
    servers.add_argument(
        "--device-tokens",
        type=positive,
        help="tokens in the device pool (default: %(default)s of all contexts, and at least the longest request)",
    )
    servers.add_argument(
        "--host-ratio",
        type=not_negative,
        default=1.5,
        help="host pool as a multiple of it (default %(default)s)",
    )
    servers.add_argument(
        "--servers",
        choices=("auto", "together", "fresh"),
        default="auto",
        help="all up at once and flushed between rounds, or a fresh one per configuration and round (default %(default)s)",
    )
    add_load_arguments(parser)
    replay = parser.add_argument_group("replay")
    how_many = replay.add_mutually_exclusive_group()
    # No default: argparse does not take an option for given where it has its default's value.
    how_many.add_argument(
        "--concurrency",
        dest="concurrencies",
        type=_concurrencies,
        metavar="N[,N]",
        help="sessions at a time: the next begins when one ends (default %(default)s). "
        "Several: a comparison at each, of as many sessions at least",
    )
    how_many.add_argument(
        "--rate",
        dest="rates",
        type=_rates,
        metavar="R[,R]",
        help="open loop instead: R sessions arrive a second on average, at random times that follow from the seed. "
        "Several: a comparison at each",
    )
    add_session_arguments(replay, REPLAY)
    replay.add_argument(
        "--harness",
        choices=HARNESSES,
        default="own",
        help=f"the client that sends the load. aiperf: NVIDIA's, {AIPERF} (installed once, 1.2 GB), by /v1/completions; sglang: "
        "SGLang's, by /v1/chat/completions, without pauses and with the server's answers in the next prompt. With one load our "
        "own client sends the same before, and a table says how far both agree (default %(default)s)",
    )
    replay.add_argument(
        "--returning",
        action="store_true",
        help="sessions come back to emptied memory: before a round each session's first prompt is served and stored, and "
        "device and host are emptied, with --servers fresh by a restart of the server; measured from the second on "
        "(with --rate: when they come back)",
    )


def defaults(given: argparse.Namespace) -> dict[str, object]:
    """The defaults that help shows: they follow from the options that are given. Raises BenchError."""
    args = choose_device(CompareOptions.of(given))
    emulated = is_paced(args.device)
    return {
        **server_shown(args),
        **load_shown(load_defaults(args, str(args.device))),
        "arms": ", ".join(chosen_arms(replace(args, arms=None))),
        "rounds": _rounds(args, str(args.device)),
        "dilation": args.dilation,
        "device_tokens": "a third" if emulated else "a fifth",
        "concurrencies": "all" if emulated else REPLAY.concurrency,
        "pause": f"{_QUICK_PAUSE_S:g}; --gap-scale 1: as recorded"
        if emulated and args.quick
        else "as recorded",
    }


def run(given: argparse.Namespace) -> int:
    """Compares and reports. The exit status: 0, 1 when an arm failed, 130 after Ctrl-C. Raises
    KVTierError.
    """
    args = name_outputs(choose_device(CompareOptions.of(given)))
    check(args)
    if args.harness != "own":
        args = _for_harness(args)
    axis, values = _loads(args)
    if axis:
        # one server for all loads, and so for the largest
        args = replace(args, **{axis: values[-1]})
    arms = chosen_arms(args)
    cells: list[Cell] = []
    with work_folder(args.folder, lambda: failed(cells)) as folder:
        shape = shape_of(args)
        model = model_of(args, shape.device)
        wanted = load_options(args, load_defaults(args, shape.device))
        if axis == "concurrency" and len(values) > 1:
            wanted = replace(wanted, sessions=_enough_sessions(args, wanted.sessions, values[-1]))
        chosen = load(wanted, choose_encoder(Path(model), wanted.divisor))
        usual = replay_defaults(args, shape.device, chosen)
        replaying = replay_options(args, usual, wanted.most_output_tokens)
        replaying = replace(replaying, returning=args.returning)
        setup = make_setup(args, shape, model, chosen, replaying)
        # After all checks, since it may be installed first.
        program = aiperf_command() if args.harness == "aiperf" else None
        rounds = args.rounds or _rounds(args, shape.device)
        for place, value in enumerate(values):
            one = replaying if value is None else replace(replaying, **{axis: value})
            where = f"{axis} {value:g}" if len(values) > 1 else ""
            plan = _plan_of(args, arms, setup, folder, rounds, one.route)
            if where:
                plan = replace(
                    plan,
                    begins_at=place,
                    first_round=place * rounds + 1,
                    place=partial(same_place, where),
                )
            watch = partial(watch_first, page_tokens=setup.page_size) if not where else None
            kept = folder / where.replace(" ", "-") / "requests.jsonl"
            work = Replaying(chosen, one, setup, kept, watch)
            if args.harness == "sglang":
                plan = replace(plan, client=ChatClient)
                work = ChatReplaying(chosen, one, setup, kept, watch)
            axes = {axis: value} if where else {}
            if args.harness != "own":
                if not where:
                    control = replace(plan, place=partial(same_place, "own"))
                    cells.append(Cell({}, "own client", control, work, "our own client:"))
                    kept = folder / args.harness / "requests.jsonl"
                    where = args.harness
                plan = replace(plan, place=partial(same_place, f"{args.harness} {where}"))
                name = "" if args.json in (None, "-") else str(args.json)
                beside = name and Path(f"{Path(name).with_suffix('')}-{args.harness}")
                files = beside / where.replace(" ", "-") if beside else None
                load_of = (chosen, one, setup, kept, watch)
                if program is None:
                    work = SGLangReplaying(*load_of, kept=files)
                else:
                    work = AiperfReplaying(*load_of, kept=files, program=program)
            cell = Cell(axes, where, plan, work, where and f"{where}:")
            cells.append(replace(cell, choose=choose_best) if args.ablation else cell)
        shared = replaying if len(values) == 1 else replace(replaying, concurrency=None, rate=None)
        log = RoundLog.open(args.log, about(args, setup, chosen, shared))
        compared = Comparison(cells, log)
        loads = f"{axis} {', '.join(f'{value:g}' for value in values)}; " if values[1:] else ""
        announce(chosen, cells[0].plan, f"{loads}{rounds} rounds of each")
        common = standing(setup, chosen, replaying)
        if args.ablation or len(values) > 1:
            kind = ABLATION if args.ablation else SWEEP
            found = (
                partial(ablation_results, compared, chosen, replaying)
                if args.ablation
                else partial(rising_results, compared, chosen, replaying, axis)
            )
            return compared.experiment(
                args,
                kind.schema,
                results=found,
                tables=kind.tables,
                page=kind.page,
                standing=common,
            ).run()
        return compared.experiment(
            args,
            SCHEMA,
            results=lambda: results(chosen, replaying, cells[-1], *cells[:-1]),
            tables=main_tables,
            page=compare_page,
            standing=common,
            sentence=sentence,
            behind=_BEHIND,
        ).run()


def _loads(args: CompareOptions) -> tuple[str, Sequence[Any]]:
    """What changes from load to load, and its values in rising order; "" and None where nothing is
    said.
    """
    if args.rates is not None:
        return "rate", sorted(args.rates)
    if args.concurrencies is not None:
        return "concurrency", sorted(args.concurrencies)
    return "", [None]


def _for_harness(args: CompareOptions) -> CompareOptions:
    """The options of a run that another client sends. Raises BenchError where it cannot do what they
    say.
    """
    sglang = args.harness == "sglang"
    waits = sglang and any((args.pause, args.gap_scale, args.gap_cap))
    for given, name in (
        (args.ablation, "--ablation"),
        (args.feedback == "server" and not sglang, "--feedback server"),
        (waits, "pauses (--pause, --gap-scale, --gap-cap)"),
    ):
        if given:
            raise BenchError(f"--harness {args.harness} has no {name}: leave one of them")
    if sglang:
        args = replace(args, feedback="server", pause=0.0, gap_scale=None, gap_cap=None)
    return replace(args, route=ROUTE)


def _enough_sessions(args: CompareOptions, usual: int, most: int) -> int:
    """As many sessions as are at a time. Raises BenchError where fewer are asked for."""
    if args.sessions is not None and args.sessions < most:
        raise BenchError(
            f"--sessions {args.sessions}: --concurrency {most} needs at least {most} sessions"
        )
    return max(usual, most)


def standing(setup: Setup, chosen: Load, replaying: ReplayOptions) -> list[str]:
    """Notes that belong to every such result."""
    scale = 1.0 if setup.paced is None else setup.paced.bytes_scale
    moved = f"{_MOVED_HERE} {scale:g} times as many."
    paced = paced_notes(setup.paced, _KNOWN, moved, scaled=False)
    return [*paced, *chosen.notes, *replay_notes(replaying), *STANDING]


def announce(chosen: Load, plan: Plan, what: str) -> None:
    """Says what will be measured."""
    setup = plan.setup
    print(
        f"{chosen.describe()}; device pool {setup.device_tokens:,} tokens, host pool {setup.host_tokens:,}\n"
        f"configurations: {', '.join(plan.arms)}; {what}; logs in {plan.folder}",
        file=sys.stderr,
    )


def _plan_of(
    args: CompareOptions, arms: Sequence[str], setup: Setup, folder: Path, rounds: int, route: str
) -> Plan:
    """The plan of the rounds of one load, as the options say."""
    return Plan(
        arms=arms,
        setup=setup,
        folder=folder,
        rounds=rounds,
        once=(BASELINE, ORACLE) if setup.paced is not None else (),
        together={"auto": None, "together": True, "fresh": False}[args.servers],
        until=deadline_of(args),
        client=ROUTES[route],
    )


def make_setup(
    args: CompareOptions, shape: Shape, model: str, chosen: Load, replaying: ReplayOptions
) -> Setup:
    """The servers' common settings. The device pool holds the longest request and about a fifth of
    all contexts.
    """
    paced = (
        parse(shape.device, args.dilation or 1.0, args.server_arg)
        if is_paced(shape.device)
        else None
    )
    cpu, page = host_of(shape.device) == "cpu", shape.page
    share = 5 if paced is None else 3
    at_once = replaying.concurrency or len(chosen.sessions)
    least = max(chosen.longest_tokens * 9 // 8, chosen.context_tokens // share) + 2 * page
    tokens = -(-(args.device_tokens or least) // page) * page
    if tokens < chosen.longest_tokens + page:
        raise BenchError(
            f"--device-tokens {tokens} is less than the longest request needs ({chosen.longest_tokens} tokens and a page)"
        )
    return setup_of(
        args,
        shape,
        model,
        device_tokens=tokens,
        host_ratio=args.host_ratio,
        context_tokens=tokens if cpu else None,
        max_running=max(at_once, 8) if cpu else None,
        variants={
            ORACLE: oracle(undisturbed_tokens(chosen, page)),
            **(variants() if args.ablation else {}),
        },
        stock_reads=None if paced is None else _STOCK_READS[args.quick],
        **(thresholds(chosen, page) | _paced_sections(paced, chosen, page)),
    )


_STOCK_READS = {False: "best_effort", True: "timeout"}
"""The best of SGLang's three policies of reading ahead on a paced device, by whether the load is that
of --quick; the default is `timeout` (docs/results/data/emulated-h100.json, grid `prefetch policies`).
"""


def _paced_sections(paced: Paced | None, chosen: Load, page: int) -> dict[str, Any]:
    """The further sections that our arms have in kvtier.json on a paced device."""
    if paced is None:
        return {}
    found = paced.sections()
    found["policy"] |= thresholds(chosen, page)["sections"]["policy"]
    return {"sections": found}


def about(
    args: CompareOptions, setup: Setup, chosen: Load, replaying: ReplayOptions
) -> dict[str, Any]:
    """The settings that rounds of one log have in common: the load, the servers and what they run
    on. A model's folder may differ.
    """
    work = {k: v for k, v in chosen.to_json().items() if k not in ("description", "rows")}
    apart = ("model_path", "variants", "master", "linked")
    servers = {k: v for k, v in asdict(setup).items() if k not in apart}
    return {
        "workload": work,
        **servers,
        "servers": args.servers,
        **made_with(setup.device),
        **asdict(replaying),
    }


def results(
    chosen: Load, replaying: ReplayOptions, cell: Cell, control: Cell | None = None
) -> dict[str, Any]:
    """The result of the rounds, schema kvtier.compare/1 (docs/manual/json.md). With `control` those of
    `cell` were measured by another client, and those of `control` by our own.
    """
    plan, outcome, setup = cell.plan, cell.outcome, cell.plan.setup
    computed = None if setup.paced is None else answers_of(chosen, replaying)
    rows = sample_rows(outcome.rounds, computed)
    figures = {
        arm: {**arm_figures(arm, outcome.rounds, rows), **over_cells([cell], arm)}
        for arm in plan.arms
    }
    found: dict[str, Any] = {
        **device_of(setup.paced),
        **({} if computed is None else {"compared_with": BASELINE}),
        "workload": chosen.to_json(),
        "settings": settings_of(setup, replaying, outcome.commands),
        "rounds": plan.rounds,
        "arms": figures,
        "ratios": ratios(outcome.rounds, rows, plan.arms),
        "timeline": timelines(outcome.rounds),
        "samples": rows,
    }
    if control is not None:
        assert isinstance(cell.work, OtherClient), "else there is no control"
        own = control.outcome.rounds
        own_rows = sample_rows(own, computed)
        controls = {arm: arm_figures(arm, own, own_rows) for arm in plan.arms}
        found["harness"] = {
            "name": cell.work.name,
            "version": cell.work.version,
            "agreement": agreement(figures, controls),
        }
    return {"summary": sentence(found)[0], **found}


def answers_of(load: Load, options: ReplayOptions) -> Reference | None:
    """Every request's answer by session and turn. None where prompts follow from a server's
    answers, or where answers are text.
    """
    # Imports torch, which only this end of a run needs.
    from sgl_kvtier.lab.paced.signatures import answer_of

    if options.feedback != "recorded" or options.route != "generate":
        return None
    found: Reference = {}
    for session in load.sessions:
        tokens = PromptTokens(load.encoder)
        for turn, (call, prompt) in enumerate(Context(session).calls(), 1):
            tokens.show(prompt)
            count = output_tokens(call, load.encoder, options.most_output_tokens)
            found[session.session_id, turn] = answer_of(tokens.ids, count)
    return found


def rising_results(
    compared: Comparison, chosen: Load, replaying: ReplayOptions, axis: str
) -> dict[str, Any]:
    """The result of several loads, schema kvtier.sweep/1 (docs/manual/json.md)."""
    cells, plan = compared.cells, compared.cells[0].plan
    rows = [[{**cell.axes, **row} for row in sample_rows(cell.outcome.rounds)] for cell in cells]
    every = [row for found in rows for row in found]
    commands = {a: c for cell in cells for a, c in cell.outcome.commands.items()}
    values = [cell.axes[axis] for cell in cells]
    whole = [complete_rows(c.outcome.rounds, found) for c, found in zip(cells, rows, strict=True)]
    settings = settings_of(plan.setup, replaying, commands)
    rounds = compared.rounds()
    arms: dict[str, Any] = {}
    for arm in plan.arms:
        figures = arm_figures(arm, rounds, every)
        own = {name: figures[name] for name in _OF_ARM if name in figures}
        loads = [
            (value, [] if arm in cell.outcome.failures else found)
            for value, cell, found in zip(values, cells, whole, strict=True)
        ]
        own["sustained"] = sustained(loads, arm, SUSTAINED_MS)
        arms[arm] = {**own, **over_cells(cells, arm)}
    return {
        **device_of(plan.setup.paced),
        "workload": chosen.to_json(),
        "settings": {**settings, axis: values, "ttft_bound_ms": BOUND_MS},
        "rounds": plan.rounds,
        "arms": arms,
        "cells": [_rising(cell, found) for cell, found in zip(cells, rows, strict=True)],
        "samples": every,
    }


def ablation_results(
    compared: Comparison, chosen: Load, replaying: ReplayOptions
) -> dict[str, Any]:
    """The result of --ablation, schema kvtier.ablation/1 (docs/manual/json.md)."""
    cells, plan = compared.cells, compared.cells[0].plan
    paced = plan.setup.paced
    known = plan.arms[0] if paced is None else BASELINE
    answers = (
        reference_outputs(compared.rounds(), known)
        if paced is None
        else answers_of(chosen, replaying)
    )
    rows = [
        [{**cell.axes, **row} for row in sample_rows(cell.outcome.rounds, answers)]
        for cell in cells
    ]
    axes = {axis: [cell.axes[axis] for cell in cells] for axis in cells[0].axes}
    scale = 1.0 if paced is None else paced.bytes_scale
    commands = {a: c for cell in cells for a, c in cell.outcome.commands.items()}
    return {
        **device_of(paced),
        "compared_with": known,
        "workload": chosen.to_json(),
        "settings": {**settings_of(plan.setup, replaying, commands), **axes},
        "rounds": plan.rounds,
        "loads": [load_result(cell, own, scale) for cell, own in zip(cells, rows, strict=True)],
        "samples": [row for found in rows for row in found],
    }


def _rising(cell: Cell, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rounds, arms = cell.outcome.rounds, cell.plan.arms
    figures = {
        arm: {
            **arm_figures(arm, rounds, rows),
            "goodput_requests_per_s": within_bound(arm, rounds, BOUND_MS),
        }
        for arm in arms
    }
    return {**cell.axes, "arms": figures, "ratios": ratios(rounds, rows, arms)}


def settings_of(
    setup: Setup, replaying: ReplayOptions, commands: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The settings of a result."""
    servers = {**asdict(setup), "host_tokens": setup.host_tokens}
    return {**servers, **asdict(replaying), "commands": commands}


def replay_notes(options: ReplayOptions) -> list[str]:
    """How gaps, lengths and outputs of the trace are replayed."""
    scale, cap, most = options.gap_scale, options.gap_cap_s, options.most_output_tokens
    fed_back = {
        "recorded": "The trace's own outputs are fed back, so all configurations get the same prompts.",
        "server": "The server's own outputs are fed back, so configurations whose answers differ get different prompts.",
    }
    arrive = (
        "Open loop: sessions arrive at random times, the same in all configurations and rounds."
    )
    return [
        *([] if options.rate is None else [arrive]),
        *([_RETURNING] if options.returning else []),
        f"Tool gaps are the trace's times {scale:g}"
        + ("." if cap is None else f", at most {cap:g} s.")
        if options.pause_s is None
        else f"Tool gaps last {options.pause_s:g} s each, whatever the trace has.",
        "Outputs are as long as the trace's"
        + ("." if most is None else f", at most {most} tokens."),
        fed_back[options.feedback],
    ]


def choose_device(args: CompareOptions) -> CompareOptions:
    """With the device, its dilation and the lab model, where the options do not say. Raises
    BenchError.
    """
    device, dilation = args.device, args.dilation
    if device is None:
        found = detect_device()
        computes = found != "cpu" or args.model is not None
        device = found if computes else _DEFAULT_DEVICE
    if dilation is None:
        dilation = _PACED_DILATION if is_paced(device) and not args.quick else 1.0
    if is_paced(device):
        refuse_other(args, device)
        return replace(args, device=device, dilation=dilation)
    return replace(args, device=device, dilation=dilation, model=args.model or "lab-mha")


def name_outputs(args: CompareOptions) -> CompareOptions:
    """With names of the result and the page where --json or --html say a folder: by the device
    if it is a paced one, and the time.
    """
    kind = "paced-" if is_paced(args.device or "") else ""
    name = f"compare-{kind}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"

    def named(target: str | None, ending: str) -> str | None:
        folder = target is not None and target.endswith("/")
        return f"{target}{name}.{ending}" if folder else target

    return replace(args, json=named(args.json, "json"), html=named(args.html, "html"))


def _rounds(args: CompareOptions, device: str) -> int:
    if is_paced(device) or args.ablation:
        return _PACED_ROUNDS
    return 2 if args.quick else 3


def load_defaults(args: CompareOptions, device: str) -> LoadOptions:
    """Which sessions are replayed on a device where nothing else is asked for."""
    if args.ablation:
        usual = load_defaults(replace(args, ablation=False), device)
        return replace(usual, most_output_tokens=None)
    if is_paced(device):
        usual = _PACED_QUICK if args.quick else _PACED
        # Of another trace, or at another scale, sessions may all be shorter.
        return replace(usual, least_prompt_tokens=0) if args.trace or args.divisor else usual
    if args.model == smollm2.NAME and device == "cpu":
        return _SMOLLM2
    if args.quick:
        return _QUICK
    return _CPU if device == "cpu" else _GPU


def replay_defaults(args: CompareOptions, device: str, chosen: Load) -> ReplayOptions:
    """How they are replayed where nothing else is asked for: on a paced device all at a time."""
    if not is_paced(device):
        return REPLAY
    pause_s = _QUICK_PAUSE_S if args.quick else None
    return replace(REPLAY, concurrency=len(chosen.sessions), pause_s=pause_s)


def chosen_arms(args: CompareOptions) -> list[str]:
    """The arms to compare, in their order. Raises BenchError."""
    if args.ablation:
        arms = words(args.arms) if args.arms is not None else MEASURED_ARMS
        check_names(arms, ABLATION_ARMS)
        asked = {SAME.get(arm, arm) for arm in arms}
        return [arm for arm in MEASURED_ARMS if arm in asked]
    if args.arms is None:
        paced = is_paced(args.device)
        if args.quick:
            return [arm for arm in _QUICK_ARMS if not (paced and arm == BASELINE)]
        return [*DEFAULT_ARMS, ORACLE] if paced else list(DEFAULT_ARMS)
    arms = words(args.arms)
    check_arms(arms, (ORACLE,))
    return [arm for arm in (*ARMS, ORACLE) if arm in arms]
