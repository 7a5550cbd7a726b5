"""Prompts, the answers of transformers to them, and servers on the stand-in that are asked them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import Answer, Served, config_file, flags, prompts, serving

from served.launch import served_environment, served_flags
from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.lab.outside.lab_model import write_model
from sgl_kvtier.launch import serve_flags

MODEL = "tiny-llama"
PAGE = 16
TOKENS = 6
CLOSE = 1e-4
"""Of two log-probs of one token in float32: chunks of a prefill that end elsewhere add in another
order. Between a right page and a wrong one are more than ten times as much.
"""
DIRECT = ("direct", "page_first_direct")
KERNEL = ("kernel", "page_first")
UNPROVEN: dict[str, Any] = (
    {"proof": "off"} if "proof" in getattr(PolicyConfig, "__dataclass_fields__", {}) else {}
)
"""Settings under which nothing stands between a mistake in a copy and an answer."""


@dataclass(frozen=True)
class Wanted:
    """What a model answers that has no cache: tokens and their log-probs."""

    tokens: list[int]
    logprobs: list[float]

    def is_met(self, answer: Answer | Wanted) -> bool:
        """Whether an answer has the same tokens, with the same log-probs."""
        pairs = zip(self.logprobs, answer.logprobs, strict=True)
        return self.tokens == answer.tokens and all(abs(a - b) < CLOSE for a, b in pairs)


def wanted(
    asked: Sequence[Sequence[int]], tokens: int = TOKENS, path: Path | None = None
) -> list[Wanted]:
    """What transformers answers with the model in `path` (default: `MODEL`), in float32 on the CPU:
    it shares no code with SGLang.
    """
    import torch
    import transformers

    path = path or write_model(MODEL, seed=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for ids in asked:
            said, logprobs = list(ids), []
            for _ in range(tokens):
                scores = torch.log_softmax(model(torch.tensor([said])).logits[0, -1], -1)
                said.append(int(scores.argmax()))
                logprobs.append(float(scores[said[-1]]))
            found.append(Wanted(said[len(ids) :], logprobs))
    return found


@contextmanager
def on_stand_in(
    folder: Path,
    way: tuple[str, str] = DIRECT,
    *,
    graphs: Sequence[int] = (),
    ranks: int = 1,
    seed: int = 1,
    jitter_us: int = 300,
    bus_gbps: float = 0.0,
    read_gbps: float = 0.05,
    nvcc: bool = False,
    policy: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    **more: Any,
) -> Iterator[Served]:
    """A server that restores (policy both, every page compared with the store's) on a stand-in with
    these delays. `nvcc`: it compiles SGLang's kernels. `more` are further flags, `env` further
    variables.
    """
    io, layout = way
    arguments = flags(
        MODEL,
        hicache_io_backend=io,
        hicache_mem_layout=layout,
        tp_size=ranks,
        decode_log_interval=1,  # which says of each forward whether a graph ran it
        **{"page_size": PAGE, **more},
    )
    sections: dict[str, Any] = {
        "policy": {"restore": "both", "min_restore_tokens": 4 * PAGE, **(policy or {})},
        "lab": {"audit": True},
    }
    if read_gbps:
        sections["throttle"] = {"read_gbps": read_gbps}
    variables = served_environment(
        seed=seed, jitter_us=jitter_us, bus_gbps=bus_gbps, devices=ranks, nvcc=nvcc
    )
    with serving(
        folder,
        [*arguments, *served_flags(graphs, ranks)],
        config_file(folder, **sections),
        **variables,
        **(env or {}),
    ) as server:
        assert "the CUDA stand-in is in place" in log_of(server)
        yield server


BESIDE = [
    "--max-total-tokens", "4096", "--context-length", "4096", "--max-running-requests", "8",
    "--dtype", "float32", "--sleep-on-idle", "--admin-api-key", "test-admin",
]  # fmt: skip
"""Beside the README's launch line: pools that fit the memory of the host, which is the GPU's here,
numbers that can be compared with those of transformers, and the key to flush caches.
"""


@contextmanager
def on_launch_line(
    folder: Path, *, graphs: Sequence[int] = (), seed: int = 1, env: dict[str, str] | None = None
) -> Iterator[Served]:
    """A server that is started with the launch line of the README (`tier_flags`; tests/house
    compares them) and a kvtier.json of one setting. All of kvtier's settings are its defaults.
    `env` are further variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "kvtier.json"
    config.write_text(json.dumps({"store": {"path": str(folder / "store")}}))
    model = str(write_model(MODEL, seed=0))
    arguments = serve_flags(model, "cuda", f"@{config}", [*BESIDE, *served_flags(graphs)])
    variables = served_environment(seed=seed, jitter_us=300)
    with serving(folder, arguments, **variables, **(env or {})) as server:
        assert "the CUDA stand-in is in place" in log_of(server)
        yield server


def log_of(server: Served) -> str:
    """What the server has said so far."""
    return (server.server.folder / "server.log").read_text(errors="replace")


def counted(server: Served, name: str, label: str) -> dict[str, int]:
    """A counter of kvtier's by one of its labels, summed over ranks. Counts of 0 are left out."""
    found: dict[str, int] = {}
    for line in server.call("GET", "/metrics", raw=True).splitlines():
        if line.startswith(f"kvtier:{name}{{"):
            value = line.split(f'{label}="')[1].split('"')[0]
            found[value] = found.get(value, 0) + int(float(line.rsplit(" ", 1)[1]))
    return {value: count for value, count in found.items() if count}


def proof(server: Served) -> int | None:
    """The gauge `kvtier:restore_proof`: 0 refuted, 1 proving, 2 proven; None: not published yet."""
    for line in server.call("GET", "/metrics", raw=True).splitlines():
        if line.startswith("kvtier:restore_proof{"):
            return int(float(line.rsplit(" ", 1)[1]))
    return None


def waited_for(condition: Callable[[], bool]) -> bool:
    """Whether it holds, now or within a minute: what a server counts is published twice a second."""
    end = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.3)
    return found


def pages(server: Served) -> dict[str, int]:
    """Restored pages compared with the store's so far, by what was found."""
    return counted(server, "restore_audited_pages_total", "result")


def crowd(server: Served, asked: Sequence[list[int]], at_once: int, seed: int) -> list[Answer]:
    """The answers to all prompts, several asked at a time, in an order of the seed's."""
    order = random.Random(seed).sample(range(len(asked)), len(asked))
    with ThreadPoolExecutor(at_once) as pool:
        answers = dict(zip(order, pool.map(lambda i: server.ask(asked[i]), order), strict=True))
    return [answers[i] for i in range(len(asked))]


def with_shared_prefix(count: int, shared: int, own: int, seed: int) -> list[list[int]]:
    """Prompts of which each is longer than the one before, behind the same tokens."""
    (prefix,) = prompts(1, shared, seed=seed)
    rest = prompts(count, own * count, seed=seed + 1)
    return [[*prefix, *ids[: own + 2 * PAGE * place]] for place, ids in enumerate(rest)]
