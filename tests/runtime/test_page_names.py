"""Token ids kept for idle sessions."""

from __future__ import annotations

from array import array

from sgl_kvtier.runtime.step.page_names import compact


def test_ids_take_four_bytes_unless_images_are_among_them() -> None:
    plain, image = compact(array("q", [0, 151_935])), compact(array("q", [5, (1 << 62) | 7]))
    assert (plain.itemsize, plain.tolist()) == (4, [0, 151_935])
    assert (image.itemsize, image.tolist()) == (8, [5, (1 << 62) | 7])
