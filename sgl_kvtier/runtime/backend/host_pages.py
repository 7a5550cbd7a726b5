"""Pages of HiCache's host pools for the store: their shape, and views of the pool's memory, which
is read and written in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from sgl_kvtier.runtime.backend.page_shape import PageShape, RankShare

CONTIGUOUS = ("page_first", "page_first_direct", "page_head")
"""Host layouts in which a page can be read in place, as it lies in the store."""


def is_page_contiguous(pool: Any) -> bool:
    """Whether a page of this host pool lies in few pieces (K and V) that can be read in place."""
    return pool.layout in CONTIGUOUS and isinstance(getattr(pool, "kv_buffer", None), torch.Tensor)


def shape_of(pool: Any) -> PageShape:
    """The shape of a host pool's pages. Sizes that a pool lacks stay None: states have no heads."""
    return PageShape(
        layout=_plain(pool, "layout"),
        page_size=_plain(pool, "page_size"),
        dtype=str(getattr(pool, "dtype", None)),
        head_num=_plain(pool, "head_num"),
        head_dim=_plain(pool, "head_dim"),
        v_head_dim=_plain(pool, "v_head_dim"),
        kv_cache_dim=_plain(pool, "kv_cache_dim"),
        format=str(getattr(pool, "storage_format_tag", None)),
    )


def share_of(storage_config: Any) -> RankShare:
    """This rank's share, as HiCache tells its storage backends."""
    return RankShare(**{f.name: getattr(storage_config, f.name) for f in fields(RankShare)})


def _plain(pool: Any, name: str) -> Any:
    value = getattr(pool, name, None)
    return value if isinstance(value, (int, str)) else None


def says_where_pages_lie(pool: Any) -> bool:
    """Whether this host pool gives all bytes of a page: it may keep scales beside them."""
    if not hasattr(pool, "get_page_buffer_meta"):
        return True
    try:
        pool.get_page_buffer_meta(torch.arange(pool.page_size))
    except NotImplementedError:
        return False
    except ValueError:  # a layout whose pages are copied, page by page
        return True
    return True


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor. The view keeps the tensor alive."""
    return memoryview(tensor.view(torch.uint8).numpy()).cast("B")


def parts_of(pool: Any, pages: int, host_indices: torch.Tensor) -> list[list[memoryview]]:
    """Each page's pieces in a page-contiguous host pool, as views of the pool's memory.
    `host_indices`: a slot per token.
    """
    addresses, sizes = pool.get_page_buffer_meta(host_indices)
    whole = bytes_of(pool.kv_buffer.view(-1))
    base = pool.kv_buffer.data_ptr()
    pieces = [whole[a - base : a - base + n] for a, n in zip(addresses, sizes, strict=True)]
    per_page = len(pieces) // pages if pages else 0
    return [pieces[i * per_page : (i + 1) * per_page] for i in range(pages)]


def nbytes_of(parts: Sequence[Sequence[memoryview]], moved: Sequence[bool]) -> int:
    """Bytes of the pages that were moved."""
    return sum(sum(p.nbytes for p in page) for page, ok in zip(parts, moved, strict=True) if ok)
