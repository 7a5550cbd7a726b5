"""The fuzz on the CUDA stand-in, with the options of `kvtier bench restore-fuzz`:

PYTHONPATH=tests/cuda_stand_in python -m served [OPTIONS] -- --requests 200 --json result.json
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from served.launch import linear_layers, served_environment, served_flags
from served.states import PAGE, STRATEGY, write_state_model

_PROGRAM = "import sys; from sgl_kvtier.cli import main; sys.exit(main(sys.argv[1:]))"


def main() -> None:
    """Becomes the command, in the environment of the stand-in."""
    parser = argparse.ArgumentParser(prog="python -m served", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the delays")
    parser.add_argument("--jitter-us", type=int, default=0, help="longest delay of an operation")
    parser.add_argument("--bus-gbps", type=float, default=0.0, help="of host to device, and back")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, each with a tensor rank")
    parser.add_argument("--graphs", type=int, nargs="*", default=[], help="decode graphs' sizes")
    parser.add_argument("--states", action="store_true", help="a model whose layers keep states")
    parser.add_argument("options", nargs="*", help="of kvtier bench restore-fuzz, behind --")
    asked = parser.parse_args()
    env = served_environment(
        seed=asked.seed,
        jitter_us=asked.jitter_us,
        bus_gbps=asked.bus_gbps,
        devices=asked.ranks,
        nvcc=asked.states,  # for SGLang's kernel that copies them
    )
    flags = [*served_flags(asked.graphs, asked.ranks), "--sleep-on-idle"]
    if asked.states:
        env |= linear_layers()
        folder = Path(tempfile.mkdtemp(prefix="kvtier-states-"))
        flags += [f"--model-path={write_state_model(folder / 'model')}", STRATEGY]
    command = ["bench", "restore-fuzz", "--device", "cuda", "--tp", str(asked.ranks)]
    command += ["--model", "tiny-llama", "--dtype", "float32", *asked.options]
    command += ["--page-size", str(PAGE)] if asked.states else []
    command += [f"--server-arg={flag}" for flag in flags]
    os.execve(sys.executable, [sys.executable, "-c", _PROGRAM, *command], env)


main()
