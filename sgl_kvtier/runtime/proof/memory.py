"""Keeps what the checks of restorations have shown for one model, for the next start of a server.

    <store.path>/<identity>/proof.json

There is one file per model fingerprint, replaced atomically, with an entry for each set of
conditions: GPU, driver, torch, Triton, SGLang, sgl_kvtier, page shape and way of copying. A server
looks up its own conditions (`find`); entries of others do not apply to it. Reading never raises: a
missing, torn or foreign file counts as empty.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from sgl_kvtier import __version__
from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.outside import is_number, is_text, is_whole, parse_json
from sgl_kvtier.runtime.backend.host_pages import shape_of
from sgl_kvtier.runtime.cuda.page_shape import host_pool_of
from sgl_kvtier.runtime.proof.record import Proof, State
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.sglang import slot_pools
from sgl_kvtier.store.disk.env import Env, create_file, read_file, unique_number
from sgl_kvtier.store.disk.namespace import PROOF

logger = logging.getLogger(__name__)

NAME = PROOF
SCHEMA = "kvtier.restore-proof/1"
_MOST_BYTES = 1 << 20
_MOST_ENTRIES = 16
_MOST_TEXT = 1000
_MOST_SECONDS = 1e12
_DRIVER = Path("/proc/driver/nvidia/version")
_STATES = {"refuted": State.REFUTED, "proven": State.PROVEN}
_writing = threading.Lock()


@dataclass(frozen=True)
class Shown:
    """The result under some conditions (`conditions`)."""

    conditions: dict[str, str]
    state: str
    """`proven` or `refuted`."""
    pages: int = 0
    """Pages that were compared and equal."""
    nbytes: int = 0
    """Bytes of these pages."""
    what: str = ""
    """What differed, if it is refuted."""
    written: float = 0.0
    """Seconds since the epoch."""

    @property
    def verdict(self) -> State:
        """The state with which a server starts."""
        return _STATES[self.state]


def conditions(controller: Any, page: str, way: str, args: Any) -> dict[str, str]:
    """What a proof depends on in addition to the model, in this process, for the device of a
    HiCache controller. `page`: page shape; `way`: way of copying; `args`: SGLang's, which select
    the attention kernels that read attached pages and overlap scheduling.
    """
    backends = (f"{phase}attention_backend" for phase in ("", "prefill_", "decode_"))
    attention = dict.fromkeys(str(name) for one in backends if (name := getattr(args, one)))
    return {
        "device": device_name(controller),
        "driver": driver(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "sglang": _version("sglang"),
        "sgl_kvtier": __version__,
        "page": page,
        "way": way,
        "attention": "+".join(attention),
        "overlap": str(not args.disable_overlap_schedule),
    }


def device_name(controller: Any) -> str:
    """The vendor's name of the device that a HiCache controller copies to."""
    kind = torch.device(controller.device).type
    name = (
        getattr(torch.get_device_module(kind), "get_device_name", None) if kind != "cpu" else None
    )
    try:
        return kind if name is None else str(name())
    except (RuntimeError, AssertionError):
        return kind


def driver() -> str:
    """The version of the NVIDIA driver, or of HIP; empty if there is neither."""
    with suppress(OSError):
        found = re.search(
            r"Kernel Module(?: for \S+)?\s+(\S+)", _DRIVER.read_text("ascii", "replace")
        )
        if found is not None:
            return found[1]
    return str(torch.version.hip or "")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def read(path: Path) -> tuple[Shown, ...]:
    """The entries of a file, latest first."""
    try:
        data = parse_json(read_file(Env(), str(path), _MOST_BYTES))
        if data["schema"] != SCHEMA:
            return ()
        return tuple(shown for shown in map(_entry, data["shown"]) if shown is not None)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return ()


