"""Keeps the bounce pages of restored prefixes until SGLang would back them up to host memory.

SGLang writes new pages of its tree through to host memory. Restored pages were just there, in
bounce pages: the tree takes these over instead of copying the pages from the device again.
Scheduler's thread; the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sgl_kvtier.types import PageKey


class KeptPages:
    """Kept host pages by page key. Each belongs to one request and is freed at its end at the
    latest, or earlier when host memory is needed.
    """

    def __init__(self, host_pool: Any, page_tokens: int) -> None:
        self._host, self._page = host_pool, page_tokens
        self._kept: dict[PageKey, tuple[str, torch.Tensor]] = {}

    @property
    def tokens(self) -> int:
        """Number of host tokens kept."""
        return len(self._kept) * self._page

    def keep(self, rid: str, keys: Iterable[PageKey], slots: torch.Tensor) -> None:
        """Takes over these host pages from the caller. A page that is kept already is freed."""
        twice = []
        for key, page in zip(keys, slots.view(-1, self._page), strict=True):
            if key in self._kept:
                twice.append(page)
            else:
                self._kept[key] = (rid, page)
        self._free(twice)

    def take(self, keys: Sequence[PageKey]) -> dict[int, tuple[str, torch.Tensor]]:
        """Removes and returns the kept pages among `keys`, by their index in `keys`."""
        return {place: self._kept.pop(key) for place, key in enumerate(keys) if key in self._kept}

    def put_back(self, keys: Sequence[PageKey], taken: dict[int, tuple[str, torch.Tensor]]) -> None:
        """Keeps pages again that `take` returned and that were not used."""
        for place, (rid, page) in taken.items():
            self.keep(rid, [keys[place]], page)

    def drop(self, rid: str) -> None:
        """Frees the pages of a request that will not be inserted into the tree any more."""
        self._drop([key for key, (owner, _) in self._kept.items() if owner == rid])

    def drop_keys(self, rid: str, keys: Iterable[PageKey]) -> None:
        """Frees these pages, which the request will not use. Pages that another request loaded
        stay.
        """
        self._drop([key for key in keys if key in self._kept and self._kept[key][0] == rid])

    def give_room(self, tokens: int) -> int:
        """Frees the oldest pages, until `tokens` are freed or none is kept; returns tokens
        freed.
        """
        oldest = list(self._kept)[: -(-tokens // self._page)] if tokens > 0 else []
        self._drop(oldest)
        return len(oldest) * self._page

    def _drop(self, keys: list[PageKey]) -> None:
        self._free([self._kept.pop(key)[1] for key in keys])

    def _free(self, pages: list[torch.Tensor]) -> None:
        if pages:
            self._host.free(torch.cat(pages))
