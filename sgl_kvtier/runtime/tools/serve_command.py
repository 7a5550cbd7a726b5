"""`kvtier serve`: SGLang's own server command with recommended flags."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import above_nought, any_device, path, port, size
from sgl_kvtier.config import PolicyConfig, parse_config
from sgl_kvtier.errors import BenchError, ConfigError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.launch import (
    HOST,
    detect_device,
    host_of,
    missing_packages,
    paced_device,
    refuse_missing_model,
    refuse_taken_port,
    serve_flags,
)
from sgl_kvtier.page_hash import compile_page_hash
from sgl_kvtier.runtime.settings import (
    CAPACITY_VARIABLE,
    PATH_VARIABLE,
    of_file,
    store_of_environment,
)

_DEFAULT_PORT = 30000
_LOOKAHEAD = {
    "auto": {"prefetch": "auto", "eviction": "auto"},
    "on": {"prefetch": "on", "eviction": "next-use"},
    "off": {"prefetch": "off", "eviction": "lru"},
}


def _capacity(text: str) -> int | str:
    """A size, or a percentage of the disk, which the settings check."""
    return text if text.endswith("%") else size(text)


def _choices(name: str) -> tuple[str, ...]:
    """The allowed values of a policy setting."""
    (found,) = (f for f in fields(PolicyConfig) if f.name == name)
    return tuple(found.metadata["choices"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. The command line puts what follows `--` into `extra`."""
    parser.add_argument(
        "model",
        nargs="?",
        help="a model's folder or name; `kvtier model NAME` writes a small one and prints its "
        "folder. An emulated GPU brings its own",
    )
    parser.add_argument(
        "--store",
        type=path,
        metavar="DIR",
        help=f"folder for the pages (default ${PATH_VARIABLE}, or ~/.cache/kvtier/pages)",
    )
    parser.add_argument(
        "--capacity",
        type=_capacity,
        metavar="SIZE",
        help=f"most bytes in it, or a share of its disk such as 80%% (default "
        f"${CAPACITY_VARIABLE}, or 64GiB)",
    )
    parser.add_argument(
        "--restore",
        choices=_choices("restore"),
        help="how prefixes are brought back (policy.restore; default auto)",
    )
    parser.add_argument(
        "--lookahead",
        choices=("auto", "on", "off"),
        help="prefetch pages for requests that wait and sessions that return, and evict by next "
        "use (policy.prefetch, policy.eviction; default auto)",
    )
    parser.add_argument(
        "--config",
        type=path,
        metavar="FILE",
        help="your kvtier.json, instead of --store, --capacity, --restore and --lookahead",
    )
    parser.add_argument(
        "--device",
        type=any_device,
        metavar="cpu|cuda|paced:PROFILE[@GB/s]",
        help="default: cuda where there is an NVIDIA GPU. paced: an emulated GPU, which takes the "
        "GPU's time and computes nothing, to see what a server would do there; its disk reads "
        "6.4 GB/s or what follows the @",
    )
    parser.add_argument(
        "--dilation",
        type=above_nought,
        default=1.0,
        metavar="D",
        help="of an emulated GPU: everything takes D times as long (default 1)",
    )
    parser.add_argument("--port", type=port, default=_DEFAULT_PORT, help="default %(default)s")
    parser.usage = (
        "%(prog)s (MODEL | --device paced:PROFILE) [--store DIR | --config FILE] "
        "[options] [SGLANG ARGUMENTS, which win over ours]"
    )
    parser.add_argument(
        "--print",
        dest="only_print",
        action="store_true",
        help="print the command instead of running it",
    )
    parser.set_defaults(extra=[])


