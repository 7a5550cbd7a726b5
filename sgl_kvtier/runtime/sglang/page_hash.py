"""Loads SGLang's page hash in this process, compiling it if necessary.

Ranks that compile at the same time wait for one another (SGLang takes a lock that the kernel
releases when its holder dies).
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from array import array
from functools import cache

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.page_hash import LIMIT_S, find_ninja, is_compiled, refusal

logger = logging.getLogger(__name__)


def load(limit_s: float = LIMIT_S) -> None:
    """Loads it as SGLang does at the first prompt; fast if it was compiled before. Raises
    ConfigError, in one line that says what to install, if it cannot be compiled.
    """
    find_ninja()
    if not is_compiled():
        logger.warning("kvtier: compiling SGLang's page hash, once on this machine")
    failed: list[BaseException] = []

    def work() -> None:
        try:
            from sglang.srt.mem_cache.cpp_utils import native_hash

            native_hash._load_native_hash_module()
        except BaseException as error:
            failed.append(error)

    # In a thread, because waiting for a hanging process that holds the lock never ends.
    loading = threading.Thread(target=work, name="kvtier-page-hash", daemon=True)
    loading.start()
    loading.join(limit_s)
    if loading.is_alive():
        raise ConfigError(
            f"SGLang's page hash was not compiled within {limit_s:.0f} s: another process may be "
            "compiling it and stand still. End that process, or set TORCH_EXTENSIONS_DIR to "
            "another folder"
        )
    if failed:
        raise ConfigError(refusal(_said(failed[0])))


@cache
def names_digest() -> str:
    """A digest of how SGLang names pages: the names of two pages by their tokens, with a salt and
    an adapter, and by pairs of tokens. Releases with equal digests find each other's pages.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = array("q", range(3, 3 + 2 * _PAGE + 1))
    keys = (
        RadixKey(tokens[:-1]),
        RadixKey(tokens[:-1], "adapter", cache_salt="salt"),
        RadixKey(tokens, is_bigram=True),
    )
    names = [name for key in keys for name in get_storage_hash_str(key, None, page_size=_PAGE)]
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


_PAGE = 16
"""Tokens per page for `names_digest`."""


def _said(error: BaseException) -> str:
    """The messages of an error and its causes, the first cause first."""
    said: list[str] = []
    one: BaseException | None = error
    while one is not None and len(said) < 20:
        said.insert(0, str(one))
        one = one.__cause__ or one.__context__
    return "\n".join(said)


if __name__ == "__main__":
    try:
        load()
    except ConfigError as error:
        sys.exit(str(error))
