"""A real server for tests: launched with our backend or another, asked over HTTP, always stopped."""

from __future__ import annotations

import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forking import CHANGES, Forked

from sgl_kvtier.lab.outside.lab_model import write_model
from sgl_kvtier.lab.outside.server import Launch, Server

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
}
_CHANGED = str(Path(__file__).parent / "changed_site")
Record = Callable[[str, object], None]
"""pytest's `record_property`: notes something in the report of the tests (`--junitxml`)."""
ADMIN = {"Authorization": "Bearer test-admin"}
STORAGE = "/hicache/storage-backend"
RANK_LABELS = ("tp_rank", "pp_rank", "dp_rank", "pid")
TOKENS = 600
"""Length of a prompt here: more than SGLang's threshold for reading from storage, 256 tokens."""


@dataclass(frozen=True)
class Answer:
    """Output tokens, their log-probs, and where the prompt's tokens came from."""

    tokens: list[int]
    logprobs: list[float]
    device: int
    host: int
    storage: int
    cached: int


class Served:
    """A running server: questions and upkeep."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(self, ids: Sequence[int], tokens: int = 6, **more: Any) -> Answer:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
            **more,
        }
        answer = self.call("POST", "/generate", body)
        meta = answer["meta_info"]
        where = meta.get("cached_tokens_details") or {}
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        split = [where.get(tier) or 0 for tier in ("device", "host", "storage")]
        return Answer(answer["output_ids"], logprobs, *split, meta["cached_tokens"])

    def ask_all(
        self, asked: Sequence[Sequence[int]], at_once: int, tokens: int = 6
    ) -> list[Answer]:
        """The answers to these prompts, several of which are asked at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda ids: self.ask(ids, tokens), asked))

    def attach(self, config: Path, **more: str) -> None:
        """Attaches our backend to a server that has none. `more` are fields of SGLang's request."""
        told = {
            "hicache_storage_backend": "kvtier",
            "hicache_storage_backend_extra_config_json": config.read_text(),
            "hicache_storage_prefetch_policy": "wait_complete",
            **more,
        }
        self.call("PUT", STORAGE, told, ADMIN)

    def hint(self, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        """What POST /kvtier/hint answers, by default to who has the admin key."""
        return self.call("POST", "/kvtier/hint", fields, ADMIN if headers is None else headers)

    def flush(self) -> None:
        """Waits until write-back has come to rest, then empties device and host caches."""
        self.settle()
        self.call("POST", "/flush_cache", {}, ADMIN)

    def restore(self, mode: str) -> None:
        """Switches how prefixes come back, from the next request on."""
        place = ("auto", "both", "load", "compute", "off").index(mode)
        self.call(
            "POST", "/set_internal_state", {"server_args": {"kvtier.policy.restore": place}}, ADMIN
        )

    def settle(self) -> None:
        """Waits until the store has the same number of pages three times in a row."""
        seen: list[float] = []
        for _ in range(60):
            seen.append(self.metric("kvtier:store_pages"))
            if len(seen) > 3 and len(set(seen[-3:])) == 1:
                return
            time.sleep(0.6)

    def metric(self, name: str) -> float:
        """The sum over ranks of a metric; 0 where it is not there (another backend)."""
        return sum(value for found, _, value in self.samples() if found == name)

    def samples(self, prefix: str = "") -> Iterator[tuple[str, dict[str, str], float]]:
        """The labelled metrics of a prefix, such as `kvtier:restore_`: name without it, labels and
        value.
        """
        for line in self.call("GET", "/metrics", None, raw=True).splitlines():
            if match := re.match(rf"{prefix}(\S+?)\{{(.*)\}} (\S+)", line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
                yield match[1], labels, float(match[3])

    def counts(self, prefix: str) -> dict[str, float]:
        """By name and labels that are not a rank's; of several ranks the last one counts."""
        return {series(name, labels): value for name, labels, value in self.samples(prefix)}

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        raw: bool = False,
        timeout_s: float = 300,
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.server.url + path,
            data=data,
            method=method,
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read().decode()
        if raw:
            return text
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text


def series(name: str, labels: dict[str, str]) -> str:
    """A metric's name, and the labels that are not a rank's, in order."""
    own = sorted(text for key, text in labels.items() if key not in RANK_LABELS)
    return " ".join([name, *own])


def prompts(count: int, tokens: int = TOKENS, seed: int = 0) -> list[list[int]]:
    """Random prompts that share no prefix, in a lab model's vocabulary."""
    rng = random.Random(seed)
    return [[rng.randrange(4, 500) for _ in range(tokens)] for _ in range(count)]


def config_file(folder: Path, **sections: Any) -> Path:
    """A kvtier.json for a store below `folder`; more sections, or settings of the store, by
    keyword. `throttle` and `faults` go into the laboratory's section.

    Prefixes are loaded whole unless a test says otherwise: how much of one is computed instead
    depends on the machine.
    """
    store = {
        "path": str(folder / "store"),
        "capacity_bytes": "256MiB",
        "min_free_bytes": 0,
        "segment_bytes": "8MiB",
    }
    store.update(sections.pop("store", {}))
    lab = sections.pop("lab", {}) | {
        name: sections.pop(name) for name in ("throttle", "faults") if name in sections
    }
    path = folder / "kvtier.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps(
            {
                "store": store,
                "prefetch_threshold": 64,
                "policy": {"restore": "load"},
                "lab": lab,
                **sections,
            }
        )
    )
    return path


