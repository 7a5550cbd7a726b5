"""Writes `decisions/`: small decision logs of simulated servers in all modes, and of hands that
fail, cancel, abort and ask at random. `python tests/golden/record.py`, after a new setting or a change of
decisions that is on purpose: a log that is still decided as before gets the settings of now, others
are run anew, and tests/parity/plans.json gets the digests of now. `record.py NAME...` runs those anew.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "policy"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from random_hands import ENGINE, PAGE, PROFILE, RandomHands, key
from recorded_run import PLANS, digests

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.sim.arrivals import Pace
from sgl_kvtier.lab.sim.experiment import Load, Machine, run_policy
from sgl_kvtier.lab.sim.hardware import (
    StepCost,
    load_hardware,
    load_model,
    planner_profile,
    step_cost,
)
from sgl_kvtier.lab.sim.policies import AHEAD
from sgl_kvtier.lab.sim.replay import Recording, replay
from sgl_kvtier.lab.sim.requests import ByLayers, SimRequest
from sgl_kvtier.lab.sim.run import engine_shape, simulate
from sgl_kvtier.lab.sim.server import ServerSpec
from sgl_kvtier.policy.decision_log import (
    NUMBERED,
    Header,
    Reader,
    Writer,
    decode_header,
    encode_header,
)
from sgl_kvtier.policy.messages import (
    ChunkBeside,
    HeldBack,
    Hint,
    Hinted,
    LeftToEngine,
    PolicyChanged,
    Queued,
    ReadsDue,
    RestoreOffered,
    RulesTuned,
    RunOrder,
    SessionsWith,
    StepView,
    Waiter,
)
from sgl_kvtier.policy.planner import make_planner
from sgl_kvtier.types import Span, Tier

MOST_LINES = 5000
"""Lines kept of a log: one that breaks off is replayed up to there."""
ON_DEMAND = PolicyConfig(prefetch="off")

Lines = list[str]


def simulated(name: str, config: PolicyConfig, seed: int = 3, **machine: object) -> Lines:
    """Five sessions on a server with too little memory for them."""
    small = {
        "device_bytes": 1 << 30,
        "host_bytes": 1 << 29,
        "storage_bytes": 3 << 29,
        "step_tokens": 512,
        "storage_gbps": 16,
    }
    pace = Pace(mean_start_s=1.0, most_gap_s=2.0)
    load = Load("generated:swe-mini", 5, seed=seed, pace=pace, most_prompt_tokens=4000)
    server = Machine(**{**small, **machine})  # type: ignore[arg-type]
    lines: Lines = []
    _, requests = load.requests(server.page_tokens)
    run_policy(name, server, requests, config, log=lines.append)
    return lines


def batches(config: PolicyConfig, staged: bool = False, layers: bool = False) -> Lines:
    """Prefixes from several tiers, some asked for at once, beside requests that decode. `layers`:
    each unit is a layer of the prefix (CacheFlow 3.1).
    """
    hardware, model = load_hardware("H100"), load_model("Llama-3.1-8B")
    cost = StepCost(0.003, 3e-5, 1e-9) if layers else step_cost(hardware, model)
    spec = ServerSpec(page_tokens=64, step_tokens=512, device_pages=1500, staged=staged)
    spec = replace(spec, write_down=False, host_pages=200)
    shape = engine_shape(spec, model)
    profile = planner_profile(hardware, cost, shape)
    chance = random.Random(5)
    requests = [SimRequest(f"beside {n}", 0.0, 128, 200) for n in range(3)]
    for n in range(24):
        pages = chance.choice((16, 32)) if layers else chance.randint(8, 160)
        tiers = (Tier.HOST, Tier.STORAGE) if chance.random() < 0.5 else (Tier.STORAGE,)
        cut = pages // len(tiers)
        ends = [Span(0, cut), Span(cut, pages)] if len(tiers) > 1 else [Span(0, pages)]
        own = ByLayers(pages * 64, pages) if layers else None
        at = 1.0 + n // 4 * 0.7
        cached = tuple(zip(ends, tiers, strict=True))
        requests.append(SimRequest(f"r{n}", at, pages * 64 + 100, 20, cached=cached, by_layers=own))
    lines: Lines = []
    planner = make_planner(config, shape, profile)
    simulate(
        Recording(planner, Header(config, shape, profile), lines.append),
        hardware,
        model,
        requests,
        server=spec,
        cost=cost,
    )
    return lines


class AskingHands(RandomHands):
    """Random hands that also ask what a server asks, and change the settings."""

    def act(self) -> None:
        if self.chance.random() < 0.3:
            self.ask()
        super().act()

    def ask(self) -> None:
        chance, now = self.chance, self.now
        waiting = tuple(
            Waiter(rid, one.tokens, one.front, 0, min(one.tokens - one.front, 4 * PAGE))
            for rid, one in self.requests.items()
        )
        newest = Waiter("new", 300, chance.choice((0, 64)), chance.choice((0, 128)))
        offer = RestoreOffered(
            "new", now, 700, 0, 40, ((Span(0, chance.randint(1, 20)), Tier.HOST),
                                     (Span(20, 40), chance.choice((Tier.STORAGE, Tier.REMOTE))))
        )  # fmt: skip
        view = StepView(
            now, tuple(self.requests), self.slot, free_pages={Tier.DEVICE: chance.randrange(200)}
        )
        hint = Hint(
            expected_delay_s=chance.choice((None, 0.5, 30.0)),
            priority=chance.choice((None, 1, -1)),
            ttl_s=chance.choice((None, None, 0.0, 60.0)),
        )
        name = chance.choice(("queue_charge", "overtaking"))
        self.planner.query(
            chance.choice(
                (
                    RunOrder(waiting, now),
                    RunOrder(waiting, now),
                    HeldBack(newest, chance.randrange(8), now),
                    ChunkBeside(64, 900, 8 * PAGE, 500, waiting),
                    LeftToEngine(offer, view),
                    ReadsDue((Queued("a", 3, True), Queued("b", chance.randrange(9), True)), 8),
                    Hinted(f"s{chance.randrange(3)}", hint, now),
                    SessionsWith(key(chance.randrange(3), 0)),
                    RulesTuned(name, 1.0),
                )
            )
        )
        if chance.random() < 0.05:
            restore = chance.choice(("auto", "both", "load", "compute"))
            self.planner.observe(PolicyChanged(replace(self.config, restore=restore), now))


def in_random_hands(seed: int, config: PolicyConfig, profiled: bool, asking: bool = True) -> Lines:
    """A run in which hands grant less, finish late, fail, cancel and abort."""
    lines: Lines = []
    config = replace(config, load_deadline_s=600.0, load_tokens=32)
    hands = (AskingHands if asking else RandomHands)(random.Random(seed), config, profiled)
    header = Header(config, ENGINE, PROFILE if profiled else None)
    hands.planner = Recording(hands.planner, header, lines.append)  # type: ignore[assignment]
    for _ in range(1200):
        hands.act()
    return lines


def _by(rules: str, config: PolicyConfig, **more: object) -> PolicyConfig:
    return replace(config, rules=f"sgl_kvtier.lab.rules:{rules}", **more)  # type: ignore[arg-type]


RUNS: dict[str, Callable[[], Lines]] = {
    "simulated-auto-ahead": lambda: simulated("kvtier", AHEAD),
    "simulated-both-ahead": lambda: simulated("kvtier", replace(AHEAD, restore="both"), 4),
    "simulated-load-ahead": lambda: simulated("kvtier", replace(AHEAD, restore="load"), 5),
    "simulated-compute-ahead": lambda: simulated("kvtier", replace(AHEAD, restore="compute")),
    "simulated-auto": lambda: simulated("restore", ON_DEMAND),
    "simulated-both-slow": lambda: simulated(
        "restore", replace(ON_DEMAND, restore="both"), 6, storage_gbps=4
    ),
    "simulated-by-arrival": lambda: simulated(
        "kvtier", replace(AHEAD, queue="arrival", sessions=False, max_stall_ms=5.0), mixed=True
    ),
    "simulated-cake": lambda: simulated("kvtier", _by("Cake", ON_DEMAND)),
    "simulated-cacheflow": lambda: simulated("kvtier", _by("CacheFlow", AHEAD), 7),
    "simulated-tierkv": lambda: simulated("kvtier", _by("TierKV", AHEAD)),
    "batches-auto": lambda: batches(ON_DEMAND),
    "batches-both-staged": lambda: batches(replace(ON_DEMAND, restore="both"), staged=True),
    "batches-cacheflow": lambda: batches(_by("CacheFlow", ON_DEMAND, restore="both")),
    "batches-by-layers": lambda: batches(replace(ON_DEMAND, restore="both"), layers=True),
    "random-auto-ahead": lambda: in_random_hands(1, AHEAD, True),
    "random-both-ahead": lambda: in_random_hands(2, replace(AHEAD, restore="both"), True),
    "random-nothing-known": lambda: in_random_hands(3, AHEAD, False),
    "random-load": lambda: in_random_hands(4, replace(ON_DEMAND, restore="load"), True),
    "random-lru-by-arrival": lambda: in_random_hands(
        5, replace(AHEAD, eviction="lru", queue="arrival", restore="both"), True
    ),
    "random-shortest-first": lambda: in_random_hands(
        6, _by("ShortestFirst", AHEAD, restore="both"), True
    ),
    "random-tierkv": lambda: in_random_hands(7, _by("TierKV", AHEAD), True, asking=False),
}


def main(names: list[str]) -> None:
    for name in names or RUNS:
        path = Path(__file__).with_name("decisions").joinpath(f"{name}.jsonl.gz")
        kept = gzip.decompress(path.read_bytes()).decode().splitlines() if not names else []
        lines, said = kept, "decides as before"
        if not kept or replay(kept).difference is not None:
            lines, said = RUNS[name]()[:MOST_LINES], "run anew"
        reader, writer = Reader(), Writer()
        text = [encode_header(decode_header(lines[0]), NUMBERED)]
        text += [writer.encode(reader.decode(line)) for line in lines[1:]]
        if text != kept:
            path.write_bytes(gzip.compress(("\n".join(text) + "\n").encode(), 9, mtime=0))
            said += ", written"
        print(f"{name}: {said}", flush=True)
    if not names:
        PLANS.write_text(json.dumps(digests(), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
