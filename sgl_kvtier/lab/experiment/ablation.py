"""What each mechanism of kvtier is worth: SGLang with the best of its own flags, then kvtier's
mechanisms one after the other, and the whole with one of them left out.

SGLang's best flags are tried first, a round each: how long it waits for what it reads from storage,
then steps with both prefill and decoding, then the order of its queue, then when it writes, then what it evicts. The
fastest one by the mean time to first token of all turns is compared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import OURS, WITHOUT_LOOKAHEAD, Variant
from sgl_kvtier.lab.experiment.comparison import Cell, over_cells
from sgl_kvtier.lab.experiment.measures import arm_figures, complete_rows, sample_rows
from sgl_kvtier.lab.experiment.rounds import Outcome, RoundLog, Rounds, same_place
from sgl_kvtier.lab.pages.ablation import BEST, CHAIN, PATCHED, SAME, WITHOUT, shares, without
from sgl_kvtier.lab.pages.stats import summary
from sgl_kvtier.launch import MIXED
from sgl_kvtier.page_hash import compile_page_hash

_READS, _ORDER, _WRITES, _EVICTS = (
    "--hicache-storage-prefetch-policy",
    "--schedule-policy",
    "--hicache-write-policy",
    "--radix-eviction-policy",
)
_TRIED: tuple[dict[str, tuple[str, ...]], ...] = (
    {value: (_READS, value) for value in ("timeout", "best_effort", "wait_complete")},
    {"mixed-chunk": (MIXED,)},
    {value: (_ORDER, value) for value in ("lpm", "hrrn")},
    {"write_back": (_WRITES, "write_back")},
    {
        "slru": (_EVICTS, "slru"),
        "tlru": (
            _EVICTS,
            "tlru",
            "--radix-eviction-policy-config",
            '{"threshold": 8192, "next_prompt_estimate": 1024}',
        ),
    },
)
"""Arguments of SGLang that are tried, each group beside the best of those before it; the very first
are its default. A threshold of `tlru` is a chunk, the estimate what a turn adds at most. SGLang's
`shortest-prefill-first` ends with "Prefill out of memory" under long prompts (0.5.23).
"""
_STORED = "hicache-file"
_RULES = "sgl_kvtier.lab.rules:"
_AHEAD: Mapping[str, Any] = {"prefetch": "on", "eviction": "next-use"}

IN_ORDER = "kvtier-sglang-order"
ABLATION_ARMS = (BEST, PATCHED, *list(CHAIN.values())[1:], *WITHOUT.values(), IN_ORDER)
"""The arms, in the order of results."""
MEASURED_ARMS = tuple(arm for arm in ABLATION_ARMS if arm not in SAME)

PATCH = Path(__file__).parents[3] / "patches" / "sglang-0.5.23" / "prefetch-in-queue-order.patch"
"""Has SGLang read stored prefixes in the order of its queue. In a clone alone."""


def variants(best: Sequence[str] = (), patched: str = "") -> dict[str, Variant]:
    """The arms, where `best` are SGLang's best arguments: the verified store has them too, and the
    reads in queue order and the last arm have SGLang's order. `patched` is the folder of a patched SGLang.
    """
    return {
        BEST: Variant(_STORED, "SGLang's file backend with its best flags", arguments=tuple(best)),
        PATCHED: Variant(
            _STORED,
            "SGLang's file backend with a patch: reads in the order of the queue",
            arguments=tuple(
                word for flag in (_ORDER, _WRITES, _EVICTS) for word in _part(best, flag)
            ),
            env=_env_of(patched),
        ),
        "store": Variant("kvtier-off", "kvtier's store alone", arguments=tuple(best)),
        "reads": Variant(
            OURS,
            "and stored prefixes are read in the order of the queue, and chunks are mixed with "
            "decoding",
            {**WITHOUT_LOOKAHEAD, "queue": "arrival", "rules": f"{_RULES}NeverRestores"},
            arguments=_part(best, _ORDER),
        ),
        "queue": Variant(
            OURS,
            "and the queue is ordered by predicted time to first token",
            {**WITHOUT_LOOKAHEAD, "rules": f"{_RULES}NeverHolds"},
        ),
        "hold": Variant(
            OURS,
            "and requests wait for sessions that should return in a moment",
            {**WITHOUT_LOOKAHEAD, "rules": f"{_RULES}NeverRestores"},
        ),
        "restore": Variant(OURS, "and prefixes are restored from both ends", WITHOUT_LOOKAHEAD),
        WITHOUT["restore"]: Variant(
            OURS, "kvtier without restoration", {"restore": "off", **_AHEAD}
        ),
        WITHOUT["queue"]: Variant(OURS, "kvtier in the order of arrival", {"queue": "arrival"}),
        WITHOUT["mixed"]: Variant(OURS, "kvtier with chunks and decoding apart", mixes=False),
        IN_ORDER: Variant(
            OURS, "kvtier in SGLang's best order of the queue", arguments=_part(best, _ORDER)
        ),
    }


def _part(arguments: Sequence[str], flag: str) -> tuple[str, ...]:
    """The flag and its value, where it is among these arguments."""
    place = list(arguments).index(flag) if flag in arguments else None
    return () if place is None else tuple(arguments[place : place + 2])


def patched_sglang(folder: Path) -> Path:
    """A folder with a copy of the installed SGLang that has the patch, made below `folder` if it is
    not there. Raises BenchError.
    """
    found = find_spec("sglang")
    assert found is not None and found.submodule_search_locations, "servers were started"
    whole, torn = folder / "sglang-patched-source", folder / "sglang-patched-torn"
    if not whole.exists():
        shutil.rmtree(torn, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(found.submodule_search_locations[0], torn / "sglang", ignore=ignored)
        command = ["patch", "--quiet", "-p2", "-d", str(torn), "-i", str(PATCH)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stdout", None) or str(error)
            raise BenchError(f"{PATCHED}: {PATCH.name} cannot be applied: {why}") from error
        torn.rename(whole)
    return whole


def compile_hash(patched: Path) -> None:
    """Compiles the page hash of a patched SGLang, unless that was done: it depends on where the
    source lies, and SGLang would do it at its first prompt. Raises BenchError.
    """
    if compile_page_hash() or (patched / _EXTENSIONS).exists():
        return
    try:
        command = [sys.executable, "-m", "sgl_kvtier.runtime.sglang.page_hash"]
        env = {**os.environ, **_env_of(str(patched))}
        subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        raise BenchError(f"{PATCHED}: its page hash cannot be compiled: {why}") from error


_EXTENSIONS = "torch_extensions"


def _env_of(patched: str) -> dict[str, str]:
    """Variables of a server that runs the SGLang of a folder."""
    path = os.pathsep.join(filter(None, (patched, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "TORCH_EXTENSIONS_DIR": str(Path(patched, _EXTENSIONS))}


def choose_best(cell: Cell, log: RoundLog) -> None:
    """Tries SGLang's flags with this cell's work, a round each, and has its arms take the best.
    Raises BenchError where none could be measured, or the patch cannot be applied.
    """
    asked_for = set(cell.plan.arms)
    patched = ""
    if PATCHED in asked_for:
        patched = str(patched_sglang(cell.plan.folder))
        compile_hash(Path(patched))
    if not {BEST, PATCHED, "store", "reads", IN_ORDER} & asked_for:
        return
    best: tuple[str, ...] = ()
    for group in _TRIED:
        asked = {f"sglang-{name}": (*best, *words) for name, words in group.items()}
        outcome = Outcome()
        plan = replace(
            cell.plan,
            arms=list(asked),
            setup=replace(
                cell.plan.setup,
                variants={
                    name: Variant(_STORED, "SGLang's flags", arguments=arguments)
                    for name, arguments in asked.items()
                },
            ),
            rounds=1,
            once=(),
            place=partial(same_place, " ".join(filter(None, (cell.name, "tried", *best)))),
        )
        try:
            Rounds(plan, cell.work, outcome, log).run()
        except BenchError:
            if not outcome.failures.keys() >= asked.keys():
                raise
            # A server that does not survive the load with a flag is a finding about that flag.
        cell.tried += [_tried(outcome, name, arguments) for name, arguments in asked.items()]
        known = [one for one in cell.tried if one["ttft_ms"]["mean"] is not None]
        if not known:
            raise BenchError("none of SGLang's flags could be measured")
        best = tuple(min(known, key=lambda one: one["ttft_ms"]["mean"])["arguments"])
    for one in cell.tried:
        one["best"] = tuple(one["arguments"]) == best
    setup, made = cell.plan.setup, variants(best, patched)
    cell.plan = replace(
        cell.plan,
        setup=replace(setup, variants={**setup.variants, **made}),
        place=partial(_with_flags, cell.plan.place, made),
    )


def _with_flags(place: Callable[[str], str], made: Mapping[str, Variant], arm: str) -> str:
    """Where the log keeps the rounds of an arm: those with other flags are no rounds of it."""
    flags = made[arm].arguments if arm in made else ()
    return " ".join(filter(None, (place(arm), *flags)))


def _tried(outcome: Outcome, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    rounds = [one for one in outcome.rounds if one.arm == name and one.complete]
    figures = arm_figures(name, rounds, sample_rows(rounds))
    return {
        "arguments": list(arguments),
        "ttft_ms": figures["ttft_ms"] if not figures["errors"] else summary(()),
        "tokens_per_s": figures["throughput_tokens_per_s"],
        "failure": outcome.failures.get(name),
        "best": False,
    }


def load_result(
    cell: Cell, rows: Sequence[Mapping[str, Any]], bytes_scale: float
) -> dict[str, Any]:
    """The figures of one load: a part of `loads` in schema kvtier.ablation/1. `rows` are its rows of
    `sample_rows`.
    """
    rounds, arms = cell.outcome.rounds, cell.plan.arms
    figures = {
        arm: {
            **_figures(arm, arm_figures(arm, rounds, rows), rows, bytes_scale),
            **over_cells([cell], arm),
        }
        for arm in arms
    }
    for name, same in SAME.items():
        if same in figures:
            figures[name] = figures[same]
    known = [row for row in complete_rows(rounds, rows) if not row["error"]]
    return {
        **cell.axes,
        "name": cell.name or "load",
        "tried": cell.tried,
        "arms": figures,
        "share": shares(known, arms),
        "without": without(known, arms),
        "without_e2e": without(known, arms, "e2e_ms"),
    }


_KEPT = (
    *("ttft_ms", "ttft_later_ms", "e2e_ms", "requests", "errors", "prompt_tokens"),
    *("equal_tokens_fraction", "compared_requests", "rounds"),
)


def _figures(
    arm: str, found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], bytes_scale: float
) -> dict[str, Any]:
    good = [row for row in rows if row["arm"] == arm and row["error"] is None]
    prompt = found["prompt_tokens"] or 0
    tiers = found["cached_tokens"].values()
    cached = None if None in tiers else sum(tiers)
    waits = [row["ttft_ms"] for row in good if row["ttft_ms"] is not None]

    def per_million(name: str) -> float | None:
        nbytes = found["bytes"][name]
        return (
            nbytes * bytes_scale / 1e9 / (prompt / 1e6) if prompt and nbytes is not None else None
        )

    restored = found["restore"] or {}
    return {
        **{name: found[name] for name in _KEPT},
        "ttft_first_ms": summary(row["ttft_ms"] for row in good if row["turn"] == 1),
        "gap_ms": found["token_gap_ms"],
        "longest_wait_ms": max(waits, default=None),
        "tokens_per_s": found["throughput_tokens_per_s"],
        "computed_fraction": 1 - cached / prompt if prompt and cached is not None else None,
        "ssd_read_gb_per_mtok": per_million("read"),
        "ssd_written_gb_per_mtok": per_million("written"),
        "restorations": restored.get("started"),
        **({"pace": found["pace"]} if "pace" in found else {}),
    }
