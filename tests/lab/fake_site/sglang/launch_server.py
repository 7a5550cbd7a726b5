"""`python -m sglang.launch_server` of the stand-in: a server process that behaves like an arm, or
fails as told (tests/lab/fake_arms.py).
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fake_arms import Place, build, option, task_of

IGNORING = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('worker', flush=True); time.sleep(600)"


async def serve(arguments: list[str], task: str) -> None:
    place = Place(task, functools.partial(print, flush=True), os._exit)
    async with build(arguments, place).up(int(option(arguments, "--port") or 0)):
        print("ready", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    arguments = sys.argv[1:]
    task = task_of(arguments)
    if task == "refuse":
        print("Traceback: no memory left for you", flush=True)
        sys.exit(3)
    if task == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if task == "child":
        with subprocess.Popen([sys.executable, "-c", IGNORING]):
            asyncio.run(serve(arguments, task))
    asyncio.run(serve(arguments, task))


main()
