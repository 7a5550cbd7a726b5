"""A comparison's result with invented figures: for the report's own tests only, made new for each."""

from __future__ import annotations

import random

import pytest

from sgl_kvtier.console import envelope
from sgl_kvtier.lab.pages.compare.figures import figures
from sgl_kvtier.lab.pages.compare.page import compare_page
from sgl_kvtier.lab.pages.stats import pair_ratios, percentile, summary

ARMS = ("recompute", "hicache", "hicache-file", "kvtier")
METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")
HOSTILE = '</script><b id=hostile>models & "shapes" <lab-mha>\''
TURNS, SESSIONS, ROUNDS = 8, 4, 3
# Part of a prompt from device, host and storage, by arm.
_SHARES = {
    "recompute": (0.3, 0, 0),
    "hicache": (0.3, 0.2, 0),
    "hicache-file": (0.3, 0.2, 0.3),
    "kvtier": (0.3, 0.2, 0.42),
}


@pytest.fixture
def compare_result() -> dict:
    """A whole result of schema kvtier.compare/1: four arms, one failed request, one unequal output,
    hostile texts.
    """
    return make_result()


@pytest.fixture(scope="session")
def compare_figures() -> list[tuple[str, str]]:
    """Plots and captions of `compare_result`, drawn once: that takes seconds."""
    return list(figures(make_result()))


@pytest.fixture(scope="session")
def compare_text() -> str:
    """The page of `compare_result`. Drawing its plots takes seconds."""
    return compare_page(make_result())


def make_result() -> dict:
    samples = _samples(random.Random(7))
    arms = {name: _arm(name, samples) for name in ARMS}
    medians = {name: _round_medians(name, samples) for name in ARMS}
    ratios = {
        f"kvtier/{other}": {
            "ttft_ms": pair_ratios(medians["kvtier"], medians[other]),
            "ttft_later_ms_mean": pair_ratios(medians["kvtier"], medians[other]),
        }
        for other in ARMS
        if other != "kvtier"
    }
    results = {
        "workload": {
            "source": "../shared/traces/swe_mini",
            "description": "agent sessions, tokens divided by 8",
            "sessions": SESSIONS,
            "requests": SESSIONS * TURNS,
            "rows": [
                {
                    "session": f"s{i}",
                    "turns": TURNS,
                    "first_prompt_tokens": 900 + 7 * i,
                    "output_tokens": 64 * TURNS,
                }
                for i in range(SESSIONS)
            ],
        },
        "settings": {
            "model": HOSTILE,
            "page_size": 64,
            "concurrency": 4,
            "host_memory_bytes": 256 << 20,
            "arms": {name: ["--page-size", "64", "--mem-fraction-static", "0.5"] for name in ARMS},
            "trace": None,
        },
        "summary": "kvtier and hicache-file: three rounds: too few to tell.",
        "rounds": ROUNDS,
        "arms": arms,
        "ratios": ratios,
        "timeline": [_over_time(name, samples) for name in ("hicache-file", "kvtier")],
        "samples": samples,
        "interrupted": False,
        "notes": ["Outputs are generated greedily & fed back.", "Tool gaps are divided by 10."],
    }
    return envelope(
        "kvtier.compare/1", ["kvtier", "compare", "--model-path", HOSTILE, "--rounds", "3"], results
    )


def _samples(rng: random.Random) -> list[dict]:
    return [
        _sample(rng, arm, round_number, session, turn)
        for round_number in range(1, ROUNDS + 1)
        for arm in ARMS
        for session in range(SESSIONS)
        for turn in range(1, TURNS + 1)
    ]


def _sample(rng: random.Random, arm: str, round_number: int, session: int, turn: int) -> dict:
    prompt = 900 + 260 * turn + 7 * session
    device, host, storage = (int(prompt * share * (turn > 1)) // 64 * 64 for share in _SHARES[arm])
    computed = prompt - device - host - storage
    slow = 1.3 if round_number == 2 else 1.0
    ttft = slow * (25 + 0.32 * computed + 0.02 * storage) * rng.lognormvariate(0, 0.22)
    tpot = slow * (11 + (0.5 if arm == "kvtier" else 0)) * rng.lognormvariate(0, 0.06)
    failed = (arm, round_number, session, turn) == ("hicache-file", 3, 1, 8)
    return {
        "arm": arm,
        "round": round_number,
        "session": session,
        "turn": turn,
        "ttft_ms": None if failed else ttft,
        "tpot_ms": None if failed else tpot,
        "e2e_ms": None if failed else ttft + 63 * tpot,
        "prompt_tokens": prompt,
        "output_tokens": 0 if failed else 64,
        "cached": {"device": device, "host": host, "storage": storage},
        "equal": None
        if failed or arm == "recompute"
        else (arm, round_number, session, turn) != ("hicache", 1, 2, 5),
        "error": "HTTP 500" if failed else None,
    }


def _arm(name: str, samples: list[dict]) -> dict:
    mine = [s for s in samples if s["arm"] == name]
    good = [s for s in mine if s["error"] is None]
    known = [s["equal"] for s in good if s["equal"] is not None]
    stored = name in ("hicache-file", "kvtier")
    return {
        **{metric: summary(s[metric] for s in good) for metric in METRICS},
        "ttft_later_ms": summary(s["ttft_ms"] for s in good if s["turn"] > 1),
        "token_gap_ms": summary(s["tpot_ms"] for s in good),
        "equal_tokens_fraction": sum(known) / len(known) if known else None,
        "compared_requests": len(known),
        "cached_tokens": {
            tier: sum(s["cached"][tier] for s in good) for tier in ("device", "host", "storage")
        },
        "requests": len(mine),
        "errors": len(mine) - len(good),
        "throughput_tokens_per_s": 64 * len(good) / (sum(s["e2e_ms"] for s in good) / 4 / 1000),
        "bytes": {"read": 412 << 20 if stored else 0, "written": 777 << 20 if stored else None},
        "restore": None,
        "failure": None,
        "skipped": None,
    }


def _over_time(arm: str, samples: list[dict]) -> dict:
    """The first round of an arm: each session's requests a second apart, a reading a second."""
    requests, free = [], dict.fromkeys(range(SESSIONS), 0.0)
    for one in samples:
        if (one["arm"], one["round"]) == (arm, 1):
            begin = free[one["session"]] + 1.0
            first, end = begin + one["ttft_ms"] / 1000, begin + one["e2e_ms"] / 1000
            free[one["session"]] = end
            requests.append(
                {
                    "session": one["session"],
                    "turn": one["turn"],
                    "begin_s": begin,
                    "first_s": first,
                    "end_s": end,
                    "computing_s": [[begin + 0.4 * (first - begin), first]],
                    "loading_s": [[begin + 0.1 * (first - begin), begin + 0.3 * (first - begin)]]
                    if arm == "kvtier"
                    else None,
                }
            )
    tiers = [
        {
            "t_s": float(second),
            "device": min(4096, 800 * second),
            "host": min(6144, 700 * second),
            "storage": 650 * second,
            "read_bytes": (9 << 20) * max(0, second - 4),
            "written_bytes": (30 << 20) * second,
            "to_device_bytes": (50 << 20) * second,
            "to_host_bytes": (60 << 20) * second,
        }
        for second in range(int(max(free.values())) + 1)
    ]
    return {"arm": arm, "round": 1, "requests": requests, "tiers": tiers}


def _round_medians(name: str, samples: list[dict]) -> list[float | None]:
    return [
        percentile([s["ttft_ms"] for s in samples if s["arm"] == name and s["round"] == number], 50)
        for number in range(1, ROUNDS + 1)
    ]
