"""`kvtier bench PART`: measurements of single parts, each with both sides in one run."""

from __future__ import annotations

import argparse

from sgl_kvtier.errors import BenchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one sub-command per part."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    attention = parts.add_parser("attention", help="CPU prefill attention per chunk, torch_native and ours in turn")
    attention.add_argument("--tokens", type=int, default=8192, help="prompt length (default 8192)")
    attention.add_argument("--chunk", type=int, default=512, help="chunk length (default 512)")
    attention.add_argument("--heads", default="8/8", metavar="Q/KV", help="query and KV heads (default 8/8)")
    attention.add_argument("--head-dim", type=int, default=64, help="default 64")
    attention.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    attention.add_argument("--rounds", type=int, default=5, help="default 5")
    attention.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's own choice)")
    attention.add_argument("--json", metavar="FILE", help="results as JSON; - for standard output")
    attention.add_argument("--plot", metavar="FILE", help="cost by chunk index as an SVG file")


def run(args: argparse.Namespace) -> int:
    """Carries out one benchmark; the exit status. Raises KVTierError."""
    try:
        from sgl_kvtier.runtime.cpu import attention_benchmark  # imports torch and SGLang
    except ImportError as error:
        raise BenchError(f"this benchmark needs SGLang: pip install 'sgl-kvtier[sglang]' ({error})") from error
    return attention_benchmark.run(args)
