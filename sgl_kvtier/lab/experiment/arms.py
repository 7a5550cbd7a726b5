"""The arms of a comparison as launch flags for the same model, pools, chunk and page size.

The flags we recommend are here as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.outside import peers
from sgl_kvtier.lab.outside.model_shapes import names_attention
from sgl_kvtier.lab.outside.server import Launch
from sgl_kvtier.lab.paced.launching import LAYERS, LOG, MOONCAKE_WAITS, Paced, is_paced, parse
from sgl_kvtier.launch import HOST, MIXED, cache_flags, device_flags, storage_flags

BASELINE = "recompute"
OURS = "kvtier"
NIXL = "hicache-nixl"
MOONCAKE = "hicache-mooncake"
NOT_RESTORED = "kvtier-off"
NOT_AHEAD = "kvtier-restore"
NOT_PROVEN = "kvtier-unproven"
ORACLE = "oracle"
"""An arm that `oracle` makes, not one of `ARMS`."""
WITHOUT_LOOKAHEAD = {"prefetch": "off", "eviction": "lru"}
"""Of the policy section, whatever the device's default is."""


@dataclass(frozen=True)
class Arm:
    """One configuration of SGLang. `storage` is SGLang's name of its storage backend, empty for
    none; `policy` is more of kvtier.json's policy section, for our backend; `arguments` are more of
    SGLang's. `is_usual`: compared unless others are named.
    """

    about: str
    storage: str = ""
    policy: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    is_usual: bool = False


ARMS = {
    BASELINE: Arm(
        "radix cache on the device only: what was evicted is computed again", is_usual=True
    ),
    "hicache": Arm("SGLang's HiCache with its host pool, no storage", is_usual=True),
    "hicache-file": Arm(
        "HiCache with its host pool and SGLang's own file backend as storage", "file", is_usual=True
    ),
    NIXL: Arm(
        "HiCache with its host pool and SGLang's own NIXL backend as storage: its POSIX plugin on files",
        "nixl",
    ),
    MOONCAKE: Arm(
        "HiCache with its host pool and SGLang's own Mooncake backend as storage: a master and an owner of memory on this host",
        "mooncake",
    ),
    NOT_RESTORED: Arm(
        "HiCache with its host pool and kvtier as storage, read back as SGLang does it: policy.restore is off",
        "kvtier",
        {"restore": "off", **WITHOUT_LOOKAHEAD},
    ),
    NOT_AHEAD: Arm(
        "HiCache with its host pool and kvtier as storage, without looking ahead",
        "kvtier",
        WITHOUT_LOOKAHEAD,
    ),
    NOT_PROVEN: Arm(
        "HiCache with its host pool and kvtier as storage, without the proof of what is restored: policy.proof is off",
        "kvtier",
        {"proof": "off"},
    ),
    OURS: Arm("HiCache with its host pool and kvtier as storage", "kvtier", is_usual=True),
}
"""By name. The order is the one results are shown in."""

DEFAULT_ARMS = tuple(name for name, arm in ARMS.items() if arm.is_usual)
STORAGE_ARMS = tuple(name for name, arm in ARMS.items() if arm.storage)


@dataclass(frozen=True)
class Variant:
    """An arm of one comparison's own: an arm of `ARMS` with more of kvtier.json's policy section,
    more of SGLang's arguments, variables of its own, or another device pool.
    """

    kind: str
    about: str
    policy: Mapping[str, Any] = field(default_factory=dict)
    device_tokens: int | None = None
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    mixes: bool = True
    """Whether chunks are mixed with decoding, where the arm of `ARMS` has it so."""


@dataclass(frozen=True)
class Setup:
    """Settings that all arms have in common. None leaves a choice to SGLang. `sections` are more of
    kvtier.json, for our arms; `dilation` and `paced_layers` are a paced device's; `variants` are
    arms beside those of `ARMS`.
    """

    model_path: str
    served_name: str
    device: str
    page_size: int
    chunk_tokens: int
    dtype: str = "auto"
    device_tokens: int | None = None
    host_ratio: float = 2.0
    storage_bytes: int = 4 << 30
    prefetch_threshold: int = 256
    context_tokens: int | None = None
    max_running: int | None = None
    seed: int = 0
    threads: int = 1
    tp: int = 1
    extra: tuple[str, ...] = ()
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dilation: float = 1.0
    paced_layers: int = LAYERS
    variants: Mapping[str, Variant] = field(default_factory=dict)
    stock_reads: str | None = None
    """SGLang's policy of reading ahead for its own backends; ours have the default."""
    master: str = ""
    """Where Mooncake's master listens, as host:port, for the arm that is SGLang's own backend."""
    linked: bool = False
    """Whether its memory is reached over a link of a set speed, which takes the place of the disk of
    a paced device.
    """

    @property
    def paced(self) -> Paced | None:
        """The paced device that servers run on, if it is one."""
        if not is_paced(self.device):
            return None
        return parse(self.device, self.dilation, self.extra, self.paced_layers)

    @property
    def host(self) -> str:
        """The kind of machine that servers run on: a paced device is on a CPU."""
        return "cpu" if is_paced(self.device) else self.device

    @property
    def host_tokens(self) -> int | None:
        """Tokens in the host pool of the arms that have one; None where SGLang sizes the device
        pool.
        """
        return None if self.device_tokens is None else int(self.device_tokens * self.host_ratio)


