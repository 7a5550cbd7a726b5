"""The cost of one prefill chunk's attention by its position in the prompt: SGLang's torch_native
and ours, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    print_table,
    progress,
    write_json,
)
from sgl_kvtier.errors import BenchError
from sgl_kvtier.runtime.cpu.attention import ChunkAttentionBackend

SCHEMA = "kvtier.bench.attention/1"
_PAGE = 16


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes JSON and plot. Raises KVTierError on arguments that cannot
    be measured.
    """
    q_heads, kv_heads = _heads(args.heads)
    if args.chunk < 1 or args.tokens < args.chunk or args.rounds < 1:
        raise BenchError("--tokens must be at least --chunk, and --chunk and --rounds at least 1")
    for target in filter(None, (args.json, args.plot)):
        check_target(target)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    work = _Prompt(args.tokens, q_heads, kv_heads, args.head_dim, getattr(torch, args.dtype))
    rows = _measure(work, args)
    total = {arm: sum(row[f"{arm}_ms"] for row in rows) for arm in ("stock", "ours")}
    title = f"attention per chunk, one layer: {args.heads} heads x {args.head_dim}, {args.dtype}"
    table = Table(
        title,
        (
            Column("chunk", "chunk"),
            Column("prefix", "prefix tokens"),
            Column("stock_ms", "torch_native", unit="ms", decimals=2),
            Column("ours_ms", "kvtier_cpu", unit="ms", decimals=2),
            Column("ratio", "ratio", decimals=1),
            Column("max_difference", "largest difference", format="{:.1e}".format),
        ),
        rows,
        notes=(
            f"medians of {args.rounds} rounds, arms in turn; whole prompt {total['stock']:.0f} and "
            f"{total['ours']:.0f} ms",
        ),
    )
    if args.json != "-":
        print_table(table)
    if args.json:
        settings = {
            key: value
            for key, value in vars(args).items()
            if key not in ("json", "plot", "part", "run_part")
        }
        results = {
            "settings": {**settings, "threads": torch.get_num_threads()},
            "chunks": rows,
            "total_ms": total,
        }
        write_json(envelope(SCHEMA, sys.argv, results), args.json)
    if args.plot:
        _plot(rows, title, args.plot)
    return 0


class _Prompt:
    """Random queries, keys and values of one prompt whose pages lie in a shuffled pool."""

    def __init__(
        self, tokens: int, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        pages = -(-tokens // _PAGE)
        self.q = torch.randn((tokens, q_heads, dim), generator=generator).to(dtype)
        self.k, self.v = (
            torch.randn((pages * _PAGE, kv_heads, dim), generator=generator).to(dtype)
            for _ in range(2)
        )
        order = torch.randperm(pages, generator=generator)
        self.rows = (
            (order[:, None] * _PAGE + torch.arange(_PAGE)).flatten()[None, :tokens].to(torch.int32)
        )
        self.grouped = q_heads != kv_heads
        self.out = torch.empty_like(self.q)
        fake = SimpleNamespace(
            device="cpu",
            req_to_token_pool=None,
            token_to_kv_pool=None,
            sliding_window_size=None,
            server_args=SimpleNamespace(page_size=_PAGE),
        )
        self.arms: dict[str, Any] = {
            "stock": TorchNativeAttnBackend(fake),
            "ours": ChunkAttentionBackend(fake),
        }

    def attend(self, arm: str, start: int, stop: int) -> tuple[float, torch.Tensor]:
        """Seconds for one chunk, and its output."""
        out = self.out[start:stop]
        lengths = (torch.tensor([stop]), torch.tensor([start]), torch.tensor([stop - start]))
        begun = time.perf_counter()
        self.arms[arm]._run_sdpa_forward_extend(
            self.q[start:stop], out, self.k, self.v, self.rows, torch.tensor([0]), *lengths,
            scaling=None, enable_gqa=self.grouped, causal=True, is_cross_attn=False,
        )  # fmt: skip
        return time.perf_counter() - begun, out.clone()


def _measure(work: _Prompt, args: argparse.Namespace) -> list[dict[str, Any]]:
    starts = range(0, args.tokens - args.chunk + 1, args.chunk)
    seconds: dict[tuple[int, str], list[float]] = {
        (s, arm): [] for s in starts for arm in work.arms
    }
    difference = dict.fromkeys(starts, 0.0)
    with progress("attention", total=len(starts) * args.rounds) as bar:
        for turn in range(args.rounds + 1):  # the first is for warming up
            for start in starts:
                outputs = {}
                for arm in list(work.arms)[:: 1 if turn % 2 else -1]:
                    took, outputs[arm] = work.attend(arm, start, start + args.chunk)
                    if turn:
                        seconds[start, arm].append(took)
                apart = (outputs["stock"].float() - outputs["ours"].float()).abs().max().item()
                difference[start] = max(difference[start], apart)
                if turn:
                    bar.advance()
    rows = []
    for index, start in enumerate(starts):
        stock, ours = (statistics.median(seconds[start, arm]) * 1000 for arm in ("stock", "ours"))
        rows.append(
            {
                "chunk": index,
                "prefix": start,
                "stock_ms": stock,
                "ours_ms": ours,
                "ratio": stock / ours,
                "max_difference": difference[start],
            }
        )
    return rows


def _plot(rows: list[dict[str, Any]], title: str, path: str) -> None:
    from sgl_kvtier.lab.pages import (
        figure,  # matplotlib is an extra
        plots,  # matplotlib is an extra
    )

    index = [float(row["chunk"]) for row in rows]
    series = [
        plots.Series("SGLang torch_native", index, [row["stock_ms"] for row in rows]),
        plots.Series("kvtier_cpu", index, [row["ours_ms"] for row in rows]),
    ]
    figure.save_plot(
        plots.lines(series, title, "chunk index", "milliseconds per layer", whole_x=True), path
    )


def _heads(text: str) -> tuple[int, int]:
    try:
        q_heads, kv_heads = (int(part) for part in text.split("/"))
    except ValueError:
        raise BenchError(f"--heads {text!r}: two whole numbers such as 8/2") from None
    if kv_heads < 1 or q_heads % kv_heads:
        raise BenchError(f"--heads {text}: query heads must be a multiple of KV heads")
    return q_heads, kv_heads