def _entry(data: Any) -> Shown | None:
    """The entry, or None if the data is not a valid one."""
    try:
        shown = Shown(**data)
    except TypeError:
        return None
    named = isinstance(shown.conditions, dict) and all(
        is_text(value, _MOST_TEXT) for pair in shown.conditions.items() for value in pair
    )
    counted = is_whole(shown.pages, 0) and is_whole(shown.nbytes, 0)
    timed = is_number(shown.written, 0, _MOST_SECONDS)
    said = is_text(shown.what, _MOST_TEXT) and shown.state in _STATES
    return shown if named and counted and timed and said else None


def find(path: Path | None, here: Mapping[str, str]) -> Shown | None:
    """The entry for these conditions, or None."""
    entries = () if path is None else read(path)
    return next((shown for shown in entries if shown.conditions == here), None)


def keep(path: Path, shown: Shown) -> None:
    """Replaces the entry with the same conditions, and drops the oldest of too many. May raise
    OSError; the file is then unchanged.
    """
    shown = replace(shown, what=shown.what[:_MOST_TEXT], written=time.time())
    with _writing:
        others = [one for one in read(path) if one.conditions != shown.conditions]
        entries = [asdict(one) for one in (shown, *others)][:_MOST_ENTRIES]
        temporary = path.with_name(f".{path.name}.{unique_number()}")
        try:
            fd = create_file(Env(), str(temporary), os.O_WRONLY)
            with os.fdopen(fd, "w") as file:
                file.write(json.dumps({"schema": SCHEMA, "shown": entries}, indent=2) + "\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def begin(
    controller: Any, way: str, path: Path | None, agreement: Agreement, policy: PolicyConfig,
    args: Any, *, writes: bool,
) -> Proof:  # fmt: skip
    """The proof of a starting server, in the state in which an earlier server ended under the same
    conditions; all ranks take the first rank's. A refuted one stays refuted, with a line in the
    log, unless `policy.proof` is all. `way`: way of copying. `path`: the file, if there is one;
    this rank `writes` it. `args`: SGLang's. A collective.
    """
    device = ", ".join(filter(None, (device_name(controller), driver())))
    proof = Proof(device, way)
    if policy.restore == "off":
        return proof
    here = conditions(controller, page_of(controller), way, args)
    shown = find(path, here)
    begun = State.PROVING if shown is None else shown.verdict
    state = State(int(agreement.first_says([float(begun)])[0]))
    if state is State.PROVEN:
        proof.was_proven()
    elif state is State.REFUTED and policy.proof != "all":
        proof.refute()
        logger.warning(
            "kvtier: restoring is off: it was not right on %s%s. To try again, delete %s or set "
            'policy.proof = "all"', device, _as_told(shown), path,
        )  # fmt: skip
    if writes and path is not None:
        proof.changed = partial(_keep_verdict, path, here)
    return proof


def page_of(controller: Any) -> str:
    """The shape of this controller's pages, in one line."""
    shape = shape_of(host_pool_of(controller)).fields()
    layers = {"layers": controller.transfer_layer_id_max}
    names = "+".join(str(entry.name) for entry in slot_pools.beside(controller))
    beside = {"beside": names} if names else {}
    return " ".join(f"{name}={value}" for name, value in {**shape, **layers, **beside}.items())


def _as_told(shown: Shown | None) -> str:
    """When and what an earlier server has found."""
    if shown is None:
        return ""
    return f" on {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(shown.written))} ({shown.what})"


def _keep_verdict(path: Path, here: dict[str, str], proof: Proof) -> None:
    """Writes the verdict in a thread, since a disk may be slow. Scheduler's thread."""
    difference, what = proof.difference, ""
    if difference is not None:
        what = f"{difference.check}: {difference.what}"
    state = next(name for name, one in _STATES.items() if one is proof.state)
    shown = Shown(here, state, proof.pages["equal"], proof.nbytes, what)

    def write() -> None:
        try:
            keep(path, shown)
        except OSError as error:
            logger.warning("kvtier: what was shown cannot be kept in %s: %s", path, error.strerror)

    threading.Thread(target=write, name="kvtier-proof-file").start()
