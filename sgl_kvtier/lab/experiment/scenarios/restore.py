"""`kvtier compare restore`, also `kvtier bench restore`: one restoration at a time, or several."""

from __future__ import annotations

import argparse

from sgl_kvtier.lab.experiment.frame import check
from sgl_kvtier.lab.experiment.scenarios.restore_arguments import add_arguments, check_arguments
from sgl_kvtier.lab.experiment.scenarios.restore_batches import run_batches
from sgl_kvtier.lab.experiment.scenarios.restore_grid import run_grid

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measures and reports. The exit status: 0, 1 when tokens or log-probs of an answer differed or
    a request failed, 130 after Ctrl-C. Raises KVTierError; where the bench could not go on, after
    what had been measured is reported.
    """
    check(args, starts_servers=args.url is None)
    check_arguments(args)
    return run_batches(args) if args.at_once else run_grid(args)
