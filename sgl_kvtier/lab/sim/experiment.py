"""One workload on one simulated machine under several policies: what `kvtier sim run` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.console import Column, Table, format_bytes
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.pages.stats import summary
from sgl_kvtier.lab.sim.arrivals import Pace, from_sessions
from sgl_kvtier.lab.sim.baselines import Served
from sgl_kvtier.lab.sim.hardware import (
    Hardware,
    ModelShape,
    load_hardware,
    load_model,
    planner_profile,
    step_cost,
    with_measured_links,
)
from sgl_kvtier.lab.sim.policies import Setting, policy
from sgl_kvtier.lab.sim.replay import Recording
from sgl_kvtier.lab.sim.requests import SimRequest, SimResult
from sgl_kvtier.lab.sim.run import engine_shape, simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.lab.workload.encoder import wide_encoder
from sgl_kvtier.lab.workload.source import load_sessions
from sgl_kvtier.policy.decision_log import Header
from sgl_kvtier.policy.messages import Consulted, Mode, Planner
from sgl_kvtier.policy.planner import Planner as KVTierPlanner
from sgl_kvtier.types import PLACES, Link, Tier

DRAWS = 6
"""Draws of a load that is random, unless others are asked for."""

_USABLE_HBM = 0.9
"""Share of HBM that weights and KV may take together, as `--mem-fraction-static` leaves it in
SGLang.
"""


@dataclass(frozen=True)
class Machine:
    """The simulated machine: names from the profiles, token budget and page. Sizes of the tiers are
    in bytes. None: the device is as large as the weights leave, the others have no limit.
    `storage_gbps` replaces the profile's, in gigabits per second. `mixed`: a step
    holds prefill and decode, which SGLang does only with --enable-mixed-chunk.
    """

    hardware: str = "H100"
    model: str = "Llama-3.1-8B"
    device_bytes: int | None = None
    host_bytes: int | None = None
    storage_bytes: int | None = None
    page_tokens: int = 64
    step_tokens: int = 2048
    storage_gbps: float | None = None
    mixed: bool = False

    def parts(self) -> tuple[Hardware, ModelShape, ServerSpec]:
        """The machine, the model and the server. Raises ConfigError when a tier is too small for
        anything.
        """
        model = load_model(self.model)
        hardware = with_measured_links(load_hardware(self.hardware), model)
        if self.storage_gbps is not None:
            hardware = hardware.with_pipe("ssd_read", bytes_per_s=self.storage_gbps * 1e9 / 8)
        device_bytes = self.device_bytes
        if device_bytes is None:
            device_bytes = int(hardware.hbm_bytes * _USABLE_HBM - model.weight_bytes)
        page_bytes = self.page_tokens * model.kv_bytes_per_token
        pages = [
            None if size is None else size // page_bytes
            for size in (device_bytes, self.host_bytes, self.storage_bytes)
        ]
        if (pages[0] or 0) < 1:
            why = f"{self.model} leaves no HBM for KV on {self.hardware}: choose another of them"
            if self.device_bytes is not None:
                why = f"--device-size: a page of {self.model} takes {format_bytes(page_bytes)}"
            raise ConfigError(why)
        spec = ServerSpec(
            page_tokens=self.page_tokens,
            step_tokens=self.step_tokens,
            device_pages=pages[0],
            host_pages=pages[1],
            storage_pages=pages[2],
            mixed=self.mixed,
        )
        return hardware, model, spec


@dataclass(frozen=True)
class Load:
    """The arrivals: a trace as `kvtier trace` knows it, how many of its sessions, and their pace. A
    session is cut before its first prompt longer than `most_prompt_tokens`.
    """

    trace: str
    sessions: int | None = None
    seed: int = 0
    pace: Pace = field(default_factory=Pace)
    most_prompt_tokens: int | None = None
    traces: Path | None = None
    block_tokens: int | None = None

    def requests(self, page_tokens: int) -> tuple[str, list[SimRequest]]:
        """The workload in words, and its requests. Raises TraceError and ConfigError as the trace
        reader does.
        """
        encoder = wide_encoder()
        loaded = load_sessions(
            self.trace,
            limit=self.sessions,
            seed=self.seed,
            traces_dir=self.traces,
            encoder=encoder,
            max_prompt_tokens=self.most_prompt_tokens,
            block_tokens=self.block_tokens,
        )
        return loaded.description, from_sessions(
            loaded.sessions, page_tokens, self.pace, self.seed, encoder
        )


def run_policy(
    name: str,
    machine: Machine,
    requests: Sequence[SimRequest],
    config: PolicyConfig,
    *,
    on_finish: Callable[[SimRequest], None] | None = None,
    log: Callable[[str], object] | None = None,
) -> SimResult:
    """One policy over the requests. `log` takes the decision log, line by line; replaying is for
    policies kvtier.json can express.
    """
    hardware, model, spec = machine.parts()
    shape = engine_shape(spec, model)
    profile = planner_profile(hardware, step_cost(hardware, model), shape)
    chosen = policy(name)
    planner: Planner = chosen.make(Setting(config, shape, profile, spec, requests))
    victims = None
    if isinstance(planner, KVTierPlanner):  # as a server: the map's order, whenever room is needed
        victims = partial(planner.pages.victims_aside, Tier.DEVICE)
    if log is not None:
        planner = Recording(planner, Header(config, shape, profile), log)
    server = chosen.server(spec)
    if chosen.served:
        planner = Served(cast(Consulted, planner), shape, server, config.min_restore_tokens)
    return simulate(
        planner, hardware, model, requests, server=server, on_finish=on_finish, victims=victims
    )


def outcome(name: str, result: SimResult) -> dict[str, Any]:
    """A run in numbers: what tables and JSON show. Seconds, tokens, bytes."""
    requests = result.requests
    moved = {link.value: used.nbytes for link, used in result.links.items()}
    wasted = {link.value: used.wasted_bytes for link, used in result.links.items()}
    up = (Link.STORAGE_TO_HOST, Link.HOST_TO_DEVICE, Link.STORAGE_TO_DEVICE)
    hits: dict[str, int] = {}
    for request in requests:
        for tier, tokens in request.hit_tokens.items():
            hits[PLACES[tier]] = hits.get(PLACES[tier], 0) + tokens
    return {
        "policy": name,
        "requests": len(requests),
        "ttft_s": {**summary(result.ttfts()), "most": max(result.ttfts(), default=None)},
        "finished_s": result.finished_s,
        "compute_busy_s": result.compute_busy_s,
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "computed_tokens": sum(request.computed_tokens for request in requests),
        "loaded_tokens": sum(request.spliced_tokens for request in requests),
        "resident_tokens": sum(request.resident_tokens for request in requests),
        "lost_tokens": sum(request.lost_tokens for request in requests),
        "hit_tokens": hits,
        "moved_bytes": moved,
        "wasted_bytes": wasted,
        "moved_up_bytes": sum(moved[link.value] for link in up),
        "wasted_up_bytes": sum(wasted[link.value] for link in up),
        "restored": sum(one.restore_mode in _RESTORED and not one.left for one in requests),
        "retracted": sum(request.retracted for request in requests),
        "steps": result.steps,
        "events": result.events,
    }


_RESTORED = (Mode.BOTH.value, Mode.LOAD.value)

_SUMMED = (
    "ttft_s.mean",
    "ttft_s.p50",
    "ttft_s.p99",
    "ttft_s.most",
    "computed_tokens",
    "loaded_tokens",
    "moved_up_bytes",
    "wasted_up_bytes",
    "restored",
)


def over_draws(outcomes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Outcomes of the same policies in several draws of the load: per policy the median of each
    number with the least and the most.
    """
    rows = []
    for name in dict.fromkeys(one["policy"] for one in outcomes):
        mine = [one for one in outcomes if one["policy"] == name]
        row: dict[str, Any] = {"policy": name, "n": len(mine)}
        for path in _SUMMED:
            key, _, part = path.partition(".")
            values = [one[key][part] if part else one[key] for one in mine]
            row[path] = {"median": median(values), "least": min(values), "most": max(values)}
        rows.append(row)
    return rows


