"""Pages read back from the device at a splice, and compared with what they were loaded from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import device_pools
import pytest
import torch
from device_pools import LAYOUTS, controller, latent_pools, slots

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab import audit as audit_module
from sgl_kvtier.lab.audit import Audit, pages_of
from sgl_kvtier.runtime.backend.host_pages import parts_of
from sgl_kvtier.runtime.restore.counters import RestoreCounters
from sgl_kvtier.runtime.step.restoration import Restoration
from sgl_kvtier.store.base import ReadOutcome
from sgl_kvtier.types import PageKey, Span, Tier

PAGE = 16
pools = partial(device_pools.pools, heads=2, dim=32)
KEYS = tuple(PageKey(bytes([n]) * 32) for n in range(3))
FROM, TO = [2, 9, 4], [5, 3, 7]


class KeptPages:
    """A backend that has pages in memory."""

    def __init__(self, pages: dict[PageKey, list[bytes]]) -> None:
        self.pages = pages

    def begin_read(self) -> None:
        """By this it is known as ours."""

    def begin_read_into(self, keys: Any, parts: Any) -> Any:
        outcomes = []
        for key, into in zip(keys, parts, strict=True):
            outcomes.append(ReadOutcome.OK if key in self.pages else ReadOutcome.MISS)
            for view, data in zip(into, self.pages.get(key, []), strict=False):
                view[:] = data
        return SimpleNamespace(wait=lambda _s: True, outcomes=outcomes, cancel=lambda: None)


class Scene:
    """Three pages that were copied to the device, and a restoration that splices them."""

    def __init__(self, pair: tuple[Any, Any], tier: Tier = Tier.STORAGE) -> None:
        self.device, self.host = pair
        self.controller = controller(*pair, "direct")
        copied = device_pools.wanted_rows(self.host, slots(FROM, PAGE))
        device_pools.put(self.device, slots(TO, PAGE), copied)
        parts = parts_of(self.host, 3, slots(FROM, PAGE))
        self.kept = KeptPages(
            {key: [bytes(p) for p in page] for key, page in zip(KEYS, parts, strict=True)}
        )
        self.controller.storage_backend = self.kept
        self.counters = RestoreCounters()
        sources = ((Span(0, 3), tier),)
        keys = KEYS if tier is Tier.STORAGE else ()
        self.restoration = Restoration(
            "r", None, 3 * PAGE + 1, 0, 3, sources, keys, slots(FROM, PAGE)
        )

    def audited(self) -> dict[str, int]:
        """What an audit of the three pages counts."""
        audit = Audit(self.controller, PAGE, self.counters)
        audit.look(self.restoration, Span(0, 3), slots(TO, PAGE))
        audit.close()
        return dict(self.counters.audited_pages)

    def spoil(self) -> None:
        """One bit of the second page on the device."""
        layer = (getattr(self.device, "v_buffer", None) or self.device.kv_buffer)[1]
        layer.view(torch.uint8)[TO[1] * PAGE + 5].view(-1)[17] ^= 4


PAIRS = [
    *((f"keys and values, {layout}", lambda way=layout: pools("cpu", way)) for layout in LAYOUTS),
    *(
        (f"latents, {layout}", lambda way=layout: latent_pools("cpu", way))
        for layout in ("page_first", "page_first_direct")
    ),
    ("fp8, page_first", lambda: pools("cpu", "page_first", dtype=torch.float8_e4m3fn)),
]
each_pool = pytest.mark.parametrize(
    "made", [make for _, make in PAIRS], ids=[name for name, _ in PAIRS]
)


@each_pool
def test_a_page_read_back_lies_as_the_host_pool_lays_it(made: Any) -> None:
    scene = Scene(made())
    found = pages_of(scene.device, scene.host, slots(TO, PAGE), PAGE)
    wanted = parts_of(scene.host, 3, slots(FROM, PAGE))
    assert [[bytes(p.numpy()) for p in page] for page in found] == [
        [bytes(p) for p in page] for page in wanted
    ]


@each_pool
def test_pages_of_the_store_are_equal_and_one_flipped_bit_on_the_device_is_found(made: Any) -> None:
    scene = Scene(made())
    assert scene.audited() == {"equal": 3}
    scene.spoil()
    assert scene.audited() == {"equal": 5, "differs": 1}


def swap(scene: Scene) -> None:
    pages = scene.kept.pages
    pages[KEYS[0]], pages[KEYS[1]] = pages[KEYS[1]], pages[KEYS[0]]


TROUBLE: dict[str, tuple[Callable[[Scene], Any], dict[str, int]]] = {
    "a page in another page's slots": (swap, {"equal": 1, "differs": 2}),
    "a page that the store has no longer": (
        lambda scene: scene.kept.pages.pop(KEYS[2]),
        {"equal": 2, "not read": 1},
    ),
    "a store that was detached": (
        lambda scene: setattr(scene.controller, "storage_backend", None),
        {"not read": 3},
    ),
    "a store that raises": (lambda scene: setattr(scene.kept, "pages", None), {"not read": 3}),
}


@pytest.mark.parametrize("what", TROUBLE)
def test_what_is_not_the_stores_page_is_never_counted_as_equal(what: str) -> None:
    makes, counted = TROUBLE[what]
    scene = Scene(pools("cpu", "page_first"))
    makes(scene)
    assert scene.audited() == counted


def test_a_flipped_bit_of_a_page_from_host_memory_is_found() -> None:
    scene = Scene(pools("cpu", "page_first_direct"), Tier.HOST)
    assert scene.audited() == {"equal": 3}
    scene.spoil()
    assert scene.audited() == {"equal": 5, "differs": 1}


def test_slots_that_cannot_be_read_back_raise_nothing_into_the_scheduler() -> None:
    scene = Scene(pools("cpu", "page_first"))
    audit = Audit(scene.controller, PAGE, scene.counters)
    audit.look(scene.restoration, Span(0, 3), torch.tensor([10**6] * 3 * PAGE))
    audit.close()
    assert dict(scene.counters.audited_pages) == {"skipped": 3}


def test_closing_skips_what_a_store_that_hangs_has_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, reading, answer = Scene(pools("cpu", "page_first")), threading.Event(), threading.Event()

    def hangs(keys: Any, parts: Any) -> Any:
        reading.set()
        return SimpleNamespace(wait=lambda _s: answer.wait(20) and False, cancel=lambda: None)

    scene.kept.begin_read_into = hangs  # type: ignore[method-assign]
    monkeypatch.setattr(audit_module, "_CLOSE_S", 0.05)
    audit = Audit(scene.controller, PAGE, scene.counters)
    audit.look(scene.restoration, Span(0, 3), slots(TO, PAGE))
    assert reading.wait(20)
    for _ in range(audit_module._MOST_WAITING + 1):  # one more than may wait
        audit.look(scene.restoration, Span(0, 3), slots(TO, PAGE))
    closing = threading.Thread(target=audit.close, daemon=True)
    closing.start()
    closing.join(5)
    hung = closing.is_alive()
    answer.set()
    audit._thread.join(20)
    assert not hung and not audit._thread.is_alive()
    counted = scene.counters.audited_pages
    assert counted == {"skipped": 3 * (audit_module._MOST_WAITING + 1), "not read": 3}


def test_a_controller_that_describes_no_empty_transfer_is_audited_too() -> None:
    """As SGLang's for several pools."""
    scene = Scene(pools("cpu", "page_first"))
    described = scene.controller._l2_load_transfers
    scene.controller._l2_load_transfers = lambda host, device: described(host, device)[: len(host)]
    assert scene.audited() == {"equal": 3}


def test_pools_that_cannot_be_read_back_are_refused_with_what_to_do() -> None:
    device, host = pools("cpu", "layer_first")
    with pytest.raises(ConfigError, match=r"lab\.audit.*Leave lab\.audit away"):
        Audit(controller(device, host, "direct"), PAGE, RestoreCounters())
