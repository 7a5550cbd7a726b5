"""Prefixes restored by layers: what of them has come, and what one forward takes of it, part by part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.layers import forward
from sgl_kvtier.lab.layers.job import Job, best_cut
from sgl_kvtier.lab.layers.restore import Pass, Share, _refuse
from sgl_kvtier.store.base import PageRead, ReadOutcome
from sgl_kvtier.store.io.jobs import OrderedJob
from sgl_kvtier.types import PageKey, Span


class Storage:
    """Pages come when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[OrderedJob] = []
        self.order: list[Sequence[PageRead]] = []

    def begin_reads(
        self, pages: Sequence[PageRead], on_page: Callable[[int, ReadOutcome], None]
    ) -> OrderedJob:
        self.order.append(pages)
        self.jobs.append(OrderedJob(len(pages), None, on_page))
        return self.jobs[-1]

    def come(self, pages: int, outcome: ReadOutcome = ReadOutcome.OK, job: int = 0) -> None:
        for _ in range(pages):
            self.jobs[job].finish([(index, outcome) for index in self.jobs[job].begin()])


def reads(span: Span, parts: int) -> list[list[PageRead]]:
    return [
        [PageRead(PageKey(bytes([page])), [], str(part)) for part in range(parts)]
        for page in range(span.start, span.stop)
    ]


def begun(span: Span, parts: int, *blocks: Span) -> tuple[Job, Storage]:
    job, storage = Job("r", span, None, parts), Storage()
    for block in blocks or (span,):
        assert job.read(storage, block, reads(block, parts))
    return job, storage


def test_the_top_part_of_all_pages_is_read_first() -> None:
    span = Span(3, 6)
    job, storage = begun(span, 2)
    assert [(read.key[0], read.pool) for read in storage.order[0]] == [
        *((page, "1") for page in (3, 4, 5)),
        *((page, "0") for page in (3, 4, 5)),
    ]
    storage.come(3)
    assert job.all_there(span, 1)
    assert not job.all_there(span, 0)
    storage.come(3)
    assert job.all_there(span, 0)


def test_a_lost_part_matters_to_its_pages_and_to_cuts_below_it_alone() -> None:
    span = Span(0, 4)
    job, storage = begun(span, 2)
    storage.come(5)
    storage.come(1, ReadOutcome.CORRUPT)  # part 0 of page 1
    assert job.is_lost(span, 0)
    assert not job.is_lost(span, 1)
    assert not job.is_lost(Span(2, 4), 0)
    assert not job.wait(span, 0, 60), "nothing is waited for that will not come"


def test_waiting_ends_with_the_last_page() -> None:
    span = Span(0, 2)
    job, storage = begun(span, 2)
    threading.Timer(0.05, storage.come, [2]).start()
    assert job.wait(span, 1, 60)


def test_nothing_is_predicted_before_a_page_has_come() -> None:
    span = Span(0, 2)
    job, storage = begun(span, 2)
    assert job.wait_s(span, 1) == float("inf")
    storage.come(2)
    assert job.wait_s(span, 1) == 0.0
    assert 0 < job.wait_s(span, 0) < float("inf")


def test_blocks_below_the_front_are_not_read_any_further() -> None:
    job, storage = begun(Span(0, 4), 2, Span(0, 2), Span(2, 4))
    job.cancel(below=2)
    assert storage.jobs[0].done
    assert not storage.jobs[1].done
    assert not job.over
    job.cancel()
    assert job.over
    assert job.is_lost(Span(0, 4), 0)


class Copies:
    """An event that has not come yet."""

    come = False

    def query(self) -> bool:
        return self.come

    def synchronize(self) -> None:
        self.come = True


def test_host_pages_are_in_use_until_they_are_copied() -> None:
    job, storage = begun(Span(0, 1), 1)
    storage.come(1)
    copies: Any = Copies()
    job.copied = copies
    assert not job.over
    assert job.wait_over(1)


@pytest.mark.parametrize(
    ("waits_s", "part_s", "tail_share", "more"),
    [
        ([0.0, 0.0, 0.0], 1.0, 0.0, 0),  # all there
        ([8.0, 4.0, 0.0], 1.0, 0.0, 2),  # the link is slower than computing all
        ([1.0, 0.5, 0.0], 9.0, 0.0, 0),  # computing is slower
        ([4.0, 2.0, 0.0], 2.0, 0.0, 1),  # balanced
        ([2.1, 1.3, 0.0], 1.0, 0.9, 2),  # the suffix costs nearly as much: compute all
        ([2.1, 1.3, 0.0], 1.0, 0.0, 1),
        ([float("inf")] * 2 + [0.0], 1.0, 0.0, 2),  # nothing known
    ],
)
def test_the_cut_is_where_both_ends_meet(
    waits_s: list[float], part_s: float, tail_share: float, more: int
) -> None:
    assert best_cut(waits_s, part_s, tail_share) == more