def oracle(tokens: int) -> Variant:
    """The arm without a cache beside the device, whose device pool has this number of tokens."""
    return Variant(BASELINE, "the device pool holds everything: nothing is evicted", {}, tokens)


def storage_folder(folder: Path) -> Path:
    """Where an arm keeps its storage tier, inside the arm's own folder."""
    return folder / "storage"


def prepare(arm: str, setup: Setup, folder: Path) -> Launch:
    """The launch of one arm, its folder made and its settings file written. Raises BenchError for
    an unknown arm.
    """
    check_arms([arm], setup.variants)
    check_dtype(setup)
    folder.mkdir(parents=True, exist_ok=True)
    variant = setup.variants.get(arm)
    more: tuple[str, ...] = ()
    own: Mapping[str, str] = {}
    mixes = setup.device != "cpu"
    if variant is not None:
        arm, setup = variant.kind, _varied(setup, variant)
        more, own, mixes = variant.arguments, variant.env, mixes and variant.mixes
    row = ARMS[arm]
    flags = [*base_flags(setup)]
    env = {**server_env(setup), **own}
    paced = setup.paced
    if paced is not None:
        flags += paced.flags()
        env |= paced.env(folder / LOG)
        if row.storage == "mooncake" and not setup.linked:
            env[MOONCAKE_WAITS] = "1"
    if arm != BASELINE:
        flags += cache_flags(setup.host, setup.host_ratio)
    if row.storage:
        storage = storage_folder(folder)
        settings = folder / "storage.json"
        settings.write_text(json.dumps(_storage_settings(row, setup, storage), indent=1) + "\n")
        flags += storage_flags(row.storage, f"@{settings}")
        if row.storage == "kvtier" and arm != NOT_RESTORED and mixes:
            flags.append(MIXED)
        if setup.stock_reads is not None and row.storage != "kvtier":
            flags += ("--hicache-storage-prefetch-policy", setup.stock_reads)
        if row.storage == "file":
            env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(storage)
            env["SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"] = str(setup.storage_bytes)
        if row.storage == "nixl":
            env[peers.NIXL_FOLDER] = str(storage)
    return Launch((*flags, *row.arguments, *setup.extra, *more), env)


def missing(arm: str) -> str | None:
    """Why this arm of `ARMS` cannot be started here: a wheel or library that is not installed. None
    where nothing speaks against it. Takes seconds.
    """
    storage = ARMS[arm].storage
    if storage == "nixl":
        return peers.missing_nixl()
    return peers.missing_mooncake() if storage == "mooncake" else None


def kind_of(arm: str, setup: Setup) -> str:
    """The arm of `ARMS` that this one is, or is a variant of."""
    variant = setup.variants.get(arm)
    return arm if variant is None else variant.kind


def storage_of(arm: str, setup: Setup) -> str:
    """SGLang's name of the storage backend that an arm has; empty for none, and for an arm that is
    neither one of `ARMS` nor a variant in `setup`.
    """
    kind = kind_of(arm, setup)
    return ARMS[kind].storage if kind in ARMS else ""


def check_arms(arms: Sequence[str], more: Collection[str] = ()) -> None:
    """Raises BenchError, with the names there are, if one is unknown, given twice, or none is
    given. `more` are names beside those of `ARMS`.
    """
    check_names(arms, [*ARMS, *more])


def check_names(arms: Sequence[str], known: Sequence[str]) -> None:
    """Raises BenchError, with the names there are, unless all are known, each once, and one at
    least.
    """
    unknown = [arm for arm in arms if arm not in known]
    if unknown or not arms or len(set(arms)) < len(arms):
        wrong = (
            f"no configuration named {', '.join(unknown)}"
            if unknown
            else "each configuration once, and at least one"
        )
        raise BenchError(f"--arms: {wrong}. There are: {', '.join(known)}")


