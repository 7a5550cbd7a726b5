"""`kvtier compare --harness`: another program sends the load instead of our own client. Here what all
such programs have in common, and NVIDIA's aiperf; SGLang's own client is in `sglang_client.py`.

Servers, rounds and tables stay those of `compare`. aiperf is given the very bodies that our client
sends by /v1/completions, the pauses between them, and when sessions begin. TTFT and latency are
those that aiperf reports. Its records of single events say what was answered, and from which tier.

aiperf needs other releases of many packages than SGLang, so it has a virtual environment of its
own in the user's cache folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from sgl_kvtier.console.table import field_of
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.load import Load
from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.experiment.rounds import Replaying
from sgl_kvtier.lab.outside.client import BadAnswer, Client, Completion
from sgl_kvtier.lab.outside.openai import Completed, OpenAIClient
from sgl_kvtier.lab.outside.replay import ReplayOptions, Sample, SampleLog, arrivals
from sgl_kvtier.lab.workload.catalogue import cache_folder
from sgl_kvtier.lab.workload.encoder import PromptTokens, output_tokens
from sgl_kvtier.lab.workload.session import Context

HARNESSES = ("own", "aiperf", "sglang")
AIPERF = "0.13.0"
"""The release whose options and records are known here."""

ROUTE = "openai"
"""How both clients ask aiperf's load: a name of `openai.ROUTES`."""

_LOOK_S = 0.5
_END_S = 10.0
"""Seconds that a program has to end after Ctrl-C."""


def aiperf_program(caches: Path | None = None) -> Path:
    """Where aiperf's program is, or would be installed. pip writes it after everything it needs, so
    an interrupted installation has none.
    """
    base = cache_folder("harness") if caches is None else caches / "kvtier" / "harness"
    return base / f"aiperf-{AIPERF}" / "bin" / "aiperf"


def aiperf_command(caches: Path | None = None) -> Path:
    """aiperf's program. It is installed first where it is not there: 1.2 GB and some minutes, once.
    Raises BenchError when that fails.
    """
    program = aiperf_program(caches)
    folder = program.parents[1]
    if program.exists():
        return program
    print(
        f"installing aiperf {AIPERF} into {folder}: 1.2 GB and some minutes, once", file=sys.stderr
    )
    command = [str(folder / "bin" / "python"), *("-m", "pip", "install", f"aiperf=={AIPERF}")]
    try:
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([*command, "--quiet"], check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(
            f"aiperf {AIPERF} could not be installed: {error}. Without a package index here, "
            f"install it yourself ({' '.join(command)}), or leave --harness"
        ) from error
    return program


@dataclass
class OtherClient(Replaying):
    """The work of replaying sessions, sent by another program. Its files `keeps`, its command and its
    log are copied to `kept`/ARM-ROUND.
    """

    kept: Path | None = None
    name: ClassVar[str]
    version: ClassVar[str]
    keeps: ClassVar[tuple[str, ...]]
    counted: ClassVar[str]
    """Its file with a line for each request that has ended."""

    async def command(self, client: Client, folder: Path) -> list[str]:
        """The program with its arguments, to run in `folder`."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Its environment variables."""
        return dict(os.environ)

    def samples(self, folder: Path, dilation: float) -> list[Sample]:
        """The requests that it recorded, by when they were sent. Raises BenchError."""
        raise NotImplementedError

    async def measure(self, client: Client, one: Round, advance: Callable[[], None]) -> None:
        """All sessions. Raises BenchError when the program fails."""
        folder = self.log_path.parent / self.name / f"{one.arm}-{one.number}"
        shutil.rmtree(folder, ignore_errors=True)  # of a run before
        folder.mkdir(parents=True, exist_ok=True)
        command = await self.command(client, folder)
        (folder / "command.json").write_text(json.dumps(command), encoding="utf-8")
        await self._run(command, folder, advance)
        self._keep(folder)
        samples = self.samples(folder, client.dilation)
        begin_s = min((sample.completion.sent_s for sample in samples), default=one.began_s)
        ends_s = (s.completion.sent_s + s.completion.e2e_s * client.dilation for s in samples)
        one.began_s = begin_s
        one.wall_s = (max(ends_s, default=begin_s) - begin_s) / client.dilation
        log = SampleLog(self.log_path, arm=one.arm, round=one.number)
        for sample in samples:
            one.samples.append(sample)
            await log.write(sample)
        for _ in range(self.steps - _lines(folder / self.counted)):
            advance()

    def _keep(self, folder: Path) -> None:
        if self.kept is not None:
            target = self.kept / folder.name
            target.mkdir(parents=True, exist_ok=True)
            for name in (*self.keeps, "command.json", f"{self.name}.log"):
                if (folder / name).exists():
                    shutil.copy2(folder / name, target / name)

    async def _run(self, command: Sequence[str], folder: Path, advance: Callable[[], None]) -> None:
        log = folder / f"{self.name}.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=self.environment(),
                start_new_session=True,
            )
        ended = asyncio.create_task(process.wait())
        shown = 0
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=_LOOK_S)
                for _ in range(_lines(folder / self.counted) - shown):
                    shown += 1
                    advance()
        finally:
            await _end(process, ended)
        if process.returncode:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            errors = [line for line in said if " ERROR " in line] or said or [""]
            raise BenchError(
                f"{self.name} ended with status {process.returncode}: {errors[-1]}\nIts log: {log}"
            )


