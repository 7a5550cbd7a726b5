"""`kvtier purge --salt`: deletes the pages of one tenant, also while servers run.

The command opens the store as one more owner of the same pages. It erases pages in folders that no
process has open, and lists the delete for all others, which erase their own pages: running servers
within 0.1 s, others when they are started.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

from sgl_kvtier.config import StoreConfig
from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.disk.namespace import is_open
from sgl_kvtier.store.engine import DiskStore, open_store
from sgl_kvtier.store.tools.offline import Namespace, count_by_tenant

_OWNER = re.compile(r"(.*?)(?:-dp[0-9]+)?(?:-copy[0-9]+)?(?:\.[0-9]{1,4})?")
"""A folder's name: that of a rank, and a suffix that distinguishes several owners of its pages."""
_WAIT_S = 10.0
_PAUSE_S = 0.1
_ALL_THERE_IS = 1 << 50
"""A capacity so large that nothing is evicted."""


def pages_of(env: Env, namespace: Namespace, digest: str) -> int:
    """Number of a tenant's pages in the indexes."""
    return sum(held.pages for held in count_by_tenant(env, namespace) if held.digest == digest)


def purge_tenant(env: Env, namespace: Namespace, digest: str, wait_s: float = _WAIT_S) -> str:
    """Deletes a tenant's pages of one identity. Returns "yes", or "no: " and the reason."""
    root, name = os.path.split(namespace.path)
    identity = Identity(namespace.fields, name.rpartition("-")[0])
    if identity.directory_name != name:
        return "no: its folder was renamed"
    config = StoreConfig(path=root, capacity_bytes=_ALL_THERE_IS, min_free_bytes=0)
    by_rank: dict[str, list[str]] = {}
    for path in namespace.ranks:
        match = _OWNER.fullmatch(os.path.basename(path))
        by_rank.setdefault(match[1] if match else os.path.basename(path), []).append(path)
    try:
        with contextlib.ExitStack() as opened:
            for rank, paths in by_rank.items():
                free = [path for path in paths if not is_open(env, path)]
                for _ in free or paths[:1]:
                    store = _own(config, identity, rank, env, writes=bool(free))
                    opened.callback(store.close)
                    store.delete_tenant(digest)
            deadline = time.monotonic() + wait_s
            while (left := pages_of(env, namespace, digest)) and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
    except (StoreError, OSError) as error:
        return f"no: {error}"
    if not left:
        return "yes"
    return (
        f"no: {left} pages are still there. A server that follows no other one's deletes, or one "
        "of an earlier version, has them open: stop it, and say this again"
    )


def _own(
    config: StoreConfig, identity: Identity, rank: str, env: Env, *, writes: bool
) -> DiskStore:
    """Opens a store in a folder that no process owns; with `writes` preferably one with pages."""
    alike = re.escape(rank) + r"(?:-dp[0-9]+)?(?:-copy[0-9]+)?"
    return open_store(config, identity, rank, alike=alike, writes=writes, env=env)
