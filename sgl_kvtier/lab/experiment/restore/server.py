"""The server that a restoration is measured on: kvtier as storage behind a throttle."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import Shape, setup_of
from sgl_kvtier.lab.experiment.arms import OURS, WITHOUT_LOOKAHEAD, Setup, prepare
from sgl_kvtier.lab.experiment.restore.arms import LAYERS, RULES_IN_TURN
from sgl_kvtier.lab.experiment.restore.plan import RestoreOptions, RestorePlan, all_lengths
from sgl_kvtier.lab.experiment.restore.trial import MOST_DECODED
from sgl_kvtier.lab.experiment.rounds import START_S
from sgl_kvtier.lab.outside.lab_model import write_named
from sgl_kvtier.lab.outside.model_shapes import UNWEIGHTED, check_heads, is_ours, kv_bytes
from sgl_kvtier.lab.outside.server import Server
from sgl_kvtier.lab.paced import launching
from sgl_kvtier.lab.paced.launching import LOG, Paced, is_paced
from sgl_kvtier.launch import host_of
from sgl_kvtier.sizes import format_bytes

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
"""SGLang checks its memory accounts in every step and ends the process when they are wrong."""

_PARTS, _PACED_PARTS = 2, 8
"""Parts of a page's layers where an arm restores by layers: lab models have 2 layers or more. The
paced one then has as many layers at hand.
"""
_SPARE_TOKENS = 2048
_RUNNING = 8
_LEAST_STORAGE = 4 << 30


@dataclass(frozen=True)
class Target:
    """A server to be measured. `pace_log` is what a paced device writes."""

    url: str
    admin_key: str
    pid: int | None
    command: Sequence[str] = ()
    pace_log: Path | None = None


@contextmanager
def started(
    args: RestoreOptions, shape: Shape, options: RestorePlan, folder: Path
) -> Iterator[Target]:
    """The server while the block runs. Raises BenchError, with the end of its log, when it does not
    start.
    """
    # It listens on this machine only; the key keeps other programs here from changing what is
    # measured.
    key = secrets.token_hex(8)
    setup = setup_for(args, shape, options, key)
    pace_log = None if setup.paced is None else folder / LOG
    if pace_log is not None:
        pace_log.unlink(missing_ok=True)
    launch = prepare(OURS, setup, folder)
    with Server(f"{options.model} on kvtier", launch, folder) as server:
        server.wait_until_healthy(START_S)
        shown = ["***" if word == key else word for word in server.command]
        yield Target(server.url, key, server.pid, shown, pace_log)
        server.raise_if_ended("while it was measured")


def paced_of(args: RestoreOptions) -> Paced | None:
    """The paced device that these arguments ask for, if any."""
    if not is_paced(args.device):
        return None
    layers = _PACED_PARTS if LAYERS in (args.arms or ()) else launching.LAYERS
    return launching.parse(args.device, args.dilation, args.server_arg, layers)


def setup_for(args: RestoreOptions, shape: Shape, options: RestorePlan, key: str) -> Setup:
    """The same settings as in a comparison, with room for what is measured and a store whose
    bandwidth can be changed.
    """
    paced, model = paced_of(args), options.model
    at_once = max(options.at_once, default=1)
    tokens = max(options.lengths) * at_once * 5 // 4 + _SPARE_TOKENS
    tokens += options.decoders * MOST_DECODED
    tokens = -(-tokens // shape.page) * shape.page
    stored = storage_bytes(args.storage_size, model, shape.dtype, sum(all_lengths(options)))
    cpu = host_of(shape.device) == "cpu"
    # Of long answers every event would carry all tokens so far.
    streaming = ("--incremental-streaming-output",) if options.decoders else ()
    dummy = ("--load-format", "dummy") if model in UNWEIGHTED else ()
    return setup_of(
        args,
        shape,
        _path_of(model, shape.device, args.seed) if paced is None else paced.model(),
        storage_bytes=stored,
        paced_layers=launching.LAYERS if paced is None else paced.layers,
        device_tokens=tokens,
        context_tokens=tokens if cpu else None,
        max_running=max(_RUNNING, at_once + options.decoders) if cpu else None,
        sections=_sections(options, paced),
        extra=("--admin-api-key", key, *streaming, *dummy, *args.server_arg),
    )


def _sections(options: RestorePlan, paced: Paced | None) -> dict[str, dict[str, Any]]:
    # A throttle has to be there to be changed; so much is none. A mode named at the start is
    # restored in anywhere.
    free: dict[str, dict[str, Any]] = {"lab": {"throttle": {"read_gbps": 1000.0}}, "policy": {}}
    found = free if paced is None else paced.sections()
    found["policy"] |= {
        "restore": "both",
        **WITHOUT_LOOKAHEAD,
        "rules": RULES_IN_TURN if options.at_once else "",
    }
    if options.hole:
        found["lab"]["faults"] = {"lose_first": 1}
    if LAYERS in options.arms:
        found["lab"]["layer_parts"] = _PACED_PARTS if paced else _PARTS
    return found


def storage_bytes(wanted: int | None, model: str, dtype: str, tokens: int) -> int:
    """The size of the store in bytes, for prompts of `tokens` tokens together.

    Raises BenchError where the size asked for is known to be too small. Loading would then be
    measured on pages that are not there.
    """
    per_token = kv_bytes(model, dtype)
    # A quarter more: headers, padding, and the pages behind a prompt that answers make.
    need = 0 if per_token is None else tokens * per_token * 5 // 4
    if wanted is not None and wanted < need:
        raise BenchError(
            f"--storage-size {format_bytes(wanted)}: {model} needs {format_bytes(need)} for prompts of {tokens:,} tokens together"
        )
    return wanted or max(_LEAST_STORAGE, need)


def _path_of(model: str, device: str, seed: int) -> str:
    """Its folder or name; one of ours is written first."""
    if not is_ours(model):
        return model
    check_heads(device, model)
    return str(write_named(model, seed=seed))