_NAMES = ("policy", "n")
_WHAT_RESTORED = (
    "Restored: requests whose prefix the planner restores; the engine loads the others by itself. "
    "Moved up: storage to host, host to device and storage to device."
)
_NOTES = (
    "Moved up: storage to host, host to device and storage to device. Wasted: loaded and never "
    "used by the request it was for, or prefetched and dropped or left without a hit.",
)


def policies_table(outcomes: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row per policy."""
    columns = [
        Column("policy", "policy"),
        *(Column(f"ttft_s.{key}", f"TTFT {key}", "s", 3) for key in ("p50", "p90", "p99", "mean")),
        Column("finished_s", "end", "s", 1),
        Column("computed_tokens", "computed tokens", decimals=0),
        Column("loaded_tokens", "loaded tokens", decimals=0),
        Column("moved_up_bytes", "to faster tiers", format=format_bytes),
        Column("wasted_up_bytes", "of it wasted", format=format_bytes),
    ]
    return Table(title, columns, outcomes, _NOTES)


def draws_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """One row per policy: medians over several draws, and the range of the mean."""
    shown = [
        {
            "policy": row["policy"],
            "range": f"{row['ttft_s.mean']['least']:.2f} to {row['ttft_s.mean']['most']:.2f}",
            **{key.replace(".", " "): row[key]["median"] for key in row if key not in _NAMES},
        }
        for row in rows
    ]
    columns = [
        Column("policy", "policy"),
        Column("ttft_s mean", "TTFT mean", "s", 2),
        Column("range", "least to most (s)"),
        Column("ttft_s p50", "TTFT p50", "s", 2),
        Column("ttft_s p99", "TTFT p99", "s", 2),
        Column("computed_tokens", "computed tokens", decimals=0),
        Column("restored", "restored", decimals=0),
        Column("moved_up_bytes", "to faster tiers", format=format_bytes),
    ]
    draws = rows[0]["n"] if rows else 0
    note = f"Each number is the median of {draws} draws; the range is that of their means."
    return Table(title, columns, shown, (note, _WHAT_RESTORED))
