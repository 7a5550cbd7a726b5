"""The `kvtier` command: finds the module of a command, passes it on, prints errors in one line."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sgl_kvtier import __version__
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.extras import how_to_install
from sgl_kvtier.outside import brief


@dataclass(frozen=True)
class Command:
    """One command of `kvtier`, named by one word or two: its object (module:attribute) with
    add_arguments(parser) and run(args), and two texts.
    """

    where: str
    summary: str
    example: str


COMMANDS = {
    "serve": Command(
        "sgl_kvtier.runtime.tools.serve_command",
        "run an SGLang server with the kvtier storage tier",
        "kvtier serve Qwen/Qwen3-8B --store /mnt/nvme/kvtier\n  kvtier serve Qwen/Qwen3-8B --store "
        "/mnt/nvme/kvtier --print -- --tp 2",
    ),
    "compare": Command(
        "sgl_kvtier.lab.experiment.scenarios.compare",
        "replay agent sessions against SGLang's own HiCache and kvtier, side by side",
        "kvtier compare --quick\n  kvtier compare --trace generated:swe-mini --json out.json "
        "--html out.html",
    ),
    "compare restore": Command(
        "sgl_kvtier.lab.experiment.scenarios.restore",
        "restore stored prompts at many bandwidths: computed, loaded, SGLang's way, and ours",
        "kvtier compare restore --quick\n  kvtier compare restore --lengths 4k --load-over-compute "
        "1/4,1,4 --json out.json\n  kvtier compare restore --at-once 2,4,8 --device "
        "paced:h100-llama8b --dilation 2 --html out.html",
    ),
    "compare remote": Command(
        "sgl_kvtier.lab.experiment.scenarios.remote",
        "sessions that begin on one server and go on at another, over one Mooncake store, at the "
        "speed of a network",
        "kvtier compare remote --quick\n  kvtier compare remote --tokens 4096 --gbps 0,1 --json "
        "out.json --html out.html",
    ),
    "report": Command(
        "sgl_kvtier.lab.pages.report",
        "draw the JSON result of a comparison again: tables, and a page with plots",
        "kvtier report out.json --html out.html",
    ),
    "replay": Command(
        "sgl_kvtier.lab.experiment.scenarios.replay",
        "replay sessions against a server that is already running",
        "kvtier replay http://127.0.0.1:30000 --trace generated:swe-mini --json -",
    ),
    "model": Command(
        "sgl_kvtier.lab.outside.model_command",
        "write the small random-weight model that CPU runs use",
        "kvtier model lab-mha",
    ),
    "trace": Command(
        "sgl_kvtier.lab.workload.commands",
        "list, describe and export workloads",
        "kvtier trace list\n  kvtier trace describe generated:claude-code --sessions 10\n"
        "  kvtier trace export generated:swe-mini --sessions 8 --out agents.json",
    ),
    "sim": Command(
        "sgl_kvtier.lab.sim_command",
        "simulate policies on traces in virtual time; the papers' tables; replay decision logs",
        "kvtier sim run --trace generated:swe-mini --sessions 20 --start-every 2 --host-size 64GiB "
        "--policy kvtier,stock,oracle\n  kvtier sim paper cake --table 3",
    ),
    "bench copy-table": Command(
        "sgl_kvtier.lab.gpu.copy_table_command",
        "every way to bring host pages to the device: bandwidth, time to begin, and what a GEMM "
        "that runs at the same time loses",
        "kvtier bench copy-table --mib 2,16,128",
    ),
    "bench restore-fuzz": Command(
        "sgl_kvtier.lab.stress.server.command",
        "agent sessions against a server in trouble: nothing hangs, leaks or differs",
        "kvtier bench restore-fuzz --device paced:h100-llama8b --minutes 2",
    ),
    "bench store": Command(
        "sgl_kvtier.lab.storebench.command",
        "the page store against fio and HiCache's file backend on this disk",
        "kvtier bench store --dir /mnt/nvme --pages 256KiB --bytes 128MiB",
    ),
    "bench torture": Command(
        "sgl_kvtier.lab.stress.store.command",
        "crashes, faults and damage: what the store loses, and that it never lies",
        "kvtier bench torture --quick",
    ),
    "stat": Command(
        "sgl_kvtier.runtime.tools.stat_command:stat",
        "what is in a page store, whether servers use it, and the speeds that they learned",
        "kvtier stat /mnt/nvme/kvtier\n  kvtier stat --remote 127.0.0.1:9003\n"
        "  printf %s SALT | kvtier stat --salt -",
    ),
    "explain": Command(
        "sgl_kvtier.runtime.tools.explain_command",
        "why prompts of a running server missed its caches, or where prompts part",
        "kvtier explain http://127.0.0.1:30000 --seconds 60\n  kvtier explain --prompts "
        "turn13.json turn14.json --model-path /models/Qwen3-8B",
    ),
    "top": Command(
        "sgl_kvtier.runtime.tools.top_command",
        "what a running server does, a line every few seconds: load, hits by tier, SSD traffic",
        "kvtier top http://127.0.0.1:30000 --every 5",
    ),
    "fsck": Command(
        "sgl_kvtier.store.tools.commands:fsck",
        "read and check every page of a store that is not in use",
        "kvtier fsck /mnt/nvme/kvtier",
    ),
    "purge": Command(
        "sgl_kvtier.store.tools.commands:purge",
        "remove pages from a store",
        "kvtier purge /mnt/nvme/kvtier --all --dry-run\n"
        "  printf %s SALT | kvtier purge /mnt/nvme/kvtier --salt -",
    ),
    "remote up": Command(
        "sgl_kvtier.remote.tools.up",
        "run Mooncake's master and one owner of memory on this host, to try the remote store",
        "kvtier remote up --segment 2GiB",
    ),
    "doctor": Command(
        "sgl_kvtier.runtime.tools.doctor",
        "check this machine: versions, what is used of SGLang, platform, disk, memory",
        "kvtier doctor --config kvtier.json",
    ),
    "schema": Command(
        "sgl_kvtier.runtime.tools.schema_command",
        "list what commands write with --json, or print the JSON Schema of one",
        "kvtier schema\n  kvtier schema kvtier.stat/1",
    ),
}


class _Help(argparse.Action):
    """--help. A command whose defaults follow from other options says by `defaults(args)`, by the
    names of the options, what they are after those that stand before --help.
    """

    def __init__(self, part: Any, **given: Any) -> None:
        self._defaults = getattr(part, "defaults", None)
        about = "show this help"
        if self._defaults is not None:
            about += "; its defaults are those of the options before it"
        super().__init__(nargs=0, default=argparse.SUPPRESS, help=about, **given)

    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, *_: Any) -> None:
        if self._defaults is not None:
            parser.set_defaults(**self._defaults(args))
        parser.print_help()
        parser.exit()


class _Format(argparse.RawDescriptionHelpFormatter):
    """Breaks no line inside a name such as --page-size."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """Says an error in one line, and where the usage is, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, brief(f"{self.prog}: {message}. See {self.prog} --help") + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 (done), 1 (failed), 2 (wrong arguments) or 130 (Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview(COMMANDS))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"kvtier {__version__}")
        return 0
    words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name not in COMMANDS:
        return _parts_or_refusal(name, rest)
    command = COMMANDS[name]
    try:
        part = _load(command.where)
        parser = _Parser(
            prog=f"kvtier {name}",
            description=command.summary,
            epilog=f"example:\n  {command.example}",
            formatter_class=_Format,
            add_help=False,
        )
        parser.add_argument("-h", "--help", action=_Help, part=part)
        part.add_arguments(parser)
        own, extra = _split(rest)
        parsed, unknown = parser.parse_known_args(own)
        if unknown and (not hasattr(parsed, "extra") or not unknown[0].startswith("-")):
            parser.error(_why_unknown(name, unknown))
        model = getattr(parsed, "model", None)
        if unknown and model in own and own.index(model) > own.index(unknown[0]):
            if unknown[0] in ("--model", "--model-path"):
                parser.error(f"name the model without {unknown[0]}: kvtier {name} {model}")
            parser.error(f"name the model before {unknown[0]}, or put that behind --")
        if unknown:
            print(f"kvtier {name}: passed to SGLang: {' '.join(unknown)}", file=sys.stderr)
            extra = [*unknown, *extra]
        if extra and not hasattr(parsed, "extra"):
            parser.error(f"nothing may follow --: {' '.join(extra)}")
        if extra:
            parsed.extra = extra
        return int(part.run(parsed) or 0)
    except KVTierError as error:
        said = str(error)
    except ModuleNotFoundError as error:
        said = str(_not_installed(command.where, error))
    except KeyboardInterrupt:
        print(f"\nkvtier {name}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        named = error.filename
        named = os.fsdecode(named) if isinstance(named, bytes) else named
        said = f"{named}: {error.strerror}. Choose another file or folder"
    print(brief(f"kvtier {name}: {said}"), file=sys.stderr)
    return 1


def _parts_or_refusal(name: str, rest: Sequence[str]) -> int:
    """What is said of a word that is no command: the commands that begin with it, or those there
    are, and which may have been meant.
    """
    parts = {full: command for full, command in COMMANDS.items() if full.startswith(f"{name} ")}
    if parts and rest and rest[0] in ("-h", "--help"):
        print(_overview(parts))
        return 0
    known = list(parts or dict.fromkeys(full.split()[0] for full in COMMANDS))
    if parts and not rest:
        said = f"say which: {', '.join(f'kvtier {full}' for full in parts)}"
    else:
        given = f"{name} {rest[0]}" if parts else name
        near = difflib.get_close_matches(given, known, n=1)
        meant = f"Did you mean kvtier {near[0]}? " if near else ""
        said = f"no command {given!r}. {meant}There are: {', '.join(known)}"
    print(brief(f"kvtier: {said}. See kvtier --help"), file=sys.stderr)
    return 2


def _why_unknown(name: str, unknown: Sequence[str]) -> str:
    """What is said of arguments that a command does not have."""
    first = unknown[0]
    near = difflib.get_close_matches(f"{name} {first}", COMMANDS, n=1)
    if not first.startswith("-") and near and near[0] != name:
        return f"no argument {first!r} (did you mean kvtier {near[0]}?)"
    return f"unrecognized arguments: {' '.join(unknown)}"


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments before a bare -- and those behind it. argparse cannot separate them where a
    command has positionals.
    """
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _load(where: str) -> Any:
    module, _, attribute = where.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _not_installed(where, error) from None
    return getattr(loaded, attribute) if attribute else loaded


def _not_installed(where: str, error: ModuleNotFoundError) -> KVTierError:
    """What to install for a command whose module or library is missing. Raises the error itself
    where every installation has it: then the package is broken.
    """
    needed = error.name or str(error)
    root, in_lab = needed.split(".")[0], where.startswith("sgl_kvtier.lab.")
    if root == "sgl_kvtier" and not (in_lab and "lab" in needed):
        raise error
    if root in _WITH_SGLANG:
        return KVTierError(f"this needs {needed}. Install it with: {how_to_install('sglang')}")
    if not in_lab:
        raise error
    return KVTierError(f"this needs {needed}. Install it with: {how_to_install('bench')}")


_WITH_SGLANG = frozenset(
    {
        "sglang",
        "torch",
        "triton",
        "flashinfer",
        "sgl_kernel",
        "transformers",
        "tokenizers",
        "prometheus_client",
    }
)
"""Libraries that come with the extra [sglang]."""


def _overview(commands: dict[str, Command]) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in commands.items()]
    return "\n".join(
        [
            "usage: kvtier COMMAND [options]",
            "",
            "A verified SSD tier for the KV cache of SGLang, and the tools to measure it.",
            "",
            *lines,
            "",
            "kvtier COMMAND --help shows its options and an example. kvtier --version",
        ]
    )