# One forward, part by part.

PAGE, SPAN, PARTS = 4, Span(0, 2), 3


class Layers:
    """Notes what it is asked for."""

    parts, layers, tail_share = PARTS, 6, 0.0
    copies_fail = False

    def __init__(self) -> None:
        self.done: list[Any] = []

    def copy(self, share: Share, part: int) -> None:
        if self.copies_fail:
            raise RuntimeError("out of memory")
        self.done.append(("copy", part))
        share.copied.add(part)

    def meet(self) -> None:
        self.done.append("meet")

    def come_to_rest(self) -> None:
        """The device is always at rest."""

    def learn_tail(self, share: float) -> None:
        """Nothing."""

    def passed(self, shares: list[Share]) -> None:
        self.done.append("passed")


def made() -> tuple[Pass, Layers, Share, Storage]:
    job, storage = begun(SPAN, PARTS)
    share = Share(10, 0, "r", job, SPAN, torch.arange(8))
    layers: Any = Layers()
    return Pass(layers, [Share(5, 0), share]), layers, share, storage


def test_a_prefix_ends_where_all_above_has_come_and_is_copied_first() -> None:
    run, layers, share, storage = made()
    assert run.at(0) == [0, 0]
    storage.come(4)  # parts 2 and 1 of both pages
    assert run.at(1) == [0, 8]
    assert layers.done == [("copy", 2), ("copy", 1), "meet"]
    assert run.at(2) == [0, 8]
    run.end()
    assert layers.done[3:] == ["meet", "passed"]
    assert share.first_loaded == 1


def test_a_lost_part_is_computed_and_the_prefix_ends_above_it() -> None:
    run, _layers, share, storage = made()
    storage.come(2)  # part 2
    storage.come(1, ReadOutcome.CORRUPT)
    assert run.at(0) == [0, 0]
    storage.come(3)
    assert run.at(1) == [0, 0], "a page lacks part 1"
    assert run.at(2) == [0, 8]
    assert share.first_loaded == 2


def test_a_copy_that_cannot_be_made_costs_time_alone() -> None:
    run, layers, share, storage = made()
    layers.copies_fail = True
    storage.come(6)
    assert [run.at(part) for part in range(PARTS)] == [[0, 0]] * PARTS
    assert share.job is None


LLAMA = ["LlamaForCausalLM"]


def arguments(**more: int) -> Any:
    return SimpleNamespace(**{"tp_size": 1, "pp_size": 1, "dp_size": 1, **more})


def pools(layout: str = "page_first_direct", **device: Any) -> list[Any]:
    device = device or {"k_buffer": []}
    host = SimpleNamespace(layout=layout)
    return [SimpleNamespace(host_pool=host, device_pool=SimpleNamespace(**device))]


@pytest.mark.parametrize(
    ("ranks", "names", "transfers", "parts", "said"),
    [
        ({"tp_size": 2}, LLAMA, pools(), 2, "takes one process, and this server has 2"),
        ({"pp_size": 2}, LLAMA, pools(), 2, "takes one process, and this server has 2"),
        ({}, LLAMA, pools(kv_buffer=[]), 2, "not latents"),
        ({}, LLAMA, pools() * 2, 2, "not latents, states or windows"),
        (
            {},
            LLAMA,
            pools("page_first"),
            2,
            "--hicache-mem-layout page_first_direct, not page_first",
        ),
        ({}, LLAMA, pools(), 4, "divide the 6 layers, not 4"),
        ({}, ["GemmaForCausalLM"], pools(), 2, "not GemmaForCausalLM"),
    ],
)
def test_a_server_that_cannot_is_refused_in_one_line(
    ranks: dict[str, int], names: list[str], transfers: list[Any], parts: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=r"Leave lab.layer_parts away$") as refused:
        _refuse(arguments(**ranks), names, transfers, 6, parts)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_llama_and_qwen3_are_taken(name: str) -> None:
    _refuse(arguments(), [name], pools(), 6, 3)


def test_a_batch_that_cannot_be_looked_at_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: Any) -> None:
        raise AttributeError("rids")

    monkeypatch.setattr(forward, "_layers", SimpleNamespace(take=fail))
    assert forward.taken(object()) is None