def check_dtype(setup: Setup) -> None:
    """Raises BenchError for numbers that the attention on an accelerator does not have."""
    flashinfer = setup.host != "cpu" and not names_attention(setup.extra)
    if flashinfer and setup.dtype == "float32":
        raise BenchError(
            "--dtype float32: FlashInfer has no kernels for it. Give --dtype bfloat16, or "
            "--server-arg=--attention-backend --server-arg=triton"
        )


_OF_THE_MODEL = (
    "--model-path",
    "--mamba-radix-cache-strategy",
    "--attention-backend",
    "--prefill-attention-backend",
    "--decode-attention-backend",
    "--sampling-backend",
    "--kv-cache-dtype",
    "--cuda-graph-backend-decode",
    "--cuda-graph-backend-prefill",
)


def model_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Of a server's further arguments those on which its numbers depend: the model, and the kernels
    that it computes with. Another server with them, and without the others, gives the same answers.
    A flag and its value are one word (`--flag=value`) or two.
    """
    found: list[str] = []
    for place, word in enumerate(words):
        if word.partition("=")[0] in _OF_THE_MODEL:
            found += words[place : place + (1 if "=" in word else 2)]
    return tuple(found)


def base_flags(setup: Setup) -> list[str]:
    """The flags every arm has."""
    flags = ["--model-path", setup.model_path, "--served-model-name", setup.served_name]
    flags += ["--random-seed", str(setup.seed), "--dtype", setup.dtype, "--tp-size", str(setup.tp)]
    flags += [
        "--page-size",
        str(setup.page_size),
        "--chunked-prefill-size",
        str(setup.chunk_tokens),
    ]
    if setup.device_tokens is not None:
        flags += ["--max-total-tokens", str(setup.device_tokens)]
    if setup.context_tokens is not None:
        flags += ["--context-length", str(setup.context_tokens)]
    if setup.max_running is not None:
        flags += ["--max-running-requests", str(setup.max_running)]
    flags += [*device_flags(setup.host), *attention_flags(setup.host), *greedy_flags(setup.host)]
    return [*flags, "--enable-metrics", "--enable-cache-report"]


def attention_flags(device: str) -> list[str]:
    """All measurements on an accelerator are with one attention backend, so that they can be
    compared: FlashInfer, which scripts/gpu-pack brings compiled. A user's own server has what
    SGLang chooses.
    """
    return [] if device == "cpu" else ["--attention-backend", "flashinfer"]


def greedy_flags(device: str) -> list[str]:
    """For a server that only returns the most likely token: on an accelerator torch samples,
    unless FlashInfer's sampling modules are compiled. Else the first request waits for nvcc.
    """
    return [] if device == "cpu" or _has_sampling() else ["--sampling-backend", "pytorch"]


def _has_sampling() -> bool:
    found = [*_folders("flashinfer"), *_folders("flashinfer_jit_cache")]
    return any(any(folder.glob("**/sampling/sampling.so")) for folder in found)


def _folders(package: str) -> list[Path]:
    """Where an installed package lies; it is not imported."""
    spec = find_spec(package)
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec else []


def server_env(setup: Setup) -> dict[str, str]:
    """Variables for one server. They bound its threads, and on a CPU keep waiting threads from
    spinning.
    """
    env = {"TOKENIZERS_PARALLELISM": "false"}
    if setup.host == "cpu":
        # With OpenMP's default spin-wait one busy neighbour slows two-thread torch by an order of
        # magnitude.
        env |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(setup.threads)}
    return env


def _varied(setup: Setup, variant: Variant) -> Setup:
    policy = {**setup.sections.get("policy", {}), **variant.policy}
    return replace(
        setup,
        device_tokens=variant.device_tokens or setup.device_tokens,
        sections={**setup.sections, "policy": policy} if variant.policy else setup.sections,
    )


def _storage_settings(arm: Arm, setup: Setup, storage: Path) -> dict[str, object]:
    settings: dict[str, object] = {"prefetch_threshold": setup.prefetch_threshold}
    if setup.paced is not None:
        settings |= setup.paced.settings()
    if arm.storage == "nixl":
        settings |= peers.NIXL_SETTINGS
    if arm.storage == "mooncake":
        # The memory is an owner's: that of a server goes with the server.
        settings |= {"master_server_address": setup.master, "local_hostname": HOST}
        settings |= {"metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
        settings["global_segment_size"] = 0
    if arm.storage == "kvtier":
        settings["store"] = {"path": str(storage), "capacity_bytes": setup.storage_bytes}
        settings |= setup.sections
        if arm.policy:
            settings["policy"] = {**setup.sections.get("policy", {}), **arm.policy}
    return settings
