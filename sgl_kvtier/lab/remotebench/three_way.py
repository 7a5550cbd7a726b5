"""What a third way adds: a prompt that lies half on a server's disk and half in a store that others
wrote, against one link, on two real servers.

    python -m sgl_kvtier.lab.remotebench.three_way --json three.json

Server A computes all prompts and shares them over the memory engine. Server B restores them. Its
disk and its network are slowed down so far that either alone would bring a prompt in the time that
A took to compute one. Ways take turns, each with prompts of its own:

    compute   nothing is loaded
    network   all over the network, nothing computed
    ends      over the network, with the front computed beside it
    links     half from the disk, half over the network, nothing computed
    three     the same with the front computed beside it
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import positive
from sgl_kvtier.console import envelope, write_json
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside.lab_model import write_model
from sgl_kvtier.lab.outside.server import Launch, Server, end_on_signals

SCHEMA = "kvtier.remote.three-way/1"
PAGE, CHUNK = 16, 256
_ADMIN = {"Authorization": "Bearer three-way"}
_WAYS = {
    "compute": ("compute", False),
    "network": ("load", False),
    "ends": ("both", False),
    "links": ("load", True),
    "three": ("both", True),
}
"""The mode of restoring, and whether half of the prompt lies on the disk."""
_MODES = ("auto", "both", "load", "compute", "off")
_PATIENCE_S = 120.0


def main(arguments: Sequence[str]) -> int:
    """Runs it and prints the medians. Raises BenchError."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="lab-mha", help="a lab model (default %(default)s)")
    parser.add_argument("--tokens", type=positive, default=1536, help="default %(default)s")
    parser.add_argument("--rounds", type=positive, default=3, help="default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    args = parser.parse_args(arguments)
    with end_on_signals(), tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args.model, args.tokens, args.rounds)
    if args.json:
        write_json(envelope(SCHEMA, sys.argv, found), args.json)
    for way, one in found["ways"].items():
        print(f"{way:8} {one['median_s']:.2f} s  of {[round(s, 2) for s in one['seconds']]}")
    return 0


def measure(folder: Path, model: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds to the first token of every way, round by round."""
    rng = random.Random(1)
    prompts = {
        way: [[rng.randrange(4, 500) for _ in range(tokens)] for _ in range(rounds)]
        for way in _WAYS
    }
    engine = folder / "engine"
    engine.mkdir()
    weights = str(write_model(model))
    pages = (tokens - 1) // PAGE
    with _serving(folder / "a", weights, tokens, {"remote": _remote(engine)}) as a:
        _until(lambda: a.metric("kvtier:remote_up") == 1)
        computed = [a.ask(prompt) for each in prompts.values() for prompt in each]
        count = pages * len(computed)
        _until(lambda: a.metric("kvtier:remote_pages_sent_total") >= count)
        nbytes = a.metric("kvtier:bytes_written_total") / count * pages
    firsts = dict(
        zip(prompts, _cut([tokens_out for _, tokens_out in computed], rounds), strict=True)
    )
    compute_s = statistics.median(seconds for seconds, _ in computed[1:])
    limit = {"read_gbps": nbytes * 8e-9 / compute_s}
    sections = {
        "remote": _remote(engine),
        "lab": {"throttle": limit, "remote_throttle": limit},
        "policy": {"restore": "load", "min_restore_tokens": 64},
    }
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    equal = 0
    with _serving(folder / "b", weights, tokens, sections) as b:
        _until(lambda: b.metric("kvtier:remote_up") == 1)
        _prepare(b, [each for way, each in prompts.items() if _WAYS[way][1]], tokens)
        for place in range(rounds):
            for way, (mode, _) in _WAYS.items():
                b.restore(mode)
                took_s, out = b.ask(prompts[way][place])
                seconds[way].append(took_s)
                equal += out == firsts[way][place]
        loaded = {
            link: b.metric("kvtier:restore_loaded_bytes_total", f'link="{link}-device"')
            for link in ("storage", "remote")
        }
    return {
        "model": model,
        "tokens": tokens,
        "page_tokens": PAGE,
        "prompt_bytes": nbytes,
        "compute_s": compute_s,
        "read_gbps": limit["read_gbps"],
        "answers": rounds * len(_WAYS),
        "equal_answers": equal,
        "loaded_bytes": loaded,
        "ways": {
            way: {"seconds": each, "median_s": statistics.median(each)}
            for way, each in seconds.items()
        },
    }


def _prepare(b: _Asked, groups: Sequence[Sequence[Sequence[int]]], tokens: int) -> None:
    """The first half of these prompts comes to the server's own disk. Host memory is emptied."""
    half = tokens // 2 // PAGE * PAGE
    halves = [prompt[: half + 1] for group in groups for prompt in group]
    for ids in halves:
        b.ask(ids)
    _until(lambda: b.metric("kvtier:store_pages") >= len(halves) * half // PAGE)
    time.sleep(2.0)
    b.call("/flush_cache", {})


def _cut(values: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(values[low : low + size]) for low in range(0, len(values), size)]


def _remote(engine: Path) -> dict[str, Any]:
    return {"engine": "memory", "master": str(engine)}


def _until(holds: Any) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            raise BenchError(f"what was waited for did not come in {_PATIENCE_S:.0f} s")
        time.sleep(0.3)


class _serving:
    """A server that answers, stopped at the end."""

    def __init__(self, folder: Path, model: str, tokens: int, sections: dict[str, Any]) -> None:
        folder.mkdir()
        config = folder / "kvtier.json"
        store = {"path": str(folder / "store"), "capacity_bytes": "2GiB", "min_free_bytes": 0}
        config.write_text(json.dumps({"store": store, "prefetch_threshold": 64, **sections}))
        arguments = (
            f"--model-path {model} --dtype float32 --page-size {PAGE} --max-total-tokens "
            f"{4 * tokens} --context-length {2 * tokens} --chunked-prefill-size {CHUNK} "
            "--enable-hierarchical-cache --hicache-ratio 2 --hicache-storage-backend kvtier "
            "--hicache-storage-prefetch-policy wait_complete --sleep-on-idle --enable-metrics "
            f"--admin-api-key three-way --hicache-storage-backend-extra-config @{config}"
        )
        env = {"OMP_WAIT_POLICY": "PASSIVE"}
        self._server = Server(folder.name, Launch(tuple(arguments.split()), env), folder)

    def __enter__(self) -> _Asked:
        self._server.__enter__()
        self._server.wait_until_healthy(300)
        return _Asked(self._server.url)

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(*error)


class _Asked:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, ids: Sequence[int]) -> tuple[float, list[int]]:
        """Seconds until the answer, which is one token, and that token."""
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        begun = time.monotonic()
        answer = self.call("/generate", {"input_ids": list(ids), "sampling_params": sampling})
        return time.monotonic() - begun, json.loads(answer)["output_ids"]

    def restore(self, mode: str) -> None:
        """Switches how prefixes come back."""
        setting = {"kvtier.policy.restore": _MODES.index(mode)}
        self.call("/set_internal_state", {"server_args": setting})

    def metric(self, name: str, label: str = "") -> float:
        """The sum over a metric's rows with this label. Raises BenchError where it has none."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as response:
            rows = response.read().decode().splitlines()
        named = [row for row in rows if row.startswith(name + "{")]
        if not named:
            raise BenchError(f"the server has no metric {name}")
        return sum(float(row.rsplit(" ", 1)[1]) for row in named if label in row)

    def call(self, path: str, body: dict[str, Any]) -> str:
        """Posts and returns the answer's text."""
        request = urllib.request.Request(
            self._url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **_ADMIN},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return str(response.read().decode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
