"""Host pages that restored pages were read into, until SGLang would copy them back to host memory.

SGLang writes new pages of the tree through to host memory. Those that were restored from storage
have just been there, in bounce pages: they become the tree's instead of being freed, and no byte
goes back over the bus. Scheduler's thread; alike on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sgl_kvtier.types import PageKey


class KeptPages:
    """By page key. They are of one request each, and freed at its end at the latest; room that is
    needed for something else is made before.
    """

    def __init__(self, host_pool: Any, page_tokens: int) -> None:
        self._host, self._page = host_pool, page_tokens
        self._kept: dict[PageKey, tuple[str, torch.Tensor]] = {}

    @property
    def tokens(self) -> int:
        """Host tokens that are kept."""
        return len(self._kept) * self._page

    def keep(self, rid: str, keys: Iterable[PageKey], slots: torch.Tensor) -> None:
        """Takes these pages over from the caller. A page that is kept already is freed."""
        twice = []
        for key, page in zip(keys, slots.view(-1, self._page), strict=True):
            if key in self._kept:
                twice.append(page)
            else:
                self._kept[key] = (rid, page)
        self._free(twice)

    def take(self, keys: Sequence[PageKey]) -> dict[int, tuple[str, torch.Tensor]]:
        """Removes and returns those of these pages that are kept, by their place among them."""
        return {place: self._kept.pop(key) for place, key in enumerate(keys) if key in self._kept}

    def put_back(self, keys: Sequence[PageKey], taken: dict[int, tuple[str, torch.Tensor]]) -> None:
        """What was taken was not used."""
        for place, (rid, page) in taken.items():
            self.keep(rid, [keys[place]], page)

    def drop(self, rid: str) -> None:
        """A request is over: nothing of it will be inserted any more."""
        self._drop([key for key, (owner, _) in self._kept.items() if owner == rid])

    def drop_keys(self, rid: str, keys: Iterable[PageKey]) -> None:
        """A request will not use these pages. Those that another one brought stay."""
        self._drop([key for key in keys if key in self._kept and self._kept[key][0] == rid])

    def give_room(self, tokens: int) -> int:
        """Frees the oldest pages, until `tokens` are free or none is kept; returns tokens freed."""
        oldest = list(self._kept)[: -(-tokens // self._page)] if tokens > 0 else []
        self._drop(oldest)
        return len(oldest) * self._page

    def _drop(self, keys: list[PageKey]) -> None:
        self._free([self._kept.pop(key)[1] for key in keys])

    def _free(self, pages: list[torch.Tensor]) -> None:
        if pages:
            self._host.free(torch.cat(pages))
