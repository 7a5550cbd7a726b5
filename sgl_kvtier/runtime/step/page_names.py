"""Names of pages, which are SGLang's chained page hashes of a request's tokens, and the session
that a request belongs to.

With EAGLE and MTP, SGLang hashes pairs of neighbouring tokens instead of tokens, since the draft's
KV row of a token is computed from the next token as well. A page of n tokens is then named by n + 1
tokens, and equal names mean that the token after the page is equal, too.
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
    """What separates the pages of different clients: the keys of a request or of a hint."""

    @property
    def extra_key(self) -> str | None:
        """SGLang's `extra_key`."""

    @property
    def cache_salt(self) -> str | None:
        """SGLang's `cache_salt`."""


class PageNames:
    """Names the pages of one tree."""

    def __init__(self, page: int, *, pairs: bool) -> None:
        """`page` in tokens. `pairs`: pages are named by pairs of tokens (EAGLE, MTP)."""
        self._page, self._pairs = page, pairs

    def tokens_naming(self, pages: int) -> int:
        """How many tokens of a prompt are needed to name its first `pages` pages."""
        return pages * self._page + self._pairs

    def keys_of(
        self, tokens: Any, of: Namespace, known: tuple[PageKey, ...] = ()
    ) -> tuple[PageKey, ...]:
        """Names of the full pages of `tokens` (SGLang's array of ids) in the namespace `of` a
        request or hint. `known` are the names of the first pages, if computed before. About 0.4
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
        """Pages [start, stop) of a path as a key of SGLang's tree."""
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
    """Converts SGLang's page hashes, which are hexadecimal text."""
    return tuple(PageKey(bytes.fromhex(text)) for text in hashes)


def page_key(name: str) -> PageKey:
    """The key of a page by its name. A name that is no SHA-256 in hexadecimal is hashed."""
    if len(name) == _DIGEST_HEX:
        try:
            return PageKey(bytes.fromhex(name))
        except ValueError:
            pass
    return PageKey(hashlib.sha256(name.encode()).digest())


def compact(tokens: Any) -> array[int]:
    """Token ids in 4 bytes each; in 8 bytes where there are image ids, which are larger."""
    try:
        return array("i", tokens)
    except OverflowError:
        return array("q", tokens)


class SessionNames:
    """Finds a request's session: the one its client names, or the one whose last turn is a prefix
    of the request's prompt.

    Clients name sessions by the fields in `session_name`. For requests without a name, the last
    full page of each finished request is remembered; a prompt that contains that page continues
    that session. Bounded; scheduler's thread.
    """

    def __init__(self) -> None:
        self._ends: dict[PageKey, str] = {}

    def of(self, req: Req, keys: tuple[PageKey, ...]) -> str:
        """The session's name. A request that continues no session begins its own."""
        named = session_of(req)
        if named is not None:
            return named
        ends = self._ends
        return next((ends[key] for key in reversed(keys) if key in ends), f"from {req.rid}")

    def ended(self, session: str, keys: tuple[PageKey, ...]) -> None:
        """A session's turn has ended; `keys` are its pages."""
        if not keys:
            return
        self._ends.pop(keys[-1], None)
        self._ends[keys[-1]] = session
        if len(self._ends) > _MOST_SESSIONS:
            del self._ends[next(iter(self._ends))]