@dataclass
class AiperfReplaying(OtherClient):
    """The same by aiperf."""

    program: Path = Path("aiperf")
    name = "aiperf"
    version = AIPERF
    keeps = ("profile_export_aiperf.json", "profile_export.jsonl")
    counted = "profile_export.jsonl"

    async def command(self, client: Client, folder: Path) -> list[str]:
        """aiperf, and the file of what it sends."""
        assert isinstance(client, OpenAIClient), "its route is the one that aiperf asks by"
        asked = folder / "sessions.jsonl"
        with asked.open("w", encoding="utf-8") as file:
            for row in rows(self.load, self.options, client):
                file.write(json.dumps(row) + "\n")
        model = (await client.model_info())["id"]
        return [str(self.program), *self._arguments(client, asked, model)]

    def environment(self) -> dict[str, str]:
        """Without ours: it is another installation."""
        # HF_HUB_OFFLINE: aiperf would not load a tokenizer from a folder then.
        mine = ("PYTHONPATH", "PYTHONHOME", "HF_HUB_OFFLINE")
        found = {name: value for name, value in os.environ.items() if name not in mine}
        # Else it keeps a copy of every load in the user's cache folder.
        return {**found, "AIPERF_DATASET_MMAP_CACHE_ENABLED": "false"}

    def samples(self, folder: Path, dilation: float) -> list[Sample]:
        """Those of its records."""
        # aiperf has the time of day, and a round the monotonic clock
        offset_s = time.monotonic() - time.time()
        return samples_of(folder, self.load, self.options, dilation, offset_s)

    def _arguments(self, client: Client, asked: Path, model: str) -> Iterable[str]:
        options = self.options
        yield from ("profile", "--url", client.url, "--model", model)
        yield from ("--endpoint-type", "completions", "--streaming", "--use-server-token-count")
        yield from ("--tokenizer", self.setup.model_path)
        yield from ("--custom-dataset-type", "mooncake_trace", "--input-file", str(asked))
        yield from ("--dataset-sampling-strategy", "sequential")
        if all_at_once(options, self.load):
            yield "--fixed-schedule"
        else:
            yield from ("--concurrency", str(options.concurrency))
            yield from ("--num-conversations", str(len(self.load.sessions)))
        yield from ("--request-timeout-seconds", f"{600 * client.dilation:g}")
        yield from ("--export-level", "raw", "--artifact-dir", str(asked.parent))
        yield from ("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics")
        yield from ("--workers-max", "1", "--record-processors", "1")


def all_at_once(options: ReplayOptions, load: Load) -> bool:
    """Whether no session waits for the end of another: each begins at a time that is known."""
    at_a_time = options.concurrency or len(load.sessions)
    return options.rate is not None or at_a_time >= len(load.sessions)


def rows(load: Load, options: ReplayOptions, client: OpenAIClient) -> Iterator[dict[str, Any]]:
    """The sessions as aiperf's `mooncake_trace`, a row for each request: its body, its session's
    place in the load, and milliseconds: `timestamp` when it is sent, or `delay` after the last
    answer. A recorded wait before a session's first request is in its `timestamp`.
    """
    count = len(load.sessions)
    begins = [0.0] * count
    if options.rate is not None:
        begins = arrivals(count, options.rate, options.seed)
    for place, session in enumerate(load.sessions):
        context, tokens = Context(session), PromptTokens(load.encoder)
        turn = first = 1 + bool(options.returning and context.next_call() is not None)
        while (call := context.next_call()) is not None:
            tokens.show(context.prompt)
            wanted = output_tokens(call, load.encoder, options.most_output_tokens)
            wait_s = options.wait_s(turn, call.gap_s)
            row: dict[str, Any] = {"session_id": str(place), "output_length": wanted}
            if turn > first:
                row["delay"] = 1000 * client.dilation * wait_s
            elif all_at_once(options, load):
                wait_s = 0.0 if options.returning else wait_s
                row["timestamp"] = 1000 * client.dilation * (begins[place] + wait_s)
            yield {**row, "payload": client.body(tokens.ids.tolist(), wanted)}
            turn += 1


