"""The prompts of `kvtier profile --measure`: whatever answers them, what goes wrong is one
sentence.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.runtime.tools.profile_run import Answered, LearningRun

GOOD = {
    "/generate": b'{"meta_info": {"cached_tokens": 16}}',
    "/metrics": b'kvtier:store_pages{a="b"} 1.5e+06\n',
    "/flush_cache": b"",
}


class Answering(ThreadingHTTPServer):
    """A server on loopback that answers each path with the same bytes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = dict(GOOD)
        self.url = "http://{}:{}".format(*self.server_address)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = self.server.answers[self.path]  # type: ignore[attr-defined]
        if answer.startswith(b"HTTP"):
            self.wfile.write(answer)
            return
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Answering]:
    with Answering() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_a_prompt_is_sent_twice_and_the_second_comes_from_storage(server: Answering) -> None:
    assert LearningRun(server.url, None, lambda _: None).run([64], 1) == [Answered(64, 16)]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/generate", b""),
        ("/generate", b"[]"),
        ("/generate", b"{}"),
        ("/generate", b"[" * 100_000),
        ("/generate", b"\xff"),
        ("/generate", b"x" * 1_000_000),
        ("/generate", json.dumps({"meta_info": []}).encode()),
        ("/generate", json.dumps({"meta_info": {"cached_tokens": float("inf")}}).encode()),
        ("/generate", json.dumps({"meta_info": {"cached_tokens": "x" * 100_000}}).encode()),
        ("/generate", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx"),
        ("/generate", b"HTTP/1.1 500 Oh\r\ncontent-length: 100000\r\n\r\n" + b"x" * 100_000),
        ("/generate", b"HTTP/x\r\n\r\n"),
        ("/metrics", b""),
        ("/metrics", b"kvtier:store_pages{} many"),
        ("/metrics", b"kvtier:store_pages"),
        ("/metrics", b"kvtier:store_pages{} NaN"),
        ("/metrics", b"kvtier:store_pages{} +Inf"),
    ],
    ids=range(17),
)
def test_a_wrong_answer_is_one_short_error(server: Answering, path: str, answer: bytes) -> None:
    server.answers[path] = answer
    with pytest.raises(KVTierError) as found:
        LearningRun(server.url, None, lambda _: None).run([64], 1)
    assert len(str(found.value)) < 400
