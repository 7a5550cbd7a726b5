"""The server of a fuzz run: started, looked after, killed without warning, started again on the
same store.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import Options, refuse_other, setup_of, shape_of
from sgl_kvtier.lab.experiment.arms import WITHOUT_LOOKAHEAD, Setup, prepare
from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.experiment.restore.server import STRICT
from sgl_kvtier.lab.outside.model_shapes import check_heads
from sgl_kvtier.lab.outside.server import Launch, Server, Usage
from sgl_kvtier.lab.paced.launching import LOG, is_paced
from sgl_kvtier.lab.paced.pace import Reader
from sgl_kvtier.lab.stress.server.chaos import Chaos, parse_kinds
from sgl_kvtier.lab.stress.server.log import FuzzLog, suspicious
from sgl_kvtier.lab.stress.trouble import Finding
from sgl_kvtier.launch import free_port

SCHEDULER = "sglang::scheduler"
"""How SGLang's scheduler processes call themselves."""

AHEAD = {"prefetch": "on", "eviction": "next-use", "sessions": True}
"""kvtier.json's policy of a server that looks ahead."""
CHUNK, PACED_CHUNK = 256, 2048
"""Tokens of a prefill chunk, on a paced device too: small, so that there are many borders."""
_SETTLED_TOKENS = 64
_PRIORITIES = (
    "--enable-priority-scheduling",
    "--priority-scheduling-preemption-threshold=4",
    "--retraction-policy=priority",
)
_IDLE_CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
_START_S = 400.0
_DRAIN_S = 60.0
"""SGLang looks every 5 s whether it was asked to end, and whether its requests have ended."""


def fuzzed_model(args: argparse.Namespace) -> str:
    """The name of the model that is fuzzed. Raises BenchError for one the device cannot serve."""
    device = shape_of(Options.of(args), "").device
    if is_paced(device):
        refuse_other(Options.of(args), device)
        return ""
    name: str = args.model or ("tiny-qwen3" if device == "cpu" else "lab-gpu-tiny")
    check_heads(device, name, args.server_arg)
    return name


