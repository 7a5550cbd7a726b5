"""The options of `kvtier bench attention`, apart from the benchmark so that `--help` does not
import torch.
"""

from __future__ import annotations

import argparse

from sgl_kvtier.arguments import count, positive
from sgl_kvtier.errors import BenchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier bench attention`."""
    parser.add_argument(
        "--tokens", type=positive, default=8192, help="prompt length (default 8192)"
    )
    parser.add_argument("--chunk", type=positive, default=512, help="chunk length (default 512)")
    parser.add_argument(
        "--heads", default="8/8", metavar="Q/KV", help="query and KV heads (default 8/8)"
    )
    parser.add_argument("--head-dim", type=positive, default=64, help="default 64")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=positive, default=5, help="default 5")
    parser.add_argument(
        "--threads", type=count, default=0, help="torch threads (default: torch's own choice)"
    )
    parser.add_argument("--json", metavar="FILE", help="results as JSON; - for standard output")
    parser.add_argument("--plot", metavar="FILE", help="cost by chunk index as an SVG file")


def run(args: argparse.Namespace) -> int:
    """Imports torch and SGLang and measures; the exit status. Raises BenchError where they are not
    installed.
    """
    try:
        from sgl_kvtier.lab.attention import benchmark as attention_benchmark
    except ImportError as error:
        raise BenchError(
            f"this benchmark needs SGLang: pip install 'sgl-kvtier[sglang]' ({error})"
        ) from error
    return attention_benchmark.run(args)
