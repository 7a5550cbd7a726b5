"""The options of `kvtier bench copy-table`, apart from the measurement so that `--help` does not
import torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_kvtier.arguments import positive
from sgl_kvtier.errors import BenchError
from sgl_kvtier.extras import how_to_install


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier bench copy-table`."""
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda (default); cpu shows the machinery alone",
    )
    parser.add_argument(
        "--pages",
        type=_sizes,
        default=[16, 64, 128],
        metavar="N,N",
        help="tokens per page (default 16,64,128)",
    )
    parser.add_argument(
        "--mib",
        type=_sizes,
        default=[2, 16, 128, 1024],
        metavar="N,N",
        help="of one load (default 2,16,128,1024)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=380,
        help="begin nothing new after so long (default 380); exit status 1 where rows are missing "
        "then",
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="append each row to FILE; what is in it of the same device, shape and torch is not "
        "measured again",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result (- for standard output)")


def run(args: argparse.Namespace) -> int:
    """Imports torch and SGLang and measures; 1 where a way copied wrongly or failed, or a row is
    missing. Raises BenchError where they are not installed, or there is no card.
    """
    try:
        from sgl_kvtier.lab.gpu import copy_table
    except ImportError as error:
        raise BenchError(
            f"this benchmark needs SGLang ({error}): {how_to_install('sglang')}"
        ) from error
    return copy_table.run(args)


def _sizes(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]