def run(args: argparse.Namespace) -> int:
    """Prints the command, or becomes the server. Raises ConfigError (settings), BenchError (no
    start).
    """
    device = args.device or detect_device()
    host = host_of(device)
    paced = paced_device(device, args.dilation, args.extra)
    settings, place = _settings(args, paced)
    model, extra = _model(args, paced), args.extra
    # With OpenMP's default spin-wait, one busy neighbour slows CPU inference tenfold.
    added = {"OMP_WAIT_POLICY": "PASSIVE"} if host == "cpu" else {}
    if paced is not None:
        paced.refuse_others(extra)
        _check_settings(args, paced)
        extra = [*paced.serve_flags(), *extra]
        added |= paced.serve_env(place)
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *serve_flags(model, host, settings, extra),
    ]
    own = _address(args.extra)
    address = {"--host": HOST, "--port": str(args.port), **own}
    command += [] if "--port" in own else ["--port", str(args.port)]
    if args.only_print:
        if args.device is None and host == "cpu":
            print("# No GPU was found here: these flags are for a CPU. For a GPU add --device cuda")
        print(
            " ".join(
                [
                    *(f"{name}={shlex.quote(value)}" for name, value in added.items()),
                    shlex.join(command),
                ]
            )
        )
        return 0
    refuse_missing_model(model)
    if missing_packages():
        raise BenchError(
            f"SGLang is not installed. Install it (about 10 GB) with: {how_to_install('sglang')}"
        )
    if address["--port"].isdecimal() and int(address["--port"]) < 1 << 16:  # else SGLang refuses it
        refuse_taken_port(int(address["--port"]), address["--host"])
    refused = compile_page_hash()
    if refused:
        raise BenchError(refused)
    print(shlex.join(command), file=sys.stderr, flush=True)
    # The server replaces this process, so signals, service managers and exit statuses are its own.
    os.execve(sys.executable, command, {**os.environ, **added})
    raise AssertionError("unreachable")


def _address(extra: Sequence[str]) -> dict[str, str]:
    """--host and --port among SGLang's arguments; the last occurrence of each counts."""
    found = dict[str, str]()
    for word, after in zip_longest(extra, extra[1:], fillvalue=""):
        name, joined, value = word.partition("=")
        if name in ("--host", "--port"):
            found[name] = value if joined else after
    return found


def _settings(args: argparse.Namespace, paced: Any) -> tuple[str, Path]:
    """The settings as SGLang takes them (JSON text or @FILE), and the folder for pages. Raises
    ConfigError.
    """
    if args.config is not None:
        if any((args.store, args.capacity, args.restore, args.lookahead)):
            raise ConfigError(
                "give --config or --store, --capacity, --restore and --lookahead, not both: in "
                "that file they are store.path, store.capacity_bytes and the section policy"
            )
        # Reports a mistake in it before a model is loaded.
        pages = of_file(args.config).store.path
        return f"@{Path(args.config).resolve()}", Path(pages)
    store: dict[str, Any] = dict(store_of_environment())
    store |= {"path": str(args.store)} if args.store is not None else {}
    store |= {"capacity_bytes": args.capacity} if args.capacity else {}
    more = {} if paced is None else {**paced.settings(), **paced.sections()}
    policy = {"restore": args.restore} if args.restore else {}
    if args.lookahead is not None:
        policy |= _LOOKAHEAD[args.lookahead]
    if policy:
        more["policy"] = {**more.get("policy", {}), **policy}
    config = parse_config({"store": store, **more})
    # The absolute path, since the server may be started in another folder.
    given = {"store": {**store, "path": config.store.path}, **more}
    return json.dumps(given), Path(config.store.path)


def _model(args: argparse.Namespace, paced: Any) -> str:
    """The model's folder or name. Raises ConfigError if it is missing, or not an emulated GPU's."""
    if paced is None and not args.model:
        raise ConfigError("say which model: its folder or name")
    if paced is not None and args.model is not None:
        raise ConfigError(f"{args.device} brings a model of its own: omit {args.model}")
    return str(args.model) if paced is None else str(paced.model())


def _check_settings(args: argparse.Namespace, paced: Any) -> None:
    """Raises ConfigError if a user's own file lacks the disk and times of an emulated GPU."""
    if args.config is None:
        return
    lacking = _lacking(
        {**paced.settings(), **paced.sections()}, json.loads(args.config.read_text())
    )
    if lacking:
        raise ConfigError(f"{args.config}: on {args.device} it must also say {json.dumps(lacking)}")


def _lacking(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `wanted` that `found` lacks or has with other values."""
    rest = {}
    for key, value in wanted.items():
        if isinstance(value, Mapping):
            rest[key] = _lacking(value, found.get(key, {}))
        elif found.get(key) != value:
            rest[key] = value
    return {key: value for key, value in rest.items() if value != {}}
