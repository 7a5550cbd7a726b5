"""`kvtier remote up`: runs Mooncake's master and one owner of memory on this host, for trials."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import time
from types import FrameType

from sgl_kvtier.arguments import port
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.remote.servers import Servers
from sgl_kvtier.sizes import format_bytes, parse_bytes

_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `kvtier remote up`."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="this host's address in a private network, where other hosts shall use it too: "
        "all who reach it can read, change and delete every page (default: this host alone)",
    )
    parser.add_argument(
        "--port", type=port, default=0, help="where the master listens (default: a free one)"
    )
    parser.add_argument(
        "--segment", default="4GiB", metavar="SIZE", help="memory for pages (default: 4GiB)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs both until Ctrl-C or SIGTERM. Returns 1 if one ends by itself. Raises KVTierError."""
    try:
        nbytes = parse_bytes(args.segment)
    except ValueError as error:
        raise KVTierError(f"--segment {args.segment}: {error}") from error
    before = signal.signal(signal.SIGTERM, _interrupt)
    servers = None
    try:
        servers = Servers(nbytes, args.host, args.port)
        started = {}
        for name, start in (("master", servers.start_master), ("owner", servers.start_owner)):
            started[name] = start()
            command = shlex.join(str(word) for word in started[name].args)  # type: ignore[union-attr]
            print(f"{name}, process {started[name].pid}: {command}", flush=True)
        print(_ready(servers, nbytes), flush=True)
        return _wait(started)
    except KeyboardInterrupt:
        print("both are stopped", flush=True)
        return 0
    except OSError as error:
        raise KVTierError(f"--host {args.host} --port {args.port}: {error.strerror}") from error
    finally:
        if servers is not None:
            servers.stop()
        signal.signal(signal.SIGTERM, before)


def _ready(servers: Servers, nbytes: int) -> str:
    remote = json.dumps({"engine": "mooncake", "master": servers.master})
    return (
        f"ready: {format_bytes(nbytes)} for pages. In kvtier.json of every server:\n"
        f'  "remote": {remote}\n'
        f"kvtier stat --remote {servers.metrics} shows what is in it. There is no authentication "
        "and no encryption.\nCtrl-C ends both; the pages go with them."
    )


def _wait(started: dict[str, subprocess.Popen[bytes]]) -> int:
    while True:
        for name, process in started.items():
            if process.poll() is not None:
                print(f"the {name} has ended by itself: both are stopped", flush=True)
                return 1
        time.sleep(_POLL_S)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
