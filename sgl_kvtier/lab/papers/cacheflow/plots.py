"""Plots of CacheFlow's experiments, as SVG text by file name. Needs the extra [lab]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from sgl_kvtier.lab.pages.plots import Series, cdf, lines
from sgl_kvtier.lab.papers.cacheflow.command import batch_runs, ttfts
from sgl_kvtier.lab.papers.cacheflow.model import axis_seconds
from sgl_kvtier.lab.papers.cacheflow.rig import ARMS, SCENARIOS, Place, Prompt, default, rig, serve


def figure_3() -> str:
    """Restoration by tokens and by layers over the prefix length."""
    scene, engine = SCENARIOS["fig3"], SCENARIOS["engine"]
    lengths = [n * engine["page_tokens"] for n in (*range(2, 16), *range(16, 129, 4))]
    hardware, model, gbps = scene["hardware"][1], scene["models"][0], scene["gbps"][1]
    both = [axis_seconds(hardware, model, gbps, tokens) for tokens in lengths]
    series = [
        Series("by tokens", lengths, [1e3 * one[0] for one in both]),
        Series("by layers", lengths, [1e3 * one[1] for one in both]),
    ]
    title = f"Figure 3: {model} on {hardware}, {gbps:g} Gbit/s"
    return lines(series, title, "prefix tokens", "milliseconds", log_x=True, log_y=True)


def figure_4() -> str:
    """Time to first token on SWE-Bench sessions, 10 Gbit/s."""
    return _ttft_cdf(default(), "SWE-Bench at 10 Gbit/s, H100, Qwen3-8B")


def figure_7b() -> str:
    """The same at 40 Gbit/s."""
    return _ttft_cdf(default(gbps=40.0), "SWE-Bench at 40 Gbit/s, H100, Qwen3-8B")


def figure_6() -> str:
    """Time to first token by length, one request at a time."""
    scene = SCENARIOS["fig6"]
    place = rig(default())
    series = [
        Series(
            arm,
            scene["tokens"],
            [
                serve(place, [Prompt(0.0, tokens, scene["new_tokens"])], arm).ttfts()[0]
                for tokens in scene["tokens"]
            ],
        )
        for arm in ARMS
    ]
    return lines(series, "Figure 6: TTFT by length", "prefix tokens", "seconds")


def figure_9() -> str:
    """Mean time to first token by batch size, over ours."""
    batches = SCENARIOS["fig9"]["batches"]
    means = {
        arm: [fmean(t for run in batch_runs(batch)[arm] for t in run) for batch in batches]
        for arm in ARMS
    }
    series = [
        Series(
            arm, batches, [mine / ours for mine, ours in zip(seconds, means["kvtier"], strict=True)]
        )
        for arm, seconds in means.items()
    ]
    return lines(
        series, "Figure 9: mean TTFT over ours, L40S", "requests at once", "ratio", whole_x=True
    )


def _ttft_cdf(place: Place, title: str) -> str:
    runs = ttfts(place, "SWE-Bench")
    samples = {arm: [1e3 * t for run in runs[arm] for t in run] for arm in ARMS}
    return cdf(samples, title, "TTFT (ms)")


PLOTS: Mapping[str, Callable[[], str]] = {
    "cacheflow-fig3": figure_3,
    "cacheflow-fig4": figure_4,
    "cacheflow-fig6": figure_6,
    "cacheflow-fig7b": figure_7b,
    "cacheflow-fig9": figure_9,
}
