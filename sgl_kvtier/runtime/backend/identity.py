"""The model fingerprint (identity) of a server's pages: everything that changes the meaning of a KV
page's bytes.

Two servers share pages if and only if all fields are equal; otherwise they use different namespaces
of the store and get no hits from each other. SGLang's page hashes cover only tokens, cache salt,
and names and paths of LoRA adapters, so everything else is here.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs

from sgl_kvtier.runtime.backend.file_digests import FileDigests, is_hexadecimal
from sgl_kvtier.runtime.backend.fingerprint_fields import (
    ARGUMENTS,
    PATH_VARIABLES,
    PATHS,
    VARIABLES,
)
from sgl_kvtier.runtime.backend.page_shape import PageShape, RankShare
from sgl_kvtier.runtime.sglang import page_hash, seams
from sgl_kvtier.store.disk.identity import Identity

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npy")
_NOT_FOR_INFERENCE = (
    "training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt",
)  # fmt: skip
"""Files that SGLang does not load from a folder of weights either."""
_OF_TOKENS = (
    "tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template",
    "generation_config",
)  # fmt: skip
_FROM_ELSEWHERE = ("remote", "remote_instance")
"""Load formats whose weights do not come from the model's folder."""
_runtime_weights: str | None = None


def weights_changed() -> None:
    """Notes that the weights in memory differ from those on disk: this server gets a fingerprint of
    its own, once its ranks agree on it (`agree_on_weights`).
    """
    global _runtime_weights
    _runtime_weights = uuid.uuid4().hex


def agree_on_weights() -> None:
    """Takes over the first TP rank's name for weights that were changed at run time. Called before
    a store is opened. A collective of the TP ranks, but only if weights were changed, which SGLang
    does on all of them.
    """
    global _runtime_weights
    if _runtime_weights is not None:
        _runtime_weights = parallel_state.get_tp_group().broadcast_object(_runtime_weights)


def identity_of(
    server_args: Any, ranks: RankShare, pools: Mapping[str, PageShape], kept: str | None = None
) -> Identity:
    """The fingerprint of a server's pages. It is the same on all TP ranks of a pipeline stage, and
    on all ranks until weights are changed at run time.

    `server_args` is the resolved view; `pools` are the shapes of pages by pool name; `kept` is the
    folder that keeps the digests of files. Which layers and heads a rank holds follows from the
    sizes here and the rank's folder (`RankShare.folder`).
    """
    files = FileDigests(kept)
    dummy = server_args.load_format == "dummy"
    code = bool(getattr(server_args, "trust_remote_code", False))
    fields: dict[str, Any] = {
        "names": page_hash.names_digest(),
        "layout": seams.page_format(),
        "model": _arguments(server_args),
        "weights": _runtime_weights
        or weights_digest(_model_of(server_args), files, weights=not dummy, code=code),
        "ranks": ranks.sizes(),
        "pp_layer_partition": os.environ.get("SGLANG_PP_LAYER_PARTITION"),
        "pools": {name: shape.fields() for name, shape in sorted(pools.items())},
    }
    variables = _variables()
    if variables:
        fields["variables"] = variables
    others = {
        name: weights_digest(path, files, code=code)
        for name, path in _read_here(server_args).items()
    }
    if others:
        fields["files"] = others
    adapters = adapter_digests(server_args, files)
    if adapters:
        fields["adapters"] = adapters
    return Identity(json.loads(json.dumps(fields)), name=Path(str(server_args.model_path)).name)


def not_shareable(server_args: Any) -> str | None:
    """Why pages with this fingerprint cannot be shared with other hosts, where other weights may
    have the same fingerprint; or None.
    """
    if _runtime_weights is not None:
        return "weights were changed at run time, so no other server has these"
    if server_args.load_format in _FROM_ELSEWHERE:
        return f"weights come from elsewhere (--load-format {server_args.load_format})"
    if server_args.load_format != "dummy" and not _has_weights(_model_of(server_args)):
        return (
            f"the weights of {server_args.model_path} cannot be read here, only their path is known"
        )
    download_dir = getattr(server_args, "download_dir", None)
    for adapter in getattr(server_args, "lora_paths", None) or ():
        path = _adapter_path(adapter)
        if not _has_weights(model_folder(path, None, download_dir, "adapter_config.json")):
            return (
                f"the weights of the adapter {path} cannot be read here, only their path is known"
            )
    for name, other in _read_here(server_args).items():
        if not _has_weights(other):
            flag = name if name in PATH_VARIABLES else f"--{name.replace('_', '-')}"
            return f"{flag} {other} cannot be read here, only its path is known"
    return None


def _model_of(server_args: Any) -> Path:
    return model_folder(
        server_args.model_path, server_args.revision, getattr(server_args, "download_dir", None)
    )


