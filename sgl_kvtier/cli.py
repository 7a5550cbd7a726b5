"""The `kvtier` command: finds the module of a command, passes it on, prints errors in one line."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvtier import __version__
from sgl_kvtier.errors import KVTierError


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
        "replay agent sessions against stock HiCache and kvtier, side by side",
        "kvtier compare --quick\n  kvtier compare --trace swe_mini_deepseek --json out.json --html "
        "out.html",
    ),
    "compare restore": Command(
        "sgl_kvtier.lab.experiment.scenarios.restore",
        "restore stored prompts at many bandwidths: computed, loaded, stock's way, and ours",
        "kvtier compare restore --quick\n  kvtier compare restore --lengths 4k --load-over-compute "
        "1/4,1,4 --json out.json\n  kvtier compare restore --at-once 2,4,8 --device "
        "paced:h100-llama8b --dilation 2 --html out.html",
    ),
    "compare lookahead": Command(
        "sgl_kvtier.lab.experiment.scenarios.lookahead",
        "replay agent sessions with a device pool too small for them: stock, each part of looking "
        "ahead, and an oracle",
        "kvtier compare lookahead --quick\n"
        "  kvtier compare lookahead --oversubscription 1.5,3,5 --gaps 0,1 --json out.json --html "
        "out.html",
    ),
    "compare remote": Command(
        "sgl_kvtier.lab.experiment.scenarios.remote",
        "sessions that begin on one server and go on at another, over one Mooncake store, at the "
        "speed of a network",
        "kvtier compare remote --quick\n  kvtier compare remote --tokens 4096 --gbps 0,1 --json "
        "out.json --html out.html",
    ),
    "compare sweep": Command(
        "sgl_kvtier.lab.experiment.scenarios.sweep",
        "compare at rising load: throughput against time to first token, for every arm",
        "kvtier compare sweep --concurrency 1,2,4,8,16 --html out.html\n"
        "  kvtier compare sweep --device paced:h100-llama8b --rate 0.1,0.2,0.4 --json out.json",
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
        "list, describe, generate and export workloads",
        "kvtier trace list\n  kvtier trace describe generated:claude-code --sessions 10\n"
        "  kvtier trace export swe_mini_deepseek --sessions 8 --out agents.json",
    ),
    "sim": Command(
        "sgl_kvtier.lab.sim_command",
        "simulate policies on traces in virtual time; the papers' tables; replay decision logs",
        "kvtier sim run --trace swe_mini_deepseek --sessions 20 --start-every 2 --host-size 64GiB "
        "--policy kvtier,stock,oracle\n  kvtier sim paper cake --table 3",
    ),
    "bench": Command(
        "sgl_kvtier.lab.bench_command",
        "measure one part: attention, copies, copy-table, equal, remote, store, torture, "
        "restore, restore-fuzz, restore-overhead, restore-timeline",
        "kvtier bench attention --tokens 8192 --chunk 512 --plot attention.svg\n  kvtier bench "
        "torture --quick",
    ),
    "profile": Command(
        "sgl_kvtier.runtime.tools.profile_command",
        "what servers learned of prefill and links, and what follows for restoring prefixes",
        "kvtier profile /mnt/nvme/kvtier\n  kvtier profile /mnt/nvme/kvtier --lengths 4k,32k "
        "--json -",
    ),
    "stat": Command(
        "sgl_kvtier.store.tools.commands:stat",
        "what is in a page store, and who has it open",
        "kvtier stat /mnt/nvme/kvtier\n  kvtier stat --remote 127.0.0.1:9003",
    ),
    "fsck": Command(
        "sgl_kvtier.store.tools.commands:fsck",
        "read and check every page of a store that is not in use",
        "kvtier fsck /mnt/nvme/kvtier",
    ),
    "purge": Command(
        "sgl_kvtier.store.tools.commands:purge",
        "remove pages from a store",
        "kvtier purge /mnt/nvme/kvtier --all --dry-run",
    ),
    "remote up": Command(
        "sgl_kvtier.remote.tools.up",
        "run Mooncake's master and one owner of memory on this host, to try the remote store",
        "kvtier remote up --segment 2GiB",
    ),
    "doctor": Command(
        "sgl_kvtier.runtime.tools.doctor",
        "check this machine: versions, SGLang's seams, platform, disk, memory",
        "kvtier doctor --config kvtier.json",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 (done), 1 (failed), 2 (wrong arguments) or 130 (Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"kvtier {__version__}")
        return 0
    words = 2 if " ".join(arguments[:2]) in COMMANDS else 1
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name not in COMMANDS:
        print(
            f"kvtier: no command {name!r}. There are: {', '.join(COMMANDS)}. See kvtier --help",
            file=sys.stderr,
        )
        return 2
    command = COMMANDS[name]
    try:
        part = _load(command.where)
        parser = argparse.ArgumentParser(
            prog=f"kvtier {name}",
            description=command.summary,
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        part.add_arguments(parser)
        own, extra = _split(rest)
        parsed = parser.parse_args(own)
        if extra and not hasattr(parsed, "extra"):
            parser.error(f"nothing may follow --: {' '.join(extra)}")
        if extra:
            parsed.extra = extra
        return int(part.run(parsed) or 0)
    except KVTierError as error:
        print(f"kvtier {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nkvtier {name}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1


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
        if not module.startswith("sgl_kvtier.lab.") or (
            (error.name or "").startswith("sgl_kvtier.") and "lab" not in (error.name or "")
        ):
            raise
        raise KVTierError(
            f"this command is part of the laboratory, which needs {error.name}. Install it with: "
            "pip install 'sgl-kvtier[lab]'"
        ) from None
    return getattr(loaded, attribute) if attribute else loaded


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
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
