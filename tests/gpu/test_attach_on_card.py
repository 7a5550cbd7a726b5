"""A computed page is compared as its forward left it, whatever is launched after that forward, and
the scheduler's thread waits for nothing.
"""

from __future__ import annotations

from typing import Any

import device_pools
import pytest
import torch
from attach_lab import PAGE, PAGES, ROW, Scene, batch_of
from device_pools import WAYS, slots
from place import CUDA, PLACES

LAST = slice((PAGES - 1) * PAGE, PAGES * PAGE)


class Forward:
    """A prefill of the last page beside others, on a stream of its own, or on the scheduler's."""

    def __init__(self, where: str, layout: str, overlap: bool) -> None:
        self.on_card = where == "cuda"
        if self.on_card:
            torch.cuda.init()
        self.scene = Scene(device_pools.pools(where, layout, page=PAGE))
        self.stream: Any = None
        if self.on_card:
            self.stream = torch.cuda.Stream() if overlap else torch.cuda.current_stream()
        self.at = slots(ROW[-1:], PAGE, where)
        pool = self.scene.device
        self.layers = [x.view(torch.uint8) for x in (*pool.k_buffer, *pool.v_buffer)]
        self.right = [layer[self.at].clone() for layer in self.layers]
        self.scene.attached()
        if self.on_card:
            torch.cuda.synchronize()

    def write(self, rows: Any) -> None:
        """What a forward does, late, on its stream."""
        if not self.on_card:
            self._write(rows)
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(50_000_000)
            self._write(rows)

    def _write(self, rows: Any) -> None:
        for layer, new in zip(self.layers, rows, strict=True):
            layer[self.at] = new

    def result(self) -> dict[str, int]:
        self.scene.settle()
        self.scene.attach.close()
        return dict(self.scene.proof.attaches)


WHERE = [
    pytest.param(*place.values, layout, overlap, marks=place.marks)
    if hasattr(place, "values")
    else (place, layout, overlap)
    for place in PLACES
    for _, layout in WAYS
    for overlap in (True, False)
    if place is CUDA or (overlap and layout != "page_head")
]


@pytest.mark.parametrize(("where", "layout", "overlap"), WHERE)
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_what_the_forward_wrote_is_compared_and_nothing_that_came_after(
    where, layout, overlap, right
):
    forward = Forward(where, layout, overlap)
    scene = forward.scene
    wrong = [torch.zeros_like(rows) for rows in forward.right]
    forward._write(wrong)  # what was there before the forward
    scene.store.go_on.clear()  # torch's mode holds for every thread: the comparing one may wait
    if forward.on_card:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = scene.attach.launching(batch_of(scene.reqs["r"], LAST.start, LAST.stop + 1))
        # The request ends at once: its row is another's before the forward has begun.
        forward.write(forward.right if right else wrong)
        scene.attach.launched(found, forward.stream)
        scene.tree.req_to_token_pool.req_to_token[1] = 0
        forward.write(wrong if right else forward.right)  # its slots too
    finally:
        if forward.on_card:
            torch.cuda.set_sync_debug_mode("default")
        scene.store.go_on.set()
    assert forward.result() == {"equal" if right else "differs": 1}
