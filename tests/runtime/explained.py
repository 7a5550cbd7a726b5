"""For tests of `kvtier explain`: pages of metrics, and what it says of a real server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from serving import Served

from sgl_kvtier.cli import main
from sgl_kvtier.runtime.tools.explain_command import document
from sgl_kvtier.runtime.tools.miss_advice import advise
from sgl_kvtier.runtime.tools.server_figures import figures_of, read, server_of

RANK = 'tp_rank="0",pp_rank="0",dp_rank="0"'
PAGE = 64


def page_of(
    *,
    kvtier: bool = True,
    cached: Mapping[str, int] | None = None,
    declined: Mapping[str, int] | None = None,
    restored: Mapping[str, int] | None = None,
    unfulfilled: Mapping[str, int] | None = None,
    **counters: float,
) -> str:
    """A page of /metrics. `counters` are `prompt`, `requests`, or names of the store's metrics."""
    lines = []

    def add(name: str, value: float, labels: str = "") -> None:
        lines.append(f"{name}{{{labels}}} {value}")

    add("sglang:prompt_tokens_total", counters.pop("prompt", 0), 'is_streaming="true"')
    add("sglang:num_requests_total", counters.pop("requests", 0), 'is_streaming="true"')
    for source, tokens in (cached or {}).items():
        add("sglang:cached_tokens_total", tokens, f'cache_source="{source}"')
    for reason, tokens in (unfulfilled or {}).items():
        add("sglang:storage_prefetch_unfulfilled_tokens_total", tokens, f'{RANK},reason="{reason}"')
    if kvtier:
        counters = {"open_seconds_total": 100.0, **counters}
        for tier, tokens in (restored or {}).items():
            add("kvtier:restore_loaded_tokens_total", tokens, f'{RANK},tier="{tier}"')
        for reason, requests in (declined or {}).items():
            add("kvtier:restore_declined_total", requests, f'{RANK},reason="{reason}"')
        for name, value in counters.items():
            add(f"kvtier:{name}", value, RANK)
            # The second rank, which holds the same pages, is not added.
            add(f"kvtier:{name}", value, RANK.replace('tp_rank="0"', 'tp_rank="1"'))
    return "\n".join(lines) + "\n"


@contextmanager
def serving(
    pages: list[str | None], info: Mapping[str, Any] | None = None, key: str = ""
) -> Iterator[str]:
    """The address of a server that answers /metrics with one page after the other, the last one
    again and again, and /server_info with `info`, where it is told the key. A page that is None is
    not found; where it is empty the connection is closed without an answer.
    """
    told = {"page_size": PAGE, "model_path": "m", "hicache_write_policy": "write_through"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                text = pages.pop(0) if len(pages) > 1 else pages[0]
                if text != "":
                    self.answer(404 if text is None else 200, text or "")
            elif key and self.headers.get("Authorization") != f"Bearer {key}":
                self.answer(401, "")
            else:
                self.answer(200, json.dumps(told if info is None else {**told, **info}))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: Any) -> None:
            """Prints nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `kvtier explain` with these words writes with --json."""
    assert main(["explain", *words, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def prompt_files(folder: Path, *prompts: Any) -> list[str]:
    """The words --prompts and a file for each prompt; what is no text is JSON there."""
    words = ["--prompts"]
    for number, prompt in enumerate(prompts):
        path = folder / f"prompt-{number}"
        path.write_text(prompt if isinstance(prompt, str) else json.dumps(prompt))
        words.append(str(path))
    return words


CauseOf = Callable[[Served, Callable[[], object], str, str], dict[str, Any]]
"""`cause_of`, as tests get it from the fixture of its name, which also records what was said."""


def cause_of(server: Served, act: Callable[[], object], wanted: str, says: str) -> dict[str, Any]:
    """What the command would write of the time in which something was done, once figures and writes
    have come to rest: they are published twice a second. Its cause has to be the wanted one, and
    its sentence has to name the remedy that `says` is.
    """
    before = read(server.server.url)

    def explained() -> dict[str, Any]:
        now = read(server.server.url)
        figures = figures_of(now, before, 1.0)
        return document(server_of(now), figures, advise(server_of(now), figures))

    act()
    for _ in range(100):
        found = explained()
        if found["prompts"]["requests"] and found["advice"]["cause"] == wanted:
            break
        time.sleep(0.3)
    time.sleep(1.0)  # what is published later does not change it
    found = explained()
    assert found["advice"]["cause"] == wanted, found
    assert says in found["advice"]["text"], found
    return found