def flags(
    model: str = "tiny-qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    backend: str | None = "kvtier",
    **more: Any,
):
    """Launch arguments of a small server, and `more` ones; None leaves one away."""
    values: dict[str, Any] = {
        "model_path": str(write_model(model, seed=seed)),
        "dtype": dtype,
        "max_total_tokens": 4096,
        "context_length": 4096,
        "chunked_prefill_size": 256,
        "max_running_requests": 8,
        "enable_hierarchical_cache": backend is not None,
        "hicache_ratio": 2 if backend else None,
        "hicache_storage_backend": backend,
        "hicache_storage_prefetch_policy": "wait_complete" if backend else None,
        "sleep_on_idle": True,  # several servers share this machine's cores
        "enable_metrics": True,
        "enable_cache_report": True,
        "admin_api_key": "test-admin",
        **more,
    }
    arguments: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if value is not True:
            arguments.append(str(value))
    return arguments


@contextmanager
def serving(
    folder: Path, arguments: Sequence[str], config: Path | None = None, **env: str
) -> Iterator[Served]:
    """A server that answers, stopped at the end whatever happens."""
    extra = ["--hicache-storage-backend-extra-config", f"@{config}"] if config else []
    launch = Launch((*arguments, *extra), {**STRICT, **env})
    start = Forked if _is_forked(env) else Server
    with start(folder.name, launch, folder) as server:
        server.wait_until_healthy(420)
        yield Served(server)


def _is_forked(env: Mapping[str, str]) -> bool:
    """Whether only a running server reads these variables, or they are those of `changed`."""
    late = ("PYTHONPATH", "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER", *CHANGES)
    known = all(name in late or name.startswith("KVTIER_") for name in env)
    return known and env.get("PYTHONPATH", _CHANGED).startswith(_CHANGED)


def changed(**told: Path) -> dict[str, str]:
    """Variables of a server that `changed_site` changes, as `told` says there."""
    paths = [_CHANGED, os.environ.get("PYTHONPATH", "")]
    variables = {name: str(value) for name, value in told.items()}
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


def refused(folder: Path, arguments: Sequence[str], config: Path | None = None, **env: str) -> str:
    """The log of a server that must refuse to start; fails when it starts."""
    from sgl_kvtier.errors import BenchError

    try:
        with serving(folder, arguments, config, **env):
            pass
    except BenchError:
        return (folder / "server.log").read_text(errors="replace")
    raise AssertionError("the server started although it should have refused")