def make_setup(args: argparse.Namespace, model: Path, chosen: Load) -> Setup:
    """The server's setup, with small pools. The clients' prompts evict each other from the device,
    and from the host pool into the store.
    """
    shape, paced = shape_of(Options.of(args), fuzzed_model(args)), is_paced(args.device)
    page = shape.page if paced else 16
    shape = replace(shape, page=page, chunk=args.chunk or (PACED_CHUNK if paced else CHUNK))
    longest = chosen.longest_tokens + _SETTLED_TOKENS
    at_once = sorted((row["longest_tokens"] for row in chosen.rows), reverse=True)[
        : args.concurrency
    ]
    tokens = -(-max(longest * 5 // 4, sum(at_once) * 3 // 4) // page) * page
    flags: tuple[str, ...] = () if args.overlap == "on" else ("--disable-overlap-schedule",)
    flags += _PRIORITIES if "priority" in parse_kinds(args.chaos) else ()
    return setup_of(
        Options.of(args),
        shape,
        model,
        device_tokens=tokens,
        context_tokens=tokens,
        host_ratio=args.host_ratio,
        prefetch_threshold=2 * page,
        max_running=max(args.concurrency, 8),
        extra=(*flags, *args.server_arg),
    )


def audits(args: argparse.Namespace, chaos: Chaos) -> bool:
    """Whether loaded pages are compared with the store's: where no read fails on purpose."""
    return args.floor and args.scene is None and set(chaos.faults()) == {"seed"}


def sections(setup: Setup, chaos: Chaos, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The sections of the fuzzed server's kvtier.json beside the store. Little is enough to be
    restored, and to be loaded at a time.
    """
    rank, few = args.fault_rank, 2 * setup.page_size
    faults = chaos.faults() | ({} if rank is None else {"rank": rank})
    # A stall of 0.4 s is past a deadline of 0.1 s.
    policy = {
        "restore": "both",
        "min_restore_tokens": few,
        "load_deadline_s": 0.1 * setup.dilation,
        "load_tokens": few,
    }
    policy |= AHEAD if args.lookahead else WITHOUT_LOOKAHEAD
    if setup.device == "cpu":
        policy["proof"] = "all"  # else a CPU compares no page, and an accelerator samples
    lab: dict[str, Any] = {"throttle": {"read_gbps": 1.0}}
    if setup.paced is not None:
        lab = setup.paced.sections()["lab"]
    if setup.paced is not None:
        faults |= {"stall_ms": faults.get("stall_ms", 0.0) * setup.dilation}
    return {"policy": policy, "lab": {**lab, "faults": faults, "audit": audits(args, chaos)}}


class FuzzServer:
    """One server after another on one port, folder and key. Findings in their logs, and in that of
    a paced device, go to `log`. `env` are more variables, and `signals` what each in turn is ended
    with.
    """

    def __init__(
        self,
        arm: str,
        setup: Setup,
        folder: Path,
        log: FuzzLog,
        sections: Mapping[str, Mapping[str, Any]],
        env: Mapping[str, str] | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGKILL,),
    ) -> None:
        self.admin_key = secrets.token_hex(8)
        self._folder = folder
        self._log = log
        extra = (*setup.extra, "--admin-api-key", self.admin_key)
        whole = Setup(**{**vars(setup), "extra": extra, "sections": {**setup.sections, **sections}})
        launch = self.prepared(arm, whole)
        self._launch = Launch(
            launch.arguments, {**launch.env, **STRICT, **_IDLE_CHECKS, **(env or {})}
        )
        self._signals = itertools.cycle(signals)
        (folder / LOG).unlink(missing_ok=True)
        self._steps = Reader(folder / LOG)
        self._port = free_port()
        self._server: Server | None = None
        self._read = 0
        self._killing = False
        self._is_gone = False

    def prepared(self, arm: str, setup: Setup) -> Launch:
        """Its launch, in its folder."""
        return prepare(arm, setup, self._folder)

    @property
    def url(self) -> str:
        """Where it answers, also after a restart."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def settings(self) -> Path:
        """Its kvtier.json."""
        return self._folder / "storage.json"

    @property
    def alive(self) -> bool:
        """Whether the server process is there, or on its way back from a kill."""
        if self._killing:
            return True
        if self._server is None:
            return False
        try:
            self._server.raise_if_ended("while it was fuzzed")
        except BenchError as error:
            if not self._is_gone:
                self._log.find(Finding.CRASH, f"{str(error).splitlines()[0]}")
            self._is_gone = True
            return False
        return True

    def start(self) -> None:
        """Starts it and waits until it answers. Raises BenchError when it does not."""
        self._folder.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + 30
        while True:
            self._server = Server("fuzz", self._launch, self._folder, port=self._port)
            try:
                self._server.start()
                break
            except BenchError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)  # the killed one's port
        self._server.wait_until_healthy(_START_S)

    def kill_and_start(self) -> None:
        """Ends the server with the next signal and starts a new one.

        SIGKILL goes to the whole process group, so that none of its processes runs any code after
        that. SIGTERM goes to the launcher, which then answers the requests under way.
        """
        self.look()
        server = self._server
        assert server is not None and server.pid is not None, "it was started"
        self._killing = True
        try:
            how = next(self._signals)
            if how is signal.SIGKILL:
                os.killpg(server.pid, how)
            server.stop(_DRAIN_S)
            self._log.note("kill" if how is signal.SIGKILL else "terminate")
            self.start()
        finally:
            self._killing = False

    def usage(self) -> Usage:
        """Processes, threads, descriptors and memory of the present one."""
        return Usage(0, 0, 0, 0.0, 0) if self._server is None else self._server.usage()

    def schedulers(self) -> list[int]:
        """Process ids of its schedulers."""
        found = [] if self._server is None else self._server.processes(SCHEDULER)
        return [process.pid for process in found]

    def look(self) -> None:
        """Reads what its logs have grown by, and keeps what they must not say."""
        self._look_at_steps()
        path = self._folder / "server.log"
        try:
            with path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return
        self._read += len(new)
        for kind, text in suspicious(new.decode(errors="replace")):
            self._log.find(kind, text)

    def _look_at_steps(self) -> None:
        checked = 0
        for row in self._steps.new():
            checked += row.get("checked", 0)
            if "mismatch" in row:
                self._log.find(Finding.MISMATCH, str(row["mismatch"]))
        if checked:
            self._log.add("checked", checked)

    def stop(self) -> None:
        """Looks at its log a last time and ends it."""
        self.look()
        if self._server is not None:
            self._server.stop()
        self._server = None
        self._read = self._size()  # what it says while it ends is not a finding

    def _size(self) -> int:
        try:
            return (self._folder / "server.log").stat().st_size
        except OSError:
            return 0
