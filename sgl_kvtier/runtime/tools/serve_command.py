"""`kvtier serve`: SGLang's own server command with the flags we recommend."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sgl_kvtier.arguments import above_nought, any_device, port, size
from sgl_kvtier.config import PolicyConfig, load_config
from sgl_kvtier.errors import BenchError, ConfigError
from sgl_kvtier.launch import (
    detect_device,
    host_of,
    missing_packages,
    paced_device,
    refuse_taken_port,
    serve_flags,
)
from sgl_kvtier.runtime.settings import off_on_a_card

_DEFAULT_PORT = 30000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options. The command line puts what follows `--` into `extra`."""
    parser.add_argument(
        "model",
        nargs="?",
        help="a model's folder or name; `kvtier model NAME` writes a small one and prints its "
        "folder. A paced device brings its own",
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
        "--device",
        type=any_device,
        metavar="cpu|cuda|paced:PROFILE[@GB/s]",
        help="default: cuda where there is an NVIDIA device. paced: computes nothing and takes the "
        "time of an accelerator, with a disk that reads 6.4 GB/s or what follows the @, to see "
        "what a server would do there (sgl_kvtier/lab/paced)",
    )
    parser.add_argument(
        "--dilation",
        type=above_nought,
        default=1.0,
        metavar="D",
        help="of a paced device: everything takes D times as long (default 1)",
    )
    parser.add_argument("--port", type=port, default=_DEFAULT_PORT, help="default %(default)s")
    parser.usage = (
        "%(prog)s (MODEL | --device paced:PROFILE) (--store DIR | --config FILE) "
        "[options] [-- SGLANG ARGUMENTS, which win over ours]"
    )
    parser.add_argument(
        "--print",
        dest="only_print",
        action="store_true",
        help="print the command instead of running it",
    )
    parser.set_defaults(extra=[])


def run(args: argparse.Namespace) -> int:
    """Prints or becomes the server. Raises ConfigError (settings), BenchError (no start)."""
    device = args.device or detect_device()
    settings = _settings_path(args)
    paced = paced_device(device, args.dilation, args.extra)
    model, extra = _model(args, paced), args.extra
    # With OpenMP's default spin-wait one busy neighbour slows CPU inference by an order of
    # magnitude.
    added = {"OMP_WAIT_POLICY": "PASSIVE"} if host_of(device) == "cpu" else {}
    if paced is not None:
        paced.refuse_others(extra)
        _check_settings(args, paced)
        extra = [*paced.serve_flags(), *extra]
        added |= paced.serve_env(settings.with_suffix(".pace.jsonl"))
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *serve_flags(model, host_of(device), settings, extra),
    ]
    command += [] if "--port" in args.extra else ["--port", str(args.port)]
    note = _note(args, host_of(device), settings)
    if args.only_print:
        if note is not None:
            print(f"# {note}")
        if args.config is None and not settings.exists():
            print(f"# {settings} would be written: {json.dumps(_settings(args, paced))}")
        print(
            " ".join(
                [
                    *(f"{name}={shlex.quote(value)}" for name, value in added.items()),
                    shlex.join(command),
                ]
            )
        )
        return 0
    if missing_packages():
        raise BenchError(
            "SGLang is not installed. Install it with: pip install 'sgl-kvtier[sglang]'"
        )
    refuse_taken_port(args.port)
    if args.config is None:
        _write_settings(args, settings, paced)
    load_config(settings)
    if note is not None:
        print(f"kvtier: {note}", file=sys.stderr)
    print(shlex.join(command), file=sys.stderr, flush=True)
    # The server takes this process's place, so signals, service managers and exit statuses are its
    # own.
    os.execve(sys.executable, command, {**os.environ, **added})
    raise AssertionError("unreachable")


def _note(args: argparse.Namespace, host: str, settings: Path) -> str | None:
    """What this server will not do by itself, or None."""
    if host == "cpu":
        return None
    # A file that serve itself writes leaves restoration at its default.
    return off_on_a_card(load_config(settings).policy if args.config else PolicyConfig())


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


def _model(args: argparse.Namespace, paced: Any) -> str:
    """The model's folder or name. Raises ConfigError where missing, or a paced device's differs."""
    if paced is None and args.model is None:
        raise ConfigError("say which model: its folder or name")
    if paced is not None and args.model is not None:
        raise ConfigError(f"{args.device} brings a model of its own: leave {args.model} away")
    return str(args.model) if paced is None else str(paced.model())


def _check_settings(args: argparse.Namespace, paced: Any) -> None:
    """Raises ConfigError where a user's own file lacks a paced device's disk and times."""
    if args.config is None:
        return
    lacking = _lacking(
        {**paced.settings(), **paced.sections()}, json.loads(args.config.read_text())
    )
    if lacking:
        raise ConfigError(f"{args.config}: on {args.device} it must also say {json.dumps(lacking)}")


def _lacking(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The part of some settings that others lack or have otherwise."""
    rest = {}
    for key, value in wanted.items():
        if isinstance(value, Mapping):
            rest[key] = _lacking(value, found.get(key, {}))
        elif found.get(key) != value:
            rest[key] = value
    return {key: value for key, value in rest.items() if value != {}}


def _settings(args: argparse.Namespace, paced: Any) -> dict[str, object]:
    store = {"path": str(Path(args.store).resolve()), "capacity_bytes": args.capacity}
    more = {} if paced is None else {**paced.settings(), **paced.sections()}
    return {"store": store, **more}


def _write_settings(args: argparse.Namespace, path: Path, paced: Any) -> None:
    wanted = json.dumps(_settings(args, paced), indent=1) + "\n"
    try:
        if path.exists() and path.read_text() != wanted:
            raise ConfigError(
                f"{path} exists and says something else: use it with --config {path}, or remove it"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
