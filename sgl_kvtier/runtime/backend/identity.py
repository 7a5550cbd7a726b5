"""The identity of a server's pages: everything that changes what a KV page's bytes mean.

Two servers share pages if and only if all fields are equal; anything else is a different namespace
of the store and gives no hits. SGLang's page hashes cover only tokens, cache salt and the names and
paths of LoRA adapters, so all the rest stands here.
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
"""What SGLang does not load from a folder of weights either."""
_OF_TOKENS = (
    "tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template",
    "generation_config",
)  # fmt: skip
_FROM_ELSEWHERE = ("remote", "remote_instance")
"""Ways to load weights of which the model's folder does not tell."""
_runtime_weights: str | None = None


def weights_changed() -> None:
    """Notes that the weights in memory are no longer those on disk: from now on this server has an
    identity of its own, once its ranks agree on it (`agree_on_weights`).
    """
    global _runtime_weights
    _runtime_weights = uuid.uuid4().hex


def agree_on_weights() -> None:
    """Before a store is opened: takes the first TP rank's name for weights that were changed at run
    time. A collective of the TP ranks, and only where weights were changed, which SGLang does on
    all of them.
    """
    global _runtime_weights
    if _runtime_weights is not None:
        _runtime_weights = parallel_state.get_tp_group().broadcast_object(_runtime_weights)


def identity_of(
    server_args: Any, ranks: RankShare, pools: Mapping[str, PageShape], kept: str | None = None
) -> Identity:
    """The identity of a server's pages, the same on all TP ranks of a pipeline stage, and on all
    ranks until weights are changed at run time.

    `server_args` is the resolved view; `pools` are the shapes of pages by the name of their pool;
    `kept` is the folder that keeps the digests of files that were read.
    Which layers and heads a rank holds follows from the sizes here and the rank's folder
    (`RankShare.folder`).
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
    """Why pages under this identity cannot be shared with other hosts, or None: on another host
    other weights may have the same identity.
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
    """Whether `weights_digest` of this path is one of weights."""
    return path.is_file() or (
        path.is_dir() and any(file.suffix in _WEIGHT_SUFFIXES for file in path.iterdir())
    )


def adapter_digests(server_args: Any, files: FileDigests | None = None) -> dict[str, str]:
    """Digests of the LoRA adapters a server is started with, by name and path. Those that are
    loaded later get an id of their own from SGLang each time, so that their pages are never found
    again.
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
    """The folder of a model's files: the folder itself, or the snapshot that a hub cache holds
    under its name. `config` is a file that every such folder has.
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
    except (ImportError, ValueError):  # ValueError: not a name a hub could have
        return folder
    return Path(found).parent if isinstance(found, str) else folder


def weights_digest(
    model_path: Path, files: FileDigests | None = None, *, weights: bool = True, code: bool = False
) -> str:
    """A digest of a model folder's configuration and weights: every byte of them, by way of `files`
    so that they are read once.

    Of the files in the folder the tokenizer's, the chat template's and the defaults of sampling do
    not count: they change which tokens a prompt has or which are chosen, and pages are found by
    tokens. Those of an image processor do: a picture can be known by the bytes that a client sent.
    Without `weights` (random ones) only the configuration counts; with `code` the model's own
    modules do too. A file whose real name is its own SHA-256 (a hub cache) is taken at its name.
    Where there is no file to read (a remote model), the path is all there is.
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
    # An argument that is off is as one that an older release does not have.
    fields = {name: _text(v) for name, v in values.items() if v is not None and v is not False}
    if args.load_format == "dummy":
        fields["seed"] = str(args.random_seed)
    return fields


def _text(value: Any) -> str:
    """The same text in every process: a set has another order in each."""
    return str(sorted(value) if isinstance(value, (set, frozenset)) else value)


def _variables() -> dict[str, str]:
    """What the environment sets otherwise than SGLang does by itself."""
    found = {}
    for name in VARIABLES:
        known = vars(type(envs)).get(name)
        if known is None:
            value, default = os.environ.get(name), None
        else:  # also under a name that it had before
            value = known.get()
            default = known.default() if callable(known.default) else known.default
        if value != default:
            found[name] = str(value)
    return found


def _read_here(server_args: Any) -> dict[str, Path]:
    """Files and folders besides the model that change its pages, by what names them."""
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
