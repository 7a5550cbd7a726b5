"""`kvtier serve`: SGLang's own server command with the flags we recommend."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from sgl_kvtier.arguments import port, size
from sgl_kvtier.config import load_config
from sgl_kvtier.errors import BenchError, ConfigError
from sgl_kvtier.launch import detect_device, missing_packages, refuse_taken_port, serve_flags

_DEFAULT_PORT = 30000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. The command line puts what follows `--` into `extra`."""
    parser.add_argument(
        "model",
        help="a model's folder or name; `kvtier model NAME` writes a small one and prints its folder",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="folder for the pages; a settings file is written beside it (DIR.json)",
    )
    parser.add_argument(
        "--capacity",
        type=size,
        default=64 << 30,
        metavar="SIZE",
        help="most bytes in it (default 64GiB)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="an own kvtier.json, instead of --store and --capacity",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is an NVIDIA device"
    )
    parser.add_argument("--port", type=port, default=_DEFAULT_PORT, help="default %(default)s")
    parser.usage = "%(prog)s MODEL (--store DIR | --config FILE) [options] [-- SGLANG ARGUMENTS, which win over ours]"
    parser.add_argument(
        "--print",
        dest="only_print",
        action="store_true",
        help="print the command instead of running it",
    )
    parser.set_defaults(extra=[])


def run(args: argparse.Namespace) -> int:
    """Prints or becomes the server. Raises ConfigError for a wrong settings file, BenchError when
    it cannot start.
    """
    device = args.device or detect_device()
    settings = _settings_path(args)
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *serve_flags(args.model, device, settings, args.extra),
    ]
    command += [] if "--port" in args.extra else ["--port", str(args.port)]
    # With OpenMP's default spin-wait one busy neighbour slows CPU inference by an order of
    # magnitude.
    added = {"OMP_WAIT_POLICY": "PASSIVE"} if device == "cpu" else {}
    if args.only_print:
        if args.config is None and not settings.exists():
            print(f"# {settings} would be written: {json.dumps(_settings(args))}")
        print(
            " ".join([*(f"{name}={value}" for name, value in added.items()), shlex.join(command)])
        )
        return 0
    if missing_packages():
        raise BenchError(
            "SGLang is not installed. Install it with: pip install 'sgl-kvtier[sglang]'"
        )
    refuse_taken_port(args.port)
    if args.config is None:
        _write_settings(args, settings)
    load_config(settings)
    print(shlex.join(command), file=sys.stderr, flush=True)
    # The server takes this process's place, so signals, service managers and exit statuses are its
    # own.
    os.execve(sys.executable, command, {**os.environ, **added})
    raise AssertionError("unreachable")


def _settings_path(args: argparse.Namespace) -> Path:
    if args.config is not None:
        if args.store is not None:
            raise ConfigError(
                "give --config or --store, not both: the store's folder is store.path in that file"
            )
        load_config(args.config)
        return Path(args.config).resolve()
    if args.store is None:
        raise ConfigError(
            "say where pages are kept: --store DIR on a local SSD, or --config kvtier.json"
        )
    folder = Path(args.store).resolve()
    return folder.with_name(folder.name + ".json")


def _settings(args: argparse.Namespace) -> dict[str, object]:
    return {"store": {"path": str(Path(args.store).resolve()), "capacity_bytes": args.capacity}}


def _write_settings(args: argparse.Namespace, path: Path) -> None:
    wanted = json.dumps(_settings(args), indent=1) + "\n"
    try:
        if path.exists() and path.read_text() != wanted:
            raise ConfigError(
                f"{path} exists and says something else: use it with --config {path}, or remove it"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
