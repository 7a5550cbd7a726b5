"""The server a restoration is measured on: kvtier as storage behind a throttle, started here or
running already.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sgl_kvtier.lab.experiment.arms import OURS, Setup, prepare
from sgl_kvtier.lab.experiment.restore.arms import FIXED_SPLITS
from sgl_kvtier.lab.outside.lab_model import UNWEIGHTED, check_heads, is_ours, write_named
from sgl_kvtier.lab.outside.server import Launch, Server

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
"""SGLang checks its memory accounts in every step and ends the process when they are wrong."""

_SPARE_TOKENS = 2048


@dataclass(frozen=True)
class Target:
    """A server to be measured. `pid` None: its processor use is not told from that of others."""

    model: str
    url: str
    admin_key: str | None
    pid: int | None
    page: int
    chunk: int
    command: Sequence[str] = ()


@dataclass(frozen=True)
class LabServer:
    """What to start. `longest` is the longest prefix that will be restored; `strict` turns SGLang's
    own checks on; `decision_log` is the file of that name in the server's settings, or empty;
    `fixed_splits` lets the computed share of a prefix be fixed while it runs.
    """

    model: str
    longest: int
    device: str
    page: int
    chunk: int
    threads: int
    dtype: str
    strict: bool = False
    seed: int = 0
    extra: tuple[str, ...] = ()
    decision_log: str = ""
    storage_bytes: int = 4 << 30
    fixed_splits: bool = False

    @property
    def model_path(self) -> str:
        """Its folder or name; one of ours is written first."""
        if not is_ours(self.model):
            return self.model
        check_heads(self.device, self.model)
        return str(write_named(self.model, seed=self.seed))

    def setup(self, admin_key: str) -> Setup:
        """The same settings as in a comparison, with a store whose bandwidth can be changed."""
        tokens = -(-(self.longest * 5 // 4 + _SPARE_TOKENS) // self.page) * self.page
        path = self.model_path
        dummy = ("--load-format", "dummy") if self.model in UNWEIGHTED else ()
        return Setup(
            model_path=path,
            served_name=Path(path).name,
            device=self.device,
            page_size=self.page,
            chunk_tokens=self.chunk,
            dtype=self.dtype,
            device_tokens=tokens,
            context_tokens=tokens if self.device == "cpu" else None,
            host_ratio=2.0,
            storage_bytes=self.storage_bytes,
            max_running=8 if self.device == "cpu" else None,
            seed=self.seed,
            threads=self.threads,
            # A throttle has to be there to be changed; so much is none. A mode named at the start
            # is restored in anywhere.
            sections={
                "lab": {"throttle": {"read_gbps": 1000.0}},
                "policy": {
                    "restore": "both",
                    "decision_log": self.decision_log,
                    "rules": FIXED_SPLITS if self.fixed_splits else "",
                },
            },
            extra=("--admin-api-key", admin_key, *dummy, *self.extra),
        )

    def prepare(self, folder: Path, admin_key: str) -> Launch:
        """Its launch, the folder made and the settings file written."""
        launch = prepare(OURS, self.setup(admin_key), folder)
        return Launch(launch.arguments, {**launch.env, **(STRICT if self.strict else {})})


@contextmanager
def started(lab: LabServer, folder: Path, timeout_s: float = 400.0) -> Iterator[Target]:
    """The server while the block runs. Raises BenchError, with the end of its log, when it does not
    start.
    """
    # It listens on this machine only; the key keeps other programs here from changing what is
    # measured.
    key = secrets.token_hex(8)
    with Server(f"{lab.model} on kvtier", lab.prepare(folder, key), folder) as server:
        server.wait_until_healthy(timeout_s)
        shown = ["***" if word == key else word for word in server.command]
        yield Target(lab.model, server.url, key, server.pid, lab.page, lab.chunk, shown)
        server.raise_if_ended("while it was measured")
