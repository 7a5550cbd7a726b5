"""Names of pages: SGLang's chained page hashes of a request's tokens, and the session a request
belongs to.

With EAGLE and MTP SGLang names pairs of neighbouring tokens instead of tokens, since a row of such
a draft is computed from the next token as well. A page of n tokens is named by n + 1 then, and
equal names mean an equal token after the page, too.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any, Protocol

from sgl_kvtier.runtime.sglang.types import Req
from sgl_kvtier.runtime.step.session_name import session_of
from sgl_kvtier.runtime.step.tracked import Path
from sgl_kvtier.types import PageKey

_DIGEST_HEX = 64
_MOST_SESSIONS = 10_000


class Namespace(Protocol):
    """What keeps one client's pages apart from another's: of a request, or of a hint."""

    @property
    def extra_key(self) -> str | None:
        """SGLang's `extra_key`."""

    @property
    def cache_salt(self) -> str | None:
        """SGLang's `cache_salt`."""


class PageNames:
    """How the pages of one tree are named."""

    def __init__(self, page: int, *, pairs: bool) -> None:
        """`page` in tokens. `pairs`: by pairs of tokens (EAGLE, MTP)."""
        self._page, self._pairs = page, pairs

    def tokens_naming(self, pages: int) -> int:
        """How many tokens of a prompt name its first pages."""
        return pages * self._page + self._pairs

    def keys_of(
        self, tokens: Any, of: Namespace, known: tuple[PageKey, ...] = ()
    ) -> tuple[PageKey, ...]:
        """Names of the pages that `tokens` (SGLang's array of ids) name in full, in the namespace
        `of` a request or a hint, or as many of `known`, the names of their first pages. About 0.4
        microseconds per page that is not known.
        """
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        pages = max(0, len(tokens) - self._pairs) // self._page
        if pages <= len(known):
            return known[:pages]
        fresh = get_storage_hash_str(
            self._radix_key(tokens, len(known), pages, of.extra_key, of.cache_salt),
            known[-1].hex() if known else None,
            page_size=self._page,
        )
        return known + from_hex(fresh)

    def radix_key(self, path: Path, start: int, stop: int) -> Any:
        """Pages [start, stop) of a path as a key of the tree."""
        tokens = array("q", path.tokens[start * self._page : self.tokens_naming(stop)])
        return self._radix_key(tokens, 0, stop - start, path.extra_key, path.cache_salt)

    def _radix_key(
        self, tokens: Any, start: int, stop: int, extra_key: str | None, salt: str | None
    ) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(
            tokens[start * self._page : self.tokens_naming(stop)],
            extra_key,
            is_bigram=self._pairs,
            cache_salt=salt,
        )


def from_hex(hashes: Any) -> tuple[PageKey, ...]:
    """SGLang writes page hashes as hexadecimal text."""
    return tuple(PageKey(bytes.fromhex(text)) for text in hashes)


def page_key(name: str) -> PageKey:
    """A page's key by its name. A name that is no SHA-256 in hexadecimal is hashed into one."""
    if len(name) == _DIGEST_HEX:
        try:
            return PageKey(bytes.fromhex(name))
        except ValueError:
            pass
    return PageKey(hashlib.sha256(name.encode()).digest())


def compact(tokens: Any) -> array[int]:
    """Token ids in 4 bytes each; in 8 where images have names of their own among them, which are
    longer.
    """
    try:
        return array("i", tokens)
    except OverflowError:
        return array("q", tokens)


class SessionNames:
    """The session of a request: the one its client names, or the one whose last turn its prompt
    begins with.

    Clients name sessions by the fields in `session_name`. Without a name, the last full page of
    each finished request is remembered; a prompt that has that page continues that session.
    Bounded; scheduler's thread.
    """

    def __init__(self) -> None:
        self._ends: dict[PageKey, str] = {}

    def of(self, req: Req, keys: tuple[PageKey, ...]) -> str:
        """The session's name. A request that continues nothing begins a session of its own."""
        named = session_of(req)
        if named is not None:
            return named
        ends = self._ends
        return next((ends[key] for key in reversed(keys) if key in ends), f"from {req.rid}")

    def ended(self, session: str, keys: tuple[PageKey, ...]) -> None:
        """A session's turn has ended with these pages."""
        if not keys:
            return
        self._ends.pop(keys[-1], None)
        self._ends[keys[-1]] = session
        if len(self._ends) > _MOST_SESSIONS:
            del self._ends[next(iter(self._ends))]
