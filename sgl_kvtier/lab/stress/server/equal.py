"""`kvtier bench equal`: the noise floor of stock between two chunk sizes, and restored answers
against it. Every loaded page is compared bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import positive, seed
from sgl_kvtier.console import Column, Table, check_target, envelope, print_table, write_json
from sgl_kvtier.errors import BenchError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.lab.experiment.arms import BASELINE, OURS, WITHOUT_LOOKAHEAD, Setup, prepare
from sgl_kvtier.lab.experiment.frame import work_folder
from sgl_kvtier.lab.outside.client import Client
from sgl_kvtier.lab.outside.lab_model import write_named
from sgl_kvtier.lab.outside.model_shapes import BYTES, check_heads, is_ours, serving_dtype
from sgl_kvtier.lab.outside.server import Launch, Server
from sgl_kvtier.lab.stress.server.judge import WRONG, Answer, Floor, floor_of, judge
from sgl_kvtier.launch import detect_device, missing_packages

SCHEMA = "kvtier.equal/1"
_OUTPUTS = 16
_AUDITED = "kvtier:restore_audited_pages_total"
_RESULTS = ("equal", "differs", "not read", "skipped")
_STORED_S = 120.0
_STORAGE_BYTES = 8 << 30
_START_S = 400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--prompts", type=positive, default=8, metavar="N", help="default 8")
    parser.add_argument(
        "--tokens",
        type=_tokens,
        default=8192,
        metavar="N",
        help="of a prompt, k = 1024 (default 8k)",
    )
    parser.add_argument(
        "--model",
        help="a model that is written here, a folder or a name (default lab-mha on a CPU, else "
        "lab-gpu-1b)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 for models of ours")
    parser.add_argument("--seed", type=seed, default=0, help="of prompts and weights (default 0)")
    parser.add_argument(
        "--server-arg", action="append", default=[], metavar="ARG", help="one more for every server"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="for logs and the store (default: a temporary folder, kept when something fails)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result (- for standard output)")


def run(args: argparse.Namespace) -> int:
    """Measures and judges; 1 where an answer or a page is another, 130 after Ctrl-C. Raises
    KVTierError.
    """
    if args.json is not None:
        check_target(args.json)
    if missing_packages():
        raise BenchError(
            f"SGLang is not installed for {sys.executable}. Install it with: "
            f"{how_to_install('sglang')}"
        )
    setup, chunks = make_setup(args)
    asked = prompts(args.prompts, args.tokens, args.seed)
    result: dict[str, Any] = {}
    try:
        with work_folder(args.folder, lambda: not result.get("sound", True)) as folder:
            first, second = (
                _computed(replace(setup, chunk_tokens=chunk), asked, folder / f"stock-{chunk}")
                for chunk in chunks
            )
            shutil.rmtree(folder / "ours" / "storage", ignore_errors=True)
            restored, tokens, audited = _restored(setup, asked, folder / "ours")
            result |= make_result(setup, chunks, first, second, restored, tokens, audited)
    except KeyboardInterrupt:
        return 130
    _report(args, result)
    return 0 if result["sound"] else 1


def make_setup(args: argparse.Namespace) -> tuple[Setup, tuple[int, int]]:
    """The servers' common setup, and the two chunk sizes. Raises BenchError."""
    device = args.device or detect_device()
    cpu = device == "cpu"
    model = args.model or ("lab-mha" if cpu else "lab-gpu-1b")
    check_heads(device, model)
    path = str(write_named(model, seed=args.seed)) if is_ours(model) else model
    page, chunks = (16, (512, 208)) if cpu else (64, (4096, 960))
    tokens = -(-(args.tokens * 5 // 4 + 2048) // page) * page
    setup = Setup(
        model_path=path,
        served_name=Path(path).name,
        device=device,
        page_size=page,
        chunk_tokens=chunks[0],
        dtype=args.dtype or serving_dtype(device, model),
        device_tokens=tokens,
        context_tokens=tokens if cpu else None,
        storage_bytes=_STORAGE_BYTES,
        prefetch_threshold=page,
        max_running=8 if cpu else None,
        seed=args.seed,
        extra=tuple(args.server_arg),
        sections={
            "policy": {"restore": "both", "min_restore_tokens": page, **WITHOUT_LOOKAHEAD},
            "lab": {"audit": True},
        },
    )
    return setup, chunks


def prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts of random bytes that share no prefix."""
    chance = random.Random(zlib.crc32(f"equal:{seed}".encode()))
    return [chance.choices(range(BYTES), k=tokens) for _ in range(count)]


def make_result(
    setup: Setup,
    chunks: Sequence[int],
    first: Sequence[Answer],
    second: Sequence[Answer],
    restored: Sequence[Answer],
    restored_tokens: Sequence[int],
    audited: dict[str, float],
) -> dict[str, Any]:
    """The whole result, schema kvtier.equal/1.

    It is sound on three conditions. Every answer is excused or equal. At least one prompt was
    restored. The audit found pages and none that differs.
    """
    floor = floor_of(zip(first, second, strict=True))
    verdicts = [judge(a, b, floor) for a, b in zip(first, restored, strict=True)]
    pages = audited.get("equal", 0.0)
    sound = (
        not any(verdict in WRONG for verdict in verdicts)
        and any(restored_tokens)
        and pages > 0
        and not audited.get("differs")
    )
    results = {
        "settings": {**asdict(setup), "chunks": list(chunks)},
        "floor": {**asdict(floor), "allowed": floor.allowed},
        "verdicts": dict(Counter(verdict.value for verdict in verdicts)),
        "restored_tokens": list(restored_tokens),
        "audited_pages": audited,
        "sound": sound,
    }
    return envelope(SCHEMA, ["kvtier", *sys.argv[1:]], results)


def read_floor(path: Path, setup: Setup) -> Floor:
    """The noise floor in a result. Raises BenchError for what is none, and for one of another
    model, device or dtype than the setup's.
    """
    try:
        result = json.loads(path.read_text())
        found = result["floor"]
        floor = Floor(float(found["logprob"]), int(found["answers"]), int(found["forked"]))
        settings = dict(result["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"--floor {path}: no result of kvtier bench equal ({type(error).__name__})"
        ) from error
    for name, key in (("model", "served_name"), ("device", "device"), ("dtype", "dtype")):
        wanted = getattr(setup, key)
        if settings.get(key) != wanted:
            raise BenchError(
                f"--floor {path}: its {name} is {settings.get(key)}, and here it is {wanted}. "
                "Measure it with the same: kvtier bench equal --model M --device D --dtype T"
            )
    return floor


def _computed(setup: Setup, asked: Sequence[Sequence[int]], folder: Path) -> list[Answer]:
    plain = replace(setup, sections={})
    with _started(BASELINE, plain, folder) as (server, key):
        return asyncio.run(_answers(server, key, asked))


def _restored(
    setup: Setup, asked: Sequence[Sequence[int]], folder: Path
) -> tuple[list[Answer], list[int], dict[str, float]]:
    """Answers from stored prefixes, the tokens of each that were loaded, and what the audit
    found.
    """

    async def play(server: Server, key: str) -> tuple[list[Answer], list[int], dict[str, float]]:
        async with Client(server.url, admin_key=key) as client:
            for ids in asked:
                await _ask(client, ids)
            pages = sum(len(ids) // setup.page_size for ids in asked)
            await _stored(client, pages)
            await client.flush()
            answers, loaded = [], []
            for ids in asked:
                done = await _ask(client, ids)
                answers.append(done[0])
                loaded.append(done[1])
            await asyncio.sleep(2.0)  # the audit's last reads, and the next publishing
            found = await client.metrics()
        audited = {result: found.total(_AUDITED, result=result) or 0.0 for result in _RESULTS}
        return answers, loaded, audited

    with _started(OURS, setup, folder) as (server, key):
        return asyncio.run(play(server, key))


async def _answers(server: Server, key: str, asked: Sequence[Sequence[int]]) -> list[Answer]:
    async with Client(server.url, admin_key=key) as client:
        return [(await _ask(client, ids))[0] for ids in asked]


async def _ask(client: Client, ids: Sequence[int]) -> tuple[Answer, int]:
    """An answer, and how many tokens of its prompt came from a lower tier. Raises BenchError."""
    done = await client.generate(ids, _OUTPUTS, margins=True)
    if done.error is not None:
        raise BenchError(f"a prompt of {len(ids)} tokens was not answered: {done.error}")
    loaded = 0 if done.cached is None else done.cached.host + done.cached.storage
    return Answer(done.output_ids, done.logprobs, done.margins), loaded


async def _stored(client: Client, pages: int) -> None:
    """Waits until the store has that many pages. Raises BenchError when it does not get there."""
    until, have = asyncio.get_running_loop().time() + _STORED_S, 0.0
    while asyncio.get_running_loop().time() < until:
        have = (await client.metrics()).total("kvtier:store_pages") or 0.0
        if have >= pages:
            return
        await asyncio.sleep(0.5)
    raise BenchError(f"the store has {have:.0f} of {pages} pages after {_STORED_S:.0f} s")


@contextlib.contextmanager
def _started(arm: str, setup: Setup, folder: Path) -> Iterator[tuple[Server, str]]:
    key = secrets.token_hex(8)
    launch = prepare(arm, replace(setup, extra=(*setup.extra, "--admin-api-key", key)), folder)
    print(f"starting {arm}, its log is {folder / 'server.log'}", file=sys.stderr)
    with Server(arm, Launch(launch.arguments, launch.env), folder) as server:
        server.wait_until_healthy(_START_S)
        yield server, key
        server.raise_if_ended("while it was asked")


def _report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    shown = sys.stderr if args.json == "-" else sys.stdout
    floor = result["floor"]
    rows = [
        {"what": "largest difference of stock's log-probs", "value": f"{floor['logprob']:.3g}"},
        {"what": "allowed", "value": f"{floor['allowed']:.3g}"},
        {
            "what": "stock's answers that forked",
            "value": f"{floor['forked']} of {floor['answers']}",
        },
        *({"what": f"restored: {name}", "value": n} for name, n in result["verdicts"].items()),
        *(
            {"what": f"pages: {name}", "value": f"{n:.0f}"}
            for name, n in result["audited_pages"].items()
        ),
    ]
    print_table(Table("Equal", (Column("what", "What"), Column("value", "Value")), rows), shown)
    print("sound" if result["sound"] else "NOT SOUND", file=shown)
    if args.json is not None:
        write_json(result, args.json)


def _tokens(text: str) -> int:
    factor, number = (1024, text[:-1]) if text.lower().endswith("k") else (1, text)
    return positive(number) * factor