async def _end(process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
    """Ends a program and its processes, where it still runs."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        if ended.done():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        await asyncio.wait([ended], timeout=_END_S)


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


class _Recorded(Completed):
    """An answer whose events were recorded with their times."""

    at_s = 0.0

    def elapsed_s(self) -> float:
        return self.at_s


def samples_of(
    folder: Path, load: Load, options: ReplayOptions, dilation: float, offset_s: float
) -> list[Sample]:
    """aiperf's requests, by when they were sent, on a clock `offset_s` after the time of day. A
    request without a record is one that failed. Raises BenchError when there are no records.
    """
    measured = {_key(row): row for row in _records(folder / "profile_export.jsonl")}
    found: dict[tuple[int, int], Completion] = {}
    for row in _records(folder / "profile_export_raw.jsonl"):
        key = _key(row)
        done = _completion(row, measured.get(key, {}).get("metrics") or {}, offset_s)
        found[key] = done.undilated(dilation)
    begin_s = min((done.sent_s for done in found.values()), default=0.0)
    missing = Completion(begin_s, 0.0, error=f"aiperf {AIPERF} has no record of this request")
    samples = []
    first = int(options.returning)
    for place, (session, sizes) in enumerate(zip(load.sessions, load.rows, strict=True)):
        for turn in range(sizes["calls"] - first):
            done = found.get((place, turn), missing)
            samples.append(Sample(session.session_id, turn + 1 + first, done))
    return sorted(samples, key=lambda sample: sample.completion.sent_s)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                if row["metadata"]["benchmark_phase"] == "profiling":
                    yield row
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"aiperf's records cannot be read: {path}: {error}") from error


def _key(row: Mapping[str, Any]) -> tuple[int, int]:
    """The place of a record's session, and its turn, from 0."""
    about = row["metadata"]
    return int(about["conversation_id"]), int(about["turn_index"])


def _completion(
    row: Mapping[str, Any], metrics: Mapping[str, Mapping[str, Any]], offset_s: float
) -> Completion:
    """One of aiperf's records as an outcome. TTFT and latency are aiperf's."""
    reading = _Recorded(
        row["metadata"]["request_start_ns"] / 1e9 + offset_s, row["payload"]["max_tokens"]
    )
    error = None if row.get("error") is None else str(row["error"].get("message"))
    try:
        for response in row["responses"]:
            reading.at_s = (response["perf_ns"] - row["start_perf_ns"]) / 1e9
            for packet in response.get("packets") or ():
                if packet.get("name") == "data" and packet["value"] != "[DONE]":
                    reading.take(json.loads(packet["value"]))
    except (BadAnswer, ValueError) as problem:
        error = error or str(problem)
    done = reading.completion(error or reading.verdict())
    ttft_s, e2e_s = (
        metrics[name]["value"] / 1000 if name in metrics else None
        for name in ("time_to_first_token", "request_latency")
    )
    times = done.token_times_s
    if ttft_s is not None and times:
        times = (ttft_s, *(max(ttft_s, at_s) for at_s in times[1:]))
    return replace(done, token_times_s=times, e2e_s=done.e2e_s if e2e_s is None else e2e_s)


AGREED = ("ttft_ms.mean", "ttft_ms.p50", "ttft_ms.p99", "e2e_ms.mean", "throughput_tokens_per_s")
"""Figures in which another client and ours are compared."""


def agreement(
    theirs: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The `harness.agreement` of a result, from the figures of each arm: the other client's and
    ours.
    """
    found = []
    for arm, figures in theirs.items():
        for name in AGREED:
            other, own = _number(figures, name), _number(ours.get(arm) or {}, name)
            ratio = other / own if other is not None and own else None
            row = {"arm": arm, "figure": name, "harness": other, "own": own, "ratio": ratio}
            found.append(row)
    return found


def _number(figures: Mapping[str, Any], name: str) -> float | None:
    value = field_of(figures, name)
    return None if value is None else float(value)  # type: ignore[arg-type]
