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

from sgl_kvtier.outside import is_whole, parse_json
from sgl_kvtier.runtime.backend.page_shape import PageShape, RankShare
from sgl_kvtier.runtime.sglang.seams import SGLANG_VERSION
from sgl_kvtier.store.disk.identity import Identity

_HASHED_NAME = 64
_SAMPLE_BYTES = 1024
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_runtime_weights: str | None = None


def weights_changed() -> None:
    """Notes that the weights in memory are no longer those on disk: from now on this process has an
    identity of its own.
    """
    global _runtime_weights
    _runtime_weights = uuid.uuid4().hex


def identity_of(server_args: Any, ranks: RankShare, pools: Mapping[str, PageShape]) -> Identity:
    """The identity of a server's pages, the same on all of its ranks.

    `server_args` is the resolved view; `pools` are the shapes of pages by the name of their pool.
    Which layers and heads a rank holds follows from the sizes here and the rank's folder
    (`RankShare.folder`).
    """
    fields: dict[str, Any] = {
        "engine": f"sglang-{SGLANG_VERSION}",
        "model": _model_fields(server_args),
        "weights": _runtime_weights
        or weights_digest(
            model_folder(
                server_args.model_path,
                server_args.revision,
                getattr(server_args, "download_dir", None),
            )
        ),
        "ranks": ranks.sizes(),
        "pp_layer_partition": os.environ.get("SGLANG_PP_LAYER_PARTITION"),
        "pools": {name: shape.fields() for name, shape in sorted(pools.items())},
    }
    adapters = adapter_digests(server_args)
    if adapters:
        fields["adapters"] = adapters
    return Identity(json.loads(json.dumps(fields)), name=Path(str(server_args.model_path)).name)


def not_shareable(server_args: Any) -> str | None:
    """Why pages under this identity cannot be shared with other hosts, or None: on another host
    other weights may have the same identity.
    """
    if _runtime_weights is not None:
        return "weights were changed at run time, so no other server has these"
    download_dir = getattr(server_args, "download_dir", None)
    weights = model_folder(server_args.model_path, server_args.revision, download_dir)
    if server_args.load_format != "dummy" and not _has_weights(weights):
        return (
            f"the weights of {server_args.model_path} cannot be read here, only their path is known"
        )
    for adapter in getattr(server_args, "lora_paths", None) or ():
        path = _adapter_path(adapter)
        if not _has_weights(model_folder(path, None, download_dir, "adapter_config.json")):
            return (
                f"the weights of the adapter {path} cannot be read here, only their path is known"
            )
    for name in ("speculative_draft_model_path", "quantization_param_path"):
        other = getattr(server_args, name, None)
        if other and other != server_args.model_path:
            return f"of --{name.replace('_', '-')} {other} the identity has only the path"
    return None


def _has_weights(path: Path) -> bool:
    """Whether `weights_digest` of this path is one of weights."""
    return path.is_file() or (
        path.is_dir() and any(file.suffix in _WEIGHT_SUFFIXES for file in path.iterdir())
    )


def adapter_digests(server_args: Any) -> dict[str, str]:
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
        digests[f"{name} {path}"] = weights_digest(folder)
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


def weights_digest(model_path: Path) -> str:
    """A digest of a model folder's configuration and weights that reads little of them.

    Of each weight file: its name, size and header, and a kilobyte at both ends of every tensor. So
    a changed tensor, a merged adapter or another training step is seen. A file whose real name is
    its own SHA-256 (a hub cache) is identified by its name. Where there is no folder to read (a
    remote model), the path is all there is.
    """
    digest = hashlib.sha256()
    if model_path.is_file():
        _add_weight_file(digest, model_path)
        return digest.hexdigest()
    if not model_path.is_dir():
        digest.update(f"path {model_path}".encode())
        return digest.hexdigest()
    for path in sorted(model_path.iterdir()):
        if path.name in (
            "config.json",
            "quantize_config.json",
            "hf_quant_config.json",
            "adapter_config.json",
        ):
            digest.update(path.read_bytes())
        elif path.suffix in _WEIGHT_SUFFIXES:
            _add_weight_file(digest, path)
    return digest.hexdigest()


def _add_weight_file(digest: Any, path: Path) -> None:
    real = path.resolve()
    size = real.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    if len(real.name) == _HASHED_NAME and all(c in "0123456789abcdef" for c in real.name):
        digest.update(real.name.encode())
        return
    with real.open("rb") as file:
        offsets = (
            _sample_offsets(file, size)
            if path.suffix == ".safetensors"
            else range(0, size, max(1, size // 1024))
        )
        for offset in offsets:
            file.seek(max(0, offset))
            digest.update(file.read(_SAMPLE_BYTES))


def _sample_offsets(file: Any, size: int) -> list[int]:
    """Both ends of every tensor of a safetensors file, whose 8-byte little-endian length and JSON
    header are hashed whole.
    """
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > min(size, 100 << 20):
        return list(range(0, size, max(1, size // 1024)))
    start = 8 + header_bytes
    offsets = list(range(0, start, _SAMPLE_BYTES))
    try:
        ends = [
            entry["data_offsets"]
            for entry in parse_json(file.read(header_bytes)).values()
            if "data_offsets" in entry
        ]
        for first, last in ends:
            if not (is_whole(first, 0, size) and is_whole(last, 0, size)):
                raise ValueError("a tensor outside of its file")
            offsets += [start + first, start + last - _SAMPLE_BYTES]
    except (ValueError, TypeError, AttributeError):  # a damaged file, of which SGLang will say so
        return list(range(0, size, max(1, size // 1024)))
    return offsets


def _model_fields(args: Any) -> dict[str, Any]:
    names = (
        "revision",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "json_model_override_args",
        "load_format",
        "speculative_algorithm",
        "speculative_draft_model_path",
        "quantization_param_path",
    )
    fields = {name: str(getattr(args, name, None)) for name in names}
    if fields["load_format"] == "dummy":
        fields["seed"] = str(args.random_seed)
    return fields
