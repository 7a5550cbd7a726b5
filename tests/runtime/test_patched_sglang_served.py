"""The patch in patches/sglang-0.5.23: it applies to the installed SGLang, which then reads stored
prefixes in the order of its queue, whole and once, and answers as before.
"""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from serving import ADMIN, Served, flags, prompts, serving

from sgl_kvtier.lab.experiment.ablation import compile_hash, patched_sglang

LENGTH, PAGE = 1000, 16
WHOLE = (LENGTH - 1) // PAGE * PAGE
COUNT = 8


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of SGLang that has the patch."""
    if version("sglang") != "0.5.23":
        pytest.skip("the patch is for SGLang 0.5.23")
    return patched_sglang(tmp_path_factory.mktemp("patched"))


class Tree:
    """Counts the locks of each node."""

    def __init__(self) -> None:
        self.locks: dict[str, int] = {}

    def inc_host_lock_ref(self, node: str) -> Any:
        self.locks[node] = self.locks.get(node, 0) + 1
        return type("Result", (), {"to_dec_params": lambda self: node})()

    def dec_host_lock_ref(self, node: str, params: str) -> None:
        assert params == node
        self.locks[node] -= 1


@pytest.fixture
def pacer(patched: Path) -> Any:
    """The class that the patch adds."""
    path = patched / "sglang" / "srt" / "mem_cache" / "storage_prefetch.py"
    spec = importlib.util.spec_from_file_location("patched_storage_prefetch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.StoragePrefetchPacer()


def test_reads_begin_in_the_order_of_the_queue_while_they_fit(pacer):
    for name in "abcd":
        pacer.defer(name)
    queue = [("a", 600), ("b", 300), ("c", 200), ("d", 1)]
    assert pacer.due(queue, 1000) == ["a", "b"], "d does not pass c"
    assert pacer.due(queue, 1000) == [], "once"
    assert [pacer.is_deferred(name) for name in "abcd"] == [False, False, True, True]
    assert pacer.due(queue[1:], 1000) == ["c", "d"]


def test_the_first_of_the_queue_is_read_whatever_room_there_is(pacer):
    pacer.defer("a")
    pacer.defer("b")
    assert pacer.due([("a", 600), ("b", 1)], 0) == ["a"]
    assert pacer.due([("b", 1)], -50) == ["b"]


def test_who_left_the_queue_is_forgotten_and_lets_go_what_was_kept(pacer):
    tree = Tree()
    for name in "ab":
        pacer.defer(name)
    pacer.pin("a", tree, "node")
    pacer.pin("a", tree, "longer")
    pacer.pin("b", tree, "longer")
    assert tree.locks == {"node": 0, "longer": 2}
    pacer.due([("b", 1)], 0)
    assert not pacer.is_deferred("a")
    pacer.unpin_all_but(tree, {"b"})
    assert tree.locks == {"node": 0, "longer": 1}
    pacer.unpin_all_but(tree, set())
    assert tree.locks == {"node": 0, "longer": 0}


def ask_all(served: Served, asked: list[list[int]]) -> list[tuple[list[int], int]]:
    """All at once: output tokens, and how much of each prompt was cached."""
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda prompt: served.ask(prompt, 6), asked))
    return [(answer.tokens, answer.cached) for answer in answers]


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_patched_server_computes_nothing_that_is_stored(tmp_path, patched):
    compile_hash(patched)
    asked = prompts(COUNT, LENGTH, seed=11)
    words = flags(backend="file", page_size=PAGE, max_running_requests=1)
    env = {
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "files"),
        "PYTHONPATH": str(patched),
        "TORCH_EXTENSIONS_DIR": str(patched / "torch_extensions"),
    }
    with serving(tmp_path / "server", words, **env) as served:
        first = [served.ask(prompt, 6).tokens for prompt in asked]
        served.flush()
        for _ in range(2):
            assert ask_all(served, asked) == [(tokens, WHOLE) for tokens in first]
            served.flush()
        with ThreadPoolExecutor(COUNT) as pool:
            sent = [
                pool.submit(served.ask, prompt, 6, rid=f"r{place}")
                for place, prompt in enumerate(asked)
            ]
            for place in (1, 2, 5):
                what = {"rid": f"r{place}", "abort_all": False}
                served.call("POST", "/abort_request", what, ADMIN, raw=True)
            for place in (0, 3, 4, 6, 7):
                assert sent[place].result().tokens == first[place]
            for place in (1, 2, 5):
                sent[place].exception()
        served.flush()
        assert ask_all(served, asked)[0] == (first[0], WHOLE), "what was aborted holds nothing"
