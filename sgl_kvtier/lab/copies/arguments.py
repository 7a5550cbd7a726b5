"""The options of `kvtier bench copies`, apart from the benchmark so that `--help` does not import
torch.
"""

from __future__ import annotations

import argparse

from sgl_kvtier.arguments import positive
from sgl_kvtier.errors import BenchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier bench copies`."""
    parser.add_argument(
        "--layers", default="32,80", metavar="N,...", help="numbers of layers (default 32,80)"
    )
    parser.add_argument(
        "--heads", type=positive, default=8, help="KV heads of 128 in bfloat16 (default 8)"
    )
    parser.add_argument("--page", type=positive, default=64, help="tokens per page (default 64)")
    parser.add_argument("--rounds", type=positive, default=200, help="default 200")
    parser.add_argument("--json", metavar="FILE", help="results as JSON; - for standard output")


def run(args: argparse.Namespace) -> int:
    """Imports torch, Triton and SGLang and measures; the exit status. Raises BenchError where they
    are not installed.
    """
    try:
        from sgl_kvtier.lab.copies import benchmark
    except ImportError as error:
        raise BenchError(
            f"this benchmark needs SGLang and Triton: pip install 'sgl-kvtier[sglang]' ({error})"
        ) from error
    return benchmark.run(args)
