"""One forward, part by part: what it takes from a job, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_job import Storage, begun

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.layers import forward
from sgl_kvtier.lab.layers.restore import Pass, Share, _refuse
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import Span

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


def test_a_prefix_that_came_before_its_forward_is_not_computed_at_all() -> None:
    run, _layers, _, storage = made()
    storage.come(6)
    assert [run.at(part) for part in range(PARTS)] == [[0, 8]] * PARTS


def test_a_lost_part_is_computed_and_the_prefix_ends_above_it() -> None:
    run, _layers, share, storage = made()
    storage.come(2)  # part 2
    storage.come(1, ReadOutcome.CORRUPT)
    assert run.at(0) == [0, 0]
    storage.come(3)
    assert run.at(1) == [0, 0], "a page lacks part 1"
    assert run.at(2) == [0, 8]
    assert share.first_loaded == 2


def test_without_its_top_part_everything_is_computed_behind_what_was_copied() -> None:
    run, layers, _share, storage = made()
    storage.come(1, ReadOutcome.MISS)
    storage.come(5)
    assert [run.at(part) for part in range(PARTS)] == [[0, 0]] * PARTS
    assert layers.done == [("copy", 1), ("copy", 0), "meet", "meet"]


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