def _has_weights(path: Path) -> bool:
    """Whether `weights_digest` finds weights at this path."""
    return path.is_file() or (
        path.is_dir() and any(file.suffix in _WEIGHT_SUFFIXES for file in path.iterdir())
    )


def adapter_digests(server_args: Any, files: FileDigests | None = None) -> dict[str, str]:
    """Digests of the LoRA adapters that a server is started with, by name and path. Adapters loaded
    later get a new id from SGLang each time, so their pages are never found again.
    """
    digests = {}
    for adapter in getattr(server_args, "lora_paths", None) or ():
        name, path = getattr(adapter, "lora_name", None), _adapter_path(adapter)
        folder = model_folder(
            path,
            download_dir=getattr(server_args, "download_dir", None),
            config="adapter_config.json",
        )
        digests[f"{name} {path}"] = weights_digest(folder, files)
    return digests


def _adapter_path(adapter: Any) -> str:
    return getattr(adapter, "lora_path", None) or str(adapter)


def model_folder(
    model_path: str,
    revision: str | None = None,
    download_dir: str | None = None,
    config: str = "config.json",
) -> Path:
    """The folder of a model's files: the path itself, or the snapshot of that name in a hub cache.
    `config` is a file that every such folder has.
    """
    folder = Path(model_path)
    if folder.exists():
        return folder
    try:
        from huggingface_hub import (
            try_to_load_from_cache,
        )  # comes with SGLang; not needed for local folders

        found = try_to_load_from_cache(
            model_path, config, cache_dir=download_dir, revision=revision
        )
    except (ImportError, ValueError):  # ValueError: not a valid name on a hub
        return folder
    return Path(found).parent if isinstance(found, str) else folder


def weights_digest(
    model_path: Path, files: FileDigests | None = None, *, weights: bool = True, code: bool = False
) -> str:
    """A digest of all bytes of a model folder's configuration and weights, computed by `files` so
    that each is read once.

    The tokenizer, the chat template and the sampling defaults are excluded: they change which
    tokens a prompt has or which are chosen, and pages are found by tokens. Image processor files
    count, because an image may be identified by the bytes that a client sent. Without `weights`
    (random ones) only the configuration counts; with `code` the model's own modules do too. A file
    whose real name is its own SHA-256 (in a hub cache) is taken at its name. If there is no file to
    read (a remote model), only the path counts.
    """
    if model_path.is_file():
        paths = [model_path]
    elif model_path.is_dir():
        paths = [path for path in sorted(model_path.iterdir()) if _counts(path, weights, code)]
    else:
        return hashlib.sha256(f"path {model_path}".encode()).hexdigest()
    named = {path: path.resolve().name for path in paths}
    known = {path: name for path, name in named.items() if is_hexadecimal(name)}
    known |= (files or FileDigests()).of([path for path in paths if path not in known])
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {known[path]}\n".encode())
    return digest.hexdigest()


def _counts(path: Path, weights: bool, code: bool) -> bool:
    if not path.is_file() or path.name in _NOT_FOR_INFERENCE:
        return False
    if path.suffix in _WEIGHT_SUFFIXES:
        return weights
    if path.suffix == ".py":
        return code
    return path.suffix == ".json" and not path.name.startswith(_OF_TOKENS)


def _arguments(args: Any) -> dict[str, str]:
    values = {name: getattr(args, name, None) for name in ARGUMENTS}
    # An argument that is off counts like one that an older release does not have.
    fields = {name: _text(v) for name, v in values.items() if v is not None and v is not False}
    if args.load_format == "dummy":
        fields["seed"] = str(args.random_seed)
    return fields


def _text(value: Any) -> str:
    """The same text in every process: the order of a set varies between processes."""
    return str(sorted(value) if isinstance(value, (set, frozenset)) else value)


def _variables() -> dict[str, str]:
    """Environment variables with another value than SGLang's default."""
    found = {}
    for name in VARIABLES:
        known = vars(type(envs)).get(name)
        if known is None:
            value, default = os.environ.get(name), None
        else:  # it also knows earlier names of a variable
            value = known.get()
            default = known.default() if callable(known.default) else known.default
        if value != default:
            found[name] = str(value)
    return found


def _read_here(server_args: Any) -> dict[str, Path]:
    """Other files and folders that change its pages, by the argument or variable that names
    them.
    """
    found = {}
    for name in PATHS:
        path = getattr(server_args, name, None)
        if not path or path == server_args.model_path:
            continue
        revision = None
        if name == "speculative_draft_model_path":
            revision = getattr(server_args, "speculative_draft_model_revision", None)
        found[name] = model_folder(str(path), revision, getattr(server_args, "download_dir", None))
    for name in PATH_VARIABLES:
        if os.environ.get(name):
            found[name] = Path(os.environ[name])
    return found
